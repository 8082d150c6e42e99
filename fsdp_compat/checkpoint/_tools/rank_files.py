"""Checkpoints of one torch.save file per rank: found by the numbers in their names, and put
together."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .archive import Archive
from .flat_files import holds_flat_params, unflattened
from .merging import Merger, disagreement
from .pickles import refused
from .reading import Files
from .shapes import Shapes
from .torch_save import read_torch_file
from .tree import archive_of

_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".tar", ""})
_NAMED = (
    re.compile(
        r"(?P<stem>.*?)[._-]*world_?size[_-]?(?P<world>\d+)[._-]+rank[_-]?(?P<rank>\d+)(?P<rest>)",
        re.IGNORECASE,
    ),
    re.compile(
        r"(?P<stem>.*?)[._-]*(?<![a-z])rank[_-]?(?P<rank>\d+)(?:[_-]?of[_-]?(?P<world>\d+))?"
        r"(?P<rest>(?:[._-].*)?)",
        re.IGNORECASE,
    ),
    re.compile(
        r"(?P<stem>.*?)[._-]*(?<![a-z])shard[_-]?(?P<rank>\d+)(?:[_-]?of[_-]?(?P<world>\d+))?"
        r"(?P<rest>)",
        re.IGNORECASE,
    ),
)
_NUMBERED = re.compile(r"(?P<stem>(?:.*[^0-9])?)(?P<rank>\d+)")
_NOT_RANKS = re.compile(r".*-\d+-of-\d+")  # parts of one state dict, as the Hugging Face hub has
_MAX_RANKS = 1_000_000


@dataclasses.dataclass(frozen=True)
class RankFiles:
    """The files of all ranks of one kind, such as the model's."""

    stem: str  # of their names, without the numbers
    paths: dict[int, Path]  # by rank, in order
    world_size: int | None  # if the names say it
    is_named: bool  # whether the names say that the numbers are ranks

    @property
    def missing(self) -> list[int]:
        """The ranks without a file, at most ten."""
        num = self.world_size or max(self.paths) + 1
        return [rank for rank in range(min(num, _MAX_RANKS)) if rank not in self.paths][:10]

    @property
    def key(self) -> str:
        """What the files hold: "model", "optimizer", or the stem."""
        stem = self.stem.lower()
        if "optim" in stem:
            return "optimizer"
        return "model" if not stem or re.search(r"model|weights|fsdp", stem) else self.stem


def rank_files_in(directory: Path) -> list[RankFiles]:
    """Return the per-rank files in a directory, by what they hold. Files whose names have only a
    number count if there are several, from 0 on without a gap. Raises OSError."""
    with os.scandir(directory) as entries:
        paths = [directory / entry.name for entry in entries if entry.is_file()]
    return [
        group
        for group in rank_groups(paths)
        if group.is_named or (len(group.paths) > 1 and not group.missing)
    ]


def rank_groups(paths: Sequence[Path]) -> list[RankFiles]:
    """Return the files that have numbers in their names, by the rest of the names."""
    groups: dict[tuple[str, int | None, bool, str], dict[int, Path]] = {}
    for path in sorted(paths):
        if path.suffix not in _SUFFIXES or path.name.startswith("."):
            continue
        stem = path.stem
        match = next((found for each in _NAMED if (found := each.fullmatch(stem))), None)
        is_named = match is not None
        match = match or _NUMBERED.fullmatch(stem)
        if match is None or _NOT_RANKS.fullmatch(stem) or len(match["rank"]) > 6:
            continue
        parts = match.groupdict()
        world = int(parts["world"]) if parts.get("world") else None
        name = f"{parts['stem']}{parts.get('rest') or ''}".strip("._-")
        ranks = groups.setdefault((name, world, is_named, path.suffix), {})
        ranks.setdefault(int(parts["rank"]), path)
    return [
        RankFiles(name, dict(sorted(ranks.items())), world, is_named)
        for (name, world, is_named, _), ranks in groups.items()
    ]


def read_rank_files(
    paths: Sequence[Path], shapes: Shapes | None = None, *, ignored: Collection[str] = ()
) -> Archive:
    """Return the archive that the files of all ranks make up: the model's, the optimizer's and
    others, by their names. A single file without a rank in its name is that of the only rank.
    shapes: for flat parameters, whose files hold none. ignored: as for
    ``torch_save.load``.

    Raises CheckpointError if ranks are missing, or files do not belong together; OSError.
    """
    groups = rank_groups(paths)
    where = paths[0].parent
    if len(paths) == 1 and not any(group.is_named for group in groups):
        groups = [RankFiles("", {0: paths[0]}, 1, True)]  # a run of one rank names none
    sizes = {group.world_size or len(group.paths) for group in groups}
    if not groups or sum(len(group.paths) for group in groups) != len(paths) or len(sizes) > 1:
        found = ", ".join(sorted(path.name for path in paths)[:8])
        raise disagreement(where, "", "one file per rank, with the rank in its name", found)
    for group in groups:
        if group.missing:
            raise disagreement(
                where,
                "",
                f"files of {group.world_size or max(group.paths) + 1} ranks",
                f"no file of rank {', '.join(map(str, group.missing))}",
            )
    left_out: list[str] = []
    trees = {}
    with Files() as files:
        for group in groups:
            merger = Merger(where, files)
            try:
                tree = _tree(group, shapes, ignored, merger, left_out)
            except (CheckpointError, OSError):
                raise
            except Exception as error:  # whatever wrong values raise
                raise refused(where, error) from error
            if not group.is_named and len(group.paths) > 1 and not merger.num_sharded:
                raise _not_ranks(group, where)
            key = group.key if group.key not in trees else group.stem
            trees[key] = tree
    tree = trees if len(trees) > 1 else next(iter(trees.values()))
    archive = archive_of(
        where if len(paths) > 1 else paths[0],
        "per-rank torch.save files",
        tree,
        world_size=sizes.pop(),
        left_out=left_out,
    )
    if shapes is not None:
        _follow(archive, shapes)
    return archive


def _follow(archive: Archive, shapes: Shapes) -> None:
    """Put the tensors in the order of the model, and enter names of tied ones that files lack."""
    order = {name: number for number, name in enumerate(shapes.entries)}
    names = sorted(archive.tensors, key=lambda name: order.get(name, len(order)))
    archive.tensors = {name: archive.tensors[name] for name in names}
    for name, first in shapes.ties.items():
        if first in archive.tensors and name not in archive.tensors:
            archive.aliases.setdefault(name, first)


def _tree(
    group: RankFiles,
    shapes: Shapes | None,
    ignored: Collection[str],
    merger: Merger,
    left_out: list[str],
) -> Any:
    trees = {rank: read_torch_file(path, ignored=ignored) for rank, path in group.paths.items()}
    where = next(iter(group.paths.values())).parent
    if all(holds_flat_params(tree) for tree in trees.values()):
        trees = unflattened(trees, shapes, where)
    tree = merger.merge(trees)
    _drop_local_optimizers(tree, (), merger, left_out)
    for path, got in merger.conflicts.items():
        raise disagreement(where, "/".join(path), "the same shape on all ranks", got)
    for path in merger.differing:
        left_out.append(f"{'/'.join(path)}: other values on each rank; the first rank's are kept")
    return tree


def _drop_local_optimizers(
    tree: Any, path: tuple[str, ...], merger: Merger, left_out: list[str]
) -> None:
    """Remove optimizer state in which each rank has plain values of its own: those of FSDP1's flat
    parameters, which nothing describes."""
    if not isinstance(tree, dict) or len(path) > 3:
        return
    if "state" in tree and "param_groups" in tree:
        inside = (*path, "state")
        local = [
            each for each in (*merger.differing, *merger.conflicts) if each[: len(inside)] == inside
        ]
        if local:
            for each in local:
                merger.differing.pop(each, None)
                merger.conflicts.pop(each, None)
            tree.clear()
            left_out.append(
                f"{'/'.join(path) or 'optimizer'}: each rank holds values of its own, without "
                "shapes or names; save FSDP.optim_state_dict(model, optimizer) instead"
            )
        return
    for key, value in tree.items():
        _drop_local_optimizers(value, (*path, str(key)), merger, left_out)


def _not_ranks(group: RankFiles, where: Path) -> CheckpointError:
    names = ", ".join(path.name for path in list(group.paths.values())[:4])
    return CheckpointError.of(
        "These numbered files are not one checkpoint: none of them holds a shard.",
        expected="one file per rank with DTensors or ShardedTensors, or the word 'rank'",
        got=names,
        where=str(where),
        fix="pass one of the files, if each is a checkpoint of its own",
    )
