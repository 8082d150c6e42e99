"""Training over the collectives of a backend, or of a process group written in Python, matches
unsharded training; the backend is gloo here."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import fake_pg, multi_threaded_pg

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, StateDictType, StateError, _torch_private, checkpoint
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.collectives import counting_sends
from tests.support.models import DIM, Block, Inner, Outer, Stack
from tests.support.parity import make_pair
from tests.support.ranks import on_ranks, run_ranks
from tests.support.transports import own_collectives

STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"use_orig_params": False}),
        (3, {"use_orig_params": True}),
        (4, {"replicas": 2}),
    ],
)
@on_ranks("ranks")
def test_training_matches_unsharded(ranks: int, options: dict[str, Any]) -> None:
    with own_collectives(), counting_sends() as sent:
        pair = make_pair(lambda: Stack(2, Outer), (Outer, Inner, Block), **options)
        for _ in range(3):
            pair.step()
        pair.step(as_a_user=True)
        assert pair.model.clip_grad_norm_(1.0) == 0  # the gradients were cleared
    assert sent == [], "nothing from rank to rank"


class Lists(dist.ProcessGroup):
    """The collectives of lists of tensors, which every process group has."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.num_calls = inner, 0

    def allgather(self, *args: Any) -> Any:
        self.num_calls += 1
        return self.inner.allgather(*args)

    def allreduce(self, *args: Any) -> Any:
        return self.inner.allreduce(*args)

    def broadcast(self, *args: Any) -> Any:
        return self.inner.broadcast(*args)

    def reduce_scatter(self, *args: Any) -> Any:
        self.num_calls += 1
        return self.inner.reduce_scatter(*args)


@on_ranks(2)
def test_a_group_with_the_collectives_of_lists_trains_and_keeps_state(tmp_path: Path) -> None:
    assert dist.group.WORLD is not None
    for strategy in STRATEGIES:
        group = Lists(dist.group.WORLD)
        options = {"sharding_strategy": strategy, "process_group": group}
        pair = make_pair(Stack, sync_module_states=True, **options)
        pair.step(as_a_user=True)
        saved = checkpoint.save(tmp_path / strategy.name, pair.model, pair.optim, step=1)
        state = FSDP.optim_state_dict(pair.model, pair.optim)
        pair.optim.load_state_dict(FSDP.optim_state_dict_to_load(pair.model, pair.optim, state))
        scaler = ShardedGradScaler("cpu", process_group=group)
        scaler.scale(pair.model(torch.ones(2, DIM)).sum()).backward()
        scaler.unscale_(pair.optim)
        assert pair.model.clip_grad_norm_(1.0).isfinite()
        next(pair.model.parameters()).data.zero_()
        checkpoint.load(saved, pair.model, pair.optim)
        pair.optim.zero_grad()
        pair.step()
        assert group.num_calls > 0


def _trained() -> dict[str, Any]:
    """The state after some steps. Threads share random numbers: there are none."""
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(3):
        model(torch.arange(8.0).view(2, 4) - dist.get_rank()).pow(2).mean().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def _in_threads() -> list[Any]:
    """Return the results of two ranks that are threads of this process."""
    dist.destroy_process_group()
    multi_threaded_pg._install_threaded_pg()
    # names of groups are each thread's own
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, found = dist.HashStore(), list[Any]([None, None])

    def serve(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
            found[rank] = _trained()
        except BaseException as error:
            found[rank] = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def test_threaded_ranks_give_the_results_of_processes() -> None:
    assert run_ranks(1, _in_threads) == [run_ranks(2, _trained)]


def test_failed_wait_hides_no_error_and_leaves_the_shards(tmp_path: Path) -> None:
    run_ranks(1, _fails, tmp_path / "shards")


def _fails(path: Path) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=fake_pg.FakeStore())
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 8)).sum().backward()
    aborted = mock.Mock(**{"wait.side_effect": dist.DistBackendError("aborted")})
    module[0].register_forward_hook(mock.Mock(side_effect=[ValueError("the user's own")]))
    full = mock.patch("torch.Tensor.new_empty", side_effect=torch.OutOfMemoryError("no memory"))
    with full, pytest.raises(torch.OutOfMemoryError, match=r"^no memory$"):
        model.state_dict()
    gathers = mock.patch.object(
        _torch_private, "start_all_gather", side_effect=[mock.Mock(), aborted]
    )
    with gathers, pytest.raises(ValueError, match="the user's own"):
        model(torch.ones(2, 8))
    for use in (lambda: model(torch.ones(2, 8)), optimizer.step, model.state_dict):
        with pytest.raises(StateError, match=r"has failed before[\s\S]*aborted"):
            use()
    torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1).step()  # of another model
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save(model.state_dict(), path)
    assert len(torch.load(path, weights_only=False)) == 3
