"""Operations on all communicators of a runtime."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .._comm.transport import Transport
from .device import OffloadPolicy
from .group import Group


class Communicators:
    """The communicators and offload policies of a runtime's groups, each once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._communicators: list[Transport] = []
        self.have_tags = True  # False: ranks must make their collectives in the same order
        self._offloads: list[OffloadPolicy] = []

    def use_groups(self, groups: Iterable[Group]) -> None:
        """Use the communicators of ``groups`` from now on."""
        groups = list(groups)
        found = [each for group in groups for each in (group.shard, group.replica)]
        found += [group.partial.communicator for group in groups if group.partial is not None]
        self._communicators = list(dict.fromkeys(each for each in found if each.ranks > 1))
        self.have_tags = all(communicator.has_tags for communicator in self._communicators)
        self._offloads = [group.offload for group in groups if group.offload.is_offloaded]

    def any_rank(self, flags: Sequence[bool], what: str) -> list[bool]:
        """Collective. Return for each flag, one byte, whether it is set on any rank."""
        values = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        for communicator in self._communicators:
            values = communicator.any_of(values, what)
        return [bool(value) for value in values.tolist()]

    def flush(self, what: str, in_graph: bool = False) -> None:
        """Wait until everything that this rank has sent, or copied to the host, has arrived.
        in_graph: leave copies of offloaded shards to the backward that follows, because a wait for
        them would stall the host until the device is done."""
        for communicator in self._communicators:
            communicator.settle(what)
        if not in_graph:
            self.wait_copies()

    def wait_copies(self) -> None:
        """Wait until offloaded shards may be overwritten and their gradients read."""
        for offload in self._offloads:
            offload.wait_readers()
