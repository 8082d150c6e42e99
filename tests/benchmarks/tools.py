"""Time and memory of merging checkpoints to one file: checkpoint.files.convert beside torch's own
converters, Accelerate's, and a plain copy of the same bytes. One process, no GPU.

    PYTHONPATH=. python tests/benchmarks/tools.py
    PYTHONPATH=. python tests/benchmarks/tools.py --nbytes 4000000000 --rounds 3 --folder /data

Two ranks write a model of DTensors, as FSDP2 has them, in three formats:
torch.distributed.checkpoint, torch's Hugging Face storage (one safetensors file per rank), and a
torch.save file per rank. Then, for each merge, the contenders that can do it:

    copy          shutil.copyfile of the source's files, one after the other: the same bytes
    ours          checkpoint.files.convert with its defaults: 256 MB of values, one thread
    torch         dcp_to_torch_save, or consolidate_safetensors_files with one thread
    accelerate    merge_fsdp_weights, which is `accelerate merge-weights`; if it is installed

Each call is made in a process of its own, with none of the source in the page cache, and ends when
its result is on the disk: fsync is part of it. Contenders take turns, in an order that changes from
round to round. In the first round every result is compared with its source, value by value. The
columns:

    seconds       the fastest of all rounds, without starting Python and importing
    to copy       seconds / those of the copy
    peak          the most resident memory of the process (VmHWM), imports included
    beyond        peak above that before the call
    limit         ours only: "met" if it takes at most twice as long as the copy, and less time and
                  less memory than every other converter

It needs Linux, and five times the bytes on the disk; torch's converters also need them in
memory."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from pages import drop_pages, make_durable, memory_nbytes, restart_peak

ROOT = Path(__file__).resolve().parents[2]
COPY, OURS, TORCH, ACCELERATE = "copy", "ours", "torch", "accelerate"
NUM_RANKS = 2
LIMIT = 2.0  # of ours, to the copy
COLUMNS = 2048  # of every tensor
NUM_TENSORS = 32


class Merge(NamedTuple):
    """One kind of call: a source, the name of the result, and who can do it."""

    title: str
    source: str
    target: str
    contenders: tuple[str, ...]


MERGES = (
    Merge("dcp to one .pt", "dcp", "model.pt", (COPY, OURS, TORCH)),
    Merge("dcp to one .safetensors", "dcp", "model.safetensors", (COPY, OURS, ACCELERATE)),
    Merge("rank files to one .safetensors", "ranks", "model.safetensors", (COPY, OURS)),
    Merge("Hugging Face shards to one", "shards", "model.safetensors", (COPY, OURS, TORCH)),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nbytes", type=int, default=1_000_000_000, help="of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="an existing one on the disk to measure")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a limit is not met")
    parser.add_argument("--call", nargs=3, help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.nbytes < 1_000_000:
        parser.error("expected at least 1 round and 1000000 bytes")
    if arguments.call:
        call(*arguments.call)
        return 0
    with tempfile.TemporaryDirectory(prefix="tools-", dir=arguments.folder) as made:
        folder = Path(made)
        nbytes = make_sources(folder, arguments.nbytes)
        print(f"{nbytes / 1e6:.0f} MB in {NUM_TENSORS} tensors, {arguments.rounds} rounds")
        missed = sum(merge_and_print(merge, folder, arguments.rounds) for merge in MERGES)
    return 1 if missed and arguments.check else 0


# -- the sources


def make_sources(folder: Path, nbytes: int) -> int:
    """Write the model in all formats; return its bytes."""
    rows = max(nbytes // (4 * COLUMNS * NUM_TENSORS * NUM_RANKS), 1) * NUM_RANKS
    for name in ("dcp", "ranks", "shards"):
        (folder / name).mkdir()
    torch.multiprocessing.spawn(save, (str(folder), rows), nprocs=NUM_RANKS)
    (folder / "rendezvous").unlink(missing_ok=True)
    return 4 * COLUMNS * NUM_TENSORS * rows


def save(rank: int, folder_name: str, rows: int) -> None:
    """On each rank: its parts of the model, in all formats."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    warnings.simplefilter("ignore")
    folder = Path(folder_name)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    generator = torch.Generator().manual_seed(rank)
    model = {}
    for number in range(NUM_TENSORS):
        local = torch.randn(rows // NUM_RANKS, COLUMNS, generator=generator)
        model[f"layers.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(0)])
    dcp.save(model, checkpoint_id=folder / "dcp")
    names = dict.fromkeys(model, 1)
    writer = HuggingFaceStorageWriter(
        str(folder / "shards"), fqn_to_index_mapping=names, save_distributed=True
    )
    dcp.save(model, storage_writer=writer)
    torch.save(model, folder / "ranks" / f"model_rank_{rank}.pth")
    dist.barrier()
    dist.destroy_process_group()


# -- the contenders, each in a process of its own


def call(contender: str, source_name: str, target_name: str) -> None:
    """Make one call, and print what it took as JSON."""
    warnings.simplefilter("ignore")
    source, target = Path(source_name), Path(target_name)
    act = CALLS[contender](source, target)
    before = restart_peak()
    start = time.perf_counter()
    act()
    for path in files_of(result_of(target)):
        make_durable(path)
    seconds = time.perf_counter() - start
    peak = memory_nbytes()
    print(json.dumps({"seconds": seconds, "peak": peak, "beyond": peak - before}))


def plain_copy(source: Path, target: Path) -> Callable[[], object]:
    def act() -> None:
        target.mkdir()
        for path in files_of(source):
            shutil.copyfile(path, target / path.name)

    return act


def of_ours(source: Path, target: Path) -> Callable[[], object]:
    from fsdp_compat import checkpoint

    if (source / ".metadata").exists():
        import torch.distributed.checkpoint  # noqa: F401  (as for torch's own: not measured)
    return lambda: checkpoint.files.convert(source, target)


def of_torch(source: Path, target: Path) -> Callable[[], object]:
    from torch.distributed.checkpoint import format_utils
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    if target.suffix == ".pt":
        return lambda: format_utils.dcp_to_torch_save(source, target)
    names = {f"layers.{number}.weight": 1 for number in range(NUM_TENSORS)}
    out = target.parent / "out"
    out.mkdir()
    return lambda: consolidate_safetensors_files(str(source), str(out), names)


def of_accelerate(source: Path, target: Path) -> Callable[[], object]:
    from accelerate.utils import merge_fsdp_weights

    return lambda: merge_fsdp_weights(str(source), str(target.parent / "out"))


CALLS = {COPY: plain_copy, OURS: of_ours, TORCH: of_torch, ACCELERATE: of_accelerate}


def result_of(target: Path) -> Path:
    """Return the path of a result: some contenders make a directory for it."""
    return target if target.exists() else target.parent / "out"


def files_of(path: Path) -> list[Path]:
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in found if file.is_file()]


# -- measuring


def merge_and_print(merge: Merge, folder: Path, rounds: int) -> bool:
    """Measure one merge and print its table; return whether a limit is not met."""
    has_accelerate = importlib.util.find_spec("accelerate") is not None
    contenders = [each for each in merge.contenders if each != ACCELERATE or has_accelerate]
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(rounds):
        first = number % len(contenders)
        for name in (*contenders[first:], *contenders[:first]):
            measured[name].append(measure(name, merge, folder, is_checked=number == 0))
    return print_table(merge, measured)


def measure(contender: str, merge: Merge, folder: Path, is_checked: bool) -> dict[str, float]:
    source, place = folder / merge.source, folder / "result"
    place.mkdir()
    try:
        drop_pages(source)
        target = place / merge.target
        command = [sys.executable, __file__, "--call", contender, str(source), str(target)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        if ended.returncode:
            raise RuntimeError(f"{merge.title}, {contender}:\n{ended.stderr}")
        if is_checked and contender != COPY:
            require_same(folder / "dcp", result_of(target))
        return json.loads(ended.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    finally:
        shutil.rmtree(place)


def require_same(source: Path, result: Path) -> None:
    """Raise RuntimeError unless two checkpoints hold the same."""
    from fsdp_compat import checkpoint

    found = checkpoint.files.diff(source, result)
    if not found.is_same or len(found.tensors) != NUM_TENSORS:
        raise RuntimeError(f"{result} is not what {source} holds")


def print_table(merge: Merge, measured: dict[str, list[dict[str, float]]]) -> bool:
    """Print the fastest and the largest of each contender; return whether a limit is not met."""
    fastest = {name: min(each["seconds"] for each in found) for name, found in measured.items()}
    peaks = {name: max(each["peak"] for each in found) for name, found in measured.items()}
    others = [name for name in measured if name not in (COPY, OURS)]
    is_met = fastest[OURS] <= LIMIT * fastest[COPY] and all(
        fastest[OURS] < fastest[name] and peaks[OURS] < peaks[name] for name in others
    )
    print(f"\n{merge.title:32} {'seconds':>8} {'to copy':>8} {'peak':>9} {'beyond':>9}  limit")
    for name, found in measured.items():
        print(
            f"{name:32} {fastest[name]:8.2f} {fastest[name] / fastest[COPY]:8.2f} "
            f"{peaks[name] / 1e6:6.0f} MB {max(each['beyond'] for each in found) / 1e6:6.0f} MB ",
            ("met" if is_met else "NOT MET") if name == OURS else "",
        )
    return not is_met


if __name__ == "__main__":
    raise SystemExit(main())
