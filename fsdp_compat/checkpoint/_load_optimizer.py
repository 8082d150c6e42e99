"""Reads a rank's optimizer state from a native checkpoint, and loads it into the optimizer."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._engine.state_store import store_of
from .._layout.transfer import same_parts
from ..errors import CheckpointError, explain
from ._named_groups import NamedGroup, held_by
from ._part_source import PartSource
from ._rank_files import RankFiles
from ._values import decode, tensor_from_text

__all__ = ["OptimizerLoadPlan"]


class OptimizerLoadPlan:
    """The states and settings that this rank's optimizer gets. ``clear`` comes before the files are
    read, ``apply`` after that."""

    def __init__(
        self,
        files: RankFiles,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[NamedGroup],
    ) -> None:
        """Request the states from ``files``. Raises CheckpointError."""
        if files.manifest.param_groups is None:
            raise CheckpointError(
                explain(
                    "The checkpoint holds no optimizer state.",
                    expected="a checkpoint that was saved with an optimizer",
                    got="one that was saved without",
                    where=str(files.path),
                    fix="pass optimizer=None, and continue with the optimizer as it is",
                )
            )
        self._files, self._optimizer = files, optimizer
        self._names = held_by(model, optimizer)
        self._settings: list[tuple[list[str], dict[str, Any]]] = [
            (group["params"], _settings_of(group["settings"]))
            for group in files.manifest.param_groups
        ]  # of each saved group: the names of its parameters, and the rest
        self._state: dict[torch.Tensor, dict[Any, Any]] = {}  # by parameter of the optimizer
        self._to_clear: list[torch.Tensor] = []  # states that the files hold only in part
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for named in groups:
            self._plan_group(named, own)
        managed = {param for named in groups for param, _ in named.sharded_params}
        self._plan_unmanaged(own - managed)

    def clear(self) -> None:
        """Zero the states of which the files hold only some elements."""
        for tensor in self._to_clear:
            tensor.zero_()

    def apply(self) -> None:
        """Load the states, once they were read, and the settings."""
        optimizer = self._optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        state = {
            parameter: {key: _on_device_of(value, parameter) for key, value in values.items()}
            for parameter, values in self._state.items()
        }
        optimizer.load_state_dict(
            {
                "state": {numbers[p]: dict(values) for p, values in state.items()},
                "param_groups": [
                    {
                        **{key: value for key, value in group.items() if key != "params"},
                        **self._settings_for(position, group),
                        "params": [numbers[parameter] for parameter in group["params"]],
                    }
                    for position, group in enumerate(optimizer.param_groups)
                ],
            }
        )
        # load_state_dict casts tensors to the dtype of their parameter, and mangles texts.
        for parameter, values in state.items():
            for key, value in values.items():
                kept = optimizer.state[parameter].get(key)
                if not isinstance(value, torch.Tensor) or (
                    isinstance(kept, torch.Tensor) and kept.dtype != value.dtype
                ):
                    optimizer.state[parameter][key] = value

    def _settings_for(self, position: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved settings for a group of the optimizer: those of the first of its
        parameters that was saved, or else those at the same position."""
        by_name = {name: settings for names, settings in self._settings for name in names}
        for parameter in group["params"]:
            for name in self._names[parameter]:
                if name in by_name:
                    return by_name[name]
        return self._settings[position][1] if position < len(self._settings) else {}

    # -- planning

    def _plan_group(self, named: NamedGroup, own: set[torch.Tensor]) -> None:
        store = store_of(named.group)
        for param, indices in named.sharded_params:
            # A DTensor has gradients, and so states, on every rank.
            if param in own and (store.has_part(indices) or _torch_private.is_dtensor(param)):
                sources = {
                    index: source
                    for index in indices
                    if (source := PartSource.find(self._files, named, index)) is not None
                }
                state = self._state_of(named, param, sources)
                if state:
                    self._state[param] = state

    def _plan_unmanaged(self, parameters: set[torch.Tensor]) -> None:
        common = self._files.manifest.common
        states = self._files.head(common).other_states
        for parameter, names in self._names.items():
            if parameter in parameters and names[0] in states:
                self._state[parameter] = {
                    key: decode(
                        value,
                        f"state {key!r} of {names[0]}",
                        lambda saved: self._files.request_tensor(common, saved),
                    )
                    for key, value in states[names[0]]
                }

    def _state_of(
        self, named: NamedGroup, param: nn.Parameter, sources: Mapping[int, PartSource]
    ) -> dict[Any, Any]:
        """Return the state of one parameter of the optimizer. sources: of the model's parameters in
        it."""
        store = store_of(named.group)
        state: dict[Any, Any] = {}
        flat: dict[Any, torch.Tensor] = {}  # by key: the state as 1-D view
        num_with: dict[Any, int] = {}  # by key: how many of the parameters have it
        for index, source in sources.items():
            part = store.part_in_sharded_param(index)
            for key, name, dtype in self._states_per_element(source):
                if key not in flat:
                    state[key] = self._tensor_for(param, key, dtype)
                    flat[key] = _torch_private.local_part(state[key]).view(-1)
                num_with[key] = num_with.get(key, 0) + 1
                values = flat[key][part.slice]
                source.request(self._files, name, dtype, values)
            head = self._files.head(source.head_file)
            for key, indices, value in head.scalars.get(source.group.name, []):
                if (indices is None or source.index in indices) and key not in state:
                    state[key] = decode(value, f"state {key!r}", tensor_from_text)
            self._add_rank_local(state, named, index, source)
        self._to_clear += [flat[key] for key, num in num_with.items() if num < len(sources)]
        present: dict[Any, Any] = self._optimizer.state.get(param) or {}  # in its order
        return {key: state[key] for key in dict.fromkeys([*present, *state]) if key in state}

    def _tensor_for(self, param: nn.Parameter, key: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that a state is read to: the optimizer's own if it fits, or a new
        one."""
        own: Any = (self._optimizer.state.get(param) or {}).get(key)
        if _is_tensor_like(own, param) and own.dtype == dtype:
            return typing.cast(torch.Tensor, own)
        return torch.zeros_like(param.detach(), dtype=dtype)

    def _states_per_element(self, source: PartSource) -> list[tuple[Any, str, torch.dtype]]:
        """Return (key, name of the tensor, dtype) of the states that a parameter has, according to
        any of the files with a run of it."""
        found: dict[Any, tuple[str, torch.dtype]] = {}
        for number in dict.fromkeys([*(run.file for run in source.runs), source.head_file]):
            for state in self._files.head(number).states.get(source.group.name, []):
                if state.of is None or source.index in state.of:
                    found.setdefault(state.key, (state.tensor, state.dtype))
        return [(key, name, dtype) for key, (name, dtype) in found.items()]

    def _add_rank_local(
        self, state: dict[Any, Any], named: NamedGroup, index: int, source: PartSource
    ) -> None:
        """Add the rank-local state, which fits only where this rank has the part that it was saved
        for."""
        store, axis = store_of(named.group), self._files.manifest.axes[source.group.axis]
        saved = source.group.layout
        same = same_parts(saved, source.index, *store.cut(index))
        # The rank-local state of a flat parameter is stored under the first parameter in it, and
        # fits only where all of them have their old offsets.
        same = same and (
            not store.is_flattened
            or [spec.start for spec in saved.params]
            == [spec.start for spec in named.section.layout.params]
        )
        number = axis[store.rank] if same else source.head_file
        rank_local = self._files.head(number).rank_local.get(source.group.name, [])
        for saved_index, key, value in rank_local:
            if saved_index != source.index:
                continue
            if not same:
                raise CheckpointError(
                    explain(
                        "An optimizer state belongs to one rank's part of a parameter, and the "
                        "parts have changed.",
                        expected=f"{saved.ranks} ranks and the wrapping that it was saved with, "
                        f"for state {key!r}",
                        got=f"{store.ranks} ranks, or another wrapping or use_orig_params",
                        where=f"{named.names(index)[0]}, in {self._files.path}",
                        fix="load with as many ranks and the same wrapping, or without the "
                        "optimizer",
                    )
                )
            state[key] = decode(
                value, f"state {key!r}", lambda name: self._files.request_tensor(number, name)
            )


def _is_tensor_like(value: Any, param: nn.Parameter) -> bool:
    """True for a contiguous tensor that lies as ``param`` does."""
    kind = torch.Tensor if _torch_private.is_plain(param) else type(param.data)
    if type(value) is not kind or not _torch_private.local_part(value).is_contiguous():
        return False
    facts = [
        (tensor.shape, tensor.device, getattr(tensor, "placements", None))
        for tensor in (value, param)
    ]
    return facts[0] == facts[1]


def _settings_of(content: Any) -> dict[str, Any]:
    """Return the settings of a parameter group, decoded. Raises CheckpointError."""
    settings = decode(content, "parameter group", tensor_from_text)
    if not isinstance(settings, dict):
        raise CheckpointError(
            explain(
                "The settings of a parameter group are invalid.",
                expected="settings by name",
                got=f"a {type(settings).__name__}",
                where="param_groups of the optimizer",
                fix="load an older checkpoint; nothing was loaded",
            )
        )
    return settings


def _on_device_of(value: Any, parameter: torch.Tensor) -> Any:
    """Move a state to the device of its parameter; 0-d ones stay on the CPU, where optimizers keep
    their counts."""
    return (
        value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
    )
