"""Whether the sharded parameters of a unit were written to since its last all-gather.

No version counter tells: an in-place operation on a DTensor moves only the counter of the DTensor,
a write to its local tensor only the counter of that, and the foreach and fused optimizers move
neither. So steps of optimizers are counted as well. Only those of optimizers that concern the unit:
a rank may step an optimizer of its own between two forwards, and must not gather alone then.

Fused optimizers move no version counter of any parameter; ``count_fused_writes`` lets them."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .. import _torch_private
from .._torch_private import dtensor as torch_dtensor
from .store import ParamStore

_version = operator.attrgetter("_version")


class _Steps:
    """Counts the steps of optimizers."""

    def __init__(self) -> None:
        self.of_copies = 0  # see `add`
        self.units: weakref.WeakSet[Freshness] = weakref.WeakSet()
        # by owner: ids of the parameters whose fused writes are counted
        self.fused: weakref.WeakKeyDictionary[object, frozenset[int]] = weakref.WeakKeyDictionary()
        self.handle: RemovableHandle | None = None

    def add(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Count a step for the units whose parameters the optimizer holds. DTensors that belong to
        no unit may be copies of parameters in another dtype, which are written back after the step:
        it is counted for all units. All ranks step an optimizer of DTensors."""
        held = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        storages = set(map(_torch_private.storage_key, filter(_has_storage, held.values())))
        known: set[int] = set()
        for unit in self.units:
            own = held.keys() & unit.ids
            if own or (storages and unit.is_in(storages)):
                unit.num_steps += 1
            known |= own
        if any(_torch_private.is_dtensor(held[other]) for other in held.keys() - known):
            self.of_copies += 1
        fused = [group["params"] for group in optimizer.param_groups if group.get("fused")]
        if fused:
            counted = set(itertools.chain.from_iterable(self.fused.values()))
            params = itertools.chain.from_iterable(fused)
            increment_version([p for p in params if p.grad is not None and id(p) in counted])


def count_fused_writes(owner: object, params: Sequence[torch.Tensor]) -> None:
    """Let the steps of fused optimizers move the version counters of these parameters, as long as
    ``owner`` lives."""
    _steps.fused[owner] = frozenset(map(id, params))


_steps = _Steps()


def patch() -> None:
    """Count the steps of optimizers from now on."""
    if _steps.handle is None:
        _steps.handle = register_optimizer_step_post_hook(_steps.add)


def undo() -> None:
    """Stop counting. Units are taken for stale then."""
    if _steps.handle is not None:
        _steps.handle.remove()
        _steps.handle = None


class Freshness:
    """Notes the state of the sharded parameters of one unit."""

    def __init__(self, stores: Sequence[ParamStore]) -> None:
        self._params: list[nn.Parameter] = [
            param for store in stores for param, _ in store.sharded_params
        ]
        self._dtensors = list(filter(_torch_private.is_dtensor, self._params))
        self.ids = frozenset(map(id, self._params))
        self.num_steps = 0  # of optimizers that hold some of them
        self._noted: list[int] = []
        _steps.units.add(self)
        patch()

    def is_in(self, storages: Collection[int]) -> bool:
        """storages: by their keys. True if one holds the local tensor of a parameter."""
        local = torch_dtensor.local_parts(self._dtensors)
        return any(_torch_private.storage_key(tensor) in storages for tensor in local)

    def note(self) -> None:
        """An all-gather reads the shards now."""
        self._noted = self._present()

    @property
    def stands(self) -> bool:
        """True if nothing was written since ``note``."""
        return _steps.handle is not None and self._noted == self._present()

    def _present(self) -> list[int]:
        return [
            self.num_steps,
            _steps.of_copies,
            sum(map(_version, self._params)),
            sum(map(torch_dtensor.local_version, self._dtensors)),
        ]


def _has_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
