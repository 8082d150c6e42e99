"""The recipes of examples/README.md that need transformers, and PEFT."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.clients.launch import CLIENTS, needs
from tests.examples.test_readme import blocks
from tests.examples.test_recipes import run_recipe
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.clients, needs("clients", "transformers")]


def _train_and_export(directory: str) -> list[str]:
    (recipe,) = blocks("examples/README.md", "python", "A Transformers model")
    names = run_recipe(recipe, directory)
    assert names["text"].shape == (4, 12)
    return sorted(os.listdir("runs/llama"))


def test_a_trained_model_is_one_that_from_pretrained_loads(tmp_path: Path) -> None:
    files = run_ranks(2, _train_and_export, str(tmp_path), timeout=120)
    assert files == [["config.json", "model.safetensors"]] * 2


def _train_adapter(directory: str) -> int:
    (recipe,) = blocks("examples/README.md", "python", "LoRA")
    run_recipe(recipe, directory)["dist"].barrier()
    from safetensors.torch import load_file

    return len(load_file("runs/lora/adapter_model.safetensors"))


@needs("clients", *CLIENTS)  # the PEFT of the extra "managers" refuses its torchao
def test_an_adapter_is_saved_whole_without_install(tmp_path: Path) -> None:
    assert run_ranks(2, _train_adapter, str(tmp_path), timeout=120) == [8, 8]
