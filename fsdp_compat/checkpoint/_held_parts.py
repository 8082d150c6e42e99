"""What this rank holds of each of a model's tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from .._engine.state_store import store_of
from .._layout.box import Box, cut_into_boxes
from .._layout.pieces import Piece
from .._layout.spec import Interval
from .._state.unmanaged import unmanaged_state
from ._named_groups import NamedGroup
from ._tools.archive import moved
from ._tools.native_reading import OwnPart


@dataclasses.dataclass(frozen=True)
class HeldPart:
    """The elements of one tensor that this rank holds: a run of a piece, in row-major order."""

    names: tuple[str, ...]  # of the tensor in the model
    dtype: torch.dtype
    piece: Piece  # all of the tensor, or a tensor-parallel part
    part: Interval  # of the piece
    values: torch.Tensor  # 1-D: a view of the elements in place
    is_written_here: bool  # this rank is the one that writes them
    place: tuple[NamedGroup, int] | None = None  # the index in its group; None: unmanaged

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.piece.whole_shape

    def boxes(self, values: torch.Tensor | None = None) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the boxes of the whole tensor that the elements make up, each with a view of its
        values. values: in the place of the tensor's own, such as those of a state."""
        values, start = self.values if values is None else values, 0
        for box in cut_into_boxes(self.piece.shape, self.part):
            own = values[start : start + box.numel].view(box.sizes)
            yield moved(box, self.piece.offsets), own
            start += box.numel

    def own_part(self) -> OwnPart:
        boxes = tuple(box for box, _ in self.boxes())
        if self.place is None:
            return OwnPart(self.piece, boxes)
        named, index = self.place
        store = store_of(named.group)
        return OwnPart(
            self.piece,
            boxes,
            store.rank,
            store.ranks,
            store.cut(index),
            store.is_flattened,
            always_has_states=store.is_flattened or not store.is_guarded,
        )


def managed_parts(groups: Sequence[NamedGroup]) -> Iterator[HeldPart]:
    """Yield this rank's part of every parameter of ``groups``; it may be empty."""
    for named in groups:
        store = store_of(named.group)
        for index in named.params:
            part = store.part(index, store.rank)
            # Every rank may hold the one element of a 0-d parameter.
            is_first = store.rank == 0 or part != store.part(index, 0)
            yield HeldPart(
                named.names(index),
                store.dtype,
                named.piece(index),
                part,
                store.local_part(index),
                named.is_written_here and is_first,
                (named, index),
            )


def unmanaged_tensors(model: nn.Module, is_written_here: bool) -> Iterator[HeldPart]:
    """Yield buffers and unmanaged parameters, which every rank holds whole; a shared tensor once,
    under all its names."""
    names: dict[tuple[object, ...], list[str]] = {}
    values: dict[str, torch.Tensor] = {}
    for name, value in unmanaged_state(model).items():
        if isinstance(value, torch.Tensor):
            memory = value.data_ptr() or name, tuple(value.shape), value.stride(), value.dtype
            names.setdefault(memory, []).append(name)
            values[name] = value.detach()
    for shared in names.values():
        value = values[shared[0]]
        yield of_whole(tuple(shared), value, is_written_here)


def of_whole(
    names: tuple[str, ...], value: torch.Tensor, is_written_here: bool = False
) -> HeldPart:
    """Return a tensor that every rank holds whole."""
    part, piece = Interval(0, value.numel()), Piece.of_whole(tuple(value.shape))
    return HeldPart(names, value.dtype, piece, part, value.reshape(-1), is_written_here)
