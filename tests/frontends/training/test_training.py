"""Sharded training equals unsharded training with every strategy, world size and shape of
parameters, at a known cost."""

from __future__ import annotations

import collections
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compat import BackwardPrefetch, ShardingStrategy
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._comm.transport import Kind
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import (
    DIM,
    Block,
    Head,
    Inner,
    Odd,
    Outer,
    Stack,
    Tiny,
    Transformer,
    chain,
)
from tests.support.pairwise import each_value
from tests.support.parity import both_forms, make_pair, one_backward, square, tokens, train, trains
from tests.support.ranks import on_ranks, run_ranks

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
HYBRID, HYBRID_ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


class TiedInside(nn.Module):
    """Two modules of one unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def _trains_and_returns_state(*args: Any, **kwargs: Any) -> dict[str, list[float]]:
    pair = train(*args, **kwargs)
    return {name: value.flatten().tolist() for name, value in pair.model.state_dict().items()}


@each_value
@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize(
    "prefetch", [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None]
)
def test_a_stack_of_blocks_trains_as_unsharded(
    use_orig_params: bool, strategy: ShardingStrategy, prefetch: BackwardPrefetch | None
) -> None:
    options = {
        "use_orig_params": use_orig_params,
        "sharding_strategy": strategy,
        "backward_prefetch": prefetch,
    }
    run_ranks(2, trains, Stack, as_a_user=True, **options)


@each_value
@both_forms
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_units_inside_of_units_train_as_unsharded_on_any_number_of_ranks(
    num_ranks: int, use_orig_params: bool
) -> None:
    run_ranks(
        num_ranks, trains, partial(Stack, 2, Outer), (Outer, Inner), use_orig_params=use_orig_params
    )


@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
def test_one_rank_trains_as_unsharded(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    run_ranks(1, trains, Stack, sharding_strategy=strategy, use_orig_params=use_orig_params)


@each_value
@both_forms
@pytest.mark.parametrize("strategy", [HYBRID, HYBRID_ZERO2])
def test_two_replicas_of_two_shards_train_as_unsharded_and_stay_bit_equal(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"replicas": 2, "sharding_strategy": strategy, "use_orig_params": use_orig_params}
    states = run_ranks(
        4, _trains_and_returns_state, partial(Stack, 2, Outer), (Outer, Inner), **options
    )
    assert all(state == states[0] for state in states)


def test_four_replicas_without_sharding_train_as_unsharded_and_stay_bit_equal() -> None:
    states = run_ranks(
        4, _trains_and_returns_state, Stack, sharding_strategy=ShardingStrategy.NO_SHARD
    )
    assert all(state == states[0] for state in states)


@both_forms
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_scalars_empty_parameters_and_fewer_elements_than_ranks_train_as_unsharded(
    num_ranks: int, use_orig_params: bool
) -> None:
    build = partial(chain, partial(nn.Linear, DIM, DIM), Odd, Tiny, partial(nn.Linear, DIM, 7))
    run_ranks(num_ranks, trains, build, (Odd, Tiny, nn.Linear), use_orig_params=use_orig_params)


@both_forms
def test_a_weight_tied_across_units_trains_as_unsharded(use_orig_params: bool) -> None:
    units = (nn.TransformerEncoderLayer, nn.Embedding, Head)
    run_ranks(2, trains, Transformer, units, batch=tokens, use_orig_params=use_orig_params)


@both_forms
def test_a_weight_tied_inside_a_unit_trains_as_unsharded(use_orig_params: bool) -> None:
    run_ranks(
        2,
        trains,
        partial(chain, TiedInside, TiedInside),
        (TiedInside,),
        use_orig_params=use_orig_params,
    )


# -- counts and memory


class _Operators(TorchDispatchMode):
    """Counts operators by name and by the number of elements of their first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[tuple[str, int]] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen[
            func.overloadpacket.__name__,
            args[0].numel() if args and isinstance(args[0], Tensor) else 0,
        ] += 1
        return func(*args, **(kwargs or {}))


def _traffic_of_a_step(strategy: ShardingStrategy) -> tuple[int, int, list[str], list[int], int]:
    """Gathers, reductions, operators that would copy whole buffers, sizes that are divided, and the
    size of a whole buffer."""
    pair = train(partial(chain, *[Block] * 5), sharding_strategy=strategy)
    group = pair.model._runtime.groups[0]
    group.shard.traffic.clear()
    with _Operators() as operators:
        square(pair.model, torch.randn(4, DIM)).backward()
    copies = [
        name for name, _ in operators.seen if name in ("cat", "constant_pad_nd", "split", "chunk")
    ]
    divided = [numel for name, numel in operators.seen if name in ("div_", "div")]
    counts = group.shard.traffic.counts
    return (
        counts[Kind.GATHER],
        counts[Kind.REDUCE],
        copies,
        divided,
        group.shard.ranks * group.store.numel,
    )


@pytest.mark.parametrize(("strategy", "num_gathers"), [(FULL_SHARD, 9), (SHARD_GRAD_OP, 5)])
def test_a_step_gathers_and_reduces_each_of_five_units_no_more_than_needed(
    strategy: ShardingStrategy, num_gathers: int
) -> None:
    # With FULL_SHARD the last block is kept after forward, so backward gathers one less.
    for gathers, reductions, *_ in run_ranks(2, _traffic_of_a_step, strategy):
        assert (gathers, reductions) == (num_gathers, 5)


def test_a_step_neither_concatenates_nor_pads_and_divides_shards_only() -> None:
    for _, _, copies, divided, full_numel in run_ranks(2, _traffic_of_a_step, FULL_SHARD):
        assert copies == []
        assert divided
        assert full_numel not in divided


def _live_nbytes() -> int:
    storages = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter):
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@on_ranks(2)
def test_backward_holds_two_whole_units_and_no_step_holds_more_than_the_one_before() -> None:
    """The peak of live bytes of each step, and the largest number of units whose parameters or
    gradients are whole at once."""
    num_steps = 8
    num_blocks = 6
    torch.manual_seed(0)
    model = FSDP(
        chain(*[partial(Block, 32)] * num_blocks), auto_wrap_policy=ModuleWrapPolicy({Block})
    )
    optim = torch.optim.SGD(model.parameters(), 0.1)
    groups = model._runtime.groups
    whole = groups[0].shard.ranks * groups[0].store.shard.nbytes
    peaks, most = [], 0.0

    def measure(grad: Tensor) -> None:
        nonlocal most
        peaks[-1] = max(peaks[-1], _live_nbytes())
        most = max(most, sum(group.memory.resident_nbytes for group in groups) / whole)

    for _ in range(num_steps):
        peaks.append(0)
        x = torch.randn(4, 32)
        for block in model.module:
            x = block(x)
            x.register_hook(measure)
        x.pow(2).mean().backward()
        del x
        optim.step()
        optim.zero_grad()
        gc.collect()
    assert len(set(peaks[3:])) == 1
    assert most <= 2


@both_forms
@on_ranks(2)
def test_the_storage_of_whole_parameters_is_empty_between_steps(use_orig_params: bool) -> None:
    pair = make_pair(Stack, use_orig_params=use_orig_params)
    for _ in range(2):
        pair.step(one_backward)
        assert (
            pair.model._runtime.groups[0].memory.all_gather_output.untyped_storage().nbytes() == 0
        )
