"""Calls that ranks do not share: all get an error that names the call, each rank's line and who is missing; slow ranks get none."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullStateDictConfig, StateDictType, StateError
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._engine import meeting, watch
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import DIM, Block
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
PROMPT_S = 8.0  # on a busy machine; every other time limit is far beyond it
HERE = re.escape(__file__)


@contextlib.contextmanager
def limits(idle_s: float = 0.6, patience_s: float = 0.4) -> Iterator[None]:
    before = meeting.LIMIT_S, watch.PATIENCE
    meeting.LIMIT_S, watch.PATIENCE = idle_s, patience_s
    try:
        yield
    finally:
        meeting.LIMIT_S, watch.PATIENCE = before


def build(num_blocks: int = 3, **options: Any) -> FSDP:
    torch.manual_seed(0)
    return FSDP(nn.Sequential(*(Block() for _ in range(num_blocks))), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def step(model: nn.Module) -> None:
    model(torch.ones(2, DIM)).sum().backward()


def message_of(call: Callable[[], object]) -> str:
    """The message of the StateError that ``call`` raises soon, or nothing."""
    started = time.monotonic()
    with limits():
        try:
            call()
        except StateError as error:
            assert time.monotonic() - started < PROMPT_S, f"late: {error}"
            return str(error)
    return ""


def assert_goes_on(model: FSDP) -> None:
    """What ranks call together works as if nothing had been."""
    step(model)
    assert float(model.clip_grad_norm_(1e9)) > 0
    names = list(model.state_dict())
    assert len(names) == len(set(names)) > 0
    with FSDP.summon_full_params(model):
        assert next(model.parameters()).numel() > 0
    model.zero_grad()


def assert_told(message: str, *facts: str) -> None:
    for fact in facts:
        assert re.search(fact, message), f"{fact!r} is not in\n{message}"


def saves_on_rank_0() -> str:
    model = build()
    step(model)

    def epoch() -> None:
        if dist.get_rank() == 0:
            model.state_dict()
        step(model)

    message = message_of(epoch)
    model.zero_grad()
    assert_goes_on(model)
    return message


def test_a_rank_that_trains_on_while_another_saves_and_the_one_that_saves_are_told_both() -> None:
    messages = run_ranks(2, saves_on_rank_0)
    assert messages[0].startswith("The ranks did not come together in state_dict().")
    for message in messages:
        assert_told(
            message,
            rf"rank 0 waits in state_dict\(\) for the ranks \[1\], at {HERE}:\d+ in epoch\(\)",
            r"rank 1 waits for the parameters of unit '0' from rank 0, at .*test_divergence\.py:\d+ in step\(\)",
        )


def calls_something_else(which: str) -> str:
    model, rank = build(), dist.get_rank()
    other = build(1)
    step(model)
    step(other)

    def diverge() -> None:
        if which == "calls":
            model.state_dict() if rank == 0 else model.clip_grad_norm_(1.0)
        elif which == "models":
            (model if rank == 0 else other).state_dict()
        else:
            for each in (model, other) if rank == 0 else (other, model):
                each.clip_grad_norm_(1.0)

    messages = [message_of(diverge) for _ in range(2)]  # a second time as well as the first
    assert all(messages), messages
    assert_goes_on(model)
    assert_goes_on(other)
    return messages[-1]


@pytest.mark.parametrize("which", ["calls", "models", "order"])
@pytest.mark.parametrize("ranks", [2])
def test_different_calls_and_calls_of_different_models_are_told_at_once(ranks: int, which: str) -> None:
    messages = run_ranks(ranks, calls_something_else, which)
    names = {"calls": ("state_dict", "clip_grad_norm_"), "models": ("state_dict",) * 2, "order": ("clip_grad_norm_",) * 2}[which]
    for message in messages:
        assert_told(message, *(rf"rank {rank} called {names[rank]}\(\) at {HERE}:\d+ in diverge\(\)" for rank in range(2)))


def decides_alone(waits: str) -> tuple[str, str, float]:
    """Rank 0 finds its loss the best; the last rank does not, and waits for the others somewhere else."""
    model, rank, world = build(), dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    step(model)
    started = time.monotonic()
    if rank < world - 1:
        with limits():
            first = message_of(model.state_dict)
        passed_s = time.monotonic() - started
        store.add("given up", 1)
        if rank == 0:
            store.set("go on", "1")
    else:
        passed_s = 0.0
        with limits():
            if waits == "barrier":
                pass
            elif waits == "store":
                store.wait(["go on"], timedelta(seconds=30))
        first = ""
    with limits():
        dist.barrier()
        if rank == world - 1:  # comes later: to another call
            first = message_of(lambda: model.clip_grad_norm_(1.0))
        dist.barrier()
    assert_goes_on(model)
    return first, waits, passed_s


@pytest.mark.parametrize(("ranks", "waits"), [(2, "barrier"), (3, "store")])
def test_a_rank_that_decided_otherwise_and_idles_is_missed_soon_and_told_when_it_comes(ranks: int, waits: str) -> None:
    found = run_ranks(ranks, decides_alone, waits)
    missing = ranks - 1
    for message, _, _ in found:
        assert_told(
            message,
            rf"rank 0 called state_dict\(\) at {HERE}:\d+ in message_of\(\)",
        )
    for message, _, passed_s in found[:-1]:
        assert 0.6 < passed_s < PROMPT_S
        assert_told(
            message, rf"rank {missing} has not come: it is at .*:\d+ in decides_alone\(\), and has made no progress for \d+ s"
        )
    assert_told(
        found[-1][0], rf"rank {missing} called clip_grad_norm_\(\) at {HERE}:\d+ in <lambda>\(\), which others had given up"
    )


def disjoint(num_rounds: int) -> list[str]:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = build(process_group=groups[rank // 2])
    step(model)
    found = []
    for _ in range(num_rounds):
        # Ranks 2 and 3 meet more often, and at another call.
        if rank < 2:
            found.append(message_of(lambda: model.state_dict() if rank == 0 else model.clip_grad_norm_(1.0)))
        else:
            for _ in range(3):
                found.append(message_of(model.state_dict))
    assert_goes_on(model)
    return found


def test_models_on_disjoint_ranks_meet_by_themselves() -> None:
    found = run_ranks(4, disjoint, 2)
    assert all(found[0] + found[1]) and not any(found[2] + found[3])


# -- no error


def is_busy(tmp_path: Path) -> list[str]:
    """The last rank is late for a reason; the reasons by which the others would have been told."""
    model, rank = build(), dist.get_rank()
    large = torch.zeros(1 << 20)

    def computes() -> None:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            sum(range(10000))

    def saves() -> None:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            torch.save(large, tmp_path / "large.pt")

    found = []
    for reason in (computes, saves):
        with limits(idle_s=0.8):
            dist.barrier()
            if rank == dist.get_world_size() - 1:
                reason()
            model.state_dict()
            found.append(reason.__name__)
    assert_goes_on(model)
    return found


def test_a_busy_rank_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(2, is_busy, tmp_path) == [["computes", "saves"]] * 2


@contextlib.contextmanager
def counted(found: list[str]) -> Iterator[None]:
    """Collect the names of calls that meet."""
    meet = meeting._RollCall.meet

    def counting(self: Any, call: str, *args: Any) -> None:
        found.append(call)
        meet(self, call, *args)

    meeting._RollCall.meet = counting
    try:
        yield
    finally:
        meeting._RollCall.meet = meet


def meets() -> dict[str, list[str]]:
    model = build()
    optim = torch.optim.Adam(model.parameters())
    step(model)
    optim.step()
    found: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def during(what: str) -> Iterator[None]:
        with counted(found.setdefault(what, [])):
            yield

    with during("full"):
        full = {name: value.clone() for name, value in model.state_dict().items()}
        FSDP.optim_state_dict(model, optim)
    with during("other calls"):
        model.clip_grad_norm_(1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.apply(lambda module: None)
        with FSDP.summon_full_params(model):
            pass
    with FSDP.summon_full_params(model), during("whole already"):
        model.state_dict()
        model.apply(lambda module: None)
        with FSDP.summon_full_params(model):
            pass
    with during("loads"):
        state = FSDP.optim_state_dict_to_load(model, optim, FSDP.optim_state_dict(model, optim))
        optim.load_state_dict(state)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
            model.load_state_dict(full if dist.get_rank() == 0 else {})
        cut_otherwise = FSDP(nn.Sequential(*(Block() for _ in range(3))))
        with FSDP.state_dict_type(cut_otherwise, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(cut_otherwise.state_dict())
    with during("nothing sent"):
        model.load_state_dict(full)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(model.state_dict())
        step(model)
    with during("said, not sent"), FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        FSDP.optim_state_dict(model, optim)
    return found


def test_calls_meet_once_and_only_if_they_communicate() -> None:
    calls = ["clip_grad_norm_", "torch.nn.utils.clip_grad_norm_", "apply", "summon_full_params"]
    loads = ["optim_state_dict", "optim_state_dict_to_load", "load_state_dict", "load_state_dict"]
    found = {
        "full": ["state_dict", "optim_state_dict"],
        "other calls": calls,
        "whole already": [],
        "loads": loads,
        "nothing sent": [],
        "said, not sent": ["optim_state_dict"],
    }
    assert run_ranks(2, meets) == [found] * 2
    assert run_ranks(1, meets) == [{what: [] for what in found}]


def is_switched_off() -> list[str]:
    model, found = build(), []
    step(model)
    before, meeting.ON = meeting.ON, False
    try:
        with counted(found):
            assert_goes_on(model)
    finally:
        meeting.ON = before
    return found


def test_without_meetings_everything_works() -> None:
    assert run_ranks(2, is_switched_off) == [[], []]


FAKE = """
    import torch, torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from fsdp_compat import FullyShardedDataParallel as FSDP

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = FSDP(torch.nn.Linear(4, 4))
    print(sorted(model.state_dict()))
"""


def test_in_a_world_of_fake_ranks_nobody_is_waited_for() -> None:
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(FAKE)], capture_output=True, text=True, cwd=ROOT, timeout=50)
    assert ended.stdout == "['bias', 'weight']\n", ended.stderr


# -- programs


PROGRAM = """
    import sys, torch, torch.distributed as dist
    from fsdp_compat import FullyShardedDataParallel as FSDP
    from fsdp_compat._engine import watch
    from torch import nn

    rank, path = int(sys.argv[1]), sys.argv[2]
    watch.PATIENCE = 0.5
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    model = FSDP(nn.Linear(4, 4))
    if rank == 1:
        raise KeyError("no such file")
    model.state_dict()
"""


def test_a_rank_whose_program_has_ended_is_missed_at_once(tmp_path: Path) -> None:
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen([*program, str(rank), str(tmp_path / "store")], **pipe) for rank in range(2)]
    try:
        (_, first), (_, second) = [process.communicate(timeout=50) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1]
    assert_told(
        first, r"rank 0 called state_dict\(\) at <string>:\d+ in <module>\(\)", r"rank 1 .*ended with KeyError: 'no such file'"
    )
    assert "KeyError" in second and "StateError" not in second
