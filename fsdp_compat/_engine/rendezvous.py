"""Collective calls first check that every rank has made them.

    require_all_ranks(call, groups)  returns when all ranks of ``groups`` have made the call; raises
                                     StateError on all of them if only some have
    require_all_ranks_once(call, groups)  the same, for the first such call of the groups
    nested(call, groups)             the same as a context; calls inside do not check again
    register(groups)                 once, by the constructor that makes the groups

``call`` is the name that users know, such as "state_dict". The ranks that split one copy of the
groups take part; with ``copies=True`` also those with the other copies. A call without groups, or
with one rank, checks nothing.

divergence/store_rendezvous.py has the mechanism. Two environment variables, the same on all ranks:
FSDP_COMPAT_MEET=0 disables the check, and FSDP_COMPAT_MEET_TIMEOUT is how long, in seconds, a
missing rank may be idle before the call fails."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

from .._comm.divergence import progress
from .._comm.divergence.store_rendezvous import rendezvous_of
from .._comm.environment import checks_calls, idle_limit_s
from .._comm.mesh import Axis
from .._comm.transport import Transport
from .group import Group


class _Depth(threading.local):
    value = 0


_checked: weakref.WeakKeyDictionary[Group, set[str]] = weakref.WeakKeyDictionary()
_depth = _Depth()  # how many checked calls this thread is in


def _communicators(groups: Iterable[Group], copies: bool) -> Iterator[tuple[Transport, Group]]:
    """Yield the communicators of ``groups``, each once, with the first group that uses it."""
    seen: set[int] = set()
    for group in groups:
        replicas = [group.replica] if copies else []
        for communicator in (group.shard, *group.tensor_parallel, *replicas):
            if communicator.ranks > 1 and id(communicator) not in seen:
                seen.add(id(communicator))
                yield communicator, group


def register(groups: Iterable[Group]) -> None:
    """Number groups, in one order on all ranks, and let this process answer ranks that wait."""
    if checks_calls():
        idle_limit_s()  # reports an invalid value now, on every rank
        progress.follow()
        for group in groups:
            for communicator, _ in _communicators([group], copies=True):
                rendezvous = rendezvous_of(communicator.members)
                if rendezvous is not None:
                    rendezvous.number_of(group)


def require_all_ranks(
    call: str, groups: Iterable[Group], *, copies: bool = False, axes: Sequence[Axis] = ()
) -> None:
    """Return when all ranks of ``groups`` have made the same call; raise StateError on all of them
    if that can no longer happen. Collective. axes: further ones whose ranks take part."""
    groups = list(groups)
    pairs = list(_communicators(groups, copies))
    for communicator, _ in pairs:
        communicator.require_working()
    if not (pairs or axes) or _depth.value:
        return
    # the same order on all ranks, so that they cannot deadlock
    pairs.sort(key=lambda pair: (-pair[0].ranks, pair[0].members))
    waits = [(communicator.members, communicator.name, group) for communicator, group in pairs]
    waits += [(axis.members, "", groups[0]) for axis in axes if axis.ranks > 1]
    done: list[frozenset[int]] = []
    for members, name, group in waits:
        if any(ranks.issuperset(members) for ranks in done):
            continue
        rendezvous = rendezvous_of(members)
        if rendezvous is not None:
            rendezvous.meet(f"{call}()", group, name)
            done.append(frozenset(members) if len(waits) > 1 else frozenset())


def require_all_ranks_once(call: str, groups: Iterable[Group]) -> None:
    """Collective. Check only the first such call of these groups: each check costs a round trip to
    the store. If ranks diverge later, the deadlock is detected, or the backend's time limit ends
    it."""
    groups = list(groups)
    for communicator, _ in _communicators(groups, copies=False):
        communicator.require_working()
    if any(call not in _checked.get(group, ()) for group in groups):
        require_all_ranks(call, groups)
        for group in groups:
            _checked.setdefault(group, set()).add(call)


@contextlib.contextmanager
def nested(call: str, groups: Iterable[Group], *, copies: bool = False) -> Iterator[None]:
    """Check as ``require_all_ranks`` does; calls inside do not check again. Collective."""
    require_all_ranks(call, groups, copies=copies)
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1
