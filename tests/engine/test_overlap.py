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
        # by storage: the events of its allocation and its end, with the unit's name
        self.names: dict[int, tuple[str, str]] = {}
        self.units: dict[int, str] = {}  # by the tag of their all-reduces

    def name(self, group: Group) -> None:
        is_root = group.name.startswith("the root")
        short = "root" if is_root else group.name.split("'")[1].removeprefix("blocks.")
        key = _torch_private.storage_key(group.memory.all_gather_output)
        self.names[key] = f"full {short}", f"sharded {short}"
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

        def log(storage: Storage, which: int) -> None:
            if storage.untyped._cdata in self.names:
                self.log.append(self.names[storage.untyped._cdata][which])

        def allocates(storage: Storage) -> None:
            if not storage.resident_nbytes:
                log(storage, 0)
            allocate(storage)

        def frees(storage: Storage) -> None:
            if storage.resident_nbytes:
                log(storage, 1)
            free(storage)

        def gathers(group: Any, full: torch.Tensor, own: torch.Tensor) -> Work:
            return self.transfer("gather", "arrived", full)

        def reduces(group: Any, total: torch.Tensor, buffer: torch.Tensor) -> Work:
            return self.transfer("reduce", "reduced", buffer)

        replaced = {
            "allocate": (Storage, allocates),
            "free": (Storage, frees),
            "start_all_gather": (_torch_private, gathers),
            "start_reduce_scatter": (_torch_private, reduces),
            "begin_all_reduce": (BackendTransport, lambda _, total, tag, by: self.all_reduce(tag)),
            "all_reduce_steps": (BackendTransport, 1),
            "continue_all_reduce": (BackendTransport, self.goes_on),
            "end_all_reduce": (BackendTransport, lambda _, work, total, what: work.wait()),
        }
        with contextlib.ExitStack() as stack:
            for name, (owner, by) in replaced.items():
                stack.enter_context(mock.patch.object(owner, name, by))
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
    getattr(torch.ops.aten, name)
    for name in (
        *("_local_scalar_dense", "equal", "is_nonzero"),
        *("item", "masked_select", "nonzero"),
    )
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

    def streams(_: object) -> Any:
        return device.ComputeStreams(torch.device("cuda", 0))

    def current(_: object) -> Stream:
        return other if _torch_private.in_graph_task() and not at_end[0] else main

    replaced = [
        *((owner, name, refuse) for owner, name in WAITS.items()),
        (runtime, "compute_streams", streams),
        (torch.accelerator, "current_stream", current),
        (_torch_private, "on_end_of_backward", on_end_of_backward),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, by in replaced:
            stack.enter_context(mock.patch.object(owner, name, by))
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
    does not use its expert in the last step. accumulates: every second step is without
    communication of gradients. backward_stream: run as on a device with streams, where nothing may
    make the CPU wait from the second step on.
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


STEPS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "forward prefetches the next unit and reshards used ones": (
        {},
        "full root",
        "backward 2",
        """
        full root; gather root;     full 0; gather 0;   arrived root
        full 1; gather 1;           arrived 0;          forward 0;      sharded 0
        full 2; gather 2;           arrived 1;          forward 1;      sharded 1
        arrived 2;                  forward 2
        full 1; gather 1
        """,
    ),
    "reductions overlap the next gather and computation": (
        {},
        "backward 2",
        "",
        """
        backward 2
        sharded 2;   buffer 2; reduce 2;             full 0; gather 0;  arrived 1;  backward 1
        sharded 1;   reduced 2; no buffer 2; buffer 1; reduce 1;  arrived 0;         backward 0
        sharded 0; reduced 1; no buffer 1; buffer 0; reduce 0
        sharded root; reduced 0; no buffer 0; buffer root; reduce root; reduced root; no buffer root
        """,
    ),
    "two reduce buffers let reductions overlap longer": (
        {"limit_all_gathers": False},
        "backward 2",
        "",
        """
        backward 2
        sharded 2;   buffer 2; reduce 2;   full 0; gather 0;   arrived 1;   backward 1
        sharded 1;   buffer 1; reduce 1;   arrived 0;          backward 0
        sharded 0; reduced 2; no buffer 2; buffer 0; reduce 0
        sharded root; reduced 1; no buffer 1; buffer root; reduce root
        reduced 0; no buffer 0; reduced root; no buffer root
        """,
    ),
    "a large gradient waits for the previous buffer only when it comes": (
        {"width": LARGE // WIDTH},
        "backward 1",
        "backward 0",
        "backward 1; reduced 2; no buffer 2; buffer 1; sharded 1; reduce 1; arrived 0",
    ),
    "BACKWARD_POST gathers before the previous gradients are sent": (
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        "backward 2",
        "backward 1",
        "backward 2; full 1; gather 1; sharded 2; buffer 2; reduce 2; arrived 1",
    ),
    "an unused prefetch is waited for before it is freed": (
        {"used": [range(BLOCKS), range(BLOCKS), [0, 1]]},
        "forward 1",
        "backward 1",
        "forward 1; sharded 1; arrived 2; sharded 2; full 1; gather 1; arrived 1",
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_events_of_a_step_have_an_order(name: str) -> None:
    options, first, end, expected = STEPS[name]
    ((*_, log),) = run_ranks(1, logs, 3, **options)
    assert log[log.index(first) : log.index(end) if end else None] == words(expected)


@pytest.mark.parametrize("backward_stream", [None, "main"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_order_does_not_depend_on_which_parameters_have_gradients(
    use_orig_params: bool, backward_stream: str | None
) -> None:
    options = {"use_orig_params": use_orig_params, "backward_stream": backward_stream}
    (all_used,) = run_ranks(1, logs, 3, **options)
    for index in range(BLOCKS):
        assert run_ranks(1, logs, 3, without_tokens=index, **options) == [all_used]


REPLICAS = {
    ShardingStrategy.NO_SHARD: """
        backward 2; allreduce 2; backward 1; goes on 2; allreduce 1
        backward 0; allreduced 2; goes on 1; allreduce 0
        allreduced 1; goes on 0; allreduce root; allreduced 0; goes on root; allreduced root
        """,
    ShardingStrategy.HYBRID_SHARD: """
        backward 2; reduce 2; backward 1; reduced 2; allreduce 2; goes on 2; reduce 1
        backward 0; reduced 1; allreduce 1; allreduced 2; goes on 1; reduce 0
        reduced 0; allreduce 0; allreduced 1; goes on 0; reduce root
        allreduced 0; reduced root; allreduce root; goes on root; allreduced root
        """,
}


@pytest.mark.parametrize("strategy", REPLICAS)
def test_all_reduces_over_replicas_run_beside_backward(strategy: ShardingStrategy) -> None:
    ((*_, log),) = run_ranks(1, logs, 3, sharding_strategy=strategy)
    kinds = ("backward ", "reduce ", "reduced ", "allreduce ", "allreduced ", "goes on ")
    assert [event for event in log if event.startswith(kinds)] == words(REPLICAS[strategy])


# -- memory and time


def held(log: Log) -> tuple[int, int]:
    """Return the most blocks, and the most reduce buffers of blocks, that are held at once."""
    return most(log, "full", "sharded"), most(log, "buffer", "no buffer")


@pytest.mark.parametrize("limit_all_gathers", [True, False])
@pytest.mark.parametrize("width", [3, LARGE // WIDTH])
def test_at_most_two_blocks_and_the_limit_of_reduce_buffers(
    width: int, limit_all_gathers: bool
) -> None:
    (found,) = run_ranks(1, logs, 8, width=width, limit_all_gathers=limit_all_gathers)
    buffers = 1 if limit_all_gathers else 2
    assert [held(log) for log in found] == [(1, buffers), *[(2, buffers)] * 7], "no order at first"
    assert found[3:] == found[2:3] * 5


COSTS = {"gather": 1.0, "reduce": 1.0, "forward": 1.0, "backward": 2.0}
COMPUTED = BLOCKS * (1 + 2)  # the root computes nothing
TRANSFERS = BLOCKS * (2 + 1) - 1 + 2  # the last block and the root stay unsharded


HIDDEN = {
    # not hidden: the first two gathers, the last two reductions
    BackwardPrefetch.BACKWARD_PRE: COMPUTED + 2 + 2,
    BackwardPrefetch.BACKWARD_POST: COMPUTED + 2 + 2 + 2,  # and the gathers of backward
    # and those of forward; one reduction overlaps a gather: none is hidden
    None: COMPUTED + TRANSFERS,
}


@pytest.mark.parametrize("prefetch", HIDDEN)
def test_communication_is_hidden_behind_computation(prefetch: BackwardPrefetch | None) -> None:
    ((*_, log),) = run_ranks(1, logs, 3, backward_prefetch=prefetch)
    assert duration(log, COSTS) == HIDDEN[prefetch]


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
        joins = [event for event in log if " after " in event]
        assert joins == ["other after main", "main after other"]
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
    calls = model._unit.behavior.calls_in_graphs
    assert [call() is not None and bool(call().inside) for call in calls] == [True]
    del outputs
    assert sum(call() is not None for call in calls) == 0
