"""The optimizer's state dict, keyed by parameter names, full or sharded, out of the optimizer and into it.

The optimizer sees targets: a FlatParameter that holds a part of many parameters, or 1-D parts of single ones. A state tensor of a
target's shape holds one element per element of the shard, so it is cut by the same layout as the parameters.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._engine import torch_private
from .._engine.unit import Group, Unit
from ..errors import CheckpointError, UsageError, explain
from .formats import is_sharded, read_part, shape_of, sharded_value
from .model import no_parallel_boxes, store_of
from .names import clean_name

__all__ = ["NamedUnit", "optim_state", "optim_state_to_load"]


@dataclasses.dataclass(frozen=True)
class NamedUnit:
    """A unit, and what its parameters' names begin with in the model."""

    unit: Unit
    prefix: str


@dataclasses.dataclass(frozen=True)
class _Held:
    """What one parameter of the optimizer holds: whole parameters, by (index in the layout, name)."""

    group: Group | None  # None: a parameter that no unit manages
    names: tuple[tuple[int, str], ...]


def _held_by(optimizer: torch.optim.Optimizer, units: Sequence[NamedUnit], model: nn.Module) -> dict[nn.Parameter, _Held]:
    """Return what every parameter of the optimizer holds; raises UsageError for one that is not the model's, and without units."""
    if not units:
        raise UsageError(
            explain(
                "The model is not wrapped.",
                expected="a model with a FullyShardedDataParallel in it",
                got=f"a {type(model).__name__} without any",
                where=f"the state of {type(optimizer).__name__}",
                fix="wrap the model before, or use optimizer.state_dict() and optimizer.load_state_dict(...), which do without",
            )
        )
    held: dict[nn.Parameter, _Held] = {}
    for named in units:
        for group in named.unit.groups:
            members = store_of(group).members
            for target, indices in group.store.targets:
                held[target] = _Held(group, tuple((i, named.prefix + clean_name(members[i].name)) for i in indices))
    for name, parameter in model.named_parameters():
        held.setdefault(parameter, _Held(None, ((0, clean_name(name)),)))
    for position, group_of_optimizer in enumerate(optimizer.param_groups):
        for parameter in group_of_optimizer["params"]:
            if parameter not in held:
                raise UsageError(
                    explain(
                        "The optimizer holds a parameter that is not the model's.",
                        expected="an optimizer made from the parameters of the wrapped model",
                        got=f"a parameter of shape {tuple(parameter.shape)}",
                        where=f"parameter group {position} of {type(optimizer).__name__}",
                        fix="make the optimizer after wrapping, from model.parameters(), or wrap with use_orig_params=True",
                    )
                )
    return held


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer by the number that its state dict gives them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _refuse_form(state_dict: Any, error: type[UsageError | CheckpointError], call: str) -> None:
    """Raise ``error`` for what has not the form of an optimizer's state dict."""
    if (found := _other_form(state_dict)) is not None:
        expected, got = found
        raise error(
            explain(
                "This is no optimizer state dict.",
                expected=expected,
                got=f"{textwrap.shorten(repr(got), 300)} of type {type(got).__name__}",
                where=call,
                fix="pass what optimizer.state_dict() or optim_state_dict(model, optim) returned, on every rank",
            )
        )


def _other_form(state_dict: Any) -> tuple[str, object] | None:
    """Return what is expected of an optimizer's state dict, and what is there instead; None if all is as it should be."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        return "a dict with 'state' and 'param_groups'", list(state_dict) if isinstance(state_dict, Mapping) else state_dict
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping):
        return "'state': a dict by parameters", state
    for name, entry in state.items():
        if not isinstance(entry, Mapping):
            return f"'state' of {name!r}: a dict", entry
    if not isinstance(groups, (list, tuple)):
        return "'param_groups': a list of dicts", groups
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            return f"'param_groups', group {number}: a dict with 'params', a list", group
    return None


def optim_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    units: Sequence[NamedUnit],
    *,
    full: bool,
    to_cpu: bool,
    keep: bool,
    process_group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Return {"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}.

    state_dict: what optimizer.state_dict() gives, or None for that. Collective if ``full``: one gather per (group, state name);
    otherwise nothing is sent, and tensors of a parameter's shape are this rank's boxes of it. ``keep``: False on ranks that want
    nothing back; they return {}. Raises UsageError, before that, for another optimizer or dict.
    """
    held = _held_by(optimizer, units, model)
    source = optimizer.state_dict() if state_dict is None else state_dict
    call = "optim_state_dict(model, optim, optim_state_dict)"
    _refuse_form(source, UsageError, call)
    parameters = _parameters(optimizer)
    for key in (*source["state"], *(key for group in source["param_groups"] for key in group["params"])):
        if not isinstance(key, int) or not 0 <= key < len(parameters):
            raise UsageError(
                explain(
                    "The optimizer's state is keyed by something else than the numbers of its parameters.",
                    expected=f"what optimizer.state_dict() returns: parameters by number, 0 to {len(parameters) - 1}",
                    got=f"the key {textwrap.shorten(repr(key), 300)}",
                    where=call,
                    fix="leave the third argument out; a dict that optim_state_dict has returned needs no second pass",
                )
            )
    by_parameter = {parameters[number]: value for number, value in source["state"].items()}
    state: dict[str, dict[str, Any]] = {}
    done: set[int] = set()
    for parameter in parameters:
        group = held[parameter].group
        if group is None:
            if parameter in by_parameter:
                state[held[parameter].names[0][1]] = {
                    key: _copy(value, to_cpu and full) for key, value in by_parameter[parameter].items()
                }
        elif id(group) not in done:
            done.add(id(group))
            _add_group_state(state, group, held, by_parameter, full=full, to_cpu=to_cpu, keep=keep, process_group=process_group)
    if not keep:
        return {}
    ordered = {name: state[name] for p in parameters for _, name in held[p].names if name in state}
    groups = []
    for group_state in source["param_groups"]:
        names = [name for number in group_state["params"] for _, name in held[parameters[number]].names]
        groups.append({**{key: _copy(value, False) for key, value in group_state.items() if key != "params"}, "params": names})
    return {"state": ordered, "param_groups": groups}


def _add_group_state(
    state: dict[str, dict[str, Any]],
    group: Group,
    held: Mapping[nn.Parameter, _Held],
    by_parameter: Mapping[nn.Parameter, Mapping[str, Any]],
    *,
    full: bool,
    to_cpu: bool,
    keep: bool,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Add the state of everything one group holds."""
    store = store_of(group)
    layout, rank = store.layout, store.rank
    targets = [target for target, _ in store.targets if target in held]
    # {state name: dtype} per target, as the ranks have it together: an optimizer may keep nothing for an empty part.
    shaped = [
        {key: value.dtype for key, value in by_parameter.get(target, {}).items() if _is_shaped(value, target)} for target in targets
    ]
    if full and group.shard.ranks > 1:
        for others in group.shard.gather_objects(shaped):
            for own, other in zip(shaped, others, strict=True):
                own.update({key: dtype for key, dtype in other.items() if key not in own})
    for target, its_shaped in zip(targets, shaped, strict=True):
        for _, name in held[target].names:
            entry = {
                key: _copy(value, to_cpu and full) for key, value in by_parameter.get(target, {}).items() if key not in its_shaped
            }
            if entry or its_shaped:
                state[name] = entry
    for key in dict.fromkeys(key for its_shaped in shaped for key in its_shaped):
        having = [target for target, its_shaped in zip(targets, shaped, strict=True) if key in its_shaped]
        dtype = next(its_shaped[key] for its_shaped in shaped if key in its_shaped)
        if full:
            buffer = torch.zeros(store.numel, dtype=dtype, device=store.shard.device)
            for target, place in zip((t for t, _ in store.targets), store.grads(buffer), strict=True):
                value = by_parameter.get(target, {}).get(key)
                if value is not None and _is_shaped(value, target):
                    place.copy_(value)
            gathered = group.gather_full(buffer)
            wholes = [
                value if parallel is None else parallel.whole(value)
                for value, parallel in zip(store.whole(gathered), store.parallel, strict=True)
            ]
            for target in having if keep else ():
                for index, name in held[target].names:
                    state[name][key] = _copy(wholes[index], to_cpu)
            continue
        if any(parallel is not None for parallel in store.parallel):
            raise no_parallel_boxes(group.name, store.members[0].name)
        for target in having:
            value = by_parameter[target][key].detach().reshape(-1)
            for index, name in held[target].names:
                run = value[layout.part_in_shard(index, rank).slice] if _is_flat(group, target) else value
                state[name][key] = sharded_value(layout, index, rank, run, group.shard.members, process_group)


def _is_flat(group: Group, target: nn.Parameter) -> bool:
    return store_of(group).flat_parameter is target


def _is_shaped(value: object, target: nn.Parameter) -> bool:
    """True for a state tensor with one element per element of the target; a 0-d one is a number, also where the target is 0-d."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == target.shape


def _copy(value: Any, to_cpu: bool) -> Any:
    """Tensors are copied, so that nothing in a dict shares or keeps more memory than it shows."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if to_cpu else value.detach().clone()
    return value


def optim_state_to_load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    units: Sequence[NamedUnit],
    order: Sequence[str],
) -> dict[str, Any]:
    """Return what ``optimizer.load_state_dict`` takes, from a dict by names, full or sharded, or by numbers, as the optimizer of an
    unwrapped model gives it. order: the names of all parameters, as the model had them before it was wrapped.

    Collective if a value is sharded in another way than the units are; with full values, or own boxes, nothing is sent.
    Raises CheckpointError, before that, for a dict that is not one of this model's optimizer.
    """
    held = _held_by(optimizer, units, model)
    _refuse_form(state_dict, CheckpointError, "optim_state_dict_to_load(model, optim, optim_state_dict)")
    if _is_by_number(state_dict):
        state_dict = _by_name(state_dict, optimizer, held, order)
    known = {name: None for its in held.values() for _, name in its.names}  # the optimizer may hold a part of the model only
    named_state = {_name_before(name, known): value for name, value in state_dict["state"].items()}
    parameters = _parameters(optimizer)
    unknown = [name for name in named_state if name not in known]
    if unknown:
        raise CheckpointError(
            explain(
                "The optimizer state belongs to another model.",
                expected=f"names of the model's parameters, such as {next(iter(known), 'none')!r}",
                got=f"{len(unknown)} unknown name(s), such as {unknown[0]!r}",
                where="the 'state' of the optimizer state dict",
                fix="load the optimizer state that optim_state_dict returned for this model, keyed by parameter names",
            )
        )
    shapes = {name: store_of(its.group).shape(index) for its in held.values() if its.group is not None for index, name in its.names}
    per_element = _per_element(named_state, shapes)
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        its = held[parameter]
        found = {index: named_state[name] for index, name in its.names if name in named_state}
        if not found:
            continue
        if its.group is None:
            state[number] = {key: _copy(value, False) for key, value in found[0].items()}
        else:
            state[number] = _state_of_target(its.group, parameter, found, per_element)
    return {"state": state, "param_groups": _param_groups(optimizer, held, state_dict["param_groups"])}


def _is_by_number(state_dict: Mapping[str, Any]) -> bool:
    groups = state_dict["param_groups"]
    return any(isinstance(number, int) for group in groups for number in group["params"])


def _name_before(name: object, known: Mapping[str, None]) -> str:
    """The name of a parameter before anything was wrapped: DistributedDataParallel's begin with ``module.``."""
    clean = clean_name(str(name))
    inner = clean.removeprefix("module.")
    return inner if clean not in known and inner in known else clean


def _by_name(
    state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer, held: Mapping[nn.Parameter, _Held], order: Sequence[str]
) -> dict[str, Any]:
    """Return the same dict with names: the numbers count an unwrapped model's parameters, group by group, in the model's order.

    Where an optimizer holds the parameters themselves (original ones) their order in it counts.
    """
    position = {name: number for number, name in enumerate(order)}
    names: dict[int, str] = {}
    groups = []
    saved = list(state_dict["param_groups"])
    for number, group in enumerate(optimizer.param_groups):
        its = [name for parameter in group["params"] for _, name in held[parameter].names]
        if any(len(held[parameter].names) > 1 for parameter in group["params"]):
            its.sort(key=lambda name: position.get(name, len(position)))
        given = list(saved[number]["params"]) if number < len(saved) else []
        if len(given) != len(its) or len(saved) != len(optimizer.param_groups):
            raise CheckpointError(
                explain(
                    "The optimizer state, which is keyed by numbers, does not fit the optimizer.",
                    expected=f"{len(optimizer.param_groups)} parameter group(s), number {number} of {len(its)} parameters",
                    got=f"{len(saved)} parameter group(s), number {number} of {len(given)} parameters",
                    where=f"optim_state_dict_to_load, parameter group {number} of {type(optimizer).__name__}",
                    fix="make the optimizer with the same groups of parameters as the one that was saved, or load state by names",
                )
            )
        names.update(zip(given, its, strict=True))
        groups.append({**saved[number], "params": its})
    state = {names.get(number, number): value for number, value in state_dict["state"].items()}  # others are no names, either
    return {"state": state, "param_groups": groups}


def _per_element(named_state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the names of the states that have one element per element of a parameter, of those in ``shapes``.

    With 0-d parameters such a state looks like a count: other parameters tell then, or its name. Raises CheckpointError if such a
    state has another shape than its parameter, anywhere: what differs between parameters cannot be the state of several in one.
    """
    by_key: dict[str, dict[str, Any]] = {}
    for name, entry in named_state.items():
        for key, value in entry.items() if name in shapes else ():
            if value is not None:
                by_key.setdefault(key, {})[name] = value
    found = set()
    for key, values in by_key.items():
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
        all_0d = len(tensors) == len(values) and all(shapes[name] == () for name in values)
        if any(is_sharded(tensor) or tensor.dim() > 0 for tensor in tensors) or (all_0d and key != "step"):
            found.add(key)
            for name, value in values.items():
                _check_value(value, shapes[name], f"state {key!r} of {name!r}")
    return found


def _check_value(value: object, shape: tuple[int, ...], where: str) -> None:
    """Raise CheckpointError for what cannot be a state of a parameter of this shape."""
    if not isinstance(value, torch.Tensor):
        got = f"a {type(value).__name__}"
    elif shape_of(value) != shape:
        got = f"shape {shape_of(value)}"
    elif not is_sharded(value) and (value.is_meta or value.layout is not torch.strided):
        got = "a tensor on the meta device, without values" if value.is_meta else f"a tensor of {value.layout}"
    else:
        return
    raise CheckpointError(
        explain(
            "An optimizer state does not fit its parameter.",
            expected=f"a tensor of shape {shape}",
            got=got,
            where=where,
            fix="load the optimizer state that was saved with this model",
        )
    )


def _state_of_target(
    group: Group, target: nn.Parameter, found: Mapping[int, Mapping[str, Any]], per_element: set[str]
) -> dict[str, Any]:
    """Cut the state of the parameters that a target holds to the target's shape.

    found: it, by index in the layout. per_element: the names of the states to cut, which fit; of others the first is taken.
    """
    store = store_of(group)
    layout, rank, flat = store.layout, store.rank, _is_flat(group, target)
    result: dict[str, Any] = {}
    for key in dict.fromkeys(key for entry in found.values() for key in entry):
        values = {index: entry[key] for index, entry in found.items() if entry.get(key) is not None}
        if not values or key not in per_element:
            result[key] = _copy(next(iter(values.values()), None), False)
            continue
        dtype = next(iter(values.values())).dtype
        whole = torch.zeros(store.numel if flat else target.numel(), dtype=dtype, device=store.shard.device)
        for index, value in values.items():
            if (parallel := store.parallel[index]) is not None:
                value = parallel.local(value) if not torch_private.is_plain(value) else parallel.part(value)
            run = read_part(value, layout, index, rank, group.shard.members)
            (whole[layout.part_in_shard(index, rank).slice] if flat else whole).copy_(run)
        result[key] = whole.view(target.shape)
    return result


def _param_groups(
    optimizer: torch.optim.Optimizer, held: Mapping[nn.Parameter, _Held], saved: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the optimizer's groups with the settings of the saved group that holds the same parameters."""
    saved = list(saved)
    known = {name: None for its in held.values() for _, name in its.names}
    by_name = {_name_before(name, known): group for group in saved for name in group["params"]}
    groups, number = [], 0
    for position, group in enumerate(optimizer.param_groups):
        names = [name for parameter in group["params"] for _, name in held[parameter].names]
        match = next((by_name[name] for name in names if name in by_name), saved[position] if position < len(saved) else {})
        settings = {key: _copy(value, False) for key, value in match.items() if key != "params"}
        numbers = list(range(number, number + len(group["params"])))
        number += len(numbers)
        groups.append({**{k: v for k, v in group.items() if k != "params" and k not in settings}, **settings, "params": numbers})
    return groups
