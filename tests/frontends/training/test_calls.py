"""However units are called: twice, partly, without their root, in turns with evaluation, from
several models, with nested or modified tensors, for losses that forward does not return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compat import CPUOffload, ShardingStrategy, StateError
from tests.support.models import DIM, Block, Named, Record, Reuse, Stack, TwoHeads, chain, frozen
from tests.support.pairwise import each_value, pairwise
from tests.support.parity import (
    GRADIENT_MODES,
    assert_close,
    backward,
    both_forms,
    both_strategies,
    make_pair,
    one_backward,
    sgd,
    square,
    train,
    two_backwards,
)
from tests.support.ranks import on_ranks

# -- how often, and which part


class Halves(nn.Module):
    """Each call uses one half of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return self.b(x).tanh() if second else self.a(x).tanh()


class HalvesInTurn(nn.Module):
    """One unit runs twice, each time using other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.block = Halves(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.halves(self.block(self.halves(x, False)), True)


class Recursive(nn.Module):
    """A unit that calls itself, and uses its parameters afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        inner = self(x * 0.5, depth - 1) if depth else 0
        return self.linear(x + inner).tanh() + inner


class NestedIO(nn.Module):
    """Inputs and outputs in a dataclass, a dict, a named tuple and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, record: Record) -> Record:
        x = record.value["x"]
        return Record({"x": self.a(x).tanh(), "extra": Named(self.b(x), [x * 2, None, 3])}, "out")


class NestedChain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = NestedIO(), NestedIO()

    def forward(self, x: Tensor) -> Record:
        return self.b(self.a(Record({"x": x * 1})))


class ChangesItsInput(Block):
    """Modifies its input in place: a hook on that tensor would be lost."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


class ChangesOutputs(Stack):
    """Modifies the outputs of its units in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            x.add_(1).mul_(0.7)
        return self.head(x)


class ChangesActivations(nn.Module):
    """Adds a parameter to an activation in place: they must not share a version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bias, self.b = (
            nn.Linear(DIM, DIM, bias=False),
            nn.Parameter(torch.zeros(DIM)),
            nn.Linear(DIM, DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu_(self.a(x).add_(self.bias)))


class TakesContext(nn.Module):
    """An attribute brings in a tensor with a gradient; the last weight on its path is frozen."""

    context: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.own, self.frozen = nn.Linear(DIM, DIM), frozen(lambda: nn.Linear(DIM, DIM))
        self.context = None

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x).tanh() + self.frozen(self.context)


class GivesContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.user, self.tail = Block(), TakesContext(), Block()
        self._users = [self.user]  # the module itself: a wrapper does not forward assignments

    def forward(self, x: Tensor) -> Tensor:
        self._users[0].context = self.source(x)
        out = self.tail(self.user(x))
        self._users[0].context = None
        return out


class LossAside(nn.Module):
    """Stores a loss of its own as an attribute."""

    aux: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).tanh()
        self.aux = self.b(hidden).pow(2).mean()
        return hidden * 1


class LossAsideFromNone(LossAside):
    """The attribute exists from the beginning, as None."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = None


class LossElsewhere(LossAside):
    """Lets a function put its loss into a list that forward does not name."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        _keep(self.__dict__.pop("aux"))
        return hidden


def _keep(loss: Tensor) -> None:
    elsewhere.append(loss)


elsewhere: list[Tensor] = []


class Given:
    """A plain object in which tensors leave forward."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = list(tensors)


class Tables(nn.Module):
    """Returns a parameter and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(DIM, DIM))
        self.fixed = nn.Parameter(torch.randn(DIM), requires_grad=False)

    def forward(self) -> Any:
        t = self.table
        return (
            t,
            {"rows": t[1:3], "all": [t.T, t[None].expand(2, DIM, DIM), t]},
            Given(t.detach(), self.fixed),
        )


class UsesTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables, self.block = Tables(), Block()

    def forward(self, x: Tensor) -> Tensor:
        table, views, given = self.tables()
        of_views = views["rows"].sum() + sum(view.pow(2).mean() for view in views["all"])
        return self.block(x @ table) * of_views * given.tensors[0].sum() + given.tensors[1].mean()


class LeavesAside(Block):
    """Lets a hidden tensor leave as ``how`` says, and a view of a parameter as well."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.given, self.kept = how, Given(), [Given()]
        self.later: dict[str, Tensor | None] = {}
        self.register_buffer("memory", torch.zeros(4, DIM), persistent=False)
        if how == "a hook":
            hooked: list[Tensor] = []
            self.kept_by_hook = lambda: hooked[-1]
            self.up.register_forward_hook(lambda module, args, output: hooked.append(output))

    def forward(self, x: Tensor, given: Given, into: Tensor) -> Tensor:
        hidden, weight = self.down(self.up(x).tanh()), self.up.weight[:1].mean(1)
        if self.how == "an argument":
            given.tensors.append(hidden * weight)
        elif self.how == "a tensor that is an argument":
            into[:] = hidden * weight
        elif self.how == "an object in an attribute":
            self.given.tensors = [hidden, self.up.weight[:1]]
        elif self.how == "a list in an attribute":
            self.kept[0] = Given(hidden, self.up.weight[:1])
        elif self.how == "a dict without tensors, at first":
            self.later["hidden"] = hidden * weight if x.requires_grad else None
        elif self.how == "a buffer":
            self.memory = hidden * weight
        elif self.how == "a global list":
            elsewhere.append(hidden * weight)
        return super().forward(x)


class LeftAside(nn.Module):
    """Computes its output from what its blocks leave aside, not from what they return."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(LeavesAside(how) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        given, left = Given(), []
        for block in self.blocks:
            into = torch.zeros_like(x)
            if self.how == "a dict without tensors, at first":
                block(x.detach(), given, into)
                x = x.clone().requires_grad_()
            x = block(x, given, into)
            inner = getattr(block, "module", block)
            left.append(
                {
                    "an argument": lambda: given.tensors[-1],
                    "a tensor that is an argument": lambda into=into: into,
                    "an object in an attribute": lambda b=inner: (
                        b.given.tensors[0] * b.given.tensors[1].mean()
                    ),
                    "a list in an attribute": lambda b=inner: (
                        b.kept[0].tensors[0] * b.kept[0].tensors[1].mean()
                    ),
                    "a dict without tensors, at first": lambda b=inner: b.later["hidden"],
                    "a buffer": lambda b=inner: b.memory,
                    "a global list": lambda: elsewhere.pop(),
                    "a hook": lambda b=inner: b.kept_by_hook()[:, :DIM],
                }[self.how]()
            )
        return left[0] + left[1].tanh()


WAYS_ASIDE = ("an argument", "a tensor that is an argument", "an object in an attribute")
WAYS_ASIDE += ("a list in an attribute", "a dict without tensors, at first")
WAYS_ASIDE += ("a buffer", "a global list", "a hook")


def _two_forwards_one_backward(m: nn.Module, x: Tensor) -> Tensor:
    return backward(square(m, x) + 2 * square(m, x * 0.5))


def _two_forwards_two_backwards(m: nn.Module, x: Tensor) -> Tensor:
    first, second = square(m, x), square(m, x * 0.5)
    return backward(first) + backward(second)


def _forward_on_the_detached_output(m: nn.Module, x: Tensor) -> Tensor:
    return backward(square(m, F.pad(m(x).detach(), (0, DIM - 3))))


def _through_one_output(m: nn.Module, x: Tensor) -> Tensor:
    return backward(m(x)[0].pow(2).mean())


def _through_outputs_in_turn(m: nn.Module, x: Tensor) -> Tensor:
    left, right = m(x)
    left.pow(2).mean().backward(retain_graph=True)
    return backward(right.pow(2).mean())


def _square_of_a_nested_output(m: nn.Module, x: Tensor) -> Tensor:
    return backward(m(x).value["extra"].first.pow(2).mean())


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
    y = m(x)
    return backward(y.pow(2).mean() + m[1].aux)


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


LOSSES = partial(chain, *[LossAside] * 3)
CASES: dict[str, tuple[Any, ...]] = {  # for train()
    "a unit runs twice, on its own output": (partial(Reuse, True),),
    "a unit runs twice, in parallel": (partial(Reuse, False),),
    "a unit uses other parameters in each call": (HalvesInTurn, (Halves, Block)),
    "a unit calls itself": (partial(chain, Recursive, Block), (Recursive, Block)),
    "two forwards, one backward": (Stack, (Block,), _two_forwards_one_backward),
    "two forwards, two backwards": (Stack, (Block,), _two_forwards_two_backwards),
    "two backwards over one graph": (Stack, (Block,), two_backwards),
    "forward on the detached output": (Stack, (Block,), _forward_on_the_detached_output),
    "one of two outputs": (TwoHeads, (Block,), _through_one_output),
    "outputs in turn": (TwoHeads, (Block,), _through_outputs_in_turn),
    "nested inputs and outputs": (NestedChain, (NestedIO,), _square_of_a_nested_output),
    "an input modified in place": (partial(Stack, 3, ChangesItsInput), (ChangesItsInput,)),
    "outputs modified in place": (ChangesOutputs,),
    "activations modified in place": (
        partial(chain, ChangesActivations, ChangesActivations),
        (ChangesActivations,),
    ),
    "a tensor by an attribute": (GivesContext, (Block, TakesContext)),
    "no_grad before backward": (Stack, (Block,), partial(_evaluates_between, "no_grad")),
    "inference before backward": (Stack, (Block,), partial(_evaluates_between, "inference_mode")),
    "inference first": (Stack, (Block,), _begins_in_inference_mode),
    "a loss in an attribute": (LOSSES, (LossAside,), _output_and_attribute),
    "losses in attributes alone": (LOSSES, (LossAside,), _attributes_alone),
    "a loss in an attribute that was None": (
        partial(chain, *[LossAsideFromNone] * 3),
        (LossAsideFromNone,),
        _output_and_attribute,
    ),
    "a unit that returns parameters": (UsesTables, (Tables, Block)),
    "units in one that returns parameters": (UsesTables, (UsesTables, Block)),
    **{f"tensors leave by {how}": (partial(LeftAside, how), (LeavesAside,)) for how in WAYS_ASIDE},
    "units without their root": (Stack, (Block,), _with_and_without_the_root),
    "a forward before backward": (Stack, (Block,), partial(_evaluates_between, "grad")),
}


@pairwise
@both_forms
@both_strategies
@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_however_units_are_called_training_equals_unsharded(
    case: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    train(*CASES[case], **options)


# -- losses that no module holds


KEPT = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}


@both_forms
@on_ranks(2)
def test_a_loss_in_a_list_works_where_parameters_stay_whole(use_orig_params: bool) -> None:
    options = {**KEPT, "use_orig_params": use_orig_params}
    train(partial(chain, *[LossElsewhere] * 3), (LossElsewhere,), _losses_in_a_list, **options)


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
    build = partial(chain, *[LossElsewhere] * num_units)
    model = make_pair(build, (LossElsewhere,), use_orig_params=use_orig_params, **options).model
    with pytest.raises(error, match=message):
        _losses_in_a_list(model, torch.randn(4, DIM))
        sgd(model.parameters()).step()


# -- evaluation


@pairwise
@both_forms
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("mode", GRADIENT_MODES)
@on_ranks("num_ranks")
def test_a_forward_without_backward_sees_new_weights_and_leaves_nothing(
    mode: str, num_ranks: int, offload: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    pair = make_pair(Stack, cpu_offload=CPUOffload(offload), **options)
    for _ in range(3):  # evaluation comes first
        with GRADIENT_MODES[mode]():
            x = pair.batches()[0]
            assert_close(pair.model(x), pair.plain(x), "evaluation")
        if mode != "grad":
            pair.assert_idle()
        with torch.no_grad():
            for p in [*pair.model.parameters(), *pair.plain.parameters()]:
                p.mul_(0.5)
        pair.step(one_backward)


# -- several models


def _one_loss(one: nn.Module, other: nn.Module, x: Tensor) -> Tensor:
    return square(one, x) + square(other, x)


def _one_behind_the_other(one: nn.Module, other: nn.Module, x: Tensor) -> Tensor:
    return square(other, F.pad(one(x), (0, DIM - 3)))


@each_value
@both_forms
@pytest.mark.parametrize("loss_of", [_one_loss, _one_behind_the_other])
@on_ranks(2)
def test_one_backward_may_pass_several_models(
    loss_of: Callable[..., Tensor], use_orig_params: bool
) -> None:
    one, other = (make_pair(Stack, seed=seed, use_orig_params=use_orig_params) for seed in (1, 2))
    for _ in range(3):
        batches = one.batches()
        for x in batches:
            loss_of(one.plain, other.plain, x).backward()
        loss_of(one.model, other.model, batches[one.rank]).backward()
        for pair in (one, other):
            pair.average_plain_gradients()
            pair.compare_and_update()
