"""The state of an optimizer, in each of the forms in which it is saved, by name where possible.

- ``{"state": {parameter: {key: value}}, "param_groups": [{"params": [...], ...}]}``; a parameter is
  a name (FSDP, torch.distributed.checkpoint) or a number (torch.optim)
- flattened: ``"state.<name>.<key>"`` and ``"param_groups.<name>.<setting>"``"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .archive import StoredTensor

_STATE, _GROUPS = "state", "param_groups"


@dataclasses.dataclass(frozen=True)
class OptimizerTree:
    """What a file holds of one optimizer."""

    tree: dict[Any, Any]


@dataclasses.dataclass
class OptimizerState:
    """States by parameter and key, and the groups, whose "params" are names or numbers as text."""

    states: dict[str, dict[Any, Any]]
    param_groups: list[dict[str, Any]]
    is_by_number: bool
    rest: dict[str, Any] = dataclasses.field(default_factory=dict)  # neither of the two


def is_optimizer(value: Any, is_known: bool) -> bool:
    """Return whether a value has the form of an optimizer's state. is_known: it stands under the
    key of an optimizer, so that the groups or the states may be missing."""
    if not isinstance(value, dict) or not value:
        return False
    states, groups = value.get(_STATE, {} if is_known else None), value.get(_GROUPS)
    if (
        isinstance(states, dict)
        and (_GROUPS in value or (is_known and _STATE in value))
        and all(isinstance(item, dict) for item in states.values())
    ):
        return groups is None or _are_groups(groups)
    texts = [str(key) for key in value]
    of_state = sum(text.startswith(f"{_STATE}.") for text in texts)
    of_groups = sum(text.startswith(f"{_GROUPS}.") for text in texts)
    return of_state + of_groups == len(texts) and bool(is_known or (of_state and of_groups))


def _are_groups(groups: Any) -> bool:
    items = list(groups.values()) if isinstance(groups, dict) else groups
    return isinstance(items, (list, tuple)) and all(isinstance(item, dict) for item in items)


def merged_optimizer(optimizers: Mapping[str, OptimizerTree]) -> OptimizerState | None:
    """Return one state for all optimizers, or None if several number their parameters or share
    some."""
    found = [_parsed(optimizer.tree) for optimizer in optimizers.values()]
    if len(found) == 1:
        return found[0]
    names = [name for one in found for name in _parameters(one)]
    if any(one.is_by_number for one in found) or len(set(names)) < len(names):
        return None
    return OptimizerState(
        {name: states for one in found for name, states in one.states.items()},
        [group for one in found for group in one.param_groups],
        is_by_number=False,
        rest={key: one.rest for key, one in zip(optimizers, found, strict=True) if one.rest},
    )


def _parameters(one: OptimizerState) -> list[str]:
    listed = [name for group in one.param_groups for name in group["params"]]
    return list(dict.fromkeys([*one.states, *listed]))


def _parsed(tree: dict[Any, Any]) -> OptimizerState:
    if isinstance(tree.get(_STATE), dict) or _GROUPS in tree:
        return _nested(tree)
    return _flattened(tree)


# -- flattened


def _flattened(tree: dict[Any, Any]) -> OptimizerState:
    """Every parameter has its settings; those with equal ones make a group."""
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for path, value in tree.items():
        section, _, inside = str(path).partition(".")
        name, _, key = inside.rpartition(".")
        (states if section == _STATE else settings).setdefault(name, {})[key] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, values in settings.items():
        marks = [(key, _mark(values[key])) for key in sorted(values)]
        groups.setdefault(repr(marks), {**values, "params": []})["params"].append(name)
    return OptimizerState(states, list(groups.values()), is_by_number=False)


def _mark(value: Any) -> str:
    """Return a text that only equal values have."""
    return repr((value.dtype, value.pieces)) if isinstance(value, StoredTensor) else repr(value)


# -- nested


def _nested(tree: dict[Any, Any]) -> OptimizerState:
    states = dict(tree.get(_STATE) or {})
    groups = tree.get(_GROUPS)
    if isinstance(groups, dict):
        groups = list(groups.values())
    groups = [dict(group) for group in groups or ()] or [{}]
    for group in groups:
        listed = group.get("params")
        if isinstance(listed, dict):
            listed = list(listed.values())
        if not isinstance(listed, (list, tuple)):
            listed = list(states) if len(groups) == 1 else []
        group["params"] = listed
    rest = {str(key): value for key, value in tree.items() if key not in (_STATE, _GROUPS)}
    keys = [*states, *(name for group in groups for name in group["params"])]
    if any(isinstance(key, str) and not key.isdecimal() for key in keys):
        names = {str(key): str(key) for key in keys}
        is_by_number = False
    else:
        found = _names_of_numbers(states, groups) if keys else {}
        names = {str(key): str(key) for key in keys} if found is None else found
        is_by_number = found is None
    return OptimizerState(
        {names[str(key)]: values for key, values in states.items() if str(key) in names},
        [{**group, "params": [names[str(key)] for key in group["params"]]} for group in groups],
        is_by_number,
        rest,
    )


def _names_of_numbers(
    states: Mapping[Any, Any], groups: Sequence[dict[str, Any]]
) -> dict[str, str] | None:
    """Return the parameter of each number that the groups list, or None if they do not say so.

    Shapes do not tell: an optimizer may have the parameters in any order."""
    names: dict[str, str] = {}
    for group in groups:
        listed = group.get("param_names")
        if not isinstance(listed, (list, tuple)) or len(listed) != len(group["params"]):
            return None
        names |= zip(map(str, group["params"]), map(str, listed), strict=True)
    num = sum(len(group["params"]) for group in groups)
    is_certain = len(names) == len(set(names.values())) == num and {*map(str, states)} <= {*names}
    return names if is_certain else None


def named_optimizer(
    states: Mapping[str, dict[str, Any]],
    groups: Sequence[dict[str, Any]],
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return states and groups by name. names: of the parameters, in the order of their numbers;
    shapes: of the model's tensors. Raises ValueError if they cannot be these parameters'."""
    given = sorted({*states, *(str(key) for group in groups for key in group["params"])}, key=int)
    if len(names) != len(given) or len(set(names)) < len(names):
        raise ValueError(f"{len(set(names))} different names for {len(given)} parameters")
    by_number = dict(zip(given, names, strict=True))
    for number, name in by_number.items():
        if name not in shapes:
            raise ValueError(f"the name {name!r}, which no tensor of the model has")
        found = {
            value.shape
            for value in states.get(number, {}).values()
            if isinstance(value, StoredTensor) and value.shape
        }
        if len(found) == 1 and found != {shapes[name]}:
            raise ValueError(
                f"{name!r}, of shape {list(shapes[name])}, as number {number}, whose state has the "
                f"shape {list(*found)}"
            )
    return (
        {by_number[number]: state for number, state in states.items()},
        [
            {**group, "params": [by_number[str(number)] for number in group["params"]]}
            for group in groups
        ],
    )
