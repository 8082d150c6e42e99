"""Tensors in memory that the other ranks of this host can read.

``allocate``, ``zeros`` and ``copy_of`` put large tensors into blocks of this process's arena
(arena.py), ``locate`` says where a tensor lies, and ``attach_peer`` returns the memory of another
process (peer_memory.py).

None of this is required. Without Linux and /proc, on different hosts or in different user or pid
namespaces, there are no such peers and messages are sent. Where the system has no more descriptors
or addresses, new tensors are ordinary memory, and are sent."""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Sequence

import torch

from .arena import Arena
from .divergence.processes import Process
from .memory_files import TOKEN_NBYTES
from .peer_memory import Location, PeerMemory

__all__ = [
    "IDENTITY_NBYTES",
    "Location",
    "MIN_NBYTES",
    "PeerMemory",
    "allocate",
    "any_chunk",
    "attach_peer",
    "bump_epoch",
    "copy_of",
    "copy_of_others",
    "forget_old_files",
    "has_old_files",
    "identity",
    "locate",
    "located",
    "location_of",
    "num_forks",
    "token",
    "zeros",
]

MIN_NBYTES = 1 << 14  # of a block: it has whole pages

# machine, pid, descriptor of the control file, token
_IDENTITY = struct.Struct(f"64sqq{TOKEN_NBYTES}s")
IDENTITY_NBYTES = _IDENTITY.size
_NO_IDENTITY = bytes(IDENTITY_NBYTES)
_MACHINE = slice(64)  # of an identity

_num_forks = 0
_arena = Arena()
_peers: weakref.WeakValueDictionary[bytes, PeerMemory] = weakref.WeakValueDictionary()


def num_forks() -> int:
    """Return how often this process has forked: every time, tensors in blocks may move to another
    file (see ``locate``).

    Under the lock: a fork in another thread is counted if it has frozen blocks, and only then. So a
    location that was asked for after the count is out of date only if the count has changed.
    """
    with _arena.lock:
        return _num_forks


def _before_fork() -> None:
    global _num_forks
    _arena.lock.acquire()  # until the fork is done: no block is taken or thawed meanwhile
    _arena.freeze()
    _num_forks += 1


def _after_fork_in_parent() -> None:
    _arena.lock.release()


def _after_fork_in_child() -> None:
    global _arena
    parents, _arena = _arena, Arena()
    parents.leave()
    _peers.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)


def allocate(
    numel: int, dtype: torch.dtype, *, zero: bool = False, min_nbytes: int | None = None
) -> torch.Tensor:
    """Return an uninitialised CPU tensor [numel], in a block if it has at least ``min_nbytes``, by
    default MIN_NBYTES, and there is memory."""
    nbytes = numel * dtype.itemsize
    is_large = nbytes >= (MIN_NBYTES if min_nbytes is None else min_nbytes)
    block = _arena.take(nbytes, zero) if is_large else None
    if block is None:
        make = torch.zeros if zero else torch.empty
        return make(numel, dtype=dtype, device="cpu")
    tensor = torch.frombuffer(block, dtype=dtype)
    vars(tensor.untyped_storage())["resize_"] = _let_go  # of this storage, from whatever view of it
    return tensor


def _let_go(nbytes: int) -> None:
    """``resize_`` of a storage in a block: clients free a model by ``resize_(0)`` before they let
    go of it, and other ranks may still be reading. The memory is freed with its last tensor."""
    if nbytes:
        raise RuntimeError("memory that fsdp_compat shares with other ranks cannot be resized")


def zeros(numel: int, dtype: torch.dtype, *, min_nbytes: int | None = None) -> torch.Tensor:
    """Return a tensor of zeros, likewise. Pages that were never written to are not touched."""
    return allocate(numel, dtype, zero=True, min_nbytes=min_nbytes)


def copy_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a copy of a 1-D tensor, in ``dtype``, in a block if there is memory."""
    return allocate(tensor.numel(), dtype or tensor.dtype).copy_(tensor)


def copy_of_others(
    segments: Sequence[torch.Tensor], rank: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a copy of the segments of all ranks but ``rank``, and all segments: those of the
    others are views of the copy."""
    own = segments[rank]
    block = allocate((len(segments) - 1) * own.numel(), own.dtype)
    found = list(block.view(-1, own.numel()))
    found.insert(rank, own)
    for target, source in zip(found, segments, strict=True):
        if target is not own:
            target.copy_(source)
    return block, found


def located(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous 1-D tensor if it lies in a block, or a copy."""
    return tensor if locate(tensor) is not None else copy_of(tensor)


def locate(tensor: torch.Tensor) -> Location | None:
    """Return where a contiguous tensor lies in this process's blocks, or None if it lies elsewhere.
    A tensor without elements lies anywhere."""
    if not tensor.numel():
        return Location(_epoch(), 0, 0, 0, 0) if _arena.chunks else None
    address = tensor.data_ptr()
    chunk = _arena.chunk_of(address)
    if chunk is None or not tensor.is_contiguous():
        return None
    offset = address - chunk.address
    # read before `frozen`: a fork in another thread freezes first, and until then the old file
    # holds the right values
    file = chunk.file
    if chunk.frozen:
        with _arena.lock:
            if not chunk.thaw(offset):
                return None
            file = chunk.file
    return None if file is None else Location(_epoch(), chunk.index, file.number, file.fd, offset)


def location_of(tensor: torch.Tensor) -> Location:
    """Return where a peer can read ``tensor``, or the location that says that it is sent."""
    return locate(tensor) or Location.sent(_epoch())


def _epoch() -> int:
    return _arena.epoch[0]


def bump_epoch() -> None:
    """Invalidate every location given so far. A peer checks the epoch after it has read."""
    _arena.epoch[0] += 1


def has_old_files() -> bool:
    """True if files from before a fork are kept for peers that have not opened them yet."""
    return any(chunk.old_files for chunk in _arena.chunks)


def forget_old_files() -> None:
    """Close those files. The caller knows that no peer still has to read anything."""
    for chunk in _arena.chunks:
        chunk.old_files.clear()


def identity() -> bytes:
    """Return what another process needs to find this one's memory: IDENTITY_NBYTES, all zero if it
    cannot be shared."""
    own = Process.own()
    if own is None or not _arena.open() or _arena.control is None:
        return _NO_IDENTITY
    return _IDENTITY.pack(own.machine.encode(), own.pid, _arena.control.fd, _arena.token)


def any_chunk() -> Location:
    """Return the beginning of a chunk that peers can map, or, without one, the location of what is
    sent."""
    for chunk in _arena.chunks:
        if chunk.file is not None:
            return Location(_epoch(), chunk.index, chunk.file.number, chunk.file.fd, 0)
    return Location.sent(_epoch())


def token() -> bytes:
    """Return the token that every file of this process's memory begins with."""
    return _arena.token


def attach_peer(other: bytes) -> PeerMemory | None:
    """Return the memory of the process with an identity, or None if it cannot be read from here."""
    own = identity()
    if _NO_IDENTITY in (other, own) or own[_MACHINE] != other[_MACHINE]:
        return None
    found = _peers.get(other)
    if found is None:
        _, pid, control, token = _IDENTITY.unpack(other)
        try:
            found = _peers[other] = PeerMemory(pid, control, token)
        except (OSError, ValueError):
            return None
    return found
