"""What an optimizer takes of a saved state, whether that is a dict or a checkpoint: the parameters
of its numbers, the settings of its groups, and which states are cut as their parameters are.

Saved states are keyed by names before wrapping. Of tensors, which may be plain, sharded, lazy, in a
file or on rank 0, only shapes and dtypes count here: to bring the values is up to the caller."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import nn

from .. import _torch_private
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
            fix="create the optimizer with the same parameter groups as the saved one, load state "
            "that is keyed by names, or load the model alone",
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
    unlike: dict[int, list[str]] = {}  # by number of the saved group
    for each in {number for own in claimed for number in own}:
        heirs = {n: group for n, group in enumerate(ownership.groups) if each in claimed[n]}
        unlike[each] = _among_heirs(saved[each], heirs)
    found: list[tuple[dict[str, Any] | None, str]] = []
    for number, (group, own) in enumerate(zip(ownership.groups, claimed, strict=True)):
        is_alone = not own and len(saved) == len(claimed) and number not in unlike
        its = [saved[each] for each in (own or [number] * is_alone)]
        settings = its[0].items() if its else ()
        differences = _among_saved(its) or [text for each in own for text in unlike[each]]
        copies = {k: _like(snapshot(v), group.get(k)) for k, v in settings if k not in _NAMES}
        found.append((copies if its else None, joined(differences, 4, "; ")))
        if differences and strict:
            raise CheckpointError.of(
                "The parameters were in other groups when they were saved, with other settings.",
                expected="groups like those that were saved, or with the same settings",
                got=found[-1][1],
                where=f"parameter group {number} of the optimizer, {where}",
                fix="make the groups as they were saved, with use_orig_params=True or fully_shard "
                "if a FlatParameter, which is in one group, stands in the way; give them the same "
                "settings, and others after the load; with checkpoint.load, strict=False keeps "
                "their settings",
            )
    return found


def _like(value: Any, own: Any) -> Any:
    """Return a setting; as a tensor like the optimizer's own, if that is one."""
    if isinstance(own, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
        found = torch.as_tensor(value)
        if found.numel() == own.numel():
            return found.to(own.device, own.dtype).view(own.shape)
    return value


def _among_saved(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how the settings of saved groups differ that one group would get."""
    return [
        f"{key}={groups[0].get(key)!r} for {groups[0]['params'][0]!r}, "
        f"{other.get(key)!r} for {other['params'][0]!r}"
        for other in groups[1:]
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
    """Return the states that are cut as their parameters are. entries: of parameters that units
    manage. Raises CheckpointError for a state that is neither cut nor fits any part."""
    by_key: dict[Any, dict[str, Any]] = {}
    for name, entry in entries.items():
        for key, value in entry.items():
            if value is not None:
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
    for name in values:
        param, index = ownership.by_name[name]
        group = ownership.held[param].group
        assert group is not None
        shapes[name] = store_of(group).shape(index)
        is_uncut |= {name} if is_whole(group) else set()
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
                fix="load the optimizer state that was saved with this model, in the layout that "
                "it was saved with, remove such states from it, or load the model alone",
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


@dataclasses.dataclass(frozen=True)
class Fill:
    """A state that is cut, of one of the user's parameters, and the place for its elements."""

    index: int  # of the parameter in its store
    key: Any
    value: Any  # as it was saved; None: it was not, which means zeros
    target: torch.Tensor  # 1-D: this rank's elements


def fitted(
    ownership: ParamOwnership,
    param: nn.Parameter,
    entries: Mapping[int, Mapping[Any, Any]],
    cut: Cut,
    tensor_for: Callable[[nn.Parameter, Any, torch.dtype], torch.Tensor],
) -> tuple[dict[Any, Any], list[Fill]]:
    """Return the state of a parameter of the optimizer, with saved values as they are and tensors
    of its shape, and what these are filled with. entries: by index of the user's parameters in it.
    tensor_for: returns, for a parameter, key and dtype, a tensor."""
    held = ownership.held[param]
    names, store = dict(held.names), None if held.group is None else store_of(held.group)
    state: dict[Any, Any] = {}
    runs: dict[Any, torch.Tensor] = {}  # by key: this rank's elements, 1-D
    for index, entry in entries.items():
        for key, value in entry.items():
            if (names[index], key) not in cut:
                state[key] = value if state.get(key) is None else state[key]
            elif key not in runs:
                state[key] = tensor_for(param, key, dtype_of(value))
                runs[key] = _torch_private.local_part(state[key]).view(-1)
    fills = []
    for key, run in runs.items():
        for index, entry in entries.items():
            target = run if store is None else run[store.part_in_sharded_param(index).slice]
            value = entry[key] if (names[index], key) in cut else None
            fills.append(Fill(index, key, value, target))
    return state, fills
