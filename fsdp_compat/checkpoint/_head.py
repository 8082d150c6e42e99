"""The head of a rank's file: its header, and the text in it. Types are checked before anything is
used."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ._header import TensorInfo, dtype_name, dtype_of
from ._texts import listed, parse_json, require_readable, size, sizes, text_in, texts

TEXT = "fsdp_compat"  # the key of the text in the metadata of the file

Indices = frozenset[int] | None  # of parameters of a group; None: all of them

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """A tensor of the file that holds one state, element by element, of parameters of a group."""

    key: Any
    tensor: str  # its name in the file
    dtype: torch.dtype
    of: Indices

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "entry": self.tensor,
            "dtype": dtype_name(self.dtype),
            "of": _listed_indices(self.of),
        }

    @staticmethod
    def of_json(content: Any) -> StateTensor:
        return StateTensor(
            _key(content["key"]),
            text_in(content["entry"]),
            dtype_of(content["dtype"]),
            _indices(content["of"]),
        )


@dataclasses.dataclass
class Head:
    """The description of one file in its own text. Values are encoded, as `_values.encode` returns
    them."""

    identity: str = ""  # of the save
    number: int = 0  # of the rank that wrote the file
    left_out: list[str] = dataclasses.field(default_factory=list)
    # By the name of the group: tensors; (key, of which parameters, value); (of which, key, value).
    states: dict[str, list[StateTensor]] = dataclasses.field(default_factory=dict)
    scalars: dict[str, list[tuple[Any, Indices, Any]]] = dataclasses.field(default_factory=dict)
    rank_local: dict[str, list[tuple[int, Any, Any]]] = dataclasses.field(default_factory=dict)
    extra: Any = None
    # By name, in the common file alone: unmanaged tensors, buffers, extra state; states of such
    # parameters.
    others: dict[str, Any] = dataclasses.field(default_factory=dict)
    other_states: dict[str, list[tuple[Any, Any]]] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] = dataclasses.field(default_factory=dict)  # of a file read

    def has_states(self, group: str, index: int) -> bool:
        """True if the file has states of parameter ``index`` of a group, or values that belong to
        them."""
        indices = [state.of for state in self.states.get(group, [])]
        indices += [of for _, of, _ in self.scalars.get(group, [])]
        return any(of is None or index in of for of in indices)

    def as_metadata(self) -> dict[str, str]:
        """Return the text as metadata of a safetensors file. Raises UsageError if it is too large
        to be read again."""
        content = {
            "identity": self.identity,
            "number": self.number,
            "left_out": self.left_out,
            "states": {
                group: [state.as_json() for state in found] for group, found in self.states.items()
            },
            "scalars": {group: _by_key(found) for group, found in self.scalars.items()},
            "own": self.rank_local,
            "extra": self.extra,
            "others": self.others,
            "other_states": self.other_states,
        }
        text = json.dumps(content, separators=(",", ":"))
        require_readable(text.encode("ascii"))
        return {TEXT: text}

    @staticmethod
    def of_metadata(metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> Head:
        """Return the head of a file. Raises KeyError, TypeError, ValueError or RecursionError if
        the text is not one that a save writes."""
        content = parse_json(metadata[TEXT].encode("utf-8"))
        scalars = _by_name(content["scalars"], _scalars_of_key)
        return Head(
            text_in(content["identity"]),
            size(content["number"]),
            texts(content["left_out"]),
            _by_name(content["states"], StateTensor.of_json),
            {group: [each for some in found for each in some] for group, found in scalars.items()},
            _by_name(content["own"], _rank_local),
            content["extra"],
            dict(content.get("others", {})),
            _by_name(content.get("other_states", {}), _key_and_value),
            tensors,
        )


def brief_indices(indices: Sequence[int], num_params: int) -> Indices:
    """Return the indices; None means all parameters of the group."""
    return None if len(indices) == num_params else frozenset(indices)


def _by_key(scalars: Sequence[tuple[Any, Indices, Any]]) -> list[list[Any]]:
    found: dict[Any, list[Any]] = {}
    for key, of, value in scalars:
        found.setdefault((type(key), key), [key, []])[1].append([_listed_indices(of), value])
    return list(found.values())


def _by_name(content: Any, parse: Callable[[Any], _T]) -> dict[str, list[_T]]:
    return {name: [parse(item) for item in listed(items)] for name, items in dict(content).items()}


def _scalars_of_key(content: Any) -> list[tuple[Any, Indices, Any]]:
    key, values = listed(content)
    return [(_key(key), _indices(of), value) for of, value in map(listed, listed(values))]


def _rank_local(content: Any) -> tuple[int, Any, Any]:
    index, key, value = listed(content)
    return size(index), _key(key), value


def _key_and_value(content: Any) -> tuple[Any, Any]:
    key, value = listed(content)
    return _key(key), value


def _key(content: Any) -> Any:
    if isinstance(content, (list, dict)):
        raise TypeError(f"a {type(content).__name__} as a key")
    return content


def _listed_indices(of: Indices) -> list[int] | None:
    return None if of is None else sorted(of)


def _indices(content: Any) -> Indices:
    return None if content is None else frozenset(sizes(content))
