"""Sharded models train as the unsharded one on a device with streams, where transfers take time and
early reads return NaN, and the CPU never waits.

With several ranks this process is rank 0 of a group that moves nothing (tests/support/twin.py);
with one it is all of a real group. With ``--gpu-device cpu`` there are no streams or threads, so
the tests only check that they run. test_order.py shows which waits are missing."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from fsdp_compat import CPUOffload, MixedPrecision, ShardingStrategy
from tests.support import emulated
from tests.support.models import Block, Large, chain
from tests.support.parity import both_forms
from tests.support.ranks import close_pool, on_ranks
from tests.support.twin import twin_of

pytestmark = pytest.mark.gpu


large_stack = functools.partial(chain, *[Large] * 4)
on_the_device = on_ranks(1)


def checkpointed(module: nn.Module) -> nn.Module:
    apply_activation_checkpointing(module, check_fn=lambda child: isinstance(child, Block))
    return module


# -- parts of the graph on the CPU: autograd runs them in another thread


class Slowly(torch.autograd.Function):
    """The identity, with a slow backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)  # lets the other thread get as far as it can
        return grad


class ToTheCpu(Block):
    """A block whose output is on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slowly.apply(super().forward(x).cpu())


class ThroughTheCpu(ToTheCpu):
    """A block that computes on the device, then on the CPU, and returns to the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to(x.device)


class Parallel(nn.Module):
    """Two units of which neither feeds the other; the later one waits for the CPU in backward."""

    def __init__(self, later: type[Block]) -> None:
        super().__init__()
        self.early, self.later = Block(), later()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.early(x)
        return early + self.later(x).to(x.device)


@pytest.fixture
def own_processes() -> Iterator[None]:
    """A process that has read freed memory can no longer use the device."""
    yield
    close_pool()


@pytest.mark.parametrize(
    "build",
    [
        functools.partial(Parallel, ThroughTheCpu),
        functools.partial(Parallel, ToTheCpu),
        functools.partial(chain, Block, ThroughTheCpu, Block, ThroughTheCpu),
    ],
    ids=["later of two goes through the CPU", "later of two ends on the CPU", "units in turn"],
)
@on_the_device
def test_parts_of_the_graph_on_the_cpu(device: str, own_processes: None, build: Any) -> None:
    with twin_of(device, 8, build) as twin:
        for _ in range(4):
            twin.step()


# -- the CPU does not wait


@contextlib.contextmanager
def without_syncs(device: torch.device) -> Iterator[None]:
    """Inside the context any operation that makes the CPU wait for the device raises."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    elif device.type == emulated.NAME:
        with emulated.watching() as recording:
            recording.syncs_allowed = False
            yield
    else:
        yield


@pytest.mark.parametrize("low", [None, MixedPrecision(torch.bfloat16, torch.float32)])
@both_forms
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_the_device
def test_no_step_makes_the_cpu_wait(
    device: str, strategy: str, use_orig_params: bool, low: MixedPrecision | None
) -> None:
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": use_orig_params}
    with twin_of(device, 8, large_stack, (Large,), mixed_precision=low, **options) as twin:
        inputs = twin.inputs(3)
        twin.quiet_steps(inputs)
        with without_syncs(twin.device):
            twin.quiet_steps(inputs)
            with twin.model.no_sync():
                twin.loss(inputs[0]).backward()
            twin.quiet_steps(inputs)
            twin.loss(inputs[0]).backward()
            twin.model.clip_grad_norm_(1.0)
            twin.optim.step()


# -- shards on the CPU


@on_the_device
def test_shards_and_gradients_on_the_cpu_are_in_memory_that_the_device_can_read(
    device: str,
) -> None:
    with twin_of(device, 1, cpu_offload=CPUOffload(offload_params=True)) as twin:
        twin.loss(twin.inputs()[0]).backward()
        for p in twin.model.parameters():
            assert p.device.type == p.grad.device.type == "cpu"
            assert p.is_pinned() == p.grad.is_pinned() == (device != "cpu")
