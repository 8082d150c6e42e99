"""``torch.nn.utils.clip_grad_norm_`` over sharded gradients.

Code written for DistributedDataParallel clips with torch's own function, which would silently use
the norm of this rank's shards only, and refuse DTensors of several meshes, as tensor parallelism of
some modules gives. So this patch replaces torch's functions that clip, that compute the norm and
that scale, which the first calls. Gradients that are not sharded still go to torch's."""

from __future__ import annotations

import threading
import types
from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch_private
from .._engine import rendezvous
from .._engine.grad_norm import checked_norm_type, dtype_of_norm, norm_of, packed
from .._engine.group import Group
from .._engine.runtime import live_runtimes
from .patches import Patch, Undo, around_functions


class _Clipped(threading.local):
    """The parameters that this thread clips with torch's function, even without gradients."""

    parameters: Sequence[torch.Tensor] = ()


_clipped = _Clipped()


def _clip(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    before, _clipped.parameters = _clipped.parameters, listed
    try:
        # torch warns about a generator that yields nothing, so it gets a generator again.
        is_generator = isinstance(parameters, types.GeneratorType)
        result: torch.Tensor = original(
            (p for p in listed) if is_generator else listed, *args, **kwargs
        )
        return result
    finally:
        _clipped.parameters = before


def _total_norm(
    original: Any,
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Compute the norm, over all ranks if any gradient is sharded; collective then."""
    grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    by_mesh = _by_mesh(grads)
    if len(by_mesh) > 1:
        norms: list[Any] = [
            _total_norm(original, its, norm_type, False, foreach) for its in by_mesh.values()
        ]
        whole_norms = [n.full_tensor() if _torch_private.is_dtensor(n) else n for n in norms]
        total: torch.Tensor = original(whole_norms, norm_type, error_if_nonfinite, foreach)
        return total
    split, groups = _split_over_ranks(grads, _clipped.parameters)
    if not groups:
        result: torch.Tensor = original(grads, norm_type, error_if_nonfinite, foreach)
        return result
    order = checked_norm_type(norm_type, "clip_grad_norm_")
    by_group: dict[Group, list[torch.Tensor]] = {group: [] for group in groups}
    whole = []
    for grad in grads:
        by_group[split[id(grad)]].append(grad) if id(grad) in split else whole.append(grad)
    rendezvous.require_all_ranks_once("torch.nn.utils.clip_grad_norm_", groups)
    with torch.no_grad():
        parts = [(group, packed(group, its)) for group, its in by_group.items()]
        norm = norm_of(parts, whole, order, groups[0].device)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The norm of order {order} of the gradients over all ranks is non-finite "
            f"({norm.item()}), so they cannot be clipped. "
            "Pass error_if_nonfinite=False to scale them anyway."
        )
    device = grads[0].device if grads else groups[0].store.shard.device
    return norm.to(device=device, dtype=dtype_of_norm(parts, whole))


def _scale(
    original: Any, parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kw: Any
) -> None:
    """Scale the gradients, those of each mesh by themselves: torch refuses a list of several."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for its in _by_mesh(listed).values():
        original(its, max_norm, total_norm, *args, **kw)


def _by_mesh(tensors: Sequence[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """Return the tensors by the mesh of a DTensor, and all others under None: in tensor
    parallelism, a module that is not parallel is on fewer dims than one that is."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        mesh = getattr(tensor, "device_mesh", None) if _torch_private.is_dtensor(tensor) else None
        found.setdefault(mesh, []).append(tensor)
    return found


def _split_over_ranks(
    grads: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> tuple[dict[int, Group], list[Group]]:
    """Return {id of a sharded gradient that torch takes for a whole one: its group}, and the groups
    of ``parameters``, the same on all ranks if these are; else those of ``grads``."""
    wanted, asked = {id(grad) for grad in grads}, {id(parameter) for parameter in parameters}
    split: dict[int, Group] = {}
    group_of: dict[int, Group] = {}  # by the id of a parameter
    for runtime in live_runtimes():
        for group in runtime.groups if wanted or asked else ():
            further = any(axis.ranks > 1 for axis in group.store.tensor_parallel_axes)
            is_split = group.shard.ranks > 1 or further
            for sharded_param, _ in group.store.sharded_params if is_split else ():
                if _torch_private.is_dtensor(sharded_param):
                    break  # as all of the group
                if sharded_param.grad is not None and id(sharded_param.grad) in wanted:
                    split[id(sharded_param.grad)] = group
                if id(sharded_param) in asked and sharded_param.requires_grad:
                    group_of[id(sharded_param)] = group
    in_order = [group_of[id(p)] for p in parameters if id(p) in group_of] or [
        split[id(grad)] for grad in grads if id(grad) in split
    ]
    return split, list(dict.fromkeys(in_order))


def _patch() -> list[Undo]:
    return around_functions(
        torch.nn.utils,
        {"clip_grad_norm_": _clip, "get_total_norm": _total_norm, "clip_grads_with_norm_": _scale},
    )


patches = Patch(_patch)
