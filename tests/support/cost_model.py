"""Estimates how long the kernels, collectives and copies of a training step take, and how those
that run at the same time slow each other down, from bytes, floating-point operations and ranks.

Kernels follow a roofline model; collectives take bandwidth and latency. The model does not know the
efficiency of kernels: ``flops`` and bandwidths are those reached in practice, not the data sheet's.
Concurrent work divides shared resources (``Demand``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

# Shares of the multiprocessors, of a kernel that only moves bytes and of a matrix product.
MEMORY_BOUND, MATMUL = 0.25, 1.0
TRAFFIC = 2.5  # bytes of memory traffic for each byte that a rank receives


class Demand(NamedTuple):
    """What work uses of each resource while nothing else runs, as a fraction."""

    memory: float = 0.0  # bandwidth
    multiprocessors: float = 0.0
    node: float = 0.0  # link between devices of a node
    network: float = 0.0  # link between nodes
    from_host: float = 0.0
    to_host: float = 0.0


class Work(NamedTuple):
    """One kernel, collective or copy."""

    seconds: float  # while nothing else runs
    demand: Demand


def speeds(demands: Sequence[Demand]) -> list[float]:
    """Return the speed (at most 1) of each of several concurrent works.

    If their demand for a resource exceeds it, all that use it slow down by the same factor.
    """
    totals = [max(1.0, sum(shares)) for shares in zip(*demands, strict=True)]
    return [
        1.0 / max(total if share else 1.0 for share, total in zip(demand, totals, strict=True))
        for demand in demands
    ]


@dataclasses.dataclass(frozen=True)
class Link:
    """bandwidth: bytes per second that a rank receives."""

    bandwidth: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Machine:
    """The device of a rank, and its links to the others. Rates are per second."""

    flops: float  # of matrix products, in the dtype of the computation
    memory_bandwidth: float
    launch_s: float  # the shortest time of a kernel
    node: Link  # between the devices of a node
    network: Link  # between nodes, for each device
    ranks_per_node: int
    host: Link  # between the device and its host, in each direction

    def kernel(self, nbytes: float, flops: float = 0.0) -> Work:
        """nbytes: read and written. flops: of a matrix product; 0: the kernel only moves bytes."""
        memory_s = nbytes / self.memory_bandwidth
        seconds = max(memory_s, flops / self.flops, self.launch_s)
        return Work(seconds, Demand(memory_s / seconds, MATMUL if flops else MEMORY_BOUND))

    def all_gather(self, nbytes: float, ranks: Collection[int]) -> Work:
        """Also a reduce-scatter. nbytes: of what is whole. ranks: of the group."""
        return self._collective(nbytes * (len(ranks) - 1) / len(ranks), ranks)

    def all_reduce(self, nbytes: float, ranks: Collection[int]) -> Work:
        return self._collective(2 * nbytes * (len(ranks) - 1) / len(ranks), ranks)

    def copy(self, nbytes: float, *, to_host: bool) -> Work:
        """A copy between pinned memory of the host and the device."""
        seconds = self.host.latency_s + nbytes / self.host.bandwidth
        return Work(seconds, Demand(from_host=float(not to_host), to_host=float(to_host)))

    def _collective(self, received: float, ranks: Collection[int]) -> Work:
        """received: bytes that a rank receives. The latency is constant, unlike that of a ring,
        which grows with the ranks."""
        if len(ranks) == 1:
            return Work(0.0, Demand())
        spans_nodes = len({rank // self.ranks_per_node for rank in ranks}) > 1
        link = self.network if spans_nodes else self.node
        seconds = link.latency_s + received / link.bandwidth
        memory = min(1.0, TRAFFIC * received / self.memory_bandwidth / seconds)
        used = Demand(memory, node=float(not spans_nodes), network=float(spans_nodes))
        return Work(seconds, used)


# Nodes of eight on NVLink, with 400 Gb/s of network each.
H100 = Machine(
    flops=400e12,
    memory_bandwidth=2.67e12,
    launch_s=4e-6,
    node=Link(360e9, 20e-6),
    network=Link(45e9, 60e-6),
    ranks_per_node=8,
    host=Link(25e9, 10e-6),
)
