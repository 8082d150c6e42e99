"""Casts of nested values: every tensor is cast, containers keep their types, and unchanged values
stay the same objects."""

from __future__ import annotations

import collections
import dataclasses
import typing
from typing import Any

import pytest
import torch

from fsdp_compat._engine.dtypes import cast_floats, map_tensors, move_to, tensors_in


class Named(typing.NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Data:
    x: Any
    y: Any = None
    z: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


class Items(list):  # type: ignore[type-arg]
    pass


ONE, TWO = torch.tensor([1.5]), torch.tensor([2.5])
INT = torch.tensor([3])

CONTAINERS: dict[str, Any] = {
    "tensor": ONE,
    "list": [ONE, 1, "text"],
    "tuple": (ONE, None),
    "dict": {"a": ONE, "b": 2},
    "named tuple": Named(ONE, 3),
    "ordered dict": collections.OrderedDict(a=ONE, b=None),
    "default dict": collections.defaultdict(list, a=ONE),
    "dataclass": Data(ONE, 4),
    "frozen dataclass": Frozen(ONE),
    "subclass of list": Items([ONE]),
    "nested": {"a": [(ONE, {"b": Data(x=[Frozen(TWO)])})], "c": INT},
}


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def values(value: Any) -> list[Any]:
    return [tensor.tolist() for tensor in tensors_in(value)]


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_keep_their_types_or_are_returned_themselves(name: str) -> None:
    value = CONTAINERS[name]
    found = map_tensors(value, plus_one)
    assert type(found) is type(value)
    assert values(found) == [(t + 1).tolist() for t in tensors_in(value)]
    assert all(each in ([1.5], [2.5], [3]) for each in values(value))  # the original is unchanged
    assert map_tensors(value, lambda tensor: tensor) is value


def test_only_containers_around_a_change_are_copied() -> None:
    kept, changed = [INT], [ONE]
    value = {"kept": kept, "changed": changed}
    found = map_tensors(value, lambda tensor: tensor if tensor is INT else tensor + 1)
    assert found["kept"] is kept
    assert found["changed"] is not changed


def test_other_fields_of_a_changed_dataclass_stay() -> None:
    assert map_tensors(Named(ONE, "text"), plus_one).y == "text"
    assert map_tensors(Data(ONE, {"k": 1}), plus_one).y == {"k": 1}
    found = map_tensors(collections.defaultdict(list, a=ONE, b=2), plus_one)
    assert found["b"] == 2
    assert found["missing"] == []
    assert list(map_tensors(collections.OrderedDict(z=ONE, a=2), plus_one)) == ["z", "a"]


def test_tensors_in_yields_in_order_from_all_containers() -> None:
    value = {"a": [ONE, (TWO,)], "b": Named(INT, Data(x=ONE)), "c": {"d": Frozen(TWO)}}
    assert list(map(id, tensors_in(value))) == list(map(id, (ONE, TWO, INT, ONE, TWO)))
    for members in ({ONE, TWO}, frozenset({ONE, TWO})):
        assert {id(tensor) for tensor in tensors_in(members)} == {id(ONE), id(TWO)}


@pytest.mark.parametrize("value", [None, 3, "text", [], {}, (), Data, object()])
def test_tensors_in_ignores_values_without_tensors(value: Any) -> None:
    assert list(tensors_in(value)) == []
    assert map_tensors(value, plus_one) is value


def test_only_floating_point_tensors_are_cast() -> None:
    dtypes = torch.float32, torch.float64, torch.int64, torch.bool
    value = [*(torch.ones(1, dtype=dtype) for dtype in dtypes), 1.5]
    found = cast_floats(value, torch.bfloat16)
    expected = [torch.bfloat16, torch.bfloat16, torch.int64, torch.bool]
    assert [t.dtype for t in tensors_in(found)] == expected
    assert found[-1] == 1.5
    complex_value = torch.ones(1, dtype=torch.complex64)
    assert cast_floats(complex_value, torch.bfloat16) is complex_value


def test_values_are_moved_or_stay_the_same_objects() -> None:
    value = [ONE, {"a": INT}, 3]
    assert cast_floats(value, torch.float32) is value
    assert move_to(value, torch.device("cpu")) is value
    found = move_to(value, torch.device("meta"))
    assert [tensor.device.type for tensor in tensors_in(found)] == ["meta", "meta"]
    assert found[2] == 3
