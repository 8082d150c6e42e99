"""Checks that reject modules and parameters before ``fully_shard`` changes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ... import _torch_private
from ..._engine.ownership import OrigParam
from ..._state import optimizer_checks
from ..._stores.placement import SpmdMesh
from ...errors import AssertedUsageError, UsageError, wrong_type
from ..flat.flat_unit import is_wrapped, is_wrapper
from ..flat.module_checks import refuse_output_projection, refuse_unusable
from .arguments import WHERE

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def modules_of(given: Any) -> list[nn.Module]:
    """Return the modules that ``fully_shard`` was called with: one, or a list of some."""
    if isinstance(given, nn.Module) and not isinstance(given, (list, tuple)):
        listed = [given]
    elif isinstance(given, (list, tuple)) and all(isinstance(m, nn.Module) for m in given):
        listed = list(given)
    else:
        listed = []
    if not listed:
        raise wrong_type("module", "a torch.nn.Module, or a list of at least one", given, WHERE)
    for module in listed:
        if isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward:
            raise UsageError.of(
                f"A {type(module).__name__} is never called, so its parameters would never be "
                "unsharded.",
                expected="a module with a forward",
                got=f"a {type(module).__name__} of {len(module)} items",
                where="argument 'module' of fully_shard",
                fix="apply fully_shard to the modules in it, and to the module around it",
            )
    return listed


def refuse_modules(roots: Sequence[nn.Module], is_sharded: Callable[[nn.Module], bool]) -> None:
    """Raise UsageError for modules that are already sharded, by any front end."""
    for root in roots:
        if is_sharded(root):
            raise AssertedUsageError.of(
                "fully_shard was already applied to the module.",
                expected="one call per module",
                got=f"a second call for a {type(root).__name__}",
                where="argument 'module' of fully_shard",
                fix="shard each module once, inner modules first",
            )
        refuse_output_projection(root, "argument 'module' of fully_shard")
        for name, module in root.named_modules():
            other = None if is_sharded(module) else _other_owner(module)
            if other is not None:
                raise AssertedUsageError.of(
                    f"{other} manages a part of the module.",
                    expected="modules without FullyShardedDataParallel, and without "
                    "fully_shard or replicate of torch",
                    got=f"a {type(module).__name__}" + (f" at {name!r}" if name else ""),
                    where=f"fully_shard({type(root).__name__})",
                    fix="use one of them for the whole model",
                )


def _other_owner(module: nn.Module) -> str | None:
    """Return who else shards a module."""
    if is_wrapper(module) or is_wrapped(module):
        return "FullyShardedDataParallel"
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.distributed.fsdp"):
            return f"torch's {cls.__name__}"
    return (
        "torch's fully_shard" if "fully_shard" in _torch_private.composable_apis(module) else None
    )


def refuse_parameters(
    roots: Sequence[nn.Module],
    params: Sequence[OrigParam],
    owner_of: Callable[[nn.Module, str], object | None],
    owned: set[int],
) -> None:
    """Raise UsageError for parameters that cannot be sharded. owner_of: returns the call that owns
    an attribute, or None. owned: ids of the sharded parameters of such calls."""
    where = f"fully_shard({', '.join(type(root).__name__ for root in roots)})"
    for param in params:
        parameter = param.parameter
        refuse_unusable(param.name, parameter, param.slots[0][0], where, "fully_shard")
        if any(owner_of(module, attribute) is not None for module, attribute in param.slots):
            raise AssertedUsageError.of(
                "A parameter is sharded already, by a call for a module around this one.",
                expected="inner modules first: a call for a module takes all its parameters "
                "that no earlier call has taken",
                got=f"{param.name!r}, which another call of fully_shard owns",
                where=where,
                fix="call fully_shard for the inner modules, then for the outer one",
            )
        if id(parameter) in owned or optimizer_checks.is_managed(parameter):
            raise AssertedUsageError.of(
                "A parameter is shared by modules of two calls of fully_shard, which would "
                "train two copies of it.",
                expected="all modules that share a parameter in one call",
                got=f"{param.name!r}, which another call has sharded",
                where=where,
                fix="pass the modules together, as in fully_shard([embedding, head]), or call "
                "fully_shard only for a module that contains both",
            )
        if _torch_private.optimizers_in_backward(parameter):
            raise UsageError.of(
                "An optimizer that steps in backward holds a parameter that fully_shard replaces.",
                expected="_apply_optimizer_in_backward() after fully_shard",
                got=f"a call before, for {param.name!r}",
                where=where,
                fix="shard the model first",
            )


def refuse_dtensors(params: Sequence[OrigParam], device: torch.device) -> None:
    """Raise UsageError for a DTensor on another device than ``device``, as it cannot be moved."""
    for param in params:
        parameter = param.parameter
        if _torch_private.is_dtensor(parameter) and parameter.device.type not in (
            device.type,
            "meta",
        ):
            raise UsageError.of(
                "A parameter is a DTensor on another device than the mesh.",
                expected=f"a DTensor on {device.type!r} or 'meta'",
                got=f"{param.name!r} on {parameter.device.type!r}",
                where=WHERE,
                fix="distribute the module over a mesh of the same device type",
            )


def require_dtensors_on(mesh: SpmdMesh, params: Sequence[OrigParam]) -> None:
    """Raise UsageError unless all are DTensors on ``mesh``, replicated on its data dims."""
    for param in params:
        parameter: Any = param.parameter
        if not _torch_private.is_dtensor(parameter):
            got = f"{param.name!r}, a plain tensor"
        elif parameter.device_mesh != mesh.mesh:
            got = f"{param.name!r} on {parameter.device_mesh}"
        elif not all(parameter.placements[dim].is_replicate() for dim in mesh.data_dims):
            got = f"{param.name!r} with the placements {tuple(parameter.placements)}"
        else:
            continue
        raise UsageError.of(
            "With dp_mesh_dims every parameter is a DTensor on the whole mesh.",
            expected=f"DTensors on {mesh.mesh}, Replicate() on its data-parallel dimensions "
            f"{mesh.data_dims}",
            got=got,
            where="argument 'dp_mesh_dims' of fully_shard",
            fix="call torch.distributed.tensor.distribute_module(module, mesh) first",
        )
