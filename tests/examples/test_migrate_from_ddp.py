"""examples/migrate_from_ddp.py: the same losses under DDP and FSDP, and a mistake in the migration
does not pass."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from examples import migrate_from_ddp
from examples.migrate_from_ddp import Run
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.ranks import run_ranks
from tests.support.sampling import sample

ROOT = Path(__file__).parents[2]
SMALL = ["--dim", "32", "--heads", "2", "--context", "32", "--generate", "5"]


# --- comparing runs -------------------------------------------------------------------------------


def three_runs() -> dict[str, Run]:
    losses = {step: 5.0 / step for step in range(1, 11)}
    late = {step: loss for step, loss in losses.items() if step > 5}
    return {
        "DDP": Run(losses, 0.4, 0.6, "a"),
        "FSDP": Run(dict(losses), 0.4, 0.6, "b"),
        "moved": Run(late, 0.4, 0.6, "c"),
    }


def test_equal_runs_have_no_problems() -> None:
    assert migrate_from_ddp.problems(three_runs()) == []


def test_rounding_is_not_a_problem() -> None:
    runs = three_runs()
    runs["FSDP"].losses[3] *= 1 + 5e-7
    runs["moved"].validation *= 1 - 5e-7
    assert migrate_from_ddp.problems(runs) == []


@pytest.mark.parametrize("wrong", [1 + 2e-6, 1 - 2e-6, 2.0, 0.0, -1.0, math.nan, math.inf])
def test_a_loss_that_differs_is_a_problem(wrong: float) -> None:
    runs = three_runs()
    runs["FSDP"].losses[4] *= wrong
    runs["FSDP"].losses[5] *= wrong
    (problem,) = migrate_from_ddp.problems(runs)
    assert problem.startswith("FSDP: loss of step 4: expected 1.2500000 as with DDP, got ")


def test_the_validation_of_every_run_is_compared() -> None:
    runs = three_runs()
    runs["FSDP"].average_validation += 1e-5
    runs["moved"].validation += 1e-5
    first, second = migrate_from_ddp.problems(runs)
    assert first.startswith("FSDP: validation loss of the average: expected 0.6000000")
    assert second.startswith("FSDP from DDP's file: validation loss: expected 0.4000000")


def test_rounding_may_grow_after_the_first_steps_only() -> None:
    assert [migrate_from_ddp.tolerance(steps) for steps in (1, 20, 40, 80, 120)] == pytest.approx(
        [1e-6, 1e-6, 1e-6, 1e-5, 1e-4]
    )


@pytest.mark.parametrize(
    ("every", "labels"),
    [
        (1, ["1", "2", "3", "4", "5", "6", "7", "8", "9", "10"]),
        (4, ["1", "4", "8", "10"]),
        (100, ["1", "10"]),
    ],
)
def test_the_table_has_the_requested_steps(every: int, labels: list[str]) -> None:
    heading, *lines = migrate_from_ddp.table(three_runs(), every)
    assert heading.split() == [
        "step",
        "DDP",
        "FSDP",
        "difference",
        "FSDP",
        "from",
        "DDP's",
        "file",
        "difference",
    ]
    assert [line[:10].strip() for line in lines] == [*labels, "validation", "of average"]
    assert {len(line[10:].split()) for line in lines} == {
        3,
        5,
    }  # DDP, FSDP, difference, and from the middle two more
    assert len({len(line) for line in lines}) == 2


def test_the_table_shows_differences() -> None:
    runs = three_runs()
    runs["FSDP"].losses[10] = 0.51
    assert migrate_from_ddp.table(runs, 10)[2].split() == [
        "10",
        "0.5000000",
        "0.5100000",
        "2.0e-02",
        "0.5000000",
        "0.0e+00",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "--steps: expected at least 2, got 1"),
        (["--every", "0"], "--every: expected at least 1, got 0"),
        (["--accumulate", "0"], "--accumulate: expected at least 1, got 0"),
        (["--dim", "30", "--heads", "4"], "--heads: expected a divisor of --dim 30, got 4"),
        (["--lr", "nan"], "--lr: expected a positive number, got nan"),
        (["--context", "1000000"], "--context: expected less than"),
        (
            ["--plot", "/nowhere/loss.png"],
            "--plot: expected a file in a directory that exists, got /nowhere/loss.png",
        ),
        (
            ["--checkpoint-dir", "/nowhere"],
            "--checkpoint-dir: expected a directory that exists, got /nowhere",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        migrate_from_ddp.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_ranks_steps_and_parts_have_different_batches() -> None:
    args = migrate_from_ddp.parse_arguments(SMALL)
    text, _ = migrate_from_ddp.load_text()
    seen = []
    for rank in range(3):
        with (
            mock.patch.object(dist, "get_rank", lambda rank=rank: rank),
            mock.patch.object(dist, "get_world_size", lambda: 3),
        ):
            for step in (0, 1, 2):
                for part in (0, 1):
                    inputs, targets = migrate_from_ddp.draw_batch(
                        text, args, step, part, torch.device("cpu")
                    )
                    assert inputs.shape == targets.shape == (4, 32)
                    assert torch.equal(inputs[:, 1:], targets[:, :-1])
                    seen.append(inputs)
    assert not any(
        torch.equal(one, other) for index, one in enumerate(seen) for other in seen[:index]
    )


# --- training -------------------------------------------------------------------------------------


def _compare(arguments: list[str], replaced: dict[str, Any]) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr, with some of the functions for FSDP replaced."""
    args = migrate_from_ddp.parse_arguments(arguments)
    out, err = io.StringIO(), io.StringIO()
    way = dataclasses.replace(migrate_from_ddp.WITH_FSDP, **replaced)
    with (
        mock.patch.object(migrate_from_ddp, "WITH_FSDP", way),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = migrate_from_ddp.compare(args, torch.device("cpu"))
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    sample(
        [(1, []), (3, ["--use-orig-params"]), (2, ["--use-orig-params", "--accumulate", "2"])], 1, 2
    ),
)
def test_losses_agree_at_any_number_of_ranks(num_ranks: int, options: list[str]) -> None:
    answers = run_ranks(num_ranks, _compare, [*SMALL, "--steps", "4", *options], {}, timeout=120)
    assert [status for status, _, _ in answers] == [0] * num_ranks, answers
    assert "the losses are the same, up to rounding" in answers[0][1]
    assert all(out == "" for _, out, _ in answers[1:])


def test_the_clipping_of_ddp_may_stay() -> None:
    answers = run_ranks(
        2, _compare, [*SMALL, "--steps", "4"], {"clip": migrate_from_ddp.clip_ddp}, timeout=120
    )
    assert [status for status, _, _ in answers] == [0, 0], answers


def _load_without_optimizer(path: Path, model: Any, optimizer: Any, ema: Any) -> None:
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    ema.load_state_dict(state["ema"])


def _load_without_average(path: Path, model: Any, optimizer: Any, ema: Any) -> None:
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))


@torch.no_grad()
def _clip_own_parts(model: Any) -> None:
    """As if they were whole gradients."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = sum(gradient.square().sum() for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_((migrate_from_ddp.MAX_NORM / norm).clamp(max=1.0))


def _clip_nothing(model: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        ({"load": _load_without_optimizer}, "loss of step 4:"),  # step 3 sees only the weights
        ({"load": _load_without_average}, "validation loss of the average:"),
        ({"clip": _clip_own_parts}, "loss of step "),
        ({"clip": _clip_nothing}, "loss of step "),
    ],
    ids=["no optimizer", "no average", "own norm", "no clipping"],
)
def test_a_mistake_in_the_migration_is_noticed_on_all_ranks(
    mistake: dict[str, Any], where: str
) -> None:
    first, second = run_ranks(2, _compare, [*SMALL, "--steps", "4"], mistake, timeout=120)
    assert first[0] == second[0] == 1
    with_fsdp, moved = first[2].splitlines()
    assert with_fsdp.startswith(f"migrate_from_ddp.py: FSDP: {where}")
    assert moved.startswith(f"migrate_from_ddp.py: FSDP from DDP's file: {where}")
    assert "up to rounding" not in first[1]
    assert second[1:] == ("", "")


def _whole_program(folder: Path, arguments: list[str]) -> tuple[Any, str]:
    """As torchrun starts it, but in a process that has imported torch already."""
    os.chdir(folder)
    dist.destroy_process_group()
    out, group = io.StringIO(), {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}
    os.environ |= {**group, "MASTER_ADDR": "127.0.0.1"}
    program = str(ROOT / "examples" / "migrate_from_ddp.py")
    with (
        mock.patch.object(sys, "argv", [program, *arguments]),
        contextlib.redirect_stdout(out),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(program, run_name="__main__")
    return ended.value.code, out.getvalue()


def test_the_program_prints_both_curves_and_plots_them(tmp_path: Path) -> None:
    options = ["--steps", "10", "--plot", "curves.png", "--checkpoint-dir", "."]
    ((code, printed),) = run_ranks(1, _whole_program, tmp_path, [*SMALL, *options], timeout=120)
    assert code == 0
    heading, *lines = printed.splitlines()
    assert heading.split()[:4] == ["step", "DDP", "FSDP", "difference"]
    rows = [[float(value) for value in line[10:].split()] for line in lines[:12]]
    assert [line[:10].strip() for line in lines[:12]] == [
        *map(str, range(1, 11)),
        "validation",
        "of average",
    ]
    assert [len(row) for row in rows] == [3] * 5 + [5] * 7
    for row in rows:
        assert row[1::2] == pytest.approx([row[0]] * len(row[1::2]), rel=1e-6)
        assert max(row[2::2]) <= 1e-6
    assert rows[9][0] < rows[0][0] - 0.3  # it learns
    assert lines[12].startswith("DDP generates: 'The ")
    assert lines[15:] == ["loss curves: curves.png", "the losses are the same, up to rounding"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "ddp.pt", "fsdp.pt"]
