"""Forks of a process with shards in shared memory: a child sees them as they were at the fork, and
training continues."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fsdp_compat import FullyShardedDataParallel, ShardingStrategy
from tests.support.errors import message_of
from tests.support.models import DIM, Block
from tests.support.parity import make_pair, one_backward
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import COPIED, MAPPED

WIDTH = 1024  # of a matrix whose shard on each of two ranks is large enough to be shared


class Training:
    """A sharded model and its training step."""

    def __init__(self, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        self.model = FullyShardedDataParallel(layers, sharding_strategy=strategy)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.linspace(-1, 1, WIDTH) + dist.get_rank()).pow(2).mean().backward()
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        """The tensors of the model that lie in shared memory."""
        parameters = list(self.model.parameters())
        return [
            *(p.detach() for p in parameters),
            *(p.grad for p in parameters if p.grad is not None),
        ]


class Child:
    """A forked process that reads tensors on request."""

    def __init__(self, look: Callable[[], Any]) -> None:
        fork = multiprocessing.get_context("fork")
        self._connection, theirs = fork.Pipe()
        self._process = fork.Process(target=self._run, args=(look, theirs))
        self._process.start()
        theirs.close()

    @staticmethod
    def _run(look: Callable[[], Any], connection: Any) -> None:
        torch.set_num_threads(1)  # threads do not come along
        connection.recv()
        connection.send(look())

    def answer(self) -> Any:
        self._connection.send(None)
        try:
            return self._connection.recv()
        finally:
            self._connection.close()
            self._process.join()


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


@contextlib.contextmanager
def no_files() -> Iterator[None]:
    with mock.patch.object(os, "memfd_create", side_effect=OSError(24, "no descriptors")):
        yield


# -- values in a child


def forks_while_it_trains(strategy: ShardingStrategy, refused: int = -1) -> None:
    """refused: the fork at which the system gives no file."""
    training, undisturbed = Training(strategy), Training(strategy)
    training.step()
    children, expected = [], []
    for number in range(3):
        with no_files() if number == refused else contextlib.nullcontext():
            children += [Child(lambda: bits(training.state())) for _ in range(2)]
        expected += [bits(training.state())] * 2
        training.step()
    found = [child.answer() for child in children]
    assert found == expected
    assert len({tuple(state) for state in expected}) == 3, (
        "there is nothing to see if nothing changes"
    )
    for _ in range(4):
        undisturbed.step()
    assert bits(training.state()) == bits(undisturbed.state())


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_forked_process_sees_weights_and_gradients_as_of_the_fork(
    strategy: ShardingStrategy,
) -> None:
    run_ranks(2, forks_while_it_trains, strategy)


def test_forked_process_sees_them_when_the_system_has_no_more_files() -> None:
    """Without mapped shards, training goes on."""
    run_ranks(2, forks_while_it_trains, ShardingStrategy.FULL_SHARD, 1, environment=COPIED)


@on_ranks(2, environment=MAPPED)
def test_a_rank_whose_shards_can_be_mapped_no_more_is_named_on_all_ranks() -> None:
    """Rank 1 has no file for a fork; its child sees the weights from before."""
    training = Training()
    training.step()
    with no_files() if dist.get_rank() else contextlib.nullcontext():
        child = Child(lambda: bits(training.state()))
    expected = bits(training.state())
    message = message_of(training.step)
    assert child.answer() == expected
    assert "no shared memory on ranks [1], which ran out of file descriptors" in message


class Weights(Dataset[float]):
    """A data set that reads the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return sum(float(parameter.detach().sum()) for parameter in self._model.parameters())


@on_ranks(2)
def test_data_loader_workers_see_the_weights_as_of_the_fork() -> None:
    training = Training()
    for _ in range(2):
        training.step()
        data = Weights(training.model)
        expected = data[0]
        loader = DataLoader(
            data, batch_size=None, num_workers=2, prefetch_factor=1, multiprocessing_context="fork"
        )
        seen = []
        for value in loader:
            seen.append(float(value))
            training.step()
        assert seen == [pytest.approx(expected, rel=1e-6, abs=0)] * len(data)
        assert data[0] != pytest.approx(expected, rel=1e-6, abs=0)


@on_ranks(2)
def test_forks_during_a_step_do_not_change_it() -> None:
    """Between the gathers of a forward, which other ranks may still have to read, and before they
    read those of backward."""
    pair = make_pair(lambda: nn.Sequential(Block(), Block(), nn.Linear(DIM, 3)))
    children: list[Child] = []

    def fork(*_: object) -> None:
        children.append(Child(lambda: 0))

    for module in pair.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(fork)
    for _ in range(2):
        pair.step(one_backward)
    assert [child.answer() for child in children] == [0] * len(children)
    assert len(children) == 2 * 5


# -- cost


@on_ranks(2)
def test_fork_copies_nothing_and_leaves_nothing() -> None:
    training = Training()
    for _ in range(2):
        training.step()

    def files() -> dict[int, int]:
        """By inode: bytes."""
        found = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "fsdp_compat" in os.readlink(f"/proc/self/fd/{name}"):
                    status = os.fstat(int(name))
                    found[status.st_ino] = status.st_blocks * 512
        return found

    training.optimizer.zero_grad()
    before = sum(files().values())
    children = [Child(lambda: len(files())) for _ in range(4)]
    during = sum(files().values())
    assert WIDTH * WIDTH * 4 <= during <= before + (1 << 14), "one copy of the shards"
    in_child = [child.answer() for child in children]
    assert in_child == [0] * 4, "no descriptors of what the parent writes from now on"
    for _ in range(2):
        training.step()
    training.optimizer.zero_grad()
    assert sum(files().values()) <= before + (1 << 16)


@on_ranks(2)
def test_forked_process_that_uses_the_model_gets_an_error() -> None:
    training = Training()
    training.step()

    message = Child(lambda: message_of(training.step)).answer()
    training.step()
    assert "this process was forked from a rank" in message


# -- forks without Python


@on_ranks(2)
def test_process_forked_by_c_cannot_write_to_shards_of_its_parent() -> None:
    shard = Training().state()[0]
    before = shard.clone()
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.memset(shard.data_ptr(), 1, 4)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == -signal.SIGSEGV and torch.equal(shard, before)
