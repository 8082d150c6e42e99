"""Kill workers and a node of an elastic run, and compare its losses with those of one process.

    python tests/benchmarks/elastic.py               # five kills; two nodes; about five minutes

It runs examples/train_gpt.py under torchrun as examples/README.md says ("A worker or a node that is
lost"). Two agents of torchrun on this machine stand for two nodes: the first has two workers, the
second one. All kills are SIGKILL, each at a random moment after the first checkpoint that the run
has saved since the last one. The exit status is 1 if a loss differs by more than 1e-6.

Values are float64: another number of ranks adds gradients up in another order, and AdamW amplifies
the rounding of float32 over hundreds of steps: after 60, one rank and three differ by 4e-3."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from examples import train_gpt
from fsdp_compat import checkpoint

TOLERANCE = 1e-6
LIMIT_S = 600.0  # for one kill
WORKERS = (2, 1)  # of each node
KILLS = ("worker of node 0", "worker of node 1", "node 1", "worker of node 0", "worker of node 1")
COMES_BACK = 4  # node 1, before this kill
OPTIONS = (
    *("--dim", "64", "--layers", "2", "--heads", "2", "--context", "64"),
    *("--save-every", "5", "--validate-every", "0", "--sample-words", "1"),
)


class Node:
    """An agent of torchrun, and its workers."""

    def __init__(self, number: int, folder: Path, endpoint: str, steps: int) -> None:
        self.number = number
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
            *("--nproc-per-node", str(WORKERS[number]), "--max-restarts", "9"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-endpoint", endpoint),
            # node 0 serves the store of the rendezvous, and must survive
            *("--rdzv-conf", f"last_call_timeout=15,is_host={int(number == 0)}"),
            *(__file__, "--worker", "--resume"),
            *("--checkpoint-dir", str(folder / "run"), "--losses", str(folder / "losses.json")),
            *("--steps", str(steps), *OPTIONS),
        ]
        with (folder / f"node{number}.log").open("a") as log:
            self.agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment())

    def workers(self) -> list[int]:
        """Return the process ids of the workers, in the order in which they were started."""
        agent = self.agent.pid
        return sorted(map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()))

    def kill(self) -> None:
        """Kill the agent and the workers, as a node that loses its power does."""
        workers = self.workers()
        self.agent.kill()
        self.agent.wait()
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


def environment() -> dict[str, str]:
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    options = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**os.environ, **options, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def last_step(folder: Path) -> int:
    newest = checkpoint.latest(folder / "run")
    return 0 if newest is None else int(newest.name.removeprefix("step-"))


def wait_for_save(folder: Path, after: int, nodes: list[Node]) -> int:
    """Wait for a checkpoint of a later step than ``after``, and return its step."""
    end = time.monotonic() + LIMIT_S
    while (step := last_step(folder)) <= after:
        if time.monotonic() > end or any(each.agent.poll() is not None for each in nodes):
            raise SystemExit(f"no step after {after} was saved; see the logs in {folder}")
        time.sleep(0.05)
    return step


def run(folder: Path, steps: int, chance: random.Random) -> None:
    """Run to the last step, with all kills."""
    endpoint = f"localhost:{chance.randrange(20000, 30000)}"
    nodes = [Node(number, folder, endpoint, steps) for number in range(2)]
    step = wait_for_save(folder, 0, nodes)
    for number, what in enumerate(KILLS):
        if number == COMES_BACK:
            nodes.append(Node(1, folder, endpoint, steps))
            began = time.monotonic()
            while len(nodes[1].workers()) < WORKERS[1]:
                time.sleep(0.05)
            step = wait_for_save(folder, last_step(folder), nodes)
            print(
                f"{time.monotonic() - began:5.1f} s from node 1's return to step {step}", flush=True
            )
        time.sleep(chance.random())
        before, began = last_step(folder), time.monotonic()
        if what == "node 1":
            nodes.pop().kill()
        else:
            node = nodes[int(what[-1])]
            os.kill(chance.choice(node.workers()), signal.SIGKILL)
        step = wait_for_save(folder, before, nodes)
        print(
            f"{time.monotonic() - began:5.1f} s from the kill of {'a ' * ('w' in what)}{what} "
            f"after step {before} to step {step}",
            flush=True,
        )
    for node in nodes:
        if node.agent.wait(LIMIT_S):
            raise SystemExit(f"node {node.number} failed; see the logs in {folder}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    print(f"{args.steps} steps, seed {args.seed}; logs and checkpoints: {folder}", flush=True)
    alone = [sys.executable, __file__, "--worker", "--steps", str(args.steps), *OPTIONS]
    expected, found = folder / "alone.json", folder / "losses.json"
    subprocess.run(
        [*alone, "--losses", str(expected)],
        env=environment(),
        cwd=folder,
        check=True,
        capture_output=True,
    )
    run(folder, args.steps, random.Random(args.seed))
    losses = [json.loads(path.read_text()) for path in (expected, found)]
    right, actual = (dict(each["train"]) for each in losses)
    difference = max(abs(actual[step] / right[step] - 1) for step in right)
    went_on = ", ".join(f"{step} ({ranks} ranks)" for step, ranks in losses[1]["starts"])
    print(f"went on from steps {went_on}")
    print(f"largest relative difference of {len(right)} losses: {difference:.1e}")
    return int(difference > TOLERANCE or actual.keys() != right.keys())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        torch.set_default_dtype(torch.float64)
        sys.exit(train_gpt.main(sys.argv[2:]))
    sys.exit(main())
