"""``save`` and ``async_save``: the calls. `_save_job.SaveJob` does the work."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import _background as background
from ._save_job import SaveJob


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

    Collective: all ranks, those of tensor parallelism included. Each rank writes the shards it
    holds; no tensor is sent. The directory ``step-00000042`` appears once everything in it is
    durable. Existing checkpoints are never overwritten.

    Args:
        folder: where all checkpoints of the run lie; created if missing. It may be on a different
            file system for each node.
        model: contains sharded modules, of either front end.
        optimizer: of the model's parameters. Every parameter keeps the settings of its group,
            which must be the same on all ranks.
        extra: numbers, texts, tensors, and containers of these; each rank saves its own. The
            exact list of types is in `_values`.
        step: at least 0, and not saved in the folder yet.
        keep_last: keep this many of the newest complete checkpoints, this one included, and remove
            older ones once this one is complete.
        progress: show bytes and rate on the first rank; requires tqdm.

    Raises:
        UsageError: an argument is invalid; on all ranks, before anything is written.
        CheckpointError: a rank could not write, for example because the disk is full; on all ranks.
            Earlier checkpoints are unchanged. If this one is complete nevertheless, the message
            says so. Also raised, before anything is written, if an earlier ``async_save`` failed
            and its ``wait`` was never called.
        StateError: another rank has ended or was interrupted. Slow ranks are waited for.
    """
    return SaveJob(False, folder, model, optimizer, extra, step, keep_last, progress).write()


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
    """Like ``save``, but return as soon as the state has been copied; a thread writes the copy
    while training goes on.

    Collective. The copy is on the CPU and as large as this rank's shards. A process runs one save
    at a time: the next one waits for it. Arguments and errors are those of ``save``: errors about
    arguments are raised here, errors while writing from ``wait``. If ``wait`` is never called, the
    next save or load raises the error on all ranks, or it is printed when the process ends.
    """
    return AsyncSave(SaveJob(True, folder, model, optimizer, extra, step, keep_last, progress))


class AsyncSave:
    """A save that a thread is writing. The process does not end before the thread has."""

    def __init__(self, job: SaveJob) -> None:
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
            background.end(
                self._identity,
                None if self._error is None else f"{type(self._error).__name__}: {self._error}",
            )

    def done(self) -> bool:
        """Return True once the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete and return its directory. Raises what ``save``
        raises, and TimeoutError after ``timeout`` seconds."""
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
