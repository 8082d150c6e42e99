"""An exponential moving average of a sharded model's parameters, kept on the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .._engine.store import ParamStore
from ..errors import UsageError, require_module
from .units import model_units_in, runtimes_of


class ShardedEMA:
    """Averages of the trainable parameters of a sharded model, of either front end.

    Each rank averages its own shards, and nothing is sent. Inside ``swap()`` the model has the
    averages, so that evaluation, ``state_dict()`` and checkpoints read and write them under the
    model's names, on any number of ranks. Buffers are not averaged."""

    def __init__(
        self, model: nn.Module, decay: float = 0.999, dtype: torch.dtype | None = None
    ) -> None:
        """Start the averages at the current parameters.

        decay: from 0 to 1, how much of an average each update keeps. dtype: of the averages, such
        as fp32 for bf16 parameters; None: the parameters'.

        Collective if it is the first use of the model since fully_shard. Raises UsageError."""
        require_module(model, "ShardedEMA")
        if not 0 <= decay <= 1:
            raise UsageError.of(
                "decay is out of range.",
                expected="a number from 0 to 1",
                got=repr(decay),
                where="ShardedEMA(...)",
                fix="pass for example 0.999",
            )
        self.decay, self._model = decay, model
        self._averages = [
            store.shard.detach().to(dtype or store.dtype, copy=True) for store in self._stores()
        ]

    def _stores(self) -> list[ParamStore]:
        stores = [group.store for own in model_units_in(self._model) for group in own.unit.groups]
        return [store for store in stores if any(p.requires_grad for p, _ in store.sharded_params)]

    @torch.no_grad()
    def update(self) -> None:
        """Call it after the optimizer's step: average = decay * average + (1 - decay) * parameter.

        Raises StateError inside forward or backward."""
        averages, shards = self._pairs("ShardedEMA.update()")
        same = [shard.to(own.dtype) for own, shard in zip(averages, shards, strict=True)]
        for average, shard in zip(averages, same, strict=True):
            average.lerp_(shard, 1 - self.decay)

    @contextlib.contextmanager
    def swap(self) -> Iterator[None]:
        """Give the model the averages inside the context; what is written to it changes them.

        Raises StateError inside forward or backward."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        averages, shards = self._pairs("ShardedEMA.swap()")
        for number, (average, shard) in enumerate(zip(averages, shards, strict=True)):
            self._averages[number] = shard.to(average.dtype, copy=True)
            shard.copy_(average)

    def _pairs(self, what: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return the averages and the shards, with all units sharded."""
        for runtime in runtimes_of(model_units_in(self._model)):
            runtime.require_idle(what)
            runtime.reshard_all()
        shards = [store.shard.detach() for store in self._stores()]
        if [each.shape for each in shards] != [each.shape for each in self._averages]:
            raise UsageError.of(
                "The model is no longer the one that is averaged.",
                expected="the same trainable parameters as when ShardedEMA was made",
                got=f"{len(shards)} shards; there are averages of {len(self._averages)}",
                where=what,
                fix="make a ShardedEMA after wrapping, and after the last change of requires_grad",
            )
        return self._averages, shards
