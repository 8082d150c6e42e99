"""Train a small GPT, sharded over any number of processes, on text that comes with Python.

    torchrun --nproc-per-node 2 examples/train_gpt.py --checkpoint-dir /tmp/gpt
    torchrun --nproc-per-node 4 examples/train_gpt.py --checkpoint-dir /tmp/gpt --resume --steps 400
    python examples/train_gpt.py --steps 20      # one process, the same losses

With --resume, a command line starts a run and goes on with it: torchrun --max-restarts 9 runs it
again after a worker is lost, with the same losses.

It learns the words of pydoc_data.topics, Python's own documentation, on CPU with gloo, or on GPUs
with nccl, one per process. It shows how to wrap a model, how to keep the loss independent of the
number of processes, how to save checkpoints that another number of processes, or another strategy,
can resume, and how to stop cleanly.

Ctrl-C and SIGTERM save a checkpoint at the end of the step; a second one ends the process at once.
The exit status is then 130 or 143 (torchrun's: 1).

It needs tqdm and matplotlib: pip install tqdm matplotlib."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import re
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import TransformerEncoderLayer as Block
from torch.optim import AdamW
from tqdm import tqdm

from fsdp_compat import CheckpointError, ShardingStrategy, checkpoint, describe
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy

VOCABULARY = 1000  # a token is one of the most frequent words, a full stop or a comma
PROMPT = "The"  # where the sample starts
TEMPERATURE = 0.6  # of the sample: below 1, likely words become likelier
WARMUP_STEPS = 20
Batch = tuple[Tensor, Tensor]  # inputs and targets


@functools.cache
def load_text() -> tuple[Tensor, Tensor, list[str]]:
    """Return the words to train on, the last tenth, which is held out for validation (1-D, numbers
    of words), and the words of the vocabulary."""
    text = " ".join(topics[name] for name in sorted(topics))
    words = re.findall(r"[A-Za-z]+|\b[.,](?=\s)", text)
    vocabulary = [word for word, _ in Counter(words).most_common(VOCABULARY)]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    data = torch.tensor([numbers[word] for word in words if word in numbers])
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :], vocabulary


def draw_batch(data: Tensor, batch: int, context: int, seed: int, step: int) -> Batch:
    """Return inputs and targets [batch, context] of a step, of all ranks, by seed and step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(data) - context, (batch, 1), generator=generator)
    windows = data[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


class GPT(nn.Module):
    """Words [batch, time] to logits [batch, time, VOCABULARY]."""

    def __init__(self, dim: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        options: Any = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.token_embedding = nn.Embedding(VOCABULARY, dim)
        self.position_embedding = nn.Embedding(context, dim)
        blocks = (Block(dim, heads, 4 * dim, **options) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(time, device=tokens.device)
        x = self.token_embedding(tokens)
        x = x + self.position_embedding(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
        return self.head(self.norm(x))


@dataclass
class Record:
    """The progress of a run, saved in each checkpoint."""

    settings: dict[str, Any]
    step: int = 0
    starts: list[tuple[int, int]] = field(default_factory=list)  # (steps done before, ranks)
    train: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    validation: list[tuple[int, float]] = field(default_factory=list)


def start(args: argparse.Namespace, model: FSDP, optimizer: AdamW) -> Record:
    """Load the newest checkpoint, saved by any number of ranks with any strategy, and return its
    record; that of a new run if there is none. Exit, on all ranks, if it does not fit. Collective.
    """
    names = ("dim", "layers", "heads", "context", "batch", "seed")
    folder, record = args.checkpoint_dir, Record({name: getattr(args, name) for name in names})
    if folder is None:
        return record
    if not args.resume:
        if newest := checkpoint.latest(folder, model):
            sys.exit(
                f"--checkpoint-dir {folder}: expected none for a new run, got {newest}. "
                "Add --resume, or choose another directory."
            )
        return record
    try:
        saved = Record(**checkpoint.resume(folder, model, optimizer, default=asdict(record)))
    except CheckpointError as error:
        sys.exit(f"--resume: {folder} cannot be loaded.\n{error}")
    if saved.settings != record.settings:
        sys.exit(f"--resume: expected {saved.settings} as before, got {record.settings}.")
    return saved


@contextlib.contextmanager
def stop_requests() -> Iterator[dict[signal.Signals, bool]]:
    """Yield the received signals: the first one sets its flag, a second one ends the process."""
    asked = {signal.SIGINT: False, signal.SIGTERM: False}

    def note(number: int, frame: FrameType | None) -> None:
        asked[signal.Signals(number)] = True
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in asked}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def learning_rate(step: int, peak: float) -> float:
    """Warmup, then the inverse square root. It does not depend on the last step, so a resumed run
    equals one that never stopped."""
    return peak * min(step / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / step))


def part_losses(model: FSDP, batch: Batch) -> Tensor:
    """Return the losses of this rank's part of the batch, 1-D. A rank whose part is empty runs the
    model, too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, targets = (each.tensor_split(ranks)[rank].to(model.compute_device) for each in batch)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")


@torch.no_grad()
def validate(model: FSDP, batch: Batch) -> float:
    """Return the mean loss over a global batch. Collective."""
    model.eval()
    total = part_losses(model, batch).double().sum()
    model.train()
    dist.all_reduce(total)
    return total.item() / batch[0].numel()


@torch.no_grad()
def sample(model: FSDP, args: argparse.Namespace) -> str:
    """Return the prompt and the words that the model goes on with. Collective."""
    model.eval()
    vocabulary = load_text()[2]
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([[vocabulary.index(PROMPT)]], device=model.compute_device)
    for _ in tqdm(range(args.sample_words), "sampling", unit="word", disable=dist.get_rank() != 0):
        logits = model(tokens[:, -args.context :])[0, -1].double().cpu() / TEMPERATURE
        drawn = torch.multinomial(torch.softmax(logits, dim=0), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(tokens)[None]], dim=1)
    text = " ".join(vocabulary[token] for token in tokens[0].tolist())
    return text.replace(" .", ".").replace(" ,", ",")


def train(args: argparse.Namespace, device: torch.device) -> int:
    """Build or resume the model, train, save, sample and plot; return the exit status."""
    is_first, ranks = dist.get_rank() == 0, dist.get_world_size()
    torch.manual_seed(args.seed)  # the same initial model on every rank
    model = FSDP(
        GPT(args.dim, args.layers, args.heads, args.context),
        sharding_strategy=ShardingStrategy[args.strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),  # each is gathered and freed on its own
        use_orig_params=args.use_orig_params,
        device_id=device,
    )
    optimizer = AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    record = start(args, model, optimizer)
    if is_first:
        print(describe(model), flush=True)
        if record.starts:
            saved_by = number_of(record.starts[-1][1])
            here = number_of(ranks)
            print(f"resumed from step {record.step} (saved by {saved_by}) on {here}", flush=True)
    if record.step < args.steps:
        record.starts.append((record.step, ranks))

    status = train_steps(args, model, optimizer, record)
    if is_first and args.losses is not None:
        args.losses.write_text(json.dumps(asdict(record), indent=1))
    if status:
        if is_first:
            print(f"stopped after step {record.step}; to continue a saved run, add --resume")
        return status
    text = sample(model, args)
    if is_first:
        print(textwrap.fill(text, 80))
        show(record, args.checkpoint_dir)
    return 0


def number_of(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def show(record: Record, folder: Path | None) -> None:
    """Draw the loss curve, and print one line about the whole run."""
    picture = (folder or Path()) / "loss.png"
    print(f"drawing {picture}", flush=True)  # importing matplotlib takes a while
    plot(record, picture)
    ends = [step for step, _ in record.starts[1:]] + [record.step]
    parts = [
        f"{a + 1}-{b} on {number_of(n)}" for (a, n), b in zip(record.starts, ends, strict=True)
    ]
    losses = f"loss {record.train[0][1]:.2f}, now {record.train[-1][1]:.2f}"
    saved = f"saved {folder}/step-{record.step:08d}" if folder is not None else "not saved"
    print(f"done: steps {', '.join(parts)}; {losses}; {saved}; loss curve {picture}")


def train_steps(args: argparse.Namespace, model: FSDP, optimizer: AdamW, record: Record) -> int:
    """Train from the step after the record's to the last, or until a signal; return the exit
    status. Collective."""
    text, held_out, _ = load_text()
    validation_batch = draw_batch(held_out, args.batch, args.context, args.seed, step=0)
    num_tokens = args.batch * args.context  # of a step, over all ranks
    # FSDP averages over ranks; this makes it the mean over tokens.
    scale = dist.get_world_size() / num_tokens
    steps = range(record.step + 1, args.steps + 1)
    bar = tqdm(None, "training", args.steps, initial=record.step, disable=dist.get_rank() != 0)
    with stop_requests() as stop, bar:
        for step in steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.lr)
            batch = draw_batch(text, args.batch, args.context, args.seed, step)
            losses = part_losses(model, batch)
            (losses.sum() * scale).backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

            # One small all_reduce for the loss and all ranks' signals, so that they stop together.
            totals = torch.tensor([0.0, *stop.values()], dtype=torch.float64).to(losses.device)
            totals[0] = losses.detach().double().sum() / num_tokens
            dist.all_reduce(totals)
            loss, *asked = totals.tolist()
            status = max(128 + number if on else 0 for number, on in zip(stop, asked, strict=True))

            record.step = step
            record.train.append((step, loss))
            bar.set_postfix(loss=f"{loss:.3f}")
            bar.update()
            last = step == args.steps
            if args.validate_every and (last or step % args.validate_every == 0):
                record.validation.append((step, validate(model, validation_batch)))
            save = status or last or (args.save_every and step % args.save_every == 0)
            if save and args.checkpoint_dir is not None:
                extra = asdict(record)
                checkpoint.save(
                    args.checkpoint_dir, model, optimizer, extra, step=step, keep_last=2
                )
            if status:
                return status
    return 0


def plot(record: Record, path: Path) -> None:
    """Draw training and validation loss by step, and where the run was resumed."""
    import matplotlib

    matplotlib.use("Agg")  # no screen
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(layout="constrained")
    axes.plot(*zip(*record.train, strict=True), label="training")
    if record.validation:
        axes.plot(*zip(*record.validation, strict=True), "o-", label="validation")
    for step, ranks in record.starts:
        axes.axvline(step, linestyle=":", color="gray")
        text = f"resumed on {number_of(ranks)}" if step else number_of(ranks)
        axes.text(step, 1.01, text, rotation=30, transform=axes.get_xaxis_transform())
    axes.set(xlabel="step", ylabel="loss (nats per word)")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(option: str, default: Any, text: str, **more: Any) -> None:
        if default is False:
            parser.add_argument(option, action="store_true", help=text)
        elif default is None:
            parser.add_argument(option, type=Path, metavar="PATH", help=text)
        else:
            text += f" (default: {default})"
            parser.add_argument(option, type=type(default), default=default, help=text, **more)

    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    add("--steps", 200, "train up to this step")
    add("--strategy", "FULL_SHARD", "how to shard", choices=strategies)
    add("--use-orig-params", False, "give the optimizer the model's own parameters")
    add("--checkpoint-dir", None, "directory of the checkpoints; without it nothing is saved")
    add("--save-every", 50, "steps from one checkpoint to the next; 0: only at the end")
    add("--resume", False, "go on from the newest checkpoint in --checkpoint-dir, if there is one")
    add("--seed", 0, "of the initial model, the batches and the sample")
    add("--dim", 128, "width of the model")
    add("--layers", 4, "number of blocks")
    add("--heads", 4, "attention heads; they divide --dim")
    add("--context", 64, "words that the model sees at once")
    add("--batch", 24, "sequences in a step, over all processes")
    add("--lr", 4e-3, "the highest learning rate")
    add("--validate-every", 20, "steps from one validation to the next; 0: never")
    add("--sample-words", 60, "length of the text to sample at the end")
    add("--losses", None, "JSON file to write the losses of all steps to")
    args = parser.parse_args(arguments)
    for name in ("steps", "dim", "layers", "heads", "context", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if args.context >= (limit := len(load_text()[1])):
        parser.error(f"--context: expected less than {limit}, the text held out")
    if args.resume and args.checkpoint_dir is None:
        parser.error("--resume: needs the --checkpoint-dir to resume from")
    return args


def init_distributed() -> torch.device:
    """Create the default process group, of torchrun's processes or of this one alone; return this
    rank's device."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):  # one per process
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    device = init_distributed()
    try:
        return train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
