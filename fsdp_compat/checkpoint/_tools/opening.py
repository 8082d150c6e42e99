"""Opening a checkpoint: its kind is recognised, and every byte that its content names exists."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from ...errors import CheckpointError
from .._blocks import damaged
from .._manifest import MANIFEST
from .._texts import joined, open_file
from .archive import Archive, NotRead, Span, StoredTensor, coverage_problem
from .client_directories import read_client_directory, read_indexed_torch_files
from .dcp import is_dcp, is_sharded_safetensors, read_dcp, read_sharded_safetensors
from .native_reading import is_native, read_native
from .paths import require_inside
from .rank_files import rank_files_in, read_rank_files
from .safetensors_files import INDEX, read_safetensors
from .shapes import Shapes, shapes_of_archive
from .sharded_records import RankPart
from .torch_save import is_torch_file, read_torch_file
from .tree import archive_of, without_ddp
from .walk import leaves

_TORCH_INDEX = "pytorch_model.bin.index.json"
_DEEPSPEED = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_\w+_states\.pt|mp_rank_\d+_model_states\.pt"
)
_DEEPSPEED_SCRIPT = re.compile(r"zero_to_fp32\.py")  # beside the directory of a step
_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".tar"}


def open_archive(
    path: str | os.PathLike[str],
    shapes: Shapes | str | os.PathLike[str] | None = None,
    ignored: Collection[str] = (),
    keep_module: bool = False,
) -> Archive:
    """Return what a checkpoint of any known format holds. No values of tensors are read.

    shapes: of the model, for files that hold none (FSDP1's LOCAL state dicts): a file that
    ``fsdp-compat shapes`` wrote, or another checkpoint of the same model. ignored: full names of
    classes whose objects in torch.save files are left out, not refused. keep_module: names keep a
    "module." that all of them begin with. Raises CheckpointError if nothing is recognised, or the
    content is damaged, incomplete or refused.
    """
    archive = _opened(Path(path), _shapes_in(shapes), ignored)
    if not keep_module:
        without_ddp(archive)
    _require_in_files(archive)
    return archive


def problems_of(archive: Archive) -> list[str]:
    """Return every tensor whose elements are not covered exactly once, with what is wrong."""
    found = []
    for name, tensor in archive.all_tensors():
        problem = coverage_problem(tensor.shape, [piece.box for piece in tensor.pieces])
        if problem is not None:
            found.append(f"{name}: {problem}")
    return found


def _opened(path: Path, shapes: Shapes | None, ignored: Collection[str]) -> Archive:
    try:
        if path.is_dir():
            return _opened_directory(path, shapes, ignored)
        if path.is_file():
            return _opened_file(path, shapes, ignored)
    except OSError as error:
        raise CheckpointError.of(
            "A file of the checkpoint cannot be read.",
            expected="all files that were written together",
            got=f"{error.strerror}: {error.filename}",
            where=str(path),
            fix="copy the missing file beside the others, or check its permissions",
        ) from error
    got = "something that is neither" if os.path.lexists(path) else "nothing at this path"
    raise _unreadable(path, got)


def _shapes_in(shapes: Shapes | str | os.PathLike[str] | None) -> Shapes | None:
    if shapes is None or isinstance(shapes, Shapes):
        return shapes
    path = Path(shapes)
    if path.suffix == ".json" and not path.name.endswith(".index.json"):
        return Shapes.load(path)
    return shapes_of_archive(open_archive(path))


def _opened_directory(path: Path, shapes: Shapes | None, ignored: Collection[str]) -> Archive:
    if is_native(path):
        return read_native(path)
    found = read_client_directory(path, shapes, ignored)
    if found is not None:
        return found
    _require_not_deepspeed(path, _DEEPSPEED)
    if is_dcp(path):
        return read_dcp(path)
    if is_sharded_safetensors(path):
        return read_sharded_safetensors(path)
    if (path / _TORCH_INDEX).exists():
        return read_indexed_torch_files(path / _TORCH_INDEX, ignored)
    ranks = [file for group in rank_files_in(path) for file in group.paths.values()]
    others = [file for file in sorted(path.iterdir()) if file.suffix in _TORCH_SUFFIXES]
    others = [file for file in others if file not in ranks]
    if ranks:
        shapes = _sibling_shapes(path, others) if shapes is None else shapes
        return read_rank_files(
            [require_inside(path, file) for file in ranks], shapes, ignored=ignored
        )
    if (path / INDEX).exists() or any(path.glob("*.safetensors")):
        return read_safetensors(path)
    if len(others) == 1:
        return _opened_file(require_inside(path, others[0]), shapes, ignored)
    _require_not_deepspeed(path, _DEEPSPEED_SCRIPT)
    names = [file.name for file in others] or sorted(file.name for file in path.iterdir())
    raise _unreadable(path, joined(names, 8, ", ") if names else "an empty directory")


def _require_not_deepspeed(path: Path, sign: re.Pattern[str]) -> None:
    """Raise NotRead for a checkpoint of DeepSpeed, whose own code is needed to put its parts
    together. sign: the name of a file that only such a directory has."""
    found = next((name for name in sorted(os.listdir(path)) if sign.fullmatch(name)), None)
    if found is not None:
        raise NotRead.of(
            "Checkpoints of DeepSpeed are not read.",
            expected="the whole state dict that zero_to_fp32.py makes of one",
            got=found,
            where=str(path),
            fix="run DeepSpeed's zero_to_fp32.py, which lies beside the checkpoint, and pass "
            "what it writes",
        )


def _sibling_shapes(path: Path, others: list[Path]) -> Shapes | None:
    """Return the shapes of a whole state dict beside per-rank files, or None."""
    if any(path.glob("*.safetensors")):
        archive = read_safetensors(path)
    elif len(others) == 1 and is_torch_file(others[0]):
        archive = _opened_file(others[0], None, ())
    else:
        return None
    without_ddp(archive)
    return shapes_of_archive(archive)


def _opened_file(path: Path, shapes: Shapes | None, ignored: Collection[str]) -> Archive:
    if path.name == ".metadata" or path.suffix == ".distcp":
        return read_dcp(path.parent)
    if path.name == MANIFEST:
        return read_native(path.parent)
    if path.name.endswith(".bin.index.json"):
        return read_indexed_torch_files(path, ignored)
    if path.suffix in (".safetensors", ".json"):
        return read_safetensors(path)
    if not is_torch_file(path):
        with open(open_file(path), "rb") as file:
            if file.read(9)[8:] == b"{":
                return read_safetensors(path)
    tree = read_torch_file(path, ignored=ignored)
    if any(isinstance(leaf, RankPart) for _, leaf in leaves(tree)):
        return read_rank_files([path], shapes, ignored=ignored)
    return archive_of(path, "torch.save", tree)


def _require_in_files(archive: Archive) -> None:
    """Raise CheckpointError unless every span lies in its file, and files with checksums have
    their length."""
    lengths = {file: _length(file, archive.path) for file in archive.checksums}
    for file, facts in archive.checksums.items():
        if lengths[file] != facts.nbytes:
            raise damaged(file, f"{facts.nbytes} bytes", f"{lengths[file]} bytes")
    for name, tensor in archive.all_tensors():
        for span, stop in spans_of(tensor):
            if span.path not in lengths:
                lengths[span.path] = _length(span.path, archive.path)
            if span.start < 0 or stop > lengths[span.path]:
                raise CheckpointError.of(
                    f"{span.path.name} is truncated, or belongs to another checkpoint.",
                    expected=f"bytes {span.start} to {stop}, of {name}",
                    got=f"a file of {lengths[span.path]} bytes",
                    where=str(span.path),
                    fix="restore the file from an intact copy",
                )


def spans_of(tensor: StoredTensor) -> Iterator[tuple[Span, int]]:
    """Yield where the elements of a tensor and of its copies lie in files, and the byte behind the
    last of each."""
    for piece in (*tensor.pieces, *tensor.copies):
        if isinstance(span := piece.source, Span) and piece.box.numel:
            steps = zip(piece.box.sizes, span.strides, strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            yield span, span.start + (last + 1) * tensor.dtype.itemsize


def _length(file: Path, path: Path) -> int:
    try:
        with open(open_file(file), "rb") as opened:
            return os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise CheckpointError.of(
            f"A file of the checkpoint is missing: {file.name}.",
            expected="all files that were written together",
            got=f"{type(error).__name__}: {error.strerror}",
            where=str(path),
            fix="copy the missing file beside the others",
        ) from error


def _unreadable(path: Path, got: str) -> NotRead:
    return NotRead.of(
        "No checkpoint was recognised.",
        expected="a native, torch.distributed.checkpoint or safetensors checkpoint, torch.save "
        "files (one, or one per rank), or a directory of Accelerate, Lightning or the Trainer",
        got=got,
        where=str(path),
        fix="pass the file, or the directory that holds the files themselves",
    )
