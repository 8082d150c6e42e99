"""Run a script as several processes that exit like any program, at the cost of one import of torch:
one interpreter imports it, and forks a process for each list of arguments.

    ended = run_programs(SOURCE, [["0", "path"], ["1", "path"]], folder)"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

# The forked processes leave the loop and end with the interpreter.
_LAUNCHER = """
import gc, os, sys
import torch, fsdp_compat
torch.set_num_threads(1)
gc.freeze()  # or each process visits all imported objects when it ends, which takes long
_source, _folder, *_arguments = sys.argv[1:]
_pids = []
for _number, _argument in enumerate(_arguments):
    _pid = os.fork()
    if not _pid:
        break
    _pids.append(_pid)
else:
    _codes = [os.waitstatus_to_exitcode(os.waitpid(_pid, 0)[1]) for _pid in _pids]
    print(*_codes)
    sys.exit()
for _fd, _name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{_folder}/{_number}.{_name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), _fd)
sys.argv[1:] = _argument.split(" ")
exec(compile(_source, "<program>", "exec"))
"""


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


def run_programs(
    source: str,
    arguments: Sequence[Sequence[object]],
    folder: Path,
    *,
    timeout: float = 120.0,
    **environment: str,
) -> list[Ended]:
    """Run ``source`` once with each list of arguments, which contain no spaces, all at once."""
    command = [sys.executable, "-c", _LAUNCHER, source, str(folder)]
    launcher = subprocess.Popen(
        [*command, *(" ".join(map(str, each)) for each in arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        out, _ = launcher.communicate(timeout=timeout)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, 9)
            launcher.wait()
    codes = [int(code) for code in out.split()]
    return [
        Ended(code, (folder / f"{n}.out").read_text(), (folder / f"{n}.err").read_text())
        for n, code in enumerate(codes)
    ]


_FORKER = """
import gc, json, os, sys
import torch, torch.distributed.tensor
gc.freeze()
for _line in iter(sys.stdin.readline, ""):
    _source, _folder, sys.argv[1:], _environment = json.loads(_line)
    _pid = os.fork()
    if not _pid:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(_pid, 0)[1]), flush=True)
else:
    sys.exit()
for _fd, _name in ((0, os.devnull), (1, f"{_folder}/out"), (2, f"{_folder}/err")):
    os.dup2(os.open(_name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), _fd)
os.environ.update(_environment)
exec(compile(_source, "<program>", "exec"))
"""


class Forker:
    """Runs programs one after the other, each in a fork of one interpreter that has imported torch,
    its DTensors, and nothing of torch.distributed.fsdp."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _FORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )

    def run(
        self, source: str, *arguments: str, timeout: float = 120.0, **environment: str
    ) -> Ended:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            request = json.dumps([source, folder, arguments, environment])
            print(request, file=self._process.stdin, flush=True)
            killer = threading.Timer(timeout, os.killpg, [self._process.pid, signal.SIGKILL])
            killer.start()
            code = self._process.stdout.readline()
            killer.cancel()
            assert code, f"the program took longer than {timeout} s"
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return Ended(int(code), out, err)

    def close(self) -> None:
        self._process.communicate(timeout=20)
