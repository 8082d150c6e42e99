"""The settings (learning rate, weight decay, ...) that the parameter groups of an optimizer get
from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ._report import LoadReport
from ._texts import joined

# Settings of torch.optim that choose an implementation, and change no number.
_IMPLEMENTATION = frozenset({"capturable", "differentiable", "foreach", "fused"})


def settings_for(
    path: Path,
    saved: Sequence[Mapping[str, Any]],
    param_groups: Sequence[Mapping[str, Any]],
    names: Mapping[torch.Tensor, Sequence[str]],
    report: LoadReport,
    strict: bool,
) -> list[dict[str, Any]]:
    """Return the settings for each group of the optimizer: those of its parameters or, where none
    of them was saved with settings, those of the group at the same position if no other group has
    them.

    saved: groups with the names of parameters as "params". names: of each parameter of the
    optimizer. Raises CheckpointError for a group of parameters that were saved with different
    settings, and for groups with different settings whose parameters were saved in one group; not
    strict: they keep their own, and the report says so.
    """
    all_settings = [{key: group[key] for key in group if key != "params"} for group in saved]
    of_name = {name: number for number, group in enumerate(saved) for name in group["params"]}
    claimed: list[list[int]] = []  # by group of the optimizer: numbers of saved groups
    for group in param_groups:
        own_names = [name for parameter in group["params"] for name in names[parameter]]
        claimed.append(list(dict.fromkeys(of_name[n] for n in own_names if n in of_name)))
    split = [_among_heirs(each, number, param_groups, claimed) for number, each in enumerate(saved)]
    result: list[dict[str, Any]] = []
    for number, (group, own) in enumerate(zip(param_groups, claimed, strict=True)):
        settings: dict[str, Any] = {}
        if differences := _among_saved([saved[each] for each in own]):
            what = "Parameters in one group of the optimizer were saved with different settings."
            kept = "its parameters were saved with different ones"
        elif differences := [text for each in own for text in split[each]]:
            what = "Parameters of one saved group are in groups with different settings."
            kept = "other groups with other settings were saved with it"
        elif own:
            settings = all_settings[own[0]]
        elif len(saved) == len(param_groups) and not any(number in each for each in claimed):
            settings = all_settings[number]
        elif group["params"]:
            report.settings_kept[number] = "none of its parameters was saved with settings"
        if differences and strict:
            raise _unlike(what, differences, number, path)
        if differences:
            report.settings_kept[number] = kept
        result.append(
            {key: _like(copy.deepcopy(value), group.get(key)) for key, value in settings.items()}
        )
    return result


def _among_saved(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how the settings of saved groups differ, of which one group would get them all."""
    return [
        f"{key}={groups[0].get(key)!r} for {groups[0]['params'][0]!r}, "
        f"{other.get(key)!r} for {other['params'][0]!r}"
        for other in groups[1:]
        for key in dict.fromkeys([*groups[0], *other])
        if key != "params" and repr(groups[0].get(key)) != repr(other.get(key))
    ]


def _among_heirs(
    saved: Mapping[str, Any],
    number: int,
    param_groups: Sequence[Mapping[str, Any]],
    claimed: Sequence[Sequence[int]],
) -> list[str]:
    """Return how the groups differ whose parameters were saved in one: all would get its settings,
    and lose what makes them differ."""
    heirs = [heir for heir, own in enumerate(claimed) if number in own]
    return [
        f"{key}={first[key]} in group {heirs[0]}, {other[key]} in group {heir}, saved as {value!r}"
        for heir in heirs[1:]
        for first, other in [(param_groups[heirs[0]], param_groups[heir])]
        for key, value in saved.items()
        if key in first and key in other and key not in ("params", *_IMPLEMENTATION)
        if not _is_same(first[key], other[key])
    ]


def _like(value: Any, own: Any) -> Any:
    """Return a setting; a tensor where the optimizer has one, of its dtype and on its device."""
    if isinstance(own, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
        found = torch.as_tensor(value)
        if found.numel() == own.numel():
            return found.to(own.device, own.dtype).view(own.shape)
    return value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        one, other = other, one
    if isinstance(one, torch.Tensor):
        other = _like(other, one)
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def _unlike(what: str, differences: list[str], number: int, path: Path) -> CheckpointError:
    return CheckpointError.of(
        what,
        expected="groups like those that were saved, or with the same settings",
        got=joined(differences, 4, "; "),
        where=f"parameter group {number} of the optimizer, {path}",
        fix="make the groups as they were saved, with use_orig_params=True or fully_shard if a "
        "FlatParameter, which is in one group, stands in the way; give them the same settings, and "
        "others after the load; or pass strict=False to keep this optimizer's settings",
    )
