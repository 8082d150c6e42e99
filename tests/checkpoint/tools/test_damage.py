"""One changed byte is an error or changes nothing: where files have checksums, no other value is
ever read from them, and where they have none, `verify` says so."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_compat.checkpoint.files import convert, inspect, verify
from fsdp_compat.errors import CheckpointError, UsageError
from tests.checkpoint.tools.content import assert_model, content_of
from tests.checkpoint.tools.program import run
from tests.support.checkpoints import Forgery, assert_same, flip, refused, save_dcp

NAN, INF = float("nan"), float("inf")
TENSORS = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(24.0).view(6, 4).t() + 7}


def changed_bytes(file: Path) -> Iterator[int]:
    """Flip one bit of every 31st byte in turn, and yield its place while it is changed."""
    content = file.read_bytes()
    for place in range(0, len(content), 31):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        file.write_bytes(changed)
        yield place
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["torch.save", "torch's dcp", "our dcp"])
def test_no_changed_byte_gives_other_values(tmp_path: Path, kind: str) -> None:
    torch.save(TENSORS, tmp_path / "x.pt")
    path = file = tmp_path / "x.pt"
    if kind == "torch's dcp":
        path = save_dcp(TENSORS, tmp_path / "dcp")
    elif kind == "our dcp":
        path = convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp")
    if path.is_dir():
        (file,) = path.glob("*.distcp")
    num_refused = 0
    for place in changed_bytes(file):
        try:
            found = content_of(path)
        except CheckpointError:
            num_refused += 1
        else:
            for name, expected in TENSORS.items():
                assert_same(found.model[name], expected, f"byte {place}")
    assert num_refused > 24 * 4 // 31, "at least the values themselves have checksums"
    content = file.read_bytes()
    for length in range(0, len(content), 97):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            content_of(path)


def verdict(path: Path) -> str:
    result = run("verify", path)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()[-1]


def test_files_without_checksums_are_not_damaged_and_said_to_have_none(tmp_path: Path) -> None:
    save_file(
        {name: each.contiguous() for name, each in TENSORS.items()}, tmp_path / "x.safetensors"
    )
    torch.save(TENSORS, tmp_path / "with.pt")
    with torch.serialization.skip_data():
        torch.save(TENSORS, tmp_path / "skipped.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(TENSORS, tmp_path / "off.pt")
        save_dcp(TENSORS, tmp_path / "off")
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("x.safetensors", "skipped.pt", "off.pt", "off"):
        result = verify(tmp_path / name)
        assert result.problems == ()
        assert (result.num_checksums, result.num_without_checksum) == (0, 2)
        assert verdict(tmp_path / name) == (
            "complete; this format has no checksums, so changed values cannot be seen"
        )
    for name in ("off.pt", "with.pt", "off"):
        assert_model(tmp_path / name, TENSORS)
    assert verdict(tmp_path / "with.pt") == "complete and undamaged"
    assert verify(tmp_path / "with.pt").num_checksums == 2


# -- one answer for damage, wherever it is


def outcome(path: Path) -> tuple[int, list[str]]:
    """The exit status, and the files with problems."""
    problems: list[Any] = []
    with contextlib.suppress(CheckpointError):
        problems = [problem.where for problem in verify(path).problems]
    return run("verify", path, "--json").exit_code, problems


def test_damage_of_a_native_checkpoint_is_1_and_every_damaged_file_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3 << 20)}, tmp_path / "x.pt")  # beyond the block with the head
    path = convert(tmp_path / "x.pt", tmp_path / "native", to="native", world_size=4)
    zero, one, two, three = (path / f"rank-{rank:05d}.safetensors" for rank in range(4))
    flip(two, -1)
    for place in (-1, 3, 20):  # a value, the length of the header, and the header
        flip(zero, place)
        assert outcome(path) == (1, [zero.name, two.name])
        flip(zero, place)
    content = one.read_bytes()
    one.write_bytes(content[:-1])
    zero.write_bytes(zero.read_bytes() + b"more")
    three.rename(tmp_path / "elsewhere")
    three.symlink_to("../elsewhere")
    assert outcome(path) == (1, [zero.name, one.name, three.name, two.name])
    for values in (True, False):
        problems = {each.where: each for each in verify(path, quick=not values).problems}
        assert "links that stay in the directory" in problems[three.name].what
        said = f"{len(content) - 1} bytes instead of {len(content)} bytes"
        assert (problems[one.name].kind, problems[one.name].what) == ("file", said)
    one.unlink()
    (missing,) = [each for each in verify(path).problems if each.where == one.name]
    assert missing.kind == "file" and "No such file" in missing.what
    flip(path / "manifest.json", 40)
    assert outcome(path) == (1, [path.name])


@pytest.mark.parametrize("dtype", ["qint8", "quint4x2"])
def test_a_quantized_dtype_in_a_native_checkpoint_is_damage(tmp_path: Path, dtype: str) -> None:
    extra = torch.arange(8, dtype=torch.int8)
    torch.save({"model": {"w": torch.arange(8)}, "extra": extra}, tmp_path / "x.pt")
    path = convert(tmp_path / "x.pt", tmp_path / "native", to="native")
    forgery = Forgery(path)
    text = json.dumps(forgery.text)
    assert '"int8"' in text
    forgery.text = json.loads(text.replace('"int8"', f'"{dtype}"'))
    forgery.write(path)
    with pytest.raises(CheckpointError, match=f"{dtype}.* is a quantized dtype"):
        convert(path, tmp_path / "y.pt")


# -- what else an error says


def test_what_safetensors_cannot_hold_is_not_to_be_converted_to_what_does_not_apply(
    tmp_path: Path,
) -> None:
    for dtype, helps in ((torch.complex128, False), (torch.float8_e8m0fnu, True)):
        torch.save({"w": torch.ones(2).to(dtype)}, tmp_path / "x.pt")
        with pytest.raises(UsageError, match="safetensors cannot store this tensor") as raised:
            convert(tmp_path / "x.pt", tmp_path / "z.safetensors")
        assert ("dtype=torch.float32" in str(raised.value)) == helps
    convert(tmp_path / "x.pt", tmp_path / "z.safetensors", dtype=torch.float32)


class Settings(dict[str, int]):
    """Stands for what trainers pickle beside the weights."""

    def __init__(self) -> None:
        self.value = 3
        self["a"] = 1


def test_a_refused_class_names_the_option_that_leaves_it_out(tmp_path: Path) -> None:
    name = f"{Settings.__module__}.Settings"
    torch.save({"model": TENSORS, "settings": Settings()}, tmp_path / "x.pt")
    for command in ("inspect", "verify"):
        result = run(command, tmp_path / "x.pt")
        assert result.exit_code == 1 and f"--ignore-class {name}" in result.stderr
        assert run(command, tmp_path / "x.pt", "--ignore-class", name).exit_code == 0
    with pytest.warns(UserWarning, match="settings, an object"):
        found = convert(tmp_path / "x.pt", tmp_path / "y.pt", ignore_class=[name])
    assert_model(found, TENSORS)
    optimizer = {"param_groups": [{"params": [*TENSORS], "odd": Settings()}], "state": {}}
    torch.save({"model": TENSORS, "optimizer": optimizer}, tmp_path / "z.pt")
    for to in ("torch", "dcp", "native"):
        with pytest.warns(UserWarning, match="odd, an object"):
            found = convert(tmp_path / "z.pt", tmp_path / to, to=to, ignore_class=[name])
        assert content_of(found).groups == [{"params": [*TENSORS]}]


def test_packed_dtypes_of_safetensors_are_read_as_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for numel, is_one in ((4, True), (5, False)):  # of 24 and of 30 bits
        described = {
            "f4": {"dtype": "F4", "shape": [3, 4], "data_offsets": [0, 6]},
            "f6": {"dtype": "F6_E2M3", "shape": [numel], "data_offsets": [6, 9]},
        }
        text = json.dumps(described).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(9)))
        assert verify(path).is_intact == is_one
        if is_one:
            found = content_of(path)
            values = {name: each.tolist() for name, each in found.model.items()}
            assert values == {"f4": [*range(6)], "f6": [6, 7, 8]}
            left = [text.partition(",")[0] for text in found.facts.left_out]
            assert left == ["f4: its dtype F4", "f6: its dtype F6_E2M3"]


def test_a_directory_of_deepspeed_is_named_with_the_script_that_converts_it(tmp_path: Path) -> None:
    step = tmp_path / "global_step10"
    step.mkdir()
    (tmp_path / "latest").write_text("global_step10")
    torch.save({"module": {"w": torch.zeros(0)}}, step / "mp_rank_00_model_states.pt")
    torch.save({}, step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    for path in (tmp_path, step):
        with refused(CheckpointError, "DeepSpeed", f"python {tmp_path / 'zero_to_fp32.py'}"):
            inspect(path)
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")  # what the script makes
    assert_model(tmp_path, TENSORS)


# -- what verify counts


def test_values_are_not_read_on_demand(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(600)}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", (tmp_path / "x.pt").read_bytes().index(b"\0\0\x80?" * 100) + 200)
    assert [each.kind for each in verify(tmp_path / "x.pt").problems] == ["checksum"]
    assert verify(tmp_path / "x.pt", quick=True).is_intact


def test_replicas_that_differ_are_seen(tmp_path: Path) -> None:
    same = torch.arange(600_000.0).reshape(6000, 100)
    other = same.clone()
    other[2000, 7:10] = -1.1
    alike = torch.tensor([NAN, -0.0])
    for rank, values in enumerate((same, same, other)):
        torch.save({"wide": values, "nan": alike}, tmp_path / f"rank_{rank}.pt")
    (problem,) = verify(tmp_path).problems
    assert (problem.kind, problem.where) == ("copies", "model/wide")
    assert problem.what.startswith("3 of 600000 elements in the copy of rank 2 differ")


COUNTED = {  # of NaN and of infinite values
    "both": (torch.tensor([1.0, NAN, INF, -INF, NAN, 0.0]), (2, 2)),
    "bf16": (torch.tensor([NAN, INF, 1.0], dtype=torch.bfloat16), (1, 1)),
    "fp8": (torch.tensor([INF, 1.0]).to(torch.float8_e5m2), (0, 1)),
    "fp8 without infinity": (torch.tensor([NAN, 1.0]).to(torch.float8_e4m3fn), (1, 0)),
    "complex": (torch.tensor([complex(NAN, INF), 1j]), (1, 1)),  # one element is both
    "bool": (torch.tensor([[True], [False]]), (0, 0)),
    "packed": (torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), (0, 0)),
    "several slabs": (torch.full((700_000,), NAN), (700_000, 0)),
}


def test_what_is_not_finite_is_counted_and_damage_only_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({name: values for name, (values, _) in COUNTED.items()}, path)
    result = verify(path)
    expected = [counts for _, counts in COUNTED.values()]
    assert [(each.num_nan, each.num_inf) for each in result.tensors] == expected
    assert result.is_intact
    assert {(each.kind, each.where, each.what) for each in verify(path, finite=True).problems} == {
        ("not finite", f"model/{name}", f"{counts[0]} NaN, {counts[1]} infinite")
        for name, (_, counts) in COUNTED.items()
        if any(counts)
    }
