"""The norm of all gradients, sharded and unsharded, and clipping by it."""

from __future__ import annotations

import contextlib
import functools
import math
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch_private
from .._comm.transport import Transport
from ..errors import unusable
from .group import Group


def checked_norm_type(norm_type: Any, where: str) -> float:
    """Return the order of a norm as a float; raises UsageError if it is not one."""
    if norm_type == "inf":
        return math.inf
    if (
        isinstance(norm_type, (int, float))
        and not isinstance(norm_type, bool)
        and 0 < norm_type <= math.inf
    ):
        with contextlib.suppress(OverflowError):
            return float(norm_type)
    raise unusable("norm_type", "a positive number, or inf", norm_type, where)


def gradients_of(group: Group) -> Sequence[Tensor]:
    """Return tensors, if possible one, that hold all gradients of a group's sharded parameters."""
    grads = [param.grad for param, _ in group.store.sharded_params if param.grad is not None]
    return packed(group, grads)


def packed(group: Group, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the reduced gradient [S], whose padding is zero, if ``grads`` are all of a group's
    gradients and still views of it; otherwise ``grads``."""
    of_group = group.gradients
    if (
        len(grads) < 2
        or len(grads) != of_group.sharded.num_held
        or of_group.policy.hook is not None
    ):
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
    sharded: Sequence[tuple[Group, Sequence[Tensor]]],
    whole: Iterable[Tensor],
    norm_type: float,
    device: torch.device,
) -> Tensor:
    """Return the norm of the gradients of sharded groups and of ``whole``, which every rank holds
    whole: 0-d, in fp32 (fp64 for fp64 parameters). norm_type: positive, or inf.

    Collective: all ranks, with the same groups; one all-reduce per shard axis."""
    whole = [_norm_of_dtensor(g, norm_type) if _torch_private.is_dtensor(g) else g for g in whole]
    # Those of the parameters, because ranks do not know each other's gradients.
    dtypes = [group.store.dtype for group, _ in sharded] + [grad.dtype for grad in whole]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    by_axes: dict[tuple[int, ...], tuple[list[Transport], list[Tensor]]] = {(): ([], whole)}
    for group, grads in sharded:
        axes = [axis for axis in (group.shard, *group.tensor_parallel) if axis.ranks > 1]
        by_axes.setdefault(tuple(id(axis) for axis in axes), (axes, []))[1].extend(grads)
    parts = []
    for axes, grads in by_axes.values():
        norm = _local_norm(grads, norm_type, dtype, device)
        for axis in axes:
            norm = norm_over_ranks(axis, norm, norm_type)
        parts.append(norm)
    result: Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type)
    return result


def _norm_of_dtensor(grad: Any, order: float) -> Tensor:
    """Return the norm of a DTensor, as one element that stands for all. Collective: its mesh."""
    return typing.cast(Tensor, torch.linalg.vector_norm(grad, order).full_tensor().reshape(1))


def dtype_of_norm(
    sharded: Iterable[tuple[Group, Sequence[Tensor]]], whole: Iterable[Tensor]
) -> torch.dtype:
    """Return the dtype that torch gives the norm of these gradients, their promotion, on all ranks,
    even without a part of some groups; fp32 without gradients."""
    dtypes = [grad.dtype for grad in whole]
    for group, grads in sharded:
        if grads:
            dtypes.append(grads[0].dtype)
        elif not group.gradients.sharded.num_held and any(
            param.requires_grad for param, _ in group.store.sharded_params
        ):
            dtypes.append(group.gradients.dtype)
    return functools.reduce(torch.promote_types, dtypes).to_real() if dtypes else torch.float32


def norm_over_ranks(axis: Transport, local: Tensor, norm_type: float) -> Tensor:
    """Return the norms, of any shape, of what the ranks of an axis hold together. Collective: the
    axis."""
    what = "the norm of the gradients"
    if not math.isinf(norm_type):
        return axis.sum_of(local.pow(norm_type), what).pow(1 / norm_type)
    is_nan = local.isnan()  # a maximum may drop NaN
    largest, any_nan = axis.max_of(
        torch.stack([local.nan_to_num(0.0, posinf=math.inf), is_nan.to(local.dtype)]), what
    ).unbind()
    return torch.where(any_nan > 0, math.nan, largest)


def clip_by_norm(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale ``grads``, whose norm is ``norm``, in place to a norm of at most ``max_norm``."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for (device, dtype), tensors in _by_kind(grads).items():
        _torch_private.scale_together(tensors, factor.to(device=device, dtype=dtype))


def _local_norm(
    grads: Sequence[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the norm of local gradients. Empty ones, which the inf norm rejects, count as zero."""
    norms = []
    for (_, grad_dtype), tensors in _by_kind(grad for grad in grads if grad.numel()).items():
        wide = torch.promote_types(grad_dtype, torch.float32)
        of_kind = torch.stack([*_torch_private.norms_together(tensors, norm_type, wide)])
        norms.append(of_kind.to(device, dtype))  # one copy: the host may wait for it
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    result: Tensor = torch.linalg.vector_norm(torch.cat(norms), norm_type)
    return result


def _by_kind(grads: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        found.setdefault((grad.device, grad.dtype), []).append(grad)
    return found
