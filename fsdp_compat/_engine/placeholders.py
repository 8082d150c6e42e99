"""What modules show in place of parameters that are sharded: any use says which parameter it is and
what to do instead.

Without original parameters an attribute has no value while its unit is sharded, and a placeholder
stands there. With original parameters the attribute is the user's own parameter, which holds a
part; outside of forward it may be read and written like that, but a module that holds one cannot be
called, and inside of forward, where only whole parameters make sense, placeholders hide it. Nothing
of this costs anything while a unit is full: what is in an instance's dictionary is taken out again.
"""

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

if typing.TYPE_CHECKING:
    from .unit import Unit

__all__ = ["ShardedPlaceholder", "Placeholders", "UsedWhileSharded"]

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


class UsedWhileSharded(StateError, AttributeError):
    """A parameter was used while its unit is sharded. An AttributeError too, so that ``hasattr``
    and ``getattr`` get an answer."""


def _refuse(
    unit: Unit | None, module: nn.Module | None, attribute: str, use: str
) -> typing.NoReturn:
    path = ""
    if unit is not None and module is not None:
        path = next(
            (f"{name}." for name, child in unit.module.named_modules() if child is module and name),
            "",
        )
    label = unit.label if unit is not None else "a unit that is gone"
    raise UsedWhileSharded(
        explain(
            f"Parameter {path + attribute!r} was used while its unit is sharded: this rank holds a "
            "part of it, or nothing.",
            expected="a use inside of the unit's forward, where its parameters are whole",
            got=use,
            where=label,
            fix="one of three: call the FullyShardedDataParallel itself instead of the module "
            "inside it; for another entry point "
            "(generate, encode, ...) call register_fsdp_forward_method(wrapped_model, 'name') "
            "once; or put the use into "
            "`with FullyShardedDataParallel.summon_full_params(model):`",
        )
    )


class ShardedPlaceholder:
    """Stands where a parameter is not. It knows shape and dtype of the whole parameter, and refuses
    everything else."""

    __slots__ = (
        "__weakref__",
        "_attribute",
        "_device",
        "_like",
        "_module",
        "_unit",
    )  # RNNs take weak references of their weights

    def __init__(self, unit: Unit, module: nn.Module, attribute: str, like: torch.Tensor) -> None:
        """like: has the shape and dtype of the whole parameter."""
        self._unit, self._module, self._attribute = (
            weakref.ref(unit),
            weakref.ref(module),
            attribute,
        )
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
        found = _first_absent((args, kwargs or {}))
        assert found is not None
        found._used(f"{getattr(func, '__name__', func)}() of it")

    @property
    def device(self) -> torch.device:
        return self._device

    def __getattr__(self, name: str) -> Any:
        if name in _METADATA:
            return getattr(self._like, name)
        if name.startswith("__"):  # protocols that Python looks for
            raise AttributeError(name)
        self._used(f"its attribute {name!r}")

    def __repr__(self) -> str:
        return (
            f"<sharded parameter {self._attribute!r} of shape {tuple(self._like.shape)}, "
            f"{self._like.dtype}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedPlaceholder:
        return self  # a copy of a module inside of a wrapper refuses its use as well

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


def _first_absent(value: Any) -> ShardedPlaceholder | None:
    if isinstance(value, ShardedPlaceholder):
        return value
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (tuple, list))
        else ()
    )
    return next((found for item in items if (found := _first_absent(item)) is not None), None)


class _GuardedForward:
    """Stands in for the forward that a module has (``hidden``, or None for that of its class) while
    it holds parts of parameters.

    Somebody may have taken hold of it in the meantime, to put a forward of his own around it: then
    it goes on to what it hides.
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
        """Those who ask for the signature of a module's forward get the true one."""
        if self.hidden is not None:
            return self.hidden
        module = self._slot.module()
        return types.MethodType(type(module).forward, module) if module is not None else self


class _Holder(typing.NamedTuple):
    """A unit of which a module holds parts, and the attribute of one."""

    guards: weakref.ref[Placeholders]
    unit: weakref.ref[Unit]
    attribute: str


class _ForwardSlot:
    """A module whose forward is guarded while it holds parts: of one unit, or, with ties, of
    several."""

    __slots__ = ("__weakref__", "attributes", "guard", "holders", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.attributes = weakref.ref(module), module.__dict__
        self.holders: list[_Holder] = []
        self.guard = _GuardedForward(self, None)

    def add(self, holder: _Holder) -> None:
        self.holders = [*(other for other in self.holders if other.guards() is not None), holder]

    def armed_holder(self) -> _Holder | None:
        """One whose parts the module holds now."""
        return next(
            (
                holder
                for holder in self.holders
                if (guards := holder.guards()) is not None and guards.armed
            ),
            None,
        )

    @property
    def is_plain(self) -> bool:
        """True if the guard hides nothing, and goes when one unit does not need it any more."""
        return self.guard.hidden is None and len(self.holders) == 1

    def arm(self) -> None:
        present = self.attributes.get("forward")
        if present is not self.guard:
            if (
                present is not self.guard.hidden
            ):  # another forward since: the guard before may be within it
                self.guard = _GuardedForward(self, present)
            self.attributes["forward"] = self.guard

    def disarm(self) -> None:
        if self.attributes.get("forward") is self.guard and self.armed_holder() is None:
            if self.guard.hidden is None:
                del self.attributes["forward"]
            else:
                self.attributes["forward"] = self.guard.hidden


# {module: weak reference of its _ForwardSlot}. The Guards hold it: by way of the module's
# attributes it holds all that is below the module, and what holds those may hold the module.
_slots: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _slot_of(module: nn.Module) -> _ForwardSlot:
    reference = _slots.get(module)
    slot = reference() if reference is not None else None
    if slot is None:
        slot = _ForwardSlot(module)
        _slots[module] = weakref.ref(slot)
    return slot


class Placeholders:
    """All placeholders of one unit. ``arm`` puts them up when the unit goes sharded, ``disarm``
    takes them away."""

    def __init__(
        self, unit: Unit, full: Sequence[ModuleSlot], sharded: Sequence[ModuleSlot]
    ) -> None:
        """full, sharded: what is shown in the two forms, slot by slot."""
        self.always: list[
            DictEntry
        ] = []  # placeholders that stand for what is not there while the unit is sharded
        in_forward: list[DictEntry] = []
        self.armed = False
        self._forwards: dict[nn.Module, _ForwardSlot] = {}
        self._plain: BulkDict | None = (
            None  # what `arm` puts and `disarm` takes where all slots are plain
        )
        for slot, instead in zip(full, sharded, strict=True):
            module, attribute, unsharded_param = slot
            if unsharded_param is None:
                continue
            placeholder = ShardedPlaceholder(unit, module, attribute, unsharded_param)
            if instead.parameter is None:
                self.always.append((module.__dict__, attribute, placeholder))
                continue
            in_forward.append((module.__dict__, attribute, placeholder))
            if module not in self._forwards and type(module).forward is not nn.Module.forward:
                slot_of_forward = self._forwards[module] = _slot_of(module)
                slot_of_forward.add(_Holder(weakref.ref(self), weakref.ref(unit), attribute))
        self.has_parts = bool(
            in_forward
        )  # modules hold parts of parameters while the unit is sharded
        self._always, self._in_forward, self._reads_armed = (
            BulkDict(self.always),
            BulkDict(in_forward),
            False,
        )
        for guards in {
            holder.guards() for slot in self._forwards.values() for holder in slot.holders
        } or (self,):
            if guards is not None:
                guards._look_at_forwards()

    def _look_at_forwards(self) -> None:
        """Somebody else holds parts of a module as well, or a guard hides another forward."""
        slots = self._forwards.values()
        self._plain = (
            BulkDict((slot.attributes, "forward", slot.guard) for slot in slots)
            if all(s.is_plain for s in slots)
            else None
        )

    def leave_forward(self, module: nn.Module) -> None:
        """The calls of ``module`` are those that gather: they are not refused."""
        self.disarm()
        self._leave(module)
        self._look_at_forwards()
        self.arm()

    def retire(self) -> None:
        """Others guard the same modules from now on."""
        self.disarm()
        for module in list(self._forwards):
            self._leave(module)

    def _leave(self, module: nn.Module) -> None:
        slot = self._forwards.pop(module, None)
        if slot is not None:
            slot.holders = [holder for holder in slot.holders if holder.guards() is not self]

    def arm(self) -> None:
        self._always.put_in()
        self.arm_parts()

    def disarm(self) -> None:
        self._always.take_out_own()
        self.disarm_parts()

    def arm_parts(self) -> None:
        """The modules hold parts: no call of them."""
        self.armed = True
        if self._plain is not None and self._plain.are_free():
            self._plain.put_in()
            return
        for slot in self._forwards.values():
            slot.arm()
        self._look_at_forwards()

    def disarm_parts(self) -> None:
        """They do not any more."""
        self.disarm_reads()
        self.armed = False
        if self._plain is not None and self._plain.stand():
            self._plain.take_out()
            return
        for slot in self._forwards.values():
            slot.disarm()

    def arm_reads(self) -> None:
        """A forward of the model runs: nobody reads parts now."""
        self._in_forward.put_in()
        self._reads_armed = True

    def disarm_reads(self) -> None:
        if self._reads_armed:
            self._in_forward.take_out_own()
            self._reads_armed = False
