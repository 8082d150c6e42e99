"""Random programs over units: frozen parts, checkpoints of both kinds, detached and hidden inputs,
several backwards per step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdp_compat import ShardingStrategy
from tests.support.models import Block, Part, Program, Script
from tests.support.parity import make_pair, no_sync
from tests.support.ranks import run_ranks
from tests.support.sampling import at_most, sample

pytestmark = pytest.mark.slow

SHARD_GRAD_OP = ShardingStrategy.SHARD_GRAD_OP

scripts = st.builds(Script.drawn, st.randoms(use_true_random=False))
STYLES = ["two backwards, one under no_sync", "two backwards", "one backward", "two graphs"]
Step = tuple[str, Script, Script]
steps = st.tuples(st.sampled_from(STYLES), scripts, scripts)


def _take(step: Step, model: Program, x: Tensor) -> Tensor:
    """Take a step of a script, and of a second one that only some styles use."""
    style, script, another = step
    first, second = model(x, script)
    if style == "two graphs":
        second = second + model(x * 0.5, another)[0]
    losses = [loss for loss in (first, second) if loss.requires_grad]
    if not losses:
        return first.detach()
    if "two backwards" in style:
        with no_sync(model if "no_sync" in style else None):
            losses[0].backward(retain_graph=True)
        losses[-1].backward()
    else:
        torch.stack(losses).sum().backward()
    return losses[0].detach()


def _train(programs: list[Step], **options: Any) -> None:
    pair = make_pair(Program, (Part, Block), **options)
    for step in programs:
        pair.step(partial(_take, step), zeros=True)


RUNS: dict[str, dict[str, Any]] = {
    "kept after forward": {"use_orig_params": True, "sharding_strategy": SHARD_GRAD_OP},
    "unused units allowed": {"allow_unused_units": True},
    "replicas": {"num_ranks": 4, "replicas": 2},
    "three ranks": {"num_ranks": 3},
    "one rank": {"num_ranks": 1, "use_orig_params": True},
    "default": {},
    "no prefetch": {"backward_prefetch": None},
}


@pytest.mark.parametrize("name", sample(list(RUNS), *range(5)))
@settings(max_examples=at_most(4, of_all=15))
@given(programs=st.lists(steps, min_size=1, max_size=3))
def test_random_programs_train_as_unsharded(name: str, programs: list[Step]) -> None:
    options = {"num_ranks": 2, **RUNS[name]}
    run_ranks(options.pop("num_ranks"), _train, programs, **options)
