"""How a parameter lies on a device mesh of its own, read from the parameter."""

from __future__ import annotations

import torch

from .. import _torch_private
from .._engine.tensor_parallel import TensorParallel

__all__ = ["TensorParallel", "tensor_parallel"]


def tensor_parallel(parameter: torch.Tensor) -> TensorParallel | None:
    """Return how a parameter lies on its mesh; None for a plain one."""
    if _torch_private.is_plain(parameter):
        return None
    return TensorParallel(
        parameter.device_mesh,  # type: ignore[attr-defined]
        tuple(parameter.placements),  # type: ignore[attr-defined]
        tuple(parameter.shape),
        tuple(parameter.stride()),
    )
