"""Ranks on devices: several with NCCL on the CUDA build of torch, one on any other device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fsdp_compat import _torch_private
from tests.support import emulated, fakecuda
from tests.support.order import Op
from tests.support.ranks import run_ranks
from tests.support.twin import Work, device_named, group_of

on_nccl = functools.partial(run_ranks, backend="cpu:gloo,cuda:nccl")
Recording = emulated.Recording | fakecuda.Recording


def run_on(name: str, function: Callable[..., Any], *args: Any) -> None:
    """Call ``function(device, *args)`` on two ranks with NCCL where torch runs on fakecuda, else on
    one rank on the device of this name."""
    if fakecuda.is_used():
        on_nccl(2, _with_own_device, function, *args)
    else:
        run_ranks(1, _alone, name, function, *args)


def own_device() -> torch.device:
    return torch.device("cuda", dist.get_rank())


def _with_own_device(function: Callable[..., Any], *args: Any) -> None:
    function(own_device(), *args)


def _alone(name: str, function: Callable[..., Any], *args: Any) -> None:
    device = device_named(name)
    with group_of(1, device):
        function(device, *args)


@contextlib.contextmanager
def in_order(streams: int = 0) -> Iterator[Recording]:
    """Inside the context all accesses of the same bytes are ordered, where the device records them.
    streams: at least so many work, the host's among them."""
    recorder: Any = fakecuda if fakecuda.is_used() else emulated
    if not (fakecuda.is_used() or hasattr(torch, emulated.NAME)):
        yield emulated.Recording()
        return
    with recorder.watching() as recording:
        yield recording
    assert len({op.stream for op in recording.happenings if isinstance(op, Op)}) >= streams
    assert [str(found) for found in recording.unordered()] == []


def all_ranks_have_the_same() -> contextlib.AbstractContextManager[object]:
    """Inside the context an all-gather returns what this rank sends in the place of every rank's
    part, in a group that moves nothing."""

    def gather(group: dist.ProcessGroup, full: torch.Tensor, own: torch.Tensor) -> Work:
        full.view(group.size(), -1).copy_(own)
        return Work(lambda: None, None)

    return mock.patch.object(_torch_private, "start_all_gather", gather)


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
