"""Shards that are mapped: how many there are, what keeps rank 1 from mapping them, and forks while
they are being mapped."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from fsdp_compat._comm.same_host import peers, shared_memory, transport
from fsdp_compat._comm.same_host.shared_memory import Arena


def num_mapped() -> int:
    """Return how many shards of any rank this process has mapped into all-gather outputs. Models of
    earlier tests may be alive, as torch's CommDebugMode keeps what ran inside it."""
    gc.collect()
    return peers._num_mapped


@contextlib.contextmanager
def no_more(limit: int) -> Iterator[None]:
    """The system gives rank 1 no more descriptors, or too little address space for a chunk of
    another rank's memory."""
    gc.collect()  # of earlier tests: mappings of other ranks' memory
    before = resource.getrlimit(limit)
    allowed = 3  # descriptors: these are open, and new ones would be higher
    if limit == resource.RLIMIT_AS:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        allowed = pages * resource.getpagesize() + shared_memory.CHUNK_NBYTES // 2
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(limit, (allowed, before[1]))
        yield
    finally:
        resource.setrlimit(limit, before)


@contextlib.contextmanager
def low_address_space() -> Iterator[None]:
    """Rank 1 cannot map memory of rank 0 that it has not mapped in an earlier test."""
    arena = shared_memory.Arena() if dist.get_rank() == 0 else shared_memory.arena
    with mock.patch.object(shared_memory, "arena", arena), no_more(resource.RLIMIT_AS):
        yield


def no_list_of_pages() -> contextlib.AbstractContextManager[None]:
    """Writes cannot be found, on any rank."""
    return mock.patch.object(peers, "PAGEMAP", "/proc/self/no such file")


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
                (transport.SameHostTransport, "max_of"),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._around(owner, name)))
            arena = shared_memory.arena
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
