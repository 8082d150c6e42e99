"""One process that trains as rank 0 of many, on any device, beside the unsharded model. All ranks
have the same batch.

The process group moves nothing: an all-gather returns the parameters of the unsharded model, a sum
over ranks multiplies this rank's values. On a device with streams each transfer runs on its own
stream and sleeps, on the CPU it happens in the wait; until it ends, the memory it writes holds NaN.
An engine that reads or frees too early, or forgets to wait, gets other losses."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compat
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, _torch_private
from fsdp_compat._engine.group import Group
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support import emulated
from tests.support.engine_build import gather_form
from tests.support.models import Block, Stack
from tests.support.parity import Pair, assert_close, groups_of, no_sync, seeded

SLEEP_CYCLES = 2_000_000  # about a millisecond
FP32_TOLERANCE, LOW_TOLERANCE = 2e-5, 2e-2  # relative to the largest element


def device_named(name: str) -> torch.device:
    """Return a device. The emulated one is registered in this process first."""
    if name.startswith(emulated.NAME):
        emulated.use()
    return torch.device(name)


@contextlib.contextmanager
def group_of(ranks: int, device: torch.device) -> Iterator[None]:
    """Inside the context the default group has one real rank, on the backend of the device if there
    is one, or ``ranks`` ranks, of which this is the first."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if ranks > 1 or device.type == emulated.NAME:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    elif device.type == "cpu":
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    else:
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            rank=0,
            world_size=1,
            store=dist.HashStore(),
            device_id=device,
        )
    try:
        yield
    finally:
        dist.destroy_process_group()


FLAT, ORIGINAL, FULLY_SHARD = "flat", "original parameters", "fully_shard"
FRONT_ENDS = (FLAT, ORIGINAL, FULLY_SHARD)


def sharded(
    module: nn.Module,
    front_end: str = FLAT,
    strategy: str = "FULL_SHARD",
    *,
    units: Collection[type[nn.Module]],
    device_id: torch.device,
    offload: bool = False,
    mixed_precision: MixedPrecision | None = None,
    library: Any = fsdp_compat,
    **options: Any,
) -> Any:
    """Return the module as one of FRONT_ENDS shards it; HYBRID_SHARD is over two nodes.

    library: fsdp_compat, or torch.distributed.fsdp. options: of the front end, for the root.
    """
    ranks = dist.get_world_size()
    shape = {"HYBRID_SHARD": (2, ranks // 2), "NO_SHARD": (ranks, 1)}.get(strategy, (1, ranks))
    mesh = init_device_mesh(device_id.type, shape, mesh_dim_names=("replicate", "shard"))
    if front_end != FULLY_SHARD:
        low = mixed_precision and dataclasses.asdict(mixed_precision)
        return library.FullyShardedDataParallel(
            module,
            device_id=device_id,
            auto_wrap_policy=library.wrap.ModuleWrapPolicy(units),
            sharding_strategy=library.ShardingStrategy[strategy],
            device_mesh=mesh if strategy == "HYBRID_SHARD" else None,
            cpu_offload=library.CPUOffload(offload_params=offload),
            mixed_precision=library.MixedPrecision(**low) if low else None,
            use_orig_params=front_end == ORIGINAL,
            **options,
        )
    dtypes = mixed_precision or MixedPrecision()
    how: dict[str, Any] = {
        "mesh": mesh if shape[0] > 1 else mesh["shard"],
        "reshard_after_forward": strategy != "SHARD_GRAD_OP",
        "offload_policy": library.CPUOffloadPolicy() if offload else library.OffloadPolicy(),
        "mp_policy": library.MixedPrecisionPolicy(dtypes.param_dtype, dtypes.reduce_dtype),
    }
    if not offload:
        module.to(device_id)
    for unit in [child for child in module.modules() if isinstance(child, tuple(units))]:
        library.fully_shard(unit, **how)
    return library.fully_shard(module, **how, **options)


class Work:
    """A transfer in flight. keep: its tensors, which live until the wait, as in a real one."""

    def __init__(self, wait: Callable[[], None], keep: object) -> None:
        self._wait, self._keep = wait, keep

    def wait(self) -> bool:
        self._wait()
        self._wait, self._keep = lambda: None, None
        return True


class Transfers:
    """Replaces the collectives of the group."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        # By the storage that is gathered into.
        self._wholes: dict[int, tuple[Group, Sequence[torch.Tensor]]] = {}
        # 0-d: the distance of sent values from those of the unsharded model.
        self.own_errors: list[torch.Tensor] = []
        self.num_all_gathers = 0  # that were started

    def register(self, group: Group, wholes: Sequence[torch.Tensor]) -> None:
        """wholes: the group's parameters in the unsharded model."""
        for memory in group.memories:
            self._wholes[_torch_private.storage_key(memory.all_gather_output)] = group, wholes

    @contextlib.contextmanager
    def carried(self) -> Iterator[None]:
        with (
            mock.patch.object(_torch_private, "start_all_gather", self._gather),
            mock.patch.object(_torch_private, "start_all_gathers", self._gather_together),
            mock.patch.object(_torch_private, "start_reduce_scatter", self._reduce),
            mock.patch.object(dist, "all_reduce", self._sum),
        ):
            yield

    def _start(self, carry: Callable[[], None], keep: object) -> Work:
        if self._stream is None:
            return Work(carry, keep)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            carry()
            event = self._stream.record_event()
        return Work(lambda: torch.accelerator.current_stream().wait_event(event), keep)

    def _take_time(self) -> None:
        if self._stream is not None and self._stream.device.type == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)

    def _gather(self, group: dist.ProcessGroup, full: torch.Tensor, own: torch.Tensor) -> Work:
        self.num_all_gathers += 1
        gathered, wholes = self._wholes[_torch_private.storage_key(full)]
        first, sent = full.data[: own.numel()], list[torch.Tensor]()

        def spoil() -> None:
            sent.append(own.clone())  # it may be a part of the output
            full.data.fill_(float("nan"))

        @torch.no_grad()
        def carry() -> None:
            if not sent:
                spoil()
            self._take_time()
            form = gather_form(gathered.store)
            *places, rest = form.param_views(full.data)
            for place in rest:  # belongs to no parameter
                place.zero_()
            for index, (parts, whole) in enumerate(zip(places, wholes, strict=True)):
                for place, piece in zip(parts, form.split(index, whole), strict=True):
                    place.copy_(piece)
            self.own_errors.append((first - sent[0]).abs().max())

        if self._stream is None:
            spoil()
        return self._start(carry, (full, own))

    def _gather_together(
        self, group: dist.ProcessGroup, fulls: list[torch.Tensor], owns: list[torch.Tensor]
    ) -> Work:
        works = [self._gather(group, full, own) for full, own in zip(fulls, owns, strict=True)]
        self.num_all_gathers -= len(works) - 1

        def wait() -> None:
            for work in works:
                work.wait()

        return Work(wait, works)

    def _reduce(self, group: dist.ProcessGroup, total: torch.Tensor, buffer: torch.Tensor) -> Work:
        ranks = group.size()
        total.fill_(float("nan"))

        @torch.no_grad()
        def carry() -> None:
            self._take_time()
            torch.mul(buffer[: total.numel()], ranks, out=total)

        return self._start(carry, (total, buffer))

    def _sum(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        if op != dist.ReduceOp.SUM:
            return None

        @torch.no_grad()
        def carry() -> None:
            self._take_time()
            tensor.mul_((group or dist.group.WORLD).size())

        work = self._start(carry, tensor)
        if async_op:
            return work
        work.wait()
        return None


Place = Callable[[], contextlib.AbstractContextManager[object]]


@dataclasses.dataclass(frozen=True)
class Step:
    """Options of a step."""

    backwards: int = 1  # all but the last under no_sync
    forward_in: Place = contextlib.nullcontext  # such as a stream
    backward_in: Place = contextlib.nullcontext


class Twin(Pair):
    """A Pair of which this process is the first of ``ranks`` ranks."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        device: torch.device,
        ranks: int,
        *,
        prepare: Callable[[nn.Module], nn.Module] = lambda module: module,
        batch: tuple[int, ...] = (4, 8),
        front_end: Callable[..., nn.Module] = FSDP,
        **options: Any,
    ) -> None:
        """prepare: changes the module, but not its values, before it is wrapped. batch: shape of
        the input. options: of the front end, which shards a module for a ``device_id``."""
        precision = options.get("mixed_precision") or MixedPrecision()
        self.device, self.dtype = device, precision.param_dtype or torch.float32
        low = self.dtype is not torch.float32 or precision.reduce_dtype not in (None, torch.float32)
        plain = seeded(build).to(device)
        super().__init__(
            plain,
            front_end(prepare(copy.deepcopy(plain)), device_id=device, **options),
            batch=lambda generator: torch.randn(batch, generator=generator).to(device),
            data_ranks=1,
            tolerance=LOW_TOLERANCE if low else FP32_TOLERANCE,
        )
        self.transfers = Transfers(device)
        self._carried = self.transfers.carried if ranks > 1 else contextlib.nullcontext
        named = dict(plain.named_parameters(remove_duplicate=False))
        with self.running():  # fully_shard compares the ranks' models when it is first used
            for group, names in groups_of(self.model):
                self.transfers.register(group, [named[name] for name in names])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside the context steps can be taken."""
        with self._carried():
            yield

    def inputs(self, number: int = 1) -> list[torch.Tensor]:
        return [self.batches()[0] for _ in range(number)]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of the sharded model."""
        return self.model(x).float().pow(2).mean()

    def plain_loss(self, x: torch.Tensor) -> torch.Tensor:
        named = self.plain.named_parameters(remove_duplicate=False)
        low = {} if self.dtype is torch.float32 else {n: p.to(self.dtype) for n, p in named}
        out = torch.func.functional_call(self.plain, low, (x.to(self.dtype),))
        return out.float().pow(2).mean()

    def step(self) -> None:  # type: ignore[override]
        """Train both, and compare losses, gradients and parameters."""
        (x,) = self.inputs()
        loss, expected = self.loss(x), self.plain_loss(x)
        for each in (loss, expected):
            each.backward()
        assert_close(loss, expected, "loss", self.tolerance)
        self.compare_gradients()
        self.update()
        assert all(error.item() <= self.tolerance for error in self.transfers.own_errors), (
            "a shard was sent before it was written"
        )
        self.transfers.own_errors.clear()

    def _backwards(self, inputs: Sequence[torch.Tensor], how: Step) -> None:
        for number, x in enumerate(inputs, 1):
            with contextlib.nullcontext() if number == len(inputs) else no_sync(self.model):
                with how.forward_in():
                    loss = self.loss(x)
                with how.backward_in():
                    loss.backward()

    def steps_together(self, num_steps: int, how: Step) -> None:
        """Take steps with both models, and compare parameters at the end. Before, the host waits
        for the device only where the models make it wait."""
        for inputs in [self.inputs(how.backwards) for _ in range(num_steps)]:
            self._backwards(inputs, how)
            for x in inputs:
                self.plain_loss(x).backward()
            for optim in (self.plain_optim, self.optim):
                optim.step()
                optim.zero_grad()
            self.transfers.own_errors.clear()
        self.compare_parameters()

    def quiet_steps(self, inputs: list[torch.Tensor]) -> None:
        """Take steps with the sharded model alone, one per input, without reading any value."""
        for x in inputs:
            self.loss(x).backward()
            self.optim.step()
            self.optim.zero_grad()
            self.transfers.own_errors.clear()


@contextlib.contextmanager
def twin_of(
    device: str,
    ranks: int = 8,
    build: Callable[[], nn.Module] = Stack,
    units: Collection[type[nn.Module]] = (Block,),
    **options: Any,
) -> Iterator[Twin]:
    """A twin that can take steps. units: of FSDP. options: of Twin."""
    place = device_named(device)
    with group_of(ranks, place):
        if "front_end" not in options:
            options["auto_wrap_policy"] = ModuleWrapPolicy(units)
        twin = Twin(build, place, ranks, **options)
        with twin.running():
            yield twin
