"""Recognises optimizers that are wrong on shards, because they need whole parameters: what their
update of a parameter depends on is tried out on small ones."""

from __future__ import annotations

import contextlib
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _torch_private
from .dry_run import without_compiling
from .optim_contents import CompositeOptimizer

# Every element's update depends on its own gradients alone. Subclasses may differ.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD", "SparseAdam"),
    )
)
_LR = 0.01  # instead of a schedule's first one, which may be 0
_OWN = frozenset({"params", "param_names", "lr", "initial_lr"})  # what groups may differ in
_NUM_STEPS = 8  # until step sizes that are estimated have grown
_MAX_SIZE = 24  # of a dim
_TOLERANCE = 1e-3  # relative to the largest update; another order of sums stays below
_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()

Make = Callable[[list[nn.Parameter]], Optimizer]


def is_elementwise(optimizer: Optimizer) -> bool:
    """True if every element's update is known to depend on its own gradients alone."""
    return type(optimizer) in _ELEMENTWISE


def warn_of_parts(
    optimizer: Optimizer, shapes: Mapping[int, tuple[tuple[int, ...], bool]], stacklevel: int
) -> None:
    """Warn, once, if the optimizer would compute something else for whole parameters, which is
    tried on small ones, or if a choice by shape may have left a group empty. shapes: by the number
    of a group, a whole parameter of which it has a part; and whether its parts are rows."""
    if isinstance(optimizer, CompositeOptimizer) or optimizer in _told:
        return
    _told.add(optimizer)
    groups = optimizer.param_groups
    is_flat = [len(shape) > groups[at]["params"][0].dim() == 1 for at, shape in shapes.items()]
    if any(is_flat) and not all(group["params"] for group in groups):
        warnings.warn(
            f"A parameter group of {type(optimizer).__name__} is empty. If it was chosen by shape: "
            "parameters of a wrapped model have one dim, so that weight decay may apply to none. "
            "Choose them before wrapping, with use_orig_params=True.",
            stacklevel=stacklevel,
        )
    if is_elementwise(optimizer):
        return
    tried: set[str] = set()
    for number, (shape, are_rows) in shapes.items():
        group, small = optimizer.param_groups[number], small_shape(shape)
        settings = {key: value for key, value in group.items() if key not in _OWN}
        kind = repr((small, settings, are_rows))
        if isinstance(group.get("lr"), (int, float, torch.Tensor)):
            settings["lr"] = _LR
        example = group["params"][0]
        if kind not in tried and (text := _unfit(optimizer, settings, small, example, are_rows)):
            warnings.warn(f"{text} (parameter group {number})", stacklevel=stacklevel)
            return
        tried.add(kind)


def _unfit(
    optimizer: Optimizer,
    settings: dict[str, Any],
    shape: tuple[int, ...],
    example: torch.Tensor,
    are_rows: bool,
) -> str:
    """Return what is wrong with an optimizer of these settings on shards, or ""."""
    name = type(optimizer).__name__

    def make(params: list[nn.Parameter]) -> Optimizer:
        return type(optimizer)([{**settings, "params": params}])  # type: ignore[call-arg]

    if not depends_on_shape(make, shape, example.device, are_rows):
        return ""
    text = f"fsdp_compat.optim.GatheredOptimizer(model, lambda params: {name}(params, ...))"
    fix = f"Use {text}, which steps whole parameters."
    if not _torch_private.is_plain(example):
        return f"{name} needs whole parameters: with DTensors it gathers them, or raises. {fix}"
    if depends_on_others(make, shape, example.device):
        fix = "It needs all parameters at once; use another optimizer."
    elif not are_rows and not depends_on_shape(make, shape, example.device, by_rows=True):
        fix += (
            " Or wrap with use_orig_params=True and shard_blocks=lambda name, p: "
            "math.prod(p.shape[1:]), which cuts between rows."
        )
    return (
        f"{name} is wrong on shards: its update of a part of a parameter is not that part of the "
        f"update of the whole. {fix}"
    )


# -- trials


def small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with as many dims that is quick to try, not square."""
    sizes = (min(size, _MAX_SIZE - 4 * number) for number, size in enumerate(shape[:4]))
    return tuple(max(size, 2) for size in sizes)


def depends_on_others(make: Make, shape: tuple[int, ...], device: torch.device) -> bool | None:
    """True if a parameter gets another update beside a second one, as where a norm or a step size
    is that of all. None if it cannot be tried. Random states are kept."""
    alone, beside = _updates(make, device, [shape]), _updates(make, device, [shape, shape])
    return None if alone is None or beside is None else _differ(alone[0], beside[0])


def depends_on_shape(
    make: Make, shape: tuple[int, ...], device: torch.device, by_rows: bool = False
) -> bool | None:
    """True if parts of a parameter, 1-D or ``by_rows``, get other updates than the whole, in
    optimizers of their own as on ranks, or none at all. None if it cannot be tried."""
    whole = _updates(make, device, [shape])
    if whole is None:
        return None
    cuttable = shape if by_rows else (whole[0].numel(),)
    cut = max(cuttable[0] // 3, 1)

    def of_part(run: slice) -> list[Tensor] | None:
        return _updates(make, device, [shape], lambda value: value.view(cuttable)[run])

    parts = of_part(slice(cut)), of_part(slice(cut, None))
    found = [part[0].reshape(-1) for part in parts if part is not None]
    return len(found) < len(parts) or _differ(whole[0].reshape(-1), torch.cat(found))


def _differ(one: Tensor, other: Tensor) -> bool:
    largest = torch.maximum(one.abs().amax(), other.abs().amax())
    return bool((one - other).abs().amax() > _TOLERANCE * largest)


def _updates(
    make: Make,
    device: torch.device,
    shapes: Sequence[tuple[int, ...]],
    part: Callable[[Tensor], Tensor] = lambda value: value,
) -> list[Tensor] | None:
    """Return the sum of some updates of a ``part`` of each parameter; None if a step fails."""
    with _own_random_state(device), torch.enable_grad(), without_compiling():
        values = [_random(shape, number) for number, shape in enumerate(shapes)]
        # Much the same in each step, as then estimated step sizes grow. The second parameter's are
        # large, so that clipping by the norm of all shows.
        grads = [
            [
                (_random(shape, 100 + number) + 0.1 * _random(shape, 1000 * step + number))
                * 1e4**number
                for number, shape in enumerate(shapes)
            ]
            for step in range(1, _NUM_STEPS + 1)
        ]
        values = [part(value).clone() for value in values]
        params = [nn.Parameter(value.to(device, copy=True)) for value in values]
        try:
            optimizer = make(params)
            for step, of_step in enumerate(grads):
                for param, grad in zip(params, of_step, strict=True):
                    param.grad = part(grad).to(device, copy=True)
                _seed(step, device)
                _step(optimizer)
        except Exception:  # of the user's optimizer, which may raise anything
            return None
    return [param.detach().cpu() - value for param, value in zip(params, values, strict=True)]


@contextlib.contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    """A context after which the random states of Python, the CPU and ``device`` are as before."""
    state, devices = random.getstate(), [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield
    random.setstate(state)


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def _step(optimizer: Optimizer) -> None:
    """Step without the hooks that users register for all optimizers."""
    step = _torch_private.step_without_hooks(optimizer)
    try:
        step(optimizer)
    except TypeError:  # it needs a closure
        step(optimizer, lambda: 0.0)


def _random(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu")
