"""Any combination of settings trains like the unsharded model in the same dtypes: a sample, the
same every time.

A failure names its settings, ``Case(...)``, and the number of ranks; put it into CHOSEN to run it
alone."""

from __future__ import annotations

import random

import pytest

from tests.support.matrix import FIELDS, Case, draw_cases, run_cases
from tests.support.ranks import run_ranks
from tests.support.sampling import at_most, sample

CASES_PER_CALL = 4
NUM_CALLS = at_most(1, of_all=10)

CHOSEN = [  # two with as many settings at once as possible, and cases that have failed
    (
        4,
        Case(
            "HYBRID_SHARD",
            use_orig_params=True,
            precision="bf16+fp32",
            offload=True,
            backwards="sns",
            checkpoint="outside",
            frozen="toggled",
            wrapping="nested",
            clip="2",
            prefetch="POST forward",
        ),
    ),
    (
        3,
        Case(
            "SHARD_GRAD_OP",
            comm_hook=True,
            backwards="nns",
            checkpoint="function reentrant",
            frozen="some",
            clip="inf",
        ),
    ),
]


def _draw(num_ranks: int, rng: random.Random) -> list[Case]:
    if num_ranks == 4:
        return draw_cases(rng, CASES_PER_CALL)
    strategies = [name for name in FIELDS["strategy"] if "HYBRID" not in name]
    return draw_cases(rng, CASES_PER_CALL, strategy=strategies, mesh=[Case.mesh])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", sample([1, 2, 3, 4], 1, 3))
def test_any_settings_train_as_the_unsharded_model(num_ranks: int) -> None:
    rng = random.Random(num_ranks)
    for _ in range(NUM_CALLS):
        run_ranks(num_ranks, run_cases, _draw(num_ranks, rng))


@pytest.mark.parametrize(("num_ranks", "case"), CHOSEN)
def test_chosen_settings_train_as_the_unsharded_model(num_ranks: int, case: Case) -> None:
    run_ranks(num_ranks, run_cases, [case])
