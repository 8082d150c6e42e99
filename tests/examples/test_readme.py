"""README.md and examples/README.md: every line of code in them runs, and does what the text
says."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import fsdp_compat
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import Block, Stack
from tests.support.ranks import run_ranks
from tests.support.sampling import sample

ROOT = Path(__file__).parents[2]


def blocks(file: str, language: str, heading: str = "") -> list[str]:
    """Return the fenced blocks of a language, of a whole file or below ``## heading``."""
    text = (ROOT / file).read_text()
    if heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), batch.argmax(-1) % 3)


def batch(seed: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


# --- README.md ------------------------------------------------------------------------------------


def test_readme_has_at_most_180_lines_of_100_columns() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 180
    commands = "".join(blocks("README.md", "sh")).splitlines()
    assert [line for line in lines if len(line) > 100 and line not in commands] == []


def test_both_commands_are_single_lines() -> None:
    commands = blocks("README.md", "sh", "Two commands")
    assert [command.count("\n") for command in commands] == [1, 1]
    assert "--resume" in commands[0]
    assert "pytest" in commands[1]


def _train() -> float:
    (code,) = blocks("README.md", "python", "Twelve lines that train")
    assert len([line for line in code.splitlines() if line]) == 12
    names: dict[str, Any] = {}
    with patch.object(dist, "init_process_group"):  # these ranks have one already
        exec(code, names)
    return F.mse_loss(names["model"](names["x"]), names["x"]).item()


def test_the_twelve_lines_train() -> None:
    assert all(loss < 0.8 for loss in run_ranks(2, _train))  # an untrained model's is about 2


def _load_and_save(directory: str) -> None:
    (code,) = blocks("README.md", "python", "Checkpoints")
    os.chdir(directory)
    model = FSDP(Stack(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = AdamW(model.parameters())
    loss_of(model, batch(1)).backward()
    optimizer.step()
    names: dict[str, Any] = {"model": model, "optimizer": optimizer}
    exec(code, names)
    assert names["extra"] == {"epoch": 3}
    assert names["path"].name == "step-00001200"


def test_the_checkpoint_code_saves_and_loads(tmp_path: Path) -> None:
    run_ranks(2, _load_and_save, str(tmp_path))


# --- README.md, "From DDP": both sides of the diff do the same ------------------------------------


def sides() -> tuple[dict[str, str], dict[str, str]]:
    """Return the parts of the DDP program, and of the fsdp_compat program, by their heading."""
    (diff,) = blocks("README.md", "diff", "From DDP")
    programs: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for program, other in zip(programs, "+-", strict=True):
        part = ""
        for line in diff.splitlines():
            if line.startswith(" # "):
                part = line[3:]
            elif not line.startswith(other):
                program[part] = program.get(part, "") + line[1:] + "\n"
    return programs


class Writer(Stack):
    """A model with a method beside forward that uses its parameters."""

    def generate(self, start: Tensor) -> Tensor:
        with torch.no_grad():
            return start + self(start).sum(-1, keepdim=True)


class Session:
    """One side of the diff as a program."""

    def __init__(self, side: int, path: Path) -> None:
        self.code = sides()[side]
        self.values: dict[str, Any] = {
            "DDP": DDP,
            "FSDP": FSDP,
            "ModuleWrapPolicy": ModuleWrapPolicy,
            "Block": Block,
            "AdamW": AdamW,
            "clip_grad_norm_": clip_grad_norm_,
            "torch": torch,
            "loss_of": loss_of,
            "path": path,
            "register_fsdp_forward_method": fsdp_compat.register_fsdp_forward_method,
            "device": torch.device("cpu"),
            "rank": dist.get_rank(),
            "lr": 0.05,
            "tokens": torch.ones(2, 8),
        }
        torch.manual_seed(dist.get_rank())  # construction has to make the weights equal
        self.values["model"] = Writer()
        self.run("construction")

    def run(self, part: str, **values: Any) -> None:
        self.values.update(values)
        exec(self.code[part], self.values)

    def results(self) -> dict[str, Tensor]:
        """Train two steps with an average of the weights; return all that comes out, by name."""
        model, optimizer = self.values["model"], self.values["optimizer"]
        average = copy.deepcopy(model.module if isinstance(model, DDP) else model)
        results: dict[str, Tensor] = {}
        for seed in (1, 2):
            self.run("accumulation and clipping", batch1=batch(seed), batch2=batch(seed + 1))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.01)
                results[f"loss {seed}"] = loss_of(model, batch(0))
            results[f"norm {seed}"] = self.values["norm"].detach().clone()
        results["loss of average"] = loss_of(average, batch(0)).detach()
        self.run("generation")
        results["text"] = self.values["text"]
        return results


def _differences(directory: Path) -> dict[str, float]:
    """Return the relative difference of each result: before saving, and after loading each
    file."""
    ddp, fsdp = Session(0, directory / "ddp.pt"), Session(1, directory / "fsdp.pt")
    pairs = {"": (ddp.results(), fsdp.results())}
    ddp.run("saving")
    fsdp.run("saving")
    dist.barrier()
    ddp = Session(0, directory / "ddp.pt")
    ddp.run("loading")
    expected = ddp.results()
    for name in ("ddp.pt", "fsdp.pt"):
        fsdp = Session(1, directory / name)
        fsdp.run("loading")
        pairs[f" after loading {name}"] = expected, fsdp.results()
    return {
        f"{name}{when}": ((one[name] - other[name]).abs().max() / one[name].abs().max()).item()
        for when, (one, other) in pairs.items()
        for name in one
    }


@pytest.mark.parametrize("num_ranks", sample([1, 2, 3], 2))
def test_ddp_and_fsdp_code_compute_the_same(num_ranks: int, tmp_path: Path) -> None:
    for differences in run_ranks(num_ranks, _differences, tmp_path, timeout=120):
        assert len(differences) == 3 * 6
        assert differences == {name: pytest.approx(0.0, abs=1e-5) for name in differences}


# --- examples/README.md ---------------------------------------------------------------------------


ALONE = blocks("examples/README.md", "python", "Will it fit?")  # without a process group


def _run_recipes(directory: str) -> None:
    os.chdir(directory)
    start, *recipes = blocks("examples/README.md", "python")
    recipes = [each for each in recipes if each not in ALONE]
    assert len(recipes) > 10
    for number, recipe in enumerate(recipes):
        with patch.object(dist, "init_process_group"):  # these ranks have one already
            names: dict[str, Any] = {}
            exec(start, names)
        exec(compile(recipe, f"recipe {number + 1} of examples/README.md", "exec"), names)
        for parameter in names["model"].parameters() if "model" in names else ():
            assert parameter.isfinite().all(), f"recipe {number + 1}"


def test_every_recipe_runs(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    languages = ("python", "sh")  # test_checkpoint_recipes.py runs the latter
    assert text.count("```") == 2 * sum(
        len(blocks("examples/README.md", language)) for language in languages
    )
    run_ranks(2, _run_recipes, str(tmp_path), timeout=180)


def test_the_plan_of_the_recipe_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = ALONE
    exec(code, {})
    assert re.search(
        r"Rank 0 of 8: .*; units: 9\n.*\nTrue \d+\n", capsys.readouterr().out, re.DOTALL
    )


WAITS = """
import pickle, sys
import torch, torch.distributed as dist
{recipe}
def wait_for_data():
    last = entries[-1]
    print(last["profiling_name"], [frame["name"] for frame in last["frames"]], flush=True)
    sys.stdin.read()
wait_for_data()
"""


def test_a_process_that_waits_shows_its_collectives_and_its_line(tmp_path: Path) -> None:
    (recipe,) = blocks("examples/README.md", "python", "A run that hangs")
    joins = f"dist.init_process_group('gloo', 'file://{tmp_path}/store', rank=0, world_size=1)\n"
    command = [sys.executable, "-c", WAITS.format(recipe=joins + recipe)]
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        pyspy = [str(Path(sys.executable).parent / "py-spy"), "dump", "--pid", str(process.pid)]
        dump = subprocess.run(pyspy, capture_output=True, text=True, timeout=60)
        process.kill()
    assert "gloo:all_reduce" in said and "<module>" in said
    assert "wait_for_data" in dump.stdout, dump.stderr
