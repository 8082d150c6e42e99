"""The state dict of a wrapper and all that is below it, full, sharded or local.

A form chooses keys and tensor types; it has no gathering of its own."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._engine import rendezvous
from .._engine.group import Group
from .._engine.state_store import StateStore, store_of
from .._engine.unit import Unit
from .._layout.spec import Interval
from ..api import StateDictType
from ..errors import UsageError, wrong_type
from .sharded_values import (
    BoxedTensor,
    LocalPart,
    copied,
    cut_of,
    flat_cut,
    mesh_sharded_value,
    sharded_value,
)
from .units import (
    FSDP_WRAPPED_MODULE,
    ModelUnit,
    Wanted,
    clean_name,
    everything,
    in_form,
    model_units_in,
    named_sections,
    names_in_order,
    names_of,
    registered_unit,
    shows_originals,
    wanted_by,
    without_checkpoint_wrapper,
)
from .unmanaged import owners_in


def state_dict(wrapper: nn.Module, *args: Any, filter: Any = None, **kwargs: Any) -> dict[str, Any]:
    """Return the state dict of a wrapper, see ``FullyShardedDataParallel.state_dict``."""
    try:
        inspect.signature(_arguments).bind(*args, **kwargs)
    except TypeError as error:
        expected = "destination=, prefix= and keep_vars=, each once"
        raise wrong_type("arguments", expected, (args, kwargs), "state_dict") from error
    destination, prefix, keep_vars = _arguments(*args, **kwargs)
    own = registered_unit(wrapper)
    with contextlib.ExitStack() as stack:
        if filter is not None:
            wanted = wanted_by(filter, "state_dict")
            stack.enter_context(in_form(model_units_in(wrapper), wanted=wanted))
        if not own.unit.summoned:
            stack.enter_context(own.runtime.rested("state_dict"))
        return _taken(wrapper, own, destination, prefix, keep_vars)


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
            options: Any = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
            nn.Module.state_dict(wrapper, **options)
    finally:
        own.unit.view.in_state_dict = False
    config: Any = own.form.state_dict_config
    keep = not getattr(config, "rank0_only", False) or own.mesh.is_first
    keys = list(itertools.islice(destination, first, None))
    base = clean_name(prefix)
    # Sharded forms of this unit's parameters, also those that an inner unit's modules hold (ties):
    # the inner wrapper has cleaned their names.
    parts = {base + clean_name(name) for name in sharded_names(wrapper, own.unit)}
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
    order = {key: position for position, key in enumerate(names_in_order(wrapper, base))}
    destination.update(sorted(values.items(), key=lambda entry: order.get(entry[0], len(order))))
    for key in list(itertools.islice(described, first_described, None)):
        if key.startswith(prefix):
            described.setdefault(clean_name(key), described[key])
    return destination


def _own_names(wrapper: nn.Module, own: ModelUnit, keys: Sequence[str], prefix: str) -> set[str]:
    """Return the clean names of the entries that come from this unit's modules, and not from those
    of an inner unit."""
    if own.unit.module is not wrapper:  # inner wrappers have cleaned the names of theirs
        inner = inner_prefix(wrapper, own, prefix)
        return {clean_name(key) for key in keys if key.startswith(inner)}
    owners = owners_in(wrapper)
    holders = {key: key[len(prefix) :].rpartition(".")[0] for key in keys}
    return {clean_name(key) for key in keys if owners.get(holders[key], wrapper) is wrapper}


def inner_prefix(wrapper: nn.Module, own: ModelUnit, prefix: str) -> str:
    """Return the prefix of the names in the unit's module; of a unit that is registered on its
    module itself it is the same."""
    return prefix if own.unit.module is wrapper else f"{prefix}{FSDP_WRAPPED_MODULE}."


def _entries(own: ModelUnit, base: str, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the entries of the unit's own parameters, in the form that is set."""
    if own.form.state_dict_type is StateDictType.FULL_STATE_DICT:
        to_cpu = own.form.state_dict_config.offload_to_cpu
        return full_entries(own.unit, base, own.wanted, to_cpu, keep)
    if own.form.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        return _local_entries(own, base)
    return _sharded_entries(own, base)


def _only_wanted(
    wrapper: nn.Module, wanted: Wanted, values: dict[str, Any], met: set[str], base: str
) -> dict[str, Any]:
    """Drop what a filter leaves out of ``met``, the unmanaged entries of this unit's modules."""
    if wanted is everything:
        return values
    named = wrapper.named_parameters(remove_duplicate=False)
    trainable = {base + clean_name(name) for name, parameter in named if parameter.requires_grad}
    return {k: v for k, v in values.items() if k not in met or wanted(k, k in trainable)}


def sharded_names(wrapper: nn.Module, unit: Unit) -> set[str]:
    """The names under which the wrapped module's state dict holds, or misses, managed parameters
    in their sharded form: none while the unit is summoned.

    Activation checkpointing's wrapper takes itself out of the names at one time and not at
    another: both are here. It may have come between the wrapper and the unit's module.
    """
    if unit.summoned:
        return set()
    held = unit.module if unit.module is wrapper else wrapper.get_submodule(FSDP_WRAPPED_MODULE)
    managed = {id(param) for group in unit.groups for param, _ in group.store.sharded_params}
    raw = {
        f"{path}.{attribute}".lstrip(".")
        for path, child in held.named_modules(remove_duplicate=False)
        for attribute, parameter in child._parameters.items()
        if id(parameter) in managed
    }
    return raw | {without_checkpoint_wrapper(name) for name in raw}


# -- what is sent


def _groups_of_state_dict(module: nn.Module) -> Iterator[Group]:
    """Yield the groups that are gathered for a state dict in the form that is set."""
    for each in model_units_in(module):
        kind = each.form.state_dict_type
        with_mesh = kind is StateDictType.SHARDED_STATE_DICT and each.device_mesh is not None
        if not each.unit.summoned and (kind is StateDictType.FULL_STATE_DICT or with_mesh):
            yield from each.unit.groups


def _on_cpu(value: Any, as_copy: bool) -> Any:
    """Return a tensor on the CPU. as_copy: a copy also where it is there already, which training
    does not change."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    if value.device.type == "cpu" and not as_copy:
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


def _arguments(
    destination: Any = None, prefix: str | None = "", keep_vars: bool = False
) -> tuple[Any, str, bool]:
    """Return the arguments of nn.Module.state_dict, which may be positional in its older form."""
    if not isinstance(prefix or "", str):
        raise wrong_type("prefix", "a string", prefix, "state_dict")
    if destination is not None and not isinstance(destination, MutableMapping):
        raise wrong_type("destination", "a dict, or None", destination, "state_dict")
    if destination is None:
        destination = collections.OrderedDict()
        setattr(destination, "_metadata", collections.OrderedDict())  # as torch has it
    return destination, prefix or "", bool(keep_vars)


def _chosen(store: StateStore, prefixes: Sequence[str], wanted: Wanted) -> dict[int, list[str]]:
    """Return the clean names of the parameters that are wanted, by index. A tied parameter has
    several.

    prefixes: what the names begin with; several where modules hold the unit under several names.
    """
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
    """Some of a group's parameters, whole. One gather brings them; where only some are wanted, only
    those travel."""

    def __init__(self, group: Group, indices: Sequence[int]) -> None:
        """Collective: all ranks ask for the same. So is taking one, where parameters are
        DTensors."""
        self._store = store = store_of(group)
        self._wholes: Sequence[torch.Tensor] = []
        # Where only some travel: by index, the part of every rank and its elements.
        self._runs: dict[int, list[tuple[Interval, torch.Tensor]]] = {}
        if len(indices) == len(store.orig_params) or group.shard.ranks == 1:
            self._buffer = group.gather_full()
            self._wholes = store.whole(self._buffer)
            return
        by_rank = [[store.part(index, rank) for index in indices] for rank in range(store.ranks)]
        longest = max(1, *(sum(part.numel for part in parts) for parts in by_rank))
        own = torch.zeros(longest, dtype=store.dtype, device=store.shard.device)
        numel = sum(part.numel for part in by_rank[store.rank])
        torch.cat([store.local_part(index) for index in indices], out=own[:numel])
        self._buffer = group.gather_full(own)
        for parts, piece in zip(by_rank, self._buffer.chunk(store.ranks), strict=True):
            numels = [part.numel for part in parts]
            runs_of_rank = piece[: sum(numels)].split(numels)
            for index, part, run in zip(indices, parts, runs_of_rank, strict=True):
                self._runs.setdefault(index, []).append((part, run))

    def whole(self, index: int) -> torch.Tensor:
        """Return a parameter, a view of what was gathered where it can be."""
        parallel = self._store.parallel[index]
        if self._runs:
            value = self._buffer.new_empty(self._store.local_shape(index))
            for part, run in self._runs[index]:
                value.view(-1)[part.slice] = run
        else:
            value = self._wholes[index]
        return (value if parallel is None else parallel.whole(value)).detach()

    def copy(self, index: int, device: torch.device | None = None) -> torch.Tensor:
        """Return a parameter in memory of its own, on ``device`` or where it was gathered."""
        value = self.whole(index)
        is_view = _torch_private.same_storage(value, self._buffer)
        return value.to(device or value.device, copy=is_view)


def full_entries(
    unit: Unit, prefix: str, wanted: Wanted, to_cpu: bool, keep: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of a unit's parameters, one group gathered at a time; nothing
    where ``keep`` is False.

    A tied parameter comes under all its names, with one tensor, which is a copy. Collective: all
    ranks, to the end.
    """
    for group in unit.groups:
        if names := _chosen(store_of(group), [prefix], wanted):
            gathered = _Gathered(group, list(names))
            for index, its_names in names.items():
                if keep:
                    own = gathered.copy(index, torch.device("cpu") if to_cpu else None)
                    for name in its_names:
                        yield name, own
                    del own
                elif store_of(group).parallel[index] is not None:
                    gathered.whole(index)  # other ranks of the parameter's own mesh may keep it
            del gathered  # or the next group is gathered beside this one


def gathered_unit(
    unit: Unit, prefixes: Sequence[str], wanted: Wanted
) -> list[tuple[list[str], Callable[[], torch.Tensor]]]:
    """Return (names, what gives the whole parameter, a copy on the CPU) for what is wanted of a
    unit; all groups are gathered.

    What is gathered is held by what is returned. Collective, also what gives the parameters, where
    they are DTensors.
    """
    found: list[tuple[list[str], Callable[[], torch.Tensor]]] = []
    for group in unit.groups:
        if names := _chosen(store_of(group), prefixes, wanted):
            gathered = _Gathered(group, list(names))
            found += [
                (its_names, functools.partial(gathered.copy, i, torch.device("cpu")))
                for i, its_names in names.items()
            ]
    return found


def _sharded_entries(own: ModelUnit, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of a unit's parameters, where a value holds this rank's part of the
    parameter.

    Without a mesh it is boxes over the unit's process group, and nothing is sent. With a mesh it is
    a DTensor, a copy, and this is collective: all ranks, to the end; one group is gathered at a
    time.
    """
    config: Any = own.form.state_dict_config
    for group in own.unit.groups:
        if own.device_mesh is None or group.shard.ranks == 1:
            yield from _shard_entries(own, group, prefix, config.as_views)
            continue
        if names := _chosen(store_of(group), [prefix], own.wanted):
            gathered = _Gathered(group, list(names))
            for index, its_names in names.items():
                value: torch.Tensor = mesh_sharded_value(gathered.whole(index), own.device_mesh)
                value = value.cpu() if config.offload_to_cpu else value
                for name in its_names:
                    yield name, value
            del gathered  # or the next group is gathered beside this one


def _shard_entries(
    own: ModelUnit, group: Group, prefix: str, as_views: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the boxes of one group's parameters. They are copies, no larger than themselves;
    ``as_views``: they view the shard, unless they go to the CPU or some parameters are left out."""
    store, to_cpu = store_of(group), own.form.state_dict_config.offload_to_cpu
    is_view = as_views and not to_cpu and own.wanted is everything
    for index, names in _chosen(store, [prefix], own.wanted).items():
        run = store.local_part(index)
        run = run if is_view else copied(run, to_cpu)
        value = sharded_value(cut_of(group, index, own.group), run)
        if isinstance(value, BoxedTensor):
            value.is_view = is_view
        for name in names:
            yield name, value


def _local_entries(own: ModelUnit, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name of a flat parameter, this rank's shard of it) of those of a unit that hold
    anything wanted; with use_orig_params=True first (name of a parameter, this rank's elements of
    it), which share the memory. Nothing is sent.

    The values view the shard; on the CPU, and where some parameters are left out, a copy. Where one
    rank holds all there are no shards: then the parameters come under their own names, as torch has
    it.
    """
    to_cpu = own.form.state_dict_config.offload_to_cpu
    for flat_name, group, section in named_sections(own.unit):
        store = store_of(group)
        if group.shard.ranks == 1:
            if section is store.sections[0]:
                yield from _shard_entries(own, group, prefix, as_views=True)
            continue
        chosen = _chosen(store, [prefix], own.wanted)
        chosen = {i: names for i, names in chosen.items() if section is store.section_of(i)}
        if not chosen:
            continue
        if store.parallel[0] is not None:
            raise UsageError.of(
                "There is no local state dict of tensor-parallel parameters.",
                expected="StateDictType.FULL_STATE_DICT for a model with DTensor parameters",
                got=f"LOCAL_STATE_DICT, and a DTensor {clean_name(store.orig_params[0].name)!r}",
                where=own.unit.label,
                fix="set FULL_STATE_DICT, with FullStateDictConfig(offload_to_cpu=True, "
                "rank0_only=True) for large models",
            )
        shard = store.shard.detach()[section.place.slice]
        if to_cpu or own.wanted is not everything:
            shard = copied(shard, to_cpu)
        for index, names in chosen.items() if shows_originals(own.unit) else ():
            part = section.layout.part_in_shard(index - section.first_param, store.rank)
            for name in names:
                yield name, shard[part.slice].as_subclass(LocalPart)
        cut = flat_cut(group, section, own.group)
        yield prefix + flat_name, sharded_value(cut, shard[: cut.part.numel])
