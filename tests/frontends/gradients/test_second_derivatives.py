"""Gradients of gradients, autograd.grad, and backward to some inputs only."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn

from fsdp_compat import ShardingStrategy
from tests.support.cases import about
from tests.support.fully_sharded import sharded_as
from tests.support.models import DIM, Block, Stack
from tests.support.pairwise import each_value
from tests.support.parity import (
    Pair,
    Step,
    backward,
    both_forms,
    both_strategies,
    make_pair,
    no_sync,
    one_backward,
    seeded,
    square,
    train,
)
from tests.support.ranks import on_ranks


class Forces(nn.Module):
    """Takes the derivative of an energy in forward: running units must stay unsharded."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.after = Stack(2), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        with torch.enable_grad():
            (forces,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return self.after(forces)


def _loss_and_penalty(m: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    y = m(x)
    (grad,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    return backward(y.pow(2).mean() + grad.pow(2).mean())


def _penalty_alone(m: nn.Module, x: Tensor) -> Tensor:
    """The last backward passes no output of the model."""
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(m(x).pow(2).sum(), x, create_graph=True)
    return backward(grad.pow(2).mean())


def _slope_alone(m: nn.Module, x: Tensor) -> Tensor:
    """A penalty that does not depend on the values of outputs."""
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return backward((slope.norm(dim=-1) - 1).pow(2).mean())


def _score_alone(m: nn.Module, x: Tensor) -> Tensor:
    """Sliced score matching: derivatives of second order in the loss."""
    x = x.requires_grad_()
    (score,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return backward(slope.sum() + score.pow(2).mean() / 2)


def _slopes_accumulate(m: nn.Module, x: Tensor) -> Tensor:
    with no_sync(m):
        loss = _slope_alone(m, x * 0.5)
    return loss + _slope_alone(m, x)


class Critic(nn.Module):
    """The first and last layers, which a penalty does not reach by outputs, belong to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.up, self.out = Block(), nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.up(x)))


def _takes_gradients_of_inputs(m: nn.Module, x: Tensor) -> Tensor:
    """They leave those of parameters alone."""
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(square(m, x), x)
    square(m, x).backward(inputs=[x])
    assert x.grad is not None
    return backward(square(m, x.detach())) + grad.sum() + x.grad.sum()


@each_value
@both_forms
@both_strategies
@pytest.mark.parametrize(
    ("build", "step"),
    [
        (Stack, _loss_and_penalty),
        (Stack, _penalty_alone),
        (Critic, _slope_alone),
        (Critic, _score_alone),
        (Critic, _slopes_accumulate),
        (Stack, _takes_gradients_of_inputs),
        (Forces, one_backward),
    ],
)
@on_ranks(2)
def test_derivatives_of_any_kind_train_as_unsharded(
    build: type[nn.Module], step: Step, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    train(build, step=step, sharding_strategy=strategy, use_orig_params=use_orig_params)


def _energy(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).pow(2).sum()


def _row(m: nn.Module, x: Tensor) -> Tensor:
    return m(x[None])[0]


TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "jvp": lambda m, x: func.jvp(m, (x,), (x.sin(),))[1],
    "vjp": lambda m, x: func.vjp(m, x)[1](torch.ones(len(x), 3))[0],
    "grad": lambda m, x: func.grad(partial(_energy, m))(x),
    "vmap": lambda m, x: func.vmap(partial(_row, m))(x),
    "jacrev": lambda m, x: func.jacrev(partial(_row, m))(x[0]),
    "jacfwd": lambda m, x: func.jacfwd(partial(_row, m))(x[0]),
    "hessian": lambda m, x: func.hessian(partial(_energy, m))(x),
}


def _squares(transform: Callable[[Any, Tensor], Tensor], m: nn.Module, x: Tensor) -> Tensor:
    return backward(transform(m, x).pow(2).mean())


@pytest.mark.parametrize("front_end", ["original", "ours"])
@on_ranks(2)
def test_transforms_of_a_model_train_as_those_of_an_unsharded_one(front_end: str) -> None:
    for name, transform in TRANSFORMS.items():
        pair = Pair(seeded(Stack), sharded_as(front_end, seeded(Stack)))
        with about(name):
            for _ in range(2):  # the first use, too, is inside a transform
                pair.step(partial(_squares, transform), idle=False)


def _creates_graph(m: nn.Module, x: Tensor) -> Tensor:
    loss = square(m, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of reference cycles
        loss.backward(create_graph=True)
    for p in m.parameters():
        if p.grad is not None:
            p.grad = p.grad.detach()
    return loss.detach()


@each_value
@both_forms
@both_strategies
@on_ranks(2)
def test_backward_with_create_graph_trains_as_unsharded(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    pair = make_pair(Stack, sharding_strategy=strategy, use_orig_params=use_orig_params)
    for _ in range(3):  # a second backward could still come: full until the next forward
        pair.step(_creates_graph, idle=False)
    pair.step(one_backward)
