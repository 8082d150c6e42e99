"""The plan of a load: which bytes a rank reads from a native checkpoint, and what they replace.

A `LoadPlan` compares names, shapes and dtypes with the model's, and requests the elements of this
rank's shards from the ranks' files. Optimizer states are planned in `_load_optimizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._engine.state_store import store_of
from .._state.units import units_of
from .._state.unmanaged import load_unmanaged, unmanaged_state
from ..errors import CheckpointError
from ._load_optimizer import OptimizerLoadPlan
from ._manifest import SavedParameter
from ._named_groups import NamedGroup, named_groups, names_in
from ._part_source import OwnPart, PartSource, TensorSource
from ._rank_files import RankFiles
from ._ranks import Ranks
from ._report import LoadReport, nothing_fits, problems_in
from ._snapshot import warn_of_left_out
from ._texts import joined
from ._values import decode, tensor_in


class LoadPlan:
    """The reads of a rank, and the changes made with them. Constructing it changes nothing;
    ``apply`` does.

    A tensor is taken from wherever the checkpoint has it: its writer may not have known which
    names are parameters of units, and which are buffers or unmanaged parameters.
    """

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        ranks: Ranks,
        strict: bool,
    ) -> None:
        """Raises CheckpointError for a checkpoint that cannot be loaded into the model and the
        optimizer."""
        self.files, self.report = RankFiles(path), LoadReport()
        self._model, self._groups = model, named_groups(units_of(model))
        self._common = self.files.manifest.common
        self._saved_others = self.files.head(self._common).others  # encoded
        # By group and index of the parameter, as far as they are taken.
        self._sources: dict[tuple[int, int], PartSource | TensorSource] = {}
        self._others: dict[str, Any] = {}  # what is taken of buffers and unmanaged parameters
        self._find_managed()
        self._find_others()
        self._require_fit(strict)
        self._optimizer_plan = (
            None
            if optimizer is None
            else OptimizerLoadPlan(
                self.files, model, optimizer, self._groups, self._sources, self.report, strict
            )
        )
        number = ranks.number if len(self.files.manifest.files) == ranks.count else 0
        if self.files.manifest.shares_extra:
            number = self._common
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

    def _find_managed(self) -> None:
        """Request the parameters of units."""
        for named in self._groups:
            store = store_of(named.group)
            for index in named.params:
                names = named.names(index)
                source = self._source(names, named, index)
                if source is not None:
                    self._sources[id(named.group), index] = source
                    source.request(self.files, store.local_part(index))

    def _source(
        self, names: tuple[str, ...], named: NamedGroup, index: int
    ) -> PartSource | TensorSource | None:
        """Return where the checkpoint has a parameter; None, and a line in the report, if it does
        not fit."""
        store = store_of(named.group)
        shape = store.shape(index)
        saved = self._parameter(names)
        other = next((name for name in names if name in self._saved_others), None)
        if saved is not None:
            if self._fits(names[0], saved.shape, shape, saved.dtype, store.dtype):
                return PartSource.find(self.files, saved, OwnPart.of(named, index))
        elif other is not None:
            if (found := tensor_in(self._saved_others[other])) is None:
                self.report.mismatched[names[0]] = "not a tensor in the checkpoint"
            elif self._fits(names[0], found[2], shape, found[1], store.dtype):
                tensor, dtype, _ = found
                own = OwnPart.of(named, index)
                return TensorSource.find(self._common, other, tensor, dtype, own)
        else:
            self.report.missing.append(names[0])
        return None

    def _find_others(self) -> None:
        """Request what is not a parameter of a unit."""
        others = unmanaged_state(self._model)
        for name, value in others.items():
            saved = self._parameter((name,))
            if name in self._saved_others:
                encoded = self._saved_others[name]
                if isinstance(value, torch.Tensor):
                    if (found := tensor_in(encoded)) is None:
                        self.report.mismatched[name] = "not a tensor in the checkpoint"
                        continue
                    if not self._fits(name, found[2], tuple(value.shape), found[1], value.dtype):
                        continue
                self._others[name] = decode(
                    encoded,
                    name,
                    lambda tensor: self.files.request_tensor(self._common, tensor),
                )
            elif saved is None:
                self.report.missing.append(name)
            elif not isinstance(value, torch.Tensor):
                self.report.mismatched[name] = "a tensor in the checkpoint"
            elif self._fits(name, saved.shape, tuple(value.shape), saved.dtype, value.dtype):
                whole = torch.empty(saved.shape, dtype=saved.dtype)
                source = PartSource.find(self.files, saved, OwnPart.of_whole(saved.shape))
                source.request(self.files, whole.view(-1))
                self._others[name] = whole
        known = {*names_in(self._groups), *others}
        self.report.unexpected += [
            name for name in (*self.files.parameters, *self._saved_others) if name not in known
        ]

    def _parameter(self, names: tuple[str, ...]) -> SavedParameter | None:
        found = (self.files.parameters.get(name) for name in names)
        return next((saved for saved in found if saved is not None), None)

    def _fits(
        self,
        name: str,
        saved: tuple[int, ...],
        own: tuple[int, ...],
        saved_dtype: torch.dtype,
        own_dtype: torch.dtype,
    ) -> bool:
        """Return whether the shapes match and no imaginary part or fraction is lost, and report it
        if not."""
        if saved != own:
            self.report.mismatched[name] = (
                f"shape {list(saved)} in the checkpoint, {list(own)} in the model"
            )
        elif not torch.can_cast(saved_dtype, own_dtype):
            self.report.mismatched[name] = (
                f"{saved_dtype} in the checkpoint, {own_dtype} in the model"
            )
        return name not in self.report.mismatched

    def _require_fit(self, strict: bool) -> None:
        """Raise CheckpointError unless the checkpoint holds exactly the model's parameters and
        buffers, in their shapes and kinds of dtype; not strict: unless it holds some of them."""
        if strict and (wrong := problems_in(self.report)):
            raise CheckpointError.of(
                "The checkpoint does not fit the model.",
                expected="the names and shapes of the model's parameters and buffers, and "
                "dtypes that convert to theirs",
                got=joined(wrong, 20, "; "),
                where=str(self.files.path),
                fix="build the model that was saved, or pass strict=False to load what fits",
            )
        if problems_in(self.report) and not self._sources and not self._others:
            raise nothing_fits(self.files.path, self.report)
