"""Collectives in two stages along an axis of 2 hosts of 2 ranks: sums in the defined order, bytes
between hosts, parity of both front ends, and what happens when a rank or a host is killed."""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fsdp_compat import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.collectives import all_reduced, connect, counting_sends, gathered, reduced
from tests.support.fully_sharded import OURS, pair_of, shard_all
from tests.support.hosts import BY_HOST, BY_PLACE, hosts
from tests.support.live_bytes import LiveBytes
from tests.support.models import Block
from tests.support.pairwise import each_value
from tests.support.parity import accumulates, make_pair, whole
from tests.support.programs import launch
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import COPIED, MESSAGES, copied_or_sent

ORDERS = pytest.mark.parametrize("of_ranks", [BY_HOST, BY_PLACE], ids=["by host", "by place"])
NUMELS = 1, 1_003, 70_001  # of a shard


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def in_two_stages(parts: Sequence[torch.Tensor], of_ranks: Sequence[int]) -> torch.Tensor:
    """Return the sum in fp32: within each host, rounded, then over hosts."""
    total = torch.zeros(parts[0].shape)
    for host in sorted(set(of_ranks)):
        of_host = torch.zeros(parts[0].shape)
        for part, its_host in zip(parts, of_ranks, strict=True):
            if its_host == host:
                of_host += part
        total += of_host.to(parts[0].dtype)
    return total


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(4)
def test_collectives_are_right_in_the_defined_order(
    of_ranks: Sequence[int], dtype: torch.dtype
) -> None:
    with hosts(of_ranks):
        comm = connect()
        rank, ranks, divisor = comm.rank, comm.ranks, torch.tensor(3.0)
        tags = [comm.new_tag("") for _ in NUMELS]
        for numel, tag in [*zip(NUMELS, tags, strict=True)] * 2:
            shards = [values(r, numel, torch.float32) for r in range(ranks)]
            full = gathered(comm, shards[rank], tag, dtype=dtype)
            assert torch.equal(full, torch.cat(shards).to(dtype))
            assert torch.equal(comm.gather_now(shards[rank], "a test"), torch.cat(shards))

            buffers = [values(r, ranks * numel, dtype) for r in range(ranks)]
            expected = in_two_stages(buffers, of_ranks) / divisor
            total = reduced(comm, buffers[rank], tag, divisor=divisor)
            assert torch.equal(total, expected.chunk(ranks)[rank])
            total = all_reduced(comm, buffers[rank].clone(), tag, divisor=divisor)
            assert torch.equal(total, expected.to(dtype))


@on_ranks(4)
def test_memory_that_a_host_shares_is_freed_when_its_ranks_have_read_it() -> None:
    with hosts(BY_HOST):
        comm, full = connect(), torch.ones(4 * 70_000)
        tags = [comm.new_tag("") for _ in range(6)]
        for collective, values in (
            (gathered, full.chunk(4)[comm.rank]),
            (reduced, full),
            (all_reduced, full),
        ):
            with LiveBytes() as live:
                for tag in tags:
                    collective(comm, values, tag, settle=False)
            blocks = [each for each in live.peak().held if each.what.startswith("a block")]
            assert sum(each.number for each in blocks) <= 2, blocks
        comm.settle("x")


# -- both front ends


def _blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)))


@each_value
@ORDERS
@copied_or_sent
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:4], ids=lambda strategy: strategy.name)
@on_ranks(4)
def test_flat_front_end_trains_as_unsharded(
    strategy: ShardingStrategy, of_ranks: Sequence[int], environment: dict[str, str]
) -> None:
    with hosts(of_ranks):
        replicas = 2 if strategy is ShardingStrategy.HYBRID_SHARD else 1
        pair = make_pair(_blocks, replicas=replicas, sharding_strategy=strategy)
        for pattern in ("s", "ns"):
            pair.step(functools.partial(accumulates, pattern), as_a_user=True)
        before = {name: value.clone() for name, value in pair.model.state_dict().items()}
        pair.step()
        pair.model.load_state_dict(before)
        assert all(torch.equal(before[n], v) for n, v in pair.model.state_dict().items())
        config = FullStateDictConfig(rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(
            pair.model, StateDictType.FULL_STATE_DICT, config
        ):
            of_rank_0 = pair.model.state_dict()
        assert of_rank_0.keys() == (before.keys() if dist.get_rank() == 0 else set())


@each_value
@ORDERS
@copied_or_sent
@on_ranks(4)
def test_fully_shard_trains_as_unsharded(
    of_ranks: Sequence[int], environment: dict[str, str]
) -> None:
    with hosts(of_ranks):
        pair = pair_of(_blocks, functools.partial(shard_all, library=OURS))
        for _ in range(2):
            pair.step()
        before = {name: whole(value).clone() for name, value in pair.model.state_dict().items()}
        pair.step()
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(pair.model, dict(before), options=options)
        for name, value in pair.model.state_dict().items():
            assert torch.equal(whole(value), before[name])


# -- ranks that use different units


class Branches(nn.Module):
    """Each rank uses other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rank = int(x[0, 0] * 1000) % 4  # of the batch
        for index in ((0, 3), (1, 3), (0, 1, 2), (2,))[rank]:
            x = self.blocks[index](x)
        return x


@each_value
@ORDERS
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=lambda s: s.name
)
@on_ranks(4)
def test_ranks_may_use_different_units(of_ranks: Sequence[int], strategy: ShardingStrategy) -> None:
    with hosts(of_ranks):
        pair = make_pair(Branches, (Block,), sharding_strategy=strategy, allow_unused_units=True)
        for _ in range(3):
            pair.step(zeros=True)


# -- overlap


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(4)
def test_gradients_leave_the_host_before_the_next_unit_computes(strategy: str) -> None:
    """The order in which layers compute their backward and sums leave the host."""
    events, send = list[str](), dist.ProcessGroup.send

    def notes(self: Any, tensors: list[Tensor], rank: int, tag: int) -> Any:
        if tensors[0].is_floating_point() and tensors[0].numel() > 2:
            events.append("sends")
        return send(self, tensors, rank, tag)

    layers = [nn.Linear(8, 8) for _ in range(3)]
    for layer in layers:
        layer.register_full_backward_pre_hook(lambda *_: events.append("computes"))
    with hosts(BY_HOST), mock.patch.object(dist.ProcessGroup, "send", notes):
        model = FullyShardedDataParallel(
            nn.Sequential(*layers),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=ShardingStrategy[strategy],
        )
        loss = model(torch.ones(2, 8)).sum()
        events.clear()
        loss.backward()
    assert [event for event, _ in itertools.groupby(events)] == ["computes", "sends"] * 3


# -- bytes


def _sent_in_a_step(of_ranks: Sequence[int], strategy: ShardingStrategy) -> tuple[int, int]:
    """Return the bytes of the model's units, padded, and those that this rank has sent."""
    with hosts(of_ranks):
        model = FullyShardedDataParallel(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=strategy,
        )
        x = torch.ones(2, 64)
        model(x).sum().backward()
        with counting_sends() as sent:
            model(x).sum().backward()
        return 6 * 4 * (64 * 64 + 64), sum(sent)


@pytest.mark.parametrize("strategy, times", [("FULL_SHARD", 17 / 12), ("NO_SHARD", 1)])
def test_every_value_leaves_its_host_once(strategy: str, times: float) -> None:
    """With 2 hosts, half of a unit for each all-gather and each reduce-scatter."""
    found = run_ranks(4, _sent_in_a_step, BY_HOST, ShardingStrategy[strategy])
    for of_host in (found[:2], found[2:]):
        sent = sum(nbytes for _, nbytes in of_host)
        assert sent == pytest.approx(times * of_host[0][0], rel=0.05)


# -- ranks that are killed

LOST = """
import os, signal, sys, time, torch, torch.distributed as dist
from fsdp_compat import FullyShardedDataParallel, ShardingStrategy
from tests.support.hosts import BY_HOST, hosts
from torch import nn

rank, path, strategy, lost = int(sys.argv[1]), sys.argv[2], sys.argv[3], eval(sys.argv[4])
os.environ["FSDP_COMPAT_SAME_HOST"] = sys.argv[5]
dist.init_process_group("gloo", store=dist.FileStore(path, 4), rank=rank, world_size=4)
with hosts(BY_HOST):
    model = FullyShardedDataParallel(
        nn.Linear(300, 300), sharding_strategy=ShardingStrategy[strategy]
    )
    x = torch.ones(2, 300)
    model(x).sum().backward()
    if rank in lost:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    for _ in range(2):
        try:
            model(x).sum().backward()
        except Exception as error:
            print(type(error).__name__, str(error).replace(chr(10), " "))
    print(time.monotonic() - started)
"""


def test_survivors_of_a_killed_rank_or_host_fail_soon_and_for_good(tmp_path: Path) -> None:
    cases = [
        ("FULL_SHARD", (3,), COPIED),
        ("FULL_SHARD", (2, 3), MESSAGES),
        ("NO_SHARD", (0,), COPIED),
        ("NO_SHARD", (0,), MESSAGES),
    ]
    arguments = [
        (rank, tmp_path / f"{number}", strategy, lost, environment["FSDP_COMPAT_SAME_HOST"])
        for number, (strategy, lost, environment) in enumerate(cases)
        for rank in range(4)
    ]
    ended = launch(LOST, arguments, tmp_path)
    for number, (strategy, lost, _) in enumerate(cases):
        for rank, each in enumerate(ended[4 * number : 4 * number + 4]):
            if rank in lost:
                assert each.code == -signal.SIGKILL
                continue
            assert each.code == 0, each.err
            first, second, seconds = each.out.splitlines()
            assert first.startswith("StateError Waiting for "), first
            assert "stays failed" in second
            assert float(seconds) < 15, (strategy, lost, rank)
