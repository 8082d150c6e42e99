"""The manifest of a checkpoint: what it holds and where in the files, as names and integers.

Its size is proportional to the number of parameters and of files: a flat layout gives the place of
every element. It is written last, so a directory with a manifest is a complete checkpoint.

Version 1 holds whole parameters. Version 2, which only checkpoints of tensor-parallel parameters
have, adds ``whole`` (a shape) and ``offsets`` to a parameter of a group that holds a part of it.
The other parts are in other groups, under the same names."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import reprlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .._layout.pieces import Piece, require_grid
from .._layout.spec import FlatLayout, ParamSpec
from ..errors import CheckpointError
from ._blocks import FileFacts, damaged
from ._header import dtype_name, dtype_of
from ._texts import (
    brief,
    listed,
    parse_json,
    read_text,
    require_readable,
    shape_in,
    size,
    sizes,
    text_in,
    texts,
)

MANIFEST = "manifest.json"
FORMAT = "fsdp_compat checkpoint"
VERSIONS = 1, 2  # a reader of the first one would take a part for the whole parameter


def versions() -> dict[str, str]:
    """Return the versions that a checkpoint written now records."""
    try:
        own = importlib.metadata.version("fsdp_compat")
    except importlib.metadata.PackageNotFoundError:  # run from source
        own = "not installed"
    return {"fsdp_compat": own, "torch": str(torch.__version__)}


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
    # By parameter: the part that the layout holds, as box of the whole; None: all of it. Empty: all
    # of every parameter.
    parts: tuple[Piece | None, ...] = ()

    def __post_init__(self) -> None:
        shapes = [spec.shape for spec in self.layout.params]
        if len(self.names) != len(shapes) or (self.parts and len(self.parts) != len(shapes)):
            raise ValueError(f"{len(self.names)} names and {len(shapes)} parameters")
        for part, shape in zip(self.parts, shapes, strict=False):
            if part is not None and part.shape != shape:
                raise ValueError(f"a part of shape {part.shape} in the place of {shape}")

    def piece(self, index: int) -> Piece:
        """Return what the group holds of a parameter."""
        part = self.parts[index] if self.parts else None
        return part or Piece.of_whole(self.layout.params[index].shape)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "axis": self.axis,
            "shard_numel": self.layout.shard_numel,
            "parameters": [
                {
                    "names": list(names),
                    "shape": list(spec.shape),
                    "start": spec.start,
                    **_part_as_json(self.parts[index] if self.parts else None),
                }
                for index, (names, spec) in enumerate(
                    zip(self.names, self.layout.params, strict=True)
                )
            ],
        }

    @staticmethod
    def of_json(content: dict[str, Any], axes: Sequence[Sequence[int]]) -> FlatGroup:
        """Raises KeyError, TypeError or ValueError for content that ``as_json`` cannot return."""
        found = [
            (tuple(texts(param["names"])), shape_in(param["shape"]), size(param["start"]))
            for param in listed(content["parameters"])
        ]
        if not all(names for names, _, _ in found):
            raise ValueError(f"a parameter of {content['name']!r} has no name")
        specs = tuple(ParamSpec(names[0], shape, start) for names, shape, start in found)
        parts = tuple(_part_in(param) for param in content["parameters"])
        axis = size(content["axis"])
        layout = FlatLayout(specs, len(axes[axis]), size(content["shard_numel"]))
        return FlatGroup(
            text_in(content["name"]),
            dtype_of(content["dtype"]),
            axis,
            layout,
            tuple(names for names, _, _ in found),
            parts if any(parts) else (),
        )


def _part_as_json(part: Piece | None) -> dict[str, Any]:
    if part is None:
        return {}
    return {"whole": list(part.whole_shape), "offsets": list(part.offsets)}


def _part_in(param: dict[str, Any]) -> Piece | None:
    if "whole" not in param:
        return None
    return Piece(shape_in(param["whole"]), tuple(sizes(param["offsets"])), shape_in(param["shape"]))


@dataclasses.dataclass(frozen=True)
class SavedParameter:
    """One parameter of a checkpoint, and where it is: in one group, or a part of it in each of
    several groups, which together hold every element once."""

    names: tuple[str, ...]  # all of them in the model, before wrapping
    shape: tuple[int, ...]  # of the whole parameter
    dtype: torch.dtype
    places: tuple[tuple[FlatGroup, int], ...]  # groups, and the index of the parameter in each

    @property
    def pieces(self) -> list[Piece]:
        """What each of ``places`` holds, in their order."""
        return [group.piece(index) for group, index in self.places]


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
    written_by: dict[str, str]  # versions
    # The class of the optimizer and those that it inherits from; empty: not known.
    optimizer_classes: tuple[str, ...] = ()
    shares_extra: bool = False  # the extra values in the common file are those of all ranks

    def parameters(self) -> dict[str, SavedParameter]:
        """Return the parameters by name; one with several names is under each of them. Raises
        ValueError unless the groups hold every element of each parameter once."""
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
            if more or not group.piece(index).is_whole:
                require_grid([group.piece(index) for group, index in of_param])
            shape = group.piece(index).whole_shape
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
            "version": VERSIONS[any(part for group in self.groups for part in group.parts)],
            "written_by": self.written_by,
            "identity": self.identity,
            "step": self.step,
            "common": self.common,
            "axes": [list(axis) for axis in self.axes],
            "groups": [group.as_json() for group in self.groups],
            "param_groups": self.param_groups,
            "optimizer_classes": list(self.optimizer_classes),
            "shares_extra": self.shares_extra,
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


_BEFORE = b'{"content": '
_CHECKSUMS = re.compile("(?:[0-9a-f]{8})*")


def _framed(content: bytes) -> bytes:
    return b'%b%b,\n"crc32": "%08x"}\n' % (_BEFORE, content, zlib.crc32(content))


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in directory ``path``. Raises CheckpointError if it is
    missing or damaged."""
    file = path / MANIFEST
    try:
        text = read_text(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_checkpoint(path) from error
    except (OSError, ValueError) as error:
        raise damaged(file, "text", brief(error)) from error
    content_text = text[len(_BEFORE) : text.rfind(b',\n"crc32": "')]
    if text != _framed(content_text):
        raise damaged(
            file, "text with its checksum at the end", f"{len(text)} bytes without a valid one"
        )
    try:
        content = parse_json(content_text)
        if not isinstance(content, dict):
            raise TypeError(f"a {type(content).__name__} instead of an object")
        if content.get("format") == FORMAT and content.get("version") in VERSIONS:
            return _of_json(content)
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise damaged(file, "a layout with one place for every element", brief(error)) from error
    raise CheckpointError.of(
        "This checkpoint has another format.",
        expected=f"{FORMAT}, version {' or '.join(map(str, VERSIONS))}",
        got=f"{reprlib.repr(content.get('format'))}, version "
        f"{reprlib.repr(content.get('version'))}",
        where=str(file),
        fix="load it with the version of fsdp_compat in its 'written_by', or a later one",
    )


def _no_checkpoint(path: Path) -> CheckpointError:
    got, fix = "no such directory", "pass latest(folder) or the path that save returned"
    if path.is_dir():
        got = "a directory without one"
        steps = sorted(file.parent.name for file in path.glob(f"step-*/{MANIFEST}"))
        if steps:
            got = f"a folder of checkpoints: {', '.join(steps[-4:])}"
            fix = f"pass latest({str(path)!r}), or one of these: {str(path / steps[-1])!r}"
    elif path.exists():
        got = "a file"
    return CheckpointError.of(
        "There is no checkpoint at this path.",
        expected=f"a directory with a {MANIFEST}, as returned by save(folder, ...), or a "
        "checkpoint of another format",
        got=got,
        where=str(path),
        fix=fix,
    )


def _of_json(content: dict[str, Any]) -> Manifest:
    axes = tuple(tuple(sizes(axis)) for axis in listed(content["axes"]))
    files = []
    for number, file in enumerate(listed(content["files"])):
        if _CHECKSUMS.fullmatch(file["crc32"]) is None:
            raise ValueError(f"checksums of file {number}")
        checksums = tuple(
            int(file["crc32"][at : at + 8], 16) for at in range(0, len(file["crc32"]), 8)
        )
        files.append(FileFacts(size(file["nbytes"]), checksums))
        if file["name"] != file_name(number):
            raise ValueError(f"file {number} is called {file['name']!r}")
    if any(not axis or max(axis) >= len(files) or len(set(axis)) < len(axis) for axis in axes):
        raise ValueError(f"shards in files {axes}, of {len(files)}")
    if size(content["common"]) >= len(files):
        raise ValueError(f"file {content['common']} of {len(files)}")
    groups = tuple(FlatGroup.of_json(group, axes) for group in listed(content["groups"]))
    if len({group.name for group in groups}) < len(groups):
        raise ValueError("two groups have one name")
    if content["param_groups"] is not None:
        for group in listed(content["param_groups"]):
            texts(group["params"])
            if not isinstance(group["settings"], dict):
                raise TypeError("the settings of a parameter group are not an object")
    manifest = Manifest(
        text_in(content["identity"]),
        size(content["step"]),
        content["common"],
        axes,
        groups,
        tuple(files),
        content["param_groups"],
        {text_in(name): text_in(version) for name, version in content["written_by"].items()},
        # optional fields
        tuple(texts(content.get("optimizer_classes", []))),
        content.get("shares_extra", False) is True,
    )
    manifest.parameters()  # raises
    return manifest
