"""What ``install()`` and ``migrate`` know of torch's names, and how functions are replaced."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fsdp_compat
from fsdp_compat._engine.on_import import PatchOnImport
from fsdp_compat._engine.patches import around_functions
from fsdp_compat._front_ends.flat.client_attributes import ClientAttributes
from fsdp_compat._install import contents, private_names
from fsdp_compat._migrate import fsdp_imports


def test_each_private_name_is_installed() -> None:
    gc.collect()  # models of torch's that earlier tests have left
    fsdp_compat.install()
    try:
        for module, rows in contents.PRIVATE.items():
            found = importlib.import_module(f"{fsdp_imports.FSDP}.{module}")
            assert not [name for name in rows if not hasattr(found, name)], module
    finally:
        fsdp_compat.uninstall()


def test_each_private_name_and_attribute_has_readers() -> None:
    listed = [readers for rows in contents.PRIVATE.values() for _, readers in rows.values()]
    for cls, attributes in contents.ATTRIBUTES.items():
        listed += attributes.values()
        missing = [name for name in attributes if not hasattr(cls, name)]
        assert not missing, (cls, missing)
    assert {each for readers in listed for each in readers.split(", ")} == {*contents.READERS}
    attributes = contents.ATTRIBUTES[ClientAttributes]
    private = {name for name in vars(ClientAttributes) if name[0] == "_" and name[1] != "_"}
    assert private == attributes.keys(), "each is listed"


class Output(NamedTuple):
    loss: Tensor
    others: dict[str, Any]


def test_tensors_that_require_grad_are_collected_and_replaced_in_order() -> None:
    first, second, plain = (torch.ones(2, requires_grad=flag) for flag in (True, True, False))
    output = Output(first, {"kept": plain, "states": [second, None, 3]})
    found = private_names.collect_grad_tensors(output)
    assert [id(tensor) for tensor in found] == [id(first), id(second)]
    changed = private_names.replace_grad_tensors(output, iter([second, first]))
    assert isinstance(changed, Output)
    assert changed.loss is second and changed.others["states"][0] is first
    assert changed.others["kept"] is plain
    assert private_names.replace_grad_tensors(output, iter(found)) is output


def test_every_name_that_is_rewritten_exists() -> None:
    """All names that install() provides: each has a home here, or is left alone."""
    rewritten = set()
    for module, found in contents.contents().items():
        for name in found:
            full = ".".join(filter(None, (fsdp_imports.FSDP, module, name)))
            new = fsdp_imports.ours(full)
            if new is not None:
                home, _, last = new.rpartition(".")
                assert last == name and hasattr(importlib.import_module(home), name), full
                rewritten.add(f"{module}.{name}")
    assert {".FullyShardedDataParallel", "wrap._recursive_wrap", "api.StateDictType"} <= rewritten
    assert not any(each.startswith("_runtime_utils") for each in rewritten)


def test_several_changes_of_a_module_are_made_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changed_twice.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def change(name: str) -> PatchOnImport:
        return PatchOnImport("changed_twice", lambda _: made.append(name) or [])  # type: ignore[func-returns-value]

    changes = change("one"), change("other")
    for each in changes:
        each.patch()
    importlib.import_module("changed_twice")
    for each in changes:
        each.undo()
    assert sorted(made) == ["one", "other"]


def test_functions_are_replaced_where_they_were_imported_and_no_module_is_loaded_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "replaced.py").write_text("def double(x): return 2 * x\n")
    (tmp_path / "importer.py").write_text("from replaced import double as twice\n")
    (tmp_path / "not_needed.py").write_text("raise ValueError\n")
    monkeypatch.syspath_prepend(tmp_path)
    replaced, importer = map(importlib.import_module, ("replaced", "importer"))
    spec = importlib.util.find_spec("not_needed")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, "not_needed", lazy)
    before = replaced.double
    (undo,) = around_functions(replaced, {"double": lambda original, x: original(x) + 1})
    assert replaced.double is importer.twice is not before
    assert (importer.twice(3), importer.twice.__name__) == (7, "double")
    later = importlib.reload(importer)
    undo()
    assert replaced.double is later.twice is before
