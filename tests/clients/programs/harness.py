"""What the programs of the clients share: a tiny model, data, and results as JSON. They run on two
ranks, with torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

warnings.filterwarnings("ignore")

VOCABULARY, LENGTH, LAYER = 64, 16, "LlamaDecoderLayer"


def tiny_llama(seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def batch(step: int, rank: int) -> torch.Tensor:
    """Token ids of one step on one rank, shape [2, LENGTH]."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)


def module_of(model: nn.Module) -> str:
    """Return the package and class that shard the model; "" for a model that is whole."""
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls.__name__ in ("FullyShardedDataParallel", "FSDPModule"):
                return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
    return ""


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def forget_settings() -> None:
    """Undo what the arguments of a trainer of an earlier case have set."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(cases: dict[str, Callable[[str], dict[str, Any]]]) -> None:
    """Run the cases named after the first argument, a folder, and print each one's result on rank
    0 as a line of JSON. An error ends the program."""
    folder, *names = sys.argv[1:]
    for name in names or cases:
        path = os.path.join(folder, name)
        os.makedirs(path, exist_ok=True)
        try:
            result = cases[name](path)
        except BaseException:
            print(f"rank {os.environ['RANK']}, case {name}:\n{traceback.format_exc()}", flush=True)
            os._exit(1)  # torchrun ends the other rank
        if os.environ["RANK"] == "0":
            print("RESULT " + json.dumps({"case": name, **result}), flush=True)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
