"""Optimizers that differ between ranks: their order changes nothing; other parameters are one error
on all ranks."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state_dict
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig as TorchFullOptimConfig
from torch.distributed.fsdp import FullStateDictConfig as TorchFullConfig
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy

from fsdp_compat import FullOptimStateDictConfig, StateDictType, checkpoint
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.errors import UsageError
from tests.state.test_optim import (
    FEW_CONFIGS,
    OPTIMIZERS,
    Block,
    Config,
    assert_four_facts,
    assert_state,
    by_name,
    full_state,
    make_model,
    shard,
    split_decay,
    train,
)
from tests.support.ranks import run_ranks

AdamW = OPTIMIZERS["AdamW"]


def shuffled(model: nn.Module, groups: bool) -> Any:
    """Parameters, in groups or not, in an order that every rank has for itself."""
    found = split_decay(model) if groups else [{"params": list(model.parameters())}]
    for group in found:
        params = group["params"]
        start = dist.get_rank() % len(params)
        group["params"] = params[start:] + params[:start] if dist.get_rank() != 1 else params[::-1]
    return found[:: -1 if groups and dist.get_rank() == 1 else 1]


def from_rank_0(model: nn.Module, optimizer: torch.optim.Optimizer, state: Any) -> None:
    config = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        loadable = FSDP.optim_state_dict_to_load(
            model, optimizer, state if dist.get_rank() == 0 else None
        )
    optimizer.load_state_dict(loadable)


def _orders(directory: str) -> None:
    for config, groups in (
        (FEW_CONFIGS[0], False),
        (FEW_CONFIGS[1], True),
    ):
        plain, model = make_model(), shard(make_model(), config)
        reference, optimizer = (
            AdamW(split_decay(plain) if groups else plain.parameters()),
            AdamW(shuffled(model, groups)),
        )
        train(plain, reference, range(2))
        train(model, optimizer, range(2))
        expected = by_name(plain, reference)["state"]
        full = full_state(model, optimizer)
        assert_state(full["state"], expected, tolerance=1e-4)
        alone = full_state(model, optimizer, rank0_only=True)
        assert_state(alone.get("state", {}), full["state"] if dist.get_rank() == 0 else {})
        options = dcp_state_dict.StateDictOptions(full_state_dict=True)
        assert_state(
            dcp_state_dict.get_optimizer_state_dict(model, optimizer, options=options)["state"],
            full["state"],
        )
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            sharded = FSDP.optim_state_dict(model, optimizer)
        other_way = shard(make_model(), ("FULL_SHARD", config[1], "none"))
        path = checkpoint.save(directory, model, optimizer, step=FEW_CONFIGS.index(config))
        loads: tuple[Callable[[nn.Module, Any], object], ...] = (
            functools.partial(from_rank_0, state=full),
            lambda m, o, state=full: o.load_state_dict(FSDP.optim_state_dict_to_load(m, o, state)),
            lambda m, o, state=sharded: o.load_state_dict(
                FSDP.optim_state_dict_to_load(m, o, state)
            ),
            lambda m, o, path=path: checkpoint.load(path, m, o),
            lambda m, o, state=full: dcp_state_dict.set_optimizer_state_dict(
                m,
                o,
                copy.deepcopy(state) if dist.get_rank() == 0 else {},
                options=dcp_state_dict.StateDictOptions(
                    full_state_dict=True, broadcast_from_rank0=True
                ),
            ),
        )
        for target, load in itertools.product((model, other_way), loads):
            other = AdamW(shuffled(target, groups))
            load(target, other)
            assert_state(full_state(target, other)["state"], full["state"])
            settings = {group["lr"]: group["weight_decay"] for group in other.param_groups}
            assert settings == ({0.02: 0.3, 0.005: 0.0} if groups else {0.02: 0.1})


def test_ranks_may_order_their_optimizers_parameters_differently(tmp_path: Any) -> None:
    run_ranks(3, _orders, str(tmp_path), timeout=120)


def _orders_as_torch(use_orig_params: bool) -> None:
    options: dict[str, Any] = {"use_orig_params": use_orig_params}
    theirs = TorchFSDP(
        make_model(0, odd=False),
        auto_wrap_policy=TorchWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        **options,
    )
    ours = shard(make_model(0, odd=False), ("FULL_SHARD", use_orig_params, "blocks"))
    their_optimizer, optimizer = AdamW(shuffled(theirs, False)), AdamW(shuffled(ours, False))
    train(theirs, their_optimizer, range(2))
    train(ours, optimizer, range(2))
    full = (
        TorchFullConfig(offload_to_cpu=False),
        TorchFullOptimConfig(offload_to_cpu=False, rank0_only=False),
    )
    with TorchFSDP.state_dict_type(theirs, TorchType.FULL_STATE_DICT, *full):
        expected = TorchFSDP.optim_state_dict(theirs, their_optimizer)
    assert_state(full_state(ours, optimizer)["state"], expected["state"], tolerance=1e-5)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_different_orders_give_the_same_dict_as_in_torch(use_orig_params: bool) -> None:
    run_ranks(2, _orders_as_torch, use_orig_params)


# --- other parameters -----------------------------------------------------------------------------


def assert_refused(call: Callable[[], Any], *texts: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert_four_facts(caught.value)
    assert all(text in str(caught.value) for text in texts), str(caught.value)
    dist.barrier()  # which every rank comes to


def ways(model: nn.Module, optimizer: Any, full: Any, path: Any) -> dict[str, Callable[[], Any]]:
    """All ways to take and to give the state of an optimizer."""

    def sharded() -> None:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            FSDP.optim_state_dict(model, optimizer)

    options = dcp_state_dict.StateDictOptions(full_state_dict=True)
    return {
        "full": lambda: full_state(model, optimizer),
        "rank 0": lambda: full_state(model, optimizer, rank0_only=True),
        "get": lambda: dcp_state_dict.get_optimizer_state_dict(model, optimizer, options=options),
        "sharded": sharded,
        "load": lambda: FSDP.optim_state_dict_to_load(model, optimizer, full),
        "from rank 0": lambda: from_rank_0(model, optimizer, full),
        "save": lambda: checkpoint.save(path.parent, model, optimizer, step=7),
        "async save": lambda: checkpoint.async_save(path.parent, model, optimizer, step=8),
        "restore": lambda: checkpoint.load(path, model, optimizer),
    }


def _lacking(config: Config, directory: str) -> None:
    model = shard(make_model(), config)
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(2))
    full = full_state(model, optimizer)
    path = checkpoint.save(directory, model, optimizer, step=1)
    alike = ways(model, optimizer, full, path)
    for lacks in (0, 1):
        everything = list(model.parameters())
        missing = (
            {id(p) for p in model.module.blocks[1].parameters()}
            if dist.get_rank() == lacks
            else set()
        )
        short = AdamW([p for p in everything if id(p) not in missing])
        short.state.update({p: optimizer.state[p] for p in everything if id(p) not in missing})
        for name, call in ways(model, short, full, path).items():
            assert_refused(call, "blocks.1.", f"rank(s) [{lacks}]")
            if not name.endswith("save"):
                alike[name]()  # nothing is left behind
    assert_state(full_state(model, optimizer)["state"], full["state"])


@pytest.mark.parametrize("config", [FEW_CONFIGS[0], ("FULL_SHARD", True, "blocks")])
def test_an_optimizer_that_lacks_a_unit_on_one_rank_raises_the_same_error_on_all(
    config: Config, tmp_path: Any
) -> None:
    run_ranks(2, _lacking, config, str(tmp_path), timeout=120)


def _foreign(directory: str) -> None:
    model = shard(make_model(), FEW_CONFIGS[0])
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(1))
    full = full_state(model, optimizer)
    path = checkpoint.save(directory, model, optimizer, step=1)
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    for call in ways(model, optimizer, full, path).values():
        assert_refused(call)


def test_a_foreign_parameter_on_one_rank_is_an_error_on_all(tmp_path: Any) -> None:
    run_ranks(2, _foreign, str(tmp_path))


def _sizes_and_states() -> None:
    model = FSDP(nn.Linear(3, 4 + 4 * dist.get_rank()))
    optimizer = OPTIMIZERS["Adagrad"](model.parameters())  # which has state at once
    assert_refused(
        lambda: full_state(model, optimizer), "8 elements on rank 0", "16 elements on rank 1"
    )
    assert_refused(
        lambda: FSDP.optim_state_dict_to_load(model, optimizer, {"state": {}}),
        "8 elements on rank 0",
    )
    for use_orig_params in (False, True):
        model = shard(make_model(), ("FULL_SHARD", use_orig_params, "blocks"))
        optimizer = AdamW(model.parameters())
        train(model, optimizer, range(1))
        if dist.get_rank() == 1:
            optimizer.state.clear()  # as after loading on one rank alone
        for form in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            with FSDP.state_dict_type(model, form):
                assert_refused(
                    lambda m=model, o=optimizer: FSDP.optim_state_dict(m, o),
                    "the state",
                    "on rank 0, not on 1",
                )


def test_other_sizes_and_states_that_a_rank_lacks_are_errors_on_all() -> None:
    run_ranks(2, _sizes_and_states)


def _own_parts_only(directory: str) -> None:
    """Every rank's optimizer has the parameters that the rank has a part of."""
    plain, model = make_model(), shard(make_model(), ("FULL_SHARD", True, "always"))
    reference, optimizer = (
        AdamW(plain.parameters()),
        AdamW(p for p in model.parameters() if p.numel()),
    )
    train(plain, reference, range(2))
    train(model, optimizer, range(2))
    assert len(optimizer.state) < len(list(model.parameters()))
    expected = {
        name: entry
        for name, entry in by_name(plain, reference)["state"].items()
        if name != "nothing"
    }
    full = full_state(model, optimizer)
    assert_state(full["state"], expected, tolerance=1e-4)
    path = checkpoint.save(directory, model, optimizer, step=1)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = FSDP.optim_state_dict(model, optimizer)
    assert sharded["state"].keys() == expected.keys(), "on every rank, as with torch"
    for load in (
        functools.partial(from_rank_0, state=full),
        lambda m, o: o.load_state_dict(FSDP.optim_state_dict_to_load(m, o, sharded)),
        lambda m, o: checkpoint.load(path, m, o),
    ):
        other = AdamW(p for p in model.parameters() if p.numel())
        load(model, other)
        assert_state(full_state(model, other)["state"], full["state"])


def test_an_optimizer_may_lack_parameters_its_rank_has_no_part_of(tmp_path: Any) -> None:
    run_ranks(3, _own_parts_only, str(tmp_path))


class InBlocks(torch.optim.SGD):
    """Keeps 8 bits for large parts and 32 for small ones, as optimizers of 8-bit states do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            large = p.numel() > 16
            self.state[p]["seen"] = (
                torch.full_like(p, 7, dtype=torch.uint8) if large else torch.full_like(p, 0.5)
            )


class Keeping(InBlocks):
    """Takes its state as it is: torch's own way casts it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state.update(
            {parameters[number]: dict(entry) for number, entry in state_dict["state"].items()}
        )


def _dtypes() -> None:
    model = shard(make_model(), ("FULL_SHARD", True, "none"))
    optimizer = Keeping(model.parameters())
    train(model, optimizer, range(1))
    other = Keeping(model.parameters())
    other.load_state_dict(FSDP.optim_state_dict_to_load(model, other, full_state(model, optimizer)))
    for p in (p for p in model.parameters() if p.numel()):
        assert other.state[p]["seen"].dtype == optimizer.state[p]["seen"].dtype
        assert torch.equal(other.state[p]["seen"], optimizer.state[p]["seen"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_whose_dtypes_differ_are_not_mixed(world_size: int) -> None:
    run_ranks(world_size, _dtypes)
