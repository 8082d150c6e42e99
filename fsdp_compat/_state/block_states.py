"""Optimizer states with one value for each block of a parameter's elements, such as the scales of
8-bit moments and statistics of rows: from the parts that they were saved of to a rank's part."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import _torch_private
from .._archive.walk import leaves, map_leaves
from .._engine.state_store import store_of
from .._layout.spec import Interval
from ..errors import CheckpointError, StateError
from .dry_run import states_to_be
from .loaded_values import is_sharded
from .optim_contents import ParamOwnership, StateKind, classify, in_tensors, of_tensors
from .rank_local import Part, RankState, part_of


@dataclasses.dataclass(frozen=True)
class Recut:
    """A state of adjoining parts of a parameter that becomes that of one part."""

    parts: Sequence[Interval]  # in order, those that share elements with ``part``
    values: Sequence[Any]  # of the parts
    part: Interval
    like: Any  # what the optimizer creates for the part

    def fits(self) -> bool:
        """Whether it becomes a state such as ``like``. Values may be lazy tensors."""
        return all(
            isinstance(leaf, torch.Tensor)
            and all(hasattr(value, "shape") for value in values)
            and (_are_alike(values, leaf) or self._block(values, leaf) > 0)
            for _, leaf, values in self._by_leaf()
        )

    def value(self) -> Any:
        """Return the state of the part; it ``fits``."""
        cut = {path: self._cut(values, leaf) for path, leaf, values in self._by_leaf()}
        like = {None: self.like}
        found = map_leaves(in_tensors(like), lambda _, path: cut[f"/{path}"])
        return of_tensors(found, like)[None]

    def _by_leaf(self) -> Iterator[tuple[str, Any, list[Any]]]:
        """Yield each tensor in ``like`` with its path, and those of the parts at this path."""
        found = [dict(leaves(in_tensors({None: value}))) for value in self.values]
        for path, leaf in leaves(in_tensors({None: self.like})):
            yield path, leaf, [each.get(path) for each in found]

    def _cut(self, values: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        block, first = self._block(values, like), values[0]
        are_equal = len(values) > 1 and all(torch.equal(first, value) for value in values)
        if _are_alike(values, like) and (are_equal or not block):
            return first.view(like.shape)
        start = (self.part.start - self.parts[0].start) // block
        whole = torch.cat([value.reshape(-1) for value in values])
        return whole[start : start + like.numel()].clone().view(like.shape)

    def _block(self, values: Sequence[Any], like: torch.Tensor) -> int:
        """Return of how many elements of the parameter each element of the state is, if all parts
        begin with one; 0: they do not."""
        numels = [math.prod(value.shape) for value in values]
        counts = [*zip(self.parts, numels, strict=True), (self.part, like.numel())]
        # Only a part that ends with the others may end inside of a block.
        whole = [(part.numel, n) for part, n in counts if part.stop < self.parts[-1].stop]
        before = self.part.start - self.parts[0].start, sum(numels) - like.numel()
        numel, number = next(iter([*whole, before]))
        block = numel // number if number > 0 else 0
        fits = block and all(
            part.start % block == 0 and n == -(-part.numel // block) for part, n in counts
        )
        return block if fits else 0


def _are_alike(values: Sequence[Any], like: torch.Tensor) -> bool:
    """True if the state may be the same for all parts."""
    return all(math.prod(value.shape) == like.numel() for value in values)


@dataclasses.dataclass(frozen=True)
class PartStates:
    """Brings states that belong to parts of parameters to the parts of this rank."""

    ownership: ParamOwnership
    optimizer: Optimizer | None
    where: str  # for errors

    @functools.cached_property
    def created(self) -> Mapping[nn.Parameter, Mapping[Any, Any]]:
        """The states that the optimizer has, or would create; none if they are not known."""
        try:
            return {} if self.optimizer is None else states_to_be(self.ownership, self.optimizer)
        except StateError:
            return {}

    def take_blocks(self, name: str, entry: dict[Any, Any]) -> list[RankState]:
        """Take those states of a whole parameter out of ``entry`` that are of blocks, of which
        ranks need some. They become those of one rank with all of it."""
        param, index = self.ownership.by_name[name]
        group = self.ownership.held[param].group
        if group is None or self.ownership.is_stepped_whole(name):
            return []
        shape = store_of(group).shape(index)
        others = {
            k: v
            for k, v in entry.items()
            if type(v) is not torch.Tensor or v.shape not in ((), shape)
        }
        if not others:  # as of most optimizers
            return []
        whole = Part(0, 1, shape, ((name, 0, math.prod(shape)),), in_blocks=True)
        found = list[RankState]()
        for key, value in in_tensors(
            {k: v for k, v in others.items() if not is_sharded(v)}
        ).items():
            is_other = tuple(getattr(value, "shape", ())) not in ((), shape)
            if (isinstance(value, Mapping) or is_other) and (
                self.ownership.is_vacant(param) or self._recut(name, key, {whole.run: entry[key]})
            ):
                found.append(RankState(key, entry.pop(key), whole, 0))
        return found

    def restored(self, name: str, states: Sequence[RankState]) -> dict[Any, Any]:
        """Return this rank's states of a parameter by name. states: of all ranks. If replicas have
        the same part, the state that this rank saved itself takes precedence. Raises
        CheckpointError for a state that is neither of an equal part nor of blocks."""
        contents, own = self.ownership.held[self.ownership.by_name[name][0]], -1
        if contents.group is not None:
            own = contents.group.shard.members[contents.group.shard.rank]
        now = part_of(contents)
        by_key: dict[Any, dict[Any, RankState]] = {}
        for state in sorted(states, key=lambda state: state.holder == own):
            runs = tuple((self.ownership.name_before(n), a, b) for n, a, b in state.part.runs)
            by_key.setdefault(state.key, {})[dataclasses.replace(state.part, runs=runs)] = state
        found = dict[Any, Any]()
        for key, by_part in by_key.items():
            if now in by_part:
                found[key] = by_part[now].value
            elif now is None or now.runs:
                pieces = {part.run: state.value for part, state in by_part.items()}
                found[key] = self.recut(name, key, pieces, f": {next(iter(by_part))}").value()
        return found

    def recut(self, name: str, key: Any, pieces: Mapping[Interval, Any], saved: str = "") -> Recut:
        """Return a state as one of blocks. pieces: by the elements of the parameter that they are
        of. Raises CheckpointError if it is per element, or of one rank alone."""
        if (found := self._recut(name, key, pieces)) is None:
            now = part_of(self.ownership.held[self.ownership.by_name[name][0]])
            raise CheckpointError.of(
                f"The state {key!r} of {name!r} belongs to one rank's part and cannot be "
                "resharded.",
                expected=f"the ranks, wrapping and placement that state {key!r} was saved with"
                f"{saved}",
                got=str(now or "a parameter that no unit manages"),
                where=f"{self.where}, state {key!r} of {name!r}",
                fix="load with the number of ranks, strategy, wrapping and use_orig_params that it "
                "was saved with, or without such states, if the optimizer can do without them; "
                "states of blocks need cuts between blocks, see shard_blocks",
            )
        return found

    def _recut(self, name: str, key: Any, pieces: Mapping[Interval, Any]) -> Recut | None:
        param, index = self.ownership.by_name[name]
        group, states = self.ownership.held[param].group, self.created.get(param, {})
        like, value = states.get(key), next(iter(pieces.values()), None)
        if like is None and isinstance(value, Mapping) and value.keys() <= states.keys():
            like = {inner: states[inner] for inner in value}  # as bitsandbytes nests them in dicts
        if group is None or like is None or classify(like, param) is not StateKind.RANK_LOCAL:
            return None
        store = store_of(group)
        if not store.is_cut_in_blocks(index) or not _torch_private.is_plain(param):
            return None
        part = store.part(index, store.rank)
        parts = sorted(each for each in pieces if each.clipped(part))
        bounds = [bound for each in parts for bound in (each.start, each.stop)]
        if not parts or bounds[0] > part.start or bounds[-1] < part.stop:
            return None
        recut = Recut(parts, [pieces[each] for each in parts], part, like)
        return recut if bounds[1:-1:2] == bounds[2::2] and recut.fits() else None
