"""Models with compiled modules have the names of the plain model everywhere, and load what plain
models saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType, checkpoint
from tests.support.cases import about
from tests.support.checkpoints import sharded
from tests.support.ranks import run_ranks

# Of blocks, or of the model; "inside": of a unit, "later": after the model was sharded.
HOW = ("plain", "inside", "checkpointed", "recomputed", "outside", "later")
FULL = StateDictOptions(full_state_dict=True)


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _plain() -> nn.Sequential:
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in HOW)
    return nn.Sequential(*blocks, nn.BatchNorm1d(4), nn.Linear(4, 2))


def _built(front_end: str, how: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """how: "plain"; "blocks", each in another way; or "around", the model too."""
    torch.manual_seed(seed)
    model: Any = _plain()
    for number, its in enumerate(HOW if how != "plain" else ["plain"] * len(HOW)):
        block = model[number]
        block[1].running_mean += seed
        if its == "recomputed":
            block = checkpoint_wrapper(block)
        if its in ("inside", "checkpointed", "recomputed"):
            block = _compiled(block)
        if its == "checkpointed":
            block = checkpoint_wrapper(block)
        block = sharded(front_end, block)
        model[number] = _compiled(block) if its == "outside" else block
    model[-2] = model[-2] if how == "plain" else _compiled(model[-2])
    model = sharded(front_end, model)
    if how != "plain":
        inner = model.module if isinstance(model, FSDP) else model
        inner[HOW.index("later")] = _compiled(inner[HOW.index("later")])
    model = _compiled(model) if how == "around" else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5 + seed)
    optimizer.step()
    return model, optimizer


def _values(model: nn.Module) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in checkpoint.iter_full_state_dict(model)}


NAMES = set(_plain().state_dict())
PARAMETERS = {name for name, _ in _plain().named_parameters()}


def _assert_moves(front_end: str, how: str, load: str, path: Path) -> None:
    model, optimizer = _built(front_end, how, 1)
    expected = _values(model)
    assert set(expected) == set(model.state_dict()) == NAMES
    if front_end != "rows":
        with FSDP.summon_full_params(model):
            assert set(model.state_dict()) == NAMES
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            assert set(FSDP.optim_state_dict(model, optimizer)["state"]) == PARAMETERS
    states = get_state_dict(model, optimizer, options=FULL)
    assert set(states[0]) == NAMES and set(states[1]["state"]) == PARAMETERS
    native = checkpoint.save(path, model, optimizer, step=1)
    checkpoint.save_safetensors(path, model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path / "dcp")
    if dist.get_rank() == 0:
        torch.save(states[0], path / "full.pt")
    dist.barrier()
    fresh, its = _built(front_end, load, 2)
    given = {"model_state_dict": states[0], "optim_state_dict": states[1]}
    loads: list[Callable[[], object]] = [
        lambda: checkpoint.load(native, fresh, its),
        lambda: checkpoint.load(path / "model.safetensors", fresh),
        lambda: checkpoint.load(path / "dcp", fresh),
        lambda: checkpoint.load(path / "full.pt", fresh),
        lambda: fresh.load_state_dict(model.state_dict()),
        lambda: set_state_dict(fresh, its, **copy.deepcopy(given), options=FULL),
    ]
    for number, each in enumerate(loads):
        with torch.no_grad():
            for value in (*fresh.parameters(), *fresh.buffers()):
                value.zero_()
        each()
        assert _values(fresh) == expected, number


def _interchange(folder: Path) -> None:
    for front_end in ("flat", "flat original", "rows"):
        for how, load in (("plain", "blocks"), ("around", "plain")):
            with about(f"{front_end}, {how}"):
                _assert_moves(front_end, how, load, folder / front_end / how)


def test_compiled_modules_change_no_name_and_load_what_plain_ones_saved(tmp_path: Path) -> None:
    run_ranks(2, _interchange, tmp_path, timeout=120)
