"""What a unit's modules show: sharded parameters between uses, unsharded ones in computation. And
other attributes of theirs: marks, and tensors that forward leaves (``self.aux_loss = ...``)."""

from __future__ import annotations

import collections
import contextlib
import itertools
import types
import typing
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch_private
from ..errors import StateError
from .bulk_dict import BulkDict, DictEntry, make_swap
from .dtypes import ComputeDtype
from .nested import OPAQUE, contents_of, map_tensors
from .placeholders import Placeholders, UnitOfModules
from .store import ModuleSlot


class ModuleView:
    """The parameters that one unit's modules show, whatever memory is resident: unsharded ones
    inside forward, from pre-backward to post-backward, and of fully_shard also afterwards, by
    unshard(), reshard_after_forward=False or reshard_after_backward=False. A freed parameter is
    never shown."""

    def __init__(
        self,
        unit: UnitOfModules,
        unsharded: Sequence[Sequence[ModuleSlot]],
        sharded: Sequence[ModuleSlot],
    ) -> None:
        """Show the sharded parameters. unsharded: by ComputeDtype."""
        self._unit = weakref.ref(unit)
        self._from_partial: _Swap | None = None  # while rows of unsharded parameters are shown
        self.shows_unsharded = False
        # Other code shows whole parameters (summon_full_params): neither unshard nor reshard.
        self.summoned = False
        self.withdrawn = False  # the modules show no managed parameters at all
        # The front end takes or loads a state dict: modules' own methods may see shards.
        self.in_state_dict = False
        self._set_slots(unsharded, sharded)

    def _set_slots(
        self, unsharded: Sequence[Sequence[ModuleSlot]], sharded: Sequence[ModuleSlot]
    ) -> None:
        unit = self._unit()
        assert unit is not None
        self._placeholders = Placeholders(unit, unsharded[0], sharded)
        always = self._placeholders.always
        self._swaps = [  # by ComputeDtype
            (_Swap(sharded, slots, away=always), _Swap(slots, sharded, here=always))
            for slots in unsharded
        ]
        self._to_unsharded, self._to_sharded = self._swaps[0]
        self._orders = _orders_to_keep(unsharded[0])
        modules = dict.fromkeys(slot.module for slot in unsharded[0])
        self._rnns = [module for module in modules if isinstance(module, nn.RNNBase)]
        self._has_orders = bool(self._orders or self._rnns)
        self.shows_parts = self._placeholders.cover_parts  # see Placeholders
        self.restore()

    def replace_slots(
        self, unsharded: Sequence[Sequence[ModuleSlot]], sharded: Sequence[ModuleSlot]
    ) -> None:
        """Show different parameters from now on. Only while the unit is sharded."""
        assert not self.shows_unsharded and not self.summoned
        self._placeholders.disarm()
        self._set_slots(unsharded, sharded)

    def use_dtype(self, dtype: ComputeDtype) -> None:
        """Show the unsharded parameters of this dtype from now on. Only while sharded."""
        self._to_unsharded, self._to_sharded = self._swaps[dtype]

    # -- in every step

    def show_unsharded(self) -> None:
        if self.shows_unsharded or self.summoned:
            return
        self.hide_partial()
        if self.shows_parts:
            self._placeholders.reveal_parts()
        if not self._to_unsharded.exchange():
            self._exchange_around_others(self._to_unsharded)
        self.shows_unsharded = True
        if self._has_orders:
            self.keep_order()

    def show_sharded(self) -> None:
        if not self.shows_unsharded or self.summoned:
            return
        if not self._to_sharded.exchange():
            self._exchange_around_others(self._to_sharded)
        self.shows_unsharded = False
        if self._has_orders:
            self.keep_order()
        if self.shows_parts:
            self._placeholders.hide_parts()

    def keep_showing_unsharded(self) -> None:
        """Show unsharded parameters where torch.func.functional_call has put sharded ones."""
        if self._to_sharded.foreign() is not None:
            self._exchange_around_others(self._to_unsharded)

    def show_partial(self, slots: Sequence[ModuleSlot]) -> None:
        """Show ``slots`` instead of the sharded parameters until ``hide_partial``."""
        sharded = [
            ModuleSlot(slot.module, slot.attribute, slot.new) for slot in self._to_sharded.slots
        ]
        _Swap(sharded, slots).exchange()
        self._from_partial = _Swap(slots, sharded)

    def hide_partial(self) -> None:
        if self._from_partial is not None:
            self._from_partial.put_in()
            self._from_partial = None

    def _exchange_around_others(self, swap: _Swap) -> None:
        """Make a swap that ``exchange`` refused, because the user has set an attribute over a
        placeholder or functional_call has restored an old parameter; refuse anything else."""
        foreign = swap.foreign(but_new=not self._placeholders.is_guarded)
        if foreign is not None:
            self._refuse_foreign(foreign)
        swap.put_in()

    def begin_hiding_parts(self) -> None:
        """Until ``end_hiding_parts``, refuse reads of sharded parameters that modules hold (with
        use_orig_params=True): a forward of the model begins, or another call of users' modules."""
        self._placeholders.begin_hiding(not self.shows_unsharded and not self.summoned)

    def end_hiding_parts(self) -> None:
        self._placeholders.end_hiding()

    # -- at other times

    def modules(self) -> list[nn.Module]:
        """Return the modules that hold managed parameters."""
        return list(dict.fromkeys(slot.module for slot in self._to_sharded.slots))

    def restore(self) -> None:
        """Show the sharded parameters, whatever the modules hold now."""
        self.withdrawn = False
        for _, parameters, attribute, new, _ in self._to_sharded.slots:
            if new is None:
                parameters.pop(attribute, None)
            else:
                parameters[attribute] = new
        self.keep_order()
        self._placeholders.arm()

    def withdraw(self) -> None:
        """Take the sharded parameters out of the modules until ``restore``."""
        self.withdrawn = True
        self._placeholders.disarm()
        for _, parameters, attribute, new, _ in self._to_sharded.slots:
            if new is not None and parameters.get(attribute) is new:
                parameters[attribute] = None  # keeps the place among the others

    def begin_summon(self) -> None:
        """Other code shows whole parameters until ``end_summon``."""
        self._placeholders.disarm()
        self.summoned = True

    def end_summon(self) -> None:
        self.restore()
        self.summoned = False

    def keep_order(self) -> None:
        """Restore the order of parameter names, and the lists of weights that RNNs keep."""
        for module, order in self._orders:
            _reorder(_torch_private.parameters_of(module), order)
        for rnn in self._rnns:
            _torch_private.refresh_rnn_weights(rnn)

    def put_placeholders_back(self) -> None:
        """Put back placeholders that an assignment has removed from a module."""
        if not (self.shows_unsharded or self.summoned):
            self._placeholders.arm()

    @contextlib.contextmanager
    def described(self) -> Iterator[None]:
        """A context in which absent attributes are meta tensors, for ``repr`` and the like."""
        put = []
        if not self.shows_unsharded:
            self._placeholders.disarm()
        for _, parameters, attribute, param, _ in self._to_unsharded.slots:
            if param is not None and attribute not in parameters:
                parameters[attribute] = nn.Parameter(
                    torch.empty_like(param, device="meta"), requires_grad=False
                )
                put.append((parameters, attribute))
        try:
            yield
        finally:
            for parameters, attribute in put:
                del parameters[attribute]
            if not self.shows_unsharded and not self.summoned:
                self._placeholders.arm()

    # -- checks

    def require_state_dict(self, module: nn.Module, method: str) -> None:
        """Raise StateError where a module's own method would see flat or partial parameters."""
        if self.in_state_dict or self.summoned:
            return
        raise StateError.of(
            f"{method}() was called on a module inside a sharded one, which holds only parts "
            "of its parameters.",
            expected=f"{method}() of the FullyShardedDataParallel around it, or a call inside "
            "summon_full_params",
            got=f"{method}() of a {type(module).__name__}",
            where=self._label,
            fix=f"call {method}() on the wrapper, whose names are those from before wrapping",
        )

    def require_own(self) -> None:
        """Raise StateError if a sharded parameter was replaced by another object."""
        if not (self.shows_unsharded or self.summoned or self.withdrawn):
            foreign = self._to_unsharded.foreign()
            if foreign is not None:
                self._refuse_foreign(foreign)

    @property
    def _label(self) -> str:
        unit = self._unit()
        return "a unit" if unit is None else unit.label

    def _refuse_foreign(self, slot: _Slot) -> typing.NoReturn:
        module, parameters, attribute, _, expected = slot
        found = parameters.get(attribute)
        if found is not None and found.is_meta:
            raise values_lost(f"{type(module).__name__}.{attribute}", self._label)
        raise StateError.of(
            "A managed parameter was replaced by another object.",
            expected="the parameter that FSDP put there"
            if expected is not None
            else "no such attribute while the unit is sharded",
            got=f"an object of type {type(found).__name__}" if found is not None else "nothing",
            where=f"{self._label}, {type(module).__name__}.{attribute}",
            fix="put the parameter back and change values in place, inside summon_full_params "
            "or, with use_orig_params=True, by assigning a Parameter to the attribute between "
            "steps. Deleting parameters, parametrizations made after wrapping and "
            "torch.func.functional_call do not work on sharded parameters",
        )


class _Slot(typing.NamedTuple):
    module: nn.Module
    parameters: dict[str, nn.Parameter | None]  # of the module
    attribute: str
    new: nn.Parameter | None  # None: the attribute is absent
    old: nn.Parameter | None


class _Swap:
    """A swap of sharded and unsharded parameters, for all slots by a few calls of C functions."""

    def __init__(
        self,
        before: Sequence[ModuleSlot],
        after: Sequence[ModuleSlot],
        away: Sequence[DictEntry] = (),
        here: Sequence[DictEntry] = (),
    ) -> None:
        """away, here: placeholders that the swap removes and inserts."""
        self.slots = [
            _Slot(new.module, _torch_private.parameters_of(new.module), *new[1:], old.parameter)
            for old, new in zip(before, after, strict=True)
        ]
        present = [(slot.parameters, slot.attribute, slot.old) for slot in self.slots]
        is_gone = [slot.new is None and slot.old is not None for slot in self.slots]
        gone = itertools.compress(present, is_gone)
        new = [(s.parameters, s.attribute, s.new) for s in self.slots if s.new is not None]
        self._present = BulkDict(present)
        self._old, self._new = BulkDict([*gone, *away]), BulkDict([*new, *here])
        # exchange(): make the swap and return True, if every slot holds its old parameter. Absent
        # attributes are absent from the dictionary: None would silently drop a bias.
        self.exchange = make_swap(BulkDict([*present, *away]), self._old, self._new)

    def foreign(self, but_new: bool = False) -> _Slot | None:
        """Return a slot that does not hold its old parameter nor, with ``but_new``, its new one."""
        if self._present.are_in_place():
            return None
        for slot in self.slots:
            held = slot.parameters.get(slot.attribute)
            if held is not slot.old and not (but_new and held is slot.new):
                return slot
        return None

    def put_in(self) -> None:
        """Make the swap, whatever the slots hold."""
        self._old.take_out_own()
        self._new.put_in()


def _orders_to_keep(slots: Sequence[ModuleSlot]) -> list[tuple[nn.Module, list[str]]]:
    """Return (module, parameter names in order) of the modules that also hold other units'
    parameters: a swap would change their order."""
    managed: dict[nn.Module, list[str]] = {}
    for module, attribute, parameter in slots:
        if parameter is not None:  # a flat parameter is absent while the others are shown
            managed.setdefault(module, []).append(attribute)
    kept = []
    for module, names in managed.items():
        order = [
            name
            for name, parameter in _torch_private.parameters_of(module).items()
            if parameter is not None or name in names
        ]
        if order != names:
            kept.append((module, order))
    return kept


def _reorder(parameters: dict[str, nn.Parameter | None], order: Sequence[str]) -> None:
    items = {
        name: parameters[name] for name in itertools.chain(order, parameters) if name in parameters
    }
    if list(items) != list(parameters):
        parameters.clear()
        parameters.update(items)


_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_INTERNAL = frozenset((*nn.Module().__dict__, *_MARKS))


def mark(module: nn.Module, ignored: Collection[nn.Module]) -> None:
    """Mark a unit's modules, except ignored ones, as torch does; before the unit is constructed.

    Dynamo reads the marks, and so does transformers' generate, to keep ranks together. Always with
    use_orig_params=True: Dynamo refuses the other, but forward sees unsharded parameters here."""
    for child in module.modules():
        if child not in ignored and _MARKS[0] not in child.__dict__:
            attributes = dict(child.__dict__)
            child.__dict__.clear()
            # The marks go first, out of the way of the attributes that a forward looks up.
            child.__dict__.update(dict.fromkeys(_MARKS, True), **attributes)


def is_marked(module: nn.Module) -> bool:
    """True for a module in a unit, or around units in one."""
    return _MARKS[0] in module.__dict__


class TensorAttributes:
    """The tensors that modules and their submodules keep: in attributes, and in containers that
    their forward shares with other code."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = [m for module in modules for m in module.modules()]
        found = list(filter(_keeps_attributes, self.modules))
        forwards = dict.fromkeys(vars(m).get("forward", type(m).forward) for m in found)
        shared = {str(id(v)): v for each in forwards for v in _containers_of(each)}
        # (attributes of a module, number of the first ones that are nn.Module's own)
        self._holders: list[tuple[dict[Any, Any], int]] = [
            (m.__dict__, sum(1 for _ in itertools.takewhile(_INTERNAL.__contains__, m.__dict__)))
            for m in found
        ]
        self._holders += [(m._buffers, 0) for m in found] + [(shared, 0)]
        # By id, outlines of values in which no tensor was found; types of values without contents
        self._empty: dict[int, list[object]] = {}
        self._opaque: set[type] = set(OPAQUE)
        self._hooks = [h for m in self.modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        self._num_hooks = [0] * len(self._hooks)

    def has_new_hooks(self) -> bool:
        """Return whether forward hooks were registered on the modules, or removed, since the last
        call."""
        before, self._num_hooks = self._num_hooks, list(map(len, self._hooks))
        return before != self._num_hooks

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the tensors that are kept now. Values without tensors, like configurations and
        vocabularies, are searched again only when their outline has changed."""
        kept = [
            (attributes, name, value)
            for attributes, start in self._holders
            if len(attributes) > start
            for name, value in itertools.islice(attributes.items(), start, None)
            if type(value) not in self._opaque and name[:2] != "__"  # torch's own
        ]
        if not kept:
            return
        has_tensors = False

        def changed(tensor: Tensor) -> Tensor:
            nonlocal has_tensors
            has_tensors = True
            return change(tensor)

        for attributes, name, value in kept:
            if not isinstance(value, Tensor) and contents_of(value) is None:
                self._opaque.add(type(value))
                continue
            outline = None if isinstance(value, Tensor) else _outline_of(value)
            if outline is not None and self._empty.get(id(value)) == outline:
                continue
            has_tensors = False
            new = map_tensors(value, changed, in_place=True)
            if new is not value:
                attributes[name] = new
            elif outline is not None and not has_tensors:
                self._empty[id(value)] = outline


def _outline_of(value: Any) -> list[object]:
    """Return the size of a container or plain object and, if that is small, the types of what it
    holds, with the sizes of containers: tensors that come into it change this."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, _CONTAINERS):
        value = getattr(value, "__dict__", {}).values()
    if len(value) > _FEW:
        return [len(value)]
    return [*map(type, value), *(len(each) for each in value if type(each) in _CONTAINERS)]


_CONTAINERS, _FEW = (list, tuple, dict, set, collections.deque), 200


def _containers_of(function: Any) -> list[Any]:
    """Return the containers that a function reads from variables of the code around it."""
    cells, empty = getattr(function, "__closure__", None) or (), types.CellType()
    found = [cell.cell_contents for cell in cells if cell != empty]
    if hasattr(function, "__code__"):
        found += map(function.__globals__.get, function.__code__.co_names)
    return [value for value in found if isinstance(value, _CONTAINERS)]


def _keeps_attributes(module: nn.Module) -> bool:
    """False for torch's own layers and for wrappers, whose forward leaves no tensors on them:
    searching them all would cost more than swapping parameters."""
    return type(module).__module__.partition(".")[0] not in ("torch", __name__.partition(".")[0])


def values_lost(name: str, where: str) -> StateError:
    """Return the error of a parameter that was moved to the meta device with a module inside the
    sharded one."""
    return StateError.of(
        "A module inside a sharded one was moved to the meta device, and its values are lost.",
        expected="a device with memory",
        got=f"{name!r} on 'meta'",
        where=where,
        fix="build the model again and load a checkpoint; to free memory, delete the whole model",
    )
