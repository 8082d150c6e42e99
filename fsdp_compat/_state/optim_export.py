"""Exports the optimizer's state dict, keyed by parameter names, full or sharded.

The optimizer holds sharded parameters: FlatParameters, each with parts of many parameters, or a
part of a single parameter each. A state tensor of the same shape has one element per element of the
shard, so the layout of the parameters applies to it too."""

from __future__ import annotations

import dataclasses
import enum
import math
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_private
from .._engine.group import Group
from .._engine.state_store import store_of
from ..errors import RuntimeUsageError, UsageError
from .optim_agreement import Agreed
from .optim_contents import (
    ParamOwnership,
    StateKind,
    classify_all,
    is_flat,
    is_user_state,
    is_whole,
    not_a_state_dict,
    other_form,
    snapshot,
)
from .rank_local import gather_states, rank_local_states
from .sharded_values import copied, mesh_sharded_value, sharded_value
from .units import NamedUnit

__all__ = [
    "Facts",
    "ExportOptions",
    "NamedUnit",
    "Source",
    "Values",
    "facts_of",
    "is_user_state",
    "not_a_state_dict",
    "optim_state",
    "other_form",
    "source_of",
]


class Values(enum.Enum):
    """What the exported dict holds for a state of a parameter's shape."""

    WHOLE = enum.auto()  # a whole tensor; rank-local states of all ranks are included
    BOXES = enum.auto()  # copies of this rank's boxes
    DTENSORS = enum.auto()  # a DTensor over the device mesh that was passed to the model


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """The form in which optimizer state is exported."""

    values: Values
    to_cpu: bool
    keep: bool  # False on ranks that need no result
    group: dist.ProcessGroup | None  # of the boxes
    mesh: DeviceMesh | None  # of the DTensors


_StatesByParam = Mapping[nn.Parameter, Mapping[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Source:
    """The contents of ``optimizer.state_dict()``, by parameter."""

    states: _StatesByParam
    user_states: Mapping[str, Any]  # states that belong to no parameter, by the user's keys
    # The dict's, with parameters as "params"; None if it has none.
    param_groups: Sequence[Mapping[str, Any]] | None
    is_dry_run: bool = False  # the optimizer has no state yet: what its first step would create


def source_of(ownership: ParamOwnership, state_dict: Any, where: str) -> Source:
    """Return the contents of ``optimizer.state_dict()`` by parameter. Its keys are numbers or the
    model's current names.

    Raises UsageError for any other dict.
    """
    if (found := other_form(state_dict)) is not None:
        raise not_a_state_dict(
            UsageError,
            *found,
            where,
            "pass what optimizer.state_dict() or optim_state_dict(model, optim) returned, on every "
            "rank",
        )
    states: dict[nn.Parameter, Mapping[Any, Any]] = {}
    user_states: dict[str, Any] = {}
    for key, value in state_dict["state"].items():
        if is_user_state(ownership, key):
            user_states[key] = value
            continue
        parameter = _parameter_of(ownership, key, where)
        if not isinstance(value, Mapping):
            raise not_a_state_dict(
                UsageError,
                f"'state' of {key!r}: a dict",
                value,
                where,
                "pass what optimizer.state_dict() returned, on every rank",
            )
        if not ownership.is_vacant(parameter):
            states[parameter] = value
    if user_states:
        warnings.warn(
            f"{where}: state that belongs to no parameter is copied unchanged: "
            f"{textwrap.shorten(', '.join(user_states), 300)}.",
            stacklevel=4,
        )
    groups = None
    if "param_groups" in state_dict:
        groups = [
            {**group, "params": [_parameter_of(ownership, key, where) for key in group["params"]]}
            for group in state_dict["param_groups"]
        ]
    return Source(states, user_states, groups)


def _parameter_of(ownership: ParamOwnership, key: object, where: str) -> nn.Parameter:
    parameters = ownership.parameters
    if isinstance(key, str) and key in ownership.by_current_name:
        return ownership.by_current_name[key]
    if isinstance(key, int) and 0 <= key < len(parameters):
        return parameters[key]
    raise UsageError.of(
        "The optimizer's state is not keyed by its parameters.",
        expected="what optimizer.state_dict() returns: parameters by number, 0 to "
        f"{len(parameters) - 1}, or by the names that "
        "model.named_parameters() gives",
        got=f"the key {textwrap.shorten(repr(key), 300)}",
        where=where,
        fix="leave the third argument out; a dict that optim_state_dict returned needs no "
        "second conversion",
    )


@dataclasses.dataclass(frozen=True)
class Facts:
    """A description of a rank's states of one group, for other ranks."""

    is_dry_run: bool
    has_states: bool  # the optimizer has states, of any group, from steps that it made
    states: Sequence[Mapping[Any, _StateFacts]]  # one per sharded parameter


def facts_of(ownership: ParamOwnership, source: Source) -> Callable[[Group], Facts]:
    """Return a function that returns the facts of a group."""
    kinds = classify_all(source.states)

    def of_group(group: Group) -> Facts:
        sharded_params = ownership.in_group(group)
        described = [
            {
                key: _facts_of_state(source.states[p][key], kind)
                for key, kind in kinds.get(p, {}).items()
            }
            for p in sharded_params
        ]
        return Facts(source.is_dry_run, bool(source.states) and not source.is_dry_run, described)

    return of_group


def optim_state(
    ownership: ParamOwnership, source: Source, agreed: Agreed, form: ExportOptions
) -> dict[str, Any]:
    """Return {"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}.

    agreed: ``Facts`` of all ranks. Groups that any rank's optimizer has parameters of are processed
    in the model's order. Boxes send nothing. Other values are collective: one gather per (group,
    state name), and for whole values one more per group with rank-local state.
    """
    state: dict[str, Any] = {}
    groups = {
        id(contents.group): contents.group
        for p, contents in ownership.held.items()
        if p in agreed.sharded_params and contents.group is not None
    }
    for number, group in groups.items():
        _GroupStates(group, ownership, source, agreed.facts[number], form).add_to(state)
    for parameter, name in ownership.unmanaged:
        if parameter in source.states:
            state[name] = {
                key: snapshot(value, form.to_cpu) for key, value in source.states[parameter].items()
            }
    if not form.keep:
        return {}
    in_order = [
        name for parameter in ownership.parameters for _, name in ownership.held[parameter].names
    ]
    result: dict[str, Any] = {
        "state": {name: state[name] for name in dict.fromkeys([*in_order, *state]) if name in state}
    }
    result["state"].update(
        {key: snapshot(value, form.to_cpu) for key, value in source.user_states.items()}
    )
    if source.param_groups is not None:
        result["param_groups"] = [
            {
                **{key: copied(value) for key, value in group.items() if key != "params"},
                "params": [
                    name
                    for parameter in group["params"]
                    for _, name in ownership.held[parameter].names
                ],
            }
            for group in source.param_groups
        ]
    return result


class _GroupStates:
    """The optimizer states of one group, with the description that the ranks agree on."""

    def __init__(
        self,
        group: Group,
        ownership: ParamOwnership,
        source: Source,
        all_facts: Sequence[Facts],
        form: ExportOptions,
    ) -> None:
        """all_facts: of all ranks of the shard axis, so that they come to the same result, or raise
        the same error.

        An optimizer may keep no state for an empty part, or different states on different ranks.
        """
        self.group, self.ownership, self.form = group, ownership, form
        self.sharded_params = ownership.in_group(group)
        self.states = {param: source.states.get(param, {}) for param in self.sharded_params}
        # States of a dry run count only if no rank has made a step.
        if any(facts.has_states for facts in all_facts):
            nothing = [dict[Any, _StateFacts]()] * len(self.sharded_params)
            all_facts = [
                dataclasses.replace(facts, states=nothing) if facts.is_dry_run else facts
                for facts in all_facts
            ]
            if source.is_dry_run:
                self.states = {param: {} for param in self.sharded_params}
        # For each sharded parameter: the states of every rank.
        by_param = list(zip(*(facts.states for facts in all_facts), strict=True))
        self.known = [
            _agreed(by_rank, self.states[param])
            for param, by_rank in zip(self.sharded_params, by_param, strict=True)
        ]
        for param, known, by_rank in zip(self.sharded_params, self.known, by_param, strict=True):
            for key in (key for key, state in known.items() if _is_per_element(state)):
                self._require_everywhere(param, key, [key in described for described in by_rank])

    def _require_everywhere(self, param: nn.Parameter, key: Any, present: list[bool]) -> None:
        """Raise UsageError if a rank lacks a state for its part of a parameter, which would
        otherwise be zeros in the whole."""
        names, members = self.ownership.held[param].names, self.group.shard.members
        for rank, has in enumerate(present):
            shapes = [store_of(self.group).sharded_shape(index, rank) for index, _ in names]
            if not has and (is_flat(self.group) or any(map(math.prod, shapes))):
                raise RuntimeUsageError.of(
                    "The optimizers do not keep the same state on all ranks.",
                    expected="every state of a parameter on all ranks that have a part of it",
                    got=f"the state {key!r} of {names[0][1]!r}: on rank "
                    f"{members[present.index(True)]}, not on {members[rank]}",
                    where=f"{self.ownership.where}, {self.group.name}",
                    fix="step the optimizer, and load its state, in the same way on every rank",
                )

    def add_to(self, state: dict[str, dict[str, Any]]) -> None:
        form, rank_states = self.form, {}
        for param, known in zip(self.sharded_params, self.known, strict=True):
            whole = is_whole(self.group)
            for _, name in self.ownership.held[param].names if known else ():
                state[name] = {
                    key: snapshot(entry.value, form.to_cpu)
                    for key, entry in known.items()
                    if entry.kind is StateKind.SCALAR
                    or (whole and entry.kind is StateKind.RANK_LOCAL)
                }
            rank_states[param] = [
                key
                for key, entry in known.items()
                if entry.kind is StateKind.RANK_LOCAL and not whole
            ]
        # By dtype too: the states of parameters of one group may differ in it.
        per_element: dict[tuple[Any, torch.dtype | None], list[nn.Parameter]] = {}
        for param, known in zip(self.sharded_params, self.known, strict=True):
            for key, entry in known.items():
                if _is_per_element(entry):
                    per_element.setdefault((key, entry.dtype), []).append(param)
        for (key, dtype), holders in per_element.items():
            if form.values is not Values.WHOLE and _torch_private.is_dtensor(holders[0]):
                self._add_dtensors(state, key, dtype, holders)
            elif form.values is Values.BOXES:
                self._add_boxes(state, key, dtype, holders)
            else:
                self._add_wholes(state, key, dtype, holders)
        found = rank_local_states(self.group, self.ownership, self.states, rank_states, form.to_cpu)
        if form.values is Values.WHOLE and any(rank_states.values()):
            found = gather_states(self.group, found, to_cpu=form.to_cpu, keep=form.keep)
        for name, rank_state in found:
            state[name][rank_state.own_key] = rank_state

    def _add_wholes(
        self,
        state: dict[str, dict[str, Any]],
        key: Any,
        dtype: torch.dtype | None,
        holders: list[nn.Parameter],
    ) -> None:
        store = store_of(self.group)
        buffer = torch.zeros(store.numel, dtype=dtype, device=store.shard.device)
        places = {
            param: place
            for (param, _), place in zip(store.sharded_params, store.grads(buffer), strict=True)
        }
        for param in holders:
            if (value := self.states[param].get(key)) is not None:
                places[param].copy_(_torch_private.local_part(value))
        gathered = self.group.gather_full(buffer)
        wholes = [
            value if parallel is None else parallel.whole(value)
            for value, parallel in zip(store.whole(gathered), store.parallel, strict=True)
        ]
        for param in holders if self.form.keep else ():
            for index, name in self.ownership.held[param].names:
                state[name][key] = self._value(wholes[index])

    def _value(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a gathered value in the requested form: a copy that keeps no other memory
        alive."""
        if self.form.values is Values.WHOLE or self.form.mesh is None:
            return copied(whole, self.form.to_cpu)
        value = mesh_sharded_value(whole, self.form.mesh)
        return value.cpu() if self.form.to_cpu else value

    def _add_dtensors(
        self,
        state: dict[str, dict[str, Any]],
        key: Any,
        dtype: torch.dtype | None,
        holders: list[nn.Parameter],
    ) -> None:
        """The states of DTensors are DTensors, on every rank."""
        for param in holders:
            value = self.states[param].get(key)
            if value is None:
                value = torch.zeros_like(param.detach(), dtype=dtype)
            value = copied(value, to_cpu=True) if self.form.to_cpu else value.detach()
            for _, name in self.ownership.held[param].names:
                state[name][key] = value

    def _add_boxes(
        self,
        state: dict[str, dict[str, Any]],
        key: Any,
        dtype: torch.dtype | None,
        holders: list[nn.Parameter],
    ) -> None:
        store, members = store_of(self.group), self.group.shard.members
        # A rank without a part of a parameter has boxes without elements, as in torch.
        for param in holders:
            value = (
                self.states[param]
                .get(key, store.shard.new_empty(0, dtype=dtype))
                .detach()
                .reshape(-1)
            )
            for index, name in self.ownership.held[param].names:
                run = copied(value[store.part_in_sharded_param(index).slice], self.form.to_cpu)
                state[name][key] = sharded_value(
                    *store.cut(index),
                    store.rank,
                    run,
                    members,
                    self.form.group,
                    store.parallel[index],
                )


@dataclasses.dataclass(frozen=True)
class _StateFacts:
    """One state of one sharded parameter, as ranks describe it to each other."""

    kind: StateKind
    dtype: torch.dtype | None = None  # of a per-element state
    value: Any = None  # of a scalar state


def _is_per_element(state: _StateFacts) -> bool:
    return state.kind is StateKind.PER_ELEMENT


def _facts_of_state(value: Any, kind: StateKind) -> _StateFacts:
    if kind is StateKind.PER_ELEMENT:
        return _StateFacts(kind, dtype=value.dtype)
    if kind is StateKind.SCALAR:
        return _StateFacts(
            kind, value=value.detach().cpu() if isinstance(value, torch.Tensor) else value
        )
    return _StateFacts(kind)


def _agreed(
    by_rank: Sequence[Mapping[Any, _StateFacts]], own: Mapping[Any, Any]
) -> dict[Any, _StateFacts]:
    """Return a description of a sharded parameter's states that holds on all ranks. A state is
    rank-local if any rank describes it so, or if scalars or dtypes differ.

    Scalars and rank-local states have this rank's values.
    """
    agreed: dict[Any, _StateFacts] = {}
    for states in by_rank:
        for key, described in states.items():
            known = agreed.setdefault(key, described)
            if (known.kind, known.dtype) != (described.kind, described.dtype) or not _equal(
                known.value, described.value
            ):
                agreed[key] = _StateFacts(StateKind.RANK_LOCAL)
    for key, described in agreed.items():
        if key in own and described.kind is not StateKind.PER_ELEMENT:
            agreed[key] = dataclasses.replace(described, value=own[key])
    return agreed


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and (
            torch.equal(one, other) or bool(one.isnan() & other.isnan())
        )
    return type(one) is type(other) and bool(one == other or (one != one and other != other))
