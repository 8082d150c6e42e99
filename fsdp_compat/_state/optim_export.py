"""Exports the optimizer's state dict, keyed by parameter names, full or sharded.

A state with the shape of a sharded parameter has one element per element of the shard, so the
layout of the parameters applies to it."""

from __future__ import annotations

import dataclasses
import enum
import math
import textwrap
import typing
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from .. import _torch_private
from .._comm.transport import Transport, are_alike
from .._engine.group import Group
from .._engine.state_store import store_of
from ..api import StateDictType
from ..errors import RuntimeUsageError, UsageError, explain
from .dry_run import first_states
from .forms import get_state_dict_type
from .optim_agreement import OptimizerFacts, describe, global_rank, require_alike
from .optim_contents import (
    CompositeOptimizer,
    HeldStates,
    ParamOwnership,
    StateKind,
    begin,
    inner_optimizers,
    is_whole,
    numbered_state_dict,
    ownership_of,
    require_state_dict,
    snapshot,
)
from .optimizer_checks import cut_state
from .rank_local import gather_objects, gather_states, rank_local_names, rank_state, warn_of_layout
from .sharded_values import copied, cut_of, mesh_sharded_value, sharded_value
from .units import model_units_in, refuse_extensions


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
    first_step: bool = False  # of an optimizer without state: what its first step would create
    # What ``export_optim_state`` finds out:
    keep: bool = True  # False on ranks that need no result
    group: dist.ProcessGroup | None = None  # of the boxes
    mesh: DeviceMesh | None = None  # of the DTensors


def form_set(model: nn.Module) -> ExportForm:
    """Return the form of optimizer state dicts that is set for ``model``."""
    settings = get_state_dict_type(model)
    config: Any = settings.optim_state_dict_config
    rank0_only = getattr(config, "rank0_only", False)
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        return ExportForm(Values.WHOLE, config.offload_to_cpu, rank0_only)
    values = Values.DTENSORS if getattr(config, "_use_dtensor", False) else Values.BOXES
    return ExportForm(values, config.offload_to_cpu, rank0_only, first_step=True)


def export_optim_state(
    model: nn.Module,
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any] | None,
    form: ExportForm,
    where: str,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer's state by names. Collective: one small exchange, and gathers unless the
    values are boxes. groups: the optimizer's parameter groups. state_dict: of ``optimizer``; None:
    take it. group: its rank 0 keeps the result if ``rank0_only``; None: the model's group."""
    call, label = where.partition("(")[0], f"the state of {type(optimizer).__name__}"
    units, all_groups = begin(model, call, label)
    if form.values is Values.WHOLE:
        refuse_extensions(all_groups, call)
    source, problem = None, None
    try:
        cut_state(optimizer)
        ownership = ownership_of(groups, label, units, model)
        is_own = state_dict is None or isinstance(optimizer, CompositeOptimizer)
        given = numbered_state_dict(optimizer) if is_own else state_dict
        source = _source_of(ownership, given, where)
        if form.first_step:
            source = source.with_first_states(optimizer)
    except Exception as error:  # raised later, after the other ranks have been told
        source, problem = None, error
    agreed = _agree(source, all_groups, problem, where)
    assert source is not None
    warn_of_layout(rank_local_names(source), optimizer, stacklevel=4)
    registered = model_units_in(model)
    first, meshes = registered[0], [each.device_mesh for each in registered]
    is_first = first.mesh.is_first if group is None else dist.get_rank(group) == 0
    form = dataclasses.replace(
        form,
        keep=is_first or not form.rank0_only,
        group=first.group,
        mesh=next((mesh for mesh in meshes if mesh is not None), None),
    )
    state: dict[str, Any] = {}
    for each in all_groups:
        _GroupStates(each, source, agreed[id(each)], form).add_to(state)
    if isinstance(optimizer, CompositeOptimizer):
        state |= _owned_states(source, all_groups, form)
    return _result(source, optimizer, state, form.to_cpu) if form.keep else {}


def _owned_states(source: _Source, groups: Sequence[Group], form: ExportForm) -> dict[str, Any]:
    """Return the states of whole parameters: own ones, or whole values of all. Collective then."""
    own = {name: snapshot(its, form.to_cpu) for name, its in source.owned.items()}
    found = dict(own)
    axes = dict.fromkeys(group.shard for group in groups if group.shard.ranks > 1)
    device = torch.device("cpu") if form.to_cpu else groups[0].store.shard.device
    for axis in axes if form.values is Values.WHOLE else ():
        for _, states in gather_objects(axis, own, form.keep, device, "the state that ranks own"):
            found |= states
    return found


def _result(
    source: _Source, optimizer: Optimizer, state: dict[str, Any], to_cpu: bool
) -> dict[str, Any]:
    """Return the state dict by names."""
    by_group: Sequence[Sequence[str]] = source.ownership.names_by_group
    state |= {name: snapshot(dict(its), to_cpu) for name, its in source.unmanaged.items()}
    in_order = [name for names in by_group for name in names if name in state]
    names = dict.fromkeys(in_order + list(state))
    if isinstance(optimizer, CompositeOptimizer):
        by_group = optimizer.group_names
    user_states = snapshot(dict(source.user_states), to_cpu)
    result: dict[str, Any] = {"state": {name: state[name] for name in names} | user_states}
    if source.param_groups is not None:
        result["param_groups"] = [
            {**{key: copied(value) for key, value in group.items()}, "params": list(names)}
            for group, names in zip(source.param_groups, by_group, strict=False)
        ]
    return result


@dataclasses.dataclass(frozen=True)
class _Source(HeldStates):
    """The contents of ``optimizer.state_dict()``, by parameter."""

    user_states: Mapping[str, Any]  # states that belong to no parameter, by the user's keys
    param_groups: Sequence[Mapping[str, Any]] | None  # the dict's; None if it has none
    is_dry_run: bool = False  # the optimizer has no state yet: what its first step would create

    def with_first_states(self, optimizer: Optimizer) -> _Source:
        """Add what the first step would create, for optimizers without state."""
        found: dict[nn.Parameter, Mapping[Any, Any]] = {}
        for each in inner_optimizers(optimizer):
            if not each.state and not (each is optimizer and self.states):
                ownership = dataclasses.replace(self.ownership, groups=each.param_groups)
                found |= first_states(ownership, each)
        is_dry_run = bool(found) and not self.states
        return dataclasses.replace(self, states={**self.states, **found}, is_dry_run=is_dry_run)

    def facts(
        self, groups: Sequence[Group], *, exact: bool = True
    ) -> tuple[OptimizerFacts, list[_Facts]]:
        """Return this rank's description of its optimizer, and of its states of each group."""
        states = [self.facts_of(group, exact=exact) for group in groups]
        return describe(self.ownership, groups, exact=exact), states

    def facts_of(self, group: Group, *, exact: bool = True) -> _Facts:
        """Return this rank's description of its states of a group. Unless exact, parameters without
        elements here are described as the others, if these are alike."""
        params = self.ownership.in_group(group)
        described = [
            {
                key: _facts_of_state(self.states[param][key], kind)
                for key, kind in self.kinds.get(param, {}).items()
            }
            for param in params
        ]
        pairs = zip(params, described, strict=True)
        held = [states for param, states in pairs if not self.ownership.is_vacant(param)]
        if held and not exact and all(repr(states) == repr(held[0]) for states in held):
            described = [held[0] for _ in params]
        return _Facts(not self.is_dry_run if self.states else None, described)


def _source_of(ownership: ParamOwnership, state_dict: Any, where: str) -> _Source:
    """Return the contents of ``optimizer.state_dict()``. Raises UsageError for another dict."""
    require_state_dict(state_dict, where, UsageError, ownership.is_user_key)
    groups, by_key = state_dict.get("param_groups"), ownership.by_key
    user_states = {k: v for k, v in state_dict["state"].items() if ownership.is_user_key(k)}
    entries = {k: v for k, v in state_dict["state"].items() if k not in user_states}
    for key in (*entries, *(key for group in groups or () for key in group["params"])):
        if key not in by_key:
            raise UsageError.of(
                "The optimizer's state is not keyed by its parameters.",
                expected="what optimizer.state_dict() returns: parameters by number, 0 to "
                f"{len(ownership.numbers) - 1}, or by the names of model.named_parameters()",
                got=f"the key {textwrap.shorten(repr(key), 300)}",
                where=where,
                fix="leave the third argument out; what optim_state_dict returned is ready to save",
            )
    if user_states:
        warnings.warn(
            f"{where}: state that belongs to no parameter is copied unchanged: "
            f"{textwrap.shorten(', '.join(user_states), 300)}.",
            stacklevel=4,
        )
    its = ((by_key[key], entry) for key, entry in entries.items())
    current = {param: entry for param, entry in its if not ownership.is_vacant(param)}
    return _Source(ownership, current, user_states=user_states, param_groups=groups)


# -- what ranks tell each other about their states


@dataclasses.dataclass(frozen=True)
class _StateFacts:
    """A rank's description of one state of one sharded parameter."""

    kind: StateKind
    dtype: torch.dtype | None = None
    text: str = ""  # of a scalar's value, to compare it
    value: Any = dataclasses.field(default=None, compare=False, repr=False)  # of a scalar


class _Facts(typing.NamedTuple):
    """A rank's states of one group."""

    # Of states of any group: True if steps made them, False if a dry run did, None without any.
    is_stepped: bool | None
    states: Sequence[Mapping[Any, _StateFacts]]  # one per sharded parameter


def _facts_of_state(value: Any, kind: StateKind) -> _StateFacts:
    if kind is not StateKind.SCALAR:
        return _StateFacts(kind, value.dtype if kind is StateKind.PER_ELEMENT else None)
    value = copied(value, to_cpu=True)
    if isinstance(value, torch.Tensor):
        return _StateFacts(kind, value.dtype, repr(_torch_private.local_part(value).item()), value)
    return _StateFacts(kind, None, repr(value), value)


def _agreed(by_rank: Sequence[Mapping[Any, _StateFacts]]) -> dict[Any, _StateFacts]:
    """Return the description that holds on all ranks. States that differ are rank-local."""
    agreed: dict[Any, _StateFacts] = {}
    for states in by_rank:
        for key, described in states.items():
            if agreed.setdefault(key, described) != described:
                agreed[key] = _StateFacts(StateKind.RANK_LOCAL)
    return agreed


def _agree(
    source: _Source | None, groups: Sequence[Group], problem: Exception | None, where: str
) -> dict[int, list[Any]]:
    """Return the facts of each group by its id, in rank order. Collective, a small exchange for
    each set of ranks: raises ``problem``, why there is no ``source``, on all ranks."""
    text = ""
    if problem is not None:
        text = explain(
            "Another rank could not export the state of its optimizer.",
            expected="an optimizer of this model's parameters on every rank",
            got=f"on rank {global_rank()}: {type(problem).__name__}: {problem}",
            where=where,
            fix="see the error on that rank",
        )
    facts = dict[int, list[Any]]()
    for communicator, shared in _communicators(groups):
        own = None if source is None else source.facts(shared, exact=False)
        answers: Sequence[Any] = [own] * communicator.ranks
        if not are_alike(text or repr(own), [communicator], "facts of the optimizers"):
            own = None if source is None else source.facts(shared)
            texts, answers = zip(*communicator.gather_objects((text, own)), strict=True)
            text = text or next(filter(None, texts), "")
            if source is not None and not text:
                by_rank = {n: f[0] for n, f in zip(communicator.members, answers, strict=True)}
                try:
                    require_alike(source.ownership, shared, by_rank, where, unmanaged=False)
                except RuntimeUsageError as error:
                    text = str(error)
        for number, group in enumerate(shared if source is not None and not text else ()):
            if group.shard is communicator:
                facts[id(group)] = [of_groups[number] for _, of_groups in answers]
    if problem is not None:
        raise problem
    if text:
        raise RuntimeUsageError(text)
    assert source is not None
    return {id(group): facts.get(id(group)) or [source.facts_of(group)] for group in groups}


def _communicators(groups: Sequence[Group]) -> list[tuple[Transport, list[Group]]]:
    """Return the sets of ranks that hold the same groups; smaller ones tell larger ones."""
    found: dict[Transport, list[Group]] = {}
    for group in groups:
        for communicator in (group.shard, *group.tensor_parallel):
            if communicator.ranks > 1:
                found.setdefault(communicator, []).append(group)
    return sorted(found.items(), key=lambda pair: (pair[0].ranks, pair[0].members))


# -- the result


class _GroupStates:
    """The optimizer states of one group, with the description that the ranks agree on."""

    def __init__(
        self, group: Group, source: _Source, all_facts: Sequence[_Facts], form: ExportForm
    ) -> None:
        """all_facts: of all ranks of the shard axis, whose optimizers may keep different states."""
        self.group, self.ownership, self.form = group, source.ownership, form
        self.store, params = store_of(group), source.ownership.in_group(group)
        # States of a dry run count only if no rank has made a step.
        is_stepped = any(facts.is_stepped for facts in all_facts)
        own = {} if is_stepped and source.is_dry_run else source.states
        self.states = {param: own.get(param, {}) for param in params}
        self.known: dict[nn.Parameter, dict[Any, _StateFacts]] = {}
        for number, param in enumerate(params):
            by_rank = [
                facts.states[number] if facts.is_stepped or not is_stepped else {}
                for facts in all_facts
            ]
            self.known[param] = _agreed(by_rank)
            for key, state in self.known[param].items():
                if state.kind is StateKind.PER_ELEMENT:
                    self._require_everywhere(param, key, [key in its for its in by_rank])

    def _require_everywhere(self, param: nn.Parameter, key: Any, present: list[bool]) -> None:
        """Raise UsageError if a rank lacks a state of its part: it would become zeros."""
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
        """Add the group's states. Collective unless they are boxes: a gather per state and dtype,
        and one more for whole values if there is rank-local state."""
        form, whole = self.form, is_whole(self.group)
        rank_local: list[tuple[nn.Parameter, Any]] = []
        # By dtype too: the states of parameters of one group may differ in it.
        per_element: dict[tuple[Any, torch.dtype | None], list[nn.Parameter]] = {}
        for param, known in self.known.items():
            as_they_are = dict[Any, Any]()
            for key, facts in known.items():
                if facts.kind is StateKind.PER_ELEMENT:
                    per_element.setdefault((key, facts.dtype), []).append(param)
                elif facts.kind is StateKind.SCALAR or whole:
                    value = self.states[param].get(key, facts.value)
                    is_0d = facts.kind is StateKind.SCALAR and _torch_private.is_dtensor(value)
                    is_whole_0d = is_0d and form.values is Values.WHOLE
                    as_they_are[key] = _torch_private.local_part(value) if is_whole_0d else value
                else:
                    rank_local.append((param, key))
            for name in self.ownership.names_in(param) if known else ():
                state[name] = snapshot(as_they_are, form.to_cpu)
        for (key, dtype), holders in per_element.items():
            is_sent = form.values is Values.DTENSORS and not _torch_private.is_dtensor(holders[0])
            is_sent = is_sent or form.values is Values.WHOLE
            gathered = self._gathered(key, dtype, {*holders}) if is_sent else None
            for param in holders:
                for index, name in self.ownership.held[param].names:
                    if gathered is None:
                        state[name][key] = self._own(param, index, key, dtype)
                    else:
                        state[name][key] = self._whole(index, gathered)
        found = [
            rank_state(self.ownership.held[param], key, self.states[param][key], form.to_cpu)
            for param, key in rank_local
            if key in self.states[param]
        ]
        if form.values is Values.WHOLE and rank_local:
            found = gather_states(self.group, found, to_cpu=form.to_cpu, keep=form.keep)
        for name, its in found:
            state[name][its.own_key] = its

    def _gathered(
        self, key: Any, dtype: torch.dtype | None, holders: Collection[nn.Parameter]
    ) -> Sequence[torch.Tensor]:
        """Return a state of all parameters of the group, in their local shapes. Collective."""
        store = self.store
        buffer = torch.zeros(store.numel, dtype=dtype, device=store.shard.device)
        for (param, _), place in zip(store.sharded_params, store.grads(buffer), strict=True):
            if param in holders and key in self.states[param]:
                place.copy_(_torch_private.local_part(self.states[param][key]))
        return store.whole(self.group.gather_full(buffer))

    def _whole(self, index: int, gathered: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return a gathered state, or DTensor. Collective for tensor-parallel parameters."""
        form, value, parallel = self.form, gathered[index], self.store.parallel[index]
        value = value if parallel is None else parallel.whole(value)
        if form.values is Values.WHOLE or form.mesh is None:
            return copied(value, form.to_cpu) if form.keep else None
        value = mesh_sharded_value(value, form.mesh)
        return value.cpu() if form.to_cpu else value

    def _own(self, param: nn.Parameter, index: int, key: Any, dtype: Any) -> torch.Tensor:
        """Return the boxes of a state, empty on ranks without a part, or that of a DTensor."""
        store, form, value = self.store, self.form, self.states[param].get(key)
        if _torch_private.is_dtensor(param):
            value = torch.zeros_like(param.detach(), dtype=dtype) if value is None else value
            return copied(value, to_cpu=True) if form.to_cpu else value.detach()
        value = store.shard.new_empty(0, dtype=dtype) if value is None else value
        part = store.part_in_sharded_param(index)
        run = copied(value.detach().reshape(-1)[part.slice], form.to_cpu)
        return sharded_value(cut_of(self.group, index, form.group), run)
