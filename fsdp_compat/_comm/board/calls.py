"""What a rank has begun along an axis, and what it waits for, as the thread of board.py reads it.

The connections of a gloo communicator, a backend's communicator and a rendezvous are ``Waiter``s.
Each keeps an ``Activity``:

    activity.begin(tag)                this rank has begun another call with this tag
    activity.waiting = (id, i, what)   the host waits now; None when the wait is over
    board.give_up(waiter, report)      a call, or a wait, has failed

Where a backend waits on a device, the host waits for nothing that is seen here: ``waiting`` stays
None, and only what was begun counts. board.py has two answers:

    activity.diagnosis = report, waiter.end_wait()     this wait can never end
    waiter.close(report)                               all communication of this process has failed
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import torch.distributed as dist

from ... import _torch_private

# In place of a tag:
COLLECTIVE = -1  # a synchronous collective of all members
RENDEZVOUS = -2  # a rendezvous: nothing has been sent yet

MAX_ASKED = 64  # ranks that one waiting rank asks, at most
KEPT = 64  # calls of an axis that a rank remembers

# (tag, how often the tag was used, number of receives; 0: its works are sends)
MessageId = tuple[int, int, int]

# (message, index of the work, what); each wait has a new tuple, and its identity tells them apart
Waiting = tuple[MessageId, int, str]


@dataclasses.dataclass(frozen=True)
class Report:
    """Why communication has failed."""

    lines: dict[int, str]  # by global rank: what it waits for
    # In words: a time limit, a lost connection, an interrupt; "": ranks wait for each other.
    cause: str = ""
    culprit: int | None = None  # the global rank whose own error came first, if known

    def __str__(self) -> str:
        return "; ".join(self.lines[rank] for rank in sorted(self.lines))


@dataclasses.dataclass(eq=False)
class Activity:
    """What one waiter has begun and what it waits for. The thread that communicates writes it."""

    name: str  # the same on all members; "" where the board does not see it
    rank: int  # among the members
    members: tuple[int, ...]  # global ranks
    # Messages are matched by tags, in whatever order members send them. Without tags all members
    # must make the same calls in the same order.
    has_tags: bool = True
    may_differ: bool = False  # members may use different units
    total: int = 0  # calls begun
    counts: dict[int | str, int] = dataclasses.field(default_factory=dict)  # of them, by tag
    last: collections.deque[int | str] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=KEPT)
    )  # tags, of the last calls
    names: dict[int | str, str] = dataclasses.field(default_factory=dict)  # of calls, by tag
    thread: int = 0  # the last one that has begun a message; 0: none
    waiting: Waiting | None = None
    diagnosis: Report | None = None  # of a wait that can never end; set before the wait is ended

    def name_of(self, tag: int | str) -> str:
        return self.names.get(tag, tag if isinstance(tag, str) else "an exchange of small values")

    def begin(self, tag: int | str) -> int:
        """Count another call, and return how often its tag was used. tag: or what it is."""
        self.total += 1
        self.last.append(tag)
        number = self.counts[tag] = self.counts.get(tag, 0) + 1
        return number

    @property
    def global_rank(self) -> int:
        return self.members[self.rank]

    @property
    def others(self) -> tuple[int, ...]:
        """The global ranks of the other members."""
        return self.members[: self.rank] + self.members[self.rank + 1 :]


@dataclasses.dataclass(frozen=True)
class Wait:
    """A wait of the host in a form that other ranks can read."""

    rank: int  # global, of the rank that waits
    # Global ranks: the wait ends when all of them have begun the same. At most MAX_ASKED; of a
    # rendezvous those that were missing when one of its ranks last asked.
    peers: tuple[int, ...]
    name: str  # of the activity
    tag: int
    number: int  # how often the waiting rank has begun it
    text: str

    @property
    def can_be_refused(self) -> bool:
        """True if nothing was sent, so that all ranks can go on after an error."""
        return self.tag == RENDEZVOUS


class Waiter:
    """An object that the board watches: its thread calls the methods. One without connections polls
    its diagnosis instead."""

    activity: Activity
    group: Callable[[], dist.ProcessGroup | None]  # a weak reference

    @property
    def is_alive(self) -> bool:
        """True while its process group exists."""
        group = self.group()
        return group is not None and _torch_private.is_registered(group)

    @property
    def is_connected(self) -> bool:
        """True while it has connections that can fail; never of a rendezvous."""
        return False

    def describe(self, waiting: Waiting) -> Wait:
        raise NotImplementedError

    def lost_peer(self, wait: Wait, is_gone: Callable[[int], bool]) -> int | None:
        """Return the global rank of a peer that this wait needs and that has closed its connection
        or ``is_gone``, which the wait may not have noticed."""
        return None

    def end_wait(self) -> None:
        """End the wait of the communicating thread with an error. Called until it has ended."""

    def close(self, report: Report | None) -> None:
        """Close the connections, because communication has failed or the process group was
        destroyed (None). Every later use raises an error with the reason."""
