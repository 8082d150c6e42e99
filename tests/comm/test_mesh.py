"""An axis and a mesh check what they are made of: integers that do not fit would be found in a
collective otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_compat._comm.mesh import Axis, Mesh, replicated


@pytest.mark.parametrize(
    ("rank", "ranks", "members"),
    [(2, 2, (0, 1)), (-1, 2, (0, 1)), (0, 2, (0, 1, 2)), (0, 1, ())],
    ids=["rank too high", "rank too low", "too many members", "too few members"],
)
def test_the_rank_on_an_axis_is_one_of_its_members(
    rank: int, ranks: int, members: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {ranks}"):
        Axis(None, rank, ranks, members)


def test_an_axis_of_several_ranks_has_a_process_group() -> None:
    with pytest.raises(ValueError, match="an axis of 2 ranks needs a process group"):
        Axis(None, 0, 2, (0, 1))


def test_one_rank_is_its_own_replica() -> None:
    alone = Axis(None, 0, 1, (5,))
    assert replicated(Mesh(alone, alone)).ranks == 1


def test_two_real_axes_are_no_single_group_of_replicas() -> None:
    group: Any = "stands in for a process group"
    with pytest.raises(ValueError, match="no single group"):
        replicated(Mesh(Axis(group, 0, 2, (0, 1)), Axis(group, 0, 2, (0, 2))))
