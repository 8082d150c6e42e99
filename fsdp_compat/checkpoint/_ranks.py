"""The ranks over which a model is spread, as the ones that write and read its checkpoint."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

from torch import nn

from .._engine import meeting, torch_private
from .._engine.collectives import Communicator, communicator
from .._engine.mesh import Mesh
from .._instances import Instance, instances_in
from ..errors import CheckpointError, StateError, UsageError, explain

__all__ = ["Postbox", "Ranks", "agree", "as_ours", "ranks_of", "require_rest"]


@dataclasses.dataclass(frozen=True)
class Ranks:
    """All ranks of a model, numbered from 0: copy by copy, and in each in the order of the shards."""

    number: int  # of this one
    count: int
    mesh: Mesh
    timeout: datetime.timedelta  # for waiting for others
    _along: tuple[Communicator, Communicator]

    def exchange(self, value: object) -> list[Any]:
        """Return every rank's picklable ``value``, by number. Collective."""
        shard, replica = self._along
        return [its for copy in replica.gather_objects(shard.gather_objects(value)) for its in copy]


def ranks_of(model: nn.Module, call: str) -> tuple[list[Instance], Ranks]:
    """Return the instances in ``model``, and the ranks they are spread over, who meet here. Collective.

    Raises UsageError where there are none, StateError if the ranks do not all make this call.
    """
    instances = instances_in(model) if isinstance(model, nn.Module) else []
    if not instances:
        raise UsageError(
            explain(
                "The model is not wrapped.",
                expected="a model with a FullyShardedDataParallel in it",
                got=f"a {type(model).__name__} without any",
                where=f"{call}(..., model)",
                fix="wrap the model before, with FullyShardedDataParallel(model)",
            )
        )
    meeting.meet(call, [group for instance in instances for group in instance._unit.groups], copies=True)
    settings = instances[0]._settings
    mesh, device = settings.mesh, settings.device
    number = mesh.replica.rank * mesh.shard.ranks + mesh.shard.rank
    along = communicator(mesh.shard, device), communicator(mesh.replica, device)
    return instances, Ranks(number, mesh.ranks, mesh, torch_private.group_timeout(settings.group), along)


def agree(ranks: Ranks, problem: BaseException | None, value: Any, call: str) -> list[Any]:
    """Return every rank's ``value``, or raise on all ranks if any has a problem: its own error where it is, and the news elsewhere.

    Collective.
    """
    found = ranks.exchange((None if problem is None else (type(problem).__name__, str(problem)), value))
    if problem is not None:
        raise problem
    for number, (its_problem, _) in enumerate(found):
        if its_problem is not None:
            kind = UsageError if its_problem[0].endswith("UsageError") else CheckpointError
            raise kind(f"{call}, on rank {number} of {ranks.count}: {its_problem[1]}")
    return [its for _, its in found]


class Postbox:
    """What ranks tell each other about one save by way of the store, on a connection of its own, from any thread."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        """name: the same on all ranks, and never used before."""
        self._ranks = ranks
        home = torch_private.default_store()
        if home is None:
            raise StateError("the process group of this module was destroyed before a checkpoint was saved")
        self._home = home  # held: on one rank it serves all
        self._store = torch_private.store_of_its_own(home, f"fsdp_compat/checkpoint/{name}")
        self._posted: list[str] = []

    def post(self, key: str, text: str) -> None:
        self._store.set(key, text)
        self._posted.append(key)

    def post_for_good(self, key: str, text: str) -> None:
        """Post what ``clear`` leaves, as nobody knows when all have read it."""
        self._store.set(key, text)

    def read(self, keys: Sequence[str], what: str) -> list[str]:
        """Return what stands under ``keys``, when it stands there. Raises StateError after the time limit."""
        try:
            self._store.wait(list(keys), self._ranks.timeout)
            return [text.decode() for text in self._store.multi_get(list(keys))]
        except RuntimeError as error:
            missing = [key for key in keys if not self._there(key)]
            raise StateError(
                explain(
                    f"Waiting for {what} failed.",
                    expected=f"word from all {self._ranks.count} ranks within {self._ranks.timeout.total_seconds():g} s",
                    got=f"none under {missing[:8]}, {len(missing)} in all ({error})",
                    where=f"rank {self._ranks.number} of {self._ranks.count}",
                    fix="look for a rank that ended; the checkpoints that stood before stand as they were",
                )
            ) from error

    def _there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False

    def clear(self) -> None:
        """Take back what this rank has posted, when all have read it."""
        for key in self._posted:
            self._store.delete_key(key)
        self._posted.clear()


def require_rest(instances: list[Instance], call: str) -> None:
    """Raise StateError inside of a pass or of summon_full_params; bring all units to their sharded form."""
    for instance in instances:
        instance._runtime.require_idle(call)
        instance._runtime.require_parts(call)
        instance._runtime.rest()


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
