"""Imports of names that rewritten code uses, and imports that it no longer needs."""

from __future__ import annotations

import ast
from collections.abc import Collection

from .source import Chain, Source, dotted

FSDP = "torch.distributed.fsdp"
PACKAGE = "fsdp_compat"


class Imports:
    """Our names that a file uses after the migration."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.taken = {node.id for node in source.all(ast.Name)}
        self.taken |= {node.asname or node.name for node in source.all(ast.alias)}
        self._chosen: dict[str, str] = {}
        self._new: list[str] = []
        self.replaced: set[Chain] = set()  # names and chains that were replaced by others

    def name_for(self, full: str, *wanted: str) -> str:
        """Return the local name of one of ours, importing it if needed. wanted: the best first."""
        parent, _, last = full.rpartition(".")
        known = self._chosen.get(full) or self._known(full)
        if known is None:
            known = next((name for name in wanted if name not in self.taken), f"_{last}")
            alias = f" as {known}" if known != last else ""
            self._new.append(f"from {parent} import {last}{alias}")
        return self._chosen.setdefault(full, known)

    def need_package(self, kept: Collection[ast.alias]) -> None:
        """Import the package, unless an import binds its name. kept: imports that stay torch's."""
        statements = [each for each in self._source.tree.body if isinstance(each, ast.Import)]
        aliases = [alias for each in statements for alias in each.names if alias not in kept]
        if not any(each.name.startswith((PACKAGE, FSDP)) and not each.asname for each in aliases):
            self._new.append(f"import {PACKAGE}")

    def _known(self, full: str) -> str | None:
        """Return the name under which the module imports ours, or torch's, which becomes ours."""
        imports = [node for node in self._source.tree.body if isinstance(node, ast.ImportFrom)]
        for alias in (alias for node in imports for alias in node.names):
            origin = self._source.origin(alias) or ""
            is_same = origin.startswith((PACKAGE, FSDP))
            if is_same and origin.rpartition(".")[2] == full.rpartition(".")[2]:
                return alias.asname or alias.name
        return None

    def write(self) -> None:
        """Note the edits: all names are known now."""
        body, text = self._source.tree.body, self._source.newline.join(sorted(self._new))
        first = next((n for n, each in enumerate(body) if hasattr(each, "decorator_list")), None)
        found = [each for each in body[:first] if isinstance(each, ast.Import | ast.ImportFrom)]
        done = [each for each in found if self._is_done(each)]
        if done and text:
            self._source.edit(*self._source.span(done[0]), text)
        elif text:
            is_documented = ast.get_docstring(self._source.tree) is not None
            place = found[-1] if found else body[0]
            self._source.insert_line(place, text, after=bool(found) or is_documented)
        for each in done[bool(text) :]:
            start, _, end = self._source.own_line(each) or (0, "", 0)
            self._source.edit(start, end, "")

    def _is_done(self, node: ast.stmt) -> bool:
        """True for the import of one name all uses of which were replaced, and no string has."""
        if not isinstance(node, ast.ImportFrom) or len(node.names) > 1:
            return False
        name = node.names[0].asname or node.names[0].name
        uses = [c for c in self._source.chains if dotted(c).partition(".")[0] == name]
        parents = [(each, self._source.parent(each)) for each in self._source.all(ast.Constant)]
        texts = [str(each.value) for each, parent in parents if not isinstance(parent, ast.Expr)]
        return bool(uses) and self.replaced.issuperset(uses) and not any(name in t for t in texts)
