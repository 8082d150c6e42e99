"""Work in threads: one error for all, and no work after it. Other work shows its seconds."""

from __future__ import annotations

import threading

import pytest

from fsdp_compat import _progress
from fsdp_compat._progress import elapsing
from fsdp_compat.checkpoint._blocks import Tick
from fsdp_compat.checkpoint._tools import threads
from fsdp_compat.checkpoint._tools.threads import for_each


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
