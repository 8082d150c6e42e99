"""Train a tiny Llama with the Transformers Trainer, sharded by fsdp_compat.

    torchrun --standalone --nproc-per-node 2 -m fsdp_compat run examples/trainer.py
    torchrun --standalone --nproc-per-node 2 -m fsdp_compat run examples/trainer.py \
        --steps 60 --resume

The program is written for torch.distributed.fsdp, and names neither module. The model is made from
a configuration, and the text comes with Python, so nothing is downloaded."""

from __future__ import annotations

import argparse
import inspect
import tokenize

import torch
from accelerate_on_cpus import allow_fsdp
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

LENGTH = 64


def tiny_llama() -> LlamaForCausalLM:
    """A model of bytes."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


class Text(torch.utils.data.Dataset):
    """The source of one of Python's modules, in samples of LENGTH bytes."""

    def __init__(self) -> None:
        self.data = torch.tensor(list(inspect.getsource(tokenize).encode()))

    def __len__(self) -> int:
        return len(self.data) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.data[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": sample, "labels": sample}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", default="runs/trainer")
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=1)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(arguments)

    on_cpus = not torch.cuda.is_available()
    if on_cpus:
        allow_fsdp()
    set_seed(0)
    trainer = Trainer(
        model=tiny_llama(),
        args=TrainingArguments(
            output_dir=given.folder,
            max_steps=given.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=10,
            save_steps=10,
            report_to=[],
            disable_tqdm=True,
            use_cpu=on_cpus,
            fsdp=True,
            fsdp_config={
                "version": given.fsdp_version,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "state_dict_type": "SHARDED_STATE_DICT",
                "sync_module_states": not on_cpus,  # Accelerate has it on accelerators only
            },
        ),
        train_dataset=Text(),
        eval_dataset=Text(),
    )
    trainer.train(resume_from_checkpoint=given.resume or None)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"trained for {trainer.state.global_step} steps: loss {loss:.3f}")


if __name__ == "__main__":
    main()
