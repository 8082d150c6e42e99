"""``migrate`` on the real sources of client libraries: nothing is written."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

from fsdp_compat._migrate import command
from fsdp_compat._migrate.command import Migrated, rewrite
from tests.clients.launch import CLIENTS

NAMES = (*CLIENTS, "mmengine", "speechbrain", "torchtune")

# Of each client: how many files it has that import torch's FSDP, at least.
USERS = {"accelerate": 5, "lightning": 4, "peft": 1, "transformers": 2, "trl": 3, "torchtune": 2}


def migrated(folder: Path) -> list[Migrated]:
    """Migrate the files of a folder that use FSDP or DDP, without writing."""
    found = []
    for path in command.python_files([str(folder)]):
        text, _ = command.read(path)
        if command.is_of_interest(text):
            found.append(rewrite(text, path))
    return found


def imported(text: str) -> list[tuple[str, str | None]]:
    """Return (module, name) for all imports of fsdp_compat."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
    return [each for each in found if each[0].split(".")[0] == "fsdp_compat"]


@pytest.mark.clients
@pytest.mark.parametrize("client", sorted(NAMES))
def test_sources_are_migrated(client: str) -> None:
    spec = importlib.util.find_spec(client)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the client whose source is migrated")
    results = migrated(Path(spec.submodule_search_locations[0]))
    changed = [each for each in results if each.after != each.before]
    assert len(changed) >= USERS.get(client, 0)
    for each in changed:
        compile(each.after, each.path, "exec", dont_inherit=True)
        assert rewrite(each.after, each.path).after == each.after, each.path
        for module, name in imported(each.after):
            home = importlib.import_module(module)
            if name not in (None, "*") and not hasattr(home, str(name)):
                importlib.import_module(f"{module}.{name}")
    for each in results:  # a private name of torch's FSDP is reported wherever it stays
        stays = [
            number
            for number, line in enumerate(each.after.splitlines(), 1)
            if line.lstrip().startswith(
                ("from torch.distributed.fsdp", "import torch.distributed.fsdp")
            )
        ]
        assert len(stays) <= len(each.left), each.path
