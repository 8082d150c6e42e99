"""Any combination of settings trains like the unsharded model in the same dtypes: a sample, the
same every time."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings

from tests.support.case import FLAT_FIELDS, Case, cases, trains_as_unsharded
from tests.support.ranks import run_ranks
from tests.support.sampling import at_most

ONE_MESH = {"strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], "mesh": [Case.mesh]}
sampled = settings(derandomize=True, max_examples=at_most(3, of_all=100))


@pytest.mark.slow
@sampled
@given(cases(FLAT_FIELDS))
@example(  # as many settings at once as possible
    Case(
        "original",
        "HYBRID_SHARD",
        precision="bf16+fp32",
        offload=True,
        backwards="sns",
        checkpoint="outside",
        frozen="toggled",
        wrapping="nested",
        clip="2",
        prefetch="POST forward",
    )
)
def test_four_ranks_train_as_the_unsharded_model(case: Case) -> None:
    run_ranks(4, trains_as_unsharded, case)


@pytest.mark.slow
@sampled
@given(cases(FLAT_FIELDS | ONE_MESH))
def test_two_ranks_train_as_the_unsharded_model(case: Case) -> None:
    run_ranks(2, trains_as_unsharded, case)


@pytest.mark.parametrize("front_end", ["flat", "original"])
def test_shards_of_whole_blocks_train_as_the_unsharded_model(front_end: str) -> None:
    for blocks in ("7", "rows", "whole"):
        run_ranks(3, trains_as_unsharded, Case(front_end, blocks=blocks, clip="2", frozen="some"))


def test_three_ranks_train_as_the_unsharded_model() -> None:
    odd: dict[str, str] = {"checkpoint": "function reentrant", "frozen": "some", "clip": "inf"}
    case = Case("flat", "SHARD_GRAD_OP", comm_hook=True, backwards="nns", **odd)  # type: ignore[arg-type]
    run_ranks(3, trains_as_unsharded, case)
