"""Tests of a CUDA device. Without one, all tests of this folder are skipped, and no others.

    pytest -n 0 tests/gpu                     # on the first CUDA device
    pytest -n 0 tests/gpu --gpu-device cpu    # on the CPU, to check that the tests run

They run as rank 0 of 8 on a fake group, and as the only rank on NCCL (on the CPU: gloo)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-device",
        default="cuda:0",
        help="the device for tests/gpu; cpu checks the tests themselves",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = torch.device(config.getoption("--gpu-device", default="cuda:0"))
    if device.type != "cuda" or torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--gpu-device", default="cuda:0"))
