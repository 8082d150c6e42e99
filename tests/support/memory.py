"""Bytes of living tensors: of those created inside a block, of all, and of those of the engine."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_compat._engine.gradients import Gradients
from fsdp_compat._engine.group import Group
from fsdp_compat._engine.group_memory import GroupMemory
from fsdp_compat._engine.reduce import GradBuffer, ReduceBuffer

_PLAIN = torch.nn.Parameter.__torch_function__


class NewBytes(TorchDispatchMode):
    """Counts the bytes of storages created inside the context: ``peak``, the most that they held at
    once, and ``now``."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_plain(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                _is_plain(tensor)
                and not tensor.is_meta
                and (storage := tensor.untyped_storage())._cdata not in given
            ):
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())


def _is_plain(thing: Any) -> bool:
    """True for a tensor with a storage."""
    kind = type(
        thing
    )  # isinstance asks Parameter's own class, which takes long for all objects of a process
    return kind is Tensor or (
        issubclass(kind, torch.nn.Parameter) and kind.__torch_function__ == _PLAIN
    )


def allocated_nbytes() -> int:
    """Bytes of the storages of all tensors that are alive in this process."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if _is_plain(thing):
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def group_nbytes(group: Group) -> int:
    """Bytes that a group holds beyond its shard, gradients and optimizer state."""
    found = sum(map(gathered_nbytes, group.memories)) + gradients_nbytes(group.gradients)
    partial = group.partial
    if partial is None:
        return found
    held = 0 if partial._kept is None else partial._kept.nbytes
    return found + held + partial._storage.untyped.nbytes()


def gathered_nbytes(memory: GroupMemory) -> int:
    """Bytes of the all-gather output, and of parameters that are copied out of it."""
    return sum(storage.nbytes() for storage in memory.storages)


def gradients_nbytes(gradients: Gradients) -> int:
    """Bytes of received gradients that are not reduced."""
    return 0 if gradients._buffer is None else buffer_nbytes(gradients._buffer)


def buffer_nbytes(buffer: GradBuffer) -> int:
    if isinstance(buffer, ReduceBuffer):
        tensor = buffer.views.buffer  # it may be freed, or a part of shared memory
        return min(tensor.nbytes, tensor.untyped_storage().nbytes())
    return sum(grad.nbytes for grad in buffer._grads.values())
