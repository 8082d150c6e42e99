"""``register_comm_hook``: a user's function in place of the gradient reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..._engine.reduce_policy import CommHook
from ...errors import AssertedStateError, takes, wrong_type
from .flat_unit import FlatUnit, require_root


def register(own: FlatUnit, state: object, hook: Callable[..., Any]) -> None:
    """Implement ``FullyShardedDataParallel.register_comm_hook``."""
    runtime = own.runtime
    _refuse_hook(hook, {group.shard.ranks > 1 for group in runtime.groups})
    require_root(own.unit, "register_comm_hook()", AssertedStateError)
    runtime.require_idle("register_comm_hook")
    if any(group.gradients.policy.hook is not None for group in runtime.groups):
        raise AssertedStateError.of(
            "A communication hook is registered already.",
            expected="one call of register_comm_hook per model",
            got=f"a second call, with {hook!r}",
            where=own.unit.label,
            fix="register one hook that does both",
        )
    runtime.set_comm_hook(CommHook(state, hook))


def _refuse_hook(hook: Any, split: set[bool]) -> None:
    """Raise UsageError unless ``hook`` can be a communication hook.

    split: for each group, whether its gradients are split over ranks.
    """
    if split == {True}:
        expected = "hook(state, grad, output)"
    elif split == {False}:
        expected = "hook(state, grad)"
    else:
        expected = "hook(state, grad, output=None), because only some units are sharded"
    if not callable(hook) or not all(takes(hook, 3 if is_split else 2) for is_split in split):
        raise wrong_type("hook", f"a function {expected}", hook, "register_comm_hook(state, hook)")
