"""The dtypes in which a unit computes and communicates."""

from __future__ import annotations

import dataclasses
import enum

import torch
from torch import Tensor


class ComputeDtype(enum.IntEnum):
    """Which of its two dtypes a unit computes in; also an index into lists."""

    TRAIN = 0  # Precision.gather
    EVAL = 1  # Precision.evaluate: modules in evaluation mode, with full precision in eval


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes that one group computes and communicates in."""

    gather: torch.dtype  # of the all-gather, and so of the computation
    reduce: torch.dtype  # of the reduce-scatter
    evaluate: torch.dtype | None = None  # instead of ``gather`` in evaluation mode; None: the same
    grad: torch.dtype | None = None  # of ``.grad``; None: the shard's

    def for_grads_of(self, parameter: Tensor) -> Precision:
        """Return these with gradients in the parameter's grad_dtype, if the user has set one. They
        are summed in it, too, unless the dtype of reductions was chosen."""
        dtype = parameter.grad_dtype
        if dtype in (None, parameter.dtype) or self.grad is not None:
            return self
        wide = torch.promote_types(self.reduce, dtype)
        reduce = wide if self.reduce is self.gather else self.reduce
        return dataclasses.replace(self, reduce=reduce, grad=dtype)


def is_packed(dtype: torch.dtype) -> bool:
    """True for the dtypes of packed formats, integers and 8-bit floats, which are never cast."""
    return not dtype.is_floating_point or dtype.itemsize == 1


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a uint8 view of a tensor of one-byte elements, so that copies keep every bit pattern,
    and any other tensor unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
