"""Streams, threads and memory of a device: streams wait for each other where they must, and the CPU
never waits.

With ``--gpu-device cpu`` there are no streams or threads, so the tests only check that they run.
test_order.py shows which waits are missing."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_compat._comm.backend import BackendTransport
from fsdp_compat._comm.mesh import Axis
from fsdp_compat._engine import group as engine_group
from tests.gpu.test_training import Wide, wide_stack
from tests.support import emulated
from tests.support.live_bytes import LiveBytes
from tests.support.models import Block, chain
from tests.support.parity import both_forms
from tests.support.ranks import close_pool, on_ranks
from tests.support.twin import Step, Twin, device_named, group_of, twin_of

pytestmark = pytest.mark.gpu

BOTH = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# -- streams


@contextlib.contextmanager
def stream_between(stream: torch.Stream) -> Iterator[None]:
    """Inside the context ``stream`` is the current stream. Its work runs after all work enqueued
    before, and before all work enqueued later."""
    before = torch.accelerator.current_stream()
    stream.wait_stream(before)
    with stream:
        yield
    before.wait_stream(stream)


def streams(
    device: torch.device, number: int
) -> list[Callable[[], contextlib.AbstractContextManager[object]]]:
    if device.type == "cpu":
        return [contextlib.nullcontext] * number
    return [functools.partial(stream_between, torch.Stream(device)) for _ in range(number)]


wide_twin = functools.partial(twin_of, build=wide_stack, units=(Wide,))

on_the_device = on_ranks(1)
both_strategies = pytest.mark.parametrize("strategy", BOTH)


@both_strategies
@pytest.mark.parametrize("order", ["112233", "122311"])
@on_the_device
def test_forward_and_backward_on_streams_of_their_own(
    device: str, order: str, strategy: ShardingStrategy
) -> None:
    """order: the streams of a forward, its backward, the next forward, ..."""
    with twin_of(device, sharding_strategy=strategy) as twin:
        named = dict(zip("123", streams(twin.device, 3), strict=True))
        for forward, backward in zip(order[::2], order[1::2], strict=True):
            where = {"forward_in": named[forward], "backward_in": named[backward]}
            twin.step(Step(**where))
            twin.step(Step(backwards=2, **where))


# -- the backend itself, on one rank


@pytest.fixture
def real_device(device: str) -> str:
    if device.startswith(emulated.NAME):
        pytest.skip("the emulated device has no backend, and memory of other kernels")
    return device


@on_the_device
def test_the_backend_transfers_the_given_tensors(real_device: str) -> None:
    place = device_named(real_device)
    with group_of(1, place):
        comm = BackendTransport(Axis(dist.group.WORLD, 0, (0,)), place)
        own, full = torch.arange(1024.0, device=place), torch.zeros(1024, device=place)
        comm.end_gather(comm.begin_gather(own, full, [full], comm.new_tag()), "parameters")
        assert torch.equal(full, own)
        summed = comm.end_reduce(
            comm.begin_reduce(full, [full], comm.new_tag()), full, torch.float32, "gradients", None
        )
        full.zero_()
        assert torch.equal(summed, own)
        pending = comm.begin_all_reduce(summed, comm.new_tag())
        comm.end_all_reduce(
            comm.continue_all_reduce(pending, summed, 0, "gradients"), summed, "gradients"
        )
        assert torch.equal(summed, own)
        assert torch.equal(comm.gather_now(own, "a test"), own)
        assert comm.gather_objects({"rank": 0}) == [{"rank": 0}]


@both_forms
@both_strategies
@on_the_device
def test_one_rank_trains_over_the_backend_itself(
    real_device: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    def itself(axis: Axis, device: torch.device) -> BackendTransport:
        return BackendTransport(Axis(dist.group.WORLD, 0, (0,)), device)

    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    with (
        mock.patch.object(engine_group, "communicator", itself),
        wide_twin(real_device, 1, mixed_precision=MIXED, **options) as twin,
    ):
        for _ in range(4):
            twin.step()
        assert {type(group.shard) for group in twin.model._runtime.groups} == {BackendTransport}


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


class ThroughTheCpu(Block):
    """A block that computes on the device, then on the CPU, and returns to the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slowly.apply(super().forward(x).cpu()).to(x.device)


class ToTheCpu(Block):
    """A block whose output is on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slowly.apply(super().forward(x).cpu())


class Parallel(nn.Module):
    """Two units of which neither feeds the other; the later one waits for the CPU in backward."""

    def __init__(self, later: type[Block]) -> None:
        super().__init__()
        self.early, self.later = Block(), later()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.early(x)
        return early + self.later(x).to(x.device)


PARTS = {
    "the later of two parallel units goes through the CPU": functools.partial(
        Parallel, ThroughTheCpu
    ),
    "the later of two parallel units ends on the CPU": functools.partial(Parallel, ToTheCpu),
    "units in turn go through the CPU": functools.partial(
        chain, Block, ThroughTheCpu, Block, ThroughTheCpu
    ),
}


@pytest.fixture
def own_processes() -> Iterator[None]:
    """A process that has read freed memory can no longer use the device."""
    yield
    close_pool()


@pytest.mark.parametrize("which", list(PARTS))
@on_the_device
def test_parts_of_the_graph_on_the_cpu(device: str, own_processes: None, which: str) -> None:
    with twin_of(device, 8, PARTS[which]) as twin:
        for _ in range(3):
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


@pytest.mark.parametrize("mixed", [False, True])
@both_forms
@pytest.mark.parametrize("strategy", [*BOTH, ShardingStrategy.NO_SHARD])
@on_the_device
def test_no_step_makes_the_cpu_wait(
    device: str, strategy: ShardingStrategy, use_orig_params: bool, mixed: bool
) -> None:
    precision = MIXED if mixed else None
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    with wide_twin(device, mixed_precision=precision, **options) as twin:
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
    with wide_twin(real_device, use_orig_params=use_orig_params) as twin:
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
