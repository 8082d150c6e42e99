"""What torch's private FSDP modules offered to parts of torch and to clients, in terms of ours."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .._engine.dtypes import map_tensors
from .._front_ends.flat.client_attributes import (
    FlatParamHandle,
    TrainingState,
    lazy_init,
    root_pre_forward,
)
from .._state.names import FSDP_WRAPPED_MODULE, clean_name
from .._torch_private import ComposableState
from ..fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = [
    "FSDP_FLATTENED",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "FSDPState",
    "FlatParamHandle",
    "HandleTrainingState",
    "TrainingState",
    "clean_tensor_name",
    "collect_grad_tensors",
    "construct_wrap_fn",
    "finish_backward",
    "handles_of",
    "is_flattened",
    "lazy_init",
    "module_state",
    "named_parameters_with_duplicates",
    "post_order_apply",
    "replace_grad_tensors",
    "root_pre_forward",
    "set_flattened",
]

FSDP_PREFIX = FSDP_WRAPPED_MODULE + "."
FSDP_FLATTENED = "_fsdp_flattened"

clean_tensor_name = clean_name


class FSDPState(ComposableState):
    """No object of ours is one: it is asked for by isinstance."""


class HandleTrainingState(enum.Enum):
    """What a handle of a wrapped model is doing."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


# -- wrapped models


def module_state(module: nn.Module) -> FullyShardedDataParallel | None:
    """Return a wrapper itself, as torch's is its own state; None for any other module."""
    return module if isinstance(module, FullyShardedDataParallel) else None


def handles_of(module: nn.Module) -> list[FlatParamHandle]:
    wrappers = FullyShardedDataParallel.fsdp_modules(module)
    return [handle for each in wrappers for handle in each._all_handles if each._is_root]


def finish_backward(state: nn.Module, module: nn.Module) -> None:
    """Clients call it after an exception in backward. The next step begins with what it did."""


# -- parameters


def set_flattened(tensor: torch.Tensor) -> None:
    setattr(tensor, FSDP_FLATTENED, True)


def is_flattened(tensor: torch.Tensor) -> bool:
    return getattr(tensor, FSDP_FLATTENED, False)


def named_parameters_with_duplicates(
    module: nn.Module, **options: Any
) -> list[tuple[str, nn.Parameter]]:
    """Also for modules whose ``named_parameters`` does not know ``remove_duplicate``."""
    try:
        return list(module.named_parameters(remove_duplicate=False, **options))
    except (AssertionError, TypeError):
        return list(module.named_parameters(**options))


# -- tensors in nested values


def collect_grad_tensors(output: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors in nested dicts, lists, tuples and dataclasses that require grad."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(output, note)
    return tuple(found)


def replace_grad_tensors(output: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return ``output`` with the tensors that ``collect_grad_tensors`` finds replaced, in order."""
    return map_tensors(output, lambda tensor: next(tensors) if tensor.requires_grad else tensor)


# -- wrapping


def construct_wrap_fn(
    root: nn.Module, options_of: Mapping[nn.Module, dict[str, Any]], wrap: Callable[..., nn.Module]
) -> Callable[[nn.Module], nn.Module | None]:
    """Return a function that wraps a module with its options, or returns None for the root and for
    modules without options."""

    def wrapped(module: nn.Module) -> nn.Module | None:
        if module is root or module not in options_of:
            return None
        return wrap(module, **options_of[module])

    return wrapped


def post_order_apply(root: nn.Module, change: Callable[[nn.Module], nn.Module | None]) -> None:
    """Call ``change`` once for each module, children first. A module that it returns takes the
    place of the first one that holds the old module."""
    done: set[nn.Module] = {root}

    def visit(module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            if child in done:
                continue
            done.add(child)
            visit(child)
            if (new := change(child)) is not None:
                setattr(module, name, new)

    visit(root)
    if change(root) is not None:
        raise ValueError("the root has no parent that could hold another module in its place")
