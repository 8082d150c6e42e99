"""Streams are joined where a program changes from one to another, and nowhere else; what becomes of
the inputs of calls there."""

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
        self.inputs: list[Any] = []
        self.inputs_left = 0


def watched(args: Any, kwargs: Any, call: Any) -> Any:
    return hooks.on_gradients_of_inputs(args, kwargs, call)


def test_an_input_is_the_same_tensor_in_all_arguments_and_keeps_its_attributes() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    x.label = "x"  # type: ignore[attr-defined]
    args, kwargs = watched((x, x, "text"), {"key": x}, Call())
    assert args[0] is args[1] is kwargs["key"] and args[0].label == "x"
    assert args[2] == "text"


def test_inputs_that_cannot_be_watched_stay_as_they_are() -> None:
    leaf = torch.ones(2, requires_grad=True)
    sparse = torch.eye(2, requires_grad=True).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2)], requires_grad=True)
    call = Call()
    for _ in range(2):
        args, _ = watched((sparse, nested, {"prompt": leaf}), {}, call)
    assert args[0] is sparse and args[1] is nested
    assert not leaf._backward_hooks and not call.inputs


def test_hooks_on_inputs_in_containers_go_with_their_calls() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    call = Call()
    watched(({"x": x},), {}, call)
    assert call.inputs == [x.grad_fn] and len(x._backward_hooks) == 1
    del call
    assert not x._backward_hooks
