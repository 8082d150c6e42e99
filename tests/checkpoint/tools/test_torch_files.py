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
    lambda x: x.as_strided((1, 1, 1, 3), (1 << 24, 1 << 24, 1 << 12, 1)),  # as a mask's rows
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
