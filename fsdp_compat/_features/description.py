"""How a model is sharded, for ``describe`` and ``print(model)``, before and after its first use.
Nothing is sent."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._engine.dtypes import Precision
from .._engine.module_view import is_marked
from .._engine.state_store import StateStore
from .._state.units import ATTRIBUTE, clean_name
from .._text import count_of, dtype_text, joined, nbytes_text
from ..errors import UsageError, require_module

_NUM_NAMES = 8  # of tensors that are not sharded, in a line
_TITLES = "unit|strategy|ranks|reshards|elements|bytes here|all-gather|dtypes"
_ROW = "{:{}}  {:{}} {:>6} {:>8} {:>13} {:>10} {:>10}  {}"
_NOTE = "reshards: after forward; dtypes: stored/computed/reduced"


class UnitFacts(typing.NamedTuple):
    """What ``unit_facts()`` of a registered unit returns; the fields are UnitDescription's."""

    strategy: str
    ranks: int
    replicas: int
    is_resharded: bool
    stores: Sequence[tuple[StateStore, Precision]]


@dataclasses.dataclass(frozen=True)
class UnitDescription:
    """One unit of a model; ``str`` is what ``print(model)`` shows of it.

    Attributes:
        name: the name of its module before wrapping; "" for the model itself.
        strategy: the name of a ShardingStrategy, or "fully_shard".
        ranks: the number of ranks that share one copy of the parameters.
        replicas: the number of copies.
        is_resharded: whether parameters are resharded after forward.
        numel: the number of elements of the whole parameters.
        own_numel: the number of these that this rank holds.
        shard_nbytes: the bytes of the parameters on this rank, with padding.
        gathered_nbytes: the bytes of the output of an all-gather, with padding; 0 with one rank.
        dtypes: the dtypes (stored, computed in, reduced in), each combination once.
        padding: that of units with ``shard_blocks``, as a share of ``numel``; else 0.0."""

    name: str
    strategy: str
    ranks: int
    replicas: int
    is_resharded: bool
    numel: int
    own_numel: int
    shard_nbytes: int
    gathered_nbytes: int
    dtypes: tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]
    padding: float = 0.0

    @property
    def dtypes_text(self) -> str:
        """The dtypes as "fp32/bf16/fp32", or as "fp32" if all three are."""
        rows = [each[:1] if len(set(each)) == 1 else each for each in self.dtypes]
        return ", ".join("/".join(map(dtype_text, row)) for row in rows)

    def __str__(self) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        numbers = f"{self.own_numel:,} of {self.numel:,} elements here, {self.dtypes_text}"
        numbers += f", {self.padding:.2%} padding" if self.padding else ""
        held = numbers if self.dtypes else "no parameters of its own"
        return f"{self.strategy} over {count_of(self.ranks, 'rank')}{replicas}, {held}"


def stored_dtype(store: StateStore) -> torch.dtype:
    """Return the dtype of the sharded parameters; tensor subclasses may send another."""
    return store.sharded_params[0].parameter.dtype


def describe_unit(facts: UnitFacts, name: str = "") -> UnitDescription:
    """Return the description of a unit, whose module has this name."""
    numel = own_numel = shard_nbytes = gathered_nbytes = padding = 0
    dtypes = dict[tuple[torch.dtype, torch.dtype, torch.dtype], None]()
    for store, precision in facts.stores:
        stored, indices = stored_dtype(store), range(len(store.kinds))
        own = sum(
            store.part(index, store.rank).numel
            if store.is_flattened
            else math.prod(store.sharded_shape(index, store.rank))
            for index in indices
        )
        held, sent = (own, store.dtype) if store.has_extension else (store.numel, precision.gather)
        of_store = sum(math.prod(store.shape(index)) for index in indices)
        numel, own_numel = numel + of_store, own_numel + own
        if store.has_blocks:
            padding += store.ranks * store.numel - of_store
        shard_nbytes += held * stored.itemsize
        gathered_nbytes += store.ranks * store.numel * sent.itemsize if store.ranks > 1 else 0
        dtypes[stored, precision.gather, precision.reduce] = None
    numbers = numel, own_numel, shard_nbytes, gathered_nbytes
    return UnitDescription(name, *facts[:4], *numbers, tuple(dtypes), padding / max(numel, 1))


def padding_notes(units: Sequence[UnitDescription]) -> list[str]:
    """Return a line about the unit with the most padding, if there is any."""
    most = max(units, key=lambda unit: unit.padding, default=None)
    if most is None or not most.padding:
        return []
    return [f"padding between blocks: at most {most.padding:.2%}, in {most.name or '(root)'}"]


@dataclasses.dataclass(frozen=True, repr=False)
class Description:
    """How a model is sharded; ``print`` shows it as a table.

    Attributes:
        units: the units, outer ones first.
        whole: the parameters and buffers that every rank holds whole, by name."""

    units: tuple[UnitDescription, ...]
    whole: Mapping[str, Tensor]

    def __repr__(self) -> str:
        alike = itertools.groupby(self.units, lambda unit: dataclasses.replace(unit, name=""))
        rows = [(*_TITLES.split("|"),), *(_row_of_units(list(units)) for _, units in alike)]
        totals = [(each.numel, each.shard_nbytes, each.gathered_nbytes) for each in self.units]
        notes = [_NOTE]
        for title, is_param in (("other parameters", True), ("buffers", False)):
            found = {k: v for k, v in self.whole.items() if isinstance(v, nn.Parameter) is is_param}
            if found:
                tensors = found.values()
                totals.append((sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors), 0))
                dtypes = dict.fromkeys(dtype_text(tensor.dtype) for tensor in tensors)
                rows.append((title, "", "", "", *_texts(*totals[-1]), ", ".join(dtypes)))
                notes.append(f"{title} (not sharded): {joined([*found], _NUM_NAMES, ', ')}")
        notes += padding_notes(self.units)
        total = _texts(*map(sum, zip((0, 0, 0), *totals, strict=True)))
        rows.append(("total", "", "", "", *total, ""))
        names, strategies = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = (_ROW.format(row[0], names, row[1], strategies, *row[2:]).rstrip() for row in rows)
        return "\n".join([*lines, *notes])


def describe(model: nn.Module) -> Description:
    """Return how a model is sharded; ``print`` shows it as a table.

    Call it on any rank at any time, even before the first forward. Nothing is sent.

    Args:
        model: the whole model, wrapped or sharded in place.

    Returns:
        The units, with the bytes of each on this rank and in an all-gather, and unsharded tensors.

    Raises:
        UsageError: ``model`` is inside a unit, which may hold parts of its parameters."""
    require_module(model, "describe")
    if is_marked(model) and ATTRIBUTE not in model.__dict__:
        raise UsageError.of(
            "The module is a part of a unit.",
            expected="a sharded module, or a module around sharded ones",
            got=f"a {type(model).__name__} inside a sharded module",
            where="describe(model)",
            fix="pass the whole model",
        )
    units, managed = list[UnitDescription](), set[tuple[nn.Module, str]]()
    for path, child in model.named_modules():
        if ATTRIBUTE in child.__dict__:
            facts: UnitFacts = child.__dict__[ATTRIBUTE].unit_facts()
            units.append(describe_unit(facts, clean_name(path)))
            slots = (slot for store, _ in facts.stores for slot in store.shown(None))
            managed.update((slot.module, slot.attribute) for slot in slots)
    return Description(tuple(units), dict(_others_in(model, managed)))


def _others_in(
    model: nn.Module, managed: Collection[tuple[nn.Module, str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of parameters and buffers, each once, but for managed attributes."""
    seen = set[int]()
    for path, module in model.named_modules():
        named = {**_torch_private.parameters_of(module), **module._buffers}
        for name, value in named.items():
            if value is not None and (module, name) not in managed and id(value) not in seen:
                seen.add(id(value))
                yield clean_name(f"{path}.{name}".lstrip(".")), value


def _row_of_units(units: Sequence[UnitDescription]) -> tuple[str, ...]:
    """Return one row for consecutive units that differ in their names alone."""
    unit, num_units = units[0], len(units)
    return (
        (unit.name or "(root)") + (f", each of {num_units}" if num_units > 1 else ""),
        unit.strategy,
        f"{unit.ranks}" if unit.replicas == 1 else f"{unit.replicas} x {unit.ranks}",
        "yes" if unit.is_resharded else "no",
        *_texts(unit.numel, unit.shard_nbytes, unit.gathered_nbytes),
        unit.dtypes_text,
    )


def _texts(numel: int, nbytes: int, gathered_nbytes: int) -> tuple[str, str, str]:
    gathered = nbytes_text(gathered_nbytes) if gathered_nbytes else ""
    return f"{numel:,}", nbytes_text(nbytes), gathered
