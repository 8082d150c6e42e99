"""Optimizers that differ between ranks: their order changes nothing; other parameters are one error
on all ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import checkpoint
from fsdp_compat.errors import UsageError
from tests.support.odd_model import Config, assert_same, make_model, shard, state_by_name, train
from tests.support.optimizer_state import (
    FEW_CONFIGS,
    OPTIMIZERS,
    TakesAsItIs,
    from_rank0,
    full_state,
    load,
    loadable,
    params_of,
    refuses,
    sharded,
    sharded_state,
    trained,
)
from tests.support.ranks import on_ranks

AdamW = OPTIMIZERS["AdamW"]


def shuffled(model: nn.Module, groups: bool) -> torch.optim.Optimizer:
    """An optimizer of parameters, in groups or not, in an order that every rank has for itself."""
    found = params_of(model, groups) if groups else [{"params": list(model.parameters())}]
    for group in found:
        params = group["params"]
        start = dist.get_rank() % len(params)
        group["params"] = params[start:] + params[:start] if dist.get_rank() != 1 else params[::-1]
    return AdamW(found[:: -1 if groups and dist.get_rank() == 1 else 1])


FULL = StateDictOptions(full_state_dict=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def loads(full: Any, boxes: Any, path: Any) -> list[Callable[[nn.Module, Any], object]]:
    """All ways to load an optimizer's state."""
    alone = copy.deepcopy(full) if dist.get_rank() == 0 else {}
    return [
        lambda m, o: o.load_state_dict(from_rank0(m, o, full)),
        lambda m, o: load(m, o, full),
        lambda m, o: load(m, o, boxes),
        lambda m, o: checkpoint.load(path, m, o),
        lambda m, o: set_optimizer_state_dict(m, o, alone, options=FROM_RANK0),
    ]


@on_ranks(3)
def test_ranks_may_order_their_optimizers_parameters_differently(tmp_path: Any) -> None:
    for step, config in enumerate(FEW_CONFIGS[:2]):
        groups = config[1]
        plain, reference = trained(make_model(), groups=groups)
        model = shard(make_model(), config)
        optimizer = shuffled(model, groups)
        train(model, optimizer, range(2))
        full = full_state(model, optimizer)
        assert_same(full["state"], state_by_name(plain, reference)["state"], rtol=1e-4, atol=1e-4)
        alone = full_state(model, optimizer, rank0_only=True)
        assert_same(alone.get("state", {}), full["state"] if dist.get_rank() == 0 else {})
        found = get_optimizer_state_dict(model, optimizer, options=FULL)
        assert_same(found["state"], full["state"])
        boxes = sharded_state(model, optimizer)
        other_way = shard(make_model(), ("FULL_SHARD", config[1], "none"))
        path = checkpoint.save(tmp_path, model, optimizer, step=step)
        for target, way in itertools.product((model, other_way), loads(full, boxes, path)):
            other = shuffled(target, groups)
            way(target, other)
            assert_same(full_state(target, other)["state"], full["state"])
            settings = {group["lr"]: group["weight_decay"] for group in other.param_groups}
            assert settings == ({0.02: 0.3, 0.005: 0.0} if groups else {0.02: 0.1})


# --- other parameters -----------------------------------------------------------------------------


def assert_refused(call: Callable[[], Any], *texts: str) -> None:
    with refuses(UsageError) as caught:
        call()
    assert all(text in str(caught.value) for text in texts), str(caught.value)
    dist.barrier()  # which every rank comes to


def ways(
    model: nn.Module, optimizer: Any, full: Any, boxes: Any, path: Any
) -> dict[str, Callable[[], Any]]:
    """All ways to take and to give the state of an optimizer that need all ranks."""
    return {
        "full": lambda: full_state(model, optimizer),
        "rank 0": lambda: full_state(model, optimizer, rank0_only=True),
        "get": lambda: get_optimizer_state_dict(model, optimizer, options=FULL),
        "sharded": lambda: sharded_state(model, optimizer),
        "load": lambda: loadable(model, optimizer, boxes),
        "from rank 0": lambda: from_rank0(model, optimizer, full),
        "save": lambda: checkpoint.save(path.parent, model, optimizer, step=7),
        "async save": lambda: checkpoint.async_save(path.parent, model, optimizer, step=8),
        "restore": lambda: checkpoint.load(path, model, optimizer),
    }


@pytest.mark.parametrize("config", [FEW_CONFIGS[0], ("FULL_SHARD", True, "blocks")])
@on_ranks(2)
def test_a_unit_missing_or_a_parameter_too_many_on_one_rank_is_an_error_on_all(
    config: Config, tmp_path: Any
) -> None:
    model, optimizer = sharded(config)
    full, boxes = full_state(model, optimizer), sharded_state(model, optimizer)
    path = checkpoint.save(tmp_path, model, optimizer, step=1)
    alike = ways(model, optimizer, full, boxes, path)
    for lacks in (0, 1):
        missing = {*model.module.blocks[1].parameters()} if dist.get_rank() == lacks else set()
        present = [p for p in model.parameters() if p not in missing]
        short = AdamW(present)
        short.state.update({p: optimizer.state[p] for p in present})
        for name, call in ways(model, short, full, boxes, path).items():
            assert_refused(call, "blocks.1.", f"rank(s) [{lacks}]")
            if not name.endswith("save"):
                alike[name]()  # nothing is left behind
    assert_same(full_state(model, optimizer)["state"], full["state"])
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    for call in ways(model, optimizer, full, boxes, path).values():
        assert_refused(call)


@on_ranks(2)
def test_other_parameters_sizes_and_states_of_a_rank_are_errors_on_all(tmp_path: Any) -> None:
    container = nn.ModuleDict(
        {"model": shard(make_model(), FEW_CONFIGS[0]), "plain": nn.Linear(2, 2)}
    )
    params = list(container.parameters())
    optimizer = AdamW(params[: len(params) - dist.get_rank()])
    full = full_state(container, optimizer)
    for call in (
        lambda: from_rank0(container, optimizer, full),
        lambda: checkpoint.save(tmp_path, container, optimizer, step=1),
    ):
        assert_refused(call, "outside of units", f"rank(s) [{1 - dist.get_rank()}]")
    other = FSDP(nn.Linear(3, 4 + 4 * dist.get_rank()))
    its = OPTIMIZERS["Adagrad"](other.parameters())  # which has state at once
    for call in (
        lambda: full_state(other, its),
        lambda: from_rank0(other, its, {"state": {}}),
    ):
        assert_refused(call, "8 elements on rank 0", "16 elements on rank 1")
    for config, state_of in itertools.product(FEW_CONFIGS[:2], (full_state, sharded_state)):
        model, optimizer = sharded(config, steps=1)
        if dist.get_rank() == 1:
            optimizer.state.clear()  # as after loading on one rank alone
        assert_refused(
            lambda m=model, o=optimizer, take=state_of: take(m, o), "on rank 0, not on 1"
        )


@pytest.mark.parametrize("lacks", ["parameters", "states"])
@on_ranks(3)
def test_an_optimizer_may_lack_parameters_its_rank_has_no_part_of(
    lacks: str, tmp_path: Any
) -> None:
    plain, reference = trained(make_model())
    model = shard(make_model(), ("FULL_SHARD", True, "always"))
    optimizer = AdamW(p for p in model.parameters() if p.numel() or lacks == "states")
    train(model, optimizer, range(2))
    for p in [p for p in optimizer.state if not p.numel()]:
        del optimizer.state[p]
    assert len(optimizer.state) < len(list(model.parameters()))
    expected = state_by_name(plain, reference)["state"]
    del expected["nothing"]
    full = full_state(model, optimizer)
    assert_same(full["state"], expected, rtol=1e-4, atol=1e-4)
    path = checkpoint.save(tmp_path, model, optimizer, step=1)
    boxes = sharded_state(model, optimizer)
    assert boxes["state"].keys() == expected.keys(), "on every rank, as with torch"
    for way in loads(full, boxes, path)[:4]:
        other = AdamW(p for p in model.parameters() if p.numel())
        way(model, other)
        assert_same(full_state(model, other)["state"], full["state"])


class InBlocks(TakesAsItIs):
    """Keeps 8 bits for large parts and 32 for small ones, as optimizers of 8-bit states do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            value, dtype = (7, torch.uint8) if p.numel() > 16 else (0.5, torch.float32)
            self.state[p]["seen"] = torch.full_like(p, value, dtype=dtype)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_states_whose_dtypes_differ_are_not_mixed(world_size: int) -> None:
    model, optimizer = sharded(("FULL_SHARD", True, "none"), InBlocks, steps=1)
    full = full_state(model, optimizer)
    other = InBlocks(model.parameters())
    load(model, other, full)
    for p in (p for p in optimizer.state if p.numel()):
        assert other.state[p]["seen"].dtype == optimizer.state[p]["seen"].dtype
        assert torch.equal(other.state[p]["seen"], optimizer.state[p]["seen"])
