"""Files that each rank saved for itself are put together: which ranks hold what comes out as
DTensor and ShardedTensor define it, and what does not belong together is refused."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_compat.checkpoint.files import inspect, verify
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.tools.content import assert_model, content_of, d_tensor, part_of
from tests.support.sampling import at_most

WHOLE = torch.arange(7 * 5.0).view(7, 5)
LAYOUTS = {"both dims": (0, 1), "one dim": (0, 0), "columns": (None, 1), "copies": (None, None)}


@pytest.fixture
def d_tensors(tmp_path: Path) -> Path:
    """Tensors of a mesh of 2 dims, and an optimizer, as RL trainers name the files."""
    folder = tmp_path / "d_tensors"
    (folder / "layouts").mkdir(parents=True)
    places = {None: Replicate(), 0: Shard(0), 1: Shard(1)}
    for rank in range(4):
        model: dict[str, Any] = {
            key: part_of(WHOLE, (2, 2), rank, [places[dim] for dim in dims])
            for key, dims in LAYOUTS.items()
        }
        model["of one axis"] = part_of(WHOLE, (2,), rank // 2, [Shard(0)])
        model["plain"] = WHOLE.clone()
        state = {0: {"step": torch.tensor(1.0), "exp_avg": model["columns"]}}
        optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": [0]}]}
        for name, values in (("model", model), ("optim", optimizer), ("extra", {"rank": rank})):
            torch.save(values, folder / f"{name}_world_size_4_rank_{rank}.pt")
        torch.save(model, folder / "layouts" / f"rank_{rank}.pth")
    return folder


def test_files_of_several_kinds_are_put_together(d_tensors: Path) -> None:
    names = (*LAYOUTS, "of one axis", "plain")
    shutil.rmtree(d_tensors / "layouts")
    content = assert_model(d_tensors, dict.fromkeys(names, WHOLE))
    assert (content.facts.world_size, content.extra) == (4, {"extra": {"rank": 0}})
    assert content.groups == [{"lr": 0.5, "params": [0]}]
    assert torch.equal(content.states[0]["exp_avg"], WHOLE)
    assert verify(d_tensors).is_intact, "copies are equal"
    parts = {each.path: each.parts for each in content.facts.tensors if each.section == "model"}
    for found in parts.values():
        boxes = {(part.offsets, part.sizes) for part in found if not part.is_copy}
        assert {(part.offsets, part.sizes) for part in found} == boxes
        assert {part.rank for part in found} == {0, 1, 2, 3}
    for name, num_pieces, num_copies in [("both dims", 4, 0), ("columns", 2, 2), ("plain", 1, 3)]:
        copies = [part.is_copy for part in parts[f"model/{name}"]]
        assert (copies.count(False), copies.count(True)) == (num_pieces, num_copies), name


# -- DTensors

# Of each dim of a mesh: how it cuts, the dim of the tensor, how many splits, and how many ranks.
MESHES = st.lists(
    st.tuples(
        st.sampled_from(["Shard", "_StridedShard", "Replicate"]),
        st.integers(0, 2),
        st.integers(1, 3),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=3,
)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), MESHES)
@settings(max_examples=at_most(30, of_all=150), deadline=None)
def test_the_parts_of_ranks_are_what_torch_cuts(
    shape: list[int], mesh: list[tuple[str, int, int, int]]
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    cuts: dict[str, Callable[[int, int], Any]] = {
        "Shard": lambda dim, _: Shard(dim),
        "_StridedShard": lambda dim, splits: _StridedShard(dim, split_factor=splits),
        "Replicate": lambda *_: Replicate(),
    }
    placements = [cuts[kind](dim % len(shape), splits) for kind, dim, splits, _ in mesh]
    sizes = [size for *_, size in mesh]
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(math.prod(sizes)):
            part = part_of(whole, sizes, rank, placements)
            torch.save({"w": part}, Path(folder, f"rank_{rank}.pt"))
        assert_model(Path(folder), {"w": whole})
        assert verify(folder).is_intact, "copies are equal"


def test_meshes_before_torch_2_10_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(6):
        state = {"mesh": torch.arange(6).view(3, 2), "_coordinate_on_dim": [rank // 2, rank % 2]}
        monkeypatch.setattr(DeviceMesh, "__getstate__", lambda mesh, state=state: state)
        part = torch.full((2, 1), rank)
        tensor = d_tensor(part, (6, 2), (3, 2), rank, [Shard(0), Shard(1)])
        torch.save({"w": tensor}, tmp_path / f"rank_{rank}.pt")
    whole = torch.tensor([[0, 1], [2, 3], [4, 5]]).repeat_interleave(2, 0)
    assert_model(tmp_path, {"w": whole})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"placements": [Partial()]}, "Partial"),
        ({"placements": [Shard(5)]}, "Shard"),
        ({"shape": (6, 2)}, "local tensor of shape"),
        ({"coordinate": (2,)}, "share 2 of 2"),
        ({"placements": [_StridedShard(0, split_factor=1 << 30)]}, "splits"),
        ({"coordinate": None}, "not in its mesh"),
    ],
)
def test_a_d_tensor_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for rank in range(2):
        tensor = d_tensor(torch.ones(2, 2), (4, 2), (2,), rank, [Shard(0)])
        if rank == 1:
            spec = tensor._spec
            if "placements" in change:
                spec.placements = tuple(change["placements"])
            if "shape" in change:
                spec.tensor_meta = spec.tensor_meta._replace(shape=torch.Size(change["shape"]))
            if "coordinate" in change:
                spec.mesh._coordinate_on_dim = change["coordinate"]
        torch.save({"w": tensor}, tmp_path / f"rank_{rank}.pt")
    with pytest.raises(CheckpointError, match=message):
        inspect(tmp_path)


# -- names


@pytest.mark.parametrize(
    "names",
    [
        ["rank_{}.pth"],
        ["model_world_size_12_rank_{}.pt", "optim_world_size_12_rank_{}.pt"],
        ["pytorch_model_fsdp_rank{}.bin"],
        ["shard{}.pt"],
        ["checkpoint_last-shard{}.pt", "optim-shard{}.pt"],
        ["ckpt-rank{}-of-12.pt"],
    ],
)
def test_ranks_are_recognised_in_names(tmp_path: Path, names: list[str]) -> None:
    optimizer = {"state": {"w": {"m": torch.ones(1)}}, "param_groups": [{"params": ["w"]}]}
    for rank in range(12):
        values = {"w": torch.full((1,), float(rank))}
        parts: list[Any] = [values, optimizer]
        for name, part in zip(names, parts, strict=False):
            torch.save(part, tmp_path / name.format(rank))
    found = inspect(tmp_path)
    assert found.world_size == 12
    paths = {"model/w", *(["optimizer/w/m"] if len(names) > 1 else [])}
    assert {each.path for each in found.tensors} == paths


@pytest.mark.parametrize(
    "name",
    [
        "model_{}_of_7.pt",
        "pytorch_model-0000{}-of-00002.bin",
        "frank{}.pt",
        ".rank{}.pt",
        "e_{}.pt",
    ],
)
def test_other_numbers_in_names_are_no_ranks(tmp_path: Path, name: str) -> None:
    for number in range(3):
        torch.save({"w": torch.ones(1)}, tmp_path / name.format(number))
    with pytest.raises(CheckpointError, match="No checkpoint was recognised"):
        inspect(tmp_path)


# -- files that do not belong together


def _save_sizes(paths: list[Path]) -> None:
    for number, path in enumerate(paths):
        torch.save({"w": torch.ones(number)}, path)


def _save_of_another_run(paths: list[Path]) -> None:
    torch.save({"w": torch.ones(1)}, paths[0].parent / "x_world_size_1_rank_0.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda paths: paths[2].unlink(), "no file of rank 2"),
        (lambda paths: paths[3].unlink(), "elements are missing"),
        (lambda paths: shutil.copy(paths[0], paths[1]), "elements are missing"),
        (_save_of_another_run, "one file per"),
        (lambda paths: torch.save({"both dims": WHOLE}, paths[3]), "values of one kind"),
        (_save_sizes, "w: shape"),
        (lambda paths: torch.save({"a": print}, paths[2]), r"builtins?(__)?\.print"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    d_tensors: Path, tmp_path: Path, change: Callable[[list[Path]], Any], message: str
) -> None:
    copy = Path(shutil.copytree(d_tensors / "layouts", tmp_path / "copy"))
    change(sorted(copy.iterdir()))
    with pytest.raises(CheckpointError, match=message):
        inspect(copy)


def test_the_names_of_files_say_how_many_there_are(d_tensors: Path, tmp_path: Path) -> None:
    for rank in range(3):
        shutil.copy(d_tensors / f"model_world_size_4_rank_{rank}.pt", tmp_path)
    with pytest.raises(CheckpointError, match="no file of rank 3"):
        inspect(tmp_path)


def test_a_single_file_without_a_rank_in_its_name_must_hold_everything(
    d_tensors: Path, tmp_path: Path
) -> None:
    path = tmp_path / "step_100.pt"
    shutil.copy(d_tensors / "layouts" / "rank_0.pth", path)
    with pytest.raises(CheckpointError, match="elements are missing"):
        inspect(path)
    torch.save({"a": d_tensor(WHOLE, WHOLE.shape, (1,), 0, [Shard(0)])}, path)
    assert assert_model(path, {"a": WHOLE}).facts.world_size == 1


def test_plain_values_that_differ_are_the_first_ranks_and_reported(tmp_path: Path) -> None:
    for rank in range(2):
        tree = {
            "model": {"w": torch.arange(4.0), "running": torch.full((3,), float(rank))},
            "seed": rank,
            "names": ["a"] * (rank + 1),
            "optimizer": {"state": {0: {"m": torch.ones(rank)}}, "param_groups": [{}]},
        }
        torch.save(tree, tmp_path / f"rank_{rank}.pt")
    content = content_of(tmp_path)
    assert content.model["running"].tolist() == [0.0] * 3
    copies = {each.path: [part.is_copy for part in each.parts] for each in content.facts.tensors}
    assert copies == {"model/w": [False, True], "model/running": [False]}
    assert content.extra == {"seed": 0, "names": ["a"]}
    assert not content.states  # a local one: nothing says which elements a rank has
    lines = sorted(content.facts.left_out)
    assert [line.partition(":")[0] for line in lines] == ["model/running", "optimizer"]
