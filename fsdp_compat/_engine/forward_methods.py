"""Methods of a sharded module that run like forward, such as ``generate``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from .runtime import Runtime
from .unit import Unit


def run_as_forward(
    locate: Callable[[], tuple[Runtime, Unit]],
    method: Callable[..., Any],
    *,
    synced: bool | None,
) -> Callable[..., Any]:
    """Return a function that runs a method of a unit's module like its forward.

    locate: returns the unit and its runtime. synced: see ``register_fsdp_forward_method``.

    Collective: each call of the returned function.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        runtime, unit = locate()
        in_rounds = not torch.is_grad_enabled() if synced is None else synced
        output = runtime.run_method(unit, method, args, kwargs, in_rounds)
        return _steps(runtime, unit, output) if inspect.isgenerator(output) else output

    return functools.update_wrapper(run, method)


def _steps(runtime: Runtime, unit: Unit, generator: Generator[Any, Any, Any]) -> Iterator[Any]:
    """Yield a generator's items. Each step runs like a forward and is collective."""
    end = object()
    while (item := runtime.run(unit, next, (generator, end), {})) is not end:
        yield item
