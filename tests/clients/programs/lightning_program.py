"""Lightning's Trainer and Fabric: full and sharded checkpoints, flat and original parameters, and
FSDP2 by its ModelParallelStrategy."""

from __future__ import annotations

import functools
import os
from typing import Any

import harness
import lightning
import torch
from lightning.fabric.connector import _Connector
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricParallel
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch.distributed.fsdp import fully_shard
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

STEPS, SAVED = 4, 2
RANK = int(os.environ["RANK"])

# Lightning refuses FSDP on CPUs.
_Connector._check_strategy_and_fallback = lambda self: None
_AcceleratorConnector._check_strategy_and_fallback = lambda self: None

QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}


class Module(lightning.LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = harness.tiny_llama(seed)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            in_place(self.net, self.device_mesh)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        ids = harness.batch(self.global_step, RANK)
        loss = self.net(input_ids=ids, labels=ids).loss
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(range(64), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)


def strategy_of(cls: Any, form: str, **options: Any) -> Any:
    return cls(auto_wrap_policy={LlamaDecoderLayer}, state_dict_type=form, **options)


def in_place(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    for module in model.modules():
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def parallel_of(form: str, *applied: Any) -> Any:
    """The strategy of FSDP2. applied: for Fabric, what shards a model."""
    cls = FabricParallel if applied else ModelParallelStrategy
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    return cls(*applied, **sizes, save_distributed_checkpoint=form == "sharded")


def fit(folder: str, *, form: str = "", **options: Any) -> dict[str, Any]:
    path = os.path.join(folder, "last.ckpt")
    result: dict[str, Any] = {"losses": []}
    for seed, steps in enumerate((SAVED, STEPS)):
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=parallel_of(form)
            if options.get("in_place")
            else strategy_of(FSDPStrategy, form, **options)
            if form
            else DDPStrategy(),
            max_steps=steps,
            **QUIET,
        )
        module = Module(seed)
        trainer.fit(module, ckpt_path=path if seed else None)
        result["module"] = harness.module_of(trainer.model)
        result["losses"] += module.losses
        if not seed:
            trainer.save_checkpoint(path)
    return result


def fabric_steps(fabric: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = harness.batch(step, RANK)
        loss = model(input_ids=ids, labels=ids).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_gather(loss.detach()).mean().item())
    return losses


def fabric(folder: str, *, form: str = "", **options: Any) -> dict[str, Any]:
    path = os.path.join(folder, "last.ckpt")
    result: dict[str, Any] = {}
    for seed in range(2):
        own = lightning.Fabric(
            accelerator="cpu",
            devices=2,
            strategy=parallel_of(form, in_place)
            if options.get("in_place")
            else strategy_of(FabricFSDP, form, **options)
            if form
            else FabricDDP(),
        )
        own.launch()
        model = own.setup_module(harness.tiny_llama(seed))
        optimizer = own.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if seed:
            own.load(path, state)
            assert state["step"] == SAVED
            result["resumed"] = fabric_steps(own, model, optimizer, range(SAVED, STEPS))
        else:
            result["losses"] = fabric_steps(own, model, optimizer, range(SAVED))
            own.save(path, {**state, "step": SAVED})
            result["losses"] += fabric_steps(own, model, optimizer, range(SAVED, STEPS))
            result["module"] = harness.module_of(model)
    return result


OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "full": {"form": "full", "use_orig_params": True},
    "sharded": {"form": "sharded", "use_orig_params": True},
    "full_flat": {"form": "full", "use_orig_params": False},
    "sharded_flat": {"form": "sharded", "use_orig_params": False},
    "offload": {"form": "full", "cpu_offload": True},
    "full_in_place": {"form": "full", "in_place": True},
    "sharded_in_place": {"form": "sharded", "in_place": True},
    "checkpointing": {"form": "sharded", "activation_checkpointing_policy": {LlamaDecoderLayer}},
}

CASES = {
    f"{prefix}{name}": functools.partial(function, **options)
    for prefix, function in (("trainer_", fit), ("fabric_", fabric))
    for name, options in OPTIONS.items()
}

if __name__ == "__main__":
    harness.main(CASES)
