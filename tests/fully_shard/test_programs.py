"""Random programs train as the unsharded model: how modules are wrapped, how forward and backward
run, and what happens between them. hypothesis draws them, shrinks what fails, and shows it."""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_compat
from tests.support.fully_sharded import api, pair_of, partial_shard, shard_all, sharded_modules
from tests.support.models import Block, Part, Program, Stack
from tests.support.parity import (
    assert_close,
    backward,
    local,
    no_sync,
    random_step,
    reshard,
    sgd,
    square,
    vectors,
    whole,
)
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import MAPPED, mapped_or_sent
from tests.support.sampling import at_most

only_ours = pytest.mark.skipif(api.name == "torch", reason="torch refuses it, or what follows")


def _adamw(parameters: Any, **how: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, eps=1e-2, **how)


_adamw_foreach = functools.partial(_adamw, foreach=True)
_adamw_fused = functools.partial(_adamw, fused=True)


class Boom(Exception):
    pass


def _raise(*_: Any) -> None:
    raise Boom


def _raise_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_raise)


# -- random programs

Event = tuple[Any, ...]  # the name of a method of Run, and its arguments


class Run:
    """A model, how it is sharded, and the events of a program."""

    def __init__(
        self,
        shape: tuple[int, ...],
        optimizer: Callable[..., Any],
        offload: bool,
        group: Sequence[int],
        units: dict[str, bool | int | None],
    ) -> None:
        """group: parts that are sharded as one list. units: the others, and the root, with
        ``reshard_after_forward``."""
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.options: dict[str, Any] = {"mesh": mesh}
        if offload:
            self.options["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
        shard = functools.partial(self._shard, group, units)
        self.pair = pair_of(Program, shard, optimizer)
        self.plain, self.model = self.pair.plain, self.pair.model
        self.units = sharded_modules(self.model)

    def _shard(self, group: Sequence[int], units: dict[str, bool | int | None], model: Any) -> Any:
        parts = [model.parts[number] for number in group]
        if parts:
            api.fully_shard(parts, **self.options)
        done = {child for part in parts for child in part.modules()}
        ranks = self.options["mesh"].shape[-1]
        for name, module in reversed(list(model.named_modules())):
            if name in units and module not in done:
                after = True if units[name] == 2 and ranks != 4 else units[name]
                api.fully_shard(module, reshard_after_forward=after, **self.options)
        return model

    def _unit(self, number: int) -> Any:
        return self.units[number % len(self.units)]

    def _fails(self, seed: int, register: Callable[..., Any], hook: Callable[..., None]) -> None:
        handle = register(hook)
        with contextlib.suppress(Boom):
            random_step(seed, self.model, self.pair.batches()[self.pair.rank])
        handle.remove()
        self.model.set_requires_gradient_sync(True)
        self.model.reset_iter_state()
        for model in (self.plain, self.model):
            model.zero_grad()

    # -- events

    def step(self, seed: int) -> None:
        self.pair.step(functools.partial(random_step, seed))

    def toggle(self, names: Sequence[str]) -> None:
        reshard(self.model)
        for name in names:
            for model in (self.plain, self.model):
                p = model.get_parameter(name)
                p.requires_grad_(not p.requires_grad)

    def evaluate(self, seed: int, context: str = "no_grad") -> None:
        x = self.pair.batches()[self.pair.rank]
        with getattr(torch, context)():
            outputs = [m(x.clone(), random.Random(seed)) for m in (self.model, self.plain)]
        for got, expected in zip(*outputs, strict=True):
            assert_close(got, expected, "output in evaluation")

    def fail_in_forward(self, seed: int, name: str, after_no_sync: bool) -> None:
        """Gradients until then are discarded."""
        if after_no_sync and api.name == "ours":  # torch keeps the gradients
            with no_sync(self.model):
                random_step(seed, self.model, self.pair.batches()[self.pair.rank])
        self._fails(seed, self.model.get_submodule(name).register_forward_pre_hook, _raise)

    def fail_in_backward(self, seed: int, name: str) -> None:
        register = self.model.get_submodule(name).register_forward_hook
        self._fails(seed, register, _raise_in_backward)

    def accumulate(self, seed: int) -> None:
        """Backward without sync; the step that follows reduces the sum."""
        with no_sync(self.model):
            self.pair.backwards(functools.partial(random_step, seed))

    def prefetch(self, number: int, wanted: Sequence[int], direction: str) -> None:
        setter = getattr(self._unit(number), f"set_modules_to_{direction}_prefetch")
        setter(list(dict.fromkeys(map(self._unit, wanted))))

    def set_resharding(self, number: int, after: str, flag: bool) -> None:
        getattr(self._unit(number), f"set_reshard_after_{after}")(flag, recurse=False)

    def change_before_backward(self, seed: int) -> None:
        """Backward computes with the parameters as they are then."""
        batches = self.pair.batches()
        losses = [sum(self.plain(x, random.Random(seed))) for x in batches]
        loss = sum(self.model(batches[self.pair.rank].clone(), random.Random(seed)))
        reshard(self.model)
        with torch.no_grad():
            for p, own in zip(self.plain.parameters(), self.model.parameters(), strict=True):
                p.data.mul_(1.05)
                own.mul_(1.05)
        if loss.requires_grad:
            steps = [lambda _, x, loss=each: backward(loss) for each in losses]
            self.pair.plain_backwards(steps, batches)
            loss.backward()
        self.pair.compare_gradients()
        self.pair.update()

    def unshard(self, number: int, async_op: bool, waits: bool, reshards: bool) -> None:
        handle = self._unit(number).unshard(async_op=async_op)
        if handle is not None and waits:
            handle.wait()
        if reshards:
            self._unit(number).reshard()

    def reload(self) -> None:
        state = {name: value.clone() * 0.95 for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(state)
        self.plain.load_state_dict({name: whole(value) for name, value in state.items()})


def runs(shape: tuple[int, ...], wrapping: Sequence[Any], events: Sequence[Event]) -> None:
    run = Run(shape, *wrapping)
    for name, *arguments in events:
        getattr(run, name)(*arguments)
    run.step(0)


_MODULES = dict(Program().named_modules())
# nothing else reads their parameters
_UNITS = [
    n for n, m in _MODULES.items() if isinstance(m, Part | Block) or n.endswith((".a", ".up"))
]
_COMPUTING = [name for name, m in _MODULES.items() if isinstance(m, nn.Linear | Block)]
_PARAMETERS = [name for name, _ in Program().named_parameters()]
_SEEDS, _NUMBERS, _FLAGS = st.integers(0, 10**6), st.integers(0, 30), st.booleans()
_RESHARDING = st.sampled_from([None, True, False, 2])
_PASSES = st.sampled_from(["forward", "backward"])
_WRAPPINGS = st.tuples(
    st.sampled_from([sgd, _adamw_fused]),
    _FLAGS,
    st.lists(st.integers(0, 7), max_size=2, unique=True),
    st.dictionaries(st.sampled_from(_UNITS), _RESHARDING, max_size=12),
    _RESHARDING,
).map(lambda drawn: (*drawn[:3], {**drawn[3], "": drawn[4]}))


def _event(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Event]:
    return st.tuples(st.just(name), *arguments)


_EVENTS = [
    _event("step", _SEEDS),
    _event("toggle", st.lists(st.sampled_from(_PARAMETERS), max_size=6, unique=True)),
    _event("evaluate", _SEEDS),
    _event("fail_in_forward", _SEEDS, st.sampled_from(_COMPUTING), _FLAGS),
    _event("fail_in_backward", _SEEDS, st.sampled_from(_COMPUTING)),
    _event("accumulate", _SEEDS),
    _event("prefetch", _NUMBERS, st.lists(_NUMBERS, max_size=2), _PASSES),
    _event("set_resharding", _NUMBERS, _PASSES, _FLAGS),
    _event("change_before_backward", _SEEDS),
    _event("unshard", _NUMBERS, _FLAGS, _FLAGS, _FLAGS),
    _event("reload"),
]
if api.name == "ours":  # torch's is spoiled by it
    _EVENTS.append(_event("evaluate", _SEEDS, st.just("inference_mode")))


@pytest.mark.parametrize(
    ("number", "shape", "environment"),
    [(3, (3,), {}), (4, (2, 2), MAPPED)],
    ids=str,
)
def test_random_programs_train_as_unsharded(
    number: int, shape: tuple[int, ...], environment: dict[str, str]
) -> None:
    checks = HealthCheck.too_slow, HealthCheck.data_too_large

    @seed(number)  # others in each case
    @settings(max_examples=at_most(3, of_all=30), suppress_health_check=checks, database=None)
    @given(wrapping=_WRAPPINGS, events=st.lists(st.one_of(_EVENTS), min_size=4, max_size=12))
    def programs(wrapping: Any, events: list[Event]) -> None:
        run_ranks(math.prod(shape), runs, shape, wrapping, events, environment=environment)

    programs()


# -- parameters that change while they are kept


def _load(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    state = {name: value.detach() * 0.9 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


@torch.no_grad()
def _in_place(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.mul_(0.9)


def _step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    optim.step()


def _step_unseen(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """After ``uninstall``; another model makes the patches again."""
    fsdp_compat.uninstall()
    optim.step()
    api.fully_shard(nn.Linear(2, 2))


def _written_back(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """A step of copies in another dtype."""
    params = optim.param_groups[0]["params"]
    copies = [nn.Parameter(p.detach().double()) for p in params]
    for copied, p in zip(copies, params, strict=True):
        copied.grad = p.grad.double()
    torch.optim.SGD(copies, lr=0.1, foreach=True).step()
    for copied, p in zip(copies, params, strict=True):
        p.data.copy_(copied.detach())


def _local_step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """A step of the tensors that this rank holds."""
    params = optim.param_groups[0]["params"]
    parts = [local(p) for p in params]
    for part, p in zip(parts, params, strict=True):
        part.grad = local(p.grad)
    torch.optim.SGD(parts, lr=0.1, fused=True).step()


UPDATES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "foreach": (_adamw_foreach, _step),
    "fused": (_adamw_fused, _step),
    "uninstalled": (_adamw_foreach, _step_unseen),
    "in place": (sgd, _in_place),
    "loaded": (sgd, _load),
    "copies": (sgd, _written_back),
    "local tensors": (sgd, _local_step),
}


@pytest.mark.parametrize("name", UPDATES)
@on_ranks(2)
def test_an_evaluation_sees_parameters_that_were_updated_after_the_last(name: str) -> None:
    """With kept parameters, which the model shows; the optimizer holds the sharded ones."""
    optimizer, update = UPDATES[name]
    pair = pair_of(Stack, partial_shard(reshard_after_forward=False), optimizer)
    pair.backwards()
    for _ in range(2):
        pair.compare_outputs()
        if update in (_load, _in_place) or api.name == "torch":  # which shows the old values
            reshard(pair.model)
        update(pair.plain, pair.plain_optim)
        update(pair.model, pair.optim)
        pair.compare_outputs()
    pair.compare_parameters()


@mapped_or_sent
@on_ranks(2)
def test_one_rank_alone_may_step_another_optimizer_and_take_a_state_dict(
    environment: dict[str, str],
) -> None:
    """Between two evaluations."""
    model: Any = shard_all(Stack())
    x = vectors(torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        before = model(x)
    if dist.get_rank() == 0:
        other = nn.Linear(2, 2)
        other(torch.ones(2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    with torch.no_grad():
        assert torch.equal(model(x), before)
    square(model, x).backward()


@on_ranks(2)
def test_parameters_may_be_frozen_and_trained_in_turn() -> None:
    pair = pair_of(Stack)
    names = [name for name, _ in pair.plain.named_parameters()]
    for frozen, sync in ((names[::2], True), (names[1::3], False), (names[2:4], True), ([], True)):
        for model in (pair.plain, pair.model):
            for name in names:
                model.get_parameter(name).requires_grad_(name not in frozen)
        with contextlib.nullcontext() if sync else no_sync(pair.model):
            pair.backwards()
        if sync:
            pair.compare_and_update()


# -- what torch's FSDP2 cannot do


@only_ours
@on_ranks(2)
def test_inference_an_inner_module_or_a_list_may_come_first() -> None:
    def shard_list(model: Any) -> Any:
        api.fully_shard([*model])
        return model

    pair, other = pair_of(Stack), pair_of(Stack)
    x = vectors(torch.Generator().manual_seed(5))
    assert_close(pair.model.blocks[1](x), pair.plain.blocks[1](x), "output")
    with torch.inference_mode():
        other.compare_outputs()
    for each in (pair, other, pair_of(lambda: nn.Sequential(Block(), Block()), shard_list)):
        each.step()
        each.step()
