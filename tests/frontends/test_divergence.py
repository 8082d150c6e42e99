"""Calls that ranks do not share: an error names the call, each rank's line and who is missing, and
every rank can go on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
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
from fsdp_compat._comm import deadlock
from fsdp_compat._engine import rendezvous
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import DIM, Block
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
PROMPT_S = 8.0  # on a busy machine; every other time limit is far beyond it
HERE = re.escape(__file__)


@contextlib.contextmanager
def limits(idle_s: float = 0.6, patience_s: float = 0.4) -> Iterator[None]:
    before = os.environ.get("FSDP_COMPAT_MEET_TIMEOUT"), deadlock.PATIENCE
    os.environ["FSDP_COMPAT_MEET_TIMEOUT"], deadlock.PATIENCE = str(idle_s), patience_s
    try:
        yield
    finally:
        os.environ.pop("FSDP_COMPAT_MEET_TIMEOUT")
        if before[0] is not None:
            os.environ["FSDP_COMPAT_MEET_TIMEOUT"] = before[0]
        deadlock.PATIENCE = before[1]


def build(num_blocks: int = 3, **options: Any) -> FSDP:
    torch.manual_seed(0)
    return FSDP(
        nn.Sequential(*(Block() for _ in range(num_blocks))),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        **options,
    )


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


def saves_on_rank_0(catches: bool) -> str:
    """Rank 0 saves, which the others do not, and trains on; or does not come back."""
    model = build()
    step(model)
    if dist.get_rank() == 0:
        message = message_of(model.state_dict)
        if not catches:
            deadlock.give_up(
                model._runtime.groups[0].shard, deadlock.Report(False, {0: "rank 0 has left"})
            )
            return message
        step(model)
    else:
        message = message_of(lambda: step(model))
    if catches:
        model.zero_grad()
        assert_goes_on(model)
    return message


def test_a_rank_that_saves_while_another_trains_on_is_told_what_both_do_and_can_train_on() -> None:
    saving, training = run_ranks(2, saves_on_rank_0, True)
    assert saving.startswith("The ranks did not come together in state_dict().")
    assert_told(
        saving,
        rf"rank 0 waits in state_dict\(\) for the ranks \[1\], at {HERE}:\d+ in message_of\(\)",
        r"rank 1 waits for the parameters of unit '0' from rank 0, at .*test_divergence\.py:\d+ in "
        r"step\(\)",
    )
    assert training == ""


def test_a_rank_that_waits_for_one_that_has_left_after_such_an_error_is_told() -> None:
    saving, training = run_ranks(2, saves_on_rank_0, False)
    assert saving.startswith("The ranks did not come together in state_dict().")
    assert_told(training, "Waiting for the parameters of unit '0' failed", "rank 0 has left")


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
def test_different_calls_and_calls_of_different_models_are_told_at_once(
    ranks: int, which: str
) -> None:
    messages = run_ranks(ranks, calls_something_else, which)
    names = {
        "calls": ("state_dict", "clip_grad_norm_"),
        "models": ("state_dict",) * 2,
        "order": ("clip_grad_norm_",) * 2,
    }[which]
    for message in messages:
        assert_told(
            message,
            *(
                rf"rank {rank} called {names[rank]}\(\) at {HERE}:\d+ in diverge\(\)"
                for rank in range(2)
            ),
        )


def decides_alone(waits: str) -> tuple[str, float]:
    """Rank 0 finds its loss the best; the last rank does not, and waits for the others somewhere
    else."""
    model, rank, world = build(), dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    step(model)
    started, message = time.monotonic(), ""
    if rank < world - 1:
        message = message_of(model.state_dict)
        if rank == 0:
            store.set("go on", "1")
    elif waits == "store":
        store.wait(["go on"], timedelta(seconds=30))
    passed_s = time.monotonic() - started
    dist.barrier()
    assert_goes_on(model)
    return message, passed_s


@pytest.mark.parametrize(("ranks", "waits"), [(2, "barrier"), (3, "store")])
def test_a_rank_that_decided_otherwise_and_idles_is_missed_soon_and_then_all_go_on(
    ranks: int, waits: str
) -> None:
    *found, (last, _) = run_ranks(ranks, decides_alone, waits)
    assert last == ""
    for message, passed_s in found:
        assert passed_s < PROMPT_S
        assert_told(
            message,
            rf"rank 0 called state_dict\(\) at {HERE}:\d+ in message_of\(\)",
            rf"rank {ranks - 1} has not come: it is at .*:\d+ in decides_alone\(\), and has made "
            rf"no progress for \d+ s",
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
            found.append(
                message_of(lambda: model.state_dict() if rank == 0 else model.clip_grad_norm_(1.0))
            )
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
    meet = rendezvous._RollCall.meet

    def counting(self: Any, call: str, *args: Any) -> None:
        found.append(call)
        meet(self, call, *args)

    rendezvous._RollCall.meet = counting
    try:
        yield
    finally:
        rendezvous._RollCall.meet = meet


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
        with FSDP.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
        ):
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
    os.environ["FSDP_COMPAT_MEET"] = "0"
    with counted(found):
        assert_goes_on(model)
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
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FAKE)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=50,
    )
    assert ended.stdout == "['bias', 'weight']\n", ended.stderr


# -- programs


PROGRAM = """
    import sys, torch, torch.distributed as dist
    from fsdp_compat import FullyShardedDataParallel as FSDP
    from fsdp_compat._comm import deadlock as watch
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
    processes = [
        subprocess.Popen([*program, str(rank), str(tmp_path / "store")], **pipe)
        for rank in range(2)
    ]
    try:
        (_, first), (_, second) = [process.communicate(timeout=50) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1]
    assert_told(
        first,
        r"rank 0 called state_dict\(\) at <string>:\d+ in <module>\(\)",
        r"rank 1 .*ended with KeyError: 'no such file'",
    )
    assert "KeyError" in second and "StateError" not in second


KILLED = """
    import os, signal, sys, time, torch, torch.distributed as dist
    from fsdp_compat import FullyShardedDataParallel as FSDP
    from torch import nn

    rank, path = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    model = FSDP(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        print("stopped", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    started = time.monotonic()
    model.state_dict()
    print(f"saved after {time.monotonic() - started:.1f}")
"""


@pytest.mark.parametrize("killed", [True, False])
def test_a_rank_that_was_killed_is_missed_soon_and_one_that_was_stopped_is_waited_for(
    tmp_path: Path, killed: bool
) -> None:
    program = [sys.executable, "-c", textwrap.dedent(KILLED)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    environment = os.environ | {"FSDP_COMPAT_MEET_TIMEOUT": "1"}
    processes = [
        subprocess.Popen([*program, str(rank), str(tmp_path / "store")], env=environment, **pipe)
        for rank in range(2)
    ]
    try:
        assert processes[1].stdout.readline() == "stopped\n"
        if killed:
            processes[1].send_signal(signal.SIGKILL)
        else:
            with pytest.raises(subprocess.TimeoutExpired):  # four times the limit of one that idles
                processes[0].wait(4.0)
            processes[1].send_signal(signal.SIGCONT)
        out, err = processes[0].communicate(timeout=50)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    if killed:
        assert_told(
            err,
            r"rank 0 called state_dict\(\)",
            r"rank 1 has not come: its process has ended without a word",
        )
    else:
        assert out.startswith("saved after")
