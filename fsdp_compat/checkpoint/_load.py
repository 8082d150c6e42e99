"""``load``, ``resume`` and ``load_safetensors``: each rank reads, all ranks agree, each acts.

Read: a rank plans what it needs (`_Plan`), and compares checksums, if the format has any.
Agree: all ranks report whether their files are valid and every value can be decoded. Only then is
anything changed.

Each block of a native checkpoint is read twice: once to check it, and once, from the page cache, to
copy values; keeping the first reading would double the memory and take longer. The checksum is
compared again before anything is copied, so only values that were saved are loaded. If a file
changes between the two, the error says that a part was loaded."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from .. import errors
from .._archive.archive import Archive, StoredTensor
from .._archive.texts import brief, shortened
from .._state.held import (
    Fit,
    HeldPart,
    absent_buffers,
    held_state,
    load_unmanaged,
    may_be_missing,
    others_in,
)
from .._state.loaded_values import same_shape
from .._state.optimizer_checks import cut_state
from .._text import joined
from ..errors import CheckpointError, FsdpCompatError
from ._arguments import Rename, require_arguments
from ._fit.optimizer import OptimizerLoadPlan
from ._fit.source import Source, open_source
from ._folder.directory import Run
from ._folder.newest import newest_of_all, offer_of
from ._formats.flat_files import OF_MODEL
from ._live.optimizers import SharedOptimizer, warn_of_left_out
from ._ranks.ranks import ranks_of, require_rest

_Extra = TypeVar("_Extra")


@dataclasses.dataclass
class LoadReport:
    """What a call loaded, and, with ``strict=False``, what it left; ``str`` is a summary.

    Attributes:
        path: the checkpoint, in a run's folder that of one step.
        extra: what was passed to ``save``, or what else the checkpoint holds.
        missing: names in the model alone, which are unchanged.
        unexpected: names in the checkpoint alone.
        mismatched: how the shapes or kinds of both differ, by name; these are unchanged.
        state_kept: parameters of the optimizer whose state is unchanged.
        settings_kept: why the settings of a parameter group are unchanged, by its number."""

    path: Path
    extra: Any = None
    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    mismatched: dict[str, str] = dataclasses.field(default_factory=dict)
    state_kept: list[str] = dataclasses.field(default_factory=list)
    settings_kept: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Return whether nothing was left."""
        kept = self.state_kept or self.settings_kept
        return not (self.missing or self.unexpected or self.mismatched or kept)

    def __str__(self) -> str:
        found = [
            *(f"missing: {name}" for name in self.missing),
            *(f"not in the model: {name}" for name in self.unexpected),
            *(f"{name}: {how}" for name, how in self.mismatched.items()),
            *(f"optimizer state kept: {name}" for name in self.state_kept),
            *(f"settings kept: group {n}, {why}" for n, why in self.settings_kept.items()),
        ]
        return joined(found, 20, "; ") or "everything was loaded"


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    ignore_class: Collection[str] = (),
    progress: bool = False,
) -> LoadReport:
    """Load a checkpoint into the model and the optimizer.

        extra = load("runs/7/step-00001200", model, optimizer).extra

    The number of ranks, the wrapping, the strategy, ``use_orig_params``, tensor parallelism and the
    dtypes may differ from those it was saved with, but complex values do not load into real ones,
    nor fractions into integers. On as many ranks as saved it, each gets its own ``extra`` back;
    otherwise all get that of the first rank. Each rank reads the bytes of its own part, and the
    blocks around them that have checksums.

    Parameter groups of the optimizer get the settings that their parameters were saved with,
    whatever the order and number of the groups. A group without any saved parameter, and a setting
    or a state of no parameter that was not saved, keep the optimizer's own value; a warning names
    parameters that only one optimizer has. State that numbers its parameters, as ``torch.optim``
    does, is taken in the order of this optimizer's parameters.

    Collective: all ranks of the model.

    Args:
        path: a checkpoint of ``save``, or of any other format that ``files.inspect`` recognises:
            torch.distributed.checkpoint (FSDP1, FSDP2), torch.save files (whole, or one per rank,
            FSDP1's local state dicts among them), safetensors, and directories of Accelerate,
            Lightning and the Trainer. Or the folder that was passed to ``save``, which may be on a
            different file system for each node: its newest complete checkpoint that all ranks have.
        model: contains sharded modules, of either front end, and has the parameter names of the
            saved model. One name of a tied parameter is enough.
        optimizer: of the model's parameters; its state is replaced. None: ignore the saved
            optimizer state.
        rename: from a name in the checkpoint to the name in the model before wrapping, or to None
            to skip the tensor. Applies to the optimizer's state as well.
        dtype: round floating-point values to this dtype on their way to the dtype of the
            parameters.
        strict: require the names and shapes of the model, all of them. False: load what has the
            same name and shape in both, and its optimizer state and settings where they fit, and
            leave everything else as it is; what was left is in the report and in a warning.
        ignore_class: full names of classes whose objects in torch.save files are left out; any
            other class is refused, and no code of a file is run.
        progress: show bytes and rate on stderr, on the first rank.

    Returns:
        Which checkpoint it was, the ``extra`` it was saved with, and what was left.

    Raises:
        UsageError: an argument is invalid.
        CheckpointError: on all ranks, before anything has changed: the checkpoint does not fit the
            model (not strict: in nothing); it holds the state of another kind of optimizer;
            parameters in one group of the optimizer were saved with different settings, or groups
            with different settings were saved as one; one of the files is missing, truncated,
            changed or from another checkpoint. If a file changes or becomes unreadable after it was
            checked, or the model or the optimizer refuses a value, the error says that both may be
            partly changed."""
    report = _load("load", path, model, optimizer, rename, dtype, strict, ignore_class, progress)
    assert report is not None
    return report


def resume(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    default: _Extra,
    progress: bool = False,
) -> _Extra:
    """Load the newest complete checkpoint of a run that all ranks have, if there is one.

    Newer ones, whose manifest is damaged or that only some ranks have, are skipped with a warning
    that names them. If only such are there, or the one that is loaded is damaged, it raises.

        for epoch in range(resume("runs/7", model, optimizer, default={"epoch": 0})["epoch"], 10):
            ...
            save("runs/7", model, optimizer, {"epoch": epoch + 1}, step=epoch)

    Collective: all ranks of the model.

    Args:
        folder: the folder that is passed to ``save``, or one checkpoint to continue from. It need
            not exist, and may be on a different file system for each node.
        model: as for ``load``.
        optimizer: as for ``load``.
        default: returned if there is no checkpoint in ``folder``, or only unfinished saves.
        progress: as for ``load``.

    Returns:
        The ``extra`` that the checkpoint was saved with, or ``default`` if nothing was loaded.

    Raises:
        UsageError: as for ``load``.
        CheckpointError: as for ``load``, with ``strict``; also if ranks have no checkpoint in
            common."""
    report = _load("resume", folder, model, optimizer, progress=progress, is_required=False)
    extra: _Extra = default if report is None else report.extra
    return extra


def load_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    progress: bool = False,
) -> LoadReport:
    """Load weights from safetensors files, as ``load`` without an optimizer does.

    ``path`` is a file, an index (``model.safetensors.index.json``), or a directory with either.

    Collective: all ranks of the model."""
    report = _load("load_safetensors", path, model, None, rename, dtype, strict, (), progress)
    assert report is not None
    return report


def _load(
    name: str,
    path: Any,
    model: nn.Module,
    optimizer: Any,
    rename: Any = None,
    dtype: Any = None,
    strict: bool = True,
    ignore_class: Collection[str] = (),
    progress: bool = False,
    is_required: bool = True,
) -> LoadReport | None:
    """Load, or return None if no checkpoint is there and none ``is_required``."""
    call = f"checkpoint.{name}"
    unreadable = "The checkpoint could not be read."
    units, ranks = ranks_of(model, call)
    shows = progress and ranks.number == 0
    with ranks.taking_part():
        with ranks.agreeing(unreadable, path, "nothing was loaded") as agreement:
            place = {"path" if is_required else "folder": path}
            require_arguments(
                call, progress, **place, optimizer=optimizer, rename=rename, dtype=dtype
            )
            errors.require_bools(call, strict=strict)
            run = Run(Path(path))
            agreement.own = offer_of(run, not is_required)
        manifest = None  # of a native checkpoint, if it was read
        if None not in agreement.by_rank:
            path = newest_of_all(run, ranks, agreement.by_rank)
            if path is None:
                return None
            manifest = run.newest
        with ranks.agreeing(unreadable, path, "nothing was loaded") as agreement:
            require_rest(units, call)
            if optimizer is not None:
                cut_state(optimizer)
            shared = SharedOptimizer(model, optimizer, ranks)
            held, unmanaged = held_state(model)
            shapes = functools.partial(_shapes_of, held)
            source = open_source(Path(path), manifest, shapes, rename, ignore_class, call)
            plan = _Plan(model, source, LoadReport(source.path), strict)
            taken = plan.of_model(held, unmanaged, optimizer is not None, dtype)
            if optimizer is not None:
                plan.of_optimizer(optimizer, taken)
            plan.report.extra = source.planned(source.extra(ranks))
            arguments = hashlib.sha256(repr((sorted(source.values), dtype)).encode()).hexdigest()
            agreement.own = (f"{source.archive.kind} {arguments}", shared.facts(), source.copy())
        kinds, optimizers, copies = zip(*agreement.by_rank, strict=True)
        shared.require_alike(optimizers)
        with ranks.agreeing(unreadable, path, "nothing was loaded") as agreement:
            agreement.own = source.check(ranks.number, copies, shows)
        identities = [*zip(kinds, agreement.by_rank, strict=True)]
        if len({*identities}) > 1:
            alike = sorted([n for n, x in enumerate(identities) if x == y] for y in {*identities})
            raise CheckpointError.of(
                "The ranks load different checkpoints.",
                expected="the same checkpoint, and the same arguments, on all ranks",
                got=shortened(f"{len(alike)} different ones, on ranks {alike}; this rank: {path}"),
                where=call,
                fix="pass equal files, and to checkpoint.load the same rename and dtype, on all "
                "ranks; for the newest checkpoint that all have, pass the folder of the run itself",
            )
        if not (strict or plan.report.is_complete):
            warnings.warn(f"{call} of {path} with strict=False: {plan.report}", stacklevel=3)
        if ranks.number == 0 and source.archive.left_out:
            left = joined(source.archive.left_out, 8, "; ")
            warnings.warn(f"{call}: not read from {path}: {left}", stacklevel=3)
        with ranks.agreeing(unreadable, path, "a part was already loaded: load again"):
            try:
                return plan.apply(shows)
            except (FsdpCompatError, OSError):
                raise
            except Exception as error:
                raise CheckpointError.of(
                    "The model or the optimizer refused a value of the checkpoint.",
                    expected="values that load_state_dict of both accepts",
                    got=brief(error),
                    where=str(path),
                    fix="load another checkpoint before continuing: both may be partly changed",
                ) from error


def _shapes_of(held: Sequence[HeldPart]) -> Archive:
    """Return the shapes of the model before wrapping, for formats that do not hold them."""
    ties = {other: each.names[0] for each in held for other in each.names[1:]}
    tensors = {x.names[0]: StoredTensor(x.names[0], x.dtype, x.shape, ()) for x in held}
    return Archive(Path(), OF_MODEL, tensors, ties)


# -- what is read, and what changes


@dataclasses.dataclass
class _Plan:
    """What ``apply`` reads and changes. A tensor is taken from wherever the checkpoint has it: its
    writer may have wrapped other modules."""

    model: nn.Module
    source: Source
    report: LoadReport
    strict: bool
    others: dict[str, Any] = dataclasses.field(default_factory=dict)
    # ^ what is taken of buffers, unmanaged parameters and extra state
    optimizer: OptimizerLoadPlan | None = None

    def of_model(
        self,
        held: Sequence[HeldPart],
        unmanaged: Mapping[str, Any],
        has_optimizer: bool,
        through: torch.dtype | None,
    ) -> list[HeldPart]:
        """Plan to load the model; return the parts that are. Raises CheckpointError unless it fits.
        through: round floating-point values to this dtype."""
        source, strict, report, saved = self.source, self.strict, self.report, self.source.values
        fixed = {name for name, value in others_in(self.model).items() if value is not None}
        held = [each for each in held if each.group or not fixed.isdisjoint(each.names)]
        fit = Fit()
        taken = fit.take(held, saved, _difference)
        report.missing += (n for n in fit.missing if not (strict and may_be_missing(n)))
        report.mismatched |= fit.wrong
        for each, stored in taken:
            target = each.values
            if each.group is None:
                # The state dict may hold a copy in another dtype than the module computes with.
                target = torch.empty_like(each.values, device="cpu")
                self.others.update(dict.fromkeys(each.names, target.view(each.shape)))
            source.plan(stored, each.boxes(target), through)
        # What modules load in their own way keeps the shape that it was saved in.
        free = {name: value for name, value in unmanaged.items() if name not in fixed}
        free |= {name: None for name in absent_buffers(self.model) if name in saved}
        self.others |= {name: source.planned(saved[name]) for name in free if name in saved}
        is_of_tensors = strict and "safetensors" in source.archive.kind
        report.missing += (
            name
            for name, value in free.items()
            if name not in saved and not (is_of_tensors and not isinstance(value, torch.Tensor))
        )
        known = {*unmanaged, *free, *(name for each in held for name in each.names)}
        strange = source.strange_states() if has_optimizer else []
        report.unexpected += (name for name in saved if name not in known)
        report.unexpected += (f"{n} (optimizer state)" for n in strange if n not in known)
        if not report.is_complete and (strict or not (taken or self.others)):
            what = "The checkpoint does not fit" if strict else "Nothing in the checkpoint fits"
            more = ", or strict=False to load what fits" if strict else ""
            raise CheckpointError.of(
                f"{what} the model.",
                expected="the names and shapes of the model's parameters and buffers, and "
                "dtypes that convert to theirs",
                got=str(report),
                where=str(source.path),
                fix="build the model that was saved; or pass to checkpoint.load(path, ...) rename, "
                f"a function from a name in the checkpoint to the name in the model{more}; modules "
                "with load_state_dict hooks take other names in model.load_state_dict()",
            )
        return [each for each, _ in taken]

    def of_optimizer(self, optimizer: torch.optim.Optimizer, taken: Sequence[HeldPart]) -> None:
        """Plan to load the optimizer. taken: the parts that are loaded. Raises CheckpointError."""
        report, left = self.report, {*self.report.missing, *self.report.mismatched}
        plan = OptimizerLoadPlan(self.source, self.model, optimizer, taken, left, self.strict)
        report.settings_kept, self.optimizer = plan.settings_kept, plan
        report.state_kept = [] if self.strict else plan.state_kept

    def apply(self, shown: bool) -> LoadReport:
        """Change the model and the optimizer."""
        with torch.no_grad():
            self.source.read(shown)
        load_unmanaged(self.model, self.others)
        if self.optimizer is not None:
            self.optimizer.apply()
            warn_of_left_out(
                self.source.left_out(), "were not saved; the optimizer keeps its own", stacklevel=4
            )
        return self.report


def _difference(held: HeldPart, name: str, stored: Any) -> str:
    """Return how a saved value differs from a tensor of the model, or ""."""
    if not isinstance(stored, StoredTensor):
        return "not a tensor in the checkpoint"
    if not same_shape(stored.shape, held.shape):
        return f"shape {list(stored.shape)} in the checkpoint, {list(held.shape)} in the model"
    if not torch.can_cast(stored.dtype, held.dtype):  # a fraction or imaginary part is lost
        return f"{stored.dtype} in the checkpoint, {held.dtype} in the model"
    return ""
