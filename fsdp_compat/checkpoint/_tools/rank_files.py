"""Checkpoints of torch.save: a file, the files of an index, or one file per rank, which are found
by the ranks in their names and put together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from .archive import Content
from .flat_files import FlatParams, Shapes
from .pickles import refusing
from .rank_merge import Merger, disagreement
from .reader import Files
from .safetensors_files import by_index
from .sharded_records import RankPart
from .torch_save import read_torch_file
from .walk import leaves

_KIND = "per-rank torch.save files"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_NAMED = re.compile(
    r"(?P<stem>.*?)[._-]*(?:world_?size[_-]?(?P<world>\d{1,6})[._-]+)?(?<![a-z])(?:rank|shard)[_-]?"
    r"(?P<rank>\d{1,6})(?:[_-]?of[_-]?(?P<of>\d{1,6}))?(?P<rest>(?:[._-].*)?)",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class RankFiles:
    """The files of all ranks of one kind, such as the model's."""

    stem: str  # of their names, without the numbers
    paths: dict[int, Path]  # by rank, in order
    world_size: int | None  # if the names say it

    @property
    def num_ranks(self) -> int:
        return self.world_size or max(self.paths) + 1

    @property
    def missing(self) -> list[int]:
        """The ranks without a file, at most ten."""
        return [rank for rank in range(self.num_ranks) if rank not in self.paths][:10]

    @property
    def key(self) -> str:
        """What the files hold: "model", "optimizer", or the stem."""
        stem = self.stem.lower()
        if "optim" in stem:
            return "optimizer"
        return "model" if not stem or re.search(r"model|weights|fsdp", stem) else self.stem


def rank_groups(paths: Sequence[Path]) -> list[RankFiles]:
    """Return the files that have ranks in their names, by the rest of the names."""
    groups: dict[tuple[str, int | None, str], dict[int, Path]] = {}
    for path in sorted(paths):
        match = _NAMED.fullmatch(path.stem)
        is_other = path.name.startswith(".") or path.suffix not in (*TORCH_SUFFIXES, "")
        if match is None or is_other:
            continue
        world = match["world"] or match["of"]
        name = f"{match['stem']}{match['rest']}".strip("._-")
        key = (name, int(world) if world else None, path.suffix)
        groups.setdefault(key, {}).setdefault(int(match["rank"]), path)
    return [
        RankFiles(name, dict(sorted(ranks.items())), world)
        for (name, world, _), ranks in groups.items()
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
    groups = _complete_groups(paths, where)
    left_out: list[str] = []
    trees: dict[str, Any] = {}
    for group in groups:
        key = group.key if group.key not in trees else group.stem
        with refusing(where):
            trees[key] = _merged(group, shapes, ignore_class, where, left_out)
    tree = trees if len(trees) > 1 else next(iter(trees.values()))
    return Content(where if paths[1:] else paths[0], _KIND, tree, groups[0].num_ranks, left_out)


def _complete_groups(paths: Sequence[Path], where: Path) -> list[RankFiles]:
    """Return the files by what they hold, each of the same number of ranks."""
    groups = rank_groups(paths)
    if len(paths) == 1 and not groups:
        groups = [RankFiles("", {0: paths[0]}, 1)]  # a run of one rank names none
    for group in groups:
        if group.missing:
            got = f"no file of rank {', '.join(map(str, group.missing))}"
            raise disagreement(where, "", f"files of {group.num_ranks} ranks", got)
    num_files = sum(len(group.paths) for group in groups)
    if num_files != len(paths) or len({group.num_ranks for group in groups}) > 1:
        found = ", ".join(sorted(path.name for path in paths)[:8])
        raise disagreement(where, "", "one file per rank, with the rank in its name", found)
    return groups


def _merged(
    group: RankFiles,
    shapes: Shapes | None,
    ignore_class: Collection[str],
    where: Path,
    left_out: list[str],
) -> Any:
    """Return the values of all ranks as one."""
    trees = {
        rank: read_torch_file(path, ignore_class=ignore_class) for rank, path in group.paths.items()
    }
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
