"""What happens to units, told to one listener: a black box, or a plan."""

from __future__ import annotations

import enum
from collections.abc import Callable


class Event(enum.IntEnum):
    """The first four: a unit has got the Residency of this name and value."""

    SHARDED = 1
    UNSHARDING = 2  # an all-gather starts
    UNSHARDED = 3
    PARTIAL = 4
    WAITING = 5  # for the all-gather, before the parameters are used
    REDUCING = 6  # a reduction starts
    REDUCED = 7  # all reductions of a backward have ended; the unit is the root
    FORWARD = 8  # the outermost forward begins
    RAISED = 9  # an exception has left the unit's forward
    STATE = 10  # an all-gather outside of forward and backward
    ENDED = 11  # the process ends, and has not been killed


Listener = Callable[..., None]  # (event: int, label: str, error: BaseException | None = None)


def _ignore(event: int, label: str, error: BaseException | None = None) -> None:
    pass


tell: Listener = _ignore  # call it as ``events.tell``: it changes


def listen(listener: Listener | None) -> Listener:
    """Tell ``listener`` from now on (None: nobody); return the listener before."""
    global tell
    before, tell = tell, listener or _ignore
    return before
