"""Settings of all tests: rank processes end with the session, and hypothesis has no deadline.

FSDP_COMPAT_TEST_ALL=1 in the environment: all cases of large matrices and many more random examples
(tests/support/sampling.py, tests/support/pairwise.py), of which a fixed sample is run otherwise."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.programs import Launcher
from tests.support.ranks import close_pool
from tests.support.sampling import EXTENT

# The first example that calls run_ranks starts processes, which takes longer than any deadline.
settings.register_profile("fsdp_compat", deadline=None)
settings.load_profile("fsdp_compat")

# Workers and their ranks and programs read the bytecode of the first one that imports a module.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than processors, at most 4: some tests wait more than they compute."""
    return min(4, (os.cpu_count() or 1) + 1)


def pytest_report_header() -> str:
    return EXTENT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow tests first: at the end, workers without tests would wait for one of them."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Collections of garbage need not visit modules and tests, which stay until the end."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def rank_processes() -> Iterator[None]:
    """End the processes that tests.support.ranks.run_ranks started."""
    yield
    close_pool()
    gc.freeze()  # nor does the end of this process


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """It has imported torch's DTensors, and nothing of torch.distributed.fsdp."""
    launcher = Launcher("torch.distributed.tensor", options=("-W", "ignore"))
    yield launcher
    launcher.close()
