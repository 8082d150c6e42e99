"""Optimizers created before the model was wrapped keep working or raise a clear error; and states
saved by unwrapped models."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy
from fsdp_compat.errors import FsdpCompatError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.models import DIM, Block, Odd, Stack
from tests.support.odd_model import assert_same, state_by_name
from tests.support.optimizer_state import settings
from tests.support.parity import ATOL, RTOL, assert_same_values, seeded
from tests.support.ranks import on_ranks

FULL_SHARD, _, NO_SHARD, HYBRID, _ = ShardingStrategy


class Net(nn.Module):
    """A stack, parameters of all sizes, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.odd = Stack(2), Odd()
        self.stack.stem.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(self.odd(x))


def network() -> Net:
    return seeded(Net)


def batch(seed: int) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed))


def wrapped(model: nn.Module, **options: Any) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW, amsgrad, foreach": partial(torch.optim.AdamW, lr=0.01, amsgrad=True, foreach=True),
    "Adam, fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "SGD, one by one": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    # has state before its first step
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def step(model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
    model(batch(seed)).pow(2).mean().backward()
    optim.step()
    optim.zero_grad()


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names that they have without wrapping."""
    return {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}


class Twins:
    """An unwrapped network and one that is wrapped at some time, with an optimizer each."""

    def __init__(
        self, make: Make = OPTIMIZERS["Adam"], params: Callable[[Any], Any] = trainable
    ) -> None:
        self.plain, self.model = network(), network()
        self.plain_optim, self.optim = (make(params(m)) for m in (self.plain, self.model))

    @property
    def both(self) -> tuple[tuple[Any, torch.optim.Optimizer], ...]:
        return (self.plain, self.plain_optim), (self.model, self.optim)

    def step(self, *seeds: int) -> None:
        for seed in seeds:
            for model, optim in self.both:
                step(model, optim, seed)

    def wrap(self, **options: Any) -> None:
        self.model = wrapped(self.model, **options)

    def assert_equal(self, what: object) -> None:
        """Collective."""
        assert_same_values(self.model.state_dict(), self.plain.state_dict(), f"{what}")

    def assert_equal_optimizers(self, what: object) -> None:
        """Collective."""
        found = FSDP.optim_state_dict(self.model, self.optim)
        expected = state_by_name(self.plain, self.plain_optim)
        with about(what):
            assert_same(found["state"], expected["state"], "state of", RTOL, ATOL)
            assert settings(found) == settings(expected)


# -- with original parameters


FEW = ["AdamW, amsgrad, foreach", "SGD, momentum"]


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "kinds"),
    [(3, FULL_SHARD, list(OPTIMIZERS)), (2, NO_SHARD, FEW), (4, HYBRID, FEW)],
)
@on_ranks("num_ranks")
def test_an_optimizer_from_before_goes_on_with_its_state_cut_to_this_ranks_part(
    num_ranks: int, strategy: ShardingStrategy, kinds: list[str]
) -> None:
    options: dict[str, Any] = {"sharding_strategy": strategy}
    if strategy is HYBRID:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    for kind, num_before in itertools.product(kinds, (0, 2)):
        with about((kind, num_before)):
            twins = Twins(OPTIMIZERS[kind])
            twins.step(*range(num_before))
            objects = dict(twins.model.named_parameters())
            twins.wrap(use_orig_params=True, **options)
            assert list(named(twins.model)) == list(objects)
            for name, parameter in named(twins.model).items():
                assert parameter is objects[name], f"{name} is another object now"
            if num_before:
                twins.assert_equal_optimizers("directly after wrapping")
            for seed in (5, 6):
                twins.step(seed)
                twins.assert_equal(f"step {seed}")
            twins.assert_equal_optimizers("after training")
            for parameter, state in twins.optim.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim():
                        assert value.shape == parameter.shape, f"{key} is not cut"
                        nbytes = value.untyped_storage().nbytes()
                        assert nbytes <= max(16, 4 * parameter.numel()), f"{key} keeps the whole"


@on_ranks(2)
def test_groups_of_parameters_stay_and_more_may_be_added() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decay = [p for p in trainable(model) if p.dim() > 1]
        rest = [p for p in trainable(model) if p.dim() <= 1][:-2]
        return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.003}]

    twins = Twins(partial(torch.optim.AdamW, lr=0.01), groups)
    late = [[p for p in trainable(model) if p.dim() <= 1][-2:] for model, _ in twins.both]
    twins.step(0)
    twins.wrap(use_orig_params=True)
    twins.step(1)
    for (_, optim), params in zip(twins.both, late, strict=True):
        optim.add_param_group({"params": params, "lr": 0.02, "weight_decay": 0.0})
    twins.step(2)
    for model, optim in twins.both:
        model.stack.stem.bias.requires_grad_(True)  # unfrozen, and given to the optimizer
        optim.add_param_group({"params": [named(model)["stack.stem.bias"]]})
    twins.step(3, 4)
    twins.assert_equal("after training")
    twins.assert_equal_optimizers("after training")


@on_ranks(2)
def test_modules_are_wrapped_one_after_the_other_and_load_states_from_before() -> None:
    twins = Twins()
    twins.step(0)
    saved = [copy.deepcopy((m.state_dict(), o.state_dict())) for m, o in twins.both]
    twins.model.stack = FSDP(twins.model.stack, use_orig_params=True)
    twins.step(1)
    twins.model = FSDP(twins.model, use_orig_params=True)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for _, o in twins.both]
    twins.step(2)
    for scheduler in schedulers:
        scheduler.step()
    twins.assert_equal("after training")
    twins.assert_equal_optimizers("after training")
    # state saved before wrapping is loaded through the conversion, as always
    model, optim = twins.model, twins.optim
    model.load_state_dict(saved[1][0])
    optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, saved[1][1]))
    twins.plain.load_state_dict(saved[0][0])
    twins.plain_optim.load_state_dict(saved[0][1])
    twins.step(3)
    twins.assert_equal("after loading")


# -- without original parameters


@on_ranks(2)
def test_with_use_orig_params_false_the_first_step_says_what_to_do() -> None:
    for num_before in (0, 1):
        inner = network()
        optim = torch.optim.Adam(trainable(inner), lr=0.01)
        for seed in range(num_before):
            step(inner, optim, seed)
        model = wrapped(inner)
        before = model.state_dict()
        for _ in range(2):  # every time, not once
            model(batch(1)).pow(2).mean().backward()
            with pytest.raises(FsdpCompatError, match=r"(?s)FlatParameter.*use_orig_params=True"):
                optim.step()
            with pytest.raises(FsdpCompatError, match="use_orig_params=True"):
                FSDP.optim_state_dict(model, optim)
            model.zero_grad()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        step(model, torch.optim.Adam(trainable(model), lr=0.01), 2)  # made after wrapping
        other = nn.Linear(2, 2)  # not part of the model
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), 0.1).step()


# -- states of unwrapped models and of DDP
