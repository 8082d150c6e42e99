"""The public names: listed in order, few, and with docstrings that name every parameter.

In a section Args or Attributes of Google's style; short docstrings need no sections: they name each
parameter in ``backticks``, or their class does so for all of its methods, or they point to a
callable that has the parameter: "as ``X``" or "see ``X``"."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

import fsdp_compat
from fsdp_compat import checkpoint
from tests.support.public_api import PACKAGE, members_of, public_modules, public_objects


def doc_of(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


def sections(doc: str) -> dict[str, str]:
    """Return the lines below each heading of a docstring."""
    parts = re.split(r"^([A-Z][a-z]+):$\n", doc, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters(function: Any) -> list[str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    given = inspect.signature(function).parameters.values()
    return [stars.get(p.kind, "") + p.name for p in given if p.name not in ("self", "cls")]


def expected_of(value: Any) -> list[str]:
    """Return the parameters, fields or members to be named."""
    if not inspect.isclass(value):
        return [] if isinstance(value, property) else parameters(inspect.unwrap(value))
    if issubclass(value, enum.Enum):
        return [*value.__members__]
    if dataclasses.is_dataclass(value):
        own = vars(value).get("__annotations__", {})
        return [field.name for field in dataclasses.fields(value) if field.name in own]
    init = vars(value).get("__init__")
    return parameters(inspect.unwrap(init)) if init else []


@functools.cache
def callables() -> list[tuple[str, Any]]:
    found = public_objects()
    for name, value in public_objects():
        if inspect.isclass(value):
            found += [(f"{name}.{each}", member) for each, member in members_of(value)]
    return [(name, inspect.unwrap(each)) for name, each in found if inspect.isroutine(each)]


def pointed_to(doc: str) -> Iterator[Any]:
    for name in re.findall(r"\b(?:[Aa]s|[Ss]ee)\s+``([\w.]+)``", doc):
        if name.startswith("nn.Module."):
            yield getattr(nn.Module, name.removeprefix("nn.Module."))
        yield from (value for place, value in callables() if f".{place}".endswith(f".{name}"))


def named_in(value: Any, class_doc: str) -> list[str]:
    """Return what the docstring names of the expected."""
    doc = doc_of(value)
    if found := sections(doc):
        text = found.get("Args", "")
        if isinstance(value, enum.EnumMeta) or dataclasses.is_dataclass(value):
            text += found.get("Attributes", "")
        return re.findall(r"^ {4}(\*{0,2}\w+): \S", text, flags=re.MULTILINE)
    codes = re.findall("``([^`]+)``", doc + class_doc.partition("\nArgs:")[0])
    own = None if isinstance(value, property) else inspect.unwrap(value)
    elsewhere = [name for each in pointed_to(doc) if each is not own for name in parameters(each)]
    return [
        name
        for name in expected_of(value)
        if name in elsewhere or any(re.search(rf"\b{name.strip('*')}\b", code) for code in codes)
    ]


def violations() -> Iterator[str]:
    for name in public_modules():
        if not doc_of(importlib.import_module(name)):
            yield f"{name} has no docstring"
    for name, value in public_objects():
        members = members_of(value) if inspect.isclass(value) else ()
        for each, member in [(name, value), *((f"{name}.{n}", m) for n, m in members)]:
            class_doc = doc_of(value) if inspect.isclass(value) and member is not value else ""
            given, expected = named_in(member, class_doc), expected_of(member)
            if not doc_of(member) or given != expected:
                yield f"{each} names {given}, not {expected}"


def test_docstrings_of_public_names_name_every_parameter() -> None:
    found = [*violations()]
    assert not found, "\n" + "\n".join(found)


def test_dir_shows_all_public_names_and_modules() -> None:
    modules = [each.removeprefix(f"{PACKAGE}.") for each in public_modules() if "." in each]
    shallow = [each for each in modules if "." not in each]
    assert dir(fsdp_compat) == sorted({"__version__", *fsdp_compat.__all__, *shallow})


def test_public_modules_list_their_names_in_order_and_have_them() -> None:
    for module in map(importlib.import_module, public_modules()):
        assert list(module.__all__) == sorted(set(module.__all__)), module
        assert [name for name in module.__all__ if not hasattr(module, name)] == [], module


def test_there_are_few_names_to_look_through() -> None:
    assert len([name for name in dir(fsdp_compat) if not name.startswith("__")]) <= 45
    assert len([*checkpoint.__all__, *checkpoint.files.__all__]) <= 20
