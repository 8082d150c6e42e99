"""README.md and the pages in examples/: every line of code in them runs, all recipes in one folder,
and does what the text says. Links and figures are right."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import shlex
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
from fsdp_compat import checkpoint
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.checkpoint.tools.program import run as run_command
from tests.support.api_page import PAGE, page_text
from tests.support.models import Block, Stack
from tests.support.programs import Launcher, launch
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


# The second one stands in place of the loop of the first.
PROGRAM, RESUMING = blocks("README.md", "python", "First steps")


def resuming() -> str:
    setup, loop, _ = PROGRAM.partition("for x in ")
    assert loop
    return setup + RESUMING


def run(code: str, names: dict[str, Any]) -> None:
    """Run code in the names of a module, on ranks that have a process group already."""
    with patch.object(dist, "init_process_group"):
        exec(code, names)


def _train(directory: str) -> float:
    os.chdir(directory)
    names: dict[str, Any] = {}
    assert "randn(50, " in PROGRAM
    run(PROGRAM.replace("randn(50, ", "randn(15, "), names)
    loss = float(names["loss"])
    for start in (0, 5):  # before the first save, and after the last one
        names = {}
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert "randn(10, " in RESUMING
            run(resuming().replace("randn(10, ", "randn(1, "), names)
        assert names["start"] == start
        assert ("epoch" in names) == (start == 0)
        assert ("resumed at epoch 5" in said.getvalue()) == (start == 5)
    return loss


def test_the_first_program_trains_and_resumes_and_the_commands_run_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len([line for line in PROGRAM.splitlines() if line]) <= 15
    losses = run_ranks(2, _train, str(tmp_path))
    assert all(0.2 < loss < 1.5 for loss in losses)  # an untrained model's is about 2
    (script,) = blocks("README.md", "sh", "First steps")
    monkeypatch.chdir(tmp_path)
    said = ""
    for command, *arguments in (shlex.split(line, comments=True) for line in script.splitlines()):
        result = run_command(*arguments)
        assert (command, result.exit_code) == ("fsdp-compat", 0), result.output
        said += result.output
    assert "\nlatest" in said and "complete and undamaged" in said
    assert "layers.0.linear1.weight" in torch.load(tmp_path / "model.pt")["model"]


def test_every_figure_is_a_result() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Why\n")[2].partition("\n## ")[0]
    results = (ROOT / "tests" / "benchmarks" / "RESULTS.md").read_text()
    known = [float(each) for each in re.findall(r"\d+\.\d+", results)]
    figures = re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", section)
    assert len(figures) == 5
    for figure in figures:
        decimals = len(figure.partition(".")[2])
        assert any(round(each, decimals) == float(figure) for each in known), figure


# --- examples/MIGRATING.md, "From DDP": both sides of each diff do the same -----------------------


def sides(front_end: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the parts of the DDP program, and of the fsdp_compat program, by their heading."""
    diffs = blocks("examples/MIGRATING.md", "diff", "From DDP")
    (diff,) = (diff for diff in diffs if f"+model = {front_end}(" in diff)
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

    def __init__(self, front_end: str, side: int, path: Path) -> None:
        self.code = sides(front_end)[side]
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
            "checkpoint": checkpoint,
            "dist": dist,
            "fully_shard": fsdp_compat.fully_shard,
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
        """Train two steps with an average of the weights, except with fully_shard, whose models
        cannot be copied; return all that comes out, by name."""
        model, optimizer = self.values["model"], self.values["optimizer"]
        is_copied = not isinstance(model, fsdp_compat.FSDPModule)
        whole = model.module if isinstance(model, DDP) else model
        average = copy.deepcopy(whole) if is_copied else None
        results: dict[str, Tensor] = {}
        for seed in (1, 2):
            self.run("accumulation and clipping", batch1=batch(seed), batch2=batch(seed + 1))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                means = () if average is None else average.parameters()
                for mean, parameter in zip(means, model.parameters(), strict=is_copied):
                    mean.lerp_(parameter, 0.01)
                results[f"loss {seed}"] = loss_of(model, batch(0))
            results[f"norm {seed}"] = self.values["norm"].detach().clone()
        if average is not None:
            results["loss of average"] = loss_of(average, batch(0)).detach()
        self.run("generation")
        results["text"] = self.values["text"]
        return results


def _differences(front_end: str, directory: Path) -> dict[str, float]:
    """Return the relative difference of each result: before saving, and after loading each
    file."""
    ddp = Session(front_end, 0, directory / "ddp.pt")
    fsdp = Session(front_end, 1, directory / "fsdp.pt")
    pairs = {"": (ddp.results(), fsdp.results())}
    ddp.run("saving")
    fsdp.run("saving")
    dist.barrier()
    ddp = Session(front_end, 0, directory / "ddp.pt")
    ddp.run("loading")
    expected = ddp.results()
    for name in ("ddp.pt", "fsdp.pt"):
        fsdp = Session(front_end, 1, directory / name)
        fsdp.run("loading")
        pairs[f" after loading {name}"] = expected, fsdp.results()
    return {
        f"{name}{when}": ((one[name] - other[name]).abs().max() / one[name].abs().max()).item()
        for when, (one, other) in pairs.items()
        for name in one.keys() & other.keys()
    }


@pytest.mark.parametrize("num_ranks", sample([1, 2, 3], 1))
@pytest.mark.parametrize(("front_end", "num_results"), [("FSDP", 6), ("fully_shard", 5)])
def test_ddp_and_sharded_code_compute_the_same(
    front_end: str, num_results: int, num_ranks: int, tmp_path: Path
) -> None:
    for differences in run_ranks(num_ranks, _differences, front_end, tmp_path):
        assert len(differences) == 3 * num_results
        assert differences == {name: pytest.approx(0.0, abs=1e-5) for name in differences}


# --- the pages in examples/ -----------------------------------------------------------------------

PAGES = [
    "README.md",
    "CHECKPOINTS.md",
    "FORMAT.md",
    "MIGRATING.md",
    "TROUBLESHOOTING.md",
]  # with recipes
START = blocks("examples/README.md", "python")[0]
ALONE = blocks("examples/README.md", "python", "Will it fit?")  # README.md plans the second
ELSEWHERE = [  # tests/clients/test_recipes.py runs it
    *ALONE,
    *blocks("examples/README.md", "python", "A Transformers model"),
    *blocks("examples/README.md", "python", "LoRA"),
    *blocks("examples/README.md", "python", "8-bit and block-wise optimizers"),
    *(ALONE_OR_SPAWNED := blocks("examples/README.md", "python", "Tests, notebooks and spawn")),
]


def recipes(page: str) -> list[str]:
    found = blocks(f"examples/{page}", "python")
    return [each for each in found if each not in (START, *ELSEWHERE)]


def _run_recipes(directory: str, text: str = "") -> None:
    """Run the recipes that contain ``text``."""
    os.chdir(directory)
    for page in PAGES:
        for number, recipe in enumerate(recipes(page), 1):
            if text not in recipe:
                continue
            names: dict[str, Any] = {}
            run(START, names)
            name = f"recipe {number} of examples/{page}"
            exec(compile(recipe, name, "exec"), names)
            for parameter in names["model"].parameters() if "model" in names else ():
                assert parameter.isfinite().all(), name
            dist.barrier()


def test_all_recipes_run_in_one_folder_and_some_resume(tmp_path: Path) -> None:
    assert all(map(recipes, PAGES))
    run_ranks(2, _run_recipes, str(tmp_path))
    run_ranks(2, _run_recipes, str(tmp_path), "default=")  # these resume


# The ranks are forks instead of processes that import torch.
TESTS = """
import functools, os, pytest, sys, torch.multiprocessing as mp
os.chdir(sys.argv[1])
mp.spawn = functools.partial(mp.start_processes, start_method="fork")
sys.exit(pytest.main(["-q", "test_sharded.py"]))
"""


def test_programs_and_tests_run_without_torchrun(tmp_path: Path) -> None:
    test, alone = ALONE_OR_SPAWNED
    (tmp_path / "test_sharded.py").write_text(test)
    for source in (alone, TESTS):
        (ended,) = launch(source, [[tmp_path]], tmp_path)
        assert ended.code == 0, ended
    assert "1 passed" in ended.out


def test_every_block_has_a_test() -> None:
    """Those of sh are run by the tests below and by test_checkpoint_recipes.py. Those of bash need
    SLURM."""
    pages = sorted(path.name for path in (ROOT / "examples").glob("*.md"))
    assert pages == sorted([*PAGES, PAGE.name, "COMPARISON.md"])
    commands = {}
    for page in (f"examples/{page}" for page in PAGES):
        text = (ROOT / page).read_text()
        languages = ("python", "sh", "text", "diff", "bash")
        assert text.count("```") == 2 * sum(len(blocks(page, each)) for each in languages)
        headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
        commands |= {each: n for each in headings if (n := len(blocks(page, "sh", each)))}
    lost = "A worker or a node that is lost"  # test_train_gpt.py runs it
    assert {*commands} == {"Checkpoint tools", "A run that hangs", "Several hosts", lost}
    assert commands["A run that hangs"] == commands["Several hosts"] == 1


def test_the_page_of_all_names_is_made_from_the_docstrings() -> None:
    assert PAGE.read_text() == page_text(), "run python -m tests.support.api_page"


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_link_leads_somewhere() -> None:
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "examples").glob("*.md")]
    broken, known = [], {}
    for file in files:
        titles = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
        known[file] = {anchor(title) for title in titles}
    for file in files:
        text = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]*)\)", text):
            path, _, fragment = link.partition("#")
            target = (file.parent / path).resolve() if path else file
            if not target.exists() or (fragment and fragment not in known[target]):
                broken.append(f"{file.name}: {link}")
    assert broken == []


def test_the_table_has_all_environment_variables() -> None:
    text = (ROOT / "examples" / "TROUBLESHOOTING.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)`", text, flags=re.MULTILINE))
    sources = "".join(path.read_text() for path in (ROOT / "fsdp_compat").rglob("*.py"))
    read = set(re.findall(r"FSDP_COMPAT_[A-Z_]+\b|FSDP_USE_\w+", sources))
    assert read <= rows
    assert len(read) > 7


def test_the_plan_of_the_recipe_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = ALONE
    names: dict[str, Any] = {}
    exec(code.replace("80 * 2**30", "2.2 * 2**30"), names)
    said = capsys.readouterr().out
    assert re.search(r"One of 8 ranks: .*; units: 9\n.*\n\d+ {'sh", said, re.DOTALL)
    assert names["settings"].index(names["arguments"]) == 1  # the first one takes more


# --- what the pages quote -------------------------------------------------------------------------


def _describe() -> str:
    (recipe,) = blocks("examples/README.md", "python", "How is it sharded?")
    names: dict[str, Any] = {}
    run(START + recipe, names)
    return str(names["table"])


def test_the_table_of_a_sharded_model_reads_as_quoted() -> None:
    (text,) = blocks("examples/README.md", "text", "How is it sharded?")
    assert run_ranks(2, _describe)[0].rstrip() == text.rstrip()


WAITS = """
import os, subprocess, sys
os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{recipe}
def wait_for_data():
    subprocess.run([sys.argv[1], "dump", "--pid", str(os.getpid())], check=True)
last = entries[-1]
print(last["profiling_name"], [frame["name"] for frame in last["frames"]], flush=True)
wait_for_data()
"""


def test_a_process_that_waits_shows_its_collectives_and_its_line(
    launcher: Launcher, tmp_path: Path
) -> None:
    (recipe,) = blocks("examples/TROUBLESHOOTING.md", "python", "A run that hangs")
    spy = Path(sys.executable).parent / "py-spy"
    (ended,) = launcher.run(WAITS.format(recipe=recipe), [[spy]], tmp_path)
    entry, _, stack = ended.out.partition("\n")
    assert "gloo:all_reduce" in entry and "<module>" in entry, ended
    assert "wait_for_data (" in stack, ended
