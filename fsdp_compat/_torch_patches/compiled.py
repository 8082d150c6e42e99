"""State dicts have names without the part that torch.compile adds, and load into compiled modules:
torch's own code expects that part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from .. import _torch_private
from .._state.units import COMPILED_MODULE, clean_name
from .patches import PatchOnImport, around_functions, around_method


def _load(original: Any, module: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    inner = f"{prefix}{COMPILED_MODULE}."
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(inner)]:
        state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)
    original(state_dict, prefix, *rest)


def _names(
    original: Callable[..., set[str]], model: Any, name: str, *rest: Any, **more: Any
) -> Any:
    with contextlib.suppress(AssertionError):  # raised for names without the part
        return {clean_name(each) for each in original(model, name, *rest, **more)}
    return {clean_name(name)}


patches = (
    PatchOnImport(
        "torch._dynamo.eval_frame",
        lambda its: [around_method(its.OptimizedModule, "_load_from_state_dict", _load)],
    ),
    PatchOnImport(
        "torch.distributed.checkpoint.state_dict",
        lambda its: around_functions(its, {_torch_private.NAMES_FUNCTION: _names}),
    ),
)
