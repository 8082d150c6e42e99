"""Optimizers that need whole parameters, or blocks of them, checks of others, averaged weights,
norms of gradients."""

from ._features.ema import EMA
from ._features.gathered_optimizer import GatheredOptimizer
from ._features.grad_norms import grad_norms
from ._state.optim_calls import check
from ._stores.flat_cuts import ShardBlocks

__all__ = ["EMA", "GatheredOptimizer", "ShardBlocks", "check", "grad_norms"]
