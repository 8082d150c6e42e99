"""Counters in shared memory, between processes: what is counted is seen, and waits end when the
peer ends, closes, or does not come."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_compat._comm.divergence.processes import Process
from fsdp_compat._comm.same_host import counters, memory_files, shared_memory
from fsdp_compat._comm.same_host.counters import PeerTable, Table
from fsdp_compat._comm.same_host.peers import PeerArena
from fsdp_compat.errors import UsageError
from tests.support.collectives import connect
from tests.support.ranks import on_ranks
from tests.support.same_host import COPIED

pytestmark = pytest.mark.skipif(
    not memory_files.are_supported(), reason="no counters on this machine"
)

TAG, LONG, AT_ONCE_S = 5, datetime.timedelta(seconds=60), 10.0


def table_of_this_process() -> Table:
    return Table(shared_memory.arena().token)


def opened(table: Table, pid: int | None = None) -> PeerTable:
    """Return the table as a peer sees it. pid: of the process that is said to own it."""
    file, process = table.file, Process.with_id(pid or os.getpid())
    assert file is not None and process is not None
    memory = PeerArena(os.getpid(), shared_memory.arena().token)
    return PeerTable(memory.open(file.fd, file.number), process)


def test_a_peer_sees_numbers_and_words_of_each_tag_alone() -> None:
    table = table_of_this_process()
    peer = opened(table)
    table.send(TAG, 3, (1, -2, 3, 4, 5, 1 << 62))
    assert peer.sent(TAG, 3).wait(LONG)
    assert peer.words(TAG) == (1, -2, 3, 4, 5, 1 << 62)
    table.acknowledge(TAG, 7)
    assert peer.read(TAG, 7).wait(LONG)
    for tag in (TAG - 1, TAG + 1, counters.NUM_TAGS - 1):
        assert peer.words(tag) == (0,) * 6
        assert not peer.has_reached(counters._row(tag) // 4, 1)


def test_a_wait_ends_with_the_count_the_time_limit_or_an_abort() -> None:
    table = table_of_this_process()
    peer = opened(table)
    thread = threading.Timer(0.05, table.send, (TAG, 1, (0,) * 6))
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
    peer = opened(table)
    table.send(TAG, 1, (0,) * 6)
    table.close(has_failed=False)
    assert peer.sent(TAG, 1).wait(LONG) and not peer.has_failed
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
        peer = opened(table_of_this_process(), child)
        threading.Timer(0.2, os.kill, (child, ending)).start()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="the connection was closed"):
            peer.sent(TAG, 1).wait(LONG)
        assert 0.1 < time.monotonic() - start < AT_ONCE_S
    finally:
        os.kill(child, signal.SIGKILL)  # a zombie at most
        os.waitpid(child, 0)


def test_a_forked_process_has_no_counters() -> None:
    table = table_of_this_process()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        table.send(TAG, 1, (0,) * 6)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


@on_ranks(2)
def test_two_processes_see_every_word_in_order() -> None:
    """Each rank sends its square a thousand times."""
    rank, table = dist.get_rank(), table_of_this_process()
    assert table.file is not None
    cards: list[tuple[Any, ...]] = [()] * 2
    own = Process.own(), shared_memory.arena().token, table.file.fd, table.file.number
    dist.all_gather_object(cards, own)
    process, token, fd, number = cards[1 - rank]
    peer = PeerTable(PeerArena(process.pid, token).open(fd, number), process)
    for each in range(1, 1001):
        table.send(TAG, each, (each, each * each, rank, 0, 0, 0))
        assert peer.sent(TAG, each).wait(LONG)
        assert peer.words(TAG) == (each, each * each, 1 - rank, 0, 0, 0)
        table.acknowledge(TAG, each)
        assert peer.read(TAG, each).wait(LONG)
    dist.barrier()


@on_ranks(2, environment=COPIED)
def test_more_groups_than_counters_are_refused_with_the_limit() -> None:
    comm = connect()
    for _ in range(65534):
        comm.new_tag()
    with pytest.raises(UsageError, match="at most 65534") as caught:
        comm.new_tag()
    assert "FSDP_COMPAT_SAME_HOST=messages" in str(caught.value)
