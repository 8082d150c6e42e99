"""Passes over units that read every rank's mapped shard: parameters view it, or are copied out of
it.

Such a unit sends nothing and waits for nothing when it is unsharded. Instead there is a barrier at
both ends of a pass: after the first, all shards have the values that the pass reads; after the
second, they may be written to. Outside a pass, units that copy are all-gathered."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Iterable, Sequence

import torch

from .._comm.host_memory import is_in_pages
from .._comm.transport import Handle, Transport
from ..errors import StateError
from .group import Group


class Pass(enum.Enum):
    """Kinds of passes, each with barriers of its own: a backward may begin inside a forward."""

    # What is added to the axis's tag, see ``Transport.new_tag``: at the beginning, and at the end
    FORWARD = 0, 1
    BACKWARD = 2, 3

    def __init__(self, begins: int, ends: int) -> None:
        self.begins, self.ends = begins, ends


_BARRIERS = {
    number: f"the barrier at the {place} of a {pass_.name.lower()}"
    for pass_ in Pass
    for place, number in (("beginning", pass_.begins), ("end", pass_.ends))
}


@dataclasses.dataclass
class _Axis:
    communicator: Transport
    groups: list[Group]
    tag: int
    mapped_at: tuple[object, ...] = ()  # addresses of this rank's shards when they were mapped
    version: int = 0  # increases when they have moved
    versions: Sequence[int] = ()  # of all ranks, this one first

    def addresses(self) -> tuple[object, ...]:
        """Return a value that changes when this rank's shards have moved."""
        return self.communicator.addresses([group.store.shard for group in self.groups])


class MappedShards:
    """The mapped groups of one runtime, and the passes that are open."""

    def __init__(self) -> None:
        self._label = "a module"
        self._candidates: list[Group] = []
        self._axes: list[_Axis] | None = None  # None: not decided yet
        # by pass: the barriers at its end, once this rank has left it
        self._open: dict[Pass, list[tuple[_Axis, Handle]]] = {}
        self._reading: set[Pass] = set()  # passes in which this rank may read shards now

    def use_groups(self, groups: Iterable[Group], label: str) -> None:
        """Use ``groups`` from now on. label: of the root, for errors."""
        self._label, self._axes = label, None
        self._candidates = [group for group in groups if _can_map(group)]
        self._open.clear()
        self._reading.clear()

    def is_open(self, pass_: Pass) -> bool:
        """True if a pass has begun and not ended."""
        return pass_ in self._open

    def begin(self, pass_: Pass) -> None:
        """A pass begins: all shards have their values when this returns. Collective: the model."""
        if self._axes is None:
            self._axes = self._decide()
        if not self._axes:
            return
        if pass_ in self._open:  # an exception has ended the last one
            self.end(pass_, has_raised=True)
        self._open[pass_] = []
        what = f"the beginning of a {pass_.name.lower()} of {self._label}"
        handles = []
        for axis in self._axes:
            addresses = axis.addresses()
            if addresses != axis.mapped_at:
                axis.mapped_at, axis.version = addresses, axis.version + 1
            handles.append(axis.communicator.begin_barrier(axis.tag + pass_.begins, axis.version))
        found = [
            [axis.version, *axis.communicator.end_barrier(handle, what)]
            for axis, handle in zip(self._axes, handles, strict=True)
        ]
        for axis, versions in zip(self._axes, found, strict=True):
            if versions != axis.versions:
                refusal = self._map(axis)
                if refusal:
                    self._refuse(refusal)
                axis.versions = versions
        self._reading.add(pass_)

    def stop_reading(self, pass_: Pass, has_raised: bool = False) -> None:
        """Tell the other ranks that this one reads no more shards in the pass."""
        self._reading.discard(pass_)
        if pass_ in self._open and not self._open[pass_]:
            self._open[pass_] = [
                (axis, axis.communicator.begin_barrier(axis.tag + pass_.ends, int(has_raised)))
                for axis in self._axes or ()
            ]

    def end(self, pass_: Pass, has_raised: bool = False) -> None:
        """Wait until no rank reads shards any more in the pass. Raises StateError, for good, if
        only another rank has raised: none would wait for units that it did not use. Collective: the
        model."""
        self.stop_reading(pass_, has_raised)
        what = f"the end of a {pass_.name.lower()} of {self._label}"
        for axis, handle in self._open.pop(pass_, ()):
            axis.communicator.end_barrier(handle, what, fails=not has_raised)

    def _decide(self) -> list[_Axis]:
        """Return the axes along which something can be mapped. Collective: the model."""
        found: dict[int, _Axis] = {}
        for group in self._candidates:
            axis = found.get(id(group.shard))
            if axis is None:
                axis = found[id(group.shard)] = _Axis(
                    group.shard, [], group.shard.new_tag(self._label, _BARRIERS)
                )
            axis.groups.append(group)
        mapped = [axis for axis in found.values() if not self._map(axis)]
        for axis in mapped:
            axis.versions = [axis.version] * axis.communicator.ranks
        return mapped

    @torch.inference_mode(False)
    @torch.no_grad()
    def _map(self, axis: _Axis) -> str:
        """Map the shards where they are now. If some rank cannot map all of them, return the reason
        and change nothing, on all ranks. Collective: the axis."""
        addresses = axis.addresses()  # first: a fork in another thread may move shards meanwhile
        mappings = axis.communicator.map_shards(
            [group.store.shard.detach() for group in axis.groups],
            [group.memories[0].mapping for group in axis.groups],
        )
        if isinstance(mappings, str):
            return mappings
        for group, mapping in zip(axis.groups, mappings, strict=True):
            if _views(group):
                group.memories[0].use_mapping(group.store, mapping)
                continue
            for memory in group.memories:
                memory.use_copies_of(group.store, mapping, self._reading)
        axis.mapped_at = addresses
        return ""

    def _refuse(self, refusal: str) -> typing.NoReturn:
        raise StateError.of(
            "Shards that have moved, for example because a process forked, cannot be mapped again.",
            expected="as many file descriptors and mappings, and as much address space, as before",
            got=refusal,
            where=self._label,
            fix="raise the named limit, or set FSDP_COMPAT_SAME_HOST=counters on all ranks",
        )


def _can_map(group: Group) -> bool:
    """True if all ranks may be able to map the group's shards, judged by what they all share."""
    store, memory = group.store, group.memories[0]
    return (
        group.shard.maps
        and not group.offload.is_offloaded
        and not memory.aliased
        and is_in_pages(store.numel, store.dtype)
        and not store.has_extension
        # one-byte elements are copied as bytes, not cast
        and (
            group.gather_dtype == store.dtype
            or min(group.gather_dtype.itemsize, store.dtype.itemsize) > 1
        )
    )


def _views(group: Group) -> bool:
    """True if parameters view the mapped shards. They are copied out of them if they are cast, are
    not contiguous there, or may be kept by the user while shards change."""
    return (
        group.is_flat
        and not group.memories[0].copied_from_output
        and group.gather_dtype == group.store.dtype
    )
