"""Placeholders that modules show instead of sharded parameters: any use of one raises an error that
names the parameter and says what to do instead.

With use_orig_params=False a placeholder stands in for an attribute while its unit is sharded. With
True the attribute is the user's own parameter, which holds a part. Outside forward the part may be
read and written, but a forward pre-hook refuses calls of the module; inside forward a placeholder
hides the part. Placeholders and hooks are entries in dictionaries of modules, removed while the
unit is unsharded."""

from __future__ import annotations

import re
import typing
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import StateError
from .bulk_dict import BulkDict, DictEntry
from .store import ModuleSlot

_METADATA = {"device", "dim", "dtype", "is_complex", "is_floating_point", "ndim", "ndimension"}
_METADATA |= {"numel", "shape", "size"}
_COMPARISONS = ("__ge__", "__gt__", "__le__", "__lt__")
_READ, _ASSIGNMENT = "its attribute {!r}", "an assignment to its attribute {!r}"
_FREEZING = (_READ.format("requires_grad_"), _ASSIGNMENT.format("requires_grad"))


class UsedWhileSharded(StateError, AttributeError):
    """A parameter was used while its unit is sharded. An AttributeError, for ``hasattr``."""


class UnitOfModules(typing.Protocol):
    """What is asked of a unit here."""

    label: str

    @property
    def module(self) -> nn.Module: ...

    @property
    def is_guarded(self) -> bool: ...


class ShardedPlaceholder:
    """Refuses every use of a parameter, except of the shape and dtype of the whole one."""

    # __weakref__: RNNs keep weak references to their weights.
    __slots__ = ("__weakref__", "_attribute", "_like", "_module", "_unit")

    def __init__(self, unit: UnitOfModules, module: nn.Module, attribute: str, like: Tensor):
        """like: the unsharded parameter, which has the shape and dtype of the whole one."""
        self._unit, self._module = weakref.ref(unit), weakref.ref(module)
        self._attribute, self._like = attribute, like

    def _used(self, use: str) -> typing.NoReturn:
        unit, module = self._unit(), self._module()
        named = () if unit is None else unit.module.named_modules()
        path = next((f"{name}." for name, child in named if child is module and name), "")
        label = unit.label if unit is not None else "a unit that no longer exists"
        raise UsedWhileSharded.of(
            f"Parameter {path + self._attribute!r} was used while its unit is sharded: this rank "
            "holds at most a part of it.",
            expected="a use inside the unit's forward, where its parameters are whole",
            got=use,
            where=label,
            fix="pass use_orig_params=True, to change requires_grad of some of a unit's parameters"
            if use in _FREEZING
            else "call the FullyShardedDataParallel itself instead of the module inside it; "
            "for another entry point (generate, encode, ...) call "
            "register_fsdp_forward_method(wrapped_model, 'name') once; or wrap the use in "
            "`with FullyShardedDataParallel.summon_full_params(model):`",
        )

    def refuse_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A forward pre-hook for a module that holds a part."""
        hooks: dict[Any, Any] = module._forward_pre_hooks
        if self in hooks:  # an earlier hook may have unsharded the unit
            self._used(f"a call of the {type(module).__name__} that holds it")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        placeholder = _first_placeholder((args, kwargs or {}))
        assert placeholder is not None
        placeholder._used(f"{getattr(func, '__name__', func)}() of it")

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
        like = self._like
        return f"<sharded parameter {self._attribute!r} of shape {tuple(like.shape)}, {like.dtype}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedPlaceholder:
        return self  # a copy of a module inside a wrapper refuses uses, too

    def __reduce__(self) -> typing.NoReturn:
        self._used("a pickle of it")


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: ShardedPlaceholder, *args: Any) -> Any:
        self._used(f"{name} of it")

    return refuse


for _name in filter(re.compile("__").match, dir(Tensor)):  # operators, and protocols like numpy's
    is_new = _name in _COMPARISONS or not hasattr(ShardedPlaceholder, _name)
    if is_new and callable(getattr(Tensor, _name)):
        setattr(ShardedPlaceholder, _name, _refusal(_name))


def _first_placeholder(value: Any) -> ShardedPlaceholder | None:
    if isinstance(value, ShardedPlaceholder):
        return value
    items = value.values() if isinstance(value, dict) else value
    nested = map(_first_placeholder, items) if isinstance(value, (dict, tuple, list)) else ()
    return next((placeholder for placeholder in nested if placeholder is not None), None)


class Placeholders:
    """All placeholders of one unit, present (``arm``) while it is sharded."""

    def __init__(
        self,
        unit: UnitOfModules,
        unsharded: Sequence[ModuleSlot],
        sharded: Sequence[ModuleSlot],
    ) -> None:
        """unsharded, sharded: module slots, in the same order."""
        self.is_guarded = unit.is_guarded  # otherwise there are none
        # For attributes that are absent while sharded; and forward pre-hooks of modules that hold
        # parts, because torch would compute with parts that broadcast, or read beyond their ends
        self.always: list[DictEntry] = []
        in_forward: list[DictEntry] = []  # for attributes that hold parts
        refusing = set[nn.Module]()  # modules that hold parts
        for slot, instead in zip(unsharded, sharded, strict=True) if self.is_guarded else ():
            module, attribute, param = slot
            if param is None:
                continue
            placeholder = ShardedPlaceholder(unit, module, attribute, param)
            entry = module.__dict__, attribute, placeholder
            (self.always if instead.parameter is None else in_forward).append(entry)
            if instead.parameter is not None and module not in refusing:
                refusing.add(module)
                hook = module._forward_pre_hooks, placeholder, placeholder.refuse_call
                self.always.append(hook)
        self.cover_parts = bool(in_forward)  # modules hold parts while the unit is sharded
        self._always, self._in_forward = BulkDict(self.always), BulkDict(in_forward)
        self._is_hiding = self._has_hidden = False

    def arm(self) -> None:
        self._always.put_in()
        self.hide_parts()

    def disarm(self) -> None:
        self._always.take_out_own()
        self.reveal_parts()

    def hide_parts(self) -> None:
        """The modules hold parts: refuse reads, if parts are hidden now."""
        if self._is_hiding:
            self._in_forward.put_in()
            self._has_hidden = True

    def reveal_parts(self) -> None:
        if self._has_hidden:
            self._in_forward.take_out_own()
            self._has_hidden = False

    def begin_hiding(self, hold_parts: bool) -> None:
        """Hide parts until ``end_hiding``. hold_parts: the modules hold parts now."""
        self._is_hiding = True
        if hold_parts:
            self.hide_parts()

    def end_hiding(self) -> None:
        self.reveal_parts()
        self._is_hiding = False
