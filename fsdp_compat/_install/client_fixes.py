"""Fixes of client bugs that make results wrong with any FSDP1, applied to the affected versions
when the client's module is imported.

PEFT saves empty adapters of models whose inner modules are wrapped, and loads nothing into them.
Accelerate takes the wrapper out of a compiled model when it unwraps it, for good, and saves and
loads compiled models on rank 0 alone."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .._engine.on_import import PatchOnImport
from .._engine.patches import Undo, around_function
from .._state.units import clean_name
from ..api import FullStateDictConfig, StateDictType
from ..fully_sharded_data_parallel import FullyShardedDataParallel
from . import log


@dataclasses.dataclass(frozen=True)
class _Fix:
    package: str
    versions: tuple[tuple[int, int], tuple[int, int]]  # the first, and the last that was tried
    functions: tuple[str, ...]  # of the module
    call: Callable[..., Any]  # instead of a function, which it gets as its first argument
    what: str


# -- PEFT


def _prefixes(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> set[str]:
    return {clean_name(prefix) for prefix in inner(*args, **kwargs)}


def _load_adapter(inner: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        return inner(model, *args, **kwargs)
    with _clean_parameter_names(model), _full_state_dicts_on_all_ranks(model):
        return inner(model, *args, **kwargs)


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


def _unwrap(inner: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    wrapper = _wrapper_in(model)
    found = inner(model, *args, **kwargs)
    if wrapper is not None and model._modules.get("_orig_mod") is not wrapper:
        found = model._modules["_orig_mod"]
        model._modules["_orig_mod"] = wrapper
    return found


def _of_wrapper(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(inner).bind(*args, **kwargs)
    model = given.arguments["model"]
    given.arguments["model"] = _wrapper_in(model) or model
    return inner(*given.args, **given.kwargs)


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


def _apply(module: types.ModuleType) -> list[Undo]:
    fix = _FIXES[module.__name__]
    version = importlib.metadata.version(fix.package)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    first, last = fix.versions
    if not first <= numbers <= last:
        log.changed("%s %s was not tried, and stays as it is: %s", fix.package, version, fix.what)
        return []
    log.changed("%s %s fixed: %s", fix.package, version, fix.what)
    names = [name for name in fix.functions if name in vars(module)]
    return [around_function(module, name, fix.call) for name in names]


PATCHES = [PatchOnImport(name, _apply) for name in _FIXES]
