"""What ``install()`` and ``migrate`` know of torch's names, and how functions are replaced."""

from __future__ import annotations

import gc
import importlib
import importlib.util

import fsdp_compat
from fsdp_compat._install import contents
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
