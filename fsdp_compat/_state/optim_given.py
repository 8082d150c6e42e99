"""Reads an optimizer's state dict before it is loaded, by the names before wrapping, and checks
that it fits the model and the optimizer. Sends nothing and changes nothing."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._engine.state_store import store_of
from ..errors import CheckpointError, UsageError, ValueCheckpointError
from .optim import is_user_state, not_a_state_dict, other_form
from .optim_values import StateKind, classify
from .param_ownership import ParamOwnership, is_whole, numbered_names
from .rank0 import Outline
from .rank_local import RankState, check_layout
from .values import dtype_of, is_sharded, misfit, shape_of


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
