"""verl's FSDPCheckpointManager, with FSDP1 and FSDP2 as verl's engine shards."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2, fsdp_version

STEPS, SAVED = 4, 2


def llama(seed: int) -> nn.Module:
    model = harness.tiny_llama(seed)
    model.config.architectures = ["LlamaForCausalLM"]  # as a model from the Hub has it
    return model


def wrapped(seed: int, use_orig_params: bool) -> nn.Module:
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
    )
    return FSDP(
        llama(seed),
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=use_orig_params,
        sync_module_states=True,
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",)),
    )


def in_place(seed: int) -> nn.Module:
    model = llama(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    options = {"mesh": mesh, "reshard_after_forward": True}
    apply_fsdp2(model, options, {"wrap_policy": {"transformer_layer_cls_to_wrap": harness.LAYER}})
    return model


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = harness.batch(step, dist.get_rank())
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(harness.mean_over_ranks(loss))
    return losses


def parts(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)


def ddp(folder: str) -> dict[str, Any]:
    model = DistributedDataParallel(harness.tiny_llama(0))
    return {"losses": train(model, *parts(model), range(STEPS)), "module": ""}


def resumed(folder: str, build: Callable[[int], nn.Module]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    contents = ["model", "optimizer", "extra"]
    config = {"save_contents": [*contents, "hf_model"], "load_contents": contents}
    for seed in range(2):
        model = build(seed)
        optimizer, scheduler = parts(model)
        manager = FSDPCheckpointManager(
            model, optimizer, lr_scheduler=scheduler, checkpoint_config=config
        )
        if seed:
            manager.load_checkpoint(folder)
            result["resumed"] = train(model, optimizer, scheduler, range(SAVED, STEPS))
        else:
            result["losses"] = train(model, optimizer, scheduler, range(SAVED))
            manager.save_checkpoint(folder, global_step=SAVED, max_ckpt_to_keep=1)
            result["losses"] += train(model, optimizer, scheduler, range(SAVED, STEPS))
            result |= {"module": harness.module_of(model), "version": fsdp_version(model)}
    whole = LlamaForCausalLM.from_pretrained(os.path.join(folder, "huggingface")).float()
    with torch.no_grad():
        each = [harness.batch(SAVED, rank) for rank in range(dist.get_world_size())]
        result["exported"] = sum(whole(input_ids=x, labels=x).loss.item() for x in each) / len(each)
    return result


CASES: dict[str, Callable[[str], dict[str, Any]]] = {
    "ddp": ddp,
    "flat": functools.partial(resumed, build=functools.partial(wrapped, use_orig_params=False)),
    "original": functools.partial(resumed, build=functools.partial(wrapped, use_orig_params=True)),
    "in_place": functools.partial(resumed, build=in_place),
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    harness.main(CASES)
