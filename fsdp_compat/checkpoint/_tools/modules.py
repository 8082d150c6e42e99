"""The modules of a checkpoint's model, as deep as few lines allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .inspection import TensorFacts

_MAX_MODULES = 40


def modules_of(tensors: Iterable[TensorFacts]) -> dict[str, list[TensorFacts]]:
    """Return the tensors of each module, with the optimizer states of its parameters. Names have as
    many components as give few modules."""
    owners = [(tensor, _owner(tensor)) for tensor in tensors if tensor.section != "extra"]
    depth = _depth_for([owner for _, owner in owners])
    found: dict[str, list[TensorFacts]] = {}
    for tensor, owner in owners:
        found.setdefault(".".join(owner[:depth]), []).append(tensor)
    return found


def _owner(tensor: TensorFacts) -> Sequence[str]:
    """Return the name of the module that a tensor, or the parameter of a state, belongs to."""
    name = tensor.path.partition("/")[2]
    if tensor.section == "optimizer":
        name = name.rpartition("/")[0]
        if name.isdecimal():
            return ("optimizer, by number",)
    parts = name.split(".")
    return parts[:-1] or parts


def _depth_for(owners: Sequence[Sequence[str]]) -> int:
    for depth in range(max(map(len, owners), default=1), 1, -1):
        if len({tuple(owner[:depth]) for owner in owners}) <= _MAX_MODULES:
            return depth
    return 1
