"""Every exception that fsdp_compat raises on purpose.

    FsdpCompatError
    ├── UsageError       (also ValueError)     an invalid argument, or combination of arguments
    ├── StateError       (also RuntimeError)   a valid call at the wrong moment
    └── CheckpointError  (also RuntimeError)   an invalid file or state dict

Each message has four facts: what was expected, what it got, where (unit, parameter, rank), and what
to do."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["CheckpointError", "FsdpCompatError", "StateError", "UsageError"]


class FsdpCompatError(Exception):
    """Base of all errors that fsdp_compat raises on purpose."""

    @classmethod
    def of(cls, what: str, *, expected: str, got: str, where: str, fix: str) -> Self:
        """Return an error: ``what`` is wrong, ``expected``, ``got``, ``where``, and a ``fix``."""
        return cls(explain(what, expected=expected, got=got, where=where, fix=fix))


class UsageError(FsdpCompatError, ValueError):
    """An argument, or a combination of arguments, is invalid; nothing was changed."""


class StateError(FsdpCompatError, RuntimeError):
    """A call came at a moment when it cannot work."""


class CheckpointError(FsdpCompatError, RuntimeError):
    """A checkpoint or state dict is missing, incomplete, or belongs to another model."""


def explain(what: str, *, expected: str, got: str, where: str, fix: str) -> str:
    """Return the text of an error: one sentence, then the four facts, each on a line of its own.

    The facts begin with small letters and have no full stop at the end. Names of classes may follow
    the article "a"."""
    text = (
        f"{what}\n  expected: {expected}\n  got:      {got}\n  where:    {where}\n  to do:    {fix}"
    )
    return re.sub(r"\b([Aa]) (?=[AEIO])", r"\1n ", text)


# Errors that are also instances of the type that torch raises in the same place.


class AssertedStateError(StateError, AssertionError):
    """A call at the wrong moment; torch raises AssertionError."""


class NotImplementedStateError(StateError, NotImplementedError):
    """A call at the wrong moment; torch raises NotImplementedError."""


class ValueCheckpointError(CheckpointError, ValueError):
    """An invalid state dict; torch raises ValueError."""


class ValueStateError(StateError, ValueError):
    """A call at the wrong moment; torch raises ValueError."""


class AssertedUsageError(UsageError, AssertionError):
    """An invalid argument; torch raises AssertionError."""


class NotImplementedUsageError(UsageError, NotImplementedError):
    """An unsupported combination of arguments; torch raises NotImplementedError."""


class RuntimeUsageError(UsageError, RuntimeError):
    """An invalid argument; torch raises RuntimeError."""


class TypeUsageError(UsageError, TypeError):
    """A value of the wrong type; torch raises TypeError."""


def wrong_type(
    name: str, expected: str, got: object, where: str = "", fix: str = ""
) -> TypeUsageError:
    """Return the error for an argument ``name`` of the function ``where``, if that is known."""
    where = f"argument {name!r}" + (f" of {where}" if where else "")
    return _refused(f"{name} has the wrong type.", expected, got, where, fix)


def unusable(what: str, expected: str, got: object, where: str, fix: str = "") -> TypeUsageError:
    """Return the error for a value of the wrong type, given or returned by the user."""
    return _refused(f"{what} cannot be used.", expected, got, where, fix)


def _refused(first: str, expected: str, got: object, where: str, fix: str) -> TypeUsageError:
    fix = fix or f"pass {expected}"
    return TypeUsageError.of(first, expected=expected, got=_shown(got), where=where, fix=fix)


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, (nn.Module, torch.optim.Optimizer, dict)):  # long
        return f"a {type(value).__name__}"
    text = textwrap.shorten(repr(value), 200, placeholder=" ...")
    return f"{text} of type {type(value).__name__}"


def require_module(module: Any, where: str) -> None:
    """Raise UsageError unless ``module`` is a module."""
    if not isinstance(module, nn.Module):
        raise wrong_type("module", "a torch.nn.Module", module, where)


def require_model_and_optimizer(
    model: Any, optimizer: Any, where: str, name: str = "optim"
) -> None:
    """Raise UsageError unless these are a module and an optimizer: they are easily swapped."""
    order = "note the order of the arguments"
    if not isinstance(model, nn.Module):
        raise wrong_type("model", f"a torch.nn.Module ({order})", model, where)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise wrong_type(name, f"a torch.optim.Optimizer ({order})", optimizer, where)


def require_group(group: Any, where: str) -> None:
    """Raise UsageError unless ``group`` is a process group or None."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise wrong_type("group", "a torch.distributed.ProcessGroup, or None", group, where)


def takes(function: Callable[..., Any], num_arguments: int) -> bool:
    """True if a function accepts so many positional arguments, or has no signature."""
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:
        pass
    return True


def with_arguments_checked(function: Callable[P, T]) -> Callable[P, T]:
    """Let a front end raise TypeUsageError for arguments that it does not have."""
    signature, name = inspect.signature(function), function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeUsageError.of(
                f"{name} cannot be called like this.",
                expected=", ".join(each for each in signature.parameters if each != "self"),
                got=str(error).removeprefix("got "),
                where=f"the arguments of {name}",
                fix="see examples/MIGRATING.md for the arguments of DDP and of both front ends",
            ) from None
        return function(*args, **kwargs)

    return call


def function_or_none(name: str, given: Any, argument: str, where: str) -> Any:
    """Return ``given``, a function of one ``argument``, or None. Raises UsageError for anything
    else."""
    if given is None or (callable(given) and takes(given, 1)):
        return given
    raise wrong_type(name, f"a function that takes {argument}, or None", given, where)


def require_float_dtype(name: str, given: Any, where: str) -> None:
    """Raise UsageError unless ``given`` is a floating-point dtype of 16 bits or more, or None."""
    is_dtype = isinstance(given, torch.dtype) and given.is_floating_point and given.itemsize > 1
    if given is not None and not is_dtype:
        expected = "a floating-point torch.dtype of 16 bits or more, or None"
        raise wrong_type(name, expected, given, where)


def truth(name: str, flag: Any, where: str) -> bool:
    """Return the truth value of a flag, which may also be None, 0, 1 or a NumPy boolean.

    Raises UsageError for a string, because "False" would be true, and for values without a truth
    value, such as arrays."""
    if not isinstance(flag, (str, bytes, bytearray)):
        try:
            return bool(flag)
        except (RuntimeError, TypeError, ValueError):
            pass
    raise wrong_type(name, "True or False", flag, where)


def require_bools(where: str, **flags: Any) -> None:
    """Raise UsageError for a flag that ``truth`` refuses."""
    for name, flag in flags.items():
        truth(name, flag, where)
