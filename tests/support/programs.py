"""Run a script as several processes that exit like any program, at the cost of one import of torch:
one interpreter imports it, and forks a process for each list of arguments.

    ended = run_programs(SOURCE, [["0", "path"], ["1", "path"]], folder)"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

# The forked processes leave the loop and end with the interpreter.
_LAUNCHER = """
import os, sys
import torch, fsdp_compat
torch.set_num_threads(1)
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
