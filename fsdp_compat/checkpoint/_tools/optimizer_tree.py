"""The state of an optimizer, in each of the forms in which it is saved, by name where possible.

- ``{"state": {parameter: {key: value}}, "param_groups": [{"params": [...], ...}]}``; a parameter is
  a name (FSDP, torch.distributed.checkpoint) or a number (torch.optim)
- flattened: ``"state.<name>.<key>"`` and ``"param_groups.<name>.<setting>"``"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .archive import StoredTensor
from .walk import map_leaves

_STATE, _GROUPS = "state", "param_groups"

States = dict[str, dict[Any, Any]]
Groups = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """States by parameter and key, and the groups, whose "params" are names or numbers as text."""

    states: States
    param_groups: Groups
    is_by_number: bool = False
    rest: dict[str, Any] = dataclasses.field(default_factory=dict)  # neither of the two

    @property
    def parameters(self) -> list[str]:
        return parameters_of(self.states, self.param_groups)


def parameters_of(states: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> list[str]:
    """Return the parameters that have a state, and those that only groups list."""
    listed = [name for group in groups for name in group["params"]]
    return list(dict.fromkeys([*states, *listed]))


def renamed(
    states: States, groups: Sequence[dict[str, Any]], new_name: Callable[[str], str]
) -> tuple[States, Groups]:
    """Return states and groups under new names of the parameters; tensors are named by them."""
    return (
        {
            new_name(name): {
                key: named(value, f"{new_name(name)}/{key}") for key, value in state.items()
            }
            for name, state in states.items()
        },
        [{**group, "params": [new_name(name) for name in group["params"]]} for group in groups],
    )


def named(value: Any, path: str) -> Any:
    """Return nested containers with the tensors in them named by their paths."""
    return map_leaves(
        value,
        lambda leaf, path: (
            dataclasses.replace(leaf, name=path) if isinstance(leaf, StoredTensor) else leaf
        ),
        path,
    )


# -- recognised and read


def is_optimizer(value: Any, is_known: bool) -> bool:
    """Return whether a value has the form of an optimizer's state. is_known: it stands under the
    key of an optimizer, so that the groups or the states may be missing."""
    if not isinstance(value, dict) or not value:
        return False
    states, groups = value.get(_STATE, {} if is_known else None), value.get(_GROUPS)
    if (
        isinstance(states, dict)
        and _are_dicts(states)
        and (_GROUPS in value or (is_known and _STATE in value))
    ):
        return groups is None or _are_dicts(groups)
    texts = [str(key) for key in value]
    of_state = sum(text.startswith(f"{_STATE}.") for text in texts)
    of_groups = sum(text.startswith(f"{_GROUPS}.") for text in texts)
    return of_state + of_groups == len(texts) and bool(is_known or (of_state and of_groups))


def _are_dicts(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list, tuple)) and all(isinstance(item, dict) for item in items)


def optimizer_in(tree: dict[Any, Any]) -> OptimizerState:
    """Return the state in a value that ``is_optimizer``."""
    if isinstance(tree.get(_STATE), dict) or _GROUPS in tree:
        return _nested(tree)
    return _flattened(tree)


def merged(optimizers: Mapping[str, OptimizerState]) -> OptimizerState | None:
    """Return one state for all optimizers, or None if several number their parameters or share
    some."""
    found = list(optimizers.values())
    if len(found) == 1:
        return found[0]
    names = [name for one in found for name in one.parameters]
    if any(one.is_by_number for one in found) or len(set(names)) < len(names):
        return None
    return OptimizerState(
        {name: states for one in found for name, states in one.states.items()},
        [group for one in found for group in one.param_groups],
        rest={key: one.rest for key, one in optimizers.items() if one.rest},
    )


def _flattened(tree: dict[Any, Any]) -> OptimizerState:
    """Every parameter has its settings; those with equal ones make a group."""
    states: States = {}
    settings: States = {}
    for path, value in tree.items():
        section, _, inside = str(path).partition(".")
        name, _, key = inside.rpartition(".")
        (states if section == _STATE else settings).setdefault(name, {})[key] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, values in settings.items():
        text = repr(sorted(values.items()))  # equal for equal settings
        groups.setdefault(text, {**values, "params": []})["params"].append(name)
    return OptimizerState(states, list(groups.values()))


def _nested(tree: dict[Any, Any]) -> OptimizerState:
    states = {
        str(name): {key if type(key) is int else str(key): item for key, item in state.items()}
        for name, state in (tree.get(_STATE) or {}).items()
    }
    given = tree.get(_GROUPS) or [{}]
    given = given.values() if isinstance(given, dict) else given
    groups = [named({str(key): group[key] for key in group}, _GROUPS) for group in given]
    for group in groups:
        listed = group.get("params")
        listed = list(listed.values()) if isinstance(listed, dict) else listed
        if not isinstance(listed, (list, tuple)):
            listed = [*states] if len(groups) == 1 else []
        group["params"] = [str(name) for name in listed]
    rest = {str(key): value for key, value in tree.items() if key not in (_STATE, _GROUPS)}
    found = OptimizerState(states, groups, rest=rest)
    if not all(name.isdecimal() for name in found.parameters):
        return found
    names = _names_of_numbers(found)
    if names is None:
        return dataclasses.replace(found, is_by_number=bool(found.parameters))
    states, groups = renamed(states, groups, names.__getitem__)
    return OptimizerState(states, groups, rest=rest)


def _names_of_numbers(numbered: OptimizerState) -> dict[str, str] | None:
    """Return the parameter of each number that the groups list, or None if they do not say so.

    Shapes do not tell: an optimizer may have the parameters in any order."""
    names: dict[str, str] = {}
    for group in numbered.param_groups:
        listed = group.get("param_names")
        if not isinstance(listed, (list, tuple)) or len(listed) != len(group["params"]):
            return None
        names |= zip(group["params"], map(str, listed), strict=True)
    num = sum(len(group["params"]) for group in numbered.param_groups)
    is_certain = (
        len(names) == len(set(names.values())) == num and numbered.states.keys() <= names.keys()
    )
    return names if is_certain else None


def named_optimizer(
    states: Mapping[str, dict[Any, Any]],
    groups: Sequence[dict[str, Any]],
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[States, Groups]:
    """Return states and groups by name. names: of the parameters, in the order of their numbers;
    shapes: of the model's tensors. Raises ValueError if they cannot be these parameters'."""
    given = sorted(parameters_of(states, groups), key=int)
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
    return renamed(dict(states), groups, by_number.__getitem__)
