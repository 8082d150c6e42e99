"""The sharded parameters of a flat shard: one FlatParameter, or the user's own parameters as
views."""

from __future__ import annotations

import typing
from collections.abc import Sequence

import torch
from torch import nn

from .._engine.state_store import FLAT_PARAM
from .._engine.store import ShardedParam
from .._layout.spec import FlatLayout, between
from ..errors import StateError


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


class Registration(typing.Protocol):
    """How a shard [S] is shown: as one FlatParameter, or as one 1-D parameter per
    original."""

    sharded_params: list[ShardedParam]

    def grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        """total: [S]. Return one view per sharded parameter."""

    def repair(self, shard: torch.Tensor, where: str) -> None:
        """Let sharded parameters that were given other memory view the shard again, with the values
        they have now. Raises StateError for one that does not fit."""


class FlatRegistration:
    """use_orig_params=False: the optimizer sees one FlatParameter; the originals are absent while
    sharded. (A Registration.)"""

    def __init__(self, parameter: nn.Parameter, layout: FlatLayout, rank: int) -> None:
        """parameter: a FlatParameter that views the shard; pickle restores it as an
        nn.Parameter."""
        parameter.__class__ = FlatParameter
        self._parameter = typing.cast(FlatParameter, parameter)
        self._parameter.describe(layout, rank)
        self.sharded_params = [ShardedParam(parameter, range(len(layout.params)))]

    def grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        return [total]

    def repair(self, shard: torch.Tensor, where: str) -> None:
        _adopt(self._parameter, self._parameter.data, shard, f"{where}, {FLAT_PARAM}")


class OriginalRegistration:
    """use_orig_params=True: the user's own Parameter objects stay, as views of the shard. (A
    Registration.)

    With several ranks a view is 1-D, this rank's part of the parameter, empty where it has none;
    with one rank it has the parameter's shape.
    """

    def __init__(
        self, originals: Sequence[nn.Parameter], layout: FlatLayout, rank: int, shard: torch.Tensor
    ) -> None:
        self._layout, self._rank = layout, rank
        parts = [layout.part_in_shard(index, rank) for index in range(len(layout.params))]
        pieces = [*parts, *between(sorted(filter(None, parts)), layout.shard_numel)]
        order = sorted(range(len(pieces)), key=pieces.__getitem__)
        self._sizes = [pieces[index].numel for index in order]
        self._numbers = sorted(range(len(order)), key=order.__getitem__)[: len(parts)]
        self._shapes = [param.shape for param in layout.params] if layout.ranks == 1 else None
        self.sharded_params = [
            ShardedParam(parameter, (index,)) for index, parameter in enumerate(originals)
        ]
        for parameter, view in zip(originals, self.grads(shard), strict=True):
            parameter.grad = None  # its shape no longer fits; the store keeps its values
            parameter.data = view

    def grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        pieces = total.split_with_sizes(self._sizes)  # in one call
        parts = [pieces[number] for number in self._numbers]
        if self._shapes is not None:
            parts = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return parts

    def repair(self, shard: torch.Tensor, where: str) -> None:
        for (parameter, (index,)), view in zip(self.sharded_params, self.grads(shard), strict=True):
            data, param = parameter.data, self._layout.params[index]
            if data.shape == param.shape != view.shape:  # the user set the whole parameter
                data = data.reshape(-1)[self._layout.part(index, self._rank).slice]
            _adopt(parameter, data, view, f"{where}, parameter {param.name!r}")


def _adopt(parameter: nn.Parameter, data: torch.Tensor, view: torch.Tensor, where: str) -> None:
    """Copy what the user gave ``parameter`` (by ``.data =``, ``.to()``), or this rank's part
    ``data`` of it, into the shard, and make the parameter a view of the shard again."""
    if data.dtype != view.dtype or data.device != view.device or data.numel() != view.numel():
        raise StateError.of(
            "A sharded parameter no longer fits its shard.",
            expected=f"{view.numel()} elements of {view.dtype} on {view.device}",
            got=f"{data.numel()} elements of {data.dtype} on {data.device}",
            where=where,
            fix="convert and move the model before it is wrapped; for computing in another "
            "dtype pass mixed_precision=",
        )
    with torch.no_grad():
        if data.data_ptr() != view.data_ptr():
            view.copy_(data.reshape(view.shape))
        parameter.data = view
