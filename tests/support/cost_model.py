"""Estimates how long the kernels and collectives of a training step take, from bytes,
floating-point operations and ranks.

Kernels follow a roofline model; collectives take bandwidth and latency. The model does not know the
efficiency of kernels: ``flops`` and bandwidths are those reached in practice, not the data
sheet's."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection


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

    def kernel_s(self, nbytes: float, flops: float = 0.0) -> float:
        """nbytes: read and written. flops: of a matrix product; 0: the kernel only moves bytes."""
        return max(nbytes / self.memory_bandwidth, flops / self.flops, self.launch_s)

    def collective_s(self, received: float, ranks: Collection[int]) -> float:
        """received: bytes that a rank receives. The latency is constant, unlike that of a ring,
        which grows with the ranks."""
        if len(ranks) == 1:
            return 0.0
        link = self.network if self.spans_nodes(ranks) else self.node
        return link.latency_s + received / link.bandwidth

    def spans_nodes(self, ranks: Collection[int]) -> bool:
        return len({rank // self.ranks_per_node for rank in ranks}) > 1


# Nodes of eight on NVLink, with 400 Gb/s of network each.
H100 = Machine(
    flops=400e12,
    memory_bandwidth=2.67e12,
    launch_s=4e-6,
    node=Link(360e9, 20e-6),
    network=Link(45e9, 60e-6),
    ranks_per_node=8,
)
