"""Exchange by sends and receives, for gloo, on connections of its own."""

from __future__ import annotations

import dataclasses
import functools
import time
import typing
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident

import torch
import torch.distributed as dist

from .. import _torch_private
from ..errors import StateError, explain
from . import deadlock, progress, shared_memory
from .mesh import Axis
from .native import Collectives, Handle, Kind, MessageId, ProcessGroupTransport

__all__ = ["GlooTransport"]


ACK_TAG = 1 << 24  # added to the tag of a message: that of the answer that says that it was read
_CARDS, _VERDICTS = ACK_TAG - 2, ACK_TAG - 1  # tags while connecting
_SENT = (
    2 * ACK_TAG
)  # added to the tag of a message: that of its values, where a note says that they are sent
_NOTE_NUMEL = (
    len(shared_memory.Location._fields) + 2
)  # and numel, dtype: of a message that is read where it lies
_DTYPES = [value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)]
_PIECE_NUMEL = 1 << 17  # what is summed at a time stays in the cache until it is divided


# of totals that two ranks do not cut into pieces: as many bytes, one way less; more ranks would
# send more
_WHOLE_NBYTES = 1 << 20
# by number of ranks, measured by tests/benchmarks/transport.py: with one peer there is less to send
_TIMES = {2: 4}
_NOBODY: dict[int, shared_memory.Neighbour] = {}
_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


Method = typing.TypeVar("Method", bound=Callable[..., typing.Any])


def _whole(method: Method) -> Method:
    """Let communication fail if an exception ends the method in the middle: nobody would know what
    was sent and what was read."""

    @functools.wraps(method)
    def whole(self: GlooTransport, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        try:
            return method(self, *args, **kwargs)
        except StateError:  # it has failed, or nothing was begun
            raise
        except BaseException as error:
            self._leave("its communication", error)
            raise

    return typing.cast(Method, whole)


class GlooTransport(ProcessGroupTransport):
    """Exchange by sends and receives, for gloo: a line of the watch.

    A message is kept until ``drain`` and must not change before. Every wait has the time limit of
    the process group: without one a point-to-point wait ignores it and may last for ever.

    Ranks that can read each other's memory are *near*. Between them a message of _min_nbytes and
    more stays where it is, in a block (or is copied into one): in its place goes a *note* that says
    where it lies. Who gets a note reads the memory when the exchange is ended, and answers with an
    *ack*; until that is here the memory stays as it is. Notes and acks are messages like others, so
    time limits, the watch and its diagnoses hold for them as they do for everything else. A rank
    whose communication fails says so in its memory too (``renounce``), and a reader looks there
    when it has read. Where a rank can get no block for a message any more, its note says that the
    values follow, and they are sent after the note.

    A communicator that failed stays failed. A wait that fails, or an exception in the middle of a
    call, leaves nobody knowing what has arrived; so all connections of the process are closed
    (``watch.give_up``), and every later use raises. The small collectives go over these
    connections, too: one that a rank leaves never meets a message of the user's.
    """

    reads_in_place = True

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        self.timeout = _torch_private.group_timeout(self.group)
        self.name = str(self.group.group_name)
        self.counts: dict[int, int] = {}
        self.waiting: deadlock.Waiting | None = None
        self.diagnosis: deadlock.Report | None = None
        self.thread = 0  # that has begun something last
        self._wires: typing.Any = None  # the connections, as long as there are any
        self._is_closed, self._failure = (
            False,
            "",
        )  # why: nothing where the process group was destroyed
        # By tag: what has not ended. Held here, as an exception may leave it behind, and gloo never
        # comes to the next message of a pair that has one for memory that is gone.
        self._open: dict[int, Handle] = {}
        self._sends: list[
            tuple[list[dist.Work], object, MessageId]
        ] = []  # of gathers, and acks for them
        self._reads: list[
            tuple[list[dist.Work], object, MessageId]
        ] = []  # acks for what was reduced, and own ones
        self._asked: dict[int, int] = {}  # by tag: how many acks this rank has asked for
        self._near: dict[
            int, shared_memory.Neighbour
        ] = {}  # by rank: they can read this one's memory, and it theirs
        self._names: dict[int, str] = {}  # by tag: what was waited for last
        ranks, rank = axis.ranks, axis.rank
        # The peers in the order in which they are served: every rank begins with another one.
        self._peers = [((rank - step) % ranks, (rank + step) % ranks) for step in range(1, ranks)]
        self._near_sources: list[int] = []  # those of the peers that are near
        self._near_targets: list[int] = []
        deadlock.add(self)
        _lines.add(self)
        self._connect()

    @property
    def has_failed(self) -> bool:
        return self._is_closed

    def left(self, tag: int) -> Handle | None:
        return self._open.get(tag)

    def require_working(self) -> None:
        if self._wires is None:
            self._refuse()

    @_whole
    def begin_gather(
        self, own: torch.Tensor, full: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        nbytes, ranks = own.numel() * full.itemsize, self.ranks
        self.traffic.add(Kind.GATHER, nbytes * (ranks - 1))
        near = self._near_for(nbytes)
        # Who reads the shard where it lies casts as it reads: no cast is kept until the last one
        # has it.
        read = own if near and shared_memory.locate(own) is not None else None
        sent = (
            own
            if own.dtype == full.dtype or (read is not None and len(near) == ranks - 1)
            else own.to(full.dtype)
        )
        if near and read is None:
            read = sent = self._in_block(sent)
        outgoing = [sent if read is None or r not in near else read for r in range(ranks)]
        receives, sends, notes, acks, number = self._start(
            outgoing, segments, tag, self._names.get(tag, "parameters"), near
        )
        self._sends.append((sends, sent, (tag, number, nbytes, 0)))
        if acks:
            self._sends.append((acks, read, self._post_of_acks(tag)))
        segments[self.rank].copy_(
            own
        )  # sends never read `full`: freeing `full` need not wait for slow peers
        return self._opened(
            Handle(receives, segments, own, (tag, number, nbytes, len(receives)), notes)
        )

    @_whole
    def end_gather(self, pending: Handle, what: str) -> None:
        self._names[pending.post[0]] = what
        if self._end(pending, what) and pending.notes:
            self._read_into(pending, pending.parts, what)
            self._sends.append(self._ack(pending, what))
            self._open.pop(pending.post[0], None)

    @_whole
    def begin_reduce(
        self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        tag += Kind.REDUCE
        own = segments[self.rank]
        self.traffic.add(Kind.REDUCE, own.nbytes * (self.ranks - 1))
        near = self._near_for(own.nbytes)
        if near and shared_memory.locate(buffer) is None:
            buffer = shared_memory.copy_of(buffer)
            segments = buffer.chunk(self.ranks)
        parts = [
            own if r == self.rank or r in near else torch.empty_like(own) for r in range(self.ranks)
        ]
        return self._exchange(segments, parts, tag, buffer, near)

    @_whole
    def end_reduce(
        self,
        pending: Handle,
        own: torch.Tensor,
        dtype: torch.dtype,
        what: str,
        divisor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._end(pending, what)
        parts = self._parts(pending, own, what)
        total = next(
            (part for r, part in enumerate(parts[:2]) if r != self.rank and r not in pending.notes),
            own,
        )
        if total is own or total.dtype != dtype:
            total = (
                shared_memory.empty(own.numel(), dtype)
                if pending.notes
                else own.new_empty(own.numel(), dtype=dtype)
            )
        _sum_in_rank_order(parts, total, divisor)
        self._end_reading(pending, what)
        return total

    @_whole
    def begin_all_reduce(
        self, total: torch.Tensor, tag: int, divisor: torch.Tensor | None = None
    ) -> Handle:
        tag += Kind.REPLICATE
        if self._is_sent_whole(total):
            self.traffic.add(Kind.REPLICATE, total.nbytes)
            parts = [
                total if r == self.rank else torch.empty_like(total) for r in range(self.ranks)
            ]
            pending = self._exchange([total] * self.ranks, parts, tag, total, _NOBODY)
            pending.divisor = divisor
            return pending
        self.traffic.add(Kind.REPLICATE, 2 * (self.ranks - 1) * total.nbytes // self.ranks)
        pieces = self._pieces(total)
        own, near = pieces[self.rank], self._near_for(pieces[0].nbytes)
        if near:
            total = self._in_block(total)
            pieces = self._pieces(total)
        parts = [
            own if r == self.rank or r in near else torch.empty_like(own) for r in range(self.ranks)
        ]
        pending = self._exchange(pieces, parts, tag, total, near, acked=False)
        pending.divisor = divisor
        return pending

    @_whole
    def continue_all_reduce(
        self, pending: Handle, total: torch.Tensor, tag: int, what: str
    ) -> Handle:
        if self._is_sent_whole(total):
            return pending
        self._end(pending, what)
        own = self._pieces(total)[self.rank]
        _sum_in_rank_order(self._parts(pending, own, what), own, pending.divisor)
        self._check(pending, what)
        self._open.pop(pending.post[0], None)
        if pending.acks:  # there are no acks, but values that follow a note
            self._reads.append(
                (pending.acks, pending.keep, (pending.post[0] + _SENT, 0, own.nbytes, 0))
            )
        sent = pending.keep
        assert isinstance(sent, torch.Tensor)
        if sent is not total:
            self._pieces(sent)[self.rank].copy_(own)
        # What a rank sends now says that it has read its piece of everybody's total as well: the
        # others may write there.
        pieces = self._pieces(total)
        outgoing, near = (
            [self._pieces(sent)[self.rank]] * self.ranks,
            self._near_for(pieces[0].nbytes),
        )
        return self._exchange(outgoing, pieces, tag + Kind.REPLICATE_BACK, sent, near)

    @_whole
    def end_all_reduce(self, pending: Handle, total: torch.Tensor, what: str) -> None:
        self._end(pending, what)
        if self._is_sent_whole(total):
            _sum_in_rank_order(pending.parts, total, pending.divisor)
        elif pending.notes:
            self._read_into(pending, pending.parts, what)
            self._end_reading(pending, what)

    def _is_sent_whole(self, total: torch.Tensor) -> bool:
        """True if every rank sends its whole total, and sums it all."""
        return self.ranks == 2 and total.nbytes <= _WHOLE_NBYTES

    @_whole
    def wait_readers(self, what: str) -> None:
        self._wait_for_all(self._reads, what)

    @_whole
    def flush_sends(self, what: str) -> None:
        for tag, pending in list(self._open.items()):  # others wait until this rank has read theirs
            if tag % len(Kind) == Kind.GATHER:
                self.end_gather(pending, self._names.get(tag, what))
        self._wait_for_all(self._reads, what)
        self._wait_for_all(self._sends, what)
        if shared_memory.has_old_files() and not any(line._awaits_readers for line in _lines):
            shared_memory.forget_old_files()

    @property
    def _awaits_readers(self) -> bool:
        """True if somebody may still read what this rank has sent."""
        return bool(self._sends or self._reads or self._open)

    def gather_now(self, own: torch.Tensor) -> torch.Tensor:
        own = own.contiguous()
        full = own.new_empty(self.ranks * own.numel())
        pending = self.begin_gather(own, full, full.chunk(self.ranks), 0)
        self.end_gather(pending, "a gather of state")
        self.flush_sends("a gather of state")
        return full

    def shares(self, numel: int, dtype: torch.dtype) -> bool:
        return numel * dtype.itemsize >= self._min_nbytes and bool(self._near)

    def _pieces(self, total: torch.Tensor) -> list[torch.Tensor]:
        size = -(-total.numel() // self.ranks)
        return [total[r * size : (r + 1) * size] for r in range(self.ranks)]

    def _exchange(
        self,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        tag: int,
        keep: torch.Tensor,
        near: dict[int, shared_memory.Neighbour],
        acked: bool = True,
    ) -> Handle:
        """Send ``outgoing[r]``, of which the first is the longest, to rank r and receive from it
        into ``incoming[r]``; what goes between ranks that are ``near`` is read where it lies."""
        receives, sends, notes, acks, number = self._start(
            outgoing, incoming, tag, "gradients", near, acked
        )
        post = tag, number, outgoing[0].nbytes, len(receives)
        return self._opened(Handle([*receives, *sends], incoming, keep, post, notes, acks))

    # -- through memory that ranks share

    def _near_for(self, nbytes: int) -> dict[int, shared_memory.Neighbour]:
        """The ranks that read a message where it lies."""
        return self._near if nbytes >= self._min_nbytes else _NOBODY

    @property
    def _min_nbytes(self) -> int:
        """Bytes of a message below which it is there sooner if it is sent."""
        return shared_memory.MIN_NBYTES * _TIMES.get(self.ranks, 1)

    @staticmethod
    def _in_block(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if shared_memory.locate(tensor) is not None else shared_memory.copy_of(tensor)

    def _read(self, pending: Handle, source: int, like: torch.Tensor, what: str) -> torch.Tensor:
        """What a peer has sent, where it lies. ``like``: of its length and dtype, unless it has
        sent what this rank keeps."""
        *place, numel, number = pending.notes[source].tolist()
        dtype = _DTYPES[number] if 0 <= number < len(_DTYPES) else None
        if dtype is None or numel != like.numel() or dtype not in (like.dtype, pending.keep.dtype):
            sent = f"{numel} elements of {dtype or f'an unknown dtype ({number})'}"
            self._fail(
                what,
                RuntimeError(
                    f"rank {self.members[source]} has sent {sent} for {like.numel()} of "
                    f"{like.dtype}"
                ),
            )
        location = shared_memory.Location(*place)
        if location.is_sent:
            return self._receive(
                pending, source, torch.empty(numel, dtype=dtype, device="cpu"), what
            )
        try:
            return self._near[source].view(location, numel, dtype)
        except OSError as error:
            self._fail(
                what,
                RuntimeError(f"the memory of rank {self.members[source]} cannot be read: {error}"),
            )

    def _receive(self, pending: Handle, source: int, into: torch.Tensor, what: str) -> torch.Tensor:
        """Receive what a peer sends after its note."""
        tag = pending.post[0] + _SENT
        try:
            works = [self._wires.recv([into], source, tag)]
        except RuntimeError as error:
            self._fail(what, error)
        self._names[pending.post[0]] = what
        self._wait(
            works,
            (tag, 0, into.nbytes, len(self._near_sources)),
            what,
            self._near_sources.index(source),
        )
        return into

    def _parts(self, pending: Handle, own: torch.Tensor, what: str) -> list[torch.Tensor]:
        """What was received, by rank; ``own`` from this one."""
        return [
            own
            if r == self.rank
            else self._read(pending, r, own, what)
            if r in pending.notes
            else part
            for r, part in enumerate(pending.parts)
        ]

    def _read_into(self, pending: Handle, targets: Sequence[torch.Tensor], what: str) -> None:
        for source in pending.notes:
            targets[source].copy_(self._read(pending, source, targets[source], what))

    def _check(self, pending: Handle, what: str) -> None:
        """Raise StateError if the communication of a rank had failed by the time that its memory
        was read."""
        for source, note in pending.notes.items():
            if self._near[source].epoch != int(note[0]):
                self._fail(
                    what,
                    RuntimeError(f"the communication of rank {self.members[source]} has failed"),
                )

    def _ack(self, pending: Handle, what: str) -> tuple[list[dist.Work], object, MessageId]:
        """Say that everything was read."""
        self._check(pending, what)
        tag = pending.post[0] + ACK_TAG
        self.counts[tag] = self.counts.get(tag, 0) + 1
        try:
            works = [self._wires.send([_NO_BYTES], target, tag) for target in self._near_targets]
        except RuntimeError as error:
            self._fail(what, error)
        return (
            works,
            None,
            (tag, 0, 0, 0),
        )  # number 0: nobody lacks it, as it was asked for before this rank was told

    def _end_reading(self, pending: Handle, what: str) -> None:
        if pending.notes:
            self._reads.append(self._ack(pending, what))
            self._reads.append((pending.acks, pending.keep, self._post_of_acks(pending.post[0])))
            self._names[pending.post[0]] = what
            self._open.pop(pending.post[0], None)

    def _post_of_acks(self, tag: int) -> MessageId:
        tag += ACK_TAG
        number = self._asked[tag] = self._asked.get(tag, 0) + 1
        return tag, number, 0, len(self._near_sources)

    def _wait_for_all(
        self, sent: list[tuple[list[dist.Work], object, MessageId]], what: str
    ) -> None:
        for works, _, post in sent:
            self._wait(works, post, what)
        sent.clear()

    def _find_near(self) -> None:
        """Collective. Both of a pair must be able to read the other one's memory."""
        card = torch.frombuffer(bytearray(shared_memory.identity()), dtype=torch.uint8)
        cards = self._swap(dict.fromkeys([source for source, _ in self._peers], card), _CARDS)
        near = {peer: shared_memory.attach_peer(bytes(its.tolist())) for peer, its in cards.items()}
        verdicts = self._swap(
            {
                peer: torch.tensor([it is not None], dtype=torch.uint8, device="cpu")
                for peer, it in near.items()
            },
            _VERDICTS,
        )
        self._near = {
            peer: it for peer, it in near.items() if it is not None and bool(verdicts[peer])
        }
        self._near_sources = [source for source, _ in self._peers if source in self._near]
        self._near_targets = [target for _, target in self._peers if target in self._near]

    def _swap(self, messages: dict[int, torch.Tensor], tag: int) -> dict[int, torch.Tensor]:
        """Send every peer a message and return theirs, which are as long."""
        found = {peer: torch.empty_like(message) for peer, message in messages.items()}
        works = [self._wires.recv([into], peer, tag) for peer, into in found.items()]
        works += [self._wires.send([message], peer, tag) for peer, message in messages.items()]
        for work in works:
            work.wait(self.timeout)
        return found

    # -- what every exchange goes through

    def _begin(self, tag: int) -> int:
        """Something is begun: return how often it was. All members count alike."""
        if self._wires is None:
            self._refuse()
        thread = get_ident()
        if thread != self.thread:
            self._change_thread(thread)
        if tag in self._open:
            self._end_left(tag)
        number = self.counts[tag] = self.counts.get(tag, 0) + 1
        return number

    def _end_left(self, tag: int) -> None:
        """An exception has left what is on its way with this tag: the others count it, so it comes
        before the next one."""
        what = self._names.get(tag, "what was on its way before an exception")
        if tag % len(Kind) != Kind.GATHER:
            self._fail(what, RuntimeError("an exception has left a reduction in the middle"))
        self.end_gather(self._open[tag], what)

    def _change_thread(self, thread: int) -> None:
        """Threads may take turns, between one pass and the next."""
        if self.waiting is not None or self._open or self._sends or self._reads:
            raise StateError(
                explain(
                    "Two threads communicate over one process group at once.",
                    expected="one thread at a time: what a process sends has one order, the same "
                    "on every rank",
                    got="a call from a second thread, in the middle of a forward or backward of "
                    "the first",
                    where=f"rank {self.rank} of {self.ranks} (global ranks {list(self.members)}), "
                    f"at {progress.place()}",
                    fix="give each model that has a thread of its own a process group of its own: "
                    "process_group=torch.distributed.new_group()",
                )
            )
        self.thread = thread

    def _start(
        self,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        tag: int,
        what: str,
        near: dict[int, shared_memory.Neighbour],
        acked: bool = True,
    ) -> tuple[list[dist.Work], list[dist.Work], dict[int, torch.Tensor], list[dist.Work], int]:
        """Begin what an exchange consists of; see ``_exchange``. Return (receives, sends, notes,
        acks, number of its use).

        acks: also the sends of values that follow a note; ``acked`` or not.
        """
        number = self._begin(tag)
        receives: list[dist.Work] = []
        sends: list[dist.Work] = []
        acks: list[dist.Work] = []
        notes: dict[int, torch.Tensor] = {}
        wires = self._wires
        try:
            for source, _ in self._peers:
                if source in near:
                    notes[source] = torch.zeros(_NOTE_NUMEL, dtype=torch.int64, device="cpu")
                receives.append(wires.recv([notes.get(source, incoming[source])], source, tag))
            if near and acked:  # asked for before they can be given
                acks += [
                    wires.recv([_NO_BYTES], source, tag + ACK_TAG) for source in self._near_sources
                ]
            for _, target in self._peers:
                message = outgoing[target]
                if target not in near:
                    sends.append(wires.send([message], target, tag))
                    continue
                place = shared_memory.place_of(message)
                sends.append(wires.send([_note(place, message)], target, tag))
                # a peer takes it when it reads: who waits for the acks, which come first, need not
                # wait for it
                if place.is_sent:
                    acks.append(wires.send([message], target, tag + _SENT))
        except RuntimeError as error:
            receives.clear()
            sends.clear()
            acks.clear()
            self._fail(what, error)
        return receives, sends, notes, acks, number

    def _opened(self, pending: Handle) -> Handle:
        self._open[pending.post[0]] = pending
        return pending

    def _end(self, pending: Handle, what: str) -> bool:
        """Wait for it. False if it had ended before."""
        if pending.ended:
            return False
        if self._wires is None:
            self._refuse()
        self._wait(pending.works, pending.post, what)
        pending.works.clear()
        pending.ended = True
        if not pending.notes:
            self._open.pop(
                pending.post[0], None
            )  # what is still to be read stays: others wait for it
        return True

    def _wait(self, works: list[dist.Work], post: MessageId, what: str, first: int = 0) -> None:
        """first: the index of the first work, where there were others before."""
        waiting, timeout = None, self.timeout
        try:
            for index, work in enumerate(works, first):
                self.waiting = waiting = post, index, what
                work.wait(timeout)
        except RuntimeError as error:
            self._fail(self._name(post, what), error, waiting)
        finally:
            self.waiting = None

    def _name(self, post: MessageId, what: str) -> str:
        """What a wait is for: what is drained was gathered under a name of its own."""
        tag, _, _, num_receives = post
        return what if num_receives and tag < ACK_TAG else self._names.get(tag % ACK_TAG, what)

    def _run(self, what: str, collective: Callable[[Collectives], None]) -> None:
        number = self._begin(deadlock.TOGETHER)
        self.waiting = waiting = (deadlock.TOGETHER, number, 0, 0), 0, what
        try:
            collective(_torch_private.GlooCollectives(self._wires))
        except RuntimeError as error:
            self._fail(what, error, waiting)
        except BaseException as error:
            self._leave(what, error)
            raise
        finally:
            self.waiting = None

    def _connect(self) -> None:
        """Collective."""
        here, others = (
            deadlock.board(),
            [rank for rank in self.members if rank != self.members[self.rank]],
        )
        if here is None:
            raise StateError(
                "the process group of this module was destroyed; wrap the model again after "
                "init_process_group"
            )
        what, waiting = "the other ranks to connect", None
        try:
            self.counts[deadlock.ARRIVAL] = 1
            here.arrive(self)
            end, pause_s = time.monotonic() + self.timeout.total_seconds(), 0.0005
            while not here.have_arrived(self, others):
                index = next(
                    (
                        i
                        for i, (peer, _) in enumerate(self._peers)
                        if not here.have_arrived(self, [self.members[peer]])
                    ),
                    0,
                )
                if waiting is None or waiting[1] != index:
                    self.waiting = waiting = (deadlock.ARRIVAL, 1, 0, self.ranks), index, what
                missing = self.members[self._peers[index][0]]
                if (
                    self.diagnosis is not None
                    or time.monotonic() > end
                    or here.why_broken(self.name, missing)
                ):
                    raise RuntimeError(f"rank {missing} did not come")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
            self._wires = _torch_private.gloo_of_its_own(
                self.group, self.rank, self.ranks, self.timeout
            )
            self._find_near()
        except RuntimeError as error:
            self._fail(what, error, waiting)
        except BaseException as error:
            self._leave(what, error)
            raise
        finally:
            self.waiting = None

    def _fail(
        self, what: str, error: RuntimeError, waiting: deadlock.Waiting | None = None
    ) -> typing.NoReturn:
        """A wait was in vain: communication has failed, and the error says why."""
        report = self.diagnosis or deadlock.why(self) or deadlock.Report(False, {})
        if waiting is not None:
            wait = self.describe(waiting)
            report = dataclasses.replace(report, lines={**report.lines, wait.rank: wait.text})
        silence = (
            f"no message within {self.timeout.total_seconds():g} s, or a broken connection "
            f"({error})"
        )
        if report.circle:
            first, got = (
                f"Waiting for {what} can never end: ranks wait for each other.",
                str(report),
            )
        else:
            first, got = (
                f"Waiting for {what} failed.",
                "; ".join(filter(None, [silence, str(report)])),
            )
        self._failure = self._failure or f"{first} {got}"
        deadlock.give_up(self, report)
        raise self._error(first, got) from error

    def _leave(self, what: str, error: BaseException) -> None:
        """An exception that is not of communication, above all an interrupt, came in the middle of
        it."""
        if not self._is_closed:
            rank = self.members[self.rank]
            self._failure = (
                f"rank {rank} left {what} with {type(error).__name__}, at {progress.place()}"
            )
            deadlock.give_up(self, deadlock.Report(False, {rank: self._failure}))

    def _refuse(self) -> typing.NoReturn:
        if not self._failure:
            raise StateError(
                "the process group of this module was destroyed; wrap the model again after "
                "init_process_group"
            )
        raise StateError(
            explain(
                "Communication between the ranks has failed before, and stays failed.",
                expected="no further use of these ranks' connections after the error that said so",
                got=self._failure,
                where=f"rank {self.rank} of {self.ranks} (global ranks {list(self.members)}), at "
                f"{progress.place()}",
                fix="end the process, so that torchrun restarts all ranks from a checkpoint; or, "
                "on all ranks, wrap the model "
                "again over a new process group",
            )
        )

    # -- for the watch

    @property
    def is_alive(self) -> bool:
        group = self._group()
        return group is not None and _torch_private.is_registered(group)

    @property
    def is_connected(self) -> bool:
        return not self._is_closed

    def describe(self, waiting: deadlock.Waiting) -> deadlock.Wait:
        (tag, number, _, num_receives), index, what = waiting
        what = self._name(waiting[0], what)
        rank, sends = self.members[self.rank], index >= num_receives
        if tag == deadlock.TOGETHER:
            peers = tuple(r for r in self.members if r != rank)
            text = f"rank {rank} waits in {what} for ranks {list(peers)}"
        else:
            if tag >= ACK_TAG:
                peer = (
                    self._near_targets[index - num_receives] if sends else self._near_sources[index]
                )
            else:
                peer = self._peers[index - num_receives][1] if sends else self._peers[index][0]
            peers = (self.members[peer],)
            takes = sends or ACK_TAG <= tag < _SENT
            text = f"rank {rank} waits for " + (
                f"rank {peers[0]} to take {what}" if takes else f"{what} from rank {peers[0]}"
            )
            if tag == deadlock.ARRIVAL:
                text = f"rank {rank} waits for rank {peers[0]} to connect"
        text += f", at {progress.place()}"
        return deadlock.Wait(rank, peers, self.name, tag, number, text)

    def end_wait(self) -> None:
        if self._wires is not None:
            _torch_private.break_connections(self._wires, self._peers[0][0])

    def fail(self, report: deadlock.Report) -> None:
        shared_memory.bump_epoch()  # first: who still reads what is given up here must see it
        self._failure = self._failure or f"another communication of this process failed: {report}"
        self.end_wait()
        self.close()

    def close(self) -> None:
        """Nothing is received any more, whoever still holds a work or a message."""
        self._wires, self._is_closed = None, True
        self._open.clear()
        self._sends.clear()
        self._reads.clear()
        self.counts.clear()
        self._asked.clear()
        self._near = {}


_lines: weakref.WeakSet[GlooTransport] = weakref.WeakSet()


def _note(place: shared_memory.Location, message: torch.Tensor) -> torch.Tensor:
    """Where a message lies, for a peer that is near."""
    return torch.tensor(
        [*place, message.numel(), _DTYPES.index(message.dtype)], dtype=torch.int64, device="cpu"
    )


def _sum_in_rank_order(
    parts: Sequence[torch.Tensor], total: torch.Tensor, divisor: torch.Tensor | None
) -> None:
    """Add ``parts`` in rank order into ``total``, which may be one of them, so that all ranks get
    the same bits; then divide.

    In fp32 at least: in bf16 a 1 would be lost beside 256 already.
    """
    numel, wide = total.numel(), torch.promote_types(total.dtype, torch.float32)
    apart = total.dtype != wide or any(
        part.data_ptr() == total.data_ptr() for part in parts[2:]
    )  # it is read late
    step = _PIECE_NUMEL * max(torch.get_num_threads(), 1)
    for start in range(0, numel, step):
        piece, its = total, list(parts)
        if numel > step:
            piece, its = total[start : start + step], [part[start : start + step] for part in parts]
        found = torch.empty(piece.shape, dtype=wide, device="cpu") if apart else piece
        if its[0].dtype == its[1].dtype == wide:
            torch.add(its[0], its[1], out=found)
            rest = its[2:]
        else:
            found.copy_(its[0])
            rest = its[1:]
        for part in rest:
            found.add_(part)
        if divisor is not None:
            found.div_(divisor)
        if apart:
            piece.copy_(found)
