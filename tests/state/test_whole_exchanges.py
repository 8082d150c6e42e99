"""What optimizers and their states send: how much, at once, and over any transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import FullOptimStateDictConfig, StateDictType, _torch_private
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._comm.backend import BackendTransport
from fsdp_compat._comm.two_stages import TwoStages
from fsdp_compat.optim import GatheredOptimizer
from tests.state.test_whole_parameters import (
    adamw,
    assert_near,
    each_layout,
    expected,
    is_matrix,
    muon,
    sharded,
    train,
    values,
)
from tests.support.hosts import hosts
from tests.support.models import Layers
from tests.support.odd_model import LAYOUTS, by_rank
from tests.support.parity import groups_of
from tests.support.ranks import on_ranks


def transport_of(model: nn.Module) -> type[Any]:
    (kind,) = {type(group.shard) for group, _ in groups_of(model)}
    return kind


@contextmanager
def noted_exchanges(model: nn.Module) -> Iterator[list[tuple[int, int]]]:
    """Note the bytes that this rank sends to others, and those that it gets, of each exchange."""
    kind, noted = transport_of(model), list[tuple[int, int]]()
    exchange = kind.exchange

    def note(self: Any, tensor: Tensor, sizes: Any, what: str) -> Tensor:
        found = exchange(self, tensor, sizes, what)
        nbytes = sum(nbytes for rank, (nbytes, _) in enumerate(sizes) if rank != self.rank)
        noted.append((nbytes, found.numel()))
        return found

    with patch.object(kind, "exchange", note):
        yield noted


@each_layout
@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks("world_size")
def test_a_step_is_three_exchanges_of_about_a_shard(world_size: int, layout: str) -> None:
    model = LAYOUTS[layout](Layers())
    optimizer = sharded(model, muon)
    named = [(n, p) for n, p in Layers().named_parameters() if p.requires_grad]
    # what is in a FlatParameter with a matrix
    numel = sum(p.numel() for n, p in named if layout == "flat" or is_matrix(n, tuple(p.shape)))
    with noted_exchanges(model) as exchanges:
        train(model, optimizer, range(1))
    is_cut = layout != "original" or world_size == 4  # or each matrix lies on one rank
    assert len(exchanges) == (3 if is_cut else 0)
    # values, gradients and new values, in fp32: what this rank does not own, or owns for others
    total = sum(by_rank(sum(nbytes for nbytes, _ in exchanges)))
    assert (total > 0) == is_cut
    assert total <= 3 * 4 * numel * (world_size - 1) / world_size * 1.25


@pytest.mark.parametrize("kind", [TwoStages, BackendTransport], ids=["hosts", "backend"])
@on_ranks(4)
def test_exchanges_are_right_on_every_transport(kind: type[Any]) -> None:
    backend = patch.object(_torch_private, "is_gloo", lambda group, device: False)
    with hosts((0, 0, 1, 1)) if kind is TwoStages else backend:
        model = LAYOUTS["rows"](Layers())
        assert transport_of(model) is kind
        train(model, sharded(model, muon))
        assert_near(values(model), expected(muon), is_exact=True)


@on_ranks(3)
def test_owned_states_are_sent_to_the_rank_that_keeps_them_one_owner_at_a_time() -> None:
    layers = (nn.Linear(64, 64, bias=False) for _ in range(6))
    model = FSDP(nn.Sequential(*layers), use_orig_params=True)
    optimizer = GatheredOptimizer(model, adamw)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    config = FullOptimStateDictConfig(rank0_only=True)
    with (
        noted_exchanges(model) as exchanges,
        patch("fsdp_compat._state.rank_local._AT_ONCE_NBYTES", 1),
        FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config),
    ):
        state = FSDP.optim_state_dict(model, optimizer)
    received = [nbytes for _, nbytes in exchanges]
    moments = 2 * 64 * 64 * 4  # of one parameter; each rank owns two
    if dist.get_rank():
        assert sum(received) == 0
    else:
        assert len(state["state"]) == 6
        assert 0 < max(received) < 3 * moments
        assert sum(received) < 5 * moments
