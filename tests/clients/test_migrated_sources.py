"""``migrate`` on the real sources of client libraries."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.tools.program import run
from tests.clients.launch import CLIENTS

NAMES = (*CLIENTS, "mmengine", "speechbrain", "torchtune")

# Of each client: how many files it has that import torch's FSDP, at least.
USERS = {"accelerate": 5, "lightning": 4, "peft": 1, "transformers": 2, "trl": 3, "torchtune": 2}


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
def test_sources_are_migrated(client: str, tmp_path: Path) -> None:
    spec = importlib.util.find_spec(client)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the client whose source is migrated")
    folder = Path(shutil.copytree(spec.submodule_search_locations[0], tmp_path / client))
    before = {path: path.read_bytes() for path in folder.rglob("*.py")}
    printed = run("migrate", "--write", folder).stdout.splitlines()
    after = {path: path.read_bytes() for path in before}
    changed = [path for path in before if after[path] != before[path]]
    assert len(changed) >= USERS.get(client, 0)
    run("migrate", "--write", folder)
    assert {path: path.read_bytes() for path in before} == after, "nothing is rewritten again"
    for path in changed:
        compile(after[path], path, "exec", dont_inherit=True)
        for module, name in imported(after[path].decode()):
            home = importlib.import_module(module)
            if name not in (None, "*") and not hasattr(home, str(name)):
                importlib.import_module(f"{module}.{name}")
    for path, content in after.items():  # a private name of torch's FSDP is reported where it stays
        lines = map(bytes.lstrip, content.splitlines())
        stays = (b"from torch.distributed.fsdp", b"import torch.distributed.fsdp")
        num_left = sum(line.startswith(f"left: {path}:") for line in printed)
        assert sum(line.startswith(stays) for line in lines) <= num_left, path
