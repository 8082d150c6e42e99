"""Optimizers that need whole parameters, checks of others, averaged weights, norms of gradients."""

from ._features.ema import EMA
from ._features.gathered_optimizer import GatheredOptimizer
from ._features.grad_norms import grad_norms
from ._state.optim_calls import check

__all__ = ["EMA", "GatheredOptimizer", "check", "grad_norms"]
