"""Checkpoints of models with tensor parallelism, or of parameters cut along their last dim: each
rank's part, loaded into any other layout, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, checkpoint, fully_shard
from fsdp_compat._front_ends.fully_shard.policies import DataParallelMeshDims
from fsdp_compat.checkpoint import _safetensors_save
from fsdp_compat.errors import FsdpCompatError, StateError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.checkpoint.corpus.content import take_step
from tests.support.cases import about
from tests.support.checkpoints import by_columns, refused, state_of
from tests.support.odd_model import assert_same
from tests.support.ranks import run_ranks
from tests.support.sampling import sample

DIM, HIDDEN = 6, 7  # 7 rows and columns are cut into 4 + 3, or 2 + 2 + 2 + 1
STEP = "step-00000001"
NAMES = ("replicas", "shards", "tp")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)


class Net(nn.Module):
    """Parameters that tensor parallelism cuts by rows, by columns, repeats, and leaves alone. It is
    not called: the state is what counts here."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(DIM, 3, bias=False)
        self.tied = self.stem.bias
        self.register_buffer("count", torch.rand(3))


PLACEMENTS: dict[str, Placement] = {
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
    "down.bias": Replicate(),
    "blocks.0.norm.weight": Replicate(),
    "blocks.0.norm.bias": Replicate(),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A front end on a mesh of (replicas, shards, tensor-parallel ranks)."""

    front_end: str  # "flat", "flat original", "rows", "rows by columns", "rows on the whole mesh"
    replicas: int
    shards: int
    tp: int  # 0: no tensor parallelism

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards * max(self.tp, 1)

    @property
    def has_parts(self) -> bool:
        """Whether some parameters are saved as parts that are no runs of their elements."""
        return bool(self.tp) or self.front_end == "rows by columns"


def build(layout: Layout, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh(
        "cpu", (layout.replicas, layout.shards, max(layout.tp, 1)), mesh_dim_names=NAMES
    )
    on_whole_mesh = layout.front_end == "rows on the whole mesh"
    made: dict[Tensor, nn.Parameter] = {}
    for path, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{key}"
            found = [place for end, place in PLACEMENTS.items() if name.endswith(end)]
            place = (found or [Replicate() if on_whole_mesh else None])[0]
            if layout.tp and place is not None:
                if parameter not in made:
                    where = mesh if on_whole_mesh else mesh["tp"]
                    placements = [Replicate(), Replicate(), place] if on_whole_mesh else [place]
                    value = distribute_tensor(parameter.detach(), where, placements)
                    made[parameter] = nn.Parameter(value)
                setattr(module, key, made[parameter])
    data = mesh["replicas", "shards"] if layout.replicas > 1 else mesh["shards"]
    options: dict[str, Any] = {"mesh": data}
    if on_whole_mesh:
        options = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims("shards", "replicas")}
    if layout.front_end == "rows by columns":
        options["shard_placement_fn"] = by_columns
    if layout.front_end.startswith("rows"):
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
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


def step(optimizer: torch.optim.Optimizer) -> None:
    take_step(optimizer)
    take_step(optimizer)


def reference() -> dict[str, Any]:
    """The model, and the optimizer's states as ``state_of`` names them, without any sharding."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(optimizer)
    return {
        "model": model.state_dict(),
        "states": {
            f"state.{name}.{key}": value
            for name, parameter in model.named_parameters()
            for key, value in optimizer.state[parameter].items()
        },
    }


def assert_whole(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    expected = reference()
    if optimizer is None:
        assert_same(dict(checkpoint.iter_full_state_dict(model)), expected["model"])
    else:
        assert_same(state_of(model, optimizer), {**expected["model"], **expected["states"]})


def _write(folder: str, layout: Layout) -> None:
    model, optimizer = build(layout, seed=0)
    step(optimizer)
    extra = {"rank": dist.get_rank()}
    path = checkpoint.async_save(folder, model, optimizer, extra, step=1).wait()
    assert path == Path(folder) / STEP
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_safetensors_save, "BLOCK_NBYTES", 16)  # a row, or a part of one, at a time
        checkpoint.save_safetensors(Path(folder) / "weights", model)
    assert_whole(model, optimizer)


def _read(folders: list[str], layout: Layout) -> None:
    for folder in folders:
        with about(f"{folder} into {layout}"):
            model, optimizer = build(layout, seed=1)
            extra = checkpoint.load(Path(folder) / STEP, model, optimizer).extra
            num_files = len(list((Path(folder) / STEP).glob("rank-*")))
            assert extra == {"rank": dist.get_rank() if num_files == layout.ranks else 0}
            assert_whole(model, optimizer)
            step(optimizer)
            checkpoint.load_safetensors(Path(folder) / "weights", model)
            assert_whole(model, None)


WRITERS = [
    *(Layout("flat", 1, 2, 2), Layout("flat original", 2, 1, 2), Layout("rows", 1, 2, 2)),
    *(Layout("rows on the whole mesh", 1, 2, 2), Layout("rows", 1, 3, 0), Layout("flat", 1, 1, 2)),
    *(Layout("rows by columns", 2, 2, 0), Layout("rows by columns", 1, 2, 2)),
    Layout("rows by columns", 1, 4, 0),
]
READERS = [
    *(Layout("flat original", 1, 2, 2), Layout("flat", 1, 1, 4), Layout("rows", 2, 1, 2)),
    *(Layout("rows on the whole mesh", 2, 1, 2), Layout("rows", 1, 2, 0)),
    *(Layout("rows", 1, 1, 2), Layout("flat", 1, 1, 0), Layout("rows by columns", 1, 3, 0)),
]


def test_parts_of_any_layout_load_into_any_layout(tmp_path: Path) -> None:
    folders, expected = [], reference()["model"]
    for number, layout in enumerate(sample(WRITERS, 0, 3, 4, 7)):
        folders.append(str(tmp_path / str(number)))
        run_ranks(layout.ranks, _write, folders[-1], layout)
        weights = safetensors.torch.load_file(Path(folders[-1]) / "weights" / "model.safetensors")
        assert_same({**weights, "stem.bias": weights["tied"]}, expected)
        assert_written_once(Path(folders[-1]) / STEP, layout)
    skips = sample((0, 2, 3), 0)
    for number, layout in enumerate(sample(READERS, 3, 0, 7, 4)):  # each writer is read
        chosen = [folders[(number + skip) % len(folders)] for skip in skips]
        run_ranks(layout.ranks, _read, chosen, layout)


def assert_written_once(path: Path, layout: Layout) -> None:
    """Each element is in one file, and only a checkpoint with parts has the second version."""
    numel = 0
    for file in path.glob("rank-*"):
        numel += sum(tensor.numel() for tensor in safetensors.torch.load_file(file).values())
    whole = 3 * sum(parameter.numel() for parameter in Net().parameters())  # with Adam's averages
    assert whole <= numel < 1.4 * whole, (whole, numel)
    content = json.loads((path / "manifest.json").read_text())["content"]
    assert content["version"] == (2 if layout.has_parts else 1)


def _refused(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=NAMES)
    model = nn.Linear(4, 4)
    for key, parameter in list(model.named_parameters()):
        value = DTensor.from_local(parameter.detach(), mesh["tp"], [Partial()])
        setattr(model, key, nn.Parameter(value))
    summed = fully_shard(model, mesh=mesh["shards"])
    whole, _ = build(Layout("flat", 1, 2, 0), seed=1)
    calls = {
        "P(sum) for weight": lambda: checkpoint.save(folder / "new", summed, step=1),
        "placed in this way": lambda: checkpoint.save_safetensors(folder / "new", summed),
        "rank-00001.safetensors": lambda: checkpoint.load(folder / STEP, whole),
    }
    for fact, call in calls.items():
        with refused(FsdpCompatError, fact):
            call()
    assert not (folder / "new").exists()
    model, _ = build(Layout("rows", 1, 1, 2), seed=1)
    if dist.get_rank() == 0:
        with pytest.raises(StateError, match=r"checkpoint\.save"):
            checkpoint.save(folder / "alone", model, step=1)
        assert not (folder / "alone").exists()
    else:
        with pytest.raises(StateError, match="rank 0"):
            checkpoint.save_safetensors(folder / "alone", model)


def test_what_cannot_be_saved_or_loaded_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, _write, str(tmp_path), Layout("rows", 1, 1, 2))
    (tmp_path / STEP / "rank-00001.safetensors").unlink()
    run_ranks(2, _refused, tmp_path)
