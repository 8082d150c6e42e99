"""State dicts of wrapped models: what `FullyShardedDataParallel` has of them, and in which form."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import typing
from collections.abc import Generator, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch_private
from .._engine import rendezvous
from .._engine.dtypes import ComputeDtype
from .._engine.group import Group
from ..api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    as_ours,
)
from ..errors import (
    AssertedUsageError,
    FsdpCompatError,
    RuntimeUsageError,
    TypeUsageError,
    UsageError,
    explain,
    require_bools,
    require_module,
    truth,
    wrong_type,
)
from .entries import copied
from .first_rank import fill_from_first
from .formats import BoxedTensor, is_sharded
from .model import (
    full_entries,
    in_module_order,
    load_unit,
    local_entries,
    sharded_entries,
    store_of,
)
from .model_units import Instance, instances_in, named_units, names_in_order
from .names import (
    FSDP_WRAPPED_MODULE,
    clean_name,
    everything,
    wanted_by,
    without_checkpoint_wrapper,
)
from .validation import EVERYWHERE, not_loaded, others_in, refuse_values

__all__ = ["StateDicts"]


class StateDicts(Instance):
    """The part of an instance that gives and takes the model's state."""

    _loading: tuple[
        str, set[str]
    ]  # while a state dict is loaded: where this is in it, and the keys of sharded forms

    def _begin_state_dicts(self, module: nn.Module) -> None:
        """module: that the instance is about to hold."""
        self._attribute_order = {
            clean_name(name): [
                attribute for attribute, p in child._parameters.items() if p is not None
            ]
            for name, child in module.named_modules(remove_duplicate=False)
        }
        self._wanted = everything
        self._loading = "", set()
        self._state_settings = _default_settings(StateDictType.FULL_STATE_DICT)
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_after_load)

    # -- which form

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the form of state dicts for all instances in ``module``, which need not be one;
        return what it was before."""
        require_module(module, "set_state_dict_type")
        kind = as_ours(state_dict_type, StateDictType, "state_dict_type")
        if kind is None:
            raise wrong_type("state_dict_type", "a StateDictType", kind, "set_state_dict_type")
        instances = instances_in(module)
        default = _default_settings(kind)
        model_config = (
            as_ours(state_dict_config, StateDictConfig, "state_dict_config")
            or default.state_dict_config
        )
        optim_config = (
            as_ours(optim_state_dict_config, OptimStateDictConfig, "optim_state_dict_config")
            or default.optim_state_dict_config
        )
        for name, given, wanted in (
            ("state_dict_config", model_config, default.state_dict_config),
            ("optim_state_dict_config", optim_config, default.optim_state_dict_config),
        ):
            for field in dataclasses.fields(given):
                truth(f"{name}.{field.name}", getattr(given, field.name), "set_state_dict_type")
            if getattr(given, "_use_dtensor", False) and any(
                each._settings.device_mesh is None for each in instances
            ):
                raise UsageError(
                    explain(
                        "DTensors in sharded state dicts need a device mesh.",
                        expected=f"{type(given).__name__}() without _use_dtensor, or a model that "
                        "was wrapped with device_mesh=",
                        got=f"{given}, and a model without a mesh",
                        where=f"set_state_dict_type(..., {name})",
                        fix="leave it out: it is set by itself for a model with a mesh; without "
                        "one the values are ShardedTensors, "
                        "which torch.distributed.checkpoint takes as they are",
                    )
                )
            if not isinstance(given, type(wanted)):
                raise RuntimeUsageError(
                    explain(
                        f"{name} does not belong to the form of state dict.",
                        expected=f"a {type(wanted).__name__}, or None",
                        got=f"a {type(given).__name__}",
                        where=f"set_state_dict_type(..., {kind.name})",
                        fix=f"pass {type(wanted).__name__}(...)",
                    )
                )
        before = StateDicts.get_state_dict_type(module)
        settings = StateDictSettings(kind, model_config, optim_config)
        with_mesh = _with_dtensors(settings)
        for instance in instances:
            instance._state_settings = (
                settings if instance._settings.device_mesh is None else with_mesh
            )
        _follow_first_rank(
            module, _from_first_rank(settings) and not isinstance(module, StateDicts)
        )
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the form of state dicts of the instances in ``module``; raises UsageError where
        they differ or there is none."""
        require_module(module, "get_state_dict_type")
        found = [instance._state_settings for instance in instances_in(module)]
        if not found or any(settings != found[0] for settings in found):
            raise AssertedUsageError(
                explain(
                    "There is no one form of state dict.",
                    expected="at least one FullyShardedDataParallel in the module, all of them "
                    "with one form",
                    got=f"{len(found)} instances with "
                    f"{len({settings.state_dict_type for settings in found})} forms",
                    where=type(module).__name__,
                    fix="set one for all: FullyShardedDataParallel.set_state_dict_type(module, "
                    "...)",
                )
            )
        return found[0]

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None, None, None]:
        """Set the form of state dicts inside of the context, see ``set_state_dict_type``."""
        require_module(module, "state_dict_type")
        instances, followed = instances_in(module), module in _followed
        before = [instance._state_settings for instance in instances]
        StateDicts.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for instance, settings in zip(instances, before, strict=True):
                instance._state_settings = settings
            _follow_first_rank(module, followed)

    # -- the model

    def state_dict(self, *args: Any, filter: Any = None, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state under the names it had before wrapping, in the form that is set.

        FULL_STATE_DICT (default): whole tensors, copies; collective, one unit gathered at a time.
        SHARDED_STATE_DICT: this rank's part of each parameter, as boxes that view its shard, and
        nothing is sent; of a model with a device mesh a DTensor, a copy, and collective.
        LOCAL_STATE_DICT: this rank's flat shards themselves; nothing is sent.

        Values that are views, which buffers are in every form, change when training goes on, as
        those of an unwrapped module's state dict do. ``offload_to_cpu=True`` in the configuration,
        ``copy.deepcopy``, ``clone()`` and pickling give values that do not.

        filter: what of it to return, a function of a name, or "trainable" for the parameters that
        require grad; the same on all ranks. Only that is gathered, and nothing in the dict is a
        view of a shard. A flat shard is returned if it holds any.
        """
        destination, prefix, keep_vars = _state_dict_arguments(*args, **kwargs)
        if filter is None:
            return self._state_dict(destination, prefix, keep_vars)
        wanted, instances = wanted_by(filter, "state_dict"), instances_in(self)
        for instance in instances:
            instance._wanted = wanted
        try:
            return self._state_dict(destination, prefix, keep_vars)
        finally:
            for instance in instances:
                instance._wanted = everything

    def _state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> dict[str, Any]:
        with (
            contextlib.nullcontext() if self._unit.summoned else self._runtime.rested("state_dict")
        ):
            return self._rested_state_dict(destination, prefix, keep_vars)

    def _rested_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> dict[str, Any]:
        described: dict[str, Any] = getattr(destination, "_metadata", {})
        first, first_described = len(destination), len(described)
        self._unit.view.in_state_dict = True
        try:
            with rendezvous.nested("state_dict", _groups_of_state_dict(self)):
                super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        finally:
            self._unit.view.in_state_dict = False
        settings = self._state_settings
        config: Any = settings.state_dict_config
        keep = not getattr(config, "rank0_only", False) or self._settings.mesh.is_first
        own = list(itertools.islice(destination, first, None))
        base = clean_name(prefix)
        # Parts of this unit's parameters; inner instances, which do not know them (ties), have
        # cleaned their names.
        parts = (
            set()
            if self._unit.summoned
            else {base + clean_name(name) for name in self._sharded_names()}
        )
        values = {name: destination[key] for key in own if (name := clean_name(key)) not in parts}
        for key in own:
            del destination[key]
        for name, exact in self._exact_buffers():
            if base + name in values:
                values[base + name] = exact
        met = {
            clean_name(key) for key in own if key.startswith(f"{prefix}{FSDP_WRAPPED_MODULE}.")
        }  # by no inner instance
        values = self._only_wanted(values, met, base)
        if not keep:
            values = {}
        elif getattr(config, "offload_to_cpu", False):
            values = {key: _on_cpu(value, as_copy=key in met) for key, value in values.items()}
        elif not self._unit.summoned and not keep_vars:
            values = {
                key: _compact(value) if key in met else value for key, value in values.items()
            }
        if (
            not self._unit.summoned
        ):  # inside of summon_full_params the traversal has met whole parameters
            values.update(self._entries(base, keep))
        for key in in_module_order(list(values), names_in_order(self, base)):
            destination[key] = values[key]
        for key in [
            key
            for key in itertools.islice(described, first_described, None)
            if key.startswith(prefix)
        ]:
            described.setdefault(clean_name(key), described[key])
        return destination

    def _entries(self, base: str, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """What a state dict in the form that is set holds of the unit's own parameters."""
        settings, unit = self._state_settings, self._unit
        to_cpu, group = settings.state_dict_config.offload_to_cpu, self._settings.group
        if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            return full_entries(unit, base, self._wanted, to_cpu, keep)
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            return local_entries(unit, base, self._wanted, group, to_cpu)
        return sharded_entries(unit, base, self._wanted, group, self._settings.device_mesh, to_cpu)

    def _only_wanted(self, values: dict[str, Any], met: set[str], base: str) -> dict[str, Any]:
        """Drop what a filter leaves out of ``met``, the keys that are no managed parameters' and no
        inner instance's."""
        if self._wanted is everything:
            return values
        named = self.named_parameters(remove_duplicate=False)
        trainable = {
            base + clean_name(name) for name, parameter in named if parameter.requires_grad
        }
        return {k: v for k, v in values.items() if k not in met or self._wanted(k, k in trainable)}

    def _sharded_names(self) -> set[str]:
        """The names under which the wrapped module's state dict holds, or misses, managed
        parameters in their sharded form.

        Activation checkpointing's wrapper takes itself out of the names at one time and not at
        another: both are here.
        """
        managed = {
            id(target) for group in self._unit.groups for target, _ in group.store.sharded_params
        }
        raw = {
            f"{path}.{attribute}".lstrip(".")
            for path, child in self._fsdp_wrapped_module.named_modules(remove_duplicate=False)
            for attribute, parameter in child._parameters.items()
            if id(parameter) in managed
        }
        return raw | {without_checkpoint_wrapper(name) for name in raw}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict under the names the model had before wrapping: full, sharded in any
        way, or local, as its values say.

        With full values nothing is sent: every rank copies its part. Where
        ``FullStateDictConfig(rank0_only=True)`` is set, other ranks than the first may pass {} or
        None and get what the first one has, one unit at a time; this is collective then. Parameters
        are written in place, also with ``assign``. What is like a tensor
        (``torch.overrides.is_tensor_like``) and knows its shape and dtype is taken too: a lazy
        value is read when its parameter is loaded, on ranks that have a part of it.

        Raises CheckpointError, before anything changes, for what is missing, unknown or does not
        fit.
        """
        self._runtime.require_idle("load_state_dict")
        self._runtime.rest()
        require_bools("load_state_dict", strict=strict, assign=assign)
        if isinstance(state_dict, Mapping):
            state_dict = self._without_ddp_prefix(state_dict)
        if _from_first_rank(self._state_settings):
            state_dict = _fill(self, state_dict, strict, assign)
        if not isinstance(state_dict, Mapping):
            raise TypeUsageError(
                explain(
                    "This is no state dict.",
                    expected="a dict from names to tensors, as state_dict() returns it",
                    got=f"a {type(state_dict).__name__}",
                    where="load_state_dict(state_dict)",
                    fix=EVERYWHERE,
                )
            )
        refuse_values(self, self._unit.label, state_dict, strict)
        rendezvous.require_all_ranks("load_state_dict", _groups_to_load(self, state_dict))
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except FsdpCompatError:
            raise
        except RuntimeError as error:  # torch says where things are here
            raise not_loaded(
                str(error).replace(f"{FSDP_WRAPPED_MODULE}.", ""), self._unit.label, state_dict
            ) from error

    def _without_ddp_prefix(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """What DistributedDataParallel saved has names that begin with ``module.``."""
        inner = self._fsdp_wrapped_module
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
    """The groups whose parts are put together for a state dict in the form that is set."""
    for instance in instances_in(module):
        kind = instance._state_settings.state_dict_type
        with_mesh = (
            kind is StateDictType.SHARDED_STATE_DICT and instance._settings.device_mesh is not None
        )
        if not instance._unit.summoned and (kind is StateDictType.FULL_STATE_DICT or with_mesh):
            yield from instance._unit.groups


def _groups_to_load(module: nn.Module, state_dict: Mapping[str, Any]) -> Iterator[Group]:
    """The groups whose values in a state dict are sharded in another way than they are; the first
    such value speaks for all."""
    for named in named_units(module) if any(map(is_sharded, state_dict.values())) else ():
        for group in named.unit.groups if not named.unit.summoned else ():
            store = store_of(group)
            for index, member in enumerate(store.orig_params):
                keys = [named.prefix + clean_name(name) for name in member.names]
                value = next((state_dict[key] for key in keys if key in state_dict), None)
                if is_sharded(value):
                    if not (
                        isinstance(value, BoxedTensor)
                        and value.is_cut_as(store.layout, index, group.shard.members)
                    ):
                        yield group
                    break


# -- what only the first rank has


def _from_first_rank(settings: StateDictSettings) -> bool:
    return settings.state_dict_type is StateDictType.FULL_STATE_DICT and getattr(
        settings.state_dict_config, "rank0_only", False
    )


def _fill(model: nn.Module, state_dict: Any, strict: bool, assign: bool) -> Any:
    """Return what this rank is to load of what the first rank has, see ``fill_from_first``.
    Collective."""
    instances = instances_in(model)
    rendezvous.require_all_ranks(
        "load_state_dict", (group for each in instances for group in each._unit.groups), copies=True
    )
    mesh, label = (
        instances[0]._settings.mesh,
        instances[0]._unit.label if instances[0] is model else type(model).__name__,
    )
    if any(_ranks_of(each) != _ranks_of(instances[0]) for each in instances):
        raise UsageError(
            explain(
                "Units over different ranks cannot be loaded from one rank.",
                expected="all units in the module over the same ranks, or rank0_only=False",
                got=f"units over {sorted({_ranks_of(each) for each in instances})}",
                where=label,
                fix="load the state dict on every rank, without rank0_only=True",
            )
        )
    managed = {
        f"{clean_name(path)}.{clean_name(name)}".lstrip(".")
        for path, child in model.named_modules(remove_duplicate=False)
        if isinstance(child, Instance) and not child._unit.summoned
        for group in child._unit.groups
        for member in store_of(group).orig_params
        for name in member.names
    }
    return fill_from_first(
        state_dict,
        mesh,
        instances[0]._settings.device,
        check=lambda given: refuse_values(model, label, given, strict),
        managed=managed,
        others=others_in(model),
        assign=assign,
        where=f"load_state_dict of {label}",
    )


def _ranks_of(instance: Instance) -> tuple[tuple[int, ...], tuple[int, ...]]:
    mesh = instance._settings.mesh
    return mesh.shard.members, mesh.replica.members


# Modules that are no instances, around instances that load from the first rank: their own hooks see
# what is loaded into them.
_followed: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _follow_first_rank(module: nn.Module, follow: bool) -> None:
    """Let a module around instances load from the first rank from now on, or no longer."""
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
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Complete what is loaded into a module that is no instance with what the first rank has.
    Collective."""
    if not any(_from_first_rank(instance._state_settings) for instance in instances_in(module)):
        return
    own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    state_dict.update(
        (prefix + key, value)
        for key, value in _fill(
            module, own, strict, bool(local_metadata.get("assign_to_params_buffers"))
        ).items()
    )


def _with_dtensors(settings: StateDictSettings) -> StateDictSettings:
    """The same settings of a model with a device mesh: sharded values are DTensors, and the
    configurations say so."""
    if settings.state_dict_type is not StateDictType.SHARDED_STATE_DICT:
        return settings
    configs: tuple[Any, Any] = settings.state_dict_config, settings.optim_state_dict_config
    model_config, optim_config = (
        dataclasses.replace(config, _use_dtensor=True) for config in configs
    )
    return StateDictSettings(settings.state_dict_type, model_config, optim_config)


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


def _default_settings(kind: StateDictType) -> StateDictSettings:
    if kind is StateDictType.LOCAL_STATE_DICT:
        return StateDictSettings(kind, LocalStateDictConfig(), LocalOptimStateDictConfig())
    if kind is StateDictType.FULL_STATE_DICT:
        return StateDictSettings(kind, FullStateDictConfig(), FullOptimStateDictConfig())
    return StateDictSettings(kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


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


def _before_load(
    instance: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Take this unit's parameters out of what is loaded, and hand the rest on under the wrapped
    module's names."""
    self = typing.cast(StateDicts, instance)
    inner = f"{prefix}{FSDP_WRAPPED_MODULE}."
    for key in [key for key in state_dict if key.startswith(prefix)]:
        clean = prefix + clean_name(key[len(prefix) :])
        if clean != key:
            state_dict[clean] = state_dict.pop(key)
    if not self._unit.summoned:
        load_unit(self._unit, state_dict, prefix, missing_keys, error_msgs)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)
    # The sharded forms are registered in the modules, which will miss them.
    self._unit.view.in_state_dict = True  # until _after_load
    if self._unit.buffers is not None:
        self._unit.buffers.follow(ComputeDtype.EVAL)
    self._loading = (
        prefix,
        set() if self._unit.summoned else {inner + name for name in self._sharded_names()},
    )


def _after_load(instance: nn.Module, incompatible: Any) -> None:
    """What is reported are the names before wrapping, and nothing that only exists because of it.

    The outermost instance cleans the names: it still has to recognise sharded forms of its own that
    inner modules hold (ties).
    """
    self = typing.cast(StateDicts, instance)
    self._unit.view.in_state_dict = False
    if self._unit.buffers is not None:
        self._unit.buffers.follow(ComputeDtype.TRAIN)
    prefix, sharded = self._loading
    outermost = self._unit.is_root or not prefix
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [
            clean_name(key) if outermost and key.startswith(prefix) else key
            for key in keys
            if key not in sharded
        ]
    self._loading = "", set()
