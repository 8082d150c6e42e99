"""checkpoint.save and checkpoint.load: the same model, optimizer and extra, whoever wrote and
whoever reads; never a wrong one."""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import functools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, checkpoint, fully_shard
from fsdp_compat.errors import CheckpointError, FsdpCompatError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.checkpoint.corpus.content import RankLocal, take_step
from tests.support.cases import about
from tests.support.checkpoints import (
    FACTS,
    Forgery,
    by_columns,
    flip,
    held,
    no_more_than,
    noted_reads,
    num_read,
    open_files,
    refused,
    state_of,
    toy,
)
from tests.support.odd_model import assert_same, whole
from tests.support.ranks import on_ranks, run_ranks

BLOCK_NBYTES = 4 << 20
STEP = "step-00000001"


# -- values


class Typed(nn.Module):
    """A parameter and a buffer of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.tensor([1.7, -2.5, 3.0]).to(dtype)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("table", values.clone())


@on_ranks(2)
def test_dtypes_are_converted_unless_a_fraction_or_an_imaginary_part_would_be_lost(
    tmp_path: Path,
) -> None:
    lossy = {
        torch.complex64: torch.float32,
        torch.float32: torch.int64,
        torch.int64: torch.bool,
        torch.bfloat16: None,
        torch.uint8: None,
    }
    for number, (saved, own) in enumerate(lossy.items()):
        # Buffers are saved as they were before mixed precision.
        precision = MixedPrecision(buffer_dtype=torch.float16)
        path = checkpoint.save(tmp_path, FSDP(Typed(saved), mixed_precision=precision), step=number)
        same, wider = FSDP(Typed(saved)), FSDP(Typed(torch.complex128))
        with torch.no_grad():
            for value in (*same.parameters(), *same.buffers()):
                value.zero_()
        for model in (same, wider):
            checkpoint.load(path, model)
            for name, value in model.state_dict().items():
                expected = Typed(saved).table.to(value.dtype)
                assert torch.equal(value, expected), (saved, name)
        if own is not None:
            model = FSDP(Typed(own))
            before = {name: value.clone() for name, value in model.state_dict().items()}
            told = [f"{name}: {saved} in the checkpoint, {own} in" for name in before]
            with refused(CheckpointError, *told):
                checkpoint.load(path, model)
            assert_same(model.state_dict(), before)


# -- what is read


def _large() -> FSDP:
    """Return a model of 24 MiB."""
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    return FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def _save_large(folder: str) -> None:
    checkpoint.save(folder, _large(), step=0)


def _reads(path: str) -> tuple[int, int]:
    model = _large()
    with noted_reads() as runs:
        checkpoint.load(path, model)
    return num_read(runs), sum(parameter.nbytes for parameter in model.parameters())


def test_a_rank_reads_the_blocks_that_hold_its_part_and_no_others(tmp_path: Path) -> None:
    run_ranks(1, _save_large, str(tmp_path))
    for ranks in (2, 3):
        for read, own in run_ranks(ranks, _reads, str(tmp_path / "step-00000000")):
            # The block with the head; then 6 runs, each of which may begin and end in the middle of
            # a block, in a file of 24 MiB, once to be checked, and once to be checked again and
            # loaded.
            most = 2 * min(own + 6 * 2 * BLOCK_NBYTES, (24 << 20) + 100_000) + BLOCK_NBYTES
            assert 2 * own <= read <= most


# -- what is damaged


def _save_one(folder: str, seed: int = 7) -> None:
    checkpoint.save(folder, *toy(seed=seed), torch.arange(5), step=1)


def _resized(by: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, path.stat().st_size + by)


def _instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), make(path))


def _flip(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def _foreign(path: Path) -> None:
    shutil.copy(path.parent.parent / "other" / STEP / path.name, path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": _flip,
    "a truncated file": _resized(-1),
    "a longer file": _resized(1),
    "a missing file": Path.unlink,
    "a FIFO": _instead(os.mkfifo),
}
DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{name: ("rank-00001.safetensors", change) for name, change in CHANGES.items()},
    "a file of another checkpoint": ("rank-00001.safetensors", _foreign),
    "a flipped bit in the manifest": ("manifest.json", _flip),
    "no manifest": ("manifest.json", Path.unlink),
    "a FIFO instead of the manifest": ("manifest.json", _instead(os.mkfifo)),
}


def are_equal(values: list[Tensor], others: list[Tensor]) -> bool:
    return len(values) == len(others) and all(map(torch.equal, values, others))


def _load_damaged(folder: str, cases: Mapping[str, str]) -> None:
    model, optimizer = toy("flat original", seed=8)
    before = held(model, optimizer)
    for what, name in cases.items():
        with about(what), refused(CheckpointError, name):
            checkpoint.load(Path(folder) / what, model, optimizer)
        assert are_equal(held(model, optimizer), before), what
    take_step(optimizer)


class Opens:
    """Counts how often a file is opened, and acts before the last time."""

    def __init__(self, file: Path) -> None:
        self._file, self._open = file, os.open
        self.number, self.acts_before, self.act = 0, -1, lambda: None

    def open(self, path: Any, *args: Any, **keywords: Any) -> int:
        if path == self._file:
            self.number += 1
            if self.number == self.acts_before:
                self.act()
        return self._open(path, *args, **keywords)


def _load_changing(folder: str) -> None:
    """A file changes when all ranks have checked it, and before any has copied a byte out of it:
    they open it once more."""
    path = Path(folder) / STEP
    file = path / "rank-00001.safetensors"
    good, opens = file.read_bytes(), Opens(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", opens.open)
        model, optimizer = toy("flat original", 0)
        checkpoint.load(path, model, optimizer)
        saved, opens.acts_before = held(model, optimizer), opens.number
        for what, change in CHANGES.items():
            model, optimizer = toy("flat original", seed=8)
            before, opens.number = held(model, optimizer), 0
            opens.act = functools.partial(_change_on_the_first_rank, change, file)
            with about(what), refused(CheckpointError, "The files changed while they") as raised:
                checkpoint.load(path, model, optimizer)
            message = str(raised.value)
            assert "the model and its optimizer may be partly changed" in message.splitlines()[-1]
            assert "nothing was loaded" not in message, message
            for now, old, new in zip(held(model, optimizer), before, saved, strict=True):
                assert ((now == old) | (now == new)).all(), f"{what}: a value that nobody has saved"
            opens.act = lambda: None
            _change_on_the_first_rank(lambda file: file.unlink(missing_ok=True), file)
            _change_on_the_first_rank(lambda file: file.write_bytes(good), file)
            checkpoint.load(path, model, optimizer)
            assert are_equal(held(model, optimizer), saved), what


def _change_on_the_first_rank(change: Callable[[Path], object], file: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        change(file)
    dist.barrier()


def test_damage_is_named_on_all_ranks_and_nothing_changes_unless_it_comes_after_the_check(
    tmp_path: Path,
) -> None:
    run_ranks(3, _save_one, str(tmp_path))  # of the middle one both of two ranks have a part
    run_ranks(3, _save_one, str(tmp_path / "other"), seed=5)
    for what, (name, damage) in DAMAGES.items():
        shutil.copytree(tmp_path / STEP, tmp_path / what)
        damage(tmp_path / what / name)
    run_ranks(2, _load_damaged, str(tmp_path), {what: name for what, (name, _) in DAMAGES.items()})
    run_ranks(2, _load_changing, str(tmp_path))


# -- what is forged: with the right checksums, so that only its sense can tell


def _places(content: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON content, of long lists only the first ones."""
    if isinstance(content, (dict, list)):
        for key in content if isinstance(content, dict) else range(min(len(content), 3)):
            yield (*above, key)
            yield from _places(content[key], (*above, key))


ODD: list[Any] = [None, True, -1, 3, 2.5, 10**30, "", "x", [], [[]], {}, [1, 2, 3], {"a": 1}]
ODD += [{"": None}, {"@tuple": 3}, {"@x": 1}, {"@enum": ["nowhere:Colour", "RED"]}]
ODD += [{"@object": ["builtins:object", {}]}, {"@tensor": ["none", "float32", [1]]}]
GONE, AROUND = object(), object()
TAGS = "int float complex bytes dtype device size tuple set dict deque counter tensor array x"
TAGGED = st.dictionaries(
    st.sampled_from([f"@{tag}" for tag in TAGS.split()]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
    min_size=1,
    max_size=1,
)


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

    def values() -> list[Tensor]:
        settings = [[group["lr"], *group["betas"]] for group in optimizer.param_groups]
        return [*held(model, optimizer), torch.tensor(settings)]

    step()
    extra = {"a": [1, (2.5, "b")], "t": torch.arange(3), 3: 10**30}
    good = checkpoint.save(tmp_path, model, optimizer, extra, step=1)
    step()
    before = values()
    for tag in ("@enum", "@object", "@flag", "@named_tuple", "@tensor_of"):
        forgery = Forgery(good)
        forgery.manifest["param_groups"][0]["settings"]["mode"] = {tag: ["nowhere:Colour", "RED"]}
        forgery.write(tmp_path / "forged")
        with refused(CheckpointError, "A value of the checkpoint cannot be", "nothing was loaded"):
            checkpoint.load(tmp_path / "forged", model, optimizer)
        assert are_equal(values(), before), tag
    documents = {"header": Forgery(good).header, "text": Forgery(good).text}
    documents["manifest"] = Forgery(good).manifest
    places = [(name, place) for name, its in documents.items() for place in _places(its)]
    outcomes: dict[str, int] = collections.Counter()

    @settings(max_examples=150, deadline=None)
    @given(place=st.sampled_from(places), odd=st.sampled_from([*ODD, GONE, AROUND]) | TAGGED)
    def check(place: tuple[str, tuple[Any, ...]], odd: Any) -> None:
        forgery, (name, (*outer, last)) = Forgery(good), place
        around = functools.reduce(lambda inner, key: inner[key], outer, getattr(forgery, name))
        if odd is GONE:
            del around[last]
        else:
            around[last] = copy.deepcopy(around if odd is AROUND else odd)
        forgery.write(tmp_path / "forged")
        before = values()
        outcome = _outcome(tmp_path / "forged", model, optimizer)
        outcomes[outcome] += 1
        if outcome == "refused":
            assert are_equal(values(), before)
        else:
            checkpoint.load(good, model, optimizer)
            step()

    check()
    assert outcomes["refused"] > 50, outcomes
    assert outcomes["loaded"], "some changes, such as another learning rate, are valid"
    assert outcomes["refused by the optimizer"] < 10, outcomes


def _outcome(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    try:
        checkpoint.load(path, model, optimizer)
    except CheckpointError as error:
        assert all(fact in str(error) for fact in FACTS), error
        is_changed = "may be partly changed" in str(error)
        return "refused by the optimizer" if is_changed else "refused"
    return "loaded"


# -- what cannot work


class Unsavable:
    def __reduce__(self) -> Any:
        return Unsavable, ()


@on_ranks(2)
def test_invalid_arguments_are_refused_on_all_ranks_before_anything_is_written(
    tmp_path: Path,
) -> None:
    model, optimizer = toy()
    first = dist.get_rank() == 0
    cases: dict[str, Callable[[], Any]] = {
        "no FSDP module": lambda: checkpoint.save(tmp_path, nn.Linear(2, 2), step=1),
        "no optimizer": lambda: checkpoint.save(tmp_path, model, model, step=1),  # type: ignore[arg-type]
        "a negative step": lambda: checkpoint.save(tmp_path, model, step=-1),
        "keep none": lambda: checkpoint.save(tmp_path, model, step=1, keep_last=0),
        "steps that differ": lambda: checkpoint.save(tmp_path, model, step=dist.get_rank()),
        "extra that needs pickle, on one rank": lambda: checkpoint.save(
            tmp_path, model, extra=Unsavable() if first else 1, step=1
        ),
        "another model's optimizer": lambda: checkpoint.save(
            tmp_path, model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), step=1
        ),
        "a checkpoint on one rank only": lambda: checkpoint.load(
            tmp_path / "good" / f"step-{int(first):08d}", model
        ),
        "no optimizer saved": lambda: checkpoint.load(
            tmp_path / "good" / "step-00000001", model, optimizer
        ),
    }
    checkpoint.save(tmp_path / "good", model, step=1)
    for what, call in cases.items():
        with about(what), refused(FsdpCompatError) as raised:
            call()
        if what.endswith("on one rank"):  # its own error there, quoted elsewhere
            assert ("on rank 0 of 2: " in str(raised.value)) != first
        dist.barrier()
        assert os.listdir(tmp_path) == ["good"], what
    other = FSDP(nn.Sequential(nn.Linear(5, 3)))
    with pytest.raises(CheckpointError, match=r"missing: 0\.weight"):
        checkpoint.load(tmp_path / "good" / "step-00000001", other)
    with FSDP.summon_full_params(model), pytest.raises(FsdpCompatError, match="summon_full_params"):
        checkpoint.save(tmp_path, model, step=1)


@on_ranks(2)
def test_a_full_disk_is_an_error_on_all_ranks_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    model, optimizer = toy()
    good = checkpoint.save(tmp_path, model, optimizer, step=1)
    expected = state_of(model, optimizer)
    take_step(optimizer)
    with no_more_than(1000) if dist.get_rank() == 1 else contextlib.nullcontext():
        with refused(CheckpointError, "rank 1: OSError"):
            checkpoint.save(tmp_path, model, optimizer, step=2, keep_last=1)
        with pytest.raises(CheckpointError, match="rank 1: OSError"):
            checkpoint.async_save(tmp_path, model, optimizer, step=2).wait()
        with pytest.raises(CheckpointError, match="OSError"):
            checkpoint.save_safetensors(tmp_path / "weights", model)
    assert not open_files(tmp_path)
    dist.barrier()
    assert os.listdir(tmp_path / "weights") == []
    dist.barrier()
    os.rmdir(tmp_path / "weights") if dist.get_rank() == 0 else None
    dist.barrier()
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert checkpoint.latest(tmp_path) == good
    checkpoint.load(good, model, optimizer)
    assert_same(state_of(model, optimizer), expected)
    checkpoint.save(tmp_path, model, optimizer, step=2)


@on_ranks(2)
def test_writes_and_reads_that_end_early_are_completed(tmp_path: Path) -> None:
    write, preadv = os.write, os.preadv
    model, optimizer = toy()
    expected = state_of(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:100]))
        patch.setattr(os, "preadv", lambda file, data, at: preadv(file, [data[0][:100]], at))
        path = checkpoint.save(tmp_path, model, optimizer, step=1)
        take_step(optimizer)
        checkpoint.load(path, model, optimizer)
    assert_same(state_of(model, optimizer), expected)


# -- states that are not one number per element


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


@on_ranks(2)
def test_states_and_settings_that_cannot_be_saved_are_named_and_everything_else_is_saved(
    tmp_path: Path,
) -> None:
    def made(mode: Mode, lr: float) -> tuple[FSDP, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = FSDP(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
        optimizer.param_groups[0].update(mode=mode, schedule=math.sqrt, note=[(mode.value, "a")])
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        (state,) = optimizer.state.values()
        state["thing"] = Unsavable()
        state["momentum_buffer"] *= 1 + lr
        return model, optimizer

    def momentum(optimizer: torch.optim.Optimizer) -> Tensor:
        return next(iter(optimizer.state.values()))["momentum_buffer"]

    left_out = ("param_groups[0]['mode'], param_groups[0]['schedule']", "weight.thing")
    model, saved = made(Mode.FAST, 0.1)
    with pytest.warns(UserWarning) as caught:
        path = checkpoint.save(tmp_path, model, saved, step=1)
    assert {each.filename for each in caught} == {__file__}
    told = str(caught[0].message)
    assert all(part in told for part in ("are not in the checkpoint: ", *left_out)), told
    model, loaded = made(Mode.EXACT, 0.7)
    with pytest.warns(UserWarning) as caught:
        checkpoint.load(path, model, loaded)
    told = str(caught[0].message)
    assert all(part in told for part in ("were not saved", *left_out)), told
    (group,) = loaded.param_groups
    assert (group["lr"], group["note"]) == (0.1, [(1, "a")])
    assert (group["mode"], group["schedule"]) == (Mode.EXACT, math.sqrt)
    assert torch.equal(momentum(loaded), momentum(saved))


@on_ranks(2)
def test_states_of_one_rank_come_back_on_it(tmp_path: Path) -> None:
    """tests/checkpoint/test_corpus.py has rows and flat parameters, and other layouts, which are
    refused."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6))
    model = fully_shard(model, shard_placement_fn=by_columns)
    optimizer = RankLocal(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach()  # zero in padding
    optimizer.step()
    for state in optimizer.state.values():
        state["map"] = {"code": [1, (None, "x")], "table": torch.ones(2) * dist.get_rank()}
    expected = {**optimizer.state}
    with pytest.warns(UserWarning, match="can only be loaded with the layout") as caught:
        path = checkpoint.save(tmp_path, model, optimizer, step=2)
    assert [warning.filename for warning in caught] == [__file__]
    optimizer.state.clear()
    checkpoint.load(path, model, optimizer)
    for parameter in model.parameters():
        assert_same(optimizer.state[parameter], whole(expected[parameter]))
    by_rows = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6)))
    with refused(CheckpointError, "placement that state 'codes' was saved with"):
        checkpoint.load(path, by_rows, RankLocal(by_rows.parameters()))
