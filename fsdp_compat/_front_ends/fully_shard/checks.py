"""Checks of the methods of sharded modules."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Any

from ...errors import StateError, UsageError, wrong_type
from .state import ShardedModules


def require_root(state: ShardedModules, call: str) -> None:
    if not state.is_root:
        raise StateError.of(
            f"{call}() works on the root only.",
            expected="a call on the outermost sharded module",
            got=f"a call on {state.label}",
            where=call,
            fix="call it on the module that the forward of the whole model begins with",
        )


def require_finalizable(root: ShardedModules, states: Iterable[ShardedModules]) -> None:
    if not root.finalizes_by_hand:
        raise StateError.of(
            "finalize_backward() was called without manual finalization.",
            expected="set_manual_backward_finalization(True) before the backward",
            got="backwards that reduce gradients themselves",
            where=root.label,
            fix="leave out the call, or turn on manual finalization",
        )
    all_states = list(states)
    without = next((state for state in all_states if not state.conduct.reduction.sync), None)
    if without is not None:
        raise StateError.of(
            "finalize_backward() was called while gradient synchronisation is off.",
            expected="set_requires_gradient_sync(True) before it",
            got="set_requires_gradient_sync(False)",
            where=without.label,
            fix="turn synchronisation on again after the last backward",
        )
    partial = next((each for each in all_states if each.holds_all_reduce), None)
    if partial is not None:
        raise StateError.of(
            "finalize_backward() was called while the all-reduce is off.",
            expected="set_requires_all_reduce(True) before it",
            got="set_requires_all_reduce(False) on a mesh with replicas",
            where=partial.label,
            fix="turn the all-reduce on again before the last backward",
        )


def require_one_mesh(state: ShardedModules, where: str) -> None:
    if not state.has_one_mesh:
        raise UsageError.of(
            "The parameters of the module lie on several meshes.",
            expected="a module whose parameters are on one mesh",
            got="other meshes from shard_placement_fn",
            where=where,
            fix="apply fully_shard to the modules with these parameters apart",
        )


def require_comm(comm: Any, expected: str, where: str) -> None:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise wrong_type(
            "comm",
            f"{expected}: callable, with a method allocate(size, *, dtype, device)",
            comm,
            where,
        )


def refuse_allocator(where: str, what: str) -> typing.NoReturn:
    raise StateError.of(
        "The buffers of collectives cannot be allocated like this.",
        expected="memory of torch's allocator, or a comm with an allocate() of its own",
        got=what,
        where=where,
        fix="pass a comm that allocates to set_custom_all_gather and set_custom_reduce_scatter",
    )
