"""The commands: what they print, where, and with which exit status."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

from safetensors.torch import save_file

import fsdp_compat
from fsdp_compat import __main__
from fsdp_compat._text import nbytes_text, shown
from fsdp_compat.checkpoint import files
from fsdp_compat.checkpoint._tools import commands, tables
from fsdp_compat.checkpoint._tools.shapes import shapes_from_callable
from fsdp_compat.checkpoint._tools.tables import ranks_text
from fsdp_compat.errors import CheckpointError, explain
from tests.checkpoint.tools.archives import archive, opens
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


def test_inspect_prints_facts_and_a_line_for_each_module(model: Path) -> None:
    result = run("inspect", model)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["total", "3", "tensors,", "48", "B"] in lines
    assert ["a", "6", "float32", "24", "B", "-"] in lines
    assert ["b", "4", "bfloat16", "8", "B", "-"] in lines
    assert lines[-1][:4] == ["--all", "lists", "every", "tensor"]
    assert lines[-1][-5:] == ["--include", "REGEX", "some", "of", "them"]


def test_inspect_prints_a_line_for_each_tensor_on_demand(model: Path) -> None:
    result = run("inspect", model, "--all")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["total", "3", "tensors,", "48", "B"] in lines
    assert ["model/a.weight", "float32", "2", "x", "3", "24", "B"] in lines
    assert ["model/b", "bfloat16", "4", "8", "B"] in lines
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
    assert set(content) == {
        *("path", "kind", "world_size", "step", "nbytes", "nbytes_by_section"),
        *("nbytes_by_rank", "tensors", "aliases", "values", "left_out"),
    }
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
    assert set(content) == {
        *("path", "kind", "is_intact", "problems", "num_checksums", "num_without_checksum"),
        *("nbytes", "tensors", "left_out"),
    }
    assert content["is_intact"] is True
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


def test_ranks_copies_and_other_values_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = archive(
        tmp_path / "c",
        {"w": torch.ones(4, 2), "tied": torch.ones(1)},
        aliases={"head": "w"},
        extra={"epoch": 7, "\x1b]0;title\x07": "\x1b[2J"},
        step=12,
        left_out=["rng: refused"],
    )
    opens(monkeypatch, made)
    text = run("inspect", made.path, "--all").stdout
    lines = [line.split() for line in text.splitlines()]
    assert ["model/w", "float32", "4", "x", "2", "32", "B", "0-1"] in lines
    assert " 2 ranks, 16 B to 20 B each\n" in text and ["step", "12"] in lines
    assert ["head", "w"] in lines and ["extra/epoch", "7"] in lines
    assert "rng: refused" in text and "\x1b" not in text


def test_colours_and_frames_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, model: Path, other: Path
) -> None:
    found = files.diff(model, other)
    plain = tables.of_difference(found)
    assert "\x1b" not in plain and "─" not in plain
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        text = tables.of_difference(found)
        assert ("\x1b[" in text) == (not no_color) and "─" in text
    assert max(map(len, text.splitlines())) <= 60, "folded, not cut"


def test_no_bar_is_drawn_unless_stderr_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    assert run("convert", model, tmp_path / "quiet").stderr == ""
    monkeypatch.setattr(commands, "_progress", lambda: True)
    for arguments in (["inspect", model, "--stats"], ["verify", model], ["diff", model, model]):
        assert f"{arguments[0]}: 100% of " in run(*arguments).stderr
    assert "target: 100% of " in run("convert", model, tmp_path / "target").stderr


# -- exit status


def assert_one_message(result: Result, status: int) -> None:
    """One message with four facts, and nothing else."""
    assert (result.exit_code, result.stdout) == (status, ""), result.output
    lines = result.stderr.splitlines()
    assert [line.split("  ")[1].strip() for line in lines[1:]] and len(lines) == 5, lines
    assert all(fact in line for fact, line in zip(FACTS, lines[1:], strict=True))


def test_the_answer_no_is_1(
    monkeypatch: pytest.MonkeyPatch, model: Path, other: Path, tmp_path: Path
) -> None:
    assert run("diff", model, model).exit_code == 0
    assert run("diff", model, other).exit_code == 1
    name = HOSTILE[:4].replace("[", "\\[")
    same = ["diff", model, other, "--any-dtype", "--exclude", name]
    assert run(*same).exit_code == 1
    assert run(*same, "--rtol", "0.4").exit_code == 0
    assert run(*same, "--include", "^b$").exit_code == 0
    save_file({"x": torch.tensor([float("nan")])}, tmp_path / "nan.safetensors")
    result = run("verify", tmp_path / "nan.safetensors")
    assert result.exit_code == 0 and "model/x  float32  1" in result.stdout
    assert run("verify", tmp_path / "nan.safetensors", "--finite").exit_code == 1
    made = archive(tmp_path / "c", {"w": torch.ones(4, 2)})
    opens(monkeypatch, made)
    (made.path / "rank1").unlink()
    result = run("verify", made.path)
    assert result.exit_code == 1 and result.stdout.endswith(
        "1 problem found: do not load this checkpoint\n"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["inspect"], "the following arguments are required: path"),
        (["inspect", "nowhere"], "'nowhere' does not exist"),
        (["inspekt", "nowhere"], "there is no command 'inspekt'"),
        (["verify", ".", "--work", "1"], "unrecognized arguments: --work"),
        (["convert", ".", "t", "--max-file-size", "5 apples"], "'5 apples' is not a size"),
        (["convert", ".", "t", "--max-file-size", "0"], "'0' is not a size"),
        (["convert", ".", "t", "--max-file-size", "5iB"], "'5iB' is not a size"),
        (["verify", ".", "--quick", "--finite"], "no values are read"),
        (["convert", ".", "t", "--dtype", "float33"], "'float33' is not a dtype"),
        (["convert", ".", "t", "--dtype", "nn"], "'nn' is not a dtype"),
        (["convert", ".", "t", "--rename", "a->b"], "not of the form 'REGEX=>TEXT'"),
        (["convert", ".", "t", "--rename", "(=>b"], "rename has the wrong type"),
        (["convert", ".", "t", "--include", "["], "'[' is not a regular expression: unterminated"),
        (["convert", ".", "t", "--optimizer-names", "bad.json"], "cannot be read as JSON"),
        (["convert", ".", "t.pt", "--world-size", "2"], 'a target of "dcp" or "native"'),
        (["diff", ".", ".", "--rtol", "-1"], "at least 0"),
        (["inspect", ".", "--shapes", "nothing"], "my.module:make_model"),
        (["inspect", ".", "--shapes", "os.path:join"], "os.path:join"),
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


def commands_of(source: Path, target: Path) -> list[list[Any]]:
    return [
        ["convert", source, target],
        ["convert", source, target.with_suffix(".safetensors")],
        ["convert", source, target, "--to", "dcp", "--world-size", 2],
    ]


def test_damaged_or_unknown_files_are_1(model: Path, tmp_path: Path) -> None:
    model.write_bytes(model.read_bytes()[:-1])
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run("verify", model).exit_code == 1
    assert_one_message(run("verify", empty), 1)
    for path in (model, empty):
        reading = [["inspect", path], ["diff", path, path]]
        for arguments in (*reading, *commands_of(path, tmp_path / "t")):
            assert_one_message(run(*arguments), 1)
    assert sorted(tmp_path.iterdir()) == [empty, model]


def test_a_target_that_exists_is_2_and_stays_as_it_was(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.safetensors"
    target.write_text("precious")
    for arguments in commands_of(model, target):
        arguments[2] = target
        if "dcp" in arguments:
            arguments[2] = (tmp_path / "target").resolve()
            arguments[2].mkdir()
        result = run(*arguments)
        assert_one_message(result, 2)
        assert "The target exists" in result.stderr
    assert target.read_text() == "precious"


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (OSError(28, "No space left on device", "/disk"), 1, "No space left on device"),
        (PermissionError(13, "Permission denied", "a\x1b[2J"), 1, "a\\x1b[2J"),
        (KeyboardInterrupt(), 130, "Interrupted"),
        (
            CheckpointError(explain("No.\x1b[2J", expected="a", got="\u202eb", where="c", fix="d")),
            1,
            "\\u202eb",
        ),
    ],
)
def test_what_goes_wrong_underneath_is_one_message(
    monkeypatch: pytest.MonkeyPatch, model: Path, error: BaseException, status: int, text: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(commands, "convert", fail)
    result = run("convert", model, "target")
    assert (result.exit_code, result.stdout) == (status, "")
    assert text in result.stderr and "\x1b" not in result.stderr
    assert len(result.stderr.splitlines()) == (1 if status == 130 else 5)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(commands, "inspect", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        __main__.main(["inspect", str(model)])


# -- arguments

SIZES = {
    **{"5GB": 5_000_000_000, "256MB": 256_000_000, "'256 mib'": 256 << 20, "2TiB": 2 << 40},
    **{"1.5G": 1_500_000_000, "4096": 4096, "4096b": 4096},
}
PROGRAMS: dict[str, dict[str, Any]] = {
    "convert m t": {},
    "convert m t.pth --dtype bf16 --shapes m --max-file-size 1kB": {
        **{"dtype": torch.bfloat16, "shapes": "m", "max_file_size": 1000}
    },
    "convert m t.pt --rename a=>b --rename ^x=>": {"rename": [("a", "b"), ("^x", "")]},
    "convert m t.pt --as-saved": {"as_saved": True},
    "convert m t.pt --weights": {"weights": True},
    "convert m t --to native --world-size 4 --unit b --step 0": {
        **{"to": "native", "world_size": 4, "unit": "b", "step": 0}
    },
    "convert m t --world-size 2 --include x --include y": {
        **{"world_size": 2, "include": ["x", "y"]}
    },
    **{
        f"convert m t --max-file-size {size}": {"max_file_size": nbytes}
        for size, nbytes in SIZES.items()
    },
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_arguments_reach_convert(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    got: dict[str, Any] = {}

    def convert(path: Path, target: Path, **given: Any) -> Path:
        got.update(given, path=path, target=target)
        return target

    monkeypatch.setattr(commands, "convert", convert)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    _, source, target, *_ = shlex.split(program)
    result = run(*shlex.split(program))
    assert result.stdout == f"{target}\n", result.output
    expected = {"path": Path(source), "target": Path(target), "max_file_size": 5_000_000_000}
    expected |= PROGRAMS[program]
    unused = ("progress", "keep_module", "weights", "as_saved")
    given = {key: value for key, value in got.items() if key not in unused or value}
    assert {key: value for key, value in given.items() if value not in (None, [])} == expected


def test_a_function_makes_the_model_whose_shapes_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "made_for_shapes.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Linear(10**6, 10**6)  # on meta\n"
        "def fail():\n    raise OSError('no weights here')\n\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert shapes_from_callable("made_for_shapes:make").entries["weight"].sizes == (10**6, 10**6)
    assert os.getcwd() not in sys.path
    for name, got in (("fail", "no weights here"), ("number", "int"), ("missing", "missing")):
        result = run("inspect", ".", "--shapes", f"made_for_shapes:{name}")
        assert result.exit_code == 2 and got in result.stderr


ONLY_OF_COMMANDS = {"json", "all"}  # how results are printed
ONLY_OF_FUNCTIONS = {"progress"}  # commands show it on a terminal


@pytest.mark.parametrize("name", FILES)
def test_a_command_and_its_function_have_the_same_arguments(name: str) -> None:
    parser = argparse.ArgumentParser()
    getattr(commands, f"{name}_command").add_arguments(parser)
    parameters = inspect.signature(getattr(files, name)).parameters
    of_command = {action.dest for action in parser._actions} - {"help"}
    for action in parser._actions:
        for option in action.option_strings[-1:]:
            assert option == "--" + action.dest.replace("_", "-")
    assert of_command - ONLY_OF_COMMANDS == parameters.keys() - ONLY_OF_FUNCTIONS
    keyword = inspect.Parameter.KEYWORD_ONLY
    positional = [name for name, each in parameters.items() if each.kind is not keyword]
    assert positional == [a.dest for a in parser._actions if not a.option_strings]


def test_options_of_other_commands_are_arguments_of_their_functions() -> None:
    for name, function, only in (
        ("plan", fsdp_compat.plan, {"function", "plot"}),
        ("run", fsdp_compat.install, {"module", "program"}),
    ):
        parser = argparse.ArgumentParser()
        importlib.import_module(__main__._COMMANDS[name][0], "fsdp_compat").add_arguments(parser)
        of_command = {action.dest for action in parser._actions} - {"help"}
        assert of_command - only <= inspect.signature(function).parameters.keys()


# -- the program


def test_the_version_is_printed() -> None:
    assert run("--version") == (0, f"fsdp-compat {fsdp_compat.__version__}\n", "")


def main(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as end:
        __main__.main([str(argument) for argument in arguments])
    return end.value.code or 0  # type: ignore[return-value]


def test_help_lists_every_command_and_each_has_an_example_and_all_statuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main("--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n    {name} " in text for name in NAMES)
    assert text.endswith(__main__.STATUS + "\n")
    assert set(NAMES) == set(__main__._COMMANDS)
    assert main("help") == 0 and capsys.readouterr().out == text
    for name in NAMES:
        assert main(name, "--help") == 0
        text = capsys.readouterr().out
        assert f" {name} " in text.partition("\n\n")[2] or name == "run"
        assert text.endswith(__main__.STATUS + "\n")
        assert max(map(len, text.splitlines())) <= 100


def test_without_the_extra_only_tables_are_refused_and_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, tables.__name__)
    for name in ("inspect", "verify"):
        result = run(name, model)
        assert_one_message(result, 2)
        assert "pip install rich" in result.stderr
        assert json.loads(run(name, model, "--json").stdout)
    assert run("convert", model, tmp_path / "target").exit_code == 0
    assert all(run(name, "--help").exit_code == 0 for name in NAMES)


def test_the_program_is_named_as_it_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for called, name in (
        ("/usr/bin/fsdp-compat", "fsdp-compat"),
        ("/x/fsdp_compat/__main__.py", "python -m fsdp_compat"),
    ):
        monkeypatch.setattr(sys, "argv", [called])
        assert main("inspect") == 2 and f"usage: {name} inspect" in capsys.readouterr().err
        assert main("nonsense") == 2 and f"usage: {name} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["inspekt", "model.pt"], "there is no command 'inspekt'; did you mean inspect?"),
        (["xyz"], "there is no command 'xyz'\n"),
        (["diagnose", ".", "--trase", "x"], "unrecognized arguments: --trase x"),
        (["verify", ".", "--quik"], "unrecognized arguments: --quik; did you mean --quick?"),
        ([], "COMMAND ...\n\nCheckpoints"),
    ],
)
def test_a_misspelled_command_or_option_is_suggested(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and text in err


PROGRAM = """
import contextlib, io, sys
import fsdp_compat.__main__
try:
    with contextlib.redirect_stdout(io.StringIO()):
        fsdp_compat.__main__.main([sys.argv.pop(1)])
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


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_importing_loads_no_library_and_a_closed_pipe_is_141(model: Path, option: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", PROGRAM, option, str(model)]
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
        (["--help"], 141, ""),
        (["inspect", "--help"], 141, ""),
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
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full" if status == 1 else writing, "w") as stdout:
        ran = subprocess.run(
            [sys.executable, "-m", "fsdp_compat", *arguments],
            stdout=None if status == 130 else stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=limit_s(),
            env=environment,
        )
    assert ran.returncode == status, ran.stderr
    assert len(ran.stderr.splitlines()) == {141: 0, 1: 5, 130: 1}[status] and text in ran.stderr


# -- texts


def test_numbers_and_names_as_people_read_them() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 9994: "9.99 kB", 9996: "10.0 kB"}
    sizes |= {99_960: "100 kB", 999_499: "999 kB", 999_501: "1.00 MB", 10**19: "10000 PB"}
    assert {nbytes: nbytes_text(nbytes) for nbytes in sizes} == sizes
    assert ranks_text([3, 0, 1, 2, 7, 9, 8]) == "0-3, 7-9" and ranks_text([]) == ""
    assert shown("é漢\ud800\x7f\u2028") == "é漢\\ud800\\x7f\\u2028"
