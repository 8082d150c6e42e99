"""Passes over units that read every rank's shard where it is mapped (_comm/same_host/peers.py):
parameters view the mapping, or are copied out of it.

Such a unit sends nothing when it is unsharded, so that no rank waits there. Instead the ranks meet
at both ends of a pass. At its beginning all shards have the values that the pass reads; when it has
ended no rank reads them any more, and they may be written to. Outside of a pass, where users of
fully_shard may unshard units, these are all-gathered."""

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


class Pass(enum.IntEnum):
    """Kinds of passes. They have barriers of their own: a backward may begin in a forward."""

    FORWARD = 0
    BACKWARD = 2


@dataclasses.dataclass
class _Axis:
    """The mapped groups along one axis."""

    communicator: Transport
    groups: list[Group]
    tag: int
    mapped_at: tuple[object, ...] = ()  # places of this rank's shards, when they were mapped
    version: int = 0  # increases when they have moved
    others: Sequence[int] = ()  # the versions of all ranks, this one first

    def places(self) -> tuple[object, ...]:
        """Return what changes when this rank's shards have moved."""
        return self.communicator.places([group.store.shard for group in self.groups])


class MappedShards:
    """The mapped groups of one runtime, and the passes that are open."""

    def __init__(self) -> None:
        self._label = "a module"
        self._candidates: list[Group] = []
        self._axes: list[_Axis] | None = None  # None: not decided yet
        self._open: dict[Pass, list[tuple[_Axis, Handle]]] = {}  # by pass: the end was told
        self._reading: set[Pass] = set()  # passes in which this rank may read shards now

    def take(self, groups: Iterable[Group], label: str) -> None:
        """Work with ``groups`` from now on. label: of the root, for errors."""
        self._label, self._axes = label, None
        self._candidates = [group for group in groups if _can_map(group)]
        self._open.clear()
        self._reading.clear()

    def is_open(self, which: Pass) -> bool:
        """True if a pass has begun and not ended."""
        return which in self._open

    def begin(self, which: Pass) -> None:
        """Collective. A pass begins: all shards have their values when this returns."""
        if self._axes is None:
            self._axes = self._decide()
        if not self._axes:
            return
        if which in self._open:  # an exception has ended the last one
            self.end(which, has_raised=True)
        self._open[which] = []
        what = f"the beginning of a {which.name.lower()} of {self._label}"
        handles = []
        for axis in self._axes:
            places = axis.places()
            if places != axis.mapped_at:
                axis.mapped_at, axis.version = places, axis.version + 1
            handles.append(axis.communicator.begin_barrier(axis.tag + which, axis.version))
        told = [
            [axis.version, *axis.communicator.end_barrier(handle, what)]
            for axis, handle in zip(self._axes, handles, strict=True)
        ]
        for axis, versions in zip(self._axes, told, strict=True):
            if versions != axis.others:
                refusal = self._map(axis)
                if refusal:
                    self._refuse(refusal)
                axis.others = versions
        self._reading.add(which)

    def leave(self, which: Pass, has_raised: bool = False) -> None:
        """Tell the other ranks that this one reads no shards any more in the pass."""
        self._reading.discard(which)
        if which in self._open and not self._open[which]:
            self._open[which] = [
                (axis, axis.communicator.begin_barrier(axis.tag + which + 1, int(has_raised)))
                for axis in self._axes or ()
            ]

    def end(self, which: Pass, has_raised: bool = False) -> None:
        """Collective. Wait until no rank reads shards any more in the pass.

        Raises StateError, for good, if the pass has raised on another rank only: no rank would
        wait for a unit that the other one has not used.
        """
        self.leave(which, has_raised)
        what = f"the end of a {which.name.lower()} of {self._label}"
        for axis, handle in self._open.pop(which, ()):
            axis.communicator.end_barrier(handle, what, fails=not has_raised)

    def _decide(self) -> list[_Axis]:
        """Collective. Return the axes along which something can be mapped."""
        found: dict[int, _Axis] = {}
        for group in self._candidates:
            axis = found.get(id(group.shard))
            if axis is None:
                axis = found[id(group.shard)] = _Axis(group.shard, [], group.shard.new_tag())
            axis.groups.append(group)
        mapped = [axis for axis in found.values() if not self._map(axis)]
        for axis in mapped:
            axis.others = [axis.version] * axis.communicator.ranks
        return mapped

    @torch.inference_mode(False)
    @torch.no_grad()
    def _map(self, axis: _Axis) -> str:
        """Collective. Map the shards where they are now. Return why, if some rank cannot map all of
        them: then the groups stay as they are, on all ranks."""
        places = axis.places()  # first: a fork in another thread may move shards meanwhile
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
        axis.mapped_at = places
        return ""

    def _refuse(self, refusal: str) -> typing.NoReturn:
        raise StateError.of(
            "Shards that have moved, as they do when a process forks, cannot be mapped again.",
            expected="as many file descriptors, mappings and as much address space as before, "
            "on all ranks",
            got=refusal,
            where=self._label,
            fix="raise the limit that is named, or set FSDP_COMPAT_SAME_HOST=counters on all "
            "ranks: nothing is mapped then",
        )


def _can_map(group: Group) -> bool:
    """True if all ranks may be able to map the group's shards: by what is alike on all of them."""
    store, memory = group.store, group.memories[0]
    return (
        group.shard.maps
        and not group.offload.is_offloaded
        and not memory.aliased
        and is_in_pages(store.numel, store.dtype)
        and not store.has_extension
        # parameters of one byte are copied as bytes, and not cast
        and (
            group.gather_dtype == store.dtype
            or min(group.gather_dtype.itemsize, store.dtype.itemsize) > 1
        )
    )


def _views(group: Group) -> bool:
    """True if the parameters are the mapped shards themselves. Otherwise they are copied out of
    them: where they are cast, where they lie apart, and where the user may keep them whole while
    shards are written to."""
    return (
        group.conduct is None
        and not group.memories[0].has_copies
        and group.gather_dtype == group.store.dtype
    )
