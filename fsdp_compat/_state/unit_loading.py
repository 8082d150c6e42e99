"""Loading a state dict into a unit's parameters, in whatever form its values are."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from .._engine.group import Group
from .._engine.ownership import ParamSlots
from .._engine.state_store import StateStore, store_of
from .._engine.unit import Unit
from .._layout.spec import Interval, Section
from .rank0 import Rank0Value, broadcast_values
from .reading_values import (
    dtype_of,
    is_local,
    is_readable,
    is_sharded,
    is_tensor,
    misfit,
    read_local,
    read_part,
    shape_of,
)
from .sharded_values import BoxedTensor
from .units import clean_name, named_sections


def check_unit(
    unit: Unit,
    entries: Mapping[str, Any],
    prefix: str,
    missing: list[str],
    errors: list[str],
    takes_parts: bool,
) -> None:
    """Add the unit's parameters that ``entries`` lack to ``missing``, and reasons why values cannot
    be loaded to ``errors``. Changes nothing else.

    takes_parts: the state dict type is local: a parameter's value may be this rank's part of it.
    """
    for flat_name, group, section in named_sections(unit):
        store = store_of(group)
        flat = entries.get(key := prefix + flat_name)
        if key in entries:
            errors += (wrong_flat := _wrong_local(group, section, key, flat))
            if wrong_flat:
                continue
        for index, member in _params_of(store, section):
            keys = [prefix + clean_name(name) for name in member.names]
            found = [key for key in keys if key in entries]
            if flat is not None:
                place = section.layout.params[index - section.first_param].place
                errors += [
                    _contradiction(key, prefix + flat_name)
                    for key in found
                    if not _is_part_of(flat, entries[key], place)
                ]
                continue
            missing += [] if found else keys[:1]
            part = store.part(index, store.rank)
            for key in found:
                is_part = _is_part(entries[key], part)
                shape = (part.numel,) if is_part and takes_parts else store.shape(index)
                wrong = wrong_value(key, entries[key], shape, store.dtype)
                if wrong is not None and is_part and not takes_parts:
                    wrong += (
                        ", which would be this rank's part: to load that, set "
                        "StateDictType.LOCAL_STATE_DICT"
                    )
                errors += [] if wrong is None else [wrong]
            shape, parallel = store.local_shape(index), store.parallel[index]
            errors += [
                _other_parallel(key)
                for key in found
                if not is_readable(entries[key], shape, parallel)
            ]


def _is_part(value: Any, part: Interval) -> bool:
    """True if ``value`` has the shape of a rank's part of a parameter."""
    is_plain = isinstance(value, torch.Tensor) and not is_sharded(value)
    return is_plain and tuple(value.shape) == (part.numel,)


def _is_part_of(flat: torch.Tensor, value: Any, place: Interval) -> bool:
    """True if ``value`` holds what this rank's shard of a flat parameter, which fits the unit, has
    of the parameter at ``place``."""
    first, shard = 0, torch.empty(0, dtype=dtype_of(flat))
    if isinstance(flat, ShardedTensor) and (own := flat.local_shards()):
        first, shard = own[0].metadata.shard_offsets[0], own[0].tensor.detach()
    part = place.clipped(Interval(first, first + shard.numel())).shifted(-first)
    expected = shard[part.slice]
    if not _is_part(value, part):
        return False
    if value.data_ptr() == expected.data_ptr() and value.dtype == expected.dtype:
        return True
    found = value.detach().to(expected)
    return bool(((found == expected) | ((found != found) & (expected != expected))).all())


def _contradiction(key: str, flat_name: str) -> str:
    return (
        f"{key}: its values are not those that this rank has of it in {flat_name!r}, a flat "
        "parameter in the same dict. Delete the entry that is not to be loaded"
    )


def _params_of(store: StateStore, section: Section) -> list[tuple[int, ParamSlots]]:
    """Return the parameters of a section by their index."""
    first, end = section.first_param, section.first_param + len(section.layout.params)
    return list(zip(range(first, end), store.orig_params[first:end], strict=True))


def _wrong_local(group: Group, section: Section, key: str, value: Any) -> list[str]:
    """Say why ``value`` is not this unit's flat parameter, cut as it is here; [] if it is."""
    store = store_of(group)
    if not isinstance(value, torch.Tensor):
        return [f"{key}: expected a ShardedTensor, got {type(value).__name__}"]
    if (got := dtype_of(value)).is_complex and not store.dtype.is_complex:
        return [f"{key}: expected {store.dtype}, got {got}, whose imaginary part would be lost"]
    if (wrong := misfit(value)) is not None:
        return [f"{key}: {wrong}"]
    if group.shard.ranks > 1 and is_local(value, section.layout):
        if isinstance(value, BoxedTensor) and value.rank != store.rank:
            return [
                f"{key}: this rank is {store.rank} of {group.shard.ranks}, and this is the shard "
                f"of rank {value.rank}. Load the file that this rank saved"
            ]
        return []
    return [
        other_local(
            key, f"{len(section.layout.params)} parameter(s) over {group.shard.ranks} rank(s)"
        )
    ]


def _other_parallel(key: str) -> str:
    """Return the error for shards of a tensor-parallel parameter that do not fit."""
    return (
        f"{key}: shards of a tensor-parallel parameter can only be loaded in memory by a model "
        "that splits it in the same way. Load them through torch.distributed.checkpoint, or use "
        "StateDictType.FULL_STATE_DICT"
    )


def other_local(key: str, here: str) -> str:
    """Return the error for a local state dict that does not fit. here: what this model has."""
    return (
        f"{key}: a flat parameter of a LOCAL_STATE_DICT can only be loaded by as many ranks, "
        "wrapped in the same way; here it has "
        f"{here}. Save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT, which any model "
        "of the same parameters loads"
    )


def wrong_value(key: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Say why ``value`` cannot be loaded into a tensor of this shape and dtype; None if it can. A
    lazy value stays lazy."""
    if isinstance(value, Rank0Value):  # the first rank has looked at it
        return None
    if not is_tensor(value):
        return f"{key}: expected a tensor of shape {shape}, got {type(value).__name__}"
    if (wrong := misfit(value)) is not None:
        return f"{key}: {wrong}"
    got = shape_of(value)
    if got != shape and not (shape == () and got == (1,)):
        return (
            f"size mismatch for {key}: expected shape {list(shape)} as in the current model, "
            f"got {list(got)}"
        )
    if (
        isinstance(value, torch.Tensor)
        and not is_sharded(value)
        and (value.is_meta or value.layout is not torch.strided)
    ):
        return (
            f"{key}: expected a tensor with values, got one "
            f"{'on the meta device' if value.is_meta else value.layout}"
        )
    if (given := dtype_of(value)).is_complex and not dtype.is_complex:
        return f"{key}: expected {dtype}, got {given}, whose imaginary part would be lost"
    return None


def load_unit(
    unit: Unit,
    entries: MutableMapping[str, Any],
    prefix: str,
    missing: list[str],
    errors: list[str],
    takes_parts: bool,
) -> None:
    """Take a unit's parameters out of ``entries`` (keys start with ``prefix``) and copy this rank's
    part of each into its shard.

    Values may be in any form. Lazy values are loaded one by one. Missing parameters are added to
    ``missing``, values that do not fit to ``errors``; with errors nothing is loaded. Collective if
    a value is sharded in another way than the unit, or is `Rank0Value`.
    """
    wrong: list[str] = []  # a module around this one may be loading, without an earlier check
    check_unit(unit, entries, prefix, missing, wrong, takes_parts)
    errors += wrong
    with torch.no_grad():
        for flat_name, group, section in named_sections(unit):
            store = store_of(group)
            flat = entries.pop(prefix + flat_name, None)
            found: dict[int, Any] = {}
            for index, member in _params_of(store, section):
                keys = dict.fromkeys(prefix + clean_name(name) for name in member.names)
                values = [entries.pop(key) for key in keys if key in entries]
                found.update({index: values[-1]} if values else {})
            if wrong:
                continue
            if flat is not None:
                run = read_local(flat, section.layout, store.rank, group.shard.members)
                _write(store.shard[section.place.slice][: run.numel()], run)
                continue
            received = broadcast_values(group, found)
            for index in list(received):
                _load_parameter(group, index, received.pop(index), takes_parts)


def _load_parameter(group: Group, index: int, value: Any, takes_parts: bool) -> None:
    store = store_of(group)
    if takes_parts and _is_part(value, store.part(index, store.rank)):
        run = value.detach()
    else:
        run = read_part(
            value, *store.cut(index), store.rank, group.shard.members, store.parallel[index]
        )
    _write(store.shard[store.part_in_shard(index).slice], run)


def _write(target: torch.Tensor, run: torch.Tensor) -> None:
    """Copy ``run`` into ``target``, unless they are the same memory."""
    if (
        run.data_ptr() != target.data_ptr()
        or run.device != target.device
        or run.dtype != target.dtype
    ):
        target.copy_(run)
