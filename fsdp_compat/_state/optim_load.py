"""The optimizer's state dict, keyed by parameter names or numbers, full or sharded, into the optimizer.

Every rank has the dict, or only the first one has it.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._engine.unit import Group
from ..errors import CheckpointError, FsdpCompatError, UsageError, explain
from .entries import Entry, classify, copied, snapshot
from .formats import is_sharded, misfit, read_part, shape_of
from .holdings import Holdings, is_flat, is_whole
from .model import store_of
from .opaque import RankState, check_layout, restored
from .optim import other_form
from .sending import FirstRank, Outline

__all__ = ["optim_state_to_load"]


class _Later(enum.Enum):
    """In the place of what the first rank sends with the parameter that it belongs to."""

    LATER = enum.auto()


_LATER = _Later.LATER


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A state dict that was looked through and fits, by the names before wrapping."""

    entries: Mapping[str, Mapping[Any, Any]]
    rank_states: Mapping[str, Sequence[RankState]]  # those in it that belong to single ranks
    per_element: frozenset[Any]  # the names of states with one element per element of a parameter
    groups: Sequence[Mapping[str, Any]]  # parameter groups, their params by name

    def is_cut(self, holdings: Holdings, name: str, key: Any) -> bool:
        """True for a value that has one element per element of a parameter, which is cut as that is."""
        value = self.entries[name][key]
        if key not in self.per_element or not isinstance(value, (torch.Tensor, Outline)):
            return False
        target, index = holdings.by_name[name]
        group = holdings.held[target].group
        shape = value.shape if isinstance(value, Outline) else shape_of(value)
        return group is not None and shape == store_of(group).shape(index)

    def outline(self, holdings: Holdings) -> _Plan:
        """The same without what is of size."""
        entries: dict[str, dict[Any, Any]] = {}
        for name, entry in self.entries.items():
            entries[name] = {key: _outline(value, self.is_cut(holdings, name, key)) for key, value in entry.items()}
        groups = [{key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in g.items()} for g in self.groups]
        return dataclasses.replace(self, entries=entries, rank_states=dict.fromkeys(self.rank_states, ()), groups=groups)


def _outline(value: Any, cut: bool) -> Any:
    """cut: the value is a tensor with one element per element of a parameter that a unit manages."""
    if cut:
        return Outline(shape_of(value), value.dtype)
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.detach().cpu()
    return value if value is None or isinstance(value, (numbers.Number, str)) else _LATER


def optim_state_to_load(
    holdings: Holdings, state_dict: Any, order: Sequence[str], first: FirstRank, *, from_first: bool, call: str
) -> dict[str, Any]:
    """Return what ``optimizer.load_state_dict`` takes, from a dict by names, full or sharded, or by numbers, as the optimizer of an
    unwrapped model gives it. order: the names of all parameters, as the model had them before it was wrapped.

    Collective over the mesh of ``first``: one small exchange, in which ranks learn whether all have a dict that fits. With full
    values, or own boxes, nothing else is sent; values that are sharded in another way are gathered. ``from_first``: where ranks
    have None or {}, all take what the first one has, which sends one (group, state) at a time.

    Raises UsageError where there is no dict, and CheckpointError for one that is not of this model's optimizer, on every rank,
    before anything else is sent.
    """
    plan, error = None, None
    missing = state_dict is None or (isinstance(state_dict, Mapping) and not state_dict)
    if not missing:
        try:
            plan = _planned(holdings, state_dict, order, call)
            if from_first and first.is_here:
                _refuse_sharded(plan, call)
        except FsdpCompatError as caught:
            error = caught
    statuses = first.gather((plan is not None, "" if error is None else str(error)))
    if error is not None:
        raise error
    _refuse_together(statuses, from_first, state_dict, call)
    sender = None
    if not all(has for has, _ in statuses):
        sender = first
        _refuse_other_ranks(holdings, first, call)
        told = first.tell(None if plan is None else plan.outline(holdings))
        plan = plan if first.is_here else told
    assert plan is not None
    return _Loading(holdings, plan, sender).result()


def _refuse_together(statuses: list[tuple[bool, str]], from_first: bool, given: object, call: str) -> None:
    """Raise, on every rank, if some rank has no dict or a wrong one."""
    wrong = next(((rank, text) for rank, (_, text) in enumerate(statuses) if text), None)
    if wrong is not None:
        raise CheckpointError(
            explain(
                "Another rank refused the optimizer state dict.",
                expected="a dict that fits on every rank",
                got=f"on rank {wrong[0]} of {len(statuses)}: {wrong[1]}",
                where=call,
                fix="see what that rank says",
            )
        )
    lacking = [rank for rank, (has, _) in enumerate(statuses) if not has]
    if lacking and (not from_first or 0 in lacking):
        raise UsageError(
            explain(
                "The optimizer state dict is missing on other ranks." if given else "This is no optimizer state dict.",
                expected="a dict with 'state' and 'param_groups' on the first rank"
                if from_first
                else "a dict with 'state' and 'param_groups' on every rank",
                got=f"nothing on rank(s) {textwrap.shorten(str(lacking), 100)} of {len(statuses)}, here a {type(given).__name__}",
                where=call,
                fix="pass what optim_state_dict(model, optim) returned, on every rank; note the order of the arguments. To load "
                "what rank 0 alone has, set FullOptimStateDictConfig(rank0_only=True) for the model",
            )
        )


def _refuse_other_ranks(holdings: Holdings, first: FirstRank, call: str) -> None:
    """Raise if a unit is over some of the ranks only: then others hold something else under the same names."""
    for held in holdings.held.values():
        num_ranks = first.num_ranks if held.group is None else held.group.shard.ranks * held.group.replica.ranks
        if num_ranks != first.num_ranks:
            raise UsageError(
                explain(
                    "Units over different ranks cannot be loaded from one rank.",
                    expected=f"all units over the same {first.num_ranks} ranks, or a dict on every rank",
                    got=f"a unit over {num_ranks} ranks, with {held.names[0][1]!r}",
                    where=call,
                    fix="load the optimizer state dict on every rank, without rank0_only=True",
                )
            )


# --- looking through a dict -------------------------------------------------------------------------------------------


def _planned(holdings: Holdings, state_dict: Any, order: Sequence[str], call: str) -> _Plan:
    """Raises UsageError for what has not the form of a dict, CheckpointError for one that does not fit. Nothing is sent."""
    if (found := other_form(state_dict)) is not None:
        expected, got = found
        error = (
            CheckpointError if isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys() else UsageError
        )
        raise error(
            explain(
                "This is no optimizer state dict.",
                expected=expected,
                got=f"{textwrap.shorten(repr(got), 300)} of type {type(got).__name__}",
                where=call,
                fix="pass what optim_state_dict(model, optim) or optimizer.state_dict() returned, on every rank; note the order of "
                "the arguments",
            )
        )
    if any(isinstance(number, int) for group in state_dict["param_groups"] for number in group["params"]):
        state_dict = _by_name(state_dict, holdings, order)
    named = {holdings.name_before(name): entry for name, entry in state_dict["state"].items()}
    unknown = [name for name in named if name not in holdings.by_name]
    if unknown:
        raise CheckpointError(
            explain(
                "The optimizer state belongs to another model.",
                expected=f"names of the model's parameters, such as {next(iter(holdings.by_name), 'none')!r}",
                got=f"{len(unknown)} unknown name(s), such as {unknown[0]!r}",
                where="the 'state' of the optimizer state dict",
                fix="load the optimizer state that optim_state_dict returned for this model, keyed by parameter names",
            )
        )
    entries = {name: {k: v for k, v in entry.items() if not isinstance(v, RankState)} for name, entry in named.items()}
    rank_states = {name: [v for v in entry.values() if isinstance(v, RankState)] for name, entry in named.items()}
    rank_states = {name: its for name, its in rank_states.items() if its}
    check_layout(holdings, rank_states)
    groups = [{**g, "params": [holdings.name_before(name) for name in g["params"]]} for g in state_dict["param_groups"]]
    return _Plan(entries, rank_states, _per_element(entries, holdings), groups)


def _by_name(state_dict: Mapping[str, Any], holdings: Holdings, order: Sequence[str]) -> dict[str, Any]:
    """Return the same dict with names: the numbers count an unwrapped model's parameters, group by group, in the model's order.

    Where an optimizer holds the parameters themselves (original ones) their order in it counts.
    """
    position = {name: number for number, name in enumerate(order)}
    names: dict[int, str] = {}
    groups = []
    saved = list(state_dict["param_groups"])
    for number, group in enumerate(holdings.groups):
        its = [name for parameter in group["params"] for _, name in holdings.held[parameter].names]
        if any(len(holdings.held[parameter].names) > 1 for parameter in group["params"]):
            its.sort(key=lambda name: position.get(name, len(position)))
        given = list(saved[number]["params"]) if number < len(saved) else []
        if len(given) != len(its) or len(saved) != len(holdings.groups):
            raise CheckpointError(
                explain(
                    "The optimizer state, which is keyed by numbers, does not fit the optimizer.",
                    expected=f"{len(holdings.groups)} parameter group(s), number {number} of {len(its)} parameters",
                    got=f"{len(saved)} parameter group(s), number {number} of {len(given)} parameters",
                    where=f"optim_state_dict_to_load, parameter group {number}, {holdings.where}",
                    fix="make the optimizer with the same groups of parameters as the one that was saved, or load state by names",
                )
            )
        names.update(zip(given, its, strict=True))
        groups.append({**saved[number], "params": its})
    state = {names.get(number, number): value for number, value in state_dict["state"].items()}  # others are no names, either
    return {"state": state, "param_groups": groups}


def _per_element(entries: Mapping[str, Mapping[Any, Any]], holdings: Holdings) -> frozenset[Any]:
    """Return the names of the states that have one element per element of a parameter, of parameters that units manage.

    With 0-d parameters such a state looks like a count: other parameters tell then, or its name. Raises CheckpointError if such a
    state has another shape than its parameter anywhere: what differs between parameters cannot be the state of several in one.
    And for a state of any other shape, or no tensor, unless the optimizer holds the parameter as a whole.
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
        fitting = [is_sharded(t) or (t.dim() > 0 and t.numel() > 1 and t.shape == shapes[name]) for name, t in tensors.items()]
        as_it_is = whole if 2 * sum(fitting) <= len(fitting) else set()  # by chance some of a factored state may fit
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
        got = "a tensor on the meta device, without values" if value.is_meta else f"a tensor of {value.layout}"
    else:
        return
    raise CheckpointError(
        explain(
            "An optimizer state does not fit its parameter.",
            expected=f"a tensor of shape {shape}",
            got=got,
            where=where,
            fix="load the optimizer state that was saved with this model; a state of another shape than its parameter's can only "
            "be loaded with the layout that it was saved with",
        )
    )


def _check_scalar(value: object, target: nn.Parameter, where: str) -> None:
    """Raise CheckpointError for an object that belongs to a whole parameter, where parameters are not whole."""
    if classify(value, target) is Entry.OPAQUE:
        raise CheckpointError(
            explain(
                "An optimizer state belongs to a whole parameter and cannot be sharded.",
                expected="tensors of the parameter's shape, and numbers",
                got=f"a {type(value).__name__}",
                where=where,
                fix="load it into the model as it was when it was saved, or take such states out of the dict",
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
                        fix="load a sharded dict on every rank, with SHARDED_STATE_DICT set for the model",
                    )
                )


# --- cutting it -------------------------------------------------------------------------------------------------------


class _Loading:
    """A plan that is carried out, in one order on all ranks. sender: None where every rank has its values itself."""

    def __init__(self, holdings: Holdings, plan: _Plan, sender: FirstRank | None) -> None:
        self._holdings, self._plan, self._sender = holdings, plan, sender

    def result(self) -> dict[str, Any]:
        state: dict[nn.Parameter, dict[Any, Any]] = {}
        wanted = set(self._holdings.parameters)
        done: set[int] = set()
        for parameter in self._holdings.parameters:
            held = self._holdings.held[parameter]
            if held.group is None:
                name = held.names[0][1]
                if name in self._plan.entries:
                    state[parameter] = self._uncut(self._plan.entries[name], name)
            elif id(held.group) not in done:
                done.add(id(held.group))
                state.update(self._of_group(held.group, [t for t in self._holdings.in_group(held.group) if t in wanted]))
        by_number = {number: state[p] for number, p in enumerate(self._holdings.parameters) if p in state}
        return {"state": by_number, "param_groups": self._groups()}

    def _of_group(self, group: Group, targets: list[nn.Parameter]) -> dict[nn.Parameter, dict[Any, Any]]:
        """The states of a group's targets, cut to their shapes."""
        plan, states = self._plan, dict[nn.Parameter, dict[Any, Any]]()
        keys: dict[Any, None] = {}
        for target in targets:
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
            sent = self._sender.send_object({key: values[key] for key in later}, f"the state of {name}")
        return {key: snapshot(sent.get(key, value)) for key, value in values.items()}

    def _add_cut(self, states: dict[nn.Parameter, dict[Any, Any]], group: Group, key: Any) -> None:
        """Add one state that has one element per element. Of a state, the parameters without it have zeros."""
        store, members = store_of(group), group.shard.members
        found = [
            (target, index, self._plan.entries[name][key])
            for target in states
            for index, name in self._holdings.held[target].names
            if key in self._plan.entries.get(name, {}) and self._plan.is_cut(self._holdings, name, key)
        ]
        values = [value for _, _, value in found]
        if self._sender is not None:
            values = self._sender.send(values, f"the state {key!r} of {group.name}")
        for (target, index, _), value in zip(found, values, strict=True):
            flat = is_flat(group, target)
            if states[target][key] is None:
                numel = store.numel if flat else target.numel()
                states[target][key] = torch.zeros(numel, dtype=value.dtype, device=store.shard.device)
            run = read_part(value, store.layout, index, store.rank, members, store.parallel[index])
            (states[target][key][store.layout.part_in_shard(index, store.rank).slice] if flat else states[target][key]).copy_(run)
        for target in states:
            if isinstance(states[target].get(key), torch.Tensor):
                states[target][key] = states[target][key].view(target.shape)

    def _add_restored(self, states: dict[nn.Parameter, dict[Any, Any]], group: Group, targets: list[nn.Parameter]) -> None:
        """Add the states that belong to this rank alone."""
        for target in targets:
            names = [name for _, name in self._holdings.held[target].names if name in self._plan.rank_states]
            found: Any = [its for name in names for its in self._plan.rank_states[name]]
            if names and self._sender is not None:
                found = self._sender.send_object(found, f"the state of {names[0]}")
            states[target].update(restored(group, found))

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups with the settings of the saved group that holds the same parameters."""
        saved = self._plan.groups
        by_name = {name: group for group in saved for name in group["params"]}
        groups, number = [], 0
        for position, group in enumerate(self._holdings.groups):
            names = [name for parameter in group["params"] for _, name in self._holdings.held[parameter].names]
            match = next((by_name[name] for name in names if name in by_name), saved[position] if position < len(saved) else {})
            settings = {key: copied(value) for key, value in match.items() if key != "params"}
            numbers = list(range(number, number + len(group["params"])))
            number += len(numbers)
            groups.append(
                {**{k: v for k, v in group.items() if k != "params" and k not in settings}, **settings, "params": numbers}
            )
        return groups
