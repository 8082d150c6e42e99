"""Train a small GPT, sharded over any number of processes, on text that comes with Python.

    torchrun --nproc-per-node 2 examples/train_gpt.py --checkpoint-dir /tmp/gpt
    torchrun --nproc-per-node 4 examples/train_gpt.py --checkpoint-dir /tmp/gpt --resume --steps 400
    python examples/train_gpt.py --steps 20      # one process, the same losses

It learns the bytes of pydoc_data.topics, Python's own documentation, on CPU with gloo, or on GPUs
with nccl, one per process. It shows how to wrap a model, how to keep the loss independent of the
number of processes, how to save checkpoints that another number of processes, or another strategy,
can resume, and how to stop cleanly.

Ctrl-C and SIGTERM save a checkpoint at the end of the step; a second one ends the process at once.
The exit status is then 130 or 143. torchrun passes signals on, kills processes that have not ended
30 seconds later, and returns 1 itself.

It needs tqdm and matplotlib: pip install 'fsdp_compat[examples]'."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from fsdp_compat import CheckpointError, ShardingStrategy, checkpoint
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy

VOCABULARY = 256  # a token is a byte
PROMPT = b"The "  # where the sample starts
WARMUP_STEPS = 50
T = TypeVar("T")


class RunError(Exception):
    """The run cannot continue; the message says why and what to do. Raised on all ranks."""


# --- data -----------------------------------------------------------------------------------------


def load_text() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and the bytes held out for validation, the last tenth: both 1-D,
    uint8."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def draw_batch(
    data: Tensor, batch: int, context: int, seed: int, step: int
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [batch, context] of one step for all ranks: they depend on seed and
    step alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(data) - context, (batch, 1), generator=generator)
    windows = data[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def rank_part(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """Return this rank's rows: as even as possible, none for some if there are fewer rows than
    ranks."""
    return batch[len(batch) * rank // world_size : len(batch) * (rank + 1) // world_size]


# --- model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention and an MLP, each normalised first and added to its input. FSDP shards block
    by block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim)
        self.mlp_out = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, dim]
        q, k, v = (
            self.qkv(self.attention_norm(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )  # [batch, heads, time, dim / heads]
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes [batch, time] to logits [batch, time, 256]."""

    def __init__(
        self, dim: int, layers: int, heads: int, context: int, tie_embeddings: bool
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, dim)
        self.position_embedding = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention_out.weight", "mlp_out.weight")):
                nn.init.normal_(
                    parameter, std=0.02 / math.sqrt(2 * layers)
                )  # they add up along the layers
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        if tie_embeddings:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# --- checkpoints ----------------------------------------------------------------------------------


@dataclass
class Record:
    """The progress of a run, saved in each checkpoint."""

    step: int = 0
    train: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    validation: list[tuple[int, float]] = field(default_factory=list)


def starting_point(directory: Path, resume: bool, settings: dict[str, Any]) -> Path | None:
    """Return the newest checkpoint, or None for a new run, whose settings are then written to
    ``settings.json``. Raise RunError if the directory does not fit."""
    newest, file = checkpoint.latest(directory), directory / "settings.json"
    if not resume:
        if newest is not None:
            raise RunError(
                f"--checkpoint-dir: expected no checkpoint for a new run, got {newest}. To "
                "continue it, add --resume; otherwise choose another directory."
            )
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings, indent=1))
        return None
    if newest is None:
        got = "a directory without one" if directory.is_dir() else "no such directory"
        raise RunError(
            f"--resume: expected a complete checkpoint in {directory}, got {got}. To start a new "
            "run, leave out --resume."
        )
    try:
        saved = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"--resume: expected a readable {file}, got {error!r}.") from error
    for name, got in settings.items():
        if got != saved.get(name):
            option = "--" + name.replace("_", "-")
            raise RunError(
                f"{option}: expected {saved.get(name)} as in {file}, got {got}. A resumed run must "
                "repeat it."
            )
    return newest


def load_checkpoint(path: Path, model: FSDP, optimizer: torch.optim.Optimizer) -> Record:
    """Load a checkpoint, saved by any number of ranks with any strategy. Collective."""
    try:
        return Record(**checkpoint.load(path, model, optimizer))
    except CheckpointError as error:
        raise RunError(
            f"--resume: {path} cannot be loaded. Remove it to resume from the one before.\n{error}"
        ) from error


# --- training -------------------------------------------------------------------------------------


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


def on_rank_0(function: Callable[[], T]) -> T:
    """Return on all ranks what ``function`` returns on rank 0, or raise the RunError it raises
    there. Collective."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [function()]
        except RunError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], RunError):
        raise outcome[0]
    return outcome[0]


def learning_rate(step: int, peak: float) -> float:
    """Warmup, then the inverse square root. It does not depend on the last step, so a resumed run
    equals one that never stopped."""
    return peak * min(step / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / step))


def part_losses(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Return the losses of this rank's tokens, 1-D. A rank without tokens still runs the model."""
    inputs, targets = (
        rank_part(tensor, dist.get_rank(), dist.get_world_size()).to(device) for tensor in batch
    )
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")


@torch.no_grad()
def validate(model: FSDP, batch: tuple[Tensor, Tensor], device: torch.device) -> float:
    """Return the mean loss over a global batch. Collective."""
    model.eval()
    total = part_losses(model, batch, device).double().sum()
    model.train()
    dist.all_reduce(total)
    return total.item() / batch[0].numel()


@torch.no_grad()
def sample(model: FSDP, num_bytes: int, context: int, seed: int, device: torch.device) -> str:
    """Return the prompt and the bytes that the model generates. Collective: all ranks draw the same
    ones."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(PROMPT)], device=device)
    for _ in range(num_bytes):
        logits = model(tokens[:, -context:])[0, -1].double().cpu()
        drawn = torch.multinomial(torch.softmax(logits, dim=0), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(device)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def train(args: argparse.Namespace, device: torch.device) -> int:
    """Build or resume the model, train and save it, then plot and sample; return the exit status.
    Collective."""
    rank = dist.get_rank()
    shape = {
        name: getattr(args, name)
        for name in ("dim", "layers", "heads", "context", "tie_embeddings")
    }
    settings = {**shape, "batch": args.batch, "seed": args.seed}
    newest = None
    if args.checkpoint_dir is not None:
        newest = on_rank_0(lambda: starting_point(args.checkpoint_dir, args.resume, settings))

    torch.manual_seed(args.seed)  # the same initial model on every rank
    model = FSDP(
        GPT(**shape),
        sharding_strategy=ShardingStrategy[args.strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=args.use_orig_params,
        device_id=device,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    record = Record() if newest is None else load_checkpoint(newest, model, optimizer)

    status = train_steps(args, model, optimizer, record, device)
    if rank == 0 and args.losses is not None:
        args.losses.write_text(json.dumps(asdict(record), indent=1))
    if status:
        if rank == 0:
            hint = "nothing is saved without --checkpoint-dir"
            if args.checkpoint_dir is not None:
                hint = f"saved {checkpoint.latest(args.checkpoint_dir)}; to continue, add --resume"
            print(f"stopped after step {record.step}: {hint}")
        return status
    text = sample(model, args.sample_bytes, args.context, args.seed, device)
    if rank == 0:
        plot(record, args.plot)
        print(f"loss curve: {args.plot}\nsample:\n{text}")
    return 0


def train_steps(
    args: argparse.Namespace,
    model: FSDP,
    optimizer: torch.optim.Optimizer,
    record: Record,
    device: torch.device,
) -> int:
    """Train from the step after the record's to the last, or until a signal; return the exit
    status. Collective."""
    text, held_out = load_text()
    validation_batch = draw_batch(held_out, args.batch, args.context, args.seed, step=0)
    num_tokens = args.batch * args.context  # of a step, over all ranks
    # FSDP averages over ranks; this makes it the mean over tokens.
    scale = dist.get_world_size() / num_tokens
    steps = range(record.step + 1, args.steps + 1)
    show = {
        "initial": record.step,
        "total": args.steps,
        "unit": "step",
        "disable": dist.get_rank() != 0,
    }
    with stop_requests() as stop, tqdm(steps, **show) as bar:
        for step in bar:
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.lr)
            losses = part_losses(
                model, draw_batch(text, args.batch, args.context, args.seed, step), device
            )
            (losses.sum() * scale).backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

            # One small all_reduce for the loss and all ranks' signals, so that they stop together.
            totals = torch.tensor([0.0, *stop.values()], dtype=torch.float64, device=device)
            totals[0] = losses.detach().double().sum() / num_tokens
            dist.all_reduce(totals)
            loss, interrupts, terminations = totals.tolist()
            status = (
                128 + (signal.SIGTERM if terminations else signal.SIGINT)
                if interrupts or terminations
                else 0
            )

            record.step = step
            record.train.append((step, loss))
            bar.set_postfix(
                loss=f"{loss:.3f}", tokens_per_s=round(num_tokens / (time.perf_counter() - started))
            )
            if args.validate_every and (step % args.validate_every == 0 or step == args.steps):
                record.validation.append((step, validate(model, validation_batch, device)))
            save = status or step == args.steps or (args.save_every and step % args.save_every == 0)
            if save and args.checkpoint_dir is not None:
                checkpoint.save(args.checkpoint_dir, model, optimizer, asdict(record), step=step)
            if status:
                return status
    return 0


def plot(record: Record, path: Path) -> None:
    """Draw training and validation loss by step."""
    import matplotlib

    matplotlib.use("Agg")  # no screen
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(layout="constrained")
    axes.plot(*zip(*record.train, strict=True), label="training")
    if record.validation:
        axes.plot(*zip(*record.validation, strict=True), "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


# --- main -----------------------------------------------------------------------------------------


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

    add("--steps", 200, "train up to this step")
    add(
        "--strategy",
        "FULL_SHARD",
        "how to shard",
        choices=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"),
    )
    add("--use-orig-params", False, "give the optimizer the model's own parameters")
    add("--checkpoint-dir", None, "directory of the checkpoints; without it nothing is saved")
    add("--save-every", 50, "steps from one checkpoint to the next; 0: only at the end")
    add("--resume", False, "go on from the newest checkpoint in --checkpoint-dir")
    add("--seed", 0, "of the initial model, the batches and the sample")
    add("--dim", 128, "width of the model")
    add("--layers", 4, "number of blocks")
    add("--heads", 4, "attention heads; they divide --dim")
    add("--context", 128, "bytes that the model sees at once")
    add("--tie-embeddings", False, "use the token embedding for the output, too")
    add("--batch", 24, "sequences in a step, over all processes")
    add("--lr", 4e-3, "the highest learning rate")
    add("--validate-every", 20, "steps from one validation to the next; 0: never")
    add("--sample-bytes", 300, "length of the text to sample at the end")
    add(
        "--plot", None, "picture of the loss curve (default: loss.png in --checkpoint-dir, or here)"
    )
    add("--losses", None, "JSON file to write the losses of all steps to")
    args = parser.parse_args(arguments)

    minima = {"steps": 1, "dim": 1, "layers": 1, "heads": 1, "context": 1, "batch": 1}
    for name, minimum in {
        **minima,
        "save_every": 0,
        "validate_every": 0,
        "sample_bytes": 0,
        "seed": 0,
    }.items():
        if getattr(args, name) < minimum:
            parser.error(
                f"--{name.replace('_', '-')}: expected at least {minimum}, got "
                f"{getattr(args, name)}"
            )
    if args.dim % args.heads:
        parser.error(f"--heads: expected a divisor of --dim {args.dim}, got {args.heads}")
    held_out = load_text()[1]
    if args.context >= len(held_out):
        parser.error(
            f"--context: expected less than {len(held_out)}, the text held out, got {args.context}"
        )
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr: expected a positive number, got {args.lr}")
    if args.resume and args.checkpoint_dir is None:
        parser.error("--resume: needs the --checkpoint-dir to resume from")
    if (
        args.checkpoint_dir is not None
        and args.checkpoint_dir.exists()
        and not args.checkpoint_dir.is_dir()
    ):
        parser.error(f"--checkpoint-dir: expected a directory, got the file {args.checkpoint_dir}")
    for option, path in (("--plot", args.plot), ("--losses", args.losses)):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{option}: expected a file in a directory that exists, got {path}")
    if args.plot is None:
        args.plot = (args.checkpoint_dir or Path()) / "loss.png"
    return args


def init_distributed() -> torch.device:
    """Create the default process group, of torchrun's processes or of this one alone; return this
    rank's device."""
    device, backend = torch.device("cpu"), "gloo"
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.device_count() >= local_ranks:  # one GPU per process
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
    except RunError as error:
        print(f"train_gpt.py, rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
