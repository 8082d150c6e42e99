"""Forked processes that run one function, and forks in the middle of mapping shards."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from fsdp_compat._comm.same_host import shared_memory, transport
from fsdp_compat._comm.same_host.shared_memory import Arena


def forked(function: Callable[..., None], *args: Any) -> int:
    """Run ``function`` in a forked process and return its id. The exit status is 1 after an
    error."""
    process = os.fork()
    if process:
        return process
    try:
        function(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def fork_and_end() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


class LockThatTells:
    """A lock that calls ``told`` when a thread wants it."""

    def __init__(self, told: Callable[[], None]) -> None:
        self._lock, self._told = threading.RLock(), told
        self.release = self._lock.release

    def acquire(self) -> bool:
        self._told()
        return self._lock.acquire()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class ForksWhileMapping:
    """Forks from another thread at one point: before the optimizer writes to shards, or, when the
    next forward begins, before or after a call that locates shards, tells the other ranks, maps, or
    counts forks.

    The fork ends there, or pauses before or after it freezes, until this thread wants the arena's
    lock or the forward has begun.
    """

    def __init__(self, pause: str) -> None:
        self._pause, self._paused, self._goes_on = pause, threading.Event(), threading.Event()
        self._point, self._num_points, self._thread = -1, 0, threading.Thread()
        self._main, self._freeze = threading.get_ident(), Arena.freeze

    @contextlib.contextmanager
    def at(self, point: int) -> Iterator[None]:
        """Fork at a point of this step."""
        self._point, self._num_points = point, 0
        with contextlib.ExitStack() as stack:
            for owner, name in (
                (shared_memory, "num_forks"),
                (shared_memory, "locate"),
                (transport, "map_shards"),
                (transport.SameHostTransport, "gather_objects"),
                (transport.SameHostTransport, "any_of"),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._around(owner, name)))
            arena = shared_memory._arena
            freeze = functools.partial(self._frozen, arena)
            stack.enter_context(mock.patch.object(arena, "freeze", freeze))
            lock = LockThatTells(self._wants_lock)
            stack.enter_context(mock.patch.object(arena, "lock", lock))
            stack.callback(self._let_go)
            self._pass_point()
            yield
        assert self._num_points >= self._point, "the last point was passed"

    def begun(self, *_: object) -> None:
        """The forward has begun."""
        self._point = -1
        self._let_go()

    def _around(self, owner: Any, name: str) -> Callable[..., Any]:
        call = getattr(owner, name)

        @functools.wraps(call)
        def around(*args: Any, **kwargs: Any) -> Any:
            self._pass_point()
            try:
                return call(*args, **kwargs)
            finally:
                self._pass_point()

        return around

    def _pass_point(self) -> None:
        if threading.get_ident() != self._main or self._point < 0:
            return
        if self._num_points == self._point:
            self._paused.clear()
            self._goes_on.clear()
            self._thread = threading.Thread(target=fork_and_end)
            self._thread.start()
            if self._pause:
                assert self._paused.wait(30)
            else:
                self._thread.join()
        self._num_points += 1

    def _frozen(self, arena: Arena) -> None:
        for now in ("before freezing", "after freezing"):
            if self._pause == now and threading.get_ident() != self._main:
                self._paused.set()
                assert self._goes_on.wait(30)
            if now == "before freezing":
                self._freeze(arena)

    def _wants_lock(self) -> None:
        if threading.get_ident() == self._main:
            self._goes_on.set()

    def _let_go(self) -> None:
        self._goes_on.set()
        if self._thread.is_alive():
            self._thread.join()
