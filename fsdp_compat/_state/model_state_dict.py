"""Taking and loading the state dict of a wrapper and all that is below it."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from .. import _torch_private
from .._engine import rendezvous
from .._engine.dtypes import ComputeDtype
from .._engine.group import Group
from .._engine.state_store import store_of
from .._engine.unit import Unit
from ..api import (
    StateDictType,
)
from ..errors import (
    FsdpCompatError,
    TypeUsageError,
    require_bools,
    wrong_type,
)
from . import rank0_loading
from .formats import BoxedTensor
from .model_units import ModelUnit, model_unit_of, model_units_in, names_in_order, units_of
from .names import (
    FSDP_WRAPPED_MODULE,
    Wanted,
    clean_name,
    everything,
    in_module_order,
    wanted_by,
    without_checkpoint_wrapper,
)
from .optim_values import copied
from .unit_entries import full_entries, local_entries, sharded_entries
from .unit_loading import load_unit
from .unmanaged import owners_in
from .validation import EVERYWHERE, not_loaded, refuse_values
from .values import is_sharded


def state_dict(wrapper: nn.Module, *args: Any, filter: Any = None, **kwargs: Any) -> dict[str, Any]:
    """Return the state dict of a wrapper, see ``FullyShardedDataParallel.state_dict``."""
    destination, prefix, keep_vars = _state_dict_arguments(*args, **kwargs)
    own = _unit_of(wrapper)
    with contextlib.ExitStack() as stack:
        if filter is not None:
            stack.enter_context(_filtered(wrapper, wanted_by(filter, "state_dict")))
        if not own.unit.summoned:
            stack.enter_context(own.runtime.rested("state_dict"))
        return _taken(wrapper, own, destination, prefix, keep_vars)


@contextlib.contextmanager
def _filtered(wrapper: nn.Module, wanted: Wanted) -> Iterator[None]:
    units = model_units_in(wrapper)
    for each in units:
        each.wanted = wanted
    try:
        yield
    finally:
        for each in units:
            each.wanted = everything


def _unit_of(wrapper: nn.Module) -> ModelUnit:
    own = model_unit_of(wrapper)
    assert own is not None
    return own


def _taken(
    wrapper: nn.Module, own: ModelUnit, destination: Any, prefix: str, keep_vars: bool
) -> dict[str, Any]:
    """Let torch collect the state dict, and put the entries of the unit's parameters in place of
    their sharded form."""
    described: dict[str, Any] = getattr(destination, "_metadata", {})
    first, first_described = len(destination), len(described)
    own.unit.view.in_state_dict = True
    try:
        with rendezvous.nested("state_dict", _groups_of_state_dict(wrapper)):
            nn.Module.state_dict(
                wrapper, destination=destination, prefix=prefix, keep_vars=keep_vars
            )
    finally:
        own.unit.view.in_state_dict = False
    settings = own.form
    config: Any = settings.state_dict_config
    keep = not getattr(config, "rank0_only", False) or own.mesh.is_first
    keys = list(itertools.islice(destination, first, None))
    base = clean_name(prefix)
    # Sharded forms of this unit's parameters, also those that an inner unit's modules hold (ties):
    # the inner wrapper has cleaned their names.
    parts = (
        set()
        if own.unit.summoned
        else {base + clean_name(name) for name in _sharded_names(wrapper, own.unit)}
    )
    values = {name: destination[key] for key in keys if (name := clean_name(key)) not in parts}
    for key in keys:
        del destination[key]
    for name, exact in own.exact_buffers():
        if base + name in values:
            values[base + name] = exact
    met = _own_names(wrapper, own, keys, prefix)
    values = _only_wanted(wrapper, own.wanted, values, met, base)
    if not keep:
        values = {}
    elif getattr(config, "offload_to_cpu", False):
        values = {key: _on_cpu(value, as_copy=key in met) for key, value in values.items()}
    elif not own.unit.summoned and not keep_vars:
        values = {key: _compact(value) if key in met else value for key, value in values.items()}
    if not own.unit.summoned:  # in summon_full_params torch has collected whole parameters
        values.update(_entries(own, base, keep))
    for key in in_module_order(list(values), names_in_order(wrapper, base)):
        destination[key] = values[key]
    for key in [
        key for key in itertools.islice(described, first_described, None) if key.startswith(prefix)
    ]:
        described.setdefault(clean_name(key), described[key])
    return destination


def _own_names(wrapper: nn.Module, own: ModelUnit, keys: Sequence[str], prefix: str) -> set[str]:
    """Return the clean names of the entries that come from this unit's modules, and not from those
    of an inner unit."""
    if own.unit.module is not wrapper:  # inner wrappers have cleaned the names of theirs
        inner = _inner_prefix(wrapper, own, prefix)
        return {clean_name(key) for key in keys if key.startswith(inner)}
    owners = owners_in(wrapper)
    return {
        clean_name(key)
        for key in keys
        if owners.get(key[len(prefix) :].rpartition(".")[0], wrapper) is wrapper
    }


def _inner_prefix(wrapper: nn.Module, own: ModelUnit, prefix: str) -> str:
    """Return the prefix of the names in the unit's module; of a unit that is registered on its
    module itself it is the same."""
    return prefix if own.unit.module is wrapper else f"{prefix}{FSDP_WRAPPED_MODULE}."


def _entries(own: ModelUnit, base: str, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the entries of the unit's own parameters, in the form that is set."""
    config: Any = own.form.state_dict_config
    to_cpu = config.offload_to_cpu
    if own.form.state_dict_type is StateDictType.FULL_STATE_DICT:
        return full_entries(own.unit, base, own.wanted, to_cpu, keep)
    if own.form.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        return local_entries(own.unit, base, own.wanted, own.group, to_cpu)
    return sharded_entries(
        own.unit, base, own.wanted, own.group, own.device_mesh, to_cpu, config.as_views
    )


def _only_wanted(
    wrapper: nn.Module, wanted: Wanted, values: dict[str, Any], met: set[str], base: str
) -> dict[str, Any]:
    """Drop what a filter leaves out of ``met``, the unmanaged entries of this unit's modules."""
    if wanted is everything:
        return values
    named = wrapper.named_parameters(remove_duplicate=False)
    trainable = {base + clean_name(name) for name, parameter in named if parameter.requires_grad}
    return {k: v for k, v in values.items() if k not in met or wanted(k, k in trainable)}


def _sharded_names(wrapper: nn.Module, unit: Unit) -> set[str]:
    """The names under which the wrapped module's state dict holds, or misses, managed
    parameters in their sharded form.

    Activation checkpointing's wrapper takes itself out of the names at one time and not at
    another: both are here. It may have come between the wrapper and the unit's module.
    """
    held = unit.module if unit.module is wrapper else wrapper.get_submodule(FSDP_WRAPPED_MODULE)
    managed = {id(param) for group in unit.groups for param, _ in group.store.sharded_params}
    raw = {
        f"{path}.{attribute}".lstrip(".")
        for path, child in held.named_modules(remove_duplicate=False)
        for attribute, parameter in child._parameters.items()
        if id(parameter) in managed
    }
    return raw | {without_checkpoint_wrapper(name) for name in raw}


def load_state_dict(
    wrapper: nn.Module, state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> Any:
    """Load a state dict, see ``FullyShardedDataParallel.load_state_dict``."""
    own = _unit_of(wrapper)
    own.runtime.require_idle("load_state_dict")
    own.runtime.rest()
    require_bools("load_state_dict", strict=strict, assign=assign)
    if isinstance(state_dict, Mapping):
        state_dict = _without_ddp_prefix(own.unit.module, state_dict)
    if rank0_loading.is_on(own.form):
        state_dict = rank0_loading.fill(wrapper, state_dict, strict, assign)
    if not isinstance(state_dict, Mapping):
        raise TypeUsageError.of(
            "This is not a state dict.",
            expected="a dict from names to tensors, as state_dict() returns it",
            got=f"a {type(state_dict).__name__}",
            where="load_state_dict(state_dict)",
            fix=EVERYWHERE,
        )
    refuse_values(wrapper, own.unit.label, state_dict, strict)
    rendezvous.require_all_ranks("load_state_dict", _groups_to_load(wrapper, state_dict))
    try:
        return nn.Module.load_state_dict(wrapper, state_dict, strict, assign)
    except FsdpCompatError:
        raise
    except RuntimeError as error:  # torch says where things are here
        raise not_loaded(
            str(error).replace(f"{FSDP_WRAPPED_MODULE}.", ""), own.unit.label, state_dict
        ) from error


def _without_ddp_prefix(inner: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Remove the prefix ``module.`` of state dicts that DistributedDataParallel saved."""
    own = {*inner._modules, *inner._parameters, *inner._buffers}
    if (
        not state_dict
        or "module" in own
        or not all(str(key).startswith("module.") for key in state_dict)
    ):
        return state_dict
    without = collections.OrderedDict(state_dict)
    if (metadata := getattr(state_dict, "_metadata", None)) is not None:
        setattr(without, "_metadata", metadata.copy())
    consume_prefix_in_state_dict_if_present(without, "module.")
    return without


# -- what is sent


def _groups_of_state_dict(module: nn.Module) -> Iterator[Group]:
    """Yield the groups that are gathered for a state dict in the form that is set."""
    for each in model_units_in(module):
        kind = each.form.state_dict_type
        with_mesh = kind is StateDictType.SHARDED_STATE_DICT and each.device_mesh is not None
        if not each.unit.summoned and (kind is StateDictType.FULL_STATE_DICT or with_mesh):
            yield from each.unit.groups


def _groups_to_load(module: nn.Module, state_dict: Mapping[str, Any]) -> Iterator[Group]:
    """Yield the groups whose values in a state dict are sharded in another way than the groups. The
    first sharded value of a group decides."""
    for named in units_of(module) if any(map(is_sharded, state_dict.values())) else ():
        for group in named.unit.groups if not named.unit.summoned else ():
            store = store_of(group)
            for index, member in enumerate(store.orig_params):
                keys = [named.prefix + clean_name(name) for name in member.names]
                value = next((state_dict[key] for key in keys if key in state_dict), None)
                if is_sharded(value):
                    if not (
                        isinstance(value, BoxedTensor)
                        and value.is_cut_as(*store.cut(index), group.shard.members)
                    ):
                        yield group
                    break


def _on_cpu(value: Any, as_copy: bool) -> Any:
    """Return a tensor on the CPU. as_copy: a copy also where it is there already, which training
    does not change."""
    if (
        not isinstance(value, torch.Tensor)
        or value.is_meta
        or (value.device.type == "cpu" and not as_copy)
    ):
        return value
    return copied(value, to_cpu=True)


def _compact(value: Any) -> Any:
    """Return a tensor that keeps no more memory than it shows."""
    if (
        not isinstance(value, torch.Tensor)
        or not _torch_private.is_plain(value)
        or value.layout is not torch.strided
        or value.is_meta
    ):
        return value
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _state_dict_arguments(*args: Any, **kwargs: Any) -> tuple[Any, str, bool]:
    """Return (destination, prefix, keep_vars) from nn.Module.state_dict's arguments; positional
    ones are its older form."""
    names = ("destination", "prefix", "keep_vars")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if (
        len(args) > len(names)
        or len(given) < len(args) + len(kwargs)
        or not given.keys() <= set(names)
    ):
        raise wrong_type(
            "arguments",
            "destination=, prefix= and keep_vars=, each once",
            (args, kwargs),
            "state_dict",
        )
    destination = given.get("destination")
    if not isinstance(given.get("prefix") or "", str):
        raise wrong_type("prefix", "a string", given["prefix"], "state_dict")
    if destination is not None and not isinstance(destination, MutableMapping):
        raise wrong_type("destination", "a dict, or None", destination, "state_dict")
    if destination is None:
        destination = collections.OrderedDict()
        setattr(
            destination, "_metadata", collections.OrderedDict()
        )  # as nn.Module.state_dict has it
    return destination, given.get("prefix") or "", bool(given.get("keep_vars", False))


def follow_loading(wrapper: nn.Module) -> None:
    """Let a wrapper load its unit's parameters when torch loads a state dict into it."""
    wrapper.register_load_state_dict_pre_hook(_before_load)
    wrapper.register_load_state_dict_post_hook(_after_load)


def _before_load(
    wrapper: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Load this unit's parameters out of ``state_dict``, and rename the rest for the wrapped
    module."""
    own = _unit_of(wrapper)
    inner = _inner_prefix(wrapper, own, prefix)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        clean = prefix + clean_name(key[len(prefix) :])
        if clean != key:
            state_dict[clean] = state_dict.pop(key)
    if not own.unit.summoned:
        load_unit(own.unit, state_dict, prefix, missing_keys, error_msgs, own.takes_parts)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)
    # The sharded forms are registered in the modules, which will miss them.
    own.unit.view.in_state_dict = True  # until _after_load
    if own.unit.buffers is not None:
        own.unit.buffers.follow(ComputeDtype.EVAL)
    own.loading = (
        prefix,
        set()
        if own.unit.summoned
        else {inner + name for name in _sharded_names(wrapper, own.unit)},
    )


def _after_load(wrapper: nn.Module, incompatible: Any) -> None:
    """Report names before wrapping, and no sharded forms of parameters.

    The outermost wrapper cleans the names, because it still has to recognise its own sharded forms
    in inner modules (ties).
    """
    own = _unit_of(wrapper)
    own.unit.view.in_state_dict = False
    if own.unit.buffers is not None:
        own.unit.buffers.follow(ComputeDtype.TRAIN)
    prefix, sharded = own.loading
    outermost = own.unit.is_root or not prefix
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [
            clean_name(key) if outermost and key.startswith(prefix) else key
            for key in keys
            if key not in sharded
        ]
    own.loading = "", set()
