"""Bytes of files in blocks: what is written is read, whatever the pieces; what is not what was
written is noticed."""

from __future__ import annotations

import dataclasses
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
from fsdp_compat.checkpoint._tools import reading
from fsdp_compat.checkpoint._tools.archive import Span
from fsdp_compat.checkpoint._tools.reading import Files, Read, merged
from fsdp_compat.errors import CheckpointError

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


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(memory_of(tensor))


def descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def checksum_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "checksums" in thread.name]


@dataclasses.dataclass
class Reads:
    """Which bytes of files were read, run by run."""

    runs: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.runs)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found, preadv = Reads(), os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        found.runs.append((offset, sum(len(buffer) for buffer in buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return found


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
    count=st.integers(2, 12),
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
                patch.setattr(reading, "SKIPPED_NBYTES", skipped_nbytes)
                files.read([Read(span, torch.int16, rows)], anew=True)
            assert torch.equal(target, expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 40), max_size=8),
    wants=st.lists(st.tuples(st.integers(0, 320), st.integers(0, 60)), max_size=6),
)
def test_any_run_that_was_written_is_read(
    path: Path, sizes: list[int], wants: list[tuple[int, int]]
) -> None:
    content = content_of(sum(sizes))
    path.unlink(missing_ok=True)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(content[at : at + size])
        at += size
    facts = written(path, *pieces)
    runs = [(at, min(at + nbytes, len(content))) for at, nbytes in wants if at <= len(content)]
    for known in ({path: facts}, {}):
        wanted = [want(path, start, cleared(stop - start)) for start, stop in runs]
        with Files(known) as files:
            files.check(wanted)
            files.read(wanted, anew=True)
        found = [bytes_of(one.target) for one in wanted]
        assert found == [content[start:stop] for start, stop in runs]


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
    (path).write_bytes(b"old")
    with pytest.raises(FileExistsError):
        BlockWriter(path, nothing)
    assert (path).read_bytes() == b"old"


def test_a_partial_write_is_completed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, content = os.write, content_of(50)
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    assert written(path, content).nbytes == 50
    assert (path).read_bytes() == content


def test_a_partial_read_is_completed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, content = os.preadv, content_of(50)
    facts = written(path, content)
    monkeypatch.setattr(
        os,
        "preadv",
        lambda descriptor, buffers, offset: preadv(descriptor, [buffers[0][:3]], offset),
    )
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


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_a_full_disk_leaves_no_thread_and_no_descriptor_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    before = descriptors()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        written(path, content_of(100))
    assert descriptors() == before
    assert not checksum_threads()


def test_a_writer_that_is_closed_early_or_twice_leaves_nothing_behind(tmp_path: Path) -> None:
    before = descriptors()
    writer = BlockWriter(tmp_path / "file", nothing)
    writer.write(memoryview(content_of(40)))
    writer.close()
    writer.close()
    written(tmp_path / "other", content_of(40))
    assert descriptors() == before
    assert not checksum_threads()


def test_each_flipped_bit_of_a_block_that_is_read_is_noticed(path: Path) -> None:
    content = content_of(BLOCK + 3)
    facts = written(path, content)
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (path).write_bytes(flipped)
        read_checked(
            path,
            facts,
            [want(path, 0 if bit >= 8 * BLOCK else BLOCK, cleared(1))],
        )
        with pytest.raises(CheckpointError, match="file is damaged, or has changed") as caught:
            read_checked(path, facts, [want(path, 3, cleared(BLOCK))])
        assert f"of the block at byte {bit // 8 // BLOCK * BLOCK}\n" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ("truncated", "39 bytes"),
        ("empty", "0 bytes"),
        ("longer", "41 bytes"),
        ("missing", "no such file"),
    ],
)
def test_a_file_of_another_length_is_named_with_the_expected_length(
    path: Path, change: str, got: str
) -> None:
    before = descriptors()
    content = content_of(40)
    facts = written(path, content)
    path.unlink()
    new = {"truncated": content[:-1], "empty": b"", "longer": content + b"x"}
    if change in new:
        path.write_bytes(new[change])
    target = cleared(40)
    with pytest.raises(CheckpointError, match="expected: a file of 40 bytes") as caught:
        read_checked(path, facts, [want(path, 0, target)])
    lines = [line.strip().partition(":")[0] for line in str(caught.value).splitlines()]
    assert lines[1:] == ["expected", "got", "where", "to do"]
    assert got in str(caught.value).splitlines()[2]
    assert str(path) in str(caught.value)
    assert not target.any()
    assert descriptors() == before


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


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    facts, target = written(tmp_path / "file", content_of(40)), cleared(40)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    read_checked(tmp_path / "link", facts, [want(tmp_path / "file", 0, target)])
    assert bytes_of(target) == content_of(40)


@pytest.mark.parametrize("num_blocks", [1, 3, 9])
def test_no_byte_is_copied_out_of_a_block_before_its_checksum_was_compared(
    path: Path, num_blocks: int
) -> None:
    """A file that was right when it was checked, and is not any more when it is read."""
    content = content_of(num_blocks * BLOCK)
    facts = written(path, content)
    check(path, facts, [want(path, 0, cleared(len(content)))])
    for block in range(num_blocks):
        changed = bytearray(content)
        changed[block * BLOCK + 5] ^= 1
        (path).write_bytes(changed)
        direct, converted = cleared(len(content)), torch.zeros(len(content), dtype=torch.int16)
        for target, dtype in ((direct, None), (converted, torch.uint8)):
            with pytest.raises(CheckpointError, match=f"of the block at byte {block * BLOCK}\n"):
                read_checked(path, facts, [want(path, 0, target, dtype)])
            assert target[: block * BLOCK].tolist() == list(content[: block * BLOCK])
            assert not target[block * BLOCK :].any()
    assert not checksum_threads()


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


def test_a_file_without_checksums_that_ends_too_early_is_named(path: Path) -> None:
    before = descriptors()
    (path).write_bytes(content_of(40))
    with pytest.raises(CheckpointError, match="the file ends at 40") as caught:
        read_plain([want(path, 30, cleared(11))])
    assert "expected: at least 41 bytes" in str(caught.value)
    assert descriptors() == before


@pytest.mark.parametrize(
    ("error", "said"), [(True, "Input/output error"), (False, "the file ends at 32")]
)
def test_a_file_that_can_no_longer_be_read_leaves_no_thread_and_no_descriptor_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: bool, said: str
) -> None:
    facts, before, preadv = written(path, content_of(90)), descriptors(), os.preadv

    def broken(descriptor: int, buffers: Any, offset: int) -> int:
        if offset < 2 * BLOCK:
            return preadv(descriptor, buffers, offset)
        if error:
            raise OSError(errno.EIO, "Input/output error")
        return 0

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises((OSError, CheckpointError), match=said):
        read_checked(path, facts, [want(path, 0, cleared(90))])
    assert descriptors() == before
    assert not checksum_threads()


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
    path: Path, reads: Reads, wanted: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    content = content_of(83)
    facts = written(path, content)
    for read in (check, read_checked):
        reads.runs.clear()
        read(
            path,
            facts,
            [want(path, start, cleared(nbytes)) for start, nbytes in wanted],
        )
        assert reads.runs == expected


def test_without_checksums_only_the_requested_bytes_are_read(path: Path, reads: Reads) -> None:
    (path).write_bytes(content_of(83))
    read_plain(
        [
            want(path, 40, cleared(20)),
            want(path, 5, cleared(3)),
            want(path, 9, cleared(0)),
        ],
    )
    assert reads.runs == [(5, 3), (40, 8), (48, 12)]


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
    computed, original = [], zlib.crc32

    def fail_once(*args: Any) -> int:
        computed.append(args)
        if len(computed) == 1:
            raise MemoryError("no memory for a checksum")
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


def test_facts_have_a_checksum_for_each_block() -> None:
    FileFacts(17, (1, 2))
    for nbytes, checksums in ((17, (1,)), (0, (1,)), (-1, ()), (16, (1, 2))):
        with pytest.raises(ValueError, match="do not fit"):
            FileFacts(nbytes, checksums)


# -- runs that follow one another


def test_runs_that_follow_one_another_in_the_file_and_in_memory_become_one(path: Path) -> None:
    memory = cleared(100)
    wanted = [
        want(path, 1010, memory[10:20]),
        want(path, 1000, memory[:10]),
        want(path, 1020, memory[20:30]),
    ]
    assert [
        (one.start, one.target.data_ptr() - memory.data_ptr(), one.target.nbytes)
        for one in merged(wanted)
    ] == [(1000, 0, 30)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([(0, 0, 4), (4, 5, 4)], 2),  # apart in memory
        ([(0, 0, 4), (5, 4, 4)], 2),  # apart in the file
        ([(0, 4, 4), (4, 0, 4)], 2),  # in another order
        ([(0, 0, 4), (5, 5, 4)], 2),  # apart in both: what lies between may be something else
        ([(0, 0, 4), (2, 2, 4)], 2),  # one inside of the other
    ],
)
def test_other_runs_stay_as_they_are(
    path: Path, wanted: list[tuple[int, int, int]], expected: int
) -> None:
    memory, file = cleared(100), path
    runs = [want(file, start, memory[at : at + nbytes]) for start, at, nbytes in wanted]
    assert len(merged(runs)) == expected
    apart = [want(file, start, cleared(nbytes)) for start, _, nbytes in wanted]
    assert len(merged(apart)) == len(wanted), "each has memory of its own"


def test_a_run_of_another_dtype_is_a_run_of_bytes(path: Path) -> None:
    values, memory = torch.arange(20.0), torch.zeros(20)
    facts = written(path, bytes_of(values))
    wanted = merged([want(path, 4 * at, memory[at : at + 5]) for at in (0, 5, 10, 15)])
    assert len(wanted) == 1
    read_checked(path, facts, wanted)
    assert torch.equal(memory, values)


@pytest.mark.parametrize(("first", "between"), [(0, 30), (30, 0)])
def test_a_run_between_two_merged_runs_in_memory_keeps_its_own_values(
    path: Path, first: int, between: int
) -> None:
    """A parameter that stood between two others when it was saved is not the one that stands
    between them now.

    Small parameters with a state of a narrower dtype than their own leave gaps that are as small as
    padding.
    """
    content = content_of(60)
    facts, memory = written(path, content), cleared(12)
    last = first + 8
    places = {first: memory[:4], between: memory[4:8], last: memory[8:]}
    read_checked(path, facts, merged([want(path, at, target) for at, target in places.items()]))
    expected = (content[at : at + 4] for at in (first, between, last))
    assert bytes_of(memory) == b"".join(expected)


def test_memory_is_that_of_the_tensor_and_keeps_it() -> None:
    tensor = torch.arange(4, dtype=torch.int16)
    memory = memory_of(tensor[1:3])
    assert (len(memory), bytes(memory)) == (4, b"\x01\x00\x02\x00")
    memory[0] = 9
    assert tensor.tolist() == [0, 9, 2, 3]
    assert len(memory_of(torch.empty(0, 3))) == 0
    assert bytes(memory_of(torch.ones(8, dtype=torch.bfloat16))) == b"\x80\x3f" * 8, (
        "after the tensor is gone"
    )
