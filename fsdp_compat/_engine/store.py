"""The seam between the engine and a layout: what a store answers, and nothing that it does."""

from __future__ import annotations

import typing
from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["ParamStore", "Shown", "Target", "as_leaf"]


class Target(typing.NamedTuple):
    """A parameter as the optimizer sees it, and the indices of the leaves that it holds a part of."""

    parameter: nn.Parameter
    leaves: Sequence[int]


class Shown(typing.NamedTuple):
    """What a module shows under a name; None: the attribute is absent."""

    module: nn.Module
    attribute: str
    parameter: nn.Parameter | None


class ParamStore(typing.Protocol):
    """Where each element of a group lies, and what modules and the optimizer see of it.

    It sends, allocates, frees, copies and adds nothing while training: it answers with views, which the engine asks for once per
    buffer and keeps. Exchanged buffers are 1-D ``[ranks * S]``, rank-major: segment r is what rank r holds. A *leaf* is one whole
    parameter as the modules show it while the unit is full. The store owns the shard ``[S]``, for ever.
    """

    numel: int  # S, the same on every rank
    dtype: torch.dtype  # of the shard; gathers and reductions may use others

    @property
    def targets(self) -> Sequence[Target]:
        """What the optimizer sees; leaves follow the requires_grad of their target."""

    def outgoing(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [S], what this rank sends in a gather: the shard itself if ``dtype`` is its own, else a cast of it."""

    def make_leaves(self, full: torch.Tensor) -> list[nn.Parameter]:
        """Once. full: [ranks * S]. The leaves either all view ``full``, or all have other storages, which the engine fills."""

    def places(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        """buffer: [ranks * S]. Return per leaf the views that together hold it, and one last list: what belongs to no leaf.

        They cover the buffer and do not overlap.
        """

    def split(self, index: int, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """value: of leaf ``index``'s shape, any strides. Return views of it in the shapes of ``places(...)[index]``."""

    def grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        """total: [S]. Return per target the view of it that can be its ``.grad``."""

    def shown(self, full: bool) -> list[Shown]:
        """Return what the modules show, full or sharded."""

    def check(self, where: str) -> None:
        """Put right, or refuse with a StateError, targets that somebody replaced or moved away from the shard."""


def as_leaf(view: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Return a Parameter over a view, with a version counter of its own.

    A plain ``nn.Parameter(view)`` would share its base's counter (an in-place change of an activation then looks like one of the
    weights), and autocast would cache its cast across gathers.
    """
    leaf = view.data.requires_grad_(requires_grad)
    leaf.__class__ = nn.Parameter
    return typing.cast(nn.Parameter, leaf)
