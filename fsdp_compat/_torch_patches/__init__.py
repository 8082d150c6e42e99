"""Everything that fsdp_compat changes in torch for the whole process, and how to undo it.

``import fsdp_compat`` changes one thing: ``torch.load(weights_only=True)`` accepts the classes in
sharded state dicts (``torch.serialization.get_safe_globals()``). Wrapping the first model installs
every patch in ``PATCHES``; ``fully_shard`` installs only the last five. All of them
are reverted by ``undo_torch_patches``."""

from __future__ import annotations

from torch import nn

from .._engine import user_changes
from .._engine.on_import import PatchOnImport
from .._engine.patches import Patch
from .._front_ends import data_parallel
from .._state import compiled, optimizer_patches
from .._state.units import model_units_in
from . import assignments, clip_grad, dcp_adapter, hugging_face_storage, own_values

PATCHES: tuple[Patch | PatchOnImport, ...] = (
    clip_grad.patches,
    dcp_adapter.patches,
    hugging_face_storage.patches,
    *own_values.patches,
    assignments.patches,
    optimizer_patches.patches,
    data_parallel.patches,
    user_changes.patches,
    *compiled.patches,
)


def patch_torch(model: nn.Module) -> None:
    """Install all patches, and watch assignments in the units of a model."""
    for each in PATCHES:
        each.patch()
    for found in model_units_in(model):
        assignments.watch(found.unit)


def undo_torch_patches() -> None:
    """Restore everything that wrapping a model has changed in torch for the whole process.

    For tests, and for programs that train with fsdp_compat first and with plain torch afterwards.
    Models that are sharded already then lack these patches: torch.nn.utils.clip_grad_norm_, for
    example, sees only this rank's shards. Wrapping another model applies the patches again.
    """
    for each in PATCHES:
        each.undo()
