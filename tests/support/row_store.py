"""A second store for tests: every parameter is cut by rows, as ``Shard(0)`` cuts it.

It shows that the engine knows no layout. A rank's segment of the exchanged buffer is its rows of
every parameter, each padded to the rows of the largest part. So the rows of a parameter lie apart
in the gathered buffer, and are copied out of it. For a single parameter, or one rank, the unsharded
parameters are views.

    two parameters, a [3, 2] and b [2], on two ranks:    a0 a0 a1 a1 b0 | a2 a2 -- -- b1"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Sequence

import torch
from torch import nn

from fsdp_compat._comm.mesh import Axis
from fsdp_compat._engine.ownership import OrigParam
from fsdp_compat._engine.state_store import StateStore
from fsdp_compat._engine.store import ModuleSlot, ShardedParam, as_unsharded_param
from fsdp_compat._layout.spec import FlatLayout, ParamSpec, Section
from fsdp_compat.errors import StateError

__all__ = ["RowStore"]


class _Rows(typing.NamedTuple):
    """How one parameter is cut: ``chunk`` rows per rank, as far as they go."""

    start: int  # in a segment
    num_rows: int
    row_shape: tuple[int, ...]
    chunk: int

    @property
    def row_numel(self) -> int:
        return math.prod(self.row_shape)

    @property
    def stop(self) -> int:
        return self.start + max(self.chunk * self.row_numel, 1)  # of an empty parameter: padding

    def of_rank(self, rank: int) -> int:
        return min(max(self.num_rows - rank * self.chunk, 0), self.chunk)

    def part(self, segment: torch.Tensor, rank: int) -> torch.Tensor:
        """segment: [S], of ``rank``. Return the rows in it."""
        rows = self.of_rank(rank)
        return segment[self.start : self.start + rows * self.row_numel].view(rows, *self.row_shape)


class RowStore(StateStore):
    """A group whose parameters are cut along dim 0. (A StateStore.)"""

    def __init__(self, members: Sequence[OrigParam], *, rank: int, ranks: int) -> None:
        originals = [member.parameter for member in members]
        self.orig_params, self.rank = tuple(member.place for member in members), rank
        self._num_ranks, self.parallel = ranks, [None] * len(members)
        self.dtype = originals[0].dtype
        self._shapes = [tuple(p.shape) for p in originals]
        self._trainable = [p.requires_grad for p in originals]
        self._rows: list[_Rows] = []
        end = 0
        for shape in self._shapes:
            num_rows, *row_shape = shape or (1,)  # a scalar is one row
            self._rows.append(_Rows(end, num_rows, tuple(row_shape), -(-num_rows // ranks)))
            end = self._rows[-1].stop
        self.numel = end
        self.shard = torch.zeros(self.numel, dtype=self.dtype)  # [S]
        for rows, original, own in zip(self._rows, originals, self.grads(self.shard), strict=True):
            first = rank * rows.chunk
            own.copy_(
                original.detach().reshape(rows.num_rows, *rows.row_shape)[first : first + len(own)]
            )
        self._sharded = [
            nn.Parameter(own, wanted)
            for own, wanted in zip(self.grads(self.shard), self._trainable, strict=True)
        ]
        self.sharded_params = [
            ShardedParam(parameter, (index,)) for index, parameter in enumerate(self._sharded)
        ]

    @property
    def tensor_parallel_axes(self) -> Sequence[Axis]:
        return ()

    def make_unsharded_params(self, full: torch.Tensor) -> list[nn.Parameter]:
        if self.params_view_output:
            homes = [
                full[rows.start : rows.start + math.prod(s)]
                for rows, s in zip(self._rows, self._shapes, strict=True)
            ]
        else:
            sizes = [math.prod(shape) for shape in self._shapes]
            homes = list(torch.empty(sum(sizes), dtype=full.dtype).split(sizes))
        return [
            as_unsharded_param(home.view(s), wanted)
            for home, s, wanted in zip(homes, self._shapes, self._trainable, strict=True)
        ]

    @property
    def params_view_output(self) -> bool:
        return self._num_ranks == 1 or len(self._rows) == 1

    def places(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        segments, padding = buffer.chunk(self._num_ranks), []
        for rank, segment in enumerate(segments):
            for rows in self._rows:
                padding.append(
                    segment[rows.start + rows.of_rank(rank) * rows.row_numel : rows.stop]
                )
            padding.append(segment[self._rows[-1].stop :])
        pieces = [
            [rows.part(segment, rank) for rank, segment in enumerate(segments)]
            for rows in self._rows
        ]
        return [_not_empty(views) for views in (*pieces, padding)]

    @property
    def pieces_are_whole(self) -> bool:
        return False

    def split(self, index: int, value: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = self._rows[index]
        value = value if value.dim() else value.view(1)
        return _not_empty(value.split(rows.chunk)) if rows.chunk else []

    def grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        return [rows.part(total, self.rank) for rows in self._rows]

    def shown(self, unsharded_params: Sequence[nn.Parameter] | None) -> list[ModuleSlot]:
        return [
            ModuleSlot(module, attribute, parameter)
            for member, parameter in zip(
                self.orig_params, unsharded_params or self._sharded, strict=True
            )
            for module, attribute in member.slots
        ]

    def is_intact(self) -> bool:
        return all(
            (parameter.data_ptr(), parameter.shape, parameter.dtype)
            == (own.data_ptr(), own.shape, own.dtype)
            for parameter, own in zip(self._sharded, self.grads(self.shard), strict=True)
        )

    def check(self, where: str) -> None:
        if not self.is_intact():
            raise StateError(f"{where}: a parameter no longer views its shard")

    # -- for state dicts

    @functools.cached_property
    def sections(self) -> Sequence[Section]:
        """One per parameter: rows are cut as one flat tensor with shards of whole rows would be."""
        return [
            Section(
                FlatLayout(
                    (ParamSpec(param.name, shape, 0),), self._num_ranks, rows.stop - rows.start
                ),
                rows.start,
                index,
            )
            for index, (param, shape, rows) in enumerate(
                zip(self.orig_params, self._shapes, self._rows, strict=True)
            )
        ]

    @property
    def is_flattened(self) -> bool:
        return False

    def section_of(self, index: int) -> Section:
        return self.sections[index]

    def sharded_shape(self, index: int, rank: int) -> tuple[int, ...]:
        rows = self._rows[index]
        return (rows.of_rank(rank), *rows.row_shape)

    def whole(self, full: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for shape, pieces in zip(self._shapes, self.places(full)[:-1], strict=True):
            found.append(torch.cat(pieces).view(shape) if pieces else full.new_empty(shape))
        return found

    def parameter(self, index: int, value: torch.Tensor, requires_grad: bool) -> nn.Parameter:
        return as_unsharded_param(value, requires_grad)


def _not_empty(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [view for view in views if view.numel()]
