"""Counters in shared memory, between processes: what is counted is seen, and waits end when the
peer ends, closes, or does not come."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_compat._comm import counters, shared_memory
from fsdp_compat._comm.counters import PeerTable, Table
from fsdp_compat._comm.divergence.processes import Process
from fsdp_compat._comm.peer_memory import PeerMemory
from tests.support.ranks import run_ranks
from tests.support.same_host import COPIED

pytestmark = pytest.mark.skipif(not counters.are_supported(), reason="no counters on this machine")

TAG, LONG, AT_ONCE_S = 5, datetime.timedelta(seconds=60), 10.0


def table_of_this_process(ranks: int = 2) -> Table:
    shared_memory.identity()  # makes the file that the token is of
    return Table(ranks, shared_memory.token())


def opened(table: Table, rank: int, pid: int | None = None) -> PeerTable:
    """Return the table as rank ``rank`` sees it. pid: of the process that is said to own it."""
    arena, file = shared_memory._arena, table.file
    assert arena.control is not None and file is not None
    memory = PeerMemory(os.getpid(), arena.control.fd, arena.token)
    named = Process.with_id
    with mock.patch.object(Process, "with_id", lambda own: named(pid or own)):
        return PeerTable(memory, file.fd, file.number, rank, 2)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def test_a_peer_sees_numbers_and_words_of_its_own_row_only() -> None:
    table = table_of_this_process()
    mine, others = opened(table, 1), opened(table, 0)
    table.send(1, TAG, 3, (1, -2, 3, 4, 5, 6, 1 << 62))
    assert mine.sent(TAG, 3).wait(LONG)
    assert mine.words(TAG) == (1, -2, 3, 4, 5, 6, 1 << 62)
    table.acknowledge(1, TAG, 7)
    assert mine.read(TAG, 7).wait(LONG)
    for peer, tag in ((mine, TAG + 1), (mine, counters.NUM_TAGS - 1), (others, TAG)):
        assert peer.words(tag) == (0,) * 7
        assert not peer.has_reached(counters._row(peer._rank, tag) // 4, 1)


def test_a_wait_ends_with_the_count_the_time_limit_or_an_abort() -> None:
    table = table_of_this_process()
    peer = opened(table, 1)
    thread = threading.Timer(0.05, table.send, (1, TAG, 1, (0,) * 7))
    thread.start()
    assert peer.sent(TAG, 1).wait(LONG)
    thread.join()
    with pytest.raises(RuntimeError, match="Timed out"):
        peer.sent(TAG, 2).wait(datetime.timedelta(milliseconds=150))
    work = peer.sent(TAG, 2)
    thread = threading.Timer(0.05, work.abort)
    thread.start()
    assert not work.wait(LONG)
    thread.join()


def test_a_wait_fails_when_the_peer_closes_but_not_for_what_it_has_counted() -> None:
    table = table_of_this_process()
    peer = opened(table, 1)
    table.send(1, TAG, 1, (0,) * 7)
    table.close()
    assert peer.sent(TAG, 1).wait(LONG)
    with pytest.raises(RuntimeError, match="the connection was closed"):
        peer.sent(TAG, 2).wait(LONG)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_a_wait_fails_at_once_when_the_peers_program_ends(ending: signal.Signals) -> None:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, lambda *args: os.execv("/bin/sleep", ["sleep", "60"]))
        signal.pause()
        os._exit(0)
    try:
        peer = opened(table_of_this_process(), 1, child)
        threading.Timer(0.2, os.kill, (child, ending)).start()

        def wait() -> None:
            with pytest.raises(RuntimeError, match="the connection was closed"):
                peer.sent(TAG, 1).wait(LONG)

        assert 0.1 < seconds_of(wait) < AT_ONCE_S
    finally:
        os.kill(child, signal.SIGKILL)  # a zombie at most
        os.waitpid(child, 0)


def test_a_forked_process_has_no_counters() -> None:
    table = table_of_this_process()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        table.send(1, TAG, 1, (0,) * 7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def exchanges_numbers() -> list[tuple[int, ...]]:
    """Each rank sends its square a thousand times; the words that the other one saw."""
    rank, table = dist.get_rank(), table_of_this_process()
    arena, file = shared_memory._arena, table.file
    assert arena.control is not None and file is not None
    cards: list[tuple[object, ...]] = [()] * 2
    own = os.getpid(), arena.control.fd, arena.token, file.fd, file.number
    dist.all_gather_object(cards, own)
    pid, control, token, fd, number = cards[1 - rank]
    memory = PeerMemory(pid, control, token)  # type: ignore[arg-type]
    peer = PeerTable(memory, fd, number, rank, 2)  # type: ignore[arg-type]
    seen = []
    for each in range(1, 1001):
        table.send(1 - rank, TAG, each, (each, each * each, rank, 0, 0, 0, 0))
        assert peer.sent(TAG, each).wait(LONG)
        seen.append(peer.words(TAG))
        table.acknowledge(1 - rank, TAG, each)
        assert peer.read(TAG, each).wait(LONG)
    dist.barrier()
    return seen


def test_two_processes_see_every_word_in_order() -> None:
    for rank, seen in enumerate(run_ranks(2, exchanges_numbers)):
        assert seen == [(n, n * n, 1 - rank, 0, 0, 0, 0) for n in range(1, 1001)]


def counts_beyond_the_table() -> bool:
    """Gather with tags below and above those that have counters."""
    from tests.comm.test_gloo import connect, gathered, numbers

    comm = connect()
    tags = itertools.count(counters.NUM_TAGS - 8, 4)
    for tag in (next(tags) for _ in range(4)):
        full = gathered(comm, numbers(200_000, comm.rank), tag)
        assert torch.equal(full, torch.cat([numbers(200_000, r) for r in range(2)]))
    return bool(comm.connections.same_host.counts)


def test_tags_without_counters_are_sent() -> None:
    assert run_ranks(2, counts_beyond_the_table, environment=COPIED) == [True] * 2
