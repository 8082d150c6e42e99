"""The segments of a buffer, one per rank."""

from __future__ import annotations

import typing
from collections.abc import Sequence

import torch


class Segments(Sequence[torch.Tensor]):
    """The views [S] of a buffer [ranks * S], by rank, made at the first access and kept.

    The gloo transport uses all of them at every step; a backend with collectives of its own uses
    one or two, and with 16,384 ranks the views of all ranks would take more memory than a shard.
    """

    __slots__ = ("_buffer", "_made", "_ranks", "_size")

    def __init__(self, buffer: torch.Tensor, ranks: int) -> None:
        self._buffer, self._ranks, self._size = buffer, ranks, buffer.numel() // ranks
        self._made: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self._ranks

    @typing.overload
    def __getitem__(self, rank: int) -> torch.Tensor: ...

    @typing.overload
    def __getitem__(self, rank: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, rank: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(self._ranks))]
        found = self._made.get(rank)
        if found is None:
            if not 0 <= rank < self._ranks:  # ends the iteration of Sequence
                raise IndexError(f"rank {rank} of {self._ranks}")
            found = self._made[rank] = self._buffer.narrow(0, rank * self._size, self._size)
        return found
