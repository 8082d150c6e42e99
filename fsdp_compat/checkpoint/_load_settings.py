"""The settings (learning rate, weight decay, ...) that the parameter groups of an optimizer get
from a checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, explain
from ._report import LoadReport
from ._texts import joined

# Settings of torch.optim that choose an implementation, and change no number.
_IMPLEMENTATION = frozenset({"capturable", "differentiable", "foreach", "fused"})


@dataclasses.dataclass(frozen=True)
class _SavedGroup:
    number: int
    names: list[str]  # of its parameters
    settings: dict[str, Any]

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """The settings as texts to compare."""
        return {key: repr(value) for key, value in self.settings.items()}


def settings_for(
    path: Path,
    saved_groups: Sequence[Mapping[str, Any]],
    param_groups: Sequence[Mapping[str, Any]],
    names: Mapping[torch.Tensor, Sequence[str]],
    report: LoadReport,
    strict: bool,
) -> list[dict[str, Any]]:
    """Return the settings for each group of the optimizer: those of its parameters or, where none
    of them was saved with settings, those of the group at the same position if no other group has
    them.

    saved_groups: with the names of parameters as "params". names: of each parameter of the
    optimizer. Raises CheckpointError for a group of parameters that
    were saved with different settings, and for groups with different settings whose parameters were
    saved in one group; not strict: they keep their own, and the report says so.
    """
    saved = [
        _SavedGroup(number, group["params"], {key: group[key] for key in group if key != "params"})
        for number, group in enumerate(saved_groups)
    ]
    by_name = {name: group for group in saved for name in group.names}
    claimed: list[list[_SavedGroup]] = []
    for group in param_groups:
        own_names = [name for parameter in group["params"] for name in names[parameter]]
        found = {id(by_name[name]): by_name[name] for name in own_names if name in by_name}
        claimed.append(list(found.values()))
    all_claimed = {each.number for groups in claimed for each in groups}
    split = {
        number: problem
        for each in saved
        for heirs in [[number for number, groups in enumerate(claimed) if each in groups]]
        if (problem := _split_group(path, param_groups, each, heirs)) is not None
        for number in heirs
    }
    if split and strict:
        raise CheckpointError(next(iter(split.values())))
    result: list[dict[str, Any]] = []
    for number, (group, found_groups) in enumerate(zip(param_groups, claimed, strict=True)):
        settings: dict[str, Any] = {}
        if any(each.texts != found_groups[0].texts for each in found_groups):
            problem = _several_settings(path, number, found_groups)
            if strict:
                raise CheckpointError(problem)
            report.settings_kept[number] = "its parameters were saved with different ones"
        elif number in split:
            report.settings_kept[number] = "other groups with other settings were saved with it"
        elif found_groups:
            settings = found_groups[0].settings
        elif number < len(saved) == len(param_groups) and number not in all_claimed:
            settings = saved[number].settings
        elif group["params"]:
            report.settings_kept[number] = "none of its parameters was saved with settings"
        result.append(
            {key: _like(copy.deepcopy(value), group.get(key)) for key, value in settings.items()}
        )
    return result


def _like(value: Any, own: Any) -> Any:
    """Return a setting; a tensor where the optimizer has one, of its dtype and on its device."""
    if isinstance(own, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
        found = torch.as_tensor(value)
        if found.numel() == own.numel():
            return found.to(own.device, own.dtype).view(own.shape)
    return value


def _split_group(
    path: Path,
    param_groups: Sequence[Mapping[str, Any]],
    saved: _SavedGroup,
    heirs: Sequence[int],
) -> str | None:
    """Return the problem with groups of the optimizer, ``heirs``, whose parameters were saved in
    one group: both would get its settings, and lose what makes them differ. None if nothing
    does."""
    for number in heirs[1:]:
        first, other = param_groups[heirs[0]], param_groups[number]
        keys = [
            key
            for key in saved.texts
            if key in first and key in other and key not in _IMPLEMENTATION
            if not _is_same(first[key], other[key])
        ]
        if keys:
            return explain(
                "Parameters of one saved group are in groups with different settings.",
                expected="groups like those that were saved, or with the same settings",
                got=joined(
                    [
                        f"{key}={first[key]} in group {heirs[0]}, {other[key]} in group {number}, "
                        f"saved as {saved.texts[key]}"
                        for key in keys
                    ],
                    4,
                    "; ",
                ),
                where=f"parameter groups of the optimizer, {path}",
                fix="give these groups the same settings and change them after the load; or pass "
                "strict=False to keep this optimizer's settings",
            )
    return None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        one, other = other, one
    if isinstance(one, torch.Tensor):
        other = _like(other, one)
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def _several_settings(path: Path, number: int, groups: Sequence[_SavedGroup]) -> str:
    first = groups[0]
    other = next(group for group in groups if group.texts != first.texts)
    keys = [
        key
        for key in dict.fromkeys([*first.texts, *other.texts])
        if first.texts.get(key) != other.texts.get(key)
    ]
    return explain(
        "Parameters in one group of the optimizer were saved with different settings.",
        expected="groups like those that were saved; a FlatParameter (use_orig_params=False) is in "
        "one group, with one setting for all parameters in it",
        got=joined(
            [
                f"{key}={first.texts.get(key)} for {first.names[0]!r}, "
                f"{other.texts.get(key)} for {other.names[0]!r}"
                for key in keys
            ],
            4,
            "; ",
        ),
        where=f"parameter group {number} of the optimizer, {path}",
        fix="make the groups as they were saved, with use_orig_params=True or fully_shard if a "
        "FlatParameter stands in the way; or pass strict=False to keep this optimizer's settings",
    )
