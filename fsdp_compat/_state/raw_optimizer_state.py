"""``optimizer.state_dict()`` itself, without ``FSDP.optim_state_dict``: this rank's parts alone.

Another rank, or a model that is cut differently, would take them for the state of its own elements:
they often have the same shape. So the dict gets a key beside "state" and "param_groups", which
other readers ignore, with plain values that say whose it is, and ``load_state_dict`` compares.
DTensors need none: torch.distributed.checkpoint can reshard them, and the mesh of an unpickled one
still has the coordinates of the rank that saved it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .._engine import hooks
from ..errors import CheckpointError
from .older_optimizers import store_of_param
from .reading_values import misfit

_KEY = "fsdp_compat"

_undo: list[Callable[[], None]] = []


def patch() -> None:
    """Let state dicts of sharded parameters say whose they are, and optimizers load only theirs."""
    if not _undo:
        _undo.append(hooks.around_method(torch.optim.Optimizer, "state_dict", _take))
        _undo.append(hooks.around_method(torch.optim.Optimizer, "load_state_dict", _load))


def undo() -> None:
    """Restore torch's methods."""
    while _undo:
        _undo.pop()()


def _take(original: Callable[[], dict[str, Any]], optimizer: torch.optim.Optimizer) -> Any:
    state_dict = original()
    owner = _owner_of(optimizer)
    return state_dict if owner is None else {**state_dict, _KEY: owner}


def _load(
    original: Callable[[Any], None], optimizer: torch.optim.Optimizer, state_dict: Any
) -> None:
    if isinstance(state_dict, Mapping):
        _require_own(optimizer, state_dict)
    original(state_dict)


def _owner_of(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Describe whose parts the optimizer's state is; None if its parameters are whole."""
    owner: tuple[int, int] | None = None
    cuts = list[Any]()
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        store = store_of_param(parameter)
        if store is not None and store.ranks > 1:
            owner = owner or (store.rank, store.ranks)
            cuts.append((store.rank, store.ranks, tuple(parameter.shape)))
            cuts += [
                (store.local_shape(index), store.part(index, store.rank))
                for sharded_param, indices in store.sharded_params
                if sharded_param is parameter
                for index in indices
            ]
    if owner is None:
        return None
    return {"rank": owner[0], "ranks": owner[1], "layout": zlib.crc32(repr(cuts).encode())}


def _require_own(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the parts of another rank, or of another layout."""
    saved = state_dict.get(_KEY)
    owner = None if saved is None else _owner_of(optimizer)
    expected, got = "this rank's parts", ""
    if saved is not None and saved != owner:
        expected, got = _described(owner), _described(saved)
        if got == expected:
            got += " of parameters that were wrapped or cut otherwise"
    states = state_dict.get("state")
    for state in states.values() if isinstance(states, Mapping) and not got else ():
        for value in state.values() if isinstance(state, Mapping) else ():
            got = got or misfit(value) or ""
    if got:
        raise CheckpointError.of(
            "An optimizer's own state dict belongs to one rank.",
            expected=expected,
            got=got,
            where=f"{type(optimizer).__name__}.load_state_dict"
            + (f", global rank {dist.get_rank()}" if dist.is_initialized() else ""),
            fix="save FSDP.optim_state_dict(model, optimizer), or use fsdp_compat.checkpoint: "
            "any number of ranks can load them. To load what optimizer.state_dict() returned, "
            "save it on every rank, and load this rank's file in an equal layout",
        )


def _described(owner: Mapping[str, Any] | None) -> str:
    if owner is None:
        return "the state of whole parameters"
    return f"the parts of rank {owner.get('rank')} of {owner.get('ranks')}"
