"""The transports that use a backend's own collectives: BackendTransport for backends in C++,
PythonGroupTransport for process groups that are written in Python."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_private
from .mesh import Axis, is_in_python
from .transport import (
    VALUES,
    ByRank,
    Handle,
    Kind,
    Transport,
    as_bytes,
    communication_error,
    group_destroyed,
)

# torch 2.13 renamed them; 2.11 and 2.12 have the older names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class BackendTransport(Transport):
    """Uses the backend's asynchronous collectives. A wait on a stream device only orders
    streams."""

    has_tags = False

    def __init__(self, axis: Axis, device: torch.device, small: torch.device | None = None) -> None:
        """device: with its index, because otherwise all ranks of a host would use the first one.
        small: the device of small collectives, if another."""
        super().__init__(axis, device)
        self.values_device = small or device
        assert axis.group is not None
        self._group = weakref.ref(axis.group)
        default = _torch_private.default_device_of_backend(axis.group)
        self.takes_host_values = default.type == "cpu"
        has_names = _torch_private.is_registered(axis.group)
        backends = dist.get_backend_config(axis.group) if has_names else ""  # "cpu:gloo,cuda:nccl"
        self.coalesces = "cuda:nccl" in backends or "cuda:fake" in backends

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise group_destroyed()
        return group

    def gather_now(self, own: Tensor, what: str, tag: int = 0) -> Tensor:
        with self._explained(what):
            return super().gather_now(own, what, tag)

    def sum_of(self, values: Tensor, what: str) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM, what)

    def max_of(self, values: Tensor, what: str) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX, what)

    def _reduced(self, values: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        with self._explained(what), _torch_private.uncounted():
            dist.all_reduce(values, op=op, group=self.group)
        return values

    def broadcast(self, tensors: Sequence[Tensor], what: str) -> None:
        with self._explained(what), _torch_private.uncounted():
            works = [
                dist.broadcast(tensor, group_src=0, group=self.group, async_op=True)
                for tensor in as_bytes(tensors)
            ]
            for work in filter(None, works):
                work.wait()

    def exchange(self, sent: Tensor, sizes: Sequence[tuple[int, int]], what: str) -> Tensor:
        sends, receives = ([*each] for each in zip(*sizes, strict=True))
        received = sent.new_empty(sum(receives))
        with self._explained(what), _torch_private.uncounted():
            dist.all_to_all_single(received, sent, receives, sends, group=self.group)
        return received

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn an error of the backend into one that names what was waited for."""
        try:
            yield
        except RuntimeError as error:
            got = f"an error of the backend ({error})"
            first = f"Waiting for {what} failed."
            raise communication_error(first, got, self.rank, self.members) from error

    def begin_gather(self, own: Tensor, full: Tensor, segments: ByRank, tag: int) -> Handle:
        own = self._sendable(own, full, segments)
        if tag != VALUES:
            self.traffic.add(Kind.GATHER, own.nbytes * (self.ranks - 1))
        return Handle([], held=(self._start_gather(full, own), own))

    def begin_gathers(self, gathers: Sequence[tuple[Tensor, Tensor, ByRank]]) -> Handle:
        owns = [self._sendable(*gather) for gather in gathers]
        self.traffic.add(Kind.GATHER, sum(own.nbytes for own in owns) * (self.ranks - 1))
        fulls = [full for _, full, _ in gathers]
        return Handle([], held=(_torch_private.start_all_gathers(self.group, fulls, owns), owns))

    def _sendable(self, own: Tensor, full: Tensor, segments: ByRank) -> Tensor:
        if own.dtype is full.dtype and own.device == full.device:
            return own
        # cast and move it into this rank's segment, and send it from there
        return segments[self.rank].copy_(own, non_blocking=True)

    def end_gather(self, handle: Handle, what: str) -> None:
        handle.held[0].wait()

    def begin_reduce(self, buffer: Tensor, segments: ByRank, tag: int) -> Handle:
        total = torch.empty_like(segments[0])
        self.traffic.add(Kind.REDUCE, total.nbytes * (self.ranks - 1))
        return Handle([], (total,), (self._start_reduce(total, buffer), buffer))

    def _start_gather(self, full: Tensor, own: Tensor) -> dist.Work:
        return _torch_private.start_all_gather(self.group, full, own)

    def _start_reduce(self, total: Tensor, buffer: Tensor) -> dist.Work:
        return _torch_private.start_reduce_scatter(self.group, total, buffer)

    def end_reduce(
        self, handle: Handle, own: Tensor, dtype: torch.dtype, what: str, divisor: Tensor | None
    ) -> Tensor:
        handle.held[0].wait()
        total = handle.received[0]
        return total if divisor is None else total.to(dtype).div_(divisor)

    def begin_all_reduce(self, total: Tensor, tag: int, divisor: Tensor | None = None) -> Handle:
        ranks = self.ranks
        self.traffic.add(Kind.REPLICATE, 2 * (ranks - 1) * total.nbytes // ranks)
        with _torch_private.uncounted():  # it was counted when the reduction began
            work = _work(dist.all_reduce(total, group=self.group, async_op=True))
        return Handle([], held=(work, total), divisor=divisor)

    def end_all_reduce(self, handle: Handle, total: Tensor, what: str) -> None:
        handle.held[0].wait()
        if handle.divisor is not None:
            total.div_(handle.divisor)


class PythonGroupTransport(BackendTransport):
    """Uses torch's public collectives: BackendTransport's calls need a backend in C++."""

    def _start_gather(self, full: Tensor, own: Tensor) -> dist.Work:
        return _start_gather_in_python(self.group, full, own)

    def _start_reduce(self, total: Tensor, buffer: Tensor) -> dist.Work:
        if total.dtype.is_complex:
            total, buffer = torch.view_as_real(total), torch.view_as_real(buffer)
        if _defines(self.group, "reduce_scatter_single", "_reduce_scatter_base"):
            return _work(_reduce_scatter(total, buffer, group=self.group, async_op=True))
        return _work(
            dist.reduce_scatter(
                total, list(buffer.chunk(self.ranks)), group=self.group, async_op=True
            )
        )


def gather_in_group(group: dist.ProcessGroup, own: Tensor) -> Tensor:
    """Return [ranks * n] from every rank's ``own`` [n], over any process group. Collective."""
    full = own.new_empty(dist.get_world_size(group) * own.numel())
    if is_in_python(group):
        _start_gather_in_python(group, full, own).wait()
    else:
        _all_gather(full, own, group=group)
    return full


def _defines(group: dist.ProcessGroup, *methods: str) -> bool:
    """True if the class of a process group overrides a method that needs a backend in C++."""
    return any(
        getattr(type(group), name, None) is not getattr(dist.ProcessGroup, name, None)
        for name in methods
    )


def _start_gather_in_python(group: dist.ProcessGroup, full: Tensor, own: Tensor) -> dist.Work:
    """Start an all-gather into one tensor if the group supports it, else into a list, as all do."""
    if full.dtype.is_complex:
        full, own = torch.view_as_real(full), torch.view_as_real(own)
    if _defines(group, "all_gather_single", "_allgather_base"):
        return _work(_all_gather(full, own, group=group, async_op=True))
    return _work(dist.all_gather(list(full.chunk(group.size())), own, group=group, async_op=True))


def _work(work: dist.Work | None) -> dist.Work:
    """Narrow the type: torch returns None only in a process outside the group."""
    assert work is not None
    return work
