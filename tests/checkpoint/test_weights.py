"""Weights in safetensors files: what ranks write together has the form that others write, and is
read from any form. tests/checkpoint/test_layouts.py has the layouts."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, StateDictType
from fsdp_compat.checkpoint import load_safetensors, save_safetensors
from fsdp_compat.errors import CheckpointError, FsdpCompatError, UsageError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.checkpoints import by_columns, ours_fully_shard, refused, toy
from tests.support.memory import NewBytes
from tests.support.odd_model import assert_same
from tests.support.ranks import on_ranks, run_ranks

INDEX = "model.safetensors.index.json"
MIB = 1 << 20


def full_state(model: nn.Module) -> dict[str, Tensor]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()


def in_files(model: nn.Module) -> dict[str, Tensor]:
    """What is to stand in the files of a `Toy`: its tie once."""
    return {name: v for name, v in full_state(model).items() if name != "words.head.weight"}


def found_in(files: list[Path]) -> dict[str, Tensor]:
    """What the library finds in the files: each tensor in one of them."""
    found: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            assert not set(tensors) & set(found)
            found |= tensors
    return found


def write_files(folder: Path, files: dict[str, dict[str, Tensor]]) -> None:
    """Write files as the library does, on one rank, by their names in the folder."""
    if dist.get_rank() == 0:
        for name, tensors in files.items():
            path = folder / f"{name}.safetensors"
            path.parent.mkdir(exist_ok=True)
            save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    dist.barrier()


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# -- what is read


@on_ranks(2)
def test_weights_are_loaded_from_a_file_an_index_or_a_directory_under_any_tied_name(
    tmp_path: Path,
) -> None:
    tensors = in_files(toy()[0])
    names = list(tensors)
    first, second = ({name: tensors[name] for name in part} for part in (names[::2], names[1::2]))
    own = {name: value for name, value in tensors.items() if name != "words.embed.weight"}
    tie = {"words.head.weight": tensors["words.embed.weight"].clone()}
    files = {
        "one/weights": tensors,
        **{"files/a": first, "files/b": second},
        **{"index/a": first, "index/b": {**second, names[0]: torch.zeros(1)}},  # one too many
        "index/consolidated": tensors,  # beside what the index speaks of
        **{"tied/model": {**own, **tie}, "both/model": {**tensors, **tie}},
    }
    weight_map = {name: f"{'ab'[number % 2]}.safetensors" for number, name in enumerate(names)}
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    write_files(tmp_path, files)
    if dist.get_rank() == 0:
        (tmp_path / "index" / INDEX).write_text(index)
    dist.barrier()
    for path in (
        "one/weights.safetensors",
        "one",
        f"index/{INDEX}",
        "index",
        "files",
        "tied",
        "both",
    ):
        model, _ = toy(seed=9)
        load_safetensors(str(tmp_path / path) if path == "one" else tmp_path / path, model)
        assert_same(in_files(model), tensors)


@on_ranks(2)
def test_the_next_forward_uses_the_loaded_values(tmp_path: Path) -> None:
    """What forward kept gathered, or cast, is not used after loading."""

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    x = torch.ones(2, 3)
    save_safetensors(tmp_path / "new", FSDP(made(1)))
    for strategy, use_orig_params in (("SHARD_GRAD_OP", False), ("NO_SHARD", True)):
        model = FSDP(
            made(2),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x)
        load_safetensors(tmp_path / "new", model)
        assert torch.equal(model(x), made(1)(x)), (strategy, use_orig_params)
        model(x).sum().backward()  # the optimizer still holds what the model computes with
        optimizer.step()
        assert not torch.equal(model(x), made(1)(x))


# -- the form


class Plain(nn.Module):
    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Parameter(torch.randn(10)), nn.Parameter(torch.randn(30).double())
        self.c, self.d = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.randn(3).bfloat16())


FORMS: dict[str, tuple[dict[str, int], int]] = {  # the arguments, and how many files they make
    "one": ({}, 1),
    "exact": ({"max_file_size": 40 + 240 + 40 + 6}, 1),
    "many": ({"max_file_size": 100}, 3),
    "deeper/each": ({"max_file_size": 1}, 4),
}


@on_ranks(2)
def test_files_begin_before_they_get_too_large_and_have_the_names_and_the_index_that_others_write(
    tmp_path: Path,
) -> None:
    for name, (arguments, num) in FORMS.items():
        files = save_safetensors(tmp_path / name, FSDP(Plain()), **arguments)
        parts = [f"model-{number:05d}-of-{num:05d}.safetensors" for number in range(1, num + 1)]
        expected = [*parts, INDEX] if num > 1 else ["model.safetensors"]
        assert files == [tmp_path / name / file for file in expected]
        assert names_in(tmp_path / name) == expected
        assert_same(found_in(files), Plain().state_dict())
    one, two, three = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
    assert json.loads((tmp_path / "many" / INDEX).read_text()) == {
        "metadata": {"total_size": 326},
        "weight_map": {"a": one, "b": two, "c": three, "d": three},
    }
    with safetensors.safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@on_ranks(2)
def test_buffers_in_one_memory_are_written_once_if_they_are_one_tensor(tmp_path: Path) -> None:
    plain = nn.Linear(3, 2)
    plain.register_buffer("square", torch.randn(3, 3))
    plain.register_buffer("turned", plain.square.t())
    plain.register_buffer("again", plain.square)
    plain.register_buffer("cache", torch.ones(2), persistent=False)
    expected = {n: value.clone() for n, value in plain.state_dict().items() if n != "again"}
    model = FSDP(plain)
    expected |= {n: value for n, value in full_state(model).items() if n in ("weight", "bias")}
    assert_same(found_in(save_safetensors(tmp_path, model)), expected)


@on_ranks(2)
def test_values_are_rounded_on_the_way_out_or_in_and_integers_stay(tmp_path: Path) -> None:
    model, _ = toy()
    plain = in_files(model)

    def rounded(dtype: torch.dtype) -> dict[str, Tensor]:
        return {n: v.to(dtype) if v.is_floating_point() else v for n, v in plain.items()}

    def with_own_dtypes(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(plain[name].dtype) for name, value in values.items()}

    for dtype in (torch.bfloat16, torch.float64):
        path, expected = tmp_path / str(dtype), rounded(dtype)
        assert_same(found_in(save_safetensors(path, model, dtype=dtype)), expected)
        other, _ = toy("flat original", seed=9)
        load_safetensors(path, other)
        assert_same(in_files(other), with_own_dtypes(expected))
    save_safetensors(tmp_path / "exact", model)
    load_safetensors(tmp_path / "exact", other, dtype=torch.bfloat16)
    assert_same(in_files(other), with_own_dtypes(rounded(torch.bfloat16)))


def _out(name: str) -> str | None:
    return None if name.startswith("blocks.1.") else f"model.{name}"


def _in(name: str) -> str | None:
    return name.removeprefix("model.") if name != "model.rotary.inv_freq" else None


@on_ranks(2)
def test_names_are_mapped_by_a_function_both_ways_and_none_leaves_out(tmp_path: Path) -> None:
    model, _ = toy()
    expected = in_files(model)
    prefixed = {f"model.{name}": value for name, value in expected.items()}
    files = save_safetensors(tmp_path / "part", model, rename=_out)
    left = {n: value for n, value in prefixed.items() if not n.startswith("model.blocks.1.")}
    assert_same(found_in(files), left)
    write_files(tmp_path, {"whole/model": {**prefixed, "model.rotary.inv_freq": torch.ones(3)}})
    model, _ = toy(seed=9)
    load_safetensors(tmp_path / "whole", model, rename=_in)
    assert_same(in_files(model), expected)


# -- what a rank allocates


class Large(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.arange(4e6).view(1000, 4000).to(dtype))
        self.small = nn.Parameter(torch.zeros(7, dtype=dtype))

    def parts(self) -> list[nn.Module]:
        return []


def _peaks(folder: Path) -> dict[str, int]:
    """Return how many bytes are allocated at most."""
    peaks = {}
    for name, dtype, rounds in (
        ("straight", torch.float32, None),
        ("to a narrow dtype", torch.bfloat16, None),
        ("to a wide dtype", torch.float64, None),
        ("rounded", torch.float32, torch.bfloat16),
    ):
        model = FSDP(Large(dtype))
        with NewBytes() as allocated:
            load_safetensors(folder, model, dtype=rounds)
        peaks[name] = allocated.peak
    for name, dtype in (("written", None), ("written rounded", torch.bfloat16)):
        model = FSDP(Large())
        with NewBytes() as allocated:
            save_safetensors(folder / name, model, dtype=dtype)
        peaks[name] = allocated.peak
    columns = ours_fully_shard(Large(), shard_placement_fn=by_columns)
    save_safetensors(folder / "first use", columns)
    with NewBytes() as allocated:
        [file] = save_safetensors(folder / "columns", columns)
    peaks["written by columns"] = allocated.peak
    assert_same(load_file(file), Large().state_dict())
    return peaks


def test_a_rank_needs_one_buffer_beside_its_shard_at_most(tmp_path: Path) -> None:
    tensors = {"big": torch.randn(1000, 4000), "small": torch.randn(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    for peaks in run_ranks(2, _peaks, tmp_path):
        assert max(peaks.pop("straight"), peaks.pop("written")) < 10_000
        assert all(peak <= 4 * MIB + 10_000 for peak in peaks.values()), peaks


# -- what is refused, on all ranks, with nothing changed and nothing written


class Small(nn.Module):
    """Its values tell whether anything was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 2)
        self.register_buffer("count", torch.ones(3))
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def assert_refused(
    cases: dict[str, tuple[type[FsdpCompatError], str, Callable[[], object]]],
) -> None:
    """Each call raises, on every rank: the kind, with a piece of its text."""
    for name, (kind, text, call) in cases.items():
        with about(name), refused(kind, text):
            call()
        dist.barrier()


def _by_rank(first: Any, second: Any) -> Any:
    return first if dist.get_rank() == 0 else second


def _no_space(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def _index(**files: Any) -> bytes:
    names = dict.fromkeys(Small().state_dict(), "model.safetensors")
    changed = {name.replace("_", "."): file for name, file in files.items()}
    return json.dumps({"weight_map": names | changed}).encode()


INVALID = "The index cannot be read"
WRONG_INDICES: dict[str, tuple[bytes, str]] = {
    "no file": (_index(a_bias="other.safetensors"), "other.safetensors"),
    "lost": (_index(c_bias="model.safetensors"), "'c.bias' in model.safetensors"),
    "elsewhere": (_index(a_bias="../good/model.safetensors"), INVALID),
    "no weight_map": (b"{}", INVALID),
    "a NUL": (b'{"weight_map": {"a": "a\\u0000.safetensors"}}', INVALID),
}


def _wrong_files(folder: Path) -> None:
    good = {name: value + 1 for name, value in Small().state_dict().items()}
    files = {
        "good": good,
        "missing": {name: value for name, value in good.items() if name != "a.bias"},
        "shape": good | {"b.weight": torch.ones(4)},
        "buffer shape": good | {"count": torch.ones(4)},
    }
    for name, tensors in files.items():
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
    for name in ("stray", "twice", "truncated", *WRONG_INDICES):
        shutil.copytree(folder / "good", folder / name)
    for name, (text, _) in WRONG_INDICES.items():
        (folder / name / INDEX).write_bytes(text)
    file = folder / "truncated" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    fifos = {"FIFO": "model", "FIFO in a directory": "other", "index FIFO": INDEX}
    for name, file_name in fifos.items():
        (folder / name).mkdir()
        suffix = ".json" if file_name == INDEX else ".safetensors"
        os.mkfifo((folder / name / file_name).with_suffix(suffix))
    save_file({"a.bias": torch.zeros(2)}, folder / "twice" / "second.safetensors")
    save_file({"c.bias": torch.zeros(2)}, folder / "stray" / "second.safetensors")
    (folder / "empty").mkdir()


@on_ranks(2)
def test_an_invalid_load_is_refused_on_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        _wrong_files(tmp_path)
    dist.barrier()
    good = tmp_path / "good"
    model = FSDP(Small(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    replicas = FSDP(Small(), sharding_strategy=ShardingStrategy.NO_SHARD)

    def load(path: Any, into: nn.Module = model, **arguments: Any) -> Callable[[], object]:
        return lambda: load_safetensors(path, into, **arguments)

    by_path: dict[Any, str] = {
        "missing": "missing: a.bias",
        "shape": "b.weight: shape [4] in the checkpoint, [2, 2] in the model",
        "buffer shape": "count: shape [4] in the checkpoint, [3] in the model",
        "truncated": "is not a safetensors file, or not a complete one",
        **{name: said for name, (_, said) in WRONG_INDICES.items()},
        "FIFO/model.safetensors": "No checkpoint was recognised",
        "FIFO in a directory": "is not a regular file",
        "index FIFO": "is not a regular file",
        "twice": "'a.bias'",
        "stray": "not in the model: c.bias",
        "empty": "an empty directory",
        "nowhere": "There is no checkpoint at this path",
    }
    floating = "a floating-point dtype, or None"
    half = torch.bfloat16
    by_argument: dict[str, tuple[str, Callable[[], object]]] = {
        "path": ("argument 'path' of checkpoint.load_safetensors", load(3)),
        "dtype": (floating, load(good, dtype=torch.int32)),
        "one name": ("'b.bias'", load(good, rename=lambda n: n.replace("a.bias", "b.bias"))),
        "one rank's dtype": (floating, load(good, dtype=_by_rank(torch.int32, half))),
    }
    by_rank = {
        "one rank's path": ("nowhere", load(_by_rank(good, tmp_path / "nowhere"))),
        "other dtypes": ("all ranks", load(good, replicas, dtype=_by_rank(None, half))),
        "other weights": ("shape [4]", load(_by_rank(good, tmp_path / "shape"), replicas)),
    }
    assert_refused({n: (CheckpointError, said, load(tmp_path / n)) for n, said in by_path.items()})
    assert_refused({name: (UsageError, *case) for name, case in by_argument.items()})
    assert_refused({name: (CheckpointError, *case) for name, case in by_rank.items()})
    for its in (model, replicas):
        assert all((value == 1).all() for value in full_state(its).values()), "nothing has changed"
    with FSDP.summon_full_params(model):
        assert_refused({"summoned": (FsdpCompatError, "summon_full_params", load(good))})
    partly = "the model and its optimizer may be partly changed"
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "preadv", _no_space)
        assert_refused({"disk": (CheckpointError, "No space left on device", load(good))})
        if dist.get_rank() == 1:  # as of a file that was truncated after it was looked at
            patch.setattr(os, "preadv", lambda *_: 0)
        assert_refused({"truncated later": (CheckpointError, partly, load(good))})
    load_safetensors(good, model)
    values = full_state(model).values()
    assert all((value == 2).all() for value in values), "and the ranks are in step"


@on_ranks(2)
def test_an_invalid_save_is_refused_on_all_ranks_and_leaves_no_files(tmp_path: Path) -> None:
    model = FSDP(Small(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    new, rank = tmp_path / "new", dist.get_rank()
    old = {
        "there": "model.safetensors",
        "index": INDEX,
        "parts": "model-00001-of-00002.safetensors",
    }
    if rank == 0:
        for name, file in old.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / file).write_text("old")
        (tmp_path / "file").write_text("old")
        (tmp_path / "mine" / "0").mkdir(parents=True)
        (tmp_path / "mine" / "1").mkdir()
    dist.barrier()

    def save(path: Any = new, its: nn.Module = model, **arguments: Any) -> Callable[[], object]:
        return lambda: save_safetensors(path, its, **arguments)

    floating, number = "a floating-point dtype, or None", "a number of bytes, at least 1"
    swapped = {"a.bias": "b.bias", "b.bias": "a.bias"}
    refused: dict[str, tuple[str, Callable[[], object]]] = {
        **{name: ("which are never overwritten", save(tmp_path / name)) for name in old},
        "dtype": (floating, save(dtype=torch.int8)),
        "dtype without a name": ("torch.float8_e8m0fnu", save(dtype=torch.float8_e8m0fnu)),
        "parameter without a name": (
            "leave it out",
            save(its=FSDP(nn.Linear(3, 2, dtype=torch.complex128))),
        ),
        "one name": ("'b.bias'", save(rename=lambda name: name.replace("a.bias", "b.bias"))),
        "a name of the format": (
            "__metadata__",
            save(rename=lambda n: "__metadata__" if n == "count" else n),
        ),
        "other sizes": ("all ranks", save(max_file_size=_by_rank(10_000, 40))),
        "other names": ("all ranks", save(rename=_by_rank(None, lambda n: f"model.{n}"))),
        "other order": ("all ranks", save(rename=_by_rank(None, lambda n: swapped.get(n, n)))),
        "one rank's argument": (number, save(max_file_size=_by_rank(10_000, 0))),
    }
    mine = tmp_path / "mine" / str(rank)  # as if on disks of their own
    failing: dict[str, tuple[str, Callable[[], object]]] = {
        "a file": ("FileExistsError", save(tmp_path / "file")),
        "other file systems": (str(tmp_path / "mine" / "1"), save(mine)),
    }
    assert_refused({name: (UsageError, *case) for name, case in refused.items()})
    assert_refused({name: (CheckpointError, *case) for name, case in failing.items()})
    with FSDP.summon_full_params(model):
        assert_refused({"summoned": (FsdpCompatError, "summon_full_params", save())})
    calls: list[tuple[int, Any, str]] = [(1, os, "pwrite"), (0, os, "pwrite"), (1, os, "fsync")]
    for failed, owner, method in [(0, Path, "rename"), *calls]:
        with pytest.MonkeyPatch.context() as patch:
            if rank == failed:
                patch.setattr(owner, method, _no_space)
            assert_refused({method: (CheckpointError, "No space left on device", save())})
    if rank == 0:
        for name, file in old.items():
            assert names_in(tmp_path / name) == [file]
            assert (tmp_path / name / file).read_text() == "old"
        assert not new.exists() or not names_in(new)
        assert not [path for path in (tmp_path / "mine").rglob("*") if path.is_file()]
    dist.barrier()
    files = [file.name for file in save_safetensors(new, model)]
    assert files == ["model.safetensors"], "and the ranks are in step"


@on_ranks(1)
def test_a_save_removes_what_killed_ones_left_and_nothing_of_those_that_run(tmp_path: Path) -> None:
    killed, living = (tmp_path / f".weights-{digit * 32}" for digit in "01")
    killed.mkdir()
    living.mkdir()
    (living / ".owner-elsewhere").touch()
    save_safetensors(tmp_path, FSDP(Small()))
    assert names_in(tmp_path) == [living.name, "model.safetensors"]
