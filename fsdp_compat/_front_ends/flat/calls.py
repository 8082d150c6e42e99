"""Calls on a whole model between its passes: ``register_comm_hook``, ``clip_grad_norm_`` and
``summon_full_params``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import nn

from ... import _torch_private
from ..._engine import grad_norm, rendezvous
from ..._engine.behavior import CommHook
from ..._engine.group import Group
from ..._state.summon import Options, full_parameters
from ..._state.units import is_lazy, model_unit_of, model_units_in, refuse_extensions, runtimes_of
from ...errors import (
    AssertedStateError,
    NotImplementedUsageError,
    ValueStateError,
    require_bools,
    require_module,
    takes,
    unusable,
    wrong_type,
)
from .flat_unit import FlatUnit, flat_unit_of, require_root

_CLIPPING = "clip_grad_norm_"


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Generator[None, None, None]:
    """Expose full parameters, in the dtype of the shards, inside the context.

    Modules that fully_shard was applied to show plain Parameters then.

    Collective: all ranks of the model's process group.

    Args:
        module: the model, or a module in it.
        recurse: whether to include all sharded modules below ``module``.
        writeback: whether to keep the changes made inside. Without sharding (one rank, NO_SHARD)
            they are kept in any case.
        rank0_only: whether only rank 0 sees full parameters, and the other ranks still see their
            shards. Requires ``writeback=False``; with several ranks, changes on rank 0 are dropped.
        offload_to_cpu: whether to put the full parameters on the CPU.
        with_grads: whether to expose full gradients as well.

    Raises:
        UsageError: ``rank0_only`` together with ``writeback``; also a NotImplementedError.
        StateError: a forward or backward is running."""
    where = "summon_full_params"
    require_module(module, where)
    require_bools(
        where,
        recurse=recurse,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
    )
    if writeback and rank0_only:
        raise NotImplementedUsageError.of(
            "summon_full_params cannot write back with rank0_only=True.",
            expected="rank0_only=True with writeback=False, or rank0_only=False",
            got="rank0_only=True, writeback=True",
            where="summon_full_params(...)",
            fix="pass writeback=False",
        )
    units = model_units_in(module)
    if not recurse:
        own = model_unit_of(module)
        units = [each for each in units if each is own or each.unit.is_root]
    refuse_extensions((group for each in units for group in each.unit.groups), where)
    for runtime in runtimes_of(units):
        runtime.require_idle(where, AssertedStateError)
        runtime.reshard_all()
    rendezvous.require_all_ranks(
        where, (group for each in units if not each.unit.summoned for group in each.unit.groups)
    )
    serve_only = rank0_only and not all(each.mesh.is_first for each in units)
    options = Options(writeback, rank0_only, serve_only, offload_to_cpu, with_grads)
    with full_parameters([each.unit for each in units], options):
        yield


# -- gradients


def register_comm_hook(own: FlatUnit, state: object, hook: Callable[..., Any]) -> None:
    """Implement ``FullyShardedDataParallel.register_comm_hook``."""
    runtime = own.runtime
    _refuse_hook(hook, {group.shard.ranks > 1 for group in runtime.groups})
    require_root(own.unit.is_root, own.unit.label, "register_comm_hook()", AssertedStateError)
    runtime.require_idle("register_comm_hook")
    if any(group.gradients.policy.hook is not None for group in runtime.groups):
        raise AssertedStateError.of(
            "A communication hook is registered already.",
            expected="one call of register_comm_hook per model",
            got=f"a second call, with {hook!r}",
            where=own.unit.label,
            fix="register one hook that does both",
        )
    runtime.set_comm_hook(CommHook(state, hook))


def _refuse_hook(hook: Any, split: set[bool]) -> None:
    """Raise UsageError for other hooks. split: by group, whether its gradients are sharded."""
    if split == {True}:
        expected = "hook(state, grad, output)"
    elif split == {False}:
        expected = "hook(state, grad)"
    else:
        expected = "hook(state, grad, output=None), because only some units are sharded"
    if not callable(hook) or not all(takes(hook, 3 if is_split else 2) for is_split in split):
        raise wrong_type("hook", f"a function {expected}", hook, "register_comm_hook(state, hook)")


@torch.no_grad()
def clip_grad_norm(wrapper: nn.Module, max_norm: Any, norm_type: Any) -> torch.Tensor:
    """Implement ``FullyShardedDataParallel.clip_grad_norm_``. Collective."""
    if is_lazy(wrapper):
        where = "FullyShardedDataParallel.clip_grad_norm_"
        fix = "call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
        raise unusable("The module", "a FullyShardedDataParallel", wrapper, where, fix)
    own = flat_unit_of(wrapper)
    runtime = own.runtime
    require_root(own.unit.is_root, own.unit.label, "clip_grad_norm_()")
    norm_type = grad_norm.checked_norm_type(norm_type, _CLIPPING)
    _check_max_norm(max_norm)
    runtime.require_idle("clip_grad_norm_", ValueStateError)
    runtime.require_parts("clip_grad_norm_")
    groups = runtime.groups
    rendezvous.require_all_ranks_once("clip_grad_norm_", groups)
    if runtime.backward.has_raised:  # gradients may be left on unsharded parameters
        runtime.reshard_all()
    others = _gradients_of_others(wrapper, groups)
    grads = [(group, grad_norm.gradients_of(group)) for group in groups]
    norm = grad_norm.norm_of(grads, others, norm_type, own.device)
    managed = [grad for _, of_group in grads for grad in of_group]
    has_unreduced = any(group.gradients.received for group in groups)
    if not others and (has_unreduced if managed else _expects_gradients(groups)):
        warnings.warn(
            "clip_grad_norm_() found "
            + ("gradients of no_sync(), which are not reduced yet" if managed else "no gradients")
            + ". Call it between the last backward of a step, outside of no_sync(), and "
            "optimizer.step().",
            stacklevel=4,
        )
    parts = [*managed, *map(_torch_private.local_part, others)]
    grad_norm.clip_by_norm(parts, norm, float(max_norm))
    return norm.to(grad_norm.dtype_of_norm(grads, others))


def _expects_gradients(groups: Iterable[Group]) -> bool:
    """True if this rank holds a part of a trainable parameter."""
    return any(
        param.requires_grad and param.numel()
        for group in groups
        for param, _ in group.store.sharded_params
    )


def _check_max_norm(max_norm: Any) -> None:
    """Raise UsageError unless ``max_norm`` is one number of at least 0."""
    if isinstance(max_norm, (int, float, torch.Tensor)) and not isinstance(max_norm, bool):
        # several numbers, a complex number, or one that is too large
        with contextlib.suppress(OverflowError, RuntimeError, ValueError):
            if float(max_norm) >= 0:
                return
    raise unusable("max_norm", "a number of at least 0", max_norm, _CLIPPING)


def _gradients_of_others(root: nn.Module, groups: Iterable[Group]) -> list[torch.Tensor]:
    """Return the gradients of ``root``'s parameters that are in none of ``groups``, each once.
    ``parameters()`` would build a name for each, which takes longer than computing a norm."""
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
