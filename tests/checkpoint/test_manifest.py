"""The manifest: what is written is read, whatever is changed in it is noticed, and it is small."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_compat._archive.blocks import FileFacts
from fsdp_compat._layout.box import Piece
from fsdp_compat._layout.spec import flat_layout
from fsdp_compat.checkpoint._formats.manifest import (
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
    for version, manifest in enumerate((example(), parted()), 1):
        (tmp_path / MANIFEST).write_text(manifest.as_text())
        found = read_manifest(tmp_path)
        assert found == manifest
        assert json.loads(manifest.as_text())["content"]["version"] == version
    named = found.parameters
    parameter = named["tied"]
    assert parameter is named["w"]
    assert (parameter.shape, parameter.names) == ((5, 4), ("w", "tied"))
    assert parameter.places == tuple((group, 0) for group in found.groups)


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
    assert_refused(tmp_path, "a directory without one")
    (tmp_path / MANIFEST).touch()
    os.truncate(tmp_path / MANIFEST, 1 << 40)
    assert_refused(tmp_path, f"{1 << 40}")
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
