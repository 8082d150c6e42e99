"""The whole model's state, one unit at a time: for files of any kind, and for models that fit no single process twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import nn

from .._checks import require_module
from .._state.names import wanted_by
from .._state_dicts import full_state

__all__ = ["iter_full_state_dict"]


def iter_full_state_dict(
    model: nn.Module, *, filter: Callable[[str], bool] | Literal["trainable"] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor on the CPU) of a model's parameters and persistent buffers, under the names before wrapping.

    model: a FullyShardedDataParallel, or a module around some. Unit by unit, the outer ones first, and within a unit in the model's
    order. A tied parameter comes under all its names, one after the other, with one tensor. Tensors are copies, and the caller's.
    filter: which to yield, a function of a name, or "trainable" for the parameters that require grad; only those are gathered.

    Collective: all ranks iterate in step, to the end or until they all stop at the same name. A rank holds one gathered unit and
    the tensor that was yielded last. Extra state, which is no tensor, is left out.
    """
    require_module(model, "iter_full_state_dict")
    return full_state(model, wanted_by(filter, "iter_full_state_dict"))
