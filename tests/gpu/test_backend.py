"""The backend of a device itself, on one rank."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_compat import ShardingStrategy
from fsdp_compat._comm.backend import BackendTransport
from fsdp_compat._comm.mesh import Axis
from fsdp_compat._engine import group as engine_group
from tests.support.models import Large, chain
from tests.support.parity import both_forms
from tests.support.ranks import on_ranks
from tests.support.twin import device_named, group_of, twin_of

pytestmark = pytest.mark.gpu


def transport(axis: Axis | None, device: torch.device) -> BackendTransport:
    return BackendTransport(Axis(dist.group.WORLD, 0, (0,)), device)


@on_ranks(1)
def test_the_backend_transfers_the_given_tensors(real_device: str) -> None:
    place = device_named(real_device)
    with group_of(1, place):
        comm = transport(None, place)
        own, full = torch.arange(1024.0, device=place), torch.zeros(1024, device=place)
        comm.end_gather(comm.begin_gather(own, full, [full], comm.new_tag("")), "parameters")
        assert torch.equal(full, own)
        summed = comm.end_reduce(
            comm.begin_reduce(full, [full], comm.new_tag("")),
            full,
            torch.float32,
            "gradients",
            None,
        )
        full.zero_()
        assert torch.equal(summed, own)
        pending = comm.begin_all_reduce(summed, comm.new_tag(""))
        comm.end_all_reduce(
            comm.continue_all_reduce(pending, summed, 0, "gradients"), summed, "gradients"
        )
        assert torch.equal(summed, own)
        assert torch.equal(comm.gather_now(own, "a test"), own)
        assert comm.gather_objects({"rank": 0}) == [{"rank": 0}]


@both_forms
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(1)
def test_one_rank_trains_over_the_backend_itself(
    real_device: str, strategy: str, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": use_orig_params}
    build = functools.partial(chain, Large, Large)
    patched = mock.patch.object(engine_group, "communicator", transport)
    with patched, twin_of(real_device, 1, build, (Large,), **options) as twin:
        for _ in range(4):
            twin.step()
