"""Where ranks part: a pure function over what they have begun, for ranks that stand still now
(board.py) and for what they have left in files (``fsdp-compat diagnose``)."""

from __future__ import annotations

import collections
import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence

NAMED = 8  # ranks that are listed, at most
UNHEARD = "cannot be heard: stopped, killed, or busy elsewhere"

# What was begun, by its place in an order that all ranks share
Calls = Mapping[typing.Any, str]


@dataclasses.dataclass(frozen=True)
class State:
    """What some ranks of an axis do that have begun the same calls."""

    ranks: tuple[int, ...]  # global; the first few
    count: int  # of all of them
    calls: Calls | None = None  # begun, the last ones; None: unknown, as they have told nothing
    since: float = 0.0  # time.time() at which the last of them began its last call
    doing: str = ""  # what the first of them does
    ended: bool = False

    def __str__(self) -> str:
        return ranks_text(self.ranks, self.count)


def merged(states: Iterable[State]) -> list[State]:
    """Return one state for all ranks that have begun the same."""
    alike: dict[object, list[State]] = {}
    for state in states:
        calls = None if state.calls is None else tuple(state.calls.items())
        alike.setdefault((calls, state.ended), []).append(state)
    return [
        dataclasses.replace(
            first,
            ranks=tuple(sorted(rank for each in group for rank in each.ranks)[:NAMED]),
            count=sum(each.count for each in group),
            since=max(each.since for each in group),
        )
        for group in alike.values()
        for first in [min(group, key=lambda each: each.ranks)]
    ]


def ranks_text(ranks: Sequence[int], count: int) -> str:
    """Return ranks as sentences have them: "rank 3", "ranks 0, 1 and 2", "ranks 0 and 9 more"."""
    if count == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:NAMED]]
    if count > len(shown):
        shown.append(f"{count - len(shown)} more")
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def parting(calls: Sequence[Calls]) -> typing.Any:
    """Return the first place at which not all have begun the same, or None. Places before the first
    that all remember are left out."""
    start = max((min(each) for each in calls if each), default=None)
    for place in sorted({place for each in calls for place in each if place >= start}):
        if len({each.get(place) for each in calls}) > 1:
            return place
    return None


def sentences(states: Sequence[State], place: typing.Any) -> list[str]:
    """Say of the ranks that are not with the most what they did at the place where they part."""
    votes = collections.Counter[str]()
    for state in states:
        votes[_call_at(state, place) or ""] += state.count
    usual = max((call for call in votes if call), key=lambda call: votes[call])
    most = [state for state in states if _call_at(state, place) == usual]
    others = " and ".join(map(str, most))
    found = []
    for state in states:
        call, following = _call_at(state, place), _call_after(state, place)
        if call == usual:
            continue
        if call is None and following is None:
            verb = "has" if state.count == 1 else "have"
            waits = "waits" if others.startswith("rank ") else "wait"
            found.append(f"{state} {verb} not begun {usual}, which {others} {waits} for")
        elif call is None or (_call_after(most[0], place) == call and following != usual):
            found.append(f"{state} skipped {usual}, or {others} did it once more")
        else:
            found.append(f"{state} began {call} where {others} began {usual}")
    return found


def _call_at(state: State, place: typing.Any) -> str | None:
    return (state.calls or {}).get(place)


def _call_after(state: State, place: typing.Any) -> str | None:
    calls = state.calls or {}
    return calls.get(min((each for each in calls if each > place), default=None))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What keeps the ranks of an axis."""

    text: str
    since: float  # when the first rank began to wait
    never_ends: bool


def judge(states: Sequence[State], in_order: bool, now: float) -> Verdict | None:
    """Say what keeps ranks that stand still, or return None if nobody waits. in_order: all ranks
    must make the same calls in the same order, so that it never ends if they have not."""
    told = sorted((each for each in states if each.calls is not None), key=lambda each: each.ranks)
    silent = [each for each in states if each.calls is None]
    place = parting([each.calls for each in told if each.calls is not None])
    if place is not None:
        lines = sentences(told, place)
        waiting = [each for each in told if _call_at(each, place)]  # they have begun it
        differ = len({_call_at(each, place) for each in waiting}) > 1
        never_ends = (differ and in_order) or any(
            each.ended for each in told if each not in waiting
        )
    elif told and silent:
        waiting, never_ends = [each for each in told if not each.ended], False
        most = max(told, key=lambda each: each.count)
        lines = [f"{each} {each.doing or UNHEARD}" for each in silent]
        lines += [f"{most} began {call} last" for call in [*(most.calls or {}).values()][-1:]]
    else:
        return None
    never_ends |= any(each.ended for each in silent)
    if not waiting:
        return None
    since = min(each.since for each in waiting)
    waited_s = max(now - since, 0.0)
    text = [f"{'; '.join(lines)} ({waited_s:.{int(waited_s < 10)}f} s so far)."]
    for each in (*told, *silent):
        of_first = f"rank {each.ranks[0]} " if each.count > 1 else ""
        text.append(f"  {each}: {of_first}{each.doing or UNHEARD}")
    return Verdict("\n".join(text), since, never_ends)
