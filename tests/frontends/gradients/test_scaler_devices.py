"""The check for non-finite gradients is reduced on a device that the process group supports: shown
for tensors that have a device and no values, as the backends need hardware."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compat._comm import communicator


@pytest.mark.parametrize(
    ("backends", "device", "sent_from"),
    [
        # A CPU tensor cannot move to "cuda" without CUDA, even in this simulation.
        ("meta:nccl", "cpu", "meta"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda", "cuda"),
        ("cpu:gloo", "cuda", "cpu"),
    ],
)
def test_the_found_inf_flag_is_reduced_on_a_device_of_the_group(
    backends: str, device: str, sent_from: str
) -> None:
    sent: list[str] = []

    class ReducePlan:
        def max_of(self, values: Tensor, what: str) -> Tensor:
            sent.append(values.device.type)
            return values

    with (
        FakeTensorMode(),
        mock.patch.object(communicator, "axis_of", lambda group: types.SimpleNamespace(ranks=2)),
        mock.patch.object(communicator, "communicator", lambda axis, device: ReducePlan()),
        mock.patch.object(communicator, "is_in_python", lambda group: False),
        mock.patch.object(dist, "get_backend_config", lambda group: backends),
    ):
        group: Any = object()
        found = communicator.max_in_group(group, torch.zeros((), device=device), "a test")
    assert (sent, found.device.type) == ([sent_from], device)
