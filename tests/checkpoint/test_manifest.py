"""The manifest: what is written is read, whatever is changed in it is noticed, and it is small."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_compat._layout.pieces import Piece
from fsdp_compat._layout.spec import FlatLayout, ParamSpec, flat_layout
from fsdp_compat.checkpoint._blocks import FileFacts
from fsdp_compat.checkpoint._manifest import (
    MANIFEST,
    FlatGroup,
    Manifest,
    file_name,
    read_manifest,
    versions,
)
from fsdp_compat.errors import CheckpointError

FOUR_FACTS = ["expected", "got", "where", "to do"]
same_path = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def group(
    name: str,
    axis: int,
    ranks: int,
    params: dict[str, tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
) -> FlatGroup:
    layout = flat_layout(
        [f"{name}.{param}" for param in params], list(params.values()), ranks=ranks, align=4
    )
    return FlatGroup(
        f"{name}.flat_0", dtype, axis, layout, tuple((param,) for param in layout.names)
    )


def example() -> Manifest:
    tied = group("decoder", 0, 2, {"weight": (5, 3), "empty": (0, 2), "scale": ()})
    tied = dataclasses.replace(tied, names=(("decoder.weight", "encoder.weight"), *tied.names[1:]))
    return Manifest(
        identity="6c3fd4e9",
        step=1200,
        common=2,
        axes=((0, 1), (2,)),
        groups=(tied, group("head", 1, 1, {"bias": (7,)}, torch.bfloat16)),
        files=(FileFacts(0, ()), FileFacts(5 << 20, (1, 0xFFFFFFFF)), FileFacts(3, (0x0A,))),
        param_groups=[
            {"params": ["head.bias"], "settings": {"lr": 0.1, "betas": {"@tuple": [0.9, 0.95]}}}
        ],
        written_by=versions(),
    )


def text_of(content: str) -> str:
    """A manifest around any content, with the checksum that fits."""
    return f'{{"content": {content},\n"crc32": "{zlib.crc32(content.encode()):08x}"}}\n'


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(example().as_text())["content"]
    change(content)
    return text_of(json.dumps(content, indent=1))


def assert_damaged(path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_manifest(path)
    assert [
        line.strip().partition(":")[0] for line in str(caught.value).splitlines()[-4:]
    ] == FOUR_FACTS
    assert str(path) in str(caught.value)


def test_a_written_manifest_is_read_back(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(example().as_text())
    assert read_manifest(tmp_path) == example()
    assert read_manifest(tmp_path).as_text() == example().as_text()


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    num_files = draw(st.integers(1, 5))
    files = []
    for _ in range(num_files):
        nbytes = draw(st.integers(0, 20 << 20))
        checksums = draw(
            st.lists(st.integers(0, 2**32 - 1), min_size=(n := -(-nbytes // (4 << 20))), max_size=n)
        )
        files.append(FileFacts(nbytes, tuple(checksums)))
    order = st.permutations(range(num_files))
    axes = draw(
        st.lists(
            st.tuples(order, st.integers(1, num_files)).map(lambda cut: tuple(cut[0][: cut[1]])),
            min_size=1,
            max_size=3,
        )
    )
    names = iter(draw(st.lists(st.text(max_size=5), unique=True, min_size=12, max_size=12)))
    groups = []
    for number in range(draw(st.integers(0, 3))):
        axis = draw(st.integers(0, len(axes) - 1))
        sizes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=3))
        found = tuple((next(names),) for _ in sizes)
        layout = flat_layout(
            [its[0] for its in found],
            sizes,
            ranks=len(axes[axis]),
            align=draw(st.sampled_from([1, 8])),
        )
        dtype = draw(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex128])
        )
        groups.append(FlatGroup(f"flat_{number}", dtype, axis, layout, found))
    settings = draw(st.none() | st.just([{"params": ["a"], "settings": {"lr": float("inf")}}]))
    return Manifest(
        identity=draw(st.text()),
        step=draw(st.integers(0)),
        common=draw(st.integers(0, num_files - 1)),
        axes=tuple(axes),
        groups=tuple(groups),
        files=tuple(files),
        param_groups=settings,
        written_by={"torch": "3"},
        shares_extra=draw(st.booleans()),
    )


@same_path
@given(manifest=manifests())
def test_any_manifest_is_read_as_it_was_written(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / MANIFEST).write_text(manifest.as_text())
    assert read_manifest(tmp_path) == manifest


def test_every_name_is_located() -> None:
    manifest = example()
    decoder, head = manifest.groups
    found = manifest.parameters()
    assert {name: parameter.places for name, parameter in found.items()} == {
        "decoder.weight": ((decoder, 0),),
        "encoder.weight": ((decoder, 0),),
        "decoder.empty": ((decoder, 1),),
        "decoder.scale": ((decoder, 2),),
        "head.bias": ((head, 0),),
    }
    assert found["encoder.weight"] is found["decoder.weight"]


def parted() -> Manifest:
    """A manifest of a parameter ``w`` [5, 4] in two parts, of three and of two rows."""
    groups = []
    for axis, (start, rows) in enumerate([(0, 3), (3, 2)]):
        layout = flat_layout(["w"], [(rows, 4)], ranks=1, align=1)
        part = Piece((5, 4), (start, 0), (rows, 4))
        groups.append(
            FlatGroup(f"flat_0.part_{axis}", torch.float32, axis, layout, (("w", "tied"),), (part,))
        )
    changes = {"axes": ((0,), (1,)), "groups": tuple(groups), "param_groups": None}
    return dataclasses.replace(example(), **changes)


def test_parts_of_a_parameter_are_found_together_and_raise_the_version(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(parted().as_text())
    found = read_manifest(tmp_path)
    assert found == parted()
    parameter = found.parameters()["tied"]
    assert (parameter.shape, parameter.names) == ((5, 4), ("w", "tied"))
    assert parameter.places == tuple((group, 0) for group in found.groups)
    versions_written = [
        json.loads(m.as_text())["content"]["version"] for m in (example(), parted())
    ]
    assert versions_written == [1, 2]


def _change_part(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        content["groups"][1]["parameters"][0][key] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["groups"].pop(),
        lambda content: content["groups"][1].update(dtype="bfloat16"),
        lambda content: content["groups"][1]["parameters"][0].pop("whole"),
        _change_part("whole", [5, 5]),
        _change_part("whole", [5]),
        _change_part("whole", [1 << 62, 1 << 62]),
        _change_part("offsets", [2, 0]),
        _change_part("offsets", [4, 0]),
        _change_part("offsets", [-1, 0]),
        _change_part("offsets", [3]),
        _change_part("offsets", "30"),
        _change_part("shape", [1, 4]),
        _change_part("names", ["w"]),
        _change_part("names", ["other"]),
    ],
)
def test_parts_that_do_not_fill_their_parameter_once_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    content = json.loads(parted().as_text())["content"]
    change(content)
    (tmp_path / MANIFEST).write_text(text_of(json.dumps(content, indent=1)))
    assert_damaged(tmp_path)


def test_a_file_has_the_number_of_its_rank() -> None:
    assert (file_name(0), file_name(123456)) == (
        "rank-00000.safetensors",
        "rank-123456.safetensors",
    )


# -- what is noticed


def test_a_changed_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    text = example().as_text().encode()
    choose = random.Random(0)
    unnoticed = []
    for at in (*range(0, len(text) - 60, 3), *range(60), *range(len(text) - 60, len(text))):
        flipped = bytearray(text)
        flipped[at] ^= 1 << choose.randrange(8)
        (tmp_path / MANIFEST).write_bytes(flipped)
        try:
            read_manifest(tmp_path)
            unnoticed.append((at, text[at - 10 : at + 10]))
        except CheckpointError:
            pass
    assert not unnoticed


@pytest.mark.parametrize("old", [b"\n", b"{", b"}", b'"', b" ", b",", b"0"])
def test_a_changed_character_anywhere_is_noticed(tmp_path: Path, old: bytes) -> None:
    text = example().as_text().encode()
    places = [at for at in range(len(text)) if text[at : at + 1] == old]
    for at in (*places[:5], *places[-5:]):
        for new in (b"\r", b" ", b"}", b"", b"\x00", b"\xff", old + old):
            if new != old:
                (tmp_path / MANIFEST).write_bytes(text[:at] + new + text[at + 1 :])
                assert_damaged(tmp_path)


@same_path
@given(data=st.data())
def test_a_text_that_was_cut_or_grew_is_noticed(tmp_path: Path, data: st.DataObject) -> None:
    text = example().as_text()
    at = data.draw(st.integers(0, len(text)))
    grown = (
        text[:at]
        + data.draw(st.text(st.characters(codec="utf-8"), min_size=1, max_size=3))
        + text[at:]
    )
    for wrong in (text[: min(at, len(text) - 1)], text[at + 1 :] if at else text[1:], grown):
        (tmp_path / MANIFEST).write_bytes(wrong.encode())
        assert_damaged(tmp_path)


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, got in (
        (tmp_path, "a directory without one"),
        (tmp_path / "none", "no such directory"),
        (tmp_path / "file", "a file"),
    ):
        with pytest.raises(CheckpointError, match=f"There is no checkpoint(.|\n)*got: +{got}"):
            read_manifest(path)
        assert_damaged(path)


def test_another_format_or_version_is_named_with_what_to_do(tmp_path: Path) -> None:
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "version 3": lambda content: content.update(version=3),
        "'other'": lambda content: content.update(format="other"),
        "version None": lambda content: content.pop("version"),
    }
    for got, change in changes.items():
        (tmp_path / MANIFEST).write_text(changed(change))
        with pytest.raises(CheckpointError, match=f"has another format(.|\n)*got: +.*{got}"):
            read_manifest(tmp_path)
        assert_damaged(tmp_path)


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file in two places of an axis": lambda c: c["axes"].__setitem__(0, [0, 0]),
    "an unknown file": lambda c: c["axes"].__setitem__(0, [0, 3]),
    "a negative file": lambda c: c["axes"].__setitem__(0, [0, -1]),
    "an axis without files": lambda c: c["axes"].__setitem__(1, []),
    "an axis that is a number": lambda c: c["axes"].__setitem__(0, 1),
    "an axis of texts": lambda c: c["axes"].__setitem__(0, ["0", "1"]),
    "axes that are a dict": lambda c: c.update(axes={"0": [0, 1]}),
    "an unknown axis": lambda c: c["groups"][0].update(axis=2),
    "a negative axis": lambda c: c["groups"][0].update(axis=-1),
    "shards on fewer files": lambda c: c["groups"][0].update(axis=1),
    "empty shards": lambda c: c["groups"][0].update(shard_numel=0),
    "shards too small": lambda c: c["groups"][0].update(shard_numel=4),
    "shards that are a text": lambda c: c["groups"][0].update(shard_numel="12"),
    "fractional shards": lambda c: c["groups"][0].update(shard_numel=12.5),
    "overlap": lambda c: c["groups"][0]["parameters"][2].update(start=14),
    "a negative start": lambda c: c["groups"][0]["parameters"][0].update(start=-1),
    "a fractional start": lambda c: c["groups"][0]["parameters"][0].update(start=0.5),
    "a shape that is larger": lambda c: c["groups"][0]["parameters"][0].update(shape=[6, 3]),
    "a negative shape": lambda c: c["groups"][0]["parameters"][0].update(shape=[-5, -3]),
    "a shape of texts": lambda c: c["groups"][0]["parameters"][0].update(shape=["5", "3"]),
    "an infinite shape": lambda c: c["groups"][0]["parameters"][1].update(shape=[float("inf")]),
    "no names": lambda c: c["groups"][0]["parameters"][0].update(names=[]),
    "names that are a number": lambda c: c["groups"][0]["parameters"][0].update(names=3),
    "a name twice": lambda c: c["groups"][1]["parameters"][0].update(names=["encoder.weight"]),
    "a name twice in one place": lambda c: c["groups"][1]["parameters"][0].update(
        names=["head.bias", "head.bias"]
    ),
    "two groups in one entry": lambda c: c["groups"][1].update(name="decoder.flat_0", axis=0),
    "no dtype": lambda c: c["groups"][0].update(dtype="load"),
    "a dtype that is a list": lambda c: c["groups"][0].update(dtype=[]),
    "a group without parameters": lambda c: c["groups"][0].pop("parameters"),
    "a group that is a list": lambda c: c["groups"].__setitem__(0, []),
    "groups that are null": lambda c: c.update(groups=None),
    "a file of another name": lambda c: c["files"][0].update(name="../rank-00000.safetensors"),
    "a file that is a list": lambda c: c["files"].__setitem__(0, []),
    "a file that is shorter": lambda c: c["files"][1].update(nbytes=1),
    "a negative file size": lambda c: c["files"][0].update(nbytes=-1),
    "a file size that is a text": lambda c: c["files"][0].update(nbytes="0"),
    "a checksum that is missing": lambda c: c["files"][1].update(crc32="00000001"),
    "checksums that are a list": lambda c: c["files"][1].update(crc32=["00000001", "ffffffff"]),
    "checksums that are not hexadecimal": lambda c: c["files"][2].update(crc32="0000000g"),
    "no files": lambda c: c.pop("files"),
    "files that are a dict": lambda c: c.update(files={"a": 1}),
    "an unknown common file": lambda c: c.update(common=3),
    "a common file that is a text": lambda c: c.update(common="2"),
    "a negative common file": lambda c: c.update(common=-1),
    "no step": lambda c: c.pop("step"),
    "a step that is a text": lambda c: c.update(step="1"),
    "a negative step": lambda c: c.update(step=-1),
    "an identity that is an object": lambda c: c.update(identity={}),
    "an axis of booleans": lambda c: c["axes"].__setitem__(1, [True]),
    "a name that is a list": lambda c: c["groups"][0]["parameters"][0].update(names=[["a"]]),
    "names that are a text": lambda c: c["groups"][0]["parameters"][0].update(names="ab"),
    "a group whose name is a list": lambda c: c["groups"][0].update(name=[]),
    "very many large sizes": lambda c: c["groups"][0]["parameters"][0].update(
        shape=[10**18] * 100_000
    ),
    "an empty tensor of very large sizes": lambda c: c["groups"][0]["parameters"][1].update(
        shape=[0, 2**40, 2**40]
    ),
    "a checksum with a sign": lambda c: c["files"][2].update(crc32="+000000a"),
    "a checksum with a space": lambda c: c["files"][2].update(crc32=" 000000a"),
    "parameter groups that are an object": lambda c: c.update(param_groups={}),
    "a parameter group that is a text": lambda c: c.update(param_groups=["a"]),
    "a parameter group without settings": lambda c: c["param_groups"][0].pop("settings"),
    "settings that are a list": lambda c: c["param_groups"][0].update(settings=[]),
    "parameters that are a text": lambda c: c["param_groups"][0].update(params="ab"),
    "parameters that are numbers": lambda c: c["param_groups"][0].update(params=[1]),
    "optimizer classes that are a text": lambda c: c.update(optimizer_classes="SGD"),
    "no parameter groups": lambda c: c.pop("param_groups"),
    "versions that are a text": lambda c: c.update(written_by="3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_impossible_layout_is_noticed_even_if_the_checksum_fits(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / MANIFEST).write_text(changed(WRONG[name]))
    assert_damaged(tmp_path)


CONTENT = example().as_text()[len('{"content": ') :].rpartition(',\n"crc32"')[0]
TWICE = CONTENT.replace('"step": 1200,', '"step": 1200, "step": 1200,')


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"format": 1]', "{" * 3, TWICE], ids=len)
def test_content_that_is_not_json_is_noticed_even_if_the_checksum_fits(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / MANIFEST).write_text(text_of(content))
    assert_damaged(tmp_path)


def test_a_manifest_without_a_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text_of("{}"))
    assert_damaged(tmp_path)


@pytest.mark.parametrize(
    "odd", ["[" * 100_000 + "]" * 100_000, "[" + "[]," * 1_100_000 + "[]]"], ids=["deep", "wide"]
)
def test_a_text_of_brackets_is_refused(tmp_path: Path, odd: str) -> None:
    (tmp_path / MANIFEST).write_text(
        text_of(f'{{"format": "fsdp_compat checkpoint", "version": 1, "groups": {odd}}}')
    )
    assert_damaged(tmp_path)


def test_a_text_that_is_too_long_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    with open(tmp_path / MANIFEST, "wb") as file:
        file.truncate(1 << 40)  # without a byte on the disk
    assert_damaged(tmp_path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "FIFO"])
def test_a_manifest_that_is_not_a_regular_file_is_refused(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / MANIFEST)
    assert_damaged(tmp_path)


ODD: list[Any] = [
    None,
    True,
    -1,
    1,
    2.5,
    10**30,
    "",
    "a",
    [],
    [[]],
    [1, "a"],
    {},
    {"a": 1},
    {"names": 3},
]


@settings(same_path, max_examples=200)
@given(data=st.data())
def test_a_manifest_with_any_value_replaced_is_read_or_is_a_checkpoint_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    content = around = json.loads(example().as_text())["content"]
    while True:
        key = data.draw(
            st.sampled_from(list(around) if isinstance(around, dict) else range(len(around)))
        )
        if not around[key] or not isinstance(around[key], (list, dict)) or data.draw(st.booleans()):
            break
        around = around[key]
    if data.draw(st.booleans()):
        del around[key]
    else:
        around[key] = data.draw(st.sampled_from(ODD))
    (tmp_path / MANIFEST).write_text(text_of(json.dumps(content)))
    try:
        found = read_manifest(tmp_path)
    except CheckpointError:
        return
    found.as_text()
    found.parameters()


# -- how large it is


def nbytes(num_groups: int, num_params: int, num_files: int, file_nbytes: int = 0) -> int:
    """The size of a manifest, in groups of equal numbers of parameters, which are sharded over all
    files."""
    shapes = [(1024, 1024)] * (num_params // num_groups)
    groups = []
    for number in range(num_groups):
        names = [
            f"model.layers.{number:03d}.mlp.{index:03d}.weight" for index in range(len(shapes))
        ]
        layout = flat_layout(names, shapes, ranks=num_files, align=4)
        groups.append(
            FlatGroup(
                f"model.layers.{number}.flat_0",
                torch.float32,
                0,
                layout,
                tuple((name,) for name in names),
            )
        )
    facts = FileFacts(file_nbytes, (0xFFFFFFFF,) * -(-file_nbytes // (4 << 20)))
    return len(
        Manifest(
            identity="0" * 32,
            step=1,
            common=0,
            axes=(tuple(range(num_files)),),
            groups=tuple(groups),
            files=(facts,) * num_files,
            param_groups=None,
            written_by=versions(),
        ).as_text()
    )


def test_the_manifest_grows_with_parameters_plus_files_not_with_their_product() -> None:
    base = nbytes(1, 100, 1)
    assert nbytes(1, 1100, 1) - base < 1000 * 200, "bytes for each parameter"
    assert nbytes(100, 100, 1) - base < 99 * 200, "bytes for each group"
    assert nbytes(1, 100, 1025) - base < 1024 * 120, "bytes for each file"
    assert nbytes(1, 100, 1, 4 << 30) - base < 1024 * 8 + 100, "bytes for each block of 4 MiB"
    assert nbytes(100, 1000, 1024) < 450_000, "1,000 parameters on 1,024 ranks"


def test_a_layout_with_two_parameters_in_one_place_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="b starts at 3"):
        FlatLayout((ParamSpec("a", (4,), 0), ParamSpec("b", (4,), 3)), 1, 8)
