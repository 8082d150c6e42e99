"""The mesh of ranks that each hold a whole copy."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_compat._comm.mesh import Axis, Mesh, replicated


def test_replicated_mesh_of_one_rank_has_one_rank() -> None:
    alone = Axis(None, 0, (5,))
    assert replicated(Mesh(alone, alone)).ranks == 1


def test_replicated_refuses_a_mesh_of_two_axes() -> None:
    group: Any = "a process group"
    with pytest.raises(ValueError, match="no single group"):
        replicated(Mesh(Axis(group, 0, (0, 1)), Axis(group, 0, (0, 2))))
