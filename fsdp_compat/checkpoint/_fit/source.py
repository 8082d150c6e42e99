"""A checkpoint of any format, as a rank loads it: by the model's names, with the reads planned so
far."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..._archive.archive import Archive, Checksum, Chunk, Span, StoredPiece, StoredTensor, is_user
from ..._archive.blocks import changed_meanwhile
from ..._archive.reader import Files, Read, read_all, reads_of, sample
from ..._archive.walk import leaves, map_values
from ..._engine.state_store import store_of
from ..._layout.box import Box
from ..._layout.spec import Interval
from ..._progress import progress_bar
from ..._state.held import HeldPart
from ...errors import CheckpointError
from .._arguments import Rename, renamed
from .._formats.manifest import MANIFEST, Manifest, file_name, read_manifest
from .._formats.native import EXTRA, EXTRA_STATE, NativeCheckpoint
from .._formats.optimizer_tree import name_optimizer
from .._formats.recognition import open_archive
from .._formats.tree import without_ddp
from .._ranks.ranks import Ranks

_OPENED_CHUNKS = 8  # most of a tensor's, to tell copies apart: ranks open those they read, too
_SAMPLED_PARTS = 64  # of a tensor without checksums, so that what one step changes is seen


class Source:
    """What a checkpoint holds, by the names of the model, and what this rank reads of it. Reads are
    collected first; then ``check`` verifies their checksums, and ``read`` carries them out.

    native: the checkpoint, if it is one: what each rank's file has is read as needed."""

    def __init__(self, archive: Archive, native: NativeCheckpoint | None = None) -> None:
        self.archive, self.path, self._native = archive, archive.path, native
        self.files = Files(archive.checksums, compares_records=False)
        self.reads: list[Read] = []
        self.values: dict[str, Any] = {}  # StoredTensors and extra state, by the names of the model
        self._states: dict[str, str] = {}  # by a parameter's name in the model: the archive's

    def take_names(self, rename: Rename | None, call: str, is_of_ddp: bool = False) -> None:
        """Enter the names of the model. is_of_ddp: remove DistributedDataParallel's prefix from
        extra state. Raises UsageError for a ``rename`` that gives none."""
        its, extra_state = self.archive, self._extra_state()
        if is_of_ddp:
            extra_state = {
                re.sub(r"^(module\.)+", "", n): value for n, value in extra_state.items()
            }
        tensors = its.tensors | {name: its.tensors[first] for name, first in its.aliases.items()}
        new_names = renamed([*tensors, *extra_state], rename, call)
        self.values = {new: (extra_state | tensors)[old] for old, new in new_names.items()}
        states = [n for n in self._state_names() if not is_user(its.states.get(n, {}))]
        self._states = {new: old for old, new in renamed(states, rename, call).items()}
        with_state = {*states}
        for old, new in new_names.items():
            if (first := its.aliases.get(old)) in with_state:
                self._states.setdefault(new, first)

    def _state_names(self) -> Iterator[str]:
        """Yield the archive's names of parameters with states or settings, and of other states."""
        yield from self.archive.states
        if self._native is not None:
            yield from self._native.head(self._native.manifest.common).other_states
        for group in self.archive.param_groups or ():
            yield from group["params"]

    # -- what there is

    def _extra_state(self) -> dict[str, Any]:
        """Return the extra state of modules, by name."""
        its = self.archive.extra
        if isinstance(found := its.get(EXTRA_STATE), dict):
            return found
        inside = (its, *(value for value in its.values() if isinstance(value, dict)))
        return {
            name: value
            for some in inside
            for name, value in some.items()
            if isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"
        }

    def param_groups(self) -> list[dict[str, Any]] | None:
        """Return the optimizer's groups by the names of the model, or None without an optimizer."""
        if self.archive.param_groups is None:
            return None
        first, names = self.archive.aliases, dict[str, list[str]]()
        for new, old in self._states.items():
            names.setdefault(first.get(old, old), []).append(new)
        with Files(self.archive.checksums) as files:  # settings are used before the others' checks
            groups = read_all(self.archive.param_groups, files)
        return [
            {key: its for key, its in group.items() if key != "param_names"}
            | {"params": [n for old in group["params"] for n in names.get(first.get(old, old), ())]}
            for group in groups
        ]

    def number_optimizer(self, names: Sequence[Sequence[str]]) -> None:
        """Name the saved optimizer's numbered parameters, in groups of the same sizes, in this
        order. Raises CheckpointError."""
        tensors = {n: each for n, each in self.values.items() if isinstance(each, StoredTensor)}
        shapes = {name: each.shape for name, each in tensors.items()}
        try:
            name_optimizer(self.archive, [name for group in names for name in group], shapes)
        except ValueError as error:
            raise CheckpointError.of(
                "The optimizer state is numbered, and does not fit the optimizer.",
                expected="an optimizer with the same parameters in the same groups and order",
                got=str(error),
                where=str(self.path),
                fix="build the optimizer as it was when it was saved, or pass optimizer=None",
            ) from error
        self._states = {name: name for name in self._state_names()}

    def _state_name(self, held: HeldPart) -> str | None:
        return next((self._states[name] for name in held.names if name in self._states), None)

    def state_of(self, held: HeldPart) -> dict[Any, Any]:
        """Return the optimizer state of a parameter, by key."""
        if (name := self._state_name(held)) is None:
            return {}
        native = self._native
        return self.archive.states.get(name, {}) if native is None else native.state_of(name)

    def rank_local_states(
        self, held: HeldPart
    ) -> tuple[dict[Any, Any], dict[Any, dict[Interval, Any]]]:
        """Return the states of this rank's part of a parameter; or those of the parts, by their
        elements, that other ranks had of it when they were saved."""
        if self._native is None or (name := self._state_name(held)) is None:
            return {}, {}
        share = None if held.group is None else held
        is_flattened = held.group is not None and store_of(held.group).is_flattened
        return self._native.rank_local_states(name, share, is_flattened)

    def user_states(self) -> dict[str, Any]:
        """Return the states that belong to no parameter."""
        its = self.archive.states
        return {n: self.planned(state[None]) for n, state in its.items() if is_user(state)}

    def with_state(self) -> set[str]:
        """Return the parameters, of formats other than the native one, that have a state."""
        return {new for new, old in self._states.items() if self.archive.states.get(old)}

    def strange_states(self) -> list[str]:
        """Return the names, in the model, of optimizer states without a tensor in the archive."""
        strange = {*self.archive.strange_states}
        return [new for new, old in self._states.items() if old in strange]

    def extra(self, ranks: Ranks) -> Any:
        """Return everything that is neither model nor optimizer: None if there is nothing."""
        if self._native is not None:
            manifest = self._native.manifest
            number = ranks.number if len(manifest.files) == ranks.count else 0
            return self._native.extra_of(manifest.common if manifest.shares_extra else number)
        values = {key: value for key, value in self.archive.extra.items() if key != EXTRA_STATE}
        return values.get(EXTRA) if values.keys() == {EXTRA} else values or None

    def left_out(self) -> list[str]:
        """Return what was not saved, according to what was read so far."""
        return [] if self._native is None else self._native.left_out()

    # -- what is read

    def plan(
        self,
        tensor: StoredTensor,
        boxes: Iterable[tuple[Box, torch.Tensor]],
        through: torch.dtype | None = None,
    ) -> None:
        """Read boxes of a tensor to their places."""
        for box, target in boxes:
            if not box.sizes:  # the tensor may have shape (1,) where it was saved
                box, target = Box.of_whole(tensor.shape), target.view(tensor.shape)
            self.reads += reads_of(tensor, box, target, through)

    def plan_zeros(self, target: torch.Tensor) -> None:
        self.reads.append(Read(torch.zeros((), dtype=target.dtype), target.dtype, target))

    def planned(self, value: Any) -> Any:
        """Return a value with memory in place of stored tensors, which will be read into it."""
        return map_values(value, self._target)

    def _target(self, leaf: Any) -> Any:
        if not isinstance(leaf, StoredTensor):
            return leaf
        target = torch.empty(leaf.shape, dtype=leaf.dtype)
        self.reads += reads_of(leaf, Box.of_whole(leaf.shape), target)
        return target.numpy() if leaf.is_array else target

    def copy(self) -> tuple[str, int, int]:
        """Return the name of this rank's copy of the files, of which inode times cannot be copied;
        and the bytes of the zip records to read, and of all."""
        if self._native is not None:
            return self._native.manifest.identity, 0, 0
        paths = {piece.path for piece in self._pieces() if piece.path is not None}
        facts = map(os.stat, sorted({self.path, *paths}))
        name = repr([(its.st_ino, its.st_size, its.st_mtime_ns, its.st_ctime_ns) for its in facts])
        own = sum(each.nbytes for _, each in _records(each.source for each in self.reads))
        total = sum(nbytes for nbytes, *_ in self._records_of_all())
        return hashlib.sha256(name.encode()).hexdigest(), own, total

    def check(self, number: int, copies: Sequence[tuple[str, int, int]], shown: bool) -> str:
        """Compare the checksums of all blocks to read. Of zip records, compare those to read or, if
        that is less, a share of all: the other ranks with this copy of the files, by ``copies``,
        compare the rest. Return what tells the content of several copies apart."""
        alike = [rank for rank, (name, *_) in enumerate(copies) if name == copies[number][0]]
        shares = max(copies[rank][1] for rank in alike) * len(alike) > copies[number][2]
        records = _records(each.source for each in self.reads)
        if shares:
            of_all = self._records_of_all()
            own = sorted(of_all)[alike.index(number) :: len(alike)]
            records = _records(of_all[each].source for each in own)
        total = self.files.nbytes_to_check(self.reads) + sum(each.nbytes for _, each in records)
        with progress_bar(shown and total > 0, f"check {self._title}", total) as tick:
            self.files.check(self.reads, tick)
            for path, checksum in records:
                self.files.compare(path, checksum, tick)
        if len(alike) == len(copies):
            return ""
        return self._content() if self._native is None else self._native.manifest.identity

    def _content(self) -> str:
        """Return a digest of all plain values, and of the checksums or a sample of tensors."""
        its, digest = self.archive, hashlib.sha256()
        for leaf in leaves([its.tensors, its.aliases, its.states, its.param_groups, its.extra]):
            value: Any = leaf[1]
            if isinstance(value, StoredTensor):
                pieces = [*value.pieces]
                are_open = not any(isinstance(piece.place, Chunk) for piece in pieces)
                some = pieces if are_open else pieces[:: len(pieces) // _OPENED_CHUNKS + 1]
                found = [getattr(piece.source, "checksum", None) for piece in some]
                known: Any = [each.crc32 for each in found if each]
                known = known if all(found) else sample(value, self.files, _SAMPLED_PARTS)
                value = value.dtype, value.shape, [piece.box for piece in pieces], known
            elif isinstance(value, io.BytesIO):
                value = value.getvalue()
            elif isinstance(value, (set, frozenset)):
                value = sorted(map(repr, value))
            digest.update(repr((leaf[0], value)).encode())
        return digest.hexdigest()

    def _pieces(self) -> Iterator[StoredPiece]:
        return (piece for _, each in self.archive.all_tensors() for piece in each.pieces)

    def _records_of_all(self) -> dict[Any, StoredPiece]:
        """Return a piece of each zip record and unopened chunk, by what they are to all ranks."""
        return {piece.record: piece for piece in self._pieces() if piece.record is not None}

    def read(self, shown: bool) -> None:
        """Read everything. Raises CheckpointError if the files changed after ``check``."""
        total = sum(each.target.numel() * each.dtype.itemsize for each in self.reads)
        with progress_bar(shown, f"load {self._title}", total) as tick, self.files:
            try:
                self.files.read(self.reads, tick, anew=True)
            except CheckpointError as error:
                raise changed_meanwhile(error, self.path) from error
        self.reads.clear()

    @property
    def _title(self) -> str:
        return "weights" if self.archive.step is None else f"step {self.archive.step}"


def _records(sources: Iterable[Any]) -> list[tuple[Path, Checksum]]:
    """Return the zip records of spans, each once, the smallest first."""
    spans = (each for each in sources if isinstance(each, Span))
    found = {(each.path, each.checksum) for each in spans if each.checksum}
    return sorted(found, key=lambda each: (each[1].nbytes, each[0], each[1].start))


def open_source(
    path: Path,
    manifest: Manifest | None,
    shapes: Callable[[], Archive],
    rename: Rename | None,
    ignore_class: Collection[str],
    call: str,
) -> Source:
    """Return the checkpoint at a path. manifest: of it, if it was read. shapes: of the model, for
    formats without."""
    path = path.parent if path.name == MANIFEST else path
    is_native = (path / MANIFEST).exists() or (path / file_name(0)).exists()
    if is_native or not path.exists():  # which raises
        native = NativeCheckpoint(path, manifest or read_manifest(path))
        source = Source(native.outline(), native)
        source.take_names(rename, call)
        return source
    known = shapes()
    source = Source(open_archive(path, known, ignore_class, keep_module=True))
    source.take_names(rename, call)
    if not source.values.keys() & known.tensors.keys():
        without_ddp(source.archive)
        source.take_names(rename, call, is_of_ddp=True)
    return source
