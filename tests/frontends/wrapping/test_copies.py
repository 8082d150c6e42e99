"""copy.deepcopy, pickle and torch.save of wrapped models give a correct, complete and independent
model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_compat import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    StateError,
    UsageError,
    register_fsdp_forward_method,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._engine.unit import Residency
from fsdp_compat._state.units import clean_name
from fsdp_compat.errors import FsdpCompatError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.models import DIM, Block, Fragile, Inner, Odd, Outer, Stack, chain
from tests.support.pairwise import each_value
from tests.support.parity import Pair, assert_close, both_forms, flat_form, original_form, seeded
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import sample

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
HYBRID = ShardingStrategy.HYBRID_SHARD


# -- the ways to copy


def by_deepcopy(model: Any) -> Any:
    return copy.deepcopy(model)


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = (by_deepcopy, by_pickle, by_torch_save)
TWO_WAYS = (by_deepcopy, by_pickle)  # torch.save pickles
ways = pytest.mark.parametrize("way", WAYS)


# -- the models


class Tied(nn.Module):
    """Weights tied inside a unit, and across units and the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(DIM, DIM) for _ in range(3))
        self.inside = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
        self.second.weight = self.first.weight
        self.inside[1].weight = self.inside[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.third(self.second(self.first(x).tanh())).tanh())


class Mixed(nn.Module):
    """Frozen parts, several dtypes and buffers in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(DIM))
        self.frozen = nn.Parameter(torch.randn(DIM, DIM), requires_grad=False)
        self.inner = nn.Linear(DIM, DIM)
        self.wide = nn.Parameter(torch.randn(DIM, dtype=torch.float64))
        self.last = nn.Parameter(torch.randn(3, DIM))
        self.inner.weight.requires_grad_(False)
        self.norm = nn.BatchNorm1d(DIM)
        self.register_buffer("kept", torch.randn(DIM))
        self.register_buffer("unsaved", torch.randn(DIM), persistent=False)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        x = self.norm(self.inner(x) @ self.frozen + self.first * self.kept)
        return (x * self.unsaved + (x * self.wide).to(x.dtype)) @ self.last.T


class Container(nn.Module):
    """Not a wrapper itself; contains several roots and a plain part."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.plain = Stack(1), Stack(1), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.one(x) + self.other(x))


MODELS: dict[str, tuple[Callable[[], nn.Module], set[type[nn.Module]]]] = {
    "stack": (Stack, {Block}),
    "nested": (partial(Stack, 2, Outer), {Outer, Inner}),
    "tied": (Tied, {nn.Linear}),
    "tied and nested": (partial(chain, Tied, Tied), {Tied, nn.Sequential}),
    "mixed": (Mixed, {nn.Linear}),
    "mixed inside": (partial(chain, Mixed, partial(nn.Linear, 3, DIM), Mixed), {Mixed}),
    "odd": (partial(chain, Odd, partial(nn.Linear, DIM, DIM)), {Odd}),
}


def make(name: str, **options: Any) -> tuple[nn.Module, FSDP]:
    build, units = MODELS[name]
    return seeded(build), FSDP(seeded(build), auto_wrap_policy=ModuleWrapPolicy(units), **options)


def batch(seed: int) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed))


# The same batch on all ranks; otherwise batch norm would see only its rank's part.
pair_of = partial(Pair, data_ranks=1)


def storages(model: nn.Module) -> set[int]:
    """Return the storages of nonempty parameters and of buffers."""
    return {
        t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()) if t.numel()
    }


def assert_apart(one: nn.Module, other: nn.Module) -> None:
    """Assert that the two share no modules, parameters or memory."""
    assert not {id(m) for m in one.modules()} & {id(m) for m in other.modules()}, (
        "modules are shared"
    )
    assert not {id(p) for p in one.parameters()} & {id(p) for p in other.parameters()}, (
        "parameters are shared"
    )
    assert not storages(one) & storages(other), "memory is shared"
    for model in (one, other):
        for instance in FSDP.fsdp_modules(model):
            for child in instance._unit.view.modules():
                assert child in set(instance.modules()), (
                    "a unit swaps parameters of another model's modules"
                )
            for group in instance._unit.groups:
                for target, _ in group.store.sharded_params:
                    part = (
                        target.untyped_storage().data_ptr()
                        == group.store.shard.untyped_storage().data_ptr()
                    )
                    assert part or not target.numel(), "a parameter is no part of its unit's shard"


def layout_of(model: nn.Module) -> list[tuple[Any, ...]]:
    return [
        (name, type(p), tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


# -- the copy equals the original and is independent


def _copies(name: str, some_ways: tuple[Callable[[Any], Any], ...], use_orig_params: bool) -> None:
    for way in some_ways:
        with about(way.__name__):
            plain, model = make(name, use_orig_params=use_orig_params)
            first = pair_of(plain, model)
            first.step()
            names, parameters = layout_of(model), list(model.parameters())
            second = pair_of(copy.deepcopy(plain), way(model))
            assert type(second.model) is FSDP and second.model.check_is_root()
            assert layout_of(second.model) == names == layout_of(model), (
                "parameters in the same order"
            )
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True)), (
                "the original keeps its objects"
            )
            assert [n for n, _ in second.model.named_buffers()] == [
                n for n, _ in model.named_buffers()
            ]
            assert all(p.grad is None for p in second.model.parameters()), (
                "as for parameters, without gradients"
            )
            assert_apart(model, second.model)
            second.assert_state_equal()
            assert repr(second.model) == repr(model)
            first.step()  # with different data and optimizer state
            second.step()
            first.assert_state_equal()
            third = pair_of(copy.deepcopy(second.plain), way(second.model))  # a copy of a copy
            third.step()
            second.assert_state_equal()
            state, expected = sharded_state(third.model), third.model.state_dict()
            second.model.load_state_dict(state)
            for key, value in second.model.state_dict().items():
                assert torch.equal(value, expected[key]), key


def sharded_state(model: FSDP) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.state_dict()


@pytest.mark.parametrize(("number", "name"), list(enumerate(MODELS)))
def test_a_copy_equals_the_original_and_trains_on_its_own(number: int, name: str) -> None:
    """In one way, or deeply and in another."""
    some_ways = sample((by_deepcopy, WAYS[1 + number // 2 % 2]), number % 3 % 2)
    run_ranks(2, _copies, name, tuple(some_ways), number % 2 == 1)


@each_value
@both_forms
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_copies_on_any_number_of_ranks(num_ranks: int, use_orig_params: bool) -> None:
    run_ranks(num_ranks, _copies, "mixed", (by_deepcopy, by_torch_save), use_orig_params)


@original_form
@on_ranks(2)
def test_a_copy_has_the_settings_of_the_original(use_orig_params: bool) -> None:
    for options in (
        {"sharding_strategy": SHARD_GRAD_OP},
        {"sharding_strategy": NO_SHARD},
        {"cpu_offload": CPUOffload(offload_params=True)},
        {"allow_unused_units": True},
        {"ignored": True},
    ):
        with about(options):
            if options.pop("ignored", False):
                plain, inner = seeded(Stack), seeded(Stack)
                model = FSDP(inner, ignored_modules=[inner.head], use_orig_params=use_orig_params)
            else:
                plain, model = make("stack", use_orig_params=use_orig_params, **options)
            first = pair_of(plain, model)
            first.step()
            second = pair_of(copy.deepcopy(plain), copy.deepcopy(model))
            third = pair_of(copy.deepcopy(plain), by_pickle(model))
            for trains in (first, second, third):
                trains.step()
            assert (
                second.model.sharding_strategy
                is model.sharding_strategy
                is third.model.sharding_strategy
            )


@flat_form
@on_ranks(4)
def test_a_copy_of_replicated_shards_uses_the_same_groups(use_orig_params: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    plain, model = make(
        "stack", use_orig_params=use_orig_params, sharding_strategy=HYBRID, device_mesh=mesh
    )
    first = pair_of(plain, model)
    first.step()
    for way in TWO_WAYS:
        second = pair_of(copy.deepcopy(plain), way(model))
        assert second.model.process_group is model.process_group
        second.step()
    first.step()


@original_form
@on_ranks(2)
def test_a_copy_computes_in_the_dtypes_of_the_original(use_orig_params: bool) -> None:
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
    )
    for way in TWO_WAYS:
        _, model = make("mixed inside", use_orig_params=use_orig_params, mixed_precision=precision)
        model.eval()  # batch norm does not communicate
        other = way(model)
        assert torch.equal(model(batch(0)), other(batch(0)))
        assert [(b.dtype, n) for n, b in model.named_buffers()] == [
            (b.dtype, n) for n, b in other.named_buffers()
        ]
        for key, value in other.state_dict().items():
            assert value.dtype == model.state_dict()[key].dtype, key
        grads = []
        for module in (model, other):
            module(batch(1)).float().pow(2).mean().backward()
            grads.append([p.grad for p in module.parameters() if p.numel()])
        for got, expected in zip(*grads, strict=True):
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected)


@flat_form
@on_ranks(2)
def test_a_nested_instance_may_be_copied_alone(use_orig_params: bool) -> None:
    plain, model = make("nested", use_orig_params=use_orig_params)
    pair_of(plain, model).step()
    # A nested instance alone becomes a root.
    for way in TWO_WAYS:
        block = way(model.blocks[0])
        assert block.check_is_root() and not model.blocks[0].check_is_root()
        assert len(FSDP.fsdp_modules(block)) == 3
        trains = pair_of(copy.deepcopy(plain.blocks[0]), block)
        trains.step()
        assert_apart(model, block)
    pair_of(plain, model).step()


@both_forms
@on_ranks(2)
def test_a_container_around_several_roots_may_be_copied(use_orig_params: bool) -> None:
    for way in TWO_WAYS:
        plain, model = seeded(Container), seeded(Container)
        policy = ModuleWrapPolicy({Block})
        model.one = FSDP(model.one, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        model.other = FSDP(model.other, use_orig_params=use_orig_params)
        other = way(model)
        assert layout_of(other) == layout_of(model)
        assert_apart(model, other)
        for module in (plain, model, other):
            module(batch(0)).pow(2).mean().backward()
        expected = dict(plain.named_parameters())
        for module in (model, other):
            with FSDP.summon_full_params(module, with_grads=True):
                for name, parameter in module.named_parameters():
                    assert_close(parameter.grad, expected[clean_name(name)].grad, name)


@both_forms
@on_ranks(2)
def test_copy_of_the_summoned_inner_module_is_a_plain_module(
    use_orig_params: bool,
) -> None:
    """Inside summon_full_params, a copy of the inner module is a plain module."""
    plain, model = make("mixed inside", use_orig_params=use_orig_params)
    pair_of(plain, model).step()
    with FSDP.summon_full_params(model):
        block = copy.deepcopy(model.module[0].module)
    with FSDP.summon_full_params(model, writeback=False):
        linear = pickle.loads(pickle.dumps(model.module[1]))
    for module, name in ((block, "0"), (linear, "1")):
        expected = plain.get_submodule(name)
        module.eval()
        assert {n: p.shape for n, p in module.named_parameters()} == {
            n: p.shape for n, p in expected.named_parameters()
        }
        for key, value in module.state_dict().items():
            assert_close(value, expected.state_dict()[key], key)
        module(batch(1)[:, : 3 if name == "1" else DIM]).sum().backward()
        assert all(p.grad is not None for p in module.parameters() if p.requires_grad and p.numel())
    again = FSDP(block, use_orig_params=use_orig_params)
    again(batch(1)).sum().backward()
    pair_of(plain, model).step()


# -- ties


@both_forms
@on_ranks(2)
def test_tied_weights_stay_tied(use_orig_params: bool) -> None:
    for way in WAYS:
        _, model = make("tied and nested", use_orig_params=use_orig_params)
        other = way(model)
        assert len(list(other.parameters())) == len(list(model.parameters()))
        with FSDP.summon_full_params(other):
            for part in other.module:
                inner = part.module
                assert inner.first.weight is inner.second.weight
                assert inner.inside[0].weight is inner.inside[1].weight
        assert list(other.state_dict()) == list(model.state_dict())


# -- attributes and hooks that users have added


def _note(calls: list[str], what: str, *_: Any) -> None:
    calls.append(what)


class Noting(nn.Module):
    """Records its calls on itself, so that a copy records its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(DIM, DIM), list[str]()
        self.extra = {"numbers": [1, 2], "tensor": torch.ones(2)}

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": len(self.calls)}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


@both_forms
@on_ranks(2)
def test_hooks_attributes_and_registered_methods_are_copied(use_orig_params: bool) -> None:
    for way in WAYS:
        with about(way.__name__):
            inner = Noting()
            inner.register_forward_pre_hook(partial(_note, inner.calls, "before"))
            inner.inner.register_forward_hook(partial(_note, inner.calls, "linear"))
            model = FSDP(
                inner,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                use_orig_params=use_orig_params,
            )
            model.register_forward_hook(partial(_note, inner.calls, "after"))
            model.my_note = "a note"
            for parameter in model.parameters():
                parameter.my_mark = 7
            register_fsdp_forward_method(model, "encode")
            FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
            model.eval()
            other = way(model)
            assert not other.training and not other.module.inner.training
            assert other.my_note == "a note"
            assert other.module.extra["numbers"] is not inner.extra["numbers"]
            assert (
                FSDP.get_state_dict_type(other).state_dict_type is StateDictType.SHARDED_STATE_DICT
            )
            with torch.no_grad():
                assert torch.equal(other.encode(batch(0)), model.encode(batch(0)))
                inner.calls.clear()
                other.module.calls.clear()
                other(batch(0))
            assert (inner.calls, other.module.calls) == ([], ["before", "linear", "after"]), (
                "hooks of the copy note on the copy"
            )
            if (
                use_orig_params and way is not by_deepcopy
            ):  # torch copies parameters without their attributes
                assert [p.my_mark for p in other.parameters()] == [7, 7]
            assert list(other.state_dict()) == list(model.state_dict())


def _halved(state: list[int], grad: Tensor, output: Tensor) -> None:
    """Average by half of the sum over the ranks."""
    state.append(1)
    dist.all_reduce(grad)
    output.copy_(grad.chunk(dist.get_world_size())[dist.get_rank()] / 2)


@both_forms
@on_ranks(2)
def test_copy_keeps_the_communication_hook(use_orig_params: bool) -> None:
    _, model = make("nested", use_orig_params=use_orig_params)
    calls: list[int] = []
    model.register_comm_hook(calls, _halved)
    grads = []
    other = copy.deepcopy(model)
    for module in (model, other):
        calls.clear()
        module(batch(0)).pow(2).mean().backward()
        grads.append([p.grad for p in module.parameters() if p.numel()])
        assert len(calls) == len(FSDP.fsdp_modules(module)), (
            "the hook is shared, and reduces the gradients of both"
        )
    for got, expected in zip(*grads, strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(AssertionError, match="registered already"):
        other.register_comm_hook(calls, _halved)


# -- moments of copying


@flat_form
@on_ranks(2)
def test_copy_works_at_any_point_between_steps(use_orig_params: bool) -> None:
    plain, model = make("stack", use_orig_params=use_orig_params)

    def forward_without_backward() -> None:
        model(batch(7))

    def in_eval() -> None:
        with torch.no_grad():
            model(batch(7))

    def after_no_sync() -> None:
        with model.no_sync():
            model(batch(7)).sum().backward()

    def after_summon() -> None:
        with FSDP.summon_full_params(model):
            pass

    def after_a_state_dict() -> None:
        model.load_state_dict(model.state_dict())

    def in_inference_mode() -> None:
        with torch.inference_mode():
            model(batch(7))

    def after_an_exception() -> None:
        with pytest.raises(TypeError):
            model("no tensor")

    moments = (
        forward_without_backward,
        in_eval,
        after_no_sync,
        after_summon,
        after_a_state_dict,
        in_inference_mode,
        after_an_exception,
    )
    for number, way in enumerate(TWO_WAYS):
        # Every two of a way, a moment and a form are combined.
        for moment in moments[(number + use_orig_params) % 2 :: 2]:
            with about((way.__name__, moment.__name__)):
                moment()
                other = pair_of(copy.deepcopy(plain), way(model))
                other.plain.zero_grad()
                other.step()
                model.zero_grad()
                plain.zero_grad()
                for module in (model, plain):
                    module(batch(2)).pow(2).mean().backward()
                pair_of(plain, model).assert_state_equal()
                model.zero_grad()


@both_forms
@on_ranks(2)
def test_copy_does_not_affect_accumulated_gradients(use_orig_params: bool) -> None:
    plain, model = make("stack", use_orig_params=use_orig_params)
    with model.no_sync():
        model(batch(0)).pow(2).mean().backward()
        other = copy.deepcopy(model)
        for unit in other._runtime.units:
            assert unit.residency is Residency.SHARDED
    # The copy begins without the accumulated gradients of the original.
    pair_of(copy.deepcopy(plain), other).step()
    model(batch(1)).pow(2).mean().backward()
    for seed in (0, 1):
        plain(batch(seed)).pow(2).mean().backward()
    expected = dict(plain.named_parameters())
    with FSDP.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad, expected[name].grad, f"accumulated gradient of {name}")


@original_form
@on_ranks(2)
def test_copy_works_after_an_exception_in_backward(use_orig_params: bool) -> None:
    def fragile() -> nn.Sequential:
        return chain(Block, Fragile, Block)

    for way in TWO_WAYS:
        plain = seeded(fragile)
        model = FSDP(
            seeded(fragile),
            auto_wrap_policy=ModuleWrapPolicy({Block, Fragile}),
            use_orig_params=use_orig_params,
        )
        model[1].module.fault_in_backward = True
        with pytest.raises(ValueError, match="backward"):
            model(batch(0)).sum().backward()
        model[1].module.fault_in_backward = False
        other = way(model)
        for trains in (pair_of(copy.deepcopy(plain), other), pair_of(plain, model)):
            trains.model.zero_grad()
            trains.step()


class CopiesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(DIM, DIM), None

    def forward(self, x: Tensor) -> Tensor:
        if self.act is not None:
            self.act[0]()
        return self.linear(x)


@both_forms
@on_ranks(2)
def test_copies_inside_forward_or_summon_raise(use_orig_params: bool) -> None:
    inner = CopiesItself()
    model = FSDP(inner, use_orig_params=use_orig_params)
    for what, way in (
        ("copy.deepcopy", by_deepcopy),
        ("pickle", by_pickle),
        ("pickle", by_torch_save),
    ):
        with (
            FSDP.summon_full_params(model),
            pytest.raises(StateError, match=rf"{what} does not work inside summon_full_params"),
        ):
            way(model)
        inner.act = [partial(way, model)]
        with pytest.raises(StateError, match=rf"{what} was called while the model runs"):
            model(batch(0))
        inner.act = None
        before = model(batch(0))
        assert torch.equal(way(model)(batch(0)), before)
        assert torch.equal(model(batch(0)), before)


class NoCopy:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("cannot be copied")

    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be copied")


@flat_form
@on_ranks(2)
def test_failed_copy_leaves_the_original_unchanged(use_orig_params: bool) -> None:
    plain, model = make("nested", use_orig_params=use_orig_params)
    names = layout_of(model)
    model.module.head.odd = NoCopy()
    for way in TWO_WAYS:
        with pytest.raises(RuntimeError, match="cannot be copied"):
            way(model)
        assert layout_of(model) == names
        pair_of(plain, model).step()
    del model.module.head.odd
    for way in TWO_WAYS:
        pair_of(copy.deepcopy(plain), way(model)).step()


# -- moving averages, optimizers


@each_value
@both_forms
@pytest.mark.parametrize("name", ["nested", "mixed", "tied"])
@on_ranks(2)
def test_moving_average_over_parameter_pairs_equals_unsharded(
    name: str, use_orig_params: bool
) -> None:
    plain, model = make(name, use_orig_params=use_orig_params)
    ema, plain_ema = (copy.deepcopy(m).eval().requires_grad_(False) for m in (model, plain))
    assert all(p.requires_grad is False for p in ema.parameters()) and any(
        p.requires_grad for p in model.parameters()
    )
    trains = pair_of(plain, model)
    for _ in range(2):
        trains.step()
        with torch.no_grad():
            for averaged, current in ((plain_ema, plain), (ema, model)):
                for e, p in zip(averaged.parameters(), current.parameters(), strict=True):
                    e.lerp_(p, 0.25)
    expected = dict(plain_ema.named_parameters())
    for key, value in ema.state_dict().items():
        if key in expected:
            assert_close(value, expected[key], key)
    plain_ema.eval()
    ema.eval()
    ema.load_state_dict(ema.state_dict())
    with torch.no_grad():
        for (key, value), (_, wanted) in zip(
            ema.named_buffers(), plain_ema.named_buffers(), strict=True
        ):
            assert_close(value, wanted, key)
        assert_close(ema(batch(9)), plain_ema(batch(9)), "evaluation of the average")
    trains.step()


@original_form
@on_ranks(2)
def test_torch_averaged_model_equals_unsharded(use_orig_params: bool) -> None:
    for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"use_buffers": True}):
        with about(options):
            plain, model = make(
                "mixed inside" if "use_buffers" not in options else "nested",
                use_orig_params=use_orig_params,
            )
            averages = [AveragedModel(module, **options) for module in (plain, model)]
            trains = pair_of(plain, model)
            for _ in range(2):
                trains.step()
                for average, current in zip(averages, (plain, model), strict=True):
                    average.update_parameters(current)
            expected, state = averages[0].module.state_dict(), averages[1].module.state_dict()
            assert list(state) == list(expected)
            for key, value in expected.items():
                assert_close(state[key], value, key)
            for average in averages:
                average.eval()
            with torch.no_grad():
                assert_close(averages[1](batch(4)), averages[0](batch(4)), "the average's output")
            wrapper_state = averages[1].state_dict()
            assert set(wrapper_state) == set(averages[0].state_dict())
            averages[1].load_state_dict(wrapper_state)
            trains.step()


@on_ranks(2)
def test_model_and_optimizer_can_be_copied_together() -> None:
    plain, model = make("mixed inside", use_orig_params=True)
    trainable = [[p for p in m.parameters() if p.requires_grad] for m in (plain, model)]
    optims = [torch.optim.Adam(parameters, lr=0.01) for parameters in trainable]

    def step(modules: Any, optims: Any, seed: int) -> None:
        for module, optim in zip(modules, optims, strict=True):
            module(batch(seed)).pow(2).mean().backward()
            optim.step()
            optim.zero_grad()

    step((plain, model), optims, 0)
    both = copy.deepcopy((model, optims[1]))
    plain_both = copy.deepcopy((plain, optims[0]))
    held = {id(p) for group in both[1].param_groups for p in group["params"]}
    assert held == {id(p) for p in both[0].parameters() if p.requires_grad}, "of the copy"
    assert both[1].state.keys() == {
        p for p in both[0].parameters() if p.requires_grad and p.numel()
    }
    for seed in (1, 2):
        step((plain_both[0], both[0]), (plain_both[1], both[1]), seed)
        step((plain, model), optims, 10 + seed)
    for one, other in ((plain_both[0], both[0]), (plain, model)):
        state = other.state_dict()
        for key, value in one.state_dict().items():
            assert_close(state[key], value, key)


@each_value
@both_forms
@ways
@on_ranks(2)
def test_copied_optimizer_trains_its_model_or_raises(
    way: Callable[[Any], Any], use_orig_params: bool
) -> None:
    """If the copy has new parameters, the step raises."""
    plain, model = make("nested", use_orig_params=use_orig_params)
    optim, plain_optim = (
        torch.optim.SGD(model.parameters(), 0.1),
        torch.optim.SGD(plain.parameters(), 0.1),
    )
    other, other_optim = way((model, optim))
    for module in (plain, other):
        module(batch(0)).pow(2).mean().backward()
    plain_optim.step()
    try:
        other_optim.step()
    except FsdpCompatError as error:
        assert way is not by_deepcopy, "deepcopy keeps what is shared"
        assert "pickled separately from its model" in str(error)
        return
    for key, value in other.state_dict().items():
        assert_close(value, plain.state_dict()[key], key)


# -- size


@both_forms
@on_ranks(2)
def test_a_pickle_is_as_large_as_the_shard(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    model(torch.randn(2, 256)).sum().backward()
    shard = sum(group.store.shard.nbytes for group in model._runtime.groups)
    file = io.BytesIO()
    torch.save(model, file)
    sizes = [shard, len(pickle.dumps(model)), len(file.getvalue())]
    for way in WAYS:
        other = way(model)
        memory = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
            for p in other.parameters()
            if p.numel()
        }
        assert sum(memory.values()) <= shard + 4096, (
            "the parameters of the copy hold its shard, and nothing else"
        )
    shard, *packed = sizes
    assert shard >= 4 * 256 * 257 * 4 // 2
    for nbytes in packed:
        assert shard <= nbytes <= 1.1 * shard + 40_000


def _hands_a_pickle_over(use_orig_params: bool) -> bytes:
    _, model = make("nested", use_orig_params=use_orig_params)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    return pickle.dumps(model)


def _takes_its_pickle(packed: list[bytes]) -> None:
    model = pickle.loads(packed[dist.get_rank()])
    plain = seeded(MODELS["nested"][0])
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.fill_(0.25)
    trains = pair_of(plain, model)
    trains.assert_state_equal()
    for _ in range(2):
        trains.step()


@original_form
def test_pickle_loads_in_another_program_with_the_same_world_size(use_orig_params: bool) -> None:
    run_ranks(2, _takes_its_pickle, run_ranks(2, _hands_a_pickle_over, use_orig_params))


def _loads_another_ranks_pickle(packed: bytes, strategy: ShardingStrategy | None) -> str:
    if strategy is not None:
        *_, model = make("stack", sharding_strategy=strategy)
        given = [pickle.dumps(model)]
        dist.broadcast_object_list(given, 0)
        packed = given[0]
    try:
        model = pickle.loads(packed)
    except UsageError as error:
        return str(error)
    if strategy is NO_SHARD:
        model(batch(0)).sum().backward()
    return ""


def test_a_pickle_of_another_rank_or_number_of_ranks_raises() -> None:
    mine, other = run_ranks(2, _loads_another_ranks_pickle, b"", FULL_SHARD)
    assert mine == ""
    assert "expected: the shards of rank 1 of 2" in other
    assert "got:      those of rank 0" in other
    (packed,) = run_ranks(1, _hands_a_pickle_over, True)
    for message in run_ranks(2, _loads_another_ranks_pickle, packed, None):
        assert "of the ranks [0]" in message


def test_replicas_may_load_one_pickle() -> None:
    assert run_ranks(2, _loads_another_ranks_pickle, b"", NO_SHARD) == ["", ""]
