"""Tensors that forward leaves on modules as attributes (``self.aux_loss = ...``)."""

from __future__ import annotations

import itertools

import torch
from torch import nn

__all__ = ["MARKS", "TensorAttributes"]

# Attributes that front ends set on modules, before the modules' own.
MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_INTERNAL = frozenset((*nn.Module().__dict__, *MARKS))


class TensorAttributes:
    """The tensor attributes of modules and their submodules."""

    def __init__(self, *modules: nn.Module) -> None:
        # (attributes of a module, number of the first ones that are nn.Module's own)
        self._holders = [
            (m.__dict__, _num_internal(m))
            for module in modules
            for m in module.modules()
            if _keeps_attributes(m)
        ]

    def present(self) -> list[torch.Tensor]:
        """Return the tensors that the modules hold now."""
        return [
            value
            for attributes, start in self._holders
            if len(attributes) > start
            for value in itertools.islice(attributes.values(), start, None)
            if isinstance(value, torch.Tensor)
        ]


def _num_internal(module: nn.Module) -> int:
    """Count the first attributes of a module that are nn.Module's own, or marks."""
    return next(
        (n for n, name in enumerate(module.__dict__) if name not in _INTERNAL), len(module.__dict__)
    )


def _keeps_attributes(module: nn.Module) -> bool:
    """False for torch's own layers and for wrappers: their forward leaves no tensors, and searching
    all of them would cost more than the swap of parameters."""
    return type(module).__module__.partition(".")[0] not in ("torch", __name__.partition(".")[0])
