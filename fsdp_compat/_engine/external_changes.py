"""Whether the user has changed anything between steps: one comparison for all units, by a few calls
of C functions.

What a write to a parameter means, however ranks exchange data:

- To an unsharded parameter, by any means (``.data``, numpy, in place): it changes temporary values
  of this rank, until the unit is resharded. That is after its forward and after its backward; for
  units that stay unsharded in between (the root, and all with SHARD_GRAD_OP) after backward only.
  With one rank, or NO_SHARD, the parameter is the shard, and keeps what was written.
- To a sharded parameter, between steps: it counts from the next forward on.
- To a sharded parameter, between a forward and its backward: as in plain torch, an error for what
  autograd sees (steps of optimizers, operations in place). ``follow_writes`` tells autograd, which
  raises where the graph has saved the parameter; a unit that stays unsharded raises anyway, as its
  values are those of forward. What autograd does not see, as by ``.data``, counts where the unit is
  gathered again, and must not be done where it stays unsharded.
- Units of ``fully_shard`` compute in backward with the values that sharded parameters have then;
  freshness.py gathers them again.

Gradients of small unsharded parameters are None, requires_grad is unchanged, sharded and unsharded
parameters have the same memory. Where that holds, units need not be checked one by one, which would
cost a dozen calls each."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import increment_version

from .. import _torch_private
from .._torch_private import dtensor as torch_dtensor
from .freshness import count_fused_writes
from .group import Group

_grad, _requires_grad, _dtype, _version = map(
    operator.attrgetter, ("grad", "requires_grad", "dtype", "_version")
)
_NONES = itertools.repeat(None)


class ExternalChanges:
    """The state at the last ``note``, to be compared with the present one."""

    def __init__(self, groups: Iterable[Group]) -> None:
        groups = list(groups)
        self._small_params = [param for group in groups for param in group.gradients.small.params]
        stores = [group.store for group in groups]
        sharded_params = [param for store in stores for param, _ in store.sharded_params]
        is_dtensor = _torch_private.is_dtensor
        self._plain_params: list[torch.Tensor] = [p for p in sharded_params if not is_dtensor(p)]
        self._dtensors = list(filter(is_dtensor, sharded_params))
        unsharded_params = [
            param
            for group in groups
            for memory in group.memories
            for param in memory.unsharded_params
        ]
        self._trainable = [*sharded_params, *unsharded_params]
        self._views = [_torch_private.local_part(param) for param in unsharded_params]
        self._noted: tuple[list[object], ...] | None = None
        # Sharded parameters with the unsharded ones that have their values. Where the user may
        # change units at any time (fully_shard), written parameters are gathered again instead.
        self._written = [
            (group, param, [m.unsharded_params[i] for m in group.memories for i in indices])
            for group in groups
            if group.conduct is None
            for param, indices in group.store.sharded_params
            if not param.is_inference()
        ]
        self._written_params = [param for _, param, _ in self._written]
        self._versions = self._count_writes()
        count_fused_writes(self, self._written_params)

    def _count_writes(self) -> list[int]:
        return list(map(_version, self._written_params))

    def follow_writes(self) -> set[Group]:
        """Tell autograd that unsharded parameters have changed with the sharded ones since the last
        call: like plain torch, it refuses backward through graphs that have saved them. Return the
        groups that have changed.

        Writes by ``.data`` or numpy are not seen.
        """
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

    def has_gradients(self) -> bool:
        """True if autograd has left a gradient on a small parameter."""
        return any(map(operator.is_not, map(_grad, self._small_params), _NONES))

    def is_intact(self) -> bool:
        """True if nothing has changed since ``note`` and no gradient was left."""
        return not self.has_gradients() and self._present() == self._noted

    def sharded_params_are_intact(self) -> bool:
        """True if no sharded parameter was given other memory since ``note``."""
        return (
            self._noted is None
            or list(map(torch.Tensor.data_ptr, self._local_params())) == self._noted[1]
        )

    def _local_params(self) -> Sequence[torch.Tensor]:
        if not self._dtensors:
            return self._plain_params
        return self._plain_params + torch_dtensor.local_parts(self._dtensors)

    def note(self) -> None:
        """All units were checked, and repaired."""
        self._noted = self._present()

    def _present(self) -> tuple[list[object], ...]:
        sharded_params = self._local_params()
        return (
            list(map(_requires_grad, self._trainable)),
            list(map(torch.Tensor.data_ptr, sharded_params)),
            list(map(torch.Tensor.numel, sharded_params)),
            list(map(_dtype, sharded_params)),
            list(map(torch.Tensor.data_ptr, self._views)),
        )
