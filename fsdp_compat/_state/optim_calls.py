"""Optimizer state dicts, as `FullyShardedDataParallel` exports and loads them."""

from __future__ import annotations

import dataclasses
import typing
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .._engine import rendezvous
from ..api import StateDictType
from ..errors import require_bools, require_group, require_model_and_optimizer
from .dry_run import first_states, states_to_be
from .forms import get_state_dict_type
from .older_optimizers import convert
from .optim_agreement import agree_together
from .optim_contents import ParamOwnership, ownership_of, require_units
from .optim_export import ExportOptions, Values, facts_of, optim_state, source_of
from .optim_import import LoadOptions, optim_state_to_load
from .rank0 import Rank0Broadcast
from .rank_local import unshardable
from .units import model_units_in, names_before, refuse_extensions, runtimes_of, units_of

# Optimizers whose rank-local states this process has warned of.
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer's state keyed by parameter names, in the form set for ``model``.

    optim_state_dict: what ``optim.state_dict()`` returned; None: it is called. It may be keyed by
    numbers or by the model's current parameter names, and may lack "param_groups". State that
    belongs to no parameter is copied, with a warning.

    Collective: one small exchange, and in the full form one gather per flat parameter and state.
    The optimizers of all ranks must hold the same parameters, in any order, except for parameters
    that a rank has no part of.

    In the sharded form tensors are copies of this rank's boxes. For an optimizer without state, the
    result is what its first step would create, so that torch.distributed.checkpoint can read a
    checkpoint into it.

    A state that is neither a number nor has one element per element of its parameter is rank-local:
    its key ends with ``@rank`` and the rank's number, and it can only be loaded at an equal layout.
    The first such call warns.
    """
    where = "optim_state_dict(model, optim, optim_state_dict)"
    require_model_and_optimizer(model, optim, where)
    require_group(group, where)
    form = form_set(model)
    sharded = form["values"] is not Values.WHOLE
    return export_optim_state(
        model,
        optim,
        optim.param_groups,
        optim_state_dict,
        **form,
        group=group,
        where=where,
        first_step=sharded,
    )


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the dict that ``optim.load_state_dict`` takes, from one keyed by parameter names, full
    or sharded, or by numbers.

    A dict keyed by numbers comes from the optimizer of an unwrapped model, or of a model in
    DistributedDataParallel. The result is keyed by the numbers of ``optim``, or with
    ``is_named_optimizer`` by the model's current parameter names, and has "param_groups" if the
    given dict has. The number of ranks, the wrapping and the ``use_orig_params`` that it was saved
    with do not matter. ``load_directly`` also loads the result into ``optim``.

    Collective: one small exchange, in which ranks agree whether the dict fits. With full values, or
    boxes of this rank's shards, nothing else is sent; other sharded values are gathered. With
    ``FullOptimStateDictConfig(rank0_only=True)`` set for the model, ranks other than the first may
    pass None; the first rank sends them their state, one unit at a time.
    """
    where = "optim_state_dict_to_load(model, optim, optim_state_dict)"
    require_model_and_optimizer(model, optim, where)
    require_group(group, where)
    require_bools(where, is_named_optimizer=is_named_optimizer, load_directly=load_directly)
    config = get_state_dict_type(model).optim_state_dict_config
    loadable = import_optim_state(
        model,
        optim.param_groups,
        optim_state_dict,
        rank0_only=bool(getattr(config, "rank0_only", False)),
        label=type(optim).__name__,
        where=where,
        named=optim if is_named_optimizer else None,
    )
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


class _ExportSettings(typing.TypedDict):
    values: Values
    to_cpu: bool
    rank0_only: bool


def form_set(model: nn.Module) -> _ExportSettings:
    """Return the form of optimizer state dicts that is set for ``model``, as arguments of
    ``export_optim_state``."""
    settings = get_state_dict_type(model)
    config: Any = settings.optim_state_dict_config
    values = Values.BOXES
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        values = Values.WHOLE
    elif getattr(config, "_use_dtensor", False):
        values = Values.DTENSORS
    return {
        "values": values,
        "to_cpu": bool(config.offload_to_cpu),
        "rank0_only": bool(getattr(config, "rank0_only", False)),
    }


def export_optim_state(
    model: nn.Module,
    optim: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any] | None,
    *,
    values: Values,
    to_cpu: bool,
    rank0_only: bool,
    group: dist.ProcessGroup | None,
    where: str,
    first_step: bool = False,
) -> dict[str, Any]:
    """Return the optimizer's state by names. Collective: one small exchange, and gathers unless
    ``values`` are boxes.

    groups: the optimizer's parameter groups. state_dict: what ``optim.state_dict()`` returned;
    None: it is called. group: its rank 0 keeps the result if ``rank0_only``; None: the model's
    group. first_step: for an optimizer without state, return what its first step would create.
    """
    call = where.partition("(")[0]
    _require_idle(model, call)
    units = units_of(model)
    require_units(units, model, f"the state of {type(optim).__name__}")
    all_groups = [each for named in units for each in named.unit.groups]
    if values is Values.WHOLE:
        refuse_extensions(all_groups, call)
    rendezvous.require_all_ranks(call, all_groups)
    ownership, source, problem = None, None, None
    facts: Any = None
    try:
        convert(optim)
        ownership = ownership_of(groups, f"the state of {type(optim).__name__}", units, model)
        source = source_of(
            ownership, optim.state_dict() if state_dict is None else state_dict, where
        )
        if first_step and not source.states and not optim.state:
            source = dataclasses.replace(
                source, states=first_states(ownership, optim), is_dry_run=True
            )
        facts = facts_of(ownership, source)
    except Exception as error:  # raised later, after the other ranks have been told
        ownership, problem = None, error
    agreed = agree_together(ownership, all_groups, problem, facts, where)
    assert ownership is not None
    assert source is not None
    if optim not in _warned:
        warn_of_layout(unshardable(ownership, source.states), optim, stacklevel=4)
    first = model_units_in(model)[0]
    is_first = first.mesh.is_first if group is None else dist.get_rank(group) == 0
    keep = values is not Values.WHOLE or not rank0_only or is_first
    return optim_state(
        ownership,
        source,
        agreed,
        ExportOptions(values, to_cpu, keep, first.group, first.device_mesh),
    )


def import_optim_state(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any] | None,
    *,
    rank0_only: bool,
    label: str,
    where: str,
    named: Optimizer | None = None,
    as_saved: bool = False,
) -> dict[str, Any]:
    """Return the dict that an optimizer with these parameter groups loads. Collective: see
    ``optim_state_dict_to_load``.

    label: the optimizer, for errors. named: the optimizer, if its state is keyed by names.
    as_saved: True for the older calls; see ``LoadOptions``.
    """
    _require_idle(model, where.partition("(")[0])
    units = units_of(model)
    require_units(units, model, f"the state of {label}")
    first = model_units_in(model)[0]
    all_groups = [group for named in units for group in named.unit.groups]
    rendezvous.require_all_ranks(where.partition("(")[0], all_groups, copies=True)
    ownership: ParamOwnership | None = None
    problem: Exception | None = None
    try:
        ownership = ownership_of(groups, f"the state of {label}", units, model)
    except Exception as error:  # raised later, after the other ranks have been told
        problem = error
    rank0 = Rank0Broadcast(first.mesh, first.device)
    wanted = LoadOptions(names_before(model), from_rank0=rank0_only, as_saved=as_saved, named=named)
    return optim_state_to_load(ownership, problem, all_groups, state_dict, wanted, rank0, where)


def check_optimizer(model: nn.Module, optim: Optimizer) -> list[str]:
    """Return the states of an optimizer that cannot be resharded, as ``"parameter.state"``; an
    empty list if every state can.

    Such states (factored moments, scales of 8-bit blocks, objects) are saved, and can be loaded at
    an equal layout: the same number of ranks, strategy, wrapping and ``use_orig_params``. For
    parameters without state, as before training, a copy of the optimizer takes one step with zero
    gradients on copies of them, one parameter of each kind at a time; model and optimizer do not
    change. The result covers this rank's parts only; nothing is sent. Raises StateError if the step
    of the copy fails: call it again after the first real step.
    """
    where = "check_optimizer(model, optim)"
    require_model_and_optimizer(model, optim, where)
    _require_idle(model, "check_optimizer")
    convert(optim)
    ownership = ownership_of(
        optim.param_groups, f"the state of {type(optim).__name__}", units_of(model), model
    )
    return unshardable(ownership, states_to_be(ownership, optim))


def warn_of_layout(names: Sequence[str], optim: Optimizer, stacklevel: int) -> None:
    """Warn, once per optimizer, of rank-local states. stacklevel: as the caller would pass it to
    ``warnings.warn``."""
    if names and optim not in _warned:
        _warned.add(optim)
        warnings.warn(
            f"{len(names)} state(s) of {type(optim).__name__} are saved, but can only be loaded "
            "with the layout that they are saved with (the same number of ranks, sharding "
            f"strategy, wrapping and use_orig_params): {', '.join(names)}.",
            stacklevel=stacklevel,
        )


def _require_idle(model: nn.Module, what: str) -> None:
    for runtime in runtimes_of(model_units_in(model)):
        runtime.require_idle(what)
        runtime.require_parts(what)
