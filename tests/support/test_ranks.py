"""run_ranks itself: what every test with more than one process relies on."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.errors import assert_told
from tests.support.ranks import RankError, on_ranks, run_ranks

ROOT = Path(__file__).parents[2]

Failure = tuple[tuple[int, ...], str]


def _sum() -> float:
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


@on_ranks(2, environment={"ON_RANKS": "yes"})
def _body(expected: str) -> None:
    assert (os.environ["ON_RANKS"], dist.get_rank()) == (expected, 0)


def test_the_body_of_a_test_runs_on_ranks_and_fails_there() -> None:
    for expected, failed in (("yes", [1]), ("no", [0, 1])):
        with pytest.raises(RankError) as caught:
            _body(expected=expected)
        assert sorted(caught.value.failed) == failed


def failure_of(n: int, function: Callable[..., Any], *args: Any, **options: Any) -> Failure:
    """Return the ranks to blame for a call that fails, and its message."""
    with pytest.raises(RankError) as caught:
        run_ranks(n, function, *args, **options)
    return caught.value.failed, str(caught.value)


# --- one call does not affect the next ---


def _leaves_everything_changed() -> None:
    torch.manual_seed(17)
    random.seed(17)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    warnings.simplefilter("error")
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    dist.new_group([0])
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)  # received by nobody


def _what_is_there() -> tuple[object, ...]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("once per call", stacklevel=1)
    return (
        torch.rand(1).item(),
        random.random(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.empty(1).device,
        torch.get_num_threads(),
        os.environ.get("LEFT_BEHIND"),
        os.getcwd(),
        len(caught),
    )


def _raises_in_the_middle_of_a_collective() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group, async_op=True)
    raise ValueError("with a collective under way")


def test_seeds_modes_warnings_environment_and_directory_are_put_back() -> None:
    before = run_ranks(2, _what_is_there)
    assert before[0] == before[1]
    assert before[0][2:] == (True, torch.float32, torch.device("cpu"), 1, None, os.getcwd(), 1)
    run_ranks(2, _leaves_everything_changed)
    assert run_ranks(2, _what_is_there) == before


def test_the_group_is_made_again_for_every_call() -> None:
    pids = run_ranks(2, os.getpid)
    run_ranks(2, dist.destroy_process_group)
    assert run_ranks(2, _sum) == [2.0, 2.0]
    failure_of(2, _raises_in_the_middle_of_a_collective)
    assert run_ranks(2, _sum) == [2.0, 2.0]
    assert run_ranks(2, os.getpid) == pids


# --- exceptions ---


def _raises_on(ranks: tuple[int, ...]) -> None:
    dist.barrier()  # or a rank that raises would close the connections of one that still makes them
    print(f"this is rank {dist.get_rank()}")
    if dist.get_rank() in ranks:
        raise ValueError(f"bad value on rank {dist.get_rank()}")


def test_every_failed_rank_is_shown_with_traceback_and_output() -> None:
    pids = run_ranks(3, os.getpid)
    failed, message = failure_of(3, _raises_on, (0, 2))
    assert sorted(failed) == [0, 2]
    assert_told(message, "tests.support.test_ranks._raises_on failed on 3 ranks", "in _raises_on")
    assert_told(message, *(f"ValueError: bad value on rank {rank}" for rank in failed))
    assert_told(message, "rank 1: returned", "output of rank 1 -----\nthis is rank 1")
    assert run_ranks(3, os.getpid) == pids  # nobody was killed for it


# --- processes that are lost ---


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes of the test's own: those that other tests share go on."""
    pool = ranks._Pool()
    monkeypatch.setattr(ranks, "_pool", pool)
    yield
    pool.kill()


def _exits() -> None:
    print("about to leave")
    os._exit(7)


def _is_killed_by(signum: int) -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signum)
    dist.barrier()


def _runs_forever() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def test_a_rank_that_exits_or_crashes_is_reported_at_once_and_replaced(lost: None) -> None:
    (pid,) = run_ranks(1, os.getpid)
    started = time.perf_counter()
    failed, message = failure_of(1, _exits, timeout=240)
    assert failed == (0,)
    assert_told(message, r"rank 0, after .* s: died with exit code 7", "about to leave")
    assert run_ranks(1, os.getpid) != [pid]
    failed, message = failure_of(1, _is_killed_by, signal.SIGSEGV, timeout=240)
    assert time.perf_counter() - started < 200, "it was not waited for"
    assert failed == (0,)
    assert_told(message, r"rank 0.*: died with signal SIGSEGV", "in _is_killed_by")
    assert_told(message, "Fatal Python error: Segmentation fault")


def test_a_rank_that_hangs_is_reported_with_its_stack(lost: None) -> None:
    pids = run_ranks(2, os.getpid)
    failed, message = failure_of(2, _runs_forever, timeout=1.5)
    assert failed == (1,)
    assert_told(message, "rank 1: did not answer within 1.5 s", "rank 0: returned")
    assert_told(message, "===== stacks of rank 1", "in _runs_forever")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
