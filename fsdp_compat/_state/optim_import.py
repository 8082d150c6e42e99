"""Loads an optimizer's state dict, keyed by parameter names or numbers, full or sharded.

It is first checked by the names before wrapping, which sends and changes nothing. Then every rank
cuts its part out of its own dict, or out of what rank 0 sends."""

from __future__ import annotations

import dataclasses
import hashlib
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._comm.agreement import agreeing
from .._engine.group import Group
from .._engine.state_store import store_of
from .._text import joined
from ..errors import CheckpointError, UsageError
from .block_states import PartStates
from .loaded_values import is_sharded, read_part
from .optim_agreement import describe, global_rank, require_alike
from .optim_contents import (
    CompositeOptimizer,
    NumberedState,
    ParamOwnership,
    begin,
    ownership_of,
    require_state_dict,
    snapshot,
    user_keys,
)
from .optim_fit import (
    ONLY_NEW,
    Cut,
    Entries,
    Fill,
    bring,
    grouped,
    names_of_numbers,
    not_loaded,
    per_element,
    settings_for,
)
from .rank0 import Rank0Broadcast, common_mesh, outline_of
from .rank_local import RankState
from .sharded_values import cut_of
from .units import model_units_in, names_before


def import_optim_state(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any] | None,
    where: str,
    optimizer: torch.optim.Optimizer | None,
    *,
    from_rank0: bool = False,
    is_named: bool = False,
) -> dict[str, Any]:
    """Return the dict that ``optimizer.load_state_dict`` takes, see ``optim_state_dict_to_load``.
    groups: of the optimizer, which may be unknown. is_named: its state is keyed by the model's
    current names. from_rank0: all ranks load rank 0's dict if any of them has None or {}.

    Collective if values are sharded or come ``from_rank0``: one small exchange, after which every
    rank raises UsageError or CheckpointError if one does; then values that are sharded differently
    or, if a rank has none, rank 0's, one (group, state) at a time."""
    label = "the state of the optimizer"
    if optimizer is not None:
        label = f"the state of {type(optimizer).__name__}"
    entries = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    # A rank whose parameters all have other owners sees no sharded value.
    is_composite = isinstance(optimizer, CompositeOptimizer)
    is_local = not (from_rank0 or is_composite or any(_of_ranks(entries)))
    call = where.partition("(")[0]
    units, all_groups = begin(model, call, label, copies=True, meet=not is_local)
    registered = model_units_in(model)
    mesh = common_mesh(registered) if from_rank0 else None
    own_mesh, device = mesh or registered[0].mesh, registered[0].device
    rank0 = None if is_local else Rank0Broadcast(own_mesh, device)
    num_ranks = 1 if rank0 is None else rank0.num_ranks
    foreign = [each for each in all_groups if mesh is None and _num_ranks(each) != num_ranks]
    shared = [each for each in all_groups if each not in foreign]
    plan: _Given | None = None
    exchange = rank0.gather if rank0 is not None else lambda value: [value]
    with agreeing(exchange, where) as agreement:
        ownership, facts = ownership_of(groups, label, units, model), ""
        part_states = PartStates(ownership, optimizer, "optim_state_dict_to_load")
        if rank0 is not None:
            described = repr(describe(ownership, shared, exact=False))
            facts = hashlib.sha256(described.encode()).hexdigest()
        if not (state_dict is None or (isinstance(state_dict, Mapping) and not state_dict)):
            plan = _read(part_states, state_dict, is_named, names_before(model), where)
            if from_rank0 and rank0 is not None and rank0.is_here:
                what = "Rank 0 cannot send a sharded optimizer state dict."
                fix = "load a sharded dict on every rank, with SHARDED_STATE_DICT set for the model"
                _refuse_sharded(state_dict["state"], what, where, fix)
        agreement.own = plan is not None, facts
    have, digests = zip(*agreement.by_rank, strict=True)
    if not all(have):
        _require_senders(have, from_rank0, foreign, where)
    if rank0 is not None and len({*digests}) > 1:
        exact = rank0.gather((global_rank(), describe(ownership, shared, exact=True)))
        require_alike(ownership, shared, dict(exact), where, unmanaged=not all(have))
    sender = None if all(have) else rank0
    if sender is not None:
        told = sender.send_object(plan and plan.outline(ownership), "the optimizer state dict")
        plan = plan if sender.is_here else told
    assert plan is not None
    entries = _with_parts(plan, part_states, sender)
    states = bring(ownership, entries, plan.cut, all_groups, _DictValues(sender))
    keys: Mapping[nn.Parameter, Any] = ownership.numbers
    if is_named and optimizer is not None:  # it expects state of all its parameters
        keys, own = ownership.names, optimizer.state
        vacant = (p for p in ownership.numbers if ownership.is_vacant(p) and own.get(p))
        states |= {p: snapshot(dict(own[p])) for p in vacant}
    by_key = {keys[p]: states[p] for p in ownership.numbers if p in states}
    result: dict[str, Any] = NumberedState() if ownership.has_owners else {}
    result["state"] = by_key | snapshot(dict(plan.user_states))
    if plan.groups is not None:
        settings = [its for its, _ in settings_for(ownership, plan.groups, ownership.where)]
        result["param_groups"] = grouped(ownership.groups, settings, keys)
    return result


def _num_ranks(group: Group) -> int:
    return group.shard.ranks * group.replica.ranks


def _require_senders(
    have: Sequence[bool], from_rank0: bool, foreign: Iterable[Group], where: str
) -> None:
    """Raise UsageError unless rank 0 can send its dict. have: by rank, or of this one alone.
    foreign: groups of other ranks than these."""
    missing = [rank for rank, has in enumerate(have) if not has]
    if not from_rank0 or 0 in missing:
        ranks = f" on rank(s) {textwrap.shorten(str(missing), 100)} of {len(have)}"
        raise UsageError.of(
            "The optimizer state dict is missing.",
            expected=f"a dict on {'the first' if from_rank0 else 'every'} rank",
            got=f"None or {{}}{ranks if len(have) > 1 else ''}",
            where=where,
            fix="pass what optim_state_dict(model, optim) returned; note the order of the "
            "arguments. To load a dict that only rank 0 has, set "
            "FullOptimStateDictConfig(rank0_only=True) for the model",
        )
    for group in foreign:  # the parameters of other ranks would differ
        raise UsageError.of(
            "Units that are sharded over different ranks cannot be loaded from one rank.",
            expected=f"all units sharded over the same {len(have)} ranks, or all ranks",
            got=f"{_num_ranks(group)} ranks",
            where=f"{where}, {group.name}",
            fix="load the optimizer state dict on every rank, without rank0_only=True",
        )


# -- reading what was given


@dataclasses.dataclass(frozen=True)
class _Given:
    """A state dict that was checked and fits, keyed by the names before wrapping."""

    entries: Entries  # without rank-local states
    rank_local: Mapping[str, Sequence[RankState]]  # those of all ranks, by name
    groups: Sequence[Mapping[str, Any]] | None  # parameter groups, their params by name
    user_states: Mapping[str, Any]  # states that belong to no parameter
    cut: Cut  # which of the entries are cut

    def outline(self, ownership: ParamOwnership) -> _Given:
        """Return a copy without the values that are sent one group at a time, or one parameter."""
        entries = {
            name: {
                key: outline_of(value) if (name, key) in self.cut else value
                for key, value in entry.items()
                if not ownership.is_stepped_whole(name)
            }
            for name, entry in self.entries.items()
        }
        return dataclasses.replace(
            self, entries=entries, rank_local=dict.fromkeys(self.rank_local, ())
        )


def _read(
    part_states: PartStates, state_dict: Any, is_named: bool, order: Sequence[str], where: str
) -> _Given:
    """Return a state dict that fits. order: of the names before wrapping. Raises UsageError for
    anything else than a state dict, CheckpointError for one that does not fit."""
    ownership = part_states.ownership
    is_damaged = isinstance(state_dict, Mapping) and "state" in state_dict
    error = CheckpointError if is_damaged else UsageError
    require_state_dict(state_dict, where, error, ownership.is_user_key)
    state, groups = state_dict["state"], state_dict.get("param_groups")
    keys = (*state, *(key for group in groups or () for key in group["params"]))
    names = {key: ownership.name_before(key) for key in keys}
    if any(isinstance(key, int) for key in keys):
        names |= names_of_numbers(groups, ownership, order, where)
    if groups is not None:
        groups = [{**group, "params": [names[key] for key in group["params"]]} for group in groups]
    settings_for(ownership, groups or (), where)  # raises
    users = user_keys(state, keys[len(state) :])
    user_states = {
        key: entry
        for key, entry in state.items()
        if (is_named or key in users) and ownership.is_user_key(key)
    }
    entries: dict[str, Any] = {}  # of several names of a tied parameter, the first counts
    for key in [key for key in state if key not in user_states]:
        entries.setdefault(names[key], state[key])
    _refuse_unknown(ownership, entries)
    new = [
        name for name, which in not_loaded(ownership, groups or (), entries) if which is ONLY_NEW
    ]
    if new and groups and entries and global_rank() == 0:
        text = f"{where}: no state for {joined(new, 4, ', ')}: not in the saved optimizer."
        warnings.warn(text, stacklevel=4)
    rank_local: dict[str, list[RankState]] = {}
    for name, entry in entries.items():
        entries[name] = {k: v for k, v in entry.items() if type(v) is not RankState}
        states = [value for value in entry.values() if type(value) is RankState]
        if states := states + part_states.take_blocks(name, entries[name]):
            part_states.restored(name, states)  # raises
            rank_local[name] = states
    owned = {name: entries[name] for _, name in ownership.owned if name in entries}
    what = "GatheredOptimizer cannot load a sharded state."
    fix = "load its own state_dict(), or save with FULL_STATE_DICT or fsdp_compat.checkpoint"
    _refuse_sharded(owned, what, ownership.where, fix)
    cut = per_element(ownership, entries, ownership.where)
    return _Given(entries, rank_local, groups, user_states, cut)


def _refuse_unknown(ownership: ParamOwnership, named: Mapping[str, Any]) -> None:
    """Raise CheckpointError for names that are not parameters'."""
    unknown = [name for name in named if name not in ownership.by_name]
    if unknown:
        raise CheckpointError.of(
            "The optimizer state belongs to another model.",
            expected=f"names of its parameters, such as {next(iter(ownership.by_name), 'none')!r}",
            got=f"{len(unknown)} unknown name(s), such as {unknown[0]!r}",
            where="the 'state' of the optimizer state dict",
            fix="load what optim_state_dict returned for this model; for state that belongs to no "
            "parameter, pass is_named_optimizer=True",
        )


def _values_in(state: object) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (parameter, name of the state, value) of the values in a dict's "state"."""
    for name, entry in state.items() if isinstance(state, Mapping) else ():
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            yield name, key, value


def _of_ranks(state: object) -> Iterator[bool]:
    """Yield of each value whether ranks have parts of it."""
    return (type(v) is RankState or is_sharded(v) for _, _, v in _values_in(state))


def _refuse_sharded(state: Mapping[Any, Any], what: str, where: str, fix: str) -> None:
    for name, key, value in (each for each in _values_in(state) if is_sharded(each[2])):
        raise CheckpointError.of(
            what,
            expected="whole tensors, as FULL_STATE_DICT gives them",
            got=f"a {type(value).__name__}",
            where=f"{where}, state {key!r} of {name!r}",
            fix=fix,
        )


# -- bringing it


def _with_parts(
    plan: _Given, part_states: PartStates, sender: Rank0Broadcast | None
) -> dict[str, Mapping[Any, Any]]:
    """Return the entries with this rank's part of rank-local states, and, with a ``sender``, the
    states of whole parameters that it owns. Collective then: one parameter at a time."""
    entries, ownership = dict(plan.entries), part_states.ownership
    own = {name for _, name in ownership.owned}
    for name in filter(ownership.is_stepped_whole, plan.entries if sender is not None else ()):
        assert sender is not None
        entry = sender.send_object(entries.pop(name), f"the state of {name}")
        entries |= {name: entry} if name in own else {}
    for name, states in plan.rank_local.items():
        if sender is not None:
            states = sender.send_object(states, f"the state of {name}")
        entries[name] = {**entries[name], **part_states.restored(name, states)}
    return entries


@dataclasses.dataclass(frozen=True)
class _DictValues:
    """The values of a dict that every rank has, or that rank 0 sends."""

    sender: Rank0Broadcast | None

    def tensor_for(self, param: nn.Parameter, key: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros_like(param.detach(), dtype=dtype, memory_format=torch.contiguous_format)

    def uncut(self, param: nn.Parameter, key: Any, value: Any) -> Any:
        return snapshot(value)

    def fill(self, group: Group, fills: Sequence[Fill]) -> None:
        """Collective if rank 0 sends, or if values are sharded differently."""
        fills = [fill for fill in fills if fill.value is not None]
        values = [fill.value for fill in fills]
        if self.sender is not None:
            values = self.sender.send(values, f"the state {fills[0].key!r} of {group.name}")
        for fill, value in zip(fills, values, strict=True):
            fill.target.copy_(_own_elements(value, fill.param, group, fill.index).reshape(-1))


def _own_elements(value: Any, param: Any, group: Group, index: int) -> torch.Tensor:
    """Return this rank's elements of a state. Collective if it is sharded differently."""
    store, are_dtensors = store_of(group), all(map(_torch_private.is_dtensor, (value, param)))
    placed = [(each.device_mesh, each.placements) for each in (value, param) if are_dtensors]
    if placed and placed[0] == placed[1]:
        return _torch_private.local_part(value)
    if type(value) is torch.Tensor and tuple(value.shape) == store.shape(index):
        parallel = store.parallel[index]
        return store.rows_of_whole(index, value if parallel is None else parallel.part(value))
    return read_part(value, cut_of(group, index))
