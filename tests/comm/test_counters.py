"""Waits for a counter of another process end when that process ends, closes, or does not come."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time

import pytest

from fsdp_compat._comm.divergence.processes import Process
from fsdp_compat._comm.same_host import memory_files, shared_memory
from fsdp_compat._comm.same_host.counters import PeerTable, Table
from fsdp_compat._comm.same_host.peers import PeerArena

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
