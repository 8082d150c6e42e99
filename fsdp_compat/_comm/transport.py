"""The interface of every transport, ``Communicator``, and what its implementations share.

To add a transport: implement ``Communicator`` in a file of its own (``ProcessGroupTransport`` has
the small collectives already) and choose it in communicator.py."""

from __future__ import annotations

import collections
import datetime
import enum
import itertools
import pickle
import types
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ..errors import StateError, explain
from .divergence import progress
from .divergence.waits import MessageId
from .host_memory import memory_of
from .mapped import Mapping as Mapped
from .mesh import Axis

__all__ = [
    "Collectives",
    "Communicator",
    "Handle",
    "Kind",
    "ProcessGroupTransport",
    "Traffic",
    "TransportBase",
    "Work",
    "communication_error",
    "group_destroyed",
]


class Kind(enum.IntEnum):
    """What a message carries. The tag of a message is the tag of its group plus the kind."""

    GATHER = 0
    REDUCE = 1
    REPLICATE = 2
    REPLICATE_BACK = 3


class Traffic:
    """Collectives and bytes that one rank has sent along one axis, by kind."""

    def __init__(self) -> None:
        self.clear()

    def add(self, kind: Kind, nbytes: int) -> None:
        self._counts[kind] += 1
        self._nbytes[kind] += nbytes

    def clear(self) -> None:
        self._counts, self._nbytes = [0] * len(Kind), [0] * len(Kind)

    @property
    def counts(self) -> collections.Counter[Kind]:
        return collections.Counter(
            {kind: self._counts[kind] for kind in Kind if self._counts[kind]}
        )

    @property
    def nbytes(self) -> collections.Counter[Kind]:
        return collections.Counter(
            {kind: self._nbytes[kind] for kind in Kind if self._counts[kind]}
        )


_NOTHING: Mapping[int, typing.Any] = types.MappingProxyType({})


class Work(typing.Protocol):
    """A message in flight, as in torch.distributed."""

    def wait(self, timeout: datetime.timedelta) -> bool:
        """Return False if the wait was aborted. Raises RuntimeError if it has failed."""


class Handle:
    """A message in flight: the works to wait for, and the tensors that must stay until then."""

    __slots__ = ("acks", "descriptors", "divisor", "ended", "keep", "message", "parts", "works")

    def __init__(
        self,
        works: list[Work],
        parts: Sequence[torch.Tensor] = (),
        keep: typing.Any = None,
        message: MessageId = (0, 0, 0, 0),
        descriptors: Mapping[int, typing.Any] = _NOTHING,
        acks: Sequence[Work] = (),
    ) -> None:
        """descriptors: by rank, where in that rank's memory its part lies (see same_host.py). acks:
        works that complete when the peers have read this rank's part."""
        self.works, self.parts, self.keep, self.message = works, parts, keep, message
        self.descriptors, self.acks = descriptors, list(acks)
        self.divisor: torch.Tensor | None = None  # of an all-reduce
        self.ended = False  # the works have completed


class Communicator(typing.Protocol):
    """Communication along one axis. Every method is a collective of the axis, except
    ``flush_sends``, ``wait_readers``, ``new_tag``, ``unfinished_gather`` and ``require_working``.

    ``what`` names the thing that is waited for, for error messages. A wait that fails raises
    StateError, and so does every later use: all communication of this process has failed then. Only
    ``flush_sends`` and ``wait_readers`` return at once, because nothing is left to wait for.
    """

    rank: int
    ranks: int
    members: tuple[int, ...]  # global ranks
    traffic: Traffic
    name: str  # of the connections, the same on all ranks; "" where there are none of its own
    reads_in_place: bool  # `shares` may be true
    maps: bool  # `map_shards` and the meetings exist
    # Messages find their receivers by tags, in whatever order ranks send them. Without tags all
    # ranks must make the same collectives in the same order.
    has_tags: bool

    @property
    def has_failed(self) -> bool:
        """True if communication has failed: memory of messages in flight is no longer used."""

    def require_working(self) -> None:
        """Raise StateError if communication has failed before."""

    def new_tag(self) -> int:
        """Return an unused tag for a group. All ranks ask in the same order."""

    def begin_gather(
        self, own: torch.Tensor, full: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        """Send ``own`` [S], in the dtype of ``full``, to all ranks; receive into ``full``
        [ranks * S], whose views by rank are ``segments``.

        own: of any dtype and device. It must not change before ``flush_sends``.
        """

    def end_gather(self, handle: Handle, what: str) -> None:
        """Wait. ``full`` is readable afterwards (on a stream device: by later work on the
        stream)."""

    def unfinished_gather(self, tag: int) -> Handle | None:
        """Return the gather with this tag that has not ended, if its buffer must stay allocated."""

    def shares(self, numel: int, dtype: torch.dtype) -> bool:
        """True if some peer reads messages [numel] in place when they lie in shared memory
        (shared_memory.py)."""

    def begin_reduce(
        self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        """Send segment r of ``buffer`` [ranks * S] to rank r."""

    def end_reduce(
        self,
        handle: Handle,
        own: torch.Tensor,
        dtype: torch.dtype,
        what: str,
        divisor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum [S] over the ranks as a new tensor of ``dtype``, divided by ``divisor``.

        own: this rank's segment. The buffer may be freed afterwards, because the transport keeps
        what it sends; but it must not be written to before ``wait_readers``.
        """

    def begin_all_reduce(
        self, total: torch.Tensor, tag: int, divisor: torch.Tensor | None = None
    ) -> Handle:
        """Begin to sum ``total`` over the ranks in place and divide it by ``divisor``. All ranks
        get the same bits."""

    def continue_all_reduce(
        self, handle: Handle, total: torch.Tensor, tag: int, what: str
    ) -> Handle:
        """The second of three steps. Every group takes it before any group takes the third."""

    def end_all_reduce(self, handle: Handle, total: torch.Tensor, what: str) -> None:
        """Wait. ``total`` is readable afterwards, and writable after ``wait_readers``."""

    def wait_readers(self, what: str) -> None:
        """Wait until the peers have read every finished reduction of this rank."""

    def flush_sends(self, what: str) -> None:
        """Wait until the peers have received everything that this rank has sent."""

    def map_shards(
        self, shards: Sequence[torch.Tensor], mappings: Sequence[Mapped | None]
    ) -> list[Mapped] | str:
        """Map every rank's ``shards`` [S] side by side, into ``mappings`` that exist already or
        into new ones. Return why, if some rank cannot map all of them."""

    def begin_meeting(self, tag: int, word: int = 0) -> Handle:
        """Tell the other ranks that this one has come to the meeting with this tag. Only if
        something is mapped. Two meetings with one tag have one with another tag between them."""

    def end_meeting(self, handle: Handle, what: str) -> list[int]:
        """Wait until all ranks have come. Return the words of the others."""

    def fail_meeting(self, handle: Handle, what: str, index: int) -> None:
        """Fail because a rank, whose word was the one with ``index``, has left what the meeting
        ends with an exception."""

    def any_of(self, flags: torch.Tensor, what: str) -> torch.Tensor:
        """flags: uint8 [n]. Return their maximum over the ranks."""

    def sum_of(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Return the sum of ``values`` over the ranks, computed in place where possible."""

    def max_of(self, values: torch.Tensor, what: str) -> torch.Tensor: ...

    def broadcast(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Send contiguous tensors from the first rank of the axis; on the other ranks they are
        overwritten."""

    def gather_now(self, own: torch.Tensor) -> torch.Tensor:
        """Return [ranks * S] from every rank's ``own`` [S], and wait for it."""

    def gather_objects(self, value: object) -> list[typing.Any]:
        """Return every rank's picklable ``value``, in rank order. For plans and errors, not for
        large tensors."""


class TransportBase:
    """The facts about an axis. It does not hold the axis's process group: communicators are cached
    for as long as that group lives."""

    reads_in_place = maps = False
    has_tags = True

    def __init__(self, axis: Axis) -> None:
        self.rank, self.ranks, self.members = axis.rank, axis.ranks, axis.members
        self.traffic = Traffic()
        self.name = ""

    @property
    def has_failed(self) -> bool:
        return False

    def unfinished_gather(self, tag: int) -> Handle | None:
        return None

    def require_working(self) -> None:
        pass


def group_destroyed() -> StateError:
    """The error for communication over a process group that was destroyed."""
    return StateError(
        explain(
            "The process group of this module was destroyed.",
            expected="communication before destroy_process_group",
            got="a process group that no longer exists",
            where=progress.place(),
            fix="wrap the model again after init_process_group",
        )
    )


class ProcessGroupTransport(TransportBase):
    """A transport over a process group, with the small synchronous collectives."""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        assert axis.group is not None
        self._group = weakref.ref(axis.group)
        self._tags = itertools.count(1)

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise group_destroyed()
        return group

    def new_tag(self) -> int:
        return len(Kind) * next(self._tags)

    def _run(self, what: str, collective: Callable[[Collectives], None]) -> None:
        """Run a synchronous collective."""
        raise NotImplementedError

    def any_of(self, flags: torch.Tensor, what: str) -> torch.Tensor:
        return self.max_of(flags, what)

    def sum_of(self, values: torch.Tensor, what: str) -> torch.Tensor:
        self._run(what, lambda group: group.all_reduce(values, dist.ReduceOp.SUM))
        return values

    def max_of(self, values: torch.Tensor, what: str) -> torch.Tensor:
        self._run(what, lambda group: group.all_reduce(values, dist.ReduceOp.MAX))
        return values

    def broadcast(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        raw = [
            tensor.reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()
        ]  # backends do not know every dtype
        self._run(f"a broadcast of {what}", lambda group: group.broadcast(raw))

    def gather_objects(self, value: object) -> list[typing.Any]:
        packed = bytearray(pickle.dumps(value))  # torch's own all_gather_object needs numpy
        found: list[typing.Any] = []

        def gather(group: Collectives) -> None:
            sizes = group.all_gather(torch.tensor([len(packed)], device=group.device)).tolist()
            longest = max(sizes)
            own = torch.zeros(longest, dtype=torch.uint8, device=group.device)
            own[: len(packed)] = torch.frombuffer(packed, dtype=torch.uint8).to(group.device)
            full = group.all_gather(own).cpu()
            found.extend(
                pickle.loads(memory_of(full[r * longest : r * longest + size]))
                for r, size in enumerate(sizes)
            )

        self._run("an exchange of what each rank holds", gather)
        return found


def communication_error(
    first: str, got: str, rank: int, members: tuple[int, ...], culprit: int | None = None
) -> StateError:
    """The error for a wait that failed. first: a sentence with the thing that was waited for.
    culprit: the global rank that has failed first, if it is known."""
    look = "look for a rank that raised or skipped a unit"
    if culprit is not None:
        look = f"look at rank {culprit}'s own error first; without one, it skipped a unit or step"
    return StateError(
        explain(
            first,
            expected="every rank alive, and using the same units in the same order",
            got=got,
            where=f"rank {rank} of {len(members)} (global ranks {list(members)})",
            fix=f"{look}; if ranks may use different units, pass allow_unused_units=True",
        )
    )


class Collectives(typing.Protocol):
    """Synchronous collectives of one set of ranks."""

    device: torch.device  # of the tensors that it accepts

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """In place."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """From the first rank."""

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return [ranks * n] from every rank's ``own`` [n]."""
