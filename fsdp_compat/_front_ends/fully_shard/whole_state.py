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
from ..._state import model_loading
from ..._state.loaded_values import misfit
from ..._state.model_loading import not_loaded
from ..._state.model_state import full_entries
from ..._state.sharded_values import copied
from ..._state.units import ModelUnit, clean_name, refuse_extensions
from ..._stores.row_store import RowStore
from ..._torch_private import dtensor as torch_dtensor
from ...api import StateDictType
from ...errors import CheckpointError, StateError


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


def refuse_missing(record: ModelUnit | None, state_dict: Mapping[str, Any] | None) -> None:
    """Refuse a missing state dict, on all ranks, if ``rank0_only`` is set; collective then."""
    if record is None or not model_loading.is_on(record.form):
        return
    groups = record.unit.groups
    rendezvous.require_all_ranks("load_state_dict", groups, copies=True)
    lacks = torch.tensor([not state_dict], dtype=torch.uint8, device=record.device)
    for axis in {id(c): c for group in groups for c in (group.replica, group.shard)}.values():
        lacks = axis.any_of(lacks, "a check of the state dicts to load")
    if lacks.item():
        raise CheckpointError.of(
            "Not every rank has a state dict.",
            expected="the whole state dict on every rank: modules that fully_shard was "
            "applied to load nothing from rank 0 alone",
            got=f"{'none' if not state_dict else 'one'} on this rank, and "
            "FullStateDictConfig(rank0_only=True)",
            where=f"load_state_dict of {record.unit.label}",
            fix="use torch.distributed.checkpoint.state_dict.set_model_state_dict with "
            "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True), or load the "
            "file on every rank",
        )


def put_rows_in(
    state_dict: dict[str, Any], prefix: str, module: nn.Module, stores: Iterable[RowStore]
) -> None:
    """Replace whole values of a module's own DTensors by DTensors of this rank's rows. Nothing is
    sent. Raises CheckpointError for DTensors of another rank."""
    for store in stores:
        for index, member in enumerate(store.orig_params):
            param: Any = store.sharded_params[index].parameter
            for holder, attribute in member.slots:
                if holder is not module:
                    continue
                value: Any = state_dict.get(prefix + attribute)
                if (wrong := misfit(value)) is not None:
                    where = f"load_state_dict of a {type(module).__name__}"
                    raise not_loaded(f"{prefix + attribute}: {wrong}", where, state_dict)
                if (
                    type(value) in (torch.Tensor, nn.Parameter)
                    and value.shape == param.shape
                    and _torch_private.is_dtensor(param)
                ):
                    state_dict[prefix + attribute] = _rows_of(value, store, index, param)


def _rows_of(whole: torch.Tensor, store: RowStore, index: int, param: Any) -> torch.Tensor:
    parallel = store.parallel[index]
    whole = whole.detach()
    local = store.rows_of_whole(index, whole if parallel is None else parallel.part(whole))
    local = local.clone(memory_format=torch.contiguous_format)
    spec = torch_dtensor.spec_for(param.device_mesh, param.placements, param.shape, whole.dtype)
    return torch_dtensor.dtensors([local], [spec])[0]
