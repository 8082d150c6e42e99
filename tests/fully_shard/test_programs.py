"""Random programs train as the unsharded model: how modules are wrapped, what happens between two
steps, and how forward and backward run are drawn from a seed.

What fails names its seed and what it had drawn; ``runs_programs(seed, 1)`` runs it alone."""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from tests.support.same_host import mapped_or_sent
from tests.support.sampling import at_most

NUM_STEPS = 3


class Boom(Exception):
    pass


class Run:
    """One program: a model, how it is sharded, and some steps with events between them."""

    def __init__(self, seed: int, mesh: DeviceMesh) -> None:
        self.rng = random.Random(seed)
        self.drawn: list[str] = []
        optimizer = self.rng.choice([sgd, _adamw_fused])
        self.pair = pair_of(Program, lambda model: self._shard(model, mesh), optimizer)
        self.model = self.pair.model

    # -- wrapping

    def _shard(self, model: Any, mesh: DeviceMesh) -> Any:
        ranks = mesh.size(mesh.ndim - 1)
        options: dict[str, Any] = {"mesh": mesh}
        if self.rng.random() < 0.3:
            options["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
        kinds: list[bool | int | None] = [True, False, None] + ([2] if ranks == 4 else [])
        if self.rng.random() < 0.3:
            parts = [model.parts[n] for n in self.rng.sample(range(8), 2)]
            self.drawn.append("list")
            api.fully_shard(parts, reshard_after_forward=self.rng.choice([True, False]), **options)
        done = {child for part in sharded_modules(model) for child in part.modules()}
        for name, module in reversed(list(model.named_modules())):
            if not name or module in done or self.rng.random() < 0.5:
                continue
            if isinstance(module, Part | Block) or _is_called(model, name):
                kind = self.rng.choice(kinds)
                self.drawn.append(f"{name}: {kind}")
                api.fully_shard(module, reshard_after_forward=kind, **options)
        return api.fully_shard(model, reshard_after_forward=self.rng.choice(kinds), **options)

    # -- steps

    def run(self) -> None:
        events = [
            self._nothing,
            self._toggle,
            self._evaluate,
            self._evaluate_in_inference_mode,
            self._fail_in_forward,
            self._fail_in_backward,
            self._accumulate,
            self._prefetch,
            self._change_resharding,
            self._update_between_evaluations,
            self._change_before_backward,
            self._unshard_by_hand,
            self._reload,
        ]
        if api.name == "torch":  # which these spoil
            events.remove(self._evaluate_in_inference_mode)
            events.remove(self._update_between_evaluations)
        for _ in range(NUM_STEPS):
            for event in self.rng.sample(events, 2):
                self.drawn.append(event.__name__)
                event()
            seed = self.rng.randrange(10**6)
            self.drawn.append(f"step {seed}")
            self.pair.step(functools.partial(random_step, seed))

    def _both(self) -> tuple[nn.Module, nn.Module]:
        return self.pair.plain, self.model

    def _nothing(self) -> None:
        pass

    def _toggle(self) -> None:
        reshard(self.model)
        names = [name for name, _ in self.pair.plain.named_parameters()]
        for name in self.rng.sample(names, 6):
            for model in self._both():
                p = model.get_parameter(name)
                p.requires_grad_(not p.requires_grad)

    def _outputs(self) -> None:
        seed = self.rng.randrange(10**6)
        x = self.pair.batches()[self.pair.rank]
        outputs = [m(x.clone(), random.Random(seed)) for m in self._both()]
        for wanted, got in zip(*outputs, strict=True):
            assert_close(got, wanted, "output in evaluation")

    def _evaluate(self, context: Any = torch.no_grad) -> None:
        with context():
            self._outputs()

    def _evaluate_in_inference_mode(self) -> None:
        self._evaluate(torch.inference_mode)

    def _fail_in_forward(self) -> None:
        modules = [m for m in self.model.modules() if isinstance(m, nn.Linear | Block)]
        self._fail(self.rng.choice(modules).register_forward_pre_hook, _raise)

    def _fail_in_backward(self) -> None:
        modules = [m for m in self.model.modules() if isinstance(m, nn.Linear)]
        self._fail(self.rng.choice(modules).register_forward_hook, _raise_in_backward)

    def _fail(self, register: Callable[..., Any], hook: Callable[..., None]) -> None:
        """A step in which a module fails, if it runs; gradients until then are discarded."""
        seed = self.rng.randrange(10**6)
        if self.rng.random() < 0.3 and api.name == "ours":  # torch keeps the gradients
            with no_sync(self.model):
                random_step(seed, self.model, self.pair.batches()[self.pair.rank])
        handle = register(hook)
        with contextlib.suppress(Boom):
            random_step(seed, self.model, self.pair.batches()[self.pair.rank])
        handle.remove()
        self.model.set_requires_gradient_sync(True)
        self.model.reset_iter_state()
        for model in self._both():
            model.zero_grad()

    def _accumulate(self) -> None:
        """Backward without sync; the step that follows reduces the sum."""
        seed = self.rng.randrange(10**6)
        with no_sync(self.model):
            self.pair.backwards(functools.partial(random_step, seed))

    def _prefetch(self) -> None:
        modules = sharded_modules(self.model)
        for module in self.rng.sample(modules, min(3, len(modules))):
            wanted = self.rng.sample(modules, min(2, len(modules)))
            setter = self.rng.choice(
                [module.set_modules_to_forward_prefetch, module.set_modules_to_backward_prefetch]
            )
            setter(wanted)

    def _change_resharding(self) -> None:
        for module in self.rng.sample(sharded_modules(self.model), 1):
            flag = self.rng.random() < 0.5
            if self.rng.random() < 0.5:
                module.set_reshard_after_forward(flag, recurse=False)
            else:
                module.set_reshard_after_backward(flag, recurse=False)

    def _update_between_evaluations(self) -> None:
        """Kept parameters are gathered again when they have changed."""
        self._evaluate()
        self._change(0.9)
        self._evaluate()

    def _change(self, factor: float) -> None:
        """Change some parameters in place."""
        reshard(self.model)
        with torch.no_grad():
            for (_, p), (_, mine) in zip(
                self.pair.plain.named_parameters(), self.model.named_parameters(), strict=True
            ):
                p.data.mul_(factor)
                mine.mul_(factor)

    def _change_before_backward(self) -> None:
        """Backward computes with the parameters as they are then."""
        seed = self.rng.randrange(10**6)
        batches = self.pair.batches()
        losses = [_loss(self.pair.plain, x, seed) for x in batches]
        loss = _loss(self.model, batches[self.pair.rank], seed)
        self._change(1.05)
        if loss.requires_grad:
            steps = [lambda _, x, loss=each: backward(loss) for each in losses]
            self.pair.plain_backwards(steps, batches)
            loss.backward()
        self.pair.compare_gradients()
        self.pair.update()

    def _unshard_by_hand(self) -> None:
        for module in self.rng.sample(sharded_modules(self.model), 1):
            handle = module.unshard(async_op=self.rng.random() < 0.5)
            if handle is not None and self.rng.random() < 0.5:
                handle.wait()
            if self.rng.random() < 0.5:
                module.reshard()

    def _reload(self) -> None:
        state = {name: value.clone() * 0.95 for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(state)
        self.pair.plain.load_state_dict({name: whole(value) for name, value in state.items()})


def _is_called(model: nn.Module, name: str) -> bool:
    """True for modules inside of blocks and parts whose parameters nothing else reads."""
    parent, _, last = name.rpartition(".")
    return last in ("a", "up") and isinstance(model.get_submodule(parent), Part | Block)


def _raise(*_: Any) -> None:
    raise Boom


def _raise_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_raise)


def _loss(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    first, second = model(x.clone(), random.Random(seed))
    return first + second


def _adamw(parameters: Any, **how: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, eps=1e-2, **how)


_adamw_foreach = functools.partial(_adamw, foreach=True)
_adamw_fused = functools.partial(_adamw, fused=True)


def runs_programs(first: int, num: int, shape: tuple[int, ...]) -> None:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for seed in range(first, first + num):
        run = None
        try:
            run = Run(seed, mesh)
            run.run()
        except Exception as error:
            drawn = "\n  ".join(run.drawn) if run is not None else "nothing"
            raise AssertionError(f"program {seed}: {error}\n  {drawn}") from error


@pytest.mark.parametrize(
    ("first", "num", "shape"),
    [
        (0, at_most(2, of_all=10), (2,)),
        (200, at_most(1, of_all=10), (1,)),
        (300, at_most(1, of_all=10), (3,)),
        (500, at_most(1, of_all=10), (2, 2)),
        (600, at_most(2, of_all=10), (4,)),
    ],
    ids=str,
)
def test_random_programs_train_as_unsharded(first: int, num: int, shape: tuple[int, ...]) -> None:
    run_ranks(math.prod(shape), runs_programs, first, num, shape)


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


def _written_back(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """A step of copies in another dtype."""
    params = optim.param_groups[0]["params"]
    copies = [nn.Parameter(p.detach().double()) for p in params]
    for copied, p in zip(copies, params, strict=True):
        assert p.grad is not None
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
    for part in parts:
        part.grad = None


UPDATES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "foreach": (_adamw_foreach, _step),
    "fused": (_adamw_fused, _step),
    "loop": (sgd, _step),
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


@on_ranks(2)
def test_an_evaluation_sees_steps_after_uninstall() -> None:
    """Another model makes the patches again; they have missed these steps."""
    pair = pair_of(Stack, partial_shard(reshard_after_forward=False), _adamw_foreach)
    pair.backwards()
    pair.compare_outputs()
    fsdp_compat.uninstall()
    _step(pair.plain, pair.plain_optim)
    _step(pair.model, pair.optim)
    api.fully_shard(nn.Linear(2, 2))
    pair.compare_outputs()


@mapped_or_sent
@pytest.mark.parametrize("act", ["step", "state dict"])
@on_ranks(2)
def test_one_rank_alone_may_step_another_optimizer_or_take_a_state_dict(
    act: str, environment: dict[str, str]
) -> None:
    """Between two evaluations."""
    model: Any = shard_all(Stack())
    other = nn.Linear(2, 2)
    optim = torch.optim.SGD(other.parameters(), lr=0.1)
    x = vectors(torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        before = model(x)
    if dist.get_rank() == 0 and act == "step":
        other(torch.ones(2)).sum().backward()
        optim.step()
    elif dist.get_rank() == 0:
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
            pair.compare_gradients()
            pair.update()


# -- what torch's FSDP2 cannot do


only_ours = pytest.mark.skipif(api.name == "torch", reason="torch refuses it, or what follows")


@only_ours
@on_ranks(2)
def test_second_derivatives_are_those_of_the_unsharded_model() -> None:
    pair = pair_of(Stack)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (grad,) = torch.autograd.grad(square(model, x), x, create_graph=True)
        loss = grad.pow(2).sum()
        loss.backward()
        return loss.detach()

    pair.step(step)
    pair.step()


@only_ours
@on_ranks(2)
def test_an_inner_module_may_run_before_the_root_and_training_may_follow_inference() -> None:
    pair = pair_of(Stack)
    x = vectors(torch.Generator().manual_seed(5))
    assert_close(pair.model.blocks[1](x), pair.plain.blocks[1](x), "output")
    pair.step()
    pair = pair_of(Stack)
    with torch.inference_mode():
        pair.compare_outputs()
    pair.step()


@only_ours
@on_ranks(2)
def test_a_list_may_be_the_root() -> None:
    def shard(model: Any) -> Any:
        api.fully_shard([*model])
        return model

    pair = pair_of(lambda: nn.Sequential(Block(), Block()), shard)
    for _ in range(2):
        pair.step()
