"""Uses of private names in public programs that run unmodified after ``install()``: for each name
a few lines that use it as they do."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import _common_utils as torch_utils

import fsdp_compat
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import DIM, Block, Stack
from tests.support.odd_model import assert_holds, assert_identical
from tests.support.parity import assert_close, both_forms
from tests.support.ranks import on_ranks

BLOCKS = ModuleWrapPolicy({Block})


def installed(pattern: Callable[..., Any]) -> Callable[..., Any]:
    """Run a pattern on every rank after ``install()``."""

    @functools.wraps(pattern)
    def run(**arguments: Any) -> Any:
        gc.collect()  # models of torch's that earlier tests have left
        fsdp_compat.install()
        try:
            return pattern(**arguments)
        finally:
            fsdp_compat.uninstall()

    return run


def part_of_torch(name: str) -> Any:
    return importlib.import_module(f"torch.distributed.fsdp.{name}")


def make(seed: int, use_orig_params: bool, **options: Any) -> FSDP:
    torch.manual_seed(seed)
    return FSDP(Stack(2), auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params, **options)


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()


# -- audiocraft


@both_forms
@on_ranks(2)
@installed
def test_audiocraft_replaces_a_hook_and_reshards_what_stayed_unsharded(
    use_orig_params: bool,
) -> None:
    utils = part_of_torch("_runtime_utils")
    old_hook = utils._post_backward_hook

    def post_backward_hook(state: Any, handle: Any, *args: Any) -> None:
        old_hook(state, handle, *args)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        utils._post_backward_hook = post_backward_hook
    assert [str(each.message).startswith(f"{utils.__name__}._post_b") for each in seen] == [True]
    utils._post_backward_hook = old_hook
    with pytest.raises(fsdp_compat.StateError, match="register_comm_hook"):
        old_hook(None, None)

    model = make(0, use_orig_params, sharding_strategy=fsdp_compat.ShardingStrategy.SHARD_GRAD_OP)
    assert model._state_dict_type is StateDictType.FULL_STATE_DICT
    FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    assert model._state_dict_type is StateDictType.LOCAL_STATE_DICT
    model(inputs())  # units stay unsharded: no backward follows
    sizes = []
    for unit in FSDP.fsdp_modules(model):
        assert not hasattr(unit, "_handles")
        unsharded = unit._handle._get_padded_unsharded_flat_param()
        sizes.append(unsharded._typed_storage()._size())
        utils._reshard(unit, unit._handle, True)
        assert not unit._handle._get_padded_unsharded_flat_param().numel()
    assert any(sizes)


# -- OLMo


@both_forms
@on_ranks(2)
@installed
def test_olmo_restores_whole_tensors_into_flat_parameters(use_orig_params: bool) -> None:
    """Fill all shards with NaN, copy this rank's parts of whole tensors, and look for NaN. Without
    padding between parameters nothing is left."""

    def model(seed: int) -> FSDP:
        torch.manual_seed(seed)
        dim = 400 if use_orig_params else 16  # the first is large enough for whole pages
        inner = nn.Sequential(nn.Linear(dim, dim), Block(dim))
        return FSDP(inner, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params)

    saved, restored = whole(model(0)), model(1)
    with torch.no_grad():
        for module in FSDP.fsdp_modules(restored):
            for param in module.params:
                param.fill_(torch.nan)
        for name, module in restored.named_modules():
            if not isinstance(module, FSDP):
                continue
            for param in module.params:
                assert param._is_flat_param
                infos = param._shard_param_infos
                for fqn, info, shape in zip(param._fqns, infos, param._shapes, strict=True):
                    key = f"{name}.{fqn}".replace("_fsdp_wrapped_module.", "").lstrip(".")
                    assert saved[key].shape == shape
                    if info.in_shard:
                        start, end = info.offset_in_shard, info.intra_param_end_idx + 1
                        param[start : start + info.numel_in_shard].copy_(
                            saved[key].flatten()[info.intra_param_start_idx : end]
                        )
                    else:
                        assert info.offset_in_shard is None
                assert not torch.isnan(param).any()
    assert_identical(whole(restored), saved)


# -- Wan2.1


@both_forms
@on_ranks(2)
@installed
def test_wan_frees_the_storage_of_large_shards(use_orig_params: bool) -> None:
    from torch.distributed.utils import _free_storage

    torch.manual_seed(0)
    model = FSDP(  # shards of 512 KiB lie in memory that peers map
        nn.Linear(512, 1024), use_orig_params=use_orig_params
    )
    with torch.no_grad():
        model(torch.randn(2, 512))
    for module in model.modules():
        if isinstance(module, FSDP):
            _free_storage(module._handle.flat_param.data)
            module._handle.flat_param.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="resize"):
        model._handle.flat_param.data.untyped_storage().resize_(1 << 24)


# -- litgpt, verl, TransformerEngine


@both_forms
@on_ranks(2)
@installed
def test_clients_look_at_handles_and_states_and_show_whole_parameters(
    use_orig_params: bool,
) -> None:
    model, utils = make(0, use_orig_params), part_of_torch("_unshard_param_utils")
    for handle in model._all_handles:
        with pytest.raises(AttributeError, match="flat_param_to"):
            handle._use_sharded_views()
    expected, shards = whole(model), [handle.flat_param.shape for handle in model._all_handles]
    state = utils._get_module_fsdp_state(model)
    assert state is model and utils._get_module_fsdp_state(nn.Linear(1, 1)) is None
    options = dict.fromkeys(("writeback", "rank0_only", "offload_to_cpu", "with_grads"), False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(utils._unshard_params_for_summon(module=model, state=state, **options))
        assert model.module.stem.weight.shape == (DIM, DIM)
        stack.enter_context(FSDP.summon_full_params(model, **options))
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert_identical(found, expected)
    assert [handle.flat_param.shape for handle in model._all_handles] == shards

    states, modules = part_of_torch("_traversal_utils")._get_fsdp_states_with_modules(model)
    assert len(states) == 3 and states == modules
    for state, module in zip(states, modules, strict=True):
        module.module.fsdp_group = state.process_group
    assert all(block.module.fsdp_group is model.process_group for block in model.module.blocks)


# -- composer


@both_forms
@on_ranks(2)
@installed
def test_composer_replaces_methods_of_handles_and_finishes_a_failed_backward(
    use_orig_params: bool,
) -> None:
    handles, utils = part_of_torch("_flat_param"), part_of_torch("_runtime_utils")
    original = handles.FlatParamHandle.reshard
    handles.FlatParamHandle.reshard = lambda self: pytest.fail("nobody calls it")
    try:
        model = make(0, use_orig_params)
        plain = copy.deepcopy(Stack(2))
        plain.load_state_dict(whole(model))
        model(inputs()).sum().backward()
    finally:
        handles.FlatParamHandle.reshard = original
    utils._post_backward_final_callback(model, model)
    assert_close(model(inputs()), plain(inputs()), "the next forward")


# -- open_flamingo


@both_forms
@on_ranks(4)
@installed
def test_open_flamingo_wraps_twice_over_groups_of_nodes(use_orig_params: bool) -> None:
    groups = part_of_torch("_init_utils")._init_intra_and_inter_node_groups(_get_default_group(), 2)
    node = dist.get_rank() // 2
    assert [dist.get_process_group_ranks(group) for group in groups] == [
        [2 * node, 2 * node + 1],
        [dist.get_rank() % 2, dist.get_rank() % 2 + 2],
    ]
    torch.manual_seed(0)
    plain = Stack(2)
    inner = copy.deepcopy(plain)
    wrapping = part_of_torch("wrap")
    with wrapping.enable_wrap(
        wrapper_cls=FSDP,
        process_group=groups,
        sharding_strategy=fsdp_compat.ShardingStrategy.HYBRID_SHARD,
        use_orig_params=use_orig_params,
    ):
        inner.blocks = nn.ModuleList(wrapping.wrap(wrapping.wrap(each)) for each in inner.blocks)
        model = wrapping.wrap(wrapping.wrap(inner))
    model(inputs(dist.get_rank())).sum().backward()
    for rank in range(4):
        (plain(inputs(rank)).sum() / 4).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and expected.grad is not None
            assert_close(p.grad, expected.grad, name)
    assert_holds(model, plain)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.block, self.module = nn.Linear(4, 4), nn.Linear(4, 4)


@both_forms
@on_ranks(2)
def test_names_of_parameters_are_those_of_torch(use_orig_params: bool) -> None:
    def wrapped(wrap: Any, **options: Any) -> nn.Module:
        model = Tied()
        model.block = wrap(model.block, use_orig_params=use_orig_params, **options)
        return wrap(model, use_orig_params=use_orig_params, **options)

    def names_in(utils: Any, model: nn.Module, dedup: bool) -> list[Any]:
        found = utils._get_param_to_fqns(model, dedup)
        assert [id(p) for p in found] == [id(p) for p in model.parameters()]
        assert {type(names) for names in found.values()} == {list}
        return [*found.values()]

    def all_names(utils: Any, wrap: Any, **options: Any) -> list[Any]:
        models = (wrapped(wrap, **options), Tied())
        return [names_in(utils, model, dedup) for model in models for dedup in (True, False)]

    theirs = all_names(torch_utils, TorchFSDP, device_id=torch.device("cpu"))
    assert installed(lambda: all_names(part_of_torch("_common_utils"), FSDP))() == theirs


# -- names that have no meaning


@on_ranks(1)
@installed
def test_a_name_without_a_meaning_says_what_to_use() -> None:
    text = "summon_full_params"
    with pytest.raises(AttributeError, match=text):
        _ = part_of_torch("_unshard_param_utils")._unflatten_as_params
    with pytest.raises(ImportError, match=text):
        from torch.distributed.fsdp._unshard_param_utils import (  # noqa: F401
            _unflatten_as_params,
        )
    with pytest.raises(ImportError, match="To do: use public names of torch"):
        from torch.distributed.fsdp import missing  # noqa: F401
    assert not hasattr(part_of_torch("_optim_utils"), "_optim_state_dict")
    assert importlib.util.find_spec("torch.distributed.fsdp._shard_utils") is not None
    with pytest.raises(AttributeError, match=text):
        make(0, False)._handle._use_unsharded_views(as_params=True)
