"""An exponential moving average of a sharded model's parameters, kept on the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from .._engine.store import ParamStore
from .._state.units import model_units_in, runtimes_of
from ..errors import StateError, UsageError, require_module


class EMA:
    """Averages of the trainable parameters of a sharded model, of either front end.

    Each rank averages its own shards, and nothing is sent. Inside ``swap()`` the model has the
    averages, so that evaluation, ``state_dict()`` and checkpoints read and write them under the
    model's names, on any number of ranks. Buffers are not averaged.

    Collective: all ranks of the model, if this is its first use since fully_shard.

    Args:
        model: the averages start at its current parameters.
        decay: from 0 to 1, how much of an average each update keeps.
        dtype: of the averages, such as fp32 for bf16 parameters; None: the parameters'.

    Raises:
        UsageError: an argument is invalid."""

    def __init__(
        self, model: nn.Module, decay: float = 0.999, dtype: torch.dtype | None = None
    ) -> None:
        require_module(model, "EMA")
        if not 0 <= decay <= 1:
            raise UsageError.of(
                "decay is out of range.",
                expected="a number from 0 to 1",
                got=repr(decay),
                where="EMA(...)",
                fix="pass for example 0.999",
            )
        self.decay, self._model, self._is_swapped = decay, model, False
        self._averages = [
            store.shard.detach().to(dtype or store.dtype, copy=True) for store in self._stores()
        ]

    def _stores(self) -> list[ParamStore]:
        stores = [group.store for own in model_units_in(self._model) for group in own.unit.groups]
        return [store for store in stores if any(p.requires_grad for p, _ in store.sharded_params)]

    @torch.no_grad()
    def update(self) -> None:
        """Call it after the optimizer's step: average = decay * average + (1 - decay) * parameter.

        Raises:
            StateError: inside forward or backward."""
        stores = self._sharded_stores("EMA.update()")
        for average, store in zip(self._averages, stores, strict=True):
            average.lerp_(store.shard.detach().to(average.dtype), 1 - self.decay)

    @contextlib.contextmanager
    def swap(self) -> Iterator[None]:
        """Give the model the averages inside the context; what is written to it changes them.

        Values that are not written to come back exactly, whatever the dtypes.

        Raises:
            StateError: inside forward or backward, or inside another ``swap()``."""
        stores = self._sharded_stores("EMA.swap()")
        kept = [store.shard.detach().clone() for store in stores]
        for average, store in zip(self._averages, stores, strict=True):
            store.shard.detach().copy_(average)
        self._is_swapped = True
        try:
            yield
        finally:
            self._is_swapped = False
            self._reshard("the end of EMA.swap()")
            for average, store, before in zip(self._averages, stores, kept, strict=True):
                shard = store.shard.detach()
                is_written = shard != average.to(shard.dtype)
                torch.where(is_written, shard.to(average.dtype), average, out=average)
                shard.copy_(before)

    def _reshard(self, what: str) -> None:
        for runtime in runtimes_of(model_units_in(self._model)):
            runtime.require_idle(what)
            runtime.reshard_all()

    def _sharded_stores(self, what: str) -> list[ParamStore]:
        """Return the averaged stores, with all units sharded."""
        if self._is_swapped:
            raise StateError.of(
                f"{what} was called inside EMA.swap(), where the model has the averages.",
                expected="a call outside the context",
                got="a call inside it",
                where=what,
                fix="leave the context first",
            )
        self._reshard(what)
        stores = self._stores()
        if [each.shard.shape for each in stores] != [each.shape for each in self._averages]:
            raise UsageError.of(
                "The model is no longer the one that is averaged.",
                expected="the same trainable parameters as when the EMA was made",
                got=f"{len(stores)} shards; there are averages of {len(self._averages)}",
                where=what,
                fix="make an EMA after wrapping, and after the last change of requires_grad",
            )
        return stores
