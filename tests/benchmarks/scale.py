"""Start-up and scale by simulation: the transformer of step.py with 407 billion parameters at 64,
1,024 and 16,384 ranks, one rank at a time.

    python tests/benchmarks/scale.py            (fsdp_compat installed, or PYTHONPATH=.)

Each case is one rank on a fake process group, in a process of its own. In the cases "meta", the
code is that of a run, and only tensors have no memory. In the cases "shards" this rank's shards are
there, on the CPU, in fp32; whole parameters are not (a stride of 0 stands for them).

Construction, of ours and of FSDP2 (fully_shard, which shards meta parameters too; torch's FSDP1 can
construct nothing on meta):

    seconds      around the constructor; the model was built before
    host MB      growth of the process's peak memory over what it was before, all of it
    tensors MB   bytes of tensors on the host that live afterwards
    shard MB     what this rank holds of the parameters in fp32
    limit        ours only: at most 60 s and 2 GB

Plans, of ours:

    save, MB     seconds for the native checkpoint's manifest with AdamW's states: made, written as
                 text of so many MB, read back
    load, runs   seconds to plan what this rank reads of a checkpoint saved by half as many, and by
                 twice as many ranks; how many contiguous reads that is

Steps, of ours: what one step costs per unit (forward, backward, gradients dropped), in numbers that
do not vary:

    collectives  gathers and reductions
    calls        of this package's functions
    C calls      of functions written in C, by this package
    operators    that reach torch's dispatcher, with those of the model
    host ms      of the step, per unit: a time, for orientation

"grows" compares counts of steps with those of the smallest world size. One call more is no growth:
where the ranks do not divide a unit, its padding is zeroed."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contenders import FSDP2, OURS
from measuring import Table, fake_ranks, options
from pages import memory_nbytes, restart_peak
from step import Block, Transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compat
from fsdp_compat import FullyShardedDataParallel
from fsdp_compat._engine.group import Group
from fsdp_compat._engine.state_store import store_of
from fsdp_compat._layout.spec import flat_layout, runs_of_part
from fsdp_compat._state.units import units_of
from fsdp_compat._stores.flat_store import ALIGN_NBYTES
from fsdp_compat.checkpoint._blocks import BLOCK_NBYTES, FileFacts
from fsdp_compat.checkpoint._manifest import MANIFEST, Manifest, read_manifest, versions
from fsdp_compat.checkpoint._named_groups import named_groups
from fsdp_compat.wrap import ModuleWrapPolicy

LIMIT_S, LIMIT_BYTES = 60.0, 2e9
WORLD_SIZES = (64, 1024, 16384)
ENTRIES = 3  # entries of a checkpoint per element: the parameter, and AdamW's two
# of the model of step.py
VOCABULARY, SEQUENCE, DIM, HEADS, LAYERS = 128256, 16, 16384, 128, 125
# blocks: a shard of 4 has 1 GB at 64 ranks; every block takes the same steps
SHARD_LAYERS, STEP_LAYERS = 4, 6
FSDP2_LAYERS = 6  # its time grows with the ranks: all of them take minutes at 16,384


def build(layers: int) -> Transformer:
    with torch.device("meta"):
        return Transformer(VOCABULARY, SEQUENCE, DIM, HEADS, layers)


def without_memory(module: nn.Module) -> None:
    """As param_init_fn: parameters of the right shapes whose elements are all one."""
    for name, parameter in module.named_parameters(recurse=False):
        zero = torch.zeros((), dtype=parameter.dtype)
        setattr(module, name, nn.Parameter(zero.expand(parameter.shape)))


# -- one case, in a process of its own


@dataclasses.dataclass(frozen=True)
class Case:
    """One rank of a simulated job."""

    contender: str
    world_size: int
    rank: int
    use_orig_params: bool
    shards: bool  # on the CPU, with values
    layers: int
    steps: bool = False


def run_case(case: Case) -> dict[str, Any]:
    """Return what is measured, by name."""
    with fake_ranks(case.world_size, case.rank):
        return measured(case)


def measured(case: Case) -> dict[str, Any]:
    model: Any = build(case.layers)
    numel = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh("cpu", (case.world_size,))
    gc.collect()
    before, start = restart_peak(), time.perf_counter()
    if case.contender == FSDP2:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = ours(model, case)
    seconds = time.perf_counter() - start
    found = {"numel": numel, "seconds": seconds, "host": memory_nbytes() - before}
    found["tensors"] = tensor_nbytes_on_host()
    if case.contender == FSDP2:
        shards = (p.to_local() for p in model.parameters())
        return found | {"shard": sum(p.numel() * p.element_size() for p in shards)}
    groups = model._runtime.groups
    found["shard"] = sum(store_of(group).shard.nbytes for group in groups)
    if not case.shards:
        found |= plans(model, case.world_size)
    if case.steps:
        found |= steps(model, groups, case.layers + 1)
    return found


def ours(model: nn.Module, case: Case) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu" if case.shards else "meta"),
        param_init_fn=without_memory if case.shards else None,
        use_orig_params=case.use_orig_params,
    )


def plans(model: nn.Module, world_size: int) -> dict[str, Any]:
    """Plan a save by this many ranks, and loads by it of what half and twice as many have saved."""
    groups = named_groups(units_of(model))
    start = time.perf_counter()
    described = tuple(named.described(0) for named in groups)
    nbytes = ENTRIES * sum(store_of(named.group).shard.nbytes for named in groups)
    facts = FileFacts(nbytes, (0xFFFFFFFF,) * -(-nbytes // BLOCK_NBYTES))
    ranks = tuple(range(world_size))
    manifest = Manifest("0" * 32, 0, 0, (ranks,), described, (facts,) * world_size, [], versions())
    text = manifest.as_text()
    folder = Path(sys.argv[-1])
    (folder / MANIFEST).write_text(text)
    read_manifest(folder)
    saved, runs = time.perf_counter() - start, []
    start = time.perf_counter()
    for others in (world_size // 2, world_size * 2):
        runs.append(0)
        for named in groups:
            store = store_of(named.group)
            layout = store.layout
            shapes = [param.shape for param in layout.params]
            other = flat_layout(
                layout.names, shapes, ranks=others, align=ALIGN_NBYTES // store.dtype.itemsize
            )
            for index in range(len(shapes)):
                runs[-1] += sum(
                    1 for _ in runs_of_part(other, index, layout.part(index, store.rank))
                )
    return {"save": saved, "manifest": len(text), "load": time.perf_counter() - start, "runs": runs}


class Operators(TorchDispatchMode):
    """How many operators reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def steps(model: FullyShardedDataParallel, groups: list[Group], num_units: int) -> dict[str, Any]:
    """Count what one step does. Orders are recorded and hooks registered in the first ones, which
    do not count."""
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.long, device="meta")
    parameters = list(model.parameters())

    def step() -> None:
        model(tokens).sum().backward()
        for parameter in parameters:
            parameter.grad = None

    for _ in range(2):
        step()
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    traffic = groups[0].shard.traffic
    traffic.clear()
    with Operators() as operators:
        step()
    collectives = sum(traffic.counts.values())
    calls = counted_calls(step)
    gc.enable()
    per_unit = {
        "calls": calls["call"],
        "C calls": calls["c_call"],
        "collectives": collectives,
        "operators": operators.number,
    }
    return {
        "step": seconds / num_units,
        "per unit": {name: number / num_units for name, number in per_unit.items()},
    }


def counted_calls(function: Callable[[], object]) -> dict[str, int]:
    """Return how many functions of the package were called ("call"), and how often it called C
    functions ("c_call")."""
    counts, package = {"call": 0, "c_call": 0}, str(Path(fsdp_compat.__file__).parent)

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts and frame.f_code.co_filename.startswith(package):
            counts[event] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts


def tensor_nbytes_on_host() -> int:
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = getattr(thing, "_local_tensor", thing).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


# -- all of them


def main() -> int:
    arguments = parse_arguments()
    if arguments.case is not None:
        print(json.dumps(run_case(Case(**json.loads(arguments.case)))))
        return 0
    sizes = arguments.world_sizes or list(WORLD_SIZES)
    constructed, stepped = cases(sizes, arguments.layers)
    missed = construct(constructed) + count_steps(stepped)
    return 1 if missed and arguments.check else 0


WHICH = {"ranks": "6", "rank": "6"}


def construct(cases: list[Case]) -> int:
    """Print the tables of constructions and plans; return how many limits are not met."""
    missed = 0
    found: dict[Case, dict[str, Any]] = {}
    mega = {"host MB": "8.1f", "tensors MB": "11.3f", "shard MB": "9.1f"}
    table = Table(WHICH | {"seconds": "8.2f"} | mega, width=26)
    table.head("construction")
    for case in cases:
        result = found[case] = in_child(case)
        within = result["seconds"] <= LIMIT_S and result["host"] <= LIMIT_BYTES
        verdict = "" if case.contender == FSDP2 else "met" if within else "NOT MET"
        missed += verdict == "NOT MET"
        sizes = [result[name] / 1e6 for name in ("host", "tensors", "shard")]
        cells = [case.world_size, case.rank, result["seconds"], *sizes]
        table.row(title(case), cells, verdict)
    print()
    table = Table(WHICH | {"save": "7.2f", "MB": "8.1f", "load": "7.3f"}, width=26)
    table.head("plans", last="runs")
    for case, result in found.items():
        if "runs" in result:
            sizes = [result["save"], result["manifest"] / 1e6, result["load"]]
            half, twice = result["runs"]
            table.row(title(case), [case.world_size, case.rank, *sizes], f"{half} and {twice}")
    return missed


def count_steps(cases: list[Case]) -> int:
    """Print the table of steps; return how many counts grow with the world size."""
    missed = 0
    smallest: dict[tuple[bool, str], dict[str, float]] = {}
    counts = {"collectives": "12.3f", "calls": "8.1f", "C calls": "8.1f", "operators": "10.2f"}
    table = Table(WHICH | counts | {"host ms": "8.2f"}, width=26)
    print()
    table.head("steps, per unit", last="grows")
    for case in cases:
        result = in_child(case)
        number = result["per unit"]
        first = smallest.setdefault(place(case), number)
        grows = any(number[name] > first[name] + 1 for name in number)
        missed += grows
        found = [*(number[name] for name in counts), result["step"] * 1e3]
        table.row(title(case), [case.world_size, case.rank, *found], "YES" if grows else "no")
    return missed


def title(case: Case) -> str:
    layers = "" if case.layers == LAYERS else f", {case.layers} blocks"
    if case.contender == FSDP2:
        return FSDP2 + layers
    original = ", original" if case.use_orig_params else ""
    return f"{'shards' if case.shards else 'meta'}{original}{layers}"


def place(case: Case) -> tuple[bool, str]:
    """What cases at several world sizes have in common."""
    return case.use_orig_params, {0: "first", case.world_size - 1: "last"}.get(case.rank, "between")


def cases(world_sizes: list[int], layers: int) -> tuple[list[Case], list[Case]]:
    """Return what is constructed, and what takes steps."""
    ours = functools.partial(Case, OURS, shards=False, layers=layers)
    built, largest = [], max(world_sizes)
    for ranks in world_sizes:
        for original in (False, True):
            built += [ours(ranks, rank, original) for rank in (0, ranks // 2, ranks - 1)]
        built.append(Case(FSDP2, ranks, 0, False, False, min(layers, FSDP2_LAYERS)))
    # Where a host has room for this rank's shards of all blocks, and of a few.
    built += [ours(largest, rank, True, shards=True) for rank in (0, largest - 1)]
    built += [
        ours(ranks, 0, False, shards=True, layers=min(layers, SHARD_LAYERS))
        for ranks in world_sizes
    ]
    stepped = [
        ours(ranks, rank, original, layers=min(layers, STEP_LAYERS), steps=True)
        for ranks in world_sizes
        for original in (False, True)
        for rank in (0, ranks // 2, ranks - 1)
    ]
    return built, stepped


def in_child(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--case", json.dumps(dataclasses.asdict(case)), folder]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return result


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, check="a limit is not met or a count depends on the ranks")
    add = parser.add_argument
    add("--world-sizes", type=int, nargs="+")
    add("--layers", type=int, default=LAYERS)
    add("--case", help=argparse.SUPPRESS)
    add("folder", nargs="?", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
