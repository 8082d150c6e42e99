"""Calls that all ranks of a model make together, and faults on one of the ranks.

In ``cases`` a process ends or is stopped; ``meet_fate`` is the program of one of its ranks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # imported by the first forward: here it is done once for all processes
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compat import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
    StateError,
    checkpoint,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._comm.same_host.counters import CounterWork
from fsdp_compat.checkpoint._ranks.mailbox import StoreMailbox
from tests.support.errors import assert_told as assert_all_told
from tests.support.errors import prompt_message_of
from tests.support.fully_sharded import OURS, pair_of, shard_all
from tests.support.models import DIM, Block
from tests.support.parity import make_pair, square

AT_ONCE_S = 3.0  # for all later calls together, none of which waits


class Planted(Exception):
    """Raised by a test inside a call."""


class NotRaised(AssertionError):
    """A call that should have raised returned."""


def _build() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)))


class Subject:
    """A sharded model beside an unsharded one, with everything that the calls need. Collective."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        folder: str,
        use_orig_params: bool,
        in_place: bool = False,
    ) -> None:
        """group: of all ranks. folder: for checkpoints. in_place: sharded with fully_shard."""
        mesh, self.in_place = DeviceMesh.from_group(group, "cpu"), in_place
        self.pair: Any = (
            pair_of(_build, functools.partial(shard_all, library=OURS, mesh=mesh))
            if in_place
            else make_pair(
                _build, process_group=None, device_mesh=mesh, use_orig_params=use_orig_params
            )
        )
        self.model, self.optim, self.rank = self.pair.model, self.pair.optim, self.pair.rank
        self.is_last = self.rank == self.pair.ranks - 1
        self.folder = Path(folder) / group.group_name
        self._steps = itertools.count()
        self.pair.step()
        if in_place:
            FSDP.set_state_dict_type(self.model, StateDictType.FULL_STATE_DICT)
        self.full = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.optim_state = FSDP.optim_state_dict(self.model, self.optim)
        self.saved = self.save()
        self.loss = self.forward()  # its graph is kept for a backward at any time

    @property
    def refusable(self) -> dict[str, Call]:
        """Calls that check that every rank has made them before anything is sent."""
        return {
            name: call
            for name, call in REFUSABLE.items()
            if not (self.in_place and name in _ONLY_FLAT)
        }

    @property
    def calls(self) -> dict[str, Call]:
        return PASSES | self.refusable

    @property
    def inner_unit(self) -> tuple[Any, Any]:
        """A unit in the model, and the module that it shards."""
        if self.in_place:
            return self.model[1], self.model[1]
        unit = self.model.module[1]
        return unit, unit.module

    def forward(self) -> Tensor:
        return square(self.model, torch.ones(2, DIM))

    def train(self) -> None:
        """Take a step without comparing it."""
        self.forward().backward()
        self.optim.step()
        self.optim.zero_grad()

    def next_folder(self) -> Path:
        return self.folder / str(next(self._steps))

    def save(self) -> Path:
        return checkpoint.save(self.next_folder(), self.model, self.optim, step=1)

    def assert_trains(self) -> None:
        """Take a step and compare its loss, gradients and result with the unsharded model's."""
        self.optim.zero_grad()
        self.pair.step()


# -- the calls

Call = Callable[[Subject], object]


def _in_form(kind: StateDictType, *configs: Any) -> Callable[[Subject], Any]:
    return lambda subject: FSDP.state_dict_type(subject.model, kind, *configs)


rank0_only = _in_form(
    StateDictType.FULL_STATE_DICT,
    FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
    FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
)
_sharded = _in_form(StateDictType.SHARDED_STATE_DICT)


def within(form: Callable[[Subject], contextlib.AbstractContextManager[Any]], call: Call) -> Call:
    def run(subject: Subject) -> None:
        with form(subject):
            call(subject)

    return run


def _state_dict(subject: Subject) -> object:
    return subject.model.state_dict()


def _optim_state_dict(subject: Subject) -> object:
    return FSDP.optim_state_dict(subject.model, subject.optim)


def _summon(subject: Subject) -> None:
    with FSDP.summon_full_params(subject.model):
        pass


def _async_save(subject: Subject) -> None:
    folder = subject.next_folder()
    checkpoint.async_save(folder, subject.model, subject.optim, step=1).wait()


PASSES: dict[str, Call] = {
    "forward": lambda subject: subject.forward(),
    "backward": lambda subject: subject.loss.backward(retain_graph=True),
}
# Calls that check that every rank has made them before anything is sent.
BETWEEN_STEPS: dict[str, Call] = {
    "state_dict": _state_dict,
    "state_dict, rank0_only": within(rank0_only, _state_dict),
    "state_dict, sharded": within(_sharded, _state_dict),
    "load_state_dict, rank0_only": within(
        rank0_only,
        lambda subject: subject.model.load_state_dict(subject.full if subject.rank == 0 else {}),
    ),
    "optim_state_dict": _optim_state_dict,
    "optim_state_dict, sharded": within(_sharded, _optim_state_dict),
    "optim_state_dict_to_load": within(
        rank0_only,
        lambda subject: FSDP.optim_state_dict_to_load(
            subject.model, subject.optim, subject.optim_state
        ),
    ),
    "optim_state_dict_to_load, rank0_only": within(
        rank0_only,
        lambda subject: FSDP.optim_state_dict_to_load(
            subject.model, subject.optim, subject.optim_state if subject.rank == 0 else {}
        ),
    ),
    "summon_full_params": _summon,
    "apply": lambda subject: subject.model.apply(lambda module: None),
    "clip_grad_norm_": lambda subject: subject.model.clip_grad_norm_(1.0),
    "torch.nn.utils.clip_grad_norm_": lambda subject: nn.utils.clip_grad_norm_(
        subject.model.parameters(), 1.0
    ),
}
FILES: dict[str, Call] = {
    "checkpoint.save": Subject.save,
    "checkpoint.async_save": _async_save,
    "checkpoint.load": lambda subject: checkpoint.load(subject.saved, subject.model, subject.optim),
    "checkpoint.resume": lambda subject: checkpoint.resume(
        subject.saved, subject.model, subject.optim, default=None
    ),
}
REFUSABLE = BETWEEN_STEPS | FILES
# With fully_shard these are refused, send nothing, or are torch's own.
_ONLY_FLAT = (
    "load_state_dict, rank0_only",
    "apply",
    "clip_grad_norm_",
    "torch.nn.utils.clip_grad_norm_",
    "state_dict, sharded",
)
CALLS = PASSES | REFUSABLE


# -- what goes wrong on one rank


@contextlib.contextmanager
def planted(subject: Subject, place: str) -> Iterator[None]:
    """Inside the context a step of the model raises Planted at ``place``, which is one of
    PLACES."""
    with contextlib.ExitStack() as stack:
        unit, module = subject.inner_unit
        inner: nn.Module = module.up

        def fault(*args: Any) -> Any:
            raise Planted(place)

        hooks: dict[str, Callable[[], Any]] = {
            "forward hook": lambda: inner.register_forward_hook(fault),
            "forward hook of a unit": lambda: unit.register_forward_hook(fault),
            "backward hook": lambda: inner.register_full_backward_hook(fault),
            "backward of a function": lambda: inner.register_forward_hook(
                lambda module, args, output: _Raises.apply(output)
            ),
            "gradient hook": lambda: inner.register_forward_hook(
                lambda module, args, output: _with_hook(output, fault)
            ),
            "optimizer": lambda: subject.optim.register_step_pre_hook(fault),
        }
        if place == "forward":
            stack.enter_context(mock.patch.object(inner, "forward", fault))
        else:
            stack.callback(hooks[place]().remove)
        yield


IN_STEP = (
    "forward",
    "forward hook",
    "forward hook of a unit",
    "backward hook",
    "backward of a function",
    "gradient hook",
)
PLACES = (*IN_STEP, "optimizer")


class _Raises(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Planted("backward of a function")


def _with_hook(output: Tensor, hook: Callable[..., Any]) -> Tensor:
    output.register_hook(hook)
    return output


@contextlib.contextmanager
def at_first_wait(action: Callable[[], None]) -> Iterator[list[str]]:
    """Inside the context ``action`` is called when this rank would first wait for a message from
    another one. The list is empty until then."""
    done: list[str] = []

    def acting(method: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            if not done:
                done.append(method.__name__)
                action()
            return method(*args, **kwargs)

        return act

    places: tuple[tuple[Any, str], ...] = (
        (dist.Work, "wait"),
        (CounterWork, "wait"),
        (StoreMailbox, "conclude"),
    )
    with contextlib.ExitStack() as stack:
        for owner, name in places:
            acts = acting(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, acts))
        yield done


# -- what ranks see


def message_of(call: Call, subject: Subject) -> str:
    """Return the message of the StateError that ``call`` raises within seconds."""
    message = prompt_message_of(functools.partial(call, subject))
    if not message:
        raise NotRaised("no StateError was raised")
    return message


def message_of_first(subject: Subject, call: Call) -> str:
    """Return the error message of ``call``, or of the forward after it if the call succeeds."""
    try:
        return message_of(call, subject)
    except NotRaised:
        return message_of(Subject.forward, subject)


def assert_told(message: str, *patterns: str) -> None:
    assert_all_told(message, *patterns, "expected:", "got:", "where:", "to do:")


def assert_stays_failed(subject: Subject) -> None:
    """Assert that every call fails at once because communication has failed, also when repeated,
    and with a new model over the same ranks."""
    started = time.monotonic()
    for name, call in itertools.chain(subject.calls.items(), PASSES.items()):
        try:
            call(subject)
        except StateError as error:
            assert_told(str(error), "has failed before, and stays failed")
        else:
            raise AssertionError(f"{name} did not raise")
    passed_s = time.monotonic() - started
    assert passed_s < AT_ONCE_S, f"all calls took {passed_s:.1f} s"


# -- processes that end or stop in the middle

STOP_S = 2.4  # four times LIMITS, after which an idle or silent rank is given up
LIMITS = {"FSDP_COMPAT_MEET_TIMEOUT": "0.6", "FSDP_COMPAT_WARN_AFTER": "0.6"}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {STOP_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def is_killed(subject: Subject, call: Call) -> None:
    """The last rank is killed in the middle of the call."""
    if subject.is_last:
        with at_first_wait(_die):
            call(subject)
        raise AssertionError("the call waited for no message")
    _assert_fails_for_good(subject, call)


def _ends(subject: Subject, call: Call) -> None:
    """The last rank's program ends with an exception in its optimizer, while the others make the
    call already."""
    if subject.is_last:
        with planted(subject, "optimizer"):
            try:
                subject.optim.step()
            except Planted as error:
                sys.last_value = error  # as at the end of a program that raised
                atexit._run_exitfuncs()
                os._exit(0)
    _assert_fails_for_good(subject, call)


def _assert_fails_for_good(subject: Subject, call: Call) -> None:
    """Assert that the call, or the forward after it, fails because the last rank has ended, and
    that nothing works afterwards unless the call was refused before anything was sent."""
    message = message_of_first(subject, call)
    last = subject.pair.ranks - 1
    if "Not all ranks called" in message:
        assert_told(message, rf"rank {last} has not arrived: its? .*ended", r"called \S+\(\) at ")
    elif "did not finish" in message:
        assert_told(message, rf"rank {last} \(process \d+\) has ended")
    if re.search(
        "Not all ranks called|did not finish", message
    ):  # refused: everything that was sent was received
        message = message_of(Subject.forward, subject)
    look = r"to do: +look (for a rank that raised|at rank \d's own error)"
    assert_told(message, "^Waiting for .* failed", look)
    assert_stays_failed(subject)


def _is_stopped(subject: Subject, call: Call) -> None:
    """The last rank is stopped in the middle of the call, and continued."""
    started = time.monotonic()
    with at_first_wait(_stop) if subject.is_last else contextlib.nullcontext():
        call(subject)
    _assert_nothing_happened(subject, started)


def _assert_nothing_happened(subject: Subject, started: float) -> None:
    subject.assert_trains()  # the others wait here at the latest
    passed_s = time.monotonic() - started
    assert passed_s > 0.9 * STOP_S, f"no rank was stopped for so long: {passed_s:.1f} s"
    subject.loss = subject.forward()  # no backward through a graph from before the step
    for call in CALLS.values():
        call(subject)


Fate = Callable[[Subject, Call], None]
Case = tuple[Fate, str, int]  # what happens, the call, the number of ranks


def cases() -> dict[str, Case]:
    """Return calls that wait for different things, each with a rank that is killed in the middle of
    it, and some with another fate."""
    found: list[Case] = [
        (is_killed, name, 2 + number % 2)
        for number, name in enumerate(
            (
                "forward",
                "backward",
                "state_dict, rank0_only",
                "load_state_dict, rank0_only",
                "optim_state_dict, sharded",
                "clip_grad_norm_",
                "checkpoint.save",
                "checkpoint.resume",
            )
        )
    ]
    found += [(_ends, "forward", 2), (_ends, "state_dict", 3), (_ends, "checkpoint.save", 2)]
    found += [(_is_stopped, "backward", 3), (_is_stopped, "checkpoint.async_save", 2)]
    return {
        f"{fate.__name__.strip('_')}, {name}, {n} ranks": (fate, name, n) for fate, name, n in found
    }


def meet_fate(rank: str, title: str, scratch: str) -> None:
    """Run one rank of a case, in a program of its own."""
    fate, name, ranks = cases()[title]
    warnings.simplefilter("ignore", DeprecationWarning)
    store = dist.FileStore(f"{scratch}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    fate(Subject(group, scratch, use_orig_params=ranks == 2), CALLS[name])
