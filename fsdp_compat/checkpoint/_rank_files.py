"""The ranks' files of a native checkpoint: writing one, and reading runs of elements from several.

A file is a safetensors file. Its tensors are whole shards. The rest is in a text in its metadata,
which `_snapshot` makes and `_head` parses."""

from __future__ import annotations

from pathlib import Path

import torch

from .._comm.host_memory import memory_of
from .._layout.pieces import Rows
from ..errors import CheckpointError
from ._blocks import (
    BLOCK_NBYTES,
    BlockWriter,
    FileFacts,
    ReadRequest,
    changed_meanwhile,
    check,
    damaged,
    merged,
    nbytes_to_check,
    read_checked,
)
from ._head import Head, parse_head
from ._header import encode_header, is_known, length_of_header, parse_header
from ._manifest import file_name, read_manifest
from ._progress import progress_bar
from ._snapshot import FileTensor, Snapshot, as_text
from ._texts import brief


def write_rank_file(path: Path, snapshot: Snapshot, title: str, shown: bool) -> FileFacts:
    """Write what a rank saves to a new file, durably. title, shown: of the progress bar."""
    tensors = {tensor.name: tensor for tensor in snapshot.tensors}
    described = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors.values()]
    header, infos = encode_header(described, as_text(snapshot.text))
    nbytes = max([len(header), *(info.stop for info in infos)])
    with progress_bar(shown, title, nbytes) as tick:
        writer = BlockWriter(path, tick)
        try:
            writer.write(memoryview(header))
            for info in infos:
                _write_tensor(writer, tensors[info.name], info.numel)
            return writer.finish()
        finally:
            writer.close()


_ZEROS = memoryview(bytes(BLOCK_NBYTES))


def _write_tensor(writer: BlockWriter, tensor: FileTensor, numel: int) -> None:
    """Write one tensor: its parts, and zeros between them."""
    position, size = 0, tensor.dtype.itemsize
    for part in sorted(tensor.parts, key=lambda part: part.start):
        _write_zeros(writer, (part.start - position) * size)
        chunk = max(BLOCK_NBYTES // size, 1)
        values = part.values
        if values.device.type == "cpu":
            writer.write(memory_of(values.contiguous()))
        else:
            for start in range(0, values.numel(), chunk):
                writer.write(memory_of(values[start : start + chunk].cpu()))
        position = part.start + values.numel()
    _write_zeros(writer, (numel - position) * size)


def _write_zeros(writer: BlockWriter, nbytes: int) -> None:
    for start in range(0, nbytes, BLOCK_NBYTES):
        writer.write(_ZEROS[: min(BLOCK_NBYTES, nbytes - start)])


class RankFiles:
    """The files of one checkpoint, and what this rank requests from them.

    Requests are collected first; ``check`` then verifies their blocks, and ``read`` copies them to
    their targets.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, read_manifest(path)
        self.parameters = self.manifest.parameters()
        self._heads: dict[int, Head] = {}
        self._requests: dict[int, list[ReadRequest]] = {}  # by number of the file
        self._whole: set[tuple[int, str]] = set()  # (file, tensor) that is requested whole

    def head(self, number: int) -> Head:
        """Return a file's head. It is read immediately, and parsed after its checksums match."""
        if number not in self._heads:
            path, facts = self.path / file_name(number), self._facts(number)
            first = self._checked(number, 0, min(BLOCK_NBYTES, facts.nbytes))
            stop = 8 + length_of_header(first[:8], facts.nbytes, path)
            text = first[8:stop] + (
                self._checked(number, len(first), stop - len(first)) if stop > len(first) else b""
            )
            try:
                head = parse_head(*parse_header(text, facts.nbytes, path))
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise damaged(path, "the head that a rank writes", brief(error)) from error
            if (head.identity, head.number) != (self.manifest.identity, number):
                got = f"file {head.number} of save {head.identity[:40]}"
                raise damaged(path, f"file {number} of save {self.manifest.identity[:40]}", got)
            self._heads[number] = head
        return self._heads[number]

    def is_here(self, number: int) -> bool:
        """False for a file that is on the disk of another node."""
        return (self.path / file_name(number)).exists()

    def _checked(self, number: int, start: int, nbytes: int) -> bytes:
        content = torch.empty(nbytes, dtype=torch.uint8)
        request = ReadRequest(start, content)
        read_checked(self.path / file_name(number), self._facts(number), [request], _nothing)
        return bytes(memory_of(content))

    def request(
        self, number: int, name: str, dtype: torch.dtype, start: int, target: torch.Tensor
    ) -> None:
        """Request elements of a tensor of ``dtype``, from element ``start`` on, as many as
        ``target`` (1-D) has."""
        numel = target.numel()
        self.request_rows(number, name, dtype, Rows(numel, 1, start, numel, 0, numel), target)

    def request_rows(
        self, number: int, name: str, dtype: torch.dtype, rows: Rows, target: torch.Tensor
    ) -> None:
        """Request rows of a tensor of ``dtype``. target: 1-D, what the rows are parts of."""
        stop = rows.start + rows.span
        info = self.head(number).tensors.get(name)
        size = dtype.itemsize
        described_as = dtype if is_known(dtype) else torch.uint8
        if info is None or info.dtype != described_as or stop * size > info.nbytes:
            raise damaged(
                self.path / file_name(number),
                f"{stop} elements of {dtype} under {name!r}",
                "no such tensor" if info is None else f"{info.nbytes} bytes of {info.dtype}",
            )
        self._requests.setdefault(number, []).append(
            ReadRequest.of_rows(info.start, rows, target, dtype)
        )

    def request_tensor(self, number: int, name: str) -> torch.Tensor:
        """Request a whole tensor; return the memory that it will be read to."""
        info = self.head(number).tensors.get(name)
        if info is None or (number, name) in self._whole:  # a save refers to each tensor once
            got = "no such tensor" if info is None else "a second reference to it"
            raise damaged(self.path / file_name(number), f"a tensor {name!r}", got)
        self._whole.add((number, name))
        target = torch.empty(info.shape, dtype=info.dtype)
        self.request(number, name, info.dtype, 0, target.view(-1))
        return target

    def _facts(self, number: int) -> FileFacts:
        return self.manifest.files[number]

    def left_out(self) -> list[str]:
        """Return the names of states and settings that were not saved, according to the heads
        read so far."""
        return sorted({name for head in self._heads.values() for name in head.left_out})

    def check(self, shown: bool) -> None:
        """Check the blocks of all requests."""
        total = sum(
            nbytes_to_check(self._facts(number), requests)
            for number, requests in self._requests.items()
        )
        with progress_bar(shown, f"check step {self.manifest.step}", total) as tick:
            for number, requests in sorted(self._requests.items()):
                check(self.path / file_name(number), self._facts(number), requests, tick)

    def read(self, shown: bool) -> None:
        """Read all requests to their targets. Raises CheckpointError if the files are no longer
        what ``check`` saw."""
        total = sum(each.nbytes for requests in self._requests.values() for each in requests)
        with progress_bar(shown, f"load step {self.manifest.step}", total) as tick:
            for number, requests in sorted(self._requests.items()):
                try:
                    read_checked(
                        self.path / file_name(number), self._facts(number), merged(requests), tick
                    )
                except CheckpointError as error:
                    raise changed_meanwhile(error, self.path) from error
        self._requests.clear()


def _nothing(nbytes: int) -> None:
    return None
