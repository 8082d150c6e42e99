"""Bytes of storages that are alive on one device, by kind."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .. import _torch_private
from .._engine.nested import tensors_in
from .._torch_private import simulation

KINDS = ("parameters", "gradients", "optimizer", "buffers", "gathered", "reducing", "activations")
Sizes = dict[str, int]
LEFT_OUT = "left out"  # a kind that is not counted


class Memory(simulation.DispatchMode):
    """Inside the context every storage that an operation reads or writes is followed: its growth
    and its end. A storage counts once, however many tensors view it.

    Memory that an operation allocates and frees internally is not seen."""

    def __init__(
        self,
        device: str = "meta",
        on_peak: Callable[[int, Sizes], None] | None = None,
        answer: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """on_peak: is told the bytes, in all and by kind, whenever more are alive than since
        ``restart``. answer: returns the result of an operation that cannot be carried out, or
        None."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.default = "activations"  # the kind of new storages
        self.nbytes, self.most = 0, 0
        self.by_kind = collections.Counter[str]()
        self._device, self._on_peak, self._answer = device, on_peak, answer
        self._followed: dict[int, tuple[str, int, Any]] = {}  # kind, bytes, weak reference
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Memory:
        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = self._resize(storage, nbytes)
            if storage.device.type == self._device:
                self._follow(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if simulation.has_dtensors(types):
            return NotImplemented  # called again with the local tensors
        if self._answer is not None and (answer := self._answer(func, args)) is not None:
            return answer
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if tensor.device.type == self._device:
                self._follow(tensor.untyped_storage())
        return result

    def mark(self, kind: str, tensors: Iterable[Tensor | torch.UntypedStorage]) -> None:
        """Say of what kind some storages are."""
        for each in tensors:
            if isinstance(each, Tensor):
                each = _torch_private.local_part(each).untyped_storage()
            if each.device.type == self._device:
                self._follow(each, kind)

    def restart(self) -> None:
        """Look for a new peak from now on."""
        self.most = 0
        self._rise()

    def _follow(self, storage: torch.UntypedStorage, kind: str | None = None) -> None:
        key, nbytes = simulation.key_of(storage), storage.nbytes()
        if key not in self._followed:
            reference = weakref.ref(storage, lambda _: self._forget(key))
            self._followed[key] = kind or self.default, 0, reference
        before, nbytes_before, reference = self._followed[key]
        now = kind or before
        if now == LEFT_OUT:
            nbytes = 0
        if (now, nbytes) != (before, nbytes_before):
            self._count(before, -nbytes_before)
            self._count(now, nbytes)
            self._followed[key] = now, nbytes, reference
            self._rise()

    def _forget(self, key: int) -> None:
        kind, nbytes, _ = self._followed.pop(key)
        self._count(kind, -nbytes)

    def _count(self, kind: str, nbytes: int) -> None:
        self.by_kind[kind] += nbytes
        self.nbytes += nbytes

    def _rise(self) -> None:
        if self.nbytes > self.most:
            self.most = self.nbytes
            if self._on_peak is not None:
                self._on_peak(self.nbytes, +self.by_kind)
