"""From the gradients of leaves to the gradients of targets: where they collect, and how they are
summed over the ranks.

One rule governs what collects: which leaves are *filled* is a property of the collection. A first
gradient is put, a later one is added, and a reduction takes what is there (zeros for the rest) and
empties the set. Accumulation without communication, several backwards, recomputation and gradients
that come late are all that rule."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import _torch_private
from .._comm import shared_memory
from .._comm.communicator import Communicator
from .._comm.segments import Segments
from .device import ON_DEVICE, OffloadPolicy
from .storage import Storage
from .store import ParamStore

__all__ = [
    "GradBuffer",
    "CommHook",
    "DirectGradBuffer",
    "ReduceBuffer",
    "Reduction",
    "ReducePlan",
    "predivisor",
]


class CommHook(typing.NamedTuple):
    """A user's way to sum and average gradients. Where gradients are split it is called with
    (state, flat gradient [ranks * S], empty output [S]), else with (state, flat gradient [S]),
    which it changes in place. It divides as well."""

    state: Any
    function: Callable[..., Any]


def predivisor(ranks: int, dtype: torch.dtype) -> float:
    """What gradients are divided by before they travel: the sum of fp16 numbers overflows
    otherwise. About the square root."""
    factor = 1
    while dtype == torch.float16 and ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)


@dataclasses.dataclass(frozen=True)
class ReducePlan:
    """How a group's gradients travel: along the shard axis, then along the replica axis, under one
    tag each; then home."""

    shard: Communicator
    replica: Communicator
    shard_tag: int
    replica_tag: int
    home: OffloadPolicy = ON_DEVICE
    predivisor: float = 1.0  # what gradients were divided by before
    hook: CommHook | None = (
        None  # instead of the shard axis's sum (with `one_group` instead of the replica axis's)
    )
    one_group: bool = False  # see Mesh
    grad_dtype: torch.dtype | None = None  # of the result; None: the shard's
    ranks: int = dataclasses.field(init=False)
    # None: nothing is left to divide by. 0-d on the CPU: a number would be made into one at every
    # call.
    divisor: torch.Tensor | None = dataclasses.field(init=False)
    is_exact: bool = dataclasses.field(init=False)  # it rounds nothing
    reads_in_place: bool = dataclasses.field(
        init=False
    )  # some rank may read gradients where they lie

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", self.shard.ranks * self.replica.ranks)
        divisor = self.ranks / self.predivisor
        if self.hook is not None:  # has divided by the ranks that it has summed over
            divisor = 1.0 if self.one_group else float(self.replica.ranks)
        tensor = torch.tensor(divisor, dtype=torch.float64, device="cpu")
        object.__setattr__(self, "divisor", None if divisor == 1 else tensor)
        object.__setattr__(self, "is_exact", math.frexp(divisor)[0] == 0.5)
        object.__setattr__(
            self, "reads_in_place", self.shard.reads_in_place or self.replica.reads_in_place
        )

    def shares(self, numel: int, dtype: torch.dtype) -> bool:
        """True if some rank reads a buffer [numel] of gradients where it lies."""
        axis = self.shard if self.shard.ranks > 1 else self.replica
        return axis.shares(-(-numel // axis.ranks), dtype)


class GradBuffer(typing.Protocol):
    """What has been collected of one group's gradients."""

    @property
    def filled(self) -> Collection[int]:
        """The leaves that are filled: one object, whatever comes and goes."""

    def put(self, indices: Sequence[int], grads: list[torch.Tensor]) -> None:
        """Take the gradients of some leaves over: assigned where a leaf is not filled, else added.
        An index may come twice."""

    def drop(self, unsharded_params: Iterable[int]) -> None:
        """Forget the gradients of some leaves."""

    def discard(self) -> None:
        """Forget everything and free the memory."""

    def reduce(self, wire: ReducePlan, what: str) -> Iterator[list[torch.Tensor] | None]:
        """Send what is there, zeros where there is nothing. A generator of stages: each may wait
        for the one before; the last yields the gradient of every target.

        Stages are taken for all groups in turn at the end of backward, so that ranks which finish
        groups in different orders do not wait for each other in a circle.
        """

    @property
    def resident_nbytes(self) -> int: ...


class _Views(typing.NamedTuple):
    """A reduce buffer, and everything that is ever asked of it."""

    buffer: torch.Tensor  # [ranks * S]
    segments: Segments  # [S] each
    places: list[list[torch.Tensor]]
    whole: (
        list[torch.Tensor] | None
    )  # by leaf, its only place, in its shape; None if some have several


class ReduceBuffer:
    """A flat buffer [ranks * S] in the dtype gradients travel in. Its memory is there only while
    something is filled or travels.

    Where ranks read each other's memory the buffer lies in a block, another one each time: peers
    may still read the last one.
    """

    def __init__(
        self,
        store: ParamStore,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        predivisor: float = 1.0,
        wire: ReducePlan | None = None,
    ) -> None:
        """predivisor: what gradients are divided by on their way in. wire: that they will take, if
        it may be asked for its way."""
        self._store, self.filled, self._predivisor = store, set[int](), predivisor
        self._ranks, self._wire = ranks, wire
        self._buffer = torch.empty(ranks * store.numel, dtype=dtype, device=device)
        # Nothing is rounded before it is summed and divided: in bf16 one more would be lost beside
        # 256 already.
        self._sum_dtype = torch.promote_types(
            torch.promote_types(dtype, store.dtype), torch.float32
        )
        self._own, self._storage = self._views_of(self._buffer), Storage(self._buffer)
        self._views, self._split = self._own, store.split
        self._block: torch.Tensor | None = None  # whose views are used
        self._all = list(range(len(self._own.places) - 1))  # the leaves' indices
        self._storage.free()

    def _views_of(self, buffer: torch.Tensor) -> _Views:
        places = self._store.places(buffer)
        whole = [its[0] for its in places[:-1]] if self._store.pieces_are_whole else None
        return _Views(buffer, Segments(buffer, self._ranks), places, whole)

    @property
    def resident_nbytes(self) -> int:
        return self._storage.resident_nbytes if self._block is None else self._block.nbytes

    def _allocate(self) -> None:
        """Make room, unless there is."""
        if self._block is not None or self._storage.resident_nbytes:
            return
        buffer, wire = self._buffer, self._wire
        if wire is None or not wire.reads_in_place or not wire.shares(buffer.numel(), buffer.dtype):
            self._storage.allocate()
            return
        wire.shard.wait_readers(
            "gradients that this rank has sent"
        )  # so that their blocks can be had again
        self._block = shared_memory.empty(buffer.numel(), buffer.dtype)
        self._views = self._views_of(self._block)

    def _free(self) -> None:
        """Let go of the memory. What travels keeps its block by itself."""
        self._block, self._views = None, self._own
        self._storage.free()

    def put(self, indices: Sequence[int], grads: list[torch.Tensor]) -> None:
        filled = self.filled
        if not filled:
            self._allocate()
        whole = self._views.whole
        if (
            whole is not None and not filled and indices == self._all
        ):  # the usual case of a unit without large parameters
            first, values = whole, grads
            filled.update(indices)
        elif whole is not None and filled.isdisjoint(indices) and len(set(indices)) == len(indices):
            first, values = [whole[index] for index in indices], grads
            filled.update(indices)
        else:
            first, values = self._add_where_filled(indices, grads)
        if self._predivisor != 1:
            for place, value in zip(first, values, strict=True):
                torch.div(value, self._predivisor, out=place)
        elif len(first) == 1:
            first[0].copy_(values[0])
        elif first:
            _torch_private.copy_together(
                first, values
            )  # the cast to the dtype of the buffer is part of the copy

    def _add_where_filled(
        self, indices: Sequence[int], grads: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the places that come to be filled, and what belongs there."""
        first: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for index, grad in zip(indices, grads, strict=True):
            parts = self._split(index, grad)
            if index in self.filled:
                for place, part in zip(self._views.places[index], parts, strict=True):
                    place.add_(part, alpha=1 / self._predivisor)
            else:
                first += self._views.places[index]
                values += parts
                self.filled.add(index)
        return first, values

    def drop(self, unsharded_params: Iterable[int]) -> None:
        self.filled.difference_update(unsharded_params)
        if not self.filled:
            self._free()

    def discard(self) -> None:
        self.filled.clear()
        self._free()

    def reduce(self, wire: ReducePlan, what: str) -> Iterator[list[torch.Tensor] | None]:
        filled = self.filled
        if not filled:
            self._allocate()
        views = self._views
        # The last place belongs to no leaf and is never filled.
        some_lack = len(filled) < len(views.places) - 1
        empty = (
            [places for i, places in enumerate(views.places) if i not in filled]
            if some_lack
            else views.places[-1:]
        )
        for places in empty:
            for place in places:
                place.zero_()
        self.filled.clear()
        replicas_left = wire.hook is None or not wire.one_group
        divisor = wire.divisor
        if wire.hook is not None:
            total = self._by_hook(wire.hook, wire.shard.ranks)
        else:
            buffer = views.buffer if self._block is None else self._block
            pending = wire.shard.begin_reduce(buffer, views.segments, wire.shard_tag)
            yield None
            if self._block is not None and wire.shard.ranks == 1:
                total = (
                    self._block
                )  # it is given away, and comes back when the gradients that view it die
            else:
                now = divisor if wire.replica.ranks == 1 else None
                total = wire.shard.end_reduce(
                    pending, views.segments[wire.shard.rank], self._sum_dtype, what, now
                )
                divisor = divisor if now is None else None
            del buffer, pending, views  # they keep the block
        self._free()
        if replicas_left and wire.replica.ranks > 1:
            total = total.to(
                self._buffer.dtype
            )  # what travels is in the dtype of the reduction here, too
            # A piece is divided while it is at hand, unless that would round it before it is wide
            # again.
            now = divisor if wire.is_exact or total.dtype == self._sum_dtype else None
            pending = wire.replica.begin_all_reduce(total, wire.replica_tag, now)
            yield None
            pending = wire.replica.continue_all_reduce(pending, total, wire.replica_tag, what)
            yield None
            wire.replica.end_all_reduce(pending, total, what)
            divisor = divisor if now is None else None
        if divisor is not None:
            total = total.to(self._sum_dtype).div_(divisor)
        dtype = wire.grad_dtype or self._store.dtype
        yield self._store.grads(
            wire.home.to_host(total if total.dtype is dtype else total.to(dtype))
        )

    def _by_hook(self, hook: CommHook, ranks: int) -> torch.Tensor:
        """Let the user's hook sum and divide; return [S] in the dtype of sums. It may give what it
        is handed other data."""
        grad = self._views.buffer.clone()  # the hook may keep it
        if ranks == 1:
            hook.function(hook.state, grad)
            return grad.to(self._sum_dtype, copy=True)
        output = torch.empty_like(self._views.segments[0])
        hook.function(hook.state, grad, output)
        return output.to(self._sum_dtype)


class DirectGradBuffer:
    """For one rank, and leaves that are shaped as their targets: gradients are handed over as they
    are, without a buffer."""

    def __init__(self, store: ParamStore) -> None:
        self._sharded_params, self._grads = store.sharded_params, dict[int, torch.Tensor]()
        self.filled = self._grads.keys()

    @property
    def resident_nbytes(self) -> int:
        return sum(grad.nbytes for grad in self._grads.values())

    def put(self, indices: Sequence[int], grads: list[torch.Tensor]) -> None:
        for index, grad in zip(indices, grads, strict=True):
            if index in self._grads:
                self._grads[index].add_(grad)
            else:
                self._grads[index] = grad

    def drop(self, unsharded_params: Iterable[int]) -> None:
        for index in unsharded_params:
            self._grads.pop(index, None)

    def discard(self) -> None:
        self._grads.clear()

    def reduce(self, wire: ReducePlan, what: str) -> Iterator[list[torch.Tensor] | None]:
        grads = dict(self._grads)
        self._grads.clear()
        yield [
            grads[sharded_param.unsharded_params[0]]
            if sharded_param.unsharded_params[0] in grads
            else torch.zeros_like(sharded_param.parameter)
            for sharded_param in self._sharded_params
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
