"""What all tests share: the end of the rank processes, and hypothesis without a deadline."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.ranks import close_pool

# The first example that calls run_ranks starts processes, which no deadline per example survives.
settings.register_profile("fsdp_compat", deadline=None)
settings.load_profile("fsdp_compat")


@pytest.fixture(scope="session", autouse=True)
def rank_processes() -> Iterator[None]:
    """End the processes of tests.support.ranks.run_ranks, which start on its first use, with the
    session."""
    yield
    close_pool()
