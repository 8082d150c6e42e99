"""Time of clipping and of the optimizer's step on real processes: ours beside FSDP1, FSDP2 and the
unwrapped model, gloo on CPU.

    torchrun --nproc-per-node 2 tests/benchmarks/optim.py [--models many] [--cpu-time]
                                             (fsdp_compat installed, or PYTHONPATH=.)

Two models of blocks, each block a unit: "few" has two large parameters in a block, "many" has 24
small ones. Every contender has the gradients of one backward of the same loss, clips them in the
way made for it (ours also by torch's function), which gives all the same norm, and steps, again and
again. A call takes as long as on the rank that takes longest. The columns:

    median, minimum  milliseconds
    to FSDP1, FSDP2  time / theirs in the same round, median; FSDP1 with the same use_orig_params
    to plain         time / the unwrapped model's in the same round, each divided by the elements
                     that a rank holds
    slower           ours only: beyond which of them by more than --tolerance; "-" if none. The
                     unwrapped model counts for the optimizer's step only, as its norm needs no
                     communication"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from contenders import (
    DDP,
    FSDP1,
    FSDP2,
    FULLY_SHARD,
    OURS,
    PLAIN,
    Contender,
    Wrapping,
    build,
    fsdp1_of,
)
from measuring import Table, gloo_ranks, measure_ranks, options, say
from torch import nn

MAX_NORM = 1e9  # nothing changes, and all is multiplied
BY_TORCH = ", torch's function"
OPTIMIZERS = {"foreach": {"foreach": True}, "fused": {"fused": True}}


class Block(nn.Module):
    """A residual block of ``width``; its parameters are the matrices and vectors that it is
    told."""

    def __init__(self, width: int, matrices: int, vectors: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(width, width) / width for _ in range(matrices))
        self.vectors = nn.ParameterList(1 + torch.randn(width) / width for _ in range(vectors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for matrix in self.matrices:
            y = (y @ matrix).tanh()
        for vector in self.vectors:
            y = y * vector
        return x + y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "few": lambda: nn.Sequential(*(Block(1024, 2, 0) for _ in range(6))),
    "many": lambda: nn.Sequential(*(Block(64, 8, 16) for _ in range(32))),
}


def main() -> int:
    parser = options(__doc__, rounds=25, has_clock=True, check="ours is slower anywhere")
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--tolerance", type=float, default=0.05, help="by how much a ratio may be above 1")
    arguments = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with gloo_ranks():
        slower = sum([run(name, arguments) for name in arguments.models])
    return int(slower > 0 and arguments.check)


def run(name: str, arguments: argparse.Namespace) -> int:
    """Print the tables of one model; return in how many rows ours is slower than another."""
    torch.manual_seed(0)  # the same parameters, and the same data, on all ranks
    base = MODELS[name]()
    x = torch.randn(2, next(base.parameters()).shape[-1])
    numels = [parameter.numel() for parameter in base.parameters()]
    contenders = build(base, Wrapping((Block,)), without=[DDP])
    for contender in contenders:
        contender.model(x).pow(2).sum().backward()
    say(
        f"\n{name}: {sum(numels) / 1e6:.1f}M elements in {len(numels)} parameters of "
        f"{len(list(base.children()))} units, {dist.get_world_size()} ranks, {arguments.rounds} "
        f"rounds, {'CPU time' if arguments.cpu_time else 'wall clock'}"
    )
    clips = {title: clip for contender in contenders for title, clip in clips_of(contender).items()}
    check_norms(clips)
    held = {
        each.name: sum(getattr(p, "_local_tensor", p).numel() for p in each.parameters)
        for each in contenders
    }
    slower = timed("clip_grad_norm_", clips, held, arguments, (FSDP1, FSDP2))
    for kind, settings in OPTIMIZERS.items():
        steps: dict[str, Callable[[], object]] = {
            each.name: torch.optim.AdamW(each.parameters, lr=1e-7, **settings).step  # type: ignore[arg-type]
            for each in contenders
        }
        slower += timed(f"AdamW, {kind}", steps, held, arguments, (FSDP1, FSDP2, PLAIN))
    return slower


def clips_of(contender: Contender) -> dict[str, Callable[[], object]]:
    """Return the ways in which a contender clips, by title."""
    by_torch = functools.partial(torch.nn.utils.clip_grad_norm_, contender.parameters, MAX_NORM)
    if contender.name in (PLAIN, FSDP2, FULLY_SHARD):
        return {contender.name: by_torch}
    method: Callable[[], object] = functools.partial(contender.model.clip_grad_norm_, MAX_NORM)  # type: ignore[operator]
    found = {contender.name: method}
    if contender.name.startswith(OURS):
        found[contender.name + BY_TORCH] = by_torch
    return found


def check_norms(clips: dict[str, Callable[[], object]]) -> None:
    """Raise unless all get the same norm. Collective."""
    norms: dict[str, Any] = {title: clip() for title, clip in clips.items()}
    for title, norm in norms.items():
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        message = f"norm of {title}: {norm} instead of {norms[PLAIN]}"
        torch.testing.assert_close(norm, norms[PLAIN], rtol=1e-4, atol=0, msg=message)
    say(f"norms of all are equal: {norms[PLAIN].item():.5g}")


def timed(
    what: str,
    steps: dict[str, Callable[[], object]],
    held: dict[str, int],
    arguments: argparse.Namespace,
    compared: Sequence[str],
) -> int:
    """Print a table; return in how many rows ours is slower than any of ``compared``."""
    timings, slower = measure_ranks(steps, arguments.rounds, cpu_time=arguments.cpu_time), 0
    columns = {"median": "7.2f ms", "minimum": "7.2f ms"}
    others = (FSDP1, FSDP2, PLAIN)
    table = Table(columns | {f"to {other}": "9.3f" for other in others}, width=42)
    say("")
    table.head(what, last="slower")
    for title in timings.seconds:
        name = title.removesuffix(BY_TORCH)
        peers = {FSDP1: fsdp1_of(name), FSDP2: FSDP2, PLAIN: PLAIN}
        ratios = {other: timings.ratio(title, peer) for other, peer in peers.items()}
        ratios[PLAIN] *= held[PLAIN] / held[name]
        is_ours, limit = title.startswith(OURS), 1 + arguments.tolerance
        beyond = [to for to in compared if is_ours and ratios[to] > limit]
        slower += bool(beyond)
        times = timings.median(title) * 1e3, timings.minimum(title) * 1e3
        table.row(title, [*times, *ratios.values()], ", ".join(beyond) or "-" * is_ours)
    return slower


if __name__ == "__main__":
    raise SystemExit(main())
