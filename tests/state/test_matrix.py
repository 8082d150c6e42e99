"""All ways to write state x all ways to read it, of ours and of torch, on any ranks: every value
arrives bit by bit, and training goes on with the losses of the unsharded run."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig as TorchShardedOptimConfig
from torch.distributed.fsdp import StateDictType as TorchType

import fsdp_compat
from fsdp_compat import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    checkpoint,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.cases import about
from tests.support.odd_model import (
    STEPS,
    TORCHS,
    Config,
    assert_holds,
    assert_identical,
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
from tests.support.optimizer_state import (
    FULL,
    SHARDED,
    TORCHS_FULL,
    loadable,
    older,
    sharded_state,
)
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import sample

State = dict[str, Any]
CONFIGS: dict[str, Config] = {
    "flat": ("FULL_SHARD", False, "blocks"),
    "original": ("FULL_SHARD", True, "always"),
    "kept": ("SHARD_GRAD_OP", True, "none"),
    "replicated": ("NO_SHARD", False, "blocks"),
    "mesh": ("MESH", True, "blocks"),
    "hybrid": ("HYBRID_SHARD", False, "always"),
    "groups": ("GROUPS", True, "blocks"),
    "rows": ("ROWS", True, "blocks"),
    "mixed": ("MIXED", False, "blocks"),
}
FLAT, ENDS = list(CONFIGS)[:7], list(CONFIGS)
IN_PLACE = ["rows", "mixed"]  # fully_shard: values in all state dicts are DTensors
WITH_SCALAR = ("plain", "DDP")  # torch's FSDP takes no 0-d parameters
runs = functools.cache(run_of)

WORLDS = [(1, 2), (2, 3), (3, 1), (4, 2), (2, 4), (3, 3)]


# -- writers


def by_methods(model: Any, optimizer: Any, form: Any = FULL, configs: Any = (None, None)) -> State:
    with FSDP.state_dict_type(model, form, *configs):
        return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


def by_functions(model: Any, optimizer: Any, **options: Any) -> State:
    state, optim = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": state, "optim": optim}


def by_older(model: Any, optimizer: Any, form: Any = FULL) -> State:
    name = "full_optim_state_dict" if form is FULL else "sharded_optim_state_dict"
    with FSDP.state_dict_type(model, form):
        return {"model": model.state_dict(), "optim": older(name, model, optimizer)}


def by_torchs_methods(model: Any, optimizer: Any, form: Any) -> State:
    with torch_form(model, form):
        optim = TorchFSDP.optim_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optim": optim}


def torch_form(model: Any, form: Any) -> Any:
    """The form of torch's FSDP1, without what is wrong on CPU: offloading."""
    config = None, TorchShardedOptimConfig(offload_to_cpu=False)
    settings = TORCHS_FULL if form is FULL else (TorchType.SHARDED_STATE_DICT, *config)
    return TorchFSDP.state_dict_type(model, *settings)


on_rank0 = FullStateDictConfig(True, True), FullOptimStateDictConfig(True, True)
offloaded = ShardedStateDictConfig(True), ShardedOptimStateDictConfig(True)
WHOLE: dict[str, Callable[..., State]] = {
    "full": by_methods,
    "rank 0": functools.partial(by_methods, configs=on_rank0),
    "functions": functools.partial(by_functions, full_state_dict=True),
    "functions, rank 0": functools.partial(by_functions, full_state_dict=True, cpu_offload=True),
    "older": by_older,
}
IN_PARTS: dict[str, Callable[..., State]] = {
    "sharded": functools.partial(by_methods, form=SHARDED),
    "sharded, offloaded": functools.partial(by_methods, form=SHARDED, configs=offloaded),
    "functions in parts": by_functions,
    "older in parts": functools.partial(by_older, form=SHARDED),
}
FLATTENED = functools.partial(by_functions, flatten_optimizer_state_dict=True)
OTHERS: dict[str, Callable[..., State]] = {
    "flattened": FLATTENED,
    "flattened whole": functools.partial(FLATTENED, full_state_dict=True),
    "torch full": functools.partial(by_torchs_methods, form=FULL),
    "torch in parts": functools.partial(by_torchs_methods, form=SHARDED),
    "own": lambda model, optimizer: {"model": model.state_dict(), "optim": optimizer.state_dict()},
}
WRITERS = {**WHOLE, **IN_PARTS, **OTHERS}


def model_as(kind: str, seed: int, odd: bool) -> Any:
    """kind: a key of CONFIGS, or one of TORCHS."""
    if kind in TORCHS:
        return torch_model(kind, seed, odd)
    return shard(make_model(seed, odd), CONFIGS[kind])


def _write(front_end: str, how: str, run: State, kind: str, odd: bool, path: str) -> None:
    warnings.simplefilter("ignore")  # torch warns of its own deprecated parts
    model = model_as(front_end, 1, odd)
    optimizer = in_state(model, kind, run)
    if how == "native":
        checkpoint.save(path, model, optimizer, step=STEPS)
        return
    state = WRITERS[how](model, optimizer)
    if how in IN_PARTS or "part" in how or how == "flattened":
        dcp.save(state, checkpoint_id=path)
    elif dist.get_rank() == 0:
        if front_end not in WITH_SCALAR:
            assert list(state["model"]) == list(run["model"])
        torch.save(state, path)
    dist.barrier()


# -- readers


def template_of(model: Any, optimizer: Any, path: str, states: Callable[..., State]) -> State:
    """What was saved: whole values of every rank, or those of a dict that dcp fills."""
    if Path(path).is_file():
        return torch.load(path, weights_only=True)
    found = states(model, optimizer)
    dcp.load(found, checkpoint_id=path)
    return found


def with_methods(model: Any, optimizer: Any, path: str) -> None:
    state = template_of(model, optimizer, path, IN_PARTS["sharded"])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(loadable(model, optimizer, state["optim"]))


def from_rank0(model: Any, optimizer: Any, path: str) -> None:
    first = dist.get_rank() == 0
    state = torch.load(path) if first else {"model": {}, "optim": None}
    with FSDP.state_dict_type(model, FULL, *on_rank0):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(loadable(model, optimizer, state["optim"]))


def with_functions(model: Any, optimizer: Any, path: str, **options: Any) -> None:
    options.setdefault("full_state_dict", Path(path).is_file())
    state = template_of(model, optimizer, path, functools.partial(by_functions, **options))
    if options.get("broadcast_from_rank0") and dist.get_rank():
        state = {"model": {}, "optim": {}}
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(**options),
    )


def with_older(model: Any, optimizer: Any, path: str, name: str) -> None:
    state = template_of(model, optimizer, path, IN_PARTS["sharded"])
    model.load_state_dict(state["model"])
    alone = None if "scatter" in name and dist.get_rank() else state["optim"]
    optimizer.load_state_dict(older(name, alone, model, optim=optimizer))


def with_load(model: Any, optimizer: Any, path: str) -> None:
    native = checkpoint.latest(path) if Path(path, "step-00000002").is_dir() else None
    checkpoint.load(native or path, model, optimizer)


def with_torchs_methods(model: Any, optimizer: Any, path: str) -> None:
    is_full = Path(path).is_file()
    with torch_form(model, FULL if is_full else SHARDED):
        if is_full:
            saved = torch.load(path, weights_only=True)
        else:
            train(model, optimizer, range(1))
            saved = {"model": model.state_dict()}
            saved["optim"] = TorchFSDP.optim_state_dict(model, optimizer)
            # Where a rank has no part of a parameter, torch takes the checkpoint for an old one,
            # and does not find its keys.
            planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
            dcp.load(saved, checkpoint_id=path, planner=planner)
        model.load_state_dict(saved["model"])
        state = TorchFSDP.optim_state_dict_to_load(model, optimizer, saved["optim"])
        optimizer.load_state_dict(state)


READERS: dict[str, Callable[..., None]] = {
    "methods": with_methods,
    "functions": with_functions,
    "load": with_load,
    "rank 0": from_rank0,
    "broadcast": functools.partial(with_functions, broadcast_from_rank0=True),
    "shard": functools.partial(with_older, name="shard_full_optim_state_dict"),
    "scatter": functools.partial(with_older, name="scatter_full_optim_state_dict"),
    "flatten": functools.partial(with_older, name="flatten_sharded_optim_state_dict"),
    "flattened": functools.partial(with_functions, flatten_optimizer_state_dict=True),
    "torch's methods": with_torchs_methods,
}
OF_WHOLE, OF_PARTS = list(READERS)[:7], ["methods", "functions", "load", "flatten"]
OF_TORCH = OF_PARTS[:3]


def _read(targets: list[Any], run: State, kind: str, odd: bool, path: str) -> None:
    warnings.simplefilter("ignore")
    for front_end, how in targets:
        with about((front_end, how)):
            model = model_as(front_end, 2, odd)
            optimizer = make_optimizer(kind, model)
            READERS[how](model, optimizer, path)
            found = by_functions(model, optimizer, full_state_dict=True)
            assert_same(found["model"], run["model"])
            assert_same_optim(found["optim"], run["optim"])
            losses = train(model, optimizer, range(STEPS, STEPS + 2))
            assert losses == pytest.approx(run["losses"], rel=1e-6)


ROUTES = {
    "full": OF_WHOLE,
    "rank 0": ["load", "rank 0"],
    "functions": ["functions", "methods"],
    "functions, rank 0": ["broadcast", "load"],
    "older": ["shard", "scatter"],
    "sharded": OF_PARTS,
    "sharded, offloaded": ["methods", "flatten"],
    "functions in parts": ["functions", "load"],
    "older in parts": ["flatten", "functions"],
    "flattened": ["flattened"],
    "flattened whole": ["flattened"],
    "native": ["load"],
}
FROM_TORCH = {
    ("plain", "own"): OF_WHOLE,
    ("DDP", "own"): ["methods", "rank 0"],  # names with a prefix, and numbers
    ("FSDP1 flat", "torch in parts"): OF_TORCH,
    ("FSDP1 original", "torch full"): OF_TORCH,
    ("FSDP2", "functions"): OF_TORCH,
    ("FSDP2", "functions in parts"): OF_TORCH,
}


def moves(
    source: tuple[str, str], targets: list[tuple[str, str]], number: int, path: Path, odd: bool
) -> None:
    """source, targets: a front end, and how it writes or reads. number: of the case, on which
    worlds and the optimizer depend."""
    kind = ("Adam", "SGD")[number % 2]
    run, where = runs(kind, odd), str(path / "state")
    writers, readers = WORLDS[number % len(WORLDS)]
    run_ranks(writers, _write, *source, run, kind, odd, where)
    run_ranks(readers, _read, targets, run, kind, odd, where)


def turning(ways: Sequence[str], ends: Sequence[str], start: int) -> list[tuple[str, str]]:
    """Front ends for these ways, in turns."""
    return [(ends[(start + index) % len(ends)], way) for index, way in enumerate(ways)]


@pytest.mark.parametrize("how", ROUTES)
def test_every_form_is_read_in_every_way(how: str, tmp_path: Path) -> None:
    for number in sample(range(len(FLAT)), list(ROUTES).index(how) % len(FLAT)):
        (tmp_path / str(number)).mkdir()
        targets = turning(ROUTES[how], FLAT, 3 * number + 1)
        moves((FLAT[number], how), targets, number, tmp_path / str(number), odd=True)


@pytest.mark.parametrize("how", ROUTES)
def test_states_move_between_the_front_ends(how: str, tmp_path: Path) -> None:
    number = list(ROUTES).index(how)
    targets = turning(ROUTES[how], ["rows", "mixed", "original"], number)
    moves((IN_PLACE[number % 2], how), targets, number, tmp_path, odd=True)


@pytest.mark.parametrize("source", FROM_TORCH, ids=" ".join)
def test_what_torch_writes_is_read(source: tuple[str, str], tmp_path: Path) -> None:
    number = list(FROM_TORCH).index(source)
    targets = turning(FROM_TORCH[source], FLAT, number)
    if source[0] != "DDP":
        targets.append(("rows", "load"))
    moves(source, targets, number, tmp_path, odd=source[0] in WITH_SCALAR)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("how", ["full", "sharded"])
def test_torch_reads_what_is_written(how: str, odd: bool, tmp_path: Path) -> None:
    kinds = TORCHS[:2] if odd else TORCHS[2:]
    targets = [(kind, "torch's methods" if "FSDP1" in kind else "functions") for kind in kinds]
    moves(("mesh" if odd else "flat", how), targets, 1 + odd, tmp_path, odd)


# -- without files


@on_ranks(3)
def test_sharded_values_load_into_other_layouts_in_memory() -> None:
    for number, source in enumerate((*ENDS, *TORCHS[2:])):
        theirs = model_as(source, 1, odd=False)
        with (
            torch_form(theirs, SHARDED)
            if "FSDP1" in source
            else FSDP.state_dict_type(theirs, SHARDED)
            if source in FLAT
            else contextlib.nullcontext()
        ):
            state = theirs.state_dict()
        target = ENDS[(number + 4) % 8]  # of "mixed" some parameters are plain
        with about((source, target)):
            model = model_as(target, 2, odd=False)
            model.load_state_dict(state)
            assert_holds(model, make_model(1, odd=False))


def test_one_process_reads_sharded_checkpoints_without_a_group(tmp_path: Path) -> None:
    run = runs("Adam")
    run_ranks(3, _write, "flat", "sharded", run, "Adam", True, f"{tmp_path}/state")
    state = {"model": make_model(9).state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "state", no_dist=True)
    assert_identical(state["model"], run["model"])


@on_ranks(2)
def test_load_sharded_optimizer_state_dict_takes_our_model_state(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    model, run = model_as("flat", 0, False), run_of("Adam", odd=False)
    optimizer, other = in_state(model, "Adam", run), make_optimizer("Adam", model)
    with FSDP.state_dict_type(model, SHARDED):
        saved = {"model": model.state_dict(), "optim": sharded_state(model, optimizer)}
        dcp.save(saved, checkpoint_id=tmp_path)
        loaded = load_sharded_optimizer_state_dict(
            model_state_dict=saved["model"],
            optimizer_key="optim",
            storage_reader=dcp.FileSystemReader(tmp_path),
        )
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            other.load_state_dict(loadable(model, other, loaded["optim"]))
    package = Path(fsdp_compat.__file__).parent
    ours = [each for each in seen if package in Path(each.filename).parents]
    assert not ours, f"torch warns of its ShardedTensors at {ours[0].filename}"
    found = by_functions(model, other, full_state_dict=True)["optim"]
    assert_same(found["state"], run["optim"]["state"])
