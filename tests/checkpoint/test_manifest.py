"""The manifest: what is written is read, whatever is changed in it is noticed, and it is small."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_compat._layout.box import Piece
from fsdp_compat._layout.spec import flat_layout
from fsdp_compat.checkpoint._blocks import FileFacts
from fsdp_compat.checkpoint._manifest import (
    FORMAT,
    MANIFEST,
    FlatGroup,
    Manifest,
    read_manifest,
    versions,
)
from fsdp_compat.errors import CheckpointError
from tests.support.checkpoints import manifest_of, refused

same_path = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def group(
    name: str,
    axis: int,
    ranks: int,
    params: dict[str, tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    align: int = 4,
) -> FlatGroup:
    names, shapes = list(params), list(params.values())
    layout = flat_layout(names, shapes, ranks=ranks, align=align)
    all_names = tuple((each,) for each in names)
    return FlatGroup(name, dtype, axis, layout, all_names, tuple(map(Piece.of_whole, shapes)))


def assert_refused(path: Path, *texts: str) -> None:
    with refused(CheckpointError, str(path), *texts):
        read_manifest(path)


def example() -> Manifest:
    params = {"decoder.weight": (5, 3), "decoder.empty": (0, 2), "decoder.scale": ()}
    tied = group("decoder.flat_0", 0, 2, params)
    tied = dataclasses.replace(tied, names=(("decoder.weight", "encoder.weight"), *tied.names[1:]))
    return Manifest(
        identity="6c3fd4e9",
        step=1200,
        common=2,
        axes=((0, 1), (2,)),
        groups=(tied, group("head.flat_0", 1, 1, {"head.bias": (7,)}, torch.bfloat16)),
        files=(FileFacts(0, ()), FileFacts(5 << 20, (1, 0xFFFFFFFF)), FileFacts(3, (0x0A,))),
        param_groups=[
            {"params": ["head.bias"], "settings": {"lr": 0.1, "betas": {"@tuple": [0.9, 0.95]}}}
        ],
        written_by=versions(),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    num_files = draw(st.integers(1, 5))
    nbytes = draw(st.lists(st.integers(0, 20 << 20), min_size=num_files, max_size=num_files))
    crcs = draw(st.lists(st.integers(0, 2**32 - 1), min_size=5, max_size=5))
    files = tuple(FileFacts(size, tuple(crcs[: -(-size // (4 << 20))])) for size in nbytes)
    ranks = st.lists(st.integers(0, num_files - 1), min_size=1, unique=True).map(tuple)
    axes = draw(st.lists(ranks, min_size=1, max_size=3))
    names = iter(draw(st.lists(st.text(max_size=5), unique=True, min_size=12, max_size=12)))
    groups = []
    for number in range(draw(st.integers(0, 3))):
        axis = draw(st.integers(0, len(axes) - 1))
        sizes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=3))
        dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.complex128]
        params = {next(names): its for its in sizes}
        dtype, align = draw(st.sampled_from(dtypes)), draw(st.sampled_from([1, 8]))
        groups.append(group(f"flat_{number}", axis, len(axes[axis]), params, dtype, align))
    return Manifest(
        identity=draw(st.text()),
        step=draw(st.integers(0)),
        common=draw(st.integers(0, num_files - 1)),
        axes=tuple(axes),
        groups=tuple(groups),
        files=files,
        param_groups=draw(st.none() | st.just([{"params": ["a"], "settings": {"lr": math.inf}}])),
        written_by={"torch": "3"},
        shares_extra=draw(st.booleans()),
    )


@same_path
@given(manifest=manifests() | st.just(example()))
def test_any_manifest_is_read_as_it_was_written(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / MANIFEST).write_text(manifest.as_text())
    assert read_manifest(tmp_path) == manifest
    assert read_manifest(tmp_path).as_text() == manifest.as_text()


def parted() -> Manifest:
    """A manifest of a parameter ``w`` [5, 4] in two parts, of three and of two rows."""
    groups = []
    for axis, (start, rows) in enumerate([(0, 3), (3, 2)]):
        part = group(f"flat_0.part_{axis}", axis, 1, {"w": (rows, 4)}, align=1)
        pieces = (Piece((5, 4), (start, 0), (rows, 4)),)
        groups.append(dataclasses.replace(part, names=(("w", "tied"),), pieces=pieces))
    changes = {"axes": ((0,), (1,)), "groups": tuple(groups), "param_groups": None}
    return dataclasses.replace(example(), **changes)


def test_parts_of_a_parameter_are_found_together_and_raise_the_version(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(parted().as_text())
    found = read_manifest(tmp_path)
    assert found == parted()
    named = found.parameters()
    parameter = named["tied"]
    assert parameter is named["w"]
    assert (parameter.shape, parameter.names) == ((5, 4), ("w", "tied"))
    assert parameter.places == tuple((group, 0) for group in found.groups)
    versions_written = [
        json.loads(m.as_text())["content"]["version"] for m in (example(), parted())
    ]
    assert versions_written == [1, 2]


DROPPED = object()


def with_value(manifest: Manifest, path: str, value: Any) -> str:
    """The text of a manifest with one value replaced, or dropped, and a checksum that fits."""
    content = around = json.loads(manifest.as_text())["content"]
    *outer, last = (int(key) if key.isdecimal() else key for key in path.split("."))
    for key in outer:
        around = around[key]
    if value is DROPPED:
        del around[last]
    else:
        around[last] = value
    return manifest_of(json.dumps(content, indent=1))


# -- what is noticed

TEXT = example().as_text().encode()


@same_path
@given(at=st.integers(0, len(TEXT) - 1), bit=st.integers(0, 7))
def test_a_text_with_a_changed_bit_or_that_was_cut_or_grew_is_noticed(
    tmp_path: Path, at: int, bit: int
) -> None:
    flipped = bytearray(TEXT)
    flipped[at] ^= 1 << bit
    for wrong in (flipped, TEXT[:at], TEXT[at + 1 :], TEXT[:at] + b"1" + TEXT[at:]):
        (tmp_path / MANIFEST).write_bytes(wrong)
        assert_refused(tmp_path)


FIRST = "groups.0.parameters.0"
WRONG: dict[str, list[Any]] = {
    "axes": [{"0": [0, 1]}],
    "axes.0": [[0, 0], [0, 3], [0, -1], 1, ["0", "1"]],
    "axes.1": [[], [True]],
    "groups": [None],
    "groups.0": [[]],
    "groups.0.axis": [2, -1, 1],  # 1: shards on fewer files
    "groups.0.shard_numel": [0, 4, "12", 12.5],  # 4: too small
    "groups.0.name": [[]],
    "groups.1.name": ["decoder.flat_0"],
    "groups.0.dtype": ["load", []],
    "groups.0.parameters": [DROPPED],
    "groups.0.parameters.2.start": [14],  # in the parameter before
    f"{FIRST}.start": [-1, 0.5],
    f"{FIRST}.shape": [[6, 3], [-5, -3], ["5", "3"], [10**18] * 100_000],
    "groups.0.parameters.1.shape": [[float("inf")], [0, 2**40, 2**40]],
    f"{FIRST}.names": [[], 3, "ab", [["a"]]],
    "groups.1.parameters.0.names": [["encoder.weight"], ["head.bias", "head.bias"]],
    "files": [DROPPED, {"a": 1}],
    "files.0": [[]],
    "files.0.name": ["../rank-00000.safetensors"],
    "files.0.nbytes": [-1, "0"],
    "files.1.nbytes": [1],
    "files.1.crc32": ["00000001", ["00000001", "ffffffff"]],
    "files.2.crc32": ["0000000g", "+000000a", " 000000a"],
    "common": [3, "2", -1],
    "step": [DROPPED, "1", -1],
    "identity": [{}],
    "param_groups": [{}, ["a"], DROPPED],
    "param_groups.0.settings": [DROPPED, []],
    "param_groups.0.params": ["ab", [1]],
    "optimizer_classes": ["SGD"],
    "written_by": ["3"],
}


WRONG_PARTS: dict[str, list[Any]] = {
    "groups.1": [DROPPED],
    "groups.1.dtype": ["bfloat16"],
    "groups.1.parameters.0.whole": [DROPPED, [5, 5], [5], [1 << 62, 1 << 62]],
    "groups.1.parameters.0.offsets": [[2, 0], [4, 0], [-1, 0], [3], "30"],
    "groups.1.parameters.0.shape": [[1, 4]],
    "groups.1.parameters.0.names": [["w"], ["other"]],
}


@pytest.mark.parametrize(
    ("manifest", "path", "value"),
    [
        (manifest, path, value)
        for manifest, wrong in ((example(), WRONG), (parted(), WRONG_PARTS))
        for path, values in wrong.items()
        for value in values
    ],
)
def test_an_impossible_layout_is_noticed_even_if_the_checksum_fits(
    tmp_path: Path, manifest: Manifest, path: str, value: Any
) -> None:
    (tmp_path / MANIFEST).write_text(with_value(manifest, path, value))
    assert_refused(tmp_path)


def test_what_is_not_a_manifest_of_this_version_is_named(tmp_path: Path) -> None:
    folders: dict[str, tuple[Callable[[Path], object], str]] = {
        "none": (Path.rmdir, "no such directory"),
        "empty": (Path.exists, "a directory without one"),
        "a directory": (lambda path: (path / MANIFEST).mkdir(), "a directory"),
        "a FIFO": (lambda path: os.mkfifo(path / MANIFEST), "a FIFO"),
        "too long": (lambda path: os.truncate(path / MANIFEST, 1 << 40), f"{1 << 40}"),
    }
    for name, (change, got) in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).touch() if name == "too long" else None
        change(tmp_path / name)
        assert_refused(tmp_path / name, got)
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", "There is no checkpoint", "a file")
    for path, value, got in (
        ("version", 3, "version 3"),
        ("format", "other", "'other'"),
        ("version", DROPPED, "version None"),
    ):
        (tmp_path / MANIFEST).write_text(with_value(example(), path, value))
        assert_refused(tmp_path, "has another format", got)


CONTENT = example().as_text()[len('{"content": ') :].rpartition(',\n"crc32"')[0]
TWICE = CONTENT.replace('"step": 1200,', '"step": 1200, "step": 1200,')


DEEP, WIDE = "[" * 100_000 + "]" * 100_000, "[" + "[]," * 1_100_000 + "[]]"
ODD_TEXTS = [f'{{"format": "{FORMAT}", "version": 1, "groups": {odd}}}' for odd in (DEEP, WIDE)]


@pytest.mark.parametrize(
    "content", ["{", "[]", "3", '{"format": 1]', "{" * 3, "{}", TWICE, *ODD_TEXTS], ids=len
)
def test_content_that_is_not_a_manifest_is_noticed_even_if_the_checksum_fits(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / MANIFEST).write_text(manifest_of(content))
    assert_refused(tmp_path)


# -- how large it is


def nbytes(num_groups: int, num_params: int, num_files: int, file_nbytes: int = 0) -> int:
    """The size of a manifest, in groups of equal numbers of parameters, which are sharded over all
    files."""
    groups = []
    for number in range(num_groups):
        layer = f"model.layers.{number:03d}"
        names = [f"{layer}.mlp.{index:03d}.weight" for index in range(num_params // num_groups)]
        groups.append(group(f"{layer}.flat_0", 0, num_files, dict.fromkeys(names, (1024, 1024))))
    facts = FileFacts(file_nbytes, (0xFFFFFFFF,) * -(-file_nbytes // (4 << 20)))
    changes = {"axes": (tuple(range(num_files)),), "groups": tuple(groups), "param_groups": None}
    files = (facts,) * num_files
    manifest = dataclasses.replace(example(), common=0, files=files, **changes)
    return len(manifest.as_text())


def test_the_manifest_grows_with_parameters_plus_files_not_with_their_product() -> None:
    base = nbytes(1, 100, 1)
    assert nbytes(1, 1100, 1) - base < 1000 * 200, "bytes for each parameter"
    assert nbytes(100, 100, 1) - base < 99 * 200, "bytes for each group"
    assert nbytes(1, 100, 1025) - base < 1024 * 120, "bytes for each file"
    assert nbytes(1, 100, 1, 4 << 30) - base < 1024 * 8 + 100, "bytes for each block of 4 MiB"
    assert nbytes(100, 1000, 1024) < 450_000, "1,000 parameters on 1,024 ranks"
