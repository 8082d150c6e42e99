"""Imports that rewritten code needs, and imports that it no longer needs."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import libcst as cst
from libcst import metadata

from .source import Source, bound_by, dotted, statement


def replace_small(
    source: Source, node: cst.BaseSmallStatement, new: Sequence[cst.BaseSmallStatement]
) -> None:
    """Put statements in the place of one: each on a line of its own if that one has one."""
    line = source.line_of(node)
    if line is None:
        source.edit(node, lambda _: cst.FlattenSentinel(new))
        return

    def lines(old: cst.SimpleStatementLine) -> cst.FlattenSentinel[cst.SimpleStatementLine]:
        made = [cst.SimpleStatementLine([each]) for each in new]
        made[0] = made[0].with_changes(leading_lines=old.leading_lines)
        made[-1] = made[-1].with_changes(trailing_whitespace=old.trailing_whitespace)
        return cst.FlattenSentinel(made)

    source.edit(line, lines)


def with_names(node: cst.ImportFrom, names: Sequence[cst.ImportAlias]) -> cst.ImportFrom:
    """Return a ``from`` statement with some of its names, and the comments beside them."""
    assert not isinstance(node.names, cst.ImportStar)
    *others, last = names
    final = node.names[-1]
    if last is final:
        return node.with_changes(names=names)
    comma, rpar = last.comma, node.rpar
    end = final.comma.whitespace_after if isinstance(final.comma, cst.Comma) else None
    if end is None and rpar is not None:
        end, rpar = (
            rpar.whitespace_before,
            rpar.with_changes(whitespace_before=cst.SimpleWhitespace("")),
        )
    between = comma.whitespace_after if isinstance(comma, cst.Comma) else None
    if isinstance(between, cst.ParenthesizedWhitespace) and isinstance(
        end, cst.ParenthesizedWhitespace
    ):
        ending = between.with_changes(empty_lines=(), indent=end.indent, last_line=end.last_line)
        last = last.with_changes(comma=cst.Comma(whitespace_after=ending))
        return node.with_changes(names=[*others, last], rpar=rpar)
    return node.with_changes(names=[*others, last.with_changes(comma=final.comma)])


class Imports:
    """Names of ours that a file uses after the migration."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._taken = {name.value for name in source.all(cst.Name)}
        self._chosen: dict[str, str] = {}
        self._from: dict[str, cst.ImportFrom | None] = {}  # by full name: what it replaces
        self._released: dict[cst.ImportFrom, set[str]] = {}

    def name_for(
        self, full: str, wanted: Sequence[str], existing: Sequence[str], old: cst.CSTNode
    ) -> str:
        """Return the local name for one of our names, and import it if it is not there.

        wanted: local names, the best first. existing: full names that are, or become, the same.
        old: what it replaces, a name or chain that an import binds.
        """
        if full not in self._chosen:
            known = self._known(set(existing))
            if known is not None:
                self._chosen[full] = known
            else:
                free = [name for name in wanted if name not in self._taken]
                self._chosen[full] = free[0] if free else f"_{wanted[-1]}"
                replaced = self._import_of(old)
                self._from[full] = replaced if self._is_at_the_top(replaced) else None
        return self._chosen[full]

    def _known(self, names: set[str]) -> str | None:
        """Return the name under which the module, not only a function, imports one of these."""
        for node in self._source.all(cst.ImportFrom):
            if isinstance(node.names, cst.ImportStar) or not self._is_at_the_top(node):
                continue
            for alias in node.names:
                bound = dotted(alias.asname.name if alias.asname is not None else alias.name)
                if bound is not None and bound_by(node, bound) in names:
                    return bound
        return None

    def _import_of(self, node: cst.CSTNode) -> cst.ImportFrom | None:
        """Return the ``from`` statement that binds a name, if it is one at the module's level."""
        if not isinstance(node, cst.Name):
            return None
        for each in self._source.assignments(node):
            if isinstance(each, metadata.ImportAssignment) and isinstance(
                each.node, cst.ImportFrom
            ):
                return each.node
        return None

    def _is_at_the_top(self, node: cst.ImportFrom | None) -> bool:
        inside = (cst.FunctionDef, cst.ClassDef, cst.If, cst.Try)
        return node is not None and self._source.nearest(node, *inside) is None

    def release(self, name: cst.Name, replaced: set[cst.CSTNode]) -> None:
        """Take a name out of its import if all of its uses were replaced."""
        node = self._import_of(name)
        if node is None:
            return
        rest = [
            chain
            for chain in self._source.chains
            if chain not in replaced and (dotted(chain) or "").partition(".")[0] == name.value
        ]
        exported = any(
            re.search(rf"\b{name.value}\b", each.raw_value)
            for each in self._source.all(cst.SimpleString)
            if self._source.nearest(each, cst.List, cst.Tuple, cst.Annotation) is not None
        )
        if not rest and not exported:
            self._released.setdefault(node, set()).add(name.value)

    def write(self) -> None:
        """Note the edits: all names are known now."""
        at: dict[cst.CSTNode, list[str]] = {}
        lines: dict[cst.ImportFrom, list[str]] = {}
        for full, node in self._from.items():
            parent, _, last = full.rpartition(".")
            name = self._chosen[full]
            text = f"from {parent} import {last}" + (f" as {name}" if name != last else "")
            if node is not None and self._source.line_of(node) is not None:
                lines.setdefault(node, []).append(text)
            else:
                at.setdefault(self._last_import(), []).append(text)
        for node in {*lines, *self._released}:
            self._rewrite(node, lines.get(node, []), self._released.get(node, set()))
        for place, texts in at.items():
            for text in texts:
                if place is self._source.module:
                    self._source.edit(place, functools.partial(_with_first, text))
                else:
                    self._source.insert_after(place, functools.partial(statement, text))

    def _rewrite(self, node: cst.ImportFrom, texts: list[str], released: set[str]) -> None:
        assert not isinstance(node.names, cst.ImportStar)
        kept = [
            alias
            for alias in node.names
            if dotted(alias.asname.name if alias.asname is not None else alias.name) not in released
        ]
        new: list[cst.BaseSmallStatement] = []
        if kept:
            new.append(with_names(node, kept) if len(kept) < len(node.names) else node)
        new += [_small(text) for text in texts]
        if not new and self._source.line_of(node) is None:
            self._source.edit(node, lambda _: cst.RemoveFromParent())
        elif not new:
            self._source.edit(
                self._source.line_of(node),  # type: ignore[arg-type]
                lambda _: cst.RemoveFromParent(),
            )
        elif new != [node]:
            replace_small(self._source, node, new)

    def _last_import(self) -> cst.CSTNode:
        """Return the last import at the top of the module, or the module."""
        found: cst.CSTNode = self._source.module
        for line in self._source.module.body:
            if isinstance(line, cst.ClassDef | cst.FunctionDef):
                break
            if isinstance(line, cst.SimpleStatementLine) and any(
                isinstance(each, cst.Import | cst.ImportFrom) for each in line.body
            ):
                found = line
        return found


def _small(text: str) -> cst.BaseSmallStatement:
    return statement(text).body[0]


def _with_first(text: str, module: cst.Module) -> cst.Module:
    """Put a statement behind a module's documentation."""
    body = list(module.body)
    documented = module.get_docstring() is not None
    body.insert(1 if documented else 0, statement(text))
    return module.with_changes(body=body)
