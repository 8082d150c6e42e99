"""Tests of an accelerator.

    pytest tests/gpu                            # on the machine's accelerator
    pytest tests/gpu --gpu-device emulated:0    # on a device that is emulated on the CPU
    pytest tests/gpu --gpu-device cpu           # without streams, to check that the tests run
    FOLDER/bin/pytest tests/gpu --gpu-device cuda:0  # on fakecuda, with the CUDA build of torch

The last one is for an environment that tests/support/fakecuda/build.py made. Without an accelerator
the tests are skipped, except for those with the fixtures ``emulated_device`` and
``recorded_device``, which run on the emulated device (tests/support/emulated) if there is a C++
compiler, which it needs for half a minute. Most tests run as rank 0 of 8 on a fake group, and as
the only rank on the device's backend (on the CPU: gloo). Those of test_cuda_build.py and
test_hangs.py, and some of test_state.py, need several devices of fakecuda."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support import emulated, fakecuda
from tests.support.ranks import close_pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-device",
        default="",
        help="the device for tests/gpu, such as cuda:0, emulated:0 or cpu; default: the machine's "
        "accelerator",
    )


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The device to test."""
    name = str(request.config.getoption("--gpu-device", default=""))
    if name.startswith(emulated.NAME):
        return str(request.getfixturevalue("emulated_device"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if not name and accelerator is None:
        pytest.skip("needs an accelerator, or --gpu-device")
    return name or f"{accelerator}:0"


@pytest.fixture(scope="module")
def emulated_device() -> Iterator[str]:
    """The emulated device, in processes that end with the module: elsewhere there is none."""
    if reason := emulated.why_not():
        pytest.skip(reason)
    if torch.cuda.is_available():
        pytest.skip("torch has another accelerator than the emulated device")
    emulated.build()
    close_pool()
    yield f"{emulated.NAME}:0"
    close_pool()


@pytest.fixture(scope="module")
def recorded_device(request: pytest.FixtureRequest) -> str:
    """A device whose work is recorded: fakecuda's, where torch runs on it, or the emulated one."""
    return "cuda:0" if fakecuda.is_used() else str(request.getfixturevalue("emulated_device"))


@pytest.fixture
def real_device(device: str) -> str:
    if device.startswith(emulated.NAME):
        pytest.skip("the emulated device has no backend, and memory of other kernels")
    return device
