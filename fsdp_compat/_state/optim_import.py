"""Loads an optimizer's state dict, keyed by parameter names or numbers, full or sharded.

It is first checked by the names before wrapping, which sends and changes nothing. Then every rank
cuts its part out of its own dict, or out of what rank 0 sends."""

from __future__ import annotations

import dataclasses
import hashlib
import textwrap
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._engine.group import Group
from .._engine.state_store import store_of
from .._text import joined
from ..errors import (
    CheckpointError,
    FsdpCompatError,
    RuntimeUsageError,
    UsageError,
    ValueCheckpointError,
)
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
    fitted,
    names_of_numbers,
    not_loaded,
    per_element,
    settings_for,
)
from .rank0 import Rank0Broadcast, common_mesh, outline_of
from .rank_local import RankState, check_layout, restored
from .sharded_values import cut_of
from .units import model_units_in, names_before


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How a dict is loaded."""

    optimizer: torch.optim.Optimizer | None  # None: not known
    from_rank0: bool  # all ranks load rank 0's dict if any of them has None or {}
    is_named: bool = False  # the optimizer's state is keyed by the model's current names
    # Groups list saved parameters only, and all or none in a FlatParameter must have state.
    is_older_call: bool = False


def import_optim_state(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any] | None,
    wanted: LoadOptions,
    where: str,
) -> dict[str, Any]:
    """Return the dict that ``optimizer.load_state_dict`` takes, see ``optim_state_dict_to_load``.
    groups: of the optimizer. Collective if values are sharded or come ``from_rank0``: one small
    exchange, after which every rank raises UsageError or CheckpointError if one does; then values
    that are sharded differently or, if a rank has none, rank 0's, one (group, state) at a time."""
    optimizer = "the optimizer" if wanted.optimizer is None else type(wanted.optimizer).__name__
    label = f"the state of {optimizer}"
    entries = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    # A rank whose parameters all have other owners sees no sharded value.
    has_owners = isinstance(wanted.optimizer, CompositeOptimizer)
    is_local = not (wanted.from_rank0 or has_owners or next(_sharded_in(entries), None))
    call = where.partition("(")[0]
    units, all_groups = begin(model, call, label, copies=True, meet=not is_local)
    if is_local:
        if not state_dict:
            _require_senders([False], False, (), 0, where)
        own = ownership_of(groups, label, units, model)
        given = _read(own, state_dict, wanted, names_before(model), where)
        return _Loading(own, given, None, wanted).result(all_groups)
    registered = model_units_in(model)
    mesh = common_mesh(registered) if wanted.from_rank0 else None
    rank0 = Rank0Broadcast(mesh or registered[0].mesh, registered[0].device)
    foreign = [g for g in all_groups if mesh is None and _num_ranks(g) != rank0.num_ranks]
    shared = [group for group in all_groups if group not in foreign]
    ownership, plan, problem, facts = None, None, None, ""
    try:
        ownership = ownership_of(groups, label, units, model)
        described = repr(describe(ownership, shared, exact=False))
        facts = hashlib.sha256(described.encode()).hexdigest()
        if not (state_dict is None or (isinstance(state_dict, Mapping) and not state_dict)):
            plan = _read(ownership, state_dict, wanted, names_before(model), where)
            if wanted.from_rank0 and rank0.is_here:
                what = "Rank 0 cannot send a sharded optimizer state dict."
                fix = "load a sharded dict on every rank, with SHARDED_STATE_DICT set for the model"
                _refuse_sharded(state_dict["state"], what, where, fix)
    except Exception as error:  # raised later, after the other ranks have been told
        problem = error
    kind = type(problem) if isinstance(problem, FsdpCompatError) else RuntimeUsageError
    answers = rank0.gather((plan is not None, str(problem or ""), kind, facts))
    if problem is not None:
        raise problem
    assert ownership is not None
    have, texts, kinds, digests = (list(each) for each in zip(*answers, strict=True))
    _refuse_together(texts, kinds, where)
    if not all(have):
        _require_senders(have, wanted.from_rank0, foreign, rank0.num_ranks, where)
    if len({*digests}) > 1:
        exact = rank0.gather((global_rank(), describe(ownership, shared, exact=True)))
        require_alike(ownership, shared, dict(exact), where, unmanaged=not all(have))
    sender = None if all(have) else rank0
    if sender is not None:
        told = sender.send_object(plan and plan.outline(ownership), "the optimizer state dict")
        plan = plan if rank0.is_here else told
    assert plan is not None
    return _Loading(ownership, plan, sender, wanted).result(all_groups)


def _num_ranks(group: Group) -> int:
    return group.shard.ranks * group.replica.ranks


def _refuse_together(
    texts: Sequence[str], kinds: Sequence[type[FsdpCompatError]], where: str
) -> None:
    """Raise on every rank if any rank refuses its dict. texts, kinds: of its error, by rank."""
    for rank, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if text:
            raise kind.of(
                "Another rank refused the optimizer state dict.",
                expected="a dict that fits on every rank",
                got=f"on rank {rank} of {len(texts)}: {text}",
                where=where,
                fix="see the error on that rank",
            )


def _require_senders(
    have: Sequence[bool], from_rank0: bool, foreign: Iterable[Group], num_ranks: int, where: str
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
            expected=f"all units sharded over the same {num_ranks} ranks, or all ranks",
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

    def whole_names(self, ownership: ParamOwnership) -> list[str]:
        """Return the names of parameters that ranks step whole, here or elsewhere."""
        own = {name for _, name in ownership.owned}
        return [n for n in self.entries if n in own or ownership.is_stepped_elsewhere(n)]

    def cut(self, ownership: ParamOwnership) -> Cut:
        """Return the states that are cut. Raises CheckpointError for one that does not fit."""
        whole = {*self.whole_names(ownership)}
        managed = {
            name: entry
            for name, entry in self.entries.items()
            if ownership.held[ownership.by_name[name][0]].group is not None and name not in whole
        }
        return per_element(ownership, managed, ownership.where)

    def outline(self, ownership: ParamOwnership) -> _Given:
        """Return a copy without the values that are sent one group at a time, or one parameter."""
        cut, whole = self.cut(ownership), {*self.whole_names(ownership)}
        entries = {
            name: {
                key: outline_of(value) if (name, key) in cut else value
                for key, value in (entry.items() if name not in whole else ())
            }
            for name, entry in self.entries.items()
        }
        return dataclasses.replace(
            self, entries=entries, rank_local=dict.fromkeys(self.rank_local, ())
        )


def _read(
    ownership: ParamOwnership,
    state_dict: Any,
    wanted: LoadOptions,
    order: Sequence[str],
    where: str,
) -> _Given:
    """Return a state dict that fits. order: of the names before wrapping. Raises UsageError for
    anything else than a state dict, CheckpointError for one that does not fit."""
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
        if (wanted.is_named or key in users) and ownership.is_user_key(key)
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
        warnings.warn(text, stacklevel=5)
    if wanted.is_older_call:
        _refuse_uncounted(ownership, entries, where)
    rank_local: dict[str, list[RankState]] = {}
    for name, entry in entries.items():
        if states := [value for value in entry.values() if isinstance(value, RankState)]:
            rank_local[name] = states
            entries[name] = {k: v for k, v in entry.items() if not isinstance(v, RankState)}
    check_layout(ownership, rank_local)
    owned = {name: entries[name] for _, name in ownership.owned if name in entries}
    what = "GatheredOptimizer cannot load a sharded state."
    fix = "load its own state_dict(), or save with FULL_STATE_DICT or fsdp_compat.checkpoint"
    _refuse_sharded(owned, what, ownership.where, fix)
    given = _Given(entries, rank_local, groups, user_states)
    given.cut(ownership)  # raises
    return given


def _refuse_unknown(ownership: ParamOwnership, named: Mapping[str, Any]) -> None:
    """Raise CheckpointError for names that are not parameters'."""
    unknown = [name for name in named if name not in ownership.by_name]
    if unknown:
        raise CheckpointError.of(
            "The optimizer state belongs to another model.",
            expected="names of the model's parameters, such as "
            f"{next(iter(ownership.by_name), 'none')!r}",
            got=f"{len(unknown)} unknown name(s), such as {unknown[0]!r}",
            where="the 'state' of the optimizer state dict",
            fix="load the optimizer state that optim_state_dict returned for this model, keyed "
            "by parameter names; for state that belongs to no parameter, pass "
            "is_named_optimizer=True",
        )


def _refuse_uncounted(
    ownership: ParamOwnership, entries: Mapping[str, Mapping[Any, Any]], where: str
) -> None:
    """Raise CheckpointError if a count would be wrong for some of a FlatParameter."""
    for param in ownership.numbers:
        names = ownership.names_in(param)
        missing = [name for name in names if name not in entries]
        values = [value for name in names for value in entries.get(name, {}).values()]
        others = [v for v in values if v is not None and not isinstance(v, RankState)]
        if missing and not all(isinstance(v, torch.Tensor) and v.dim() for v in others):
            raise ValueCheckpointError.of(
                "A parameter of a FlatParameter has no optimizer state.",
                expected=f"state of all {len(names)} parameters in it, or of none of them",
                got=f"none of {len(missing)}, such as {missing[0]!r}",
                where=where,
                fix="use optim_state_dict_to_load, which counts all of them alike",
            )


def _sharded_in(state: object) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (parameter, name of the state, value) of the sharded values in a dict's "state"."""
    for name, entry in state.items() if isinstance(state, Mapping) else ():
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            if is_sharded(value):
                yield name, key, value


def _refuse_sharded(state: Mapping[Any, Any], what: str, where: str, fix: str) -> None:
    for name, key, value in _sharded_in(state):
        raise CheckpointError.of(
            what,
            expected="whole tensors, as FULL_STATE_DICT gives them",
            got=f"a {type(value).__name__}",
            where=f"{where}, state {key!r} of {name!r}",
            fix=fix,
        )


# -- cutting it


@dataclasses.dataclass(frozen=True)
class _Loading:
    """Carries out a plan, in the same order on all ranks."""

    ownership: ParamOwnership
    plan: _Given
    sender: Rank0Broadcast | None  # None if every rank has the values itself
    wanted: LoadOptions

    def result(self, groups: Iterable[Group]) -> dict[str, Any]:
        """Return what ``optimizer.load_state_dict`` takes. groups: of the model."""
        ownership, plan, named = self.ownership, self.plan, self.wanted.optimizer
        state: dict[nn.Parameter, dict[Any, Any]] = {}
        cut, whole = plan.cut(ownership), plan.whole_names(ownership)
        for group in groups:
            found = self._of_group(group, cut, {*whole}).items()
            state.update((p, entry) for p, entry in found if p in ownership.numbers)
        owned = {name: parameter for parameter, name in ownership.owned}
        for name in whole:
            entry = plan.entries[name]
            if self.sender is not None:
                entry = self.sender.send_object(entry, f"the state of {name}")
            if name in owned:
                state[owned[name]] = snapshot(dict(entry))
        for parameter, name in ownership.unmanaged:
            if name in plan.entries:
                state[parameter] = snapshot(dict(plan.entries[name]))
        vacant = {p for p in ownership.numbers if ownership.is_vacant(p)}
        keys: Mapping[nn.Parameter, Any] = ownership.numbers
        if named is None or not self.wanted.is_named:
            state = {p: entry for p, entry in state.items() if p not in vacant}
        else:  # it expects state of all its parameters
            keys = ownership.names
            state.update({p: snapshot(dict(named.state[p])) for p in vacant if named.state.get(p)})
        by_key = {keys[p]: state[p] for p in ownership.numbers if p in state}
        result: dict[str, Any] = NumberedState() if ownership.has_owners else {}
        result["state"] = by_key | snapshot(dict(plan.user_states))
        if plan.groups is not None:
            result["param_groups"] = self._groups(plan.groups, keys)
        return result

    def _of_group(
        self, group: Group, cut: Cut, whole: Collection[str]
    ) -> dict[nn.Parameter, dict[Any, Any]]:
        """Return the states of a group's sharded parameters, cut to their shapes."""
        plan, states = self.plan, dict[nn.Parameter, dict[Any, Any]]()
        fills: dict[Any, list[tuple[nn.Parameter, Fill]]] = {}  # by key, which is sent at once
        for param in self.ownership.in_group(group):
            names = self.ownership.held[param].names
            entries = {i: plan.entries[n] for i, n in names if n in plan.entries and n not in whole}
            if not entries:
                continue
            entry, its_fills = fitted(self.ownership, param, entries, cut, _zeros)
            filled = {fill.key for fill in its_fills}
            states[param] = {
                key: value if key in filled else snapshot(value) for key, value in entry.items()
            }
            for fill in its_fills:
                if fill.value is not None:
                    fills.setdefault(fill.key, []).append((param, fill))
        for of_key in fills.values():
            self._fill(group, of_key)
        for param, entry in states.items():
            own = [name for name in self.ownership.names_in(param) if name in plan.rank_local]
            of_all_ranks = [each for name in own for each in plan.rank_local[name]]
            if own and self.sender is not None:
                of_all_ranks = self.sender.send_object(of_all_ranks, f"the state of {own[0]}")
            entry.update(restored(group, of_all_ranks))
        return states

    def _fill(self, group: Group, fills: Sequence[tuple[nn.Parameter, Fill]]) -> None:
        """Bring one state of a group's parameters to its places."""
        values = [fill.value for _, fill in fills]
        if self.sender is not None:
            values = self.sender.send(values, f"the state {fills[0][1].key!r} of {group.name}")
        for (param, fill), value in zip(fills, values, strict=True):
            fill.target.copy_(_own_elements(value, param, group, fill.index).reshape(-1))

    def _groups(
        self, saved: Sequence[Mapping[str, Any]], keys: Mapping[nn.Parameter, Any]
    ) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the settings of saved groups of its parameters."""
        known = {name for group in saved for name in group["params"]}
        groups, ownership = [], self.ownership
        matches = settings_for(ownership, saved, ownership.where)
        for group, (settings, _) in zip(ownership.groups, matches, strict=True):
            listed = [p for p in group["params"] if known & {*ownership.names_in(p)}]
            listed = listed if self.wanted.is_older_call else group["params"]
            groups.append({**group, **(settings or {}), "params": [keys[p] for p in listed]})
        return groups


def _zeros(param: nn.Parameter, key: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(param.detach(), dtype=dtype, memory_format=torch.contiguous_format)


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
