"""Files of torch.save are read bit by bit without loading them, those that torch did not write are
refused, and files written here are files of torch.save."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compat.checkpoint.files import convert, inspect
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.tools.content import assert_model
from tests.support.checkpoints import assert_same

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
]


def values_of(dtype: torch.dtype, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype)


VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    *(lambda x: x, lambda x: x[1], lambda x: x[1, 2, 3], lambda x: x[:, 1:], lambda x: x[..., ::2]),
    *(lambda x: x.transpose(0, 2), lambda x: x[:, :0], lambda x: x[:, 1:2, ::3].permute(2, 0, 1)),
    *(lambda x: x[0, 0].expand(3, 4), lambda x: x[:, None].expand(2, 5, 3, 4)),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_all_dtypes_and_strides_come_back_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    tensors = {
        f"{number}": view(values_of(dtype, 24).view(2, 3, 4)) for number, view in enumerate(VIEWS)
    }
    torch.save(tensors, tmp_path / "x.pt")
    content = assert_model(tmp_path / "x.pt", tensors)
    parts = [part for tensor in content.facts.tensors for part in tensor.parts]
    assert all(part.start is not None for part in parts), "read from where they are"


def test_tensors_with_attributes_without_values_and_of_one_storage_are_read(tmp_path: Path) -> None:
    marked, whole = torch.arange(4.0), torch.arange(6.0)
    marked.note = "here"  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.tag = 3  # type: ignore[attr-defined]
    tree = {"marked": marked, "parameter": parameter}
    tree |= {"a": whole, "b": whole, "c": whole[2:4], "none": torch.empty(0, 1 << 59)}
    torch.save({**tree, "meta": torch.empty(2, device="meta")}, tmp_path / "x.pt")
    content = assert_model(tmp_path / "x.pt", tree)
    assert content.facts.aliases == {"b": "a"}
    starts = {each.path: each.parts[0].start for each in content.facts.tensors}
    assert starts["model/c"] == starts["model/a"] + 8
    assert content.facts.values["extra/meta"].endswith("ithout values>")


class Special(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(2).to_sparse(), "_rebuild_sparse_tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "_rebuild_qtensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "_rebuild_nested_tensor"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "flags"),
        (lambda: torch.ones(2).as_subclass(Special), "Special"),
        (lambda: torch.nn.Linear(1, 1), "Linear"),
    ],
)
def test_what_is_not_a_dense_tensor_is_refused_by_name(
    make: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    torch.save({"a": make()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message):
        inspect(tmp_path / "x.pt")


# -- files that torch has not written


@pytest.fixture
def good(tmp_path: Path) -> Path:
    torch.save({"a": torch.arange(6.0), "b": [1, "x"], "c": torch.ones(2, 2)}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def _rewritten(good: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    with zipfile.ZipFile(good) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    path = good.with_name("changed.pt")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return path


def _with(name: str, content: bytes) -> Callable[[dict[str, bytes]], None]:
    return lambda records: records.__setitem__(name, content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with("x/byteorder", b"big"), "big-endian"),
        (_with("x/data/0", b"1234"), "ends at byte 24 of a storage of 4"),
        (lambda records: records.pop("x/data/0"), "no record 'data/0'"),
        (lambda records: records.pop("x/data.pkl"), "no record 'data.pkl'"),
        (_with("y/data.pkl", b"\x80\x02N."), "two records"),
        (_with("x/data.pkl", b"\x80\x02cos\nsystem\n."), r"os\.system"),
    ],
)
def test_a_file_with_a_changed_record_is_refused(
    good: Path, change: Callable[[dict[str, bytes]], None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        inspect(_rewritten(good, change))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (10, struct.pack("<H", 8), "compressed"),
        (20, struct.pack("<II", 1 << 20, 1 << 20), "beyond the end"),
        (42, struct.pack("<I", 1 << 30), "without a header"),
        (42, struct.pack("<I", 7), "without a header"),
    ],
)
def test_a_directory_that_points_elsewhere_is_refused(
    good: Path, field: int, value: bytes, message: str
) -> None:
    content = bytearray(good.read_bytes())
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"x/data/0"))
    content[entry + field : entry + field + len(value)] = value
    good.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        inspect(good)


@pytest.mark.parametrize(
    ("offset", "sizes", "strides"),
    [(0, (7,), (1,)), (6, (1,), (1,)), (0, (2, 2), (5, 1)), (1 << 62, (1,), (1,)), (-1, (1,), (1,)),
     (0, (2,), (-1,)), (0, (1 << 40, 1 << 40), (0, 0)), (0, (2,), (1, 1)), (0, (1,), (1 << 80,))],
)  # fmt: skip
def test_a_tensor_beyond_its_storage_is_refused(
    tmp_path: Path, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    class Beyond:
        def __reduce__(self) -> Any:
            function, args = torch.arange(6.0).__reduce_ex__(2)[:2]
            return function, (args[0], offset, sizes, strides, *args[4:])

    torch.save({"a": Beyond()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="was refused"):
        inspect(tmp_path / "x.pt")


def test_files_of_torch_before_1_6_and_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for content in (b"", b"\x80\x04N.", b"hello", b"PK\x03\x04", b"\x80\x02\x8a\x0a"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            inspect(path)
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"since torch 1\.6(.|\n)*torch\.load"):
        inspect(path)


# -- writing


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_written_files_are_loaded_by_torch_without_code(
    tmp_path: Path, has_optimizer: bool
) -> None:
    model = {str(dtype).removeprefix("torch."): values_of(dtype, 15).view(3, 5) for dtype in DTYPES}
    model |= {"empty": torch.empty(0, 3), "number": torch.tensor(3.0)}
    model |= {"tied": model["float32"], "large": torch.arange(600_000.0)}  # in several slabs
    moment = torch.arange(15.0).view(3, 5)
    optimizer = {
        "state": {"float32": {"step": 3, "exp_avg": moment}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["float32"]}],
    }
    saved: dict[str, Any] = {"model": model}
    if has_optimizer:
        saved |= {"optimizer": optimizer, "epoch": 3, "rng": torch.ones(2)}
    torch.save(saved, tmp_path / "source.pt")
    path = convert(tmp_path / "source.pt", tmp_path / "x.pt")
    content = path.read_bytes()
    with zipfile.ZipFile(path) as written:
        assert written.testzip() is None
        assert {info.compress_type for info in written.infolist()} == {zipfile.ZIP_STORED}
        for info in written.infolist():  # the headers in front of the records say the same
            assert struct.unpack_from("<I", content, info.header_offset + 14) == (info.CRC,)
    assert all(part.start % 64 == 0 for each in inspect(path).tensors for part in each.parts)
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        if has_optimizer:
            assert set(loaded) == {"model", "optimizer", "epoch", "rng"}
            state = loaded["optimizer"]["state"]["float32"]
            assert state["step"] == 3 and torch.equal(state["exp_avg"], moment)
            assert loaded["optimizer"]["param_groups"] == optimizer["param_groups"]
            loaded = loaded["model"]
        assert set(loaded) == set(model)
        assert loaded["tied"].data_ptr() == loaded["float32"].data_ptr()
        for name, values in model.items():
            assert_same(loaded[name], values, name)


def test_records_in_the_fields_for_more_than_four_gibibytes_are_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 2000)
    tensors = {"large": torch.arange(3000), "last": torch.arange(3.0)}  # beyond the limit
    torch.save(tensors, tmp_path / "source.pt")
    path = convert(tmp_path / "source.pt", tmp_path / "x.pt")
    assert path.read_bytes().count(b"PK\x06\x06") == 1
    with zipfile.ZipFile(path) as written:
        assert written.testzip() is None
        assert [info.extract_version for info in written.infolist()].count(45) >= 2
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert all(torch.equal(loaded[name], values) for name, values in tensors.items())
    assert_model(path, tensors)
