"""auto_wrap_policy="auto" and class names: which blocks they find, and what they warn of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import UsageError, plan
from tests.support.models import Block, Inner, chain
from tests.support.parity import units_of
from tests.support.ranks import on_ranks


class Heads(nn.Module):
    """A transformer layer, in outline: it repeats heads, which are no units of their own."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for head in self.heads:
            x = head(x)
        return self.mlp(x)


class Stage(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Heads(dim) for _ in range(2))


def listed(*makes: Callable[[], nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(make() for make in makes)


two = partial(listed, Heads, Heads)
of_stages = ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"]
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a list": (partial(chain, partial(nn.Linear, 4, 4), two), ["1.0", "1.1"]),
    "a sequence": (partial(chain, Heads, Heads, Heads), ["0", "1", "2"]),
    "a dict": (lambda: nn.ModuleDict({"a": Heads(), "b": Heads()}), ["a", "b"]),
    "classes in turn": (partial(listed, Block, Inner, Block, Inner), ["0", "1", "2", "3"]),
    "several lists": (partial(chain, two, two), ["0.0", "0.1", "1.0", "1.1"]),
    "stages that differ much": (partial(chain, *(partial(Stage, n) for n in (4, 16))), of_stages),
    "stages that are alike": (partial(chain, *(partial(Stage, 4),) * 2), ["0", "1"]),
    "no submodules": (partial(chain, *(partial(nn.Linear, 4, 4),) * 2), []),
    "one layer": (Heads, []),
    "a list of one": (partial(listed, Heads), []),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", MODELS)
@on_ranks(1)
def test_blocks_are_siblings_of_one_class_with_submodules(case: str) -> None:
    make, expected = MODELS[case]
    assert list(units_of(FSDP(make(), auto_wrap_policy="auto"))) == ["", *expected]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["auto"], ["1.0", "1.1"]),
        ("Heads", ["1.0", "1.1"]),
        ({"Heads", "Sequential"}, ["1.0", "1.0.mlp", "1.1", "1.1.mlp"]),
    ],
)
@on_ranks(1)
def test_names_and_auto_in_a_list_are_a_policy(given: Any, expected: list[str]) -> None:
    model = chain(partial(nn.Linear, 4, 4), two)
    assert list(units_of(FSDP(model, auto_wrap_policy=given))) == ["", *expected]


@on_ranks(1)
def test_name_that_no_module_has_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UsageError) as raised:
        FSDP(chain(Heads, Heads), auto_wrap_policy="Head")
    for fact in ("'Head'", "wrapping a Sequential", "nearest names, Heads", "repeats Heads"):
        assert fact in str(raised.value)


def test_one_unit_with_most_parameters_of_a_large_model_is_warned_of() -> None:
    with torch.device("meta"):
        model, small = chain(*[partial(Heads, 3500)] * 4), chain(*[partial(Heads, 2800)] * 4)
        embedding = chain(partial(nn.Embedding, 25_000, 2600), *[partial(Heads, 2600)] * 2)
    numels = [sum(p.numel() for p in each.parameters()) for each in (model, small, embedding)]
    assert numels == [147_042_000, 94_113_600, 105_575_600]
    batch = torch.empty(1, 3500)
    with pytest.warns(UserWarning, match=r'holds 100% of .* repeats Heads: pass .*="auto"'):
        plan(model, 2, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(model, 2, batch, auto_wrap_policy="auto")
        plan(small, 2, torch.empty(1, 2800))
        plan(embedding, 2, torch.ones(1, dtype=torch.int64), auto_wrap_policy="auto")
