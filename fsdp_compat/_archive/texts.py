"""JSON from untrusted files: its length is limited before parsing, and types are checked after."""

from __future__ import annotations

import collections
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError, UsageError

_T = TypeVar("_T")
MAX_TEXT_NBYTES = 100_000_000  # as the safetensors library has it for headers


def open_file(path: Path) -> int:
    """Return the descriptor of a regular file. Raises OSError, and CheckpointError for other kinds,
    which are not opened: a FIFO would wait, a device may do anything."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise CheckpointError.of(
            f"{path.name} is not a regular file.",
            expected="a file, or a link to one",
            got="a directory" if stat.S_ISDIR(mode) else "a FIFO, a socket or a device",
            where=str(path),
            fix="restore the file from an intact copy; nothing was loaded",
        )
    # a FIFO that took its place just now reads as an empty file
    return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))


def identity_of(descriptor: int) -> tuple[int, ...]:
    """Return what changes if a name gets another file, or the file is written to."""
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def read_text(path: Path) -> bytes:
    """Return the content of a file. Raises as ``open_file`` does, and ValueError for a long one."""
    with open(open_file(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        _require_short(nbytes)
        return file.read(nbytes)


def parse_json(text: bytes, **hooks: Any) -> Any:
    """Return the value of a JSON text in UTF-8, parsed by ``json.loads(..., **hooks)``. Raises
    ValueError, also for repeated keys, and RecursionError for deep nesting."""
    _require_short(len(text))
    return json.loads(text.decode("utf-8"), object_pairs_hook=_without_repetition, **hooks)


def _require_short(nbytes: int) -> None:
    if nbytes > MAX_TEXT_NBYTES:
        raise ValueError(f"{nbytes} bytes of text; the limit is {MAX_TEXT_NBYTES}")


def require_readable(text: bytes) -> None:
    """Raise UsageError for a text to write that ``parse_json`` would refuse."""
    try:
        _require_short(len(text))
    except ValueError as error:
        raise UsageError.of(
            "The text of the file would be too large to be read again.",
            expected=f"names and values other than tensors of at most {MAX_TEXT_NBYTES} bytes",
            got=str(error),
            where="the header of a file, or a manifest",
            fix="save long lists as tensors or arrays",
        ) from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{reprlib.repr(twice)} occurs twice in one object")
    return found


def brief(error: BaseException) -> str:
    """Return an error as one line of limited length: it may quote the content of a file."""
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()))


def shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."


def found_in(error: CheckpointError) -> str:
    """Return what an error says was found, as one line of limited length."""
    facts = (line.strip().partition(":") for line in str(error).splitlines())
    return next((text.strip() for name, _, text in facts if name == "got"), brief(error))[:400]


# -- checks of parsed values


def listed(value: Any) -> list[Any]:
    """Return a list unchanged. Raises TypeError for anything else."""
    return _of(list, value, "a list")


def text_in(value: Any) -> str:
    """Return a str unchanged. Raises TypeError for anything else."""
    return _of(str, value, "a string")


def count_in(value: Any) -> int:
    """Return an int of at least 0 unchanged. Raises TypeError or ValueError for anything else."""
    if _of(int, value, "a whole number") < 0:
        raise ValueError("a number below 0")
    return int(value)


def _of(kind: type[_T], value: Any, name: str) -> _T:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} instead of {name}")
    return value


def shape_in(value: Any) -> tuple[int, ...]:
    """Return a shape. Raises TypeError or ValueError, also if strides would overflow 64 bits."""
    numel = 1
    for item in listed(value):
        numel *= count_in(item) or 1
        if numel >= 1 << 63:
            raise ValueError("a shape that is too large")
    return tuple(value)


def parsed(content: Any, form: Any) -> Any:
    """Return JSON content of a given form: a function that returns a value or raises; ``[form]``, a
    list; ``(form, ...)``, a list with an item for each; ``{name: form}``, an object, in which
    ``"name?"`` may be missing; ``{...: form}``, an object with any names."""
    if isinstance(form, list):
        return [parsed(item, form[0]) for item in listed(content)]
    if isinstance(form, tuple):
        return tuple(parsed(*each) for each in zip(listed(content), form, strict=True))
    if not isinstance(form, dict):
        return form(content)
    if not isinstance(content, dict):
        raise TypeError(f"a {type(content).__name__} instead of an object")
    if ... in form:
        return {name: parsed(item, form[...]) for name, item in content.items()}
    fields = {name.rstrip("?"): its_form for name, its_form in form.items()}
    missing = {name[:-1] for name in form if name[-1] == "?"} - content.keys()
    return {name: parsed(content[name], fields[name]) for name in fields if name not in missing}
