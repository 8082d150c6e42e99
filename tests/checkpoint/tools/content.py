"""What a checkpoint of any format holds, through public calls; and files made by hand, of which a
test knows every byte."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_compat.checkpoint import files
from tests.support.checkpoints import assert_same


@dataclasses.dataclass(frozen=True)
class Content:
    """The values of a checkpoint, and what ``inspect`` says of it."""

    facts: Any
    model: dict[str, Tensor]
    states: dict[Any, dict[Any, Any]]
    groups: list[dict[str, Any]] | None
    extra: dict[str, Any]


def content_of(path: Path, **options: Any) -> Content:
    """Read a checkpoint by converting it to a file for ``torch.load``."""
    facts = files.inspect(path, **options)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are left out
        written = files.convert(path, Path(folder, "x.pt"), **options)
        tree = torch.load(written, weights_only=True)
    if not isinstance(tree.get("model"), dict):
        return Content(facts, tree, {}, None, {})
    model, optimizer = tree.pop("model"), tree.pop("optimizer", {})
    return Content(facts, model, optimizer.get("state", {}), optimizer.get("param_groups"), tree)


def assert_model(path: Path, expected: Mapping[str, Tensor], **options: Any) -> Content:
    """Assert that a checkpoint has a model, each name of a tie included, bit for bit."""
    content = content_of(path, **options)
    assert set(content.model) == set(expected)
    for name, values in expected.items():
        assert_same(content.model[name], values, name)
    return content


def assert_reference(path: Path, expected: dict[str, Any], has_optimizer: bool = True) -> Content:
    """Assert that a checkpoint has the model and the optimizer of ``support.checkpoints.make``; one
    name of a tie is enough, and a number is as good as a tensor of it."""
    content, aliases = content_of(path), expected["aliases"]
    names = {*content.model, *aliases}
    assert names == set(expected["model"])
    for name, values in expected["model"].items():
        assert_same(content.model[name if name in content.model else aliases[name]], values, name)
    if not has_optimizer:
        assert content.groups is None
        return content
    states, (group,) = expected["optimizer"]["state"], expected["optimizer"]["param_groups"]
    assert set(content.states) == set(states)
    for name, state in states.items():
        assert set(content.states[name]) == set(state)
        for key, values in state.items():
            found = content.states[name][key]
            found = found if isinstance(found, Tensor) else torch.tensor(found, dtype=values.dtype)
            assert_same(found, values, f"{name}/{key}")
    assert content.groups is not None
    for own in content.groups:
        assert (own["lr"], tuple(own["betas"])) == (group["lr"], group["betas"])
    assert sorted(name for own in content.groups for name in own["params"]) == sorted(
        group["params"]
    )
    return content


def save_pickle(path: Path, data: bytes) -> Path:
    """Write a torch.save file whose values are any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
            file.writestr(f"x/{name}", content)
    return path


def save_boxes(folder: Path, boxes: Sequence[tuple[str, Sequence[int], Tensor]]) -> Path:
    """Write parts of tensors, (name, offsets, values), one file each, as HuggingFaceStorageWriter
    of torch.distributed.checkpoint does on as many ranks."""
    folder.mkdir()
    for number, (name, offsets, values) in enumerate(boxes, 1):
        sharding = json.dumps({name: {"saved_offsets": list(offsets)}})
        file = folder / f"shard-{number:05d}-model-00001-of-00001.safetensors"
        save_file({name: values.contiguous()}, file, {"DCP_SHARDING_INFO": sharding})
    return folder


def mesh_of(sizes: Sequence[int], rank: int) -> DeviceMesh:
    """A mesh as a rank has it, without a process group."""
    ranks = torch.arange(torch.Size(sizes).numel()).view(*sizes)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)


def d_tensor(
    local: Tensor, shape: Sequence[int], sizes: Sequence[int], rank: int, placements: Sequence[Any]
) -> DTensor:
    """A rank's part of a tensor over a mesh."""
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        local,
        mesh_of(sizes, rank),
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def part_of(whole: Tensor, sizes: Sequence[int], rank: int, placements: Sequence[Any]) -> DTensor:
    """A rank's part of a tensor, as torch cuts it over a mesh."""
    local, coordinate = whole, mesh_of(sizes, rank).get_coordinate()
    for cut, size, index in zip(placements, sizes, coordinate or (), strict=True):
        if not cut.is_replicate():
            local = cut._split_tensor(local, size, with_padding=False)[0][index]
    return d_tensor(
        local.clone(memory_format=torch.contiguous_format), whole.shape, sizes, rank, placements
    )


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
Grid = tuple[tuple[int, ...], list[Box]]


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """A shape, and boxes that cover it once: a grid of any cuts, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    boxes = [
        (tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges))
        for ranges in itertools.product(*(itertools.pairwise(ends) for ends in cuts))
    ]
    return shape, draw(st.permutations(boxes))
