"""Full values in the state dicts of sharded modules: returned if FULL_STATE_DICT is set, and always
loadable."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ... import _torch_private
from ..._engine import rendezvous
from ..._state.loaded_values import is_sharded, is_tensor, misfit, shape_of, whole_value
from ..._state.model_loading import not_loaded
from ..._state.model_state import full_entries
from ..._state.rank0 import Rank0Value, received
from ..._state.sharded_values import copied
from ..._state.units import ModelUnit, clean_name, refuse_extensions
from ..._stores.row_store import RowStore
from ..._torch_private import dtensor as torch_dtensor
from ...api import StateDictType
from ...errors import StateError


def is_full(record: ModelUnit | None) -> bool:
    """True if FULL_STATE_DICT is set for a unit."""
    return record is not None and record.form.state_dict_type is StateDictType.FULL_STATE_DICT


def taken(
    own: ModelUnit,
    named: Iterable[tuple[ModelUnit, str]],
    module: nn.Module,
    take: Callable[[], dict[str, Any]],
    destination: dict[str, Any] | None,
    prefix: str,
) -> dict[str, Any]:
    """Return the state dict of ``module`` in the forms that are set for its units: DTensors, or
    whole values, then collective. own: of the module. named: (unit, name of its module) of all in
    it. take: returns that of DTensors, or adds to ``destination``."""
    named, first = list(named), 0 if destination is None else len(destination)
    full = [(each, name) for each, name in named if is_full(each)]
    groups = [group for each, _ in full for group in each.unit.groups if not each.unit.summoned]
    refuse_extensions(groups, "state_dict()")
    for each, _ in named:
        each.unit.view.in_state_dict = True
    try:
        with rendezvous.nested("state_dict", groups):
            result = take()
            keys = {clean_name(key): key for key in itertools.islice(result, first, None)}
            wholes = _put_wholes_in(result, keys, full, module, prefix)
    finally:
        for each, _ in named:
            each.unit.view.in_state_dict = False
    for clean, key in keys.items():
        if not own.is_kept_here:
            del result[key]
        elif own.form.state_dict_config.offload_to_cpu and clean not in wholes:
            result[key] = copied(result[key], to_cpu=True)
    return result


def _put_wholes_in(
    result: dict[str, Any],
    keys: Mapping[str, str],
    full: Iterable[tuple[ModelUnit, str]],
    module: nn.Module,
    prefix: str,
) -> set[str]:
    """Replace parameters by whole values, gathered group by group; return their clean names."""
    found: set[str] = set()
    for each, name in full:
        if each.unit.summoned:
            continue  # whole already
        if each.rename is not None:
            each.rename(module)
            name = ""
        base = clean_name(prefix + (f"{name}." if name else ""))
        for names, value in full_entries(each, base):
            for clean in names:
                if clean in keys:
                    result[keys[clean]] = value
                    found.add(clean)
    return found


def refuse_part(record: ModelUnit | None, module: nn.Module, label: str) -> None:
    """Raise StateError for a part of a unit whose state dicts are set to FULL_STATE_DICT."""
    if record is None or not is_full(record):
        return
    view = record.unit.view
    if not (view.in_state_dict or view.summoned):
        raise StateError.of(
            "FULL_STATE_DICT is set, but state_dict() was called on a module inside a sharded one.",
            expected="state_dict() of a module that fully_shard was applied to",
            got=f"state_dict() of a {type(module).__name__}",
            where=label,
            fix="call state_dict() on the model, or on this module inside summon_full_params",
        )


# -- loading


def put_rows_in(
    state_dict: dict[str, Any], prefix: str, module: nn.Module, stores: Iterable[RowStore]
) -> None:
    """Replace values of a module's own DTensors by DTensors of this rank's rows. Collective if they
    are sharded in another way, or only rank 0 has them. Raises CheckpointError for values of
    another rank."""
    label = f"a {type(module).__name__}"
    for store in stores:
        keys = {
            prefix + attribute: index
            for index, member in enumerate(store.orig_params)
            for holder, attribute in member.slots
            if holder is module and prefix + attribute in state_dict
        }
        sent = received(store, label, {index: state_dict[key] for key, index in keys.items()})
        for key, index in keys.items():
            param: Any = store.sharded_params[index].parameter
            value = sent[index] if isinstance(state_dict[key], Rank0Value) else state_dict[key]
            if (wrong := misfit(value)) is not None:
                raise not_loaded(f"{key}: {wrong}", f"load_state_dict of {label}", state_dict)
            if not _torch_private.is_dtensor(param) or not is_tensor(value):
                continue
            if shape_of(value) == tuple(param.shape) and not _lie_alike(value, param):
                value = whole_value(value, key)
            if type(value) in (torch.Tensor, nn.Parameter) and value.shape == param.shape:
                state_dict[key] = _rows_of(value, store, index, param)


def _lie_alike(value: Any, param: Any) -> bool:
    """True for plain tensors, which every rank has, and DTensors on the parameter's mesh."""
    if not _torch_private.is_dtensor(value):
        return isinstance(value, torch.Tensor) and not is_sharded(value)
    return bool(value.device_mesh == param.device_mesh and value.placements == param.placements)


def _rows_of(whole: torch.Tensor, store: RowStore, index: int, param: Any) -> torch.Tensor:
    parallel = store.parallel[index]
    whole = whole.detach()
    local = store.rows_of_whole(index, whole if parallel is None else parallel.part(whole))
    local = local.clone(memory_format=torch.contiguous_format)
    spec = torch_dtensor.spec_for(param.device_mesh, param.placements, param.shape, whole.dtype)
    return torch_dtensor.dtensors([local], [spec])[0]
