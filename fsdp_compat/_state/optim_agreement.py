"""Checks that the optimizers of all ranks hold the same parameters, before anything is gathered or
sent.

First each rank describes parameters of which it has no element like the others; then all facts are
usually equal, and a digest is enough. Only if they differ are exact facts exchanged.

Optimizers may order their parameters differently, and lack parameters that their rank has no part
of. Any other difference raises the same error on all ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from .._comm.mesh import named
from .._comm.transport import Transport
from .._engine.group import Group
from .._engine.state_store import StateStore, store_of
from ..errors import RuntimeUsageError
from .optim_contents import ParamOwnership


def gathered_along(axes: Iterable[Transport], value: object) -> list[Any]:
    """Return the small values of all ranks of several axes. Collective."""
    found = [value]
    for axis in axes:
        found = [its for of_rank in axis.gather_objects(found) for its in of_rank]
    return found


class OptimizerFacts(NamedTuple):
    """One rank's description of its optimizer, for other ranks."""

    # By flat group: elements of a shard; of tensor-parallel parameters, of which ranks may hold
    # parts of different sizes, those of the whole.
    sizes: tuple[int, ...]
    # A character for each sharded parameter, in the model's order: "+" if the optimizer holds it,
    # "-" if not, "." if the rank has no element of it.
    held: str
    unmanaged: str  # a checksum of the names of the optimizer's parameters that no unit manages


def describe(ownership: ParamOwnership, groups: Sequence[Group], *, exact: bool) -> OptimizerFacts:
    """Return this rank's description of its optimizer. groups: the same on all ranks."""
    held = "".join(
        "." if exact and ownership.is_vacant(p) else "+" if p in ownership.numbers else "-"
        for p in _sharded_params(ownership, groups)
    )
    unmanaged = "\n".join(name for _, name in ownership.unmanaged)
    sizes = tuple(_size(store_of(group)) for group in groups)
    return OptimizerFacts(sizes, held, hashlib.sha1(unmanaged.encode()).hexdigest())


def _size(store: StateStore) -> int:
    if not any(parallel is not None for parallel in store.parallel):
        return store.numel
    return sum(math.prod(store.shape(index)) for index in range(len(store.orig_params)))


def require_alike(
    ownership: ParamOwnership,
    groups: Sequence[Group],
    by_rank: Mapping[int, OptimizerFacts],
    where: str,
    *,
    unmanaged: bool,
) -> None:
    """Raise UsageError, alike on all ranks, unless the exact facts of all ranks match. by_rank: by
    global rank. unmanaged: also compare parameters that no unit manages."""
    different = _other_size(groups, by_rank) or _missing(ownership, groups, by_rank)
    own = by_rank[global_rank()].unmanaged
    others = [rank for rank, facts in by_rank.items() if facts.unmanaged != own]
    if unmanaged and not different and others:
        different = f"different parameters outside of units on rank(s) {named(others)}"
    if different:
        raise RuntimeUsageError.of(
            "The optimizers of the ranks hold different parameters.",
            expected="the same model, and the same parameters in its optimizer, in any order",
            got=different,
            where=where,
            fix="make it from the same ones; a rank may leave out those that it has no part of",
        )


def _other_size(groups: Sequence[Group], by_rank: Mapping[int, OptimizerFacts]) -> str:
    """Describe the first group that has another size on some ranks; "" if there is none."""
    for number, group in enumerate(groups):
        sizes: dict[int, int] = {}  # and the first rank that has it
        for rank, facts in by_rank.items():
            sizes.setdefault((*facts.sizes, *[0] * len(groups))[number], rank)
        if len(sizes) > 1:
            listed = ", ".join(f"{size} elements on rank {rank}" for size, rank in sizes.items())
            return f"{group.name}: shards of {listed}"
    return ""


def _missing(
    ownership: ParamOwnership, groups: Sequence[Group], by_rank: Mapping[int, OptimizerFacts]
) -> str:
    """Describe the first parameter that is missing where its rank has elements of it, or ""."""
    marks = zip(*(facts.held for facts in by_rank.values()), strict=False)
    found = [(number, its) for number, its in enumerate(marks) if "+" in its and "-" in its]
    if not found:
        return ""
    number, its = found[0]
    name = ownership.names_in(_sharded_params(ownership, groups)[number])[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    ranks = [rank for rank, mark in zip(by_rank, its, strict=True) if mark == "-"]
    present = list(by_rank)[its.index("+")]
    return f"{name!r}{more}: missing on rank(s) {named(ranks)}, present on rank {present}"


def global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _sharded_params(ownership: ParamOwnership, groups: Sequence[Group]) -> list[nn.Parameter]:
    return [param for group in groups for param in ownership.in_group(group)]
