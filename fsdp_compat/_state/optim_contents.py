"""What an optimizer holds: the user's parameters in each of its parameters, the kinds of state that
it keeps for them, and the form of its state dict."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import itertools
import numbers
import textwrap
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch_private
from .._archive.archive import is_count
from .._engine import rendezvous
from .._engine.group import Group
from .._engine.state_store import store_of
from ..errors import FsdpCompatError, UsageError
from .sharded_values import copied
from .units import NamedUnit, clean_name, names_of, require_idle, units_of


@dataclasses.dataclass(frozen=True)
class ParamContents:
    """The user's parameters in one parameter of the optimizer."""

    group: Group | None  # None: a parameter that no unit manages
    # By index in the store. A tied parameter has several names; dicts have the first.
    all_names: Mapping[int, tuple[str, ...]]
    is_owned: bool = False  # a whole parameter that this rank steps for all; group is None

    @functools.cached_property
    def names(self) -> list[tuple[int, str]]:
        """The first name of each, with its index."""
        return [(index, its[0]) for index, its in self.all_names.items()]


@dataclasses.dataclass(frozen=True)
class ParamOwnership:
    """The parameters of an optimizer, in its groups, with the contents of each."""

    where: str  # the optimizer, for errors
    groups: Sequence[Mapping[str, Any]]  # the optimizer's parameter groups
    # Of all parameters of the model, in its order; the optimizer may have only some of them.
    held: Mapping[nn.Parameter, ParamContents]
    # The model's current names of its parameters, including the parts that wrappers add.
    names: Mapping[nn.Parameter, str]

    @functools.cached_property
    def numbers(self) -> dict[nn.Parameter, int]:
        """The optimizer's parameters, with their numbers in its state dict."""
        parameters = [parameter for group in self.groups for parameter in group["params"]]
        return {parameter: number for number, parameter in enumerate(parameters)}

    @functools.cached_property
    def by_key(self) -> dict[Any, nn.Parameter]:
        """The parameters by their keys in the optimizer's dict: numbers, or names if named."""
        by_name = {self.names[p]: p for p in self.numbers if p in self.names}
        return {**{number: p for p, number in self.numbers.items()}, **by_name}

    @functools.cached_property
    def by_name(self) -> dict[str, tuple[nn.Parameter, int]]:
        """Which parameter contains each name of the model, and the name's index in the layout."""
        in_order = sorted(self.held.items(), key=lambda held: held[0] in self.numbers)
        return {
            name: (parameter, index) for parameter, its in in_order for index, name in its.names
        }

    @functools.cached_property
    def unmanaged(self) -> list[tuple[nn.Parameter, str]]:
        """The optimizer's parameters that no unit manages, with names, in the model's order."""
        return [
            (p, contents.names[0][1])
            for p, contents in self.held.items()
            if contents.group is None and p in self.numbers and not contents.is_owned
        ]

    @functools.cached_property
    def owned(self) -> list[tuple[nn.Parameter, str]]:
        """The whole parameters that this rank steps for all, with names."""
        its = [(p, self.held[p]) for p in self.numbers if self.held[p].is_owned]
        return [(p, contents.names[0][1]) for p, contents in its if contents.names]

    @functools.cached_property
    def has_owners(self) -> bool:
        """True if each rank steps some whole parameters for all."""
        return any(self.held[p].is_owned for p in self.numbers)

    def is_stepped_whole(self, name: str) -> bool:
        """True for a parameter that this rank owns, or another one."""
        param = self.by_name[name][0]
        return self.has_owners and (param not in self.numbers or self.held[param].is_owned)

    def names_in(self, parameter: nn.Parameter) -> list[str]:
        """Return the first names of the user's parameters in one of the optimizer's."""
        return [name for _, name in self.held[parameter].names]

    @property
    def names_by_group(self) -> list[list[str]]:
        """The first names of the user's parameters in each of the optimizer's groups."""
        names = ([self.names_in(parameter) for parameter in g["params"]] for g in self.groups)
        return [list(itertools.chain(*each)) for each in names]

    def is_vacant(self, parameter: nn.Parameter) -> bool:
        """True for a parameter with elements, but none on this rank, whose optimizer state here is
        meaningless. False for a DTensor, which has state on every rank."""
        contents = self.held[parameter]
        if contents.group is None or _torch_private.is_dtensor(parameter):
            return False
        return not store_of(contents.group).has_part([*contents.all_names])

    def name_before(self, name: object) -> str:
        """Return a parameter's first name before wrapping, and without DDP's ``module.``."""
        clean = clean_name(str(name))
        inner = clean.removeprefix("module.")
        return self._first_names.get(clean) or self._first_names.get(inner, clean)

    @functools.cached_property
    def _first_names(self) -> dict[str, str]:
        all_names = (its for contents in self.held.values() for its in contents.all_names.values())
        return {name: its[0] for its in all_names for name in its}

    def is_user_key(self, key: object) -> bool:
        """True for the key of a state that belongs to no parameter."""
        is_name = key in self.by_key or self.name_before(key) in self.by_name
        return isinstance(key, str) and not is_name

    def in_group(self, group: Group) -> list[nn.Parameter]:
        """Return the sharded parameters of one group, whether the optimizer holds them or not."""
        return [param for param, _ in store_of(group).sharded_params if param in self.held]


def require_units(units: Sequence[object], model: object, where: str) -> None:
    """Raise UsageError for a model without units."""
    if not units:
        raise UsageError.of(
            "The model is not wrapped.",
            expected="a model that FullyShardedDataParallel or fully_shard was applied to",
            got=f"a {type(model).__name__} without any",
            where=where,
            fix="pass the wrapped model; without a wrapper, use the state dicts of torch",
        )


def begin(
    model: nn.Module, call: str, where: str, copies: bool = False, meet: bool = True
) -> tuple[list[NamedUnit], list[Group]]:
    """Return the model's units and groups, once every rank has made the call; ``copies``: replicas
    too. Raises StateError during a step, UsageError without units. Collective if ranks ``meet``."""
    require_idle(model, call)
    units = units_of(model)
    require_units(units, model, where)
    groups = [group for named in units for group in named.unit.groups]
    if meet:
        rendezvous.require_all_ranks(call, groups, copies=copies)
    return units, groups


def contents_of(units: Sequence[NamedUnit], model: nn.Module) -> dict[nn.Parameter, ParamContents]:
    """Return the contents of each parameter that an optimizer may hold: those of units first."""
    held: dict[nn.Parameter, ParamContents] = {}
    for named in units:
        for group in named.unit.groups:
            params = store_of(group).orig_params
            for parameter, indices in group.store.sharded_params:
                all_names = {i: tuple(names_of(params[i], named.prefix)) for i in indices}
                held[parameter] = ParamContents(group, all_names)
    others: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in held:
            others[parameter] = (*others.get(parameter, ()), clean_name(name))
    return {**held, **{p: ParamContents(None, {0: its}) for p, its in others.items()}}


def ownership_of(
    groups: Sequence[Mapping[str, Any]], where: str, units: Sequence[NamedUnit], model: nn.Module
) -> ParamOwnership:
    """Return the contents of an optimizer's parameters. Raises UsageError for a foreign one."""
    held = contents_of(units, model)
    for position, group_of_optimizer in enumerate(groups):
        for parameter in group_of_optimizer["params"]:
            if (owned := _contents_of_whole(parameter, units)) is not None:
                held[parameter] = owned
            elif parameter not in held:
                raise UsageError.of(
                    "The optimizer holds a parameter that is not the model's.",
                    expected="an optimizer created from the parameters of the wrapped model",
                    got=f"a parameter of shape {tuple(parameter.shape)}",
                    where=f"parameter group {position}, {where}",
                    fix="create it after wrapping, or wrap with use_orig_params=True",
                )
    return ParamOwnership(where, groups, held, {p: n for n, p in model.named_parameters()})


class CompositeOptimizer(torch.optim.Optimizer):
    """Optimizers that step together. Some of their parameters may be whole ones that this rank
    owns: ``state_dict()`` has names, and only ``numbered_state_dict`` numbers."""

    optimizers: Sequence[torch.optim.Optimizer] = ()
    trained: Sequence[nn.Parameter] = ()  # those of the model, whose gradients are used
    group_names: Sequence[Sequence[str]] = ()  # by parameter group, the names of all ranks


class NumberedState(dict[str, Any]):
    """A state dict by the numbers of this rank's parameters, which no other rank can load."""


def inner_optimizers(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that keep state: one, unless it is composite."""
    return optimizer.optimizers if isinstance(optimizer, CompositeOptimizer) else [optimizer]


def numbered_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state on this rank, by the numbers of its parameters."""
    if isinstance(optimizer, CompositeOptimizer):
        return torch.optim.Optimizer.state_dict(optimizer)
    return optimizer.state_dict()


class StateView(MutableMapping[Any, Any]):
    """The states of several optimizers as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, key: Any) -> MutableMapping[Any, Any]:
        """Return the state of the optimizer with a parameter; of the first for any other key."""
        for each in self._optimizers:
            if any(key is p for group in each.param_groups for p in group["params"]):
                return each.state
        return self._optimizers[0].state

    def __getitem__(self, key: Any) -> Any:
        for each in self._optimizers:
            if key in each.state:
                return each.state[key]
        raise KeyError(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(each.state for each in self._optimizers)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)


# {whole parameter: weak reference to the group and index of what it is whole of; None: of nothing}
_wholes: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register_whole(whole: nn.Parameter, group: Group | None = None, index: int = 0) -> None:
    """Register a whole parameter that this rank owns. group: None for one that stands for none."""
    _wholes[whole] = None if group is None else (weakref.ref(group), index)


def _contents_of_whole(parameter: nn.Parameter, units: Sequence[NamedUnit]) -> ParamContents | None:
    """Return the contents of a registered whole parameter of the model, else None."""
    if parameter not in _wholes:
        return None
    if (place := _wholes[parameter]) is None:
        return ParamContents(None, {}, is_owned=True)
    group, index = place[0](), place[1]
    for named in units:
        if group in named.unit.groups:
            names = names_of(store_of(group).orig_params[index], named.prefix)
            return ParamContents(None, {index: tuple(names)}, is_owned=True)
    return None


def numbered_names(ownership: ParamOwnership, order: Sequence[str]) -> list[list[str]]:
    """Return parameter names by group, in the order of the numbers in an unwrapped model's
    optimizer: in FlatParameters that of the model before wrapping, ``order``."""
    position = {name: number for number, name in enumerate(order)}
    found = []
    for group, names in zip(ownership.groups, ownership.names_by_group, strict=True):
        held = (ownership.held[parameter].group for parameter in group["params"])
        if any(its is not None and store_of(its).is_flattened for its in held):
            names.sort(key=lambda name: position.get(name, len(position)))
        found.append(names)
    return found


def is_whole(group: Group) -> bool:
    """True if the optimizer holds the user's parameters in their own shapes: nothing is sharded."""
    return store_of(group).ranks == 1 and not store_of(group).is_flattened


# -- what it keeps for a parameter


class StateKind(enum.Enum):
    """How a value of an optimizer's state relates to its (sharded) parameter."""

    PER_ELEMENT = enum.auto()  # of the parameter's shape: sharded and gathered like it
    SCALAR = enum.auto()  # a count or a setting: the same on all ranks and for any layout
    RANK_LOCAL = enum.auto()  # of another shape, or not a tensor: fits only this rank's part


Kinds = dict[nn.Parameter, dict[Any, StateKind]]  # of the states of some parameters


def classify(value: object, param: nn.Parameter) -> StateKind:
    """Return the kind of a state of ``param``. A 0-d tensor is a scalar, also for a 0-d parameter;
    a tensor subclass that wraps others is rank-local."""
    if not isinstance(value, torch.Tensor):
        is_scalar = value is None or isinstance(value, (numbers.Number, str))
        return StateKind.SCALAR if is_scalar else StateKind.RANK_LOCAL
    if value.dim() == 0:
        return StateKind.SCALAR
    is_wrapper = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    plain = not is_wrapper or not _torch_private.is_plain(value)
    fits = plain and value.layout is torch.strided and value.shape == param.shape
    return StateKind.PER_ELEMENT if fits else StateKind.RANK_LOCAL


def classify_all(
    states: Mapping[nn.Parameter, Mapping[Any, Any]], *, tells_0d: bool = False
) -> Kinds:
    """Return the kinds of all states of several parameters. A rank-local state may have the shape
    of a one-element parameter by chance: other parameters decide. tells_0d: 0-d states of 0-d
    parameters are per element, unless they are counts."""
    kinds = {
        param: {key: classify(value, param) for key, value in state.items()}
        for param, state in states.items()
    }
    rank_local, with_dims = set[Any](), dict[Any, list[bool]]()
    for param, its in kinds.items():
        rank_local |= {
            key
            for key, kind in its.items()
            if kind is StateKind.RANK_LOCAL and not _is_as(states[param][key], param)
        }
        for key, kind in its.items() if param.dim() else ():
            with_dims.setdefault(key, []).append(kind is StateKind.PER_ELEMENT)
    for param, its in kinds.items():
        for key in rank_local & its.keys() if param.numel() <= 1 else ():
            if its[key] is StateKind.PER_ELEMENT:
                its[key] = StateKind.RANK_LOCAL
        for key, value in states[param].items() if tells_0d and not param.dim() else ():
            is_0d = isinstance(value, torch.Tensor) and not value.dim()
            if is_0d and is_per_element_of_0d(key, with_dims.get(key, ())):
                its[key] = StateKind.PER_ELEMENT
    return kinds


def _is_as(value: object, param: nn.Parameter) -> bool:
    """True for a tensor that wraps others, and has the shape of its parameter."""
    return _is_wrapper(value) and isinstance(value, torch.Tensor) and value.shape == param.shape


def is_per_element_of_0d(key: Any, with_dims: Collection[bool]) -> bool:
    """Return whether a 0-d state of a 0-d parameter has one element per element, and is not a
    count. with_dims: whether the same state of other parameters has; without any, the name
    decides."""
    return any(with_dims) if with_dims else not is_count(key, ())


@dataclasses.dataclass(frozen=True)
class HeldStates:
    """The states that an optimizer holds, by its parameters, without stale ones of parameters that
    have no element on this rank."""

    ownership: ParamOwnership
    states: Mapping[nn.Parameter, Mapping[Any, Any]]

    @functools.cached_property
    def of_shards(self) -> dict[nn.Parameter, Mapping[Any, Any]]:
        """All but those of whole parameters that this rank owns."""
        return {p: s for p, s in self.states.items() if not self.ownership.held[p].is_owned}

    @functools.cached_property
    def kinds(self) -> Kinds:
        return classify_all(self.of_shards)

    @property
    def owned(self) -> dict[str, dict[Any, Any]]:
        """The states of whole parameters that this rank owns, by name, in plain tensors."""
        named = self.ownership.owned
        return {name: in_tensors(self.states[p]) for p, name in named if p in self.states}

    @property
    def unmanaged(self) -> dict[str, Mapping[Any, Any]]:
        """The states of parameters that no unit manages, by name, in the optimizer's order."""
        names = dict(self.ownership.unmanaged)
        return {names[p]: state for p, state in self.states.items() if p in names}


def in_tensors(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a state with dicts in place of tensors that wrap others, such as 8-bit moments."""
    return {
        key: {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
        if _is_wrapper(value)
        else value
        for key, value in state.items()
    }


def of_tensors(state: Mapping[Any, Any], like: Mapping[Any, Any]) -> dict[Any, Any]:
    """Undo ``in_tensors``. like: a state with tensors of the same classes and shapes."""
    found = dict(state)
    for key, its in like.items():
        if _is_wrapper(its) and isinstance(found.get(key), Mapping):
            found[key] = type(its).__tensor_unflatten__(
                dict(found[key]), its.__tensor_flatten__()[1], its.shape, its.stride()
            )
    return found


def _is_wrapper(value: object) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__")


def snapshot(value: Any, to_cpu: bool = False) -> Any:
    """Return a copy that later steps do not change, or the value if it cannot be copied."""
    if type(value) is torch.Tensor:
        return copied(value, to_cpu)
    if _is_wrapper(value) and _torch_private.is_plain(value):  # which may not know how to copy
        return of_tensors(snapshot(in_tensors({None: value}), to_cpu), {None: value})[None]
    if isinstance(value, torch.Tensor):
        return copied(value, to_cpu)
    if type(value) is dict:
        return {key: snapshot(item, to_cpu) for key, item in value.items()}
    try:
        with _DeepCopies(to_cpu):
            return copy.deepcopy(value)
    except Exception:  # an object may raise anything, and a save must not fail for that
        return value


class _DeepCopies(TorchFunctionMode):
    """Lets deepcopy copy tensors one by one, not whole storages."""

    def __init__(self, to_cpu: bool) -> None:
        super().__init__()
        self._to_cpu = to_cpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and type(args[0]) is torch.Tensor:
            return copied(args[0], self._to_cpu).requires_grad_(args[0].requires_grad)
        return func(*args, **(kwargs or {}))


# -- its state dict


def require_state_dict(
    state_dict: Any,
    where: str,
    kind: type[FsdpCompatError],
    is_user_key: Callable[[Any], bool] = lambda key: isinstance(key, str),
) -> None:
    """Raise ``kind`` for an object that is not an optimizer's state dict. "param_groups" may be
    missing, and keys that name no parameter may have any value."""
    wrong = _wrong_part(state_dict, is_user_key)
    if wrong is not None:
        expected, got = wrong
        raise kind.of(
            "This is not an optimizer state dict.",
            expected=expected,
            got=f"{textwrap.shorten(repr(got), 300)} of type {type(got).__name__}",
            where=where,
            fix="pass what optim_state_dict(model, optim) or optimizer.state_dict() returned, on "
            "every rank; note the order of the arguments",
        )


def _wrong_part(state_dict: Any, is_user_key: Callable[[Any], bool]) -> tuple[str, object] | None:
    """Return (expected, got) for the first part that an optimizer's state dict cannot have."""
    if not isinstance(state_dict, Mapping) or "state" not in state_dict:
        return "a dict with 'state' and 'param_groups'", state_dict
    state, groups = state_dict["state"], state_dict.get("param_groups", ())
    if not isinstance(state, Mapping):
        return "'state': a dict keyed by parameter", state
    for name, entry in state.items():
        if not isinstance(entry, Mapping) and not is_user_key(name):
            return f"'state' of {name!r}: a dict", entry
    if not isinstance(groups, (list, tuple)):
        return "'param_groups': a list of dicts", groups
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            return f"'param_groups', group {number}: a dict with 'params', a list", group
    return None


def user_keys(state: Mapping[Any, Any], listed: Collection[Any]) -> set[Any]:
    """Return the keys of what belongs to no parameter. listed: the parameters in the groups. A dict
    that is like the state of a parameter belongs to one under another name."""
    entries = {key: entry for key, entry in state.items() if isinstance(entry, Mapping)}
    known = {key for name in listed if name in entries for key in entries[name]}
    alike = {
        name
        for name, entry in entries.items()
        if (known & entry.keys() if known else any(hasattr(v, "shape") for v in entry.values()))
    }
    return state.keys() - ({*listed} | alike if listed else entries.keys())
