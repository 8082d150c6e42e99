"""The progress of a process as another thread sees it."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable

import pytest
from torch import nn

from fsdp_compat._comm import progress
from tests.support.programs import Forker
from tests.support.ranks import close_pool


@pytest.fixture(autouse=True, scope="module")
def without_children() -> None:
    """What rank processes of other tests do, such as clearing up, counts as progress."""
    close_pool()


def works(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10000))


def looks(meanwhile: Callable[[], object], num_looks: int = 5, pause_s: float = 0.1) -> float:
    """How long the followed thread has been idle at the last look, while it runs ``meanwhile`` and
    then waits."""
    stop, started = threading.Event(), threading.Event()
    before = progress._followed, progress._native_id

    def followed() -> None:
        progress.follow()
        started.set()
        while not stop.is_set():
            meanwhile()
            stop.wait()

    thread = threading.Thread(target=followed)
    thread.start()
    started.wait()
    try:
        seen = progress.Progress()
        for _ in range(num_looks):
            threading.Event().wait(pause_s)
            idle_s = seen.idle_s()
    finally:
        stop.set()
        thread.join()
        progress._followed, progress._native_id = before
    return idle_s


def test_waiting_thread_is_idle_and_computing_thread_is_not() -> None:
    # repeated: the garbage of earlier tests may be collected meanwhile
    assert any(looks(lambda: None) > 0.25 for _ in range(10))
    assert looks(lambda: works(1.0)) < 0.25


def test_looks_themselves_are_no_progress() -> None:
    """500 looks take most of the time between them, and read much more than a busy thread."""
    assert any(looks(lambda: None, num_looks=500, pause_s=0.0005) > 0.25 for _ in range(10))


def test_thread_that_exchanges_messages_is_not_idle() -> None:
    near, far = socket.socketpair()

    def answers() -> None:
        for _ in range(200):
            threading.Event().wait(0.004)
            far.send(b"x")

    def receives() -> None:
        threading.Thread(target=answers).start()
        for _ in range(200):
            near.recv(1)

    with near, far:
        assert looks(receives) < 0.25


def test_computing_child_process_is_progress() -> None:
    end = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    child = subprocess.Popen([sys.executable, "-c", end])
    try:
        assert looks(lambda: None) < 0.25
    finally:
        child.kill()
        child.wait()


def test_place_is_the_innermost_line_of_the_user() -> None:
    def ours() -> str:
        return progress.place_of(sys._getframe())

    class Model(nn.Module):
        def forward(self) -> str:
            return functools.reduce(
                lambda _, __: progress.place_of(stack()), [0, 0]
            )  # a frame of the library's is around the lambda

    def stack() -> types.FrameType | None:
        return sys._getframe(1).f_back  # the frame of forward

    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in ours\(\)", ours())
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in forward\(\)", Model()())
    library = next(
        frame
        for frame in (sys._getframe(depth) for depth in range(1, 60))
        if "_pytest" in frame.f_code.co_filename
    )
    assert "_pytest" in progress.place_of(library)  # installed by the user
    assert progress.place_of(None) == "a place outside of the user's code"


def test_forked_process_follows_its_own_thread() -> None:
    """The system gives its thread another number."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(
            writer, f"{progress._native_id == os.getpid()} {progress._frame() is not None}".encode()
        )
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"True True"
    os.close(reader)


IS_WOKEN = """
import select, threading
from fsdp_compat._comm import progress

def look():
    seen = progress.Progress()
    for _ in range(5):
        threading.Event().wait(0.1)
        print(seen.idle_s(), flush=True)
    done.set()

done = threading.Event()
threading.Thread(target=look).start()
while not done.is_set():
    select.select([], [], [], 0.004)
"""


def test_process_forked_before_the_import_follows_its_own_thread() -> None:
    forker = Forker()
    try:
        ended = forker.run(IS_WOKEN)
    finally:
        forker.close()
    assert ended.code == 0, ended.err
    assert float(ended.out.split()[-1]) < 0.25


def sampled(monkeypatch: pytest.MonkeyPatch, *changes: tuple[int, float, int, int]) -> list[float]:
    """What ``idle_s`` returns at looks one second apart, after which (stack, seconds of processor
    time, bytes, waits that have ended) have changed by so much."""
    now, sample = [0.0], [0, 0.0, 0, 0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.Progress, "_sample", lambda _: ((sample[0],), *sample[1:]))
    monkeypatch.setattr(progress, "_in_transfer", lambda: False)
    seen, found = progress.Progress(), []
    for change in changes:
        now[0] += 1.0
        sample = [before + by for before, by in zip(sample, change, strict=True)]
        found.append(seen.idle_s())
    return found


@pytest.mark.parametrize(
    "change", [(1, 0.0, 0, 0), (0, 0.2, 0, 0), (0, 0.0, 1 << 17, 0), (0, 0.0, 0, 50)]
)
def test_each_sign_of_progress_resets_the_idle_time(
    monkeypatch: pytest.MonkeyPatch, change: tuple[int, float, int, int]
) -> None:
    little = (0, 0.01, 1 << 12, 5)  # by looking into /proc
    assert sampled(monkeypatch, little, little, change, little) == [1.0, 2.0, 0.0, 1.0]
