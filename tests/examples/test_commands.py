"""The commands of README.md and of examples/TROUBLESHOOTING.md run as they stand there. Those of
README's "Two commands" are run by .ci/run, those of checkpoints by test_checkpoint_recipes.py."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.test_readme import ALONE, PROGRAMS, blocks, resuming
from tests.support.time_limit import limit_s

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    """Run a script in bash, in an environment with the programs of this one."""
    (folder / "bin").mkdir(exist_ok=True)
    command = folder / "bin" / "fsdp-compat"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fsdp_compat "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join(
        [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
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


def test_the_commands_of_a_run_that_hangs_name_the_rank_that_died(tmp_path: Path) -> None:
    dies = "    if distributed.get_rank() == 1 and loss < 1.5:\n        os.kill(os.getpid(), 9)\n"
    head, _, loop = PROGRAMS[0].partition("    loss.backward()\n")
    (tmp_path / "train.py").write_text(f"import os\n{head}{dies}    loss.backward()\n{loop}")
    (script,) = blocks("examples/TROUBLESHOOTING.md", "sh", "A run that hangs")
    lines = script.replace("/dev/shm/box", str(tmp_path / "box")).splitlines(keepends=True)
    assert lines.pop().startswith("py-spy")  # test_readme.py runs it
    found = said(start("".join(lines), tmp_path))
    assert re.search(r"^rank 1: was killed", found, flags=re.MULTILINE), found
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]


def test_torchrun_on_each_host_makes_one_job(tmp_path: Path) -> None:
    (script,) = blocks("examples/TROUBLESHOOTING.md", "sh", "Several hosts")
    tells = 'print(f"{distributed.get_world_size()} ranks")\n'
    (tmp_path / "train.py").write_text(PROGRAMS[1] + tells)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert "HOST:29500" in script
    script = script.replace("HOST:29500", address)
    hosts = [start(script, tmp_path) for _ in range(2)]
    for found in map(said, hosts):
        assert len(re.findall(r"loss 0\.\d+", found)) == found.count("4 ranks") == 2, found


def test_the_commands_of_the_readme_run_after_its_programs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(resuming(PROGRAMS[0]))
    (tmp_path / "job.py").write_text(ALONE[1])
    (script,) = blocks("README.md", "sh", "Commands")
    trains = "torchrun --standalone --nproc-per-node 2 train.py\n"
    process = start("set -e\n" + trains + script, tmp_path)
    found = said(process)
    assert process.returncode == 0, found
    assert "yes, latest" in found and "complete and undamaged" in found
    assert "One of 8 ranks" in found
    assert "layers.0.linear1.weight" in torch.load(tmp_path / "model.pt")["model"]
