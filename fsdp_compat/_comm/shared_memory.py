"""Memory of this process that the other ranks of its host can read: blocks of an arena, and the
view of a peer's.

The arena is a few large sparse files without a name (memfd), mapped shared. A peer opens them
through ``/proc``, so nothing has to be agreed on beforehand, nothing depends on the size of
/dev/shm, and nothing is left behind by a process that is killed. A block is handed out as a tensor
whose storage is exactly as large as it is, and comes back when that storage dies. Its pages are
kept for the next block: a page fault costs several times as much as filling the page.

Where any part of this cannot be had (no Linux, no /proc, another host, user or pid namespace) there
are no neighbours, and messages travel as everywhere else. Where no more can be had (no descriptors,
no addresses), new tensors are ordinary memory, and what lies there is sent. What a neighbour says
of its memory is checked before anything is read: the file is one of its arena and sealed, so that
it cannot shrink, and the place lies inside it.

A child made by fork sees the memory as it was at the fork, as it would see ordinary memory. A
private mapping of a shared file does not do that, because it shows what is written to the file
later. So nothing is written to the file later. A fork *freezes* every file that holds a live block:
parent and child both map it privately from then on, which makes each copy the pages that it writes
to, and the parent puts a new file under the addresses of its chunk. A block *thaws*, by a copy into
the new file, when a message is sent from it again. This makes a fork cheap, however often it
happens: a few system calls and no copy, no memory for a child that never touches the weights, and
one copy of this rank's shards for all the forks between two gathers. Three simpler ways were
weighed. A copy at each fork costs every worker of a DataLoader the memory and the time of a whole
copy. Pages that are missing in the child (MADV_DONTFORK) end it with a segmentation fault. And
torch has no storage that raises when it is read, at least not in builds for the CPU. Children that
are forked by C code run no Python hooks: in them the blocks are missing, so that they cannot read
torn weights or write to their parent's, but end with a segmentation fault if they try."""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import stat
import struct
import sys
import threading
import typing
import weakref

import torch

if sys.platform != "win32":
    import fcntl

__all__ = [
    "CARD_NBYTES",
    "Location",
    "MIN_NBYTES",
    "Neighbour",
    "attach_peer",
    "bump_epoch",
    "copy_of",
    "empty",
    "forget_old_files",
    "has_old_files",
    "identity",
    "locate",
    "zeros",
]

MIN_NBYTES = (
    1 << 19
)  # what is smaller is not worth a block: it is there sooner if it is sent, at 3 and 4 ranks
# pages of freed blocks that wait for the next block; what is freed beyond goes back to the system
KEPT_NBYTES = 1 << 30
CHUNK_NBYTES = (
    1 << 30
)  # of address space, at least: a chunk is as large as all before it, so that there are few
PAGE_NBYTES = mmap.PAGESIZE  # blocks begin and end at pages, so that each can be mapped by itself

_TOKEN_NBYTES = 16
_CARD = struct.Struct(
    f"16sQqq{_TOKEN_NBYTES}s"
)  # boot, pid namespace, pid, descriptor of the control file, token
CARD_NBYTES = _CARD.size
_NO_CARD = bytes(CARD_NBYTES)
_HEADER = struct.Struct(f"{_TOKEN_NBYTES}sq")  # at the beginning of every file: token, number
_SENT = -1  # in the place of a chunk: the message does not lie in one, it follows


class Location(typing.NamedTuple):
    """Where something lies, in words that a neighbour understands."""

    epoch: int  # of the arena, when it was said
    chunk: int  # index
    number: int  # of the file under the chunk: no two files of an arena have the same one
    fd: int  # of that file, in its process
    offset: int  # bytes

    @property
    def is_sent(self) -> bool:
        """True if it lies nowhere where a neighbour could read it."""
        return self.chunk == _SENT


class _File:
    """Memory without a name. It is sealed at its size: pages that a reader has mapped stay
    there."""

    def __init__(self, nbytes: int, token: bytes, number: int) -> None:
        """Raises OSError where the system does not give it."""
        self.fd, self.number = (
            os.memfd_create("fsdp_compat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING),
            number,
        )
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(
            self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        os.pwrite(self.fd, _HEADER.pack(token, number), 0)


class _Chunk:
    """A range of addresses, and the file under it, whose pages come when they are written to.

    ``frozen`` blocks lie in a file of before, as private memory (see the beginning of this module).
    Without a file, which a fork may leave behind, all blocks are private, and no more are handed
    out.
    """

    def __init__(self, index: int, nbytes: int, token: bytes) -> None:
        """Raises OSError where the system does not give it."""
        self.index, self.nbytes, self._token, self._numbers = (
            index,
            nbytes,
            token,
            itertools.count(1),
        )
        self.file: _File | None = _File(nbytes, token, next(self._numbers))
        self.old_file: _File | None = (
            None  # of the last fork: a peer may have been told of it and not have opened it yet
        )
        self.address = _map(None, nbytes, _SHARED, self.file.fd, 0)
        weakref.finalize(self, _unmap_in, os.getpid(), self.address, nbytes).atexit = False
        _advise(self.address, nbytes, _DONTFORK)
        self.view = memoryview((ctypes.c_ubyte * nbytes).from_address(self.address)).cast("B")
        self.taken: dict[int, int] = {}  # by start: size
        self.frozen: list[int] = []  # starts, in order
        self.free = [(PAGE_NBYTES, nbytes)]  # (start, end), by start; neighbours are joined
        self.top = PAGE_NBYTES  # what lies above was never written to: it is zero

    @property
    def fd(self) -> int:
        assert self.file is not None
        return self.file.fd

    def take(self, nbytes: int) -> int | None:
        """Return the offset of the first place that is large enough."""
        for index, (start, end) in enumerate(self.free):
            if end - start >= nbytes:
                self.free[index : index + 1] = (
                    [(start + nbytes, end)] if end - start > nbytes else []
                )
                self.taken[start] = nbytes
                return start
        return None

    def put(self, start: int, nbytes: int) -> None:
        del self.taken[start]
        if self.file is None:
            return
        if start in self.frozen:
            self._share(start, start + nbytes)
            self.frozen.remove(start)
        end = start + nbytes
        index = bisect.bisect(self.free, (start, end))
        if index < len(self.free) and self.free[index][0] == end:
            end = self.free.pop(index)[1]
        if index and self.free[index - 1][1] == start:
            index -= 1
            start = self.free.pop(index)[0]
        self.free.insert(index, (start, end))

    def forget_pages(self, start: int, nbytes: int) -> None:
        """Give pages of the file back to the system. They read as zeros then. Those of a frozen
        block are not the file's."""
        if start not in self.frozen:
            with contextlib.suppress(OSError):  # it is frozen just now
                _advise(self.address + start, nbytes, _REMOVE)

    def freeze(self) -> int:
        """See the beginning of this module. Return how many bytes of free blocks were forgotten.

        Raises OSError where the system does not give what it takes. Then the chunk has no file, and
        no block of it is shared again.
        """
        live = sorted(self.taken.keys() - set(self.frozen))
        if not live or self.file is None:
            return 0
        old, free = self.file, self.free
        self.frozen, self.file, self.free = (
            sorted(self.taken),
            None,
            [],
        )  # should anything below fail
        for start, end in _joined([(start, start + self.taken[start]) for start in live]):
            _map(
                self.address + start,
                end - start,
                mmap.MAP_PRIVATE | _FIXED | _NORESERVE,
                old.fd,
                start,
            )
        new = _File(self.nbytes, self._token, next(self._numbers))
        forgotten = 0
        for start, end in free:
            if start < self.top:
                forgotten += min(end, self.top) - start
                _advise(self.address + start, min(end, self.top) - start, _REMOVE)
            _map(self.address + start, end - start, _SHARED | _FIXED, new.fd, start)
            _advise(self.address + start, end - start, _DONTFORK)
        self.file, self.free, self.old_file = new, free, old
        self.top = max(start + size for start, size in self.taken.items())
        return forgotten

    def thaw(self, offset: int) -> bool:
        """Make sure that the block with this offset lies in the file. False where it cannot."""
        index = bisect.bisect(self.frozen, offset) - 1
        if self.file is None:
            return False
        if index < 0 or offset >= self.frozen[index] + self.taken[self.frozen[index]]:
            return True
        start = self.frozen[index]
        end = start + self.taken[start]
        try:
            written = start
            while written < end:
                written += os.pwrite(self.file.fd, self.view[written:end], written)
            self._share(start, end)
        except OSError:
            return False
        del self.frozen[index]
        return True

    def _share(self, start: int, end: int) -> None:
        assert self.file is not None
        _map(self.address + start, end - start, _SHARED | _FIXED, self.file.fd, start)
        _advise(self.address + start, end - start, _DONTFORK)


class _Arena:
    """The blocks of one process."""

    def __init__(self) -> None:
        self.pid, self.token = os.getpid(), os.urandom(_TOKEN_NBYTES)
        self.chunks: list[_Chunk] = []
        self.control: _File | None = None
        self.epoch = _epoch_in(
            memoryview(bytearray(PAGE_NBYTES))
        )  # nobody else's, until there is a control file
        self.is_closed = not _is_supported()
        self.lock = threading.RLock()
        # A block may die inside of any allocation, this one's too: what is returned waits here for
        # the next one that takes.
        self._returned: collections.deque[tuple[_Chunk, int, int]] = collections.deque()
        self._kept_nbytes = 0  # about: pages of free blocks

    def open(self) -> bool:
        """Make sure that there is a first chunk; False where there can be none."""
        if not self.chunks and not self.is_closed:
            with self.lock:
                self.is_closed = not self._grow(0)
        return bool(self.chunks)

    def take(self, nbytes: int, zero: bool) -> memoryview | None:
        """Return a block, which comes back when nothing holds it any more, or None where there is
        no more room."""
        if self.is_closed and not self.chunks:
            return None
        size = _in_pages(nbytes)
        with self.lock:
            self._take_back()
            found = self._find(size) or (self._find(size) if self._grow(size) else None)
            if found is None:
                return None
            chunk, start = found
            written = min(start + size, chunk.top) - start
            chunk.top = max(chunk.top, start + size)
            if written > 0:
                self._kept_nbytes = max(self._kept_nbytes - written, 0)
        block = chunk.view[start : start + nbytes]
        weakref.finalize(block, self._give_back, chunk, start, size).atexit = False
        if zero and written > 0:
            ctypes.memset(chunk.address + start, 0, min(written, nbytes))
        return block

    def _take_back(self) -> None:
        while self._returned:
            chunk, start, size = self._returned.popleft()
            chunk.put(start, size)

    def _find(self, size: int) -> tuple[_Chunk, int] | None:
        for chunk in self.chunks:
            start = chunk.take(size)
            if start is not None:
                return chunk, start
        return None

    def _grow(self, size: int) -> bool:
        """Add a chunk; False where the system does not give one, now."""
        if self.is_closed:
            return False
        needed = _in_pages(size) + PAGE_NBYTES
        for nbytes in (
            max(needed, CHUNK_NBYTES, sum(chunk.nbytes for chunk in self.chunks)),
            needed,
        ):
            try:
                if self.control is None:
                    self._make_control()
                self.chunks.append(_Chunk(len(self.chunks), nbytes, self.token))
                return True
            except OSError:
                continue
        return False

    def _make_control(self) -> None:
        control = _File(PAGE_NBYTES, self.token, 0)
        try:
            page = mmap.mmap(control.fd, PAGE_NBYTES)
        except ValueError as error:
            raise OSError(str(error)) from error
        self.epoch, self.control = _epoch_in(memoryview(page)), control

    def _give_back(self, chunk: _Chunk, start: int, size: int) -> None:
        if os.getpid() != self.pid:
            _unmap_in(os.getpid(), chunk.address + start, size)
            return
        if self._kept_nbytes + size > KEPT_NBYTES:
            chunk.forget_pages(start, size)
        else:
            self._kept_nbytes += size
        self._returned.append((chunk, start, size))

    def chunk_of(self, address: int) -> _Chunk | None:
        return next(
            (
                chunk
                for chunk in self.chunks
                if chunk.address <= address < chunk.address + chunk.nbytes
            ),
            None,
        )

    def freeze(self) -> None:
        self._take_back()
        for chunk in self.chunks:
            with contextlib.suppress(OSError):  # the fork goes on
                self._kept_nbytes = max(self._kept_nbytes - chunk.freeze(), 0)

    def leave(self) -> None:
        """In a child: keep no file of the parent's but those that its private memory is made of."""
        for chunk in self.chunks:
            chunk.file = chunk.old_file = None
        self.control, self.epoch = None, _epoch_in(memoryview(bytearray(PAGE_NBYTES)))


def _is_supported() -> bool:
    return (
        sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
    )


def _epoch_in(control: memoryview) -> memoryview:
    return control[_HEADER.size : _HEADER.size + 8].cast("q")


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges, which are in order, with those in one that touch each other."""
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found


# -- mappings at given addresses, for which Python has no words

_SHARED, _FIXED, _NORESERVE, _REMOVE, _DONTFORK = 0x01, 0x10, 0x4000, 9, 10  # Linux


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _map(
    address: int | None,
    nbytes: int,
    flags: int,
    fd: int,
    offset: int,
    access: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> int:
    found = _libc().mmap(address, nbytes, access, flags, fd, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"no mapping of {nbytes} bytes")
    return int(found)


def _advise(address: int, nbytes: int, advice: int) -> None:
    if _libc().madvise(address, nbytes, advice):
        raise OSError(ctypes.get_errno(), f"madvise {advice} of {nbytes} bytes")


def _unmap_in(pid: int, address: int, nbytes: int) -> None:
    """In a child other things may have come to lie where nothing of this was mapped."""
    if os.getpid() == pid:
        _libc().munmap(address, nbytes)


# -- forks

_arena = _Arena()


def _before_fork() -> None:
    _arena.lock.acquire()  # held until the fork is done: nobody gets or thaws a block meanwhile
    _arena.freeze()


def _after_fork_in_parent() -> None:
    _arena.lock.release()


def _after_fork_in_child() -> None:
    global _arena
    parents, _arena = _arena, _Arena()
    parents.leave()
    _neighbours.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)


# -- this process's


def empty(numel: int, dtype: torch.dtype, *, zero: bool = False) -> torch.Tensor:
    """Return a new tensor [numel] on the CPU without values, in a block where it is large enough
    and can be had."""
    nbytes = numel * dtype.itemsize
    block = _arena.take(nbytes, zero) if nbytes >= MIN_NBYTES else None
    if block is None:
        return (
            torch.zeros(numel, dtype=dtype, device="cpu")
            if zero
            else torch.empty(numel, dtype=dtype, device="cpu")
        )
    return torch.frombuffer(block, dtype=dtype)


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The same, of zeros. Pages that nobody has written to yet are not touched."""
    return empty(numel, dtype, zero=True)


def copy_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the values of a 1-D tensor, in ``dtype``, in a block if one can be had."""
    return empty(tensor.numel(), dtype or tensor.dtype).copy_(tensor)


def can_share() -> bool:
    """True if blocks can be had."""
    return _arena.open()


def locate(tensor: torch.Tensor) -> Location | None:
    """Where a contiguous tensor lies in this process's blocks; None: elsewhere. One without
    elements lies anywhere."""
    if not tensor.numel():
        return Location(now(), 0, 0, 0, 0) if _arena.chunks else None
    address = tensor.data_ptr()
    chunk = _arena.chunk_of(address)
    if chunk is None or not tensor.is_contiguous():
        return None
    offset = address - chunk.address
    # before the question: a fork in another thread freezes first, and what the old file holds is
    # right until then
    file = chunk.file
    if chunk.frozen:
        with _arena.lock:
            if not chunk.thaw(offset):
                return None
            file = chunk.file
    return None if file is None else Location(now(), chunk.index, file.number, file.fd, offset)


def place_of(tensor: torch.Tensor) -> Location:
    """The same, for a neighbour who is told: where it can read ``tensor``, or that it is sent."""
    return locate(tensor) or Location(now(), _SENT, 0, 0, 0)


def now() -> int:
    """The epoch of this process's blocks."""
    return _arena.epoch[0]


def bump_epoch() -> None:
    """From now on blocks are no longer what this process has said of them. Who reads one looks at
    the epoch afterwards."""
    _arena.epoch[0] += 1


def has_old_files() -> bool:
    """True if files are kept since the last fork for neighbours that were told of them and have not
    opened them yet."""
    return any(chunk.old_file is not None for chunk in _arena.chunks)


def forget_old_files() -> None:
    """No neighbour has still to read what it was told of."""
    for chunk in _arena.chunks:
        chunk.old_file = None


# -- other processes'


def identity() -> bytes:
    """What another process needs to find this one's memory. CARD_NBYTES."""
    if not can_share() or _arena.control is None:
        return _NO_CARD
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = bytes.fromhex(file.read().strip().replace("-", ""))
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except (OSError, ValueError):
        return _NO_CARD
    return _CARD.pack(boot, namespace, os.getpid(), _arena.control.fd, _arena.token)


class Neighbour:
    """Another process whose blocks this one can read."""

    def __init__(self, pid: int, control: int, token: bytes) -> None:
        """Raises OSError where they cannot be read, or are not those that the token belongs to."""
        self._pid, self._token = pid, token
        self._chunks: dict[int, _Mapped] = {}  # by index: the file that was told of last
        self._control = self._open(control, 0)
        self._epoch = _epoch_in(self._control.view)

    def _open(self, fd: int, number: int) -> _Mapped:
        path = f"/proc/{self._pid}/fd/{fd}"
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a device may do something
            raise OSError(f"descriptor {fd} of process {self._pid} is not a file")
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(f"descriptor {fd} of process {self._pid} is a file that may shrink")
            found = _Mapped(file, number)
        finally:
            os.close(file)
        if found.view[: _HEADER.size] != _HEADER.pack(self._token, number):
            raise OSError(f"descriptor {fd} of process {self._pid} is other memory")
        return found

    @property
    def epoch(self) -> int:
        """Where it has changed since a location was said, what lies there may be something else."""
        return self._epoch[0]

    def view(self, place: Location, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what lies there, [numel], to be read only. Raises OSError where it cannot be read,
        or not any more."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        chunk = self._chunks.get(place.chunk)
        if chunk is None or chunk.number != place.number:
            chunk = self._chunks[place.chunk] = self._open(place.fd, place.number)
        nbytes = numel * dtype.itemsize
        if (
            not PAGE_NBYTES <= place.offset <= len(chunk.view) - nbytes
            or place.offset % dtype.itemsize
        ):
            raise OSError(
                f"{nbytes} bytes at {place.offset} do not lie in a chunk of {len(chunk.view)} bytes"
            )
        # Of its own size: a view of the whole chunk would look like gigabytes to whoever adds up
        # what tensors hold.
        held: typing.Any = (ctypes.c_ubyte * nbytes).from_address(chunk.address + place.offset)
        held.chunk = chunk
        return torch.frombuffer(held, dtype=dtype)


class _Mapped:
    """A file of another process, without a descriptor, and without a mapping in children, which
    would keep its memory."""

    def __init__(self, file: int, number: int) -> None:
        self.number, nbytes = number, os.fstat(file).st_size
        self.address = _map(None, nbytes, _SHARED, file, 0, mmap.PROT_READ)
        weakref.finalize(self, _unmap_in, os.getpid(), self.address, nbytes).atexit = False
        _advise(self.address, nbytes, _DONTFORK)
        self.view = memoryview((ctypes.c_ubyte * nbytes).from_address(self.address)).cast("B")


_neighbours: weakref.WeakValueDictionary[bytes, Neighbour] = weakref.WeakValueDictionary()


def attach_peer(its_card: bytes) -> Neighbour | None:
    """Return the process of a card as one whose memory can be read from here, or None where it
    cannot."""
    own = identity()
    if _NO_CARD in (its_card, own) or own[:24] != its_card[:24]:
        return None
    found = _neighbours.get(its_card)
    if found is None:
        _, _, pid, control, token = _CARD.unpack(its_card)
        try:
            found = _neighbours[its_card] = Neighbour(pid, control, token)
        except (OSError, ValueError):
            return None
    return found
