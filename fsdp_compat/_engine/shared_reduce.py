"""Reduce buffers that the other ranks of a host read in place."""

from __future__ import annotations

import typing
from collections.abc import Collection, Generator, Iterable, Sequence

import torch

from .._comm import shared_memory
from .._layout.spec import Interval
from .reduce import ReduceBuffer, Views
from .reduce_plan import ReducePlan
from .segments import Segments
from .storage import Storage
from .store import ParamStore, ReduceForm

__all__ = ["SharedReduceBuffer"]


class _Part(typing.NamedTuple):
    """Some of the elements of a parameter, or of what belongs to none, and where they lie."""

    elements: Interval
    in_block: Interval


class _SharedForm(ReduceForm):
    """Another form, with this rank's segment behind those of the other ranks, and without the
    parameters that the segment has as a whole and that are kept."""

    pieces_are_whole = False

    def __init__(self, form: ReduceForm, rank: int, ranks: int, may_keep: Collection[int]) -> None:
        """form: with one place for each parameter, in its shape."""
        size = form.numel
        before = Interval(0, rank * size)
        own = Interval(before.stop, before.stop + size)
        after = Interval(own.stop, ranks * size)
        self.numel, self.dtype, self._form = size, form.dtype, form
        # This rank's segment, in order: indices of kept parameters, and parts of the block
        self.own: list[int | Interval] = []
        self.kept: dict[int, int] = {}  # elements of these parameters
        self.block_numel = (ranks - 1) * size  # and what follows of this rank's segment
        places = form.places(torch.empty(ranks * size, device="meta"))
        self._parts: list[list[_Part]] = [[] for _ in places]
        for start, numel, index in sorted(
            (int(place.storage_offset()), place.numel(), index)
            for index, of_param in enumerate(places)
            for place in of_param
        ):
            place = Interval(start, start + numel)
            if index in may_keep and place.clipped(own) == place:
                self.own.append(index)
                self.kept[index] = numel
                continue
            for segment in (before, own, after):
                if part := place.clipped(segment):
                    in_block = (
                        self._add_own(part.numel)
                        if segment is own
                        else part.shifted(-size if segment is after else 0)
                    )
                    self._parts[index].append(_Part(part.shifted(-start), in_block))

    def _add_own(self, numel: int) -> Interval:
        """Add elements of this rank's segment at the end of the block."""
        added = Interval(self.block_numel, self.block_numel + numel)
        self.block_numel = added.stop
        last = self.own[-1] if self.own else None
        if isinstance(last, Interval):  # they adjoin
            self.own[-1] = Interval(last.start, added.stop)
        else:
            self.own.append(added)
        return added

    @property
    def indices(self) -> list[int]:
        return self._form.indices

    def grads(self, total: torch.Tensor) -> Sequence[torch.Tensor | None]:
        return self._form.grads(total)

    def places(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        """buffer: [block_numel]. Likewise, 1-D."""
        return [[buffer[part.in_block.slice] for part in parts] for parts in self._parts]

    def split(self, index: int, value: torch.Tensor) -> Sequence[torch.Tensor]:
        flat = value.reshape(-1)
        return [flat[part.elements.slice] for part in self._parts[index]]


class SharedReduceBuffer(ReduceBuffer):
    """A reduce buffer in a block of shared memory, a different one each time, for parameters with
    one place each.

    Only this rank reads its own segment. Of a large parameter that lies in it as a whole, the
    gradient itself is kept until the sum, and not copied: it takes as much memory as the copy
    would.
    """

    def __init__(
        self, store: ParamStore, dtype: torch.dtype, plan: ReducePlan, large: Collection[int]
    ) -> None:
        """large: indices of parameters whose gradients come one by one."""
        self._shard, device = plan.shard, torch.device("cpu")
        ranks, rank = plan.shard.ranks, plan.shard.rank
        may_keep = large if plan.predivisor == 1 else ()
        self._shared_form = _SharedForm(store.reduce_form(), rank, ranks, may_keep)
        super().__init__(store, ranks, dtype, device, plan.predivisor, plan, self._shared_form)
        self._kept: dict[int, torch.Tensor] = {}  # 1-D gradients, by parameter
        self._zero = torch.zeros(1, dtype=dtype, device=device)

    def _reserve(self, dtype: torch.dtype, device: torch.device) -> Views:
        nothing = torch.empty(0, dtype=dtype, device=device)
        self._storage = Storage(nothing)
        return Views(nothing, Segments(nothing, 1), [], None, nothing)

    @property
    def resident_nbytes(self) -> int:
        kept = sum(grad.nbytes for grad in self._kept.values())
        return kept + (0 if self._block is None else self._block.nbytes)

    def _allocate(self) -> None:
        if self._block is None:
            # The blocks of earlier gradients can be reused once no peer reads them.
            self._shard.wait_readers("gradients that this rank has sent")
            block = shared_memory.allocate(self._shared_form.block_numel, self._zero.dtype)
            self._block, self.views = block, self._views_of(block)

    def _views_of(self, buffer: torch.Tensor) -> Views:
        size, rank = self._shared_form.numel, self._shard.rank
        segments = list(buffer[: size * (self._ranks - 1)].view(-1, size))
        segments.insert(rank, self._zero.expand(size))  # is not sent
        return Views(buffer, segments, self._shared_form.places(buffer), None, buffer)

    def _free(self) -> None:
        super()._free()
        self._kept.clear()

    def drop(self, indices: Iterable[int]) -> None:
        dropped = list(indices)
        for index in dropped:
            self._kept.pop(index, None)
        super().drop(dropped)

    def _add_to_received(
        self, indices: Sequence[int], grads: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        for index, grad in zip(indices, grads, strict=True):
            if index in self._shared_form.kept:
                self._keep(index, grad)
        return super()._add_to_received(indices, grads)

    def _keep(self, index: int, grad: torch.Tensor) -> None:
        value = grad.reshape(-1).to(self._zero.dtype)
        if index in self.received:
            self._kept[index] = self._kept[index] + value
        else:
            is_view = value.untyped_storage().nbytes() > value.nbytes  # it would keep more memory
            self._kept[index] = value.clone() if is_view else value

    def _scatter(
        self, plan: ReducePlan, what: str, divisor: torch.Tensor | None
    ) -> Generator[None, None, torch.Tensor]:
        assert self._block is not None
        pending = plan.shard.begin_reduce(self._block, self.views.segments, plan.shard_tag)
        yield None
        total = plan.shard.end_reduce_with(
            self._own_segment(), pending, self._sum_dtype, what, divisor
        )
        self._free()
        return total

    def _own_segment(self) -> list[torch.Tensor]:
        """Return this rank's segment, in pieces."""
        form, kept, pieces = self._shared_form, self._kept, list[torch.Tensor]()
        for part in form.own:
            if isinstance(part, Interval):
                pieces.append(self.views.buffer[part.slice])
            else:  # zeros for a gradient that was not received
                pieces.append(kept[part] if part in kept else self._zero.expand(form.kept[part]))
        return pieces
