"""Units that stay whole in forward train over a backend's own collectives."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import _torch_private
from fsdp_compat._comm.backend import BackendTransport
from tests.support.fully_sharded import api, pair_of, partial_shard
from tests.support.models import Block
from tests.support.parity import accumulates
from tests.support.ranks import on_ranks

WIDTH = 192  # a block has two large matrices, and four small parameters


class Uneven(nn.Sequential):
    """The root has one large parameter, whose parts are uneven, and an unused one."""

    def __init__(self) -> None:
        super().__init__(*(Block(WIDTH) for _ in range(3)), nn.Linear(WIDTH, 401))
        self.unused = nn.Parameter(torch.ones(3))


def batch(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


@pytest.mark.parametrize(
    ("ranks", "mesh", "dtype"),
    [(2, (2,), torch.float32), (2, (2,), torch.float64), (4, (2, 2), torch.float32)],
)
@on_ranks("ranks")
def test_gradients_over_a_backends_own_collectives_are_those_of_the_unsharded_model(
    ranks: int, mesh: tuple[int, ...], dtype: torch.dtype
) -> None:
    names = ("replicate", "shard")[-len(mesh) :]
    shard = partial_shard(
        reshard_after_forward=False,
        mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names),
        mp_policy=api.MixedPrecisionPolicy(reduce_dtype=dtype),
    )
    with mock.patch.object(_torch_private, "is_gloo", lambda group, device: False):
        pair = pair_of(Uneven, shard, batch=batch)
        for pattern, trains in (("s", True), ("ns", True), ("s", False)):
            for model in (pair.plain, pair.model):
                model[0].up.weight.requires_grad_(trains)
            pair.step(partial(accumulates, pattern))
    assert isinstance(pair.model._get_fsdp_state().runtime.groups[0].shard, BackendTransport)
