"""Hooks around every optimizer's step and state dict: what is checked there, and why, is in
``_state/optimizer_checks.py``; ``_engine/user_changes.py`` counts steps."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._engine import user_changes
from .._state import optimizer_checks
from .patches import Patch, Undo, around_method


def _patch() -> Iterator[Undo]:
    yield register_optimizer_step_pre_hook(optimizer_checks.before_step).remove
    yield register_optimizer_step_pre_hook(user_changes.steps.check).remove
    yield register_optimizer_step_post_hook(user_changes.steps.add).remove
    yield user_changes.steps.see()
    yield around_method(Optimizer, "state_dict", optimizer_checks.with_owner)
    yield around_method(Optimizer, "load_state_dict", optimizer_checks.load_own)


patches = Patch(_patch)
