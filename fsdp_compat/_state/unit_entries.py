"""The parameters of a unit as entries of a model's state dict: full, sharded or local. A form
chooses keys and tensor types; it has no gathering of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_private
from .._engine.group import Group
from .._engine.state_store import StateStore, store_of
from .._engine.unit import Unit
from .._layout.spec import Interval
from ..errors import UsageError
from .formats import BoxedTensor, LocalPart
from .names import Wanted, clean_name, everything, named_sections, shows_originals
from .optim_values import copied
from .values import local_value, mesh_sharded_value, sharded_value


def _chosen(store: StateStore, prefixes: Sequence[str], wanted: Wanted) -> dict[int, list[str]]:
    """Return the clean names of the parameters that are wanted, by index. A tied parameter has
    several.

    prefixes: what the names begin with; several where modules hold the unit under several names.
    """
    trainable = {
        index: param.requires_grad for param, indices in store.sharded_params for index in indices
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
        self._wholes: Sequence[torch.Tensor] = []  # in that case
        if len(indices) == len(store.orig_params) or group.shard.ranks == 1:
            self._buffer = group.gather_full()
            self._wholes = store.whole(self._buffer)
            return
        self._parts = [_packed(store, indices, rank) for rank in range(store.ranks)]
        longest = max(1, *(place.stop for its in self._parts for _, place in its.values()))
        own = torch.zeros(longest, dtype=store.dtype, device=store.shard.device)
        for index, (_, place) in self._parts[store.rank].items():
            own[place.slice] = store.local_part(index)
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
        value = self._buffer.new_empty(self._store.local_shape(index))
        for its, piece in zip(self._parts, self._buffer.chunk(len(self._parts)), strict=True):
            part, place = its[index]
            if part:
                value.view(-1)[part.slice] = piece[place.slice]
        return value


def _packed(
    store: StateStore, indices: Sequence[int], rank: int
) -> dict[int, tuple[Interval, Interval]]:
    """Return (part of the parameter, its place) by index, where ``rank`` sends its parts one after
    the other."""
    found, end = {}, 0
    for index in indices:
        part = store.part(index, rank)
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
    as_views: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of a unit's parameters, where a value holds this rank's part of the
    parameter.

    Without a mesh it is boxes over ``process_group``, and nothing is sent. They are copies, no
    larger than themselves; ``as_views``: they view the shard, unless ``to_cpu`` is set or some
    parameters are left out. With a mesh it is a DTensor, a copy, and this is collective: all ranks,
    to the end; one group is gathered at a time.
    """
    for group in unit.groups:
        if mesh is None or group.shard.ranks == 1:
            yield from _shard_entries(group, prefix, wanted, process_group, to_cpu, as_views)
        else:
            yield from _mesh_entries(group, prefix, wanted, mesh, to_cpu)


def _mesh_entries(
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


def _shard_entries(
    group: Group,
    prefix: str,
    wanted: Wanted,
    process_group: dist.ProcessGroup | None,
    to_cpu: bool,
    as_views: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    store = store_of(group)
    for index, names in _chosen(store, [prefix], wanted).items():
        run = store.local_part(index)
        is_view = as_views and not to_cpu and wanted is everything
        if not is_view:
            run = copied(run, to_cpu)
        value = sharded_value(
            *store.cut(index),
            store.rank,
            run,
            group.shard.members,
            process_group,
            store.parallel[index],
        )
        if isinstance(value, BoxedTensor):
            value.is_view = is_view
        for name in names:
            yield name, value


def local_entries(
    unit: Unit, prefix: str, wanted: Wanted, process_group: dist.ProcessGroup | None, to_cpu: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name of a flat parameter, this rank's shard of it) of those of a unit that hold
    anything wanted; with use_orig_params=True first (name of a parameter, this rank's elements of
    it), which share the memory. Nothing is sent.

    The values view the shard; with ``to_cpu``, and where some parameters are left out, a copy.
    Where one rank holds all there are no shards: then the parameters come under their own names, as
    torch has it.
    """
    for flat_name, group, section in named_sections(unit):
        store = store_of(group)
        if group.shard.ranks == 1:
            if section is store.sections[0]:
                yield from _shard_entries(group, prefix, wanted, process_group, to_cpu, True)
            continue
        chosen = {
            index: names
            for index, names in _chosen(store, [prefix], wanted).items()
            if section is store.section_of(index)
        }
        if chosen:
            if store.parallel[0] is not None:
                raise _no_parallel_boxes(unit.label, store.orig_params[0].name, "LOCAL_STATE_DICT")
            shard = store.shard.detach()[section.place.slice]
            if to_cpu or wanted is not everything:
                shard = copied(shard, to_cpu)
            for index, names in chosen.items() if shows_originals(unit) else ():
                part = section.layout.part_in_shard(index - section.first_param, store.rank)
                for name in names:
                    yield name, shard[part.slice].as_subclass(LocalPart)
            yield (
                prefix + flat_name,
                local_value(section.layout, store.rank, shard, group.shard.members, process_group),
            )


def _no_parallel_boxes(where: str, name: str, form: str = "SHARDED_STATE_DICT") -> UsageError:
    """The error for values of a unit (``where``) in a form that a DTensor parameter ``name`` does
    not go into."""
    return UsageError.of(
        f"A {form.lower().split('_')[0]} state dict of tensor-parallel parameters is not "
        "available in this version.",
        expected="StateDictType.FULL_STATE_DICT for a model with DTensor parameters",
        got=f"StateDictType.{form}, and a DTensor parameter {clean_name(name)!r}",
        where=where,
        fix="set FULL_STATE_DICT, with FullStateDictConfig(offload_to_cpu=True, "
        "rank0_only=True) for large models",
    )
