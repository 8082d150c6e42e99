"""Whole parameters on their owners: where their parts lie, and how these get there and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._comm.transport import as_bytes
from .._engine.group import Group
from .._engine.state_store import StateStore, store_of


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A parameter that is stepped whole, and where its parts lie."""

    name: str  # before wrapping
    group: Group
    index: int  # in the group's store
    param: nn.Parameter  # the sharded parameter that holds it
    is_selected: bool

    @property
    def store(self) -> StateStore:
        return store_of(self.group)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.store.shape(self.index)

    def value(self) -> Tensor:
        """Return this rank's part, a view of the shard."""
        return self.store.own_part(self.store.shard.detach(), self.index)

    def grad(self) -> Tensor:
        """Return this rank's part of the gradient."""
        if self.param.grad is None:
            return torch.zeros_like(self.value())
        grad = _torch_private.local_part(self.param.grad)
        if self.store.is_flattened:
            grad = grad[self.store.part_in_shard(self.index).slice]
        return grad.to(self.store.dtype)

    @property
    def lies_whole(self) -> bool:
        """True if one rank has all elements, and no other any."""
        numels = [self.numel(rank) for rank in range(self.group.shard.ranks)]
        return 0 < sum(numels) == max(numels) == math.prod(self.shape)

    def part_of(self, whole: Tensor, rank: int) -> Tensor:
        return self.store.rows_of_whole(self.index, whole, rank)

    def numel(self, rank: int) -> int:
        """Return the number of elements that ``rank`` has."""
        if self.store.is_flattened:
            return self.store.part(self.index, rank).numel
        return math.prod(self.store.sharded_shape(self.index, rank))


class Exchange:
    """Moves parameters of one dtype along one shard axis, to their owners and back; those that lie
    whole on their owners: see ``InPlace``."""

    def __init__(self, places: Sequence[Place], owners: Sequence[int]) -> None:
        """owners: the rank of each place's owner. Collective: values are brought to the owners."""
        self._axis, store = places[0].group.shard, places[0].store
        self._dtype, self._device, own = store.dtype, store.shard.device, self._axis.rank
        ranks = range(self._axis.ranks)
        by_owner = [
            [place for place, owner in zip(places, owners, strict=True) if owner == rank]
            for rank in ranks
        ]
        self._in_order, self.owned = [place for its in by_owner for place in its], by_owner[own]
        # Elements of this rank's part of each place, and of every rank's part of the owned ones.
        self._own_numels = [place.numel(own) for place in self._in_order]
        self._owned_numels = [place.numel(rank) for rank in ranks for place in self.owned]
        sends = [sum(place.numel(own) for place in its) for its in by_owner]
        receives = [sum(place.numel(rank) for place in self.owned) for rank in ranks]
        itemsize = self._dtype.itemsize
        self._sizes = [(s * itemsize, r * itemsize) for s, r in zip(sends, receives, strict=True)]
        self.wholes = [nn.Parameter(value) for value in self._to_owners(Place.value)]
        for place, whole in zip(self.owned, self.wholes, strict=True):
            of_user = place.store.kinds[place.index].attributes.items()
            whole.__dict__.update((k, v) for k, v in of_user if not k.startswith("_fsdp"))

    def fetch(self) -> None:
        """Give the owned parameters their values and gradients. Collective."""
        values, grads = self._to_owners(Place.value), self._to_owners(Place.grad)
        for place, whole, value, grad in zip(self.owned, self.wholes, values, grads, strict=True):
            whole.data, whole.grad = value, None if place.param.grad is None else grad

    def release(self) -> None:
        """Free values and gradients. The parameters keep their shapes, and read as zeros."""
        for whole in self.wholes:
            whole.data, whole.grad = whole.new_zeros(()).expand(whole.shape), None

    def _to_owners(self, part: Callable[[Place], Tensor]) -> list[Tensor]:
        """Return the tensors that this rank owns, whole, from the part of each. Collective."""
        received = self._moved([part(place) for place in self._in_order], self._sizes)
        wholes = [received.new_empty(place.shape) for place in self.owned]
        _copy(received.split(self._owned_numels), self._parts_of(wholes))
        return wholes

    def _parts_of(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        ranks, owned = range(self._axis.ranks), list(zip(self.owned, wholes, strict=True))
        return [place.part_of(whole, rank) for rank in ranks for place, whole in owned]

    def put_back(self) -> None:
        """Write this rank's part of every parameter into the shard. Collective."""
        for whole in self.wholes:
            whole.grad = None  # before the values need memory
        received = self._moved(self._parts_of(self.wholes), [(r, s) for s, r in self._sizes])
        _copy(received.split(self._own_numels), [place.value() for place in self._in_order])

    def _moved(self, parts: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> Tensor:
        axis = self._axis
        sent = torch.empty(0, dtype=torch.uint8, device=self._device)
        sent = torch.cat([sent, *as_bytes([part.contiguous() for part in parts])])
        received = axis.exchange(sent.to(axis.device), sizes, "the parameters of GatheredOptimizer")
        return received.to(self._device).view(self._dtype)


class InPlace(Exchange):
    """Parameters that lie whole on their owners: their values and gradients are used in place."""

    def _to_owners(self, part: Callable[[Place], Tensor]) -> list[Tensor]:
        return [part(place).view(place.shape) for place in self.owned]

    def put_back(self) -> None:
        for place, whole in zip(self.owned, self.wholes, strict=True):
            whole.grad, value = None, place.value().view(place.shape)
            if whole.data_ptr() != value.data_ptr():  # the optimizer has set other values
                value.copy_(whole.detach())


def _copy(values: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for value, target in zip(values, targets, strict=True):
        target.copy_(value.view(target.shape))


def owners_of(places: Sequence[Place]) -> list[int]:
    """Return for each place, all of one axis, the rank that owns it: of those that have a part of
    it the one with the least to do so far. The same on all ranks."""
    loads, owners = [0] * places[0].group.shard.ranks, dict[int, int]()
    for number in sorted(range(len(places)), key=lambda n: -_cost(places[n])):
        place = places[number]
        holders = [rank for rank in range(len(loads)) if place.numel(rank)] or range(len(loads))
        owners[number] = min(holders, key=loads.__getitem__)
        loads[owners[number]] += _cost(place)
    return [owners[number] for number in range(len(places))]


def _cost(place: Place) -> int:
    """Return how long a step takes, relative to others: a matrix is multiplied by itself."""
    return math.prod(place.shape) * (min(place.shape) if len(place.shape) > 1 else 1)
