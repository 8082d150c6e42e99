"""torch.distributed.checkpoint.state_dict's functions on our models beyond values, which
test_matrix.py compares: parts of models, strictness, several optimizers, names."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import fully_shard, uninstall
from fsdp_compat.errors import CheckpointError, UsageError
from tests.support.cases import about
from tests.support.odd_model import (
    Config,
    assert_same,
    assert_same_optim,
    each_tensor,
    in_state,
    make_model,
    make_optimizer,
    run_of,
    settings_by_name,
    shard,
    train,
)
from tests.support.ranks import on_ranks

CONFIGS: tuple[Config, ...] = (
    ("FULL_SHARD", False, "blocks"),
    ("FULL_SHARD", True, "always"),
    ("NO_SHARD", True, "blocks"),
    ("HYBRID_SHARD", False, "always"),
)
IN_PLACE: tuple[Config, ...] = (("ROWS", True, "blocks"), ("MIXED", True, "blocks"))
FULL = StateDictOptions(full_state_dict=True)
LAX = StateDictOptions(full_state_dict=True, strict=False)
ON_RANK0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
TIED = "head.weight"  # flat units miss a parameter once


def ours_in_state(
    kind: str, config: Config, run: Mapping[str, Any]
) -> tuple[FSDP, torch.optim.Optimizer]:
    """One of our models, with its optimizer, in the state of an unsharded run."""
    model = shard(make_model(99, odd=run["model"]["gain"].dim() == 0), config)
    return model, in_state(model, kind, run)


def assert_in_state(model: nn.Module, optimizers: Any, run: Mapping[str, Any]) -> None:
    state, optim = get_state_dict(model, optimizers, options=FULL)
    assert_same(state, run["model"])
    assert_same_optim(optim, run["optim"])


# --- values ---------------------------------------------------------------------------------------


def _flattened(optim: Mapping[str, Any]) -> dict[str, Any]:
    states = optim["state"].items()
    found = {f"state.{name}.{key}": its for name, entry in states for key, its in entry.items()}
    for name, settings in settings_by_name(optim).items():
        found |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
    return found


@on_ranks(2)
def test_parts_of_the_state_have_the_unsharded_models_values() -> None:
    run, prefix = run_of("Adam"), "blocks.1."
    named = {name: value for name, value in run["model"].items() if name.startswith(prefix)}
    below = {name.removeprefix(prefix): value for name, value in named.items()}
    bare = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=False)
    for config in (*CONFIGS[:3], *IN_PLACE):
        model, optimizer = ours_in_state("Adam", config, run)
        state = get_model_state_dict(model, options=FULL)
        assert all(type(value) is Tensor for value in state.values() if isinstance(value, Tensor))
        assert list(state) == list(run["model"])
        is_sharded = config[0] == "FULL_SHARD"
        assert isinstance(get_model_state_dict(model)["cube"], ShardedTensor) is is_sharded
        for full in (True, False):
            trained = StateDictOptions(full_state_dict=full, ignore_frozen_params=True)
            state = get_model_state_dict(model, options=trained)
            assert set(run["model"]) - set(state) == {"frozen.weight", "frozen.bias"}
            flat = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=True)
            optim = get_optimizer_state_dict(model, optimizer, options=flat)
            assert_same(optim, _flattened(run["optim"]))
        for block in (model.blocks[1], getattr(model.blocks[1], "module", model.blocks[1])):
            with pytest.warns(FutureWarning, match="submodules is deprecated") as caught:
                state = get_model_state_dict(model, submodules={block}, options=FULL)
                without = get_model_state_dict(model, submodules={block}, options=bare)
            warned = [each.filename for each in caught if each.category is FutureWarning]
            assert set(warned) == {__file__}
            assert_same(state, named)
            assert_same(without, below)
            loaded = set_model_state_dict(model, {block: without}, options=LAX)
            assert "blocks.0.up.weight" in loaded.missing_keys and not loaded.unexpected_keys
            assert not any(name.startswith(prefix) for name in loaded.missing_keys)


# --- strictness, several optimizers ---------------------------------------------------------------


@on_ranks(2)
def test_strict_reports_missing_entries_and_without_it_the_rest_loads() -> None:
    run = run_of("Adam")
    states, groups = run["optim"]["state"], run["optim"]["param_groups"]
    blocks = {name: entry for name, entry in states.items() if name.startswith("blocks.")}
    half = {"state": blocks, "param_groups": groups}
    part = {n: value for n, value in run["model"].items() if n.startswith("blocks.")}
    part = each_tensor(part, lambda value: value + 1)
    for config in (*CONFIGS[:2], *IN_PLACE):
        model, optimizer = ours_in_state("Adam", config, run)
        given = dict(part)
        with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
            set_model_state_dict(model, part, options=FULL)
        with pytest.raises(CheckpointError, match="no state for some of the parameters"):
            set_optimizer_state_dict(model, optimizer, half, options=FULL)
        assert_in_state(model, optimizer, run)  # nothing has changed
        answer = set_model_state_dict(model, {**part, "other": torch.ones(1)}, options=LAX)
        assert {*answer.missing_keys} - {TIED} == set(run["model"]) - set(part) - {TIED}
        assert answer.unexpected_keys == ["other"]
        assert_same(get_model_state_dict(model, options=FULL), {**run["model"], **part})
        assert_same(part, given, "what was passed is as it was")
        again = make_optimizer("Adam", model)
        set_optimizer_state_dict(model, again, half, options=LAX)
        found = get_optimizer_state_dict(model, again, options=FULL)["state"]
        assert_same({name: found[name] for name in half["state"]}, half["state"])
        other_name = {TIED if n == "embed.weight" else n: entry for n, entry in states.items()}
        optim = {"state": other_name, "param_groups": groups}
        set_optimizer_state_dict(model, again, optim, options=FULL)
        assert_same_optim(get_optimizer_state_dict(model, again, options=FULL), run["optim"])


@on_ranks(2)
def test_calls_that_cannot_work_are_refused_on_all_ranks() -> None:
    for config in (CONFIGS[1], *IN_PLACE):
        with about(config[0]):
            _refuses(*ours_in_state("Adam", config, run_of("Adam")))


def _refuses(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run = run_of("Adam")
    states = {"embed.weight": run["optim"]["state"]["embed.weight"]}
    half = {**run, "optim": {**run["optim"], "state": states}}
    given = half if dist.get_rank() == 0 else {"model": {}, "optim": {}}
    for entry in optimizer.state.values():
        entry["kind"] = "a word"
    without_full = StateDictOptions(broadcast_from_rank0=True)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    get_optimizer: Any = functools.partial(get_optimizer_state_dict, model)
    cases: tuple[tuple[type[Exception], str, Callable[[], Any]], ...] = (
        (CheckpointError, "is empty", lambda: set_model_state_dict(model, {})),
        (CheckpointError, "is empty", lambda: set_optimizer_state_dict(model, optimizer, {})),
        (CheckpointError, "no state for some", lambda: in_state(model, "Adam", given, FROM_RANK0)),
        (ValueError, "full_state", lambda: get_model_state_dict(model, options=without_full)),
        (RuntimeError, "no optimizer", lambda: get_optimizer(())),
        (UsageError, "optimizers has the wrong type", lambda: get_optimizer([model])),
        (NotImplementedError, "be flattened", lambda: get_optimizer(optimizer, options=flat)),
    )
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()


@on_ranks(2)
def test_several_optimizers_share_one_dict() -> None:
    run = run_of("Adam")
    state, optim = run["model"], run["optim"]
    for config in (*CONFIGS[:2], *IN_PLACE):
        model = shard(make_model(99), config)
        both = [torch.optim.Adam([group]) for group in make_optimizer("Adam", model).param_groups]
        set_state_dict(model, both, model_state_dict=state, optim_state_dict=optim, options=FULL)
        assert_in_state(model, both, run)
        names = get_optimizer_state_dict(model, both[0])["state"]
        assert {name.partition(".")[0] for name in names} == {"blocks"}
        one = get_optimizer_state_dict(model, both)
        for optimizer in both:
            optimizer.state.clear()
        set_optimizer_state_dict(model, both, one)
        assert_in_state(model, both, run)


@on_ranks(2)
def test_rank_local_state_returns_to_its_rank(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # ours says what cannot be resharded
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for number, options in enumerate((None, FULL, flat)):
        model = shard(make_model(odd=False), CONFIGS[1])
        optimizer, again = (
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for _ in range(2)
        )
        train(model, optimizer, range(1))
        for entry in optimizer.state.values():
            entry["scales"] = torch.full((3, 2), float(dist.get_rank()))
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        if options is not FULL:
            dcp.save(saved, checkpoint_id=f"{tmp_path}/{number}")
            saved = {**saved}
            dcp.load(saved, checkpoint_id=f"{tmp_path}/{number}")
        set_optimizer_state_dict(model, again, saved, options=options)
        for p in (p for p in optimizer.state if p.numel()):
            assert_same(again.state[p], optimizer.state[p], f"{options}")


# --- the first step, and flattened states ---------------------------------------------------------


@on_ranks(2)
def test_flattened_states_and_exports_before_the_first_step_change_nothing_else() -> None:
    flat, batch = StateDictOptions(flatten_optimizer_state_dict=True), torch.ones(2, 5)
    for config in (CONFIGS[1], *IN_PLACE):
        model = shard(make_model(), config)
        adam = torch.optim.Adam(model.blocks.parameters(), 0.5)
        torch.optim.lr_scheduler.LinearLR(adam)
        start = copy.deepcopy(get_model_state_dict(model, options=FULL))
        steps: list[dict[str, Any]] = []
        for exported in (False, True):
            set_model_state_dict(model, copy.deepcopy(start), options=FULL)
            optimizer = torch.optim.Adam(model.blocks.parameters(), 0.5)
            for options in (FULL, flat) if exported else ():
                get_optimizer_state_dict(model, optimizer, options=options)
            model.blocks(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(copy.deepcopy(get_model_state_dict(model, options=FULL)))
        assert_same(*steps, config[0])
        saved = get_optimizer_state_dict(model, optimizer, options=flat)
        missing = {k: v for k, v in saved.items() if not k.startswith("state.blocks.0.up.")}
        with pytest.raises(CheckpointError, match=r"blocks\.0\.up\.weight"):
            set_optimizer_state_dict(model, adam, missing, options=flat)
        model.blocks[1].down.bias.requires_grad_(False)  # its state is loaded, not needed
        set_optimizer_state_dict(model, adam, {**saved}, options=flat)
        found, full = (get_optimizer_state_dict(model, o, options=FULL) for o in (adam, optimizer))
        assert_same(found["state"], full["state"])
        sgd = torch.optim.SGD(model.blocks.parameters(), 0.5)
        torch.optim.lr_scheduler.LinearLR(sgd, total_iters=9)
        other = torch.optim.SGD(model.blocks.parameters(), 0.1)
        saved = get_optimizer_state_dict(model, sgd, options=flat)
        set_optimizer_state_dict(model, other, saved, options=flat)
        assert not other.state and other.param_groups[0]["initial_lr"] == 0.5


@on_ranks(4)
def test_whole_states_come_from_rank_0_on_two_dimensions() -> None:
    """Sizes that neither dimension divides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.LayerNorm(3))

    def sharded(model: Any) -> nn.Module:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model[0], mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    expected = make(1).state_dict()
    source = sharded(make(1))  # before the function's name is looked up, as in any program
    sent = get_model_state_dict(source, options=ON_RANK0)
    assert bool(sent) is (dist.get_rank() == 0)
    adam = torch.optim.Adam(source.parameters())
    for param in source.parameters():  # torch computes with no such sizes
        param.grad = param.detach().clone()
    adam.step()
    states = get_optimizer_state_dict(source, adam, options=ON_RANK0)
    whole = get_optimizer_state_dict(source, adam, options=FULL)
    for options, given, its in ((FROM_RANK0, sent, states), (FULL, dict(expected), whole)):
        model = sharded(make(2))
        optimizer = torch.optim.Adam(model.parameters())
        set_model_state_dict(model, given, options=options)
        set_optimizer_state_dict(model, optimizer, its, options=options)
        assert_same(get_model_state_dict(model, options=FULL), expected)
        assert_same(get_optimizer_state_dict(model, optimizer, options=FULL), whole)
        local = get_optimizer_state_dict(model, optimizer)["state"]["0.weight"]["exp_avg"]
        assert local.placements == model.get_parameter("0.weight").placements


@on_ranks(2)
def test_a_main_module_that_multiprocessing_runs_again_gets_ours() -> None:
    """Its functions see other variables than the module that it becomes."""
    original: dict[str, Any] = {"__name__": "__mp_main__"}
    exec(
        "from torch.distributed.checkpoint.state_dict import get_model_state_dict\n"
        "def get(*args, **kwargs): return get_model_state_dict(*args, **kwargs)",
        original,
    )
    uninstall()
    again = types.ModuleType("__mp_main__")
    vars(again).update(original, get_model_state_dict=None)
    with mock.patch.dict(sys.modules, {"__mp_main__": again}):
        model = FSDP(nn.Linear(2, 3))
        assert original["get"](model, options=FULL)["weight"].shape == (3, 2)


@on_ranks(1)
def test_models_and_optimizers_with_methods_patched_by_torch_work() -> None:
    """Torch lets a model's own methods call these functions, which must not call them back."""
    model = FSDP(nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state, optim = copy.deepcopy(get_state_dict(model, optimizer))
    raised = {name: value + 1 for name, value in state.items()}
    torch_functions._patch_model_state_dict(model, options=FULL)
    torch_functions._patch_optimizer_state_dict(model, optimizers=(optimizer,), options=FULL)
    assert_same(model.state_dict(), state)
    assert_same_optim(optimizer.state_dict(), optim)
    model.load_state_dict(raised)
    optimizer.load_state_dict(optim)
    assert_same(get_model_state_dict(model), raised)


@dataclasses.dataclass
class LaterOptions(StateDictOptions):
    """What a later torch may have."""

    compressed: bool = False


@on_ranks(1)
def test_options_of_a_later_torch_are_refused_by_name() -> None:
    model = FSDP(nn.Linear(2, 3))
    state = get_model_state_dict(model, options=LaterOptions(full_state_dict=True))
    assert state.keys() == {"weight", "bias"}
    with pytest.raises(UsageError, match=r"options\.compressed"):
        get_model_state_dict(model, options=LaterOptions(full_state_dict=True, compressed=True))


def test_other_models_get_torchs_results_and_errors() -> None:
    model = nn.Linear(2, 3)
    assert_same(get_model_state_dict(model=model), model.state_dict())
    with pytest.raises(TypeError, match=r"\bget_state_dict\(\)"):
        get_state_dict(model)  # type: ignore[call-arg]
