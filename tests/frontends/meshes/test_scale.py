"""The work and memory of a rank do not depend on the number of ranks, and one rank of any number
can be simulated: with torch's fake process group, which accepts every collective and moves
nothing."""

from __future__ import annotations

import collections
import contextlib
import gc
import sys
from collections.abc import Iterator
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

DIM = 16384  # a block has 2 * 2**28 + 4 * 2**14 elements, without padding on 8 and on 16384 ranks


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


class Calls:
    """Counts calls of functions of the package, and by them of functions in C."""

    def __init__(self) -> None:
        self.counts = {"call": 0, "c_call": 0}
        self.package = str(Path(fsdp_compat.__file__).parent)

    def __enter__(self) -> Calls:
        gc.collect()
        gc.disable()  # its work would be counted
        sys.setprofile(self._count)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event in self.counts and frame.f_code.co_filename.startswith(self.package):
            self.counts[event] += 1


def costs(use_orig_params: bool, num_ranks: int) -> list[Any]:
    """Return the calls of construction and of the third step, which is like all later ones, and
    how many tensors are alive afterwards."""
    with world(0, num_ranks):
        with Calls() as constructing:
            model = wrapped(DIM, "meta", use_orig_params=use_orig_params)
        x = torch.ones(2, DIM, device="meta")
        for _ in range(3):
            with Calls() as stepping:
                model(x).sum().backward()
                model.zero_grad()
        numel = sum(parameter.numel() for parameter in model.module[-1].parameters())
        assert numel == (2 * DIM**2 + 4 * DIM) / num_ranks
        alive = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        return [constructing.counts, stepping.counts, alive]


@both_forms
@on_ranks(1)
def test_constructing_and_training_take_the_same_steps_for_8_ranks_and_for_16384(
    use_orig_params: bool,
) -> None:
    costs(use_orig_params, 8)  # what happens once per process
    assert costs(use_orig_params, 8) == costs(use_orig_params, 16384)


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
