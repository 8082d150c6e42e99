"""Streams are joined where a program changes from one to another, and nowhere else."""

import pytest
import torch

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
    streams.join()
    streams.join()
    assert log == []
    now[0] = second
    streams.join()
    streams.join()
    now[0] = first
    streams.join()
    assert log == ["second after first", "first after second"]


def test_cpu_has_no_streams_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise AssertionError("asked for a stream")

    monkeypatch.setattr(torch.accelerator, "current_stream", refuse)
    compute_streams(torch.device("cpu")).join()
