"""The head of a safetensors file: the library reads ours, we read the library's, and nothing else is taken for one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_compat._engine.storage import memory_of
from fsdp_compat.checkpoint._header import Entry, dtype_name, dtype_of, encode_header, read_header
from fsdp_compat.errors import CheckpointError

DTYPES = [getattr(torch, name) for name in ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")]
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


def write(path: Path, values: dict[str, torch.Tensor], metadata: dict[str, str]) -> list[Entry]:
    """Write a file from a header of ours."""
    head, entries = encode_header([(name, value.dtype, tuple(value.shape)) for name, value in values.items()], metadata)
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
def test_the_library_opens_files_with_a_header_of_ours(
    tmp_path: Path, facts: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    values, path = made(facts), tmp_path / "file.safetensors"
    entries = write(path, values, metadata)
    assert_same(safetensors.torch.load_file(path), values)
    with safetensors.safe_open(path, "pt") as file:
        assert (file.metadata() or {}) == metadata
    assert read_header(path) == ({entry.name: entry for entry in entries}, metadata)
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in entries), "aligned, so that a file can be mapped"


@same_path
@given(facts=tensors, metadata=texts)
def test_files_of_the_library_are_read(
    tmp_path: Path, facts: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    values, path = made(facts), tmp_path / "file.safetensors"
    safetensors.torch.save_file(values, path, metadata or None)
    entries, read = read_header(path)
    assert read == metadata
    content = path.read_bytes()
    found = {
        name: torch.frombuffer(bytearray(content[entry.start : entry.stop]), dtype=torch.uint8).view(entry.dtype).view(entry.shape)
        if entry.nbytes
        else torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in entries.items()
    }
    assert_same(found, values)


def test_wide_dtypes_come_first_and_the_rest_stays_in_order() -> None:
    given = [("a", torch.int8, (3,)), ("b", torch.float32, (2,)), ("c", torch.float64, ()), ("d", torch.float32, (0, 5))]
    head, entries = encode_header(given, {})
    assert [entry.name for entry in entries] == ["c", "b", "d", "a"]
    assert [entry.start - len(head) for entry in entries] == [0, 8, 16, 16]
    assert (entries[1].numel, entries[1].nbytes, entries[1].stop - entries[1].start) == (2, 8, 8)
    assert len(head) % 8 == 0
    assert struct.unpack("<Q", head[:8]) == (len(head) - 8,)


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__"]])
def test_names_that_make_no_file_are_no_header(names: list[str]) -> None:
    with pytest.raises(ValueError, match="name"):
        encode_header([(name, torch.float32, (2,)) for name in names], {"format": "pt"})


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128, torch.float8_e8m0fnu])
def test_a_dtype_has_its_name(dtype: torch.dtype) -> None:
    assert f"torch.{dtype_name(dtype)}" == str(dtype)
    assert dtype_of(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["load", "nn", "nothing", "", "float32 ", 3, None, [], "_dynamo"])
def test_anything_else_is_no_dtype(name: Any) -> None:
    with pytest.raises(ValueError, match="is no dtype"):
        dtype_of(name)


# -- what is no safetensors file


def file_of(described: Any, nbytes: int = 8, length: int | None = None) -> bytes:
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(nbytes)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "7 bytes": bytes(7),
    "no text": bytes(8),
    "text longer than the file": file_of({"a": GOOD}, length=1000),
    "longer than anything": struct.pack("<Q", 2**64 - 1) + b"{}",
    "pickle": b"\x80\x04\x95" + bytes(100),
    "no json": file_of(b"{]"),
    "no text encoding": file_of(b'{"\xff\xfe": 1}'),
    "a list": file_of([]),
    "a number": file_of(3),
    "null": file_of(None),
    "deep": file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "truncated": file_of({"a": GOOD}, 7),
    "texts are a list": file_of({"__metadata__": [], "a": GOOD}),
    "texts are null": file_of({"__metadata__": None, "a": GOOD}),
    "texts are numbers": file_of({"__metadata__": {"a": 1}, "a": GOOD}),
    "overlap": file_of({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, 12),
    "the same place": file_of({"a": GOOD, "b": GOOD}),
    **{
        f"{key} {value}": file_of({"a": {**GOOD, key: value}}, 100)
        for key, values in {
            "dtype": ["F31", "", None, 3, [], {}, "float32"],
            "shape": [[3], [2, 0], [-2], [-1, -2], ["2"], [2.0], [2.7], [None], [[2]], None, 2, "2", {"2": 1}, [10**30], [True, 2]],
            "data_offsets": [
                [0, 4],
                [8, 0],
                [-8, 0],
                [96, 104],
                [0],
                [0, 4, 8],
                [0.0, 8.0],
                ["0", "8"],
                [None, 8],
                None,
                8,
                "08",
                {},
            ],
        }.items()
        for value in values
    },
    "infinite": file_of(b'{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 8]}}'),
    "not a number": file_of(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [NaN, NaN]}}'),
    **{f"without {key}": file_of({"a": {k: v for k, v in GOOD.items() if k != key}}) for key in GOOD},
    "facts are a list": file_of({"a": [1]}),
    "facts are a text": file_of({"a": "dtype"}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(CheckpointError, match=r"odd.safetensors is no safetensors file") as caught:
        read_header(path)
    lines = str(caught.value).splitlines()
    assert [line.strip().partition(":")[0] for line in lines[1:]] == ["expected", "got", "where", "to do"]
    assert len(str(caught.value)) < 2000


@same_path
@given(data=st.data())
def test_a_header_with_any_byte_changed_is_read_or_is_a_checkpoint_error(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "file.safetensors"
    write(path, made({"weight": (torch.float32, (2, 3)), "bias": (torch.int8, (3,))}), {"format": "pt"})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 28))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(len(content) - 30, len(content)))])
    try:
        entries, metadata = read_header(path)
    except CheckpointError:
        return
    nbytes = path.stat().st_size
    assert all(8 <= entry.start <= entry.stop <= nbytes for entry in entries.values())
    assert all(isinstance(text, str) for pair in metadata.items() for text in pair)


def test_a_file_that_is_missing_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "file.safetensors")
