"""The units of a wrapped model, by the names that their modules had before."""

from __future__ import annotations

from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP

_WRAPPED = "_fsdp_wrapped_module."


def without_wrappers(name: str) -> str:
    """Return the name of a module or parameter in the model that was wrapped."""
    return name.replace(_WRAPPED, "")


def units_of(model: nn.Module) -> dict[str, FSDP]:
    """Return every unit by name, outer ones first; the root is ""."""
    return {
        without_wrappers(name): module
        for name, module in model.named_modules()
        if isinstance(module, FSDP)
    }
