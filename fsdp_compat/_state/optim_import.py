"""Loads an optimizer's state dict, keyed by parameter names or numbers, full or sharded.

It is first checked by the names before wrapping, which sends nothing and changes nothing. Either
every rank has the dict, or only rank 0 has it."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._engine.group import Group
from .._engine.state_store import StateStore, store_of
from ..errors import (
    CheckpointError,
    FsdpCompatError,
    RuntimeUsageError,
    UsageError,
    ValueCheckpointError,
    explain,
)
from .optim_agreement import describe, held_by_any, require_alike
from .optim_contents import (
    ParamOwnership,
    StateKind,
    classify,
    is_user_state,
    is_whole,
    not_a_state_dict,
    numbered_names,
    other_form,
    snapshot,
)
from .rank0 import Outline, Rank0Broadcast
from .rank_local import RankState, check_layout, restored
from .reading_values import dtype_of, is_sharded, misfit, read_part, shape_of
from .sharded_values import copied


class _Later(enum.Enum):
    """A placeholder for a value that rank 0 sends later, with its parameter."""

    LATER = enum.auto()


LATER = _Later.LATER


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How a dict is loaded."""

    order: Sequence[str]  # the names of all parameters before the model was wrapped
    from_rank0: bool  # all ranks load rank 0's dict if any of them has None or {}
    # Groups list the parameters that were saved. All parameters of a FlatParameter must have state,
    # or none of them.
    as_saved: bool = False
    # The optimizer, if its state is keyed by the model's current names.
    named: torch.optim.Optimizer | None = None


@dataclasses.dataclass(frozen=True)
class GivenState:
    """A state dict that was checked and fits, keyed by the names before wrapping."""

    entries: Mapping[str, Mapping[Any, Any]]
    rank_states: Mapping[str, Sequence[RankState]]  # the rank-local ones among the states
    per_element: frozenset[Any]  # the names of states with one element per element of a parameter
    groups: Sequence[Mapping[str, Any]] | None  # parameter groups, their params by name
    user_states: Mapping[str, Any]  # states that belong to no parameter

    def is_cut(self, ownership: ParamOwnership, name: str, key: Any) -> bool:
        """True for a value that has one element per element of a parameter, and so is cut in the
        same way."""
        value = self.entries[name][key]
        if key not in self.per_element or not isinstance(value, (torch.Tensor, Outline)):
            return False
        param, index = ownership.by_name[name]
        group = ownership.held[param].group
        shape = value.shape if isinstance(value, Outline) else shape_of(value)
        return group is not None and shape == store_of(group).shape(index)

    def outline(self, ownership: ParamOwnership) -> GivenState:
        """Return a copy without large values."""
        entries: dict[str, dict[Any, Any]] = {}
        for name, entry in self.entries.items():
            entries[name] = {
                key: outline(value, self.is_cut(ownership, name, key))
                for key, value in entry.items()
            }
        groups = self.groups
        if groups is not None:
            groups = [
                {
                    key: value.cpu() if isinstance(value, torch.Tensor) else value
                    for key, value in g.items()
                }
                for g in groups
            ]
        return dataclasses.replace(
            self,
            entries=entries,
            rank_states=dict.fromkeys(self.rank_states, ()),
            groups=groups,
            user_states={key: outline(value, cut=False) for key, value in self.user_states.items()},
        )


def outline(value: Any, cut: bool) -> Any:
    """Return a stand-in for a large value, and a small value as it is. cut: the value is a tensor
    with one element per element of a parameter that a unit manages."""
    if cut:
        return Outline(shape_of(value), dtype_of(value))
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.detach().cpu()
    return value if value is None or isinstance(value, (numbers.Number, str)) else LATER


def read_given(
    ownership: ParamOwnership, state_dict: Any, wanted: LoadOptions, call: str
) -> GivenState:
    """Check a state dict. Sends nothing.

    Raises UsageError for an object that is not an optimizer's state dict, CheckpointError for a
    state dict that does not fit.
    """
    if (found := other_form(state_dict)) is not None:
        is_damaged = isinstance(state_dict, Mapping) and "state" in state_dict
        raise not_a_state_dict(
            CheckpointError if is_damaged else UsageError,
            *found,
            call,
            "pass what optim_state_dict(model, optim) or optimizer.state_dict() returned, on every "
            "rank; note the order of the arguments",
        )
    if _is_by_number(state_dict):
        state_dict = _by_name(state_dict, ownership, wanted.order)
    named, user_states = dict[str, Mapping[Any, Any]](), dict[str, Any]()
    for name, entry in state_dict["state"].items():
        if is_user_state(ownership, name) and (
            wanted.named is not None or not isinstance(entry, Mapping)
        ):
            user_states[name] = entry
        else:
            named[ownership.name_before(name)] = entry
    _refuse_unknown(ownership, named)
    groups = None
    if "param_groups" in state_dict:
        groups = [
            {**g, "params": [ownership.name_before(name) for name in g["params"]]}
            for g in state_dict["param_groups"]
        ]
    entries = {
        name: {k: v for k, v in entry.items() if not isinstance(v, RankState)}
        for name, entry in named.items()
    }
    rank_states = {
        name: [v for v in entry.values() if isinstance(v, RankState)]
        for name, entry in named.items()
    }
    rank_states = {name: states for name, states in rank_states.items() if states}
    check_layout(ownership, rank_states)
    if wanted.as_saved:
        _refuse_missing(ownership, entries, call)
    return GivenState(entries, rank_states, _per_element(entries, ownership), groups, user_states)


def _is_by_number(state_dict: Mapping[str, Any]) -> bool:
    groups = state_dict.get("param_groups", ())
    return any(
        isinstance(key, int)
        for key in (*state_dict["state"], *(key for group in groups for key in group["params"]))
    )


def _refuse_unknown(ownership: ParamOwnership, named: Mapping[str, Any]) -> None:
    """Raise CheckpointError for names that are not parameters', and for entries that are not
    dicts."""
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
    for name, entry in named.items():
        if not isinstance(entry, Mapping):
            raise not_a_state_dict(
                CheckpointError,
                f"'state' of {name!r}: a dict",
                entry,
                "the 'state' of the optimizer state dict",
                "load the optimizer state that optim_state_dict returned for this model",
            )


def _refuse_missing(
    ownership: ParamOwnership, entries: Mapping[str, Mapping[Any, Any]], call: str
) -> None:
    """Raise CheckpointError for a parameter without state in a FlatParameter whose other parameters
    have counts.

    Missing tensors could be zeros, but one count would be wrong for some of the parameters.
    """
    for param in ownership.parameters:
        names = [name for _, name in ownership.held[param].names]
        missing = [name for name in names if name not in entries]
        values = [
            value for name in names for value in entries.get(name, {}).values() if value is not None
        ]
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
    wanted = numbered_names(ownership, order)
    saved = state_dict.get("param_groups")
    if saved is None:
        names = dict(enumerate(name for of_group in wanted for name in of_group))
        return {
            "state": {
                names.get(number, number): value for number, value in state_dict["state"].items()
            }
        }
    names, groups = dict[int, str](), []
    for number, expected in enumerate(wanted):
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
        names.update(zip(given, expected, strict=True))
        groups.append({**saved[number], "params": expected})
    # Numbers of no parameter stay, and are refused later like unknown names.
    state = {names.get(number, number): value for number, value in state_dict["state"].items()}
    return {"state": state, "param_groups": groups}


def _per_element(
    entries: Mapping[str, Mapping[Any, Any]], ownership: ParamOwnership
) -> frozenset[Any]:
    """Return the names of the states that have one element per element of a parameter, for
    parameters that units manage.

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
    found = set()
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
        if (shaped and not unchanged.issuperset(values)) or (all_0d and key != "step"):
            found.add(key)
            for name in values.keys() - unchanged:
                _check_value(values[name], shapes[name], f"state {key!r} of {name!r}")
        for name, value in values.items():
            if key not in found and name not in whole and not isinstance(value, torch.Tensor):
                _check_scalar(value, ownership.by_name[name][0], f"state {key!r} of {name!r}")
    return frozenset(found)


def _check_value(value: object, shape: tuple[int, ...], where: str) -> None:
    """Raise CheckpointError for a value that cannot be a state of a parameter of this
    shape."""
    if not isinstance(value, torch.Tensor):
        got = f"a {type(value).__name__}"
    elif shape_of(value) != shape:
        got = f"shape {shape_of(value)}"
    elif (wrong := misfit(value)) is not None:
        got = wrong
    elif not is_sharded(value) and (value.is_meta or value.layout is not torch.strided):
        got = (
            "a tensor on the meta device, without values"
            if value.is_meta
            else f"a tensor of {value.layout}"
        )
    else:
        return
    raise CheckpointError.of(
        "An optimizer state does not fit its parameter.",
        expected=f"a tensor of shape {shape}",
        got=got,
        where=where,
        fix="load the optimizer state that was saved with this model; a state whose shape is "
        "not its parameter's can only be loaded with the layout that it was saved with",
    )


def _check_scalar(value: object, param: nn.Parameter, where: str) -> None:
    """Raise CheckpointError for an object that belongs to a whole parameter if this parameter is
    sharded."""
    if classify(value, param) is StateKind.RANK_LOCAL:
        raise CheckpointError.of(
            "An optimizer state belongs to a whole parameter and cannot be sharded.",
            expected="tensors of the parameter's shape, and numbers",
            got=f"a {type(value).__name__}",
            where=where,
            fix="load it into a model with the layout that it was saved with, or remove such "
            "states from the dict",
        )


def refuse_sharded(plan: GivenState, call: str) -> None:
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


def optim_state_to_load(
    ownership: ParamOwnership | None,
    problem: Exception | None,
    groups: Sequence[Group],
    state_dict: Any,
    wanted: LoadOptions,
    first: Rank0Broadcast,
    call: str,
) -> dict[str, Any]:
    """Return the dict that ``optimizer.load_state_dict`` takes.

    state_dict: keyed by names, full or sharded, or keyed by numbers, as the optimizer of an
    unwrapped model returns it. problem: why this rank cannot load, and has no ``ownership``.
    groups: all of the model.

    Collective over the mesh of ``first``: one small exchange, in which ranks agree that each has a
    dict that fits, and an optimizer of the same parameters. With full values, or boxes of this
    rank, nothing else is sent; values that are sharded differently are gathered. With
    ``from_rank0``, if any rank has None or {}, all take rank 0's dict, which sends one (group,
    state) at a time, in the model's order.

    Raises UsageError if a rank has no dict, or optimizers differ, and CheckpointError for a dict
    that does not belong to this model's optimizer; on every rank, before anything else is sent.
    """
    plan, facts = None, None
    groups = [
        group for group in groups if group.shard.ranks * group.replica.ranks == first.num_ranks
    ]
    missing = state_dict is None or (isinstance(state_dict, Mapping) and not state_dict)
    if ownership is not None:
        facts = describe(ownership, groups)
        if not missing:
            try:
                plan = read_given(ownership, state_dict, wanted, call)
                if wanted.from_rank0 and first.is_here:
                    refuse_sharded(plan, call)
            except FsdpCompatError as caught:
                problem = caught
    kind = type(problem) if isinstance(problem, FsdpCompatError) else RuntimeUsageError
    answers = first.gather((plan is not None, "" if problem is None else str(problem), kind, facts))
    if problem is not None:
        raise problem
    _refuse_together([answer[:3] for answer in answers], wanted.from_rank0, state_dict, call)
    assert ownership is not None
    all_facts = [of_rank for *_, of_rank in answers]
    sends = not all(answer[0] for answer in answers)
    require_alike(ownership, groups, all_facts, call, unmanaged=sends)
    sharded_params = held_by_any(ownership, groups, all_facts) | set(ownership.members)
    if sends:
        _refuse_other_ranks(ownership, first, call)
        sent_plan = first.tell(None if plan is None else plan.outline(ownership))
        plan = plan if first.is_here else sent_plan
    assert plan is not None
    return _Loading(ownership, plan, first if sends else None, sharded_params, wanted).result()


def _refuse_together(
    statuses: Sequence[tuple[bool, str, type[FsdpCompatError]]],
    from_rank0: bool,
    given: object,
    call: str,
) -> None:
    """Raise on every rank if any rank has no dict or a wrong one. statuses: (has a dict, error
    text, error type), by rank."""
    wrong = next(
        ((rank, text, kind) for rank, (_, text, kind) in enumerate(statuses) if text), None
    )
    if wrong is not None:
        raise wrong[2](
            explain(
                "Another rank refused the optimizer state dict.",
                expected="a dict that fits on every rank",
                got=f"on rank {wrong[0]} of {len(statuses)}: {wrong[1]}",
                where=call,
                fix="see the error on that rank",
            )
        )
    missing = [rank for rank, (has, *_) in enumerate(statuses) if not has]
    if missing and (not from_rank0 or 0 in missing):
        raise UsageError.of(
            "The optimizer state dict is missing on other ranks."
            if given
            else "This is not an optimizer state dict.",
            expected="a dict with 'state' and 'param_groups' on the first rank"
            if from_rank0
            else "a dict with 'state' and 'param_groups' on every rank",
            got=f"nothing on rank(s) {textwrap.shorten(str(missing), 100)} of {len(statuses)}, "
            f"here a {type(given).__name__}",
            where=call,
            fix="pass what optim_state_dict(model, optim) returned, on every rank; note the "
            "order of the arguments. To load a dict that only rank 0 has, set "
            "FullOptimStateDictConfig(rank0_only=True) for the model",
        )


def _refuse_other_ranks(ownership: ParamOwnership, first: Rank0Broadcast, call: str) -> None:
    """Raise if a unit is sharded over only some of the ranks, because others then hold different
    parameters under the same names."""
    for held in ownership.held.values():
        num_ranks = (
            first.num_ranks
            if held.group is None
            else held.group.shard.ranks * held.group.replica.ranks
        )
        if num_ranks != first.num_ranks:
            raise UsageError.of(
                "Units that are sharded over different ranks cannot be loaded from one rank.",
                expected=f"all units sharded over the same {first.num_ranks} ranks, or a dict "
                "on every rank",
                got=f"a unit sharded over {num_ranks} ranks, with {held.names[0][1]!r}",
                where=call,
                fix="load the optimizer state dict on every rank, without rank0_only=True",
            )


class _Loading:
    """Carries out a plan, in the same order on all ranks. sender: None if every rank has the values
    itself."""

    def __init__(
        self,
        ownership: ParamOwnership,
        plan: GivenState,
        sender: Rank0Broadcast | None,
        sharded_params: Collection[nn.Parameter],
        wanted: LoadOptions,
    ) -> None:
        """sharded_params: the managed parameters that any rank's optimizer holds. A rank whose
        optimizer lacks one has no part of it."""
        self._ownership, self._plan, self._sender = ownership, plan, sender
        self._sharded_params, self._wanted = sharded_params, wanted

    def result(self) -> dict[str, Any]:
        ownership, plan = self._ownership, self._plan
        state: dict[nn.Parameter, dict[Any, Any]] = {}
        groups = {
            id(contents.group): contents.group
            for p, contents in ownership.held.items()
            if p in self._sharded_params and contents.group is not None
        }
        for group in groups.values():
            state.update(
                self._of_group(
                    group, [p for p in ownership.in_group(group) if p in self._sharded_params]
                )
            )
        for parameter, name in ownership.unmanaged:
            if name in plan.entries:
                state[parameter] = self._uncut(plan.entries[name], name)
        keys: dict[nn.Parameter, Any] = {p: number for number, p in enumerate(ownership.parameters)}
        if self._wanted.named is not None:
            keys = {parameter: name for name, parameter in ownership.by_current_name.items()}
            # A named optimizer expects state of all its parameters.
            for parameter in ownership.parameters:
                if ownership.is_vacant(parameter) and self._wanted.named.state.get(parameter):
                    state[parameter] = {
                        key: snapshot(value)
                        for key, value in self._wanted.named.state[parameter].items()
                    }
        else:
            state = {
                parameter: entry
                for parameter, entry in state.items()
                if not ownership.is_vacant(parameter)
            }
        result: dict[str, Any] = {"state": {key: state[p] for p, key in keys.items() if p in state}}
        result["state"].update(
            self._uncut(plan.user_states, "the optimizer itself") if plan.user_states else {}
        )
        if plan.groups is not None:
            result["param_groups"] = self._groups(plan.groups, keys)
        return result

    def _of_group(
        self, group: Group, sharded_params: list[nn.Parameter]
    ) -> dict[nn.Parameter, dict[Any, Any]]:
        """Return the states of a group's sharded parameters, cut to their shapes."""
        plan, states = self._plan, dict[nn.Parameter, dict[Any, Any]]()
        keys: dict[Any, None] = {}
        for param in sharded_params:
            names = [name for _, name in self._ownership.held[param].names if name in plan.entries]
            if not names:
                continue
            states[param] = {key: None for name in names for key in plan.entries[name]}
            uncut: dict[Any, Any] = {}
            for name in names:
                for key, value in plan.entries[name].items():
                    if plan.is_cut(self._ownership, name, key):
                        keys[key] = None
                    elif value is not None:
                        uncut.setdefault(key, value)
            states[param].update(self._uncut(uncut, names[0]))
        for key in keys:
            self._add_cut(states, group, key)
        self._add_restored(states, group, list(states))
        return states

    def _uncut(self, values: Mapping[Any, Any], name: str) -> dict[Any, Any]:
        """Return copies of values that are not cut."""
        later = [key for key, value in values.items() if outline(value, cut=False) is LATER]
        sent: dict[Any, Any] = {}
        if later and self._sender is not None:
            sent = self._sender.send_object(
                {key: values[key] for key in later}, f"the state of {name}"
            )
        return {key: snapshot(sent.get(key, value)) for key, value in values.items()}

    def _add_cut(self, states: dict[nn.Parameter, dict[Any, Any]], group: Group, key: Any) -> None:
        """Add one per-element state. Parameters that the dict has no such state for get
        zeros."""
        store, members = store_of(group), group.shard.members
        found = [
            (param, index, self._plan.entries[name][key])
            for param in states
            for index, name in self._ownership.held[param].names
            if key in self._plan.entries.get(name, {})
            and self._plan.is_cut(self._ownership, name, key)
        ]
        values = [value for _, _, value in found]
        if self._sender is not None:
            values = self._sender.send(values, f"the state {key!r} of {group.name}")
        for (param, index, _), value in zip(found, values, strict=True):
            if states[param][key] is None:
                states[param][key] = torch.zeros_like(param.detach(), dtype=dtype_of(value))
            own = states[param][key]
            if _torch_private.is_dtensor(own):
                _take_rows(own, value, store, index, members)
                continue
            run = read_part(value, *store.cut(index), store.rank, members, store.parallel[index])
            own.view(-1)[store.part_in_sharded_param(index).slice].copy_(run)

    def _add_restored(
        self,
        states: dict[nn.Parameter, dict[Any, Any]],
        group: Group,
        sharded_params: list[nn.Parameter],
    ) -> None:
        """Add the rank-local states of this rank."""
        for param in sharded_params:
            names = [
                name
                for _, name in self._ownership.held[param].names
                if name in self._plan.rank_states
            ]
            found: Any = [state for name in names for state in self._plan.rank_states[name]]
            if names and self._sender is not None:
                found = self._sender.send_object(found, f"the state of {names[0]}")
            states[param].update(restored(group, found))

    def _groups(
        self, saved: Sequence[Mapping[str, Any]], keys: Mapping[nn.Parameter, Any]
    ) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the settings of the saved groups that hold the same
        parameters."""
        by_name = {name: group for group in saved for name in group["params"]}
        groups = []
        for position, group in enumerate(self._ownership.groups):
            names = {
                p: [name for _, name in self._ownership.held[p].names if name in by_name]
                for p in group["params"]
            }
            match = next(
                (by_name[listed[0]] for listed in names.values() if listed),
                saved[position] if position < len(saved) else {},
            )
            settings = {key: copied(value) for key, value in match.items() if key != "params"}
            present = {k: v for k, v in group.items() if k != "params" and k not in settings}
            listed = [p for p in group["params"] if names[p] or not self._wanted.as_saved]
            groups.append({**present, **settings, "params": [keys[p] for p in listed]})
        return groups


def _take_rows(
    own: Any, value: Any, store: StateStore, index: int, members: tuple[int, ...]
) -> None:
    """Copy this rank's rows of a state of parameter ``index`` into the DTensor ``own``. Collective
    if the value is sharded in another way."""
    parallel, local = store.parallel[index], _torch_private.local_part(own)
    if _torch_private.is_dtensor(value) and (
        (value.device_mesh, value.placements) == (own.device_mesh, own.placements)
    ):
        local.copy_(_torch_private.local_part(value))
    elif type(value) is torch.Tensor and tuple(value.shape) == store.shape(index):
        whole = value if parallel is None else parallel.part(value)
        local.copy_(store.rows_of_whole(index, whole).view(local.shape))
    else:
        run = read_part(value, *store.cut(index), store.rank, members, parallel)
        local.copy_(run.view(local.shape))
