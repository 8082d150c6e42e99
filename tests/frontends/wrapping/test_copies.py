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

from fsdp_compat import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    UsageError,
    register_fsdp_forward_method,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.errors import FsdpCompatError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.models import DIM, Block, Fragile, Inner, Odd, Outer, Stack, Tied, chain
from tests.support.pairwise import each_value
from tests.support.parity import (
    Pair,
    assert_same_values,
    both_forms,
    both_strategies,
    make_pair,
    seeded,
)
from tests.support.ranks import on_ranks, run_ranks

NO_SHARD = ShardingStrategy.NO_SHARD


# -- the ways to copy


Way = Callable[[Any], Any]


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


MODELS: dict[str, tuple[Callable[[], nn.Module], set[type[nn.Module]]]] = {
    "stack": (Stack, {Block}),
    "nested": (partial(Stack, 2, Outer), {Outer, Inner}),
    "tied": (Tied, {nn.Linear}),
    "tied inside": (partial(chain, Tied, Tied), {Tied}),
    "mixed": (Mixed, {nn.Linear}),
    "mixed inside": (partial(chain, Mixed, partial(nn.Linear, 3, DIM), Mixed), {Mixed}),
    "odd": (partial(chain, Odd, partial(nn.Linear, DIM, DIM)), {Odd}),
    "fragile": (partial(chain, Block, Fragile, Block), {Block, Fragile}),
}
STRATEGY, HYBRID = "sharding_strategy", ShardingStrategy.HYBRID_SHARD
SETTINGS: dict[str, dict[str, Any]] = {
    "kept": {STRATEGY: ShardingStrategy.SHARD_GRAD_OP},
    "replicated": {STRATEGY: NO_SHARD},
    "two axes": {STRATEGY: HYBRID, "mesh": (2, 2)},
    "offloaded": {"cpu_offload": CPUOffload(offload_params=True)},
    "unused units": {"allow_unused_units": True},
    "ignored": {"ignores": "head"},
}

# The same batch on all ranks; otherwise batch norm would see only its rank's part.
pair_of = partial(Pair, data_ranks=1)


def make(name: str, *, mesh: Any = None, ignores: str = "", **options: Any) -> Pair:
    """Return two copies of a model. mesh: its shape. ignores: the name of a module."""
    build, units = MODELS[name]
    model = seeded(build)
    if mesh is not None:
        options["device_mesh"] = init_device_mesh("cpu", mesh)
    if ignores:
        options["ignored_modules"] = [model.get_submodule(ignores)]
    policy = ModuleWrapPolicy(units)
    return pair_of(seeded(build), FSDP(model, auto_wrap_policy=policy, **options))


def copied(pair: Pair, way: Way) -> Pair:
    """Return a pair of the two models' copies."""
    return pair_of(copy.deepcopy(pair.plain), way(pair.model))


def batch(seed: int) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed))


def memory_of(model: nn.Module) -> dict[int, int]:
    """Return the bytes of the storages of nonempty parameters and of buffers, by address."""
    storages = (t.untyped_storage() for t in (*model.parameters(), *model.buffers()) if t.numel())
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def assert_apart(one: nn.Module, other: nn.Module) -> None:
    """Assert that the two share no modules, parameters or memory."""
    assert not set(one.modules()) & set(other.modules()), "modules are shared"
    assert not set(one.parameters()) & set(other.parameters()), "parameters are shared"
    assert not memory_of(one).keys() & memory_of(other), "memory is shared"


def layout_of(model: nn.Module) -> list[tuple[Any, ...]]:
    return [
        (name, type(p), tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


# -- the copy equals the original and is independent


def assert_copied(first: Pair, way: Way) -> None:
    """Assert that a copy of a pair that has taken a step equals it, and trains on its own."""
    model, parameters = first.model, list(first.model.parameters())
    layout, buffers = layout_of(model), [name for name, _ in model.named_buffers()]
    second = copied(first, way)
    assert type(second.model) is FSDP and second.model.check_is_root()
    assert layout_of(second.model) == layout == layout_of(model), "parameters in the same order"
    assert list(map(id, model.parameters())) == list(map(id, parameters)), "the original keeps them"
    assert [name for name, _ in second.model.named_buffers()] == buffers
    assert all(p.grad is None for p in second.model.parameters()), "as copies of plain parameters"
    for attribute in (STRATEGY, "process_group", "cpu_offload"):
        assert getattr(second.model, attribute) == getattr(model, attribute)
    assert_apart(model, second.model)
    second.assert_state_equal()
    second.assert_shown_equal()
    assert repr(second.model) == repr(model)
    first.step()  # with different data and optimizer state
    second.step()
    first.assert_state_equal()
    third = copied(second, way)  # a copy of a copy
    third.step()
    second.assert_state_equal()
    with FSDP.state_dict_type(third.model, StateDictType.SHARDED_STATE_DICT):
        second.model.load_state_dict(third.model.state_dict())
    assert_same_values(second.model.state_dict(), third.model.state_dict(), "loaded value", 0.0)


@each_value
@both_forms
@ways
@pytest.mark.parametrize(
    ("num_ranks", "name"), [*((2, name) for name in MODELS), (1, "mixed"), (3, "mixed")]
)
@on_ranks("num_ranks")
def test_a_copy_equals_the_original_and_trains_on_its_own(
    num_ranks: int, name: str, way: Way, use_orig_params: bool
) -> None:
    pair = make(name, use_orig_params=use_orig_params)
    pair.step()
    assert_copied(pair, way)


@each_value
@pytest.mark.parametrize("way", TWO_WAYS)
@pytest.mark.parametrize(
    ("num_ranks", "setting"), [(4 if name == "two axes" else 2, name) for name in SETTINGS]
)
@on_ranks("num_ranks")
def test_a_copy_has_the_settings_of_the_original(num_ranks: int, setting: str, way: Way) -> None:
    pair = make("stack", use_orig_params=True, **SETTINGS[setting])
    pair.step()
    assert_copied(pair, way)
    if num_ranks == 4:
        assert axes_of(way(pair.model)) == axes_of(pair.model)


def axes_of(model: FSDP) -> list[list[int]]:
    """Return the ranks of this rank's group on each axis of the mesh of sharded values."""
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        mesh = next(iter(model.state_dict().values())).device_mesh
    return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]


@on_ranks(2)
def test_a_nested_instance_may_be_copied_alone_and_becomes_a_root() -> None:
    pair = make("nested")
    pair.step()
    for way in TWO_WAYS:
        block = way(pair.model.blocks[0])
        assert block.check_is_root() and not pair.model.blocks[0].check_is_root()
        assert len(FSDP.fsdp_modules(block)) == 3
        pair_of(copy.deepcopy(pair.plain.blocks[0]), block).step()
        assert_apart(pair.model, block)
    pair.step()


@both_forms
@on_ranks(2)
def test_a_copy_of_an_inner_module_made_in_summon_full_params_is_plain(
    use_orig_params: bool,
) -> None:
    pair = make("mixed inside", use_orig_params=use_orig_params)
    pair.step()
    with FSDP.summon_full_params(pair.model):
        block = copy.deepcopy(pair.model.module[0].module)
    with FSDP.summon_full_params(pair.model, writeback=False):
        linear = pickle.loads(pickle.dumps(pair.model.module[1]))
    for module, expected in ((block, pair.plain[0]), (linear, pair.plain[1])):
        assert_same_values(module.state_dict(), expected.state_dict(), "value")
        module.eval()
        module(batch(1)[:, : 3 if module is linear else DIM]).sum().backward()
        assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
    FSDP(block, use_orig_params=use_orig_params)(batch(1)).sum().backward()
    pair.step()


# -- attributes and hooks that users have added


def _note(calls: list[str], what: str, *_: Any) -> None:
    calls.append(what)


@both_forms
@ways
@on_ranks(2)
def test_hooks_attributes_and_registered_methods_are_copied(
    way: Way, use_orig_params: bool
) -> None:
    inner, calls = seeded(Fragile), list[str]()
    inner.calls = calls
    inner.register_forward_pre_hook(partial(_note, calls, "before"))
    inner.down.register_forward_hook(partial(_note, calls, "linear"))
    policy = ModuleWrapPolicy({nn.Linear})
    options: dict[str, Any] = {"mixed_precision": MixedPrecision(torch.bfloat16)}
    options |= {"auto_wrap_policy": policy, "use_orig_params": use_orig_params}
    model = FSDP(inner, **options)
    model.register_forward_hook(partial(_note, calls, "after"))
    for parameter in model.parameters():
        parameter.my_mark = 7
    register_fsdp_forward_method(model, "_compute")
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    other = way(model.eval())
    assert not other.training and not other.module.down.training
    assert FSDP.get_state_dict_type(other).state_dict_type is StateDictType.SHARDED_STATE_DICT
    with torch.no_grad():
        assert torch.equal(other._compute(batch(0)), model._compute(batch(0)))
        calls.clear()
        other.module.calls.clear()
        other(batch(0))
    assert (calls, other.module.calls) == ([], ["before", "linear", "after"])
    if use_orig_params and way is not by_deepcopy:  # torch copies parameters without attributes
        assert [p.my_mark for p in other.parameters()] == [7] * 6


# -- moments of copying


class NoCopy:
    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be copied")


def _summons(model: Any) -> None:
    with FSDP.summon_full_params(model):
        pass


def _accumulates(model: Any) -> None:
    with model.no_sync():
        model(batch(7)).sum().backward()


def _fails_in_forward(model: Any) -> None:
    with pytest.raises(TypeError):
        model("no tensor")


def _fails_in_backward(model: Any) -> None:
    model[1].module.fault_in_backward = True
    with pytest.raises(ValueError, match="backward"):
        model(batch(7)).sum().backward()
    model[1].module.fault_in_backward = False


def _fails_to_copy(model: Any) -> None:
    model[2].module.odd = NoCopy()
    for way in TWO_WAYS:
        with pytest.raises(RuntimeError, match="cannot be copied"):
            way(model)
    del model[2].module.odd


MOMENTS: tuple[Callable[[Any], Any], ...] = (
    lambda model: model(batch(7)),
    torch.no_grad()(lambda model: model(batch(7))),
    torch.inference_mode()(lambda model: model(batch(7))),
    lambda model: model.load_state_dict(model.state_dict()),
    _summons,
    _fails_in_forward,
    _fails_in_backward,
    _fails_to_copy,
    _accumulates,
)


@each_value
@pytest.mark.parametrize("way", TWO_WAYS)
@both_strategies
@on_ranks(2)
def test_copy_works_at_any_point_between_steps(strategy: ShardingStrategy, way: Way) -> None:
    pair = make("fragile", use_orig_params=True, sharding_strategy=strategy)
    layout = layout_of(pair.model)
    for index, happens in enumerate(MOMENTS):
        with about(f"moment {index}"):
            happens(pair.model)
            assert layout_of(pair.model) == layout
            copied(pair, way).step()
            pair.optim.zero_grad()
            pair.step()


# -- moving averages, optimizers


@both_forms
@ways
@on_ranks(2)
def test_an_optimizer_copied_with_its_model_trains_it_or_raises(
    way: Way, use_orig_params: bool
) -> None:
    """If the copy has new parameters, the step raises."""
    pair = make("mixed inside", use_orig_params=use_orig_params)
    pair.step()
    model, optim = way((pair.model, pair.optim))
    plain, plain_optim = copy.deepcopy((pair.plain, pair.plain_optim))
    other = pair_of(plain, model)
    other.optim, other.plain_optim = optim, plain_optim
    try:
        other.step()
    except FsdpCompatError as error:
        assert way is not by_deepcopy, "deepcopy keeps what is shared"
        assert "pickled separately from its model" in str(error)
        return
    held = {p for group in optim.param_groups for p in group["params"]}
    assert held == set(model.parameters()) and optim.state.keys() <= held, "of the copy"
    pair.step()
    other.step()
    other.assert_state_equal()


# -- pickles


@both_forms
@on_ranks(2)
def test_a_pickle_is_as_large_as_the_shard(use_orig_params: bool) -> None:
    build = partial(chain, *[partial(nn.Linear, 256, 256)] * 4)
    model = make_pair(build, (nn.Linear,), use_orig_params=use_orig_params).model
    model(torch.randn(2, 256)).sum().backward()
    shard = sum(memory_of(model).values())
    file = io.BytesIO()
    torch.save(model, file)
    assert shard >= 4 * 256 * 257 * 4 // 2
    for nbytes in (len(pickle.dumps(model)), len(file.getvalue())):
        assert shard <= nbytes <= 1.1 * shard + 40_000
    for way in WAYS:
        assert sum(memory_of(way(model)).values()) <= shard + 4096


def _packed(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> bytes:
    return pickle.dumps(make("nested", use_orig_params=True, sharding_strategy=strategy).model)


def _trains(pickles: list[bytes]) -> str:
    """Train the model of this rank's pickle if all ranks can load theirs; return the error."""
    messages = [""] * dist.get_world_size()
    plain, model, message = make("nested").plain, None, ""
    try:
        model = pickle.loads(pickles[dist.get_rank()])
    except UsageError as error:
        message = str(error)
    dist.all_gather_object(messages, message)
    if not any(messages):
        pair = pair_of(plain, model)
        pair.assert_state_equal()
        pair.step()
    return message


def test_a_pickle_loads_in_another_program_where_its_rank_or_a_replica_was() -> None:
    assert run_ranks(2, _trains, run_ranks(2, _packed)) == ["", ""]
    assert run_ranks(2, _trains, run_ranks(2, _packed, NO_SHARD)[:1] * 2) == ["", ""]
    mine, other = run_ranks(2, _trains, run_ranks(2, _packed)[:1] * 2)
    assert mine == ""
    assert "expected: the shards of rank 1 of 2" in other
    assert "got:      those of rank 0" in other
    for message in run_ranks(2, _trains, run_ranks(1, _packed) * 2):
        assert "of the ranks [0]" in message
