"""How many kernels a unit adds to those of the unsharded model, in a step: they do not grow with
the number of its parameters. FSDP2 adds 7 in bf16, 10 in fp16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compat import MixedPrecision
from tests.support.emulated import nccl
from tests.support.order import Op
from tests.support.ranks import on_ranks
from tests.support.twin import sharded

RANKS = 8
WIDTH = 16
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)


class Block(nn.Module):
    """Layers of an odd width leave gaps between parameters."""

    def __init__(self, scalars: int, unused: int, width: int) -> None:
        super().__init__()
        self.used = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.spare = nn.ModuleList(nn.Linear(width, width) for _ in range(unused))
        self.scales = nn.ParameterList(torch.tensor(2.0) for _ in range(scalars))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.used:
            x = layer(x)
        for scale in self.scales:
            x = x * scale
        return x


def kernels(
    front_end: str | None, dtypes: MixedPrecision, passes: int, blocks: int, *block_args: int
) -> int:
    """Return how many kernels a step runs. front_end: None for the unsharded model."""
    trained = nn.Sequential(*(Block(*block_args) for _ in range(blocks)))
    device = torch.device("emulated", 0)
    if front_end is None:
        trained.to(device, dtypes.param_dtype)
    else:
        options: dict[str, Any] = {"units": (Block,), "device_id": device}
        trained = sharded(trained, front_end, mixed_precision=dtypes, **options)
    x = torch.randn(2, block_args[-1], dtype=dtypes.param_dtype).to(device)
    for _ in range(2):  # the first allocates and records orders
        trained.zero_grad()
        with nccl.recording() as recording:
            for _ in range(passes):
                trained(x).square().mean().backward()
    return sum(type(each) is Op for each in recording.happenings)


@pytest.mark.parametrize(
    ("front_end", "dtypes", "scalars", "unused", "width", "passes", "expected"),
    [
        ("flat", BF16, 0, 0, WIDTH, 1, 4),
        ("flat", BF16, 0, 0, WIDTH - 1, 1, 5),
        ("flat", BF16, 0, 5, WIDTH, 1, 5),
        ("flat", BF16, 3, 0, WIDTH, 1, 5),
        ("flat", FP16, 0, 0, WIDTH, 1, 6),
        ("fully_shard", BF16, 0, 0, WIDTH, 1, 6),
        ("fully_shard", BF16, 0, 0, WIDTH - 1, 1, 6),
        ("fully_shard", BF16, 0, 5, WIDTH, 1, 7),  # beside one copy to the host
        ("fully_shard", BF16, 1, 0, WIDTH, 1, 7),
        ("fully_shard", BF16, 3, 0, WIDTH, 1, 9),  # one per 0-d parameter
        ("fully_shard", FP16, 0, 0, WIDTH, 1, 8),
        ("fully_shard", FP16, 0, 5, WIDTH, 1, 9),
        # Gradients are added by one kernel, those of the unsharded model by 8.
        ("fully_shard", BF16, 0, 0, WIDTH, 2, 2 * 6 + 1 - 8),
    ],
)
@on_ranks(1)
def test_a_unit_adds_few_kernels(
    emulated_device: str,
    front_end: str,
    dtypes: MixedPrecision,
    scalars: int,
    unused: int,
    width: int,
    passes: int,
    expected: int,
) -> None:
    nccl.use()
    with nccl.group_of(RANKS):
        counts = [
            kernels(name, dtypes, passes, blocks, scalars, unused, width)
            for name in (front_end, None)
            for blocks in (3, 4)
        ]
    assert (counts[1] - counts[0]) - (counts[3] - counts[2]) == expected
