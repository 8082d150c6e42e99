"""Checkpoints of torch.save: a file, the files of an index, or one file per rank, which are found
by the ranks in their names and put together."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..._archive.archive import Content
from ..._archive.reader import Files
from ..._archive.walk import leaves
from ..._text import joined
from .flat_files import FlatParams, Shapes
from .pickles import refusing
from .rank_merge import Merger, disagreement
from .safetensors_files import by_index
from .sharded_records import RankPart
from .torch_save import read_torch_file

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


def read_torch_save(path: Path, shapes: Shapes | None, ignore_class: Collection[str]) -> Content:
    """Return the content of a file of torch.save, or of those that an index lists. A file with
    parts of tensors is the only rank's. Raises CheckpointError and OSError."""

    def values_in(file: Path) -> Any:
        return read_torch_file(file, ignore_class=ignore_class)

    if path.suffix == ".json":
        return Content(path, "torch.save with an index", {"model": by_index(path, values_in)})
    tree = values_in(path)
    if any(isinstance(leaf, RankPart) for _, leaf in leaves(tree)):
        return read_rank_files([path], shapes, ignore_class)
    return Content(path, "torch.save", tree)


def read_rank_files(
    paths: Sequence[Path], shapes: Shapes | None, ignore_class: Collection[str]
) -> Content:
    """Return the values of all ranks as one. Kinds of files become sections; a single file without
    a rank is the only rank's. shapes: see ``FlatParams``. Raises CheckpointError for missing or
    mixed files; OSError."""
    where = paths[0].parent
    groups = rank_groups(paths)
    if len(paths) == 1 and not groups:
        groups = [RankFiles("", {0: paths[0]}, 1)]  # a run of one rank names none
    for _, files, num_ranks in groups:
        missing = [str(rank) for rank in range(num_ranks) if rank not in files]
        if missing:
            got = f"no file of rank {joined(missing, 10, ', ')}"
            raise disagreement(where, "", f"files of {num_ranks} ranks", got)
    num_files = sum(len(group.paths) for group in groups)
    if num_files != len(paths) or len({group.num_ranks for group in groups}) > 1:
        found = ", ".join(sorted(path.name for path in paths)[:8])
        raise disagreement(where, "", "one file per rank, with the rank in its name", found)
    left_out: list[str] = []
    trees: dict[str, Any] = {}
    for stem, files, _ in groups:
        key = stem
        if "optim" in stem.lower():
            key = "optimizer"
        elif not stem or re.search(r"model|weights|fsdp", stem.lower()):
            key = "model"
        with refusing(where):
            merged = _merged(files, shapes, ignore_class, where, left_out)
        trees[stem if key in trees else key] = merged
    tree = trees if len(trees) > 1 else next(iter(trees.values()))
    return Content(where if paths[1:] else paths[0], _KIND, tree, groups[0].num_ranks, left_out)


def _merged(
    paths: dict[int, Path],
    shapes: Shapes | None,
    ignore_class: Collection[str],
    where: Path,
    left_out: list[str],
) -> Any:
    """Return the values of all ranks as one."""
    trees = {rank: read_torch_file(path, ignore_class=ignore_class) for rank, path in paths.items()}
    with Files() as files:
        merger, flat_params = Merger(where, files), FlatParams(shapes, where, files)
        for tree in trees.values():
            flat_params.take_views(tree)
        merged = merger.merge(trees)
        flat_params.unflatten(merged)
    for path, got in merger.differing.items():
        if got:
            raise disagreement(where, path, "the same shape on all ranks", got)
        left_out.append(f"{path[:-1]}: other values on each rank; the first rank's are kept")
    left_out += merger.left_out + flat_params.left_out
    return merged
