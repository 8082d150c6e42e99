"""Our versions of what torch's private FSDP modules offer to parts of torch and to clients."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from .._engine.nested import map_tensors, tensors_in
from .._front_ends.flat.flat_param_handle import FlatParamHandle
from .._state.units import clean_name
from ..errors import StateError
from ..fully_sharded_data_parallel import FlatParameter, FullyShardedDataParallel

_FLATTENED = "_fsdp_flattened"


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


def states_with_modules(
    module: nn.Module,
) -> tuple[list[FullyShardedDataParallel], list[FullyShardedDataParallel]]:
    wrappers = FullyShardedDataParallel.fsdp_modules(module)
    return wrappers, list(wrappers)


def lazy_init(state: nn.Module, module: nn.Module) -> nn.Module:
    """Nothing is left to initialize here."""
    return state


def root_pre_forward(
    state: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward needs no preparation here."""
    return args, kwargs


def finish_backward(state: nn.Module, module: nn.Module) -> None:
    """Clients call it after an exception in backward; the next forward does the same by itself."""


def post_backward_hook(*unused: Any) -> NoReturn:
    """Clients replace it by a wrapper around it; nothing calls either."""
    raise StateError.of(
        "_post_backward_hook() was called.",
        expected="no call: backward reduces gradients and reshards by itself",
        got="a call of torch.distributed.fsdp._runtime_utils._post_backward_hook",
        where="fsdp_compat.install()",
        fix="leave the call out; to change how gradients are reduced, use "
        "model.register_comm_hook(state, hook)",
    )


def reshard(
    state: FullyShardedDataParallel,
    of: FlatParamHandle | None,
    free_unsharded_flat_param: bool = True,
) -> None:
    if of is not None:
        of.reshard(free_unsharded_flat_param)


def summoned(
    module: nn.Module, state: FullyShardedDataParallel, **options: bool
) -> contextlib.AbstractContextManager[None]:
    """Collective, see ``summon_full_params``, here of one wrapper."""
    return FullyShardedDataParallel.summon_full_params(state, recurse=False, **options)


# -- process groups


def node_groups(
    group: dist.ProcessGroup, num_devices_per_node: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of this rank for HYBRID_SHARD: the ranks of its node, and those with its
    place in the other nodes. Collective over all ranks."""
    inside, _ = dist.new_subgroups(num_devices_per_node)
    ranks = dist.get_process_group_ranks(group)
    rows = [ranks[first::num_devices_per_node] for first in range(num_devices_per_node)]
    across, _ = dist.new_subgroups_by_enumeration(rows, backend=dist.get_backend(group))
    return inside, across


# -- parameters


def set_flattened(tensor: torch.Tensor) -> None:
    setattr(tensor, _FLATTENED, True)


def is_flattened(tensor: torch.Tensor) -> bool:
    return getattr(tensor, _FLATTENED, False)


def named_parameters_with_duplicates(
    module: nn.Module, **options: Any
) -> list[tuple[str, nn.Parameter]]:
    """Works for modules whose ``named_parameters`` lacks ``remove_duplicate``, too."""
    try:
        return list(module.named_parameters(remove_duplicate=False, **options))
    except (AssertionError, TypeError):
        return list(module.named_parameters(**options))


def names_of_params(
    model: nn.Module, dedup_shared_params: bool = True
) -> dict[nn.Parameter, list[str]]:
    """Return each parameter's names before wrapping; if deduplicated, only the first."""
    found: dict[nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            own = parameter._fqns if isinstance(parameter, FlatParameter) else [name]
            names = [clean_name(f"{prefix}.{each}".lstrip(".")) for each in own]
            if parameter not in found:
                found[parameter] = names
            elif not dedup_shared_params:
                found[parameter] += names
    return found


# -- tensors in nested values


def collect_grad_tensors(output: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors in nested dicts, lists, tuples and dataclasses that require grad."""
    return tuple(t for t in tensors_in(output, in_plain_objects=False) if t.requires_grad)


def replace_grad_tensors(output: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return ``output`` with the tensors that ``collect_grad_tensors`` finds replaced, in order."""
    return map_tensors(output, lambda tensor: next(tensors) if tensor.requires_grad else tensor)


# -- wrapping


def construct_wrap_fn(
    root: nn.Module, options_of: Mapping[nn.Module, dict[str, Any]], wrap: Callable[..., nn.Module]
) -> Callable[[nn.Module], nn.Module | None]:
    """Return a function that wraps modules with options, and returns None for others."""

    def wrapped(module: nn.Module) -> nn.Module | None:
        if module is root or module not in options_of:
            return None
        return wrap(module, **options_of[module])

    return wrapped


def post_order_apply(root: nn.Module, change: Callable[[nn.Module], nn.Module | None]) -> None:
    """Call ``change`` on each module, children first, and put what it returns in its place."""
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
