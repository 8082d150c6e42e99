"""Calls that are refused: what each rank sees, and that nothing has changed.

The model is a Net of two layers. ``difference`` compares its training with the unsharded one."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, ones

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.ranks import RankError, run_ranks

Call = Callable[..., object]
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
FACTS = ("expected:", "got:", "where:", "to do:")


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


class Net(nn.Module):
    """Two layers, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())
        self.frozen = nn.Parameter(ones(4), requires_grad=False)
        self.scale = nn.Parameter(ones(4))
        self.register_buffer("offset", ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale + self.frozen + self.offset


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def shard(module: nn.Module | None = None, **arguments: Any) -> Any:
    arguments.setdefault("auto_wrap_policy", ModuleWrapPolicy({Layer}))
    return FSDP(net() if module is None else module, **arguments)


def batch(rank: int) -> Tensor:
    return torch.arange(8.0).view(2, 4) / 8 - rank


def loss_of(model: nn.Module, rank: int | None = None) -> Tensor:
    return model(batch(dist.get_rank() if rank is None else rank)).pow(2).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.0)


@functools.cache
def reference(num_steps: int) -> dict[str, Tensor]:
    """The state of an unsharded Net after some steps over the batches of 2 ranks."""
    model = net()
    optimizer = sgd(model)
    for _ in range(num_steps):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rank) for rank in range(2)]).mean().backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or sgd(model)
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def state_of(model: FSDP, kind: StateDictType = FULL) -> dict[str, Tensor]:
    with FSDP.state_dict_type(model, kind):
        return model.state_dict()


def difference(model: FSDP, wanted: int | Mapping[str, Tensor]) -> str:
    """Return how a sharded Net differs from a state, or from the unsharded one after some steps."""
    wanted = reference(wanted) if isinstance(wanted, int) else wanted
    found = state_of(model)
    if list(found) != list(wanted):
        return f"its state dict has {list(found)}"
    wrong = [name for name in found if not torch.allclose(found[name], wanted[name], atol=1e-6)]
    return f"{wrong} differ from the unsharded model" if wrong else ""


def summon(m: Any, call: Callable[[], object] = lambda: None, **options: Any) -> None:
    with FSDP.summon_full_params(m, **options):
        call()


def no_sync(m: FSDP, call: Callable[[], object] = lambda: None) -> None:
    with m.no_sync():
        call()


class Case(NamedTuple):
    """A call that is refused."""

    words: str  # that the message has, between semicolons
    call: Call
    kinds: tuple[type[Exception], ...]  # of the error; the built-in one is that of torch
    make: Callable[[], Any] | None = None  # the module, if it is not the group's


def by_rank(function: Callable[..., Any], *args: object, limit_s: float | None = None) -> list[Any]:
    """Return what the function returns on 2 ranks: one round trip for the tests of many cases."""
    found = _run(function, args, limit_s)
    assert isinstance(found, list), found
    return found


@functools.cache
def _run(function: Callable[..., Any], args: Any, limit_s: float | None) -> list[Any] | str:
    try:
        return run_ranks(2, function, *args, group_timeout=limit_s)
    except RankError as error:
        return str(error)


@dataclass
class Outcome:
    """The outcome of one call on one rank."""

    kinds: tuple[str, ...] = ()  # names of the classes of the exception
    message: str = "nothing was raised"
    seconds: float = 0.0
    wrong: str = ""  # what has changed, or the problem with a step afterwards


def caught(call: Call, given: Mapping[str, Any] = MappingProxyType({})) -> Outcome:
    """Call with those of the given values that are named like a parameter."""
    outcome, started = Outcome(), time.monotonic()
    names = inspect.signature(call).parameters
    try:
        call(**{name: value for name, value in given.items() if name in names})
    except Exception as error:
        outcome.kinds = tuple(cls.__name__ for cls in type(error).__mro__)
        outcome.message = re.sub("0x[0-9a-f]+|global rank [0-9]+", "...", str(error))
    outcome.seconds = time.monotonic() - started
    return outcome


def assert_four_facts(message: str) -> None:
    for fact, line in zip(FACTS, message.splitlines()[-4:], strict=True):
        assert line.startswith(f"  {fact}"), message


def snapshot(module: nn.Module) -> list[Any]:
    found: list[Any] = [(name, id(child)) for name, child in module.named_modules()]
    for tensors in (module.named_parameters, module.named_buffers):
        for name, t in tensors(remove_duplicate=False):
            grad = None if t.grad is None else t.grad.tolist()
            lazy = isinstance(t, nn.UninitializedParameter)
            values = None if t.is_meta or lazy else t.tolist()
            found.append(
                (name, id(t), lazy or tuple(t.shape), str(t.device), t.requires_grad, values, grad)
            )
    for child in module.modules():
        if isinstance(child, FSDP):
            found.append((FSDP.get_state_dict_type(child), child.check_is_root()))
    return found


def refusal(case: Case, given: dict[str, Any]) -> Outcome:
    """Return what a case raises, and what it has changed. Collective: all ranks."""
    if case.make is not None:
        given["m"] = case.make()
    module = given["m"] if isinstance(given["m"], nn.Module) else net()
    before = snapshot(module)
    outcome = caught(case.call, given)
    try:
        pairs = itertools.zip_longest(before, snapshot(module))
        outcome.wrong = "\n".join(f"{old} became {new}" for old, new in pairs if old != new)
        outcome.wrong += _training_problem(module)
    except Exception as error:
        outcome.wrong = f"{type(error).__name__}: {error}"
    dist.barrier()  # the ranks can still communicate, and no operation is pending
    return outcome


def _training_problem(module: nn.Module) -> str:
    """Return what is wrong with the training of a rejected module or of a model."""
    if isinstance(module, Net) and not any(
        isinstance(child, FSDP) or child.__dict__.keys() & {"weight"} for child in module.modules()
    ):
        if any(p.is_meta or p.is_inference() for p in module.parameters()):
            return ""
        plain = copy.deepcopy(module)
        plain(batch(0)).sum().backward()
        if any((p.grad is not None) is not p.requires_grad for p in plain.parameters()):
            return "the refused module does not train as before"
        module = shard(module)
    if isinstance(module, FSDP) and isinstance(module.module, Net):
        step(module)
        return difference(module, 1)
    return ""
