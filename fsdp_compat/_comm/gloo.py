"""The transport for gloo on CPU: sends and receives over connections of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import same_host, shared_memory
from .divergence.waits import MessageId
from .gloo_connections import (
    VALUES_TAG,
    GlooConnections,
    Sent,
    all_or_nothing,
    any_awaits_readers,
)
from .mapped import map_shards, writes_are_found
from .memory_files import refusal_of
from .mesh import Axis
from .same_host import ACK_TAG, Described
from .shared_memory import PeerMemory
from .summation import sum_in_rank_order
from .transport import Collectives, Handle, Kind, Mapping, ProcessGroupTransport, Work

__all__ = ["GlooTransport"]

# Totals of up to so many bytes are exchanged whole between two ranks: as many bytes as in pieces,
# and one message less. Between more ranks it would be more bytes.
_WHOLE_NBYTES = 1 << 20
_NO_PEERS: dict[int, PeerMemory] = {}


class GlooTransport(ProcessGroupTransport):
    """Exchanges by sends and receives.

    What is sent is kept until ``settle``, and must not change before.

    Peers on the same host read messages of ``_min_nbytes`` and more in place: the message lies in
    shared memory, or is copied there, and a descriptor is sent instead (same_host.py). The peer
    reads it when the exchange is ended, and answers with an ack. Waits for both have the same time
    limit and the same deadlock detection as waits for messages, whichever channel they take. A rank
    whose communication fails bumps an epoch in its shared memory, and a reader checks the epoch
    after it has read. When a rank can get no more shared memory, its descriptor says that the
    values follow.

    The small synchronous collectives use the same connections, so that a collective that was left
    midway cannot disturb the user's own.
    """

    reads_later = True
    maps = True
    all_reduce_steps = 1

    def __init__(self, axis: Axis, device: torch.device, part: str = "") -> None:
        """part: of the process group of the axis, if these are only some of its ranks."""
        super().__init__(axis, device)
        self.connections = GlooConnections(axis, self.group, part)
        self.name = self.connections.activity.name
        self._num_acks: dict[int, int] = {}  # by tag: how many acks this rank has awaited

    @property
    def has_failed(self) -> bool:
        return not self.connections.is_connected

    def unfinished_gather(self, tag: int) -> Handle | None:
        return self.connections.unfinished.get(tag)

    def require_working(self) -> None:
        self.connections.require_open()

    @all_or_nothing
    def begin_gather(
        self, own: torch.Tensor, full: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        nbytes, ranks, connections = own.numel() * full.itemsize, self.ranks, self.connections
        self.traffic.add(Kind.GATHER, nbytes * (ranks - 1))
        readers = self._readers_in_place(nbytes)
        # A peer that reads the shard in place casts it as it reads, which saves a copy here.
        in_place = own if readers and shared_memory.locate(own) is not None else None
        sent = (
            own
            if own.dtype == full.dtype or (in_place is not None and len(readers) == ranks - 1)
            else own.to(full.dtype)
        )
        if readers and in_place is None:
            in_place = sent = shared_memory.located(sent)
        outgoing = [
            sent if in_place is None or r not in readers else in_place for r in range(ranks)
        ]
        receives, sends, descriptors, acks, number = self._start(
            outgoing, segments, tag, connections.names.get(tag, "parameters"), readers
        )
        connections.sends.append((sends, sent, (tag, number, nbytes, 0)))
        if acks:
            connections.sends.append((acks, in_place, self._acks_of(tag)))
        # sends do not read `full`, so that it can be freed before slow peers have received
        segments[self.rank].copy_(own)
        message = tag, number, nbytes, len(receives)
        return self._opened(self._described(receives, segments, own, message, descriptors))

    @all_or_nothing
    def end_gather(self, handle: Handle, what: str) -> None:
        self.connections.names[handle.message[0]] = what
        if self._end(handle, what) and handle.descriptors:
            self._read_into(handle, handle.parts, what)
            self.connections.sends.append(self._acknowledge(handle, what))
            self.connections.unfinished.pop(handle.message[0], None)

    @all_or_nothing
    def begin_reduce(
        self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        tag += Kind.REDUCE
        own = segments[self.rank]
        self.traffic.add(Kind.REDUCE, own.nbytes * (self.ranks - 1))
        readers = self._readers_in_place(own.nbytes)
        if readers and shared_memory.locate(buffer) is None:
            buffer, segments = shared_memory.copy_of_others(segments, self.rank)
        return self._exchange(segments, self._parts_like(own, readers), tag, buffer, readers)

    @all_or_nothing
    def end_reduce(
        self,
        handle: Handle,
        own: torch.Tensor,
        dtype: torch.dtype,
        what: str,
        divisor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._end(handle, what)
        parts = self._parts(handle, own, what)
        other = 0 if self.rank else 1
        total = parts[other]
        if other in handle.descriptors or total.dtype != dtype:
            make = shared_memory.allocate if handle.descriptors else own.new_empty
            total = make(own.numel(), dtype=dtype)
        sum_in_rank_order(parts, total, divisor)
        self._end_reading(handle, what)
        return total

    @all_or_nothing
    def begin_all_reduce(
        self, total: torch.Tensor, tag: int, divisor: torch.Tensor | None = None
    ) -> Handle:
        tag += Kind.REPLICATE
        if self._is_sent_whole(total):
            self.traffic.add(Kind.REPLICATE, total.nbytes)
            parts = [
                total if r == self.rank else torch.empty_like(total) for r in range(self.ranks)
            ]
            handle = self._exchange([total] * self.ranks, parts, tag, total, _NO_PEERS)
            handle.divisor = divisor
            return handle
        self.traffic.add(Kind.REPLICATE, 2 * (self.ranks - 1) * total.nbytes // self.ranks)
        pieces = self._pieces(total)
        own, readers = pieces[self.rank], self._readers_in_place(pieces[0].nbytes)
        if readers:
            total = shared_memory.located(total)
            pieces = self._pieces(total)
        parts = self._parts_like(own, readers)
        handle = self._exchange(pieces, parts, tag, total, readers, acked=False)
        handle.divisor = divisor
        return handle

    @all_or_nothing
    def continue_all_reduce(
        self, handle: Handle, total: torch.Tensor, tag: int, what: str
    ) -> Handle:
        if self._is_sent_whole(total):
            return handle
        self._end(handle, what)
        own = self._pieces(total)[self.rank]
        sum_in_rank_order(self._parts(handle, own, what), own, handle.divisor)
        self._check_epochs(handle, what)
        self.connections.unfinished.pop(handle.message[0], None)
        if handle.acks:  # not acks here, but sends of values that follow a descriptor
            message = handle.message[0] + VALUES_TAG, 0, own.nbytes, 0
            self.connections.reads.append((handle.acks, handle.keep, message))
        sent = handle.keep
        assert isinstance(sent, torch.Tensor)
        if sent is not total:
            self._pieces(sent)[self.rank].copy_(own)
        # The second message of a rank also says that it has read its piece of every total, so that
        # the others may write there: the first needs no acks.
        pieces = self._pieces(total)
        outgoing = [self._pieces(sent)[self.rank]] * self.ranks
        readers = self._readers_in_place(pieces[0].nbytes)
        return self._exchange(outgoing, pieces, tag + Kind.REPLICATE_BACK, sent, readers)

    @all_or_nothing
    def end_all_reduce(self, handle: Handle, total: torch.Tensor, what: str) -> None:
        self._end(handle, what)
        if self._is_sent_whole(total):
            sum_in_rank_order(handle.parts, total, handle.divisor)
        elif handle.descriptors:
            self._read_into(handle, handle.parts, what)
            self._end_reading(handle, what)

    @all_or_nothing
    def settle(self, what: str, only_reductions: bool = False) -> None:
        connections = self.connections
        if only_reductions:
            self._wait_for_all(connections.reads, what)
            return
        # a peer waits until this rank has read what it gathers in place
        for tag, handle in list(connections.unfinished.items()):
            if tag % len(Kind) == Kind.GATHER:
                self.end_gather(handle, connections.names.get(tag, what))
        self._wait_for_all(connections.reads, what)
        self._wait_for_all(connections.sends, what)
        if shared_memory.has_old_files() and not any_awaits_readers():
            shared_memory.forget_old_files()

    def allocate(self, numel: int, dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        return shared_memory.allocate(numel, dtype, zero=zero)

    def reads_in_place(self, nbytes: int) -> bool:
        """True if some peer reads messages of this size in place."""
        return bool(self._readers_in_place(nbytes))

    def places(self, shards: Sequence[torch.Tensor]) -> tuple[object, ...]:
        return shared_memory.num_forks(), *map(torch.Tensor.data_ptr, shards)

    @all_or_nothing
    def map_shards(
        self, shards: Sequence[torch.Tensor], mappings: Sequence[Mapping | None]
    ) -> Sequence[Mapping] | str:
        near = self.connections.same_host
        is_able = near.maps and len(near.memories) == self.ranks - 1 and writes_are_found()
        places = [shared_memory.locate(shard) for shard in shards] if is_able else []
        told = self.gather_objects(places)
        absent = [
            rank
            for rank, its_places in zip(self.members, told, strict=True)
            if not its_places or None in its_places
        ]
        if absent:
            return (
                f"no shared memory on ranks {absent}, for want of file descriptors (ulimit -n), "
                "address space (ulimit -v) or mappings (sysctl vm.max_map_count), at the latest "
                "fork or before"
            )
        found, refusal = list[Mapping](), ""
        try:
            found = map_shards(self.rank, near.memories, shards, told, mappings)
        except OSError as error:
            refusal = f"rank {self.members[self.rank]}: {refusal_of(error)}"
        return "; ".join(filter(None, self.gather_objects(refusal))) or found

    @all_or_nothing
    def begin_meeting(self, tag: int, word: int = 0) -> Handle:
        return self.connections.begin_meeting(tag, word)

    @all_or_nothing
    def end_meeting(self, handle: Handle, what: str) -> list[int]:
        return self.connections.end_meeting(handle, what)

    def fail_meeting(self, handle: Handle, what: str, index: int) -> None:
        self.connections.fail_meeting(handle, what, index)

    def _run(self, what: str, collective: Callable[[Collectives], None]) -> None:
        self.connections.run(what, collective)

    # -- parts of an exchange

    def _is_sent_whole(self, total: torch.Tensor) -> bool:
        """True if each rank sends its whole total, and sums all of it."""
        if self.ranks != 2 or total.nbytes > _WHOLE_NBYTES:
            return False
        near = self.connections.same_host
        return not near.counts or total.nbytes < 2 * self._min_nbytes

    def _pieces(self, total: torch.Tensor) -> list[torch.Tensor]:
        size = -(-total.numel() // self.ranks)
        return [total[r * size : (r + 1) * size] for r in range(self.ranks)]

    def _parts_like(self, own: torch.Tensor, readers: dict[int, PeerMemory]) -> list[torch.Tensor]:
        """Return by rank the memory to receive into. Nothing is received where a part is read in
        place; ``own`` stands there."""
        return [
            own if r == self.rank or r in readers else torch.empty_like(own)
            for r in range(self.ranks)
        ]

    def _readers_in_place(self, nbytes: int) -> dict[int, PeerMemory]:
        """Return the peers that read messages of this size in place; they are read likewise."""
        return self.connections.same_host.memories if nbytes >= self._min_nbytes else _NO_PEERS

    @property
    def _min_nbytes(self) -> int:
        """Bytes of a message below which sending is faster than reading in place."""
        return shared_memory.MIN_NBYTES * same_host.min_factor(
            self.ranks, self.connections.same_host.counts
        )

    # -- beginning and ending

    def _exchange(
        self,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        tag: int,
        keep: torch.Tensor,
        readers: dict[int, PeerMemory],
        acked: bool = True,
    ) -> Handle:
        """Send ``outgoing[r]`` to rank r, the longest one first, and receive from it into
        ``incoming[r]``."""
        receives, sends, descriptors, acks, number = self._start(
            outgoing, incoming, tag, "gradients", readers, acked
        )
        message = tag, number, outgoing[0].nbytes, len(receives)
        return self._opened(
            self._described([*receives, *sends], incoming, keep, message, descriptors, acks)
        )

    def _start(
        self,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        tag: int,
        what: str,
        readers: dict[int, PeerMemory],
        acked: bool = True,
    ) -> tuple[list[Work], list[Work], dict[int, Callable[[], Described]], list[Work], int]:
        """Begin an exchange, see ``_exchange``. Return (receives, sends, descriptors, acks, how
        often the tag was used).

        The acks include sends of values that follow a descriptor, even if not ``acked``.
        """
        connections = self.connections
        if tag in connections.unfinished:
            self._end_leftover(tag)
        if readers and acked:
            self._await_earlier_readers(tag, what)
        number = connections.begin(tag)
        gloo = connections.gloo
        receives: list[Work] = []
        sends: list[Work] = []
        acks: list[Work] = []
        descriptors: dict[int, Callable[[], Described]] = {}
        near = connections.same_host
        channels = near.channels
        try:
            for source, _ in connections.peers:
                if source in readers:
                    work, descriptors[source] = channels[source].expect(tag, number)
                    receives.append(work)
                else:
                    receives.append(gloo.recv([incoming[source]], source, tag))
            if readers and acked:  # awaited before any can be given
                acks += [channels[source].expect_ack(tag, number) for source in near.sources]
            for _, target in connections.peers:
                message = outgoing[target]
                if target not in readers:
                    sends.append(gloo.send([message], target, tag))
                    continue
                location = shared_memory.location_of(message)
                words = same_host.describe(location, message)
                sends.append(channels[target].send(tag, number, words, acked))
                # the peer receives the values when it reads: whoever waits for its ack, which comes
                # earlier, need not wait for this send
                if location.is_sent:
                    acks.append(gloo.send([message], target, tag + VALUES_TAG))
        except RuntimeError as error:
            receives.clear()
            sends.clear()
            acks.clear()
            connections.fail_wait(what, error)
        return receives, sends, descriptors, acks, number

    def _await_earlier_readers(self, tag: int, what: str) -> None:
        """Wait until the peers have read the last message with this tag, where the next one takes
        its place."""
        near = self.connections.same_host
        works = [near.channels[source].unread(tag) for source in near.sources]
        if any(work is not same_host.DONE for work in works):
            number = self._num_acks.get(tag + ACK_TAG, 0)
            message = tag + ACK_TAG, number, 0, len(works)
            self.connections.wait(works, message, self.connections.names.get(tag, what))

    @staticmethod
    def _described(
        works: list[Work],
        parts: Sequence[torch.Tensor],
        keep: object,
        message: MessageId,
        descriptors: dict[int, Callable[[], Described]],
        acks: Sequence[Work] = (),
    ) -> Handle:
        handle = Handle(works, parts, keep, message)
        handle.descriptors, handle.acks = descriptors, list(acks)
        return handle

    def _opened(self, handle: Handle) -> Handle:
        self.connections.unfinished[handle.message[0]] = handle
        return handle

    def _end_leftover(self, tag: int) -> None:
        """End an exchange that an exception has left unfinished, before its tag is used again: the
        peers count it."""
        connections = self.connections
        connections.require_thread()
        what = connections.names.get(tag, "a message that an exception left behind")
        if tag % len(Kind) != Kind.GATHER:
            connections.fail_wait(what, cause="an exception has interrupted a reduction")
        self.end_gather(connections.unfinished[tag], what)

    def _end(self, handle: Handle, what: str) -> bool:
        """Wait for the works. Return False if they had been waited for before."""
        if handle.ended:
            return False
        connections = self.connections
        if connections.gloo is None:
            connections.require_open()
        connections.wait(handle.works, handle.message, what)
        handle.works.clear()
        handle.ended = True
        if not handle.descriptors:  # else its parts are still to be read
            connections.unfinished.pop(handle.message[0], None)
        return True

    def _wait_for_all(self, sent: list[Sent], what: str) -> None:
        for works, _, message in sent:
            self.connections.wait(works, message, what)
        sent.clear()

    # -- reading in place

    def _parts(self, handle: Handle, own: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return the parts by rank: received, read in place, or ``own``."""
        return [
            own
            if r == self.rank
            else self._read(handle, r, own, what)
            if r in handle.descriptors
            else part
            for r, part in enumerate(handle.parts)
        ]

    def _read_into(self, handle: Handle, targets: Sequence[torch.Tensor], what: str) -> None:
        for source in handle.descriptors:
            target = targets[source]
            target.copy_(self._read(handle, source, target, what).view(target.shape))

    def _read(self, handle: Handle, source: int, like: torch.Tensor, what: str) -> torch.Tensor:
        """Return the values that a descriptor stands for. like: a tensor of the expected length and
        dtype; the dtype of what this rank sends is accepted, too."""
        sent = handle.descriptors[source]()
        rank = self.members[source]
        if (
            sent.dtype is None
            or sent.numel != like.numel()
            or sent.dtype not in (like.dtype, handle.keep.dtype)
        ):
            error = f"rank {rank} has sent {sent} for {like.numel()} of {like.dtype}"
            self.connections.fail_wait(what, cause=error)
        if sent.location.is_sent:
            into = torch.empty(sent.numel, dtype=sent.dtype, device="cpu")
            return self._receive_values(handle, source, into, what)
        try:
            memory = self.connections.same_host.memories[source]
            return memory.view(sent.location, sent.numel, sent.dtype)
        except OSError as error:
            text = f"the memory of rank {rank} cannot be read: {refusal_of(error)}"
            self.connections.fail_wait(what, cause=text)

    def _receive_values(
        self, handle: Handle, source: int, into: torch.Tensor, what: str
    ) -> torch.Tensor:
        """Receive the values that follow a descriptor."""
        connections, tag = self.connections, handle.message[0] + VALUES_TAG
        try:
            works = [connections.gloo.recv([into], source, tag)]
        except RuntimeError as error:
            connections.fail_wait(what, error)
        connections.names[handle.message[0]] = what
        sources = connections.same_host.sources
        message = tag, 0, into.nbytes, len(sources)
        connections.wait(works, message, what, sources.index(source))
        return into

    def _check_epochs(self, handle: Handle, what: str) -> None:
        """Raise StateError if a peer's communication had failed by the time its memory was read."""
        for source, descriptor in handle.descriptors.items():
            if self.connections.same_host.has_failed(source, descriptor):
                error = f"the communication of rank {self.members[source]} has failed"
                self.connections.fail_wait(what, cause=error)

    def _acknowledge(self, handle: Handle, what: str) -> Sent:
        """Tell the peers that their messages were read."""
        self._check_epochs(handle, what)
        connections, (tag, number, _, _) = self.connections, handle.message
        counts = connections.activity.counts
        counts[tag + ACK_TAG] = counts.get(tag + ACK_TAG, 0) + 1
        near = connections.same_host
        try:
            works = [near.channels[target].acknowledge(tag, number) for target in near.targets]
        except RuntimeError as error:
            connections.fail_wait(what, error)
        # number 0: no peer lacks it, because each peer awaited it before it sent its descriptor
        return works, None, (tag + ACK_TAG, 0, 0, 0)

    def _end_reading(self, handle: Handle, what: str) -> None:
        if handle.descriptors:
            connections, tag = self.connections, handle.message[0]
            connections.reads.append(self._acknowledge(handle, what))
            connections.reads.append((handle.acks, handle.keep, self._acks_of(tag)))
            connections.names[tag] = what
            connections.unfinished.pop(tag, None)

    def _acks_of(self, tag: int) -> MessageId:
        """Return the message that stands for the acks awaited for a tag."""
        tag += ACK_TAG
        number = self._num_acks[tag] = self._num_acks.get(tag, 0) + 1
        return tag, number, 0, len(self.connections.same_host.sources)
