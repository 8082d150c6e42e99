"""The values of a state dict for one unit's parameters, in any form: checked, and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from .._engine.group import Group
from .._engine.state_store import StateStore, store_of
from .._engine.unit import Unit
from .._layout.spec import Interval, Section
from .rank0 import Rank0Value, received
from .reading_values import (
    dtype_of,
    is_local,
    is_readable,
    is_sharded,
    is_tensor,
    read_local,
    read_part,
    shape_of,
    unfit,
)
from .sharded_values import cut_of, flat_cut
from .units import named_sections, names_of


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
        store, flat_name = store_of(group), prefix + flat_name
        if flat_name not in entries:
            for index, keys in _params_of(store, section, prefix):
                found = {key: entries[key] for key in keys if key in entries}
                missing += [] if found else keys[:1]
                for key, value in found.items():
                    errors += _wrong(group, index, key, value, takes_parts)
            continue
        flat = entries[flat_name]
        wrong = _wrong_local(group, section, flat_name, flat)
        for index, keys in () if wrong else _params_of(store, section, prefix):
            place = section.layout.params[index - section.first_param].place
            wrong += [
                f"{key}: its values are not those that this rank has of it in {flat_name!r}, a "
                "flat parameter in the same dict. Delete the entry that is not to be loaded"
                for key in keys
                if key in entries and not _is_part_of(flat, entries[key], place)
            ]
        errors += wrong


def _params_of(store: StateStore, section: Section, prefix: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (index, keys) of the parameters of a section."""
    for index in range(section.first_param, section.first_param + len(section.layout.params)):
        yield index, names_of(store.orig_params[index], prefix)


def _wrong(group: Group, index: int, key: str, value: Any, takes_parts: bool) -> list[str]:
    """Say why ``value`` cannot be loaded into a parameter; [] if it can."""
    store = store_of(group)
    is_part = _is_part(value, store.part(index, store.rank))
    shape = tuple(value.shape) if is_part and takes_parts else store.shape(index)
    wrong = wrong_value(key, value, shape, store.dtype)
    if wrong is not None and is_part:
        wrong += (
            ", which would be this rank's part: to load that, set StateDictType.LOCAL_STATE_DICT"
        )
    if wrong is None and not is_readable(value, cut_of(group, index)):
        wrong = (
            f"{key}: shards of a tensor-parallel parameter can only be loaded in memory by a model "
            "that splits it in the same way. Load them through torch.distributed.checkpoint, or "
            "use StateDictType.FULL_STATE_DICT"
        )
    return [] if wrong is None else [wrong]


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


def _wrong_local(group: Group, section: Section, key: str, value: Any) -> list[str]:
    """Say why ``value`` is not this unit's flat parameter, cut as it is here; [] if it is."""
    store, ranks = store_of(group), group.shard.ranks
    if (wrong := unfit(value, None, store.dtype)) is not None:
        return [f"{key}: expected a ShardedTensor of {store.dtype}, got {wrong}"]
    if ranks == 1 or not is_local(value, section.layout):
        return [other_local(key, f"{len(section.layout.params)} parameter(s) over {ranks} rank(s)")]
    return []


def other_local(key: str, here: str) -> str:
    """Return the error for a local state dict that does not fit. here: what this model has."""
    return (
        f"{key}: a flat parameter of a LOCAL_STATE_DICT can only be loaded by as many ranks, "
        f"wrapped in the same way; here it has {here}. Save with StateDictType.SHARDED_STATE_DICT "
        "or FULL_STATE_DICT, which any model of the same parameters loads"
    )


def wrong_value(key: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Say why ``value`` cannot be loaded into a tensor of this shape and dtype; None if it can. A
    lazy value stays lazy."""
    if isinstance(value, Rank0Value):  # the first rank has looked at it
        return None
    got = shape_of(value) if is_tensor(value) else shape
    if got != shape and (shape, got) != ((), (1,)):
        return (
            f"size mismatch for {key}: expected shape {list(shape)} as in the current model, "
            f"got {list(got)}"
        )
    wrong = unfit(value, None, dtype)
    return wrong and f"{key}: expected a tensor of shape {shape} and {dtype}, got {wrong}"


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
            for index, keys in _params_of(store, section, prefix):
                values = [entries.pop(key) for key in keys if key in entries]
                found.update({index: values[-1]} if values else {})
            if wrong:
                continue
            if flat is not None:
                run = read_local(flat, flat_cut(group, section))
                _write(store.shard[section.place.slice][: run.numel()], run)
                continue
            found = received(group, found)
            for index in list(found):
                _load_parameter(group, index, found.pop(index), takes_parts)


def _load_parameter(group: Group, index: int, value: Any, takes_parts: bool) -> None:
    store = store_of(group)
    if takes_parts and _is_part(value, store.part(index, store.rank)):
        run = value.detach()
    else:
        run = read_part(value, cut_of(group, index))
    _write(store.shard[store.part_in_shard(index).slice], run)


def _write(target: torch.Tensor, run: torch.Tensor) -> None:
    """Copy ``run`` into ``target``, unless they are the same memory."""
    one, other = (
        (target.data_ptr(), target.device, target.dtype),
        (run.data_ptr(), run.device, run.dtype),
    )
    if one != other:
        target.copy_(run)
