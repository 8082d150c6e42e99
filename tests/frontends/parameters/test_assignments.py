"""Parameters that are replaced, or given other memory: the next call takes the values over or
refuses them; and memory of offloaded ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fsdp_compat
from fsdp_compat import (
    CPUOffload,
    ShardingStrategy,
    StateDictType,
    StateError,
    UsageError,
    checkpoint,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.models import DIM, Stack, Tied, chain
from tests.support.pairwise import each_value
from tests.support.parity import (
    Pair,
    both_forms,
    make_pair,
    square,
    vectors,
)
from tests.support.ranks import on_ranks


def make(**options: Any) -> Pair:
    return make_pair(partial(Stack, 2), **options)


def batch() -> Tensor:
    return vectors(torch.Generator().manual_seed(0))


def new_value(parameter: Tensor, seed: int = 5) -> nn.Parameter:
    return nn.Parameter(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


# -- taken over


@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3])
@on_ranks(3)
def test_an_assigned_value_is_taken_over_and_trains(
    strategy: ShardingStrategy, tmp_path: Path
) -> None:
    pair = make(use_orig_params=True, sharding_strategy=strategy)
    plain, inner = pair.plain, pair.model.module
    pair.step()
    up, kept = inner.blocks[0].module.up, inner.blocks[0].module.up.weight
    value = new_value(plain.blocks[0].up.weight)
    plain.blocks[0].up.weight.data.copy_(value)
    up.weight = value
    assert up.weight is kept, "the optimizer's parameter stays"
    pair.assert_state_equal()
    pair.assert_shown_equal()
    other = make(use_orig_params=True).model
    checkpoint.load(checkpoint.save(str(tmp_path), pair.model, step=1), other)
    for each in (other, copy.deepcopy(pair.model)):
        assert torch.equal(each.state_dict()["blocks.0.up.weight"], value)
    pair.step(as_a_user=True)
    # A piece, as FSDP1 takes it; another requires_grad; the parameter itself.
    piece = torch.full_like(inner.stem.bias, 3.0)
    inner.stem.bias = nn.Parameter(piece, requires_grad=False)
    plain.stem.bias.requires_grad_(False).fill_(3.0)
    inner.stem.weight = inner.stem.weight
    pair.step(as_a_user=True)
    # By `.data =`, whole.
    whole = new_value(plain.stem.weight, 7).data
    inner.stem.weight.data = whole.clone()
    plain.stem.weight.data.copy_(whole)
    pair.assert_state_equal()


@both_forms
@on_ranks(2)
def test_inside_of_summon_full_params_an_assigned_value_is_written_back(
    use_orig_params: bool,
) -> None:
    pair = make(use_orig_params=use_orig_params)
    model, value = pair.model, new_value(pair.plain.stem.weight)
    with FSDP.summon_full_params(model):
        model.module.stem.weight = value
        assert torch.equal(model.module.stem.weight, value)
        with pytest.raises(StateError, match="shape"):
            model.module.stem.weight = nn.Parameter(torch.zeros(1))
    assert torch.equal(model.state_dict()["stem.weight"], value)
    model(batch()).sum().backward()


@on_ranks(2)
def test_an_optimizer_of_the_assigned_object_is_refused() -> None:
    pair = make(use_orig_params=True)
    model, value = pair.model, new_value(pair.plain.stem.weight)
    optim = torch.optim.SGD([value], 0.1)
    model.module.stem.weight = value
    model(batch()).sum().backward()
    with pytest.raises(UsageError, match="does not train"):
        optim.step()
    torch.optim.SGD(model.parameters(), 0.1).step()


# -- refused


@both_forms
@on_ranks(2)
def test_an_assignment_that_does_not_fit_is_refused(use_orig_params: bool) -> None:
    model = make(use_orig_params=use_orig_params).model
    stem, before = model.module.stem, model.state_dict()["stem.weight"].clone()
    fits = torch.zeros(DIM, DIM)
    for value in (torch.zeros(DIM + 1, DIM), fits.double(), fits.to("meta")):
        with pytest.raises(StateError, match=r"cannot be replaced(.|\n)*Linear\.weight"):
            stem.weight = nn.Parameter(value)
    if use_orig_params:
        with pytest.raises(StateError, match="already belongs"):
            stem.weight = model.module.head.weight
    else:
        with pytest.raises(StateError, match="cannot be replaced"):
            stem.weight = nn.Parameter(fits)
        with pytest.raises(StateError, match="used while its unit is sharded"):
            stem.weight.sum()  # shows its placeholder again

    def assign(*_: Any) -> None:
        stem.weight = nn.Parameter(fits)

    loss = model(batch()).sum()
    with pytest.raises(StateError, match=r"between forward and backward|FlatParameter"):
        assign()
    loss.backward()
    undo = stem.register_forward_pre_hook(assign)
    with pytest.raises(StateError, match=r"inside forward|FlatParameter"):
        model(batch())
    undo.remove()
    assert torch.equal(model.state_dict()["stem.weight"], before)
    model(batch()).sum().backward()
    tied = FSDP(Tied(), use_orig_params=use_orig_params)
    with pytest.raises(StateError, match=r"tied|FlatParameter"):
        tied.module.two.weight = nn.Parameter(fits)
    stem.extra = nn.Parameter(torch.zeros(3))  # not a parameter of the unit


@both_forms
@on_ranks(2)
def test_a_replaced_parameter_is_refused_by_every_call(
    use_orig_params: bool, tmp_path: Path
) -> None:
    """The change bypasses assignment, as parametrizations do."""
    model = make(use_orig_params=use_orig_params).model
    model(batch()).sum().backward()
    optim = torch.optim.SGD(model.parameters(), 0.1)
    parameters = model.module.stem._parameters
    kept = parameters.get("weight")

    def sharded_state_dict() -> None:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.state_dict()

    uses: list[Callable[[], Any]] = [
        partial(model, batch()),
        model.state_dict,
        partial(model.load_state_dict, {}),
        lambda: FSDP.summon_full_params(model).__enter__(),
        partial(FSDP.optim_state_dict, model, optim),
        partial(model.clip_grad_norm_, 1.0),
        partial(copy.deepcopy, model),
        partial(checkpoint.save, tmp_path, model, step=1),
        sharded_state_dict,
    ]
    for use in uses:
        parameters["weight"] = nn.Parameter(torch.zeros(DIM, DIM))
        with pytest.raises(StateError, match=r"replaced(.|\n)*(stem|Linear\.weight)"):
            use()
            raise AssertionError(f"{use} passed")
        del parameters["weight"]
        if kept is not None:
            with pytest.raises(StateError, match="replaced"):
                use()
            parameters["weight"] = kept
    model(batch()).sum().backward()
    model.state_dict()


# -- other memory between forward and backward


@on_ranks(2)
def test_other_memory_between_forward_and_backward_is_refused_as_torch_does() -> None:
    for library in (torch_fsdp, fsdp_compat):
        model = library.FullyShardedDataParallel(
            chain(*[partial(nn.Linear, DIM, DIM)] * 2),
            sharding_strategy=library.ShardingStrategy.SHARD_GRAD_OP,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        loss = model(batch()).sum()
        for p in model.parameters():
            p.data = torch.ones_like(p)
        with pytest.raises(AssertionError, match="between forward and"):
            loss.backward()


@each_value
@pytest.mark.parametrize("when", ["in forward", "before backward", "in evaluation"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_other_memory_for_a_whole_parameter_is_refused(strategy: str, when: str) -> None:
    model = make(sharding_strategy=ShardingStrategy[strategy]).model
    before, whole = model.state_dict()["stem.weight"].clone(), list[Tensor]()

    def renew(module: nn.Module, *_: Any) -> None:
        whole.append(module.weight)
        if when != "before backward":
            module.weight.data = module.weight.data * 2

    handle, trains = model.module.stem.register_forward_pre_hook(renew), when != "in evaluation"
    with pytest.raises(AssertionError, match="other memory"), torch.set_grad_enabled(trains):
        loss = model(batch()).sum()
        if when == "before backward":
            whole[0].data = torch.zeros(DIM, DIM)
        if trains:
            loss.backward()
        model(batch())
    handle.remove()
    model(batch()).sum().backward()
    assert torch.equal(model.state_dict()["stem.weight"], before)


# -- parameters that are offloaded, even from the CPU to the CPU

OFFLOAD: dict[str, Any] = {"cpu_offload": CPUOffload(offload_params=True)}
NO_SHARD = ShardingStrategy.NO_SHARD


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@each_value
@both_forms
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, NO_SHARD])
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_full_parameters_gradients_and_state_dicts_do_not_view_the_shard(
    num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model, whole = make_pair(Stack, **options, **OFFLOAD).model, set[int]()
    shards = {_storage(p) for p in model.parameters() if p.numel()}
    model.module.stem.register_forward_hook(lambda m, *_: whole.add(_storage(m.weight)))
    square(model, torch.ones(2, DIM)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert not shards & {*whole, *map(_storage, grads)}
    before = [p.detach().clone() for p in model.parameters()]
    for value in (*grads, *model.state_dict().values()):
        value.zero_()
    assert all(map(torch.equal, model.parameters(), before))
