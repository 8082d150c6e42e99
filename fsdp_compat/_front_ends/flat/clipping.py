"""``clip_grad_norm_`` of a wrapper, and the checks of its arguments."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ... import _torch_private
from ..._engine import grad_norm, rendezvous
from ..._engine.group import Group
from ..._state.units import is_lazy
from ...errors import UsageError, ValueStateError
from .flat_unit import flat_unit_of, require_root


@torch.no_grad()
def clip_grad_norm(wrapper: nn.Module, max_norm: Any, norm_type: Any) -> torch.Tensor:
    """Implement ``FullyShardedDataParallel.clip_grad_norm_``. Collective."""
    _refuse_in_place(wrapper)
    own = flat_unit_of(wrapper)
    runtime = own.runtime
    require_root(own.unit, "clip_grad_norm_()")
    norm_type = checked_norm_type(norm_type)
    _check_max_norm(max_norm)
    runtime.require_idle("clip_grad_norm_", ValueStateError)
    runtime.require_parts("clip_grad_norm_")
    groups = runtime.groups
    rendezvous.require_all_ranks("clip_grad_norm_", groups)
    if runtime.backward.has_raised:  # gradients may be left on unsharded parameters
        runtime.rest()
    others = _gradients_of_others(wrapper, groups)
    grads = [(group, grad_norm.gradients_of(group)) for group in groups]
    norm = grad_norm.norm_of(grads, others, norm_type, own.device)
    managed = [grad for _, of_group in grads for grad in of_group]
    if not others and (_expects_gradients(groups) if not managed else _has_unreduced(groups)):
        warnings.warn(
            "clip_grad_norm_() found "
            + ("gradients of no_sync(), which are not reduced yet" if managed else "no gradients")
            + ". Call it between the last backward of a step, outside of no_sync(), and "
            "optimizer.step().",
            stacklevel=4,
        )
    grad_norm.clip_by_norm(managed + others, norm, float(max_norm))
    return norm.to(grad_norm.dtype_of_norm(grads, others))


def _expects_gradients(groups: Iterable[Group]) -> bool:
    """True if this rank holds a part of a trainable parameter."""
    return any(
        param.requires_grad and param.numel()
        for group in groups
        for param, _ in group.store.sharded_params
    )


def _has_unreduced(groups: Iterable[Group]) -> bool:
    return any(group.gradients.received for group in groups)


def _refuse_in_place(module: nn.Module) -> None:
    if is_lazy(module):
        raise UsageError.of(
            "Modules that fully_shard was applied to have no clip_grad_norm_().",
            expected="a FullyShardedDataParallel",
            got=f"a {type(module).__name__}",
            where="FullyShardedDataParallel.clip_grad_norm_",
            fix="call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        )


def checked_norm_type(norm_type: Any) -> float:
    """Return the order of a norm as a float; raises UsageError if it is not one."""
    if norm_type == "inf":
        return math.inf
    if (
        isinstance(norm_type, (int, float))
        and not isinstance(norm_type, bool)
        and 0 < norm_type <= math.inf
    ):
        try:
            return float(norm_type)
        except OverflowError:
            pass
    raise _bad("norm_type", "a positive number, or inf", norm_type)


def _check_max_norm(max_norm: Any) -> None:
    """Raise UsageError unless ``max_norm`` is one number of at least 0."""
    if isinstance(max_norm, (int, float, torch.Tensor)) and not isinstance(max_norm, bool):
        try:
            if float(max_norm) >= 0:
                return
        except (OverflowError, RuntimeError, ValueError):
            pass  # several numbers, a complex number, or one that is too large
    raise _bad("max_norm", "a number of at least 0", max_norm)


def _bad(name: str, expected: str, got: object) -> UsageError:
    return UsageError.of(
        f"{name} cannot be used for clipping.",
        expected=expected,
        got=f"{got!r} of type {type(got).__name__}",
        where=f"argument {name!r} of clip_grad_norm_",
        fix=f"pass {expected}",
    )


def _gradients_of_others(root: nn.Module, groups: Iterable[Group]) -> list[torch.Tensor]:
    """Return the gradients of the parameters in ``root`` that belong to none of ``groups``, each
    once.

    nn.Module.parameters() would build a name for each parameter, which takes longer than a norm.
    """
    known = {
        id(sharded_param) for group in groups for sharded_param, _ in group.store.sharded_params
    }
    found, seen, waiting = list[torch.Tensor](), set[int](), [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            for parameter in _torch_private.parameters_of(module).values():
                if parameter is not None and id(parameter) not in known:
                    known.add(id(parameter))
                    if parameter.grad is not None:
                        found.append(parameter.grad)
            waiting += [child for _, child in _torch_private.children_of(module)]
    return found
