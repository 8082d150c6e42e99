"""Names without the parts that wrappers add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import takes, wrong_type

__all__ = [
    "FSDP_WRAPPED_MODULE",
    "Wanted",
    "clean_name",
    "everything",
    "wanted_by",
    "without_checkpoint_wrapper",
]

Wanted = Callable[
    [str, bool], bool
]  # (name, whether it is a parameter that requires grad) -> whether a state dict is to hold it

FSDP_WRAPPED_MODULE = (
    "_fsdp_wrapped_module"  # the child that holds the wrapped module, named as in torch
)
_CHECKPOINT_WRAPPED_MODULE = (
    "_checkpoint_wrapped_module"  # torch's wrapper of activation checkpointing has its module there
)
_WRAPPERS = frozenset({FSDP_WRAPPED_MODULE, _CHECKPOINT_WRAPPED_MODULE})


def clean_name(name: str) -> str:
    """Return a parameter's, buffer's or module's name as it was before FSDP and activation
    checkpointing wrapped anything."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def without_checkpoint_wrapper(name: str) -> str:
    """Return a name as the wrapper of activation checkpointing reports it: without its own part."""
    return ".".join(part for part in name.split(".") if part != _CHECKPOINT_WRAPPED_MODULE)


def everything(name: str, trainable: bool) -> bool:
    """The choice of a state dict without a filter."""
    return True


def wanted_by(given: Any, where: str) -> Wanted:
    """Return what a ``filter`` chooses: a function of a name, the string "trainable", or None for
    everything.

    Raises UsageError for anything else.
    """
    if given is None:
        return everything
    if given == "trainable":
        return lambda name, trainable: trainable
    if not callable(given) or not takes(given, 1):
        raise wrong_type(
            "filter",
            "a function of a name that returns True or False, the string 'trainable', or None",
            given,
            where,
        )
    return lambda name, trainable: bool(given(name))
