"""Imports of torch.distributed.fsdp, in every form, become imports of fsdp_compat."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from .new_imports import FSDP, PACKAGE, Imports
from .source import Chain, Source

IN_PLACE = "torch.distributed._composable.fsdp"  # an older home of fully_shard

_MODULES = ("api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap")
# Private names that programs import.
_OF_WRAP = {
    *("_Policy", "_module_wrap_policy", "_or_policy", "_recursive_wrap"),
    "_wrap_module_cls_individually",
}
_NAME = re.compile(r"torch\.distributed\.(fsdp|_composable\.fsdp)(\.\w+)*")
_CODE = re.compile(r"(from|import)\s+torch\.distributed\.(fsdp|_composable\.fsdp)\b")
_PARENTS = {"torch", FSDP.rpartition(".")[0], IN_PLACE.rpartition(".")[0]}

_NOT_HERE = "fsdp_compat has no such name, or it is assigned to; replace it, or start \
the unchanged program with: python -m fsdp_compat run"

# Chains that begin with the name that an import binds: what that is, and what the chain is.
Uses = dict[ast.alias, list[tuple[Chain, str, str]]]


def rewrite_fsdp_imports(source: Source, imports: Imports) -> None:
    uses: Uses = {}
    for chain in source.chains:
        for alias, origin, full in source.imports(chain):
            uses.setdefault(alias, []).append((chain, origin, full))
    needed, moved = _rewrite_chains(source, uses)
    if moved:
        imports.need_package(needed)
    for node in source.all(ast.Import):
        for alias in node.names:
            if is_of_fsdp(alias.name):
                _rewrite_import(source, node, alias, uses, alias in needed)
    for from_node in source.all(ast.ImportFrom):
        module = from_node.module or ""
        if not from_node.level and (is_of_fsdp(module) or module in _PARENTS):
            _rewrite_from(source, from_node, uses)
    _report_strings(source)


def _rewrite_chains(source: Source, uses: Uses) -> tuple[set[ast.alias], set[ast.alias]]:
    """Rewrite chains such as torch.distributed.fsdp.X. Return the imports that chains still need,
    and those that some do not need any more."""
    needed, moved = set[ast.alias](), set[ast.alias]()
    for alias, found in uses.items():
        for chain, origin, full in found:
            if is_of_fsdp(origin) or not is_of_fsdp(full):
                continue
            new = ours(full)
            if new is None or not isinstance(chain.ctx, ast.Load):
                needed.add(alias)
                source.report(chain, full, _NOT_HERE)
            else:
                source.replace(chain, new)
                moved.add(alias)
    return needed, moved


# -- import torch.distributed.fsdp


def _rewrite_import(
    source: Source, node: ast.Import, alias: ast.alias, uses: Uses, is_needed: bool
) -> None:
    new = ours(alias.name)
    if new is None:
        source.report(node, f"import {alias.name}", _NOT_HERE)
    elif alias.asname:
        if _can_move(source, alias, new, uses):
            source.edit(*source.span(alias), f"{new} as {alias.asname}")
    elif not is_needed:
        source.edit(*source.span(alias), new)
        if _torch_is_lost(source, node, alias, uses):
            source.insert_line(node, "import torch.distributed", after=False)


def _can_move(source: Source, alias: ast.alias, new: str, uses: Uses) -> bool:
    """Report every use of a module's name that would not find its attribute in our module."""
    fits = True
    for chain, origin, full in uses.get(alias, ()):
        is_read = full == origin or isinstance(chain.ctx, ast.Load)
        if not is_read or ours(full) != new + full[len(origin) :]:
            source.report(chain, full, _NOT_HERE)
            fits = False
    return fits


def _torch_is_lost(source: Source, node: ast.Import, alias: ast.alias, uses: Uses) -> bool:
    """True if ``torch`` is used for something else, and no other statement imports it."""
    return any(
        origin == "torch"
        and not is_of_fsdp(full)
        and all(is_of_fsdp(each.name) or each in node.names for each, _, _ in source.imports(chain))
        for chain, origin, full in uses.get(alias, ())
    )


# -- from torch.distributed.fsdp import X


def _rewrite_from(source: Source, node: ast.ImportFrom, uses: Uses) -> None:
    """Give each name the statement of its new home; names without one keep theirs."""
    groups: dict[str, list[ast.alias]] = {}
    old = f"from {node.module} import "
    for alias in node.names:
        full = f"{node.module}.{alias.name}" if alias.name != "*" else node.module or ""
        new = ours(full) if is_of_fsdp(full) else None
        start = old
        if new is None and is_of_fsdp(full):
            source.report(node, old + alias.name, _NOT_HERE)
        elif new is not None and alias.name == "*":
            start = f"from {new} import "
        elif new is not None and (not is_module(new) or _can_move(source, alias, new, uses)):
            start = _statement_for(alias, new)
        groups.setdefault(start, []).append(alias)
    if len(groups) > 1 or not next(iter(groups)).startswith("from "):
        _split(source, node, groups)
    elif old not in groups:
        module = re.compile(r"from\s+([\w.]+)").match(source.text, source.span(node)[0])
        assert module is not None
        source.edit(*module.span(1), next(iter(groups)).split()[1])


def _statement_for(alias: ast.alias, home: str) -> str:
    """Return the start of the statement that imports a name: from the package if it has it."""
    shorter = ours(f"{FSDP}.{alias.name}")
    if shorter is not None and not is_module(home) and not is_module(shorter):
        home = shorter
    parent, _, last = home.rpartition(".")
    if not parent or (last != alias.name and is_module(home)):
        return f"import {home} as {alias.asname or alias.name}"
    return f"from {parent} import "


def _split(source: Source, node: ast.ImportFrom, groups: dict[str, list[ast.alias]]) -> None:
    """Write one statement for each group of names, with the comments beside these names."""
    starts = [source.span(alias)[0] for alias in node.names[1:]] + [source.span(node)[1]]
    comments = {
        alias: re.findall(r"#[^\r\n]*", source.text[source.span(alias)[1] : stop])
        for alias, stop in zip(node.names, starts, strict=True)
    }
    lines = []
    for start, aliases in groups.items():
        names = ", ".join(source.code(alias) for alias in aliases)
        found = [comment for alias in aliases for comment in comments[alias]]
        lines.append("  ".join([start if " as " in start else start + names, *found]))
    own = source.own_line(node)
    between = f"{source.newline}{own[1]}" if own is not None else "; "
    source.edit(*source.span(node), between.join(lines))


def _report_strings(source: Source) -> None:
    """Report strings that name the module, or hold code that imports it."""
    for node in source.all(ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
        if isinstance(source.parent(node), ast.Expr):
            continue  # documentation
        if _NAME.fullmatch(text):
            why = "a string names torch's module; write ours if it is to be found by this string"
            source.report(node, f'"{text}"', why)
        elif _CODE.search(text):
            why = "it holds code that imports torch.distributed.fsdp; migrate that code by hand"
            source.report(node, "a string", why)


# -- which names exist here. Sources are read, so that nothing is imported.


def is_of_fsdp(name: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in (FSDP, IN_PLACE))


def is_module(name: str) -> bool:
    """True for the name of our package, or of one of its modules that torch also has."""
    return name in {PACKAGE, *(f"{PACKAGE}.{each}" for each in _MODULES)}


@functools.cache
def _names_of(module: str) -> set[str]:
    """Return the names that one of our modules lists in ``__all__``; "" is the package."""
    path = Path(__file__).parents[1] / f"{module or '_public'}.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    lists = [node.value for node in body if isinstance(node, ast.Assign)]
    listed = next(each for each in reversed(lists) if isinstance(each, ast.List))
    return {*ast.literal_eval(listed), *(_OF_WRAP if module == "wrap" else ())}


def ours(name: str) -> str | None:
    """Return our name for a full name of torch's, of a module or of something in it."""
    parts = name.removeprefix(IN_PLACE).removeprefix(FSDP).split(".")[1:]
    if name.startswith(IN_PLACE) or parts[:1] == ["_fully_shard"]:
        # torch has names of FSDP2 in modules below that of the name
        while len(parts) > 1 and (parts[0].startswith("_") or parts[1] in _names_of("")):
            parts = parts[1:]
        if parts[:1] == ["fully_shard_module"] or (parts and parts[0].startswith("_f")):
            return PACKAGE
        if parts and parts[0] in _names_of("_fully_shard") - _names_of(""):
            return ".".join([PACKAGE, "_fully_shard", *parts])
    module = parts.pop(0) if parts and parts[0] in _MODULES else ""
    home = f"{PACKAGE}.{module}" if module else PACKAGE
    if not parts:
        return home
    for other in (module, "", *_MODULES) if module else ("",):
        if parts[0] in _names_of(other):
            return ".".join([PACKAGE, *filter(None, [other]), *parts])
    return None
