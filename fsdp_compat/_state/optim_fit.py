"""What an optimizer takes of a saved state, whether that is a dict or a checkpoint: the parameters
of its numbers, the settings of its groups, which states are cut as their parameters are, and in
what order they are brought.

Saved states are keyed by names before wrapping. Of tensors, which may be plain, sharded, lazy, in a
file or on rank 0, only shapes and dtypes count here: a ``Bringer`` knows where the values are."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._engine.group import Group
from .._engine.state_store import store_of
from .._text import joined
from ..errors import CheckpointError
from .loaded_values import dtype_of, is_sharded, is_tensor, shape_of, unfit
from .optim_contents import ParamOwnership, is_per_element_of_0d, is_whole, numbered_names, snapshot

# -- names


def names_of_numbers(
    saved: Sequence[Mapping[str, Any]] | None,
    ownership: ParamOwnership,
    order: Sequence[str],
    where: str,
) -> dict[Any, str]:
    """Return names by the numbers in the saved groups, or else by the optimizer's own. order: of
    the names before wrapping. Raises CheckpointError for groups of other sizes."""
    if ownership.has_owners:  # whose numbers differ by rank
        raise CheckpointError.of(
            "The optimizer state is keyed by numbers, and GatheredOptimizer by names.",
            expected="names of parameters",
            got="numbers, as torch.optim saves them",
            where=where,
            fix="give it names first: FSDP.rekey_optim_state_dict(state, "
            "OptimStateKeyType.PARAM_NAME, plain_model, optim=plain_optimizer)",
        )
    by_group = numbered_names(ownership, order)
    names = list(itertools.chain.from_iterable(by_group))
    if saved is None:
        return dict(enumerate(names))
    expected, found = [len(its) for its in by_group], [len(group["params"]) for group in saved]
    if found != expected:
        raise CheckpointError.of(
            "The optimizer state is numbered, and does not fit the optimizer.",
            expected=f"{len(expected)} parameter group(s), of {expected} parameters",
            got=f"{len(found)}, of {found} parameters",
            where=f"{where}, {ownership.where}",
            fix="make the groups as they were saved, load state by names, or load the model alone",
        )
    numbers = [number for group in saved for number in group["params"]]
    given = [name for group in saved for name in group.get("param_names", ())]  # if torch knew them
    own = [ownership.name_before(name) for name in given]
    return dict(zip(numbers, own if {*own} == {*names} else names, strict=True))


ONLY_NEW = "which only the new optimizer has"


def not_loaded(
    ownership: ParamOwnership, saved: Sequence[Mapping[str, Any]], with_state: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the first names of parameters whose state is not loaded, and why.
    saved: groups by names. with_state: names of parameters with a saved state."""
    listed = {*with_state, *(name for group in saved for name in group["params"])}
    for param, contents in ownership.held.items():
        is_here = param in ownership.numbers
        is_elsewhere = ownership.has_owners or ownership.is_vacant(param)
        for names in contents.all_names.values():
            if listed.isdisjoint(names):
                which = ONLY_NEW if is_here else ""
            elif is_here:
                is_without = param.requires_grad and not any(name in with_state for name in names)
                which = "which was not saved" if with_state and is_without else ""
            else:
                which = "" if is_elsewhere else "which only the saved optimizer has"
            if which:
                yield names[0], which


# -- the settings of groups

# Keys of groups that are no settings, and settings of torch.optim that choose an implementation,
# and change no number.
_NAMES = ("params", "param_names")
_IMPLEMENTATION = ("capturable", "differentiable", "foreach", "fused")


def settings_for(
    ownership: ParamOwnership, saved: Sequence[Mapping[str, Any]], where: str, strict: bool = True
) -> list[tuple[dict[str, Any] | None, str]]:
    """Return for each group copies of the settings its parameters were saved with, or else of those
    at its position that no other group takes, or None; with a text if there is more than one value
    of some setting: parameters of one group had different ones, or groups with different settings
    were saved as one. Raises CheckpointError for that, if strict. saved: groups by names."""
    of_name = {name: number for number, group in enumerate(saved) for name in group["params"]}
    claimed: list[list[int]] = []  # by group of the optimizer: numbers of saved groups
    for group in ownership.groups:
        all_names = (its for p in group["params"] for its in ownership.held[p].all_names.values())
        names = itertools.chain.from_iterable(all_names)
        claimed.append(list(dict.fromkeys(of_name[name] for name in names if name in of_name)))
    taken = set(itertools.chain(*claimed))
    found: list[tuple[dict[str, Any] | None, str]] = []
    for number, (group, own) in enumerate(zip(ownership.groups, claimed, strict=True)):
        is_alone = not own and len(saved) == len(claimed) and number not in taken
        its = [saved[each] for each in (own or [number] * is_alone)]
        settings = its[0].items() if its else ()
        differences = differing_settings(its, [f"for {each['params'][0]!r}" for each in its if own])
        for each in own if not differences else ():
            heirs = {n: g for n, g in enumerate(ownership.groups) if each in claimed[n]}
            differences += _among_heirs(saved[each], heirs)
        copies = {k: _like(snapshot(v), group.get(k)) for k, v in settings if k not in _NAMES}
        found.append((copies if its else None, joined(differences, 4, "; ")))
        if differences and strict:
            raise CheckpointError.of(
                "The parameters were in other groups when they were saved, with other settings.",
                expected="groups like those that were saved, or with the same settings",
                got=found[-1][1],
                where=f"parameter group {number} of the optimizer, {where}",
                fix="make the groups as they were saved (a FlatParameter is in one: wrap with "
                "use_orig_params=True); or give them equal settings, and change these after the "
                "load; or keep theirs, with strict=False in checkpoint.load",
            )
    return found


def _like(value: Any, own: Any) -> Any:
    """Return a setting; as a tensor like the optimizer's own, if that is one."""
    if isinstance(own, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
        found = torch.as_tensor(value)
        if found.numel() == own.numel():
            return found.to(own.device, own.dtype).view(own.shape)
    return value


def differing_settings(groups: Sequence[Mapping[str, Any]], whose: Sequence[str]) -> list[str]:
    """Return how the settings of groups differ from the first one's. whose: said of each."""
    return [
        f"{key}={groups[0].get(key)!r} {whose[0]}, {other.get(key)!r} {of_other}"
        for other, of_other in zip(groups[1:], whose[1:], strict=True)
        for key in dict.fromkeys([*groups[0], *other])
        if key not in _NAMES and repr(groups[0].get(key)) != repr(other.get(key))
    ]


def _among_heirs(saved: Mapping[str, Any], heirs: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return how groups differ that were saved as one, and would get its settings."""
    (number, first), *others = heirs.items()
    return [
        f"{key}={first[key]} in group {number}, {other[key]} in group {heir}, saved as {value!r}"
        for heir, other in others
        for key, value in saved.items()
        if key in first and key in other and key not in (*_NAMES, *_IMPLEMENTATION)
        if not bool(torch.as_tensor(_like(first[key], other[key]) == other[key]).all())
    ]


# -- states

Entries = Mapping[str, Mapping[Any, Any]]  # saved states by a parameter's first name and by key
Cut = set[tuple[str, Any]]  # (name, key) of states with one element per element of the parameter


def per_element(ownership: ParamOwnership, entries: Entries, where: str) -> Cut:
    """Return the states that are cut as their parameters are, of those that units manage. Raises
    CheckpointError for a state that is neither cut nor fits any part."""
    by_key: dict[Any, dict[str, Any]] = {}
    for name, entry in entries.items():
        is_managed = ownership.held[ownership.by_name[name][0]].group is not None
        for key, value in entry.items():
            if is_managed and value is not None and not ownership.is_stepped_whole(name):
                by_key.setdefault(key, {})[name] = value
    return {
        (name, key)
        for key, values in by_key.items()
        for name in _cut_names(ownership, key, values, where)
    }


def _cut_names(
    ownership: ParamOwnership, key: Any, values: Mapping[str, Any], where: str
) -> set[str]:
    """Return the parameters whose state ``key`` has one element per element."""
    shapes, is_uncut = dict[str, tuple[int, ...]](), set[str]()
    groups = {held.group for held in ownership.held.values()}
    wholes = {group: is_whole(group) for group in groups if group is not None}
    for name in values:
        param, index = ownership.by_name[name]
        group = ownership.held[param].group
        assert group is not None
        shapes[name] = store_of(group).shape(index)
        is_uncut |= {name} if wholes[group] else set()
    found = {name: _shape(value) for name, value in values.items()}
    tensors = {name for name in values if found[name] is not None}
    alike = {name for name in tensors if found[name] == shapes[name]}
    certain = {name for name in alike if math.prod(shapes[name]) > 1}
    with_dims = [name in alike for name in tensors if shapes[name]]
    is_cut_0d = is_per_element_of_0d(key, with_dims)
    cut = {name for name in alike if shapes[name] or is_cut_0d}
    cut |= {name for name in tensors if is_sharded(values[name])}
    per_element_in = {ownership.by_name[name][0] for name in certain}
    # A few values of a factored state may have the right shape by chance.
    is_factored = 2 * len(certain) <= len(tensors)
    for name, value in values.items():
        is_single = math.prod(found[name] or ()) <= 1 and not _is_object(value)
        if name in cut:
            got = unfit(value, shapes[name], None) if is_tensor(value) else None
        elif name in is_uncut:
            is_other = not is_single and name in tensors and not is_factored
            got = _described(value) if is_other else None
        else:  # a FlatParameter has one state for all, and some optimizers save zeros as one value
            has_place = is_single and ownership.by_name[name][0] not in per_element_in
            got = None if has_place else _described(value)
        if got is not None:
            raise CheckpointError.of(
                "An optimizer state has another shape than its parameter, and cannot be cut.",
                expected=f"a tensor of shape {shapes[name]}, or a number in all of a FlatParameter",
                got=got,
                where=f"state {key!r} of {name!r}, {where}",
                fix="load it in the layout that it was saved with, or without such states",
            )
    return cut


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor in memory, in a file or on rank 0; None for anything else."""
    if isinstance(value, torch.Tensor):
        return shape_of(value)
    is_like_one = isinstance(getattr(value, "dtype", None), torch.dtype) and hasattr(value, "shape")
    return tuple(value.shape) if is_like_one else None


def _is_object(value: Any) -> bool:
    """True for objects, and for containers with tensors in them: what a rank's part may have."""
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return any(_shape(item) is not None or _is_object(item) for item in items)
    return not (_shape(value) is not None or value is None or isinstance(value, (Number, str)))


def _described(value: Any) -> str:
    shape = _shape(value)
    return f"a {type(value).__name__}" if shape is None else f"shape {shape}"


# -- bringing them


@dataclasses.dataclass(frozen=True)
class Fill:
    """A state that is cut, of one of the user's parameters, and the place for its elements."""

    name: str
    param: nn.Parameter  # of the optimizer, or in a group of parameters beside it
    index: int  # in the parameter's store
    key: Any
    value: Any  # as it was saved; None: it was not, which means zeros
    target: torch.Tensor  # 1-D: this rank's elements


class Bringer(typing.Protocol):
    """Brings saved values from a dict of this rank, from rank 0, or from the files of a checkpoint,
    which may fill their places later."""

    def tensor_for(self, param: nn.Parameter, key: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the parameter's shape for a state that is cut."""

    def fill(self, group: Group, fills: Sequence[Fill]) -> None:
        """Bring one state of a group's parameters to its places, which every rank does."""

    def uncut(self, param: nn.Parameter, key: Any, value: Any) -> Any:
        """Return a state that is not cut."""


def bring(
    ownership: ParamOwnership,
    entries: Entries,
    cut: Cut,
    groups: Iterable[Group],
    values: Bringer,
) -> dict[nn.Parameter, dict[Any, Any]]:
    """Return the states that the optimizer loads, by its parameters. groups: of the model, whose
    parameters the optimizer may lack on this rank. Collective if ``values.fill`` is."""
    found: dict[nn.Parameter, dict[Any, Any]] = {}
    for group in groups:
        fills: dict[Any, list[Fill]] = {}  # by key, which is brought at once
        for param in ownership.in_group(group):
            inside = {
                index: name
                for index, name in ownership.held[param].names
                if name in entries and not ownership.is_stepped_whole(name)
            }
            if inside:
                found[param] = {}
                for fill in _cut_to(param, group, inside, entries, cut, values, found[param]):
                    fills.setdefault(fill.key, []).append(fill)
        for of_key in fills.values():
            values.fill(group, of_key)
    for param in ownership.numbers:
        for name in ownership.names_in(param) if ownership.held[param].group is None else ():
            if name in entries:
                state = entries[name].items()
                found[param] = {key: values.uncut(param, key, value) for key, value in state}
    in_order = (param for param in ownership.numbers if param in found)
    return {param: found[param] for param in in_order if not ownership.is_vacant(param)}


def _cut_to(
    param: nn.Parameter,
    group: Group,
    inside: Mapping[int, str],
    entries: Entries,
    cut: Cut,
    values: Bringer,
    state: dict[Any, Any],
) -> Iterator[Fill]:
    """Set the state of a sharded parameter, and yield what it is filled with. inside: names."""
    runs: dict[Any, torch.Tensor] = {}  # by key: this rank's elements, 1-D
    for name in inside.values():
        for key, value in entries[name].items():
            if (name, key) not in cut:
                if state.get(key) is None:
                    state[key] = values.uncut(param, key, value)
            elif key not in runs:
                state[key] = values.tensor_for(param, key, dtype_of(value))
                runs[key] = _torch_private.local_part(state[key]).view(-1)
    store = store_of(group)
    parts = {index: store.part_in_sharded_param(index).slice for index in inside}
    for key, run in runs.items():
        for index, name in inside.items():
            value = entries[name][key] if (name, key) in cut else None
            yield Fill(name, param, index, key, value, run[parts[index]])


def grouped(
    groups: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any] | None],
    keys: Mapping[nn.Parameter, Any],
) -> list[dict[str, Any]]:
    """Return an optimizer's groups with saved settings, and keys in place of parameters."""
    return [
        {**group, **(saved or {}), "params": [keys[p] for p in group["params"]]}
        for group, saved in zip(groups, settings, strict=True)
    ]
