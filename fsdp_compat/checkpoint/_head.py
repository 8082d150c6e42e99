"""The head of a rank's file: its header, and the text in it that `_snapshot` makes. Types are
checked before anything is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ._header import TensorInfo, dtype_of
from ._texts import listed, parse_json, size, sizes, text_in, texts

TEXT = "fsdp_compat"  # the key of the text in the metadata of the file

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """A tensor of the file that holds one state, element by element, of parameters of a group."""

    key: Any
    tensor: str  # its name in the file
    dtype: torch.dtype
    of: frozenset[int] | None  # of which parameters of the group; None: of all

    @staticmethod
    def of_json(content: Any) -> StateTensor:
        return StateTensor(
            _key(content["key"]),
            text_in(content["entry"]),
            dtype_of(content["dtype"]),
            _indices(content["of"]),
        )


@dataclasses.dataclass(frozen=True)
class Head:
    """The description of one file in its own text. Values are encoded, as `_values.encode` returns
    them."""

    tensors: dict[str, TensorInfo]
    identity: str  # of the save
    number: int  # of the rank that wrote the file
    left_out: list[str]
    states: dict[str, list[StateTensor]]  # by the name of the group
    # by the name of the group: (key, of which parameters, value); None: of all
    scalars: dict[str, list[tuple[Any, frozenset[int] | None, Any]]]
    rank_local: dict[str, list[tuple[int, Any, Any]]]  # (of which parameter, key, value)
    extra: Any
    # By name, in the common file alone: unmanaged tensors, buffers, extra state; states of such
    # parameters.
    others: dict[str, Any]
    other_states: dict[str, list[tuple[Any, Any]]]

    def has_states(self, group: str, index: int) -> bool:
        """True if the file has states of parameter ``index`` of a group, or values that belong to
        them."""
        indices = [state.of for state in self.states.get(group, [])]
        indices += [of for _, of, _ in self.scalars.get(group, [])]
        return any(of is None or index in of for of in indices)


def parse_head(tensors: dict[str, TensorInfo], metadata: dict[str, str]) -> Head:
    """Return the head of a file. Raises KeyError, TypeError, ValueError or RecursionError if the
    text is not one that a save writes."""
    content = parse_json(metadata[TEXT].encode("utf-8"))
    return Head(
        tensors,
        text_in(content["identity"]),
        size(content["number"]),
        texts(content["left_out"]),
        _by_name(content["states"], StateTensor.of_json),
        {
            group: [scalar for scalars in found for scalar in scalars]
            for group, found in _by_name(content["scalars"], _scalars_of_key).items()
        },
        _by_name(content["own"], _rank_local),
        content["extra"],
        dict(content.get("others", {})),
        _by_name(content.get("other_states", {}), _key_and_value),
    )


def _by_name(content: Any, parse: Callable[[Any], _T]) -> dict[str, list[_T]]:
    return {name: [parse(item) for item in listed(items)] for name, items in dict(content).items()}


def _scalars_of_key(content: Any) -> list[tuple[Any, frozenset[int] | None, Any]]:
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


def _indices(content: Any) -> frozenset[int] | None:
    return None if content is None else frozenset(sizes(content))
