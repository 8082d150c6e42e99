"""``load`` and ``load_safetensors``: each rank reads, all ranks agree, each rank acts.

Read: a rank works out what it needs of the checkpoint (`_load_plan`), and checks the checksums, if
the format has any. Agree: all ranks report whether their files are present and valid and every
value can be decoded. Act: only then is anything changed.

Each block of a native checkpoint is read twice: once to check it, and once to copy values from it,
when it is in the page cache. Keeping the first reading would double the memory, and take longer:
allocating fresh memory is slower than reading. The checksum is compared again before anything is
copied, so only values that were saved are loaded. If the files change between the two readings, the
error says that a part was loaded before."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import errors
from .._state.model_state import unmanaged_state
from .._state.older_optimizers import convert
from .._state.units import names_before, units_of
from ..errors import CheckpointError, FsdpCompatError, UsageError
from ._arguments import Rename, require_arguments
from ._load_plan import LoadPlan
from ._named_groups import managed_parts, named_groups
from ._optimizers import SharedOptimizer
from ._ranks import ranks_of, require_rest
from ._report import LoadReport
from ._source import open_source
from ._texts import brief, joined
from ._tools.shapes import Shape, Shapes


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    report: LoadReport | None = None,
    ignored: Collection[str] = (),
    progress: bool = False,
) -> Any:
    """Load a checkpoint into the model and the optimizer; return the ``extra`` it was saved with,
    or what else it holds.

    Collective: all ranks. ``path`` may be a checkpoint of ``save``, or one of any other format that
    ``inspect`` recognises: of torch.distributed.checkpoint (FSDP1, FSDP2), torch.save files (whole,
    or one per rank, FSDP1's local state dicts among them), safetensors, and directories of
    Accelerate, Lightning and the Trainer. Each rank reads the bytes of its own part, and the blocks
    around them that have checksums.

    The number of ranks, the wrapping, the strategy, ``use_orig_params``, tensor parallelism and the
    dtypes may differ from those it was saved with, but complex values do not load into real ones,
    nor fractions into integers. On as many ranks as saved it, each gets its own ``extra`` back;
    otherwise all get that of the first rank.

    Parameter groups of the optimizer get the settings that their parameters were saved with,
    whatever the order and number of the groups. A group without any saved parameter, and a setting
    that was not saved, keep the optimizer's own value. State that numbers its parameters, as
    ``torch.optim`` does, is taken in the order of this optimizer's parameters.

    Args:
        path: the directory that ``save`` returned, or ``latest(folder)``, with a folder per node
            ``latest(folder, model)``; or a file or directory of another format.
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
            leave everything else as it is; what was left is in ``report`` or, without one, in a
            warning.
        report: filled with what was left.
        ignored: full names of classes whose objects in torch.save files are left out; any other
            class is refused, and no code of a file is run.
        progress: show bytes and rate on the first rank; requires tqdm.

    Raises:
        UsageError: an argument is invalid.
        CheckpointError: on all ranks, before anything has changed: the checkpoint does not fit the
            model (not strict: in nothing); it holds the state of another kind of optimizer;
            parameters in one group of the optimizer were saved with different settings, or groups
            with different settings were saved as one; one of the files is missing, truncated,
            changed or from another checkpoint. If a file changes or becomes unreadable after it
            was checked, or the model or the optimizer refuses a value, the error says that both
            may be partly changed.
    """
    return _load("load", path, model, optimizer, rename, dtype, strict, report, ignored, progress)


def load_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    report: LoadReport | None = None,
    progress: bool = False,
) -> None:
    """Load weights from safetensors files into the model: ``load`` without an optimizer.

    path: a file, an index (``model.safetensors.index.json``), or a directory with an index or with
    files. The other arguments, and what is raised, are those of ``load``.
    """
    _load("load_safetensors", path, model, None, rename, dtype, strict, report, (), progress)


def _load(
    name: str,
    path: Any,
    model: nn.Module,
    optimizer: Any,
    rename: Any,
    dtype: Any,
    strict: bool,
    report: LoadReport | None,
    ignored: Collection[str],
    progress: bool,
) -> Any:
    call = f"checkpoint.{name}"
    unreadable = "The checkpoint could not be read."
    units, ranks = ranks_of(model, call)
    shows = progress and ranks.number == 0
    with ranks.taking_part():
        with ranks.agreeing(unreadable, path, "nothing was loaded") as agreement:
            if path is None:
                raise _no_path(call)
            require_arguments(
                call, progress, path=path, optimizer=optimizer, rename=rename, dtype=dtype
            )
            errors.require_bools(call, strict=strict)
            if report is not None and not isinstance(report, LoadReport):
                raise errors.wrong_type("report", "a LoadReport, or None", report, call)
            require_rest(units, call)
            if optimizer is not None:
                convert(optimizer)
            shared = SharedOptimizer(model, optimizer, ranks)
            source = open_source(Path(path), lambda: _shapes_of(model), rename, ignored, call)
            plan = LoadPlan(source, model, optimizer, ranks, strict, dtype)
            source.check(ranks, shows)
            arguments = hashlib.sha256(repr((sorted(source.names), dtype)).encode()).hexdigest()
            agreement.own = (f"{source.identity} {arguments}", shared.facts())
        shared.require_alike([facts for _, facts in agreement.by_rank], call)
        _require_one(path, {identity for identity, _ in agreement.by_rank}, call)
        if report is not None:
            vars(report).update(vars(plan.report))
        elif plan.report and not strict:
            warnings.warn(f"{call} of {path} with strict=False: {plan.report}", stacklevel=3)
        if ranks.number == 0 and source.archive.left_out:
            left = joined(source.archive.left_out, 8, "; ")
            warnings.warn(f"{call}: not read from {path}: {left}", stacklevel=3)
        with ranks.agreeing(unreadable, path, "a part was already loaded: load again"):
            try:
                extra = plan.apply(shows)
            except (FsdpCompatError, OSError):
                raise
            except Exception as error:
                raise _refused(error, path) from error
        return extra


def _shapes_of(model: nn.Module) -> Shapes:
    """Return the shapes of the model before it was wrapped, for formats that do not hold them."""
    found: dict[str, tuple[Shape, tuple[str, ...]]] = {}
    for held in managed_parts(named_groups(units_of(model))):
        found[held.names[0]] = Shape(held.shape, held.dtype), held.names
    for name, value in unmanaged_state(model).items():
        if isinstance(value, torch.Tensor):
            found[name] = Shape(tuple(value.shape), value.dtype), (name,)
    order = {name: position for position, name in enumerate(names_before(model))}
    names = sorted(found, key=lambda name: order.get(name, len(order)))
    ties = {other: name for name in names for other in found[name][1][1:]}
    return Shapes({name: found[name][0] for name in names}, ties)


def _require_one(path: object, identities: set[str], call: str) -> None:
    """Raise CheckpointError unless all ranks load the same. Collective."""
    if len(identities) > 1:
        raise CheckpointError.of(
            "The ranks load different checkpoints.",
            expected="the same checkpoint, and the same arguments, on all ranks",
            got=f"{len(identities)} different ones; this rank: {path}",
            where=call,
            fix="pass the same path, rename and dtype on all ranks; with a folder per node, or "
            "during a save, pass latest(folder, model)",
        )


def _no_path(call: str) -> UsageError:
    return UsageError.of(
        "There is no checkpoint to load.",
        expected="the path of a checkpoint",
        got="None, which latest(folder) returns if the folder holds no complete checkpoint",
        where=f"argument 'path' of {call}",
        fix="call load only if latest(folder) is not None: on the first run there is nothing "
        "to load; or check the folder",
    )


def _refused(error: Exception, path: object) -> CheckpointError:
    return CheckpointError.of(
        "The model or the optimizer refused a value of the checkpoint.",
        expected="values that load_state_dict of both accepts",
        got=brief(error),
        where=str(path),
        fix="the model and its optimizer may be partly changed: load another checkpoint before "
        "continuing",
    )
