"""Attributes of modules: the marks that a unit's modules bear, and the tensors that forward leaves
on them (``self.aux_loss = ...``)."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from torch import nn

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_INTERNAL = frozenset((*nn.Module().__dict__, *_MARKS))


def mark(module: nn.Module, ignored: Collection[nn.Module]) -> None:
    """Mark a unit's modules, except ignored ones, as torch does; before the unit is constructed.

    Dynamo reads the marks, and so does transformers' generate, to keep ranks together. Dynamo
    refuses modules marked with use_orig_params=False; ours show unsharded parameters in forward
    with either setting.
    """
    for child in module.modules():
        if child not in ignored and _MARKS[0] not in child.__dict__:
            attributes = dict(child.__dict__)
            child.__dict__.clear()
            # The marks go first, out of the way of the attributes that a forward looks up.
            child.__dict__.update(dict.fromkeys(_MARKS, True), **attributes)


class TensorAttributes:
    """The tensor attributes of modules and their submodules."""

    def __init__(self, *modules: nn.Module) -> None:
        # (attributes of a module, number of the first ones that are nn.Module's own)
        found = (m for module in modules for m in module.modules() if _keeps_attributes(m))
        self._holders = [
            (m.__dict__, sum(1 for _ in itertools.takewhile(_INTERNAL.__contains__, m.__dict__)))
            for m in found
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


def _keeps_attributes(module: nn.Module) -> bool:
    """False for torch's own layers and for wrappers: their forward leaves no tensors on them, and
    searching them all would cost more than swapping parameters."""
    return type(module).__module__.partition(".")[0] not in ("torch", __name__.partition(".")[0])
