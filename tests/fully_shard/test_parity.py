"""Any settings train as the unsharded model, and as torch's FSDP2 on the same data: bit-equal on 2
ranks, where a sum has one order, and within rounding on 4."""

from __future__ import annotations

import warnings

import torch
from hypothesis import example, given, settings

from tests.support.case import FULLY_SHARD, ROW_FIELDS, Case, cases, values_of_training
from tests.support.case import trains_as_unsharded as trains
from tests.support.fully_sharded import OURS, TORCH, TORCH_TAKES_INTEGERS
from tests.support.parity import assert_same_values
from tests.support.ranks import run_ranks
from tests.support.sampling import at_most

TWO_RANKS = {"strategy": ["FULL_SHARD", "SHARD_GRAD_OP"], "mesh": [Case.mesh]}
# In a 16-bit dtype ``fully_shard`` sums like torch, with more roundings than the unsharded model.
EXACT = ROW_FIELDS | {"precision": ["fp32", "fp64", "bf16+fp32", "output"]}
# What torch has; inside a unit, its hooks change the order in which two gradients are added up.
BESIDE_TORCH = ROW_FIELDS | {
    "wrapping": ["root", "policy", "list"],
    "frozen": ["", "some", "unit"],
    "clip": [""],
    "optimizer": ["SGD"],
    "evaluates": [False],
    "shape": [each for each in ROW_FIELDS["shape"] if TORCH_TAKES_INTEGERS or each != "codes"],
}
if torch.__version__ >= "2.15":  # it rounds each gradient to bfloat16 before it is added
    BESIDE_TORCH["precision"] = EXACT["precision"]

REDUCED_BY_PARTS = Case(FULLY_SHARD, "HYBRID_SHARD", backwards="rrs")


@settings(derandomize=True, max_examples=at_most(5, of_all=100))
@given(cases(EXACT | TWO_RANKS))
def test_two_ranks_train_as_the_unsharded_model(case: Case) -> None:
    run_ranks(2, trains, case)


@settings(derandomize=True, max_examples=at_most(4, of_all=100))
@given(cases(EXACT))
@example(REDUCED_BY_PARTS)
def test_four_ranks_train_as_the_unsharded_model(case: Case) -> None:
    run_ranks(4, trains, case)


def _compare(case: Case, tolerance: float | None) -> None:
    """Collective. tolerance: see ``assert_close``; 0: bit-equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of views that FSDP modules return
        wanted, got = (values_of_training(case, library) for library in (TORCH, OURS))
    assert_same_values(got, wanted, str(case), tolerance)
    for name, value in got.items():
        other = wanted[name]
        assert value is None or other is None or value.dtype == other.dtype, name


@settings(derandomize=True, max_examples=at_most(10, of_all=200))
@given(cases(BESIDE_TORCH | TWO_RANKS))
def test_two_ranks_are_bit_equal_to_torch(case: Case) -> None:
    run_ranks(2, _compare, case, 0.0)


@settings(derandomize=True, max_examples=at_most(2, of_all=100))
@given(cases(BESIDE_TORCH | {"precision": ["fp32", "fp64"]}))
@example(REDUCED_BY_PARTS)
def test_four_ranks_are_within_rounding_of_torch(case: Case) -> None:
    run_ranks(4, _compare, case, None)
