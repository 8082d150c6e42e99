"""The table "From DDP" in README.md: the code in both of its columns runs as it stands there, and
does the same."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

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

README = Path(__file__).parents[2] / "README.md"
ROWS = {
    *("construction", "optimizer", "accumulation", "clipping", "saving", "loading"),
    *("evaluation", "EMA, made", "EMA, each step", "generate"),
}


def snippets() -> dict[str, tuple[str, str]]:
    """Return the code in the table by the name of its row: that for DDP, and that for
    fsdp_compat."""
    section = README.read_text().partition("\n## From DDP\n")[2].partition("\n## ")[0]
    heading, _, *rows = [
        line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")
    ]
    assert [cell.strip() for cell in heading] == ["", "in your DDP code", "with fsdp_compat"]
    return {name.strip(): (_code(ddp), _code(fsdp)) for name, ddp, fsdp in rows}


def _code(cell: str) -> str:
    assert re.fullmatch(r" `[^`]+`(<br>`[^`]+`)* ", cell), cell  # nothing but lines of code
    return "\n".join(re.findall(r"`([^`]+)`", cell))


class Writer(Stack):
    """A model with a method beside forward that uses its parameters."""

    def generate(self, start: Tensor) -> Tensor:
        with torch.no_grad():
            return start + self(start).sum(-1, keepdim=True)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), batch.argmax(-1) % 3)


def batch(seed: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


class Session:
    """A program that consists of one column of the table."""

    def __init__(self, column: int, path: Path) -> None:
        self.code = {name: cells[column] for name, cells in snippets().items()}
        self.values: dict[str, Any] = {
            **{
                "DDP": DDP,
                "FSDP": FSDP,
                "ModuleWrapPolicy": ModuleWrapPolicy,
                "Block": Block,
                "AdamW": AdamW,
            },
            **{
                "clip_grad_norm_": clip_grad_norm_,
                "copy": copy,
                "torch": torch,
                "loss_of": loss_of,
                "path": path,
            },
            **{"register_fsdp_forward_method": fsdp_compat.register_fsdp_forward_method},
            **{
                "device": torch.device("cpu"),
                "rank": dist.get_rank(),
                "lr": 0.05,
                "tokens": torch.ones(2, 8),
            },
        }
        torch.manual_seed(
            dist.get_rank()
        )  # not the same weights everywhere: construction has to see to that
        self.values["model"] = Writer()
        self.run("construction", "optimizer")

    def run(self, *rows: str, **values: Any) -> None:
        self.values.update(values)
        for row in rows:
            exec(self.code[row], self.values)

    def step(self, seed: int) -> None:
        """One step of training; losses and results are left in ``values``."""
        self.run("accumulation", "clipping", batch1=batch(seed), batch2=batch(seed + 1))
        self.values["optimizer"].step()
        self.values["optimizer"].zero_grad()

    def results(self) -> dict[str, Tensor]:
        """Train two steps, with everything the table has, and return what comes out, by name."""
        found: dict[str, Tensor] = {}
        self.run("EMA, made")
        for seed in (1, 2):
            self.step(seed)
            self.run("EMA, each step", "evaluation", batch1=batch(0))
            found |= {
                f"{name} {seed}": self.values[name].detach().clone() for name in ("norm", "loss")
            }
        found["of average"] = loss_of(self.values["ema"], batch(0)).detach()
        self.run("generate")
        found["text"] = self.values["text"]
        return found


def _differences(directory: Path) -> dict[str, float]:
    """Return how far each result with fsdp_compat is from that with DDP: before saving, and after
    loading either file."""
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


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_both_columns_compute_the_same(num_ranks: int, tmp_path: Path) -> None:
    for differences in run_ranks(num_ranks, _differences, tmp_path, timeout=120):
        assert len(differences) == 3 * 6
        assert differences == {name: pytest.approx(0.0, abs=1e-5) for name in differences}


def test_every_row_is_run() -> None:
    assert set(snippets()) == ROWS


def _checkpoints(directory: str) -> None:
    code = (
        README.read_text()
        .partition("\n## Checkpoints\n")[2]
        .partition("```python\n")[2]
        .partition("```")[0]
    )
    os.chdir(directory)
    model = FSDP(Stack(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = AdamW(model.parameters())
    loss_of(model, batch(1)).backward()
    optimizer.step()
    names: dict[str, Any] = {"torch": torch, "model": model, "optimizer": optimizer}
    exec(code, names)
    assert names["extra"] == {"epoch": 3}
    assert names["path"].name == "step-00001600"
    assert [file.name for file in names["files"]] == ["model.safetensors"]
    assert names["tensor"].shape == model.state_dict()[names["name"]].shape


def test_the_code_about_checkpoints_runs(tmp_path: Path) -> None:
    run_ranks(2, _checkpoints, str(tmp_path))
