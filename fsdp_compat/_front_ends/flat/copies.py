"""Copy a wrapped module: deepcopy, and pickle of this rank's shards.

Modules are copied without their managed parameters, and stores are copied separately. The copy's
unit and runtime are then rebuilt around them."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ... import _torch_private
from ..._comm.mesh import Mesh, axis_by_name, axis_of, group_by_name
from ..._engine.buffers import CastBuffers
from ..._state.rank0 import packed_bytes, unpacked
from ..._state.units import ATTRIBUTE, FSDP_WRAPPED_MODULE, clean_name
from ..._stores.flat_store import FlatStore
from ...api import StateDictSettings
from ...errors import StateError
from .flat_unit import FlatUnit, flat_unit_of, is_wrapper, make_flat_unit, make_runtime
from .settings import Settings

# True while an outer wrapper, which withdraws the parameters of inner ones, is being pickled.
_pickling = False


def deepcopy_of(wrapper: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a second wrapper with its own shards over the same process groups."""
    _require_rest(wrapper, "copy.deepcopy")
    original = flat_unit_of(wrapper)
    copy = type(wrapper).__new__(type(wrapper))
    memo[id(wrapper)] = copy
    with _withdrawn(original):
        for name, value in _attributes(wrapper).items():
            copy.__dict__[name] = deepcopy(value, memo)
        stores = [deepcopy(store, memo) for store in original.stores]
        buffers = deepcopy(original.unit.buffers, memo)
    _build(copy, stores, original.settings, buffers, original.attribute_order, original.form)
    new_groups = flat_unit_of(copy).unit.groups
    for new, old in zip(new_groups, original.unit.groups, strict=True):
        if old.gradients.policy.hook is not None:
            new.gradients.set_hook(old.gradients.policy.hook)
    return copy


def reduced(wrapper: nn.Module) -> tuple[Any, ...]:
    """Return the value of ``__reduce_ex__`` for a wrapper. The outermost wrapper packs everything
    below it together, so that tensors that share a storage still share it after loading."""
    global _pickling
    if _pickling:
        return copyreg.__newobj__, (type(wrapper),), _parts(wrapper)  # type: ignore[attr-defined]
    _require_rest(wrapper, "pickle")
    _pickling = True
    try:
        with contextlib.ExitStack() as stack:
            for below in wrapper.modules():
                if is_wrapper(below):
                    _require_rest(below, "pickle")
                    stack.enter_context(_withdrawn(flat_unit_of(below)))
            # A tensor, because torch.save writes some bytes of a bytes object as two.
            return unpacked, (packed_bytes(wrapper), None)
    finally:
        _pickling = False


def _attributes(wrapper: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in wrapper.__dict__.items() if name != ATTRIBUTE}


def _parts(wrapper: nn.Module) -> tuple[Any, ...]:
    own = flat_unit_of(wrapper)
    return (
        _attributes(wrapper),
        own.stores,
        _portable(own.settings),
        own.unit.buffers,
        own.attribute_order,
        own.form,
    )


def restore(wrapper: nn.Module, parts: tuple[Any, ...]) -> None:
    """Rebuild a wrapper from its pickled parts. Collective: each rank loads its own."""
    attributes, stores, settings, buffers, order, form = parts
    wrapper.__dict__.update(attributes)
    _build(wrapper, stores, _settings_of(*settings), buffers, order, form)


def _build(
    wrapper: nn.Module,
    stores: list[FlatStore],
    settings: Settings,
    buffers: CastBuffers | None,
    order: Mapping[str, Sequence[str]],
    form: StateDictSettings,
) -> None:
    _restore_order(getattr(wrapper, FSDP_WRAPPED_MODULE), order, stores)
    with torch.inference_mode(False), torch.no_grad():
        made = make_flat_unit(wrapper, stores, settings, order)
    made.unit.buffers, made.form = buffers, form
    make_runtime(wrapper)


def _restore_order(
    module: nn.Module, order: Mapping[str, Sequence[str]], stores: Iterable[FlatStore]
) -> None:
    """Restore the order of parameters by reserving an entry for each missing one."""
    slots = {
        (id(holder), name)
        for store in stores
        for param in store.orig_params
        for holder, name in param.slots
    }
    for path, child in module.named_modules(remove_duplicate=False):
        names = order.get(clean_name(path), ())
        missing = [name for name in names if (id(child), name) in slots]
        if missing:
            parameters = _torch_private.parameters_of(child)
            kept = dict(parameters)
            parameters.clear()
            for name in names:
                if name in kept or name in missing:
                    parameters[name] = kept.pop(name, None)
            parameters.update(kept)


@contextlib.contextmanager
def _withdrawn(own: FlatUnit) -> Iterator[None]:
    """Remove the unit's parameters from its modules inside the context."""
    own.unit.view.withdraw()
    try:
        yield
    finally:
        own.unit.view.restore()


def _require_rest(wrapper: nn.Module, what: str) -> None:
    own = flat_unit_of(wrapper)
    if own.unit.summoned:
        raise StateError.of(
            f"{what} does not work inside summon_full_params.",
            expected=f"{what} of a wrapped module between steps",
            got="a call inside summon_full_params",
            where=own.unit.label,
            fix="leave the context first; for a copy of the full parameters use state_dict()",
        )
    own.runtime.require_idle(what)
    own.runtime.reshard_all()


# -- settings in a pickle


def _portable(settings: Settings) -> tuple[Any, ...]:
    """Return the arguments of ``_settings_of`` for another process, with groups by name."""
    changes: dict[str, Any] = {
        "param_init_fn": None,
        "ignored_modules": frozenset(),
        "ignored_parameters": frozenset(),
        "mesh": None,
        "group": None,
        "device_mesh": None,
    }
    shard, replica = settings.mesh.shard, settings.mesh.replica
    group, mesh = settings.group, settings.device_mesh
    return (
        dataclasses.replace(settings, **changes),
        (getattr(shard.group, "group_name", None), shard.members, shard.rank),
        # Replicas hold equal values, so any of them may load another one's pickle.
        (getattr(replica.group, "group_name", None), replica.members, None),
        (group.group_name, axis_of(group).members),
        None if mesh is None else (mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names),
    )


def _settings_of(
    rest: Settings, shard_axis: Any, replica_axis: Any, of_group: Any, of_mesh: Any
) -> Settings:
    """Return settings with this process's groups. Raises UsageError if none of them fits."""
    group = group_by_name(*of_group)
    shard, replica = axis_by_name(*shard_axis), axis_by_name(*replica_axis)
    mesh = None
    if of_mesh is not None:
        device_type, ranks, names = of_mesh
        groups: Any = group
        if not isinstance(ranks[0], int):  # 2-D, for which torch requires names
            groups, names = [replica.group, group], names or ("replica", "shard")
        mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)
    return dataclasses.replace(rest, mesh=Mesh(shard, replica), group=group, device_mesh=mesh)
