"""Settings of all tests: rank processes end with the session, hypothesis has no deadline."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.ranks import close_pool

# The first example that calls run_ranks starts processes, which takes longer than any deadline.
settings.register_profile("fsdp_compat", deadline=None)
settings.load_profile("fsdp_compat")


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than processors: some tests wait more than they compute."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow tests first: at the end, workers without tests would wait for one of them."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def rank_processes() -> Iterator[None]:
    """End the processes that tests.support.ranks.run_ranks started."""
    yield
    close_pool()
