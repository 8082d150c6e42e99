"""Training on real hosts, which are namespaces: bytes that leave each of them, and what the others
do when one is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.network import Host, network, why_not
from tests.support.time_limit import limit_s

_REFUSAL = why_not() if sys.platform == "linux" else "network namespaces need Linux"
pytestmark = pytest.mark.skipif(bool(_REFUSAL), reason=_REFUSAL)

ROOT = Path(__file__).parents[2]
WIDTH, UNITS = 512, 6  # a unit has 1 MiB
UNIT_NBYTES = 4 * WIDTH * WIDTH

# One process of each host imports torch, and forks one for each rank.
PROGRAM = """
import json, os, sys, time, torch, torch.distributed as dist
from fsdp_compat import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.network import sent_nbytes
from torch import nn

host, places, width, units, folder, address = json.loads(sys.argv[1])
place = next((place for place in range(1, places) if not os.fork()), 0)
rank = host * places + place
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=2 * places
)


def write(name, text):
    with open(f"{folder}/{rank}", "w") as file:
        file.write(text)
    os.rename(f"{folder}/{rank}", f"{folder}/{name}{rank}")


def sharded(strategy):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(units)))
    if strategy is None:
        for module in [*model, model]:
            fully_shard(module)
        return model
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy[strategy],
    )


def sent_in(call):
    dist.barrier()
    before = sent_nbytes()
    dist.barrier()
    call()
    dist.barrier()
    return sent_nbytes() - before


x, sent = torch.ones(2, width), {}
for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", None):
    model = sharded(strategy)
    model(x).sum().backward()
    sent[str(strategy)] = sent_in(lambda: model(x).sum().backward())
model = sharded("FULL_SHARD")
sent["state_dict"] = sent_in(model.state_dict)
write("sent", json.dumps(sent))
dist.barrier()
try:
    while True:
        model(x).sum().backward()
        write("trains", "")
except Exception as error:
    write("error", f"{type(error).__name__}: {error}")
for _ in range(places - 1 if place == 0 else 0):
    os.wait()  # all processes of a host end with its first one
os._exit(0)
"""


def start(hosts: list[Host], places: int, folder: Path) -> list[subprocess.Popen[str]]:
    facts = places, WIDTH, UNITS, str(folder), hosts[0].address
    return [
        host.start(
            [sys.executable, "-c", PROGRAM, json.dumps([number, *facts])],
            {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
        for number, host in enumerate(hosts)
    ]


def wait_for(folder: Path, name: str, ranks: range, quiet_s: float) -> list[str]:
    """Return the contents of the files of some ranks, once they exist."""
    end, files = time.monotonic() + limit_s(quiet_s), [folder / f"{name}{rank}" for rank in ranks]
    while absent := [file.name for file in files if not file.exists()]:
        assert time.monotonic() < end, f"{absent} were not written within the time limit"
        time.sleep(0.02)
    return [file.read_text() for file in files]


@pytest.mark.parametrize("places, killed", [(2, 1), (4, 0)])
def test_every_value_leaves_its_host_once_and_survivors_of_a_killed_host_fail(
    places: int, killed: int, tmp_path: Path
) -> None:
    with network(2) as hosts:
        processes = start(hosts, places, tmp_path)
        try:
            found = [json.loads(t) for t in wait_for(tmp_path, "sent", range(2 * places), 120)]
            wait_for(tmp_path, "trains", range(2 * places), 30)
            processes[killed].kill()
            others = range(places) if killed else range(places, 2 * places)
            errors = wait_for(tmp_path, "error", others, 15)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    half = UNIT_NBYTES / 2  # of a unit leaves each host for an all-gather or a reduce-scatter
    # the unit that backward uses first is not gathered again
    expected = {"FULL_SHARD": 3 * UNITS - 1, "SHARD_GRAD_OP": 2 * UNITS, "NO_SHARD": 2 * UNITS}
    expected |= {"None": 3 * UNITS - 1, "state_dict": UNITS}
    for sent in found:
        assert sent == pytest.approx({k: n * half for k, n in expected.items()}, rel=0.05)
    for error in errors:
        assert error.startswith("StateError: Waiting for "), error
