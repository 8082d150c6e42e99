"""The modules of a checkpoint's model down to a depth, as ``du -d`` lists directories."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch

from .inspection import TensorFacts

_MAX_ROWS = 40  # unless a depth is asked for
_BY_NUMBER = "optimizer, by number"


@dataclasses.dataclass
class Module:
    """What a checkpoint holds of one module, and of the modules in it."""

    name: str
    numel: int = 0  # of the model's tensors
    nbytes: int = 0  # of these
    optimizer_nbytes: int = 0
    dtypes: dict[torch.dtype, None] = dataclasses.field(default_factory=dict)
    ranks: set[int] = dataclasses.field(default_factory=set)  # that wrote it, as far as is known

    def add(self, tensor: TensorFacts) -> None:
        self.ranks.update(tensor.ranks)
        if tensor.section == "optimizer":
            self.optimizer_nbytes += tensor.nbytes
            return
        self.numel += math.prod(tensor.shape)
        self.nbytes += tensor.nbytes
        self.dtypes[tensor.dtype] = None


def modules_of(tensors: Iterable[TensorFacts], depth: int | None) -> list[Module]:
    """Return the modules in the order of the tensors. depth: the most components of a name;
    default: as many as give few modules."""
    owners = [(tensor, _owner(tensor)) for tensor in tensors if tensor.section != "extra"]
    depth = depth or _depth_for([owner for _, owner in owners])
    found: dict[str, Module] = {}
    for tensor, owner in owners:
        name = ".".join(owner[:depth])
        found.setdefault(name, Module(name)).add(tensor)
    return list(found.values())


def _owner(tensor: TensorFacts) -> Sequence[str]:
    """Return the name of the module that a tensor, or the parameter of a state, belongs to."""
    name = tensor.path.partition("/")[2]
    if tensor.section == "optimizer":
        name = name.rpartition("/")[0]
        if name.isdecimal():
            return (_BY_NUMBER,)
    parts = name.split(".")
    return parts[:-1] or parts


def _depth_for(owners: Sequence[Sequence[str]]) -> int:
    for depth in range(max(map(len, owners), default=1), 1, -1):
        if len({tuple(owner[:depth]) for owner in owners}) <= _MAX_ROWS:
            return depth
    return 1
