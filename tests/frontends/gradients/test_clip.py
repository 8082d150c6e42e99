"""Clipping by the method and by torch's functions gives the total norm and the gradients of the
unsharded model."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import fsdp_compat
from fsdp_compat import CPUOffload, ShardingStrategy
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import CustomPolicy, ModuleWrapPolicy
from tests.support.cases import about
from tests.support.messages import Messages
from tests.support.models import DIM, Block, Inner, Outer, Stack, chain, frozen
from tests.support.pairwise import each_value, pairs
from tests.support.parity import (
    Batch,
    Pair,
    backward,
    both_forms,
    make_pair,
    seeded,
    vectors,
)
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import MESSAGES

NORM_TYPES = [1, 2.0, 3, 0.5, math.inf]
FOREACH = [None, True, None, False, True]
RTOL = 1e-6
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID, HYBRID_ZERO2 = ShardingStrategy
MESHES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}  # of hybrid strategies, by number of ranks
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

Clip = Callable[[float, float], Tensor]


def _by_total_norm(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type)
    clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def _by_torch(model: nn.Module, *arguments: Any, **options: Any) -> Tensor:
    return clip_grad_norm_(model.parameters(), *arguments, **options)


def _by_method(model: FSDP, max_norm: float, norm_type: float) -> Tensor:
    return model.clip_grad_norm_(max_norm, norm_type)


# -- models, some with gradients that are exact in every dtype on up to four ranks


class Terms(nn.Module):
    """The gradients of elements are the input times whole numbers from -3 to 3."""

    def __init__(
        self,
        dtypes: list[torch.dtype],
        *units: Callable[[], nn.Module],
        shapes: tuple[tuple[int, ...], ...] = ((7,), (), (1,)),
    ) -> None:
        super().__init__()
        self.used = nn.ParameterList(torch.ones(s, dtype=d) for d in dtypes for s in shapes)
        self.frozen, self.unused = nn.Parameter(torch.ones(3), False), nn.Linear(3, 2)
        self.units = nn.ModuleList(make() for make in units)

    def forward(self, x: Tensor) -> Tensor:
        total = self.frozen.sum() * x.double()
        for number, p in enumerate(self.used):
            factors = (torch.arange(p.numel()).view_as(p) + number) % 7 - 3
            total = total + (p.double() * factors).sum() * x
        return total + sum(unit(x) for unit in self.units)


def _whole_number(generator: torch.Generator) -> Tensor:
    """Averages of up to four of these, times the factors of ``Terms``, are exact in bfloat16."""
    return 12.0 * torch.randint(1, 5, (), generator=generator)


def _partly_frozen() -> nn.Module:
    model = Stack(3, Outer)
    model.blocks[1] = frozen(Block)
    model.blocks[0].first.up.weight.requires_grad_(False)
    return model


SMALL = partial(Terms, [FP32])
MIXED = partial(Terms, [BF16], shapes=((7,), (), (0, 2)))
EMPTY = "three dtypes, and an empty parameter"
MODELS: dict[str, tuple[Callable[[], nn.Module], set[type[nn.Module]], Batch]] = {
    "blocks": (Stack, {Block}, vectors),
    "units inside units, partly frozen": (_partly_frozen, {Outer, Inner, Block}, vectors),
    "fewer elements than ranks": (partial(Terms, [FP32], SMALL, SMALL), {Terms}, _whole_number),
    EMPTY: (
        partial(Terms, [FP32], MIXED, partial(Terms, [FP32, BF16, FP64])),
        {Terms},
        _whole_number,
    ),
}


# -- the reference


def _sum(model: nn.Module, x: Tensor) -> Tensor:
    return backward(model(x).double().sum())


def _check(
    pair: Pair, clip: Clip, norm_type: float, only: Callable[[str], bool] = lambda name: True
) -> Tensor:
    """Clip the gradients of a backward to 0.3 of the norm, that of the parameters in ``only``;
    compare the norm and all gradients, and return the norm. Collective."""
    for optim in (pair.plain_optim, pair.optim):
        optim.zero_grad()
    pair.backwards(_sum)
    grads = {n: p.grad.double() for n, p in pair.plain.named_parameters() if p.grad is not None}
    chosen = torch.cat([grad.flatten() for name, grad in grads.items() if only(name)])
    norm = torch.linalg.vector_norm(chosen, norm_type)
    got = clip(0.3 * norm.item(), norm_type)
    _assert_close(got, norm, "norm")
    with FSDP.summon_full_params(pair.model, writeback=False, with_grads=True):
        names = [name for name, _ in pair.plain.named_parameters()]
        for name, p in zip(names, pair.model.parameters(), strict=True):
            if name not in grads:
                assert p.grad is None or not p.grad.any(), f"{name} has a gradient"
            else:
                factor = 0.3 * norm / (norm + 1e-6) if only(name) else 1.0
                _assert_close(p.grad, grads[name] * factor, name)
    return got


def _assert_close(got: Tensor | None, expected: Tensor, what: str) -> None:
    """Equal up to rounding of the largest element: ranks add in another order than DDP."""
    assert got is not None, f"{what}: no gradient"
    rtol = max(RTOL, torch.finfo(got.dtype).eps)
    atol = rtol * expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        got.detach().double(), expected, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}"
    )


def _local_gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _leaves_alone(model: nn.Module, clip: Callable[[], object]) -> None:
    before = [grad.nan_to_num() for grad in _local_gradients(model)]
    clip()
    after = [grad.nan_to_num() for grad in _local_gradients(model)]
    assert before and all(map(torch.equal, after, before))


def _strategies(*wanted: ShardingStrategy) -> list[dict[str, Any]]:
    """Options for FSDP for some strategies, default: all. Collective."""
    mesh = init_device_mesh("cpu", MESHES[dist.get_world_size()])
    return [
        {"sharding_strategy": s, "device_mesh": mesh if s in (HYBRID, HYBRID_ZERO2) else None}
        for s in wanted or ShardingStrategy
    ]


# -- all gradients of a model


def _clips(name: str, strategy: ShardingStrategy, use_orig_params: bool) -> list[Any]:
    """Return the norms and their dtypes."""
    build, units, batch = MODELS[name]
    (options,) = _strategies(strategy)
    options |= {"use_orig_params": use_orig_params, "batch": batch}
    pair = make_pair(build, units, cpu_offload=CPUOffload(strategy is FULL_SHARD), **options)
    model, found = pair.model, []
    for norm_type, foreach in zip(NORM_TYPES, FOREACH, strict=True):
        clips = [model.clip_grad_norm_, partial(_by_torch, model, foreach=foreach)]
        for clip in clips[:1] if name == EMPTY else clips:  # torch has no inf norm of no elements
            with about((strategy, norm_type, clip)):
                norm = _check(pair, clip, norm_type)
            found.append((norm.item(), str(norm.dtype)))
    limit = norm.item()  # now at 0.3
    for max_norm, order in itertools.product((limit, 3 * limit, math.inf), (math.inf, "inf")):
        _leaves_alone(model, partial(model.clip_grad_norm_, max_norm, order))
    model.clip_grad_norm_(0, math.inf)
    assert not any(grad.any() for grad in _local_gradients(model))
    return found


@each_value
@both_forms
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_norm_and_clipped_gradients_equal_those_of_the_unsharded_model(
    name: str, num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    first, *others = run_ranks(num_ranks, _clips, name, strategy, use_orig_params)
    assert all(found == first for found in others), "the ranks differ in norm or dtype"


@each_value
@both_forms
@pytest.mark.parametrize("call", [_by_method, _by_torch])
@on_ranks(3)
def test_norm_without_gradients_is_zero(call: Callable[..., Tensor], use_orig_params: bool) -> None:
    for options in _strategies():
        model = FSDP(Stack(), use_orig_params=use_orig_params, **options)
        for norm_type in NORM_TYPES:
            quiet = call is _by_torch
            with contextlib.nullcontext() if quiet else pytest.warns(match="no gradients"):
                assert call(model, 1.0, norm_type).item() == 0
        assert not _local_gradients(model)
    if call is _by_method:
        with model.no_sync():
            model(torch.ones(2, DIM)).sum().backward()
        with pytest.warns(match="gradients of no_sync"):
            model.clip_grad_norm_(1.0)


def _is_reported(model: nn.Module, norm_type: float) -> None:
    with pytest.raises(RuntimeError, match="non-finite"):
        _by_torch(model, 1.0, norm_type, error_if_nonfinite=True)


@both_forms
@pytest.mark.parametrize("call", [_by_method, _by_torch])
@on_ranks(2)
def test_one_nonfinite_element_makes_norm_and_gradients_nonfinite_everywhere(
    call: Callable[..., Tensor], use_orig_params: bool
) -> None:
    """torch's function can report it instead, on every rank, and then changes nothing."""
    for options in _strategies(FULL_SHARD, NO_SHARD, HYBRID):
        strategy = options["sharding_strategy"]
        model = make_pair(Stack, use_orig_params=use_orig_params, **options).model
        for bad, culprit, norm_type in pairs((math.nan, -math.inf), range(2), NORM_TYPES):
            model.zero_grad()
            model(torch.ones(2, DIM)).sum().backward()
            grads = _local_gradients(model)
            if dist.get_rank() == culprit or strategy is not FULL_SHARD:  # copies are equal
                next(grad for grad in grads if grad.numel()).view(-1)[0] = bad
            if call is _by_torch:
                _leaves_alone(model, partial(_is_reported, model, norm_type))
            norm = call(model, 1.0, norm_type).item()
            values = torch.cat([grad.flatten() for grad in grads])
            finite, where = values[values.isfinite()], (strategy, bad, culprit, norm_type)
            if math.isnan(bad):
                assert math.isnan(norm) and not len(finite), where
            else:
                assert norm == math.inf and len(finite) and not finite.any(), where


# -- several units, roots and modules


def _same_vectors(generator: torch.Generator) -> Tensor:
    return vectors(torch.Generator().manual_seed(5))


def _of_several_strategies(options: dict[str, Any], **form: bool) -> Pair:
    policy = CustomPolicy(lambda m: options if isinstance(m, Outer) else isinstance(m, Inner))
    return make_pair(_partly_frozen, auto_wrap_policy=policy, **form)


def _with_ignored_modules(options: dict[str, Any], **form: bool) -> Pair:
    module = seeded(Stack)
    options = {**options, **form, "ignored_modules": [module.head, module.blocks[1].norm]}
    model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    return Pair(seeded(Stack), model, batch=_same_vectors)


def _several_roots(options: dict[str, Any], **form: bool) -> Pair:
    """And a module that is not sharded."""
    build = partial(chain, partial(nn.Linear, DIM, DIM), Stack, partial(nn.Linear, 3, 5))
    model = seeded(build)
    for index in range(2):
        model[index] = FSDP(model[index], **form, **(options if index else {}))
    return Pair(seeded(build), model, batch=_same_vectors)


@both_forms
@pytest.mark.parametrize("build", [_of_several_strategies, _with_ignored_modules, _several_roots])
@on_ranks(2)
def test_gradients_of_several_units_roots_and_modules_count_once_each(
    build: Callable[..., Pair], use_orig_params: bool
) -> None:
    for number, options in enumerate(_strategies(FULL_SHARD, NO_SHARD, HYBRID)):
        pair = build(options, use_orig_params=use_orig_params)
        calls = [partial(_by_torch, pair.model), partial(_by_total_norm, pair.model)]
        if build is not _several_roots:
            calls.append(pair.model.clip_grad_norm_)
        for norm_type, call in itertools.product(NORM_TYPES[number::2], calls):
            _check(pair, call, norm_type)


# -- communication


@on_ranks(4, environment=MESSAGES)
def test_clipping_sends_one_message_to_each_rank_and_none_without_sharding() -> None:
    num_others = {FULL_SHARD: 3, SHARD_GRAD_OP: 3, NO_SHARD: 0, HYBRID: 1, HYBRID_ZERO2: 1}
    for options in _strategies():
        model = make_pair(Stack, **options).model
        model(torch.ones(2, DIM)).pow(2).sum().backward()
        for norm_type in NORM_TYPES:
            with Messages() as messages:
                model.clip_grad_norm_(1.0, norm_type)
            sizes = [2 if norm_type == math.inf else 1] * num_others[options["sharding_strategy"]]
            assert messages.sent == ({FP32: sizes} if sizes else {})


# -- torch's function on some parameters, or several modules


def _is_in(part: str, name: str) -> bool:
    return name.startswith(part)


@on_ranks(2)
def test_torch_clip_grad_norm_of_some_parameters_uses_their_norm() -> None:
    for options in _strategies(FULL_SHARD, HYBRID):
        pair = make_pair(Stack, use_orig_params=True, **options)
        for part, modules in (("blocks.1.", pair.model.blocks[1]), ("blocks.", pair.model.blocks)):
            for norm_type in NORM_TYPES:
                clip = partial(clip_grad_norm_, modules.parameters())
                _check(pair, clip, norm_type, partial(_is_in, part))
        names = [name for name, _ in pair.plain.named_parameters()]
        for name, parameter in list(zip(names, pair.model.parameters(), strict=True))[::5]:
            _check(pair, partial(clip_grad_norm_, parameter), math.inf, partial(_is_in, name))
        assert clip_grad_norm_([], 1.0).item() == 0.0


# -- dtypes, and gradients that a rank has no part of


# (dtype of the parameters, mixed precision, dtype of the norm)
NORM_DTYPES: list[tuple[torch.dtype, dict[str, Any], torch.dtype]] = [
    (FP32, {}, FP32),
    (BF16, {}, BF16),
    (FP32, {"param_dtype": BF16}, FP32),
    (FP32, {"param_dtype": BF16, "keep_low_precision_grads": True}, BF16),
]


@each_value
@both_forms
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_norm_dtype_is_that_of_torch_and_empty_parts_have_no_gradient_or_state(
    strategy: str, use_orig_params: bool
) -> None:
    """torch's FSDP does what is expected here."""
    warnings.simplefilter("ignore")  # torch warns of ranks without gradients, and of NO_SHARD
    cases = itertools.product((fsdp_compat, torch_fsdp), NORM_DTYPES)
    for library, (dtype, precision, expected) in cases:
        model = library.FullyShardedDataParallel(
            seeded(partial(chain, *[partial(nn.Linear, 4, 4, dtype=dtype)] * 2)),
            auto_wrap_policy=library.wrap.ModuleWrapPolicy({nn.Linear}),
            mixed_precision=library.MixedPrecision(**precision) if precision else None,
            device_id=torch.device("cpu"),
            sharding_strategy=library.ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        model(torch.arange(4.0).to(dtype) + dist.get_rank()).float().sum().backward()
        assert model.clip_grad_norm_(1.0).dtype is expected
        if not precision.get("keep_low_precision_grads"):
            optimizer.step()
        for p in model.parameters():
            assert (p.grad is not None) == bool(p.numel())
            assert p.numel() or p not in optimizer.state


# -- functions that a library has replaced


def _as_a_library(*args: Any) -> Tensor:
    return clip_grad_norm_(*args)


@on_ranks(2)
def test_clip_grad_norm_that_a_library_replaced_before_wrapping() -> None:
    def around(*args: Any) -> Tensor:
        return called(*args)

    called = clip_grad_norm_
    proxy = functools.update_wrapper(partial(around), called)  # such as wrapt's
    proxy.__closure__ = called.__closure__  # type: ignore[attr-defined]
    for library in (around, functools.wraps(called)(around), proxy, _as_a_library):
        fsdp_compat.uninstall()
        with pytest.MonkeyPatch.context() as patch:
            for module in (torch.nn.utils.clip_grad, torch.nn.utils):
                patch.setattr(module, "clip_grad_norm_", library)
            model = FSDP(nn.Linear(3, 1), use_orig_params=True)
            model(torch.tensor([2.0, 1.0, 2.0])).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert norm.item() == pytest.approx(10**0.5)
            fsdp_compat.uninstall()
            now = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_norm_
            assert now == (library, library)
