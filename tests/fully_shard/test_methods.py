"""Every method of FSDPModule, and every function beside fully_shard, does what it says."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.support.fully_sharded import (
    Gathers,
    NotedAllGather,
    NotedReduceScatter,
    api,
    is_sharded,
    pair_of,
    partial_shard,
    shard_all,
    sharded_modules,
)
from tests.support.memory import group_nbytes
from tests.support.models import DIM, NUM_TOKENS, Block, Stack
from tests.support.parity import (
    assert_close,
    assert_same_values,
    no_sync,
    one_backward,
    reshard,
    square,
    tokens,
    whole_gradients,
)
from tests.support.ranks import on_ranks
from tests.support.same_host import NOT_MAPPED, mapped_or_sent

BF16 = torch.bfloat16
ONCE = {"root": 1, "blocks.0": 1, "blocks.1": 1, "blocks.2": 1}  # all-gathers, by module

only_ours = pytest.mark.skipif(api.name == "torch", reason="torch does otherwise")


def _batch() -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))


def _plain() -> Stack:
    torch.manual_seed(0)
    return Stack()


def _sharded(**options: Any) -> Any:
    return shard_all(_plain(), **options)


@torch.no_grad()
def _evaluate(model: nn.Module) -> Tensor:
    return model(_batch())


def _expected_gradients(factor: float) -> dict[str, Tensor | None]:
    """The sum over all ranks' batches, divided by ``factor``."""
    model = _plain()
    for rank in range(dist.get_world_size()):
        x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(rank))
        one_backward(model, x)
    return {name: p.grad / factor for name, p in model.named_parameters() if p.grad is not None}


# -- classes


@on_ranks(2)
def test_modules_are_changed_in_place() -> None:
    model = Stack()
    blocks = [model.blocks[0], model.blocks[1]]
    assert api.fully_shard(blocks) is blocks
    assert api.fully_shard(model) is model
    assert type(model).__name__ == "FSDPStack"
    assert isinstance(model, api.FSDPModule) and isinstance(model, Stack)
    kind = type(blocks[0])
    assert kind.__mro__[:3] == (kind, api.FSDPModule, Block) and type(blocks[1]) is kind
    assert type(model.blocks[2]) is Block and type(model.blocks) is nn.ModuleList
    for name, p in model.named_parameters():
        assert isinstance(p, nn.Parameter) and isinstance(p, DTensor), name
        assert p.placements == (Shard(0),) and p.device_mesh.shape == (2,)
        assert p.requires_grad and p.is_leaf and p.grad is None
    chain = api.fully_shard(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)))
    assert type(chain[:1]) is nn.Sequential and chain[:1][0] is chain[0]


# -- unshard and reshard


@on_ranks(2)
def test_unshard_shows_plain_parameters_until_reshard() -> None:
    expected, model = _plain(), _sharded()
    block, gathers = model.blocks[1], Gathers(model)
    for _ in range(2):  # before the first forward, and once more
        handle = block.unshard(async_op=True)
        assert isinstance(handle, api.UnshardHandle)
        handle.wait()
        handle.wait()
        assert block.unshard() is None, "returns nothing where it has waited"
        assert gathers.count() == {**dict.fromkeys(ONCE, 0), "blocks.1": 1}
        assert all(type(p) is nn.Parameter for p in block.parameters())
        values = [dict(each.named_parameters()) for each in (block, expected.blocks[1])]
        assert_same_values(*values, "parameter")
        assert is_sharded(model.blocks[0].up)
        block.reshard()
        assert is_sharded(block.up)
    block.unshard(async_op=True)  # forward waits
    gathers.count()
    x = _batch()
    assert_close(model(x), expected(x), "output")
    assert gathers.count() == {**ONCE, "blocks.1": 0}


def _warns_of_views(act: Callable[[], object]) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return any("Views of unsharded" in str(each.message) for each in caught)


@mapped_or_sent
@on_ranks(2)
def test_views_of_whole_parameters_keep_their_memory_with_a_warning(
    environment: dict[str, str],
) -> None:
    """When the root is resharded, by itself or by hand; clones are not warned of."""
    model = _sharded()
    for keeps in (False, True):
        model.set_keep_unsharded_storage(keeps)
        for unshard in (functools.partial(_evaluate, model), model.unshard):
            for take in (Tensor.detach, Tensor.clone):
                unshard()
                held = [take(p) for p in model.parameters()]
                values = [each.clone() for each in held]
                assert _warns_of_views(model.reshard) is (take is Tensor.detach and not keeps)
                _warns_of_views(functools.partial(_evaluate, model))
                model.reshard()
                assert all(map(torch.equal, held, values))
                del held
        if not keeps:
            model.unshard()
            model.reshard()
            assert group_nbytes(model._get_fsdp_state().unit.groups[0]) == 0, "the root's memory"
    for _ in range(2):
        assert not _warns_of_views(lambda: (_evaluate(model), one_backward(model, _batch())))


def _shown_sharded(model: Any) -> tuple[bool, ...]:
    """Of the root and of every block; before a backward."""
    loss = square(model, _batch())
    found = tuple(is_sharded(each) for each in (model.stem, *(b.up for b in model.blocks)))
    loss.backward()
    assert is_sharded(model.stem) and all(is_sharded(block.up) for block in model.blocks)
    return found


@on_ranks(2)
def test_reshard_after_forward_decides_what_is_shown_after_forward() -> None:
    for option in (True, False, None):
        model = _sharded(reshard_after_forward=option)
        assert _shown_sharded(model) == (option is True, *[option is not False] * 3)
    model.set_reshard_after_forward(True)  # the root too
    model.blocks[1].set_reshard_after_forward(False)
    assert _shown_sharded(model) == (True, True, False, True)
    model.set_reshard_after_forward(False, recurse=False)
    assert _shown_sharded(model)[:2] == (False, True)


@pytest.mark.parametrize(("option", "ranks"), [(None, 2), (False, 2), (2, 4)])
@on_ranks("ranks")
def test_clients_may_set_the_mesh_after_forward(option: bool | int | None, ranks: int) -> None:
    """A client resets what the first use decides about the root, and later keeps parameters."""
    model = _sharded(reshard_after_forward=option)
    state = model._get_fsdp_state()
    assert state._mp_policy == api.MixedPrecisionPolicy()
    group = state._fsdp_param_group
    info = group.post_forward_mesh_info
    assert (info is None) is (option is False) and (option or info in (None, group.mesh_info))
    state._lazy_init()
    assert option is not None or group.post_forward_mesh_info is None
    group.post_forward_mesh_info = info or group.mesh_info
    _evaluate(model)
    assert is_sharded(model.stem)
    group.post_forward_mesh_info = None
    loss = square(model, _batch())
    assert not is_sharded(model.stem)
    loss.backward()
    assert_same_values(whole_gradients(model), _expected_gradients(ranks), "gradient")
    container: Any = api.fully_shard(nn.Sequential(model))
    assert container._get_fsdp_state()._fsdp_param_group is None
    with pytest.raises(AttributeError, match=r"'fsdp_params'[^$]*module\.parameters\(\)"):
        _ = group.fsdp_params
    with pytest.raises(ValueError, match="reshard_after_forward"):
        group.post_forward_mesh_info = True


@on_ranks(2)
def test_without_resharding_after_backward_the_next_forward_gathers_nothing() -> None:
    pair = pair_of(Stack)
    gathers = Gathers(pair.model)
    pair.model.set_reshard_after_backward(False)
    pair.backwards()
    assert not any(is_sharded(each) for each in (pair.model.stem, pair.model.blocks[0].up))
    gathers.count()
    pair.model.set_reshard_after_forward(False)
    pair.model.set_reshard_after_backward(True)
    pair.backwards()
    assert gathers.count() == dict.fromkeys(ONCE, 0), "gathered what was kept"
    assert is_sharded(pair.model.stem)
    pair.compare_and_update()


@on_ranks(2)
def test_set_unshard_in_backward_saves_the_second_all_gather() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(NUM_TOKENS, DIM), Block())

    shard = partial_shard(classes=(nn.Embedding, Block), reshard_after_forward=True)
    pair = pair_of(build, shard, batch=tokens)
    pair.model[0].set_unshard_in_backward(False)
    gathers = Gathers(pair.model)
    pair.step()
    assert gathers.count() == {"root": 0, "0": 1, "1": 2}


@only_ours
@on_ranks(2)
def test_kept_storage_has_the_same_address_in_every_step() -> None:
    pair = pair_of(Stack, partial_shard(reshard_after_forward=True))
    pair.model.set_keep_unsharded_storage(True)
    seen = []
    for _ in range(3):
        for module in sharded_modules(pair.model):
            module.unshard()
        seen.append([p.data_ptr() for p in pair.model.parameters()])
        reshard(pair.model)
        pair.step()
    assert 0 not in seen[0] and seen[0] == seen[1] == seen[2]


# -- prefetching


@on_ranks(2)
def test_prefetch_lists_decide_what_is_gathered_before_a_module_computes() -> None:
    model = shard_all(Stack(4), reshard_after_forward=True)
    blocks, log = model.blocks, Gathers(model).log
    for index, block in enumerate(blocks):
        note = functools.partial(lambda event, *_: log.append(event), f"forward {index}")
        block.norm.register_forward_pre_hook(note)
        note = functools.partial(lambda event, *_: log.append(event), f"backward {index}")
        block.norm.register_full_backward_hook(note)
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2], blocks[3]])
    blocks[3].set_modules_to_backward_prefetch([blocks[2], blocks[1], blocks[0]])
    for _ in range(2):  # the first may find the order
        log.clear()
        one_backward(model, _batch())

    def gathered(first: str, last: str) -> list[str]:
        between = log[log.index(first) if first else 0 : log.index(last) if last else None]
        return [event[-1] for event in between if event.startswith("gather blocks")]

    assert gathered("", "forward 0") == ["0", "1", "2", "3"]
    assert gathered("forward 0", "forward 3") == gathered("backward 3", "") == []
    assert [each for each in gathered("forward 3", "backward 3") if each != "3"] == ["2", "1", "0"]


# -- gradients


@on_ranks(2)
def test_gradients_are_divided_by_the_factor() -> None:
    model = _sharded()
    for module in sharded_modules(model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(3.0)
    with pytest.warns((FutureWarning, DeprecationWarning)):
        model.set_reduce_scatter_divide_factor(5.0)  # of the root
    one_backward(model, _batch())
    root, rest = _expected_gradients(5.0), _expected_gradients(3.0)
    expected = {name: (rest if "blocks" in name else root)[name] for name in rest}
    assert_same_values(whole_gradients(model), expected, "gradient")
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model.set_requires_gradient_sync(True, recurse=False)
    one_backward(model, _batch())
    assert all((p.grad is None) is ("blocks" in name) for name, p in model.named_parameters())


@on_ranks(2)
def test_an_all_reduce_hook_sees_and_changes_the_reduced_gradients() -> None:
    model = _sharded(mp_policy=api.MixedPrecisionPolicy(reduce_dtype=torch.float64))
    seen: dict[str, list[Tensor]] = {}

    def hook(name: str, reduced: Tensor) -> None:
        seen.setdefault(name, []).append(reduced.clone())
        reduced.mul_(3)

    names = ["", "blocks.0", "blocks.1", "blocks.2"]
    for name in names:
        model.get_submodule(name).set_all_reduce_hook(functools.partial(hook, name))
    one_backward(model, _batch())
    assert sorted(seen) == names
    assert all([call.dtype for call in calls] == [torch.float64] for calls in seen.values())
    assert_same_values(whole_gradients(model), _expected_gradients(2 / 3), "gradient")
    block = model.blocks[0]
    own = [p.grad.to_local().double().flatten() for p in block.parameters()]
    assert_close(seen["blocks.0"][0].norm() * 3, torch.cat(own).norm(), "norm of what hooks see")


@on_ranks(2)
def test_what_an_all_reduce_hook_writes_does_not_reach_other_replicas() -> None:
    """The second replica takes the sum when the first one's hook has run, or soon."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = api.fully_shard(nn.Linear(512, 512, bias=False), mesh=mesh)
    x = torch.ones(1, 512)
    model(x).sum().backward()
    model.zero_grad()
    transport = type(model._get_fsdp_state().unit.groups[0].replica)
    end = transport.end_all_reduce

    def ends_late(self: Any, *args: Any) -> None:
        if rank == 1:
            with contextlib.suppress(dist.DistStoreError):
                store.wait(["written"], timedelta(seconds=0.5))
        end(self, *args)

    def hook(reduced: Tensor) -> None:
        if rank == 0:
            reduced.zero_()
            store.set("written", "")

    model.set_all_reduce_hook(hook)
    with pytest.raises(ValueError):
        model.set_all_reduce_hook(hook, stream=torch.Stream(device="cpu"))
    with mock.patch.object(transport, "end_all_reduce", ends_late):
        model(x).sum().backward()
    assert (model.weight.grad.to_local() == rank).all(), "gradients are 1"


@only_ours
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_gradients_that_were_cleared_before_their_reduction_do_not_come_back(ranks: int) -> None:
    model, x = _sharded(reshard_after_forward=False), _batch()
    params = list(model.parameters())

    def step(*quiet: float, clear: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Gradients of backwards without sync, ``clear`` after the first, and of one with."""
        with no_sync(model):
            for number, factor in enumerate(quiet):
                one_backward(model, x * factor)
                if number == 0:
                    reshard(model)
                    clear()
        model.reshard()
        one_backward(model, x)
        return whole_gradients(model)

    def by_hand() -> None:
        for p in params:
            p.grad = None

    def scale() -> None:
        for p in params:
            if p.grad is not None:
                p.grad.mul_(0.5)  # as clipping does; zeros, so far: nothing is discarded

    expected = step(0.5, 0.5)
    to_zeros = functools.partial(model.zero_grad, set_to_none=False)
    clears = torch.optim.SGD(params, 0.0).zero_grad, to_zeros, by_hand
    for has_grads, clear in itertools.product((False, True), clears):
        model.zero_grad()
        if has_grads:
            one_backward(model, x * 5)
        assert_same_values(step(3, 0.5, 0.5, clear=clear), expected, f"{clear}, {has_grads}")
    model.zero_grad()
    assert_same_values(step(0.5, 0.5, clear=scale), expected, "scaled zeros")


@only_ours
@on_ranks(2)
def test_a_backward_that_is_finalized_by_hand_reduces_the_same() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    pair = pair_of(Stack, partial_shard(mesh=mesh))
    pair.model.set_manual_backward_finalization(True)

    def step(async_op: bool, model: Any, x: Tensor) -> Tensor:
        one_backward(model, x * 2)
        loss = one_backward(model, x)
        if model is pair.plain:
            return loss
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_all_reduce(False)
        with pytest.raises(api.StateError, match="all-reduce is off"):
            model.finalize_backward()
        model.set_requires_all_reduce(True)
        model.set_reshard_after_backward(True)
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()
        assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())
        model.set_reshard_after_backward(False)  # in the next backwards
        return loss

    for async_op in (False, True, True):
        pair.step(functools.partial(step, async_op))
    pair.model.set_manual_backward_finalization(False)
    with pytest.raises(api.StateError):
        pair.model.finalize_backward()
    pair.step()


# -- a user's own collectives


@on_ranks(2, environment=NOT_MAPPED)
def test_custom_collectives_are_called_with_torchs_keyword_arguments() -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float64)
    own, usual = _sharded(mp_policy=policy), _sharded(mp_policy=policy)
    gather, reduce = NotedAllGather(), NotedReduceScatter()
    own.blocks[1].set_custom_all_gather(gather)
    own.blocks[1].set_custom_reduce_scatter(reduce)
    for model in (own, usual):
        one_backward(model, _batch())
    assert_same_values(whole_gradients(own), whole_gradients(usual), "gradient", 1e-9)
    numel = sum(p.numel() for p in Block().parameters())
    assert len(gather.calls) == 2 and len(reduce.calls) == 1
    for call in (*gather.calls, *reduce.calls):
        dtype = BF16 if call in gather.calls else torch.float64
        assert call["dtypes"] == (dtype, dtype) and call["ranks"] == 2
        part, all_parts = sorted(call["numel"])
        assert all_parts == 2 * part and numel <= all_parts < numel + 64


# -- settings of transfers


@on_ranks(2)
def test_settings_of_transfers_and_policies_of_none_leave_the_results_as_they_are() -> None:
    none = {"mp_policy": None, "offload_policy": None} if api.name == "ours" else {}
    pair = pair_of(Stack, partial_shard(**none))
    model = pair.model
    model.set_reduce_scatter_max_input_buffers(2)
    model.blocks[0].set_reduce_scatter_max_input_buffers(3, recurse=False)
    model.set_separate_reduce_scatter_group()
    api.share_comm_ctx([model, shard_all(Stack())])
    api.share_comm_ctx([])
    pair.step()
    if api.name == "ours":
        model.set_post_optim_event(torch.Event(device="cpu"))
        model.set_symm_mem_for_comm()
    model.set_allocate_memory_from_process_group_for_comm(True)
    pair.step()


# -- functions


class _Generator(Stack):
    def twice(self, x: Tensor, *, gain: float) -> Tensor:
        """Doubles."""
        return self.head(self.blocks[0](self.blocks[0](x))) * gain


@on_ranks(2)
def test_a_registered_method_computes_with_whole_parameters() -> None:
    pair = pair_of(_Generator)
    api.register_fsdp_forward_method(pair.model, "twice")
    assert pair.model.twice.__doc__ == "Doubles."

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model.twice(x, gain=0.5).pow(2).mean() + square(model, x)
        loss.backward()
        return loss.detach()

    pair.step(step)
    assert is_sharded(pair.model.head)
    plain = nn.Linear(2, 2)
    api.register_fsdp_forward_method(plain, "forward")
    assert "forward" not in plain.__dict__
