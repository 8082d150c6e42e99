"""What every checkpoint of the corpus holds: one model after a step of its optimizer, and what is
noted of values.

No value comes from a random generator, and gradients depend on the values alone, so that every
version of torch and every layout computes the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.odd_model import state_by_name

STEP = 1
SETTINGS = ("lr", "betas", "weight_decay")  # of parameter groups
EXTRA = {"epoch": 2, "name": "corpus", "table": torch.arange(4, dtype=torch.int16)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:  # fsdp_compat makes units of what can be called
        return self.up(x)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3, bias=False)
        self.requires_grad_(False)


class Tiny(nn.Module):
    """A tie, a frozen parameter, a 0-d one, two dtypes, 5 rows for 2 ranks, and a float8 and a 0-d
    buffer. It is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.block = Block()
        self.frozen = Frozen()
        self.gain = nn.Parameter(torch.empty(()))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scales", torch.empty(2, 3))
        self.register_buffer("count", torch.tensor(7))
        with torch.no_grad():
            for number, (_, values) in enumerate([*self.named_parameters(), ("", self.scales)]):
                values.copy_(
                    ((torch.arange(values.numel()) * 5 + number) % 13 / 8 - 0.75).view(values.shape)
                )
        self.scales = self.scales.to(torch.float8_e4m3fn)

    def parts(self) -> list[nn.Module]:
        """Return the modules that are sharded by themselves."""
        return [self.block, self.frozen]

    def ignored(self) -> list[nn.Parameter]:
        """Return the parameters that torch's wrappers refuse."""
        return [self.gain]


TIES = {"head.weight": "embed.weight"}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.125)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.25, momentum=0.5)


def rank_local(model: nn.Module) -> torch.optim.Optimizer:
    return RankLocal(model.parameters())


MakesOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakesOptimizer] = {"adam": adam, "sgd": sgd, "rank-local": rank_local}


def take_step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach() * 0.5 + 0.25
    optimizer.step()
    optimizer.zero_grad()


def codes_of(rank: int) -> Tensor:
    return torch.arange(3, dtype=torch.uint8) + rank


class RankLocal(torch.optim.Optimizer):
    """Keeps a tensor of each rank's own, whose shape is not the parameter's, beside a momentum."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__([p for p in parameters if p.requires_grad], {"lr": 0.5})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["momentum"] = parameter.grad.clone()
                if dist.is_initialized():
                    state["codes"] = codes_of(dist.get_rank())
                state["count"] = 1
                parameter.data -= group["lr"] * state["momentum"]


def facts_of(value: Any) -> Any:
    """Return what the table notes of a value: of a tensor its dtype, shape and the SHA-256 of its
    bytes; containers and plain values as they are in JSON."""
    if isinstance(value, Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(bytes(data.tolist())).hexdigest()
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {digest}"
    if isinstance(value, dict):
        return {str(key): facts_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [facts_of(item) for item in value]
    return value


def facts_of_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the table notes of parameter groups."""
    return [
        {key: facts_of(group[key]) for key in (*SETTINGS, "params") if key in group}
        for group in groups
    ]


def unsharded(optimizer_of: MakesOptimizer) -> dict[str, Any]:
    """Return the facts of what checkpoints hold whose optimizers are made by a function."""
    model = Tiny()
    optimizer = optimizer_of(model)
    take_step(optimizer)
    saved = state_by_name(model, optimizer)
    return {
        "model": facts_of(model.state_dict()),
        "optimizer": facts_of(saved["state"]),
        "groups": facts_of_groups(saved["param_groups"]),
    }
