"""Tests of a CUDA device. Without one, all of this folder is skipped, and nothing else in the suite
is.

pytest tests/gpu                        on the first CUDA device, as rank 0 of 8 on a fake group and
on NCCL with one rank pytest tests/gpu --gpu-device cpu       the same functions on the CPU (gloo
instead of NCCL), to see that they run"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-device",
        default="cuda:0",
        help="where tests/gpu run; cpu: to try the tests themselves",
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
