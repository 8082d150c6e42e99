"""A snapshot of what one rank saves: its shards and their optimizer states as they lie in memory,
and a head with the rest.

A rank's file has one tensor per parameter group and per state, the whole shard. If the optimizer
holds parameters one by one, that tensor is put together from its parts. Values that exist once per
parameter, and rank-local states, go to the head. Buffers and unmanaged parameters are in the file
of the rank that leads."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._engine.state_store import store_of
from .._state.older_optimizers import convert
from .._state.optim_contents import StateKind, classify_all
from .._state.rank_local import warn_of_layout
from .._state.unmanaged import unmanaged_state
from ..errors import UsageError
from ._head import Head, StateTensor, brief_indices
from ._header import dtype_name
from ._named_groups import NamedGroup, held_by
from ._optimizers import classes_of
from ._tools.writing import FilePart, FileTensor
from ._values import Put, encode, tensor_as_text

SCALAR, PER_ELEMENT = StateKind.SCALAR, StateKind.PER_ELEMENT
_STATE_KEYS = (str, int, float, type(None))  # keys of optimizer states that JSON has


@dataclasses.dataclass
class Snapshot:
    """The content of this rank's file, and the common part, which is the same on all ranks."""

    tensors: list[FileTensor] = dataclasses.field(default_factory=list)
    head: Head = dataclasses.field(default_factory=Head)
    param_groups: Any = None  # of the optimizer, encoded; None without one
    optimizer_classes: tuple[str, ...] = ()
    common_tensors: list[FileTensor] = dataclasses.field(default_factory=list)

    def take_common(self, is_written_here: bool) -> None:
        """Move the common part to this rank's file, or drop it."""
        if is_written_here:
            self.tensors += self.common_tensors
        else:
            self.head.others, self.head.other_states = {}, {}
        self.common_tensors = []

    def detach(self) -> None:
        """Replace all values by copies on the CPU, which training does not change."""
        for tensor in self.tensors:
            tensor.parts = [
                FilePart(part.start, part.values.to("cpu", copy=True))
                for part in tensor.parts
                if isinstance(part.values, torch.Tensor)
            ]


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    groups: Sequence[NamedGroup],
) -> Snapshot:
    """Return a snapshot of what this rank saves. Its tensors view those of the model and the
    optimizer. Sends nothing.

    Raises UsageError for values that cannot be saved.
    """
    snapshot = Snapshot()
    head = snapshot.head
    add, common = _Adder(snapshot.tensors), _Adder(snapshot.common_tensors)
    for named in groups:
        if named.is_written_here:
            store = store_of(named.group)
            parts = [FilePart(0, store.shard.detach()[named.section.place.slice])]
            snapshot.tensors.append(FileTensor(named.name, store.dtype, (named.numel,), parts))
    if optimizer is not None:
        convert(optimizer)
        held = held_by(model, optimizer)
        snapshot.param_groups = [
            {
                "params": [name for parameter in group["params"] for name in held[parameter]],
                "settings": _settings(group, number, head.left_out),
            }
            for number, group in enumerate(optimizer.param_groups)
        ]
        snapshot.optimizer_classes = classes_of(optimizer)
        kinds = _kinds(optimizer, groups)
        written = [named for named in groups if named.is_written_here]
        rank_local = [
            name
            for named in written
            for name in _add_states(snapshot, named, optimizer, kinds, add)
        ]
        warn_of_layout(rank_local, optimizer, stacklevel=5)
    head.others = {
        name: encode(value, name, common.under("other", name))
        for name, value in unmanaged_state(model).items()
    }
    if optimizer is not None:
        sharded_params = {param for named in groups for param, _ in named.sharded_params}
        head.other_states = {
            held[parameter][0]: _other_states(held[parameter][0], state, common, head.left_out)
            for parameter, state in optimizer.state.items()
            if parameter not in sharded_params
        }
    warn_of_left_out(head.left_out, "are not in the checkpoint", stacklevel=5)
    head.extra = encode(extra, "extra", add.under("extra"))
    return snapshot


def _settings(group: Mapping[str, Any], number: int, left_out: list[str]) -> Any:
    """Return the settings of a parameter group, encoded.

    Settings that are not data, such as an enum or a function, are left out and named in
    ``left_out``: the optimizer that the checkpoint is loaded into was built with its own.
    """
    kept: dict[str, Any] = {}
    for key, value in group.items():
        if key != "params":
            try:
                encode({key: value}, f"parameter group {number}", tensor_as_text)
            except UsageError:
                left_out.append(f"param_groups[{number}][{key!r}]")
            else:
                kept[key] = value
    return encode(kept, f"parameter group {number}", tensor_as_text)


def _other_states(
    name: str, state: Mapping[Any, Any], common: _Adder, left_out: list[str]
) -> list[tuple[Any, Any]]:
    """Return the states of an unmanaged parameter, encoded. Values that cannot be saved are left
    out and named in ``left_out``."""
    found: list[tuple[Any, Any]] = []
    for key, value in state.items():
        try:
            encoded = encode(value, f"optimizer state {key!r}", common.under("other state", name))
        except UsageError:
            left_out.append(f"{name}.{key}")
            continue
        if isinstance(key, _STATE_KEYS):
            found.append((key, encoded))
        else:
            left_out.append(f"{name}.{key}")
    return found


def warn_of_left_out(names: Sequence[str], what: str, stacklevel: int) -> None:
    if names:
        warnings.warn(
            f"Optimizer states and settings that only pickle could save {what}: "
            f"{', '.join(names)}. A checkpoint holds numbers, strings, tensors, and containers of "
            "these.",
            stacklevel=stacklevel,
        )


class _Adder:
    """Adds tensors to a file, each under a name of its own."""

    def __init__(self, tensors: list[FileTensor]) -> None:
        self._tensors = tensors
        self._names: set[str] = set()

    def under(self, *path: str) -> Put:
        """Return the function that adds a tensor under a name that begins with ``path``, for
        `_values.encode`."""

        def put(tensor: torch.Tensor) -> str:
            name = base = "/".join(path)
            number = 0
            while name in self._names:
                number += 1
                name = f"{base}/{number}"
            self._names.add(name)
            parts = [FilePart(0, tensor.contiguous().reshape(-1))]
            self._tensors.append(FileTensor(name, tensor.dtype, tuple(tensor.shape), parts))
            return name

        return put


def _kinds(
    optimizer: torch.optim.Optimizer, groups: Sequence[NamedGroup]
) -> dict[nn.Parameter, dict[Any, StateKind]]:
    """Return how every state of every managed parameter relates to it.

    For a 0-d parameter, a state per element looks like a count. The same state of other parameters
    decides; without any, its name does.
    """
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    sharded_params = [
        param for named in groups for param, _ in named.sharded_params if param in own
    ]
    kinds = classify_all({param: optimizer.state.get(param) or {} for param in sharded_params})
    with_dims = {
        key: kind for param in sharded_params if param.dim() for key, kind in kinds[param].items()
    }
    for param in sharded_params:
        for key, kind in kinds[param].items() if not param.dim() else ():
            value = optimizer.state[param][key]
            if kind is SCALAR and isinstance(value, torch.Tensor):
                is_count = with_dims[key] is not PER_ELEMENT if key in with_dims else key == "step"
                kinds[param][key] = SCALAR if is_count else PER_ELEMENT
    return kinds


def _add_states(
    snapshot: Snapshot,
    named: NamedGroup,
    optimizer: torch.optim.Optimizer,
    kinds: dict[nn.Parameter, dict[Any, StateKind]],
    add: _Adder,
) -> list[str]:
    """Add the states of one group; return the names of the rank-local ones."""
    store = store_of(named.group)
    per_element = _StatesPerElement(named)
    scalars: dict[Any, dict[str, list[int]]] = {}  # by key: parameters by encoded value
    rank_local: list[tuple[int, Any, Any]] = []
    rank_local_names: list[str] = []
    for param, indices in named.sharded_params:
        numbers = [index - named.section.first_param for index in indices]
        # Where this rank has no part there are no gradients, and the states there are stale; but
        # DTensors have gradients on every rank.
        is_current = store.has_part(indices) or _torch_private.is_dtensor(param)
        for key, kind in kinds.get(param, {}).items() if is_current else ():
            value = optimizer.state[param][key]
            if isinstance(value, torch.Tensor):  # of a DTensor: this rank's part
                value = _torch_private.local_part(value)
            state_name = f"{named.names(indices[0])[0]}.{key}"
            if not isinstance(key, _STATE_KEYS):
                snapshot.head.left_out.append(state_name)
            elif kind is PER_ELEMENT:
                per_element.add(key, value, numbers)
            else:
                where = f"optimizer state {key!r}"
                try:
                    if kind is SCALAR:
                        text = json.dumps(encode(value, where, tensor_as_text))
                        scalars.setdefault(key, {}).setdefault(text, []).extend(numbers)
                    else:
                        encoded = encode(value, where, add.under("own", named.name, str(key)))
                        rank_local.append((numbers[0], key, encoded))
                        rank_local_names.append(state_name)
                except UsageError:  # the rest of the checkpoint is worth more than this one value
                    snapshot.head.left_out.append(state_name)
    num_params = len(named.params)
    snapshot.tensors += per_element.tensors.values()
    snapshot.head.states[named.name] = per_element.described()
    snapshot.head.scalars[named.name] = [
        (key, brief_indices(indices, num_params), json.loads(text))
        for key, values in scalars.items()
        for text, indices in values.items()
    ]
    if rank_local:
        snapshot.head.rank_local[named.name] = rank_local
    return rank_local_names


class _StatesPerElement:
    """The tensors that hold one group's states with one element per element, by key and dtype."""

    def __init__(self, named: NamedGroup) -> None:
        self._named, self._store = named, store_of(named.group)
        self.tensors: dict[tuple[Any, torch.dtype], FileTensor] = {}
        self._indices: dict[tuple[Any, torch.dtype], list[int]] = {}  # of parameters that have it

    def add(self, key: Any, value: torch.Tensor, numbers: Sequence[int]) -> None:
        """numbers: of the parameters in the section that ``value`` is a state of."""
        named, which = self._named, (key, value.dtype)
        if which not in self.tensors:
            name = f"{named.name}.{key}"
            if any(tensor.name == name for tensor in self.tensors.values()):
                name += f".{dtype_name(value.dtype)}"  # a group with this state in two dtypes
            self.tensors[which] = FileTensor(name, value.dtype, (named.numel,), [])
        start = 0  # of a FlatParameter, which is the whole section
        if not self._store.is_flattened:
            first_param = named.section.first_param + numbers[0]
            start = self._store.part_in_shard(first_param).start - named.section.start
        self.tensors[which].parts.append(FilePart(start, value.detach().reshape(-1)))
        self._indices.setdefault(which, []).extend(numbers)

    def described(self) -> list[StateTensor]:
        num_params = len(self._named.params)
        return [
            StateTensor(
                key, tensor.name, dtype, brief_indices(self._indices[key, dtype], num_params)
            )
            for (key, dtype), tensor in self.tensors.items()
        ]
