"""The norm of all gradients, sharded and not, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from . import torch_private
from .collectives import Communicator
from .unit import Group

__all__ = ["clip_by_norm", "norm_of", "total_norm"]


def total_norm(groups: Sequence[Group], others: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm over the sharded gradients of ``groups`` and the gradients ``others``, which every rank holds whole.

    fp32 (fp64 for fp64 parameters), 0-d. Collective: all ranks; one all-reduce per shard axis. norm_type: positive, or inf.
    """
    of_groups = [(group, [p.grad for p, _ in group.store.targets if p.grad is not None]) for group in groups]
    return norm_of(of_groups, others, norm_type, device)


def norm_of(
    sharded: Sequence[tuple[Group, Sequence[torch.Tensor]]], whole: Iterable[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """The same, of some of the gradients of each group. All ranks name the same groups."""
    whole = list(whole)
    dtypes = [group.store.dtype for group, _ in sharded] + [grad.dtype for grad in whole]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32  # known to all ranks, unlike what their gradients are
    split: dict[tuple[int, ...], tuple[list[Communicator], list[torch.Tensor]]] = {(): ([], whole)}
    for group, grads in sharded:
        wires = [wire for wire in (group.shard, *group.beyond) if wire.ranks > 1]
        split.setdefault(tuple(id(wire) for wire in wires), (wires, []))[1].extend(grads)
    parts = []
    for wires, grads in split.values():
        norm = _local_norm(grads, norm_type, dtype, device)
        for wire in wires:
            norm = _over_ranks(wire, norm, norm_type)
        parts.append(norm)
    return torch.linalg.vector_norm(torch.stack(parts), norm_type)


def _over_ranks(wire: Communicator, local: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm over all ranks of an axis. Collective."""
    if not math.isinf(norm_type):
        return wire.sum_of(local.pow(norm_type)).pow(1 / norm_type)
    is_nan = local.isnan()  # a maximum may drop it
    largest, any_nan = wire.max_of(torch.stack([local.nan_to_num(0.0, posinf=math.inf), is_nan.to(local.dtype)])).unbind()
    return torch.where(any_nan > 0, math.nan, largest)


def clip_by_norm(grads: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale ``grads`` in place so that their norm, which is ``norm`` now, is at most ``max_norm``."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), tensors in by_kind.items():
        torch_private.scale_together(tensors, factor.to(device=device, dtype=dtype))


def _local_norm(grads: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The norm of local gradients; empty ones, which the inf norm refuses, count as zero."""
    norms = [
        torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32)).to(device, dtype)
        for grad in grads
        if grad.numel()
    ]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=dtype, device=device)
