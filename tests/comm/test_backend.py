"""Training over the collectives of a backend, or of a process group written in Python, matches
unsharded training; the backend is gloo here."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import multi_threaded_pg

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy, StateDictType, checkpoint
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.collectives import counting_sends, through_backends
from tests.support.models import Block, Inner, Outer, Stack
from tests.support.parity import make_pair
from tests.support.ranks import on_ranks, run_ranks

STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]


# -- a backend's own collectives


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"use_orig_params": False}),
        (3, {"use_orig_params": True}),
        (2, {"sharding_strategy": ShardingStrategy.NO_SHARD}),
        (4, {"replicas": 2}),
        (2, {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)}),
    ],
)
@on_ranks("ranks")
def test_training_matches_unsharded(ranks: int, options: dict[str, Any]) -> None:
    with through_backends(), counting_sends() as sent:
        pair = make_pair(lambda: Stack(2, Outer), (Outer, Inner, Block), **options)
        for _ in range(3):
            pair.step()
        pair.step(as_a_user=True)
        assert pair.model.clip_grad_norm_(1.0) == 0  # the gradients were cleared
    assert sent == [], "nothing from rank to rank"


# -- groups in Python


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


class Singles(Lists):
    """Also those of single tensors, under the names of torch since 2.13 and before."""

    def all_gather_single(self, *args: Any) -> Any:
        self.num_calls += 1
        return self.inner._allgather_base(*args)

    def reduce_scatter_single(self, *args: Any) -> Any:
        self.num_calls += 1
        return self.inner._reduce_scatter_base(*args)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


def _everything(folder: Path | None, **options: Any) -> dict[str, Any]:
    """Return the results of training, state dicts, summon_full_params and checkpoints on this
    rank."""
    rank, found = dist.get_rank(), dict[str, Any]()
    for strategy in STRATEGIES:
        generator = torch.Generator().manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) + rank)
        model = FSDP(
            module,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sync_module_states=True,
            use_orig_params=strategy is ShardingStrategy.FULL_SHARD,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)
            if strategy is ShardingStrategy.SHARD_GRAD_OP
            else None,
            **options,
        )
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        scaler = ShardedGradScaler("cpu", process_group=options.get("process_group"))
        seen: list[Any] = []
        for _ in range(3):
            loss = model(torch.arange(8.0).view(2, 4) - rank).float().pow(2).mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            seen += [loss.item(), model.clip_grad_norm_(1.0).item()]
            scaler.step(optimizer)
            scaler.update()
        seen.append({name: value.tolist() for name, value in model.state_dict().items()})
        states = FSDP.optim_state_dict(model, optimizer)
        seen.append({name: its["exp_avg"].tolist() for name, its in states["state"].items()})
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(model.state_dict())
        with torch.no_grad(), FSDP.summon_full_params(model, with_grads=True):
            seen += [
                (p.tolist(), p.grad.tolist()) for p in model.parameters() if p.grad is not None
            ]
            next(model.parameters()).mul_(2)
        if folder is not None:
            saved = checkpoint.save(folder / strategy.name, model, optimizer, step=1)
            next(iter(model.parameters())).data.zero_()
            checkpoint.load(saved, model, optimizer)
        seen.append({name: value.tolist() for name, value in model.state_dict().items()})
        found[strategy.name] = seen
    return found


@pytest.mark.parametrize("kind", [Lists, Singles])
@on_ranks(2)
def test_python_group_over_gloo_gives_the_results_of_gloo(
    tmp_path: Path, kind: type[Lists]
) -> None:
    folder = tmp_path
    assert dist.group.WORLD is not None
    group = kind(dist.group.WORLD)
    assert _everything(folder / "python", process_group=group) == _everything(folder / "gloo")
    assert group.num_calls > 0


def _in_threads() -> list[Any]:
    """Return the results of two ranks that are threads of this process."""
    dist.destroy_process_group()
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(
        True
    )  # names of groups are each thread's own
    store, found = dist.HashStore(), list[Any]([None, None])

    def serve(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
            found[rank] = _everything(None)
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


def _over_gloo() -> Any:
    return _everything(None)


def test_threaded_ranks_give_the_results_of_processes() -> None:
    assert run_ranks(1, _in_threads) == [run_ranks(2, _over_gloo)]
