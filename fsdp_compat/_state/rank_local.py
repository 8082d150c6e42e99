"""Rank-local optimizer state: it belongs to one rank's part of a parameter, is saved per rank, and
is loaded where a rank has the same part.

A factored second moment, scales of 8-bit blocks or an object cannot be resharded. A state dict
holds such a state under a key that no other rank uses, as one value that is not a tensor, so that
torch.distributed.checkpoint keeps every rank's."""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._comm.host_memory import memory_of
from .._engine.group import Group
from .._engine.state_store import store_of
from ..errors import CheckpointError, explain
from .optim_values import StateKind, classify_all, snapshot
from .param_ownership import ParamOwnership

__all__ = [
    "Part",
    "RankState",
    "check_layout",
    "gather_states",
    "rank_local_states",
    "packed_bytes",
    "part_of",
    "restored",
    "unpacked",
    "unshardable",
]


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of parameters that one parameter of an optimizer holds on one rank. Rank-local state
    fits only an equal part."""

    rank: int  # of the ranks that split the parameters
    ranks: int
    shape: tuple[int, ...]  # of the optimizer's parameter
    runs: tuple[
        tuple[str, int, int], ...
    ]  # (name, first element, end), in order; what has no element here is left out

    def __str__(self) -> str:
        held = (
            ", ".join(f"elements {start} to {stop} of {name}" for name, start, stop in self.runs)
            or "no element"
        )
        return f"rank {self.rank} of {self.ranks}, which holds {held}"


@dataclasses.dataclass(frozen=True)
class RankState:
    """One state of one rank's part, with the part that it fits."""

    key: Any  # the state's name in the optimizer
    value: Any
    part: Part
    holder: int  # the global rank that it comes from

    @property
    def own_key(self) -> str:
        """The key in a state dict, which no other rank uses."""
        return f"{self.key}@rank{self.holder}"


torch.serialization.add_safe_globals(
    [Part, RankState]
)  # torch.load(weights_only=True) reads files with tensors in them


def part_of(group: Group, param: nn.Parameter, names: Iterable[tuple[int, str]], rank: int) -> Part:
    """names: (index, name) of what ``param`` holds. rank: of the group's shard axis, this one or
    another."""
    store, names = store_of(group), list(names)
    parts = [(name, store.part(index, rank)) for index, name in names]
    runs = tuple((name, part.start, part.stop) for name, part in parts if part)
    return Part(rank, store.ranks, store.sharded_shape(names[0][0], rank), runs)


def unshardable(
    ownership: ParamOwnership, states: Mapping[nn.Parameter, Mapping[Any, Any]]
) -> list[str]:
    """Return ``"name.state"`` of everything in ``states`` that can only be put back at an equal
    layout. Nothing is sent."""
    found = []
    for param, its in classify_all(states).items():
        held = ownership.held[param]
        for key, entry in its.items():
            if entry is StateKind.RANK_LOCAL and held.group is not None:
                found += [f"{name}.{key}" for _, name in held.names]
    return found


def rank_local_states(
    group: Group,
    ownership: ParamOwnership,
    states: Mapping[nn.Parameter, Mapping[Any, Any]],
    keys: Mapping[nn.Parameter, Iterable[Any]],
    to_cpu: bool,
) -> list[tuple[str, RankState]]:
    """Return (name, state) for the given keys of a group's sharded parameters: copies of what this
    rank holds."""
    rank, members = group.shard.rank, group.shard.members
    found = []
    for param, its_keys in keys.items():
        names, held = ownership.held[param].names, states.get(param, {})
        part = part_of(group, param, names, rank)
        found += [
            (names[0][1], RankState(k, snapshot(held[k], to_cpu), part, members[rank]))
            for k in its_keys
            if k in held
        ]
    return found


def gather_states(
    group: Group, own: Sequence[tuple[str, RankState]], *, to_cpu: bool, keep: bool
) -> list[tuple[str, RankState]]:
    """Return what all ranks of the group's shard axis have, in rank order; tensors on the CPU, or
    where the group's are.

    Collective: all ranks, each with its own; those with ``keep=False`` get nothing. Objects that
    cannot be pickled stay where they are, which is warned of.
    """
    home = torch.device("cpu") if to_cpu else store_of(group).shard.device
    if group.shard.ranks == 1:
        return list(own) if keep else []
    sent, kept = _sorted_out(own)
    packed = packed_bytes(sent)
    sizes = group.shard.gather_objects(packed.numel())
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: packed.numel()] = packed
    gathered = group.gather_full(padded.to(group.device)).cpu()
    found = []
    for rank, size in enumerate(sizes if keep else ()):
        found += unpacked(gathered[rank * padded.numel() :][:size], home) + (
            kept if rank == group.shard.rank else []
        )
    return found


def _sorted_out(
    own: Sequence[tuple[str, RankState]],
) -> tuple[list[tuple[str, RankState]], list[tuple[str, RankState]]]:
    """Return what can be pickled, and what cannot."""
    sent, kept = [], []
    for name, state in own:
        try:
            packed_bytes(state)
            sent.append((name, state))
        except (
            Exception
        ) as error:  # whatever an object's own way of pickling raises: a save does not fail for it
            kept.append((name, state))
            warnings.warn(
                f"The optimizer state {state.key!r} of {name!r} cannot be pickled ({error}): a "
                "full state dict has this rank's on "
                "this rank only.",
                stacklevel=2,
            )
    return sent, kept


def packed_bytes(value: object) -> torch.Tensor:
    """Return the pickled value, 1-D uint8 on the CPU."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpacked(packed: torch.Tensor, device: torch.device) -> Any:
    """The opposite of ``packed_bytes``, for what ranks of the same program have sent."""
    return torch.load(
        io.BytesIO(memory_of(packed.contiguous())), map_location=device, weights_only=False
    )


def check_layout(ownership: ParamOwnership, states: Mapping[str, Sequence[RankState]]) -> None:
    """Raise CheckpointError unless every rank that ``states`` come from holds now what it held
    then. states: by name."""
    for name, its_states in states.items():
        held = ownership.held[ownership.by_name[name][0]]
        for state in its_states:
            saved = dataclasses.replace(
                state.part,
                runs=tuple(
                    (ownership.name_before(run), start, stop)
                    for run, start, stop in state.part.runs
                ),
            )
            if (now := _part_now(ownership, name, saved.rank)) != saved:
                raise CheckpointError(
                    explain(
                        f"The state {state.key!r} of {name!r} belongs to one rank's part and "
                        "cannot be resharded.",
                        expected=f"the layout that it was saved with: {saved}",
                        got="a parameter that no unit manages"
                        if held.group is None
                        else str(now or _part_now(ownership, name, 0)),
                        where=f"optim_state_dict_to_load, state {state.own_key!r} of {name!r}",
                        fix="load with the same number of ranks, strategy, wrapping and "
                        "use_orig_params as it was saved with, or "
                        "take such states out of the dict, if the optimizer can do without",
                    )
                )


def _part_now(ownership: ParamOwnership, name: str, rank: int) -> Part | None:
    """Return the part that ``rank`` has of the optimizer's parameter that holds ``name``; None if
    there is no such rank."""
    param = ownership.by_name[name][0]
    held = ownership.held[param]
    if held.group is None or rank >= store_of(held.group).ranks:
        return None
    return part_of(held.group, param, held.names, rank)


def restored(group: Group, states: Iterable[RankState]) -> dict[Any, Any]:
    """Return this rank's states by their names in the optimizer, out of those of all ranks, whose
    layout fits.

    Where replicas have the same part, what this rank has saved itself goes before the others'.
    """
    own = group.shard.members[group.shard.rank]
    mine = [state for state in states if state.part.rank == group.shard.rank]
    mine.sort(key=lambda state: state.holder == own)
    return {state.key: snapshot(state.value) for state in mine}
