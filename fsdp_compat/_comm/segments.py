"""The parts of a buffer, one per rank."""

from __future__ import annotations

import typing
from collections.abc import Sequence

import torch

__all__ = ["Segments"]


class Segments(Sequence[torch.Tensor]):
    """The views [S] of a buffer [ranks * S], by rank. Each is made when it is first asked for, and
    kept.

    Who sends to single ranks asks for all of them, step after step; a backend with collectives of
    its own asks for one or two, and with 16,384 ranks the views of all take more memory than a
    shard.
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
            if not 0 <= rank < self._ranks:  # Sequence's iteration ends here
                raise IndexError(f"rank {rank} of {self._ranks}")
            found = self._made[rank] = self._buffer.narrow(0, rank * self._size, self._size)
        return found
