"""The examples with client libraries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.launch import INSTALLED, ROOT, TORCHRUN, marks, start

pytestmark = marks


def example(name: str, *arguments: str | Path) -> str:
    return start(*TORCHRUN, *INSTALLED, ROOT / "examples" / name, *arguments)


@pytest.mark.parametrize("version", ["1", "2"])
def test_trainer_resumes(tmp_path: Path, version: str) -> None:
    options = ("--folder", tmp_path, "--fsdp-version", version)
    example("trainer.py", *options, "--steps", "10")
    resumed = example("trainer.py", *options, "--steps", "20", "--resume")
    found = re.findall(r"trained for 20 steps: loss (\S+)", resumed)
    assert len(found) == 1 and float(found[0]) < 4.5, resumed  # a uniform guess has 5.5


def test_accelerate_lora(tmp_path: Path) -> None:
    printed = example("accelerate_lora.py", "--folder", tmp_path, "--steps", "10")
    found = re.findall(r"sharded (\S+), the adapter in a whole model (\S+)", printed)
    assert len(found) == 1 and found[0][0] == found[0][1], printed
