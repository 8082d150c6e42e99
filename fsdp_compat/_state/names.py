"""Names without the parts that wrappers add."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._engine.group import Group
from .._engine.state_store import FLAT_PARAM, flat_param_name, store_of
from .._engine.unit import Unit
from .._layout.rows import CopiedLayout
from .._layout.spec import Section
from ..errors import takes, wrong_type

Wanted = Callable[
    [str, bool], bool
]  # (name, whether it is a parameter that requires grad) -> whether a state dict is to hold it

FSDP_WRAPPED_MODULE = (
    "_fsdp_wrapped_module"  # the child that holds the wrapped module, named as in torch
)
_CHECKPOINT_WRAPPED_MODULE = (
    "_checkpoint_wrapped_module"  # torch's wrapper of activation checkpointing has its module there
)
_WRAPPERS = frozenset({FSDP_WRAPPED_MODULE, _CHECKPOINT_WRAPPED_MODULE})


def clean_name(name: str) -> str:
    """Return a parameter's, buffer's or module's name as it was before FSDP and activation
    checkpointing wrapped anything."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def without_checkpoint_wrapper(name: str) -> str:
    """Return a name as the wrapper of activation checkpointing reports it: without its own part."""
    return ".".join(part for part in name.split(".") if part != _CHECKPOINT_WRAPPED_MODULE)


def everything(name: str, trainable: bool) -> bool:
    """The choice of a state dict without a filter."""
    return True


def wanted_by(given: Any, where: str) -> Wanted:
    """Return what a ``filter`` chooses: a function of a name, the string "trainable", or None for
    everything.

    Raises UsageError for anything else.
    """
    if given is None:
        return everything
    if given == "trainable":
        return lambda name, trainable: trainable
    if not callable(given) or not takes(given, 1):
        raise wrong_type(
            "filter",
            "a function of a name that returns True or False, the string 'trainable', or None",
            given,
            where,
        )
    return lambda name, trainable: bool(given(name))


def flat_names(unit: Unit) -> list[str]:
    """Return the names of a unit's flat parameters in local state dicts: one per section of the
    shards of its groups."""
    return [name for name, _, _ in named_sections(unit)]


def named_sections(unit: Unit) -> list[tuple[str, Group, Section]]:
    """Return the sections of the shards of a unit's groups, with their names in local state
    dicts."""
    sections = [(group, section) for group in unit.groups for section in store_of(group).sections]
    return [(flat_param_name(number), *found) for number, found in enumerate(sections)]


def shows_originals(unit: Unit) -> bool:
    """True if the unit's own parameters are 1-D views of flat shards: use_orig_params=True."""
    stores = [store_of(group) for group in unit.groups]
    return not any(
        store.is_flattened
        or len(store.sections) > 1
        or isinstance(store.sections[0].layout, CopiedLayout)
        for store in stores
    )


def is_flat_name(name: str) -> bool:
    """True for the name of a flat parameter, of any unit of any model."""
    last = name.rpartition(".")[2]
    return last == FLAT_PARAM or (
        last.startswith(f"{FLAT_PARAM}_") and last.removeprefix(f"{FLAT_PARAM}_").isdecimal()
    )


def in_module_order(keys: Sequence[str], order: Sequence[str]) -> list[str]:
    """Return ``keys`` in the order of ``order``; those it does not know keep their place at the
    end."""
    known = {key: position for position, key in enumerate(order)}
    return sorted(keys, key=lambda key: known.get(key, len(known)))


def param_names(unit: Unit) -> Iterator[str]:
    """Yield all names of all parameters of a unit, without the unit's prefix."""
    for group in unit.groups:
        for param in store_of(group).orig_params:
            yield from map(clean_name, param.names)
