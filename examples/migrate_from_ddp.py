"""Train one model under DistributedDataParallel and under fsdp_compat, and print the losses of both
side by side.

    torchrun --nproc-per-node 2 examples/migrate_from_ddp.py
    torchrun --nproc-per-node 3 examples/migrate_from_ddp.py --use-orig-params --steps 60 --every 5

For training code that moves from DDP to FSDP. The differences are in pairs of functions, `..._ddp`
and `..._fsdp`, under "what differs": construction and optimizer, clipping, saving, loading, an
average of the weights (EMA), and `generate`. All other code is shared, including gradient
accumulation under no_sync and evaluation.

There are three runs over the same batches: DDP, which saves a checkpoint halfway; FSDP, which also
does so and continues from its file with a new model and optimizer; and FSDP that starts halfway
from DDP's file. It runs on CPU with gloo, or on GPUs with nccl, one per process. On several
machines, --checkpoint-dir has to be shared.

Both average gradients in fp32 but add them in different orders, so the losses differ by rounding,
see tolerance(). If they differ by more, the exit status is 1 and a line says where. (torchrun then
prints its own report.)

--plot needs matplotlib: pip install 'fsdp_compat[examples]'."""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import register_fsdp_forward_method
from fsdp_compat.wrap import ModuleWrapPolicy

VOCABULARY = 256  # a token is a byte
PROMPT = b"The "  # where the generated text starts
MAX_NORM = 0.5  # of the gradients, after clipping
EMA_DECAY = 0.9


# --- data and model: the same for both ------------------------------------------------------------


def load_text() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and the bytes held out for validation, the last tenth: both 1-D,
    uint8."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def draw_batch(
    data: Tensor, args: argparse.Namespace, step: int, part: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return this rank's inputs and targets [batch, context] for one accumulated part of a step."""
    seed = (
        (args.seed * 1_000_003 + step) * args.accumulate + part
    ) * dist.get_world_size() + dist.get_rank()
    starts = torch.randint(
        len(data) - args.context, (args.batch, 1), generator=torch.Generator().manual_seed(seed)
    )
    windows = data[starts + torch.arange(args.context + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]


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
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

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
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes [batch, time] to logits [batch, time, 256]."""

    def __init__(self, dim: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(VOCABULARY, dim)
        self.position_embedding = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens: Tensor, num_tokens: int, seed: int) -> Tensor:
        """Return tokens [batch, time] followed by ``num_tokens`` sampled ones, equal on all
        ranks."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(num_tokens):
            logits = self(tokens[:, -self.context :])[:, -1].double().cpu()
            drawn = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)], dim=1)
        return tokens


# --- what differs: construction and optimizer -----------------------------------------------------


def build_ddp(
    module: GPT, device: torch.device, args: argparse.Namespace
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DDP(module.to(device))  # takes rank 0's weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    return model, optimizer


def build_fsdp(
    module: GPT, device: torch.device, args: argparse.Namespace
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = FSDP(
        module,
        auto_wrap_policy=ModuleWrapPolicy({Block}),  # each Block is gathered and freed on its own
        device_id=device,
        sync_module_states=True,  # takes rank 0's weights
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after wrapping
    register_fsdp_forward_method(model, "generate")  # a method other than forward
    return model, optimizer


def build_fsdp_with_orig_params(
    module: GPT, device: torch.device, args: argparse.Namespace
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As build_fsdp, but the module keeps its Parameter objects, so the optimizer may come
    first."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr)
    model = FSDP(
        module,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,
        sync_module_states=True,
        use_orig_params=True,
    )
    register_fsdp_forward_method(model, "generate")
    return model, optimizer


# --- what differs: clipping -----------------------------------------------------------------------


def clip_ddp(model: DDP) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def clip_fsdp(model: FSDP) -> None:
    # The norm of the whole model; torch.nn.utils.clip_grad_norm_ works as well.
    model.clip_grad_norm_(MAX_NORM)


# --- what differs: saving and loading -------------------------------------------------------------


def save_ddp(path: Path, model: DDP, optimizer: torch.optim.Optimizer, ema: nn.Module) -> None:
    if dist.get_rank() == 0:
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "ema": ema.state_dict(),
            },
            path,
        )
    dist.barrier()  # other ranks read the file once it is complete


def save_fsdp(path: Path, model: FSDP, optimizer: torch.optim.Optimizer, ema: FSDP) -> None:
    # All ranks call state_dict() and optim_state_dict(), which gather whole tensors. For large
    # models, see the sharded checkpoints of train_gpt.py.
    state = {
        "model": model.state_dict(),
        "optimizer": FSDP.optim_state_dict(model, optimizer),
        "ema": ema.state_dict(),
    }
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def load_ddp(path: Path, model: DDP, optimizer: torch.optim.Optimizer, ema: nn.Module) -> None:
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    ema.load_state_dict(state["ema"])


def load_fsdp(path: Path, model: FSDP, optimizer: torch.optim.Optimizer, ema: FSDP) -> None:
    """Load a file of save_fsdp or save_ddp, on any number of processes."""
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])  # the keys of DDP begin with "module."
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
    ema.load_state_dict(state["ema"])


# --- what differs: an average of the weights, and generate ----------------------------------------


def average_ddp(model: DDP) -> nn.Module:
    return copy.deepcopy(model.module)


def average_fsdp(model: FSDP) -> nn.Module:
    return copy.deepcopy(model)  # sharded like the model


def generate_ddp(model: DDP, tokens: Tensor, num_tokens: int, seed: int) -> Tensor:
    return model.module.generate(tokens, num_tokens, seed)


def generate_fsdp(model: FSDP, tokens: Tensor, num_tokens: int, seed: int) -> Tensor:
    return model.generate(tokens, num_tokens, seed)  # registered in build_fsdp; on all ranks


@dataclass(frozen=True)
class Way:
    """One side of these pairs of functions."""

    build: Callable[..., tuple[nn.Module, torch.optim.Optimizer]]
    clip: Callable[..., None]
    save: Callable[..., None]
    load: Callable[..., None]
    average: Callable[..., nn.Module]
    generate: Callable[..., Tensor]


WITH_DDP = Way(build_ddp, clip_ddp, save_ddp, load_ddp, average_ddp, generate_ddp)
WITH_FSDP = Way(build_fsdp, clip_fsdp, save_fsdp, load_fsdp, average_fsdp, generate_fsdp)
WITH_FSDP_ORIG_PARAMS = Way(
    build_fsdp_with_orig_params, clip_fsdp, save_fsdp, load_fsdp, average_fsdp, generate_fsdp
)


# --- training: the same for both ------------------------------------------------------------------


@dataclass
class Run:
    """The results of a run; the same on all ranks."""

    losses: dict[int, float] = field(default_factory=dict)  # by step, counted from 1
    validation: float = math.nan
    average_validation: float = math.nan  # of the averaged weights
    text: str = ""


def train(
    way: Way,
    args: argparse.Namespace,
    device: torch.device,
    steps: range,
    load: Path | None = None,
    save: Path | None = None,
) -> Run:
    """Build or load a model, train it for these steps, save it halfway, evaluate and generate.
    Collective."""
    text, held_out = load_text()
    torch.manual_seed(args.seed)
    model, optimizer = way.build(GPT(args.dim, args.layers, args.heads, args.context), device, args)
    ema = way.average(model)
    if load is not None:
        way.load(load, model, optimizer, ema)

    run = Run()
    for step in steps:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for part in range(args.accumulate):
            last = part == args.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = loss_of(model, *draw_batch(text, args, step, part, device)) / args.accumulate
                loss.backward()  # the last one averages the accumulated gradients over the ranks
            total += loss.detach()
        way.clip(model)
        optimizer.step()
        optimizer.zero_grad()
        update_average(ema, model)
        run.losses[step] = mean_over_ranks(total)
        if save is not None and step == args.steps // 2:
            way.save(save, model, optimizer, ema)

    validation = draw_batch(held_out, args, 0, 0, device)
    run.validation = evaluate(model, validation)
    run.average_validation = evaluate(ema, validation)
    model.eval()
    tokens = way.generate(
        model, torch.tensor([list(PROMPT)], device=device), args.generate, args.seed
    )
    run.text = bytes(tokens[0].tolist()).decode(errors="replace")
    return run


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def mean_over_ranks(value: Tensor) -> float:
    total = value.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Return the mean loss over the ranks' batches. Under FSDP all ranks take part, as in
    training."""
    model.eval()
    loss = loss_of(model, *batch)
    model.train()
    return mean_over_ranks(loss)


@torch.no_grad()
def update_average(ema: nn.Module, model: nn.Module) -> None:
    """Under FSDP each rank averages its own shards; nothing is sent."""
    for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
        average.lerp_(parameter, 1 - EMA_DECAY)


# --- comparison -----------------------------------------------------------------------------------

TITLES = {"DDP": "DDP", "FSDP": "FSDP", "moved": "FSDP from DDP's file"}


def tolerance(num_steps: int) -> float:
    """Return the largest relative difference that rounding explains, ``num_steps`` after two runs
    were equal.

    Gradients added in another order differ in their last digits, and fp32 resolves a loss to
    1.2e-7. Measured with learning rates from 1e-3 to 1e-2 on 1 to 4 processes: up to 1e-7 over 40
    steps. Then training amplifies it, at 1e-2 tenfold in about 40 steps, so mistakes show best in
    the first steps.
    """
    return 1e-6 * 10 ** max(0.0, num_steps / 40 - 1)


def difference(value: float, expected: float) -> float:
    """Return the relative difference; infinite for NaN."""
    ratio = abs(value - expected) / abs(expected)
    return math.inf if math.isnan(ratio) else ratio


def table(runs: Mapping[str, Run], every: int) -> list[str]:
    """Return a heading, lines for the first, the last and every ``every``-th step, and two for the
    validation losses."""
    shown = [
        step
        for step in runs["DDP"].losses
        if step % every == 0 or step in (1, len(runs["DDP"].losses))
    ]
    rows = [
        (str(step), {name: run.losses.get(step) for name, run in runs.items()}) for step in shown
    ]
    rows.append(("validation", {name: run.validation for name, run in runs.items()}))
    rows.append(("of average", {name: run.average_validation for name, run in runs.items()}))
    lines = [
        f"{'step':>10}"
        + "".join(f"  {TITLES[name]:>20}" + "  difference" * (name != "DDP") for name in runs)
    ]
    for label, values in rows:
        line = f"{label:>10}"
        for name, value in values.items():
            if value is not None:
                line += f"  {value:>20.7f}"
            if value is not None and name != "DDP":
                line += f"  {difference(value, values['DDP']):>10.1e}"
        lines.append(line)
    return lines


def problems(runs: Mapping[str, Run]) -> list[str]:
    """Return, for each other run, the first loss that differs from DDP's by more than rounding."""
    expected = runs["DDP"]
    found = []
    for name, run in runs.items():
        values = [
            (step, f"loss of step {step}", loss, expected.losses[step])
            for step, loss in run.losses.items()
        ]
        last = max(run.losses)
        values.append((last, "validation loss", run.validation, expected.validation))
        values.append(
            (
                last,
                "validation loss of the average",
                run.average_validation,
                expected.average_validation,
            )
        )
        for step, what, value, right in values:
            limit = tolerance(step - min(run.losses) + 1)
            if difference(value, right) > limit:
                far = (
                    f"the relative difference is {difference(value, right):.1e}, above {limit:.1e}"
                )
                found.append(
                    f"{TITLES[name]}: {what}: expected {right:.7f} as with DDP, got {value:.7f}; "
                    f"{far}"
                )
                break
    return found


def plot(runs: Mapping[str, Run], path: Path) -> None:
    """Draw the losses of all runs by step."""
    import matplotlib

    matplotlib.use("Agg")  # no screen
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    styles = {
        "DDP": {"linewidth": 5, "alpha": 0.35},
        "FSDP": {"linewidth": 1.5},
        "moved": {"linestyle": "", "marker": "."},
    }
    for name, run in runs.items():  # they overlap: the first is wide, the last dotted
        axes.plot(list(run.losses), list(run.losses.values()), label=TITLES[name], **styles[name])
    axes.set(
        xlabel="step",
        ylabel="training loss (nats per byte)",
        title="The same training under DDP and FSDP",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# --- main -----------------------------------------------------------------------------------------


def compare(args: argparse.Namespace, device: torch.device) -> int:
    """Train all runs, print the results, and return the exit status. Collective."""
    fsdp = WITH_FSDP_ORIG_PARAMS if args.use_orig_params else WITH_FSDP
    half = args.steps // 2
    with checkpoint_directory(args.checkpoint_dir) as directory:
        ddp_file, fsdp_file = directory / "ddp.pt", directory / "fsdp.pt"
        runs = {"DDP": train(WITH_DDP, args, device, range(1, args.steps + 1), save=ddp_file)}
        begun = train(fsdp, args, device, range(1, half + 1), save=fsdp_file)
        runs["FSDP"] = train(fsdp, args, device, range(half + 1, args.steps + 1), load=fsdp_file)
        runs["FSDP"].losses = {**begun.losses, **runs["FSDP"].losses}
        runs["moved"] = train(fsdp, args, device, range(half + 1, args.steps + 1), load=ddp_file)

    found = problems(runs)
    if dist.get_rank() == 0:
        print(*table(runs, args.every), sep="\n")
        for name, run in runs.items():
            print(f"{TITLES[name]} generates: {run.text!r}")
        if args.plot is not None:
            plot(runs, args.plot)
            print(f"loss curves: {args.plot}")
        for problem in found:
            print(f"migrate_from_ddp.py: {problem}", file=sys.stderr)
        if not found:
            print("the losses are the same, up to rounding")
    return 1 if found else 0


@contextlib.contextmanager
def checkpoint_directory(chosen: Path | None) -> Iterator[Path]:
    """Yield the directory for checkpoints on all ranks: the chosen one, or a temporary one.
    Collective."""
    if chosen is not None:
        yield chosen
        return
    temporary = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
    name = [temporary.name if temporary is not None else ""]
    dist.broadcast_object_list(name, src=0)
    try:
        yield Path(name[0])
    finally:
        if temporary is not None:
            temporary.cleanup()


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(option: str, default: Any, text: str) -> None:
        if default is False:
            parser.add_argument(option, action="store_true", help=text)
        elif default is None:
            parser.add_argument(option, type=Path, metavar="PATH", help=text)
        else:
            parser.add_argument(
                option, type=type(default), default=default, help=f"{text} (default: {default})"
            )

    add("--steps", 40, "train up to this step; the checkpoints are saved after half of them")
    add("--every", 1, "steps from one printed line to the next")
    add("--use-orig-params", False, "under FSDP, give the optimizer the model's own parameters")
    add("--plot", None, "PNG file to draw the curves into")
    add(
        "--checkpoint-dir",
        None,
        "directory to keep the two checkpoints in; without it they are deleted",
    )
    add("--seed", 0, "of the initial model and the batches")
    add("--dim", 64, "width of the model")
    add("--layers", 2, "number of blocks")
    add("--heads", 4, "attention heads; they divide --dim")
    add("--context", 64, "bytes that the model sees at once")
    add("--batch", 4, "sequences in one forward of one process")
    add("--accumulate", 2, "forwards and backwards in a step")
    add("--lr", 3e-3, "learning rate")
    add("--generate", 40, "bytes to generate at the end")
    args = parser.parse_args(arguments)

    minima = {
        "steps": 2,
        "every": 1,
        "dim": 1,
        "layers": 1,
        "heads": 1,
        "context": 1,
        "batch": 1,
        "accumulate": 1,
    }
    for name, minimum in {**minima, "seed": 0, "generate": 0}.items():
        if getattr(args, name) < minimum:
            parser.error(f"--{name}: expected at least {minimum}, got {getattr(args, name)}")
    if args.dim % args.heads:
        parser.error(f"--heads: expected a divisor of --dim {args.dim}, got {args.heads}")
    if args.context >= len(load_text()[1]):
        parser.error(
            f"--context: expected less than {len(load_text()[1])}, the text held out, got "
            f"{args.context}"
        )
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr: expected a positive number, got {args.lr}")
    if args.plot is not None and not args.plot.parent.is_dir():
        parser.error(f"--plot: expected a file in a directory that exists, got {args.plot}")
    if args.checkpoint_dir is not None and not args.checkpoint_dir.is_dir():
        parser.error(
            f"--checkpoint-dir: expected a directory that exists, got {args.checkpoint_dir}"
        )
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
        return compare(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
