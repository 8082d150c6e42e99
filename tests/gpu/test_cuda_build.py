"""Training with NCCL on several devices of the CUDA build of torch: losses, races, waits of the
host, next to torch's FSDP1 and FSDP2."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler

import fsdp_compat
from fsdp_compat import MixedPrecision
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from tests.support import fakecuda
from tests.support.devices import NCCL, on_nccl, own_device
from tests.support.fully_sharded import NotedAllGather, NotedReduceScatter
from tests.support.models import NUM_TOKENS, Transformer
from tests.support.parity import no_sync, seeded
from tests.support.ranks import close_pool, run_ranks
from tests.support.time_limit import limit_s
from tests.support.twin import FLAT, FULLY_SHARD, ORIGINAL, sharded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not fakecuda.is_used(), reason=fakecuda.WHY)]

Layer = nn.TransformerEncoderLayer
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUM_STEPS, WARM_UP = 4, 2
FLAT_FORMS = (FLAT, ORIGINAL)


@dataclasses.dataclass(frozen=True)
class Case:
    front_end: str = ORIGINAL
    strategy: str = "FULL_SHARD"
    precision: MixedPrecision | None = None
    offload: bool = False
    fused: bool = False
    max_norm: float | None = None
    scales: bool = False
    autocast: bool = False
    backwards: int = 1  # all but the last without communication
    recomputes: bool = False
    moves: bool = False  # the module is on the CPU and, on rank 1, zero before it is wrapped
    compiles: bool = False
    streams: bool = False  # each step on another stream
    eager: bool = False  # NCCL is initialised with the group
    keeps_grads: bool = False  # zero_grad(set_to_none=False)
    freezes: bool = False  # the attention of each layer
    rows: bool = False  # shards are cut between rows

    def __str__(self) -> str:
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = [f"{f.name}={value}" for f, value in values.items() if value != f.default]
        return " ".join(changed)


@dataclasses.dataclass(frozen=True)
class Trained:
    losses: list[float]  # of this rank
    host_waits: int  # of all steps after WARM_UP
    races: list[str]


def data_of(case: Case, ranks: int) -> torch.Tensor:
    """Return the tokens of all [steps, backwards, ranks], of which each has 3 rows of 5."""
    shape = (NUM_STEPS, case.backwards, ranks, 3, 5)
    return torch.randint(NUM_TOKENS, shape, generator=torch.Generator().manual_seed(1))


def built(case: Case) -> nn.Module:
    model = seeded(Transformer)
    for child in model.modules() if case.freezes else ():
        if isinstance(child, nn.MultiheadAttention):
            child.requires_grad_(False)
    return model


def loss_of(model: nn.Module, tokens: torch.Tensor, case: Case) -> torch.Tensor:
    out = model(tokens).float().flatten(0, 1)
    return nn.functional.cross_entropy(out, tokens.roll(1, -1).flatten()) / case.backwards


def adamw(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, fused=case.fused, foreach=not case.fused)


def unsharded_losses(case: Case, ranks: int) -> list[float]:
    """Return the losses of the unsharded model on the CPU, in full precision."""
    model, losses = built(case), []
    optimizer = adamw(case, model)
    for step in data_of(case, ranks):
        of_backwards = [loss_of(model, tokens.flatten(0, 1), case) for tokens in step]
        for loss in of_backwards:
            loss.backward()
        if case.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in of_backwards))
    return losses


def wrapped(case: Case, library: Any, device: torch.device) -> Any:
    model = built(case)
    if case.moves and dist.get_rank():
        nn.utils.vector_to_parameters(torch.zeros(10_000), model.parameters())
    if not case.moves and not case.offload:
        model.to(device)
    if case.recomputes:
        apply_activation_checkpointing(model, check_fn=lambda child: isinstance(child, Layer))
    options: dict[str, Any] = {"sync_module_states": True} if case.moves else {}
    if case.rows and library is not torch_fsdp:
        options["shard_blocks"] = lambda name, p: math.prod(p.shape[1:])
    model = sharded(
        model,
        case.front_end,
        case.strategy,
        units=(Layer,),
        device_id=device,
        offload=case.offload,
        mixed_precision=case.precision,
        library=library,
        **options,
    )
    return torch.compile(model, backend="eager") if case.compiles else model


def scaler_of(case: Case, library: Any) -> Any:
    if case.front_end not in FLAT_FORMS:
        return torch.amp.GradScaler("cuda", init_scale=256)
    return (TorchScaler if library is torch_fsdp else ShardedGradScaler)(init_scale=256)


@contextlib.contextmanager
def stream_of_step(case: Case, streams: list[torch.cuda.Stream], step: int) -> Iterator[None]:
    if not case.streams:
        yield
        return
    stream = streams[step % 2]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def train(case: Case, library: Any, recorded: bool = False) -> Trained:
    """Collective."""
    device = own_device()
    model = wrapped(case, library, device)
    optimizer = adamw(case, model)
    scaler = scaler_of(case, library) if case.scales else None
    data = data_of(case, dist.get_world_size())[:, :, dist.get_rank()].contiguous().pin_memory()
    streams = [torch.cuda.Stream() for _ in range(2)]
    losses = []
    with fakecuda.watching() if recorded else contextlib.nullcontext() as recording:
        for step in range(NUM_STEPS):
            if step == WARM_UP:
                fakecuda.reset_counts()
            total = torch.zeros((), device=device)
            with stream_of_step(case, streams, step):
                for number in range(1, case.backwards + 1):
                    tokens = data[step, number - 1].to(device, non_blocking=True)
                    quiet = no_sync(model) if number < case.backwards else contextlib.nullcontext()
                    with quiet:
                        with torch.autocast("cuda", FP16, enabled=case.autocast):
                            loss = loss_of(model, tokens, case)
                        (scaler.scale(loss) if scaler else loss).backward()
                    total += loss.detach()
                if scaler:
                    scaler.unscale_(optimizer)
                if case.max_norm is not None and case.front_end in FLAT_FORMS:
                    model.clip_grad_norm_(case.max_norm)
                elif case.max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
                scaler.step(optimizer) if scaler else optimizer.step()
                if scaler:
                    scaler.update()
                optimizer.zero_grad(set_to_none=not case.keeps_grads)
            losses.append(total)
        host_waits = fakecuda.host_waits(fakecuda.counts())
    races = [str(race) for race in recording.unordered()] if recording else []
    return Trained([loss.item() for loss in losses], host_waits, races)


@contextlib.contextmanager
def eagerly(case: Case, path: str) -> Iterator[None]:
    if case.eager:
        device, ranks = own_device(), dist.get_world_size()
        dist.destroy_process_group()
        dist.init_process_group(
            *(NCCL, f"file://{path}"),
            world_size=ranks,
            rank=device.index,
            device_id=device,
        )
    yield


def check(case: Case, path: str) -> tuple[int, int]:
    """Train with ours and with torch's, and compare. Return how often the host waited in the steps
    after WARM_UP, with ours and with the better of torch's. Collective."""
    with eagerly(case, path):
        ours = train(case, fsdp_compat, recorded=True)
        theirs = train(case, torch_fsdp)
        flat = case.front_end in FLAT_FORMS
        other = dataclasses.replace(case, front_end=FULLY_SHARD if flat else ORIGINAL)
        fewest = theirs.host_waits
        if not case.moves and not case.compiles:
            fewest = min(fewest, train(other, torch_fsdp).host_waits)
        averages = torch.tensor(ours.losses)
        dist.all_reduce(averages)
    assert ours.races == []
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    tolerance = 0.02 if case.precision or case.autocast else 1e-5
    expected = unsharded_losses(case, dist.get_world_size())
    assert averages.div(dist.get_world_size()).tolist() == pytest.approx(expected, rel=tolerance)
    return ours.host_waits, fewest


EVERY_STRATEGY = [
    (front_end, strategy)
    for front_end in (FLAT, ORIGINAL, FULLY_SHARD)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
]
BOTH = (ORIGINAL, FULLY_SHARD)
LOW = [MixedPrecision(BF16, BF16), MixedPrecision(BF16, FP32), MixedPrecision(FP16, FP16)]
OPTIONS: list[dict[str, Any]] = [
    *({"precision": low} for low in LOW[:2]),
    {"precision": LOW[1], "max_norm": 0.5, "recomputes": True},
    {"precision": LOW[2], "max_norm": 0.5, "scales": True},
    {"offload": True, "fused": True},
    {"offload": True, "precision": LOW[1], "max_norm": 0.5},
    {"offload": True, "backwards": 2, "strategy": "SHARD_GRAD_OP"},
    {"max_norm": 0.5},
    {"backwards": 2, "recomputes": True},
    {"autocast": True, "scales": True},
    {"compiles": True},
    {"streams": True, "precision": LOW[1]},
    {"streams": True, "offload": True, "max_norm": 0.5},
    {"eager": True},
    {"keeps_grads": True},
]
CASES = [
    *(Case(front_end, strategy) for front_end, strategy in EVERY_STRATEGY),
    *(Case(front_end, **options) for front_end in BOTH for options in OPTIONS),
    Case(moves=True),
    *(Case(strategy=strategy, freezes=True) for strategy in ("FULL_SHARD", "HYBRID_SHARD")),
    Case(strategy="SHARD_GRAD_OP", freezes=True, precision=LOW[1]),
    Case(freezes=True, recomputes=True, backwards=2),
    Case(rows=True, precision=LOW[1], max_norm=0.5),
    Case(rows=True, offload=True, backwards=2),
]
# The host waits once more per step than with the better of torch's: for the copies of a unit whose
# gradients it adds to those of an earlier backward.
WAITS_MORE = Case(ORIGINAL, "SHARD_GRAD_OP", offload=True, backwards=2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training(case: Case, tmp_path: Path) -> None:
    ranks = 4 if case.strategy == "HYBRID_SHARD" else 2
    waits, fewest = run_ranks(ranks, check, case, str(tmp_path / "store"), backend=NCCL)[0]
    assert waits <= fewest or (case == WAITS_MORE and waits == fewest + NUM_STEPS - WARM_UP)


def races(act: Callable[[], object]) -> list[str]:
    with fakecuda.watching() as recording:
        act()
    return [str(race) for race in recording.unordered()]


@on_nccl(2)
def test_planted_races_of_streams_are_found() -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def made_on_the_side(waits: bool, names_reader: bool) -> None:
        with torch.cuda.stream(side):
            y = torch.ones(1000, device="cuda")
        if waits:
            main.wait_stream(side)
        y + 1
        if names_reader:
            y.record_stream(main)
        del y
        with torch.cuda.stream(side):
            torch.zeros(1000, device="cuda")

    torch.cuda.synchronize()
    assert races(lambda: made_on_the_side(True, True)) == []
    assert len(races(lambda: made_on_the_side(False, True))) == 1
    torch.cuda.synchronize()
    (reused,) = races(lambda: made_on_the_side(True, False))
    assert "freed" in reused


@on_nccl(2)
def test_planted_races_of_collectives_and_copies_are_found() -> None:
    x, host = torch.ones(1000, device="cuda"), torch.ones(1000).pin_memory()
    dist.all_reduce(x)

    def reduce(waits_first: bool) -> None:
        work = dist.all_reduce(x, async_op=True)
        if waits_first:
            work.wait()
        x + 1
        work.wait()

    def copy() -> None:
        x.copy_(host, non_blocking=True)
        host.zero_()
        host.copy_(x, non_blocking=True)
        host.sum()

    assert len(races(lambda: reduce(False))) == 1 and races(lambda: reduce(True)) == []
    later = [race.rpartition("aten::")[2].split()[0] for race in races(copy)]
    assert later == ["zero_", "sum"]


class NotedPriority:
    """Collectives of the user that note the priority of the stream that they run on."""

    def __init__(self) -> None:
        super().__init__()
        self.priorities: set[int] = set()

    def __call__(self, **arguments: Any) -> Any:
        self.priorities.add(torch.cuda.current_stream().priority)
        return super().__call__(**arguments)  # type: ignore[misc]


class Gather(NotedPriority, NotedAllGather):
    pass


class Reduce(NotedPriority, NotedReduceScatter):
    pass


@on_nccl(2)
def test_copies_beside_computation_have_priority() -> None:
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(own_device())
    gather, reduce = Gather(), Reduce()
    for unit in model:
        fsdp_compat.fully_shard(unit)
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
    fsdp_compat.fully_shard(model)(torch.ones(2, 8, device=own_device())).sum().backward()
    for noted in (gather, reduce):
        assert min(noted.priorities) < torch.cuda.Stream().priority


@pytest.fixture
def own_processes() -> Iterator[None]:  # torch's checker cannot be switched off again
    close_pool()
    yield
    close_pool()


@pytest.mark.usefixtures("own_processes")
@on_nccl(2)
def test_the_sanitizer_of_torch_is_silent() -> None:
    from torch.cuda import _sanitizer  # its hooks stay for as long as the process

    _sanitizer.enable_cuda_sanitizer()
    for front_end in (ORIGINAL, FULLY_SHARD):
        for options in ({"precision": LOW[1], "max_norm": 0.5}, {"offload": True, "backwards": 2}):
            train(Case(front_end, **options), fsdp_compat)


HANGS = {"FAKECUDA_NCCL_HANGS": "0.1"}


@pytest.mark.parametrize("crossed", [False, True])
@on_nccl(2, environment=HANGS)
def test_different_collectives_hang_until_an_abort(crossed: bool) -> None:
    rank, x = dist.get_rank(), torch.ones(4, device=own_device())
    groups = [dist.new_group(backend="nccl") for _ in range(2)]
    for group in groups:
        dist.barrier(group)  # makes the communicator
    if crossed:  # each group's calls are the same
        for group in groups[:: -1 if rank else 1]:
            (work := dist.all_reduce(x, group=group, async_op=True)).wait()
    else:
        work = dist.broadcast(x, 0, async_op=True) if rank else dist.all_reduce(x, async_op=True)
        work.wait()
    event, side, unrelated = torch.cuda.Event(), torch.cuda.Stream(), torch.cuda.Stream()
    event.record()
    side.wait_event(event)
    assert not work.is_completed() and not event.query() and not side.query() and unrelated.query()
    items: list[float] = []
    waiting = threading.Thread(target=lambda: items.append(x[0].item()))
    waiting.start()
    waiting.join(0.3)
    assert items == []
    dist.distributed_c10d._abort_process_group()
    waiting.join(limit_s(10))
    assert len(items) == 1 and event.query()


@on_nccl(2, environment=HANGS)
def test_a_late_rank_ends_the_waits() -> None:
    device, rank = own_device(), dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    x, gathered = torch.full((4,), rank + 1.0, device=device), torch.zeros(8, device=device)
    dist.all_reduce(torch.zeros_like(x))  # makes the communicator
    torch.cuda.synchronize()
    if rank:
        store.wait(["rank 0 waits"])
    dist.all_gather_single(gathered, x)
    dist.all_reduce(x)
    if not rank:
        x.zero_()  # runs ahead
        assert not torch.cuda.current_stream().query()
        store.set("rank 0 waits", "")
    assert gathered[4].item() == 2.0 and torch.cuda.current_stream().query()
    assert (gathered.tolist(), x.tolist()) == ([1.0] * 4 + [2.0] * 4, [3.0] * 4)


def losses_of(case: Case) -> list[float]:
    return train(case, fsdp_compat).losses


def test_training_is_the_same_where_ranks_may_hang() -> None:
    usual = run_ranks(2, losses_of, Case(), backend=NCCL)
    may_hang = {"FAKECUDA_NCCL_HANGS": "60"}
    assert run_ranks(2, losses_of, Case(), backend=NCCL, environment=may_hang) == usual
