"""Reads a rank's optimizer state from a native checkpoint, and loads it into the optimizer."""

from __future__ import annotations

import typing
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._engine.state_store import store_of
from .._layout.spec import Interval
from .._layout.transfer import same_parts
from ..errors import CheckpointError
from ._load_settings import settings_for
from ._named_groups import NamedGroup, held_by
from ._optimizers import classes_of, is_of_another_kind
from ._part_source import OwnPart, PartSource, PieceSource, TensorSource
from ._rank_files import RankFiles
from ._report import LoadReport
from ._values import decode, tensor_from_text, tensor_in


class OptimizerLoadPlan:
    """The states and settings that this rank's optimizer gets. ``clear`` comes before the files are
    read, ``apply`` after that."""

    def __init__(
        self,
        files: RankFiles,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[NamedGroup],
        sources: Mapping[tuple[int, int], PartSource | TensorSource],
        report: LoadReport,
        strict: bool,
    ) -> None:
        """Request the states from ``files``. sources: of the parameters that are taken, by group
        and index. Raises CheckpointError."""
        self._files, self._optimizer, self._sources = files, optimizer, sources
        self._names = held_by(model, optimizer)
        own = {parameter: None for group in optimizer.param_groups for parameter in group["params"]}
        self._settings: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
        self._state: dict[torch.Tensor, dict[Any, Any]] = {}  # by parameter of the optimizer
        self._kept: set[torch.Tensor] = set()  # parameters whose state is left as it is
        self._to_clear: list[torch.Tensor] = []  # parts of states that the files do not hold
        saved = files.manifest.param_groups
        if saved is None:
            if strict:
                raise _no_state(files)
            self._kept.update(own)
        elif is_of_another_kind(
            optimizer,
            files.manifest.optimizer_classes,
            {key for group in saved for key in group["settings"]},
        ):
            if strict:
                raise _another_optimizer(files, optimizer)
            self._kept.update(own)
            report.settings_kept.update(
                (number, f"the checkpoint is of {files.manifest.optimizer_classes[0]}")
                for number in range(len(optimizer.param_groups))
            )
        else:
            self._settings = settings_for(
                files, optimizer.param_groups, self._names, report, strict
            )
            for named in groups:
                self._plan_group(named, own)
            managed = {param for named in groups for param, _ in named.sharded_params}
            self._plan_unmanaged(own.keys() - managed, {*report.missing, *report.mismatched})
        if not strict:
            report.state_kept += [
                name
                for parameter in own
                if parameter in self._kept
                for name in self._names[parameter]
            ]

    def clear(self) -> None:
        """Zero the parts of states that the files do not hold."""
        for tensor in self._to_clear:
            tensor.zero_()

    def apply(self) -> None:
        """Load the states, once they were read, and the settings."""
        optimizer = self._optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        kept = {p: optimizer.state[p] for p in parameters if p in self._kept & {*optimizer.state}}
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
                        **settings,
                        "params": [numbers[parameter] for parameter in group["params"]],
                    }
                    for group, settings in zip(optimizer.param_groups, self._settings, strict=True)
                ],
            }
        )
        # load_state_dict casts tensors to the dtype of their parameter, and mangles texts.
        for parameter, values in state.items():
            for key, value in values.items():
                loaded = optimizer.state[parameter].get(key)
                if not isinstance(value, torch.Tensor) or (
                    isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype
                ):
                    optimizer.state[parameter][key] = value
        optimizer.state.update(kept)

    # -- planning

    def _plan_group(self, named: NamedGroup, own: Mapping[torch.Tensor, None]) -> None:
        store = store_of(named.group)
        for param, indices in named.sharded_params:
            if param not in own:
                continue
            sources = {
                index: source
                for index in indices
                if (source := self._sources.get((id(named.group), index))) is not None
            }
            if indices and not sources:
                self._kept.add(param)
            # A DTensor has gradients, and so states, on every rank.
            elif store.has_part(indices) or _torch_private.is_dtensor(param):
                state = self._state_of(named, param, sources)
                if len(sources) < len(indices):  # the rest of a FlatParameter keeps its own
                    state = {**(self._optimizer.state.get(param) or {}), **state}
                if state:
                    self._state[param] = state

    def _plan_unmanaged(self, parameters: Iterable[torch.Tensor], left: Container[str]) -> None:
        """left: names of parameters that are not taken."""
        common = self._files.manifest.common
        states = self._files.head(common).other_states
        for parameter in parameters:
            name, *_ = names = self._names[parameter]
            if name in left:
                self._kept.add(parameter)
            elif name in states:
                self._state[parameter] = {
                    key: decode(
                        value,
                        f"state {key!r} of {name}",
                        lambda saved: self._files.request_tensor(common, saved),
                    )
                    for key, value in states[name]
                }
            elif (saved := self._files.parameters.get(name)) is not None:
                own = OwnPart.of_whole(tuple(parameter.shape))
                source = PartSource.find(self._files, saved, own)
                state = self._new_state_of(names, parameter, source)
                if state:
                    self._state[parameter] = state

    def _new_state_of(
        self, names: Sequence[str], parameter: torch.Tensor, source: PartSource
    ) -> dict[Any, Any]:
        """Return the state of an unmanaged parameter, which the checkpoint has in its groups."""
        state: dict[Any, Any] = {}
        for piece in source.pieces:
            for key, name, dtype in self._states_per_element(piece):
                if key not in state:
                    state[key] = torch.zeros(tuple(parameter.shape), dtype=dtype)
                piece.request(self._files, name, dtype, state[key].view(-1))
            self._add_scalars(state, piece)
            for _, key, _ in self._rank_local_of(piece, piece.head_file):
                raise self._parts_have_changed(names[0], key, piece, 1)
        return state

    def _state_of(
        self,
        named: NamedGroup,
        param: nn.Parameter,
        sources: Mapping[int, PartSource | TensorSource],
    ) -> dict[Any, Any]:
        """Return the state of one parameter of the optimizer. sources: of the model's parameters in
        it."""
        store = store_of(named.group)
        state: dict[Any, Any] = {}
        flat: dict[Any, torch.Tensor] = {}  # by key: the state as 1-D view
        pieces_with: dict[Any, set[tuple[int, int]]] = {}  # by key: the pieces that have it
        pieces: dict[tuple[int, int], Interval] = {}  # by index and number: elements of ``param``

        def target(key: Any, dtype: torch.dtype, index: int, number: int) -> torch.Tensor:
            if key not in flat:
                state[key] = self._tensor_for(param, key, dtype)
                flat[key] = _torch_private.local_part(state[key]).view(-1)
            pieces_with.setdefault(key, set()).add((index, number))
            return flat[key][store.part_in_sharded_param(index).slice]

        for index, source in sources.items():
            part = store.part_in_sharded_param(index)
            if isinstance(source, TensorSource):
                pieces[index, 0] = part
                for key, found in self._states_of_tensor(source, store.shape(index)):
                    if isinstance(found, tuple):
                        name, dtype = found
                        values = target(key, dtype, index, 0)
                        source.request_from(self._files, name, dtype, values)
                    else:
                        state.setdefault(key, found)
                continue
            for number, piece in enumerate(source.pieces):
                pieces[index, number] = part
                for key, name, dtype in self._states_per_element(piece):
                    values = target(key, dtype, index, number)
                    piece.request(self._files, name, dtype, values)
                self._add_scalars(state, piece)
                self._add_rank_local(state, named, index, piece, source.is_alike)
        self._to_clear += [
            flat[key][part.slice]
            for key, having in pieces_with.items()
            for which, part in pieces.items()
            if which not in having
        ]
        present: dict[Any, Any] = self._optimizer.state.get(param) or {}  # in its order
        return {key: state[key] for key in dict.fromkeys([*present, *state]) if key in state}

    def _states_of_tensor(
        self, source: TensorSource, shape: tuple[int, ...]
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (key, value) of the states of a parameter that the checkpoint does not have in its
        groups; of a state per element (name of the tensor, dtype) instead of the value."""
        for key, value in self._files.head(source.file).other_states.get(source.name, []):
            found = tensor_in(value)
            if found is not None and found[2] == shape and (shape or key != "step"):
                yield key, found[:2]
            else:
                yield (
                    key,
                    decode(
                        value,
                        f"state {key!r} of {source.name}",
                        lambda name: self._files.request_tensor(source.file, name),
                    ),
                )

    def _add_scalars(self, state: dict[Any, Any], source: PieceSource) -> None:
        head = self._files.head(source.head_file)
        for key, indices, value in head.scalars.get(source.group.name, []):
            if (indices is None or source.index in indices) and key not in state:
                state[key] = decode(value, f"state {key!r}", tensor_from_text)

    def _tensor_for(self, param: nn.Parameter, key: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that a state is read to: the optimizer's own if it fits, or a new
        one."""
        own: Any = (self._optimizer.state.get(param) or {}).get(key)
        if _is_tensor_like(own, param) and own.dtype == dtype:
            return typing.cast(torch.Tensor, own)
        return torch.zeros_like(param.detach(), dtype=dtype)

    def _states_per_element(self, source: PieceSource) -> list[tuple[Any, str, torch.dtype]]:
        """Return (key, name of the tensor, dtype) of the states that a parameter has, according to
        any of the files with a run of it."""
        found: dict[Any, tuple[str, torch.dtype]] = {}
        for number in dict.fromkeys([*(run.file for run in source.runs), source.head_file]):
            for state in self._files.head(number).states.get(source.group.name, []):
                if state.of is None or source.index in state.of:
                    found.setdefault(state.key, (state.tensor, state.dtype))
        return [(key, name, dtype) for key, (name, dtype) in found.items()]

    def _rank_local_of(self, source: PieceSource, number: int) -> list[tuple[int, Any, Any]]:
        """Return the rank-local states of a parameter in a file."""
        found = self._files.head(number).rank_local.get(source.group.name, [])
        return [state for state in found if state[0] == source.index]

    def _add_rank_local(
        self,
        state: dict[Any, Any],
        named: NamedGroup,
        index: int,
        source: PieceSource,
        is_alike: bool,
    ) -> None:
        """Add the rank-local state, which fits only where this rank has the part that it was saved
        for."""
        store, axis = store_of(named.group), self._files.manifest.axes[source.group.axis]
        saved = source.group.layout
        same = is_alike and same_parts(saved, source.index, *store.cut(index))
        # The rank-local state of a flat parameter is stored under the first parameter in it, and
        # fits only where all of them have their old offsets.
        same = same and (
            not store.is_flattened
            or [spec.start for spec in saved.params]
            == [spec.start for spec in named.section.layout.params]
        )
        number = axis[store.rank] if same else source.head_file
        for _, key, value in self._rank_local_of(source, number):
            if not same:
                raise self._parts_have_changed(named.names(index)[0], key, source, store.ranks)
            state[key] = decode(
                value, f"state {key!r}", lambda name: self._files.request_tensor(number, name)
            )

    def _parts_have_changed(
        self, name: str, key: Any, source: PieceSource, ranks: int
    ) -> CheckpointError:
        return CheckpointError.of(
            "An optimizer state belongs to one rank's part of a parameter, and the "
            "parts have changed.",
            expected=f"{source.group.layout.ranks} ranks and the wrapping that it was saved "
            f"with, for state {key!r}",
            got=f"{ranks} ranks, or another wrapping or use_orig_params",
            where=f"{name}, in {self._files.path}",
            fix="load with as many ranks and the same wrapping, or without the optimizer",
        )


def _no_state(files: RankFiles) -> CheckpointError:
    return CheckpointError.of(
        "The checkpoint holds no optimizer state.",
        expected="a checkpoint that was saved with an optimizer",
        got="one that was saved without",
        where=str(files.path),
        fix="pass optimizer=None, and continue with the optimizer as it is",
    )


def _another_optimizer(files: RankFiles, optimizer: torch.optim.Optimizer) -> CheckpointError:
    return CheckpointError.of(
        "The checkpoint holds the state of another optimizer.",
        expected=f"the state of {classes_of(optimizer)[0]}",
        got=f"that of {files.manifest.optimizer_classes[0]}, with other settings",
        where=str(files.path),
        fix="build the optimizer that was saved; or pass optimizer=None to load the model "
        "alone, or strict=False to keep this optimizer's state and settings",
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


def _on_device_of(value: Any, parameter: torch.Tensor) -> Any:
    """Move a state to the device of its parameter; 0-d ones stay on the CPU, where optimizers keep
    their counts."""
    return (
        value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
    )
