"""Streams are joined where a program changes from one to another, and nowhere else; what becomes of
the inputs of calls there."""

import dataclasses
import types
from typing import Any

import pytest
import torch

from fsdp_compat._engine import hooks
from fsdp_compat._engine.device import compute_streams


class RecordedStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "RecordedStream") -> None:
        self.log.append(f"{self.name} after {other.name}")


def test_change_of_stream_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    first, second = RecordedStream("first", log), RecordedStream("second", log)
    now = [first]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: now[0])
    streams = compute_streams(torch.device("cuda", 0))
    assert streams is not None
    for now[0] in (first, first, second, second, first):
        streams.join()
    assert log == ["second after first", "first after second"]


def test_cpu_has_no_streams_to_join() -> None:
    assert compute_streams(torch.device("cpu")) is None


# -- inputs of calls on devices with streams


class Call:
    def __init__(self) -> None:
        self.inputs: Any = None


def watched(args: Any, kwargs: Any, call: Any, device: str = "cpu") -> Any:
    return hooks.on_gradients_of_inputs(args, kwargs, call, torch.device(device))


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


def test_hooks_on_inputs_go_with_their_calls() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    call = Call()
    (alias,), _ = watched((x,), {}, call)
    assert len(alias._backward_hooks) == 1
    call.inputs.put_back()
    del call
    assert not alias._backward_hooks


def test_inputs_on_other_devices_are_left_alone() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    call = Call()
    (same, _), _ = watched((x, [x]), {}, call, "meta")
    assert same is x and not call.inputs.nodes and not x._backward_hooks
