"""Casts of nested inputs: every floating-point tensor is cast, containers keep their types, and
unchanged values stay the same objects."""

from __future__ import annotations

import collections
import dataclasses
import typing
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel, MixedPrecision
from tests.support.ranks import on_ranks

BF16 = torch.bfloat16


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


class Keeps(nn.Module):
    """Keeps what forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, value: Any) -> Tensor:
        self.value = value
        return self.weight.sum()


def given(value: Any) -> Any:
    """Return what a forward in bfloat16 is given."""
    module = Keeps()
    FullyShardedDataParallel(module, mixed_precision=MixedPrecision(param_dtype=BF16))(value)
    return module.value


def one() -> Tensor:
    return torch.tensor([1.5])


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "list": ([one(), 1, "text"], lambda value: value[0]),
    "tuple": ((one(), None), lambda value: value[0]),
    "dict": ({"a": one(), "b": 2}, lambda value: value["a"]),
    "named tuple": (Named(one(), "text"), lambda value: value.x),
    "ordered dict": (collections.OrderedDict(z=1, a=one()), lambda value: value["a"]),
    "default dict": (collections.defaultdict(list, a=one()), lambda value: value["a"]),
    "dataclass": (Data(one(), {"k": 1}), lambda value: value.x),
    "frozen dataclass": (Frozen(one()), lambda value: value.x),
    "subclass of list": (Items([one()]), lambda value: value[0]),
    "nested": ({"a": [(1, {"b": Data([Frozen(one())])})]}, lambda v: v["a"][0][1]["b"].x[0].x),
}


@on_ranks(1)
def test_containers_keep_their_types_and_originals_their_tensors() -> None:
    for name, (value, tensor_in) in CONTAINERS.items():
        found = given(value)
        assert type(found) is type(value) and found is not value, name
        assert (tensor_in(found).dtype, tensor_in(value).dtype) == (BF16, torch.float32), name
        assert tensor_in(found).tolist() == [1.5], name
        if isinstance(value, dict):
            assert list(found) == list(value)
        if isinstance(value, collections.defaultdict):
            assert found["missing"] == []


@on_ranks(1)
def test_values_without_floating_point_tensors_are_given_as_they_are() -> None:
    for value in (None, 3, [], {}, Data, object(), Data(3)):
        assert given(value) is value
    whole, numbers = torch.tensor([3]), torch.ones(1, dtype=torch.complex64)
    kept, changed = [whole, numbers, torch.ones(1, dtype=BF16)], [one(), 1.5]
    found = given({"kept": kept, "changed": changed})
    assert found["kept"] is kept and found["changed"] is not changed
    assert found["changed"][1] == 1.5
