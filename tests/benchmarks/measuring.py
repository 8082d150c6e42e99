"""How every benchmark runs: its options, its process group, its rounds and its tables.

A measured time means little on a machine that does other things too; the ratio of two that were
taken within the same second means much. So all contenders live in one process set, begin with the
same parameters and see the same data. A round times each of them once, in an order that changes
from round to round; ratios are taken within a round, and the median over the rounds is reported.
The unwrapped model is in every round as the control."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import random
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from contenders import FSDP1, PLAIN, fsdp1_of
from torch.testing._internal.distributed.fake_pg import FakeStore

MIN_ROUNDS = 15
WARM_UP_ROUNDS = 3  # not reported: the first passes allocate, record orders and fill caches


# -- options and processes


def options(
    doc: str | None,
    *,
    rounds: int = 0,
    fewest: int = MIN_ROUNDS,
    has_clock: bool = False,
    check: str = "",
) -> argparse.ArgumentParser:
    """rounds: the default of --rounds; fewest: the least that is accepted. has_clock: --cpu-time.
    check: when --check makes the exit status 1."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)

    def enough(text: str) -> int:
        if int(text) < fewest:
            raise argparse.ArgumentTypeError(f"fewer than {fewest} rounds mean little")
        return int(text)

    if rounds:
        parser.add_argument("--rounds", type=enough, default=rounds)
    if has_clock:
        parser.add_argument(
            "--cpu-time", action="store_true", help="time on the processor instead of the clock"
        )
    if check:
        parser.add_argument("--check", action="store_true", help=f"exit status 1 if {check}")
    return parser


@contextlib.contextmanager
def group(backend: str, **arguments: Any) -> Iterator[None]:
    """Inside the context there is a process group, and each process has one thread."""
    warnings.simplefilter("ignore")  # torch's FSDP1 says in each construction that it is going away
    torch.set_num_threads(1)
    dist.init_process_group(backend, **arguments)
    try:
        yield
    finally:
        dist.destroy_process_group()


def gloo_ranks() -> contextlib.AbstractContextManager[None]:
    """Inside the context this process is one of those that torchrun has started."""
    if "RANK" not in os.environ:
        sys.exit(f"start it on at least 2 processes: torchrun --nproc-per-node 2 {sys.argv[0]}")
    return group("gloo")


def fake_ranks(ranks: int, rank: int = 0) -> contextlib.AbstractContextManager[None]:
    """Inside the context this process is a rank of a group that accepts every collective, and moves
    nothing."""
    return group("fake", rank=rank, world_size=ranks, store=FakeStore())


def say(text: str) -> None:
    """Print it once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def first_rank_alone(act: Callable[[], object]) -> None:
    """Collective: the others wait."""
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def highest(number: float) -> float:
    """Return the highest of all ranks' numbers. Collective."""
    found = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


# -- rounds

Ratios = dict[str, float | None]  # by what it is compared with; None: that does not take part


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

    def ratios(self, name: str, *others: str, above_plain: bool = False) -> Ratios:
        """The ratios to several; to FSDP1 with the same use_orig_params. above_plain: of times
        above the unwrapped model."""
        ratio = self.above_plain_ratio if above_plain else self.ratio
        peers = {other: fsdp1_of(name) if other == FSDP1 else other for other in others}
        return {
            other: ratio(name, peer) if peer in self.seconds else None
            for other, peer in peers.items()
        }

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
        above = [one - plain for one, plain in self._pairs(name, PLAIN)]
        others = [other - plain for other, plain in self._pairs(to, PLAIN)]
        ratios = [one / other for one, other in zip(above, others, strict=True) if other > 0]
        return statistics.median(ratios) if ratios else float("nan")

    def _pairs(self, name: str, to: str) -> Iterator[tuple[float, float]]:
        return zip(self.seconds[name], self.seconds[to], strict=True)


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


def measure_ranks(
    steps: Mapping[str, Callable[[], object]], rounds: int, *, cpu_time: bool = False
) -> Timings:
    """Time every step once per round; a step takes as long as its slowest rank. Collective."""
    clock = time.process_time if cpu_time else time.perf_counter
    own = measure(steps, rounds, clock=clock, before_each=dist.barrier).seconds
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return Timings(
        {
            name: [max(times) for times in zip(*(its[name] for its in found), strict=True)]
            for name in own
        }
    )


# -- tables

# What ratios of ours may be at most, by what they are to.
Limits = Mapping[str, float]


def verdict_on(ratios: Mapping[str, float | None], limits: Limits) -> str:
    found = [(ratios[other], limit) for other, limit in limits.items()]
    is_met = all(ratio is not None and ratio <= limit for ratio, limit in found)
    return "met" if is_met else "NOT MET"


class Table:
    """Rows of a name and cells, printed by the first rank."""

    def __init__(self, columns: Mapping[str, str], width: int = 28) -> None:
        """columns: the format of each, such as "9.3f" or "7.2f ms". width: of the names."""
        self._columns, self._width = columns, width

    def head(self, title: str = "", last: str = "limit") -> None:
        """last: the title of what a row ends with."""
        self.row(title, list(self._columns), last)

    def row(self, name: str, cells: Sequence[float | str | None], last: str = "") -> None:
        shown = map(_cell, cells, self._columns.values())
        say(f"{name:{self._width}} {' '.join(shown)}  {last}".rstrip())


def _cell(value: float | str | None, form: str) -> str:
    number, _, unit = form.partition(" ")
    ending = f" {unit}" if unit else ""
    width = int(re.findall(r"\d+", number)[0]) + len(ending)
    text = value or "" if isinstance(value, str | None) else f"{value:{number}}{ending}"
    return f"{text:>{width}}"
