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
    limit           ours only: "met" if the ratios are within LIMITS"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch
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
from measuring import Limits, Table, Timings, fake_ranks, measure, options, verdict_on
from torch import nn

LIMITS: Limits = {FSDP1: 0.15, FSDP2: 0.12}
FULLY_SHARD_LIMITS: Limits = {FSDP2: 1 / 3}
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP"]
ELEMENTS = 4  # of a parameter


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
    return print_table(timings, arguments.units)


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


if __name__ == "__main__":
    raise SystemExit(main())
