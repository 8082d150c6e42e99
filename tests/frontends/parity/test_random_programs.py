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


OPTIONS: dict[str, dict[str, Any]] = {
    "use_orig_params, kept after forward": {
        "use_orig_params": True,
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    },
    "unused units allowed": {"allow_unused_units": True},
    "default": {},
    "no prefetch": {"backward_prefetch": None},
}


@pytest.mark.parametrize("name", sample(list(OPTIONS), 0, 1))
def test_random_programs_on_two_ranks_train_as_unsharded(name: str) -> None:
    run_ranks(2, _runs_programs, 0, **OPTIONS[name])


def test_random_programs_on_two_replicas_train_as_unsharded() -> None:
    run_ranks(4, _runs_programs, 2000, replicas=2)


def test_random_programs_on_three_ranks_train_as_unsharded() -> None:
    run_ranks(3, _runs_programs, 3000)


def test_random_programs_on_one_rank_train_as_unsharded() -> None:
    run_ranks(1, _runs_programs, 4000, use_orig_params=True)
