"""The optimizer state that a rank reads from a checkpoint, and the settings of its parameter
groups."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._engine.state_store import store_of
from .._layout.spec import Interval
from .._state.optim_contents import (
    CompositeOptimizer,
    NumberedState,
    ParamOwnership,
    inner_optimizers,
    is_count,
    like,
    numbered_names,
    ownership_of,
    settings_for,
)
from .._state.units import names_before, units_of
from .._text import joined
from ..errors import CheckpointError
from ._named_groups import HeldPart, NamedGroup, of_whole
from ._optimizers import classes_of
from ._source import Source
from ._tools.archive import StoredTensor, is_per_element


class OptimizerLoadPlan:
    """The states and settings for this rank's optimizer. First read, then ``apply``."""

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[NamedGroup],
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
            source.number_optimizer(numbered_names(owned, names_before(model)))
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
            source.archive.left_out += _not_loaded(owned, saved or [], source.with_state(), left)
            self._plan_settings(owned, saved or [], strict)
            self._plan_states(groups, taken, left)
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
            group = self._optimizer.param_groups[number]
            if differences:
                self.settings_kept[number] = differences
            elif match is not None:
                self._settings[number] = {
                    key: like(copy.deepcopy(value), group.get(key)) for key, value in match.items()
                }
            elif group["params"]:
                self.settings_kept[number] = "none of its parameters was saved with settings"

    def _plan_states(
        self, groups: Sequence[NamedGroup], taken: Sequence[HeldPart], left: set[str]
    ) -> None:
        """left: names of parameters that are not taken."""
        own = dict.fromkeys(self._params)
        by_place = {(id(held.place[0].group), held.place[1]): held for held in taken if held.place}
        managed: set[torch.Tensor] = set()
        for named in groups:
            for param, indices in named.sharded_params:
                managed.add(param)
                if param not in own:
                    continue
                places = [(id(named.group), index) for index in indices]
                inside = [by_place[place] for place in places if place in by_place]
                if indices and not inside:
                    self._kept.add(param)
                # A DTensor has gradients, and so states, on every rank.
                elif store_of(named.group).has_part(indices) or _torch_private.is_dtensor(param):
                    state = self._state_of(param, inside)
                    if len(inside) < len(indices):  # the rest of a FlatParameter keeps its own
                        state = {**(self._optimizer.state.get(param) or {}), **state}
                    if state:
                        self._state[param] = state
        for other in [each for each in own if each not in managed and self._names[each]]:
            names = self._names[other][0]
            held = of_whole(names, other.detach())
            if names[0] in left:
                self._kept.add(other)
            elif state := self._state_of(other, [held]):
                self._state[other] = state

    def _state_of(self, param: torch.Tensor, inside: Sequence[HeldPart]) -> dict[Any, Any]:
        """Return the state of an optimizer's parameter. inside: the model's parameters in it."""
        found = [(held, self._source.state_of(held)) for held in inside]
        state: dict[Any, Any] = {}
        flat: dict[Any, torch.Tensor] = {}  # by key: a state per element, as 1-D view
        for held, values in found:
            for key, value in values.items():
                if is_per_element(key, value, held.shape):
                    if key not in flat:
                        state[key] = self._tensor_for(param, key, value.dtype)
                        flat[key] = _torch_private.local_part(state[key]).view(-1)
                elif key not in state:
                    self._require_any_part(key, value, held)
                    state[key] = self._source.planned(value)
        for held, values in found:
            for key, whole in flat.items():
                target = whole[_part_in(held).slice]
                if key in values and is_per_element(key, values[key], held.shape):
                    self._source.plan(values[key], held.boxes(target))
                else:  # other parameters beside it have this state
                    self._source.plan_zeros(target)
            state |= self._source.planned(self._source.rank_local_states(held))
        present: dict[Any, Any] = self._optimizer.state.get(param) or {}  # in its order
        return {key: state[key] for key in dict.fromkeys([*present, *state]) if key in state}

    def _require_any_part(self, key: Any, value: Any, held: HeldPart) -> None:
        """Raise CheckpointError for a state of another shape, unless this rank holds it whole."""
        is_whole = held.part.numel == held.piece.numel and held.piece.is_whole
        if isinstance(value, StoredTensor) and value.numel > 1 and not is_whole:
            raise CheckpointError.of(
                "An optimizer state has another shape than its parameter.",
                expected=f"shape {list(held.shape)}, or a single value: it is cut as the "
                "parameter is",
                got=f"shape {list(value.shape)} for state {key!r}",
                where=f"{held.names[0]}, in {self._source.path}",
                fix="load without the optimizer",
            )

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


def _part_in(held: HeldPart) -> Interval:
    """Return where a part lies in the parameter of the optimizer."""
    if held.place is None:
        return held.part
    named, index = held.place
    return store_of(named.group).part_in_sharded_param(index)


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


def _not_loaded(
    owned: ParamOwnership, saved: Sequence[Mapping[str, Any]], with_state: set[str], left: set[str]
) -> Iterator[str]:
    """Yield which parameters, but ``left``, only one optimizer has, or lack others' state."""
    listed = {name for group in saved for name in group["params"]}
    for param, contents in owned.held.items():
        is_here = param in owned.numbers
        for names in contents.all_names.values():
            if listed.isdisjoint(names):
                is_told = is_here and names[0] not in left
                which = "which only the new optimizer has" if is_told else ""
            elif is_here:
                is_without = param.requires_grad and with_state.isdisjoint(names)
                which = "which was not saved" if with_state and is_without else ""
            else:
                is_elsewhere = owned.has_owners or owned.is_vacant(param)
                which = "" if is_elsewhere else "which only the saved optimizer has"
            if which:
                yield f"the state of {names[0]}, {which}"


def _as_state(key: Any, value: Any, parameter: torch.Tensor) -> Any:
    """Move a state to its parameter, laid out as it is; counts stay on the CPU."""
    if not isinstance(value, torch.Tensor) or is_count(key, tuple(value.shape)):
        return value
    if value.shape == parameter.shape and value.stride() != parameter.stride():
        return torch.empty_like(parameter.detach(), dtype=value.dtype).copy_(value)
    return value.to(parameter.device)
