"""How much of a large matrix is tested: a fixed sample, or all with FSDP_COMPAT_TEST_ALL=1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value")

TEST_ALL = os.environ.get("FSDP_COMPAT_TEST_ALL") == "1"
EXTENT = (
    "All cases of large matrices run, as FSDP_COMPAT_TEST_ALL is 1."
    if TEST_ALL
    else "Large matrices are sampled, by .ci/run too; FSDP_COMPAT_TEST_ALL=1 runs all cases."
)


def sample(values: Sequence[Value], *chosen: int) -> list[Value]:
    """Return the values with these indices, or all."""
    return list(values) if TEST_ALL else [values[index] for index in chosen]


def at_most(number: int, of_all: int) -> int:
    """Return ``number``, or the number if all is tested."""
    return of_all if TEST_ALL else number
