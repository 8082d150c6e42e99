"""No two accesses of the same bytes are left unordered: every stream waits for what it reads, and
for the readers of what it overwrites, and so does the host.

These tests run on the emulated device, which records the bytes that each operation reads and writes
and the waits between streams. So they fail for a wait that is missing, whether or not its absence
changes a number. The models also train as the unsharded one does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    _torch_private,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._engine.dtypes import move_to
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.gpu.test_streams import MIXED, streams
from tests.gpu.test_training import TIMEOUT_S, Wide, WideStack, checkpointed
from tests.support import emulated
from tests.support.emulated.order import HOST, Op
from tests.support.fully_sharded import OURS, shard_all, sharded_modules
from tests.support.models import Block, Stack
from tests.support.pairwise import pairwise
from tests.support.parity import assert_close, local
from tests.support.ranks import run_ranks
from tests.support.twin import Step, Twin, Work, device_named, group_of

RANKS = 8


# -- models


def flat(
    module: nn.Module,
    *,
    device_id: torch.device,
    strategy: str,
    offload: bool,
    mixed_precision: MixedPrecision | None,
    use_orig_params: bool,
) -> nn.Module:
    is_hybrid = strategy == "HYBRID_SHARD"
    return FSDP(
        module,
        device_id=device_id,
        auto_wrap_policy=ModuleWrapPolicy({Block, Wide}),
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=init_device_mesh(device_id.type, (2, RANKS // 2)) if is_hybrid else None,
        cpu_offload=CPUOffload(offload_params=offload),
        mixed_precision=mixed_precision,
        use_orig_params=use_orig_params,
    )


def in_place(
    module: nn.Module,
    *,
    device_id: torch.device,
    strategy: str,
    offload: bool,
    mixed_precision: MixedPrecision | None,
) -> nn.Module:
    """The same by ``fully_shard``."""
    shape = {"HYBRID_SHARD": (2, RANKS // 2), "NO_SHARD": (RANKS, 1)}.get(strategy, (1, RANKS))
    mesh = init_device_mesh(device_id.type, shape, mesh_dim_names=("replicate", "shard"))
    return shard_all(
        module,
        (Block, Wide),
        library=OURS,
        mesh=mesh if shape[0] > 1 else mesh["shard"],
        reshard_after_forward=strategy != "SHARD_GRAD_OP",
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
        mp_policy=MixedPrecisionPolicy()
        if mixed_precision is None
        else MixedPrecisionPolicy(mixed_precision.param_dtype, mixed_precision.reduce_dtype),
    )


FRONT_ENDS: dict[str, Callable[..., nn.Module]] = {
    "flat": functools.partial(flat, use_orig_params=False),
    "original parameters": functools.partial(flat, use_orig_params=True),
    "fully_shard": in_place,
}


@contextlib.contextmanager
def twin_of(
    device: str,
    front_end: str = "flat",
    strategy: str = "FULL_SHARD",
    offload: bool = False,
    mixed: bool = False,
    build: Callable[[], nn.Module] = Stack,
    **options: Any,
) -> Iterator[Twin]:
    place = device_named(device)
    with group_of(RANKS, place):
        twin = Twin(
            build,
            place,
            RANKS,
            front_end=FRONT_ENDS[front_end],
            strategy=strategy,
            offload=offload,
            mixed_precision=MIXED if mixed else None,
            **options,
        )
        with twin.running():
            yield twin


def ops(recording: emulated.Recording) -> list[Op]:
    return [happening for happening in recording.happenings if isinstance(happening, Op)]


def problems(recording: emulated.Recording) -> list[str]:
    assert len({op.stream for op in ops(recording)}) > 1
    return [str(found) for found in recording.unordered()]


# -- training


def trains(
    device: str,
    front_end: str,
    strategy: str,
    offload: bool,
    mixed: bool,
    recomputes: bool,
    backwards: int,
) -> list[str]:
    options = {"prepare": checkpointed} if recomputes else {}
    with twin_of(device, front_end, strategy, offload, mixed, **options) as twin:
        with emulated.watching() as recording:
            twin.steps_together(3, Step(backwards))
        return problems(recording)


@pairwise
@pytest.mark.parametrize("front_end", list(FRONT_ENDS))
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("backwards", [1, 2])
def test_training(
    emulated_device: str,
    front_end: str,
    strategy: str,
    offload: bool,
    mixed: bool,
    recomputes: bool,
    backwards: int,
) -> None:
    arguments = front_end, strategy, offload, mixed, recomputes, backwards
    (found,) = run_ranks(1, trains, emulated_device, *arguments, timeout=TIMEOUT_S)
    assert found == []


def trains_large(device: str, front_end: str, strategy: str, offload: bool) -> list[str]:
    with twin_of(device, front_end, strategy, offload, mixed=True, build=WideStack) as twin:
        with emulated.watching() as recording:
            twin.steps_together(2, Step(2))
        return problems(recording)


@pytest.mark.parametrize(
    ("front_end", "strategy"),
    [*((name, "FULL_SHARD") for name in FRONT_ENDS), ("fully_shard", "SHARD_GRAD_OP")],
)
@pytest.mark.parametrize("offload", [False, True])
def test_training_with_large_gradients_that_move_by_themselves_or_with_the_others(
    emulated_device: str, offload: bool, front_end: str, strategy: str
) -> None:
    arguments = front_end, strategy, offload
    (found,) = run_ranks(1, trains_large, emulated_device, *arguments, timeout=TIMEOUT_S)
    assert found == []


# -- several streams


def runs_two_forwards(device: str, front_end: str, in_graph: bool) -> list[str]:
    with twin_of(device, front_end) as twin:
        main = torch.accelerator.current_stream()
        inputs = twin.inputs(2)
        one, two = torch.Stream(device), torch.Stream(device)
        with emulated.watching() as recording:
            one.wait_stream(main)
            two.wait_stream(main)
            losses = []
            for stream, x in zip((one, two), inputs, strict=True):
                with stream, torch.set_grad_enabled(in_graph):
                    losses.append(twin.loss(x))
            main.wait_stream(one)
            main.wait_stream(two)
            if in_graph:
                (losses[0] + losses[1]).backward()
        for loss, x in zip(losses, inputs, strict=True):
            assert_close(loss, twin.plain_loss(x), "loss", twin.tolerance)
        return problems(recording)


@pytest.mark.parametrize("front_end", ["flat", "fully_shard"])
@pytest.mark.parametrize("in_graph", [False, True])
def test_two_forwards_on_streams_that_the_program_does_not_order(
    emulated_device: str, in_graph: bool, front_end: str
) -> None:
    (found,) = run_ranks(
        1, runs_two_forwards, emulated_device, front_end, in_graph, timeout=TIMEOUT_S
    )
    assert found == []


def trains_on_streams(device: str, front_end: str, offload: bool) -> list[str]:
    with twin_of(device, front_end, offload=offload) as twin:
        one, two = streams(device_named(device), 2)
        with emulated.watching() as recording:
            for forward, backward in ((one, two), (two, one), (one, one)):
                twin.steps_together(2, Step(2, forward_in=forward, backward_in=backward))
        return problems(recording)


@pytest.mark.parametrize("front_end", ["flat", "fully_shard"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_stream_for_forward_and_another_for_backward(
    emulated_device: str, offload: bool, front_end: str
) -> None:
    (found,) = run_ranks(
        1, trains_on_streams, emulated_device, front_end, offload, timeout=TIMEOUT_S
    )
    assert found == []


def changes_gradients_on_a_stream(device: str) -> list[str]:
    with twin_of(device, "fully_shard") as twin:
        stream, seen = torch.Stream(device), []

        def halve(total: torch.Tensor) -> None:
            seen.append(torch.accelerator.current_stream())
            total.mul_(0.5)

        for module in sharded_modules(twin.model, OURS):
            module.set_all_reduce_hook(halve, stream=stream)
        inputs = twin.inputs(3)
        with emulated.watching() as recording:
            twin.quiet_steps(inputs)
        assert seen and set(seen) == {stream}
        return problems(recording)


def test_an_all_reduce_hook_on_a_stream_of_its_own(emulated_device: str) -> None:
    (found,) = run_ranks(1, changes_gradients_on_a_stream, emulated_device, timeout=TIMEOUT_S)
    assert found == []


# -- the host


def writes_after_evaluation(device: str, front_end: str, mixed: bool) -> list[str]:
    with twin_of(device, front_end, offload=True, mixed=mixed) as twin:
        (x,) = twin.inputs()
        parameters = list(twin.model.parameters())
        assert all(parameter.device.type == "cpu" for parameter in parameters)
        with emulated.watching() as recording, torch.no_grad():
            for _ in range(2):
                twin.loss(x)
                for parameter in parameters:
                    local(parameter).mul_(2)
        writes = [op for op in ops(recording) if op.stream == HOST and op.name == "aten::mul_"]
        assert len(writes) == 2 * sum(parameter.numel() > 0 for parameter in map(local, parameters))
        return problems(recording)


@pytest.mark.parametrize("front_end", list(FRONT_ENDS))
@pytest.mark.parametrize("mixed", [False, True])
def test_the_host_writes_offloaded_parameters_after_an_evaluation(
    emulated_device: str, mixed: bool, front_end: str
) -> None:
    (found,) = run_ranks(
        1, writes_after_evaluation, emulated_device, front_end, mixed, timeout=TIMEOUT_S
    )
    assert found == []


def reads_gradients(device: str, front_end: str) -> list[str]:
    with twin_of(device, front_end, offload=True) as twin:
        (x,) = twin.inputs()
        with emulated.watching() as recording:
            twin.loss(x).backward()
            for parameter in twin.model.parameters():
                if parameter.grad is not None:
                    local(parameter.grad).sum()
        reads = [op for op in ops(recording) if op.stream == HOST and op.name == "aten::sum"]
        assert reads
        return problems(recording)


@pytest.mark.parametrize("front_end", list(FRONT_ENDS))
def test_the_host_reads_offloaded_gradients_after_a_backward(
    emulated_device: str, front_end: str
) -> None:
    (found,) = run_ranks(1, reads_gradients, emulated_device, front_end, timeout=TIMEOUT_S)
    assert found == []


def steps_in_backward(device: str) -> list[str]:
    """A user's hook steps on the host as soon as a gradient is there."""
    with twin_of(device, "fully_shard", offload=True) as twin:
        (x,) = twin.inputs()

        def hook(parameter: torch.Tensor) -> None:
            local(parameter).sub_(local(parameter.grad), alpha=0.1)

        for parameter in twin.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        with emulated.watching() as recording:
            twin.loss(x).backward()
        assert [op for op in ops(recording) if op.stream == HOST and op.name == "aten::sub_"]
        return problems(recording)


def test_hooks_on_offloaded_gradients_read_them_at_once(emulated_device: str) -> None:
    (found,) = run_ranks(1, steps_in_backward, emulated_device, timeout=TIMEOUT_S)
    assert found == []


def writes_after_a_look_at_whole_parameters(device: str, use_orig_params: bool) -> list[str]:
    def gather(group: object, full: torch.Tensor, own: torch.Tensor) -> Work:
        full.view(RANKS, -1).copy_(own)  # as if all ranks had this one's part
        return Work(lambda: None, None)

    front_end = "original parameters" if use_orig_params else "flat"
    with (
        twin_of(device, front_end, offload=True) as twin,
        mock.patch.object(_torch_private, "start_all_gather", gather),
    ):
        parameters = list(twin.model.parameters())
        with emulated.watching() as recording, torch.no_grad():
            with FSDP.summon_full_params(twin.model, writeback=False):
                total = sum(parameter.sum() for parameter in twin.model.parameters())
            for parameter in parameters:
                parameter.mul_(2)
        assert isinstance(total, torch.Tensor) and total.device == twin.device
        assert any(op.stream == HOST and op.writes for op in ops(recording))
        return [str(found) for found in recording.unordered()]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_host_writes_offloaded_parameters_after_they_were_shown_whole(
    emulated_device: str, use_orig_params: bool
) -> None:
    (found,) = run_ranks(
        1,
        writes_after_a_look_at_whole_parameters,
        emulated_device,
        use_orig_params,
        timeout=TIMEOUT_S,
    )
    assert found == []


# -- inputs


def overwrites_its_input(device: str, front_end: str) -> list[str]:
    with twin_of(device, front_end) as twin:
        x = twin.inputs()[0].cpu().pin_memory()
        with emulated.watching() as recording:
            twin.loss(x)
            x.zero_()
        assert any(op.stream == HOST and op.writes for op in ops(recording))
        return problems(recording)


@pytest.mark.parametrize("front_end", ["flat", "fully_shard"])
def test_the_host_overwrites_an_input_after_a_forward(emulated_device: str, front_end: str) -> None:
    (found,) = run_ranks(1, overwrites_its_input, emulated_device, front_end, timeout=TIMEOUT_S)
    assert found == []


def moves_to_the_host(device: str) -> list[str]:
    x = torch.ones(4, device=device_named(device))
    with emulated.watching() as recording:
        (moved,) = move_to((x,), torch.device("cpu"))
        assert moved.sum() == 4
    return [str(found) for found in recording.unordered()]


def test_inputs_that_are_moved_to_the_host_are_read_there(emulated_device: str) -> None:
    (found,) = run_ranks(1, moves_to_the_host, emulated_device, timeout=TIMEOUT_S)
    assert found == []
