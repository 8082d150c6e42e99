"""Whether the user has changed anything between steps: one comparison for all units, by a few calls
of C functions.

Gradients of small unsharded parameters are None, requires_grad is unchanged, sharded and unsharded
parameters have the same memory. Where that holds, units need not be checked one by one, which would
cost a dozen calls each."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

import torch

from .. import _torch_private
from .._torch_private import dtensor as torch_dtensor
from .group import Group

__all__ = ["ExternalChanges"]

_grad, _requires_grad, _dtype = map(operator.attrgetter, ("grad", "requires_grad", "dtype"))
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
