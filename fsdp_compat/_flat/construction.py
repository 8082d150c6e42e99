"""Before a unit is built: what cannot be wrapped is refused, and what can is made ready."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch_private
from .._comm.host_memory import give_back_freed
from .._engine import materialize
from .._engine.buffers import CastBuffers
from .._engine.ownership import OrigParam, Place
from .._engine.unit import Uninitialised, Unit
from .._state import optimizers
from .._state.names import clean_name
from .._stores.flat_store import FlatStore
from .._stores.registration import FlatParameter
from ..errors import UsageError, explain, takes, wrong_type
from .settings import Arguments, Settings, resolve

__all__ = [
    "Preparation",
    "buffers_to_cast",
    "listed",
    "refuse_ignored_units",
    "refuse_managed",
    "refuse_module",
    "refuse_optimizers_in_backward",
    "remember",
    "renamed",
    "settings_of",
    "uninitialised_of",
]

# Modules that a wrapper holds.
_wrapped: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remember(
    module: nn.Module, originals: Iterable[nn.Parameter], stores: Sequence[FlatStore]
) -> None:
    """Note that ``module`` is wrapped now, that ``originals`` are flattened, and what the stores'
    targets hold."""
    _wrapped[module] = True
    optimizers.note(originals, stores)
    for store in stores:
        for sharded_param, _ in store.sharded_params:
            if not isinstance(
                sharded_param, FlatParameter
            ):  # for clients, which see it on that class
                sharded_param.__dict__["_fsdp_flattened"] = True


def listed(given: Any) -> Any:
    """Iterators are used more than once; what is no iterable is refused later, with its name."""
    return (
        list(given)
        if isinstance(given, Iterable) and not isinstance(given, (nn.Module, torch.Tensor))
        else given
    )


def refuse_module(module: nn.Module, wrapper: type[nn.Module]) -> None:
    """Raise UsageError for what cannot be wrapped. wrapper: the class that wraps."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            explain(
                "Only modules can be wrapped.",
                expected="a torch.nn.Module",
                got=f"a {type(module).__name__}",
                where="FullyShardedDataParallel(module, ...)",
                fix="pass the module itself",
            )
        )
    if isinstance(module, wrapper) or module in _wrapped:
        raise UsageError(
            explain(
                "The module is wrapped already.",
                expected="a module that is not, and is not in, a FullyShardedDataParallel",
                got="an instance of it"
                if isinstance(module, wrapper)
                else f"a {type(module).__name__} that one holds",
                where="FullyShardedDataParallel(module, ...)",
                fix="use the wrapper that is there; wrap inner modules before outer ones, each "
                "once",
            )
        )
    if next(iter(module.parameters()), None) is None and not any(
        isinstance(m, wrapper) for m in module.modules()
    ):
        raise UsageError(
            explain(
                "The module has no parameters, so there is nothing to shard.",
                expected="a module with at least one parameter",
                got=f"{type(module).__name__} with none",
                where="FullyShardedDataParallel(module, ...)",
                fix="leave it unwrapped: the instance around it runs it as it is",
            )
        )
    for name, parameter in module.named_parameters():
        lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
        if lazy or parameter.is_inference():
            raise UsageError(
                explain(
                    f"Parameter {clean_name(name)!r} cannot be sharded: "
                    + ("it has no shape yet." if lazy else "it was made in inference mode."),
                    expected="parameters with shapes, which autograd can use",
                    got=f"a {type(parameter).__name__} of a "
                    f"{type(module.get_submodule(name.rpartition('.')[0])).__name__}",
                    where=f"FullyShardedDataParallel({type(module).__name__})",
                    fix="run one forward before wrapping"
                    if lazy
                    else "make the module outside of torch.inference_mode()",
                )
            )
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        raise UsageError(
            explain(
                "This module cannot be a unit: its forward is never called.",
                expected="a module that is called",
                got="the output projection of an nn.MultiheadAttention, whose weight the attention "
                "reads by itself",
                where="FullyShardedDataParallel(module, ...)",
                fix="wrap the attention, or a module around it",
            )
        )


def refuse_hook(hook: Any, split: set[bool]) -> None:
    """Raise UsageError for what cannot be a communication hook. split: whether gradients are split
    over ranks, of all groups."""
    expected = (
        "hook(state, grad, output)"
        if split == {True}
        else "hook(state, grad)"
        if split == {False}
        else ""
    )
    expected = (
        expected
        or "hook(state, grad, output=None), as some units are split over ranks and others are not"
    )
    if not callable(hook) or not all(takes(hook, 3 if is_split else 2) for is_split in split):
        raise wrong_type("hook", f"a function {expected}", hook, "register_comm_hook(state, hook)")


def refuse_ignored_units(given: Any, wrapper: type[nn.Module]) -> None:
    """Raise UsageError if an instance of ``wrapper`` is among what is to be ignored. given: as
    ``listed`` returns it."""
    if isinstance(given, list) and any(isinstance(item, wrapper) for item in given):
        raise UsageError(
            explain(
                "A wrapped module cannot be ignored.",
                expected="ignored_modules= or ignored_states= without any FullyShardedDataParallel",
                got="one of its instances",
                where="FullyShardedDataParallel(...)",
                fix="leave it out: it stays a unit of its own; modules inside of it are ignored "
                "where it is made",
            )
        )


def refuse_parts_of_a_model(module: nn.Module, nested: Sequence[tuple[nn.Module, Unit]]) -> None:
    """Raise UsageError if instances in ``module`` belong to a model whose root is outside of it.
    nested: they, with their roots."""
    inside = set(module.modules())
    for child, root in nested:
        owner = root.owner()
        if owner is not None and owner not in inside:
            raise UsageError(
                explain(
                    "The module holds units of another wrapped model.",
                    expected="a module around a whole wrapped model, or around none of it",
                    got=f"a {type(module).__name__} around a unit whose root is a "
                    f"{type(root.module).__name__} outside of it",
                    where=f"FullyShardedDataParallel({type(module).__name__}), {child._get_name()}",
                    fix="wrap around the root, or delete the outer wrapper first",
                )
            )


def refuse_managed(
    module: nn.Module, closed: set[nn.Module], ignored: frozenset[nn.Parameter]
) -> None:
    """A parameter belongs to one unit. One that an instance made before has taken cannot be seen
    whole any more."""
    inside = {id(below) for child in closed for below in child.modules()}
    for name, child in module.named_modules():
        if id(child) in inside:
            continue
        for attribute, parameter in child._parameters.items():
            if (
                parameter is not None
                and parameter not in ignored
                and optimizers.is_managed(parameter)
            ):
                raise UsageError(
                    explain(
                        "A parameter belongs to another FullyShardedDataParallel already.",
                        expected="every parameter in one instance; a tied one in an instance "
                        "around all its uses",
                        got=f"{clean_name(f'{name}.{attribute}'.lstrip('.'))!r} in a second one",
                        where=f"FullyShardedDataParallel({type(module).__name__})",
                        fix="pass auto_wrap_policy= to the outer module, which puts tied "
                        "parameters into the unit around all their "
                        "uses; or do not wrap the inner modules that share it",
                    )
                )


def refuse_optimizers_in_backward(module: nn.Module, settings: Settings) -> None:
    """Raise UsageError for parameters with optimizers that step in backward, if these would not see
    them any more."""
    for name, parameter in module.named_parameters():
        if (
            _torch_private.optimizers_in_backward(parameter)
            and parameter not in settings.ignored_parameters
            and not isinstance(parameter, FlatParameter)
            and not (settings.use_orig_params and _torch_private.is_plain(parameter))
        ):
            raise UsageError(
                explain(
                    "An optimizer that steps in backward would hold a parameter that is not "
                    "trained any more.",
                    expected="_apply_optimizer_in_backward() after wrapping, or "
                    "use_orig_params=True",
                    got=f"a call of it before, for {clean_name(name)!r}",
                    where=f"FullyShardedDataParallel({type(module).__name__})",
                    fix="wrap the model first, then call _apply_optimizer_in_backward(..., "
                    "wrapped_model.parameters(), ...)",
                )
            )


def settings_of(
    module: nn.Module, kwargs: Mapping[str, Any], arguments: Arguments, settings: Settings
) -> Settings:
    """The settings of a unit that a policy chose; resolved anew only where the policy changed
    something."""
    changes = {
        name: value
        for name, value in kwargs.items()
        if getattr(arguments, name, arguments) is not value
    }
    return resolve(module, arguments.changed(**changes)) if changes else settings


class Preparation:
    """What comes before sharding, unit by unit: meta tensors get values, buffers their device, all
    ranks the first one's values.

    So a process that builds a model on the meta device never holds more of it, whole, than one
    unit.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Collection[nn.Module],
        settings: Settings,
        closed: set[nn.Module],
    ) -> None:
        """units: the modules that become units, ``root`` among them. closed: what is prepared
        already, with all below it.

        Raises UsageError for a module on the meta device that cannot get values; nothing has
        changed then.
        """
        self._root, self._settings = root, settings
        self._done = {below for child in closed for below in child.modules()}
        self._ties = materialize.ties(root)
        self._was_meta = False
        self.left: set[tuple[nn.Module, str]] = (
            set()
        )  # where there are no values still, of what came from the meta device
        self._modules = {unit: list(_own_modules(unit, units)) for unit in units}
        self._simulated = settings.device.type == "meta"  # nothing ever gets values
        if settings.param_init_fn is None and not self._simulated:
            materialize.require_initial_values(
                root, [child for child in root.modules() if child not in self._done]
            )

    def of_unit(self, unit: nn.Module, members: list[OrigParam]) -> list[OrigParam]:
        """Prepare the modules of a unit; return its members as they are then. Collective with
        sync_module_states."""
        settings = self._settings
        if self._was_meta:
            give_back_freed()  # of the unit before
        modules = [module for module in self._modules.pop(unit) if module not in self._done]
        self._done.update(modules)
        filled: set[materialize.Slot] = set()
        if not self._simulated:
            filled = materialize.materialize(
                self._root, modules, settings.param_init_fn, settings.device
            )
        self._was_meta = self._was_meta or bool(filled)
        materialize.restore_ties(self._ties)
        materialize.move_buffers(modules, settings.device)
        if settings.sync_module_states:
            sent = {
                (module, name): tensor
                for module in modules
                for name, tensor in materialize.own_tensors(module)
                if tensor not in settings.ignored_parameters
            }
            # What is NaN on the first rank is so everywhere. It is a value, unless the first rank
            # has it from filled memory.
            marks = torch.tensor(
                [slot in filled for slot in sent], dtype=torch.uint8, device=settings.device
            )
            materialize.broadcast_states([*sent.values(), marks], settings.mesh, settings.device)
            if not self._simulated:
                filled.difference_update(sent)
                filled.update(slot for slot, mark in zip(sent, marks.tolist(), strict=True) if mark)
        self.left |= materialize.uninitialised(filled)
        return [OrigParam(_present(member), member.place) for member in members]


def _own_modules(unit: nn.Module, units: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules below a unit that are below no other in between."""
    seen = {unit}
    waiting = [unit]
    while waiting:
        module = waiting.pop()
        yield module
        children = [
            child for child in module.children() if child not in seen and child not in units
        ]
        seen.update(children)
        waiting += reversed(children)


def _present(member: OrigParam) -> nn.Parameter:
    """Return the parameter that stands where a member was found: another object if it came from the
    meta device."""
    module, attribute = member.slots[0]
    parameter = module._parameters[attribute]
    assert parameter is not None
    return parameter


def uninitialised_of(
    module: nn.Module,
    stores: Iterable[FlatStore],
    left: set[tuple[nn.Module, str]],
    taken: set[nn.Module],
) -> list[Uninitialised]:
    """Return what of ``left`` belongs to a unit: parameters of its stores, buffers of its modules
    that are not ``taken``."""
    found = []
    for store in stores if left else ():
        for index, member in enumerate(store.orig_params):
            if any(slot in left for slot in member.slots):
                found.append(Uninitialised(member.name, functools.partial(store.part, index)))
    for path, child in module.named_modules() if left else ():
        for name in child._buffers:
            if (child, name) in left and child not in taken:
                found.append(
                    Uninitialised(
                        f"{path}.{name}".lstrip("."),
                        functools.partial(child._buffers.__getitem__, name),
                    )
                )
    return found


def buffers_to_cast(
    module: nn.Module, settings: Settings, taken: set[nn.Module]
) -> CastBuffers | None:
    """Return the buffers of a unit that are kept in another dtype, from its modules that are not
    ``taken`` by other units."""
    dtype = settings.mixed_precision.buffer_dtype
    if dtype is None:
        return None
    uncast = {
        below
        for child in module.modules()
        if isinstance(child, settings.uncast_classes)
        for below in child.modules()
    }
    skip = taken | settings.ignored_modules | uncast
    return CastBuffers((child for child in module.modules() if child not in skip), dtype)


def renamed(members: list[OrigParam], module: nn.Module) -> list[OrigParam]:
    """Names relative to the unit's own module, instead of to the one whose policy chose it."""
    names: dict[tuple[int, str], list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for attribute in child._parameters:
            names.setdefault((id(child), attribute), []).append(f"{path}.{attribute}".lstrip("."))
    return [
        OrigParam(
            m.parameter,
            Place(
                m.slots,
                tuple(name for child, attribute in m.slots for name in names[id(child), attribute]),
            ),
        )
        for m in members
    ]
