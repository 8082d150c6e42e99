"""Convert a wrapped model to another dtype before its first forward, or move a shard: ``.half()``,
``.to(dtype)`` and the handles that clients use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ..._engine import rendezvous
from ..._engine.checks import refuse_meta
from ..._engine.group import Group
from ..._stores.flat_store import FlatStore
from ...errors import ValueStateError
from .flat_unit import FlatUnit, flat_units_in, group_around


def convert_as(wrapper: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Convert the shards of all wrappers in ``wrapper`` to the dtypes that ``fn`` returns.
    Collective if any changes. Raises StateError if ``fn`` moves to the meta device."""
    stores = [store for each in flat_units_in(wrapper) for store in each.stores]
    refuse_meta(fn, (store.shard for store in stores), f"a {type(wrapper).__name__}")
    dtypes = {(store.dtype, store.shard.device): store.dtype for store in stores}
    for dtype, device in dtypes:
        dtypes[dtype, device] = fn(torch.empty(0, dtype=dtype, device=device)).dtype
    wanted = {store: dtypes[store.dtype, store.shard.device] for store in stores}
    convert(flat_units_in(wrapper), wanted)


def convert(units: Sequence[FlatUnit], wanted: Mapping[FlatStore, torch.dtype]) -> None:
    """Convert shards of the units in one wrapper to the dtypes ``wanted``. Collective if any dtype
    changes.

    The Parameter objects stay the same. Raises ValueStateError, before anything changes, if the
    model has run."""
    changed = [
        each
        for each in units
        if any(wanted.get(store, store.dtype) != store.dtype for store in each.stores)
    ]
    if not changed:
        return
    for runtime, each in {each.runtime: each for each in reversed(changed)}.items():
        runtime.require_idle("a conversion to another dtype", ValueStateError)
        runtime.require_parts("a conversion to another dtype")
        if runtime.has_run or not runtime.backward.sync:
            raise _too_late(each, {str(dtype) for dtype in wanted.values()})
        runtime.reshard_all()
    rendezvous.require_all_ranks(
        "a conversion to another dtype",
        (group for each in changed for group in each.unit.groups),
        copies=True,
    )
    with torch.inference_mode(False), torch.no_grad():
        for each in changed:
            _convert(each, wanted)
    for runtime in {id(each.runtime): each.runtime for each in changed}.values():
        runtime.use_groups()


def _convert(own: FlatUnit, wanted: Mapping[FlatStore, torch.dtype]) -> None:
    changed = []
    for group, store in zip(own.unit.groups, own.stores, strict=True):
        if wanted.get(store, store.dtype) != store.dtype:
            store.convert(wanted[store], store.shard.device)
            changed.append(group)
    _exchange(own, changed)


def _exchange(own: FlatUnit, old: Sequence[Group]) -> None:
    """Replace the groups ``old``, whose stores have new shards now."""
    groups = []
    for group, store in zip(own.unit.groups, own.stores, strict=True):
        if group in old:
            tags, hook = group.tags, group.gradients.policy.hook
            group = group_around(store, own.settings, own.unit.options)
            for axis, tag in tags.items():
                group.use_tag(axis, tag)
            if hook is not None:
                group.gradients.set_hook(hook)
            rendezvous.register([group])
        groups.append(group)
    own.unit.exchange_groups(groups)


def move(own: FlatUnit, group: Group, device: torch.device) -> None:
    """Move a shard to another device, or back. Every rank calls it, but nothing is sent."""
    store, runtime = own.stores[own.unit.groups.index(group)], own.runtime
    device = torch.empty(0, device=device).device  # with its index
    if device == store.shard.device:
        return
    runtime.require_idle("flat_param_to", ValueStateError)
    runtime.require_not_summoned("flat_param_to")
    own.unit.view.require_own()
    if store.shard.device == own.settings.home:
        store.check(group.name)  # not those of other groups, which may have been moved before
    if group.gradients.received:
        raise ValueStateError.of(
            "Accumulated gradients that are not reduced yet cannot be moved.",
            expected="flat_param_to after a backward outside no_sync()",
            got="a call after a backward inside no_sync()",
            where=group.name,
            fix="move the shard after the gradients have been reduced and used",
        )
    own.unit.reshard()
    with torch.inference_mode(False), torch.no_grad():
        store.convert(store.dtype, device)
        # Aliased unsharded parameters are views of the shard, which is another one now.
        if group.memory.aliased and device == own.settings.home:
            _exchange(own, [group])
            runtime.use_groups()


def _too_late(own: FlatUnit, dtypes: set[str]) -> ValueStateError:
    return ValueStateError.of(
        "The dtype of sharded parameters cannot change now.",
        expected="half(), to(dtype) and the like before the first forward, outside no_sync()",
        got=f"a conversion to {', '.join(sorted(dtypes))} "
        + ("after the first forward" if own.runtime.has_run else "inside no_sync()"),
        where=own.unit.label,
        fix="convert the model before it runs; to compute in another dtype, pass mixed_precision=",
    )
