"""Time and memory of checkpoints on real processes: ours beside FSDP1, FSDP2 and plain file calls,
over gloo on CPU.

    torchrun --standalone --nproc-per-node 2 tests/benchmarks/checkpoint.py
    ... checkpoint.py --parameters 2000000 --rounds 9
                                             (fsdp_compat installed, or PYTHONPATH=.)

The model is the transformer of step.py, by default of about 200 million parameters, with the states
of AdamW after a step: 12 bytes per parameter. The contenders:

    plain       file calls alone, of the same bytes from and to memory that is there: each rank a
                file of its own; full: one file of all ranks' bytes, of which each reads its part
    ours        sharded: fsdp_compat.checkpoint; full: FULL_STATE_DICT and optim_state_dict on the
                first rank, offloaded to the CPU, torch.save and torch.load(mmap=True)
    ours, dcp   sharded: torch.distributed.checkpoint
    FSDP1       sharded: the same; full: as ours, but without the offload to the CPU, with which it
                crashes on one
    FSDP2       sharded: the same; full: get_state_dict and set_state_dict with full_state_dict=True

A round makes every call once per contender, one kind of call after the other, in an order that
rotates from round to round. A save ends when its files are on the disk. A load begins with none of
a file in the page cache, and with all values lost; it ends when all of them are in memory, and then
they are compared, outside of the time, with what was saved. A call takes as long as its slowest
rank. Before anything is measured, a small model goes through one round. The columns:

    median, range     seconds of a call
    to plain, ...     call / the other contender's call in the same round: median of the rounds
    peak              the most resident memory during a call above that at its start, of the rank
                      with the most: most of the rounds. Pages of a mapped file count
    of own            peak / the bytes of a rank's own shards and states
    limit             ours only: "met" if it is ahead of FSDP1 and FSDP2, and sharded takes at most
                      1.2 times as long as plain

It needs Linux, five times the bytes of model and states (12 GB) on the disk, and seven times (17
GB) in memory."""

from __future__ import annotations

import argparse
import ctypes
import enum
import functools
import gc
import os
import shutil
import tempfile
import time
import types
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from contenders import FSDP1, FSDP2, OURS, PLAIN, Contender, Wrapping, build
from measuring import Table, Timings, first_rank_alone, gloo_ranks, highest, options, say
from pages import drop_pages, make_durable, memory_nbytes, restart_peak
from step import Block, Transformer, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import fsdp_compat
import fsdp_compat.checkpoint

OURS_DCP = f"{OURS}, dcp"
LIMIT = 1.2  # of sharded calls, to plain
FEWEST_ROUNDS = 3
WARM_UP_PARAMETERS = 500_000
SEQUENCE = 16
PAGE_NBYTES = 4096
FULL_FILE = "full"


class Row(enum.Enum):
    """A kind of call. What a save leaves, the load after it reads."""

    SHARDED_SAVE = "sharded save"
    SHARDED_LOAD = "sharded load"
    FULL_SAVE = "full save"
    FULL_LOAD = "full load"


PAIRS = ((Row.SHARDED_SAVE, Row.SHARDED_LOAD), (Row.FULL_SAVE, Row.FULL_LOAD))

Call = Callable[[Path], object]  # with a folder of its own, the same on all ranks


class Entrant(NamedTuple):
    """A contender in the calls that it takes part in."""

    name: str
    held: Callable[[], list[torch.Tensor]]  # this rank's values now: a load brings them back
    calls: Mapping[Row, Call]
    release: Callable[[], object] = lambda: None  # give back what only a call needs


# Per kind of call and contender, one (seconds, peak bytes) per round: of the rank with the most.
Results = dict[Row, dict[str, list[tuple[float, float]]]]


def main() -> int:
    parser = options(
        __doc__, rounds=FEWEST_ROUNDS, fewest=FEWEST_ROUNDS, check="a limit is not met"
    )
    add = parser.add_argument
    add("--parameters", type=int, default=200_000_000, help="about; the next shape is taken")
    add("--folder", type=Path, help="on the disk to measure; what is made in it is removed")
    arguments = parser.parse_args()
    if arguments.parameters < WARM_UP_PARAMETERS:
        parser.error(f"expected at least {WARM_UP_PARAMETERS} parameters")
    with gloo_ranks():
        missed = run(arguments)
    return int(missed > 0 and arguments.check)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return how many limits are not met. Collective."""
    folder = made_by_first_rank(arguments.folder)
    try:
        measure(enter(WARM_UP_PARAMETERS), 1, folder)
        entrants = enter(arguments.parameters)
        own_nbytes = highest(next(nbytes_of(each.held()) for each in entrants if each.name == OURS))
        ranks = dist.get_world_size()
        say(
            f"{own_nbytes * ranks / 12e6:.1f}M parameters with AdamW, {own_nbytes / 1e6:.0f} MB on "
            f"each of {ranks} ranks, {arguments.rounds} rounds"
        )
        results = measure(entrants, arguments.rounds, folder)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return sum(print_table(row, results[row], own_nbytes) for row in Row)


def made_by_first_rank(parent: Path | None) -> Path:
    """Return a fresh folder that all ranks see. Collective."""
    made = [tempfile.mkdtemp(prefix="checkpoint-", dir=parent) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    assert made[0] is not None
    return Path(made[0])


# -- the contenders


def enter(num_parameters: int) -> list[Entrant]:
    """Return the contenders on models of about so many parameters, each trained for a step.
    Collective."""
    torch.manual_seed(0)  # the same parameters on all ranks
    contenders = build(make_model(num_parameters), Wrapping((Block,)), (OURS, FSDP1, FSDP2))
    trained = {contender.name: train(contender) for contender in contenders}
    held = {name: functools.partial(values_of, of_one[1]) for name, of_one in trained.items()}
    plain = PlainFiles(int(highest(nbytes_of(held[OURS]()))))
    of_fsdp1 = dcp_calls(*trained[FSDP1]) | dict_calls(torch_fsdp, False, *trained[FSDP1])
    of_fsdp2 = dcp_calls(*trained[FSDP2]) | fsdp2_calls(*trained[FSDP2])
    return [
        Entrant(PLAIN, plain.held, plain.calls(), plain.release),
        Entrant(OURS, held[OURS], ours_calls(*trained[OURS])),
        Entrant(OURS_DCP, held[OURS], dcp_calls(*trained[OURS])),
        Entrant(FSDP1, held[FSDP1], of_fsdp1),
        Entrant(FSDP2, held[FSDP2], of_fsdp2),
    ]


def make_model(num_parameters: int) -> Transformer:
    """Return a transformer of about 16 blocks, or of as many as it takes."""
    dim = max(64, round((num_parameters / (16 * 12)) ** 0.5 / 64) * 64)
    vocabulary = 4 * dim
    num_blocks = max(1, round((num_parameters - 2 * vocabulary * dim) / (12 * dim * dim)))
    return Transformer(vocabulary, SEQUENCE, dim, dim // 64, num_blocks)


def train(contender: Contender) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer after a step, with which the optimizer has states.
    Collective."""
    optimizer = torch.optim.AdamW(contender.parameters, lr=1e-4)
    data = torch.randint(
        64, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(1 + dist.get_rank())
    )
    loss_of(contender.model, data).backward()
    optimizer.step()
    optimizer.zero_grad()
    return contender.model, optimizer


def values_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return this rank's parts of the parameters, and their states, in the same order every
    time."""
    found: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            states = optimizer.state[parameter]
            values = [
                local(value) for value in (parameter, *(states[name] for name in sorted(states)))
            ]
            if values[0].numel():  # of what this rank has nothing, states tell nothing
                found += values
    return found


def local(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


class PlainFiles:
    """As many bytes as a rank has, the same on all ranks, in and out of files without anything
    else."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._values = torch.empty(0, dtype=torch.uint8)

    def held(self) -> list[torch.Tensor]:
        if not self._values.numel():
            self._values = torch.arange(1, 1 + -(-self._nbytes // 8)).view(torch.uint8)[
                : self._nbytes
            ]
        return [self._values]

    def release(self) -> None:
        self._values = torch.empty(0, dtype=torch.uint8)

    def calls(self) -> dict[Row, Call]:
        rank = dist.get_rank()
        return {
            Row.SHARDED_SAVE: lambda folder: self._write(folder / f"{rank}", 1),
            Row.SHARDED_LOAD: lambda folder: self._read(folder / f"{rank}", 0),
            Row.FULL_SAVE: lambda folder: (
                None if rank else self._write(folder / FULL_FILE, dist.get_world_size())
            ),
            Row.FULL_LOAD: lambda folder: self._read(folder / FULL_FILE, rank * self._nbytes),
        }

    def _write(self, path: Path, times: int) -> None:
        with path.open("xb") as file:
            for _ in range(times):
                file.write(memory_of(self._values))
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path, start: int) -> None:
        with path.open("rb") as file:
            file.seek(start)
            assert file.readinto(memory_of(self._values)) == self._nbytes


def ours_calls(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Row, Call]:
    def save(folder: Path) -> None:
        fsdp_compat.checkpoint.save(folder, model, optimizer, step=1)

    def load(folder: Path) -> None:
        path = fsdp_compat.checkpoint.latest(folder)
        assert path is not None
        fsdp_compat.checkpoint.load(path, model, optimizer)

    return {Row.SHARDED_SAVE: save, Row.SHARDED_LOAD: load} | dict_calls(
        fsdp_compat, True, model, optimizer
    )


def dcp_calls(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Row, Call]:
    def save(folder: Path) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

    def load(folder: Path) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )

    return {Row.SHARDED_SAVE: save, Row.SHARDED_LOAD: load}


def dict_calls(
    api: types.ModuleType, offload_to_cpu: bool, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[Row, Call]:
    """Full state dicts as FSDP1 gives them. api: the package to take it from."""
    fsdp, full = api.FullyShardedDataParallel, api.StateDictType.FULL_STATE_DICT
    configs = [
        config(offload_to_cpu=offload_to_cpu, rank0_only=True)
        for config in (api.FullStateDictConfig, api.FullOptimStateDictConfig)
    ]

    def save(folder: Path) -> None:
        with fsdp.state_dict_type(model, full, *configs):
            write_on_first_rank(folder, model.state_dict(), fsdp.optim_state_dict(model, optimizer))

    def load(folder: Path) -> None:
        saved = torch.load(folder / FULL_FILE, mmap=True)
        with fsdp.state_dict_type(model, full):
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(
                fsdp.optim_state_dict_to_load(model, optimizer, saved["optimizer"])
            )

    return {Row.FULL_SAVE: save, Row.FULL_LOAD: load}


def fsdp2_calls(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Row, Call]:
    """Full state dicts of DTensors, by torch's functions."""

    def save(folder: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        write_on_first_rank(folder, *get_state_dict(model, optimizer, options=options))

    def load(folder: Path) -> None:
        saved = torch.load(folder / FULL_FILE, mmap=True)
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=options,
        )

    return {Row.FULL_SAVE: save, Row.FULL_LOAD: load}


def write_on_first_rank(folder: Path, model_state: object, optimizer_state: object) -> None:
    if dist.get_rank() == 0:
        torch.save({"model": model_state, "optimizer": optimizer_state}, folder / FULL_FILE)
        make_durable(folder / FULL_FILE)


# -- measuring


def measure(entrants: Sequence[Entrant], rounds: int, folder: Path) -> Results:
    """Make every call ``rounds`` times. Collective. Raises RuntimeError for a load that did not
    bring back what was saved."""
    digests = {}
    for entrant in entrants:
        digests[entrant.name] = digest(entrant.held())
        entrant.release()
    results: Results = {row: {} for row in Row}
    for number in range(rounds):
        first = number % len(entrants)
        order = [*entrants[first:], *entrants[:first]]
        for save, load in PAIRS:
            in_both = [entrant for entrant in order if save in entrant.calls]
            for entrant in in_both:
                own = folder / entrant.name
                first_rank_alone(own.mkdir)
                entrant.held()
                first_rank_alone(os.sync)  # no earlier call's bytes are on their way
                timed(entrant, save, own, results)
                entrant.release()
                first_rank_alone(
                    functools.partial(drop_pages, own)
                )  # the next save finds memory free
            for entrant in in_both:
                own = folder / entrant.name
                for value in entrant.held():
                    value.zero_()
                first_rank_alone(functools.partial(drop_pages, own))
                timed(entrant, load, own, results)
                if digest(entrant.held()) != digests[entrant.name]:
                    which = f"{load.value}, {entrant.name}: rank {dist.get_rank()}"
                    raise RuntimeError(f"{which} has other values than it saved")
                entrant.release()
                first_rank_alone(functools.partial(shutil.rmtree, own))
    return results


def timed(entrant: Entrant, row: Row, folder: Path, results: Results) -> None:
    """Make one call on all ranks at the same time, and note it. Collective."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # a call would use what is free, and show no memory
    dist.barrier()
    resident = restart_peak()
    start = time.perf_counter()
    entrant.calls[row](folder)
    if row in (Row.SHARDED_LOAD, Row.FULL_LOAD):  # bring in what is only mapped so far
        for value in entrant.held():
            value.reshape(-1)[:: PAGE_NBYTES // value.itemsize].sum()
    seconds, peak = time.perf_counter() - start, memory_nbytes() - resident
    results[row].setdefault(entrant.name, []).append((highest(seconds), highest(peak)))


def digest(values: Iterable[torch.Tensor]) -> int:
    return functools.reduce(lambda found, value: zlib.crc32(memory_of(value), found), values, 0)


def nbytes_of(values: Iterable[torch.Tensor]) -> int:
    return sum(value.nbytes for value in values)


def memory_of(value: torch.Tensor) -> memoryview:
    return memoryview(value.reshape(-1).view(torch.uint8).numpy())


# -- the tables


def print_table(row: Row, results: dict[str, list[tuple[float, float]]], own_nbytes: float) -> int:
    """Print one kind of call; return how many limits are not met."""
    timings = Timings({name: [seconds for seconds, _ in found] for name, found in results.items()})
    others, missed = (PLAIN, FSDP1, FSDP2), 0
    columns = {"median": "7.2f s", "range": "16", **{f"to {other}": "9.3f" for other in others}}
    table = Table(columns | {"peak": "7.0f MB", "of own": "7.2f"}, width=12)
    say("")
    table.head(row.value)
    for name, seconds in timings.seconds.items():
        ratios = {other: timings.ratio(name, other) for other in others if other != name}
        verdict = ""
        if name == OURS:
            is_ahead = ratios[FSDP1] < 1 and ratios[FSDP2] < 1
            is_met = is_ahead and (row not in PAIRS[0] or ratios[PLAIN] <= LIMIT)
            verdict = "met" if is_met else "NOT MET"
            missed += not is_met
        times = [timings.median(name), f"{min(seconds):.2f} to {max(seconds):.2f} s"]
        peak = max(found for _, found in results[name])
        cells = [*times, *map(ratios.get, others), peak / 1e6, peak / own_nbytes]
        table.row(name, cells, verdict)
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
