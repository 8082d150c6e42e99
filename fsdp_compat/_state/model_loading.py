"""Loading the state dict of a wrapper and all below it: checked as a whole before anything changes,
from every rank or from rank 0 alone."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from .. import _torch_private
from .._engine import rendezvous
from .._engine.group import Group
from .._engine.state_store import store_of
from .._layout.spec import Interval, Section
from ..api import StateDictSettings, StateDictType
from ..errors import CheckpointError, FsdpCompatError, TypeUsageError, UsageError, require_bools
from .held import (
    Fit,
    HeldPart,
    StandIn,
    exact_buffers_of,
    held_params,
    loads_in_own_way,
    may_be_missing,
    others_in,
    overrides,
    place_beside,
    units_with_say,
    with_versions,
)
from .loaded_values import (
    dtype_of,
    is_local,
    is_sharded,
    is_tensor,
    materialised,
    read_local,
    read_part,
    same_shape,
    shape_of,
    unfit,
    whole_value,
)
from .rank0 import Outline, Rank0Broadcast, Rank0Value, common_mesh, outline_of, received
from .sharded_values import BoxedTensor, cut_of, flat_cut
from .summon import Options, full_unit
from .units import (
    CHECKPOINT_WRAPPED_MODULE,
    FSDP_WRAPPED_MODULE,
    ModelUnit,
    below,
    clean_name,
    is_flat_name,
    is_registered,
    managed_names,
    model_unit_of,
    model_units_in,
    named_sections,
    names_in_order,
    names_of,
    registered_unit,
    slots_in,
    units_of,
)


def load_state_dict(
    wrapper: nn.Module, state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> _torch_private.IncompatibleKeys:
    """Load a state dict, see ``FullyShardedDataParallel.load_state_dict``."""
    own = registered_unit(wrapper)
    own.runtime.require_idle("load_state_dict")
    own.runtime.reshard_all()
    require_bools("load_state_dict", strict=strict, assign=assign)
    state_dict = _without_ddp_prefix(own.unit.module, state_dict)
    if is_on(own.form):
        state_dict = completed(wrapper, state_dict, strict, assign)
    if not isinstance(state_dict, Mapping):
        raise TypeUsageError.of(
            "This is not a state dict.",
            expected="a dict from names to tensors, as state_dict() returns it",
            got=f"a {type(state_dict).__name__}",
            where="load_state_dict(state_dict)",
            fix=_EVERYWHERE,
        )
    refuse_values(wrapper, own.unit.label, state_dict, strict)
    inner, usual = getattr(wrapper, FSDP_WRAPPED_MODULE), nn.Module.load_state_dict
    is_inners = overrides(inner, "load_state_dict") and not own.unit.summoned
    having = units_with_say(wrapper, loads_in_own_way)
    groups = [group for each in having for group in each.groups]
    rendezvous.require_all_ranks("load_state_dict", (*_gathered(wrapper, state_dict), *groups))
    entries = with_versions(inner if is_inners else wrapper, state_dict)
    load = inner.load_state_dict if is_inners else functools.partial(usual, wrapper)
    changed = {**({} if strict else {"strict": False}), **({"assign": True} if assign else {})}
    for each in model_units_in(wrapper) if having else ():
        each.unit.view.begin_hiding_parts()  # which a module around the unit may use
    keys: _torch_private.IncompatibleKeys
    try:
        with _whole(own, wrapper, entries, "") if is_inners else contextlib.nullcontext():
            keys = load(entries, **changed)
        return keys
    except FsdpCompatError:
        raise
    except RuntimeError as error:  # torch says where things are here
        text = str(error).replace(f"{FSDP_WRAPPED_MODULE}.", "")
        raise not_loaded(text, own.unit.label, state_dict) from error
    finally:
        for each in model_units_in(wrapper):
            each.unit.view.end_hiding_parts()
            each.loading[-1].close()  # if an error has left it open


@contextlib.contextmanager
def _whole(
    own: ModelUnit, wrapper: nn.Module, entries: MutableMapping[str, Any], prefix: str
) -> Iterator[None]:
    """A context with whole parameters and entries, except for inner units. Collective."""
    named = wrapper.named_modules(remove_duplicate=False)
    units = [path for path, child in named if path and model_unit_of(child) is not None]
    inner = tuple(f"{prefix}{clean_name(path)}." for path in units)
    for key in [key for key in entries if key.startswith(prefix) and not key.startswith(inner)]:
        entries[key] = whole_value(entries[key], key)
    with full_unit(own.unit, Options(writeback=True)), exact_buffers_of(own.unit):
        yield


def _without_ddp_prefix(inner: nn.Module, state_dict: Any) -> Any:
    """Remove the prefix ``module.`` of state dicts that DistributedDataParallel saved."""
    own = {*inner._modules, *inner._parameters, *inner._buffers}
    is_dict = isinstance(state_dict, Mapping) and bool(state_dict) and "module" not in own
    if not is_dict or not all(str(key).startswith("module.") for key in state_dict):
        return state_dict
    without = collections.OrderedDict(state_dict)
    if (metadata := getattr(state_dict, "_metadata", None)) is not None:
        setattr(without, "_metadata", metadata.copy())
    consume_prefix_in_state_dict_if_present(without, "module.")
    return without


def _gathered(module: nn.Module, state_dict: Mapping[str, Any]) -> Iterator[Group]:
    """Yield the groups whose first sharded value is sharded in another way."""
    for named in units_of(module) if any(map(is_sharded, state_dict.values())) else ():
        for group in named.unit.groups if not named.unit.summoned else ():
            for index, member in enumerate(store_of(group).orig_params):
                keys = names_of(member, named.prefix)
                value = next((state_dict[key] for key in keys if key in state_dict), None)
                if is_sharded(value):
                    cut = value.cut if isinstance(value, BoxedTensor) else None
                    if cut is None or not cut.is_as(cut_of(group, index)):
                        yield group
                    break


def follow_loading(wrapper: nn.Module) -> None:
    """Let a wrapper load its unit's parameters when torch loads a state dict into it."""
    wrapper.register_load_state_dict_pre_hook(_before_load)
    wrapper.register_load_state_dict_post_hook(_after_load)


def _before_load(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load this unit's parameters, and rename the rest for the wrapped module."""
    own = registered_unit(wrapper)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        clean = prefix + clean_name(key[len(prefix) :])
        if clean != key:
            state_dict[clean] = state_dict.pop(key)
    stack, is_local = contextlib.ExitStack(), own.takes_parts
    is_local |= any(prefix + name in state_dict for name, _, _ in named_sections(own.unit))
    if own.unit.summoned:
        pass
    elif not is_local and own.unit in units_with_say(wrapper, loads_in_own_way):
        stack.enter_context(_whole(own, wrapper, state_dict, prefix))
    else:
        _metadata, _strict, missing, _unexpected, errors = rest
        fit = _UnitFit.of(own, state_dict, prefix)  # a module around it may not have looked
        missing += fit.missing
        errors += fit.wrong.values()
        fit.load_out_of(state_dict)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}{FSDP_WRAPPED_MODULE}.{key[len(prefix) :]}"] = state_dict.pop(key)
    # The sharded forms are registered in the modules, which will miss them.
    own.unit.view.in_state_dict = True  # until _after_load
    stack.enter_context(exact_buffers_of(own.unit))
    is_own = not own.unit.summoned
    keys = {prefix + slot.key for slot in slots_in(wrapper) if is_own and slot.unit is own.unit}
    # Only some names contain activation checkpointing's wrapper.
    keys |= {clean_name(key, [CHECKPOINT_WRAPPED_MODULE]) for key in keys}
    own.loading = prefix, keys, stack


def _after_load(wrapper: nn.Module, incompatible: Any) -> None:
    """Report names before wrapping, without sharded forms of parameters. Only the outermost wrapper
    cleans names: before that it has to recognise its sharded forms in inner modules (ties)."""
    own = registered_unit(wrapper)
    own.unit.view.in_state_dict = False
    prefix, sharded, stack = own.loading
    stack.close()
    outermost = own.unit.is_root or not prefix
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [
            clean_name(key) if outermost and key.startswith(prefix) else key
            for key in keys
            if key not in sharded
        ]
    own.loading = "", set(), contextlib.ExitStack()


# -- what does not fit


def refuse_values(
    model: nn.Module, label: str, state_dict: Mapping[str, Any], strict: bool
) -> None:
    """Raise CheckpointError, before anything changes, for missing (``strict``) or unfit values, but
    not for those that a module around them or of their unit may give other names or shapes."""
    missing: list[str] = []
    errors = [f"the key {key!r} is not a name" for key in state_dict if not isinstance(key, str)]
    by_name = {clean_name(str(key)): value for key, value in state_dict.items()}
    others, order = others_in(model), names_in_order(model, "")
    named_parameters = model.named_parameters(remove_duplicate=False)
    known = {*order, *(clean_name(name) for name, _ in named_parameters)}
    modules = model.named_modules(remove_duplicate=False)
    free = tuple(below("", clean_name(path)) for path, its in modules if loads_in_own_way(its))
    having = units_with_say(model, loads_in_own_way)
    if not errors:
        for named in units_of(model):
            is_free = named.unit in having or named.prefix.startswith(free)
            if not (named.unit.summoned or is_free):
                fit = _UnitFit.of(named.own, by_name, named.prefix)
                missing += fit.missing
                errors += fit.wrong.values()
        for name, tensor in others.items():
            if tensor is not None and name in by_name and not name.startswith(free):
                text = _wrong(name, by_name[name], tuple(tensor.shape), tensor.dtype)
                errors += [text] if text else []
        errors += [
            _other_layout(key, "no such flat parameter")
            for key in by_name
            if is_flat_name(key) and key not in known
        ]
    if strict and (missing or errors or not free):
        absent = {
            name for name in others.keys() - by_name.keys() if errors or not may_be_missing(name)
        }
        missing = [name for name in order if name in missing or name in absent]
        unexpected = [key for key in state_dict if clean_name(str(key)) not in known]
        for kind, keys in (("Unexpected", unexpected), ("Missing", missing)):
            if keys:
                listed = ", ".join(f'"{key}"' for key in keys)
                errors.insert(0, f"{kind} key(s) in state_dict: {listed}. ")
    if errors:
        registered = model_unit_of(model)
        inner = type(model if registered is None else registered.unit.module).__name__
        lines = "\n\t".join([f"Error(s) in loading state_dict for {inner}:", *errors])
        raise not_loaded(lines, label, state_dict)


_EVERYWHERE = (
    "pass the loaded dict, on every rank; to load from rank 0 alone set "
    "FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, "
    "FullStateDictConfig(rank0_only=True)) first"
)


def not_loaded(what: str, where: str, state_dict: Mapping[str, Any]) -> CheckpointError:
    fix = (
        "load what state_dict() of the same model gave (of a file with more in it, the entry that "
        "holds the model); strict=False lets keys differ, not shapes"
    )
    return CheckpointError.of(
        what,
        expected="a state dict of this model, full or sharded, with the names it had before "
        "wrapping",
        got="the differences above",
        where=where,
        fix=fix if state_dict else _EVERYWHERE,
    )


# -- the values of one unit


@dataclasses.dataclass
class _UnitFit(Fit):
    """Which entries of a state dict a unit takes, and how to load them. Nothing has changed yet."""

    keys: list[str] = dataclasses.field(default_factory=list)  # of the unit, in the state dict
    loads: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(own: ModelUnit, entries: Mapping[str, Any], prefix: str) -> _UnitFit:
        """prefix: of the unit's keys in ``entries``."""
        self = _UnitFit()
        for flat_name, group, section in named_sections(own.unit):
            parts, flat = [*held_params(group, section, [prefix])], prefix + flat_name
            names = (flat, *(name for held in parts for name in held.names))
            self.keys += [name for name in names if name in entries]
            if flat in entries:
                self.wrong |= _wrong_flat(group, section, flat, entries, parts)
                self.loads.append(functools.partial(_load_flat, group, section, entries[flat]))
            else:
                differs = functools.partial(_wrong_param, own.takes_parts)
                taken = self.take(parts, entries, differs)
                self.loads.append(functools.partial(_load_params, group, taken, own.takes_parts))
        return self

    def load_out_of(self, entries: MutableMapping[str, Any]) -> None:
        """Take the unit's entries, and copy this rank's parts into its shards, if all fit.
        Collective if a value is sharded in another way, or is a `Rank0Value`."""
        for key in self.keys:
            del entries[key]
        with torch.no_grad():
            for load in self.loads if not self.wrong else ():
                load()


def _load_flat(group: Group, section: Section, flat: Any) -> None:
    run = read_local(flat, flat_cut(group, section))
    _write(store_of(group).shard[section.in_shard.slice][: run.numel()], run)


def _load_params(group: Group, taken: list[tuple[HeldPart, Any]], takes_parts: bool) -> None:
    parts = {held.number: held for held, _ in taken}
    values = {held.number: value for held, value in taken}
    values = received(store_of(group), group.name, values)
    for index, held in parts.items():
        value = values.pop(index)
        is_part = takes_parts and _is_part(value, held.part)
        cut = cut_of(group, index, share=held)
        _write(held.values, value.detach() if is_part else read_part(value, cut))


def _write(target: torch.Tensor, run: torch.Tensor) -> None:
    """Copy ``run`` into ``target``, unless they are the same memory."""
    one, other = ((each.data_ptr(), each.device, each.dtype) for each in (target, run))
    if one != other:
        target.copy_(run)


def _wrong_param(takes_parts: bool, held: HeldPart, key: str, value: Any) -> str:
    """Say why ``value`` cannot be loaded into a parameter; "" if it can."""
    wrong = _wrong(key, value, held.shape, held.dtype)
    is_part = (takes_parts or bool(wrong)) and _is_part(value, held.part)
    if is_part and takes_parts:
        wrong = _wrong(key, value, (held.part.numel,), held.dtype)
    if is_part and wrong:
        advice = "to load that, set StateDictType.LOCAL_STATE_DICT"
        return f"{wrong}, which would be this rank's part: {advice}"
    piece = value.cut.piece if isinstance(value, BoxedTensor) else held.piece
    if not (wrong or piece.is_whole or piece == held.piece):
        return (
            f"{key}: shards of a tensor-parallel parameter can only be loaded in memory by a model "
            "that splits it in the same way. Load them through torch.distributed.checkpoint, or "
            "use StateDictType.FULL_STATE_DICT"
        )
    return wrong


def _is_part(value: Any, part: Interval) -> bool:
    """True if ``value`` has the shape of a rank's part of a parameter."""
    is_plain = isinstance(value, torch.Tensor) and not is_sharded(value)
    return is_plain and tuple(value.shape) == (part.numel,)


def _wrong_flat(
    group: Group, section: Section, key: str, entries: Mapping[str, Any], parts: Iterable[HeldPart]
) -> dict[str, str]:
    """Say why a flat parameter does not fit, or which ``entries`` of ``parts`` contradict it."""
    flat, dtype, ranks = entries[key], group.store.dtype, group.shard.ranks
    if (wrong := unfit(flat, None, dtype)) is not None:
        return {key: f"{key}: expected a ShardedTensor of {dtype}, got {wrong}"}
    if ranks == 1 or not is_local(flat, section.layout):
        here = f"{len(section.layout.params)} parameter(s) over {ranks} rank(s)"
        return {key: _other_layout(key, here)}
    return {
        name: f"{name}: its values are not those that this rank has of it in {key!r}, a flat "
        "parameter in the same dict. Delete the entry that is not to be loaded"
        for held in parts
        for name in held.names
        if name in entries
        and not _is_part_of(flat, entries[name], section.layout.params[held.index].in_full)
    }


def _is_part_of(flat: torch.Tensor, value: Any, place: Interval) -> bool:
    """True if ``value`` is this rank's part of the parameter at ``place`` in a flat one."""
    first, shard = 0, torch.empty(0, dtype=dtype_of(flat))
    if isinstance(flat, ShardedTensor) and (own := flat.local_shards()):
        first, shard = own[0].metadata.shard_offsets[0], own[0].tensor.detach()
    part = place.clipped(Interval(first, first + shard.numel())).shifted(-first)
    expected = shard[part.slice]
    if not _is_part(value, part):
        return False
    if value.data_ptr() == expected.data_ptr() and value.dtype == expected.dtype:
        return True
    found = value.detach().to(expected).contiguous()  # NaN is the same as NaN
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def _other_layout(key: str, here: str) -> str:
    """Return the error for a local state dict that does not fit. here: what this model has."""
    return (
        f"{key}: a flat parameter of a LOCAL_STATE_DICT can only be loaded by as many ranks, "
        f"wrapped in the same way; here it has {here}. Save with StateDictType.SHARDED_STATE_DICT "
        "or FULL_STATE_DICT, which any model of the same parameters loads"
    )


def _wrong(key: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Say why ``value`` cannot be loaded into such a tensor; "": it can. It may stay lazy."""
    if isinstance(value, (Rank0Value, StandIn)):  # the first rank has looked at it
        return ""
    got = shape_of(value) if is_tensor(value) else shape
    if not same_shape(got, shape):
        return (
            f"size mismatch for {key}: expected shape {list(shape)} as in the current model, "
            f"got {list(got)}"
        )
    wrong = unfit(value, None, dtype)
    return f"{key}: expected a tensor of shape {shape} and {dtype}, got {wrong}" if wrong else ""


# -- values that only rank 0 has


def is_on(settings: StateDictSettings) -> bool:
    """True if state dicts are loaded from rank 0 alone, on ranks without one."""
    return settings.state_dict_type is StateDictType.FULL_STATE_DICT and getattr(
        settings.state_dict_config, "rank0_only", False
    )


def follow(module: nn.Module, units: Iterable[ModelUnit]) -> None:
    """Hook a module around units that load from rank 0, to complete its dict; or unhook it."""
    is_wanted = not is_registered(module) and any(is_on(unit.form) for unit in units)
    hooks = module._load_state_dict_pre_hooks
    own = [key for key, hook in hooks.items() if getattr(hook, "hook", None) is _before_load_around]
    for key in own if not is_wanted else ():
        del hooks[key]
    if is_wanted and not own:
        module.register_load_state_dict_pre_hook(_before_load_around)


def _before_load_around(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *_: Any
) -> None:
    """Add the values of rank 0 to the state dict that is loaded. Collective."""
    if not any(is_on(unit.form) for unit in model_units_in(module)):
        return
    own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    assign = bool(metadata.get("assign_to_params_buffers"))
    filled = completed(module, own, strict, assign)
    state_dict.update((prefix + key, value) for key, value in filled.items())


def completed(model: nn.Module, given: Any, strict: bool, assign: bool) -> Any:
    """Return the state dict to load: ``given``, unless only rank 0 has one. Its parameters of units
    are sent when they are loaded (`Rank0Value`), other tensors now, unless ``assign`` into the
    model's memory. Collective. Raises CheckpointError on all ranks, before anything changes."""
    units, own = model_units_in(model), model_unit_of(model)
    rendezvous.require_all_ranks(
        "load_state_dict", (group for each in units for group in each.unit.groups), copies=True
    )
    label = type(model).__name__ if own is None else own.unit.label
    mesh = common_mesh(units)
    if mesh is None:
        meshes = {(each.mesh.shard.members, each.mesh.replica.members) for each in units}
        raise UsageError.of(
            "Units on different ranks cannot be loaded from one rank.",
            expected="units on the same ranks, or on all ranks, or rank0_only=False",
            got=f"units on {sorted(meshes)}",
            where=label,
            fix="load the state dict on every rank, without rank0_only=True",
        )
    rank0 = Rank0Broadcast(mesh, units[0].device)
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
            seen_whole = units_with_say(model, loads_in_own_way)
            given, told = _outlined(given, managed_names(model, but=seen_whole), label)
        except CheckpointError as caught:
            error = caught
    text = rank0.tell("" if error is None else str(error))
    if text:
        raise error or CheckpointError(text)
    outlines, metadata = rank0.send_object(told, "what the state dict holds")
    others = {} if assign or rank0.is_here else others_in(model)
    filled = collections.OrderedDict[str, Any]()
    for key, outline in outlines.items():
        value = given[key] if rank0.is_here else outline
        if isinstance(outline, Rank0Value):
            value = Rank0Value(outline.is_lazy, value if rank0.is_here else None, rank0)
        elif isinstance(outline, Outline):
            [sent] = rank0.send([value], f"the value of {key!r}")
            value = value if rank0.is_here else sent
            target = others.get(clean_name(key))
            if target is not None and _torch_private.is_plain(target):
                value = target.detach().copy_(sent.reshape(target.shape))
        filled[key] = value
    place_beside(model, filled)
    if metadata is not None:
        setattr(filled, "_metadata", metadata)
    return filled


def _outlined(given: Mapping[str, Any], managed: Collection[str], label: str) -> tuple[Any, Any]:
    """Return (a dict without lazy values of unmanaged entries, what rank 0 tells of it)."""
    found, told = dict[str, Any](given), dict[str, Any](given)
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
    return found, (told, getattr(given, "_metadata", None))


def _not_everywhere(expected: str, got: str, label: str) -> CheckpointError:
    return CheckpointError.of(
        "The state dict cannot be loaded from one rank.",
        expected=expected,
        got=got,
        where=f"load_state_dict of {label}, with rank0_only=True",
        fix="call load_state_dict(...) on all ranks, on rank 0 with the whole state dict, on "
        "the others with it or with {}",
    )
