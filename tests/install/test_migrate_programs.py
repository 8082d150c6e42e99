"""Ten small programs train with DDP, and after ``migrate`` with FSDP, to the same losses."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.__main__ import main
from tests.support.ranks import run_ranks

pytest.importorskip("libcst")

PROGRAMS = Path(__file__).parent / "ddp_programs"
Results = dict[str, tuple[list[float], int, int]]


def results(folder: Path) -> Results:
    """Run all programs of a folder. Returns what main() returns, and how many models were wrapped
    with DDP and with FSDP."""
    found = {}
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


def test_programs_train_with_the_losses_of_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    names = [path.stem for path in prepared(before)]
    prepared(after)
    assert len(names) == 10
    with pytest.raises(SystemExit) as end:
        main(["migrate", "--write", "--check", str(after)])
    assert end.value.code == 0, capsys.readouterr().out  # nothing was left alone
    with pytest.raises(SystemExit) as end:
        main(["migrate", "--check", str(after)])
    assert end.value.code == 0, capsys.readouterr().out  # and nothing is left to do

    for expected, found in zip(
        run_ranks(2, results, before), run_ranks(2, results, after), strict=True
    ):
        for name in names:
            (losses, made, none), (values, nothing, wrapped) = expected[name], found[name]
            assert (nothing, none) == (0, 0) and made == wrapped > 0, name
            assert values == pytest.approx(losses, rel=1e-6), name
