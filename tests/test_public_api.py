"""The public names: listed in order, importable, with a docstring that is a contract and with type
hints."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fsdp_compat
from fsdp_compat import checkpoint
from tests.support.public_api import public_modules, public_objects


def functions_of(name: str, value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield ``value``, or the public methods and constructor that a class itself defines."""
    if not inspect.isclass(value):
        yield name, inspect.unwrap(value)
        return
    generated = dataclasses.is_dataclass(value) or issubclass(value, enum.Enum)
    for member_name, member in vars(value).items():
        if isinstance(member, property):
            member = member.fget
        member = getattr(member, "__func__", member)  # a staticmethod or classmethod
        shown = not member_name.startswith("_") or (
            member_name in ("__init__", "__call__") and not generated
        )
        if shown and inspect.isfunction(member):
            yield f"{name}.{member_name}", inspect.unwrap(member)


def by_object(check: Callable[..., None]) -> Callable[..., None]:
    objects = public_objects()
    names = [name for name, _ in objects]
    return pytest.mark.parametrize(("name", "value"), objects, ids=names)(check)


@pytest.mark.parametrize("name", public_modules())
def test_a_public_module_lists_its_names_in_order_and_has_them(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, "a module says in its docstring what it is for"
    assert list(module.__all__) == sorted(set(module.__all__))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@by_object
def test_public_objects_and_methods_have_docstrings_of_their_own(name: str, value: Any) -> None:
    doc = (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
    generated = dataclasses.is_dataclass(value) and doc.startswith(f"{value.__name__}(")
    assert doc.strip() and not generated, f"{name}: write what it promises, one sentence first"
    bare = [
        method
        for method, function in functions_of(name, value)
        if not method.endswith(("__init__", "__call__")) and not inspect.getdoc(function)
    ]
    assert bare == []


@by_object
def test_public_objects_have_type_hints(name: str, value: Any) -> None:
    bare = []
    for function_name, function in functions_of(name, value):
        signature = inspect.signature(function)
        if signature.return_annotation is inspect.Signature.empty:
            bare.append(f"{function_name} -> ?")
        bare += [
            f"{function_name}({parameter.name}: ?)"
            for index, parameter in enumerate(signature.parameters.values())
            if parameter.annotation is inspect.Parameter.empty
            and not (index == 0 and parameter.name in ("self", "cls"))
        ]
    assert bare == []


def test_there_are_few_names_to_look_through() -> None:
    assert len([name for name in dir(fsdp_compat) if not name.startswith("__")]) <= 45
    assert len([*checkpoint.__all__, *checkpoint.files.__all__]) <= 20
