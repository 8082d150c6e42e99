"""An unsharded and a sharded copy of a model, trained side by side and compared.

    def test_blocks_train_as_unsharded() -> None:
        run_ranks(2, trains, Stack, (Block,), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)

A *step* is a function that does forward and backward for one batch, and returns the loss. The
unsharded copy takes it for the batches of all ranks, and averages the gradients; the sharded one
takes it for its own. Then losses are compared, gradients (None where a whole group of the unsharded
copy has none), parameters after an update, and what is left in memory. Every rank compares what it
holds, which compares everything, without a message.

A ``Pair`` takes a model of either front end."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy
from fsdp_compat._engine.group import Group
from fsdp_compat._engine.runtime import Runtime
from fsdp_compat._engine.unit import Residency
from fsdp_compat._state.units import model_unit_of
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.memory import group_nbytes
from tests.support.models import DIM, NUM_TOKENS, Block
from tests.support.sampling import sample

RTOL, ATOL = 2e-5, 1e-6  # of all comparisons with the unsharded copy

both_forms = pytest.mark.parametrize("use_orig_params", [False, True])
# One form, where both would cost much and others of the file have them; or both, if all is tested.
original_form = pytest.mark.parametrize("use_orig_params", sample([False, True], 1))
both_strategies = pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
)

GRADIENT_MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": contextlib.nullcontext,
}

Step = Callable[[Any, Tensor], Tensor]
Batch = Callable[[torch.Generator], Any]


# -- steps and batches


def square(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss."""
    return model(x).float().pow(2).mean()


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


def one_backward(model: nn.Module, x: Tensor) -> Tensor:
    """The usual step."""
    return backward(square(model, x))


def two_backwards(model: nn.Module, x: Tensor) -> Tensor:
    """Two backwards over one graph."""
    loss = square(model, x)
    loss.backward(retain_graph=True)
    return backward(loss)


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Inside the context backwards reduce no gradients. Nothing on an unsharded model."""
    set_sync = getattr(model, "set_requires_gradient_sync", lambda flag: None)
    set_sync(False)
    try:
        with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
            yield
    finally:
        set_sync(True)


def accumulates(pattern: str, model: nn.Module, x: Tensor) -> Tensor:
    """Take a step of several backwards: one under no_sync for each n of ``pattern``, one with sync
    for each s."""
    return _in_pattern(pattern, model, lambda index: square(model, x * (index + 1)))


def accumulates_mean(pattern: str, model: nn.Module, x: Tensor) -> Tensor:
    """Take the same step as ``accumulates`` with smaller losses, which are divided by their
    number."""
    return _in_pattern(
        pattern, model, lambda index: square(model, x * (0.2 + 0.3 * index)) / len(pattern)
    )


def _in_pattern(pattern: str, model: nn.Module, loss_of: Callable[[int], Tensor]) -> Tensor:
    total = torch.zeros(())
    for index, letter in enumerate(pattern):
        with no_sync(model) if letter == "n" else contextlib.nullcontext():
            total = total + backward(loss_of(index))
    return total


def random_step(seed: int, model: nn.Module, x: Tensor) -> Tensor:
    """Take a step of a ``Program``, with one or two backwards."""
    rng = random.Random(seed)
    style = rng.randrange(5)
    first, second = model(x, rng)
    if style == 4:  # two graphs at once
        second = second + model(x * 0.5, rng)[0]
    losses = [loss for loss in (first, second) if loss.requires_grad]
    if not losses:
        return first.detach()
    if style < 2:
        with no_sync(model) if style == 0 else contextlib.nullcontext():
            losses[0].backward(retain_graph=True)
        losses[-1].backward()
    else:
        torch.stack(losses).sum().backward()
    return losses[0].detach()


def vectors(generator: torch.Generator) -> Tensor:
    return torch.randn(4, DIM, generator=generator)


def sequences(generator: torch.Generator) -> Tensor:
    return torch.randn(3, 5, DIM, generator=generator)


def wide_vectors(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 64, generator=generator)


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(NUM_TOKENS, (3, 5), generator=generator)


# -- values


def assert_close(got: Tensor, expected: Tensor, what: str, tolerance: float | None = None) -> None:
    """tolerance: relative to the largest expected element; None: RTOL and ATOL."""
    got, expected = got.detach().double(), expected.detach().double()
    assert got.shape == expected.shape, (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    )
    largest = expected.abs().max().item() if expected.numel() else 0.0
    rtol, atol = (RTOL, ATOL) if tolerance is None else (0.0, tolerance * largest)
    difference = (got - expected).abs().max().item() if got.numel() else 0.0
    assert torch.allclose(got, expected, rtol=rtol, atol=atol), (
        f"{what}: largest difference {difference:.3e}, largest value {largest:.3e}"
    )


def assert_same_values(
    got: dict[str, Any], expected: dict[str, Any], what: str, tolerance: float | None = None
) -> None:
    """tolerance: see ``assert_close``."""
    assert list(got) == list(expected), f"{what}: {list(got)}, expected {list(expected)}"
    for name, value in expected.items():
        _assert_same(got[name], value, f"{what} of {name!r}", tolerance)


def _assert_same(
    got: Tensor | None, expected: Tensor | None, what: str, tolerance: float | None
) -> None:
    if got is None or expected is None:
        found = ["None" if each is None else "a tensor" for each in (got, expected)]
        assert found[0] == found[1], f"{what}: {found[0]}, expected {found[1]}"
    elif expected.dtype.is_floating_point:
        assert_close(got, expected, what, tolerance)
    else:
        assert torch.equal(got, expected), what


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a DTensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Collective, on a DTensor."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Collective."""
    return {name: whole(p).clone() for name, p in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Collective."""
    with (
        FSDP.summon_full_params(model, writeback=False, with_grads=True)
        if isinstance(model, FSDP)
        else contextlib.nullcontext()
    ):
        return {
            name: None if p.grad is None else whole(p.grad).clone()
            for name, p in model.named_parameters()
        }


def own_part(value: Tensor | None, like: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return what this rank has of ``like``, and the same part of a whole ``value``. Collective
    where ``like`` is sharded in an unusual way."""
    if like is None:
        return None, value
    if value is None or not isinstance(like, DTensor) or not _is_usual(like):
        return whole(like), value
    mesh, placements = like.device_mesh, like.placements
    mine = distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
    return local(like), mine.to(like.device)


def _is_usual(tensor: DTensor) -> bool:
    return all(
        type(placement) is Replicate or (type(placement) is Shard and placement.dim < tensor.dim())
        for placement in tensor.placements
    )


def own_gradient(group: Group) -> Tensor | None:
    """Return the gradients of what this rank has of a group, [S], or None if there are none."""
    total = torch.zeros_like(group.store.shard)  # type: ignore[attr-defined]
    params = [param for param, _ in group.store.sharded_params]
    for param, place in zip(params, group.store.grads(total), strict=True):
        if param.grad is not None:
            assert param.grad.shape == param.shape, (
                f"{group.name}: gradient {tuple(param.grad.shape)}, parameter {tuple(param.shape)}"
            )
            place.copy_(param.grad)
    return total if any(param.grad is not None for param in params) else None


def groups_of(model: nn.Module) -> Iterator[tuple[Group, list[str]]]:
    """Yield every group of every unit, with the names of its parameters in the unsharded copy."""
    for path, child in model.named_modules():
        found = model_unit_of(child)
        for group in found.unit.groups if found is not None else ():
            names = [f"{path}.{member.name}".lstrip(".") for member in group.store.orig_params]
            yield group, [plain_name(name) for name in names]


def plain_name(name: str) -> str:
    """Return a name without what wrappers, checkpoints and torch.compile add."""
    return re.sub("(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)[.]", "", name)


def units_of(model: nn.Module) -> dict[str, FSDP]:
    """Return every unit by name, outer ones first; the root is ""."""
    named = ((plain_name(f"{name}."), module) for name, module in model.named_modules())
    return {name.rstrip("."): module for name, module in named if isinstance(module, FSDP)}


def reshard(model: nn.Module) -> None:
    """Show all parameters of modules that ``fully_shard`` has sharded as DTensors."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):
            module.reshard()


def assert_idle(runtime: Runtime) -> None:
    """Assert that every unit is sharded and shows it, that no communication is in flight, and that
    only shards, gradients and optimizer state hold memory; and parameters that were not gathered
    for backward, but are kept for further evaluations."""
    assert not runtime._stack
    assert not runtime.backward.is_running
    for unit in runtime.units:
        kept = unit.kept is not None and not unit.options.reshard_after_forward
        is_sharded = unit.residency is Residency.SHARDED
        assert kept or is_sharded, f"{unit.label} was left {unit.residency.name}"
        assert not unit.view.shows_unsharded, f"{unit.label} shows full parameters"
        assert not unit.calls and not unit.running, f"{unit.label} is marked as running"
        for group in () if kept else unit.groups:
            assert group_nbytes(group) == 0, f"{group.name}: {group_nbytes(group)} bytes were left"
            assert group.gradients.reduction is None, f"{group.name}: a reduction was left"
            assert not any(
                comm.ranks > 1 and hasattr(comm, "connections") and comm.connections.sent
                for comm in (group.shard, group.replica)
            ), f"{group.name}: sends are in flight"


# -- the two copies


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def make_pair(
    build: Callable[[], nn.Module],
    units: Collection[type[nn.Module]] = (Block,),
    *,
    seed: int = 0,
    replicas: int = 1,
    batch: Batch = vectors,
    **options: Any,
) -> Pair:
    """Return two copies that ``build`` makes, one of them wrapped. Collective.

    options: for FSDP. replicas: if more than 1, the number of replicas of a hybrid mesh.
    """
    if replicas > 1:
        options.setdefault("sharding_strategy", ShardingStrategy.HYBRID_SHARD)
        options["device_mesh"] = init_device_mesh(
            "cpu", (replicas, dist.get_world_size() // replicas)
        )
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy(units))
    return Pair(seeded(build, seed), FSDP(seeded(build, seed), **options), batch=batch)


def train(
    build: Callable[[], nn.Module],
    units: Collection[type[nn.Module]] = (Block,),
    step: Step | Sequence[Step] = one_backward,
    *,
    num_steps: int = 2,
    as_a_user: bool = False,
    **options: Any,
) -> Pair:
    """Train both copies for some steps and compare after each step. as_a_user: after the last one
    also through the public interface."""
    pair = make_pair(build, units, **options)
    for index in range(num_steps):
        pair.step(step, as_a_user=as_a_user and index == num_steps - 1)
    return pair


def trains(*args: Any, **kwargs: Any) -> None:
    """Run ``train`` for run_ranks, without the Pair, which cannot be pickled."""
    train(*args, **kwargs)


class Pair:
    """An unsharded and a sharded copy, each with an optimizer."""

    def __init__(
        self,
        plain: Any,
        model: Any,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = sgd,
        batch: Batch = vectors,
        data_ranks: int | None = None,
        tolerance: float | None = None,
    ) -> None:
        """data_ranks: the number of ranks with a batch of their own; None: all. tolerance: see
        ``assert_close``."""
        self.plain, self.model = plain, model
        self.ranks = data_ranks or dist.get_world_size()
        self.rank = dist.get_rank() * self.ranks // dist.get_world_size()
        self.batch, self.tolerance = batch, tolerance
        self.runtime: Runtime | None = getattr(model, "_runtime", None)
        self.groups: list[tuple[Group, list[nn.Parameter]]] = []
        if self.runtime is not None:
            named = dict(plain.named_parameters(remove_duplicate=False))
            self.groups = [(g, [named[name] for name in names]) for g, names in groups_of(model)]
        self.plain_optim, self.optim = (optimizer(m.parameters()) for m in (plain, model))
        self._num_batches = itertools.count()

    # -- for tests

    def batches(self, batch: Batch | None = None) -> list[Any]:
        """Return every rank's batch, the same list on all ranks and a new one in each call."""
        generator = torch.Generator().manual_seed(100 + next(self._num_batches))
        return [(batch or self.batch)(generator) for _ in range(self.ranks)]

    def step(
        self,
        step: Step | Sequence[Step] = one_backward,
        *,
        batch: Batch | None = None,
        update: bool = True,
        idle: bool = True,
        zeros: bool = False,
        as_a_user: bool = False,
    ) -> None:
        """Take a step on both copies, compare, and update. Collective.

        step: a list has one for each rank's batch. idle: check that every unit is sharded
        afterwards. zeros: groups have gradients as a whole, so give zeros to parameters of the
        unsharded copy without a gradient if others of their group have one (momentum depends on
        it). as_a_user: also compare summon_full_params and state_dict.
        """
        self.backwards(step, batch)
        if zeros:
            self._complete_groups()
        if update:
            self.compare_and_update(idle=idle, as_a_user=as_a_user)
        else:
            self.compare_gradients()

    def backwards(
        self, step: Step | Sequence[Step] = one_backward, batch: Batch | None = None
    ) -> None:
        """Run ``step`` on both copies, and compare the losses. Collective."""
        batches = self.batches(batch)
        steps = [step] * self.ranks if callable(step) else step
        losses = self.plain_backwards(steps, batches)
        loss = steps[self.rank](self.model, batches[self.rank].clone())
        assert_close(loss, losses[self.rank], "loss", self.tolerance)

    def plain_backwards(self, steps: Sequence[Step], batches: Sequence[Any]) -> list[Tensor]:
        """Run the steps on the unsharded copy, add the average of their gradients to ``.grad``, and
        return the losses."""
        parameters = list(self.plain.parameters())
        earlier = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        losses = [step(self.plain, x.clone()) for step, x in zip(steps, batches, strict=True)]
        self.average_plain_gradients()
        for p, grad in zip(parameters, earlier, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad
        return losses

    def average_plain_gradients(self) -> None:
        """Divide the gradients of the unsharded copy, which are sums over the ranks."""
        for p in self.plain.parameters():
            if p.grad is not None:
                p.grad = (p.grad.to_dense() if p.grad.is_sparse else p.grad) / self.ranks

    def compare_and_update(self, *, idle: bool = True, as_a_user: bool = False) -> None:
        if idle and self.runtime is not None:
            assert_idle(self.runtime)
        self.compare_gradients()
        if as_a_user:
            self.assert_shown_equal()
        self.update()
        if as_a_user:
            self.assert_state_equal()

    def update(self) -> None:
        """Step both optimizers, and compare the parameters. Collective."""
        for optim in (self.plain_optim, self.optim):
            optim.step()
            optim.zero_grad()
        self.compare_parameters()

    def _complete_groups(self) -> None:
        for _, expected in self.groups:
            if any(p.grad is not None for p in expected):
                for p in expected:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad

    # -- comparisons of what this rank holds

    def compare_gradients(self) -> None:
        """Collective for ``fully_shard``."""
        if not self.groups:
            reshard(self.model)  # unsharded parameters have no gradients
            self._compare_by_name("gradient", lambda p: p.grad)
        for group, plain in self.groups:
            sharded = [param for param, _ in group.store.sharded_params]
            trained = [param for param in sharded if param.requires_grad]
            if any(param.numel() for param in trained or sharded):
                expected = None
                if any(p.grad is not None for p in plain):
                    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain]
                    expected = self._own(group, grads)
                self._compare(own_gradient(group), expected, f"{group.name}: gradients")

    def compare_parameters(self) -> None:
        """Collective for ``fully_shard``."""
        if not self.groups:
            reshard(self.model)
            self._compare_by_name("parameter", lambda p: p.detach())
        for group, plain in self.groups:
            shard = group.store.shard  # type: ignore[attr-defined]
            self._compare(shard, self._own(group, plain), f"{group.name}: parameters")

    def _compare_by_name(self, what: str, of: Callable[[Tensor], Tensor | None]) -> None:
        expected = {name: of(p) for name, p in self.plain.named_parameters()}
        found = {plain_name(n): of(p) for n, p in self.model.named_parameters()}
        assert list(found) == list(expected), f"{list(found)}, expected {list(expected)}"
        for name, value in expected.items():
            self._compare(*own_part(value, found[name]), f"{what} of {name!r}")

    def _compare(self, got: Tensor | None, expected: Tensor | None, what: str) -> None:
        _assert_same(got, expected, what, self.tolerance)

    @staticmethod
    def _own(group: Group, wholes: Sequence[Tensor]) -> Tensor:
        """Return this rank's part of whole tensors, [S]."""
        expected = torch.zeros_like(group.store.shard)  # type: ignore[attr-defined]
        wholes = [each.to(expected.dtype) for each in wholes]
        group.store.take_from_whole(wholes, expected)  # type: ignore[attr-defined]
        return expected

    # -- so that rounding errors of one step do not carry over to the next

    @torch.no_grad()
    def copy_parameters(self) -> None:
        """Copy the parameters of the sharded copy to the unsharded one. Collective."""
        for p, value in self._by_name(lambda p: p.detach()):
            p.copy_(whole(value))
        for group, plain in self.groups:
            for value, p in zip(group.store.whole(group.gather_full()), plain, strict=True):
                p.copy_(value)

    def copy_gradients(self) -> None:
        """Replace the unsharded copy's gradients by those of the sharded copy. Collective."""
        for p, value in self._by_name(lambda p: p.grad):
            if p.grad is not None and value is not None:
                p.grad.copy_(whole(value))
        for group, plain in self.groups:
            own = own_gradient(group)
            full = group.gather_full(torch.zeros_like(group.store.shard) if own is None else own)
            for value, p in zip(group.store.whole(full), plain, strict=True):
                if p.grad is not None:
                    p.grad.copy_(value)

    def _by_name(self, of: Callable[[Tensor], Tensor | None]) -> Iterator[tuple[nn.Parameter, Any]]:
        """Yield parameters of the unsharded copy with values of the other; none of groups."""
        if not self.groups:
            reshard(self.model)
            for p, sharded in zip(self.plain.parameters(), self.model.parameters(), strict=True):
                yield p, of(sharded)

    # -- comparisons through the public interface

    def assert_idle(self) -> None:
        assert self.runtime is not None
        assert_idle(self.runtime)

    @torch.no_grad()
    def compare_outputs(self, batch: Batch | None = None) -> None:
        """Compare what both return without gradients. Collective."""
        x = self.batches(batch)[self.rank]
        assert_close(self.model(x.clone()), self.plain(x.clone()), "output", self.tolerance)

    def assert_shown_equal(self) -> None:
        """Collective."""
        expected = dict(self.plain.named_parameters(remove_duplicate=False))
        with FSDP.summon_full_params(self.model, writeback=False, with_grads=True):
            shown = {
                plain_name(name): p
                for name, p in self.model.named_parameters(remove_duplicate=False)
            }
            assert shown.keys() == expected.keys()
            for name, p in expected.items():
                assert_close(shown[name], p, f"parameter {name!r} in summon_full_params")
                grad = shown[name].grad
                assert grad is not None or p.grad is None, (
                    f"{name!r} has no gradient in summon_full_params"
                )
                if grad is not None:
                    expected_grad = torch.zeros_like(p) if p.grad is None else p.grad
                    assert_close(grad, expected_grad, f"gradient of {name!r} in summon_full_params")

    def assert_state_equal(self) -> None:
        """Collective."""
        expected = self.plain.state_dict()
        state = {plain_name(name): value for name, value in self.model.state_dict().items()}
        assert sorted(state) == sorted(expected)  # checkpoint_wrapper changes the order
        for name, value in expected.items():
            assert state[name].dtype == value.dtype, name
            found = whole(state[name])
            assert_close(found, value, f"{name!r} in the state dict", self.tolerance)
