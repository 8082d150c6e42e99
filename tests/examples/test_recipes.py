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


def _uneven(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Return the parameters of the recipe, and of one process that takes the batches there are; and
    the weights on a rank without a batch, or with three."""
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
    found = dict(checkpoint.iter_full_state_dict(trained["model"]))
    steps = trained["even_steps"](range(3 * dist.get_rank()), "any")
    weights = [weight for batch, weight in steps if batch == "any" or weight]
    return found, net.state_dict(), weights


def test_uneven_batches_train_as_the_batches_there_are(tmp_path: Path) -> None:
    results = run_ranks(2, _uneven, tmp_path)
    for found, expected, _ in results:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert [weights for *_, weights in results] == [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]]


ODD = {
    "flag": torch.tensor(True),
    "half": torch.arange(3).half(),
    "count": torch.tensor(7),
    "none": torch.zeros(0, 3),
    "columns": torch.arange(6.0).view(2, 3).T,
    "large": torch.ones(30),
}


def _received(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
    """Return what the engine receives, the values, and what buckets of 40 bytes hold of ODD."""
    (recipe,) = blocks("examples/CHECKPOINTS.md", "python", ENGINE)
    names, buckets = run_recipe(recipe, directory), []
    for about, values in names["buckets"](ODD.items(), 40):
        received = dict(names["unpack"](about, values))
        assert all(torch.equal(value, ODD[name]) for name, value in received.items())
        buckets.append(([*received], values.numel()))
    return names["received"], run_recipe("", directory)["net"].state_dict(), buckets


def test_an_inference_engine_receives_the_weights_in_buckets_bit_by_bit(tmp_path: Path) -> None:
    for found, values, buckets in run_ranks(2, _received, tmp_path):
        expected = {name: value.bfloat16() for name, value in values.items()}
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        small = ["flag", "half", "count", "none", "columns"]
        assert buckets == [(small, 1 + 6 + 8 + 24), (["large"], 120)]
