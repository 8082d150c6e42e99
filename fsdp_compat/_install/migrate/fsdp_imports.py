"""Imports of torch.distributed.fsdp, in every form, become imports of fsdp_compat."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst
from libcst import metadata

from .names import FSDP, IN_PLACE, PACKAGE, is_of_fsdp, ours, why_not
from .new_imports import replace_small, with_names
from .source import Source, bound_by, changed, code_of, dotted, expression, root_of, statement

_NAME = re.compile(r"torch\.distributed\.(fsdp|_composable\.fsdp)(\.\w+)*")
_CODE = re.compile(r"(from|import)\s+torch\.distributed\.(fsdp|_composable\.fsdp)\b")
_PARENTS = {
    "torch": "torch",
    FSDP.rpartition(".")[0]: "distributed",
    IN_PLACE.rpartition(".")[0]: "_composable",
}


def rewrite_fsdp_imports(source: Source) -> None:
    uses = _Uses(source)
    uses.rewrite_chains()
    for node in source.all(cst.Import):
        _plain(source, node, uses)
    for from_node in source.all(cst.ImportFrom):
        if not isinstance(from_node.names, cst.ImportStar):
            _names(source, from_node, uses)
        elif not from_node.relative and is_of_fsdp(dotted(from_node.module) or ""):
            _star(source, from_node)
    _texts(source)


class _Uses:
    """Chains such as ``torch.distributed.fsdp.X`` or, after ``import ... as f``, ``f.X``."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.kept: set[cst.CSTNode] = set()  # import statements that a chain still needs
        self._by_import: dict[cst.CSTNode, list[tuple[cst.CSTNode, str, str]]] = {}
        for chain in source.chains:
            root = root_of(chain)
            if not isinstance(root, cst.Name):
                continue
            for each in source.assignments(root):
                if not isinstance(each, metadata.ImportAssignment):
                    continue
                origin = bound_by(each, root.value)
                if origin is not None:
                    rest = (dotted(chain) or "").partition(".")[2]
                    full = f"{origin}.{rest}" if rest else origin
                    self._by_import.setdefault(each.node, []).append((chain, origin, full))

    def of(self, node: cst.CSTNode) -> Sequence[tuple[cst.CSTNode, str, str]]:
        """Return (chain, what the first name stands for, what the chain stands for)."""
        return self._by_import.get(node, ())

    def rewrite_chains(self) -> None:
        """Rewrite chains that begin above torch.distributed.fsdp, and import fsdp_compat there."""
        moved: dict[cst.CSTNode, str] = {}
        wanted: list[cst.CSTNode] = []
        for node, uses in self._by_import.items():
            for chain, origin, full in uses:
                if is_of_fsdp(origin) or not is_of_fsdp(full):
                    continue
                new = ours(full)
                if new is None or _is_target(self.source, chain):
                    self.kept.add(node)
                    _leave(self.source, chain, full, new)
                elif chain not in moved:
                    moved[chain] = new
                    wanted.append(node)
        for chain, new in moved.items():
            self.source.replace(chain, new)
        imported: set[cst.CSTNode] = set()
        for node in wanted:
            function, line = self.source.function(node), self.source.line_of(node)
            if function not in imported and line is not None and not self._imports_ours(node):
                self.source.insert_after(line, lambda: statement(f"import {PACKAGE}"))
            imported.add(function)

    def _imports_ours(self, node: cst.CSTNode) -> bool:
        """True if fsdp_compat is imported where a statement imports torch, or will be."""
        here = (self.source.function(node), self.source.module)
        for each in self.source.all(cst.Import):
            if self.source.function(each) not in here:
                continue
            for alias in each.names:
                name = dotted(alias.name) or ""
                becomes_ours = is_of_fsdp(name) and each not in self.kept
                if alias.asname is None and (becomes_ours or name.partition(".")[0] == PACKAGE):
                    return True
        return False


def _is_target(source: Source, chain: cst.CSTNode) -> bool:
    parent = source.parent(chain)
    return isinstance(parent, cst.AssignTarget | cst.Del | cst.AugAssign)


def _leave(source: Source, node: cst.CSTNode, full: str, new: str | None) -> None:
    if new is None:
        source.leave(node, full, *why_not(full))
    else:
        why = "it is assigned to, so it may change torch's class and not ours"
        source.leave(node, full, why, f"assign to {new} if that is meant")


def _can_move(source: Source, node: cst.CSTNode, name: str, origin: str, uses: _Uses) -> bool:
    """Report every use of a module's name that would not find its attribute in our module."""
    new, fits = ours(origin), True
    for chain, _, full in uses.of(node):
        if (dotted(chain) or "").partition(".")[0] != name:
            continue
        found = ours(full)
        if found is None or not (found == new or found.startswith(f"{new}.")):
            source.leave(chain, full, *why_not(full))
            fits = False
        elif _is_target(source, chain) and chain is not None and "." in (dotted(chain) or ""):
            _leave(source, chain, full, found)
            fits = False
    return fits


def _plain(source: Source, node: cst.Import, uses: _Uses) -> None:
    """Rewrite ``import torch.distributed.fsdp`` with or without ``as``."""
    names = {alias: dotted(alias.name) or "" for alias in node.names}
    wanted = {alias: name for alias, name in names.items() if is_of_fsdp(name)}
    if not wanted:
        return
    new_names: dict[cst.ImportAlias, str] = {}
    for alias, name in wanted.items():
        new = ours(name)
        if new is None:
            source.leave(node, f"import {name}", *why_not(name))
        elif alias.asname is None:
            if node not in uses.kept:
                new_names[alias] = new
        elif _can_move(source, node, dotted(alias.asname.name) or "", name, uses):
            new_names[alias] = new
    for alias, new in new_names.items():
        source.edit(alias, changed(name=expression(new)))
    moved = [alias for alias in new_names if alias.asname is None]
    if moved and _torch_is_needed(source, node, uses):
        line = source.line_of(node)
        if line is not None:
            source.insert_before(line, lambda: statement("import torch.distributed"))


def _torch_is_needed(source: Source, node: cst.Import, uses: _Uses) -> bool:
    """True if ``torch`` is used for something else, and only this statement imports it."""
    for chain, origin, full in uses.of(node):
        if origin != "torch" or is_of_fsdp(full):
            continue
        others = [
            each.node
            for each in source.assignments(root_of(chain))  # type: ignore[arg-type]
            if isinstance(each, metadata.ImportAssignment) and each.node is not node
        ]
        if not any(_stays(other) for other in others):
            return True
    return False


def _stays(node: cst.CSTNode) -> bool:
    """True if an import statement goes on importing torch."""
    return isinstance(node, cst.Import) and any(
        not is_of_fsdp(dotted(alias.name) or "") for alias in node.names
    )


def _star(source: Source, node: cst.ImportFrom) -> None:
    name = dotted(node.module) or ""
    new = ours(name)
    if new is None:
        source.leave(node, f"from {name} import *", *why_not(name))
    else:
        source.edit(node, changed(module=expression(new)))


def _names(source: Source, node: cst.ImportFrom, uses: _Uses) -> None:
    """Rewrite ``from torch.distributed.fsdp import X``, ``from torch.distributed import fsdp``."""
    module = dotted(node.module) if node.module is not None else None
    if node.relative or module is None or isinstance(node.names, cst.ImportStar):
        return
    if not is_of_fsdp(module) and module not in _PARENTS:
        return
    homes: dict[cst.ImportAlias, str] = {}
    for alias in node.names:
        name = dotted(alias.name) or ""
        full = f"{module}.{name}"
        if not is_of_fsdp(full):
            continue
        new = ours(full)
        if new is None:
            source.leave(node, f"from {module} import {name}", *why_not(full))
            continue
        if _is_module(new):
            bound = dotted(alias.asname.name) if alias.asname is not None else name
            if not _can_move(source, node, bound or "", full, uses):
                continue
        homes[alias] = new
    if homes:
        _split(source, node, homes)


def _is_module(name: str) -> bool:
    return all(part.islower() for part in name.split(".")[1:]) and ours_is_module(name)


def ours_is_module(name: str) -> bool:
    return name in {PACKAGE, *(f"{PACKAGE}.{each}" for each in _submodules())}


def _submodules() -> tuple[str, ...]:
    return ("api", "wrap", "fully_sharded_data_parallel", "sharded_grad_scaler")


def _split(source: Source, node: cst.ImportFrom, homes: dict[cst.ImportAlias, str]) -> None:
    """Give each name the statement of its new home; names without one keep theirs."""
    assert not isinstance(node.names, cst.ImportStar)
    homes = _gathered(node, homes)
    groups: dict[str, list[cst.ImportAlias]] = {}
    for alias in node.names:
        home = homes.get(alias, "")
        parent, _, last = home.rpartition(".")
        whole = home == PACKAGE or (last != dotted(alias.name) and ours_is_module(home))
        groups.setdefault(f"import {home}" if whole else parent, []).append(alias)
    if len(groups) == 1 and not (only := next(iter(groups))).startswith("import "):
        source.edit(node, changed(module=expression(only)))
        return
    statements: list[cst.BaseSmallStatement] = []
    for home, aliases in groups.items():
        if home.startswith("import "):
            for alias in aliases:
                bound = code_of(alias.asname.name if alias.asname is not None else alias.name)
                new = cst.parse_statement(f"{home} as {bound}")
                assert isinstance(new, cst.SimpleStatementLine)
                statements.append(new.body[0])
            continue
        part = with_names(node, aliases)
        if home:
            part = part.with_changes(module=expression(home))
        statements.append(part)
    replace_small(source, node, statements)


def _gathered(
    node: cst.ImportFrom, homes: dict[cst.ImportAlias, str]
) -> dict[cst.ImportAlias, str]:
    """Prefer one statement: if all names are in our package itself, they are taken from there."""
    assert not isinstance(node.names, cst.ImportStar)
    parents = {home.rpartition(".")[0] for home in homes.values()}
    if len(parents) < 2:
        return homes
    moved = {alias: ours(f"{FSDP}.{dotted(alias.name)}") for alias in homes}
    found = {
        alias: home
        for alias, home in moved.items()
        if home is not None and not ours_is_module(homes[alias])
    }
    return found if len(found) == len(homes) else homes


def _texts(source: Source) -> None:
    """Report strings that name the module, or hold code that imports it."""
    for node in source.all(cst.SimpleString, cst.FormattedStringText):
        if not isinstance(node, cst.SimpleString | cst.FormattedStringText):
            continue
        value = node.raw_value if isinstance(node, cst.SimpleString) else node.value
        if isinstance(source.parent(node), cst.Expr):
            continue  # documentation
        if _NAME.fullmatch(value):
            what = f'"{value}"'
            source.leave(
                node,
                what,
                "a string names torch's module",
                "write fsdp_compat's name if it is to be found by this string",
            )
        elif _CODE.search(value):
            source.leave(
                node,
                "a string",
                "it holds code that imports torch.distributed.fsdp",
                "migrate that code by hand",
            )
