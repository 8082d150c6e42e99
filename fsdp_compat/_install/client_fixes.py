"""Fixes of client bugs that make results wrong with any FSDP1, made when the client's module is
imported. They do nothing where there is no such bug, and so do not ask for versions.

PEFT saves empty adapters of models whose inner modules are wrapped, and loads nothing into them.
Accelerate takes the wrapper out of a compiled model when it unwraps it, for good, and saves and
loads compiled models on rank 0 alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .._state.units import clean_name
from .._torch_patches.patches import PatchOnImport, Undo, around_functions
from ..api import FullStateDictConfig, StateDictType
from ..fully_sharded_data_parallel import FullyShardedDataParallel
from . import log


@dataclasses.dataclass(frozen=True)
class _Fix:
    functions: tuple[str, ...]  # of the module
    call: Callable[..., Any]  # instead of a function, which it gets as its first argument
    what: str
    also: tuple[str, ...] = ()  # further functions, which need not be there


def _model_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
    """Return the model that a client's function is called with, whatever the argument's name."""
    return next((each for each in (*args, *kwargs.values()) if isinstance(each, nn.Module)), None)


# -- PEFT


def _adapter(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model = _model_in(args, kwargs)
    modules = () if model is None else model.modules()
    if model is None or not any(isinstance(each, FullyShardedDataParallel) for each in modules):
        return inner(*args, **kwargs)
    with _clean_names(model), _full_state_dicts_on_all_ranks(model):
        return inner(*args, **kwargs)


@contextlib.contextmanager
def _clean_names(model: Any) -> Iterator[None]:
    """Names of modules and parameters without the wrapper's prefixes, as state dicts have them."""

    def cleaned(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return ((clean_name(name), value) for name, value in method(*args, **kwargs))

    methods = ("named_modules", "named_parameters")
    for name in methods:
        setattr(model, name, functools.partial(cleaned, getattr(model, name)))
    try:
        yield
    finally:
        for name in methods:
            delattr(model, name)


def _full_state_dicts_on_all_ranks(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """With ``rank0_only`` the other ranks would find no names to load."""
    kind = FullyShardedDataParallel.get_state_dict_type(model).state_dict_type
    if kind is not StateDictType.FULL_STATE_DICT:
        return contextlib.nullcontext()
    return FullyShardedDataParallel.state_dict_type(model, kind, FullStateDictConfig())


# -- Accelerate


def _wrapper_in(model: Any) -> FullyShardedDataParallel | None:
    """Return the wrapper that torch.compile has wrapped."""
    held = getattr(model, "_modules", {}).get("_orig_mod")
    return held if isinstance(held, FullyShardedDataParallel) else None


def _unwrap(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model: Any = _model_in(args, kwargs)
    wrapper = _wrapper_in(model)
    found = inner(*args, **kwargs)
    if wrapper is not None and model._modules.get("_orig_mod") is not wrapper:
        found = model._modules["_orig_mod"]
        model._modules["_orig_mod"] = wrapper
    return found


def _of_wrapper(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model = _model_in(args, kwargs)
    wrapper = _wrapper_in(model) or model
    given = {name: wrapper if each is model else each for name, each in kwargs.items()}
    return inner(*(wrapper if each is model else each for each in args), **given)


_FIXES = {
    "peft.utils.save_and_load": _Fix(
        ("set_peft_model_state_dict",),
        _adapter,
        "adapters of models with wrapped inner modules are saved, not empty, and loaded",
        also=("get_peft_model_state_dict",),
    ),
    "accelerate.utils.other": _Fix(
        ("extract_model_from_parallel",),
        _unwrap,
        "unwrapping a compiled model leaves its wrapper in place",
    ),
    "accelerate.utils.fsdp_utils": _Fix(
        ("save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer"),
        _of_wrapper,
        "compiled models are saved and loaded on all ranks",
    ),
}


def _apply(module: types.ModuleType) -> list[Undo]:
    """Fix the functions that are there, also where they were imported before; warn of others."""
    name, fix = module.__name__, _FIXES[module.__name__]
    there = [each for each in fix.functions + fix.also if callable(vars(module).get(each))]
    if missing := [each for each in fix.functions if each not in there]:
        with contextlib.suppress(UserWarning):  # as an error, it would fail the client's import
            warnings.warn(
                f"{name} has no {' and no '.join(missing)}, so fsdp_compat cannot make sure that "
                f"{fix.what}. To do: check such files once, or use a version of the client that is "
                "named in examples/MIGRATING.md.",
                stacklevel=2,
            )
    for each in there:
        log.logger.info("%s.%s fixed: %s", name, each, fix.what)
    return around_functions(module, dict.fromkeys(there, fix.call))


PATCHES = [PatchOnImport(name, _apply) for name in _FIXES]
