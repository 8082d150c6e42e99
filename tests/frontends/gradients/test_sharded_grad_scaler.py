"""A non-finite gradient on one rank makes all ranks skip the step and shrink the scale."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compat import ShardingStrategy, UsageError
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from tests.support.messages import Messages
from tests.support.models import Named, Stack, Tiny
from tests.support.pairwise import each_value
from tests.support.parity import assert_close, both_forms, make_pair, square
from tests.support.ranks import on_ranks
from tests.support.same_host import MESSAGES

Optimizer = Callable[..., torch.optim.Optimizer]


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def _fused_sgd(parameters: Any) -> torch.optim.Optimizer:
    # No momentum: if its first step is skipped, torch leaves the buffers of a fused SGD without
    # values, and adds them in the next.
    return torch.optim.SGD(parameters, 0.1, fused=True)


def _fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, eps=1e-3, fused=True)


# Fused ones take another path through the scaler.
any_optimizer = pytest.mark.parametrize("make", [_sgd, _fused_sgd, _fused_adamw])


def _scaler(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler(
        **{"device": "cpu", "init_scale": 1024.0, "growth_interval": 2, **options}
    )


def _parameters(*shapes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def _fill(parameters: list[nn.Parameter], scaler: ShardedGradScaler, value: float = 1.0) -> None:
    """Give every parameter the gradient of a scaled loss: ``value`` times the scale."""
    for p in parameters:
        p.grad = torch.full_like(p, value * scaler.get_scale())


def _started(**options: Any) -> ShardedGradScaler:
    """A scaler that has scaled a loss."""
    scaler = _scaler(**options)
    scaler.scale(torch.tensor(1.0))
    return scaler


# -- training


INF, NAN = math.inf, math.nan
SPIKES = [INF, 0, NAN, INF, 0, 0, NAN]  # by step: in the gradients of one rank after another
SCALES = [512, 512, 256, 128, 128, 256, 128]  # after each step


@each_value
@both_forms
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("build", "ranks"), [(Stack, 1), (Stack, 2), (Stack, 4), (Tiny, 4)])
@any_optimizer
@on_ranks("ranks", environment=MESSAGES)
def test_training_with_skipped_steps_equals_the_unsharded_model(
    make: Optimizer,
    build: type[nn.Module],
    ranks: int,
    clip: bool,
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> None:
    pair = make_pair(build, sharding_strategy=strategy, use_orig_params=use_orig_params)
    model, plain = pair.model, pair.plain
    optims = optim, plain_optim = make(model.parameters()), make(plain.parameters())
    scaler = _scaler()
    plain_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    culprits = itertools.cycle(range(1 if build is Tiny else ranks))  # that hold a part
    for spike, scale in zip(SPIKES, SCALES, strict=True):
        batches = pair.batches()
        losses = torch.stack([square(plain, x) for x in batches])
        plain_scaler.scale(losses.mean()).backward()
        scaler.scale(square(model, batches[pair.rank])).backward()
        if spike:
            next(plain.parameters()).grad.fill_(spike)
            if next(culprits) == pair.rank:
                held = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
                held[-1].view(-1)[0] = spike
        if clip:
            plain_scaler.unscale_(plain_optim)
            scaler.unscale_(optim)
            norms = [
                model.clip_grad_norm_(0.05),
                nn.utils.clip_grad_norm_(plain.parameters(), 0.05),
            ]
            if not spike:
                assert_close(*norms, "norm of the gradients")
        plain_scaler.step(plain_optim)
        with Messages() as messages:
            scaler.step(optim)
        assert messages.sent == ({} if clip or ranks == 1 else {torch.float32: [1] * (ranks - 1)})
        with Messages() as messages:
            scaler.update()
        assert not messages.sent
        plain_scaler.update()
        assert scaler.state_dict() == plain_scaler.state_dict()
        assert scaler.get_scale() == scale
        for each in optims:
            each.zero_grad()
    pair.assert_state_equal()


# -- what ranks agree on


@on_ranks(2, environment=MESSAGES)
def test_gradients_of_several_dtypes_are_unscaled_and_checked_by_one_number() -> None:
    dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float64
    parameters = [p for dtype in dtypes for p in _parameters(2, dtype=dtype)]
    optim, scaler = torch.optim.SGD(parameters, 0.5), _started(growth_interval=100)
    for num_bad, bad in enumerate((None, 0, 1, 2, 3)):
        before = [p.detach().clone() for p in parameters]
        _fill(parameters, scaler)
        if bad is not None and dist.get_rank() == 1:
            parameters[bad].grad[1] = -math.inf
        with Messages() as messages:
            scaler.unscale_(optim)
        assert messages.sent[torch.float32] == [1]  # the first also connects
        for index, p in enumerate(parameters):
            assert p.grad.dtype is dtypes[index]
            last = -math.inf if bad == index and dist.get_rank() == 1 else 1.0
            assert p.grad.tolist() == [1.0, last]
        scaler.step(optim)
        scaler.update()
        wanted = [old - 0.5 if bad is None else old for old in before]
        assert all(map(torch.equal, parameters, wanted))
        assert scaler.get_scale() == 1024 / 2**num_bad


@any_optimizer
@on_ranks(2)
def test_each_optimizer_is_skipped_separately_and_the_scale_shrinks_once(make: Optimizer) -> None:
    groups = [_parameters(2, 3), _parameters(4), _parameters(5)]
    optims, scaler = [make(group) for group in groups], _started(growth_interval=3)
    good = (None, None)
    for bad, scale in (((0, 1), 512), (good, 512), (good, 512), (good, 1024), ((2, 0), 512)):
        before = [group[0].detach().clone() for group in groups]
        for index, group in enumerate(groups):
            _fill(group, scaler, math.inf if bad[dist.get_rank()] == index else 1.0)
        scaler.unscale_(optims[1])
        for optim in optims:
            scaler.step(optim)
        scaler.update()
        skipped = [torch.equal(group[0], old) for group, old in zip(groups, before, strict=True)]
        assert skipped == [index in bad for index in range(3)]
        assert scaler.get_scale() == scale


@on_ranks(4)
def test_only_ranks_of_the_process_group_agree_on_a_step() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    scaler = _started(process_group=groups[rank % 2])
    with pytest.raises(UsageError, match="not in the process group"):
        _scaler(process_group=groups[1 - rank % 2])
    parameters = _parameters(2)
    optim = _sgd(parameters)
    _fill(parameters, scaler, math.inf if rank == 2 else 1.0)
    scaler.step(optim)
    scaler.update()
    assert torch.equal(parameters[0], torch.ones(2)) is (rank % 2 == 0)
    assert scaler.get_scale() == (1024 if rank % 2 else 512)


@on_ranks(2)
def test_a_disabled_scaler_sends_nothing() -> None:
    if dist.get_rank() == 0:  # the other rank does not take part
        parameters = _parameters(2)
        optim, loss = _sgd(parameters), torch.tensor(2.0)
        scaler = ShardedGradScaler("cpu", enabled=False)
        parameters[0].grad = torch.ones(2)
        assert scaler.scale(loss) is loss
        scaler.unscale_(optim)
        scaler.step(optim)
        scaler.update()
        assert not torch.equal(parameters[0], torch.ones(2))
        assert torch.equal(parameters[0].grad, torch.ones(2))


# -- without process groups


def test_losses_in_nested_iterables_are_scaled() -> None:
    scaler = _scaler(init_scale=2.0)
    two, three = torch.tensor(2.0), torch.tensor([3.0], dtype=torch.float16)
    assert [scaler.scale(t).dtype for t in (two, three)] == [torch.float32, torch.float16]
    assert scaler.scale(two).item() == 4
    assert [t.item() for t in scaler.scale([two, three])] == [4, 6]
    scaled: Any = scaler.scale((two, [three, (two,)]))  # type: ignore[list-item]
    assert [type(scaled), type(scaled[1]), type(scaled[1][1])] == [tuple, list, tuple]
    assert [scaled[0].item(), scaled[1][0].item(), scaled[1][1][0].item()] == [4, 6, 4]
    named: Any = scaler.scale(Named(two, [three]))
    assert type(named) is Named and named.first.item() == 4 and named.rest[0].item() == 6
    assert [t.item() for t in scaler.scale(t for t in (two, three))] == [4, 6]
    assert scaler.scale([]) == []


# -- an accelerator, in tensors that have a device and no values


@pytest.mark.parametrize("make", [_sgd, _fused_adamw])
@on_ranks(1)
def test_cpu_gradients_are_unscaled_with_a_synchronized_scale(
    make: Optimizer,
) -> None:
    """The base class and fused optimizers would copy the scale and read it at once."""
    handed: list[tuple[str, str]] = []
    called: list[bool] = []

    def unscale(
        self: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[Any, Tensor]:
        handed.append((inv_scale.device.type, found_inf.device.type))
        return {found_inf.device: found_inf}

    def step(self: Any, optimizer: Any) -> None:
        called.append(getattr(optimizer, "_step_supports_amp_scaling", False))
        self.unscale_(optimizer)

    with (
        FakeTensorMode(),
        mock.patch.object(torch.amp.GradScaler, "_unscale_grads_", unscale),
        mock.patch.object(torch.amp.GradScaler, "step", step),
    ):
        scaler, parameters = _scaler(), _parameters(2)
        optim = make(parameters)
        before = dict(vars(optim))
        scaler.scale(torch.ones((), device="cuda"))
        for gradient in (None, torch.ones(2)):
            parameters[0].grad = gradient
            scaler.step(optim)
            (verdict,) = scaler._found_inf_per_device(optim).values()
            assert verdict.device.type == "cuda"
            scaler._per_optimizer_states.clear()
    assert handed == [("cuda", "cuda"), ("cpu", "cpu")]
    assert called == [make is _fused_adamw, False]
    assert vars(optim) == before
