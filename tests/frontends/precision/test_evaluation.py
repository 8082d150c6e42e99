"""What computes in another dtype than mixed precision says: units in evaluation mode, with
FSDP_USE_FULL_PREC_IN_EVAL, and modules of some classes; and buffers, saved in their own dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy, StateDictType
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.beside_torch import assert_as_torch, trained
from tests.support.cases import about
from tests.support.models import DIM, Shifted, Stack, chain, made_of
from tests.support.pairwise import each_value
from tests.support.parity import (
    assert_close,
    backward,
    both_forms,
    make_pair,
    square,
    vectors,
    whole_gradients,
)
from tests.support.ranks import on_ranks

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
FIELDS = {"param_dtype": BF16, "reduce_dtype": FP32, "buffer_dtype": BF16}
LOW = MixedPrecision(**FIELDS)

both_strategies = pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [
        (1, ShardingStrategy.FULL_SHARD),
        (2, ShardingStrategy.SHARD_GRAD_OP),
    ],
)


on_evaluating_ranks = partial(on_ranks, environment={"FSDP_USE_FULL_PREC_IN_EVAL": "1"})


def _own_batch() -> Tensor:
    return vectors(torch.Generator().manual_seed(dist.get_rank()))


def _averages(*models: nn.Module) -> dict[str, Tensor]:
    """The averages over the ranks of the sum of the gradients of unsharded models. Collective."""
    found = {}
    for name, _ in models[0].named_parameters():
        total = torch.stack([each.get_parameter(name).grad.float() for each in models]).sum(0)
        dist.all_reduce(total)
        found[name] = total / dist.get_world_size()
    return found


def _assert_gradients(model: nn.Module, expected: dict[str, Tensor], what: str = "") -> None:
    """Collective."""
    for name, grad in whole_gradients(model).items():
        assert grad is not None
        assert_close(grad, expected[name], f"{what}: gradient of {name}")


def _adds_gradients_of_both_modes(model: FSDP, x: Tensor) -> None:
    """A parameter has gradients in two dtypes when post-backward takes them."""
    grads, losses = [], []
    for mode in (True, False):
        model.train(mode)
        square(model, x).backward()
        grads.append(whole_gradients(model))
        model.zero_grad()
        losses.append(square(model, x))
    model.train()
    (losses[0].float() + losses[1]).backward()
    for name, found in whole_gradients(model).items():
        one, other = grads[0][name], grads[1][name]
        rounding = float((one.abs() + other.abs()).max()) * torch.finfo(BF16).eps
        torch.testing.assert_close(found, one + other, rtol=0.0, atol=rounding, msg=name)


@each_value
@both_forms
@both_strategies
@pytest.mark.parametrize("reduce_dtype", [FP32, BF16])
@on_evaluating_ranks("num_ranks")
def test_evaluation_with_gradients_computes_them_in_full_precision(
    reduce_dtype: torch.dtype, num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """They are still reduced in ``reduce_dtype``."""
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=reduce_dtype)
    pair = make_pair(partial(Stack, 2), mixed_precision=precision, **options)
    model, plain, x = pair.model, pair.plain, _own_batch()
    square(plain, x).backward()
    for p in plain.parameters():
        p.grad = p.grad.to(reduce_dtype).float()
    expected = _averages(plain)
    for mode in (False, True, False):
        model.train(mode)
        square(model, x).backward()
        if not mode:
            _assert_gradients(model, expected)
        pair.assert_idle()
        model.zero_grad()
    _adds_gradients_of_both_modes(model, x)


class Sees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(DIM, DIM), Shifted()

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.seen = self.linear.weight.dtype, x.dtype
        dtype = BF16 if self.inner.training else FP32
        return self.inner(h.to(dtype)).to(h.dtype)


@each_value
@both_forms
@both_strategies
@on_evaluating_ranks("num_ranks")
def test_each_unit_computes_in_the_precision_of_its_own_mode(
    num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    """Even with buffers that bf16 could not hold."""
    pair = make_pair(Sees, (Shifted,), mixed_precision=LOW, **options)
    model, x = pair.model, _own_batch()
    for outer, inner in [(True, False), (False, True), (True, True), (False, False), (True, False)]:
        model.train(outer)
        model.module.inner.train(inner)
        pair.copy_parameters()
        plain = copy.deepcopy(pair.plain)
        outer_dtype, inner_dtype = (BF16 if mode else FP32 for mode in (outer, inner))
        plain.linear.to(outer_dtype)
        plain.inner.to(inner_dtype).train(inner)
        expected, what = plain(x.to(outer_dtype)), f"outer {outer}, inner {inner}"
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(model(x), expected), f"{what}: without gradients"
            pair.assert_idle()
        got = model(x)
        assert got.dtype == expected.dtype == outer_dtype
        assert torch.equal(got, expected), what
        assert model.module.seen == (outer_dtype, outer_dtype)
        model.train(not outer)  # the mode in backward has no effect
        for out in (got, expected):
            out.float().pow(2).mean().backward()
        _assert_gradients(model, _averages(plain), what)
        pair.assert_idle()
        pair.optim.step()
        pair.optim.zero_grad()


LINEAR = partial(nn.Linear, DIM, DIM)


def _states(model: FSDP) -> Iterator[dict[str, Any]]:
    """Yield the state dicts of both kinds. Collective."""
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            yield copy.deepcopy(dict(model.state_dict()))


class OnlyBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.linspace(0.1, 0.8, DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype, self.offset.dtype
        return x + self.offset


class Buffers(nn.Module):
    """Buffers of several dtypes, in modules with and without parameters."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("table", torch.linspace(0.1, 0.9, DIM) * scale)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("high", torch.ones(2, dtype=FP64) * scale)
        self.register_buffer("fleeting", torch.ones(DIM) * scale, persistent=False)
        self.register_buffer("nothing", None)
        self.only, self.ignored = OnlyBuffers(), OnlyBuffers()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: b.dtype for name, b in self.named_buffers()}
        with torch.no_grad():
            self.count += 1
        return self.only(self.linear(x.to(self.linear.weight.dtype))) * self.table + self.fleeting


CAST = dict.fromkeys(("table", "high", "fleeting", "only.offset"), BF16)
CAST |= {"count": torch.int64, "ignored.offset": FP32}


@on_ranks(2)
def test_buffers_are_cast_for_computation_and_saved_in_their_own_dtype() -> None:
    plain = nn.Sequential(Buffers(), Buffers(2.0))
    module = copy.deepcopy(plain)
    options = {"ignored_modules": [each.ignored for each in module], "mixed_precision": LOW}
    model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Buffers}), **options)
    inner, x, expected = module[0].module, torch.ones(2, DIM), plain.state_dict()
    for state in _states(model):
        for name in [name for name in expected if "linear" not in name]:
            assert torch.equal(state[name], expected[name]), "rounded before the first forward"
    assert inner.only(torch.zeros(1, DIM, dtype=BF16)).dtype == BF16, "when called directly"
    for _ in range(2):
        backward(square(model, x))
        assert inner.seen == CAST
    low = copy.deepcopy(plain).bfloat16()
    for each in low:
        each.count = torch.tensor(3)
    assert torch.equal(model(x), low(x.bfloat16()))

    for state in list(_states(model)):
        assert int(state["0.count"]) == 6
        model.load_state_dict({n: v if "linear" in n else v + 1 for n, v in state.items()})
        after = model.state_dict()
        for name, value in expected.items():
            assert state[name].dtype == after[name].dtype == value.dtype
            if "linear" not in name:
                rtol = 0.0 if "ignored" in name else torch.finfo(BF16).eps
                assert torch.allclose(after[name], state[name] + 1, rtol=rtol, atol=0), name
    for assign in (False, True):
        model.load_state_dict(plain.state_dict(), assign=assign)
        model(x)
        assert inner.seen == CAST, "load_state_dict put other tensors there"


def _in_inference_mode(module: Any) -> None:
    with torch.inference_mode():
        module.total.add_(1)


def _by_the_ranks_together(module: Any) -> None:
    module.total.copy_(module.total / dist.get_world_size() + 1 / dist.get_world_size())
    dist.all_reduce(module.total)


def _by_numpy(module: Any) -> None:
    module.total.view(torch.int16).numpy()[:] = (module.total + 1).view(torch.int16).numpy()


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "in place": lambda m: m.total.add_(1),
    "by new data": lambda m: setattr(m.total, "data", m.total + 1),
    "another tensor": lambda m: setattr(m, "total", m.total + 1),
    "another tensor of its first dtype": lambda m: setattr(m, "total", m.total.float() + 1),
    "by numpy": _by_numpy,
    "by the ranks together": _by_the_ranks_together,
    "in inference mode": _in_inference_mode,
}


class Writes(nn.Module):
    """Adds 1 to a buffer in every forward, in one of the usual ways."""

    def __init__(self, how: str, total: Tensor) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(DIM, DIM), how
        self.register_buffer("total", total)
        self.register_buffer("alias", total)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.total.dtype
        if self.training:
            with torch.no_grad():
                WRITTEN[self.how](self)
        return self.linear(x.to(self.linear.weight.dtype)) + self.total[0].to(x.dtype)


def _assert_total(total: Tensor, expected: Any) -> None:
    """In bfloat16, the sums are rounded."""
    assert total.dtype == FP32
    assert torch.allclose(total, torch.as_tensor(expected), rtol=1e-2)


@on_evaluating_ranks(2)
def test_forward_writes_to_cast_buffers_are_saved_and_used_in_eval() -> None:
    for how in WRITTEN:
        with about(how):
            _check_writes(how)


def _check_writes(how: str) -> None:
    model = FSDP(chain(partial(Writes, how, torch.full((2,), 0.1))), mixed_precision=LOW)
    module, x = model.module[0], torch.ones(2, DIM)
    for expected in (1.1, 2.1, 3.1):
        backward(square(model, x))
        assert "another" in how or module.total.dtype == BF16
        for state in _states(model):
            _assert_total(state["0.total"], expected)
        model.eval()
        with torch.no_grad():
            model(x)
        assert module.seen == FP32
        _assert_total(module.total, expected)
        model.train()
    values = model.state_dict()["0.total"].clone() + 100.123
    model.load_state_dict({**model.state_dict(), "0.total": values})
    _assert_total(model.state_dict()["0.total"], values)
    backward(square(model, x))
    _assert_total(model.state_dict()["0.total"], values + 1)


@on_ranks(2)
def test_a_buffer_that_several_modules_share_stays_shared() -> None:
    shared, policy = torch.zeros(2), ModuleWrapPolicy({Writes})
    model = FSDP(
        nn.Sequential(Writes("in place", shared), Writes("in place", shared)),
        auto_wrap_policy=policy,
        mixed_precision=LOW,
    )
    for _ in range(3):
        model(torch.ones(2, DIM))
    first, *others = (getattr(m, name) for m in model.module for name in ("total", "alias"))
    assert all(each is first for each in others)
    assert (first.dtype, first.tolist()) == (BF16, [6, 6])
    for state in _states(model):
        for name in ("0.total", "0.alias", "1.total", "1.alias"):
            assert (state[name].dtype, state[name].tolist()) == (FP32, [6, 6])


NORMS = made_of(
    lambda m, x: m.head(m.layer(m.last(m.second(m.norm(m.first(x)).tanh())))),
    first=LINEAR,
    norm=partial(nn.BatchNorm1d, DIM, affine=False),
    second=LINEAR,
    last=partial(nn.BatchNorm1d, DIM),
    layer=partial(nn.LayerNorm, DIM),
    head=partial(nn.Linear, DIM, 3),
)


@both_forms
@pytest.mark.parametrize(("strategy", "units"), [("FULL_SHARD", ()), ("NO_SHARD", (nn.Linear,))])
@on_ranks(2)
def test_norms_compute_in_float32_and_keep_the_running_statistics_of_torch(
    strategy: str, units: tuple[type[nn.Module], ...], use_orig_params: bool
) -> None:
    classes = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)
    precision = {**FIELDS, "_module_classes_to_ignore": classes}
    options = {"precision": precision, "strategy": strategy, "use_orig_params": use_orig_params}
    assert_as_torch(partial(trained, build=NORMS, units=units, with_state=True, **options))
