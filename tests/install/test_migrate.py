"""``migrate``: what it rewrites, and leaves alone, in each of the cases in migrate_cases."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdp_compat._install.contents import contents
from fsdp_compat._migrate import fsdp_imports
from fsdp_compat._migrate.command import rewrite
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


@each_value
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("case", [case for _, case in cases()], ids=[title for title, _ in cases()])
def test_case(case: Case, line_end: str) -> None:
    before = case.before.replace("\n", line_end)
    found = rewrite(before, "case.py")
    assert found.after == case.after.replace("\n", line_end)
    assert [str(each) for each in found.left] == [f"case.py:{line}" for line in case.left]
    notes = [str(note) for note in sorted(found.notes) if note.why != ONE_UNIT]
    assert notes == [f"case.py:{line}" for line in case.notes]
    compile(found.after, "case.py", "exec")
    again = rewrite(found.after, "case.py")
    assert again.after == found.after and not again.wraps


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
    expected = text.replace("torch.distributed.fsdp", "fsdp_compat")
    assert rewrite(text, "case.py").after == expected


@pytest.mark.parametrize("text", ["def f(:\n", "print 'x'\n", "x = (\n", "  x = 1\n y = 2\n"])
def test_what_does_not_parse_is_a_syntax_error(text: str) -> None:
    with pytest.raises(SyntaxError):
        rewrite(f"import torch.distributed.fsdp\n{text}", "case.py")


def test_deep_nesting_is_refused() -> None:
    deep = "from torch.distributed.fsdp import wrap\nx = " + "-" * 20000 + "1\n"
    with pytest.raises(ValueError, match="nested too deeply"):
        rewrite(deep, "case.py")


def test_every_place_is_named_by_its_line_in_a_long_file() -> None:
    before = (CASES / "state.txt").read_text().partition("def f(")[0].partition("\n")[2]
    text = before + "x = 1  # ä\n" * 500 + "model = DDP(net)\nhelp(model.module)\n"
    (found,) = rewrite(text, "case.py").left
    assert str(found).startswith(f"case.py:{text.count(chr(10))}: model.module — ")


def test_every_name_that_is_rewritten_exists() -> None:
    """All names that install() provides: each has a home here, or is left alone."""
    rewritten = set()
    for module, found in contents().items():
        for name in found:
            full = ".".join(filter(None, (fsdp_imports.FSDP, module, name)))
            new = fsdp_imports.ours(full)
            if new is not None:
                home, _, last = new.rpartition(".")
                assert last == name and hasattr(importlib.import_module(home), name), full
                rewritten.add(f"{module}.{name}")
    assert {".FullyShardedDataParallel", "wrap._recursive_wrap", "api.StateDictType"} <= rewritten
    assert not any(each.startswith("_runtime_utils") for each in rewritten)
