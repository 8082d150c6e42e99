"""Buffers in the dtype of computation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["CastBuffers"]

_dtypes_before: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # of buffers that some unit has cast; another may share them


class CastBuffers:
    """The floating-point buffers of one unit's modules that are kept in another dtype than the
    user's model has them.

    They are known by module and name. The tensors stay the objects they are, so whoever shares one
    goes on sharing it. Exact values are kept beside: for evaluation in full precision and for state
    dicts, which lose nothing by what is a matter of computation.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """Cast the buffers of ``modules`` (of each alone, not of those in it) now, before the first
        forward."""
        self._dtype, self._form, self._modules = dtype, 1, list(modules)
        self._slots: list[tuple[nn.Module, str, torch.dtype]] = []  # (module, name, dtype before)
        self._exact: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # (buffer as it was cast, its values before)
        self._look()
        self.follow(0)

    def _look(self) -> None:
        """Note the buffers that there are, in the dtypes they have without the cast."""
        self._slots = [
            (module, name, _dtypes_before.get(buffer, buffer.dtype))
            for module in self._modules
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if buffer.is_floating_point()
        ]

    @contextlib.contextmanager
    def uncast(self) -> Iterator[None]:
        """Inside of it modules have the buffers without the cast, and may get others."""
        form = self._form
        self.follow(1)
        try:
            yield
        finally:
            self._look()
            self.follow(form)

    def follow(self, form: int) -> None:
        """form 0: the dtype of computation; 1: the dtypes they had, for evaluation in full
        precision and for loading."""
        if form == self._form:
            return
        self._form = form
        with torch.inference_mode(False), torch.no_grad():
            if form == 1:
                for (module, name, _), value in list(self._in_full()):
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

    def in_full(self) -> dict[tuple[int, str], torch.Tensor]:
        """Copies of the buffers as they are without the cast, by (id of the module, name)."""
        if self._form == 1:
            return {}
        return {(id(module), name): value.clone() for (module, name, _), value in self._in_full()}

    def _in_full(self) -> Iterator[tuple[tuple[nn.Module, str, torch.dtype], torch.Tensor]]:
        for slot in self._slots:
            module, name, before = slot
            buffer = module._buffers.get(name)
            if buffer is None or not buffer.is_floating_point():
                continue
            exact = next((exact for its, exact in self._exact if its is buffer), None)
            # By value: no version counter tells of a write through `.data`.
            unchanged = (
                exact is not None
                and exact.dtype == before
                and torch.equal(exact.to(buffer.dtype), buffer.detach())
            )
            yield slot, exact if unchanged and exact is not None else buffer.detach().to(before)
