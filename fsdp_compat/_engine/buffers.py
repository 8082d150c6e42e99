"""Buffers in the dtype of computation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["CastBuffers"]


@dataclasses.dataclass
class _Cast:
    """One buffer: the tensor that modules hold, and its values as they were before they were cast."""

    buffer: torch.Tensor
    exact: torch.Tensor
    version: int  # of the buffer when it was cast: the same as long as nobody has written to it


class CastBuffers:
    """The floating-point buffers of one unit's modules that are kept in another dtype than the user's model has them.

    The tensors stay the objects they are, so whoever shares one goes on sharing it. Exact values are kept beside: for evaluation in
    full precision and for state dicts, which do not lose by what is only a matter of computation.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """Cast the buffers of ``modules`` (of each alone, not of those in it) now, before the first forward."""
        self._dtype, self._form = dtype, 1
        buffers = {
            id(buffer): buffer
            for module in modules
            for _, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if buffer.is_floating_point()
        }
        self._casts = [_Cast(buffer, buffer.detach(), -1) for buffer in buffers.values()]
        self.follow(0)

    def follow(self, form: int) -> None:
        """form 0: the dtype of computation; 1: the dtypes they had, for evaluation in full precision and for loading."""
        if form == self._form:
            return
        self._form = form
        with torch.inference_mode(False), torch.no_grad():
            for cast in self._casts:
                if form == 1:
                    cast.buffer.data = self._exact(cast)
                else:
                    cast.exact = cast.buffer.data
                    cast.buffer.data = cast.exact.to(self._dtype)
                    cast.version = cast.buffer._version

    def _exact(self, cast: _Cast) -> torch.Tensor:
        """What the buffer holds, in the dtype it had."""
        if cast.buffer._version != cast.version:
            cast.exact.copy_(cast.buffer.detach())
            cast.version = cast.buffer._version
        return cast.exact

    def exact(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of a buffer as it is without the cast; None if it is not cast."""
        if self._form == 1:
            return None
        found = next((cast for cast in self._casts if cast.buffer is buffer), None)
        return None if found is None else self._exact(found).clone()
