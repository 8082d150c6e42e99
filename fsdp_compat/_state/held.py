"""What a model holds: this rank's part of every tensor, and what modules save and load beside units
or in a way of their own, by hooks or methods."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import operator
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._comm.mesh import Axis, axis_of
from .._engine.group import Group
from .._engine.module_view import is_marked
from .._engine.nested import tensors_in
from .._engine.state_store import StateStore, store_of
from .._engine.unit import Unit
from .._layout.box import Box, Piece, Share
from .._layout.spec import FlatLayout, ParamSpec, Section
from ..api import StateDictType
from ..errors import FsdpCompatError, StateError, UsageError
from .units import (
    ATTRIBUTE,
    NamedUnit,
    clean_name,
    default_form,
    in_form,
    managed_names,
    model_unit_of,
    model_units_in,
    named_sections,
    names_before,
    names_of,
    owners_in,
    prefixes_in,
    unmanaged_in,
)

# Whose hooks and methods change no entry; those of activation checkpointing only rename it.
_NEUTRAL = (__name__.partition(".")[0], "torch.distributed.algorithms._checkpoint")


def _is_foreign(hooks: Mapping[int, Any]) -> bool:
    for hook in hooks.values():
        owner = getattr(hook, "hook", hook)  # torch wraps some
        if not str(getattr(owner, "__module__", "")).startswith(_NEUTRAL):
            return True
    return False


def overrides(module: nn.Module, *names: str) -> bool:
    """True if a class of the module, or the module itself, has its own method of such a name."""
    methods = operator.attrgetter(*names)
    if module.__dict__.keys().isdisjoint(names) and methods(type(module)) == methods(nn.Module):
        return False  # nearly always, and asked of every module
    kinds = [base for base in type(module).__mro__ if base is not nn.Module]
    places = [vars(kind) for kind in kinds if not kind.__module__.startswith(_NEUTRAL)]
    own = vars(module) if ATTRIBUTE not in vars(module) else {}  # torch patches whole models
    return any(name in place for place in (own, *places) for name in names)


def saves_in_own_way(module: nn.Module) -> bool:
    """True if what the module puts in state dicts may depend on values of parameters."""
    hooks = {**module._state_dict_hooks, **module._state_dict_pre_hooks}
    # Extra state of fully_shard's modules knows DTensors.
    extra = ("get_extra_state",) if is_marked(module) else ()
    return overrides(module, "state_dict", "_save_to_state_dict", *extra) or _is_foreign(hooks)


def loads_in_own_way(module: nn.Module) -> bool:
    """True if the module may take other entries than those of its parameters and buffers."""
    hooks = {**module._load_state_dict_pre_hooks, **module._load_state_dict_post_hooks}
    loader = type(module)._load_from_state_dict.__module__
    is_own = not loader.startswith(("torch.nn.", *_NEUTRAL)) or overrides(module, "load_state_dict")
    return is_own or _is_foreign(hooks)


def units_with_say(model: nn.Module, has_say: Callable[[nn.Module], bool]) -> set[Unit]:
    """Return the units that are not summoned, and in which a module has a say."""
    named = model.named_modules(remove_duplicate=False)
    having = [path for path, child in named if has_say(child)]
    owners = owners_in(model) if having else {}
    found = map(model_unit_of, {owners[path] for path in having})
    return {each.unit for each in found if each is not None and not each.unit.summoned}


def exact_buffers_of(unit: Unit) -> contextlib.AbstractContextManager[None]:
    """A context in which a unit's buffers have the dtypes that state dicts have."""
    return contextlib.nullcontext() if unit.buffers is None else unit.buffers.uncast()


class StandIn(torch.Tensor):
    """A parameter, or what a module made of it, without values: on the meta device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("cpu", "cuda", "to"):  # nothing to move
            return args[0]
        return super().__torch_function__(func, (cls,), args, kwargs)  # type: ignore[no-untyped-call]

    @staticmethod
    def of(shape: tuple[int, ...], dtype: torch.dtype) -> StandIn:
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(StandIn)


@contextlib.contextmanager
def stand_ins(units: Iterable[Unit]) -> Generator[list[torch.Tensor], None, None]:
    """A context in which modules show stand-ins. Raises StateError if one reads a value."""
    with contextlib.ExitStack() as stack:
        for unit in [unit for unit in units if not unit.summoned]:
            unit.view.begin_summon()
            stack.callback(unit.view.end_summon)
            for store in map(store_of, unit.groups):
                shapes = map(store.shape, range(len(store.orig_params)))
                show(store, [nn.Parameter(StandIn.of(each, store.dtype), False) for each in shapes])
            unit.view.keep_order()
        try:
            yield []
        except (FsdpCompatError, OSError):
            raise
        except Exception as error:
            raise StateError.of(
                "A hook or method of a module failed, which has a say in its state dict.",
                expected="one that reads no values of parameters: they have none here",
                got=f"{type(error).__name__}: {error}",
                where="LOCAL_STATE_DICT, or fsdp_compat.checkpoint",
                fix="use FULL_STATE_DICT, which shows modules whole parameters",
            ) from error


def show(store: StateStore, parameters: Sequence[nn.Parameter]) -> None:
    """Put ``parameters`` into the modules in place of what they show now."""
    for slot in store.shown(parameters):
        held = _torch_private.parameters_of(slot.module)
        if slot.parameter is None:
            held.pop(slot.attribute, None)
        else:
            held[slot.attribute] = slot.parameter


# -- what lies beside units


def unmanaged_state(model: nn.Module) -> dict[str, Any]:
    """Return what modules save beside the parameters of units, by clean name. Sends nothing."""
    managed = managed_names(model)
    with beside_units(model) as state:
        named = [(clean_name(name), value) for name, value in state.items()]
    return {n: v for n, v in named if n not in managed and not isinstance(v, StandIn)}


@contextlib.contextmanager
def beside_units(model: nn.Module) -> Iterator[dict[str, Any]]:
    """A context with what modules save, and stand-ins for what they make of parameters of units."""
    units, form = model_units_in(model), default_form(StateDictType.LOCAL_STATE_DICT)
    with stand_ins(each.unit for each in units), in_form(units, form):
        state = model.state_dict()
        for name, value in state.items():
            inside = () if isinstance(value, torch.Tensor) else tensors_in(value)
            if any(isinstance(tensor, StandIn) for tensor in inside):
                raise ValueError(f"{name!r} holds values of parameters in a {type(value).__name__}")
        yield state


def load_unmanaged(model: nn.Module, entries: Mapping[str, Any]) -> None:
    """Load what ``unmanaged_state`` returned, or a part of it, DTensors whole. Nothing is sent."""
    if not (entries or any(map(loads_in_own_way, model.modules()))):
        return
    with beside_units(model) as state:
        names = [name for name, value in state.items() if not isinstance(value, StandIn)]
        old: dict[str, Any] = {clean_name(name): state.pop(name) for name in names}
        state.update(entries)
        for name in entries:
            state[name] = _placed_as(state[name], old.get(name))
        model.load_state_dict(with_versions(model, state), strict=False)


def place_beside(model: nn.Module, entries: MutableMapping[str, Any]) -> None:
    """Replace whole tensors by DTensors where a parameter beside units is one. Nothing is sent."""
    beside = {slot.name: slot.value for slot in unmanaged_in(model)}
    for key, value in entries.items():
        entries[key] = _placed_as(value, beside.get(clean_name(key)))


def _placed_as(value: Any, like: Any) -> Any:
    """Return a whole tensor as a DTensor, if ``like`` is one; other values as they are."""
    if not (_torch_private.is_dtensor(like) and type(value) in (torch.Tensor, nn.Parameter)):
        return value
    from torch.distributed.tensor import distribute_tensor  # imported already

    own, places = value.detach().to(like.device), (like.device_mesh, like.placements)
    return distribute_tensor(own, *places, src_data_rank=None)


def with_versions(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that has the versions in its metadata by the names of modules now."""
    entries, versions = collections.OrderedDict(state_dict), getattr(state_dict, "_metadata", {})
    named = module.named_modules(remove_duplicate=False)
    now = {path: versions[clean] for path, _ in named if (clean := clean_name(path)) in versions}
    setattr(entries, "_metadata", {**versions, **now})
    return entries


def others_in(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return what lies outside of units, by clean name; None if it loads in its own way."""
    return {
        slot.name: None if loads_in_own_way(slot.holder) else slot.value
        for slot in unmanaged_in(model)
    }


def may_be_missing(name: str) -> bool:
    """True for what models of old files do not have: torch loads them without it."""
    return name.endswith("num_batches_tracked")


def absent_buffers(model: nn.Module) -> Iterator[str]:
    """Yield the names of buffers that are None, of modules that may make them while they load."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in module._buffers.items() if loads_in_own_way(module) else ():
            if value is None and name not in module._non_persistent_buffers_set:
                yield clean_name(f"{path}.{name}".lstrip("."))


# -- what this rank holds


@dataclasses.dataclass(frozen=True)
class HeldPart(Share):
    """This rank's share of one tensor, with the values."""

    names: tuple[str, ...]  # of the tensor in the model
    dtype: torch.dtype
    whole: torch.Tensor | None = None  # 1-D: the elements in place, if it is of no unit
    group: Group | None = None
    number: int = 0  # its index in the group

    @property
    def values(self) -> torch.Tensor:
        """The elements in place, a 1-D view."""
        if self.group is not None:
            return store_of(self.group).local_part(self.number)
        assert self.whole is not None
        return self.whole

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.piece.whole_shape

    def boxes(self, values: torch.Tensor | None = None) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield this rank's boxes of the whole tensor, with views of its (or other) ``values``."""
        values, start = self.values if values is None else values, 0
        for box in self.boxes_on(self.rank):
            yield box, values[start : start + box.numel].view(box.sizes)
            start += box.numel


def share_of(group: Group, index: int, section: Section | None = None) -> Share:
    """Return what this rank holds of a parameter of a unit: of all of it, or of this process's part
    of a DTensor; where fully_shard cuts another dim than the first, this rank has its own part."""
    store = store_of(group)
    section, parallel = section or store.section_of(index), store.parallel[index]
    number = index - section.first_param
    shape = section.layout.params[number].shape
    whole_shape = shape if section.offsets is None else store.local_shape(index)
    offsets = (0,) * len(shape)
    if parallel is not None:
        whole_shape, mesh, placements = parallel.shape, parallel.mesh, parallel.placements
        offsets = _torch_private.offsets_on_mesh(whole_shape, mesh, placements)
    if section.offsets is not None:
        offsets = tuple(map(operator.add, offsets, section.offsets))
    piece = Piece(whole_shape, offsets, shape)
    return Share(piece, section.layout, number, section.rank(store.rank))


def held_params(group: Group, section: Section, prefixes: Sequence[str]) -> Iterator[HeldPart]:
    """Yield this rank's part of every parameter of a section; it may be empty."""
    store = store_of(group)
    for index in section.params:
        share, param = share_of(group, index, section), store.orig_params[index]
        names = dict.fromkeys(name for prefix in prefixes for name in names_of(param, prefix))
        yield HeldPart(
            *(share.piece, share.layout, share.index, share.rank),
            *(tuple(names), store.dtype),
            group=group,
            number=index,
        )


def split_axes(named: NamedUnit, group: Group, section: Section) -> list[Axis]:
    """Return the axes along which tensor parallelism cuts the parameters of a section. Raises
    UsageError for partial DTensors."""
    store, found = store_of(group), dict[int, list[Axis]]()
    for index in section.params:
        if (parallel := store.parallel[index]) is None:
            continue
        for dim in parallel.tensor_parallel_dims:
            placement, axis = parallel.placements[dim], axis_of(parallel.mesh.get_group(dim))
            if not (placement.is_replicate() or placement.is_shard()):
                name = f"{named.prefix}{clean_name(store.orig_params[index].name)}"
                raise UsageError.of(
                    "Checkpoints cannot hold a DTensor parameter that is placed in this way.",
                    expected="Shard(dim) or Replicate() on every dimension of its mesh",
                    got=f"{placement} for {name}",
                    where=named.unit.label,
                    fix="distribute the parameter with Shard or Replicate, or save state dicts",
                )
            if axis.ranks > 1 and not placement.is_replicate():
                found.setdefault(index, []).append(axis)
    return found.get(section.first_param, [])


def of_whole(names: tuple[str, ...], value: torch.Tensor) -> HeldPart:
    """Return a tensor that every rank holds whole."""
    shape, own = tuple(value.shape), value.reshape(-1)
    layout = FlatLayout((ParamSpec(names[0], shape, 0),), 1, max(own.numel(), 1))
    return HeldPart(Piece.of_whole(shape), layout, 0, 0, names, value.dtype, own)


def held_state(model: nn.Module) -> tuple[list[HeldPart], dict[str, Any]]:
    """Return this rank's part of all tensors, in the order before sharding, and what no unit
    shards: ``unmanaged_state``. Collective for DTensors beside units. Raises UsageError for partial
    DTensors."""
    parts = list[HeldPart]()
    for own, prefixes in prefixes_in(model).items():
        for _, group, section in named_sections(own.unit):
            split_axes(NamedUnit(own, prefixes[0]), group, section)  # which raises
            parts += held_params(group, section, prefixes)
    unmanaged = unmanaged_state(model)
    ties: dict[tuple[object, ...], tuple[list[str], torch.Tensor]] = {}
    for name, value in unmanaged.items():
        if isinstance(value, torch.Tensor):
            if _torch_private.is_dtensor(value):
                value = value.full_tensor()  # type: ignore[attr-defined]
            memory = value.data_ptr() or name, tuple(value.shape), value.stride(), value.dtype
            ties.setdefault(memory, ([], value.detach()))[0].append(name)
    parts += [of_whole(tuple(names), value) for names, value in ties.values()]
    order = {name: position for position, name in enumerate(names_before(model))}
    parts.sort(key=lambda held: order.get(held.names[0], len(order)))
    return parts, unmanaged


# -- what a model takes of saved values


@dataclasses.dataclass
class Fit:
    """How saved values differ from what a model holds."""

    missing: list[str] = dataclasses.field(default_factory=list)  # first names
    wrong: dict[str, str] = dataclasses.field(default_factory=dict)  # what does not fit, by name

    def take(
        self,
        parts: Iterable[HeldPart],
        saved: Mapping[str, Any],
        differs: Callable[[HeldPart, str, Any], str],
    ) -> list[tuple[HeldPart, Any]]:
        """Return the values for the parts that fit; of tied ones that differ, the last. saved: by
        the names of the model. differs: returns how a value does not fit, or ""."""
        taken = []
        for held in parts:
            found = {name: saved[name] for name in held.names if name in saved}
            texts = {name: differs(held, name, value) for name, value in found.items()}
            self.wrong |= {name: text for name, text in texts.items() if text}
            if not found:
                self.missing.append(held.names[0])
            elif not any(texts.values()):
                taken.append((held, [*found.values()][-1]))
        return taken
