"""The commands of examples/TROUBLESHOOTING.md run as they stand there, those of fsdp-compat in this
process. test_readme.py runs those of README.md's "Commands", .ci/run those of "Two commands",
test_checkpoint_recipes.py those of checkpoints."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.tools.program import run
from tests.examples.test_readme import PROGRAMS, blocks
from tests.support.time_limit import limit_s

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    """Run a script in bash, in an environment with the programs of this one."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    """Return what a script prints."""
    try:
        return process.communicate(timeout=limit_s())[0]
    finally:
        process.kill()


def test_the_commands_of_a_run_that_hangs_name_the_rank_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = "    if distributed.get_rank() == 1 and loss < 1.5:\n        os.kill(os.getpid(), 9)\n"
    head, _, loop = PROGRAMS[0].partition("    loss.backward()\n")
    (tmp_path / "train.py").write_text(f"import os\n{head}{dies}    loss.backward()\n{loop}")
    (script,) = blocks("examples/TROUBLESHOOTING.md", "sh", "A run that hangs")
    export, torchrun, diagnose, spy = script.replace("/dev/shm", str(tmp_path)).splitlines()
    assert spy.startswith("py-spy")  # test_readme.py runs it
    output = said(start(f"{export}\n{torchrun}", tmp_path))
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(diagnose, comments=True)
    found = run(*arguments)
    assert program == "fsdp-compat"
    assert re.search(r"^rank 1: was killed", found.stdout, flags=re.MULTILINE), output
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]


def test_torchrun_on_each_host_makes_one_job(tmp_path: Path) -> None:
    (script,) = blocks("examples/TROUBLESHOOTING.md", "sh", "Several hosts")
    (tmp_path / "train.py").write_text(TELLS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert "HOST:29500" in script and "--nproc-per-node 2" in script
    script = script.replace("HOST:29500", address).replace("per-node 2", "per-node 1")
    hosts = [start(script, tmp_path) for _ in range(2)]
    assert sorted(map(said, hosts)) == ["rank 0 of 2\n", "rank 1 of 2\n"]


TELLS = """
from torch import distributed
distributed.init_process_group("gloo")
distributed.barrier()
print(f"rank {distributed.get_rank()} of {distributed.get_world_size()}")
"""
