"""Bytes of files in blocks: what is written is read, whatever the pieces; what is not what was
written is noticed."""

from __future__ import annotations

import os
import random
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_compat.checkpoint import _blocks as blocks
from fsdp_compat.checkpoint._blocks import BlockWriter, FileFacts
from fsdp_compat.checkpoint._tools import reader
from fsdp_compat.checkpoint._tools.archive import Span
from fsdp_compat.checkpoint._tools.reader import Files, Read, merged
from fsdp_compat.errors import CheckpointError
from tests.support.checkpoints import flip, noted_reads

BLOCK = 16  # in these tests


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_NBYTES", BLOCK)
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def content_of(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def written(path: Path, *pieces: bytes) -> FileFacts:
    writer = BlockWriter(path, lambda _: None)
    try:
        for piece in pieces:
            writer.write(memoryview(piece))
        return writer.finish()
    finally:
        writer.close()


def want(path: Path, start: int, target: torch.Tensor) -> Read:
    """Elements that follow one another in the file."""
    return Read(Span(path, start, (1,)), target.dtype, target)


def cleared(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_a_file_is_what_was_written_and_its_checksums_are_those_of_its_blocks(
    tmp_path: Path, nbytes: int
) -> None:
    content = content_of(nbytes)
    for step in (1, 3, BLOCK, BLOCK + 1, 1000):
        path = tmp_path / str(step)
        facts = written(path, *(content[at : at + step] for at in range(0, nbytes, step)))
        assert path.read_bytes() == content
        assert facts == FileFacts(
            nbytes, tuple(zlib.crc32(content[at : at + BLOCK]) for at in range(0, nbytes, BLOCK))
        )


numbers = st.integers(0, 20)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    head=st.integers(0, 5),
    numel=st.integers(1, 40),
    count=st.integers(1, 12),
    gaps=st.tuples(numbers, st.integers(0, 5)),
    places=st.tuples(numbers, st.integers(0, 5)),
    dtypes=st.sampled_from(
        [
            (torch.int16, torch.int16, None),
            (torch.int16, torch.float32, None),
            (torch.float64, torch.bfloat16, None),
            (torch.float64, torch.float32, torch.bfloat16),
        ]
    ),
)
def test_rows_are_read_from_and_to_regular_distances_and_converted(
    path: Path,
    head: int,
    numel: int,
    count: int,
    gaps: tuple[int, int],
    places: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
) -> None:
    """head: so many bytes come first, and elements lie across blocks."""
    dtype, to_dtype, through = dtypes
    stride, to_stride = numel + gaps[0], numel + gaps[1]
    stored = torch.arange(places[0] + count * stride).to(dtype)
    path.unlink(missing_ok=True)
    facts = written(path, bytes(head), bytes_of(stored))
    expected = torch.full((places[1] + count * to_stride,), -1, dtype=to_dtype)
    for number in range(count):
        to, at = places[1] + number * to_stride, places[0] + number * stride
        expected[to : to + numel] = stored[at : at + numel].to(through or dtype)
    span = Span(path, head + dtype.itemsize * places[0], (stride, 1))
    for skipped_nbytes in (1, 10_000):
        for known in ({path: facts}, {}):
            target = torch.full_like(expected, -1)
            rows = target.as_strided((count, numel), (to_stride, 1), places[1])
            with pytest.MonkeyPatch.context() as patch, Files(known) as files:
                patch.setattr(reader, "SKIPPED_NBYTES", skipped_nbytes)
                wanted = [Read(span, dtype, rows, through)]
                files.check(wanted)
                files.read(wanted, anew=True)
            assert torch.equal(target, expected)


@pytest.mark.parametrize("num_blocks", [1, 3, 9])
def test_no_byte_is_copied_out_of_a_block_before_its_checksum_was_compared(
    path: Path, num_blocks: int
) -> None:
    """A file that was right when it was checked, and is not any more when it is read."""
    content = content_of(num_blocks * BLOCK)
    with Files({path: written(path, content)}) as files:
        files.check([want(path, 0, cleared(len(content)))])
        for start in range(0, len(content), BLOCK):
            flip(path, start + 5)
            direct, converted = cleared(len(content)), torch.zeros(len(content), dtype=torch.int16)
            for target in (direct, converted):
                wanted = Read(Span(path, 0, (1,)), torch.uint8, target)
                with pytest.raises(CheckpointError, match=f"of the block at byte {start}\n"):
                    files.read([wanted], anew=True)
                assert target[:start].tolist() == list(content[:start])
                assert not target[start:].any()
            flip(path, start + 5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(wanted=st.lists(st.tuples(st.integers(0, 63), numbers), max_size=5))
def test_only_requested_blocks_are_read_and_each_once(
    path: Path, wanted: list[tuple[int, int]]
) -> None:
    content = content_of(83)
    path.unlink(missing_ok=True)
    facts = written(path, content)
    requests = [want(path, start, cleared(nbytes)) for start, nbytes in wanted]
    needed = {at // BLOCK for start, nbytes in wanted for at in range(start, start + nbytes)}
    with Files({path: facts}) as files:
        for read in (files.check, lambda reads: files.read(reads, anew=True)):
            with noted_reads() as runs:
                read(requests)
            assert runs == [(n * BLOCK, min(BLOCK, 83 - n * BLOCK)) for n in sorted(needed)]
    found = [bytes_of(each.target) for each in requests]
    assert found == [content[start : start + nbytes] for start, nbytes in wanted]


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_checksum_that_fails_is_an_error_and_not_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    content = content_of(BLOCK * 3 * blocks.QUEUED)  # more than wait for the second thread
    facts = written(tmp_path / "good", content)
    errors, original = [MemoryError("no memory for a checksum")], zlib.crc32

    def fail_once(*args: Any) -> int:
        if errors:
            raise errors.pop()
        return original(*args)

    monkeypatch.setattr(blocks.zlib, "crc32", fail_once)
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            if call == "write":
                written(tmp_path / "new", content)
            else:
                with Files({tmp_path / "good": facts}) as files:
                    files.check([want(tmp_path / "good", 0, cleared(len(content)))])
        except MemoryError as error:
            outcome.append(error)

    before = {*os.listdir("/proc/self/fd")}
    thread = threading.Thread(target=run, daemon=True)  # so that a wait without end is a failure
    thread.start()
    thread.join(20)
    assert [str(error) for error in outcome] == ["no memory for a checksum"]
    assert {*os.listdir("/proc/self/fd")} == before
    assert not [thread for thread in threading.enumerate() if "checksums" in thread.name]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([(10, 10, 10), (0, 0, 10), (20, 20, 10)], 1),  # in any order
        ([(0, 0, 4), (4, 5, 4)], 2),  # apart in memory
        ([(0, 0, 4), (5, 4, 4)], 2),  # apart in the file
        ([(0, 4, 4), (4, 0, 4)], 2),  # in another order
        ([(0, 0, 4), (2, 2, 4)], 2),  # one inside of the other
    ],
)
def test_runs_that_follow_one_another_in_the_file_and_in_memory_become_one(
    path: Path, wanted: list[tuple[int, int, int]], expected: int
) -> None:
    memory = cleared(100)
    runs = [want(path, start, memory[at : at + nbytes]) for start, at, nbytes in wanted]
    assert len(merged(runs)) == expected
    apart = [want(path, start, cleared(nbytes)) for start, _, nbytes in wanted]
    assert len(merged(apart)) == len(wanted), "each has memory of its own"
