"""Bytes of living tensors: of those created inside a block, and of all."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
