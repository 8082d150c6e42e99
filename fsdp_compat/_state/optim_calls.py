"""Optimizer state dicts, as `FullyShardedDataParallel` exports and loads them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..errors import require_bools, require_group, require_model_and_optimizer
from .dry_run import states_to_be
from .forms import get_state_dict_type
from .older_optimizers import convert
from .optim_contents import classify_all, ownership_of
from .optim_export import Values, export_optim_state, form_set
from .optim_import import LoadOptions, import_optim_state
from .rank_local import rank_local_names
from .units import require_idle, units_of


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
    form, groups = form_set(model), optim.param_groups
    first_step = form.values is not Values.WHOLE
    return export_optim_state(
        model,
        optim,
        groups,
        optim_state_dict,
        form,
        group=group,
        where=where,
        first_step=first_step,
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
    wanted = LoadOptions(
        from_rank0=bool(getattr(config, "rank0_only", False)),
        named=optim if is_named_optimizer else None,
    )
    loadable = import_optim_state(
        model, optim.param_groups, optim_state_dict, wanted, type(optim).__name__, where
    )
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


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
    require_idle(model, "check_optimizer")
    convert(optim)
    ownership = ownership_of(
        optim.param_groups, f"the state of {type(optim).__name__}", units_of(model), model
    )
    return rank_local_names(ownership, classify_all(states_to_be(ownership, optim)))
