"""The buffers that collect gradients of unsharded parameters, and the reduction that turns them
into gradients of sharded parameters.

One rule covers all cases. Which gradients were *received* is a property of the buffer: the first
gradient of a parameter is assigned, later ones are added, and a reduction sends the buffer, with
zeros for what was not received, and empties the set. Accumulation without communication, several
backwards, recomputation and late gradients need nothing else."""

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
    "CommHook",
    "DirectGradBuffer",
    "GradBuffer",
    "ReduceBuffer",
    "ReducePlan",
    "Reduction",
    "predivisor",
]


class CommHook(typing.NamedTuple):
    """A user's function that sums and averages gradients.

    Where gradients are scattered it is called with (state, flat gradient [ranks * S], empty output
    [S]), otherwise with (state, flat gradient [S]), which it changes in place. It also divides.
    """

    state: Any
    function: Callable[..., Any]


def predivisor(ranks: int, dtype: torch.dtype) -> float:
    """Return the divisor of gradients before their reduction, about the square root of ``ranks``,
    without which sums of fp16 numbers would overflow."""
    factor = 1
    while dtype == torch.float16 and ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)


@dataclasses.dataclass(frozen=True)
class ReducePlan:
    """How a group's gradients are reduced: over the shard axis, then over the replica axis, under
    one tag each; ``offload`` then decides whether they move to the host."""

    shard: Communicator
    replica: Communicator
    shard_tag: int
    replica_tag: int
    offload: OffloadPolicy = ON_DEVICE
    predivisor: float = 1.0  # of gradients before the reduction
    hook: CommHook | None = None  # replaces the sum over the shard axis; with one_group over both
    one_group: bool = False  # see Mesh
    grad_dtype: torch.dtype | None = None  # of the result; None: the shard's
    ranks: int = dataclasses.field(init=False)
    # Of the sum; None: 1. A 0-d CPU tensor saves torch from making one of a number in each call.
    divisor: torch.Tensor | None = dataclasses.field(init=False)
    is_exact: bool = dataclasses.field(init=False)  # the division never rounds
    reads_in_place: bool = dataclasses.field(init=False)  # ranks may read each other's buffers

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", self.shard.ranks * self.replica.ranks)
        divisor = self.ranks / self.predivisor
        if self.hook is not None:  # the hook divides by the ranks that it sums over
            divisor = 1.0 if self.one_group else float(self.replica.ranks)
        tensor = torch.tensor(divisor, dtype=torch.float64, device="cpu")
        object.__setattr__(self, "divisor", None if divisor == 1 else tensor)
        object.__setattr__(self, "is_exact", math.frexp(divisor)[0] == 0.5)
        object.__setattr__(
            self, "reads_in_place", self.shard.reads_in_place or self.replica.reads_in_place
        )

    def shares(self, numel: int, dtype: torch.dtype) -> bool:
        """True if other ranks read a gradient buffer [numel] in place."""
        axis = self.shard if self.shard.ranks > 1 else self.replica
        return axis.shares(-(-numel // axis.ranks), dtype)


class GradBuffer(typing.Protocol):
    """Collects the gradients of one group's unsharded parameters until they are reduced."""

    @property
    def received(self) -> Collection[int]:
        """The indices of parameters whose gradients are here: always the same object."""

    def put(self, indices: Sequence[int], grads: list[torch.Tensor]) -> None:
        """Take gradients: assign those not yet received, add the others. An index may come
        twice."""

    def drop(self, indices: Iterable[int]) -> None:
        """Drop the gradients of some parameters."""

    def discard(self) -> None:
        """Drop all gradients and free the memory."""

    def reduce(self, plan: ReducePlan, what: str) -> Iterator[list[torch.Tensor] | None]:
        """Reduce the gradients, with zeros for those not received. Collective.

        A generator of stages, each of which may wait for the one before. The last one yields the
        gradient of every sharded parameter, the others None. At the end of backward the stages of
        all groups run in turn, so that ranks that finish groups in different orders do not wait for
        each other in a circle.
        """

    @property
    def resident_nbytes(self) -> int: ...


class _Views(typing.NamedTuple):
    """A reduce buffer and its views."""

    buffer: torch.Tensor  # [ranks * S]
    segments: Segments  # [S] each
    places: list[list[torch.Tensor]]  # see ParamStore.places
    # Each parameter's only place, in the parameter's shape; None if some have several places.
    whole: list[torch.Tensor] | None


class ReduceBuffer:
    """A flat buffer [ranks * S] in the dtype of the reduction. It holds memory only from the first
    received gradient to the end of the reduction.

    Where ranks read each other's memory the buffer is a block of shared memory, a different one
    each time: peers may still read the previous one.
    """

    def __init__(
        self,
        store: ParamStore,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        predivisor: float = 1.0,
        plan: ReducePlan | None = None,
    ) -> None:
        """predivisor: of gradients as they are put in. plan: of later reductions; None: the buffer
        is never shared memory."""
        self._store, self.received, self._predivisor = store, set[int](), predivisor
        self._ranks, self._plan = ranks, plan
        self._buffer = torch.empty(ranks * store.numel, dtype=dtype, device=device)
        # Sums are divided before they are rounded: in bf16, 256 + 1 is 256.
        self._sum_dtype = torch.promote_types(
            torch.promote_types(dtype, store.dtype), torch.float32
        )
        self._own, self._storage = self._views_of(self._buffer), Storage(self._buffer)
        self._views, self._split = self._own, store.split
        self._block: torch.Tensor | None = None  # shared memory in place of the buffer's own
        self._all_indices = list(range(len(self._own.places) - 1))
        self._storage.free()

    def _views_of(self, buffer: torch.Tensor) -> _Views:
        places = self._store.places(buffer)
        whole = [of_param[0] for of_param in places[:-1]] if self._store.pieces_are_whole else None
        return _Views(buffer, Segments(buffer, self._ranks), places, whole)

    @property
    def resident_nbytes(self) -> int:
        return self._storage.resident_nbytes if self._block is None else self._block.nbytes

    def _allocate(self) -> None:
        """Allocate memory, unless the buffer has it."""
        if self._block is not None or self._storage.resident_nbytes:
            return
        buffer, plan = self._buffer, self._plan
        if plan is None or not plan.reads_in_place or not plan.shares(buffer.numel(), buffer.dtype):
            self._storage.allocate()
            return
        # The blocks of earlier gradients can be reused once no peer reads them.
        plan.shard.wait_readers("gradients that this rank has sent")
        self._block = shared_memory.empty(buffer.numel(), buffer.dtype)
        self._views = self._views_of(self._block)

    def _free(self) -> None:
        """Free the memory. A reduction in flight keeps its block."""
        self._block, self._views = None, self._own
        self._storage.free()

    def put(self, indices: Sequence[int], grads: list[torch.Tensor]) -> None:
        received = self.received
        if not received:
            self._allocate()
        whole = self._views.whole
        if whole is not None and not received and indices == self._all_indices:
            first, values = whole, grads  # the usual case of a unit without large parameters
            received.update(indices)
        elif (
            whole is not None and received.isdisjoint(indices) and len(set(indices)) == len(indices)
        ):
            first, values = [whole[index] for index in indices], grads
            received.update(indices)
        else:
            first, values = self._add_to_received(indices, grads)
        if self._predivisor != 1:
            for place, value in zip(first, values, strict=True):
                torch.div(value, self._predivisor, out=place)
        elif len(first) == 1:
            first[0].copy_(values[0])
        elif first:
            _torch_private.copy_together(first, values)  # casts to the buffer's dtype

    def _add_to_received(
        self, indices: Sequence[int], grads: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Add the gradients of parameters already received; return the places and the values of the
        others."""
        first: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for index, grad in zip(indices, grads, strict=True):
            parts = self._split(index, grad)
            if index in self.received:
                for place, part in zip(self._views.places[index], parts, strict=True):
                    place.add_(part, alpha=1 / self._predivisor)
            else:
                first += self._views.places[index]
                values += parts
                self.received.add(index)
        return first, values

    def drop(self, indices: Iterable[int]) -> None:
        self.received.difference_update(indices)
        if not self.received:
            self._free()

    def discard(self) -> None:
        self.received.clear()
        self._free()

    def reduce(self, plan: ReducePlan, what: str) -> Iterator[list[torch.Tensor] | None]:
        received = self.received
        if not received:
            self._allocate()
        views = self._views
        # The last list of places belongs to no parameter and is always zeroed.
        some_missing = len(received) < len(views.places) - 1
        empty = (
            [places for i, places in enumerate(views.places) if i not in received]
            if some_missing
            else views.places[-1:]
        )
        for places in empty:
            for place in places:
                place.zero_()
        self.received.clear()
        reduces_over_replicas = plan.hook is None or not plan.one_group
        divisor = plan.divisor
        if plan.hook is not None:
            total = self._by_hook(plan.hook, plan.shard.ranks)
        else:
            buffer = views.buffer if self._block is None else self._block
            pending = plan.shard.begin_reduce(buffer, views.segments, plan.shard_tag)
            yield None
            if self._block is not None and plan.shard.ranks == 1:
                total = self._block  # reused when the gradients that view it are freed
            else:
                now = divisor if plan.replica.ranks == 1 else None
                total = plan.shard.end_reduce(
                    pending, views.segments[plan.shard.rank], self._sum_dtype, what, now
                )
                divisor = divisor if now is None else None
            del buffer, pending, views  # they keep the block alive
        self._free()
        if reduces_over_replicas and plan.replica.ranks > 1:
            total = total.to(self._buffer.dtype)  # the all-reduce has the same dtype
            # Divide each piece during the all-reduce, unless that would round it in the narrower
            # dtype.
            now = divisor if plan.is_exact or total.dtype == self._sum_dtype else None
            pending = plan.replica.begin_all_reduce(total, plan.replica_tag, now)
            yield None
            pending = plan.replica.continue_all_reduce(pending, total, plan.replica_tag, what)
            yield None
            plan.replica.end_all_reduce(pending, total, what)
            divisor = divisor if now is None else None
        if divisor is not None:
            total = total.to(self._sum_dtype).div_(divisor)
        dtype = plan.grad_dtype or self._store.dtype
        yield self._store.grads(
            plan.offload.to_host(total if total.dtype is dtype else total.to(dtype))
        )

    def _by_hook(self, hook: CommHook, ranks: int) -> torch.Tensor:
        """Let the user's hook sum and divide; return [S] in the dtype of sums. The hook may set
        ``.data`` of its arguments."""
        grad = self._views.buffer.clone()  # the hook may keep it
        if ranks == 1:
            hook.function(hook.state, grad)
            return grad.to(self._sum_dtype, copy=True)
        output = torch.empty_like(self._views.segments[0])
        hook.function(hook.state, grad, output)
        return output.to(self._sum_dtype)


class DirectGradBuffer:
    """For a single rank whose sharded parameters have the shapes of the unsharded ones: passes
    gradients on unchanged, without a buffer."""

    def __init__(self, store: ParamStore) -> None:
        self._sharded_params, self._grads = store.sharded_params, dict[int, torch.Tensor]()
        self.received = self._grads.keys()

    @property
    def resident_nbytes(self) -> int:
        return sum(grad.nbytes for grad in self._grads.values())

    def put(self, indices: Sequence[int], grads: list[torch.Tensor]) -> None:
        for index, grad in zip(indices, grads, strict=True):
            if index in self._grads:
                self._grads[index].add_(grad)
            else:
                self._grads[index] = grad

    def drop(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._grads.pop(index, None)

    def discard(self) -> None:
        self._grads.clear()

    def reduce(self, plan: ReducePlan, what: str) -> Iterator[list[torch.Tensor] | None]:
        grads = dict(self._grads)
        self._grads.clear()
        yield [
            grads[sharded_param.unsharded_params[0]]
            if sharded_param.unsharded_params[0] in grads
            else torch.zeros_like(sharded_param.parameter)
            for sharded_param in self._sharded_params
        ]


class Reduction:
    """A reduction in flight, advanced stage by stage or finished at once."""

    __slots__ = ("_stages", "grads")

    def __init__(self, stages: Iterator[list[torch.Tensor] | None]) -> None:
        self._stages = stages
        self.grads: list[torch.Tensor] | None = None  # one per sharded parameter, at the end
        self.advance()

    def advance(self) -> None:
        if self.grads is None:
            self.grads = next(self._stages)

    def finish(self) -> list[torch.Tensor]:
        while self.grads is None:
            self.advance()
        return self.grads
