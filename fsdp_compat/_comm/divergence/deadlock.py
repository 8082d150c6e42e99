"""Detects waits that can never end, and aborts them with an error that says which rank waits for
what.

A background thread looks at what this process waits for (waits.py). After ``PATIENCE`` seconds it
publishes the wait in the status store, with how often this rank has begun each message, and
searches the posts of other ranks for a cycle. A wait in a cycle is aborted, and all communication
of the process fails with it (``give_up``). So is a wait for a rank that has gone: gloo does not
report a closed connection to every pending message, and a child of a killed process may hold it
open.

The same thread answers ranks that ask what this process is doing (progress.py), so that they can
tell a late rank from one that will never come, and warns of long waits that may still end, with the
answers of the missing ranks. It has its own connection to the store, because the main thread may
wait on the other one. While no rank asks and nothing waits, it makes one read-only request every
``quiet_s()`` seconds.

A rank *lacks* what another rank waits for while it has begun it less often. Every cycle found is
real, even if the posts are stale. A waiting rank starts nothing. If rank B has not yet started what
A waits for, and B itself waits, then A's wait ends after B's: in a cycle, no wait can be the first
to end. The same holds for a chain that ends at a wait over connections on which some rank has
failed. A rank that computes has no post, and a message in flight was begun, so neither a slow rank
nor a slow network looks like a cycle. While several threads of a rank communicate, there is no
search.

A rank in a rendezvous has sent nothing yet. If a cycle passes through such ranks, only they get an
error, and can still do what the others wait for. All ranks of a rendezvous wait for the same
missing ones, so they are one node, and only those that ask for missing ones search from there: the
first to arrive and, because it may die, later a few more."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ... import _torch_private
from ..environment import quiet_s, warn_after_s
from . import progress
from .processes import Process
from .status_store import Answer, MissingRanks, Post, StatusStore, status_store
from .waits import Report, Wait, Waiter, Waiting

PATIENCE = 5.0  # seconds in the same wait before it is published
LOOK_S = 1.0  # the thread looks at least this often
_MAX_NAMED = 4  # ranks listed in a warning
FORGOTTEN_S = 10.0  # without a question for so long, no rank waits for an answer any more

_logger = logging.getLogger("fsdp_compat.waits")


def _current(waiters: Sequence[Waiter]) -> tuple[Waiter, Waiting] | tuple[None, None]:
    for waiter in waiters:
        waiting = waiter.activity.waiting
        if waiting is not None:
            return waiter, waiting
    return None, None


class Responder:
    """Answers other ranks that ask what this process is doing, in one default process group."""

    def __init__(self, rank: int, store: StatusStore) -> None:
        self.store = store
        self._rank = rank
        self._num_answered = 0
        self._answered_at = self._looked_at = -FORGOTTEN_S
        self._progress = progress.Progress()
        # what this process does, and since when all questions have found the same
        self._text, self._since = "", 0.0
        store.introduce(rank, Process.own())

    def look(self, waiters: Sequence[Waiter]) -> None:
        """Answer the latest question, if there is a new one."""
        now = time.monotonic()
        if now - self._answered_at > FORGOTTEN_S:
            self._progress, self._text = progress.Progress(), ""
            if now - self._looked_at < quiet_s():
                return
        self._looked_at = now
        number = self.store.num_asked(self._rank)
        if number == self._num_answered:
            return
        self._num_answered, self._answered_at = number, now
        waiter, waiting = _current(waiters)
        if waiter is not None and waiting is not None:
            text = waiter.describe(waiting).text.removeprefix(f"rank {self._rank} ")
            self._progress, idle_s = progress.Progress(), 0.0
        else:
            text, idle_s = progress.activity(), self._progress.idle_s()
        if text != self._text:
            self._text, self._since = text, now
        self.store.answer(self._rank, Answer(number, text, idle_s, since_s=now - self._since))

    def announce_end(self, text: str) -> None:
        """Tell other ranks not to wait for this process any more."""
        with contextlib.suppress(Exception):
            self.store.answer(self._rank, Answer(0, text, 0.0, ended=True))


class Search:
    """Publishes a long wait of this process, searches for a cycle, and warns if there is none."""

    def __init__(self) -> None:
        self._seen: Waiting | None = None
        self._missing: MissingRanks | None = None  # that it waits for
        self._warn_s = 0.0  # seconds of waiting at the next warning; 0: no warnings
        self._since = self._probed_at = 0.0  # monotonic seconds
        self._posted: Wait | None = None  # what the post in the store says

    def look(self, waiters: Sequence[Waiter], store: StatusStore) -> None:
        alive = {thread.ident for thread in threading.enumerate()}
        if len({waiter.activity.thread for waiter in waiters} & alive) > 1:
            waiters = []  # while one thread waits, another may begin what other ranks wait for
        waiter, waiting = _current(waiters)
        if waiting is not self._seen:
            self._seen, self._since = waiting, time.monotonic()
            self._missing, self._warn_s = None, warn_after_s()
            self.withdraw(store)
        elif waiter is not None and waiting is not None:
            waited_s = time.monotonic() - self._since
            if waited_s >= PATIENCE:
                self._look_at_long_wait(waiters, waiter, waiting, store)
            # some time before a warning, so that the missing ranks can answer in time
            is_due = self._warn_s and waited_s >= self._warn_s - warn_after_s() / 2
            if is_due and waiter.activity.diagnosis is None:
                wait = waiter.describe(waiting)
                if wait.peers:  # in a rendezvous the ranks that ask warn, on behalf of the others
                    self._ask(wait, waited_s, store)

    def _ask(self, wait: Wait, waited_s: float, store: StatusStore) -> None:
        """Ask what the missing ranks are doing and, at growing intervals, warn."""
        self._missing = self._missing or MissingRanks(store, wait.name)
        posts = {rank: store.post_of(rank) for rank in wait.peers}
        missing = [rank for rank, post in posts.items() if post is None or post.lacks(wait)]
        found = [f"rank {rank}: {self._missing.ask(rank)[0]}" for rank in missing]
        if waited_s < self._warn_s:
            return
        while self._warn_s <= waited_s:
            self._warn_s *= 2
        waited = f"{waited_s:.{int(waited_s < 10)}f} s"
        lines = [*found[:_MAX_NAMED], *(["and others"] if len(found) > _MAX_NAMED else [])]
        _logger.warning(
            "%s.\n%s  Every rank must run the same forwards and "
            "backwards. Common mistakes: a rank has one batch less than the others, or one rank "
            "evaluates alone. Next warning in %.0f s (FSDP_COMPAT_WARN_AFTER).",
            f"R{wait.text[1:]}".replace(" waits", f" has waited {waited}", 1),
            "".join(f"  {line}\n" for line in lines),
            self._warn_s - waited_s,
        )

    def withdraw(self, store: StatusStore) -> None:
        """Take the post of this process out of the store."""
        if self._posted is not None:
            wait, self._posted = self._posted, None
            store.post(wait.rank, None)

    def _look_at_long_wait(
        self, waiters: Sequence[Waiter], waiter: Waiter, waiting: Waiting, store: StatusStore
    ) -> None:
        activity = waiter.activity
        counts = {other.activity.name: dict(other.activity.counts) for other in waiters}
        own = Post(waiter.describe(waiting), counts)
        if activity.waiting is not waiting:  # it has ended, and the counts may be newer
            return
        if self._posted != own.wait:
            self._posted = own.wait
            store.post(own.wait.rank, own)
        if activity.diagnosis is not None:
            waiter.end_wait()  # again, because this wait may have begun after the last attempt
            return
        report = find_cycle(store, own)
        now = time.monotonic()
        if report is None and now - max(self._since, self._probed_at) >= PATIENCE:
            self._probed_at = now  # rarely, because each probe sends a message
            report = _report_of_lost(waiter, own.wait, store)
        if report is not None and activity.waiting is waiting:
            activity.diagnosis = report
            if not own.wait.can_be_refused:
                # first: a peer that loses its connection looks for the reason in the store
                _report_failure(waiters, report, store)
            waiter.end_wait()


class _Watcher:
    """The background thread of one process. It runs while there are waiters."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # around everything below
        self.search = Search()
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._responder: Responder | None = None  # in self._world
        self._world: Callable[[], object] = lambda: None  # weak

    def watch(self, waiter: Waiter) -> None:
        with self.lock:
            self._waiters.add(waiter)
            self._forget_old_world()
            world, store = dist.group.WORLD, _torch_private.default_store()
            if self._responder is None and world is not None and store is not None:
                own = StatusStore(_torch_private.second_connection(store))
                self._responder, self._world = Responder(dist.get_rank(), own), weakref.ref(world)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="fsdp_compat deadlock detection"
                )
                self._thread.start()

    def waiters(self) -> list[Waiter]:
        """Those whose process groups exist. The caller holds the lock."""
        return [waiter for waiter in self._waiters if waiter.is_alive]

    def end(self) -> None:
        """Stop the thread before the interpreter ends: returning from a call later would crash."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)
        self._forget_old_world()
        if self._responder is not None:
            error = getattr(sys, "last_value", None)  # that the interpreter has printed
            name = f" with {type(error).__name__}: {progress.first_line_of(error)[:200]}"
            self._responder.announce_end("has ended" + (name if error else ""))

    def _run(self) -> None:
        while not self._stop.wait(min(LOOK_S, PATIENCE / 5, quiet_s() / 2)):
            with self.lock:
                waiters = self.waiters()
                for waiter in set(self._waiters).difference(waiters):
                    waiter.close(None)  # a model may still hold it
                self._forget_old_world()
                if self._responder is not None:
                    with contextlib.suppress(Exception):  # the store is gone
                        self._responder.look(waiters)
                        self.search.look(waiters, self._responder.store)
                if not waiters:
                    self._thread = None
                    return

    def _forget_old_world(self) -> None:
        if self._responder is not None and self._world() is not dist.group.WORLD:
            responder, self._responder = self._responder, None
            responder.announce_end("has destroyed its process groups")


_watcher = _Watcher()


def _start_again() -> None:
    """In a forked process: it has no thread, and a thread of the parent may hold the lock."""
    global _watcher
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_start_again)
atexit.register(lambda: _watcher.end())


def watch(waiter: Waiter) -> None:
    """Watch the waits of a waiter for as long as other code holds it."""
    _watcher.watch(waiter)


def find_cycle(store: StatusStore, own: Post) -> Report | None:
    """Return why a wait can never end, or None if it may end."""
    posts: dict[int, Post | None] = {own.wait.rank: own}  # those read so far, by rank
    path: dict[object, Post] = {}  # by node, in the order of the search
    done: set[object] = set()  # nodes that lead to no cycle

    def with_path(report: Report) -> Report:
        lines = {post.wait.rank: post.wait.text for post in path.values()}
        return dataclasses.replace(report, lines={**report.lines, **lines})

    def search(post: Post) -> Report | None:
        wait = post.wait
        path[wait.node] = post
        failed = None if wait.can_be_refused else store.failure_of(wait.name)
        if failed is not None:
            return with_path(failed)
        is_published = wait.can_be_refused and post is not own
        for rank in store.missing_in(wait.name, wait.number) if is_published else wait.peers:
            if rank not in posts:
                posts[rank] = store.post_of(rank)
            peer = posts[rank]
            if peer is None or peer.wait.node in done or not peer.lacks(wait):
                continue
            if peer.wait.node not in path:
                found = search(peer)
                if found is not None:
                    return found
                continue
            nodes = list(path)
            cycle = nodes[nodes.index(peer.wait.node) :]
            refused = [node for node in cycle if path[node].wait.can_be_refused]
            if not refused or own.wait.node in refused:
                return with_path(Report({}))
        del path[wait.node]
        done.add(wait.node)
        return None

    return search(own)


def _report_of_lost(waiter: Waiter, wait: Wait, store: StatusStore) -> Report | None:
    """Return a report if a rank that a wait needs has gone, as a killed process does."""
    rank = waiter.lost_peer(wait, store.is_gone)
    if rank is None:
        return None
    # a rank that has failed says why before it closes its connections
    reported = store.failure_of(wait.name, except_of=wait.rank)
    return reported or Report({}, store.fate_of(rank), rank)


def reason_of(waiter: Waiter, wait: Wait, is_lost: bool) -> Report | None:
    """Return why a wait has failed, as far as known; with ``is_lost`` also that a rank has gone."""
    store = status_store()
    if store is not None:
        with contextlib.suppress(RuntimeError):  # the lost rank may have hosted the store
            reported = store.failure_of(wait.name, except_of=wait.rank)
            return reported or (_report_of_lost(waiter, wait, store) if is_lost else None)
    return None


def _report_failure(waiters: Sequence[Waiter], report: Report, store: StatusStore) -> None:
    for waiter in waiters:
        if waiter.is_connected:
            store.report_failure(waiter.activity.name, waiter.activity.global_rank, report)


def give_up(failed: Waiter, report: Report) -> None:
    """All communication of this process has failed, because a rank that has left a wait is out of
    step with all others. Closes all connections; peers find the reason in the store."""
    with _watcher.lock:
        store, waiters = status_store(), [*{failed, *_watcher.waiters()}]
        if store is not None:
            with contextlib.suppress(RuntimeError):
                _report_failure(waiters, report, store)
                _watcher.search.withdraw(store)
        for waiter in waiters:
            if waiter.is_connected:
                waiter.close(report)
