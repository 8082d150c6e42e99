"""``Transport``, the base class of all transports, what they share, and that of one rank.

To add a transport: derive from ``Transport`` in a file of its own, and choose it in
communicator.py."""

from __future__ import annotations

import abc
import collections
import dataclasses
import datetime
import enum
import hashlib
import itertools
import pickle
import typing
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import StateError
from .board import progress
from .board.calls import Activity, MessageId
from .host_memory import memory_of
from .mesh import Axis, named


class Kind(enum.IntEnum):
    """What a message carries. The tag of a message is the tag of its group plus the kind."""

    GATHER = 0
    REDUCE = 1
    REPLICATE = 2  # the first half of an all-reduce: each rank sums one slice
    REPLICATE_BACK = 3  # the second half: the sums return to all ranks


KIND_TEXTS: dict[int, str] = {
    Kind.GATHER: "the all-gather",
    Kind.REDUCE: "the reduction",
    Kind.REPLICATE: "the all-reduce",
    Kind.REPLICATE_BACK: "the second half of the all-reduce",
}
VALUES = (1 << 18) - len(Kind)  # the largest tag: that of small collectives, which are not counted
_DIGEST_NBYTES = 16


class Traffic:
    """Collectives and bytes that one rank has sent along one axis, by kind."""

    def __init__(self) -> None:
        self.counts, self.nbytes = collections.Counter[Kind](), collections.Counter[Kind]()

    def add(self, kind: Kind, nbytes: int) -> None:
        self.counts[kind] += 1
        self.nbytes[kind] += nbytes

    def clear(self) -> None:
        self.counts.clear()
        self.nbytes.clear()


class Work(typing.Protocol):
    """A message in flight, as in torch.distributed."""

    def wait(self, timeout: datetime.timedelta) -> bool:
        """Return False if the wait was aborted. Raises RuntimeError if it has failed."""


class ByRank(typing.Protocol):
    """A tensor per rank."""

    def __getitem__(self, rank: int, /) -> Tensor: ...


@dataclasses.dataclass(eq=False, slots=True)
class Handle:
    """A message in flight."""

    works: list[Work]  # to wait for
    received: ByRank = ()  # the tensors that the message is received into
    held: typing.Any = None  # what must stay alive until the works have completed
    message: MessageId = (0, 0, 0)
    divisor: Tensor | None = None  # of the sum of an all-reduce
    ended: bool = False  # the works have completed


class ShardMapping(typing.Protocol):
    """The shards of all ranks, side by side in the memory of this process."""

    full: Tensor  # [ranks * S]

    def put(self, rank: int, file: int, offset: int) -> None:
        """Map the shard of a rank, which lies in a file. Raises OSError if the system refuses."""

    def keep(self) -> None:
        """Keep the present values until ``forget_writes``, whatever is written to the shards."""

    def forget_writes(self) -> None:
        """Show the shards in ``full`` again."""

    def has_writes(self) -> bool:
        """True if this process has written to ``full``, by any means."""


class Transport(abc.ABC):
    """Communication along one axis. By default a received message needs no further wait, memory is
    ordinary memory, and nothing is mapped.

    Collective: the axis, for every method except ``allocate``, ``settle``, ``new_tag``,
    ``addresses``, ``unfinished_gather``, ``before_step`` and ``require_working``.

    ``what`` names what is waited for, for errors. A wait that fails raises StateError, and so does
    every later use: all communication of this process has failed then. Only ``settle`` returns at
    once, because nothing is left to wait for.

    A transport holds no reference to the axis's process group: it is cached as long as that lives.
    """

    # Peers may read what this rank has sent until ``settle``, even after the call that sent it has
    # ended. So each reduction needs memory of its own, see ``allocate``.
    reads_later = False
    maps = False  # ``map_shards`` and barriers exist
    coalesces = False  # ``begin_gathers`` exists
    # How often ``continue_reduce`` is called between begin and end. If it is, it waits only for
    # ranks of this host, and the buffer may be freed as soon as ``begin_reduce`` returns.
    reduce_steps = 0
    # How often ``continue_all_reduce`` is called; the first ``reduce_steps`` calls wait only for
    # ranks of this host.
    all_reduce_steps = 0

    def __init__(self, axis: Axis, device: torch.device) -> None:
        """device: of the tensors that are sent."""
        self.rank, self.ranks, self.members = axis.rank, axis.ranks, axis.members
        self.device, self.traffic = device, Traffic()
        self.activity = Activity("", axis.rank, axis.members)  # nobody else sees it
        self._tags = itertools.count(1)
        self.values_device = torch.device("cpu")  # of small collectives
        self.takes_host_values = True  # in small collectives, so that the host waits for no device

    @property
    def has_failed(self) -> bool:
        """True if communication has failed: memory of messages in flight is no longer used."""
        return False

    def require_working(self) -> None:  # noqa: B027 (a default)
        """Raise StateError if communication has failed before."""

    def before_step(self) -> None:  # noqa: B027 (a default)
        """Tell that a step of an optimizer follows."""

    def new_tag(self, name: str, texts: Mapping[int, str] = KIND_TEXTS) -> int:
        """Return the first of ``len(Kind)`` unused tags for a group, which is called ``name`` where
        ranks part. All ranks must call it in the same order. texts: by what is added to it."""
        tag = len(Kind) * next(self._tags)
        self.activity.names |= {tag + kind: f"{text} of {name}" for kind, text in texts.items()}
        return tag

    def allocate(self, numel: int, dtype: torch.dtype, zero: bool = False) -> Tensor:
        """Return memory [numel] for what is sent along the axis, where sending needs the fewest
        copies. zero: its values are zero."""
        make = torch.zeros if zero else torch.empty
        return make(numel, dtype=dtype, device=self.device)

    def settle(self, what: str, only_reductions: bool = False) -> None:  # noqa: B027 (a default)
        """Wait until everything that this rank has sent may be overwritten; only_reductions: only
        what finished reductions have sent."""

    # -- parameters

    @abc.abstractmethod
    def begin_gather(self, own: Tensor, full: Tensor, segments: ByRank, tag: int) -> Handle:
        """Send ``own`` [S], of any dtype and device, to all ranks; receive into ``full`` [ranks *
        S], whose views by rank are ``segments``. ``own`` must not change before ``settle``."""

    def begin_gathers(
        self, gathers: Sequence[tuple[Tensor, Tensor, ByRank]], tag: int = 0
    ) -> Handle:
        """Begin several gathers (own, full, segments) as one, with one end, if ``coalesces``."""
        raise NotImplementedError

    @abc.abstractmethod
    def end_gather(self, handle: Handle, what: str) -> None:
        """Wait until ``full`` is readable (on a stream device: by later work on the stream)."""

    def unfinished_gather(self, tag: int) -> Handle | None:
        """Return the gather with this tag that has not ended, if its buffer must stay allocated:
        an exception may have been raised before the caller stored the handle."""
        return None

    # -- values

    def gather_now(self, own: Tensor, what: str, tag: int = 0) -> Tensor:
        """Gather every rank's ``own`` [S] synchronously; return [ranks * S]."""
        own = own.contiguous()
        full = own.new_empty(self.ranks * own.numel())
        handle = self.begin_gather(own, full, full.chunk(self.ranks), tag)
        self.end_gather(handle, what)
        return full

    def _by_rank(self, values: Tensor, what: str) -> Tensor:
        return self.gather_now(values.reshape(-1), what, VALUES).view(self.ranks, *values.shape)

    def sum_of(self, values: Tensor, what: str) -> Tensor:
        """values: of any shape and dtype, on ``device`` or ``values_device``. Return their sum over
        the ranks there; may be computed in place."""
        return self._by_rank(values, what).sum(0, dtype=values.dtype)

    def max_of(self, values: Tensor, what: str) -> Tensor:
        """As ``sum_of``, for the maximum. values: also on the CPU, if ``takes_host_values``."""
        return self._by_rank(values, what).amax(0)

    def gather_objects(self, value: object) -> list[typing.Any]:
        """Return every rank's picklable ``value``, in rank order. Not for large tensors."""
        packed = bytearray(pickle.dumps(value))  # torch's own all_gather_object needs numpy
        what, device = "what each rank holds", self.values_device
        sizes = self._by_rank(torch.tensor(len(packed), device=device), what).tolist()
        own = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        own[: len(packed)] = torch.frombuffer(packed, dtype=torch.uint8)
        parts = self._by_rank(own, what).cpu()
        return [
            pickle.loads(memory_of(part[:size])) for part, size in zip(parts, sizes, strict=True)
        ]

    def broadcast_object(self, value: object) -> typing.Any:
        """Return the first rank's picklable ``value``. For plans, not for large tensors."""
        packed = bytearray(pickle.dumps(value) if self.rank == 0 else b"")
        what, device = "what the first rank holds", self.values_device
        size = torch.tensor([len(packed)], device=device)
        self.broadcast([size], what)
        message = torch.empty(int(size), dtype=torch.uint8, device=device)
        if self.rank == 0:
            message.copy_(torch.frombuffer(packed, dtype=torch.uint8))
        self.broadcast([message], what)
        return pickle.loads(memory_of(message.cpu()))

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[Tensor], what: str) -> None:
        """Overwrite contiguous tensors of any dtype, on ``device`` or ``values_device``, with those
        of the axis's first rank."""

    @abc.abstractmethod
    def exchange(self, sent: Tensor, sizes: Sequence[tuple[int, int]], what: str) -> Tensor:
        """sent: uint8, 1-D: what each rank gets, in rank order. sizes: by rank, how many bytes it
        gets and sends. Return what all ranks send to this one, in rank order."""

    # -- gradients

    @abc.abstractmethod
    def begin_reduce(self, buffer: Tensor, segments: ByRank, tag: int) -> Handle:
        """Send segment r of ``buffer`` [ranks * S] to rank r."""

    def continue_reduce(self, handle: Handle, dtype: torch.dtype, tag: int, what: str) -> Handle:
        """Take one of the ``reduce_steps``, and return the new handle. dtype: of the sum."""
        return handle

    @abc.abstractmethod
    def end_reduce(
        self, handle: Handle, own: Tensor, dtype: torch.dtype, what: str, divisor: Tensor | None
    ) -> Tensor:
        """Return the sum [S] as a new tensor of ``dtype``, divided by ``divisor``; without one, it
        may keep the buffer's dtype if it was summed in that. own: this rank's segment. The buffer
        may be freed then, but not written to before ``settle``."""

    @abc.abstractmethod
    def begin_all_reduce(self, total: Tensor, tag: int, divisor: Tensor | None = None) -> Handle:
        """Begin to sum ``total`` [S], on ``device``, over the ranks in place and divide it by
        ``divisor`` (0-d, on the CPU). All ranks get the same bits."""

    def continue_all_reduce(self, handle: Handle, total: Tensor, tag: int, what: str) -> Handle:
        """Take one of the ``all_reduce_steps``, and return the new handle. A step may wait for what
        every rank has begun in the step before. Where ranks reduce units in one order, they take
        all steps in one order; otherwise each rank takes a step of every group before the next of
        any (``InFlightReductions.start`` and ``finish``)."""
        return handle

    @abc.abstractmethod
    def end_all_reduce(self, handle: Handle, total: Tensor, what: str) -> None:
        """Wait until ``total`` is readable. It may be overwritten after ``settle``."""

    # -- mapped shards; only where ``maps``

    def addresses(self, shards: Sequence[Tensor]) -> tuple[object, ...]:
        """Return a value that changes when ``shards`` have moved and must be mapped again."""
        return ()

    def map_shards(
        self, shards: Sequence[Tensor], mappings: Sequence[ShardMapping | None]
    ) -> Sequence[ShardMapping] | str:
        """Map every rank's ``shards`` [S] side by side, into existing ``mappings`` or into new
        ones. If some rank cannot map all of them, return the reason."""
        return "ranks do not read each other's memory"

    def begin_barrier(self, tag: int, word: int = 0) -> Handle:
        """Tell the other ranks that this one has reached the barrier with this tag. Only if
        something is mapped. A barrier with another tag must lie between two with the same tag."""
        raise NotImplementedError

    def end_barrier(self, handle: Handle, what: str, fails: bool = False) -> list[int]:
        """Wait until all ranks have reached the barrier; return the words of the others. fails:
        communication fails if a word is 1, which says that its rank left with an exception."""
        raise NotImplementedError


def are_alike(value: str, communicators: Sequence[Transport], what: str) -> bool:
    """True if all ranks of these axes have the same ``value``, by its digest. Collective: these
    axes."""
    digest = hashlib.sha256(value.encode()).digest()[:_DIGEST_NBYTES]
    # the maximum of the complements gives the minimum: if both equal this rank's bytes, all ranks
    # have the same
    own = [*digest, *(255 - byte for byte in digest)]
    values = torch.tensor(own, dtype=torch.uint8)
    for each in communicators:
        values = each.max_of(values.to(each.values_device), what)
    return values.tolist() == own


def as_bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the bytes of non-empty contiguous tensors: backends do not know every dtype."""
    return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]


def group_destroyed() -> StateError:
    """Return the error for communication over a destroyed process group."""
    return StateError.of(
        "The process group of this module was destroyed.",
        expected="communication before destroy_process_group",
        got="a process group that no longer exists",
        where=progress.location(),
        fix="wrap the model again after init_process_group",
    )


def failed_before(failure: str, rank: int, members: tuple[int, ...]) -> StateError:
    """Return the error for a use after communication has failed."""
    ranks = f"rank {rank} of {len(members)} (global ranks {named(members)})"
    return StateError.of(
        "Communication between the ranks has failed before, and stays failed.",
        expected="no use of this process's groups after the first error: all of them are closed",
        got=failure,
        where=f"{ranks}, at {progress.location()}",
        fix="end the process, so that torchrun restarts all ranks from a checkpoint; or wrap the "
        "model again over a process group that is made now, on all ranks. What sends nothing "
        "still works: local state dicts of this rank, and its files",
    )


def communication_error(
    first: str,
    got: str,
    rank: int,
    members: tuple[int, ...],
    culprit: int | None = None,
    advice: str = "",
) -> StateError:
    """Return the error for a failed wait. first: its first sentence. culprit: the global rank that
    failed first, if known. advice: in place of the usual one."""
    look = "look for a rank that raised or skipped a unit"
    if culprit is not None:
        look = f"look at rank {culprit}'s own error first; without one, it skipped a unit or step"
    return StateError.of(
        first,
        expected="every rank alive, and using the same units in the same order",
        got=got,
        where=f"rank {rank} of {len(members)} (global ranks {named(members)})",
        fix=advice or f"{look}; if ranks may use different units, pass allow_unused_units=True",
    )


class SingleRank(Transport):
    """Every result is this rank's own value."""

    def begin_gather(self, own: Tensor, full: Tensor, segments: ByRank, tag: int) -> Handle:
        full.copy_(own, non_blocking=True)
        handle = Handle([])
        if full.device.type not in ("cpu", "meta"):  # the end may come on another stream
            handle.held = full.device, torch.accelerator.current_stream(full.device).record_event()
        return handle

    def end_gather(self, handle: Handle, what: str) -> None:
        if handle.held is not None:
            device, event = handle.held
            torch.accelerator.current_stream(device).wait_event(event)

    def gather_now(self, own: Tensor, what: str, tag: int = 0) -> Tensor:
        return own

    def begin_reduce(self, buffer: Tensor, segments: ByRank, tag: int) -> Handle:
        return Handle([])

    def end_reduce(
        self, handle: Handle, own: Tensor, dtype: torch.dtype, what: str, divisor: Tensor | None
    ) -> Tensor:
        total = own.to(dtype, copy=True)
        return total if divisor is None else total.div_(divisor)

    def begin_all_reduce(self, total: Tensor, tag: int, divisor: Tensor | None = None) -> Handle:
        if divisor is not None:
            total.div_(divisor)
        return Handle([])

    def end_all_reduce(self, handle: Handle, total: Tensor, what: str) -> None:
        pass

    def broadcast(self, tensors: Sequence[Tensor], what: str) -> None:
        pass

    def exchange(self, sent: Tensor, sizes: Sequence[tuple[int, int]], what: str) -> Tensor:
        return sent

    def gather_objects(self, value: object) -> list[typing.Any]:
        return [value]
