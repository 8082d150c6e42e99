"""Calls that only some ranks make: what the check costs, why it refuses calls, and that all ranks
can go on afterwards. All calls that are checked are in tests/frontends/ranks."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.collectives import checked_calls
from tests.support.errors import assert_told, limits, message_of
from tests.support.ranks import on_ranks

HERE = re.escape(__file__)


def make() -> Any:
    return FSDP(nn.Linear(4, 4))


def apply(model: Any) -> None:
    model.apply(lambda module: None)


def state_dict(model: Any) -> None:
    model.state_dict()


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


@on_ranks(2)
def test_calls_and_refusals_do_not_grow_the_store() -> None:
    model, sizes = make(), []
    for number in range(12):
        state_dict(model)
        if number % 2:
            call = (state_dict, apply)[dist.get_rank()]
            assert "Not all ranks called" in message_of(lambda call=call: call(model))
        state_dict(model)
        dist.barrier()
        sizes.append(default_store().num_keys())
        dist.barrier()
    assert sizes[-1] - sizes[3] <= 2, "the thread of each rank may have posted once"


@on_ranks(3)
def test_a_call_of_a_larger_group_includes_the_smaller_ones() -> None:
    """A module is sharded over two ranks, or one, inside of one that is sharded over all."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    inner = FSDP(nn.Linear(4, 4), process_group=groups[rank // 2])
    model = FSDP(nn.Sequential(inner, nn.Linear(4, 4)))
    with checked_calls() as found:
        state_dict(model)
        state_dict(inner)
    own = [("state_dict()", (0, 1))] if rank < 2 else []
    assert found == [("state_dict()", (0, 1, 2)), *own]


@on_ranks(3)
def test_different_calls_are_refused_without_waiting_for_missing_ranks() -> None:
    model, rank = make(), dist.get_rank()
    with limits(idle_s=60.0):
        if rank < 2:
            message = message_within(8.0, lambda: (state_dict, apply)[rank](model))
            assert_told(message, rf"^Not all ranks called {('state_dict', 'apply')[rank]}\(\)\.")
            assert_told(message, rf"rank 0 called state_dict\(\) at {HERE}:\d+ in state_dict\(\)")
            assert_told(message, rf"rank 1 called apply\(\) at {HERE}:\d+ in apply\(\)")
            assert_told(message, "rank 2 has not arrived")
        dist.barrier()
        state_dict(model)


def message_within(limit_s: float, call: Callable[[], object]) -> str:
    started, message = time.monotonic(), message_of(call)
    assert time.monotonic() - started < limit_s
    return message


@on_ranks(2, group_timeout=2.5)
def test_a_busy_rank_is_waited_for_up_to_the_time_limit_of_the_group() -> None:
    model, is_late = make(), dist.get_rank() == 1
    with limits():
        if is_late:
            time.sleep(1.2)  # it may read a file
        state_dict(model)
        while is_late and not default_store().check(["told"]):
            time.sleep(0.05)
        if not is_late:
            message = message_of(lambda: state_dict(model))
            default_store().set("told", "")
            limit = r"rank 1 has not arrived: the time limit of 2.5 s is over; it is at "
            assert_told(message, rf"{limit}{HERE}:\d+ in ")


class Interrupted(BaseException):
    pass


@on_ranks(3)
def test_an_interrupted_rank_does_not_leave_others_waiting() -> None:
    model, rank = make(), dist.get_rank()

    def interrupt(*_: object) -> None:
        raise Interrupted

    if rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Interrupted):
            state_dict(model)
    elif rank == 1:
        with limits(idle_s=60.0):
            message = message_within(8.0, lambda: state_dict(model))
        assert "rank 0 left state_dict() with Interrupted" in message
    dist.barrier()
    state_dict(model)


@on_ranks(2)
def test_a_second_thread_of_a_rank_is_refused() -> None:
    model, store = make(), default_store()
    if dist.get_rank() == 0:
        thread = threading.Thread(target=state_dict, args=(model,))
        thread.start()
        time.sleep(0.5)  # it waits for rank 1
        message = message_of(lambda: apply(model))
        assert "while another thread of this rank waits" in message
        store.set("refused", "")
        thread.join()
    else:
        store.wait(["refused"])
        state_dict(model)


@on_ranks(2)
def test_a_store_that_is_lost_is_named() -> None:
    model, lost = make(), RuntimeError("connection refused")
    dist.barrier()
    with mock.patch.object(dist.PrefixStore, "set", side_effect=lost):
        message = message_of(lambda: state_dict(model))
    rank = dist.get_rank()
    assert f"rank {rank} cannot reach the store (connection refused)" in message
