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


@pytest.mark.parametrize(
    ("ranks", "options", "kinds"),
    [
        (2, {"use_orig_params": False}, GATHERED_AND_REDUCED),
        (3, {"use_orig_params": True}, GATHERED_AND_REDUCED),
        (2, {"sharding_strategy": ShardingStrategy.NO_SHARD}, {Kind.REPLICATE}),
        (4, {"replicas": 2}, GATHERED_AND_REDUCED | {Kind.REPLICATE}),
        (2, {"mixed_precision": MixedPrecision(reduce_dtype=FP64)}, GATHERED_AND_REDUCED),
    ],
)
def test_training_matches_unsharded(ranks: int, options: dict[str, Any], kinds: set[Kind]) -> None:
    assert run_ranks(ranks, _trains, **options) == [kinds] * ranks


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
