"""What recipes of the pages in examples/ compute; test_readme.py runs all of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fsdp_compat import checkpoint
from tests.examples.test_readme import START, blocks, run
from tests.support.ranks import run_ranks

LOST = "A worker or a node that is lost"
UNEVEN = "Uneven batches"
ENGINE = "Weights for an inference engine"


def run_recipe(recipe: str, directory: str | Path) -> dict[str, Any]:
    """Run a recipe after the program that it continues, in a directory; return its names."""
    os.chdir(directory)
    names: dict[str, Any] = {}
    run(START, names)
    run(recipe, names)
    return names


def _elastic(directory: Path) -> tuple[int, dict[str, Tensor]]:
    """Return the step that the recipe goes on from, and the parameters at its end."""
    (recipe,) = blocks("examples/README.md", "python", LOST)
    names = run_recipe(recipe, directory)
    return names["done"], dict(checkpoint.iter_full_state_dict(names["model"]))


def test_the_elastic_recipe_does_not_depend_on_what_was_lost(tmp_path: Path) -> None:
    (begun, expected), _ = run_ranks(2, _elastic, tmp_path)
    shutil.rmtree(tmp_path / "runs/9/step-00000010")  # as if it was lost in step 6 to 10
    for done, found in run_ranks(3, _elastic, tmp_path):
        assert (begun, done) == (0, 5)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def _uneven(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters of the recipe, and of one process that takes the batches there are."""
    (recipe,) = blocks("examples/README.md", "python", UNEVEN)
    trained = run_recipe(recipe, directory)
    net = run_recipe("", directory)["net"]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    batches = [torch.randn(5, 8, 32, generator=each) for each in generators]
    for step in range(5):
        losses = [
            F.mse_loss(net(x), x) for x in (batch[step] for batch in batches[: 2 - step // 3])
        ]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = checkpoint.iter_full_state_dict(trained["model"])
    return dict(found), net.state_dict()


def test_uneven_batches_train_as_the_batches_there_are(tmp_path: Path) -> None:
    for found, expected in run_ranks(2, _uneven, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def _no_batch(directory: Path) -> list[float]:
    (recipe,) = blocks("examples/README.md", "python", UNEVEN)
    steps = run_recipe(recipe, directory)["even_steps"](range(3 * dist.get_rank()), "any")
    return [weight for batch, weight in steps if batch == "any" or weight]


def test_a_rank_without_batches_gets_the_one_that_it_passes(tmp_path: Path) -> None:
    assert run_ranks(2, _no_batch, tmp_path) == [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]]


def _received(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    (recipe,) = blocks("examples/CHECKPOINTS.md", "python", ENGINE)
    return run_recipe(recipe, directory)["received"], run_recipe("", directory)["net"].state_dict()


def test_an_inference_engine_receives_the_weights_bit_by_bit(tmp_path: Path) -> None:
    for found, values in run_ranks(2, _received, tmp_path):
        expected = {name: value.bfloat16() for name, value in values.items()}
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _buckets(directory: Path) -> list[tuple[list[str], int, bool]]:
    (recipe,) = blocks("examples/CHECKPOINTS.md", "python", ENGINE)
    names = run_recipe(recipe, directory)
    odd = {
        "flag": torch.tensor(True),
        "half": torch.arange(3).half(),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "columns": torch.arange(6.0).view(2, 3).T,
        "large": torch.ones(30),
    }
    found = []
    for about, values in names["buckets"](odd.items(), 40):
        received = dict(names["unpack"](about, values))
        same = all(torch.equal(value, odd[name]) for name, value in received.items())
        found.append((list(received), values.numel(), same))
    return found


def test_buckets_hold_tensors_of_any_dtype_and_shape(tmp_path: Path) -> None:
    ((*first, last),) = run_ranks(1, _buckets, tmp_path)
    assert first == [(["flag", "half", "count", "none", "columns"], 1 + 6 + 8 + 24, True)]
    assert last == (["large"], 120, True)
