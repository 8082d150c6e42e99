"""Host time per unit: what the Python and C++ code around a unit's computation costs, with nothing
to compute or to send.

    python tests/benchmarks/host.py              (fsdp_compat installed, or PYTHONPATH=.)

One process on a fake process group, which accepts every collective and moves nothing; 64 units of 8
and of 12 parameters of 4 elements. A step is forward, backward, and gradients set to None. Times
are CPU times of the process, so other programs disturb them only through caches and clocks. The
columns:

    above plain     time of a step beyond the unwrapped model's in the same round, per unit, in
                    microseconds: median of the rounds
    minimum         the same between the fastest step of either
    to FSDP1        ours above plain / FSDP1's above plain, paired by round, median. FSDP1 with the
                    same use_orig_params
    to FSDP2        the same to FSDP2 (its reshard_after_forward follows the strategy)
    limit           ours only: "met" if the ratio to FSDP1 is at most 0.15 and that to FSDP2 at most
                    0.12, for fully_shard if that to FSDP2 is at most a third, which is what this
                    project asks of itself

Below it stands where the time of ours goes, per unit and step, in microseconds: what its parts
take, without what is called in them that is a part itself, beside their floor: the calls of torch
that no implementation can leave out, timed alone, again and again, in a warm cache. Collectives:
two all-gathers and a reduce-scatter, one gather fewer where units stay whole. Swaps: what modules
show, four times. Gradient copies: into the buffer that is sent, and the division of the sum. Hooks:
one on the output of the unit, put there and run. Checks: what a forward looks at before it begins.
The rest: the calls that hold these together."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from contenders import (
    DDP,
    FSDP1,
    FSDP2,
    FULLY_SHARD,
    OURS,
    PLAIN,
    Contender,
    Wrapping,
    build,
)
from runs import Limits, Table, Timings, fake_ranks, measure, options, verdict_on
from torch import nn

from fsdp_compat import _torch_private
from fsdp_compat._comm.backend import BackendTransport
from fsdp_compat._engine import gradients, hooks, module_view, reduce, runtime

LIMITS: Limits = {FSDP1: 0.15, FSDP2: 0.12}
FULLY_SHARD_LIMITS: Limits = {FSDP2: 1 / 3}
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP"]
ELEMENTS = 4  # of a parameter


class Scales(nn.Module):
    """A unit of many tiny parameters, each used once."""

    def __init__(self, num_parameters: int, dim: int = ELEMENTS) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(dim)) for _ in range(num_parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(0)
    missed = 0
    with fake_ranks(arguments.world_size):
        for num_parameters in arguments.parameters:
            for strategy in arguments.strategies:
                missed += run(arguments, num_parameters, strategy)
    return int(missed > 0 and arguments.check)


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, rounds=25, check="a limit is not met")
    add = parser.add_argument
    add("--world-size", type=int, default=8)
    add("--units", type=int, default=64)
    add("--parameters", type=int, nargs="+", default=[8, 12], help="parameters of a unit")
    add("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    arguments = parser.parse_args()
    if arguments.world_size < 2:
        parser.error("with one rank nothing is sent, so there is nothing to compare")
    return arguments


def run(arguments: argparse.Namespace, num_parameters: int, strategy: str) -> int:
    """Print the tables of one case; return how many limits are not met."""
    steps = make_steps(arguments.units, num_parameters, strategy)
    timings = measure(steps, arguments.rounds, clock=time.process_time)
    print(
        f"\n{arguments.units} units of {num_parameters} parameters, {strategy}, "
        f"{arguments.world_size} ranks, {arguments.rounds} rounds\n"
    )
    missed = print_table(timings, arguments.units)
    print_parts(steps, num_parameters, arguments, strategy)
    return missed


def make_steps(num_units: int, num_parameters: int, strategy: str) -> dict[str, Callable[[], None]]:
    base = nn.Sequential(*[Scales(num_parameters) for _ in range(num_units)])
    x = torch.ones(2, ELEMENTS)
    return {
        contender.name: functools.partial(step, contender, x)
        for contender in build(base, Wrapping((Scales,), strategy), without=[DDP])
    }


def step(contender: Contender, x: torch.Tensor) -> None:
    contender.model(x).sum().backward()
    contender.zero_grad()


def print_table(timings: Timings, num_units: int) -> int:
    """Print the times; return how many limits are not met."""
    missed, scale = 0, 1e6 / num_units
    columns = {"above plain": "9.1f us", "minimum": "6.1f us"}
    table = Table(columns | {f"to {peer}": "9.3f" for peer in LIMITS})
    table.head()
    for name in timings.seconds:
        if name == PLAIN:
            continue
        times = timings.above_plain(name), timings.minimum_above_plain(name)
        ratios = timings.ratios(name, *LIMITS, above_plain=True)
        verdict = ""
        if name.startswith((OURS, FULLY_SHARD)):
            limits = FULLY_SHARD_LIMITS if name == FULLY_SHARD else LIMITS
            verdict = verdict_on(ratios, limits)
            missed += verdict != "met"
        table.row(name, [*(each * scale for each in times), *ratios.values()], verdict)
    print(f"{PLAIN:28} {timings.median(PLAIN) * scale:9.1f} us per unit in all")
    return missed


# -- where the time goes

PARTS: dict[str, list[tuple[Any, str]]] = {
    "collectives": [
        (BackendTransport, name)
        for name in ("begin_gather", "end_gather", "begin_reduce", "end_reduce")
    ],
    "swaps": [
        (module_view.ModuleView, "show_unsharded"),
        (module_view.ModuleView, "show_sharded"),
    ],
    "gradient copies": [(reduce.ReduceBuffer, "put"), (gradients.Gradients, "collect")],
    "hooks": [(hooks, "on_gradient_of_output")],
    "checks": [(runtime.Runtime, "_begin_forward")],
}
REST = "the rest"


class Clock:
    """Times of parts without those of the parts that are called in them."""

    def __init__(self) -> None:
        self.seconds, self.calls = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0)
        self._inner = [0.0]

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.seconds[part] += seconds - self._inner.pop()
                self._inner[-1] += seconds
                self.calls[part] += 1

        return timed


def part_times(run: Callable[[], None], rounds: int) -> dict[str, float]:
    """Return seconds per step of each part: medians, less what taking the time takes."""
    originals = [
        (part, owner, name, getattr(owner, name))
        for part, places in PARTS.items()
        for owner, name in places
    ]
    found: list[Clock] = []
    idle, number = Clock(), 10_000
    empty = idle.around("hooks", lambda: None)
    for _ in range(number):
        empty()
    overhead = idle.seconds["hooks"] / number
    try:
        for _ in range(rounds):
            clock = Clock()
            for part, owner, name, function in originals:
                setattr(owner, name, clock.around(part, function))
            run()
            found.append(clock)
    finally:
        for _, owner, name, function in originals:
            setattr(owner, name, function)
    return {
        part: statistics.median(its.seconds[part] - its.calls[part] * overhead for its in found)
        for part in PARTS
    }


def floors(num_parameters: int, strategy: str) -> dict[str, float]:
    """Seconds per unit and step of what cannot be left out."""
    numel = num_parameters * ELEMENTS
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    own, total = torch.ones(-(-numel // ranks)), torch.ones(-(-numel // ranks))
    full = torch.empty(ranks * own.numel())
    gradients = [torch.ones(ELEMENTS) for _ in range(num_parameters)]
    places = list(full[:numel].split(ELEMENTS))
    entries = dict.fromkeys(map(str, range(num_parameters)))
    x = torch.ones(2, ELEMENTS, requires_grad=True)
    num_gathers = 2 if strategy == "FULL_SHARD" else 1

    def collective() -> None:
        for _ in range(num_gathers):
            _torch_private.start_all_gather(group, full, own).wait()
        _torch_private.start_reduce_scatter(group, total, full).wait()

    def swap() -> None:
        for _ in range(4):
            for name in entries:
                entries[name] = None

    def copy() -> None:
        torch._foreach_copy_(places, gradients)
        total.div_(2.0)

    def step(hooked: bool) -> None:
        y = x * 2
        if hooked:
            y.register_hook(lambda grad: None)
        y.backward(x)

    with_hook, without = (
        least_seconds(functools.partial(step, hooked)) for hooked in (True, False)
    )
    return {
        "collectives": least_seconds(collective),
        "swaps": least_seconds(swap),
        "gradient copies": least_seconds(copy),
        "hooks": max(with_hook - without, 0.0),
    }


def least_seconds(function: Callable[[], None]) -> float:
    """The least of several means."""
    number = 200
    return min(timeit.repeat(function, number=number, repeat=15, timer=time.process_time)) / number


def print_parts(
    steps: dict[str, Callable[[], None]],
    num_parameters: int,
    arguments: argparse.Namespace,
    strategy: str,
) -> None:
    scale = 1e6 / arguments.units
    floor = {part: seconds * 1e6 for part, seconds in floors(num_parameters, strategy).items()}
    columns: dict[str, dict[str, float]] = {"floor": floor}
    for name in (name for name in steps if OURS in name):
        pair = {PLAIN: steps[PLAIN], name: steps[name]}
        timings = measure(pair, arguments.rounds, clock=time.process_time)
        times = part_times(steps[name], arguments.rounds)
        column = columns[name] = {part: seconds * scale for part, seconds in times.items()}
        column[REST] = max(timings.above_plain(name) * scale - sum(column.values()), 0.0)
    table = Table(dict.fromkeys(columns, "24.1f us"), width=19)
    print()
    table.head(last="")
    for part in [*PARTS, REST]:
        table.row(part, [column.get(part) for column in columns.values()])
    table.row("in all", [sum(column.values()) for column in columns.values()])


if __name__ == "__main__":
    raise SystemExit(main())
