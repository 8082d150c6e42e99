"""The norm of all gradients, sharded and not, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from . import torch_private
from .unit import Group

__all__ = ["clip_by_norm", "total_norm"]


def total_norm(groups: Sequence[Group], others: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm over the sharded gradients of ``groups`` and the gradients ``others``, which every rank holds whole.

    fp32 (fp64 for fp64 gradients), 0-d. Collective: all ranks; one all-reduce per shard axis.
    """
    by_axis: dict[int, list[Group]] = {}
    for group in groups:
        by_axis.setdefault(id(group.shard) if group.shard.ranks > 1 else 0, []).append(group)
    parts = [_combine([p.grad for g in by_axis.pop(0, []) for p, _ in g.store.targets if p.grad is not None], norm_type, device)]
    parts[0] = _merge([parts[0], _combine(list(others), norm_type, device)], norm_type)
    for its_groups in by_axis.values():
        wire = its_groups[0].shard
        local = _combine([p.grad for g in its_groups for p, _ in g.store.targets if p.grad is not None], norm_type, device)
        if math.isinf(norm_type):
            parts.append(wire.max_of(local))
        else:
            parts.append(wire.sum_of(local.pow(norm_type)).pow(1 / norm_type))
    return _merge(parts, norm_type)


def clip_by_norm(grads: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale ``grads`` in place so that their norm, which is ``norm`` now, is at most ``max_norm``."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), tensors in by_kind.items():
        torch_private.scale_together(tensors, factor.to(device=device, dtype=dtype))


def _combine(grads: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The norm of local gradients; empty ones, which the inf norm refuses, count as zero."""
    norms = [
        torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32))
        for grad in grads
        if grad.numel()
    ]
    return _merge([norm.to(device) for norm in norms], norm_type) if norms else torch.zeros((), device=device)


def _merge(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(_same_dtype(norms)), norm_type)


def _same_dtype(norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return [norm.to(dtype) for norm in norms]
