"""How concurrent kernels, collectives and copies of a step slow each other down.

Concurrent work divides shared resources (``Demand``), to an extent that can be chosen
(``Contention``). How long each takes alone is known to ``tests.support.cost_model``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tests.support.cost_model import H100, Link, Machine


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
class Contention:
    """What concurrent kernels are assumed to share."""

    matmul: float  # share of the multiprocessors that a matrix product takes
    memory_bound: float  # the same, of a kernel that only moves bytes
    collective: float  # the same, of a collective
    traffic: float  # bytes of memory traffic for each byte that a rank receives
    has_memory: bool  # whether memory bandwidth is shared


CONTENTION = {
    # Nothing is shared: whatever runs on another stream is free.
    "free": Contention(0.0, 0.0, 0.0, 0.0, False),
    "memory": Contention(0.0, 0.0, 0.0, 2.5, True),
    "sm": Contention(1.0, 0.25, 0.0, 2.5, True),
    # In addition, a collective takes 16 of 132 multiprocessors.
    "collectives": Contention(1.0, 0.25, 0.12, 2.5, True),
    # Kernels that are not collectives run one after the other.
    "serial": Contention(1.0, 1.0, 0.0, 0.0, False),
}


HOST = Link(25e9, 10e-6)  # between an H100 and its host, each direction


@dataclasses.dataclass(frozen=True)
class SharedMachine:
    """A machine, and what its work shares."""

    alone: Machine = H100
    host: Link = HOST
    contention: Contention = CONTENTION["sm"]

    def kernel(self, nbytes: float, flops: float = 0.0) -> Work:
        """nbytes: read and written. flops: of a matrix product; 0: the kernel only moves bytes."""
        seconds, contention = self.alone.kernel_s(nbytes, flops), self.contention
        memory = nbytes / self.alone.memory_bandwidth / seconds
        return Work(
            seconds,
            Demand(
                memory=memory if contention.has_memory else 0.0,
                multiprocessors=contention.matmul if flops else contention.memory_bound,
            ),
        )

    def all_gather(self, nbytes: float, ranks: Collection[int]) -> Work:
        """nbytes: of the whole output. ranks: of the group."""
        return self._collective(nbytes * (len(ranks) - 1) / len(ranks), ranks)

    def reduce_scatter(self, nbytes: float, ranks: Collection[int]) -> Work:
        """nbytes: of the whole input."""
        return self._collective(nbytes * (len(ranks) - 1) / len(ranks), ranks)

    def all_reduce(self, nbytes: float, ranks: Collection[int]) -> Work:
        return self._collective(2 * nbytes * (len(ranks) - 1) / len(ranks), ranks)

    def copy(self, nbytes: float, *, to_host: bool) -> Work:
        """A copy between pinned memory of the host and the device."""
        return Work(
            self.host.latency_s + nbytes / self.host.bandwidth,
            Demand(from_host=float(not to_host), to_host=float(to_host)),
        )

    def _collective(self, received: float, ranks: Collection[int]) -> Work:
        """received: bytes that a rank receives."""
        if len(ranks) == 1:
            return Work(0.0, Demand())
        seconds, contention = self.alone.collective_s(received, ranks), self.contention
        spans_nodes = self.alone.spans_nodes(ranks)
        traffic = contention.traffic * received / self.alone.memory_bandwidth / seconds
        return Work(
            seconds,
            Demand(
                memory=min(1.0, traffic) if contention.has_memory else 0.0,
                multiprocessors=contention.collective,
                node=float(not spans_nodes),
                network=float(spans_nodes),
            ),
        )
