"""Run a script as several processes that exit like any program, at the cost of one import of torch:
one interpreter imports it, and forks a process for each list of arguments.

    ended = launch(SOURCE, [["0", "path"], ["1", "path"]], folder)"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.time_limit import limit_s

ROOT = Path(__file__).parents[2]

# The forked processes leave the loop and end with the interpreter. It tears down no modules: that
# takes a fork a quarter of a second.
_LAUNCHER = """
import atexit, gc, importlib, json, os, sys
_status = None
@atexit.register  # as the first one, so that it is called last
def _end():
    if _status is not None:
        sys.stdout.flush()
        os._exit(_status)
for _name in sys.argv[1:]:
    importlib.import_module(_name)
import torch
torch.set_num_threads(1)
gc.freeze()  # or each process visits all imported objects when it ends, which takes long
for _line in iter(sys.stdin.readline, ""):
    _source, _folder, _arguments, _environment = json.loads(_line)
    _pids = []
    for _number, _argument in enumerate(_arguments):
        _pid = os.fork()
        if not _pid:
            break
        _pids.append(_pid)
    else:
        _ended = [os.waitstatus_to_exitcode(os.waitpid(_pid, 0)[1]) for _pid in _pids]
        print(*_ended, flush=True)
        continue
    break
else:
    sys.exit()
_files = (os.devnull, f"{_folder}/{_number}.out", f"{_folder}/{_number}.err")
for _fd, _name in enumerate(_files):
    os.dup2(os.open(_name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), _fd)
sys.argv[1:] = _argument
os.environ.update(_environment)
try:
    exec(compile(_source, "<program>", "exec"))
    _status = 0
except BaseException as _error:
    _code = getattr(_error, "code", 1)  # of SystemExit
    _status = _code if isinstance(_code, int) else int(bool(_code))
    raise
"""


def python(
    *command: object, folder: Path = ROOT, timeout: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with a command in a folder, and assert that it succeeds. timeout: in seconds;
    default: ``limit_s()``."""
    ran = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=limit_s() if timeout is None else timeout,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-3000:]
    return ran


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


class Launcher:
    """Runs programs, each in a fork of one interpreter that has imported torch and ``imports``."""

    def __init__(self, *imports: str, options: Sequence[str] = (), **environment: str) -> None:
        """options: of the interpreter."""
        self._process = subprocess.Popen(
            [sys.executable, *options, "-c", _LAUNCHER, *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            start_new_session=True,
        )

    def run(
        self,
        source: str,
        arguments: Sequence[Sequence[object]],
        folder: Path,
        **environment: str,
    ) -> list[Ended]:
        """Run ``source`` once with each list of arguments, all at once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        texts = [list(map(str, each)) for each in arguments]
        request = [source, str(folder), texts, environment]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        limit = limit_s()
        killer = threading.Timer(limit, os.killpg, [self._process.pid, signal.SIGKILL])
        killer.start()
        codes = self._process.stdout.readline().split()
        killer.cancel()
        assert codes, f"the programs took longer than {limit:.0f} s"
        return [
            Ended(int(code), *((folder / f"{n}.{end}").read_text() for end in ("out", "err")))
            for n, code in enumerate(codes)
        ]

    def close(self) -> None:
        self._process.communicate(timeout=limit_s(20))


@functools.cache
def _shared() -> Launcher:
    """Ends with this process."""
    names = "faults", "hosts", "killed_saves", "warm"
    return Launcher(*(f"tests.support.{name}" for name in names))


def launch(
    source: str, arguments: Sequence[Sequence[object]], folder: Path, **environment: str
) -> list[Ended]:
    """``Launcher.run``, by a launcher that all tests of this process share."""
    return _shared().run(source, arguments, folder, **environment)
