"""Defects of clients that make results wrong with any FSDP1, fixed when the client's module is
imported, in the affected versions only.

PEFT saves empty adapters of models whose inner modules are wrapped, and loads nothing into them.
Accelerate takes the wrapper out of a compiled model when it unwraps it, for good, and saves and
loads compiled models on rank 0 alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .._state.units import clean_name
from .._torch_patches.on_import import cancel, on_import
from ..api import FullStateDictConfig, StateDictType
from ..fully_sharded_data_parallel import FullyShardedDataParallel
from . import log


@dataclasses.dataclass(frozen=True)
class _Fix:
    package: str
    versions: tuple[tuple[int, int], tuple[int, int]]  # the first, and the last that was tried
    functions: tuple[str, ...]  # of the module
    replace: Callable[[Callable[..., Any]], Callable[..., Any]]
    what: str


_replaced: list[tuple[types.ModuleType, str, Any]] = []


# -- PEFT


def _prefixes(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def cleaned(*args: Any, **kwargs: Any) -> set[str]:
        return {clean_name(prefix) for prefix in inner(*args, **kwargs)}

    return cleaned


def _load_adapter(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def load(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
            return inner(model, *args, **kwargs)
        with _clean_parameter_names(model), _full_state_dicts_on_all_ranks(model):
            return inner(model, *args, **kwargs)

    return load


@contextlib.contextmanager
def _clean_parameter_names(model: nn.Module) -> Iterator[None]:
    """Names without the wrapper's prefixes, as state dicts have them."""
    named = model.named_parameters

    def cleaned(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((clean_name(name), p) for name, p in named(*args, **kwargs))

    model.named_parameters = cleaned  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.named_parameters


@contextlib.contextmanager
def _full_state_dicts_on_all_ranks(model: nn.Module) -> Iterator[None]:
    """With ``rank0_only`` the other ranks would find no names to load."""
    settings = FullyShardedDataParallel.get_state_dict_type(model)
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()
        ):
            yield
    else:
        yield


# -- Accelerate


def _wrapper_in(model: Any) -> FullyShardedDataParallel | None:
    """Return the wrapper that torch.compile has wrapped."""
    held = getattr(model, "_modules", {}).get("_orig_mod")
    return held if isinstance(held, FullyShardedDataParallel) else None


def _unwrap(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def unwrap(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        wrapper = _wrapper_in(model)
        found = inner(model, *args, **kwargs)
        if wrapper is not None and model._modules.get("_orig_mod") is not wrapper:
            found = model._modules["_orig_mod"]
            model._modules["_orig_mod"] = wrapper
        return found

    return unwrap


def _of_wrapper(inner: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        model = bound.arguments["model"]
        bound.arguments["model"] = _wrapper_in(model) or model
        return inner(*bound.args, **bound.kwargs)

    return call


_FIXES = {
    "peft.tuners.tuners_utils": _Fix(
        "peft",
        ((0, 18), (0, 21)),
        ("_get_tuner_state_dict_key_prefixes",),
        _prefixes,
        "adapters of models with wrapped inner modules are saved, and not empty",
    ),
    "peft.utils.save_and_load": _Fix(
        "peft",
        ((0, 15), (0, 21)),
        ("set_peft_model_state_dict",),
        _load_adapter,
        "adapters are loaded into wrapped models",
    ),
    "accelerate.utils.other": _Fix(
        "accelerate",
        ((1, 0), (1, 15)),
        ("extract_model_from_parallel",),
        _unwrap,
        "unwrapping a compiled model leaves its wrapper in place",
    ),
    "accelerate.utils.fsdp_utils": _Fix(
        "accelerate",
        ((1, 0), (1, 15)),
        ("save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer"),
        _of_wrapper,
        "compiled models are saved and loaded on all ranks",
    ),
}


def patch() -> None:
    """Fix modules that are imported, and others when they are. A second call does nothing."""
    for name in _FIXES:
        on_import(name, _apply)


def undo() -> None:
    for name in _FIXES:
        cancel(name)
    while _replaced:
        module, name, before = _replaced.pop()
        setattr(module, name, before)


def _apply(module: types.ModuleType) -> None:
    fix = _FIXES[module.__name__]
    version = importlib.metadata.version(fix.package)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    first, last = fix.versions
    if not first <= numbers <= last:
        log.changed(
            "%s %s is newer or older than what was tried: it is left as it is: %s",
            fix.package,
            version,
            fix.what,
        )
        return
    for name in fix.functions:
        if (inner := vars(module).get(name)) is not None:
            _replaced.append((module, name, inner))
            setattr(module, name, fix.replace(inner))
    log.changed("%s %s fixed: %s", fix.package, version, fix.what)
