"""Live bytes of a step, beyond parameters, gradients and optimizer state: the peak, its tensors,
and that it is the same in every step.

The model is four units of three matrices of 256 x 256, large enough that each gradient is moved as
it comes. The batch is one row, so that activations and other small tensors take less than a tenth
of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compat import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.live_bytes import LiveBytes, tensors_alive
from tests.support.ranks import run_ranks

WIDTH, UNITS = 256, 4
MATRIX = WIDTH * WIDTH  # elements


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Training:
    """Steps of a sharded model, and the peak of each."""

    def __init__(self, in_place: bool = False, **options: Any) -> None:
        """in_place: by fully_shard. options: of the front end."""
        self.others = tensors_alive()  # of earlier tests in this process
        self.model: nn.Module = nn.Sequential(*(Three() for _ in range(UNITS)))
        if in_place:
            for unit in (*self.model, self.model):
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
                fully_shard(unit, mesh=mesh, **options)
        else:
            self.model = FullyShardedDataParallel(
                self.model, auto_wrap_policy=ModuleWrapPolicy({Three}), **options
            )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def shards(self) -> list[torch.Tensor]:
        """Those of sharded parameters that have storage objects of their own."""
        if isinstance(self.model, FullyShardedDataParallel):
            return []
        runtime = self.model._get_fsdp_state().runtime
        return [group.store.shard for group in runtime.groups]

    def step(self, look: Callable[[], None] = lambda: None) -> None:
        self.model(torch.ones(1, WIDTH)).float().pow(2).mean().backward()
        look()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bytes_of_steps(self, number: int) -> list[tuple[int, int]]:
        """Return (peak, bytes left afterwards) per step, after three that record orders and create
        optimizer states."""
        found: list[tuple[int, int]] = []

        def look() -> None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            grads = [p.grad for p in parameters if p.grad is not None]
            momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
            kept = [getattr(t, "_local_tensor", t) for t in (*parameters, *grads, *momenta)]
            live.leave_out([*self.others, *self.shards(), *kept])
            found.append((live.peak().nbytes, live.now()))

        for _ in range(3):
            self.step()
        with LiveBytes() as live:
            for _ in range(number):
                live.forget()
                self.step(look)
        return found


def bytes_of_steps(number: int, **options: Any) -> list[tuple[int, int]]:
    return Training(**options).bytes_of_steps(number)


def bytes_of_steps_as_one_of_eight(number: int, **options: Any) -> list[tuple[int, int]]:
    """Use a process group that moves nothing."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    return bytes_of_steps(number, **options)


def matrices(steps: list[tuple[int, int]], itemsize: int) -> float:
    """Return the peak, which all steps must share, in matrices of elements of so many bytes."""
    (peak,) = {peak for peak, _ in steps}
    return peak / (MATRIX * itemsize)


PRE = BackwardPrefetch.BACKWARD_PRE


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({}, 3 + 3 + 3 + 1),  # two units, a reduce buffer, a gradient
        ({"limit_all_gathers": False}, 3 + 3 + 2 * 3 + 1),
        ({"backward_prefetch": None}, 3 + 3 + 1),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, UNITS * 3 + 3 + 1),
    ],
)
def test_peak_is_two_units_a_reduce_buffer_and_a_gradient(
    options: dict[str, Any], held: int, use_orig_params: bool
) -> None:
    options = {"backward_prefetch": PRE, "use_orig_params": use_orig_params, **options}
    (found,) = run_ranks(1, bytes_of_steps_as_one_of_eight, 2, **options)
    assert held <= matrices(found, itemsize=4) < held + 0.1


@pytest.mark.parametrize(("prefetch", "held"), [(PRE, 3 + 3 + 2 * 3 + 1), (None, 3 + 2 * 3 + 1)])
def test_mixed_precision_peak_follows_the_dtypes_of_communication(
    prefetch: BackwardPrefetch | None, held: int
) -> None:
    options = {
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32),
        "backward_prefetch": prefetch,
    }
    (found,) = run_ranks(1, bytes_of_steps_as_one_of_eight, 2, **options)
    cast = 3 / 8  # of the shard, while a prefetch is in flight
    assert held <= matrices(found, itemsize=2) < held + cast + 0.1


def test_a_wider_reduce_buffer_takes_memory_after_a_unit_has_been_resharded() -> None:
    """At the worst moment all other units are whole, and the gradients of the first one are
    complete. With a buffer from its first gradient on it would be one matrix more."""
    (found,) = run_ranks(
        1,
        bytes_of_steps_as_one_of_eight,
        2,
        in_place=True,
        reshard_after_forward=False,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    held = (UNITS - 1) * 3 + 3 + 2 * 3
    assert held <= matrices(found, itemsize=2) < held + 0.1


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_two_ranks_hold_the_same_memory_in_every_step(use_orig_params: bool) -> None:
    for found in run_ranks(2, bytes_of_steps, 5, use_orig_params=use_orig_params):
        assert 10 <= matrices(found, itemsize=4) < 10.1
        assert len({left for _, left in found}) == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_memory_does_not_grow_in_twenty_steps(in_place: bool) -> None:
    (found,) = run_ranks(1, bytes_of_steps_as_one_of_eight, 20, in_place=in_place)
    assert len(found) == 20
    assert len(set(found)) == 1
    assert found[0][1] < 0.1 * 4 * MATRIX
