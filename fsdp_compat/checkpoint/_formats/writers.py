"""What all writers share: options, values in the order of the file, and safetensors files with
checksums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ..._archive import blocks
from ..._archive.archive import StoredTensor
from ..._archive.blocks import BlockWriter, FileFacts
from ..._archive.header import encode_header
from ..._archive.reader import AT_ONCE_NBYTES, Files, read_box
from ..._comm.host_memory import memory_of
from ..._engine.device import to_host_later
from ..._layout.box import Box, cut_into_boxes
from ..._layout.spec import Interval
from ..._progress import Tick, no_tick


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """How a target is written. A format ignores what it has no use for."""

    world_size: int = 1  # ranks that the shards are cut for
    unit: str | None = None  # regular expression: parameters with the same match share a unit
    max_file_size: int = 5_000_000_000  # of tensors in one file
    step: int = 0
    tick: Tick = no_tick


def dtype_to_write(tensor: StoredTensor) -> torch.dtype:
    return tensor.dtype if tensor.written_as is None else tensor.written_as


def nbytes_to_write(tensor: StoredTensor) -> int:
    return tensor.numel * dtype_to_write(tensor).itemsize


# -- files that are written from start to end


@dataclasses.dataclass(frozen=True)
class Elements:
    """Row-major elements of a stored tensor, which are read when they are written."""

    tensor: StoredTensor
    part: Interval
    files: Files

    @staticmethod
    def all_of(tensor: StoredTensor, files: Files) -> Elements:
        return Elements(tensor, Interval(0, tensor.numel), files)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_to_write(self.tensor)

    def numel(self) -> int:
        return self.part.numel

    def chunks(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield (box, values to write), each in new memory: a second thread still reads it."""
        most = max(AT_ONCE_NBYTES // self.tensor.dtype.itemsize, 1)
        for box in cut_into_boxes(self.tensor.shape, self.part):
            for place in box.cut(most):
                yield place, read_box(self.tensor, place, self.files).to(self.dtype).contiguous()


@dataclasses.dataclass(frozen=True)
class FilePart:
    """Consecutive elements of a tensor in a file."""

    start: int  # the first element
    values: torch.Tensor | Elements  # 1-D

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yield the values in contiguous memory of the CPU."""
        values = self.values
        if isinstance(values, Elements):
            yield from (some for _, some in values.chunks())
        elif values.device.type == "cpu":
            yield values.contiguous()
        else:
            # For the block before, which is written while the next one is copied.
            wait: Callable[[], torch.Tensor] | None = None
            for some in values.split(max(blocks.BLOCK_NBYTES // values.dtype.itemsize, 1)):
                before, wait = wait, to_host_later(some)
                if before is not None:
                    yield before()
            if wait is not None:
                yield wait()


@dataclasses.dataclass
class FileTensor:
    """One tensor of a file: ``parts``, zeros between them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[FilePart]


def write_file(
    path: Path, tensors: Sequence[FileTensor], metadata: Mapping[str, str], tick: Tick
) -> FileFacts:
    """Write a new safetensors file, durably, in one go. tick: called with the bytes of
    parts, without the zeros between them."""
    parts = {tensor.name: tensor.parts for tensor in tensors}
    described = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    header, infos = encode_header(described, metadata)
    writer = BlockWriter(path, no_tick)
    try:
        writer.write(memoryview(header))
        for info in infos:
            position, size = 0, info.dtype.itemsize
            for part in sorted(parts[info.name], key=lambda part: part.start):
                _write_zeros(writer, (part.start - position) * size)
                writer.tick = tick
                for values in part.chunks():
                    writer.write(memory_of(values))
                writer.tick = no_tick
                position = part.start + part.values.numel()
            _write_zeros(writer, (info.numel - position) * size)
        return writer.finish()
    finally:
        writer.close()


_ZEROS = memoryview(bytes(1 << 20))


def _write_zeros(writer: BlockWriter, nbytes: int) -> None:
    for start in range(0, nbytes, len(_ZEROS)):
        writer.write(_ZEROS[: min(len(_ZEROS), nbytes - start)])
