"""Load a full state dict that only rank 0 has, into a unit or a module that contains units."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .._engine import rendezvous
from .._engine.state_store import store_of
from ..api import StateDictSettings, StateDictType
from ..errors import UsageError
from .model_units import ModelUnit, model_unit_of, model_units_in
from .names import clean_name
from .rank0_values import fill_from_rank0
from .validation import others_in, refuse_values


def is_on(settings: StateDictSettings) -> bool:
    return settings.state_dict_type is StateDictType.FULL_STATE_DICT and getattr(
        settings.state_dict_config, "rank0_only", False
    )


def fill(model: nn.Module, state_dict: Any, strict: bool, assign: bool) -> Any:
    """Return the state dict for this rank to load, with values from rank 0, see
    ``fill_from_rank0``. Collective."""
    units = model_units_in(model)
    rendezvous.require_all_ranks(
        "load_state_dict", (group for each in units for group in each.unit.groups), copies=True
    )
    own = model_unit_of(model)
    label = type(model).__name__ if own is None else own.unit.label
    if any(_ranks_of(each) != _ranks_of(units[0]) for each in units):
        raise UsageError.of(
            "Units on different ranks cannot be loaded from one rank.",
            expected="all units in the module on the same ranks, or rank0_only=False",
            got=f"units on {sorted({_ranks_of(each) for each in units})}",
            where=label,
            fix="load the state dict on every rank, without rank0_only=True",
        )
    managed = {
        f"{clean_name(path)}.{clean_name(name)}".lstrip(".")
        for path, child in model.named_modules(remove_duplicate=False)
        if (registered := model_unit_of(child)) is not None and not registered.unit.summoned
        for group in registered.unit.groups
        for param in store_of(group).orig_params
        for name in param.names
    }
    return fill_from_rank0(
        state_dict,
        units[0].mesh,
        units[0].device,
        check=lambda given: refuse_values(model, label, given, strict),
        managed=managed,
        others=others_in(model),
        assign=assign,
        where=f"load_state_dict of {label}",
    )


def _ranks_of(registered: ModelUnit) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return registered.mesh.shard.members, registered.mesh.replica.members


# Modules that are not units but contain units that load from rank 0. A hook on them completes the
# state dict that is loaded.
_followed: WeakIdKeyDictionary = WeakIdKeyDictionary()


def is_followed(module: nn.Module) -> bool:
    """True if ``follow`` is on for a module."""
    return module in _followed


def follow(module: nn.Module, follow: bool) -> None:
    """Turn loading from rank 0 on or off for a module that is not a unit but contains units."""
    if follow and module not in _followed:
        _followed[module] = module.register_load_state_dict_pre_hook(_before_load_around)
    elif not follow and module in _followed:
        _followed.pop(module).remove()


def _before_load_around(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Add the values of rank 0 to the state dict that is loaded. Collective."""
    if not any(is_on(unit.form) for unit in model_units_in(module)):
        return
    own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    state_dict.update(
        (prefix + key, value)
        for key, value in fill(
            module, own, strict, bool(local_metadata.get("assign_to_params_buffers"))
        ).items()
    )
