"""Every hook the engine registers, each a thin line to the runtime. What registers returns how to
take back."""

from __future__ import annotations

import typing
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch_private
from .dtypes import cast_floats, tensors_in

if typing.TYPE_CHECKING:
    from .unit import Call, Group, Unit

__all__ = [
    "attach_unit",
    "before_loading",
    "cast_again",
    "cast_around",
    "guard_state_dicts",
    "on_assignment",
    "on_end_of_backward",
    "on_gradient_of_leaf",
    "on_gradient_of_output",
    "without_fast_path",
]


def attach_unit(unit: Unit) -> Callable[[], None]:
    """Bracket the forward calls of the unit's module, for front ends that do not wrap it. Return
    the undo."""
    calls: list[Call] = []
    unit.is_called_itself()

    def before(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        assert unit.runtime is not None
        calls.append(unit.runtime.call(unit))
        return unit.runtime.enter(calls[-1], unit, args, kwargs)

    def after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert unit.runtime is not None
        if calls:
            unit.runtime.exit(calls.pop(), unit, output)

    handles: list[RemovableHandle] = [
        unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        unit.module.register_forward_hook(
            after, always_call=True
        ),  # after an exception too, with None
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


class _CastAround:
    """Casts the inputs of a module's forward, and its outputs back."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._given: torch.dtype | None = (
            None  # of the first floating-point input of the running call
        )

    def before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        self._given = next(
            (t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()), None
        )
        return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output if self._given is None else cast_floats(output, self._given)


def cast_around(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let a module compute in ``dtype`` whatever it is called with, and return what it computed in
    the dtype it was given."""
    cast = _CastAround(dtype)
    module.register_forward_pre_hook(cast.before, with_kwargs=True)
    module.register_forward_hook(cast.after)


def cast_again(module: torch.nn.Module, dtype_of: Callable[[torch.nn.Module], torch.dtype]) -> None:
    """Let a module that ``cast_around`` was called for, if it is one, compute in
    ``dtype_of(module)`` from now on."""
    for hook in module._forward_hooks.values():
        cast = getattr(hook, "__self__", None)
        if isinstance(cast, _CastAround):
            cast.dtype = dtype_of(module)


def _nothing(module: torch.nn.Module, args: Any) -> None:
    pass


def without_fast_path(module: torch.nn.Module) -> None:
    """Keep a transformer layer of torch from reading its submodules' parameters by itself: it does
    not if there are hooks."""
    module.register_forward_pre_hook(_nothing)


def guard_state_dicts(unit: Unit) -> None:
    """Nobody takes parts of parameters for the whole: modules of the unit refuse what did not come
    through the front end.

    The hooks find the unit by the module: they are copied with it, and a copy may belong to another
    unit, or to none.
    """
    for module in unit.holders():
        if module not in _guarded:
            module.register_state_dict_pre_hook(_before_taking)
            module.register_load_state_dict_pre_hook(before_loading)
            _guarded[module] = []
        _guarded[module].append(weakref.ref(unit))


_guarded: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # modules, with weak references to the units whose parameters they hold


def _before_taking(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    _require_state_dict(module, "state_dict")


def before_loading(module: torch.nn.Module, *_: Any) -> None:
    """The hook on loading that ``guard_state_dicts`` registers."""
    _require_state_dict(module, "load_state_dict")


def _require_state_dict(module: torch.nn.Module, method: str) -> None:
    for reference in _guarded.get(module, ()):
        unit = reference()
        if unit is not None:
            unit.require_state_dict(module, method)


def on_assignment(
    callback: Callable[[torch.nn.Module, str, torch.nn.Parameter], torch.nn.Parameter | None],
) -> RemovableHandle:
    """Whenever a module, whichever, is given a parameter, let ``callback(module, name, parameter)``
    say what else to put there.

    It changes nn.Module for the whole process. The undo: remove() on what is returned.
    """
    return torch.nn.modules.module.register_module_parameter_registration_hook(callback)  # type: ignore[arg-type]


def on_gradient_of_output(tensor: torch.Tensor, call: Call) -> None:
    """The pre-backward of a call: the gradient of one of its outputs is complete."""

    def hook(grad: torch.Tensor) -> None:
        unit = call.unit or call.hold_unit()
        assert unit.runtime is not None
        unit.runtime.pre_backward(call, unit)

    tensor.register_hook(hook)


def on_gradient_of_leaf(
    unit: Unit, group: Group, index: int, unsharded_param: torch.Tensor
) -> None:
    """A large leaf's gradient was accumulated: it moves on at once.

    The group holds the leaf, and the garbage collector does not see what torch holds for a leaf:
    the hook holds neither.
    """
    its_unit, its_group = weakref.ref(unit), weakref.ref(group)

    def hook(unsharded_param: torch.Tensor) -> None:
        unit, group = its_unit(), its_group()
        if (
            unit is not None and unit.runtime is not None and group is not None
        ):  # a graph may outlive them
            unit.runtime.on_gradient(group, index, typing.cast(torch.nn.Parameter, unsharded_param))

    unsharded_param.register_post_accumulate_grad_hook(hook)


def on_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` at the end of the running graph task; never, if the task raises."""
    _torch_private.on_end_of_backward(callback)
