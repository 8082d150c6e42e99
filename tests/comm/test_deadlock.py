"""Waits that can never end raise an error on all ranks, with what each rank waits for;
communication that has failed stays failed; and slow ranks get no error."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, StateError, UsageError
from tests.support.collectives import assert_circle, connect, gathered
from tests.support.errors import PROMPT_S, limits, message_of
from tests.support.models import DIM, Block, Switch
from tests.support.parity import Pair, backward, make_pair
from tests.support.ranks import on_ranks
from tests.support.same_host import MAPPED, MESSAGES, NOT_MAPPED


def use_all(model: nn.Module, x: Tensor) -> Tensor:
    return backward(model(x, "ab").pow(2).mean())


class Joined(nn.Module):
    """Two units beside each other, between two that every backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = Block(), Block(), Block(), Block()

    def forward(self, x: Tensor, detached: bool) -> Tensor:
        x = self.first(x)
        right = self.right(x)
        return self.last(self.left(x) + (right.detach() if detached else right))


def assert_stays_failed(model: nn.Module, forward: Callable[[], object]) -> None:
    """Every later use of the model raises at once, with the first failure."""
    started = time.monotonic()
    for use in (forward, model.state_dict, lambda: model.clip_grad_norm_(1.0), forward):
        with pytest.raises(
            StateError, match=r"has failed before, and stays failed\.[\s\S]*rank \d waits for"
        ):
            use()
    assert time.monotonic() - started < PROMPT_S / 2


def skips_a_unit(use: str, *facts: str) -> None:
    """All later uses fail, and a new process group trains."""
    pair, x = make_pair(Switch), torch.ones(2, DIM)
    assert_circle(message_of(lambda: pair.model(x, use).sum().backward()), *facts)
    assert_stays_failed(pair.model, lambda: pair.model(x, "ab"))
    with pytest.raises(StateError, match="has failed before"):
        make_pair(Switch)
    make_pair(Switch, process_group=dist.new_group()).step(use_all)


@pytest.mark.parametrize(("ranks", "other"), [(3, "b"), (2, "ba")])
@on_ranks("ranks", environment=NOT_MAPPED)
def test_unit_skipped_or_moved_by_a_rank_fails_on_all_ranks_for_good(
    ranks: int, other: str
) -> None:
    skips_a_unit(
        other if dist.get_rank() == 1 else "ab",
        "the parameters of unit 'a' from rank 1",
        "rank 1 waits for the parameters of unit 'b'",
    )


@on_ranks(3, environment=MAPPED)
def test_mapped_unit_skipped_by_a_rank_fails_in_backward_on_all_ranks_for_good() -> None:
    use = "b" if dist.get_rank() == 1 else "ab"
    skips_a_unit(use, "waits for the gradients of unit 'a' from rank 1")


def gathers(comm: Any, tag: int, numel: int = 3) -> Tensor:
    return gathered(comm, torch.full((numel,), float(comm.rank)), tag)


@pytest.mark.parametrize(
    ("strategy", "facts"),
    [
        (
            ShardingStrategy.FULL_SHARD,
            [
                "the parameters of unit 'right' from rank 1",
                "the parameters of unit 'first' from rank 0",
            ],
        ),
        (
            ShardingStrategy.SHARD_GRAD_OP,
            ["rank 0 waits for the gradients of unit 'right' from rank 1"],
        ),
    ],
)
@on_ranks(2, environment=NOT_MAPPED)
def test_circles_in_backward_are_found(strategy: ShardingStrategy, facts: list[str]) -> None:
    pair = make_pair(Joined, sharding_strategy=strategy)
    loss = pair.model(torch.ones(2, DIM), pair.rank == 1).sum()
    assert_circle(message_of(loss.backward), *facts)


@on_ranks(4, environment=NOT_MAPPED)
def test_all_ranks_of_a_hybrid_mesh_and_late_ranks_get_the_error() -> None:
    """The replicas 2 and 3 wait for 0 and 1 in backward only; rank 3 is late."""
    pair = make_pair(Switch, replicas=2)
    if pair.rank == 3:
        time.sleep(1.0)  # far longer than the patience of the others
    use = "b" if pair.rank == 0 else "ab"
    message = message_of(lambda: pair.model(torch.ones(2, DIM), use).sum().backward())
    assert_circle(message, "unit 'a' from rank 0", "unit 'b' from rank 1")


LARGE = 1 << 24  # numbers in a message: far more than fit into the buffers of a connection


@pytest.mark.parametrize("is_collective", [False, True])
@on_ranks(2, environment=MESSAGES)
def test_message_that_is_under_way_when_its_connection_closes_fails(is_collective: bool) -> None:
    """Rank 1 closes its connections while a message is arriving."""
    comm = connect(dist.new_group())
    full = torch.full((2 * LARGE,), float(comm.rank))
    segments, found = full.chunk(2), list[str]()

    def communicate() -> None:
        if is_collective:
            comm.broadcast(segments[:1], "a model")
        else:
            comm.end_gather(comm.begin_gather(segments[comm.rank], full, segments, 4), "a model")
            comm.settle("a model")

    def communicate_until_it_fails() -> None:
        while not found:  # the first message may be too fast
            message = message_of(communicate)
            found.extend([message] if message else [])

    if comm.rank == 0:
        communicate_until_it_fails()
        reason = "rank 1 left its communication with KeyboardInterrupt"
        assert re.match(f"Waiting for a .*model failed: {reason}", found[0]), found
        assert "to do:    look at rank 1's own error first" in found[0]
    else:
        thread = threading.Thread(target=communicate_until_it_fails)
        thread.start()
        while segments[0][0].item():  # until it is that of rank 0
            pass
        comm.connections.abandon("its communication", KeyboardInterrupt())
        thread.join()


@on_ranks(2, environment=MESSAGES)
def test_a_second_thread_in_the_middle_of_an_exchange_is_refused() -> None:
    comm, full, found = connect(), torch.empty(6), list[str]()
    comm.begin_gather(torch.ones(3), full, full.chunk(2), 4)
    thread = threading.Thread(target=lambda: found.append(message_of(lambda: gathers(comm, 4))))
    thread.start()
    thread.join()
    assert "Two threads communicate over one process group at once" in found[0]
    comm.settle("what was sent")


SECONDS = "is not a number of seconds"
SETTINGS = {
    "FSDP_COMPAT_WARN_AFTER": (SECONDS, ["soon", "-1", "", "inf", "nan"]),
    "FSDP_COMPAT_MEET_TIMEOUT": (SECONDS, ["soon", "-1", "", "inf", "nan", "0"]),
    "FSDP_COMPAT_SAME_HOST": ("expected: 'mapped', 'counters', 'messages'", ["none", ""]),
    "FSDP_COMPAT_MAP_FROM": ("is not a number of bytes", ["", "0", "-1", "1 MB"]),
}


@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2)
def test_an_impossible_setting_in_the_environment_is_refused(name: str) -> None:
    told, texts = SETTINGS[name]
    for text in texts:
        os.environ[name] = text
        with pytest.raises(UsageError, match=told) as caught:
            FSDP(nn.Linear(2, 2), process_group=dist.new_group())
        assert f"{name} is " in str(caught.value) and repr(text) in str(caught.value)


def threads() -> list[threading.Thread]:
    name = "fsdp_compat board"
    return [thread for thread in threading.enumerate() if thread.name == name]


@on_ranks(2)
def test_one_thread_runs_while_there_are_process_groups() -> None:
    with limits(patience_s=0.1):
        first = make_pair(Switch)
        [thread] = threads()
        store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
        rank = dist.get_rank()
        dist.destroy_process_group()
        del first
        gc.collect()
        thread.join(5)
        assert threads() == []
        again = dist.PrefixStore("again", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
        make_pair(Switch).step(use_all)
        assert len(threads()) == 1


@on_ranks(2)
def test_two_models_train_in_two_threads_over_two_process_groups() -> None:
    pairs = [make_pair(Switch, process_group=dist.new_group()) for _ in range(2)]
    found: list[str] = []

    def trains(pair: Pair) -> None:
        try:
            for _ in range(20):
                pair.model(torch.ones(2, DIM), "ab").sum().backward()
        except StateError as error:
            found.append(str(error))

    workers = [threading.Thread(target=trains, args=(pair,)) for pair in pairs]
    with limits():
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert found == []
