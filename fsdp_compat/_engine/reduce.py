"""The buffers that collect gradients of unsharded parameters, and their reduction.

A buffer knows which gradients it has *received*: the first gradient of a parameter is assigned,
later ones are added, and a reduction sends the buffer, with zeros for missing gradients, and
empties the set. Accumulation without communication, several backwards, recomputation and late
gradients need nothing else."""

from __future__ import annotations

import enum
import math
import typing
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .. import _torch_private
from ..errors import StateError
from .behavior import CommHook, CustomReduceScatter, ReducePolicy
from .communicators import ReduceAxes
from .device import has_streams, read_later, run_on
from .storage import Segments, Storage
from .store import ParamStore, ReduceForm


class Stage(enum.Enum):
    """What the next stage of a reduction does. It has these, by the ranks and transports of both
    axes (``reduce_steps``, ``all_reduce_steps``):

        axis           over the shard axis                  then over replicas
        -------------  -----------------------------------  ----------------------------
        one rank       -                                    -
        a backend      SUM                                  WAIT
        gloo           SUM                                  MESSAGES, WAIT
        several hosts  HOST, WAIT; with replicas: MESSAGES  HOST, 3 times MESSAGES, WAIT

    The user's reduce-scatter has MESSAGES instead, the user's all-reduce hook adds WAIT, and marks
    on a device add READ."""

    SUM = enum.auto()  # waits for the sum over the shard axis, frees the buffer, and may send
    HOST = enum.auto()  # waits only for ranks of this host, and sends
    MESSAGES = enum.auto()  # may send, and wait for peers
    WAIT = enum.auto()  # sends nothing, but may wait for peers
    READ = enum.auto()  # makes the host wait for a device, so it is left for the end


# of a reduction; the last yields the gradients of all sharded parameters. None, if unused or not
# summed over replicas yet, only with fully_shard: there, unsharded ones have the same indices.
Stages = Iterator[Sequence[Tensor | None] | Stage]


class Views(typing.NamedTuple):
    """A reduce buffer and its views."""

    buffer: Tensor  # [ranks * S]
    segments: Segments
    params: list[list[Tensor]]  # see ReduceForm.param_views
    # Each parameter's only view, in the parameter's shape; None if some have several views.
    whole: list[Tensor] | None
    rows: Tensor  # [ranks, S]


class ReduceBuffer:
    """A flat buffer [ranks * S] in the dtype of the reduction, with memory only from the first
    received gradient to the end of the reduce-scatter. The memory is new each time where peers read
    it later, and with one rank, where it becomes the gradients."""

    def __init__(
        self,
        form: ReduceForm,
        axes: ReduceAxes,
        dtype: torch.dtype,
        device: torch.device,
        *,
        predivisor: float = 1.0,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        """predivisor: of gradients before the sum. grad_dtype: of the result; None: the form's."""
        self.received = set[int]()  # the indices of parameters whose gradients are here
        self.form, self._axes, self._predivisor = form, axes, predivisor
        self._grad_dtype = grad_dtype or form.dtype
        # Sums are divided before they are rounded: in bf16, 256 + 1 is 256.
        self._sum_dtype = torch.promote_types(torch.promote_types(dtype, form.dtype), torch.float32)
        buffer = torch.empty(axes.shard.ranks * form.numel, dtype=dtype, device=device)
        self._storage = Storage(buffer)
        self.views = self._own = self._views_of(buffer)
        self._storage.free()
        self._block: Tensor | None = None  # new memory, instead of the buffer's own
        self.indices = frozenset(form.indices)
        # The gradients of the last packing, which left their marks, and zeros everywhere else.
        self._packed: set[int] | None = None
        self._has_streams = has_streams(device)
        # The sum over the shard axis that is not yet summed over replicas; and what was used.
        self._partial: tuple[Tensor, frozenset[int]] | None = None
        # of the last reduction
        self._divided: tuple[ReducePolicy | None, Divisor] = None, Divisor(axes.ranks / predivisor)

    def _views_of(self, buffer: Tensor) -> Views:
        ranks, params = self._axes.shard.ranks, self.form.param_views(buffer)
        whole = [views[0] for views in params[:-1]] if self.form.is_contiguous_per_param else None
        rows = buffer.view(ranks, self.form.numel)
        return Views(buffer, Segments(buffer, ranks), params, whole, rows)

    # -- memory

    def _allocate(self) -> None:
        if self._axes.keep_buffers:
            self._storage.allocate()
        elif self._block is None:
            buffer, axes = self._own.buffer, self._axes
            # The memory of earlier gradients can be reused once no peer reads it.
            axes.shard.settle("gradients that this rank has sent", only_reductions=True)
            axis = axes.shard if axes.shard.ranks > 1 else axes.replica
            self._block = axis.allocate(buffer.numel(), buffer.dtype)
            self.views = self._views_of(self._block)

    def _free(self) -> None:
        """Free the memory. A reduction in flight keeps its block."""
        self._block, self.views = None, self._own
        self._storage.free()

    # -- gradients

    def put(self, indices: Sequence[int], grads: list[Tensor]) -> None:
        """Assign gradients not yet received, and add the others. grads: in the shapes of unsharded
        parameters ``indices``, of any dtype. An index may come twice."""
        received = self.received
        if not received:
            self._allocate()
            self._packed, divisor = None, self._predivisor
            # On a device all gradients of a backward come at once, and kernels must be few.
            is_whole = indices == self.form.indices or (
                self._has_streams and len(set(indices)) == len(indices)
            )
            # A cast before the division could overflow; on the CPU, one pass casts and divides.
            if is_whole and (
                divisor == 1
                or (self._has_streams and {g.dtype for g in grads} == {self.views.buffer.dtype})
            ):
                if self.form.can_pack_grads:
                    received.update(indices)
                    self._packed = received.copy()
                    self.form.pack_grads(self.views.rows, grads, indices)
                else:
                    self._assign(indices, grads, 1)
                if divisor != 1:
                    self.views.buffer.div_(divisor)
                return
        if received.isdisjoint(indices) and len(set(indices)) == len(indices):
            self._assign(indices, grads, self._predivisor)
            return
        for index, grad in zip(indices, grads, strict=True):
            if index in received:
                parts = self.form.split(index, grad)
                for view, part in zip(self.views.params[index], parts, strict=True):
                    view.add_(part, alpha=1 / self._predivisor)
            else:
                self._assign([index], [grad], self._predivisor)

    def _assign(self, indices: Sequence[int], grads: list[Tensor], divisor: float) -> None:
        self.received.update(indices)
        whole = self.views.whole
        if whole is not None:
            views, values = list(map(whole.__getitem__, indices)), grads
        else:
            views = [view for index in indices for view in self.views.params[index]]
            pairs = zip(indices, grads, strict=True)
            values = [part for index, grad in pairs for part in self.form.split(index, grad)]
        if divisor != 1:
            for view, value in zip(views, values, strict=True):
                torch.div(value, divisor, out=view)
        elif len(views) == 1:
            views[0].copy_(values[0])
        elif views:
            _torch_private.copy_together(views, values)  # casts to the buffer's dtype

    def drop(self, indices: Iterable[int]) -> None:
        """Drop the gradients of some parameters."""
        self.received.difference_update(indices)
        self._packed = None
        if not self.received:
            self._free()

    def zero(self, indices: Iterable[int]) -> None:
        """Set the received gradients of some parameters to zero."""
        for index in self.received.intersection(indices):
            _torch_private.zero_together(self.views.params[index])

    def discard(self) -> None:
        """Drop all gradients, and free the memory."""
        self.received.clear()
        self._partial = None
        self._free()

    def take_over(self, other: ReduceBuffer) -> None:
        """Take over what another buffer has received for parameters in both forms. Raises
        StateError if that was summed over the shard axis only."""
        if other._partial is not None:
            raise StateError.of(
                "requires_grad was changed while gradients wait for their all-reduce.",
                expected="no change after set_requires_all_reduce(False), before the all-reduce",
                got="a different set of trainable parameters",
                where="a unit of fully_shard",
                fix="change requires_grad after a backward with set_requires_all_reduce(True)",
            )
        kept = sorted(other.received.intersection(self.form.indices))
        if kept:
            self._allocate()
            for index in kept:
                pairs = zip(self.views.params[index], other.views.params[index], strict=True)
                for view, value in pairs:
                    view.copy_(value)
            self.received.update(kept)
        other.discard()

    # -- the reduction

    def reduce(self, policy: ReducePolicy, what: str) -> Stages:
        """Reduce the gradients, with zeros for those not received. At the end of backward, the
        stages of all groups are interleaved, so that ranks that finish groups in different orders
        cannot deadlock. Collective: the group."""
        axes, dtype = self._axes, self._own.buffer.dtype
        used = self.indices  # parameters that get gradients whatever the marks say
        self._zero_missing()
        if policy.finds_unused:
            used = frozenset(self.received)
            self._mark(used)
        elif policy.all_reduce_hook is not None:
            self._mark(())  # the hook sees no marks
        self.received.clear()
        if policy is not self._divided[0]:
            self._divided = policy, self._divisor_of(policy)
        divisor = self._divided[1]
        if policy.hook is not None:
            total = self._by_hook(policy.hook)
        elif policy.custom is not None and axes.shard.ranks > 1:
            total = self._by_custom(policy.custom)
            yield Stage.MESSAGES
        else:
            # If the sum is not rounded, it can be divided in the same pass.
            is_exact = dtype == self._sum_dtype or not policy.rounds_first
            now = is_exact and not axes.have_replicas
            total = yield from self._scatter(what, divisor.tensor if now else None)
            divisor = _DIVIDED if now else divisor
        wide = None
        if policy.rounds_first and total.dtype is not dtype:
            wide, total = total, total.to(dtype)
        if axes.have_replicas:
            if self._partial is not None:
                earlier_total, earlier_used = self._partial
                total, used = total.add(earlier_total), used | earlier_used
                self._partial = None
            if axes.is_hybrid and not policy.over_replicas:
                self._partial = total, used
                yield [None] * len(self.views.params[:-1])
                return
            if axes.replica.ranks > 1 and not (policy.hook is not None and axes.one_group):
                total, divisor = yield from self._sum_replicas(what, total, divisor)
        if divisor.tensor is not None:
            total = total if policy.rounds_first else total.to(self._sum_dtype)
            total = total.div_(divisor.tensor)
        if policy.all_reduce_hook is not None:
            yield from self._run_all_reduce_hook(policy, total, what)
        if wide is not None and wide.dtype is self._grad_dtype:
            total = wide.copy_(total)  # the gradients need no further memory
        total = total if total.dtype is self._grad_dtype else total.to(self._grad_dtype)
        grads = self.form.grads(axes.offload.to_host(total))
        if len(used) < len(self.form.indices):
            read = read_later(self.form.marks(total))
            if has_streams(total.device):
                yield Stage.READ
            marks = zip(self.form.indices, read(), strict=True)
            unused = {index for index, mark in marks if not mark}
            grads = [None if index in unused else grad for index, grad in enumerate(grads)]
        yield grads

    def _run_all_reduce_hook(
        self, policy: ReducePolicy, total: Tensor, what: str
    ) -> Iterator[Stage]:
        replica, hook, stream = self._axes.replica, policy.all_reduce_hook, policy.all_reduce_stream
        assert hook is not None
        if replica.reads_later:
            yield Stage.WAIT
            replica.settle(what, only_reductions=True)  # the hook may write
        if stream is None:
            hook(total)
        else:
            wait = run_on(stream, hook, total)
            yield Stage.WAIT  # it runs beside the next unit's backward
            wait()

    def _zero_missing(self) -> None:
        received = self.received
        if not received:
            self._allocate()
        if received != self._packed:
            of_params = enumerate(self.views.params)
            empty = [view for i, views in of_params if i not in received for view in views]
            _torch_private.zero_together(empty)

    def _mark(self, received: Collection[int]) -> None:
        if received == self._packed:
            return
        marks = self.form.marks(self.views.rows)
        marks.fill_(1)
        for position, index in enumerate(self.form.indices):
            if index not in received:
                marks[:, position] = 0

    def _divisor_of(self, policy: ReducePolicy) -> Divisor:
        value = (policy.divide_by or self._axes.ranks) / self._predivisor
        if policy.hook is not None:  # it divides by the ranks that it sums over
            value = 1.0 if self._axes.one_group else float(self._axes.replica.ranks)
        return self._divided[1] if value == self._divided[1].value else Divisor(value)

    def _scatter(self, what: str, divisor: Tensor | None) -> Generator[Stage, None, Tensor]:
        """Return the sum [S] over the shard axis, divided, and free the buffer."""
        axis = self._axes.shard
        if axis.ranks == 1:
            total = self.views.buffer  # reused when the gradients that view it are freed
            self._free()
            return total if divisor is None else total.to(self._sum_dtype).div_(divisor)
        tag, own = self._axes.shard_tag, self.views.segments[axis.rank]
        pending = axis.begin_reduce(self.views.buffer, self.views.segments, tag)
        if axis.reduce_steps:
            self._free()
            for _ in range(axis.reduce_steps):
                yield Stage.HOST
                pending = axis.continue_reduce(pending, self._sum_dtype, tag, what)
            yield Stage.WAIT if self._axes.replica.ranks == 1 else Stage.MESSAGES
        else:
            yield Stage.SUM
        total = axis.end_reduce(pending, own, self._sum_dtype, what, divisor)
        self._free()
        return total

    def _sum_replicas(
        self, what: str, total: Tensor, divisor: Divisor
    ) -> Generator[Stage, None, tuple[Tensor, Divisor]]:
        """Return ``total`` summed over the replica axis, and its remaining divisor."""
        axis, tag = self._axes.replica, self._axes.replica_tag
        total = total.to(self._own.buffer.dtype)  # the all-reduce has the same dtype
        # Slices are divided during the all-reduce, unless that would round in the narrow dtype.
        now = divisor.is_exact or total.dtype == self._sum_dtype
        pending = axis.begin_all_reduce(total, tag, divisor.tensor if now else None)
        for step in range(axis.all_reduce_steps):
            yield Stage.HOST if step < axis.reduce_steps else Stage.MESSAGES
            pending = axis.continue_all_reduce(pending, total, tag, what)
        yield Stage.WAIT
        axis.end_all_reduce(pending, total, what)
        return total, _DIVIDED if now else divisor

    def _by_hook(self, hook: CommHook) -> Tensor:
        """Return the average [S] by the user's hook, which may set ``.data`` of its arguments."""
        grad = self.views.buffer.clone()  # the hook may keep it
        if self._axes.shard.ranks == 1:
            hook.function(hook.state, grad)
            total = grad.to(self._sum_dtype, copy=True)
        else:
            output = torch.empty_like(self.views.segments[0])
            hook.function(hook.state, grad, output)
            total = output.to(self._sum_dtype)
        self._free()
        return total

    def _by_custom(self, custom: CustomReduceScatter) -> Tensor:
        buffer, allocate = self.views.buffer, custom.comm.allocate
        source = allocate((buffer.numel(),), dtype=buffer.dtype, device=buffer.device)
        source.copy_(buffer)
        self._free()
        total = allocate((self.form.numel,), dtype=source.dtype, device=source.device)
        work = custom.comm(
            output_tensor=total,
            input_tensor=source,
            group=custom.group,
            op=torch.distributed.ReduceOp.SUM,
        )
        if work is not None:
            work.wait()
        return typing.cast(Tensor, total)


class DirectGradBuffer:
    """Passes gradients on without a buffer: for one rank, where parameters keep their shapes. The
    methods are those of ReduceBuffer; the result of ``reduce`` is what ``put`` got, or its sum."""

    def __init__(self, store: ParamStore) -> None:
        self.form: ReduceForm = store.reduce_form()
        self.indices = frozenset(self.form.indices)
        self._sharded_params, self._grads = store.sharded_params, dict[int, Tensor]()
        self.received = self._grads.keys()

    def put(self, indices: Sequence[int], grads: list[Tensor]) -> None:
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

    def reduce(self, policy: ReducePolicy, what: str) -> Stages:
        grads = dict(self._grads)
        self._grads.clear()
        yield [
            grads[index] if index in grads else torch.zeros_like(param)
            for param, (index,) in self._sharded_params
        ]


GradBuffer = ReduceBuffer | DirectGradBuffer


class Reduction:
    """A reduction in flight: begun by the constructor, advanced stage by stage or finished at once.
    Collective: the group, for every method."""

    __slots__ = ("_stages", "grads", "next")

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self.next: Stage | None = None
        self.grads: Sequence[Tensor | None] | None = None  # by sharded parameter, at the end
        self.advance()

    def advance(self) -> None:
        if self.grads is None:
            result = next(self._stages)
            if isinstance(result, Stage):
                self.next = result
            else:
                self.next, self.grads = None, result

    def finish(self) -> Sequence[Tensor | None]:
        while self.grads is None:
            self.advance()
        return self.grads


class Divisor:
    """The divisor of sums."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.is_exact = math.frexp(value)[0] == 0.5  # a power of two: division does not round
        # None: 1. A 0-d CPU tensor, because torch would build one from a number in every call; in
        # fp32 if that is exact, as are most sums, because a cast would cost as much again.
        self.tensor: Tensor | None = None
        if value != 1:
            self.tensor = torch.tensor(value, dtype=torch.float32, device="cpu")
            if self.tensor.item() != value:
                self.tensor = torch.tensor(value, dtype=torch.float64, device="cpu")


def predivisor(ranks: int, dtype: torch.dtype) -> float:
    """Return the divisor of gradients before their reduction: about the square root of ``ranks`` in
    fp16, where sums could overflow; otherwise 1."""
    factor = 1
    while dtype == torch.float16 and ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)


_DIVIDED = Divisor(1.0)
