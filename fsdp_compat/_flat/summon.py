"""``summon_full_params``: whole parameters between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import nn

from .._engine import rendezvous
from .._state.full_params import Options, full_parameters
from .._state.model_units import model_unit_of, model_units_in, runtimes_of
from ..errors import (
    AssertedStateError,
    NotImplementedUsageError,
    explain,
    require_bools,
    require_module,
)

__all__ = ["summon_full_params"]


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Generator[None, None, None]:
    """Show whole parameters, in the dtype of the shards, in ``module`` and (``recurse``) all
    instances below it.

    Collective: all ranks. ``writeback`` keeps changes made inside; where nothing is sharded
    (one rank, NO_SHARD) they stay without it, too. ``rank0_only``: the others go on showing
    their parts (not with ``writeback``), and changes that the first one of several ranks alone
    has made are dropped. ``offload_to_cpu``: they are shown on the CPU; ``with_grads``: whole
    gradients beside them.
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
        raise NotImplementedUsageError(
            explain(
                "summon_full_params cannot write back what only rank 0 has seen.",
                expected="rank0_only=True with writeback=False, or rank0_only=False",
                got="rank0_only=True, writeback=True",
                where="summon_full_params(...)",
                fix="pass writeback=False",
            )
        )
    units = model_units_in(module)
    if not recurse:
        own = model_unit_of(module)
        units = [each for each in units if each is own or each.unit.is_root]
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
