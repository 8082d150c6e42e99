"""The command ``migrate``: files, output, exit codes, and bad input."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.checkpoint.tools.program import run
from tests.support.programs import python

OLD = "from torch.distributed.fsdp import wrap  # é\n"
NEW = "from fsdp_compat import wrap  # é\n"
WRAP = "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(net)\n"
ALONE = "from torch.distributed.fsdp._common_utils import _FSDPState\n"


def test_nothing_is_written_without_write(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(f"x = 1\n{OLD}{ALONE}")
    result = run("migrate", file)
    assert result.exit_code == 1
    assert file.read_text() == f"x = 1\n{OLD}{ALONE}"
    lines = result.stdout.splitlines()
    name = str(file).lstrip("/")
    assert lines[:2] == [f"--- a/{name}", f"+++ b/{name}"]
    assert lines[3:7] == [" x = 1", f"-{OLD[:-1]}", f"+{NEW[:-1]}", f" {ALONE[:-1]}"]
    assert lines[7].startswith(f"left: {file}:3: from torch.distributed.fsdp._common_utils")
    assert lines[8:] == ["1 file, 1 to rewrite, 1 place left alone; --write writes"]


@pytest.mark.parametrize(
    ("text", "options", "status"),
    [
        (OLD, [], 0),
        (OLD, ["--check"], 1),
        (OLD, ["--check", "--write"], 0),
        (OLD, ["--write"], 0),
        (ALONE, [], 1),
        (ALONE, ["--check", "--write"], 1),
        (NEW, ["--check"], 0),
        ("def f(:  # torch.distributed.fsdp\n", ["--check"], 1),
        (f"{WRAP}torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ["--write"], 0),
        (f"{WRAP}model.module.encode()\n", ["--write"], 1),
    ],
)
def test_the_exit_status(tmp_path: Path, text: str, options: list[str], status: int) -> None:
    (tmp_path / "a.py").write_text(text)
    assert run("migrate", tmp_path, *options).exit_code == status


def test_one_bad_file_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"{OLD}x = (\n")
    (tmp_path / "b.py").write_bytes(b"# -*- coding: nonsense -*-\n" + OLD.encode())
    (tmp_path / "c.py").write_bytes(b"from torch.distributed.fsdp import wrap  # \xe9\n")
    (tmp_path / "d.py").write_text(OLD)
    (tmp_path / "e.ipynb").write_text("{}")
    (tmp_path / "f.py").mkdir()
    files = (tmp_path, tmp_path / "e.ipynb", tmp_path / "d.py")
    status, out, _ = run("migrate", "--write", *files)
    assert status == 1 and (tmp_path / "d.py").read_text() == NEW
    assert re.search(rf"left: {tmp_path}/a.py:[23]: the file — it does not parse: ", out)
    assert f"left: {tmp_path}/b.py:1: the file — it does not parse: unknown encoding" in out
    assert f"left: {tmp_path}/c.py:1: the file — it does not parse" in out
    assert f"left: {tmp_path}/e.ipynb:1: the file — this is not a Python file" in out
    assert out.endswith("5 files, 1 rewritten, 4 places left alone\n")


@pytest.mark.parametrize(
    ("start", "encoding", "line_end"),
    [
        ("", "utf-8", "\n"),
        ("", "utf-8-sig", "\r\n"),
        ("# -*- coding: latin-1 -*-\n", "latin-1", "\r\n"),
    ],
)
def test_encoding_line_ends_and_mode_are_kept(
    tmp_path: Path, start: str, encoding: str, line_end: str
) -> None:
    file, link = tmp_path / "a.py", tmp_path / "link.py"
    file.write_bytes((start + OLD).replace("\n", line_end).encode(encoding))
    file.chmod(0o751)
    link.symlink_to(file)
    assert run("migrate", "--write", link).exit_code == 0
    assert file.read_bytes() == (start + NEW).replace("\n", line_end).encode(encoding)
    assert file.stat().st_mode & 0o777 == 0o751 and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_folders_that_hold_no_source_are_skipped(tmp_path: Path) -> None:
    kept = tmp_path / "sub" / "kept"
    skipped = [tmp_path / name for name in (".git", "build", "__pycache__", "sub/venv", "mine")]
    for folder in (kept, *skipped):
        folder.mkdir(parents=True)
        (folder / "a.py").write_text(OLD)
    (tmp_path / "mine" / "pyvenv.cfg").touch()
    (kept / "loop").symlink_to(tmp_path)
    (kept / "gone.py").symlink_to("nowhere")
    (kept / "text.txt").write_text(OLD)
    assert run("migrate", "--write", tmp_path).exit_code == 0
    assert (kept / "a.py").read_text() == NEW and (kept / "text.txt").read_text() == OLD
    assert {(folder / "a.py").read_text() for folder in skipped} == {OLD}
    assert run("migrate", "--write", tmp_path / "build").exit_code == 0  # it was asked for
    assert (tmp_path / "build" / "a.py").read_text() == NEW


def test_a_file_that_cannot_be_written_keeps_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "a.py"
    file.write_text(OLD)
    monkeypatch.setattr(os, "replace", full)
    status, out, _ = run("migrate", "--write", "--check", file)
    assert status == 1 and "No space left on device" in out
    assert list(tmp_path.iterdir()) == [file] and file.read_text() == OLD


def test_saving_in_another_file_is_reported_if_a_model_is_wrapped(tmp_path: Path) -> None:
    save = "def save(model, rank):\n    if rank == 0:\n        write(model.module.state_dict())\n"
    (tmp_path / "a.py").write_text(save)
    assert run("migrate", tmp_path, "--check").exit_code == 0
    (tmp_path / "b.py").write_text(WRAP)
    status, out, _ = run("migrate", tmp_path, "--write")
    assert status == 1 and f"left: {tmp_path}/a.py:3: model.module.state_dict(...)" in out
    assert (tmp_path / "a.py").read_text() == save


def test_migrate_imports_neither_torch_nor_the_rest_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(OLD)
    program = """
import runpy, sys
sys.argv[1:] = ["migrate", "a.py"]
try:
    runpy.run_module("fsdp_compat", run_name="__main__")
except SystemExit as end:
    assert end.code == 0
own = ("_migrate", "_progress", "_text", "_version", "__main__")
loaded = {tuple(name.split(".")[:2]) for name in sys.modules}
assert "torch" not in sys.modules
assert not [name for top, *name in loaded if top == "fsdp_compat" and name and name[0] not in own]
"""
    ran = python("-c", program, folder=tmp_path, PYTHONIOENCODING="ascii")
    assert "+from fsdp_compat import wrap  # \\xe9" in ran.stdout  # a terminal without that letter
