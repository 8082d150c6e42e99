"""``convert``: from a checkpoint of any format to one of another."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ... import errors
from ...errors import CheckpointError, UsageError
from .._progress import progress_bar, require_bar
from .._publishing import published, require_free
from .._texts import joined
from .archive import Archive, StoredTensor
from .dcp import write_dcp
from .native_writing import write_native
from .opening import open_archive, problems_of
from .optimizer_tree import named_optimizer
from .reading import SLAB_NBYTES, Files
from .safetensors_files import write_safetensors, write_safetensors_file
from .selection import compiled, selection
from .shapes import Shapes
from .torch_writing import write_torch
from .walk import LEFT_OUT, map_leaves
from .writing import WriteOptions, nbytes_to_write

Names = Mapping[str, str | None] | Sequence[tuple[str, str]] | Callable[[str], str | None]


@dataclasses.dataclass(frozen=True)
class _Format:
    write: Callable[[Archive, Path, WriteOptions, Files], None]
    holds_optimizer: bool
    suffixes: tuple[str, ...] = ()  # of a target that is to be this format


FORMATS = {
    "safetensors": _Format(write_safetensors, False),
    "safetensors-file": _Format(write_safetensors_file, False, (".safetensors",)),
    "torch": _Format(write_torch, True, (".pt", ".pth", ".bin", ".ckpt")),
    "dcp": _Format(write_dcp, True),
    "native": _Format(write_native, True),
}
_MIN_MEMORY = 16 << 20
_MAX_RANKS = 100_000
_STEP = re.compile(r"step-([0-9]+)")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    world_size: int | None = None,
    unit: str | None = None,
    dtype: torch.dtype | None = None,
    rename: Names | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    optimizer: bool | None = None,
    optimizer_names: Sequence[str] | None = None,
    shapes: Shapes | str | os.PathLike[str] | None = None,
    ignored: Collection[str] = (),
    keep_module: bool = False,
    max_file_nbytes: int = 5_000_000_000,
    memory: int = 256 << 20,
    workers: int = 1,
    step: int | None = None,
    progress: bool = False,
) -> Path:
    """Write the content of a checkpoint of any known format as one of another; return ``target``.

    One process; no process group, no GPU and no model. Values are converted tensor by tensor and
    written as they come. ``target`` appears once everything in it is durable; nothing of it is
    left if the call is interrupted or the process killed (the next call removes hidden leftovers).

        convert("checkpoints/rank_files", "model", to="safetensors")
        convert("runs/7/step-00001200", "weights.pt", optimizer=False, dtype=torch.bfloat16)

    Args:
        source: a checkpoint; its kind is recognised.
        target: does not exist yet.
        to: "safetensors" (a directory as Hugging Face lays it out), "safetensors-file", "torch"
            (a torch.save file), "dcp" (torch.distributed.checkpoint) or "native" (a directory for
            ``checkpoint.load``). Default: by the suffix of ``target``; safetensors without one.
        world_size: ranks to cut the shards of "dcp" and "native" for; default 1. They load on any
            other number too.
        unit: for "native": a regular expression; parameters whose names begin with the same match
            share a shard, such as ``r"layers\\.\\d+\\."``. Default: one per dtype.
        dtype: of the model's floating-point tensors in the target; default: their own.
        rename: names in the target: a mapping from old names (to None: leave out), pairs of regular
            expression and replacement, applied in order, or a function. Applies to the optimizer
            as well.
        include, exclude: regular expressions that are searched for in the original names: take the
            parameters that match any of ``include``, and none of ``exclude``.
        optimizer: take the optimizer's state. Default: if there is any and the target can hold it.
        optimizer_names: names for the numbers under which torch.optim saves its parameters, in this
            order, such as ``[name for name, _ in model.named_parameters()]`` if the optimizer got
            ``model.parameters()``. A "native" target needs names. State whose groups have
            ``param_names`` has them already.
        shapes: of the model, for LOCAL state dicts of FSDP1, see ``fsdp-compat shapes``.
        ignored: full names of classes, such as "omegaconf.dictconfig.DictConfig", whose objects in
            torch.save files are left out. Any other class is refused.
        keep_module: keep a "module." that all names begin with. Without it, it counts as the
            prefix that DistributedDataParallel adds, and is removed; native checkpoints keep it in
            any case.
        max_file_nbytes: largest number of bytes of tensors in a file of "safetensors".
        memory: bytes of values in memory at a time, at least 16 MiB, in all workers together. A
            tensor whose elements lie scattered over a file may need as much as its own size.
        workers: threads.
        step: of the target, for "native"; default: the source's, or 0.
        progress: show bytes and rate; requires tqdm.

    Raises:
        UsageError: an argument is invalid, the target exists, or it cannot hold a value.
        CheckpointError: the source is damaged, incomplete or refused.
        OSError: the target cannot be written.

    Warns (UserWarning) of values of the source that the target does not hold.
    """
    call = "checkpoint.convert"
    target_path = Path(target)
    name = _format_of(target_path, to, call)
    _check(call, world_size, unit, dtype, optimizer, max_file_nbytes, memory, workers, step)
    errors.require_bools(call, progress=progress)
    require_bar(progress, f"{call}(..., progress=True)")
    is_selected, new_name = selection(include, exclude, call), _renaming(rename, call)
    require_free(target_path, call)
    source_path = Path(source)
    if target_path.absolute().parent.is_relative_to(source_path.absolute()):
        raise UsageError.of(
            "The target lies in the source.",
            expected="a target outside of the checkpoint that is read",
            got=str(target),
            where=call,
            fix="pass another target",
        )
    archive = open_archive(source_path, shapes, ignored, keep_module)
    if optimizer_names is not None:
        _name_optimizer(archive, optimizer_names, call)
    wanted = _selected(archive, is_selected, new_name, dtype, name, optimizer, call)
    _require_complete(wanted)
    match = _STEP.fullmatch(target_path.name)
    options = WriteOptions(
        world_size or 1,
        unit,
        max_file_nbytes,
        step if step is not None else int(match[1]) if match else archive.step or 0,
        min(SLAB_NBYTES, memory // (4 * workers)),
        workers,
    )
    total = sum(nbytes_to_write(tensor) for _, tensor in wanted.all_tensors())
    with (
        Files(archive.checksums) as files,
        published(target_path, call) as path,
        progress_bar(progress, f"{name} {target_path.name}", total) as tick,
    ):
        FORMATS[name].write(wanted, path, dataclasses.replace(options, tick=tick), files)
    if wanted.left_out:
        left = joined(wanted.left_out, 8, ", ")
        warnings.warn(f"not written to {target_path}: {left}", stacklevel=2)
    return target_path


# -- what is converted


def _name_optimizer(archive: Archive, names: Sequence[str], call: str) -> None:
    """Replace the numbers of the optimizer's parameters by names."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise errors.wrong_type("optimizer_names", "a list of names", names, call)
    shapes = {name: tensor.shape for name, tensor in archive.tensors.items()}
    shapes |= {alias: shapes[name] for alias, name in archive.aliases.items()}
    try:
        if not archive.is_by_number:
            raise ValueError("optimizer state by name, or none")
        archive.states, archive.param_groups = named_optimizer(
            archive.states, archive.param_groups or [], names, shapes
        )
    except ValueError as error:
        raise UsageError.of(
            "optimizer_names does not fit the optimizer state.",
            expected="a tensor of the model for each numbered parameter, in the order of the "
            "numbers",
            got=str(error),
            where=call,
            fix="pass the names in the order in which the optimizer got the parameters; "
            "inspect shows the names and shapes of both",
        ) from error
    archive.is_by_number = False


def _selected(
    archive: Archive,
    is_selected: Callable[[str], bool],
    new_name: Callable[[str], str | None],
    dtype: torch.dtype | None,
    to: str,
    optimizer: bool | None,
    call: str,
) -> Archive:
    """Return the archive that the target is to hold."""
    has_optimizer = archive.param_groups is not None or bool(archive.states)
    if optimizer and not (FORMATS[to].holds_optimizer and has_optimizer):
        raise UsageError.of(
            "The optimizer's state cannot be taken along.",
            expected="a source with optimizer state, and a target of torch, dcp or native",
            got=f"{to} as the target" if has_optimizer else "a source without optimizer state",
            where=f"{call}(..., optimizer=True)",
            fix="leave optimizer out, or choose another target",
        )
    can_hold = FORMATS[to].holds_optimizer and not (archive.is_by_number and to == "native")
    takes_optimizer = has_optimizer and (can_hold if optimizer is None else optimizer)
    names: dict[str, str] = {}  # what is taken: its name in the target
    for name in (*archive.tensors, *archive.aliases, *(archive.states if takes_optimizer else ())):
        if is_selected(name) and (new := new_name(name)) is not None:
            names[name] = new
    if not any(name in names for name in (*archive.tensors, *archive.aliases)):
        raise UsageError.of(
            "No tensor matches.",
            expected="patterns that keep at least one of the source's tensors",
            got=joined([repr(name) for name in archive.tensors], 5, ", ") or "no tensors",
            where=call,
            fix="look at the names with inspect",
        )
    selected = dataclasses.replace(archive, tensors={}, aliases={}, states={}, extra={})
    selected.left_out = list(archive.left_out)
    taken = _select_model(archive, selected, names, dtype, call)
    if to.startswith("safetensors") and selected.aliases:
        left = joined(list(selected.aliases), 5, ", ")
        selected.left_out.append(
            f"second names of tied tensors ({left}): safetensors stores a tensor once"
        )
    if takes_optimizer:
        _select_optimizer(archive, selected, {**names, **taken})
    else:
        selected.param_groups = None
        if has_optimizer and optimizer is None:
            selected.left_out.append(
                "the optimizer state: its parameters are numbered, and a native checkpoint needs "
                "their names (see optimizer_names, --optimizer-names)"
                if FORMATS[to].holds_optimizer
                else "optimizer state (safetensors holds weights only)"
            )
    if FORMATS[to].holds_optimizer:
        selected.extra = _data_in(archive.extra, selected, to)
    elif any(value is not None for value in archive.extra.values()):
        selected.left_out.append(f"other values ({joined(list(archive.extra), 5, ', ')})")
    return selected


def _select_model(
    archive: Archive,
    selected: Archive,
    names: Mapping[str, str],
    dtype: torch.dtype | None,
    call: str,
) -> dict[str, str]:
    """Enter the tensors; return the new name of each, by the names of the source."""
    taken: dict[str, str] = {}  # the new name of a tensor, by its old one
    new_names: dict[str, str] = {}
    for old in filter(names.__contains__, (*archive.tensors, *archive.aliases)):
        new = names[old]
        if new in new_names:
            raise UsageError.of(
                "Two tensors get the same name.",
                expected="a different name for each",
                got=f"{new!r} for {new_names[new]!r} and for {old!r}",
                where=call,
                fix="change rename, or leave one of them out with exclude",
            )
        new_names[new] = old
        first = archive.aliases.get(old, old)
        if first in taken:
            selected.aliases[new] = taken[first]
            continue
        taken[first] = new
        tensor = archive.tensors[first]
        changes = dtype is not None and tensor.dtype.is_floating_point
        selected.tensors[new] = dataclasses.replace(
            tensor, name=new, written_as=dtype if changes else None
        )
    return {old: taken[first] for old, first in archive.aliases.items() if first in taken} | taken


def _select_optimizer(archive: Archive, selected: Archive, names: Mapping[str, str]) -> None:
    if archive.is_by_number:
        selected.states = archive.states
        return
    selected.states = {
        names[name]: states for name, states in archive.states.items() if name in names
    }
    if archive.param_groups is not None:
        selected.param_groups = [
            {**group, "params": [names[name] for name in group["params"] if name in names]}
            for group in archive.param_groups
        ]


_VALUES = (torch.dtype, torch.device, torch.Size, complex, bytearray, set, frozenset, Counter)


def _data_in(value: Any, selected: Archive, to: str) -> Any:
    """Return values without the objects that the reader could not read, whose places are entered
    in ``left_out``."""

    def known(leaf: Any, path: str) -> Any:
        if isinstance(leaf, (StoredTensor, *_VALUES)):
            return leaf
        if isinstance(leaf, deque):
            items = map_leaves([*leaf], known, path)
            return deque(items, leaf.maxlen) if to == "native" else items
        selected.left_out.append(f"{path}, an object")
        return LEFT_OUT

    return map_leaves(value, known)


def _require_complete(archive: Archive) -> None:
    problems = problems_of(archive)
    if problems:
        raise CheckpointError.of(
            "The checkpoint is incomplete, or parts of several are mixed.",
            expected="every element of every tensor once",
            got=joined(problems, 5, "; "),
            where=str(archive.path),
            fix="find the files of all ranks; `verify` lists what is missing",
        )


# -- arguments


def _format_of(target: Path, to: str | None, call: str) -> str:
    by_suffix = next(
        (name for name, each in FORMATS.items() if target.suffix.lower() in each.suffixes), None
    )
    if to is None:
        return by_suffix or "safetensors"
    if to not in FORMATS:
        raise errors.wrong_type("to", f"one of {', '.join(FORMATS)}, or None", to, call)
    if by_suffix not in (None, to):
        raise UsageError.of(
            "The target's name does not fit its format.",
            expected=f"a name for {to}",
            got=f"{target.name!r}, as a {by_suffix} target is called",
            where=call,
            fix="change the name, or leave `to` out",
        )
    return to


def _check(
    call: str,
    world_size: Any,
    unit: Any,
    dtype: Any,
    optimizer: Any,
    max_file_nbytes: Any,
    memory: Any,
    workers: Any,
    step: Any,
) -> None:
    counts = {
        "world_size": (1 if world_size is None else world_size, 1, "ranks"),
        "max_file_nbytes": (max_file_nbytes, 1, "bytes"),
        "memory": (memory, _MIN_MEMORY, "bytes"),
        "workers": (workers, 1, "threads"),
        "step": (0 if step is None else step, 0, "steps"),
    }
    for name, (value, least, what) in counts.items():
        if type(value) is not int or value < least:
            raise errors.wrong_type(name, f"a number of {what}, at least {least}", value, call)
    if world_size is not None and world_size > _MAX_RANKS:
        raise errors.wrong_type("world_size", f"at most {_MAX_RANKS} ranks", world_size, call)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise errors.wrong_type("dtype", "a floating-point dtype, or None", dtype, call)
    if optimizer is not None and type(optimizer) is not bool:
        raise errors.wrong_type("optimizer", "True, False or None", optimizer, call)
    if unit is not None:
        compiled("unit", [unit], call)


def _renaming(rename: Any, call: str) -> Callable[[str], str | None]:
    """Return the function from a name in the source to the one in the target."""
    if rename is None:
        return lambda name: name
    if isinstance(rename, Mapping):
        return lambda name: rename.get(name, name)
    if callable(rename):
        return _checked(rename, call)
    try:
        pairs = [(re.compile(pattern), replacement) for pattern, replacement in rename]
        for pattern, replacement in pairs:
            pattern.sub(replacement, "")  # raises for a wrong reference
    except (re.error, TypeError, ValueError, IndexError) as error:
        expected = "a mapping, pairs of regular expression and replacement, or a function"
        raise errors.wrong_type("rename", expected, rename, call) from error

    def renamed(name: str) -> str | None:
        for pattern, replacement in pairs:
            name = pattern.sub(replacement, name)
        return name

    return renamed


def _checked(rename: Callable[[str], Any], call: str) -> Callable[[str], str | None]:
    def renamed(name: str) -> str | None:
        new = rename(name)
        if new is not None and not isinstance(new, str):
            raise errors.wrong_type("the result of rename", f"a name for {name!r}", new, call)
        return new

    return renamed
