"""The optimizer's state dict, keyed by parameter names or numbers, full or sharded, into the
optimizer.

Every rank has the dict, or only the first one has it."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._engine.group import Group
from ..errors import (
    CheckpointError,
    FsdpCompatError,
    RuntimeUsageError,
    UsageError,
    ValueCheckpointError,
    explain,
)
from .entries import Entry, classify, copied, snapshot
from .formats import is_sharded, misfit, read_part, shape_of
from .model import store_of
from .optim import is_user_state, other_form
from .optim_alike import held_by_any, require_alike, tell
from .param_ownership import ParamOwnership, is_flat, is_whole, numbered_names
from .rank0 import Outline, Rank0Broadcast
from .rank_local import RankState, check_layout, restored

__all__ = ["Wanted", "optim_state_to_load"]


class _Later(enum.Enum):
    """In the place of what the first rank sends with the parameter that it belongs to."""

    LATER = enum.auto()


_LATER = _Later.LATER


@dataclasses.dataclass(frozen=True)
class Wanted:
    """How a dict is to be loaded."""

    order: Sequence[str]  # the names of all parameters, as the model had them before it was wrapped
    from_first: bool  # where ranks have None or {}, all take what the first one has
    # groups list what was saved, and all parameters of a FlatParameter have state, or none
    as_saved: bool = False
    named: torch.optim.Optimizer | None = (
        None  # the optimizer, if its state is keyed by the model's current names
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A state dict that was looked through and fits, by the names before wrapping."""

    entries: Mapping[str, Mapping[Any, Any]]
    rank_states: Mapping[str, Sequence[RankState]]  # those in it that belong to single ranks
    per_element: frozenset[Any]  # the names of states with one element per element of a parameter
    groups: Sequence[Mapping[str, Any]] | None  # parameter groups, their params by name
    user_states: Mapping[str, Any]  # of no parameter

    def is_cut(self, holdings: ParamOwnership, name: str, key: Any) -> bool:
        """True for a value that has one element per element of a parameter, which is cut as that
        is."""
        value = self.entries[name][key]
        if key not in self.per_element or not isinstance(value, (torch.Tensor, Outline)):
            return False
        target, index = holdings.by_name[name]
        group = holdings.held[target].group
        shape = value.shape if isinstance(value, Outline) else shape_of(value)
        return group is not None and shape == store_of(group).shape(index)

    def outline(self, holdings: ParamOwnership) -> _Plan:
        """The same without what is of size."""
        entries: dict[str, dict[Any, Any]] = {}
        for name, entry in self.entries.items():
            entries[name] = {
                key: _outline(value, self.is_cut(holdings, name, key))
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
            user_states={
                key: _outline(value, cut=False) for key, value in self.user_states.items()
            },
        )


def _outline(value: Any, cut: bool) -> Any:
    """cut: the value is a tensor with one element per element of a parameter that a unit
    manages."""
    if cut:
        return Outline(shape_of(value), value.dtype)
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.detach().cpu()
    return value if value is None or isinstance(value, (numbers.Number, str)) else _LATER


def optim_state_to_load(
    holdings: ParamOwnership | None,
    problem: Exception | None,
    groups: Sequence[Group],
    state_dict: Any,
    wanted: Wanted,
    first: Rank0Broadcast,
    call: str,
) -> dict[str, Any]:
    """Return what ``optimizer.load_state_dict`` takes, from a dict by names, full or sharded, or by
    numbers, as the optimizer of an unwrapped model gives it. problem: what keeps this rank from
    loading, which has no ``holdings`` then. groups: all of the model.

    Collective over the mesh of ``first``: one small exchange, in which ranks learn whether all have
    a dict that fits, and optimizers of the same parameters. With full values, or own boxes, nothing
    else is sent; values that are sharded in another way are gathered. ``from_first``: where ranks
    have None or {}, all take what the first one has, which sends one (group, state) at a time. What
    is sent goes in the model's order.

    Raises UsageError where there is no dict, or optimizers differ, and CheckpointError for a dict
    that is not of this model's optimizer, on every rank, before anything else is sent.
    """
    plan, told = None, None
    groups = [
        group for group in groups if group.shard.ranks * group.replica.ranks == first.num_ranks
    ]
    missing = state_dict is None or (isinstance(state_dict, Mapping) and not state_dict)
    if holdings is not None:
        told = tell(holdings, groups)
        if not missing:
            try:
                plan = _planned(holdings, state_dict, wanted, call)
                if wanted.from_first and first.is_here:
                    _refuse_sharded(plan, call)
            except FsdpCompatError as caught:
                problem = caught
    kind = type(problem) if isinstance(problem, FsdpCompatError) else RuntimeUsageError
    answers = first.gather((plan is not None, "" if problem is None else str(problem), kind, told))
    if problem is not None:
        raise problem
    _refuse_together([answer[:3] for answer in answers], wanted.from_first, state_dict, call)
    assert holdings is not None
    everyones = [its for *_, its in answers]
    sends = not all(answer[0] for answer in answers)
    require_alike(holdings, groups, everyones, call, unmanaged=sends)
    sharded_params = held_by_any(holdings, groups, everyones) | set(holdings.members)
    if sends:
        _refuse_other_ranks(holdings, first, call)
        told_plan = first.tell(None if plan is None else plan.outline(holdings))
        plan = plan if first.is_here else told_plan
    assert plan is not None
    return _Loading(holdings, plan, first if sends else None, sharded_params, wanted).result()


def _refuse_together(
    statuses: Sequence[tuple[bool, str, type[FsdpCompatError]]],
    from_first: bool,
    given: object,
    call: str,
) -> None:
    """Raise, on every rank, if some rank has no dict or a wrong one. statuses: (has one, its error,
    of which kind)."""
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
                fix="see what that rank says",
            )
        )
    lacking = [rank for rank, (has, *_) in enumerate(statuses) if not has]
    if lacking and (not from_first or 0 in lacking):
        raise UsageError(
            explain(
                "The optimizer state dict is missing on other ranks."
                if given
                else "This is no optimizer state dict.",
                expected="a dict with 'state' and 'param_groups' on the first rank"
                if from_first
                else "a dict with 'state' and 'param_groups' on every rank",
                got=f"nothing on rank(s) {textwrap.shorten(str(lacking), 100)} of {len(statuses)}, "
                f"here a {type(given).__name__}",
                where=call,
                fix="pass what optim_state_dict(model, optim) returned, on every rank; note the "
                "order of the arguments. To load "
                "what rank 0 alone has, set FullOptimStateDictConfig(rank0_only=True) for the "
                "model",
            )
        )


def _refuse_other_ranks(holdings: ParamOwnership, first: Rank0Broadcast, call: str) -> None:
    """Raise if a unit is over some of the ranks only: then others hold something else under the
    same names."""
    for held in holdings.held.values():
        num_ranks = (
            first.num_ranks
            if held.group is None
            else held.group.shard.ranks * held.group.replica.ranks
        )
        if num_ranks != first.num_ranks:
            raise UsageError(
                explain(
                    "Units over different ranks cannot be loaded from one rank.",
                    expected=f"all units over the same {first.num_ranks} ranks, or a dict on every "
                    "rank",
                    got=f"a unit over {num_ranks} ranks, with {held.names[0][1]!r}",
                    where=call,
                    fix="load the optimizer state dict on every rank, without rank0_only=True",
                )
            )


# --- looking through a dict -----------------------------------------------------------------------


def _planned(holdings: ParamOwnership, state_dict: Any, wanted: Wanted, call: str) -> _Plan:
    """Raises UsageError for what has not the form of a dict, CheckpointError for one that does not
    fit. Nothing is sent."""
    if (found := other_form(state_dict)) is not None:
        expected, got = found
        error = (
            CheckpointError
            if isinstance(state_dict, Mapping) and "state" in state_dict
            else UsageError
        )
        raise error(
            explain(
                "This is no optimizer state dict.",
                expected=expected,
                got=f"{textwrap.shorten(repr(got), 300)} of type {type(got).__name__}",
                where=call,
                fix="pass what optim_state_dict(model, optim) or optimizer.state_dict() returned, "
                "on every rank; note the order of "
                "the arguments",
            )
        )
    if _is_by_number(state_dict):
        state_dict = _by_name(state_dict, holdings, wanted.order)
    named, user_states = dict[str, Mapping[Any, Any]](), dict[str, Any]()
    for name, entry in state_dict["state"].items():
        if is_user_state(holdings, name) and (
            wanted.named is not None or not isinstance(entry, Mapping)
        ):
            user_states[name] = entry
        else:
            named[holdings.name_before(name)] = entry
    _refuse_unknown(holdings, named)
    groups = None
    if "param_groups" in state_dict:
        groups = [
            {**g, "params": [holdings.name_before(name) for name in g["params"]]}
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
    rank_states = {name: its for name, its in rank_states.items() if its}
    check_layout(holdings, rank_states)
    if wanted.as_saved:
        _refuse_missing(holdings, entries, call)
    return _Plan(entries, rank_states, _per_element(entries, holdings), groups, user_states)


def _is_by_number(state_dict: Mapping[str, Any]) -> bool:
    groups = state_dict.get("param_groups", ())
    return any(
        isinstance(key, int)
        for key in (*state_dict["state"], *(key for group in groups for key in group["params"]))
    )


def _refuse_unknown(holdings: ParamOwnership, named: Mapping[str, Any]) -> None:
    """Raise CheckpointError for names that are no parameters', and for entries that are no
    dicts."""
    unknown = [name for name in named if name not in holdings.by_name]
    if unknown:
        raise CheckpointError(
            explain(
                "The optimizer state belongs to another model.",
                expected="names of the model's parameters, such as "
                f"{next(iter(holdings.by_name), 'none')!r}",
                got=f"{len(unknown)} unknown name(s), such as {unknown[0]!r}",
                where="the 'state' of the optimizer state dict",
                fix="load the optimizer state that optim_state_dict returned for this model, keyed "
                "by parameter names; dicts that "
                "belong to no parameter are passed on with is_named_optimizer=True",
            )
        )
    for name, entry in named.items():
        if not isinstance(entry, Mapping):
            raise CheckpointError(
                explain(
                    "This is no optimizer state dict.",
                    expected=f"'state' of {name!r}: a dict",
                    got=f"{textwrap.shorten(repr(entry), 300)} of type {type(entry).__name__}",
                    where="the 'state' of the optimizer state dict",
                    fix="load the optimizer state that optim_state_dict returned for this model",
                )
            )


def _refuse_missing(
    holdings: ParamOwnership, entries: Mapping[str, Mapping[Any, Any]], call: str
) -> None:
    """Raise CheckpointError for a parameter without state in a FlatParameter whose others have
    counts.

    Zeros can stand for other states of such a parameter, but one count is not right for all of
    them.
    """
    for target in holdings.parameters:
        names = [name for _, name in holdings.held[target].names]
        missing = [name for name in names if name not in entries]
        values = [
            value for name in names for value in entries.get(name, {}).values() if value is not None
        ]
        if missing and not all(isinstance(value, torch.Tensor) and value.dim() for value in values):
            raise ValueCheckpointError(
                explain(
                    "A parameter that goes into a FlatParameter has no optimizer state.",
                    expected=f"state of all {len(names)} parameters of the FlatParameter, or of "
                    "none of them",
                    got=f"none of {len(missing)}, such as {missing[0]!r}",
                    where=call,
                    fix="load the state of this model, or use optim_state_dict_to_load, which "
                    "counts all of them alike",
                )
            )


def _by_name(
    state_dict: Mapping[str, Any], holdings: ParamOwnership, order: Sequence[str]
) -> dict[str, Any]:
    """Return the same dict with names, see ``numbered_names``."""
    wanted = numbered_names(holdings, order)
    saved = state_dict.get("param_groups")
    if saved is None:
        names = dict(enumerate(name for its in wanted for name in its))
        return {
            "state": {
                names.get(number, number): value for number, value in state_dict["state"].items()
            }
        }
    names, groups = dict[int, str](), []
    for number, its in enumerate(wanted):
        given = list(saved[number]["params"]) if number < len(saved) else []
        if len(given) != len(its) or len(saved) != len(wanted):
            raise CheckpointError(
                explain(
                    "The optimizer state, which is keyed by numbers, does not fit the optimizer.",
                    expected=f"{len(wanted)} parameter group(s), number {number} of {len(its)} "
                    "parameters",
                    got=f"{len(saved)} parameter group(s), number {number} of {len(given)} "
                    "parameters",
                    where=f"optim_state_dict_to_load, parameter group {number}, {holdings.where}",
                    fix="make the optimizer with the same groups of parameters as the one that was "
                    "saved, or load state by names",
                )
            )
        names.update(zip(given, its, strict=True))
        groups.append({**saved[number], "params": its})
    state = {
        names.get(number, number): value for number, value in state_dict["state"].items()
    }  # others are no names, either
    return {"state": state, "param_groups": groups}


def _per_element(
    entries: Mapping[str, Mapping[Any, Any]], holdings: ParamOwnership
) -> frozenset[Any]:
    """Return the names of the states that have one element per element of a parameter, of
    parameters that units manage.

    With 0-d parameters such a state looks like a count: other parameters tell then, or its name.
    Raises CheckpointError if such a state has another shape than its parameter anywhere: what
    differs between parameters cannot be the state of several in one. And for a state of any other
    shape, or no tensor, unless the optimizer holds the parameter as a whole.
    """
    by_key: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    whole: set[str] = set()
    for name, entry in entries.items():
        target, index = holdings.by_name[name]
        if (group := holdings.held[target].group) is None:
            continue
        shapes[name] = store_of(group).shape(index)
        whole |= {name} if is_whole(group, target) else set()
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
        as_it_is = (
            whole if 2 * sum(fitting) <= len(fitting) else set()
        )  # by chance some of a factored state may fit
        shaped = any(is_sharded(t) or t.dim() > 0 for t in tensors.values())
        if (shaped and not as_it_is.issuperset(values)) or (all_0d and key != "step"):
            found.add(key)
            for name in values.keys() - as_it_is:
                _check_value(values[name], shapes[name], f"state {key!r} of {name!r}")
        for name, value in values.items():
            if key not in found and name not in whole and not isinstance(value, torch.Tensor):
                _check_scalar(value, holdings.by_name[name][0], f"state {key!r} of {name!r}")
    return frozenset(found)


def _check_value(value: object, shape: tuple[int, ...], where: str) -> None:
    """Raise CheckpointError for what cannot be a state of a parameter of this shape."""
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
    raise CheckpointError(
        explain(
            "An optimizer state does not fit its parameter.",
            expected=f"a tensor of shape {shape}",
            got=got,
            where=where,
            fix="load the optimizer state that was saved with this model; a state of another shape "
            "than its parameter's can only "
            "be loaded with the layout that it was saved with",
        )
    )


def _check_scalar(value: object, target: nn.Parameter, where: str) -> None:
    """Raise CheckpointError for an object that belongs to a whole parameter, where parameters are
    not whole."""
    if classify(value, target) is Entry.OPAQUE:
        raise CheckpointError(
            explain(
                "An optimizer state belongs to a whole parameter and cannot be sharded.",
                expected="tensors of the parameter's shape, and numbers",
                got=f"a {type(value).__name__}",
                where=where,
                fix="load it into the model as it was when it was saved, or take such states out "
                "of the dict",
            )
        )


def _refuse_sharded(plan: _Plan, call: str) -> None:
    for name, entry in plan.entries.items():
        for key, value in entry.items():
            if is_sharded(value):
                raise CheckpointError(
                    explain(
                        "The first rank is to send its optimizer state dict, which is sharded.",
                        expected="whole tensors, as FULL_STATE_DICT gives them",
                        got=f"a {type(value).__name__}",
                        where=f"{call}, state {key!r} of {name!r}",
                        fix="load a sharded dict on every rank, with SHARDED_STATE_DICT set for "
                        "the model",
                    )
                )


# --- cutting it -----------------------------------------------------------------------------------


class _Loading:
    """A plan that is carried out, in one order on all ranks. sender: None where every rank has its
    values itself."""

    def __init__(
        self,
        holdings: ParamOwnership,
        plan: _Plan,
        sender: Rank0Broadcast | None,
        sharded_params: Collection[nn.Parameter],
        wanted: Wanted,
    ) -> None:
        """targets: the managed parameters that some rank's optimizer has; ranks that lack one have
        no part of it."""
        self._holdings, self._plan, self._sender, self._targets, self._wanted = (
            holdings,
            plan,
            sender,
            sharded_params,
            wanted,
        )

    def result(self) -> dict[str, Any]:
        holdings, plan = self._holdings, self._plan
        state: dict[nn.Parameter, dict[Any, Any]] = {}
        groups = {
            id(its.group): its.group
            for p, its in holdings.held.items()
            if p in self._targets and its.group is not None
        }
        for group in groups.values():
            state.update(
                self._of_group(group, [t for t in holdings.in_group(group) if t in self._targets])
            )
        for parameter, name in holdings.unmanaged:
            if name in plan.entries:
                state[parameter] = self._uncut(plan.entries[name], name)
        keys: dict[nn.Parameter, Any] = {p: number for number, p in enumerate(holdings.parameters)}
        if self._wanted.named is not None:
            keys = {parameter: name for name, parameter in holdings.by_current_name.items()}
            for (
                parameter
            ) in holdings.parameters:  # such an optimizer wants state of all its parameters
                if holdings.is_vacant(parameter) and self._wanted.named.state.get(parameter):
                    state[parameter] = {
                        key: snapshot(value)
                        for key, value in self._wanted.named.state[parameter].items()
                    }
        else:
            state = {
                parameter: entry
                for parameter, entry in state.items()
                if not holdings.is_vacant(parameter)
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
        """The states of a group's targets, cut to their shapes."""
        plan, states = self._plan, dict[nn.Parameter, dict[Any, Any]]()
        keys: dict[Any, None] = {}
        for target in sharded_params:
            names = [name for _, name in self._holdings.held[target].names if name in plan.entries]
            if not names:
                continue
            states[target] = {key: None for name in names for key in plan.entries[name]}
            uncut: dict[Any, Any] = {}
            for name in names:
                for key, value in plan.entries[name].items():
                    if plan.is_cut(self._holdings, name, key):
                        keys[key] = None
                    elif value is not None:
                        uncut.setdefault(key, value)
            states[target].update(self._uncut(uncut, names[0]))
        for key in keys:
            self._add_cut(states, group, key)
        self._add_restored(states, group, list(states))
        return states

    def _uncut(self, values: Mapping[Any, Any], name: str) -> dict[Any, Any]:
        """Return copies of values that stay as they are."""
        later = [key for key, value in values.items() if _outline(value, cut=False) is _LATER]
        sent: dict[Any, Any] = {}
        if later and self._sender is not None:
            sent = self._sender.send_object(
                {key: values[key] for key in later}, f"the state of {name}"
            )
        return {key: snapshot(sent.get(key, value)) for key, value in values.items()}

    def _add_cut(self, states: dict[nn.Parameter, dict[Any, Any]], group: Group, key: Any) -> None:
        """Add one state that has one element per element. Of a state, the parameters without it
        have zeros."""
        store, members = store_of(group), group.shard.members
        found = [
            (target, index, self._plan.entries[name][key])
            for target in states
            for index, name in self._holdings.held[target].names
            if key in self._plan.entries.get(name, {})
            and self._plan.is_cut(self._holdings, name, key)
        ]
        values = [value for _, _, value in found]
        if self._sender is not None:
            values = self._sender.send(values, f"the state {key!r} of {group.name}")
        for (target, index, _), value in zip(found, values, strict=True):
            flat = is_flat(group, target)
            if states[target][key] is None:
                numel = store.numel if flat else target.numel()
                states[target][key] = torch.zeros(
                    numel, dtype=value.dtype, device=store.shard.device
                )
            run = read_part(value, store.layout, index, store.rank, members, store.parallel[index])
            (
                states[target][key][store.layout.part_in_shard(index, store.rank).slice]
                if flat
                else states[target][key]
            ).copy_(run)
        for target in states:
            if isinstance(states[target].get(key), torch.Tensor):
                states[target][key] = states[target][key].view(target.shape)

    def _add_restored(
        self,
        states: dict[nn.Parameter, dict[Any, Any]],
        group: Group,
        sharded_params: list[nn.Parameter],
    ) -> None:
        """Add the states that belong to this rank alone."""
        for target in sharded_params:
            names = [
                name
                for _, name in self._holdings.held[target].names
                if name in self._plan.rank_states
            ]
            found: Any = [its for name in names for its in self._plan.rank_states[name]]
            if names and self._sender is not None:
                found = self._sender.send_object(found, f"the state of {names[0]}")
            states[target].update(restored(group, found))

    def _groups(
        self, saved: Sequence[Mapping[str, Any]], keys: Mapping[nn.Parameter, Any]
    ) -> list[dict[str, Any]]:
        """The optimizer's groups with the settings of the saved group that holds the same
        parameters."""
        by_name = {name: group for group in saved for name in group["params"]}
        groups = []
        for position, group in enumerate(self._holdings.groups):
            names = {
                p: [name for _, name in self._holdings.held[p].names if name in by_name]
                for p in group["params"]
            }
            match = next(
                (by_name[its[0]] for its in names.values() if its),
                saved[position] if position < len(saved) else {},
            )
            settings = {key: copied(value) for key, value in match.items() if key != "params"}
            present = {k: v for k, v in group.items() if k != "params" and k not in settings}
            listed = [p for p in group["params"] if names[p] or not self._wanted.as_saved]
            groups.append({**present, **settings, "params": [keys[p] for p in listed]})
        return groups
