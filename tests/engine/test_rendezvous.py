"""Which ranks have to make a collective call, and how the check is configured. The mechanism is
tested in tests/comm/test_store_rendezvous.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import UsageError
from fsdp_compat._comm.divergence.store_rendezvous import StoreRendezvous
from fsdp_compat._engine import rendezvous
from tests.support.ranks import on_ranks


@on_ranks(3)
def test_rendezvous_of_a_larger_group_includes_the_smaller_ones() -> None:
    """The members of every rendezvous of two models over all ranks, and one over two."""
    rank, met = dist.get_rank(), list[tuple[int, ...]]()
    pair = dist.new_group([0, 1])
    models = [FSDP(nn.Linear(4, 4), process_group=pair)] if rank < 2 else []
    models += [FSDP(nn.Linear(4, 4)), FSDP(nn.Linear(4, 4))]
    meet = StoreRendezvous.meet

    def noted(self: Any, *args: Any) -> None:
        met.append(self.activity.members)
        meet(self, *args)

    with mock.patch.object(StoreRendezvous, "meet", noted):
        groups = [group for model in models for group in model._runtime.groups]
        rendezvous.require_all_ranks("call", groups)
        with rendezvous.nested("outer", models[-1]._runtime.groups):
            models[-1].state_dict()
        if rank < 2:
            models[0].state_dict()
    assert met == [(0, 1, 2), (0, 1, 2)] + [(0, 1)] * (rank < 2)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "", "inf", "nan"])
def test_register_refuses_an_invalid_limit(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FSDP_COMPAT_MEET_TIMEOUT", text)
    with pytest.raises(UsageError, match="FSDP_COMPAT_MEET_TIMEOUT is not a number of seconds"):
        rendezvous.register([])
    monkeypatch.setenv("FSDP_COMPAT_MEET", "0")
    rendezvous.register([])
