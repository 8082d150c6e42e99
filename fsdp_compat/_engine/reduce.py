"""From the gradients of leaves to the gradients of targets: where they collect, and how they are summed over the ranks.

One rule governs what collects: which leaves are *filled* is a property of the collection. A first gradient is put, a later one is
added, and a reduction takes what is there (zeros for the rest) and empties the set. Accumulation without communication, several
backwards, recomputation and gradients that come late are all that rule.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from . import torch_private
from .collectives import Communicator
from .device import ON_DEVICE, Home
from .segments import Segments
from .storage import Storage
from .store import ParamStore

__all__ = ["Collected", "CommHook", "HandedGradients", "ReduceBuffer", "Reduction", "Wire", "predivisor"]

Found = Sequence[tuple[int, torch.Tensor]]  # (index of the leaf, its gradient)


class CommHook(typing.NamedTuple):
    """A user's way to sum and average gradients. Where gradients are split it is called with (state, flat gradient [ranks * S],
    empty output [S]), else with (state, flat gradient [S]), which it changes in place. It divides as well."""

    state: Any
    function: Callable[..., Any]


def predivisor(ranks: int, dtype: torch.dtype) -> float:
    """What gradients are divided by before they travel: the sum of fp16 numbers overflows otherwise. About the square root."""
    factor = 1
    while dtype == torch.float16 and ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)


@dataclasses.dataclass(frozen=True)
class Wire:
    """How a group's gradients travel: along the shard axis, then along the replica axis, under one tag each; then home."""

    shard: Communicator
    replica: Communicator
    shard_tag: int
    replica_tag: int
    home: Home = ON_DEVICE
    predivisor: float = 1.0  # what gradients were divided by before
    hook: CommHook | None = None  # instead of the shard axis's sum (with `one_group` instead of the replica axis's)
    one_group: bool = False  # see Mesh
    grad_dtype: torch.dtype | None = None  # of the result; None: the shard's
    ranks: int = dataclasses.field(init=False)
    divisor: torch.Tensor = dataclasses.field(init=False)  # 0-d on the CPU: a number would be made into one at every call

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", self.shard.ranks * self.replica.ranks)
        divisor = self.ranks / self.predivisor
        if self.hook is not None:  # has divided by the ranks that it has summed over
            divisor = 1.0 if self.one_group else float(self.replica.ranks)
        object.__setattr__(self, "divisor", torch.tensor(divisor, dtype=torch.float64, device="cpu"))


class Collected(typing.Protocol):
    """What has been collected of one group's gradients."""

    def __bool__(self) -> bool:
        """True if some leaf is filled."""

    def put(self, found: Found) -> None:
        """Take gradients over: assigned where the leaf is not filled, else added."""

    def drop(self, leaves: Iterable[int]) -> None:
        """Forget the gradients of some leaves."""

    def discard(self) -> None:
        """Forget everything and free the memory."""

    def reduce(self, wire: Wire, what: str) -> Iterator[list[torch.Tensor] | None]:
        """Send what is there, zeros where there is nothing. A generator of stages: each may wait for the one before; the last
        yields the gradient of every target.

        Stages are taken for all groups in turn at the end of backward, so that ranks which finish groups in different orders do not
        wait for each other in a circle.
        """

    @property
    def resident_nbytes(self) -> int: ...


class ReduceBuffer:
    """A flat buffer [ranks * S] in the dtype gradients travel in. Its memory is there only while something is filled or travels."""

    def __init__(self, store: ParamStore, ranks: int, dtype: torch.dtype, device: torch.device, predivisor: float = 1.0) -> None:
        """predivisor: what gradients are divided by on their way in."""
        self._store, self._filled, self._predivisor = store, set[int](), predivisor
        self._buffer = torch.empty(ranks * store.numel, dtype=dtype, device=device)
        # Nothing is rounded before it is summed and divided: in bf16 one more would be lost beside 256 already.
        self._sum_dtype = torch.promote_types(torch.promote_types(dtype, store.dtype), torch.float32)
        self._segments = Segments(self._buffer, ranks)
        self._places, self._split, self._storage = store.places(self._buffer), store.split, Storage(self._buffer)
        self._storage.free()

    def __bool__(self) -> bool:
        return bool(self._filled)

    @property
    def resident_nbytes(self) -> int:
        return self._storage.resident_nbytes

    def put(self, found: Found) -> None:
        places, split, filled = self._places, self._split, self._filled
        if not filled:
            self._storage.allocate()
        first: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for index, grad in found:
            parts = split(index, grad)
            if index in filled:
                for place, part in zip(places[index], parts, strict=True):
                    place.add_(part, alpha=1 / self._predivisor)
            else:
                first += places[index]
                values += parts
                filled.add(index)
        if self._predivisor != 1:
            for place, part in zip(first, values, strict=True):
                torch.div(part, self._predivisor, out=place)
        elif len(first) == 1:
            first[0].copy_(values[0])
        elif first:
            torch_private.copy_together(first, values)  # the cast to the dtype of the buffer is part of the copy

    def drop(self, leaves: Iterable[int]) -> None:
        self._filled.difference_update(leaves)
        if not self._filled:
            self._storage.free()

    def discard(self) -> None:
        self._filled.clear()
        self._storage.free()

    def reduce(self, wire: Wire, what: str) -> Iterator[list[torch.Tensor] | None]:
        if not self._filled:
            self._storage.allocate()
        for index, places in enumerate(self._places):  # the last belongs to no leaf and is never filled
            if index not in self._filled:
                for place in places:
                    place.zero_()
        self._filled.clear()
        if wire.hook is not None:
            total = self._by_hook(wire.hook, wire.shard.ranks)
            replicas_left = not wire.one_group
        else:
            pending = wire.shard.begin_reduce(self._buffer, self._segments, wire.shard_tag)
            yield None
            total = wire.shard.end_reduce(pending, self._segments[wire.shard.rank], self._sum_dtype, what)
            replicas_left = True
        self._storage.free()
        if replicas_left:
            if wire.replica.ranks > 1:
                total = total.to(self._buffer.dtype)  # what travels is in the dtype of the reduction here, too
            pending = wire.replica.begin_total(total, wire.replica_tag)
            yield None
            pending = wire.replica.continue_total(pending, total, wire.replica_tag, what)
            yield None
            wire.replica.end_total(pending, what)
            total = total.to(self._sum_dtype)
        if wire.ranks > 1:
            total.div_(wire.divisor)  # the sum is divided once, on the shard
        yield self._store.grads(wire.home.back(total.to(wire.grad_dtype or self._store.dtype)))

    def _by_hook(self, hook: CommHook, ranks: int) -> torch.Tensor:
        """Let the user's hook sum and divide; return [S] in the dtype of sums. It may give what it is handed other data."""
        grad = self._buffer.clone()  # the hook may keep it
        if ranks == 1:
            hook.function(hook.state, grad)
            return grad.to(self._sum_dtype, copy=True)
        output = torch.empty_like(self._segments[0])
        hook.function(hook.state, grad, output)
        return output.to(self._sum_dtype)


class HandedGradients:
    """For one rank, and leaves that are shaped as their targets: gradients are handed over as they are, without a buffer."""

    def __init__(self, store: ParamStore) -> None:
        self._targets, self._grads = store.targets, dict[int, torch.Tensor]()

    def __bool__(self) -> bool:
        return bool(self._grads)

    @property
    def resident_nbytes(self) -> int:
        return sum(grad.nbytes for grad in self._grads.values())

    def put(self, found: Found) -> None:
        for index, grad in found:
            if index in self._grads:
                self._grads[index].add_(grad)
            else:
                self._grads[index] = grad

    def drop(self, leaves: Iterable[int]) -> None:
        for index in leaves:
            self._grads.pop(index, None)

    def discard(self) -> None:
        self._grads.clear()

    def reduce(self, wire: Wire, what: str) -> Iterator[list[torch.Tensor] | None]:
        grads, self._grads = self._grads, {}
        yield [
            grads[target.leaves[0]] if target.leaves[0] in grads else torch.zeros_like(target.parameter) for target in self._targets
        ]


class Reduction:
    """A reduction under way. It can be taken one stage further, or to its end."""

    __slots__ = ("_stages", "grads")

    def __init__(self, stages: Iterator[list[torch.Tensor] | None]) -> None:
        self._stages = stages
        self.grads: list[torch.Tensor] | None = None  # one per target, when it has ended
        self.advance()

    def advance(self) -> None:
        if self.grads is None:
            self.grads = next(self._stages)

    def finish(self) -> list[torch.Tensor]:
        while self.grads is None:
            self.advance()
        return self.grads
