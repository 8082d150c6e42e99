"""examples/train_gpt.py: the same losses however it is run, stopped and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples import train_gpt
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SMALL = [
    "--dim",
    "32",
    "--layers",
    "2",
    "--heads",
    "2",
    "--context",
    "32",
    "--batch",
    "12",
    "--sample-bytes",
    "5",
]
Losses = list[tuple[int, float]]


def assert_same_curve(actual: Losses, expected: Losses) -> None:
    """Float rounding apart, which AdamW lets grow from step to step."""
    assert [step for step, _ in actual] == [step for step, _ in expected]
    for (step, loss), (_, right) in zip(actual, expected, strict=True):
        assert loss == pytest.approx(right, rel=1e-6 if step <= 5 else 1e-4), f"step {step}"


# --- parts ----------------------------------------------------------------------------------------


def test_the_ranks_of_every_world_size_share_the_batch_of_a_step() -> None:
    text, _ = train_gpt.load_text()
    inputs, targets = train_gpt.draw_batch(text, 12, 32, seed=0, step=7)
    assert inputs.shape == targets.shape == (12, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for world_size in range(1, 15):
        parts = [train_gpt.rank_part(inputs, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat(parts), inputs)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_batch_depends_on_seed_and_step() -> None:
    text, _ = train_gpt.load_text()
    draws = [
        train_gpt.draw_batch(text, 12, 32, seed, step)[0]
        for seed, step in ((0, 1), (0, 2), (1, 1), (0, 1))
    ]
    assert torch.equal(draws[0], draws[3])
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_the_last_tenth_of_the_text_is_held_out() -> None:
    text, held_out = train_gpt.load_text()
    assert len(text) > 100_000
    assert len(held_out) == pytest.approx((len(text) + len(held_out)) / 10, abs=1)


def test_the_learning_rate_rises_to_its_peak_and_falls() -> None:
    rates = [train_gpt.learning_rate(step, 0.5) for step in range(1, 201)]
    assert rates.index(max(rates)) + 1 == train_gpt.WARMUP_STEPS
    assert max(rates) == 0.5
    assert rates[199] == pytest.approx(0.25)


def test_creating_optimizer_state_changes_no_parameter() -> None:
    model = torch.nn.Linear(3, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    train_gpt.create_optimizer_state(optimizer)
    assert {name for state in optimizer.state.values() for name in state} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--steps", "many"], "--steps: invalid int value: 'many'"),
        (["--dim", "30", "--heads", "4"], "--heads: expected a divisor of --dim 30, got 4"),
        (["--save-every", "-1"], "--save-every: expected at least 0, got -1"),
        (["--batch", "0"], "--batch: expected at least 1, got 0"),
        (["--lr", "nan"], "--lr: expected a positive number, got nan"),
        (["--strategy", "HYBRID"], "--strategy: invalid choice: 'HYBRID'"),
        (["--context", "1000000"], "--context: expected less than"),
        (["--resume"], "--resume: needs the --checkpoint-dir"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_gpt.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_help_shows_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        train_gpt.parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert "torchrun --nproc-per-node 2 examples/train_gpt.py" in text
    assert "(default: FULL_SHARD)" in text
    assert "(default: 200)" in text
    assert "None" not in text


def test_incomplete_checkpoints_are_not_found(tmp_path: Path) -> None:
    assert train_gpt.checkpoints(tmp_path / "missing") == []
    for name in ("step-00000009", "step-00000010", "step-00000011.damaged", ".step-00000012-ab"):
        (tmp_path / name).mkdir()
    assert [path.name for path in train_gpt.checkpoints(tmp_path)] == [
        "step-00000010",
        "step-00000009",
    ]
    with pytest.raises(train_gpt.RunError, match=r"got no readable run\.json"):
        train_gpt.starting_points(tmp_path, resume=True, settings={})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_once_and_its_handler_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with train_gpt.stop_requests() as asked:
        assert not any(asked.values())
        signal.raise_signal(number)
        assert [name for name, value in asked.items() if value] == [number]
        assert signal.getsignal(number) is signal.SIG_DFL  # the next one ends the process
    assert signal.getsignal(number) is before


# --- training, in the rank processes that the tests share -----------------------------------------


def _train(arguments: list[str]) -> int:
    return train_gpt.train(train_gpt.parse_arguments(arguments), torch.device("cpu"))


def _refusal(arguments: list[str]) -> str:
    try:
        train_gpt.train(train_gpt.parse_arguments(arguments), torch.device("cpu"))
    except train_gpt.RunError as error:
        return str(error)
    raise AssertionError(f"rank {dist.get_rank()} was not refused")


def trained(num_ranks: int, directory: Path, *arguments: str) -> dict[str, Losses]:
    """Train with SMALL sizes and return the losses of the whole run."""
    directory.mkdir(exist_ok=True)
    losses = directory / "losses.json"
    options = [*SMALL, "--losses", str(losses), "--plot", str(directory / "loss.png"), *arguments]
    assert run_ranks(num_ranks, _train, options, timeout=120) == [0] * num_ranks
    return json.loads(losses.read_text())


@pytest.fixture(scope="module")
def sixty_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Losses]:
    return trained(1, tmp_path_factory.mktemp("sixty"), "--steps", "60")


def test_it_learns(sixty_steps: dict[str, Losses]) -> None:
    assert [step for step, _ in sixty_steps["train"]] == list(range(1, 61))
    assert [step for step, _ in sixty_steps["validation"]] == [20, 40, 60]
    assert sixty_steps["train"][0][1] == pytest.approx(5.55, abs=0.1)  # log(256): it knows nothing
    assert sixty_steps["train"][-1][1] < 3.7
    assert sixty_steps["validation"][-1][1] < 3.7


@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [
        (1, "FULL_SHARD"),
        (2, "FULL_SHARD"),
        (2, "SHARD_GRAD_OP"),
        (2, "NO_SHARD"),
        (3, "SHARD_GRAD_OP"),
        (4, "FULL_SHARD"),
    ],
)
def test_losses_do_not_depend_on_ranks_or_strategy(
    num_ranks: int, strategy: str, sixty_steps: dict[str, Losses], tmp_path: Path
) -> None:
    use_orig_params = ["--use-orig-params"] if num_ranks % 2 else []
    losses = trained(num_ranks, tmp_path, "--steps", "60", "--strategy", strategy, *use_orig_params)
    assert_same_curve(losses["train"], sixty_steps["train"])
    assert_same_curve(losses["validation"], sixty_steps["validation"])


@pytest.mark.parametrize(("batch", "num_ranks"), [(7, 3), (2, 4)])
def test_losses_stay_the_same_when_ranks_have_unequal_parts_or_none(
    batch: int, num_ranks: int, tmp_path: Path
) -> None:
    options = ["--steps", "8", "--batch", str(batch), "--tie-embeddings", "--validate-every", "4"]
    expected = trained(1, tmp_path, *options)
    actual = trained(num_ranks, tmp_path, *options)
    assert_same_curve(actual["train"], expected["train"])
    assert_same_curve(actual["validation"], expected["validation"])


def test_a_run_resumes_with_other_ranks_and_strategy(
    sixty_steps: dict[str, Losses], tmp_path: Path
) -> None:
    runs = (
        (2, "2", ["--strategy", "FULL_SHARD"]),
        (3, "4", ["--strategy", "SHARD_GRAD_OP", "--use-orig-params"]),
        (1, "6", ["--strategy", "FULL_SHARD"]),
        (4, "8", ["--strategy", "NO_SHARD"]),
        (2, "12", ["--strategy", "FULL_SHARD", "--use-orig-params", "--save-every", "2"]),
    )
    for index, (num_ranks, steps, options) in enumerate(runs):
        resume = ["--resume"] if index else []
        directory = ["--checkpoint-dir", str(tmp_path / "run")]
        losses = trained(num_ranks, tmp_path, "--steps", steps, *directory, *options, *resume)
        assert_same_curve(losses["train"], sixty_steps["train"][: int(steps)])
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["run.json", *(f"step-{step:08d}" for step in (2, 4, 6, 8, 10, 12))]


def test_every_rank_is_told_why_it_cannot_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(2, tmp_path, "--steps", "1", "--checkpoint-dir", str(run))
    cases = (
        (
            ["--checkpoint-dir", str(tmp_path / "none"), "--resume"],
            f"expected a complete checkpoint in {tmp_path / 'none'}",
        ),
        (
            ["--checkpoint-dir", str(run), "--resume", "--dim", "64"],
            f"--dim: expected 32 as in {run}/step-00000001, got 64",
        ),
        (["--checkpoint-dir", str(run), "--resume", "--seed", "1"], "--seed: expected 0"),
        (
            ["--checkpoint-dir", str(run), "--resume", "--tie-embeddings"],
            "--tie-embeddings: expected False",
        ),
        (
            ["--checkpoint-dir", str(run)],
            f"expected no checkpoint for a new run, got {run}/step-00000001",
        ),
    )
    for options, message in cases:
        told = run_ranks(2, _refusal, [*SMALL, *options])
        assert told[0] == told[1]
        assert message in told[0]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes] | None]] = {
    "a file that is cut off": ("rank-00000.safetensors", lambda data: data[:-1]),
    "a missing file": ("rank-00001.safetensors", None),
    "a missing manifest": ("manifest.json", None),
}


def test_damaged_checkpoints_are_passed_over(
    sixty_steps: dict[str, Losses], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ["--checkpoint-dir", str(run), "--save-every", "1"]
    trained(2, tmp_path, "--steps", "4", *options)
    steps = ["step-00000002", "step-00000003", "step-00000004"]
    for step, (name, damage) in zip(steps, DAMAGES.values(), strict=True):
        file = run / step / name
        content = file.read_bytes()
        file.unlink()
        if damage is not None:
            file.write_bytes(damage(content))
    resumed = trained(3, tmp_path, "--steps", "5", *options, "--resume")["train"]
    assert_same_curve(resumed, sixty_steps["train"][:5])
    names = sorted(path.name for path in run.iterdir())
    assert names == sorted(
        ["run.json", "step-00000001", "step-00000005"]
        + [name for step in steps for name in (step, f"{step}.damaged")]
    )


def test_resuming_from_damaged_checkpoints_alone_is_refused(tmp_path: Path) -> None:
    directory = ["--checkpoint-dir", str(tmp_path / "run")]
    trained(2, tmp_path, "--steps", "1", *directory)
    (tmp_path / "run" / "step-00000001" / "rank-00000.safetensors").unlink()
    for message in run_ranks(2, _refusal, [*SMALL, *directory, "--resume"]):
        assert "step-00000001, which is damaged. To start a new run" in message


# --- whole programs, started as users do ----------------------------------------------------------


def command(num_ranks: int | None, *arguments: str) -> list[str]:
    """Return the command line for torchrun, or for plain Python without a number of ranks."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        if num_ranks
        else []
    )
    return [sys.executable, *launcher, str(ROOT / "examples" / "train_gpt.py"), *SMALL, *arguments]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def finished(
    num_ranks: int | None, directory: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(num_ranks, *arguments),
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def stopped(
    num_ranks: int | None, directory: Path, number: signal.Signals, *arguments: str
) -> tuple[int, str]:
    """Start an endless run, send it a signal after its first steps; return its status and what it
    printed."""
    steps = "1000000"
    with subprocess.Popen(
        command(num_ranks, "--steps", steps, *arguments),
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            seen = b""
            while b"loss=" not in seen:  # the progress bar, after a step of this run on all ranks
                read = os.read(process.stderr.fileno(), 4096)
                assert read, f"it ended:\n{seen.decode()}"
                seen += read
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output.decode()


def test_python_alone_trains_plots_and_samples(
    sixty_steps: dict[str, Losses], tmp_path: Path
) -> None:
    result = finished(None, tmp_path, "--steps", "3", "--losses", "losses.json")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    sampled = result.stdout.partition("loss curve: loss.png\nsample:\nThe ")[2].removesuffix("\n")
    assert 2 <= len(sampled) <= 5  # of 5 bytes, several can be one character
    assert_same_curve(
        json.loads((tmp_path / "losses.json").read_text())["train"], sixty_steps["train"][:3]
    )


def test_torchrun_trains_saves_and_resumes(sixty_steps: dict[str, Losses], tmp_path: Path) -> None:
    options = ["--checkpoint-dir", "run", "--losses", "losses.json"]
    first = finished(2, tmp_path, "--steps", "4", "--save-every", "2", *options)
    assert first.returncode == 0, first.stderr
    assert (tmp_path / "run" / "loss.png").exists()
    shutil.rmtree(tmp_path / "run" / "step-00000004")
    second = finished(3, tmp_path, "--steps", "6", "--resume", *options)
    assert second.returncode == 0, second.stderr
    assert_same_curve(
        json.loads((tmp_path / "losses.json").read_text())["train"], sixty_steps["train"][:6]
    )


def test_a_stopped_run_saves_and_goes_on(tmp_path: Path) -> None:
    directory = ["--checkpoint-dir", "run"]
    status, output = stopped(None, tmp_path, signal.SIGINT, *directory)
    assert status == 130
    assert re.search(r"stopped after step \d+: saved run/step-\d+; to go on, add --resume", output)
    status, output = stopped(2, tmp_path, signal.SIGTERM, *directory, "--resume")
    assert status == 1  # torchrun's
    assert output.count("stopped after step") == 1
    assert not list((tmp_path / "run").glob(".step-*"))

    saved = train_gpt.checkpoints(tmp_path / "run")[0]
    assert saved is not None
    steps = str(int(saved.name[5:]) + 3)
    checkpoints = str(tmp_path / "run")
    resumed = trained(
        3,
        tmp_path,
        "--steps",
        steps,
        "--checkpoint-dir",
        checkpoints,
        "--resume",
        "--save-every",
        "0",
    )
    expected = trained(2, tmp_path, "--steps", steps)
    assert_same_curve(resumed["train"], expected["train"])


def test_a_run_that_cannot_resume_ends_on_all_ranks(tmp_path: Path) -> None:
    result = finished(2, tmp_path, "--checkpoint-dir", "none", "--resume")
    assert result.returncode != 0
    assert (
        "--resume: expected a complete checkpoint in none, got no such directory" in result.stderr
    )
    assert "RunError" not in result.stderr  # the message, without a traceback of the example
