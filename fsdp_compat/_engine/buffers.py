"""Buffers in the dtype of computation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["CastBuffers"]


class CastBuffers:
    """The floating-point buffers of one unit's modules that are kept in another dtype than the user's model has them."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """Cast the buffers of ``modules`` (of each alone, not of those in it) now, before the first forward."""
        self._dtype, self._form = dtype, 1
        self._originals = [  # (module, name, dtype before)
            (module, name, buffer.dtype)
            for module in modules
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        self.follow(0)

    def follow(self, form: int) -> None:
        """form 0: the dtype of computation; 1: the dtypes they had, for evaluation in full precision."""
        if form == self._form:
            return
        self._form = form
        for module, name, before in self._originals:
            buffer = getattr(module, name)
            wanted = self._dtype if form == 0 else before
            if isinstance(buffer, torch.Tensor) and buffer.dtype != wanted:
                setattr(module, name, buffer.to(wanted))

    def dtypes_before(self) -> dict[tuple[int, str], torch.dtype]:
        """By (id of the module, name): what state dicts hold them in."""
        return {(id(module), name): before for module, name, before in self._originals}
