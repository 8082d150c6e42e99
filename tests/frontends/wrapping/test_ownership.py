"""What a wrapped module keeps alive, which ranks it communicates with, and what it exposes."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullStateDictConfig, StateDictType, StateError
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy, always_wrap_policy
from tests.support.pairwise import pairwise
from tests.support.parity import Pair, both_forms, make_pair, seeded, square
from tests.support.ranks import on_ranks

LINEARS = ModuleWrapPolicy({nn.Linear})


def network() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))


@both_forms
@on_ranks(2)
def test_whole_parameters_are_freed_when_they_are_sharded(use_orig_params: bool) -> None:
    model = network()
    whole = sum(p.numel() for p in model.parameters())
    originals = [weakref.ref(p) for p in model.parameters()]
    sharded = FSDP(model, auto_wrap_policy=LINEARS, use_orig_params=use_orig_params)
    gc.collect()
    if not use_orig_params:
        assert all(ref() is None for ref in originals), "nothing holds the whole parameters"
    storages = [p.untyped_storage() for p in sharded.parameters() if p.numel()]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(held.values()) <= 4 * (whole // 2 + 32), "the parameters that are left hold shards"


@on_ranks(2)
def test_whole_parameters_are_let_go_unit_by_unit() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, device="meta"))
    first = [weakref.ref(p) for p in model[0].parameters()]
    alive = []

    def init(module: nn.Module) -> None:
        gc.collect()
        alive.extend(ref() is not None for ref in first)
        module.to_empty(device="cpu", recurse=False)

    FSDP(model, auto_wrap_policy=LINEARS, param_init_fn=init)
    assert alive == [False, False], "the first unit is sharded before the second gets its values"


@both_forms
@on_ranks(2)
def test_existing_gradients_are_added_to(use_orig_params: bool) -> None:
    model, plain = network(), network()
    for module in (model, plain):
        square(module, torch.ones(2, 8)).backward()
    Pair(plain, FSDP(model, use_orig_params=use_orig_params)).step()


@both_forms
@on_ranks(2)
def test_no_module_hands_out_parts_of_parameters_as_its_state(use_orig_params: bool) -> None:
    model = FSDP(network(), use_orig_params=use_orig_params)
    for inner in (model.module, model.module[0]):
        for call in (inner.state_dict, lambda inner=inner: inner.load_state_dict({}, strict=False)):
            with pytest.raises(StateError, match=r"call .* on the wrapper"):
                call()
    with FSDP.summon_full_params(model):
        shown, whole = (
            {name: value.shape for name, value in each.state_dict().items()}
            for each in (model.module, network())
        )
        assert shown == whole
    model.load_state_dict(model.state_dict())


def trained(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@on_ranks(4)
def test_groups_of_some_ranks_and_of_all_do_not_disturb_each_other() -> None:
    rank = dist.get_rank()
    expected = trained(network())
    some = dist.new_group([1, 2])
    if rank in (1, 2):  # a model on some ranks only
        torch.testing.assert_close(trained(FSDP(network(), process_group=some)), expected)
    torch.testing.assert_close(trained(FSDP(network())), expected)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = FSDP(network(), process_group=halves[rank // 2])  # two models at the same time
    rank_0 = FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, rank_0):
        state = trained(model)
    assert bool(state) is (rank % 2 == 0), "the first rank of the group, not of the world"
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        shapes, whole = ({p.shape for p in m.parameters()} for m in (model, network()))
        assert (shapes == whole) is (rank % 2 == 0)


class TiedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x * self.scales[0]


@both_forms
@on_ranks(2)
def test_a_container_that_is_never_called_owns_no_parameters(use_orig_params: bool) -> None:
    options = {"auto_wrap_policy": always_wrap_policy, "use_orig_params": use_orig_params}
    make_pair(TiedBlocks, **options).step()


class KeepsLoss(nn.Module):
    """Has parameters beside modules that are units, and keeps its loss, and thereby the graph of
    the last forward: what holds any of these reaches the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.scale
        self.loss = y.pow(2).mean()
        return y


@pairwise
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("forward_replaced", [False, True])
@both_forms
@on_ranks(2)
def test_an_unreferenced_model_is_freed_completely(
    use_orig_params: bool, forward_replaced: bool, sync: bool
) -> None:
    def train_and_drop() -> weakref.ref[nn.Module]:
        model = KeepsLoss()
        if forward_replaced:  # as libraries that wrap calls do; the function holds the module
            model.forward = functools.partial(KeepsLoss.forward, model)
        sharded = FSDP(model, auto_wrap_policy=LINEARS, use_orig_params=use_orig_params)
        optimizer = torch.optim.Adam(sharded.parameters())
        for _ in range(2):
            with contextlib.nullcontext() if sync else sharded.no_sync():
                loss = sharded(torch.ones(2, 8)).sum() + model.loss
                loss.backward(retain_graph=True)
                loss.backward()
            optimizer.step()
        sharded.state_dict()
        return weakref.ref(model)

    reference = train_and_drop()
    gc.collect()
    assert reference() is None


@on_ranks(2)
def test_a_graph_holds_its_model_for_one_backward() -> None:
    x = torch.ones(2, 8, requires_grad=True)
    loss = FSDP(network())(x).sum()
    gc.collect()
    loss.backward(retain_graph=True)  # the graph holds the model until then
    assert x.grad is not None
    gc.collect()
    with pytest.raises(StateError, match="garbage-collected"):
        loss.backward()


@on_ranks(2)
def test_connections_close_with_the_process_group_although_the_model_lives_on() -> None:
    model = FSDP(network())
    model(torch.ones(2, 8)).sum().backward()
    communicator = model._runtime.groups[0].shard
    assert not communicator.has_failed
    dist.destroy_process_group()
    end = time.monotonic() + 20
    while not communicator.has_failed:
        assert time.monotonic() < end, "the connections of a destroyed process group stay"
        time.sleep(0.01)
    with pytest.raises(StateError, match="was destroyed"):
        model(torch.ones(2, 8))
