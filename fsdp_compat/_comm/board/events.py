"""What happens to units, told to one listener: the ring of this process, or a plan."""

from __future__ import annotations

from collections.abc import Callable

# Plain integers, because looking up a member of an enum takes half as long as a record.
UNSHARDING = 1  # an all-gather starts
WAITING = 2  # for the all-gather, before the parameters are used
REDUCING = 3  # a reduction starts
GATHERING_STATE = 4  # an all-gather outside of forward and backward
UNSHARDED = 5  # the wait that was told last has ended
REDUCED = 6  # all reductions of a backward have ended; the unit is the root
FORWARD = 7  # the outermost forward begins
RAISED = 8  # an exception has left the unit's forward
ENDED = 9  # the process ends, and has not been killed
MAY_DIFFER = 10  # ranks may use different units

# Those that are recorded
NAMES = {
    UNSHARDING: "all-gather",
    WAITING: "use",
    REDUCING: "reduction",
    GATHERING_STATE: "gather of state",
}

Listener = Callable[..., None]  # (event: int, label: str, error: BaseException | None = None)


def _ignore(event: int, label: str, error: BaseException | None = None) -> None:
    pass


tell: Listener = _ignore  # call it as ``events.tell``: it changes


def listen(listener: Listener | None) -> Listener:
    """Tell ``listener`` from now on (None: nobody); return the listener before."""
    global tell
    before, tell = tell, listener or _ignore
    return before
