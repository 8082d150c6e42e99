"""Exact costs of a step: collectives, bytes and copies.

The model is a root with its own parameters around six equal blocks, on two ranks. Sizes in
elements, all padded to 4:

    block   norm 8 + 8, up 56 + 12, down 56 + 8   = 148    S = 76 on two ranks, 148 on one
    root    stem 36 + 8, head 20 + 4              =  68    S = 36 on two ranks,  68 on one"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compat import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from fsdp_compat._comm.transport import VALUES, Kind
from fsdp_compat._engine.checks import Checks
from fsdp_compat._engine.gradients import LARGE
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.memory import group_nbytes
from tests.support.ranks import on_ranks
from tests.support.same_host import COPIED, MAPPED, MESSAGES

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


def wrapped(**options: Any) -> FullyShardedDataParallel:
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block}))
    return FullyShardedDataParallel(options.pop("module", None) or Model(), **options)


def step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).float().pow(2).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None


@contextlib.contextmanager
def counting_sends(found: list[int]) -> Iterator[None]:
    """Add up the bytes handed to gloo, below every counter of the package. What ranks compare does
    not count."""
    connections = dist.ProcessGroup
    descriptor, send = vars(connections)["send"], connections.send

    def counted(self: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        if args[1] != VALUES:
            found.extend(tensor.nbytes for tensor in tensors)
        return send(self, tensors, *args)

    connections.send = counted
    try:
        yield
    finally:
        connections.send = descriptor


def profiled(model: nn.Module) -> dict[str, int]:
    """Return how often each operation appears in the profile of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model)
    return {each.key: each.count for each in profile.key_averages()}


@on_ranks(2, environment=MESSAGES)
def test_profilers_and_dispatch_modes_see_what_is_sent() -> None:
    model, real = wrapped(), list[int]()
    step(model)
    with counting_sends(real):
        step(model)
    with Operations() as seen:
        step(model)
    assert sum(real) > 0
    assert seen.names["c10d::send"] == profiled(model)["c10d::send"] == len(real)


@pytest.mark.parametrize("fully", [False, True])
@on_ranks(2, environment=COPIED)
def test_profilers_see_collectives_that_send_nothing(fully: bool) -> None:
    """Peers read all messages in place."""
    if fully:
        model: Any = Model()
        for module in (*model.blocks, model):
            fully_shard(module)
    else:
        model = wrapped()
    step(model)
    runtime = model._get_fsdp_state().runtime if fully else model._runtime
    traffic = runtime.groups[0].shard.traffic
    traffic.clear()
    rows = profiled(model)
    for name, kind in (("begin_gather", Kind.GATHER), ("begin_reduce", Kind.REDUCE)):
        assert rows[f"fsdp_compat::{name}"] == traffic.counts[kind] > BLOCKS


@pytest.mark.parametrize("fully", [False, True])
@on_ranks(2, environment=MESSAGES)
def test_profilers_see_what_is_done_for_each_unit(fully: bool) -> None:
    model: Any = Model()
    if fully:
        for module in (*model.blocks, model):
            fully_shard(module)
    else:
        model = wrapped(module=model)
    step(model)
    rows = {key: n for key, n in profiled(model).items() if key.startswith("FSDP::")}
    names = [f"unit 'blocks.{index}'" for index in range(BLOCKS)]
    root = next(key for key in rows if "the root unit" in key).partition("(")[2]
    assert "Model" in root or "FullyShardedDataParallel" in root
    for what in ("all_gather", "wait_for_all_gather", "reduce"):
        assert rows.pop(f"FSDP::{what} ({root}") == 1
        gathers = 1 if what == "reduce" else 2
        for index, name in enumerate(names):
            kept = index == BLOCKS - 1 and gathers == 2  # stays unsharded
            assert rows.pop(f"FSDP::{what} ({name})") == (1 if kept else gathers), (what, name)
    assert not rows


@on_ranks(2, environment=MAPPED)
def test_profilers_see_the_barriers_of_mapped_passes() -> None:
    model = wrapped()
    step(model)
    assert sum(n for key, n in profiled(model).items() if key.endswith("::end_barrier")) == 4


# -- collectives and bytes


Sent = dict[str, tuple[int, int]]  # collectives and bytes of one rank in a step, by kind

ONCE = 4 * (BLOCKS * BLOCK_S + ROOT_S)
WHOLE = 4 * (BLOCKS * BLOCK_FULL + ROOT_FULL)
# the last block and the root stay unsharded; the first unit of backward is not known at first
FIRST, TWICE = ONCE + 4 * BLOCKS * BLOCK_S, ONCE + 4 * (BLOCKS - 1) * BLOCK_S
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL = {"GATHER": (12, TWICE), "REDUCE": (7, ONCE)}
FULL_FIRST = {"GATHER": (13, FIRST), "REDUCE": (7, ONCE)}
HALF = {"GATHER": (12, TWICE // 2), "REDUCE": (7, ONCE)}
GRAD_OP = {"GATHER": (7, ONCE), "REDUCE": (7, ONCE)}
NONE = {"REPLICATE": (7, WHOLE)}
HYBRID = {**FULL, "REPLICATE": (7, ONCE)}
# shards of 52 and 24 elements, sent to two peers
OF_THREE = {"GATHER": (12, 8 * (11 * 52 + 24)), "REDUCE": (7, 8 * (BLOCKS * 52 + 24))}


@pytest.mark.parametrize(
    ("ranks", "strategy", "options", "first", "later"),
    [
        (2, "FULL_SHARD", {"use_orig_params": False}, FULL_FIRST, FULL),
        (2, "FULL_SHARD", {"use_orig_params": True}, FULL_FIRST, FULL),
        (3, "FULL_SHARD", {}, None, OF_THREE),
        (2, "SHARD_GRAD_OP", {}, GRAD_OP, GRAD_OP),
        (2, "NO_SHARD", {}, NONE, NONE),
        (4, "HYBRID_SHARD", {"mesh": (2, 2)}, None, HYBRID),
        (2, "FULL_SHARD", {"mixed_precision": MIXED}, None, HALF),
        # a block has 135 elements
        (2, "FULL_SHARD", {"keep_units_below": 135}, None, FULL),
        (2, "FULL_SHARD", {"keep_units_below": 136}, None, GRAD_OP),
    ],
)
@on_ranks("ranks", environment=MESSAGES)
def test_full_shard_gathers_units_twice_and_other_strategies_once_or_never(
    ranks: int, strategy: str, options: dict[str, Any], first: Sent | None, later: Sent
) -> None:
    if "mesh" in options:
        options["device_mesh"] = init_device_mesh("cpu", options.pop("mesh"))
    model = wrapped(sharding_strategy=ShardingStrategy[strategy], **options)
    group = model._runtime.groups[0]
    axes, found = (group.shard.traffic, group.replica.traffic), []
    for _ in range(3):
        for traffic in axes:
            traffic.clear()
        real: list[int] = []
        with counting_sends(real):
            step(model)
        counts, nbytes = axes[0].counts + axes[1].counts, axes[0].nbytes + axes[1].nbytes
        assert sum(real) == sum(nbytes.values())
        found.append({kind.name: (n, nbytes[kind]) for kind, n in counts.items()})
    assert found[1:] == [later] * 2
    assert first is None or found[0] == first


@on_ranks(2)
def test_forward_without_grad_gathers_every_unit_once() -> None:
    model = wrapped()
    traffic = model._runtime.groups[0].shard.traffic
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    assert (traffic.counts[Kind.GATHER], traffic.counts[Kind.REDUCE]) == (7, 0)


class Changes:
    """What gives parameters other values between two evaluations, of a sharded or plain model."""

    @staticmethod
    def optimizer(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
        model.zero_grad()

    @staticmethod
    def writes(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    @staticmethod
    def memory(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5

    @staticmethod
    def state(model: nn.Module) -> None:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})

    @staticmethod
    def whole(model: nn.Module) -> None:
        sharded = isinstance(model, FullyShardedDataParallel)
        summon = FullyShardedDataParallel.summon_full_params if sharded else contextlib.nullcontext
        with summon(model):
            Changes.writes(model)


@pytest.mark.parametrize("change", ["optimizer", "writes", "memory", "state", "whole"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, environment=COPIED)
def test_evaluations_with_shard_grad_op_gather_again_only_what_was_written(
    use_orig_params: bool, change: str
) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = wrapped(
        module=copy.deepcopy(plain),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=use_orig_params,
    )
    traffic = model._runtime.groups[0].shard.traffic
    x = torch.ones(2, WIDTH)

    def gathers(in_graph: bool = False) -> int:
        """Return how many units a forward gathers; its output is the plain model's."""
        traffic.clear()
        with torch.set_grad_enabled(in_graph):
            output = model(x)
            torch.testing.assert_close(output, plain(x))
        if in_graph:
            output.sum().backward()
            model.zero_grad()
        return traffic.counts[Kind.GATHER]

    first = [gathers(), gathers(), gathers()]
    assert first == [7, 0, 0], first
    for each in (model, plain):
        getattr(Changes, change)(each)
    assert [gathers(), gathers()] == [7, 0]
    assert [gathers(in_graph=True), gathers()] == [7, 7]
    assert len(model.state_dict()) == len(plain.state_dict())
    assert [gathers(), gathers()] == [7, 0]


@on_ranks(2, environment=COPIED)
def test_evaluations_of_ranks_that_may_use_different_units_gather_all_of_them() -> None:
    model = wrapped(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, allow_unused_units=True)
    traffic = model._runtime.groups[0].shard.traffic
    with torch.no_grad():
        for count in (1, 2):
            model(torch.ones(2, WIDTH))
            assert traffic.counts[Kind.GATHER] == 7 * count


# -- passes over memory


class Operations(TorchDispatchMode):
    """Counts operations, and the sizes that copies and divisions write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: collections.Counter[str] = collections.Counter()
        self.written: dict[str, list[int]] = collections.defaultdict(list)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        self.names[name] += 1
        if name in ("copy_", "div_", "mul_", "zero_", "add_", "clone", "_to_copy", "add", "div"):
            self.written[name].append(args[0].numel())
        elif name in ("_foreach_copy_", "_foreach_zero_"):
            self.written[name].append(sum(tensor.numel() for tensor in args[0]))
        return function(*args, **(kwargs or {}))


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


def operations_of_the_second_step(**options: Any) -> Operations:
    model = wrapped(**options)
    step(model)
    with Operations() as seen:
        model(torch.ones(2, WIDTH)).float().pow(2).mean().backward()
    return seen


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, environment=MESSAGES)
def test_step_copies_shards_and_gradients_once_and_divides_shards(use_orig_params: bool) -> None:
    elements = 6 + 6 + 54 + 9 + 54 + 6, 36 + 6 + 18 + 3  # without padding
    seen = operations_of_the_second_step(use_orig_params=use_orig_params)
    assert BANNED & seen.names.keys() == set()
    # Each original parameter gets a view of its unit's gradient.
    assert seen.names["split_with_sizes"] == (7 if use_orig_params else 0)
    assert sorted(seen.written["copy_"]) == SHARDS
    assert sorted(seen.written["_foreach_copy_"]) == [elements[1]] + [elements[0]] * 6
    assert sorted(seen.written["div_"]) == [ROOT_S] + [BLOCK_S] * 6
    # one operation for all gaps between parameters of a unit, never for a buffer
    assert len(seen.written["_foreach_zero_"]) == 7 and max(seen.written["_foreach_zero_"]) <= 19


@on_ranks(2, environment=MESSAGES)
def test_gather_casts_the_shard_before_sending() -> None:
    seen = operations_of_the_second_step(mixed_precision=MIXED)
    casts = seen.written["_to_copy"]
    assert sorted(n for n in casts if n in (ROOT_S, BLOCK_S)) == SHARDS
    assert max(casts) == BLOCK_S
    assert sorted(seen.written["copy_"]) == SHARDS


# -- one rank


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1)
def test_one_rank_copies_nothing_and_parameters_alias_the_shard(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    real: list[int] = []
    with counting_sends(real), Operations() as seen:
        for _ in range(2):
            model(torch.ones(2, WIDTH)).pow(2).mean().backward()
    assert real == []
    assert not any(name.startswith("c10d") or "all" in name for name in seen.names)
    assert "copy_" not in seen.names
    for group in model._runtime.groups:
        shard = group.store.shard
        assert group_nbytes(group) == 0
        places = group.store.param_views(shard)[:-1]
        assert [param.data_ptr() for param in group.unsharded_params] == [
            views[0].data_ptr() for views in places
        ]


@on_ranks(1)
def test_one_rank_passes_on_the_gradients_of_autograd() -> None:
    rows = LARGE // WIDTH + 1  # of weights that have hooks of their own
    layers = nn.Linear(WIDTH, rows), nn.Linear(rows, WIDTH)
    model = wrapped(module=nn.Sequential(Block(), *layers, Block()), use_orig_params=True)
    made: dict[int, torch.Tensor | None] = {}
    for group in model._runtime.groups:
        keys = [id(sharded) for sharded, _ in group.store.sharded_params]
        for key, param in zip(keys, group.unsharded_params, strict=True):
            param.register_post_accumulate_grad_hook(
                lambda param, key=key: made.update({key: param.grad})
            )
    with Operations() as seen:
        model(torch.ones(2, WIDTH)).pow(2).mean().backward()
    parameters = list(model.parameters())
    assert len(parameters) == 16
    assert made.keys() == {id(parameter) for parameter in parameters}
    assert all(parameter.grad is made[id(parameter)] for parameter in parameters)
    assert {"copy_", "_foreach_copy_", "div_"} & seen.names.keys() == set()


# -- checks before a forward


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_units_are_checked_one_by_one_only_after_external_changes(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    parameter = max(model.parameters(), key=torch.Tensor.numel)  # original ones may be empty
    check = mock.patch.object(
        Checks, "_check_units", autospec=True, side_effect=Checks._check_units
    )

    def checks() -> int:
        """Return how often a step checks all units one by one."""
        with check as looks:
            step(model)
        return int(looks.call_count)

    assert [checks(), checks()] == [1, 0]
    model.zero_grad()
    assert checks() == 0
    parameter.requires_grad_(False)
    assert [checks(), checks()] == [1, 0]
    parameter.data = parameter.data.clone()
    assert [checks(), checks()] == [1, 0]
