"""Every field of MixedPrecision: the dtypes for computing, reducing, stepping and saving."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy
from fsdp_compat.wrap import CustomPolicy
from tests.support.beside_torch import assert_as_torch, trained
from tests.support.cases import about
from tests.support.fully_sharded import sharded_as
from tests.support.messages import Messages
from tests.support.models import DIM, GradientIs, Named, Record, chain
from tests.support.pairwise import each_value, singles
from tests.support.parity import (
    assert_close,
    backward,
    both_forms,
    no_sync,
    square,
    whole_gradients,
)
from tests.support.ranks import on_ranks
from tests.support.same_host import MESSAGES

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID, _ = ShardingStrategy


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """The full gradients by name. Collective."""
    return {name: grad for name, grad in whole_gradients(model).items() if grad is not None}


def _grad_dtypes(model: nn.Module) -> set[torch.dtype]:
    return {p.grad.dtype for p in model.parameters() if p.grad is not None}


def _meshed(strategy: ShardingStrategy) -> dict[str, Any]:
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half)) if strategy is HYBRID else None
    return {"sharding_strategy": strategy, "device_mesh": mesh}


# -- which dtype each field sets


class Probe(nn.Module):
    """Notes the dtypes that its forward computes with, and gives an inner unit float64 inputs."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(DIM)), inner
        self.register_buffer("table", torch.linspace(0.1, 0.9, DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype, self.weight.dtype, self.table.dtype
        if self.inner is not None:
            x = x + self.inner(torch.ones(DIM, dtype=FP64)).to(x.dtype)
        return x * self.weight + self.table


class Dtypes(NamedTuple):
    input: torch.dtype
    inner_input: torch.dtype
    param: torch.dtype
    buffer: torch.dtype
    reduced: torch.dtype
    grad: torch.dtype


# MixedPrecision(param_dtype, reduce_dtype, buffer_dtype, keep_low_precision_grads,
# cast_forward_inputs, cast_root_forward_inputs), and the dtypes that are seen
TABLE = [
    ((), Dtypes(FP32, FP64, FP32, FP32, FP32, FP32)),
    ((BF16,), Dtypes(BF16, FP64, BF16, FP32, BF16, FP32)),
    ((BF16, FP32), Dtypes(BF16, FP64, BF16, FP32, FP32, FP32)),
    ((None, BF16), Dtypes(FP32, FP64, FP32, FP32, BF16, FP32)),
    ((None, None, BF16), Dtypes(FP32, FP64, FP32, BF16, FP32, FP32)),
    ((None, None, None, True), Dtypes(FP32, FP64, FP32, FP32, FP32, FP32)),
    ((BF16, None, None, True), Dtypes(BF16, FP64, BF16, FP32, BF16, BF16)),
    ((BF16, FP32, None, True), Dtypes(BF16, FP64, BF16, FP32, FP32, FP32)),
    ((FP16, BF16, None, True), Dtypes(FP16, FP64, FP16, FP32, BF16, BF16)),
    ((None, BF16, FP64, True), Dtypes(FP32, FP64, FP32, FP64, BF16, BF16)),
    ((None, None, None, False, True), Dtypes(FP32, FP64, FP32, FP32, FP32, FP32)),
    ((FP16, BF16, None, False, True), Dtypes(FP16, FP16, FP16, FP32, BF16, FP32)),
    ((BF16, None, None, False, False, False), Dtypes(FP32, FP64, BF16, FP32, BF16, FP32)),
    ((BF16, None, None, False, True, False), Dtypes(BF16, BF16, BF16, FP32, BF16, FP32)),
]


@each_value
@both_forms
@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [(1, FULL_SHARD), (2, FULL_SHARD), (2, NO_SHARD)],
)
@on_ranks("num_ranks", environment=MESSAGES)
def test_every_field_sets_its_dtypes_and_no_others(
    num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    for fields, expected in TABLE:
        with about(fields):
            _check_dtypes(fields, expected, strategy, use_orig_params)


def _check_dtypes(
    fields: tuple[Any, ...], expected: Dtypes, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    inner = Probe()
    model = FSDP(
        Probe(inner),
        auto_wrap_policy=CustomPolicy(lambda m: m is inner),
        mixed_precision=MixedPrecision(*fields),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for pattern in ("s", "nss"):
        for letter in pattern:
            context = no_sync(model) if letter == "n" else contextlib.nullcontext()
            with context, Messages() as messages:
                backward(square(model, torch.randn(4, DIM)))
            assert _grad_dtypes(model) <= {expected.grad}
            assert letter == "s" or not messages.sent or strategy is not NO_SHARD
        assert model.module.seen == (expected.input, expected.param, expected.buffer)
        assert inner.seen == (expected.inner_input, expected.param, expected.buffer)
        sent, are_several = {expected.param, expected.reduced}, dist.get_world_size() > 1
        if strategy is NO_SHARD or not are_several:
            sent = {expected.reduced} if are_several else set()
        assert pattern == "s" or set(messages.sent) == sent  # the first backward also connects
        assert _grad_dtypes(model) == {expected.grad}
        _assert_halved(model)
        optim.step()
        assert {p.dtype for p in model.parameters()} == {FP32}
        assert {value.dtype for value in model.state_dict().values()} == {FP32}
        optim.zero_grad(set_to_none=pattern == "s")


def _assert_halved(model: FSDP) -> None:
    """Clip gradients to half of their norm."""
    grads = _whole(model)
    norm = torch.cat([grad.float().flatten() for grad in grads.values()]).norm()
    eps = torch.finfo(next(iter(grads.values())).dtype).eps
    assert_close(model.clip_grad_norm_(float(norm) / 2), norm, "norm", eps)
    for name, grad in _whole(model).items():
        assert_close(grad, grads[name] / 2, name, max(2 * eps, 1e-5))


def _dtypes_in(thing: Any) -> Iterator[torch.dtype]:
    if isinstance(thing, Tensor):
        yield thing.dtype
    elif isinstance(thing, (list, tuple)):
        for each in thing:
            yield from _dtypes_in(each)
    elif isinstance(thing, (dict, Record)):
        yield from _dtypes_in(list(thing.values()) if isinstance(thing, dict) else thing.value)


class Takes(nn.Linear):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen, self.given = list(_dtypes_in((args, kwargs))), kwargs
        return self.weight.sum()


@on_ranks(1)
def test_floating_point_inputs_are_cast_wherever_they_are() -> None:
    model = FSDP(Takes(1, 1), mixed_precision=MixedPrecision(param_dtype=BF16))
    x, ints, flags = torch.ones(2, DIM), torch.arange(3), torch.tensor([True])
    high = torch.ones(1, dtype=FP64)
    nested = [ints, {"a": (high, None, "text", 3)}]
    model(x, nested, named=Named(x, [flags, 2.5]), record=Record(defaultdict(list, b=[x]), "label"))
    assert model.module.seen == [BF16, torch.int64, BF16, BF16, torch.bool, BF16]
    assert model.module.given["record"].value["missing"] == [], "containers keep their types"
    assert (x.dtype, ints.dtype, high.dtype) == (FP32, torch.int64, FP64)


@on_ranks(2)
def test_inputs_that_are_cast_get_gradients_of_their_own_dtype() -> None:
    model = FSDP(GradientIs(), mixed_precision=MixedPrecision(param_dtype=BF16))
    with FSDP.summon_full_params(model):
        model.module.weight.data.copy_(torch.arange(8.0))
    x = torch.ones(8, requires_grad=True)
    loss = model(x)
    assert loss.dtype == BF16
    loss.backward()
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.tolist()) == (FP32, [0, 1, 2, 3, 4, 5, 6, 7])


# -- values of gradients


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
    for strategy, precision, original in singles(list(patterns), precisions, (False, True)):
        options = {"strategy": strategy, "precision": precision, "use_orig_params": original}
        assert_as_torch(partial(trained, pattern=patterns[strategy], **options), options)


ONE_LARGE, THIRTY = [256.0, 1.0, 1.0, 1.0], [30000.0] * 4
# (dtype of parameters, of the reduction, pattern of backwards, gradients of each rank in each of
# them, their average where sums are rounded once, and where replicas round them a second time)
SUMS: list[tuple[torch.dtype, torch.dtype | None, str, list[list[float]], set[float], set[float]]]
SUMS = [
    # 256 + 1 is 256 in bfloat16: a sum in it loses the three small ones, and the average is 64.
    (FP32, BF16, "s", [ONE_LARGE], {64.75}, {64.5, 64.75, 65.0}),
    # The sum of four is 120,000, beyond 65,504.
    (FP32, FP16, "s", [THIRTY], {30000.0}, {30000.0}),
    # Accumulated on the shard, and larger than the largest fp16 number.
    (FP32, FP16, "sss", [THIRTY] * 3, {90000.0}, {90000.0}),
    # In the buffer that is divided on the way in: by what it is divided later, too.
    (FP32, FP16, "nns", [[8192.0] * 4, [16384.0] * 4, [32768.0] * 4], {57344.0}, {57344.0}),
    # bfloat16 has the neighbours of 64.75.
    (BF16, None, "s", [ONE_LARGE], {64.5, 65.0}, {64.5, 65.0}),
    (BF16, FP32, "s", [ONE_LARGE], {64.5, 65.0}, {64.5, 65.0}),
]


@pytest.mark.parametrize(
    ("strategy", "use_orig_params"),
    [
        (FULL_SHARD, True),
        (SHARD_GRAD_OP, False),
        (NO_SHARD, False),
        (HYBRID, True),
    ],
)
@on_ranks(4)
def test_gradients_are_added_up_in_float32(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    for dtype, reduce_dtype, pattern, given, exact, rounded in SUMS:
        precision = MixedPrecision(param_dtype=dtype, reduce_dtype=reduce_dtype)
        options = {"use_orig_params": use_orig_params, **_meshed(strategy)}
        model = FSDP(GradientIs(dtype=dtype), mixed_precision=precision, **options)
        for letter, values in zip(pattern, given, strict=True):
            with no_sync(model) if letter == "n" else contextlib.nullcontext():
                model(torch.full((8,), values[dist.get_rank()])).backward()
        grad = whole_gradients(model)["weight"]
        assert grad.dtype == dtype
        average, *others = set(grad.tolist())
        assert average in (rounded if strategy in (NO_SHARD, HYBRID) else exact)
        everywhere: list[Any] = [None] * 4
        dist.all_gather_object(everywhere, average)
        assert not others and everywhere == [average] * 4


# -- gradients in the reduce dtype


@pytest.mark.parametrize("front_end", ["flat", "original", "ours"])
@on_ranks(2)
def test_gradients_have_the_grad_dtype_of_their_parameters(front_end: str) -> None:
    for grad_dtype in (FP32, None):
        model: Any = chain(*[partial(nn.Linear, 4, 4, bias=False, dtype=BF16)] * 3)
        for layer in model:
            nn.init.eye_(layer.weight)
        model[0].weight.grad_dtype = grad_dtype
        model = sharded_as(front_end, model)
        for values, syncs in (((256.0, 1.0, -256.0), True), ((256.0, 1.0, -255.0), False)):
            for value in values:
                with contextlib.nullcontext() if syncs or value < 0 else no_sync(model):
                    model(torch.full((1, 4), value, dtype=BF16)).sum().backward()
        found = {name: (grad.dtype, grad.max().item()) for name, grad in _whole(model).items()}
        rounded = BF16, found["1.weight"][1]
        assert rounded[1] != 3.0
        first = rounded if grad_dtype is None else (FP32, 3.0)
        assert found == {"0.weight": first, "1.weight": rounded, "2.weight": rounded}
