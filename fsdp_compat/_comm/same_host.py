"""Peers on the same host, which read each other's messages in place.

Instead of the values, such a peer is sent a *descriptor*, which says where they lie in the sender's
shared memory (shared_memory.py). The peer reads them there, and answers with an *ack*; until then
the sender leaves the memory as it is."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence

import torch

from . import shared_memory

__all__ = [
    "NO_PEERS",
    "SameHostPeers",
    "attach_peers",
    "descriptor_of",
    "empty_descriptor",
    "read_descriptor",
]

_DTYPES = [value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)]
_DESCRIPTOR_NUMEL = len(shared_memory.Location._fields) + 2  # and numel, dtype

NO_PEERS: dict[int, shared_memory.PeerMemory] = {}


class SameHostPeers:
    """The peers of one rank that can read its memory, and whose memory it can read."""

    def __init__(
        self, memories: dict[int, shared_memory.PeerMemory], order: Sequence[tuple[int, int]]
    ) -> None:
        """memories: by rank. order: (source, target) of each step of an exchange."""
        self.memories = memories
        self.sources = [source for source, _ in order if source in memories]
        self.targets = [target for _, target in order if target in memories]

    def has_failed(self, rank: int, descriptor: torch.Tensor) -> bool:
        """True if the communication of a rank has failed since it wrote a descriptor: what was read
        by way of it may be other values."""
        return self.memories[rank].epoch != int(descriptor[0])


def attach_peers(
    order: Sequence[tuple[int, int]],
    swap: Callable[[dict[int, torch.Tensor], int], dict[int, torch.Tensor]],
    tags: tuple[int, int],
) -> SameHostPeers:
    """Find the peers of the same host. Both of a pair must be able to read the other's memory.

    swap: sends every rank a message with a tag, and returns the messages of the ranks. Collective.
    """
    identity = torch.frombuffer(bytearray(shared_memory.identity()), dtype=torch.uint8)
    identities = swap(dict.fromkeys([source for source, _ in order], identity), tags[0])
    memories = {
        rank: shared_memory.attach_peer(bytes(other.tolist())) for rank, other in identities.items()
    }
    verdicts = swap(
        {
            rank: torch.tensor([memory is not None], dtype=torch.uint8, device="cpu")
            for rank, memory in memories.items()
        },
        tags[1],
    )
    both = {
        rank: memory
        for rank, memory in memories.items()
        if memory is not None and bool(verdicts[rank])
    }
    return SameHostPeers(both, order)


def empty_descriptor() -> torch.Tensor:
    """Return a tensor to receive a descriptor into."""
    return torch.zeros(_DESCRIPTOR_NUMEL, dtype=torch.int64, device="cpu")


def descriptor_of(location: shared_memory.Location, message: torch.Tensor) -> torch.Tensor:
    """Return the descriptor of a message."""
    return torch.tensor(
        [*location, message.numel(), _DTYPES.index(message.dtype)],
        dtype=torch.int64,
        device="cpu",
    )


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


def read_descriptor(descriptor: torch.Tensor) -> Described:
    *location, numel, number = descriptor.tolist()
    dtype = _DTYPES[number] if 0 <= number < len(_DTYPES) else None
    return Described(shared_memory.Location(*location), numel, dtype, number)
