"""Process groups of which this process is one rank, on the emulated device, with NCCL's semantics:
each group has a stream, a collective waits there for the stream that calls it, and ``wait()`` makes
the present stream wait for it. Nothing is sent: outputs keep what lies in their memory, except that
integers are gathered as if all ranks had this one's.

    use()              register the device and these collectives in this process, for good
    group_of(...)      inside, the default process group is such a group
    recording()        record operations, collectives and copies with the host
    answering(vote)    decide reductions of integers, by which ranks agree on something

torch's FSDP1 and FSDP2 run on it, too: the device's module gets the streams that they ask for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support import emulated
from tests.support.emulated import fused
from tests.support.order import Op, Range

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"

Vote = Callable[[torch.Tensor, dist.ReduceOp], None]


class Collective(Op):
    """A collective on its group's stream. nbytes: of the whole output of an all-gather, of the
    whole input of a reduction."""

    nbytes: int
    ranks: tuple[int, ...]


class HostCopy(Op):
    """A copy between the device and the host."""

    to_host: bool


class _Recording(emulated.Recording):
    """Tells copies with the host from others, and does not look up where operations are issued."""

    def kernel(
        self,
        name: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        run: Callable[[], None],
    ) -> None:
        """Record what ``run`` does as one operation."""
        stream = torch.accelerator.current_stream().stream_id
        self.happenings.append(Op(stream, name, _ranges(reads), _ranges(writes)))
        before = len(self.happenings)
        run()
        del self.happenings[before:]

    def op(self, stream: int, name: str, reads: list[Range], writes: list[Range]) -> None:
        if name == "aten::copy_" and (
            not (reads and writes) or _is_pinned(reads) or _is_pinned(writes)
        ):
            copy = HostCopy(stream, name, tuple(reads), tuple(writes))
            # Memory of the host that is not pinned is not among the ranges.
            copy.to_host = not writes or _is_pinned(writes)
            self.happenings.append(copy)
        else:
            self.happenings.append(Op(stream, name, tuple(reads), tuple(writes)))


def _is_pinned(ranges: Sequence[Range]) -> bool:
    return bool(ranges) and emulated.is_pinned(ranges[0][0])


_recording: _Recording | None = None
_vote: Vote | None = None
_streams: dict[str, torch.Stream] = {}  # by the group's name


@contextlib.contextmanager
def recording() -> Iterator[emulated.Recording]:
    global _recording
    with emulated.watching(_Recording()) as found:
        _recording = found
        try:
            yield found
        finally:
            _recording = None


@contextlib.contextmanager
def answering(vote: Vote) -> Iterator[None]:
    """Inside the context ``vote`` changes the tensor of each all-reduce of integers, also of those
    on the CPU."""
    global _vote
    _vote = vote
    try:
        yield
    finally:
        _vote = None


@contextlib.contextmanager
def group_of(ranks: int, rank: int = 0) -> Iterator[None]:
    if dist.is_initialized():
        dist.destroy_process_group()
    _streams.clear()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def collectives(found: emulated.Recording) -> list[Collective]:
    return [happening for happening in found.happenings if isinstance(happening, Collective)]


def _kernel(
    name: str,
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    run: Callable[[], None],
) -> None:
    if _recording is None:
        run()
    else:
        _recording.kernel(name, reads, writes, run)


class _Work:
    """A collective in flight. keep: its tensors live until the wait."""

    def __init__(self, event: torch.Event | None, keep: object) -> None:
        self._event, self._keep = event, keep

    def wait(self, timeout: object = None) -> bool:
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)
        self._event = self._keep = None
        return True

    def is_completed(self) -> bool:
        return self._event is None


def _run(
    name: str,
    group: dist.ProcessGroup,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> _Work:
    stream = _streams.get(group.group_name)
    if stream is None:
        stream = _streams[group.group_name] = torch.Stream(device=_device())
    stream.wait_stream(torch.accelerator.current_stream())
    if _recording is not None:
        whole = outputs if name == ALL_GATHER else inputs
        op = Collective(stream.stream_id, name, _ranges(inputs), _ranges(outputs))
        op.nbytes = sum(tensor.nbytes for tensor in whole)
        op.ranks = tuple(dist.get_process_group_ranks(group))
        _recording.happenings.append(op)
    return _Work(stream.record_event(), (inputs, outputs))


def _ranges(tensors: Sequence[torch.Tensor]) -> tuple[Range, ...]:
    return tuple(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in tensors
        if tensor.nbytes
    )


def _as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _reduce_scatter(group: dist.ProcessGroup, outputs: Any, inputs: Any, *options: Any) -> _Work:
    return _run(REDUCE_SCATTER, group, _as_list(inputs), _as_list(outputs))


def _all_gather(group: dist.ProcessGroup, outputs: Any, inputs: Any, *options: Any) -> _Work:
    inputs, outputs = _as_list(inputs), _as_list(outputs)
    for output, own in zip(outputs, inputs, strict=True):
        if not own.is_floating_point():
            output.view(group.size(), -1).copy_(own.flatten())
    return _run(ALL_GATHER, group, inputs, outputs)


def _all_reduce(group: dist.ProcessGroup, tensors: Any, options: Any = None) -> _Work:
    tensors = _as_list(tensors)
    on_device = _on_the_device(tensors)
    work = _run(ALL_REDUCE, group, tensors, tensors) if on_device else _Work(None, None)
    if _vote is not None and not tensors[0].is_floating_point():
        for tensor in tensors:
            _vote(tensor, options.reduceOp)
    return work


_METHODS: dict[str, Callable[..., _Work]] = {
    "_allgather_base": _all_gather,
    "all_gather_single": _all_gather,
    "allgather_into_tensor_coalesced": _all_gather,
    "_reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
    "allreduce": _all_reduce,
    "broadcast": lambda group, *arguments: _Work(None, None),
}


def _on_the_device(tensors: Any) -> bool:
    return all(tensor.device.type == emulated.NAME for tensor in _as_list(tensors))


def _replace(name: str, method: Callable[..., _Work]) -> None:
    """Replace a method of process groups, for tensors of the device."""
    original = getattr(dist.ProcessGroup, name, None)
    if original is None:
        return

    def call(group: dist.ProcessGroup, tensors: Any, *arguments: Any, **options: Any) -> Any:
        if _on_the_device(tensors) or (method is _all_reduce and _vote is not None):
            return method(group, tensors, *arguments)
        return original(group, tensors, *arguments, **options)

    setattr(dist.ProcessGroup, name, call)


def _device() -> torch.device:
    return torch.device(emulated.NAME, 0)


class _Stream(torch.Stream):
    def __new__(cls, device: object = None, priority: int = 0, **options: Any) -> Any:
        return torch.Stream(device=_device())


class _Event:
    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return torch.Event(device=_device())


@functools.cache
def use() -> None:
    """Register the device and the collectives in this process: see ``emulated.use``."""
    emulated.use()
    module: Any = getattr(torch, emulated.NAME)
    module.Stream, module.Event = _Stream, _Event
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_device())
    module.default_stream = module.current_stream
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.set_stream = torch.accelerator.set_stream
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.is_current_stream_capturing = lambda: False
    module.empty_cache = lambda: None
    module.memory_stats = lambda device=None: {"num_alloc_retries": 0}
    fused.use(_kernel)
    for name, method in _METHODS.items():
        _replace(name, method)
