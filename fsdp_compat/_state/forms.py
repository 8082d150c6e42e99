"""The state dict type of a model (full, sharded or local), which is set on every unit."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

from torch import nn

from ..api import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType, as_ours
from ..errors import (
    AssertedUsageError,
    RuntimeUsageError,
    UsageError,
    require_module,
    truth,
    wrong_type,
)
from . import model_loading
from .units import ModelUnit, default_form, in_form, is_lazy, model_unit_of, model_units_in


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the state dict type of all units in a module.

    Args:
        module: the model, or a module around or in it; it need not be a unit itself.
        state_dict_type: the kind of the state dicts of the model and its optimizer.
        state_dict_config: settings of the model's state dicts, of the class for that kind.
        optim_state_dict_config: settings of the optimizer's. Both default to the class's defaults.

    Returns:
        The previous settings; of a model that mixes both front ends, those of its wrapped modules.

    Raises:
        UsageError: a setting does not fit the kind or the model, or the units differed before."""
    require_module(module, "set_state_dict_type")
    kind = as_ours(state_dict_type, StateDictType, "state_dict_type")
    if kind is None:
        raise wrong_type("state_dict_type", "a StateDictType", kind, "set_state_dict_type")
    if kind is StateDictType.LOCAL_STATE_DICT and any(map(is_lazy, module.modules())):
        raise UsageError.of(
            "Modules that fully_shard was applied to have no local state dicts.",
            expected="SHARDED_STATE_DICT or FULL_STATE_DICT",
            got=kind.name,
            where="set_state_dict_type(module, state_dict_type)",
            fix="use SHARDED_STATE_DICT: DTensors, of which each rank holds its part",
        )
    units, default = model_units_in(module), default_form(kind)
    found = StateDictSettings(
        kind,
        as_ours(state_dict_config, StateDictConfig, "state_dict_config")
        or default.state_dict_config,
        as_ours(optim_state_dict_config, OptimStateDictConfig, "optim_state_dict_config")
        or default.optim_state_dict_config,
    )
    for name in ("state_dict_config", "optim_state_dict_config"):
        _require_config(name, getattr(found, name), type(getattr(default, name)), units)
    wrapped = [model_unit_of(child) for child in module.modules() if not is_lazy(child)]
    with_dtensors = found
    if kind is StateDictType.SHARDED_STATE_DICT:  # of units with a device mesh
        configs: tuple[Any, Any] = found.state_dict_config, found.optim_state_dict_config
        changed = [dataclasses.replace(config, _use_dtensor=True) for config in configs]
        with_dtensors = StateDictSettings(kind, *changed)
    before = _one_form([unit for unit in wrapped if unit is not None] or units, module)
    for unit in units:
        unit.form = found if unit.device_mesh is None else with_dtensors
    model_loading.follow(module, units)
    return before


def _require_config(name: str, given: Any, kind: type, units: Sequence[ModelUnit]) -> None:
    """Raise UsageError unless it is a ``kind``, with a mesh if it wants DTensors."""
    where = f"set_state_dict_type(..., {name})"
    for field in dataclasses.fields(given):
        truth(f"{name}.{field.name}", getattr(given, field.name), "set_state_dict_type")
    if getattr(given, "_use_dtensor", False) and any(each.device_mesh is None for each in units):
        raise UsageError.of(
            "DTensors in sharded state dicts need a device mesh.",
            expected=f"{type(given).__name__}() without _use_dtensor, or a model wrapped with "
            "device_mesh=",
            got=f"{given}, and a model without a mesh",
            where=where,
            fix="leave out _use_dtensor: it is automatic for a model with a mesh; without a mesh "
            "the values are ShardedTensors, which torch.distributed.checkpoint accepts",
        )
    if not isinstance(given, kind):
        raise RuntimeUsageError.of(
            f"{name} does not match the state dict type.",
            expected=f"a {kind.__name__}, or None",
            got=f"a {type(given).__name__}",
            where=where,
            fix=f"pass {kind.__name__}(...)",
        )


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the state dict type of all units in a module.

    Args:
        module: the model, or a module around or in it.

    Returns:
        The kind and both settings.

    Raises:
        UsageError: the units differ, or there are none; also an AssertionError."""
    require_module(module, "get_state_dict_type")
    return _one_form(model_units_in(module), module)


def _one_form(units: Sequence[ModelUnit], module: nn.Module) -> StateDictSettings:
    forms = [unit.form for unit in units]
    if not forms or any(settings != forms[0] for settings in forms):
        kinds = sorted({settings.state_dict_type.name for settings in forms})
        raise AssertedUsageError.of(
            "The units of this module have different state dict types."
            if forms
            else "The module has no units.",
            expected="units with the same state dict type and configurations",
            got=f"{len(forms)} units with the types {kinds}",
            where=type(module).__name__,
            fix="call FullyShardedDataParallel.set_state_dict_type(module, ...)",
        )
    return forms[0]


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Generator[None, None, None]:
    """Set the state dict type inside the context, as ``set_state_dict_type`` does."""
    require_module(module, "state_dict_type")
    units = model_units_in(module)
    try:
        with in_form(units):
            set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
            yield
    finally:
        model_loading.follow(module, units)  # units may be made anew: not before they are used
