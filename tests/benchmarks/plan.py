"""Planned memory beside measured memory, and what plans of large models take.

    PYTHONPATH=. python tests/benchmarks/plan.py [--ranks 1 2 4] [--families llama ...]
    PYTHONPATH=. python tests/benchmarks/plan.py --large

Five families of transformers, tiny, with AdamW and batches of 2 x 64, on both front ends. The plan
is made in this process; then the ranks train over gloo, and every storage of their third step is
followed (tests/support/live_bytes.py). Ranks read each other's memory in place and map nothing
(FSDP_COMPAT_SAME_HOST=counters): like NCCL, this takes no memory for what peers have sent. The
columns, in MiB:

    planned     the peak of the plan of rank 0
    measured    the largest peak of any rank
    difference  planned to measured; the limit is 2 %

With --large: plans of Llama 7B and 70B, bf16 computation, fp32 state, one sequence of 4,096 a rank,
each block checkpointed. It needs transformers."""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compat
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import fully_shard
from fsdp_compat._front_ends.flat.blocks import repeated_blocks
from tests.support.live_bytes import LiveBytes, release_spare_pages, tensors_alive

LIMIT = 0.02
FLAT, ROWS = "FullyShardedDataParallel", "fully_shard"
SMALL = {"vocab_size": 2000, "use_cache": False}
LARGE = {
    "7B": (8, {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008}),
    "70B": (
        64,
        {
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
}


def build(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model on the current default device, and a batch on the CPU."""
    import transformers as hf

    wide = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, **SMALL}
    configs: dict[str, Any] = {
        "llama": lambda: hf.LlamaConfig(num_hidden_layers=4, intermediate_size=688, **wide),
        "gpt2": lambda: hf.GPT2Config(n_embd=256, n_layer=4, n_head=8, n_positions=512, **SMALL),
        "t5": lambda: hf.T5Config(
            d_model=256, d_ff=1024, num_layers=3, num_heads=8, d_kv=32,
            decoder_start_token_id=0, pad_token_id=0, **SMALL,
        ),
        "vit": lambda: hf.ViTConfig(
            hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024,
            image_size=64, patch_size=8, num_labels=10,
        ),
        "mixtral": lambda: hf.MixtralConfig(
            num_hidden_layers=3, intermediate_size=512, num_local_experts=4,
            experts_implementation="batched_mm", **wide,
        ),
    }  # fmt: skip
    classes = {
        "llama": hf.LlamaForCausalLM,
        "gpt2": hf.GPT2LMHeadModel,
        "t5": hf.T5ForConditionalGeneration,
        "vit": hf.ViTForImageClassification,
        "mixtral": hf.MixtralForCausalLM,
    }
    torch.manual_seed(0)
    model = classes[family](configs[family]())
    tokens = torch.randint(2000, (2, 64), device="cpu")
    if family == "vit":
        labels = torch.randint(10, (2,), device="cpu")
        return model, {"pixel_values": torch.randn(2, 3, 64, 64, device="cpu"), "labels": labels}
    return model.train(), {"input_ids": tokens, "labels": tokens.clone()}


def wrap(front_end: str, model: nn.Module) -> nn.Module:
    if front_end == FLAT:
        return FSDP(model, auto_wrap_policy="auto", use_orig_params=True)
    for blocks in repeated_blocks(model).values():
        for block in blocks:
            fully_shard(block)
    return fully_shard(model)


def forward_and_backward(model: nn.Module, batch: dict[str, Tensor]) -> None:
    model(**batch).loss.backward()


# -- the ranks


def measure(rank: int, ranks: int, families: list[str], folder: str) -> None:
    """On each rank: train every family with both front ends; rank 0 writes the peaks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    found = {}
    for family in families:
        for front_end in (FLAT, ROWS):
            peaks: list[Any] = [None] * ranks
            dist.all_gather_object(peaks, peak_of(family, front_end))
            found[family, front_end] = max(peaks)
    if rank == 0:
        torch.save(found, f"{folder}/peaks")
    dist.destroy_process_group()


def peak_of(family: str, front_end: str) -> int:
    others = tensors_alive()
    release_spare_pages()
    inner, batch = build(family)
    model = wrap(front_end, inner)
    del inner
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        forward_and_backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with LiveBytes() as live:
        live.leave_out(others)
        if front_end == ROWS:  # they view the shard, through storages of their own
            live.leave_out(model.parameters())
        gc.collect()
        live.forget()
        step()
        return live.peak().nbytes


# -- the plans


def planned(family: str, front_end: str, ranks: int) -> int:
    with torch.device("meta"):
        model, batch = build(family)
    wrapping = functools.partial(wrap, front_end)
    made = fsdp_compat.plan(model, ranks, batch, wrap=wrapping, step=forward_and_backward)
    return made.peak.nbytes


def compare(ranks: int, families: list[str]) -> bool:
    plans = {
        (family, front_end): planned(family, front_end, ranks)
        for family in families
        for front_end in (FLAT, ROWS)
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (ranks, families, folder), nprocs=ranks)
        measured = torch.load(Path(folder) / "peaks")
    print(f"\n{ranks} ranks{'':34}{'planned':>9}{'measured':>10}{'difference':>12}")
    missed = False
    for (family, front_end), nbytes in plans.items():
        real = measured[family, front_end]
        off = nbytes / real - 1
        missed |= abs(off) > LIMIT
        verdict = "met" if abs(off) <= LIMIT else "NOT MET"
        name = f"{family}, {front_end}"
        print(f"{name:41}{nbytes / 2**20:9.2f}{real / 2**20:10.2f}{off:+12.2%}  {verdict}")
    return missed


def plan_large() -> None:
    import transformers as hf

    mixed = fsdp_compat.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, (ranks, sizes) in LARGE.items():
        start = time.process_time()
        with torch.device("meta"):
            config = hf.LlamaConfig(max_position_embeddings=8192, use_cache=False, **sizes)
            model = hf.LlamaForCausalLM(config).train()
            tokens = torch.zeros(1, 4096, dtype=torch.long)
        model.gradient_checkpointing_enable()
        batch = {"input_ids": tokens, "labels": tokens}
        made = fsdp_compat.plan(
            model,
            ranks,
            batch,
            auto_wrap_policy="auto",
            mixed_precision=mixed,
            use_orig_params=True,
        )
        print(f"\nLlama {name}, {time.process_time() - start:.1f} s of CPU\n{made}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--families", nargs="+", default=["llama", "gpt2", "t5", "vit", "mixtral"])
    parser.add_argument("--large", action="store_true", help="plans of 7B and 70B instead")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a limit is missed")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ.setdefault("FSDP_COMPAT_SAME_HOST", "counters")
    if given.large:
        plan_large()
        return 0
    missed = [compare(ranks, given.families) for ranks in given.ranks]
    return int(given.check and any(missed))


if __name__ == "__main__":
    sys.exit(main())
