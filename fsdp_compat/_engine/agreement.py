"""Compares the models of all ranks before anything is sent: if they differed, messages would not
have the lengths that receivers expect, or ranks would wait for each other.

Ranks that share a unit's parameters exchange a digest of names, shapes, dtypes, ``requires_grad``,
order, and the settings that decide what is sent, and search for the first difference if digests
differ."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .._comm.board import progress
from .._comm.communicator import communicator
from .._comm.mesh import Mesh, named
from .._comm.transport import Transport, are_alike
from ..errors import UsageError
from .unit import Unit

Facts = Sequence[str]  # in the order in which differences are reported
_NOTHING = "nothing more"


def unit(name: str) -> str:
    """Return the fact that a unit exists."""
    return f"unit {name!r}" if name else "the root unit"


def parameter(name: str, shape: Iterable[int], dtype: torch.dtype, requires_grad: bool) -> str:
    return f"parameter {name!r} {list(shape)}, {dtype}, requires_grad={requires_grad}"


# By unit: its mesh and its facts, for the first forward.
_of_units: weakref.WeakKeyDictionary[Unit, tuple[Mesh, Facts]] = weakref.WeakKeyDictionary()


def store_facts(of: Unit, mesh: Mesh, facts: Facts) -> None:
    """Store the facts of a unit for ``require_units_alike``."""
    _of_units[of] = mesh, facts


def require_units_alike(units: Iterable[Unit], device: torch.device, where: str) -> None:
    """Raise UsageError, on all ranks, if these have other units over the same mesh. Collective:
    each mesh."""
    kept = [(each, *_of_units[each]) for each in units if each in _of_units]
    require_all_alike(
        [(mesh, device, [each.label.partition(" (")[0], *facts]) for each, mesh, facts in kept],
        where,
    )


def require_all_alike(parts: Iterable[tuple[Mesh, torch.device, Facts]], where: str) -> None:
    """Raise UsageError, on all ranks of a mesh, if their facts over it differ. Collective: each
    mesh."""
    by_mesh: dict[object, tuple[Mesh, torch.device, list[str]]] = {}
    for mesh, device, facts in parts:
        key = mesh.shard.members, mesh.replica.members
        by_mesh.setdefault(key, (mesh, device, []))[-1].extend(facts)
    for mesh, device, found in by_mesh.values():
        _require_alike(found, mesh, device, where)


def _require_alike(facts: Facts, mesh: Mesh, device: torch.device, where: str) -> None:
    axes = [axis for axis in (mesh.shard, mesh.replica) if axis.ranks > 1]
    if not axes or device.type == "meta":  # a simulation: tensors have no values
        return
    communicators = [communicator(axis, device) for axis in axes]
    what = "the comparison of the ranks' models"
    if are_alike(repr(facts), communicators, what):
        return
    lengths = _gathered(len(facts), mesh, communicators)
    at = bisect.bisect_left(  # the first difference
        range(1, max(lengths.values())),
        True,
        key=lambda length: not are_alike(repr(facts[:length]), communicators, what),
    )
    raise UsageError.of(
        "The models of the ranks differ.",
        expected="the same units, parameters and settings, in the same order, on all of the "
        f"ranks {named(sorted(lengths))}",
        got=_difference(_gathered([*facts, _NOTHING][at], mesh, communicators), facts[:at]),
        where=f"{where}, at {progress.location()}",
        fix="build the model in the same way on every rank; give modules that only some ranks "
        "have a process group of these ranks",
    )


def _gathered(value: Any, mesh: Mesh, communicators: Iterable[Transport]) -> dict[int, Any]:
    """Return every rank's small value, by global rank. Collective: the mesh."""
    found = [(mesh.shard.members[mesh.shard.rank], value)]
    for each in communicators:
        found = [pair for pairs in each.gather_objects(found) for pair in pairs]
    return dict(sorted(found))


def _difference(facts: Mapping[int, str], before: Facts) -> str:
    """Return where ranks differ. facts: the first that differ, by rank. before: those that
    agree."""
    by_fact: dict[str, list[int]] = {}
    for rank, fact in facts.items():
        by_fact.setdefault(fact, []).append(rank)
    shown = [
        f"{fact} on {f'rank {ranks[0]}' if len(ranks) == 1 else f'the ranks {named(ranks)}'}"
        for fact, ranks in by_fact.items()
    ]
    units = [fact for fact in before if fact.startswith(("unit ", "the root unit"))]
    return f"{f'in {units[-1]}: ' if units else ''}{'; '.join(shown)}"
