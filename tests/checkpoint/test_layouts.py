"""Checkpoints of models that are sharded in any way, on any ranks, load into models that are
sharded in any other way, bit for bit and without any communication of values."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
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
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_compat import DataParallelMeshDims, ShardingStrategy, checkpoint, fully_shard
from fsdp_compat.errors import FsdpCompatError, StateError
from tests.checkpoint.corpus.content import take_step
from tests.support.cases import about
from tests.support.checkpoints import (
    Toy,
    by_columns,
    ours_fsdp1,
    ours_fully_shard,
    refused,
    sharded,
    state_of,
    unsharded,
)
from tests.support.odd_model import assert_same, whole
from tests.support.optimizer_state import assert_compact, num_sent
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import sample

STEP = "step-00000001"
NAMES = ("replicas", "shards", "tp")
PLACEMENTS: dict[str, Placement] = {  # of what tensor parallelism cuts or repeats
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
    "cube": Replicate(),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A front end on a mesh of (replicas, shards, tensor-parallel ranks)."""

    front_end: str  # "flat", "original", "rows", "columns", "rows on the whole mesh"
    replicas: int
    shards: int
    tp: int = 0  # 0: no tensor parallelism
    strategy: str = "FULL_SHARD"  # without replicas

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards * max(self.tp, 1)

    @property
    def is_flat(self) -> bool:
        return self.front_end in ("flat", "original")

    @property
    def has_parts(self) -> bool:
        """Whether some parameters are saved as parts that are no runs of their elements."""
        return bool(self.tp) or self.front_end == "columns"


def build(layout: Layout) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = unsharded()
    sizes = layout.replicas, layout.shards, max(layout.tp, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES)
    on_whole_mesh = layout.front_end == "rows on the whole mesh"
    made: dict[Tensor, nn.Parameter] = {}  # a tie stays one
    for path, module in [*model.named_modules()] if layout.tp else ():
        for key, parameter in [*module.named_parameters(recurse=False)]:
            name = f"{path}.{key}"
            own = [place for end, place in PLACEMENTS.items() if name.endswith(end)]
            if not (own or on_whole_mesh):
                continue
            where = mesh if on_whole_mesh else mesh["tp"]
            placements = [Replicate(), Replicate(), *(own or [Replicate()])][-where.ndim :]
            if parameter not in made:
                value = distribute_tensor(parameter.detach(), where, placements)
                made[parameter] = nn.Parameter(value)
            setattr(module, key, made[parameter])
    data = mesh["replicas", "shards"] if layout.replicas > 1 else mesh["shards"]
    if on_whole_mesh:
        dims = DataParallelMeshDims("shards", "replicas")
        model = ours_fully_shard(model, mesh, dp_mesh_dims=dims)
    elif layout.front_end in ("rows", "columns"):
        options = {"shard_placement_fn": by_columns} if layout.front_end == "columns" else {}
        model = ours_fully_shard(model, data, **options)
    else:
        name = "HYBRID_SHARD" if layout.replicas > 1 else layout.strategy
        strategy, original = ShardingStrategy[name], layout.front_end == "original"
        options = {"sharding_strategy": strategy, "use_orig_params": original}
        model = ours_fsdp1(model, device_mesh=data, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def lose(model: nn.Module) -> None:
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()


@functools.cache
def reference(num_steps: int) -> dict[str, Tensor]:
    """The model and the optimizer's states, as ``state_of`` names them, without any sharding."""
    model = unsharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        take_step(optimizer)
    states = {
        f"state.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return {**model.state_dict(), **states}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(checkpoint.iter_full_state_dict(model))


def sent(model: nn.Module, layout: Layout) -> int:
    return num_sent(model) if layout.is_flat else 0


def _write(folder: Path, layout: Layout, max_file_size: int) -> None:
    model, optimizer = build(layout)
    take_step(optimizer)
    take_step(optimizer)
    extra, before = {"rank": dist.get_rank()}, sent(model, layout)
    path = checkpoint.async_save(folder, model, optimizer, extra, step=1).wait()
    files = checkpoint.save_safetensors(folder / "weights", model, max_file_size=max_file_size)
    assert sent(model, layout) == before
    assert path == folder / STEP
    assert sorted(files) == sorted((folder / "weights").iterdir())
    assert_same(state_of(model, optimizer), reference(2))


def _read(folders: list[Path], layout: Layout) -> None:
    for folder in folders:
        with about(f"{folder} into {layout}"):
            model, optimizer = build(layout)
            optimizer.param_groups[0]["lr"] = 7.0
            lose(model)
            before = sent(model, layout)
            extra = checkpoint.load(folder / STEP, model, optimizer).extra
            assert sent(model, layout) == before
            num_files = len(list((folder / STEP).glob("rank-*")))
            assert extra == {"rank": dist.get_rank() if num_files == layout.ranks else 0}
            assert_compact(optimizer.state) if layout.is_flat else None
            take_step(optimizer)
            assert_same(state_of(model, optimizer), reference(3))
            assert checkpoint.load_safetensors(folder / "weights", model).is_complete
            expected = reference(2)
            assert_same(
                weights_of(model), {name: expected[name] for name in unsharded().state_dict()}
            )


WRITERS = [
    *(Layout("flat", 1, 2, 2), Layout("original", 2, 1, 2), Layout("rows", 1, 2, 2)),
    *(Layout("rows on the whole mesh", 1, 2, 2), Layout("rows", 1, 3), Layout("flat", 1, 1, 2)),
    *(Layout("columns", 2, 2), Layout("columns", 1, 2, 2), Layout("columns", 1, 4)),
    *(Layout("original", 1, 3, 0, "SHARD_GRAD_OP"), Layout("flat", 2, 2), Layout("original", 2, 2)),
    *(Layout("flat", 1, 2, 0, "NO_SHARD"), Layout("flat", 1, 3), Layout("original", 1, 1)),
]
READERS = [
    *(Layout("original", 1, 2, 2), Layout("flat", 1, 1, 4), Layout("rows", 2, 1, 2)),
    *(Layout("rows on the whole mesh", 2, 1, 2), Layout("rows", 1, 2), Layout("rows", 1, 1, 2)),
    *(Layout("flat", 1, 1), Layout("columns", 1, 3), Layout("original", 1, 3)),
    *(Layout("original", 2, 2), Layout("flat", 1, 3, 0, "SHARD_GRAD_OP"), Layout("flat", 2, 2)),
    Layout("original", 1, 2, 0, "NO_SHARD"),
]


def test_a_checkpoint_of_any_layout_loads_into_any_layout(tmp_path: Path) -> None:
    folders, expected = [], reference(2)
    writers = sample(WRITERS, 0, 3, 7, 9)
    for number, layout in enumerate(writers):
        folders.append(tmp_path / str(number))
        run_ranks(layout.ranks, _write, folders[-1], layout, 200 if number % 2 else 5_000_000_000)
        files = [*(folders[-1] / "weights").glob("*.safetensors")]
        assert (len(files) > 1) == bool(number % 2)
        found = [item for file in files for item in load_file(file).items()]
        assert len(dict(found)) == len(found), "each tensor is in one file"
        weights = {**dict(found), "words.head.weight": dict(found)["words.embed.weight"]}
        assert_same(weights, {name: expected[name] for name in weights})
        assert weights.keys() == Toy().state_dict().keys()
        assert_written_once(folders[-1] / STEP, layout)
    for number, layout in enumerate(sample(READERS, 0, 3, 7)):  # each writer is read
        skips = sample(range(len(folders)), 0, 2)
        chosen = [folders[(number + skip) % len(folders)] for skip in skips]
        run_ranks(layout.ranks, _read, chosen, layout)


def assert_written_once(path: Path, layout: Layout) -> None:
    """Each element is in one file, and only a checkpoint with parts has the second version."""
    numel = 0
    for file in path.glob("rank-*"):
        numel += sum(tensor.numel() for tensor in load_file(file).values())
    all_numel = 3 * sum(parameter.numel() for parameter in unsharded().parameters())  # of Adam
    assert all_numel <= numel < 1.4 * all_numel, (all_numel, numel)
    content = json.loads((path / "manifest.json").read_text())["content"]
    assert content["version"] == (2 if layout.has_parts else 1)


@on_ranks(3)
def test_ranks_that_have_only_padding_get_the_states_that_others_get(tmp_path: Path) -> None:
    # Four elements: the shards of other ranks than the first are padding, which a FlatParameter
    # has states of, and an empty original parameter has not. Rows lie on every rank but the last.
    def made(front_end: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = sharded(front_end, nn.Linear(2, 2, bias=False))
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return whole(state_of(model, optimizer))

    front_ends = ("flat", "flat original", "rows")
    for saver in front_ends:
        model, optimizer = made(saver)
        stepped(model, optimizer)
        path = checkpoint.save(tmp_path / saver, model, optimizer, step=1)
        expected = stepped(model, optimizer)
        for loader, num_before in itertools.product(front_ends, range(2)):
            with about(f"{saver} into {loader} after {num_before} steps"):
                model, optimizer = made(loader)
                for _ in range(num_before):
                    stepped(model, optimizer)
                checkpoint.load(path, model, optimizer)
                assert_same(stepped(model, optimizer), expected)


@on_ranks(4)
def test_dtensors_beside_units_are_saved_whole_and_loaded(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def made() -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict({"a": nn.Linear(4, 5), "b": nn.Linear(5, 4)})

    expected = dict(made().state_dict())
    for front_end in ("flat", "flat original", "rows"):
        model = made()
        parallelize_module(model["a"], mesh["tp"], ColwiseParallel())
        model["b"] = sharded(front_end, model["b"])
        path = tmp_path / front_end
        checkpoint.save_safetensors(path, model)
        dist.barrier()
        assert_same(load_file(path / "model.safetensors"), expected, front_end)
        lose(model)
        checkpoint.load(path, model)
        assert_same(weights_of(model), expected, front_end)


def _refused(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=NAMES)
    model = nn.Linear(4, 4)
    for key, parameter in list(model.named_parameters()):
        value = DTensor.from_local(parameter.detach(), mesh["tp"], [Partial()])
        setattr(model, key, nn.Parameter(value))
    summed = fully_shard(model, mesh=mesh["shards"])
    flat, _ = build(Layout("flat", 1, 2))
    calls = {
        "P(sum) for weight": lambda: checkpoint.save(folder / "new", summed, step=1),
        "placed in this way": lambda: checkpoint.save_safetensors(folder / "new", summed),
        "rank-00001.safetensors": lambda: checkpoint.load(folder / STEP, flat),
    }
    for fact, call in calls.items():
        with refused(FsdpCompatError, fact):
            call()
    assert not (folder / "new").exists()
    model, _ = build(Layout("rows", 1, 1, 2))
    if dist.get_rank() == 0:
        with pytest.raises(StateError, match=r"checkpoint\.save"):
            checkpoint.save(folder / "alone", model, step=1)
        assert not (folder / "alone").exists()
    else:
        with pytest.raises(StateError, match="rank 0"):
            checkpoint.save_safetensors(folder / "alone", model)


def test_what_cannot_be_saved_or_loaded_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, _write, tmp_path, Layout("rows", 1, 1, 2), 10**9)
    (tmp_path / STEP / "rank-00001.safetensors").unlink()
    run_ranks(2, _refused, tmp_path)
