"""Opening a checkpoint: its kind is recognised, and its files are complete."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from ..._archive.archive import Archive, NotRead, Unrecognised
from ..._archive.blocks import damaged
from ..._archive.texts import open_file
from ..._progress import elapsing
from ..._text import joined
from ...errors import CheckpointError, wrong_type
from .._folder.directory import STEP
from .client_directories import read_client_directory
from .dcp import is_dcp, read_dcp
from .manifest import MANIFEST, file_name, read_manifest
from .native import native_in, read_native
from .paths import require_inside
from .rank_files import TORCH_SUFFIXES, rank_groups, read_rank_files, read_torch_save
from .safetensors_files import INDEX, read_safetensors, read_sharded_safetensors
from .torch_save import ReadOptions
from .tree import divided, without_ddp

_TORCH_INDEX = "pytorch_model.bin.index.json"
_DEEPSPEED = re.compile(r"(\w+_)?mp_rank_\d+_\w+_states\.pt")
_DEEPSPEED_SCRIPT = "zero_to_fp32.py"  # beside the directory of a step
UNFINISHED = re.compile(r"\.(?!removed-)(.+)-[0-9a-f]{32}")  # as `_publishing` names them


def open_archive(
    path: str | os.PathLike[str],
    shapes: Archive | str | os.PathLike[str] | None = None,
    ignore_class: Collection[str] = (),
    keep_module: bool = False,
    progress: bool = False,
) -> Archive:
    """Return what a checkpoint of any format holds, without values. shapes, ignore_class,
    keep_module: as for ``inspect``. progress: show how long it takes. Raises CheckpointError if it
    is unknown, damaged or refused."""
    path = Path(path)
    if shapes is not None and not isinstance(shapes, Archive):
        if not isinstance(shapes, (str, os.PathLike)):
            raise wrong_type("shapes", "the path of a checkpoint, or None", shapes)
        shapes = open_archive(shapes)
    try:
        title = f"reading the headers of {path.name}"
        with elapsing(progress, title), _without_garbage_collection():
            archive = _archive_at(path, ReadOptions(shapes, ignore_class))
            require_lengths(archive)
    except OSError as error:
        raise CheckpointError.of(
            "A file of the checkpoint cannot be read.",
            expected="all files that were written together",
            got=f"{error.strerror}: {error.filename}",
            where=str(path),
            fix="copy the missing file beside the others, or check its permissions",
        ) from error
    if not keep_module:
        without_ddp(archive)
    return archive


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """What the files of many ranks describe are millions of objects, of which none is garbage:
    looking for it takes longer than reading them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def problems_of(archive: Archive) -> list[str]:
    """Return every tensor whose elements are not covered exactly once, with what is wrong."""
    found = ((name, tensor.coverage_problem()) for name, tensor in archive.all_tensors())
    return [f"{name}: {problem}" for name, problem in found if problem is not None]


def _archive_at(path: Path, options: ReadOptions) -> Archive:
    if not path.is_dir():
        if path.name == MANIFEST and path.is_file():
            return read_native(path.parent)
        return divided(_file(path, options))
    if native := native_in(path):
        return read_native(native)
    if (path / file_name(0)).is_file():
        read_manifest(path)  # raises
    found = read_client_directory(path, options)
    return found or divided(_directory(path, options))


def _directory(path: Path, options: ReadOptions) -> Archive:
    names = sorted(os.listdir(path))
    if any(map(_DEEPSPEED.fullmatch, names)):
        raise _of_deepspeed(path, path.parent)
    if is_dcp(path):
        return read_dcp(path)
    if found := read_sharded_safetensors(path):
        return found
    if _TORCH_INDEX in names:
        return read_torch_save(path / _TORCH_INDEX, options)
    files = [path / name for name in names if (path / name).is_file()]
    ranks = [file for group in rank_groups(files) for file in group.paths.values()]
    if ranks:
        files = [require_inside(path, file) for file in ranks]
        return read_rank_files(files, options)
    if INDEX in names or any(name.endswith(".safetensors") for name in names):
        return read_safetensors(path)
    files = [path / name for name in names if Path(name).suffix in TORCH_SUFFIXES]
    if len(files) == 1:
        return _file(require_inside(path, files[0]), options)
    steps = (each.name for each in path.glob("global_step*/*"))
    if _DEEPSPEED_SCRIPT in names or any(map(_DEEPSPEED.fullmatch, steps)):
        raise _of_deepspeed(path, path)
    names = [file.name for file in files] or names
    raise unreadable(path, joined(names, 8, ", ") if names else "an empty directory")


def _file(path: Path, options: ReadOptions) -> Archive:
    if not path.is_file():
        is_there = os.path.lexists(path)
        raise unreadable(path, "something that is neither" if is_there else "nothing at this path")
    if path.name == ".metadata" or path.suffix == ".distcp":
        return read_dcp(path.parent)
    if not path.name.endswith(".bin.index.json"):
        with open(open_file(path), "rb") as file:
            is_safetensors = file.read(9)[8:] == b"{"
        if is_safetensors or path.suffix in (".safetensors", ".json"):
            return read_safetensors(path)
    return read_torch_save(path, options)


def require_lengths(archive: Archive) -> None:
    """Raise CheckpointError unless files with checksums have their length; OSError."""
    for file, facts in archive.checksums.items():
        if (nbytes := file.stat().st_size) != facts.nbytes:
            raise damaged(file, f"{facts.nbytes} bytes", f"{nbytes} bytes")


def _of_deepspeed(path: Path, folder: Path) -> NotRead:
    script = folder / _DEEPSPEED_SCRIPT
    copy = "" if script.exists() else "copy the script there, from the run that saved it; "
    return NotRead.of(
        "Checkpoints of DeepSpeed have to be converted by its zero_to_fp32.py.",
        expected="the whole state dict that zero_to_fp32.py makes of one",
        got="files of DeepSpeed",
        where=str(path),
        fix=f"{copy}python {script} {folder} whole; then pass whole",
    )


def unreadable(path: Path, got: str, is_listed: bool = False) -> Unrecognised:
    """Return the error for a path without a checkpoint. is_listed: not below it either."""
    fix = "pass the file, or the directory that holds the files themselves"
    folders = sorted(each.name for each in path.glob("*") if each.is_dir())
    names = re.compile(f"{STEP}|{UNFINISHED.pattern}")
    if folders and all(map(names.fullmatch, folders)) and not [*path.glob(f"*/{MANIFEST}")]:
        got, fix = f"only saves that did not finish: {joined(folders, 8, ', ')}", "pass another one"
    elif not is_listed and folders:
        fix = f"pass one of the checkpoints in it: `fsdp-compat inspect {path}` lists them"
    return Unrecognised.of(
        "No checkpoint was recognised.",
        expected="a native, torch.distributed.checkpoint or safetensors checkpoint, torch.save "
        "files (one, or one per rank: rank_0.pt), or a directory of Accelerate, Lightning or the "
        "Trainer",
        got=got,
        where=str(path),
        fix=fix,
    )
