"""Parameters that are replaced, or given other memory: the next call takes the values over or
refuses them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fsdp_compat
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, StateDictType, StateError, UsageError, checkpoint
from tests.support.models import DIM, Block, Stack, Tied, chain
from tests.support.parity import Pair, assert_same_values, both_forms, make_pair, whole_gradients
from tests.support.ranks import on_ranks
from tests.support.sampling import sample


def make(**options: Any) -> Pair:
    return make_pair(partial(Stack, 2), **options)


def batch() -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))


def new_value(parameter: Tensor, seed: int = 5) -> nn.Parameter:
    return nn.Parameter(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


# -- taken over


def uses(model: FSDP, directory: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield everything that reads a model's parameters, by name."""
    optim = torch.optim.SGD(model.parameters(), 0.1)
    yield "forward", lambda: model(batch())
    yield "state_dict", model.state_dict
    yield "load_state_dict", lambda: model.load_state_dict({})
    yield "summon_full_params", lambda: FSDP.summon_full_params(model).__enter__()
    yield "optim_state_dict", lambda: FSDP.optim_state_dict(model, optim)
    yield "clip_grad_norm_", lambda: model.clip_grad_norm_(1.0)
    yield "deepcopy", lambda: copy.deepcopy(model)
    yield "checkpoint.save", lambda: checkpoint.save(directory, model, step=1)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    yield "sharded state_dict", model.state_dict


@pytest.mark.parametrize("ranks", sample([1, 3], 1))
@on_ranks("ranks")
def test_an_assigned_value_is_taken_over_and_trains(ranks: int, tmp_path: Path) -> None:
    for strategy in list(ShardingStrategy)[:3]:
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
        assert torch.equal(copy.deepcopy(pair.model).state_dict()["blocks.0.up.weight"], value)
        if strategy is ShardingStrategy.FULL_SHARD:
            other = make(use_orig_params=True).model
            checkpoint.load(checkpoint.save(str(tmp_path), pair.model, step=1), other)
            assert torch.equal(other.state_dict()["blocks.0.up.weight"], value)
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
    values = [
        torch.zeros(DIM + 1, DIM),
        torch.zeros(DIM, DIM, dtype=torch.float64),
        torch.zeros(DIM, DIM, device="meta"),
    ]
    if not use_orig_params:
        values.append(torch.zeros(DIM, DIM))
    for value in values:
        with pytest.raises(StateError, match=r"cannot be replaced(.|\n)*Linear\.weight"):
            stem.weight = nn.Parameter(value)
    if use_orig_params:
        with pytest.raises(StateError, match="already belongs"):
            stem.weight = model.module.head.weight
    else:
        with pytest.raises(StateError, match="used while its unit is sharded"):
            stem.weight.sum()  # shows its placeholder again
    loss = model(batch()).sum()
    with pytest.raises(StateError, match=r"between forward and backward|FlatParameter"):
        stem.weight = nn.Parameter(torch.zeros(DIM, DIM))
    loss.backward()

    def assign(module: nn.Module, *_: Any) -> None:
        module.weight = nn.Parameter(torch.zeros(DIM, DIM))

    undo = stem.register_forward_pre_hook(assign)
    with pytest.raises(StateError, match=r"inside forward|FlatParameter"):
        model(batch())
    undo.remove()
    assert torch.equal(model.state_dict()["stem.weight"], before)
    model(batch()).sum().backward()
    tied = FSDP(Tied(), use_orig_params=use_orig_params)
    with pytest.raises(StateError, match=r"tied|FlatParameter"):
        tied.module.two.weight = nn.Parameter(torch.zeros(DIM, DIM))
    stem.extra = nn.Parameter(torch.zeros(3))  # not a parameter of the unit


@both_forms
@on_ranks(2)
def test_a_replaced_parameter_is_refused_by_every_call(
    use_orig_params: bool, tmp_path: Path
) -> None:
    """The change bypasses assignment, as parametrizations do."""
    model = make(use_orig_params=use_orig_params).model
    model(batch()).sum().backward()
    parameters = model.module.stem._parameters
    kept = parameters.get("weight")
    for name, use in uses(model, tmp_path):
        parameters["weight"] = nn.Parameter(torch.zeros(DIM, DIM))
        with pytest.raises(
            StateError, match=r"replaced by another object(.|\n)*stem|replaced(.|\n)*Linear\.weight"
        ):
            use()
            raise AssertionError(f"{name} passed")
        del parameters["weight"]
        if kept is not None:
            with pytest.raises(StateError, match="replaced"):
                use()
            parameters["weight"] = kept
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    model(batch()).sum().backward()
    model.state_dict()


# -- other memory between forward and backward


@on_ranks(2)
def test_other_memory_between_forward_and_backward_is_refused_as_torch_does() -> None:
    for library in (torch_fsdp, fsdp_compat):
        model = library.FullyShardedDataParallel(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)),
            sharding_strategy=library.ShardingStrategy.SHARD_GRAD_OP,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        loss = model(batch()).sum()
        for p in model.parameters():
            p.data = torch.ones_like(p)
        with pytest.raises(AssertionError, match="between forward and"):
            loss.backward()


@on_ranks(2)
def test_other_memory_of_parameters_that_are_gathered_again_counts() -> None:
    """Backward uses them, as if they were written in place."""
    models = [make_pair(partial(chain, *[Block] * 3), use_orig_params=True).model for _ in range(2)]
    for model in models:
        loss = model(batch()).sum()
        for p in model.module[1].parameters():
            if model is models[0]:
                p.data.fill_(0.1)
            else:
                p.data = torch.full_like(p, 0.1)
        loss.backward()
    one, other = ({**whole_gradients(model), **model.state_dict()} for model in models)
    assert_same_values(other, one, "value or gradient", 0.0)


class Renews(nn.Module):
    """Gives its whole parameter other memory in forward, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.renews = nn.Linear(DIM, DIM), False

    def forward(self, x: Tensor) -> Tensor:
        if self.renews:
            self.linear.weight.data = self.linear.weight.data * 2
        self.seen = self.linear.weight
        return self.linear(x)


@pytest.mark.parametrize("when", ["in forward", "before backward", "in evaluation"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_other_memory_for_a_whole_parameter_is_refused(strategy: str, when: str) -> None:
    model = FSDP(Renews(), sharding_strategy=ShardingStrategy[strategy])
    before = model.state_dict()["linear.weight"].clone()
    model.module.renews = when != "before backward"
    trains = when != "in evaluation"
    with pytest.raises(AssertionError, match="other memory"), torch.set_grad_enabled(trains):
        loss = model(batch()).sum()
        if when == "before backward":
            model.module.seen.data = torch.zeros(DIM, DIM)
        if trains:
            loss.backward()
        model(batch())
    model.module.renews = False
    model(batch()).sum().backward()
    assert torch.equal(model.state_dict()["linear.weight"], before)
