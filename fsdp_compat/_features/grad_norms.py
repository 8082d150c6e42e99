"""The norm of each parameter's gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from .. import _torch_private
from .._comm.communicator import communicator
from .._comm.transport import Transport
from .._engine import rendezvous
from .._engine.grad_norm import checked_norm_type, norm_over_ranks
from .._engine.group import Group
from .._engine.state_store import store_of
from .._engine.tensor_parallel import TensorParallel
from .._state.units import names_of, require_idle, units_of, unmanaged_in
from ..errors import StateError, require_module

_WHAT = "grad_norms"


@torch.no_grad()
def grad_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, Tensor]:
    """Return the norm of the gradient of each trainable parameter.

    The norms are those of the whole gradients, in fp32, and 0 for a parameter without gradient on
    any rank. Norms of gradients that ShardedGradScaler has scaled include its scale.

    Collective: all ranks of the model, with one all-reduce per axis of sharding and of tensor
    parallelism.

    Args:
        model: a sharded model.
        norm_type: positive, or inf.

    Returns:
        {name before wrapping: norm, 0-d}.

    Raises:
        StateError: inside forward and backward, and for gradients that are not reduced."""
    require_module(model, _WHAT)
    norm_type = checked_norm_type(norm_type, _WHAT)
    require_idle(model, _WHAT)
    units = units_of(model)
    groups = [group for named in units for group in named.unit.groups]
    rendezvous.require_all_ranks_once(_WHAT, groups)
    require_reduced(groups)
    by_axes: dict[tuple[Transport, ...], tuple[list[list[str]], list[Tensor]]] = {}
    for named in units:
        for group in named.unit.groups:
            axes = tuple(axis for axis in (group.shard, *group.tensor_parallel) if axis.ranks > 1)
            names, grads = by_axes.setdefault(axes, ([], []))
            store = store_of(group)
            for param, indices in store.sharded_params:
                # a 0-d parameter of fully_shard is on every rank, and is counted once
                is_copy = param.dim() == 0 and not _torch_private.is_plain(param)
                grad = _flat(None if is_copy and group.shard.rank else param.grad, store.shard)
                for index in indices if param.requires_grad else ():
                    names.append(names_of(store.orig_params[index], named.prefix))
                    grads.append(grad[store.part_in_sharded_param(index).slice])
    for slot in unmanaged_in(model):
        if isinstance(whole := slot.value, nn.Parameter) and whole.requires_grad:
            value, parallel, axes = whole.grad, TensorParallel.of(whole), ()
            if parallel is not None:
                value = None if value is None else parallel.local(value)  # it may be a partial sum
                split = parallel.tensor_parallel_axes()
                axes = tuple(communicator(axis, whole.device) for axis in split if axis.ranks > 1)
            names, grads = by_axes.setdefault(axes, ([], []))
            names.append([slot.name])
            grads.append(_flat(value, whole.detach()))
    norms = dict[str, Tensor]()
    for axes, (names, grads) in by_axes.items():
        if grads:
            filled = [grad if grad.numel() else grad.new_zeros(1) for grad in grads]
            each_norm = [vector_norm(grad, norm_type, dtype=torch.float32) for grad in filled]
            local = torch.stack([norm.to(groups[0].device) for norm in each_norm])
            for axis in axes:
                local = norm_over_ranks(axis, local, norm_type)
            for each, norm in zip(names, local.unbind(), strict=True):
                norms.update(dict.fromkeys(each, norm))
    return norms


def require_reduced(groups: Iterable[Group]) -> None:
    """Raise StateError if gradients of ``no_sync()`` wait for a reduction."""
    for group in groups:
        if group.gradients.received:
            raise StateError.of(
                "Gradients are not reduced yet.",
                expected="a call after a backward outside of no_sync()",
                got="gradients of a backward inside it",
                where=group.name,
                fix="call it after the last backward of the step",
            )


def _flat(grad: Tensor | None, like: Tensor) -> Tensor:
    """Return this rank's part of a gradient as 1-D; nothing without one."""
    if grad is None:
        return like.new_empty(0)
    return _torch_private.local_part(grad).reshape(-1)
