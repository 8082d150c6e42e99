"""The emulated device itself: it computes as the CPU does, and records what the checker needs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from tests.support import emulated
from tests.support.order import (
    HOST,
    EventSync,
    Free,
    Happening,
    Op,
    StreamSync,
)
from tests.support.ranks import on_ranks


def on_the_device(test: Callable[..., None]) -> Callable[..., None]:
    """Run the body of a test in a process that has the device."""

    @functools.wraps(test)
    def body(emulated_device: str) -> None:
        emulated.use()
        test(emulated_device)

    return on_ranks(1)(body)


def ops(recording: emulated.Recording) -> list[Op]:
    return [each for each in recording.happenings if isinstance(each, Op)]


def syncs(recording: emulated.Recording) -> list[Happening]:
    return [each for each in recording.happenings if isinstance(each, (EventSync, StreamSync))]


def new(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape).to(emulated.NAME)


def pinned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, pin_memory=True)


@on_the_device
def test_memory_that_was_freed_is_not_read(emulated_device: str) -> None:
    x = new(8)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"aten::add uses .* storage has 0: it was freed"):
        x + 1
    x.untyped_storage().resize_(32)
    assert x.isnan().all()


@on_the_device
def test_the_bytes_of_views(emulated_device: str) -> None:
    x = new(4, 6)
    start = x.data_ptr()
    with emulated.watching() as recording:
        x[:, 2].zero_()
        x[1:3].zero_()
        x.t()[0:2].mul_(2)
    rows, whole, strided = ops(recording)
    assert rows.writes == tuple((start + 24 * i + 8, start + 24 * i + 12) for i in range(4))
    assert whole.writes == ((start + 24, start + 72),)
    assert strided.writes == tuple((start + 24 * i, start + 24 * i + 8) for i in range(4))
    assert strided.place[0].endswith("test_the_bytes_of_views") and __file__ in strided.place[0]


@on_the_device
def test_a_missing_wait_is_found_though_the_values_are_right(emulated_device: str) -> None:
    x, stream = new(4), torch.Stream(emulated.NAME)
    with emulated.watching() as recording:
        with stream:
            x.mul_(2)
        y = x + 1
    (found,) = recording.unordered()
    assert (found.earlier.name, found.later.name) == ("aten::mul", "aten::add")
    assert y.tolist() == [1, 3, 5, 7]  # which shows nothing


@on_the_device
def test_copies_and_the_host(emulated_device: str) -> None:
    x, pageable = new(4), torch.zeros(4)
    copied = pinned(4)
    for copy, waits in (
        (lambda: copied.copy_(x, non_blocking=True), False),
        (lambda: x.copy_(copied, non_blocking=True), False),
        (lambda: copied.copy_(x), True),
        (lambda: pageable.copy_(x, non_blocking=True), True),
        (lambda: x.copy_(pageable), True),
        (lambda: x.cpu(), True),
        (lambda: x[0].item(), True),
        (lambda: x.nonzero(), True),
        (lambda: x.add_(1), False),
    ):
        with emulated.watching() as recording:
            copy()
        assert bool(syncs(recording)) is waits

    with emulated.watching() as recording:
        copied.copy_(x, non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        event.synchronize()
        copied.add_(1)
        pageable.add_(1)
        copied[1:].sum()
    copy_, *of_host = ops(recording)
    start = copied.data_ptr()
    assert copy_.writes == ((start, start + 16),)
    assert [(op.stream, op.name, op.reads, op.writes) for op in of_host] == [
        (HOST, "aten::add_", (), ((start, start + 16),)),
        (HOST, "aten::sum", ((start + 4, start + 16),), ()),
    ]
    assert recording.unordered() == []


@on_the_device
def test_memory_goes_back_to_the_stream_that_allocated_it(emulated_device: str) -> None:
    stream = torch.Stream(emulated.NAME)
    first = new(300)
    address = first.data_ptr()
    with emulated.watching() as recording:
        del first
        with stream:
            other = torch.empty(300, device=emulated.NAME)
        again = torch.empty(300, device=emulated.NAME)
        assert other.data_ptr() != address and again.data_ptr() == address
        again.record_stream(stream)
        del again
        assert torch.empty(300, device=emulated.NAME).data_ptr() != address
    frees = [each for each in recording.happenings if isinstance(each, Free)]
    assert [free.readers for free in frees if free.range[0] == address] == [
        frozenset(),
        frozenset({stream.stream_id}),
    ]


@on_the_device
def test_waits_of_the_host_can_be_refused(emulated_device: str) -> None:
    x = new(4)
    with emulated.watching() as recording:
        recording.syncs_allowed = False
        x.add_(1)
        with pytest.raises(emulated.UnwantedSync):
            x.sum().item()
        if torch.__version__ >= "2.13":  # before, it skips devices without an initialisation
            with pytest.raises(emulated.UnwantedSync):
                torch.accelerator.synchronize()
