"""Waits for a counter of another process end when that process ends or closes."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time

import pytest

from fsdp_compat._comm.board.processes import Process
from fsdp_compat._comm.same_host import memory_files
from fsdp_compat._comm.same_host.counters import PeerTable, Table
from fsdp_compat._comm.same_host.peers import PeerArena

TAG, LONG, AT_ONCE_S = 5, datetime.timedelta(seconds=60), 10.0


@pytest.mark.skipif(not memory_files.are_supported(), reason="no counters on this machine")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGUSR1])
def test_a_wait_fails_at_once_when_the_peers_program_ends_or_closes(ending: signal.Signals) -> None:
    """SIGUSR1: it runs another program."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGUSR1, lambda *args: os.execv("/bin/sleep", ["sleep", "60"]))
        signal.pause()
        os._exit(0)
    try:
        table, process = Table(), Process.with_id(child)
        assert table.file is not None and process is not None
        mapped = PeerArena(os.getpid()).open(table.file.fd, table.file.number)
        peer = PeerTable(mapped, process)
        table.send(TAG, 1, (0,) * 6)
        threading.Timer(0.2, os.kill, (child, ending)).start()
        start = time.monotonic()
        assert peer.sent(TAG, 1).wait(LONG), "what it has counted"
        with pytest.raises(RuntimeError, match="the connection was closed"):
            peer.sent(TAG, 2).wait(LONG)
        assert 0.1 < time.monotonic() - start < AT_ONCE_S
    finally:
        os.kill(child, signal.SIGKILL)  # a zombie at most
        os.waitpid(child, 0)
