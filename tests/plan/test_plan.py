"""Plans, beside steps that are measured and sizes that are known."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_compat
from fsdp_compat import (
    CPUOffload,
    CPUOffloadPolicy,
    Plan,
    ShardingStrategy,
    UsageError,
    fully_shard,
    plan,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.checkpoint.tools.program import run
from tests.support.live_bytes import LiveBytes, release_spare_pages, tensors_alive
from tests.support.ranks import on_ranks, run_ranks

DIM, LAYERS, BATCH = 96, 4, 16
LARGE_BATCH = 512  # gloo does not allocate a sum in flight, as other backends do


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def flat(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    return FSDP(model, group, auto_wrap_policy="auto", use_orig_params=True)


def rows(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def planned(wrap: Callable[..., nn.Module] | None = flat, ranks: int = 2, **arguments: Any) -> Plan:
    return plan(on_meta(), ranks, torch.zeros(BATCH, DIM), wrap=wrap, **arguments)


NUMEL = sum(parameter.numel() for parameter in Net().parameters())
BLOCK_NUMEL = sum(parameter.numel() for parameter in Block().parameters())


def _measured_peak(wrap: Callable[..., nn.Module]) -> int:
    """On each rank: the largest peak of the third step on any rank."""
    with mock.patch.dict(os.environ, FSDP_COMPAT_SAME_HOST="counters"):
        others = tensors_alive()
        release_spare_pages()
        model = wrap(Net(), dist.new_group())
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        x = torch.randn(LARGE_BATCH, DIM)
        step()
        step()
        with LiveBytes() as live:
            live.leave_out(others)
            if wrap is rows:  # they view the shard, through storages of their own
                live.leave_out(model.parameters())
            live.forget()
            step()
            return live.peak().nbytes


@pytest.mark.parametrize(("ranks", "wrap"), [(1, flat), (2, rows), (3, flat)])
def test_peak_is_that_of_a_measured_step(ranks: int, wrap: Callable[..., nn.Module]) -> None:
    measured = max(run_ranks(ranks, _measured_peak, wrap))

    x = torch.zeros(LARGE_BATCH, DIM)
    found = plan(on_meta(), ranks, x, wrap=wrap, step=_forward_and_backward)

    assert found.peak.nbytes == pytest.approx(measured, rel=0.02)


def _forward_and_backward(model: nn.Module, batch: Tensor) -> None:
    model(batch).mean().backward()


@pytest.mark.parametrize("wrap", [flat, rows])
def test_state_and_traffic_are_those_of_the_shards(wrap: Callable[..., nn.Module]) -> None:
    found = planned(wrap, 4)

    shards = sum(unit.shard_nbytes for unit in found.units)
    between, after = found.phases["between"].by_kind, found.phases["optimizer"].by_kind
    assert sum(unit.numel for unit in found.units) == NUMEL
    assert NUMEL <= shards < 1.01 * NUMEL + 4096  # 4 bytes over 4 ranks, and padding
    assert between["parameters"] == shards
    assert between["optimizer"] == pytest.approx(2 * shards, rel=0.01)
    assert after["gradients"] == pytest.approx(shards, rel=0.01)
    assert between.get("gathered", 0) == between.get("reducing", 0) == 0
    # All units but the last block and the root are gathered in forward and in backward.
    number, nbytes = found.traffic["shard"]["gather"]
    assert number == 2 * (LAYERS + 1) - 2
    whole = sum(unit.gathered_nbytes for unit in found.units)
    kept = 4 * BLOCK_NUMEL + 4 * (NUMEL - LAYERS * BLOCK_NUMEL)
    assert nbytes == pytest.approx((2 * whole - kept) * 3 / 4, rel=0.01)
    assert found.traffic["shard"]["reduce"][0] == LAYERS + 1


def test_memory_counts_a_storage_once_and_forgets_it() -> None:
    def step(model: nn.Module, batch: Tensor) -> None:
        one = torch.empty(1 << 22, device=batch.device)
        view = one[10:].view(2, -1)
        two = torch.empty(1 << 20, dtype=torch.uint8, device=batch.device)
        one.untyped_storage().resize_(0)
        del two, view
        three = torch.empty(1 << 21, device=batch.device)
        del three

    found = planned(step=step)
    assert found.peak.nbytes == found.phases["between"].nbytes + (4 << 22) + (1 << 20)
    activations = BATCH * DIM * 4 + (4 << 22) + (1 << 20)
    assert found.peak.by_kind["activations"] == activations


def test_plan_leaves_the_model_alone_and_says_what_it_assumed() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x if x.sum().item() > 0 else x * 2

    with torch.device("meta"):
        model = Asks()
    found = plan(model, 2, {"x": torch.zeros(2, 8)})

    assert [name for name, _ in model.named_parameters()] == ["linear.weight", "linear.bias"]
    assert not dist.is_initialized()
    [(line, value)] = found.assumed.items()
    assert re.search(r"test_plan.py:\d+ in forward", line) and value == 1.0
    assert line in str(found)


def test_attention_is_fused() -> None:
    length = 256

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return nn.functional.scaled_dot_product_attention(x, x, x)

    with torch.device("meta"):
        model = Attends()
    before = nn.functional.scaled_dot_product_attention
    found = plan(model, 2, torch.zeros(1, 4, length, 16))

    assert found.peak.nbytes < 4 * 4 * length * length  # that of one matrix of weights
    assert nn.functional.scaled_dot_product_attention is before


def test_a_plan_fits_where_its_peak_and_the_reserve_do() -> None:
    sizes = {
        strategy: planned(None, 4, auto_wrap_policy="auto", sharding_strategy=strategy, reserve=0)
        for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD)
    }
    larger, smaller = sizes.values()
    assert smaller.fits(smaller.peak.nbytes) and not larger.fits(smaller.peak.nbytes)
    assert not planned(flat, 4).fits(smaller.peak.nbytes)  # without the default reserve


def offloaded(model: nn.Module) -> nn.Module:
    return fully_shard(model, offload_policy=CPUOffloadPolicy())


BAD = [
    ({"model": Net()}, "on the meta device", "cpu"),
    ({"wrap": flat, "auto_wrap_policy": "auto"}, "exclude each other", "auto_wrap_policy"),
    ({"world_size": 0}, "needs a rank", "world_size=0"),
    ({"cpu_offload": CPUOffload(True)}, "cannot be simulated", "leave out cpu_offload"),
    ({"wrap": offloaded}, "cannot be planned", "leave it out"),
]


@pytest.mark.parametrize(("arguments", "first", "then"), BAD, ids=[case[1] for case in BAD])
def test_bad_input(arguments: dict[str, Any], first: str, then: str) -> None:
    given = {"model": on_meta(), "world_size": 2, "batch": torch.zeros(BATCH, DIM), **arguments}
    with pytest.raises(UsageError, match=f"(?s){first}.*{then}"):
        plan(**given)
    assert not dist.is_initialized()


@on_ranks(2)
def test_a_process_group_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a process without a process group"):
        fsdp_compat.plan(on_meta(), 2, torch.zeros(BATCH, DIM))


JOB = """
import torch
from torch import nn

def job():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return {"model": model, "batch": torch.zeros(4, 8)}

def number():
    return 3
"""


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "its_job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    cases = (("its_job:job", 0), ("its_job:other", 2), ("its_job", 2), ("its_job:number", 1))
    said = ""
    for function, status in cases:
        result = run("plan", function, "--world-size", "8", "--plot", "plan.png")
        assert result.exit_code == status
        said += result.output

    assert "One of 8 ranks" in said and "module:function" in said
    assert "What its_job:number returns cannot be used." in said
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
