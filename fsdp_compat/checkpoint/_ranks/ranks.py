"""The ranks that a model is sharded over, as those that write and read its checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ... import _torch_private
from ..._comm.agreement import Agreement, raise_together, told
from ..._comm.communicator import communicator
from ..._comm.mesh import Axis, Mesh
from ..._engine import rendezvous
from ..._state.optim_contents import require_units
from ..._state.units import ModelUnit, model_units_in, runtimes_of, tensor_parallel_axes
from ...errors import CheckpointError, StateError, wrong_type
from .. import _background as background
from .mailbox import RankLost, StoreMailbox
from .processes import Members, own_facts


@dataclasses.dataclass
class Ranks:
    """The ranks of a model in one call, numbered by replica, shard and tensor parallelism."""

    call: str
    number: int  # of this rank
    count: int
    mesh: Mesh
    mailbox: StoreMailbox
    have_agreed: bool = False  # at least once in this call

    @contextlib.contextmanager
    def taking_part(self, ends_call: bool = True) -> Iterator[None]:
        """Wrap the call: if this rank leaves it with an error, the others stop waiting for it.
        ends_call: False for a part of a call, after which this rank goes on with it."""
        try:
            yield
        except BaseException as error:
            self.mailbox.leave(error)
            self.mailbox.close()
            raise
        if ends_call:
            self.mailbox.close()

    def exchange(self, value: object) -> list[Any]:
        """Return every rank's ``value`` (JSON). Collective. Raises StateError if a rank is lost."""

        def work() -> object:
            self.mailbox.post(json.dumps(value))
            if self.number:
                return None
            texts = self.mailbox.read(range(self.count))
            # Usually most are equal: send each text once, and which ranks have it as runs.
            different = {text: index for index, text in enumerate(dict.fromkeys(texts))}
            runs = itertools.groupby(different[text] for text in texts)
            return list(different), [(index, len(list(same))) for index, same in runs]

        try:
            texts, runs = self.mailbox.conclude(work)
        except RankLost as lost:
            raise self.lost(lost) from lost
        values = [json.loads(text) for text in texts]
        return [values[index] for index, length in runs for _ in range(length)]

    def lost(self, lost: RankLost, state: str = "") -> StateError:
        """Return the error for a call that a rank did not finish. state: that it leaves behind."""
        return StateError.of(
            f"A rank did not finish {self.call}.",
            expected=f"all {self.count} ranks to finish the call",
            got=str(lost),
            where=f"rank {self.number} of {self.count}",
            fix=f"look for that rank's error; {state}earlier checkpoints are unchanged",
        )

    @contextlib.contextmanager
    def agreeing(self, what: str, path: object, state: str) -> Iterator[Agreement]:
        """Run the with block on all ranks, and tell each other how it went. If it raises on a rank,
        raise on all: its own error there, of an OSError that ``what`` failed at ``path``, and the
        ``state`` it leaves; elsewhere an error that quotes it. The first time in a call, raise
        instead if an earlier ``async_save`` failed and was not reported. Collective."""
        agreement = Agreement()
        problem: Exception | None = None
        try:
            yield agreement
        except OSError as error:
            problem = CheckpointError.of(
                what,
                expected="files that can be read and written",
                got=f"{type(error).__name__}: {error}",
                where=str(path),
                fix=f"check the path, free space and permissions; {state}",
            )
            problem.__cause__ = error
        except Exception as error:
            problem = error
        unreported = {} if self.have_agreed else background.unreported()
        self.have_agreed = True
        own = told(problem), agreement.own if problem is None else None, unreported
        problems, values, failed = zip(*self.exchange(own), strict=True)
        earlier = {identity: text for each in failed for identity, text in each.items()}
        if earlier or any(problems):
            self.mailbox.close()
        if earlier:
            raise background.report_failed(earlier, self.call) from problem
        raise_together(problem, problems, self.call, CheckpointError)
        agreement.by_rank = list(values)


def ranks_of(model: Any, call: str) -> tuple[list[ModelUnit], Ranks]:
    """Return the units in ``model`` and their ranks, once all of them have made this call. Raises
    UsageError without units, StateError if only some ranks call. Collective."""
    if not isinstance(model, nn.Module):
        fix = f"pass the path first: {call}(path, model, ...)"
        raise wrong_type("model", "a torch.nn.Module", model, call, fix)
    units = model_units_in(model)
    require_units(units, model, f"{call}(..., model)")
    axes = tensor_parallel_axes([each.unit for each in units])
    groups = [group for each in units for group in each.unit.groups]
    rendezvous.require_all_ranks(call, groups, copies=True, axes=axes)
    first = units[0]
    members = _members(first.mesh, axes, first.device)
    members.num_calls += 1
    timeout: datetime.timedelta = _torch_private.group_timeout(first.group)
    mailbox = StoreMailbox(members, f"{members.name}/{members.num_calls}", timeout.total_seconds())
    return units, Ranks(call, members.number, members.count, first.mesh, mailbox)


# Members by process group, and by the ranks of all axes of the mesh.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Members]] = (
    weakref.WeakKeyDictionary()
)


def _members(mesh: Mesh, axes: Sequence[Axis], device: torch.device) -> Members:
    """Return the members of a mesh and of tensor parallelism. Collective the first time."""
    shard, replica = mesh.shard, mesh.replica
    # a single rank has no group
    group = next((axis.group for axis in (shard, replica, *axes) if axis.group), dist.group.WORLD)
    known = {} if group is None else _known.setdefault(group, {})
    key = tuple(axis.members for axis in (shard, replica, *axes))
    if key not in known:
        facts, number = [own_facts(shard.members[shard.rank])], 0
        for axis in (shard, replica):
            gathered = communicator(axis, device).gather_objects(facts)
            facts = [fact for of_rank in gathered for fact in of_rank]
            number += axis.rank * (len(facts) // axis.ranks)
        for axis in axes:
            if len({rank for _, rank, _ in facts} & {*axis.members}) == 1:
                gathered = communicator(axis, device).gather_objects(facts)
                facts = [fact for same in zip(*gathered, strict=True) for fact in same]
                number = number * axis.ranks + axis.rank
        known[key] = Members(facts, number)
    return known[key]


def require_rest(units: list[ModelUnit], call: str) -> None:
    """Reshard all units. Raises StateError during a pass and inside summon_full_params."""
    for runtime in runtimes_of(units):
        runtime.require_idle(call)
        runtime.require_parts(call)
        runtime.reshard_all()
