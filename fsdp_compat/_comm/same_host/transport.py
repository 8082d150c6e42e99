"""The transport for gloo on CPU between ranks of one host: messages are read where they lie."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...errors import UsageError
from ..board.processes import Process
from ..gloo import GlooTransport
from ..gloo_connections import ACK_TAG, any_awaits_readers
from ..mesh import Axis, named
from ..transport import KIND_TEXTS, VALUES, ByRank, Handle, Kind, ShardMapping, Work
from . import counters, shared_memory
from .counters import Table
from .memory_files import refusal_of
from .peers import Peer, attach, map_shards, writes_are_found
from .shared_memory import Location

_DTYPES = [value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)]


def connect(axis: Axis, values: GlooTransport, maps: bool) -> SameHostTransport | None:
    """Collective. Return the transport of an axis, or None on all ranks if they cannot all read
    each other's memory. values: the transport that sends values. maps: see SameHostTransport."""
    own, table, process, chunk = None, None, Process.own(), shared_memory.first_location()
    if process is not None and chunk is not None:
        with contextlib.suppress(OSError):
            table = Table()
            own = process, chunk, table.location
    introductions = values.gather_objects(own)
    if None in introductions or len({each.machine for each, *_ in introductions}) > 1:
        return None
    peers = dict[int, Peer]()
    with contextlib.suppress(OSError, ValueError):
        for rank, introduction in enumerate(introductions):
            if rank != axis.rank:
                peers[rank] = attach(*introduction)
    if not all(values.gather_objects(len(peers) == axis.ranks - 1)):
        return None
    assert table is not None
    table.file = None  # the peers have opened it: a child would inherit the descriptor
    return SameHostTransport(axis, values, table, peers, maps)


class SameHostTransport(GlooTransport):
    """Peers read each other's messages in place, in shared memory; counters tell them where. A peer
    reads its part when it ends the exchange, and replies with an *ack* by its own counters; the
    sender must not modify the memory before. A rank whose communication fails says so in its
    counters; readers check it after reading."""

    def __init__(
        self, axis: Axis, values: GlooTransport, table: Table, peers: dict[int, Peer], maps: bool
    ) -> None:
        """values, table: of this rank. maps: large shards may be mapped (peers.py)."""
        super().__init__(axis, values.device, values.connections)
        self._table, self._peers, self.maps = table, peers, maps

        def close(has_failed: bool) -> None:
            table.close(has_failed)
            peers.clear()  # with their memory

        # not a method: a reference cycle would outlive its users, and be freed in a forked process
        self.connections.on_close = close

    def new_tag(self, name: str, texts: Mapping[int, str] = KIND_TEXTS) -> int:
        tag = super().new_tag(name, texts)
        if tag >= VALUES:
            raise UsageError.of(
                "A process group has too many groups of parameters.",
                expected=f"at most {VALUES // len(Kind) - 1} (by unit, dtype and requires_grad)",
                got="one more",
                where=f"global ranks {named(self.members)}",
                fix="wrap larger modules, or set FSDP_COMPAT_SAME_HOST=messages on all ranks",
            )
        return tag

    def allocate(self, numel: int, dtype: torch.dtype, zero: bool = False) -> Tensor:
        return shared_memory.allocate(numel, dtype, zero=zero)

    def settle(self, what: str, only_reductions: bool = False) -> None:
        super().settle(what, only_reductions)
        if not any_awaits_readers():
            shared_memory.forget_old_files()

    # -- a message

    def _start(
        self, sent: Tensor, tag: int, into: ByRank | None = None, dtype: torch.dtype | None = None
    ) -> Handle:
        connections = self.connections
        what = self.activity.name_of(tag)
        block, location = sent, shared_memory.locate(sent)
        if location is None:  # otherwise a peer casts what it reads, which saves a copy here
            block = self.allocate(sent.numel(), dtype or sent.dtype).copy_(sent)
            location = shared_memory.locate(block)
        if location is None:
            error = f"rank {self.members[self.rank]} can get no more shared memory"
            connections.fail(what, cause=f"{error}: {shared_memory.arena.refusal}")
        last = connections.activity.counts.get(tag, 0)
        if (tag, last) in connections.sent:  # this message takes its row
            self._await_taken(tag, last, what)
        number = self._count(tag)
        self._table.send(tag, number, (*location, block.numel(), _DTYPES.index(block.dtype)))
        targets = [self._peers[target] for _, target in connections.peers]
        acks: list[Work] = [peer.table.read(tag, number) for peer in targets]
        connections.sent[tag, number] = Handle(acks, (), block, (tag + ACK_TAG, number, 0))
        handle = connections.unfinished[tag] = self._arrival(tag, number)
        handle.received, handle.held = () if into is None else into, block
        return handle

    def _arrival(self, tag: int, number: int) -> Handle:
        sources = [self._peers[source] for source, _ in self.connections.peers]
        works: list[Work] = [peer.table.sent(tag, number) for peer in sources]
        return Handle(works, message=(tag, number, len(works)))

    def _read(self, handle: Handle, source: int, like: Tensor, what: str) -> Tensor:
        tag, held = handle.message[0], handle.held
        peer, rank = self._peers[source], self.members[source]
        *place, numel, number = peer.table.words(tag)
        dtype = _DTYPES[number] if 0 <= number < len(_DTYPES) else None
        # a message may also have the dtype of what this rank sends
        if dtype is None or dtype not in (like.dtype, held.dtype) or numel != held.numel():
            sent = f"{numel} elements of {dtype or 'an unknown dtype'}"
            error = f"rank {rank} has sent {sent} for {held.numel()} of {like.dtype}"
            self.connections.fail(what, cause=error)
        kind, location = tag % len(Kind), Location(*place)
        if kind != Kind.GATHER:  # a part of what was sent
            part = source if kind == Kind.REPLICATE_BACK else self.rank
            first = part * -(-numel // self.ranks) * dtype.itemsize
            location = location._replace(offset=location.offset + first)
        try:
            return peer.arena.view(location, like.numel(), dtype)
        except OSError as error:
            action = f"rank {self.members[self.rank]} cannot read the memory of rank {rank}"
            self.connections.fail(what, cause=f"{action}: {refusal_of(error)}")

    def _was_read(self, handle: Handle, what: str) -> None:
        tag, number, _ = handle.message
        failed = [r for r, peer in self._peers.items() if peer.table.has_failed]
        if failed:
            error = f"the communication of rank {self.members[failed[0]]} has failed"
            self.connections.fail(what, cause=error)
        self.connections.activity.counts[tag + ACK_TAG] = number
        self._table.acknowledge(tag, number)
        super()._was_read(handle, what)

    # -- mapped shards

    def addresses(self, shards: Sequence[Tensor]) -> tuple[object, ...]:
        return shared_memory.num_forks(), *map(Tensor.data_ptr, shards)

    def map_shards(
        self, shards: Sequence[Tensor], mappings: Sequence[ShardMapping | None]
    ) -> Sequence[ShardMapping] | str:
        own = [shared_memory.locate(shard) for shard in shards] if writes_are_found() else []
        locations = self.gather_objects(own)
        by_rank = zip(self.members, locations, strict=True)
        absent = [rank for rank, of_rank in by_rank if not of_rank or None in of_rank]
        if absent:
            return (
                f"no shared memory on ranks {absent}, which ran out of file descriptors "
                "(ulimit -n), address space (ulimit -v) or mappings (sysctl vm.max_map_count), at "
                "the latest fork or before"
            )
        found, refusal = list[ShardMapping](), ""
        try:
            found = map_shards(self._peers, shards, locations, mappings)
        except OSError as error:
            refusal = f"rank {self.members[self.rank]}: {refusal_of(error)}"
        return "; ".join(filter(None, self.gather_objects(refusal))) or found

    def begin_barrier(self, tag: int, word: int = 0) -> Handle:
        number = self.connections.begin(tag)
        self._table.send(tag, number, [word] * counters.NUM_WORDS)
        return self._arrival(tag, number)

    def end_barrier(self, handle: Handle, what: str, fails: bool = False) -> list[int]:
        self._await(handle, what)
        sources = [source for source, _ in self.connections.peers]
        words = [self._peers[source].table.words(handle.message[0])[0] for source in sources]
        if fails and 1 in words:
            index = words.index(1)
            cause = f"rank {self.members[sources[index]]} has left with an exception"
            self.connections.activity.waiting = handle.message, index, what
            self.connections.fail(what, cause=cause)
        return words
