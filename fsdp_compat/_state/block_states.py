"""Optimizer states with one value for each block of a parameter's elements, such as the scales of
8-bit moments and statistics of rows: from the parts that they were saved of to a rank's part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._engine.group import Group
from .._engine.state_store import store_of
from .._layout.spec import Interval
from .loaded_values import is_sharded
from .optim_contents import (
    ParamOwnership,
    StateKind,
    classify,
    in_tensors,
    of_tensors,
)

Created = Callable[[nn.Parameter], Mapping[Any, Any]]  # the states that an optimizer makes for it


@dataclasses.dataclass(frozen=True)
class Recut:
    """A state of a parameter, by parts, that becomes that of one part."""

    pieces: Sequence[tuple[Interval, Any]]  # in order, the first to the last that have a share
    part: Interval
    like: Any  # what the optimizer creates for the part

    @staticmethod
    def of(group: Group, index: int, pieces: Mapping[Interval, Any], like: Any) -> Recut | None:
        """pieces: by the elements of parameter ``index`` that they are of. None: where the store
        cuts no whole parameters, or they do not cover this rank's part."""
        store = store_of(group)
        is_plain = _torch_private.is_plain(store.sharded_params[0].parameter)
        if store.is_flattened or store.section_of(index).offsets is not None or not is_plain:
            return None
        part = store.part(index, store.rank)
        found = sorted((each, value) for each, value in pieces.items() if each.clipped(part))
        ends = [part.start, *(each.stop for each, _ in found)]
        has_gap = any(each.start > end for (each, _), end in zip(found, ends, strict=False))
        if has_gap or ends[-1] < part.stop or not found:
            return None
        return Recut(found, part, like)

    def fits(self) -> bool:
        """Whether it becomes a state such as ``like``. Values of pieces may be lazy tensors."""
        return self._fits([_in_dict(value) for _, value in self.pieces], _in_dict(self.like))

    def _fits(self, values: Sequence[Any], like: Any) -> bool:
        if isinstance(like, Mapping):
            are_dicts = all(
                isinstance(its, Mapping) and like.keys() <= its.keys() for its in values
            )
            return are_dicts and all(
                self._fits([its[key] for its in values], of) for key, of in like.items()
            )
        are_tensors = isinstance(like, torch.Tensor) and all(hasattr(v, "shape") for v in values)
        return are_tensors and (self._are_alike(values, like) or self._block(values, like) > 0)

    def value(self) -> Any:
        """Return the state of the part; it ``fits``."""
        found = self._cut([_in_dict(value) for _, value in self.pieces], _in_dict(self.like))
        return of_tensors({None: found}, {None: self.like})[None]

    def _cut(self, values: Sequence[Any], like: Any) -> Any:
        if isinstance(like, Mapping):
            return {key: self._cut([its[key] for its in values], of) for key, of in like.items()}
        block, first = self._block(values, like), values[0]
        if self._are_alike(values, like) and (
            not block or (len(values) > 1 and all(torch.equal(first, its) for its in values))
        ):
            return first.view(like.shape)
        start, stop = self._numbers(self.part, block)
        found = []
        for (piece, _), value in zip(self.pieces, values, strict=True):
            before = self._numbers(piece, block)[0]
            found.append(value.reshape(-1)[max(start - before, 0) : max(stop - before, 0)])
        return torch.cat(found).view(like.shape)

    def _are_alike(self, values: Sequence[Any], like: torch.Tensor) -> bool:
        """True if the state may be the same for all parts."""
        return all(math.prod(value.shape) == like.numel() for value in values)

    def _numbers(self, part: Interval, block: int) -> tuple[int, int]:
        return part.start // block, -(-part.stop // block)

    def _block(self, values: Sequence[Any], like: torch.Tensor) -> int:
        """Return of how many elements of the parameter each element of the state is, if all parts
        begin with one; 0: they do not."""
        parts = [part for part, _ in self.pieces]
        numels = [math.prod(value.shape) for value in values]
        span, count = parts[0].numel, numels[0]
        if self.part.stop < parts[-1].stop:  # only the last part may end inside of a block
            span, count = self.part.numel, like.numel()
        elif self.part.start > parts[0].start:
            span, count = self.part.start - parts[0].start, sum(numels) - like.numel()
        block = span // count if count > 0 else 0
        counts = [*zip(numels, parts, strict=True), (like.numel(), self.part)]
        fits = block and all(
            not part.start % block and numel == -(-part.numel // block) for numel, part in counts
        )
        return block if fits else 0


def _in_dict(value: Any) -> Any:
    """Return a tensor that wraps others as a dict of them."""
    return in_tensors({None: value})[None]


def recut_of(
    ownership: ParamOwnership, name: str, key: Any, pieces: Mapping[Interval, Any], created: Created
) -> Recut | None:
    """Return a state as one of blocks, if it fits; None if it is per element, or of one rank alone.
    pieces: by the elements of the parameter that they are of."""
    param, index = ownership.by_name[name]
    group, states = ownership.held[param].group, created(param)
    like, value = states.get(key), next(iter(pieces.values()), None)
    if like is None and isinstance(value, Mapping) and value.keys() <= states.keys():
        like = {inner: states[inner] for inner in value}  # as bitsandbytes nests them in dicts
    if group is None or like is None or classify(like, param) is not StateKind.RANK_LOCAL:
        return None
    recut = Recut.of(group, index, pieces, like)
    return recut if recut is not None and recut.fits() else None


def keys_of_blocks(
    ownership: ParamOwnership, name: str, entry: Mapping[Any, Any], created: Created
) -> list[Any]:
    """Return which states of a whole parameter are of blocks of which ranks need some."""
    param, index = ownership.by_name[name]
    group = ownership.held[param].group
    if group is None or ownership.is_stepped_whole(name):
        return []
    shape = store_of(group).shape(index)
    whole = Interval(0, math.prod(shape))
    is_other = {
        key: not is_sharded(value)
        and (
            isinstance(_in_dict(value), Mapping)
            or tuple(getattr(value, "shape", ())) not in ((), shape)
        )
        for key, value in entry.items()
    }
    return [
        key
        for key, value in entry.items()
        if is_other[key]
        and (ownership.is_vacant(param) or recut_of(ownership, name, key, {whole: value}, created))
    ]
