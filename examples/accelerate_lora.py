"""Fine-tune a tiny Llama with LoRA, PEFT and Accelerate, sharded by fsdp_compat.

    torchrun --standalone --nproc-per-node 2 -m fsdp_compat run examples/accelerate_lora.py

The program is written for torch.distributed.fsdp, and names neither module. The text comes with
Python. It saves the adapter alone, and loads it into a model that is not sharded."""

from __future__ import annotations

import argparse
import inspect
import tokenize

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from accelerate_on_cpus import allow_fsdp
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 64


def tiny_llama() -> LlamaForCausalLM:
    """A model of bytes."""
    set_seed(0)
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


def text() -> torch.Tensor:
    """Return the source of one of Python's modules, as rows of LENGTH bytes."""
    data = inspect.getsource(tokenize).encode()
    rows = len(data) // LENGTH
    return torch.tensor(list(data[: rows * LENGTH])).view(rows, LENGTH)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", default="runs/adapter")
    given = parser.parse_args(arguments)

    on_cpus = not torch.cuda.is_available()
    if on_cpus:
        allow_fsdp()
    model = get_peft_model(tiny_llama(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy=fsdp_auto_wrap_policy(model),
        state_dict_type="FULL_STATE_DICT",
        use_orig_params=True,
    )
    accelerator = Accelerator(cpu=on_cpus, fsdp_plugin=plugin)
    model = accelerator.prepare(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    loader = torch.utils.data.DataLoader(text(), batch_size=8, shuffle=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)

    step = 0
    while step < given.steps:
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0 or step == given.steps:
                mean = accelerator.gather(loss.detach()).mean()
                accelerator.print(f"step {step}: loss {mean:.3f}")
            if step == given.steps:
                break

    model.eval()
    batch = text()[:8].to(accelerator.device)
    with torch.no_grad():
        sharded = model(input_ids=batch, labels=batch).loss.item()
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        given.folder, state_dict=state, is_main_process=accelerator.is_main_process
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        whole = PeftModel.from_pretrained(tiny_llama(), given.folder).to(accelerator.device).eval()
        with torch.no_grad():
            loaded = whole(input_ids=batch, labels=batch).loss.item()
        print(f"sharded {sharded:.6f}, the adapter in a whole model {loaded:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
