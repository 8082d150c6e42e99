"""Work in threads: one error for all, and no work after it. Other work shows its seconds."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from fsdp_compat import _progress
from fsdp_compat._progress import elapsing
from fsdp_compat.checkpoint._blocks import Tick
from fsdp_compat.checkpoint._tools import threads
from fsdp_compat.checkpoint._tools.convert import FORMATS
from fsdp_compat.checkpoint._tools.reader import Files
from fsdp_compat.checkpoint._tools.recognition import open_archive
from fsdp_compat.checkpoint._tools.threads import for_each
from fsdp_compat.checkpoint._tools.writers import WriteOptions


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_stops_the_others_at_their_next_tick_and_is_raised(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "THREADS", 2)
    started = threading.Barrier(2, timeout=20)
    begun: list[int] = []

    def work(item: int, tick: Tick) -> None:
        begun.append(item)
        if item > 1:
            return
        started.wait()
        if item == 1:
            raise error("of item 1")
        while True:  # ends only because a tick raises
            tick(1)

    with pytest.raises(error, match="of item 1"):
        for_each(list(range(50)), work)
    assert len(begun) < 50


@pytest.mark.parametrize("kind", ["native", "dcp"])
def test_an_interrupted_convert_does_not_finish_the_files_of_other_ranks(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(threads, "THREADS", 2)
    torch.save({f"w{number}": torch.ones(8) for number in range(100)}, tmp_path / "model.pt")
    begun = threading.Barrier(2, timeout=20)
    calls: list[int] = []

    def tick(nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) <= 2 and begun.wait() == 0:
            raise KeyboardInterrupt
        time.sleep(0.02)

    options = WriteOptions(world_size=2, tick=tick)
    archive = open_archive(tmp_path / "model.pt")
    with Files({}) as files, pytest.raises(KeyboardInterrupt):
        FORMATS[kind].write(archive, tmp_path / "target", options, files)
    assert len(calls) < 40


def test_only_long_work_shows_its_seconds_and_leaves_an_empty_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with elapsing(True, "reading"):
        pass
    assert capsys.readouterr().err == ""
    flushed = threading.Event()
    monkeypatch.setattr(_progress, "_SILENT_S", 0)
    monkeypatch.setattr("sys.stderr.flush", flushed.set)
    with elapsing(True, "reading"):
        assert flushed.wait(20)
    shown = capsys.readouterr().err
    assert shown.startswith("\rreading ... 0 s") and shown.endswith(f"\r{'':79}\r")
