"""The communicators that several files share: of a group's reductions, and of all groups."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import torch

from .._comm.transport import Transport
from .device import ON_DEVICE, OffloadPolicy


@dataclasses.dataclass(eq=False)
class ReduceAxes:
    """The axes that a group's gradients are reduced over, in this order, with a tag each."""

    shard: Transport
    replica: Transport
    shard_tag: int
    replica_tag: int
    offload: OffloadPolicy = ON_DEVICE
    one_group: bool = False  # see Mesh
    is_hybrid: bool = False  # see Mesh

    @property
    def ranks(self) -> int:
        return self.shard.ranks * self.replica.ranks

    @functools.cached_property
    def have_replicas(self) -> bool:
        return self.is_hybrid or self.replica.ranks > 1

    @functools.cached_property
    def keep_buffers(self) -> bool:
        """True if one buffer can be used for every reduction."""
        return self.shard.ranks > 1 and not self.shard.reads_later

    def wait_until_writable(self, what: str) -> None:
        """Wait until nobody reads the gradients of finished reductions any more."""
        self.offload.wait_copies()
        self.replica.settle(what, only_reductions=True)  # peers may read them


class Communicators:
    """The communicators and offload policies of a runtime's groups, each once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._communicators: list[Transport] = []
        self.have_tags = True  # False: ranks must make their collectives in the same order
        self._offloads: list[OffloadPolicy] = []

    def use(self, communicators: Iterable[Transport], offloads: Iterable[OffloadPolicy]) -> None:
        """Use these, of all groups, from now on."""
        self._communicators = list(dict.fromkeys(each for each in communicators if each.ranks > 1))
        self.have_tags = all(each.activity.has_tags for each in self._communicators)
        self._offloads = list(dict.fromkeys(each for each in offloads if each.is_offloaded))

    def any_rank(self, flags: Sequence[bool], what: str) -> list[bool]:
        """Return for each flag, one byte, whether it is set on any rank. Collective: all axes."""
        on_host = all(each.takes_host_values for each in self._communicators)
        device = torch.device("cpu") if on_host else self._device
        values = torch.tensor(flags, dtype=torch.uint8, device=device)
        for each in self._communicators:
            values = each.max_of(values, what)
        return [bool(value) for value in values.tolist()]

    def settle(self, what: str, in_graph: bool = False) -> None:
        """Wait until everything that this rank has sent, or copied to the host, has arrived.
        in_graph: leave copies of offloaded shards to the backward that follows, because a wait for
        them would stall the host until the device is done."""
        for each in self._communicators:
            each.settle(what)
        if not in_graph:
            self.wait_copies()

    def before_step(self) -> bool:
        """Wait until offloaded shards may be overwritten; return whether communication works."""
        for each in self._communicators:
            each.before_step()
        self.wait_copies()
        return not any(each.has_failed for each in self._communicators)

    def wait_copies(self) -> None:
        """Wait until offloaded shards may be overwritten and their gradients read."""
        for offload in self._offloads:
            offload.wait_copies()
