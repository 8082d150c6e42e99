"""The buffers that collect gradients of unsharded parameters, and the reduction that turns them
into gradients of sharded parameters.

One rule covers all cases. Which gradients were *received* is a property of the buffer: the first
gradient of a parameter is assigned, later ones are added, and a reduction sends the buffer, with
zeros for what was not received, and empties the set. Accumulation without communication, several
backwards, recomputation and late gradients need nothing else."""

from __future__ import annotations

import enum
import typing
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence

import torch

from .. import _torch_private
from .reduce_plan import CommHook, ReducePlan
from .segments import Segments
from .storage import Storage
from .store import ParamStore, ReduceForm

__all__ = [
    "AT_END",
    "DirectGradBuffer",
    "GradBuffer",
    "ReduceBuffer",
    "Reduction",
    "Stages",
    "Views",
]


class AtEnd(enum.Enum):
    """What a stage yields if the next one makes the host wait for a device, and communicates
    nothing: it is left for the end of backward."""

    AT_END = enum.auto()


AT_END = AtEnd.AT_END
# of a reduction; the last one yields the gradient of every sharded parameter
Stages = Iterator[Sequence[torch.Tensor | None] | AtEnd | None]


class GradBuffer(typing.Protocol):
    """Collects the gradients of one group's unsharded parameters until they are reduced."""

    @property
    def received(self) -> Collection[int]:
        """The indices of parameters whose gradients are here: always the same object."""

    def put(self, indices: Sequence[int], grads: list[torch.Tensor]) -> None:
        """Take gradients: assign those not yet received, add the others. An index may come twice.
        ``grads`` may be empty afterwards, because a buffer may free each gradient it has copied."""

    def drop(self, indices: Iterable[int]) -> None:
        """Drop the gradients of some parameters."""

    def zero(self, indices: Iterable[int]) -> None:
        """Set the received gradients of some parameters to zero."""

    def discard(self) -> None:
        """Drop all gradients and free the memory."""

    def reduce(self, plan: ReducePlan, what: str) -> Stages:
        """Reduce the gradients, with zeros for those not received. Collective.

        A generator of stages, each of which may wait for the one before. The last one yields the
        gradient of every sharded parameter, the others None. At the end of backward the stages of
        all groups run in turn, so that ranks that finish groups in different orders do not wait for
        each other in a circle.
        """

    @property
    def holds_memory(self) -> bool: ...

    @property
    def resident_nbytes(self) -> int: ...


class Views(typing.NamedTuple):
    """A reduce buffer and its views."""

    buffer: torch.Tensor  # [ranks * S]
    segments: Sequence[torch.Tensor]  # [S] each, by rank
    places: list[list[torch.Tensor]]  # see ParamStore.places
    # Each parameter's only place, in the parameter's shape; None if some have several places.
    whole: list[torch.Tensor] | None
    rows: torch.Tensor  # [ranks, S]


class ReduceBuffer:
    """A flat buffer [ranks * S] in the dtype of the reduction. It holds memory only from the first
    received gradient to the end of the reduction.

    It is other memory each time where peers read later what is sent, and with one rank, which has
    all the gradients: there it becomes the gradients.
    """

    def __init__(
        self,
        store: ParamStore,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        predivisor: float = 1.0,
        plan: ReducePlan | None = None,
        form: ReduceForm | None = None,
    ) -> None:
        """predivisor: of gradients when they are put in. plan: of the reductions to come; None: the
        buffer has memory of its own."""
        self.received, self._predivisor = set[int](), predivisor
        self.form: ReduceForm = form or store.reduce_form()
        self._ranks, self._plan = ranks, plan
        # Sums are divided before they are rounded: in bf16, 256 + 1 is 256.
        self._sum_dtype = torch.promote_types(
            torch.promote_types(dtype, self.form.dtype), torch.float32
        )
        buffer = torch.empty(ranks * self.form.numel, dtype=dtype, device=device)
        self._storage = Storage(buffer)
        self.views = self._own = self._views_of(buffer)
        self._storage.free()
        # In place of the buffer's own memory: what peers read later, or what becomes gradients.
        self._block: torch.Tensor | None = None
        self._all_indices = self.form.indices
        self._takes_all = self.form.takes_all and predivisor == 1
        self._is_clean = False  # zeros lie around the gradients already

    def _views_of(self, buffer: torch.Tensor) -> Views:
        places = self.form.places(buffer)
        whole = [of_param[0] for of_param in places[:-1]] if self.form.pieces_are_whole else None
        rows = buffer.view(self._ranks, self.form.numel)
        return Views(buffer, Segments(buffer, self._ranks), places, whole, rows)

    @property
    def holds_memory(self) -> bool:
        return self._block is not None or self._storage.resident_nbytes > 0

    @property
    def resident_nbytes(self) -> int:
        return self._storage.resident_nbytes if self._block is None else self._block.nbytes

    def _allocate(self) -> None:
        """Allocate memory, unless the buffer has it."""
        if self.holds_memory:
            return
        buffer, plan = self._own.buffer, self._plan
        if plan is None:
            self._storage.allocate()
            return
        axis = plan.shard if plan.shard.ranks > 1 else plan.replica
        if plan.shard.ranks > 1 and not axis.reads_later:
            self._storage.allocate()
            return
        # The memory of earlier gradients can be reused once no peer reads them.
        plan.shard.settle("gradients that this rank has sent", only_reductions=True)
        self._block = axis.allocate(buffer.numel(), buffer.dtype)
        self.views = self._views_of(self._block)

    def _free(self) -> None:
        """Free the memory. A reduction in flight keeps its block."""
        self._block, self.views = None, self._own
        self._storage.free()

    def put(self, indices: Sequence[int], grads: list[torch.Tensor]) -> None:
        received = self.received
        if not received:
            self._allocate()
            self._is_clean = self._takes_all and indices == self._all_indices
            if self._is_clean:
                received.update(indices)
                self.form.put_all(self.views.rows, grads)
                return
        self._place(indices, grads)

    def _place(self, indices: Sequence[int], grads: list[torch.Tensor]) -> None:
        """Assign or add gradients whose places have memory."""
        received, whole = self.received, self.views.whole
        if whole is not None and not received and indices == self._all_indices:
            first, values = whole, grads  # the usual case of a unit without large parameters
            received.update(indices)
        elif len(set(indices)) < len(indices):  # the unit was used in two dtypes
            for index, grad in zip(indices, grads, strict=True):
                self._place([index], [grad])
            return
        elif whole is not None and received.isdisjoint(indices):
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
            parts = self.form.split(index, grad)
            if index in self.received:
                for place, part in zip(self.views.places[index], parts, strict=True):
                    place.add_(part, alpha=1 / self._predivisor)
            else:
                first += self.views.places[index]
                values += parts
                self.received.add(index)
        return first, values

    def drop(self, indices: Iterable[int]) -> None:
        self.received.difference_update(indices)
        if not self.received:
            self._free()

    def zero(self, indices: Iterable[int]) -> None:
        for index in self.received.intersection(indices):
            for place in self.views.places[index]:
                place.zero_()

    def discard(self) -> None:
        self.received.clear()
        self._free()

    def reduce(self, plan: ReducePlan, what: str) -> Stages:
        self._zero_missing()
        self.received.clear()
        reduces_over_replicas = plan.hook is None or not plan.one_group
        divisor = plan.divisor
        if plan.hook is not None:
            total = self._by_hook(plan.hook, plan.shard.ranks)
            self._free()
        else:
            now = divisor if plan.replica.ranks == 1 else None
            total = yield from self._scatter(plan, what, now)
            divisor = divisor if now is None else None
        if reduces_over_replicas and plan.replica.ranks > 1:
            total, divisor = yield from self._sum_replicas(plan, what, total, divisor)
        if divisor is not None:
            total = total.to(self._sum_dtype).div_(divisor)
        yield self._grads(plan, total)

    def _zero_missing(self) -> None:
        """Zero what was not received, and what belongs to no parameter."""
        received, views = self.received, self.views
        if not received:
            self._allocate()
            views = self.views
        if len(received) < len(self._all_indices):
            empty = [places for i, places in enumerate(views.places) if i not in received]
        elif self._is_clean:
            return
        else:
            empty = views.places[-1:]
        for places in empty:
            for place in places:
                place.zero_()

    def _scatter(
        self, plan: ReducePlan, what: str, divisor: torch.Tensor | None
    ) -> Generator[None, None, torch.Tensor]:
        """Return the sum [S] over the shard axis, divided, and free the buffer."""
        views = self.views
        buffer = views.buffer if self._block is None else self._block
        own = views.segments[plan.shard.rank]
        pending = plan.shard.begin_reduce(buffer, views.segments, plan.shard_tag)
        if plan.shard.reduce_steps:
            self._free()
        if plan.shard.ranks > 1:
            yield None
        if self._block is not None and plan.shard.ranks == 1:
            total = self._block  # reused when the gradients that view it are freed
            if divisor is not None:
                total = total.to(self._sum_dtype).div_(divisor)
        else:
            for _ in range(plan.shard.reduce_steps):
                pending = plan.shard.continue_reduce(pending, self._sum_dtype, plan.shard_tag, what)
                yield None
            total = plan.shard.end_reduce(pending, own, self._sum_dtype, what, divisor)
        del buffer, own, pending, views  # they keep the block
        self._free()
        return total

    def _sum_replicas(
        self, plan: ReducePlan, what: str, total: torch.Tensor, divisor: torch.Tensor | None
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor | None]]:
        """Sum ``total`` over the replica axis. Return it, and the divisor if it is still to be
        divided."""
        total = total.to(self._own.buffer.dtype)  # the all-reduce has the same dtype
        # Each piece is divided during the all-reduce, unless it would be rounded before it is in
        # the wider dtype again.
        now = divisor if plan.is_exact or total.dtype == self._sum_dtype else None
        pending = plan.replica.begin_all_reduce(total, plan.replica_tag, now)
        yield None
        for _ in range(plan.replica.all_reduce_steps):
            pending = plan.replica.continue_all_reduce(pending, total, plan.replica_tag, what)
            yield None
        plan.replica.end_all_reduce(pending, total, what)
        return total, divisor if now is None else None

    def _grads(self, plan: ReducePlan, total: torch.Tensor) -> Sequence[torch.Tensor | None]:
        dtype = plan.grad_dtype or self.form.dtype
        total = total if total.dtype is dtype else total.to(dtype)
        return self.form.grads(plan.offload.to_host(total))

    def _by_hook(self, hook: CommHook, ranks: int) -> torch.Tensor:
        """Let the user's hook sum and divide; return [S] in the dtype of sums. The hook may set
        ``.data`` of its arguments."""
        grad = self.views.buffer.clone()  # the hook may keep it
        if ranks == 1:
            hook.function(hook.state, grad)
            return grad.to(self._sum_dtype, copy=True)
        output = torch.empty_like(self.views.segments[0])
        hook.function(hook.state, grad, output)
        return output.to(self._sum_dtype)


class DirectGradBuffer:
    """For a single rank whose sharded parameters have the shapes of the unsharded ones: passes
    gradients on unchanged, without a buffer."""

    def __init__(self, store: ParamStore) -> None:
        self._sharded_params, self._grads = store.sharded_params, dict[int, torch.Tensor]()
        self.received = self._grads.keys()

    @property
    def holds_memory(self) -> bool:
        return bool(self._grads)

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

    def zero(self, indices: Iterable[int]) -> None:
        for index in self.received & set(indices):
            self._grads[index].zero_()

    def discard(self) -> None:
        self._grads.clear()

    def reduce(self, plan: ReducePlan, what: str) -> Stages:
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

    __slots__ = ("_stages", "grads", "is_communicated", "waits_at_end")

    def __init__(self, stages: Stages) -> None:
        self._stages, self.waits_at_end = stages, False
        self.is_communicated = False  # nothing but computation, or a wait of the host, is left
        self.grads: Sequence[torch.Tensor | None] | None = (
            None  # one per sharded parameter, at the end
        )
        self.advance()

    def advance(self) -> None:
        if self.grads is None:
            found = next(self._stages)
            self.waits_at_end = found is AT_END
            self.is_communicated = found is not None
            self.grads = None if isinstance(found, AtEnd) else found

    def finish(self) -> Sequence[torch.Tensor | None]:
        while self.grads is None:
            self.advance()
        return self.grads
