"""The model's state dict, out of units and into them. A form chooses keys and tensor types; it has
no gathering of its own."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_private
from .._engine.group import Group
from .._engine.unit import Unit
from .._layout.spec import FlatLayout, Interval
from .._stores.flat_store import FlatStore, home_attribute
from .._stores.registration import FLAT_PARAM
from ..errors import CheckpointError, UsageError, explain
from .entries import copied
from .formats import (
    is_readable,
    is_sharded,
    is_tensor,
    local_value,
    materialised,
    mesh_sharded_value,
    misfit,
    read_local,
    read_part,
    shape_of,
    sharded_value,
)
from .names import Wanted, clean_name, everything

__all__ = [
    "Rank0Value",
    "check_unit",
    "flat_names",
    "full_entries",
    "gathered_unit",
    "in_module_order",
    "is_flat_name",
    "load_unit",
    "local_entries",
    "other_local",
    "no_parallel_boxes",
    "sharded_entries",
    "store_of",
    "wrong_value",
]


@dataclasses.dataclass(frozen=True)
class Rank0Value:
    """The value of a parameter that only the first rank was given. It is sent when the unit of the
    parameter is loaded."""

    value: Any  # a tensor, or what stands for one; None on the other ranks
    is_lazy: bool = False  # the same on all ranks: it may be that it does not load


def store_of(group: Group) -> FlatStore:
    """The flat front end's groups are flat."""
    return typing.cast(FlatStore, group.store)


def flat_names(unit: Unit) -> list[str]:
    """The names of a unit's flat parameters in local state dicts: a second group of parameters has
    a number."""
    return [home_attribute(position) for position in range(len(unit.groups))]


def is_flat_name(name: str) -> bool:
    """True for the name of a flat parameter, of any unit of any model."""
    last = name.rpartition(".")[2]
    return last == FLAT_PARAM or (
        last.startswith(f"{FLAT_PARAM}_") and last.removeprefix(f"{FLAT_PARAM}_").isdecimal()
    )


# -- out


def _chosen(store: FlatStore, prefixes: Sequence[str], wanted: Wanted) -> dict[int, list[str]]:
    """Return the clean names of the parameters that are wanted, by index in the layout. A tied
    parameter has several.

    prefixes: what the names begin with; several where modules hold the unit under several names.
    """
    trainable = {
        index: target.requires_grad for target, indices in store.sharded_params for index in indices
    }
    found: dict[int, list[str]] = {}
    for index, member in enumerate(store.orig_params):
        names = [prefix + clean_name(name) for prefix in prefixes for name in member.names]
        if its := [name for name in names if wanted(name, trainable[index])]:
            found[index] = its
    return found


class _Gathered:
    """Some of a group's parameters, whole. One gather brings them; where only some are wanted, only
    those travel."""

    def __init__(self, group: Group, indices: Sequence[int]) -> None:
        """Collective: all ranks ask for the same. So is taking one, where parameters are
        DTensors."""
        self._store = store = store_of(group)
        self._parts: list[
            dict[int, tuple[Interval, Interval]]
        ] = []  # by rank, unless all parameters lie in the buffer as they are
        self._wholes: list[torch.Tensor] = []  # in that case
        if len(indices) == len(store.orig_params) or group.shard.ranks == 1:
            self._buffer = group.gather_full()
            self._wholes = store.whole(self._buffer)
            return
        self._parts = [_packed(store.layout, indices, rank) for rank in range(store.layout.ranks)]
        longest = max(1, *(place.stop for its in self._parts for _, place in its.values()))
        own = torch.zeros(longest, dtype=store.dtype, device=store.shard.device)
        for index, (_, place) in self._parts[store.rank].items():
            own[place.slice] = store.shard.detach()[
                store.layout.part_in_shard(index, store.rank).slice
            ]
        self._buffer = group.gather_full(own)

    def whole(self, index: int) -> torch.Tensor:
        """Return a parameter, a view of what was gathered where it can be."""
        parallel = self._store.parallel[index]
        value = self._put_together(index) if self._parts else self._wholes[index]
        return (value if parallel is None else parallel.whole(value)).detach()

    def copy(self, index: int, device: torch.device | None = None) -> torch.Tensor:
        """Return a parameter in memory of its own, on ``device`` or where it was gathered."""
        value = self.whole(index)
        return value.to(
            device or value.device, copy=_torch_private.same_storage(value, self._buffer)
        )

    def _put_together(self, index: int) -> torch.Tensor:
        value = self._buffer.new_empty(self._store.layout.params[index].shape)
        for its, piece in zip(self._parts, self._buffer.chunk(len(self._parts)), strict=True):
            part, place = its[index]
            if part:
                value.view(-1)[part.slice] = piece[place.slice]
        return value


def _packed(
    layout: FlatLayout, indices: Sequence[int], rank: int
) -> dict[int, tuple[Interval, Interval]]:
    """Return (part of the parameter, its place) by index, where ``rank`` sends its parts one after
    the other."""
    found, end = {}, 0
    for index in indices:
        part = layout.part(index, rank)
        found[index] = part, Interval(end, end + part.numel)
        end += part.numel
    return found


def full_entries(
    unit: Unit, prefix: str, wanted: Wanted, to_cpu: bool, keep: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of a unit's parameters, one group gathered at a time; nothing
    where ``keep`` is False.

    A tied parameter comes under all its names, with one tensor, which is a copy. Collective: all
    ranks, to the end.
    """
    for group in unit.groups:
        if names := _chosen(store_of(group), [prefix], wanted):
            gathered = _Gathered(group, list(names))
            for index, its_names in names.items():
                if keep:
                    own = gathered.copy(index, torch.device("cpu") if to_cpu else None)
                    for name in its_names:
                        yield name, own
                    del own
                elif store_of(group).parallel[index] is not None:
                    gathered.whole(index)  # other ranks of the parameter's own mesh may keep it
            del gathered  # or the next group is gathered beside this one


def gathered_unit(
    unit: Unit, prefixes: Sequence[str], wanted: Wanted
) -> list[tuple[list[str], Callable[[], torch.Tensor]]]:
    """Return (names, what gives the whole parameter, a copy on the CPU) for what is wanted of a
    unit; all groups are gathered.

    What is gathered is held by what is returned. Collective, also what gives the parameters, where
    they are DTensors.
    """
    found: list[tuple[list[str], Callable[[], torch.Tensor]]] = []
    for group in unit.groups:
        if names := _chosen(store_of(group), prefixes, wanted):
            gathered = _Gathered(group, list(names))
            found += [
                (its_names, functools.partial(gathered.copy, i, torch.device("cpu")))
                for i, its_names in names.items()
            ]
    return found


def sharded_entries(
    unit: Unit,
    prefix: str,
    wanted: Wanted,
    process_group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    to_cpu: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of a unit's parameters, where a value holds this rank's part of the
    parameter.

    Without a mesh it is boxes over ``process_group``, and nothing is sent. They view the shard;
    with ``to_cpu``, and where some parameters are left out, they are copies, no larger than
    themselves. With a mesh it is a DTensor, a copy, and this is collective: all ranks, to the end;
    one group is gathered at a time.
    """
    for group in unit.groups:
        if mesh is None or group.shard.ranks == 1:
            yield from _boxes(group, prefix, wanted, process_group, to_cpu)
        else:
            yield from _mesh_values(group, prefix, wanted, mesh, to_cpu)


def _mesh_values(
    group: Group, prefix: str, wanted: Wanted, mesh: DeviceMesh, to_cpu: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    names = _chosen(store_of(group), [prefix], wanted)
    if not names:
        return
    gathered = _Gathered(group, list(names))
    for index, its_names in names.items():
        value: torch.Tensor = mesh_sharded_value(gathered.whole(index), mesh)
        value = value.cpu() if to_cpu else value
        for name in its_names:
            yield name, value


def _boxes(
    group: Group, prefix: str, wanted: Wanted, process_group: dist.ProcessGroup | None, to_cpu: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    store = store_of(group)
    for index, names in _chosen(store, [prefix], wanted).items():
        run = store.shard.detach()[store.layout.part_in_shard(index, store.rank).slice]
        if to_cpu or wanted is not everything:
            run = copied(run, to_cpu)
        value = sharded_value(
            store.layout,
            index,
            store.rank,
            run,
            group.shard.members,
            process_group,
            store.parallel[index],
        )
        for name in names:
            yield name, value


def local_entries(
    unit: Unit, prefix: str, wanted: Wanted, process_group: dist.ProcessGroup | None, to_cpu: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name of a flat parameter, this rank's shard of it) of those of a unit that hold
    anything wanted. Nothing is sent.

    The value views the shard; with ``to_cpu``, and where some parameters are left out, it is a
    copy. Where one rank holds all there are no shards: then the parameters come under their own
    names, as torch has it.
    """
    for flat_name, group in zip(flat_names(unit), unit.groups, strict=True):
        store = store_of(group)
        if group.shard.ranks == 1:
            yield from _boxes(group, prefix, wanted, process_group, to_cpu)
        elif _chosen(store, [prefix], wanted):
            if store.parallel[0] is not None:
                raise no_parallel_boxes(unit.label, store.orig_params[0].name, "LOCAL_STATE_DICT")
            shard = store.shard.detach()
            if to_cpu or wanted is not everything:
                shard = copied(shard, to_cpu)
            yield (
                prefix + flat_name,
                local_value(store.layout, store.rank, shard, group.shard.members, process_group),
            )


# -- in


def check_unit(
    unit: Unit, entries: Mapping[str, Any], prefix: str, missing: list[str], errors: list[str]
) -> None:
    """Add to ``missing`` and ``errors`` what of a unit's parameters is not in ``entries``, or
    cannot be loaded. No change."""
    for flat_name, group in zip(flat_names(unit), unit.groups, strict=True):
        store = store_of(group)
        if prefix + flat_name in entries:
            errors += _wrong_local(group, prefix + flat_name, entries[prefix + flat_name])
            continue
        for index, member in enumerate(store.orig_params):
            keys = [prefix + clean_name(name) for name in member.names]
            found = [key for key in keys if key in entries]
            missing += [] if found else keys[:1]
            errors += [
                wrong
                for key in found
                if (wrong := wrong_value(key, entries[key], store.shape(index), store.dtype))
            ]
            shape, parallel = store.layout.params[index].shape, store.parallel[index]
            errors += [
                _other_parallel(key)
                for key in found
                if not is_readable(entries[key], shape, parallel)
            ]


def _wrong_local(group: Group, key: str, value: Any) -> list[str]:
    """Say why ``value`` is not this unit's flat parameter, cut as it is here; [] if it is."""
    store = store_of(group)
    if not isinstance(value, torch.Tensor):
        return [f"{key}: expected a ShardedTensor, got {type(value).__name__}"]
    if value.dtype.is_complex and not store.dtype.is_complex:
        return [
            f"{key}: expected {store.dtype}, got {value.dtype}, whose imaginary part would be lost"
        ]
    if (wrong := misfit(value)) is not None:
        return [f"{key}: {wrong}"]
    if (
        group.shard.ranks > 1
        and read_local(value, store.layout, store.rank, group.shard.members) is not None
    ):
        return []
    return [
        other_local(key, f"{len(store.orig_params)} parameter(s) over {group.shard.ranks} rank(s)")
    ]


def _other_parallel(key: str) -> str:
    """Say that boxes of a tensor-parallel parameter do not fit."""
    return (
        f"{key}: boxes of a tensor-parallel parameter can only be loaded in memory by a model that "
        "splits it in the same way. "
        "Load them through torch.distributed.checkpoint, or use StateDictType.FULL_STATE_DICT"
    )


def other_local(key: str, here: str) -> str:
    """Say that a local state dict does not fit. here: what there is in this model."""
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
    if value.dtype.is_complex and not dtype.is_complex:
        return f"{key}: expected {dtype}, got {value.dtype}, whose imaginary part would be lost"
    return None


def load_unit(
    unit: Unit,
    entries: MutableMapping[str, Any],
    prefix: str,
    missing: list[str],
    errors: list[str],
) -> None:
    """Take a unit's parameters out of ``entries`` (keys start with ``prefix``) and copy this rank's
    part of each into its shard.

    Whatever form a value has, it is the value that says so. Lazy values are materialised one by
    one. What is not there is added to ``missing``, what does not fit to ``errors``, of which
    nothing is loaded then. Collective if a value is sharded in another way than the unit, or is
    `FromFirst`.
    """
    wrong: list[str] = []  # where a module around this one is loaded nobody has looked yet
    check_unit(unit, entries, prefix, missing, wrong)
    errors += wrong
    with torch.no_grad():
        for flat_name, group in zip(flat_names(unit), unit.groups, strict=True):
            store = store_of(group)
            flat = entries.pop(prefix + flat_name, None)
            found: dict[int, Any] = {}
            for index, member in enumerate(store.orig_params):
                keys = dict.fromkeys(prefix + clean_name(name) for name in member.names)
                values = [entries.pop(key) for key in keys if key in entries]
                found.update({index: values[-1]} if values else {})
            if wrong:
                continue
            if flat is not None:
                run = read_local(flat, store.layout, store.rank, group.shard.members)
                assert run is not None
                _write(store.shard[: run.numel()], run)
                continue
            received = _received(group, found)
            for index in list(received):
                _load_parameter(group, index, received.pop(index))


def _received(group: Group, found: dict[int, Any]) -> dict[int, Any]:
    """Send what only the first rank has to the others. Collective if there is any.

    Raises CheckpointError, on all ranks, if a lazy value there does not load.
    """
    sent: dict[int, torch.Tensor] = {}
    error: CheckpointError | None = None
    store = store_of(group)
    for index, value in found.items():
        if not isinstance(value, Rank0Value):
            continue
        shape, dtype = store.shape(index), store.dtype
        if value.value is None:
            sent[index] = torch.empty(shape, dtype=dtype, device=group.device)
        elif error is None:
            try:
                own = materialised(value.value, store.layout.params[index].name)
                sent[index] = own.detach().to(group.device, dtype).reshape(shape).contiguous()
            except CheckpointError as caught:
                error = caught
    wires = (
        group.replica,
        group.shard,
    )  # the first replica's first rank to every replica's first one, and on to the rest
    if any(isinstance(value, Rank0Value) and value.is_lazy for value in found.values()):
        told = "" if error is None else str(error)
        for wire in wires:
            told = wire.gather_objects(told)[0]
        if told:
            raise error or CheckpointError(told)
    if sent:
        for wire in wires:
            wire.broadcast(list(sent.values()), f"the parameters of {group.name} that are loaded")
    return {**found, **sent}


def _load_parameter(group: Group, index: int, value: Any) -> None:
    store = store_of(group)
    run = read_part(
        value, store.layout, index, store.rank, group.shard.members, store.parallel[index]
    )
    _write(store.shard[store.layout.part_in_shard(index, store.rank).slice], run)


def _write(target: torch.Tensor, run: torch.Tensor) -> None:
    """Copy ``run`` into ``target``, unless it is that."""
    if (
        run.data_ptr() != target.data_ptr()
        or run.device != target.device
        or run.dtype != target.dtype
    ):
        target.copy_(run)


def no_parallel_boxes(where: str, name: str, form: str = "SHARDED_STATE_DICT") -> UsageError:
    """The error for values of a unit (``where``) in a form that a DTensor parameter ``name`` does
    not go into."""
    return UsageError(
        explain(
            f"A {form.lower().split('_')[0]} state dict of tensor-parallel parameters is not "
            "available in this version.",
            expected="StateDictType.FULL_STATE_DICT for a model with DTensor parameters",
            got=f"StateDictType.{form}, and a DTensor parameter {clean_name(name)!r}",
            where=where,
            fix="set FULL_STATE_DICT, with FullStateDictConfig(offload_to_cpu=True, "
            "rank0_only=True) for large models",
        )
    )


def in_module_order(keys: Sequence[str], order: Sequence[str]) -> list[str]:
    """Return ``keys`` in the order of ``order``; those it does not know keep their place at the
    end."""
    known = {key: position for position, key in enumerate(order)}
    return sorted(keys, key=lambda key: known.get(key, len(known)))
