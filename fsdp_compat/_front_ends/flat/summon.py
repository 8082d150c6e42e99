"""``summon_full_params``: access to full parameters between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import nn

from ..._engine import rendezvous
from ..._state.summon import Options, full_parameters
from ..._state.units import model_unit_of, model_units_in, refuse_extensions, runtimes_of
from ...errors import (
    AssertedStateError,
    NotImplementedUsageError,
    require_bools,
    require_module,
)


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Generator[None, None, None]:
    """Expose full parameters, in the dtype of the shards, inside the context. Modules that
    fully_shard was applied to show plain Parameters then.

    Args:
        module: the model, or a module in it.
        recurse: include all sharded modules below ``module``.
        writeback: keep the changes made inside. Without sharding (one rank, NO_SHARD) they are
            kept in any case.
        rank0_only: only rank 0 sees full parameters, the other ranks still see their shards.
            Requires ``writeback=False``; with several ranks, changes on rank 0 are dropped.
        offload_to_cpu: put the full parameters on the CPU.
        with_grads: expose full gradients, too.

    Collective: all ranks.
    """
    where = "summon_full_params"
    require_module(module, where)
    require_bools(
        where,
        recurse=recurse,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
    )
    if writeback and rank0_only:
        raise NotImplementedUsageError.of(
            "summon_full_params cannot write back with rank0_only=True.",
            expected="rank0_only=True with writeback=False, or rank0_only=False",
            got="rank0_only=True, writeback=True",
            where="summon_full_params(...)",
            fix="pass writeback=False",
        )
    units = model_units_in(module)
    if not recurse:
        own = model_unit_of(module)
        units = [each for each in units if each is own or each.unit.is_root]
    refuse_extensions((group for each in units for group in each.unit.groups), where)
    for runtime in runtimes_of(units):
        runtime.require_idle(where, AssertedStateError)
        runtime.rest()
    rendezvous.require_all_ranks(
        where, (group for each in units if not each.unit.summoned for group in each.unit.groups)
    )
    serve_only = rank0_only and not all(each.mesh.is_first for each in units)
    options = Options(writeback, rank0_only, serve_only, offload_to_cpu, with_grads)
    with full_parameters([each.unit for each in units], options):
        yield
