"""Checks of a model's state dict before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .._engine.group import Group
from .._engine.state_store import store_of
from ..errors import CheckpointError, UsageError
from .model_units import model_unit_of, model_units_in, names_in_order, units_of
from .names import clean_name, flat_names, is_flat_name
from .unit_loading import check_unit, other_local, wrong_value
from .unmanaged import unmanaged_in

_PACKAGE = f"{__name__.partition('.')[0]}."  # of hooks that change no keys


def refuse_values(
    model: nn.Module, label: str, state_dict: Mapping[str, Any], strict: bool
) -> None:
    """Raise CheckpointError, before anything changes, if a parameter's value is missing
    (``strict``) or cannot be its value.

    model: a unit, or a module around units. label: its name in the error.
    """
    missing: list[str] = []
    by_name = {clean_name(str(key)): value for key, value in state_dict.items()}
    errors = [f"the key {key!r} is not a name" for key in state_dict if not isinstance(key, str)]
    if not errors:
        units = units_of(model)
        for named, registered in zip(units, model_units_in(model), strict=True):
            if not named.unit.summoned:
                check_unit(
                    named.unit, by_name, named.prefix, missing, errors, registered.takes_parts
                )
        for name, tensor in others_in(model).items():
            if tensor is not None and name in by_name:  # None: a class that loads in its own way
                wrong = wrong_value(name, by_name[name], tuple(tensor.shape), tensor.dtype)
                errors += [wrong] if wrong else []
        known = {named.prefix + name for named in units for name in flat_names(named.unit)} | {
            clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)
        }
        errors += [
            other_local(key, "no such flat parameter")
            for key in by_name
            if is_flat_name(key) and key not in known
        ]
    if strict and (missing or errors or _loads_plainly(model)):
        others, order = others_in(model), names_in_order(model, "")
        if not errors:  # modules of torch forgive that these are missing
            by_name.update((name, None) for name in others if name.endswith("num_batches_tracked"))
        missing = [
            name for name in order if name in missing or (name in others and name not in by_name)
        ]
        known = {
            *order,
            *(clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)),
        }
        unexpected = [key for key in state_dict if clean_name(str(key)) not in known]
        for kind, keys in (("Unexpected", unexpected), ("Missing", missing)):
            if keys:
                errors.insert(
                    0,
                    f"{kind} key(s) in state_dict: " + ", ".join(f'"{key}"' for key in keys) + ". ",
                )
    if errors:
        lines = "\n\t".join(errors)
        own = model_unit_of(model)
        inner = model if own is None else own.unit.module
        raise not_loaded(
            f"Error(s) in loading state_dict for {type(inner).__name__}:\n\t{lines}",
            label,
            state_dict,
        )


def _loads_plainly(model: nn.Module) -> bool:
    """True if no module's own method or hook changes keys, so that missing and unknown keys can be
    reported before loading."""
    return all(
        not _loads_in_own_way(child)
        and all(
            getattr(hook, "hook", hook).__module__.startswith(_PACKAGE)
            for hook in child._load_state_dict_pre_hooks.values()
        )
        for child in model.modules()
    )


def others_in(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return what a module's state dict holds beside the units' parameters, by clean name.

    None for extra state, and for an entry of a module whose class loads in its own way.
    """
    return {
        entry.name: None if _loads_in_own_way(entry.holder) else entry.value
        for entry in unmanaged_in(model)
    }


def _loads_in_own_way(module: nn.Module) -> bool:
    return not type(module)._load_from_state_dict.__module__.startswith("torch.")


def refuse_extensions(groups: Iterable[Group], where: str) -> None:
    """Raise UsageError for parameters that all-gather in their own way: their whole values can be
    computed with, not saved."""
    for group in groups:
        if group.store.extension is not None:
            raise UsageError.of(
                "Whole values of tensor subclasses with fsdp_pre_all_gather are not available.",
                expected="plain parameters",
                got=f"parameter {store_of(group).orig_params[0].name!r}",
                where=f"{where}, {group.name}",
                fix="use DTensors: model.state_dict() as it is by default, and "
                "StateDictType.SHARDED_STATE_DICT for optimizers",
            )


EVERYWHERE = (
    "pass the loaded dict, on every rank; to load from rank 0 alone set "
    "FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, "
    "FullStateDictConfig(rank0_only=True)) first"
)


def not_loaded(what: str, where: str, state_dict: Mapping[str, Any]) -> CheckpointError:
    fix = (
        "load what state_dict() of the same model gave (of a file with more in it, the entry that "
        "holds the model); "
        "strict=False lets keys differ, not shapes"
    )
    return CheckpointError.of(
        what,
        expected="a state dict of this model, full or sharded, with the names it had before "
        "wrapping",
        got="the differences above",
        where=where,
        fix=fix if state_dict else EVERYWHERE,
    )
