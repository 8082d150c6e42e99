"""``fully_shard`` of fsdp_compat or of torch.

Tests take the names from ``api``, which stands for fsdp_compat. This shows whether torch's FSDP2
does what a test expects:

    FSDP_COMPAT_TEST_FULLY_SHARD=torch pytest tests/fully_shard/test_methods.py"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import DIM, Block
from tests.support.parity import Pair, seeded, sgd, square, whole

# where each library keeps names that are not at its top level
_ELSEWHERE = {
    "ours": ("fsdp_compat", "fsdp_compat._fully_shard"),
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


def is_sharded(module: nn.Module) -> bool:
    """True if the module's own parameters are shown as DTensors, False if as plain tensors."""
    (kind,) = {isinstance(p, DTensor) for p in module.parameters(recurse=False)}
    return kind


def pair_of(
    build: Callable[[], nn.Module],
    shard: Callable[[nn.Module], Any] = shard_all,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    **options: Any,
) -> Pair:
    """Return two copies that ``build`` makes, one of them sharded in place. options: of Pair."""
    return Pair(seeded(build), shard(seeded(build)), optimizer=optimizer, **options)


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a parameter without a part on most ranks, a tie and a
    buffer. codes: also a frozen parameter, of bytes where torch takes these."""

    count: Tensor

    def __init__(self, seed: int = 0, codes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem, self.blocks = nn.Linear(DIM, DIM), nn.Sequential(Block(), Block())
        self.few, self.head = nn.Parameter(torch.randn(1)), nn.Linear(DIM, 5)
        if codes:
            dtype = torch.uint8 if TORCH_TAKES_INTEGERS else torch.float32
            values = torch.randint(0, 99, (5, 2), dtype=dtype)
            self.codes = nn.Parameter(values, requires_grad=False)
        self.again = nn.Linear(DIM, 5)
        self.again.weight = self.head.weight
        self.register_buffer("count", torch.randint(99, (2,)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x)) * self.few
        return self.head(x) + self.again(x).tanh()


def batch_of(step: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))


def take_steps(model: nn.Module, optim: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        square(model, batch_of(step)).backward()
        optim.step()
        optim.zero_grad()


def sharded_as(kind: str, model: Any) -> Any:
    """Shard an ``Odd`` in place, or wrap it: "ours", "columns" (along the last dim), "list",
    "flat", "original", or "mixed" (of both front ends); else return it as it is."""
    cpu = torch.device("cpu")
    if kind in ("flat", "original"):
        blocks, original = ModuleWrapPolicy({Block}), kind == "original"
        return FSDP(model, auto_wrap_policy=blocks, use_orig_params=original, device_id=cpu)
    if kind == "columns":
        return shard_all(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    if kind == "list":
        api.fully_shard([model.blocks, model.head, model.again])
        return api.fully_shard(model)
    if kind == "mixed":
        model.stem = FSDP(model.stem, use_orig_params=True, device_id=cpu)
        model.blocks[1] = FSDP(model.blocks[1], device_id=cpu)
        shard_all(model.blocks[0], (nn.Linear,))
        api.fully_shard(model.head)
        api.fully_shard(model.again)
        return model
    if kind == "ours":
        return shard_all(model)
    return model


def trained(
    kind: str, seed: int, *, steps: Sequence[int] = (0, 1), codes: bool = False
) -> tuple[Any, torch.optim.Optimizer]:
    """Return an ``Odd``, sharded as ``kind`` says, and an optimizer after steps with the same batch
    on every rank. "mixed", and "untied", which is not sharded, have no tie."""
    model = Odd(seed, codes)
    if kind in ("mixed", "untied"):
        model.again.weight = nn.Parameter(model.again.weight.detach().clone())
    model = sharded_as(kind, model)
    optim = adamw(model, fused=kind != "mixed")
    take_steps(model, optim, *steps)
    return model, optim


def adamw(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """fused: one operation on all DTensors takes a fraction of the time; it takes no other tensors
    beside."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1, fused=fused)


def whole_states(
    model: nn.Module, optim: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters and buffers, and the optimizer's state, by names. Collective."""
    state = {  # in the same order on all ranks
        f"{name}.{key}": whole(value)
        for name, p in model.named_parameters()
        for key, value in sorted(optim.state.get(p, {}).items())
    }
    return {name: whole(value) for name, value in model.state_dict().items()}, state


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
        self._note("gather", output_tensor, input_tensor, group)
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)

    def _note(self, kind: str, output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
        self.log.append(f"{kind} {self.label}")
        call = {"numel": (output.numel(), source.numel()), "nbytes": source.nbytes}
        self.calls.append({**call, "dtypes": (output.dtype, source.dtype), "ranks": group.size()})


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
        self._note("reduce", output_tensor, input_tensor, group)
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
