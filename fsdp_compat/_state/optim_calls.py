"""The calls for optimizer state of `FullyShardedDataParallel`; the six older ones run the same
algorithm."""

from __future__ import annotations

import copy
import enum
import itertools
import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..api import as_ours
from ..errors import (
    AssertedUsageError,
    CheckpointError,
    TypeUsageError,
    UsageError,
    require_bools,
    require_group,
    require_model_and_optimizer,
    require_module,
    wrong_type,
)
from .block_checks import warn_of_blocks
from .dry_run import states_to_be
from .elementwise import warn_of_parts
from .forms import get_state_dict_type
from .optim_contents import HeldStates, begin, numbered_names, ownership_of, require_state_dict
from .optim_export import ExportForm, Values, export_optim_state, form_set
from .optim_import import import_optim_state
from .optimizer_checks import cut_shapes, cut_state
from .rank_local import rank_local_names
from .units import names_before, units_of

_Input = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class OptimStateKeyType(enum.Enum):
    """How the state in an optimizer's dict is keyed.

    Attributes:
        PARAM_NAME: by the names of parameters.
        PARAM_ID: by numbers."""

    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer's state keyed by parameter names, in the form set for ``model``.

    The optimizers of all ranks must hold the same parameters, in any order, except for parameters
    that a rank has no part of.

    In the sharded form tensors are copies of this rank's shards. For an optimizer without state,
    the result is what its first step would create, so that torch.distributed.checkpoint can read a
    checkpoint into it.

    A state that is neither a number nor has one element per element of its parameter is rank-local:
    its key ends with ``@rank`` and the rank's number, and it can only be loaded at an equal layout.
    The first such call warns.

    Collective: all ranks of the model's process group. One small exchange, and in the full form one
    gather per flat parameter and state.

    Args:
        model: the model.
        optim: its optimizer.
        optim_state_dict: what ``optim.state_dict()`` returned; None: it is called. It may be keyed
            by numbers or by the model's current parameter names, and may lack "param_groups". State
            that belongs to no parameter is copied, with a warning.
        group: its rank 0 gets the result if ``rank0_only`` is set; None: the model's group.

    Returns:
        The dict with "state" and "param_groups"."""
    where = "optim_state_dict(model, optim, optim_state_dict)"
    require_model_and_optimizer(model, optim, where)
    require_group(group, where)
    form, given = form_set(model), optim_state_dict
    return export_optim_state(model, optim, optim.param_groups, given, form, where, group)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the dict that ``optim.load_state_dict`` takes.

    The given dict is keyed by parameter names, full or sharded, or by numbers; one keyed by numbers
    comes from the optimizer of an unwrapped model, or of a model in DistributedDataParallel. The
    number of ranks, the wrapping and the ``use_orig_params`` that it was saved with do not matter.

    With whole values on every rank nothing is sent, and ranks may call it one after the other, or
    alone. With ``FullOptimStateDictConfig(rank0_only=True)`` set for the model, ranks other than
    the first may pass None; the first rank sends them their state, one unit at a time.

    Collective: all ranks of the model's process group, with sharded values or ``rank0_only=True``.
    One small exchange, in which ranks agree whether the dict fits; values that are sharded
    differently are gathered.

    Args:
        model: the model.
        optim: its optimizer.
        optim_state_dict: the dict to load.
        is_named_optimizer: whether to key the result by the model's current parameter names instead
            of the numbers of ``optim``.
        load_directly: whether to load the result into ``optim`` as well.
        group: accepted for compatibility.

    Returns:
        The dict for this rank, with "param_groups" if the given dict has them.

    Raises:
        CheckpointError: the dict does not fit the model and the optimizer."""
    where = "optim_state_dict_to_load(model, optim, optim_state_dict)"
    require_model_and_optimizer(model, optim, where)
    require_group(group, where)
    require_bools(where, is_named_optimizer=is_named_optimizer, load_directly=load_directly)
    config = get_state_dict_type(model).optim_state_dict_config
    loadable = import_optim_state(
        model,
        optim.param_groups,
        optim_state_dict,
        where,
        optim,
        from_rank0=bool(getattr(config, "rank0_only", False)),
        is_named=is_named_optimizer,
    )
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


def check(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the states, as ``"parameter.state"``, that cannot be resharded; usually none.

    Such states (factored moments, objects; with ``shard_blocks`` not those of blocks) are saved,
    and can be loaded at an equal layout: the same number of ranks, strategy, wrapping and
    ``use_orig_params``. The result covers this rank's parts only; nothing is sent.

    Warns, as the first step does, of an optimizer that is wrong on shards, because its update of a
    parameter needs the whole: Muon, Adafactor, LARS. ``GatheredOptimizer`` is the way out. Also of
    8-bit and other states of blocks that shards cut, with the ``shard_blocks`` that mend it.

    Args:
        model: a sharded model.
        optimizer: of its parameters. For those without state, as before training, a copy takes one
            step with zero gradients on copies of them, one parameter of each kind at a time; model
            and optimizer do not change.

    Returns:
        The states; an empty list if all can be resharded.

    Raises:
        StateError: the step of the copy fails: call it again after the first real step."""
    where = "optim.check(model, optimizer)"
    require_model_and_optimizer(model, optimizer, where, "optimizer")
    label = f"the state of {type(optimizer).__name__}"
    units, _ = begin(model, "optim.check", label, meet=False)
    cut_state(optimizer)
    warn_of_parts(optimizer, cut_shapes(optimizer), stacklevel=3)
    ownership = ownership_of(optimizer.param_groups, label, units, model)
    warn_of_blocks(ownership, optimizer, stacklevel=3)
    return rank_local_names(HeldStates(ownership, states_to_be(ownership, optimizer)))


# -- the older calls

_TO_LOAD = "optim_state_dict_to_load"  # takes the place of most of them


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: _Input = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer's whole state by parameter names, on the CPU.

    Deprecated: otherwise as ``optim_state_dict`` in the full form. ``optim_input`` is what the
    optimizer was created from, by default its groups. With ``rank0_only`` other ranks get {}.

    Collective: all ranks of the model's process group. One gather per flat parameter and state."""
    where = _called("full_optim_state_dict", "optim_state_dict", model, optim, group)
    require_bools(where, rank0_only=rank0_only)
    groups = _groups_of(optim_input, optim, model, where)
    form = ExportForm(Values.WHOLE, to_cpu=True, rank0_only=rank0_only)
    return export_optim_state(model, optim, groups, None, form, where, group)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the optimizer's state by parameter names in the sharded form, whatever form is set.

    Deprecated: otherwise as ``optim_state_dict``; ``group`` is ignored.

    Collective: all ranks of the model's process group. One small exchange; tensors are not sent."""
    where = _called("sharded_optim_state_dict", "optim_state_dict", model, optim, group)
    form = ExportForm(Values.BOXES, to_cpu=True, first_step=True)
    return export_optim_state(model, optim, optim.param_groups, None, form, where)


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: _Input = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return what this rank loads from a ``full_optim_state_dict`` that every rank has.

    Nothing is sent. Deprecated: otherwise as ``optim_state_dict_to_load``. The optimizer is
    ``optim``, or one created from ``optim_input``, or by default one over all parameters of the
    model."""
    where = _called("shard_full_optim_state_dict", _TO_LOAD, model, optim)
    groups = _groups_of(optim_input, optim, model, where)
    return import_optim_state(model, groups, full_optim_state_dict, where, optim)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """Return what this rank loads from a ``sharded_optim_state_dict``.

    Deprecated: otherwise as ``optim_state_dict_to_load``.

    Collective: all ranks of the model's process group. One small exchange; values that are sharded
    differently than the model are gathered."""
    where = _called("flatten_sharded_optim_state_dict", _TO_LOAD, model, optim)
    require_model_and_optimizer(model, optim, where)
    return import_optim_state(model, optim.param_groups, sharded_optim_state_dict, where, optim)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: _Input = None,
    optim: Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """Return what this rank loads from a ``full_optim_state_dict`` that only rank 0 needs.

    Other ranks may pass None. Deprecated: otherwise as ``shard_full_optim_state_dict``; ``group``
    is ignored.

    Collective: all ranks of the model's process group. Rank 0 sends one state of one unit at a
    time."""
    where = _called("scatter_full_optim_state_dict", _TO_LOAD, model, optim, group)
    groups, given = _groups_of(optim_input, optim, model, where), full_optim_state_dict
    return import_optim_state(model, groups, given, where, optim, from_rank0=True)


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: _Input = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state dict keyed by parameter names, or by numbers.

    Values are not copied, and nothing is sent. Deprecated: ``optim_state_dict_to_load`` accepts
    both kinds of keys.

    Args:
        optim_state_dict: the dict; it does not matter how it is keyed.
        optim_state_key_type: the kind of keys to return. Numbers are those of the unwrapped model's
            optimizer: the parameters of a FlatParameter are numbered in the model's order.
        model: the model, wrapped or not.
        optim_input: what the optimizer was created from; default: its parameter groups.
        optim: the optimizer; default: one over all parameters of the model.

    Returns:
        The dict with other keys.

    Raises:
        CheckpointError: keys of both kinds, or of a parameter that the model or ``optim`` lacks."""
    where = _called("rekey_optim_state_dict", _TO_LOAD, model, optim)
    kind = as_ours(optim_state_key_type, OptimStateKeyType, "optim_state_key_type")
    if kind is None:
        raise wrong_type("optim_state_key_type", "an OptimStateKeyType", kind, where)
    require_state_dict(optim_state_dict, where, CheckpointError)
    groups = optim_state_dict.get("param_groups", ())
    used = [*optim_state_dict["state"], *(key for group in groups for key in group["params"])]
    kinds = {type(key) for key in used}
    if kinds == {str if kind is OptimStateKeyType.PARAM_NAME else int}:
        return dict(optim_state_dict)
    given = _groups_of(optim_input, optim, model, where)
    ownership = ownership_of(given, where, units_of(model), model)
    names = list(itertools.chain(*numbered_names(ownership, names_before(model))))
    keys: dict[Any, Any]
    if kind is OptimStateKeyType.PARAM_NAME:
        known: dict[Any, Any] = dict(enumerate(names))
        keys = {key: known.get(key) for key in used}
    else:
        known = {name: number for number, name in enumerate(names)}
        keys = {key: known.get(ownership.name_before(key)) for key in used}
    unknown = [key for key in used if keys[key] is None or len(kinds) > 1]
    if unknown:
        raise CheckpointError.of(
            "The optimizer state dict does not belong to the model and the optimizer.",
            expected="names, or numbers, of parameters that the optimizer holds and the model has",
            got=f"the key(s) {', '.join(map(repr, unknown[:3]))}",
            where=where,
            fix="pass an optimizer's state dict unchanged, with its model and optimizer",
        )
    state = {keys[key]: value for key, value in optim_state_dict["state"].items()}
    renamed = [
        {**copy.deepcopy(group), "params": sorted(keys[key] for key in group["params"])}
        for group in groups
    ]
    has_groups = "param_groups" in optim_state_dict
    return {"state": state, "param_groups": renamed} if has_groups else {"state": state}


def _groups_of(
    optim_input: Any, optim: Optimizer | None, model: nn.Module, where: str
) -> list[dict[str, Any]]:
    """Return the groups of ``optim_input``, else the optimizer's, else one of all parameters."""
    if optim_input is None:
        return optim.param_groups if optim is not None else [{"params": list(model.parameters())}]
    try:
        given = [dict(each) if isinstance(each, dict) else each for each in optim_input]
        return _Groups(given, {}).param_groups
    except (TypeError, ValueError, KeyError) as error:
        kinds: dict[type, type[UsageError]] = {ValueError: UsageError, KeyError: AssertedUsageError}
        raise kinds.get(type(error), TypeUsageError).of(
            "optim_input is not what an optimizer is created from.",
            expected="parameters, or dicts with 'params'",
            got=f"a {type(optim_input).__name__} ({error})",
            where=f"argument 'optim_input' of {where}",
            fix="leave it out and pass optim=, the optimizer",
        ) from error


class _Groups(Optimizer):
    """Reads what an optimizer is created from."""


def _called(old: str, new: str, model: Any, optim: Any, group: Any = None) -> str:
    """Warn of a deprecated call, check its arguments, and return its name for errors."""
    instead = f"use FullyShardedDataParallel.{new} instead."
    text = f"FullyShardedDataParallel.{old} is deprecated; {instead}"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    where = f"{old}(...)"
    if optim is None and new == _TO_LOAD:
        require_module(model, where)
    else:
        require_model_and_optimizer(model, optim, where)
    require_group(group, where)
    return where
