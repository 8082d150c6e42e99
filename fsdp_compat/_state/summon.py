"""Whole parameters between steps, for summon_full_params."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from .. import _torch_private
from .._engine.group import Group
from .._engine.requires_grad import follow_toggles
from .._engine.state_store import StateStore, store_of
from .._engine.unit import Unit
from .held import show


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of summon_full_params."""

    writeback: bool
    rank0_only: bool = False
    serve_only: bool = False  # this rank takes part in all-gathers, and shows nothing
    offload_to_cpu: bool = False
    with_grads: bool = False

    def keeps_changes_of(self, group: Group) -> bool:
        """Return whether changes are kept: as in torch, always if nothing is sharded, unless only
        one of several replicas would have them."""
        return self.writeback or (
            group.shard.ranks == 1 and (group.replica.ranks == 1 or not self.rank0_only)
        )


shown_stores: set[object] = set()  # whose parameters are shown whole now


@contextlib.contextmanager
def full_parameters(units: Sequence[Unit], options: Options) -> Iterator[None]:
    """Show whole parameters in the modules of ``units``, and write changes back. With
    use_orig_params=True the user's own become whole, else others are shown. Collective."""
    with contextlib.ExitStack() as stack:
        for unit in units:
            if not unit.summoned:  # an outer context shows it already
                stack.enter_context(full_unit(unit, options))
        yield


@contextlib.contextmanager
def full_unit(unit: Unit, options: Options) -> Iterator[list[torch.Tensor]]:
    """Do that for one unit that is sharded; gives the memory of what is shown. Collective."""
    fulls: list[tuple[Group, torch.Tensor, torch.Tensor | None]] = []
    for group in unit.groups:
        full = group.gather_full()
        grads = _gather_grads(group) if options.with_grads else None
        is_shard = full.data_ptr() == store_of(group).shard.data_ptr()
        if options.serve_only:
            continue
        if is_shard and not options.keeps_changes_of(group):
            full = full.clone()
        fulls.append((group, full.cpu() if options.offload_to_cpu else full, grads))
    with contextlib.ExitStack() as stack:
        if not options.serve_only:
            unit.view.begin_summon()
            stack.callback(unit.view.end_summon)
            stores = {group.store for group in unit.groups}
            shown_stores.update(stores)
            stack.callback(shown_stores.difference_update, stores)
            for group, full, grads in fulls:
                stack.enter_context(_shown(group, full, grads, options.keeps_changes_of(group)))
            unit.view.keep_order()
        yield [full for _, full, _ in fulls]


@contextlib.contextmanager
def _shown(
    group: Group, full: torch.Tensor, grads: torch.Tensor | None, writeback: bool
) -> Iterator[None]:
    """Show whole parameters in the modules; at the end, write changes back and reshard."""
    store = store_of(group)
    wholes = store.whole(full.detach())
    shown: list[nn.Parameter] = []
    kept: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]] = []
    target_grads = [param.grad for param, _ in store.sharded_params]
    for param, indices in store.sharded_params:
        for index in indices:
            is_users = not store.is_flattened and store.parallel[index] is None
            if is_users and _torch_private.is_plain(param):  # the user's own object becomes whole
                kept.append((param, param.data, param.grad))
                param.grad = None
                param.data = wholes[index]
                shown.append(param)
            else:
                shown.append(store.parameter(index, wholes[index], param.requires_grad))
                if param.grad_dtype is not param.dtype:
                    shown[-1].grad_dtype = param.grad_dtype
    show(store, shown)
    whole_grads = store.whole(grads.to(full.device)) if grads is not None else ()
    for parameter, grad, parallel in zip(shown, whole_grads, store.parallel, strict=False):
        dtype = parameter.grad_dtype or grad.dtype  # another one with keep_low_precision_grads
        parameter.grad = grad.to(dtype) if parallel is None else parallel.wrap(grad)
    try:
        yield
    finally:
        with torch.no_grad():
            for slot in store.shown(shown) if writeback else ():
                held = _torch_private.parameters_of(slot.module).get(slot.attribute)
                if held is not None and slot.parameter is not None and held is not slot.parameter:
                    slot.parameter.data.copy_(held)  # it was replaced
            if writeback:
                store.take_from_whole([_torch_private.local_part(each.data) for each in shown])
            if writeback and grads is not None:
                _write_back_grads(store, shown, target_grads)
            for parameter, data, kept_grad in kept:
                parameter.grad = None
                parameter.data = data
                parameter.grad = kept_grad
    for param, indices in store.sharded_params if writeback else ():
        toggled = [shown[index].requires_grad is not param.requires_grad for index in indices]
        follow_toggles(param, toggled, f"{group.name}, in summon_full_params")


def _write_back_grads(
    store: StateStore, shown: Sequence[nn.Parameter], grads: Sequence[torch.Tensor | None]
) -> None:
    """Copy this rank's part of whole gradients into existing ``.grad`` of sharded parameters."""
    changed = torch.zeros_like(store.shard)
    wholes = (torch.zeros_like(each) if each.grad is None else each.grad for each in shown)
    store.take_from_whole([_torch_private.local_part(whole) for whole in wholes], changed)
    for grad, part in zip(grads, store.grads(changed), strict=True):
        if grad is not None:
            _torch_private.local_part(grad).copy_(part)


def _gather_grads(group: Group) -> torch.Tensor | None:
    """Return the whole gradients [ranks * S], or None if no rank has any. Collective."""
    store = store_of(group)
    own = torch.zeros(store.numel, dtype=store.dtype, device=store.shard.device)
    has = False
    for (param, _), place in zip(store.sharded_params, store.grads(own), strict=True):
        if param.grad is not None:
            place.copy_(_torch_private.local_part(param.grad))
            has = True
    own_has = torch.tensor([has], dtype=torch.uint8, device=group.device)
    some_have = group.shard.max_of(own_has, f"a check for gradients of {group.name}")
    return group.gather_full(own) if some_have else None
