"""Gradients over a backend's own collectives are those over sends and receives, also where they are
reduced in a wider dtype and units stay whole in forward."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import _torch_private
from fsdp_compat._comm.backend import BackendTransport
from tests.support.fully_sharded import api, shard_all
from tests.support.models import Block
from tests.support.parity import no_sync, whole
from tests.support.ranks import run_ranks

WIDTH, NUM_BLOCKS = 192, 3  # a block has two large matrices, and four small parameters
NUM_STEPS = 4


class Uneven(nn.Sequential):
    """The root has one large parameter, whose parts are uneven, and an unused one."""

    def __init__(self) -> None:
        super().__init__(*(Block(WIDTH) for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 401))
        self.unused = nn.Parameter(torch.ones(3))


def make(mesh: tuple[int, ...], reduce_dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    names = ("replicate", "shard")[-len(mesh) :]
    return shard_all(
        Uneven(),
        mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names),
        reshard_after_forward=False,
        mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype),
    )


def train(
    mesh: tuple[int, ...], is_native: bool, reduce_dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Gradients and parameters of steps: two of one backward, one of two backwards, one with a
    frozen matrix."""
    found = []
    with mock.patch.object(_torch_private, "is_gloo", lambda group, device: not is_native):
        model = make(mesh, reduce_dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(NUM_STEPS):
            x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (step + 1 + dist.get_rank())
            if step == 2:
                with no_sync(model):
                    model(x.flip(0)).pow(2).mean().backward()
            model[0].up.weight.requires_grad_(step != 3)
            model(x).pow(2).mean().backward()
            found += [
                whole(parameter.grad)
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
            optimizer.step()
            optimizer.zero_grad()
    shard = model._get_fsdp_state().runtime.groups[0].shard
    assert isinstance(shard, BackendTransport) == is_native
    return found + [whole(parameter).clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("mesh", "reduce_dtype"),
    [((2,), torch.float32), ((2,), torch.float64), ((2, 2), torch.float32)],
)
def test_sums_are_bit_equal_to_those_over_sends_and_receives(
    mesh: tuple[int, ...], reduce_dtype: torch.dtype
) -> None:
    ranks = 2 * len(mesh)
    native, sent = (
        run_ranks(ranks, train, mesh, is_native, reduce_dtype) for is_native in (True, False)
    )
    for rank in range(ranks):
        assert len(native[rank]) == len(sent[rank])
        assert all(map(torch.equal, native[rank], sent[rank]))
