"""Detects what the user has changed between steps: anything at all (``ExternalChanges``), memory of
tensors (``Addresses``), values of sharded parameters (``Freshness``). checks.py decides what each
change means."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch_private
from .._torch_private import dtensor as torch_dtensor
from .group import Group
from .store import ParamStore

_grad, _requires_grad = map(operator.attrgetter, ("grad", "requires_grad"))
_dtype, _version = map(operator.attrgetter, ("dtype", "_version"))
_NONES = itertools.repeat(None)


class Addresses:
    """Where tensors, or local tensors of DTensors, lay at the last ``record``, by a few C calls."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors, is_dtensor = list(tensors), _torch_private.is_dtensor
        self._plain = [tensor for tensor in tensors if not is_dtensor(tensor)]
        self._dtensors = list(filter(is_dtensor, tensors))
        self.record()

    def record(self) -> None:
        """Compare with the current memory from now on."""
        self._recorded = self._present()

    def changed(self) -> bool:
        """True if a tensor has other memory, or another size or dtype, than at the last record."""
        return self._present() != self._recorded

    def _present(self) -> tuple[Sequence[object], ...]:
        tensors = self._plain
        if self._dtensors:
            tensors = tensors + torch_dtensor.local_parts(self._dtensors)
        return (
            list(map(Tensor.data_ptr, tensors)),
            list(map(Tensor.numel, tensors)),
            list(map(_dtype, tensors)),
        )


class ExternalChanges:
    """Whether the user has changed anything since the last ``record``, by a few C calls.

    If gradients that wait for ``Gradients.collect`` are None, and requires_grad and the memory of
    parameters are the same, units need not be checked one by one, which costs a dozen calls each.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        groups = list(groups)
        collected = [(group, p) for group in groups for p in group.gradients.collected.params]
        self._collected_params = [param for _, param in collected]
        self._of_collected_params = [group for group, _ in collected]
        sharded = [param for group in groups for param, _ in group.store.sharded_params]
        memories = [memory for group in groups for memory in group.memories]
        unsharded = [param for memory in memories for param in memory.unsharded_params]
        self._trainable = [*sharded, *unsharded]
        self.sharded = Addresses(sharded)
        self._unsharded = Addresses(map(_torch_private.local_part, unsharded))
        self._recorded: list[bool] | None = None  # requires_grad
        # Sharded parameters, with the unsharded ones that have their values. With fully_shard,
        # written parameters are gathered again instead.
        self._written = [
            (group, param, [m.unsharded_params[i] for m in group.memories for i in indices])
            for group in groups
            if group.is_flat
            for param, indices in group.store.sharded_params
            if not param.is_inference()
        ]
        self._written_params = [param for _, param, _ in self._written]
        self._versions = self._count_writes()
        count_fused_writes(self._written_params)

    def _count_writes(self) -> list[int]:
        return list(map(_version, self._written_params))

    def follow_writes(self) -> set[Group]:
        """Tell autograd which unsharded parameters have changed with the sharded ones, so that it
        refuses backward through graphs that have saved them. Return the changed groups. Writes by
        ``.data`` or numpy are not seen."""
        before, self._versions = self._versions, self._count_writes()
        if before == self._versions:
            return set()
        written = [
            each
            for each, old, new in zip(self._written, before, self._versions, strict=True)
            if old != new
        ]
        increment_version([p for _, _, params in written for p in params if not p.is_inference()])
        return {group for group, _, _ in written}

    def groups_with_gradients(self) -> set[Group]:
        """Return the groups in which gradients wait for ``Gradients.collect``."""
        have_come = map(operator.is_not, map(_grad, self._collected_params), _NONES)
        return set(itertools.compress(self._of_collected_params, have_come))

    def is_intact(self) -> bool:
        """True if nothing has changed since ``record`` and no gradient was left."""
        return (
            not self.groups_with_gradients()
            and list(map(_requires_grad, self._trainable)) == self._recorded
            and not self.sharded.changed()
            and not self._unsharded.changed()
        )

    def record(self) -> None:
        """Compare with the current state from now on: all units were checked and repaired."""
        self._recorded = list(map(_requires_grad, self._trainable))
        self.sharded.record()
        self._unsharded.record()


class _Steps:
    def __init__(self) -> None:
        self.of_copies = 0  # see `add`
        self.freshness: weakref.WeakSet[Freshness] = weakref.WeakSet()  # of units
        self.fused = WeakIdKeyDictionary()  # parameters whose fused writes are counted
        self.checks: weakref.WeakSet[Any] = weakref.WeakSet()  # objects with ``before_step()``
        # Whether `check` and `add` are hooks of all optimizers (_torch_patches/optimizer_hooks.py)
        self.are_seen = False

    def see(self) -> Callable[[], None]:
        """Steps are seen from now on; some may have been missed. Return what ends that."""
        self.are_seen = True
        self.of_copies += 1
        return functools.partial(setattr, self, "are_seen", False)

    def check(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before a step."""
        for each in list(self.checks):
            each.before_step(optimizer)

    def add(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Count a step for the units whose parameters the optimizer holds. DTensors that belong to
        no unit may be copies of parameters in another dtype that are written back after the step,
        so these count for all units; all ranks step an optimizer of DTensors."""
        held = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        storages = set(map(_torch_private.storage_key, filter(_has_storage, held.values())))
        known: set[int] = set()
        for each in self.freshness:
            own = held.keys() & each.ids
            if own or (storages and each.is_in(storages)):
                each.num_steps += 1
            known |= own
        if any(_torch_private.is_dtensor(held[other]) for other in held.keys() - known):
            self.of_copies += 1
        for group in optimizer.param_groups:
            if group.get("fused"):
                with_grad = [param for param in group["params"] if param.grad is not None]
                increment_version([param for param in with_grad if param in self.fused])


steps = _Steps()
register_before_steps = steps.checks.add


def count_fused_writes(params: Iterable[Tensor]) -> None:
    """Let fused optimizers, which bump no version counters, bump those of these parameters."""
    steps.fused.update(dict.fromkeys(params, True))


class Freshness:
    """Whether the sharded parameters of a unit were written to since its last all-gather.

    Version counters are not enough: an in-place operation on a DTensor bumps only its counter, a
    write to its local tensor only that tensor's, foreach and fused optimizers neither. So steps are
    counted, of optimizers that concern the unit: no rank may gather alone because of others."""

    def __init__(self, stores: Sequence[ParamStore]) -> None:
        self._params: list[nn.Parameter] = [
            param for store in stores for param, _ in store.sharded_params
        ]
        self._dtensors = list(filter(_torch_private.is_dtensor, self._params))
        self.ids = frozenset(map(id, self._params))
        self.num_steps = 0  # of optimizers that hold some of them
        self._recorded: list[int] = []
        steps.freshness.add(self)

    def is_in(self, storages: Collection[int]) -> bool:
        """True if one of these storages, given by their keys, holds a parameter's local tensor."""
        local = torch_dtensor.local_parts(self._dtensors)
        return any(_torch_private.storage_key(tensor) in storages for tensor in local)

    def record(self) -> None:
        """An all-gather reads the shards now."""
        self._recorded = self._present()

    @property
    def is_current(self) -> bool:
        """True if nothing was written since ``record``."""
        return steps.are_seen and self._recorded == self._present()

    def _present(self) -> list[int]:
        return [
            self.num_steps,
            steps.of_copies,
            sum(map(_version, self._params)),
            sum(map(torch_dtensor.local_version, self._dtensors)),
        ]


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
