"""Ranks on devices: several with NCCL on the CUDA build of torch, one on any other device."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fsdp_compat import _torch_private
from tests.support import emulated, fakecuda
from tests.support.order import Op
from tests.support.ranks import on_ranks, run_ranks
from tests.support.twin import Work, device_named, group_of

NCCL = "cpu:gloo,cuda:nccl"
on_nccl = functools.partial(on_ranks, backend=NCCL)
Recording = emulated.Recording | fakecuda.Recording


def on_the_device(test: Callable[..., None]) -> Callable[..., None]:
    """Run the body of a test on two ranks with NCCL where torch runs on fakecuda, else on one rank
    on the device of the fixture."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        ranks, backend = (2, NCCL) if fakecuda.is_used() else (1, "gloo")
        run_ranks(ranks, _body, test.__module__, test.__name__, arguments, backend=backend)

    return run


def own_device() -> torch.device:
    return torch.device("cuda", dist.get_rank())


def _body(module: str, name: str, arguments: dict[str, Any]) -> None:
    test = getattr(importlib.import_module(module), name).__wrapped__
    if fakecuda.is_used():
        return test(**{**arguments, "device": own_device()})
    device = device_named(arguments["device"])
    with group_of(1, device):
        test(**{**arguments, "device": device})


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
