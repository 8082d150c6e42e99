"""Features besides training with NCCL on several devices of the CUDA build of torch: state dicts,
checkpoints, whole parameters, models from the meta device, copies. None has a race."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_state
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as checkpoint_of

import fsdp_compat
from fsdp_compat import BackwardPrefetch, StateDictType, checkpoint
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.errors import StateError, UsageError
from tests.gpu.test_cuda_build import BOTH, on_nccl
from tests.support import fakecuda
from tests.support.fully_sharded import shard_all
from tests.support.models import DIM, Block, Stack
from tests.support.parity import no_sync, seeded, square
from tests.support.twin import FULLY_SHARD, ORIGINAL, sharded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not fakecuda.is_used(), reason=fakecuda.WHY)]

both_front_ends = pytest.mark.parametrize("front_end", BOTH)
with_and_without_offload = pytest.mark.parametrize("offload", [False, True])


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    with fakecuda.watching() as recording:
        yield
    assert [str(race) for race in recording.unordered()] == []


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> float:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    loss = square(model, torch.randn(4, DIM, generator=generator).to(device()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(
    front_end: str, offload: bool = False, seed: int = 0
) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and its optimizer after a step."""
    options: dict[str, Any] = {"units": (Block,), "device_id": device(), "offload": offload}
    model = sharded(seeded(Stack, seed), front_end, **options)
    optimizer = adamw(model)
    step(model, optimizer, seed)
    return model, optimizer


def assert_same_step(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert step(*one, 7) == pytest.approx(step(*other, 7), rel=1e-5)
    assert step(*one, 8) == pytest.approx(step(*other, 8), rel=1e-5)


# -- state dicts and checkpoints


def check_state_dicts(offload: bool) -> None:
    with in_order():
        one, other = trained(ORIGINAL, offload), trained(ORIGINAL, offload, seed=5)
        for name in ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"):
            for model, _ in (one, other):
                FSDP.set_state_dict_type(model, StateDictType[name])
            if name != "LOCAL_STATE_DICT":
                state = FSDP.optim_state_dict(*one)
                other[1].load_state_dict(FSDP.optim_state_dict_to_load(*other, state))
            other[0].load_state_dict(one[0].state_dict())
            assert_same_step(one, other)


@with_and_without_offload
def test_state_dicts_of_every_type(offload: bool) -> None:
    on_nccl(2, check_state_dicts, offload)


def check_state_dicts_by_torch(front_end: str) -> None:
    with in_order():
        for full in (False, True):
            for to_cpu in (False, True):
                one, other = trained(front_end), trained(front_end, seed=5)
                options = torch_state.StateDictOptions(full_state_dict=full, cpu_offload=to_cpu)
                states = [copy.deepcopy(torch_state.get_state_dict(*one, options=options))]
                options = torch_state.StateDictOptions(full_state_dict=full)
                if full and to_cpu:  # on the first rank alone
                    dist.broadcast_object_list(states)
                model_state, optim_state = states[0]
                torch_state.set_state_dict(
                    *other,
                    model_state_dict=model_state,
                    optim_state_dict=optim_state,
                    options=options,
                )
                assert_same_step(one, other)


@both_front_ends
def test_state_dicts_by_functions_of_torch(front_end: str) -> None:
    on_nccl(2, check_state_dicts_by_torch, front_end)


def check_checkpoints(front_end: str, offload: bool, path: str) -> None:
    with in_order():
        one = trained(front_end, offload)
        checkpoint.save(f"{path}/now", *one, {"epoch": 1}, step=0)
        saving = checkpoint.async_save(f"{path}/later", *one, {"epoch": 2}, step=1)
        expected = [step(*one, 7), step(*one, 8)]
        saving.wait()
        for epoch, name in enumerate(("now", "later"), 1):
            other = trained(front_end, offload, seed=5)
            assert checkpoint.load(f"{path}/{name}", *other).extra["epoch"] == epoch
            assert [step(*other, 7), step(*other, 8)] == pytest.approx(expected, rel=1e-5)
        checkpoint.save_safetensors(f"{path}/weights", one[0])
        checkpoint.load_safetensors(f"{path}/weights", other[0])

        names = ("model", "optimizer")
        state = dict(zip(names, torch_state.get_state_dict(*one), strict=True))
        dcp.save(state, checkpoint_id=f"{path}/dcp")
        other = trained(front_end, offload, seed=6)
        loaded = dict(zip(names, torch_state.get_state_dict(*other), strict=True))
        dcp.load(loaded, checkpoint_id=f"{path}/dcp")
        torch_state.set_state_dict(
            *other, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        assert_same_step(one, other)
        saved: Any = dcp.async_save({"model": state["model"]}, checkpoint_id=f"{path}/async")
        saved.result()


@both_front_ends
@with_and_without_offload
def test_checkpoints(front_end: str, offload: bool, tmp_path: Path) -> None:
    on_nccl(2, check_checkpoints, front_end, offload, str(tmp_path))


# -- whole parameters, construction, copies


def check_whole_parameters(offload: bool) -> None:
    ways: list[dict[str, bool]] = [{}, {"writeback": False}, {"offload_to_cpu": True}]
    ways += [{"offload_to_cpu": True, "rank0_only": True, "writeback": False}]
    with in_order():
        model, _ = trained(ORIGINAL, offload)
        shown = []
        for way in ways:
            with FSDP.summon_full_params(model, **way):
                if not (way.get("rank0_only") and dist.get_rank()):
                    shown.append([p.detach().cpu().clone() for p in model.parameters()])
        assert all(map(torch.equal, first, other) for first in shown for other in shown)
        with FSDP.summon_full_params(model), torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        model(torch.ones(4, DIM, device=device())).sum().backward()
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            assert all(bool((p == 0.5).all()) for p in model.parameters())
            assert any(p.grad is not None for p in model.parameters())


@with_and_without_offload
def test_whole_parameters(offload: bool) -> None:
    on_nccl(2, check_whole_parameters, offload)


def check_meta(front_end: str) -> None:
    def fill(module: nn.Module) -> None:
        module.to_empty(device=device(), recurse=front_end != ORIGINAL)
        for child in [module] if front_end == ORIGINAL else module.modules():
            if isinstance(child, nn.Linear | nn.LayerNorm):
                child.reset_parameters()

    with in_order():
        with torch.device("meta"):
            model: Any = Stack()
        if front_end == ORIGINAL:
            options: dict[str, Any] = {"param_init_fn": fill, "sync_module_states": True}
            model = sharded(model, front_end, units=(Block,), device_id=device(), **options)
        else:
            fill(shard_all(model))
        optimizer = adamw(model)
        losses = [step(model, optimizer) for _ in range(5)]
    assert losses[-1] < losses[0]


@both_front_ends
def test_models_from_the_meta_device(front_end: str) -> None:
    on_nccl(2, check_meta, front_end)


def check_copies(front_end: str) -> None:
    x = torch.ones(4, DIM, device=device())
    with in_order():
        one = trained(front_end)
        if front_end == ORIGINAL:  # the other one refuses to be copied
            model = copy.deepcopy(one[0])
            assert torch.equal(model(x), one[0](x))
            step(model, adamw(model))
        for without_graph in (torch.no_grad, torch.inference_mode):
            with without_graph():
                one[0].eval()(x)
        step(one[0].train(), one[1])
        one[0].to(device())


@both_front_ends
def test_copies_and_evaluation(front_end: str) -> None:
    on_nccl(2, check_copies, front_end)


# -- training of other kinds


def prefetch(model: Any) -> None:
    for one, following in zip(model.blocks, [*model.blocks][1:], strict=False):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])


def unshard(model: Any) -> None:
    model.blocks[0].register_forward_pre_hook(
        lambda module, x: [block.unshard(async_op=True) for block in model.blocks] and None
    )


def check_prefetching(front_end: str) -> None:
    options: list[dict[str, Any]] = [{"forward_prefetch": True}, {"limit_all_gathers": False}]
    options += [{"backward_prefetch": each} for each in (None, BackwardPrefetch.BACKWARD_POST)]
    prepares: list[Callable[[Any], object]] = [lambda model: None]
    if front_end != ORIGINAL:
        options, prepares = [{}], [*prepares, prefetch, unshard]
    losses = []
    for option in options:
        for prepare in prepares:
            model = seeded(Stack)
            model = sharded(model, front_end, units=(Block,), device_id=device(), **option)
            prepare(model)
            optimizer = adamw(model)
            with in_order():
                losses.append([step(model, optimizer, number) for number in range(3)])
    assert all(each == losses[0] for each in losses)


@both_front_ends
def test_prefetching(front_end: str) -> None:
    on_nccl(2, check_prefetching, front_end)


def check_tensor_parallel() -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    losses: list[list[float]] = []
    for library in (fsdp_compat, torch_fsdp):
        model: Any = seeded(Stack).to(device())
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
            library.fully_shard(block, mesh=mesh["dp"])
        library.fully_shard(model, mesh=mesh["dp"])
        optimizer = adamw(model)
        x = torch.full((4, DIM), 1.0 + mesh.get_local_rank("dp"), device=device())
        with in_order():
            losses.append([])
            for _ in range(3):
                loss = square(model, x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_tensor_parallel_parameters_train_as_with_torch() -> None:
    on_nccl(4, check_tensor_parallel)


# -- ranks that use different units


class Experts(nn.Module):
    """A layer of every rank, around those that some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, used: Sequence[int], how: str) -> torch.Tensor:
        x = self.first(x)
        for index in used:
            if how == "reentrant":
                x = checkpoint_of(self.blocks[index], x, use_reentrant=True)
            elif how == "recomputed":
                x = checkpoint_of(self.blocks[index], x, use_reentrant=False)
            else:
                x = self.blocks[index](x)
        return self.last(x)


# Of the first rank and of the second, in two steps; none uses block 2 in the first
USED = [((0, 1, 3), (1,)), ((0, 1, 2, 3), (0, 3))]
TWISTED = [((3, 1), (0, 1)), ((1, 0), (2, 0, 3))]
HOW = {
    **{how: USED for how in ("plain", "reentrant", "recomputed", "two forwards", "accumulated")},
    "out of order": TWISTED,
}


def losses_of_experts(
    model: Any, how: str, ranks: Sequence[int], place: torch.device
) -> list[float]:
    """Return the mean losses of the ranks in steps of a model that trains on their data."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number, of_ranks in enumerate([*HOW[how], *HOW[how]]):
        total = torch.zeros((), device=place)
        for rank in ranks:
            x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * number + rank))
            x, used = x.to(place), of_ranks[rank]
            loss = model(x, used, how).square().mean() / len(ranks)
            if how == "two forwards":  # the second rank leaves out a block in one
                loss = loss + model(x, used[rank:], how).square().mean() / len(ranks)
            elif how == "accumulated":
                with no_sync(model):
                    loss.backward()
                loss = model(x, of_ranks[0], how).square().mean() / len(ranks)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return [loss.item() for loss in losses]


def check_experts(front_end: str, how: str) -> None:
    with in_order():
        options: dict[str, Any] = {"units": (Block,), "device_id": device()}
        model = sharded(seeded(Experts), front_end, allow_unused_units=True, **options)
        own = losses_of_experts(model, how, [dist.get_rank()], device())
    averages = torch.tensor(own)
    dist.all_reduce(averages)
    plain = losses_of_experts(seeded(Experts), how, [0, 1], torch.device("cpu"))
    assert averages.div(2).tolist() == pytest.approx(plain, rel=1e-5)


@both_front_ends
@pytest.mark.parametrize("how", list(HOW))
def test_ranks_that_use_different_units(front_end: str, how: str) -> None:
    on_nccl(2, check_experts, front_end, how)


# -- mistakes


def check_mistakes_with_devices() -> None:
    other = torch.device("cuda", 7)
    elsewhere = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(other)
    with pytest.raises(UsageError, match=r"'0\.weight' on 'cuda:7'"):
        FSDP(elsewhere, device_id=device())
    elsewhere[0].to(device())
    FSDP(elsewhere, device_id=device(), ignored_modules=[elsewhere[1]])
    for move in (
        lambda model: model.to(device()),
        lambda model: model.load_state_dict(
            {name: value.to(device()) for name, value in model.state_dict().items()}, assign=True
        ),
    ):
        model = sharded(
            seeded(Stack), FULLY_SHARD, units=(Block,), device_id=device(), offload=True
        )
        move(model)
        with pytest.raises(StateError, match="parameters on 'cpu', with CPUOffloadPolicy"):
            model(torch.ones(4, DIM, device=device()))
        model.to("cpu")
        model(torch.ones(4, DIM, device=device())).sum().backward()


def test_modules_on_other_devices_are_refused() -> None:
    on_nccl(2, check_mistakes_with_devices)
