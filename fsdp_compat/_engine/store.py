"""The seam between the engine and a layout: what a store answers, and nothing that it does."""

from __future__ import annotations

import typing
from collections.abc import Sequence

import torch
from torch import nn

from .._comm.mesh import Axis

__all__ = ["Kind", "ParamStore", "ModuleSlot", "ShardedParam", "as_unsharded_param"]


class ShardedParam(typing.NamedTuple):
    """A parameter as the optimizer sees it, and the indices of the leaves that it holds a part
    of."""

    parameter: nn.Parameter
    unsharded_params: Sequence[int]


class ModuleSlot(typing.NamedTuple):
    """What a module shows under a name; None: the attribute is absent."""

    module: nn.Module
    attribute: str
    parameter: nn.Parameter | None


class ParamStore(typing.Protocol):
    """Where each element of a group lies, and what modules and the optimizer see of it.

    It sends, allocates, frees, copies and adds nothing while training: it answers with views, which
    the engine asks for once per buffer and keeps. Exchanged buffers are 1-D ``[ranks * S]``,
    rank-major: segment r is what rank r holds. A *leaf* is one whole parameter as the modules show
    it while the unit is full. The store owns the shard ``[S]``, for ever.
    """

    numel: int  # S, the same on every rank
    dtype: torch.dtype  # of the shard; gathers and reductions may use others
    shard: torch.Tensor  # [S], what this rank holds: a gather sends it, cast where it is to
    # What the optimizer sees; leaves follow the requires_grad of their target.
    sharded_params: Sequence[ShardedParam]

    @property
    def tensor_parallel_axes(self) -> Sequence[Axis]:
        """Further axes that every leaf is split over: tensor parallelism. A norm adds up over them
        too."""

    def make_unsharded_params(self, full: torch.Tensor) -> list[nn.Parameter]:
        """Once per dtype computed in. full: [ranks * S]. The leaves either all view ``full``, or
        all have other storages, which the engine fills."""

    def places(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        """buffer: [ranks * S]. Return per leaf the views that together hold it, and one last list:
        what belongs to no leaf.

        They cover the buffer and do not overlap.
        """

    @property
    def pieces_are_whole(self) -> bool:
        """True if every leaf has one place, in its shape, and ``split`` returns what it is
        given."""

    def split(self, index: int, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """value: of leaf ``index``'s shape, any strides. Return views of it in the shapes of
        ``places(...)[index]``."""

    def grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        """total: [S]. Return per target the view of it that can be its ``.grad``."""

    def shown(self, unsharded_params: Sequence[nn.Parameter] | None) -> list[ModuleSlot]:
        """Return what the modules show: the leaves, or with None the sharded form. Both have the
        same slots in the same order."""

    def stands(self) -> bool:
        """True if no target has been moved away from the shard."""

    def check(self, where: str) -> None:
        """Put right, or refuse with a StateError, targets that somebody replaced or moved away from
        the shard."""


class Kind(typing.NamedTuple):
    """What a parameter is beside its values: its class, and the attributes somebody has set on
    it."""

    cls: type[nn.Parameter]
    attributes: dict[str, typing.Any]


PLAIN = Kind(nn.Parameter, {})


def as_unsharded_param(view: torch.Tensor, requires_grad: bool, kind: Kind = PLAIN) -> nn.Parameter:
    """Return a Parameter over a view, with a version counter of its own. It shares the attributes
    of ``kind``.

    A plain ``nn.Parameter(view)`` would share its base's counter (an in-place change of an
    activation then looks like one of the weights), and autocast would cache its cast across
    gathers.
    """
    unsharded_param = view.data.requires_grad_(requires_grad)
    unsharded_param.__class__ = kind.cls
    if kind is not PLAIN:
        unsharded_param.__dict__ = kind.attributes
    return typing.cast(nn.Parameter, unsharded_param)
