"""The ranks over which a model is spread, as the ones that write and read its checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch_private
from .._comm.communicator import communicator
from .._comm.mesh import Mesh
from .._engine import rendezvous
from .._state.model_units import ModelUnit, model_units_in, runtimes_of
from ..errors import CheckpointError, StateError, UsageError, explain
from . import _background as background
from ._mailbox import Lost, StoreMailbox
from ._processes import Members, members_of, own_facts

__all__ = ["Ranks", "all_ranks_or_raise", "as_ours", "ranks_of", "require_rest"]


@dataclasses.dataclass
class Ranks:
    """All ranks of a model in one call, numbered from 0: copy by copy, and in each in the order of
    the shards."""

    call: str
    number: int  # of this one
    count: int
    mesh: Mesh
    box: StoreMailbox
    have_agreed: bool = False

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Around the call: no other rank is to wait for one that leaves it early."""
        try:
            yield
        except BaseException as error:
            self.box.leave(error)
            raise
        finally:
            self.box.close()

    def exchange(self, value: object) -> list[Any]:
        """Return every rank's ``value`` (JSON), by number. Collective.

        Raises StateError, on all ranks, if one of them does not come to it.
        """

        def work() -> object:
            self.box.post(json.dumps(value))
            if self.number:
                return None
            texts = self.box.read(range(self.count))
            different = {
                text: index for index, text in enumerate(dict.fromkeys(texts))
            }  # most say the same
            return list(different), [different[text] for text in texts]

        try:
            texts, indices = self.box.conclude(work)
        except Lost as lost:
            raise StateError(
                explain(
                    f"The ranks did not stay together in {self.call}.",
                    expected=f"all {self.count} ranks to go through the call",
                    got=str(lost),
                    where=f"rank {self.number} of {self.count}",
                    fix="look for the error of that rank; the checkpoints that stood before stand "
                    "as they were",
                )
            ) from lost
        values = [json.loads(text) for text in texts]
        return [values[index] for index in indices]


def ranks_of(model: nn.Module, call: str) -> tuple[list[ModelUnit], Ranks]:
    """Return the units in ``model``, and the ranks they are spread over, who meet here.
    Collective.

    Raises UsageError where there are none, StateError if the ranks do not all make this call.
    """
    units = model_units_in(model) if isinstance(model, nn.Module) else []
    if not units:
        raise UsageError(
            explain(
                "The model is not wrapped.",
                expected="a model with a FullyShardedDataParallel in it",
                got=f"a {type(model).__name__} without any",
                where=f"{call}(..., model)",
                fix="wrap the model before, with FullyShardedDataParallel(model)",
            )
        )
    rendezvous.require_all_ranks(
        call, [group for each in units for group in each.unit.groups], copies=True
    )
    first = units[0]
    members = _members(first.mesh, first.device)
    members.num_calls += 1
    timeout: datetime.timedelta = _torch_private.group_timeout(first.group)
    box = StoreMailbox(members, f"{members.name}/{members.num_calls}", timeout.total_seconds())
    return units, Ranks(call, members.number, members.count, first.mesh, box)


# By process group, and by the ranks of both axes.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Members]] = (
    weakref.WeakKeyDictionary()
)


def _members(mesh: Mesh, device: torch.device) -> Members:
    """Return the ranks of a mesh, which introduce themselves to each other the first time.
    Collective."""
    shard, replica = mesh.shard, mesh.replica
    group = shard.group or replica.group or dist.group.WORLD  # one rank alone has none of its own
    known = {} if group is None else _known.setdefault(group, {})
    key = shard.members, replica.members
    if key not in known:
        copy = communicator(shard, device).gather_objects(own_facts(shard.members[shard.rank]))
        facts = [its for each in communicator(replica, device).gather_objects(copy) for its in each]
        known[key] = members_of(facts, replica.rank * shard.ranks + shard.rank)
    return known[key]


def all_ranks_or_raise(
    ranks: Ranks, problem: BaseException | None, value: Any, call: str
) -> list[Any]:
    """Return every rank's ``value`` (JSON), or raise on all ranks if any has a problem: its own
    error there, the news elsewhere.

    The first time in a call it raises the error of an earlier ``async_save`` that nobody was told.
    Collective.
    """
    unheard = {} if ranks.have_agreed else background.unheard()
    ranks.have_agreed = True
    told = None if problem is None else (type(problem).__name__, str(problem))
    found = ranks.exchange((told, value if problem is None else None, unheard))
    earlier = {identity: text for _, _, its in found for identity, text in its.items()}
    if earlier or any(its_problem is not None for its_problem, _, _ in found):
        ranks.box.close()
    if earlier:
        raise background.hear(earlier, call) from problem
    if problem is not None:
        raise problem
    for number, (its_problem, _, _) in enumerate(found):
        if its_problem is not None:
            kind = UsageError if its_problem[0].endswith("UsageError") else CheckpointError
            raise kind(f"{call}, on rank {number} of {ranks.count}: {its_problem[1]}")
    return [its for _, its, _ in found]


def require_rest(units: list[ModelUnit], call: str) -> None:
    """Raise StateError inside of a pass or of summon_full_params; bring all units to their sharded
    form."""
    for runtime in runtimes_of(units):
        runtime.require_idle(call)
        runtime.require_parts(call)
        runtime.rest()


def as_ours(error: Exception, what: str, path: Any, state: str) -> Exception:
    """Return ``error``, or what it means if it comes from the file system."""
    if not isinstance(error, OSError):
        return error
    made = CheckpointError(
        explain(
            what,
            expected="files that can be read and written",
            got=f"{type(error).__name__}: {error}",
            where=str(path),
            fix=f"see that there is space and permission; {state}",
        )
    )
    made.__cause__ = error
    return made
