"""Optimizers of whole parameters on a sharded model, beside one process."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import Optimizer

from fsdp_compat import (
    CheckpointError,
    CPUOffload,
    FullOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
    StateError,
    UsageError,
    _torch_private,
    checkpoint,
    fully_shard,
    optim,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._comm.backend import BackendTransport
from fsdp_compat._comm.gloo_connections import OverConnections
from fsdp_compat._comm.transport import Transport
from fsdp_compat._comm.two_stages import TwoStages
from fsdp_compat._engine.group import Group
from fsdp_compat._state.units import model_units_in
from fsdp_compat.optim import GatheredOptimizer
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from tests.support.cases import about
from tests.support.hosts import hosts
from tests.support.ranks import on_ranks, run_ranks

LR = 0.02


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(12, width, bias=False), nn.LayerNorm(width)
        self.down = nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """With a tied and a frozen parameter, a scalar, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(17), Layer(30)])
        self.head = nn.Linear(12, 12)
        self.again = self.head
        self.unused, self.scale = Layer(9), nn.Parameter(torch.tensor(2.0))
        self.layers[1].norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.again(self.head(x)) * self.scale


def flat(model: nn.Module, **options: Any) -> nn.Module:
    return FSDP(model, auto_wrap_policy={"Layer"}, **options)


def original(model: nn.Module, **options: Any) -> nn.Module:
    return flat(model, use_orig_params=True, **options)


def rows(model: nn.Module, **options: Any) -> nn.Module:
    for layer in (*model.layers, model.unused):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


LAYOUTS: dict[str, Callable[..., nn.Module]] = {"flat": flat, "original": original, "rows": rows}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def muon(params: Any) -> Optimizer:
    return torch.optim.Muon(params, lr=LR)


def adafactor(params: Any) -> Optimizer:
    return torch.optim.Adafactor(params, lr=LR)


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=LR)


OPTIMIZERS = {"muon": muon, "adafactor": adafactor, "adamw": adamw}


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


def beside(model: nn.Module, make: Callable[[Any], Optimizer]) -> Together:
    """Return what ``sharded`` does, of an unsharded model."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    chosen = [p for n, p in named if is_matrix(n, tuple(p.shape))]
    return Together(make(chosen), adamw([p for n, p in named if not is_matrix(n, tuple(p.shape))]))


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
    make: Callable[[Any], Optimizer], steps: Sequence[int] = range(4), num_ranks: int = 1
) -> dict[str, Tensor]:
    model = Net()
    train(model, beside(model, make), steps, num_ranks)
    return {name: value.detach() for name, value in model.state_dict().items()}


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in checkpoint.iter_full_state_dict(model)}


def assert_near(found: dict[str, Tensor], right: dict[str, Tensor], *, is_exact: bool) -> None:
    """is_exact: bit by bit; otherwise relative to the largest value of each parameter."""
    assert set(found) == set(right)
    for name, value in right.items():
        error = (found[name] - value).abs().max().item() / max(value.abs().max().item(), 1e-30)
        assert error <= (0.0 if is_exact else 1e-6), f"{name}: {error}"


@each_layout
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks("world_size")
def test_steps_are_those_of_one_process(world_size: int, layout: str) -> None:
    for make in OPTIMIZERS.values():
        model = LAYOUTS[layout](Net())
        with about(make):
            train(model, sharded(model, make))
            assert_near(values(model), expected(make, num_ranks=world_size), is_exact=True)


@each_layout
@on_ranks(4)
def test_everything_is_stepped_whole_by_default(layout: str) -> None:
    plain, model = Net(), LAYOUTS[layout](Net())
    train(plain, adafactor([p for p in plain.parameters() if p.requires_grad]))
    optimizer = GatheredOptimizer(model, adafactor)
    train(model, optimizer)
    assert_near(values(model), plain.state_dict(), is_exact=True)
    assert optimizer.unselected == []


@on_ranks(2)
def test_parameters_cut_along_another_dim_are_stepped_whole() -> None:
    model = Net()
    for layer in model.layers:
        fully_shard(layer, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    fully_shard(model)
    train(model, sharded(model, muon))
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert_near(found, expected(muon), is_exact=True)


@each_layout
@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks("world_size")
def test_a_step_is_three_exchanges_of_about_a_shard(world_size: int, layout: str) -> None:
    model, sent, original_exchange = LAYOUTS[layout](Net()), [], OverConnections.exchange

    def exchange(self: Any, tensor: Tensor, sizes: Any, what: str) -> Tensor:
        sent.append(sum(nbytes for rank, (nbytes, _) in enumerate(sizes) if rank != self.rank))
        return original_exchange(self, tensor, sizes, what)

    optimizer = sharded(model, muon)
    numel = sum(p.numel() for n, p in Net().named_parameters() if is_matrix(n, tuple(p.shape)))
    if layout == "flat":  # what is in a FlatParameter with a matrix
        numel = sum(p.numel() for p in Net().parameters() if p.requires_grad)
    with patch.object(OverConnections, "exchange", exchange):
        train(model, optimizer, range(1))
    assert len(sent) == 3
    # values, gradients and new values, in fp32: what this rank does not own, or owns for others
    totals: list[Any] = [None] * world_size
    dist.all_gather_object(totals, sum(sent))
    assert (sum(totals) > 0) == (layout != "original" or world_size == 4)  # a matrix on one rank
    assert sum(totals) <= 3 * 4 * numel * (world_size - 1) / world_size * 1.25


@each_layout
@pytest.mark.parametrize("kind", [TwoStages, BackendTransport], ids=["hosts", "backend"])
@on_ranks(4)
def test_exchanges_are_right_on_every_transport(kind: type[Transport], layout: str) -> None:
    backend = patch.object(_torch_private, "is_gloo", lambda group, device: False)
    with hosts((0, 0, 1, 1)) if kind is TwoStages else backend:
        model = LAYOUTS[layout](Net())
        assert {type(each.shard) for each in groups_of(model)} == {kind}
        train(model, sharded(model, muon))
        assert_near(values(model), expected(muon), is_exact=True)


def groups_of(model: nn.Module) -> list[Group]:
    return [group for own in model_units_in(model) for group in own.unit.groups]


# -- as part of a program


@each_layout
@on_ranks(2)
def test_accumulation_clipping_schedules_and_closures(layout: str) -> None:
    plain, model = Net(), LAYOUTS[layout](Net())
    optimizers = [beside(plain, muon), sharded(model, muon)]
    schedulers = [
        [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers[0].optimizers],
        [torch.optim.lr_scheduler.StepLR(optimizers[1], 1, 0.5)],
    ]
    for step in range(3):
        for net in (plain, model):
            for micro in (0, 1):
                if net is model and layout == "rows":
                    net.set_requires_gradient_sync(micro == 1)
                    net(batch(2 * step + micro)).square().mean().backward()
                elif net is model and micro == 0:
                    with net.no_sync():
                        net(batch(2 * step)).square().mean().backward()
                else:
                    net(batch(2 * step + micro)).square().mean().backward()
        nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], 0.1)
        if layout == "rows":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            model.clip_grad_norm_(0.1)
        optimizers[0].step()
        assert optimizers[1].step(lambda: 7.0) == 7.0
        for optimizer, its in zip(optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            for each in its:
                each.step()
    assert_near(values(model), plain.state_dict(), is_exact=False)


@pytest.mark.parametrize("layout", ["flat", "original"])
@on_ranks(2)
def test_a_scaler_skips_the_step_of_all_ranks(layout: str) -> None:
    model = LAYOUTS[layout](Net())
    optimizer, scaler = sharded(model, muon), ShardedGradScaler("cpu", init_scale=256.0)
    before = values(model)
    for is_finite in (False, True):
        loss = model(batch(0)).square().mean()
        scaler.scale(loss if is_finite or dist.get_rank() else loss * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert_near(values(model), before if not is_finite else expected(muon, [0]), is_exact=True)
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize("layout", ["flat", "original"])
@on_ranks(4)
def test_replicas_stay_equal_and_one_of_them_saves(layout: str, tmp_path: Path) -> None:
    folders: list[Any] = [None] * 4
    dist.all_gather_object(folders, tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    model = LAYOUTS[layout](Net(), device_mesh=mesh, sharding_strategy=strategy)
    optimizer = sharded(model, muon)
    train(model, optimizer, (0, 1))
    path = checkpoint.save(folders[0], model, optimizer, step=2)
    train(model, optimizer, (2, 3))
    assert_near(values(model), expected(muon), is_exact=True)
    owners = json.loads((path / "manifest.json").read_text())["content"]["owners"]
    assert set(owners.values()) <= {0, 1} and len(owners) >= 4
    other = rows(Net())
    optimizer = sharded(other, muon)
    checkpoint.load(path, other, optimizer)
    train(other, optimizer, (2, 3))
    assert_near(values(other), expected(muon), is_exact=True)


@on_ranks(2)
def test_shards_may_be_offloaded_and_in_bf16() -> None:
    model = original(Net(), cpu_offload=CPUOffload(offload_params=True))
    train(model, sharded(model, adafactor))
    assert_near(values(model), expected(adafactor), is_exact=True)
    plain, model = Net().bfloat16(), rows(Net().bfloat16())
    for net, optimizer in ((plain, beside(plain, muon)), (model, sharded(model, muon))):
        net(batch(0).bfloat16()).square().mean().backward()
        optimizer.step()
    assert_near(values(model), plain.state_dict(), is_exact=True)


@on_ranks(2)
def test_parameters_outside_of_units_are_stepped_where_they_are() -> None:
    plain, net = Net(), Net()
    model = FSDP(net, ignored_modules=[net.layers[0]], auto_wrap_policy={"Layer"})
    train(plain, beside(plain, muon))
    train(model, sharded(model, muon))
    assert_near(values(model), plain.state_dict(), is_exact=True)


@on_ranks(2)
def test_the_rest_is_for_an_optimizer_of_your_own() -> None:
    model = original(Net())
    whole = GatheredOptimizer(model, muon, is_matrix)
    rest, scaler = adamw(whole.unselected), ShardedGradScaler("cpu")
    for step in range(4):
        scaler.scale(model(batch(step)).square().mean()).backward()
        for each in (whole, rest):  # neither touches the gradients of the other
            scaler.step(each)
            each.zero_grad(set_to_none=False)
        scaler.update()
        model.zero_grad()
    assert_near(values(model), expected(muon), is_exact=True)


class Scaled(torch.optim.SGD):
    """Multiplies gradients by an attribute of their parameters, and counts its steps."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(getattr(p, "factor", 1.0))
        return super().step(closure)


def with_factors() -> Net:
    model = Net()
    model.head.weight.factor = 3.0  # type: ignore[union-attr]
    return model


@each_layout
@on_ranks(2)
def test_attributes_momentum_schedules_and_state_of_no_parameter_are_kept(layout: str) -> None:
    def scaled(params: Any) -> Optimizer:
        made.append(Scaled(params, lr=LR, momentum=0.9))
        return made[-1]

    made: list[Optimizer] = []
    plain, model = with_factors(), LAYOUTS[layout](with_factors())
    whole = GatheredOptimizer(model, scaled)
    assert whole.optimizers[0] is made[-1]
    one = scaled([p for p in plain.parameters() if p.requires_grad])
    for net, optimizer in ((plain, one), (model, whole)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
        for step in range(3):
            train(net, optimizer, [step])
            scheduler.step()
    assert_near(values(model), plain.state_dict(), is_exact=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # state that belongs to no parameter is copied
        state = FSDP.optim_state_dict(model, whole)
        again = GatheredOptimizer(model, scaled)
        again.load_state_dict(FSDP.optim_state_dict_to_load(model, again, state))
    assert again.state["steps"] == 3


@on_ranks(2)
def test_state_that_constructors_make_is_saved(tmp_path: Path) -> None:
    folders: list[Any] = [None, None]
    dist.all_gather_object(folders, tmp_path)

    def adagrad(params: Any) -> Optimizer:
        return torch.optim.Adagrad(params, lr=LR)

    def is_first(name: str, shape: tuple[int, ...]) -> bool:
        return name == "layers.0.up.weight"

    plain = Net()
    first = plain.layers[0].up.weight
    rest = [p for p in plain.parameters() if p.requires_grad and p is not first]
    train(plain, Together(muon([first]), adagrad(rest)))
    model, other = original(Net()), original(Net())
    optimizer = GatheredOptimizer(model, muon, is_first, adagrad)
    train(model, optimizer, (0, 1))
    for way in WAYS:
        folder = folders[0] / way
        save(way, folder, model, optimizer)
        loading = GatheredOptimizer(other, muon, is_first, adagrad)
        load(way, folder, other, loading)
        train(other, loading, (2, 3))
        with about(way):
            assert_near(values(other), plain.state_dict(), is_exact=True)
    adagrads = GatheredOptimizer(original(Net()), adagrad, is_first)
    checkpoint.save(folders[0] / "adagrads", adagrads._model, adagrads, step=1)


# -- its state

WAYS = ["checkpoint", "dcp", "optim_state_dict", "own"]


@each_layout
@pytest.mark.parametrize("way", WAYS)
def test_state_moves_between_numbers_of_ranks(way: str, layout: str, tmp_path: Path) -> None:
    for world_size in (2, 3, 1):  # the first saves
        for make in ("muon", "adafactor"):
            with about((world_size, make)):
                run_ranks(world_size, _run, make, way, layout, tmp_path / make, world_size == 2)


def _run(make: str, way: str, layout: str, folder: Path, saves: bool) -> None:
    model = LAYOUTS[layout](Net())
    optimizer = sharded(model, OPTIMIZERS[make])
    if saves:
        train(model, optimizer, (0, 1))
        save(way, folder, model, optimizer)
        return
    load(way, folder, model, optimizer)
    train(model, optimizer, (2, 3))
    is_exact = dist.get_world_size() == 1  # the mean of three equal gradients is rounded
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
        assert "layers.1.up.weight" in state["state"]
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
def test_a_rank_may_own_nothing(layout: str, tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module) -> GatheredOptimizer:
        return GatheredOptimizer(model, muon, lambda name, _: name == "layers.1.up.weight", sgd)

    def sgd(params: Any) -> Optimizer:
        return torch.optim.SGD(params, 0.1)

    plain, folders = Net(), [None, None]
    dist.all_gather_object(folders, tmp_path)
    rest = [p for n, p in plain.named_parameters() if n != "layers.1.up.weight" and p.requires_grad]
    train(plain, Together(muon([plain.layers[1].up.weight]), sgd(rest)))
    for way in WAYS:
        model, other = LAYOUTS[layout](Net()), LAYOUTS[layout](Net())
        optimizer = optimizer_of(model)
        train(model, optimizer, (0, 1))
        folder = Path(folders[0] or "") / way
        save(way, folder, model, optimizer)
        optimizer = optimizer_of(other)
        load(way, folder, other, optimizer)
        train(other, optimizer, (2, 3))
        with about(way):
            assert_near(values(other), plain.state_dict(), is_exact=True)


@pytest.mark.parametrize("layout", ["flat", "rows"])
@on_ranks(2)
def test_state_of_shards_and_of_whole_parameters_load_into_each_other(
    layout: str, tmp_path: Path
) -> None:
    folders: list[Any] = [None, None]
    dist.all_gather_object(folders, tmp_path)
    for number in (0, 1):
        model, other = LAYOUTS[layout](Net()), LAYOUTS[layout](Net())
        pair = [(model, adamw(model.parameters())), (other, GatheredOptimizer(other, adamw))]
        (saving, its), (loading, optimizer) = pair if number == 0 else pair[::-1]
        train(saving, its, (0, 1))
        path = checkpoint.save(folders[0] / str(number), saving, its, step=2)
        checkpoint.load(path, loading, optimizer)
        train(loading, optimizer, (2, 3))
        plain = Net()
        train(plain, adamw([p for p in plain.parameters() if p.requires_grad]))
        assert_near(values(loading), plain.state_dict(), is_exact=False)


@on_ranks(2)
def test_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    folders: list[Any] = [None, None]
    dist.all_gather_object(folders, tmp_path)
    model = original(Net())
    optimizer = sharded(model, adafactor)
    train(model, optimizer, (0,))
    path = checkpoint.save(folders[0], model, optimizer, step=1)
    with pytest.raises(CheckpointError, match="Adafactor"):
        checkpoint.load(path, model, sharded(model, muon))


@on_ranks(2)
def test_tools_keep_whole_states(tmp_path: Path) -> None:
    folders: list[Any] = [None, None]
    dist.all_gather_object(folders, tmp_path)
    model = original(Net())
    optimizer = sharded(model, adafactor)
    train(model, optimizer, (0, 1))
    path = checkpoint.save(folders[0], model, optimizer, step=2)
    if dist.get_rank() == 0:
        checkpoint.files.convert(path, folders[0] / "for_three", to="native", world_size=3, step=2)
        checkpoint.files.convert(path, folders[0] / "whole.pt")
        assert checkpoint.files.diff(path, folders[0] / "for_three").is_same
    dist.barrier()
    for name in ("for_three", "whole.pt"):
        model = rows(Net())
        optimizer = sharded(model, adafactor)
        checkpoint.load(folders[0] / name, model, optimizer)
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


class Layered(torch.optim.Optimizer):
    """Steps along each gradient, divided by its norm, as LARS does."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.numel():
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


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
    "no function": ((3,), "make has the wrong type", ""),
    "arguments": ((muon, lambda name: True), "select has the wrong type", ""),
}


@on_ranks(2)
def test_what_cannot_be_right_is_refused_on_all_ranks() -> None:
    for case, (arguments, *words) in REFUSED.items():
        model = original(Net())
        error = (UsageError, ArithmeticError) if case == "raises" else UsageError
        text = words[dist.get_rank()] or words[0]
        with about(case), pytest.raises(error, match=text):
            GatheredOptimizer(model, *arguments)
        train(model, torch.optim.SGD(model.parameters(), 0.1), range(1))
    with pytest.raises(UsageError, match="pass others="):
        GatheredOptimizer(flat(Net()), muon, is_matrix)
    with pytest.raises(UsageError, match="not wrapped"):
        GatheredOptimizer(Net(), muon)


@on_ranks(4)
def test_tensor_parallel_parameters_are_refused_unless_left_out() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    parallelize_module(model, mesh["tp"], {"layers.0.up": ColwiseParallel(use_local_output=True)})
    model.layers[0] = nn.Sequential(model.layers[0].up)
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(UsageError, match="Tensor parallelism cuts"):
        GatheredOptimizer(model, muon, is_matrix, adamw)
    GatheredOptimizer(model, muon, lambda n, s: is_matrix(n, s) and "layers.0" not in n, adamw)


@on_ranks(2)
def test_steps_at_the_wrong_time_are_refused() -> None:
    model = original(Net())
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
    numbers = torch.optim.Optimizer.state_dict(optimizer)
    with pytest.raises(CheckpointError, match="keyed by numbers"):
        optimizer.load_state_dict({**numbers})
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


@each_layout
@on_ranks(2)
def test_optimizers_that_are_wrong_on_shards_are_recognised(layout: str) -> None:
    def told(optimizer: Optimizer, model: nn.Module) -> list[str]:
        model(batch(0)).square().mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
        return [str(each.message) for each in caught if "on shards" in str(each.message)]

    model = LAYOUTS[layout](Net())
    if layout == "rows":
        with pytest.warns(UserWarning, match="Layered needs whole parameters: with DTensors"):
            optim.check(model, Layered(model.parameters()))
    else:
        (text,) = told(Layered(model.parameters()), model)
        assert "GatheredOptimizer(model, lambda params: Layered(" in text
        (text,) = told(Clipped(model.parameters(), 0.0), model)
        assert "needs all parameters at once" in text
        with pytest.warns(UserWarning, match="Layered is wrong on shards"):
            optim.check(model, Layered(model.parameters()))
    for make in (adamw, lambda p: torch.optim.SGD(p, 0.1)):
        assert told(make(model.parameters()), model) == []
    whole = GatheredOptimizer(model, Layered)
    assert told(whole, model) == []
    assert optim.check(model, whole) == []


@on_ranks(3)
def test_owned_states_are_sent_to_the_rank_that_keeps_them_one_owner_at_a_time() -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 64, bias=False) for _ in range(6))
    model = FSDP(nn.Sequential(*layers), use_orig_params=True)
    optimizer = GatheredOptimizer(model, adamw)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    axis, received = groups_of(model)[0].shard, list[int]()
    exchange = type(axis).exchange

    def noted(self: Any, *args: Any) -> Tensor:
        found = exchange(self, *args)
        received.append(found.numel())
        return found

    config = FullOptimStateDictConfig(rank0_only=True)
    with (
        patch.object(type(axis), "exchange", noted),
        patch("fsdp_compat._state.rank_local._AT_ONCE_NBYTES", 1),
        FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config),
    ):
        state = FSDP.optim_state_dict(model, optimizer)
    moments = 2 * 64 * 64 * 4  # of one parameter; each rank owns two
    if dist.get_rank():
        assert sum(received) == 0
    else:
        assert len(state["state"]) == 6
        assert 0 < max(received) < 3 * moments
        assert sum(received) < 5 * moments


@each_layout
@on_ranks(2)
def test_a_group_that_a_choice_by_shape_left_empty_is_a_warning(layout: str) -> None:
    def warned(*groups: list[nn.Parameter]) -> list[str]:
        model(batch(0)).square().mean().backward()
        optimizer = torch.optim.AdamW([{"params": group} for group in groups])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
        return [str(each.message) for each in caught if "is empty" in str(each.message)]

    model = LAYOUTS[layout](Net())
    parameters = list(model.parameters())
    decay = [each for each in parameters if each.ndim > 1]
    texts = warned(decay, [each for each in parameters if each.ndim <= 1])
    if layout == "rows":
        assert decay and not texts
    else:
        (text,) = texts
        assert text.startswith("A parameter group of AdamW is empty.") and "before wrapping" in text
    assert warned(parameters[:1], parameters[1:]) == []
