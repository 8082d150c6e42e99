"""Whether anybody has touched what a runtime left between steps: one look at all units, by few
calls of C functions.

Gradients of small leaves are None, requires_grad is as it was, targets and leaves have the memory
they had. Where that is so, nothing has to be looked at unit by unit, which would cost a dozen calls
each."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable

import torch

from .. import _torch_private
from .unit import Group

__all__ = ["ExternalChanges"]

_grad, _requires_grad, _dtype = map(operator.attrgetter, ("grad", "requires_grad", "dtype"))
_NONES = itertools.repeat(None)


class ExternalChanges:
    """What ``note`` has found, to be compared with what is there now."""

    def __init__(self, groups: Iterable[Group]) -> None:
        groups = list(groups)
        self._small_leaves = [
            unsharded_param for group in groups for unsharded_param in group.small_params
        ]
        self._sharded_params = [
            sharded_param for group in groups for sharded_param, _ in group.store.sharded_params
        ]
        unsharded_params = [
            unsharded_param for group in groups for unsharded_param in group.all_unsharded_params
        ]
        self._trainable = [*self._sharded_params, *unsharded_params]
        self._leaf_views = [
            _torch_private.local_part(unsharded_param) for unsharded_param in unsharded_params
        ]
        self._noted: tuple[list[object], ...] | None = None

    def has_gradients(self) -> bool:
        """True if autograd has left a gradient in a small leaf."""
        return any(map(operator.is_not, map(_grad, self._small_leaves), _NONES))

    def stands(self) -> bool:
        """True if nothing has changed since ``note``, and no gradient was left."""
        return not self.has_gradients() and self._found() == self._noted

    def targets_stand(self) -> bool:
        """True if no target has been given other memory since ``note``."""
        return (
            self._noted is None
            or list(map(torch.Tensor.data_ptr, self._sharded_params)) == self._noted[1]
        )

    def note(self) -> None:
        """Everything has been looked at, and put right."""
        self._noted = self._found()

    def _found(self) -> tuple[list[object], ...]:
        sharded_params = self._sharded_params
        return (
            list(map(_requires_grad, self._trainable)),
            list(map(torch.Tensor.data_ptr, sharded_params)),
            list(map(torch.Tensor.numel, sharded_params)),
            list(map(_dtype, sharded_params)),
            list(map(torch.Tensor.data_ptr, self._leaf_views)),
        )
