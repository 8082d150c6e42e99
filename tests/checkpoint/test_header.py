"""The head of a safetensors file: the library reads ours, we read the library's, and nothing else
is taken for one."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fsdp_compat._archive.header import (
    _NAMES,
    TensorInfo,
    encode_header,
    read_header,
)
from fsdp_compat._comm.host_memory import memory_of
from fsdp_compat.errors import CheckpointError, UsageError
from tests.support.checkpoints import refused

DTYPES = [
    getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]

same_path = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
names = st.text(max_size=8).filter(lambda name: name != "__metadata__")
tensors = st.dictionaries(names, st.tuples(st.sampled_from(DTYPES), shapes), max_size=6)
texts = st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=3)


def made(facts: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """Tensors whose bytes are all different from zero, and alike in nothing but their dtypes."""
    found = {}
    for number, (name, (dtype, shape)) in enumerate(facts.items()):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        values = torch.arange(number + 1, number + 1 + nbytes) % 100 + 1
        values = torch.ones(nbytes) if dtype is torch.bool else values
        found[name] = values.to(torch.uint8).view(dtype).view(shape)
    return found


def write(
    path: Path, values: dict[str, torch.Tensor], metadata: dict[str, str]
) -> list[TensorInfo]:
    """Write a file from a header of ours."""
    head, entries = encode_header(
        [(name, value.dtype, tuple(value.shape)) for name, value in values.items()], metadata
    )
    content = bytearray(head)
    for entry in entries:
        assert entry.start == len(content), "nothing lies between two tensors"
        content += memory_of(values[entry.name])
    path.write_bytes(content)
    return entries


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape)
        assert bytes(memory_of(actual[name].contiguous())) == bytes(memory_of(value))


@same_path
@given(facts=tensors, metadata=texts)
def test_the_library_reads_our_files_and_we_read_the_librarys(
    tmp_path: Path, facts: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    values, path = made(facts), tmp_path / "file.safetensors"
    entries = write(path, values, metadata)
    assert_same(safetensors.torch.load_file(path), values)
    with safetensors.safe_open(path, "pt") as file:
        assert (file.metadata() or {}) == metadata
    assert read_header(path) == ({entry.name: entry for entry in entries}, metadata)
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in entries), (
        "aligned, so that a file can be mapped"
    )
    safetensors.torch.save_file(values, path, metadata or None)
    assert read_header(path)[1] == metadata
    assert_same(read_here(path) or {}, values)


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__"]])
def test_names_that_cannot_be_in_a_file_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="name"):
        encode_header([(name, torch.float32, (2,)) for name in names], {"format": "pt"})


def file_of(described: Any, nbytes: int = 8, length: int | None = None) -> bytes:
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(nbytes)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EMPTY = {**GOOD, "shape": [0]}
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "no text": bytes(8),
    "an enormous length": struct.pack("<Q", 2**64 - 1) + b"{}",
    "pickle": b"\x80\x04\x95" + bytes(100),
    "no json": file_of(b"{]"),
    "a list": file_of([]),
    "null": file_of(None),
    "deep": file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "wide": file_of(b'{"a":[' + b"{}," * 1_100_000 + b"[]]}"),
    "texts are a list": file_of({"__metadata__": [], "a": GOOD}),
    "texts are numbers": file_of({"__metadata__": {"a": 1}, "a": GOOD}),
    "many large sizes": file_of(
        {"a": {**GOOD, "shape": [10**18] * 100_000 + [0], "data_offsets": [0, 0]}}, 0
    ),
    "the same place": file_of({"a": GOOD, "b": GOOD}),
    "not a number": file_of(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [NaN, NaN]}}'),
    "facts are a text": file_of({"a": "dtype"}),
    "a hole": file_of({"a": GOOD, "b": {**GOOD, "data_offsets": [12, 20]}}, 20),
    "a hole at the end": file_of({"a": GOOD, "b": {**EMPTY, "data_offsets": [12, 12]}}, 12),
    "bytes and no tensors": file_of({}),
    "a second text": file_of(json.dumps({"a": GOOD}).encode() + b"{}"),
    "a field twice": file_of(
        b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    ),
    "2**64 elements": file_of(
        {"a": {**GOOD, "shape": [2**32, 2**32, 0], "data_offsets": [0, 0]}}, 0
    ),
}

# Read by both alike.
READ: dict[str, bytes] = {
    "nothing": file_of({}, 0),
    "texts that are null": file_of({"__metadata__": None, "a": GOOD}),
    "in another order": file_of({"b": {**GOOD, "data_offsets": [8, 16]}, "a": GOOD}, 16),
    "an empty tensor after it": file_of(
        {"a": GOOD, "b": {**GOOD, "shape": [0, 2**40], "data_offsets": [8, 8]}}
    ),
    "a scalar without a name": file_of({"": {**GOOD, "shape": [], "data_offsets": [0, 4]}}, 4),
    "more than the facts": file_of({"a": {**GOOD, "x": [1.5, None, {"y": -3}], "\u00e9": {}}}),
    "f8_e8m0": file_of({"a": {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [0, 8]}}),
}

# Read by the library, though it could be read in two ways: refused.
AMBIGUOUS: dict[str, bytes] = {
    "a tensor twice": file_of(
        json.dumps({"a": GOOD}).encode()[:-1] + b',"a":' + json.dumps(GOOD).encode() + b"}"
    ),
    "a text twice": file_of(b'{"__metadata__": {"b": "c", "b": "d"}}', 0),
}


def read_here(path: Path) -> dict[str, torch.Tensor] | None:
    """Read a file as its header says, or return None if it is refused."""
    try:
        entries, _ = read_header(path)
    except CheckpointError:
        return None
    content = path.read_bytes()
    return {
        name: torch.tensor(list(content[entry.start : entry.stop]), dtype=torch.uint8)
        .view(entry.dtype)
        .view(entry.shape)
        for name, entry in entries.items()
    }


def assert_read_alike(path: Path) -> tuple[bool, bool]:
    """Require an error here where the library has one, and never another answer than the library's.
    Return whether it is read here, and by the library."""
    ours = read_here(path)
    try:
        theirs = safetensors.torch.load_file(path)
    except Exception:
        theirs = None
    if ours is not None:
        assert theirs is not None, path.read_bytes()
        for name, value in theirs.items():
            if "_x2" in str(value.dtype):  # two numbers in a byte are bytes here, 1-d
                theirs[name] = value.view(torch.uint8).flatten()
        assert_same(ours, theirs)
    return ours is not None, theirs is not None


@pytest.mark.parametrize("name", [*DAMAGED, *READ, *AMBIGUOUS])
def test_the_library_reads_and_refuses_the_same_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes((DAMAGED | READ | AMBIGUOUS)[name])
    assert assert_read_alike(path) == (name in READ, name not in DAMAGED)
    if name not in READ:
        with refused(CheckpointError, "odd.safetensors is not a safetensors") as raised:
            read_header(path)
        assert len(str(raised.value)) < 2000


def test_very_many_tensors_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    """As in a file that the library has published; in a header below and above the limit."""
    facts = {"dtype": "F32", "shape": [200, 200], "data_offsets": [0, 160_000]}
    text, path = json.dumps({f"weight_{i}": facts for i in range(30_000)}).encode(), tmp_path / "a"
    lengths = {len(text): "after byte 160000", 10**9: "a header of 1000000000 bytes"}
    for length, got in lengths.items():
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", length) + text)
            file.truncate(2 * length)
        with pytest.raises(CheckpointError, match=got):
            read_header(path)


ODD_NUMBERS = [0, 1, 2, 3, 8, -1, 2**31, 2**32, 2**63, 2**64, 2.0, -0.0, True, None, "2", [2]]
ODD_VALUES = [{}, [], [0, 8], [8, 0], [0], [0, 4, 8], "F32", "F64", "f32", "", "C64", "F4", "BOOL"]


@st.composite
def near_files(draw: st.DrawFn) -> bytes:
    """Files as the library writes them, with a few changes in what the header says, in its text,
    and in its length."""
    described: dict[str, Any] = {}
    nbytes = 0
    for name, (dtype, shape) in draw(tensors).items():
        start, nbytes = nbytes, nbytes + torch.Size(shape).numel() * dtype.itemsize
        facts = {"dtype": _NAMES[dtype], "shape": [*shape], "data_offsets": [start, nbytes]}
        described[name] = facts
    if draw(st.booleans()):
        described["__metadata__"] = draw(texts)
    for _ in range(draw(st.integers(0, 2))):
        facts = described.get(draw(st.sampled_from([*described, ""])))
        if not isinstance(facts, dict):
            continue
        key = draw(st.sampled_from([*facts, "x"]))
        old = facts.get(key)
        if isinstance(old, list) and old and draw(st.booleans()):
            odd = draw(st.sampled_from(ODD_NUMBERS) | st.integers(0, nbytes))
            old[draw(st.integers(0, len(old) - 1))] = copy.deepcopy(odd)
        elif draw(st.booleans()):
            facts[key] = copy.deepcopy(draw(st.sampled_from([*ODD_NUMBERS, *ODD_VALUES])))
        else:
            facts.pop(key, None)
    text = json.dumps(described, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    text = draw(st.sampled_from([b"", b"", b"", b" ", b"\n", b"\xef\xbb\xbf", b"\x00"])) + text
    text += draw(st.sampled_from([b"", b"", b"", b"   ", b"\t\r\n ", b"\x00", b","]))
    changed = bytearray(text)
    if draw(st.integers(0, 3)) == 0:
        changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    data = bytes(max(nbytes + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 8])), 0))
    length = max(0, len(changed) + draw(st.sampled_from([0, 0, 0, 0, 1, -1])))
    return struct.pack("<Q", length) + bytes(changed) + data


EMPTY_F4 = b'{"": {"dtype": "F4", "shape": [0, 0], "data_offsets": [0, 0]}}'


@settings(same_path, max_examples=120)
@given(content=near_files())
@example(content=struct.pack("<Q", len(EMPTY_F4)) + EMPTY_F4)
def test_no_file_is_read_that_the_library_refuses_and_none_in_another_way(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    assert_read_alike(path)


def test_a_header_that_could_not_be_read_again_is_not_written() -> None:
    with pytest.raises(UsageError, match="too large to be read again"):
        encode_header([("a", torch.float32, (2,))], {"text": "x" * 100_000_000})
