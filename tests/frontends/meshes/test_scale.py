"""The work and memory of a rank do not depend on the number of ranks, and one rank of any number
can be simulated.

The ranks are those of torch's fake process group, which accepts every collective and moves nothing,
in a separate process."""

from __future__ import annotations

import dataclasses
import functools
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compat
from fsdp_compat import CPUOffload, FullyShardedDataParallel, MixedPrecision, UsageError
from fsdp_compat._engine.state_store import store_of
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.time_limit import limit_s

ROOT = Path(__file__).parents[3]
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


def wrapped(dim: int, device: str, **options: Any) -> FullyShardedDataParallel:
    with torch.device(device):
        model = nn.Sequential(*(Block(dim) for _ in range(3)))
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device(device), **options
    )


def costs(use_orig_params: bool) -> Costs:
    gc.collect()
    gc.disable()  # its work would be counted
    constructing, model = counted_calls(
        functools.partial(wrapped, DIM, "meta", use_orig_params=use_orig_params)
    )
    x = torch.ones(2, DIM, device="meta")

    def step() -> None:
        model(x).sum().backward()
        for parameter in parameters:
            parameter.grad = None

    parameters = list(model.parameters())
    step()
    step()
    stepping, _ = counted_calls(step)
    gc.enable()
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return Costs(constructing, stepping, tensors, store_of(model._runtime.groups[-1]).numel)


def in_world(world_size: int, rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on one of ``world_size`` ranks, the others of which do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


def all_costs() -> dict[tuple[bool, int, int], Costs]:
    """Return the costs by (use_orig_params, rank counted from the last one, world size)."""
    in_world(8, 0, costs, True)  # what happens once per process
    return {
        (original, rank, ranks): in_world(ranks, rank % ranks, costs, original)
        for original in (False, True)
        for rank in (0, -1)
        for ranks in WORLD_SIZES
    }


def facts(device: str) -> list[Any]:
    """Return the layout of the parameters, and the traffic of a step."""
    model = wrapped(6, device, mixed_precision=MixedPrecision(torch.bfloat16), use_orig_params=True)
    groups = model._runtime.groups
    model(torch.ones(2, 6, device=device)).sum().backward()
    return [
        [store_of(group).layout for group in groups],
        {name: parameter.shape for name, parameter in model.named_parameters()},
        [
            None if parameter.grad is None else parameter.grad.shape
            for parameter in model.parameters()
        ],
        dict(groups[0].shard.traffic.nbytes),
    ]


def refused(**options: Any) -> str:
    try:
        wrapped(6, "meta", **options)
    except UsageError as error:
        return str(error)
    return "nothing"


@dataclasses.dataclass(frozen=True)
class Found:
    costs: dict[tuple[bool, int, int], Costs]
    facts: dict[str, list[Any]]  # by device
    refused: dict[str, str]
    outlived: list[bool]


def everything() -> Found:
    gc.freeze()  # collections need not visit imported objects
    return Found(
        all_costs(),
        {device: in_world(5, 3, facts, device) for device in ("cpu", "meta")},
        {
            name: in_world(4, 0, functools.partial(refused, **{name: value}))
            for name, value in {"cpu_offload": CPUOffload(True), "allow_unused_units": True}.items()
        },
        in_world(8, 0, parts_that_outlive_their_model),
    )


def parts_that_outlive_their_model() -> list[bool]:
    """Return whether parts of a model outlive it. Its parameters are large: they have hooks."""
    model = wrapped(DIM, "meta")
    model(torch.ones(2, DIM, device="meta")).sum().backward()
    unit = model._runtime.root
    parts = [weakref.ref(unit), *map(weakref.ref, model._runtime.groups)]
    del model, unit
    gc.collect()
    return [part() is not None for part in parts]


@pytest.fixture(scope="module")
def found() -> Found:
    """Return the measurements of a separate process, because the ranks of this one are real."""
    program = (
        f"import pickle, sys; from {__name__} import everything; "
        "sys.stdout.buffer.write(pickle.dumps(everything()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        cwd=ROOT,
        timeout=limit_s(),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    answer = pickle.loads(ended.stdout)
    assert isinstance(answer, Found)
    return answer


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_constructing_and_training_take_the_same_steps_for_8_ranks_and_for_16384(
    found: Found, use_orig_params: bool
) -> None:
    few, many = (found.costs[use_orig_params, 0, ranks] for ranks in WORLD_SIZES)
    assert (few.shard_numel, many.shard_numel) == (2**26 + 2**13, 2**15 + 2**2)
    assert many.constructing == few.constructing
    assert many.stepping == few.stepping
    assert many.tensors == few.tensors
    # The last ranks hold parts of more, or fewer, parameters.
    few, many = (found.costs[use_orig_params, -1, ranks] for ranks in WORLD_SIZES)
    assert many.constructing <= few.constructing
    assert many.stepping <= few.stepping
    assert many.tensors == few.tensors


def test_a_simulated_rank_has_the_layouts_and_sends_the_bytes_of_a_real_one(found: Found) -> None:
    assert found.facts["meta"] == found.facts["cpu"]
    assert found.facts["meta"][-1]  # traffic was counted


def test_operations_that_need_values_cannot_be_simulated(found: Found) -> None:
    for name, message in found.refused.items():
        assert name in message and "meta" in message


def test_a_model_with_large_parameters_is_freed_completely(found: Found) -> None:
    assert not any(found.outlived)
