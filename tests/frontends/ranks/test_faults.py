"""What every rank can still do after a call has failed.

A call that is refused before anything was sent gives nothing up: the next step trains on all ranks.
After a failure in the middle, every later call of every rank says so at once. A rank that is only
stopped is waited for."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_compat import FsdpCompatError, checkpoint
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.errors import limits
from tests.support.faults import (
    BETWEEN_STEPS,
    CALLS,
    FILES,
    IN_STEP,
    LIMITS,
    PASSES,
    PLACES,
    REFUSABLE,
    Call,
    Planted,
    Subject,
    assert_stays_failed,
    assert_told,
    at_first_wait,
    cases,
    is_killed,
    message_of,
    message_of_first,
    planted,
    rank0_only,
    within,
)
from tests.support.programs import ROOT, launch
from tests.support.ranks import on_ranks

HERE = re.escape(str(ROOT / "tests"))
BOTH_WORLDS = pytest.mark.parametrize("ranks", [2, 3])
# in_place: the model is sharded with fully_shard
ON_FRONT_ENDS = pytest.mark.parametrize(
    ("ranks", "in_place"), [(2, False), (3, False), (2, True)], ids=str
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


# What a rank waits for. Ranks that map each other's shards meet at both ends of a pass instead.
FIRST_OF_A_STEP = r"(the parameters of unit '0'|the beginning of a forward of the root unit[^;]*)"
PART_OF_A_STEP = (
    r"([^;]*unit '\d'|the (beginning|end) of a (forward|backward) of the root unit[^;]*)"
)


def subject_of(
    folder: Path, timeout: timedelta | None = None, *, in_place: bool = False
) -> Subject:
    """A model of its own over a new process group. Three ranks read each other's memory in place,
    and map it where the front end can; two ranks send everything."""
    warnings.simplefilter("ignore", DeprecationWarning)
    sends = dist.get_world_size() == 2
    os.environ.update(
        {"FSDP_COMPAT_SAME_HOST": "messages"} if sends else {"FSDP_COMPAT_MAP_FROM": "1"}
    )
    return Subject(dist.new_group(timeout=timeout), str(folder), sends, in_place)


def share_of(calls: dict[str, Any]) -> dict[str, Any]:
    """Return every second one: two ranks make those that three ranks do not."""
    return dict(list(calls.items())[dist.get_world_size() % 2 :: 2])


# -- nothing was sent, so nothing is given up


def user_name(name: str) -> str:
    """Return the call's name as errors have it."""
    return name.partition(",")[0].removeprefix("checkpoint.")


def another_than(name: str, calls: Iterable[str]) -> str:
    """Return the next one of ``calls`` that has another name in errors."""
    names = list(calls)
    later = names[names.index(name) :] + names
    return next(other for other in later if user_name(other) != user_name(name))


def called(rank: int, name: str) -> str:
    """Return the pattern of a message that says which call a rank has made, and where."""
    return rf"rank {rank} (called|waits in) \S*\b{re.escape(user_name(name))}\(\).* at {HERE}"


@pytest.mark.parametrize("in_place", [False, True])
@on_ranks(2)
def test_different_calls_are_refused_and_the_next_step_trains(
    in_place: bool, tmp_path: Path
) -> None:
    """The last rank makes another call than the others."""
    subject = subject_of(tmp_path, in_place=in_place)
    with limits(idle_s=2):
        for name in subject.refusable:
            another = another_than(name, subject.refusable)
            own, other = (another, name) if subject.is_last else (name, another)
            message = message_of(REFUSABLE[own], subject)
            both = called(subject.rank, own), called(1 - subject.rank, other)
            assert_told(message, "Not all ranks called", *both)
            subject.assert_trains()


@ON_FRONT_ENDS
@on_ranks("ranks")
def test_calls_that_one_rank_skips_are_refused_and_its_step_ends(
    ranks: int, in_place: bool, tmp_path: Path
) -> None:
    """The last rank trains on: it waits for parameters of the others."""
    subject = subject_of(tmp_path, in_place=in_place)
    with limits(idle_s=2):
        for name in ("state_dict", "checkpoint.save"):
            if not subject.is_last:
                message = message_of(REFUSABLE[name], subject)
                assert_told(message, "Not all ranks called", called(subject.rank, name))
                assert_told(message, rf"waits for {FIRST_OF_A_STEP} from rank \d, at {HERE}")
            subject.assert_trains()


ABSENT: dict[str, Any] = {"state": {"absent": {}}, "param_groups": []}
# Wrong uses of REFUSABLE calls, made by the last rank alone.
WRONG: dict[str, Call] = {
    "load_state_dict, rank0_only": lambda s: s.model.load_state_dict(5),
    "optim_state_dict_to_load": within(
        rank0_only, lambda s: FSDP.optim_state_dict_to_load(s.model, s.optim, ABSENT)
    ),
    "clip_grad_norm_": lambda s: s.model.clip_grad_norm_(1.0, norm_type="big"),
    "checkpoint.save": lambda s: checkpoint.save(s.next_folder(), s.model, step=-1),
}


@on_ranks(2)
def test_a_wrong_argument_on_one_rank_gives_nothing_up(tmp_path: Path) -> None:
    subject = subject_of(tmp_path)
    with limits(idle_s=2):
        for name, wrong in WRONG.items():
            with pytest.raises(FsdpCompatError) as caught:
                (wrong if subject.is_last else REFUSABLE[name])(subject)
            assert_told(str(caught.value))
            subject.assert_trains()


@ON_FRONT_ENDS
@on_ranks("ranks")
def test_an_exception_on_all_ranks_gives_nothing_up(
    ranks: int, in_place: bool, tmp_path: Path
) -> None:
    subject = subject_of(tmp_path, in_place=in_place)
    names = [name for name in share_of(subject.refusable) if not re.search("load|resume", name)]
    for number, place in enumerate(PLACES):
        for name in ("forward", *names[number % 2 :: 2]):
            with planted(subject, place), pytest.raises(Planted, match=f"^{place}$"):
                subject.train()
            CALLS[name](subject)
        subject.assert_trains()


# -- a failure in the middle is for good


RAISING = {
    (2, False): ("forward hook of a unit", "backward hook"),
    (3, False): ("forward hook", "gradient hook"),
    (2, True): ("forward", "backward of a function"),
}


@ON_FRONT_ENDS
@on_ranks("ranks")
def test_a_rank_that_raises_alone_in_a_step_fails_all_ranks_for_good(
    ranks: int, in_place: bool, tmp_path: Path
) -> None:
    """The last rank raises in a step and catches it; each time it makes another call then."""
    for place in RAISING[ranks, in_place]:
        subject = subject_of(tmp_path, in_place=in_place)
        number = IN_STEP.index(place) + (0 if in_place or ranks == 3 else len(IN_STEP))
        call = list(subject.calls.values())[number]
        with limits(idle_s=20):
            if subject.is_last:
                with planted(subject, place), pytest.raises(Planted, match=f"^{place}$"):
                    subject.train()
                messages = [message_of(call, subject)]
                if "Not all ranks called" in messages[0]:  # the others go on to wait
                    messages.append(message_of(Subject.forward, subject))
                rank = rf"rank \d waits for {PART_OF_A_STEP} from rank"
            else:
                messages = [message_of(Subject.train, subject)]
                rank = rf"rank {subject.rank} waits for {PART_OF_A_STEP} from rank"
            for message in messages:
                assert_told(message, rank, rf"at {HERE}")
        assert_stays_failed(subject)


def interrupt() -> None:
    raise KeyboardInterrupt("stop")


@BOTH_WORLDS
@on_ranks("ranks")
def test_an_interrupt_in_the_middle_of_a_call_fails_all_ranks_for_good(
    ranks: int, tmp_path: Path
) -> None:
    """An interrupt ends the last rank's wait in the middle of each call."""
    for call in (PASSES | share_of(BETWEEN_STEPS)).values():
        subject = subject_of(tmp_path)
        with limits(idle_s=2):
            if subject.is_last:
                with at_first_wait(interrupt), pytest.raises(KeyboardInterrupt, match="stop"):
                    call(subject)
            else:
                message = message_of_first(subject, call)
                cause = rf"rank {subject.pair.ranks - 1} left .* with KeyboardInterrupt, at {HERE}"
                assert_told(message, f"^Waiting for .* failed: {cause}")
        assert_stays_failed(subject)


@on_ranks(3)
def test_an_interrupt_in_a_save_or_load_gives_nothing_up(tmp_path: Path) -> None:
    """Ranks that save or load tell each other by way of the store: nothing of the model is sent."""
    subject = subject_of(tmp_path)
    for name in ("checkpoint.save", "checkpoint.load"):
        if subject.is_last:
            with at_first_wait(interrupt), pytest.raises(KeyboardInterrupt, match="stop"):
                FILES[name](subject)
        else:
            message = message_of(FILES[name], subject)
            assert_told(message, rf"rank {subject.pair.ranks - 1} .*left with KeyboardInterrupt")
        subject.assert_trains()


@on_ranks(2)
def test_a_wait_beyond_the_time_limit_fails_all_ranks_for_good(tmp_path: Path) -> None:
    """The last rank does not begin a forward until the others have failed."""
    store = dist.distributed_c10d._get_default_store()
    subject = subject_of(tmp_path, timeout=timedelta(seconds=2))
    if subject.is_last:
        store.wait(["failed"])
    message = message_of(Subject.forward, subject)
    assert_told(message, "no message within 2 s")
    if not subject.is_last:
        assert_told(message, rf"{PART_OF_A_STEP} from rank")
        store.set("failed", "")
    assert_stays_failed(subject)


# -- a process that ends, and one that stops


SOURCE = "import sys; from tests.support.faults import meet_fate; meet_fate(*sys.argv[1:])"


@pytest.mark.slow
def test_a_killed_rank_fails_the_others_for_good_and_a_stopped_one_is_waited_for(
    tmp_path: Path,
) -> None:
    ranks, codes = [], []
    for title, (fate, _, num_ranks) in cases().items():
        (tmp_path / title).mkdir()
        ranks += [(rank, title, tmp_path / title) for rank in range(num_ranks)]
        codes += [0] * (num_ranks - 1) + [-signal.SIGKILL if fate is is_killed else 0]
    ended = launch(SOURCE, ranks, tmp_path, **LIMITS)
    wrong = [
        f"{title}: rank {rank} ended with {each.code}\n{each.err}"
        for (rank, title, _), code, each in zip(ranks, codes, ended, strict=True)
        if each.code != code
    ]
    assert not wrong, "\n\n".join(wrong)
