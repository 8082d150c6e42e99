"""The cost model: literal times of a machine of round numbers."""

from __future__ import annotations

import pytest

from tests.support.cost_model import H100, Link, Machine

MACHINE = Machine(
    flops=1000.0,
    memory_bandwidth=100.0,
    launch_s=0.5,
    node=Link(50.0, 1.0),
    network=Link(10.0, 2.0),
    ranks_per_node=4,
)


@pytest.mark.parametrize(
    "nbytes, flops, seconds",
    [
        (200, 0, 2.0),
        (10, 0, 0.5),  # the launch
        (200, 1000, 2.0),  # memory
        (200, 4000, 4.0),  # the product
    ],
)
def test_a_kernel_takes_what_limits_it(nbytes: int, flops: int, seconds: float) -> None:
    assert MACHINE.kernel_s(nbytes, flops) == seconds


def test_a_collective_takes_the_latency_and_what_is_received() -> None:
    assert MACHINE.collective_s(300, range(4)) == 1 + 300 / 50


def test_ranks_of_several_nodes_use_the_network() -> None:
    assert not MACHINE.spans_nodes(range(4, 8))
    assert MACHINE.spans_nodes((0, 4))
    assert MACHINE.collective_s(100, (0, 4)) == 2 + 100 / 10


def test_a_group_of_one_rank_sends_nothing() -> None:
    assert MACHINE.collective_s(400, (3,)) == 0.0


def test_one_layer_of_7_billion_parameters_takes_4_ms_on_an_h100() -> None:
    assert H100.kernel_s(400e6, 2 * 200e6 * 4096) == pytest.approx(4.1e-3, rel=0.01)
    assert H100.collective_s(400e6 * 7 / 8, range(8)) == pytest.approx(1.0e-3, rel=0.01)
    assert H100.collective_s(400e6 * 63 / 64, range(64)) == pytest.approx(8.8e-3, rel=0.01)
