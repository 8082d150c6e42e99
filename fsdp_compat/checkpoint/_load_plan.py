"""The plan of a load: which bytes a rank reads from a native checkpoint, and what they replace.

A `LoadPlan` compares names and shapes with the model's, and requests every element of this rank's
shards from the ranks' files. Optimizer states are planned in `_load_optimizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._engine.state_store import store_of
from .._state.model_units import units_of
from .._state.unmanaged import load_unmanaged, unmanaged_state
from ..errors import CheckpointError, explain
from ._load_optimizer import OptimizerLoadPlan
from ._named_groups import NamedGroup, named_groups, names_in
from ._part_source import PartSource
from ._rank_files import RankFiles
from ._ranks import Ranks
from ._snapshot import warn_of_left_out
from ._texts import joined
from ._values import decode

__all__ = ["LoadPlan"]


class LoadPlan:
    """The reads of a rank, and the changes made with them. Constructing it changes nothing;
    ``apply`` does."""

    def __init__(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks
    ) -> None:
        """Raises CheckpointError for a checkpoint that cannot be loaded into the model and the
        optimizer."""
        self.files = RankFiles(path)
        common = self.files.manifest.common
        self._model, self._groups = model, named_groups(units_of(model))
        self._others = {
            name: decode(value, name, lambda saved: self.files.request_tensor(common, saved))
            for name, value in self.files.head(common).others.items()
        }
        self._require_names_and_shapes()
        for named in self._groups:
            self._request_shard(named)
        self._optimizer_plan = (
            None
            if optimizer is None
            else OptimizerLoadPlan(self.files, model, optimizer, self._groups)
        )
        number = ranks.number if len(self.files.manifest.files) == ranks.count else 0
        self._extra = decode(
            self.files.head(number).extra,
            "extra",
            lambda saved: self.files.request_tensor(number, saved),
        )

    def apply(self, shown: bool) -> Any:
        """Change the model and the optimizer; return ``extra``. shown: draw a progress bar."""
        with torch.no_grad():
            if self._optimizer_plan is not None:
                self._optimizer_plan.clear()
            self.files.read(shown)
        load_unmanaged(self._model, self._others)
        if self._optimizer_plan is not None:
            self._optimizer_plan.apply()
            warn_of_left_out(
                self.files.left_out(), "were not saved; the optimizer keeps its own", stacklevel=4
            )
        return self._extra

    def _require_names_and_shapes(self) -> None:
        """Raise CheckpointError unless the checkpoint holds exactly the model's parameters and
        buffers, in their shapes."""
        located, saved = self.files.located, self._others
        others = unmanaged_state(self._model)
        wrong = self._wrong_parameters()
        known = {*names_in(self._groups), *others}
        wrong += [
            f"missing: {name}" for name in others if name not in saved and name not in located
        ]
        wrong += [f"not in the model: {name}" for name in (*located, *saved) if name not in known]
        for name, value in others.items():
            if name in saved and isinstance(value, torch.Tensor):
                found = saved[name]
                if not isinstance(found, torch.Tensor):
                    wrong.append(f"{name}: not a tensor in the checkpoint")
                elif found.shape != value.shape:
                    wrong.append(_wrong_shape(name, found.shape, value.shape))
        if wrong:
            raise CheckpointError(
                explain(
                    "The checkpoint does not fit the model.",
                    expected="the names and shapes of the model's parameters and buffers",
                    got=joined(wrong, 20, "; "),
                    where=str(self.files.path),
                    fix="build the model that was saved; to use part of a checkpoint, load it into "
                    "that model and take the rest from its state_dict()",
                )
            )

    def _wrong_parameters(self) -> list[str]:
        """Return what is wrong with the names and shapes of the managed parameters."""
        located, wrong = self.files.located, []
        for named in self._groups:
            store = store_of(named.group)
            for index in named.params:
                names = named.names(index)
                found = next((located[name] for name in names if name in located), None)
                if found is None:
                    wrong.append(f"missing: {names[0]}")
                    continue
                group, saved_index = found
                shape = group.layout.params[saved_index].shape
                if shape != store.shape(index):
                    wrong.append(_wrong_shape(names[0], shape, store.shape(index)))
        return wrong

    def _request_shard(self, named: NamedGroup) -> None:
        store = store_of(named.group)
        for index in named.params:
            source = PartSource.find(self.files, named, index)
            assert source is not None, f"{named.names(index)[0]} was checked before"
            target = store.local_part(index)
            source.request(self.files, source.group.name, source.group.dtype, target)


def _wrong_shape(name: str, saved: tuple[int, ...], own: tuple[int, ...]) -> str:
    return f"{name}: shape {list(saved)} in the checkpoint, {list(own)} in the model"
