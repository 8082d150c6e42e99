"""torchtune's functions for sharding, saving and resuming, and its DistributedCheckpointer, called
as its full finetuning recipe calls them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchtune import training
from torchtune.models.llama2 import llama2
from torchtune.training.checkpointing import DistributedCheckpointer

STEPS, SAVED = 4, 2
CPU = torch.device("cpu")


def transformer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return llama2(
        vocab_size=harness.VOCABULARY,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        max_seq_len=32,
        intermediate_dim=48,
    )


def sharded(seed: int, **options: Any) -> nn.Module:
    """Made on the meta device, sharded, and filled from rank 0's whole state dict."""
    whole = transformer(seed).state_dict()
    with torch.device("meta"):
        model = transformer(seed)
    conditions = [functools.partial(training.get_shard_conditions, names_to_match=None)]
    training.shard_model(model, conditions, cpu_offload=False, **options)
    with CPU:
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
    training.load_from_full_model_state_dict(model, whole, CPU, strict=True)
    training.validate_no_params_on_meta_device(model)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = harness.batch(step, dist.get_rank())
        logits = model(ids)[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(harness.mean_over_ranks(loss))
    return losses


def ddp(folder: str) -> dict[str, Any]:
    model = DistributedDataParallel(transformer(0))
    return {"losses": train(model, optimizer_of(model), range(STEPS)), "module": ""}


Save = Callable[[str, nn.Module, torch.optim.Optimizer], None]


def whole_files(folder: str) -> tuple[Save, Save]:
    """Rank 0 saves and reads whole state dicts."""
    path, is_first = os.path.join(folder, "whole.pt"), dist.get_rank() == 0

    def save(_: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weights = training.gather_cpu_state_dict(model, is_first, device=CPU)
        states = training.get_full_optimizer_state_dict(model, optimizer, is_first, device=CPU)
        if is_first:
            torch.save({"model": weights, "optimizer": states}, path)
        dist.barrier()

    def load(_: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = torch.load(path, weights_only=True)
        training.load_from_full_model_state_dict(model, state["model"], CPU, strict=True)
        training.load_from_full_optimizer_state_dict(model, optimizer, state["optimizer"], CPU)

    return save, load


def distributed_files(folder: str) -> tuple[Save, Save]:
    """torch.distributed.checkpoint, through the DistributedCheckpointer."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    checkpointer = DistributedCheckpointer(folder, folder)

    def save(_: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weights, states = get_state_dict(model, optimizer)
        checkpointer.save_checkpoint(
            {"model": weights, "optimizer": states}, epoch=0, save_async=False
        )

    def load(_: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states}
        checkpointer.load_checkpoint(state)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    return save, load


def resumed(
    folder: str, *, files: Callable[[str], tuple[Save, Save]], **options: Any
) -> dict[str, Any]:
    save, load = files(folder)
    model = sharded(0, **options)
    optimizer = optimizer_of(model)
    result: dict[str, Any] = {"module": harness.module_of(model)}
    result["losses"] = train(model, optimizer, range(SAVED))
    save(folder, model, optimizer)
    result["losses"] += train(model, optimizer, range(SAVED, STEPS))
    other = sharded(1, **options)
    other_optimizer = optimizer_of(other)
    load(folder, other, other_optimizer)
    result["resumed"] = train(other, other_optimizer, range(SAVED, STEPS))
    return result


CASES: dict[str, Callable[[str], dict[str, Any]]] = {
    "ddp": ddp,
    "whole": functools.partial(resumed, files=whole_files),
    "whole_kept": functools.partial(resumed, files=whole_files, reshard_after_forward=False),
    "distributed": functools.partial(resumed, files=distributed_files),
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    harness.main(CASES)
