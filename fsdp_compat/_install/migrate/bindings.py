"""Every assignment of a variable: a name, or an attribute such as ``self.model``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
from libcst import metadata

from .source import Source, dotted, root_of

# The scope or class that a variable belongs to, and its dotted name.
Key = tuple[object, str]


@dataclass(frozen=True, eq=False)
class Site:
    """A place that binds a variable. value: what a plain assignment gives it."""

    node: cst.CSTNode
    value: cst.BaseExpression | None
    statement: cst.CSTNode | None


class Bindings:
    """All variables of a file."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._of_targets: dict[cst.CSTNode, Site] = {}
        self._of_attributes: dict[Key, list[Site]] = {}
        for target, value, node in self._targets():
            site = Site(target, value, source.line_of(node))
            self._of_targets[target] = site
            if isinstance(target, cst.Attribute) and (key := self.key(target)) is not None:
                self._of_attributes.setdefault(key, []).append(site)

    def _targets(
        self,
    ) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression | None, cst.CSTNode]]:
        for node in self._source.all(cst.Assign, cst.AnnAssign, cst.AugAssign, cst.For, cst.AsName):
            if isinstance(node, cst.Assign):
                plain = len(node.targets) == 1
                for each in node.targets:
                    for target in _flat(each.target):
                        whole = plain and target is each.target
                        yield target, node.value if whole else None, node
            elif isinstance(node, cst.AnnAssign):
                yield node.target, node.value, node
            elif isinstance(node, cst.AsName):
                for target in _flat(node.name):
                    yield target, None, node
            elif isinstance(node, cst.AugAssign | cst.For):
                for target in _flat(node.target):
                    yield target, None, node

    def key(self, node: cst.CSTNode) -> Key | None:
        """Return the variable that an expression names; None for any other expression."""
        text, root = dotted(node), root_of(node)
        if text is None or not isinstance(root, cst.Name):
            return None
        assignments = [
            each
            for each in self._source.assignments(root)
            if not isinstance(each, metadata.BuiltinAssignment)
        ]
        if not assignments:
            return None
        if "." in text and (owner := self._class_of(assignments[0], root.value)) is not None:
            return owner, "self." + text.partition(".")[2]
        return assignments[0].scope, text

    def _class_of(self, assignment: metadata.BaseAssignment, name: str) -> cst.ClassDef | None:
        """Return the class if the name is the first parameter of a method."""
        scope = assignment.scope
        if not isinstance(scope, metadata.FunctionScope):
            return None
        function = scope.node if hasattr(scope, "node") else None
        if not isinstance(function, cst.FunctionDef) or not function.params.params:
            return None
        first = function.params.params[0].name.value
        block = self._source.parent(function)
        owner = self._source.parent(block) if block is not self._source.module else None
        return owner if first == name and isinstance(owner, cst.ClassDef) else None

    def sites(self, key: Key) -> list[Site]:
        """Return everything that binds a variable."""
        owner, text = key
        if "." in text or not isinstance(owner, metadata.Scope):
            return self._of_attributes.get(key, [])
        found = []
        for each in owner[text]:
            node = getattr(each, "node", None)
            if node is not None:
                found.append(self._of_targets.get(node) or Site(node, None, None))
        return sorted(found, key=lambda site: self._source.start(site.node))

    def plain(self) -> Iterator[Site]:
        """Yield each assignment of one value to one variable."""
        return (site for site in self._of_targets.values() if site.value is not None)


def _flat(target: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    if isinstance(target, cst.Tuple | cst.List):
        for element in target.elements:
            yield from _flat(element.value)
    elif isinstance(target, cst.Name | cst.Attribute):
        yield target
