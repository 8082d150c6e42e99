"""The progress of a process as another thread sees it."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator

import pytest
from torch import nn
from torch.distributed import distributed_c10d

from fsdp_compat._comm import backend
from fsdp_compat._comm.divergence import progress


class Threads:
    """Threads of which ``progress`` sees no others, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now, self.lock, self.started = 0.0, threading.Lock(), threading.Semaphore(0)
        self.lock.acquire()
        self.threads: list[threading.Thread] = []
        self._frames = sys._current_frames

    def monotonic(self) -> float:
        return self.now

    def frames(self) -> dict[int, types.FrameType]:
        frames = self._frames()
        return {thread.ident: frames[thread.ident] for thread in self.threads if thread.ident}

    def run(self, function: Callable[[], object]) -> threading.Thread:
        """Run ``function``, which acquires and releases the lock, in a thread."""

        def act() -> None:
            if not self.threads:
                progress.follow()
            self.started.release()
            function()

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        self.started.acquire()
        self.threads.append(thread)
        return thread

    def idle_s(self, seen: progress.Progress, where: str) -> float:
        """What ``seen`` finds once the first thread is in the function ``where``."""
        end = time.perf_counter() + 60.0
        while time.perf_counter() < end:
            frame = self.frames()[self.threads[0].ident or 0]
            if frame.f_code.co_name == where:
                return seen.idle_s()
        raise AssertionError(f"no thread came to {where}()")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    threads = Threads()
    monkeypatch.setattr(progress, "time", threads)
    monkeypatch.setattr(sys, "_current_frames", threads.frames)
    monkeypatch.setattr(progress, "_followed", progress._followed)
    yield threads
    threads.lock.release()
    for thread in threads.threads:
        thread.join(60.0)
        assert not thread.is_alive()


def of_file(file: str) -> Callable[[threading.Lock], None]:
    """A function of a file that waits in C for a lock."""
    found: dict[str, Callable[[threading.Lock], None]] = {}
    code = "def waits(lock):\n    lock.acquire()\n    lock.release()"
    exec(compile(code, file, "exec"), found)
    return found["waits"]


COLLECTIVE = of_file(distributed_c10d.__file__)


@pytest.mark.parametrize("module", [distributed_c10d, backend])
def test_thread_in_a_collective_is_idle_from_the_first_look_on(
    threads: Threads, module: types.ModuleType
) -> None:
    threads.run(lambda: of_file(str(module.__file__))(threads.lock))
    threads.run(lambda: of_file("train.py")(threads.lock))  # another one may work
    seen, found = progress.Progress(), []
    for _ in range(3):
        found.append(threads.idle_s(seen, "waits"))
        threads.now += 5.0
    assert found == [0.0, 5.0, 10.0]


def test_next_call_of_a_collective_is_another_wait(threads: Threads) -> None:
    again = threading.Lock()
    again.acquire()

    def calls() -> None:
        for lock in (again, threads.lock):
            COLLECTIVE(lock)
            begun.release()

    begun, seen = threading.Semaphore(0), progress.Progress()
    threads.run(calls)
    assert threads.idle_s(seen, "waits") == 0.0
    threads.now += 5.0
    again.release()
    begun.acquire()
    assert threads.idle_s(seen, "waits") == 0.0
    threads.now += 1.0
    assert threads.idle_s(seen, "waits") == 1.0


def test_call_of_a_c_function_by_the_user_counts_as_work(threads: Threads) -> None:
    threads.run(lambda: of_file("train.py")(threads.lock))
    seen = progress.Progress()
    for _ in range(3):
        assert threads.idle_s(seen, "waits") == 0.0
        threads.now += 5.0


@pytest.mark.parametrize("other_works", [False, True])
def test_thread_at_a_lock_is_idle_unless_another_thread_may_release_it(
    threads: Threads, other_works: bool
) -> None:
    def wait_in(file: str) -> Callable[[], None]:
        return lambda: of_file(file)(threads.lock)

    threads.run(wait_in(threading.__file__))
    threads.run(wait_in("upload.py" if other_works else threading.__file__))
    assert threads.idle_s(progress.Progress(), "waits") == 0.0
    end = time.perf_counter() + 60.0
    while {frame.f_code.co_name for frame in threads.frames().values()} != {"waits"}:
        assert time.perf_counter() < end
    seen = progress.Progress()
    threads.idle_s(seen, "waits")
    threads.now += 5.0
    assert threads.idle_s(seen, "waits") == (0.0 if other_works else 5.0)


def test_place_is_the_innermost_line_of_the_user() -> None:
    def ours() -> str:
        return progress.location_of(sys._getframe())

    class Model(nn.Module):
        def forward(self) -> str:
            return functools.reduce(
                lambda _, __: progress.location_of(stack()), [0, 0]
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
    assert "_pytest" in progress.location_of(library)  # installed by the user
    assert progress.location_of(None) == "a place outside of the user's code"


def test_forked_process_follows_the_thread_that_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_followed", 0)  # another one made the collective calls
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        own = progress._followed == threading.get_ident()
        os.write(writer, f"{own} {progress.location()}".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    assert os.read(reader, 1000).decode().startswith(f"True {__file__}:")
    os.close(reader)
