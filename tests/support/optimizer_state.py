"""State for optimizers that have not taken a step."""

from __future__ import annotations

import torch

__all__ = ["create_optimizer_state"]


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make a new optimizer create its state, which ``dcp.load`` reads into, in a step that changes
    no parameter: its gradients and its learning rate are zero."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
