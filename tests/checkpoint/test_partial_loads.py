"""Loads of a part of a checkpoint (``strict=False``), of settings into other parameter groups, and
of tensors that are parameters in one place and buffers in another."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import checkpoint
from fsdp_compat.checkpoint import LoadReport
from fsdp_compat.errors import CheckpointError, UsageError
from tests.checkpoint.corpus.content import take_step
from tests.support.cases import about
from tests.support.checkpoints import change_manifest, refused, sharded, state_of
from tests.support.odd_model import assert_same
from tests.support.ranks import on_ranks

STEP = "step-00000001"
Made = tuple[nn.Module, torch.optim.Optimizer]


def refuses(kind: type[Exception], call: Callable[[], Any], *texts: str) -> None:
    with refused(kind, *texts):
        call()


class Body(nn.Module):
    """It is never called."""

    def __init__(self, seed: int, width: int = 5, head: str = "head") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3)
        self.add_module(head, nn.Linear(3, width))
        self.register_buffer("scale", torch.full((3,), float(seed)))


FRONT_ENDS = ("flat", "flat original", "rows")


def _save_bodies(folder: Path) -> dict[str, Tensor]:
    for front_end in FRONT_ENDS:
        model = sharded(front_end, Body(1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        take_step(optimizer)
        checkpoint.save(folder / front_end, model, optimizer, "extra", step=1)
    checkpoint.save_safetensors(folder / "weights", model)
    checkpoint.save(folder / "no optimizer", model, step=1)
    of_head = torch.optim.Adam(model.head.parameters())
    checkpoint.save(folder / "state of the head", model, of_head, step=1)
    return state_of(model, optimizer)


def _load_bodies(folder: Path, saved: dict[str, Tensor]) -> None:
    flat, original, rows = FRONT_ENDS
    for saver, loader in ((flat, flat), (flat, original), (original, rows), (rows, flat)):
        with about(f"{saver} into {loader}"):
            _load_body(folder / saver / STEP, loader, saved)
    model = sharded("flat", Body(2, head="own"))
    before = dict(checkpoint.iter_full_state_dict(model))
    load = partial(checkpoint.load_safetensors, folder / "weights", model)
    refuses(CheckpointError, load, "missing: own.weight")
    assert left_by(load(strict=False)) == LEFT
    assert_same(dict(checkpoint.iter_full_state_dict(model)), taken(saved, before))
    for path, front_end, num_kept in (
        ("no optimizer", "rows", 6),
        ("state of the head", "flat", 2),  # nothing for the rest of the FlatParameter
    ):
        model = sharded(front_end, Body(2, head="own" if front_end == "flat" else "head"))
        optimizer = torch.optim.Adam(model.parameters())
        take_step(optimizer)
        before = state_of(model, optimizer)
        report = checkpoint.load(folder / path / STEP, model, optimizer, strict=False)
        assert len(report.state_kept) == num_kept
        after = state_of(model, optimizer)
        states = [{n: v for n, v in its.items() if "state." in n} for its in (after, before)]
        assert_same(*states)
        assert torch.equal(after["first.weight"], saved["first.weight"])
    other = sharded("rows", nn.Linear(7, 7))
    for call in (
        partial(checkpoint.load, folder / "rows" / STEP, other),
        partial(checkpoint.load_safetensors, folder / "weights", other),
    ):
        refuses(CheckpointError, call, "missing: weight")
        nothing = "Nothing in the checkpoint fits"
        refuses(CheckpointError, partial(call, strict=False), "missing: weight", nothing)
        refuses(UsageError, partial(call, strict="no"), "argument")


TAKEN = ("first.", "second.", "scale", "state.first.", "state.second.")
LEFT = {"missing": ["own.weight", "own.bias"], "unexpected": ["head.weight", "head.bias"]}


def left_by(report: LoadReport) -> dict[str, list[str]]:
    return {"missing": report.missing, "unexpected": report.unexpected}


def taken(saved: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: saved[n] if n.startswith(TAKEN) else value for n, value in before.items()}


def _load_body(path: Path, loader: str, saved: dict[str, Tensor]) -> None:
    model = sharded(loader, Body(2, head="own"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    take_step(optimizer)
    before = state_of(model, optimizer)
    load = partial(checkpoint.load, path, model, optimizer)
    refuses(CheckpointError, load, "missing: own.weight")
    assert_same(state_of(model, optimizer), before)
    report = checkpoint.load(path, model, optimizer, strict=False)
    assert (report.extra, report.path) == ("extra", path)
    assert left_by(report) == LEFT and not report.is_complete
    assert not report.mismatched
    assert report.state_kept == LEFT["missing"]  # also inside a FlatParameter, but for its count
    expected = taken(saved, before)
    if loader == "flat":  # one count for all
        expected |= {name: saved["state.first.weight.step"] for name in before if "step" in name}
    assert_same(state_of(model, optimizer), expected)
    take_step(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.load(path, model, optimizer, strict=False)
    (text,) = [str(each.message) for each in caught if "strict=False" in str(each.message)]
    assert "missing: own.weight; missing: own.bias" in text
    assert "optimizer state kept: own.weight; optimizer state kept: own.bias" in text
    assert not any("only the new optimizer" in str(each.message) for each in caught)

    wide = sharded(loader, Body(2, width=6))
    report = checkpoint.load(path, wide, strict=False)
    assert report.mismatched == {
        "head.weight": "shape [5, 3] in the checkpoint, [6, 3] in the model",
        "head.bias": "shape [5] in the checkpoint, [6] in the model",
    }
    assert "head.bias: shape [5]" in str(report)
    weights = dict(checkpoint.iter_full_state_dict(wide))
    assert torch.equal(weights["second.weight"], saved["second.weight"])
    assert torch.equal(weights["head.weight"], Body(2, width=6).head.weight)


@on_ranks(2)
def test_a_load_that_is_not_strict_takes_what_fits_and_reports_the_rest(tmp_path: Path) -> None:
    _load_bodies(tmp_path, _save_bodies(tmp_path))


is_weight, is_bias = re.compile(r".*weight$").match, re.compile(r".*bias$").match
DECAY = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.9), "label": "decay"}
REST = {"lr": 0.2, "weight_decay": 0.0, "betas": (0.7, 0.9), "label": "rest"}


def grouped(model: nn.Module, *groups: tuple[dict[str, Any], Callable[[str], Any]]) -> Any:
    named = {name.removeprefix("_fsdp_wrapped_module."): p for name, p in model.named_parameters()}
    return torch.optim.Adam(
        [
            {"params": [p for name, p in named.items() if chosen(name)], **settings}
            for settings, chosen in groups
        ]
    )


def settings_in(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: group[key] for key in (*DECAY, *group) if key in DECAY}
        for group in optimizer.param_groups
    ]


def _save_groups(folder: Path) -> None:
    for front_end in ("flat original", "rows"):
        model = sharded(front_end, Body(1))
        optimizer = grouped(model, (DECAY, is_weight), (REST, is_bias))
        if front_end == "flat original":  # a rank may leave out what it has no part of
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p.numel()]
            optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
            if dist.get_rank() == 1:
                optimizer.param_groups.reverse()
        take_step(optimizer)
        checkpoint.save(folder / front_end, model, optimizer, step=1)
    optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    save = partial(checkpoint.save, folder / "different", model, optimizer, step=1)
    refuses(UsageError, save, "lr=1.1 on rank 1, 0.1 on a rank")
    assert not list((folder / "different").glob("*"))


def _load_groups(folder: Path) -> None:
    for saver in ("flat original", "rows"):
        path = folder / saver / STEP
        for loader in ("flat original", "rows"):
            with about(f"{saver} into {loader}"):
                _load_other_groups(path, loader)
        model = sharded("flat", Body(2))
        optimizer = grouped(model, ({**REST, "lr": 5.0}, lambda _: True))
        load = partial(checkpoint.load, path, model, optimizer)
        refuses(CheckpointError, load, "lr=0.1 for 'first.weight', 0.2 for", "Flat")
        assert not optimizer.state
        report = checkpoint.load(path, model, optimizer, strict=False)
        assert list(report.settings_kept) == [0]
        assert settings_in(optimizer)[0]["lr"] == 5.0
        assert optimizer.state


def _load_other_groups(path: Path, loader: str) -> None:
    # The other order, one group more, a new key, and a learning rate that is a tensor.
    model = sharded(loader, Body(2))
    optimizer = grouped(
        model,
        (
            {"lr": torch.tensor(9.0), "foreach": False, "label": "?"},
            lambda name: "head.bias" in name,
        ),
        ({"lr": 9.0, "new": 4}, lambda name: is_bias(name) and "head" not in name),
        ({"lr": 9.0}, is_weight),
    )
    optimizer.add_param_group({"params": [], "lr": 3.0, "label": "own"})
    checkpoint.load(path, model, optimizer)
    first, second, third, empty = settings_in(optimizer)
    assert isinstance(first["lr"], Tensor)
    assert first == {**REST, "lr": torch.tensor(0.2)}
    assert second == REST
    assert third == DECAY
    assert optimizer.param_groups[1]["new"] == 4
    assert (empty["lr"], empty["label"]) == (3.0, "own")
    take_step(optimizer)


@on_ranks(2)
def test_groups_with_different_settings_that_were_saved_as_one_are_refused(tmp_path: Path) -> None:
    def split(weights: dict[str, Any], biases: dict[str, Any]) -> Any:
        return grouped(model, (weights, is_weight), (biases, is_bias))

    for front_end in ("flat original", "rows"):
        model = sharded(front_end, Body(1))
        optimizer = grouped(model, (DECAY, lambda _: True))
        take_step(optimizer)
        path = checkpoint.save(tmp_path / f"one {front_end}", model, optimizer, step=1)
        optimizer = split({**DECAY, "fused": True}, {**DECAY, "extra": 1})
        checkpoint.load(path, model, optimizer)
        assert settings_in(optimizer) == [DECAY, DECAY]
        optimizer = split(DECAY, {**DECAY, "weight_decay": 0.0})
        load = partial(checkpoint.load, path, model, optimizer)
        refuses(CheckpointError, load, "weight_decay=0.3 in group 0, 0.0 in group 1, saved as 0.3")
        assert not optimizer.state
        report = checkpoint.load(path, model, optimizer, strict=False)
        assert list(report.settings_kept) == [0, 1]
        assert settings_in(optimizer) == [DECAY, {**DECAY, "weight_decay": 0.0}]
        assert optimizer.state


class Renamed(torch.optim.AdamW):
    """As a user's own subclass."""


class Wrapper(torch.optim.Optimizer):
    """Not a subclass of what it wraps, as Accelerate's optimizer."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["wrapped"], name)

    def load_state_dict(self, state_dict: Any) -> None:
        self.wrapped.load_state_dict(state_dict)


@on_ranks(2)
def test_the_state_of_an_optimizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = sharded("flat original", Body(1))
    params = list(model.parameters())
    own = [p for p in params if p.numel()]
    saved = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3)
    torch.optim.lr_scheduler.LambdaLR(saved, lambda _: 0.5)  # adds a setting
    take_step(saved)
    path = checkpoint.save(tmp_path, model, saved, step=1)
    for same in (
        torch.optim.Adam(params, foreach=False),
        Renamed(params),
        Wrapper(torch.optim.AdamW(params, lr=9.0)),
    ):
        checkpoint.load(path, model, same)
        assert same.param_groups[0]["lr"] == 0.05
        assert all(same.state[p].keys() == saved.state[p].keys() for p in own)
    other = torch.optim.SGD(params, lr=9.0, momentum=0.5)
    classes = "the state of torch.optim.sgd.SGD", "the state of torch.optim.adamw.AdamW"
    refuses(CheckpointError, partial(checkpoint.load, path, model, other), *classes)
    take_step(other)
    momenta = [other.state[p]["momentum_buffer"].clone() for p in own]
    report = checkpoint.load(path, model, other, strict=False)
    assert report.settings_kept == {0: "the checkpoint holds the state of torch.optim.adamw.AdamW"}
    assert len(report.state_kept) == 6
    assert "betas" not in other.param_groups[0]
    assert all(map(torch.equal, [other.state[p]["momentum_buffer"] for p in own], momenta))
    # A checkpoint that does not say which class it is of loads as far as names go.
    dist.barrier()
    if dist.get_rank() == 0:
        change_manifest(path, lambda content: content.pop("optimizer_classes"))
    dist.barrier()
    checkpoint.load(path, model, torch.optim.SGD(params, lr=9.0))


@on_ranks(2)
def test_settings_follow_their_parameters_into_other_groups_or_are_refused(tmp_path: Path) -> None:
    _save_groups(tmp_path)
    _load_groups(tmp_path)


class Mixed(nn.Module):
    """``table`` is a parameter or a buffer; ``inner`` is managed or ignored."""

    def __init__(self, seed: int, as_buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.outer = nn.Linear(4, 3)
        self.inner = nn.Linear(3, 3)
        table = torch.randn(5, 3)
        if as_buffer:
            self.register_buffer("table", table)
        else:
            self.table = nn.Parameter(table)


@on_ranks(2)
def test_parameters_load_into_buffers_and_ignored_parameters_and_back(tmp_path: Path) -> None:
    def made(seed: int, front_end: str, is_other: bool) -> Made:
        inner = Mixed(seed, as_buffer=is_other)
        ignored: dict[str, Any] = {"ignored_modules": [inner.inner]}
        if front_end == "rows":
            ignored = {"ignored_params": set(inner.inner.parameters())}
        model = sharded(front_end, inner, **ignored if is_other else {})
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    kinds = [*itertools.product(("flat", "rows"), (False, True))]
    for saver in kinds:
        saved = made(1, *saver)
        take_step(saved[1])
        path = checkpoint.save(tmp_path / str(saver), *saved, step=1)
        state = state_of(*saved)
        for number, loader in enumerate(kinds):
            with about(f"{saver} into {loader}"):
                loaded = made(2, *loader)
                assert checkpoint.load(path, *loaded, strict=number > 1).is_complete
                found = state_of(*loaded)
                # A buffer has no state; one that became a parameter in a FlatParameter has zeros,
                # and its count.
                shared = {*found} & {*state}
                assert_same({n: found[n] for n in shared}, {n: state[n] for n in shared})
                others = {*state, *found} - shared
                assert all(name.startswith("state.table") for name in others), others
                take_step(loaded[1])


@on_ranks(2)
def test_states_of_an_unmanaged_parameter_keep_its_order_in_memory(tmp_path: Path) -> None:
    def made(front_end: str) -> Made:
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        ignored: dict[str, Any] = {"ignored_modules": [conv]}
        if front_end == "rows":
            ignored = {"ignored_params": {*conv.parameters()}}
        model = sharded(front_end, nn.Sequential(conv, nn.Conv2d(4, 2, 3)), **ignored)
        return model, torch.optim.Adam(model.parameters())

    for front_end in FRONT_ENDS:
        model, optimizer = made(front_end)
        take_step(optimizer)
        path = checkpoint.save(tmp_path / front_end, model, optimizer, step=1)
        saved = state_of(model, optimizer)
        model, optimizer = made(front_end)
        checkpoint.load(path, model, optimizer)
        assert_same(state_of(model, optimizer), saved)
        (param,) = (p for p in optimizer.state if p.shape[1:] == (3, 3, 3))
        assert optimizer.state[param]["exp_avg"].stride() == param.stride() == (27, 1, 9, 3)


class OldNet(nn.Module):
    """It has tied parameters, and a buffer that files of old versions of torch do not have."""

    def __init__(self, unit: Callable[[nn.Module], nn.Module] = lambda module: module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.third = self.fourth = unit(nn.Linear(3, 3))
        self.norm = nn.BatchNorm1d(3)


@on_ranks(2)
def test_tied_values_that_differ_and_old_files_load_as_with_load_state_dict(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {**OldNet().state_dict(), "second.weight": torch.full((3, 3), 2.0)}
    del state["norm.num_batches_tracked"]
    torch.save(state, path := tmp_path / f"{dist.get_rank()}.pt")
    for front_end in FRONT_ENDS:
        model = sharded(front_end, OldNet(partial(sharded, front_end)))
        assert checkpoint.load(path, model).is_complete
        whole = dict(checkpoint.iter_full_state_dict(model))
        assert whole["first.weight"].eq(2).all() and whole["second.weight"].eq(2).all()
