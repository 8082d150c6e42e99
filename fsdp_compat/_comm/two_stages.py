"""The transport along an axis of several hosts with several ranks each: one stage over hosts, one
within the host, so that every value is sent to each other host only once.

A rank has a host and a *local rank* on it. ``near`` connects the ranks of one host, which read each
other's memory; ``far`` connects the ranks with the same local rank on every host. The order of the
stages is the one that sends less over the network:

    all-gather       far, of this rank's shard; then near, of the shards of this local rank
    reduce-scatter   near, of what ranks of this local rank need; then far, of the sums of the host
    all-reduce       reduce-scatter near; all-reduce far, of a slice; all-gather near

So sums are taken within each host in rank order, in fp32 or wider, and rounded to the dtype of the
messages; then over hosts. Their bits, the same on all ranks, depend on which ranks share a host.

The second stage of an all-gather begins when this rank ends it, and waits until the other ranks of
the host end it, perhaps in another order: so a gather ends the earlier ones first. A step of a
reduction waits only for what every rank has begun in the step before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .board.processes import Process
from .gloo import GlooTransport, MessageTransport
from .gloo_connections import OverConnections
from .mesh import Axis
from .transport import ByRank, Handle


class _Pending(Handle):
    """A collective with one stage in flight, which sends ``held``."""

    __slots__ = ("stage", "step", "target")

    def __init__(self, stage: Handle, held: Tensor, target: Tensor, tag: int) -> None:
        super().__init__([], (), held, (tag, 0, 0))
        self.stage, self.target, self.step = stage, target, 0


class TwoStages(OverConnections):
    """Exchanges in two stages, each by a transport of its own."""

    reduce_steps, all_reduce_steps = 1, 3 + 1

    def __init__(
        self,
        axis: Axis,
        whole: GlooTransport,
        hosts: Sequence[Sequence[int]],
        connect: Callable[[Axis, torch.device, str], GlooTransport],
    ) -> None:
        """Collective. whole: between all ranks. hosts: see ``hosts_of``. connect: connects some
        ranks of the axis, under a name."""
        super().__init__(axis, whole.device, whole.connections)
        self._num_hosts, self._ranks_per_host = len(hosts), len(hosts[0])
        self._is_by_host = hosts[0][1] == 1
        self._host = next(host for host, ranks in enumerate(hosts) if axis.rank in ranks)
        self._local_rank = hosts[self._host].index(axis.rank)

        def connected(ranks: Sequence[int], name: str) -> GlooTransport:
            members = tuple(axis.members[rank] for rank in ranks)
            return connect(Axis(axis.group, ranks.index(axis.rank), members), whole.device, name)

        self._near = connected(hosts[self._host], f"host {self._host}")
        peers = [ranks[self._local_rank] for ranks in hosts]
        self._far = connected(peers, f"local rank {self._local_rank}")
        self._near.activity.names = self._far.activity.names = self.activity.names
        self.traffic = self._far.traffic  # what leaves this host
        self._gathers: dict[int, _Pending] = {}  # by tag: those that have not ended, oldest first

    def unfinished_gather(self, tag: int) -> Handle | None:
        return self._gathers.get(tag)

    def begin_gather(self, own: Tensor, full: Tensor, segments: ByRank, tag: int) -> Handle:
        if tag in self._gathers and not self.has_failed:  # left by an exception
            self.end_gather(self._gathers[tag], "parameters")
        staged = self._near.allocate(self._num_hosts * own.numel(), full.dtype)
        stage = self._far.begin_gather(own, staged, staged.chunk(self._num_hosts), tag)
        handle = self._gathers[tag] = _Pending(stage, staged, full, tag)
        return handle

    def end_gather(self, handle: Handle, what: str) -> None:
        while not handle.ended:
            self._end_gather(next(iter(self._gathers.values())), what)

    def _end_gather(self, handle: _Pending, what: str) -> None:
        near, (tag, *_), staged = self._near, handle.message, handle.held
        self._far.end_gather(handle.stage, what)
        near.settle(what)  # the others have read the last gather: its memory can be freed
        parts = into = self._by_local_rank(handle.target)
        is_sent = isinstance(near, MessageTransport)
        if is_sent:  # messages cannot be received into strided memory
            into = staged.new_empty(parts.shape)
        own = staged.view(parts.shape[1:])
        near.end_gather(near.begin_gather(own, handle.target, into.unbind(), tag), what)
        if is_sent:
            parts.copy_(into)
        handle.ended, handle.held = True, None
        del self._gathers[tag]

    def begin_reduce(self, buffer: Tensor, segments: ByRank, tag: int) -> Handle:
        parts, staged = self._by_local_rank(buffer), self._staged(buffer.numel(), buffer.dtype)
        staged.view(parts.shape).copy_(parts)
        return self._begin_sum_of_host(staged, staged, tag)

    def continue_reduce(self, handle: Handle, dtype: torch.dtype, tag: int, what: str) -> Handle:
        assert isinstance(handle, _Pending)
        total = handle.held = self._sum_of_host(handle, what)
        handle.stage = self._far.begin_reduce(total, total.chunk(self._num_hosts), tag)
        return handle

    def end_reduce(
        self, handle: Handle, own: Tensor, dtype: torch.dtype, what: str, divisor: Tensor | None
    ) -> Tensor:
        assert isinstance(handle, _Pending)
        part = handle.held.chunk(self._num_hosts)[self._host]
        total = self._far.end_reduce(handle.stage, part, dtype, what, divisor)
        self._far.settle(what, only_reductions=True)  # `held` can be freed
        return total

    def begin_all_reduce(self, total: Tensor, tag: int, divisor: Tensor | None = None) -> Handle:
        numel = total.numel()
        staged = self._staged(-(-numel // self._ranks_per_host) * self._ranks_per_host, total.dtype)
        staged[:numel].copy_(total)
        staged[numel:].zero_()
        handle = self._begin_sum_of_host(staged, total, tag)
        handle.divisor = divisor
        return handle

    def continue_all_reduce(self, handle: Handle, total: Tensor, tag: int, what: str) -> Handle:
        assert isinstance(handle, _Pending)
        near, far, step = self._near, self._far, handle.step
        handle.step += 1
        if step == 0:
            handle.held = self._sum_of_host(handle, what)
            handle.stage = far.begin_all_reduce(handle.held, tag, handle.divisor)
        elif step == 1:
            handle.stage = far.continue_all_reduce(handle.stage, handle.held, tag, what)
        elif step == 2:
            far.end_all_reduce(handle.stage, handle.held, what)
            numel = self._ranks_per_host * handle.held.numel()
            full = total if total.numel() == numel else total.new_empty(numel)
            parts = full.chunk(self._ranks_per_host)
            handle.target, handle.stage = full, near.begin_gather(handle.held, full, parts, tag)
        else:
            near.end_gather(handle.stage, what)
            if handle.target is not total:
                total.copy_(handle.target[: total.numel()])
        return handle

    def end_all_reduce(self, handle: Handle, total: Tensor, what: str) -> None:
        self._near.settle(what)  # the slice of this rank can be freed
        self._far.settle(what, only_reductions=True)

    def settle(self, what: str, only_reductions: bool = False) -> None:
        if not only_reductions and not self.has_failed:
            for handle in tuple(self._gathers.values()):
                self.end_gather(handle, what)
        self._near.settle(what, only_reductions)
        self._far.settle(what, only_reductions)

    def broadcast(self, tensors: Sequence[Tensor], what: str) -> None:
        if self._local_rank == 0:
            self._far.broadcast(tensors, what)
        self._near.broadcast(tensors, what)

    def gather_now(self, own: Tensor, what: str, tag: int = 0) -> Tensor:
        over_hosts = self._far.gather_now(own, what, tag)
        full = self._near.gather_now(over_hosts, what, tag)
        grid = full.view(self._ranks_per_host, self._num_hosts, own.numel())
        return (grid.transpose(0, 1) if self._is_by_host else grid).reshape(-1)

    # -- parts

    def _by_local_rank(self, full: Tensor) -> Tensor:
        """Return a view [local ranks, hosts, S] of the segments of all ranks."""
        hosts, per_host, size = self._num_hosts, self._ranks_per_host, full.numel() // self.ranks
        if self._is_by_host:
            return full.view(hosts, per_host, size).transpose(0, 1)
        return full.view(per_host, hosts, size)

    def _staged(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for what the ranks of this host sum, reused once no peer reads it."""
        self._near.settle("gradients that this rank has sent", only_reductions=True)
        return self._near.allocate(numel, dtype)

    def _begin_sum_of_host(self, staged: Tensor, target: Tensor, tag: int) -> _Pending:
        stage = self._near.begin_reduce(staged, staged.chunk(self._ranks_per_host), tag)
        return _Pending(stage, staged, target, tag)

    def _sum_of_host(self, handle: _Pending, what: str) -> Tensor:
        own = handle.held.chunk(self._ranks_per_host)[self._local_rank]
        return self._near.end_reduce(handle.stage, own, own.dtype, what, None)


def hosts_of(whole: GlooTransport) -> list[list[int]] | None:
    """Collective. Return the ranks of an axis by host and local rank, if they exchange in two
    stages: several hosts with equally many ranks, numbered host by host or round-robin."""
    if whole.ranks < 4:
        return None
    own = Process.own()
    machines = whole.gather_objects(None if own is None else own.machine)
    ranks, by_machine = range(whole.ranks), dict[str | None, list[int]]()
    for rank, machine in enumerate(machines):
        by_machine.setdefault(machine, []).append(rank)
    hosts, num_hosts = [*by_machine.values()], len(by_machine)
    per_host = whole.ranks // num_hosts
    by_host = [[*ranks[i * per_host : (i + 1) * per_host]] for i in range(num_hosts)]
    round_robin = [[*ranks[i::num_hosts]] for i in range(num_hosts)]
    is_regular = None not in machines and hosts in (by_host, round_robin)
    return hosts if is_regular and min(num_hosts, per_host) > 1 else None
