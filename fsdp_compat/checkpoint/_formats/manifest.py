"""The texts of a native checkpoint: the manifest says what it holds and where; the head of each
file, in its safetensors header, which states its rank had.

The manifest grows with the number of parameters and of files: a flat layout gives the place of
every element. It is written last, so a directory with one is complete.

Version 1 holds whole parameters. Version 2, for tensor-parallel parameters and those of fully_shard
that are cut along another dim than the first, adds ``whole`` (a shape) and ``offsets`` to a
parameter of which a group holds a part; other groups hold the other parts, under the same names."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import reprlib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..._archive.blocks import FileFacts, damaged
from ..._archive.header import dtype_name, dtype_of
from ..._archive.texts import (
    brief,
    count_in,
    parse_json,
    parsed,
    read_text,
    require_readable,
    shape_in,
    text_in,
)
from ..._layout.box import Piece, Share, require_grid
from ..._layout.spec import FlatLayout, ParamSpec
from ..._version import __version__
from ...errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "fsdp_compat checkpoint"
VERSIONS = 1, 2  # a reader of the first one would take a part for the whole parameter


def versions() -> dict[str, str]:
    """Return the versions that a checkpoint written now records."""
    return {"fsdp_compat": __version__, "torch": str(torch.__version__)}


def file_name(number: int) -> str:
    """Return the name of the file that rank ``number`` writes."""
    return f"rank-{number:05d}.safetensors"


@dataclasses.dataclass(frozen=True)
class FlatGroup:
    """One parameter group: tensor ``name`` of several files, each of which holds one shard."""

    name: str
    dtype: torch.dtype
    axis: int  # index in Manifest.axes: the files
    layout: FlatLayout  # parameters under the first of their names
    names: tuple[tuple[str, ...], ...]  # by parameter: all its names in the model, before wrapping
    pieces: tuple[Piece, ...]  # by parameter: what the layout holds, as a box of the whole

    def is_cut_as(self, index: int, share: Share, is_flattened: bool) -> bool:
        """Return whether every rank has the elements of a parameter that it has beside ``share``.
        is_flattened: the optimizer of ``share`` has one parameter for all of the layout."""
        # The rank-local state of a flat parameter is stored under the first parameter in it, and
        # fits only where all of them have their old offsets.
        starts = [[spec.start for spec in each.params] for each in (self.layout, share.layout)]
        own = Share(self.pieces[index], self.layout, index, share.rank)
        return own.is_alike(share) and (not is_flattened or starts[0] == starts[1])

    def as_json(self) -> dict[str, Any]:
        params = [
            {"names": list(names), "shape": list(spec.shape), "start": spec.start}
            for names, spec in zip(self.names, self.layout.params, strict=True)
        ]
        for param, piece in zip(params, self.pieces, strict=True):
            if not piece.is_whole:
                param |= {"whole": list(piece.whole_shape), "offsets": list(piece.offsets)}
        for param, spec in zip(params, self.layout.params, strict=True):
            if spec.block:
                param["block"] = spec.block
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "axis": self.axis,
            "shard_numel": self.layout.shard_numel,
            "parameters": params,
        }

    @staticmethod
    def of_json(content: Any, axes: Sequence[Sequence[int]]) -> FlatGroup:
        """Raises KeyError, TypeError, ValueError or IndexError for other content."""
        found = parsed(content, _GROUP)
        specs, pieces = [], []
        for param in found["parameters"]:
            names, shape = param["names"], param["shape"]
            offsets = param.get("offsets", [0] * len(shape))
            specs.append(ParamSpec(names[0], shape, param["start"], param.get("block", 0)))
            pieces.append(Piece(param.get("whole", shape), tuple(offsets), shape))
        layout = FlatLayout(tuple(specs), len(axes[found["axis"]]), found["shard_numel"])
        names = tuple(tuple(param["names"]) for param in found["parameters"])
        return FlatGroup(found["name"], found["dtype"], found["axis"], layout, names, tuple(pieces))


@dataclasses.dataclass(frozen=True)
class SavedParameter:
    """One parameter, in one group, or in several that together hold every element once."""

    names: tuple[str, ...]  # all of them in the model, before wrapping
    shape: tuple[int, ...]  # of the whole parameter
    dtype: torch.dtype
    places: tuple[tuple[FlatGroup, int], ...]  # groups, and the index of the parameter in each


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    identity: str  # of this save, in every one of its files
    step: int
    common: int  # the file with what is the same on all ranks: buffers, unmanaged parameters
    axes: tuple[tuple[int, ...], ...]  # each: the files of a group, in the order of its shards
    groups: tuple[FlatGroup, ...]
    files: tuple[FileFacts, ...]  # by number
    param_groups: Any  # of the optimizer, encoded, with parameter names; None: saved without one
    written_by: dict[str, str] = dataclasses.field(default_factory=versions)
    # The class of the optimizer and those that it inherits from; empty: not known.
    optimizer_classes: tuple[str, ...] = ()
    shares_extra: bool = False  # the extra values in the common file are those of all ranks
    # By name of a parameter whose optimizer state one rank had whole: the file with that state.
    owners: dict[str, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def parameters(self) -> dict[str, SavedParameter]:
        """The parameters by each name. Raises ValueError for gaps and overlaps."""
        places: dict[tuple[str, ...], list[tuple[FlatGroup, int]]] = {}
        for group in self.groups:
            for index, names in enumerate(group.names):
                places.setdefault(names, []).append((group, index))
        found: dict[str, SavedParameter] = {}
        for names, of_param in places.items():
            (group, index), *more = of_param
            dtypes = {group.dtype for group, _ in of_param}
            if len(dtypes) > 1:
                raise ValueError(f"parts of {names[0]!r} of the dtypes {sorted(map(str, dtypes))}")
            if more or not group.pieces[index].is_whole:
                require_grid([group.pieces[index] for group, index in of_param])
            shape = group.pieces[index].whole_shape
            parameter = SavedParameter(names, shape, group.dtype, tuple(of_param))
            for name in names:
                if name in found:
                    raise ValueError(f"{name!r} has two places")
                found[name] = parameter
        return found

    def as_text(self) -> str:
        """Return the content of the file. Raises UsageError if it is too large to be read again."""
        content = {
            "format": FORMAT,
            "version": VERSIONS[
                any(not each.is_whole for group in self.groups for each in group.pieces)
            ],
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "groups": [group.as_json() for group in self.groups],
            "files": [
                {
                    "name": file_name(number),
                    "nbytes": facts.nbytes,
                    "crc32": "".join(f"{checksum:08x}" for checksum in facts.checksums),
                }
                for number, facts in enumerate(self.files)
            ],
        }
        text = _framed(json.dumps(content, indent=1).encode())
        require_readable(text)
        return text.decode()


def _checksums(content: Any) -> tuple[int, ...]:
    if re.fullmatch("(?:[0-9a-f]{8})*", content) is None:
        raise ValueError("checksums that are not hexadecimal")
    return tuple(int(content[at : at + 8], 16) for at in range(0, len(content), 8))


def _any(content: Any) -> Any:
    return content


def _object(content: Any) -> dict[str, Any]:
    result: dict[str, Any] = parsed(content, {...: _any})
    return result


def _param_groups(content: Any) -> Any:
    form = [{"params": [text_in], "settings": _object}]
    return None if content is None else parsed(content, form)


_GROUP = {
    "name": text_in,
    "dtype": dtype_of,
    "axis": count_in,
    "shard_numel": count_in,
    "parameters": [
        {
            "names": [text_in],
            "shape": shape_in,
            "start": count_in,
            "whole?": shape_in,
            "offsets?": [count_in],
            "block?": count_in,
        }
    ],
}
_FORM = {
    "identity": text_in,
    "step": count_in,
    "common": count_in,
    "axes": [[count_in]],
    "groups": [_object],
    "files": [{"name": text_in, "nbytes": count_in, "crc32": _checksums}],
    "param_groups": _param_groups,
    "written_by": {...: text_in},
    "optimizer_classes?": [text_in],
    "shares_extra?": lambda content: content is True,
    "owners?": {...: count_in},
}
_BEFORE = b'{"content": '


def _framed(content: bytes) -> bytes:
    return b'%b%b,\n"crc32": "%08x"}\n' % (_BEFORE, content, zlib.crc32(content))


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises CheckpointError if it is missing or damaged."""
    file = path / MANIFEST
    try:
        text = read_text(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_checkpoint(path) from error
    except (OSError, ValueError) as error:
        raise damaged(file, "text", brief(error)) from error
    content_text = text[len(_BEFORE) : text.rfind(b',\n"crc32": "')]
    if text != _framed(content_text):
        got = f"{len(text)} bytes without a valid one"
        raise damaged(file, "text with its checksum at the end", got)
    try:
        content = _object(parse_json(content_text))
        if content.get("format") == FORMAT and content.get("version") in VERSIONS:
            return _of_json(content)
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        expected = "a manifest that gives every element one place"
        raise damaged(file, expected, brief(error)) from error
    raise CheckpointError.of(
        "This checkpoint has another format.",
        expected=f"{FORMAT}, version {' or '.join(map(str, VERSIONS))}",
        got=f"{reprlib.repr(content.get('format'))}, version "
        f"{reprlib.repr(content.get('version'))}",
        where=str(file),
        fix="load it with the version of fsdp_compat in its 'written_by', or a later one",
    )


def _no_checkpoint(path: Path) -> CheckpointError:
    got = "a file" if path.exists() else "no such directory"
    if path.is_dir():
        got = "a directory without one"
    if (path / file_name(0)).exists():
        got = f"a save that did not finish: no {MANIFEST}"
    return CheckpointError.of(
        "There is no checkpoint at this path.",
        expected=f"a directory with a {MANIFEST}, as returned by save(folder, ...), the folder "
        "of such checkpoints, or a checkpoint of another format",
        got=got,
        where=str(path),
        fix="correct the path; resume() starts without a checkpoint",
    )


def _of_json(content: dict[str, Any]) -> Manifest:
    found = parsed(content, _FORM)
    axes, files, groups = found["axes"], found["files"], found["groups"]
    if any(not axis or max(axis) >= len(files) or len(set(axis)) < len(axis) for axis in axes):
        raise ValueError(f"shards in files {axes}, of {len(files)}")
    for number in (found["common"], *found.get("owners", {}).values()):
        if number >= len(files):
            raise ValueError(f"file {number} of {len(files)}")
    for number, file in enumerate(files):
        if file["name"] != file_name(number):
            raise ValueError(f"file {number} is called {file['name']!r}")
    found["axes"] = tuple(map(tuple, axes))
    found["files"] = tuple(FileFacts(file["nbytes"], file["crc32"]) for file in files)
    found["groups"] = tuple(FlatGroup.of_json(group, axes) for group in groups)
    found["optimizer_classes"] = tuple(found.get("optimizer_classes", ()))
    manifest = Manifest(**found)
    if len({group.name for group in manifest.groups}) < len(groups):
        raise ValueError("two groups have one name")
    _ = manifest.parameters  # raises
    return manifest


# -- the text in each file

TEXT = "fsdp_compat"  # the key of the text in the metadata of the file

Indices = frozenset[int] | None  # of parameters of a group; None: all of them


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """A tensor of the file that holds one state, element by element, of parameters of a group."""

    key: Any
    entry: str  # its name in the file
    dtype: torch.dtype
    of: Indices


@dataclasses.dataclass
class Head:
    """The text in one file, with fields of these names. `_values.encode` encodes the values."""

    identity: str = ""  # of the save
    number: int = 0  # of the rank that wrote the file
    left_out: list[str] = dataclasses.field(default_factory=list)
    # By the name of the group: tensors; keys with (of which parameters, value); (of which, key,
    # value) of rank-local states.
    states: dict[str, list[StateTensor]] = dataclasses.field(default_factory=dict)
    scalars: dict[str, list[tuple[Any, list[tuple[Indices, Any]]]]] = dataclasses.field(
        default_factory=dict
    )
    own: dict[str, list[tuple[int, Any, Any]]] = dataclasses.field(default_factory=dict)
    extra: Any = None
    # By name, in the common file alone: unmanaged tensors, buffers, extra state.
    others: dict[str, Any] = dataclasses.field(default_factory=dict)
    # By name, whole: states of parameters that this rank owned; in the common file, of unmanaged.
    other_states: dict[str, list[tuple[Any, Any]]] = dataclasses.field(default_factory=dict)

    def as_metadata(self) -> dict[str, str]:
        """Return it as metadata of a safetensors file. Raises UsageError if it is too large."""
        text = json.dumps(vars(self), separators=(",", ":"), default=_plain)
        require_readable(text.encode("ascii"))
        return {TEXT: text}

    @staticmethod
    def of_metadata(metadata: Mapping[str, str]) -> Head:
        """Raises KeyError, TypeError, ValueError or RecursionError for other texts."""
        return Head(**parsed(parse_json(metadata[TEXT].encode("utf-8")), _HEAD))


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return dtype_name(value) if isinstance(value, torch.dtype) else vars(value)


def _key(content: Any) -> Any:
    if isinstance(content, (list, dict)):
        raise TypeError(f"a {type(content).__name__} as a key")
    return content


def _indices(content: Any) -> Indices:
    return None if content is None else frozenset(parsed(content, [count_in]))


def _state(content: Any) -> StateTensor:
    form = {"key": _key, "entry": text_in, "dtype": dtype_of, "of": _indices}
    return StateTensor(**parsed(content, form))


_HEAD = {
    "identity": text_in,
    "number": count_in,
    "left_out": [text_in],
    "states": {...: [_state]},
    "scalars": {...: [(_key, [(_indices, _any)])]},
    "own": {...: [(count_in, _key, _any)]},
    "extra": _any,
    "others?": {...: _any},
    "other_states?": {...: [(_key, _any)]},
}
