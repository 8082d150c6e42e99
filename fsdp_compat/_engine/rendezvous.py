"""Collective calls first check that every rank has made them.

    require_all_ranks(call, groups)  returns when all ranks of ``groups`` have made the call; raises
                                     StateError on all of them if only some have
    require_all_ranks_once(call, groups)  the same, for the first such call of the groups
    nested(call, groups)             the same as a context; calls inside do not check again
    register(groups)                 once, by the constructor that makes the groups
    number_groups(groups)            when the groups are first used: gives them tags

``call`` is the name that users know, such as "state_dict". The ranks that split one copy of the
groups take part; with ``copies=True`` also those with the other copies. A call without groups, or
with one rank, checks nothing.

board/store_rendezvous.py has the mechanism. Two environment variables, the same on all ranks:
FSDP_COMPAT_MEET=0 disables the check, and FSDP_COMPAT_MEET_TIMEOUT is how long, in seconds, a
missing rank may be idle before the call fails."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

from .._comm.board import progress
from .._comm.board.store_rendezvous import rendezvous_of
from .._comm.communicator import made
from .._comm.environment import checks_calls, idle_limit_s
from .._comm.mesh import Axis, named
from .._comm.transport import Transport, are_alike
from ..errors import UsageError
from .group import Group, all_groups


class _Depth(threading.local):
    value = 0


_checked: weakref.WeakKeyDictionary[Group, set[str]] = weakref.WeakKeyDictionary()
_depth = _Depth()  # how many checked calls this thread is in


def _communicators(groups: Iterable[Group], copies: bool) -> dict[Transport, Group]:
    """Return the communicators of ``groups``, each with the first group that uses it, in the same
    order on all ranks, so that they cannot deadlock."""
    found: dict[Transport, Group] = {}
    for group in groups:
        replicas = [group.replica] if copies else []
        for communicator in (group.shard, *group.tensor_parallel, *replicas):
            if communicator.ranks > 1:
                found.setdefault(communicator, group)
    return dict(sorted(found.items(), key=lambda pair: (-pair[0].ranks, pair[0].members)))


def register(groups: Iterable[Group]) -> None:
    """Let other ranks see what this process does when it stands still."""
    if checks_calls():
        idle_limit_s()  # reports an invalid value now, on every rank
        progress.follow()
        for communicator in _communicators(groups, copies=True):
            rendezvous_of(communicator.members)


def number_groups(groups: Sequence[Group], *, copies: bool = True) -> None:
    """Number groups at their first use: single ranks may have made others before. Collective.
    Raises UsageError, on all ranks, if these use different models."""
    for axis in _communicators(groups, copies):
        new = _without_tags(groups, axis)
        if new and new[0].device.type != "meta":
            _require_same(new, axis)
        for group in new:
            group.use_tag(axis, axis.new_tag(group.name))


def _without_tags(groups: Iterable[Group], axis: Transport) -> list[Group]:
    return [group for group in groups if axis not in group.tags and _uses(group, axis)]


def _uses(group: Group, axis: Transport) -> bool:
    """Tell without making communicators: a model that this rank alone keeps may lack some."""
    further = (made(each, group.device) for each in group.store.tensor_parallel_axes)
    return axis in (group.shard, group.replica, *further)


def _require_same(new: Sequence[Group], axis: Transport) -> None:
    """Raise UsageError, on all ranks, if these are groups of different models: made by different
    lines, and at different places among equally many unused ones."""
    made, lines = _without_tags(all_groups, axis), all_groups[new[0]]
    beside = [group for group in made if all_groups[group] == lines]
    place, length = made.index(new[0]), len(new)
    facts = length, len(made), (length, place), (length, beside.index(new[0]), lines)
    alike = [are_alike(repr(fact), [axis], "the first use of a model") for fact in facts]
    if not any(alike[2:]) and (alike[1] or not alike[0]):
        raise UsageError.of(
            "The ranks use different models, or have made them in different orders.",
            expected=f"one model, used first by all of the ranks {named(axis.members)}",
            got=f"{new[0].name}, made after {place} of {len(made)} unused groups on this rank",
            where=progress.location(),
            fix="make models in the same order on every rank, and use the same one",
        )


def require_all_ranks(
    call: str, groups: Iterable[Group], *, copies: bool = False, axes: Sequence[Axis] = ()
) -> None:
    """Return when all ranks of ``groups`` have made the same call; raise StateError on all of them
    if that can no longer happen. Collective. axes: further ones whose ranks take part."""
    groups = list(groups)
    pairs = _communicators(groups, copies)
    for communicator in pairs:
        communicator.require_working()
    if not (pairs or axes) or _depth.value:
        return
    waits = [
        (each.members, each.activity.name, group.tags.get(each)) for each, group in pairs.items()
    ]
    waits += [(axis.members, "", None) for axis in axes if axis.ranks > 1]
    done: list[frozenset[int]] = []
    for members, name, tag in waits:
        if any(ranks.issuperset(members) for ranks in done):
            continue
        rendezvous = rendezvous_of(members)
        if rendezvous is not None:
            rendezvous.meet(f"{call}()", f"{name} {tag}", name)
            done.append(frozenset(members) if len(waits) > 1 else frozenset())
    number_groups(groups, copies=copies)


def require_all_ranks_once(call: str, groups: Iterable[Group]) -> None:
    """Collective. Check only the first such call of these groups: each check costs a round trip to
    the store. If ranks diverge later, the board finds it, or the backend's time limit ends
    it."""
    groups = list(groups)
    for communicator in _communicators(groups, copies=False):
        communicator.require_working()
    if any(call not in _checked.get(group, ()) for group in groups):
        require_all_ranks(call, groups)
        for group in groups:
            _checked.setdefault(group, set()).add(call)


@contextlib.contextmanager
def nested(call: str, groups: Iterable[Group]) -> Iterator[None]:
    """Check as ``require_all_ranks`` does; calls inside do not check again. Collective."""
    require_all_ranks(call, groups)
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1
