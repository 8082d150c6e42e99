"""``migrate``: what it rewrites, and leaves alone, in each of the cases in migrate_cases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoint.tools.program import run
from tests.support.pairwise import each_value

CASES = Path(__file__).parent / "migrate_cases"
ONE_UNIT = "it is one unit, gathered as a whole; pass auto_wrap_policy=ModuleWrapPolicy({Block})"


@dataclass(frozen=True)
class Case:
    """A piece of code before and after, what is left alone, and advice other than ONE_UNIT:
    "line: what — why; what to do"."""

    before: str
    after: str
    left: list[str]
    notes: list[str]


def cases() -> Iterator[tuple[str, Case]]:
    """Read the files: `=== title`, the code, `--- after` if it changes, `--- left`, `--- notes`."""
    for path in sorted(CASES.glob("*.txt")):
        for part in re.split(r"^=== ", path.read_text(), flags=re.M)[1:]:
            title, _, rest = part.partition("\n")
            before, *named = re.split(r"^--- (after|left|notes)\n", rest, flags=re.M)
            found = dict(zip(named[::2], named[1::2], strict=True))
            left, notes = (found.get(name, "").splitlines() for name in ("left", "notes"))
            case = Case(before, found.get("after", before), left, notes)
            yield f"{path.stem}: {title}", case


def rewrite(text: str) -> tuple[str, list[str], list[str]]:
    """Rewrite case.py; return it with what is left and the notes, without the name of the file."""
    with open("case.py", "w", newline="") as file:
        file.write(text)
    lines = run("migrate", "--write", "case.py").stdout.splitlines()
    left, notes = (
        [line.removeprefix(f"{kind}: case.py:") for line in lines if line.startswith(f"{kind}: ")]
        for kind in ("left", "note")
    )
    with open("case.py", newline="") as file:
        return file.read(), left, notes


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@each_value
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("case", [case for _, case in cases()], ids=[title for title, _ in cases()])
def test_case(case: Case, line_end: str) -> None:
    after, left, notes = rewrite(case.before.replace("\n", line_end))
    assert after == case.after.replace("\n", line_end)
    assert left == case.left
    assert [note for note in notes if not note.endswith(ONE_UNIT)] == case.notes
    compile(after, "case.py", "exec")
    assert rewrite(after)[0] == after


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "# only a comment, without a line end",
        "import torch.distributed.fsdp as f\r\nx = 1\n",
        "x = 1\r\ny = 2\n\x0c\nfrom torch.distributed.fsdp import wrap",
        "if x:\n\tfrom torch.distributed.fsdp import wrap  \n\n\n",
    ],
)
def test_all_but_the_changed_statement_stays_as_it_is(text: str) -> None:
    assert rewrite(text)[0] == text.replace("torch.distributed.fsdp", "fsdp_compat")


@pytest.mark.parametrize("text", ["def f(:\n", "print 'x'\n", "x = (\n", "  x = 1\n y = 2\n"])
def test_what_does_not_parse_is_left(text: str) -> None:
    text = f"import torch.distributed.fsdp\n{text}"
    after, (left,), _ = rewrite(text)
    assert after == text and "the file — it does not parse" in left


def test_deep_nesting_is_left() -> None:
    _, (left,), _ = rewrite(f"from torch.distributed.fsdp import wrap\nx = {'-' * 20000}1\n")
    assert "nested too deeply" in left


def test_every_place_is_named_by_its_line_in_a_long_file() -> None:
    before = (CASES / "state.txt").read_text().partition("def f(")[0].partition("\n")[2]
    text = before + "x = 1  # ä\n" * 500 + "model = DDP(net)\nhelp(model.module)\n"
    _, (left,), _ = rewrite(text)
    assert left.startswith(f"{text.count(chr(10))}: model.module — ")
