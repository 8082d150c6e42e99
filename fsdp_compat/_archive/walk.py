"""Walks through nested dicts, lists and tuples, whose leaves are anything."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

LEFT_OUT: Any = object()  # of a leaf that is to have no place in its container
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


def map_leaves(value: Any, function: Callable[[Any, str], Any], path: str = "") -> Any:
    """Return the same containers with ``function(leaf, path)`` in place of each leaf that is not a
    text, a number or None. Lists of nothing else are not copied."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    prefix = f"{path}/" if path else ""
    if kind in (dict, OrderedDict):
        found = {key: map_leaves(item, function, f"{prefix}{key}") for key, item in value.items()}
        return kind((key, item) for key, item in found.items() if item is not LEFT_OUT)
    if kind not in (list, tuple):
        return function(value, path)
    if all(type(item) in _PLAIN for item in value):
        return value
    items = (map_leaves(item, function, f"{prefix}{at}") for at, item in enumerate(value))
    return kind(item for item in items if item is not LEFT_OUT)


def map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    """Like ``map_leaves``, without paths, and also inside deques."""

    def inside(leaf: Any, _: str) -> Any:
        if isinstance(leaf, deque):
            return deque(map_leaves([*leaf], inside), leaf.maxlen)
        return function(leaf)

    return map_leaves(value, inside)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path. Empty containers, and lists of plain values, are leaves."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)) and not all(type(item) in _PLAIN for item in value):
        items = enumerate(value)
    if not items:
        yield path, value
    for key, item in items:
        yield from leaves(item, f"{path}/{key}")
