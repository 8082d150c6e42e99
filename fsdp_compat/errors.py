"""Every exception that fsdp_compat raises on purpose.

    FsdpCompatError
    ├── UsageError       (also ValueError)     an argument, or a combination of them, cannot work
    ├── StateError       (also RuntimeError)   a call that is fine came at the wrong moment
    └── CheckpointError  (also RuntimeError)   a file or a state dict is not what it should be

A message has four facts: what was expected, what was found, where (unit, parameter, rank), and what
to do."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

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


# Errors that are caught as what torch raises in their place, too.


class AssertedStateError(StateError, AssertionError):
    """A call at the wrong moment, where torch asserts."""


class ValueCheckpointError(CheckpointError, ValueError):
    """A state dict that is not what it should be; torch's type for it is ValueError."""


class ValueStateError(StateError, ValueError):
    """A call at the wrong moment; torch's type for it is ValueError."""


class AssertedUsageError(UsageError, AssertionError):
    """An argument that cannot work, where torch asserts."""


class NotImplementedUsageError(UsageError, NotImplementedError):
    """A combination of arguments that cannot work; torch's type for it is NotImplementedError."""


class RuntimeUsageError(UsageError, RuntimeError):
    """An argument that cannot work; torch's type for it is RuntimeError."""


class TypeUsageError(UsageError, TypeError):
    """Something of another type; torch's type for it is TypeError."""


def wrong_type(name: str, expected: str, got: object, where: str) -> TypeUsageError:
    """The error for an argument ``name`` of the function ``where``."""
    long = (nn.Module, torch.Tensor, torch.optim.Optimizer, dict)
    shown = f"a {type(got).__name__}"
    if not isinstance(got, long):
        shown = (
            f"{textwrap.shorten(repr(got), 200, placeholder=' ...')} of type {type(got).__name__}"
        )
    return TypeUsageError(
        explain(
            f"{name} has the wrong type.",
            expected=expected,
            got=shown,
            where=f"argument {name!r} of {where}",
            fix=f"pass {expected}",
        )
    )


def require_module(module: Any, where: str) -> None:
    """Raise UsageError for what is no module."""
    if not isinstance(module, nn.Module):
        raise wrong_type("module", "a torch.nn.Module", module, where)


def require_model_and_optimizer(model: Any, optim: Any, where: str) -> None:
    """Raise UsageError for what is no module, or no optimizer: arguments that are easily
    swapped."""
    order = "note the order of the arguments"
    if not isinstance(model, nn.Module):
        raise wrong_type("model", f"a torch.nn.Module ({order})", model, where)
    if not isinstance(optim, torch.optim.Optimizer):
        raise wrong_type("optim", f"a torch.optim.Optimizer ({order})", optim, where)


def require_group(group: Any, where: str) -> None:
    """Raise UsageError for what is no process group that is alive, nor None."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise wrong_type("group", "a torch.distributed.ProcessGroup, or None", group, where)


def takes(function: Callable[..., Any], num_arguments: int) -> bool:
    """True if a function can be called with so many positional arguments, or does not say what it
    takes."""
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:
        pass
    return True


def truth(name: str, flag: Any, where: str) -> bool:
    """Return the truth value of a flag: None, 0, 1 and numpy's booleans are as good as True and
    False.

    Raises UsageError for a text, as "False" would be true, and for anything without a truth value,
    such as several numbers.
    """
    if not isinstance(flag, (str, bytes, bytearray)):
        try:
            return bool(flag)
        except (RuntimeError, TypeError, ValueError):
            pass
    raise wrong_type(name, "True or False", flag, where)


def require_bools(where: str, **flags: Any) -> None:
    """Raise UsageError for a flag without a usable truth value, see ``truth``."""
    for name, flag in flags.items():
        truth(name, flag, where)
