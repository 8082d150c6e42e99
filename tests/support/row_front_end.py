"""A second front end over the engine, as small as possible: modules become units in place, over
stores that cut every parameter by rows.

State dicts, optimizer state and checkpoints work on it as on the flat front end, through the same
functions: a front end makes stores that answer as a ``StateStore``, and registers its units."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp_compat._comm.mesh import mesh_from_group
from fsdp_compat._engine import hooks, rendezvous
from fsdp_compat._engine.gathering import Prefetch
from fsdp_compat._engine.ownership import assign_owners, named_within
from fsdp_compat._engine.runtime import Runtime, RuntimeOptions
from fsdp_compat._state import model_loading, model_state, older_optimizers
from fsdp_compat._state.units import ModelUnit, attribute_order_of, register

from .engine_build import CPU, attach_unit, make_unit

__all__ = ["shard_rows"]


class RowSharded(nn.Module):
    """What ``shard_rows`` adds to the class of a module: its state dicts are the units'."""

    def state_dict(self, *args: Any, filter: Any = None, **kwargs: Any) -> dict[str, Any]:
        return model_state.state_dict(self, *args, filter=filter, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        return model_loading.load_state_dict(self, state_dict, strict, assign)


def shard_rows(model: nn.Module, unit_classes: Collection[type[nn.Module]]) -> nn.Module:
    """Make ``model`` and every module of ``unit_classes`` in it units over all ranks, and return
    it. Collective."""
    group = dist.group.WORLD
    assert group is not None
    mesh = mesh_from_group(group)
    paths = {
        module: path
        for path, module in model.named_modules()
        if module is model or isinstance(module, tuple(unit_classes))
    }
    orders = {module: attribute_order_of(module) for module in paths}
    owned = assign_owners(model, list(paths), (), ())
    older_optimizers.note(list(model.parameters()), [])
    units = {
        module: make_unit("row", module, mesh, named_within(module, owned[module]))
        for module in reversed(paths)
    }
    for module, unit in units.items():
        attach_unit(unit)
        rendezvous.register(unit.groups)
        register(module, ModelUnit(unit, mesh, CPU, group, attribute_order=orders[module]))
        cls = type(module)
        module.__class__ = type(f"RowSharded{cls.__name__}", (RowSharded, cls), {})
        model_loading.follow_loading(module)
        hooks.guard_state_dicts(unit)  # after it: what follows a load says that it is one
    ordered = [units[module] for module in paths]
    Runtime(ordered[0], ordered, list(paths.values()), RuntimeOptions(False, Prefetch.PRE, False))
    return model
