"""What concurrent work shares: literal demands of a machine of round numbers."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.cost_model import Link, Machine
from tests.support.emulated.contention import CONTENTION, Demand, SharedMachine, speeds

ALONE = Machine(
    flops=1000.0,
    memory_bandwidth=100.0,
    launch_s=0.5,
    node=Link(50.0, 1.0),
    network=Link(10.0, 2.0),
    ranks_per_node=4,
)
MACHINE = SharedMachine(ALONE, host=Link(20.0, 0.25))


def test_a_kernel_wants_its_share_of_the_memory_and_of_the_multiprocessors() -> None:
    assert MACHINE.kernel(200).demand == Demand(memory=1.0, multiprocessors=0.25)
    assert MACHINE.kernel(200, 4000).demand == Demand(memory=0.5, multiprocessors=1.0)


def test_a_gather_and_a_scatter_receive_what_is_not_their_own() -> None:
    ranks = range(4)
    assert MACHINE.all_gather(400, ranks).seconds == 1 + 300 / 50
    assert MACHINE.reduce_scatter(400, ranks).seconds == 1 + 300 / 50
    assert MACHINE.all_reduce(400, ranks).seconds == 1 + 600 / 50


def test_ranks_of_several_nodes_use_the_network() -> None:
    found = MACHINE.all_reduce(100, (0, 4))
    assert found.seconds == 2 + 100 / 10
    assert (found.demand.node, found.demand.network) == (0.0, 1.0)


def test_a_collective_moves_memory_besides() -> None:
    found = MACHINE.all_gather(200, range(4))
    assert found.demand.memory == pytest.approx(2.5 * 150 / 100 / 4)


def test_a_group_of_one_rank_sends_nothing() -> None:
    assert MACHINE.all_gather(400, (3,)) == (0.0, Demand())


def test_directions_of_the_host_link_are_apart() -> None:
    one, other = (MACHINE.copy(100, to_host=to_host) for to_host in (True, False))
    assert one.seconds == other.seconds == 0.25 + 5
    assert speeds([one.demand, other.demand]) == [1.0, 1.0]
    assert speeds([one.demand, one.demand]) == speeds([other.demand] * 2) == [0.5, 0.5]


def test_only_those_that_want_too_much_of_something_slow_down() -> None:
    whole, half = Demand(memory=1.0), Demand(memory=0.5, multiprocessors=1.0)
    assert speeds([whole, half, Demand(multiprocessors=0.0, network=1.0)]) == [
        pytest.approx(1 / 1.5),
        pytest.approx(1 / 1.5),
        1.0,
    ]
    assert speeds([half]) == [1.0]
    assert speeds([]) == []


def test_without_contention_nothing_is_wanted() -> None:
    machine = dataclasses.replace(MACHINE, contention=CONTENTION["free"])
    assert machine.kernel(200, 1000).demand == Demand()
    assert machine.all_gather(400, range(4)).demand == Demand(node=1.0)
