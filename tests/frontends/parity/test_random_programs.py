"""Random programs over units: frozen parts, checkpoints of both kinds, detached and hidden inputs,
several backwards per step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fsdp_compat import ShardingStrategy
from tests.support.models import Block, Part, Program
from tests.support.parity import make_pair, random_step
from tests.support.ranks import run_ranks
from tests.support.sampling import at_most, sample

pytestmark = pytest.mark.slow

NUM_PROGRAMS = at_most(4, of_all=20)  # per test, one step each


def _runs_programs(start: int, **options: Any) -> None:
    pair = make_pair(Program, (Part, Block), **options)
    for seed in range(start, start + NUM_PROGRAMS):
        try:
            pair.step(partial(random_step, seed), zeros=True)
        except Exception as error:
            raise AssertionError(f"program {seed}: {error}") from error


# (number of ranks, first program, options)
RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "use_orig_params, kept after forward": (
        2,
        0,
        {"use_orig_params": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    ),
    "unused units allowed": (2, 0, {"allow_unused_units": True}),
    "replicas": (4, 2000, {"replicas": 2}),
    "three ranks": (3, 3000, {}),
    "one rank": (1, 4000, {"use_orig_params": True}),
    "default": (2, 0, {}),
    "no prefetch": (2, 0, {"backward_prefetch": None}),
}


@pytest.mark.parametrize("name", sample(list(RUNS), *range(5)))
def test_random_programs_train_as_unsharded(name: str) -> None:
    num_ranks, start, options = RUNS[name]
    run_ranks(num_ranks, _runs_programs, start, **options)
