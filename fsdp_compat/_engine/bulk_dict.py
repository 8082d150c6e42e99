"""Entries of many dictionaries, looked at and changed by few calls of C functions: a loop in Python
costs five times as much."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["BulkDict", "DictEntry", "swap_of", "exhaust"]

DictEntry = tuple[dict[str, Any], str, Any]  # dictionary, key, value

# exhaust(iterator): go through it and keep nothing.
exhaust = collections.deque[Any](maxlen=0).extend
_value_of: Any = dict.get


class BulkDict:
    """Places in dictionaries, and what belongs there; None belongs where nothing is."""

    __slots__ = ("_dicts", "_keys", "_values")

    def __init__(self, entries: Iterable[DictEntry]) -> None:
        items = list(entries)
        self._dicts, self._keys, self._values = (
            [d for d, _, _ in items],
            [k for _, k, _ in items],
            [v for _, _, v in items],
        )

    def stand(self) -> bool:
        """True if every place holds what belongs there."""
        return all(map(operator.is_, map(_value_of, self._dicts, self._keys), self._values))

    def are_free(self) -> bool:
        """True if no place holds anything."""
        return not any(map(operator.contains, self._dicts, self._keys))

    def put_in(self) -> None:
        exhaust(map(operator.setitem, self._dicts, self._keys, self._values))

    def take_out(self) -> None:
        """Every place must hold something."""
        exhaust(map(operator.delitem, self._dicts, self._keys))

    def take_out_own(self) -> None:
        """Take out what belongs there, and leave what somebody else has put."""
        if self.stand():
            self.take_out()
            return
        for entries, key, value in zip(self._dicts, self._keys, self._values, strict=True):
            if entries.get(key) is value:
                del entries[key]


def swap_of(present: BulkDict, old: BulkDict, new: BulkDict) -> Callable[[], bool]:
    """Return a function which, if everything in ``present`` stands, puts ``new`` in the place of
    ``old``, a part of it.

    It returns whether it did.
    """
    dicts, keys, values = present._dicts, present._keys, present._values
    old_dicts, old_keys = old._dicts, old._keys
    new_dicts, new_keys, new_values = new._dicts, new._keys, new._values

    def exchange() -> bool:
        if not all(map(operator.is_, map(_value_of, dicts, keys), values)):
            return False
        exhaust(map(operator.delitem, old_dicts, old_keys))
        exhaust(map(operator.setitem, new_dicts, new_keys, new_values))
        return True

    return exchange
