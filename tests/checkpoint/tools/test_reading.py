"""Values are put together from any boxes of any files of the directory."""

from __future__ import annotations

import os
import pickle
import resource
import tempfile
import threading
import time
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
from tests.support.checkpoints import save_dcp
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


@given(grids(), st.integers(1, 3))
@settings(max_examples=at_most(30, of_all=150), deadline=None)
def test_values_come_from_boxes_of_any_cuts(grid: Grid, ranks: int) -> None:
    values, parts = parts_of("x", grid)
    with tempfile.TemporaryDirectory() as folder:
        path = save_boxes(Path(folder, "boxes"), parts)
        assert_model(path, {"x": values})
        for to in ("dcp", "native"):  # each rank reads some rows, or elements
            assert_model(convert(path, Path(folder, to), to=to, world_size=ranks), {"x": values})


@given(grids(), st.data(), st.integers(1, 3))
@settings(max_examples=at_most(30, of_all=150), deadline=None)
def test_values_come_from_tensors_of_any_strides(
    grid: Grid, data: st.DataObject, ranks: int
) -> None:
    values, _ = parts_of("x", grid)
    order = data.draw(st.permutations(range(values.dim())))
    back = sorted(range(values.dim()), key=order.__getitem__)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"x": values.permute(order).contiguous().permute(back)}, Path(folder, "x.pt"))
        for to in ("dcp", "native"):
            path = convert(Path(folder, "x.pt"), Path(folder, to), to=to, world_size=ranks)
            assert_model(path, {"x": values})


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


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "link", "", "a\0b"])
def test_names_and_links_that_leave_the_directory_are_refused(name: str, tmp_path: Path) -> None:
    path = save_dcp({"w": torch.ones(2)}, tmp_path / "checkpoint")
    (tmp_path / "secret").write_bytes((path / "__0_0.distcp").read_bytes())
    (path / "link").symlink_to(tmp_path / "secret")
    (path / "alias").symlink_to("__0_0.distcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for relative_path in ("alias", name):
        for place in metadata.storage_data.values():
            place.relative_path = relative_path
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        if relative_path == "alias":
            assert_model(path, {"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="outside of its directory"):
        inspect(path)


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


# -- threads


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


def test_only_long_work_shows_its_seconds_and_leaves_an_empty_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(8)}, tmp_path / "model.pt")
    inspect(tmp_path / "model.pt", progress=True)
    assert capsys.readouterr().err == ""
    flushed, read = threading.Event(), os.pread
    monkeypatch.setattr("sys.stderr.flush", flushed.set)
    monkeypatch.setattr(os, "pread", lambda *given: flushed.wait(20) and read(*given))
    inspect(tmp_path / "model.pt", progress=True)
    shown = capsys.readouterr().err
    assert shown.startswith("\rreading the headers of model.pt ... 2 s")
    assert shown.endswith(f"\r{'':79}\r")
