"""A snapshot of what one rank saves: its shards and optimizer states as they lie in memory, and a
head.

A rank's file has one tensor per parameter group and per state, the whole shard, put together from
its parts if the optimizer holds parameters one by one. Values that exist once per parameter, and
rank-local states, go to the head. The leading rank's file also has buffers and unmanaged
parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import _torch_private
from ..._archive.walk import LEFT_OUT
from ..._engine.device import has_streams
from ..._engine.state_store import store_of
from ..._state.held import unmanaged_state
from ..._state.optim_contents import (
    HeldStates,
    Kinds,
    StateKind,
    classify_all,
    in_tensors,
    ownership_of,
)
from ..._state.optimizer_checks import cut_state
from ..._state.rank_local import warn_of_layout
from ..._state.units import units_of
from ...errors import UsageError
from .._formats.native import RankFile
from .._formats.writers import FilePart
from .model import NamedGroup
from .optimizers import classes_of, warn_of_left_out
from .staging import stage
from .values import Put, encode, tensor_as_text

_STATE_KEYS = (str, int, float, type(None))  # keys of optimizer states that JSON has


class Snapshot(RankFile):
    """The content of this rank's file, and the common part, which is the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.param_groups: Any = None  # of the optimizer, encoded; None without one
        self.optimizer_classes: tuple[str, ...] = ()
        self.owned: list[str] = []  # parameters whose states are this rank's alone, whole
        self._num_own = 0  # of the tensors, the others are in the common part
        self.wait_for_copy: Callable[[], object] = lambda: None

    def drop_common(self) -> None:
        """Leave the common part to another rank."""
        del self.tensors[self._num_own :]
        states = self.head.other_states
        self.head.others, self.head.other_states = {}, {name: states[name] for name in self.owned}

    def detach(self) -> None:
        """Replace all values by copies on the CPU, which training does not change, and which are
        complete after ``wait_for_copy``."""
        parts = [part for tensor in self.tensors for part in tensor.parts]
        values = [part.values for part in parts if isinstance(part.values, torch.Tensor)]
        copies, self.wait_for_copy = stage(values)
        staged = iter(copies)
        for tensor in self.tensors:
            tensor.parts = [FilePart(part.start, next(staged)) for part in tensor.parts]

    def encoded(self, name: str, key: Any, value: Any, put: Put) -> Any:
        """Return a state or setting, encoded; LEFT_OUT, noted in the head, if it is not data."""
        if isinstance(key, _STATE_KEYS):
            with contextlib.suppress(UsageError):
                return encode(value, f"optimizer state {key!r}", put)
        self.head.left_out.append(name)
        return LEFT_OUT

    def add_common(self, model: nn.Module, states: Mapping[str, Mapping[Any, Any]]) -> None:
        """Add the common part. states: of unmanaged parameters, by name."""
        self._num_own, self.owned = len(self.tensors), list(self.head.other_states)
        self.add_others(unmanaged_state(model))
        self.add_whole_states(states)

    def add_whole_states(self, states: Mapping[str, Mapping[Any, Any]]) -> None:
        """Add states as they are, by the name of their parameter."""
        for name, state in states.items():
            put = self.under("other state", name)
            found = {
                key: self.encoded(name if key is None else f"{name}.{key}", key, its, put)
                for key, its in state.items()
            }
            self.head.other_states[name] = [
                (key, value) for key, value in found.items() if value is not LEFT_OUT
            ]


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    groups: Sequence[NamedGroup],
) -> Snapshot:
    """Return what this rank saves, as views. Raises UsageError for values that cannot be saved."""
    snapshot = Snapshot()
    written = [named for named in groups if named.is_written_here]
    for named in written:
        store = store_of(named.group)
        part = FilePart(0, store.shard.detach()[named.section.in_shard.slice])
        snapshot.add(named.name, store.dtype, (named.numel,), [part])
    other_states = {} if optimizer is None else _add_optimizer(snapshot, model, optimizer, groups)
    snapshot.head.extra = encode(extra, "extra", snapshot.under("extra"))
    snapshot.add_common(model, other_states)
    warn_of_left_out(snapshot.head.left_out, "are not in the checkpoint", stacklevel=5)
    return snapshot


def _add_optimizer(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[NamedGroup],
) -> dict[Any, Mapping[Any, Any]]:
    """Add this rank's settings and states; return those that are the same on all ranks, by name."""
    cut_state(optimizer)
    where = type(optimizer).__name__
    ownership = ownership_of(optimizer.param_groups, where, units_of(model), model)
    snapshot.param_groups = [
        {
            "params": [name for p in group["params"] for name in ownership.names_in(p)],
            "settings": _settings(snapshot, group, number),
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    snapshot.optimizer_classes = classes_of(optimizer)
    current = [p for p in ownership.numbers if not ownership.is_vacant(p)]
    own_states = {p: dict(optimizer.state[p]) for p in current if optimizer.state.get(p)}
    held = HeldStates(ownership, _with_steps_on_host(own_states))
    kinds = classify_all(held.of_shards, tells_0d=True)
    written = [named for named in groups if named.is_written_here]
    for named in written:
        states = _states(snapshot, named, held, kinds)
        snapshot.add_states(named.name, named.numel, len(named.params), states)
    rank_local = [
        f"{named.names(named.params[number])[0]}.{key}"
        for named in written
        for number, key, _ in snapshot.head.own.get(named.name, [])
        if not store_of(named.group).has_blocks
    ]
    warn_of_layout(rank_local, optimizer, stacklevel=6)
    of_first_replica = {
        name
        for named in groups
        if named.group.replica.rank == 0
        for index in named.params
        for name in named.names(index)
    }
    owned = {name: state for name, state in held.owned.items() if name in of_first_replica}
    snapshot.add_whole_states(owned)
    shared: dict[Any, Mapping[Any, Any]] = dict(held.unmanaged)
    keys: list[Any] = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    for key in keys:
        if ownership.is_user_key(key):
            shared[key] = {None: optimizer.state[key]}
        else:
            snapshot.head.left_out.append(repr(key))
    return shared


def _settings(snapshot: Snapshot, group: Mapping[str, Any], number: int) -> Any:
    """Return a group's settings, encoded. Others keep the value of the optimizer that loads."""
    kept = {
        key: value
        for key, value in group.items()
        if key != "params"
        and snapshot.encoded(f"param_groups[{number}][{key!r}]", key, {key: value}, tensor_as_text)
        is not LEFT_OUT
    }
    return encode(kept, f"parameter group {number}", tensor_as_text)


def _with_steps_on_host(states: dict[Any, dict[Any, Any]]) -> dict[Any, dict[Any, Any]]:
    """Bring the 0-d tensors of all states to the CPU, such as the steps of a capturable optimizer:
    the host waits once for a device, not once for a parameter."""
    places: dict[Any, list[tuple[dict[Any, Any], Any]]] = {}
    for state in states.values():
        for key, value in state.items():
            if type(value) is torch.Tensor and not value.dim() and has_streams(value.device):
                places.setdefault((value.device, value.dtype), []).append((state, key))
    for alike in places.values():
        for (state, key), value in zip(
            alike, torch.stack([state[key] for state, key in alike]).cpu(), strict=True
        ):
            state[key] = value
    return states


def _states(
    snapshot: Snapshot, named: NamedGroup, held: HeldStates, kinds: Kinds
) -> Iterator[tuple[Any, Sequence[int], Any]]:
    """Yield the states of one group for ``add_states``. Rank-local ones go to the head."""
    store = store_of(named.group)
    for param, indices in named.sharded_params:
        numbers = [index - named.section.first_param for index in indices]
        for key, kind in kinds.get(param, {}).items():
            name = f"{named.names(indices[0])[0]}.{key}"
            value = held.states[param][key]
            if isinstance(value, torch.Tensor):  # of a DTensor: this rank's part
                value = _torch_private.local_part(value)
            if kind is StateKind.PER_ELEMENT and isinstance(key, _STATE_KEYS):
                start = 0  # of a FlatParameter, which is the whole section
                if not store.is_flattened:
                    start = store.part_in_shard(indices[0]).start - named.section.start
                yield key, numbers, FilePart(start, value.detach().reshape(-1))
                continue
            is_scalar = kind is StateKind.SCALAR
            put = tensor_as_text if is_scalar else snapshot.under("own", named.name, str(key))
            encoded = snapshot.encoded(name, key, in_tensors({key: value})[key], put)
            if is_scalar and encoded is not LEFT_OUT:
                yield key, numbers, encoded
            elif encoded is not LEFT_OUT:
                own = snapshot.head.own.setdefault(named.name, [])
                own.append((numbers[0], key, encoded))
