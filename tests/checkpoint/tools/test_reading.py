"""Values are put together from any boxes of any files of the directory."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fsdp_compat.checkpoint.files import convert, diff, inspect, verify
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.tools.content import Grid, assert_model, grids, save_boxes
from tests.support.sampling import at_most


def parts_of(name: str, grid: Grid) -> tuple[torch.Tensor, list[tuple[str, Any, torch.Tensor]]]:
    """Values of the shape of a grid, and its boxes with their part of the values."""
    shape, boxes = grid
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    parts = []
    for offsets, sizes in boxes:
        place = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        parts.append((name, offsets, values[place]))
    return values, parts


BLOCKS = "fsdp_compat._archive.blocks.BLOCK_NBYTES"
dtypes = st.sampled_from([None, torch.float32, torch.bfloat16])


def assert_converted(
    path: Path, values: torch.Tensor, ranks: int, dtype: torch.dtype | None
) -> None:
    """Each rank reads some rows, or elements, which lie across blocks of 24 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BLOCKS, 24)
        assert_model(path, {"x": values})
        for to in ("dcp", "native"):
            target = path.parent / to
            convert(path, target, to=to, world_size=ranks, dtype=dtype)
            assert_model(target, {"x": values.to(dtype or values.dtype)})
            assert verify(target).is_intact


@given(grids(), st.integers(1, 3), dtypes)
@settings(max_examples=at_most(15, of_all=150), deadline=None)
def test_values_come_from_boxes_of_any_cuts(
    grid: Grid, ranks: int, dtype: torch.dtype | None
) -> None:
    values, parts = parts_of("x", grid)
    with tempfile.TemporaryDirectory() as folder:
        assert_converted(save_boxes(Path(folder, "boxes"), parts), values, ranks, dtype)


@given(grids(), st.data(), st.integers(1, 3), dtypes)
@settings(max_examples=at_most(15, of_all=150), deadline=None)
def test_values_come_from_tensors_of_any_strides(
    grid: Grid, data: st.DataObject, ranks: int, dtype: torch.dtype | None
) -> None:
    values, _ = parts_of("x", grid)
    order = data.draw(st.permutations(range(values.dim())))
    back = sorted(range(values.dim()), key=order.__getitem__)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.pt")
        torch.save({"x": values.permute(order).contiguous().permute(back)}, path)
        assert_converted(path, values, ranks, dtype)


def test_a_tensor_of_several_slabs_is_read_from_both_kinds_of_cuts(tmp_path: Path) -> None:
    values = torch.arange(3000.0 * 900).view(3000, 900)
    rows = [("rows", (at, 0), values[at : at + 1000]) for at in (0, 1000, 2000)]
    columns = [("columns", (0, at), values[:, at : at + 300]) for at in (0, 300, 600)]
    path = save_boxes(tmp_path / "boxes", [*rows, *columns])
    torch.save({"rows": values.clone(), "columns": values.t().contiguous().t()}, tmp_path / "x.pt")
    assert diff(path, tmp_path / "x.pt").is_same
    assert_model(convert(path, tmp_path / "one.safetensors"), {"rows": values, "columns": values})


def test_more_files_than_may_be_open_are_read(tmp_path: Path) -> None:
    parts = [("x", (number,), torch.tensor([number])) for number in range(200)]
    path = save_boxes(tmp_path / "boxes", parts)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, limits[1]))
    try:
        assert_model(path, {"x": torch.arange(200)})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    for kind in ("snapshots", "elsewhere"):
        snapshot, blobs = tmp_path / kind / "1", tmp_path / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir(exist_ok=True)
        save_file({"w": torch.ones(2)}, blobs / "abc")
        (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert_model(tmp_path / "snapshots/1", {"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="outside of its directory"):
        inspect(tmp_path / "elsewhere/1")


CALLS: dict[str, Callable[[Path, Path], object]] = {
    "native": lambda path, target: convert(path, target, to="native", world_size=2),
    "dcp": lambda path, target: convert(path, target, to="dcp", world_size=2),
    "verify": lambda path, target: verify(path),
    "diff": lambda path, target: diff(path, path),
}


@pytest.mark.parametrize(
    ("call", "error"), [*((call, KeyboardInterrupt) for call in CALLS), ("native", RuntimeError)]
)
def test_an_error_in_one_thread_ends_the_work_of_all(
    call: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.save({f"w{number}": torch.ones(8) for number in range(100)}, tmp_path / "model.pt")
    inspect(tmp_path / "model.pt")
    num_reads, read = 0, os.preadv

    def reads(*given: Any) -> int:
        nonlocal num_reads
        if os.cpu_count() == 1 or threading.current_thread() is not threading.main_thread():
            num_reads += 1
            if num_reads == 2:
                raise error("of the second read")
            time.sleep(0.02)
        return read(*given)

    monkeypatch.setattr(os, "preadv", reads)
    with pytest.raises(error, match="of the second read"):
        CALLS[call](tmp_path / "model.pt", tmp_path / "target")
    assert num_reads < 20
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_checksum_that_fails_is_an_error_and_not_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    source, outcome, number, original = tmp_path / "x.safetensors", [], 0, zlib.crc32
    save_file({"w": torch.arange(4000.0)}, source)
    monkeypatch.setattr(BLOCKS, 512)  # more of them than wait for the second thread
    native = convert(source, tmp_path / "native", to="native", world_size=1)

    def fail_once(*args: Any) -> int:
        nonlocal number
        number += 1
        if number == 5:
            raise MemoryError("no memory for a checksum")
        return original(*args)

    def run() -> None:
        try:
            CALLS["native"](source, tmp_path / "new") if call == "write" else verify(native)
        except MemoryError as error:
            outcome.append(str(error))

    before = {*os.listdir("/proc/self/fd")}
    monkeypatch.setattr(zlib, "crc32", fail_once)
    thread = threading.Thread(target=run, daemon=True)  # so that a wait without end is a failure
    thread.start()
    thread.join(20)
    assert outcome == ["no memory for a checksum"]
    assert {*os.listdir("/proc/self/fd")} == before
    assert not [thread for thread in threading.enumerate() if "checksums" in thread.name]
