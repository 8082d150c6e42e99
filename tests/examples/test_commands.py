"""The commands of examples/TROUBLESHOOTING.md run as they stand there, in processes that have torch
already. test_readme.py runs those of README.md's "First steps", .ci/run those of "Two commands",
test_checkpoint_recipes.py those of checkpoints."""

from __future__ import annotations

import json
import re
import shlex
import socket
from pathlib import Path

import pytest

from tests.checkpoint.tools.program import run
from tests.examples.test_readme import PROGRAM, blocks
from tests.support.programs import Ended, Launcher

pytestmark = pytest.mark.slow

# Its workers are forks of it that run the program in place of processes that import torch.
TORCHRUN = """
import os, runpy, sys
from torch.distributed import run

def work(_, path, *arguments):  # the first one is -u
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")

launch = run.elastic_launch
run.elastic_launch = lambda config, entrypoint: launch(config, work)
folder, *exports = sys.argv[1:sys.argv.index("torchrun")]
os.chdir(folder)
sys.path.insert(0, folder)
for export in exports:
    name, _, value = export.partition("=")
    os.environ[name] = value
run.main(["--start-method", "fork", *sys.argv[sys.argv.index("torchrun") + 1:]])
"""


def torchrun(launcher: Launcher, script: str, folder: Path, hosts: int = 1) -> list[Ended]:
    """Run `export` and `torchrun`, once for each host."""
    words = [word for word in shlex.split(script, comments=True) if word != "export"]
    return launcher.run(TORCHRUN, [[folder, *words]] * hosts, folder)


def test_the_commands_of_a_run_that_hangs_name_the_rank_that_died(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = "    if distributed.get_rank() == 1 and loss < 1.5:\n        os.kill(os.getpid(), 9)\n"
    head, _, loop = PROGRAM.partition("    loss.backward()\n")
    (tmp_path / "train.py").write_text(f"import os\n{head}{dies}    loss.backward()\n{loop}")
    (script,) = blocks("examples/TROUBLESHOOTING.md", "sh", "A run that hangs")
    export, command, diagnose, spy = script.replace("/dev/shm", str(tmp_path)).splitlines()
    assert spy.startswith("py-spy")  # test_readme.py runs it
    (ended,) = torchrun(launcher, f"{export} {command}", tmp_path)
    assert ended.code == 1
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(diagnose, comments=True)
    found = run(*arguments)
    assert program == "fsdp-compat"
    assert re.search(r"^rank 1: was killed", found.stdout, flags=re.MULTILINE), ended
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]


def test_torchrun_on_each_host_makes_one_job(launcher: Launcher, tmp_path: Path) -> None:
    (script,) = blocks("examples/TROUBLESHOOTING.md", "sh", "Several hosts")
    (tmp_path / "train.py").write_text(TELLS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    script = script.replace("HOST:29500", address)
    hosts = torchrun(launcher, script, tmp_path, hosts=2)
    told = [sorted(host.out.splitlines()) for host in hosts]
    assert sorted(told) == [[f"rank {n} of 4" for n in ranks] for ranks in ((0, 1), (2, 3))], hosts


TELLS = """
import sys
from torch import distributed
distributed.init_process_group("gloo")
distributed.barrier()
sys.stdout.write(f"rank {distributed.get_rank()} of {distributed.get_world_size()}\\n")
"""
