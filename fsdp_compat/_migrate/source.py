"""A parsed file: what its names stand for, where its text lies, and edits that are made at once."""

from __future__ import annotations

import ast
import bisect
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

NodeT = TypeVar("NodeT", bound=ast.AST)
Chain = ast.Name | ast.Attribute
Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, order=True)
class Finding:
    """A place in a file, and what its owner has to know about it."""

    path: str
    line: int
    what: str
    why: str  # and what to do

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what} — {self.why}"


def dotted(node: ast.AST | None) -> str:
    """Return ``a.b.c`` for a chain of attributes that begins with a name, "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST) -> str:
    return dotted(node).rpartition(".")[2]


class Source:
    """One file. The steps of a migration read it and note edits; ``result`` makes them."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text, path
        self.left: list[Finding] = []
        self.notes: list[Finding] = []
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self._lines = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", text))]
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._edits: list[tuple[int, int, str]] = []
        self._locals: dict[ast.AST, set[str]] = {}
        self._aliases: dict[str, list[ast.alias]] = {}
        for alias in self.all(ast.alias):
            name = alias.asname or alias.name.partition(".")[0]
            self._aliases.setdefault(name, []).append(alias)
        # every name that is used, with all attributes behind it
        chains = [node for node in self.nodes if isinstance(node, Chain) and dotted(node)]
        chains = [node for node in chains if not isinstance(self._parents[node], ast.Attribute)]
        self.chains = sorted(chains, key=lambda node: (node.lineno, node.col_offset))

    # -- the tree

    def all(self, *kinds: type[NodeT]) -> Iterator[NodeT]:
        return (node for node in self.nodes if isinstance(node, kinds))

    def parent(self, node: ast.AST) -> ast.AST:
        return self._parents[node]

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the nearest first."""
        while node is not self.tree:
            node = self._parents[node]
            yield node

    def nearest(self, node: ast.AST, *kinds: type[NodeT]) -> NodeT | None:
        return next((each for each in self.above(node) if isinstance(each, kinds)), None)

    def function(self, node: ast.AST) -> ast.AST:
        """Return the function around a node, or the module."""
        return self.nearest(node, *Function) or self.tree

    def before(self, node: ast.AST) -> list[ast.AST]:
        """Return what stands before a node in the same block or list."""
        for each in vars(self._parents.get(node, node)).values():
            if isinstance(each, list) and node in each:
                return each[: each.index(node)]
        return []

    def is_below(self, node: ast.AST, statement: ast.stmt) -> bool:
        """True if a statement is always executed before a node of the same function."""
        is_same = self.function(node) is self.function(statement)
        return is_same and any(statement in self.before(each) for each in self.above(node))

    def call_of(self, node: ast.AST) -> ast.Call | None:
        """Return the call whose function a node is."""
        parent = self._parents.get(node)
        return parent if isinstance(parent, ast.Call) and parent.func is node else None

    # -- what names stand for

    def _names_in(self, function: ast.AST) -> set[str]:
        """Return the parameters and variables of a function."""
        if function not in self._locals:
            self._locals[function] = {
                each.arg if isinstance(each, ast.arg) else each.id
                for each in ast.walk(function)
                if isinstance(each, ast.arg)
                or (isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
            }
        return self._locals[function]

    def value_of(self, name: ast.Name) -> ast.expr | None:
        """Return what a variable holds if one plain assignment sets it in its function."""
        found = [
            each
            for each in self.all(ast.Name)
            if each.id == name.id and isinstance(each.ctx, ast.Store)
            if self.function(each) is self.function(name)
        ]
        statement = self._parents[found[0]] if len(found) == 1 else None
        return statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None

    def origin(self, alias: ast.alias) -> str | None:
        """Return what the name that an import binds stands for; None for a relative import."""
        node = self._parents[alias]
        if isinstance(node, ast.Import):
            return alias.name if alias.asname else alias.name.partition(".")[0]
        assert isinstance(node, ast.ImportFrom)
        return f"{node.module}.{alias.name}" if not node.level else None

    def imports(self, chain: ast.AST) -> Iterator[tuple[ast.alias, str, str]]:
        """Yield each import that may begin a chain, what it stands for, and what the chain does."""
        first, dot, rest = dotted(chain).partition(".")
        functions = {each for each in self.above(chain) if isinstance(each, Function)}
        for alias in self._aliases.get(first, ()):
            is_visible = self.function(alias) in {self.tree, *functions}
            is_hidden = any(first in self._names_in(each) for each in functions)
            if is_visible and not is_hidden and (origin := self.origin(alias)) is not None:
                yield alias, origin, origin + dot + rest

    def imported(self, node: ast.AST) -> set[str]:
        """Return the full names that an imported name, or an attribute of one, may stand for."""
        return {full for _, _, full in self.imports(node)}

    # -- the text

    def span(self, node: ast.AST) -> tuple[int, int]:
        line, end_line = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        return (
            self._offset(line, node.col_offset),  # type: ignore[attr-defined]
            self._offset(end_line, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def _offset(self, line: int, column: int) -> int:
        """Columns of ast count bytes."""
        start = self._lines[line - 1]
        text = self.text[start : start + column]
        return start + len(text if text.isascii() else text.encode()[:column].decode())

    def code(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def line(self, node: ast.AST) -> int:
        return node.lineno  # type: ignore[attr-defined, no-any-return]

    def own_line(self, node: ast.AST) -> tuple[int, str, int] | None:
        """Return a statement's first line, indentation and end; None if something is beside it."""
        start, end = self.span(node)
        first = self._lines[bisect.bisect_right(self._lines, start) - 1]
        number = bisect.bisect_right(self._lines, end)
        last = self._lines[number] if number < len(self._lines) else len(self.text)
        indent, rest = self.text[first:start], self.text[end:last].strip()
        is_alone = not indent.strip() and (not rest or rest.startswith("#"))
        return (first, indent, last) if is_alone else None

    # -- edits

    def edit(self, start: int, end: int, text: str) -> None:
        self._edits.append((start, end, text))

    def replace(self, node: ast.AST, text: str) -> None:
        """Replace an expression. Edits inside of it are lost."""
        if self.nearest(node, ast.JoinedStr) is not None:  # older Pythons misplace these nodes
            why = f"it is part of an f-string, where nothing is rewritten; write {text}"
            self.report(node, dotted(node), why)
        else:
            self.edit(*self.span(node), text)

    def insert_line(self, node: ast.AST, text: str, *, after: bool) -> None:
        """Put a statement above or below another one, or beside it if that shares its line."""
        own, (start, end) = self.own_line(node), self.span(node)
        if own is not None:
            place = own[2] if after else own[0]
            self.edit(place, place, f"{own[1]}{text}{self.newline}")
        else:
            place = end if after else start
            self.edit(place, place, f"; {text}" if after else f"{text}; ")

    def rewrite_arguments(self, call: ast.Call, new: Sequence[str], more: Sequence[str]) -> None:
        """Replace the arguments of a call, each by a text, or by nothing if that is empty. ``more``
        come behind the first one. Comments stay, except among dropped ones at the end."""
        spans = [self.span(each) for each in self.arguments(call)]
        gaps = [self.text[one[1] : two[0]] for one, two in itertools.pairwise(spans)]
        between = gaps[0] if gaps and gaps[0].strip() == "," else ", "
        kept = max(number for number, text in enumerate(new) if text)
        for number, text in enumerate(new[: kept + 1]):
            start, end = spans[number]
            end = spans[-1][1] if number == kept else end
            end = (
                end if text else spans[number + 1][0] - len(gaps[number].partition(",")[2].lstrip())
            )
            self.edit(start, end, between.join([text, *(more if number == 0 else ())]))

    def arguments(self, call: ast.Call) -> list[ast.expr | ast.keyword]:
        """Return all arguments in the order of the text."""
        return sorted([*call.args, *call.keywords], key=lambda node: self.span(node))

    def result(self) -> str:
        """Return the text with all edits: each once, and the outer one of two that overlap."""
        parts, done = [], 0
        edits = dict.fromkeys(self._edits)
        for start, end, text in sorted(edits, key=lambda edit: (edit[0], -edit[1])):
            if start >= done:
                parts += [self.text[done:start], text]
                done = end
        return "".join([*parts, self.text[done:]])

    # -- reports

    def report(self, node: ast.AST, what: str, why: str) -> None:
        """Report a place that needs a person: "why; what to do"."""
        self.left.append(self._finding(node, what, why))

    def note(self, node: ast.AST, what: str, why: str) -> None:
        """Give advice for a place that works."""
        self.notes.append(self._finding(node, what, why))

    def _finding(self, node: ast.AST, what: str, why: str) -> Finding:
        shown = textwrap.shorten(what, 72, placeholder=" ...")
        return Finding(self.path, self.line(node), shown, why)
