"""Optimizers on shards: run those that need whole parameters, check others, average the weights,
and read the norms of gradients."""

from ._state.ema import EMA
from ._state.gathered_optimizer import GatheredOptimizer
from ._state.grad_norms import grad_norms
from ._state.optim_calls import check

__all__ = ["EMA", "GatheredOptimizer", "check", "grad_norms"]
