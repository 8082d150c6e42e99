"""The Transformers Trainer: train, evaluate, generate, save_model, resume; PEFT LoRA in it."""

from __future__ import annotations

import functools
import glob
import os
from typing import Any

import harness
import torch
from accelerate_on_cpus import allow_fsdp
from transformers import (
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

STEPS, SAVED = 4, 2

allow_fsdp()


class Texts(torch.utils.data.Dataset):
    def __init__(self, length: int) -> None:
        self.ids = [harness.batch(i, 0)[0] for i in range(length)]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def trainer_for(
    folder: str, seed: int, *, adapter: bool = False, bf16: bool = False, **config: Any
) -> Seq2SeqTrainer:
    harness.forget_settings()
    model = harness.tiny_llama(seed)
    model.generation_config.max_new_tokens = 4
    if adapter:
        model = harness.lora(harness.tiny_llama(0))
        if seed:  # other adapters
            with torch.no_grad():
                for p in model.parameters():
                    if p.requires_grad:
                        p.add_(0.1)
    if config:
        config = {
            "transformer_layer_cls_to_wrap": [harness.LAYER],
            "sync_module_states": False,
            **config,
        }
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder,
        use_cpu=True,
        bf16=bf16,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        predict_with_generate=True,
        report_to=[],
        disable_tqdm=True,
        fsdp=bool(config),
        fsdp_config=config or None,
        ddp_backend="gloo",
        remove_unused_columns=False,
    )
    return Seq2SeqTrainer(
        model=model, args=arguments, train_dataset=Texts(16), eval_dataset=Texts(4)
    )


def run(folder: str, **options: Any) -> dict[str, Any]:
    trainer = trainer_for(folder, seed=0, **options)
    trainer.train()
    result: dict[str, Any] = {
        "module": harness.module_of(trainer.model_wrapped),
        "losses": harness.losses_of(trainer),
    }
    result["evaluated"] = trainer.evaluate()["eval_loss"]
    before = trainer.evaluate()["eval_loss"]
    assert before == result["evaluated"], "generation changed the weights"
    predicted = trainer.predict(Texts(4)).predictions
    result["predicted"] = predicted.tolist()

    saved = os.path.join(folder, "saved")
    trainer.save_model(saved)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        result.update(saved_weights(saved, **options))
    del trainer

    resumed = trainer_for(folder, seed=1, **options)
    resumed.train(resume_from_checkpoint=os.path.join(folder, f"checkpoint-{SAVED}"))
    result["resumed"] = harness.losses_of(resumed)[SAVED:]
    return result


def saved_weights(folder: str, adapter: bool = False, **config: Any) -> dict[str, Any]:
    """Return the loss of the saved model, loaded without any sharding."""
    files = sorted(os.path.basename(path) for path in glob.glob(os.path.join(folder, "*")))
    files = [name for name in files if name.endswith(("safetensors", ".bin"))]
    if not files:
        return {"files": files}
    if adapter:
        from peft import PeftModel

        model: Any = PeftModel.from_pretrained(harness.tiny_llama(0), folder)
    else:
        model = LlamaForCausalLM.from_pretrained(folder)
    model.eval()
    losses = []
    for sample in Texts(4):
        ids = sample["input_ids"][None]
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    return {"files": files, "loaded": sum(losses) / len(losses)}


FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"

CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "full": {"version": 1, "state_dict_type": FULL},
    "flat": {"version": 1, "state_dict_type": FULL, "use_orig_params": False},
    "sharded": {"version": 1, "state_dict_type": SHARDED},
    "checkpointing": {
        "version": 1,
        "state_dict_type": SHARDED,
        "activation_checkpointing": True,
    },
    "bf16": {"version": 1, "state_dict_type": FULL, "bf16": True},
    "fsdp2_full": {"version": 2, "state_dict_type": FULL},
    "fsdp2_sharded": {"version": 2, "state_dict_type": SHARDED},
    "lora_ddp": {"adapter": True},
    "lora_full": {"version": 1, "state_dict_type": FULL, "adapter": True},
    "lora_sharded": {"version": 1, "state_dict_type": SHARDED, "adapter": True},
    "lora_fsdp2": {"version": 2, "state_dict_type": FULL, "adapter": True},
}

if __name__ == "__main__":
    harness.main({name: functools.partial(run, **options) for name, options in CASES.items()})
