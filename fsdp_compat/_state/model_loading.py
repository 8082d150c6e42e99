"""Loading the state dict of a wrapper, and all that is below it: checked as a whole before anything
changes, from every rank or from rank 0 alone."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch_private
from .._engine import rendezvous
from .._engine.dtypes import ComputeDtype
from .._engine.group import Group
from .._engine.state_store import store_of
from ..api import StateDictSettings, StateDictType
from ..errors import CheckpointError, FsdpCompatError, TypeUsageError, UsageError, require_bools
from .model_state import inner_prefix, sharded_names
from .rank0 import Outline, Rank0Broadcast, Rank0Value, outline_of
from .reading_values import is_sharded, is_tensor, materialised
from .sharded_values import BoxedTensor, cut_of
from .unit_loading import check_unit, load_unit, other_local, wrong_value
from .units import (
    FSDP_WRAPPED_MODULE,
    ModelUnit,
    clean_name,
    is_flat_name,
    model_unit_of,
    model_units_in,
    names_in_order,
    names_of,
    param_names,
    registered_unit,
    units_of,
)
from .unmanaged import loads_in_own_way, others_in


def load_state_dict(
    wrapper: nn.Module, state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> Any:
    """Load a state dict, see ``FullyShardedDataParallel.load_state_dict``."""
    own = registered_unit(wrapper)
    own.runtime.require_idle("load_state_dict")
    own.runtime.rest()
    require_bools("load_state_dict", strict=strict, assign=assign)
    if isinstance(state_dict, Mapping):
        state_dict = _without_ddp_prefix(own.unit.module, state_dict)
    if is_on(own.form):
        state_dict = fill(wrapper, state_dict, strict, assign)
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


def _groups_to_load(module: nn.Module, state_dict: Mapping[str, Any]) -> Iterator[Group]:
    """Yield the groups whose values in a state dict are sharded in another way than the groups. The
    first sharded value of a group decides."""
    for named in units_of(module) if any(map(is_sharded, state_dict.values())) else ():
        for group in named.unit.groups if not named.unit.summoned else ():
            store = store_of(group)
            for index, member in enumerate(store.orig_params):
                keys = names_of(member, named.prefix)
                value = next((state_dict[key] for key in keys if key in state_dict), None)
                if is_sharded(value):
                    if not (
                        isinstance(value, BoxedTensor) and value.cut.is_as(cut_of(group, index))
                    ):
                        yield group
                    break


def follow_loading(wrapper: nn.Module) -> None:
    """Let a wrapper load its unit's parameters when torch loads a state dict into it."""
    wrapper.register_load_state_dict_pre_hook(_before_load)
    wrapper.register_load_state_dict_post_hook(_after_load)


def _before_load(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load this unit's parameters out of ``state_dict``, and rename the rest for the wrapped
    module."""
    own = registered_unit(wrapper)
    inner = inner_prefix(wrapper, own, prefix)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        clean = prefix + clean_name(key[len(prefix) :])
        if clean != key:
            state_dict[clean] = state_dict.pop(key)
    if not own.unit.summoned:
        _metadata, _strict, missing, _unexpected, errors = rest
        load_unit(own.unit, state_dict, prefix, missing, errors, own.takes_parts)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)
    # The sharded forms are registered in the modules, which will miss them.
    own.unit.view.in_state_dict = True  # until _after_load
    if own.unit.buffers is not None:
        own.unit.buffers.follow(ComputeDtype.EVAL)
    own.loading = prefix, {inner + name for name in sharded_names(wrapper, own.unit)}


def _after_load(wrapper: nn.Module, incompatible: Any) -> None:
    """Report names before wrapping, and no sharded forms of parameters.

    The outermost wrapper cleans the names, because it still has to recognise its own sharded forms
    in inner modules (ties).
    """
    own = registered_unit(wrapper)
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


_PACKAGE = f"{__name__.partition('.')[0]}."  # of hooks that change no keys


def refuse_values(
    model: nn.Module, label: str, state_dict: Mapping[str, Any], strict: bool
) -> None:
    """Raise CheckpointError, before anything changes, if a parameter's value is missing
    (``strict``) or cannot be its value.

    model: a unit, or a module around units. label: its name in the error.
    """
    missing: list[str] = []
    errors = [f"the key {key!r} is not a name" for key in state_dict if not isinstance(key, str)]
    by_name = {clean_name(str(key)): value for key, value in state_dict.items()}
    others, order = others_in(model), names_in_order(model, "")
    named_parameters = model.named_parameters(remove_duplicate=False)
    known = {*order, *(clean_name(name) for name, _ in named_parameters)}
    if not errors:
        for named, each in zip(units_of(model), model_units_in(model), strict=True):
            if not named.unit.summoned:
                check_unit(named.unit, by_name, named.prefix, missing, errors, each.takes_parts)
        for name, tensor in others.items():
            if tensor is not None and name in by_name:  # None: a class that loads in its own way
                wrong = wrong_value(name, by_name[name], tuple(tensor.shape), tensor.dtype)
                errors += [wrong] if wrong else []
        errors += [
            other_local(key, "no such flat parameter")
            for key in by_name
            if is_flat_name(key) and key not in known
        ]
    if strict and (missing or errors or _loads_plainly(model)):
        forgiven = "" if errors else "num_batches_tracked"  # modules of torch do without it
        absent = {
            name
            for name in others.keys() - by_name.keys()
            if not (forgiven and name.endswith(forgiven))
        }
        missing = [name for name in order if name in missing or name in absent]
        unexpected = [key for key in state_dict if clean_name(str(key)) not in known]
        for kind, keys in (("Unexpected", unexpected), ("Missing", missing)):
            if keys:
                listed = ", ".join(f'"{key}"' for key in keys)
                errors.insert(0, f"{kind} key(s) in state_dict: {listed}. ")
    if errors:
        own = model_unit_of(model)
        inner = type(model if own is None else own.unit.module).__name__
        lines = "\n\t".join([f"Error(s) in loading state_dict for {inner}:", *errors])
        raise not_loaded(lines, label, state_dict)


def _loads_plainly(model: nn.Module) -> bool:
    """True if no module's own method or hook changes keys, so that missing and unknown keys can be
    reported before loading."""
    return all(
        not loads_in_own_way(child)
        and all(
            getattr(hook, "hook", hook).__module__.startswith(_PACKAGE)
            for hook in child._load_state_dict_pre_hooks.values()
        )
        for child in model.modules()
    )


EVERYWHERE = (
    "pass the loaded dict, on every rank; to load from rank 0 alone set "
    "FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, "
    "FullStateDictConfig(rank0_only=True)) first"
)


def not_loaded(what: str, where: str, state_dict: Mapping[str, Any]) -> CheckpointError:
    fix = (
        "load what state_dict() of the same model gave (of a file with more in it, the entry that "
        "holds the model); "
        "strict=False lets keys differ, not shapes"
    )
    return CheckpointError.of(
        what,
        expected="a state dict of this model, full or sharded, with the names it had before "
        "wrapping",
        got="the differences above",
        where=where,
        fix=fix if state_dict else EVERYWHERE,
    )


def is_on(settings: StateDictSettings) -> bool:
    return settings.state_dict_type is StateDictType.FULL_STATE_DICT and getattr(
        settings.state_dict_config, "rank0_only", False
    )


def fill(model: nn.Module, given: Any, strict: bool, assign: bool) -> Any:
    """Return the state dict for this rank to load, with values from rank 0 on ranks without one.

    given: a state dict, which may be None or empty on ranks that have none; it is not changed. If
    all ranks have one, or none has, it is returned as it is. Names and what is no tensor are sent
    at once, a unit's parameters when the unit is loaded (`Rank0Value`), so that only one unit is in
    memory at a time, and other tensors one by one: unless ``assign``, into the model's own memory.

    Collective. Raises CheckpointError, on all ranks and before anything changes, for a bad dict.
    """
    units = model_units_in(model)
    rendezvous.require_all_ranks(
        "load_state_dict", (group for each in units for group in each.unit.groups), copies=True
    )
    own = model_unit_of(model)
    label = type(model).__name__ if own is None else own.unit.label
    if any(_ranks_of(each) != _ranks_of(units[0]) for each in units):
        raise UsageError.of(
            "Units on different ranks cannot be loaded from one rank.",
            expected="all units in the module on the same ranks, or rank0_only=False",
            got=f"units on {sorted({_ranks_of(each) for each in units})}",
            where=label,
            fix="load the state dict on every rank, without rank0_only=True",
        )
    rank0 = Rank0Broadcast(units[0].mesh, units[0].device)
    is_dict = given is None or isinstance(given, Mapping)
    all_dicts, have = zip(*rank0.gather((is_dict, is_dict and bool(given))), strict=True)
    if not is_dict or (all(all_dicts) and len(set(have)) == 1):
        return given
    if not all(all_dicts) or not have[0]:
        raise _not_everywhere(
            "a state dict on rank 0, on the others the same, None or {}",
            f"{'a' if given else 'no'} state dict on this rank, "
            + ("none on rank 0" if all(all_dicts) else "something else on another rank"),
            label,
        )
    told, error = None, None
    if rank0.is_here:
        try:
            refuse_values(model, label, given, strict)
            given, told = _outlined(given, _managed_names(model), label)
        except CheckpointError as caught:
            error = caught
    text = rank0.tell("" if error is None else str(error))
    if text:
        raise error or CheckpointError(text)
    outlines, metadata = rank0.send_object(told, "what the state dict holds")
    others, filled = others_in(model), collections.OrderedDict[str, Any]()
    for key, outline in outlines.items():
        value = given[key] if rank0.is_here else outline
        if isinstance(outline, Rank0Value):
            value = Rank0Value(outline.is_lazy, given[key] if rank0.is_here else None, rank0)
        elif isinstance(outline, Outline):
            [sent] = rank0.send([value], f"the value of {key!r}")
            value = value if rank0.is_here else sent
            target = None if assign or rank0.is_here else others.get(clean_name(key))
            if target is not None and _torch_private.is_plain(target):
                value = target.detach().copy_(sent.reshape(target.shape))
        filled[key] = value
    if metadata is not None:
        setattr(filled, "_metadata", metadata)
    return filled


def _outlined(given: Mapping[str, Any], managed: Collection[str], label: str) -> tuple[Any, Any]:
    """Return (a state dict without lazy values of unmanaged entries, what rank 0 tells of it: the
    entries, with stand-ins for tensors, and the metadata)."""
    found, told = dict[str, Any](given), dict[str, Any]()
    for key, value in given.items():
        if isinstance(value, torch.Tensor) and is_sharded(value):
            raise _not_everywhere(
                "whole tensors on rank 0, or every rank's own part of sharded ones on every rank",
                f"a {type(value).__name__} for {key!r}, and ranks without a state dict",
                label,
            )
        if clean_name(key) in managed:
            told[key] = Rank0Value(is_lazy=not isinstance(value, torch.Tensor))
        elif is_tensor(value):
            found[key] = materialised(value, key)
            told[key] = outline_of(found[key])
        else:
            told[key] = value
    return found, (told, getattr(given, "_metadata", None))


def _managed_names(model: nn.Module) -> set[str]:
    """Return the clean names of the parameters of units, all that each has."""
    return {
        f"{clean_name(path)}.{clean_name(name)}".lstrip(".")
        for path, child in model.named_modules(remove_duplicate=False)
        if (registered := model_unit_of(child)) is not None and not registered.unit.summoned
        for name in param_names(registered.unit)
    }


def _not_everywhere(expected: str, got: str, label: str) -> CheckpointError:
    return CheckpointError.of(
        "The state dict cannot be loaded from one rank.",
        expected=expected,
        got=got,
        where=f"load_state_dict of {label}, with rank0_only=True",
        fix="call load_state_dict(...) on all ranks, on rank 0 with the whole state dict, on "
        "the others with it or with {}",
    )


def _ranks_of(registered: ModelUnit) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return registered.mesh.shard.members, registered.mesh.replica.members


# Modules that are not units but contain units that load from rank 0. A hook on them completes the
# state dict that is loaded.
_followed: WeakIdKeyDictionary = WeakIdKeyDictionary()


def is_followed(module: nn.Module) -> bool:
    """True if ``follow`` is on for a module."""
    return module in _followed


def follow(module: nn.Module, follow: bool) -> None:
    """Turn loading from rank 0 on or off for a module that is not a unit but contains units."""
    if follow and module not in _followed:
        _followed[module] = module.register_load_state_dict_pre_hook(_before_load_around)
    elif not follow and module in _followed:
        _followed.pop(module).remove()


def _before_load_around(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    *rest: Any,
) -> None:
    """Add the values of rank 0 to the state dict that is loaded. Collective."""
    if not any(is_on(unit.form) for unit in model_units_in(module)):
        return
    own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    assign = bool(local_metadata.get("assign_to_params_buffers"))
    filled = fill(module, own, strict, assign)
    state_dict.update((prefix + key, value) for key, value in filled.items())
