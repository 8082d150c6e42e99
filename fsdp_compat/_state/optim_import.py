"""Loads an optimizer's state dict, keyed by parameter names or numbers, full or sharded.

It is first read by the names before wrapping and checked, which sends nothing and changes nothing.
Then every rank cuts its part out of its own dict, or out of what rank 0 sends."""

from __future__ import annotations

import dataclasses
import numbers
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._engine import rendezvous
from .._engine.group import Group
from .._engine.state_store import store_of
from ..errors import (
    CheckpointError,
    FsdpCompatError,
    RuntimeUsageError,
    UsageError,
    ValueCheckpointError,
)
from .optim_agreement import describe, held_by_any, require_alike
from .optim_contents import (
    ParamOwnership,
    StateKind,
    classify,
    is_count,
    is_user_state,
    is_whole,
    not_a_state_dict,
    numbered_names,
    other_form,
    ownership_of,
    require_units,
    snapshot,
)
from .rank0 import Rank0Broadcast, outline_of
from .rank_local import RankState, check_layout, restored
from .reading_values import dtype_of, is_sharded, read_part, shape_of, unfit
from .sharded_values import copied, cut_of
from .units import model_units_in, names_before, require_idle, units_of


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How a dict is loaded."""

    from_rank0: bool  # all ranks load rank 0's dict if any of them has None or {}
    # Groups list the parameters that were saved. All parameters of a FlatParameter must have state,
    # or none of them.
    as_saved: bool = False
    # The optimizer, if its state is keyed by the model's current names.
    named: torch.optim.Optimizer | None = None


def import_optim_state(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any] | None,
    wanted: LoadOptions,
    label: str,
    call: str,
) -> dict[str, Any]:
    """Return the dict that ``optimizer.load_state_dict`` takes.

    groups: the parameter groups of the optimizer, which errors call ``label``. state_dict: keyed by
    names, full or sharded, or keyed by numbers, as the optimizer of an unwrapped model returns it.

    Collective: one small exchange, in which ranks agree that each has a dict that fits, and an
    optimizer of the same parameters. With full values, or boxes of this rank, nothing else is sent;
    values that are sharded differently are gathered. With ``from_rank0``, if any rank has None or
    {}, all take rank 0's dict, which sends one (group, state) at a time, in the model's order.

    Raises UsageError if a rank has no dict, or optimizers differ, and CheckpointError for a dict
    that does not belong to this model's optimizer; on every rank, before anything else is sent.
    """
    name, label = call.partition("(")[0], f"the state of {label}"
    require_idle(model, name)
    units, first = units_of(model), next(iter(model_units_in(model)), None)
    require_units(units, model, label)
    assert first is not None
    all_groups = [group for named in units for group in named.unit.groups]
    rendezvous.require_all_ranks(name, all_groups, copies=True)
    rank0 = Rank0Broadcast(first.mesh, first.device)
    shared = [each for each in all_groups if _num_ranks(each) == rank0.num_ranks]
    ownership, plan, facts, problem = None, None, None, None
    try:
        ownership = ownership_of(groups, label, units, model)
        facts = describe(ownership, shared)
        if not (state_dict is None or (isinstance(state_dict, Mapping) and not state_dict)):
            plan = _read(ownership, state_dict, wanted, names_before(model), call)
            if wanted.from_rank0 and rank0.is_here:
                _refuse_sharded(plan, call)
    except Exception as error:  # raised later, after the other ranks have been told
        problem = error
    kind = type(problem) if isinstance(problem, FsdpCompatError) else RuntimeUsageError
    answers = rank0.gather((plan is not None, "" if problem is None else str(problem), kind, facts))
    if problem is not None:
        raise problem
    _refuse_together([answer[:3] for answer in answers], wanted.from_rank0, state_dict, call)
    assert ownership is not None
    all_facts = [of_rank for *_, of_rank in answers]
    sends = not all(answer[0] for answer in answers)
    require_alike(ownership, shared, all_facts, call, unmanaged=sends)
    sharded_params = held_by_any(ownership, shared, all_facts) | set(ownership.members)
    if sends:
        _refuse_other_ranks(ownership, rank0, call)
        told = rank0.tell(None if plan is None else plan.outline())
        plan = plan if rank0.is_here else told
    assert plan is not None
    return _Loading(ownership, plan, rank0 if sends else None, sharded_params, wanted).result()


def _num_ranks(group: Group) -> int:
    return group.shard.ranks * group.replica.ranks


def _refuse_together(
    answers: Sequence[tuple[bool, str, type[FsdpCompatError]]],
    from_rank0: bool,
    given: object,
    call: str,
) -> None:
    """Raise on every rank if any rank has no dict or a wrong one. answers: (has a dict, error text,
    error type), by rank."""
    for rank, (_, text, kind) in enumerate(answers):
        if text:
            raise kind.of(
                "Another rank refused the optimizer state dict.",
                expected="a dict that fits on every rank",
                got=f"on rank {rank} of {len(answers)}: {text}",
                where=call,
                fix="see the error on that rank",
            )
    missing = [rank for rank, (has, *_) in enumerate(answers) if not has]
    if missing and (not from_rank0 or 0 in missing):
        raise UsageError.of(
            "The optimizer state dict is missing.",
            expected="a dict with 'state' and 'param_groups' on "
            + ("the first rank" if from_rank0 else "every rank"),
            got=f"nothing on rank(s) {textwrap.shorten(str(missing), 100)} of {len(answers)}, "
            f"here a {type(given).__name__}",
            where=call,
            fix="pass what optim_state_dict(model, optim) returned, on every rank; note the "
            "order of the arguments. To load a dict that only rank 0 has, set "
            "FullOptimStateDictConfig(rank0_only=True) for the model",
        )


def _refuse_other_ranks(ownership: ParamOwnership, rank0: Rank0Broadcast, call: str) -> None:
    """Raise if a unit is sharded over only some of the ranks, because others then hold different
    parameters under the same names."""
    for held in ownership.held.values():
        if held.group is not None and _num_ranks(held.group) != rank0.num_ranks:
            raise UsageError.of(
                "Units that are sharded over different ranks cannot be loaded from one rank.",
                expected=f"all units sharded over the same {rank0.num_ranks} ranks, or a dict on "
                "every rank",
                got=f"a unit sharded over {_num_ranks(held.group)} ranks, with "
                f"{held.names[0][1]!r}",
                where=call,
                fix="load the optimizer state dict on every rank, without rank0_only=True",
            )


# -- reading what was given


class _Later:
    """Stands for a value that rank 0 sends later, with its parameter."""


@dataclasses.dataclass(frozen=True)
class _Given:
    """A state dict that was checked and fits, keyed by the names before wrapping."""

    entries: Mapping[str, Mapping[Any, Any]]
    rank_states: Mapping[str, Sequence[RankState]]  # the rank-local ones among the states
    # (name, state) of what has one element per element of a parameter, and so is cut like it
    cut: frozenset[tuple[str, Any]]
    groups: Sequence[Mapping[str, Any]] | None  # parameter groups, their params by name
    user_states: Mapping[str, Any]  # states that belong to no parameter

    def outline(self) -> _Given:
        """Return a copy without large values."""
        entries = {
            name: {
                key: outline_of(value) if (name, key) in self.cut else _without_large(value)
                for key, value in entry.items()
            }
            for name, entry in self.entries.items()
        }
        groups = self.groups and [
            {key: copied(value, to_cpu=True) for key, value in group.items()}
            for group in self.groups
        ]
        user_states = {key: _without_large(value) for key, value in self.user_states.items()}
        return _Given(entries, dict.fromkeys(self.rank_states, ()), self.cut, groups, user_states)


def _without_large(value: Any) -> Any:
    if value is None or isinstance(value, (numbers.Number, str)):
        return value
    is_small = isinstance(value, torch.Tensor) and value.dim() == 0
    return copied(value, to_cpu=True) if is_small else _Later()


def _is_large(value: Any) -> bool:
    return isinstance(_without_large(value), _Later)


def _read(
    ownership: ParamOwnership, state_dict: Any, wanted: LoadOptions, order: Sequence[str], call: str
) -> _Given:
    """Check a state dict. order: the names of all parameters before the model was wrapped.

    Raises UsageError for an object that is not an optimizer's state dict, CheckpointError for a
    state dict that does not fit.
    """
    if (found := other_form(state_dict)) is not None:
        is_damaged = isinstance(state_dict, Mapping) and "state" in state_dict
        raise not_a_state_dict(CheckpointError if is_damaged else UsageError, *found, call)
    groups = state_dict.get("param_groups")
    listed = (key for group in groups or () for key in group["params"])
    if any(isinstance(key, int) for key in (*state_dict["state"], *listed)):
        state_dict = _by_name(state_dict, ownership, order)
    named, user_states = dict[str, Mapping[Any, Any]](), dict[str, Any]()
    for name, entry in state_dict["state"].items():
        if is_user_state(ownership, name) and (
            wanted.named is not None or not isinstance(entry, Mapping)
        ):
            user_states[name] = entry
        elif isinstance(entry, Mapping):
            named[ownership.name_before(name)] = entry
        else:
            raise not_a_state_dict(CheckpointError, f"'state' of {name!r}: a dict", entry, call)
    _refuse_unknown(ownership, named)
    if groups is not None:
        groups = [
            {**g, "params": [ownership.name_before(name) for name in g["params"]]}
            for g in state_dict["param_groups"]
        ]
    entries, rank_states = dict[str, dict[Any, Any]](), dict[str, list[RankState]]()
    for name, entry in named.items():
        entries[name] = {k: v for k, v in entry.items() if not isinstance(v, RankState)}
        if its := [value for value in entry.values() if isinstance(value, RankState)]:
            rank_states[name] = its
    check_layout(ownership, rank_states)
    if wanted.as_saved:
        _refuse_missing(ownership, entries, call)
    return _Given(entries, rank_states, _cut_states(entries, ownership), groups, user_states)


def _refuse_unknown(ownership: ParamOwnership, named: Mapping[str, Any]) -> None:
    """Raise CheckpointError for names that are not parameters'."""
    unknown = [name for name in named if name not in ownership.by_name]
    if unknown:
        raise CheckpointError.of(
            "The optimizer state belongs to another model.",
            expected="names of the model's parameters, such as "
            f"{next(iter(ownership.by_name), 'none')!r}",
            got=f"{len(unknown)} unknown name(s), such as {unknown[0]!r}",
            where="the 'state' of the optimizer state dict",
            fix="load the optimizer state that optim_state_dict returned for this model, keyed "
            "by parameter names; for state that belongs to no parameter, pass "
            "is_named_optimizer=True",
        )


def _refuse_missing(
    ownership: ParamOwnership, entries: Mapping[str, Mapping[Any, Any]], call: str
) -> None:
    """Raise CheckpointError for a parameter without state in a FlatParameter whose other parameters
    have counts.

    Missing tensors could be zeros, but one count would be wrong for some of the parameters.
    """
    for param in ownership.parameters:
        names = ownership.names_in(param)
        missing = [name for name in names if name not in entries]
        values = [v for name in names for v in entries.get(name, {}).values() if v is not None]
        if missing and not all(isinstance(value, torch.Tensor) and value.dim() for value in values):
            raise ValueCheckpointError.of(
                "A parameter of a FlatParameter has no optimizer state.",
                expected=f"state of all {len(names)} parameters of the FlatParameter, or of "
                "none of them",
                got=f"none of {len(missing)}, such as {missing[0]!r}",
                where=call,
                fix="load the state of this model, or use optim_state_dict_to_load, which "
                "counts all of them alike",
            )


def _by_name(
    state_dict: Mapping[str, Any], ownership: ParamOwnership, order: Sequence[str]
) -> dict[str, Any]:
    """Return the dict with names as keys, in the order of ``numbered_names``."""
    wanted, result = numbered_names(ownership, order), dict[str, Any]()
    saved: Any = state_dict.get("param_groups")
    numbered = list[int]()
    for number, expected in enumerate(wanted if saved is not None else ()):
        given = list(saved[number]["params"]) if number < len(saved) else []
        if len(given) != len(expected) or len(saved) != len(wanted):
            raise CheckpointError.of(
                "The optimizer state, which is keyed by numbers, does not fit the optimizer.",
                expected=f"{len(wanted)} parameter group(s), number {number} of "
                f"{len(expected)} parameters",
                got=f"{len(saved)} parameter group(s), number {number} of {len(given)} parameters",
                where=f"optim_state_dict_to_load, parameter group {number}, {ownership.where}",
                fix="create the optimizer with the same parameter groups as the saved one, or "
                "load state that is keyed by names",
            )
        numbered += given
    all_names = [name for of_group in wanted for name in of_group]
    names = dict(zip(numbered or range(len(all_names)), all_names, strict=True))
    if saved is not None:
        result["param_groups"] = [
            {**group, "params": expected} for group, expected in zip(saved, wanted, strict=True)
        ]
    # Numbers of no parameter stay, and are refused later like unknown names.
    state = {names.get(number, number): value for number, value in state_dict["state"].items()}
    return {"state": state, **result}


def _cut_states(
    entries: Mapping[str, Mapping[Any, Any]], ownership: ParamOwnership
) -> frozenset[tuple[str, Any]]:
    """Return (name, state) of the values that have one element per element of a parameter which a
    unit manages.

    For a 0-d parameter such a state looks like a count; then other parameters decide, or the name
    of the state. Raises CheckpointError if such a state does not have the shape of its parameter
    everywhere, because a FlatParameter needs one kind of state for all its parameters; and for a
    state of any other shape, or one that is not a tensor, unless the optimizer holds the parameter
    as a whole.
    """
    by_key: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    whole: set[str] = set()
    for name, entry in entries.items():
        param, index = ownership.by_name[name]
        if (group := ownership.held[param].group) is None:
            continue
        shapes[name] = store_of(group).shape(index)
        whole |= {name} if is_whole(group) else set()
        for key, value in entry.items():
            if value is not None:
                by_key.setdefault(key, {})[name] = value
    cut = set[tuple[str, Any]]()
    for key, values in by_key.items():
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        all_0d = len(tensors) == len(values) and all(shapes[name] == () for name in values)
        fitting = [
            is_sharded(t) or (t.dim() > 0 and t.numel() > 1 and t.shape == shapes[name])
            for name, t in tensors.items()
        ]
        # A few values of a factored state may have the right shape by chance.
        unchanged = whole if 2 * sum(fitting) <= len(fitting) else set()
        shaped = any(is_sharded(t) or t.dim() > 0 for t in tensors.values())
        is_cut = (shaped and not unchanged.issuperset(values)) or (all_0d and not is_count(key, ()))
        for name, value in values.items():
            wrong, is_tensor = None, isinstance(value, torch.Tensor)
            if is_cut and name not in unchanged:
                wrong = unfit(value, shapes[name], None) if is_tensor else type(value).__name__
            elif not is_cut and name not in whole and not is_tensor:
                is_local = classify(value, ownership.by_name[name][0]) is StateKind.RANK_LOCAL
                wrong = type(value).__name__ if is_local else None
            if wrong is not None:
                raise CheckpointError.of(
                    "An optimizer state does not fit its parameter, and cannot be cut like it.",
                    expected=f"a tensor of shape {shapes[name]}, or a number",
                    got=wrong,
                    where=f"state {key!r} of {name!r}",
                    fix="load the optimizer state that was saved with this model, in the layout "
                    "that it was saved with, or remove such states from the dict",
                )
            if is_cut and is_tensor and shape_of(value) == shapes[name]:
                cut.add((name, key))
    return frozenset(cut)


def _refuse_sharded(plan: _Given, call: str) -> None:
    for name, entry in plan.entries.items():
        for key, value in entry.items():
            if is_sharded(value):
                raise CheckpointError.of(
                    "Rank 0 cannot send a sharded optimizer state dict.",
                    expected="whole tensors, as FULL_STATE_DICT gives them",
                    got=f"a {type(value).__name__}",
                    where=f"{call}, state {key!r} of {name!r}",
                    fix="load a sharded dict on every rank, with SHARDED_STATE_DICT set for "
                    "the model",
                )


# -- cutting it


@dataclasses.dataclass(frozen=True)
class _Loading:
    """Carries out a plan, in the same order on all ranks."""

    ownership: ParamOwnership
    plan: _Given
    sender: Rank0Broadcast | None  # None if every rank has the values itself
    # The managed parameters that any rank's optimizer holds. A rank whose optimizer lacks one has
    # no part of it.
    sharded_params: Collection[nn.Parameter]
    wanted: LoadOptions

    def result(self) -> dict[str, Any]:
        ownership, plan, named = self.ownership, self.plan, self.wanted.named
        state: dict[nn.Parameter, dict[Any, Any]] = {}
        for group in ownership.groups_of(self.sharded_params):
            state.update(self._of_group(group))
        for parameter, name in ownership.unmanaged:
            if name in plan.entries:
                state[parameter] = self._uncut(plan.entries[name], name)
        vacant = [p for p in ownership.parameters if ownership.is_vacant(p)]
        if named is None:
            keys: dict[nn.Parameter, Any] = {p: n for n, p in enumerate(ownership.parameters)}
            state = {p: entry for p, entry in state.items() if not ownership.is_vacant(p)}
        else:  # it expects state of all its parameters
            keys = {parameter: name for name, parameter in ownership.by_current_name.items()}
            state.update({p: snapshot(dict(named.state[p])) for p in vacant if named.state.get(p)})
        result: dict[str, Any] = {"state": {key: state[p] for p, key in keys.items() if p in state}}
        if plan.user_states:
            result["state"].update(self._uncut(plan.user_states, "the optimizer itself"))
        if plan.groups is not None:
            result["param_groups"] = self._groups(plan.groups, keys)
        return result

    def _of_group(self, group: Group) -> dict[nn.Parameter, dict[Any, Any]]:
        """Return the states of a group's sharded parameters, cut to their shapes."""
        plan, states = self.plan, dict[nn.Parameter, dict[Any, Any]]()
        cut_keys: dict[Any, None] = {}
        for param in self.ownership.in_group(group):
            names = [name for name in self.ownership.names_in(param) if name in plan.entries]
            if param not in self.sharded_params or not names:
                continue
            found = [
                (name, key, value) for name in names for key, value in plan.entries[name].items()
            ]
            states[param] = {key: None for _, key, _ in found}
            uncut: dict[Any, Any] = {}
            for name, key, value in found:
                if (name, key) in plan.cut:
                    cut_keys[key] = None
                elif value is not None:
                    uncut.setdefault(key, value)
            states[param].update(self._uncut(uncut, names[0]))
        for key in cut_keys:
            self._add_cut(states, group, key)
        for param in states:
            self._add_restored(states[param], group, self.ownership.names_in(param))
        return states

    def _uncut(self, values: Mapping[Any, Any], name: str) -> dict[Any, Any]:
        """Return copies of values that are not cut."""
        later = {key: value for key, value in values.items() if _is_large(value)}
        if later and self.sender is not None:
            values = {**values, **self.sender.send_object(later, f"the state of {name}")}
        return snapshot(dict(values))

    def _add_cut(self, states: dict[nn.Parameter, dict[Any, Any]], group: Group, key: Any) -> None:
        """Add one per-element state. Parameters that the dict has no such state for get
        zeros."""
        store = store_of(group)
        found = [
            (param, index, self.plan.entries[name][key])
            for param in states
            for index, name in self.ownership.held[param].names
            if (name, key) in self.plan.cut
        ]
        values = [value for _, _, value in found]
        if self.sender is not None:
            values = self.sender.send(values, f"the state {key!r} of {group.name}")
        for (param, index, _), value in zip(found, values, strict=True):
            if states[param][key] is None:
                states[param][key] = torch.zeros_like(param.detach(), dtype=dtype_of(value))
            own = states[param][key]
            if _torch_private.is_dtensor(own):
                _take_rows(own, value, group, index)
                continue
            run = read_part(value, cut_of(group, index))
            own.view(-1)[store.part_in_sharded_param(index).slice].copy_(run)

    def _add_restored(self, state: dict[Any, Any], group: Group, names: Sequence[str]) -> None:
        """Add the rank-local states of this rank."""
        found = [each for name in names for each in self.plan.rank_states.get(name, ())]
        if self.sender is not None and not self.plan.rank_states.keys().isdisjoint(names):
            found = self.sender.send_object(found, f"the state of {names[0]}")
        state.update(restored(group, found))

    def _groups(
        self, saved: Sequence[Mapping[str, Any]], keys: Mapping[nn.Parameter, Any]
    ) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the settings of the saved groups that hold the same
        parameters."""
        by_name = {name: group for group in saved for name in group["params"]}
        groups = []
        for position, group in enumerate(self.ownership.groups):
            matches = {
                p: [by_name[name] for name in self.ownership.names_in(p) if name in by_name]
                for p in group["params"]
            }
            in_place = saved[position] if position < len(saved) else {}
            match = next((found[0] for found in matches.values() if found), in_place)
            listed = [p for p in group["params"] if matches[p] or not self.wanted.as_saved]
            settings = {key: copied(value) for key, value in match.items()}
            present = {key: value for key, value in group.items() if key not in settings}
            groups.append({**present, **settings, "params": [keys[p] for p in listed]})
        return groups


def _take_rows(own: Any, value: Any, group: Group, index: int) -> None:
    """Copy this rank's rows of a state of parameter ``index`` into the DTensor ``own``. Collective
    if the value is sharded in another way."""
    store, local = store_of(group), _torch_private.local_part(own)
    parallel = store.parallel[index]
    if _torch_private.is_dtensor(value) and (
        (value.device_mesh, value.placements) == (own.device_mesh, own.placements)
    ):
        local.copy_(_torch_private.local_part(value))
    elif type(value) is torch.Tensor and tuple(value.shape) == store.shape(index):
        whole = value if parallel is None else parallel.part(value)
        local.copy_(store.rows_of_whole(index, whole).view(local.shape))
    else:
        run = read_part(value, cut_of(group, index))
        local.copy_(run.view(local.shape))
