"""Units whose all-gather output is every rank's shard, mapped: they train as units that copy, and
nothing is left mapped."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import resource
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy, StateError
from fsdp_compat._state.units import model_unit_of
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.collectives import Operations, counting_sends
from tests.support.mapped import (
    ForksWhileMapping,
    fork_and_end,
    low_address_space,
    no_list_of_pages,
    no_more,
    num_mapped,
)
from tests.support.models import Block
from tests.support.parity import Pair, make_pair
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import COPIED, MAPPED, MESSAGES

WIDTH = 48


class Wide(nn.Sequential):
    """Shards of several pages on each rank."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__(*(Block(WIDTH) for _ in range(num_blocks)), nn.Linear(WIDTH, WIDTH))


class LargeBlock(nn.Sequential):
    """On two ranks, each has one of the large weights in its shard as a whole."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 1408), nn.Tanh(), nn.Linear(1408, WIDTH))


class Large(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(LargeBlock(), Block(WIDTH), LargeBlock())


def wide_batch(generator: torch.Generator) -> Tensor:
    return torch.randn(3, WIDTH, generator=generator)


def wide(num_blocks: int = 3) -> FSDP:
    return FSDP(Wide(num_blocks), auto_wrap_policy=ModuleWrapPolicy({Block}))


def wide_pair(steps: int = 0) -> Pair:
    """Return a pair that has made some steps."""
    pair = make_pair(Wide, batch=wide_batch)
    for _ in range(steps):
        pair.step()
    return pair


# -- training


def train(
    make: Callable[[], nn.Module], strategy: str, original: bool, mixed: bool
) -> list[Tensor]:
    """Losses and parameters of five steps, one of which only evaluates. mixed: in bfloat16, but for
    evaluation."""
    torch.manual_seed(0)
    before = num_mapped()
    options: dict[str, Any] = {}
    if mixed:
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    model = FSDP(
        make(),
        auto_wrap_policy=ModuleWrapPolicy({Block, LargeBlock}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        **options,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for step in range(5):
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (step + 1 + dist.get_rank())
        if step == 2:
            with torch.no_grad():
                found.append(model.eval()(x))
            model.train()
            continue
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    found += [parameter.detach().clone() for parameter in model.parameters()]
    assert (num_mapped() > before) == (os.environ["FSDP_COMPAT_SAME_HOST"] == "mapped")
    return found


class Writes(nn.Module):
    """Forward writes to the parameters in every way that torch allows, some past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block, self.tokens = Block(WIDTH), nn.Embedding(70, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.5)
        self.last.weight.data[0, 0] = 3.0
        x = self.block(self.first(x).tanh()) + self.tokens(torch.arange(4))
        return F.linear(x, self.last.weight * 2, self.last.bias)


@pytest.mark.parametrize(
    ("ranks", "make", "strategy", "original", "mixed"),
    [
        (2, Wide, "FULL_SHARD", False, False),
        (4, Wide, "HYBRID_SHARD", True, False),
        (2, Writes, "FULL_SHARD", False, False),
        (3, Writes, "SHARD_GRAD_OP", True, False),
        (2, Wide, "FULL_SHARD", True, True),
        (2, Large, "SHARD_GRAD_OP", True, True),
    ],
)
def test_training_is_bit_equal_to_copies_and_messages(
    ranks: int, make: Callable[[], nn.Module], strategy: str, original: bool, mixed: bool
) -> None:
    full, case = {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}, (make, strategy, original, mixed)
    one, *others = (
        run_ranks(ranks, train, *case, environment=MAPPED | full | how)
        for how in ({}, COPIED, MESSAGES)
    )
    for other in others:
        for rank in range(ranks):
            assert all(map(torch.equal, one[rank], other[rank]))


@on_ranks(2, environment=MAPPED)
def test_forward_sends_and_copies_nothing() -> None:
    model = wide()
    for _ in range(2):
        with counting_sends() as sent, Operations() as seen:
            output = model(torch.ones(2, WIDTH))
        output.sum().backward()
    assert (sum(sent), max(seen.written["copy_"], default=0)) == (0, 0)


@on_ranks(2, environment=MAPPED | {"FSDP_USE_FULL_PREC_IN_EVAL": "1"})
def test_evaluation_in_full_precision_gathers_nothing() -> None:
    policy, mixed = ModuleWrapPolicy({Block}), MixedPrecision(torch.bfloat16, torch.float32)
    model, x = FSDP(Wide(), auto_wrap_policy=policy, mixed_precision=mixed), torch.ones(2, WIDTH)
    model(x).sum().backward()
    model.eval()
    with torch.no_grad(), torch.profiler.profile() as profile:
        assert model(x).dtype == torch.float32
    assert not [row for row in profile.key_averages() if row.key.endswith("::begin_gather")]


# -- ranks that are early and late

SOON = datetime.timedelta(seconds=0.3)


def met(key: str) -> bool:
    """Whether the other rank sets a key of the store soon."""
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(dist.DistStoreError):
        store.wait([key], SOON)
        return True
    return False


def zero(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.data.zero_()


@pytest.mark.parametrize("when", ["early", "late"])
@on_ranks(2, environment=MAPPED)
@torch.no_grad()
def test_shards_are_written_only_between_the_passes_of_all_ranks(when: str) -> None:
    """Rank 0 writes to its shard as soon as its forward has ended, or late, before it begins. Rank
    1 is not in forward then, and computes with the right values."""
    store = dist.distributed_c10d._get_default_store()
    model, x, is_early, seen = wide(1), torch.ones(1, WIDTH), when == "early", [False]
    before = model(x)  # the first forward decides what is mapped, together

    def hook(module: nn.Module, args: Any) -> None:
        if is_early:
            seen[0] = met("written")
        else:
            store.set("entered", "1")

    if dist.get_rank() == 1:
        model.module[1].register_forward_pre_hook(hook)
        found = model(x)
    elif is_early:
        found = model(x)
        zero(model.parameters())
        store.set("written", "1")
    else:
        seen[0] = met("entered")
        zero(model.parameters())
        found = model(x)
    dist.barrier()
    assert not seen[0]
    assert torch.equal(found, before if is_early else model(x))


@on_ranks(2, environment=MAPPED)
def test_a_graph_of_gradients_keeps_the_values_that_it_was_made_with() -> None:
    """Rank 0 writes to its shard as soon as it has the first derivative, and rank 1 computes the
    second one after that."""
    store = dist.distributed_c10d._get_default_store()
    model, found = wide(1), []
    sharded = list(model.parameters())
    for turn in range(2):
        x = torch.ones(1, WIDTH, requires_grad=True)
        [first] = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        if turn == 1 and dist.get_rank() == 0:
            zero(sharded)
            store.set("written", "1")
        elif turn == 1:
            assert met("written")
        found.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
    dist.barrier()
    assert torch.equal(*found)


@on_ranks(2, environment=MAPPED)
def test_other_ranks_read_which_barrier_of_which_pass_a_rank_has_begun() -> None:
    model = wide(1)
    model(torch.ones(1, WIDTH)).sum().backward()
    record = model_unit_of(model)
    assert record is not None
    activity = record.unit.groups[0].shard.activity
    begun = [activity.name_of(tag) for tag in activity.last]
    of_root = "of the root unit (a Wide)"
    assert [name for name in begun if "barrier" in name] == [
        f"the barrier at the {place} of a {direction} {of_root}"
        for direction in ("forward", "backward")
        for place in ("beginning", "end")
    ]


# -- moves of shards


NUM_POINTS = 17  # of a step that maps two shards


def trains_while_it_forks(pause: str | None) -> list[Tensor]:
    """Losses and parameters. In every other step rank 1 forks first, so that all ranks map shards
    anew, and rank 0 forks at the next point of that. pause: None: no rank forks."""
    torch.manual_seed(0)
    before = num_mapped()
    model = wide(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x, found = torch.ones(2, WIDTH) * (1 + dist.get_rank()), []
    for step in range(2 * NUM_POINTS + 3):
        with contextlib.ExitStack() as stack:
            if pause is not None and step % 2 and step < 2 * NUM_POINTS:
                if dist.get_rank() == 1:
                    if step > 1:  # at first, only rank 0's fork calls for new mappings
                        fork_and_end()
                else:
                    forks = ForksWhileMapping(pause)
                    hook = model.module.register_forward_pre_hook(forks.begun)
                    stack.callback(hook.remove)
                    stack.enter_context(forks.at(step // 2))
            optimizer.step()
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
        found.append(loss.detach())
    assert (num_mapped() > before) == (os.environ["FSDP_COMPAT_SAME_HOST"] == "mapped")
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


@functools.cache
def trained_without_forks() -> list[list[Tensor]]:
    return run_ranks(2, trains_while_it_forks, None, environment=MAPPED | MESSAGES)


@pytest.mark.parametrize("pause", ["", "before freezing", "after freezing"])
def test_forks_in_another_thread_change_nothing_wherever_they_come(pause: str) -> None:
    expected = trained_without_forks()
    found = run_ranks(2, trains_while_it_forks, pause, environment=MAPPED)
    for one, other in zip(found, expected, strict=True):
        equal = list(map(torch.equal, one, other))
        assert all(equal), f"other values from step {equal.index(False)} on"


# -- what cannot be mapped


def trains_at_a_limit(limit: int, forks: bool) -> str:
    """The error, if any, of a rank that reaches its limit in training. forks: the other rank does,
    so that its memory has to be opened anew."""
    pair = wide_pair(1)
    with no_more(limit):
        if forks and dist.get_rank() == 0:
            fork_and_end()
        try:
            for _ in range(2):
                pair.step()
        except StateError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("environment", "limit", "named"),
    [
        (MAPPED, resource.RLIMIT_NOFILE, "file descriptors"),
        (MAPPED, resource.RLIMIT_AS, "address space"),
        (MAPPED | COPIED, resource.RLIMIT_NOFILE, "file descriptors"),
    ],
)
def test_a_rank_that_reaches_a_limit_trains_on_or_is_named_with_the_limit(
    environment: dict[str, str], limit: int, named: str
) -> None:
    assert run_ranks(2, trains_at_a_limit, limit, False, environment=environment) == ["", ""]
    for error in run_ranks(2, trains_at_a_limit, limit, True, environment=environment):
        assert f"rank 1 cannot read the memory of rank 0: no more {named}" in error


@pytest.mark.parametrize("obstacle", [low_address_space, no_list_of_pages])
@on_ranks(3, environment=MAPPED)
def test_all_ranks_gather_what_one_rank_cannot_map(
    obstacle: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    before = num_mapped()
    with obstacle():
        pair = wide_pair(2)
    pair.step()
    assert num_mapped() == before


# -- what is left


@on_ranks(2, environment=MAPPED)
def test_nothing_is_left_mapped_after_the_model() -> None:
    before = num_mapped()
    model = wide()
    kept: list[Tensor] = []
    handle = model.module[0].register_forward_pre_hook(
        lambda module, args: kept.append(next(module.parameters()))
    )
    model(torch.ones(2, WIDTH)).sum().backward()
    handle.remove()
    assert num_mapped() > before
    del model, handle
    gc.collect()
    assert kept[0].isfinite().all(), "a parameter that outlives the model"
    kept.clear()
    assert num_mapped() == before


# -- ranks that part


@on_ranks(2, environment=MAPPED)
def test_passes_of_two_models_may_overlap() -> None:
    """A forward in the middle of another model's forward, and backwards in the other order."""
    one, other = wide_pair(), make_pair(functools.partial(Wide, 2), batch=wide_batch)
    x = torch.ones(2, WIDTH) * (1 + dist.get_rank())
    handle = one.model.module[1].register_forward_pre_hook(
        lambda m, a: (a[0] + other.model(x).mean(),)
    )
    loss = one.model(x).sum()
    second = other.model(2 * x).sum()
    second.backward()
    loss.backward()
    handle.remove()
    for pair in (one, other):
        pair.optim.zero_grad()
        pair.step()
