"""Axis and Mesh validate their values, which would otherwise fail later in a collective."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_compat._comm.mesh import Axis, Mesh, replicated


@pytest.mark.parametrize(
    ("rank", "ranks", "members"),
    [(2, 2, (0, 1)), (-1, 2, (0, 1)), (0, 2, (0, 1, 2)), (0, 1, ())],
    ids=["rank too high", "rank too low", "too many members", "too few members"],
)
def test_axis_refuses_a_rank_that_is_not_a_member(
    rank: int, ranks: int, members: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {ranks}"):
        Axis(None, rank, ranks, members)


def test_axis_of_several_ranks_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match="an axis of 2 ranks needs a process group"):
        Axis(None, 0, 2, (0, 1))


def test_replicated_mesh_of_one_rank_has_one_rank() -> None:
    alone = Axis(None, 0, 1, (5,))
    assert replicated(Mesh(alone, alone)).ranks == 1


def test_replicated_refuses_a_mesh_of_two_axes() -> None:
    group: Any = "a process group"
    with pytest.raises(ValueError, match="no single group"):
        replicated(Mesh(Axis(group, 0, 2, (0, 1)), Axis(group, 0, 2, (0, 2))))
