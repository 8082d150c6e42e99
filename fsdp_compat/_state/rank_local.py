"""Rank-local optimizer state, which belongs to one rank's part of a parameter: saved per rank, and
loaded by a rank with the same part.

Factored second moments and objects cannot be resharded. Statistics of blocks can, where all cuts
lie between blocks. A state dict holds them under a key per rank, as values other than tensors, so
that torch.distributed.checkpoint keeps all ranks'."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .._comm.transport import Transport
from .._engine.group import Group
from .._engine.state_store import store_of
from .._layout.spec import Interval
from .optim_contents import HeldStates, ParamContents, StateKind, snapshot
from .rank0 import packed_bytes, unpacked


@dataclasses.dataclass(frozen=True)
class Part:
    """The user's parameters in one of the optimizer's, on one rank. State fits an equal Part."""

    rank: int  # among the ranks that split the parameters
    ranks: int
    shape: tuple[int, ...]  # of the optimizer's parameter
    # (name, first element, end), in order, without parameters that have no element on the rank.
    runs: tuple[tuple[str, int, int], ...]
    # Parameters are cut between blocks, or not at all: states of blocks fit other parts, too.
    in_blocks: bool = dataclasses.field(default=False, compare=False)

    @property
    def run(self) -> Interval:
        """The elements of a parameter that is cut between blocks; none of any other."""
        return Interval(*self.runs[0][1:]) if self.runs and self.in_blocks else Interval(0, 0)

    def __str__(self) -> str:
        runs = [f"elements {start} to {stop} of {name}" for name, start, stop in self.runs]
        held = ", ".join(runs) or "no elements"
        return f"rank {self.rank} of {self.ranks}, which holds {held}"


@dataclasses.dataclass(frozen=True)
class RankState:
    """One state of one rank, with the part that it fits."""

    key: Any  # the state's name in the optimizer
    value: Any
    part: Part
    holder: int  # the global rank that saved it

    @property
    def own_key(self) -> str:
        """The key in a state dict, which no other rank uses."""
        return f"{self.key}@rank{self.holder}"


# So that torch.load(weights_only=True) reads them.
torch.serialization.add_safe_globals([Part, RankState])


def part_of(contents: ParamContents) -> Part | None:
    """Return the part of a parameter that this rank has; None if no unit manages it."""
    if contents.group is None:
        return None
    store, rank = store_of(contents.group), contents.group.shard.rank
    parts = [(name, store.part(index, rank)) for index, name in contents.names]
    runs = tuple((name, part.start, part.stop) for name, part in parts if part)
    first = contents.names[0][0]
    shape, in_blocks = store.sharded_shape(first, rank), store.is_cut_in_blocks(first)
    return Part(rank, store.ranks, shape, runs, in_blocks)


_AT_ONCE_NBYTES = 32 << 20  # received at a time, unless one rank sends more

# Optimizers whose rank-local states this process has warned of.
_warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def warn_of_layout(names: Sequence[str], optimizer: torch.optim.Optimizer, stacklevel: int) -> None:
    """Warn, once per optimizer, of rank-local states. stacklevel: as for ``warnings.warn``."""
    if names and optimizer not in _warned:
        _warned.add(optimizer)
        warnings.warn(
            f"{len(names)} state(s) of {type(optimizer).__name__} are saved, but can only be "
            "loaded with the layout that they are saved with (the same number of ranks, sharding "
            f"strategy, wrapping and use_orig_params): {', '.join(names)}.",
            stacklevel=stacklevel,
        )


def rank_local_names(held: HeldStates) -> list[str]:
    """Return ``"name.state"`` for each state that needs an equal layout, not those of parameters
    that are cut between blocks. Sends nothing."""
    found = list[str]()
    for param, of_param in held.kinds.items():
        if StateKind.RANK_LOCAL not in of_param.values():
            continue
        contents = held.ownership.held[param]
        store = None if contents.group is None else store_of(contents.group)
        its = [key for key, kind in of_param.items() if kind is StateKind.RANK_LOCAL]
        if store is not None and (store.is_flattened or not store.has_blocks):
            found += [f"{name}.{key}" for _, name in contents.names for key in its]
    return found


def rank_state(
    contents: ParamContents, key: Any, value: Any, to_cpu: bool
) -> tuple[str, RankState]:
    """Return the name of a parameter and a copy of one of this rank's states of it."""
    part = part_of(contents)
    assert contents.group is not None and part is not None
    holder = contents.group.shard.members[part.rank]
    state = RankState(key, snapshot(value, to_cpu), part, holder)
    return contents.names[0][1], state


def gather_states(
    group: Group, own: Sequence[tuple[str, RankState]], *, to_cpu: bool, keep: bool
) -> list[tuple[str, RankState]]:
    """Return the states of all ranks of the shard axis, on the CPU or the group's device; none with
    ``keep=False``. What cannot be pickled stays on its rank, with a warning. Collective."""
    if group.shard.ranks == 1:
        return list(own) if keep else []
    sent, kept = [], []
    for name, state in own:
        try:
            packed_bytes(state)
            sent.append((name, state))
        except Exception as error:  # an object may raise anything; a save must not fail for that
            kept.append((name, state))
            warnings.warn(
                f"The optimizer state {state.key!r} of {name!r} cannot be pickled ({error}): a "
                "full state dict contains this rank's state on this rank only.",
                stacklevel=2,
            )
    device = torch.device("cpu") if to_cpu else store_of(group).shard.device
    found = list[tuple[str, RankState]]()
    for rank, states in gather_objects(group.shard, sent, keep, device, "rank-local state"):
        found += states
        found += kept if rank == group.shard.rank else []
    return found


def gather_objects(
    axis: Transport, own: Any, keep: bool, device: torch.device, what: str
) -> Iterator[tuple[int, Any]]:
    """Yield each rank with its object, whose tensors are on ``device``; without ``keep`` nothing.
    All ranks send together, or beyond a limit one by one. Collective, until the iterator ends."""
    keepers = [rank for rank, keeps in enumerate(axis.gather_objects(keep)) if keeps]
    is_sent = bool({*keepers} - {axis.rank})
    packed = packed_bytes(own) if is_sent else torch.empty(0, dtype=torch.uint8)
    nbytes = axis.gather_objects(packed.numel())
    num_senders = axis.ranks if sum(nbytes) <= _AT_ONCE_NBYTES else 1
    others = [rank for rank in range(axis.ranks) if rank != axis.rank]
    for start in range(0, axis.ranks, num_senders):
        senders = range(start, start + num_senders)
        receivers = {*keepers} & {*others} if axis.rank in senders else ()
        sizes = [
            (packed.numel() * (n in receivers), nbytes[n] * (keep and n in others and n in senders))
            for n in range(axis.ranks)
        ]
        sent = packed.expand(len(receivers), -1).reshape(-1).to(axis.device)  # one: no copy
        received = axis.exchange(sent, sizes, what).cpu().split([each for _, each in sizes])
        for rank in senders if keep else ():
            yield rank, own if rank == axis.rank else unpacked(received[rank], device)
