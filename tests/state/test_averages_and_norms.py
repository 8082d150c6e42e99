"""Averages of the parameters, and norms of gradients, beside those of the unsharded model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import (
    ShardingStrategy,
    StateError,
    UsageError,
    checkpoint,
    fully_shard,
)
from fsdp_compat.optim import EMA, grad_norms
from tests.support.live_bytes import LiveBytes
from tests.support.models import Layers as Net
from tests.support.odd_model import LAYOUTS
from tests.support.ranks import on_ranks

DECAY = 0.9


def batch(step: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, update: Callable[[], None], dtype: torch.dtype = torch.float32) -> None:
    trainable = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    for step in range(4):
        model(batch(step).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in checkpoint.iter_full_state_dict(model)}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(3)
def test_averages_are_those_of_the_unsharded_model(layout: str, tmp_path: Path) -> None:
    plain = Net()
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(plain)  # copies
    train(plain, lambda: averaged.update_parameters(plain))
    expected = {name: value.detach() for name, value in averaged.module.state_dict().items()}
    model = LAYOUTS[layout](Net())
    ema = EMA(model, DECAY)
    train(model, ema.update)

    with ema.swap():
        assert_near(whole(model), expected)
        torch.testing.assert_close(model(batch(9)), averaged(batch(9)), rtol=1e-6, atol=1e-6)
        checkpoint.save(tmp_path, model, step=1)
    assert_near(whole(model), plain.state_dict())

    other = LAYOUTS["rows" if layout == "flat" else "flat"](Net())
    its = EMA(other, DECAY)
    with its.swap():
        checkpoint.load(checkpoint.latest(tmp_path), other)
    assert_near(whole(other), Net().state_dict())
    with its.swap():
        assert_near(whole(other), expected)


@on_ranks(2)
def test_updates_in_backward_and_wrong_decays_are_refused() -> None:
    model = LAYOUTS["flat"](Net())
    ema = EMA(model)
    with pytest.raises(UsageError, match="decay is out of range"):
        EMA(model, 1.5)
    loss = model(batch(0)).sum()
    loss.register_hook(lambda _: ema.update())
    with pytest.raises(StateError, match="update"):
        loss.backward()


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize(
    ("dtype", "of_averages"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, None)],
    ids=str,
)
@on_ranks(2)
def test_parameters_and_averages_come_back_exactly_from_a_swap(
    dtype: torch.dtype, of_averages: torch.dtype | None, layout: str
) -> None:
    model = LAYOUTS[layout](Net().to(dtype))
    trainable = [each for each in model.parameters() if each.requires_grad]
    swapped, left_alone = (EMA(model, DECAY, dtype=of_averages) for _ in "ab")

    def update() -> None:
        before = whole(model)
        for ema in (swapped, left_alone):
            ema.update()
        with swapped.swap():
            for parameter in trainable:
                parameter.requires_grad_(False)
            for call in (swapped.update, swapped.swap().__enter__):
                with pytest.raises(StateError, match="inside EMA"):
                    call()
        for parameter in trainable:
            parameter.requires_grad_(True)
        with pytest.raises(ZeroDivisionError), swapped.swap():
            model(batch(0).to(dtype)).sum().backward()
            raise ZeroDivisionError
        model.zero_grad()
        assert_exact(whole(model), before)

    train(model, update, dtype)
    shown, rests = list[dict[str, Tensor]](), list[dict[str, Tensor]]()
    for ema in (swapped, left_alone):
        with ema.swap(), torch.no_grad():
            trainable[0].add_(1)
            shown.append(whole(model))
            values = [parameter.detach().clone() for parameter in trainable]
        with torch.no_grad():
            for parameter, value in zip(trainable, values, strict=True):
                parameter.copy_(-value)
        ema.decay = 0.5
        ema.update()
        with ema.swap():  # half of what the model's dtype cannot show of the averages
            rests.append(whole(model))
    assert_exact(*shown)
    assert_exact(*rests)
    assert rests[0]["layers.0.up.weight"].any() == (dtype is torch.bfloat16)


def assert_exact(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@on_ranks(1)
def test_an_update_casts_one_shard_at_a_time() -> None:
    net = nn.ModuleList(nn.Linear(64, 64) for _ in range(8)).bfloat16()
    model = FSDP(net, auto_wrap_policy={"Linear"})
    ema = EMA(model, dtype=torch.float32)
    with LiveBytes() as live:
        before = live.now()
        ema.update()
    one = 4 * (64 * 64 + 64)
    assert one <= live.peak().nbytes - before < 2.5 * one


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(3)
def test_norms_are_those_of_the_unsharded_model(layout: str) -> None:
    plain, model = Net(), LAYOUTS[layout](Net())
    for net in (plain, model):
        net(batch(0)).square().mean().backward()
    for norm_type in (2.0, 1.0, float("inf")):
        expected = {
            name: torch.zeros(()) if each.grad is None else each.grad.norm(norm_type)
            for name, each in plain.named_parameters(remove_duplicate=False)
            if each.requires_grad
        }
        assert_near(grad_norms(model, norm_type), expected)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("original", (2, 1, 2)),
        ("original, unmanaged", (1, 2, 2)),
        ("rows", (1, 2, 2)),
        ("rows, unmanaged", (2, 1, 2)),
    ],
)
@on_ranks(4)
def test_norms_are_those_of_whole_gradients_with_tensor_parallelism(
    layout: str, shape: tuple[int, ...]
) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 6), nn.Linear(6, 6))

    plain, model = net(), net()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    dp = mesh["replicas", "shards"]
    ignored = {*model[0].parameters()} if "unmanaged" in layout else set()
    if layout.startswith("rows"):
        fully_shard(model, mesh=dp, ignored_params=ignored)
    else:
        hybrid = {"device_mesh": dp, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        model = FSDP(model, use_orig_params=True, ignored_states=ignored, **hybrid)
    for each in (plain, model):
        each(batch(0)).square().mean().backward()
    for norm_type in (2.0, 1.0, math.inf):
        expected = {name: p.grad.norm(norm_type) for name, p in plain.named_parameters()}
        assert_near(grad_norms(model, norm_type), expected)
    if isinstance(model, FSDP):
        total = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(model.clip_grad_norm_(0.1), total)


@on_ranks(2)
def test_gradients_that_are_not_reduced_have_no_norms_yet() -> None:
    model = LAYOUTS["flat"](Net())
    with model.no_sync():
        model(batch(0)).sum().backward()
    with pytest.raises(StateError, match="not reduced yet"):
        grad_norms(model)
    model(batch(0)).sum().backward()
    assert grad_norms(model)["head.bias"] > 0
    with pytest.raises(UsageError, match="norm_type"):
        grad_norms(model, -1.0)
