"""The transports for gloo on CPU: each rank exchanges messages with every other. How values reach
the peers is decided by MessageTransport, which sends them, and same_host/transport.py."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from .board.calls import COLLECTIVE
from .gloo_connections import OverConnections
from .transport import VALUES, ByRank, Handle, Kind, as_bytes

_CHUNK_NUMEL = 1 << 17  # summed at a time, per thread: stays in the cache until it is divided


class GlooTransport(OverConnections):
    """Exchanges messages with tags. Sent tensors must not change until ``settle``.

    A subclass has ``_start``, which sends and begins to receive, and ``_read``, which returns a
    peer's part once all parts have arrived (``_await``). It may add to ``_was_read``, which ends
    the exchange."""

    reads_later = True
    all_reduce_steps = 1

    # -- a message: ``_start``; then ``_fill``, or ``_parts`` and ``_was_read``

    @abc.abstractmethod
    def _start(
        self, sent: Tensor, tag: int, into: ByRank | None = None, dtype: torch.dtype | None = None
    ) -> Handle:
        """Send each rank its part of ``sent``, by the tag's kind, and receive every rank's part in
        ``into[rank]``; None: in new memory, or read in place. dtype: of ``into``, if another."""

    @abc.abstractmethod
    def _read(self, handle: Handle, source: int, like: Tensor, what: str) -> Tensor:
        """Return this rank's part of a message that has arrived. like: of its length and dtype."""

    def _parts(self, handle: Handle, own: Tensor, what: str) -> list[Tensor]:
        """Wait, and return the parts by rank. own: this rank's."""
        self._await(handle, what)
        ranks, rank = range(self.ranks), self.rank
        return [own if r == rank else self._read(handle, r, own, what) for r in ranks]

    def _fill(self, handle: Handle, what: str) -> None:
        """Wait until ``handle.received`` is filled."""
        self._await(handle, what)
        for source, _ in self.connections.peers:
            into = handle.received[source]
            part = self._read(handle, source, into, what)
            if part is not into:
                into.copy_(part.view(into.shape))
        self._was_read(handle, what)

    def _was_read(self, handle: Handle, what: str) -> None:
        """The parts were read: the exchange has ended."""
        self.connections.unfinished.pop(handle.message[0], None)

    def _count(self, tag: int) -> int:
        """Count another message with this tag, and return the count."""
        connections = self.connections
        leftover = connections.unfinished.get(tag)
        if leftover is not None:  # left by an exception; the peers count it
            connections.require_thread()
            what = self.activity.name_of(tag)
            if tag % len(Kind) != Kind.GATHER:
                connections.fail(what, cause="an exception has interrupted a reduction")
            self.end_gather(leftover, what)
        return connections.begin(tag)

    def _await(self, handle: Handle, what: str) -> None:
        """Wait until the parts of all peers have arrived."""
        connections = self.connections
        if connections.gloo is None:
            connections.require_open()
        connections.wait(handle.works, handle.message, what)
        handle.works.clear()
        handle.ended = True

    def _slices(self, total: Tensor) -> list[Tensor]:
        """Return the slices of ``total`` that the ranks sum; the last ones may be shorter."""
        size = -(-total.numel() // self.ranks)
        return [total[r * size : (r + 1) * size] for r in range(self.ranks)]

    # -- Transport

    def unfinished_gather(self, tag: int) -> Handle | None:
        return self.connections.unfinished.get(tag)

    def gather_now(self, own: Tensor, what: str, tag: int = 0) -> Tensor:
        full = super().gather_now(own, what, tag)
        self._await_taken(tag, self.connections.activity.counts[tag], what)
        return full

    def broadcast(self, tensors: Sequence[Tensor], what: str) -> None:
        """By a binomial tree: a rank receives from the one whose number lacks its lowest set bit,
        and sends to those whose number has one more bit below that."""
        connections, rank, sent = self.connections, self.rank, as_bytes(tensors)
        what = f"a broadcast of {what}"
        connections.begin(COLLECTIVE)
        lowest = rank & -rank or 1 << self.ranks.bit_length()
        if rank:
            connections.transfer([(tensor, rank - lowest) for tensor in sent], (), what)
        bits = [1 << bit for bit in reversed(range(lowest.bit_length() - 1))]
        targets = [rank + bit for bit in bits if rank + bit < self.ranks]
        connections.transfer((), [(t, target) for target in targets for t in sent], what)

    def begin_gather(self, own: Tensor, full: Tensor, segments: ByRank, tag: int) -> Handle:
        if tag != VALUES:
            self.traffic.add(Kind.GATHER, own.numel() * full.itemsize * (self.ranks - 1))
        # not sent from `full`, which may be freed before slow peers have received
        handle = self._start(own, tag, segments, full.dtype)
        segments[self.rank].copy_(own)
        return handle

    def end_gather(self, handle: Handle, what: str) -> None:
        if not handle.ended:
            self._fill(handle, what)

    def begin_reduce(self, buffer: Tensor, segments: ByRank, tag: int) -> Handle:
        self.traffic.add(Kind.REDUCE, segments[self.rank].nbytes * (self.ranks - 1))
        return self._start(buffer, tag + Kind.REDUCE)

    def end_reduce(
        self, handle: Handle, own: Tensor, dtype: torch.dtype, what: str, divisor: Tensor | None
    ) -> Tensor:
        parts = self._parts(handle, own, what)
        total = handle.received[0 if self.rank else 1] if handle.received else own
        if total is own or total.dtype != dtype:
            total = self.allocate(own.numel(), dtype)
        sum_in_rank_order(parts, total, divisor)
        self._was_read(handle, what)
        return total

    def begin_all_reduce(self, total: Tensor, tag: int, divisor: Tensor | None = None) -> Handle:
        self.traffic.add(Kind.REPLICATE, 2 * (self.ranks - 1) * total.nbytes // self.ranks)
        handle = self._start(total, tag + Kind.REPLICATE)
        handle.divisor = divisor
        return handle

    def continue_all_reduce(self, handle: Handle, total: Tensor, tag: int, what: str) -> Handle:
        slices, sent = self._slices(total), handle.held
        own = slices[self.rank]
        sum_in_rank_order(self._parts(handle, own, what), own, handle.divisor)
        self._was_read(handle, what)
        if sent is not total:
            self._slices(sent)[self.rank].copy_(own)
        # This message also tells the others that this rank has read its slice of every total, so
        # that they may write there.
        return self._start(sent, tag + Kind.REPLICATE_BACK, slices)

    def end_all_reduce(self, handle: Handle, total: Tensor, what: str) -> None:
        self._fill(handle, what)

    def settle(self, what: str, only_reductions: bool = False) -> None:
        connections = self.connections
        if not only_reductions:  # a peer may be waiting for this rank to read what it gathers
            for tag, handle in list(connections.unfinished.items()):
                if tag % len(Kind) == Kind.GATHER:
                    self.end_gather(handle, self.activity.name_of(tag))
        for tag, number in list(connections.sent):
            last = connections.unfinished.get(tag)
            is_included = not only_reductions or tag % len(Kind) != Kind.GATHER
            if is_included and (last is None or last.message[1] != number):
                self._await_taken(tag, number, what)

    def _await_taken(self, tag: int, number: int, what: str) -> None:
        """Wait until the peers have received or read a message of this rank."""
        sent = self.connections.sent[tag, number]
        self.connections.wait(sent.works, sent.message, self.activity.names.get(tag, what))
        self.connections.sent.pop((tag, number), None)


def sum_in_rank_order(parts: Sequence[Tensor], total: Tensor, divisor: Tensor | None) -> None:
    """Sum ``parts`` in rank order into ``total``, which may be one of them, in fp32 or wider, and
    divide by ``divisor``: the same bits on every rank."""
    step = _CHUNK_NUMEL * max(torch.get_num_threads(), 1)
    if total.numel() > step:
        for start in range(0, total.numel(), step):
            chunk = slice(start, start + step)
            sum_in_rank_order([part[chunk] for part in parts], total[chunk], divisor)
        return
    wide = torch.promote_types(total.dtype, torch.float32)
    # a separate accumulator, unless the first addition may overwrite ``total``
    separate = total.dtype != wide or any(part.data_ptr() == total.data_ptr() for part in parts[2:])
    result = torch.empty(total.shape, dtype=wide, device="cpu") if separate else total
    first, *rest = parts
    if first.dtype == rest[0].dtype == wide:
        torch.add(first, rest.pop(0), out=result)
    else:
        result.copy_(first)
    for part in rest:
        result.add_(part)
    if divisor is not None:
        result.div_(divisor)
    if separate:
        total.copy_(result)


class MessageTransport(GlooTransport):
    """Sends values over gloo's connections, where ranks are on several hosts."""

    def _start(
        self, sent: Tensor, tag: int, into: ByRank | None = None, dtype: torch.dtype | None = None
    ) -> Handle:
        connections, kind, sent = self.connections, tag % len(Kind), sent.to(dtype or sent.dtype)
        outgoing = [sent] * self.ranks if kind == Kind.GATHER else self._slices(sent)
        own = outgoing[self.rank]
        if kind == Kind.REPLICATE_BACK:
            outgoing = [own] * self.ranks
        if into is None:
            into = [own if r == self.rank else torch.empty_like(own) for r in range(self.ranks)]
        number = self._count(tag)
        works = connections.post(
            [(into[source], source) for source, _ in connections.peers],
            [(outgoing[target], target) for _, target in connections.peers],
            tag,
            self.activity.name_of(tag),
        )
        receives, sends = works[: self.ranks - 1], works[self.ranks - 1 :]
        connections.sent[tag, number] = Handle(sends, held=sent, message=(tag, number, 0))
        handle = Handle(receives, into, sent, (tag, number, len(receives)))
        connections.unfinished[tag] = handle
        return handle

    def _read(self, handle: Handle, source: int, like: Tensor, what: str) -> Tensor:
        return handle.received[source]
