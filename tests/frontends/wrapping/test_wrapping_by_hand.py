"""A model trains as unsharded however it is wrapped: by hand, or partly ignored. Policies, and
settings of units, are in test_settings_of_units; values from the meta device or rank 0 in
parameters/test_meta_values."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.support.models import Block, Stack
from tests.support.pairwise import each_value
from tests.support.parity import Pair, assert_close, both_forms, one_backward, seeded, square
from tests.support.ranks import on_ranks


@both_forms
@on_ranks(2)
def test_former_root_can_become_nested(use_orig_params: bool) -> None:
    options = {"use_orig_params": use_orig_params}
    plain, model = seeded(Stack), seeded(Stack)
    model.blocks[0] = FSDP(model.blocks[0], **options)
    Pair(plain.blocks[0], model.blocks[0]).step()
    pair = Pair(plain, FSDP(model, **options))
    pair.step()
    pair.step(as_a_user=True)


# -- where values come from


@on_ranks(2)
def test_sync_module_states_accepts_transposed_and_expanded_tensors() -> None:
    rank = dist.get_rank()
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter((torch.arange(24.0).view(4, 6) + 100 * rank).t())
    model.register_buffer("expanded", torch.full((3, 1), float(rank)).expand(3, 5))
    model.register_buffer("transposed", (torch.arange(6.0).view(3, 2) + 100 * rank).t())
    state = FSDP(model, sync_module_states=True).state_dict()
    assert torch.equal(state["weight"], torch.arange(24.0).view(4, 6).t())
    assert torch.equal(state["expanded"], torch.zeros(3, 5))
    assert torch.equal(state["transposed"], torch.arange(6.0).view(3, 2).t())


# -- ignored


@each_value
@both_forms
@pytest.mark.parametrize(
    ("name", "as_parameters"),
    [("ignored_modules", False), ("ignored_states", False), ("ignored_states", True)],
)
@on_ranks(2)
def test_ignored_parameters_stay_unsharded_and_unsynchronized(
    name: str, as_parameters: bool, use_orig_params: bool
) -> None:
    """Their gradient is that of the local batch."""
    plain, model = seeded(Stack), seeded(Stack)
    modules = [model.head, model.blocks[1].norm]
    ignored = [*plain.head.parameters(), *plain.blocks[1].norm.parameters()]
    kept = [p for module in modules for p in module.parameters()]
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        **{name: kept if as_parameters else modules},
    )
    assert [p.shape for p in kept] == [p.shape for p in ignored]
    pair = Pair(plain, model)
    for _ in range(2):
        batches = pair.batches()
        own = torch.autograd.grad(square(plain, batches[pair.rank]), ignored)
        pair.plain_backwards([one_backward] * pair.ranks, batches)
        one_backward(model, batches[pair.rank])
        for p, grad in zip(kept, own, strict=True):
            assert_close(p.grad, grad, "gradient of an ignored parameter")
            dist.all_reduce(p.grad)  # synchronising ignored parameters is up to the user
            p.grad /= pair.ranks
        pair.compare_and_update()
        for p, expected in zip(kept, ignored, strict=True):
            assert_close(p, expected, "ignored parameter")
    pair.assert_state_equal()


def _warnings_of(*args: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        FSDP(*args, **options)
    assert all(w.category is UserWarning and w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


# -- what is likely a mistake


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_likely_mistakes_of_wrapping_are_warned_of(num_ranks: int) -> None:
    blocks = {Block}
    for policy in (ModuleWrapPolicy({nn.Conv2d}), size_based_auto_wrap_policy):
        [text] = _warnings_of(Stack(), auto_wrap_policy=policy)
        assert text.startswith("auto_wrap_policy chooses no module in the Stack")
    for module in (Stack(), Block(), nn.Linear(2, 2)):
        assert not _warnings_of(module, auto_wrap_policy=ModuleWrapPolicy({*blocks, nn.Linear}))
    assert not _warnings_of(Block(), auto_wrap_policy=ModuleWrapPolicy(blocks))
    stack = Stack()
    stack.blocks = nn.ModuleList(map(FSDP, stack.blocks))
    assert not _warnings_of(stack, auto_wrap_policy=ModuleWrapPolicy(blocks))

    for container in (nn.ModuleList([Block()]), nn.ModuleDict({"one": Block()})):
        [text] = _warnings_of(container)
        assert text.startswith(f"A wrapped {type(container).__name__} has no forward")
    assert not _warnings_of(nn.ModuleList([FSDP(Block())]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        [text] = _warnings_of(Block())
        assert "will be trained there" in text
        assert not _warnings_of(Block(), device_id=torch.device("cpu"))
    assert not _warnings_of(Block()), "a world of one rank changes nothing"
