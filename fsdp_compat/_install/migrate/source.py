"""A parsed file: where its names come from, and edits that are made all at once."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import libcst as cst
from libcst import metadata

from .findings import Finding

Change = Callable[[Any], Any]
Line = cst.SimpleStatementLine
NodeT = TypeVar("NodeT", bound=cst.CSTNode)
Function = (cst.FunctionDef, cst.Lambda)


def dotted(node: cst.CSTNode | None) -> str | None:
    """Return ``a.b.c`` for a chain of attributes that begins with a name, or None."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return ".".join([node.value, *reversed(parts)])


def root_of(node: cst.CSTNode) -> cst.CSTNode:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def code_of(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node).strip()


def expression(text: str) -> cst.BaseExpression:
    return cst.parse_expression(text)


def statement(text: str) -> Line:
    parsed = cst.parse_statement(text)
    assert isinstance(parsed, cst.SimpleStatementLine)
    return parsed


def changed(**fields: Any) -> Change:
    """Return an edit that gives a node other fields."""
    return lambda node: node.with_changes(**fields)


class Source:
    """One file. The steps of a migration read it and note edits; ``result`` makes them.

    Nodes are compared by identity: those that a step sees are those of the file as it was read."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.left: list[Finding] = []
        self.notes: list[Finding] = []
        self._text = text
        self._wrapper = metadata.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.module = self._wrapper.module
        self._scopes = self._wrapper.resolve(metadata.ScopeProvider)
        self._nodes: list[cst.CSTNode] = []
        self._parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self._starts: dict[cst.CSTNode, int] = {}
        self._ends: dict[cst.CSTNode, int] = {}
        self._collect(self.module)
        self._changes: dict[cst.CSTNode, list[Change]] = {}
        self._before: dict[cst.CSTNode, list[Callable[[], cst.CSTNode]]] = {}
        self._after: dict[cst.CSTNode, list[Callable[[], cst.CSTNode]]] = {}

    # -- reading

    def _collect(self, node: cst.CSTNode) -> None:
        self._starts[node] = len(self._starts) + len(self._ends)
        self._nodes.append(node)
        for name in _fields_of(type(node)):
            value = getattr(node, name)
            for child in value if isinstance(value, list | tuple) else (value,):
                if isinstance(child, cst.CSTNode):
                    self._parents[child] = node
                    self._collect(child)
        self._ends[node] = len(self._starts) + len(self._ends)

    def __contains__(self, node: object) -> bool:
        return node in self._starts

    @functools.cached_property
    def _positions(self) -> Mapping[cst.CSTNode, metadata.CodeRange]:
        """Resolved for reports only, as it takes as long as parsing."""
        return self._wrapper.resolve(metadata.PositionProvider)

    def all(self, *kinds: type[NodeT]) -> Iterator[NodeT]:
        """Yield every node of these classes, in the order of the text."""
        return (node for node in self._nodes if isinstance(node, kinds))

    def line(self, node: cst.CSTNode) -> int:
        return self._positions[node].start.line

    def start(self, node: cst.CSTNode) -> int:
        """Return where a node begins: numbers that grow along the text, for comparisons."""
        return self._starts[node]

    def end(self, node: cst.CSTNode) -> int:
        return self._ends[node]

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        return self._parents[node]

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, the nearest first."""
        while node is not self.module:
            node = self._parents[node]
            yield node

    def inside(self, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
        return node is outer or any(each is outer for each in self.above(node))

    def nearest(self, node: cst.CSTNode, *kinds: type[NodeT]) -> NodeT | None:
        return next((each for each in self.above(node) if isinstance(each, kinds)), None)

    def function(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the function around a node, or the module."""
        return self.nearest(node, *Function) or self.module

    def line_of(self, node: cst.CSTNode) -> Line | None:
        """Return the simple statement around a node, if it stands on a line of its own."""
        found = self.nearest(node, cst.SimpleStatementLine)
        return found if found is not None and len(found.body) == 1 else None

    def scope(self, node: cst.CSTNode) -> metadata.Scope | None:
        return self._scopes.get(node)

    def assignments(self, name: cst.Name) -> list[metadata.BaseAssignment]:
        """Return what binds a name, where it is used."""
        scope = self.scope(name)
        return sorted(scope[name.value], key=self._order) if scope is not None else []

    def _order(self, assignment: metadata.BaseAssignment) -> int:
        return self._starts.get(getattr(assignment, "node", None), -1)  # type: ignore[arg-type]

    def imported(self, node: cst.CSTNode) -> set[str]:
        """Return the full names that an imported name, or an attribute of one, may stand for."""
        text, root = dotted(node), root_of(node)
        if text is None or not isinstance(root, cst.Name):
            return set()
        rest = text.partition(".")[2]
        found = set()
        for each in self.assignments(root):
            if isinstance(each, metadata.ImportAssignment):
                name = bound_by(each, root.value)
                if name is not None:
                    found.add(f"{name}.{rest}" if rest else name)
        return found

    def is_outermost(self, node: cst.CSTNode) -> bool:
        """True for a name or chain of attributes that is not part of a longer chain."""
        parent = self._parents.get(node)
        return not isinstance(parent, cst.Attribute)

    @functools.cached_property
    def chains(self) -> list[cst.Name | cst.Attribute]:
        """Every name that is used, with the attributes behind it, in the order of the text."""
        return [
            node
            for node in self._nodes
            if isinstance(node, cst.Name | cst.Attribute)
            and self.is_outermost(node)
            and dotted(node) is not None
            and self.scope(root_of(node)) is not None
        ]

    @functools.cached_property
    def _by_name(self) -> dict[str, list[cst.Name | cst.Attribute]]:
        found: dict[str, list[cst.Name | cst.Attribute]] = {}
        for chain in self.chains:
            text = dotted(chain) or ""
            found.setdefault(text, []).append(chain)
            if "." in text:
                found.setdefault(text[text.rindex(".") :], []).append(chain)
        return found

    def chains_named(self, text: str) -> list[cst.Name | cst.Attribute]:
        return self._by_name.get(text, [])

    def chains_ending(self, attribute: str) -> list[cst.Name | cst.Attribute]:
        return self._by_name.get(f".{attribute}", [])

    @functools.cached_property
    def _scopes_of(self) -> dict[cst.CSTNode, metadata.Scope]:
        return {
            scope.node: scope
            for scope in set(self._scopes.values())
            if isinstance(scope, metadata.FunctionScope)
        }

    def scope_within(self, function: cst.CSTNode) -> metadata.Scope | None:
        """Return the scope of a function's body, or that of the module."""
        if function is self.module:
            scopes = (each.globals for each in self._scopes.values() if each is not None)
            return next(scopes, None)
        return self._scopes_of.get(function)

    # -- writing

    def edit(self, node: cst.CSTNode, change: Change) -> None:
        """change: gets the node, with the edits inside of it made, and returns what replaces it."""
        self._changes.setdefault(node, []).append(change)

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Replace an expression. Edits inside of it are lost."""
        self.edit(node, lambda _: expression(text))

    def insert_before(self, node: cst.CSTNode, make: Callable[[], cst.CSTNode]) -> None:
        self._before.setdefault(node, []).append(make)

    def insert_after(self, node: cst.CSTNode, make: Callable[[], cst.CSTNode]) -> None:
        self._after.setdefault(node, []).append(make)

    def leave(self, node: cst.CSTNode, what: str, why: str, fix: str) -> None:
        """Report a place that needs a person."""
        finding = self.finding(node, what, why, fix)
        if finding not in self.left:
            self.left.append(finding)

    def note(self, node: cst.CSTNode, what: str, why: str, fix: str) -> None:
        """Give advice for a place."""
        self.notes.append(self.finding(node, what, why, fix))

    def finding(self, node: cst.CSTNode, what: str, why: str, fix: str) -> Finding:
        shown = textwrap.shorten(what, 72, placeholder=" ...")
        return Finding(self.path, self.line(node), shown, why, fix)

    def result(self) -> str:
        """Return the text with all edits made."""
        if not (self._changes or self._before or self._after):
            return self._text
        if self.module.code != self._text:
            raise ValueError("it cannot be reproduced byte for byte")
        changed = self.module.visit(_Edits(self._changes, self._before, self._after))
        assert isinstance(changed, cst.Module)
        return changed.code


def bound_by(statement: metadata.ImportAssignment | cst.ImportFrom, name: str) -> str | None:
    """Return what an import statement binds to a name."""
    node = statement.node if isinstance(statement, metadata.ImportAssignment) else statement
    assert isinstance(node, cst.Import | cst.ImportFrom)
    if isinstance(node.names, cst.ImportStar):
        return None
    for alias in node.names:
        full = dotted(alias.name)
        assert full is not None
        chosen = alias.asname.name if alias.asname is not None else None
        if isinstance(node, cst.ImportFrom):
            bound = dotted(chosen) if chosen is not None else full
            if bound == name and not node.relative and node.module is not None:
                return f"{dotted(node.module)}.{full}"
        elif chosen is not None:
            if dotted(chosen) == name:
                return full
        elif full.partition(".")[0] == name:
            return name
    return None


@functools.cache
def _fields_of(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """Return the fields of a class of nodes that hold more than whitespace and punctuation."""
    without = ("whitespace", "leading_lines", "lines_after", "header", "footer", "lpar", "rpar")
    marks = {"comma", "semicolon", "equal", "dot", "colon", "lbracket", "rbracket", "lbrace"}
    return tuple(
        field.name
        for field in dataclasses.fields(kind)
        if not field.name.startswith(without) and field.name not in {*marks, "rbrace", "newline"}
    )


class _Edits(cst.CSTTransformer):
    def __init__(
        self,
        changes: dict[cst.CSTNode, list[Change]],
        before: dict[cst.CSTNode, list[Callable[[], cst.CSTNode]]],
        after: dict[cst.CSTNode, list[Callable[[], cst.CSTNode]]],
    ) -> None:
        super().__init__()
        self._changes, self._before, self._after = changes, before, after

    def on_visit(self, node: cst.CSTNode) -> bool:
        return True

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        for change in self._changes.get(original_node, ()):
            updated_node = change(updated_node)
        before = [make() for make in self._before.get(original_node, ())]
        after = [make() for make in self._after.get(original_node, ())]
        if not before and not after:
            return updated_node
        return cst.FlattenSentinel(_joined(before, updated_node, after))


def _joined(before: Sequence[Any], node: Any, after: Sequence[Any]) -> Sequence[Any]:
    """Put statements around one. What stands above it stays above the first."""
    kept = [] if isinstance(node, cst.RemovalSentinel) else list(_flat(node))
    if before and kept:
        first, *rest = before
        first = first.with_changes(leading_lines=kept[0].leading_lines)
        kept[0] = kept[0].with_changes(leading_lines=())
        before = [first, *rest]
    return [*before, *kept, *after]


def _flat(node: Any) -> Sequence[Any]:
    return list(node) if isinstance(node, cst.FlattenSentinel) else [node]
