"""The optimizer's state dict, keyed by parameter names, full or sharded, out of the optimizer.

The optimizer sees targets: a FlatParameter that holds a part of many parameters, or 1-D parts of single ones. A state tensor of a
target's shape holds one element per element of the shard, so it is cut by the same layout as the parameters.
"""

from __future__ import annotations

import dataclasses
import enum
import textwrap
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._engine.unit import Group
from ..errors import UsageError, explain
from .entries import Entry, classify_all, copied, snapshot
from .formats import mesh_sharded_value, sharded_value
from .holdings import Holdings, NamedUnit, is_flat, is_whole
from .model import store_of
from .opaque import gather_states, own_states

__all__ = ["Form", "NamedUnit", "Values", "optim_state", "other_form"]


class Values(enum.Enum):
    """What stands for a tensor that has a parameter's shape."""

    WHOLE = enum.auto()  # itself; and every rank's states that only it can use
    BOXES = enum.auto()  # this rank's boxes, views of the optimizer's own state; with ``to_cpu`` copies
    DTENSORS = enum.auto()  # a DTensor over the mesh that the model was given


@dataclasses.dataclass(frozen=True)
class Form:
    """How a state dict is wanted."""

    values: Values
    to_cpu: bool
    keep: bool  # False on ranks that want nothing back
    group: dist.ProcessGroup | None  # of the boxes
    mesh: DeviceMesh | None  # of the DTensors


_ByTarget = Mapping[nn.Parameter, Mapping[Any, Any]]
_Kinds = Mapping[nn.Parameter, Mapping[Any, Entry]]


def other_form(state_dict: Any) -> tuple[str, object] | None:
    """Return what is expected of an optimizer's state dict, and what is there instead; None if all is as it should be."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        return "a dict with 'state' and 'param_groups'", list(state_dict) if isinstance(state_dict, Mapping) else state_dict
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping):
        return "'state': a dict by parameters", state
    for name, entry in state.items():
        if not isinstance(entry, Mapping):
            return f"'state' of {name!r}: a dict", entry
    if not isinstance(groups, (list, tuple)):
        return "'param_groups': a list of dicts", groups
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            return f"'param_groups', group {number}: a dict with 'params', a list", group
    return None


def by_target(holdings: Holdings, source: Any, where: str) -> dict[nn.Parameter, Mapping[Any, Any]]:
    """Return the states in what ``optimizer.state_dict()`` gives, by parameter. Raises UsageError for another dict."""
    if (found := other_form(source)) is not None:
        expected, got = found
        raise UsageError(
            explain(
                "This is no optimizer state dict.",
                expected=expected,
                got=f"{textwrap.shorten(repr(got), 300)} of type {type(got).__name__}",
                where=where,
                fix="pass what optimizer.state_dict() or optim_state_dict(model, optim) returned, on every rank",
            )
        )
    parameters = holdings.parameters
    for key in (*source["state"], *(key for group in source["param_groups"] for key in group["params"])):
        if not isinstance(key, int) or not 0 <= key < len(parameters):
            raise UsageError(
                explain(
                    "The optimizer's state is keyed by something else than the numbers of its parameters.",
                    expected=f"what optimizer.state_dict() returns: parameters by number, 0 to {len(parameters) - 1}",
                    got=f"the key {textwrap.shorten(repr(key), 300)}",
                    where=where,
                    fix="leave the third argument out; a dict that optim_state_dict has returned needs no second pass",
                )
            )
    return {parameters[number]: value for number, value in source["state"].items()}


def optim_state(holdings: Holdings, source: Mapping[str, Any], states: _ByTarget, form: Form) -> dict[str, Any]:
    """Return {"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}.

    source: what optimizer.state_dict() gives; states: those in it, ``by_target``. With boxes nothing is sent. Else collective:
    one gather per (group, state name), and for whole values one exchange per group of what the ranks have, and one more gather
    if some of it belongs to single ranks.
    """
    state: dict[str, dict[str, Any]] = {}
    done: set[int] = set()
    kinds = classify_all(states)
    for parameter in holdings.parameters:
        held = holdings.held[parameter]
        if held.group is None:
            if parameter in states:
                state[held.names[0][1]] = {key: snapshot(value, form.to_cpu) for key, value in states[parameter].items()}
        elif id(held.group) not in done:
            done.add(id(held.group))
            _GroupStates(held.group, holdings, states, kinds, form).add_to(state)
    if not form.keep:
        return {}
    parameters = holdings.parameters
    ordered = {name: state[name] for p in parameters for _, name in holdings.held[p].names if name in state}
    groups = []
    for group_state in source["param_groups"]:
        names = [name for number in group_state["params"] for _, name in holdings.held[parameters[number]].names]
        groups.append({**{key: copied(value) for key, value in group_state.items() if key != "params"}, "params": names})
    return {"state": ordered, "param_groups": groups}


class _GroupStates:
    """The state of everything one group holds, and what each state is for the ranks together."""

    def __init__(self, group: Group, holdings: Holdings, states: _ByTarget, kinds: _Kinds, form: Form) -> None:
        """kinds: of ``states``, on this rank.

        Collective unless the values are boxes: an optimizer may keep nothing for an empty part, or not the same everywhere.
        """
        self.group, self.holdings, self.form = group, holdings, form
        self.targets = holdings.in_group(group)
        self.states = {target: states.get(target, {}) for target in self.targets}
        own = [{key: _described(self.states[t][key], kind) for key, kind in kinds.get(t, {}).items()} for t in self.targets]
        everyones = [own]
        if form.values is not Values.BOXES and group.shard.ranks > 1:
            everyones = group.shard.gather_objects([{key: its.to_cpu() for key, its in known.items()} for known in own])
        self.known = [_agreed([its[number] for its in everyones], self.states[t]) for number, t in enumerate(self.targets)]

    def add_to(self, state: dict[str, dict[str, Any]]) -> None:
        form, rank_states = self.form, {}
        for target, known in zip(self.targets, self.known, strict=True):
            whole = is_whole(self.group, target)
            for _, name in self.holdings.held[target].names if known else ():
                state[name] = {
                    key: snapshot(its.value, form.to_cpu)
                    for key, its in known.items()
                    if its.kind is Entry.SCALAR or (whole and its.kind is Entry.OPAQUE)
                }
            rank_states[target] = [key for key, its in known.items() if its.kind is Entry.OPAQUE and not whole]
        for key in dict.fromkeys(key for known in self.known for key, its in known.items() if its.kind is Entry.PER_ELEMENT):
            having = [t for t, known in zip(self.targets, self.known, strict=True) if key in known and _is_per_element(known[key])]
            if form.values is Values.BOXES:
                self._add_boxes(state, key, having)
            else:
                self._add_wholes(state, key, having)
        found = own_states(self.group, self.holdings, self.states, rank_states, form.to_cpu)
        if form.values is Values.WHOLE and any(rank_states.values()):
            found = gather_states(self.group, found, to_cpu=form.to_cpu, keep=form.keep)
        for name, rank_state in found:
            state[name][rank_state.own_key] = rank_state

    def _add_wholes(self, state: dict[str, dict[str, Any]], key: Any, having: list[nn.Parameter]) -> None:
        store = store_of(self.group)
        dtype = next(known[key].dtype for known in self.known if key in known and _is_per_element(known[key]))
        buffer = torch.zeros(store.numel, dtype=dtype, device=store.shard.device)
        places = {target: place for (target, _), place in zip(store.targets, store.grads(buffer), strict=True)}
        for target in having:
            if (value := self.states[target].get(key)) is not None:
                places[target].copy_(value)
        gathered = self.group.gather_full(buffer)
        wholes = [
            value if parallel is None else parallel.whole(value)
            for value, parallel in zip(store.whole(gathered), store.parallel, strict=True)
        ]
        for target in having if self.form.keep else ():
            for index, name in self.holdings.held[target].names:
                state[name][key] = self._value(wholes[index])

    def _value(self, whole: torch.Tensor) -> torch.Tensor:
        """What stands for a gathered value: a copy that keeps nothing else in memory."""
        if self.form.values is Values.WHOLE or self.form.mesh is None:
            return copied(whole, self.form.to_cpu)
        value = mesh_sharded_value(whole, self.form.mesh)
        return value.cpu() if self.form.to_cpu else value

    def _add_boxes(self, state: dict[str, dict[str, Any]], key: Any, having: list[nn.Parameter]) -> None:
        store, members = store_of(self.group), self.group.shard.members
        for target in having:
            value = self.states[target][key].detach().reshape(-1)
            for index, name in self.holdings.held[target].names:
                run = value[store.layout.part_in_shard(index, store.rank).slice] if is_flat(self.group, target) else value
                run = copied(run, to_cpu=True) if self.form.to_cpu else run
                state[name][key] = sharded_value(
                    store.layout, index, store.rank, run, members, self.form.group, store.parallel[index]
                )


@dataclasses.dataclass(frozen=True)
class _Described:
    """One state of one target, in what ranks tell each other of it."""

    kind: Entry
    dtype: torch.dtype | None = None  # of one that has one element per element
    value: Any = None  # of a scalar

    def to_cpu(self) -> _Described:
        return dataclasses.replace(self, value=self.value.cpu()) if isinstance(self.value, torch.Tensor) else self


def _is_per_element(its: _Described) -> bool:
    return its.kind is Entry.PER_ELEMENT


def _described(value: Any, kind: Entry) -> _Described:
    if kind is Entry.PER_ELEMENT:
        return _Described(kind, dtype=value.dtype)
    if kind is Entry.SCALAR:
        return _Described(kind, value=value.detach() if isinstance(value, torch.Tensor) else value)
    return _Described(kind)


def _agreed(everyones: list[dict[Any, _Described]], own: Mapping[Any, Any]) -> dict[Any, _Described]:
    """What a target's states are for all ranks: what one of them finds opaque, or what differs as a scalar, is opaque.

    Scalars and opaque states of the own rank come as it has them.
    """
    agreed: dict[Any, _Described] = {}
    for its in everyones:
        for key, described in its.items():
            known = agreed.setdefault(key, described)
            if known.kind is not described.kind or not _equal(known.value, described.value):
                agreed[key] = _Described(Entry.OPAQUE)
    for key, described in agreed.items():
        if key in own and described.kind is not Entry.PER_ELEMENT:
            agreed[key] = dataclasses.replace(described, value=own[key])
    return agreed


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and (torch.equal(one, other) or bool(one.isnan() & other.isnan()))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))
