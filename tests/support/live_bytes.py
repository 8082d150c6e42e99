"""Memory that is alive at the peak, by storage and by the line that allocated it, on any device."""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_compat import _torch_private
from fsdp_compat._comm.same_host import peers, shared_memory

_RESIZE, _EMPTY = torch.UntypedStorage.resize_, shared_memory.allocate


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Memory alive at a peak that one line of code allocated."""

    nbytes: int
    number: int  # of storages
    # the operation or "resize_", and the innermost functions outside of torch's own core that
    # called it
    what: str


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak of a ``LiveBytes``, and the memory alive then, the largest first."""

    nbytes: int
    held: tuple[Allocation, ...]


class LiveBytes(TorchDispatchMode):
    """Inside the context every storage is tracked: existing ones, new ones, their growth and their
    end.

    A storage counts once, however many tensors view it; a block that ranks share counts where it
    was made, not where it is read. Memory that an operation allocates and frees internally is not
    counted.
    """

    def __init__(self) -> None:
        super().__init__()
        # by the address of the storage object: its number
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._nbytes: list[int] = []  # by number: now
        self._what: list[str] = []  # by number: the code that allocated it last
        self._events: list[tuple[int, int]] = []  # (number, its bytes from here on)
        self._left_out: set[int] = set()
        for tensor in _tensors():
            self._see(tensor, "existing")

    def __enter__(self) -> LiveBytes:
        tracker = self

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            tracker._drop_freed()
            result = _RESIZE(storage, nbytes)
            tracker._note(storage, "resize_")
            return result

        def empty(*args: Any, **kwargs: Any) -> Tensor:  # no operation reports it
            tracker._drop_freed()
            block = _EMPTY(*args, **kwargs)
            tracker._see(block, "a block")
            return block

        torch.UntypedStorage.resize_, shared_memory.allocate = resize, empty  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_, shared_memory.allocate = _RESIZE, _EMPTY  # type: ignore[method-assign]
        super().__exit__(*error)
        self._drop_freed()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # called again with the plain tensors inside
        self._drop_freed()
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor):
                self._see(tensor, func._schema.name)
        return result

    def forget(self) -> None:
        """Start again: measure peaks from now on."""
        self._drop_freed()
        for key, (reference, _) in list(self._alive.items()):
            if reference.expired():  # left out, or without memory
                del self._alive[key]
        self._events = [(number, self._nbytes[number]) for _, number in self._alive.values()]

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Leave out the storages of some tensors altogether."""
        found = (
            self._alive.get(_torch_private.storage_key(_torch_private.local_part(tensor)))
            for tensor in tensors
        )
        self._left_out.update(entry[1] for entry in found if entry is not None)

    def now(self) -> int:
        """Return the bytes that are alive now."""
        self._drop_freed()
        return sum(
            self._nbytes[number]
            for _, number in self._alive.values()
            if number not in self._left_out
        )

    def peak(self) -> Peak:
        """Return the peak since the last ``forget``."""
        self._drop_freed()
        held: dict[int, int] = {}
        total, most, at_most = 0, 0, dict[int, int]()
        rising = False
        for number, nbytes in self._events:
            if number in self._left_out:
                continue
            if rising and nbytes < held.get(number, 0):  # the previous event was a local peak
                if total > most:
                    most, at_most = total, dict(held)
                rising = False
            rising |= nbytes > held.get(number, 0)
            total += nbytes - held.get(number, 0)
            held[number] = nbytes
        if total > most:
            most, at_most = total, held
        lines: dict[str, list[int]] = collections.defaultdict(list)
        for number, nbytes in at_most.items():
            if nbytes:
                lines[self._what[number]].append(nbytes)
        held_by_line = (Allocation(sum(each), len(each), what) for what, each in lines.items())
        return Peak(most, tuple(sorted(held_by_line, key=lambda its: -its.nbytes)))

    def _see(self, tensor: Tensor, what: str) -> None:
        local = _torch_private.local_part(tensor)
        if not _has_no_memory(local):
            self._note(local.untyped_storage(), what)

    def _note(self, storage: torch.UntypedStorage, what: str) -> None:
        if storage.device.type == "meta":
            return
        key, nbytes = storage._cdata, storage.nbytes()
        if _is_of_another_process(storage):
            return
        if key in self._alive:
            number = self._alive[key][1]
            if nbytes == self._nbytes[number]:
                return
            if nbytes:
                self._what[number] = f"{what} in {_caller()}"
            self._nbytes[number] = nbytes
        else:
            number = len(self._nbytes)
            # while the reference is held, no other storage gets this address
            self._alive[key] = StorageWeakRef(storage), number
            self._nbytes.append(nbytes)
            self._what.append(f"{what} in {_caller()}")
        self._events.append((number, nbytes))

    def _drop_freed(self) -> None:
        nbytes, left_out = self._nbytes, self._left_out
        for key, (reference, number) in list(self._alive.items()):
            if nbytes[number] and number not in left_out and reference.expired():
                del self._alive[key]
                self._events.append((number, 0))


def _is_of_another_process(storage: torch.UntypedStorage) -> bool:
    """True for a block of a peer, which counts it."""
    address = storage.data_ptr()
    return storage.device.type == "cpu" and any(
        0 <= address - chunk.address < len(chunk.view)
        for peer in peers._arenas.values()
        for chunk in peer._chunks.values()
    )


def spare_pages_nbytes() -> int:
    """Return the shared memory that no tensor uses now: pages of freed blocks, kept for reuse."""
    arena = shared_memory.arena
    resident = sum(os.fstat(chunk.file.fd).st_blocks * 512 for chunk in arena.chunks)
    free = sum(end - start for chunk in arena.chunks for start, end in chunk.free) + sum(
        its[2] for its in arena._returned
    )
    return max(resident - (sum(chunk.nbytes for chunk in arena.chunks) - free), 0)


def release_spare_pages() -> None:
    """Return unused pages of shared memory to the system."""
    arena = shared_memory.arena
    while arena._returned:
        chunk, start, nbytes = arena._returned.popleft()
        chunk.put(start, nbytes)
    for chunk in arena.chunks:
        for start, end in chunk.free:
            chunk.forget_pages(start, end - start)
    arena._kept_nbytes = 0


def tensors_alive() -> list[Tensor]:
    """Return every living tensor, after a garbage collection."""
    while gc.collect():  # freed objects may free others
        pass
    return _tensors()


def _tensors() -> list[Tensor]:
    # isinstance would read __class__ of every object, which imports modules for some
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), Tensor) and not _has_no_memory(thing)
    ]


def _has_no_memory(tensor: Tensor) -> bool:
    """True for a tensor without memory in this process."""
    return tensor.layout is not torch.strided or type(tensor).__name__ in (
        "FakeTensor",
        "FunctionalTensor",
    )


_CORE = (
    "torch/_dynamo/",
    "torch/_compile.py",
    "torch/nn/",
    "torch/utils/",
    "torch/autograd/",
    "torch/_ops.py",
    "torch/_tensor.py",
    "torch/storage.py",
    "contextlib.py",
)


def _caller(depth: int = 3) -> str:
    """Return the innermost functions of the stack outside this file and torch's core, as
    ``file:function < file:function``."""
    frame, found = sys._getframe(2), list[str]()
    while frame is not None and len(found) < depth:
        file = frame.f_code.co_filename
        if file != __file__ and not any(part in file for part in _CORE):
            found.append(f"{Path(file).name}:{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)
