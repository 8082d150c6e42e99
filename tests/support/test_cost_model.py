"""The cost model: literal times and demands of a machine of round numbers."""

from __future__ import annotations

import pytest

from tests.support.cost_model import H100, Demand, Link, Machine, speeds

MACHINE = Machine(
    flops=1000.0,
    memory_bandwidth=100.0,
    launch_s=0.5,
    node=Link(50.0, 1.0),
    network=Link(10.0, 2.0),
    ranks_per_node=4,
    host=Link(20.0, 0.25),
)


@pytest.mark.parametrize(
    "nbytes, flops, seconds, demand",
    [
        (200, 0, 2.0, Demand(memory=1.0, multiprocessors=0.25)),
        (10, 0, 0.5, Demand(memory=0.2, multiprocessors=0.25)),  # the launch
        (200, 1000, 2.0, Demand(memory=1.0, multiprocessors=1.0)),  # memory
        (200, 4000, 4.0, Demand(memory=0.5, multiprocessors=1.0)),  # the product
    ],
)
def test_a_kernel_takes_what_limits_it(
    nbytes: int, flops: int, seconds: float, demand: Demand
) -> None:
    assert MACHINE.kernel(nbytes, flops) == (seconds, demand)


def test_a_collective_takes_the_latency_and_what_is_not_its_own_and_moves_memory() -> None:
    assert MACHINE.all_reduce(400, range(4)).seconds == 1 + 600 / 50
    found = MACHINE.all_gather(200, range(4, 8))
    assert found == (1 + 150 / 50, Demand(memory=2.5 * 150 / 100 / 4, node=1.0))
    assert MACHINE.all_gather(400, (3,)) == (0.0, Demand())


def test_ranks_of_several_nodes_use_the_network() -> None:
    found = MACHINE.all_reduce(100, (0, 4))
    assert found.seconds == 2 + 100 / 10
    assert (found.demand.node, found.demand.network) == (0.0, 1.0)


def test_directions_of_the_host_link_are_apart() -> None:
    one, other = (MACHINE.copy(100, to_host=to_host) for to_host in (True, False))
    assert one.seconds == other.seconds == 0.25 + 5
    assert speeds([one.demand, other.demand]) == [1.0, 1.0]
    assert speeds([one.demand, one.demand]) == speeds([other.demand] * 2) == [0.5, 0.5]


def test_only_those_that_want_too_much_of_something_slow_down() -> None:
    whole, half = Demand(memory=1.0), Demand(memory=0.5, multiprocessors=1.0)
    slow = pytest.approx(1 / 1.5)
    assert speeds([whole, half, Demand(network=1.0)]) == [slow, slow, 1.0]
    assert (speeds([half]), speeds([])) == ([1.0], [])


def test_one_layer_of_7_billion_parameters_takes_4_ms_on_an_h100() -> None:
    assert H100.kernel(400e6, 2 * 200e6 * 4096).seconds == pytest.approx(4.1e-3, rel=0.01)
    assert H100.all_gather(400e6, range(8)).seconds == pytest.approx(1.0e-3, rel=0.01)
    assert H100.all_gather(400e6, range(64)).seconds == pytest.approx(8.8e-3, rel=0.01)
