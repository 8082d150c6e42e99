"""What one rank saves: its flat shards and the optimizer's states of them, as they lie in memory,
and a text about the rest.

A rank's file has one entry per flat group and state, the whole shard; where the optimizer holds
parts of single parameters an entry is put together from them. What is one number per parameter
stands in the text in the file's head, and so does what only its own rank can use. Buffers, and
parameters that no unit manages, are in the first rank's file."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._engine.group import Group
from .._engine.state_store import StateStore, store_of
from .._engine.store import ShardedParam
from .._layout.spec import Section
from .._state.entries import Entry as Kind
from .._state.entries import classify_all
from .._state.model_units import units_of
from .._state.names import clean_name, named_sections
from .._state.optim_state_dict import warn_of_layout
from .._state.optimizers import convert
from .._state.param_ownership import NamedUnit, ownership_of
from .._state.unmanaged import unmanaged_state
from ..errors import UsageError, explain
from ._head import TEXT
from ._header import dtype_name
from ._manifest import FlatGroup
from ._texts import require_readable
from ._values import encode

__all__ = [
    "Flat",
    "NamedGroup",
    "Piece",
    "Snapshot",
    "as_text",
    "held_by",
    "inlined",
    "named_groups",
    "take_snapshot",
    "warn_of_left_out",
]


_STATE_KEYS = (str, int, float, type(None))  # keys of optimizer states that JSON has


@dataclasses.dataclass(frozen=True)
class NamedGroup:
    """A section of a group's shards, what its entries are called, and its place among those of one
    mesh."""

    group: Group
    section: Section
    sharded_params: Sequence[ShardedParam]  # those of the section's parameters
    name: str
    prefix: str  # of its parameters' names
    mesh: int  # groups with the same number are spread over the same ranks
    writer: int  # the replica that writes it

    @property
    def is_written_here(self) -> bool:
        return self.group.replica.rank == self.writer

    @property
    def params(self) -> range:
        """The indices of the section's parameters."""
        first = self.section.first_param
        return range(first, first + len(self.section.layout.params))

    def names(self, index: int) -> tuple[str, ...]:
        """The names of a parameter in the model, before wrapping."""
        return tuple(
            dict.fromkeys(
                self.prefix + clean_name(name)
                for name in store_of(self.group).orig_params[index].names
            )
        )

    def described(self, axis: int) -> FlatGroup:
        names = tuple(self.names(index) for index in self.params)
        return FlatGroup(self.name, self.group.store.dtype, axis, self.section.layout, names)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of an entry's elements."""

    start: int
    values: torch.Tensor  # 1-D


@dataclasses.dataclass
class Flat:
    """One entry of a file: ``pieces`` in order, zeros between them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Piece]


@dataclasses.dataclass
class Snapshot:
    """What this rank's file will hold."""

    entries: list[Flat]
    text: dict[str, Any]
    param_groups: Any = None  # of the optimizer, encoded; None without one
    common_entries: list[Flat] = dataclasses.field(
        default_factory=list
    )  # what every rank has, for one file
    common_text: dict[str, Any] = dataclasses.field(default_factory=dict)

    def take_common(self, wanted: bool) -> None:
        """Put what every rank has to what is in this rank's file, or drop it."""
        if wanted:
            self.entries += self.common_entries
            self.text.update(self.common_text)
        self.common_entries, self.common_text = [], {}

    def detach(self) -> None:
        """Copy everything to memory of its own, on the CPU: what is trained on later does not
        show."""
        for flat in self.entries:
            flat.pieces = [
                Piece(piece.start, piece.values.to("cpu", copy=True)) for piece in flat.pieces
            ]


def named_groups(units: Sequence[NamedUnit]) -> list[NamedGroup]:
    """Return the flat groups of ``units``, in one order on all ranks. Raises UsageError for
    tensor-parallel parameters."""
    meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    found: list[NamedGroup] = []
    for named in units:
        for number, (_, group, section) in enumerate(named_sections(named.unit)):
            store = store_of(group)
            if any(parallel is not None for parallel in store.parallel):
                raise UsageError(
                    explain(
                        "Tensor-parallel parameters cannot be saved in, or loaded from, the native "
                        "format in this version.",
                        expected="parameters that are no DTensors",
                        got="a DTensor parameter "
                        f"{named.prefix}{clean_name(store.orig_params[0].name)}",
                        where=named.unit.label,
                        fix="save FullyShardedDataParallel.state_dict() and optim_state_dict() in "
                        "the full form",
                    )
                )
            mesh = meshes.setdefault((group.shard.members, group.replica.members), len(meshes))
            found.append(
                NamedGroup(
                    group,
                    section,
                    _sharded_params_of(store, section),
                    f"{named.prefix}flat_{number}",
                    named.prefix,
                    mesh,
                    len(found) % group.replica.ranks,
                )
            )
    return found


def _sharded_params_of(store: StateStore, section: Section) -> Sequence[ShardedParam]:
    if store.is_flattened:
        return store.sharded_params
    first = section.first_param
    return store.sharded_params[first : first + len(section.layout.params)]


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    groups: Sequence[NamedGroup],
) -> Snapshot:
    """Return what this rank saves; its tensors are views of what is trained. Nothing is sent.

    Raises UsageError for what cannot be saved.
    """
    snapshot = Snapshot([], {"states": {}, "scalars": {}, "own": {}, "left_out": []})
    add, common = _Adder(snapshot.entries), _Adder(snapshot.common_entries)
    for named in groups:
        if named.is_written_here:
            store = store_of(named.group)
            snapshot.entries.append(
                Flat(
                    named.name,
                    store.dtype,
                    (named.section.layout.shard_numel,),
                    [Piece(0, store.shard.detach()[named.section.place.slice])],
                )
            )
    if optimizer is not None:
        convert(optimizer)
        held = held_by(model, optimizer)
        snapshot.param_groups = [
            {
                "params": [name for parameter in group["params"] for name in held[parameter]],
                "settings": _settings(group, number, snapshot.text["left_out"]),
            }
            for number, group in enumerate(optimizer.param_groups)
        ]
        kinds = _kinds(optimizer, groups)
        written = [named for named in groups if named.is_written_here]
        own = [
            name
            for named in written
            for name in _add_states(snapshot, named, optimizer, kinds, add)
        ]
        warn_of_layout(own, optimizer, stacklevel=5)
    snapshot.common_text["others"] = {
        name: encode(value, name, common.under("other", name))
        for name, value in unmanaged_state(model).items()
    }
    if optimizer is not None:
        sharded_params = {target for named in groups for target, _ in named.sharded_params}
        snapshot.common_text["other_states"] = {
            held[parameter][0]: _other_states(
                held[parameter][0], state, common, snapshot.text["left_out"]
            )
            for parameter, state in optimizer.state.items()
            if parameter not in sharded_params
        }
    warn_of_left_out(snapshot.text["left_out"], "are not in the checkpoint")
    snapshot.text["extra"] = encode(extra, "extra", add.under("extra"))
    return snapshot


def _settings(group: Mapping[str, Any], number: int, left_out: list[str]) -> Any:
    """Return the settings of a parameter group, encoded.

    What is not data, such as an enum or a function, is left out, and named in ``left_out``: the
    optimizer was made with it, and the one that is loaded into has its own.
    """
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key != "params":
            try:
                encode({key: value}, f"parameter group {number}", inlined)
            except UsageError:
                left_out.append(f"param_groups[{number}][{key!r}]")
            else:
                found[key] = value
    return encode(found, f"parameter group {number}", inlined)


def _other_states(
    name: str, state: Mapping[Any, Any], common: _Adder, left_out: list[str]
) -> list[list[Any]]:
    """Return the states of a parameter that no unit manages, encoded; what cannot be is left out,
    and named."""
    found: list[list[Any]] = []
    for key, value in state.items():
        try:
            encoded = encode(value, f"optimizer state {key!r}", common.under("other state", name))
        except UsageError:
            left_out.append(f"{name}.{key}")
        else:
            found.append([key, encoded]) if isinstance(key, _STATE_KEYS) else left_out.append(
                f"{name}.{key}"
            )
    return found


def warn_of_left_out(names: Sequence[str], what: str) -> None:
    if names:
        warnings.warn(
            f"States and settings of the optimizer that only pickle could save {what}: "
            f"{', '.join(names)}. A checkpoint holds "
            "numbers, texts, tensors, and containers of these.",
            stacklevel=5,
        )


class _Adder:
    """Gives tensors names of their own, and makes entries of them."""

    def __init__(self, entries: list[Flat]) -> None:
        self._entries = entries
        self._names: set[str] = set()

    def under(self, *path: str) -> Any:
        def put(tensor: torch.Tensor) -> str:
            name = base = "/".join(path)
            number = 0
            while name in self._names:
                number += 1
                name = f"{base}/{number}"
            self._names.add(name)
            self._entries.append(
                Flat(
                    name,
                    tensor.dtype,
                    tuple(tensor.shape),
                    [Piece(0, tensor.contiguous().reshape(-1))],
                )
            )
            return name

        return put


def held_by(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[torch.Tensor, tuple[str, ...]]:
    """Return the names that each parameter of the optimizer holds; raises UsageError for one that
    is not the model's."""
    owned = ownership_of(optimizer.param_groups, type(optimizer).__name__, units_of(model), model)
    return {
        parameter: tuple(name for _, name in contents.names)
        for parameter, contents in owned.held.items()
    }


def _kinds(
    optimizer: torch.optim.Optimizer, groups: Sequence[NamedGroup]
) -> dict[nn.Parameter, dict[Any, Kind]]:
    """Return how every state of every managed parameter belongs to it.

    One element of a 0-d parameter looks like a count: other parameters tell, and where there are
    none its name.
    """
    mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    sharded_params = [
        target for named in groups for target, _ in named.sharded_params if target in mine
    ]
    kinds = classify_all({target: optimizer.state.get(target) or {} for target in sharded_params})
    with_dims = {
        key: kind
        for target in sharded_params
        if target.dim()
        for key, kind in kinds[target].items()
    }
    for target in sharded_params:
        for key, kind in kinds[target].items() if not target.dim() else ():
            value = optimizer.state[target][key]
            if kind is Kind.SCALAR and isinstance(value, torch.Tensor):
                counts = (
                    with_dims[key] is not Kind.PER_ELEMENT if key in with_dims else key == "step"
                )
                kinds[target][key] = Kind.SCALAR if counts else Kind.PER_ELEMENT
    return kinds


def _add_states(
    snapshot: Snapshot,
    named: NamedGroup,
    optimizer: torch.optim.Optimizer,
    kinds: dict[nn.Parameter, dict[Any, Kind]],
    add: _Adder,
) -> list[str]:
    """Add the states of one group; return the names of those that belong to this rank's parts."""
    store = store_of(named.group)
    flats: dict[tuple[Any, torch.dtype], Flat] = {}
    of: dict[tuple[Any, torch.dtype], list[int]] = {}
    scalars: dict[Any, dict[str, list[int]]] = {}  # by key: parameters by encoded value
    own: list[Any] = []
    own_names: list[str] = []
    for target, indices in named.sharded_params:
        numbers = [index - named.section.first_param for index in indices]
        # What an optimizer keeps where this rank has no part goes stale, as there are no gradients.
        for key, kind in kinds.get(target, {}).items() if store.has_part(indices) else ():
            value, state_name = optimizer.state[target][key], f"{named.names(indices[0])[0]}.{key}"
            if not isinstance(key, _STATE_KEYS):
                snapshot.text["left_out"].append(state_name)
            elif kind is Kind.PER_ELEMENT:
                which = key, value.dtype
                if which not in flats:
                    name = f"{named.name}.{key}"
                    if any(
                        flat.name == name for flat in flats.values()
                    ):  # parameters of one group with states of two dtypes
                        name += f".{dtype_name(value.dtype)}"
                    flats[which] = Flat(name, value.dtype, (named.section.layout.shard_numel,), [])
                start = 0  # of a FlatParameter, which is the whole section
                if not store.is_flattened:
                    start = store.part_in_shard(indices[0]).start - named.section.start
                flats[which].pieces.append(Piece(start, value.detach().reshape(-1)))
                of.setdefault(which, []).extend(numbers)
            else:
                try:
                    if kind is Kind.SCALAR:
                        text = json.dumps(encode(value, f"optimizer state {key!r}", inlined))
                        scalars.setdefault(key, {}).setdefault(text, []).extend(numbers)
                    else:
                        encoded = encode(
                            value,
                            f"optimizer state {key!r}",
                            add.under("own", named.name, str(key)),
                        )
                        own.append([numbers[0], key, encoded])
                        own_names.append(state_name)
                except UsageError:  # to lose one object is better than to lose the save
                    snapshot.text["left_out"].append(state_name)
    everything = len(named.params)
    snapshot.entries += flats.values()
    snapshot.text["states"][named.name] = [
        {
            "key": key,
            "entry": flat.name,
            "dtype": dtype_name(dtype),
            "of": _brief(of[key, dtype], everything),
        }
        for (key, dtype), flat in flats.items()
    ]
    snapshot.text["scalars"][named.name] = [
        [key, [[_brief(indices, everything), json.loads(text)] for text, indices in values.items()]]
        for key, values in scalars.items()
    ]
    if own:
        snapshot.text["own"][named.name] = own
    return own_names


def _brief(indices: list[int], everything: int) -> list[int] | None:
    """None stands for all parameters of the group."""
    return None if len(indices) == everything else sorted(indices)


def inlined(tensor: torch.Tensor) -> str:
    """A small tensor as text, for `_values.encode`."""
    values = tensor.detach().cpu()
    if values.dtype.is_complex:
        values = torch.view_as_real(values)
    return json.dumps([dtype_name(tensor.dtype), list(tensor.shape), values.reshape(-1).tolist()])


def as_text(text: dict[str, Any]) -> dict[str, str]:
    """What a safetensors file's head holds. Raises UsageError for more than is read again."""
    found = json.dumps(text, separators=(",", ":"))
    require_readable(found.encode("ascii"))
    return {TEXT: found}
