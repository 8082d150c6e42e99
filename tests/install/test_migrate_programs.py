"""Small programs train with DDP, and after ``migrate`` with FSDP, to the same losses; some of them
once what was left is done as the report says."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.checkpoint.tools.program import run
from tests.support.ranks import run_ranks

PROGRAMS = Path(__file__).parent / "ddp_programs"

# What is left of the other program, by line, and what its owner makes of it.
BY_HAND = {
    "trainer": [
        ((24,), "self.model.module.load_state_dict", "self.model.load_state_dict"),
        (
            (25,),
            'load_state_dict(snapshot["OPTIMIZER_STATE"])',
            "load_state_dict(FSDP.optim_state_dict_to_load("
            'self.model, self.optimizer, snapshot["OPTIMIZER_STATE"]))',
        ),
        (
            (43, 44),
            """            if self.rank == 0 and epoch % self.save_every == 0:
                snapshot = {"MODEL_STATE": self.model.module.state_dict()}
                snapshot["OPTIMIZER_STATE"] = self.optimizer.state_dict()
""",
            """            model = self.model.state_dict()
            optimizer = FSDP.optim_state_dict(self.model, self.optimizer)
            if self.rank == 0 and epoch % self.save_every == 0:
                snapshot = {"MODEL_STATE": model, "OPTIMIZER_STATE": optimizer}
""",
        ),
    ],
}
Results = dict[str, tuple[list[float], int, int]]


def results(folder: Path) -> Results:
    """Run all programs of a folder. Returns what main() returns, and how many models were wrapped
    with DDP and with FSDP."""
    found = {}
    FSDP(torch.nn.Linear(1, 1))  # what it changes in DDP would go with the mock
    for path in sorted(folder.glob("*.py")):
        with (
            mock.patch.object(DDP, "__init__", autospec=True, side_effect=DDP.__init__) as ddp,
            mock.patch.object(FSDP, "__init__", autospec=True, side_effect=FSDP.__init__) as fsdp,
        ):
            values = runpy.run_path(str(path))["main"](str(folder / f"{path.stem}.out"))
        found[path.stem] = (values, ddp.call_count, fsdp.call_count)
        dist.barrier()
    return found


def prepared(folder: Path) -> list[Path]:
    """Return copies of all programs, each with a folder for its files."""
    copies = [Path(shutil.copy(path, folder)) for path in sorted(PROGRAMS.glob("*.py"))]
    for copy in copies:
        (folder / f"{copy.stem}.out").mkdir()
    return copies


def migrated(path: Path) -> None:
    """Migrate a program, and do by hand what is left."""
    lines = run("migrate", "--write", path).stdout.splitlines()
    left = [line.removeprefix(f"left: {path}:") for line in lines if line.startswith("left: ")]
    by_hand, text = BY_HAND.get(path.stem, []), path.read_text()
    numbers = [int(each.partition(":")[0]) for each in left]
    assert numbers == [n for lines, *_ in by_hand for n in lines], text
    assert all("; " in each.partition(" — ")[2] for each in left)
    for _, old, new in by_hand:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)


def test_programs_train_with_the_losses_of_before(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    names = [path.stem for path in prepared(before)]
    for path in prepared(after):
        migrated(path)
    assert len(names) == 2 and BY_HAND.keys() < set(names)

    for expected, found in zip(
        run_ranks(2, results, before), run_ranks(2, results, after), strict=True
    ):
        for name in names:
            (losses, made, none), (values, nothing, wrapped) = expected[name], found[name]
            assert (nothing, none) == (0, 0) and made == wrapped > 0, name
            assert values == pytest.approx(losses, rel=1e-6), name
    assert "auto_wrap_policy=ModuleWrapPolicy({Block})" in (after / "blocks.py").read_text()
