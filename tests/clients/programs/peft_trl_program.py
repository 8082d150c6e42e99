"""PEFT without a trainer, generation on ranks that stop at different lengths, TRL's SFTTrainer and
GRPOTrainer."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from typing import Any

import harness
import torch
import torch.distributed as dist
from accelerate_on_cpus import allow_fsdp
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

STEPS = 4
RANK = int(os.environ["RANK"])
CPU = torch.device("cpu")

allow_fsdp()


def start() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


# -- PEFT


def steps(model: Any, ranks: list[int]) -> list[float]:
    """Train on the batches of these ranks; the losses are means over all ranks."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for step in range(STEPS):
        ids = torch.cat([harness.batch(step, rank) for rank in ranks])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(harness.mean_over_ranks(loss))
    return losses


def evaluated(model: Any) -> float:
    ids = harness.batch(9, 0)
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


def adapter(folder: str) -> dict[str, Any]:
    """The losses of the whole model on the global batch; save, load into a whole model and into a
    sharded one."""
    start()
    whole = harness.lora(harness.tiny_llama())
    inner = harness.lora(harness.tiny_llama())
    model = FSDP(
        inner, auto_wrap_policy=fsdp_auto_wrap_policy(inner), use_orig_params=True, device_id=CPU
    )
    result: dict[str, Any] = {
        "whole": steps(whole, [0, 1]),
        "losses": steps(model, [RANK]),
        "module": harness.module_of(model),
        "evaluated": evaluated(model),
    }
    state = model.state_dict()
    model.module.save_pretrained(folder, state_dict=state, is_main_process=RANK == 0)
    dist.barrier()
    result["base"] = evaluated(harness.tiny_llama())
    loaded = PeftModel.from_pretrained(harness.tiny_llama(), folder)
    result["loaded"] = evaluated(loaded)
    result["bytes"] = os.path.getsize(os.path.join(folder, "adapter_model.safetensors"))

    fresh = harness.lora(harness.tiny_llama())
    again = FSDP(
        fresh, auto_wrap_policy=fsdp_auto_wrap_policy(fresh), use_orig_params=True, device_id=CPU
    )
    from safetensors.torch import load_file

    set_peft_model_state_dict(again, load_file(os.path.join(folder, "adapter_model.safetensors")))
    result["reloaded"] = evaluated(again)
    return result


# -- generation


def generate(folder: str) -> dict[str, Any]:
    """Each rank generates as many tokens as it wants to."""
    start()
    whole = harness.tiny_llama()
    model = FSDP(
        copy.deepcopy(whole),
        auto_wrap_policy=ModuleWrapPolicy({type(whole.model.layers[0])}),
        device_id=CPU,
    )
    register_fsdp_forward_method(model, "generate")
    prompt = harness.batch(0, RANK)[:, : 4 + 3 * RANK]
    same = []
    for options in ({"synced_gpus": True}, {}):
        length = {"max_new_tokens": 3 + 5 * RANK, "do_sample": False}
        wanted = whole.generate(prompt, **length, synced_gpus=False)
        same.append(torch.equal(model.generate(prompt, **length, **options), wanted))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, same)
    return {"module": harness.module_of(model), "equal": gathered}


# -- TRL


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(set(" abcdefghijklmnopqrstuvwxyz.,'-*!"))
    words = ["<pad>", "<s>", "</s>", "<unk>", *letters]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def lines() -> list[str]:
    """The Zen of Python."""
    with contextlib.redirect_stdout(None):
        import this
    plain = "".join(this.d.get(letter, letter) for letter in this.s).lower()
    return [line[:24] for line in plain.splitlines() if line]


def settings(folder: str, version: int | None) -> dict[str, Any]:
    harness.forget_settings()
    config = {
        "version": version,
        "state_dict_type": "FULL_STATE_DICT",
        "transformer_layer_cls_to_wrap": [harness.LAYER],
        "sync_module_states": False,
    }
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "ddp_backend": "gloo",
        "fsdp": version is not None,
        "fsdp_config": config if version is not None else None,
    }


def sft(folder: str, *, version: int | None = None, adapters: bool = False) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    def trainer_of(seed: int) -> Any:
        options = settings(folder, version)
        return SFTTrainer(
            model=harness.tiny_llama(0 if adapters else seed),
            args=SFTConfig(**options, per_device_train_batch_size=2, max_length=24),
            train_dataset=Dataset.from_dict({"text": lines()}),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj"]) if adapters else None,
        )

    trainer = trainer_of(0)
    trainer.train()
    result = {
        "module": harness.module_of(trainer.model_wrapped),
        "losses": harness.losses_of(trainer),
    }
    trainer = trainer_of(1)
    trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
    return {**result, "resumed": harness.losses_of(trainer)[2:]}


def grpo(folder: str, *, version: int | None = None) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def vowels(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(letter in "aeiou" for letter in text)) for text in completions]

    trainer = GRPOTrainer(
        model=harness.tiny_llama(),
        reward_funcs=vowels,
        args=GRPOConfig(
            **settings(folder, version),
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=6,
            temperature=1.0,
        ),
        train_dataset=Dataset.from_dict({"prompt": lines()}),
        processing_class=tokenizer(),
    )
    trainer.train()
    return {
        "module": harness.module_of(trainer.model_wrapped),
        "losses": harness.losses_of(trainer),
        "rewards": [entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
    }


CASES = {
    "adapter": adapter,
    "generate": generate,
    "sft_ddp": sft,
    "sft": functools.partial(sft, version=1),
    "sft_fsdp2": functools.partial(sft, version=2),
    "sft_lora_ddp": functools.partial(sft, adapters=True),
    "sft_lora": functools.partial(sft, version=1, adapters=True),
    "grpo_ddp": grpo,
    "grpo": functools.partial(grpo, version=1),
    "grpo_fsdp2": functools.partial(grpo, version=2),
}

if __name__ == "__main__":
    harness.main(CASES)
