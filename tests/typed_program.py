"""A user's program with both front ends, for type checkers. Never run: `mypy` reads it beside the
package, and must find no error."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import assert_type

import fsdp_compat
from fsdp_compat import (
    CPUOffload,
    Description,
    FSDPModule,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    Plan,
    ShardedGradScaler,
    ShardingStrategy,
    StateDictType,
    UnitDescription,
    UnshardHandle,
    checkpoint,
    describe,
    fully_shard,
    plan,
    register_fsdp_forward_method,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.checkpoint import AsyncSave, LoadReport
from fsdp_compat.wrap import transformer_auto_wrap_policy

FOLDER = Path("runs/7")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def generate(self, x: Tensor, *, length: int) -> Tensor:
        return x.repeat(length, 1)


def wrapper(net: Net) -> FSDP:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FSDP(
        net,
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        cpu_offload=CPUOffload(),
        device_id="cpu",
        ignored_states=[net.layers[0]],
        use_orig_params=True,
    )
    assert_type(model, FSDP)
    assert_type(model.rank, int)
    assert_type(model.world_size, int)
    assert_type(model.process_group, dist.ProcessGroup)
    assert_type(model.sharding_strategy, ShardingStrategy)
    assert_type([flat.shape for flat in model.params], list[torch.Size])
    assert_type(model.module, nn.Module)
    assert_type(FSDP.fsdp_modules(model), list[FSDP])
    assert_type(model.clip_grad_norm_(1.0), Tensor)
    assert_type(model.state_dict(), dict[str, Any])
    missing, unexpected = model.load_state_dict(model.state_dict(), strict=False)
    assert_type(missing + unexpected, list[str])
    assert_type(model.load_state_dict({}).unexpected_keys, list[str])
    register_fsdp_forward_method(model, "generate")
    model.generate(torch.ones(1, 8), length=3)
    with FSDP.summon_full_params(model), model.no_sync():
        pass
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
    ):
        model.state_dict()
    return model


def in_place(net: Net) -> FSDPModule:
    mesh = init_device_mesh("cpu", (2,))
    layers = [fully_shard(layer, mesh=mesh) for layer in net.layers]
    FSDP(net, auto_wrap_policy="auto", sync_module_states=True)
    layers[0].set_modules_to_forward_prefetch([net.layers[1]])
    pair: list[nn.Linear] = [nn.Linear(8, 8), nn.Linear(8, 8)]
    assert_type(fully_shard(pair), list[FSDPModule])
    model = fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert_type(model, FSDPModule)
    assert_type(model.unshard(async_op=True), UnshardHandle | None)
    assert_type(model.state_dict(), dict[str, Any])
    assert_type(model.load_state_dict({}).missing_keys, list[str])
    model.set_requires_gradient_sync(False, recurse=True)
    module: nn.Module = model  # a sharded module is a module
    torch.optim.AdamW(model.parameters(), fused=True)
    model.generate(model(torch.ones(1, 8)), length=3)
    assert isinstance(net, FSDPModule)  # the same one, which keeps its own type
    net.reshard()
    assert_type(net.layers, nn.ModuleList)
    assert_type(net.generate(torch.ones(1, 8), length=3), Tensor)
    assert isinstance(module, FSDPModule)
    return module


def train(model: nn.Module, batches: list[Tensor], loss: Callable[[Tensor], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    assert_type(checkpoint.load(FOLDER, model, optimizer).extra, Any)
    state = checkpoint.resume(FOLDER, model, optimizer, default={"epoch": 0})
    assert_type(state, dict[str, int])
    report = checkpoint.load_safetensors(FOLDER, model, strict=False)
    assert_type(report, LoadReport)
    assert_type(report.missing, list[str])
    ema = fsdp_compat.optim.EMA(model, decay=0.99)  # no import names this module
    scaler = ShardedGradScaler(enabled=False)
    saving: AsyncSave | None = None
    for step, batch in enumerate(batches, state["epoch"]):
        scaled = scaler.scale(loss(model(batch)))
        assert_type(scaled, Tensor)
        torch.autograd.backward(scaled)
        norms = fsdp_compat.optim.grad_norms(model, norm_type=float("inf"))
        assert_type(norms, dict[str, Tensor])
        scaler.step(optimizer)
        scaler.update()
        ema.update()
        saving = checkpoint.async_save(FOLDER, model, optimizer, {"epoch": step}, step=step)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ema.swap())
        assert_type(checkpoint.save(FOLDER, model, step=len(batches)), Path)
        assert_type(checkpoint.save_safetensors(FOLDER, model), list[Path])
    if saving is not None:
        assert_type(saving.wait(), Path)
    assert_type(checkpoint.latest(FOLDER), Path | None)
    for name, tensor in checkpoint.iter_full_state_dict(model):
        assert_type((name, tensor), tuple[str, Tensor])
    assert_type(checkpoint.files.verify(FOLDER).is_intact, bool)


def look(model: nn.Module) -> None:
    shown = describe(model)
    assert_type(shown, Description)
    assert_type(shown.units[0], UnitDescription)
    assert_type(shown.units[0].shard_nbytes, int)
    assert_type(shown.whole["bias"], Tensor)
    planned = plan(model, 64, (torch.ones(1, 8),), wrap=fully_shard)
    assert_type(planned, Plan)
    assert_type(planned.fits(80 << 30), bool)
    assert_type(planned.units, tuple[UnitDescription, ...])


def optimizer_state(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    state = FSDP.optim_state_dict(model, optimizer)
    assert_type(state, dict[str, Any])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
