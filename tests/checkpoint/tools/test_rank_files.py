"""Files that each rank saved for itself are put together: which ranks hold what comes out as
DTensor and ShardedTensor define it, and what does not belong together is refused."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_compat.checkpoint._tools.archive import of_memory, slices
from fsdp_compat.checkpoint._tools.pickles import Refused
from fsdp_compat.checkpoint._tools.rank_files import rank_groups, read_rank_files
from fsdp_compat.checkpoint._tools.sharded_records import d_tensor
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.tools.archives import record, spec_of
from tests.support.checkpoints import assert_holds, values_of
from tests.support.odd_model import assert_same
from tests.support.ranks import run_ranks
from tests.support.sampling import at_most

WHOLE = torch.arange(7 * 5.0).view(7, 5)
LAYOUTS = {"both dims": (0, 1), "one dim": (0, 0), "columns": (None, 1), "copies": (None, None)}


def _save_d_tensors(directory: Path) -> None:
    """Tensors of a mesh of 2 dims, and an optimizer, as RL trainers name the files."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    places = {None: Replicate(), 0: Shard(0), 1: Shard(1)}
    model: dict[str, Any] = {
        key: distribute_tensor(WHOLE, mesh, [places[dim] for dim in dims])
        for key, dims in LAYOUTS.items()
    }
    model["of one axis"] = distribute_tensor(WHOLE, mesh["dp"], [Shard(0)])
    model["plain"] = WHOLE.clone()
    state = {0: {"step": torch.tensor(1.0), "exp_avg": model["columns"]}}
    optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": [0]}]}
    for name, values in [("model", model), ("optim", optimizer), ("extra_state", {"rank": rank})]:
        torch.save(values, directory / f"{name}_world_size_4_rank_{rank}.pt")
    (directory / "layouts").mkdir(exist_ok=True)
    torch.save(model, directory / "layouts" / f"rank_{rank}.pth")


def _save_d_tensor(path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    torch.save({"a": distribute_tensor(WHOLE, mesh, [Shard(0)])}, path)


@pytest.fixture(scope="module")
def d_tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("d_tensors")
    run_ranks(4, _save_d_tensors, directory)
    return directory


def paths_in(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern))


def test_files_of_several_kinds_are_put_together(d_tensors: Path) -> None:
    archive = read_rank_files(paths_in(d_tensors, "*_rank_*.pt"))
    assert (archive.world_size, archive.extra) == (4, {"extra_state": {"rank": 0}})
    assert archive.param_groups == [{"lr": 0.5, "params": ["0"]}]
    names = (*LAYOUTS, "of one axis", "plain")
    paths = ["optimizer/0/exp_avg", *(f"model/{name}" for name in names)]
    values = values_of(archive)
    assert_same({path: values[path] for path in paths}, dict.fromkeys(paths, WHOLE))
    for name in names:
        found = archive.tensors[name]
        assert {copy.box for copy in found.copies} <= {piece.box for piece in found.pieces}
        assert {piece.holder for piece in (*found.pieces, *found.copies)} == {0, 1, 2, 3}
    for name, num_pieces, num_copies in [("both dims", 4, 0), ("columns", 2, 2), ("plain", 1, 3)]:
        found = archive.tensors[name]
        assert (len(found.pieces), len(found.copies)) == (num_pieces, num_copies), name


# -- DTensors as their pickles describe them


KINDS = st.sampled_from(["Shard", "_StridedShard", "Replicate"])
# Of each dim of a mesh: the kind, the dim of the tensor, how many splits, and how many ranks.
MESHES = st.lists(
    st.tuples(KINDS, st.integers(0, 2), st.integers(1, 3), st.integers(1, 4)),
    min_size=1,
    max_size=3,
)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), MESHES)
@settings(max_examples=at_most(40, of_all=150), deadline=None)
def test_the_parts_of_ranks_are_what_torch_cuts(
    shape: list[int], mesh: list[tuple[str, int, int, int]]
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    num_facts = {"Shard": 1, "_StridedShard": 2, "Replicate": 0}
    placements = [
        (kind, *(dim % len(shape), splits)[: num_facts[kind]]) for kind, dim, splits, _ in mesh
    ]
    sizes = [size for *_, size in mesh]
    covered = torch.zeros(shape, dtype=torch.int64)
    num_copies = 1
    for (kind, *_), size in zip(placements, sizes, strict=True):
        num_copies *= size if kind == "Replicate" else 1
    for coordinate in itertools.product(*map(range, sizes)):
        local = whole
        for (kind, *numbers), size, index in zip(placements, sizes, coordinate, strict=True):
            if kind == "Replicate":
                continue
            cut: Any = Shard(numbers[0])
            if kind == "_StridedShard":
                cut = _StridedShard(numbers[0], split_factor=numbers[1])
            local = cut._split_tensor(local, size, with_padding=False)[0][index]
        part = d_tensor(of_memory("", local), spec_of(shape, sizes, coordinate, placements))
        for piece in part.pieces:
            assert torch.equal(piece.source, whole[slices(piece.box)])
            covered[slices(piece.box)] += 1
    assert (covered == num_copies).all()


@pytest.mark.parametrize(
    "mesh",
    [
        {"mesh": of_memory("", torch.arange(6).view(3, 2))},  # before torch 2.10
        {"_layout": record("layout", shape=(3, 2))},
        {"_layout": record("layout", shape=((3,), (2, 1)))},
        {"_layout": record("layout", axes=(record("", shape=(3,)), record("", shape=(2,))))},
    ],
)
def test_the_meshes_of_all_versions_are_known(mesh: dict[str, Any]) -> None:
    spec = spec_of((6, 2), (), (1, 0), [("Shard", 0), ("Shard", 1)], **mesh)
    (piece,) = d_tensor(of_memory("", torch.ones(2, 1)), spec).pieces
    assert (piece.box.offsets, piece.box.sizes) == ((2, 0), (2, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"placements": [("Partial",)]}, "Partial"),
        ({"placements": [("Shard", 5)]}, "Shard"),
        ({"shape": (6, 2)}, "local tensor of shape"),
        ({"coordinate": (2,)}, "share 2 of 2"),
        ({"placements": [("_StridedShard", 0, 1 << 30)]}, "splits"),
        ({"coordinate": None}, "not in its mesh"),
    ],
)
def test_a_d_tensor_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    facts: dict[str, Any] = {"shape": (4, 2), "sizes": (2,), "coordinate": (0,)}
    facts["placements"] = [("Shard", 0)]
    local = of_memory("", torch.ones(2, 2))
    assert len(d_tensor(local, spec_of(**facts)).pieces) == 1
    with pytest.raises(Refused, match=message):
        d_tensor(local, spec_of(**{**facts, **change}))


# -- names


RL_TRAINERS = ["model_world_size_12_rank_{}.pt", "optim_world_size_12_rank_{}.pt"]


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["rank_{}.pth"], ["model"]),
        (RL_TRAINERS, ["model", "optimizer"]),
        (["pytorch_model_fsdp_rank{}.bin"], ["model"]),
        (["shard{}.pt"], ["model"]),
        (["checkpoint_last-shard{}.pt"], ["checkpoint_last"]),
        (["ckpt-rank{}-of-12.pt"], ["ckpt"]),
        (["model_{}_of_7.safetensors", "pytorch_model-0000{}-of-00002.bin", "readme"], []),
        (["frank{}.txt", ".rank{}.pt"], []),
        (["epoch_{}.pt"], []),
    ],
)
def test_ranks_are_recognised_in_names(tmp_path: Path, names: list[str], keys: list[str]) -> None:
    for name in names:
        for rank in range(12):
            (tmp_path / name.format(rank)).touch()
    groups = rank_groups([*tmp_path.iterdir()])
    assert sorted(group.key for group in groups) == sorted(keys)
    assert all(list(group.paths) == list(range(12)) for group in groups)


# -- files that do not belong together


def _save_sizes(paths: list[Path]) -> None:
    for number, path in enumerate(paths):
        torch.save({"w": torch.ones(number)}, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda paths: paths.pop(2), "no file of rank 2"),
        (lambda paths: paths.pop(3), "elements are missing"),
        (lambda paths: shutil.copy(paths[0], paths[1]), "elements are missing"),
        (lambda paths: paths.append(Path("x_world_size_1_rank_0.pt")), "one file per"),
        (lambda paths: torch.save({"both dims": WHOLE}, paths[3]), "values of one kind"),
        (_save_sizes, "w: shape"),
        (lambda paths: torch.save({"a": print}, paths[2]), r"builtins?(__)?\.print"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    d_tensors: Path, tmp_path: Path, change: Callable[[list[Path]], Any], message: str
) -> None:
    shutil.copytree(d_tensors / "layouts", tmp_path / "copy")
    paths = paths_in(tmp_path, "copy/*")
    change(paths)
    with pytest.raises(CheckpointError, match=message):
        read_rank_files(paths)


def test_the_names_of_files_say_how_many_there_are(d_tensors: Path) -> None:
    with pytest.raises(CheckpointError, match="no file of rank 3"):
        read_rank_files(paths_in(d_tensors, "model*")[:3])


def test_a_single_file_without_a_rank_in_its_name_must_hold_everything(
    d_tensors: Path, tmp_path: Path
) -> None:
    path = tmp_path / "step_100.pt"
    shutil.copy(d_tensors / "layouts" / "rank_0.pth", path)
    with pytest.raises(CheckpointError, match="elements are missing"):
        read_rank_files([path])
    run_ranks(1, _save_d_tensor, path)
    archive = read_rank_files([path])
    assert_holds(archive, {"a": WHOLE})
    assert archive.world_size == 1


def test_plain_values_that_differ_are_the_first_ranks_and_reported(tmp_path: Path) -> None:
    for rank in range(2):
        tree = {
            "model": {"w": torch.arange(4.0), "running": torch.full((3,), float(rank))},
            "seed": rank,
            "names": ["a"] * (rank + 1),
            "optimizer": {"state": {0: {"m": torch.ones(rank)}}, "param_groups": [{}]},
        }
        torch.save(tree, tmp_path / f"rank_{rank}.pt")
    archive = read_rank_files(paths_in(tmp_path, "*"))
    assert values_of(archive)["model/running"].tolist() == [0.0] * 3
    assert not archive.tensors["running"].copies
    assert len(archive.tensors["w"].copies) == 1
    assert archive.extra == {"seed": 0, "names": ["a"]}
    assert not archive.states  # a local one: nothing says which elements a rank has
    lines = sorted(archive.left_out)
    assert [line.partition(":")[0] for line in lines] == ["model/running", "optimizer"]
