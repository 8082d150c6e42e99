"""Exports the optimizer's state dict, keyed by parameter names, full or sharded.

The optimizer holds sharded parameters: FlatParameters, each with parts of many parameters, or a
part of a single parameter each. A state tensor of the same shape has one element per element of the
shard, so the layout of the parameters applies to it too."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from .. import _torch_private
from .._engine import rendezvous
from .._engine.group import Group
from .._engine.state_store import store_of
from ..api import StateDictType
from ..errors import RuntimeUsageError, UsageError
from .dry_run import first_states
from .forms import get_state_dict_type
from .older_optimizers import convert
from .optim_agreement import Agreed, agree_together
from .optim_contents import (
    Kinds,
    ParamOwnership,
    StateKind,
    classify_all,
    is_user_state,
    is_whole,
    not_a_state_dict,
    other_form,
    ownership_of,
    require_units,
    snapshot,
)
from .rank_local import gather_states, rank_local_names, rank_local_states, warn_of_layout
from .sharded_values import copied, cut_of, mesh_sharded_value, sharded_value
from .units import model_units_in, refuse_extensions, require_idle, units_of


class Values(enum.Enum):
    """What the exported dict holds for a state of a parameter's shape."""

    WHOLE = enum.auto()  # a whole tensor; rank-local states of all ranks are included
    BOXES = enum.auto()  # copies of this rank's boxes
    DTENSORS = enum.auto()  # a DTensor over the device mesh that was passed to the model


@dataclasses.dataclass(frozen=True)
class ExportForm:
    """The form in which optimizer state is exported."""

    values: Values
    to_cpu: bool
    rank0_only: bool = False
    # What ``export_optim_state`` finds out:
    keep: bool = True  # False on ranks that need no result
    group: dist.ProcessGroup | None = None  # of the boxes
    mesh: DeviceMesh | None = None  # of the DTensors


def form_set(model: nn.Module) -> ExportForm:
    """Return the form of optimizer state dicts that is set for ``model``."""
    settings = get_state_dict_type(model)
    config: Any = settings.optim_state_dict_config
    values = Values.BOXES
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        values = Values.WHOLE
    elif getattr(config, "_use_dtensor", False):
        values = Values.DTENSORS
    return ExportForm(values, config.offload_to_cpu, getattr(config, "rank0_only", False))


def export_optim_state(
    model: nn.Module,
    optim: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any] | None,
    form: ExportForm,
    *,
    group: dist.ProcessGroup | None = None,
    where: str,
    first_step: bool = False,
) -> dict[str, Any]:
    """Return the optimizer's state by names. Collective: one small exchange, and gathers unless the
    values are boxes.

    groups: the optimizer's parameter groups. state_dict: what ``optim.state_dict()`` returned;
    None: it is called. group: its rank 0 keeps the result if ``rank0_only``; None: the model's
    group. first_step: for an optimizer without state, return what its first step would create.
    """
    call, label = where.partition("(")[0], f"the state of {type(optim).__name__}"
    require_idle(model, call)
    units = units_of(model)
    require_units(units, model, label)
    all_groups = [each for named in units for each in named.unit.groups]
    if form.values is Values.WHOLE:
        refuse_extensions(all_groups, call)
    rendezvous.require_all_ranks(call, all_groups)
    ownership, source, problem, kinds = None, None, None, Kinds()
    facts: Any = None
    try:
        convert(optim)
        ownership = ownership_of(groups, label, units, model)
        given = optim.state_dict() if state_dict is None else state_dict
        source = _source_of(ownership, given, where)
        if first_step and not source.states and not optim.state:
            states = first_states(ownership, optim)
            source = dataclasses.replace(source, states=states, is_dry_run=True)
        kinds = classify_all(source.states)
        facts = functools.partial(_facts_of, ownership, source, kinds)
    except Exception as error:  # raised later, after the other ranks have been told
        ownership, problem = None, error
    agreed = agree_together(ownership, all_groups, problem, facts, where)
    assert ownership is not None
    assert source is not None
    warn_of_layout(rank_local_names(ownership, kinds), optim, stacklevel=4)
    first = model_units_in(model)[0]
    is_first = first.mesh.is_first if group is None else dist.get_rank(group) == 0
    form = dataclasses.replace(
        form, keep=is_first or not form.rank0_only, group=first.group, mesh=first.device_mesh
    )
    return _exported(ownership, source, agreed, form)


@dataclasses.dataclass(frozen=True)
class _Source:
    """The contents of ``optimizer.state_dict()``, by parameter."""

    states: Mapping[nn.Parameter, Mapping[Any, Any]]
    user_states: Mapping[str, Any]  # states that belong to no parameter, by the user's keys
    # The dict's, with parameters as "params"; None if it has none.
    param_groups: Sequence[Mapping[str, Any]] | None
    is_dry_run: bool = False  # the optimizer has no state yet: what its first step would create


def _source_of(ownership: ParamOwnership, state_dict: Any, where: str) -> _Source:
    """Return the contents of ``optimizer.state_dict()`` by parameter. Its keys are numbers or the
    model's current names.

    Raises UsageError for any other dict.
    """
    if (found := other_form(state_dict)) is not None:
        raise not_a_state_dict(UsageError, *found, where)
    states: dict[nn.Parameter, Mapping[Any, Any]] = {}
    user_states: dict[str, Any] = {}
    for key, value in state_dict["state"].items():
        if is_user_state(ownership, key):
            user_states[key] = value
            continue
        parameter = _parameter_of(ownership, key, where)
        if not isinstance(value, Mapping):
            raise not_a_state_dict(UsageError, f"'state' of {key!r}: a dict", value, where)
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
    return _Source(states, user_states, groups)


def _parameter_of(ownership: ParamOwnership, key: object, where: str) -> nn.Parameter:
    parameters = ownership.parameters
    if isinstance(key, str) and key in ownership.by_current_name:
        return ownership.by_current_name[key]
    if isinstance(key, int) and 0 <= key < len(parameters):
        return parameters[key]
    raise UsageError.of(
        "The optimizer's state is not keyed by its parameters.",
        expected="what optimizer.state_dict() returns: parameters by number, 0 to "
        f"{len(parameters) - 1}, or by the names that model.named_parameters() gives",
        got=f"the key {textwrap.shorten(repr(key), 300)}",
        where=where,
        fix="leave the third argument out; a dict that optim_state_dict returned needs no "
        "second conversion",
    )


# -- what ranks tell each other about their states


@dataclasses.dataclass(frozen=True)
class _StateFacts:
    """One state of one sharded parameter."""

    kind: StateKind
    dtype: torch.dtype | None = None  # of a per-element state
    value: Any = None  # of a scalar state

    @property
    def is_per_element(self) -> bool:
        return self.kind is StateKind.PER_ELEMENT


@dataclasses.dataclass(frozen=True)
class _Facts:
    """A rank's states of one group."""

    is_dry_run: bool
    has_states: bool  # the optimizer has states, of any group, from steps that it made
    states: Sequence[Mapping[Any, _StateFacts]]  # one per sharded parameter


def _facts_of(ownership: ParamOwnership, source: _Source, kinds: Kinds, group: Group) -> _Facts:
    """Return this rank's description of its states of a group."""
    described = [
        {
            key: _facts_of_state(source.states[param][key], kind)
            for key, kind in kinds.get(param, {}).items()
        }
        for param in ownership.in_group(group)
    ]
    return _Facts(source.is_dry_run, bool(source.states) and not source.is_dry_run, described)


def _facts_of_state(value: Any, kind: StateKind) -> _StateFacts:
    if kind is StateKind.PER_ELEMENT:
        return _StateFacts(kind, dtype=value.dtype)
    return _StateFacts(kind, value=copied(value, True) if kind is StateKind.SCALAR else None)


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
            is_alike = (known.kind, known.dtype) == (described.kind, described.dtype)
            if not is_alike or not _equal(known.value, described.value):
                agreed[key] = _StateFacts(StateKind.RANK_LOCAL)
    return {
        key: dataclasses.replace(described, value=own[key])
        if key in own and not described.is_per_element
        else described
        for key, described in agreed.items()
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and (
            torch.equal(one, other) or bool(one.isnan() & other.isnan())
        )
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


# -- the result


def _exported(
    ownership: ParamOwnership, source: _Source, agreed: Agreed, form: ExportForm
) -> dict[str, Any]:
    """Return {"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}.

    agreed: ``_Facts`` of all ranks. Groups that any rank's optimizer has parameters of are
    processed in the model's order. Boxes send nothing. Other values are collective: one gather per
    (group, state name), and for whole values one more per group with rank-local state.
    """
    state: dict[str, Any] = {}
    for group in ownership.groups_of(agreed.sharded_params):
        _GroupStates(group, ownership, source, agreed.facts[id(group)], form).add_to(state)
    for parameter, name in ownership.unmanaged:
        if parameter in source.states:
            state[name] = snapshot(dict(source.states[parameter]), form.to_cpu)
    if not form.keep:
        return {}
    in_order = [
        name for parameter in ownership.parameters for name in ownership.names_in(parameter)
    ]
    result: dict[str, Any] = {
        "state": {name: state[name] for name in dict.fromkeys([*in_order, *state]) if name in state}
    }
    result["state"].update(snapshot(dict(source.user_states), form.to_cpu))
    if source.param_groups is not None:
        result["param_groups"] = [
            {
                **{key: copied(value) for key, value in group.items() if key != "params"},
                "params": [name for p in group["params"] for name in ownership.names_in(p)],
            }
            for group in source.param_groups
        ]
    return result


_Params = Sequence[nn.Parameter]
_Named = Iterator[tuple[str, torch.Tensor]]


class _GroupStates:
    """The optimizer states of one group, with the description that the ranks agree on."""

    def __init__(
        self,
        group: Group,
        ownership: ParamOwnership,
        source: _Source,
        all_facts: Sequence[_Facts],
        form: ExportForm,
    ) -> None:
        """all_facts: of all ranks of the shard axis, so that they come to the same result, or raise
        the same error.

        An optimizer may keep no state for an empty part, or different states on different ranks.
        """
        self.group, self.ownership, self.form = group, ownership, form
        self.store, params = store_of(group), ownership.in_group(group)
        self.states = {param: source.states.get(param, {}) for param in params}
        by_rank = [facts.states for facts in all_facts]
        # States of a dry run count only if no rank has made a step.
        if any(facts.has_states for facts in all_facts):
            nothing = [dict[Any, _StateFacts]()] * len(params)
            by_rank = [nothing if facts.is_dry_run else facts.states for facts in all_facts]
            if source.is_dry_run:
                self.states = {param: {} for param in params}
        self.known: dict[nn.Parameter, dict[Any, _StateFacts]] = {}
        for param, described in zip(params, zip(*by_rank, strict=True), strict=True):
            self.known[param] = _agreed(described, self.states[param])
            for key, state in self.known[param].items():
                if state.is_per_element:
                    self._require_everywhere(param, key, [key in its for its in described])

    def _require_everywhere(self, param: nn.Parameter, key: Any, present: list[bool]) -> None:
        """Raise UsageError if a rank lacks a state for its part of a parameter, which would
        otherwise be zeros in the whole."""
        names, members = self.ownership.held[param].names, self.group.shard.members
        for rank, has in enumerate(present):
            shapes = [self.store.sharded_shape(index, rank) for index, _ in names]
            if not has and (self.store.is_flattened or any(map(math.prod, shapes))):
                raise RuntimeUsageError.of(
                    "The optimizers do not keep the same state on all ranks.",
                    expected="every state of a parameter on all ranks that have a part of it",
                    got=f"the state {key!r} of {names[0][1]!r}: on rank "
                    f"{members[present.index(True)]}, not on {members[rank]}",
                    where=f"{self.ownership.where}, {self.group.name}",
                    fix="step the optimizer, and load its state, in the same way on every rank",
                )

    def add_to(self, state: dict[str, dict[str, Any]]) -> None:
        form, whole = self.form, is_whole(self.group)
        rank_states = dict[nn.Parameter, list[Any]]()
        # By dtype too: the states of parameters of one group may differ in it.
        per_element: dict[tuple[Any, torch.dtype | None], list[nn.Parameter]] = {}
        for param, known in self.known.items():
            rank_states[param], as_they_are = [], dict[Any, Any]()
            for key, entry in known.items():
                if entry.is_per_element:
                    per_element.setdefault((key, entry.dtype), []).append(param)
                elif entry.kind is StateKind.SCALAR or whole:
                    as_they_are[key] = entry.value
                else:
                    rank_states[param].append(key)
            for name in self.ownership.names_in(param) if known else ():
                state[name] = snapshot(as_they_are, form.to_cpu)
        for (key, dtype), holders in per_element.items():
            if form.values is not Values.WHOLE and _torch_private.is_dtensor(holders[0]):
                values = self._dtensors(key, dtype, holders)
            elif form.values is Values.BOXES:
                values = self._boxes(key, dtype, holders)
            else:
                values = self._wholes(key, dtype, holders)
            for name, value in values:
                state[name][key] = value
        found = rank_local_states(self.group, self.ownership, self.states, rank_states, form.to_cpu)
        if form.values is Values.WHOLE and any(rank_states.values()):
            found = gather_states(self.group, found, to_cpu=form.to_cpu, keep=form.keep)
        for name, rank_state in found:
            state[name][rank_state.own_key] = rank_state

    def _wholes(self, key: Any, dtype: torch.dtype | None, holders: _Params) -> _Named:
        """Gathered: copies that keep no other memory alive, or DTensors over the model's mesh."""
        store, form, held = self.store, self.form, {*holders}
        buffer = torch.zeros(store.numel, dtype=dtype, device=store.shard.device)
        for (param, _), place in zip(store.sharded_params, store.grads(buffer), strict=True):
            value = self.states[param].get(key) if param in held else None
            if value is not None:
                place.copy_(_torch_private.local_part(value))
        gathered = store.whole(self.group.gather_full(buffer))
        wholes = [
            value if parallel is None else parallel.whole(value)
            for value, parallel in zip(gathered, store.parallel, strict=True)
        ]
        for param in holders if form.keep else ():
            for index, name in self.ownership.held[param].names:
                if form.values is Values.WHOLE or form.mesh is None:
                    yield name, copied(wholes[index], form.to_cpu)
                else:
                    value = mesh_sharded_value(wholes[index], form.mesh)
                    yield name, value.cpu() if form.to_cpu else value

    def _dtensors(self, key: Any, dtype: torch.dtype | None, holders: _Params) -> _Named:
        """The states of DTensors are DTensors, on every rank."""
        for param in holders:
            value = self.states[param].get(key)
            if value is None:
                value = torch.zeros_like(param.detach(), dtype=dtype)
            value = copied(value, to_cpu=True) if self.form.to_cpu else value.detach()
            for name in self.ownership.names_in(param):
                yield name, value

    def _boxes(self, key: Any, dtype: torch.dtype | None, holders: _Params) -> _Named:
        """A rank without a part of a parameter has boxes without elements, as in torch."""
        store = self.store
        nothing = store.shard.new_empty(0, dtype=dtype)
        for param in holders:
            value = self.states[param].get(key, nothing).detach().reshape(-1)
            for index, name in self.ownership.held[param].names:
                run = copied(value[store.part_in_sharded_param(index).slice], self.form.to_cpu)
                yield name, sharded_value(cut_of(self.group, index, self.form.group), run)
