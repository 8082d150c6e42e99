"""Gradients over a backend's own collectives are those over sends and receives, also where they are
reduced in a wider dtype and units stay whole in forward."""

from __future__ import annotations

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

WIDTH = 192  # a block has two large matrices, and four small parameters


class Uneven(nn.Sequential):
    """The root has one large parameter, whose parts are uneven, and an unused one."""

    def __init__(self) -> None:
        super().__init__(*(Block(WIDTH) for _ in range(3)), nn.Linear(WIDTH, 401))
        self.unused = nn.Parameter(torch.ones(3))


def train(mesh: tuple[int, ...], is_native: bool, reduce_dtype: torch.dtype) -> list[Tensor]:
    """Gradients and parameters of steps, also of two backwards, and with a frozen matrix."""
    torch.manual_seed(0)
    names = ("replicate", "shard")[-len(mesh) :]
    precision = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    options = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=names), "mp_policy": precision}
    found = []
    with mock.patch.object(_torch_private, "is_gloo", lambda group, device: not is_native):
        model = shard_all(Uneven(), reshard_after_forward=False, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (step + 1 + dist.get_rank())
            if step == 2:
                with no_sync(model):
                    model(x.flip(0)).pow(2).mean().backward()
            model[0].up.weight.requires_grad_(step != 3)
            model(x).pow(2).mean().backward()
            found += [whole(p.grad) for p in model.parameters() if p.grad is not None]
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
    for one, other in zip(native, sent, strict=True):
        assert len(one) == len(other) and all(map(torch.equal, one, other))
