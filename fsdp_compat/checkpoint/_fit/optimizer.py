"""The optimizer state that a rank reads from a checkpoint, and the settings of its parameter
groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import _torch_private
from ..._archive.archive import StoredTensor
from ..._state.held import HeldPart, of_whole
from ..._state.optim_contents import (
    CompositeOptimizer,
    NumberedState,
    ParamOwnership,
    inner_optimizers,
    is_count,
    ownership_of,
)
from ..._state.optim_fit import (
    ONLY_NEW,
    Fill,
    fitted,
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
        self._source, self._optimizer = source, optimizer
        self.settings_kept: dict[int, str] = {}  # groups that keep their settings, and why
        where = f"the state of {type(optimizer).__name__}"
        owned = ownership_of(optimizer.param_groups, where, units_of(model), model)
        self._names = {p: tuple(owned.held[p].all_names.values()) for p in owned.numbers}
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._settings: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
        self._state: dict[torch.Tensor, dict[Any, Any]] = {}  # by parameter of the optimizer
        self._kept: set[torch.Tensor] = set()  # parameters whose state is left as it is
        self._left = left
        if source.archive.is_by_number:
            numbered = source.archive.param_groups or ()
            names = names_of_numbers(numbered, owned, names_before(model), str(source.path))
            source.number_optimizer([[names[n] for n in group["params"]] for group in numbered])
        self._users: dict[str, Any] = {}  # states that belong to no parameter
        saved = source.param_groups()
        kept = _why_kept(saved, source.archive.optimizer_classes, optimizer)
        if kept and strict:
            raise CheckpointError.of(
                f"The checkpoint holds {kept}.",
                expected=f"the state of {classes_of(optimizer)[0]}",
                got=kept,
                where=str(source.path),
                fix="build the optimizer that was saved; or pass optimizer=None to load the model "
                "alone, or strict=False to checkpoint.load(path, ...) to keep the optimizer's own",
            )
        if kept:
            self._kept.update(self._params)
            why = f"the checkpoint holds {kept}"
            self.settings_kept.update(dict.fromkeys(range(len(optimizer.param_groups)), why))
        else:
            source.archive.left_out += [
                f"the state of {name}, {which}"
                for name, which in not_loaded(owned, saved or [], source.with_state())
                if not (which is ONLY_NEW and name in left)
            ]
            self._plan_settings(owned, saved or [], strict)
            self._plan_states(owned, taken)
            self._users = source.user_states()

    @property
    def state_kept(self) -> list[str]:
        """The names of the parameters whose state is not loaded."""
        named = ((each, names[0]) for each in self._params for names in self._names[each])
        return [name for each, name in named if each in self._kept or name in self._left]

    def apply(self) -> None:
        """Load the states that were read, and the settings."""
        optimizer = self._optimizer
        numbers = {parameter: number for number, parameter in enumerate(self._params)}
        states: dict[Any, Any] = optimizer.state
        kept = {p: states[p] for p in self._params if p in self._kept and p in states}
        users = {k: v for k, v in states.items() if not isinstance(k, torch.Tensor)} | self._users
        state = {
            parameter: {key: _as_state(key, value, parameter) for key, value in values.items()}
            for parameter, values in self._state.items()
        }
        optimizer.load_state_dict(
            NumberedState(
                state={numbers[p]: dict(values) for p, values in state.items()},
                param_groups=[
                    {**group, **settings, "params": [numbers[p] for p in group["params"]]}
                    for group, settings in zip(optimizer.param_groups, self._settings, strict=True)
                ],
            )
        )
        # load_state_dict casts tensors to the dtype of their parameter, and mangles texts.
        for parameter, values in state.items():
            for key, value in values.items():
                loaded = getattr(optimizer.state[parameter].get(key), "dtype", None)
                if isinstance(value, dict) and loaded is not None:
                    continue  # the optimizer has put a tensor together
                if not isinstance(value, torch.Tensor) or loaded not in (None, value.dtype):
                    optimizer.state[parameter][key] = value
        for key, values in (*kept.items(), *users.items()):
            optimizer.state[key] = values

    # -- planning

    def _plan_settings(
        self, owned: ParamOwnership, saved: Sequence[Mapping[str, Any]], strict: bool
    ) -> None:
        """Take the settings that parameters were saved with. Raises as ``settings_for`` does."""
        where = str(self._source.path)
        for number, (match, differences) in enumerate(settings_for(owned, saved, where, strict)):
            if differences:
                self.settings_kept[number] = differences
            elif match is not None:
                self._settings[number] = match
            elif self._optimizer.param_groups[number]["params"]:
                self.settings_kept[number] = "none of its parameters was saved with settings"

    def _plan_states(self, owned: ParamOwnership, taken: Sequence[HeldPart]) -> None:
        by_place = {(id(held.group), held.number): held for held in taken if held.group}
        parts: dict[nn.Parameter, dict[int, HeldPart]] = {}  # of each, by index in its group
        for param in owned.numbers:
            contents = owned.held[param]
            if contents.group is None:
                found = {i: of_whole(its, param.detach()) for i, its in contents.all_names.items()}
                inside = {i: held for i, held in found.items() if held.names[0] not in self._left}
            else:
                places = {index: (id(contents.group), index) for index in contents.all_names}
                inside = {index: by_place[at] for index, at in places.items() if at in by_place}
            if contents.all_names and not inside:
                self._kept.add(param)
            elif not owned.is_vacant(param):
                parts[param] = inside
        entries = {
            param: {index: self._source.state_of(held) for index, held in inside.items()}
            for param, inside in parts.items()
        }
        sharded, cut = dict[str, Mapping[Any, Any]](), set[tuple[str, Any]]()
        for param, inside in parts.items():
            for index, held in inside.items():
                name, entry = held.names[0], entries[param][index]
                if held.group is not None:
                    sharded[name] = entry
                else:
                    cut |= {(name, k) for k, v in entry.items() if _has_shape(v, held.shape)}
        cut |= per_element(owned, sharded, str(self._source.path))
        for param, inside in parts.items():
            state, fills = fitted(owned, param, entries[param], cut, self._tensor_for)
            self._plan_state(param, inside, state, fills)

    def _plan_state(
        self,
        param: nn.Parameter,
        inside: Mapping[int, HeldPart],
        state: Mapping[Any, Any],
        fills: Sequence[Fill],
    ) -> None:
        """Plan to read the state of a parameter, of whose parts those ``inside`` are loaded."""
        source, filled = self._source, {fill.key for fill in fills}
        for fill in fills:
            if fill.value is None:
                source.plan_zeros(fill.target)
            else:
                source.plan(fill.value, inside[fill.index].boxes(fill.target))
        found = {k: v if k in filled else source.planned(v) for k, v in state.items()}
        for held in inside.values():
            found |= source.planned(source.rank_local_states(held))
        present: dict[Any, Any] = self._optimizer.state.get(param) or {}
        if len(inside) < len(self._names[param]):  # the rest of a FlatParameter keeps its own
            found = {**present, **found}
        if found:
            keys = dict.fromkeys([*present, *found])  # in the optimizer's order
            self._state[param] = {key: found[key] for key in keys if key in found}

    def _tensor_for(self, param: torch.Tensor, key: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor to read a state into: the optimizer's own if it fits, or a new one."""
        own: Any = (self._optimizer.state.get(param) or {}).get(key)
        kind = torch.Tensor if _torch_private.is_plain(param) else type(param.data)
        if type(own) is kind and own.dtype == dtype and own.device == param.device:
            facts = [(each.shape, getattr(each, "placements", None)) for each in (own, param)]
            if facts[0] == facts[1] and _torch_private.local_part(own).is_contiguous():
                return own
        format = torch.contiguous_format  # until it is loaded: its rows are read as they are saved
        return torch.zeros_like(param.detach(), dtype=dtype, memory_format=format)


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, StoredTensor) and value.shape == shape


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
