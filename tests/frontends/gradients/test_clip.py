"""Clipping gives DDP's total norm and gradients, through our method and through torch's
function."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from fsdp_compat import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._state.units import clean_name
from fsdp_compat.wrap import CustomPolicy, ModuleWrapPolicy
from tests.support.models import DIM, Block, Inner, Outer, Stack, frozen
from tests.support.pairwise import each_value, pairs
from tests.support.parity import both_forms, flat_form, original_form, whole_gradients
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import MESSAGES
from tests.support.sampling import sample

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
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.ddp = DDP(build(), find_unused_parameters=True)
        torch.manual_seed(0)
        options.setdefault("auto_wrap_policy", ModuleWrapPolicy(units))
        self.model = FSDP(build(), **options)
        for model in (self.ddp, self.model):
            model(batch()).double().pow(1).sum().backward()
        named = self.ddp.module.named_parameters()
        self._whole = {
            name: p.grad for name, p in named if p.grad is not None and p.grad.numel()
        }  # torch has no inf norm of an empty tensor
        self._sharded = [
            (p, None if p.grad is None else p.grad.clone()) for p in self.model.parameters()
        ]

    def expected(
        self, norm_type: float, only: Callable[[str], bool] = lambda name: True
    ) -> tuple[Tensor, dict[str, Tensor], float]:
        """DDP's gradients in float64, clipped to 0.3 of their norm by torch: the norm, the
        gradients, the maximum."""
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
    """Equal up to rounding, relative to the largest element: ranks add in another order than
    DDP."""
    rtol = max(RTOL, torch.finfo(got.dtype).eps)
    atol = rtol * expected.abs().max().item()
    torch.testing.assert_close(
        got.detach().double(), expected.double(), rtol=0, atol=atol, msg=lambda m: f"{what}: {m}"
    )


def _clip(model: FSDP, by_torch: bool, max_norm: float, norm_type: float) -> Tensor:
    return (
        clip_grad_norm_(model.parameters(), max_norm, norm_type)
        if by_torch
        else model.clip_grad_norm_(max_norm, norm_type)
    )


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
) -> list[tuple[float, str]]:
    """Return the norms and their dtypes."""
    found = []
    ((_, options),) = _strategies(strategy)
    offload = CPUOffload(offload_params=strategy is FULL_SHARD)
    pair = Pair(*MODELS[name], use_orig_params=use_orig_params, cpu_offload=offload, **options)
    for norm_type in NORM_TYPES:
        where = f"norm type {norm_type}"
        norm, clipped, max_norm = pair.expected(norm_type)
        pair.restore()
        got = pair.model.clip_grad_norm_(max_norm, norm_type)
        _assert_close(got, norm, where)
        if norm_type in (1, math.inf):  # the norm says by how much all are clipped
            pair.assert_gradients(clipped, where)
        found.append((got.item(), str(got.dtype)))
    unclipped = pair.gradients()
    for max_norm in (norm.item(), 3 * norm.item(), math.inf):  # now at 0.3
        pair.model.clip_grad_norm_(max_norm, norm_type)
    assert all(
        a is b is None or torch.equal(a, b)
        for a, b in zip(unclipped.values(), pair.gradients().values(), strict=True)
    )
    pair.model.clip_grad_norm_(0, norm_type)
    assert not any(grad.any() for grad in pair.gradients().values() if grad is not None)
    return found


@each_value
@both_forms
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_norm_and_clipped_gradients_equal_ddp(
    name: str, num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    first, *others = run_ranks(num_ranks, _clips_as_ddp, name, strategy, use_orig_params)
    assert len(first) == len(NORM_TYPES)
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
        policy = CustomPolicy(partial(_chooses, options))
        pair = Pair(
            _partly_frozen,
            set(),
            _vectors,
            use_orig_params=use_orig_params,
            auto_wrap_policy=policy,
        )
        # Every norm type is combined with either call and with either form.
        for norm_type in NORM_TYPES[by_torch ^ use_orig_params :: 2]:
            where = f"{strategy.name} inside, norm type {norm_type}"
            norm, clipped, max_norm = pair.expected(norm_type)
            pair.restore()
            _assert_close(_clip(pair.model, by_torch, max_norm, norm_type), norm, where)
            pair.assert_gradients(clipped, where)


def _the_same_vectors() -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(5))


@each_value
@both_forms
@pytest.mark.parametrize(
    "kind", ["ignored_modules", "ignored_states", "parameters", "parameters, by torch"]
)
@on_ranks(2)
def test_gradients_of_ignored_parameters_count_once(kind: str, use_orig_params: bool) -> None:
    for strategy, options in _strategies(FULL_SHARD, NO_SHARD, HYBRID[0]):
        torch.manual_seed(0)
        ddp = DDP(Stack())
        torch.manual_seed(0)
        module = Stack()
        ignored = [module.head, module.blocks[1].norm]
        if kind.startswith("parameters"):
            options["ignored_states"] = [p for child in ignored for p in child.parameters()]
        else:
            options[kind] = ignored
        model = FSDP(
            module,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            **options,
        )
        for norm_type in (1, 2.0, math.inf):
            for m in (ddp, model):
                m.zero_grad()
                m(_the_same_vectors()).pow(2).sum().backward()
            whole = [_with_grad(p.grad.double()) for p in ddp.parameters()]
            norm = clip_grad_norm_(whole, 0.1, norm_type)
            where = f"{strategy.name}, norm type {norm_type}"
            _assert_close(_clip(model, kind == "parameters, by torch", 0.1, norm_type), norm, where)
            for grad, wanted in zip(whole_gradients(model).values(), whole, strict=True):
                _assert_close(grad, wanted.grad, where)


@each_value
@both_forms
@both_calls
@on_ranks(3)
def test_norm_without_gradients_is_zero(by_torch: bool, use_orig_params: bool) -> None:
    for _, options in _strategies():
        model = FSDP(Stack(), use_orig_params=use_orig_params, **options)
        with contextlib.nullcontext() if by_torch else pytest.warns(match="no gradients"):
            assert not any(_clip(model, by_torch, 1.0, kind).item() for kind in NORM_TYPES)
        assert all(p.grad is None for p in model.parameters())
    if not by_torch:
        with model.no_sync():
            model(_vectors()).sum().backward()
        with pytest.warns(match="gradients of no_sync"):
            model.clip_grad_norm_(1.0)


@flat_form
@on_ranks(2)
def test_mixed_precision_clips_the_gradients_the_optimizer_sees(
    use_orig_params: bool,
) -> None:
    """The shards' gradients are float32; clipping uses the gradients that the optimizer sees."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = ModuleWrapPolicy({Block})
    model = FSDP(
        Stack(), auto_wrap_policy=policy, mixed_precision=precision, use_orig_params=use_orig_params
    )
    for norm_type in NORM_TYPES:
        model.zero_grad()
        model(_vectors()).float().pow(2).sum().backward()
        whole = [_with_grad(grad.double()) for grad in whole_gradients(model).values()]
        norm = clip_grad_norm_(whole, 0.1, norm_type)
        got = model.clip_grad_norm_(0.1, norm_type)
        assert got.dtype == torch.float32
        _assert_close(got, norm, f"norm type {norm_type}")
        for grad, wanted in zip(whole_gradients(model).values(), whole, strict=True):
            _assert_close(grad, wanted.grad, f"norm type {norm_type}")


# -- communication


@contextlib.contextmanager
def _counting_collectives(found: collections.Counter[str]) -> Iterator[None]:
    """Count the collectives on any process group."""
    names = [
        "allreduce",
        "allgather",
        "_allgather_base",
        "reduce_scatter",
        "_reduce_scatter_base",
        "broadcast",
        "send",
        "recv",
    ]
    classes = dist.ProcessGroup, dist.ProcessGroupGloo
    own = {(cls, name): cls.__dict__.get(name) for cls in classes for name in names}

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return original(*args, **kwargs)

        return call

    for cls, name in own:
        setattr(cls, name, counted(name, getattr(cls, name)))
    try:
        yield
    finally:
        for (cls, name), original in own.items():
            if original is None:  # inherited
                delattr(cls, name)
            else:
                setattr(cls, name, original)


@flat_form
@on_ranks(4, environment=MESSAGES)
def test_clipping_sends_one_message_to_each_rank_and_none_without_sharding(
    use_orig_params: bool,
) -> None:
    sent = {}
    for strategy, options in _strategies():
        model = FSDP(
            Stack(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            **options,
        )
        model(_vectors()).pow(2).sum().backward()
        for norm_type in NORM_TYPES:
            found: collections.Counter[str] = collections.Counter()
            with _counting_collectives(found):
                model.clip_grad_norm_(1.0, norm_type)
            assert sent.setdefault(strategy.name, dict(found)) == dict(found)
    names = ("FULL_SHARD", "SHARD_GRAD_OP"), ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    of_four, of_two = {"send": 3, "recv": 3}, {"send": 1, "recv": 1}
    assert sent == {
        **dict.fromkeys(names[0], of_four),
        **dict.fromkeys(names[1], of_two),
        "NO_SHARD": {},
    }


class _Kernels(TorchDispatchMode):
    """Counts the tensors that norms are computed of, and those that are scaled, by operator
    name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_foreach_norm", "_foreach_mul_"):
            self.found[func.overloadpacket.__name__] += len(args[0])
        return func(*args, **(kwargs or {}))


def _counts_kernels(use_orig_params: bool) -> list[dict[str, int]]:
    """For a model of five units: gradients as backward leaves them, with one replaced, and with one
    dropped."""
    model = FSDP(
        nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)), nn.Linear(5, 5)),
        auto_wrap_policy=CustomPolicy(lambda module: isinstance(module, nn.Linear)),
        use_orig_params=use_orig_params,
    )
    model(torch.ones(2, 5)).sum().backward()
    found = []
    parameters = [p for p in model.parameters() if p.numel()]
    for change in (None, lambda grad: grad.clone(), lambda grad: None):
        if change is not None:
            parameters[0].grad = change(parameters[0].grad)
        with _Kernels() as kernels:
            model.clip_grad_norm_(1.0)
        found.append(dict(kernels.found))
    return found


def test_clipping_takes_one_norm_and_one_product_per_unit() -> None:
    for found in run_ranks(2, _counts_kernels, False):
        assert found == [{"_foreach_norm": 5, "_foreach_mul_": 5}] * 2 + [
            {"_foreach_norm": 4, "_foreach_mul_": 4}
        ]
    for rank, found in enumerate(run_ranks(2, _counts_kernels, True)):
        assert found[0] == {"_foreach_norm": 5, "_foreach_mul_": 5}
        # Without its total, the unit has this rank's parts of weight and bias: rank 0 of the
        # weight only.
        alone = [
            {"_foreach_norm": 5, "_foreach_mul_": 5},
            {"_foreach_norm": 6, "_foreach_mul_": 6},
        ][rank]
        assert found[1] == alone


# -- non-finite numbers


@both_forms
@on_ranks(2)
def test_one_nonfinite_element_makes_norm_and_gradients_nonfinite_everywhere(
    use_orig_params: bool,
) -> None:
    for strategy, options in _strategies(FULL_SHARD, NO_SHARD, HYBRID[0]):
        model = FSDP(
            Stack(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            **options,
        )
        model(_vectors()).pow(2).sum().backward()
        grads = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        for bad, culprit, norm_type in pairs((math.nan, -math.inf), range(2), NORM_TYPES):
            for p, grad in grads:
                p.grad = grad.clone()
            if dist.get_rank() == culprit or strategy is not FULL_SHARD:  # copies are equal
                next(p for p, grad in grads if grad.numel()).grad[(0,)] = bad
            norm = model.clip_grad_norm_(1.0, norm_type).item()
            values = torch.cat([p.grad.flatten() for p, _ in grads])
            finite, where = values[values.isfinite()], (strategy, bad, culprit, norm_type)
            if math.isnan(bad):
                assert math.isnan(norm) and not len(finite), where
            else:
                assert norm == math.inf and len(finite) and not finite.any(), where


# -- arguments


@on_ranks(2)
def test_norm_type_accepts_the_string_inf() -> None:
    model = FSDP(Stack())
    model(_vectors()).pow(2).sum().backward()
    largest = model.clip_grad_norm_(math.inf, math.inf)
    assert torch.equal(model.clip_grad_norm_(math.inf, "inf"), largest)  # as in torch's docstring
    assert torch.equal(model.clip_grad_norm_(max_norm=1, norm_type=float("inf")), largest)
    _assert_close(
        model.clip_grad_norm_(max_norm=math.inf, norm_type=math.inf),
        torch.tensor(1.0),
        "a maximum of 1",
    )


# -- torch's function on sharded parameters


def _clips_by_torch(name: str, use_orig_params: bool) -> list[float]:
    found = []
    for number, (strategy, options) in enumerate(_strategies()):
        pair = Pair(*MODELS[name], use_orig_params=use_orig_params, **options)
        calls = (
            (1, None),
            (2.0, True),
            (3, None),
            (0.5, False),
            (math.inf, None),
            (math.inf, False),
            (math.inf, True),
            (2.0, None),
        )
        # Every two of a strategy, a form and a call are combined.
        for norm_type, foreach in calls[(number + use_orig_params) % 2 :: 2]:
            where = f"{strategy.name}, norm type {norm_type}, foreach={foreach}"
            norm, clipped, max_norm = pair.expected(norm_type)
            pair.restore()
            got = clip_grad_norm_(pair.model.parameters(), max_norm, norm_type, foreach=foreach)
            _assert_close(got, norm, where)
            if norm_type in (0.5, 2.0):
                pair.assert_gradients(clipped, where)
            found.append(got.item())
        clipped = pair.gradients()
        clip_grad_norm_(
            pair.model.parameters(), norm.item(), norm_type=norm_type, error_if_nonfinite=True
        )
        assert all(
            a is b is None or torch.equal(a, b)
            for a, b in zip(clipped.values(), pair.gradients().values(), strict=True)
        )
    return found


@pytest.mark.parametrize(
    ("name", "num_ranks", "use_orig_params"),
    sample(
        [
            ("blocks", 2, False),
            ("units inside units, partly frozen", 4, True),
            ("fewer elements than ranks", 1, True),
            ("fewer elements than ranks", 3, False),
        ],
        *(1, 3),
    ),
)
def test_torch_clip_grad_norm_equals_ddp(name: str, num_ranks: int, use_orig_params: bool) -> None:
    first, *others = run_ranks(num_ranks, _clips_by_torch, name, use_orig_params)
    assert all(found == first for found in others), "the ranks differ"


@original_form
@on_ranks(2)
def test_torch_clip_grad_norm_of_some_parameters_uses_their_norm(
    use_orig_params: bool,
) -> None:
    for strategy, options in _strategies(FULL_SHARD, HYBRID[0]):
        pair = Pair(*MODELS["blocks"], use_orig_params=use_orig_params, **options)
        parts: dict[str, tuple[list[nn.Parameter], Callable[[str], bool]]] = {
            "a unit": (
                list(pair.model.blocks[1].parameters()),
                lambda name: name.startswith("blocks.1."),
            ),
            "two units": (
                list(pair.model.blocks[:2].parameters()),
                lambda name: name.startswith(("blocks.0.", "blocks.1.")),
            ),
        }
        path = ""
        if use_orig_params:
            for path, p in pair.model.named_parameters():
                parts[path] = [p], partial(operator.eq, clean_name(path))
        for part, (parameters, only) in parts.items():
            for norm_type in NORM_TYPES if part in ("a unit", "two units") else (math.inf,):
                norm, clipped, max_norm = pair.expected(norm_type, only)
                pair.restore()
                where = f"{strategy.name}, {part}, norm type {norm_type}"
                _assert_close(clip_grad_norm_(iter(parameters), max_norm, norm_type), norm, where)
                pair.assert_gradients(clipped, where)
        pair.restore()
        (one, *_), only = parts[path if use_orig_params else "a unit"]
        norm, clipped, max_norm = pair.expected(2.0, only)
        _assert_close(clip_grad_norm_(one, max_norm), norm, "a tensor alone")
        pair.assert_gradients(clipped, "a tensor alone")
        assert clip_grad_norm_([], 1.0).item() == 0.0


def _plain() -> nn.Linear:
    torch.manual_seed(3)
    plain = nn.Linear(DIM, 5)
    plain(_the_same_vectors()).pow(2).sum().backward()
    return plain


@original_form
@on_ranks(2)
def test_torch_clip_grad_norm_counts_unsharded_gradients_once(
    use_orig_params: bool,
) -> None:
    for strategy, options in _strategies(FULL_SHARD, NO_SHARD, HYBRID[0]):
        pair = Pair(*MODELS["blocks"], use_orig_params=use_orig_params, **options)
        foreachs = itertools.cycle((None, False, True))
        for norm_type, plain_first, foreach in zip(
            NORM_TYPES, itertools.cycle((False, True)), foreachs, strict=False
        ):
            where = (
                f"{strategy.name}, norm type {norm_type}, plain first: {plain_first}, "
                f"foreach={foreach}"
            )
            plain, reference = _plain(), _plain()
            _, wanted, _ = pair.expected(norm_type, only=lambda name: False)
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
        for norm_type in (2.0, math.inf):
            norm, clipped, max_norm = pair.expected(norm_type)
            pair.restore()
            got = get_total_norm(
                [p.grad for p in pair.model.parameters() if p.grad is not None], norm_type
            )
            _assert_close(got, norm, f"{strategy.name}, norm type {norm_type}")
            clip_grads_with_norm_(pair.model.parameters(), max_norm, got)
            pair.assert_gradients(clipped, f"{strategy.name}, norm type {norm_type}")


def _refuses_what_is_not_finite(use_orig_params: bool) -> list[str]:
    """Only rank 1 has the non-finite element."""
    messages = []
    model = FSDP(Stack(), use_orig_params=use_orig_params)
    model(_vectors()).pow(2).sum().backward()
    grads = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    for bad, norm_type, foreach in pairs((math.nan, math.inf), NORM_TYPES, (None, False, True)):
        for p, grad in grads:
            p.grad = grad.clone()
        if dist.get_rank() == 1:
            next(p for p, grad in grads if grad.numel()).grad[(0,)] = bad
        before = [p.grad.clone() for p, _ in grads]
        with pytest.raises(RuntimeError, match="non-finite") as caught:
            clip_grad_norm_(
                model.parameters(), 1.0, norm_type, error_if_nonfinite=True, foreach=foreach
            )
        for (p, _), grad in zip(grads, before, strict=True):
            assert torch.equal(p.grad.nan_to_num(), grad.nan_to_num())
        messages.append(str(caught.value))
        norm = clip_grad_norm_(model.parameters(), 1.0, norm_type, foreach=foreach).item()
        assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    return messages


@both_forms
def test_torch_clip_grad_norm_reports_nonfinite_values_on_every_rank(
    use_orig_params: bool,
) -> None:
    first, second = run_ranks(2, _refuses_what_is_not_finite, use_orig_params, group_timeout=20)
    assert first == second


def _by_definition(grads: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """As defined by torch's documentation, in its order of operations."""
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(grad, norm_type) for grad in grads]), norm_type
    )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor)
    return norm


@on_ranks(2, group_timeout=15)
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
    """Return which parameters have gradients, and the norm with its dtype, for a model of one
    dtype."""
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


@on_ranks(4)
def test_ranks_without_clipped_gradients_take_part() -> None:
    """Two of the four ranks hold no elements: clip with our function, with torch's, and only the
    bias."""
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
