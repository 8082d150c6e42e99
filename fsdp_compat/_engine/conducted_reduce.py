"""Reduce buffers of units whose reductions the user may change at any time: those of
``fully_shard``."""

from __future__ import annotations

import typing
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..errors import StateError, explain
from .conduct import Conduct, ReductionSettings
from .device import has_streams, read_later, run_on
from .reduce import AT_END, ReduceBuffer, Stages
from .reduce_plan import ReducePlan
from .store import ParamStore, ReduceForm

__all__ = ["ConductedReduceBuffer"]


class ConductedReduceBuffer(ReduceBuffer):
    """A reduce buffer whose reductions the user may change at any time (Conduct).

    Sums are rounded to the dtype of the reduction before they are divided. Parameters that no rank
    has used get no gradient, unless the user asks for zeros. Marks that travel with the gradients
    tell which these are, so that all ranks know the same (ReduceForm.marks). A user's hook sees
    none: it may sum over further ranks, so all parameters get gradients then.
    """

    def __init__(
        self,
        store: ParamStore,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        predivisor: float,
        plan: ReducePlan,
        conduct: Conduct,
        form: ReduceForm,
    ) -> None:
        self._conduct, self._num_sharded = conduct, len(store.sharded_params)
        super().__init__(store, ranks, dtype, device, predivisor, plan, form)
        # Summed over the shard axis, not yet over the replicas, and the parameters in it.
        self._partial: tuple[torch.Tensor, frozenset[int]] | None = None

    def has_places(self, indices: Sequence[int]) -> bool:
        """True if the form has places for these parameters."""
        return indices == self._all_indices or set(indices).issubset(self._all_indices)

    @property
    def is_empty(self) -> bool:
        """True if nothing was received since the last complete reduction."""
        return not self.received and self._partial is None

    def discard(self) -> None:
        super().discard()
        self._partial = None

    def take_over(self, other: ConductedReduceBuffer) -> None:
        """Take what another buffer has received, for parameters that are in both forms.

        Raises StateError if it holds gradients that are summed over the shard axis only.
        """
        if other._partial is not None:
            raise StateError(
                explain(
                    "requires_grad was changed while gradients wait for their all-reduce.",
                    expected="the same trainable parameters from set_requires_all_reduce(False) to "
                    "the backward that all-reduces",
                    got="other ones",
                    where="a unit of fully_shard",
                    fix="change requires_grad after a backward with set_requires_all_reduce(True)",
                )
            )
        kept = sorted(other.received.intersection(self._all_indices))
        if kept:
            self._allocate()
            self._is_clean = False
            for index in kept:
                places = zip(self.views.places[index], other.views.places[index], strict=True)
                for place, value in places:
                    place.copy_(value)
            self.received.update(kept)
        other.discard()

    def reduce(self, plan: ReducePlan, what: str) -> Stages:
        conduct, settings = self._conduct, self._conduct.reduction
        received = frozenset(self._all_indices if conduct.reduces_unused else self.received)
        self._zero_missing()
        self._mark(received if settings.all_reduce_hook is None else ())
        self.received.clear()
        dtype = self._own.buffer.dtype
        divisor = self._divisor(plan, settings)
        if settings.custom is not None and plan.shard.ranks > 1:
            total = self._by_custom(settings.custom)
            yield None
        else:
            # Division and rounding may be exchanged where nothing is rounded.
            is_last = plan.replica.ranks == 1 and self._partial is None and conduct.all_reduce
            now = divisor if is_last and dtype == self._sum_dtype else None
            total = yield from self._scatter(plan, what, now)
            divisor = divisor if now is None else None
        wide, total = total, total if total.dtype is dtype else total.to(dtype)
        if self._partial is not None:
            before, its_received = self._partial
            total, received = total.add(before), received | its_received
            self._partial = None
        if not conduct.all_reduce and plan.is_hybrid:
            self._partial = total, received
            yield [None] * self._num_sharded
            return
        if plan.replica.ranks > 1:
            total, divisor = yield from self._sum_replicas(plan, what, total, divisor)
        if divisor is not None:
            total = total.div_(divisor)
        if settings.all_reduce_hook is not None:
            wait = run_on(settings.all_reduce_stream, settings.all_reduce_hook, total)
            if settings.all_reduce_stream is not None:
                yield None  # it runs beside the next unit's backward
            wait()
        if wide is not total and wide.dtype == (plan.grad_dtype or self.form.dtype):
            total = wide.copy_(total)  # the gradients need no further memory
        grads = self._grads(plan, total)
        if settings.all_reduce_hook is None and len(received) < len(self._all_indices):
            read = read_later(self.form.marks(total))
            if has_streams(total.device):
                yield AT_END
            unused = {
                index for index, mark in zip(self.form.indices, read(), strict=True) if not mark
            }
            grads = [None if index in unused else grad for index, grad in enumerate(grads)]
        yield grads

    def _mark(self, received: Collection[int]) -> None:
        """Mark the parameters in ``received``."""
        if self._is_clean and received:
            return  # put_all has marked all
        marks = self.form.marks(self.views.rows)
        marks.fill_(1)
        for position, index in enumerate(self._all_indices):
            if index not in received:
                marks[:, position] = 0

    def _divisor(self, plan: ReducePlan, settings: ReductionSettings) -> torch.Tensor | None:
        if settings.divide_factor is None:
            return plan.divisor
        factor = settings.divide_factor / self._predivisor
        return None if factor == 1 else torch.tensor(factor, dtype=torch.float64, device="cpu")

    def _by_custom(self, custom: Any) -> torch.Tensor:
        """Return the sum [S] over the shard axis by the user's reduce-scatter."""
        numel = self.form.numel
        dtype, device = self._own.buffer.dtype, self._own.buffer.device
        source = custom.allocate((self._ranks * numel,), dtype=dtype, device=device)
        source.copy_(self.views.buffer)
        self._free()
        total = custom.allocate((numel,), dtype=dtype, device=device)
        work = custom(
            output_tensor=total,
            input_tensor=source,
            group=self._conduct.process_group,
            op=torch.distributed.ReduceOp.SUM,
        )
        if work is not None:
            work.wait()
        return typing.cast(torch.Tensor, total)
