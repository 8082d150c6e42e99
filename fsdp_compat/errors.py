"""Every exception that fsdp_compat raises on purpose.

    FsdpCompatError
    ├── UsageError       (also ValueError)     an argument, or a combination of them, cannot work
    ├── StateError       (also RuntimeError)   a call that is fine came at the wrong moment
    └── CheckpointError  (also RuntimeError)   a file or a state dict is not what it should be

A message has four facts: what was expected, what was found, where (unit, parameter, rank), and what
to do."""

from __future__ import annotations

__all__ = ["CheckpointError", "FsdpCompatError", "StateError", "UsageError"]


class FsdpCompatError(Exception):
    """Base of all errors that fsdp_compat raises on purpose."""


class UsageError(FsdpCompatError, ValueError):
    """An argument, or a combination of arguments, cannot work; nothing was changed."""


class StateError(FsdpCompatError, RuntimeError):
    """A call came at a moment at which it cannot be answered."""


class CheckpointError(FsdpCompatError, RuntimeError):
    """A checkpoint or state dict is missing, incomplete, or belongs to another model."""


def explain(what: str, *, expected: str, got: str, where: str, fix: str) -> str:
    """Return the text of an error: one sentence, then the four facts, each on a line of its own."""
    return (
        f"{what}\n  expected: {expected}\n  got:      {got}\n  where:    {where}\n  to do:    {fix}"
    )
