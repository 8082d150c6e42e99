"""torch.distributed.checkpoint.state_dict's functions on our models: the unsharded model's values,
for every option."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import state_dict as torch_functions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._torch_patches import dcp_adapter
from fsdp_compat.errors import CheckpointError, UsageError
from tests.support.odd_model import (
    STEPS,
    Block,
    Config,
    Frozen,
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

CONFIGS: tuple[Config, ...] = (
    ("FULL_SHARD", False, "blocks"),
    ("FULL_SHARD", True, "always"),
    ("NO_SHARD", True, "blocks"),
    ("HYBRID_SHARD", False, "always"),
)
FULL = StateDictOptions(full_state_dict=True)
FROZEN = {"frozen.weight", "frozen.bias"}
TIED = "head.weight"  # a parameter is missing once


def in_state(
    kind: str, config: Config, run: Mapping[str, Any]
) -> tuple[FSDP, torch.optim.Optimizer]:
    """One of our models, with its optimizer, in the state of an unsharded run."""
    model = shard(make_model(99, scalar=run["model"]["gain"].dim() == 0), config)
    optimizer = make_optimizer(kind, model)
    answer = set_state_dict(
        model,
        optimizer,
        model_state_dict=copy.copy(run["model"]),
        optim_state_dict=copy.copy(run["optim"]),
        options=FULL,
    )
    assert str(answer) == "<All keys matched successfully>"
    return model, optimizer


# --- values ---------------------------------------------------------------------------------------


def _part_of_the_model(model: FSDP, expected: Mapping[str, Tensor]) -> None:
    below = {
        name.removeprefix("blocks.1."): value
        for name, value in expected.items()
        if name.startswith("blocks.1.")
    }
    for block in (model.blocks[1], getattr(model.blocks[1], "module", model.blocks[1])):
        with pytest.warns(FutureWarning, match="submodules is deprecated") as caught:
            state = get_model_state_dict(model, submodules={block}, options=FULL)
            bare = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=False)
            without = get_model_state_dict(model, submodules={block}, options=bare)
        assert {warning.filename for warning in caught if warning.category is FutureWarning} == {
            __file__
        }
        assert_same(state, {f"blocks.1.{name}": value for name, value in below.items()})
        assert_same(without, below)
        loaded = set_model_state_dict(
            model, {block: without}, options=StateDictOptions(full_state_dict=True, strict=False)
        )
        assert "blocks.0.up.weight" in loaded.missing_keys
        assert not loaded.unexpected_keys
        assert not any(name.startswith("blocks.1.") for name in loaded.missing_keys)


def _flattened(optim: Mapping[str, Any]) -> dict[str, Any]:
    state = {
        f"state.{name}.{key}": value
        for name, entry in optim["state"].items()
        for key, value in entry.items()
    }
    groups = {
        f"param_groups.{name}.{key}": value
        for group in optim["param_groups"]
        for name in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return {**state, **groups}


@pytest.mark.parametrize(
    ("world_size", "kind", "configs"),
    [
        *sample([(1, "Adam", CONFIGS[:1]), (2, "Adam", CONFIGS[2:]), (3, "Adam", CONFIGS[:2])], 2),
        (2, "SGD", CONFIGS[1:2]),
    ],
)
@on_ranks("world_size")
def test_every_option_gives_the_unsharded_models_values(
    world_size: int, kind: str, configs: tuple[Config, ...]
) -> None:
    run = run_of(kind)
    for config in configs:
        model, optimizer = in_state(kind, config, run)
        rank = dist.get_rank()
        # whole, on all ranks or on the first
        state, optim = get_state_dict(model, optimizer, options=FULL)
        assert all(type(value) is Tensor for value in state.values())
        assert list(state) == list(run["model"])
        assert_same(state, run["model"])
        assert_same_optim(optim, run["optim"])
        on_rank0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state, optim = get_state_dict(model, optimizer, options=on_rank0)
        if rank:
            assert (state, optim) == ({}, {})
        else:
            assert_same(state, run["model"])
            assert_same_optim(optim, run["optim"])
        # sharded
        for options in (None, StateDictOptions(cpu_offload=True)):
            state, optim = (
                get_model_state_dict(model, options=options),
                get_optimizer_state_dict(model, optimizer, options=options),
            )
            if config[0] == "FULL_SHARD":
                assert isinstance(state["cube"], ShardedTensor) is (dist.get_world_size() > 1)
            assert_same(state, run["model"])
            assert_same_optim(optim, run["optim"])
        # parts of it
        state, _ = get_state_dict(
            model,
            optimizer,
            options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True),
        )
        assert set(run["model"]) - set(state) == FROZEN
        state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        assert set(run["model"]) - set(state) == FROZEN
        _part_of_the_model(model, run["model"])
        # one flat dict
        flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
        _, optim = get_state_dict(model, optimizer, options=flat)
        assert_same(optim, _flattened(run["optim"]))
        sharded = StateDictOptions(flatten_optimizer_state_dict=True)
        optim = get_optimizer_state_dict(model, optimizer, options=sharded)
        assert_same(optim, _flattened(run["optim"]))
        again = make_optimizer(kind, model)
        set_optimizer_state_dict(model, again, optim, options=sharded)
        assert_same_optim(get_optimizer_state_dict(model, again, options=FULL), run["optim"])
        # and on
        assert train(model, again, range(STEPS, STEPS + 2)) == pytest.approx(
            run["losses"], rel=1e-6
        )


# --- from rank 0, strictness, several optimizers --------------------------------------------------


@pytest.mark.parametrize("world_size", sample([1, 2], 1))
@on_ranks("world_size")
def test_a_dict_on_rank_0_alone_loads_on_all_ranks(world_size: int) -> None:
    run = run_of("Adam")
    for config in CONFIGS[: dist.get_world_size()]:
        model = shard(make_model(99), config)
        optimizer = make_optimizer("Adam", model)
        for options in (
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
            StateDictOptions(full_state_dict=True, cpu_offload=True),
        ):
            first = dist.get_rank() == 0
            for entry in optimizer.state.values():
                entry["exp_avg"].fill_(7.0)
            answer = set_state_dict(
                model,
                optimizer,
                model_state_dict=run["model"] if first else {},
                optim_state_dict=run["optim"] if first else {},
                options=options,
            )
            assert str(answer) == "<All keys matched successfully>"
            state, optim = get_state_dict(model, optimizer, options=FULL)
            assert_same(state, run["model"])
            assert_same_optim(optim, run["optim"])
            set_model_state_dict(
                model, make_model(5).state_dict() if first else {}, options=options
            )
            assert_same(get_model_state_dict(model, options=FULL), make_model(5).state_dict())
        assert train(in_state("Adam", config, run)[0], optimizer, range(0)) == []


@on_ranks(2)
def test_strict_reports_missing_entries_and_without_it_the_rest_loads() -> None:
    run = run_of("Adam")
    for config in CONFIGS[:2]:
        model, optimizer = in_state("Adam", config, run)
        lax = StateDictOptions(full_state_dict=True, strict=False)
        part = {
            name: value + 1 for name, value in run["model"].items() if name.startswith("blocks.")
        }
        given = dict(part)
        with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
            set_model_state_dict(model, part, options=FULL)
        assert_same(get_model_state_dict(model, options=FULL), run["model"], "nothing has changed")
        answer = set_model_state_dict(model, {**part, "other": torch.ones(1)}, options=lax)
        assert (set(answer.missing_keys), answer.unexpected_keys) == (
            set(run["model"]) - set(part) - {TIED},
            ["other"],
        )
        assert_same(get_model_state_dict(model, options=FULL), {**run["model"], **part})
        assert_same(part, given, "what was passed is as it was")

        groups = run["optim"]["param_groups"]
        half = {
            "state": {n: e for n, e in run["optim"]["state"].items() if n.startswith("blocks.")},
            "param_groups": groups,
        }
        with pytest.raises(CheckpointError, match="no state for some of the parameters"):
            set_optimizer_state_dict(model, optimizer, half, options=FULL)
        assert_same_optim(
            get_optimizer_state_dict(model, optimizer, options=FULL),
            run["optim"],
            "nothing has changed",
        )
        again = make_optimizer("Adam", model)
        set_optimizer_state_dict(model, again, half, options=lax)
        found = get_optimizer_state_dict(model, again, options=FULL)
        assert_same(found["state"]["blocks.0.up.weight"], half["state"]["blocks.0.up.weight"])

        other_name = {
            TIED if name == "embed.weight" else name: entry
            for name, entry in run["optim"]["state"].items()
        }
        tied = make_optimizer("Adam", model)
        set_optimizer_state_dict(
            model, tied, {"state": other_name, "param_groups": groups}, options=FULL
        )
        assert_same_optim(
            get_optimizer_state_dict(model, tied, options=FULL),
            run["optim"],
            "under another name of a tie",
        )

        with pytest.raises(CheckpointError, match="is empty"):
            set_model_state_dict(model, {})
        with pytest.raises(CheckpointError, match="is empty"):
            set_optimizer_state_dict(model, optimizer, {})
        if dist.get_rank() == 0:
            from_rank0 = {"model_state_dict": run["model"], "optim_state_dict": half}
        else:
            from_rank0 = {"model_state_dict": {}, "optim_state_dict": {}}
        with pytest.raises(
            CheckpointError, match="no state for some of the parameters"
        ):  # on all ranks
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_state_dict(model, optimizer, **from_rank0, options=options)
        with pytest.raises(ValueError, match="full_state_dict=True with broadcast_from_rank0=True"):
            get_model_state_dict(model, options=StateDictOptions(broadcast_from_rank0=True))
        with pytest.raises(RuntimeError, match="no optimizer"):
            get_optimizer_state_dict(model, ())
        with pytest.raises(UsageError, match="optimizers has the wrong type"):
            get_optimizer_state_dict(model, [model])  # type: ignore[list-item]
        for entry in optimizer.state.values():
            entry["kind"] = "a word"
        with pytest.raises(NotImplementedError, match="cannot be flattened"):
            get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
            )


@on_ranks(2)
def test_several_optimizers_share_one_dict() -> None:
    run = run_of("Adam")
    for config in CONFIGS[:2]:
        model = shard(make_model(99), config)
        both = make_optimizer("Adam", model).param_groups
        first, second = (
            torch.optim.Adam(group["params"], lr=group["lr"], weight_decay=group["weight_decay"])
            for group in both
        )
        set_state_dict(
            model,
            [first, second],
            model_state_dict=run["model"],
            optim_state_dict=run["optim"],
            options=FULL,
        )
        for options in (FULL, None):
            assert_same_optim(
                get_state_dict(model, (first, second), options=options)[1], run["optim"]
            )
        assert {
            name.partition(".")[0] for name in get_optimizer_state_dict(model, first)["state"]
        } == {"blocks"}
        one = get_optimizer_state_dict(model, [first, second])
        for optimizer in (first, second):
            optimizer.state.clear()
        set_optimizer_state_dict(model, [first, second], one)
        assert_same_optim(get_state_dict(model, (first, second), options=FULL)[1], run["optim"])


def zeros(model: nn.Module) -> dict[str, Tensor]:
    """The model's full state dict, all zeros. Collective."""
    return {
        name: torch.zeros_like(value)
        for name, value in get_model_state_dict(model, options=FULL).items()
    }


@on_ranks(2)
def test_names_are_those_of_the_unwrapped_model() -> None:
    """Compiled, recomputed, and below something that is not wrapped; parameters beside that nobody
    shards."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    run = run_of("Adam")
    plain = make_model(99)
    plain.blocks[0] = torch.compile(plain.blocks[0], backend="eager")
    plain.blocks[1] = checkpoint_wrapper(plain.blocks[1])
    for config in (("FULL_SHARD", False, "blocks"), ("FULL_SHARD", True, "blocks")):
        inner = shard(copy.deepcopy(plain), config)
        assert any("_orig_mod" in name for name in inner.state_dict())
        model = nn.ModuleDict(
            {
                "inner": torch.compile(inner, backend="eager"),
                "beside": DistributedDataParallel(nn.Linear(2, 3)),
            }
        )
        optimizer = make_optimizer("Adam", model)
        beside = {
            f"beside.{name}": torch.full_like(value, 2.0)
            for name, value in model["beside"].module.state_dict().items()
        }
        state = {**{f"inner.{name}": value for name, value in run["model"].items()}, **beside}
        optim = {
            "state": {f"inner.{name}": entry for name, entry in run["optim"]["state"].items()},
            "param_groups": [
                {**group, "params": [f"inner.{name}" for name in group["params"]]}
                for group in run["optim"]["param_groups"]
            ],
        }
        entry = next(iter(optim["state"].values()))
        for name, value in beside.items():
            optim["state"][name] = {
                "step": entry["step"].clone(),
                "exp_avg": value + 1,
                "exp_avg_sq": value + 2,
            }
        optim["param_groups"][1]["params"] += list(beside)
        set_state_dict(
            model, optimizer, model_state_dict=state, optim_state_dict=optim, options=FULL
        )
        for options in (FULL, None):
            found, found_optim = get_state_dict(model, optimizer, options=options)
            assert_same(found, state)
            assert_same_optim(found_optim, optim)
        set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=found_optim)
        on_rank0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found, found_optim = copy.deepcopy(get_state_dict(model, optimizer, options=on_rank0))
        assert bool(found) is bool(found_optim) is (dist.get_rank() == 0)
        set_model_state_dict(model, zeros(model), options=FULL)
        answer = set_state_dict(
            model, optimizer, model_state_dict=found, optim_state_dict=found_optim, options=on_rank0
        )
        assert str(answer) == "<All keys matched successfully>"
        found, found_optim = get_state_dict(model, optimizer, options=FULL)
        assert_same(found, state)
        assert_same_optim(found_optim, optim)
        compiled = torch.compile(inner, backend="eager")
        assert_same(get_model_state_dict(compiled), run["model"])
        set_model_state_dict(compiled, make_model(3).state_dict(), options=FULL)
        assert_same(get_model_state_dict(inner, options=FULL), make_model(3).state_dict())


class Factored(torch.optim.SGD):
    """Keeps, beside momentum, something of a shape that is not the parameter's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["scales"] = torch.full((3, 2), float(dist.get_rank()))


@on_ranks(2)
def test_rank_local_state_returns_to_its_rank(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # ours says what cannot be resharded
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for number, (config, options) in enumerate(itertools.product(CONFIGS[:2], (None, FULL, flat))):
        model = shard(make_model(), config)
        optimizer = Factored(model.parameters(), lr=0.01, momentum=0.9)
        train(model, optimizer, range(1))
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        again = Factored(model.parameters(), lr=0.01, momentum=0.9)
        if options is not FULL:
            dcp.save(saved, checkpoint_id=f"{tmp_path}/{number}")
            saved = get_optimizer_state_dict(model, again, options=options)
            dcp.load(saved, checkpoint_id=f"{tmp_path}/{number}")
        set_optimizer_state_dict(model, again, saved, options=options)
        for p in (p for p in optimizer.state if p.numel()):
            one, other = optimizer.state[p], again.state[p]
            assert_same(other, one, f"{config} {options}")
            assert other["scales"].unique().tolist() == [dist.get_rank()]


# --- files, and the first step --------------------------------------------------------------------


class App(Stateful):
    """As torch's tutorial writes it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        state, optim = get_state_dict(self.model, self.optimizer)
        return {"model": state, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def _save(kind: str, config: Config, run: dict[str, Any], path: str) -> None:
    dcp.save({"app": App(*in_state(kind, config, run))}, checkpoint_id=path)


def _load(kind: str, configs: tuple[Config, ...], run: dict[str, Any], path: str) -> None:
    for config in configs:
        model = shard(make_model(98), config)
        optimizer = make_optimizer(kind, model)
        dcp.load({"app": App(model, optimizer)}, checkpoint_id=path)
        state, optim = get_state_dict(model, optimizer, options=FULL)
        assert_same(state, run["model"])
        assert_same_optim(optim, run["optim"])
        assert train(model, optimizer, range(STEPS, STEPS + 2)) == pytest.approx(
            run["losses"], rel=1e-6
        )


@pytest.mark.parametrize(
    ("writers", "readers", "kind"), sample([(1, 2, "Adam"), (2, 3, "SGD"), (3, 1, "Adam")], 1)
)
def test_stateful_objects_reshard_through_files(
    writers: int, readers: int, kind: str, tmp_path: Path
) -> None:
    run = run_of(kind)
    run_ranks(writers, _save, kind, CONFIGS[(writers + readers) % 4], run, str(tmp_path))
    configs = CONFIGS[writers % 2 :: 2]
    run_ranks(readers, _load, kind, configs, run, str(tmp_path))


@on_ranks(2)
def test_taking_the_state_of_an_optimizer_without_state_changes_nothing() -> None:
    for kind, config in zip(("Adam", "SGD"), CONFIGS[:2], strict=True):
        left_alone, asked = shard(make_model(), config), shard(make_model(), config)
        one, other = make_optimizer(kind, left_alone), make_optimizer(kind, asked)
        settings = copy.deepcopy(
            [{k: v for k, v in group.items() if k != "params"} for group in other.param_groups]
        )
        empty = get_optimizer_state_dict(asked, other, options=FULL)
        assert settings == [
            {k: v for k, v in group.items() if k != "params"} for group in other.param_groups
        ]
        assert not other.state
        assert all(p.grad is None for p in asked.parameters())
        asked(torch.arange(3)).sum().backward()
        grads = [p.grad for p in asked.parameters()]
        assert_same_optim(
            get_optimizer_state_dict(asked, other, options=FULL), empty, "with gradients that wait"
        )
        assert all(p.grad is grad for p, grad in zip(asked.parameters(), grads, strict=True))
        set_model_state_dict(asked, make_model().state_dict(), options=FULL)
        for key in {"Adam": ("step", "exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}[kind]:
            assert all(not entry[key].any() for entry in empty["state"].values())
        assert set(empty["state"]) == set(run_of(kind)["optim"]["state"])
        assert train(asked, other, range(2)) == train(left_alone, one, range(2))
        third = make_optimizer(kind, asked)
        set_model_state_dict(asked, make_model().state_dict(), options=FULL)
        set_optimizer_state_dict(asked, third, empty, options=FULL)
        assert train(asked, third, range(1)) == train(
            shard(make_model(), config), make_optimizer(kind, left_alone), range(1)
        )


# --- beside torch's own ---------------------------------------------------------------------------


@on_ranks(2)
def test_torchs_models_use_torchs_own_functions() -> None:
    run = run_of("Adam", scalar=False)
    ours, its_optimizer = in_state("Adam", CONFIGS[0], run)
    policy = TorchWrapPolicy({Block, Frozen})
    fsdp2 = make_model(scalar=False)
    for block in fsdp2.blocks:
        fully_shard(block)
    models: dict[str, nn.Module] = {
        "plain": make_model(scalar=False),
        "DDP": DistributedDataParallel(make_model(scalar=False)),
        "FSDP1": TorchFSDP(
            make_model(scalar=False), auto_wrap_policy=policy, device_id=torch.device("cpu")
        ),
        "FSDP1, original parameters": TorchFSDP(
            make_model(scalar=False),
            auto_wrap_policy=policy,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        ),
        "FSDP2": fully_shard(fsdp2),
    }
    for name, model in models.items():
        optimizer = make_optimizer("Adam", model)
        answer = set_state_dict(
            model,
            optimizer,
            model_state_dict=copy.copy(run["model"]),
            optim_state_dict=copy.deepcopy(run["optim"]),
            options=FULL,
        )
        assert not answer.missing_keys, name
        for options in (FULL, None):
            state, optim = get_state_dict(model, optimizer, options=options)
            assert_same(state, run["model"], name)
            assert_same(optim["state"], run["optim"]["state"], name)
        fresh = make_optimizer("Adam", model)
        assert all(
            entry["step"] == 1 for entry in get_optimizer_state_dict(model, fresh)["state"].values()
        ), "torch's own way"
    state, optim = get_state_dict(ours, its_optimizer, options=FULL)
    assert_same_optim(optim, run["optim"])


# --- how they are reached -------------------------------------------------------------------------

IMPORTS = """
from torch.distributed.checkpoint import state_dict as module
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
"""
TRAINS = """
import torch.distributed as dist
from fsdp_compat import FullyShardedDataParallel as FSDP
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = FSDP(nn.Linear(2, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""
CALLS = """
assert set(get_model_state_dict(model)) == {"weight", "bias"}
state = get_optimizer_state_dict(model, optimizer)["state"]
assert set(state) == {"weight", "bias"}, state
assert state["weight"]["momentum_buffer"].shape == (3, 2)
print("right", flush=True)
"""
BOTH_ORDERS = f"""
import gc, os, sys
import torch
import torch._dynamo, torch.distributed.checkpoint  # both take long
from torch import nn
assert "torch.distributed.checkpoint.state_dict" not in sys.modules
assert "fsdp_compat" not in sys.modules
gc.freeze()  # or the end of each process takes long
child = os.fork()
exec({IMPORTS + TRAINS + CALLS!r} if child else {TRAINS + IMPORTS + CALLS!r})
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""


def test_the_order_of_imports_does_not_matter() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BOTH_ORDERS], capture_output=True, text=True, timeout=200
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["right", "right"]), ended.stderr


NAME = "torch.distributed.checkpoint.state_dict"


def test_a_module_imported_later_or_again_is_patched_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(3):
        dcp_adapter.patches.patch()
    assert sys.meta_path.count(dcp_adapter.patches) == 1
    before = sys.modules[NAME]
    loader = type(before.__loader__)
    monkeypatch.delitem(sys.modules, NAME)
    monkeypatch.setattr(sys.modules["torch.distributed.checkpoint"], "state_dict", before)
    again = importlib.import_module(NAME)
    assert again is not before
    for module in (before, again, importlib.reload(again)):
        assert module.__spec__ is not None
        assert type(module.__loader__) is type(module.__spec__.loader) is loader
        for name in dcp_adapter.FUNCTIONS:
            function = getattr(module, name)
            assert (function.__name__, function.__module__) == (name, NAME)
            assert next(iter(inspect.signature(function).parameters)) == "model"
            assert function.__doc__
            assert "_fsdp_compat_route" in function.__kwdefaults__
        others = [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
        routed = [
            function.__name__
            for function in others
            if "_fsdp_compat_route" in (function.__kwdefaults__ or {})
        ]
        assert sorted(routed) == sorted(dcp_adapter.FUNCTIONS)


def test_other_models_get_torchs_results_and_errors() -> None:
    model = nn.Linear(2, 3)
    dcp_adapter.patches.patch()
    assert_same(get_model_state_dict(model), model.state_dict())
    assert get_model_state_dict(model=model).keys() == model.state_dict().keys()
    for wrong in (
        get_model_state_dict,
        functools.partial(get_state_dict, model),
        functools.partial(set_state_dict, no=1),
    ):
        with pytest.raises(
            TypeError, match=r"get_model_state_dict\(\)|get_state_dict\(\)|set_state_dict\(\)"
        ):
            wrong()  # type: ignore[operator]


@dataclasses.dataclass
class LaterOptions(StateDictOptions):
    """What a later torch may have."""

    compressed: bool = False


@on_ranks(1)
def test_arguments_of_a_later_torch_are_refused_by_name() -> None:
    model = FSDP(nn.Linear(2, 3))
    assert get_model_state_dict(model, options=LaterOptions(full_state_dict=True)).keys() == {
        "weight",
        "bias",
    }
    with pytest.raises(
        UsageError, match=rf"torch {torch.__version__}".replace("+", r"\+")
    ) as caught:
        get_model_state_dict(model, options=LaterOptions(full_state_dict=True, compressed=True))
    assert "fsdp_compat" in str(caught.value)
    assert "options.compressed" in str(caught.value)
    with pytest.raises(UsageError, match="options has the wrong type"):
        get_model_state_dict(model, options={"full_state_dict": True})  # type: ignore[arg-type]

    theirs = TorchFSDP(nn.Linear(2, 3), device_id=torch.device("cpu"))
    with pytest.raises(UsageError, match="of torch and of fsdp_compat"):
        get_model_state_dict(nn.ModuleList([model, theirs]))

    later = types.ModuleType("later")
    exec(
        "def get_model_state_dict(model, *, submodules=None, options=None, names=None): return "
        "'torch'\n"
        "def decorated(function):\n"
        "    import functools\n"
        "    @functools.wraps(function)\n"
        "    def around(*args, **kwargs): return function(*args, **kwargs)\n"
        "    return around\n"
        "@decorated\n"
        "def get_optimizer_state_dict(model, optimizers, *, submodules=None, options=None): return "
        "'torch'\n",
        vars(later),
    )
    for _ in range(2):
        dcp_adapter._route_all(later)
    assert later.get_model_state_dict(nn.Linear(1, 1), names=1) == "torch"
    assert later.get_model_state_dict(model).keys() == {"weight", "bias"}
    with pytest.raises(UsageError, match="does not know: names"):
        later.get_model_state_dict(model, names="short")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert later.get_optimizer_state_dict(nn.Linear(1, 1), optimizer) == "torch"
    assert later.get_optimizer_state_dict(model, optimizer)["param_groups"][0]["params"] == [
        "weight",
        "bias",
    ]


@on_ranks(1)
def test_models_and_optimizers_with_methods_patched_by_torch_work() -> None:
    """Torch lets a model's own methods call these functions, which must not call them back."""
    model = FSDP(nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    expected = copy.deepcopy(get_state_dict(model, optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_functions._patch_model_state_dict(model, options=FULL)
        torch_functions._patch_optimizer_state_dict(model, optimizers=(optimizer,), options=FULL)
        assert_same(model.state_dict(), expected[0])
        assert_same_optim(optimizer.state_dict(), expected[1])
        model.load_state_dict({name: value + 1 for name, value in expected[0].items()})
        optimizer.load_state_dict(expected[1])
    assert_same(
        get_model_state_dict(model), {name: value + 1 for name, value in expected[0].items()}
    )
