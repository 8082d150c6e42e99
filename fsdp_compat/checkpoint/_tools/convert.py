"""``convert``: from a checkpoint of any format to one of another."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..._archive.archive import Archive, StoredTensor, is_user
from ..._archive.reader import Files
from ..._archive.walk import LEFT_OUT, map_leaves
from ..._progress import progress_bar
from ..._text import joined
from ...errors import CheckpointError, UsageError, unusable, wrong_type
from .._arguments import Rename, renamed, require_arguments, selection
from .._folder.directory import step_in
from .._folder.publishing import published, require_free
from .._formats.dcp import is_dcp, write_dcp
from .._formats.native import write_native
from .._formats.optimizer_tree import name_optimizer
from .._formats.recognition import open_archive, problems_of
from .._formats.safetensors_files import write_safetensors
from .._formats.torch_save import state_dict_of, write_torch
from .._formats.writers import WriteOptions, nbytes_to_write

Names = Mapping[str, str | None] | Sequence[tuple[str, str]] | Callable[[str], str | None]


_Write = Callable[[Archive, Path, WriteOptions, Files], None]
FORMATS: dict[str, tuple[_Write, tuple[str, ...]]] = {  # the suffixes of targets for each
    "safetensors": (write_safetensors, ()),
    "safetensors-file": (functools.partial(write_safetensors, in_one_file=True), (".safetensors",)),
    "torch": (write_torch, (".pt", ".pth", ".bin", ".ckpt")),
    "dcp": (write_dcp, ()),
    "native": (write_native, ()),
}
_OTHER_SUFFIXES = (".zip", ".tar", ".gz", ".pkl", ".npz", ".h5", ".onnx", ".gguf")
_CALL = "checkpoint.files.convert"
_VALUES = (torch.dtype, torch.device, torch.Size, complex, bytearray, set, frozenset, Counter)


def convert(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    world_size: int | None = None,
    unit: str | None = None,
    dtype: torch.dtype | None = None,
    rename: Names | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    weights: bool = False,
    as_saved: bool = False,
    optimizer_names: Sequence[str] | None = None,
    shapes: str | os.PathLike[str] | None = None,
    ignore_class: Collection[str] = (),
    keep_module: bool = False,
    max_file_size: int = 5_000_000_000,
    step: int | None = None,
    progress: bool = False,
) -> Path:
    """Write the content of a checkpoint of any known format as one of another.

    Values are converted tensor by tensor and written as they come, at most 256 MiB at a time: only
    a tensor whose elements lie scattered over a file may need its own size. ``target`` appears once
    everything in it is durable; nothing of it is left if the call is interrupted or the process
    killed (the next call removes hidden leftovers). Warns (UserWarning) of values of the source
    that the target does not hold.

        convert("checkpoints/rank_files", "model", to="safetensors")
        convert("runs/7/step-00001200", "weights.pt", weights=True, dtype=torch.bfloat16)

    Args:
        path: as for ``inspect``.
        target: does not exist yet.
        to: "safetensors" (a directory as Hugging Face lays it out), "safetensors-file", "torch" (a
            torch.save file), "dcp" (torch.distributed.checkpoint) or "native" (a directory for
            ``checkpoint.load``). Default: by the suffix of ``target``; a suffix of another
            kind of file, such as .zip, is refused. Without one, with a ``world_size`` "dcp" from
            "dcp" and "native" from all else; otherwise safetensors.
        world_size: ranks to cut the shards of "dcp" and "native" for, by default 1; any can load
            it.
        unit: for "native": a regular expression; parameters whose names begin with the same match
            share a shard, such as ``r"layers\\.\\d+\\."``. Default: one per dtype.
        dtype: of the model's floating-point tensors in the target; default: their own.
        rename: names in the target: pairs of regular expression and replacement, applied in order.
            In Python also a mapping from old names (to None: leave out), or a function. Also for
            the optimizer.
        include: as for ``inspect``.
        exclude: as for ``inspect``.
        weights: take the model alone. Default: also the optimizer state and all other values, if
            the target can hold them.
        as_saved: for "torch": keep the nested containers and all names as they were saved. Excludes
            ``dtype``, ``rename`` and everything that takes a part.
        optimizer_names: names for the numbers under which torch.optim saves its parameters, in this
            order, such as ``[name for name, _ in model.named_parameters()]`` if the optimizer got
            ``model.parameters()``. A "native" target needs names; state with ``param_names`` has
            them.
        shapes: as for ``inspect``.
        ignore_class: as for ``inspect``.
        keep_module: as for ``inspect``.
        max_file_size: the most bytes of tensors in a file of "safetensors".
        step: of the target, for "native"; default: the source's, or 0.
        progress: show bytes and rate on stderr.

    Returns:
        ``target``.

    Raises:
        UsageError: an argument is invalid, the target exists, or it cannot hold a value.
        CheckpointError: the source is damaged, incomplete or refused.
        OSError: the target cannot be written."""
    require_arguments(_CALL, progress, path=path, target=target, include=include, exclude=exclude)
    require_arguments(_CALL, progress, world_size=world_size, max_file_size=max_file_size)
    require_arguments(_CALL, progress, unit=unit, dtype=dtype, step=0 if step is None else step)
    path, target = Path(path), Path(target)
    require_free(target)
    to = _format_of(path, target, to, world_size)
    for name, value in (("world_size", world_size), ("unit", unit), ("step", step)):
        targets = '"dcp" or "native"' if name == "world_size" else '"native"'
        if value is not None and f'"{to}"' not in targets:
            raise unusable(name, f"None, or a target of {targets}, not {to}", value, _CALL)
    changes = (dtype, rename, *include, *exclude, optimizer_names, weights)
    if as_saved and (to != "torch" or any(changes)):
        expected = "False, unless a .pt is written and nothing is renamed, converted or left out"
        fix = "end the target in .pt, and leave out all arguments that change or select"
        raise unusable("as_saved", expected, as_saved, _CALL, fix)
    is_selected, rename = selection(include, exclude), _renaming(rename)
    if target.absolute().parent.is_relative_to(path.absolute()):
        raise unusable("target", "a path outside of the source", str(target), _CALL)
    known = Archive(path, "", {}) if shapes is None else shapes
    archive = open_archive(path, known, ignore_class, keep_module, progress)
    if weights:
        archive.states, archive.param_groups, archive.extra = {}, None, {}
    if optimizer_names is not None:
        _name_optimizer(archive, optimizer_names)
    states = () if archive.is_by_number else archive.states
    old_names = filter(is_selected, (*archive.tensors, *archive.aliases, *states))
    names = renamed(old_names, rename, _CALL)
    names |= {name: name for name, state in archive.states.items() if is_user(state)}
    wanted = _as_saved(archive) if as_saved else _selected(archive, names, dtype, to)
    if problems := problems_of(wanted):
        raise CheckpointError.of(
            "The checkpoint is incomplete, or parts of several are mixed.",
            expected="every element of every tensor once",
            got=joined(problems, 5, "; "),
            where=str(path),
            fix="find the files of all ranks; `verify` lists what is missing",
        )
    steps = [each for each in (step, step_in(target.name), archive.step, 0) if each is not None]
    total = sum(nbytes_to_write(tensor) for _, tensor in wanted.all_tensors())
    with (
        Files(archive.checksums) as files,
        published(target) as hidden,
        progress_bar(progress, f"{to} {target.name}", total) as tick,
    ):
        options = WriteOptions(world_size or 1, unit, max_file_size, steps[0], tick)
        FORMATS[to][0](wanted, hidden, options, files)
    if wanted.left_out:
        warnings.warn(f"not written to {target}: {joined(wanted.left_out, 8, ', ')}", stacklevel=2)
    return target


# -- what is converted


def _name_optimizer(archive: Archive, names: Sequence[str]) -> None:
    """Replace the numbers of the optimizer's parameters by names."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise wrong_type("optimizer_names", "a list of names", names, _CALL)
    shapes = {name: tensor.shape for name, tensor in archive.tensors.items()}
    shapes |= {alias: shapes[name] for alias, name in archive.aliases.items()}
    try:
        if not archive.is_by_number:
            raise ValueError("optimizer state by name, or none")
        name_optimizer(archive, names, shapes)
    except ValueError as error:
        raise UsageError.of(
            "optimizer_names does not fit the optimizer state.",
            expected="a tensor of the model for each number, in the order of the numbers",
            got=str(error),
            where=_CALL,
            fix="pass the names in the order in which the optimizer got the parameters",
        ) from error


def _selected(
    archive: Archive, names: dict[str, str], dtype: torch.dtype | None, to: str
) -> Archive:
    """Return the archive that the target is to hold. names: old names to new ones."""
    new = dataclasses.replace(archive, tensors={}, aliases={}, left_out=[*archive.left_out])
    new.as_saved = None
    taken: dict[str, str] = {}  # the new name of a tensor, by its first name in the source
    for old in filter(names.__contains__, (*archive.tensors, *archive.aliases)):
        first = archive.aliases.get(old, old)
        if first in taken:
            new.aliases[names[old]] = taken[first]
            continue
        tensor = archive.tensors[first]
        taken[first] = name = names[old]
        written_as = dtype if tensor.dtype.is_floating_point else None
        new.tensors[name] = dataclasses.replace(tensor, name=name, written_as=written_as)
    if not taken:
        raise UsageError.of(
            "No tensor matches.",
            expected="patterns that keep at least one of the source's tensors",
            got=joined([repr(name) for name in archive.tensors], 5, ", ") or "no tensors",
            where=_CALL,
            fix="look at the names with inspect",
        )
    has_optimizer = bool(new.states) or new.param_groups is not None
    if to.startswith("safetensors"):
        seconds, others = (joined(list(each), 5, ", ") for each in (new.aliases, new.extra))
        if seconds:
            text = f"second names of tied tensors ({seconds}): safetensors stores a tensor once"
            new.left_out.append(text)
        if has_optimizer:
            new.left_out.append("optimizer state (safetensors holds weights only)")
        if any(value is not None for value in new.extra.values()):
            new.left_out.append(f"other values ({others})")
        new.states, new.param_groups, new.extra = {}, None, {}
    elif new.is_by_number and to == "native" and has_optimizer:
        new.left_out.append(
            "the optimizer state: its parameters are numbered, and a native checkpoint needs "
            "their names (optimizer_names, --optimizer-names)"
        )
        new.states, new.param_groups = {}, None
    elif not new.is_by_number:
        names |= {old: taken[first] for old, first in archive.aliases.items() if first in taken}
        names |= taken
        new.states = {names[old]: each for old, each in new.states.items() if old in names}
        new.param_groups = new.param_groups and [
            {**group, "params": [names[name] for name in group["params"] if name in names]}
            for group in new.param_groups
        ]
    new.states, new.param_groups, new.extra = (
        _data_in(value, new, to) for value in (new.states, new.param_groups, new.extra)
    )
    return new


def _as_saved(archive: Archive) -> Archive:
    """Return the archive to write with its nested values as they are, equal tensors once."""
    firsts: dict[Any, StoredTensor] = {}

    def tied(leaf: Any, _: str) -> Any:
        if not isinstance(leaf, StoredTensor):
            return leaf
        return firsts.setdefault((leaf.dtype, leaf.shape, leaf.pieces), leaf)

    archive.as_saved = map_leaves(_data_in(state_dict_of(archive), archive, "torch"), tied)
    return archive


def _data_in(value: Any, archive: Archive, to: str) -> Any:
    """Return values without objects that were not read, which are entered in ``left_out``."""

    def known(leaf: Any, path: str) -> Any:
        if isinstance(leaf, (StoredTensor, *_VALUES)):
            return leaf
        if isinstance(leaf, deque):
            items = map_leaves([*leaf], known, path)
            return deque(items, leaf.maxlen) if to == "native" else items
        archive.left_out.append(f"{path}, an object")
        return LEFT_OUT

    return map_leaves(value, known)


# -- arguments


def _format_of(path: Path, target: Path, to: str | None, world_size: int | None) -> str:
    suffix = target.suffix.lower()
    by_suffix = next((name for name, (_, own) in FORMATS.items() if suffix in own), None)
    by_ranks = "dcp" if is_dcp(path) else "native"
    if to is None and suffix in _OTHER_SUFFIXES:
        raise unusable("target", "a name of a known format, or `to`", target.name, _CALL)
    to = to or by_suffix or ("safetensors" if world_size is None else by_ranks)
    if to not in FORMATS:
        raise wrong_type("to", f"one of {', '.join(FORMATS)}, or None", to, _CALL)
    if by_suffix not in (None, to):
        fix = "change the name, or leave `to` out"
        raise unusable("target", f"a name for {to}, not for {by_suffix}", target.name, _CALL, fix)
    return to


def _renaming(rename: Names | None) -> Rename | None:
    """Return the function from a name in the source to the one in the target."""
    if isinstance(rename, Mapping):
        return lambda name: rename.get(name, name)
    if rename is None or callable(rename):
        return rename
    try:
        pairs = [(re.compile(pattern), replacement) for pattern, replacement in rename]
        for pattern, replacement in pairs:
            pattern.sub(replacement, "")  # raises for a wrong reference
    except (re.error, TypeError, ValueError, IndexError) as error:
        expected = "a mapping, pairs of regular expression and replacement, or a function"
        raise wrong_type("rename", expected, rename, _CALL) from error
    return lambda name: functools.reduce(lambda text, pair: pair[0].sub(pair[1], text), pairs, name)
