"""The package works without the folder ``_comm/same_host`` where values are sent, as they are with
FSDP_COMPAT_SAME_HOST=messages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.programs import ROOT, python
from tests.support.same_host import MESSAGES
from tests.support.time_limit import limit_s

SELECTED = (
    "comm/test_deadlock.py::test_message_that_is_under_way_when_its_connection_closes_fails",
    "engine/test_reduce.py",
    "engine/test_counts.py::test_gloo_sends_every_value_once_to_each_peer",
)


@pytest.mark.slow
def test_ranks_that_send_values_need_no_folder_for_ranks_of_one_host(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "same_host", "corpus")
    shutil.copytree(ROOT / "fsdp_compat", tmp_path / "fsdp_compat", ignore=ignored)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=ignored)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    paths = [f"tests/{each}" for each in SELECTED]
    environment = {**MESSAGES, "PYTHONPATH": str(tmp_path)}
    python("-m", "pytest", "-q", "-x", *paths, folder=tmp_path, timeout=limit_s(300), **environment)
