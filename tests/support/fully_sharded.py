"""``fully_shard`` of fsdp_compat or of torch, and an unsharded copy beside a sharded one.

Tests take the names from ``api``, which stands for fsdp_compat. This shows whether torch's FSDP2
does what a test expects:

    FSDP_COMPAT_TEST_FULLY_SHARD=torch pytest tests/fully_shard/test_methods.py"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.models import Block
from tests.support.parity import assert_close, square, vectors

# where each library keeps names that are not at its top level
_ELSEWHERE = {
    "ours": ("fsdp_compat",),
    "torch": (
        "torch.distributed.fsdp",
        "torch.distributed.fsdp._fully_shard",
        "torch.distributed.fsdp._fully_shard._fsdp_common",
        "torch.distributed.fsdp._fully_shard._fsdp_api",
    ),
}


class Library:
    """The public names of one implementation, imported when they are first used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        for path in _ELSEWHERE[self.name]:
            module = importlib.import_module(path)
            if hasattr(module, attribute):
                return getattr(module, attribute)
        raise AttributeError(f"{self.name} has no {attribute!r}")


OURS, TORCH = Library("ours"), Library("torch")
api = {"ours": OURS, "torch": TORCH}[os.environ.get("FSDP_COMPAT_TEST_FULLY_SHARD", "ours")]


# torch's FSDP2 refuses parameters of integers before
TORCH_TAKES_INTEGERS = torch.__version__ >= "2.13"


# -- models


def shard_all(
    model: nn.Module,
    classes: Collection[type[nn.Module]] = (Block,),
    library: Library = api,
    **options: Any,
) -> Any:
    """Apply ``fully_shard`` to every module of ``classes``, innermost first, and to the root."""
    inner = [m for m in model.modules() if m is not model and isinstance(m, tuple(classes))]
    for module in [*reversed(inner), model]:
        library.fully_shard(module, **options)
    return model


def sharded_modules(model: nn.Module, library: Library = api) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, library.FSDPModule)]


def require_sync(model: nn.Module, flag: bool) -> None:
    """Nothing on an unsharded model."""
    if isinstance(model, api.FSDPModule):
        model.set_requires_gradient_sync(flag)


def is_sharded(module: nn.Module) -> bool:
    """True if the module's own parameters are shown as DTensors, False if as plain tensors."""
    (kind,) = {isinstance(p, DTensor) for p in module.parameters(recurse=False)}
    return kind


# -- values


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a DTensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Collective, on a DTensor."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_parts(
    values: dict[str, Any], like: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what this rank has of the tensors of ``like``, and of whole ones of the same names.
    Comparing them on all ranks compares everything, without a message. Collective where tensors
    are sharded in an unusual way."""
    parts = {name: _own_part(value, like.get(name)) for name, value in values.items()}
    found = {
        name: value if value is None else local(value) if _is_simple(value) else whole(value)
        for name, value in like.items()
    }
    return found, parts


def _is_simple(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and all(
        type(placement) is Replicate or (type(placement) is Shard and placement.dim < tensor.dim())
        for placement in tensor.placements
    )


def _own_part(value: Tensor | None, like: Tensor | None) -> Tensor | None:
    if value is None or not isinstance(like, DTensor) or not _is_simple(like):
        return value
    assert value.shape == like.shape, f"{tuple(like.shape)}, expected {tuple(value.shape)}"
    for index, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            size = -(-value.shape[placement.dim] // like.device_mesh.size(index))
            before = like.device_mesh.get_local_rank(index) * size
            start = min(before, value.shape[placement.dim])
            length = min(size, value.shape[placement.dim] - start)
            value = value.narrow(placement.dim, start, length)
    return value


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Collective."""
    return {name: whole(p).clone() for name, p in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Collective."""
    return {
        name: None if p.grad is None else whole(p.grad).clone()
        for name, p in model.named_parameters()
    }


def assert_same_values(
    got: dict[str, Any], expected: dict[str, Any], what: str, tolerance: float | None = None
) -> None:
    """tolerance: see ``assert_close``."""
    assert list(got) == list(expected), f"{what}: {list(got)}, expected {list(expected)}"
    for name, value in expected.items():
        if value is None or got[name] is None:
            found = ["None" if each is None else "a tensor" for each in (got[name], value)]
            assert found[0] == found[1], f"{what} of {name!r}: {found[0]}, expected {found[1]}"
        elif value.dtype.is_floating_point:
            assert_close(got[name], value, f"{what} of {name!r}", tolerance)
        else:
            assert torch.equal(got[name], value), f"{what} of {name!r}"


# -- an unsharded and a sharded copy

Step = Callable[[nn.Module, Tensor], Tensor]  # forward and backward; returns the loss


def one_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = square(model, x)
    loss.backward()
    return loss.detach()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


class Twins:
    """An unsharded and a sharded copy, each with an optimizer.

    The unsharded copy takes every rank's batch in turn, so its gradients are the sum over them.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        shard: Callable[[nn.Module], Any] = shard_all,
        optimizer: Callable[..., torch.optim.Optimizer] = sgd,
        batch: Callable[[torch.Generator], Tensor] = vectors,
        data_ranks: int | None = None,  # ranks with a batch of their own
        tolerance: float | None = None,
    ) -> None:
        self.plain, self.model = _seeded(build), shard(_seeded(build))
        self.ranks = data_ranks or dist.get_world_size()
        self.rank = dist.get_rank() * self.ranks // dist.get_world_size()
        self.plain_optim, self.optim = (optimizer(m.parameters()) for m in (self.plain, self.model))
        self.batch, self.tolerance = batch, tolerance
        self._num_batches = itertools.count()

    def batches(self) -> list[Tensor]:
        """Return every rank's batch, the same list on all ranks; others with every call."""
        generator = torch.Generator().manual_seed(100 + next(self._num_batches))
        return [self.batch(generator) for _ in range(self.ranks)]

    def step(self, step: Step = one_backward, update: bool = True) -> None:
        """Take a step on both copies, compare losses and gradients, update and compare the
        parameters. Collective."""
        self.backwards(step)
        self.compare_gradients()
        if update:
            self.update()

    def backwards(self, step: Step = one_backward) -> None:
        """Run ``step`` on both copies and compare the losses. Collective."""
        batches = self.batches()
        losses = [step(self.plain, x.clone()) for x in batches]
        loss = step(self.model, batches[self.rank].clone())
        assert_close(loss, losses[self.rank], "loss", self.tolerance)

    def compare_gradients(self) -> None:
        """Collective."""
        reshard(self.model)  # unsharded parameters have no gradients
        expected = {
            name: None if p.grad is None else p.grad / self.ranks
            for name, p in self.plain.named_parameters()
        }
        grads = {name: p.grad for name, p in self.model.named_parameters()}
        assert_same_values(*own_parts(expected, grads), "gradient", self.tolerance)

    def update(self) -> None:
        """Collective."""
        for p in self.plain.parameters():
            if p.grad is not None:
                p.grad /= self.ranks
        for optim in (self.plain_optim, self.optim):
            optim.step()
            optim.zero_grad()
        self.compare_parameters()

    def compare_parameters(self) -> None:
        """Collective."""
        reshard(self.model)
        expected = {name: p.detach() for name, p in self.plain.named_parameters()}
        parameters = dict(self.model.named_parameters())
        assert_same_values(*own_parts(expected, parameters), "parameter", self.tolerance)

    @torch.no_grad()
    def compare_outputs(self) -> None:
        """Compare what both return without gradients. Collective."""
        x = self.batches()[self.rank]
        assert_close(self.model(x.clone()), self.plain(x.clone()), "output", self.tolerance)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def reshard(model: nn.Module) -> None:
    """Show all parameters as DTensors."""
    for module in sharded_modules(model):
        module.reshard()


# -- a user's own collectives, which note what they are given

# torch 2.13 has renamed both
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NotedAllGather:
    """Takes keyword arguments only, as ``AllGather`` of torch names them."""

    def __init__(self, label: str = "", log: list[str] | None = None) -> None:
        self.label, self.log = label, [] if log is None else log
        self.calls: list[dict[str, Any]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        *,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self.log.append(f"gather {self.label}")
        self.calls.append(
            {
                "numel": (output_tensor.numel(), input_tensor.numel()),
                "nbytes": input_tensor.nbytes,
                "dtypes": (output_tensor.dtype, input_tensor.dtype),
                "ranks": group.size(),
            }
        )
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class NotedReduceScatter(NotedAllGather):
    """Takes keyword arguments only, as ``ReduceScatter`` of torch names them."""

    def __call__(  # type: ignore[override]
        self,
        *,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.log.append(f"reduce {self.label}")
        self.calls.append(
            {
                "numel": (output_tensor.numel(), input_tensor.numel()),
                "dtypes": (output_tensor.dtype, input_tensor.dtype),
                "ranks": group.size(),
            }
        )
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class Gathers:
    """Gives every sharded module of a model an all-gather that notes its calls."""

    def __init__(self, model: nn.Module, log: list[str] | None = None) -> None:
        self.log: list[str] = [] if log is None else log  # "gather NAME"
        self._of: dict[str, NotedAllGather] = {}
        for name, module in model.named_modules():
            if isinstance(module, api.FSDPModule):
                self._of[name] = NotedAllGather(name or "root", self.log)
                module.set_custom_all_gather(self._of[name])

    def calls_of(self, name: str) -> list[dict[str, Any]]:
        return self._of[name].calls

    def count(self) -> dict[str, int]:
        """Return the number of calls by module, and begin anew."""
        found = {name or "root": len(each.calls) for name, each in self._of.items()}
        for each in self._of.values():
            each.calls.clear()
        self.log.clear()
        return found


def partial_shard(**options: Any) -> Callable[[nn.Module], Any]:
    return functools.partial(shard_all, **options)
