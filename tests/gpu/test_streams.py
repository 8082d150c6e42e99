"""Sharded models train as the unsharded one on a device with streams, where transfers take time and
early reads return NaN; the CPU never waits, and memory does not grow.

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
    CheckpointWrapper,
    apply_activation_checkpointing,
)

from fsdp_compat import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from tests.support import emulated
from tests.support.live_bytes import LiveBytes
from tests.support.models import Block, Inner, Large, Outer, Stack, chain
from tests.support.parity import both_forms
from tests.support.ranks import close_pool, on_ranks
from tests.support.twin import Step, Twin, twin_of

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRECISIONS = {
    "fp32": None,
    "bf16 summed in fp32": MixedPrecision(param_dtype=BF16, reduce_dtype=FP32),
    "bf16": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16),
    "fp16 summed in fp32": MixedPrecision(param_dtype=FP16, reduce_dtype=FP32),
}
HYBRID = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
STRATEGIES = [ShardingStrategy[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")]

large_stack = functools.partial(chain, *[Large] * 4)
nested = functools.partial(Stack, 2, Outer)
large_twin = functools.partial(twin_of, build=large_stack, units=(Large,))
on_the_device = on_ranks(1)


def checkpointed(module: nn.Module) -> nn.Module:
    apply_activation_checkpointing(module, check_fn=lambda child: isinstance(child, Block))
    return module


# -- training


def trains(*arguments: Any, how: Step | None = None, **options: Any) -> None:
    """Take steps with a twin: see ``twin_of``."""
    with twin_of(*arguments, **options) as twin:
        for _ in range(4):
            twin.step(how)


@pytest.mark.parametrize("ranks", [1, 8])
@both_forms
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize(
    ("strategy", "offload"), [*((each, False) for each in STRATEGIES), (STRATEGIES[0], True)]
)
@on_the_device
def test_strategies_in_all_precisions(
    device: str,
    strategy: ShardingStrategy,
    offload: bool,
    precision: str,
    use_orig_params: bool,
    ranks: int,
) -> None:
    trains(
        device,
        ranks,
        sharding_strategy=strategy,
        cpu_offload=CPUOffload(offload_params=offload),
        mixed_precision=PRECISIONS[precision],
        use_orig_params=use_orig_params,
    )


PREFETCHES = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None
OFFLOAD = CPUOffload(offload_params=True)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        *((8, {"sharding_strategy": each, "mesh": (2, 4)}) for each in HYBRID),
        *(
            (8, {"build": build, "backward_prefetch": prefetch, "limit_all_gathers": limit})
            for build in (nested, large_stack)
            for prefetch in PREFETCHES
            for limit in (True, False)
        ),
        *(
            (8, {"how": Step(backwards=3), "cpu_offload": offload, "use_orig_params": original})
            for offload in (None, OFFLOAD)
            for original in (True, False)
        ),
        *((1, {"how": Step(max_norm=0.05), "use_orig_params": each}) for each in (True, False)),
        *(
            (8, {"mixed_precision": PRECISIONS[low], "units": (unit,), "prepare": checkpointed})
            for low in ("fp32", "bf16 summed in fp32")
            for unit in (CheckpointWrapper, Block)
        ),
    ],
)
@on_the_device
def test_other_settings(device: str, ranks: int, options: dict[str, Any]) -> None:
    if "build" in options:
        options["units"] = (Outer, Inner, Large)
    trains(device, ranks, **options)


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
    trains(device, 8, build)


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


@pytest.mark.parametrize("precision", ["fp32", "bf16 summed in fp32"])
@both_forms
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_the_device
def test_no_step_makes_the_cpu_wait(
    device: str, strategy: ShardingStrategy, use_orig_params: bool, precision: str
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    with large_twin(device, mixed_precision=PRECISIONS[precision], **options) as twin:
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


# -- memory


def bytes_of_steps(twin: Twin) -> set[tuple[int, int]]:
    """Return the bytes at the peak and at the end of 20 steps, beyond those before the first."""
    (x,), found = twin.inputs(), set()
    with LiveBytes() if twin.device.type == "cpu" else contextlib.nullcontext() as live:
        now = live.now if live else torch.accelerator.memory_allocated
        before = now()
        for _ in range(20):
            live.forget() if live else torch.accelerator.reset_peak_memory_stats()
            twin.quiet_steps([x])
            peak = live.peak().nbytes if live else torch.accelerator.max_memory_allocated()
            found.add((peak - before, now() - before))
    return found


@both_forms
@on_the_device
def test_the_peak_is_the_same_in_every_step_and_that_of_two_units_and_two_reduce_buffers(
    real_device: str, use_orig_params: bool
) -> None:
    with large_twin(real_device, use_orig_params=use_orig_params) as twin:
        nbytes = sum(p.nbytes for p in twin.plain[0].parameters())
        twin.quiet_steps(twin.inputs(3))
        ((peak, left),) = bytes_of_steps(twin)
        assert abs(left) < nbytes / 16
        gradient, shards = nbytes / 2, (4 + 4) * nbytes / 8  # of all units, and in flight
        assert 3 * nbytes < peak < 4 * nbytes + gradient + shards


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
