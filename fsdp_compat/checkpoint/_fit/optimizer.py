"""The optimizer state that a rank reads from a checkpoint, and the settings of its parameter
groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import _torch_private
from ..._archive.archive import is_count, is_per_element
from ..._engine.group import Group
from ..._layout.box import Box
from ..._state.block_states import PartStates, Recut
from ..._state.held import HeldPart, of_whole
from ..._state.optim_contents import (
    CompositeOptimizer,
    NumberedState,
    inner_optimizers,
    of_tensors,
    ownership_of,
)
from ..._state.optim_fit import (
    ONLY_NEW,
    Fill,
    bring,
    grouped,
    names_of_numbers,
    not_loaded,
    per_element,
    settings_for,
)
from ..._state.units import names_before, units_of
from ..._text import joined
from ...errors import CheckpointError
from .._live.optimizers import classes_of
from .source import Source


class OptimizerLoadPlan:
    """The states and settings for this rank's optimizer. First read, then ``apply``."""

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        taken: Sequence[HeldPart],
        left: set[str],
        strict: bool,
    ) -> None:
        """taken: parts that are loaded; left: names of all others. Raises CheckpointError."""
        self._source, self._optimizer, self._left = source, optimizer, left
        self.settings_kept: dict[int, str] = {}  # groups that keep their settings, and why
        units, path = units_of(model), str(source.path)
        where = f"the state of {type(optimizer).__name__}"
        self._owned = ownership_of(optimizer.param_groups, where, units, model)
        self._part_states = PartStates(self._owned, optimizer, path)
        self._settings: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
        self._state: dict[nn.Parameter, dict[Any, Any]] = {}  # by parameter of the optimizer
        self._kept: set[nn.Parameter] = set()  # parameters whose state is left as it is
        self._parts: dict[str, HeldPart] = {}  # what this rank loads of parameters, by name
        self._users: dict[str, Any] = {}  # states that belong to no parameter
        if source.archive.is_by_number:
            numbered = source.archive.param_groups or ()
            names = names_of_numbers(numbered, self._owned, names_before(model), path)
            source.number_optimizer([[names[n] for n in group["params"]] for group in numbered])
        saved = source.param_groups()
        if kept := _why_kept(saved, source.archive.optimizer_classes, optimizer):
            if strict:
                raise CheckpointError.of(
                    f"The checkpoint holds {kept}.",
                    expected=f"the state of {classes_of(optimizer)[0]}",
                    got=kept,
                    where=path,
                    fix="build the optimizer that was saved; or pass optimizer=None to load the "
                    "model alone, or strict=False to checkpoint.load(path, ...) to keep the "
                    "optimizer's own state",
                )
            self._kept.update(self._owned.numbers)
            why = f"the checkpoint holds {kept}"
            self.settings_kept.update(dict.fromkeys(range(len(optimizer.param_groups)), why))
            return
        source.archive.left_out += [
            f"the state of {name}, {which}"
            for name, which in not_loaded(self._owned, saved or [], source.with_state())
            if not (which is ONLY_NEW and name in left)
        ]
        for number, (match, differences) in enumerate(
            settings_for(self._owned, saved or [], path, strict)
        ):
            if match is not None and not differences:
                self._settings[number] = match
            elif differences or optimizer.param_groups[number]["params"]:
                why = differences or "none of its parameters was saved with settings"
                self.settings_kept[number] = why
        groups = [group for named in units for group in named.unit.groups]
        self._plan_states(taken, groups)
        self._users = source.user_states()

    @property
    def state_kept(self) -> list[str]:
        """The names of the parameters whose state is not loaded."""
        named = ((p, name) for p in self._owned.numbers for name in self._owned.names_in(p))
        return [name for p, name in named if p in self._kept or name in self._left]

    def apply(self) -> None:
        """Load the states that were read, and the settings."""
        optimizer, numbers = self._optimizer, self._owned.numbers
        states: dict[Any, Any] = optimizer.state
        kept = {p: states[p] for p in numbers if p in self._kept and p in states}
        users = {k: v for k, v in states.items() if not isinstance(k, torch.Tensor)} | self._users
        state = {
            parameter: {
                key: _as_state(key, self._put_together(parameter, key, value), parameter)
                for key, value in values.items()
            }
            for parameter, values in self._state.items()
        }
        optimizer.load_state_dict(
            NumberedState(
                state={numbers[p]: dict(values) for p, values in state.items()},
                param_groups=grouped(optimizer.param_groups, self._settings, numbers),
            )
        )
        # load_state_dict casts tensors to the dtype of their parameter, and mangles texts.
        for parameter, values in state.items():
            for key, value in values.items():
                loaded = getattr(optimizer.state[parameter].get(key), "dtype", None)
                is_taken = loaded is not None or key not in optimizer.state[parameter]
                if isinstance(value, dict) and is_taken:
                    continue  # the optimizer has put a tensor together, or taken the dict apart
                if not isinstance(value, torch.Tensor) or loaded not in (None, value.dtype):
                    optimizer.state[parameter][key] = value
        for key, values in (*kept.items(), *users.items()):
            optimizer.state[key] = values

    def _put_together(self, parameter: nn.Parameter, key: Any, value: Any) -> Any:
        """Return a state that was read: of this part, and in one tensor."""
        if isinstance(value, Recut):
            return value.value()
        is_in_dict = isinstance(value, dict) and not isinstance(self._optimizer, CompositeOptimizer)
        like = self._part_states.created.get(parameter, {}).get(key) if is_in_dict else None
        return of_tensors({key: value}, {key: like})[key]

    def _plan_states(self, taken: Sequence[HeldPart], groups: Sequence[Group]) -> None:
        source, owned, parts = self._source, self._owned, self._parts
        managed = {held.names[0]: held for held in taken if held.group is not None}
        for param in owned.numbers:
            contents = owned.held[param]
            inside = dict[str, HeldPart]()
            for names in contents.all_names.values():
                if contents.group is not None and names[0] in managed:
                    inside[names[0]] = managed[names[0]]
                elif contents.group is None and names[0] not in self._left:
                    inside[names[0]] = of_whole(names, param.detach())
            if contents.all_names and not inside:
                self._kept.add(param)
            elif not owned.is_vacant(param):
                parts |= inside
        entries = {name: dict(source.state_of(held)) for name, held in parts.items()}
        blocks = {name: self._part_states.take_blocks(name, entries[name]) for name in parts}
        cut = per_element(owned, entries, str(source.path))
        for name, held in parts.items():
            own, others = source.rank_local_states(held)
            entries[name] |= own
            others |= {state.key: {state.part.run: state.value} for state in blocks[name]}
            for key, pieces in others.items():
                entries[name][key] = self._part_states.recut(name, key, pieces)
        for param, found in bring(owned, entries, cut, groups, self).items():
            present: dict[Any, Any] = self._optimizer.state.get(param) or {}
            if not parts.keys() >= {*owned.names_in(param)}:
                found = {**present, **found}  # the rest of a FlatParameter keeps its own
            if found:
                keys = dict.fromkeys([*present, *found])  # in the optimizer's order
                self._state[param] = {key: found[key] for key in keys if key in found}

    # -- how values are brought: they are read later

    def tensor_for(self, param: nn.Parameter, key: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the optimizer's own state if it fits, or a new one."""
        own: Any = (self._optimizer.state.get(param) or {}).get(key)
        kind = torch.Tensor if _torch_private.is_plain(param) else type(param.data)
        if type(own) is kind and own.dtype == dtype and own.device == param.device:
            facts = [(each.shape, getattr(each, "placements", None)) for each in (own, param)]
            if facts[0] == facts[1] and _torch_private.local_part(own).is_contiguous():
                return own
        format = torch.contiguous_format  # until it is loaded: its rows are read as they are saved
        return torch.zeros_like(param.detach(), dtype=dtype, memory_format=format)

    def fill(self, group: Group, fills: Sequence[Fill]) -> None:
        for fill in fills:
            if fill.value is None:
                self._source.plan_zeros(fill.target)
            else:
                self._source.plan(fill.value, self._parts[fill.name].boxes(fill.target))

    def uncut(self, param: nn.Parameter, key: Any, value: Any) -> Any:
        shape = tuple(param.shape)
        if is_per_element(key, value, shape) and self._owned.held[param].group is None:
            target = self.tensor_for(param, key, value.dtype)
            self._source.plan(value, [(Box.of_whole(shape), _torch_private.local_part(target))])
            return target
        if isinstance(value, Recut):
            return dataclasses.replace(value, values=self._source.planned(value.values))
        return self._source.planned(value)


def _why_kept(
    saved: Sequence[Mapping[str, Any]] | None,
    classes: Sequence[str],
    optimizer: torch.optim.Optimizer,
) -> str:
    """Return what the checkpoint holds instead of the optimizer's state, or "". A class of another
    name may implement the same algorithm, but another algorithm has other settings."""
    if saved is None:
        return "no optimizer state"
    if not classes or all({*classes} & {*classes_of(each)} for each in inner_optimizers(optimizer)):
        return ""
    if isinstance(optimizer, CompositeOptimizer):
        return f"the state of {joined(classes, 4, ', ')}"
    keys = [{key for group in each for key in group} for each in (saved, optimizer.param_groups)]
    is_alike = keys[0] <= keys[1] or keys[1] <= keys[0]
    return "" if is_alike else f"the state of {classes[0]}"


def _as_state(key: Any, value: Any, parameter: torch.Tensor) -> Any:
    """Move a state to its parameter, laid out as it is; counts stay on the CPU."""
    if not isinstance(value, torch.Tensor) or is_count(key, tuple(value.shape)):
        return value
    if value.shape == parameter.shape and value.stride() != parameter.stride():
        return torch.empty_like(parameter.detach(), dtype=value.dtype).copy_(value)
    return value.to(parameter.device)
