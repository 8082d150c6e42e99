"""Where this rank's part of a parameter lies in a checkpoint that any number of ranks wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from .._engine.state_store import store_of
from .._layout.pieces import Piece, Rows, common_rows
from .._layout.spec import Interval
from ._manifest import FlatGroup, SavedParameter
from ._named_groups import NamedGroup
from ._rank_files import RankFiles


@dataclasses.dataclass(frozen=True)
class OwnPart:
    """What this rank is to get of one parameter."""

    piece: Piece  # what its group shards: all of the parameter, or a tensor-parallel part
    part: Interval  # of the row-major elements of the piece
    rank: int = 0  # of the ranks that share the piece
    ranks: int = 1
    # It has optimizer states also where the part is empty: in a FlatParameter or a DTensor.
    always_has_states: bool = False

    @staticmethod
    def of(named: NamedGroup, index: int) -> OwnPart:
        store = store_of(named.group)
        return OwnPart(
            named.piece(index),
            store.part(index, store.rank),
            store.rank,
            store.ranks,
            store.is_flattened or not store.is_guarded,
        )

    @staticmethod
    def of_whole(shape: tuple[int, ...]) -> OwnPart:
        piece = Piece.of_whole(shape)
        return OwnPart(piece, Interval(0, piece.numel))


@dataclasses.dataclass(frozen=True)
class SourceRun:
    """Rows of a tensor in one file, as parts of this rank's part."""

    file: int
    rows: Rows


@dataclasses.dataclass(frozen=True)
class PieceSource:
    """What one group of the checkpoint has of this rank's part of a parameter."""

    group: FlatGroup
    index: int  # of the parameter in the group
    runs: tuple[SourceRun, ...]
    head_file: int  # the file whose head says which states and scalars the parameter has

    def request(
        self, files: RankFiles, name: str, dtype: torch.dtype, target: torch.Tensor
    ) -> None:
        """Request the part of the tensors called ``name``. target: 1-D, of the part's length."""
        for run in self.runs:
            files.request_rows(run.file, name, dtype, run.rows, target)


@dataclasses.dataclass(frozen=True)
class PartSource:
    """Where the groups of a checkpoint have this rank's part of one parameter."""

    pieces: tuple[PieceSource, ...]  # at least one; disjoint
    is_alike: bool  # the rank's piece was saved as one piece

    @staticmethod
    def find(files: RankFiles, saved: SavedParameter, own: OwnPart) -> PartSource:
        """saved: of the shape of the rank's whole parameter."""
        alike = [place for place in saved.places if _is_same(place[0].piece(place[1]), own.piece)]
        found = [_piece_source(files, place, own) for place in alike[:1] or saved.places]
        found = [each for each in found if each.runs] or found[:1]
        return PartSource(tuple(found), bool(alike))

    def request(self, files: RankFiles, target: torch.Tensor) -> None:
        """Request the part of the parameter. target: 1-D, of the part's length."""
        for piece in self.pieces:
            piece.request(files, piece.group.name, piece.group.dtype, target)


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """This rank's part of a parameter that the checkpoint holds as one whole tensor."""

    name: str  # of the parameter, as the checkpoint has it
    file: int
    tensor: str  # its name in the file
    dtype: torch.dtype
    rows: tuple[Rows, ...]

    @staticmethod
    def find(file: int, name: str, tensor: str, dtype: torch.dtype, own: OwnPart) -> TensorSource:
        whole = Piece.of_whole(own.piece.whole_shape)
        return TensorSource(
            name, file, tensor, dtype, tuple(common_rows(own.piece, own.part, whole))
        )

    def request(self, files: RankFiles, target: torch.Tensor) -> None:
        """Request the part of the parameter. target: 1-D, of the part's length."""
        self.request_from(files, self.tensor, self.dtype, target)

    def request_from(
        self, files: RankFiles, tensor: str, dtype: torch.dtype, target: torch.Tensor
    ) -> None:
        """Request the part of another tensor of the parameter's shape."""
        for rows in self.rows:
            files.request_rows(self.file, tensor, dtype, rows, target)


def _is_same(one: Piece, other: Piece) -> bool:
    return (one.offsets, one.shape) == (other.offsets, other.shape)


def _piece_source(files: RankFiles, place: tuple[FlatGroup, int], own: OwnPart) -> PieceSource:
    group, index = place
    axis, layout, piece = files.manifest.axes[group.axis], group.layout, group.piece(index)
    runs = tuple(_runs(group, index, axis, common_rows(own.piece, own.part, piece)))
    head_file = runs[0].file if runs else axis[own.rank * len(axis) // own.ranks]
    if not runs and own.always_has_states and layout.params[index].numel:
        # A rank that had no part may have saved no states; the one with the first row has.
        other = axis[layout.params[index].start // layout.shard_numel]
        if not files.head(head_file).has_states(group.name, index) and files.is_here(other):
            head_file = other
    return PieceSource(group, index, runs, head_file)


def _runs(
    group: FlatGroup, index: int, axis: tuple[int, ...], found: Iterator[Rows]
) -> Iterator[SourceRun]:
    """Yield the rows of a parameter of a group, cut where a shard ends."""
    start, size = group.layout.params[index].start, group.layout.shard_numel
    for rows in found:
        in_flat = rows.shifted(start)
        last = in_flat.start + in_flat.span - 1
        for rank in range(in_flat.start // size, last // size + 1):
            for within in in_flat.within(group.layout.interval(rank)):
                yield SourceRun(axis[rank], within.shifted(-rank * size))
