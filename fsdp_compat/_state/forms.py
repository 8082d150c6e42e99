"""The form of a model's state dicts: full, sharded or local, as it is set on every unit."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

from torch import nn

from ..api import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    as_ours,
)
from ..errors import (
    AssertedUsageError,
    RuntimeUsageError,
    UsageError,
    explain,
    require_module,
    truth,
    wrong_type,
)
from . import rank0_loading
from .model_units import default_form, model_unit_of, model_units_in

__all__ = ["get_state_dict_type", "set_state_dict_type", "state_dict_type"]


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the form of state dicts for all units in ``module``, which need not be one;
    return what it was before."""
    require_module(module, "set_state_dict_type")
    kind = as_ours(state_dict_type, StateDictType, "state_dict_type")
    if kind is None:
        raise wrong_type("state_dict_type", "a StateDictType", kind, "set_state_dict_type")
    units = model_units_in(module)
    default = default_form(kind)
    model_config = (
        as_ours(state_dict_config, StateDictConfig, "state_dict_config")
        or default.state_dict_config
    )
    optim_config = (
        as_ours(optim_state_dict_config, OptimStateDictConfig, "optim_state_dict_config")
        or default.optim_state_dict_config
    )
    for name, given, wanted in (
        ("state_dict_config", model_config, default.state_dict_config),
        ("optim_state_dict_config", optim_config, default.optim_state_dict_config),
    ):
        for field in dataclasses.fields(given):
            truth(f"{name}.{field.name}", getattr(given, field.name), "set_state_dict_type")
        if getattr(given, "_use_dtensor", False) and any(
            each.device_mesh is None for each in units
        ):
            raise UsageError(
                explain(
                    "DTensors in sharded state dicts need a device mesh.",
                    expected=f"{type(given).__name__}() without _use_dtensor, or a model that "
                    "was wrapped with device_mesh=",
                    got=f"{given}, and a model without a mesh",
                    where=f"set_state_dict_type(..., {name})",
                    fix="leave it out: it is set by itself for a model with a mesh; without "
                    "one the values are ShardedTensors, "
                    "which torch.distributed.checkpoint takes as they are",
                )
            )
        if not isinstance(given, type(wanted)):
            raise RuntimeUsageError(
                explain(
                    f"{name} does not belong to the form of state dict.",
                    expected=f"a {type(wanted).__name__}, or None",
                    got=f"a {type(given).__name__}",
                    where=f"set_state_dict_type(..., {kind.name})",
                    fix=f"pass {type(wanted).__name__}(...)",
                )
            )
    before = get_state_dict_type(module)
    settings = StateDictSettings(kind, model_config, optim_config)
    with_mesh = _with_dtensors(settings)
    for unit in units:
        unit.form = settings if unit.device_mesh is None else with_mesh
    rank0_loading.follow(module, rank0_loading.is_on(settings) and model_unit_of(module) is None)
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the form of state dicts of the units in ``module``; raises UsageError where
    they differ or there is none."""
    require_module(module, "get_state_dict_type")
    found = [unit.form for unit in model_units_in(module)]
    if not found or any(settings != found[0] for settings in found):
        raise AssertedUsageError(
            explain(
                "There is no one form of state dict.",
                expected="at least one FullyShardedDataParallel in the module, all of them "
                "with one form",
                got=f"{len(found)} units with "
                f"{len({settings.state_dict_type for settings in found})} forms",
                where=type(module).__name__,
                fix="set one for all: FullyShardedDataParallel.set_state_dict_type(module, ...)",
            )
        )
    return found[0]


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Generator[None, None, None]:
    """Set the form of state dicts inside of the context, see ``set_state_dict_type``."""
    require_module(module, "state_dict_type")
    units, followed = model_units_in(module), rank0_loading.is_followed(module)
    before = [unit.form for unit in units]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for unit, settings in zip(units, before, strict=True):
            unit.form = settings
        rank0_loading.follow(module, followed)


def _with_dtensors(settings: StateDictSettings) -> StateDictSettings:
    """The same settings of a model with a device mesh: sharded values are DTensors, and the
    configurations say so."""
    if settings.state_dict_type is not StateDictType.SHARDED_STATE_DICT:
        return settings
    configs: tuple[Any, Any] = settings.state_dict_config, settings.optim_state_dict_config
    model_config, optim_config = (
        dataclasses.replace(config, _use_dtensor=True) for config in configs
    )
    return StateDictSettings(settings.state_dict_type, model_config, optim_config)
