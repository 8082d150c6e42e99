"""Files of torch.save: what they hold, without loading it.

A file is a zip archive with the pickled values in ``data.pkl`` and a record per storage, stored as
it is. Files of torch before 1.6 are several pickles and then the storages, one after the other."""

from __future__ import annotations

import dataclasses
import os
import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import CheckpointError
from .._blocks import damaged
from .._texts import MAX_TEXT_NBYTES, brief, open_file
from .archive import Checksum
from .pickle_machine import Refused
from .stored_storages import Storage, StorageKind
from .unpickling import load, load_prefix, refused

_ZIP = b"PK\x03\x04"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_START = b"\x80\x02\x8a\x0a" + _LEGACY_MAGIC.to_bytes(10, "little") + b"."
_LOCAL_HEADER_NBYTES = 30
_MAX_RECORDS = 10_000_000


def is_torch_file(path: Path) -> bool:
    """Return whether a file begins as torch.save's do. Raises OSError, and CheckpointError for what
    is not a regular file."""
    with open(open_file(path), "rb") as file:
        start = file.read(len(_LEGACY_START))
    return start.startswith(_ZIP) or start == _LEGACY_START


def read_torch_file(path: Path, *, ignored: Collection[str] = ()) -> Any:
    """Return the nested values of a file of torch.save, with StoredTensor leaves that read from it;
    DTensorRecord and ShardedTensorRecord for the parts of one rank. ignored: as for
    ``unpickling.load``. Raises CheckpointError and OSError."""
    with open(open_file(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        start = file.read(len(_LEGACY_START))
        if start == _LEGACY_START:
            file.seek(0)
            return _guarded(path, lambda: _legacy(file, path, nbytes, ignored))
        if not start.startswith(_ZIP):
            raise _not_torch(path, start)
        return _guarded(path, lambda: _zipped(file, path, 0, nbytes, ignored))


def records_at(path: Path, start: int, nbytes: int, *, ignored: Collection[str] = ()) -> Any:
    """Return the values of a torch.save file of ``nbytes`` that lies in a larger file at byte
    ``start``, as ``read_torch_file`` does."""
    with open(open_file(path), "rb") as file:
        end = os.fstat(file.fileno()).st_size
        if not 0 <= start <= start + nbytes <= end:
            raise refused(path, f"bytes {start} to {start + nbytes} of {end}")
        return _guarded(path, lambda: _zipped(file, path, start, nbytes, ignored))


def _guarded(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # whatever wrong values raise
        raise refused(path, error) from error


def _broken(path: Path, got: str) -> CheckpointError:
    return damaged(path, "a complete zip archive, as torch.save writes it", got)


def _not_torch(path: Path, start: bytes) -> CheckpointError:
    is_old = start[:1] in (b"\x80", b"(", b"}")
    return CheckpointError.of(
        f"{path.name} is not a file of torch.save.",
        expected="a zip archive, as torch.save writes them since torch 1.6",
        got="a pickle" if is_old else f"a file that begins with {start[:8]!r}",
        where=str(path),
        fix="save it again with torch.save; nothing in it was executed",
    )


# -- zip archives


class _Window:
    """A part of a file, as a file of its own for zipfile."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes = file, start, nbytes
        self._place = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._place, self._nbytes)[whence]
        if base + offset < 0:
            raise ValueError("a place before the file")
        self._place = base + offset
        return self._place

    def read(self, nbytes: int | None = -1) -> bytes:
        rest = max(self._nbytes - self._place, 0)
        nbytes = rest if nbytes is None or nbytes < 0 else min(nbytes, rest)
        self._file.seek(self._start + self._place)
        found = self._file.read(nbytes)
        self._place += len(found)
        return found


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A record of a zip archive. start: of its content, in the whole file. crc32: 0 if it was not
    computed, as ``torch.serialization.set_crc32_options(False)`` and ``skip_data`` have it."""

    start: int
    nbytes: int
    crc32: int

    @property
    def checksum(self) -> Checksum | None:
        return Checksum(self.start, self.nbytes, self.crc32) if self.crc32 else None


class _Archive:
    """The records of a zip archive that torch.save wrote, by their names without the directory that
    all have in common. Raises Refused for what torch does not write, and CheckpointError for a file
    that was cut off or changed."""

    def __init__(self, file: BinaryIO, path: Path, start: int, nbytes: int) -> None:
        self._file, self._path, self._start, self._nbytes = file, path, start, nbytes
        try:
            with zipfile.ZipFile(_Window(file, start, nbytes)) as archive:
                infos, end = archive.infolist(), archive.start_dir
        except Exception as error:  # of many classes, where the directory is damaged
            raise _broken(path, f"{brief(error)} (was it copied completely?)") from error
        if len(infos) > min(_MAX_RECORDS, nbytes // 46):
            raise Refused(f"{len(infos)} records")
        infos.sort(key=lambda info: info.header_offset)
        self._entries: dict[str, _Entry] = {}
        ends = [info.header_offset for info in infos[1:]] + [end]
        for info, limit in zip(infos, ends, strict=True):
            self._add(info, limit)

    def _add(self, info: zipfile.ZipInfo, limit: int) -> None:
        """limit: where the next record begins."""
        name = info.orig_filename
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise Refused(f"the compressed record {name!r}, which torch.save does not write")
        if info.flag_bits & 0x2041:
            raise Refused(f"the encrypted record {name!r}")
        head = self._read(info.header_offset, _LOCAL_HEADER_NBYTES)
        if head[:4] != _ZIP:
            raise _broken(self._path, f"the record {name!r} without a header")
        lengths = int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little")
        start = info.header_offset + _LOCAL_HEADER_NBYTES + sum(lengths)
        if self._read(info.header_offset + _LOCAL_HEADER_NBYTES, lengths[0]) != _raw_name(info):
            raise _broken(self._path, f"the record {name!r} under another name")
        if int.from_bytes(head[8:10], "little") != zipfile.ZIP_STORED:
            raise Refused(f"the compressed record {name!r}")
        if start + info.file_size > limit:
            got = f"the record {name!r} that reaches into the next one, or beyond the end"
            raise _broken(self._path, got)
        inner = name.partition("/")[2]
        if inner in self._entries:
            raise Refused(f"two records {inner!r}")
        self._entries[inner] = _Entry(self._start + start, info.file_size, info.CRC)

    def _read(self, start: int, nbytes: int) -> bytes:
        if not 0 <= start <= start + nbytes <= self._nbytes:
            raise _broken(self._path, f"a record at byte {start} of {self._nbytes}")
        self._file.seek(self._start + start)
        return self._file.read(nbytes)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise _broken(self._path, f"no record {name[:200]!r}")
        return self._entries[name]

    def content(self, name: str) -> bytes:
        entry = self.entry(name)
        if entry.nbytes > MAX_TEXT_NBYTES:
            raise Refused(f"{entry.nbytes} bytes in {name}; the limit is {MAX_TEXT_NBYTES}")
        self._file.seek(entry.start)
        content = self._file.read(entry.nbytes)
        if entry.crc32 not in (0, found := zlib.crc32(content)):
            raise damaged(self._path, f"checksum {entry.crc32:08x} of {name}", f"{found:08x}")
        return content


def _raw_name(info: zipfile.ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")


def _zipped(file: BinaryIO, path: Path, start: int, nbytes: int, ignored: Collection[str]) -> Any:
    archive = _Archive(file, path, start, nbytes)
    if "constants.pkl" in archive:
        raise Refused(
            "a TorchScript archive, which holds a program; save model.state_dict() with torch.save"
        )
    if "byteorder" in archive and archive.content("byteorder") != b"little":
        raise Refused("a file in big-endian byte order")
    kinds: dict[str, StorageKind] = {}

    def storage(reference: Any) -> Storage:
        kind, key, numel = _reference(reference)
        entry = archive.entry(f"data/{key}")
        known = kinds.setdefault(key, kind)
        wanted = numel * kind.itemsize
        if wanted > entry.nbytes or known != kind:
            raise Refused(f"storage {key[:50]!r} of {wanted} bytes in a record of {entry.nbytes}")
        return Storage(path, entry.start, wanted, kind.dtype, entry.checksum)

    return load(archive.content("data.pkl"), path, storage, ignored=ignored)


def _reference(reference: Any) -> tuple[StorageKind, str, int]:
    """Return class, key and number of elements of a storage that a pickle refers to."""
    if not isinstance(reference, tuple) or len(reference) < 5 or reference[0] != "storage":
        raise Refused("a reference to something else than a storage")
    _, kind, key, _, numel = reference[:5]
    if not isinstance(kind, StorageKind) or type(numel) is not int or numel < 0:
        raise Refused("a storage of an unknown class")
    return kind, str(key), numel


# -- files of torch before 1.6


def _legacy(file: BinaryIO, path: Path, nbytes: int, ignored: Collection[str]) -> Any:
    """The storages follow the pickles in the order of a list of their keys: each a number of
    elements in 8 bytes, and the elements."""
    data = file.read(min(nbytes, MAX_TEXT_NBYTES))
    kinds: dict[str, tuple[StorageKind, int]] = {}
    found: dict[str, Storage] = {}

    def storage(reference: Any) -> Storage:
        kind, key, numel = _reference(reference)
        if len(reference) > 5 and reference[5] is not None:
            raise Refused("a view of a storage, as torch 0.4 wrote them")
        if kinds.setdefault(key, (kind, numel)) != (kind, numel):
            raise Refused(f"storage {key[:50]!r} twice, and different")
        return found.get(key) or Storage(path, 0, numel * kind.itemsize, kind.dtype)

    place = len(_LEGACY_START)
    version, place = load_prefix(data, place, path)
    system, place = load_prefix(data, place, path)
    if version != 1001 or not isinstance(system, dict) or not system.get("little_endian"):
        raise Refused("another version of the format, or big-endian byte order")
    first = place
    _, place = load_prefix(data, first, path, storage, ignored=ignored)
    keys, place = load_prefix(data, place, path)
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(kinds):
        raise Refused("other storages than the values need")
    for key in keys:
        kind, numel = kinds[str(key)]
        file.seek(place)
        if int.from_bytes(file.read(8), "little") != numel:
            raise Refused(f"a storage of another size than {numel}")
        found[str(key)] = Storage(path, place + 8, numel * kind.itemsize, kind.dtype)
        place += 8 + numel * kind.itemsize
        if place > nbytes:
            raise Refused(f"storages of {place} bytes in a file of {nbytes}")
    # Now that the places are known, once more.
    return load_prefix(data, first, path, storage, ignored=ignored)[0]
