"""Every field of MixedPrecision: the dtypes for computing, reducing, stepping and saving."""

from __future__ import annotations

import contextlib
import copy
import itertools
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
from torch.utils.checkpoint import checkpoint

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy, StateDictType
from fsdp_compat._comm.transport import Kind
from fsdp_compat._engine.dtypes import tensors_in
from fsdp_compat.wrap import CustomPolicy, ModuleWrapPolicy
from tests.support.beside_torch import assert_as_torch, trained
from tests.support.models import DIM, Block, Named, Record, Stack, chain
from tests.support.pairwise import each_value, pairs
from tests.support.parity import (
    Pair,
    assert_close,
    backward,
    both_forms,
    make_pair,
    square,
    vectors,
    whole_gradients,
)
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import sample

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
NO_SHARD, HYBRID = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD
BOTH = (False, True)


class GradientIs(nn.Module):
    """The gradient of ``weight`` is the input, bit for bit."""

    def __init__(self, numel: int = 8, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.computed_in = self.weight.dtype
        return (self.weight * x.to(self.weight.dtype)).sum()


def _whole(model: FSDP) -> dict[str, Tensor]:
    """The full gradients by name. Collective."""
    return {name: grad for name, grad in whole_gradients(model).items() if grad is not None}


def _meshed(strategy: ShardingStrategy) -> dict[str, Any]:
    if strategy is not HYBRID:
        return {"sharding_strategy": strategy}
    return {
        "sharding_strategy": strategy,
        "device_mesh": init_device_mesh("cpu", (2, dist.get_world_size() // 2)),
    }


# -- param_dtype and reduce_dtype


def _of_dtype(dtype: torch.dtype) -> nn.Module:
    return Stack(2).to(dtype)


def _compare_gradients(pair: Pair, dtype: torch.dtype) -> None:
    got, eps = _whole(pair.model), torch.finfo(dtype).eps
    for name, p in pair.plain.named_parameters():
        assert torch.allclose(got[name], p.grad, rtol=eps, atol=1e-7), name


@pytest.mark.parametrize(
    ("number", "num_ranks", "strategy", "shard_dtype", "use_orig_params"),
    sample(
        [
            (0, 1, FULL_SHARD, FP32, True),
            (0, 2, FULL_SHARD, FP32, False),
            (1, 2, FULL_SHARD, FP32, True),
            (2, 3, FULL_SHARD, BF16, False),
            (3, 2, SHARD_GRAD_OP, FP64, True),
            (4, 3, NO_SHARD, FP32, False),
            (0, 4, HYBRID, FP32, True),
            (1, 4, HYBRID, FP32, False),
        ],
        *(1, 2, 3, 5, 6),
    ),
)
@on_ranks("num_ranks")
def test_param_dtype_and_reduce_dtype_are_independent(
    number: int,
    num_ranks: int,
    strategy: ShardingStrategy,
    shard_dtype: torch.dtype,
    use_orig_params: bool,
) -> None:
    """Compare with a loop that casts weights, inputs and gradients by hand and adds the gradients
    up in float32 or more. Every two dtypes are combined in one of five calls, by ``number``."""
    dtypes = (None, BF16, FP16, FP32, FP64)
    for index, param_dtype in enumerate(dtypes):
        reduce_dtype = dtypes[(number - index) % 5]
        compute = param_dtype or shard_dtype
        travels = reduce_dtype or compute
        what = f"param_dtype {param_dtype}, reduce_dtype {reduce_dtype}"
        precision = MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        build = partial(_of_dtype, shard_dtype)
        pair = make_pair(
            build,
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
    ]
    # With NO_SHARD torch averages an average once more, and rounds once more.
    patterns = {"FULL_SHARD": "sas", "SHARD_GRAD_OP": "sas", "NO_SHARD": "sss"}
    for strategy, precision, original in pairs(list(patterns), precisions, BOTH):
        options = {"strategy": strategy, "precision": precision, "use_orig_params": original}
        assert_as_torch(partial(trained, pattern=patterns[strategy], **options), options)


@on_ranks(2)
def test_optimizer_steps_float32_parameters_with_bf16_gradients_like_torch() -> None:
    low = {"param_dtype": BF16, "keep_low_precision_grads": True}
    for original, momentum, strategy in pairs(BOTH, (0.0, 0.9), ("FULL_SHARD", "NO_SHARD")):
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
        options = {"strategy": strategy, "optimizer": optimizer, "use_orig_params": original}
        assert_as_torch(partial(trained, precision=low, **options), options)


# -- sums


def _averages(
    precision: MixedPrecision,
    given: list[float],
    strategy: ShardingStrategy,
    num_backwards: int,
    dtype: torch.dtype = FP32,
    **more: Any,
) -> list[float]:
    """The average of gradients, of which rank r has given[r] everywhere; after several
    backwards."""
    model = FSDP(GradientIs(dtype=dtype), mixed_precision=precision, **_meshed(strategy), **more)
    x = torch.full((8,), given[dist.get_rank()])
    for _ in range(num_backwards):
        model(x).backward()
    (grad,) = _whole(model).values()
    assert grad.dtype == dtype
    return sorted(set(grad.tolist()))


EXACT = [(FULL_SHARD, False), (FULL_SHARD, True), (SHARD_GRAD_OP, False)]
ROUNDED_ONCE = [
    (NO_SHARD, False),
    (HYBRID, False),
    (HYBRID, True),
]  # the sum that replicas send back


@pytest.mark.parametrize(("strategy", "use_orig_params"), EXACT + ROUNDED_ONCE)
@pytest.mark.parametrize(
    ("reduce_dtype", "given", "num_backwards", "expected"),
    [
        # 256 + 1 is 256 in bfloat16: a sum in it loses the three small ones, and the average is 64.
        (BF16, [256.0, 1.0, 1.0, 1.0], 1, 64.75),
        # The sum of four is 120,000, beyond 65,504.
        (FP16, [30000.0] * 4, 1, 30000.0),
        # Accumulated on the shard, and larger than the largest fp16 number.
        (FP16, [30000.0] * 4, 3, 90000.0),
    ],
)
def test_gradients_are_added_up_in_float32(
    reduce_dtype: torch.dtype,
    given: list[float],
    num_backwards: int,
    expected: float,
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> None:
    precision = MixedPrecision(param_dtype=FP32, reduce_dtype=reduce_dtype)
    options = {"use_orig_params": use_orig_params}
    got = run_ranks(4, _averages, precision, given, strategy, num_backwards, **options)
    assert got == [got[0]] * 4
    rounded = expected == 64.75 and (strategy, use_orig_params) in ROUNDED_ONCE
    assert got[0] in ([[64.5], [64.75], [65.0]] if rounded else [[expected]])


@each_value
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD, HYBRID])
@pytest.mark.parametrize("reduce_dtype", [None, BF16, FP32])
def test_gradients_of_a_bf16_model_are_added_up_in_float32(
    reduce_dtype: torch.dtype | None, strategy: ShardingStrategy
) -> None:
    precision = MixedPrecision(reduce_dtype=reduce_dtype)
    got = run_ranks(4, _averages, precision, [256.0, 1.0, 1.0, 1.0], strategy, 1, BF16)
    assert got == [got[0]] * 4
    assert got[0] in ([64.5], [65.0])  # the neighbours of 64.75


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_fp16_gradients_that_are_powers_of_two_are_averaged_without_any_error(
    num_ranks: int,
) -> None:
    precision = MixedPrecision(param_dtype=FP32, reduce_dtype=FP16)
    given = [1024.0, 2.0, -512.0, 0.25][:num_ranks]
    expected = float(torch.tensor(sum(given), dtype=FP32) / num_ranks)
    assert (
        run_ranks(num_ranks, _averages, precision, given, FULL_SHARD, 1) == [[expected]] * num_ranks
    )


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


def _keeps_grads_in(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, **options: Any
) -> set[torch.dtype]:
    """Return the dtypes of ``.grad`` that the optimizer sees: with, without and between
    synchronisation."""
    precision = MixedPrecision(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, keep_low_precision_grads=True
    )
    torch.manual_seed(0)
    model = FSDP(
        Stack(2), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision, **options
    )
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = set()
    for step in range(2):
        if step:
            with model.no_sync():
                square(model, torch.randn(4, DIM)).backward()
            found |= {p.grad.dtype for p in model.parameters() if p.grad is not None}
        for _ in range(1 + step):
            square(model, torch.randn(4, DIM)).backward()
        found |= {p.grad.dtype for p in model.parameters() if p.grad is not None}
        grads = _whole(model)
        assert len(grads) == len(list(Stack(2).parameters()))
        norm = torch.linalg.vector_norm(
            torch.cat([grad.float().flatten() for grad in grads.values()])
        )
        given = model.clip_grad_norm_(1e9)
        assert abs(given.float() - norm) <= torch.finfo(given.dtype).eps * norm, (
            "norm, rounded to the dtype of the gradients"
        )
        model.clip_grad_norm_(float(norm) / 2)
        halved = _whole(model)
        for name, grad in grads.items():
            assert torch.allclose(halved[name].float(), grad.float() / 2, rtol=1e-2, atol=1e-6), (
                name
            )
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optim.step()
        assert all(p.dtype == FP32 for p in model.parameters())
        assert all(value.dtype == FP32 for value in model.state_dict().values())
        assert any(
            not torch.equal(before[name], value) for name, value in model.state_dict().items()
        )
        optim.zero_grad(set_to_none=bool(step % 2))
    return found


@each_value
@both_forms
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
def test_keep_low_precision_grads_keeps_the_reduce_dtype(
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    expected: torch.dtype,
    use_orig_params: bool,
) -> None:
    for num_ranks, strategy in (
        (2, FULL_SHARD),
        (2, NO_SHARD) if use_orig_params else (1, FULL_SHARD),
    ):
        options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        assert (
            run_ranks(num_ranks, _keeps_grads_in, param_dtype, reduce_dtype, **options)
            == [{expected}] * num_ranks
        )


@both_forms
@on_ranks(2)
def test_low_precision_gradients_work_with_frozen_parts_and_copies(
    use_orig_params: bool,
) -> None:
    precision = MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
    torch.manual_seed(0)
    module = Stack(2)
    module.blocks[0].requires_grad_(False)
    module.blocks[1].up.weight.requires_grad_(False)
    square(module, torch.ones(2, DIM)).backward()  # gradients that exist before wrapping
    model = FSDP(
        module,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=precision,
        use_orig_params=use_orig_params,
    )
    model.zero_grad()
    second = copy.deepcopy(model)
    x = torch.ones(2, DIM) * (1 + dist.get_rank())
    for each in (model, second):
        square(each, x).backward()
    one, other = _whole(model), _whole(second)
    assert one.keys() == other.keys()
    assert not any(name.startswith("blocks.0") or name == "blocks.1.up.weight" for name in one)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    for p, q in zip(model.parameters(), second.parameters(), strict=True):
        assert (p.grad is None) == (not p.requires_grad or not p.numel())
        if p.grad is not None:
            assert p.grad.dtype == q.grad.dtype == BF16
    if not use_orig_params:
        return
    for p in model.blocks[0].parameters():  # unfrozen later
        p.requires_grad_(True)
    model.zero_grad()
    square(model, x).backward()
    assert {p.grad.dtype for p in model.blocks[0].parameters() if p.grad is not None} == {BF16}


@on_ranks(2)
def test_low_precision_gradients_can_be_changed_in_summon_full_params() -> None:
    for use_orig_params in (False, True):
        precision = MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
        model = FSDP(GradientIs(), mixed_precision=precision, use_orig_params=use_orig_params)
        model(torch.arange(8.0)).backward()
        with FSDP.summon_full_params(model, with_grads=True):
            (p,) = model.parameters()
            assert p.grad.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
            p.grad.mul_(2)
        (grad,) = _whole(model).values()
        assert grad.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BF16}


# -- inputs


class Takes(nn.Module):
    """Records the dtypes of its inputs; passes on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.seen: list[torch.dtype] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = [t.dtype for t in tensors_in((args, kwargs))]
        x = next(tensors_in((args, kwargs)))
        return self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)


class PassesOn(Takes):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Takes()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) + self.inner(
            torch.ones(2, DIM, dtype=FP64), index=torch.arange(2)
        )


def _casts_inputs(
    root: bool, nested: bool, param_dtype: torch.dtype | None
) -> tuple[list[torch.dtype], list[torch.dtype]]:
    precision = MixedPrecision(
        param_dtype=param_dtype,
        reduce_dtype=FP32,
        cast_root_forward_inputs=root,
        cast_forward_inputs=nested,
    )
    module = PassesOn()
    inner = module.inner
    model = FSDP(
        module, auto_wrap_policy=CustomPolicy(lambda m: m is inner), mixed_precision=precision
    )
    x, ints, flags = torch.ones(2, DIM), torch.arange(3), torch.tensor([True])
    high = torch.ones(1, dtype=FP64)
    model(
        x,
        [ints, {"a": (high, None, "text", 3)}],
        named=Named(x, [flags, 2.5]),
        record=Record({"b": [x]}, "label"),
    )
    assert (x.dtype, ints.dtype, high.dtype) == (FP32, torch.int64, FP64)
    return module.seen, inner.seen


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
def test_floating_point_inputs_are_cast_if_requested(
    root: bool,
    nested: bool,
    param_dtype: torch.dtype | None,
    at_root: torch.dtype | None,
    inside: torch.dtype,
) -> None:
    expected = [FP32, torch.int64, FP64, FP32, torch.bool, FP32]
    if at_root is not None:
        expected = [at_root if dtype.is_floating_point else dtype for dtype in expected]
    assert run_ranks(1, _casts_inputs, root, nested, param_dtype) == [
        (expected, [inside, torch.int64])
    ]


@on_ranks(2)
def test_inputs_that_are_cast_get_gradients_of_their_own_dtype() -> None:
    """The cast is part of the graph: the user's tensor gets a gradient of its own dtype."""
    model = FSDP(GradientIs(), mixed_precision=MixedPrecision(param_dtype=BF16))
    with FSDP.summon_full_params(model):
        model.module.weight.data.copy_(torch.arange(8.0))
    x = torch.ones(8, requires_grad=True)
    model(x).backward()
    assert x.grad is not None
    assert x.grad.dtype == FP32
    assert x.grad.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert model.module.computed_in == BF16


# -- buffers


class Buffers(nn.Module):
    """Buffers of several dtypes, one shared by two modules, in modules with and without
    parameters."""

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


def _two(**options: Any) -> tuple[nn.Module, FSDP]:
    torch.manual_seed(0)
    plain = nn.Sequential(Buffers(), Buffers(2.0))
    module = copy.deepcopy(plain)
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({Buffers}))
    return plain, FSDP(module, ignored_modules=[module[0].ignored, module[1].ignored], **options)


CAST = {
    "table": BF16,
    "count": torch.int64,
    "high": BF16,
    "fleeting": BF16,
    "only.offset": BF16,
    "ignored.offset": FP32,
}


def assert_close_bf16(got: Tensor, expected: Tensor) -> None:
    assert torch.allclose(got, expected, rtol=torch.finfo(BF16).eps)


@on_ranks(2)
def test_buffers_are_cast_for_computation_and_saved_in_their_own_dtype() -> None:
    plain, model = _two(mixed_precision=MixedPrecision(param_dtype=BF16, buffer_dtype=BF16))
    inner = model.module[0].module
    assert (
        inner.only(torch.zeros(1, DIM, dtype=BF16)).dtype == BF16
    )  # called directly, before any forward
    for _ in range(2):
        backward(square(model, torch.ones(2, DIM)))
        assert inner.seen == CAST
    low = copy.deepcopy(plain).bfloat16()
    for each in low:
        each.count = torch.tensor(3)
    assert torch.equal(model(torch.ones(2, DIM)), low(torch.ones(2, DIM, dtype=BF16)))

    dtypes = {name: value.dtype for name, value in plain.state_dict().items()}
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
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
            assert_close_bf16(after["1.high"], changed["1.high"])
            assert_close_bf16(after["1.only.offset"], changed["1.only.offset"])
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
    _, model = _two(mixed_precision=MixedPrecision(buffer_dtype=FP64))
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


class Counts(nn.Module):
    """Adds to a buffer in place."""

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("total", shared)
        self.register_buffer("alias", shared)

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(1)
        return self.linear(x) + self.alias


@on_ranks(2)
def test_a_buffer_that_several_modules_share_stays_shared() -> None:
    shared = torch.zeros(())
    module = nn.Sequential(Counts(shared), Counts(shared))
    model = FSDP(
        module,
        auto_wrap_policy=ModuleWrapPolicy({Counts}),
        mixed_precision=MixedPrecision(param_dtype=BF16, buffer_dtype=BF16),
    )
    for _ in range(3):
        model(torch.ones(2, DIM))
    first, second = (unit.module for unit in model.module)
    assert [b.dtype for b in (first.total, first.alias, second.total, second.alias)] == [BF16] * 4
    assert first.total is first.alias
    assert first.total is second.total
    assert float(first.total) == 6
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            state = model.state_dict()
        found = {
            name: (value.dtype, float(value))
            for name, value in state.items()
            if "linear" not in name
        }
        assert found == dict.fromkeys(("0.total", "0.alias", "1.total", "1.alias"), (FP32, 6.0))


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
    "by index": lambda m: m.total.__setitem__(slice(None), m.total + 1),
    "by data": lambda m: m.total.data.add_(1),
    "by new data": lambda m: setattr(m.total, "data", m.total + 1),
    "another tensor": lambda m: setattr(m, "total", m.total + 1),
    "another tensor of its first dtype": lambda m: setattr(m, "total", m.total.float() + 1),
    "by numpy": _by_numpy,
    "by the ranks together": _by_the_ranks_together,
    "in inference mode": _in_inference_mode,
}


class Writes(nn.Module):
    """Adds 1 to a buffer in every forward, in one of the usual ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(DIM, DIM), how
        self.register_buffer("total", torch.full((2,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.total.dtype
        if not self.training:
            return self.linear(x.to(self.linear.weight.dtype)) + self.total[0]
        with torch.no_grad():
            WRITTEN[self.how](self)
        return self.linear(x) + self.total[0].to(x.dtype)


@pytest.mark.parametrize("how", WRITTEN)
@on_ranks(2)
def test_forward_writes_to_cast_buffers_are_saved_and_used_in_eval(how: str) -> None:
    torch.manual_seed(0)
    with _environment():
        model = FSDP(nn.Sequential(Writes(how)), mixed_precision=LOW)
    for expected in (1.1, 2.1, 3.1):
        square(model, torch.ones(2, DIM)).backward()
        if "another" not in how:
            assert model.module[0].total.dtype == BF16
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
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
    plain, model = _two(mixed_precision=MixedPrecision(param_dtype=BF16, buffer_dtype=BF16))
    expected = plain.state_dict()
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            state = model.state_dict()
        for name in (
            "0.table",
            "1.table",
            "0.only.offset",
            "1.high",
            "0.count",
            "0.ignored.offset",
        ):
            assert torch.equal(state[name], expected[name]), f"{name} in {kind.name}"


# -- _module_classes_to_ignore


class LowLinear(nn.Linear):
    """A hand-written equivalent of a unit in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(BF16), self.weight.to(BF16), self.bias.to(BF16))


class HighNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class HighLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class Norms(nn.Module):
    def __init__(self, by_hand: bool, affine: bool, layer_norm: bool) -> None:
        super().__init__()
        linear, norm = (LowLinear, HighNorm) if by_hand else (nn.Linear, nn.BatchNorm1d)
        self.first, self.norm = linear(DIM, DIM), norm(DIM, affine=affine)
        self.second, self.last = linear(DIM, DIM), norm(DIM)
        self.layer = (
            (HighLayerNorm if by_hand else nn.LayerNorm)(DIM, elementwise_affine=affine)
            if layer_norm
            else nn.Identity()
        )
        self.head = linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.between = self.norm(self.first(x)).tanh()
        return self.head(self.layer(self.last(self.second(self.between))))


def _batch_norms_as_with_ddp(
    affine: bool, policy: bool, layer_norm: bool, use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    torch.manual_seed(0)
    plain = Norms(True, affine, layer_norm)
    module = Norms(False, affine, layer_norm)
    module.load_state_dict(plain.state_dict())
    ddp = DDP(plain, broadcast_buffers=False)
    classes = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)
    precision = MixedPrecision(
        param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=BF16, _module_classes_to_ignore=classes
    )
    model = FSDP(
        module,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}) if policy else None,
        mixed_precision=precision,
        use_orig_params=use_orig_params,
        sharding_strategy=strategy,
    )
    optims = (
        torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9),
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    )
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


@each_value
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@pytest.mark.parametrize("policy", [False, True])
@on_ranks(2)
def test_norms_compute_in_float32_and_keep_the_running_statistics_of_ddp(
    policy: bool, strategy: ShardingStrategy
) -> None:
    cases = [
        (affine, policy, layer, affine is layer, strategy)
        for affine, layer in itertools.product((False, True), repeat=2)
        if (affine is layer) is (policy is (strategy is NO_SHARD))  # covers every pair
    ]
    for case in cases:
        _batch_norms_as_with_ddp(*case)


class Fussy(nn.Module):
    """A class without parameters that is to be ignored with everything inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = OnlyBuffers()
        self.register_buffer("own", torch.linspace(0.1, 0.8, DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype, self.own.dtype, self.inside.offset.dtype
        return self.inside(x) + self.own


class HoldsFussy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fussy = nn.Linear(DIM, DIM), Fussy()

    def forward(self, x: Tensor) -> Tensor:
        return self.fussy(self.linear(x))


@on_ranks(1)
def test_ignored_module_classes_are_ignored_with_their_submodules() -> None:
    for policy in (None, ModuleWrapPolicy({nn.Linear}), ModuleWrapPolicy({HoldsFussy})):
        precision = MixedPrecision(
            param_dtype=BF16, buffer_dtype=BF16, _module_classes_to_ignore=[Fussy]
        )
        model = FSDP(
            nn.Sequential(HoldsFussy(), HoldsFussy()),
            auto_wrap_policy=policy,
            mixed_precision=precision,
        )
        assert model(torch.ones(1, DIM)).dtype == BF16
        seen = [m.seen for m in model.modules() if isinstance(m, Fussy)]
        assert seen == [(FP32, FP32, FP32)] * 2


# -- FSDP_USE_FULL_PREC_IN_EVAL


class Table(nn.Module):
    """A buffer that bf16 cannot hold, beside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("table", torch.linspace(0.1, 0.9, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.table.to(x.dtype)


LOW = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=BF16)


@contextlib.contextmanager
def _environment(value: str = "1") -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", value)
        yield


def _evaluating(
    build: Callable[[], nn.Module], precision: MixedPrecision | None = None, **options: Any
) -> FSDP:
    torch.manual_seed(0)
    with _environment():
        return FSDP(
            build(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=precision or LOW,
            **options,
        )


def _unsharded(model: FSDP, build: Callable[[], nn.Module]) -> nn.Module:
    """A copy in float32 with the values of ``model`` now. Collective."""
    plain = build()
    plain.load_state_dict(model.state_dict())
    return plain


def _assert_at_rest(model: FSDP) -> None:
    for group in model._runtime.groups:
        assert group.resident_nbytes == 0, f"{group.name} holds {group.resident_nbytes} bytes"


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "use_orig_params"),
    sample(
        [
            (1, FULL_SHARD, True),
            (2, FULL_SHARD, False),
            (3, FULL_SHARD, True),
            (2, SHARD_GRAD_OP, False),
            (2, SHARD_GRAD_OP, True),
            (2, NO_SHARD, False),
        ],
        0,
        3,
        4,
    ),
)
@on_ranks("num_ranks")
def test_full_precision_eval_is_bit_equal_to_unsharded(
    num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    build = partial(Stack, 2)
    model = _evaluating(build, **options)
    torch.manual_seed(0)
    low = FSDP(
        build(), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=LOW, **options
    )  # never in full precision
    optims = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, low)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(4, DIM, generator=generator)
    for step in range(4):
        plain = _unsharded(model, build)
        for context in (torch.no_grad, torch.inference_mode) if step else (torch.no_grad,):
            model.eval()
            with context():
                assert torch.equal(model(x), plain(x)), (
                    f"step {step}, {context.__name__}: not the output in float32"
                )
            _assert_at_rest(model)
            model.train()
        batch = torch.randn(4, DIM, generator=generator)
        losses = []
        for each in (model, low):
            loss = square(each, batch)
            if step == 1 and each is model:  # evaluation between forward and backward
                model.eval()
                with torch.no_grad():
                    assert torch.equal(model(x), plain(x))
                model.train()
            if step == 2 and each is model:  # in evaluation mode when backward comes
                model.eval()
            losses.append(backward(loss))
            model.train()
        assert torch.equal(losses[0], losses[1])
        one, other = _whole(model), _whole(low)
        assert one.keys() == other.keys()
        assert len(one) == len(list(plain.parameters()))
        for name, value in one.items():
            assert torch.equal(value, other[name]), f"step {step}: gradient of {name}"
        _assert_at_rest(model)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    low.eval()
    with torch.no_grad():
        assert low(x).dtype == BF16


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
    """In evaluation mode gradients are computed in float32, and still reduced in
    ``reduce_dtype``."""
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
    for build in (
        Table,
        partial(chain, partial(nn.Linear, DIM, DIM), partial(nn.BatchNorm1d, DIM), Table),
    ):
        plain = build()
        plain(torch.randn(4, DIM))
        torch.manual_seed(0)
        with _environment():
            model = FSDP(
                copy.deepcopy(plain),
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                mixed_precision=LOW,
            )
        x = torch.randn(4, DIM)
        for each in (plain, model):
            each.eval()
        with torch.no_grad():
            assert torch.equal(model(x), plain(x)), "before any training"
        model.train()
        square(model, x).backward()
        model.zero_grad()
        plain = _unsharded(model, build).eval()
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(x), plain(x)), "after a step"
        tables = [b for name, b in model.named_buffers() if "table" in name]
        assert [b.dtype for b in tables] == [FP32]
        assert torch.equal(tables[0], torch.linspace(0.1, 0.9, DIM))
        model.train()
        model(x)
        assert [b.dtype for name, b in model.named_buffers() if "table" in name] == [BF16]


class Sees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(DIM, DIM), Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.seen = self.linear.weight.dtype, x.dtype
        return self.inner(h.to(self.inner_dtype)).to(h.dtype)

    @property
    def inner_dtype(self) -> torch.dtype:
        return FP32 if not self.inner.training else BF16


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


class Recomputes(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("allow_unused_units", [False, True])
@on_ranks(2)
def test_eval_between_forward_and_backward_does_not_change_recomputation(
    allow_unused_units: bool,
) -> None:
    """Recomputation after an evaluation; two forwards of different precision before their
    backwards."""
    build = partial(Recomputes, 2)
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


def _switches_mode_before_backward(evaluation: bool) -> dict[str, list[float]]:
    model = _evaluating(partial(Stack, 2), allow_unused_units=True)
    x = vectors(torch.Generator().manual_seed(dist.get_rank()))
    loss = square(model, x)
    model.train(not evaluation)
    loss.backward()
    return {name: value.flatten().tolist() for name, value in _whole(model).items()}


def test_mode_change_before_backward_has_no_effect_with_unused_units() -> None:
    assert run_ranks(2, _switches_mode_before_backward, True) == run_ranks(
        2, _switches_mode_before_backward, False
    )


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
