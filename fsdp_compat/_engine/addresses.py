"""Whether tensors have been given other memory, as by ``.data =`` or ``.to()``."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from .. import _torch_private
from .._torch_private import dtensor as torch_dtensor

_dtype = operator.attrgetter("dtype")


class Addresses:
    """Where tensors lay in memory at the last ``note``; of DTensors, the parts of this process. The
    comparison is a few calls of C functions for all of them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors, is_dtensor = list(tensors), _torch_private.is_dtensor
        self._plain = [tensor for tensor in tensors if not is_dtensor(tensor)]
        self._dtensors = list(filter(is_dtensor, tensors))
        self.note()

    def note(self) -> None:
        """Compare with the present memory from now on."""
        self._noted = self._present()

    def changed(self) -> bool:
        """True if a tensor has other memory, or another size or dtype, than at the last note."""
        return self._present() != self._noted

    def _present(self) -> tuple[Sequence[object], ...]:
        tensors = self._plain
        if self._dtensors:
            tensors = tensors + torch_dtensor.local_parts(self._dtensors)
        return (
            list(map(torch.Tensor.data_ptr, tensors)),
            list(map(torch.Tensor.numel, tensors)),
            list(map(_dtype, tensors)),
        )
