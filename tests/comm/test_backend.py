"""Training over BackendTransport matches unsharded training; the backend is gloo here."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_compat import MixedPrecision, ShardingStrategy, _torch_private
from fsdp_compat._comm.backend import BackendTransport
from fsdp_compat._comm.communicator import communicator
from fsdp_compat._comm.mesh import axis_of
from fsdp_compat._comm.transport import Kind
from tests.support.models import Block, Inner, Outer, Stack
from tests.support.parity import make_pair, one_backward
from tests.support.ranks import on_ranks, run_ranks

FP64 = torch.float64
GATHERED_AND_REDUCED = {Kind.GATHER, Kind.REDUCE}


def _trains(replicas: int = 1, **options: Any) -> set[Kind]:
    """Return the kinds of collectives that were used."""
    with mock.patch.object(_torch_private, "is_gloo", lambda group, device: False):
        pair = make_pair(
            lambda: Stack(2, Outer), (Outer, Inner, Block), replicas=replicas, **options
        )
    communicators = {
        each
        for group in pair.model._runtime.groups
        for each in (group.shard, group.replica)
        if each.ranks > 1
    }
    assert {type(each) for each in communicators} == {BackendTransport}
    for _ in range(3):
        pair.step(one_backward)
    pair.step(one_backward, as_a_user=True)
    assert pair.model.clip_grad_norm_(1.0) == 0  # the gradients were cleared
    return {kind for each in communicators for kind, n in each.traffic.counts.items() if n}


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sharded_training_matches_unsharded(num_ranks: int, use_orig_params: bool) -> None:
    assert (
        run_ranks(num_ranks, _trains, use_orig_params=use_orig_params)
        == [GATHERED_AND_REDUCED] * num_ranks
    )


def test_replicated_training_matches_unsharded() -> None:
    assert (
        run_ranks(2, _trains, sharding_strategy=ShardingStrategy.NO_SHARD) == [{Kind.REPLICATE}] * 2
    )


def test_hybrid_training_matches_unsharded() -> None:
    assert run_ranks(4, _trains, replicas=2) == [GATHERED_AND_REDUCED | {Kind.REPLICATE}] * 4


def test_gradients_reduced_in_float64_are_stored_in_float32() -> None:
    precision = MixedPrecision(reduce_dtype=FP64)
    assert run_ranks(2, _trains, mixed_precision=precision) == [GATHERED_AND_REDUCED] * 2


@on_ranks(2)
def test_objects_are_gathered_on_the_device_of_the_model() -> None:
    second, found = torch.device("cuda", 1), list[torch.device]()

    def zeros(*args: Any, device: torch.device, **kwargs: Any) -> torch.Tensor:
        found.append(device)
        return real(*args, **kwargs)

    comm, real = communicator(axis_of(dist.group.WORLD), second), torch.zeros
    with (
        mock.patch.object(torch, "zeros", zeros),
        mock.patch.object(torch, "tensor", lambda value, device: real(()).long() + value),
    ):
        assert comm.gather_objects("abc"[: comm.rank + 1]) == ["a", "ab"]
    [device] = found
    assert device == torch.device("cuda", 1)
