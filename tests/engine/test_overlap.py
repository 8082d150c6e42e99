"""The order of events on a device that only records: transfers, computation, memory and waits.

The device is the CPU. Transfers are recorded where the backend's collectives would start and where
their works are waited for, memory where it is allocated and freed, computation where a block's
forward and backward begin. Waiting for a work makes the computing stream wait, as on a device with
streams; so the log holds what such a device would be told, in this order.

Three blocks, 0 to 2, are units, and so is the root, which has its own parameter. The events of a
unit ``k``:

    gather k, arrived k       an all-gather starts, and is waited for
    full k, sharded k         memory of unsharded parameters is allocated, and freed
    reduce k, reduced k       a reduce-scatter starts, and is waited for
    allreduce k, goes on k, allreduced k
                              the same of the all-reduce over replicas, which has two messages
    buffer k, no buffer k     memory of gradients is allocated, and freed
    forward k, backward k     computation begins"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compat import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy, _torch_private
from fsdp_compat._comm.backend import BackendTransport
from fsdp_compat._engine import device, runtime
from fsdp_compat._engine.gradients import LARGE
from fsdp_compat._engine.group import Group
from fsdp_compat._engine.storage import Storage
from fsdp_compat._engine.store import ReduceForm
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.ranks import on_ranks, run_ranks

WIDTH = 4
BLOCKS = 3

Log = list[str]


class Recorded:
    """A device and its log."""

    def __init__(self) -> None:
        self.log: Log = []
        self.names: dict[
            int, tuple[str, str]
        ] = {}  # by storage: the events of its allocation and its end, with the unit's name
        self.units: dict[int, str] = {}  # by the tag of their all-reduces

    def name(self, group: Group) -> None:
        short = (
            "root"
            if group.name.startswith("the root")
            else group.name.split("'")[1].removeprefix("blocks.")
        )
        self.names[_torch_private.storage_key(group.memory.all_gather_output)] = (
            f"full {short}",
            f"sharded {short}",
        )
        self.units[group.gradients.axes.replica_tag] = short
        make = group.gradients._new_buffer

        def new_buffer(form: ReduceForm) -> Any:
            buffer = make(form)
            self.names[buffer._storage.untyped._cdata] = f"buffer {short}", f"no buffer {short}"
            return buffer

        group.gradients._new_buffer = new_buffer  # type: ignore[method-assign]

    def unit(self, tensor: torch.Tensor) -> str:
        return self.names[_torch_private.storage_key(tensor)][0].split()[1]

    def transfer(self, begin: str, end: str, tensor: torch.Tensor) -> Work:
        unit = self.unit(tensor)
        self.log.append(f"{begin} {unit}")
        return Work(lambda: self.log.append(f"{end} {unit}"))

    def all_reduce(self, tag: int) -> Work:
        unit = self.units[tag]
        self.log.append(f"allreduce {unit}")
        return Work(lambda: self.log.append(f"allreduced {unit}"))

    def goes_on(self, work: Work, total: torch.Tensor, tag: int, what: str) -> Work:
        self.log.append(f"goes on {self.units[tag]}")
        return work

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        allocate, free = Storage.allocate, Storage.free

        def allocates(storage: Storage) -> None:
            if not storage.resident_nbytes and storage.untyped._cdata in self.names:
                self.log.append(self.names[storage.untyped._cdata][0])
            allocate(storage)

        def frees(storage: Storage) -> None:
            if storage.resident_nbytes and storage.untyped._cdata in self.names:
                self.log.append(self.names[storage.untyped._cdata][1])
            free(storage)

        with (
            mock.patch.object(Storage, "allocate", allocates),
            mock.patch.object(Storage, "free", frees),
            mock.patch.object(
                _torch_private,
                "start_all_gather",
                lambda group, full, own: self.transfer("gather", "arrived", full),
            ),
            mock.patch.object(
                _torch_private,
                "start_reduce_scatter",
                lambda group, total, buffer: self.transfer("reduce", "reduced", buffer),
            ),
            mock.patch.object(
                BackendTransport,
                "begin_all_reduce",
                lambda _, total, tag, divisor: self.all_reduce(tag),
            ),
            mock.patch.object(BackendTransport, "all_reduce_steps", 1),
            mock.patch.object(BackendTransport, "continue_all_reduce", self.goes_on),
            mock.patch.object(
                BackendTransport, "end_all_reduce", lambda _, work, total, what: work.wait()
            ),
        ):
            yield


class Work:
    """A transfer in flight. The only use of it: the computing stream waits for it."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class Mark(torch.autograd.Function):
    """Logs when the backward of the operations before it begins."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: Log, event: str) -> torch.Tensor:
        ctx.log, ctx.event = log, event
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.log.append(ctx.event)
        return grad, None, None


class Block(nn.Module):
    def __init__(self, index: int, log: Log, width: int) -> None:
        super().__init__()
        self.index, self.log, self.up = index, log, nn.Linear(WIDTH, width, bias=False)
        self.expert, self.has_tokens = nn.Parameter(torch.ones(WIDTH)), True

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        self.log.append(f"forward {self.index}")
        x = x + self.up(x).mean() + memory
        x = x * self.expert if self.has_tokens else x
        return Mark.apply(x, self.log, f"backward {self.index}")


class Model(nn.Module):
    def __init__(self, log: Log, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(index, log, width) for index in range(BLOCKS))

    def forward(self, x: torch.Tensor, used: Sequence[int] = range(BLOCKS)) -> torch.Tensor:
        x = x * self.scale
        memory = x.relu()  # an input of all blocks, as of a decoder's
        for index in used:
            x = self.blocks[index](x, memory)
        return x


class Stream:
    """A stream that can only wait for another one."""

    def __init__(self, name: str, log: Log) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} after {other.name}")


class NoReads(TorchDispatchMode):
    """Refuses operations that make the CPU wait for a value: ``item``, ``bool``, shapes that
    depend on values."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket in READS:
            raise AssertionError(f"{function} makes the CPU wait")
        return function(*args, **(kwargs or {}))


READS = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.equal,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.item,
    torch.ops.aten.masked_select,
    torch.ops.aten.nonzero,
}
WAITS = {
    torch.cuda: "synchronize",
    torch.accelerator: "synchronize",
    torch.cuda.Stream: "synchronize",
    torch.Tensor: "record_stream",
}


@contextlib.contextmanager
def streams_of(log: Log, backward: str) -> Iterator[None]:
    """Pretend that the device has streams, which the engine may only order. backward: the stream of
    backwards' nodes; what runs at their end is on the main stream."""
    main = Stream("main", log)
    other = main if backward == main.name else Stream(backward, log)
    at_end, on_end = [False], _torch_private.on_end_of_backward

    def on_end_of_backward(callback: Callable[[], None]) -> None:
        def end() -> None:
            at_end[0] = True
            callback()
            at_end[0] = False

        on_end(end)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the CPU waits for the device, or memory is recorded on a stream")

    with contextlib.ExitStack() as stack:
        for owner, name in WAITS.items():
            stack.enter_context(mock.patch.object(owner, name, refuse))
        stack.enter_context(
            mock.patch.object(
                runtime, "compute_streams", lambda _: device.ComputeStreams(torch.device("cuda", 0))
            )
        )
        stack.enter_context(
            mock.patch.object(
                torch.accelerator,
                "current_stream",
                lambda _: other if _torch_private.in_graph_task() and not at_end[0] else main,
            )
        )
        stack.enter_context(
            mock.patch.object(_torch_private, "on_end_of_backward", on_end_of_backward)
        )
        yield


def logs(
    num_steps: int,
    *,
    width: int = 3,
    used: Sequence[Sequence[int]] = (),
    without_tokens: int | None = None,
    accumulates: bool = False,
    backward_stream: str | None = None,
    **options: Any,
) -> list[Log]:
    """Return the log of each step.

    width: of a block's layer. used: by step, by default all blocks. without_tokens: the block that
    does not use its expert in the last step. accumulates: every second step
    is without communication of gradients. backward_stream: run as on a device with streams, where
    nothing may make the CPU wait from the second step on.
    """
    dist.destroy_process_group()
    is_hybrid = options.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD
    dist.init_process_group("fake", rank=0, world_size=4 if is_hybrid else 2, store=FakeStore())
    if is_hybrid:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    recorded = Recorded()
    with contextlib.ExitStack() as stack:
        if backward_stream is not None:
            stack.enter_context(streams_of(recorded.log, backward_stream))
        module = Model(recorded.log, width)
        blocks = list(module.blocks)
        model = FullyShardedDataParallel(
            module, auto_wrap_policy=ModuleWrapPolicy({Block}), **options
        )
        for group in model._runtime.groups:
            recorded.name(group)
        found = []
        for index in range(num_steps):
            unreduced = accumulates and index % 2 == 0
            recorded.log.clear()
            for block in blocks:
                is_last = index == num_steps - 1
                block.has_tokens = not is_last or block.index != without_tokens
            with contextlib.ExitStack() as step:
                step.enter_context(recorded.recording())
                if unreduced:
                    step.enter_context(model.no_sync())
                if backward_stream is not None and index:
                    step.enter_context(NoReads())
                model(torch.ones(1, WIDTH), used[index] if used else range(BLOCKS)).sum().backward()
            found.append(list(recorded.log))
            if not unreduced:
                for parameter in model.parameters():
                    parameter.grad = None
    return found


def words(text: str) -> Log:
    """Events, separated by semicolons and the ends of lines."""
    return [
        event.strip() for line in text.splitlines() for event in line.split(";") if event.strip()
    ]


def most(log: Log, comes: str, goes: str) -> int:
    """Return the largest number of blocks between the two events of each."""
    steps = [
        (event.startswith(f"{comes} ")) - (event.startswith(f"{goes} "))
        for event in log
        if not event.endswith(" root")
    ]
    return max(itertools.accumulate(steps))


ENDS = {"gather": "arrived", "reduce": "reduced"}


def duration(log: Log, costs: dict[str, float]) -> float:
    """Return the time of a step on a device with one computing and one transferring stream."""
    computed = transferred = 0.0
    done: dict[str, float] = {}
    for event in log:
        kind, _, unit = event.rpartition(" ")
        if kind in ("forward", "backward"):
            computed += costs[kind]
        elif kind in ("gather", "reduce"):
            transferred = max(transferred, computed) + costs[kind]
            done[ENDS[kind] + unit] = transferred
        elif kind in ENDS.values():
            computed = max(computed, done[kind + unit])
    return max(computed, transferred)


# -- the order


def test_forward_prefetches_the_next_unit_and_reshards_used_ones() -> None:
    ((*_, log),) = run_ranks(1, logs, 3)
    assert log[: log.index("backward 2")] == words(
        """
        full root; gather root;     full 0; gather 0;   arrived root
        full 1; gather 1;           arrived 0;          forward 0;      sharded 0
        full 2; gather 2;           arrived 1;          forward 1;      sharded 1
        arrived 2;                  forward 2
        full 1; gather 1
        """
    )


def test_reductions_overlap_the_next_gather_and_computation() -> None:
    ((*_, log),) = run_ranks(1, logs, 3)
    assert log[log.index("backward 2") :] == words(
        """
        backward 2
        sharded 2;   buffer 2; reduce 2;             full 0; gather 0;  arrived 1;  backward 1
        sharded 1;   reduced 2; no buffer 2; buffer 1; reduce 1;  arrived 0;         backward 0
        sharded 0; reduced 1; no buffer 1; buffer 0; reduce 0
        sharded root; reduced 0; no buffer 0; buffer root; reduce root; reduced root; no buffer root
        """
    )


def test_two_reduce_buffers_let_reductions_overlap_longer() -> None:
    ((*_, log),) = run_ranks(1, logs, 3, limit_all_gathers=False)
    assert log[log.index("backward 2") :] == words(
        """
        backward 2
        sharded 2;   buffer 2; reduce 2;   full 0; gather 0;   arrived 1;   backward 1
        sharded 1;   buffer 1; reduce 1;   arrived 0;          backward 0
        sharded 0; reduced 2; no buffer 2; buffer 0; reduce 0
        sharded root; reduced 1; no buffer 1; buffer root; reduce root
        reduced 0; no buffer 0; reduced root; no buffer root
        """
    )


def test_large_gradient_waits_for_the_previous_buffer_only_when_it_comes() -> None:
    ((*_, log),) = run_ranks(1, logs, 3, width=LARGE // WIDTH)
    assert log[log.index("backward 1") : log.index("backward 0")] == words(
        "backward 1; reduced 2; no buffer 2; buffer 1; sharded 1; reduce 1; arrived 0"
    )


@pytest.mark.parametrize("backward_stream", [None, "main"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_order_does_not_depend_on_which_parameters_have_gradients(
    use_orig_params: bool, backward_stream: str | None
) -> None:
    options = {"use_orig_params": use_orig_params, "backward_stream": backward_stream}
    (all_used,) = run_ranks(1, logs, 3, **options)
    for index in range(BLOCKS):
        assert run_ranks(1, logs, 3, without_tokens=index, **options) == [all_used]


def test_without_prefetching_every_gather_is_waited_for_at_once() -> None:
    ((*_, log),) = run_ranks(1, logs, 3, backward_prefetch=None)
    begun = [index for index, event in enumerate(log) if event.startswith("gather ")]
    assert [log[index + 1] for index in begun] == [
        log[index].replace("gather", "arrived") for index in begun
    ]


def test_backward_post_gathers_before_the_previous_gradients_are_sent() -> None:
    ((*_, log),) = run_ranks(1, logs, 3, backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    assert log[log.index("backward 2") : log.index("backward 1") + 1] == words(
        "backward 2; full 1; gather 1; sharded 2; buffer 2; reduce 2; arrived 1; backward 1"
    )


def test_unused_prefetch_is_waited_for_before_it_is_freed() -> None:
    everything = range(BLOCKS)
    ((*_, log),) = run_ranks(1, logs, 3, used=[everything, everything, [0, 1]])
    assert log[log.index("forward 1") : log.index("backward 1") + 1] == words(
        "forward 1; sharded 1; arrived 2; sharded 2; full 1; gather 1; arrived 1; backward 1"
    )


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            ShardingStrategy.NO_SHARD,
            """
            backward 2; allreduce 2; backward 1; goes on 2; allreduce 1
            backward 0; allreduced 2; goes on 1; allreduce 0
            allreduced 1; goes on 0; allreduce root; allreduced 0; goes on root; allreduced root
            """,
        ),
        (
            ShardingStrategy.HYBRID_SHARD,
            """
            backward 2; reduce 2; backward 1; reduced 2; allreduce 2; goes on 2; reduce 1
            backward 0; reduced 1; allreduce 1; allreduced 2; goes on 1; reduce 0
            reduced 0; allreduce 0; allreduced 1; goes on 0; reduce root
            allreduced 0; reduced root; allreduce root; goes on root; allreduced root
            """,
        ),
    ],
)
def test_all_reduces_over_replicas_run_beside_backward(
    strategy: ShardingStrategy, expected: str
) -> None:
    ((*_, log),) = run_ranks(1, logs, 3, sharding_strategy=strategy)
    kinds = ("backward ", "reduce ", "reduced ", "allreduce ", "allreduced ", "goes on ")
    found = [event for event in log if event.startswith(kinds)]
    assert found == words(expected)


# -- memory and time


@pytest.mark.parametrize("limit_all_gathers", [True, False])
@pytest.mark.parametrize("width", [3, LARGE // WIDTH])
def test_at_most_two_blocks_and_the_limit_of_reduce_buffers(
    width: int, limit_all_gathers: bool
) -> None:
    (found,) = run_ranks(1, logs, 8, width=width, limit_all_gathers=limit_all_gathers)
    buffers = 1 if limit_all_gathers else 2
    assert [
        (most(log, "full", "sharded"), most(log, "buffer", "no buffer")) for log in found[1:]
    ] == [(2, buffers)] * 7
    assert found[3:] == found[2:3] * 5


def test_shard_grad_op_keeps_all_blocks_and_one_reduce_buffer() -> None:
    (found,) = run_ranks(1, logs, 3, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert [(most(log, "full", "sharded"), most(log, "buffer", "no buffer")) for log in found] == [
        (BLOCKS, 1)
    ] * 3


COSTS = {"gather": 1.0, "reduce": 1.0, "forward": 1.0, "backward": 2.0}
COMPUTED = BLOCKS * (1 + 2)  # the root computes nothing
TRANSFERS = BLOCKS * (2 + 1) - 1 + 2  # the last block and the root stay unsharded


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (
            BackwardPrefetch.BACKWARD_PRE,
            COMPUTED + 2 + 2,
        ),  # not hidden: the first two gathers, the last two reductions
        (BackwardPrefetch.BACKWARD_POST, COMPUTED + 2 + 2 + 2),  # and the gathers of backward
        (
            None,
            COMPUTED + TRANSFERS,
        ),  # and those of forward; one reduction overlaps a gather: none is hidden
    ],
)
def test_communication_is_hidden_behind_computation(
    prefetch: BackwardPrefetch | None, expected: float
) -> None:
    ((*_, log),) = run_ranks(1, logs, 3, backward_prefetch=prefetch)
    assert duration(log, COSTS) == expected


# -- waits


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_with_streams_the_cpu_never_waits_and_no_memory_is_recorded(
    accumulates: bool, use_orig_params: bool
) -> None:
    options = {"accumulates": accumulates, "use_orig_params": use_orig_params}
    on_streams, on_none = (
        run_ranks(1, logs, 4, backward_stream=name, **options)[0] for name in ("main", None)
    )
    assert on_streams == on_none


def test_backward_on_another_stream_is_joined_at_each_change() -> None:
    (found,) = run_ranks(1, logs, 3, backward_stream="other")
    for log in found[1:]:
        assert [event for event in log if " after " in event] == [
            "other after main",
            "main after other",
        ]
        assert log[log.index("forward 2") :][:3] == ["forward 2", "other after main", "full 1"]
        # gradients are assigned on the caller's stream
        end = log.index("main after other")
        assert log.index("backward 0") < end < log.index("reduced root")


class Two(nn.Module):
    """Returns an output, and what depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layer(x.tanh())
        return x, x.square().mean()


@on_ranks(1)
def test_without_tags_a_graph_is_freed_with_its_outputs_also_if_one_depends_on_another() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = FullyShardedDataParallel(Two())
    outputs = model(torch.ones(1, WIDTH, requires_grad=True))
    calls = model._unit.conduct.calls_in_graphs
    assert [call() is not None and bool(call().inside) for call in calls] == [True]
    del outputs
    assert sum(call() is not None for call in calls) == 0
