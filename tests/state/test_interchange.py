"""Files that torch writes and ours read, and the other way round: torch's FSDP1, FSDP2, DDP and
plain models, in other worlds."""

from __future__ import annotations

import contextlib
import copy
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
from torch.distributed.fsdp import FullOptimStateDictConfig as TorchFullOptimConfig
from torch.distributed.fsdp import FullStateDictConfig as TorchFullConfig
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig as TorchShardedOptimConfig
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fsdp_compat
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType
from tests.support.odd_model import (
    STEPS,
    Block,
    Config,
    Frozen,
    assert_holds,
    assert_same,
    assert_same_optim,
    make_model,
    make_optimizer,
    run_of,
    shard,
    train,
)
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
SHARDED = ("FSDP1 flat", "FSDP1 original", "FSDP2")

# Who writes in a world of so many ranks, who reads, and which optimizer.
WORLDS = sample([(3, 2, "Adam"), (1, 2, "SGD")], 0)


def torch_model(kind: str, seed: int) -> nn.Module:
    model = make_model(seed, scalar=kind in WITH_SCALAR)
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind.startswith("FSDP1"):
        policy = TorchWrapPolicy({Block, Frozen})
        original = kind == "FSDP1 original"
        return TorchFSDP(
            model, auto_wrap_policy=policy, use_orig_params=original, device_id=torch.device("cpu")
        )
    if kind == "FSDP2":
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    return model


def set_full(model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]) -> None:
    set_state_dict(
        model,
        optimizer,
        model_state_dict=copy.copy(run["model"]),
        optim_state_dict=copy.deepcopy(run["optim"]),
        options=FULL,
    )


def torch_form(model: nn.Module, kind: str) -> Any:
    """The form of torch's FSDP1, without what is wrong on CPU: offloading."""
    if kind == "full":
        configs: tuple[Any, ...] = (
            TorchType.FULL_STATE_DICT,
            TorchFullConfig(),
            TorchFullOptimConfig(offload_to_cpu=False),
        )
    else:
        configs = (
            TorchType.SHARDED_STATE_DICT,
            None,
            TorchShardedOptimConfig(offload_to_cpu=False),
        )
    return TorchFSDP.state_dict_type(model, *configs)


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
    assert train(model, optimizer, range(STEPS, STEPS + 2)) == pytest.approx(
        run["losses"], rel=1e-6
    ), where


# --- from torch to ours ---------------------------------------------------------------------------


def _torch_writes(optimizer_kind: str, runs: dict[bool, dict[str, Any]], folder: str) -> None:
    warnings.simplefilter("ignore")  # torch warns of its own deprecated parts
    for kind in (*WITH_SCALAR, *SHARDED):
        model = torch_model(kind, 1)
        optimizer = make_optimizer(optimizer_kind, model)
        set_full(model, optimizer, runs[kind in WITH_SCALAR])
        path = f"{folder}/{kind}"
        if kind in WITH_SCALAR:
            save_on_rank0(
                {"model": model.state_dict(), "optim": optimizer.state_dict()}, f"{path} full"
            )
        elif kind == "FSDP2":
            state, optim = get_state_dict(model, optimizer)
            dcp.save({"model": state, "optim": optim}, checkpoint_id=f"{path} sharded")
            state, optim = get_state_dict(model, optimizer, options=FULL)
            save_on_rank0({"model": state, "optim": optim}, f"{path} full")
        else:
            with torch_form(model, "sharded"):
                saved = {
                    "model": model.state_dict(),
                    "optim": TorchFSDP.optim_state_dict(model, optimizer),
                }
                dcp.save(saved, checkpoint_id=f"{path} sharded")
            with torch_form(model, "full"):
                saved = {
                    "model": model.state_dict(),
                    "optim": TorchFSDP.optim_state_dict(model, optimizer),
                }
                save_on_rank0(saved, f"{path} full")


def _ours_read(optimizer_kind: str, runs: dict[bool, dict[str, Any]], folder: str) -> None:
    number = 0
    for kind in (*WITH_SCALAR, *SHARDED):
        run = runs[kind in WITH_SCALAR]
        for form in ("full",) if kind in WITH_SCALAR else ("full", "sharded"):
            for way in (_read_with_our_methods, _read_with_torchs_functions):
                if way is _read_with_torchs_functions and kind == "DDP":
                    # its names have a prefix, and numbers, which those functions do not take
                    continue
                config = CONFIGS[number % 4]
                number += 1
                model = shard(make_model(2, scalar=kind in WITH_SCALAR), config)
                optimizer = make_optimizer(optimizer_kind, model)
                way(model, optimizer, f"{folder}/{kind} {form}")
                assert_arrived(model, optimizer, run, f"{kind} {form} {way.__name__} {config}")


def _read_with_our_methods(model: FSDP, optimizer: torch.optim.Optimizer, path: str) -> None:
    if Path(path).is_file():
        saved = torch.load(path, weights_only=True)
    else:
        train(model, optimizer, range(1))  # what is loaded into has to be there
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            saved = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
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
        theirs = torch_model(kind, 1)
        with torch_form(theirs, "sharded") if kind != "FSDP2" else contextlib.nullcontext():
            state = theirs.state_dict()
        model = shard(make_model(2, scalar=False), config)
        model.load_state_dict(state)
        assert_holds(model, make_model(1, scalar=False))


# --- from ours to torch ---------------------------------------------------------------------------


def _ours_write(optimizer_kind: str, runs: dict[bool, dict[str, Any]], folder: str) -> None:
    for config, (scalar, run) in zip((CONFIGS[0], CONFIGS[3]), runs.items(), strict=True):
        model = shard(make_model(2, scalar), config)
        optimizer = make_optimizer(optimizer_kind, model)
        set_full(model, optimizer, run)
        save_on_rank0(
            {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)},
            f"{folder}/{scalar} full",
        )
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            saved = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
            dcp.save(saved, checkpoint_id=f"{folder}/{scalar} sharded")


def _torch_reads(optimizer_kind: str, runs: dict[bool, dict[str, Any]], folder: str) -> None:
    warnings.simplefilter("ignore")  # torch warns of its own deprecated parts
    for kind in (*WITH_SCALAR, *SHARDED):
        scalar = kind in WITH_SCALAR
        for form in ("full", "sharded"):
            model = torch_model(kind, 1)
            optimizer = make_optimizer(optimizer_kind, model)
            path = f"{folder}/{scalar} {form}"
            if kind.startswith("FSDP1"):
                _read_with_torchs_methods(model, optimizer, path)
            else:
                _read_with_torchs_functions(model, optimizer, path)
            assert_arrived(model, optimizer, runs[scalar], f"{kind} {form}")


def _read_with_torchs_methods(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: str
) -> None:
    form = "full" if Path(path).is_file() else "sharded"
    with torch_form(model, form):
        if form == "full":
            saved = torch.load(path, weights_only=True)
        else:
            train(model, optimizer, range(1))
            saved = {
                "model": model.state_dict(),
                "optim": TorchFSDP.optim_state_dict(model, optimizer),
            }
            # Where a rank has no part of a parameter, torch takes the checkpoint for an old one,
            # and does not find its keys.
            dcp.load(
                saved, checkpoint_id=path, planner=DefaultLoadPlanner(flatten_sharded_tensors=False)
            )
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(
            TorchFSDP.optim_state_dict_to_load(model, optimizer, saved["optim"])
        )


@pytest.mark.parametrize(("writers", "readers", "optimizer"), WORLDS)
def test_torchs_fsdp_loads_our_dcp_checkpoints(
    writers: int, readers: int, optimizer: str, tmp_path: Path
) -> None:
    runs = {scalar: run_of(optimizer, scalar) for scalar in (True, False)}
    run_ranks(writers, _ours_write, optimizer, runs, str(tmp_path))
    run_ranks(readers, _torch_reads, optimizer, runs, str(tmp_path))


PACKAGE = Path(fsdp_compat.__file__).parent


@on_ranks(2)
def test_load_sharded_optimizer_state_dict_takes_our_model_state(
    tmp_path: Path,
) -> None:
    warnings.simplefilter("ignore")
    for config in CONFIGS[:2]:
        model = shard(make_model(), config)
        optimizer, other = make_optimizer("Adam", model), make_optimizer("Adam", model)
        train(model, optimizer, range(STEPS))
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state, expected = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
            dcp.save({"model": state, "optim": expected}, checkpoint_id=f"{tmp_path}/{config[1]}")
            reader = dcp.FileSystemReader(f"{tmp_path}/{config[1]}")
            loaded = load_sharded_optimizer_state_dict(
                model_state_dict=state, optimizer_key="optim", storage_reader=reader
            )
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                other.load_state_dict(FSDP.optim_state_dict_to_load(model, other, loaded["optim"]))
            ours = [each for each in seen if PACKAGE in Path(each.filename).parents]
            assert not ours, f"torch warns of its ShardedTensors at {ours[0].filename}"
        assert_same(
            get_state_dict(model, other, options=FULL)[1]["state"],
            get_state_dict(model, optimizer, options=FULL)[1]["state"],
        )
