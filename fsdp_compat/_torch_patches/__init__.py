"""Everything that fsdp_compat changes in torch for the whole process, and how to undo it.

``import fsdp_compat`` changes one thing: ``torch.load(weights_only=True)`` accepts the few classes
that sharded state dicts consist of (``torch.serialization.get_safe_globals()``). The first wrapped
model installs every patch listed in ``PATCHES``; each is a module with ``patch()``, which does
nothing when it is called again, and ``undo()``, which puts back what was there before.
"""

from __future__ import annotations

import types
from collections.abc import Iterable

from .._state import optimizers
from .._state.model_units import ModelUnit
from . import assignments, clip_grad, dcp_adapter, hugging_face_storage

__all__ = ["PATCHES", "patch_torch", "undo"]

PATCHES: tuple[types.ModuleType, ...] = (
    clip_grad,
    dcp_adapter,
    hugging_face_storage,
    assignments,
    optimizers,
)


def patch_torch(units: Iterable[ModelUnit]) -> None:
    """Install all patches, and let them know about new units."""
    for each in PATCHES:
        each.patch()
    for unit in units:
        assignments.watch(unit.unit)


def undo() -> None:
    """Take all patches out again. The next wrapped model installs them anew."""
    for each in PATCHES:
        each.undo()
