"""Checkpoints of torch.save: a file, the files of an index, or one file per rank, which are found
by the ranks in their names and put together: parts beside one another, and replicas as copies."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..._archive.archive import Archive, StoredTensor, of_parts
from ..._archive.reader import Files, sample
from ..._archive.walk import leaves
from ..._text import joined
from ...errors import CheckpointError
from .flat_files import FlatParams
from .pickles import refusing
from .safetensors_files import by_index
from .sharded_records import RankPart
from .torch_save import ReadOptions, read_torch_file

_KIND = "per-rank torch.save files"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_NAMED = re.compile(
    r"(?P<stem>.*?)[._-]*(?:world_?size[_-]?(?P<world>\d{1,6})[._-]+)?(?<![a-z])(?:rank|shard)[_-]?"
    r"(?P<rank>\d{1,6})(?:[_-]?of[_-]?(?P<of>\d{1,6}))?(?P<rest>(?:[._-].*)?)",
    re.IGNORECASE,
)


class RankFiles(NamedTuple):
    """The files of all ranks of one kind, such as the model's."""

    stem: str  # of their names, without the numbers
    paths: dict[int, Path]  # by rank, in order
    num_ranks: int


def rank_groups(paths: Sequence[Path]) -> list[RankFiles]:
    """Return the files that have ranks in their names, by the rest of the names."""
    groups: dict[tuple[str, str | None, str], dict[int, Path]] = {}
    for path in sorted(paths):
        match = _NAMED.fullmatch(path.stem)
        if match is None or path.name[0] == "." or path.suffix not in (*TORCH_SUFFIXES, ""):
            continue
        name = f"{match['stem']}{match['rest']}".strip("._-")
        world_size = match["world"] or match["of"]
        groups.setdefault((name, world_size, path.suffix), {}).setdefault(int(match["rank"]), path)
    return [
        RankFiles(name, dict(sorted(ranks.items())), int(world_size or 0) or max(ranks) + 1)
        for (name, world_size, _), ranks in groups.items()
    ]


def read_torch_save(path: Path, options: ReadOptions) -> Archive:
    """Return the content of a file of torch.save, or of those that an index lists. A file with
    parts of tensors is the only rank's. Raises CheckpointError and OSError."""

    if path.suffix == ".json":
        model = by_index(path, lambda file: read_torch_file(file, options.ignore_class))
        return Archive(path, "torch.save with an index", {}, as_saved={"model": model})
    tree = read_torch_file(path, options.ignore_class)
    if any(isinstance(leaf, RankPart) for _, leaf in leaves(tree)):
        return read_rank_files([path], options)
    return Archive(path, "torch.save", {}, as_saved=tree)


def read_rank_files(paths: Sequence[Path], options: ReadOptions) -> Archive:
    """Return the values of all ranks as one. Kinds of files become sections; a single file without
    a rank is the only rank's. Raises CheckpointError for missing or mixed files; OSError."""
    where = paths[0].parent
    groups = rank_groups(paths)
    if len(paths) == 1 and not groups:
        groups = [RankFiles("", {0: paths[0]}, 1)]  # a run of one rank names none
    for _, files, num_ranks in groups:
        missing = [str(rank) for rank in range(num_ranks) if rank not in files]
        if missing:
            got = f"no file of rank {joined(missing, 10, ', ')}"
            raise _disagreement(where, "", f"files of {num_ranks} ranks", got)
    num_files = sum(len(group.paths) for group in groups)
    if num_files != len(paths) or len({group.num_ranks for group in groups}) > 1:
        found = ", ".join(sorted(path.name for path in paths)[:8])
        raise _disagreement(where, "", "one file per rank, with the rank in its name", found)
    left_out: list[str] = []
    trees: dict[str, Any] = {}
    for stem, files, _ in groups:
        key = stem
        if "optim" in stem.lower():
            key = "optimizer"
        elif not stem or re.search(r"model|weights|fsdp", stem.lower()):
            key = "model"
        with refusing(where):
            merged = _merged(files, options, where, left_out)
        trees[stem if key in trees else key] = merged
    tree = trees if len(trees) > 1 else next(iter(trees.values()))
    path, num_ranks = where if paths[1:] else paths[0], groups[0].num_ranks
    return Archive(path, _KIND, {}, as_saved=tree, world_size=num_ranks, left_out=left_out)


def _merged(paths: dict[int, Path], options: ReadOptions, where: Path, left_out: list[str]) -> Any:
    """Return the values of all ranks as one."""
    trees = {rank: read_torch_file(path, options.ignore_class) for rank, path in paths.items()}
    flat_params = FlatParams(options.shapes, where)
    for tree in trees.values():
        flat_params.take_views(tree)
    with Files() as files:
        merger = _Merger(where, files)
        merged = merger.merge(trees)
    flat_params.unflatten(merged)
    for path, got in merger.differing.items():
        if got:
            raise _disagreement(where, path, "the same shape on all ranks", got)
        left_out.append(f"{path[:-1]}: other values on each rank; the first rank's are kept")
    left_out += merger.left_out + flat_params.left_out
    return merged


# -- the values of all ranks as one

_NESTED = (dict, list, tuple, StoredTensor, RankPart)


class _Merger:
    """Merges nested values of ranks. differing: by path ("model/w/"), plain tensors of which the
    first is taken, and how their shapes differ."""

    def __init__(self, where: Path, files: Files) -> None:
        self.differing: dict[str, str] = {}
        self.left_out: list[str] = []
        self._where, self._files = where, files

    def merge(self, values: Mapping[int, Any], path: str = "") -> Any:
        """Return the merged value, in the containers of the first rank. Raises CheckpointError."""
        first = next(iter(values.values()))
        kinds = {type(value) for value in values.values()}
        if kinds & {RankPart, StoredTensor}:
            if len(kinds) > 1:
                found = " and ".join(sorted(kind.__name__ for kind in kinds))
                raise _disagreement(self._where, path, "values of one kind on all ranks", found)
            return self._tensor(values, path)
        alike = {rank: value for rank, value in values.items() if type(value) is type(first)}
        if isinstance(first, dict):
            return self._dict(alike, path)
        if not isinstance(first, (list, tuple)) or not any(isinstance(x, _NESTED) for x in first):
            return first
        alike = {rank: value for rank, value in alike.items() if len(value) == len(first)}
        return type(first)(
            self.merge({rank: value[at] for rank, value in alike.items()}, f"{path}{at}/")
            for at in range(len(first))
        )

    def _dict(self, values: Mapping[int, dict[Any, Any]], path: str) -> dict[Any, Any]:
        before = len(self.differing)
        merged = {
            key: self.merge(
                {rank: value[key] for rank, value in values.items() if key in value},
                f"{path}{key}/",
            )
            for key in dict.fromkeys(key for value in values.values() for key in value)
        }
        inside = [*self.differing][before:]
        is_optimizer = merged.keys() >= {"state", "param_groups"}
        if not is_optimizer or not any(name.startswith(f"{path}state/") for name in inside):
            return merged
        # The state of FSDP1's flat parameters: nothing describes it.
        for name in inside:
            del self.differing[name]
        self.left_out.append(
            f"{path[:-1] or 'optimizer'}: each rank holds its own values, without shapes or "
            "names; save FSDP.optim_state_dict(model, optimizer) instead"
        )
        return {}

    def _tensor(self, values: Mapping[int, Any], path: str) -> StoredTensor:
        """Return the tensor that ranks have parts of, or each has."""
        first = next(iter(values.values()))
        facts = dict.fromkeys(f"shape {[*x.shape]} of {x.dtype}" for x in values.values())
        problem = " and ".join(facts) if len(facts) > 1 else ""
        if isinstance(first, StoredTensor) and (
            problem or len({sample(value, self._files) for value in values.values()}) > 1
        ):
            self.differing[path] = problem
            return first
        parts = (
            dataclasses.replace(piece, holder=rank)
            for rank, value in values.items()
            for piece in value.pieces
        )
        try:
            if problem:
                raise ValueError(problem)
            return of_parts("", first.dtype, first.shape, parts)
        except ValueError as error:
            expected = "parts that make up one tensor"
            raise _disagreement(self._where, path, expected, str(error)) from error


def _disagreement(where: Path, path: str, expected: str, got: str) -> CheckpointError:
    """Return the error for files that do not belong together."""
    return CheckpointError.of(
        "The files of the ranks do not belong together.",
        expected=expected,
        got=f"{path[:-1]}: {got}" if path else got,
        where=str(where),
        fix="pass the files of all ranks of one run and one step",
    )
