"""Where the parameters of a flat store lie in its shards, which are cut anywhere, or between the
blocks that users ask for."""

from __future__ import annotations

import dataclasses
import math
import mmap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from .. import _torch_private
from .._comm.host_memory import in_whole_pages, is_in_pages
from .._engine.ownership import OrigParam
from .._layout.block_cuts import Blocks, smallest
from .._layout.spec import FlatLayout, ParamSpec, aligned, flat_layout
from ..errors import UsageError, wrong_type

ALIGN_NBYTES = 16  # every parameter and every shard starts at a multiple of it
_WARN_FROM = 0.25  # of padding


@dataclasses.dataclass(frozen=True)
class ShardBlocks:
    """Which elements of a parameter stay together on one rank, for any number of ranks.

    Optimizers that keep statistics of blocks or rows then step shards as they step whole
    parameters. The padding that this takes is at most ``max_padding``.

    Attributes:
        size: the number of consecutive elements, counted from the parameter's first one, in a
            block; or a function that returns it for a parameter's name before wrapping and the
            parameter. ``parameter.numel()`` keeps it on one rank.
        least_part: the least number of elements in each part of a parameter, or it stays on one
            rank. Default 1.
        max_padding: how much larger than without blocks a shard may become; 1.0, the default: twice
            as large. Above 0.25 there is a warning."""

    size: int | Callable[[str, nn.Parameter], int]
    least_part: int = 1
    max_padding: float = 1.0


def shard_blocks_of(given: Any, where: str) -> ShardBlocks | None:
    """Return the argument ``shard_blocks``. Raises UsageError for anything that it cannot be."""
    blocks = given if isinstance(given, ShardBlocks) or given is None else ShardBlocks(given)
    if blocks is None:
        return None
    if not callable(blocks.size):
        _require_number("shard_blocks", blocks.size, where)
    _require_number("ShardBlocks.least_part", blocks.least_part, where)
    most = blocks.max_padding
    if not isinstance(most, (int, float)) or isinstance(most, bool) or not most >= 0:
        raise wrong_type("ShardBlocks.max_padding", "a number, 0 or more", most, where)
    return blocks


def _require_number(name: str, given: Any, where: str) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise wrong_type(name, "a number of elements, 1 or more", given, where)


@dataclasses.dataclass(frozen=True)
class UnitBlocks:
    """The blocks of a unit's parameters, by their names in it."""

    of: Mapping[str, Blocks]
    max_padding: float
    where: str  # the unit, for errors

    @staticmethod
    def asked_for(
        given: ShardBlocks,
        params: Iterable[OrigParam],
        in_model: Mapping[nn.Parameter, str],
        where: str,
    ) -> UnitBlocks:
        """in_model: names in the model. Raises UsageError for what a function should not return."""
        found = dict[str, Blocks]()
        for name, parameter in ((each.name, each.parameter) for each in params):
            size: Any = given.size
            if callable(size):
                size = size(in_model[parameter], parameter)
                _require_number(f"shard_blocks, for {in_model[parameter]!r},", size, where)
            numel = _torch_private.local_part(parameter).numel()
            found[name] = Blocks(numel, min(size, max(numel, 1)), given.least_part)
        return UnitBlocks(found, given.max_padding, where)

    def check(
        self, members: Sequence[OrigParam], ranks: int, is_mapped: bool, is_flattened: bool
    ) -> None:
        """Warn of much padding, or raise UsageError for too much, in the layout of a store."""
        layout, without = (
            layout_of(members, ranks, is_mapped, is_flattened, blocks)[1] for blocks in (self, None)
        )
        padding = layout.shard_numel / without.shard_numel - 1
        largest = max(layout.params, key=lambda param: param.block)
        text = (
            f"{largest.name!r} in blocks of {largest.block:,} elements over {layout.ranks} ranks: "
            f"{padding:.0%} padding"
        )
        if padding > self.max_padding:
            raise UsageError.of(
                "The blocks need too much padding.",
                expected=f"shards that are at most {self.max_padding:.0%} larger than without",
                got=f"{layout.shard_numel:,} elements, {without.shard_numel:,} without",
                where=f"shard_blocks of {self.where}, {text}",
                fix="use smaller blocks, fewer ranks or larger units, or allow it with "
                "shard_blocks=ShardBlocks(..., max_padding=...)",
            )
        if padding > _WARN_FROM:
            warnings.warn(f"shard_blocks: {text}, in {self.where}.", stacklevel=6)


def layout_of(
    members: Sequence[OrigParam],
    ranks: int,
    is_mapped: bool,
    is_flattened: bool,
    blocks: UnitBlocks | None = None,
) -> tuple[Sequence[OrigParam], FlatLayout]:
    """Return the parameters of a store in their order in its shards, and their layout. is_mapped:
    other processes may map the shards. is_flattened: one parameter holds them all."""
    shapes = [tuple(_torch_private.local_part(each.parameter).shape) for each in members]
    names, dtype = [each.name for each in members], members[0].parameter.dtype
    align = max(ALIGN_NBYTES // dtype.itemsize, 1)
    layout = flat_layout(names, shapes, ranks=ranks, align=align)
    if is_mapped:
        numel = in_whole_pages(layout.shard_numel, dtype)
        layout = dataclasses.replace(layout, shard_numel=numel)
    if blocks is None:
        return members, layout
    its = tuple(blocks.of[name] for name in names)
    if is_flattened:  # blocks of the FlatParameter are blocks of parameters, then
        align = math.lcm(
            align, math.gcd(*(each.size for each in its if each.size < each.numel)) or 1
        )
    in_pages = is_mapped and is_in_pages(layout.shard_numel, dtype)
    unit = math.lcm(mmap.PAGESIZE // dtype.itemsize, align) if in_pages else align
    in_one = sum(aligned(each.numel, align) for each in its)
    placed = smallest(its, ranks, align, unit, aligned(max(in_one, 1), unit))
    assert placed is not None  # one shard has room for all
    specs = [
        ParamSpec(names[number], shapes[number], start, its[number].size)
        for number, start in zip(placed.order, placed.starts, strict=True)
    ]
    layout = FlatLayout(tuple(specs), ranks, placed.shard_numel)
    return [members[number] for number in placed.order], layout
