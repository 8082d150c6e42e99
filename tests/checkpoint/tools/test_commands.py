"""The commands: what they print, where, and with which exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

from safetensors.torch import save_file

from tests.checkpoint.tools.program import Result, run
from tests.support.checkpoints import FACTS
from tests.support.time_limit import limit_s

ROOT = Path(__file__).parents[3]
HOSTILE = "a\x1b[31mred\nmodel/b\r\x9b2J\u202eabc[bold]$\\frac:smile:"
FILES = ("inspect", "verify", "diff", "convert")
NAMES = (*FILES, "run", "migrate", "diagnose", "plan")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4).bfloat16()}
    save_file(tensors | {HOSTILE: torch.tensor([1, 2])}, path)
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other.safetensors"
    save_file({"a.weight": torch.arange(6.0).reshape(2, 3) * 1.5, "b": torch.ones(4)}, path)
    return path


# -- output


def test_inspect_prints_facts_and_a_line_for_each_module_or_on_demand_tensor(model: Path) -> None:
    by_module, by_tensor = run("inspect", model), run("inspect", model, "--all")
    for result in (by_module, by_tensor):
        assert (result.exit_code, result.stderr) == (0, "")
        assert " 3 tensors, 48 B\n" in result.stdout
    lines = [line.split() for line in (by_module.stdout + by_tensor.stdout).splitlines()]
    for expected in (
        *(["a", "6", "float32", "24", "B", "-"], ["b", "4", "bfloat16", "8", "B", "-"]),
        ["model/a.weight", "float32", "2", "x", "3", "24", "B"],
        ["model/b", "bfloat16", "4", "8", "B"],
    ):
        assert expected in lines
    assert by_module.stdout.splitlines()[-1].startswith("--all lists every tensor")
    (line,) = run("inspect", model, "--include", r"\.weight", "--stats").stdout.splitlines()[-1:]
    assert line.split() == ["model/a.weight", "float32", "2", "x", "3", "0", "5", "2.5"]
    assert "model/b " not in run("inspect", model, "--exclude", "^b$").stdout


def test_names_from_files_neither_move_the_cursor_nor_make_lines(model: Path, other: Path) -> None:
    for arguments in (
        ["inspect", model],
        ["inspect", model, "--all"],
        ["diff", model, other],
    ):
        result = run(*arguments)
        text = result.stdout
        assert "a\\x1b[31mred\\nmodel/b\\r\\x9b2J\\u202eabc[bold]$\\frac:smile:" in text
        assert all(character == "\n" or character.isprintable() for character in text)


def test_json_has_a_stable_form(model: Path, other: Path) -> None:
    def content_of(*arguments: Any) -> dict[str, Any]:
        return json.loads(run(*arguments, "--json").stdout)

    content = content_of("inspect", model)
    assert " ".join(sorted(content)) == (
        "aliases kind left_out nbytes nbytes_by_rank nbytes_by_section path step tensors values "
        "world_size"
    )
    tensors = {tensor["path"]: tensor for tensor in content["tensors"]}
    assert f"model/{HOSTILE}" in tensors, "JSON has names as they are"
    (part,) = tensors["model/a.weight"].pop("parts")
    expected = {"path": "model/a.weight", "dtype": "float32", "shape": [2, 3], "nbytes": 24}
    expected |= {"minimum": None, "maximum": None, "mean": None}
    assert tensors["model/a.weight"] == expected
    start = part.pop("start")
    assert model.read_bytes()[start + 4 : start + 8] == b"\0\0\x80?"
    assert part == {
        **{"offsets": [0, 0], "sizes": [2, 3], "nbytes": 24, "rank": None},
        **{"file": "model.safetensors", "is_copy": False},
    }
    content = content_of("verify", model)
    assert " ".join(sorted(content)) == (
        "is_intact kind left_out nbytes num_checksums num_without_checksum path problems tensors"
    )
    assert list(content["tensors"][0]) == ["path", "dtype", "shape", "num_nan", "num_inf"]
    content = content_of("diff", model, other)
    assert set(content) == {
        *("path", "other", "is_same", "num_different", "missing", "added", "tensors", "values"),
        "any_dtype",
    }
    assert content["tensors"][0] == {
        **{"path": "model/a.weight", "dtypes": ["float32"] * 2, "shapes": [[2, 3]] * 2},
        **{"num_different": 5, "max_absolute": 2.5, "max_relative": pytest.approx(1 / 3)},
    }


def test_colours_frames_and_bars_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, model: Path, other: Path, tmp_path: Path
) -> None:
    result = run("diff", model, other)
    assert "\x1b" not in result.stdout and "─" not in result.stdout and not result.stderr
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        text = run("diff", model, other, on_terminal=True).stdout
        assert ("\x1b[" in text) == (not no_color) and "─" in text
    assert max(map(len, text.splitlines())) <= 60, "folded, not cut"
    for name, *rest in (["inspect", "--stats"], ["verify"], ["diff", other], ["convert", "t"]):
        monkeypatch.chdir(tmp_path)
        shown = run(name, model, *rest, on_terminal=True).stderr
        assert f"{'t' if name == 'convert' else name}: 100% of " in shown


# -- exit status


def assert_one_message(result: Result, status: int) -> None:
    """One message with four facts, and nothing else."""
    assert (result.exit_code, result.stdout) == (status, ""), result.output
    lines = result.stderr.splitlines()
    assert [line.split("  ")[1].strip() for line in lines[1:]] and len(lines) == 5, lines
    assert all(fact in line for fact, line in zip(FACTS, lines[1:], strict=True))


def test_the_answer_no_is_1(model: Path, other: Path, tmp_path: Path) -> None:
    name = HOSTILE[:4].replace("[", "\\[")
    same = ["diff", model, other, "--any-dtype", "--exclude", name]
    assert [run(*same).exit_code, run(*same, "--rtol", "0.4").exit_code] == [1, 0]
    assert run(*same, "--include", "^b$").exit_code == 0
    save_file({"x": torch.tensor([float("nan")])}, tmp_path / "nan.safetensors")
    result = run("verify", tmp_path / "nan.safetensors")
    assert result.exit_code == 0 and "model/x  float32  1" in result.stdout
    assert run("verify", tmp_path / "nan.safetensors", "--finite").exit_code == 1


def test_a_size_has_a_unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({f"{number}": torch.rand(128) for number in range(8)}, "x.pt")
    for size, num in (("1k", 8), ("1 kib", 4), ("0.000001GiB", 4), ("2048", 2), ("5GB", 1)):
        assert run("convert", "x.pt", size, "--max-file-size", size).exit_code == 0
        assert len([*Path(size).glob("*.safetensors")]) == num


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["inspect"], "the following arguments are required: path"),
        (["inspect", "nowhere"], "'nowhere' does not exist"),
        (["inspekt", "nowhere"], "there is no command 'inspekt'; did you mean inspect?"),
        (["verify", ".", "--quik"], "unrecognized arguments: --quik; did you mean --quick?"),
        (["convert", ".", "t", "--max-file-size", "5 apples"], "'5 apples' is not a size"),
        (["verify", ".", "--quick", "--finite"], "no values are read"),
        (["convert", ".", "t", "--dtype", "float33"], "'float33' is not a dtype"),
        (["convert", ".", "t", "--rename", "a->b"], "not of the form 'REGEX=>TEXT'"),
        (["convert", ".", "t", "--include", "["], "expected: regular expressions"),
        (["convert", ".", "t", "--optimizer-names", "bad.json"], "cannot be read as JSON"),
        (["convert", ".", "t.pt", "--world-size", "2"], 'a target of "dcp" or "native"'),
        (["diff", ".", ".", "--rtol", "-1"], "at least 0"),
        (["inspect", ".", "--shapes", "nowhere.pt"], "nowhere.pt"),
        (["diagnose", "nowhere"], "nowhere has no rank_*.box with events"),
        (["run", "nowhere.py"], "there is no file 'nowhere.py'"),
        (["migrate", "nowhere.py"], "there is no file or directory 'nowhere.py'"),
        (["plan", "nowhere:model", "--world-size", "2"], "expected module:function"),
    ],
)
def test_wrong_arguments_are_2_and_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "bad.json").write_text('{"a": ')
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr and "Traceback" not in result.stderr
    assert sorted(os.listdir()) == ["bad.json"]


def test_damaged_or_unknown_files_are_1(model: Path, tmp_path: Path) -> None:
    model.write_bytes(model.read_bytes()[:-1])
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run("verify", model).exit_code == 1
    assert_one_message(run("verify", empty), 1)
    for path in (model, empty):
        for arguments in (["inspect", path], ["diff", path, path], ["convert", path, "t"]):
            assert_one_message(run(*arguments), 1)
    assert sorted(tmp_path.iterdir()) == [empty, model]


def test_a_target_that_exists_is_2_and_stays_as_it_was(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.safetensors"
    target.write_text("precious")
    result = run("convert", model, target)
    assert_one_message(result, 2)
    assert "The target exists" in result.stderr
    assert target.read_text() == "precious"


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (OSError(28, "No space left on device", "/disk"), 1, "No space left on device"),
        (PermissionError(13, "Permission denied", "a\x1b[2J"), 1, "a\\x1b[2J"),
        (KeyboardInterrupt(), 130, "Interrupted"),
    ],
)
def test_what_goes_wrong_underneath_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    tmp_path: Path,
    error: BaseException,
    status: int,
    text: str,
) -> None:
    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    result = run("convert", model, tmp_path / "target")
    assert (result.exit_code, result.stdout) == (status, "")
    assert text in result.stderr and "\x1b" not in result.stderr
    assert len(result.stderr.splitlines()) == (1 if status == 130 else 5)
    assert not (tmp_path / "target").exists()


def test_a_bug_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("convert", model, tmp_path / "target")


# -- the program


def test_without_the_extra_only_tables_are_refused_and_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)  # type: ignore[arg-type]
    for name in [name for name in sys.modules if re.fullmatch(r"fsdp_compat\..*\.tables", name)]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("inspect", "verify"):
        result = run(name, model)
        assert_one_message(result, 2)
        assert "pip install rich" in result.stderr
        assert json.loads(run(name, model, "--json").stdout)
    assert run("convert", model, tmp_path / "target").exit_code == 0
    assert all(run(name, "--help").exit_code == 0 for name in NAMES)


PROGRAM = """
import contextlib, io, sys
import fsdp_compat.__main__
try:
    with contextlib.redirect_stdout(io.StringIO()):
        fsdp_compat.__main__.main(["--help"])
except SystemExit as end:
    assert end.code == 0 and "torch" not in sys.modules
assert "plan" in dir(fsdp_compat) and not hasattr(fsdp_compat, "no_such_name")
import fsdp_compat.checkpoint
heavy = {"rich", "matplotlib", "torch.distributed.checkpoint"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
try:
    fsdp_compat.__main__.main(["inspect", sys.argv[1]])
except SystemExit as end:
    assert end.code == 141, end.code
"""


def test_importing_loads_no_library_and_a_closed_pipe_is_141(model: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", PROGRAM, str(model)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        command,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=limit_s(),
        env=environment,
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--version"], 1, "No space left on device"),
        (["inspect", "."], 130, "Interrupted."),
    ],
)
def test_outside_of_a_command_too_the_status_is_kept_and_no_traceback_is_shown(
    arguments: list[str], status: int, text: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    if status == 130:  # Ctrl-C while torch is imported
        (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
        environment["PYTHONPATH"] += f":{tmp_path}"
    with open("/dev/full", "w") as stdout:
        ran = subprocess.run(
            [sys.executable, "-m", "fsdp_compat", *arguments],
            stdout=None if status == 130 else stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=limit_s(),
            env=environment,
        )
    assert ran.returncode == status, ran.stderr
    assert len(ran.stderr.splitlines()) == {1: 5, 130: 1}[status] and text in ran.stderr
