"""Flags are taken by their truth value, as everywhere in Python. Refused values are in
test_bad_input."""

# This module passes values that are not exactly bool on purpose.
# mypy: disable-error-code="arg-type, call-overload"

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compat import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    StateDictType,
    register_fsdp_forward_method,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from fsdp_compat.wrap import CustomPolicy
from tests.support.models import DIM, Block, TwoHeads
from tests.support.ranks import run_ranks


class Net(TwoHeads):
    def extra_forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _with_flags(yes: Any, no: Any) -> list[Any]:
    """Return the results of functions that take flags, on this rank."""
    torch.manual_seed(dist.get_rank())
    model: Any = FSDP(
        Net(),
        auto_wrap_policy=CustomPolicy(lambda module: yes if isinstance(module, Block) else no),
        cpu_offload=CPUOffload(yes),
        mixed_precision=MixedPrecision(torch.bfloat16, None, None, no, yes, yes),
        sync_module_states=yes,
        forward_prefetch=yes,
        limit_all_gathers=no,
        use_orig_params=yes,
        allow_unused_units=no,
    )
    optimizer, x = torch.optim.Adam(model.parameters()), torch.ones(1, DIM)
    found = [len(FSDP.fsdp_modules(model)), len(FSDP.fsdp_modules(model, root_only=yes))]
    register_fsdp_forward_method(model, "extra_forward", synced=no)
    outputs = model.extra_forward(x), *model(x)
    sum(output.sum() for output in outputs).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    found += [[output.tolist() for output in outputs], {t.dtype for t in (*outputs, *grads)}]
    with FSDP.summon_full_params(model, yes, no, yes, no, no):
        found.append({name: tuple(p.shape) for name, p in model.named_parameters()})
        next(model.parameters()).data.fill_(7.0)
    optimizer.step()
    configs = FullStateDictConfig(no, yes), FullOptimStateDictConfig(no, rank0_only=yes)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        found += [{name: value.tolist() for name, value in model.state_dict().items()}]
        found += [sorted(FSDP.optim_state_dict(model, optimizer).get("state", {}))]
    older = FSDP.full_optim_state_dict(model, optimizer, rank0_only=yes)
    whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=no)
    fresh = torch.optim.Adam(model.parameters())
    FSDP.optim_state_dict_to_load(model, fresh, whole, is_named_optimizer=no, load_directly=yes)
    found += [sorted(older.get("state", {})), len(fresh.state)]
    found += [model.load_state_dict({}, strict=no, assign=yes).missing_keys]
    return [*found, *(ShardedGradScaler("cpu", enabled=flag).is_enabled() for flag in (yes, no))]


def test_every_flag_is_taken_by_its_truth_value() -> None:
    expected = run_ranks(2, _with_flags, True, False)
    assert run_ranks(2, _with_flags, 2, None) == expected
    assert run_ranks(2, _with_flags, torch.tensor(True), numpy.False_) == expected
