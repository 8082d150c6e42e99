"""Whether the sharded parameters of a unit were written to since its last all-gather.

No version counter tells: an in-place operation on a DTensor moves only the counter of the DTensor,
a write to its local tensor only the counter of that, and the foreach and fused optimizers move
neither. So steps of optimizers are counted as well."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .. import _torch_private
from .._torch_private import dtensor as torch_dtensor
from .store import ParamStore

__all__ = ["Freshness", "patch", "undo"]

_version = operator.attrgetter("_version")


class _Steps:
    """Counts the steps of all optimizers of the process."""

    def __init__(self) -> None:
        self.number = 0
        self.handle: RemovableHandle | None = None

    def add(self, *_: object) -> None:
        self.number += 1


_steps = _Steps()


def patch() -> None:
    """Count the steps of all optimizers from now on."""
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
        self._noted: list[int] = []
        patch()

    def note(self) -> None:
        """An all-gather reads the shards now."""
        self._noted = self._present()

    @property
    def stands(self) -> bool:
        """True if nothing was written since ``note``."""
        return _steps.handle is not None and self._noted == self._present()

    def _present(self) -> list[int]:
        return [
            _steps.number,
            sum(map(_version, self._params)),
            sum(map(torch_dtensor.local_version, self._dtensors)),
        ]
