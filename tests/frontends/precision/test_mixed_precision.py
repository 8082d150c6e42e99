"""Every field of MixedPrecision: the dtypes for computing, reducing, stepping and saving."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy, StateDictType, fully_shard
from fsdp_compat._comm.transport import Kind
from fsdp_compat._engine.dtypes import tensors_in
from fsdp_compat.wrap import CustomPolicy, ModuleWrapPolicy
from tests.support.beside_torch import assert_as_torch, trained
from tests.support.memory import group_nbytes
from tests.support.models import (
    DIM,
    Block,
    GradientIs,
    Named,
    RecomputesBlocks,
    Record,
    Shifted,
    Stack,
    chain,
)
from tests.support.pairwise import each_value, pairs, pairwise
from tests.support.parity import (
    Pair,
    assert_close,
    backward,
    both_forms,
    make_pair,
    no_sync,
    seeded,
    square,
    vectors,
    whole_gradients,
)
from tests.support.ranks import on_ranks, run_ranks

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
NO_SHARD, HYBRID = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD
BOTH = (False, True)
LOW = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=BF16)
LOW_GRADS = MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
KINDS = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT)


def _whole(model: FSDP) -> dict[str, Tensor]:
    """The full gradients by name. Collective."""
    return {name: grad for name, grad in whole_gradients(model).items() if grad is not None}


def _wrapped(build: Callable[[], nn.Module], precision: MixedPrecision, **options: Any) -> FSDP:
    policy = ModuleWrapPolicy({Block})
    return FSDP(seeded(build), auto_wrap_policy=policy, mixed_precision=precision, **options)


def _meshed(strategy: ShardingStrategy) -> dict[str, Any]:
    if strategy is not HYBRID:
        return {"sharding_strategy": strategy}
    return {
        "sharding_strategy": strategy,
        "device_mesh": init_device_mesh("cpu", (2, dist.get_world_size() // 2)),
    }


# -- param_dtype and reduce_dtype


def _compare_gradients(pair: Pair, dtype: torch.dtype) -> None:
    got, eps = _whole(pair.model), torch.finfo(dtype).eps
    for name, p in pair.plain.named_parameters():
        assert torch.allclose(got[name], p.grad, rtol=eps, atol=1e-7), name


@pytest.mark.parametrize(
    ("number", "num_ranks", "strategy", "shard_dtype", "use_orig_params"),
    [
        (0, 2, FULL_SHARD, FP32, False),
        (1, 2, FULL_SHARD, FP32, True),
        (2, 3, FULL_SHARD, BF16, False),
        (3, 2, SHARD_GRAD_OP, FP64, True),
        (4, 3, NO_SHARD, FP32, False),
        (0, 4, HYBRID, FP32, True),
    ],
)
@on_ranks("num_ranks")
def test_param_dtype_and_reduce_dtype_are_independent(
    number: int,
    num_ranks: int,
    strategy: ShardingStrategy,
    shard_dtype: torch.dtype,
    use_orig_params: bool,
) -> None:
    """Compare with a loop that casts by hand and adds gradients up in float32 or more. Every two
    dtypes are combined in one of five calls, by ``number``."""
    dtypes = (None, BF16, FP16, FP32, FP64)
    for index, param_dtype in enumerate(dtypes):
        reduce_dtype = dtypes[(number - index) % 5]
        compute = param_dtype or shard_dtype
        travels = reduce_dtype or compute
        what = f"param_dtype {param_dtype}, reduce_dtype {reduce_dtype}"
        precision = MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        pair = make_pair(
            lambda: Stack(2).to(shard_dtype),
            mixed_precision=precision,
            use_orig_params=use_orig_params,
            **_meshed(strategy),
        )
        group = pair.model._runtime.groups[0]
        batches, losses = [x.to(shard_dtype) for x in pair.batches()], []
        sums = [torch.zeros_like(p, dtype=FP64) for p in pair.plain.parameters()]
        for x in batches:
            low = copy.deepcopy(pair.plain).to(compute)
            losses.append(backward(square(low, x.to(compute))))
            for total, p in zip(sums, low.parameters(), strict=True):
                total += p.grad.to(travels)
        for total, p in zip(sums, pair.plain.parameters(), strict=True):
            p.grad = (total / pair.ranks).to(p.dtype)
        traffic = group.shard.traffic
        traffic.clear()
        loss = backward(square(pair.model, batches[pair.rank]))
        assert_close(loss, losses[pair.rank], f"{what}: loss")
        if strategy is not NO_SHARD and pair.ranks > 1:
            others = group.shard.ranks - 1
            numel = sum(each.store.numel for each in pair.model._runtime.groups)
            assert traffic.nbytes[Kind.REDUCE] == others * numel * travels.itemsize, what
            gathered = traffic.nbytes[Kind.GATHER]
            assert gathered % (others * compute.itemsize) == 0
            assert gathered >= others * numel * compute.itemsize, what
            assert gathered <= 2 * others * numel * compute.itemsize, what
        assert all(
            p.dtype == shard_dtype and p.grad.dtype == shard_dtype
            for p in pair.model.parameters()
            if p.numel()
        )
        if travels.itemsize == 2 and strategy is HYBRID:  # replicas add up rounded sums
            pair.tolerance = 4 * torch.finfo(travels).eps
            pair.compare_gradients()
        elif travels.itemsize == 2 and strategy is NO_SHARD:
            _compare_gradients(pair, travels)  # replicas send back a sum that is rounded once more
        elif shard_dtype is BF16:
            _compare_gradients(pair, BF16)  # an average may be rounded either way
        else:
            pair.compare_and_update()


@on_ranks(2)
def test_training_without_rounding_is_bit_equal_to_torch() -> None:
    precisions: list[dict[str, Any]] = [
        {"param_dtype": BF16, "reduce_dtype": FP32},
        {"param_dtype": FP16, "reduce_dtype": FP32},
        {"param_dtype": BF16, "reduce_dtype": FP64},
        {"reduce_dtype": FP64},
        {"param_dtype": FP64},
        {"param_dtype": FP64, "reduce_dtype": FP32},
        {"param_dtype": BF16, "keep_low_precision_grads": True},
    ]
    # With NO_SHARD torch averages an average once more, and rounds once more.
    patterns = {"FULL_SHARD": "sas", "SHARD_GRAD_OP": "sas", "NO_SHARD": "sss"}
    for strategy, precision, original in pairs(list(patterns), precisions, BOTH):
        options = {"strategy": strategy, "precision": precision, "use_orig_params": original}
        assert_as_torch(partial(trained, pattern=patterns[strategy], **options), options)


# -- sums


def _averages(
    precision: MixedPrecision,
    given: list[float],
    strategy: ShardingStrategy,
    num_backwards: int,
    dtype: torch.dtype = FP32,
    **more: Any,
) -> list[float]:
    """The average of gradients of which rank r has given[r], after several backwards."""
    model = FSDP(GradientIs(dtype=dtype), mixed_precision=precision, **_meshed(strategy), **more)
    x = torch.full((8,), given[dist.get_rank()])
    for _ in range(num_backwards):
        model(x).backward()
    (grad,) = _whole(model).values()
    assert grad.dtype == dtype
    return sorted(set(grad.tolist()))


EXACT = [(FULL_SHARD, False), (FULL_SHARD, True), (SHARD_GRAD_OP, False)]
ROUNDED = [(NO_SHARD, False), (HYBRID, False), (HYBRID, True)]  # once, in the sum of replicas


@pytest.mark.parametrize(("strategy", "use_orig_params"), EXACT + ROUNDED)
@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "given", "num_backwards", "exact", "rounded"),
    [
        # 256 + 1 is 256 in bfloat16: a sum in it loses the three small ones, and the average is 64.
        (FP32, BF16, [256.0, 1.0, 1.0, 1.0], 1, {64.75}, {64.5, 64.75, 65.0}),
        # The sum of four is 120,000, beyond 65,504.
        (FP32, FP16, [30000.0] * 4, 1, {30000.0}, {30000.0}),
        # Accumulated on the shard, and larger than the largest fp16 number.
        (FP32, FP16, [30000.0] * 4, 3, {90000.0}, {90000.0}),
        # bfloat16 has the neighbours of 64.75.
        *(
            (BF16, reduce_dtype, [256.0, 1.0, 1.0, 1.0], 1, {64.5, 65.0}, {64.5, 65.0})
            for reduce_dtype in (None, FP32)
        ),
    ],
)
def test_gradients_are_added_up_in_float32(
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    given: list[float],
    num_backwards: int,
    exact: set[float],
    rounded: set[float],
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> None:
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=reduce_dtype)
    options = {"use_orig_params": use_orig_params, "dtype": dtype}
    (average,), *others = run_ranks(
        4, _averages, precision, given, strategy, num_backwards, **options
    )
    assert average in (rounded if (strategy, use_orig_params) in ROUNDED else exact)
    assert others == [[average]] * 3


@both_forms
@on_ranks(4)
def test_accumulated_fp16_gradients_are_divided_once(use_orig_params: bool) -> None:
    """Backwards under no_sync, in the buffer that is divided on the way in."""
    precision = MixedPrecision(param_dtype=FP32, reduce_dtype=FP16)
    model = FSDP(GradientIs(), mixed_precision=precision, use_orig_params=use_orig_params)
    for given in (8192.0, 16384.0):
        with model.no_sync():
            model(torch.full((8,), given)).backward()
    model(torch.full((8,), 32768.0)).backward()
    (grad,) = _whole(model).values()
    assert sorted(set(grad.tolist())) == [57344.0]


# -- keep_low_precision_grads


def _grad_dtypes(model: nn.Module) -> set[torch.dtype]:
    return {p.grad.dtype for p in model.parameters() if p.grad is not None}


@each_value
@both_forms
@pytest.mark.parametrize(
    ("num_ranks", "strategy"), [(1, FULL_SHARD), (2, FULL_SHARD), (2, NO_SHARD)]
)
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "expected"),
    [
        (BF16, None, BF16),
        (BF16, FP32, FP32),
        (FP16, BF16, BF16),
        (None, BF16, BF16),
        (None, None, FP32),
    ],
)
@on_ranks("num_ranks")
def test_keep_low_precision_grads_keeps_the_reduce_dtype(
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    expected: torch.dtype,
    num_ranks: int,
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> None:
    """With, without and between synchronisation."""
    precision = MixedPrecision(param_dtype, reduce_dtype, keep_low_precision_grads=True)
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model = _wrapped(partial(Stack, 2), precision, **options)
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for pattern in ("s", "nss"):
        for letter in pattern:
            with no_sync(model) if letter == "n" else contextlib.nullcontext():
                square(model, torch.randn(4, DIM)).backward()
            assert _grad_dtypes(model) <= {expected}
        assert _grad_dtypes(model) == {expected}
        grads = _whole(model)
        assert len(grads) == len(list(Stack(2).parameters()))
        norm = torch.linalg.vector_norm(torch.cat([g.float().flatten() for g in grads.values()]))
        given = model.clip_grad_norm_(1e9)  # rounded to the dtype of the gradients
        assert abs(given.float() - norm) <= torch.finfo(given.dtype).eps * norm
        model.clip_grad_norm_(float(norm) / 2)
        halved = _whole(model)
        for name, grad in grads.items():
            got, wanted = halved[name].float(), grad.float() / 2
            assert torch.allclose(got, wanted, rtol=1e-2, atol=1e-6), name
        optim.step()
        assert all(p.dtype == FP32 for p in model.parameters())
        optim.zero_grad(set_to_none=pattern == "s")


@both_forms
@on_ranks(2)
def test_low_precision_gradients_work_with_frozen_parts(use_orig_params: bool) -> None:
    module = Stack(2)
    module.blocks[0].requires_grad_(False)
    module.blocks[1].up.weight.requires_grad_(False)
    square(module, torch.ones(2, DIM)).backward()  # gradients that exist before wrapping
    model = _wrapped(lambda: module, LOW_GRADS, use_orig_params=use_orig_params)
    model.zero_grad()
    x = torch.ones(2, DIM) * (1 + dist.get_rank())
    square(model, x).backward()
    assert not any(name.startswith(("blocks.0", "blocks.1.up.weight")) for name in _whole(model))
    for p in model.parameters():
        assert (p.grad is None) == (not p.requires_grad or not p.numel())
    assert _grad_dtypes(model) == {BF16}
    if use_orig_params:
        model.blocks[0].requires_grad_(True)
        model.zero_grad()
        square(model, x).backward()
        assert _grad_dtypes(model.blocks[0]) == {BF16}


@both_forms
@on_ranks(2)
def test_low_precision_gradients_can_be_changed_in_summon_full_params(
    use_orig_params: bool,
) -> None:
    model = FSDP(GradientIs(), mixed_precision=LOW_GRADS, use_orig_params=use_orig_params)
    model(torch.arange(8.0)).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        (p,) = model.parameters()
        assert p.grad.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        p.grad.mul_(2)
    (grad,) = _whole(model).values()
    assert grad.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert _grad_dtypes(model) == {BF16}


# -- inputs


class Takes(nn.Module):
    """Records the dtypes of its inputs; calls another module with float64 and integers."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(DIM)), inner

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = [t.dtype for t in tensors_in((args, kwargs))]
        if self.inner is not None:
            self.inner(torch.ones(2, dtype=FP64), index=torch.arange(2))
        return self.weight.sum()


@pytest.mark.parametrize(
    ("root", "nested", "param_dtype", "at_root", "inside"),
    [
        (True, False, BF16, BF16, FP64),
        (True, True, BF16, BF16, BF16),
        (False, True, FP16, FP16, FP16),
        (False, False, BF16, None, FP64),
        (True, True, None, None, FP64),
    ],
)
@on_ranks(1)
def test_floating_point_inputs_are_cast_if_requested(
    root: bool,
    nested: bool,
    param_dtype: torch.dtype | None,
    at_root: torch.dtype | None,
    inside: torch.dtype,
) -> None:
    precision = MixedPrecision(
        param_dtype, FP32, cast_root_forward_inputs=root, cast_forward_inputs=nested
    )
    inner = Takes()
    policy = CustomPolicy(lambda m: m is inner)
    model = FSDP(Takes(inner), auto_wrap_policy=policy, mixed_precision=precision)
    x, ints, flags = torch.ones(2, DIM), torch.arange(3), torch.tensor([True])
    high = torch.ones(1, dtype=FP64)
    nested_args = [ints, {"a": (high, None, "text", 3)}]
    model(x, nested_args, named=Named(x, [flags, 2.5]), record=Record({"b": [x]}, "label"))
    assert (x.dtype, ints.dtype, high.dtype) == (FP32, torch.int64, FP64)
    own = [FP32, torch.int64, FP64, FP32, torch.bool, FP32]
    cast = [at_root if at_root and dtype.is_floating_point else dtype for dtype in own]
    assert (model.module.seen, inner.seen) == (cast, [inside, torch.int64])


@on_ranks(2)
def test_inputs_that_are_cast_get_gradients_of_their_own_dtype() -> None:
    """The cast is part of the graph: the user's tensor gets a gradient of its own dtype."""
    model = FSDP(GradientIs(), mixed_precision=MixedPrecision(param_dtype=BF16))
    with FSDP.summon_full_params(model):
        model.module.weight.data.copy_(torch.arange(8.0))
    x = torch.ones(8, requires_grad=True)
    loss = model(x)
    assert loss.dtype == BF16
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype == FP32
    assert x.grad.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


# -- buffers


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
        self.only = OnlyBuffers()
        self.ignored = OnlyBuffers()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: b.dtype for name, b in self.named_buffers()}
        with torch.no_grad():
            self.count += 1
        return self.only(self.linear(x.to(self.linear.weight.dtype))) * self.table + self.fleeting


class OnlyBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.linspace(0.1, 0.8, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


def _two(precision: MixedPrecision) -> tuple[nn.Module, FSDP]:
    plain = nn.Sequential(Buffers(), Buffers(2.0))
    module = copy.deepcopy(plain)
    ignored, policy = [each.ignored for each in module], ModuleWrapPolicy({Buffers})
    options = {"ignored_modules": ignored, "auto_wrap_policy": policy}
    return plain, FSDP(module, mixed_precision=precision, **options)


CAST = {
    "table": BF16,
    "count": torch.int64,
    "high": BF16,
    "fleeting": BF16,
    "only.offset": BF16,
    "ignored.offset": FP32,
}


@on_ranks(2)
def test_buffers_are_cast_for_computation_and_saved_in_their_own_dtype() -> None:
    plain, model = _two(LOW)
    inner = model.module[0].module
    called_directly = inner.only(torch.zeros(1, DIM, dtype=BF16))
    assert called_directly.dtype == BF16
    for _ in range(2):
        backward(square(model, torch.ones(2, DIM)))
        assert inner.seen == CAST
    low = copy.deepcopy(plain).bfloat16()
    for each in low:
        each.count = torch.tensor(3)
    assert torch.equal(model(torch.ones(2, DIM)), low(torch.ones(2, DIM, dtype=BF16)))

    dtypes = {name: value.dtype for name, value in plain.state_dict().items()}
    for kind in KINDS:
        with FSDP.state_dict_type(model, kind):
            state = copy.deepcopy(dict(model.state_dict()))
            assert {name: value.dtype for name, value in state.items()} == dtypes
            assert not any("fleeting" in name for name in state)
            assert int(state["0.count"]) == 6
            changed = {
                name: value + 1 if name.endswith(("count", "high", "offset", "table")) else value
                for name, value in state.items()
            }
            model.load_state_dict(changed)
            after = model.state_dict()
            assert {name: value.dtype for name, value in after.items()} == dtypes
            assert int(after["0.count"]) == 7
            for name in ("1.high", "1.only.offset"):
                assert torch.allclose(after[name], changed[name], rtol=torch.finfo(BF16).eps)
            assert torch.equal(after["1.ignored.offset"], changed["1.ignored.offset"])
            model.load_state_dict(state)
        model(torch.ones(2, DIM))
        assert inner.seen == CAST
        inner.count -= 1
    model.load_state_dict(plain.state_dict(), assign=True)
    model(torch.ones(2, DIM))
    assert inner.seen == CAST, "load_state_dict(assign=True) put other tensors there"


@on_ranks(2)
def test_every_unit_casts_its_own_buffers() -> None:
    """buffer_dtype alone leaves parameters and inputs unchanged, also where units differ."""
    _, model = _two(MixedPrecision(buffer_dtype=FP64))
    out = model(torch.ones(2, DIM))
    assert out.dtype == FP64
    assert model.module[0].module.seen == {
        name: FP64 if dtype is BF16 else dtype for name, dtype in CAST.items()
    }
    torch.manual_seed(0)
    module = nn.Sequential(Buffers(), Buffers())
    low = MixedPrecision(buffer_dtype=FP64)
    policy = CustomPolicy(
        lambda m: {"mixed_precision": low} if m is module[1] else isinstance(m, Buffers)
    )
    model = FSDP(module, auto_wrap_policy=policy, mixed_precision=MixedPrecision(buffer_dtype=FP16))
    model(torch.ones(2, DIM))
    first, second = (unit.module.seen for unit in model.module)
    assert (first["table"], first["only.offset"]) == (FP16, FP16)
    assert (second["table"], second["only.offset"]) == (FP64, FP64)


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
        if not self.training:
            return self.linear(x.to(self.linear.weight.dtype)) + self.total[0]
        with torch.no_grad():
            WRITTEN[self.how](self)
        return self.linear(x) + self.total[0].to(x.dtype)


@on_ranks(2)
def test_a_buffer_that_several_modules_share_stays_shared() -> None:
    shared, policy = torch.zeros(2), ModuleWrapPolicy({Writes})
    module = nn.Sequential(Writes("in place", shared), Writes("in place", shared))
    model = FSDP(module, auto_wrap_policy=policy, mixed_precision=LOW)
    for _ in range(3):
        model(torch.ones(2, DIM))
    first, *others = (getattr(m, name) for m in model.module for name in ("total", "alias"))
    assert all(each is first for each in others)
    assert (first.dtype, first.tolist()) == (BF16, [6, 6])
    for kind in KINDS:
        with FSDP.state_dict_type(model, kind):
            state = model.state_dict()
        for name in ("0.total", "0.alias", "1.total", "1.alias"):
            assert (state[name].dtype, state[name].tolist()) == (FP32, [6, 6])


@pytest.mark.parametrize("how", WRITTEN)
@on_ranks(2)
def test_forward_writes_to_cast_buffers_are_saved_and_used_in_eval(how: str) -> None:
    torch.manual_seed(0)
    with _environment():
        model = FSDP(nn.Sequential(Writes(how, torch.full((2,), 0.1))), mixed_precision=LOW)
    for expected in (1.1, 2.1, 3.1):
        square(model, torch.ones(2, DIM)).backward()
        if "another" not in how:
            assert model.module[0].total.dtype == BF16
        for kind in KINDS:
            with FSDP.state_dict_type(model, kind):
                saved = model.state_dict()["0.total"]
            assert saved.dtype == FP32
            assert torch.allclose(saved, torch.full((2,), expected), rtol=1e-2), (
                f"{kind.name} has {saved.tolist()}"
            )
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, DIM))
        assert model.module[0].seen == FP32
        assert torch.allclose(model.module[0].total, torch.full((2,), expected), rtol=1e-2)
        model.train()
    values = model.state_dict()["0.total"].clone() + 100.123
    state = {**model.state_dict(), "0.total": values}
    model.load_state_dict(state)
    assert torch.allclose(model.state_dict()["0.total"], values, rtol=1e-2), (
        "the loaded values are missing"
    )
    square(model, torch.ones(2, DIM)).backward()
    assert torch.allclose(model.state_dict()["0.total"], values + 1, rtol=1e-2)


@on_ranks(1)
def test_a_state_dict_before_the_first_forward_has_the_values_of_buffers_unrounded() -> None:
    plain, model = _two(LOW)
    expected = plain.state_dict()
    for kind in KINDS:
        with FSDP.state_dict_type(model, kind):
            state = model.state_dict()
        for name, _ in plain.named_buffers():
            if "fleeting" not in name:
                assert torch.equal(state[name], expected[name]), f"{name} in {kind.name}"


# -- _module_classes_to_ignore


def computes_in(dtype: torch.dtype, module: nn.Module) -> None:
    """Let a norm compute in ``dtype``, or a linear module, whose parameters are cast, too."""
    forward = module.forward
    if isinstance(module, nn.Linear):
        module.forward = lambda x: F.linear(
            x.to(dtype), module.weight.to(dtype), module.bias.to(dtype)
        )
    else:
        module.forward = lambda x: forward(x.to(dtype)).to(x.dtype)


class Norms(nn.Module):
    def __init__(self, affine: bool, layer_norm: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM, affine=affine)
        self.second, self.last = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)
        self.layer = nn.LayerNorm(DIM, elementwise_affine=affine) if layer_norm else nn.Identity()
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.between = self.norm(self.first(x)).tanh()
        return self.head(self.layer(self.last(self.second(self.between))))


@pairwise
@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Linear})])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("layer_norm", [False, True])
@on_ranks(2)
def test_norms_compute_in_float32_and_keep_the_running_statistics_of_ddp(
    layer_norm: bool,
    affine: bool,
    policy: ModuleWrapPolicy | None,
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> None:
    plain, module = (seeded(partial(Norms, affine, layer_norm)) for _ in range(2))
    classes = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)
    for child in plain.modules():
        if isinstance(child, (nn.Linear, *classes)):
            computes_in(BF16 if isinstance(child, nn.Linear) else FP32, child)
    ddp = DDP(plain, broadcast_buffers=False)
    model = FSDP(
        module,
        auto_wrap_policy=policy,
        mixed_precision=dataclasses.replace(LOW, _module_classes_to_ignore=classes),
        use_orig_params=use_orig_params,
        sharding_strategy=strategy,
    )
    optims = [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in (plain, model)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        x = torch.randn(6, DIM, generator=generator)
        losses = square(ddp, x), square(model, x)
        assert_close(losses[1], losses[0], "loss")
        assert module.between.dtype == BF16
        for loss, optim in zip(losses, optims, strict=True):
            loss.backward()
            optim.step()
            optim.zero_grad()
    expected, state = plain.state_dict(), model.state_dict()
    assert list(state) == list(expected)
    for name, buffer in model.named_buffers():
        assert "running" not in name or buffer.dtype == FP32
    for name, value in expected.items():
        assert state[name].dtype == value.dtype
        assert torch.allclose(state[name].double(), value.double(), rtol=1e-4, atol=1e-5), name


class Fussy(nn.Module):
    """A class without parameters that is to be ignored with everything inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = OnlyBuffers()
        self.register_buffer("own", torch.linspace(0.1, 0.8, DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype, self.own.dtype, self.inside.offset.dtype
        return self.inside(x) + self.own


@on_ranks(1)
def test_ignored_module_classes_are_ignored_with_their_submodules() -> None:
    build = partial(chain, partial(nn.Linear, DIM, DIM), Fussy)
    precision = dataclasses.replace(LOW, _module_classes_to_ignore=[Fussy])
    for policy in (None, ModuleWrapPolicy({nn.Linear}), ModuleWrapPolicy({nn.Sequential})):
        model = FSDP(chain(build, build), auto_wrap_policy=policy, mixed_precision=precision)
        assert model(torch.ones(1, DIM)).dtype == BF16
        seen = [m.seen for m in model.modules() if isinstance(m, Fussy)]
        assert seen == [(FP32, FP32, FP32)] * 2


# -- FSDP_USE_FULL_PREC_IN_EVAL


@contextlib.contextmanager
def _environment(value: str = "1") -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", value)
        yield


def _evaluating(
    build: Callable[[], nn.Module], precision: MixedPrecision = LOW, **options: Any
) -> FSDP:
    with _environment():
        return _wrapped(build, precision, **options)


def _unsharded(model: FSDP, build: Callable[[], nn.Module]) -> nn.Module:
    """A copy in float32 with the values of ``model`` now. Collective."""
    plain = build()
    plain.load_state_dict(model.state_dict())
    return plain


def _assert_at_rest(model: FSDP) -> None:
    for group in model._runtime.groups:
        assert group_nbytes(group) == 0, f"{group.name} holds {group_nbytes(group)} bytes"


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "use_orig_params"),
    [(3, FULL_SHARD, True), (2, SHARD_GRAD_OP, False), (2, SHARD_GRAD_OP, True)],
)
@on_ranks("num_ranks")
def test_full_precision_eval_is_bit_equal_to_unsharded(
    num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {
        "sharding_strategy": strategy,
        "use_orig_params": use_orig_params,
        "allow_unused_units": use_orig_params,
    }
    build = partial(Stack, 2)
    model = _evaluating(build, **options)
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        plain, x = _unsharded(model, build), vectors(generator)
        for context in (torch.no_grad, torch.inference_mode):
            model.eval()
            with context():
                assert torch.equal(model(x), plain(x)), f"step {step}: not the output in float32"
            if strategy is not ShardingStrategy.SHARD_GRAD_OP or use_orig_params:
                _assert_at_rest(model)  # others keep the parameters for further evaluations
            model.train()
        square(model, vectors(generator)).backward()
        _assert_at_rest(model)
        optim.step()
        optim.zero_grad()


def _adds_gradients_of_both_modes(model: FSDP, x: Tensor) -> None:
    """A parameter has gradients in two dtypes when post-backward takes them."""
    grads, losses = [], []
    for mode in (True, False):
        model.train(mode)
        square(model, x).backward()
        grads.append(_whole(model))
        model.zero_grad()
        losses.append(square(model, x))
    model.train()
    (losses[0].float() + losses[1]).backward()
    for name, found in _whole(model).items():
        one, other = grads[0][name], grads[1][name]
        rounding = float((one.abs() + other.abs()).max()) * torch.finfo(BF16).eps
        torch.testing.assert_close(found, one + other, rtol=0.0, atol=rounding, msg=name)
    model.zero_grad()


@each_value
@both_forms
@pytest.mark.parametrize(
    ("num_ranks", "strategy"), [(1, FULL_SHARD), (2, FULL_SHARD), (2, SHARD_GRAD_OP)]
)
@pytest.mark.parametrize("reduce_dtype", [FP32, BF16])
@on_ranks("num_ranks")
def test_evaluation_with_gradients_computes_them_in_full_precision(
    reduce_dtype: torch.dtype, num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """They are still reduced in ``reduce_dtype``."""
    options = {"use_orig_params": use_orig_params}
    build = partial(Stack, 2)
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=reduce_dtype)
    model = _evaluating(build, precision, sharding_strategy=strategy, **options)
    plain = _unsharded(model, build)
    for mode in (False, True, False):
        model.train(mode)
        x = [vectors(torch.Generator().manual_seed(rank)) for rank in range(dist.get_world_size())]
        loss = square(model, x[dist.get_rank()])
        loss.backward()
        grads = _whole(model)
        model.zero_grad()
        if mode:
            continue
        expected = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
        for each in x:
            plain.zero_grad()
            square(plain, each).backward()
            for name, p in plain.named_parameters():
                expected[name] += p.grad.to(reduce_dtype).float() / len(x)
        for name, value in expected.items():
            assert_close(grads[name], value, f"gradient of {name}")
        _assert_at_rest(model)
    _adds_gradients_of_both_modes(model, x[dist.get_rank()])


@on_ranks(2)
def test_evaluation_in_full_precision_uses_buffers_in_full_precision() -> None:
    """Buffers that bf16 could not hold, and a batch norm whose statistics are used."""
    linear, norm = partial(nn.Linear, DIM, DIM), partial(nn.BatchNorm1d, DIM)
    for build in (Shifted, partial(chain, linear, norm, Shifted)):
        model, x = _evaluating(build), torch.randn(4, DIM)
        for when in ("before any training", "after a step"):
            plain = _unsharded(model, build).eval()
            model.eval()
            with torch.no_grad():
                assert torch.equal(model(x), plain(x)), when
            model.train()
            square(model, x).backward()
            model.zero_grad()
        for mode, dtype in ((False, FP32), (True, BF16)):
            model.train(mode)
            model(x)
            assert {b.dtype for n, b in model.named_buffers() if "shift" in n} == {dtype}


class Sees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(DIM, DIM), Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.seen = self.linear.weight.dtype, x.dtype
        dtype = BF16 if self.inner.training else FP32
        return self.inner(h.to(dtype)).to(h.dtype)


@each_value
@both_forms
@pytest.mark.parametrize(
    ("num_ranks", "strategy"), [(1, FULL_SHARD), (2, FULL_SHARD), (2, SHARD_GRAD_OP)]
)
@on_ranks("num_ranks")
def test_each_unit_computes_in_the_precision_of_its_own_mode(
    num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = _evaluating(Sees, sharding_strategy=strategy, use_orig_params=use_orig_params)
    x = vectors(torch.Generator().manual_seed(dist.get_rank()))
    optim = torch.optim.SGD(model.parameters(), 0.1)
    for outer, inner in [(True, False), (False, True), (True, True), (False, False), (True, False)]:
        model.train(outer)
        model.module.inner.train(inner)
        plain = _unsharded(model, Sees)
        outer_dtype, inner_dtype = (BF16 if mode else FP32 for mode in (outer, inner))
        plain.linear.to(outer_dtype)
        plain.inner.to(inner_dtype)
        plain.inner.train(inner)
        expected = plain(x.to(outer_dtype))
        got = model(x)
        assert got.dtype == expected.dtype == outer_dtype
        assert torch.equal(got, expected), f"outer {outer}, inner {inner}"
        assert model.module.seen == (outer_dtype, outer_dtype)
        model.train(not outer)  # the mode in backward has no effect
        got.float().pow(2).mean().backward()
        expected.float().pow(2).mean().backward()
        grads = _whole(model)
        for name, p in plain.named_parameters():
            total = p.grad.float()
            dist.all_reduce(total)
            assert_close(
                grads[name], total / dist.get_world_size(), f"outer {outer}, inner {inner}: {name}"
            )
        _assert_at_rest(model)
        optim.step()
        optim.zero_grad()


@pytest.mark.parametrize("allow_unused_units", [False, True])
@on_ranks(2)
def test_eval_between_forward_and_backward_does_not_change_recomputation(
    allow_unused_units: bool,
) -> None:
    build = partial(RecomputesBlocks, Block, False, num_blocks=2)
    model = _evaluating(build, allow_unused_units=allow_unused_units)
    plain = _unsharded(model, build)
    low = copy.deepcopy(plain).bfloat16()
    x = vectors(torch.Generator().manual_seed(dist.get_rank()))
    trained = square(model, x)
    model.eval()
    evaluated = square(model, x * 2)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert torch.equal(evaluated, square(plain, x * 2))
    evaluated.backward()
    model.train()
    trained.backward()
    square(plain, x * 2).backward()
    square(low, x.bfloat16()).backward()
    got = _whole(model)
    for (name, p), q in zip(plain.named_parameters(), low.parameters(), strict=True):
        total = p.grad + q.grad.float()
        dist.all_reduce(total)
        assert_close(got[name], total / dist.get_world_size(), name)
    _assert_at_rest(model)


@on_ranks(1)
def test_environment_variable_is_read_when_the_model_is_wrapped() -> None:
    found = []
    for value in ("0", "", "true", "1"):
        with _environment(value):
            model = FSDP(nn.Linear(DIM, DIM), mixed_precision=MixedPrecision(param_dtype=BF16))
        model.eval()
        with torch.no_grad():
            found.append(model(torch.ones(1, DIM)).dtype)
    assert found == [BF16, BF16, BF16, FP32]


@pytest.mark.parametrize("grad_dtype", [torch.float32, None])
@pytest.mark.parametrize("front_end", ["flat", "original", "rows"])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_gradients_have_the_grad_dtype_of_their_parameters(
    ranks: int, front_end: str, grad_dtype: torch.dtype | None
) -> None:
    model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in "abc")).bfloat16()
    for layer in model:
        nn.init.eye_(layer.weight)
    model[0].weight.grad_dtype = grad_dtype
    if front_end == "rows":
        fully_shard(model)
    else:
        model = FSDP(model, use_orig_params=front_end == "original")
    for values, syncs in (((256.0, 1.0, -256.0), True), ((256.0, 1.0, -255.0), False)):
        for value in values:
            with contextlib.nullcontext() if syncs or value < 0 else no_sync(model):
                model(torch.full((1, 4), value, dtype=torch.bfloat16)).sum().backward()
    grads = whole_gradients(model)
    found = {name: (grad.dtype, grad.max().item()) for name, grad in grads.items()}
    rounded = torch.bfloat16, found["1.weight"][1]
    assert found == {
        "0.weight": rounded if grad_dtype is None else (torch.float32, 3.0),
        "1.weight": rounded,
        "2.weight": rounded,
    }
    assert rounded[1] != 3.0
