"""The one sharded parameter of a flat shard, with use_orig_params=False."""

from __future__ import annotations

import typing

import torch
from torch import nn

from .._layout.spec import FlatLayout


class ShardParamInfo(typing.NamedTuple):
    """Where this rank's elements of one parameter lie, with the field names that clients read. All
    but ``in_shard`` are None if the rank holds none."""

    in_shard: bool
    offset_in_shard: int | None = None
    numel_in_shard: int | None = None
    intra_param_start_idx: int | None = None  # in the flattened parameter
    intra_param_end_idx: int | None = None  # inclusive


class FlatParameter(nn.Parameter):
    """One rank's shard of a flat group, as the optimizer sees it: 1-D, padded, never changing its
    memory."""

    _fsdp_flattened = _is_flat_param = True  # clients recognise a FlatParameter by them
    _layout: FlatLayout
    _rank: int

    def describe(self, layout: FlatLayout, rank: int) -> None:
        """Say what it holds: the shard of ``rank``."""
        self._layout, self._rank = layout, rank

    @property
    def _fqns(self) -> tuple[str, ...]:
        return self._layout.names

    @property
    def _shapes(self) -> tuple[torch.Size, ...]:
        return tuple(torch.Size(param.shape) for param in self._layout.params)

    @property
    def _numels(self) -> tuple[int, ...]:
        return tuple(param.numel for param in self._layout.params)

    @property
    def _shard_param_infos(self) -> tuple[ShardParamInfo, ...]:
        infos = []
        for index in range(len(self._layout.params)):
            part = self._layout.part(index, self._rank)
            start = self._layout.part_in_shard(index, self._rank).start
            infos.append(
                ShardParamInfo(True, start, part.numel, part.start, part.stop - 1)
                if part
                else ShardParamInfo(False)
            )
        return tuple(infos)

    @property
    def _local_shard(self) -> torch.Tensor:
        """A second tensor over the same memory, for clients that compare it with the parameter or
        set it. It stays the same object as long as the memory does."""
        kept = self.__dict__.get("_kept_shard")
        if kept is None or kept.data_ptr() != self.data_ptr() or kept.dtype != self.dtype:
            kept = self.__dict__["_kept_shard"] = self.data
        return kept

    @_local_shard.setter
    def _local_shard(self, tensor: torch.Tensor) -> None:
        self.__dict__["_kept_shard"] = tensor
