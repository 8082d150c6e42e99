"""The six older calls for optimizer state, which newer releases of torch remove one by one. They
run the same algorithm as the newer calls."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..api import as_ours
from ..errors import (
    CheckpointError,
    require_bools,
    require_group,
    require_model_and_optimizer,
    require_module,
    wrong_type,
)
from .model_units import names_before, units_of
from .optim import Values, other_form
from .optim_legacy import Numbering, groups_of_input
from .optim_state_dict import export_optim_state, import_optim_state
from .param_ownership import numbered_names, ownership_of


class OptimStateKeyType(enum.Enum):
    """How the state in an optimizer's dict is keyed: by parameter names, or by numbers."""

    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer's whole state by parameter names, on the CPU; with ``rank0_only``, {}
    on other ranks.

    Collective: one gather per flat parameter and state, like ``optim_state_dict`` in the full form.
    """
    where = "full_optim_state_dict(model, optim)"
    _deprecated("full_optim_state_dict", "optim_state_dict")
    require_model_and_optimizer(model, optim, where)
    require_group(group, where)
    require_bools(where, rank0_only=rank0_only)
    groups = groups_of_input(optim_input, optim, model, where)
    return export_optim_state(
        model,
        optim,
        groups,
        None,
        values=Values.WHOLE,
        to_cpu=True,
        rank0_only=rank0_only,
        group=group,
        where=where,
    )


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the optimizer's state by parameter names, in the sharded form, regardless of the form
    that is set.

    Collective: one small exchange; tensors are not sent.
    """
    where = "sharded_optim_state_dict(model, optim)"
    _deprecated("sharded_optim_state_dict", "optim_state_dict")
    require_model_and_optimizer(model, optim, where)
    require_group(group, where)
    return export_optim_state(
        model,
        optim,
        optim.param_groups,
        None,
        values=Values.BOXES,
        to_cpu=True,
        rank0_only=False,
        group=group,
        where=where,
        first_step=True,
    )


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return the dict that the optimizer loads on this rank, from a full dict that every rank has.
    Collective: one small exchange."""
    where = "shard_full_optim_state_dict(full_optim_state_dict, model)"
    _deprecated("shard_full_optim_state_dict", "optim_state_dict_to_load")
    return _given(full_optim_state_dict, model, optim_input, optim, rank0_only=False, where=where)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """Return the dict that the optimizer loads on this rank, from a sharded dict.

    Collective: one small exchange; values that are sharded differently than the model are gathered.
    """
    where = "flatten_sharded_optim_state_dict(sharded_optim_state_dict, model, optim)"
    _deprecated("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    require_model_and_optimizer(model, optim, where)
    return _given(sharded_optim_state_dict, model, None, optim, rank0_only=False, where=where)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    optim: Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """Return the dict that the optimizer loads on this rank, from a full dict that only rank 0
    needs to have.

    Collective: rank 0 sends one state of one unit at a time.
    """
    where = "scatter_full_optim_state_dict(full_optim_state_dict, model)"
    _deprecated("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    require_group(group, where)
    return _given(full_optim_state_dict, model, optim_input, optim, rank0_only=True, where=where)


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state dict keyed by parameter names, or by numbers, however it was
    keyed; values are not copied.

    model: wrapped or not. Numbers are those of the unwrapped model's optimizer: the parameters of a
    FlatParameter are numbered in the model's order. Sends nothing. Raises UsageError for keys of
    several kinds, and CheckpointError for a parameter that the model or the optimizer does not
    have. ``optim_state_dict_to_load`` accepts both kinds of keys.
    """
    where = "rekey_optim_state_dict(optim_state_dict, optim_state_key_type, model)"
    _deprecated("rekey_optim_state_dict", "optim_state_dict_to_load")
    kind = as_ours(optim_state_key_type, OptimStateKeyType, "optim_state_key_type")
    if kind is None:
        raise wrong_type(
            "optim_state_key_type", "an OptimStateKeyType", optim_state_key_type, where
        )
    _require_model(model, optim, where)
    if (found := other_form(optim_state_dict)) is not None:
        raise CheckpointError.of(
            "This is not an optimizer state dict.",
            expected=found[0],
            got=f"a {type(found[1]).__name__}",
            where=where,
            fix="pass what full_optim_state_dict(...) or optimizer.state_dict() returned",
        )
    groups = groups_of_input(optim_input, optim, model, where)
    units, names = units_of(model), None
    if units:
        names = numbered_names(ownership_of(groups, where, units, model), names_before(model))
    numbering = Numbering(model, groups, names)
    return (numbering.by_names if kind is OptimStateKeyType.PARAM_NAME else numbering.by_numbers)(
        optim_state_dict
    )


def _given(
    state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: Iterable[Any] | None,
    optim: Optimizer | None,
    *,
    rank0_only: bool,
    where: str,
) -> dict[str, Any]:
    _require_model(model, optim, where)
    groups = groups_of_input(optim_input, optim, model, where)
    label = type(optim).__name__ if optim is not None else "the optimizer"
    return import_optim_state(
        model, groups, state_dict, rank0_only=rank0_only, label=label, where=where, as_saved=True
    )


def _require_model(model: Any, optim: Any, where: str) -> None:
    """Raise UsageError unless ``model`` is a module and ``optim`` is None or an optimizer."""
    if optim is None:
        require_module(model, where)
    else:
        require_model_and_optimizer(model, optim, where)


def _deprecated(old: str, new: str) -> None:
    warnings.warn(
        f"FullyShardedDataParallel.{old} is deprecated; use FullyShardedDataParallel.{new} "
        "instead.",
        DeprecationWarning,
        stacklevel=3,
    )
