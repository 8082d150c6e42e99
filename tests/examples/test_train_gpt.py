"""examples/train_gpt.py gives the same losses however it is run, stopped and resumed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from examples import train_gpt
from tests.examples.test_commands import torchrun
from tests.examples.test_readme import blocks
from tests.support.programs import Launcher
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--dim", "32", "--layers", "2", "--heads", "2", "--context", "32"),
    *("--batch", "12", "--sample-words", "5", "--lr", "0.016"),
]
NUM_STEPS = 12
VALIDATE = ["--validate-every", "4"]
Losses = list[tuple[int, float]]


def assert_same_curve(actual: Losses, expected: Losses) -> None:
    """Compare two loss curves up to rounding, which AdamW amplifies from step to step."""
    assert [step for step, _ in actual] == [step for step, _ in expected]
    for (step, loss), (_, right) in zip(actual, expected, strict=True):
        assert loss == pytest.approx(right, rel=1e-6 if step <= NUM_STEPS else 1e-4), f"step {step}"


def test_a_signal_is_recorded_once_and_its_handler_restored() -> None:
    number, before = signal.SIGINT, signal.getsignal(signal.SIGINT)
    with train_gpt.stop_requests() as asked:
        assert not any(asked.values())
        signal.raise_signal(number)
        assert [name for name, value in asked.items() if value] == [number]
        assert signal.getsignal(number) is signal.SIG_DFL  # the next one ends the process
    assert signal.getsignal(number) is before


def _train(arguments: list[str]) -> int:
    """Train without the plot, which is a test of its own."""
    with mock.patch.object(train_gpt, "plot"):
        return train_gpt.train(train_gpt.parse_arguments(arguments), torch.device("cpu"))


def _train_until_signal(arguments: list[str], number: signal.Signals, step: int) -> tuple[int, str]:
    """Train; rank 1 gets the signal in the given step. Return the exit status and the output."""
    right = train_gpt.learning_rate

    def learning_rate(at: int, peak: float) -> float:
        if at == step and dist.get_rank() == 1:
            signal.raise_signal(number)
        return right(at, peak)

    output = io.StringIO()
    with (
        mock.patch.object(train_gpt, "learning_rate", learning_rate),
        contextlib.redirect_stdout(output),
    ):
        return _train(arguments), output.getvalue()


def _refusal(arguments: list[str]) -> str:
    try:
        _train(arguments)
    except SystemExit as error:
        return str(error)
    raise AssertionError(f"rank {dist.get_rank()} was not refused")


def trained(num_ranks: int, directory: Path, *arguments: str) -> dict[str, Losses]:
    """Train with SMALL sizes and return the losses of the whole run."""
    directory.mkdir(exist_ok=True)
    losses = directory / "losses.json"
    options = [*SMALL, "--losses", str(losses), *arguments]
    assert run_ranks(num_ranks, _train, options) == [0] * num_ranks
    return json.loads(losses.read_text())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Losses]:
    """The losses of NUM_STEPS steps in one process, which all other runs must reproduce."""
    directory = tmp_path_factory.mktemp("one")
    return trained(1, directory, "--steps", str(NUM_STEPS), *VALIDATE)


def test_the_loss_falls(one_process: dict[str, Losses]) -> None:
    for kind, steps in (("train", range(1, NUM_STEPS + 1)), ("validation", (4, 8, 12))):
        assert [step for step, _ in one_process[kind]] == list(steps)
        assert one_process[kind][-1][1] < one_process["train"][0][1] - 0.7
    assert one_process["train"][0][1] == pytest.approx(6.91, abs=0.1)  # log(1000): untrained


def test_losses_do_not_depend_on_unequal_or_empty_parts_of_the_batch(tmp_path: Path) -> None:
    options = ["--steps", "4", "--batch", "2", "--validate-every", "2"]
    expected, actual = (trained(ranks, tmp_path, *options) for ranks in (1, 3))
    assert_same_curve(actual["train"], expected["train"])
    assert_same_curve(actual["validation"], expected["validation"])


def test_a_run_resumes_with_other_ranks_and_strategy(
    one_process: dict[str, Losses], tmp_path: Path
) -> None:
    runs = (
        (2, "2", ["--strategy", "FULL_SHARD"]),
        (3, "4", ["--strategy", "SHARD_GRAD_OP", "--use-orig-params"]),
        (1, "6", ["--strategy", "NO_SHARD"]),
        (2, "10", ["--strategy", "FULL_SHARD", "--use-orig-params", "--save-every", "2"]),
    )
    unfinished = tmp_path / "run" / "step-00000009"  # a save that did not finish
    unfinished.mkdir(parents=True)
    directory = ["--checkpoint-dir", str(tmp_path / "run"), "--resume"]
    for num_ranks, steps, options in runs:
        options = [*options, *VALIDATE]
        losses = trained(num_ranks, tmp_path, "--steps", steps, *directory, *options)
        assert_same_curve(losses["train"], one_process["train"][: int(steps)])
        expected = [each for each in one_process["validation"] if each[0] <= int(steps)]
        # the last step of a run is validated, too
        found = [each for each in losses["validation"] if each[0] % 4 == 0]
        assert_same_curve(found, expected)
    unfinished.rmdir()
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [f"step-{step:08d}" for step in (8, 10)]  # the last two
    assert losses["starts"] == [[0, 2], [2, 3], [4, 1], [6, 2]]


def test_every_rank_learns_why_the_run_cannot_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(2, tmp_path, "--steps", "4", "--save-every", "2", "--checkpoint-dir", str(run))
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    for file in (damaged / "step-00000004").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    for folder, options, message in (
        (damaged, ["--resume", "--steps", "5"], f"--resume: {damaged} cannot be loaded."),
        (run, ["--resume", "--dim", "64"], f"--resume: {run} cannot be loaded."),
        (run, ["--resume", "--seed", "1"], "'seed': 0} as before, got"),
        (run, [], f"none for a new run, got {run}/step-00000004"),
    ):
        told = run_ranks(2, _refusal, [*SMALL, "--checkpoint-dir", str(folder), *options])
        assert told[0] == told[1]
        assert message in told[0]


def test_a_signal_to_one_rank_stops_and_saves_on_all(
    one_process: dict[str, Losses], tmp_path: Path
) -> None:
    run, number = tmp_path / "run", signal.SIGTERM
    options = [*SMALL, "--checkpoint-dir", str(run)]
    (status, output), other = run_ranks(2, _train_until_signal, options, number, 3)
    assert (status, other) == (128 + number, (128 + number, ""))
    assert output.endswith("\nstopped after step 3; to continue a saved run, add --resume\n")
    assert [path.name for path in run.iterdir()] == ["step-00000003"]
    resumed = trained(3, tmp_path, "--steps", "5", "--checkpoint-dir", str(run), "--resume")
    assert_same_curve(resumed["train"], one_process["train"][:5])


def _python_alone(folder: Path, arguments: list[str]) -> tuple[Any, str]:
    """As without a launcher, but in a process that has imported torch already."""
    os.chdir(folder)
    dist.destroy_process_group()
    out, program = io.StringIO(), str(ROOT / "examples" / "train_gpt.py")
    with (
        mock.patch.object(sys, "argv", [program, *SMALL, *arguments]),
        contextlib.redirect_stdout(out),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(program, run_name="__main__")
    return ended.value.code, out.getvalue()


def test_python_alone_trains_plots_and_samples(
    one_process: dict[str, Losses], tmp_path: Path
) -> None:
    options = ["--steps", "3", "--losses", "losses.json"]
    ((code, printed),) = run_ranks(1, _python_alone, tmp_path, options)
    assert code == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    sampled = re.findall(r"^(The .*)\ndrawing loss\.png$", printed, re.MULTILINE)
    assert len(re.findall(r"\w+|[.,]", *sampled)) == 6
    losses = r"loss 6\.\d\d, now 6\.\d\d"
    assert re.search(
        rf"\ndone: steps 1-3 on 1 rank; {losses}; not saved; loss curve loss.png\n$", printed
    )
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert_same_curve(losses["train"], one_process["train"][:3])


# rank 1 is killed in step 7, once
DIES = """
import os, pathlib, signal, sys
from examples import train_gpt
right, killed = train_gpt.learning_rate, pathlib.Path("killed")
def learning_rate(step, peak):
    if step == 7 and os.environ["RANK"] == "1" and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return right(step, peak)
train_gpt.learning_rate, train_gpt.plot = learning_rate, lambda *_: None
sys.exit(train_gpt.main())
"""


def test_a_killed_worker_is_replaced_and_the_losses_stay_the_same(
    one_process: dict[str, Losses], launcher: Launcher, tmp_path: Path
) -> None:
    """It is torchrun's command in examples/README.md."""
    (script,) = blocks("examples/README.md", "sh", "A worker or a node that is lost")
    (tmp_path / "dies.py").write_text(DIES)
    arguments = [*SMALL, *VALIDATE, "--steps", str(NUM_STEPS), "--save-every", "5"]
    script = script.replace("examples/train_gpt.py", "dies.py").strip()
    (ran,) = torchrun(launcher, f"{script} {' '.join(arguments)} --losses losses.json", tmp_path)
    assert ran.code == 0, ran
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses["starts"] == [[0, 2], [5, 2]]
    assert "\nresumed from step 5 (saved by 2 ranks) on 2 ranks\n" in ran.out
    assert "\ndone: steps 1-5 on 2 ranks, 6-12 on 2 ranks; loss " in ran.out
    assert_same_curve(losses["train"], one_process["train"])
    assert_same_curve(losses["validation"], one_process["validation"])
