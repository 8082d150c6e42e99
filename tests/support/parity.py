"""An unsharded and a sharded copy of a model, trained side by side and compared.

    def test_blocks_train_as_unsharded() -> None:
        run_ranks(2, trains, Stack, (Block,), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)

A *step* does forward and backward for one rank's batch. The unsharded copy takes it once per rank,
so its gradient is the sum over all batches; the sharded one takes it for its own batch. After each
step these are compared: the losses, all gradients (None where a whole group of the unsharded copy
has none), all parameters after an update, and the memory held."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy
from fsdp_compat._engine.group import Group
from fsdp_compat._engine.unit import Residency
from fsdp_compat._state.units import clean_name
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import DIM, NUM_TOKENS, Block
from tests.support.sampling import sample

RTOL, ATOL = 2e-5, 1e-6  # of all comparisons with the unsharded copy

both_forms = pytest.mark.parametrize("use_orig_params", [False, True])
# One form, where both would cost much and others of the file have them; or both, if all is tested.
flat_form = pytest.mark.parametrize("use_orig_params", sample([False, True], 0))
original_form = pytest.mark.parametrize("use_orig_params", sample([False, True], 1))
both_strategies = pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
)


@dataclass(frozen=True)
class Turn:
    """The rank whose batch a step is for."""

    rank: int
    # Does nothing on the unsharded copy.
    no_sync: Callable[[], contextlib.AbstractContextManager[None]]


Step = Callable[[nn.Module, Tensor, Turn], Tensor]  # does forward and backward, returns the loss


# -- steps and batches


def square(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss."""
    return model(x).float().pow(2).mean()


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


def one_backward(model: nn.Module, x: Tensor, turn: Turn) -> Tensor:
    """The usual step."""
    return backward(square(model, x))


def accumulates(pattern: str, model: nn.Module, x: Tensor, turn: Turn) -> Tensor:
    """Take a step of several backwards: one under no_sync for each n of ``pattern``, one with sync
    for each s."""
    total = torch.zeros(())
    for index, letter in enumerate(pattern):
        with turn.no_sync() if letter == "n" else contextlib.nullcontext():
            total = total + backward(square(model, x * (index + 1)))
    return total


def accumulates_mean(pattern: str, model: nn.Module, x: Tensor, turn: Turn) -> Tensor:
    """Take the same step as ``accumulates`` with smaller losses, which are divided by their
    number."""
    total = torch.zeros(())
    for index, letter in enumerate(pattern):
        with turn.no_sync() if letter == "n" else contextlib.nullcontext():
            total = total + backward(square(model, x * (0.2 + 0.3 * index)) / len(pattern))
    return total


def vectors(generator: torch.Generator) -> Tensor:
    return torch.randn(4, DIM, generator=generator)


def sequences(generator: torch.Generator) -> Tensor:
    return torch.randn(3, 5, DIM, generator=generator)


def wide_vectors(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 64, generator=generator)


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(NUM_TOKENS, (3, 5), generator=generator)


def assert_close(got: Tensor, expected: Tensor, what: str, tolerance: float | None = None) -> None:
    """tolerance: relative to the largest expected element; None: RTOL and ATOL."""
    got, expected = got.detach().double(), expected.detach().double()
    assert got.shape == expected.shape, (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    )
    largest = expected.abs().max().item() if expected.numel() else 0.0
    rtol, atol = (RTOL, ATOL) if tolerance is None else (0.0, tolerance * largest)
    if not torch.allclose(got, expected, rtol=rtol, atol=atol):
        difference = (got - expected).abs().max().item()
        raise AssertionError(
            f"{what}: largest difference {difference:.3e}, largest value "
            f"{expected.abs().max().item():.3e}"
        )


def assert_all_close(
    got: Sequence[Tensor], expected: Sequence[Tensor], what: str, tolerance: float | None = None
) -> None:
    """Compare tensors one by one only if they differ by more than rounding as a whole."""
    shapes = [tuple(t.shape) for t in got]
    if shapes == [tuple(t.shape) for t in expected] and tolerance is None:
        one, other = (
            torch.cat([t.detach().double().flatten() for t in ts]) for ts in (got, expected)
        )
        if torch.allclose(one, other, rtol=RTOL, atol=ATOL):
            return
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_close(one, other, f"{what}, number {index} of shape {tuple(one.shape)}", tolerance)


# -- the two copies


def train(
    build: Callable[[], nn.Module],
    units: Collection[type[nn.Module]] = (Block,),
    step: Step = one_backward,
    *,
    num_steps: int = 2,
    batch: Callable[[torch.Generator], Tensor] = vectors,
    as_a_user: bool = False,
    **options: Any,
) -> Pair:
    """Train both copies for some steps and compare after each step. as_a_user: after the last one
    also through the public interface."""
    pair = make_pair(build, units, **options)
    for index in range(num_steps):
        pair.step(step, batch=batch, as_a_user=as_a_user and index == num_steps - 1)
    return pair


def trains(*args: Any, **kwargs: Any) -> None:
    """Run ``train`` for run_ranks, without the Pair, which cannot be pickled."""
    train(*args, **kwargs)


def make_pair(
    build: Callable[[], nn.Module],
    units: Collection[type[nn.Module]] = (Block,),
    *,
    seed: int = 0,
    replicas: int = 1,
    **options: Any,
) -> Pair:
    """Return two copies that ``build`` makes, one of them sharded. Collective.

    options: for FSDP. replicas: if more than 1, the number of replicas of a hybrid mesh.
    """
    plain, model = _seeded(build, seed), _seeded(build, seed)
    if replicas > 1:
        options.setdefault("sharding_strategy", ShardingStrategy.HYBRID_SHARD)
        options["device_mesh"] = init_device_mesh(
            "cpu", (replicas, dist.get_world_size() // replicas)
        )
    return Pair(plain, FSDP(model, auto_wrap_policy=ModuleWrapPolicy(units), **options))


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build()


class Pair:
    """An unsharded and a sharded copy, each with an optimizer."""

    def __init__(self, plain: nn.Module, model: FSDP) -> None:
        self.plain, self.model = plain, model
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.plain_optim = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
        self.optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        self._num_batches = itertools.count()
        named = dict(plain.named_parameters(remove_duplicate=False))
        self._matches = [
            (group, [named[name] for name in names]) for group, names in _groups(model)
        ]
        self.tolerance: float | None = None  # of comparisons, see `assert_close`

    # -- for tests

    def batches(self, batch: Callable[[torch.Generator], Tensor] = vectors) -> list[Tensor]:
        """Return every rank's batch, the same list on all ranks and a new one in each call."""
        generator = torch.Generator().manual_seed(100 + next(self._num_batches))
        return [batch(generator) for _ in range(self.ranks)]

    def step(
        self,
        step: Step = one_backward,
        *,
        batch: Callable[[torch.Generator], Tensor] = vectors,
        idle: bool = True,
        zeros: bool = False,
        as_a_user: bool = False,
    ) -> None:
        """Take a step on both copies, compare, and update. Collective.

        idle: check that every unit is sharded afterwards. zeros: groups have gradients as a whole,
        so give zeros to parameters of the unsharded copy without a gradient if others of their
        group have one (momentum depends on it). as_a_user: also compare summon_full_params and
        state_dict.
        """
        batches = self.batches(batch)
        losses = [
            step(self.plain, x.clone(), Turn(rank, contextlib.nullcontext))
            for rank, x in enumerate(batches)
        ]
        self.average_plain_gradients()
        if zeros:
            self._complete_groups()
        loss = step(self.model, batches[self.rank].clone(), Turn(self.rank, self.model.no_sync))
        assert_close(loss, losses[self.rank], "loss")
        self.compare_and_update(idle=idle, as_a_user=as_a_user)

    def compare_and_update(self, *, idle: bool = True, as_a_user: bool = False) -> None:
        if idle:
            self.assert_idle()
        self.assert_gradients_equal()
        if as_a_user:
            self.assert_shown_equal()
        self.plain_optim.step()
        self.optim.step()
        self.plain_optim.zero_grad()
        self.optim.zero_grad()
        self.assert_parameters_equal()
        if as_a_user:
            self.assert_state_equal()

    def average_plain_gradients(self) -> None:
        for p in self.plain.parameters():
            if p.grad is not None:
                p.grad = (p.grad.to_dense() if p.grad.is_sparse else p.grad) / self.ranks

    def _complete_groups(self) -> None:
        for _, expected in self._matches:
            if any(p.grad is not None for p in expected):
                for p in expected:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad

    # -- so that rounding errors of one step do not carry over to the next

    @torch.no_grad()
    def copy_parameters(self) -> None:
        """Copy the parameters of the sharded copy to the unsharded one. Collective."""
        for group, mine in self._matches:
            for value, p in zip(group.store.whole(group.gather_full()), mine, strict=True):
                p.copy_(value)

    def copy_gradients(self) -> None:
        """Replace the unsharded copy's gradients by those of the sharded copy. Collective."""
        for group, mine in self._matches:
            for value, p in zip(_gathered_gradients(group), mine, strict=True):
                if p.grad is not None:
                    p.grad.copy_(value)

    # -- comparisons that do not disturb the engine

    def assert_gradients_equal(self) -> None:
        """Collective."""
        own = [
            [param.grad for param, _ in group.store.sharded_params] for group, _ in self._matches
        ]
        counts = torch.tensor(
            [
                [any(grad is not None for grad in its) for its in own],
                [g.gradients.sharded.num_held > 0 for g, _ in self._matches],
            ]
        )
        dist.all_reduce(counts := counts.long())
        for (group, expected), num_present, num_holding in zip(
            self._matches, *counts.tolist(), strict=True
        ):
            where = f"{group.name}, parameters of {group.store.dtype}"
            assert num_present in (0, num_holding), (
                f"{where}: gradients on {num_present} of {num_holding} ranks with a part"
            )
            if num_present == 0:
                assert all(p.grad is None for p in expected), (
                    f"{where}: no gradients, the unsharded copy has some"
                )
                continue
            assert any(p.grad is not None for p in expected), (
                f"{where}: gradients, the unsharded copy has none"
            )
            wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in expected]
            assert_all_close(
                _gathered_gradients(group), wanted, f"{where}: gradients", self.tolerance
            )

    def assert_parameters_equal(self) -> None:
        """Collective."""
        for group, expected in self._matches:
            got = group.store.whole(group.gather_full())
            assert_all_close(got, expected, f"{group.name}: parameters", self.tolerance)

    def assert_idle(self) -> None:
        """Assert that every unit is sharded and shows it, and that no communication is in
        flight."""
        for unit in self.model._runtime.units:
            assert unit.residency is Residency.SHARDED, (
                f"{unit.label} was left {unit.residency.name}"
            )
            assert not unit.view.shows_unsharded, f"{unit.label} shows full parameters"
            assert not unit.calls and not unit.running, f"{unit.label} is marked as running"
            for group in unit.groups:
                assert group.resident_nbytes == 0, (
                    f"{group.name}: {group.resident_nbytes} bytes were left"
                )
                assert group.gradients.reduction is None, f"{group.name}: a reduction was left"
                assert not any(
                    comm.ranks > 1 and hasattr(comm, "connections") and comm.connections.sent
                    for comm in (group.shard, group.replica)
                ), f"{group.name}: sends are in flight"

    # -- comparisons through the public interface

    def assert_shown_equal(self) -> None:
        """Collective."""
        expected = dict(self.plain.named_parameters(remove_duplicate=False))
        with FSDP.summon_full_params(self.model, writeback=False, with_grads=True):
            shown = {
                _clean(name): p for name, p in self.model.named_parameters(remove_duplicate=False)
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
        state = {_clean(name): value for name, value in self.model.state_dict().items()}
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert_close(state[name], value, f"{name!r} in the state dict", self.tolerance)


def _clean(name: str) -> str:
    """Return a name without the parts that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def _groups(model: FSDP) -> Iterator[tuple[Group, list[str]]]:
    """Yield every group of every unit, with the names of its parameters in the unsharded copy."""
    for path, child in model.named_modules():
        for group in child._unit.groups if isinstance(child, FSDP) else ():
            names = [f"{path}.{member.name}".lstrip(".") for member in group.store.orig_params]
            yield group, [_clean(clean_name(name)) for name in names]


def _gathered_gradients(group: Group) -> list[Tensor]:
    """Return the whole gradients. Collective."""
    store = group.store
    own = torch.zeros(store.numel, dtype=store.dtype)
    for (param, _), place in zip(store.sharded_params, store.grads(own), strict=True):
        grad = param.grad
        if grad is not None:
            assert grad.shape == param.shape, (
                f"{group.name}: gradient {tuple(grad.shape)}, parameter {tuple(param.shape)}"
            )
            place.copy_(grad)
    return store.whole(group.gather_full(own))
