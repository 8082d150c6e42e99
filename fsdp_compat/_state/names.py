"""Names without the parts that wrappers add."""

from __future__ import annotations

__all__ = ["FSDP_WRAPPED_MODULE", "clean_name", "without_checkpoint_wrapper"]

FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"  # the child that holds the wrapped module, named as in torch
_CHECKPOINT_WRAPPED_MODULE = "_checkpoint_wrapped_module"  # torch's wrapper of activation checkpointing has its module there
_WRAPPERS = frozenset({FSDP_WRAPPED_MODULE, _CHECKPOINT_WRAPPED_MODULE})


def clean_name(name: str) -> str:
    """Return a parameter's, buffer's or module's name as it was before FSDP and activation checkpointing wrapped anything."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def without_checkpoint_wrapper(name: str) -> str:
    """Return a name as the wrapper of activation checkpointing reports it: without its own part."""
    return ".".join(part for part in name.split(".") if part != _CHECKPOINT_WRAPPED_MODULE)
