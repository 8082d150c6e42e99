"""The state dict of a wrapper and all below it: full, sharded or local. A form chooses keys and
tensor types; it does not gather by itself."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from .. import _torch_private
from .._engine import rendezvous
from .._engine.group import Group
from .._engine.state_store import StateStore, store_of
from .._engine.unit import Unit
from ..api import StateDictType
from ..errors import UsageError, require_module, wrong_type
from .held import StandIn, exact_buffers_of, saves_in_own_way, stand_ins, units_with_say
from .loaded_values import is_sharded, read_part
from .sharded_values import LocalPart, copied, cut_of, flat_cut, mesh_sharded_value, sharded_value
from .summon import Options, full_unit
from .units import (
    FSDP_WRAPPED_MODULE,
    ModelUnit,
    Wanted,
    clean_name,
    everything,
    in_form,
    model_unit_of,
    model_units_in,
    named_sections,
    names_in_order,
    names_of,
    owners_in,
    prefixes_in,
    registered_unit,
    require_idle,
    shows_originals,
    slots_in,
    unmanaged_in,
    wanted_by,
)


def state_dict(wrapper: nn.Module, *args: Any, filter: Any = None, **kwargs: Any) -> dict[str, Any]:
    """Return the state dict of a wrapper, see ``FullyShardedDataParallel.state_dict``."""
    try:
        destination, prefix, keep_vars = _arguments(*args, **kwargs)
    except TypeError as error:
        expected = "destination=, prefix= and keep_vars=, each once"
        raise wrong_type("arguments", expected, (args, kwargs), "state_dict") from error
    if not isinstance(prefix or "", str):
        raise wrong_type("prefix", "a string", prefix, "state_dict")
    if destination is not None and not isinstance(destination, MutableMapping):
        raise wrong_type("destination", "a dict, or None", destination, "state_dict")
    own = registered_unit(wrapper)
    with contextlib.ExitStack() as stack:
        if filter is not None:
            wanted = wanted_by(filter, "state_dict")
            stack.enter_context(in_form(model_units_in(wrapper), wanted=wanted))
        rest = own.runtime.at_rest("state_dict")
        is_outer = own.unit.summoned or stack.enter_context(rest)
        result: dict[str, Any] = _taken(
            wrapper, own, destination, prefix or "", bool(keep_vars), is_outer
        )
        return result


def _arguments(destination: Any = None, prefix: Any = "", keep_vars: Any = False) -> Any:
    """The arguments of nn.Module.state_dict, which may be positional in its older form."""
    return destination, prefix, keep_vars


def _taken(
    wrapper: nn.Module, own: ModelUnit, given: Any, prefix: str, keep_vars: bool, is_outer: bool
) -> Any:
    """Let modules collect the state dict, and replace the sharded form of parameters by entries.
    Modules of units with a say see whole parameters, and what they make of them stays; in a local
    state dict they see stand-ins, and what they make of those is left out."""
    first, having = len(given or ()), units_with_say(wrapper, saves_in_own_way)
    options = {"destination": given, "prefix": prefix or None, "keep_vars": keep_vars or None}
    its: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    own.unit.view.in_state_dict = True
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(rendezvous.nested("state_dict", _gathered_groups(wrapper, having)))
            for each in model_units_in(wrapper) if having and is_outer else ():
                each.unit.view.begin_hiding_parts()  # which a module around the unit may read
                stack.callback(each.unit.view.end_hiding_parts)
            wholes: list[torch.Tensor] | None = None
            stack.enter_context(exact_buffers_of(own.unit))
            if own.unit in having:
                of_unit = full_unit(own.unit, Options(False))
                wholes = stack.enter_context(stand_ins([own.unit]) if own.takes_parts else of_unit)
            for hook in wrapper._state_dict_pre_hooks.values():
                hook(wrapper, prefix, keep_vars)
            returned: Any = getattr(wrapper, FSDP_WRAPPED_MODULE).state_dict(**its)
            result = returned if given is None else given
            wrapper._save_to_state_dict(result, prefix, keep_vars)
            for name, child in wrapper._modules.items():
                if child is not None and name != FSDP_WRAPPED_MODULE:
                    its |= {"destination": result, "prefix": f"{prefix}{name}."}
                    child.state_dict(**its)
            base = clean_name(prefix) if is_outer else prefix
            found = dict[str, Any]()
            for key in list(itertools.islice(result, first, None)):
                # Inner units that are summoned have cleaned the whole name.
                start = len(prefix if key.startswith(prefix) else base)
                found[base + clean_name(key[start:])] = result.pop(key)
            values = _finished(wrapper, own, found, base, keep_vars, wholes)
    finally:
        own.unit.view.in_state_dict = False
    result.update(values if own.is_kept_here or not is_outer else {})
    described: dict[str, Any] = getattr(result, "_metadata", {})
    for key in [key for key in described if f"{key}.".startswith(prefix)] if is_outer else ():
        described[clean_name(key)] = described[key]
    for hook in wrapper._state_dict_hooks.values():
        changed = hook(wrapper, result, prefix, {"version": wrapper._version})
        result = result if changed is None else changed
    return result


def _finished(
    wrapper: nn.Module,
    own: ModelUnit,
    found: dict[str, Any],
    base: str,
    keep_vars: bool,
    wholes: list[torch.Tensor] | None,
) -> dict[str, Any]:
    """Return the entries for what modules have collected: parts of ``wholes``, or sharded forms."""
    slots, is_users_call = list(slots_in(wrapper)), own.unit.summoned and wholes is None
    # Sharded forms of this unit's parameters, also those that an inner unit's modules hold (ties).
    parts = {base + slot.name for slot in slots if slot.unit is own.unit and not own.unit.summoned}
    seen = {name: value for name, value in found.items() if name not in parts}
    values = dict(seen if wholes is None else _of_wholes(own, seen, base, wholes))
    owners = owners_in(wrapper) if values else {}
    owners = {base + clean_name(path): owner for path, owner in owners.items()}
    asks = own.wanted is not everything
    trains = {
        base + slot.name: slot.value is not None and slot.value.requires_grad
        for slot in (slots if asks else ())
    }
    to_cpu = getattr(own.form.state_dict_config, "offload_to_cpu", False)
    for name, value in list(values.items()):
        is_own = owners.get(name.rpartition(".")[0], wrapper) is wrapper
        if is_own and asks and not own.wanted(name, trains.get(name, True)):
            del values[name]
        elif to_cpu:
            values[name] = _on_cpu(value, as_copy=is_own and value is seen[name])
        elif is_own and not is_users_call and not keep_vars:
            values[name] = _compact(value)
    if not own.unit.summoned or (own.takes_parts and wholes is not None):
        # In the user's summon_full_params, torch has collected whole parameters.
        for names, value in _ENTRIES[own.form.state_dict_type](own, base):
            values.update(dict.fromkeys(names, value))
    if wholes is not None and not own.takes_parts:
        return values
    order = {key: position for position, key in enumerate(names_in_order(wrapper, base))}
    last = len(order)
    return dict(sorted(values.items(), key=lambda entry: order.get(entry[0], last)))


def _of_wholes(
    own: ModelUnit, found: Mapping[str, Any], base: str, wholes: Sequence[torch.Tensor]
) -> Iterator[tuple[str, Any]]:
    """Yield what modules gave while their parameters were whole: sharded if that is the form and it
    is as large as the parameter of its name, else in memory of its own. Collective for DTensors."""
    names = [(group, _chosen(store_of(group), [base], everything)) for group in own.unit.groups]
    places = {n: (group, i) for group, its in names for i, known in its.items() for n in known}
    is_full = own.form.state_dict_type is StateDictType.FULL_STATE_DICT
    mesh, copies = own.device_mesh, dict[Any, torch.Tensor]()
    to_cpu = getattr(own.form.state_dict_config, "offload_to_cpu", False)
    for name, value in found.items():
        if isinstance(value, StandIn) and own.takes_parts:
            continue
        group, index = places.get(name, (None, 0))
        if group is not None and _torch_private.is_dtensor(value):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor) and not is_sharded(value) and not value.is_meta:
            if not own.is_kept_here:
                value = StandIn.of(value.shape, value.dtype)
            elif not is_full and group and value.shape == store_of(group).shape(index):
                cut = cut_of(group, index, own.group)
                value = (
                    sharded_value(cut, copied(read_part(value, cut), to_cpu))
                    if mesh is None or group.shard.ranks == 1
                    else mesh_sharded_value(value, mesh)
                )
            elif any(_torch_private.same_storage(value, each) for each in wholes):
                # Tied ones share their copy.
                place = value.data_ptr(), value.shape, value.stride(), value.dtype
                value = copies[place] = copies[place] if place in copies else copied(value, to_cpu)
        yield name, value


# -- what is sent


def _gathered_groups(module: nn.Module, having: set[Unit]) -> Iterator[Group]:
    """Yield the groups that are gathered for a state dict in the form that is set."""
    for each in model_units_in(module):
        is_full = each.form.state_dict_type is StateDictType.FULL_STATE_DICT
        is_sent = is_full or each.device_mesh is not None or each.unit in having
        if is_sent and not (each.takes_parts or each.unit.summoned):
            yield from each.unit.groups


def _on_cpu(value: Any, as_copy: bool) -> Any:
    """Return a tensor on the CPU; ``as_copy`` also where it is there already."""
    is_tensor = isinstance(value, torch.Tensor) and not value.is_meta
    is_there = not is_tensor or (value.device.type == "cpu" and not as_copy)
    return value if is_there else copied(value, to_cpu=True)


def _compact(value: Any) -> Any:
    """Return a tensor that keeps no more memory than it shows."""
    is_plain = isinstance(value, torch.Tensor) and not (is_sharded(value) or value.is_meta)
    if not is_plain or value.layout is not torch.strided:
        return value
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _chosen(store: StateStore, prefixes: Sequence[str], wanted: Wanted) -> dict[int, list[str]]:
    """Return the wanted names of parameters by index, under each of the unit's prefixes."""
    trainable = {
        index: param.requires_grad for param, indices in store.sharded_params for index in indices
    }
    found: dict[int, list[str]] = {}
    for index, member in enumerate(store.orig_params):
        names = [name for prefix in prefixes for name in names_of(member, prefix)]
        if its := [name for name in names if wanted(name, trainable[index])]:
            found[index] = its
    return found


class _Gathered:
    """Some of a group's parameters, whole, from one gather that sends only the wanted ones."""

    def __init__(self, group: Group, indices: Sequence[int]) -> None:
        """Collective: all ranks ask for the same. So is taking one, if parameters are DTensors."""
        self._store = store = store_of(group)
        self._wholes: Sequence[torch.Tensor] = []
        self._runs: dict[int, tuple[torch.Tensor, ...]] = {}  # by index, where only some travel
        if len(indices) == len(store.orig_params) or group.shard.ranks == 1:
            self._buffer = group.gather_full()
            self._wholes = store.whole(self._buffer)
            return
        by_rank = [[store.part(i, rank).numel for i in indices] for rank in range(store.ranks)]
        longest = max(1, *map(sum, by_rank))
        padding = store.shard.new_zeros(longest - sum(by_rank[store.rank]))
        own = torch.cat((*map(store.local_part, indices), padding))
        self._buffer = group.gather_full(own)
        pieces = zip(self._buffer.chunk(store.ranks), by_rank, strict=True)
        runs = [piece[: sum(numels)].split(numels) for piece, numels in pieces]
        self._runs = dict(zip(indices, zip(*runs, strict=True), strict=True))

    def whole(self, index: int) -> torch.Tensor:
        """Return a parameter, a view of what was gathered where it can be."""
        parallel = self._store.parallel[index]
        if self._runs:  # of what every rank holds, the first rank's
            shape = self._store.local_shape(index)
            value = torch.cat(self._runs[index])[: math.prod(shape)].view(shape)
        else:
            value = self._wholes[index]
        return (value if parallel is None else parallel.whole(value)).detach()

    def copy(self, index: int, device: torch.device | None = None) -> torch.Tensor:
        """Return a parameter in memory of its own, on ``device`` or where it was gathered."""
        value = self.whole(index)
        is_view = _torch_private.same_storage(value, self._buffer)
        return value.to(device or value.device, copy=is_view)


def _gathered(
    groups: Iterable[Group], prefixes: Sequence[str], wanted: Wanted
) -> Iterator[tuple[list[str], _Gathered, int]]:
    """Yield (names, gathered parameters, index), one group in memory at a time. Collective."""
    for group in groups:
        if names := _chosen(store_of(group), prefixes, wanted):
            gathered = _Gathered(group, list(names))
            for index, its_names in names.items():
                yield its_names, gathered, index
            del gathered  # or the next group is gathered beside this one


# Names of a parameter, tied ones all together, and what the state dict has under each of them.
_Entries = Iterator[tuple[Sequence[str], torch.Tensor]]


def full_entries(own: ModelUnit, prefix: str) -> _Entries:
    """Yield copies of the whole tensors of a unit's parameters, one group gathered at a time;
    stand-ins on ranks that keep none. Collective."""
    device = torch.device("cpu") if own.form.state_dict_config.offload_to_cpu else None
    is_kept = own.is_kept_here
    for names, gathered, index in _gathered(own.unit.groups, [prefix], own.wanted):
        # Other ranks of the parameter's own mesh may keep what this one does not.
        value = gathered.copy(index, device) if is_kept else gathered.whole(index)
        del gathered
        yield names, value if is_kept else StandIn.of(value.shape, value.dtype)
        del value


def _sharded_entries(own: ModelUnit, prefix: str) -> _Entries:
    """Yield values with this rank's part: boxes; with a mesh DTensors. Collective then."""
    config: Any = own.form.state_dict_config
    for group in own.unit.groups:
        if own.device_mesh is None or group.shard.ranks == 1:
            yield from _shard_entries(own, group, prefix, config.as_views)
            continue
        for names, gathered, index in _gathered([group], [prefix], own.wanted):
            value: torch.Tensor = mesh_sharded_value(gathered.whole(index), own.device_mesh)
            del gathered
            yield names, value.cpu() if config.offload_to_cpu else value


def _shard_entries(own: ModelUnit, group: Group, prefix: str, as_views: bool) -> _Entries:
    """Yield boxes, as copies; ``as_views``: of the shard, if all of it stays on its device."""
    store, to_cpu = store_of(group), own.form.state_dict_config.offload_to_cpu
    is_view = as_views and not to_cpu and own.wanted is everything
    for index, names in _chosen(store, [prefix], own.wanted).items():
        run = store.local_part(index)
        run = run if is_view else copied(run, to_cpu)
        yield names, sharded_value(cut_of(group, index, own.group), run, is_view)


def _local_entries(own: ModelUnit, prefix: str) -> _Entries:
    """Yield flat parameters with this rank's shard; with use_orig_params=True first views of it
    under the names of parameters. If one rank holds all, yield whole parameters, as torch does.
    Shards are copied for the CPU or a filter. Nothing is sent."""
    to_cpu = own.form.state_dict_config.offload_to_cpu
    for flat_name, group, section in named_sections(own.unit):
        store = store_of(group)
        chosen = _chosen(store, [prefix], own.wanted)
        if group.shard.ranks == 1:
            yield from _shard_entries(own, group, prefix, as_views=True)
        if group.shard.ranks == 1 or not chosen:
            continue
        if store.parallel[0] is not None:
            raise UsageError.of(
                "Tensor-parallel parameters have no local state dict.",
                expected="StateDictType.FULL_STATE_DICT for a model with DTensor parameters",
                got=f"LOCAL_STATE_DICT, and a DTensor {clean_name(store.orig_params[0].name)!r}",
                where=own.unit.label,
                fix="set FULL_STATE_DICT, with FullStateDictConfig(offload_to_cpu=True, "
                "rank0_only=True) for large models",
            )
        shard = store.shard.detach()
        if to_cpu or own.wanted is not everything:
            shard = copied(shard, to_cpu)
        for index, names in chosen.items() if shows_originals(own.unit) else ():
            yield names, store.own_part(shard, index).as_subclass(LocalPart)
        cut = flat_cut(group, section, own.group)
        yield [prefix + flat_name], sharded_value(cut, shard[: cut.part.numel])


_ENTRIES: dict[StateDictType, Callable[[ModelUnit, str], _Entries]] = {
    StateDictType.FULL_STATE_DICT: full_entries,
    StateDictType.SHARDED_STATE_DICT: _sharded_entries,
    StateDictType.LOCAL_STATE_DICT: _local_entries,
}


# -- whole tensors, one unit at a time: for any file format, and for models too large to hold twice

_ITER = "iter_full_state_dict"


def iter_full_state_dict(
    model: nn.Module,
    *,
    filter: Callable[[str], bool] | Literal["trainable"] | None = None,
    device: torch.device | str | None = "cpu",
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole tensor of each parameter and persistent buffer of a model.

    The names are those before wrapping. Outer units come first; within a unit, the model's order. A
    tied parameter is yielded under each of its names in turn, with the same tensor. Tensors are
    copies that the caller owns. A rank holds one unsharded unit and the last yielded tensor. Extra
    state is left out: it is not a tensor.

    Collective: all ranks of the model iterate in step, to the end or until they all stop at the
    same name.

    Args:
        model: a sharded module, of either front end, or one that contains some.
        filter: what to yield and gather: a function of a name, or "trainable" for parameters that
            require grad.
        device: of the tensors; None: where each unit computes.
        dtype: of the floating-point tensors; None: as stored.

    Returns:
        An iterator over (name, tensor)."""
    require_module(model, _ITER)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise wrong_type("dtype", "a floating-point dtype, or None", dtype, _ITER)
    try:
        device = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise wrong_type("device", "a torch.device, its name, or None", device, _ITER) from error
    return _full_state(model, wanted_by(filter, _ITER), device, dtype)


def _full_state(
    model: nn.Module, wanted: Wanted, device: torch.device | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """See ``iter_full_state_dict``; names are clean. Collective, as far as it is consumed."""
    units = prefixes_in(model)
    require_idle(model, _ITER)
    rendezvous.require_all_ranks(_ITER, (group for own in units for group in own.unit.groups))
    position = {name: number for number, name in enumerate(names_in_order(model, ""))}
    others = _others(model, wanted)
    for own in dict.fromkeys((model_unit_of(model), *units)):
        found: list[tuple[list[str], Callable[[], torch.Tensor]]] = [
            (names, functools.partial(tensor.to, device or tensor.device, copy=True))
            for names, tensor in others[own].values()
        ]
        if own is not None:
            own.runtime.require_idle(_ITER)
            own.runtime.reshard_all([own.unit])
            place = device or own.unit.options.device
            found += [
                (names, functools.partial(gathered.copy, index, place))
                for names, gathered, index in _gathered(own.unit.groups, units[own], wanted)
            ]
        found.sort(key=lambda entry: position.get(entry[0][0], len(position)), reverse=True)
        while found:  # drop each tensor once it has been yielded
            names, make = found.pop()
            value = make()
            del make
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            for name in names:
                yield name, value
            del value


def _others(
    model: nn.Module, wanted: Wanted
) -> Mapping[ModelUnit | None, dict[int, tuple[list[str], torch.Tensor]]]:
    """Return (wanted names, tensor) of what no unit shards, by the unit around its module."""
    found, owners = collections.defaultdict[Any, Any](dict), owners_in(model)
    with contextlib.ExitStack() as stack:
        for own in model_units_in(model):
            stack.enter_context(exact_buffers_of(own.unit))
        for slot in unmanaged_in(model):
            value, trains = slot.value, isinstance(slot.value, nn.Parameter)
            if value is not None and wanted(slot.name, trains and value.requires_grad):
                its = found[model_unit_of(owners[slot.key.rpartition(".")[0]])]
                its.setdefault(id(value), ([], value.detach()))[0].append(slot.name)
    return found
