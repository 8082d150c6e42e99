"""Values are put together from any boxes of any files, and boxes that do not fit are noticed."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compat._layout.box import Box
from fsdp_compat._layout.spec import Interval, row_major_strides
from fsdp_compat.checkpoint._tools.archive import (
    Span,
    StoredPiece,
    StoredTensor,
    coverage_problem,
    pieces_of_run,
)
from fsdp_compat.checkpoint._tools.paths import member
from fsdp_compat.checkpoint._tools.reader import Files, boxes_of, read, read_box
from fsdp_compat.errors import CheckpointError


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that cover it once: a grid of any cuts, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    boxes = [
        Box(tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges))
        for ranges in itertools.product(*(itertools.pairwise(ends) for ends in cuts))
    ]
    return shape, draw(st.permutations(boxes))


@given(grids(), st.data())
def test_values_come_from_boxes_of_any_strides_in_slabs_of_any_size(
    grid: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = grid
    values = torch.randn(shape, dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder, Files() as files:
        pieces = []
        for number, box in enumerate(boxes):
            path = Path(folder) / f"{number % 3}"
            ranges = zip(box.offsets, box.sizes, strict=True)
            part = values[tuple(slice(at, at + size) for at, size in ranges)]
            order = data.draw(st.permutations(range(part.dim())))
            stored = part.permute(order).contiguous()
            strides = dict(zip(order, stored.stride(), strict=True))
            start = path.stat().st_size if path.exists() else 0
            with open(path, "ab") as file:
                file.write(stored.numpy().tobytes())
            span = Span(path, start, tuple(strides[dim] for dim in range(part.dim())))
            pieces.append(StoredPiece(box, span))
        tensor = StoredTensor("x", values.dtype, shape, tuple(pieces))
        assert coverage_problem(shape, boxes) is None
        assert torch.equal(read(tensor, files), values)
        slabs = boxes_of(shape, data.draw(st.integers(1, 40)))
        found = torch.cat([read_box(tensor, box, files).view(-1) for box in slabs])
        assert torch.equal(found.view(shape), values)


@given(grids(), st.data())
def test_a_box_too_many_or_too_few_is_told(
    grid: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = grid
    which = data.draw(st.integers(0, len(boxes) - 1))
    less = [box for number, box in enumerate(boxes) if number != which]
    assert "missing" in str(coverage_problem(shape, less))
    assert coverage_problem(shape, [*boxes, boxes[which]]) is not None
    moved = Box(tuple(at + 9 for at in boxes[which].offsets), boxes[which].sizes)
    if shape:
        assert "outside" in str(coverage_problem(shape, [*less, moved]))


@given(st.lists(st.integers(0, 5), max_size=3), st.data())
def test_runs_become_boxes_that_follow_one_another_in_the_file(
    sizes: list[int], data: st.DataObject
) -> None:
    shape = tuple(sizes)
    numel = torch.empty(shape).numel()
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    values = torch.arange(numel, dtype=torch.int32)
    with tempfile.TemporaryDirectory() as folder, Files() as files:
        path = Path(folder) / "x"
        path.write_bytes(bytes(3) + values.numpy().tobytes())
        pieces = [
            piece
            for low, high in itertools.pairwise(cuts)
            for piece in pieces_of_run(shape, Interval(low, high), path, 3 + 4 * low, 4)
        ]
        tensor = StoredTensor("x", torch.int32, shape, tuple(pieces))
        assert coverage_problem(shape, [piece.box for piece in pieces]) is None
        assert torch.equal(read(tensor, files).view(-1), values)


def test_more_files_than_may_be_open_are_read(tmp_path: Path) -> None:
    pieces = []
    for number in range(200):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number]))
        pieces.append(StoredPiece(Box((number,), (1,)), Span(path, 0, row_major_strides((1,)))))
    tensor = StoredTensor("x", torch.uint8, (200,), tuple(pieces))
    with Files() as files:
        assert read(tensor, files).tolist() == list(range(200))
        assert len(files._open) == 64


def test_names_and_links_that_leave_the_directory_are_refused(tmp_path: Path) -> None:
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "own").write_bytes(b"x")
    (inside / "alias").symlink_to("own")
    for name in ("../secret", "/etc/passwd", "a/../../secret", "link", "", "a\0b"):
        with pytest.raises(CheckpointError, match="outside of its directory"):
            member(inside, name)
    assert member(inside, "alias") == inside / "alias"
    snapshot = tmp_path / "models--x" / "snapshots" / "1"
    blob = tmp_path / "models--x" / "blobs" / "abc"
    for folder in (snapshot, blob.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(b"x")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")  # the hub's cache
    assert member(snapshot, "model.safetensors").read_bytes() == b"x"
