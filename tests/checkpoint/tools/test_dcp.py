"""Checkpoints of torch.distributed.checkpoint are read and written bit for bit; damaged and hostile
ones are refused."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from fsdp_compat.checkpoint._tools import threads
from fsdp_compat.checkpoint._tools.archive import Archive, StoredTensor, of_memory
from fsdp_compat.checkpoint._tools.dcp import (
    is_dcp,
    is_sharded_safetensors,
    read_dcp,
    read_sharded_safetensors,
    write_dcp,
)
from fsdp_compat.checkpoint._tools.reader import Files
from fsdp_compat.checkpoint._tools.writers import WriteOptions
from fsdp_compat.checkpoint.files import convert, inspect
from fsdp_compat.errors import CheckpointError, UsageError
from tests.support.checkpoints import (
    FACTS,
    WRAPPERS,
    assert_holds,
    assert_is_reference,
    assert_same,
    flip,
    make,
    reference,
    save_dcp,
    trained,
    unsharded,
    values_of,
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
    archive = read_dcp(save_dcp({**state, "loader": Runs(tmp_path)}, tmp_path / "c"))
    assert_holds(archive, tensors())
    assert archive.extra == {"list": [{"x": 1}, {"x": (2, "b")}], "epoch": 7, "text": "t"}
    assert archive.param_groups is None
    (text,) = archive.left_out
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
    assert_holds(read_dcp(tmp_path / "c"), state)


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
    assert is_sharded_safetensors(tmp_path / "hf")
    expected = dict(unsharded().state_dict())
    del expected["words.head.weight"]
    assert_holds(read_sharded_safetensors(tmp_path / "hf"), expected)
    assert is_dcp(tmp_path / "apart")
    assert_holds(read_dcp(tmp_path / "apart"), expected)


# -- writing


def load_into_all(source: str, target: str) -> None:
    """Load a checkpoint into each library's model, and save what the model has then."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

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


def test_what_is_written_loads_into_fsdp1_fsdp2_and_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_compat.checkpoint._tools.dcp.SLAB_NBYTES", 40)
    archive = read_dcp(make("fsdp2-dcp", 2, tmp_path)["path"])
    with Files() as files:
        write_dcp(archive, tmp_path / "c", WriteOptions(world_size=3), files)
    assert_is_reference(read_dcp(tmp_path / "c"), reference())
    run_ranks(2, load_into_all, str(tmp_path / "c"), str(tmp_path))
    for name in WRAPPERS:
        assert_is_reference(read_dcp(tmp_path / name), reference())


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_model_alone_is_written_flat_and_cut_for_the_ranks(
    num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "THREADS", num_threads)
    monkeypatch.setattr("fsdp_compat.checkpoint._tools.dcp.SLAB_NBYTES", 16)
    expected = {**tensors(), "tied": tensors()["a.weight"]}
    archive = Archive(
        tmp_path,
        "test",
        {name: of_memory(name, values) for name, values in tensors().items()},
        aliases={"tied": "a.weight"},
    )
    ticks: list[int] = []
    options = WriteOptions(4, tick=ticks.append)
    with Files() as files:
        write_dcp(archive, tmp_path / "c", options, files)
    written = read_dcp(tmp_path / "c")
    assert_holds(written, expected)
    assert sum(ticks) == sum(values.nbytes for values in expected.values())
    rows = [(p.holder, p.box.offsets[0]) for p in written.tensors["a.weight"].pieces]
    assert sorted(rows) == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    state = {name: torch.zeros_like(values) for name, values in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "c")
    for name, values in expected.items():
        assert_same(state[name], values, name)
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    assert torch.equal(torch.load(tmp_path / "c.pt")["a.weight"], expected["a.weight"])


def test_other_values_dtypes_and_numbered_states_are_written(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    archive = Archive(
        tmp_path,
        "test",
        {"w": StoredTensor(**{**vars(of_memory("w", weight)), "written_as": torch.bfloat16})},
        states={"0": {"step": of_memory("", torch.tensor(4.0)), "m": of_memory("", weight)}},
        param_groups=[{"lr": 0.1, "params": ["0"]}],
        is_by_number=True,
        extra={"pair": (1, of_memory("", weight)), "list": [{"y": [1, 2]}]},
        step=5,
    )
    with Files() as files:
        write_dcp(archive, tmp_path / "c", WriteOptions(), files)
    written = read_dcp(tmp_path / "c")
    found = values_of(written)
    assert_same(found["model/w"], weight.bfloat16(), "w")
    assert_same(found["extra/pair/1"], weight, "pair")
    assert written.step == 5
    assert written.extra["list"] == [{"y": [1, 2]}]
    assert written.param_groups == [{"lr": 0.1, "params": ["0"]}]
    assert set(written.states["0"]) == {"step", "m"}
    archive.extra["model.w"] = 1
    with Files() as files, pytest.raises(UsageError, match="same name"):
        write_dcp(archive, tmp_path / "d", WriteOptions(), files)


# -- damaged and hostile content


def changed(path: Path, change: Callable[[Any], None]) -> Path:
    """Change the metadata of a checkpoint."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def info(metadata: Any, name: str = "a.weight") -> Any:
    return metadata.storage_data[MetadataIndex(name, (0, 0))]


def set_place(**values: Any) -> Callable[[Any], None]:
    return lambda metadata: vars(info(metadata)).update(values)


def set_chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
        metadata.state_dict_metadata["a.weight"].chunks = chunks
        for at, _ in boxes:
            metadata.storage_data[MetadataIndex("a.weight", at)] = info(metadata)

    return change


def set_path(*keys: Any) -> Callable[[Any], None]:
    return lambda metadata: metadata.planner_data.update({"a.weight": keys})


HOSTILE: dict[str, tuple[Callable[[Any], None], str]] = {
    "a name that leads out": (set_place(relative_path="../c/__0_0.distcp"), "outside"),
    "an absolute name": (set_place(relative_path="/etc/passwd"), "outside"),
    "no such file": (set_place(relative_path="__9_0.distcp"), "no such file"),
    "a directory": (set_place(relative_path="."), "not a regular file"),
    "a range beyond the file": (set_place(length=10**15), "where the metadata have bytes"),
    "a huge offset": (set_place(offset=2**70), "where the metadata have bytes"),
    "a negative offset": (set_place(offset=-5), "below 0"),
    "a range inside of an entry": (set_place(offset=100), "__0_0.distcp"),
    "another tensor": (
        lambda metadata: vars(info(metadata)).update(vars(info(metadata, "turned"))),
        "instead of",
    ),
    "a missing place": (
        lambda metadata: metadata.storage_data.pop(MetadataIndex("a.weight", (0, 0))),
        "no file has",
    ),
    "a gap": (set_chunks(((0, 0), (3, 4))), "instead of"),
    "an overlap": (set_chunks(((0, 0), (6, 4)), ((1, 0), (5, 4))), "instead of"),
    "rows without a chunk": (
        lambda metadata: vars(metadata.state_dict_metadata["a.weight"]).update(
            size=torch.Size([9, 4])
        ),
        "12 of 36 elements are missing",
    ),
    "a chunk outside": (set_chunks(((1, 0), (6, 4))), "outside of shape"),
    "an extension": (set_place(transform_descriptors=["zstd"]), "extensions"),
    "a long list": (set_path("x", 10**9), "a list of"),
    "many long lists": (
        lambda metadata: metadata.planner_data.update(
            {name: (name, 60_000) for name in ("small", "turned")}
        ),
        "a list of",
    ),
    "a path through a value": (
        lambda metadata: metadata.planner_data.update({"small": ("turned", "x")}),
        "leads through",
    ),
    "a path twice": (set_path("turned"), "two values"),
    "a wrong class": (
        lambda metadata: metadata.state_dict_metadata.update({"a.weight": info(metadata)}),
        "is a torch",
    ),
    "no storage": (lambda metadata: vars(metadata).update(storage_data=None), "as torch.dist"),
    "code": (lambda metadata: vars(metadata).update(version=Runs(Path("/tmp"))), "system"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_metadata_are_refused(what: str, tmp_path: Path) -> None:
    change, said = HOSTILE[what]
    path = changed(save_dcp(tensors(), tmp_path / "c"), change)
    with pytest.raises(CheckpointError, match=said):
        read_dcp(path)


def test_two_values_at_one_place_and_damaged_plain_values_are_refused(tmp_path: Path) -> None:
    values = {"a": torch.ones(3), "b": torch.zeros(3), "note": "n" * 50}
    for what in ("place", "note"):
        path = save_dcp(values, tmp_path / what)
        if what == "place":
            changed(path, lambda metadata: metadata.storage_data.update(_one_place(metadata)))
        else:
            (file,) = path.glob("*.distcp")
            flip(file, file.read_bytes().index(b"nnnnn"))
        with pytest.raises(CheckpointError, match=r"two values|checksum"):
            read_dcp(path)


def _one_place(metadata: Any) -> dict[Any, Any]:
    places = {index.fqn: (index, place) for index, place in metadata.storage_data.items()}
    return {places["b"][0]: places["a"][1]}


def test_missing_mixed_and_linked_files_are_refused(tmp_path: Path) -> None:
    two = make("fsdp2-dcp", 2, tmp_path)["path"]
    four = make("fsdp2-dcp", 4, tmp_path)["path"]
    changes: dict[str, Callable[[Path], object]] = {
        "no such file": lambda file: None,
        r"__1_0\.distcp": lambda file: shutil.copy(four / file.name, file),
        "outside": lambda file: file.symlink_to(two / file.name),
        "a FIFO": os.mkfifo,
    }
    for number, (said, change) in enumerate(changes.items()):
        path = shutil.copytree(two, tmp_path / str(number))
        (path / "__1_0.distcp").unlink()
        change(path / "__1_0.distcp")
        with pytest.raises(CheckpointError, match=said):
            read_dcp(path)


def test_a_file_that_is_left_over_is_named(tmp_path: Path) -> None:
    path = make("fsdp2-dcp", 2, tmp_path)["path"]
    shutil.copy(path / "__1_0.distcp", path / "__7_0.distcp")
    archive = read_dcp(path)
    assert archive.world_size == 2
    assert ["__7_0.distcp" in text for text in archive.left_out] == [True]


def test_damaged_metadata_raise_one_error_or_are_read_inside_their_bounds(tmp_path: Path) -> None:
    """tests/checkpoint/tools/test_damage.py damages the other files."""
    state = {"model": {"w": torch.randn(4, 3), "b": torch.randn(3)}, "step": 3}
    file = save_dcp(state, tmp_path / "c") / ".metadata"
    intact, chance = file.read_bytes(), random.Random(0)
    for _ in range(at_most(60, of_all=200)):
        content = bytearray(intact)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(content) + 1)
            skipped = chance.choice([0, 1, 6, len(content)])
            content[at : at + skipped] = chance.randbytes(chance.randrange(7))
        file.write_bytes(content)
        try:
            values_of(read_dcp(tmp_path / "c"))
        except CheckpointError as error:
            assert all(fact in str(error) for fact in FACTS)


@pytest.mark.xfail(strict=True, reason="opening a directory reads the head of every chunk")
def test_what_a_directory_holds_is_told_without_opening_every_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {f"{number}.weight": torch.ones(32, 2) for number in range(20)}
    torch.save(values, tmp_path / "x.pt")
    path = convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp", world_size=32)
    num_reads = 0
    for name, original in (("pread", os.pread), ("preadv", os.preadv)):

        def counted(*args: Any, read: Callable[..., Any] = original) -> Any:
            nonlocal num_reads
            num_reads += 1
            return read(*args)

        monkeypatch.setattr(os, name, counted)
    assert len(inspect(path).tensors) == 20
    assert num_reads < 20 * 32, "fewer reads than chunks"
