"""Features besides training: state dicts, checkpoints, whole parameters, scaling, models from the
meta device, copies. On a device that records its work none has a race. On the CUDA build of torch
they run on two ranks with NCCL, on another device on one rank, as far as one rank shows them."""

from __future__ import annotations

import copy
from collections.abc import Callable
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

import fsdp_compat
from fsdp_compat import BackwardPrefetch, MixedPrecision, StateDictType, checkpoint
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._state.units import units_of
from fsdp_compat.checkpoint._live.model import named_groups
from fsdp_compat.checkpoint._live.snapshot import take_snapshot
from fsdp_compat.errors import StateError, UsageError
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from tests.support import emulated, fakecuda
from tests.support.devices import in_order, on_nccl, on_the_device, own_device
from tests.support.fully_sharded import shard_all
from tests.support.models import DIM, Block, Stack
from tests.support.order import StreamSync
from tests.support.parity import seeded, square
from tests.support.twin import FLAT, FULLY_SHARD, ORIGINAL, sharded

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
BOTH = (ORIGINAL, FULLY_SHARD)
OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {"front_end": FLAT},
    "original parameters": {},
    "mixed precision": {"front_end": FLAT, "mixed_precision": MixedPrecision(BF16, torch.float32)},
    "offload": {"offload": True},
}

with_nccl = pytest.mark.skipif(not fakecuda.is_used(), reason=fakecuda.WHY)
both_front_ends = pytest.mark.parametrize("front_end", BOTH)
every_option = pytest.mark.parametrize("options", list(OPTIONS))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)


def batch(device: torch.device, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(4, DIM, generator=generator).to(device)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    loss = square(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def made(
    device: torch.device, front_end: str = ORIGINAL, seed: int = 0, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    model = seeded(Stack, seed)
    model = sharded(model, front_end, units=(Block,), device_id=device, **options)
    return model, adamw(model)


def trained(device: torch.device, *args: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and its optimizer after a step."""
    model, optimizer = made(device, *args, **options)
    step(model, optimizer, batch(device, options.get("seed", 0)))
    return model, optimizer


def assert_same_steps(device: torch.device, one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    for x in (batch(device, 7), batch(device, 8)):
        assert step(*one, x) == pytest.approx(step(*other, x), rel=1e-5)


# -- on any device


@every_option
@on_the_device
def test_state_dicts_of_every_type(device: torch.device, options: str) -> None:
    with in_order():
        one = trained(device, **OPTIONS[options])
        other = trained(device, seed=5, **OPTIONS[options])
        for name in ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"):
            for model, _ in (one, other):
                FSDP.set_state_dict_type(model, StateDictType[name])
            if name != "LOCAL_STATE_DICT":
                assert list(one[0].state_dict()) == list(Stack().state_dict())
                state = FSDP.optim_state_dict(*one)
                other[1].load_state_dict(FSDP.optim_state_dict_to_load(*other, state))
            other[0].load_state_dict(one[0].state_dict())
            assert_same_steps(device, one, other)


@every_option
@on_the_device
def test_whole_parameters_are_shown_and_written_back(device: torch.device, options: str) -> None:
    ways: list[dict[str, bool]] = [{}, {"writeback": False}, {"offload_to_cpu": True}]
    ways += [{"offload_to_cpu": True, "rank0_only": True, "writeback": False}]
    model, optimizer = made(device, **OPTIONS[options])
    expected = dict(seeded(Stack).named_parameters())
    with in_order():
        for way in ways:
            with FSDP.summon_full_params(model, **way):
                shown = dict(model.named_parameters())
                if not (way.get("rank0_only") and dist.get_rank()):
                    assert shown.keys() == expected.keys()
                    assert all(torch.equal(p.cpu(), expected[name]) for name, p in shown.items())
        with FSDP.summon_full_params(model), torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        square(model, batch(device, 0)).backward()
        with_grads = options == "original parameters"
        with FSDP.summon_full_params(model, with_grads=with_grads, writeback=False):
            assert all(bool((p == 0.5).all()) for p in model.parameters())
            assert any(p.grad is not None for p in model.parameters()) or not with_grads
        optimizer.step()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("front_end", [FLAT, ORIGINAL])
@on_the_device
def test_a_step_with_infinite_gradients_in_fp16_is_skipped(
    device: torch.device, front_end: str, offload: bool
) -> None:
    low = MixedPrecision(FP16, FP16)
    model, optimizer = made(device, front_end, offload=offload, mixed_precision=low)
    scaler = ShardedGradScaler(device.type, init_scale=1024.0)
    for factor, scale in ((1.0, 1024.0), (float("inf"), 512.0), (1.0, 512.0)):
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(square(model, batch(device, 0)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        is_skipped = all(map(torch.equal, before, model.parameters()))
        assert (is_skipped, scaler.get_scale()) == (factor != 1.0, scale)


@pytest.mark.parametrize(
    ("front_end", "fills"), [(FLAT, True), (ORIGINAL, True), (ORIGINAL, False), (FULLY_SHARD, True)]
)
@on_the_device
def test_models_from_the_meta_device(device: torch.device, front_end: str, fills: bool) -> None:
    def fill(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=front_end == FULLY_SHARD)
        for p in module.parameters(recurse=front_end == FULLY_SHARD):
            nn.init.constant_(p, 0.5)

    with in_order():
        with torch.device("meta"):
            model: Any = Stack()
        if front_end == FULLY_SHARD:
            fill(shard_all(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),))))
        else:
            given = {"param_init_fn": fill} if fills else {}
            model = sharded(model, front_end, units=(Block,), device_id=device, **given)
        plain = seeded(Stack, 3).to(device)
        for p in plain.parameters():
            nn.init.constant_(p, 0.5)
        if not fills:
            model.load_state_dict(plain.state_dict())
        assert all(p.device == device for p in model.parameters())
        optimizer, x = adamw(model), batch(device, 0)
        assert torch.allclose(model(x), plain(x), rtol=1e-5)
        losses = [step(model, optimizer, x) for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("options", [*OPTIONS.values(), {"front_end": FULLY_SHARD}], ids=str)
@on_the_device
def test_a_copy_trains_by_itself_and_training_follows_evaluation(
    device: torch.device, options: dict[str, Any]
) -> None:
    x = batch(device, 0)
    with in_order():
        model, optimizer = trained(device, **options)
        if options.get("front_end") != FULLY_SHARD:  # which refuses to be copied
            before = [p.detach().clone() for p in model.parameters()]
            other = copy.deepcopy(model)
            assert torch.equal(other(x), model(x))
            step(other, adamw(other), x)
            assert all(map(torch.equal, before, model.parameters()))
        for mode in (torch.no_grad, torch.inference_mode):
            if device.type != emulated.NAME or mode is torch.no_grad:  # which lacks the other
                with mode():
                    model.eval()(x)
        step(model.train(), optimizer, x)


# -- state of several ranks


@both_front_ends
@with_nccl
@on_nccl(2)
def test_state_dicts_by_functions_of_torch(front_end: str) -> None:
    device = own_device()
    with in_order():
        for full in (False, True):
            for to_cpu in (False, True):
                one, other = trained(device, front_end), trained(device, front_end, seed=5)
                options = torch_state.StateDictOptions(full_state_dict=full, cpu_offload=to_cpu)
                states = [copy.deepcopy(torch_state.get_state_dict(*one, options=options))]
                if full and to_cpu:  # on the first rank alone
                    dist.broadcast_object_list(states)
                load_by_torch(other, *states[0], full=full)
                assert_same_steps(device, one, other)


def load_by_torch(one: tuple[Any, Any], model: Any, optim: Any, full: bool = False) -> None:
    options = torch_state.StateDictOptions(full_state_dict=full)
    given = {"model_state_dict": model, "optim_state_dict": optim}
    torch_state.set_state_dict(*one, **given, options=options)


@both_front_ends
@pytest.mark.parametrize("offload", [False, True])
@with_nccl
@on_nccl(2)
def test_checkpoints(front_end: str, offload: bool, tmp_path: Path) -> None:
    device = own_device()
    with in_order():
        one = trained(device, front_end, offload=offload)
        checkpoint.save(f"{tmp_path}/now", *one, {"epoch": 1}, step=0)
        saving = checkpoint.async_save(f"{tmp_path}/later", *one, {"epoch": 2}, step=1)
        expected = [step(*one, batch(device, number)) for number in (7, 8)]
        saving.wait()
        for epoch, name in enumerate(("now", "later"), 1):
            other = trained(device, front_end, offload=offload, seed=5)
            assert checkpoint.load(f"{tmp_path}/{name}", *other).extra["epoch"] == epoch
            losses = [step(*other, batch(device, number)) for number in (7, 8)]
            assert losses == pytest.approx(expected, rel=1e-5)
        checkpoint.save_safetensors(f"{tmp_path}/weights", one[0])
        checkpoint.load_safetensors(f"{tmp_path}/weights", other[0])

        state = dict(zip(("model", "optim"), torch_state.get_state_dict(*one), strict=True))
        dcp.save(state, checkpoint_id=f"{tmp_path}/dcp")
        other = trained(device, front_end, offload=offload, seed=6)
        loaded = dict(zip(("model", "optim"), torch_state.get_state_dict(*other), strict=True))
        dcp.load(loaded, checkpoint_id=f"{tmp_path}/dcp")
        load_by_torch(other, **loaded)
        assert_same_steps(device, one, other)
        saved: Any = dcp.async_save({"model": state["model"]}, checkpoint_id=f"{tmp_path}/async")
        saved.result()


@both_front_ends
@with_nccl
@on_nccl(2)
def test_copies_of_checkpoints_are_pinned_and_waited_for_once(
    front_end: str, tmp_path: Path
) -> None:
    one = trained(own_device(), front_end)
    checkpoint.save(tmp_path, *one, step=0)  # the first one gathers the numbers of ranks
    counts = []
    for call in (
        lambda: checkpoint.async_save(tmp_path, *one, step=1).wait(),
        lambda: checkpoint.load(tmp_path, *one),
        lambda: checkpoint.save(tmp_path, *one, step=2),
    ):
        fakecuda.reset_counts()
        call()
        counts.append(fakecuda.counts())
    assert not [name for each in counts for name in each if "pageable" in name]
    assert [fakecuda.host_waits(each) for each in counts[:2]] == [1, 1]


@on_the_device
def test_steps_of_all_parameters_come_to_the_host_in_one_copy(device: torch.device) -> None:
    model, optimizer = trained(device)
    for state in optimizer.state.values():
        state["step"] = state["step"].to(device)
    groups = named_groups(units_of(model))
    if hasattr(torch, emulated.NAME):  # it records its work
        with emulated.watching() as recording:
            take_snapshot(model, optimizer, None, groups)
        assert len([each for each in recording.happenings if isinstance(each, StreamSync)]) == 1


# -- training of other kinds


def prefetch(model: Any) -> None:
    for one, following in zip(model.blocks, [*model.blocks][1:], strict=False):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])


def unshard(model: Any) -> None:
    model.blocks[0].register_forward_pre_hook(
        lambda module, x: [block.unshard(async_op=True) for block in model.blocks] and None
    )


@both_front_ends
@with_nccl
@on_nccl(2)
def test_prefetching(front_end: str) -> None:
    device = own_device()
    options: list[dict[str, Any]] = [{"forward_prefetch": True}, {"limit_all_gathers": False}]
    options += [{"backward_prefetch": each} for each in (None, BackwardPrefetch.BACKWARD_POST)]
    prepares: list[Callable[[Any], object]] = [lambda model: None]
    if front_end != ORIGINAL:
        options, prepares = [{}], [*prepares, prefetch, unshard]
    losses = []
    for option in options:
        for prepare in prepares:
            model, optimizer = made(device, front_end, **option)
            prepare(model)
            with in_order():
                losses.append([step(model, optimizer, batch(device, n)) for n in range(3)])
    assert all(each == losses[0] for each in losses)


@with_nccl
@on_nccl(4)
def test_tensor_parallel_parameters_train_as_with_torch() -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    x = torch.full((4, DIM), 1.0 + mesh.get_local_rank("dp"), device=own_device())
    losses: list[list[float]] = []
    for library in (fsdp_compat, torch_fsdp):
        model: Any = seeded(Stack).to(own_device())
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
            library.fully_shard(block, mesh=mesh["dp"])
        library.fully_shard(model, mesh=mesh["dp"])
        optimizer = adamw(model)
        with in_order():
            losses.append([step(model, optimizer, x) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# -- mistakes


@with_nccl
@on_nccl(2)
def test_modules_on_other_devices_are_refused() -> None:
    device, other = own_device(), torch.device("cuda", 7)
    elsewhere = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(other)
    with pytest.raises(UsageError, match=r"'0\.weight' on 'cuda:7'"):
        FSDP(elsewhere, device_id=device)
    elsewhere[0].to(device)
    FSDP(elsewhere, device_id=device, ignored_modules=[elsewhere[1]])
    for move in (
        lambda model: model.to(device),
        lambda model: model.load_state_dict(
            {name: value.to(device) for name, value in model.state_dict().items()}, assign=True
        ),
    ):
        model, _ = made(device, FULLY_SHARD, offload=True)
        move(model)
        with pytest.raises(StateError, match="parameters on 'cpu', with CPUOffloadPolicy"):
            model(batch(device, 0))
        model.to("cpu")
        model(batch(device, 0)).sum().backward()
