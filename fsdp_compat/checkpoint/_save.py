"""``save`` and ``async_save``, which plan, write and commit.

Plan: each rank checks its arguments and takes a snapshot; all ranks agree on the step, the identity
and which file holds which shard. Write: each rank writes its file. Commit: when all files are
durable, the rank that leads a directory writes the manifest and renames the directory. When all
leaders have, each removes older checkpoints; if one fails, the others remove the new one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
import typing
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._archive.blocks import FileFacts
from .._progress import progress_bar
from .._state.units import units_of
from .._text import joined
from ..errors import CheckpointError, UsageError
from . import _background as background
from ._arguments import require_arguments
from ._folder import directory, publishing
from ._formats.manifest import MANIFEST, FlatGroup, Manifest, file_name, versions
from ._formats.writers import write_file
from ._live.model import NamedGroup, named_groups
from ._live.optimizers import SharedOptimizer, joined_param_groups
from ._live.snapshot import Snapshot, take_snapshot
from ._ranks.mailbox import RankLost
from ._ranks.ranks import ranks_of, require_rest


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    step: int,
    keep_last: int | None = None,
    progress: bool = False,
) -> Path:
    """Save the model, its optimizer and ``extra`` as the checkpoint of a step.

    Each rank writes the shards it holds; no tensor is sent. The directory ``step-00000042`` appears
    once everything in it is durable. Existing checkpoints are never overwritten.

    Collective: all ranks of the model, those of tensor parallelism included.

    Args:
        folder: where all checkpoints of the run lie; created if missing. It may be on a different
            file system for each node.
        model: contains sharded modules, of either front end.
        optimizer: of the model's parameters. Every parameter keeps the settings of its group, which
            must be the same on all ranks.
        extra: None, numbers, strings, bytes, dtypes, devices, tensors, NumPy arrays of numbers, and
            lists, tuples, sets, deques and dicts of these; each rank saves its own.
        step: at least 0, and not saved in the folder yet.
        keep_last: keep this many of the newest complete checkpoints, this one included, and remove
            older ones once this one is complete.
        progress: show bytes and rate on stderr, on the first rank.

    Returns:
        The directory of the checkpoint.

    Raises:
        UsageError: an argument is invalid; on all ranks, before anything is written.
        CheckpointError: a rank could not write, for example because the disk is full; on all ranks.
            Earlier checkpoints are unchanged. If this one is complete nevertheless, the message
            says so. Also raised, before anything is written, if an earlier ``async_save`` failed
            and its ``wait`` was never called.
        StateError: another rank has ended or was interrupted. Slow ranks are waited for."""
    return _SaveJob(False, folder, model, optimizer, extra, step, keep_last, progress).write()


def async_save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    step: int,
    keep_last: int | None = None,
    progress: bool = False,
) -> AsyncSave:
    """Save as ``save`` does, but return before it is written: a thread writes a copy of the state.

    The copy is on the CPU and as large as this rank's shards, in memory that is kept for the next
    one. From a device it is made in the order of the current stream, and the call does not wait for
    it. A process runs one save at a time: the next one waits for it. Errors about arguments are
    raised here, errors while writing from ``wait``. If ``wait`` is never called, the next save or
    load raises the error on all ranks, or it is printed when the process ends.

    Collective: all ranks of the model."""
    return AsyncSave(_SaveJob(True, folder, model, optimizer, extra, step, keep_last, progress))


class AsyncSave:
    """Returned by ``async_save``: a thread runs the ``job``; the process does not end before it."""

    def __init__(self, job: _SaveJob) -> None:
        self._job, self._identity = job, job.identity
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fsdp_compat save")
        try:
            background.begin(self._identity, self._thread)
            self._thread.start()
        except BaseException as error:
            background.end(self._identity, None)
            job.abandon(error)
            raise

    def _run(self) -> None:
        try:
            self._path = self._job.write()
        except BaseException as error:  # raised by wait
            self._error = error
        finally:
            background.end(self._identity, None if self._error is None else _named(self._error))

    def done(self) -> bool:
        """Return True once the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete.

        Args:
            timeout: seconds to wait; None: without end.

        Returns:
            The directory of the checkpoint.

        Raises:
            TimeoutError: it is not complete in time.
            CheckpointError: as ``save``, which may also raise others."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the checkpoint is not complete after {timeout:g} s; it is still being written"
            )
        if self._error is not None:
            background.mark_reported(self._identity)
            raise self._error
        assert self._path is not None
        return self._path

    result = wait  # the name that concurrent.futures.Future has for it


# -- the work of one save


class _Report(typing.NamedTuple):
    """The outcome of one rank's write, as a JSON list."""

    leads: bool
    nbytes: int
    checksums: Sequence[int]
    owned: Sequence[str]  # parameters whose states it alone has, whole
    problem: str | None


class _SaveJob:
    """One save. Constructing it plans and checks; ``write`` writes and commits."""

    def __init__(
        self,
        in_background: bool,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Any,
        step: int,
        keep_last: int | None,
        progress: bool,
    ) -> None:
        """Collective. in_background: copy what is saved, for a thread that calls ``write``."""
        call = "checkpoint.async_save" if in_background else "checkpoint.save"
        self._snapshot = Snapshot()
        self._groups: list[NamedGroup] = []
        self._owned: publishing.OwnedDirectory | None = None  # only on a rank that leads
        self._is_sole_leader = True  # as far as this rank knows
        self._problem: Exception | None = None
        self._copied: Callable[[], object] = lambda: None  # waits for the copy
        units, self._ranks = ranks_of(model, call)
        try:
            if in_background:
                background.wait_for_current()
            with self._ranks.agreeing(
                "The checkpoint could not be saved.", folder, "nothing was written"
            ) as agreement:
                require_arguments(
                    call,
                    progress,
                    folder=folder,
                    optimizer=optimizer,
                    step=step,
                    keep_last=keep_last,
                )
                require_rest(units, call)
                self._step, self._keep_last = step, keep_last
                self._shows = progress and self._ranks.number == 0
                # Absolute: the program may change its directory before a thread has written.
                self._target = directory.directory_of(Path(folder).absolute(), step)
                if self._target.exists():
                    raise UsageError.of(
                        "This step was already saved, and checkpoints are never overwritten.",
                        expected="a step that is not in this folder yet",
                        got=f"an existing {self._target.name}",
                        where=f"{call}({str(folder)!r}, ...)",
                        fix="save into another folder, or move that checkpoint away",
                    )
                self._groups = named_groups(units_of(model))
                self._snapshot = take_snapshot(model, optimizer, extra, self._groups)
                shared = SharedOptimizer(model, optimizer, self._ranks)
                if self._ranks.number == 0:
                    _warn_of_later_steps(self._target, step)
                agreement.own = self._plan(shared)
            shared.require_alike([facts for *_, facts, _ in agreement.by_rank])
            self._agree(agreement.by_rank)
            if in_background:
                self._detach()
        except BaseException as error:
            self.abandon(error)
            raise

    def _plan(self, shared: SharedOptimizer) -> tuple[Any, ...]:
        """Return what this rank saves, for the other ranks: identity, step, shards, descriptions of
        parts of parameters whose first shard it writes, optimizer facts and settings."""
        own = [(n, named) for n, named in enumerate(self._groups) if named.is_written_here]
        # Relative to this rank's number, and so the same on most ranks: equal texts are sent once.
        claims = [
            (named.mesh, named.writer, named.part, named.group.shard.rank - self._ranks.number)
            for _, named in own
        ]
        described = [
            (number, named.part, named.described(0).as_json())
            for number, named in own
            if named.num_parts > 1 and named.rank == 0
        ]
        return (
            uuid.uuid4().hex if self._ranks.number == 0 else "",
            self._step,
            (list(dict.fromkeys(claims)), described),
            shared.facts(),
            hashlib.sha256(json.dumps(self._snapshot.param_groups).encode()).hexdigest(),
        )

    def _agree(self, answers: list[Any]) -> None:
        """Merge the plans of all ranks: step, identity, files of shards, settings. Collective."""
        self.identity = answers[0][0]
        if any(step != self._step for _, step, *_ in answers):
            raise UsageError.of(
                "The ranks save different steps.",
                expected="the same step on all ranks",
                got=f"{joined([str(step) for _, step, *_ in answers], 8, ', ')} by rank",
                where=self._ranks.call,
                fix="pass the same step on all ranks",
            )
        self._lay_out([shards for _, _, shards, *_ in answers])
        if len({settings for *_, settings in answers}) > 1:
            by_rank = self._ranks.exchange(self._snapshot.param_groups)
            self._snapshot.param_groups = joined_param_groups(by_rank, self._ranks.call)

    def _lay_out(self, answers: list[tuple[list[list[int]], list[Any]]]) -> None:
        """answers: by rank, which shards it writes, and what it describes."""
        axes: dict[tuple[int, int, int], dict[int, int]] = {}  # files by shard
        parts: dict[tuple[int, int], dict[str, Any]] = {}  # by number of the group and of the part
        for rank, (claims, described) in enumerate(answers):
            for mesh, writer, part, shard in claims:
                axes.setdefault((mesh, writer, part), {}).setdefault(shard + rank, rank)
            for number, part, content in described:
                parts.setdefault((number, part), content)
        order = {key: number for number, key in enumerate(sorted(axes))}
        self._axes = tuple(tuple(rank for _, rank in sorted(axes[key].items())) for key in order)
        groups: list[FlatGroup] = []
        for number, named in enumerate(self._groups):
            for part in range(named.num_parts):
                axis = order[named.mesh, named.writer, part]
                if named.num_parts == 1:
                    groups.append(named.described(axis))
                else:
                    content = {**parts[number, part], "axis": axis}
                    groups.append(FlatGroup.of_json(content, self._axes))
        self._described = tuple(groups)

    def _make_directory(self) -> None:
        """Make the directory, first on the first rank, so that it leads. Collective."""
        hidden = publishing.hidden_beside(self._target, self.identity)
        self._directory = hidden / publishing.CONTENT
        for turn in (self._ranks.number == 0, self._ranks.number != 0):
            try:
                if turn:
                    self._owned = publishing.make_fresh(hidden)
                    if self._owned is not None:
                        self._directory.mkdir()
            except OSError as error:
                self._problem = error
            self._ranks.exchange(None)

    def _detach(self) -> None:
        """Copy what is saved, so that training may change the original."""
        try:
            self._copied = self._snapshot.detach()
        except Exception as error:  # reported to the other ranks later
            self._problem = error

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks not to wait for this one any longer."""
        self._ranks.mailbox.leave(error)
        if self._owned is not None:
            self._owned.discard()

    def write(self) -> Path:
        """Write, and return the directory once it is complete on all ranks. Collective."""
        try:
            self._make_directory()
            if self._owned is None:
                self._snapshot.drop_common()
            problems, is_complete = self._ranks.mailbox.conclude(self._write_and_commit)
            self._ranks.mailbox.close()
        except RankLost as lost:
            self._withdraw()
            state = "is complete" if os.path.exists(self._target) else "is not complete"
            raise self._ranks.lost(lost, f"{self._target} {state}; ") from lost
        except BaseException as error:
            self.abandon(error)
            raise
        finally:
            self._snapshot, self._groups = Snapshot(), []  # the copy may be large
            if self._owned is not None:
                self._owned.discard()
        if problems:
            problems += "" if is_complete else self._withdraw()
            raise self._failed(problems, is_complete) from self._problem
        # Not before: until all nodes have this checkpoint, only an older one may load.
        if self._owned is not None and self._keep_last is not None:
            with contextlib.suppress(OSError):  # the new checkpoint is complete all the same
                directory.remove_older(self._target.parent, self._step, self._keep_last)
        return self._target

    def _withdraw(self) -> str:
        """Remove what this rank published if other leaders failed. Return the problem, if any."""
        if self._owned is None or not self._owned.is_published or self._is_sole_leader:
            return ""
        try:
            publishing.remove(self._target)
        except OSError as error:
            return f"; this node's part could not be removed: {_named(error)}"
        return ""

    def _write_and_commit(self) -> object:
        """Write this rank's file, and commit if this rank leads. Return on the first rank:
        (problems, whether the checkpoint is complete in spite of them)."""
        mailbox, ranks = self._ranks.mailbox, self._ranks
        if self._owned is not None:
            with contextlib.suppress(OSError):
                publishing.remove_leftovers(self._target.parent, directory.STEP)
        mailbox.post(json.dumps(self._write_file()))
        if self._owned is None and ranks.number:
            return None
        reports = [_Report(*json.loads(text)) for text in mailbox.read(range(ranks.count))]
        leaders = [n for n, report in enumerate(reports) if report.leads]
        self._is_sole_leader = len(leaders) == 1
        problems = [
            f"rank {n}: {report.problem}"
            for n, report in enumerate(reports)
            if report.problem is not None
        ]
        if self._owned is not None:
            outcome = ("", False) if problems else self._commit(self._owned, reports)
            self._owned.discard()
            mailbox.post(json.dumps(outcome), "leader")
        if ranks.number:
            return None
        published = [json.loads(text) for text in mailbox.read(leaders, "leader")]
        if not leaders and not problems:
            problems = ["no rank could make a directory"]
        is_complete = not problems and all(complete for _, complete in published)
        problems += [problem for problem, _ in published if problem]
        return "; ".join(problems), is_complete

    def _write_file(self) -> _Report:
        """Write this rank's file, unless something has failed before."""
        facts, head, tensors = FileFacts(0, ()), self._snapshot.head, self._snapshot.tensors
        head.identity, head.number = self.identity, self._ranks.number
        nbytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in tensors)
        if self._problem is None:
            path = self._directory / file_name(self._ranks.number)
            try:
                self._copied()
                with progress_bar(self._shows, f"save step {self._step}", nbytes) as tick:
                    facts = write_file(path, tensors, head.as_metadata(), tick)
            except Exception as error:
                self._problem = error
        problem = None if self._problem is None else _named(self._problem)
        owned = self._snapshot.owned
        return _Report(self._owned is not None, facts.nbytes, facts.checksums, owned, problem)

    def _commit(self, owned: publishing.OwnedDirectory, reports: list[_Report]) -> tuple[str, bool]:
        """Complete this rank's directory; return the problem, if any, and whether it is."""
        manifest = Manifest(
            self.identity,
            self._step,
            self._ranks.number,
            self._axes,
            self._described,
            tuple(FileFacts(report.nbytes, tuple(report.checksums)) for report in reports),
            self._snapshot.param_groups,
            versions(),
            self._snapshot.optimizer_classes,
            owners={name: number for number, its in enumerate(reports) for name in its.owned},
        )
        try:
            publishing.write_text(self._directory / MANIFEST, manifest.as_text())
            owned.publish(self._target)
        except (OSError, UsageError) as error:
            return f"rank {self._ranks.number}: {_named(error)}", owned.is_published
        return "", True

    def _failed(self, problems: str, is_complete: bool) -> CheckpointError:
        what = "The checkpoint could not be saved."
        fix = "check the folder, free space and permissions; earlier checkpoints are unchanged"
        if is_complete:
            what = "The checkpoint is complete, but may not survive a power failure."
            fix = "check the disk for errors; no older checkpoint was removed"
        return CheckpointError.of(
            what,
            expected=f"all {self._ranks.count} ranks to write their files, durably",
            got=problems,
            where=str(self._target),
            fix=fix,
        )


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _warn_of_later_steps(target: Path, step: int) -> None:
    newest = step
    with contextlib.suppress(OSError):  # a folder that may be written, but not listed
        newest = max(directory.steps_in(target.parent), default=step)
    if newest > step:
        warnings.warn(
            f"Step {step} is saved into {target.parent}, which holds step {newest}: "
            f"latest() goes on returning the latter. Pass {str(target)!r} to load() to resume from "
            "this one. If the run was rewound, move the later steps away, or save into a new "
            "folder.",
            stacklevel=4,
        )
