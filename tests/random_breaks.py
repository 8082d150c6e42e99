"""Break fsdp_compat in random places, and say which share of the breaks the tests catch:

    python tests/random_breaks.py --seed 1 --number 30  # about an hour; --show: only print them

A seed always draws the same breaks of the same source: a file, weighted by its lines, and one of
the simple edits that its syntax tree allows. Tests named like the file and those that
ARCHITECTURE.md names run first, then the fast ones of its area. Look whether a break that is not
caught changes anything."""

from __future__ import annotations

import argparse
import ast
import difflib
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

from mutations import HANGS, ROOT, copies_of_checkout, run_tests, sources_of

PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub, Mult FloorDiv, Div Mod"
SWAPS = {
    getattr(ast, one): getattr(ast, other)
    for pair in PAIRS.split(", ")
    for one, other in (pair.split(), reversed(pair.split()))
}
FRONT_ENDS = "tests/frontends tests/fully_shard"
AREAS = {  # {start of a path in the package: tests}; the longest start counts
    "": f"{FRONT_ENDS} tests/install",
    "_": "tests/install tests/comm tests/plan tests/checkpoint tests/test_docstrings.py",
    "_comm": f"tests/comm tests/engine {FRONT_ENDS}",
    "_engine": f"tests/engine tests/comm {FRONT_ENDS} tests/gpu",
    "_front_ends/flat": "tests/frontends tests/install tests/state",
    "_front_ends/fully_shard": "tests/fully_shard tests/frontends tests/state",
    "_layout": "tests/layout tests/stores tests/checkpoint",
    "_state": "tests/state tests/checkpoint tests/fully_shard",
    "_stores": f"tests/stores tests/engine tests/state {FRONT_ENDS}",
    "_torch_patches": f"tests/install tests/state {FRONT_ENDS}",
    "checkpoint": "tests/checkpoint",
}


def edits_of(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield what may be replaced in a node, and by what."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if ast.unparse(test) != "TYPE_CHECKING":
                yield test, f"not ({ast.unparse(test)})"
        case ast.Compare(left, [op], comparators) if type(op) in SWAPS:
            yield node, ast.unparse(ast.Compare(left, [SWAPS[type(op)]()], comparators))
        case ast.BoolOp(op, values):
            yield node, ast.unparse(ast.BoolOp(SWAPS[type(op)](), values))
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            yield node, ast.unparse(ast.BinOp(left, SWAPS[type(op)](), right))
        case ast.Constant(bool() as value):
            yield node, repr(not value)
        case ast.Constant(int() as value):
            yield node, repr(value + 1)
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise():
            yield node, "pass"
        case ast.Return(value) if value is not None and ast.unparse(value) != "None":
            yield node, "return None"
        case ast.Call(func, [first, second, *rest], keywords):
            yield node, ast.unparse(ast.Call(func, [second, first, *rest], keywords))


def nodes_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs: no annotations, and no texts, whose parts have no places of their own."""
    types = [getattr(node, name, None) for name in ("annotation", "returns")]
    for child in ast.iter_child_nodes(node):
        if child not in types and not isinstance(child, ast.JoinedStr):
            yield child
            yield from nodes_of(child)


def replaced(source: str, node: ast.AST, text: str) -> str:
    lines = [line.encode() for line in source.splitlines(keepends=True)]  # columns are in bytes
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = b"".join(lines)
    return (whole[:start] + text.encode() + whole[end:]).decode()


def drawn(rng: random.Random) -> tuple[str, str]:
    """Return the path of a file in the package, and its source with a break."""
    sources = sources_of(ROOT)
    while True:
        (path,) = rng.choices(list(sources), [len(s.splitlines()) for s in sources.values()])
        edits = [edit for node in nodes_of(ast.parse(sources[path])) for edit in edits_of(node)]
        if edits:
            return str(path.relative_to(ROOT)), replaced(sources[path], *rng.choice(edits))


def named_tests(path: str) -> str:
    """Return the tests of a file's own name, and those that ARCHITECTURE.md names for it."""
    text = (ROOT / "fsdp_compat/ARCHITECTURE.md").read_text()
    table = text.partition("## Where to change what")[2].partition("\n## ")[0]
    alike = ROOT.glob(f"tests/**/test_{Path(path).stem.strip('_')}.py")
    found = dict.fromkeys(str(test.relative_to(ROOT)) for test in alike)
    for row in re.findall(r"^\| .*\|$", table, re.MULTILINE)[1:]:
        _, places, tests = row.strip("| ").split(" | ")
        names = re.findall(r"`([\w/.]+)`", places)
        if any(path == name or (name[-1] == "/" and path.startswith(name)) for name in names):
            found.update(dict.fromkeys(re.findall(r"`(tests/[\w/.]+)`", tests)))
    return " ".join(found)


def outcome_of(path: str, copy: Path) -> str:
    inside = path.removeprefix("fsdp_compat/")
    area = AREAS[max(filter(inside.startswith, AREAS), key=len)]
    outcome = "NOT CAUGHT"
    for tests, limit_s in ((named_tests(inside), 200.0), (f"-n 2 {area}", 400.0)):
        status, output = run_tests(f"-m 'not slow' {tests}", copy, limit_s) if tests else (0, "")
        if status == HANGS:
            outcome += f" within {limit_s:.0f} s by {tests}"
        elif status not in (0, 5):  # 5: no tests
            failed = re.findall("^(?:FAILED|ERROR) .*", output, re.MULTILINE)
            return "caught: " + (failed or output.splitlines() or ["pytest did not start"])[-1]
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description="Break fsdp_compat in random places.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=30)
    parser.add_argument("--show", action="store_true", help="only print the breaks")
    args = parser.parse_args()
    rng, num_caught = random.Random(args.seed), 0
    with copies_of_checkout(1) as copies:
        copy = copies.get()
        for number in range(args.number):
            path, broken = drawn(rng)
            original, started = (copy / path).read_text(), time.monotonic()
            texts = [text.splitlines() for text in (original, broken)]
            diff = difflib.unified_diff(*texts, path, n=1, lineterm="")
            print(f"\n{number}:", *diff, sep="\n", flush=True)
            if not args.show:
                (copy / path).write_text(broken)
                outcome = outcome_of(path, copy)
                (copy / path).write_text(original)
                num_caught += outcome.startswith("caught")
                print(f"{outcome} ({time.monotonic() - started:.0f} s)", flush=True)
    if not args.show:
        print(f"\n{num_caught} of {args.number} breaks were caught")


if __name__ == "__main__":
    main()
