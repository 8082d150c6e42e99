"""Tensors in .distcp files: each chunk is a torch.save file of its own inside a larger one.

There are as many as ranks times parameters, and reading the directory and the pickle of each takes
longer than its values may. But chunks of one shape differ only in their values and checksums: so
one is read in full, and the others are compared with it. The checksum of the values is behind them
in files of torch.save, where their length is only known then, or in the header in front of them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from . import torch_files
from .archive import Piece, Span, StoredTensor
from .reading import Files

_LOCAL_HEADER = b"PK\x03\x04"
_HEADER_NBYTES = 30
_CRC = slice(14, 18)
_DESCRIPTOR = b"PK\x07\x08"  # in front of a checksum behind the values
_MAX_HEAD = 4096
_TAIL_NBYTES = 42  # the end of the zip's directory, which says where that begins
_MAX_TEMPLATES = 1000


@dataclasses.dataclass(frozen=True)
class _Template:
    """A chunk that was read in full: what all chunks of its kind begin and end with."""

    head: bytes  # up to the values, without their checksum
    header: int  # where the header of the values begins
    tail: bytes
    tensor: StoredTensor
    source: Span
    crc: int  # where the checksum of the values is


class EntryTemplates:
    """The tensors in the files of one checkpoint."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._by_nbytes: dict[int, list[_Template]] = {}
        self._num = 0

    def tensor_at(self, path: Path, start: int, nbytes: int) -> StoredTensor | None:
        """Return the tensor in a range of a file, or None if no torch.save file is there. The range
        is inside the file. Raises CheckpointError and OSError."""
        if nbytes < _TAIL_NBYTES:
            return None
        with self._files.descriptor(path) as descriptor:
            head = os.pread(descriptor, min(_MAX_HEAD, nbytes), start)
            tail = os.pread(descriptor, _TAIL_NBYTES, start + nbytes - _TAIL_NBYTES)
        if not head.startswith(_LOCAL_HEADER):
            return None
        for template in self._by_nbytes.get(nbytes, ()):
            end = len(template.head) + 4
            if tail == template.tail and _without_crc(head[:end], template.header) == template.head:
                return self._moved(template, path, start, start + end)
        found = torch_files.records_at(path, start, nbytes)
        if not isinstance(found, StoredTensor) or len(found.pieces) != 1:
            return None
        self._learn(found, head, tail, start, nbytes)
        return found

    def _moved(self, template: _Template, path: Path, start: int, values: int) -> StoredTensor:
        """Return the tensor of a chunk at byte ``start``, whose values begin at byte ``values``."""
        source, checksum = template.source, template.source.checksum
        if checksum is not None:
            crc32 = self._number(path, start + template.crc)
            checksum = dataclasses.replace(checksum, start=values, crc32=crc32) if crc32 else None
        span = Span(path, values, source.strides, checksum)
        (piece,) = template.tensor.pieces
        return dataclasses.replace(template.tensor, pieces=(Piece(piece.box, span),))

    def _number(self, path: Path, start: int) -> int:
        with self._files.descriptor(path) as descriptor:
            return int.from_bytes(os.pread(descriptor, 4, start), "little")

    def _learn(
        self, found: StoredTensor, head: bytes, tail: bytes, start: int, nbytes: int
    ) -> None:
        source = found.pieces[0].source
        if not isinstance(source, Span) or self._num == _MAX_TEMPLATES:
            return
        end = source.start - start
        header = head.rfind(_LOCAL_HEADER, 0, end)
        lengths = head[header + 26 : header + _HEADER_NBYTES]
        behind = (
            header
            + _HEADER_NBYTES
            + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
        )
        if header < 0 or end > len(head) or behind != end:  # not at the beginning of its storage
            return
        crc, checksum = header + _CRC.start, source.checksum
        if checksum is not None:
            places = (end + checksum.nbytes + len(_DESCRIPTOR), crc)
            crcs = [at for at in places if self._number(source.path, start + at) == checksum.crc32]
            if not crcs:
                return
            crc = crcs[0]
        rest = _without_crc(head[:end], header)
        template = _Template(rest, header, tail, found, source, crc)
        self._by_nbytes.setdefault(nbytes, []).append(template)
        self._num += 1


def _without_crc(head: bytes, header: int) -> bytes:
    return head[: header + _CRC.start] + head[header + _CRC.stop :]
