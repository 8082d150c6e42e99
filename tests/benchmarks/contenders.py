"""What the benchmarks share: how each contender is made of one model, and the loop that times them
beside each other.

A measured time means little on a machine that does other things too; the ratio of two that were
taken within the same second means much. So all contenders live in one process set, begin with the
same parameters and see the same data. A round times each of them once, in an order that changes
from round to round; ratios are taken within a round, and the median over the rounds is reported.
The unwrapped model is in every round as the control."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import functools
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fsdp_compat
from fsdp_compat.wrap import ModuleWrapPolicy

__all__ = [
    "DDP",
    "FSDP1",
    "FSDP2",
    "FULLY_SHARD",
    "MIN_ROUNDS",
    "ORIGINAL",
    "OURS",
    "PLAIN",
    "Contender",
    "Strategy",
    "Timings",
    "build",
    "fsdp1_of",
    "makers",
    "measure",
    "require_rounds",
]

PLAIN, DDP, OURS, FSDP1, FSDP2 = "plain", "DDP", "ours", "FSDP1", "FSDP2"
FULLY_SHARD = "fully_shard of ours"
ORIGINAL = ", original parameters"  # suffix: use_orig_params=True

MIN_ROUNDS = 15
WARM_UP_ROUNDS = 3  # not reported: the first passes allocate, record orders and fill caches


class Strategy(enum.Enum):
    """What is sharded, by the name that ours and FSDP1 give it."""

    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()  # FSDP2: reshard_after_forward=False
    NO_SHARD = enum.auto()  # FSDP2 has no such thing


@dataclasses.dataclass(frozen=True)
class Contender:
    """A wrapped copy of the model, and what an optimizer would hold of it."""

    name: str
    model: nn.Module
    parameters: tuple[nn.Parameter, ...]

    def zero_grad(self) -> None:
        """As an optimizer does it: from its own list, without walking over the modules."""
        for parameter in self.parameters:
            parameter.grad = None


def makers(
    block: type[nn.Module], strategy: Strategy, *, ddp: bool
) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Return what wraps a model, by contender. Each is collective: all ranks.

    Every instance of ``block`` becomes a unit, and what is left over belongs to the root. ddp:
    DistributedDataParallel takes part.
    """
    found: dict[str, Callable[[nn.Module], nn.Module]] = {PLAIN: lambda model: model}
    if ddp:
        found[DDP] = DistributedDataParallel
    for name, make in ((OURS, _ours), (FSDP1, _fsdp1)):
        for original in (False, True):
            suffix = ORIGINAL if original else ""
            found[name + suffix] = functools.partial(
                make, block=block, strategy=strategy, use_orig_params=original
            )
    if strategy is not Strategy.NO_SHARD:
        for name, function in (
            (FSDP2, torch_fsdp.fully_shard),
            (FULLY_SHARD, fsdp_compat.fully_shard),
        ):
            found[name] = functools.partial(
                _fully_sharded, function=function, block=block, strategy=strategy
            )
    return found


def build(
    base: nn.Module, block: type[nn.Module], strategy: Strategy, *, ddp: bool
) -> list[Contender]:
    """Return the contenders for one strategy, each around its own copy of ``base``; see
    ``makers``."""
    found = []
    for name, maker in makers(block, strategy, ddp=ddp).items():
        model = maker(copy.deepcopy(base))
        found.append(Contender(name, model, tuple(model.parameters())))
    return found


def fsdp1_of(name: str) -> str:
    """Return the name of the FSDP1 that a contender is compared with: the one of the same
    use_orig_params."""
    return FSDP1 + ORIGINAL if name.endswith(ORIGINAL) else FSDP1


def _ours(
    model: nn.Module, block: type[nn.Module], strategy: Strategy, use_orig_params: bool
) -> nn.Module:
    return fsdp_compat.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({block}),
        sharding_strategy=fsdp_compat.ShardingStrategy[strategy.name],
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def _fsdp1(
    model: nn.Module, block: type[nn.Module], strategy: Strategy, use_orig_params: bool
) -> nn.Module:
    return torch_fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=TorchModuleWrapPolicy({block}),
        sharding_strategy=torch_fsdp.ShardingStrategy[strategy.name],
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def _fully_sharded(
    model: nn.Module, function: Callable[..., Any], block: type[nn.Module], strategy: Strategy
) -> nn.Module:
    """function: fully_shard, of torch or ours."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # For the root, FULL_SHARD is torch's own choice: it stays full, as backward begins with it.
    blocks, root = (True, None) if strategy is Strategy.FULL_SHARD else (False, False)
    for module in model.modules():
        if isinstance(module, block):
            function(module, mesh=mesh, reshard_after_forward=blocks)
    sharded: nn.Module = function(model, mesh=mesh, reshard_after_forward=root)
    return sharded


# -- measuring


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds per contender and round; index i of every list was taken in round i."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def minimum(self, name: str) -> float:
        return min(self.seconds[name])

    def ratio(self, name: str, to: str) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(one / other for one, other in self._pairs(name, to))

    def above_plain(self, name: str) -> float:
        """The median of the rounds' differences to the unwrapped model, in seconds."""
        return statistics.median(one - plain for one, plain in self._pairs(name, PLAIN))

    def minimum_above_plain(self, name: str) -> float:
        """The difference between the minima, in seconds: what is left when nothing disturbs
        either."""
        return self.minimum(name) - self.minimum(PLAIN)

    def above_plain_ratio(self, name: str, to: str) -> float:
        """The median of the rounds' ratios of times above the unwrapped model.

        Where the other one took no longer than the unwrapped model, the round was disturbed and
        tells nothing; NaN if all were.
        """
        ratios = [
            (one - plain) / (other - plain)
            for one, other, plain in zip(
                self.seconds[name], self.seconds[to], self.seconds[PLAIN], strict=True
            )
            if other > plain
        ]
        return statistics.median(ratios) if ratios else float("nan")

    def _pairs(self, name: str, to: str) -> Iterator[tuple[float, float]]:
        return zip(self.seconds[name], self.seconds[to], strict=True)


def require_rounds(parser: argparse.ArgumentParser, rounds: int, fewest: int = MIN_ROUNDS) -> None:
    """Exit with an error for fewer rounds than a median needs."""
    if rounds < fewest:
        parser.error(f"--rounds {rounds}: medians of fewer than {fewest} rounds mean little")


def measure(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    before_each: Callable[[], object] = lambda: None,
) -> Timings:
    """Time every step once per round. ``before_each`` brings ranks together. Ranks time the same
    step at the same time.

    Garbage of one contender is collected before the next one is timed; what a step itself makes the
    collector do counts.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0).shuffle  # alike on all ranks
    gc.collect()
    gc.freeze()  # models stay for ever: collections need not look at them
    try:
        for _ in range(WARM_UP_ROUNDS + rounds):
            shuffle(order)
            for name in order:
                gc.collect()
                before_each()
                start = clock()
                steps[name]()
                seconds[name].append(clock() - start)
    finally:
        gc.unfreeze()
    return Timings({name: times[WARM_UP_ROUNDS:] for name, times in seconds.items()})
