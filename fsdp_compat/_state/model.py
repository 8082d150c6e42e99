"""The model's state dict, out of units and into them. A form chooses keys and tensor types; it has no gathering of its own."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._engine import torch_private
from .._engine.unit import Group, Unit
from .._stores.flat_store import FlatStore
from ..errors import UsageError, explain
from .formats import is_sharded, read_part, shape_of, sharded_value
from .names import clean_name

__all__ = ["check_unit", "full_entries", "load_unit", "no_parallel_boxes", "sharded_entries", "store_of", "wrong_value"]


def store_of(group: Group) -> FlatStore:
    """The flat front end's groups are flat."""
    return typing.cast(FlatStore, group.store)


def full_entries(unit: Unit, to_cpu: bool, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of a unit's parameters, one group gathered at a time; nothing where ``keep`` is False.

    Names are relative to the unit; a tied parameter has several, with one tensor. Collective: all ranks, to the end.
    """
    for group in unit.groups:
        store = store_of(group)
        full = group.gather_full()
        wholes = [
            value if parallel is None else parallel.whole(value)
            for value, parallel in zip(store.whole(full), store.parallel, strict=True)
        ]
        if not keep:
            continue
        for member, value in zip(store.members, wholes, strict=True):
            own = value.detach().to("cpu", copy=True) if to_cpu else value.detach().clone()
            for name in member.names:
                yield clean_name(name), own


def sharded_entries(unit: Unit, group: dist.ProcessGroup | None, to_cpu: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of a unit's parameters, where a value is this rank's boxes of the parameter: views, nothing is sent."""
    for its_group in unit.groups:
        store = store_of(its_group)
        shard = store.shard.detach().cpu() if to_cpu else store.shard.detach()
        for index, member in enumerate(store.members):
            if store.parallel[index] is not None:
                raise no_parallel_boxes(unit.label, member.name)
            run = shard[store.layout.part_in_shard(index, store.rank).slice]
            value = sharded_value(store.layout, index, store.rank, run, its_group.shard.members, group)
            for name in member.names:
                yield clean_name(name), value


def check_unit(unit: Unit, entries: Mapping[str, Any], prefix: str, missing: list[str], errors: list[str]) -> None:
    """Add to ``missing`` and ``errors`` what of a unit's parameters is not in ``entries``, or cannot be loaded. No change."""
    for group in unit.groups:
        store = store_of(group)
        for index, member in enumerate(store.members):
            keys = [prefix + clean_name(name) for name in member.names]
            found = [key for key in keys if key in entries]
            missing += [] if found else keys[:1]
            errors += [wrong for key in found if (wrong := wrong_value(key, entries[key], store.shape(index), store.dtype))]


def wrong_value(key: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Say why ``value`` cannot be loaded into a tensor of this shape and dtype; None if it can."""
    if not isinstance(value, torch.Tensor):
        return f"{key}: expected a tensor of shape {shape}, got {type(value).__name__}"
    got = shape_of(value)
    if got != shape and not (shape == () and got == (1,)):
        return f"size mismatch for {key}: expected shape {list(shape)} as in the current model, got {list(got)}"
    if not is_sharded(value) and (value.is_meta or value.layout is not torch.strided):
        return f"{key}: expected a tensor with values, got one {'on the meta device' if value.is_meta else value.layout}"
    if value.dtype.is_complex and not dtype.is_complex:
        return f"{key}: expected {dtype}, got {value.dtype}, whose imaginary part would be lost"
    return None


def load_unit(unit: Unit, entries: MutableMapping[str, Any], prefix: str, missing: list[str], errors: list[str]) -> None:
    """Take a unit's parameters out of ``entries`` (keys start with ``prefix``) and copy this rank's part of each into its shard.

    Whatever form a value has, it is the value that says so. What is not there is added to ``missing``, what does not fit to
    ``errors``. Collective if a value is sharded in another way than the unit.
    """
    with torch.no_grad():
        for group in unit.groups:
            store = store_of(group)
            for index, member in enumerate(store.members):
                keys = [prefix + clean_name(name) for name in member.names]
                values = [entries.pop(key) for key in dict.fromkeys(keys) if key in entries]
                missing += [keys[0]] if not values else []
                if values:
                    _load_parameter(group, index, keys[0], values[-1], errors)


def _load_parameter(group: Group, index: int, key: str, value: object, errors: list[str]) -> None:
    store = store_of(group)
    wrong = wrong_value(key, value, store.shape(index), store.dtype)
    if wrong is not None or not isinstance(value, torch.Tensor):
        errors.append(wrong or key)
        return
    if (parallel := store.parallel[index]) is not None:
        value = parallel.local(value) if not torch_private.is_plain(value) else parallel.part(value)
    run = read_part(value, store.layout, index, store.rank, group.shard.members)
    target = store.shard[store.layout.part_in_shard(index, store.rank).slice]
    if run.data_ptr() != target.data_ptr() or run.device != target.device or run.dtype != target.dtype:
        target.copy_(run)


def no_parallel_boxes(where: str, name: str) -> UsageError:
    """The error for sharded values of a unit (``where``) with a DTensor parameter ``name``."""
    return UsageError(
        explain(
            "A sharded state dict of tensor-parallel parameters is not available in this version.",
            expected="StateDictType.FULL_STATE_DICT for a model with DTensor parameters",
            got=f"StateDictType.SHARDED_STATE_DICT, and a DTensor parameter {clean_name(name)!r}",
            where=where,
            fix="set FULL_STATE_DICT, with FullStateDictConfig(offload_to_cpu=True, rank0_only=True) for large models",
        )
    )


def in_module_order(keys: Sequence[str], order: Sequence[str]) -> list[str]:
    """Return ``keys`` in the order of ``order``; those it does not know keep their place at the end."""
    known = {key: position for position, key in enumerate(order)}
    return sorted(keys, key=lambda key: known.get(key, len(known)))
