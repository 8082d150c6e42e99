"""A group's gradients on their way from autograd to ``.grad`` of the sharded parameters."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import operator
import typing
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from .. import _torch_private
from .accumulation import ShardedGrads
from .behavior import Behavior, CommHook, ReducePolicy
from .bulk_dict import consume
from .communicators import ReduceAxes
from .device import side_stream
from .dtypes import Precision
from .group_memory import GroupMemory
from .reduce import DirectGradBuffer, GradBuffer, ReduceBuffer, Reduction, Stage, predivisor
from .store import ParamStore, ReduceForm

LARGE = 65536  # elements


def is_large(param: nn.Parameter) -> bool:
    """True for a parameter that may have a gradient hook of its own; never for tensor
    subclasses."""
    return param.numel() >= LARGE and _torch_private.is_plain(param)


class _CollectedParams(typing.NamedTuple):
    """The unsharded parameters whose gradients wait for ``collect``, in all dtypes computed in: the
    small ones or, as Group decides, all."""

    params: list[nn.Parameter]
    indices: list[int]
    nones: list[None]


class Gradients:
    """One group's gradients: received, in reduction, or accumulated."""

    def __init__(
        self,
        store: ParamStore,
        memories: Sequence[GroupMemory],
        axes: ReduceAxes,
        taken_at_once: Collection[nn.Parameter],
        precision: Precision,
        device: torch.device,
        behavior: Behavior | None,
    ) -> None:
        """taken_at_once: unsharded parameters that have a hook each, which calls ``take``.
        behavior: None where the group is flat (``Group.is_flat``)."""
        self.what = "gradients"  # for errors
        # Called before a buffer takes memory; BackwardRunner sets it.
        self.limit_in_flight: Callable[[], None] = lambda: None
        grad_dtype = precision.grad if precision.grad not in (None, store.dtype) else None
        whole = memories[0].unsharded_params
        self.sharded = ShardedGrads(store, whole, grad_dtype, is_dtensor=behavior is not None)
        # Indices of parameters whose gradients are here: the buffer's own set, which it changes
        self.received: Collection[int] = ()
        self.reduction: Reduction | None = None
        self.axes = axes
        self._store, self._memories, self._behavior = store, memories, behavior or Behavior()
        self._reduce_dtype, self._grad_dtype, self._device = precision.reduce, grad_dtype, device
        self._side = side_stream(device, "reduce")
        self._buffer: GradBuffer | None = None  # made for the first gradient: never, if frozen
        params = [
            (index, param)
            for memory in memories
            for index, param in enumerate(memory.unsharded_params)
            if param not in taken_at_once
        ]
        self.collected = _CollectedParams(
            [param for _, param in params], [index for index, _ in params], [None] * len(params)
        )

    @property
    def policy(self) -> ReducePolicy:
        return self._behavior.reduction

    def wants_reduction(self, sync: bool) -> bool:
        """True if post-backward is to reduce the received gradients. Any is enough, so ranks agree
        even if their data use different parameters of the group. sync: of the runtime."""
        return sync and self._behavior.reduction.sync and bool(self.received)

    @property
    def have_come(self) -> bool:
        """True if gradients were received, or are in ``.grad`` of unsharded parameters."""
        params, _, nones = self.collected
        return bool(self.received) or any(map(operator.is_not, map(_grad, params), nones))

    @property
    def buffer(self) -> torch.Tensor | None:
        """The reduce buffer [ranks * S], if there is one now; it may be freed."""
        return self._buffer.views.buffer if isinstance(self._buffer, ReduceBuffer) else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of reduced gradients."""
        return self._grad_dtype or self._store.dtype

    def count_collectives(self) -> None:
        """Count the collectives of a reduction. Those of a user's hook count by themselves."""
        policy, axes = self.policy, self.axes
        if policy.hook is not None:
            return
        if axes.shard.ranks > 1 and policy.custom is None:
            _torch_private.count_collective("_reduce_scatter_base_")
        if axes.replica.ranks > 1 and policy.over_replicas:
            _torch_private.count_collective("allreduce_")

    @property
    def is_trainable(self) -> bool:
        """True if some sharded parameter is trainable now."""
        return any(param.requires_grad for param, _ in self._store.sharded_params)

    def set_hook(self, hook: CommHook) -> None:
        """Let the user's hook sum and average gradients. Only while none are received."""
        self._behavior.reduction = dataclasses.replace(self.policy, hook=hook)
        self._buffer, self.received = None, ()  # the next buffer does not divide

    # -- in every backward

    def take(self, index: int, param: nn.Parameter) -> None:
        """Move the gradient of a parameter with a hook to the buffer: a large one, or any from the
        first backward that creates a graph on."""
        grad, param.grad = param.grad, None
        if grad is not None:  # a hook may fire without a gradient
            self._put([index], [grad])

    def collect(self) -> None:
        """In post-backward: move the other gradients from ``.grad`` to the buffer together."""
        params, indices, nones = self.collected
        grads = list(map(_grad, params))
        if not any(map(operator.is_not, grads, nones)):
            return
        if any(map(operator.is_, grads, nones)):
            indices = [
                index for index, grad in zip(indices, grads, strict=True) if grad is not None
            ]
            grads = [grad for grad in grads if grad is not None]
        consume(map(setattr, params, _GRAD, nones))
        self._put(indices, grads)

    def _put(self, indices: list[int], grads: list[Tensor]) -> None:
        if not self.received:
            self.limit_in_flight()
        if self.reduction is not None:  # it still uses the buffer
            self.finish_reduction()
        buffer, values = self._buffer, grads
        if buffer is None or not buffer.indices.issuperset(indices):
            buffer = self._buffer_for(indices)
        if any(map(_is_sparse, grads)) or (
            torch.is_grad_enabled() and any(map(_requires_grad, grads))
        ):  # the latter with create_graph
            values = [grad.to_dense() if grad.is_sparse else grad.detach() for grad in grads]
        buffer.put(indices, values)
        if self._side is not None:
            self._side.hold(grads)

    def _buffer_for(self, indices: Collection[int]) -> GradBuffer:
        """Return a buffer for trainable parameters, ``indices``, and received gradients, even of
        parameters frozen since. Collective: the group, if a reduction is in flight."""
        before = self._buffer
        form = self._store.reduce_form(itertools.chain(indices, self.received))
        if before is not None and before.form is form:
            return before
        if self.reduction is not None:
            self.finish_reduction()
        made = self._new_buffer(form)
        if isinstance(before, ReduceBuffer) and isinstance(made, ReduceBuffer):
            made.take_over(before)
        self._buffer, self.received = made, made.received
        return made

    def _new_buffer(self, form: ReduceForm) -> GradBuffer:
        axes, store, memory = self.axes, self._store, self._memories[0]
        is_hooked, params = self.policy.hook is not None, memory.unsharded_params
        if (
            axes.ranks == 1
            and form.is_contiguous_per_param
            and not is_hooked
            and memory.aliased
            and len(self._memories) == 1
            and (self._reduce_dtype, self._grad_dtype) == (store.dtype, None)
            and all(
                len(indices) == 1
                and sharded_param.shape == params[indices[0]].shape
                and _torch_private.is_plain(params[indices[0]])
                for sharded_param, indices in store.sharded_params
            )
        ):
            return DirectGradBuffer(store)
        return ReduceBuffer(
            form,
            axes,
            self._reduce_dtype,
            self._device,
            predivisor=1.0 if is_hooked else predivisor(axes.ranks, self._reduce_dtype),
            grad_dtype=self._grad_dtype,
        )

    def start_reduction(self) -> Reduction:
        """Start to reduce the received gradients, with zeros for the others. Collective: the
        group."""
        if self.reduction is not None:
            self.finish_reduction()
        stages = self._buffer_for(()).reduce(self._behavior.reduction, self.what)
        reduction = self.reduction = Reduction(stages)
        return reduction

    def finish_reduction(self) -> None:
        """Wait for the reduction, if there is one, and accumulate its result. Collective: the
        group."""
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            self.sharded.accumulate(reduction.finish(), self.axes, self.what)

    # -- at other times

    def record(self) -> None:
        """After a backward without communication: see ``ShardedGrads.record``."""
        zeros: Sequence[Tensor | None] = ()
        if self.sharded.is_dtensor:
            assert self._buffer is not None
            form, shard = self._buffer.form, self._store.shard
            dtype = self._grad_dtype or form.dtype
            all_zeros = form.grads(shard.new_full((form.numel,), -0.0, dtype=dtype))
            zeros = [g if index in self.received else None for index, g in enumerate(all_zeros)]
        self.sharded.record(zeros)

    def clear(self) -> None:
        """Before a backward: clear received gradients that zero_grad has cleared since a backward
        without communication. Zeroed gradients stay received: what is reduced must not depend on
        values, which differ between ranks."""
        if self._buffer is None or not self.sharded.recorded:
            return
        replaced, zeroed = self.sharded.take_cleared()
        for position in zeroed:
            self._buffer.zero(self._store.sharded_params[position].indices)
        for position in replaced:
            self._buffer.drop(self._store.sharded_params[position].indices)

    def discard(self) -> None:
        """After a backward that raised: end the reduction in flight, drop other gradients."""
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            if not self.axes.shard.has_failed and not self.axes.replica.has_failed:
                with contextlib.suppress(StopIteration):  # a stage that raised was the last
                    reduction.finish()
        if self._buffer is not None:
            self._buffer.discard()
        for memory in self._memories:
            for param in memory.unsharded_params:
                param.grad = None

    def bypassed_hooks(self) -> int | None:
        """Return the index of a parameter whose gradient bypassed all hooks, or None."""
        pairs = zip(self.collected.indices, self.collected.params, strict=True)
        return next((index for index, param in pairs if param.grad is not None), None)


class InFlightReductions:
    """The reductions that one backward has started, unit by unit, oldest first. BackwardRunner
    calls it on the side stream or, at the end, on the computing stream, which has joined it."""

    def __init__(self, frees_at_once: bool) -> None:
        """frees_at_once: a side stream waits, and can reuse enqueued buffers."""
        self._frees_at_once = frees_at_once
        # Units whose buffers may be in flight when another unit's buffer takes memory. None: any
        # number, because ranks may reduce units in different orders, so they must not wait.
        self.limit: int | None = None
        self._units: collections.deque[list[Gradients]] = collections.deque()
        # Older units with freed buffers: their reductions over replicas advance by one stage
        # during each later unit's backward.
        self._rest: list[Gradients] = []

    def start(self, of_unit: list[Gradients]) -> None:
        """Start the reductions of a unit. Collective: the unit."""
        self.limit_in_flight()
        if _torch_private.counts_collectives():
            one_per_axis = {gradients.axes.shard: gradients for gradients in of_unit}
            for gradients in one_per_axis.values():
                gradients.count_collectives()
        is_in_order = self.limit is not None
        if is_in_order:  # beside this unit's messages
            _advance(itertools.chain(self._rest, *self._units), Stage.HOST, Stage.MESSAGES)
        for gradients in of_unit:
            reduction = gradients.start_reduction()
            # Send to other hosts at once: the ranks of this host, which it waits for, do the same.
            if reduction.next is Stage.HOST and is_in_order:
                reduction.advance()
        self._units.append(of_unit)
        if self._frees_at_once:
            self._free_buffers(0)

    def limit_in_flight(self) -> None:
        """Before another buffer takes memory: free the oldest beyond the limit. Collective: the
        model."""
        if self.limit is not None:
            self._free_buffers(self.limit)

    def _free_buffers(self, limit: int) -> None:
        while len(self._units) > limit:
            freed = _advance(self._units.popleft(), Stage.SUM)
            self._rest = _advance(self._rest, Stage.WAIT) + freed  # what older units have sent

    def finish(self) -> None:
        """Finish all reductions, stage by stage for all groups together. Collective: the model."""
        groups = list(itertools.chain(self._rest, *self._units))
        reductions = [gradients.reduction for gradients in groups if gradients.reduction]
        while unfinished := [each for each in reductions if each.next not in (None, Stage.READ)]:
            for reduction in unfinished:
                reduction.advance()
        for gradients in groups:
            gradients.finish_reduction()
        self.forget()

    def forget(self) -> None:
        """After a backward that raised: the groups discard their gradients themselves."""
        self._units.clear()
        self._rest.clear()


def _advance(groups: Iterable[Gradients], *stages: Stage) -> list[Gradients]:
    """Advance reductions whose next stage is in ``stages``, accumulate complete ones, and return
    the groups with unfinished ones. Collective: these groups."""
    unfinished = []
    for gradients in groups:
        reduction = gradients.reduction
        if reduction is not None:  # None: another gradient, or reduction, has finished it
            if reduction.next in stages:
                reduction.advance()
            if reduction.next is not None:
                unfinished.append(gradients)
            else:
                gradients.finish_reduction()
    return unfinished


_GRAD = itertools.repeat("grad")
_grad, _requires_grad, _is_sparse = map(operator.attrgetter, ("grad", "requires_grad", "is_sparse"))
