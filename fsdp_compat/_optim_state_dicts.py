"""State dicts of optimizers of wrapped models: what `FullyShardedDataParallel` has of them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ._checks import require_bools, require_group, require_model_and_optimizer
from ._engine import meeting
from ._instances import instances_in, named_units, names_before
from ._optimizers import convert
from ._state.dry_run import states_to_be
from ._state.holdings import holdings_of
from ._state.opaque import unshardable
from ._state.optim import Form, Values, by_target, optim_state
from ._state.optim_load import optim_state_to_load
from ._state.sending import FirstRank
from ._state_dicts import StateDicts
from .api import StateDictType

__all__ = ["OptimStateDicts", "check_optimizer", "given_states", "taken_states", "warn_of_layout"]

_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose states were said to need an equal layout


class OptimStateDicts(StateDicts):
    """The part of an instance that gives and takes the state of its optimizer."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_state_dict: dict[str, Any] | None = None, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return the optimizer's state keyed by parameter names, in the form set for ``model``.

        optim_state_dict: what ``optim.state_dict()`` gives, if it is there. Collective in the full form: one gather per flat
        parameter and state. In the sharded form tensors are this rank's boxes; with ``offload_to_cpu=False`` (it
        is True by default) they view the optimizer's own state, and change when training goes on.
        A state that is neither a number nor has one element per element of its parameter belongs to this rank's part: it is kept
        under a key that ends with ``@rank`` and its number, and can be loaded at an equal layout only; the first such call warns.
        """
        where = "optim_state_dict(model, optim, optim_state_dict)"
        require_model_and_optimizer(model, optim, where)
        require_group(group, where)
        settings = OptimStateDicts.get_state_dict_type(model)
        config: Any = settings.optim_state_dict_config
        values = Values.BOXES
        if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            values = Values.WHOLE
        elif getattr(config, "_use_dtensor", False):
            values = Values.DTENSORS
        return taken_states(
            model,
            optim,
            optim.param_groups,
            optim_state_dict,
            values=values,
            to_cpu=bool(config.offload_to_cpu),
            rank0_only=bool(getattr(config, "rank0_only", False)),
            group=group,
            where=where,
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the dict that ``optim.load_state_dict`` takes, from one keyed by parameter names, full or sharded, or by numbers.

        By numbers is what the optimizer of an unwrapped model, or of one in DistributedDataParallel, gives.
        The number of ranks, the wrapping and ``use_orig_params`` it was saved with do not matter. ``load_directly`` loads it, too.
        Collective: one small exchange, in which ranks agree whether the dict fits. With full values, or boxes of the own shards,
        nothing else is sent; other sharded values are gathered. With ``FullOptimStateDictConfig(rank0_only=True)`` set for the
        model, ranks other than the first may pass None: it sends them their state, one unit at a time.
        """
        where = "optim_state_dict_to_load(model, optim, optim_state_dict)"
        require_model_and_optimizer(model, optim, where)
        require_group(group, where)
        require_bools(where, is_named_optimizer=is_named_optimizer, load_directly=load_directly)
        config = OptimStateDicts.get_state_dict_type(model).optim_state_dict_config
        loadable = given_states(
            model,
            optim.param_groups,
            optim_state_dict,
            rank0_only=bool(getattr(config, "rank0_only", False)),
            label=type(optim).__name__,
            where=where,
        )
        if load_directly:
            optim.load_state_dict(loadable)
        return loadable


def taken_states(
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
) -> dict[str, Any]:
    """Return the optimizer's state by names; collective unless ``values`` are boxes.

    groups: the optimizer's parameter groups. state_dict: what it gives, or None for that. group: whose first rank keeps the result
    if ``rank0_only``, by default the model's.
    """
    _require_idle(model, where.partition("(")[0])
    convert(optim)
    holdings = holdings_of(groups, f"the state of {type(optim).__name__}", named_units(model), model)
    source = optim.state_dict() if state_dict is None else state_dict
    states = by_target(holdings, source, where)
    if optim not in _warned:
        warn_of_layout(unshardable(holdings, states), optim, stacklevel=4)
    settings = instances_in(model)[0]._settings
    is_first = settings.mesh.is_first if group is None else dist.get_rank(group) == 0
    keep = values is not Values.WHOLE or not rank0_only or is_first
    if values is not Values.BOXES:
        meeting.meet(where.partition("(")[0], (each for named in named_units(model) for each in named.unit.groups))
    return optim_state(holdings, source, states, Form(values, to_cpu, keep, settings.group, settings.device_mesh))


def given_states(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any] | None,
    *,
    rank0_only: bool,
    label: str,
    where: str,
) -> dict[str, Any]:
    """Return what an optimizer with these parameter groups loads; collective, see ``optim_state_dict_to_load``.

    label: the optimizer, for errors.
    """
    _require_idle(model, where.partition("(")[0])
    units = named_units(model)
    holdings = holdings_of(groups, f"the state of {label}", units, model)
    settings = instances_in(model)[0]._settings
    meeting.meet(where.partition("(")[0], (each for named in units for each in named.unit.groups), copies=True)
    first = FirstRank(settings.mesh, settings.device)
    return optim_state_to_load(holdings, state_dict, names_before(model), first, from_first=rank0_only, call=where)


def check_optimizer(model: nn.Module, optim: Optimizer) -> list[str]:
    """Return the states of an optimizer that cannot be resharded, as ``"parameter.state"``: empty if every state can.

    Such states (factored moments, scales of 8-bit blocks, objects) are saved, and loaded at an equal layout: the same number of
    ranks, strategy, wrapping and ``use_orig_params``. For parameters without state, before training, a copy of the optimizer takes
    one step on stand-ins of zeros, one parameter of each kind at a time; model and optimizer do not change. The names are those of
    this rank's parts; nothing is sent. Raises StateError if the step of such a copy fails: ask again after the first real one.
    """
    where = "check_optimizer(model, optim)"
    require_model_and_optimizer(model, optim, where)
    _require_idle(model, "check_optimizer")
    convert(optim)
    holdings = holdings_of(optim.param_groups, f"the state of {type(optim).__name__}", named_units(model), model)
    return unshardable(holdings, states_to_be(holdings, optim))


def warn_of_layout(names: Sequence[str], optim: Optimizer, stacklevel: int) -> None:
    """Warn, once for an optimizer, of states that belong to one rank's part. stacklevel: of who calls this."""
    if names and optim not in _warned:
        _warned.add(optim)
        warnings.warn(
            f"{len(names)} state(s) of {type(optim).__name__} are saved, but can only be loaded with the layout that they are "
            f"saved with (the same number of ranks, sharding strategy, wrapping and use_orig_params): {', '.join(names)}.",
            stacklevel=stacklevel,
        )


def _require_idle(model: nn.Module, what: str) -> None:
    for instance in instances_in(model):
        instance._runtime.require_idle(what)
        instance._runtime.require_parts(what)
