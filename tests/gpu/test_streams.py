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
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.gpu.test_training import TIMEOUT_S, Wide, WideStack
from tests.support import emulated
from tests.support.live_bytes import LiveBytes
from tests.support.models import Block, Stack
from tests.support.ranks import close_pool, run_ranks
from tests.support.twin import Step, Twin, device_named, group_of

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


def trains_on_streams(device: str, strategy: str, same: bool) -> None:
    place = device_named(device)
    with group_of(8, place):
        policy = ModuleWrapPolicy({Block})
        twin = Twin(
            Stack, place, 8, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy[strategy]
        )
        one, two, three = streams(place, 3)
        with twin.running():
            for forward, backward in (
                ((one, one), (two, two), (three, three))
                if same
                else ((one, two), (two, three), (one, one))
            ):
                twin.step(Step(forward_in=forward, backward_in=backward))
                twin.step(Step(forward_in=forward, backward_in=backward, backwards=2))


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("same", [True, False])
def test_forward_and_backward_on_streams_of_their_own(
    device: str, same: bool, strategy: ShardingStrategy
) -> None:
    run_ranks(1, trains_on_streams, device, strategy.name, same, timeout=TIMEOUT_S)


# -- the backend itself, on one rank


def require_backend(device: str) -> None:
    if device.startswith(emulated.NAME):
        pytest.skip("the emulated device has no backend")


def transfers_natively(device: str) -> None:
    place = device_named(device)
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


def test_the_backend_transfers_the_given_tensors(device: str) -> None:
    require_backend(device)
    run_ranks(1, transfers_natively, device, timeout=TIMEOUT_S)


def trains_over_the_backend(device: str, strategy: str, use_orig_params: bool) -> None:
    place = device_named(device)

    def itself(axis: Axis, device: torch.device) -> BackendTransport:
        return BackendTransport(Axis(dist.group.WORLD, 0, (0,)), place)

    with group_of(1, place), mock.patch.object(engine_group, "communicator", itself):
        options = {
            "sharding_strategy": ShardingStrategy[strategy],
            "use_orig_params": use_orig_params,
        }
        twin = Twin(
            WideStack,
            place,
            1,
            auto_wrap_policy=ModuleWrapPolicy({Wide}),
            mixed_precision=MIXED,
            **options,
        )
        for _ in range(4):
            twin.step()
        assert {type(group.shard) for group in twin.model._runtime.groups} == {BackendTransport}


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", BOTH)
def test_one_rank_trains_over_the_backend_itself(
    device: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    require_backend(device)
    run_ranks(1, trains_over_the_backend, device, strategy.name, use_orig_params, timeout=TIMEOUT_S)


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


class InTurn(nn.Module):
    """Units that feed each other, by way of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), ThroughTheCpu(), Block(), ThroughTheCpu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


PARTS = {
    "the later of two parallel units goes through the CPU": functools.partial(
        Parallel, ThroughTheCpu
    ),
    "the later of two parallel units ends on the CPU": functools.partial(Parallel, ToTheCpu),
    "units in turn go through the CPU": InTurn,
}


def trains_with_parts_on_the_cpu(device: str, which: str) -> None:
    place = device_named(device)
    with group_of(8, place):
        twin = Twin(PARTS[which], place, 8, auto_wrap_policy=ModuleWrapPolicy({Block}))
        with twin.running():
            for _ in range(3):
                twin.step()


@pytest.mark.parametrize("which", list(PARTS))
def test_parts_of_the_graph_on_the_cpu(device: str, which: str) -> None:
    try:
        run_ranks(1, trains_with_parts_on_the_cpu, device, which, timeout=TIMEOUT_S)
    finally:
        close_pool()  # a process that has read freed memory can no longer use the device


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


def steps_without_syncs(device: str, strategy: str, use_orig_params: bool, mixed: bool) -> None:
    place = device_named(device)
    with group_of(8, place):
        options = {
            "sharding_strategy": ShardingStrategy[strategy],
            "use_orig_params": use_orig_params,
        }
        options |= {
            "mixed_precision": MIXED if mixed else None,
            "auto_wrap_policy": ModuleWrapPolicy({Wide}),
        }
        twin = Twin(WideStack, place, 8, **options)
        inputs = twin.inputs(3)
        with twin.running():
            twin.quiet_steps(inputs)
            with without_syncs(place):
                twin.quiet_steps(inputs)
                with twin.model.no_sync():
                    twin.loss(inputs[0]).backward()
                twin.quiet_steps(inputs)
                twin.loss(inputs[0]).backward()
                twin.model.clip_grad_norm_(1.0)
                twin.optim.step()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [*BOTH, ShardingStrategy.NO_SHARD])
def test_no_step_makes_the_cpu_wait(
    device: str, strategy: ShardingStrategy, use_orig_params: bool, mixed: bool
) -> None:
    run_ranks(
        1, steps_without_syncs, device, strategy.name, use_orig_params, mixed, timeout=TIMEOUT_S
    )


# -- memory


def bytes_of_steps(
    device: str, strategy: str, use_orig_params: bool
) -> tuple[list[tuple[int, int]], int]:
    """Return (peak, remaining) bytes of 20 steps, relative to before the first one, and the bytes
    of a unit."""
    place = device_named(device)
    with group_of(8, place):
        options = {
            "sharding_strategy": ShardingStrategy[strategy],
            "use_orig_params": use_orig_params,
        }
        twin = Twin(WideStack, place, 8, auto_wrap_policy=ModuleWrapPolicy({Wide}), **options)
        inputs, found = twin.inputs(3), []
        nbytes = sum(p.nbytes for p in twin.plain.blocks[0].parameters())
        with twin.running():
            twin.quiet_steps(inputs)
            if place.type == "cpu":
                with LiveBytes() as live:
                    before = live.now()
                    for _ in range(20):
                        live.forget()
                        twin.quiet_steps(inputs[:1])
                        found.append((live.peak().nbytes - before, live.now() - before))
                return found, nbytes
            before = torch.accelerator.memory_allocated()
            for _ in range(20):
                torch.accelerator.reset_peak_memory_stats()
                twin.quiet_steps(inputs[:1])
                found.append(
                    (
                        torch.accelerator.max_memory_allocated() - before,
                        torch.accelerator.memory_allocated() - before,
                    )
                )
            return found, nbytes


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_peak_is_the_same_in_every_step_and_that_of_two_units_and_two_reduce_buffers(
    device: str, use_orig_params: bool
) -> None:
    if device.startswith(emulated.NAME):
        pytest.skip("its peak is that of other kernels: 1 % more than the limit")
    ((found, nbytes),) = run_ranks(
        1, bytes_of_steps, device, "FULL_SHARD", use_orig_params, timeout=TIMEOUT_S
    )
    assert len(set(found)) == 1
    peak, left = found[0]
    assert abs(left) < nbytes / 16
    gradient, shards = nbytes / 2, (4 + 4) * nbytes / 8  # of all units, and in flight
    assert 3 * nbytes < peak < 4 * nbytes + gradient + shards


# -- shards on the CPU


def pinned(device: str) -> list[bool]:
    place = device_named(device)
    with group_of(1, place):
        offload = CPUOffload(offload_params=True)
        twin = Twin(
            Stack, place, 1, auto_wrap_policy=ModuleWrapPolicy({Block}), cpu_offload=offload
        )
        twin.loss(twin.inputs()[0]).backward()
        parameters = list(twin.model.parameters())
        assert all(
            p.device.type == "cpu" and p.grad is not None and p.grad.device.type == "cpu"
            for p in parameters
        )
        return [p.is_pinned() and p.grad.is_pinned() for p in parameters]


def test_shards_and_gradients_on_the_cpu_are_in_memory_that_the_device_can_read(
    device: str,
) -> None:
    (found,) = run_ranks(1, pinned, device, timeout=TIMEOUT_S)
    assert found == [device != "cpu"] * 4
