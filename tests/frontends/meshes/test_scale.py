"""The work and memory of a rank do not depend on the number of ranks, and one rank of any number
can be simulated: with torch's fake process group, which accepts every collective and moves
nothing."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compat
from fsdp_compat import CPUOffload, FullyShardedDataParallel, MixedPrecision, UsageError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.messages import Messages
from tests.support.parity import both_forms
from tests.support.ranks import on_ranks

WORLD_SIZES = (8, 16384)
DIM = 16384  # a block has 2 * 2**28 + 4 * 2**14 elements, without padding on both of these


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.scales = nn.ParameterList(torch.ones(dim) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x + self.down(self.up(x))


def wrapped(dim: int, device: str, **options: Any) -> FullyShardedDataParallel:
    with torch.device(device):
        model = nn.Sequential(*(Block(dim) for _ in range(3)))
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device(device), **options
    )


@contextlib.contextmanager
def world(rank: int, num_ranks: int) -> Iterator[None]:
    """Inside the context this process is one of many ranks, the others of which do not exist."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of construction and of the third step, which is like all later ones."""

    constructing: tuple[int, int]  # calls: of the package's functions; by them, of functions in C
    stepping: tuple[int, int]
    tensors: int  # objects that are alive afterwards
    shard_numel: int  # of a block


def counted_calls(function: Callable[[], Any]) -> tuple[tuple[int, int], Any]:
    counts, package = {"call": 0, "c_call": 0}, str(Path(fsdp_compat.__file__).parent)

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts and frame.f_code.co_filename.startswith(package):
            counts[event] += 1

    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return (counts["call"], counts["c_call"]), result


def living_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def costs(use_orig_params: bool, rank: int, num_ranks: int) -> Costs:
    with world(rank % num_ranks, num_ranks):
        gc.collect()
        gc.disable()  # its work would be counted
        constructing, model = counted_calls(
            partial(wrapped, DIM, "meta", use_orig_params=use_orig_params)
        )
        x, parameters = torch.ones(2, DIM, device="meta"), list(model.parameters())

        def step() -> None:
            model(x).sum().backward()
            for parameter in parameters:
                parameter.grad = None

        step()
        step()
        stepping, _ = counted_calls(step)
        gc.enable()
        shard_numel = sum(parameter.numel() for parameter in model.module[-1].parameters())
        return Costs(constructing, stepping, living_tensors(), shard_numel)


@both_forms
@on_ranks(1)
def test_constructing_and_training_take_the_same_steps_for_8_ranks_and_for_16384(
    use_orig_params: bool,
) -> None:
    costs(use_orig_params, 0, 8)  # what happens once per process
    few, many = (costs(use_orig_params, 0, num_ranks) for num_ranks in WORLD_SIZES)
    assert (few.shard_numel, many.shard_numel) == (2**26 + 2**13, 2**15 + 2**2)
    assert dataclasses.replace(many, shard_numel=few.shard_numel) == few
    # The last ranks hold parts of more, or fewer, parameters.
    few, many = (costs(use_orig_params, -1, num_ranks) for num_ranks in WORLD_SIZES)
    assert many.constructing <= few.constructing
    assert many.stepping <= few.stepping
    assert many.tensors == few.tensors


def layout_and_messages(device: str) -> list[Any]:
    """Return the shapes of what a rank holds, and what it sends in a step."""
    precision = MixedPrecision(torch.bfloat16)
    with world(3, 5), Messages() as messages:
        model = wrapped(6, device, mixed_precision=precision, use_orig_params=True)
        model(torch.ones(2, 6, device=device)).sum().backward()
        shapes = [
            (name, p.shape, None if p.grad is None else p.grad.shape)
            for name, p in model.named_parameters()
        ]
        # Real ranks also check that they agree, by all-reduces.
        return [shapes, [call for call in messages.calls if call[0] != "allreduce_"]]


@on_ranks(1)
def test_a_simulated_rank_has_the_layouts_and_sends_the_bytes_of_a_real_one() -> None:
    found = layout_and_messages("meta")
    assert found == layout_and_messages("cpu")
    names = collections.Counter(name for name, *_ in found[-1])
    assert names == {"_allgather_base_": 6, "_reduce_scatter_base_": 3}


@pytest.mark.parametrize(
    ("name", "value"), [("cpu_offload", CPUOffload(True)), ("allow_unused_units", True)]
)
@on_ranks(1)
def test_operations_that_need_values_cannot_be_simulated(name: str, value: Any) -> None:
    with world(0, 4), pytest.raises(UsageError, match=rf"(?s)(?=.*{name}).*meta"):
        wrapped(6, "meta", **{name: value})
