"""Host time per unit: what the Python and C++ code around a unit's computation costs, with nothing
to compute or to send.

    python tests/benchmarks/host.py              (fsdp_compat installed, or PYTHONPATH=.)
    python tests/benchmarks/host.py --profile    where the time of ours goes, function by function

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
import cProfile
import functools
import operator
import pstats
import statistics
import time
import timeit
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from contenders import (
    FSDP2,
    FULLY_SHARD,
    OURS,
    PLAIN,
    Contender,
    Strategy,
    Timings,
    build,
    fsdp1_of,
    measure,
    require_rounds,
)
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compat import _torch_private
from fsdp_compat._comm.backend import BackendTransport
from fsdp_compat._engine import gradients, hooks, module_view, reduce, runtime

LIMITS = 0.15, 0.12  # to FSDP1 and to FSDP2
FULLY_SHARD_LIMIT = 1 / 3  # to FSDP2
ELEMENTS = 4  # of a parameter
PROFILED_STEPS = 20


class Scales(nn.Module):
    """A unit of many tiny parameters, each used once."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(
            nn.Parameter(torch.ones(ELEMENTS)) for _ in range(num_parameters)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def main() -> int:
    arguments = parse_arguments()
    warnings.simplefilter("ignore")  # torch's FSDP1 says in each construction that it is going away
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=arguments.world_size, store=FakeStore())
    missed = 0
    try:
        for num_parameters in arguments.parameters:
            for strategy in (Strategy[name] for name in arguments.strategies):
                steps = make_steps(arguments.units, num_parameters, strategy)
                title = (
                    f"{arguments.units} units of {num_parameters} parameters, "
                    f"{strategy.name}, "
                    f"{arguments.world_size} ranks"
                )
                if arguments.profile:
                    for name in (name for name in steps if OURS in name):
                        print(f"\n{title}: {name}\n")
                        print_profile(steps[name], arguments.units, arguments.lines)
                else:
                    timings = measure(steps, arguments.rounds, clock=time.process_time)
                    print(f"\n{title}, {arguments.rounds} rounds\n")
                    missed += print_table(timings, arguments.units)
                    print_parts(steps, num_parameters, arguments, strategy)
    finally:
        dist.destroy_process_group()
    return 1 if missed and arguments.check else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument(
        "--parameters", type=int, nargs="+", default=[8, 12], help="parameters of a unit"
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=[Strategy.FULL_SHARD.name, Strategy.SHARD_GRAD_OP.name],
        default=[Strategy.FULL_SHARD.name, Strategy.SHARD_GRAD_OP.name],
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--check", action="store_true", help="exit status 1 if a limit is not met")
    parser.add_argument("--profile", action="store_true", help="profile ours instead of timing all")
    parser.add_argument("--lines", type=int, default=40, help="functions that a profile shows")
    arguments = parser.parse_args()
    require_rounds(parser, arguments.rounds)
    if arguments.world_size < 2:
        parser.error(
            f"--world-size {arguments.world_size}: with one rank nothing is sent, so there is "
            "nothing to compare"
        )
    return arguments


def make_steps(
    num_units: int, num_parameters: int, strategy: Strategy
) -> dict[str, Callable[[], None]]:
    base = nn.Sequential(*[Scales(num_parameters) for _ in range(num_units)])
    x = torch.ones(2, ELEMENTS)
    return {
        contender.name: functools.partial(step, contender, x)
        for contender in build(base, Scales, strategy, ddp=False)
    }


def step(contender: Contender, x: torch.Tensor) -> None:
    contender.model(x).sum().backward()
    contender.zero_grad()


def print_table(timings: Timings, num_units: int) -> int:
    """Print the times; return how many limits are not met."""
    missed = 0
    print(f"{'':28} {'above plain':>12} {'minimum':>9} {'to FSDP1':>9} {'to FSDP2':>9}  limit")
    for name in timings.seconds:
        if name == PLAIN:
            continue
        micros = [
            seconds / num_units * 1e6
            for seconds in (timings.above_plain(name), timings.minimum_above_plain(name))
        ]
        ratios = [timings.above_plain_ratio(name, to) for to in (fsdp1_of(name), FSDP2)]
        verdict = ""
        if name.startswith(OURS):
            verdict = "met" if all(map(operator.le, ratios, LIMITS)) else "NOT MET"
            missed += verdict != "met"
        if name == FULLY_SHARD:
            verdict = "met" if ratios[1] <= FULLY_SHARD_LIMIT else "NOT MET"
            missed += verdict != "met"
        print(
            f"{name:28} {micros[0]:9.1f} us {micros[1]:6.1f} us {ratios[0]:9.3f} {ratios[1]:9.3f}  "
            f"{verdict}"
        )
    plain = timings.median(PLAIN) / num_units * 1e6
    print(f"{PLAIN:28} {plain:9.1f} us per unit in all")
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


def part_times(run: Callable[[], None], rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    """Return seconds and calls per step of each part: medians, less what taking the time takes."""
    originals = [
        (part, owner, name, getattr(owner, name))
        for part, places in PARTS.items()
        for owner, name in places
    ]
    found: list[Clock] = []
    idle = Clock()
    empty = idle.around(next(iter(PARTS)), lambda: None)
    for _ in range(10_000):
        empty()
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
    overhead = idle.seconds[next(iter(PARTS))] / 10_000
    medians = {
        part: statistics.median(
            clock.seconds[part] - clock.calls[part] * overhead for clock in found
        )
        for part in PARTS
    }
    return medians, found[-1].calls


def floors(num_parameters: int, strategy: Strategy) -> dict[str, float]:
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
    num_gathers = 2 if strategy is Strategy.FULL_SHARD else 1

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
    strategy: Strategy,
) -> None:
    floor = floors(num_parameters, strategy)
    scale = 1e6 / arguments.units
    columns: dict[str, dict[str, float]] = {
        "floor": {part: seconds * 1e6 for part, seconds in floor.items()}
    }
    for name in (name for name in steps if OURS in name):
        plain = measure(
            {PLAIN: steps[PLAIN], name: steps[name]}, arguments.rounds, clock=time.process_time
        )
        times, _ = part_times(steps[name], arguments.rounds)
        column = columns[name] = {part: seconds * scale for part, seconds in times.items()}
        column[REST] = max(plain.above_plain(name) * scale - sum(column.values()), 0.0)
    print(f"\n{'':20}" + "".join(f"{name:>28}" for name in columns))
    for part in [*PARTS, REST, "in all"]:
        values = [
            sum(column.values()) if part == "in all" else column.get(part)
            for column in columns.values()
        ]
        print(
            f"{part:20}"
            + "".join(f"{'' if value is None else f'{value:.1f} us':>28}" for value in values)
        )


def print_profile(run: Callable[[], None], num_units: int, lines: int) -> None:
    """Print the functions with the most own time, per unit and step.

    The profiler adds about the same to every call, so many short calls look dearer than they are:
    compare with a run without it.
    """
    for _ in range(3):
        run()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(PROFILED_STEPS):
        run()
    profiler.disable()
    print(f"{'own us':>8} {'total us':>9} {'calls':>7}   per unit and step")
    for own, total, calls, where in sorted(_functions(profiler), reverse=True)[:lines]:
        scale = 1 / (PROFILED_STEPS * num_units)
        print(f"{own * scale * 1e6:8.2f} {total * scale * 1e6:9.2f} {calls * scale:7.2f}   {where}")


def _functions(profiler: cProfile.Profile) -> Iterator[tuple[float, float, int, str]]:
    """Yield own seconds, seconds with what was called, calls and the place of every function."""
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (file, line, function), (_, calls, own, total, _) in stats.items():
        yield (
            own,
            total,
            calls,
            function if file == "~" else f"{_short(file.split('/'))}:{line} {function}",
        )


def _short(path: Sequence[str]) -> str:
    return "/".join(path[-2:])


if __name__ == "__main__":
    raise SystemExit(main())
