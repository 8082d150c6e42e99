"""The norm of all gradients, sharded and not, and clipping by it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch

from .. import _torch_private
from .._comm.communicator import Communicator
from .unit import Group

__all__ = ["clip_by_norm", "dtype_of_norm", "gradients_of", "norm_of", "packed"]


def gradients_of(group: Group) -> Sequence[torch.Tensor]:
    """Return tensors that hold the gradients of all targets of a group, one if it can be."""
    return packed(
        group,
        [
            grad
            for sharded_param, _ in group.store.sharded_params
            if (grad := sharded_param.grad) is not None
        ],
    )


def packed(group: Group, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the total [S] if ``grads`` are all that a group has, and still the views of it that a
    reduction has left.

    What lies between them is zero, unless a user's hook has reduced. Else they come as they are.
    """
    if len(grads) < 2 or len(grads) != group.num_held or group.hook is not None:
        return grads
    total = _torch_private.base_of(grads[0])
    if (
        total is None
        or total.numel() != group.store.numel
        or any(_torch_private.base_of(grad) is not total for grad in grads)
    ):
        return grads
    return [total]


def norm_of(
    sharded: Sequence[tuple[Group, Sequence[torch.Tensor]]],
    whole: Iterable[torch.Tensor],
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """Return the norm over gradients of sharded groups, by group, and the gradients ``whole``,
    which every rank holds whole.

    fp32 (fp64 for fp64 parameters), 0-d. Collective: all ranks, which name the same groups; one
    all-reduce per shard axis. norm_type: positive, or inf.
    """
    whole = list(whole)
    dtypes = [group.store.dtype for group, _ in sharded] + [grad.dtype for grad in whole]
    dtype = (
        torch.float64 if torch.float64 in dtypes else torch.float32
    )  # known to all ranks, unlike what their gradients are
    split: dict[tuple[int, ...], tuple[list[Communicator], list[torch.Tensor]]] = {(): ([], whole)}
    for group, grads in sharded:
        wires = [wire for wire in (group.shard, *group.tensor_parallel) if wire.ranks > 1]
        split.setdefault(tuple(id(wire) for wire in wires), (wires, []))[1].extend(grads)
    parts = []
    for wires, grads in split.values():
        norm = _local_norm(grads, norm_type, dtype, device)
        for wire in wires:
            norm = _over_ranks(wire, norm, norm_type)
        parts.append(norm)
    return torch.linalg.vector_norm(torch.stack(parts), norm_type)


def dtype_of_norm(
    sharded: Iterable[tuple[Group, Sequence[torch.Tensor]]], whole: Iterable[torch.Tensor]
) -> torch.dtype:
    """Return the dtype that torch gives the norm of these gradients: what theirs promote to, fp32
    where there are none.

    A group of which this rank holds nothing counts as well, so that ranks agree.
    """
    dtypes = [grad.dtype for grad in whole]
    for group, grads in sharded:
        if grads:
            dtypes.append(grads[0].dtype)
        elif not group.num_held and any(
            sharded_param.requires_grad for sharded_param, _ in group.store.sharded_params
        ):
            dtypes.append(group.grad_dtype)
    return functools.reduce(torch.promote_types, dtypes).to_real() if dtypes else torch.float32


def _over_ranks(wire: Communicator, local: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm over all ranks of an axis. Collective."""
    if not math.isinf(norm_type):
        return wire.sum_of(local.pow(norm_type)).pow(1 / norm_type)
    is_nan = local.isnan()  # a maximum may drop it
    largest, any_nan = wire.max_of(
        torch.stack([local.nan_to_num(0.0, posinf=math.inf), is_nan.to(local.dtype)])
    ).unbind()
    return torch.where(any_nan > 0, math.nan, largest)


def clip_by_norm(grads: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale ``grads`` in place so that their norm, which is ``norm`` now, is at most
    ``max_norm``."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), tensors in by_kind.items():
        _torch_private.scale_together(tensors, factor.to(device=device, dtype=dtype))


def _local_norm(
    grads: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The norm of local gradients; empty ones, which the inf norm refuses, count as zero."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        if grad.numel():
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    norms = [
        norm.to(device, dtype)
        for (_, its_dtype), tensors in by_kind.items()
        for norm in _torch_private.norms_together(
            tensors, norm_type, torch.promote_types(its_dtype, torch.float32)
        )
    ]
    return (
        torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if norms
        else torch.zeros((), dtype=dtype, device=device)
    )
