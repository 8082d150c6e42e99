"""Which ranks are idle, and so given up, and which ones work, and are waited for. The idle ones are
named with the place where they are."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.errors import assert_told, limits, message_of
from tests.support.programs import launch
from tests.support.ranks import on_ranks

HERE = re.escape(__file__)


def assert_named(message: str, file: str, place: str) -> None:
    idle = r"and has made no progress for \d+ s"
    told = rf"rank 1 has not arrived: it is at {file}:\d+ in {place}\(\), {idle}"
    assert_told(message, told)


def receives() -> None:
    dist.recv(torch.ones(1), 0)


@on_ranks(2)
def test_a_rank_in_a_collective_is_idle_and_named_with_its_place() -> None:
    model = FSDP(nn.Linear(4, 4))
    with limits():
        if dist.get_rank() == 0:
            assert_named(message_of(model.state_dict), HERE, "receives")
            dist.send(torch.ones(1), 1)
        else:
            receives()
    model.state_dict()


WAITS = """
import functools, os, queue, signal, sys, threading, torch.distributed as dist
from fsdp_compat import FullyShardedDataParallel as FSDP, StateError
from torch import nn

rank, wait, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]


class Woken(BaseException):
    pass


def wake(*_):
    raise Woken


def event():
    threading.Event().wait(60)


def item():
    queue.Queue().get(timeout=60)


class Module(nn.Module):
    def forward(self):
        return functools.reduce(lambda _, __: event(), [0, 0])  # around it is the library's frame


signal.signal(signal.SIGALRM, wake)
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
model, pids = FSDP(nn.Linear(4, 4)), [0, 0]
dist.all_gather_object(pids, os.getpid())
try:
    model.state_dict() if rank == 0 else {"item": item, "module": Module()}[wait]()
except (StateError, Woken) as error:
    print(error)
if rank == 0:
    os.kill(pids[1], signal.SIGALRM)
model.state_dict()
"""


def test_a_rank_that_waits_for_other_threads_that_wait_is_idle(tmp_path: Path) -> None:
    """Ranks in programs of their own, as those of other tests have a thread that listens."""
    waits = {"item": "item", "module": "event"}
    arguments = [(rank, wait, tmp_path / wait) for wait in waits for rank in range(2)]
    ended = launch(WAITS, arguments, tmp_path, FSDP_COMPAT_MEET_TIMEOUT="0.4")
    assert [each.code for each in ended] == [0] * len(ended), [each.err for each in ended]
    for each, place in zip(ended[::2], waits.values(), strict=True):
        assert_named(each.out, "<program>", place)


def computes(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def waits_for_a_thread_that_works(seconds: float) -> None:
    thread = threading.Thread(target=computes, args=(seconds,))
    thread.start()
    thread.join()


@on_ranks(4)
def test_ranks_that_work_are_waited_for() -> None:
    model = FSDP(nn.Linear(4, 4))
    with limits():
        if dist.get_rank():
            (time.sleep, computes, waits_for_a_thread_that_works)[dist.get_rank() - 1](2.0)
        model.state_dict()


@on_ranks(3)
def test_the_next_call_of_a_collective_is_another_wait() -> None:
    """Rank 1 waits for rank 2 again and again, each time for less than the limit."""
    model, pair = FSDP(nn.Linear(4, 4)), dist.new_group([1, 2])
    with limits(idle_s=0.8):
        for _ in range(10 if dist.get_rank() else 0):
            if dist.get_rank() == 2:
                time.sleep(0.2)
            dist.all_reduce(torch.ones(1), group=pair)
        model.state_dict()
