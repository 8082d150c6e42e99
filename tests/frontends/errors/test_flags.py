"""Flags are taken by their truth value, as everywhere in Python. Refused values are in
test_bad_input."""

# This module passes values that are not exactly bool on purpose.
# mypy: disable-error-code="arg-type, call-overload"

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    StateDictType,
    checkpoint,
    register_fsdp_forward_method,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from fsdp_compat.wrap import CustomPolicy
from tests.support.ranks import run_ranks

FULL = StateDictType.FULL_STATE_DICT


class Net(nn.Sequential):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(4, 3), nn.Linear(3, 2))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)


def _with_flags(folder: Path, yes: Any, no: Any) -> dict[str, Any]:
    """Return the results of every function that takes flags, on this rank."""
    rank = dist.get_rank()
    model = FSDP(
        Net(rank),
        auto_wrap_policy=CustomPolicy(lambda module: yes if isinstance(module, nn.Linear) else no),
        cpu_offload=CPUOffload(yes),
        mixed_precision=MixedPrecision(
            torch.bfloat16,
            keep_low_precision_grads=no,
            cast_forward_inputs=yes,
            cast_root_forward_inputs=yes,
        ),
        sync_module_states=yes,
        forward_prefetch=yes,
        limit_all_gathers=no,
        use_orig_params=yes,
        allow_unused_units=no,
    )
    optimizer = torch.optim.Adam(model.parameters())
    found: dict[str, Any] = {
        "units": len(FSDP.fsdp_modules(model)),
        "roots": len(FSDP.fsdp_modules(model, root_only=yes)),
    }
    register_fsdp_forward_method(model, "encode", synced=no)
    found["encode"] = model.encode(torch.ones(1, 4)).float().tolist()
    output = model(torch.ones(1, 4))
    found["dtypes"] = str(output.dtype)
    output.sum().backward()
    found["grads"] = {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
    with FSDP.summon_full_params(
        model, recurse=yes, writeback=no, rank0_only=yes, offload_to_cpu=no, with_grads=no
    ):
        found["shown"] = {name: tuple(p.shape) for name, p in model.named_parameters()}
        next(model.parameters()).data.fill_(7.0)
    optimizer.step()
    with FSDP.state_dict_type(
        model, FULL, FullStateDictConfig(no, yes), FullOptimStateDictConfig(no, rank0_only=yes)
    ):
        state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    found["state"], found["states"] = (
        {name: value.tolist() for name, value in state.items()},
        sorted(states.get("state", {})),
    )
    found["older"] = sorted(
        FSDP.full_optim_state_dict(model, optimizer, rank0_only=yes).get("state", {})
    )
    whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=no)
    fresh = torch.optim.Adam(model.parameters())
    FSDP.optim_state_dict_to_load(model, fresh, whole, is_named_optimizer=no, load_directly=yes)
    found["loaded directly"] = len(fresh.state)
    found["not loaded"] = model.load_state_dict({}, strict=no, assign=yes).missing_keys
    found["scaler"] = [ShardedGradScaler("cpu", enabled=flag).is_enabled() for flag in (yes, no)]
    saved = checkpoint.save(folder, model, optimizer, step=1, progress=no)
    checkpoint.load(saved, model, optimizer, progress=no)
    return found


@pytest.mark.parametrize(
    ("yes", "no"), [(2, None), (torch.tensor(True), numpy.False_)], ids=["numbers", "arrays"]
)
def test_every_flag_is_taken_by_its_truth_value(tmp_path: Path, yes: object, no: object) -> None:
    assert run_ranks(2, _with_flags, tmp_path / "a", yes, no) == run_ranks(
        2, _with_flags, tmp_path / "b", True, False
    )
