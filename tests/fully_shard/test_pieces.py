"""Gradients that are reduced in a wider dtype, where units stay whole in forward: a backend's own
collectives get them in pieces, all pieces of a unit in one call, and their sums are those of one
buffer."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import _torch_private
from fsdp_compat._comm.native import CoalescingTransport
from tests.support.fully_sharded import (
    NotedReduceScatter,
    api,
    require_sync,
    shard_all,
    sharded_modules,
    whole,
)
from tests.support.models import Block
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
    begin = CoalescingTransport.begin_reduce_pieces
    numbers: list[int] = []  # of pieces, per collective

    def noted(self: CoalescingTransport, buffers: Any) -> Any:
        numbers.append(len(buffers))
        return begin(self, buffers)

    found = []
    with (
        mock.patch.object(_torch_private, "is_gloo", lambda group, device: not is_native),
        mock.patch.object(CoalescingTransport, "begin_reduce_pieces", noted),
    ):
        model = make(mesh, reduce_dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(NUM_STEPS):
            x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (step + 1 + dist.get_rank())
            if step == 2:
                require_sync(model, False)
                model(x.flip(0)).pow(2).mean().backward()
                require_sync(model, True)
            model[0].up.weight.requires_grad_(step != 3)
            numbers.clear()
            model(x).pow(2).mean().backward()
            if is_native:
                # of blocks and of the root: large parameters, and the rest
                assert numbers == [3, 3, 2 if step == 3 else 3, 2]
            found += [
                whole(parameter.grad)
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
            optimizer.step()
            optimizer.zero_grad()
    return found + [whole(parameter).clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("mesh", "reduce_dtype"),
    [((2,), torch.float32), ((2,), torch.float64), ((2, 2), torch.float32)],
)
def test_sums_are_bit_equal_to_those_of_one_buffer(
    mesh: tuple[int, ...], reduce_dtype: torch.dtype
) -> None:
    ranks = 2 * len(mesh)
    pieces, whole_buffers = (
        run_ranks(ranks, train, mesh, is_native, reduce_dtype) for is_native in (True, False)
    )
    for rank in range(ranks):
        assert len(pieces[rank]) == len(whole_buffers[rank])
        assert all(map(torch.equal, pieces[rank], whole_buffers[rank]))


class Some(nn.Module):
    """The first rank alone uses ``first``, and no rank ``never``."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.never = (nn.Linear(WIDTH, 401) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) + self.first(x * 0) if dist.get_rank() == 0 else self.last(x)


def uses_some() -> list[str]:
    with mock.patch.object(_torch_private, "is_gloo", lambda group, device: False):
        model: Any = Some()
        policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        api.fully_shard(model, reshard_after_forward=False, mp_policy=policy)
        model(torch.ones(1, WIDTH)).sum().backward()
    return [name for name, p in model.named_parameters() if p.grad is not None]


def test_pieces_tell_which_parameters_some_rank_has_used() -> None:
    expected = ["last.weight", "last.bias", "first.weight", "first.bias"]
    assert run_ranks(2, uses_some) == [expected, expected]


def reduces_by_custom(is_native: bool) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Gradients of a step with reduce-scatters of the user, and the sizes that these were given."""
    with mock.patch.object(_torch_private, "is_gloo", lambda group, device: not is_native):
        model = make((2,), torch.float32)
        custom = NotedReduceScatter()
        for module in sharded_modules(model):
            module.set_custom_reduce_scatter(custom)
        model(torch.ones(2, WIDTH) * (1 + dist.get_rank())).pow(2).mean().backward()
    grads = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    return grads, [call["numel"] for call in custom.calls]


def test_a_users_reduce_scatter_gets_one_buffer() -> None:
    for pieces, whole_buffers in zip(
        *(run_ranks(2, reduces_by_custom, is_native) for is_native in (True, False)), strict=True
    ):
        assert len(pieces[1]) == len(whole_buffers[1]) == NUM_BLOCKS + 1
        for (total, buffer), (expected, _) in zip(pieces[1], whole_buffers[1], strict=True):
            assert buffer == 2 * total
            assert 0 <= total - expected < 16  # each piece has marks, in whole units of alignment
        assert len(pieces[0]) == len(whole_buffers[0])
        assert all(map(torch.equal, pieces[0], whole_buffers[0]))
