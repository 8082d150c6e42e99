"""Saving: every rank writes its own file; the one that leads writes the manifest when all files are
durable."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import errors
from .._comm.host_memory import memory_of
from .._state.model_units import units_of
from ..errors import CheckpointError, FsdpCompatError, StateError, UsageError, explain
from . import _background as background
from . import _directory as directory
from ._blocks import BLOCK_NBYTES, BlockWriter, Facts
from ._header import encode_header
from ._mailbox import Lost
from ._manifest import Manifest, file_name, versions
from ._optimizers import SharedOptimizer
from ._progress import progress_bar, require_bar
from ._ranks import all_ranks_or_raise, ranks_of, require_rest
from ._snapshot import Flat, NamedGroup, Snapshot, as_text, named_groups, take_snapshot

__all__ = ["AsyncSave", "async_save", "save"]


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
    """Save the model, its optimizer and ``extra`` as the checkpoint of ``step`` in ``folder``;
    return its directory.

    Collective: all ranks. Each writes what it holds, and nothing of the model is sent. The
    directory ``step-00000042`` appears when everything in it is durable; what is there already is
    never overwritten.

    Args:
        folder: of all checkpoints; made if there is none. Ranks may have it on several file
            systems.
        model: with FullyShardedDataParallel in it.
        optimizer: of its parameters.
        extra: numbers, texts, tensors, and lists, tuples, dicts of these; each rank's own.
        step: at least 0, not saved yet.
        keep_last: remove complete checkpoints of earlier steps, when this one stands, as many as
            leave so many.
        progress: show bytes and rate on the first rank; needs tqdm.

    Raises:
        UsageError: an argument cannot work; on all ranks, before anything is written.
        CheckpointError: a rank could not write, as on a full disk; on all ranks. What was there is
            as it was. If the checkpoint stands nevertheless, the message says so. Also, before
            anything is written, if an earlier ``async_save`` has failed and nobody was told.
        StateError: a rank has ended or was interrupted, on all others; a slow one is waited for.
    """
    return _Save("save", folder, model, optimizer, extra, step, keep_last, progress).write()


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
    """As ``save``, but it returns when what is saved has been copied; a thread writes it while
    training goes on.

    The copy is on the CPU and of the size of this rank's part. One save at a time is under way in a
    process: another one waits for it. Collective. The arguments are those of ``save``, and so are
    the errors: about arguments here, about writing from ``wait``. Where nobody waits, the next call
    that saves or loads raises them, on all ranks; or they are printed when the process ends.
    """
    return AsyncSave(
        _Save(
            "async_save",
            folder,
            model,
            optimizer,
            extra,
            step,
            keep_last,
            progress,
            in_background=True,
        )
    )


class AsyncSave:
    """A save that a thread goes on with. The process does not end before it has."""

    def __init__(self, started: _Save) -> None:
        self._started, self._identity = started, started.identity
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fsdp_compat save")
        try:
            started.detach()
            background.begin(self._identity, self._thread)
            self._thread.start()
        except BaseException as error:
            background.end(self._identity, None)
            started.leave(error)
            raise

    def _run(self) -> None:
        try:
            self._path = self._started.write()
        except BaseException as error:  # raised by wait
            self._error = error
        finally:
            self._started.let_go()
            background.end(
                self._identity,
                None if self._error is None else f"{type(self._error).__name__}: {self._error}",
            )

    def done(self) -> bool:
        """True when it has ended, also with an error."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Return the checkpoint's directory when it stands. timeout: seconds, then TimeoutError.
        Raises what ``save`` raises."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the checkpoint is not complete after {timeout:g} s; it is still being written"
            )
        if self._error is not None:
            background.told(self._identity)
            raise self._error
        assert self._path is not None
        return self._path

    result = wait  # as a Future has it


@dataclasses.dataclass(frozen=True)
class _Report:
    """How a rank's part of the writing went."""

    leads: bool
    nbytes: int
    checksums: tuple[int, ...]
    problem: str | None

    def as_text(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @staticmethod
    def of_text(text: str) -> _Report:
        leads, nbytes, checksums, problem = json.loads(text)
        return _Report(leads, nbytes, tuple(checksums), problem)


class _Save:
    """One save, after everything that could be wrong with it has been looked at, and before
    anything is written."""

    def __init__(
        self,
        call: str,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Any,
        step: int,
        keep_last: int | None,
        progress: bool,
        in_background: bool = False,
    ) -> None:
        """Collective."""
        self.call = f"checkpoint.{call}"
        self._snapshot = Snapshot([], {})
        self._groups: list[NamedGroup] = []
        self._fresh: directory.Fresh | None = None  # of the rank that leads
        self._problem: Exception | None = None
        instances, self._ranks = ranks_of(model, self.call)
        try:
            if in_background:
                background.wait_for_the_last()
            shared: SharedOptimizer | None = None
            problem: Exception | None = None
            try:
                _check_arguments(self.call, folder, optimizer, step, keep_last, progress)
                require_rest(instances, self.call)
                self._target = directory.directory_of(Path(folder), step)
                if self._target.exists():
                    raise _exists(self._target, self.call)
                self._groups = named_groups(units_of(model))
                self._snapshot = take_snapshot(model, optimizer, extra, self._groups)
                shared = SharedOptimizer(model, optimizer, self._ranks)
            except Exception as error:
                problem = error
            self._step, self._keep_last, self._shows = (
                step,
                keep_last,
                progress and self._ranks.number == 0,
            )
            self._plan(problem, shared)
            self._make_directory()
            self._snapshot.take_common(self._fresh is not None)
        except BaseException as error:
            self.leave(error)
            raise

    def _plan(self, problem: Exception | None, shared: SharedOptimizer | None) -> None:
        """Agree on what is saved, and on which file holds which shard. Collective."""
        shards = [
            (named.mesh, named.writer, named.group.shard.rank)
            for named in self._groups
            if named.is_written_here
        ]
        identity = uuid.uuid4().hex if self._ranks.number == 0 else ""
        own = (
            identity,
            self._step,
            list(dict.fromkeys(shards)),
            None if shared is None else shared.told(),
        )
        told = all_ranks_or_raise(self._ranks, problem, own, self.call)
        assert shared is not None
        shared.require_alike([of_optimizer for *_, of_optimizer in told], self.call)
        self.identity = told[0][0]
        if any(step != self._step for _, step, *_ in told):
            self._ranks.box.close()
            raise UsageError(
                explain(
                    "Ranks save different steps.",
                    expected="one step on all ranks",
                    got=f"{[step for _, step, *_ in told]} by rank",
                    where=self.call,
                    fix="pass a step that all ranks count alike",
                )
            )
        axes: dict[tuple[int, int], dict[int, int]] = {}  # by (mesh, writer): files by shard
        for number, (_, _, its_shards, _) in enumerate(told):
            for mesh, writer, shard in its_shards:
                axes.setdefault((mesh, writer), {})[shard] = number
        order = sorted(axes)
        self._axes = tuple(
            tuple(number for _, number in sorted(axes[key].items())) for key in order
        )
        self._described = tuple(
            named.described(order.index((named.mesh, named.writer))) for named in self._groups
        )

    def _make_directory(self) -> None:
        """The first rank before the others, so that it leads where all see one file system.
        Collective."""
        self._directory = directory.fresh_name(self._target, self.identity)
        for turn in (self._ranks.number == 0, self._ranks.number != 0):
            try:
                if turn:
                    self._fresh = directory.make_fresh(self._directory)
            except OSError as error:
                self._problem = error
            self._ranks.exchange(None)

    def detach(self) -> None:
        """Go on with a copy of what is saved."""
        try:
            self._snapshot.detach()
        except Exception as error:  # all ranks have to hear of it
            self._problem = error

    def let_go(self) -> None:
        self._snapshot, self._groups = Snapshot([], {}), []

    def leave(self, error: BaseException) -> None:
        """This rank does not go on with the save: no other one is to wait for it."""
        self._ranks.box.leave(error)
        if self._fresh is not None:
            self._fresh.discard()

    def write(self) -> Path:
        """Write, and return the directory when it stands on all ranks."""
        try:
            outcome = self._ranks.box.conclude(self._do_part)
            self._ranks.box.close()
        except Lost as lost:
            raise self._lost(lost) from lost
        except BaseException as error:
            self.leave(error)
            raise
        finally:
            if self._fresh is not None:
                self._fresh.discard()  # unless it is published
        problems, stands = outcome
        if problems:
            raise (
                self._not_synced(problems) if stands else self._failed(problems)
            ) from self._problem
        return self._target

    def _do_part(self) -> object:
        """Do this rank's part; return on the first one what has become of the whole: (problems,
        whether it stands nevertheless)."""
        box, ranks = self._ranks.box, self._ranks
        if self._fresh is not None:
            with contextlib.suppress(OSError):
                directory.remove_left_overs(self._target.parent)
        box.post(self._write_report().as_text())
        if self._fresh is None and ranks.number:
            return None
        reports = [_Report.of_text(text) for text in box.read(range(ranks.count))]
        problems = [
            f"rank {n}: {report.problem}"
            for n, report in enumerate(reports)
            if report.problem is not None
        ]
        if self._fresh is not None:
            if problems:
                self._fresh.discard()
            box.post(
                json.dumps(("", False) if problems else self._publish(self._fresh, reports)),
                "leader",
            )
        if ranks.number:
            return None
        leaders = [n for n, report in enumerate(reports) if report.leads]
        published = [json.loads(text) for text in box.read(leaders, "leader")]
        if not leaders and not problems:
            problems = ["no rank could make a directory"]
        stands = not problems and all(stands for _, stands in published)
        return "; ".join([*problems, *(problem for problem, _ in published if problem)]), stands

    def _write_report(self) -> _Report:
        """Write this rank's file."""
        facts = Facts(0, ())
        if self._problem is None:
            try:
                facts = self._write_file(self._directory / file_name(self._ranks.number))
            except Exception as error:
                self._problem = error
        problem = (
            None if self._problem is None else f"{type(self._problem).__name__}: {self._problem}"
        )
        return _Report(self._fresh is not None, facts.nbytes, facts.checksums, problem)

    def _publish(self, fresh: directory.Fresh, reports: list[_Report]) -> tuple[str, bool]:
        """Complete the directory that this rank leads; return what went wrong, and whether the
        checkpoint stands."""
        try:
            fresh.publish(self._target, self._manifest(reports).as_text())
        except OSError as error:
            fresh.discard()
            return f"rank {self._ranks.number}: {type(error).__name__}: {error}", isinstance(
                error, directory.NotSynced
            )
        if self._keep_last is not None:
            with contextlib.suppress(
                OSError
            ):  # the new one stands, whatever becomes of the old ones
                directory.remove_older(self._target.parent, self._step, self._keep_last)
        return "", True

    def _failed(self, problems: str) -> CheckpointError:
        return CheckpointError(
            explain(
                "The checkpoint could not be saved.",
                expected=f"all {self._ranks.count} ranks to write their parts",
                got=problems,
                where=str(self._target),
                fix="see that there is space and permission; the checkpoints that stood before "
                "stand as they were",
            )
        )

    def _not_synced(self, problems: str) -> CheckpointError:
        return CheckpointError(
            explain(
                "The checkpoint stands, but it might not outlast a loss of power.",
                expected="its folder to be synced to the disk after the checkpoint got its name",
                got=problems,
                where=str(self._target),
                fix="look for errors of the disk; the checkpoint is complete, and no older one was "
                "removed",
            )
        )

    def _lost(self, lost: Lost) -> StateError:
        stands = "stands, complete" if os.path.exists(self._target) else "is not complete"
        return StateError(
            explain(
                "The ranks did not stay together while they saved.",
                expected=f"all {self._ranks.count} ranks to write their parts",
                got=str(lost),
                where=f"rank {self._ranks.number} of {self._ranks.count}, {self._target}",
                fix=f"look for the error of that rank; this checkpoint {stands}, and those before "
                "it stand as they were",
            )
        )

    def _manifest(self, reports: list[_Report]) -> Manifest:
        files = tuple(Facts(report.nbytes, report.checksums) for report in reports)
        return Manifest(
            self.identity,
            self._step,
            self._ranks.number,
            self._axes,
            self._described,
            files,
            self._snapshot.param_groups,
            versions(),
        )

    def _write_file(self, path: Path) -> Facts:
        self._snapshot.text.update(identity=self.identity, number=self._ranks.number)
        flats = {flat.name: flat for flat in self._snapshot.entries}
        described = [(flat.name, flat.dtype, flat.shape) for flat in flats.values()]
        head, entries = encode_header(described, as_text(self._snapshot.text))
        nbytes = max([len(head), *(entry.stop for entry in entries)])
        with progress_bar(self._shows, f"save step {self._step}", nbytes) as tick:
            writer = BlockWriter(path, tick)
            try:
                writer.write(memoryview(head))
                for entry in entries:
                    _write_flat(writer, flats[entry.name], entry.numel)
                return writer.finish()
            finally:
                writer.close()


_ZEROS = memoryview(bytes(BLOCK_NBYTES))


def _write_flat(writer: BlockWriter, flat: Flat, numel: int) -> None:
    """Write one entry: its pieces, and zeros where there are none."""
    position, size = 0, flat.dtype.itemsize
    for piece in sorted(flat.pieces, key=lambda piece: piece.start):
        _write_zeros(writer, (piece.start - position) * size)
        chunk = max(BLOCK_NBYTES // size, 1)
        values = piece.values
        if values.device.type == "cpu":
            writer.write(memory_of(values.contiguous()))
        else:
            for start in range(0, values.numel(), chunk):
                writer.write(memory_of(values[start : start + chunk].cpu()))
        position = piece.start + values.numel()
    _write_zeros(writer, (numel - position) * size)


def _write_zeros(writer: BlockWriter, nbytes: int) -> None:
    for start in range(0, nbytes, BLOCK_NBYTES):
        writer.write(_ZEROS[: min(BLOCK_NBYTES, nbytes - start)])


def _check_arguments(
    call: str, folder: Any, optimizer: Any, step: Any, keep_last: Any, progress: Any
) -> None:
    if not isinstance(folder, (str, os.PathLike)):
        raise errors.wrong_type("folder", "a path", folder, call)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise errors.wrong_type("optimizer", "a torch.optim.Optimizer, or None", optimizer, call)
    for name, value, least in (
        ("step", step, 0),
        ("keep_last", 1 if keep_last is None else keep_last, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise errors.wrong_type(name, "a whole number", value, call)
        if value < least:
            raise UsageError(
                explain(
                    f"{name} is too small.",
                    expected=f"at least {least}",
                    got=str(value),
                    where=call,
                    fix=f"pass {name}={least}",
                )
            )
    errors.require_bools(call, progress=progress)
    require_bar(progress, f"{call}(..., progress=True)")


def _exists(path: Path, call: str) -> FsdpCompatError:
    return UsageError(
        explain(
            "There is a checkpoint of this step already, and nothing is overwritten.",
            expected="a step that was not saved in this folder",
            got=f"{path.name}, which exists",
            where=f"{call}({str(path.parent)!r}, ...)",
            fix="save into another folder, or move that checkpoint away",
        )
    )
