"""However units are called: twice, partly, without their root, in turns with evaluation, from
several models, with nested or modified tensors, for losses that forward does not return."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compat import ShardingStrategy, StateError
from tests.support.models import (
    DIM,
    Block,
    Named,
    Record,
    Reuse,
    Stack,
    TwoHeads,
    Unit,
    chain,
    frozen,
    made_of,
)
from tests.support.pairwise import each_value
from tests.support.parity import (
    GRADIENT_MODES,
    backward,
    both_forms,
    make_pair,
    one_backward,
    sgd,
    square,
    train,
    two_backwards,
)
from tests.support.ranks import on_ranks

LINEAR = partial(nn.Linear, DIM, DIM)
KEPT = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
elsewhere: list[Tensor] = []


class Given:
    """A plain object in which tensors leave forward."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = list(tensors)


def inner(unit: nn.Module) -> Any:
    """Return the module itself: a wrapper does not forward assignments."""
    return getattr(unit, "module", unit)


# -- forwards of units, and around them


def _recursive(m: Any, x: Tensor, depth: int = 3) -> Tensor:
    """Calls itself, and uses its parameters afterwards."""
    deeper = m(x * 0.5, depth - 1) if depth else 0
    return m.a(x + deeper).tanh() + deeper


def _nested(m: Any, record: Record) -> Record:
    """Inputs and outputs in a dataclass, a dict, a named tuple and a list."""
    x = record.value["x"]
    return Record({"x": m.a(x).tanh(), "extra": Named(m.b(x), [x * 2, None, 3])}, "out")


def _changes_outputs(m: Any, x: Tensor) -> Tensor:
    for unit in (m.a, m.b):
        x = unit(x)
        x.add_(1).mul_(0.7)
    return x


def _gives_context(m: Any, x: Tensor) -> Tensor:
    """An attribute brings in a tensor with a gradient; the last weight on its path is frozen."""
    inner(m.user).context = m.source(x)
    out = m.tail(m.user(x))
    inner(m.user).context = None
    return out


def _leaves_loss(m: Any, x: Tensor) -> Tensor:
    """The loss is in an attribute."""
    hidden = m.a(x).tanh()
    m.aux = m.b(hidden).pow(2).mean()
    return hidden * 1


def _leaves_loss_elsewhere(m: Any, x: Tensor) -> Tensor:
    """The loss is in a list that this function does not name."""
    hidden = m.a(x).tanh()
    _keep(m.b(hidden).pow(2).mean())
    return hidden * 1


def _keep(loss: Tensor) -> None:
    elsewhere.append(loss)


def _tables(m: Any) -> Any:
    """A parameter and views of it."""
    t = m.table
    views = {"rows": t[1:3], "all": [t.T, t[None].expand(2, DIM, DIM), t]}
    return t, views, Given(t.detach(), m.fixed)


def _uses_tables(m: Any, x: Tensor) -> Tensor:
    table, views, given = m.tables()
    of_views = views["rows"].sum() + sum(view.pow(2).mean() for view in views["all"])
    return m.block(x @ table) * of_views * given.tensors[0].sum() + given.tensors[1].mean()


HALVES = made_of(lambda m, x, second: (m.b if second else m.a)(x).tanh(), a=LINEAR, b=LINEAR)
USES_CONTEXT = made_of(
    lambda m, x: m.own(x).tanh() + m.frozen(m.context), own=LINEAR, frozen=partial(frozen, LINEAR)
)
ADDS_IN_PLACE = made_of(  # a parameter to an activation: they must not share a version counter
    lambda m, x: m.b(F.relu_(m.a(x).add_(m.bias))),
    a=partial(nn.Linear, DIM, DIM, bias=False),
    bias=lambda: nn.Parameter(torch.zeros(DIM)),
    b=LINEAR,
)
TABLES = made_of(
    _tables,
    table=lambda: nn.Parameter(torch.randn(DIM, DIM)),
    fixed=lambda: nn.Parameter(torch.randn(DIM), requires_grad=False),
)
RETURNS_PARAMETERS = made_of(_uses_tables, tables=TABLES, block=Block)
NESTED = made_of(_nested, a=LINEAR, b=LINEAR)
LOSSES = partial(chain, *[made_of(_leaves_loss, a=LINEAR, b=LINEAR)] * 3)


# -- tensors that leave a forward in other ways than by being returned


class LeavesAside(Block):
    """Lets a tensor leave as ``how`` says, and a view of a parameter, or a product of both."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.given, self.kept = how, Given(), [Given()]
        self.later: dict[str, Tensor | None] = {}
        self.register_buffer("memory", torch.zeros(4, DIM), persistent=False)
        if how == "a hook":
            hooked: list[Tensor] = []
            self.hooked = lambda: hooked[-1]
            self.up.register_forward_hook(lambda module, args, output: hooked.append(output))

    def forward(self, x: Tensor, given: Given, into: Tensor) -> Tensor:
        left = [self.down(self.up(x).tanh()), self.up.weight[:1]]
        product = left[0] * left[1]
        if self.how == "an argument":
            given.tensors = left
        elif self.how == "a tensor that is an argument":
            into[:] = product
        elif self.how == "an object in an attribute":
            self.given.tensors = left
        elif self.how == "a list in an attribute":
            self.kept[0] = Given(*left)
        elif self.how == "a dict without tensors, at first":
            self.later["product"] = product if x.requires_grad else None
        elif self.how == "a buffer":
            self.memory = product
        elif self.how == "a global list":
            elsewhere.append(product)
        return super().forward(x)


WHERE: dict[str, Callable[[Any, Given, Tensor], list[Tensor]]] = {
    "an argument": lambda m, given, into: given.tensors,
    "a tensor that is an argument": lambda m, given, into: [into],
    "an object in an attribute": lambda m, *_: m.given.tensors,
    "a list in an attribute": lambda m, *_: m.kept[0].tensors,
    "a dict without tensors, at first": lambda m, *_: [m.later["product"]],
    "a buffer": lambda m, *_: [m.memory],
    "a global list": lambda *_: [elsewhere.pop()],
    "a hook": lambda m, *_: [m.hooked()[:, :DIM]],
}


def _uses_what_was_left(m: Any, x: Tensor) -> Tensor:
    given, found = Given(), []
    for block in (m.a, m.b):
        how, into = inner(block).how, torch.zeros_like(x)
        if how == "a dict without tensors, at first":
            block(x.detach(), given, into)
            x = x.clone().requires_grad_()
        x = block(x, given, into)
        found.append(functools.reduce(operator.mul, WHERE[how](inner(block), given, into)))
    return found[0] + found[1].tanh()


def _left_aside(how: str) -> tuple[Any, ...]:
    make = partial(LeavesAside, how)
    return made_of(_uses_what_was_left, a=make, b=make), (LeavesAside,)


# -- steps


def _two_forwards_two_backwards(m: nn.Module, x: Tensor) -> Tensor:
    first, second = square(m, x), square(m, x * 0.5)
    return backward(first) + backward(second)


def _through_outputs_in_turn(m: nn.Module, x: Tensor) -> Tensor:
    left, right = m(x)
    left.pow(2).mean().backward(retain_graph=True)
    return backward(right.pow(2).mean())


def _evaluates_between(mode: str, m: nn.Module, x: Tensor) -> Tensor:
    loss = square(m, x)
    with GRADIENT_MODES[mode]():
        m(x * 3)
    return backward(loss)


def _begins_in_inference_mode(m: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        m(x * 3)
    return one_backward(m, x)


def _output_and_attribute(m: nn.Module, x: Tensor) -> Tensor:
    return backward(square(m, x) + m[1].aux)


def _attributes_alone(m: nn.Module, x: Tensor) -> Tensor:
    m(x)
    return backward(sum(m[index].aux for index in range(3)))


def _losses_in_a_list(m: nn.Module, x: Tensor) -> Tensor:
    elsewhere.clear()
    m(x)
    return backward(sum(elsewhere))


def _with_and_without_the_root(m: nn.Module, x: Tensor) -> Tensor:
    loss = backward(m.blocks[1](m.blocks[0](x)).pow(2).mean())
    return loss + one_backward(m, x)


CASES: dict[str, tuple[Any, ...]] = {  # for train()
    "a unit runs twice, on its own output": (partial(Reuse, True),),
    "a unit runs twice, in parallel": (partial(Reuse, False),),
    "a unit uses other parameters in each call": (
        made_of(
            lambda m, x: m.halves(m.block(m.halves(x, False)), True),
            halves=HALVES,
            block=Block,
        ),
        (Unit, Block),
    ),
    "a unit calls itself": (
        partial(chain, made_of(_recursive, a=LINEAR), Block),
        (Unit, Block),
    ),
    "two forwards, one backward": (
        Stack,
        (Block,),
        lambda m, x: backward(square(m, x) + 2 * square(m, x * 0.5)),
    ),
    "two forwards, two backwards": (Stack, (Block,), _two_forwards_two_backwards),
    "two backwards over one graph": (Stack, (Block,), two_backwards),
    "forward on the detached output": (
        Stack,
        (Block,),
        lambda m, x: one_backward(m, F.pad(m(x).detach(), (0, DIM - 3))),
    ),
    "one of two outputs": (TwoHeads, (Block,), lambda m, x: backward(m(x)[0].pow(2).mean())),
    "outputs in turn": (TwoHeads, (Block,), _through_outputs_in_turn),
    "nested inputs and outputs": (
        made_of(lambda m, x: m.b(m.a(Record({"x": x * 1}))), a=NESTED, b=NESTED),
        (Unit,),
        lambda m, x: backward(m(x).value["extra"].first.pow(2).mean()),
    ),
    "an input modified in place": (  # a hook on that tensor would be lost
        partial(Stack, 3, made_of(lambda m, x: m.block(x.mul_(0.5)), block=Block)),
        (Unit,),
    ),
    "outputs modified in place": (made_of(_changes_outputs, a=Block, b=Block),),
    "activations modified in place": (partial(chain, ADDS_IN_PLACE, ADDS_IN_PLACE), (Unit,)),
    "a tensor by an attribute": (
        made_of(_gives_context, source=Block, user=USES_CONTEXT, tail=Block),
        (Block, Unit),
    ),
    "no_grad before backward": (Stack, (Block,), partial(_evaluates_between, "no_grad")),
    "inference before backward": (Stack, (Block,), partial(_evaluates_between, "inference_mode")),
    "inference first": (Stack, (Block,), _begins_in_inference_mode),
    "a loss in an attribute": (LOSSES, (Unit,), _output_and_attribute),
    "losses in attributes alone": (LOSSES, (Unit,), _attributes_alone),
    "a loss in an attribute that was None": (
        partial(chain, *[made_of(_leaves_loss, a=LINEAR, b=LINEAR, aux=lambda: None)] * 3),
        (Unit,),
        _output_and_attribute,
    ),
    "a unit that returns parameters": (RETURNS_PARAMETERS, (Unit, Block)),
    "units in one that returns parameters": (RETURNS_PARAMETERS, (Block,)),
    **{f"tensors leave by {how}": _left_aside(how) for how in WHERE},
    "units without their root": (Stack, (Block,), _with_and_without_the_root),
    "a forward before backward": (Stack, (Block,), partial(_evaluates_between, "grad")),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_however_units_are_called_training_equals_unsharded(case: str) -> None:
    """Every second case keeps units with the other use_orig_params."""
    kept = bool(list(CASES).index(case) % 2)
    for form in (False, True):
        train(*CASES[case], use_orig_params=form, **(KEPT if form is kept else {}))


# -- losses that no module holds

LEAVES_ELSEWHERE = made_of(_leaves_loss_elsewhere, a=LINEAR, b=LINEAR)


@on_ranks(2)
def test_a_loss_in_a_list_works_where_parameters_stay_whole() -> None:
    train(partial(chain, *[LEAVES_ELSEWHERE] * 3), (Unit,), _losses_in_a_list, **KEPT)


@each_value
@both_forms
@pytest.mark.parametrize(
    ("num_units", "options", "error", "message"),
    [
        (3, {}, RuntimeError, "storage of size 0"),  # of freed parameters
        (1, KEPT, StateError, r"never reduced(.|\n)*unit '0'"),  # gradients pass every hook
    ],
)
@on_ranks(2)
def test_a_loss_in_a_list_is_an_error_where_it_cannot_work(
    num_units: int, options: Any, error: Any, message: str, use_orig_params: bool
) -> None:
    build = partial(chain, *[LEAVES_ELSEWHERE] * num_units)
    model = make_pair(build, (Unit,), use_orig_params=use_orig_params, **options).model
    with pytest.raises(error, match=message):
        _losses_in_a_list(model, torch.randn(4, DIM))
        sgd(model.parameters()).step()


# -- several models
