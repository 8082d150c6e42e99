"""Peers on the same host, which read each other's messages in place.

Instead of the values, such a peer is sent a *descriptor*, which says where they lie in the sender's
shared memory (shared_memory.py). The peer reads them there, and answers with an *ack*; until then
the sender leaves the memory as it is.

Descriptors and acks go through a ``Channel`` to one peer: counters in shared memory (counters.py),
or messages where counters are not supported. All-gathers of large shards need neither, as the
shards are mapped (mapped.py). The environment variable FSDP_COMPAT_SAME_HOST, which must be the
same on all ranks, limits this: ``counters`` maps nothing, ``messages`` counts nothing either."""

from __future__ import annotations

import datetime
import os
import struct
import typing
from collections.abc import Callable, Sequence

import torch

from ..errors import UsageError, explain
from . import counters, shared_memory
from .transport import Work

__all__ = [
    "ACK_TAG",
    "DONE",
    "NUM_WORDS",
    "Described",
    "SameHostPeers",
    "attach_peers",
    "describe",
    "limit",
    "min_factor",
]

ACK_TAG = 1 << 24  # added to the tag of a message: that of its ack

_DTYPES = [value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)]
NUM_WORDS = len(shared_memory.Location._fields) + 2  # of a descriptor; numel and dtype follow
# descriptor and number of the file of counters, or two times -1; and a chunk (its location)
_FILES = struct.Struct("qq5q")
_NO_TABLE = -1, -1
_LIMITS = "mapped", "counters", "messages"  # each includes the later ones
_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


class Described(typing.NamedTuple):
    """What a descriptor says."""

    location: shared_memory.Location
    numel: int
    dtype: torch.dtype | None  # None: unknown here
    dtype_number: int

    def __str__(self) -> str:
        return f"{self.numel} elements of " + (
            str(self.dtype) if self.dtype else f"an unknown dtype ({self.dtype_number})"
        )


class _Done:
    """Work that needs no wait."""

    def wait(self, timeout: datetime.timedelta) -> bool:
        return True


DONE = _Done()
Descriptor = Callable[[], Described]  # to be called when the wait for it is over


def describe(location: shared_memory.Location, message: torch.Tensor) -> list[int]:
    """Return the words of the descriptor of a message."""
    return [*location, message.numel(), _DTYPES.index(message.dtype)]


def _described(words: Sequence[int]) -> Described:
    *location, numel, number = words
    dtype = _DTYPES[number] if 0 <= number < len(_DTYPES) else None
    return Described(shared_memory.Location(*location), numel, dtype, number)


class Channel(typing.Protocol):
    """Descriptors and acks to and from one peer. Messages with one tag have increasing numbers."""

    def expect(self, tag: int, number: int) -> tuple[Work, Descriptor]:
        """Return the wait for the peer's descriptor, and the descriptor."""

    def send(self, tag: int, number: int, words: Sequence[int], acked: bool) -> Work:
        """Send a descriptor. acked: the peer answers. ``unread`` was waited for before."""

    def expect_ack(self, tag: int, number: int) -> Work:
        """Return the wait until the peer has read what is sent."""

    def unread(self, tag: int) -> Work:
        """Return a wait that has to end before the next message with this tag is sent."""

    def acknowledge(self, tag: int, number: int) -> Work:
        """Tell the peer that its message was read."""

    def close(self) -> None:
        """Let the peer's waits fail."""


class MessageChannel:
    """Descriptors and acks are messages over gloo, of which any number can wait for the peer."""

    def __init__(self, gloo: typing.Any, peer: int) -> None:
        self._gloo, self._peer = gloo, peer

    def expect(self, tag: int, number: int) -> tuple[Work, Descriptor]:
        words = torch.zeros(NUM_WORDS, dtype=torch.int64, device="cpu")
        work = self._gloo.recv([words], self._peer, tag)
        return work, lambda: _described(words.tolist())

    def send(self, tag: int, number: int, words: Sequence[int], acked: bool) -> Work:
        message = torch.tensor(words, dtype=torch.int64, device="cpu")
        return typing.cast(Work, self._gloo.send([message], self._peer, tag))

    def expect_ack(self, tag: int, number: int) -> Work:
        return typing.cast(Work, self._gloo.recv([_NO_BYTES], self._peer, tag + ACK_TAG))

    def unread(self, tag: int) -> Work:
        return DONE

    def acknowledge(self, tag: int, number: int) -> Work:
        return typing.cast(Work, self._gloo.send([_NO_BYTES], self._peer, tag + ACK_TAG))

    def close(self) -> None:
        pass


class CounterChannel:
    """Descriptors and acks are counted in shared memory: the last one of each tag."""

    def __init__(
        self,
        own: counters.Table,
        theirs: counters.PeerTable,
        peer: int,
        beyond: MessageChannel,
    ) -> None:
        """beyond: for tags that have no counters."""
        self._own, self._theirs, self._peer, self._beyond = own, theirs, peer, beyond
        self._acked: dict[int, int] = {}  # by tag: number of the last message that is acked

    def expect(self, tag: int, number: int) -> tuple[Work, Descriptor]:
        if tag >= counters.NUM_TAGS:
            return self._beyond.expect(tag, number)
        theirs = self._theirs
        return theirs.sent(tag, number), lambda: _described(theirs.words(tag))

    def send(self, tag: int, number: int, words: Sequence[int], acked: bool) -> Work:
        if tag >= counters.NUM_TAGS:
            return self._beyond.send(tag, number, words, acked)
        self._own.send(self._peer, tag, number, words)
        if acked:
            self._acked[tag] = number
        return DONE

    def expect_ack(self, tag: int, number: int) -> Work:
        if tag >= counters.NUM_TAGS:
            return self._beyond.expect_ack(tag, number)
        return self._theirs.read(tag, number)

    def unread(self, tag: int) -> Work:
        number = self._acked.pop(tag, None)
        return DONE if number is None else self._theirs.read(tag, number)

    def acknowledge(self, tag: int, number: int) -> Work:
        if tag >= counters.NUM_TAGS:
            return self._beyond.acknowledge(tag, number)
        self._own.acknowledge(self._peer, tag, number)
        return DONE

    def close(self) -> None:
        self._own.close()


class SameHostPeers:
    """The peers of one rank that can read its memory, and whose memory it can read."""

    def __init__(
        self,
        memories: dict[int, shared_memory.PeerMemory],
        channels: dict[int, Channel],
        order: Sequence[tuple[int, int]],
    ) -> None:
        """memories, channels: by rank. order: (source, target) of each step of an exchange."""
        self.memories, self.channels = memories, channels
        # True if descriptors are counted, and if shards may be mapped
        self.counts = bool(channels) and all(
            isinstance(channel, CounterChannel) for channel in channels.values()
        )
        self.maps = self.counts and limit() != "counters"
        self.sources = [source for source, _ in order if source in memories]
        self.targets = [target for _, target in order if target in memories]

    def has_failed(self, rank: int, descriptor: Descriptor) -> bool:
        """True if the communication of a rank has failed since it sent a descriptor: what was read
        by way of it may be other values."""
        return self.memories[rank].epoch != descriptor().location.epoch

    def close(self) -> None:
        """Let the waits of the peers fail."""
        for channel in self.channels.values():
            channel.close()


def attach_peers(
    gloo: typing.Any,
    order: Sequence[tuple[int, int]],
    swap: Callable[[dict[int, torch.Tensor], int], dict[int, torch.Tensor]],
    tags: tuple[int, int],
) -> SameHostPeers:
    """Find the peers of the same host. Both of a pair must be able to read the other's memory.

    swap: sends every rank a message with a tag, and returns the messages of the ranks. Collective.
    """
    rank, ranks = gloo.rank(), gloo.size()
    identity, table = shared_memory.identity(), _new_table(ranks)
    place = (table.file.fd, table.file.number) if table and table.file else _NO_TABLE
    files = _FILES.pack(*place, *shared_memory.any_chunk())
    told = torch.frombuffer(bytearray(identity + files), dtype=torch.uint8)
    memories: dict[int, shared_memory.PeerMemory] = {}
    channels: dict[int, Channel] = {}
    for peer, answer in swap(dict.fromkeys([source for source, _ in order], told), tags[0]).items():
        other = bytes(answer.tolist())
        memory = shared_memory.attach_peer(other[: len(identity)])
        if memory is None:
            continue
        fd, number, *chunk = _FILES.unpack(other[len(identity) :])
        location = shared_memory.Location(*chunk)
        messages = MessageChannel(gloo, peer)
        channel: Channel = messages
        try:
            if not location.is_sent:
                memory.map_chunk(location)  # now: here all ranks can still do without
            if table is not None and (fd, number) != _NO_TABLE:
                counted = counters.PeerTable(memory, fd, number, rank, ranks)
                channel = CounterChannel(table, counted, peer, messages)
        except OSError:
            continue
        memories[peer], channels[peer] = memory, channel
    verdicts = swap(
        {
            source: torch.tensor([source in memories], dtype=torch.uint8, device="cpu")
            for source, _ in order
        },
        tags[1],
    )
    if table is not None:
        table.file = None
    both = {peer: memory for peer, memory in memories.items() if bool(verdicts[peer])}
    return SameHostPeers(both, {peer: channels[peer] for peer in both}, order)


def min_factor(ranks: int, counts: bool) -> int:
    """Return how many times shared_memory.MIN_NBYTES a message must have to be read in place;
    where descriptors are messages, measured by tests/benchmarks/transport.py. counts: they are
    not."""
    if counts:
        return 1
    return 128 if ranks == 2 else 32  # with one peer, sending costs less


def limit() -> str:
    """Return what FSDP_COMPAT_SAME_HOST allows. Raises UsageError for anything else."""
    found = os.environ.get("FSDP_COMPAT_SAME_HOST", _LIMITS[0])
    if found not in _LIMITS:
        raise UsageError(
            explain(
                "FSDP_COMPAT_SAME_HOST is not a way to exchange data.",
                expected=", ".join(map(repr, _LIMITS)),
                got=repr(found),
                where="the environment of this process",
                fix="set it to the same one on all ranks, or unset it",
            )
        )
    return found


def _new_table(ranks: int) -> counters.Table | None:
    if limit() == "messages" or not counters.are_supported():
        return None
    try:
        return counters.Table(ranks, shared_memory.token())
    except OSError:
        return None
