"""Checkpoints of models with tensor parallelism: each rank's part, loaded into any other layout, bit
for bit."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, StateDictType, checkpoint, fully_shard
from fsdp_compat.errors import CheckpointError, UsageError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.odd_model import assert_same, assert_same_optim
from tests.support.ranks import run_ranks

DIM, HIDDEN = 6, 7  # 7 rows and columns are cut into 4 + 3, or 2 + 2 + 2 + 1
STEP = "step-00000001"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, HIDDEN),
            nn.Linear(HIDDEN, DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Parameters that tensor parallelism cuts by rows, by columns, repeats, and leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(DIM, 3, bias=False)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A front end on a mesh of (replicas, shards, tensor-parallel ranks)."""

    front_end: str  # "flat", "flat original" or "rows"
    replicas: int
    shards: int
    tp: int  # 0: no tensor parallelism

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards * max(self.tp, 1)


def build(layout: Layout, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    sizes = (layout.replicas, layout.shards, max(layout.tp, 1))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards", "tp"))
    if layout.tp:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        _repeat(model.blocks[0].norm, mesh["tp"])
    data = mesh["replicas", "shards"] if layout.replicas > 1 else mesh["shards"]
    if layout.front_end == "rows":
        for block in model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    else:
        hybrid = layout.replicas > 1
        model = FSDP(
            model,
            device_mesh=data,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD if hybrid else None,
            auto_wrap_policy=ModuleWrapPolicy({Mlp}),
            use_orig_params=layout.front_end == "flat original",
        )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _repeat(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let the parameters of a module be DTensors that every rank holds whole."""
    distribute_module(
        module,
        mesh,
        input_fn=lambda _, args, mesh: DTensor.from_local(args[0], mesh, [Replicate()]),
        output_fn=lambda _, output, mesh: output.to_local(),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    data = dist.get_rank() // max(layout.tp, 1)
    for step in range(2):
        x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(10 * step + data))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        optim = FSDP.optim_state_dict(model, optimizer)
        full = {name: value.clone() for name, value in model.state_dict().items()}
    weights = dict(checkpoint.iter_full_state_dict(model))
    if not any(isinstance(value, DTensor) for value in full.values()):
        assert_same(weights, full)
    return {"model": weights, "optim": optim}


def _write(folder: str, layout: Layout) -> dict[str, Any]:
    model, optimizer = build(layout, seed=0)
    train(model, optimizer, layout)
    path = checkpoint.save(folder, model, optimizer, {"rank": dist.get_rank()}, step=1)
    assert path == Path(folder) / STEP
    checkpoint.save_safetensors(Path(folder) / "weights", model)
    return whole_state(model, optimizer)


def _read(folders: list[str], layout: Layout, expected: list[Any]) -> None:
    for folder, state in zip(folders, expected, strict=True):
        with about(f"{folder} into {layout}"):
            model, optimizer = build(layout, seed=1)
            extra = checkpoint.load(Path(folder) / STEP, model, optimizer)
            num_files = len(list((Path(folder) / STEP).glob("rank-*")))
            assert extra == {"rank": dist.get_rank() if num_files == layout.ranks else 0}
            found = whole_state(model, optimizer)
            assert_same(found["model"], state["model"])
            assert_same_optim(found["optim"], state["optim"])
            train(model, optimizer, layout)
            other, _ = build(layout, seed=2)
            checkpoint.load_safetensors(Path(folder) / "weights", other)
            assert_same(dict(checkpoint.iter_full_state_dict(other)), state["model"])


WRITERS = [
    Layout("flat", 1, 2, 2),
    Layout("flat original", 2, 1, 2),
    Layout("rows", 1, 2, 2),
    Layout("rows", 1, 1, 4),
    Layout("rows", 1, 3, 0),
    Layout("flat", 1, 1, 2),
]
READERS = [
    Layout("flat original", 1, 2, 2),
    Layout("flat", 1, 1, 4),
    Layout("rows", 2, 1, 2),
    Layout("rows", 1, 2, 0),
    Layout("rows", 1, 1, 2),
    Layout("flat", 1, 3, 0),
    Layout("flat", 1, 1, 0),
]


def test_parts_of_any_layout_load_into_any_layout(tmp_path: Path) -> None:
    folders, states = [], []
    for number, layout in enumerate(WRITERS):
        folders.append(str(tmp_path / str(number)))
        states.append(run_ranks(layout.ranks, _write, folders[-1], layout)[0])
        weights = safetensors.torch.load_file(Path(folders[-1]) / "weights" / "model.safetensors")
        assert_same({name: weights[name] for name in states[-1]["model"]}, states[-1]["model"])
        assert_written_once(Path(folders[-1]) / STEP, layout, states[-1]["model"])
    for layout in READERS:
        run_ranks(layout.ranks, _read, folders, layout, states)


def assert_written_once(path: Path, layout: Layout, weights: dict[str, Tensor]) -> None:
    """Each element is in one file, and only a checkpoint with parts has the second version."""
    numel = 0
    for file in path.glob("rank-*"):
        with safetensors.safe_open(str(file), "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                is_state = "exp_avg" in key or key.startswith("other")
                numel += 0 if is_state else opened.get_tensor(key).numel()
    whole = sum(math.prod(value.shape) for name, value in weights.items() if name != "count")
    assert whole <= numel < 1.5 * whole, (whole, numel)
    content = json.loads((path / "manifest.json").read_text())["content"]
    assert content["version"] == (2 if layout.tp else 1)
