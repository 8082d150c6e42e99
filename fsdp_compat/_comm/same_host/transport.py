"""The transport for gloo on CPU between ranks of one host: messages are read where they lie."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import UsageError
from ..gloo import GlooTransport
from ..gloo_connections import ACK_TAG, GlooConnections, any_awaits_readers, fails_if_interrupted
from ..mesh import Axis, named
from ..transport import VALUES, ByRank, Handle, Kind, ShardMapping, Work
from . import counters, peers, shared_memory
from .counters import Table
from .memory_files import refusal_of
from .peers import Message, Peer, map_shards, writes_are_found


def connect(axis: Axis, values: GlooTransport, maps: bool) -> SameHostTransport | None:
    """Collective. Return the transport of an axis, or None on all ranks if they cannot all read
    each other's memory. values: the transport that sends values. maps: see SameHostTransport."""
    own = peers.introduce()
    introductions = values.gather_objects(None if own is None else own[0])
    if own is None or None in introductions:
        return None
    found = peers.attach(introductions, axis.rank)
    if not all(values.gather_objects(found is not None)):
        return None
    assert found is not None
    table = own[1]
    table.file = None  # the peers have opened it: a child would inherit the descriptor
    return SameHostTransport(axis, values.device, values.connections, table, found, maps)


class SameHostTransport(GlooTransport):
    """Peers read each other's messages in place.

    A message lies in shared memory, or is copied there. Counters tell the peers where. A peer reads
    its part when it ends the exchange, and replies with an *ack* by its own counters; the sender
    must not modify the memory before it arrives. Waits for both are like waits for gloo.

    A rank whose communication fails says so in its counters; readers check it after reading."""

    def __init__(
        self,
        axis: Axis,
        device: torch.device,
        connections: GlooConnections,
        table: Table,
        peers: dict[int, Peer],
        maps: bool,
    ) -> None:
        """table: of this rank. maps: large shards may be mapped (peers.py)."""
        super().__init__(axis, device, connections)
        self._table, self._peers, self.maps = table, peers, maps
        # not a method: a reference cycle would outlive its users, and be freed in a forked process
        connections.on_close = functools.partial(_close, table, peers)

    def new_tag(self) -> int:
        tag = super().new_tag()
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

    @fails_if_interrupted
    def settle(self, what: str, only_reductions: bool = False) -> None:
        super().settle(what, only_reductions)
        if not any_awaits_readers():
            shared_memory.forget_old_files()

    # -- a message

    def _cast(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        """A peer casts what it reads, which saves a copy here."""
        return own if shared_memory.locate(own) is not None else own.to(dtype)

    def _start(self, sent: Tensor, tag: int, into: ByRank | None = None) -> Handle:
        connections = self.connections
        what = connections.names.get(tag, "parameters or gradients")
        block, location = sent, shared_memory.locate(sent)
        if location is None:
            block = self.allocate(sent.numel(), sent.dtype).copy_(sent)
            location = shared_memory.locate(block)
        if location is None:
            rank = self.members[self.rank]
            error = f"rank {rank} can get no more shared memory: {shared_memory.arena().refusal}"
            connections.fail(what, cause=error)
        last = connections.activity.counts.get(tag, 0)
        if (tag, last) in connections.sent:  # this message takes its row
            self._await_taken(tag, last, what)
        number = self._begin(tag)
        self._table.send(tag, number, Message.words(location, block))
        tables = [self._peers[target].table for _, target in connections.peers]
        acks: list[Work] = [table.read(tag, number) for table in tables]
        connections.sent[tag, number] = acks, block, (tag + ACK_TAG, number, 0)
        message = tag, number, len(acks)
        handle = Handle(self._arrivals(tag, number), () if into is None else into, block, message)
        connections.unfinished[tag] = handle
        return handle

    def _arrivals(self, tag: int, number: int) -> list[Work]:
        return [self._peers[source].table.sent(tag, number) for source, _ in self.connections.peers]

    def _parts(self, handle: Handle, own: Tensor, what: str) -> list[Tensor]:
        self._end(handle, what)
        return [
            own if r == self.rank else self._read(handle, r, own, what) for r in range(self.ranks)
        ]

    def _fill(self, handle: Handle, what: str) -> None:
        self._end(handle, what)
        for source in self._peers:
            into = handle.received[source]
            into.copy_(self._read(handle, source, into, what).view(into.shape))

    def _read(self, handle: Handle, source: int, like: Tensor, what: str) -> Tensor:
        """Return this rank's part of a message. like: a tensor of the expected length and dtype; a
        message may also have the dtype of what this rank sends."""
        tag, peer, rank = handle.message[0], self._peers[source], self.members[source]
        sent, numel = Message.of_words(peer.table.words(tag)), handle.held.numel()
        if (
            sent.dtype is None
            or sent.numel != numel
            or sent.dtype not in (like.dtype, handle.held.dtype)
        ):
            error = f"rank {rank} has sent {sent} for {numel} of {like.dtype}"
            self.connections.fail(what, cause=error)
        first = self._first(tag % len(Kind), source, numel) * sent.dtype.itemsize
        location = sent.location._replace(offset=sent.location.offset + first)
        try:
            return peer.arena.view(location, like.numel(), sent.dtype)
        except OSError as error:
            who = self.members[self.rank]
            text = f"rank {who} cannot read the memory of rank {rank}: {refusal_of(error)}"
            self.connections.fail(what, cause=text)

    def _first(self, kind: int, source: int, numel: int) -> int:
        """Return the element at which this rank's part of a message [numel] begins."""
        if kind == Kind.GATHER:
            return 0
        return (source if kind == Kind.REPLICATE_BACK else self.rank) * -(-numel // self.ranks)

    def _finish(self, handle: Handle, what: str) -> None:
        tag, number, _ = handle.message
        for source, peer in self._peers.items():
            if peer.table.has_failed:
                error = f"the communication of rank {self.members[source]} has failed"
                self.connections.fail(what, cause=error)
        self.connections.activity.counts[tag + ACK_TAG] = number
        self._table.acknowledge(tag, number)
        super()._finish(handle, what)

    # -- mapped shards

    def addresses(self, shards: Sequence[Tensor]) -> tuple[object, ...]:
        return shared_memory.num_forks(), *map(Tensor.data_ptr, shards)

    @fails_if_interrupted
    def map_shards(
        self, shards: Sequence[Tensor], mappings: Sequence[ShardMapping | None]
    ) -> Sequence[ShardMapping] | str:
        own = [shared_memory.locate(shard) for shard in shards] if writes_are_found() else []
        locations = self.gather_objects(own)
        absent = [
            rank
            for rank, of_rank in zip(self.members, locations, strict=True)
            if not of_rank or None in of_rank
        ]
        if absent:
            return (
                f"no shared memory on ranks {absent}, which ran out of file descriptors "
                "(ulimit -n), address space (ulimit -v) or mappings (sysctl vm.max_map_count), at "
                "the latest fork or before"
            )
        found, refusal = list[ShardMapping](), ""
        arenas = {rank: peer.arena for rank, peer in self._peers.items()}
        try:
            found = map_shards(self.rank, arenas, shards, locations, mappings)
        except OSError as error:
            refusal = f"rank {self.members[self.rank]}: {refusal_of(error)}"
        return "; ".join(filter(None, self.gather_objects(refusal))) or found

    @fails_if_interrupted
    def begin_barrier(self, tag: int, word: int = 0) -> Handle:
        number = self.connections.begin(tag)
        self._table.send(tag, number, [word] * counters.NUM_WORDS)
        works = self._arrivals(tag, number)
        return Handle(works, message=(tag, number, len(works)))

    @fails_if_interrupted
    def end_barrier(self, handle: Handle, what: str, fails: bool = False) -> list[int]:
        self._end(handle, what)
        tag, sources = handle.message[0], [source for source, _ in self.connections.peers]
        words = [self._peers[source].table.words(tag)[0] for source in sources]
        if fails and any(words):
            index = words.index(1)
            cause = f"rank {self.members[sources[index]]} has left with an exception"
            self.connections.fail(what, waiting=(handle.message, index, what), cause=cause)
        return words


def _close(table: Table, peers: dict[int, Peer], has_failed: bool) -> None:
    table.close(has_failed)
    peers.clear()  # with their memory
