"""Tensors in memory that the other ranks of this host can read.

``allocate`` puts tensors into blocks of this process's arena (arena.py), and ``locate`` says where
a tensor lies.

Where the system has no more descriptors or addresses, new tensors are ordinary memory."""

from __future__ import annotations

import os
import typing

import torch

from .arena import Arena

_num_forks = 0
_arena = Arena()


class Location(typing.NamedTuple):
    """Where a message lies, in terms that other processes understand."""

    chunk: int  # index
    number: int  # of the file of the chunk; no two files of a process have the same one
    fd: int  # of that file, in its process
    offset: int  # bytes


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


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)


def allocate(numel: int, dtype: torch.dtype, *, zero: bool = False) -> torch.Tensor:
    """Return a CPU tensor [numel], uninitialised unless ``zero``, in a block if there is memory.
    Pages that were never written to are not touched."""
    nbytes = numel * dtype.itemsize
    block = _arena.take(nbytes, zero) if nbytes else None
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


def locate(tensor: torch.Tensor) -> Location | None:
    """Return where a contiguous tensor lies in this process's blocks, or None if it lies elsewhere.
    A tensor without elements lies anywhere."""
    if not tensor.numel():
        return first_location()
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
    return None if file is None else Location(chunk.index, file.number, file.fd, offset)


def first_location() -> Location | None:
    """Return the beginning of a chunk that peers can map, or None if no process could read this
    one's memory."""
    _arena.open()
    for chunk in _arena.chunks:
        if chunk.file is not None:
            return Location(chunk.index, chunk.file.number, chunk.file.fd, 0)
    return None


def refusal() -> str:
    """Return why the system has refused memory last."""
    return _arena.refusal


def token() -> bytes:
    """Return the token that every file of this process's memory begins with."""
    return _arena.token


def forget_old_files() -> None:
    """Close the files from before forks, which were kept for peers that have not opened them yet.
    The caller knows that no peer still has to read anything."""
    for chunk in _arena.chunks:
        chunk.old_files.clear()
