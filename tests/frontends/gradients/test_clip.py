"""Clipping by the method and by torch's function gives DDP's total norm and gradients."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compat
from fsdp_compat import CPUOffload, ShardingStrategy
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._state.units import clean_name
from fsdp_compat.wrap import CustomPolicy, ModuleWrapPolicy
from tests.support.models import DIM, Block, Inner, Outer, Stack, frozen
from tests.support.pairwise import each_value, pairs
from tests.support.parity import both_forms, seeded, whole_gradients
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import MESSAGES

NORM_TYPES = [1, 2.0, 3, 0.5, math.inf]
RTOL = 1e-6
FULL_SHARD, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
MESHES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}  # of hybrid strategies, by number of ranks

both_calls = pytest.mark.parametrize("by_torch", [False, True])


# -- models whose gradients are exact in every dtype, on up to four ranks


class Terms(nn.Module):
    """The gradient of its i-th element is x * c, where c is a whole number from -3 to 3."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        for index, dtype in enumerate(dtypes):
            self.register_parameter(f"vector{index}", nn.Parameter(torch.ones(7, dtype=dtype)))
            self.register_parameter(f"scalar{index}", nn.Parameter(torch.tensor(1.0, dtype=dtype)))
            self.register_parameter(f"single{index}", nn.Parameter(torch.ones(1, dtype=dtype)))
        self.frozen, self.unused = nn.Parameter(torch.ones(3), requires_grad=False), nn.Linear(3, 2)

    def forward(self, x: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, p in self.named_parameters():
            if "unused" not in name:
                c = (torch.arange(p.numel(), dtype=torch.float64).view_as(p) + len(name)) % 7 - 3
                total = total + (p.double() * c).sum() * x
        return total


class Empty(Terms):
    """Has a parameter without elements next to another one."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        self.nothing = nn.Parameter(torch.ones(0, 2))


class Sum(nn.Module):
    """Units in parallel, and one term of its own."""

    def __init__(self, *units: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.units, self.own = (
            nn.ModuleList(make() for make in units),
            nn.Parameter(torch.tensor([1.0, 1.0])),
        )

    def forward(self, x: float) -> Tensor:
        return self.own.double().sum() * x + sum(unit(x) for unit in self.units)


def _whole_number() -> float:
    return 12.0 * (dist.get_rank() + 1)  # averages of these, times c, are exact in bfloat16 too


def _vectors() -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))


def _partly_frozen() -> nn.Module:
    model = Stack(3, Outer)
    model.blocks[1] = frozen(Block)
    model.blocks[0].first.up.weight.requires_grad_(False)
    return model


SMALL = partial(Sum, partial(Terms, torch.float32), partial(Terms, torch.float32))
MIXED = partial(Sum, partial(Terms, torch.float32, torch.bfloat16, torch.float64), Empty)
MODELS: dict[str, tuple[Callable[[], nn.Module], set[type[nn.Module]], Callable[[], Any]]] = {
    "blocks": (Stack, {Block}, _vectors),
    "units inside units, partly frozen": (_partly_frozen, {Outer, Inner, Block}, _vectors),
    "fewer elements than ranks": (SMALL, {Terms}, _whole_number),
    "three dtypes, and an empty parameter": (MIXED, {Terms, Empty}, _whole_number),
}


# -- the reference


class Pair:
    """DDP and the sharded model, both after one backward on the same data. Collective."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        units: set[type[nn.Module]],
        batch: Callable[[], Any],
        ignore: Callable[[Any], dict[str, Any]] = lambda module: {},
        **options: Any,
    ) -> None:
        self.ddp, module = DDP(seeded(build), find_unused_parameters=True), seeded(build)
        options.setdefault("auto_wrap_policy", ModuleWrapPolicy(units))
        self.model = FSDP(module, **ignore(module), **options)
        for model in (self.ddp, self.model):
            model(batch()).double().pow(1).sum().backward()
        named = self.ddp.module.named_parameters()
        self._whole = {
            name: p.grad for name, p in named if p.grad is not None and p.grad.numel()
        }  # torch has no inf norm of an empty tensor
        self._sharded = [
            (p, None if p.grad is None else p.grad.clone()) for p in self.model.parameters()
        ]

    def check(
        self,
        clip: Callable[[float, float], Tensor],
        norm_type: float,
        where: str = "",
        only: Callable[[str], bool] = lambda name: True,
    ) -> float:
        """Compare what ``clip(max_norm, norm_type)`` returns and does to the gradients of the
        parameters in ``only`` with DDP; return it. Collective."""
        where += f", norm type {norm_type}"
        norm, clipped, max_norm = self.expected(norm_type, only)
        self.restore()
        got = clip(max_norm, norm_type)
        _assert_close(got, norm, where)
        self.assert_gradients(clipped, where)
        return got.item()

    def expected(
        self, norm_type: float, only: Callable[[str], bool]
    ) -> tuple[Tensor, dict[str, Tensor], float]:
        """The norm of DDP's gradients, the gradients clipped to 0.3 of it, the maximum."""
        copies = {name: grad.to(torch.float64, copy=True) for name, grad in self._whole.items()}
        clipped = [_with_grad(grad) for name, grad in copies.items() if only(name)]
        norm = get_total_norm([grad for name, grad in copies.items() if only(name)], norm_type)
        clip_grad_norm_(clipped, 0.3 * norm.item(), norm_type)
        return norm, copies, 0.3 * norm.item()

    def restore(self) -> None:
        for p, grad in self._sharded:
            p.grad = None if grad is None else grad.clone()

    def assert_gradients(self, expected: dict[str, Tensor], where: str) -> None:
        """Collective."""
        for name, got in self.gradients().items():
            wanted = expected.get(name)
            if wanted is None:
                assert got is None or not got.any(), f"{where}: {name} has a gradient"
            else:
                assert got is not None, f"{where}: {name} has no gradient"
                _assert_close(got, wanted, f"{where}: gradient of {name}")

    def gradients(self) -> dict[str, Tensor | None]:
        """Collective."""
        return whole_gradients(self.model)


def _with_grad(grad: Tensor) -> nn.Parameter:
    """A parameter whose gradient is the given tensor."""
    p = nn.Parameter(torch.empty_like(grad))
    p.grad = grad
    return p


def _assert_close(got: Tensor, expected: Tensor, what: str) -> None:
    """Equal up to rounding of the largest element: ranks add in another order than DDP."""
    rtol = max(RTOL, torch.finfo(got.dtype).eps)
    atol = rtol * expected.abs().max().item()
    torch.testing.assert_close(
        got.detach().double(), expected.double(), rtol=0, atol=atol, msg=lambda m: f"{what}: {m}"
    )


def _clipping(model: FSDP, by_torch: bool) -> Callable[..., Tensor]:
    if by_torch:
        return lambda *arguments: clip_grad_norm_(model.parameters(), *arguments)
    return model.clip_grad_norm_


def _strategies(*wanted: ShardingStrategy) -> list[tuple[ShardingStrategy, dict[str, Any]]]:
    """(strategy, options for FSDP) for some strategies, default: all. Collective."""
    mesh = init_device_mesh("cpu", MESHES[dist.get_world_size()])
    options = [
        {"sharding_strategy": s, "device_mesh": mesh if s in HYBRID else None}
        for s in wanted or ShardingStrategy
    ]
    return [(each["sharding_strategy"], each) for each in options]


# -- our method


def _clips_as_ddp(
    name: str, strategy: ShardingStrategy, use_orig_params: bool
) -> tuple[list[float], list[str]]:
    """Return the norms and their dtypes."""
    dtypes: list[str] = []
    ((_, options),) = _strategies(strategy)
    offload = CPUOffload(offload_params=strategy is FULL_SHARD)
    pair = Pair(*MODELS[name], use_orig_params=use_orig_params, cpu_offload=offload, **options)

    def clip(max_norm: float, norm_type: float) -> Tensor:
        norm = pair.model.clip_grad_norm_(max_norm, norm_type)
        dtypes.append(str(norm.dtype))
        return norm

    found = [pair.check(clip, norm_type) for norm_type in NORM_TYPES]
    norm, unclipped = found[-1], pair.gradients()
    for max_norm in (norm, 3 * norm, math.inf):  # now at 0.3
        assert torch.equal(*(pair.model.clip_grad_norm_(max_norm, n) for n in (math.inf, "inf")))
    assert all(
        a is b is None or torch.equal(a, b)
        for a, b in zip(unclipped.values(), pair.gradients().values(), strict=True)
    )
    pair.model.clip_grad_norm_(0, math.inf)
    assert not any(grad.any() for grad in pair.gradients().values() if grad is not None)
    return found, dtypes


@each_value
@both_forms
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_norm_and_clipped_gradients_equal_ddp(
    name: str, num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    first, *others = run_ranks(num_ranks, _clips_as_ddp, name, strategy, use_orig_params)
    assert all(found == first for found in others), "the ranks differ in norm or dtype"


def _chooses(outer: dict[str, Any], module: nn.Module) -> bool | dict[str, Any]:
    """For CustomPolicy."""
    return outer if isinstance(module, Outer) else isinstance(module, Inner)


@each_value
@both_forms
@both_calls
@on_ranks(4)
def test_units_of_several_strategies_and_meshes_count_once_each(
    by_torch: bool, use_orig_params: bool
) -> None:
    for strategy, options in _strategies(NO_SHARD, HYBRID[0]):
        more = {
            "auto_wrap_policy": CustomPolicy(partial(_chooses, options)),
            "use_orig_params": use_orig_params,
        }
        pair = Pair(_partly_frozen, set(), _vectors, **more)
        # Every norm type is combined with either call and with either form.
        for norm_type in NORM_TYPES[by_torch ^ use_orig_params :: 2]:
            pair.check(_clipping(pair.model, by_torch), norm_type, f"{strategy.name} inside")


def _the_same_vectors() -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(5))


def _ignored(kind: str, model: Any) -> dict[str, Any]:
    modules = [model.head, model.blocks[1].norm]
    if kind == "parameters":
        return {"ignored_states": [p for module in modules for p in module.parameters()]}
    return {kind: modules}


@each_value
@both_forms
@both_calls
@pytest.mark.parametrize("kind", ["ignored_modules", "ignored_states", "parameters"])
@on_ranks(2)
def test_gradients_of_ignored_parameters_count_once(
    kind: str, by_torch: bool, use_orig_params: bool
) -> None:
    for strategy, options in _strategies(FULL_SHARD, NO_SHARD, HYBRID[0]):
        more = {"ignore": partial(_ignored, kind), "use_orig_params": use_orig_params}
        pair = Pair(Stack, {Block}, _the_same_vectors, **more, **options)
        for norm_type in (1, 2.0, math.inf):
            pair.check(_clipping(pair.model, by_torch), norm_type, strategy.name)


@each_value
@both_forms
@both_calls
@on_ranks(3)
def test_norm_without_gradients_is_zero(by_torch: bool, use_orig_params: bool) -> None:
    for _, options in _strategies():
        model = FSDP(Stack(), use_orig_params=use_orig_params, **options)
        with contextlib.nullcontext() if by_torch else pytest.warns(match="no gradients"):
            assert not any(_clipping(model, by_torch)(1.0, kind).item() for kind in NORM_TYPES)
        assert all(p.grad is None for p in model.parameters())
    if not by_torch:
        with model.no_sync():
            model(_vectors()).sum().backward()
        with pytest.warns(match="gradients of no_sync"):
            model.clip_grad_norm_(1.0)


# -- communication


class _Counts(TorchDispatchMode):
    """Counts collectives, and the tensors that norms are computed of and that are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.found[name] += 1
        elif name in ("_foreach_norm", "_foreach_mul_"):
            self.found[name] += len(args[0])
        return func(*args, **(kwargs or {}))


@on_ranks(4, environment=MESSAGES)
def test_clipping_sends_one_message_to_each_rank_and_none_without_sharding() -> None:
    sent = {}
    for strategy, options in _strategies():
        model = FSDP(Stack(), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
        model(_vectors()).pow(2).sum().backward()
        for norm_type in NORM_TYPES:
            with _Counts() as counts:
                model.clip_grad_norm_(1.0, norm_type)
            found = {name: n for name, n in counts.found.items() if "foreach" not in name}
            assert sent.setdefault(strategy.name, found) == found
    names = ("FULL_SHARD", "SHARD_GRAD_OP"), ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    of_four, of_two = {"send": 3, "recv_": 3}, {"send": 1, "recv_": 1}
    assert sent == {
        **dict.fromkeys(names[0], of_four),
        **dict.fromkeys(names[1], of_two),
        "NO_SHARD": {},
    }


@both_forms
@on_ranks(2)
def test_clipping_takes_one_norm_and_one_product_per_unit(use_orig_params: bool) -> None:
    """A unit with a replaced gradient counts its parts, of which rank 0 has one."""
    model = FSDP(
        nn.Sequential(*(nn.Linear(5, 5) for _ in range(5))),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    model(torch.ones(2, 5)).sum().backward()
    parameter = next(p for p in model.parameters() if p.numel())
    for expected in (5, 5 + (use_orig_params and dist.get_rank())):
        with _Counts() as counts:
            model.clip_grad_norm_(1.0)
        found = {name: n for name, n in counts.found.items() if "foreach" in name}
        assert found == {"_foreach_norm": expected, "_foreach_mul_": expected}
        parameter.grad = parameter.grad.clone()


# -- non-finite numbers


@both_forms
@both_calls
@on_ranks(2)
def test_one_nonfinite_element_makes_norm_and_gradients_nonfinite_everywhere(
    by_torch: bool, use_orig_params: bool
) -> None:
    """torch's function can report it instead, on every rank, and then changes nothing."""
    for strategy, options in _strategies(FULL_SHARD, NO_SHARD, HYBRID[0]):
        pair = Pair(*MODELS["blocks"], use_orig_params=use_orig_params, **options)
        parameters = [p for p in pair.model.parameters() if p.grad is not None]
        for bad, culprit, norm_type in pairs((math.nan, -math.inf), range(2), NORM_TYPES):
            pair.restore()
            if dist.get_rank() == culprit or strategy is not FULL_SHARD:  # copies are equal
                next(p for p in parameters if p.numel()).grad[(0,)] = bad
            if by_torch:
                before = [p.grad.nan_to_num() for p in parameters]
                with pytest.raises(RuntimeError, match="non-finite"):
                    clip_grad_norm_(parameters, 1.0, norm_type, error_if_nonfinite=True)
                assert all(map(torch.equal, [p.grad.nan_to_num() for p in parameters], before))
            norm = _clipping(pair.model, by_torch)(1.0, norm_type).item()
            values = torch.cat([p.grad.flatten() for p in parameters])
            finite, where = values[values.isfinite()], (strategy, bad, culprit, norm_type)
            if math.isnan(bad):
                assert math.isnan(norm) and not len(finite), where
            else:
                assert norm == math.inf and len(finite) and not finite.any(), where


# -- torch's function on sharded parameters


def _clips_by_torch(name: str, use_orig_params: bool) -> list[float]:
    found = []
    calls = ((1, None), (2.0, True), (3, None), (0.5, False))
    calls += ((math.inf, None), (math.inf, False), (math.inf, True), (2.0, None))
    for number, (strategy, options) in enumerate(_strategies()):
        pair = Pair(*MODELS[name], use_orig_params=use_orig_params, **options)
        # Every two of a strategy, a form and a call are combined.
        for norm_type, foreach in calls[(number + use_orig_params) % 2 :: 2]:
            clip = partial(clip_grad_norm_, pair.model.parameters(), foreach=foreach)
            found.append(pair.check(clip, norm_type, f"{strategy.name}, foreach={foreach}"))
        clipped = pair.gradients()
        clip_grad_norm_(pair.model.parameters(), found[-1], norm_type, error_if_nonfinite=True)
        assert all(
            a is b is None or torch.equal(a, b)
            for a, b in zip(clipped.values(), pair.gradients().values(), strict=True)
        )
    return found


@pytest.mark.parametrize(
    ("name", "num_ranks", "use_orig_params"),
    [("units inside units, partly frozen", 4, True), ("fewer elements than ranks", 3, False)],
)
def test_torch_clip_grad_norm_equals_ddp(name: str, num_ranks: int, use_orig_params: bool) -> None:
    first, *others = run_ranks(num_ranks, _clips_by_torch, name, use_orig_params)
    assert all(found == first for found in others), "the ranks differ"


def _is_in(part: str, name: str) -> bool:
    return name.startswith(part)


@on_ranks(2)
def test_torch_clip_grad_norm_of_some_parameters_uses_their_norm() -> None:
    for strategy, options in _strategies(FULL_SHARD, HYBRID[0]):
        pair = Pair(*MODELS["blocks"], use_orig_params=True, **options)
        model = pair.model
        parts: dict[str, list[nn.Parameter]] = {
            "blocks.1.": list(model.blocks[1].parameters()),
            "blocks.": list(model.blocks[:3].parameters()),
            **{clean_name(name): [p] for name, p in model.named_parameters()},
        }
        for part, parameters in parts.items():
            for norm_type in NORM_TYPES if part.endswith(".") else (math.inf,):
                clip = partial(clip_grad_norm_, iter(parameters))
                pair.check(clip, norm_type, f"{strategy.name}, {part}", partial(_is_in, part))
        clip = partial(clip_grad_norm_, parameters[0])
        pair.check(clip, 2.0, "a tensor alone", partial(_is_in, part))
        assert clip_grad_norm_([], 1.0).item() == 0.0


def _plain() -> nn.Linear:
    torch.manual_seed(3)
    plain = nn.Linear(DIM, 5)
    plain(_the_same_vectors()).pow(2).sum().backward()
    return plain


@on_ranks(2)
def test_torch_clip_grad_norm_counts_unsharded_gradients_once() -> None:
    for strategy, options in _strategies(FULL_SHARD, NO_SHARD, HYBRID[0]):
        pair = Pair(*MODELS["blocks"], use_orig_params=True, **options)
        foreachs = itertools.cycle((None, False, True))
        for norm_type, plain_first, foreach in zip(
            NORM_TYPES, itertools.cycle((False, True)), foreachs, strict=False
        ):
            where = f"{strategy.name}, {norm_type}, plain first: {plain_first}, foreach={foreach}"
            plain, reference = _plain(), _plain()
            _, wanted, _ = pair.expected(norm_type, lambda name: False)
            beside = [p.grad.double() for p in reference.parameters()]
            norm = clip_grad_norm_(
                [_with_grad(grad) for grad in (*wanted.values(), *beside)], 0.5, norm_type
            )
            pair.restore()
            both = [plain, pair.model] if plain_first else [pair.model, plain]
            parameters = [p for model in both for p in model.parameters()]
            _assert_close(clip_grad_norm_(parameters, 0.5, norm_type, foreach=foreach), norm, where)
            pair.assert_gradients(wanted, where)
            for p, expected in zip(plain.parameters(), beside, strict=True):
                _assert_close(p.grad, expected, where)


@both_forms
@on_ranks(2)
def test_torch_clip_grad_norm_accepts_several_roots(use_orig_params: bool) -> None:
    reference = nn.ModuleList([_plain(), _plain()])
    both = nn.ModuleList([_plain(), _plain()])
    both.zero_grad()
    for index, strategy in enumerate((FULL_SHARD, NO_SHARD)):
        both[index] = FSDP(both[index], sharding_strategy=strategy, use_orig_params=use_orig_params)
        both[index](_the_same_vectors()).pow(2).sum().backward()
    for norm_type in NORM_TYPES:
        norm = clip_grad_norm_(reference.parameters(), 0.5, norm_type)
        _assert_close(
            clip_grad_norm_(both.parameters(), 0.5, norm_type), norm, f"norm type {norm_type}"
        )
        with FSDP.summon_full_params(both, writeback=False, with_grads=True):
            for p, wanted in zip(both.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p.grad, wanted.grad, rtol=1e-5, atol=1e-8)


@both_forms
@on_ranks(2)
def test_torch_get_total_norm_and_clip_grads_equal_clip_grad_norm(use_orig_params: bool) -> None:
    for strategy, options in _strategies(FULL_SHARD, NO_SHARD, HYBRID[0]):
        pair = Pair(*MODELS["blocks"], use_orig_params=use_orig_params, **options)

        def clip(max_norm: float, norm_type: float) -> Tensor:
            grads = [p.grad for p in pair.model.parameters() if p.grad is not None]  # noqa: B023
            norm = get_total_norm(grads, norm_type)
            clip_grads_with_norm_(pair.model.parameters(), max_norm, norm)  # noqa: B023
            return norm

        for norm_type in (2.0, math.inf):
            pair.check(clip, norm_type, strategy.name)


def _by_definition(grads: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """As defined by torch's documentation, in its order of operations."""
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(grad, norm_type) for grad in grads]), norm_type
    )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor)
    return norm


@on_ranks(2)
def test_torch_clip_grad_norm_of_a_plain_module_is_unchanged() -> None:
    model = FSDP(Stack())
    model(_vectors()).pow(2).sum().backward()
    kinds = NORM_TYPES if dist.get_rank() == 0 else []  # the others do not take part
    for norm_type, foreach in itertools.product(kinds, (None, False, True)):
        plain, reference = _plain(), _plain()
        norm = clip_grad_norm_(plain.parameters(), 0.5, norm_type, foreach=foreach)
        grads = [p.grad for p in reference.parameters()]
        assert type(norm) is Tensor
        assert torch.equal(norm, _by_definition(grads, 0.5, norm_type))
        assert all(map(torch.equal, [p.grad for p in plain.parameters()], grads))
    dist.barrier()


# -- gradients that a rank has no part of, and the dtype of the norm


def _seen_when_clipping(
    library: Any, dtype: torch.dtype, precision: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Return which parameters have gradients, and the norm with its dtype."""
    torch.manual_seed(0)
    model = library.FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype),
        auto_wrap_policy=library.wrap.ModuleWrapPolicy({nn.Linear}),
        mixed_precision=library.MixedPrecision(**precision) if precision else None,
        device_id=torch.device("cpu"),
        **options,
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model(torch.arange(4.0).to(dtype) + dist.get_rank()).float().sum().backward()
    norm = model.clip_grad_norm_(1.0)
    found: dict[str, Any] = {"dtype": str(norm.dtype), "norm": norm.item()}
    if not precision.get("keep_low_precision_grads"):
        optimizer.step()
    found["grads"] = [p.grad is not None for p in model.parameters() if p.numel()]
    found["without a part"] = [
        (p.grad is None, p in optimizer.state) for p in model.parameters() if not p.numel()
    ]
    return found


CLIPPED: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.float32, {"param_dtype": torch.bfloat16}),
    (torch.float32, {"param_dtype": torch.bfloat16, "keep_low_precision_grads": True}),
]


@each_value
@both_forms
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_norm_dtype_equals_torch_and_empty_parts_have_no_gradient_or_state(
    strategy: str, use_orig_params: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of ranks without gradients, and of NO_SHARD
        for dtype, precision in CLIPPED:
            theirs, ours = (
                _seen_when_clipping(
                    library,
                    dtype,
                    precision,
                    use_orig_params=use_orig_params,
                    sharding_strategy=library.ShardingStrategy[strategy],
                )
                for library in (torch_fsdp, fsdp_compat)
            )
            where = f"{dtype}, {precision}"
            assert ours["norm"] == pytest.approx(theirs["norm"], rel=2e-2), where
            assert ours["dtype"] == theirs["dtype"], where
            assert all(ours["grads"]) and all(theirs["grads"]), where
            assert set(ours["without a part"]) <= {(True, False)}, where
            assert set(theirs["without a part"]) <= {(True, False)}, where


def _as_a_library(*args: Any) -> Tensor:
    return clip_grad_norm_(*args)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["function", "with __wrapped__", "proxy", "without closure"])
def test_clip_grad_norm_that_a_library_replaced_before_wrapping(kind: str) -> None:
    def around(*args: Any) -> Tensor:
        return called(*args)

    called, library = clip_grad_norm_, around
    if kind == "with __wrapped__":
        library = functools.wraps(called)(around)
    elif kind == "proxy":  # such as wrapt's, which have the closure of what they call
        library = functools.update_wrapper(partial(around), called)
        library.__closure__ = called.__closure__  # type: ignore[attr-defined]
    elif kind == "without closure":
        library = _as_a_library
    fsdp_compat.uninstall()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils.clip_grad, "clip_grad_norm_", library)
        patch.setattr(torch.nn.utils, "clip_grad_norm_", library)
        model = FSDP(nn.Linear(3, 1), use_orig_params=True)
        model(torch.tensor([2.0, 1.0, 2.0])).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm.item() == pytest.approx(10**0.5)
        fsdp_compat.uninstall()
        assert torch.nn.utils.clip_grad_norm_ is torch.nn.utils.clip_grad.clip_grad_norm_ is library


@on_ranks(4)
def test_ranks_without_clipped_gradients_take_part() -> None:
    """Two of the four ranks hold no elements."""
    model = FSDP(nn.Linear(3, 1), use_orig_params=True)
    found = []
    for clip, parameters in (
        (lambda _: model.clip_grad_norm_(0.5), None),
        (lambda its: torch.nn.utils.clip_grad_norm_(its, 0.5), list(model.parameters())),
        (lambda its: torch.nn.utils.clip_grad_norm_(its, 0.5), [model.bias]),
    ):
        model.zero_grad()
        model(torch.tensor([2.0, 1.0, 2.0])).sum().backward()
        found.append(clip(parameters).item())
    assert found == pytest.approx([10**0.5, 10**0.5, 1.0])
