"""Modules that have a say in state dicts, by hooks or methods of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .._engine.module_view import is_marked
from .._engine.state_store import store_of
from .._engine.unit import Unit
from ..errors import FsdpCompatError, StateError
from .summon import show
from .units import ATTRIBUTE, model_unit_of, owners_in

# Whose hooks and methods change no entry; those of activation checkpointing only rename it.
_NEUTRAL = (__name__.partition(".")[0], "torch.distributed.algorithms._checkpoint")


def _is_foreign(hooks: Mapping[int, Any]) -> bool:
    owners = (getattr(hook, "hook", hook) for hook in hooks.values())  # torch wraps some
    return not all(str(getattr(each, "__module__", "")).startswith(_NEUTRAL) for each in owners)


def overrides(module: nn.Module, *names: str) -> bool:
    """True if a class of the module, or the module itself, has its own method of such a name."""
    kinds = [base for base in type(module).__mro__ if base is not nn.Module]
    places = [vars(kind) for kind in kinds if not kind.__module__.startswith(_NEUTRAL)]
    own = vars(module) if ATTRIBUTE not in vars(module) else {}  # torch patches whole models
    return any(name in place for place in (own, *places) for name in names)


def saves_in_own_way(module: nn.Module) -> bool:
    """True if what the module puts in state dicts may depend on values of parameters."""
    hooks = {**module._state_dict_hooks, **module._state_dict_pre_hooks}
    # Extra state of fully_shard's modules knows DTensors.
    extra = ("get_extra_state",) if is_marked(module) else ()
    return overrides(module, "state_dict", "_save_to_state_dict", *extra) or _is_foreign(hooks)


def loads_in_own_way(module: nn.Module) -> bool:
    """True if the module may take other entries than those of its parameters and buffers."""
    hooks = {**module._load_state_dict_pre_hooks, **module._load_state_dict_post_hooks}
    loader = type(module)._load_from_state_dict.__module__
    is_own = not loader.startswith(("torch.nn.", *_NEUTRAL)) or overrides(module, "load_state_dict")
    return is_own or _is_foreign(hooks)


def units_with_say(model: nn.Module, has_say: Callable[[nn.Module], bool]) -> set[Unit]:
    """Return the units that are not summoned, and in which a module has a say."""
    owners, named = owners_in(model), model.named_modules(remove_duplicate=False)
    found = map(model_unit_of, {owners[path] for path, child in named if has_say(child)})
    return {each.unit for each in found if each is not None and not each.unit.summoned}


def exact_buffers_of(unit: Unit) -> contextlib.AbstractContextManager[None]:
    """A context in which a unit's buffers have the dtypes that state dicts have."""
    return contextlib.nullcontext() if unit.buffers is None else unit.buffers.uncast()


class StandIn(torch.Tensor):
    """A parameter, or what a module made of it, without values: on the meta device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("cpu", "cuda", "to"):  # nothing to move
            return args[0]
        return super().__torch_function__(func, (cls,), args, kwargs)  # type: ignore[no-untyped-call]

    @staticmethod
    def of(shape: tuple[int, ...], dtype: torch.dtype) -> StandIn:
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(StandIn)


@contextlib.contextmanager
def stand_ins(units: Iterable[Unit]) -> Generator[list[torch.Tensor], None, None]:
    """A context in which modules show stand-ins. Raises StateError if one reads a value."""
    with contextlib.ExitStack() as stack:
        for unit in [unit for unit in units if not unit.summoned]:
            unit.view.begin_summon()
            stack.callback(unit.view.end_summon)
            for store in map(store_of, unit.groups):
                shapes = map(store.shape, range(len(store.orig_params)))
                show(store, [nn.Parameter(StandIn.of(each, store.dtype), False) for each in shapes])
            unit.view.keep_order()
        try:
            yield []
        except (FsdpCompatError, OSError):
            raise
        except Exception as error:
            raise StateError.of(
                "A hook or method of a module failed, which has a say in its state dict.",
                expected="one that reads no values of parameters: they have none here",
                got=f"{type(error).__name__}: {error}",
                where="LOCAL_STATE_DICT, or fsdp_compat.checkpoint",
                fix="use FULL_STATE_DICT, which shows modules whole parameters",
            ) from error
