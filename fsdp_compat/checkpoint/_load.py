"""``load``: each rank reads, all ranks agree, each rank acts.

Read: a rank works out from the manifest which bytes it needs (`_load_plan`), and checks their
blocks. Agree: all ranks report whether their files are present and valid and every value can be
decoded. Act: only then is anything changed.

Each block is read twice: once to check it, and once to copy values from it, when it is in the page
cache. Keeping the first reading would double the memory, and take longer: allocating fresh memory
is slower than reading. The checksum is compared again before anything is copied, so only values
that were saved are loaded. If the files change between the two readings, the error says that a part
was loaded before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import errors
from .._state.older_optimizers import convert
from ..errors import CheckpointError, FsdpCompatError, UsageError
from ._load_plan import LoadPlan
from ._optimizers import SharedOptimizer
from ._progress import require_bar
from ._ranks import all_ranks_or_raise, checkpoint_error_from, ranks_of, require_rest
from ._report import LoadReport, deliver, require_report
from ._texts import brief


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    report: LoadReport | None = None,
    progress: bool = False,
) -> Any:
    """Load the checkpoint in directory ``path`` into the model and the optimizer; return the
    ``extra`` it was saved with.

    Collective: all ranks. The number of ranks, the wrapping, the strategy, ``use_orig_params``,
    tensor parallelism and the dtypes may differ from those it was saved with, but complex values
    do not load into real ones, nor fractions into integers. On as many ranks as saved it, each gets
    its own ``extra`` back; otherwise all get that of the first rank.

    Parameter groups of the optimizer get the settings that their parameters were saved with,
    whatever the order and number of the groups. A group without any saved parameter, and a setting
    that was not saved, keep the optimizer's own value.

    Args:
        path: the directory that ``save`` returned, or ``latest(folder)``; with a folder per node
            ``latest(folder, model)``.
        model: contains sharded modules, of either front end, and has the parameter names of the
            saved model.
        optimizer: of the model's parameters; its state is replaced. None: ignore the saved
            optimizer state.
        strict: require the names and shapes of the model, all of them. False: load what has the
            same name and shape in both, and its optimizer state and settings where they fit, and
            leave everything else as it is; what was left is in ``report`` or, without one, in a
            warning.
        report: filled with what was left.
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
    call = "checkpoint.load"
    units, ranks = ranks_of(model, call)
    with ranks.taking_part():
        problem: BaseException | None = None
        plan, shared = None, None
        try:
            if path is None:
                raise _no_path(call)
            if not isinstance(path, (str, os.PathLike)):
                raise errors.wrong_type("path", "a path", path, call)
            if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
                raise errors.wrong_type(
                    "optimizer", "a torch.optim.Optimizer, or None", optimizer, call
                )
            errors.require_bools(call, progress=progress)
            require_report(call, strict, report)
            require_bar(progress, f"{call}(..., progress=True)")
            require_rest(units, call)
            if optimizer is not None:
                convert(optimizer)
            shared = SharedOptimizer(model, optimizer, ranks)
            plan = LoadPlan(Path(path), model, optimizer, ranks, strict)
            plan.files.check(progress and ranks.number == 0)
        except Exception as error:
            problem = checkpoint_error_from(
                error, "The checkpoint could not be read.", path, "nothing was loaded"
            )
        own = (
            None
            if plan is None or shared is None
            else (plan.files.manifest.identity, shared.facts())
        )
        answers = all_ranks_or_raise(ranks, problem, own, call)
        assert plan is not None
        assert shared is not None
        shared.require_alike([facts for _, facts in answers], call)
        identities = {identity for identity, _ in answers}
        if len(identities) > 1:
            raise CheckpointError.of(
                "The ranks load different checkpoints.",
                expected="the same checkpoint on all ranks",
                got=f"{len(identities)} different ones; this rank: {path}",
                where=call,
                fix="pass the same path on all ranks; with a folder per node, or during a "
                "save, pass latest(folder, model)",
            )
        deliver(plan.report, report, strict, call, path)
        extra = None
        try:
            extra = plan.apply(progress and ranks.number == 0)
        except FsdpCompatError as error:
            problem = error
        except OSError as error:
            problem = checkpoint_error_from(
                error,
                "The checkpoint could not be read.",
                path,
                "a part was already loaded: load again",
            )
        except Exception as error:
            problem = _refused(error, path)
        all_ranks_or_raise(ranks, problem, None, call)
        return extra


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
    result = CheckpointError.of(
        "The model or the optimizer refused a value of the checkpoint.",
        expected="values that load_state_dict of both accepts",
        got=brief(error),
        where=str(path),
        fix="the model and its optimizer may be partly changed: load another checkpoint before "
        "continuing",
    )
    result.__cause__ = error
    return result
