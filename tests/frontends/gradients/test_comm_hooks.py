"""register_comm_hook: a user's function replaces the built-in reduction of gradients."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy
from tests.support.beside_torch import assert_as_torch, trained
from tests.support.messages import Messages
from tests.support.models import DIM, GradientIs, Stack, Switch
from tests.support.pairwise import each_value
from tests.support.parity import (
    assert_close,
    backward,
    both_forms,
    make_pair,
    one_backward,
    original_form,
    square,
    vectors,
    whole_gradients,
)
from tests.support.ranks import on_ranks
from tests.support.same_host import MESSAGES

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy


class Averages:
    """A correct hook for any number of ranks, which records its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.dtypes: set[torch.dtype] = set()

    def __call__(self, state: list[Any], grad: Tensor, output: Tensor | None = None) -> None:
        state.append(len(self.calls))
        self.dtypes |= {grad.dtype} if output is None else {grad.dtype, output.dtype}
        self.calls.append((grad.numel(),) if output is None else (grad.numel(), output.numel()))
        assert (grad.dim(), grad.is_contiguous(), grad.requires_grad) == (1, True, False)
        total = grad.float()
        dist.all_reduce(total)
        total /= dist.get_world_size()
        if output is None:
            grad.copy_(total)
        else:
            assert output.data_ptr() != grad.data_ptr()
            output.copy_(total.chunk(dist.get_world_size())[dist.get_rank()])


# -- the contract


@each_value
@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_ranks("num_ranks")
def test_a_hook_is_called_once_per_unit_and_backward_with_flat_gradients(
    num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    pair = make_pair(Stack, sharding_strategy=strategy, use_orig_params=use_orig_params)
    hook, state = Averages(), list[int]()
    pair.model.register_comm_hook(state, hook)
    for _ in range(2):
        pair.step(one_backward)
    with pair.model.no_sync():
        square(pair.model, torch.ones(2, DIM)).backward()
    pair.optim.zero_grad()
    pair.step(one_backward)
    assert state == list(range(12)), "the registered state itself is passed, never under no_sync"
    assert hook.dtypes == {FP32}
    splits = num_ranks > 1 and strategy is not NO_SHARD
    for (numel, *shard), unit_numel in zip(sorted(hook.calls), [99] * 3 + [296] * 9, strict=True):
        assert unit_numel <= numel < unit_numel + 4 * num_ranks, "nothing but padding in between"
        assert shard == ([numel / num_ranks] if splits else [])


def _nothing(state: list[int], grad: Tensor, output: Tensor | None = None) -> None:
    state.append(1)
    if output is not None:
        output.fill_(7.0)


@each_value
@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@on_ranks(2, environment=MESSAGES)
def test_result_of_the_hook_is_the_gradient(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    pair = make_pair(Stack, sharding_strategy=strategy, use_orig_params=use_orig_params)
    pair.model.register_comm_hook([], _nothing)
    x = vectors(torch.Generator().manual_seed(dist.get_rank()))
    for times in (1, 2):
        loss = square(pair.model, x)
        with Messages() as messages:
            loss.backward()
        assert strategy is FULL_SHARD or not messages.sent  # which gathers parameters again
        square(pair.plain, x).backward()
        grads = whole_gradients(pair.model)
        for name, p in pair.plain.named_parameters():
            if strategy is NO_SHARD:
                assert_close(grads[name], p.grad, name)  # this rank's own
            else:
                assert torch.equal(grads[name], torch.full_like(p, 7.0 * times)), name


def _keeps(state: list[tuple[Tensor, Tensor]], grad: Tensor, output: Tensor | None = None) -> None:
    """As in error feedback: the tensors are kept after the call."""
    Averages()([], grad, output)
    state.append((grad, grad.clone()))


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@on_ranks(2)
def test_hook_may_keep_its_arguments(strategy: ShardingStrategy) -> None:
    pair = make_pair(Stack, sharding_strategy=strategy)
    kept: list[tuple[Tensor, Tensor]] = []
    pair.model.register_comm_hook(kept, _keeps)
    for _ in range(2):
        pair.step(one_backward)
        for tensor, value in kept:
            assert tensor.untyped_storage().nbytes() >= tensor.nbytes, "its memory was taken away"
            assert torch.equal(tensor, value)
        pair.assert_idle()


# -- ways to train


def _replaces_data(state: Any, grad: Tensor, output: Tensor | None = None) -> None:
    """As torch's compression hooks do: give the tensors other data, or data of another dtype."""
    total = grad.double()
    dist.all_reduce(total)
    total /= dist.get_world_size()
    if output is None:
        grad.data = total
    else:
        output.data = total.chunk(dist.get_world_size())[dist.get_rank()]


def _uses(inner: str, m: nn.Module, x: Tensor) -> Tensor:
    return backward(m(x, inner).pow(2).mean())


RUNS: dict[str, dict[str, Any]] = {
    "other units on some ranks": {"build": Switch, "allow_unused_units": True},
    "replaces data": {"hook": _replaces_data},
    "replaces data of replicas": {"hook": _replaces_data, "sharding_strategy": NO_SHARD},
}


@each_value
@both_forms
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", RUNS)
@on_ranks("num_ranks")
def test_training_with_a_hook_that_averages_equals_the_unsharded_model(
    name: str, num_ranks: int, use_orig_params: bool
) -> None:
    options = {"build": Stack, "hook": Averages(), **RUNS[name]}
    hook, differs = options.pop("hook"), options["build"] is Switch
    pair = make_pair(use_orig_params=use_orig_params, **options)
    pair.model.register_comm_hook([], hook)
    for _ in range(2):
        steps = [partial(_uses, inner) for inner in ("a", "ab", "ab")[:num_ranks]]
        pair.step(steps if differs else one_backward)


# -- dtypes


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@on_ranks(4)
def test_gradients_are_not_divided_before_the_hook(strategy: ShardingStrategy) -> None:
    """They arrive as backward made them in any dtype, even 60,000 in fp16."""
    sixty = float(torch.tensor(60000.0, dtype=FP16))
    model = FSDP(
        GradientIs(), sharding_strategy=strategy, mixed_precision=MixedPrecision(reduce_dtype=FP16)
    )
    model(torch.ones(8)).backward()  # without the hook gradients are divided on their way in
    model.zero_grad()
    average = Averages()

    def hook(state: list[Any], grad: Tensor, output: Tensor | None = None) -> None:
        assert float(grad.max()) == sixty
        average(state, grad, output)

    model.register_comm_hook([], hook)
    model(torch.full((8,), 60000.0)).backward()
    assert whole_gradients(model)["weight"].tolist() == [sixty] * 8


# -- the hooks of torch


@contextlib.contextmanager
def _without_streams() -> Iterator[None]:
    """Torch's compression hooks record streams, which the CPU does not support."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates NO_SHARD
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
        yield


def _registers(name: str, library: Any, model: Any) -> None:
    kind = default_hooks.LowPrecisionState if "compress" in name else default_hooks.DefaultState
    if name == "default":
        splits = model.sharding_strategy.name != "NO_SHARD" and dist.get_world_size() > 1
        name = "reduce_scatter_hook" if splits else "allreduce_hook"
    model.register_comm_hook(kind(model.process_group), getattr(default_hooks, name))


@original_form
@on_ranks(2)
def test_torch_hooks_give_the_same_bits_as_under_torch(use_orig_params: bool) -> None:
    """Every hook with every strategy in one of the forms."""
    bf16, fp16 = ({"param_dtype": low, "reduce_dtype": FP32} for low in (BF16, FP16))
    names = ("default", "fp16_compress_hook", "bf16_compress_hook")
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    every = list(itertools.product(names, strategies, (None,), ("sss",)))
    cases: list[tuple[str, str, Any, str]] = [
        *every[use_orig_params::2],
        *(("default", strategy, bf16, "sss") for strategy in ("FULL_SHARD", "NO_SHARD")),
        ("bf16_compress_hook", "FULL_SHARD", fp16, "sss"),
        *(("default", strategy, None, "nsns") for strategy in strategies),
    ]
    for name, strategy, precision, pattern in cases:
        options = {"strategy": strategy, "precision": precision, "pattern": pattern}
        prepare = partial(_registers, name)
        with _without_streams():
            assert_as_torch(
                partial(trained, prepare=prepare, use_orig_params=use_orig_params, **options),
                (name, options),
            )


# -- copies


@both_forms
@on_ranks(2)
def test_copy_has_the_hook_and_a_pickle_accepts_one(use_orig_params: bool) -> None:
    model = make_pair(Stack, use_orig_params=use_orig_params).model
    model.register_comm_hook([], _nothing)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with pytest.raises(AssertionError, match="registered already"):
        copied.register_comm_hook([], _nothing)
    calls = list[int]()
    loaded.register_comm_hook(calls, _nothing)
    for other in (copied, loaded):
        square(other, torch.ones(2, DIM)).backward()
        for name, grad in whole_gradients(other).items():
            assert torch.equal(grad, torch.full_like(grad, 7.0)), name
    assert len(calls) == len(FSDP.fsdp_modules(loaded))
