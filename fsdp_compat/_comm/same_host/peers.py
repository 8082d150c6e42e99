"""How the ranks of an axis find each other's memory on their host."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence

import torch

from ..divergence.processes import Process
from . import counters, shared_memory
from .peer_memory import Location, PeerMemory

_DTYPES = [value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)]


@dataclasses.dataclass(frozen=True)
class Introduction:
    """What other processes need to read this one's memory and counters."""

    process: Process
    token: bytes
    control: int  # descriptor of the control file
    chunk: Location  # of any block's
    table: tuple[int, int]  # descriptor and number of the file of counters


class Message(typing.NamedTuple):
    """Where a message lies, in seven words."""

    location: Location
    numel: int
    dtype: torch.dtype | None  # None: unknown here
    dtype_number: int

    def __str__(self) -> str:
        return f"{self.numel} elements of " + (
            str(self.dtype) if self.dtype else f"an unknown dtype ({self.dtype_number})"
        )

    @staticmethod
    def words(location: Location, message: torch.Tensor) -> list[int]:
        return [*location, message.numel(), _DTYPES.index(message.dtype)]


class Peer:
    """Another rank of this host."""

    def __init__(self, memory: PeerMemory, table: counters.PeerTable) -> None:
        self.memory, self.table = memory, table

    def message(self, tag: int) -> Message:
        """Return its last message with a tag."""
        *location, numel, number = self.table.words(tag)
        dtype = _DTYPES[number] if 0 <= number < len(_DTYPES) else None
        return Message(Location(*location), numel, dtype, number)

    def has_failed(self, tag: int) -> bool:
        """True if its communication has failed since it sent the last message with a tag: what was
        read may be other values."""
        return self.memory.epoch != self.message(tag).location.epoch


def introduce() -> tuple[Introduction, counters.Table] | None:
    """Return what is told to the other ranks of an axis, and this rank's counters there. None: no
    rank could read its memory."""
    process, control = Process.own(), shared_memory.control()
    chunk = shared_memory.any_chunk()
    if process is None or control is None or chunk is None or not counters.are_supported():
        return None
    token = shared_memory.token()
    try:
        table = counters.Table(token)
    except OSError:
        return None
    assert table.file is not None
    files = table.file.fd, table.file.number
    return Introduction(process, token, control, chunk, files), table


def attach(told: Sequence[Introduction | None], rank: int) -> dict[int, Peer] | None:
    """Return the peers of ``rank``, or None if it cannot read the memory of all of them. told: by
    rank."""
    found: dict[int, Peer] = {}
    own = told[rank]
    for peer, other in enumerate(told):
        if own is None or other is None or own.process.machine != other.process.machine:
            return None
        if peer != rank:
            try:
                memory = shared_memory.attach(other.process.pid, other.control, other.token)
                memory.map_chunk(other.chunk)  # now: here all ranks can still send values
                table = counters.PeerTable(memory, *other.table, other.process)
            except (OSError, ValueError):
                return None
            found[peer] = Peer(memory, table)
    return found
