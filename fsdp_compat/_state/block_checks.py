"""Recognises optimizers that keep states of blocks, such as 8-bit ones, and says which blocks of
shards make them right: what they keep for parameters of several sizes is tried out."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from .._engine.state_store import store_of
from .dry_run import numels_of_states
from .elementwise import is_elementwise
from .optim_contents import CompositeOptimizer, ParamOwnership

_TRIED_NUMEL = 1 << 14  # of a parameter that is large enough for states of blocks


class _Rule(typing.NamedTuple):
    """Which parameters an optimizer keeps states of blocks for."""

    size: int  # of a block
    least: int  # the number of elements from which on it keeps them
    only_whole: bool  # not for parameters that end inside of a block

    @staticmethod
    def of(numels: Callable[[int], Mapping[str, int]]) -> _Rule | None:
        """numels: returns those of all states of a parameter with as many elements."""
        one, two = numels(_TRIED_NUMEL), numels(2 * _TRIED_NUMEL)  # what grows is of blocks
        sizes = {
            path: _TRIED_NUMEL // numel
            for path, numel in one.items()
            if 1 < numel < _TRIED_NUMEL and two.get(path) == 2 * numel
        }
        if not sizes:
            return None
        size = math.lcm(*sizes.values())
        multiples = range(size, _TRIED_NUMEL + 1, size)
        number = bisect.bisect_left(multiples, True, key=lambda n: sizes.keys() <= numels(n).keys())
        rest = numels(_TRIED_NUMEL + size // 2)
        return _Rule(size, multiples[number] if number else 1, not sizes.keys() <= rest.keys())

    def holds(self, numel: int) -> bool:
        return numel >= self.least and not (self.only_whole and numel % self.size)

    def allows(self, numel: int, cuts: Sequence[int]) -> bool:
        """Whether parts of a parameter are stepped as the whole."""
        parts = [stop - start for start, stop in itertools.pairwise([0, *cuts, numel])]
        if self.holds(numel):
            return all(map(self.holds, parts)) and not any(cut % self.size for cut in cuts)
        return len(parts) == 1 or not any(map(self.holds, parts))

    def __str__(self) -> str:
        """Return the argument ``shard_blocks``."""
        size = str(self.size)
        if self.only_whole:
            size = f"lambda name, p: {size} if p.numel() % {size} == 0 else p.numel()"
        return size if self.least == 1 else f"ShardBlocks({size}, least_part={self.least})"


def warn_of_blocks(ownership: ParamOwnership, optimizer: Optimizer, stacklevel: int) -> None:
    """Warn of states of blocks whose parameters are cut inside of blocks, or flattened."""
    if is_elementwise(optimizer) or isinstance(optimizer, CompositeOptimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"][:1]:
            numels = functools.partial(numels_of_states, ownership, optimizer, parameter)
            rule = _Rule.of(functools.cache(numels))
            text = "" if rule is None else _problem(ownership, group["params"], rule)
            if rule is not None and text:
                kept = f"{type(optimizer).__name__} keeps a state for every {rule.size} elements"
                warnings.warn(f"{kept}, and {text}", stacklevel=stacklevel)
                return


def _problem(ownership: ParamOwnership, params: Sequence[nn.Parameter], rule: _Rule) -> str:
    """Return what is wrong with the blocks of parameters, or ""."""
    for parameter in params:
        contents = ownership.held[parameter]
        if contents.group is None:
            continue
        store, (index, name) = store_of(contents.group), contents.names[0]
        if store.is_flattened:
            return (
                "parameters are flattened: its blocks are those of a FlatParameter, as in one "
                "process of FSDP. With use_orig_params=True they are those of a parameter."
            )
        if store.section_of(index).offsets is None:
            layout, number = store.cut(index)
            if not rule.allows(layout.params[number].numel, layout.cuts(number)):
                return (
                    f"the parts of {name!r} have other ones than the whole: results are not those "
                    f"of one process. Wrap with use_orig_params=True and shard_blocks={rule}."
                )
    return ""
