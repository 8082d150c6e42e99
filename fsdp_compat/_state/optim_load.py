"""Loads an optimizer's state dict, keyed by parameter names or numbers, full or sharded.

Either every rank has the dict, or only rank 0 has it."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from .._engine.group import Group
from .._engine.state_store import StateStore, store_of
from ..errors import FsdpCompatError, RuntimeUsageError, UsageError, explain
from .optim_alike import describe, held_by_any, require_alike
from .optim_given import LATER, GivenState, LoadOptions, outline, read_given, refuse_sharded
from .optim_values import copied, snapshot
from .param_ownership import ParamOwnership
from .rank0 import Rank0Broadcast
from .rank_local import restored
from .values import dtype_of, read_part


def optim_state_to_load(
    ownership: ParamOwnership | None,
    problem: Exception | None,
    groups: Sequence[Group],
    state_dict: Any,
    wanted: LoadOptions,
    first: Rank0Broadcast,
    call: str,
) -> dict[str, Any]:
    """Return the dict that ``optimizer.load_state_dict`` takes.

    state_dict: keyed by names, full or sharded, or keyed by numbers, as the optimizer of an
    unwrapped model returns it. problem: why this rank cannot load, and has no ``ownership``.
    groups: all of the model.

    Collective over the mesh of ``first``: one small exchange, in which ranks agree that each has a
    dict that fits, and an optimizer of the same parameters. With full values, or boxes of this
    rank, nothing else is sent; values that are sharded differently are gathered. With
    ``from_rank0``, if any rank has None or {}, all take rank 0's dict, which sends one (group,
    state) at a time, in the model's order.

    Raises UsageError if a rank has no dict, or optimizers differ, and CheckpointError for a dict
    that does not belong to this model's optimizer; on every rank, before anything else is sent.
    """
    plan, facts = None, None
    groups = [
        group for group in groups if group.shard.ranks * group.replica.ranks == first.num_ranks
    ]
    missing = state_dict is None or (isinstance(state_dict, Mapping) and not state_dict)
    if ownership is not None:
        facts = describe(ownership, groups)
        if not missing:
            try:
                plan = read_given(ownership, state_dict, wanted, call)
                if wanted.from_rank0 and first.is_here:
                    refuse_sharded(plan, call)
            except FsdpCompatError as caught:
                problem = caught
    kind = type(problem) if isinstance(problem, FsdpCompatError) else RuntimeUsageError
    answers = first.gather((plan is not None, "" if problem is None else str(problem), kind, facts))
    if problem is not None:
        raise problem
    _refuse_together([answer[:3] for answer in answers], wanted.from_rank0, state_dict, call)
    assert ownership is not None
    all_facts = [of_rank for *_, of_rank in answers]
    sends = not all(answer[0] for answer in answers)
    require_alike(ownership, groups, all_facts, call, unmanaged=sends)
    sharded_params = held_by_any(ownership, groups, all_facts) | set(ownership.members)
    if sends:
        _refuse_other_ranks(ownership, first, call)
        sent_plan = first.tell(None if plan is None else plan.outline(ownership))
        plan = plan if first.is_here else sent_plan
    assert plan is not None
    return _Loading(ownership, plan, first if sends else None, sharded_params, wanted).result()


def _refuse_together(
    statuses: Sequence[tuple[bool, str, type[FsdpCompatError]]],
    from_rank0: bool,
    given: object,
    call: str,
) -> None:
    """Raise on every rank if any rank has no dict or a wrong one. statuses: (has a dict, error
    text, error type), by rank."""
    wrong = next(
        ((rank, text, kind) for rank, (_, text, kind) in enumerate(statuses) if text), None
    )
    if wrong is not None:
        raise wrong[2](
            explain(
                "Another rank refused the optimizer state dict.",
                expected="a dict that fits on every rank",
                got=f"on rank {wrong[0]} of {len(statuses)}: {wrong[1]}",
                where=call,
                fix="see the error on that rank",
            )
        )
    missing = [rank for rank, (has, *_) in enumerate(statuses) if not has]
    if missing and (not from_rank0 or 0 in missing):
        raise UsageError.of(
            "The optimizer state dict is missing on other ranks."
            if given
            else "This is not an optimizer state dict.",
            expected="a dict with 'state' and 'param_groups' on the first rank"
            if from_rank0
            else "a dict with 'state' and 'param_groups' on every rank",
            got=f"nothing on rank(s) {textwrap.shorten(str(missing), 100)} of {len(statuses)}, "
            f"here a {type(given).__name__}",
            where=call,
            fix="pass what optim_state_dict(model, optim) returned, on every rank; note the "
            "order of the arguments. To load a dict that only rank 0 has, set "
            "FullOptimStateDictConfig(rank0_only=True) for the model",
        )


def _refuse_other_ranks(ownership: ParamOwnership, first: Rank0Broadcast, call: str) -> None:
    """Raise if a unit is sharded over only some of the ranks, because others then hold different
    parameters under the same names."""
    for held in ownership.held.values():
        num_ranks = (
            first.num_ranks
            if held.group is None
            else held.group.shard.ranks * held.group.replica.ranks
        )
        if num_ranks != first.num_ranks:
            raise UsageError.of(
                "Units that are sharded over different ranks cannot be loaded from one rank.",
                expected=f"all units sharded over the same {first.num_ranks} ranks, or a dict "
                "on every rank",
                got=f"a unit sharded over {num_ranks} ranks, with {held.names[0][1]!r}",
                where=call,
                fix="load the optimizer state dict on every rank, without rank0_only=True",
            )


class _Loading:
    """Carries out a plan, in the same order on all ranks. sender: None if every rank has the values
    itself."""

    def __init__(
        self,
        ownership: ParamOwnership,
        plan: GivenState,
        sender: Rank0Broadcast | None,
        sharded_params: Collection[nn.Parameter],
        wanted: LoadOptions,
    ) -> None:
        """sharded_params: the managed parameters that any rank's optimizer holds. A rank whose
        optimizer lacks one has no part of it."""
        self._ownership, self._plan, self._sender = ownership, plan, sender
        self._sharded_params, self._wanted = sharded_params, wanted

    def result(self) -> dict[str, Any]:
        ownership, plan = self._ownership, self._plan
        state: dict[nn.Parameter, dict[Any, Any]] = {}
        groups = {
            id(contents.group): contents.group
            for p, contents in ownership.held.items()
            if p in self._sharded_params and contents.group is not None
        }
        for group in groups.values():
            state.update(
                self._of_group(
                    group, [p for p in ownership.in_group(group) if p in self._sharded_params]
                )
            )
        for parameter, name in ownership.unmanaged:
            if name in plan.entries:
                state[parameter] = self._uncut(plan.entries[name], name)
        keys: dict[nn.Parameter, Any] = {p: number for number, p in enumerate(ownership.parameters)}
        if self._wanted.named is not None:
            keys = {parameter: name for name, parameter in ownership.by_current_name.items()}
            # A named optimizer expects state of all its parameters.
            for parameter in ownership.parameters:
                if ownership.is_vacant(parameter) and self._wanted.named.state.get(parameter):
                    state[parameter] = {
                        key: snapshot(value)
                        for key, value in self._wanted.named.state[parameter].items()
                    }
        else:
            state = {
                parameter: entry
                for parameter, entry in state.items()
                if not ownership.is_vacant(parameter)
            }
        result: dict[str, Any] = {"state": {key: state[p] for p, key in keys.items() if p in state}}
        result["state"].update(
            self._uncut(plan.user_states, "the optimizer itself") if plan.user_states else {}
        )
        if plan.groups is not None:
            result["param_groups"] = self._groups(plan.groups, keys)
        return result

    def _of_group(
        self, group: Group, sharded_params: list[nn.Parameter]
    ) -> dict[nn.Parameter, dict[Any, Any]]:
        """Return the states of a group's sharded parameters, cut to their shapes."""
        plan, states = self._plan, dict[nn.Parameter, dict[Any, Any]]()
        keys: dict[Any, None] = {}
        for param in sharded_params:
            names = [name for _, name in self._ownership.held[param].names if name in plan.entries]
            if not names:
                continue
            states[param] = {key: None for name in names for key in plan.entries[name]}
            uncut: dict[Any, Any] = {}
            for name in names:
                for key, value in plan.entries[name].items():
                    if plan.is_cut(self._ownership, name, key):
                        keys[key] = None
                    elif value is not None:
                        uncut.setdefault(key, value)
            states[param].update(self._uncut(uncut, names[0]))
        for key in keys:
            self._add_cut(states, group, key)
        self._add_restored(states, group, list(states))
        return states

    def _uncut(self, values: Mapping[Any, Any], name: str) -> dict[Any, Any]:
        """Return copies of values that are not cut."""
        later = [key for key, value in values.items() if outline(value, cut=False) is LATER]
        sent: dict[Any, Any] = {}
        if later and self._sender is not None:
            sent = self._sender.send_object(
                {key: values[key] for key in later}, f"the state of {name}"
            )
        return {key: snapshot(sent.get(key, value)) for key, value in values.items()}

    def _add_cut(self, states: dict[nn.Parameter, dict[Any, Any]], group: Group, key: Any) -> None:
        """Add one per-element state. Parameters that the dict has no such state for get
        zeros."""
        store, members = store_of(group), group.shard.members
        found = [
            (param, index, self._plan.entries[name][key])
            for param in states
            for index, name in self._ownership.held[param].names
            if key in self._plan.entries.get(name, {})
            and self._plan.is_cut(self._ownership, name, key)
        ]
        values = [value for _, _, value in found]
        if self._sender is not None:
            values = self._sender.send(values, f"the state {key!r} of {group.name}")
        for (param, index, _), value in zip(found, values, strict=True):
            if states[param][key] is None:
                states[param][key] = torch.zeros_like(param.detach(), dtype=dtype_of(value))
            own = states[param][key]
            if _torch_private.is_dtensor(own):
                _take_rows(own, value, store, index, members)
                continue
            run = read_part(value, *store.cut(index), store.rank, members, store.parallel[index])
            own.view(-1)[store.part_in_sharded_param(index).slice].copy_(run)

    def _add_restored(
        self,
        states: dict[nn.Parameter, dict[Any, Any]],
        group: Group,
        sharded_params: list[nn.Parameter],
    ) -> None:
        """Add the rank-local states of this rank."""
        for param in sharded_params:
            names = [
                name
                for _, name in self._ownership.held[param].names
                if name in self._plan.rank_states
            ]
            found: Any = [state for name in names for state in self._plan.rank_states[name]]
            if names and self._sender is not None:
                found = self._sender.send_object(found, f"the state of {names[0]}")
            states[param].update(restored(group, found))

    def _groups(
        self, saved: Sequence[Mapping[str, Any]], keys: Mapping[nn.Parameter, Any]
    ) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the settings of the saved groups that hold the same
        parameters."""
        by_name = {name: group for group in saved for name in group["params"]}
        groups = []
        for position, group in enumerate(self._ownership.groups):
            names = {
                p: [name for _, name in self._ownership.held[p].names if name in by_name]
                for p in group["params"]
            }
            match = next(
                (by_name[listed[0]] for listed in names.values() if listed),
                saved[position] if position < len(saved) else {},
            )
            settings = {key: copied(value) for key, value in match.items() if key != "params"}
            present = {k: v for k, v in group.items() if k != "params" and k not in settings}
            listed = [p for p in group["params"] if names[p] or not self._wanted.as_saved]
            groups.append({**present, **settings, "params": [keys[p] for p in listed]})
        return groups


def _take_rows(
    own: Any, value: Any, store: StateStore, index: int, members: tuple[int, ...]
) -> None:
    """Copy this rank's rows of a state of parameter ``index`` into the DTensor ``own``. Collective
    if the value is sharded in another way."""
    parallel, local = store.parallel[index], _torch_private.local_part(own)
    if _torch_private.is_dtensor(value) and (
        (value.device_mesh, value.placements) == (own.device_mesh, own.placements)
    ):
        local.copy_(_torch_private.local_part(value))
    elif type(value) is torch.Tensor and tuple(value.shape) == store.shape(index):
        whole = value if parallel is None else parallel.part(value)
        local.copy_(store.rows_of_whole(index, whole).view(local.shape))
    else:
        run = read_part(value, *store.cut(index), store.rank, members, parallel)
        local.copy_(run.view(local.shape))
