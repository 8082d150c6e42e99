"""Bytes of files in blocks: what is written is read, whatever the pieces; what is not what was
written is noticed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_compat._comm.host_memory import memory_of
from fsdp_compat.checkpoint import _blocks as blocks
from fsdp_compat.checkpoint._blocks import BlockWriter, FileFacts, sync_directory
from fsdp_compat.checkpoint._tools import reader
from fsdp_compat.checkpoint._tools.archive import Span
from fsdp_compat.checkpoint._tools.reader import Files, Read, merged
from fsdp_compat.errors import CheckpointError
from tests.support.checkpoints import flip, noted_reads, refused

BLOCK = 16  # in these tests
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 3]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_NBYTES", BLOCK)
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def nothing(nbytes: int) -> None:
    pass


def content_of(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def written(path: Path, *pieces: bytes) -> FileFacts:
    writer = BlockWriter(path, nothing)
    try:
        for piece in pieces:
            writer.write(memoryview(piece))
        return writer.finish()
    finally:
        writer.close()


def want(
    path: Path,
    start: int,
    target: torch.Tensor,
    dtype: torch.dtype | None = None,
    through: torch.dtype | None = None,
) -> Read:
    """Elements that follow one another in the file."""
    return Read(Span(path, start, (1,)), dtype or target.dtype, target, through)


def check(
    path: Path, facts: FileFacts, reads: list[Read], tick: Callable[[int], object] = nothing
) -> None:
    with Files({path: facts}) as files:
        files.check(reads, tick)


def read_checked(
    path: Path, facts: FileFacts, reads: list[Read], tick: Callable[[int], object] = nothing
) -> None:
    with Files({path: facts}) as files:
        files.read(reads, tick, anew=True)


def read_plain(reads: list[Read], tick: Callable[[int], object] = nothing) -> None:
    with Files() as files:
        files.read(reads, tick)


def cleared(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


@contextlib.contextmanager
def leaves_nothing() -> Iterator[None]:
    """The context leaves no thread and no descriptor behind."""

    def held() -> set[str]:
        files = os.listdir("/proc/self/fd")
        return {name for name in files if os.path.exists(f"/proc/self/fd/{name}")}

    before = held()
    yield
    assert held() == before
    assert not [thread for thread in threading.enumerate() if "checksums" in thread.name]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(memory_of(tensor))


# -- writing


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_file_is_what_was_written_and_its_checksums_are_those_of_its_blocks(
    tmp_path: Path, nbytes: int
) -> None:
    content = content_of(nbytes)
    for number, step in enumerate([1, 3, BLOCK, BLOCK + 1, 1000]):
        path = tmp_path / str(number)
        facts = written(path, *(content[at : at + step] for at in range(0, nbytes, step)))
        assert path.read_bytes() == content
        assert facts == FileFacts(
            nbytes, tuple(zlib.crc32(content[at : at + BLOCK]) for at in range(0, nbytes, BLOCK))
        )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    numel=st.integers(1, 40),
    count=st.integers(1, 12),
    gaps=st.tuples(st.integers(0, 30), st.integers(0, 5)),
    places=st.tuples(st.integers(0, 20), st.integers(0, 5)),
    dtype=st.sampled_from([torch.int16, torch.float32]),
)
def test_rows_are_read_from_and_to_regular_distances(
    path: Path,
    numel: int,
    count: int,
    gaps: tuple[int, int],
    places: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    stride, to_stride = numel + gaps[0], numel + gaps[1]
    stored = torch.arange(places[0] + count * stride, dtype=torch.int16)
    path.unlink(missing_ok=True)
    facts = written(path, b"head", bytes_of(stored))
    expected = torch.full((places[1] + count * to_stride,), -1, dtype=dtype)
    for number in range(count):
        to, at = places[1] + number * to_stride, places[0] + number * stride
        expected[to : to + numel] = stored[at : at + numel]
    span = Span(path, 4 + 2 * places[0], (stride, 1))
    for skipped_nbytes in (1, 10_000):
        for known in ({path: facts}, {}):
            target = torch.full_like(expected, -1)
            rows = target.as_strided((count, numel), (to_stride, 1), places[1])
            with pytest.MonkeyPatch.context() as patch, Files(known) as files:
                patch.setattr(reader, "SKIPPED_NBYTES", skipped_nbytes)
                wanted = [Read(span, torch.int16, rows)]
                files.check(wanted)
                files.read(wanted, anew=True)
            assert torch.equal(target, expected)


def test_progress_is_reported_in_bytes(path: Path) -> None:
    told: list[int] = []
    writer = BlockWriter(path, told.append)
    writer.write(memoryview(bytes(40)))
    writer.write(memoryview(bytes(2)))
    facts = writer.finish()
    assert told == [16, 16, 8, 2]
    told.clear()
    check(path, facts, [want(path, 0, cleared(41))], told.append)
    assert told == [16, 16, 10]
    told.clear()
    read_checked(path, facts, [want(path, 1, cleared(40))], told.append)
    assert told == [15, 16, 9]
    told.clear()
    read_plain([want(path, 1, cleared(40))], told.append)
    assert told == [15, 16, 9]


def test_existing_files_are_not_overwritten(path: Path) -> None:
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        BlockWriter(path, nothing)
    assert path.read_bytes() == b"old"


def test_partial_writes_and_reads_are_completed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, preadv, content = os.write, os.preadv, content_of(50)
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    monkeypatch.setattr(os, "preadv", lambda file, data, at: preadv(file, [data[0][:3]], at))
    facts = written(path, content)
    assert path.read_bytes() == content
    wanted = want(path, 5, cleared(40))
    read_checked(path, facts, [wanted])
    assert bytes_of(wanted.target) == content[5:45]


def test_a_file_is_durable_before_its_facts_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    written(tmp_path / "file", content_of(40))
    sync_directory(tmp_path)
    assert synced[0] == 40
    assert len(synced) == 2


def test_a_writer_that_fails_or_is_closed_early_or_twice_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with leaves_nothing():
        writer = BlockWriter(tmp_path / "file", nothing)
        writer.write(memoryview(content_of(40)))
        writer.close()
        writer.close()
        for name in ("write", "fsync"):
            with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
                patch.setattr(os, name, full)
                written(tmp_path / name, content_of(100))


def test_each_flipped_bit_of_a_block_that_is_read_is_noticed(path: Path) -> None:
    content = content_of(BLOCK + 3)
    facts = written(path, content)
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        other = want(path, 0 if bit >= 8 * BLOCK else BLOCK, cleared(1))
        read_checked(path, facts, [other])
        with pytest.raises(CheckpointError, match="file is damaged, or has changed") as caught:
            read_checked(path, facts, [want(path, 3, cleared(BLOCK))])
        assert f"of the block at byte {bit // 8 // BLOCK * BLOCK}\n" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda path: os.truncate(path, 39), "39 bytes"),
        (lambda path: os.truncate(path, 0), "0 bytes"),
        (lambda path: os.truncate(path, 41), "41 bytes"),
        (Path.unlink, "no such file"),
    ],
)
def test_a_file_of_another_length_is_named_with_the_expected_length(
    path: Path, change: Callable[[Path], object], got: str
) -> None:
    facts = written(path, content_of(40))
    change(path)
    target = cleared(40)
    with leaves_nothing(), refused(CheckpointError, "expected: a file of 40 bytes", got, str(path)):
        read_checked(path, facts, [want(path, 0, target)])
    assert not target.any()


OTHER = "a FIFO, a socket or a device"
KINDS: dict[Callable[[Path], object], str] = {
    os.mkfifo: OTHER,
    Path.mkdir: "a directory",
    lambda path: socket.socket(socket.AF_UNIX).bind(str(path)): OTHER,
    lambda path: path.symlink_to("/dev/zero"): OTHER,
}


@pytest.mark.parametrize(("make", "kind"), KINDS.items())
def test_a_file_that_is_not_regular_is_refused_before_it_is_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], kind: str
) -> None:
    make(path)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    facts, wanted = FileFacts(3, (0,)), [want(path, 0, cleared(3))]
    for read in (
        lambda: check(path, facts, wanted),
        lambda: read_checked(path, facts, wanted),
        lambda: read_plain(wanted),
    ):
        said = f"file is not a regular file(.|\n)*got: +{kind}\n"
        with pytest.raises(CheckpointError, match=said):
            read()


@pytest.mark.parametrize("num_blocks", [1, 3, 9])
def test_no_byte_is_copied_out_of_a_block_before_its_checksum_was_compared(
    path: Path, num_blocks: int
) -> None:
    """A file that was right when it was checked, and is not any more when it is read."""
    content = content_of(num_blocks * BLOCK)
    facts = written(path, content)
    check(path, facts, [want(path, 0, cleared(len(content)))])
    for start in range(0, len(content), BLOCK):
        flip(path, start + 5)
        direct, converted = cleared(len(content)), torch.zeros(len(content), dtype=torch.int16)
        for target, dtype in ((direct, None), (converted, torch.uint8)):
            with (
                leaves_nothing(),
                pytest.raises(CheckpointError, match=f"of the block at byte {start}\n"),
            ):
                read_checked(path, facts, [want(path, 0, target, dtype)])
            assert target[:start].tolist() == list(content[:start])
            assert not target[start:].any()
        flip(path, start + 5)


def test_elements_that_lie_across_blocks_are_converted_whole(path: Path) -> None:
    """Files of others need not be aligned."""
    values = torch.arange(30, dtype=torch.float64)
    facts = written(path, bytes(3), bytes_of(values))
    for known in ({path: facts}, {}):
        target, half, rounded = torch.zeros(30), torch.zeros(30).bfloat16(), torch.zeros(30)
        wanted = [want(path, 3, each, torch.float64) for each in (target, half)]
        wanted.append(want(path, 3, rounded, torch.float64, torch.bfloat16))
        with Files(known) as files:
            files.read(wanted, anew=True)
        assert torch.equal(target, values.float())
        assert torch.equal(half, values.bfloat16())
        assert torch.equal(rounded, values.bfloat16().float())


@pytest.mark.parametrize(
    ("error", "said"), [(True, "Input/output error"), (False, "the file ends at 32")]
)
def test_a_file_that_can_no_longer_be_read_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: bool, said: str
) -> None:
    facts, preadv = written(path, content_of(90)), os.preadv

    def broken(descriptor: int, buffers: Any, offset: int) -> int:
        if offset < 2 * BLOCK:
            return preadv(descriptor, buffers, offset)
        if error:
            raise OSError(errno.EIO, "Input/output error")
        return 0

    monkeypatch.setattr(os, "preadv", broken)
    wanted = [want(path, 0, cleared(90))]
    for read in (lambda: read_checked(path, facts, wanted), lambda: read_plain(wanted)):
        with leaves_nothing(), pytest.raises((OSError, CheckpointError), match=said):
            read()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([(0, 1)], [(0, 16)]),
        ([(15, 2)], [(0, 16), (16, 16)]),
        ([(16, 16)], [(16, 16)]),
        ([(50, 2), (33, 2), (34, 5)], [(32, 16), (48, 16)]),
        ([(80, 3)], [(80, 3)]),  # the last block is shorter
        ([(7, 60)], [(0, 16), (16, 16), (32, 16), (48, 16), (64, 16)]),
        ([], []),
        ([(5, 0), (83, 0)], []),
    ],
    ids=str,
)
def test_only_requested_blocks_are_read_and_each_once(
    path: Path, wanted: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    content = content_of(83)
    facts = written(path, content)
    requests = [want(path, start, cleared(nbytes)) for start, nbytes in wanted]
    for read in (check, read_checked):
        with noted_reads() as runs:
            read(path, facts, requests)
        assert runs == expected
    found = [bytes_of(each.target) for each in requests]
    assert found == [content[start : start + nbytes] for start, nbytes in wanted]


def test_without_checksums_only_the_requested_bytes_are_read(path: Path) -> None:
    path.write_bytes(content_of(83))
    with noted_reads() as runs:
        read_plain([want(path, start, cleared(n)) for start, n in ((40, 20), (5, 3), (9, 0))])
    assert runs == [(5, 3), (40, 8), (48, 12)]


def test_a_request_beyond_the_end_of_the_file_raises_value_error(path: Path) -> None:
    facts = written(path, content_of(20))
    with pytest.raises(ValueError, match="bytes 18 to 21 requested of 20"):
        read_checked(path, facts, [want(path, 18, cleared(3))])


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
                request = want(tmp_path / "good", 0, cleared(len(content)))
                check(tmp_path / "good", facts, [request])
        except MemoryError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)  # so that a wait without end is a failure
    thread.start()
    thread.join(20)
    assert [str(error) for error in outcome] == ["no memory for a checksum"]


# -- runs that follow one another


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([(10, 10, 10), (0, 0, 10), (20, 20, 10)], 1),  # in any order
        ([(0, 0, 4), (4, 5, 4)], 2),  # apart in memory
        ([(0, 0, 4), (5, 4, 4)], 2),  # apart in the file
        ([(0, 4, 4), (4, 0, 4)], 2),  # in another order
        ([(0, 0, 4), (5, 5, 4)], 2),  # apart in both: what lies between may be something else
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


def test_a_run_of_another_dtype_is_a_run_of_bytes(path: Path) -> None:
    values, memory = torch.arange(20.0), torch.zeros(20)
    facts = written(path, bytes_of(values))
    wanted = merged([want(path, 4 * at, memory[at : at + 5]) for at in (0, 5, 10, 15)])
    assert len(wanted) == 1
    read_checked(path, facts, wanted)
    assert torch.equal(memory, values)
