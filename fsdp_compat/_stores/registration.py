"""The sharded parameters of a flat shard: one FlatParameter, or the user's own parameters as
views."""

from __future__ import annotations

import operator
import typing
from collections.abc import Sequence

import torch
from torch import nn

from .._engine.state_store import FLAT_PARAM
from .._engine.store import ModuleSlot, ShardedParam
from .._layout.spec import FlatLayout
from ..errors import StateError, explain

__all__ = [
    "FLAT_PARAM",
    "FlatParameter",
    "FlatRegistration",
    "OriginalRegistration",
    "Registration",
    "ShardParamInfo",
]


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

    @property
    def sharded_params(self) -> Sequence[ShardedParam]: ...

    def shown_sharded(self) -> list[ModuleSlot]:
        """Return the slots as modules show them while the unit is sharded."""

    def hidden_while_unsharded(self) -> list[ModuleSlot]:
        """Return the slots that are hidden while modules show the unsharded parameters."""

    def grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        """total: [S]. Return one view per sharded parameter."""

    def is_intact(self) -> bool:
        """True if no sharded parameter has been given other memory."""

    def check(self, shard: torch.Tensor, where: str) -> None:
        """Repair sharded parameters that no longer view the shard, or raise StateError."""


class FlatRegistration:
    """use_orig_params=False: the optimizer sees one FlatParameter; the originals are absent while
    sharded."""

    def __init__(
        self,
        shard: torch.Tensor,
        layout: FlatLayout,
        rank: int,
        slots: Sequence[tuple[nn.Module, str]],
        home: tuple[nn.Module, str],
        trainable: bool,
        parameter: nn.Parameter | None = None,
    ) -> None:
        """slots: of all parameters, in order. home: (module, attribute) where the FlatParameter is
        registered. parameter: an existing FlatParameter that views the shard; pickle restores it as
        an nn.Parameter."""
        if parameter is None:
            # .data: its version counter counts the user's writes, not those of the engine
            parameter = FlatParameter(shard.data, requires_grad=trainable)
        parameter.__class__ = FlatParameter
        self.parameter = typing.cast(FlatParameter, parameter)
        self.parameter.describe(layout, rank)
        self.sharded_params = [ShardedParam(self.parameter, range(len(layout.params)))]
        self._slots, self._home, self._places = list(slots), home, _places_of([self.parameter])

    def shown_sharded(self) -> list[ModuleSlot]:
        return [ModuleSlot(module, name, None) for module, name in self._slots] + [
            ModuleSlot(*self._home, self.parameter)
        ]

    def hidden_while_unsharded(self) -> list[ModuleSlot]:
        return [ModuleSlot(*self._home, None)]

    def grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        return [total]

    def is_intact(self) -> bool:
        return _places_of([self.parameter]) == self._places

    def check(self, shard: torch.Tensor, where: str) -> None:
        if not self.is_intact():
            _adopt(self.parameter, shard, f"{where}, {FLAT_PARAM}")


class OriginalRegistration:
    """use_orig_params=True: the user's own Parameter objects stay, as views of the shard.

    With several ranks a view is 1-D, this rank's part of the parameter, empty where it has none;
    with one rank it has the parameter's shape.
    """

    def __init__(
        self,
        shard: torch.Tensor,
        layout: FlatLayout,
        rank: int,
        originals: Sequence[nn.Parameter],
        slots: Sequence[Sequence[tuple[nn.Module, str]]],
    ) -> None:
        """slots: per original."""
        self._sizes, self._numbers = _cuts(
            [layout.part_in_shard(index, rank).slice for index in range(len(layout.params))]
        )
        self._sizes.append(shard.numel() - sum(self._sizes))
        self._shapes = [param.shape for param in layout.params] if layout.ranks == 1 else None
        self._names, self._layout, self._rank = layout.names, layout, rank
        self.sharded_params = [
            ShardedParam(parameter, (index,)) for index, parameter in enumerate(originals)
        ]
        self._shown = [
            ModuleSlot(module, name, parameter)
            for parameter, param_slots in zip(originals, slots, strict=True)
            for module, name in param_slots
        ]
        for parameter, view in zip(originals, self.grads(shard), strict=True):
            parameter.grad = None  # its shape no longer fits; the store keeps its values
            parameter.data = view
        self._parameters, self._places = list(originals), _places_of(originals)

    def shown_sharded(self) -> list[ModuleSlot]:
        return self._shown

    def hidden_while_unsharded(self) -> list[ModuleSlot]:
        return []

    def grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        pieces = total.split_with_sizes(self._sizes)  # in one call
        parts = [pieces[number] for number in self._numbers]
        if self._shapes is not None:
            parts = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return parts

    def is_intact(self) -> bool:
        return _places_of(self._parameters) == self._places

    def check(self, shard: torch.Tensor, where: str) -> None:
        if self.is_intact():
            return
        for index, (parameter, view) in enumerate(
            zip(self._parameters, self.grads(shard), strict=True)
        ):
            if _places_of([parameter]) != _places_of([view]):
                # The user set the whole parameter: keep this rank's part.
                if parameter.shape == self._layout.params[index].shape != view.shape:
                    parameter.data = parameter.data.reshape(-1)[
                        self._layout.part(index, self._rank).slice
                    ]
                _adopt(parameter, view, f"{where}, parameter {self._names[index]!r}")


def _cuts(parts: Sequence[slice]) -> tuple[list[int], list[int]]:
    """parts: disjoint and in order, except for empty ones, which may be anywhere. Return the sizes
    of all pieces (parts and gaps) up to the end of the last part, and the number of the piece that
    each part is."""
    sizes: list[int] = []
    numbers, end = [], 0
    for part in parts:
        if part.start < part.stop:
            assert part.start >= end, "parts overlap, or are in another order"
            if part.start > end:
                sizes.append(part.start - end)
            end = part.stop
        numbers.append(len(sizes))
        sizes.append(part.stop - part.start)
    return sizes, numbers


_Places = tuple[list[int], list[int], list[torch.dtype]]
_dtype = operator.attrgetter("dtype")


def _places_of(tensors: Sequence[torch.Tensor]) -> _Places:
    """Return addresses, numbers of elements and dtypes, which change if a parameter is given other
    memory."""
    return (
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.numel, tensors)),
        list(map(_dtype, tensors)),
    )


def _adopt(parameter: nn.Parameter, view: torch.Tensor, where: str) -> None:
    """Copy values that the user gave ``parameter`` (by ``.data =``, ``.to()``) into the shard, and
    make the parameter a view of the shard again."""
    data = parameter.data
    if data.data_ptr() == view.data_ptr() and data.dtype == view.dtype and data.shape == view.shape:
        return
    if data.dtype != view.dtype or data.device != view.device or data.numel() != view.numel():
        raise StateError(
            explain(
                "A sharded parameter no longer fits its shard.",
                expected=f"{view.numel()} elements of {view.dtype} on {view.device}",
                got=f"{data.numel()} elements of {data.dtype} on {data.device}",
                where=where,
                fix="convert and move the model before it is wrapped; for computing in another "
                "dtype pass mixed_precision=",
            )
        )
    with torch.no_grad():
        view.copy_(data.reshape(view.shape))
        parameter.data = view
