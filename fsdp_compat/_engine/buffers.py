"""Casts module buffers to the dtype that a unit computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .dtypes import ComputeDtype

# {buffer cast by some unit: its dtype before}. Several units may share a buffer.
_dtypes_before: WeakIdKeyDictionary = WeakIdKeyDictionary()


class CastBuffers:
    """The floating-point buffers of one unit's modules, cast to the dtype of computation.

    The tensor objects stay the same, so code that shares a buffer keeps sharing it. The exact
    values are kept for evaluation in full precision and for state dicts."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """Cast the buffers of ``modules`` (without submodules), before the first forward."""
        self._dtype, self._modules = dtype, list(modules)
        self._current = ComputeDtype.EVAL
        self._slots: list[tuple[nn.Module, str, torch.dtype]] = []  # (module, name, exact dtype)
        self._exact: list[tuple[Tensor, Tensor]] = []  # (cast buffer, exact values)
        self._find_buffers()
        self.follow(ComputeDtype.TRAIN)

    def _find_buffers(self) -> None:
        self._slots = [
            (module, name, _dtypes_before.get(buffer, buffer.dtype))
            for module in self._modules
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if buffer.is_floating_point()
        ]

    @contextlib.contextmanager
    def uncast(self) -> Iterator[None]:
        """A context in which the buffers have their exact dtypes and may be replaced."""
        before = self._current
        self.follow(ComputeDtype.EVAL)
        try:
            yield
        finally:
            self._find_buffers()
            self.follow(before)

    def follow(self, dtype: ComputeDtype) -> None:
        """TRAIN: cast to the dtype of computation. EVAL: back to the exact dtypes."""
        if dtype is self._current:
            return
        self._current = dtype
        with torch.inference_mode(False), torch.no_grad():
            if dtype is ComputeDtype.EVAL:
                for (module, name, _), value in list(self._exact_values()):
                    module._buffers[name].data = value  # type: ignore[union-attr]
                self._exact = []
                return
            for module, name, before in self._slots:
                buffer = module._buffers.get(name)
                if (
                    buffer is not None
                    and buffer.is_floating_point()
                    and buffer.dtype != self._dtype
                ):
                    exact = buffer.data
                    buffer.data = exact.to(self._dtype)
                    self._exact.append((buffer, exact))
                    _dtypes_before[buffer] = before

    def _exact_values(self) -> Iterator[tuple[tuple[nn.Module, str, torch.dtype], Tensor]]:
        for slot in self._slots:
            module, name, before = slot
            buffer = module._buffers.get(name)
            if buffer is None or not buffer.is_floating_point():
                continue
            value = buffer.detach().to(before)
            for cast, exact in self._exact:
                # Compared by value, because a write through `.data` bumps no version counter.
                if cast is buffer and exact.dtype == before:
                    value = exact if torch.equal(exact.to(buffer.dtype), buffer) else value
            yield slot, value
