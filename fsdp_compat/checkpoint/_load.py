"""``load``, ``resume`` and ``load_safetensors``: each rank reads, all ranks agree, each acts.

Read: a rank plans what it needs (`_LoadPlan`), and compares checksums, if the format has any.
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
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from .. import errors
from .._archive.archive import StoredTensor
from .._archive.texts import brief, shortened
from .._state.model_loading import absent_buffers, load_unmanaged, may_be_missing, others_in
from .._state.optimizer_checks import cut_state
from .._text import joined
from ..errors import CheckpointError, FsdpCompatError
from ._arguments import Rename, require_arguments
from ._fit.optimizer import OptimizerLoadPlan
from ._fit.source import Source, open_source
from ._folder.directory import Run
from ._folder.newest import newest_of_all, offer_of
from ._formats.flat_files import Shapes
from ._live.model import HeldPart, HeldState, held_state
from ._live.optimizers import SharedOptimizer
from ._live.snapshot import warn_of_left_out
from ._ranks.ranks import Ranks, ranks_of, require_rest

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
            held = held_state(model)
            shapes = functools.partial(_shapes_of, held)
            source = open_source(Path(path), manifest, shapes, rename, ignore_class, call)
            plan = _LoadPlan(source, model, held, optimizer, ranks, strict, dtype)
            arguments = hashlib.sha256(repr((sorted(source.names), dtype)).encode()).hexdigest()
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


def _shapes_of(held: HeldState) -> Shapes:
    """Return the shapes of the model before wrapping, for formats that do not hold them."""
    ties = {other: each.names[0] for each in held.parts for other in each.names[1:]}
    return Shapes({each.names[0]: each.shape for each in held.parts}, ties)


# -- what is read, and what changes


class _LoadPlan:
    """The reads of a rank, and what ``apply`` changes with them. A tensor is taken from wherever
    the checkpoint has it: its writer may have wrapped other modules."""

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        held: HeldState,
        optimizer: torch.optim.Optimizer | None,
        ranks: Ranks,
        strict: bool,
        through: torch.dtype | None = None,
    ) -> None:
        """Raises CheckpointError. through: round floating-point values to this dtype."""
        self.source, self.report = source, LoadReport(source.path)
        self._model, self._strict, self._through = model, strict, through
        self._others: dict[str, Any] = {}  # what is taken of buffers and unmanaged parameters
        fixed = {name for name, value in others_in(model).items() if value is not None}
        parts = [each for each in held.parts if each.place or not fixed.isdisjoint(each.names)]
        taken = [each for each in parts if self._takes(each)]
        for each in taken:
            self._plan_part(each)
        # What modules load in their own way keeps the shape that it was saved in.
        free = {name: value for name, value in held.unmanaged.items() if name not in fixed}
        free.update((n, None) for n in absent_buffers(model) if n in source.names)
        self._plan_free(free)
        known = {*held.unmanaged, *free, *(name for each in parts for name in each.names)}
        self.report.unexpected += [name for name in source.names if name not in known]
        strange = source.strange_states() if optimizer is not None else []
        self.report.unexpected += [f"{n} (optimizer state)" for n in strange if n not in known]
        self._require_fit(bool(taken or self._others))
        left = {*self.report.missing, *self.report.mismatched}
        self._of_optimizer: OptimizerLoadPlan | None = None
        if optimizer is not None:
            plan = OptimizerLoadPlan(source, model, optimizer, held.groups, taken, left, strict)
            self._of_optimizer = plan
            self.report.settings_kept = plan.settings_kept
            self.report.state_kept = [] if strict else plan.state_kept
        self.report.extra = source.planned(source.extra(ranks))

    def apply(self, shown: bool) -> LoadReport:
        """Change the model and the optimizer."""
        with torch.no_grad():
            self.source.read(shown)
        load_unmanaged(self._model, self._others)
        if self._of_optimizer is not None:
            self._of_optimizer.apply()
            warn_of_left_out(
                self.source.left_out(), "were not saved; the optimizer keeps its own", stacklevel=4
            )
        return self.report

    def _stored(self, held: HeldPart) -> dict[str, Any]:
        """Return what the checkpoint has under the names of a tensor, tied values once."""
        found: dict[str, Any] = {}
        for name in [name for name in held.names if name in self.source.names]:
            value = self.source.value(name)
            if all(value is not other for other in found.values()):
                found[name] = value
        return found

    def _takes(self, held: HeldPart) -> bool:
        """Return whether the checkpoint has a tensor that fits; report it if not."""
        stored = self._stored(held)
        if not stored and not (self._strict and may_be_missing(held.names[0])):
            self.report.missing.append(held.names[0])
        wrong = {name: how for name, value in stored.items() if (how := _mismatch(value, held))}
        self.report.mismatched.update(wrong)
        return bool(stored) and not wrong

    def _plan_part(self, held: HeldPart) -> None:
        """Read a part into its place; of an unmanaged tensor, into new memory. Of tied tensors that
        differ in the checkpoint, the last one is taken, as ``load_state_dict`` does."""
        target = held.values
        if held.place is None:
            # The state dict may hold a copy in another dtype than the module computes with.
            target = torch.empty_like(held.values, device="cpu")
            self._others.update(dict.fromkeys(held.names, target.view(held.shape)))
        *_, stored = self._stored(held).values()
        self.source.plan(stored, held.boxes(target), self._through)

    def _plan_free(self, free: dict[str, Any]) -> None:
        """Plan extra state, and tensors of any shape."""
        is_of_tensors = "safetensors" in self.source.archive.kind
        for name, value in free.items():
            if name in self.source.names:
                self._others[name] = self.source.planned(self.source.value(name))
            elif isinstance(value, torch.Tensor) or not (self._strict and is_of_tensors):
                self.report.missing.append(name)

    def _require_fit(self, takes_any: bool) -> None:
        """Raise CheckpointError unless the checkpoint fits; not strict: in part."""
        strict = self._strict
        if not self.report.is_complete and (strict or not takes_any):
            what = "The checkpoint does not fit" if strict else "Nothing in the checkpoint fits"
            more = ", or strict=False to load what fits" if strict else ""
            raise CheckpointError.of(
                f"{what} the model.",
                expected="the names and shapes of the model's parameters and buffers, and "
                "dtypes that convert to theirs",
                got=str(self.report),
                where=str(self.source.path),
                fix="build the model that was saved; or pass to checkpoint.load(path, ...) rename, "
                f"a function from a name in the checkpoint to the name in the model{more}; modules "
                "with load_state_dict hooks take other names in model.load_state_dict()",
            )


def _mismatch(stored: Any, held: HeldPart) -> str:
    """Return how a saved value differs from a tensor of the model, or ""."""
    if not isinstance(stored, StoredTensor):
        return "not a tensor in the checkpoint"
    if stored.shape != held.shape:
        return f"shape {list(stored.shape)} in the checkpoint, {list(held.shape)} in the model"
    if not torch.can_cast(stored.dtype, held.dtype):  # a fraction or imaginary part is lost
        return f"{stored.dtype} in the checkpoint, {held.dtype} in the model"
    return ""
