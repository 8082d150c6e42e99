"""``migrate``: what it rewrites, and leaves alone, in each of the cases in migrate_cases."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from fsdp_compat._install.contents import contents  # isort: skip
from fsdp_compat._install.migrate import names  # isort: skip
from fsdp_compat._install.migrate.rewriting import rewrite  # isort: skip
from tests.support.pairwise import each_value  # isort: skip

CASES = Path(__file__).parent / "migrate_cases"


@dataclass(frozen=True)
class Case:
    """A piece of code before and after, and what is left alone: "line: what — why"."""

    before: str
    after: str
    left: list[str]


def cases() -> Iterator[tuple[str, Case]]:
    """Read the files: `=== title`, the code, `--- after` (nothing: as before), `--- left`."""
    for path in sorted(CASES.glob("*.txt")):
        for part in re.split(r"^=== ", path.read_text(), flags=re.M)[1:]:
            title, _, rest = part.partition("\n")
            before, _, rest = rest.partition("--- after\n")
            after, _, left = rest.partition("--- left\n")
            case = Case(before, after or before, left.splitlines())
            yield f"{path.stem}: {title}", case


@each_value
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("case", [case for _, case in cases()], ids=[title for title, _ in cases()])
def test_case(case: Case, line_end: str) -> None:
    before = case.before.replace("\n", line_end)
    found = rewrite(before, "case.py")
    assert found.after == case.after.replace("\n", line_end)
    left = sorted([*found.left, *found.suspects])
    assert [f"{each.line}: {each.what} — {each.why}" for each in left] == case.left
    assert all(each.path == "case.py" and each.fix for each in left)
    compile(found.after, "case.py", "exec")
    again = rewrite(found.after, "case.py")
    assert again.after == found.after and not again.wraps


def test_what_would_hang_is_reported_again_by_a_second_run() -> None:
    text = (CASES / "state.txt").read_text()
    before = text.partition("=== a class that saves on some ranks\n")[2].partition("---")[0]
    first = rewrite(before, "case.py")
    second = rewrite(first.after, "case.py")
    assert [each.what for each in second.left] == ["self._save_checkpoint(...)"]
    assert [each.what for each in first.left] == [each.what for each in second.left]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "# only a comment, without a line end",
        "\ufeffimport torch.distributed.fsdp as f\r\n\tx = 1\n".replace("\tx", "x"),
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


def test_deep_nesting_is_refused_or_rewritten() -> None:
    deep = "from torch.distributed.fsdp import wrap\nx = " + "-" * 1200 + "1\n"
    with pytest.raises(ValueError, match="nested too deeply"):
        rewrite(deep, "case.py")


def test_every_name_that_is_rewritten_exists() -> None:
    """All names that install() provides: each has a home here, or is left alone."""
    rewritten = set()
    for module, found in contents().items():
        for name in found:
            full = ".".join(filter(None, (names.FSDP, module, name)))
            new = names.ours(full)
            if new is not None:
                home, _, last = new.rpartition(".")
                assert last == name and hasattr(importlib.import_module(home), name), full
                rewritten.add(f"{module}.{name}")
    assert {".FullyShardedDataParallel", "wrap._recursive_wrap", "api.StateDictType"} <= rewritten
    assert not any(each.startswith("_runtime_utils") for each in rewritten)
