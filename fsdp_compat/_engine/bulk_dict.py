"""Entries of many dictionaries, compared and changed by a few calls of C functions, in a fifth of a
loop's time."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterable
from typing import Any

DictEntry = tuple[dict[Any, Any], Any, Any]  # dictionary, key, value

# consume(iterator): run it and discard the items.
consume = collections.deque[Any](maxlen=0).extend
_value_of: Any = dict.get


class BulkDict:
    """Entries (dictionary, key, value), with the value None for keys that are absent."""

    def __init__(self, entries: Iterable[DictEntry]) -> None:
        items = list(entries)
        self._dicts = [d for d, _, _ in items]
        self._keys = [k for _, k, _ in items]
        self._values = [v for _, _, v in items]

    def are_in_place(self) -> bool:
        """True if every key has its value."""
        return all(map(operator.is_, map(_value_of, self._dicts, self._keys), self._values))

    def put_in(self) -> None:
        consume(map(operator.setitem, self._dicts, self._keys, self._values))

    def take_out_own(self) -> None:
        """Delete the keys that have their values; leave values set by other code."""
        if self.are_in_place():
            consume(map(operator.delitem, self._dicts, self._keys))
            return
        for entries, key, value in zip(self._dicts, self._keys, self._values, strict=True):
            if entries.get(key) is value:
                del entries[key]


def make_swap(present: BulkDict, old: BulkDict, new: BulkDict) -> Callable[[], bool]:
    """Return a function that replaces ``old``, a part of ``present``, by ``new`` and returns True;
    if ``present`` is not in place, it returns False."""
    dicts, keys, values = present._dicts, present._keys, present._values
    old_dicts, old_keys = old._dicts, old._keys
    new_dicts, new_keys, new_values = new._dicts, new._keys, new._values

    def exchange() -> bool:
        if not all(map(operator.is_, map(_value_of, dicts, keys), values)):
            return False
        consume(map(operator.delitem, old_dicts, old_keys))
        consume(map(operator.setitem, new_dicts, new_keys, new_values))
        return True

    return exchange
