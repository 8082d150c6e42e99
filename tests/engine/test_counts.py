"""Exact costs of a step: collectives, bytes, copies, and memory in flight.

The model is a root with its own parameters around six equal blocks, on two ranks. Sizes in
elements, all padded to 4:

    block   norm 8 + 8, up 56 + 12, down 56 + 8   = 148    S = 76 on two ranks, 148 on one
    root    stem 36 + 8, head 20 + 4              =  68    S = 36 on two ranks,  68 on one"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
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
from fsdp_compat._engine.gradients import LARGE, Gradients
from fsdp_compat._engine.group import Group
from fsdp_compat._engine.unit import Residency
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import COPIED, MAPPED, MESSAGES

WIDTH = 6
BLOCKS = 6
BLOCK_S, ROOT_S = 76, 36
BLOCK_FULL, ROOT_FULL = 148, 68


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 9),
            nn.Linear(9, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


@dataclasses.dataclass(frozen=True)
class Sent:
    """One rank's communication in a step: numbers of collectives and bytes by kind, and bytes that
    were really sent."""

    counts: dict[str, int]
    nbytes: dict[str, int]
    real_nbytes: int


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


class Sends(TorchDispatchMode):
    """Counts the sends that pass the dispatcher, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.c10d.send.default:
            self.nbytes += [tensor.nbytes for tensor in args[0]]
        return func(*args, **(kwargs or {}))


@on_ranks(2, environment=MESSAGES)
def test_profilers_and_dispatch_modes_see_what_is_sent() -> None:
    """Return how many sends, and of how many bytes, are handed to gloo, pass a dispatch mode, and
    appear in a profile (without bytes)."""
    model, real = wrapped(), list[int]()
    step(model)
    with counting_sends(real):
        step(model)
    with Sends() as seen:
        step(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model)
    [row] = [each for each in profile.key_averages() if each.key == "c10d::send"]
    (number, nbytes), seen, profiled = [
        (len(real), sum(real)),
        (len(seen.nbytes), sum(seen.nbytes)),
        (row.count, 0),
    ]
    assert number > 0 and nbytes > 0
    assert seen == (number, nbytes)
    assert profiled == (number, 0)


@pytest.mark.parametrize("fully", [False, True])
@on_ranks(2, environment=COPIED)
def test_profilers_see_collectives_that_send_nothing(fully: bool) -> None:
    """Return how many gathers and reductions a step makes, and how many a profile shows, where
    peers read all messages in place."""
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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model)
    rows = {each.key: each.count for each in profile.key_averages()}
    kinds = {"begin_gather": Kind.GATHER, "begin_reduce": Kind.REDUCE}
    made, seen = (
        {name: traffic.counts[kind] for name, kind in kinds.items()},
        {name: rows.get(f"fsdp_compat::{name}", 0) for name in kinds},
    )
    assert min(made.values()) > BLOCKS
    assert seen == made


@on_ranks(2, environment=MAPPED)
def test_profilers_see_the_barriers_of_mapped_passes() -> None:
    model = wrapped()
    step(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model)
    assert (
        sum(each.count for each in profile.key_averages() if each.key.endswith("::end_barrier"))
        == 4
    )


def sent_by_steps(
    num_steps: int, strategy: str, mesh: tuple[int, int] | None = None, **options: Any
) -> list[Sent]:
    if mesh is not None:
        options["device_mesh"] = init_device_mesh("cpu", mesh)
    model = wrapped(sharding_strategy=ShardingStrategy[strategy], **options)
    group = model._runtime.groups[0]
    found = []
    for _ in range(num_steps):
        for axis in (group.shard, group.replica):
            axis.traffic.clear()
        real: list[int] = []
        with counting_sends(real):
            step(model)
        counts = group.shard.traffic.counts + group.replica.traffic.counts
        nbytes = group.shard.traffic.nbytes + group.replica.traffic.nbytes
        found.append(
            Sent(
                {k.name: n for k, n in counts.items()},
                {k.name: n for k, n in nbytes.items()},
                sum(real),
            )
        )
    return found


# -- collectives and bytes


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_full_shard_gathers_units_twice_and_reduces_once(
    use_orig_params: bool,
) -> None:
    reduced = 4 * (BLOCKS * BLOCK_S + ROOT_S)
    first = 4 * (2 * BLOCKS * BLOCK_S + ROOT_S)  # the first unit of backward is not known yet
    later = 4 * ((2 * BLOCKS - 1) * BLOCK_S + ROOT_S)
    for found in run_ranks(
        2, sent_by_steps, 4, "FULL_SHARD", use_orig_params=use_orig_params, environment=MESSAGES
    ):
        assert found == [
            Sent(
                {"GATHER": 13, "REDUCE": 7}, {"GATHER": first, "REDUCE": reduced}, first + reduced
            ),
            *[
                Sent(
                    {"GATHER": 12, "REDUCE": 7},
                    {"GATHER": later, "REDUCE": reduced},
                    later + reduced,
                )
            ]
            * 3,
        ]


@pytest.mark.parametrize(("limit", "gathered_again"), [(135, BLOCKS - 1), (136, 0)])
def test_small_units_are_gathered_once(limit: int, gathered_again: int) -> None:
    """A block has 135 elements."""
    nbytes = 4 * ((BLOCKS + gathered_again) * BLOCK_S + ROOT_S)
    for found in run_ranks(
        2, sent_by_steps, 3, "FULL_SHARD", keep_units_below=limit, environment=MESSAGES
    ):
        assert [(sent.counts["GATHER"], sent.nbytes["GATHER"]) for sent in found[1:]] == [
            (BLOCKS + gathered_again + 1, nbytes)
        ] * 2


def test_three_ranks_send_to_two_peers_each() -> None:
    block_s, root_s = 52, 24  # 148 / 3 and 68 / 3, padded
    gathered, reduced = 2 * 4 * (11 * block_s + root_s), 2 * 4 * (BLOCKS * block_s + root_s)
    for found in run_ranks(3, sent_by_steps, 2, "FULL_SHARD", environment=MESSAGES):
        assert found[1] == Sent(
            {"GATHER": 12, "REDUCE": 7}, {"GATHER": gathered, "REDUCE": reduced}, gathered + reduced
        )


def test_shard_grad_op_gathers_and_reduces_every_unit_once() -> None:
    nbytes = 4 * (BLOCKS * BLOCK_S + ROOT_S)
    for found in run_ranks(2, sent_by_steps, 3, "SHARD_GRAD_OP", environment=MESSAGES):
        assert (
            found
            == [Sent({"GATHER": 7, "REDUCE": 7}, {"GATHER": nbytes, "REDUCE": nbytes}, 2 * nbytes)]
            * 3
        )


def test_no_shard_gathers_nothing_and_all_reduces_every_unit() -> None:
    nbytes = 4 * (BLOCKS * BLOCK_FULL + ROOT_FULL)
    for found in run_ranks(2, sent_by_steps, 3, "NO_SHARD", environment=MESSAGES):
        assert found == [Sent({"REPLICATE": 7}, {"REPLICATE": nbytes}, nbytes)] * 3


def test_hybrid_shard_also_all_reduces_shards() -> None:
    gathered, reduced = 4 * (11 * BLOCK_S + ROOT_S), 4 * (BLOCKS * BLOCK_S + ROOT_S)
    counts = {"GATHER": 12, "REDUCE": 7, "REPLICATE": 7}
    nbytes = {"GATHER": gathered, "REDUCE": reduced, "REPLICATE": reduced}
    for found in run_ranks(4, sent_by_steps, 2, "HYBRID_SHARD", (2, 2), environment=MESSAGES):
        assert found[1] == Sent(counts, nbytes, gathered + 2 * reduced)


def test_gathers_and_reductions_use_their_own_dtypes() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    gathered, reduced = 2 * (11 * BLOCK_S + ROOT_S), 4 * (BLOCKS * BLOCK_S + ROOT_S)
    for found in run_ranks(
        2, sent_by_steps, 2, "FULL_SHARD", mixed_precision=precision, environment=MESSAGES
    ):
        assert found[1] == Sent(
            {"GATHER": 12, "REDUCE": 7}, {"GATHER": gathered, "REDUCE": reduced}, gathered + reduced
        )


def call_also(owner: Group | Gradients, name: str, more: Callable[[], object]) -> None:
    """Make a method of one group call ``more`` when it has returned."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def both(*args: Any, **kwargs: Any) -> Any:
        answer = method(*args, **kwargs)
        more()
        return answer

    setattr(owner, name, both)


@on_ranks(2)
def test_root_and_last_block_stay_unsharded_from_the_second_step_on() -> None:
    """Per step: {unit: (gathers, reductions)}."""
    strategy, num_steps = "FULL_SHARD", 3
    model = wrapped(sharding_strategy=ShardingStrategy[strategy])
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for unit in model._runtime.units:
        for group in unit.groups:
            for owner, name in ((group, "unshard"), (group.gradients, "start_reduction")):
                call_also(owner, name, lambda key=(unit.label, name): found.update([key]))
    steps = []
    for _ in range(num_steps):
        found.clear()
        step(model)
        steps.append(
            {
                u.label: (found[u.label, "unshard"], found[u.label, "start_reduction"])
                for u in model._runtime.units
            }
        )
    found = steps
    assert found[0] == {"the root unit (a Model)": (1, 1)} | {
        f"unit 'blocks.{i}'": (2, 1) for i in range(6)
    }
    assert found[1] == {"the root unit (a Model)": (1, 1)} | {
        f"unit 'blocks.{i}'": (2, 1) for i in range(5)
    } | {"unit 'blocks.5'": (1, 1)}
    assert found[2] == found[1]


@on_ranks(2)
def test_no_sync_reduces_nothing_until_the_next_synchronised_backward() -> None:
    """(gathers, reductions) of two backwards without communication and one with it."""
    model, found = wrapped(), []
    traffic = model._runtime.groups[0].shard.traffic
    step(model)
    for sync in (False, False, True):
        traffic.clear()
        with contextlib.nullcontext() if sync else model.no_sync():
            model(torch.ones(2, WIDTH)).pow(2).mean().backward()
        found.append((traffic.counts[Kind.GATHER], traffic.counts[Kind.REDUCE]))
    assert found == [(12, 0), (12, 0), (12, 7)]


@on_ranks(2)
def test_forward_without_grad_gathers_every_unit_once() -> None:
    model = wrapped()
    traffic = model._runtime.groups[0].shard.traffic
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    assert (traffic.counts[Kind.GATHER], traffic.counts[Kind.REDUCE]) == (7, 0)


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
        elif name == "_foreach_copy_":
            self.written[name].append(sum(tensor.numel() for tensor in args[0]))
        return function(*args, **(kwargs or {}))


def operations_of_a_step(**options: Any) -> tuple[dict[str, int], dict[str, list[int]]]:
    model = wrapped(**options)
    step(model)
    with Operations() as seen:
        loss = model(torch.ones(2, WIDTH)).float().pow(2).mean()
        loss.backward()
    return dict(seen.names), dict(seen.written)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_step_never_concatenates_splits_or_pads(use_orig_params: bool) -> None:
    for names, _ in run_ranks(2, operations_of_a_step, use_orig_params=use_orig_params):
        assert names["_foreach_copy_"] == 7  # it has counted
        banned = {
            "cat",
            "_chunk_cat",
            "split",
            "split_with_sizes_copy",
            "constant_pad_nd",
            "stack",
            "clone",
        }
        assert banned & names.keys() == set()
        # Each original parameter gets a view of its unit's gradient.
        assert names.get("split_with_sizes", 0) == (7 if use_orig_params else 0)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gather_copies_only_its_own_shard(use_orig_params: bool) -> None:
    for _, written in run_ranks(
        2, operations_of_a_step, use_orig_params=use_orig_params, environment=MESSAGES
    ):
        assert sorted(written["copy_"]) == [ROOT_S] + [BLOCK_S] * 11


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_are_copied_once_and_divided_as_shards(use_orig_params: bool) -> None:
    elements = 6 + 6 + 54 + 9 + 54 + 6, 36 + 6 + 18 + 3  # without padding
    for _, written in run_ranks(
        2, operations_of_a_step, use_orig_params=use_orig_params, environment=MESSAGES
    ):
        assert sorted(written["_foreach_copy_"]) == [elements[1]] + [elements[0]] * 6
        assert sorted(written["div_"]) == [ROOT_S] + [BLOCK_S] * 6
        assert max(written["zero_"]) <= 19  # gaps between parameters, never a buffer


def test_gather_casts_the_shard_before_sending() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for _, written in run_ranks(
        2, operations_of_a_step, mixed_precision=precision, environment=MESSAGES
    ):
        assert (
            sorted(n for n in written["_to_copy"] if n in (ROOT_S, BLOCK_S))
            == [ROOT_S] + [BLOCK_S] * 11
        )
        assert max(written["_to_copy"]) == BLOCK_S
        assert sorted(written["copy_"]) == [ROOT_S] + [BLOCK_S] * 11


# -- one rank


class Table(nn.Module):
    """A small parameter and one with its own hook."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = (
            nn.Parameter(torch.zeros(LARGE, 1)),
            nn.Parameter(torch.zeros(WIDTH)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias * (self.table + 1).mean()


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1)
def test_one_rank_copies_nothing_and_parameters_alias_the_shard(
    use_orig_params: bool,
) -> None:
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
        assert group.resident_nbytes == 0
        places = group.store.places(shard)[:-1]
        assert [param.data_ptr() for param in group.unsharded_params] == [
            views[0].data_ptr() for views in places
        ]


@on_ranks(1)
def test_one_rank_passes_on_the_gradients_of_autograd() -> None:
    model = wrapped(module=nn.Sequential(Block(), Table(), Block()), use_orig_params=True)
    made: dict[int, torch.Tensor | None] = {}
    for group in model._runtime.groups:
        for (sharded_param, _), param in zip(
            group.store.sharded_params, group.unsharded_params, strict=True
        ):
            param.register_post_accumulate_grad_hook(
                lambda param, sharded_param=sharded_param: made.update(
                    {id(sharded_param): param.grad}
                )
            )
    with Operations() as seen:
        model(torch.ones(2, WIDTH)).pow(2).mean().backward()
    parameters = list(model.parameters())
    assert len(parameters) == 14
    assert made.keys() == {id(parameter) for parameter in parameters}
    assert all(parameter.grad is made[id(parameter)] for parameter in parameters)
    assert {"copy_", "_foreach_copy_", "div_"} & seen.names.keys() == set()


# -- memory in flight


@dataclasses.dataclass
class Peak:
    """The most that was resident at once in a step, without the root."""

    units: int = 0
    buffers: int = 0  # of gradients, received or in reduction
    reducing: int = 0
    nbytes: int = 0


class Wide(nn.Module):
    """A unit whose parameter has its own hook, so that its buffer fills while backward is still
    inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, LARGE // WIDTH + 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(x).mean()


def peaks(num_steps: int, block: type[nn.Module] = Block, **options: Any) -> list[Peak]:
    module = Model()
    module.blocks = nn.Sequential(*(block() for _ in range(BLOCKS)))
    model, peak = (
        wrapped(module=module, auto_wrap_policy=ModuleWrapPolicy({block}), **options),
        Peak(),
    )
    units = [unit for unit in model._runtime.units if not unit.is_root]
    groups = [group for unit in units for group in unit.groups]

    def look(*_: object) -> None:
        peak.units = max(peak.units, sum(unit.residency is not Residency.SHARDED for unit in units))
        peak.buffers = max(
            peak.buffers,
            sum(group.resident_nbytes > group.memory.resident_nbytes for group in groups),
        )
        peak.reducing = max(
            peak.reducing, sum(group.gradients.reduction is not None for group in groups)
        )
        peak.nbytes = max(peak.nbytes, sum(group.resident_nbytes for group in groups))

    for group in groups:
        for name in ("unshard", "wait_for_unshard"):
            call_also(group, name, look)
        for name in ("take_large", "collect", "start_reduction"):
            call_also(group.gradients, name, look)
    for unit in units:
        unit.module.up.register_forward_hook(look)
        unit.module.up.register_full_backward_hook(look)
    found = []
    for _ in range(num_steps):
        peak.units = peak.buffers = peak.reducing = peak.nbytes = 0
        step(model)
        look()
        assert sum(group.resident_nbytes for group in groups) == 0
        found.append(dataclasses.replace(peak))
    return found


FULL_NBYTES = 4 * 2 * BLOCK_S  # of a gathered block, and of a reduce buffer


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_at_most_two_units_and_one_reduce_buffer_in_every_step(
    use_orig_params: bool,
) -> None:
    for first, *later in run_ranks(2, peaks, 20, use_orig_params=use_orig_params):
        assert first == Peak(1, 1, 1, 2 * FULL_NBYTES)  # there is no order yet to prefetch by
        assert later == [Peak(2, 1, 1, 3 * FULL_NBYTES)] * 19


def test_limit_all_gathers_false_allows_two_reduce_buffers() -> None:
    for _, *later in run_ranks(2, peaks, 20, limit_all_gathers=False):
        assert later == [Peak(2, 2, 2, 4 * FULL_NBYTES)] * 19


@pytest.mark.parametrize(("limit", "buffers"), [(True, 1), (False, 2)])
def test_large_parameters_respect_the_limit_of_reduce_buffers(limit: bool, buffers: int) -> None:
    for _, *later in run_ranks(2, peaks, 6, Wide, limit_all_gathers=limit):
        assert all(peak == later[0] for peak in later)
        assert (later[0].units, later[0].buffers, later[0].reducing) == (2, buffers, buffers)


def test_without_prefetching_one_unit_is_resident_at_a_time() -> None:
    for found in run_ranks(2, peaks, 3, backward_prefetch=None):
        assert [peak.units for peak in found] == [1] * 3


def test_shard_grad_op_keeps_all_units_and_one_reduce_buffer() -> None:
    for found in run_ranks(2, peaks, 3, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        assert [(peak.units, peak.reducing) for peak in found] == [(BLOCKS, 1)] * 3


# -- checks before a forward


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_units_are_checked_one_by_one_only_after_external_changes(
    use_orig_params: bool,
) -> None:
    """Return how often all units were checked one by one, in steps after the changes in the
    comments."""
    model = wrapped(use_orig_params=use_orig_params)
    parameter = max(
        model.parameters(), key=torch.Tensor.numel
    )  # with use_orig_params=True some are empty
    found = []
    with mock.patch.object(
        Checks, "_check_units", autospec=True, side_effect=Checks._check_units
    ) as looks:

        def train() -> None:
            looks.reset_mock()
            step(model)
            found.append(looks.call_count)

        train()  # the first
        train()  # nothing
        model.zero_grad()
        train()  # gradients set to None
        parameter.requires_grad_(False)
        train()  # a toggle
        train()
        parameter.data = parameter.data.clone()
        train()  # other memory
        train()
    assert found == [1, 0, 0, 1, 0, 1, 0]
