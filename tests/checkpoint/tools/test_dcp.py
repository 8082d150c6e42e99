"""Checkpoints of torch.distributed.checkpoint are read and written bit for bit; damaged and hostile
ones are refused."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_compat import FullyShardedDataParallel
from fsdp_compat.checkpoint import load
from fsdp_compat.checkpoint.files import convert, inspect, verify
from fsdp_compat.errors import CheckpointError, UsageError
from tests.checkpoint.tools.content import assert_model, assert_reference, content_of
from tests.support.checkpoints import (
    FACTS,
    WRAPPERS,
    assert_same,
    flip,
    make,
    reference,
    refused,
    save_dcp,
    trained,
    unsharded,
)
from tests.support.ranks import run_ranks
from tests.support.sampling import at_most

# -- reading


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "a.weight": torch.randn(6, 4),
        "turned": torch.randn(3, 5).t(),
        "part": torch.randn(40)[8:20],
        "half": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "small": torch.randn(4, 2).to(torch.float8_e4m3fn),
    }


def test_odd_tensors_and_nested_values_are_read_and_code_is_left_out(tmp_path: Path) -> None:
    state = {"net": tensors(), "list": [{"x": 1}, {"x": (2, "b")}], "epoch": 7, "text": "t"}
    save_dcp({**state, "loader": Runs(tmp_path)}, tmp_path / "c")
    content = assert_model(tmp_path / "c", tensors())
    assert content.extra == {"list": [{"x": 1}, {"x": (2, "b")}], "epoch": 7, "text": "t"}
    assert content.groups is None
    (text,) = content.facts.left_out
    assert text.startswith("loader: ") and "system" in text
    assert not (tmp_path / "ran").exists()


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}/ran",)


def test_files_with_safetensors_are_read(tmp_path: Path) -> None:
    state = {name: values.contiguous() for name, values in tensors().items()}
    writer = FileSystemWriter(tmp_path / "c", serialization_format=SerializationFormat.SAFETENSORS)
    save_dcp(state, tmp_path / "c", storage_writer=writer)
    assert_model(tmp_path / "c", state)


def save_by_ranks(directory: str) -> None:
    """As HuggingFaceStorageWriter and, without coordination, as FileSystemWriter."""
    warnings.simplefilter("ignore")
    model = WRAPPERS["fsdp2"](unsharded())
    state = model.state_dict()
    del state["words.head.weight"]  # safetensors refuses tied tensors
    dcp.save(
        state, storage_writer=HuggingFaceStorageWriter(f"{directory}/hf", save_distributed=True)
    )
    dcp.save(state, checkpoint_id=f"{directory}/apart", use_collectives=False)


def test_parts_in_safetensors_and_metadata_of_each_rank_are_read(tmp_path: Path) -> None:
    run_ranks(2, save_by_ranks, str(tmp_path))
    expected = dict(unsharded().state_dict())
    del expected["words.head.weight"]
    assert assert_model(tmp_path / "hf", expected).facts.kind == "sharded safetensors"
    assert_model(tmp_path / "apart", expected)


# -- writing


def load_into_all(source: str, target: str) -> None:
    """Load a checkpoint into each library's model, and save what the model has then."""
    warnings.simplefilter("ignore")
    for name, wrap in WRAPPERS.items():
        model = wrap(unsharded())
        optimizer = trained(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        state, optim = get_state_dict(model, optimizer)
        states = {"model": state, "optimizer": optim}
        dcp.load(states, checkpoint_id=source)
        set_state_dict(
            model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
        state, optim = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optim}, checkpoint_id=f"{target}/{name}")
        dist.barrier()


def test_what_is_written_loads_into_fsdp1_fsdp2_and_ours(tmp_path: Path) -> None:
    source = make("fsdp2-dcp", 2, tmp_path)["path"]
    convert(source, tmp_path / "c", to="dcp", world_size=3)
    assert_reference(tmp_path / "c", reference())
    run_ranks(2, load_into_all, str(tmp_path / "c"), str(tmp_path))
    for name in WRAPPERS:
        assert_reference(tmp_path / name, reference())


def test_a_model_alone_is_written_flat_and_cut_for_the_ranks(tmp_path: Path) -> None:
    model = {**tensors(), "large": torch.arange(5000.0 * 1700).view(5000, 1700)}  # of 32 MiB
    expected = {**model, "tied": model["a.weight"]}
    torch.save(expected, tmp_path / "x.pt")
    path = convert(tmp_path / "x.pt", tmp_path / "c", to="dcp", world_size=4)
    content = assert_model(path, expected)
    parts = {each.path: each.parts for each in content.facts.tensors}
    rows = [(part.rank, part.offsets[0]) for part in parts["model/a.weight"]]
    assert sorted(rows) == [(0, 0), (1, 2), (2, 4)]
    rows = [(part.rank, part.offsets[0]) for part in parts["model/large"]]
    assert sorted(rows) == [(rank, 1250 * rank) for rank in range(4)]
    (tensor,) = inspect(
        convert(tmp_path / "x.pt", tmp_path / "d", to="dcp", include=["large"])
    ).tensors
    assert [part.nbytes <= 16 << 20 for part in tensor.parts] == [True] * 3
    state = {name: torch.zeros_like(values) for name, values in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    for name, values in expected.items():
        assert_same(state[name], values, name)
    dcp_to_torch_save(path, tmp_path / "c.pt")
    assert torch.equal(torch.load(tmp_path / "c.pt")["a.weight"], expected["a.weight"])


# -- damaged and hostile content


def test_a_file_that_is_left_over_is_named(tmp_path: Path) -> None:
    path = make("fsdp2-dcp", 2, tmp_path)["path"]
    shutil.copy(path / "__1_0.distcp", path / "__7_0.distcp")
    found = inspect(path)
    assert found.world_size == 2
    assert ["__7_0.distcp" in text for text in found.left_out] == [True]


CHANGES = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from([0, 1, 6, 10_000]), st.binary(max_size=6)),
    min_size=1,
    max_size=3,
)


@given(CHANGES)
@settings(max_examples=at_most(60, of_all=200), deadline=None)
def test_damaged_metadata_raise_one_error_or_are_read_inside_their_bounds(
    changes: list[tuple[float, int, bytes]],
) -> None:
    """tests/checkpoint/tools/test_damage.py damages the other files."""
    state = {"model": {"w": torch.ones(4, 3), "b": torch.ones(3)}, "step": 3}
    with tempfile.TemporaryDirectory() as folder:
        file = save_dcp(state, Path(folder, "c")) / ".metadata"
        content = bytearray(file.read_bytes())
        for place, skipped, inserted in changes:
            at = int(place * len(content))
            content[at : at + skipped] = inserted
        file.write_bytes(content)
        try:
            verify(file.parent)
            content_of(file.parent)
        except CheckpointError as error:
            assert all(fact in str(error) for fact in FACTS)
        except UsageError as error:
            assert "No tensor matches" in str(error)


@contextlib.contextmanager
def counting_reads() -> Iterator[list[int]]:
    """Count the calls that read from files."""
    num_reads = [0]
    with pytest.MonkeyPatch.context() as patch:
        for name, original in (("pread", os.pread), ("preadv", os.preadv)):

            def counted(*args: Any, read: Callable[..., Any] = original) -> Any:
                num_reads[0] += 1
                return read(*args)

            patch.setattr(os, name, counted)
        yield num_reads


def cut_in_chunks(tmp_path: Path) -> tuple[Path, int]:
    """A checkpoint, and its number of chunks."""
    values = {f"{number}.weight": torch.full((32, 2), number) for number in range(20)}
    torch.save(values, tmp_path / "x.pt")
    return convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp", world_size=32), 20 * 32


def test_what_a_directory_holds_is_told_without_opening_every_chunk(tmp_path: Path) -> None:
    path, num_chunks = cut_in_chunks(tmp_path)
    with counting_reads() as num_reads:
        found = inspect(path)
        assert len(found.tensors) == 20 and found.nbytes_by_rank().keys() == {*range(32)}
        assert num_reads[0] < num_chunks, "fewer reads than chunks"
        assert {type(part.start) for each in found.tensors for part in each.parts} == {int}
        assert num_reads[0] > num_chunks, "a chunk that is asked for is opened"


def load_one_tensor(path: Path, is_damaged: bool) -> None:
    model = FullyShardedDataParallel(nn.Linear(2, 32, bias=False), use_orig_params=True)
    rename = {"7.weight": "weight"}.get
    with counting_reads() as num_reads:
        if is_damaged:
            with refused(CheckpointError, "not a tensor", "7.weight"):
                load(path, model, rename=rename)
        else:
            load(path, model, rename=rename)
            assert all(bool((values == 7).all()) for values in model.parameters())
    assert num_reads[0] < 20 * 32, "fewer reads than chunks"


def test_a_rank_opens_what_it_reads_and_damage_stops_all_and_is_named(tmp_path: Path) -> None:
    path, _ = cut_in_chunks(tmp_path)
    run_ranks(2, load_one_tensor, path, False)
    places = pickle.loads((path / ".metadata").read_bytes()).storage_data
    (place,) = (
        each for index, each in places.items() if index.fqn == "7.weight" and index.offset[0] == 5
    )
    flip(path / place.relative_path, place.offset)
    run_ranks(2, load_one_tensor, path, True)
    for quick in (False, True):
        (problem,) = verify(path, quick=quick).problems
        assert (problem.kind, problem.where) == ("file", "model/7.weight")
        assert place.relative_path in problem.what
    with refused(CheckpointError, "not a tensor", "7.weight"):
        convert(path, tmp_path / "y.pt")
    assert not (tmp_path / "y.pt").exists()


def test_metadata_of_any_length_are_read(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "x.pt")
    path = convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_meta = StorageMeta(checkpoint_id="x" * 100_000_001)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_model(path, {"w": torch.ones(4)})


def test_other_values_and_numbered_states_are_written_in_their_dtypes(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    groups = [{"lr": 0.1, "params": [0]}]
    saved = {"model": {"w": weight}, "pair": (1, weight.clone()), "list": [{"y": [1, 2]}]}
    saved["optimizer"] = {"state": {0: {"m": weight}}, "param_groups": groups}
    torch.save(saved, tmp_path / "x.pt")
    path = convert(tmp_path / "x.pt", tmp_path / "c", to="dcp", dtype=torch.bfloat16)
    content = assert_model(path, {"w": weight.bfloat16()})
    assert_same(content.extra["pair"][1], weight, "pair")
    assert (content.extra["list"], content.groups) == ([{"y": [1, 2]}], groups)
    assert_same(content.states[0]["m"], weight, "m")
    torch.save({**saved, "model.w": 1}, tmp_path / "y.pt")
    with pytest.raises(UsageError, match="same name"):
        convert(tmp_path / "y.pt", tmp_path / "d", to="dcp")
