"""checkpoint.save and checkpoint.load: the same model, optimizer and extra, whoever wrote and
whoever reads; never a wrong one."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import io
import itertools
import json
import math
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, StateDictType, checkpoint, fully_shard
from fsdp_compat.checkpoint._blocks import BLOCK_NBYTES
from fsdp_compat.checkpoint._ranks import Ranks
from fsdp_compat.errors import CheckpointError, FsdpCompatError, UsageError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.odd_model import (
    Config,
    assert_same,
    assert_same_optim,
    make_model,
    make_optimizer,
    shard,
    train,
    whole,
)
from tests.support.optimizer_state import num_sent
from tests.support.ranks import RankError, on_ranks, run_ranks
from tests.support.sampling import sample

STEPS = 2
PLAIN: Config = ("FULL_SHARD", False, "blocks")
ORIGINAL: Config = ("FULL_SHARD", True, "always")
FACTS = ("expected:", "got:", "where:", "to do:")


def build(config: Config, kind: str = "Adam", seed: int = 0) -> tuple[FSDP, torch.optim.Optimizer]:
    model = shard(make_model(seed), config)
    return model, make_optimizer(kind, model)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the checkpoint is to bring back, by way of full state dicts."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {
            "model": {name: value.clone() for name, value in model.state_dict().items()},
            "optim": FSDP.optim_state_dict(model, optimizer),
        }


def assert_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, expected: dict[str, Any]
) -> None:
    found = whole_state(model, optimizer)
    assert_same(found["model"], expected["model"])
    assert_same_optim(found["optim"], expected["optim"])


# -- there and back


def _write(folder: str, config: Config, kind: str) -> dict[str, Any] | None:
    model, optimizer = build(config, kind)
    train(model, optimizer, range(STEPS))
    before = num_sent(model)
    path = checkpoint.save(folder, model, optimizer, {"rank": dist.get_rank()}, step=STEPS)
    assert num_sent(model) == before
    assert path == Path(folder) / "step-00000002"
    state = whole_state(model, optimizer)
    losses = train(model, optimizer, range(STEPS, STEPS + 2))
    return (
        {**state, "losses": losses, "ranks": dist.get_world_size()}
        if dist.get_rank() == 0
        else None
    )


def _read(folder: str, config: Config, kind: str, expected: dict[str, Any]) -> None:
    model, optimizer = build(config, kind, seed=1)
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    path = checkpoint.latest(folder)
    assert path is not None
    before = num_sent(model)
    extra = checkpoint.load(path, model, optimizer)
    assert num_sent(model) == before
    assert extra == {"rank": dist.get_rank() if dist.get_world_size() == expected["ranks"] else 0}
    assert_state(model, optimizer, expected)
    storages = [
        value.untyped_storage().nbytes() - value.nbytes
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    assert not any(storages)
    counts = [entry["step"].data_ptr() for entry in optimizer.state.values() if "step" in entry]
    assert len(set(counts)) == len(counts)
    losses = train(model, optimizer, range(STEPS, STEPS + 2))
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(expected["losses"]), rtol=1e-6, atol=0.0
    )


# Pairwise: every strategy, wrapping, use_orig_params and number of ranks writes and reads, and each
# pair of strategies of writer and reader occurs at most once.
RESHARDINGS: list[tuple[int, Config, int, Config, str]] = [
    (1, ("FULL_SHARD", False, "blocks"), 4, ("HYBRID_SHARD", True, "always"), "SGD"),
    (2, ("FULL_SHARD", True, "always"), 3, ("SHARD_GRAD_OP", False, "blocks"), "Adam"),
    (3, ("SHARD_GRAD_OP", True, "blocks"), 2, ("FULL_SHARD", True, "always"), "Adam"),
    (4, ("HYBRID_SHARD", False, "always"), 1, ("NO_SHARD", False, "always"), "Adam"),
    (4, ("NO_SHARD", True, "always"), 3, ("FULL_SHARD", False, "blocks"), "Adam"),
    (3, ("FULL_SHARD", False, "always"), 3, ("FULL_SHARD", True, "blocks"), "SGD"),
    (2, ("HYBRID_SHARD", True, "blocks"), 4, ("SHARD_GRAD_OP", True, "always"), "Adam"),
]


def test_a_checkpoint_of_any_ranks_loads_on_any_ranks(tmp_path: Path) -> None:
    for number, (writers, saved, readers, target, kind) in enumerate(
        sample(RESHARDINGS, 0, 1, 2, 3)
    ):
        folder = str(tmp_path / str(number))
        expected = run_ranks(writers, _write, folder, saved, kind)[0]
        run_ranks(readers, _read, folder, target, kind, expected)


@on_ranks(3)
def test_ranks_that_have_only_padding_get_the_states_that_others_get(tmp_path: Path) -> None:
    # Four elements: the shards of other ranks than the first are padding, which a FlatParameter
    # has states of, and an empty original parameter has not. Rows lie on every rank but the last.
    def made(front_end: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(2, 2, bias=False)
        if front_end == "rows":
            fully_shard(model)
        else:
            model = FSDP(model, use_orig_params=front_end == "original")
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return FSDP.optim_state_dict(model, optimizer)["state"]["weight"]

    front_ends = ("flat", "original", "rows")
    for saver in front_ends:
        model, optimizer = made(saver)
        stepped(model, optimizer)
        checkpoint.save(tmp_path / saver, model, optimizer, step=1)
        expected = whole(stepped(model, optimizer))
        for loader, num_before in itertools.product(front_ends, range(2)):
            with about(f"{saver} into {loader} after {num_before} steps"):
                model, optimizer = made(loader)
                for _ in range(num_before):
                    stepped(model, optimizer)
                checkpoint.load(checkpoint.latest(tmp_path / saver), model, optimizer)
                assert_same(stepped(model, optimizer), expected)


@on_ranks(2)
def test_every_dtype_is_kept_and_another_one_is_converted_to(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5).bfloat16(), nn.Embedding(3, 2))
    model[2].weight = nn.Parameter(
        torch.arange(6, dtype=torch.uint8).view(3, 2), requires_grad=False
    )
    model.register_buffer("inv", torch.randn(3), persistent=False)
    wrapped = FSDP(model, mixed_precision=MixedPrecision(buffer_dtype=torch.float16))
    checkpoint.save(tmp_path, wrapped, step=0)
    before = {name: value.clone() for name, value in wrapped.state_dict().items()}
    with torch.no_grad(), FSDP.summon_full_params(wrapped):
        for parameter in wrapped.parameters():
            parameter.zero_()
    path = checkpoint.latest(tmp_path)
    assert path is not None
    assert checkpoint.load(path, wrapped) is None
    assert_same(wrapped.state_dict(), before)
    torch.manual_seed(4)
    other = FSDP(nn.Sequential(nn.Linear(5, 7).bfloat16(), nn.Linear(7, 5), nn.Embedding(3, 2)))
    checkpoint.load(path, other)
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name].to(value.dtype)), name


class Typed(nn.Module):
    """A parameter and a buffer of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.tensor([1.7, -2.5, 3.0]).to(dtype)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("table", values.clone())


@on_ranks(2)
def test_a_dtype_that_would_lose_an_imaginary_part_or_a_fraction_is_refused(
    tmp_path: Path,
) -> None:
    refused = [
        (torch.complex64, torch.float32),
        (torch.float32, torch.int64),
        (torch.int64, torch.bool),
    ]
    for number, (saved, own) in enumerate(refused):
        path = checkpoint.save(tmp_path, FSDP(Typed(saved)), step=number)
        model = FSDP(Typed(own))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError) as raised:
            checkpoint.load(path, model)
        text = str(raised.value)
        for name in ("weight", "table"):
            assert f"{name}: {saved} in the checkpoint, {own} in the model" in text
        assert all(fact in text for fact in FACTS)
        assert_same(model.state_dict(), before)
    wider = FSDP(Typed(torch.float64))  # from integers
    path = checkpoint.save(tmp_path, FSDP(Typed(torch.int64)), step=len(refused))
    checkpoint.load(path, wider)
    expected = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    assert_same(wider.state_dict(), {"weight": expected, "table": expected})


class Around(nn.Module):
    """Not sharded itself: one part is, one is not, and one is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Linear(3, 3)
        part = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3), nn.BatchNorm1d(3))
        self.part = FSDP(part, ignored_modules=[part[1]])

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.free(x))

    def get_extra_state(self) -> dict[str, int]:
        return {"answer": self.answer}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.answer = state["answer"]

    answer = 1


def _container(folder: str, reads: bool) -> Any:
    torch.manual_seed(0)
    model = Around()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(seed: int) -> float:
        optimizer.zero_grad()
        loss = (
            model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().sum()
        )
        loss.backward()
        optimizer.step()
        return loss.item()

    if reads:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        checkpoint.load(Path(folder) / "step-00000000", model, optimizer)
        assert model.answer == 42
    else:
        step(0)
        model.answer = 42
        checkpoint.save(folder, model, optimizer, step=0)
    return step(1), {name: value for name, value in model.free.state_dict().items()}


def test_a_container_is_saved_with_its_unsharded_parts(tmp_path: Path) -> None:
    wrote = run_ranks(2, _container, str(tmp_path), False)
    read = run_ranks(3, _container, str(tmp_path), True)
    assert read[0][0] == pytest.approx(wrote[0][0], rel=1e-6)
    assert_same(read[0][1], wrote[0][1])


# -- what is in the files


def _save_large(folder: str) -> list[int]:
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(1, 256)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer, step=1)
    return [group.store.numel for group in model._runtime.groups]


def test_a_rank_writes_its_shards_once_and_the_manifest_is_small(tmp_path: Path) -> None:
    sizes = {}
    for ranks in (1, 4):
        numels = run_ranks(ranks, _save_large, str(tmp_path / str(ranks)))[0]
        folder = tmp_path / str(ranks) / "step-00000001"
        files = sorted(path.name for path in folder.iterdir())
        assert files == [
            "manifest.json",
            *(f"rank-{rank:05d}.safetensors" for rank in range(ranks)),
        ]
        states = ("", ".exp_avg", ".exp_avg_sq")
        expected = {f"{unit}.flat_0{state}": (numels[0],) for unit in range(8) for state in states}
        for name in files[1:]:
            content = (folder / name).read_bytes()
            assert 3 * 4 * sum(numels) <= len(content) < 3 * 4 * sum(numels) + 6000
            assert b"\x80\x04" not in content[:5000]  # no pickle begins in the head
            found = load_file(folder / name)
            assert {key: tuple(value.shape) for key, value in found.items()} == expected
        sizes[ranks] = (folder / "manifest.json").stat().st_size
    assert sizes[4] - sizes[1] < 3 * 200  # a line for each file
    assert sizes[1] < 16 * 200 + 2500


def _six() -> FSDP:
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    return FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def _save_six(folder: str) -> None:
    checkpoint.save(folder, _six(), step=0)


def _reads(path: str) -> tuple[int, int]:
    model, preadv, counts = _six(), os.preadv, [0]

    def counting(descriptor: int, buffers: Any, offset: int) -> int:
        counts.append(preadv(descriptor, buffers, offset))
        return counts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counting)
        checkpoint.load(path, model)
    return sum(counts), sum(group.store.shard.nbytes for group in model._runtime.groups)


def test_a_rank_reads_the_blocks_that_hold_its_part_and_no_others(tmp_path: Path) -> None:
    run_ranks(1, _save_six, str(tmp_path))
    for ranks in (2, 3):
        for read, own in run_ranks(ranks, _reads, str(tmp_path / "step-00000000")):
            # The block with the head; then 6 runs, each of which may begin and end in the middle of
            # a block, in a file of 24 MiB, once to be checked, and once to be checked again and
            # loaded.
            most = 2 * min(own + 6 * 2 * BLOCK_NBYTES, (24 << 20) + 100_000) + BLOCK_NBYTES
            assert 2 * own <= read <= most


# -- what is damaged


def _save_one(folder: str, step: int = STEPS, seed: int = 0) -> None:
    model, optimizer = build(PLAIN, seed=seed)
    train(model, optimizer, range(STEPS))
    checkpoint.save(folder, model, optimizer, torch.arange(5), step=step)


def _with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), make(path))


def _foreign(path: Path) -> None:
    shutil.copy(path.parent.parent / "other" / f"step-{STEPS:08d}" / path.name, path)


_flip = _with_bytes(
    lambda old: old[: len(old) // 2] + bytes([old[len(old) // 2] ^ 4]) + old[len(old) // 2 + 1 :]
)
CHANGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": _flip,
    "a truncated file": _with_bytes(lambda content: content[:-1]),
    "a longer file": _with_bytes(lambda content: content + b"x"),
    "a missing file": Path.unlink,
    "a FIFO": _instead(os.mkfifo),
}
DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{name: ("rank-00001.safetensors", change) for name, change in CHANGES.items()},
    "an empty file": ("rank-00001.safetensors", _with_bytes(lambda _: b"")),
    "a file of another checkpoint": ("rank-00001.safetensors", _foreign),
    "a directory": ("rank-00001.safetensors", _instead(os.mkdir)),
    "a flipped bit in the manifest": ("manifest.json", _flip),
    "a truncated manifest": ("manifest.json", CHANGES["a truncated file"]),
    "no manifest": ("manifest.json", Path.unlink),
    "a FIFO instead of the manifest": ("manifest.json", _instead(os.mkfifo)),
}


def _load_damaged(folder: str, cases: Mapping[str, str]) -> None:
    model, optimizer = build(ORIGINAL, seed=1)
    train(model, optimizer, range(1))
    before = [value.clone() for value in (*model.parameters(), *model.buffers())]
    states = copy.deepcopy(list(optimizer.state.values()))
    for what, name in cases.items():
        with pytest.raises(CheckpointError) as raised:
            checkpoint.load(Path(folder) / what, model, optimizer)
            print(f"{what}: loaded")
        message = str(raised.value)
        assert all(fact in message for fact in FACTS), message
        assert name in message, message
        now = (*model.parameters(), *model.buffers())
        assert all(map(torch.equal, now, before)), what
        for entry, then in zip(optimizer.state.values(), states, strict=True):
            assert all(torch.equal(value, then[key]) for key, value in entry.items()), what
    train(model, optimizer, range(1, 2))


def test_damage_is_named_on_all_ranks_and_nothing_changes(tmp_path: Path) -> None:
    run_ranks(3, _save_one, str(tmp_path))
    run_ranks(3, _save_one, str(tmp_path / "other"), seed=5)
    for what, (name, damage) in DAMAGES.items():
        shutil.copytree(tmp_path / f"step-{STEPS:08d}", tmp_path / what)
        damage(tmp_path / what / name)
    run_ranks(2, _load_damaged, str(tmp_path), {what: name for what, (name, _) in DAMAGES.items()})


# -- what changes while it is loaded


def _load_changing(folder: str) -> None:
    """The files change when all ranks have checked them, and before any has copied a byte out of
    them."""
    model, optimizer = build(ORIGINAL, seed=1)
    train(model, optimizer, range(1))
    path = Path(folder) / f"step-{STEPS:08d}"
    file = path / "rank-00001.safetensors"
    good, together = file.read_bytes(), Ranks.agree

    def held() -> list[Tensor]:
        parameters = list(model.parameters())
        states = (sorted(optimizer.state.get(each, {}).items()) for each in parameters)
        return [*parameters, *(value for state in states for _, value in state)]

    before = [value.detach().clone() for value in held()]
    checkpoint.load(path, model, optimizer)
    saved = [value.detach().clone() for value in held()]
    for what, change in CHANGES.items():
        for value, old in zip(held(), before, strict=True):
            value.data.copy_(old)

        def checked_by_all(*args: Any, change: Callable[[Path], object] = change) -> Any:
            found = together(*args)
            Ranks.agree = together  # type: ignore[method-assign]
            if dist.get_rank() == 0:
                change(file)
            dist.barrier()
            return found

        Ranks.agree = checked_by_all  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match="The files changed while they were") as raised:
            checkpoint.load(path, model, optimizer)
        message = str(raised.value)
        assert all(fact in message for fact in FACTS), message
        assert "the model and its optimizer may be partly changed" in message.splitlines()[-1]
        assert "nothing was loaded" not in message, message
        for now, old, new in zip(held(), before, saved, strict=True):
            is_saved = (now == old) | (now == new)
            assert is_saved.all(), f"{what}: a value that nobody has saved"
        dist.barrier()
        if dist.get_rank() == 0:
            file.unlink(missing_ok=True)
            file.write_bytes(good)
        dist.barrier()
        checkpoint.load(path, model, optimizer)
        assert all(torch.equal(now, new) for now, new in zip(held(), saved, strict=True)), what


def test_files_that_change_after_they_were_checked_are_an_error_that_says_that_a_part_was_loaded(
    tmp_path: Path,
) -> None:
    run_ranks(2, _save_one, str(tmp_path))
    run_ranks(2, _load_changing, str(tmp_path))


# -- what is forged: with the right checksums, so that only its sense can tell


class Forgery:
    """A checkpoint of one rank as JSON, to be changed anywhere and written again."""

    def __init__(self, path: Path) -> None:
        content = (path / "rank-00000.safetensors").read_bytes()
        stop = 8 + int.from_bytes(content[:8], "little")
        self.header = json.loads(content[8:stop])
        self.text = json.loads(self.header["__metadata__"].pop("fsdp_compat"))
        self.manifest = json.loads((path / "manifest.json").read_text())["content"]
        self.data = content[stop:]

    def write(self, path: Path) -> None:
        if isinstance(metadata := self.header.get("__metadata__"), dict):
            metadata.setdefault("fsdp_compat", json.dumps(self.text))
        header = json.dumps(self.header).encode()
        content = len(header).to_bytes(8, "little") + header + self.data
        for file in self.manifest["files"] if isinstance(self.manifest.get("files"), list) else ():
            if (
                isinstance(file, dict)
                and isinstance(file.get("nbytes"), int)
                and isinstance(file.get("crc32"), str)
            ):
                file.update(nbytes=len(content), crc32=f"{zlib.crc32(content):08x}")
        text = json.dumps(self.manifest)
        path.mkdir(exist_ok=True)
        (path / "rank-00000.safetensors").write_bytes(content)
        (path / "manifest.json").write_text(
            f'{{"content": {text},\n"crc32": "{zlib.crc32(text.encode()):08x}"}}\n'
        )


def _places(content: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON content, of long lists only the first ones."""
    if isinstance(content, (dict, list)):
        for key in content if isinstance(content, dict) else range(min(len(content), 3)):
            yield (*above, key)
            yield from _places(content[key], (*above, key))


ODD: list[Any] = [None, True, -1, 3, 2.5, 10**30, "", "x", [], [[]], {}, [1, 2, 3], {"a": 1}]
ODD += [{"": None}, {"@tuple": 3}, {"@x": 1}, {"@enum": ["nowhere:Colour", "RED"]}]
ODD += [{"@object": ["builtins:object", {}]}, {"@tensor": ["none", "float32", [1]]}]
GONE = object()


@on_ranks(1)
def test_a_forged_checkpoint_is_loaded_or_is_a_checkpoint_error_and_nothing_has_changed(
    tmp_path: Path,
) -> None:
    """Any value of its header, its text or its manifest is another one, or is not there."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), use_orig_params=True)
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "betas": (0.8, 0.9)}, {"params": model[1].parameters()}]
    )

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    def values() -> list[Any]:
        states = [value for entry in optimizer.state.values() for value in entry.values()]
        tensors = (*model.parameters(), *model.buffers(), *states)
        settings = [[group["lr"], *group["betas"]] for group in optimizer.param_groups]
        return [*(value.detach().clone() for value in tensors), torch.tensor(settings)]

    step()
    good = checkpoint.save(
        tmp_path, model, optimizer, {"a": [1, (2.5, "b")], "t": torch.arange(3), 3: 10**30}, step=1
    )
    step()
    outcomes: dict[str, int] = collections.Counter()
    choose = random.Random(0)
    for _ in range(200):
        forgery = Forgery(good)
        documents = [forgery.header, forgery.text, forgery.manifest]
        number = choose.choice([0, 1, 2])
        path = choose.choice(list(_places(documents[number])))
        around = functools.reduce(lambda inner, key: inner[key], path[:-1], documents[number])
        odd = choose.choice([*ODD, GONE, copy.deepcopy(around)])
        what = f"{('header', 'text', 'manifest')[number]} {path}: {repr(odd)[:300]}"
        if odd is GONE:
            del around[path[-1]]
        else:
            around[path[-1]] = odd
        forgery.write(tmp_path / "forged")
        before = values()
        try:
            checkpoint.load(tmp_path / "forged", model, optimizer)
        except CheckpointError as error:
            assert all(fact in str(error) for fact in FACTS), f"{what}: {error}"
            if "may be partly changed" not in str(error):
                outcomes["refused"] += 1
                assert all(
                    torch.equal(now, then) for now, then in zip(values(), before, strict=True)
                ), what
                continue
            outcomes["refused by the optimizer"] += 1
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        else:
            outcomes["loaded"] += 1
        checkpoint.load(good, model, optimizer)
        step()
    assert outcomes["refused"] > 100, outcomes
    assert outcomes["loaded"] > 10, "some changes, such as another learning rate, are valid"
    assert outcomes["refused by the optimizer"] < 10, outcomes


@on_ranks(1)
def test_settings_are_decoded_before_a_byte_of_the_model_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FSDP(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    good = checkpoint.save(tmp_path, model, optimizer, step=1)
    before = [value.detach() + 1 for value in model.parameters()]
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1)
    for tag in ("@enum", "@object", "@flag", "@named_tuple", "@tensor_of"):
        forgery = Forgery(good)
        forgery.manifest["param_groups"][0]["settings"]["mode"] = {tag: ["nowhere:Colour", "RED"]}
        forgery.write(tmp_path / "forged")
        with pytest.raises(
            CheckpointError,
            match=r"A value of the checkpoint cannot be read(.|\n)*nothing was loaded",
        ):
            checkpoint.load(tmp_path / "forged", model, optimizer)
        assert all(
            torch.equal(value, old) for value, old in zip(model.parameters(), before, strict=True)
        ), tag


# -- steps and folders


@on_ranks(2)
def test_steps_are_never_overwritten_and_old_ones_are_removed_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "on the way"
    model, optimizer = build(PLAIN)
    assert checkpoint.latest(folder) is None
    for step in (1, 5, 3):
        checkpoint.save(folder, model, optimizer, step=step)
    assert checkpoint.latest(folder) == folder / "step-00000005"
    with pytest.raises(UsageError, match="step-00000003") as raised:
        checkpoint.save(folder, model, optimizer, step=3)
    assert all(fact in str(raised.value) for fact in FACTS)
    checkpoint.save(folder, model, optimizer, step=4, keep_last=2)
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000003",
        "step-00000004",
        "step-00000005",
    ]
    dist.barrier()
    checkpoint.save(folder, model, optimizer, step=6, keep_last=1)
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000006"]


@on_ranks(4)
def test_nodes_with_separate_disks_each_have_the_files_they_need(tmp_path: Path) -> None:
    own = tmp_path / f"node {dist.get_rank() // 2}"
    model, optimizer = build(PLAIN)
    train(model, optimizer, range(1))
    expected = whole_state(model, optimizer)
    path = checkpoint.save(own, model, optimizer, step=1)
    names = sorted(file.name for file in path.iterdir())
    first = dist.get_rank() // 2 * 2
    assert names == [
        "manifest.json",
        f"rank-{first:05d}.safetensors",
        f"rank-{first + 1:05d}.safetensors",
    ]
    dist.barrier()
    train(model, optimizer, range(1, 2))
    checkpoint.load(path, model, optimizer)
    assert_state(model, optimizer, expected)


@on_ranks(4)
def test_models_on_different_ranks_save_independently(tmp_path: Path) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = dist.get_rank() // 2
    torch.manual_seed(number)
    model = FSDP(nn.Linear(5, 3), process_group=pairs[number])
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(1 + number):
        checkpoint.save(tmp_path / str(number), model, extra=number, step=step)
    with torch.no_grad():
        model.module  # noqa: B018
        for parameter in model.parameters():
            parameter.zero_()
    path = checkpoint.latest(tmp_path / str(number))
    assert path is not None
    assert path.name == f"step-{number:08d}"
    assert checkpoint.load(path, model) == number
    assert_same(model.state_dict(), expected)


@on_ranks(2)
def test_progress_is_shown_on_the_first_rank_on_request(tmp_path: Path) -> None:
    model = FSDP(nn.Linear(5, 3))
    shown = []
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.save(tmp_path, model, step=7, progress=True),
        lambda: checkpoint.load(tmp_path / "step-00000007", model, progress=True),
        lambda: checkpoint.save_safetensors(tmp_path / "weights", model, progress=True),
        lambda: checkpoint.load_safetensors(tmp_path / "weights", model, progress=True),
        lambda: checkpoint.save(tmp_path, model, step=8),
    ]
    for call in calls:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            call()
        shown.append(stderr.getvalue())
    if dist.get_rank() > 0:
        assert shown == [""] * 5
        return
    for text, what in zip(
        shown, ("save step 7", "check step 7", "save weights", "load weights"), strict=False
    ):
        assert what in text
        assert "B/s]" in text
        assert "100%" in text
    assert "load step 7" in shown[1]
    assert shown[4] == ""


# -- what cannot work


class Unsavable:
    def __reduce__(self) -> Any:
        return Unsavable, ()


@on_ranks(2)
def test_invalid_arguments_are_refused_on_all_ranks_before_anything_is_written(
    tmp_path: Path,
) -> None:
    model, optimizer = build(PLAIN)
    first = dist.get_rank() == 0
    cases: dict[str, Callable[[], Any]] = {
        "no FSDP module": lambda: checkpoint.save(tmp_path, nn.Linear(2, 2), step=1),
        "arguments in another order": lambda: checkpoint.save(model, tmp_path, step=1),  # type: ignore[arg-type]
        "no optimizer": lambda: checkpoint.save(tmp_path, model, model, step=1),  # type: ignore[arg-type]
        "a negative step": lambda: checkpoint.save(tmp_path, model, step=-1),
        "a step that is not a number": lambda: checkpoint.save(tmp_path, model, step="3"),  # type: ignore[arg-type]
        "keep none": lambda: checkpoint.save(tmp_path, model, step=1, keep_last=0),
        "steps that differ": lambda: checkpoint.save(tmp_path, model, step=dist.get_rank()),
        "extra that needs pickle": lambda: checkpoint.save(
            tmp_path, model, extra={"a": [1, Unsavable()]}, step=1
        ),
        "extra that needs pickle, on one rank": lambda: checkpoint.save(
            tmp_path, model, extra=Unsavable() if first else 1, step=1
        ),
        "another model's optimizer": lambda: checkpoint.save(
            tmp_path, model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), step=1
        ),
        "no checkpoint": lambda: checkpoint.load(tmp_path, model),
        "None, as latest of an empty folder": lambda: checkpoint.load(
            checkpoint.latest(tmp_path), model
        ),  # type: ignore[arg-type]
        "a checkpoint on one rank only": lambda: checkpoint.load(
            tmp_path / "good" / f"step-{int(first):08d}", model
        ),
        "no optimizer saved": lambda: checkpoint.load(
            tmp_path / "good" / "step-00000001", model, optimizer
        ),
    }
    checkpoint.save(tmp_path / "good", model, step=1)
    for what, call in cases.items():
        with pytest.raises(FsdpCompatError) as raised:
            call()
        assert all(fact in str(raised.value) for fact in FACTS), f"{what}: {raised.value}"
        if what.endswith("on one rank"):  # its own error there, quoted elsewhere
            assert ("on rank 0 of 2: " in str(raised.value)) != first
        dist.barrier()
        assert os.listdir(tmp_path) == ["good"], what
    other = FSDP(nn.Sequential(nn.Linear(5, 3)))
    with pytest.raises(CheckpointError, match=r"missing: 0\.weight"):
        checkpoint.load(tmp_path / "good" / "step-00000001", other)
    with FSDP.summon_full_params(model), pytest.raises(FsdpCompatError, match="summon_full_params"):
        checkpoint.save(tmp_path, model, step=1)


@contextlib.contextmanager
def _no_more_than(nbytes: int) -> Iterator[None]:
    """Files may not become longer: what a full disk looks like, to this process alone."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@on_ranks(2)
def test_a_full_disk_is_an_error_on_all_ranks_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    model, optimizer = build(PLAIN)
    train(model, optimizer, range(1))
    good = checkpoint.save(tmp_path, model, optimizer, step=1)
    expected = whole_state(model, optimizer)
    train(model, optimizer, range(1, 2))
    with _no_more_than(1000) if dist.get_rank() == 1 else contextlib.nullcontext():
        with pytest.raises(CheckpointError, match="rank 1: OSError") as raised:
            checkpoint.save(tmp_path, model, optimizer, step=2, keep_last=1)
        assert all(fact in str(raised.value) for fact in FACTS)
        with pytest.raises(CheckpointError, match="rank 1: OSError"):
            checkpoint.async_save(tmp_path, model, optimizer, step=2).wait()
        with pytest.raises(CheckpointError, match="OSError"):
            checkpoint.save_safetensors(tmp_path / "weights", model)
    dist.barrier()
    assert os.listdir(tmp_path / "weights") == []
    dist.barrier()
    os.rmdir(tmp_path / "weights") if dist.get_rank() == 0 else None
    dist.barrier()
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert checkpoint.latest(tmp_path) == good
    checkpoint.load(good, model, optimizer)
    assert_state(model, optimizer, expected)
    checkpoint.save(tmp_path, model, optimizer, step=2)


# -- states that are not one number per element


class Blockwise(torch.optim.Optimizer):
    """Keeps one number per three elements, a dict, and settings of every kind."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99), "note": None})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["scales"] = torch.zeros(-(-parameter.numel() // 3) + 2, dtype=torch.uint8)
                    state["map"] = {"code": [1, 2.5, (None, "x")], "table": torch.zeros(2)}
                    state["momentum"] = torch.zeros_like(parameter)
                    state["count"] = 0
                state["scales"] += 1 + dist.get_rank()
                state["map"]["table"] += 1
                state["momentum"] += parameter.grad
                state["count"] += 1
                parameter.data -= group["lr"] * state["momentum"]


@on_ranks(2)
def test_a_state_that_cannot_be_saved_is_named_and_everything_else_is_saved(tmp_path: Path) -> None:
    model = FSDP(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    (parameter,) = model.parameters()
    optimizer.state[parameter]["thing"] = Unsavable()
    buffer = optimizer.state[parameter]["momentum_buffer"].clone()
    with pytest.warns(UserWarning, match=r"are not in the checkpoint: weight\.thing") as caught:
        path = checkpoint.save(tmp_path, model, optimizer, step=1)
    assert caught[0].filename == __file__
    optimizer.state[parameter]["momentum_buffer"].zero_()
    with pytest.warns(UserWarning, match=r"were not saved.*weight\.thing"):
        checkpoint.load(path, model, optimizer)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], buffer)


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


@dataclasses.dataclass
class Preconditioner:
    """As some optimizers have in their parameter groups."""

    size: int


@on_ranks(2)
def test_settings_that_are_objects_stay_those_of_the_optimizer_that_is_loaded_into(
    tmp_path: Path,
) -> None:
    def made(mode: Mode, lr: float) -> tuple[FSDP, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = FSDP(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
        optimizer.param_groups[0].update(
            mode=mode,
            preconditioner=Preconditioner(mode.value),
            schedule=math.sqrt,
            note=[(1, "a")],
        )
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(Mode.FAST, 0.1)
    left_out = (
        r"param_groups\[0\]\['mode'\], param_groups\[0\]\['preconditioner'\], "
        r"param_groups\[0\]\['schedule'\]"
    )
    with pytest.warns(UserWarning, match=f"are not in the checkpoint: {left_out}"):
        path = checkpoint.save(tmp_path, model, optimizer, step=1)
    model, optimizer = made(Mode.EXACT, 0.7)
    optimizer.param_groups[0]["note"] = None
    with pytest.warns(UserWarning, match=f"were not saved.*{left_out}"):
        checkpoint.load(path, model, optimizer)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["note"]) == (0.1, [(1, "a")])
    assert (group["mode"], group["preconditioner"], group["schedule"]) == (
        Mode.EXACT,
        Preconditioner(2),
        math.sqrt,
    )


def _own_states(folder: str, use_orig_params: bool, resumes: bool) -> Any:
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), use_orig_params=use_orig_params)
    optimizer = Blockwise(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()

    if not resumes:
        step()
        step()
        with pytest.warns(UserWarning, match="can only be loaded with the layout") as caught:
            checkpoint.save(folder, model, optimizer, step=2)
        assert [warning.filename for warning in caught] == [__file__]
    else:
        checkpoint.load(Path(folder) / "step-00000002", model, optimizer)
    step()
    return [dict(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_rank_local_states_come_back_where_the_parts_are_the_same(
    use_orig_params: bool, tmp_path: Path
) -> None:
    expected = run_ranks(2, _own_states, str(tmp_path), use_orig_params, False)
    found = run_ranks(2, _own_states, str(tmp_path), use_orig_params, True)
    for rank in range(2):
        for entry, then in zip(found[rank], expected[rank], strict=True):
            assert entry.keys() == then.keys()
            if not then:  # of a parameter of which the rank has no part
                continue
            table, its_table = entry.pop("map"), then.pop("map")
            assert table["code"] == its_table["code"]
            assert torch.equal(table["table"], its_table["table"])
            assert_same(entry, then)
    with pytest.raises(RankError, match="belongs to one rank's part") as raised:
        run_ranks(3, _own_states, str(tmp_path), use_orig_params, True)
    assert "expected: 2 ranks" in str(raised.value)
    assert (
        json.loads((tmp_path / "step-00000002" / "manifest.json").read_text())["content"]["step"]
        == 2
    )
