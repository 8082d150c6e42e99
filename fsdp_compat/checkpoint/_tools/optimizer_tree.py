"""The state of an optimizer, in each of the forms in which it is saved, by name where possible.

- ``{"state": {parameter: {key: value}}, "param_groups": [{"params": [...], ...}]}``; a parameter is
  a name (FSDP, torch.distributed.checkpoint) or a number (torch.optim)
- flattened: ``"state.<name>.<key>"`` and ``"param_groups.<name>.<setting>"``"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .archive import StoredTensor

__all__ = ["OptimizerState", "OptimizerTree", "is_optimizer", "merged_optimizer"]

_STATE, _GROUPS = "state", "param_groups"
_STATISTICS = ("running_mean", "running_var")  # buffers of batch norm


@dataclasses.dataclass(frozen=True)
class OptimizerTree:
    """What a file holds of one optimizer."""

    tree: dict[Any, Any]


@dataclasses.dataclass
class OptimizerState:
    """States by parameter and key, and the groups, whose "params" are names or numbers as text."""

    states: dict[str, dict[str, Any]]
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


def merged_optimizer(
    optimizers: Mapping[str, OptimizerTree], tensors: Mapping[str, StoredTensor]
) -> OptimizerState | None:
    """Return one state for all optimizers, or None if several number their parameters or share
    some. tensors: of the model, in its order."""
    found = [_parsed(optimizer.tree, tensors) for optimizer in optimizers.values()]
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


def _parsed(tree: dict[Any, Any], tensors: Mapping[str, StoredTensor]) -> OptimizerState:
    if isinstance(tree.get(_STATE), dict) or _GROUPS in tree:
        return _nested(tree, tensors)
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


def _nested(tree: dict[Any, Any], tensors: Mapping[str, StoredTensor]) -> OptimizerState:
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
        found = _names_of_numbers(states, groups, tensors) if keys else {}
        names = {str(key): str(key) for key in keys} if found is None else found
        is_by_number = found is None
    return OptimizerState(
        {names[str(key)]: values for key, values in states.items() if str(key) in names},
        [{**group, "params": [names[str(key)] for key in group["params"]]} for group in groups],
        is_by_number,
        rest,
    )


def _names_of_numbers(
    states: Mapping[Any, Any],
    groups: Sequence[dict[str, Any]],
    tensors: Mapping[str, StoredTensor],
) -> dict[str, str] | None:
    """Return the parameter of each number, or None if it is not certain."""
    given = [str(number) for group in groups for number in group["params"]]
    if len(set(given)) < len(given) or not {str(key) for key in states} <= set(given):
        return None
    # torch.optim numbers the parameters as the groups list them; FSDP's numbers, as the model does.
    numbers = sorted(given, key=int)
    is_ordered = len(groups) == 1 or numbers != given
    listed = [group.get("param_names") for group in groups]
    if all(
        isinstance(names, (list, tuple)) and len(names) == len(group["params"])
        for names, group in zip(listed, groups, strict=True)
    ):
        names = [str(name) for group_names in listed for name in group_names or ()]
        if len(set(names)) == len(names):
            return dict(zip(given, names, strict=True))
    candidates = [name for name, tensor in tensors.items() if _may_train(name, tensor, tensors)]
    shapes = {str(number): _shape(values) for number, values in states.items()}
    wanted = [shapes.get(number) for number in numbers]
    offered = [tensors[name].shape for name in candidates]
    chosen = _only_choice(wanted, offered, is_ordered)
    if chosen is None:
        return None
    return {number: candidates[index] for number, index in zip(numbers, chosen, strict=True)}


def _may_train(name: str, tensor: StoredTensor, tensors: Mapping[str, StoredTensor]) -> bool:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return False
    prefix, _, last = name.rpartition(".")
    counter = f"{prefix}.num_batches_tracked" if prefix else "num_batches_tracked"
    return last not in _STATISTICS or counter not in tensors


def _shape(states: Any) -> tuple[int, ...] | None:
    """Return the shape of a parameter with these states, or None if they do not tell it."""
    shapes = {
        value.shape
        for key, value in states.items()
        if isinstance(value, StoredTensor) and key != "step"
    }
    return shapes.pop() if len(shapes) == 1 else None


def _only_choice(
    wanted: Sequence[tuple[int, ...] | None],
    offered: Sequence[tuple[int, ...]],
    is_ordered: bool,
) -> list[int] | None:
    """Return the index of the offered shape for each wanted one (None: any), if there is only one
    choice. is_ordered: the chosen ones follow one another in the order of the wanted ones."""
    if is_ordered:
        first = _leftmost(wanted, offered)
        last = _leftmost(wanted[::-1], offered[::-1])
        if first is None or last is None:
            return None
        return first if first == [len(offered) - 1 - index for index in reversed(last)] else None
    places: dict[tuple[int, ...] | None, list[int]] = {}
    for index, shape in enumerate(offered):
        places.setdefault(shape, []).append(index)
    chosen = [places.get(shape, []) for shape in wanted]
    if any(len(indices) != 1 for indices in chosen) or len(set(wanted)) < len(wanted):
        return None
    return [indices[0] for indices in chosen]


def _leftmost(
    wanted: Sequence[tuple[int, ...] | None], offered: Sequence[tuple[int, ...]]
) -> list[int] | None:
    chosen, index = [], 0
    for shape in wanted:
        while index < len(offered) and shape not in (None, offered[index]):
            index += 1
        if index == len(offered):
            return None
        chosen.append(index)
        index += 1
    return chosen
