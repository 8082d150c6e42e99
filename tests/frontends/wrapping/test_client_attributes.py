"""Attributes of torch's class that programs and client libraries read or set, with the same
values."""

from __future__ import annotations

import copy
import gc
import importlib
from functools import partial

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp_compat
from fsdp_compat import FlatParameter, MixedPrecision, StateError
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import DIM, Block, Stack
from tests.support.pairwise import each_value
from tests.support.parity import Pair, both_forms, make_pair, one_backward, plain_name, seeded
from tests.support.ranks import on_ranks


@pytest.mark.parametrize(
    ("prefetch", "flag"), [(None, True), ("BACKWARD_PRE", False), ("BACKWARD_POST", True)]
)
@on_ranks(2)
def test_attributes_equal_those_of_torch(prefetch: str | None, flag: bool) -> None:
    """Enum members are compared by name, because each package has its own enums."""
    ours, theirs = models = [
        library.FullyShardedDataParallel(
            Block(),
            backward_prefetch=prefetch and library.BackwardPrefetch[prefetch],
            device_id=torch.device("cpu"),
            forward_prefetch=flag,
            limit_all_gathers=not flag,
            use_orig_params=flag,
        )
        for library in (fsdp_compat, torch_fsdp)
    ]
    names = "forward_prefetch limit_all_gathers rank world_size compute_device process_group"
    for name in names.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("backward_prefetch", "training_state", "sharding_strategy"):
        got, expected = (getattr(getattr(model, name), "name", None) for model in models)
        assert got == expected, name
    assert [p.dim() for p in ours.params] == [p.dim() for p in theirs.params] == [1]
    for model in models:
        assert all(m._is_fsdp_managed_module for m in model.module.modules())
        assert all(p._fsdp_flattened for p in model.parameters())
        assert model._flat_param is model._handle.flat_param
        assert [plain_name(name) for name in model._flat_param._fqns] == [
            name for name, _ in Block().named_parameters()
        ]
        assert model._handle._offload_params is False


@both_forms
@on_ranks(2)
def test_attributes_set_by_clients_have_no_effect(use_orig_params: bool) -> None:
    """Set and call what litgpt and verl use to make torch initialize again."""
    pair = make_pair(lambda: Stack(2), use_orig_params=use_orig_params)
    pair.step(one_backward)
    model = pair.model
    model._is_root = None
    assert model._is_root
    fsdp_compat.install()
    try:
        names = importlib.import_module("torch.distributed.fsdp._runtime_utils")
        assert names._lazy_init(model, model) is model
        assert names._root_pre_forward(model, model, (1,), {"a": 2}) == ((1,), {"a": 2})
        pair.step(one_backward)
    finally:
        fsdp_compat.uninstall()


@both_forms
@on_ranks(2)
def test_handles_lead_to_the_shards(use_orig_params: bool) -> None:
    """Offload and reload, with verl's own assertions."""
    pair = make_pair(lambda: Stack(2), use_orig_params=use_orig_params)
    pair.step(one_backward)
    handles = pair.model._all_handles
    assert len(handles) == 3
    assert list(map(id, handles)) == list(map(id, pair.model._all_handles))
    for _ in range(2):
        with torch.no_grad():
            for p in (*pair.plain.parameters(), *(handle.flat_param for handle in handles)):
                p.mul_(2)
        pair.assert_state_equal()
        for handle in handles:
            flat = handle.flat_param
            assert flat is handle.flat_param and flat.requires_grad
            first, second = flat.data, flat._local_shard
            assert first is not second
            assert (first.data_ptr(), first.size()) == (second.data_ptr(), second.size())
            handle.flat_param_to(torch.device("cpu"), non_blocking=True)
            flat._local_shard = flat.data
    pair.model._handle.reshard(True)
    pair.step(one_backward)
    loss = pair.model(torch.randn(2, DIM)).sum()
    handle = pair.model._handle
    assert handle._get_padded_unsharded_flat_param().numel(), "the root is kept for backward"
    handle.reshard(True)
    assert not handle._get_padded_unsharded_flat_param().numel()
    loss.backward()


@both_forms
@on_ranks(2)
def test_a_handle_does_not_keep_its_model(use_orig_params: bool) -> None:
    model = FSDP(Block(), use_orig_params=use_orig_params)
    handle = model._handle
    del model
    gc.collect()
    with pytest.raises(StateError, match="garbage-collected"):
        _ = handle.flat_param


@torch.no_grad()
def upcast(model: nn.Module, factor: float) -> None:
    """Upcast as accelerate does with trainable parameters that were loaded in 16 bits, and set
    values that these cannot hold."""
    for module in FSDP.fsdp_modules(model):
        flat = module._flat_param
        assert module._has_params and flat.dtype != torch.float32 and flat.requires_grad
        flat.data = flat.data.to(torch.float32) * factor
        module._handle._orig_param_dtype = torch.float32
        assert module._flat_param is flat and isinstance(flat, FlatParameter)


@each_value
@both_forms
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_upcast_as_done_by_accelerate_keeps_values(ranks: int, use_orig_params: bool) -> None:
    factor = 1 + 2**-12
    inner = seeded(partial(Stack, 2)).bfloat16()
    plain, precision = copy.deepcopy(inner).float(), MixedPrecision(param_dtype=torch.float32)
    for module in (inner, plain):
        module.head.weight.requires_grad_(not use_orig_params)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(factor if p.requires_grad else 1.0)
    blocks = ModuleWrapPolicy({Block})
    options = {"use_orig_params": use_orig_params, "mixed_precision": precision}
    model = FSDP(inner, auto_wrap_policy=blocks, **options)
    pair = Pair(plain, model)
    upcast(model, factor)
    pair.assert_state_equal()
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "of a unit, all shards"
    for handle in model._all_handles:
        assert handle._orig_param_dtype == handle.flat_param.dtype == torch.float32
    for _ in range(2):
        pair.step()
    with pytest.raises(ValueError, match="before the first forward"):
        model._handle._orig_param_dtype = torch.bfloat16
