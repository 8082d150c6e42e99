"""Loading a checkpoint of another format: what each rank reads, numbered optimizers, and what is
refused on all ranks before anything changes. tests/checkpoint/test_corpus.py has the formats."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compat import checkpoint
from fsdp_compat._layout.box import Box
from fsdp_compat.checkpoint import LoadReport
from fsdp_compat.checkpoint._tools.archive import Archive, of_memory
from fsdp_compat.checkpoint._tools.native import NativeCheckpoint, write_native
from fsdp_compat.checkpoint._tools.reading import Files
from fsdp_compat.checkpoint._tools.writing import WriteOptions
from fsdp_compat.errors import CheckpointError
from tests.support.cases import about
from tests.support.checkpoints import flip, noted_reads, num_read, refused, sharded, state_of
from tests.support.odd_model import assert_same
from tests.support.ranks import run_ranks

SIZE, LAYERS = 256, 6


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))


def trained(
    model: nn.Module, make: Callable[..., Any] = torch.optim.Adam, backwards: bool = False
) -> Any:
    """backwards: the optimizer has the parameters in reverse."""
    optimizer = make([*model.parameters()][:: -1 if backwards else 1], lr=0.5)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _bytes_read(folder: Path) -> dict[str, tuple[int, int]]:
    """Return how many bytes a load reads, and how many the rank has, by front end and format."""
    found = {}
    for front_end in ("flat", "rows"):
        for name in ("weights", "whole.pt", "dcp"):
            model = sharded(front_end, layers())
            optimizer = trained(model)
            states = [value for state in optimizer.state.values() for value in state.values()]
            with noted_reads() as runs:
                checkpoint.load(folder / name, model, None if name == "weights" else optimizer)
            own = [*model.parameters(), *(() if name == "weights" else states)]
            nbytes = sum(
                (value.to_local() if hasattr(value, "to_local") else value).nbytes for value in own
            )
            found[f"{front_end}, {name}"] = num_read(runs), nbytes
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_reads_its_own_part_and_its_share_of_the_records_with_checksums(
    tmp_path: Path, ranks: int
) -> None:
    model = layers()
    optimizer = trained(model)
    names = [name for name, _ in model.named_parameters()]
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, tmp_path / "numbers.pt")
    given = {"optimizer_names": names, "exclude": []}
    checkpoint.convert(tmp_path / "numbers.pt", tmp_path / "whole.pt", **given)
    checkpoint.convert(tmp_path / "numbers.pt", tmp_path / "dcp", to="dcp", **given)
    checkpoint.convert(tmp_path / "numbers.pt", tmp_path / "weights", weights=True)
    record = SIZE * SIZE * 4
    total = 3 * LAYERS * record
    for by_case in run_ranks(ranks, _bytes_read, tmp_path):
        for case, (read, own) in by_case.items():
            share = 0 if "weights" in case else total / ranks + record
            assert own * 0.99 <= read <= own + share + 4096, case


def _numbered(folder: Path) -> None:
    for front_end, name in (("flat", "numbers"), ("rows", "numbers"), ("rows", "backwards")):
        model = sharded(front_end, layers())
        optimizer = trained(model, torch.optim.SGD, name == "backwards")
        assert checkpoint.load(folder / f"{name}.pt", model, optimizer) == {"epoch": 3}
        found = state_of(model, optimizer)
        for number in range(LAYERS):
            assert torch.all(found[f"state.{number}.weight.exp_avg"] == 0.1 * (1.0 + number))
        for file in ("fewer.pt", "groups.pt"):
            with refused(CheckpointError, "is numbered, and does not fit"):
                checkpoint.load(folder / file, model, optimizer)


def test_numbered_state_goes_to_the_parameters_in_the_order_of_the_optimizer(
    tmp_path: Path,
) -> None:
    model = layers()
    optimizer = trained(model)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(states, tmp_path / "numbers.pt")
    backwards = trained(layers(), backwards=True).state_dict()
    torch.save({**states, "optimizer": backwards}, tmp_path / "backwards.pt")
    (group,) = states["optimizer"]["param_groups"]
    halves = [{**group, "params": group["params"][part]} for part in (slice(2), slice(2, None))]
    two = {**states["optimizer"], "param_groups": halves}
    torch.save({**states, "optimizer": two}, tmp_path / "groups.pt")
    states["optimizer"]["param_groups"][0]["params"].pop()
    del states["optimizer"]["state"][LAYERS - 1]
    torch.save(states, tmp_path / "fewer.pt")
    run_ranks(2, _numbered, tmp_path)


def _refused(folder: Path) -> None:
    renamed = {"0.weight": None, "more": "5.weight"}
    for front_end in ("flat", "rows"):
        model = sharded(front_end, layers())
        optimizer = trained(model)
        before = state_of(model, optimizer)
        for name, text in {
            "missing.pt": "missing: 5.weight",
            "damaged.pt": "checksum",
            "no optimizer.pt": "holds no optimizer state",
            "shapes.pt": "has another shape than its parameter",
            "code.pt": "refused",
            "nothing": "no checkpoint at this path",
        }.items():
            with about(name), refused(CheckpointError, text):
                checkpoint.load(folder / name, model, optimizer)
            assert_same(state_of(model, optimizer), before, name)
        report = LoadReport()
        checkpoint.load(folder / "missing.pt", model, optimizer, strict=False, report=report)
        assert report.missing == ["5.weight"]
        assert report.unexpected == ["more"]
        with refused(CheckpointError, "missing: 0.weight"):
            checkpoint.load(folder / "missing.pt", model, rename=lambda n: renamed.get(n, n))


def test_what_does_not_fit_or_is_damaged_is_refused_on_all_ranks_before_anything_changes(
    tmp_path: Path,
) -> None:
    model = layers()
    optimizer = trained(model)
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    by_name = {
        "state": {names[number]: entry for number, entry in state["state"].items()},
        "param_groups": [{**state["param_groups"][0], "params": names}],
    }
    values = model.state_dict()
    good = {"model": {name: value + 1 for name, value in values.items()}, "optimizer": by_name}
    torch.save(good, tmp_path / "damaged.pt")
    flip(tmp_path / "damaged.pt", (tmp_path / "damaged.pt").stat().st_size // 2)
    fewer = {**good["model"], "more": torch.ones(SIZE, SIZE)}
    del fewer["5.weight"]
    torch.save({**good, "model": fewer}, tmp_path / "missing.pt")
    torch.save(good["model"], tmp_path / "no optimizer.pt")
    torch.save({**good, "function": os.getcwd}, tmp_path / "code.pt")
    odd = {**by_name["state"], "0.weight": {"row": torch.ones(SIZE)}}
    torch.save({**good, "optimizer": {**by_name, "state": odd}}, tmp_path / "shapes.pt")
    run_ranks(2, _refused, tmp_path)


def test_a_part_of_a_tensor_of_very_many_ranks_asks_for_few_pieces_and_heads(
    tmp_path: Path,
) -> None:
    tensors = {f"{n}.weight": of_memory(f"{n}.weight", torch.ones(1000, 3)) for n in range(20)}
    with Files() as files:
        archive = Archive(tmp_path, "by hand", tensors)
        write_native(archive, tmp_path / "native", WriteOptions(500), files)
    found = NativeCheckpoint(tmp_path / "native")
    stored = found.outline().tensors["7.weight"]
    pieces = list(stored.pieces_in(Box((500, 0), (2, 3))))
    assert sum(piece.box.numel for piece in pieces) == 6
    assert len(pieces) <= 4
    assert len(found._heads) <= 4
