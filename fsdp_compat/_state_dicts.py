"""State dicts of wrapped models: what `FullyShardedDataParallel` has of them, and in which form."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import typing
from collections.abc import Generator, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ._checks import (
    AssertedUsageError,
    RuntimeUsageError,
    TypeUsageError,
    require_bools,
    require_module,
    wrong_type,
)
from ._engine import hooks
from ._engine.runtime import Runtime
from ._engine.unit import Unit
from ._settings import Settings
from ._state.model import check_unit, full_entries, in_module_order, load_unit, sharded_entries, wrong_value
from ._state.names import FSDP_WRAPPED_MODULE, clean_name, without_checkpoint_wrapper
from ._state.optim import NamedUnit
from .api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    as_ours,
)
from .errors import CheckpointError, FsdpCompatError, UsageError, explain

__all__ = ["StateDicts", "instances_in", "named_units", "names_before"]


class StateDicts(nn.Module):
    """The part of an instance that gives and takes state. An instance has a unit, around a module that it holds."""

    _unit: Unit
    _settings: Settings
    _fsdp_wrapped_module: nn.Module
    _state_settings: StateDictSettings
    _attribute_order: dict[str, list[str]]  # by module: its parameters as they were, for the order of state dicts
    _loading: tuple[str, set[str]]  # while a state dict is loaded: where this is in it, and the keys of sharded forms

    def _begin_state_dicts(self, module: nn.Module) -> None:
        """module: that the instance is about to hold."""
        self._attribute_order = {
            clean_name(name): [attribute for attribute, p in child._parameters.items() if p is not None]
            for name, child in module.named_modules(remove_duplicate=False)
        }
        self._loading = "", set()
        self._state_settings = _default_settings(StateDictType.FULL_STATE_DICT)
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_after_load)

    @property
    def _runtime(self) -> Runtime:
        assert self._unit.runtime is not None
        return self._unit.runtime

    # -- which form

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the form of state dicts for all instances in ``module``, which need not be one; return what it was before."""
        require_module(module, "set_state_dict_type")
        kind = as_ours(state_dict_type, StateDictType, "state_dict_type")
        if kind is None or kind is StateDictType.LOCAL_STATE_DICT:
            raise UsageError(
                explain(
                    "This form of state dict is not available.",
                    expected="StateDictType.FULL_STATE_DICT or StateDictType.SHARDED_STATE_DICT",
                    got=str(kind),
                    where="set_state_dict_type",
                    fix="SHARDED_STATE_DICT keeps every rank's own part too, and can be loaded by any number of ranks",
                )
            )
        default = _default_settings(kind)
        model_config = as_ours(state_dict_config, StateDictConfig, "state_dict_config") or default.state_dict_config
        optim_config = (
            as_ours(optim_state_dict_config, OptimStateDictConfig, "optim_state_dict_config") or default.optim_state_dict_config
        )
        for name, given, wanted in (
            ("state_dict_config", model_config, default.state_dict_config),
            ("optim_state_dict_config", optim_config, default.optim_state_dict_config),
        ):
            for field in dataclasses.fields(given):
                if not isinstance(getattr(given, field.name), bool):
                    raise wrong_type(f"{name}.{field.name}", "True or False", getattr(given, field.name), "set_state_dict_type")
            if getattr(given, "_use_dtensor", False):
                raise UsageError(
                    explain(
                        "DTensors in sharded state dicts are not available in this version.",
                        expected=f"{type(given).__name__}() without _use_dtensor",
                        got=f"{given}",
                        where=f"set_state_dict_type(..., {name})",
                        fix="leave it out: the values are ShardedTensors, which torch.distributed.checkpoint takes as they are",
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
        for instance in instances_in(module):
            instance._state_settings = StateDictSettings(kind, model_config, optim_config)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the form of state dicts of the instances in ``module``; raises UsageError where they differ or there is none."""
        require_module(module, "get_state_dict_type")
        found = [instance._state_settings for instance in instances_in(module)]
        if not found or any(settings != found[0] for settings in found):
            raise AssertedUsageError(
                explain(
                    "There is no one form of state dict.",
                    expected="at least one FullyShardedDataParallel in the module, all of them with one form",
                    got=f"{len(found)} instances with {len({settings.state_dict_type for settings in found})} forms",
                    where=type(module).__name__,
                    fix="set one for all: FullyShardedDataParallel.set_state_dict_type(module, ...)",
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
        instances = instances_in(module)
        before = [instance._state_settings for instance in instances]
        StateDicts.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for instance, settings in zip(instances, before, strict=True):
                instance._state_settings = settings

    # -- the model

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state under the names it had before wrapping, in the form that is set.

        FULL_STATE_DICT (default): whole tensors, copies; collective, one unit gathered at a time. SHARDED_STATE_DICT: this rank's
        part of each parameter, as boxes that view its shard; nothing is sent.
        """
        destination, prefix, keep_vars = _state_dict_arguments(*args, **kwargs)
        if not self._unit.lent:
            self._runtime.require_idle("state_dict")
            self._runtime.rest()
        first = len(destination)
        self._unit.in_state_dict = True
        try:
            super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        finally:
            self._unit.in_state_dict = False
        settings = self._state_settings
        config: Any = settings.state_dict_config
        keep = not getattr(config, "rank0_only", False) or self._settings.mesh.is_first
        own = list(destination)[first:]
        sharded = set() if self._unit.lent else {f"{prefix}{FSDP_WRAPPED_MODULE}.{name}" for name in self._sharded_names()}
        values = {clean_name(key): destination.pop(key) for key in own if key not in sharded}
        for key in own:
            destination.pop(key, None)
        base = clean_name(prefix)
        for name, exact in self._exact_buffers():
            if base + name in values:
                values[base + name] = exact
        if self._unit.lent:  # inside of summon_full_params the traversal has met whole parameters
            pass
        elif settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            values.update((base + name, value) for name, value in full_entries(self._unit, config.offload_to_cpu, keep))
        else:
            values.update((base + name, v) for name, v in sharded_entries(self._unit, self._settings.group, config.offload_to_cpu))
        if not keep:
            values = {}
        elif getattr(config, "offload_to_cpu", False):
            values = {
                k: v.cpu() if isinstance(v, torch.Tensor) and v.device.type not in ("cpu", "meta") else v for k, v in values.items()
            }
        for key in in_module_order(list(values), self._names_in_order(base)):
            destination[key] = values[key]
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            for key in [key for key in metadata if key.startswith(prefix)]:
                metadata.setdefault(clean_name(key), metadata[key])
        return destination

    def _sharded_names(self) -> set[str]:
        """The names under which the wrapped module's state dict holds, or misses, managed parameters in their sharded form.

        Activation checkpointing's wrapper takes itself out of the names at one time and not at another: both are here.
        """
        managed = {id(target) for group in self._unit.groups for target, _ in group.store.targets}
        raw = {
            f"{path}.{attribute}".lstrip(".")
            for path, child in self._fsdp_wrapped_module.named_modules(remove_duplicate=False)
            for attribute, parameter in child._parameters.items()
            if id(parameter) in managed
        }
        return raw | {without_checkpoint_wrapper(name) for name in raw}

    def _exact_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The names of buffers that are kept in another dtype than the user's model has them, with what they are in that."""
        exact = self._unit.buffers.in_full() if self._unit.buffers is not None else {}
        for path, child in self._fsdp_wrapped_module.named_modules(remove_duplicate=False) if exact else ():
            for name in child._buffers:
                if (id(child), name) in exact:
                    yield clean_name(f"{path}.{name}".lstrip(".")), exact[id(child), name]

    def _names_in_order(self, base: str) -> list[str]:
        """The keys of the wrapped module's state dict, as they came before anything was wrapped."""
        modules = [(clean_name(path), child) for path, child in self.named_modules(remove_duplicate=False)]
        order: dict[str, list[str]] = {}
        for path, child in modules:
            if isinstance(child, StateDicts):  # inner instances know what their modules had
                order.update((".".join(filter(None, (path, inner))), names) for inner, names in child._attribute_order.items())
        names = []
        for path, child in modules:
            if not isinstance(child, StateDicts):
                start = f"{base}{path}." if path else base
                attributes = dict.fromkeys((*order.get(path, ()), *child._parameters, *child._buffers, "_extra_state"))
                names += [start + attribute for attribute in attributes]
        return names

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict under the names the model had before wrapping: full, or sharded in any way; its values say which.

        With full values nothing is sent: every rank copies its part. Parameters are written in place, also with ``assign``.
        """
        self._runtime.require_idle("load_state_dict")
        self._runtime.rest()
        if not isinstance(state_dict, Mapping):
            raise TypeUsageError(
                explain(
                    "This is no state dict.",
                    expected="a dict from names to tensors, as state_dict() returns it",
                    got=f"a {type(state_dict).__name__}",
                    where="load_state_dict(state_dict)",
                    fix="pass the loaded dict, on every rank",
                )
            )
        require_bools("load_state_dict", strict=strict, assign=assign)
        state_dict = self._without_ddp_prefix(state_dict)
        self._refuse_values(state_dict, strict)
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except FsdpCompatError:
            raise
        except RuntimeError as error:  # torch says where things are here
            raise self._not_loaded(str(error).replace(f"{FSDP_WRAPPED_MODULE}.", "")) from error

    def _refuse_values(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Raise CheckpointError, before anything changes, if a parameter's value is missing (``strict``) or cannot be its value."""
        missing: list[str] = []
        by_name = {clean_name(str(key)): value for key, value in state_dict.items()}
        errors = [f"the key {key!r} is not a name" for key in state_dict if not isinstance(key, str)]
        if not errors:
            for named in named_units(self):
                if not named.unit.lent:
                    check_unit(named.unit, by_name, named.prefix, missing, errors)
            for name, tensor in self._others().items():
                if tensor is not None and name in by_name:  # where a class of the user's loads by itself there is none
                    wrong = wrong_value(name, by_name[name], tuple(tensor.shape), tensor.dtype)
                    errors += [wrong] if wrong else []
        if strict and (missing or errors or self._loads_plainly()):
            others = self._others()
            if not errors:  # modules of torch forgive that these are missing
                by_name.update((name, None) for name in others if name.endswith("num_batches_tracked"))
            missing = [name for name in self._names_in_order("") if name in missing or (name in others and name not in by_name)]
            known = {*self._names_in_order(""), *(clean_name(name) for name, _ in self.named_parameters(remove_duplicate=False))}
            unexpected = [key for key in state_dict if clean_name(str(key)) not in known]
            for kind, keys in (("Unexpected", unexpected), ("Missing", missing)):
                if keys:
                    errors.insert(0, f"{kind} key(s) in state_dict: " + ", ".join(f'"{key}"' for key in keys) + ". ")
        if errors:
            lines = "\n\t".join(errors)
            raise self._not_loaded(f"Error(s) in loading state_dict for {type(self._fsdp_wrapped_module).__name__}:\n\t{lines}")

    def _loads_plainly(self) -> bool:
        """True if nobody changes keys on their way: what is missing or unknown can be said beforehand."""
        return all(
            type(child)._load_from_state_dict.__module__.startswith("torch.")
            and all(
                getattr(hook, "hook", hook) in (_before_load, hooks.before_loading)
                for hook in child._load_state_dict_pre_hooks.values()
            )
            for child in self.modules()
        )

    def _others(self) -> dict[str, torch.Tensor | None]:
        """What this module's state dict holds beside the units' parameters, by key; None for extra state."""
        found: dict[str, torch.Tensor | None] = {}
        managed = {id(target) for named in named_units(self) for group in named.unit.groups for target, _ in group.store.targets}
        for path, child in self.named_modules(remove_duplicate=False):
            saved: dict[str, torch.Tensor | None] = {
                name: tensor
                for name, tensor in (*child._parameters.items(), *child._buffers.items())
                if tensor is not None and id(tensor) not in managed and name not in child._non_persistent_buffers_set
            }
            if type(child).get_extra_state is not nn.Module.get_extra_state:
                saved["_extra_state"] = None
            own_way = not type(child)._load_from_state_dict.__module__.startswith("torch.")
            found.update((clean_name(f"{path}.{name}".lstrip(".")), None if own_way else t) for name, t in saved.items())
        return found

    def _not_loaded(self, what: str) -> CheckpointError:
        return CheckpointError(
            explain(
                what,
                expected="a state dict of this model, full or sharded, with the names it had before wrapping",
                got="the differences above",
                where=self._unit.label,
                fix="load what state_dict() of the same model gave (of a file with more in it, the entry that holds the model); "
                "strict=False lets keys differ, not shapes",
            )
        )

    def _without_ddp_prefix(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """What DistributedDataParallel saved has names that begin with ``module.``."""
        inner = self._fsdp_wrapped_module
        own = {*inner._modules, *inner._parameters, *inner._buffers}
        if not state_dict or "module" in own or not all(str(key).startswith("module.") for key in state_dict):
            return state_dict
        without = collections.OrderedDict(state_dict)
        if (metadata := getattr(state_dict, "_metadata", None)) is not None:
            setattr(without, "_metadata", metadata.copy())
        consume_prefix_in_state_dict_if_present(without, "module.")
        return without


def _default_settings(kind: StateDictType) -> StateDictSettings:
    if kind is StateDictType.FULL_STATE_DICT:
        return StateDictSettings(kind, FullStateDictConfig(), FullOptimStateDictConfig())
    return StateDictSettings(kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


def _state_dict_arguments(*args: Any, **kwargs: Any) -> tuple[Any, str, bool]:
    """Return (destination, prefix, keep_vars) from nn.Module.state_dict's arguments; positional ones are its older form."""
    names = ("destination", "prefix", "keep_vars")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(args) > len(names) or len(given) < len(args) + len(kwargs) or not given.keys() <= set(names):
        raise wrong_type("arguments", "destination=, prefix= and keep_vars=, each once", (args, kwargs), "state_dict")
    destination = given.get("destination")
    if not isinstance(given.get("prefix") or "", str):
        raise wrong_type("prefix", "a string", given["prefix"], "state_dict")
    if destination is not None and not isinstance(destination, MutableMapping):
        raise wrong_type("destination", "a dict, or None", destination, "state_dict")
    if destination is None:
        destination = collections.OrderedDict()
        setattr(destination, "_metadata", collections.OrderedDict())  # as nn.Module.state_dict has it
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
    """Take this unit's parameters out of what is loaded, and hand the rest on under the wrapped module's names."""
    self = typing.cast(StateDicts, instance)
    inner = f"{prefix}{FSDP_WRAPPED_MODULE}."
    for key in [key for key in state_dict if key.startswith(prefix)]:
        clean = prefix + clean_name(key[len(prefix) :])
        if clean != key:
            state_dict[clean] = state_dict.pop(key)
    if not self._unit.lent:
        load_unit(self._unit, state_dict, prefix, missing_keys, error_msgs)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)
    # The sharded forms are registered in the modules, which will miss them.
    self._unit.in_state_dict = True  # until _after_load
    if self._unit.buffers is not None:
        self._unit.buffers.follow(1)
    self._loading = prefix, set() if self._unit.lent else {inner + name for name in self._sharded_names()}


def _after_load(instance: nn.Module, incompatible: Any) -> None:
    """What is reported are the names before wrapping, and nothing that only exists because of it.

    The outermost instance cleans the names: it still has to recognise sharded forms of its own that inner modules hold (ties).
    """
    self = typing.cast(StateDicts, instance)
    self._unit.in_state_dict = False
    if self._unit.buffers is not None:
        self._unit.buffers.follow(0)
    prefix, sharded = self._loading
    outermost = self._unit.is_root or not prefix
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [clean_name(key) if outermost and key.startswith(prefix) else key for key in keys if key not in sharded]
    self._loading = "", set()


def names_before(model: nn.Module) -> list[str]:
    """The names of a model's parameters, in the order they had before anything was wrapped."""
    outermost = [(name, child) for name, child in model.named_modules() if isinstance(child, StateDicts)]
    if outermost and outermost[0][1] is model:
        return outermost[0][1]._names_in_order("")
    names = []
    for path, child in model.named_modules():
        if isinstance(child, StateDicts) and child._unit.is_root:
            names += child._names_in_order(f"{clean_name(path)}.")
    return names


def named_units(model: nn.Module) -> list[NamedUnit]:
    """The units in a model, which need not be one itself, with what their parameters' names begin with."""
    found = []
    for name, child in model.named_modules():
        if isinstance(child, StateDicts):
            prefix = clean_name(name)
            found.append(NamedUnit(child._unit, f"{prefix}." if prefix else ""))
    return found


def instances_in(module: nn.Module) -> list[StateDicts]:
    return [child for child in module.modules() if isinstance(child, StateDicts)]
