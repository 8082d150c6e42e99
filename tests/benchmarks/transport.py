"""Time of one message among real processes: our transport beside gloo's own collectives, on CPU.

    torchrun --nproc-per-node 2 tests/benchmarks/transport.py
    torchrun --nproc-per-node 4 tests/benchmarks/transport.py --dtype bfloat16 --all
                                             (fsdp_compat installed, or PYTHONPATH=.)

An all-gather ends with every rank's part in one buffer, a reduce-scatter with the sum of one part,
an all-reduce with the sum of all of them. Ours is timed with the wait until peers have taken what
was sent (``drain``), after which the source may be written to again; its parts lie where training
has them: shards and gradients in memory that the ranks share, where they can. Before anything is
timed, both sides have to get the same values, at 2 ranks the same bits. A message takes as long as
its slowest rank; the memory is the same in all rounds. The columns:

    size         bytes of the full buffer: of what is gathered, or of what is summed
    ours, gloo   milliseconds, the median of the rounds
    exchange     with --all: ours where messages are sent and no memory is shared
    ratio        ours / gloo in the same round, median
    limit        what the ratio may be: 1.1, and 0.5 from 16 MB on; "missed" where it is more"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable

import torch
import torch.distributed as dist
from contenders import OURS
from measuring import MIN_ROUNDS, Table, gloo_ranks, measure_ranks, options, say

from fsdp_compat._comm.communicator import communicator
from fsdp_compat._comm.gloo import MessageTransport
from fsdp_compat._comm.gloo_connections import GlooConnections
from fsdp_compat._comm.mesh import axis_of, mesh_from_group
from fsdp_compat._comm.transport import Transport

GLOO, EXCHANGE = "gloo", "exchange"
SIZES = [1 << power for power in range(16, 29)]  # 64 KB to 256 MB
DTYPES = ("float32", "bfloat16", "float16", "float64")
SMALL_LIMIT, LARGE_LIMIT, LARGE_NBYTES = 1.1, 0.5, 16 << 20
CPU = torch.device("cpu")


class Case(typing.NamedTuple):
    """One collective of one size, as both sides do it; each returns what this rank ends with."""

    ours: Callable[[], torch.Tensor]
    gloo: Callable[[], torch.Tensor]


def main() -> None:
    parser = options(__doc__, rounds=MIN_ROUNDS)
    add = parser.add_argument
    add("--dtype", choices=DTYPES, nargs="+", default=["float32", "bfloat16"])
    add("--collective", choices=list(CASES), nargs="+", default=list(CASES))
    add("--largest", type=int, default=SIZES[-1], help="bytes of the full buffer")
    add("--smallest", type=int, default=SIZES[0])
    add("--all", action="store_true", help="also our exchange of messages, as between hosts")
    arguments = parser.parse_args()
    with gloo_ranks():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    comm = communicator(mesh_from_group(None).shard, CPU)
    near = "send everything" if isinstance(comm, MessageTransport) else "read each other's memory"
    sent = between_hosts() if arguments.all else None
    say(
        f"{comm.ranks} ranks, which {near}; gloo of torch {torch.__version__}; {arguments.rounds} "
        "rounds"
    )
    columns = [OURS, GLOO, *([EXCHANGE] if arguments.all else [])]
    forms = dict.fromkeys(columns, "12.3f") | {"ratio": "8.3f", "limit": "6.1f"}
    table = Table(forms, width=10)
    for dtype in [getattr(torch, name) for name in arguments.dtype]:
        for name in arguments.collective:
            say(f"\n{name}, {str(dtype).removeprefix('torch.')}")
            table.head(f"{'size':>10}", last="")
            for nbytes in SIZES:
                if not arguments.smallest <= nbytes <= arguments.largest:
                    continue
                numel = nbytes // dtype.itemsize // comm.ranks
                case = CASES[name](comm, numel, dtype)
                check(case, exact=comm.ranks == 2)
                steps: dict[str, Callable[[], object]] = {OURS: case.ours, GLOO: case.gloo}
                if sent is not None:
                    steps[EXCHANGE] = CASES[name](sent, numel, dtype).ours
                more = 4 if nbytes < 4 << 20 else 1  # short ones are disturbed by more
                timings = measure_ranks(steps, arguments.rounds * more)
                limit = LARGE_LIMIT if nbytes >= LARGE_NBYTES else SMALL_LIMIT
                ratio = timings.ratio(OURS, GLOO)
                size = f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"
                times = [timings.median(column) * 1e3 for column in columns]
                table.row(f"{size:>10}", [*times, ratio, limit], "missed" * (ratio > limit))


def gather_case(comm: Transport, numel: int, dtype: torch.dtype) -> Case:
    own = comm.allocate(numel, dtype)
    own.copy_(numbers(numel, comm.rank))
    full, other = (
        torch.empty(comm.ranks * numel, dtype=dtype),
        torch.empty(comm.ranks * numel, dtype=dtype),
    )
    segments, tag = list(full.chunk(comm.ranks)), comm.new_tag()

    def ours() -> torch.Tensor:
        comm.end_gather(comm.begin_gather(own, full, segments, tag), "parameters")
        comm.settle("parameters")
        return full

    def gloo() -> torch.Tensor:
        dist.all_gather_into_tensor(other, own)
        return other

    return Case(ours, gloo)


def reduce_case(comm: Transport, numel: int, dtype: torch.dtype) -> Case:
    buffer = comm.allocate(comm.ranks * numel, dtype)
    buffer.copy_(numbers(comm.ranks * numel, comm.rank))
    segments, tag, other = (
        list(buffer.chunk(comm.ranks)),
        comm.new_tag(),
        torch.empty(numel, dtype=dtype),
    )

    def ours() -> torch.Tensor:
        total = comm.end_reduce(
            comm.begin_reduce(buffer, segments, tag), segments[comm.rank], dtype, "gradients", None
        )
        comm.settle("gradients")
        return total

    def gloo() -> torch.Tensor:
        dist.reduce_scatter_tensor(other, buffer)
        return other

    return Case(ours, gloo)


def total_case(comm: Transport, numel: int, dtype: torch.dtype) -> Case:
    """In place: every call begins with the result of the last one, and values may come to overflow.
    Both sides have the same."""
    other = numbers(comm.ranks * numel, comm.rank).to(dtype)
    mine, tag = comm.allocate(other.numel(), dtype).copy_(other), comm.new_tag()

    def ours() -> torch.Tensor:
        pending = comm.continue_all_reduce(comm.begin_all_reduce(mine, tag), mine, tag, "gradients")
        comm.end_all_reduce(pending, mine, "gradients")
        comm.settle("gradients")
        return mine

    def gloo() -> torch.Tensor:
        dist.all_reduce(other)
        return other

    return Case(ours, gloo)


CASES = {"all-gather": gather_case, "reduce-scatter": reduce_case, "all-reduce": total_case}


def numbers(numel: int, seed: int) -> torch.Tensor:
    """Small whole numbers, so that sums of them are exact in every dtype, and different on every
    rank."""
    return ((torch.arange(numel) + seed) % 3).float()


def between_hosts() -> Transport:
    """Return the transport that these ranks would have on hosts of their own. Collective."""
    group = dist.new_group()
    axis = axis_of(group)
    return MessageTransport(axis, CPU, GlooConnections(axis, group))


def check(case: Case, exact: bool) -> None:
    """Raise unless both sides get the same."""
    torch.testing.assert_close(
        case.ours(), case.gloo(), rtol=0 if exact else None, atol=0 if exact else None
    )


if __name__ == "__main__":
    main()
