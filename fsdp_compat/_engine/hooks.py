"""Every hook the engine registers, each a thin line to the runtime. What registers returns how to take back."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from . import torch_private

if typing.TYPE_CHECKING:
    from .unit import Call, Group, Unit

__all__ = ["attach_unit", "guard_state_dicts", "on_end_of_backward", "on_gradient_of_leaf", "on_gradient_of_output"]


def attach_unit(unit: Unit) -> Callable[[], None]:
    """Bracket the forward calls of the unit's module. Return the undo."""

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        assert unit.runtime is not None
        return unit.runtime.enter(unit, args, kwargs)

    def after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert unit.runtime is not None
        unit.runtime.exit(unit, output)

    handles: list[RemovableHandle] = [
        unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        unit.module.register_forward_hook(after, always_call=True),  # after an exception too, with None
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def guard_state_dicts(unit: Unit) -> None:
    """Nobody takes parts of parameters for the whole: modules of the unit refuse what did not come through the front end."""

    def before_taking(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        unit.require_state_dict(module, "state_dict")

    def before_loading(module: torch.nn.Module, *_: Any) -> None:
        unit.require_state_dict(module, "load_state_dict")

    for module in unit.holders():
        module.register_state_dict_pre_hook(before_taking)
        module.register_load_state_dict_pre_hook(before_loading)


def on_gradient_of_output(tensor: torch.Tensor, call: Call) -> None:
    """The pre-backward of a call: the gradient of one of its outputs is complete."""

    def hook(grad: torch.Tensor) -> None:
        assert call.unit.runtime is not None
        call.unit.runtime.pre_backward(call)

    tensor.register_hook(hook)


def on_gradient_of_leaf(unit: Unit, group: Group, index: int) -> None:
    """A large leaf's gradient was accumulated: it moves on at once."""

    def hook(leaf: torch.Tensor) -> None:
        assert unit.runtime is not None
        unit.runtime.on_gradient(group, index)

    group.leaves[index].register_post_accumulate_grad_hook(hook)


def on_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` at the end of the running graph task; never, if the task raises."""
    torch_private.on_end_of_backward(callback)
