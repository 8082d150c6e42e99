"""The state of an optimizer in each form that is saved, by name where possible.

- ``{"state": {parameter: {key: value}}, "param_groups": [{"params": [...], ...}]}``, by name (FSDP,
torch.distributed.checkpoint) or number (torch.optim)

- flattened: ``"state.<name>.<key>"`` and ``"param_groups.<name>.<setting>"``"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..._archive.archive import Archive, StoredTensor, is_user
from ..._archive.walk import map_leaves
from ..._state.optim_contents import user_keys

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
        """Those that have a state, and those that only groups list."""
        listed = [name for group in self.param_groups for name in group["params"]]
        named_here = [name for name, state in self.states.items() if not is_user(state)]
        return list(dict.fromkeys([*named_here, *listed]))

    def renamed(self, new_name: Callable[[str], str]) -> OptimizerState:
        """Return the same under new names of the parameters; tensors are named by them."""
        new = {old: old if is_user(its) else new_name(old) for old, its in self.states.items()}
        states = {
            new[name]: {key: named(value, f"{new[name]}/{key}") for key, value in state.items()}
            for name, state in self.states.items()
        }
        groups = [
            {**group, "params": [new_name(name) for name in group["params"]]}
            for group in self.param_groups
        ]
        return dataclasses.replace(self, states=states, param_groups=groups)


def named(value: Any, path: str) -> Any:
    """Return nested containers with the tensors in them named by their paths."""

    def with_name(leaf: Any, path: str) -> Any:
        return dataclasses.replace(leaf, name=path) if isinstance(leaf, StoredTensor) else leaf

    return map_leaves(value, with_name, path)


# -- recognised and read


def is_optimizer(value: Any, is_known: bool) -> bool:
    """Return whether a value looks like an optimizer's state. is_known: its key says so."""
    if not isinstance(value, dict) or not value:
        return False
    states, groups = value.get(_STATE, {} if is_known else None), value.get(_GROUPS)
    if (
        isinstance(states, dict)
        and (_are_dicts(states) or _GROUPS in value)
        and (_GROUPS in value or (is_known and _STATE in value))
    ):
        return groups is None or _are_dicts(groups)
    sections = {"".join(str(key).partition(".")[:2]) for key in value}
    return sections <= {f"{_STATE}.", f"{_GROUPS}."} and (is_known or len(sections) == 2)


def _are_dicts(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list, tuple)) and all(isinstance(item, dict) for item in items)


def optimizer_in(tree: dict[Any, Any]) -> OptimizerState:
    """Return the state in a value that ``is_optimizer``."""
    is_nested = isinstance(tree.get(_STATE), dict) or _GROUPS in tree
    return _nested(tree) if is_nested else _flattened(tree)


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
    given_states = {str(name): state for name, state in (tree.get(_STATE) or {}).items()}
    given = tree.get(_GROUPS) or [{}]
    given = given.values() if isinstance(given, dict) else given
    groups = [named({str(key): group[key] for key in group}, _GROUPS) for group in given]
    for group in groups:
        listed = group.get("params")
        listed = list(listed.values()) if isinstance(listed, dict) else listed
        if not isinstance(listed, (list, tuple)):
            listed = [*given_states] if len(groups) == 1 else []
        group["params"] = [str(name) for name in listed]
    known = {name for group in groups for name in group["params"]}
    users = user_keys(given_states, known)
    states: States = {
        name: {None: state}
        if name in users
        else {key if type(key) is int else str(key): item for key, item in state.items()}
        for name, state in given_states.items()
    }
    rest = {str(key): value for key, value in tree.items() if key not in (_STATE, _GROUPS)}
    found = OptimizerState(states, groups, rest=rest)
    if not all(name.isdecimal() for name in found.parameters):
        return found
    names = _names_of_numbers(found)
    if names is None:
        return dataclasses.replace(found, is_by_number=bool(found.parameters))
    return found.renamed(names.__getitem__)


def _names_of_numbers(numbered: OptimizerState) -> dict[str, str] | None:
    """Return the parameter of each number, if ``param_names`` tell. Shapes cannot."""
    names: dict[str, str] = {}
    for group in numbered.param_groups:
        listed = group.get("param_names")
        if not isinstance(listed, (list, tuple)) or len(listed) != len(group["params"]):
            return None
        names |= zip(group["params"], map(str, listed), strict=True)
    num = sum(len(group["params"]) for group in numbered.param_groups)
    is_certain = (
        len(names) == len(set(names.values())) == num and {*numbered.parameters} <= names.keys()
    )
    return names if is_certain else None


def name_optimizer(
    archive: Archive, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Give the numbered parameters of an optimizer their names, in the order of the numbers.
    shapes: of the model's tensors. Raises ValueError if they do not fit."""
    numbered = OptimizerState(archive.states, archive.param_groups or [])
    given = sorted(numbered.parameters, key=int)
    if len(names) != len(given) or len(set(names)) < len(names):
        raise ValueError(f"{len(set(names))} different names for {len(given)} parameters")
    by_number = dict(zip(given, names, strict=True))
    for number, name in by_number.items():
        if name not in shapes:
            raise ValueError(f"the name {name!r}, which no tensor of the model has")
        values = archive.states.get(number, {}).values()
        found = {each.shape for each in values if isinstance(each, StoredTensor) and each.shape}
        if len(found) == 1 and found != {shapes[name]}:
            raise ValueError(
                f"{name!r}, of shape {list(shapes[name])}, as number {number}, whose state has the "
                f"shape {list(*found)}"
            )
    by_name = numbered.renamed(by_number.__getitem__)
    archive.states, archive.param_groups = by_name.states, by_name.param_groups
    archive.is_by_number = False
