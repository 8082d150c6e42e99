"""Processes at the cost of a fork: two templates import torch and everything else that takes long,
and fork a process for each request.

Two, because forked processes have the same hash seed and nearly the same addresses: sets would have
the same order on all ranks, and code that relies on it would work here and nowhere else. Processes
0 and 2 come from one template, 1 and 3 from the other.

    pytest -> template    arguments as JSON, with the connection, the output and the status pipe
    process -> pytest     its pid, over the status pipe
    keeper -> pytest      how the process ended; it is forked by the template, and its parent"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import subprocess
import sys
import traceback
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

NUM_TEMPLATES = 2
_templates: dict[int, tuple[socket.socket, subprocess.Popen[bytes]]] = {}


class ForkedProcess:
    """A process that runs ``tests.support.ranks._serve``, with what subprocess.Popen has."""

    def __init__(
        self,
        rank: int,
        connection: Connection,
        output: int,
        stacks: Path,
        environment: dict[str, str],
    ) -> None:
        self._status, writer = os.pipe()
        self.returncode: int | None = None
        request = json.dumps([sys.path, os.getcwd(), environment, rank, str(stacks)])
        try:
            template = _template(rank % NUM_TEMPLATES, environment)
            socket.send_fds(template, [request.encode()], [connection.fileno(), output, writer])
        finally:
            os.close(writer)

    @cached_property
    def pid(self) -> int:
        return self._number()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        pid = self.pid
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {pid}", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(self._number())
            os.close(self._status)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def _number(self) -> int:
        if not (read := os.read(self._status, 8)):
            raise RuntimeError("A template ended before it had forked the process.")
        return int.from_bytes(read, "big")


def _template(number: int, environment: dict[str, str]) -> socket.socket:
    if number not in _templates:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start = "import json, sys; sys.path[:], fd = json.loads(sys.argv[1]); "
        start += f"from {__name__} import _fork_on_request; _fork_on_request(fd)"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", start, json.dumps([sys.path, theirs.fileno()])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C reaches pytest alone
            )
        _templates[number] = ours, process
    return _templates[number][0]


def close_templates() -> None:
    """End the templates, after the processes that they have forked."""
    while _templates:
        connection, process = _templates.popitem()[1]
        connection.close()
        process.wait()


# --- in a template's process ----------------------------------------------------------------------


def _fork_on_request(file_descriptor: int) -> NoReturn:
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo  # which the first optimizer imports
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import fsdp_compat  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()
    requests = socket.socket(fileno=file_descriptor)
    while True:
        request, fds, *_ = socket.recv_fds(requests, 1 << 20, 3)
        _reap(os.WNOHANG if request else 0)
        if not request:
            os._exit(0)  # pytest has ended
        if not os.fork():
            requests.close()
            _keep(request, *fds)
        for fd in fds:
            os.close(fd)


def _reap(options: int) -> None:
    """Wait for keepers that have ended, so that their processor time counts as this process's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _keep(request: bytes, connection: int, output: int, status: int) -> NoReturn:
    """Fork the process and report its end."""
    pid = os.fork()
    if not pid:
        _become_rank(request, connection, output, status)
    os.close(connection)
    os.close(output)
    _, code = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # pytest has ended
        os.write(status, code.to_bytes(8, "big"))
    os._exit(0)


def _become_rank(request: bytes, connection: int, output: int, status: int) -> NoReturn:
    os.setsid()
    os.write(status, os.getpid().to_bytes(8, "big"))
    os.close(status)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    sys.path[:], directory, environment, rank, stacks = json.loads(request)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)

    from tests.support.ranks import _serve

    try:
        _serve(rank, connection, stacks)
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # it never returns
