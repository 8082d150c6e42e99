"""Optimizers of whole parameters on a sharded model, beside one process."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import Optimizer

from fsdp_compat import (
    CheckpointError,
    CPUOffload,
    ShardingStrategy,
    StateDictType,
    StateError,
    UsageError,
    checkpoint,
    fully_shard,
    optim,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.optim import GatheredOptimizer
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from tests.support.cases import about
from tests.support.models import Layers as Net
from tests.support.odd_model import LAYOUTS
from tests.support.parity import no_sync
from tests.support.ranks import on_ranks, run_ranks

LR = 0.02
each_layout = pytest.mark.parametrize("layout", ["flat", "original", "rows"])

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "muon": partial(torch.optim.Muon, lr=LR),
    "adafactor": partial(torch.optim.Adafactor, lr=LR),
    "adamw": partial(torch.optim.AdamW, lr=LR),
}
muon, adafactor, adamw = OPTIMIZERS.values()
sgd = partial(torch.optim.SGD, lr=0.1)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and "head" not in name


class Together:
    """Several optimizers of an unsharded model."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()


def beside(
    model: nn.Module, make: Callable[[Any], Optimizer], select: Any = is_matrix, others: Any = adamw
) -> Together:
    """Return what ``sharded`` does, of an unsharded model."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    chosen = [p for n, p in named if select(n, tuple(p.shape))]
    return Together(make(chosen), others([p for n, p in named if not select(n, tuple(p.shape))]))


def sharded(model: nn.Module, make: Callable[[Any], Optimizer]) -> GatheredOptimizer:
    return GatheredOptimizer(model, make, is_matrix, adamw)


def batch(step: int) -> Tensor:
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module, optimizer: Any, steps: Sequence[int] = range(4), num_ranks: int = 1
) -> None:
    """num_ranks: round gradients as their mean over so many ranks."""
    for step in steps:
        model(batch(step)).square().mean().backward()
        for parameter in model.parameters() if num_ranks > 1 else ():
            if parameter.grad is not None:
                parameter.grad = sum([parameter.grad] * num_ranks) / num_ranks
        optimizer.step()
        optimizer.zero_grad()


def expected(
    make: Callable[[Any], Optimizer],
    steps: Sequence[int] = range(4),
    num_ranks: int = 1,
    **chosen: Any,
) -> dict[str, Tensor]:
    model = Net()
    train(model, beside(model, make, **chosen), steps, num_ranks)
    return {name: value.detach() for name, value in model.state_dict().items()}


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in checkpoint.iter_full_state_dict(model)}


def assert_near(found: dict[str, Tensor], right: dict[str, Tensor], *, is_exact: bool) -> None:
    """is_exact: bit by bit; otherwise relative to the largest value of each parameter."""
    assert set(found) == set(right)
    for name, value in right.items():
        error = (found[name] - value).abs().max().item() / max(value.abs().max().item(), 1e-30)
        assert error <= (0.0 if is_exact else 1e-6), f"{name}: {error}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
def test_steps_are_those_of_one_process(world_size: int, layout: str) -> None:
    for make in OPTIMIZERS.values() if layout != "columns" else (muon,):
        model = LAYOUTS[layout](Net())
        with about(make):
            train(model, sharded(model, make))
            assert_near(values(model), expected(make, num_ranks=world_size), is_exact=True)


# -- as part of a program


@each_layout
@on_ranks(2)
def test_accumulation_clipping_and_closures(layout: str) -> None:
    plain, model = Net(), LAYOUTS[layout](Net())
    optimizers = [beside(plain, muon), sharded(model, muon)]
    for step in range(3):
        for net in (plain, model):
            with no_sync(net):
                net(batch(2 * step)).square().mean().backward()
            net(batch(2 * step + 1)).square().mean().backward()
        nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], 0.1)
        if layout == "rows":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            model.clip_grad_norm_(0.1)
        optimizers[0].step()
        assert optimizers[1].step(lambda: 7.0) == 7.0
        for each in optimizers:
            each.zero_grad()
    assert_near(values(model), plain.state_dict(), is_exact=False)


@on_ranks(4)
def test_replicas_stay_equal_and_one_of_them_saves(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    model = LAYOUTS["original"](Net(), device_mesh=mesh, sharding_strategy=strategy)
    optimizer = sharded(model, muon)
    train(model, optimizer, (0, 1))
    path = checkpoint.save(tmp_path, model, optimizer, step=2)
    train(model, optimizer, (2, 3))
    assert_near(values(model), expected(muon), is_exact=True)
    owners = json.loads((path / "manifest.json").read_text())["content"]["owners"]
    assert set(owners.values()) <= {0, 1} and len(owners) >= 4
    other = LAYOUTS["rows"](Net())
    optimizer = sharded(other, muon)
    checkpoint.load(path, other, optimizer)
    train(other, optimizer, (2, 3))
    assert_near(values(other), expected(muon), is_exact=True)


@on_ranks(2)
def test_shards_may_be_offloaded_ignored_and_in_bf16() -> None:
    model = LAYOUTS["original"](Net(), cpu_offload=CPUOffload(offload_params=True))
    train(model, sharded(model, adafactor))
    assert_near(values(model), expected(adafactor), is_exact=True)
    net = Net()
    model = LAYOUTS["flat"](net, ignored_modules=[net.layers[0]])
    train(model, sharded(model, muon))  # what is outside of units is stepped where it is
    assert_near(values(model), expected(muon), is_exact=True)
    plain, model = Net().bfloat16(), LAYOUTS["rows"](Net().bfloat16())
    for each, optimizer in ((plain, beside(plain, muon)), (model, sharded(model, muon))):
        each(batch(0).bfloat16()).square().mean().backward()
        optimizer.step()
    assert_near(values(model), plain.state_dict(), is_exact=True)


@on_ranks(2)
def test_a_scaler_skips_all_ranks_steps_and_the_rest_is_for_an_optimizer_of_your_own() -> None:
    model = LAYOUTS["original"](Net())
    whole = GatheredOptimizer(model, muon, is_matrix)
    rest, scaler = adamw(whole.unselected), ShardedGradScaler("cpu", init_scale=256.0)
    for step in (-1, 0, 1, 2, 3):
        loss = model(batch(step)).square().mean()
        overflows = step < 0 and dist.get_rank() == 0
        scaler.scale(loss * float("inf") if overflows else loss).backward()
        for each in (whole, rest):  # neither touches the gradients of the other
            scaler.step(each)
            each.zero_grad(set_to_none=False)
        scaler.update()
        model.zero_grad()
    assert scaler.get_scale() == 128.0
    assert_near(values(model), expected(muon), is_exact=True)


class Scaled(torch.optim.SGD):
    """Multiplies gradients by an attribute of their parameters, and counts its steps."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(getattr(p, "factor", 1.0))
        return super().step(closure)


@each_layout
@on_ranks(2)
def test_by_default_all_is_stepped_with_attributes_momentum_and_state_of_no_parameter(
    layout: str,
) -> None:
    def scaled(params: Any) -> Optimizer:
        made.append(Scaled(params, lr=LR, momentum=0.9))
        return made[-1]

    made: list[Optimizer] = []
    plain, model = Net(), Net()
    for net in (plain, model):
        net.head.weight.factor = 3.0
    model = LAYOUTS[layout](model)
    whole = GatheredOptimizer(model, scaled)
    assert whole.optimizers[0] is made[-1] and whole.unselected == []
    one = scaled([p for p in plain.parameters() if p.requires_grad])
    for each, optimizer in ((plain, one), (model, whole)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
        for step in range(3):
            train(each, optimizer, [step])
            scheduler.step()
    assert_near(values(model), plain.state_dict(), is_exact=True)
    with _full(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # state that belongs to no parameter is copied
        state = FSDP.optim_state_dict(model, whole)
        again = GatheredOptimizer(model, scaled)
        again.load_state_dict(FSDP.optim_state_dict_to_load(model, again, state))
    assert again.state["steps"] == 3


# -- its state

WAYS = ["checkpoint", "dcp", "optim_state_dict", "own"]


@each_layout
def test_state_moves_between_numbers_of_ranks(layout: str, tmp_path: Path) -> None:
    for world_size in (2, 3, 1):  # the first saves
        run_ranks(world_size, _run, layout, tmp_path, world_size == 2)


def _run(layout: str, path: Path, saves: bool) -> None:
    for make, way in (*itertools.product(["muon"], WAYS), ("adafactor", WAYS[0])):
        folder, model = path / make / way, LAYOUTS[layout](Net())
        optimizer = sharded(model, OPTIMIZERS[make])
        if saves:
            train(model, optimizer, (0, 1))
            save(way, folder, model, optimizer)
            continue
        load(way, folder, model, optimizer)
        train(model, optimizer, (2, 3))
        is_exact = dist.get_world_size() == 1  # the mean of three equal gradients is rounded
        with about((make, way)):
            assert_near(values(model), expected(OPTIMIZERS[make]), is_exact=is_exact)


def _full(model: nn.Module) -> Any:
    return FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT)


def save(way: str, folder: Path, model: nn.Module, optimizer: GatheredOptimizer) -> None:
    checkpoint.save(folder, model, optimizer if way == "checkpoint" else None, step=2)
    if way == "dcp":
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder / "dcp")
    if way in ("optim_state_dict", "own"):
        with _full(model):
            state = FSDP.optim_state_dict(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(state, folder / "optimizer.pt")


def load(way: str, folder: Path, model: nn.Module, optimizer: GatheredOptimizer) -> None:
    path = checkpoint.latest(folder)
    assert path is not None
    checkpoint.load(path, model, optimizer if way == "checkpoint" else None)
    if way == "dcp":
        state: dict[str, Any] = {"optimizer": optimizer.state_dict()}
        # the layer that was not used has no state in the checkpoint
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=folder / "dcp", planner=planner)
        optimizer.load_state_dict(state["optimizer"])
    if way in ("optim_state_dict", "own"):
        state = torch.load(folder / "optimizer.pt")
        if way == "optim_state_dict":
            with _full(model):
                state = FSDP.optim_state_dict_to_load(model, optimizer, state)
        optimizer.load_state_dict(state)


@each_layout
@on_ranks(2)
def test_a_rank_that_owns_nothing_and_state_that_constructors_make_are_saved(
    layout: str, tmp_path: Path
) -> None:
    def is_one(name: str, shape: tuple[int, ...]) -> bool:
        return name == "layers.1.up.weight"

    adagrad = partial(torch.optim.Adagrad, lr=LR)
    for way, others in zip(WAYS, (sgd, adagrad, sgd, adagrad), strict=True):
        folder = tmp_path / way / others.func.__name__
        model, other = LAYOUTS[layout](Net()), LAYOUTS[layout](Net())
        optimizer = GatheredOptimizer(model, muon, is_one, others)
        train(model, optimizer, (0, 1))
        save(way, folder, model, optimizer)
        optimizer = GatheredOptimizer(other, muon, is_one, others)
        load(way, folder, other, optimizer)
        train(other, optimizer, (2, 3))
        with about((way, others)):
            right = expected(muon, select=is_one, others=others)
            assert_near(values(other), right, is_exact=True)
    of_constructors = GatheredOptimizer(model, adagrad, is_one, adagrad)
    checkpoint.save(tmp_path / "before steps", model, of_constructors, step=1)


@pytest.mark.parametrize("layout", ["flat", "rows"])
@on_ranks(2)
def test_state_of_shards_and_of_whole_parameters_load_into_each_other(
    layout: str, tmp_path: Path
) -> None:
    everything = {"select": lambda *_: True, "others": lambda params: Together()}
    for number in (0, 1):
        model, other = LAYOUTS[layout](Net()), LAYOUTS[layout](Net())
        pair = [(model, adamw(model.parameters())), (other, GatheredOptimizer(other, adamw))]
        (saving, its), (loading, optimizer) = pair if number == 0 else pair[::-1]
        train(saving, its, (0, 1))
        path = checkpoint.save(tmp_path / str(number), saving, its, step=2)
        checkpoint.load(path, loading, optimizer)
        train(loading, optimizer, (2, 3))
        assert_near(values(loading), expected(adamw, **everything), is_exact=False)


@on_ranks(2)
def test_tools_keep_whole_states_and_other_optimizers_refuse_them(tmp_path: Path) -> None:
    model = LAYOUTS["original"](Net())
    optimizer = sharded(model, adafactor)
    train(model, optimizer, (0, 1))
    path = checkpoint.save(tmp_path, model, optimizer, step=2)
    with pytest.raises(CheckpointError, match="Adafactor"):
        checkpoint.load(path, model, sharded(model, muon))
    if dist.get_rank() == 0:
        checkpoint.files.convert(path, tmp_path / "for_three", to="native", world_size=3, step=2)
        checkpoint.files.convert(path, tmp_path / "whole.pt")
        assert checkpoint.files.diff(path, tmp_path / "for_three").is_same
    dist.barrier()
    for name in ("for_three", "whole.pt"):
        model = LAYOUTS["rows"](Net())
        optimizer = sharded(model, adafactor)
        checkpoint.load(tmp_path / name, model, optimizer)
        train(model, optimizer, (2, 3))
        assert_near(values(model), expected(adafactor), is_exact=True)


# -- what is refused, and what is recognised


class Clipped(torch.optim.SGD):
    """Clips by the norm of all gradients together."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else torch.ones(())
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


class Layered(torch.optim.SGD):
    """Steps along each gradient, divided by its norm, as LARS does."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None and p.grad.numel():
                p.grad.div_(p.grad.norm())
        return super().step(closure)


def raises_on_rank_1(params: Any) -> Optimizer:
    if dist.get_rank() == 1:
        raise ArithmeticError("no optimizer here")
    return muon(params)


def other_choice(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and (dist.get_rank() == 0 or "up" not in name)


# arguments of GatheredOptimizer after the model, and words of the error on ranks 0 and 1
REFUSED: dict[str, tuple[Any, str, str]] = {
    "all together": ((lambda p: Clipped(p, 0.1),), "Clipped depend on all parameters", ""),
    "raises": ((raises_on_rank_1, is_matrix), "could not be made on all ranks", "no optimizer"),
    "choice": ((muon, other_choice), "select different parameters", ""),
    "nothing": ((muon, lambda name, shape: False), "No parameter is selected", ""),
    "left out": ((lambda p: adamw(p[:1]),), "lacks parameters", ""),
    "no optimizer": ((lambda p: None,), "The result of make", ""),
}


@on_ranks(2)
def test_what_cannot_be_right_is_refused_on_all_ranks() -> None:
    for case, (arguments, *words) in REFUSED.items():
        model = LAYOUTS["original"](Net())
        error = (UsageError, ArithmeticError) if case == "raises" else UsageError
        text = words[dist.get_rank()] or words[0]
        with about(case), pytest.raises(error, match=text):
            GatheredOptimizer(model, *arguments)
        train(model, sgd(model.parameters()), range(1))
    with pytest.raises(UsageError, match="pass others="):
        GatheredOptimizer(LAYOUTS["flat"](Net()), muon, is_matrix)
    with pytest.raises(UsageError, match="not wrapped"):
        GatheredOptimizer(Net(), muon)


@on_ranks(4)
def test_tensor_parallel_parameters_are_refused_unless_left_out() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    parallelize_module(model, mesh["tp"], {"layers.0.up": ColwiseParallel(use_local_output=True)})
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(UsageError, match="Tensor parallelism cuts"):
        sharded(model, muon)
    GatheredOptimizer(model, muon, lambda n, s: is_matrix(n, s) and "layers.0" not in n, adamw)


@on_ranks(2)
def test_steps_at_the_wrong_time_are_refused() -> None:
    model = LAYOUTS["original"](Net())
    optimizer = sharded(model, muon)
    before = values(model)
    with model.no_sync():
        model(batch(0)).sum().backward()
    with pytest.raises(StateError, match="not reduced yet"):
        optimizer.step()
    optimizer.zero_grad()
    loss = model(batch(0)).sum()
    loss.register_hook(lambda _: optimizer.step())
    with pytest.raises(StateError, match="step"):
        loss.backward()
    with FSDP.summon_full_params(model), pytest.raises(StateError, match="summon_full_params"):
        optimizer.step()
    with pytest.raises(UsageError, match="no further parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    with pytest.raises(UsageError, match="copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(CheckpointError, match="keyed by numbers"):
        optimizer.load_state_dict(torch.optim.Optimizer.state_dict(optimizer))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0)).sum()).backward()
    with pytest.raises(UsageError, match="ShardedGradScaler"):
        scaler.step(optimizer)
    (frozen,) = (p for p in model.parameters() if not p.requires_grad)
    frozen.requires_grad_()
    with pytest.raises(UsageError, match="have changed"):
        optimizer.step()
    frozen.requires_grad_(False)
    assert_near(values(model), before, is_exact=True)
    optimizer.zero_grad()
    train(model, optimizer)
    assert_near(values(model), expected(muon), is_exact=True)


def warned(optimizer: Optimizer, model: nn.Module, words: str) -> list[str]:
    """Return the warnings with these words of two steps."""
    model(batch(0)).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.step()
    return [str(each.message) for each in caught if words in str(each.message)]


@each_layout
@on_ranks(2)
def test_optimizers_that_are_wrong_on_shards_are_recognised(layout: str) -> None:
    told = partial(warned, words="on shards")
    model = LAYOUTS[layout](Net())
    by_check = "is wrong on shards" if layout != "rows" else "needs whole parameters: with DTensors"
    with pytest.warns(UserWarning, match=f"Layered {by_check}"):
        optim.check(model, Layered(model.parameters()))
    if layout != "rows":
        (text,) = told(Layered(model.parameters()), model)
        assert "GatheredOptimizer(model, lambda params: Layered(" in text
        (text,) = told(Clipped(model.parameters(), 0.0), model)
        assert "needs all parameters at once" in text
    for make in (adamw, sgd):
        assert told(make(model.parameters()), model) == []
    whole = GatheredOptimizer(model, Layered)
    assert told(whole, model) == []
    assert optim.check(model, whole) == []


@on_ranks(2)
def test_a_group_that_a_choice_by_shape_left_empty_is_a_warning() -> None:
    for layout in ("flat", "rows"):
        model = LAYOUTS[layout](Net())
        parameters = list(model.parameters())
        decay = [each for each in parameters if each.ndim > 1]
        rest = [each for each in parameters if each.ndim <= 1]
        for first, second in ((decay, rest), (parameters[:1], parameters[1:])):
            texts = warned(adamw([{"params": first}, {"params": second}]), model, "is empty")
            if layout == "rows" or first is not decay:
                assert first and not texts
            else:
                (text,) = texts
                assert text.startswith("A parameter group of AdamW is empty.")
                assert "before wrapping" in text
