"""Ranks whose data use different parameters issue their collectives in one order, which is all by
which NCCL matches them.

Two ranks are simulated one after the other, on the emulated device. Every block has sizes of its
own, so sequences of kinds and sizes tell whose parameters travel. Where the ranks vote on
something, both get the answer that a real vote would have given."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.emulated import nccl
from tests.support.parity import no_sync
from tests.support.ranks import on_ranks
from tests.support.sampling import sample
from tests.support.twin import FLAT, FULLY_SHARD, ORIGINAL, sharded

RANKS = 4  # two nodes of two where gradients are also reduced over replicas
WIDTH = 32
BLOCKS = 4
Issued = tuple[str, int, int]  # the kind, bytes, the number of ranks
Used = tuple[Sequence[int] | None, ...]  # the experts by block; None: the block is left out


# -- a model with experts


class Block(nn.Module):
    """The tokens of a rank use some of the experts."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        hidden = WIDTH + 16 * index
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH))
            for _ in range(2)
        )

    def forward(
        self, x: torch.Tensor, used: Sequence[int], condition: torch.Tensor
    ) -> torch.Tensor:
        x = y = torch.relu(self.base(x))
        if len(used) == len(self.experts):
            y = y + condition
        for index in used:
            y = y + self.experts[index](x)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index) for index in range(BLOCKS))
        self.condition, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recomputes = False

    def forward(self, x: torch.Tensor, used: Used) -> torch.Tensor:
        condition = self.condition(x)  # an input of all blocks
        for block, experts in zip(self.blocks, used, strict=True):
            if experts is None:
                continue
            if self.recomputes:
                x = checkpoint(block, x, experts, condition, use_reentrant=False)
            else:
                x = block(x, experts, condition)
        return self.out(x).pow(2).mean()


ALL: Used = ((0, 1),) * BLOCKS
FEWER: Used = ((0, 1), (0, 1), (0,), (0, 1))
NO_BLOCK: Used = ((0, 1), None, (0, 1), (0, 1))


# -- two ranks


class Votes:
    """What simulated ranks answer to each other: a pass takes the values that the last pass saw."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []
        self._answers = deque[list[torch.Tensor]]()

    @contextlib.contextmanager
    def of_rank(self) -> Iterator[None]:
        answers, seen = deque(self._answers), list[torch.Tensor]()
        self.seen.append(seen)

        def vote(tensor: torch.Tensor, op: dist.ReduceOp) -> None:
            seen.append(tensor.cpu().clone())
            if answers:
                values = torch.stack(answers.popleft())
                total = values.sum(0) if op == dist.ReduceOp.SUM else values.amax(0)
                tensor.copy_(total)

        with nccl.answering(vote):
            yield

    def end_of_pass(self) -> None:
        self._answers = deque(map(list, zip(*self.seen, strict=False)))
        self.seen = []


def sequences(
    front_end: str, strategy: str, scenario: str, options: dict[str, Any]
) -> list[list[Issued]]:
    """Return what each of two ranks issues."""
    nccl.use()
    votes, found = Votes(), list[list[Issued]]()
    for _ in range(2):
        found = []
        for rank in range(2):
            with nccl.group_of(RANKS, rank), votes.of_rank():
                found.append(issued(rank, front_end, strategy, scenario, options))
        votes.end_of_pass()
    return found


def issued(
    rank: int, front_end: str, strategy: str, scenario: str, options: dict[str, Any]
) -> list[Issued]:
    torch.manual_seed(0)
    model = model_of(front_end, strategy, **options)
    x = torch.randn(4, WIDTH).to("emulated")
    model(x, ALL).backward()
    model.zero_grad()
    with nccl.recording() as recording:
        SCENARIOS[scenario](model, x, rank)
        torch.accelerator.synchronize()
    return [(op.name, op.nbytes, len(op.ranks)) for op in nccl.collectives(recording)]


def model_of(
    front_end: str,
    strategy: str,
    *,
    reduces_unused: bool = False,
    frozen: bool = False,
    recomputes: bool = False,
    **options: Any,
) -> nn.Module:
    model = Model()
    model.recomputes = recomputes
    if frozen:
        for block in model.blocks:
            block.base.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
    device = torch.device("emulated", 0)
    wrapped = sharded(model, front_end, strategy, units=(Block,), device_id=device, **options)
    if reduces_unused:
        wrapped.set_reduce_scatter_unused_params(True)
    return wrapped


# -- what the ranks do; the second one has data that use fewer parameters


def used_by(rank: int) -> Used:
    return FEWER if rank == 1 else ALL


def an_expert_without_tokens(model: Any, x: torch.Tensor, rank: int) -> None:
    model(x, used_by(rank)).backward()


def a_block_left_out(model: Any, x: torch.Tensor, rank: int) -> None:
    model(x, NO_BLOCK if rank == 1 else ALL).backward()


def accumulation(model: Any, x: torch.Tensor, rank: int) -> None:
    with no_sync(model):
        model(x, used_by(rank)).backward()
    model(x, used_by(1 - rank)).backward()


def reduced_accumulation(model: Any, x: torch.Tensor, rank: int) -> None:
    for number in range(2):
        model(x, used_by(rank ^ number)).backward()


def several_backwards(model: Any, x: torch.Tensor, rank: int) -> None:
    losses = [model(x, used_by(rank)), model(x, ALL)]
    for loss in losses:
        loss.backward()


def one_backward_of_two_forwards(model: Any, x: torch.Tensor, rank: int) -> None:
    (model(x, used_by(rank)) + model(x, ALL)).backward()


def a_block_left_out_of_one_forward(model: Any, x: torch.Tensor, rank: int) -> None:
    (model(x, NO_BLOCK if rank == 1 else ALL) + model(x, ALL)).backward()


def an_output_that_one_rank_keeps(model: Any, x: torch.Tensor, rank: int) -> None:
    kept = [model(x, ALL)]  # for a log, say; no backward follows
    if rank == 1:
        kept.clear()
    model(x, ALL).backward()


def a_retained_graph(model: Any, x: torch.Tensor, rank: int) -> None:
    loss = model(x, used_by(rank))
    loss.backward(retain_graph=True)
    (loss + model(x, used_by(1 - rank))).backward()


SCENARIOS: dict[str, Callable[[Any, torch.Tensor, int], None]] = {
    function.__name__: function
    for function in (
        an_expert_without_tokens,
        a_block_left_out,
        accumulation,
        reduced_accumulation,
        several_backwards,
        one_backward_of_two_forwards,
        a_block_left_out_of_one_forward,
        an_output_that_one_rank_keeps,
        a_retained_graph,
    )
}


UNEVEN = "an_expert_without_tokens"
# Those in which every rank uses all units.
USED_ALL = [name for name in SCENARIOS if "block_left_out" not in name]
BOTH = (FLAT, FULLY_SHARD)
Case = tuple[str, str, str, dict[str, Any]]
CASES: list[Case] = [
    *((front_end, "FULL_SHARD", name, {}) for front_end in BOTH for name in USED_ALL),
    (ORIGINAL, "FULL_SHARD", UNEVEN, {}),
    *((front_end, "SHARD_GRAD_OP", UNEVEN, {}) for front_end in BOTH),
    *((front_end, "HYBRID_SHARD", UNEVEN, {}) for front_end in BOTH),
    *((name, "FULL_SHARD", UNEVEN, {"frozen": True}) for name in (FLAT, ORIGINAL, FULLY_SHARD)),
    *((ORIGINAL, name, UNEVEN, {"frozen": True}) for name in ("SHARD_GRAD_OP", "HYBRID_SHARD")),
    (ORIGINAL, "FULL_SHARD", "a_block_left_out", {"frozen": True, "allow_unused_units": True}),
    *((front_end, "FULL_SHARD", UNEVEN, {"recomputes": True}) for front_end in BOTH),
    *((FLAT, "FULL_SHARD", name, {"allow_unused_units": True}) for name in SCENARIOS),
    *(
        (FULLY_SHARD, "FULL_SHARD", name, {option: True})
        for option, names in (("allow_unused_units", [*SCENARIOS]), ("reduces_unused", USED_ALL))
        for name in sample(names, 0, 1, 3, 6)
    ),
]


@pytest.mark.parametrize(("front_end", "strategy", "scenario", "options"), CASES, ids=str)
@on_ranks(1)
def test_ranks_issue_their_collectives_in_one_order(
    emulated_device: str, front_end: str, strategy: str, scenario: str, options: dict[str, Any]
) -> None:
    one, other = sequences(front_end, strategy, scenario, options)
    pairs = [*itertools.zip_longest(one, other)]
    parts_at = next((index for index, pair in enumerate(pairs) if pair[0] != pair[1]), None)
    assert one and parts_at is None, f"at collective {parts_at}: {pairs[parts_at:][:4]}"
