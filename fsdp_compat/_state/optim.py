"""The optimizer's state dict, keyed by parameter names, full or sharded, out of the optimizer.

The optimizer holds sharded parameters: a FlatParameter with a part of many parameters, or a part of
a single one each. A state tensor of the same shape has one element per element of the shard, so the
layout of the parameters cuts it too."""

from __future__ import annotations

import dataclasses
import enum
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._engine.group import Group
from .._engine.state_store import store_of
from ..errors import RuntimeUsageError, UsageError, explain
from .optim_alike import Agreed
from .optim_values import StateKind, classify_all, copied, snapshot
from .param_ownership import NamedUnit, ParamOwnership, is_flat, is_whole
from .rank_local import gather_states, part_of, rank_local_states
from .values import mesh_sharded_value, sharded_value

__all__ = [
    "Facts",
    "ExportOptions",
    "NamedUnit",
    "Source",
    "Values",
    "facts_of",
    "is_user_state",
    "optim_state",
    "other_form",
    "source_of",
]


class Values(enum.Enum):
    """The kind of value for a state of a parameter's shape."""

    WHOLE = enum.auto()  # a whole tensor; rank-local states of all ranks come with it
    BOXES = (
        enum.auto()
    )  # this rank's boxes, views of the optimizer's own state; with ``to_cpu`` copies
    DTENSORS = enum.auto()  # a DTensor over the mesh that the model was given


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """The form in which optimizer state is exported."""

    values: Values
    to_cpu: bool
    keep: bool  # False on ranks that need no result
    group: dist.ProcessGroup | None  # of the boxes
    mesh: DeviceMesh | None  # of the DTensors


_ByTarget = Mapping[nn.Parameter, Mapping[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Source:
    """The contents of ``optimizer.state_dict()``, by parameter."""

    states: _ByTarget
    user_states: Mapping[str, Any]  # of no parameter, by the keys that the user gave them
    param_groups: (
        Sequence[Mapping[str, Any]] | None
    )  # as there, but "params" are parameters; None: it has none
    is_tried: bool = False  # the optimizer has no state yet: this is what its first step would make


def other_form(state_dict: Any) -> tuple[str, object] | None:
    """Return (expected, got) for an object that is not an optimizer's state dict; None for one that
    is.

    "param_groups" may be missing, and below names of no parameter there may be anything.
    """
    if not isinstance(state_dict, Mapping) or "state" not in state_dict:
        return "a dict with 'state' and 'param_groups'", list(state_dict) if isinstance(
            state_dict, Mapping
        ) else state_dict
    state, groups = state_dict["state"], state_dict.get("param_groups", ())
    if not isinstance(state, Mapping):
        return "'state': a dict by parameters", state
    for name, entry in state.items():
        if not isinstance(entry, Mapping) and not isinstance(name, str):
            return f"'state' of {name!r}: a dict", entry
    if not isinstance(groups, (list, tuple)):
        return "'param_groups': a list of dicts", groups
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            return f"'param_groups', group {number}: a dict with 'params', a list", group
    return None


def is_user_state(ownership: ParamOwnership, key: object) -> bool:
    """True for a key of a state that belongs to no parameter."""
    return (
        isinstance(key, str)
        and ownership.name_before(key) not in ownership.by_name
        and key not in ownership.by_current_name
    )


def source_of(ownership: ParamOwnership, state_dict: Any, where: str) -> Source:
    """Return the contents of ``optimizer.state_dict()``, whose keys are numbers or the model's
    current names, by parameter.

    Raises UsageError for another dict.
    """
    if (found := other_form(state_dict)) is not None:
        expected, got = found
        raise UsageError(
            explain(
                "This is not an optimizer state dict.",
                expected=expected,
                got=f"{textwrap.shorten(repr(got), 300)} of type {type(got).__name__}",
                where=where,
                fix="pass what optimizer.state_dict() or optim_state_dict(model, optim) returned, "
                "on every rank",
            )
        )
    states: dict[nn.Parameter, Mapping[Any, Any]] = {}
    user_states: dict[str, Any] = {}
    for key, value in state_dict["state"].items():
        if is_user_state(ownership, key):
            user_states[key] = value
            continue
        parameter = _parameter_of(ownership, key, where)
        if not isinstance(value, Mapping):
            raise UsageError(
                explain(
                    "This is not an optimizer state dict.",
                    expected=f"'state' of {key!r}: a dict",
                    got=f"{textwrap.shorten(repr(value), 300)} of type {type(value).__name__}",
                    where=where,
                    fix="pass what optimizer.state_dict() returned, on every rank",
                )
            )
        if not ownership.is_vacant(parameter):
            states[parameter] = value
    if user_states:
        warnings.warn(
            f"{where}: the state of no parameter is copied as it is: "
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
    raise UsageError(
        explain(
            "The optimizer's state is keyed by something else than its parameters.",
            expected="what optimizer.state_dict() returns: parameters by number, 0 to "
            f"{len(parameters) - 1}, or by the names that "
            "model.named_parameters() gives",
            got=f"the key {textwrap.shorten(repr(key), 300)}",
            where=where,
            fix="leave the third argument out; a dict that optim_state_dict has returned needs no "
            "second pass",
        )
    )


@dataclasses.dataclass(frozen=True)
class Facts:
    """A description of a rank's states of one group, for other ranks."""

    is_tried: bool
    has_states: bool  # of any group, of steps that were made
    states: Sequence[Mapping[Any, _Described]]  # by sharded parameter


def facts_of(ownership: ParamOwnership, source: Source) -> Callable[[Group], Facts]:
    """Return what gives the facts of each group."""
    kinds = classify_all(source.states)

    def of_group(group: Group) -> Facts:
        sharded_params = ownership.in_group(group)
        described = [
            {key: _described(source.states[t][key], kind) for key, kind in kinds.get(t, {}).items()}
            for t in sharded_params
        ]
        return Facts(source.is_tried, bool(source.states) and not source.is_tried, described)

    return of_group


def optim_state(
    ownership: ParamOwnership, source: Source, agreed: Agreed, form: ExportOptions
) -> dict[str, Any]:
    """Return {"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}.

    agreed: ``Facts`` of all ranks. The states of groups of which some rank's optimizer has
    parameters are put together in the model's order. With boxes nothing is sent. Else collective:
    one gather per (group, state name), and for whole values one more per group if some of its state
    belongs to single ranks.
    """
    state: dict[str, Any] = {}
    groups = {
        id(its.group): its.group
        for p, its in ownership.held.items()
        if p in agreed.sharded_params and its.group is not None
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
    first = [
        name for parameter in ownership.parameters for _, name in ownership.held[parameter].names
    ]
    result: dict[str, Any] = {
        "state": {name: state[name] for name in dict.fromkeys([*first, *state]) if name in state}
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
        everyones: Sequence[Facts],
        form: ExportOptions,
    ) -> None:
        """everyones: of the ranks of the shard axis, which find the same, also where one of them
        raises.

        An optimizer may keep nothing for an empty part, or not the same everywhere.
        """
        self.group, self.ownership, self.form = group, ownership, form
        self.sharded_params = ownership.in_group(group)
        self.states = {param: source.states.get(param, {}) for param in self.sharded_params}
        if any(
            facts.has_states for facts in everyones
        ):  # a tried-out state counts only if no rank has made a step
            nothing = [dict[Any, _Described]()] * len(self.sharded_params)
            everyones = [
                dataclasses.replace(facts, states=nothing) if facts.is_tried else facts
                for facts in everyones
            ]
            if source.is_tried:
                self.states = {param: {} for param in self.sharded_params}
        by_target = list(
            zip(*(facts.states for facts in everyones), strict=True)
        )  # for each sharded parameter, what every rank has
        self.known = [
            _agreed(by_rank, self.states[t])
            for t, by_rank in zip(self.sharded_params, by_target, strict=True)
        ]
        for param, known, by_rank in zip(self.sharded_params, self.known, by_target, strict=True):
            for key in (key for key, its in known.items() if _is_per_element(its)):
                self._require_everywhere(param, key, [key in described for described in by_rank])

    def _require_everywhere(self, param: nn.Parameter, key: Any, there: list[bool]) -> None:
        """Raise UsageError if a rank lacks a state for its part of a parameter: in the whole it
        would be zeros."""
        names, members = self.ownership.held[param].names, self.group.shard.members
        for rank, has in enumerate(there):
            if not has and (is_flat(self.group) or part_of(self.group, param, names, rank).runs):
                raise RuntimeUsageError(
                    explain(
                        "The optimizers of the ranks do not keep the same state.",
                        expected="every state of a parameter on all ranks that have a part of it",
                        got=f"the state {key!r} of {names[0][1]!r}: on rank "
                        f"{members[there.index(True)]}, not on {members[rank]}",
                        where=f"{self.ownership.where}, {self.group.name}",
                        fix="step the optimizer, and load its state, on every rank alike",
                    )
                )

    def add_to(self, state: dict[str, dict[str, Any]]) -> None:
        form, rank_states = self.form, {}
        for param, known in zip(self.sharded_params, self.known, strict=True):
            whole = is_whole(self.group)
            for _, name in self.ownership.held[param].names if known else ():
                state[name] = {
                    key: snapshot(its.value, form.to_cpu)
                    for key, its in known.items()
                    if its.kind is StateKind.SCALAR or (whole and its.kind is StateKind.RANK_LOCAL)
                }
            rank_states[param] = [
                key for key, its in known.items() if its.kind is StateKind.RANK_LOCAL and not whole
            ]
        per_element: dict[
            tuple[Any, torch.dtype | None], list[nn.Parameter]
        ] = {}  # parameters of one group may differ in dtype
        for param, known in zip(self.sharded_params, self.known, strict=True):
            for key, its in known.items():
                if _is_per_element(its):
                    per_element.setdefault((key, its.dtype), []).append(param)
        for (key, dtype), having in per_element.items():
            if form.values is Values.BOXES:
                self._add_boxes(state, key, dtype, having)
            else:
                self._add_wholes(state, key, dtype, having)
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
        having: list[nn.Parameter],
    ) -> None:
        store = store_of(self.group)
        buffer = torch.zeros(store.numel, dtype=dtype, device=store.shard.device)
        places = {
            param: place
            for (param, _), place in zip(store.sharded_params, store.grads(buffer), strict=True)
        }
        for param in having:
            if (value := self.states[param].get(key)) is not None:
                places[param].copy_(value)
        gathered = self.group.gather_full(buffer)
        wholes = [
            value if parallel is None else parallel.whole(value)
            for value, parallel in zip(store.whole(gathered), store.parallel, strict=True)
        ]
        for param in having if self.form.keep else ():
            for index, name in self.ownership.held[param].names:
                state[name][key] = self._value(wholes[index])

    def _value(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a gathered value in the form asked for: a copy that keeps nothing else in
        memory."""
        if self.form.values is Values.WHOLE or self.form.mesh is None:
            return copied(whole, self.form.to_cpu)
        value = mesh_sharded_value(whole, self.form.mesh)
        return value.cpu() if self.form.to_cpu else value

    def _add_boxes(
        self,
        state: dict[str, dict[str, Any]],
        key: Any,
        dtype: torch.dtype | None,
        having: list[nn.Parameter],
    ) -> None:
        store, members = store_of(self.group), self.group.shard.members
        for (
            param
        ) in having:  # who has no part of a parameter has boxes without elements, as torch has them
            value = (
                self.states[param]
                .get(key, store.shard.new_empty(0, dtype=dtype))
                .detach()
                .reshape(-1)
            )
            for index, name in self.ownership.held[param].names:
                run = value[store.part_in_sharded_param(index).slice]
                run = copied(run, to_cpu=True) if self.form.to_cpu else run
                state[name][key] = sharded_value(
                    *store.cut(index),
                    store.rank,
                    run,
                    members,
                    self.form.group,
                    store.parallel[index],
                )


@dataclasses.dataclass(frozen=True)
class _Described:
    """One state of one sharded parameter, in what ranks tell each other of it."""

    kind: StateKind
    dtype: torch.dtype | None = None  # of one that has one element per element
    value: Any = None  # of a scalar


def _is_per_element(its: _Described) -> bool:
    return its.kind is StateKind.PER_ELEMENT


def _described(value: Any, kind: StateKind) -> _Described:
    if kind is StateKind.PER_ELEMENT:
        return _Described(kind, dtype=value.dtype)
    if kind is StateKind.SCALAR:
        return _Described(
            kind, value=value.detach().cpu() if isinstance(value, torch.Tensor) else value
        )
    return _Described(kind)


def _agreed(
    everyones: Sequence[Mapping[Any, _Described]], own: Mapping[Any, Any]
) -> dict[Any, _Described]:
    """Return the description of a sharded parameter's states that holds for all ranks. A state is
    rank-local if one rank finds it so, or if a scalar or a dtype differs.

    Scalars and rank-local states have this rank's values.
    """
    agreed: dict[Any, _Described] = {}
    for its in everyones:
        for key, described in its.items():
            known = agreed.setdefault(key, described)
            if (known.kind, known.dtype) != (described.kind, described.dtype) or not _equal(
                known.value, described.value
            ):
                agreed[key] = _Described(StateKind.RANK_LOCAL)
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
