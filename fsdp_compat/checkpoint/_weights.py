"""A model's weights in safetensors files as others write and read them: whole tensors under their
names, in one file or in several with an index. Every rank reads and writes its own bytes of them;
nothing is gathered."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import errors
from .._comm.host_memory import memory_of
from .._engine.state_store import store_of
from .._layout.spec import Interval
from .._state.model_units import names_before, units_of
from .._state.unmanaged import load_unmanaged, unmanaged_state
from ..errors import CheckpointError, UsageError, explain
from ._blocks import (
    BLOCK_NBYTES,
    Tick,
    Wanted,
    changed_meanwhile,
    merged,
    read_plain,
    sync_directory,
)
from ._header import METADATA, Entry, encode_header, is_known, read_header
from ._progress import progress_bar, require_bar
from ._ranks import Ranks, all_ranks_or_raise, as_ours, ranks_of, require_rest
from ._snapshot import NamedGroup, named_groups
from ._texts import brief, parse_json, read_text, text_in

__all__ = ["load_safetensors", "save_safetensors"]

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"

Rename = Callable[[str], str | None]


@dataclasses.dataclass(frozen=True)
class _Held:
    """A run of one tensor's elements, in row-major order, that this rank holds."""

    names: tuple[str, ...]  # of the tensor in the model
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: Interval
    values: torch.Tensor  # 1-D: a view of where they are
    writes: bool  # this rank is the one that writes them


def load_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> None:
    """Load weights from safetensors files into the model; each rank reads the bytes of its own
    part, straight to where they belong.

    Collective: all ranks. The model may have been built on the meta device before it was wrapped.
    Beside its shard a rank needs one buffer of 4 MiB. Of tied parameters one name is enough.

    Args:
        path: a file, an index (``model.safetensors.index.json``), or a directory with an index or
            with files.
        model: with FullyShardedDataParallel in it.
        rename: from a name in the files to the name in the model before wrapping; None for what is
            to be left out.
        dtype: round floating-point values to this dtype on their way to the dtype of the
            parameters.
        progress: show bytes and rate on the first rank; needs tqdm.

    Raises:
        UsageError: an argument cannot work.
        CheckpointError: files are missing or incomplete, or do not hold the model's names and
            shapes; on all ranks, before anything has changed. One that says that the values cannot
            be read comes later.
    """
    call = "checkpoint.load_safetensors"
    instances, ranks = ranks_of(model, call)
    with ranks.taking_part():
        problem: BaseException | None = None
        plan: list[tuple[_Held, Path, Entry]] = []
        others: dict[str, torch.Tensor] = {}
        groups: list[NamedGroup] = []
        try:
            _check_arguments(call, path, rename, dtype, progress)
            require_rest(instances, call)
            groups = named_groups(units_of(model))
            plan, others = _plan_of_reading(Path(path), model, groups, rename, call)
        except Exception as error:
            problem = as_ours(error, "The weights could not be read.", path, "nothing was loaded")
        places = [(held.names[0], file.name, entry.name, entry.start) for held, file, entry in plan]
        _require_alike(
            all_ranks_or_raise(ranks, problem, _digest(places, dtype), call), ranks, call
        )
        total = sum(held.part.numel * entry.dtype.itemsize for held, _, entry in plan)
        try:
            with (
                progress_bar(progress and ranks.number == 0, "load weights", total) as tick,
                torch.no_grad(),
            ):
                for file in dict.fromkeys(file for _, file, _ in plan):
                    read_plain(
                        file,
                        merged(
                            [
                                _wanted(held, entry, dtype)
                                for held, its, entry in plan
                                if its == file
                            ]
                        ),
                        tick,
                    )
            load_unmanaged(model, others)
        except CheckpointError as error:
            problem = changed_meanwhile(error, path)
        except Exception as error:
            was_loaded = "a part of the weights was loaded before: load all again"
            problem = as_ours(error, "The weights could not be read.", path, was_loaded)
        all_ranks_or_raise(ranks, problem, None, call)


def save_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = 5_000_000_000,
    progress: bool = False,
) -> list[Path]:
    """Save the model's weights and persistent buffers as safetensors files in directory ``path``;
    return the files.

    Collective: all ranks, which see one file system. One file is called ``model.safetensors``;
    several have an index beside them. Each rank writes the bytes of its own part. Tied parameters
    are written once, under the first of their names. The files get their names when everything in
    them is durable; files that are there already are not overwritten.

    Args:
        path: of the directory; made if there is none.
        model: with FullyShardedDataParallel in it.
        rename: from a name in the model before wrapping to the name in the files; None for what is
            to be left out.
        dtype: of floating-point tensors in the files; default: their own.
        max_file_nbytes: begin another file before one holds more than so many bytes of tensors; a
            larger tensor has a file alone.
        progress: show bytes and rate on the first rank; needs tqdm.

    Raises:
        UsageError: an argument cannot work, or the files exist; on all ranks, before anything is
            written.
        CheckpointError: a rank could not write; on all ranks. The files are not there then.
    """
    call = "checkpoint.save_safetensors"
    instances, ranks = ranks_of(model, call)
    with ranks.taking_part():
        problem: BaseException | None = None
        plan: _Output | None = None
        try:
            _check_arguments(call, path, rename, dtype, progress)
            if (
                isinstance(max_file_nbytes, bool)
                or not isinstance(max_file_nbytes, int)
                or max_file_nbytes < 1
            ):
                raise errors.wrong_type(
                    "max_file_nbytes", "a number of bytes, at least 1", max_file_nbytes, call
                )
            require_rest(instances, call)
            plan = _Output(
                Path(path), model, rename, dtype, max_file_nbytes, call, ranks.number == 0
            )
            _refuse_existing(Path(path), call)
        except Exception as error:
            problem = as_ours(
                error, "The weights could not be saved.", path, "no file has its name yet"
            )
        told = all_ranks_or_raise(
            ranks, problem, (_digest(plan and plan.described()), uuid.uuid4().hex), call
        )
        _require_alike([digest for digest, _ in told], ranks, call)
        assert plan is not None
        token = told[0][1]
        for turn in (
            plan.make if ranks.number == 0 else None,
            plan.write,
        ):  # all others find what the first has made
            try:
                if turn is not None and problem is None:
                    turn(token, progress and ranks.number == 0)
            except Exception as error:
                problem = as_ours(
                    error, "The weights could not be saved.", path, "no file has its name yet"
                )
            failed = ranks.exchange(problem is not None)
            if any(failed):
                break
        if ranks.number == 0:
            try:
                if not any(failed):
                    plan.publish(token)
            except OSError as error:
                problem = as_ours(
                    error,
                    "The weights could not be saved.",
                    path,
                    "take away what has its name already",
                )
            plan.remove(token)
        all_ranks_or_raise(ranks, problem, None, call)
        return [Path(path) / name for name in plan.names]


def _refuse_existing(path: Path, call: str) -> None:
    existing = sorted(
        file.name
        for pattern in (ONE_FILE, INDEX, "model-*-of-*.safetensors")
        for file in path.glob(pattern)
    )
    if existing:
        raise UsageError(
            explain(
                "There are weights already, and nothing is overwritten.",
                expected="a directory without weights",
                got=f"{existing[0]}, which exists",
                where=f"{call}({str(path)!r}, ...)",
                fix="save into another directory, or move these files away",
            )
        )


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _require_alike(digests: list[str], ranks: Ranks, call: str) -> None:
    """Raise UsageError, on all ranks, if they would not do the same."""
    if len(set(digests)) > 1:
        raise UsageError(
            explain(
                "The ranks do not do the same.",
                expected="the same files, names and dtypes on all ranks",
                got=f"{len(set(digests))} different plans on {ranks.count} ranks",
                where=call,
                fix="pass the same arguments, and a path of one file system, on all ranks",
            )
        )


def _check_arguments(call: str, path: Any, rename: Any, dtype: Any, progress: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise errors.wrong_type("path", "a path", path, call)
    if rename is not None and not callable(rename):
        raise errors.wrong_type("rename", "a function from a name to a name, or None", rename, call)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise errors.wrong_type("dtype", "a floating-point dtype, or None", dtype, call)
    errors.require_bools(call, progress=progress)
    require_bar(progress, f"{call}(..., progress=True)")


def _renamed(name: str, rename: Rename | None, call: str) -> str | None:
    found = name if rename is None else rename(name)
    if found is not None and not isinstance(found, str):
        raise errors.wrong_type("what rename returns", f"a name for {name!r}, or None", found, call)
    return found


def _managed(groups: list[NamedGroup]) -> Iterator[_Held]:
    """Yield what this rank holds of every parameter of ``groups``; runs may be empty."""
    for named in groups:
        store = store_of(named.group)
        for index in named.params:
            yield _Held(
                named.names(index),
                store.local_shape(index),
                store.dtype,
                store.part(index, store.rank),
                store.local_part(index),
                named.is_written_here,
            )


def _others(model: nn.Module, groups: list[NamedGroup], writes: bool) -> Iterator[_Held]:
    """Yield buffers and unmanaged parameters, which every rank holds whole; shared ones once."""
    names: dict[tuple[object, ...], list[str]] = {}
    values: dict[str, torch.Tensor] = {}
    for name, value in unmanaged_state(model).items():
        if isinstance(value, torch.Tensor):
            same = value.data_ptr() or name, tuple(value.shape), value.stride(), value.dtype
            names.setdefault(same, []).append(name)
            values[name] = value.detach()
    for its in names.values():
        value = values[its[0]]
        yield _Held(
            tuple(its),
            tuple(value.shape),
            value.dtype,
            Interval(0, value.numel()),
            value.reshape(-1),
            writes,
        )


# -- reading


def _plan_of_reading(
    path: Path, model: nn.Module, groups: list[NamedGroup], rename: Rename | None, call: str
) -> tuple[list[tuple[_Held, Path, Entry]], dict[str, torch.Tensor]]:
    """Return what to read: this rank's runs, each with its file and entry; and of what is no part
    of a shard the state dict that will be read into. Raises CheckpointError unless all of it is
    there."""
    found: dict[str, tuple[Path, Entry]] = {}
    for name, place in _tensors_of(path).items():
        ours = _renamed(name, rename, call)
        if ours is not None:
            if ours in found:
                raise UsageError(
                    explain(
                        "Two tensors of the files have one name in the model.",
                        expected="a name of its own for each",
                        got=f"{ours!r} for {name!r}, too",
                        where=call,
                        fix="let rename tell them apart, or return None for one of them",
                    )
                )
            found[ours] = place
    others: dict[str, torch.Tensor] = {}
    everything = list(_managed(groups))
    for held in _others(
        model, groups, False
    ):  # what is there may be a copy in another dtype than the module computes with
        values = torch.empty_like(held.values)
        everything.append(dataclasses.replace(held, values=values))
        others.update((name, values.view(held.shape)) for name in held.names)
    plan: list[tuple[_Held, Path, Entry]] = []
    wrong: list[str] = []
    known: set[str] = set()
    for held in everything:
        known.update(held.names)
        named = [name for name in held.names if name in found]
        name = named[0] if named else ""
        if not named:
            wrong.append(f"missing: {held.names[0]}")
            continue
        file, entry = found[name]
        if entry.shape != held.shape:
            wrong.append(
                f"{name}: shape {list(entry.shape)} in {file.name}, {list(held.shape)} in the model"
            )
        elif (entry.dtype.is_floating_point, entry.dtype.is_complex) != (
            held.dtype.is_floating_point,
            held.dtype.is_complex,
        ):
            wrong.append(f"{name}: {entry.dtype} in {file.name}, {held.dtype} in the model")
        plan.append((held, file, entry))
    wrong += [f"not in the model: {name}" for name in found if name not in known]
    if wrong:
        more = f" and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise CheckpointError(
            explain(
                "The files hold the weights of another model.",
                expected="the names and shapes of the model's parameters and persistent buffers",
                got="; ".join(wrong[:20]) + more,
                where=str(path),
                fix="pass rename, a function from the names in the files to those in the model, or "
                "to None for what is left out",
            )
        )
    return plan, others


def _tensors_of(path: Path) -> dict[str, tuple[Path, Entry]]:
    """Return every tensor of a file, of the files of an index, or of a directory, by the name it
    has there."""
    index = path / INDEX if path.is_dir() else path
    files: list[Path]
    wanted: Mapping[str, str] | None = None
    if path.is_dir() and not index.exists():
        files = sorted(path.glob("*.safetensors"))
    elif index.suffix == ".json":
        try:
            wanted = {
                text_in(name): _beside(file)
                for name, file in parse_json(read_text(index))["weight_map"].items()
            }
            files = [index.parent / name for name in dict.fromkeys(wanted.values())]
        except FileNotFoundError:
            files = []
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                explain(
                    "The index cannot be read.",
                    expected="a JSON text with 'weight_map', from names to files beside it",
                    got=brief(error),
                    where=str(index),
                    fix="copy it again, or pass the directory without it to read all files in it",
                )
            ) from error
    else:
        files = [path]
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise CheckpointError(
            explain(
                "There are no such weights.",
                expected="a safetensors file, an index, or a directory with either",
                got=f"no file {missing[0].name}" if missing else "none",
                where=str(path),
                fix="check the path; all files of an index lie beside it",
            )
        )
    found: dict[str, tuple[Path, Entry]] = {}
    for file in files:
        for name, entry in read_header(file)[0].items():
            if wanted is not None and wanted.get(name) != file.name:
                continue
            if name in found:
                raise CheckpointError(
                    explain(
                        "Two files hold a tensor of one name.",
                        expected="each tensor in one file of the directory",
                        got=f"{name!r} in {found[name][0].name} and in {file.name}",
                        where=str(path),
                        fix="pass one file, or take away what does not belong to these weights",
                    )
                )
            found[name] = file, entry
    if wanted is not None:
        lost = [name for name in wanted if name not in found]
        if lost:
            raise CheckpointError(
                explain(
                    "The index and the files do not belong together.",
                    expected=f"{lost[0]!r} in {wanted[lost[0]]}",
                    got=f"none there; {len(lost)} of {len(wanted)} tensors are elsewhere or "
                    "missing",
                    where=str(index),
                    fix="copy index and files from one place",
                )
            )
    return found


def _beside(name: Any) -> str:
    """Return the name of a file that lies beside an index. Raises TypeError, ValueError for
    anything else."""
    if Path(text_in(name)).name != name:
        raise ValueError(f"{name!r}, which is not the name of a file")
    return str(name)


def _wanted(held: _Held, entry: Entry, dtype: torch.dtype | None) -> Wanted:
    return Wanted(
        entry.start + held.part.start * entry.dtype.itemsize, held.values, entry.dtype, dtype
    )


# -- writing


@dataclasses.dataclass(frozen=True)
class _File:
    head: bytes
    entries: dict[str, Entry]  # by name in the model


class _Output:
    """Files to be: which tensor lies where in which of them. The same on all ranks."""

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        rename: Rename | None,
        dtype: torch.dtype | None,
        max_file_nbytes: int,
        call: str,
        is_first: bool,
    ) -> None:
        self._path = path
        order = {name: position for position, name in enumerate(names_before(model))}
        groups = named_groups(units_of(model))
        everything = [*_managed(groups), *_others(model, groups, is_first)]
        everything.sort(key=lambda held: order.get(held.names[0], len(order)))
        self._held: list[_Held] = []
        files: list[dict[str, tuple[str, torch.dtype, tuple[int, ...]]]] = [{}]
        names: set[str] = set()
        nbytes = self._total_nbytes = 0
        for held in everything:
            name = _renamed(held.names[0], rename, call)
            if name is None:
                continue
            if name == METADATA:
                raise errors.wrong_type(
                    "what rename returns", f"a name for {held.names[0]!r}", name, call
                )
            if name in names:
                raise UsageError(
                    explain(
                        "Two tensors of the model have one name in the files.",
                        expected="a name of its own for each",
                        got=f"{name!r} for {held.names[0]!r}, too",
                        where=call,
                        fix="let rename tell them apart, or return None for one of them",
                    )
                )
            names.add(name)
            its_dtype = dtype if dtype is not None and held.dtype.is_floating_point else held.dtype
            if not is_known(its_dtype):
                raise UsageError(
                    explain(
                        "A dtype cannot be said in a safetensors file.",
                        expected="a dtype that the format knows",
                        got=f"{its_dtype} of {held.names[0]!r}",
                        where=call,
                        fix="pass dtype=torch.float32 or another common one; checkpoint.save keeps "
                        "every dtype",
                    )
                )
            size = math.prod(held.shape) * its_dtype.itemsize
            if nbytes and nbytes + size > max_file_nbytes:
                files.append({})
                nbytes = 0
            files[-1][held.names[0]] = name, its_dtype, held.shape
            nbytes += size
            self._total_nbytes += size
            self._held.append(held)
        self._files: dict[str, _File] = {}
        for number, tensors in enumerate(files):
            head, entries = encode_header(list(tensors.values()), {"format": "pt"})
            by_name = {entry.name: entry for entry in entries}
            title = (
                ONE_FILE
                if len(files) == 1
                else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            )
            self._files[title] = _File(
                head, {ours: by_name[name] for ours, (name, _, _) in tensors.items()}
            )

    @property
    def names(self) -> list[str]:
        """The names of the files, the index among them."""
        return [*self._files, *([INDEX] if len(self._files) > 1 else [])]

    def _unnamed(self, name: str, token: str) -> Path:
        return self._path / f".{name}.{token}"

    def described(self) -> list[object]:
        """What all ranks have to see alike."""
        return [(name, file.head, list(file.entries)) for name, file in self._files.items()]

    def make(self, token: str, shown: bool) -> None:
        """Make the files, with their heads and their lengths, under names that nobody looks for."""
        self._path.mkdir(parents=True, exist_ok=True)
        for name, file in self._files.items():
            with open(self._unnamed(name, token), "xb") as made:
                made.write(file.head)
                made.truncate(
                    max([len(file.head), *(entry.stop for entry in file.entries.values())])
                )

    def write(self, token: str, shown: bool) -> None:
        """Write this rank's bytes, durably."""
        mine = [held for held in self._held if held.writes]
        total = sum(held.values.nbytes for held in mine)
        with progress_bar(shown, "save weights", total) as tick:
            for name, file in self._files.items():
                descriptor = os.open(self._unnamed(name, token), os.O_WRONLY)
                try:
                    for held in mine:
                        if (entry := file.entries.get(held.names[0])) is not None:
                            _write_run(descriptor, held, entry, tick)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def publish(self, token: str) -> None:
        """Give the files their names, the index last."""
        for name in self._files:
            self._unnamed(name, token).rename(self._path / name)
        if len(self._files) > 1:
            where = {
                entry.name: name
                for name, file in self._files.items()
                for entry in file.entries.values()
            }
            index = {"metadata": {"total_size": self._total_nbytes}, "weight_map": where}
            unnamed = self._unnamed(INDEX, token)
            with open(unnamed, "x", encoding="utf-8") as text:
                json.dump(index, text, indent=2)
                text.flush()
                os.fsync(text.fileno())
            unnamed.rename(self._path / INDEX)
        sync_directory(self._path)

    def remove(self, token: str) -> None:
        """Take away what ``write`` has left."""
        for name in (*self._files, INDEX):
            with contextlib.suppress(OSError):
                self._unnamed(name, token).unlink()


def _write_run(descriptor: int, held: _Held, entry: Entry, tick: Tick) -> None:
    size = entry.dtype.itemsize
    start, chunk = (
        entry.start + held.part.start * size,
        BLOCK_NBYTES // max(size, held.dtype.itemsize),
    )
    for at in range(0, held.values.numel(), chunk):
        values = held.values[at : at + chunk]
        _write_at(
            descriptor, memory_of(values.to("cpu", entry.dtype).contiguous()), start + at * size
        )
        tick(values.nbytes)


def _write_at(descriptor: int, data: memoryview, start: int) -> None:
    while data:
        num_written = os.pwrite(descriptor, data, start)
        data, start = data[num_written:], start + num_written
