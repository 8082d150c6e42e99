"""State dicts of optimizers of wrapped models: what `FullyShardedDataParallel` has of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ._checks import require_bools, require_group, require_model_and_optimizer
from ._optimizers import convert
from ._state.optim import optim_state, optim_state_to_load
from ._state_dicts import StateDicts, instances_in, named_units, names_before
from .api import StateDictType
from .errors import UsageError, explain

__all__ = ["OptimStateDicts"]


class OptimStateDicts(StateDicts):
    """The part of an instance that gives and takes the state of its optimizer."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_state_dict: dict[str, Any] | None = None, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return the optimizer's state keyed by parameter names, in the form set for ``model``.

        optim_state_dict: what ``optim.state_dict()`` gives, if it is there. Collective in the full form: one gather per flat
        parameter and state. In the sharded form tensors are this rank's boxes, which view the optimizer's own state.
        """
        where = "optim_state_dict(model, optim, optim_state_dict)"
        require_model_and_optimizer(model, optim, where)
        require_group(group, where)
        settings = OptimStateDicts.get_state_dict_type(model)
        for instance in instances_in(model):
            instance._runtime.require_idle("optim_state_dict")
            instance._runtime.require_parts("optim_state_dict")
        convert(optim)
        config: Any = settings.optim_state_dict_config
        full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        first = instances_in(model)[0]._settings
        is_first = first.mesh.is_first if group is None else dist.get_rank(group) == 0
        return optim_state(
            model,
            optim,
            optim_state_dict,
            named_units(model),
            full=full,
            to_cpu=bool(config.offload_to_cpu),
            keep=not (full and config.rank0_only and not is_first),
            process_group=first.group,
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
        With full values, or boxes of the own shards, nothing is sent; other sharded values are gathered, collectively.
        """
        where = "optim_state_dict_to_load(model, optim, optim_state_dict)"
        require_model_and_optimizer(model, optim, where)
        require_group(group, where)
        require_bools(where, is_named_optimizer=is_named_optimizer, load_directly=load_directly)
        for instance in instances_in(model):
            instance._runtime.require_idle("optim_state_dict_to_load")
            instance._runtime.require_parts("optim_state_dict_to_load")
        if not isinstance(optim_state_dict, Mapping) or not {"state", "param_groups"} <= optim_state_dict.keys():
            raise UsageError(
                explain(
                    "This is no optimizer state dict.",
                    expected="a dict with 'state' and 'param_groups'",
                    got=f"{sorted(optim_state_dict) if isinstance(optim_state_dict, Mapping) else type(optim_state_dict).__name__}",
                    where="optim_state_dict_to_load(model, optim, optim_state_dict)",
                    fix="pass what optim_state_dict(model, optim) returned, on every rank; note the order of the arguments",
                )
            )
        loadable = optim_state_to_load(model, optim, optim_state_dict, named_units(model), names_before(model))
        if load_directly:
            optim.load_state_dict(loadable)
        return loadable
