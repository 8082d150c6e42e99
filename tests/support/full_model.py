"""A model with everything that can be in a state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.odd_model import wrap_as


class Block(nn.Module):
    """A 0-d parameter, buffers, one of which is not contiguous and one not saved, and extra
    state."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.register_buffer("grid", torch.randn(2, 3).t())
        self.note = "made"

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.norm(self.linear(x))

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


class Model(nn.Module):
    """Ties, shared modules, one of which is a unit, two dtypes, ignored, frozen, 0-d and empty
    parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.Sequential(Block(5), Block(5))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.first = nn.Linear(5, 5)
        self.second = self.first
        self.wide = nn.Linear(2, 3, bias=False).double()
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.ignored = nn.Linear(2, 2)
        self.same = self.blocks[0]

    def forward(self, tokens: Tensor) -> Tensor:  # [batch] -> [batch, 7]
        x = self.second(self.first(self.blocks(self.embed(tokens))))
        return (
            self.head(x)
            + self.frozen.sum()
            + self.wide(torch.ones(2).double()).sum().float()
            + self.nothing.sum()
        )


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def shard(
    model: nn.Module,
    strategy: str = "FULL_SHARD",
    use_orig_params: bool = False,
    policy: str = "blocks",
    **options: Any,
) -> FSDP:
    options.setdefault("ignored_modules", [model.ignored])
    return wrap_as((strategy, use_orig_params, policy), model, {Block}, **options)
