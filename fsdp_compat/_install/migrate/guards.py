"""Code that runs on some ranks only, where a collective call would wait for the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from .source import Source, code_of, dotted

_RANK = re.compile(r"(^|_)rank(_id)?$|^get_(\w+_)?rank$|^gpu(_id)?$", re.IGNORECASE)
_MAIN = re.compile(r"main|master|chief|rank_?(0|zero)|global_zero", re.IGNORECASE)
_ANY = re.compile(
    r"rank|gpu_id|\bgpu\b|is_(main|master|chief|global_zero)|main_process|"
    r"master_process",
    re.IGNORECASE,
)
_OF_THIS_RANK = re.compile(r"loss|acc|best|metric|score|val|improve|error|time", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Guard:
    """simple: an ``if`` that is true on rank 0 alone, possibly with further plain conditions
    ``rest``, and without another branch around the code."""

    node: cst.CSTNode
    text: str
    is_simple: bool
    rest: tuple[str, ...] = ()


def guards_of(source: Source, node: cst.CSTNode) -> Iterator[Guard]:
    """Yield what keeps some ranks away from a node within its function, the nearest first."""
    child = node
    for outer in source.above(node):
        if isinstance(outer, cst.If) and child is not outer.test:
            guard = _guard(source, outer, child)
            if guard is not None:
                yield guard
        elif isinstance(outer, cst.IfExp) and child is not outer.test and _is_of_rank(outer.test):
            yield Guard(outer, code_of(outer.test), False)
        elif isinstance(outer, cst.BooleanOperation) and child is outer.right:
            if _is_of_rank(outer.left):
                yield Guard(outer, code_of(outer.left), False)
        elif isinstance(outer, cst.While) and child is outer.body and _is_of_rank(outer.test):
            yield Guard(outer, code_of(outer.test), False)
        elif isinstance(outer, cst.IndentedBlock | cst.Module):
            yield from _left_before(outer, child)
        if isinstance(outer, cst.FunctionDef):
            for decorator in outer.decorators:
                text = code_of(decorator.decorator)
                if _ANY.search(text) and re.search(r"zero|only|main|master", text):
                    yield Guard(decorator, f"@{text}", False)
            return
        child = outer


def _guard(source: Source, node: cst.If, child: cst.CSTNode) -> Guard | None:
    if not _is_of_rank(node.test):
        return None
    text = code_of(node.test)
    parts = _parts(node.test)
    first = [part for part in parts if _is_rank0(part)]
    rest = [part for part in parts if not _is_rank0(part)]
    block = source.parent(node)
    simple = (
        child is node.body
        and len(first) == 1
        and isinstance(block, cst.IndentedBlock | cst.Module)
        and all(is_plain(source, part) and not _is_of_rank(part) for part in rest)
    )
    return Guard(node, text, simple, tuple(code_of(part) for part in rest))


def _parts(test: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return [*_parts(test.left), *_parts(test.right)]
    return [test]


def _last_name(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Call):
        node = node.func
    return (dotted(node) or "").rpartition(".")[2]


def _is_number(node: cst.CSTNode, *numbers: str) -> bool:
    return code_of(node) in numbers


def _is_rank0(test: cst.CSTNode) -> bool:
    """True for a test that holds on rank 0 alone, or on the first rank of each machine."""
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        only = test.comparisons[0]
        left, right = test.left, only.comparator
        if isinstance(only.operator, cst.Equal):
            pairs = ((left, right), (right, left))
            return any(_RANK.search(_last_name(a)) and _is_number(b, "0") for a, b in pairs)
        if isinstance(only.operator, cst.In) and isinstance(right, cst.Tuple | cst.List | cst.Set):
            among = all(_is_number(each.value, "0", "-1") for each in right.elements)
            return bool(_RANK.search(_last_name(left))) and among
        if isinstance(only.operator, cst.LessThan):
            return bool(_RANK.search(_last_name(left))) and _is_number(right, "1")
        return False
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return bool(_RANK.search(_last_name(test.expression)))
    return bool(_MAIN.search(_last_name(test)))


def _is_of_rank(test: cst.CSTNode) -> bool:
    return bool(_ANY.search(code_of(test)))


def _left_before(block: cst.CSTNode, child: cst.CSTNode) -> Iterator[Guard]:
    """Yield the tests of a rank after which a function, or a round of a loop, ends earlier."""
    body = block.body if isinstance(block, cst.IndentedBlock | cst.Module) else ()
    for each in body:
        if each is child:
            return
        if isinstance(each, cst.If) and _is_of_rank(each.test) and _leaves(each):
            yield Guard(each, code_of(each.test), False)


def _leaves(node: cst.If) -> bool:
    last = node.body.body[-1] if node.body.body else None
    small = last.body[-1] if isinstance(last, cst.SimpleStatementLine) else last
    return isinstance(small, cst.Return | cst.Continue | cst.Break | cst.Raise)


def is_plain(source: Source, test: cst.CSTNode) -> bool:
    """True for a condition that all ranks find the same: of counters, settings and constants."""
    if isinstance(test, cst.Call):
        called = dotted(test.func)
        return called in ("len", "int", "bool") and all(
            is_plain(source, each.value) for each in test.args
        )
    if isinstance(test, cst.Comparison):
        return all(
            is_plain(source, each)
            for each in (test.left, *(target.comparator for target in test.comparisons))
        )
    if isinstance(test, cst.BooleanOperation | cst.BinaryOperation):
        return is_plain(source, test.left) and is_plain(source, test.right)
    if isinstance(test, cst.UnaryOperation):
        return is_plain(source, test.expression)
    if isinstance(test, cst.Name | cst.Attribute) and code_of(test) not in (
        "True",
        "False",
        "None",
    ):
        text = dotted(test)
        return text is not None and not _OF_THIS_RANK.search(text) and _is_setting(source, test)
    constants = ("True", "False", "None")
    return (
        isinstance(test, cst.Integer | cst.Float | cst.SimpleString) or code_of(test) in constants
    )


def _is_setting(source: Source, node: cst.Name | cst.Attribute) -> bool:
    """True for attributes, constants, parameters, and counters of loops."""
    if isinstance(node, cst.Attribute) or node.value.isupper():
        return True
    for each in source.assignments(node):
        target = getattr(each, "node", None)
        if target is None or target not in source:
            continue
        parent = source.parent(target)
        if isinstance(parent, cst.Tuple | cst.Element):
            continue
        value = parent.value if isinstance(parent, cst.Assign) else None
        if isinstance(parent, cst.AssignTarget):
            above = source.parent(parent)
            value = above.value if isinstance(above, cst.Assign) else None
            if value is None or not is_plain(source, value):
                return False
    return True
