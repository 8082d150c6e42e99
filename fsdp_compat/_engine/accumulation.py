"""``.grad`` of sharded parameters: how reduced gradients accumulate in it, and how zero_grad is
detected while gradients accumulate without communication (no_sync).

After a backward inside no_sync the gradients are in the reduce buffer. ``.grad`` is set to zeros
where it is None, so that ``zero_grad`` finds something to clear, and each ``.grad`` is recorded.
Before the next backward, gradients that were replaced since are dropped from the buffer, and those
that were zeroed are zeroed in it."""

from __future__ import annotations

import itertools
import operator
import typing
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import _torch_private
from .bulk_dict import consume
from .communicators import ReduceAxes
from .store import ParamStore

_grad, _requires_grad = map(operator.attrgetter, ("grad", "requires_grad"))
_GRAD, _NONES = itertools.repeat("grad"), itertools.repeat(None)


class _Recorded(typing.NamedTuple):
    grad: Tensor
    version: int
    is_shown: bool  # grad is the zeros of ``record``, until the next backward


class ShardedGrads:
    """``.grad`` of one group's sharded parameters."""

    def __init__(
        self,
        store: ParamStore,
        unsharded_params: Sequence[nn.Parameter],
        grad_dtype: torch.dtype | None,
        is_dtensor: bool,
    ) -> None:
        """grad_dtype: of ``.grad``; None: the shard's. is_dtensor: ``.grad`` of DTensors stays None
        until a reduction (except for the zeros of ``record``) and for unused parameters; users'
        hooks run after each accumulation. For others they run at the end of backward: until then,
        ranks of a host may read shards."""
        self._dtype, self.is_dtensor = grad_dtype or store.dtype, is_dtensor
        self._params: list[nn.Parameter] = [param for param, _ in store.sharded_params]
        # Those whose hooks run at the end of backward
        self.late_params = () if is_dtensor else tuple(self._params)
        # Parameters that this rank has no part of never have gradients here, nor optimizer state.
        # DTensors have empty gradients instead.
        self._absent = frozenset(
            position
            for position, (param, indices) in enumerate(store.sharded_params)
            if not (is_dtensor or param.numel())
            and any(map(Tensor.numel, map(unsharded_params.__getitem__, indices)))
        )
        self.num_held = len(self._params) - len(self._absent)  # that this rank has a part of
        self.recorded: list[_Recorded | None] = []  # None: has no gradient in the buffer
        # Positions with gradients in the buffer, even if the parameter was frozen since.
        self._in_buffer = set[int]()
        if grad_dtype is not None:
            for param in self._params:
                grad, param.grad = param.grad, None  # an existing gradient is converted
                param.grad_dtype = grad_dtype
                param.grad = None if grad is None else grad.to(grad_dtype)

    def accumulate(self, grads: Sequence[Tensor | None], axes: ReduceAxes, what: str) -> None:
        """Assign reduced gradients, one per sharded parameter, or add them to existing ones."""
        params, is_dtensor = self._params, self.is_dtensor
        in_buffer, self._in_buffer = self._in_buffer, set()
        if _torch_private.have_gradient_hooks(params):
            axes.wait_until_writable(what)
            grads = list(map(_torch_private.after_gradient_hooks, params, grads))
        if self._absent:
            grads = [
                None if position in self._absent else grad for position, grad in enumerate(grads)
            ]
        takes = map(operator.is_not, grads, _NONES) if is_dtensor else map(_requires_grad, params)
        if all(takes) and not any(map(operator.is_not, map(_grad, params), _NONES)):
            consume(map(setattr, params, _GRAD, grads))
            if is_dtensor:
                self._run_hooks(params, axes, what)
            return
        taken, sums, addends = list[nn.Parameter](), list[Tensor](), list[Tensor]()
        for position, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if is_dtensor:
                is_taken = grad is not None  # None: the parameter is unused
            else:  # None: this rank has no part of it; ``.grad`` may be zeros of ``record``
                is_taken = param.requires_grad or position in in_buffer
            if not is_taken:
                continue
            taken.append(param)
            if param.grad is None or grad is None:
                param.grad = grad
            else:  # local tensors: adding DTensors costs ten times as much
                sums.append(_torch_private.local_part(param.grad))
                addends.append(_torch_private.local_part(grad))
        if sums:
            axes.wait_until_writable(what)
            _torch_private.add_together(sums, addends)
        if is_dtensor:
            self._run_hooks(taken, axes, what)

    def _run_hooks(self, params: Sequence[nn.Parameter], axes: ReduceAxes, what: str) -> None:
        """Run the user's post-accumulate hooks, which may read and write gradients."""
        if _torch_private.have_post_accumulate_hooks(params):
            axes.wait_until_writable(what)
            _torch_private.run_post_accumulate_hooks(params)

    def step_in_backward(self) -> None:
        """Run the user's post-accumulate hooks, on every rank with an empty gradient if it has no
        part of a parameter; and the optimizers that step in backward, and drop their gradients."""
        for position, param in enumerate(self._params):
            if self.late_params and param.requires_grad:
                if is_absent := position in self._absent:
                    param.grad = torch.zeros_like(param, dtype=self._dtype)
                _torch_private.run_post_accumulate_hooks((param,))
                if is_absent:
                    param.grad = None
            optimizers = _torch_private.optimizers_in_backward(param)
            if optimizers and param.grad is not None:
                if param.numel():  # a rank without a part of the parameter keeps no state
                    for optimizer in optimizers:
                        optimizer.step()
                param.grad = None

    # -- accumulation without communication

    def record(self, zeros: Sequence[Tensor | None] = ()) -> None:
        """Record every ``.grad`` after a backward without communication. Even parameters of which
        this rank has no part get one, so that zero_grad clears the same on all ranks. zeros: -0.0,
        for DTensors, which show them until the next backward where ``.grad`` is None: zeroed, they
        are +0.0, and scaled, still -0.0."""
        self.recorded = []
        for position, param in enumerate(self._params):
            is_shown = self.is_dtensor and param.grad is None
            if is_shown:
                param.grad = zeros[position]
            elif param.grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param, dtype=self._dtype)
            if self.is_dtensor or param.requires_grad:
                self._in_buffer.add(position)
            grad, is_recorded = param.grad, position in self._in_buffer
            self.recorded.append(
                _Recorded(grad, grad._version, is_shown)
                if grad is not None and is_recorded
                else None
            )

    def take_cleared(self) -> tuple[list[int], list[int]]:
        """Return the positions of sharded parameters whose gradients were replaced or set to None
        since ``record`` (the same on all ranks), and of those whose gradients were zeroed in place
        (which depends on this rank's part); and forget what was recorded."""
        replaced, zeroed, empty = list[int](), list[int](), list[int]()
        for position, (param, before) in enumerate(zip(self._params, self.recorded, strict=True)):
            if before is None:
                continue
            if param.grad is not before.grad:
                replaced.append(position)
                self._in_buffer.discard(position)
                continue
            if before.grad._version != before.version:
                local = _torch_private.local_part(before.grad)
                if local.any():
                    continue
                if before.is_shown and not local.numel():
                    empty.append(position)
                elif not (before.is_shown and local.signbit().any()):  # -0.0: scaled
                    zeroed.append(position)
            if before.is_shown:
                param.grad = None
        self.recorded = []
        # Nothing tells why an empty part was written to: it follows the others.
        return replaced, zeroed + (empty if zeroed else [])
