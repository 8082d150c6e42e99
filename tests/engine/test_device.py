"""Streams are joined where a program changes from one to another, and nowhere else; what becomes of
the inputs of calls there."""

import dataclasses
import types
from typing import Any

import torch

from fsdp_compat._engine import hooks


class Call:
    def __init__(self) -> None:
        self.inputs: Any = None


def watched(args: Any, kwargs: Any, call: Any, device: str = "cpu") -> Any:
    return hooks.alias_inputs(args, kwargs, call, torch.device(device))


def test_an_input_is_the_same_tensor_in_all_arguments_and_keeps_its_attributes() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    x.label = "x"  # type: ignore[attr-defined]
    args, kwargs = watched((x, x, "text"), {"key": x}, Call())
    assert args[0] is args[1] is kwargs["key"] and args[0].label == "x"
    assert args[2] == "text"


def test_inputs_that_cannot_be_watched_stay_as_they_are() -> None:
    sparse = torch.eye(2, requires_grad=True).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2)], requires_grad=True)
    call = Call()
    for _ in range(2):
        args, _ = watched((sparse, nested), {}, call)
    assert args[0] is sparse and args[1] is nested
    assert not call.inputs.nodes


@dataclasses.dataclass(frozen=True)
class Packed:
    x: torch.Tensor


def test_inputs_in_containers_are_aliases_until_the_call_ends() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    values: list[Any] = [x, (x, 3), {"x": x}, Packed(x), types.MappingProxyType({"x": x})]
    call = Call()
    (given, same), _ = watched((values, x), {}, call)
    [alias] = call.inputs.nodes
    assert given is values  # forward may change it
    inside = [values[0], values[1][0], values[2]["x"], values[3].x, same]
    assert all(value is inside[0] for value in inside) and inside[0] is not x
    assert alias is inside[0].grad_fn is not x.grad_fn
    values.append("from forward")
    call.inputs.put_back()
    assert all(value is x for value in (values[0], values[1][0], values[2]["x"], values[3].x))
    assert values[-1] == "from forward" and values[4]["x"] is x
