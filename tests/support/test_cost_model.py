"""The cost model: who slows down whom, and times of an H100."""

from __future__ import annotations

import pytest

from tests.support.cost_model import H100, Demand, speeds


def test_only_those_that_want_too_much_of_something_slow_down() -> None:
    whole, half = Demand(memory=1.0), Demand(memory=0.5, multiprocessors=1.0)
    slow = pytest.approx(1 / 1.5)
    assert speeds([whole, half, Demand(network=1.0)]) == [slow, slow, 1.0]
    assert (speeds([half]), speeds([])) == ([1.0], [])


def test_one_layer_of_7_billion_parameters_takes_4_ms_on_an_h100() -> None:
    assert H100.kernel(400e6, 2 * 200e6 * 4096).seconds == pytest.approx(4.1e-3, rel=0.01)
    assert H100.all_gather(400e6, range(8)).seconds == pytest.approx(1.0e-3, rel=0.01)
    assert H100.all_gather(400e6, range(64)).seconds == pytest.approx(8.8e-3, rel=0.01)
