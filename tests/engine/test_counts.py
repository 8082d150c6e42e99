"""Exact costs of a step: collectives, bytes and copies.

The model is a root with its own parameters around six equal blocks, on two ranks. Sizes in
elements, all padded to 4:

    block   norm 8 + 8, up 56 + 12, down 56 + 8   = 148    S = 76 on two ranks, 148 on one
    root    stem 36 + 8, head 20 + 4              =  68    S = 36 on two ranks,  68 on one"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.collectives import Operations, counting_sends
from tests.support.fully_sharded import OURS, shard_all
from tests.support.pairwise import each_value
from tests.support.ranks import on_ranks
from tests.support.recorded import issued, recorded
from tests.support.same_host import COPIED, MESSAGES

WIDTH = 6
BLOCKS = 6
BLOCK_S, ROOT_S = 76, 36
BLOCK_FULL, ROOT_FULL = 148, 68


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


def wrapped(front_end: str = "flat", module: nn.Module | None = None, **options: Any) -> Any:
    module = Model() if module is None else module
    if front_end == "fully_shard":
        return shard_all(module, (Block,), OURS)
    return FullyShardedDataParallel(module, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).float().pow(2).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None


# -- collectives and bytes


# the last block and the root stay unsharded; the first unit of backward is not known at first
ONCE = [4 * ROOT_S] + [4 * BLOCK_S] * BLOCKS
FIRST, TWICE = ONCE + [4 * BLOCK_S] * BLOCKS, ONCE + [4 * BLOCK_S] * (BLOCKS - 1)
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL = {"gather": TWICE, "reduce": ONCE}
HALF = {"gather": [nbytes // 2 for nbytes in TWICE], "reduce": ONCE}
GRAD_OP = {"gather": ONCE, "reduce": ONCE}
NONE = {"all-reduce": [4 * ROOT_FULL] + [4 * BLOCK_FULL] * BLOCKS}
OF_THREE = {"gather": [4 * 24] + [4 * 52] * 11, "reduce": [4 * 24] + [4 * 52] * BLOCKS}


@pytest.mark.parametrize(
    ("ranks", "strategy", "options", "first", "later"),
    [
        (2, "FULL_SHARD", {"use_orig_params": False}, {**FULL, "gather": FIRST}, FULL),
        (2, "FULL_SHARD", {"use_orig_params": True}, {**FULL, "gather": FIRST}, FULL),
        (3, "FULL_SHARD", {}, None, OF_THREE),
        (2, "SHARD_GRAD_OP", {}, GRAD_OP, GRAD_OP),
        (2, "NO_SHARD", {}, NONE, NONE),
        (4, "HYBRID_SHARD", {}, None, {**FULL, "all-reduce": ONCE}),
        (2, "FULL_SHARD", {"mixed_precision": MIXED}, None, HALF),
        # a block has 135 elements
        (2, "FULL_SHARD", {"keep_units_below": 135}, None, FULL),
        (2, "FULL_SHARD", {"keep_units_below": 136}, None, GRAD_OP),
    ],
)
@on_ranks(1)
def test_full_shard_gathers_units_twice_and_other_strategies_once_or_never(
    ranks: int,
    strategy: str,
    options: dict[str, Any],
    first: dict[str, list[int]] | None,
    later: dict[str, list[int]],
) -> None:
    with recorded(ranks) as log:
        if strategy == "HYBRID_SHARD":
            options["device_mesh"] = init_device_mesh("cpu", (2, 2))
        model = wrapped(sharding_strategy=ShardingStrategy[strategy], **options)
        found = []
        for _ in range(3):
            log.clear()
            step(model)
            found.append({kind: sorted(nbytes) for kind, nbytes in issued(log).items()})
        assert found[1:] == [later] * 2
        assert first is None or found[0] == first
        log.clear()
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        assert len(issued(log).get("gather", [])) == (0 if strategy == "NO_SHARD" else 7)


@pytest.mark.parametrize(
    ("ranks", "options", "nbytes"),
    [
        (3, {}, 2 * (sum(OF_THREE["gather"]) + sum(OF_THREE["reduce"]))),
        (2, {"mixed_precision": MIXED}, sum(HALF["gather"]) + sum(ONCE)),
        (2, {"sharding_strategy": ShardingStrategy.NO_SHARD}, sum(NONE["all-reduce"])),
    ],
)
@on_ranks("ranks", environment=MESSAGES)
def test_gloo_sends_every_value_once_to_each_peer(
    ranks: int, options: dict[str, Any], nbytes: int
) -> None:
    model = wrapped(**options)
    step(model)
    with counting_sends() as sent:
        step(model)
    assert sum(sent) == nbytes


# -- evaluation


def _optimizer(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    model.zero_grad()


@torch.no_grad()
def _writes(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def _memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def _state(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _whole(model: nn.Module) -> None:
    sharded = isinstance(model, FullyShardedDataParallel)
    summon = FullyShardedDataParallel.summon_full_params if sharded else contextlib.nullcontext
    with summon(model):
        _writes(model)


@each_value
@pytest.mark.parametrize("change", [_optimizer, _writes, _memory, _state, _whole])
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, environment=MESSAGES)
def test_evaluations_with_shard_grad_op_gather_again_only_what_was_written(
    use_orig_params: bool, change: Callable[[nn.Module], None]
) -> None:
    torch.manual_seed(0)
    plain, x = Model(), torch.ones(2, WIDTH)
    model = wrapped(
        module=copy.deepcopy(plain),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=use_orig_params,
    )

    def gathers(in_graph: bool = False) -> int:
        """Return how many units a forward gathers; its output is the plain model's."""
        with torch.set_grad_enabled(in_graph):
            with counting_sends() as sent:
                output = model(x)
            torch.testing.assert_close(output, plain(x))
        if in_graph:
            output.sum().backward()
            model.zero_grad()
        return len(sent)

    assert [gathers(), gathers(), gathers()] == [7, 0, 0]
    for each in (model, plain):
        change(each)
    assert [gathers(), gathers()] == [7, 0]
    assert [gathers(in_graph=True), gathers()] == [7, 7]
    assert len(model.state_dict()) == len(plain.state_dict())
    assert [gathers(), gathers()] == [7, 0]


@on_ranks(1)
def test_evaluations_of_ranks_that_may_use_different_units_gather_all_of_them() -> None:
    with recorded(2) as log, torch.no_grad():
        strategy = ShardingStrategy.SHARD_GRAD_OP
        model = wrapped(sharding_strategy=strategy, allow_unused_units=True)
        for count in (1, 2):
            model(torch.ones(2, WIDTH))
            assert len(issued(log)["gather"]) == 7 * count


# -- what profilers see


def profiled(model: nn.Module) -> dict[str, int]:
    """Return how often each operation appears in the profile of a second step."""
    step(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model)
    return {each.key: each.count for each in profile.key_averages()}


@pytest.mark.parametrize("front_end", ["flat", "fully_shard"])
@on_ranks(2, environment=COPIED)
def test_profilers_see_collectives_that_send_nothing(front_end: str) -> None:
    rows = profiled(wrapped(front_end))
    assert (rows["fsdp_compat::begin_gather"], rows["fsdp_compat::begin_reduce"]) == (12, 7)


@pytest.mark.parametrize("front_end", ["flat", "fully_shard"])
@on_ranks(2, environment=MESSAGES)
def test_profilers_see_what_is_done_for_each_unit(front_end: str) -> None:
    rows = {k: n for k, n in profiled(wrapped(front_end)).items() if k.startswith("FSDP::")}
    root = next(key for key in rows if "the root unit" in key).partition("(")[2]
    assert "Model" in root or "FullyShardedDataParallel" in root
    for what in ("all_gather", "wait_for_all_gather", "reduce"):
        assert rows.pop(f"FSDP::{what} ({root}") == 1
        gathers = 1 if what == "reduce" else 2
        for index in range(BLOCKS):
            kept = index == BLOCKS - 1  # stays unsharded
            assert rows.pop(f"FSDP::{what} (unit 'blocks.{index}')") == (1 if kept else gathers)
    assert not rows


# -- passes over memory


BANNED = {
    "cat",
    "_chunk_cat",
    "split",
    "split_with_sizes_copy",
    "constant_pad_nd",
    "stack",
    "clone",
}
SHARDS = [ROOT_S] + [BLOCK_S] * 11


def operations_of_the_second_step(model: nn.Module) -> Operations:
    step(model)
    with Operations() as seen:
        model(torch.ones(2, WIDTH)).float().pow(2).mean().backward()
    return seen


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, environment=MESSAGES)
def test_step_copies_shards_and_gradients_once_and_divides_shards(use_orig_params: bool) -> None:
    elements = 6 + 6 + 54 + 9 + 54 + 6, 36 + 6 + 18 + 3  # without padding
    seen = operations_of_the_second_step(wrapped(use_orig_params=use_orig_params))
    assert BANNED & seen.names.keys() == set()
    # Each original parameter gets a view of its unit's gradient.
    assert seen.names["split_with_sizes"] == (7 if use_orig_params else 0)
    assert sorted(seen.written["copy_"]) == SHARDS
    assert sorted(seen.written["_foreach_copy_"]) == [elements[1]] + [elements[0]] * 6
    assert sorted(seen.written["div_"]) == [ROOT_S] + [BLOCK_S] * 6
    # one operation for all gaps between parameters of a unit, never for a buffer
    assert len(seen.written["_foreach_zero_"]) == 7 and max(seen.written["_foreach_zero_"]) <= 19


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1)
def test_one_rank_copies_nothing_and_parameters_lie_in_the_shard(use_orig_params: bool) -> None:
    rows = (1 << 16) // WIDTH + 1 if use_orig_params else 3  # many: gradients move by themselves
    wide = nn.Linear(WIDTH, rows), nn.Linear(rows, WIDTH)
    model = wrapped(module=nn.Sequential(Block(), *wide), use_orig_params=use_orig_params)
    storages = {each.untyped_storage().data_ptr() for each in model.parameters()}
    shown: set[int] = set()
    wide[0].register_forward_pre_hook(
        lambda module, _: shown.add(module.weight.untyped_storage().data_ptr())
    )
    with counting_sends() as sent, Operations() as seen:
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, WIDTH)).pow(2).mean().backward()
    assert sent == [] and shown <= storages
    assert not any(name.startswith("c10d") or "all" in name for name in seen.names)
    assert "copy_" not in seen.names
    if use_orig_params:
        assert {"_foreach_copy_", "div_"} & seen.names.keys() == set()
