"""The CUDA build of torch without a GPU.

It is the unmodified wheel on libraries of ours in the place of NVIDIA's: torch's own caching
allocator, streams, events, autocast, pinned memory, ProcessGroupNCCL. The CUDA runtime
(``runtime.cpp``) works in host memory, NCCL (``nccl.cpp``) between the processes of one host, and
operations have the values of the CPU's kernels (``ops.cpp``). Use, without a GPU, on Linux, with a
C++ compiler:

    python -m tests.support.fakecuda.build FOLDER                  # minutes; again after changes
    FOLDER/bin/pytest tests/gpu --gpu-device cuda:0                # the tests of an accelerator
    FOLDER/bin/python program.py                                   # any program, on cuda:0 to 7
    FOLDER/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 program.py

    with fakecuda.watching() as recording:                         # in a program
        train()
    print(*recording.unordered(), sep="\\n")                        # races
    print(fakecuda.counts())                                       # kernels, copies, events, waits

Ranks that call different collectives, or call one too late, end with a message. With
FAKECUDA_NCCL_HANGS=SECONDS, read when a communicator is made, they hang as with NCCL:

    FAKECUDA_NCCL_HANGS=5 FOLDER/bin/python -m torch.distributed.run ... program.py

A call waits for the other ranks for at most SECONDS, then says so on stderr and returns. It is
done once all ranks have made the same call: never, if they made different ones, or if a process was
stopped or has ended. Until then, later work on its stream, on streams that wait for it and on its
communicator is not complete: queries say so, waits and copies to pageable memory block the host,
and torch's watchdog reports a timeout. Aborting or destroying the communicator ends its calls.
Differences to a GPU in this mode:

- Kernels, and copies that do not go to the host, still run when they are enqueued, so what is
  computed from a late result is wrong. The result itself is right if the call's input was complete
  when the call was made. An aborted call writes nothing, or a part.
- Different calls always hang; NCCL may return wrong values or crash.
- Errors are not shown: no call fails because a peer has ended, neither at once nor asynchronously.
- A pending call does not occupy the device: streams that do not wait for it are not held up.
- Waiting for a device waits for the calls of all devices of the process.
- Making and splitting a communicator blocks the host, and ends the process if ranks are missing.

What it cannot show: time (but see ``set_collective_ms``), CUDA graphs, kernels of Triton and
inductor, several hosts, NCCL's order of summation on more than two ranks, memory that kernels use
inside, errors of the driver. Operations that the CPU lacks raise. Set FAKECUDA_DEVICES for another
number of devices, FAKECUDA_NCCL_TIMEOUT for another time limit of collectives."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

from tests.support import order

WHY = "needs an environment of tests/support/fakecuda/build.py"  # where it is not used


def is_used() -> bool:
    """Return whether torch runs on it in this environment."""
    return importlib.util.find_spec("fakecuda_ops") is not None


def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.13")


def _ops() -> Any:
    return importlib.import_module("fakecuda_ops")


# -- counting


def counts() -> dict[str, int]:
    """Return how often what was called since the last reset. Waits of the host begin with "host
    waits", copies and collectives with "copies" and "nccl"."""
    text = ctypes.create_string_buffer(1 << 16)
    _runtime().fakecuda_counts(text, ctypes.c_size_t(len(text)))
    pairs = (line.rpartition("=") for line in text.value.decode().splitlines())
    return {name: int(number) for name, _, number in pairs}


def reset_counts() -> None:
    _runtime().fakecuda_reset_counts()


def host_waits(counted: dict[str, int]) -> int:
    """Return how often the host waited for the device, from ``counts``."""
    return sum(number for name, number in counted.items() if name.startswith("host waits"))


# -- a virtual clock


def set_collective_ms(ms: float) -> None:
    """Set what each all-gather and reduce-scatter takes. Of all other work, only
    ``torch.cuda._sleep`` takes time, a millisecond for a million cycles. Events have these times.
    """
    _runtime().fakecuda_set_collective_ms(ctypes.c_double(ms))


# -- recording


class Recording:
    """What happened inside ``watching``, once it has ended."""

    def __init__(self) -> None:
        self.happenings: list[order.Happening] = []

    def unordered(self) -> list[order.Unordered]:
        return order.find_unordered(self.happenings)


@contextlib.contextmanager
def watching() -> Iterator[Recording]:
    """Record what happens on all devices of this process inside the context."""
    recording, ops = Recording(), _ops()
    ops.drain()
    ops.record(True)
    try:
        yield recording
    finally:
        ops.record(False)
        recording.happenings[:] = _happenings(ops.drain())


def _happenings(records: list[tuple[Any, ...]]) -> Iterator[order.Happening]:
    numbers: dict[int, int] = {}  # of the latest records of events, by address
    number = itertools.count()
    for kind, stream, event, name, reads, writes, place in records:
        match kind:
            case "op":
                yield order.Op(stream, name, reads, writes, place)
            case "host":
                yield order.Op(order.HOST, name, reads, writes, place)
            case "record":
                numbers[event] = next(number)
                yield order.Record(numbers[event], stream)
            case "wait" if event in numbers:
                yield order.Wait(numbers[event], stream)
            case "event_sync" if event in numbers:
                yield order.EventSync(numbers[event])
            case "event_destroy":
                numbers.pop(event, None)
            case "stream_sync":
                yield order.StreamSync(stream)
            case "device_sync":
                yield order.DeviceSync()
            case "allocate":
                yield order.Allocate(stream, writes[0], place)
            case "free":
                yield order.Free(stream, writes[0], frozenset(), place)
            case "free_after_events":
                yield order.Free(stream, writes[0], frozenset({order.HOST}), place)
            case "forget":
                yield order.Forget(writes[0])
