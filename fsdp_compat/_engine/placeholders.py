"""Placeholders that modules show instead of sharded parameters: any use of one raises an error that
names the parameter and says what to do instead.

With use_orig_params=False an attribute has no value while its unit is sharded; a placeholder takes
its place. With use_orig_params=True the attribute is the user's own parameter, which holds a part.
Outside forward it may be read and written like that, but a module that holds one cannot be called;
inside forward, where only whole parameters make sense, a placeholder hides it. Placeholders are
entries in instance dictionaries, and cost nothing once they are taken out, as in an unsharded
unit."""

from __future__ import annotations

import types
import typing
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import StateError, explain
from .bulk_dict import BulkDict, DictEntry
from .store import ModuleSlot

__all__ = ["Placeholders", "ShardedPlaceholder", "UsedWhileSharded", "ViewedUnit"]

_METADATA = frozenset(
    {
        "dim",
        "dtype",
        "is_complex",
        "is_floating_point",
        "ndim",
        "numel",
        "ndimension",
        "shape",
        "size",
    }
)
_READ, _ASSIGNMENT = "its attribute {!r}", "an assignment to its attribute {!r}"
_FREEZING = (_READ.format("requires_grad_"), _ASSIGNMENT.format("requires_grad"))


class ViewedUnit(typing.Protocol):
    """A unit, as errors about its placeholders describe it."""

    label: str

    @property
    def module(self) -> nn.Module: ...


class UsedWhileSharded(StateError, AttributeError):
    """A parameter was used while its unit is sharded. Also an AttributeError, so that ``hasattr``
    and ``getattr`` with a default work."""


def _refuse(
    unit: ViewedUnit | None, module: nn.Module | None, attribute: str, use: str
) -> typing.NoReturn:
    path = ""
    if unit is not None and module is not None:
        path = next(
            (f"{name}." for name, child in unit.module.named_modules() if child is module and name),
            "",
        )
    label = unit.label if unit is not None else "a unit that no longer exists"
    raise UsedWhileSharded(
        explain(
            f"Parameter {path + attribute!r} was used while its unit is sharded: this rank holds "
            "at most a part of it.",
            expected="a use inside the unit's forward, where its parameters are whole",
            got=use,
            where=label,
            fix="pass use_orig_params=True, to change requires_grad of some of a unit's parameters"
            if use in _FREEZING
            else "call the FullyShardedDataParallel itself instead of the module inside it; for "
            "another entry point (generate, encode, ...) call "
            "register_fsdp_forward_method(wrapped_model, 'name') once; or wrap the use in "
            "`with FullyShardedDataParallel.summon_full_params(model):`",
        )
    )


class ShardedPlaceholder:
    """Takes the place of an absent parameter. It knows the shape and dtype of the whole parameter,
    and refuses every other use."""

    # __weakref__: RNNs keep weak references to their weights.
    __slots__ = ("__weakref__", "_attribute", "_device", "_like", "_module", "_unit")

    def __init__(
        self, unit: ViewedUnit, module: nn.Module, attribute: str, like: torch.Tensor
    ) -> None:
        """like: has the shape and dtype of the whole parameter."""
        self._unit, self._module = weakref.ref(unit), weakref.ref(module)
        self._attribute = attribute
        self._like, self._device = torch.empty_like(like, device="meta"), like.device

    def _used(self, use: str) -> typing.NoReturn:
        _refuse(self._unit(), self._module(), self._attribute, use)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = _first_placeholder((args, kwargs or {}))
        assert found is not None
        found._used(f"{getattr(func, '__name__', func)}() of it")

    @property
    def device(self) -> torch.device:
        return self._device

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ShardedPlaceholder.__slots__:
            self._used(_ASSIGNMENT.format(name))
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _METADATA:
            return getattr(self._like, name)
        if name.startswith("__"):  # protocols that Python looks for
            raise AttributeError(name)
        self._used(_READ.format(name))

    def __repr__(self) -> str:
        return (
            f"<sharded parameter {self._attribute!r} of shape {tuple(self._like.shape)}, "
            f"{self._like.dtype}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedPlaceholder:
        return self  # a copy of a module inside a wrapper refuses uses as well

    def __reduce__(self) -> typing.NoReturn:
        self._used("a pickle of it")


def _operator(name: str) -> Callable[..., Any]:
    def refuse(self: ShardedPlaceholder, *args: Any) -> Any:
        self._used(f"{name} of it")

    return refuse


for _name in (
    *("add", "and", "floordiv", "matmul", "mod", "mul", "or", "pow", "sub", "truediv"),
    *("radd", "rand", "rfloordiv", "rmatmul", "rmod", "rmul", "ror", "rpow", "rsub", "rtruediv"),
    *(
        "iadd",
        "imul",
        "isub",
        "itruediv",
        "abs",
        "bool",
        "float",
        "getitem",
        "int",
        "invert",
        "iter",
        "len",
        "neg",
        "setitem",
    ),
    *("ge", "gt", "le", "lt", "array", "index"),
):
    setattr(ShardedPlaceholder, f"__{_name}__", _operator(f"__{_name}__"))


def _first_placeholder(value: Any) -> ShardedPlaceholder | None:
    if isinstance(value, ShardedPlaceholder):
        return value
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (tuple, list))
        else ()
    )
    return next((found for item in items if (found := _first_placeholder(item)) is not None), None)


class _GuardedForward:
    """Hides the forward of a module (``hidden``, or None for the forward of its class) while the
    module holds parts of parameters.

    Other code may hold a reference to this object and wrap its own forward around it, so calls that
    are allowed go on to the hidden forward.
    """

    __slots__ = ("_slot", "hidden")

    def __init__(self, slot: _ForwardSlot, hidden: Any) -> None:
        self._slot, self.hidden = slot, hidden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        holder = self._slot.armed_holder()
        if holder is not None:
            module = self._slot.module()
            _refuse(
                holder.unit(),
                module,
                holder.attribute,
                f"a call of the {type(module).__name__} that holds it",
            )
        return self.__wrapped__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GuardedForward:
        return self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that this one hides; ``inspect.signature`` follows it."""
        if self.hidden is not None:
            return self.hidden
        module = self._slot.module()
        return types.MethodType(type(module).forward, module) if module is not None else self


class _Holder(typing.NamedTuple):
    """A unit of which a module holds parts, and the attribute of one part."""

    placeholders: weakref.ref[Placeholders]
    unit: weakref.ref[ViewedUnit]
    attribute: str


class _ForwardSlot:
    """A module whose forward is guarded while it holds parts of one unit, or of several where
    parameters are tied."""

    __slots__ = ("__weakref__", "attributes", "guard", "holders", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.attributes = weakref.ref(module), module.__dict__
        self.holders: list[_Holder] = []
        self.guard = _GuardedForward(self, None)

    def add(self, holder: _Holder) -> None:
        alive = [other for other in self.holders if other.placeholders() is not None]
        self.holders = [*alive, holder]

    def armed_holder(self) -> _Holder | None:
        """Return a holder whose parts the module shows now."""
        for holder in self.holders:
            placeholders = holder.placeholders()
            if placeholders is not None and placeholders.armed:
                return holder
        return None

    @property
    def is_plain(self) -> bool:
        """True if the guard hides no instance attribute and serves one unit only."""
        return self.guard.hidden is None and len(self.holders) == 1

    def arm(self) -> None:
        present = self.attributes.get("forward")
        if present is not self.guard:
            if present is not self.guard.hidden:  # a new forward, which may call the old guard
                self.guard = _GuardedForward(self, present)
            self.attributes["forward"] = self.guard

    def disarm(self) -> None:
        if self.attributes.get("forward") is self.guard and self.armed_holder() is None:
            if self.guard.hidden is None:
                del self.attributes["forward"]
            else:
                self.attributes["forward"] = self.guard.hidden


# {module: weak reference to its _ForwardSlot}. Placeholders hold the slot. It must not live here:
# through the module's attributes it holds everything below the module, which may hold the module.
_slots: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _slot_of(module: nn.Module) -> _ForwardSlot:
    reference = _slots.get(module)
    slot = reference() if reference is not None else None
    if slot is None:
        slot = _ForwardSlot(module)
        _slots[module] = weakref.ref(slot)
    return slot


class Placeholders:
    """All placeholders of one unit: ``arm`` puts them in when the unit becomes sharded, ``disarm``
    takes them out."""

    def __init__(
        self,
        unit: ViewedUnit,
        unsharded: Sequence[ModuleSlot],
        sharded: Sequence[ModuleSlot],
        is_guarded: bool = True,
    ) -> None:
        """unsharded, sharded: the slots in the two forms, in the same order. is_guarded: False
        makes no placeholders at all."""
        self.is_guarded = is_guarded
        self.always: list[DictEntry] = []  # for attributes that are absent while sharded
        in_forward: list[DictEntry] = []  # for attributes that hold parts
        self.armed = False
        self._forwards: dict[nn.Module, _ForwardSlot] = {}
        self._plain: BulkDict | None = None  # the guards, where all of them are plain
        for slot, instead in zip(unsharded, sharded, strict=True) if is_guarded else ():
            module, attribute, param = slot
            if param is None:
                continue
            placeholder = ShardedPlaceholder(unit, module, attribute, param)
            if instead.parameter is None:
                self.always.append((module.__dict__, attribute, placeholder))
                continue
            in_forward.append((module.__dict__, attribute, placeholder))
            if module not in self._forwards and type(module).forward is not nn.Module.forward:
                slot_of_forward = self._forwards[module] = _slot_of(module)
                slot_of_forward.add(_Holder(weakref.ref(self), weakref.ref(unit), attribute))
        self.has_parts = bool(in_forward)  # modules hold parts while the unit is sharded
        self._always, self._in_forward = BulkDict(self.always), BulkDict(in_forward)
        self._reads_armed = False
        for placeholders in {
            holder.placeholders() for slot in self._forwards.values() for holder in slot.holders
        } or (self,):
            if placeholders is not None:
                placeholders._update_plain()

    def _update_plain(self) -> None:
        """Recompute the plain guards: another unit holds parts of a module as well, or a guard
        hides another forward."""
        slots = self._forwards.values()
        self._plain = (
            BulkDict((slot.attributes, "forward", slot.guard) for slot in slots)
            if all(s.is_plain for s in slots)
            else None
        )

    def leave_unguarded(self, module: nn.Module) -> None:
        """Allow calls of ``module``, which unshard the unit."""
        self.disarm()
        self._unguard(module)
        self._update_plain()
        self.arm()

    def retire(self) -> None:
        """Give up all modules: other placeholders guard them from now on."""
        self.disarm()
        for module in list(self._forwards):
            self._unguard(module)

    def _unguard(self, module: nn.Module) -> None:
        slot = self._forwards.pop(module, None)
        if slot is not None:
            slot.holders = [holder for holder in slot.holders if holder.placeholders() is not self]

    def arm(self) -> None:
        self._always.put_in()
        self.arm_parts()

    def disarm(self) -> None:
        self._always.take_out_own()
        self.disarm_parts()

    def arm_parts(self) -> None:
        """Refuse calls of modules that hold parts."""
        self.armed = True
        if self._plain is not None and self._plain.are_free():
            self._plain.put_in()
            return
        for slot in self._forwards.values():
            slot.arm()
        self._update_plain()

    def disarm_parts(self) -> None:
        """Allow calls again: the modules no longer hold parts."""
        self.disarm_reads()
        self.armed = False
        if self._plain is not None and self._plain.are_in_place():
            self._plain.take_out()
            return
        for slot in self._forwards.values():
            slot.disarm()

    def arm_reads(self) -> None:
        """Refuse reads of parts while a forward of the model runs."""
        self._in_forward.put_in()
        self._reads_armed = True

    def disarm_reads(self) -> None:
        if self._reads_armed:
            self._in_forward.take_out_own()
            self._reads_armed = False
