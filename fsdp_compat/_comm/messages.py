"""The transport for gloo on CPU where ranks are on several hosts: values are sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .gloo import GlooTransport
from .transport import Handle, Kind


class MessageTransport(GlooTransport):
    """Sends values over gloo's connections."""

    def _start(self, sent: Tensor, tag: int, into: Sequence[Tensor] | None = None) -> Handle:
        connections, outgoing = self.connections, self._outgoing(sent, tag % len(Kind))
        own = outgoing[self.rank]
        if into is None:
            into = [own if r == self.rank else torch.empty_like(own) for r in range(self.ranks)]
        number = self._begin(tag)
        works = connections.post(
            [(into[source], source) for source, _ in connections.peers],
            [(outgoing[target], target) for _, target in connections.peers],
            tag,
            connections.names.get(tag, "parameters or gradients"),
        )
        receives, sends = works[: self.ranks - 1], works[self.ranks - 1 :]
        connections.sent[tag, number] = sends, sent, (tag, number, 0)
        message = tag, number, len(receives)
        handle = connections.unfinished[tag] = Handle(receives, into, sent, message)
        return handle

    def _outgoing(self, sent: Tensor, kind: int) -> list[Tensor]:
        """Return what is sent to each rank, out of ``sent``."""
        if kind == Kind.GATHER:
            return [sent] * self.ranks
        slices = self._slices(sent)
        return [slices[self.rank]] * self.ranks if kind == Kind.REPLICATE_BACK else slices

    def _parts(self, handle: Handle, own: Tensor, what: str) -> list[Tensor]:
        self._end(handle, what)
        return [own if r == self.rank else part for r, part in enumerate(handle.received)]

    def _fill(self, handle: Handle, what: str) -> None:
        self._end(handle, what)
