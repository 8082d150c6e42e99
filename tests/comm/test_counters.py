"""Counters in shared memory, between processes: what is counted is seen, and waits end when the
peer ends, closes, or does not come."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_compat._comm.divergence.processes import Process
from fsdp_compat._comm.same_host import counters, memory_files, shared_memory
from fsdp_compat._comm.same_host.counters import PeerTable, Table
from fsdp_compat._comm.same_host.peers import PeerArena
from fsdp_compat.errors import UsageError
from tests.support.collectives import connect
from tests.support.ranks import run_ranks
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


def seconds_of(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


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
        table.send(TAG, 1, (0,) * 6)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def exchanges_numbers() -> list[tuple[int, ...]]:
    """Each rank sends its square a thousand times; the words that the other one saw."""
    rank, table = dist.get_rank(), table_of_this_process()
    assert table.file is not None
    cards: list[tuple[Any, ...]] = [()] * 2
    own = Process.own(), shared_memory.arena().token, table.file.fd, table.file.number
    dist.all_gather_object(cards, own)
    process, token, fd, number = cards[1 - rank]
    peer = PeerTable(PeerArena(process.pid, token).open(fd, number), process)
    seen = []
    for each in range(1, 1001):
        table.send(TAG, each, (each, each * each, rank, 0, 0, 0))
        assert peer.sent(TAG, each).wait(LONG)
        seen.append(peer.words(TAG))
        table.acknowledge(TAG, each)
        assert peer.read(TAG, each).wait(LONG)
    dist.barrier()
    return seen


def test_two_processes_see_every_word_in_order() -> None:
    for rank, seen in enumerate(run_ranks(2, exchanges_numbers)):
        assert seen == [(n, n * n, 1 - rank, 0, 0, 0) for n in range(1, 1001)]


def takes_too_many_tags() -> tuple[int, str]:
    """Returns how many tags a communicator has, and the error of one more."""
    comm, number = connect(), 0
    while True:
        try:
            comm.new_tag()
        except UsageError as error:
            return number, str(error)
        number += 1


def test_more_groups_than_counters_are_refused_with_the_limit() -> None:
    for number, message in run_ranks(2, takes_too_many_tags, environment=COPIED):
        assert number == 65534
        assert "at most 65534" in message and "FSDP_COMPAT_SAME_HOST=messages" in message
