"""``save`` and ``async_save``, which plan, write and commit.

Plan: each rank checks its arguments and takes a snapshot; all ranks agree on the step, the identity
and which file holds which shard. Write: each rank writes its file. Commit: when all files are
durable, the rank that leads a directory writes the manifest and renames the directory. When all
leaders have, each removes older checkpoints; if one fails, the others remove the new one."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import threading
import typing
import uuid
import warnings
from collections.abc import Sequence
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
from ._formats.manifest import MANIFEST, FlatGroup, Manifest, file_name
from ._formats.writers import write_file
from ._live.model import NamedGroup, named_groups
from ._live.optimizers import SharedOptimizer, joined_param_groups
from ._live.snapshot import Snapshot, take_snapshot
from ._ranks.mailbox import RankLost
from ._ranks.ranks import Ranks, ranks_of, require_rest


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
    return _write(_plan(False, folder, model, optimizer, extra, step, keep_last, progress))


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
    return AsyncSave(_plan(True, folder, model, optimizer, extra, step, keep_last, progress))


class AsyncSave:
    """Returned by ``async_save``: a thread runs the ``job``; the process does not end before it."""

    def __init__(self, job: _Save) -> None:
        self._identity = job.manifest.identity
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(job,), name="fsdp_compat save")
        with job.ranks.taking_part(ends_call=False):
            try:
                background.begin(self._identity, self._thread)
                self._thread.start()
            except BaseException:
                background.end(self._identity, None)
                raise

    def _run(self, job: _Save) -> None:
        try:
            self._path = _write(job)
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


# -- plan


class _Proposal(typing.NamedTuple):
    """What one rank tells the others before they save, as a JSON list."""

    identity: str  # of the save, by the first rank
    step: int
    # Shards that it writes; descriptions of parts of parameters whose first shard it has.
    shards: tuple[list[Any], list[Any]]
    optimizer: list[Any] | None
    settings: str  # a digest


def _plan(
    in_background: bool,
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    step: int,
    keep_last: int | None,
    progress: bool,
) -> _Save:
    """Check the arguments, take a snapshot and agree with the other ranks. Collective.
    in_background: copy what is saved, for a thread that writes it."""
    call = "checkpoint.async_save" if in_background else "checkpoint.save"
    units, ranks = ranks_of(model, call)
    with ranks.taking_part(ends_call=False):
        if in_background:
            background.wait_for_current()
        with ranks.agreeing(
            "The checkpoint could not be saved.", folder, "nothing was written"
        ) as agreement:
            require_arguments(
                call, progress, folder=folder, optimizer=optimizer, step=step, keep_last=keep_last
            )
            require_rest(units, call)
            # Absolute: the program may change its directory before a thread has written.
            target = directory.directory_of(Path(folder).absolute(), step)
            _require_new(target, f"{call}({str(folder)!r}, ...)")
            groups = named_groups(units_of(model))
            snapshot = take_snapshot(model, optimizer, extra, groups)
            shared = SharedOptimizer(model, optimizer, ranks)
            if ranks.number == 0:
                _warn_of_later_steps(target, step)
            agreement.own = _proposal(ranks.number, step, groups, snapshot, shared)
        proposals = [_Proposal(*each) for each in agreement.by_rank]
        shared.require_alike([each.optimizer for each in proposals])
        _require_same_step([each.step for each in proposals], call)
        axes, described = _layout(groups, [each.shards for each in proposals])
        if len({each.settings for each in proposals}) > 1:
            by_rank = ranks.exchange(snapshot.param_groups)
            snapshot.param_groups = joined_param_groups(by_rank, call)
        manifest = Manifest(
            proposals[0].identity,
            step,
            ranks.number,
            axes,
            described,
            (),
            snapshot.param_groups,
            optimizer_classes=snapshot.optimizer_classes,
        )
        problem = None
        if in_background:
            try:
                snapshot.detach()
            except Exception as error:
                problem = error
        shows = progress and ranks.number == 0
        return _Save(ranks, target, manifest, snapshot, keep_last, shows, problem)


def _require_new(target: Path, where: str) -> None:
    if target.exists():
        raise UsageError.of(
            "This step was already saved, and checkpoints are never overwritten.",
            expected="a step that is not in this folder yet",
            got=f"an existing {target.name}",
            where=where,
            fix="save into another folder, or move that checkpoint away",
        )


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


def _proposal(
    number: int,
    step: int,
    groups: Sequence[NamedGroup],
    snapshot: Snapshot,
    shared: SharedOptimizer,
) -> _Proposal:
    own = [(at, named) for at, named in enumerate(groups) if named.is_written_here]
    # Relative to this rank's number, and so the same on most ranks: equal texts are sent once.
    claims = [
        (named.mesh, named.writer, named.part, named.group.shard.rank - number) for _, named in own
    ]
    described = [
        (at, named.part, named.described(0).as_json())
        for at, named in own
        if named.num_parts > 1 and named.rank == 0
    ]
    return _Proposal(
        uuid.uuid4().hex if number == 0 else "",
        step,
        (list(dict.fromkeys(claims)), described),
        shared.facts(),
        hashlib.sha256(json.dumps(snapshot.param_groups).encode()).hexdigest(),
    )


def _require_same_step(steps: list[int], call: str) -> None:
    if len({*steps}) > 1:
        raise UsageError.of(
            "The ranks save different steps.",
            expected="the same step on all ranks",
            got=f"{joined(list(map(str, steps)), 8, ', ')} by rank",
            where=call,
            fix="pass the same step on all ranks",
        )


def _layout(
    own_groups: Sequence[NamedGroup], by_rank: Sequence[tuple[list[Any], list[Any]]]
) -> tuple[tuple[tuple[int, ...], ...], tuple[FlatGroup, ...]]:
    """Return the axes and groups of the manifest, from the ``shards`` of all proposals."""
    axes: dict[tuple[int, int, int], dict[int, int]] = {}  # files by shard
    parts: dict[tuple[int, int], dict[str, Any]] = {}  # by number of the group and of the part
    for rank, (claims, described) in enumerate(by_rank):
        for mesh, writer, part, shard in claims:
            axes.setdefault((mesh, writer, part), {}).setdefault(shard + rank, rank)
        for number, part, content in described:
            parts.setdefault((number, part), content)
    order = {key: number for number, key in enumerate(sorted(axes))}
    files = tuple(tuple(rank for _, rank in sorted(axes[key].items())) for key in order)
    groups: list[FlatGroup] = []
    for number, named in enumerate(own_groups):
        for part in range(named.num_parts):
            axis = order[named.mesh, named.writer, part]
            if named.num_parts == 1:
                groups.append(named.described(axis))
            else:
                groups.append(FlatGroup.of_json({**parts[number, part], "axis": axis}, files))
    return files, tuple(groups)


# -- write and commit


class _Report(typing.NamedTuple):
    """The outcome of one rank's write, as a JSON list."""

    leads: bool
    nbytes: int
    checksums: Sequence[int]
    owned: Sequence[str]  # parameters whose states it alone has, whole
    problem: str | None


def _write(job: _Save) -> Path:
    """Write, and return the directory once it is complete on all ranks. Collective."""
    try:
        with job.ranks.taking_part():
            job.make_directory()
            problems, is_complete = job.ranks.mailbox.conclude(job.write_and_commit)
    except RankLost as lost:
        job.withdraw()
        state = "is complete" if os.path.exists(job.target) else "is not complete"
        raise job.ranks.lost(lost, f"{job.target} {state}; ") from lost
    finally:
        job.snapshot.tensors.clear()  # the copy may be large
        if job.owned is not None:
            job.owned.discard()
    if problems:
        problems += "" if is_complete else job.withdraw()
        raise _failed(job, problems, is_complete) from job.problem
    # Not before: until all nodes have this checkpoint, only an older one may load.
    if job.owned is not None and job.keep_last is not None:
        with contextlib.suppress(OSError):  # the new checkpoint is complete all the same
            directory.remove_older(job.target.parent, job.manifest.step, job.keep_last)
    return job.target


@dataclasses.dataclass
class _Save:
    """What all ranks have agreed to save, this rank's part of it, and how far it has come."""

    ranks: Ranks
    target: Path
    manifest: Manifest  # without files and owners
    snapshot: Snapshot
    keep_last: int | None
    shows: bool
    problem: Exception | None  # of this rank: its report tells the others
    owned: publishing.OwnedDirectory | None = None  # only on a rank that leads
    is_sole_leader: bool = True  # as far as this rank knows

    @property
    def _hidden(self) -> Path:
        return publishing.hidden_beside(self.target, self.manifest.identity)

    def make_directory(self) -> None:
        """Make the directory, first on the first rank, so that it leads. Collective."""
        ranks = self.ranks
        for turn in (ranks.number == 0, ranks.number != 0):
            try:
                if turn:
                    self.owned = publishing.make_fresh(self._hidden)
                    if self.owned is not None:
                        self.owned.content.mkdir()
            except OSError as error:
                self.problem = error
            ranks.exchange(None)
        if self.owned is None:
            self.snapshot.drop_common()

    def write_and_commit(self) -> object:
        """Write this rank's file, and commit if this rank leads. Return on the first rank:
        (problems, whether the checkpoint is complete in spite of them)."""
        ranks, mailbox = self.ranks, self.ranks.mailbox
        if self.owned is not None:
            with contextlib.suppress(OSError):
                publishing.remove_leftovers(self.target.parent, directory.STEP)
        mailbox.post(json.dumps(self._write_file()))
        if self.owned is None and ranks.number:
            return None
        reports = [_Report(*json.loads(text)) for text in mailbox.read(range(ranks.count))]
        leaders = [n for n, report in enumerate(reports) if report.leads]
        self.is_sole_leader = len(leaders) == 1
        problems = [
            f"rank {n}: {report.problem}"
            for n, report in enumerate(reports)
            if report.problem is not None
        ]
        if self.owned is not None:
            outcome = ("", False) if problems else self._commit(self.owned, reports)
            self.owned.discard()
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
        snapshot, facts = self.snapshot, FileFacts(0, ())
        number, title = self.ranks.number, f"save step {self.manifest.step}"
        snapshot.head.identity, snapshot.head.number = self.manifest.identity, number
        nbytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in snapshot.tensors)
        if self.problem is None:
            path = self._hidden / publishing.CONTENT / file_name(number)
            try:
                snapshot.wait_for_copy()
                with progress_bar(self.shows, title, nbytes) as tick:
                    facts = write_file(path, snapshot.tensors, snapshot.head.as_metadata(), tick)
            except Exception as error:
                self.problem = error
        problem = None if self.problem is None else _named(self.problem)
        leads = self.owned is not None
        return _Report(leads, facts.nbytes, facts.checksums, snapshot.owned, problem)

    def _commit(self, owned: publishing.OwnedDirectory, reports: list[_Report]) -> tuple[str, bool]:
        """Complete this rank's directory; return the problem, if any, and whether it is."""
        manifest = dataclasses.replace(
            self.manifest,
            files=tuple(FileFacts(its.nbytes, tuple(its.checksums)) for its in reports),
            owners={name: number for number, its in enumerate(reports) for name in its.owned},
        )
        try:
            publishing.write_text(owned.content / MANIFEST, manifest.as_text())
            owned.publish(self.target)
        except (OSError, UsageError) as error:
            return f"rank {self.ranks.number}: {_named(error)}", owned.is_published
        return "", True

    def withdraw(self) -> str:
        """Remove what this rank published if other leaders failed. Return the problem, if any."""
        if self.owned is not None and self.owned.is_published and not self.is_sole_leader:
            try:
                publishing.remove(self.target)
            except OSError as error:
                return f"; this node's part could not be removed: {_named(error)}"
        return ""


def _failed(job: _Save, problems: str, is_complete: bool) -> CheckpointError:
    what = "The checkpoint could not be saved."
    fix = "check the folder, free space and permissions; earlier checkpoints are unchanged"
    if is_complete:
        what = "The checkpoint is complete, but may not survive a power failure."
        fix = "check the disk for errors; no older checkpoint was removed"
    return CheckpointError.of(
        what,
        expected=f"all {job.ranks.count} ranks to write their files, durably",
        got=problems,
        where=str(job.target),
        fix=fix,
    )


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
