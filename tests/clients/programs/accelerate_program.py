"""Accelerate: prepare, backward, clipping, save_state, load_state, unwrap_model, merged weights."""

from __future__ import annotations

import functools
import os
from typing import Any

import harness
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin, merge_fsdp_weights
from accelerate_on_cpus import allow_fsdp

STEPS, SAVED = 4, 2

allow_fsdp()


def accelerator_with(
    *, compiled: bool = False, precision: str = "no", **options: Any
) -> Accelerator:
    """Without options the environment decides: ``accelerate launch`` sets what its configuration
    file says."""
    AcceleratorState._reset_state(reset_partial_state=True)
    if not options:
        return Accelerator(cpu=True)
    options.setdefault("fsdp_version", 1)
    if options["fsdp_version"] == 1:
        options.setdefault("use_orig_params", True)
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[harness.LAYER],
        **options,
    )
    dynamo = TorchDynamoPlugin(backend="aot_eager") if compiled else None
    return Accelerator(
        cpu=True, mixed_precision=precision, fsdp_plugin=plugin, dynamo_plugin=dynamo
    )


def prepared(accelerator: Accelerator, seed: int) -> tuple[Any, Any]:
    model = harness.tiny_llama(seed)
    if accelerator.mixed_precision == "bf16":
        model.bfloat16()  # Accelerate makes the shards fp32 again
    if accelerator.is_fsdp2:
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, accelerator.prepare(optimizer)


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = harness.batch(step, accelerator.process_index)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def run(folder: str, *, save: bool = True, **options: Any) -> dict[str, Any]:
    """save: also save, load, and take the weights of the whole model."""
    accelerator = accelerator_with(**options)
    model, optimizer = prepared(accelerator, seed=0)
    losses = train(accelerator, model, optimizer, range(SAVED))
    if save:
        accelerator.save_state(folder)
    losses += train(accelerator, model, optimizer, range(SAVED, STEPS))
    accelerator.wait_for_everyone()
    result = {"module": harness.module_of(model), "losses": losses}
    if not save:
        return result
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        unwrapped = harness.tiny_llama()
        unwrapped.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in state.items()})
        result["weights"] = sum(p.double().abs().sum().item() for p in unwrapped.parameters())
    accelerator.unwrap_model(model)

    # A model with other weights continues from the checkpoint.
    accelerator = accelerator_with(**options)
    model, optimizer = prepared(accelerator, seed=1)
    accelerator.load_state(folder)
    result["resumed"] = train(accelerator, model, optimizer, range(SAVED, STEPS))
    return result


def merge(folder: str) -> dict[str, Any]:
    """merge_fsdp_weights turns a sharded checkpoint into the weights of the whole model."""
    accelerator = accelerator_with(state_dict_type="SHARDED_STATE_DICT")
    model, _ = prepared(accelerator, seed=0)
    accelerator.save_state(folder)
    state = accelerator.get_state_dict(model)
    result = {"module": harness.module_of(model)}
    sharded = os.path.join(folder, "pytorch_model_fsdp_0")
    merge_fsdp_weights(sharded, folder, safe_serialization=False)
    if accelerator.is_main_process:
        merged = torch.load(os.path.join(folder, "pytorch_model.bin"), weights_only=True)
        result["equal"] = merged.keys() == state.keys() and all(
            torch.equal(merged[name], state[name]) for name in state
        )
    accelerator.wait_for_everyone()
    return result


FULL, SHARDED, LOCAL = (f"{kind}_STATE_DICT" for kind in ("FULL", "SHARDED", "LOCAL"))
BF16 = {
    "param_dtype": torch.bfloat16,
    "reduce_dtype": torch.float32,
    "buffer_dtype": torch.bfloat16,
}

CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "launched": {},
    "full": {"state_dict_type": FULL},
    "sharded": {"state_dict_type": SHARDED},
    "local": {"state_dict_type": LOCAL},
    "flat": {"state_dict_type": FULL, "use_orig_params": False},
    "flat_sharded": {"state_dict_type": SHARDED, "use_orig_params": False},
    "offload": {"state_dict_type": FULL, "cpu_offload": True},
    "checkpointing": {"state_dict_type": SHARDED, "activation_checkpointing": True},
    "checkpointing_full": {"state_dict_type": FULL, "activation_checkpointing": True},
    "bf16": {"state_dict_type": SHARDED, "mixed_precision_policy": BF16},
    "bf16_full": {"state_dict_type": FULL, "mixed_precision_policy": BF16},
    "autocast": {"state_dict_type": SHARDED, "precision": "bf16"},
    "autocast_flat": {"state_dict_type": FULL, "precision": "bf16", "use_orig_params": False},
    "bf16_losses": {"state_dict_type": SHARDED, "mixed_precision_policy": BF16, "save": False},
    "compile": {"state_dict_type": FULL, "compiled": True},
    "compile_sharded": {"state_dict_type": SHARDED, "compiled": True},
    "fsdp2_full": {"state_dict_type": FULL, "fsdp_version": 2},
    "fsdp2_sharded": {"state_dict_type": SHARDED, "fsdp_version": 2},
    "fsdp2_offload": {"state_dict_type": SHARDED, "fsdp_version": 2, "cpu_offload": True},
}

if __name__ == "__main__":
    harness.main({**{k: functools.partial(run, **v) for k, v in CASES.items()}, "merge": merge})
