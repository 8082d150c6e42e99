"""The plan of a load: what a rank reads from a checkpoint, what it replaces, and what it leaves.

A `LoadPlan` compares names, shapes and dtypes with the model's, and plans to read this rank's part
of each tensor. Optimizer states are planned in `_load_optimizer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._state.model_loading import load_unmanaged
from .._state.model_state import unmanaged_state
from .._state.units import units_of
from ..errors import CheckpointError
from ._load_optimizer import OptimizerLoadPlan
from ._named_groups import HeldPart, managed_parts, named_groups, of_whole, unmanaged_tensors
from ._ranks import Ranks
from ._report import LoadReport, problems_in
from ._snapshot import warn_of_left_out
from ._source import Source
from ._texts import joined
from ._tools.archive import StoredTensor


class LoadPlan:
    """The reads of a rank, and the changes made with them. Constructing it changes nothing;
    ``apply`` does.

    A tensor is taken from wherever the checkpoint has it: its writer may not have known which
    names are parameters of units, and which are buffers or unmanaged parameters.
    """

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        ranks: Ranks,
        strict: bool,
        through: torch.dtype | None = None,
    ) -> None:
        """Raises CheckpointError for a checkpoint that cannot be loaded into the model and the
        optimizer. through: round floating-point values of the model to this dtype."""
        self.source, self.report = source, LoadReport()
        self._model, self._through = model, through
        self._others: dict[str, Any] = {}  # what is taken of buffers and unmanaged parameters
        groups = named_groups(units_of(model))
        parts = list(managed_parts(groups))
        taken = [held for held in parts if self._takes(held)]
        for held in taken:
            source.plan(source.value(self._name(held.names)), held, through)
        others = unmanaged_state(model)
        self._plan_others(others)
        known = {*others, *(name for held in parts for name in held.names)}
        self.report.unexpected += [name for name in source.names if name not in known]
        self._require_fit(strict, bool(taken or self._others))
        self._optimizer_plan = (
            None
            if optimizer is None
            else OptimizerLoadPlan(source, model, optimizer, groups, taken, self.report, strict)
        )
        self._extra = source.planned(source.extra(ranks))

    def apply(self, shown: bool) -> Any:
        """Change the model and the optimizer; return ``extra``. shown: draw a progress bar."""
        with torch.no_grad():
            self.source.read(shown)
        load_unmanaged(self._model, self._others)
        if self._optimizer_plan is not None:
            self._optimizer_plan.apply()
            warn_of_left_out(
                self.source.left_out(), "were not saved; the optimizer keeps its own", stacklevel=4
            )
        return self._extra

    def _name(self, names: tuple[str, ...]) -> str:
        """Return the name under which the checkpoint has a tensor, or the first of its names."""
        return next((name for name in names if name in self.source.names), names[0])

    def _takes(self, held: HeldPart) -> bool:
        """Return whether the checkpoint has a tensor and it fits; report it if not."""
        name = self._name(held.names)
        if name not in self.source.names:
            self.report.missing.append(held.names[0])
            return False
        if how := _mismatch(self.source.value(name), held):
            self.report.mismatched[name] = how
        return not how

    def _plan_others(self, others: dict[str, Any]) -> None:
        """Plan what is not a parameter of a unit. A tensor with several names is in the checkpoint
        under one of them, or under all."""
        for held in unmanaged_tensors(self._model, is_written_here=False):
            if self._takes(held):
                # The state dict may hold a copy in another dtype than the module computes with.
                target = torch.empty_like(held.values, device="cpu").view(held.shape)
                stored = self.source.value(self._name(held.names))
                self.source.plan(stored, of_whole(held.names, target), self._through)
                self._others.update(dict.fromkeys(held.names, target))
        for name, value in others.items():
            if isinstance(value, torch.Tensor):
                continue
            if name in self.source.names:
                self._others[name] = self.source.planned(self.source.value(name))
            else:
                self.report.missing.append(name)

    def _require_fit(self, strict: bool, takes_any: bool) -> None:
        """Raise CheckpointError unless the checkpoint holds exactly the model's parameters and
        buffers, in their shapes and kinds of dtype; not strict: unless it holds some of them."""
        wrong = problems_in(self.report)
        if wrong and strict:
            raise CheckpointError.of(
                "The checkpoint does not fit the model.",
                expected="the names and shapes of the model's parameters and buffers, and "
                "dtypes that convert to theirs",
                got=joined(wrong, 20, "; "),
                where=str(self.source.path),
                fix="build the model that was saved; pass rename, a function from a name in the "
                "checkpoint to the name in the model; or pass strict=False to load what fits",
            )
        if wrong and not takes_any:
            raise CheckpointError.of(
                "Nothing in the checkpoint fits the model.",
                expected="at least one name with the same shape in both, also with strict=False",
                got=joined(wrong, 20, "; "),
                where=str(self.source.path),
                fix="check that it is the checkpoint of this model, and compare the names",
            )


def _mismatch(stored: Any, held: HeldPart) -> str:
    """Return how a value of the checkpoint differs from a tensor of the model, or ""."""
    if not isinstance(stored, StoredTensor):
        return "not a tensor in the checkpoint"
    if stored.shape != held.shape:
        return f"shape {list(stored.shape)} in the checkpoint, {list(held.shape)} in the model"
    if not torch.can_cast(stored.dtype, held.dtype):  # a fraction or imaginary part is lost
        return f"{stored.dtype} in the checkpoint, {held.dtype} in the model"
    return ""
