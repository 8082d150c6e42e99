"""What state dicts, optimizer state and checkpoints need of a store, beyond what training needs."""

from __future__ import annotations

import math
import typing
from collections.abc import Sequence

from torch import Tensor, nn

from .. import _torch_private
from .._comm.mesh import Axis
from .._layout.spec import FlatLayout, Interval, Section
from .dtypes import as_bytes
from .group import Group
from .ownership import ParamSlots
from .store import ModuleSlot, ParamKind, ParamStore
from .tensor_parallel import TensorParallel

FLAT_PARAM = "_flat_param"  # of a unit's first FlatParameter, in modules and local state dicts


def flat_param_name(number: int) -> str:
    """Return the name of a unit's ``number``-th flat parameter; the first has torch's name."""
    return FLAT_PARAM if number == 0 else f"{FLAT_PARAM}_{number}"


class StateStore(ParamStore, typing.Protocol):
    """A store whose state can be saved and loaded. Implementations define what has no body here.

    Parameters are identified by their *index* in ``orig_params``. Each rank holds one run of the
    row-major elements of a parameter, or one box if it is cut along another dim than the first;
    either is one run of the rank's shard. Each *section* is a run of the shard that one layout
    cuts: one in a store of flat parameters, else one for each."""

    orig_params: Sequence[ParamSlots]
    kinds: Sequence[ParamKind]  # per parameter
    parallel: Sequence[TensorParallel | None]  # per parameter: how it lies on a mesh of its own
    rank: int  # of the shard axis
    # True if one sharded parameter, a FlatParameter, holds the whole shard; False if each parameter
    # has a sharded parameter of its own.
    is_flattened: bool = False

    @property
    def sections(self) -> Sequence[Section]:
        """The sections, in the order of the shard and of the parameters."""

    def sharded_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """Return the shape on ``rank`` of the sharded parameter that holds parameter ``index``."""

    def grads(self, total: Tensor) -> Sequence[Tensor]:
        """total: [S]. Return, per sharded parameter, the view that can be its ``.grad``."""

    def whole(self, full: Tensor) -> Sequence[Tensor]:
        """full: [ranks * S]. Return the parameters in it, in their local shapes, as views if
        possible."""

    # -- what follows from these

    @property
    def tensor_parallel_axes(self) -> Sequence[Axis]:
        parallel = self.parallel[0]  # as all of the store
        return () if parallel is None else parallel.tensor_parallel_axes()

    def parameter(self, index: int, value: Tensor, requires_grad: bool) -> nn.Parameter:
        """Return a parameter over ``value``, like the user's parameter ``index``."""
        return self.kinds[index].parameter(value, requires_grad)

    def section_of(self, index: int) -> Section:
        """Return the section that parameter ``index`` belongs to."""
        return self.sections[min(index, len(self.sections) - 1)]

    def slots_with(self, params: Sequence[nn.Parameter | None]) -> list[ModuleSlot]:
        """params: one per parameter. Return the slots of modules with them."""
        return [
            ModuleSlot(*slot, param)
            for place, param in zip(self.orig_params, params, strict=True)
            for slot in place.slots
        ]

    @property
    def ranks(self) -> int:
        """The number of ranks that the parameters are cut over."""
        return self.sections[0].layout.ranks

    def cut(self, index: int) -> tuple[FlatLayout, int]:
        """Return the layout that cuts parameter ``index``, and the parameter's index in it."""
        section = self.section_of(index)
        return section.layout, index - section.first_param

    @property
    def has_blocks(self) -> bool:
        """True if cuts lie between blocks of some parameters."""
        return any(each.block > 1 for section in self.sections for each in section.layout.params)

    def is_cut_in_blocks(self, index: int) -> bool:
        """Whether parts of a parameter, or all of it, are whole blocks of the optimizer's."""
        layout, number = self.cut(index)
        is_part = self.section_of(index).offsets is not None or self.parallel[index] is not None
        in_blocks = layout.params[number].block > 0 or not layout.cuts(number)
        return in_blocks and not is_part and not self.is_flattened

    def local_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of what is cut: a parameter, or this process's part of a DTensor."""
        layout, number = self.cut(index)
        return layout.params[number].shape

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a parameter as the user's module had it."""
        parallel = self.parallel[index]
        return self.local_shape(index) if parallel is None else parallel.shape

    def part(self, index: int, rank: int) -> Interval:
        """Return which elements of a parameter ``rank`` holds."""
        layout, number = self.cut(index)
        return layout.part(number, rank)

    def part_in_shard(self, index: int) -> Interval:
        """Return where in this rank's shard its part of a parameter lies."""
        section = self.section_of(index)
        number, rank = index - section.first_param, section.rank(self.rank)
        return section.layout.part_in_shard(number, rank).shifted(section.start)

    def part_in_sharded_param(self, index: int) -> Interval:
        """Return where its part of a parameter lies in the sharded parameter that holds it."""
        part = self.part_in_shard(index)
        return part if self.is_flattened else part.shifted(-part.start)

    def local_part(self, index: int) -> Tensor:
        """Return this rank's part of a parameter, a 1-D view of the shard."""
        return self.shard.detach()[self.part_in_shard(index).slice]

    def has_part(self, indices: Sequence[int]) -> bool:
        """False if this rank has none of the parameters' elements, gradients and optimizer state. A
        FlatParameter that is all padding has them."""
        if self.is_flattened:
            return True
        shapes, parts = map(self.local_shape, indices), map(self.part_in_shard, indices)
        return not any(map(math.prod, shapes)) or any(parts)

    def copy_in(self, index: int, value: Tensor) -> bool:
        """Copy this rank's part of a parameter into the shard. value: the whole parameter, or the
        part, 1-D. Return False if it does not fit."""
        if (
            value.dtype != self.dtype
            or not _torch_private.is_plain(value)
            or value.is_meta
            or self.parallel[index] is not None
        ):
            return False
        own = self.local_part(index)
        if tuple(value.shape) == self.local_shape(index):
            value = value.detach().reshape(-1)[self.part(index, self.rank).slice]
        if value.shape != own.shape:
            return False
        own.copy_(value.detach())
        return True

    def rows_of_whole(self, index: int, whole: Tensor, rank: int | None = None) -> Tensor:
        """whole: of the local shape of parameter ``index``. Return the elements of ``rank``, by
        default this one; a view if it is contiguous."""
        part = self.part(index, self.rank if rank is None else rank)
        return whole.detach().reshape(-1)[part.slice]

    def take_from_whole(self, wholes: Sequence[Tensor], shard: Tensor | None = None) -> None:
        """Copy this rank's part of every whole parameter, in local shapes, into ``shard`` [S]."""
        shard = self.shard.detach() if shard is None else shard
        for index, whole in enumerate(wholes):
            source, target = self.rows_of_whole(index, whole), self.own_part(shard, index)
            if target.is_meta or not target.numel():
                continue
            if source.data_ptr() != target.data_ptr() or not source.is_contiguous():
                as_bytes(target).copy_(as_bytes(source))

    def own_part(self, buffer: Tensor, index: int) -> Tensor:
        """buffer: [S]. Return this rank's part of a parameter in it, as ``rows_of_whole``."""
        return buffer[self.part_in_shard(index).slice]


def store_of(group: Group) -> StateStore:
    """Return the store of a group of a registered unit."""
    return typing.cast(StateStore, group.store)
