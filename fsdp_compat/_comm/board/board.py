"""The board: every rank that stands still tells all others what it does, and ranks that wait for it
find out whether it will come.

A thread looks at what this process has begun and waits for (calls.py). While it goes on, nothing is
sent. When it has begun nothing for ``PATIENCE`` seconds, the thread posts what it does, and looks
again at growing intervals:

Where ranks part. The first rank of an axis compares what the ranks have begun (verdict.py), and
warns on all ranks if some wait for ``warn_after_s()``. A few others stand in for it. Of more than
``MAX_READ`` the first of each ``GROUP`` ranks reads the group, and the first rank what those have
found. Along an axis without tags, ranks that have begun different calls never end: they fail as
soon as each rank has told what it does, or was silent at two looks.

Waits that never end. A rank *lacks* what another one waits for while it has begun it less often. A
host that waits starts nothing. So of ranks that wait, those never end of which each waits for
something that another of them lacks (``circle``). A rank that goes on has no post, and a message in
flight was begun, so neither a slow rank nor a slow network looks like that. A wait also never ends
for a rank that has gone: gloo does not report a closed connection to every pending message, and a
child of a killed process may hold it open. Such a wait is aborted, and all communication of the
process fails with it (``give_up``). While several threads of a rank communicate, none is sought.

A rank in a rendezvous has sent nothing yet. If one is among those that never end, only ranks in a
rendezvous get an error, and can still do what the others wait for."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ... import _torch_private
from ...errors import UsageError
from ..environment import idle_limit_s, warn_after_s
from . import progress, ring
from .calls import Report, Wait, Waiter, Waiting
from .processes import Process
from .status_store import KILLED, RENEW_S, Post, StatusStore, status_store
from .verdict import State, Verdict, judge, merged

PATIENCE = 5.0  # seconds without a new call before a process tells what it does
LOOK_S = 1.0  # the thread looks at its own process at least this often
GROUP, MAX_READ = 128, 256  # ranks that one rank reads for others; posts that it reads at most

_logger = logging.getLogger("fsdp_compat.waits")


def patience_s() -> float:
    with contextlib.suppress(UsageError):  # raised by the call that needs the limits
        return min(PATIENCE, idle_limit_s() / 2, (warn_after_s() or 30.0) / 3)
    return PATIENCE


class Board:
    """What one process tells the others and finds out, in one default process group."""

    def __init__(self, rank: int, store: StatusStore, ranks: int) -> None:
        self._rank, self.store, self._ranks = rank, store, ranks
        self._seen: object = None  # what this process had begun, and waited for
        self._since, self._still_since = time.time(), time.monotonic()
        self._next_look = self._lost_at = 0.0  # monotonic seconds
        self._idle = progress.Progress()
        self._posted: Post | None = None
        self._warned_at, self._warn_s = self._since, 0.0
        # By axis that this rank has compared: ranks without a post at the last look. Only after a
        # second one are they silent: a rank that has just stopped is about to post.
        self._silent: dict[str, set[int]] = {}
        store.introduce(rank, Process.own())

    def look(self, waiters: Sequence[Waiter]) -> None:
        """Post what this process does if it stands still, and find out what keeps it. waiters: all
        of the process."""
        now = time.monotonic()
        alive = {thread.ident for thread in threading.enumerate()}
        is_one = len({waiter.activity.thread for waiter in waiters} & alive) <= 1
        # while one of several threads waits, another may begin what other ranks wait for
        waiting = [each for each in waiters if is_one and each.activity.waiting is not None]
        seen = (
            [each.activity.total for each in waiters],
            [each.activity.waiting for each in waiting],
        )
        if seen != self._seen:
            self._seen, self._still_since = seen, now
            self._since = self._warned_at = time.time()
            self._idle, self._next_look, self._silent = progress.Progress(), now + patience_s(), {}
            self._lost_at, self._warn_s = now, warn_after_s()
            self.withdraw()
            return
        idle_s = 0.0 if waiting else self._idle.idle_s()
        if now < self._next_look:
            return
        pause_s = min(max(LOOK_S, (now - self._still_since) / 4), 5.0)
        self._next_look = now + pause_s * (4 if self._ranks > MAX_READ else 1)
        due = self._still_since + warn_after_s() + LOOK_S  # others may have begun to wait later
        waiter = waiting[0] if waiting else None
        current = None if waiter is None else waiter.activity.waiting
        wait = waiter.describe(current) if waiter and current else None
        post = self._post(waiters, wait, idle_s)
        if waiter is not None and waiter.activity.waiting is not current:
            return  # it has ended, and the counts may be newer
        if post != self._posted:
            self.store.post(self._rank, post)
            self._posted = post
        self._tell_of_killed_neighbours()
        for each in waiters:
            if len(each.activity.members) > 1:
                self._compare(each)
        if self._silent:  # the others wait for what this rank finds
            self._next_look = min(now + pause_s, due) if now < due else now + pause_s
        if waiter is not None and wait is not None:
            self._end_if_it_never_ends(waiters, waiter, current, post)
        self._fail_if_others_have(waiters)
        self._warn()

    def _post(self, waiters: Sequence[Waiter], wait: Wait | None, idle_s: float) -> Post:
        doing = wait.text.removeprefix(f"rank {self._rank} ") if wait else progress.activity()
        axes = {}
        for each in waiters:
            activity = each.activity
            if activity.total:
                counts = dict(activity.counts) if activity.has_tags else {}  # for waits of the host
                axes[activity.name] = (
                    counts,
                    activity.total,
                    [*map(activity.name_of, [*activity.last])],
                )
        number = int(time.time() / RENEW_S)
        return Post(doing, self._since, idle_s, False, axes, ring.last(), number, wait)

    def announce_end(self, text: str, waiters: Sequence[Waiter] = ()) -> None:
        """Tell other ranks not to wait for this process any more."""
        with contextlib.suppress(Exception):
            axes = self._post(waiters, None, 0.0).axes
            self.store.post(self._rank, Post(text, self._since, 0.0, True, axes))

    def withdraw(self) -> None:
        """Take the post of this process out of the store."""
        if self._posted is not None:
            self._posted = None
            self.store.post(self._rank, None)

    # -- where ranks part

    def _tell_of_killed_neighbours(self) -> None:
        """Tell of ranks beside this one on its host, which cannot tell themselves."""
        for rank in {(self._rank + step) % self._ranks for step in (-1, 1)} - {self._rank}:
            if self.store.is_gone(rank) and not ((post := self.store.post_of(rank)) and post.ended):
                self.store.post(rank, Post(KILLED, time.time(), 0.0, True))

    def _speaks_for(self, ranks: Sequence[int]) -> bool:
        """True on the first of a few ranks that stands still: the others may have ended, be silent,
        or lie on a host that is lost."""
        few = [*dict.fromkeys([*ranks[:4], ranks[-1]])]
        if self._rank not in few:
            return False
        before = map(self.store.post_of, few[: few.index(self._rank)])
        return not any(post is not None and post.is_alive for post in before)

    def _compare(self, waiter: Waiter) -> None:
        """Compare what the ranks of an axis have begun, if this rank does it for all others, or for
        its group."""
        activity, store = waiter.activity, self.store
        members, own = activity.members, activity.rank
        size = len(members) if len(members) <= MAX_READ else GROUP
        part = own // size
        group = members[part * size : (part + 1) * size]
        compares = self._speaks_for(members)
        if not compares and not self._speaks_for(group):
            return
        last_silent = self._silent.setdefault(activity.name, set())
        posts = store.posts_of(group)
        states = merged(_state(rank, post, activity.name) for rank, post in posts.items())
        if size < len(members):
            store.tell_states(activity.name, part, states)
            if not compares:
                return
            groups = [members[at : at + size] for at in range(0, len(members), size)]
            states = merged(store.states_of(activity.name, groups))
        silent = {rank for each in states if each.calls is None for rank in each.ranks}
        again = silent & last_silent
        have_all_told = again == silent  # or were silent at two looks
        waits = [post.wait for post in posts.values() if post and post.wait]
        if not (waiter.is_connected or any(each.name == activity.name for each in waits)):
            again = set()  # a rendezvous that nobody waits in, or communication that has failed
        self._silent[activity.name] = silent
        states = [each for each in states if each.calls is not None or again.issuperset(each.ranks)]
        if activity.may_differ and activity.has_tags:
            verdict = _longest_wait(posts, time.time())
        else:
            verdict = judge(states, not activity.has_tags, time.time())
        if verdict is None:
            return
        if verdict.never_ends and waiter.is_connected and not activity.has_tags:
            if have_all_told:  # among a few of the ranks, the odd one may look usual
                store.report_failure(activity.name, self._rank, Report({}, verdict.text))
        elif self._warn_s and time.time() - verdict.since >= self._warn_s:
            told_at, _ = store.warning()
            if time.time() - told_at >= self._warn_s / 2:
                self._warn_s *= 2
                store.warn(verdict.text)

    def _warn(self) -> None:
        """Log what a rank has found that compares, once."""
        if not self._warn_s or time.monotonic() - self._still_since < warn_after_s() / 2:
            return
        at, text = self.store.warning()
        if at > self._warned_at:
            self._warned_at = at
            _logger.warning("%s\n%s", text, ADVICE)

    def tell_of_lost_store(self) -> None:
        """Warn once that this rank stands still and cannot find out why."""
        still_s = time.monotonic() - self._still_since
        if 0 < self._warn_s <= still_s:
            self._warn_s = 0.0
            _logger.warning(
                "The process that keeps the store of the process group has ended: rank 0, unless "
                "torchrun keeps it; look at its output. Rank %d has begun nothing for %.0f s, and "
                "%s.",
                *(self._rank, still_s, progress.activity()),
            )

    # -- waits that never end

    def _end_if_it_never_ends(
        self, waiters: Sequence[Waiter], waiter: Waiter, waiting: Waiting | None, post: Post
    ) -> None:
        activity, wait, now = waiter.activity, post.wait, time.monotonic()
        assert wait is not None
        if activity.diagnosis is not None:
            waiter.end_wait()  # again, because this wait may have begun after the last attempt
            return
        report = circle(self.store, post)
        if report is None and now - self._lost_at >= patience_s():
            self._lost_at = now  # rarely, because each probe sends a message
            report = _report_of_lost(waiter, wait, self.store)
        if report is not None and activity.waiting is waiting:
            activity.diagnosis = report
            if not wait.can_be_refused:
                # first: a peer that loses its connection looks for the reason in the store
                _report_failure(waiters, report, self.store)
            waiter.end_wait()

    def _fail_if_others_have(self, waiters: Sequence[Waiter]) -> None:
        """Fail if any axis has a report: by a rank that has failed, or by the one, perhaps this,
        that has found in ``_compare`` that it can never end."""
        for waiter in waiters:
            if waiter.is_connected:
                report = self.store.failure_of(waiter.activity.name)
                if report is not None:
                    _report_failure(waiters, report, self.store)
                    for each in waiters:
                        activity = each.activity
                        if activity.waiting is not None or not activity.has_tags:
                            activity.diagnosis = activity.diagnosis or report
                            each.end_wait()
                    return


ADVICE = (
    "  Every rank must run the same forwards and backwards, and make the same calls. Common "
    "mistakes: a rank has one batch less than the others, or one rank evaluates, or saves, alone. "
    "FSDP_COMPAT_WARN_AFTER sets when this is told first."
)


def _state(rank: int, post: Post | None, name: str) -> State:
    if post is None or not (post.ended or post.is_alive):
        return State((rank,), 1)
    _, total, last = post.axes.get(name, ({}, 0, []))
    calls = None if post.is_killed else dict(enumerate(last, total - len(last)))
    doing = post.doing + f", after the {post.use}" * bool(post.use)
    return State((rank,), 1, calls, post.since, doing, post.ended)


def _longest_wait(posts: dict[int, Post | None], now: float) -> Verdict | None:
    """Say who waits for what, where the order of calls says nothing."""
    for post in sorted(filter(None, posts.values()), key=lambda each: each.since):
        wait = post.wait
        if wait and any((peer := posts.get(n)) is None or peer.lacks(wait) for n in wait.peers):
            lines = [f"{wait.text} ({now - post.since:.0f} s so far)."]
            lines += [f"  rank {rank}: {each.doing}" for rank, each in posts.items() if each]
            return Verdict("\n".join(lines), post.since, False)
    return None


def circle(store: StatusStore, own: Post) -> Report | None:
    """Return why the wait of this process can never end, or None if it may end."""
    assert own.wait is not None
    posts: dict[int, Post | None] = {own.wait.rank: own}  # those read so far, by rank
    lacking: dict[int, list[int]] = {}  # by rank that waits: those that lack it
    left = [own]
    while left and len(posts) < MAX_READ:
        wait = left.pop().wait
        assert wait is not None
        lacking[wait.rank] = []
        for rank in wait.peers:
            if is_new := rank not in posts:
                posts[rank] = store.post_of(rank)
            post = posts[rank]
            if post is not None and post.wait is not None and post.lacks(wait):
                lacking[wait.rank].append(rank)
                left += [post] * is_new
    while True:
        may_end = [rank for rank, needs in lacking.items() if lacking.keys().isdisjoint(needs)]
        if not may_end:
            break
        for rank in may_end:
            del lacking[rank]
    waits = [post.wait for rank in lacking if (post := posts[rank]) and post.wait]
    refused = [wait for wait in waits if wait.can_be_refused]
    if own.wait not in (refused or waits):
        return None
    return Report({wait.rank: wait.text for wait in waits})


def _report_of_lost(waiter: Waiter, wait: Wait, store: StatusStore) -> Report | None:
    """Return a report if a rank that a wait needs has gone, as a killed process does."""
    rank = waiter.lost_peer(wait, store.is_gone)
    if rank is None:
        return None
    # a rank that has failed says why before it closes its connections
    reported = store.failure_of(wait.name, except_of=wait.rank)
    return reported or Report({}, store.fate_of(rank), rank)


class _Watcher:
    """The background thread of one process. It runs while there are waiters."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # around everything below
        self.board: Board | None = None  # in self._world
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._world: Callable[[], object] = lambda: None  # weak

    def watch(self, waiter: Waiter) -> None:
        with self.lock:
            self._waiters.add(waiter)
            self._forget_old_world()
            world, store = dist.group.WORLD, _torch_private.default_store()
            if self.board is None and world is not None and store is not None:
                own = StatusStore(_torch_private.second_connection(store))
                self.board = Board(dist.get_rank(), own, dist.get_world_size())
                self._world = weakref.ref(world)
            if self.board is not None and waiter.is_connected:
                self.board.store.forget_failure(waiter.activity.name)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="fsdp_compat board"
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
        if self.board is not None:
            error = getattr(sys, "last_value", None)  # that the interpreter has printed
            name = f" with {type(error).__name__}: {progress.first_line_of(error)[:200]}"
            self.board.announce_end("has ended" + (name if error else ""), self.waiters())

    def _run(self) -> None:
        while not self._stop.wait(min(LOOK_S, patience_s() / 5)):
            with self.lock:
                waiters = self.waiters()
                for waiter in set(self._waiters).difference(waiters):
                    waiter.close(None)  # a model may still hold it
                self._forget_old_world()
                if self.board is not None:
                    try:
                        self.board.look(waiters)
                    except RuntimeError:
                        self.board.tell_of_lost_store()
                    except Exception:  # the program goes on, and it is not hidden
                        _logger.exception("The search for waits that never end has failed.")
                if not waiters:
                    self._thread = None
                    return

    def _forget_old_world(self) -> None:
        if self.board is not None and self._world() is not dist.group.WORLD:
            board, self.board = self.board, None
            board.announce_end("has destroyed its process groups", [*self._waiters])


_watcher = _Watcher()


def _start_again() -> None:
    """In a forked process: it has no thread, and a thread of the parent may hold the lock."""
    global _watcher
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_start_again)
atexit.register(lambda: _watcher.end())


def watch(waiter: Waiter) -> None:
    """Watch a waiter for as long as other code holds it."""
    _watcher.watch(waiter)


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
                if _watcher.board is not None:
                    _watcher.board.withdraw()
        for waiter in waiters:
            if waiter.is_connected:
                waiter.close(report)
