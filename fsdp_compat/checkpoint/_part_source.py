"""Where this rank's part of a parameter lies in a checkpoint that any number of ranks wrote."""

from __future__ import annotations

import dataclasses

import torch

from .._engine.state_store import store_of
from .._layout.spec import Interval
from .._layout.transfer import runs_of_part
from ._manifest import FlatGroup
from ._named_groups import NamedGroup
from ._rank_files import RankFiles

__all__ = ["PartSource", "SourceRun"]


@dataclasses.dataclass(frozen=True)
class SourceRun:
    """Consecutive elements of a part, in one file."""

    file: int
    start_in_tensor: int  # in the file's tensor
    start_in_part: int
    numel: int


@dataclasses.dataclass(frozen=True)
class PartSource:
    """The runs that make up this rank's part of one parameter."""

    group: FlatGroup
    index: int  # of the parameter in the group
    runs: tuple[SourceRun, ...]
    head_file: int  # the file whose head says which states and scalars the parameter has

    @staticmethod
    def find(files: RankFiles, named: NamedGroup, index: int) -> PartSource | None:
        """Return the source of this rank's part; None if the checkpoint has the parameter in no
        group."""
        located, store = files.located, store_of(named.group)
        found = next((located[name] for name in named.names(index) if name in located), None)
        if found is None:
            return None
        group, saved_index = found
        axis = files.manifest.axes[group.axis]
        part = store.part(index, store.rank)
        runs = tuple(
            SourceRun(axis[run.rank], run.in_shard.start, run.start, run.in_shard.numel)
            for run in runs_of_part(group.layout, saved_index, part)
        )
        head_file = runs[0].file if runs else axis[store.rank * len(axis) // store.ranks]
        if not runs and not store.is_guarded:
            # A DTensor has states on ranks without rows too; a rank with rows has saved them.
            whole = Interval(0, group.layout.params[saved_index].numel)
            first = next(iter(runs_of_part(group.layout, saved_index, whole)), None)
            head_file = head_file if first is None else axis[first.rank]
        return PartSource(group, saved_index, runs, head_file)

    def request(
        self, files: RankFiles, name: str, dtype: torch.dtype, target: torch.Tensor
    ) -> None:
        """Request the part of the tensors called ``name``. target: 1-D, of the part's length."""
        for run in self.runs:
            stop = run.start_in_part + run.numel
            files.request(
                run.file, name, dtype, run.start_in_tensor, target[run.start_in_part : stop]
            )
