"""Files that torch writes and ours read, and the other way round: torch's FSDP1, FSDP2, DDP and
plain models, in other worlds."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig as TorchShardedOptimConfig
from torch.distributed.fsdp import StateDictType as TorchType

import fsdp_compat
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType
from tests.support.odd_model import (
    STEPS,
    TORCHS,
    Config,
    assert_holds,
    assert_same,
    assert_same_optim,
    in_state,
    make_model,
    make_optimizer,
    run_of,
    shard,
    torch_model,
    train,
)
from tests.support.optimizer_state import TORCHS_FULL
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import sample

FULL = StateDictOptions(full_state_dict=True)
CONFIGS: tuple[Config, ...] = (
    ("FULL_SHARD", False, "blocks"),
    ("FULL_SHARD", True, "always"),
    ("NO_SHARD", False, "always"),
    ("MESH", True, "blocks"),
)
WITH_SCALAR = ("plain", "DDP")  # torch's FSDP takes no 0-d parameters
SHARDED = TORCHS[2:]

# Who writes in a world of so many ranks, who reads, and which optimizer.
WORLDS = sample([(3, 2, "Adam"), (1, 2, "SGD")], 0)


def torch_form(model: nn.Module, is_full: bool) -> Any:
    """The form of torch's FSDP1, without what is wrong on CPU: offloading."""
    sharded = TorchType.SHARDED_STATE_DICT, None, TorchShardedOptimConfig(offload_to_cpu=False)
    return TorchFSDP.state_dict_type(model, *(TORCHS_FULL if is_full else sharded))


def states(model: nn.Module, optimizer: torch.optim.Optimizer, library: Any = FSDP) -> Any:
    """In the form that is set."""
    return {"model": model.state_dict(), "optim": library.optim_state_dict(model, optimizer)}


def sharded_form(model: nn.Module) -> Any:
    return FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)


def save_on_rank0(state: Any, path: str) -> None:
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def assert_arrived(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any], where: str
) -> None:
    """All values of the run, and its losses when it goes on."""
    state, optim = get_state_dict(model, optimizer, options=FULL)
    assert_same(state, run["model"], where)
    assert_same_optim(optim, run["optim"], where)
    losses = train(model, optimizer, range(STEPS, STEPS + 2))
    assert losses == pytest.approx(run["losses"], rel=1e-6), where


# --- from torch to ours ---------------------------------------------------------------------------


def _torch_writes(optimizer_kind: str, runs: dict[bool, dict[str, Any]], folder: str) -> None:
    warnings.simplefilter("ignore")  # torch warns of its own deprecated parts
    for kind in TORCHS:
        scalar = kind in WITH_SCALAR
        model = torch_model(kind, 1, scalar)
        optimizer = in_state(model, optimizer_kind, runs[scalar])
        path = f"{folder}/{kind}"
        if scalar:
            saved = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        elif kind == "FSDP2":
            state, optim = get_state_dict(model, optimizer)
            dcp.save({"model": state, "optim": optim}, checkpoint_id=f"{path} sharded")
            state, optim = get_state_dict(model, optimizer, options=FULL)
            saved = {"model": state, "optim": optim}
        else:
            with torch_form(model, is_full=False):
                saved = states(model, optimizer, TorchFSDP)
                dcp.save(saved, checkpoint_id=f"{path} sharded")
            with torch_form(model, is_full=True):
                saved = states(model, optimizer, TorchFSDP)
        save_on_rank0(saved, f"{path} full")


def _ours_read(optimizer_kind: str, runs: dict[bool, dict[str, Any]], folder: str) -> None:
    configs = itertools.cycle(CONFIGS)
    for kind in TORCHS:
        scalar = kind in WITH_SCALAR
        ways = [_read_with_our_methods, _read_with_torchs_functions]
        if kind == "DDP":  # its names have a prefix, and numbers, which torch's do not take
            ways.pop()
        for form, way in itertools.product(("full", "sharded")[: 1 if scalar else 2], ways):
            config = next(configs)
            model = shard(make_model(2, scalar), config)
            optimizer = make_optimizer(optimizer_kind, model)
            way(model, optimizer, f"{folder}/{kind} {form}")
            where = f"{kind} {form} {way.__name__} {config}"
            assert_arrived(model, optimizer, runs[scalar], where)


def _read_with_our_methods(model: FSDP, optimizer: torch.optim.Optimizer, path: str) -> None:
    if Path(path).is_file():
        saved = torch.load(path, weights_only=True)
    else:
        train(model, optimizer, range(1))  # what is loaded into has to be there
        with sharded_form(model):
            saved = states(model, optimizer)
        dcp.load(saved, checkpoint_id=path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved["optim"]))


def _read_with_torchs_functions(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: str
) -> None:
    options = StateDictOptions(full_state_dict=Path(path).is_file())
    if options.full_state_dict:
        saved = torch.load(path, weights_only=True)
    else:
        state, optim = get_state_dict(model, optimizer)
        saved = {"model": state, "optim": optim}
        dcp.load(saved, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optim"],
        options=options,
    )


@pytest.mark.parametrize(("writers", "readers", "optimizer"), WORLDS)
def test_dcp_checkpoints_of_torchs_fsdp_load(
    writers: int, readers: int, optimizer: str, tmp_path: Path
) -> None:
    runs = {scalar: run_of(optimizer, scalar) for scalar in (True, False)}
    run_ranks(writers, _torch_writes, optimizer, runs, str(tmp_path))
    run_ranks(readers, _ours_read, optimizer, runs, str(tmp_path))


@on_ranks(3)
def test_sharded_values_of_torchs_fsdp_load_in_memory() -> None:
    for kind, config in itertools.product(SHARDED, CONFIGS):
        theirs = torch_model(kind, 1, scalar=False)
        with torch_form(theirs, False) if kind != "FSDP2" else contextlib.nullcontext():
            state = theirs.state_dict()
        model = shard(make_model(2, scalar=False), config)
        model.load_state_dict(state)
        assert_holds(model, make_model(1, scalar=False))


# --- from ours to torch ---------------------------------------------------------------------------


def _ours_write(optimizer_kind: str, runs: dict[bool, dict[str, Any]], folder: str) -> None:
    for config, (scalar, run) in zip((CONFIGS[0], CONFIGS[3]), runs.items(), strict=True):
        model = shard(make_model(2, scalar), config)
        optimizer = in_state(model, optimizer_kind, run)
        save_on_rank0(states(model, optimizer), f"{folder}/{scalar} full")
        with sharded_form(model):
            dcp.save(states(model, optimizer), checkpoint_id=f"{folder}/{scalar} sharded")


def _torch_reads(optimizer_kind: str, runs: dict[bool, dict[str, Any]], folder: str) -> None:
    warnings.simplefilter("ignore")  # torch warns of its own deprecated parts
    for kind, form in itertools.product((*TORCHS, "ours"), ("full", "sharded")):
        scalar = kind in WITH_SCALAR
        model = torch_model(kind, 1, scalar)
        if kind == "ours":
            model = shard(model, CONFIGS[form == "sharded"])
        optimizer = make_optimizer(optimizer_kind, model)
        is_fsdp1 = kind.startswith("FSDP1")
        read = _read_with_torchs_methods if is_fsdp1 else _read_with_torchs_functions
        read(model, optimizer, f"{folder}/{scalar} {form}")
        assert_arrived(model, optimizer, runs[scalar], f"{kind} {form}")


def _read_with_torchs_methods(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: str
) -> None:
    is_full = Path(path).is_file()
    with torch_form(model, is_full):
        if is_full:
            saved = torch.load(path, weights_only=True)
        else:
            train(model, optimizer, range(1))
            saved = states(model, optimizer, TorchFSDP)
            # Where a rank has no part of a parameter, torch takes the checkpoint for an old one,
            # and does not find its keys.
            planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
            dcp.load(saved, checkpoint_id=path, planner=planner)
        model.load_state_dict(saved["model"])
        state = TorchFSDP.optim_state_dict_to_load(model, optimizer, saved["optim"])
        optimizer.load_state_dict(state)


@pytest.mark.parametrize(("writers", "readers", "optimizer"), WORLDS)
def test_torchs_functions_and_fsdp_load_our_dcp_checkpoints(
    writers: int, readers: int, optimizer: str, tmp_path: Path
) -> None:
    runs = {scalar: run_of(optimizer, scalar) for scalar in (True, False)}
    run_ranks(writers, _ours_write, optimizer, runs, str(tmp_path))
    run_ranks(readers, _torch_reads, optimizer, runs, str(tmp_path))


@pytest.mark.parametrize("config", CONFIGS[:2])
@on_ranks(2)
def test_load_sharded_optimizer_state_dict_takes_our_model_state(
    config: Config, tmp_path: Path
) -> None:
    warnings.simplefilter("ignore")
    model = shard(make_model(), config)
    optimizer, other = make_optimizer("Adam", model), make_optimizer("Adam", model)
    train(model, optimizer, range(STEPS))
    with sharded_form(model):
        saved = states(model, optimizer)
        dcp.save(saved, checkpoint_id=tmp_path)
        loaded = load_sharded_optimizer_state_dict(
            model_state_dict=saved["model"],
            optimizer_key="optim",
            storage_reader=dcp.FileSystemReader(tmp_path),
        )
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            other.load_state_dict(FSDP.optim_state_dict_to_load(model, other, loaded["optim"]))
    package = Path(fsdp_compat.__file__).parent
    ours = [each for each in seen if package in Path(each.filename).parents]
    assert not ours, f"torch warns of its ShardedTensors at {ours[0].filename}"
    found, expected = (
        get_state_dict(model, each, options=FULL)[1]["state"] for each in (other, optimizer)
    )
    assert_same(found, expected)
