"""Pickles as data: the opcodes are followed here, and nothing that a pickle names is imported or
called.

The pickle module's own Unpickler does more than it is told to: it sets attributes, also of classes,
and calls ``append``, ``extend`` and ``__setstate__`` of whatever the stack holds. Here every opcode
works on the values below, and a name means what a closed table says. Time and memory are bounded by
the length of the pickle."""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Mapping
from typing import Any

_MAX_KEYS = 10_000  # of kinds whose hashes a file could choose to be equal
_MAX_INT_BITS = 61  # of an int that is a key: smaller ones have different hashes
_MAX_KEY_LENGTH = 64  # of a tuple that is a key
_SLACK = 10_000
_MAX_CONTAINERS = 1 << 20  # in a short pickle. A longer one may have one per 8 bytes.


class Refused(ValueError):
    """The pickle is damaged, or asks for something that is not in the table."""


class RefusedName(Refused):
    """The pickle has an object of a class that is not in the table. name: the class's full name."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class Global:
    """A name of the table. ``make``: what a call with arguments gives; None: a Record."""

    __slots__ = ("make", "module", "name")

    def __init__(self, module: str, name: str, make: Callable[..., Any] | None = None) -> None:
        self.module, self.name, self.make = module, name, make

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"


class Record:
    """An object as its pickle describes it. ``name``: of its class, or of the function that would
    build it. Compared by identity."""

    __slots__ = ("args", "fields", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.fields: dict[str, Any] = {}  # the attributes
        self.state: Any = None  # if it is no mapping of attributes
        self.items: dict[Any, Any] = {}  # of a subclass of dict

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def set_state(self, state: Any) -> None:
        """state: attributes, or a pair of attributes and slots, or anything else."""
        is_pair = isinstance(state, tuple) and len(state) == 2
        parts = state if is_pair else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            for part in parts:
                for key, value in (part or {}).items():
                    self.fields[str(key)] = value
        else:
            self.state = state


class Ignored:
    """Stands for an object that was left out. ``name``: of its class."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<ignored: {self.name}>"


class KeyLimit:
    """Limits the keys whose hashes a file could choose to be equal, which makes a dict slow."""

    def __init__(self, num: int) -> None:
        self._num = self._left = num

    def require(self, key: Any) -> None:
        """Raise Refused or TypeError for a value that cannot be a key, or is one too many."""
        if isinstance(key, (str, bytes, Record, Global)) or key is None:
            return
        if isinstance(key, int) and key.bit_length() < _MAX_INT_BITS:
            return
        self._left -= 1
        if self._left < 0:
            raise Refused(f"more than {self._num} keys that are neither texts nor small numbers")
        if not isinstance(key, (tuple, frozenset)):
            hash(key)
            return
        if len(key) > _MAX_KEY_LENGTH:
            raise Refused(f"a key of {len(key)} elements")
        for item in key:
            if isinstance(item, (tuple, frozenset)):
                raise Refused("a key that is a nested tuple")
            hash(item)


_MARK: Any = object()
_Step = Callable[["Machine"], None]


class Machine:
    """Follows the opcodes of one pickle.

    find: the value of a global name; raises Refused. persistent: the value of a persistent id.
    """

    def __init__(
        self,
        data: bytes,
        find: Callable[[str, str], Any],
        persistent: Callable[[Any], Any] | None = None,
        start: int = 0,
    ) -> None:
        self.data, self.position = data, start
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.find, self.persistent = find, persistent
        self._left = 4 * len(data) + _SLACK  # elements that calls may still copy
        self.keys = KeyLimit(_MAX_KEYS)
        self._containers_left = max(_MAX_CONTAINERS, len(data) // 8)

    def run(self) -> Any:
        """Return the pickled value; ``position`` is behind its end then. Raises Refused, and
        whatever wrong arguments raise."""
        data, steps, memo, stack = self.data, _STEPS, self.memo, self.stack
        place = self.position
        while True:
            code = data[place]
            place += 1
            if code == _BINGET and data[place] in memo:  # the commonest, in place
                stack.append(memo[data[place]])
                place += 1
            elif code == _LONG_BINGET and (index := _four(data, place)) in memo:
                stack.append(memo[index])
                place += 4
            elif code == _BININT1:
                stack.append(data[place])
                place += 1
            elif code == _MEMOIZE and stack and stack[-1] is not _MARK:
                memo[len(memo)] = stack[-1]
            elif code == _STOP:
                break
            else:
                step = steps.get(code)
                if step is None:
                    raise Refused(f"opcode {bytes([code])!r} at byte {place - 1}")
                self.position = place
                step(self)
                place = self.position
        self.position = place
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            raise Refused(f"{len(self.stack)} values on the stack at the end")
        return self.stack.pop()

    # -- the stream and the stack

    def take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if end > len(self.data):
            raise Refused(f"{nbytes} bytes at byte {self.position} of {len(self.data)}")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + 1000)
        if end < 0:
            raise Refused(f"a name without end at byte {self.position}")
        return self.take(end + 1 - self.position)[:-1].decode("utf-8")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_new(self, container: Any) -> None:
        """Push a list, dict, set or Record, of which a pickle must not have too many."""
        self._containers_left -= 1
        if self._containers_left < 0:
            raise Refused(f"millions of containers in {len(self.data)} bytes")
        self.stack.append(container)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise Refused(f"a missing value at byte {self.position}")
        return value

    def pop_mark(self) -> list[Any]:
        """Return the values above the last mark."""
        stack = self.stack
        place = len(stack) - 1
        while stack[place] is not _MARK:  # IndexError if there is none
            place -= 1
            if place < 0:
                raise Refused(f"a missing mark at byte {self.position}")
        found = stack[place + 1 :]
        del stack[place:]
        return found

    def top(self) -> Any:
        value = self.stack[-1]
        if value is _MARK:
            raise Refused(f"a missing value at byte {self.position}")
        return value

    def remember(self, index: int) -> None:
        if index > len(self.data):
            raise Refused(f"memo index {index} in {len(self.data)} bytes")
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise Refused(f"memo index {index}, which was never set")
        self.push(self.memo[index])

    # -- values

    def spend(self, value: Any) -> None:
        """Count the elements that a call copies: references in a short pickle could multiply
        them."""
        self._left -= 1 + (len(value) if hasattr(value, "__len__") else 0)
        if self._left < 0:
            raise Refused("the pickle expands to more values than its size allows")

    def set_items(self, target: Any, items: list[Any]) -> None:
        if len(items) % 2:
            raise Refused("a key without a value")
        if isinstance(target, Ignored):
            return
        place = target.items if isinstance(target, Record) else target
        if not isinstance(place, dict):
            raise Refused(f"items for a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.keys.require(key)
            place[key] = value

    def extend(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, (list, collections.deque)):
            target.extend(items)
        elif not isinstance(target, Ignored):
            raise Refused(f"elements for a {type(target).__name__}")

    def call(self, function: Any, args: Any) -> Any:
        if isinstance(function, Ignored):
            return function
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise Refused(f"a call of a {type(function).__name__}")
        self.spend(args)
        for arg in args:
            if not isinstance(arg, (int, float, Record)):
                self.spend(arg)
        if function.make is None:
            return Record(function.full_name, args)
        return function.make(*args)

    def build(self, target: Any, state: Any) -> None:
        self.spend(state)
        if isinstance(target, Record):
            target.set_state(state)
        elif not isinstance(target, (Ignored, dict)):  # a dict: attributes of a state dict
            raise Refused(f"a state for a {type(target).__name__}")


# -- opcodes: those that pickle and torch.save write in protocols 2 to 5

_STOP, _BINGET, _LONG_BINGET, _BININT1, _MEMOIZE = (*b".hjK", 0x94)


def _four(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 4], "little")


def _constant(value: Any) -> _Step:
    return lambda machine: machine.stack.append(value)


def _counted(nbytes: int, make: Callable[[bytes], Any]) -> _Step:
    """A value behind its length of ``nbytes``."""
    return lambda machine: machine.push(make(machine.take(machine.number(nbytes))))


def _text(content: bytes) -> str:
    return content.decode("utf-8")


def _old_text(content: bytes) -> str:
    """Decode a string that Python 2 wrote."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def _signed(content: bytes) -> int:
    return int.from_bytes(content, "little", signed=True)


def _proto(machine: Machine) -> None:
    if (version := machine.number(1)) > 5:
        raise Refused(f"protocol {version}")


def _frame(machine: Machine) -> None:
    machine.take(8)


def _global(machine: Machine) -> None:
    module = machine.line()
    machine.push(machine.find(module, machine.line()))


def _stack_global(machine: Machine) -> None:
    name, module = machine.pop(), machine.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise Refused("a global name that is not a text")
    machine.push(machine.find(module, name))


def _tuple_of(num: int) -> _Step:
    def step(machine: Machine) -> None:
        items = machine.stack[-num:]
        if len(items) < num or any(item is _MARK for item in items):
            raise Refused(f"a missing value at byte {machine.position}")
        machine.stack[-num:] = [tuple(items)]

    return step


def _reduce(machine: Machine) -> None:
    args, function = machine.pop(), machine.pop()
    machine.push_new(machine.call(function, args))


def _new(machine: Machine) -> None:
    args, cls = machine.pop(), machine.pop()
    if isinstance(cls, Global) and cls.make is None and isinstance(args, tuple):
        machine.push_new(Record(cls.full_name, args))
    else:
        machine.push_new(machine.call(cls, args))


def _build(machine: Machine) -> None:
    state = machine.pop()
    machine.build(machine.top(), state)


def _append(machine: Machine) -> None:
    value = machine.pop()
    machine.extend(machine.top(), [value])


def _appends(machine: Machine) -> None:
    values = machine.pop_mark()
    machine.extend(machine.top(), values)


def _setitem(machine: Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items(machine.top(), [key, value])


def _setitems(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.set_items(machine.top(), items)


def _additems(machine: Machine) -> None:
    items, target = machine.pop_mark(), machine.top()
    if not isinstance(target, set):
        raise Refused(f"members for a {type(target).__name__}")
    for item in items:
        machine.keys.require(item)
        target.add(item)


def _frozenset(machine: Machine) -> None:
    items = machine.pop_mark()
    for item in items:
        machine.keys.require(item)
    machine.push(frozenset(items))


def _pop(machine: Machine) -> None:
    machine.stack.pop()


def _pop_mark(machine: Machine) -> None:
    machine.pop_mark()


def _persistent(machine: Machine) -> None:
    if machine.persistent is None:
        raise Refused("a reference to another file (a persistent id)")
    machine.push(machine.persistent(machine.pop()))


_STEPS: Mapping[int, _Step] = {
    code[0]: step
    for code, step in {
        b"\x80": _proto,
        b"\x95": _frame,
        b"(": _constant(_MARK),
        b"0": _pop,
        b"1": _pop_mark,
        b"N": _constant(None),
        b"\x88": _constant(True),
        b"\x89": _constant(False),
        b")": _constant(()),
        b"]": lambda machine: machine.push_new([]),
        b"}": lambda machine: machine.push_new({}),
        b"\x8f": lambda machine: machine.push_new(set()),
        b"K": lambda machine: machine.push(machine.number(1)),
        b"M": lambda machine: machine.push(machine.number(2)),
        b"J": lambda machine: machine.push(_signed(machine.take(4))),
        b"\x8a": _counted(1, _signed),
        b"G": lambda machine: machine.push(struct.unpack(">d", machine.take(8))[0]),
        b"X": _counted(4, _text),
        b"\x8c": _counted(1, _text),
        b"\x8d": _counted(8, _text),
        b"B": _counted(4, bytes),
        b"C": _counted(1, bytes),
        b"\x8e": _counted(8, bytes),
        b"\x96": _counted(8, bytearray),
        b"T": _counted(4, _old_text),
        b"U": _counted(1, _old_text),
        b"t": lambda machine: machine.push(tuple(machine.pop_mark())),
        b"\x85": _tuple_of(1),
        b"\x86": _tuple_of(2),
        b"\x87": _tuple_of(3),
        b"a": _append,
        b"e": _appends,
        b"s": _setitem,
        b"u": _setitems,
        b"\x90": _additems,
        b"\x91": _frozenset,
        b"c": _global,
        b"\x93": _stack_global,
        b"R": _reduce,
        b"\x81": _new,
        b"b": _build,
        b"q": lambda machine: machine.remember(machine.number(1)),
        b"r": lambda machine: machine.remember(machine.number(4)),
        b"\x94": lambda machine: machine.remember(len(machine.memo)),
        b"h": lambda machine: machine.recall(machine.number(1)),
        b"j": lambda machine: machine.recall(machine.number(4)),
        b"Q": _persistent,
    }.items()
}
