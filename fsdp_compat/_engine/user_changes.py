"""Detects what the user has changed between steps: memory of tensors (``Addresses``), values of
sharded parameters (``Freshness``), ``requires_grad``. checks.py decides what each change means."""

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
from ..errors import StateError
from .storage import GroupMemory
from .store import ParamStore

_dtype, _version = map(operator.attrgetter, ("dtype", "_version"))


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


class _Steps:
    def __init__(self) -> None:
        self.of_copies = 0  # see `add`
        self.units: weakref.WeakSet[Freshness] = weakref.WeakSet()
        self.fused = WeakIdKeyDictionary()  # parameters whose fused writes are counted
        self.checks: weakref.WeakSet[Any] = weakref.WeakSet()  # objects with ``before_step()``
        self.are_seen = False  # whether `check` and `add` are hooks of all optimizers

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
        for unit in self.units:
            own = held.keys() & unit.ids
            if own or (storages and unit.is_in(storages)):
                unit.num_steps += 1
            known |= own
        if any(_torch_private.is_dtensor(held[other]) for other in held.keys() - known):
            self.of_copies += 1
        for group in optimizer.param_groups:
            if group.get("fused"):
                with_grad = [param for param in group["params"] if param.grad is not None]
                increment_version([param for param in with_grad if param in self.fused])


steps = _Steps()
check_before_steps = steps.checks.add


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
        steps.units.add(self)

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


class RequiresGrad:
    """Keeps requires_grad of unsharded parameters equal to that of the sharded ones."""

    def __init__(
        self, store: ParamStore, memories: Sequence[GroupMemory], large: Collection[nn.Parameter]
    ) -> None:
        """large: unsharded parameters that each need a hook once they are trainable."""
        self._store, self._memories = store, memories
        self._last = [param.requires_grad for param, _ in store.sharded_params]
        self._without_hook = set(large)

    def follow(self, where: str) -> list[tuple[int, nn.Parameter]]:
        """Apply changes since the last call. Return (index, parameter) of large parameters that now
        need a hook. Raises StateError if parts of a FlatParameter disagree. where: for errors."""
        found = []
        for position, (sharded_param, indices) in enumerate(self._store.sharded_params):
            before = sharded_param.requires_grad
            if before is self._last[position]:
                toggled = [
                    any(m.unsharded_params[i].requires_grad is not before for m in self._memories)
                    for i in indices
                ]
                follow_toggles(sharded_param, toggled, where)
            self._last[position] = requires_grad = sharded_param.requires_grad
            for index, memory in itertools.product(indices, self._memories):
                param = memory.unsharded_params[index]
                param.requires_grad_(requires_grad)
                if requires_grad and param in self._without_hook:
                    self._without_hook.remove(param)
                    found.append((index, param))
        return found


def follow_toggles(sharded_param: nn.Parameter, toggled: Sequence[bool], where: str) -> None:
    """Toggle requires_grad of a sharded parameter if the user has toggled its unsharded parameters;
    raise StateError if only some of them. toggled: one per unsharded parameter."""
    if not any(toggled):
        return
    before = sharded_param.requires_grad
    if not all(toggled):
        raise StateError.of(
            "requires_grad was changed for only some of the parameters in a FlatParameter.",
            expected="a change for all parameters of the FlatParameter, or use_orig_params=True",
            got=f"{sum(toggled)} of {len(toggled)} parameters with requires_grad={not before}",
            where=where,
            fix="set requires_grad before wrapping, or pass use_orig_params=True",
        )
    sharded_param.requires_grad_(not before)


def values_lost(name: str, where: str) -> StateError:
    """Return the error of a parameter that was moved to the meta device with a module inside the
    sharded one."""
    return StateError.of(
        "A module inside a sharded one was moved to the meta device, and its values are lost.",
        expected="a device with memory",
        got=f"{name!r} on 'meta'",
        where=where,
        fix="build the model again and load a checkpoint; to free memory, delete the whole model",
    )
