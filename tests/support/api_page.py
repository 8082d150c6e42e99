"""examples/API.md, made from the docstrings of all public names: run `python -m
tests.support.api_page` after a change of one."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import textwrap
from typing import Any

from tests.support.public_api import ROOT, members_of, public_modules, public_objects

PAGE = ROOT / "examples" / "API.md"
HEAD = """# All names

A line for each public name, made from the docstrings by `python -m tests.support.api_page`;
`help(name)` says more, and `pdoc fsdp_compat{,.checkpoint,.errors,.optim,.wrap}` makes pages of it.
*Collective*: all ranks call it together, always or in the cases that its help names.
"""


def summary(value: Any) -> str:
    doc = inspect.cleandoc(value.__doc__ or "")
    text = doc.partition("\n\n")[0].replace("\n", " ").replace("``", "`")
    return text + (" *Collective*" if "\nCollective: " in doc else "")


def text_of(default: object) -> str:
    if isinstance(default, enum.Enum):
        return str(default)
    return repr(default) if isinstance(default, (bool, int, float, str, type(None))) else "..."


def signature(function: Any) -> str:
    """Return the parameters without their types, but for ``self``."""
    parts: list[str] = []
    for each in inspect.signature(inspect.unwrap(function)).parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        default = "" if each.default is each.empty else f"={text_of(each.default)}"
        parts.append(f"{stars}{each.name}{default}")
    return f"({', '.join(parts)})"


def kind(value: Any) -> str:
    """Return what stands behind the name: a signature, members of an enum, bases of an error."""
    if not inspect.isclass(value):
        return "" if isinstance(value, property) else signature(value)
    if issubclass(value, enum.Enum):
        return f": {', '.join(value.__members__)}"
    if issubclass(value, Exception):
        return f"({', '.join(base.__name__ for base in value.__bases__)})"
    return signature(value.__init__) if "__init__" in vars(value) else ""


def line(text: str, indent: str = "") -> str:
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(f"{indent}- {text}", 100, subsequent_indent=f"{indent}  ", **options)


def lines_of(name: str, value: Any) -> list[str]:
    lines = [line(f"`{name}{kind(value)}`: {summary(value)}")]
    is_record = dataclasses.is_dataclass(value)
    if inspect.isclass(value) and not (is_record or issubclass(value, (enum.Enum, Exception))):
        lines += [
            line(f"`{method}{kind(member)}`: {summary(member)}", "  ")
            for method, member in sorted(members_of(value))
        ]
    return lines


def page_text() -> str:
    parts = [HEAD]
    homes = {id(value): name.rpartition(".")[0] for name, value in public_objects()}
    for module_name in public_modules():
        module = importlib.import_module(module_name)
        parts.append(f"## {module_name}\n\n{textwrap.fill(summary(module), 100)}\n")
        named = {name: getattr(module, name) for name in module.__all__}
        here = {name: each for name, each in named.items() if homes.get(id(each)) == module_name}
        lines = [text for name, value in here.items() for text in lines_of(name, value)]
        elsewhere = [f"`{name}`" for name in named if name not in here]
        if elsewhere:
            lines.append(line(f"also here: {', '.join(elsewhere)}"))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
