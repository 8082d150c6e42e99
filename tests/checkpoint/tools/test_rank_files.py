"""Files that each rank saved for itself are put together: which ranks hold what comes out as
DTensor and ShardedTensor define it, and flat parameters with shapes from elsewhere."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_compat.checkpoint.files import convert, diff, inspect, verify
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.tools.content import assert_model, content_of, d_tensor, part_of
from tests.support.cases import about
from tests.support.checkpoints import make, reference
from tests.support.sampling import at_most


def test_files_of_several_kinds_are_put_together(tmp_path: Path) -> None:
    """Named as RL trainers do."""
    whole = torch.arange(7 * 5.0).view(7, 5)
    for rank in range(2):
        cut = part_of(whole, (2,), rank, [Shard(0)])
        state = {0: {"step": torch.tensor(1.0), "exp_avg": cut}}
        optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": [0]}]}
        model = {"cut": cut, "plain": whole.clone()}
        for name, values in (("model", model), ("optim", optimizer), ("extra", {"rank": rank})):
            torch.save(values, tmp_path / f"{name}_world_size_2_rank_{rank}.pt")
    content = assert_model(tmp_path, {"cut": whole, "plain": whole})
    assert (content.facts.world_size, content.extra) == (2, {"extra": {"rank": 0}})
    assert content.groups == [{"lr": 0.5, "params": [0]}]
    assert torch.equal(content.states[0]["exp_avg"], whole)
    assert verify(tmp_path).is_intact, "copies are equal"
    parts = {each.path: each.parts for each in content.facts.tensors}
    copies = {name: [part.is_copy for part in found] for name, found in parts.items()}
    assert copies["model/cut"] == [False, False] and copies["model/plain"] == [False, True]


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


# -- names

NAMES = (
    *(["rank_{}.pth"], ["pytorch_model_fsdp_rank{}.bin"], ["shard{}.pt"], ["ckpt-rank{}-of-12.pt"]),
    ["model_world_size_12_rank_{}.pt", "optim_world_size_12_rank_{}.pt"],
    ["checkpoint_last-shard{}.pt", "optim-shard{}.pt"],
)
OTHERS = ("model_{}_of_7.pt", "pytorch_model-0000{}-of-00002.bin", "frank{}.pt", ".rank{}.pt")


def test_ranks_are_recognised_in_names_and_other_numbers_are_none(tmp_path: Path) -> None:
    optimizer = {"state": {"w": {"m": torch.ones(1)}}, "param_groups": [{"params": ["w"]}]}
    parts: list[Any] = [{"w": torch.ones(1)}, optimizer]
    for number, names in enumerate([*NAMES, *([name] for name in OTHERS)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for rank in range(12):
            for name, part in zip(names, parts, strict=False):
                torch.save(part, folder / name.format(rank))
        if number < len(NAMES):
            found = inspect(folder)
            paths = ["model/w", "optimizer/w/m"][: len(names)]
            assert (found.world_size, [each.path for each in found.tensors]) == (12, paths), names
        else:
            with about(names), pytest.raises(CheckpointError, match="No checkpoint was recognised"):
                inspect(folder)


# -- files that do not belong together


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


# -- flat parameters of FSDP1's LOCAL_STATE_DICT: shapes come from elsewhere

FORMS = ("fsdp1-local", "fsdp1-local-original")  # with use_orig_params=False and True
WRONG = "blocks.1.up.weight"  # of 55 elements


@pytest.mark.parametrize("form", FORMS)
def test_without_shapes_each_parameter_stays_flat_and_only_a_conversion_needs_them(
    tmp_path: Path, form: str
) -> None:
    state, folder = reference()["model"], make(form, 2, tmp_path)["path"]
    found = inspect(folder)
    numels = {each.path.removeprefix("model/"): each.shape for each in found.tensors}
    if form == "fsdp1-local":
        numel = sum(v.numel() for name, v in state.items() if name.startswith("blocks.1."))
        assert numels["blocks.1._flat_param"] == (numel,)
    else:
        assert numels[WRONG] == (state[WRONG].numel(),)
    assert "--shapes" in " ".join(found.left_out)
    assert verify(folder).is_intact and diff(folder, folder).is_same
    with pytest.raises(CheckpointError, match="pass shapes"):
        convert(folder, tmp_path / "target")
    for numel in (60,) if form == "fsdp1-local" else (54, 56):
        torch.save({**state, WRONG: torch.ones(numel).bfloat16()}, tmp_path / "wrong.pt")
        with pytest.raises(CheckpointError, match=rf"blocks\.1\._flat_param(.|\n)*{WRONG}"):
            inspect(folder, shapes=tmp_path / "wrong.pt")
    # Sorted, and without the tie: nothing says where each parameter of a FlatParameter lies.
    untied = {name: v.clone() for name, v in state.items() if name != "words.head.weight"}
    (accelerate := tmp_path / "accelerate").mkdir()
    (accelerate / "random_states_0.pkl").touch()
    save_file(untied, accelerate / "model.safetensors")
    if form == "fsdp1-local":
        with pytest.raises(CheckpointError, match="order of the parameters"):
            inspect(folder, shapes=accelerate)
    else:
        assert_model(folder, state, shapes=accelerate)
