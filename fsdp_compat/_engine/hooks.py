"""All hooks that the engine registers; each only calls the runtime or the unit. Functions that
register hooks for other code return the undo."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch_private
from .group import Group
from .nested import cast_floats, map_tensors, tensors_in
from .unit import Call, Inputs, Unit


class _CastAround:
    """Casts the inputs of a module's forward, and its outputs back."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # Of the first floating-point input of the running call.
        self._input_dtype: torch.dtype | None = None

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        self._input_dtype = next(
            (t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()), None
        )
        return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output if self._input_dtype is None else cast_floats(output, self._input_dtype)


def cast_around(module: nn.Module) -> None:
    """Let a module compute in its own dtype, and return its outputs in the dtype of its inputs."""
    cast = _CastAround(_own_dtype(module))
    module.register_forward_pre_hook(cast.before, with_kwargs=True)
    module.register_forward_hook(cast.after)


def cast_again(module: nn.Module) -> None:
    """After ``cast_around``: let the module compute in its current dtype from now on."""
    for hook in module._forward_hooks.values():
        cast = getattr(hook, "__self__", None)
        if isinstance(cast, _CastAround):
            cast.dtype = _own_dtype(module)


def _own_dtype(module: nn.Module) -> torch.dtype:
    tensors = (*module.parameters(), *module.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)


WITH_FAST_PATH = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder)


def _nothing(module: nn.Module, args: Any) -> None:
    pass


def without_fast_path(module: nn.Module) -> None:
    """Keep a module of ``WITH_FAST_PATH`` from reading its submodules' parameters directly."""
    if isinstance(module, torch.nn.TransformerEncoder):
        module.use_nested_tensor = False
    else:
        module.register_forward_pre_hook(_nothing)  # the fast path is for layers without hooks


def guard_state_dicts(unit: Unit) -> None:
    """Let modules of the unit refuse state_dict and load_state_dict calls from outside the front
    end, which would treat parts of parameters as whole ones.

    The hooks look up units: they are copied with modules, and a copy may belong to another or none.
    """
    for module in unit.view.modules():
        if module not in _guarded:
            module.register_state_dict_pre_hook(_before_taking)
            module.register_load_state_dict_pre_hook(before_loading)
            _guarded[module] = []
        _guarded[module].append(weakref.ref(unit))


# {module: weak references to the units whose parameters it holds}
_guarded: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _before_taking(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    _require_state_dict(module, "state_dict")


def before_loading(module: nn.Module, *_: Any) -> None:
    """The load_state_dict hook that ``guard_state_dicts`` registers."""
    _require_state_dict(module, "load_state_dict")


def _require_state_dict(module: nn.Module, method: str) -> None:
    for reference in _guarded.get(module, ()):
        unit = reference()
        if unit is not None:
            unit.view.require_state_dict(module, method)


def on_state_dicts(
    module: nn.Module,
    before_taking: Callable[[nn.Module], None],
    before_loading: Callable[[nn.Module, dict[str, Any], str], None],
    after_loading: Callable[[], None],
) -> None:
    """Call ``before_taking(module)`` before the module's part of a state dict is taken,
    ``before_loading(module, state_dict, prefix)`` before one is loaded into the module, and
    ``after_loading()`` afterwards."""
    module.register_state_dict_pre_hook(lambda module, *_: before_taking(module))
    module.register_load_state_dict_pre_hook(
        lambda module, state_dict, prefix, *_: before_loading(module, state_dict, prefix)
    )
    module.register_load_state_dict_post_hook(lambda *_: after_loading())


def on_gradient_of_output(tensor: Tensor, call: Call) -> None:
    """Run pre-backward of a call when the gradient of one of its outputs is complete."""

    def hook(grad: Tensor) -> None:
        unit = call.unit or call.hold_unit()
        assert unit.runtime is not None
        unit.runtime.backward.pre_backward(call, unit)

    tensor.register_hook(hook)


def on_hooked_tensors(unit: Unit) -> None:
    """Let tensors that users' forward hooks on the unit's modules see leave the running calls.

    Our hooks look up the unit: they are copied with modules."""
    for module in unit.attributes.modules:
        registered = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(map(_is_users, registered)):
            if module not in _seen:
                module.register_forward_pre_hook(_let_see, prepend=True, with_kwargs=True)
                module.register_forward_hook(_let_see, prepend=True, with_kwargs=True)
            _seen[module] = weakref.ref(unit)


_seen: WeakIdKeyDictionary = WeakIdKeyDictionary()  # {module: weak reference to a unit}


def _is_users(hook: Any) -> bool:
    package = str(getattr(hook, "__module__", "")).partition(".")[0]
    return package not in ("torch", __name__.partition(".")[0])


def _let_see(module: nn.Module, *seen: Any) -> Any:
    """seen: arguments and keyword arguments; after forward, its output as well."""
    unit = _seen[module]() if module in _seen else None
    if unit is None or unit.runtime is None:
        return None
    return unit.runtime.let_see(seen if len(seen) == 2 else seen[2])


def alias_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Track which inputs of a call, also in containers, are in the graph on the device, and when
    their gradients are complete. Return the inputs to use instead.

    Until the call ends, each tensor is replaced by an alias: the gradient of the tensor itself is
    complete only when all calls with this input have run. Gradients on other devices do not count,
    because another thread computes them, at a time of its own on each rank."""
    inputs = call.inputs = Inputs()
    reference = weakref.ref(inputs)  # the tensor may outlive it
    aliases: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}

    def hook(grad: Tensor) -> None:
        inputs = reference()
        if inputs is not None:
            inputs.num_left -= 1

    def watched(tensor: Tensor) -> Tensor:
        if id(tensor) in aliases:
            return aliases[id(tensor)]
        if not _can_be_watched(tensor, device):
            return tensor
        alias = tensor
        if type(tensor) is Tensor:
            alias = tensor.view_as(tensor)
            alias.__dict__.update(tensor.__dict__)
            inputs.originals[id(alias)] = alias, tensor
        aliases[id(tensor)] = alias
        if alias.grad_fn is not None:
            inputs.nodes.append(alias.grad_fn)
            weakref.finalize(inputs, alias.register_hook(hook).remove)
        return alias

    def look(value: Any) -> Any:
        new = map_tensors(value, watched, True, seen)
        if aliases and not isinstance(value, Tensor):
            inputs.containers.append(value)
        return new

    return tuple(map(look, args)), {name: look(value) for name, value in kwargs.items()}


def _can_be_watched(tensor: Tensor, device: torch.device) -> bool:
    return (
        tensor.requires_grad
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def on_gradient_of_param(unit: Unit, group: Group, index: int, param: nn.Parameter) -> None:
    """Call ``on_gradient`` when the gradient of an unsharded parameter is accumulated. The hook
    holds weak references: the garbage collector does not see cycles through it."""
    unit_reference, group_reference = weakref.ref(unit), weakref.ref(group)

    def hook(param: nn.Parameter) -> None:
        unit, group = unit_reference(), group_reference()
        # A graph may outlive them.
        if unit is not None and unit.runtime is not None and group is not None:
            unit.runtime.backward.on_gradient(group, index, param)

    param.register_post_accumulate_grad_hook(hook)


def on_gradients_of_collected_params(unit: Unit) -> None:
    """From now on, call ``on_gradient`` for gradients that wait for ``collect`` as well."""
    for group in set(unit.groups) - set(_with_hooks):
        _with_hooks.add(group)
        for param, index in zip(*group.gradients.collected[:2], strict=True):
            if param.requires_grad:
                on_gradient_of_param(unit, group, index, param)


_with_hooks: weakref.WeakSet[Group] = weakref.WeakSet()


def on_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` at the end of the running graph task; never, if the task raises."""
    _torch_private.on_end_of_backward(callback)
