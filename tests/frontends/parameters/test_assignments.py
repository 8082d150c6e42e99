"""Parameters that are replaced, or given other memory: the next call takes the values over or
refuses them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, StateDictType, StateError, UsageError, checkpoint
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import DIM, Block, Stack
from tests.support.parity import assert_close, both_forms
from tests.support.ranks import on_ranks
from tests.support.sampling import sample


def make(
    build: Callable[[], nn.Module] = lambda: Stack(2), **options: Any
) -> tuple[nn.Module, FSDP]:
    torch.manual_seed(0)
    plain = build()
    return plain, FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def batch(seed: int = 0) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed))


def new_value(parameter: Tensor, seed: int = 5) -> nn.Parameter:
    return nn.Parameter(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


def step(
    modules: tuple[nn.Module, nn.Module], optims: list[torch.optim.Optimizer], seed: int
) -> None:
    for module, optim in zip(modules, optims, strict=True):
        module(batch(seed)).pow(2).mean().backward()
        optim.step()
        optim.zero_grad()


def assert_equal_states(model: FSDP, plain: nn.Module) -> None:
    for name, value in plain.state_dict().items():
        assert_close(model.state_dict()[name], value, name)


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
    directory = str(tmp_path)
    for strategy in (
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.NO_SHARD,
    ):
        plain, model = make(use_orig_params=True, sharding_strategy=strategy)
        optims: list[torch.optim.Optimizer] = [
            torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (plain, model)
        ]
        step((plain, model), optims, 0)
        kept = model.module.blocks[0].module.up.weight
        value = new_value(plain.blocks[0].up.weight)
        with torch.no_grad():
            plain.blocks[0].up.weight.copy_(value)
        model.module.blocks[0].module.up.weight = value
        assert model.module.blocks[0].module.up.weight is kept, "the optimizer's parameter stays"
        assert_equal_states(model, plain)
        with FSDP.summon_full_params(model):
            shown = model.module.blocks[0].module.up.weight
            assert shown.shape == value.shape and torch.equal(shown, value)
        assert torch.equal(copy.deepcopy(model).state_dict()["blocks.0.up.weight"], value)
        if strategy is ShardingStrategy.FULL_SHARD:
            _, other = make(use_orig_params=True)
            checkpoint.load(checkpoint.save(directory, model, step=1), other)
            assert torch.equal(other.state_dict()["blocks.0.up.weight"], value)
        step((plain, model), optims, 1)
        assert_equal_states(model, plain)
        # A piece, as FSDP1 takes it; another requires_grad; the parameter itself.
        model.module.stem.bias = nn.Parameter(
            torch.full_like(model.module.stem.bias, 3.0), requires_grad=False
        )
        plain.stem.bias.requires_grad_(False).fill_(3.0)
        model.module.stem.weight = model.module.stem.weight
        step((plain, model), optims, 2)
        assert_equal_states(model, plain)
        # By `.data =`, whole.
        whole = new_value(plain.stem.weight, 7).data
        model.module.stem.weight.data = whole.clone()
        plain.stem.weight.data.copy_(whole)
        assert_equal_states(model, plain)


@both_forms
@on_ranks(2)
def test_inside_of_summon_full_params_an_assigned_value_is_written_back(
    use_orig_params: bool,
) -> None:
    plain, model = make(use_orig_params=use_orig_params)
    value = new_value(plain.stem.weight)
    with FSDP.summon_full_params(model):
        model.module.stem.weight = value
        assert torch.equal(model.module.stem.weight, value)
        with pytest.raises(StateError, match="shape"):
            model.module.stem.weight = nn.Parameter(torch.zeros(1))
    assert torch.equal(model.state_dict()["stem.weight"], value)
    model(batch()).sum().backward()


@on_ranks(2)
def test_an_optimizer_of_the_assigned_object_is_refused() -> None:
    plain, model = make(use_orig_params=True)
    value = new_value(plain.stem.weight)
    optim = torch.optim.SGD([value], 0.1)
    model.module.stem.weight = value
    model(batch()).sum().backward()
    with pytest.raises(UsageError, match="does not train"):
        optim.step()
    torch.optim.SGD(model.parameters(), 0.1).step()


# -- refused


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


@both_forms
@on_ranks(2)
def test_an_assignment_that_does_not_fit_is_refused(use_orig_params: bool) -> None:
    plain, model = make(use_orig_params=use_orig_params)
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
    assert plain.stem.weight.shape == (DIM, DIM)


@both_forms
@on_ranks(2)
def test_a_replaced_parameter_is_refused_by_every_call(
    use_orig_params: bool, tmp_path: Path
) -> None:
    """A change that bypasses assignment, as by parametrizations, is refused by every call until it
    is undone."""
    directory = str(tmp_path)
    _, model = make(use_orig_params=use_orig_params)
    model(batch()).sum().backward()
    parameters = model.module.stem._parameters
    kept = parameters.get("weight")
    for name, use in uses(model, Path(directory)):
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
    """Return what happens with torch's class and with ours."""
    strategy = "SHARD_GRAD_OP"
    found = []
    for cls, strategies in ((TorchFSDP, TorchStrategy), (FSDP, ShardingStrategy)):
        torch.manual_seed(0)
        inner, options = (
            nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)),
            {"use_orig_params": True},
        )
        if cls is TorchFSDP:
            options["device_id"] = torch.device("cpu")  # type: ignore[assignment]
        model = cls(inner, sharding_strategy=strategies[strategy], **options)
        loss = model(batch()).sum()
        for p in model.parameters():
            p.data = torch.ones_like(p)
        try:
            loss.backward()
            found.append("runs")
        except AssertionError as error:
            found.append(
                "between forward and backward"
                if "between forward and" in str(error)
                else str(error)
            )
    assert found == ["between forward and backward"] * 2


@on_ranks(2)
def test_other_memory_of_parameters_that_are_gathered_again_counts() -> None:
    """Backward uses new values of parameters that it gathers again, just as if they were written in
    place."""
    models = [
        make(lambda: nn.Sequential(Block(), Block(), Block()), use_orig_params=True)[1]
        for _ in range(2)
    ]
    for model, in_place in zip(models, (True, False), strict=True):
        loss = model(batch()).sum()
        for p in model.module[1].parameters():
            if in_place:
                p.data.fill_(0.1)
            else:
                p.data = torch.full_like(p, 0.1)
        loss.backward()
    with (
        FSDP.summon_full_params(models[0], with_grads=True),
        FSDP.summon_full_params(models[1], with_grads=True),
    ):
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(p.grad, q.grad) and torch.equal(p, q), name


class Renews(nn.Module):
    """Gives its whole parameter other memory in forward, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.when = nn.Linear(DIM, DIM), ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "before use":
            self.linear.weight.data = self.linear.weight.data * 2
        x = self.linear(x)
        self.seen = self.linear.weight
        return x


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_other_memory_for_a_whole_parameter_is_refused(strategy: str) -> None:
    for when, use in (
        ("before use", lambda model: model(batch()).sum().backward()),
        ("between", None),
        ("in evaluation", lambda model: model(batch())),
    ):
        model = FSDP(Renews(), sharding_strategy=ShardingStrategy[strategy])
        before = model.state_dict()["linear.weight"].clone()
        model.module.when = "before use" if when == "in evaluation" else when
        with (
            pytest.raises(AssertionError, match="other memory"),
            torch.set_grad_enabled(when != "in evaluation"),
        ):
            if use is not None:
                use(model)
                model(batch())
            else:
                loss = model(batch()).sum()
                model.module.seen.data = torch.zeros(DIM, DIM)
                loss.backward()
        model.module.when = ""
        model(batch()).sum().backward()
        assert torch.equal(model.state_dict()["linear.weight"], before), when
        dist.barrier()
