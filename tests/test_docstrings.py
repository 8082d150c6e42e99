"""The public names: listed in order, few, and with docstrings that are contracts in one style: a
summary line, text, `Collective:` where ranks have to call together, and sections of Google's style
that name every parameter.

Short ones need no sections. Without any, a docstring names each parameter in ``backticks``, or its
class does so for all of its methods, or it points to a callable that has the parameter: "as ``X``"
or "see ``X``", of the package, or a method of nn.Module by its full name."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import fsdp_compat
from fsdp_compat import checkpoint
from tests.support.public_api import PACKAGE, members_of, public_modules, public_objects

SECTIONS = ["Args", "Attributes", "Returns", "Yields", "Raises"]  # in this order
NOTHING = ("None", "NoReturn", "Generator[None, None, None]", "Iterator[None]")


def sections(doc: str) -> dict[str, str]:
    """Return the lines below each heading of a docstring, without those of indented blocks."""
    parts = re.split(r"^([A-Z][a-z]+):$\n", doc, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def items(section: str) -> list[str]:
    return re.findall(r"^ {4}(\*{0,2}\w+): \S", section, flags=re.MULTILINE)


def parameters(function: Any) -> list[str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    given = inspect.signature(function).parameters.values()
    return [stars.get(p.kind, "") + p.name for p in given if p.name not in ("self", "cls")]


def of_text(doc: str) -> Iterator[str]:
    """Yield what is wrong with a docstring, whatever it belongs to."""
    if not doc:
        yield "has none"
        return
    if not re.match(r"\S[^\n]*\.(\n\n|$)", doc):
        yield "begin with one sentence on a line of its own, followed by an empty line"
    headings = [*sections(doc)]
    if headings != [each for each in SECTIONS if each in headings]:
        yield f"has sections {headings}, not some of {SECTIONS} in this order"
    for paragraph in re.split(r"\n\s*\n", doc):
        is_form = re.match(r"Collective: all ranks of \S.*\.$", paragraph, flags=re.DOTALL)
        if re.search(r"\bCollective\b|\bis collective\b", paragraph) and not is_form:
            yield "write a paragraph 'Collective: all ranks of ... .'"
    if re.search(r"\bRaises \w*Error\b", doc):
        yield "write a section Raises"


def pointed_to(doc: str) -> Iterator[Any]:
    """Yield the callables behind "as ``X``" and "see ``X``": public names, or of nn.Module."""
    for name in re.findall(r"\b(?:[Aa]s|[Ss]ee)\s+``([\w.]+)``", doc):
        if name.startswith("nn.Module."):
            yield getattr(nn.Module, name.removeprefix("nn.Module."))
        for place, value in callables():
            if f".{place}".endswith(f".{name}"):
                yield value


@functools.cache
def callables() -> list[tuple[str, Any]]:
    found = public_objects()
    for name, value in public_objects():
        if inspect.isclass(value):
            found += [(f"{name}.{each}", member) for each, member in members_of(value)]
    return [(name, inspect.unwrap(each)) for name, each in found if inspect.isroutine(each)]


def is_named(parameter: str, doc: str, class_doc: str, targets: list[Any]) -> bool:
    name = parameter.strip("*")
    text = doc + class_doc.partition("\nArgs:")[0]
    in_text = any(re.search(rf"\b{name}\b", code) for code in re.findall("``([^`]+)``", text))
    return in_text or any(parameter in parameters(target) for target in targets)


def of_function(function: Any, doc: str, class_doc: str = "") -> Iterator[str]:
    found = sections(doc)
    if isinstance(function, property):
        if "Args" in found:
            yield "a property has no Args"
        return
    expected, given, targets = parameters(function), items(found.get("Args", "")), []
    if not found:
        targets = [each for each in pointed_to(doc) if each is not inspect.unwrap(function)]
        given = [each for each in expected if is_named(each, doc, class_doc, targets)]
    if given != expected:
        yield f"Args are {given}, not {expected}"
    result = inspect.signature(function).return_annotation
    is_said = {"Returns", "Yields"} & {*found} or doc.startswith(("Return ", "Yield ")) or targets
    if str(result).removeprefix("typing.") not in NOTHING and not is_said:
        yield f"say what is returned, {result}"


def of_class(cls: Any, doc: str) -> Iterator[str]:
    found = sections(doc)
    given = items(found.get("Args", "") + found.get("Attributes", ""))
    if issubclass(cls, enum.Enum):
        if given != [*cls.__members__]:
            yield f"Attributes are {given}, not {[*cls.__members__]}"
    elif dataclasses.is_dataclass(cls):
        fields = [field.name for field in dataclasses.fields(cls)]
        own = [each for each in fields if each in vars(cls).get("__annotations__", {})]
        if given != own:
            yield f"Attributes are {given}, not {own}"
    else:
        own_init = vars(cls).get("__init__")
        expected = parameters(inspect.unwrap(own_init)) if own_init else []
        args = items(found.get("Args", ""))
        if not found:
            args = [each for each in expected if is_named(each, doc, "", [])]
        if args != expected:
            yield f"Args are {args}, not {expected}"


def violations() -> Iterator[str]:
    """Yield what is wrong, each with the place of the docstring and its public name."""
    for name in public_modules():
        doc = inspect.cleandoc(importlib.import_module(name).__doc__ or "")
        yield from (f"{name}: {what}" for what in of_text(doc))
    for name, value in public_objects():
        named = [(name, value)]
        if inspect.isclass(value):
            named += [(f"{name}.{member}", function) for member, function in members_of(value)]
        for each, member in named:
            function = member.fget if isinstance(member, property) else inspect.unwrap(member)
            module = getattr(function, "__module__", None) or value.__module__
            doc, class_doc = inspect.cleandoc(member.__doc__ or ""), ""
            if inspect.isclass(value):
                class_doc = inspect.cleandoc(value.__doc__ or "")
            is_class = inspect.isclass(member)
            check = of_class(member, doc) if is_class else of_function(member, doc, class_doc)
            for what in (*of_text(doc), *(check if doc else ())):
                yield f"{module}: {each}: {what}"


def test_docstrings_of_public_names_are_in_one_style() -> None:
    found = sorted({*violations()})
    assert not found, "\n" + "\n".join(found)


def test_dir_shows_all_public_names_and_modules() -> None:
    modules = [each.removeprefix(f"{PACKAGE}.") for each in public_modules() if "." in each]
    shallow = [each for each in modules if "." not in each]
    assert dir(fsdp_compat) == sorted({"__version__", *fsdp_compat.__all__, *shallow})


@pytest.mark.parametrize("name", public_modules())
def test_a_public_module_lists_its_names_in_order_and_has_them(name: str) -> None:
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(set(module.__all__))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_there_are_few_names_to_look_through() -> None:
    assert len([name for name in dir(fsdp_compat) if not name.startswith("__")]) <= 45
    assert len([*checkpoint.__all__, *checkpoint.files.__all__]) <= 20
