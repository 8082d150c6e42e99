"""What every transport shares: what it promises, what it counts, and the small collectives of a
process group."""

from __future__ import annotations

import collections
import enum
import itertools
import pickle
import types
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from .. import _torch_private
from .._comm.host_memory import memory_of
from ..errors import StateError, explain
from .mesh import Axis, is_in_python

# torch 2.13 renamed it; 2.11 and 2.12 have the older name only.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

__all__ = [
    "TransportBase",
    "Collectives",
    "Communicator",
    "ProcessGroupTransport",
    "Kind",
    "Handle",
    "MessageId",
    "PublicCollectives",
    "Traffic",
    "all_gather",
    "defines",
    "gather_in_group",
    "start_gather_in_python",
]


class Kind(enum.IntEnum):
    """What a message carries. With the tag of its group it makes the tag of a message."""

    GATHER = 0
    REDUCE = 1
    REPLICATE = 2
    REPLICATE_BACK = 3


class Traffic:
    """What one rank has sent along one axis: numbers of collectives and bytes, by kind."""

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


_NOTHING: Mapping[int, torch.Tensor] = types.MappingProxyType({})
MessageId = tuple[
    int, int, int, int
]  # tag, number of its use, nbytes of a message, num_receives (works: receives come before sends)


class Handle:
    """Something on its way: the works to wait for, and the tensors that must stay until then."""

    __slots__ = ("acks", "divisor", "ended", "keep", "notes", "parts", "post", "works")

    def __init__(
        self,
        works: list[dist.Work],
        parts: Sequence[torch.Tensor] = (),
        keep: typing.Any = None,
        post: MessageId = (0, 0, 0, 0),
        notes: Mapping[int, torch.Tensor] = _NOTHING,
        acks: Sequence[dist.Work] = (),
    ) -> None:
        """notes: by rank, where in its memory a part lies (see exchange.py). acks: they say that
        others have read this one's."""
        self.works, self.parts, self.keep, self.post = works, parts, keep, post
        self.notes, self.acks = notes, list(acks)
        self.divisor: torch.Tensor | None = None  # of a total
        self.ended = False  # it has arrived


class Communicator(typing.Protocol):
    """Communication along one axis. Every method but ``drain``, ``settle``, ``new_tag`` and
    ``require_working`` is a collective of the axis.

    ``what`` names, for an error, what a wait was for. A wait that fails raises StateError, and so
    does every later use: nothing travels any more, on any axis of this process. Only ``drain`` and
    ``settle`` return at once then: there is nothing to wait for.
    """

    rank: int
    ranks: int
    members: tuple[int, ...]  # global ranks
    traffic: Traffic
    name: str  # of connections that can fail, the same on all ranks
    reads_in_place: bool  # `shares` may be true

    @property
    def has_failed(self) -> bool:
        """True if nothing is written or read any more of what was begun."""

    def require_working(self) -> None:
        """Raise StateError if communication has failed before."""

    def new_tag(self) -> int:
        """Return a tag of its own for a group; all ranks ask in the same order."""

    def begin_gather(
        self, own: torch.Tensor, full: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        """Send ``own`` [S], in the dtype of ``full``, to all; ``full`` [ranks * S], in
        ``segments``, receives.

        own: of any dtype and device. It stays unchanged until ``drain``.
        """

    def end_gather(self, pending: Handle, what: str) -> None:
        """``full`` is readable afterwards (on a stream device: by what is enqueued afterwards)."""

    def left(self, tag: int) -> Handle | None:
        """Return the gather with this tag that has not ended, if what it receives into must
        stay."""

    def shares(self, numel: int, dtype: torch.dtype) -> bool:
        """True if messages [numel] are read by some rank where they lie, if they lie in a block
        (shared_memory.py)."""

    def begin_reduce(
        self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        """Send segment r of ``buffer`` [ranks * S] to rank r."""

    def end_reduce(
        self,
        pending: Handle,
        own: torch.Tensor,
        dtype: torch.dtype,
        what: str,
        divisor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum [S] over the ranks in ``dtype``, a new tensor, divided by ``divisor``.
        ``own``: the own segment.

        Then the buffer may be freed, but not written to: peers may read it until ``settle``. What
        is begun keeps what it sends.
        """

    def begin_all_reduce(
        self, total: torch.Tensor, tag: int, divisor: torch.Tensor | None = None
    ) -> Handle:
        """Begin to add ``total`` up over the ranks, and to divide it, in place: every rank ends
        with the same bits."""

    def continue_all_reduce(
        self, pending: Handle, total: torch.Tensor, tag: int, what: str
    ) -> Handle:
        """The second of three steps. All groups take it before any takes the third."""

    def end_all_reduce(self, pending: Handle, total: torch.Tensor, what: str) -> None:
        """``total`` is readable afterwards. It may be written to after ``settle``."""

    def wait_readers(self, what: str) -> None:
        """Wait until the peers have read what was reduced, of all that has ended on this rank."""

    def flush_sends(self, what: str) -> None:
        """Wait until the peers have taken everything that this rank has sent."""

    def any_of(self, flags: torch.Tensor) -> torch.Tensor:
        """flags: uint8 [n]. Return their maximum over the ranks."""

    def sum_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over the ranks, in place where it can be."""

    def max_of(self, values: torch.Tensor) -> torch.Tensor: ...

    def broadcast(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """The first rank of the axis sends; the tensors of the others, which are contiguous, are
        overwritten."""

    def gather_now(self, own: torch.Tensor) -> torch.Tensor:
        """Return [ranks * S] from every rank's ``own`` [S], waited for."""

    def gather_objects(self, value: object) -> list[typing.Any]:
        """Return every rank's picklable ``value``, in rank order. For plans and errors, never for
        tensors of size."""


class TransportBase:
    """An axis in numbers. It does not hold the axis's process group: the cache of communicators
    hangs on that one's life."""

    reads_in_place = False

    def __init__(self, axis: Axis) -> None:
        self.rank, self.ranks, self.members, self.traffic = (
            axis.rank,
            axis.ranks,
            axis.members,
            Traffic(),
        )
        self.name = ""

    @property
    def has_failed(self) -> bool:
        return False

    def left(self, tag: int) -> Handle | None:
        return None

    def require_working(self) -> None:
        pass


class ProcessGroupTransport(TransportBase):
    """What both real transports share: the small synchronous collectives, over what each of them
    communicates with."""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        assert axis.group is not None
        self._group = weakref.ref(axis.group)
        self._tags = itertools.count(1)

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise StateError(
                "the process group of this module was destroyed; wrap the model again after "
                "init_process_group"
            )
        return group

    def new_tag(self) -> int:
        return len(Kind) * next(self._tags)

    def _run(self, what: str, collective: Callable[[Collectives], None]) -> None:
        """Run a collective to its end."""
        raise NotImplementedError

    def _error(self, first: str, got: str) -> StateError:
        return StateError(
            explain(
                first,
                expected="every rank to use the same units in the same order, and to be alive",
                got=got,
                where=f"rank {self.rank} of {self.ranks} (global ranks {list(self.members)})",
                fix="look for a rank that raised, or that skipped a unit; ranks that may use "
                "different units need "
                "allow_unused_units=True",
            )
        )

    def any_of(self, flags: torch.Tensor) -> torch.Tensor:
        return self.max_of(flags)

    def sum_of(self, values: torch.Tensor) -> torch.Tensor:
        self._run("a sum over the ranks", lambda group: group.all_reduce(values, dist.ReduceOp.SUM))
        return values

    def max_of(self, values: torch.Tensor) -> torch.Tensor:
        self._run(
            "a maximum over the ranks", lambda group: group.all_reduce(values, dist.ReduceOp.MAX)
        )
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


class Collectives(typing.Protocol):
    """Synchronous collectives of one set of ranks."""

    device: torch.device  # whose tensors it takes

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """In place."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """From the first rank."""

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return [ranks * n] from every rank's ``own`` [n]."""


class PublicCollectives:
    """Those of a process group, as torch has them for everybody."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.device = group, _torch_private.default_device_of_backend(group)

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        dist.all_reduce(values, op=op, group=self._group)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        works = [
            dist.broadcast(tensor, group_src=0, group=self._group, async_op=True)
            for tensor in tensors
        ]
        for work in works:
            if work is not None:
                work.wait()

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        return gather_in_group(self._group, own)


def gather_in_group(group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    """Return [ranks * n] from every rank's ``own`` [n], over any process group. Collective."""
    full = own.new_empty(dist.get_world_size(group) * own.numel())
    if is_in_python(group):
        start_gather_in_python(group, full, own).wait()
    else:
        all_gather(full, own, group=group)
    return full


def defines(group: dist.ProcessGroup, *methods: str) -> bool:
    """True if the class of a process group has one of these methods of its own, rather than those
    that look for a backend."""
    return any(
        getattr(type(group), name, None) is not getattr(dist.ProcessGroup, name, None)
        for name in methods
    )


def start_gather_in_python(
    group: dist.ProcessGroup, full: torch.Tensor, own: torch.Tensor
) -> dist.Work:
    """Start an all-gather over a process group written in Python: into one tensor if it can, else
    into a list, as all can."""
    if full.dtype.is_complex:
        full, own = torch.view_as_real(full), torch.view_as_real(own)
    if defines(group, "all_gather_single", "_allgather_base"):
        work = all_gather(full, own, group=group, async_op=True)
    else:
        work = dist.all_gather(list(full.chunk(group.size())), own, group=group, async_op=True)
    assert work is not None  # it is for a process that is not in the group
    return work
