"""Names without the parts that wrappers add."""

from __future__ import annotations

__all__ = ["FSDP_WRAPPED_MODULE", "clean_name"]

FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"  # the child that holds the wrapped module, named as in torch
_WRAPPERS = (f"{FSDP_WRAPPED_MODULE}.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """Return a parameter's, buffer's or module's name as it was before FSDP and activation checkpointing wrapped anything."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removesuffix(f".{FSDP_WRAPPED_MODULE}") if name != FSDP_WRAPPED_MODULE else ""
