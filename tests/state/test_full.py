"""FULL_STATE_DICT of the model: what the unsharded model would return, and what it would take."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import CheckpointError, FsdpCompatError, FullStateDictConfig, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.full_model import Block, Model, make_model, shard
from tests.support.memory import NewBytes, allocated_nbytes
from tests.support.odd_model import (
    Config,
    assert_holds,
    assert_identical,
    sharded_state,
    stack,
    train,
)
from tests.support.optimizer_state import FEW_CONFIGS, num_sent
from tests.support.pairwise import pairs
from tests.support.ranks import on_ranks
from tests.support.sampling import sample

FULL = StateDictType.FULL_STATE_DICT
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
ALL_CONFIGS = tuple(pairs(STRATEGIES, (False, True), ("none", "blocks", "always")))
CONFIGS = (*FEW_CONFIGS, ("SHARD_GRAD_OP", False, "none"))


def step(model: nn.Module, seed: int = 0) -> float:
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(seed, seed + 1))[0]


def assert_same(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same keys in the same order, with plain tensors of the same values."""
    assert_identical(actual, expected)
    for name, value in actual.items():
        if isinstance(value, Tensor):
            assert type(value) is Tensor and not value.requires_grad, name


# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "configs"), sample([(1, CONFIGS), (3, ALL_CONFIGS)], 1))
@on_ranks("world_size")
def test_keys_order_dtypes_and_values_equal_the_unsharded_models(
    world_size: int, configs: tuple[Config, ...]
) -> None:
    for strategy, use_orig_params, policy in configs:
        plain = make_model()
        model = shard(copy.deepcopy(plain), strategy, use_orig_params, policy)
        expected, found = plain.state_dict(), model.state_dict()
        assert_same(found, expected)
        assert expected._metadata.items() <= found._metadata.items()
        if policy != "none":  # then these are units, or hold nothing but units
            assert_same(model.blocks.state_dict(), plain.blocks.state_dict())
            for prefix in ("", "a.b."):
                expected = plain.blocks[1].state_dict(prefix=prefix)
                assert_same(model.blocks[1].state_dict(prefix=prefix), expected)
        for seed in (0, 1):
            assert step(model, seed) == pytest.approx(step(plain, seed), rel=1e-6)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_units_in_plain_containers_and_checkpoint_wrappers_leave_no_trace_in_names(
    use_orig_params: bool,
) -> None:
    def built(wrap: Any, unit: Any) -> nn.Module:
        torch.manual_seed(0)
        inside = nn.Sequential(wrap(Block(4)), nn.Linear(4, 3))
        return nn.ModuleDict(
            {
                "plain": nn.BatchNorm1d(2),
                "outside": wrap(unit(Block(4))),
                "inside": unit(wrap(Block(3))),
                "below": unit(inside),
            }
        )

    def wrapped_afterwards(module: nn.Module) -> FSDP:
        around = FSDP(module, use_orig_params=use_orig_params)
        around._fsdp_wrapped_module = checkpoint_wrapper(module)
        return around

    def as_it_is(module: nn.Module) -> nn.Module:
        return module

    plain = built(as_it_is, as_it_is)
    expected = plain.state_dict()
    usual = functools.partial(FSDP, use_orig_params=use_orig_params)
    for wrap, unit in (
        (as_it_is, usual),
        (checkpoint_wrapper, usual),
        (as_it_is, wrapped_afterwards),
    ):
        model = built(wrap, unit)
        assert_same(model["below"].state_dict(), plain["below"].state_dict())
        around = usual(built(wrap, unit))
        for target in (model, around):
            assert_same(target.state_dict(), expected)
            doubled = {name: v * 2 if isinstance(v, Tensor) else v for name, v in expected.items()}
            assert str(target.load_state_dict(doubled)) == "<All keys matched successfully>"
            assert_same(target.state_dict(), doubled)


@pytest.mark.parametrize("world_size", sample([1, 2], 1))
@on_ranks("world_size")
def test_values_are_compact_copies_and_only_rank_0_gets_them_if_asked(world_size: int) -> None:
    plain = make_model()
    expected = plain.state_dict()
    for strategy, use_orig_params in itertools.product(STRATEGIES, (False, True)):
        model = shard(copy.deepcopy(plain), strategy, use_orig_params)
        for offload_to_cpu, rank0_only in itertools.product((False, True), (False, True)):
            config = FullStateDictConfig(offload_to_cpu=offload_to_cpu, rank0_only=rank0_only)
            with FSDP.state_dict_type(model, FULL, config):
                found, inner = model.state_dict(), model.blocks[0].state_dict()
            if rank0_only and dist.get_rank() != 0:
                assert not found and not inner
            else:
                assert_same(found, expected)
                for name, parameter in plain.named_parameters():
                    assert found[name].untyped_storage().nbytes() == parameter.nbytes, name
                    if not name.startswith("ignored"):
                        found[name].fill_(7.0)  # a copy is the caller's
            assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use_orig_params", sample([False, True], 0))
@on_ranks(2)
def test_saving_between_and_within_steps_changes_nothing(
    use_orig_params: bool, strategy: str
) -> None:
    tokens = torch.tensor([1, 2, 3, 4, 5])

    def losses(save: bool) -> list[float]:
        model = shard(make_model(), strategy, use_orig_params)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        found = []
        for number in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens), tokens.roll(1))
            before = model.state_dict() if save else {}  # between forward and backward
            loss.backward()
            if save:
                assert_same(model.state_dict(), before)
            optimizer.step()
            found.append(loss.item())
            if save and number == 1:
                model.eval()
                model(tokens)  # a forward that no backward follows
                with torch.no_grad():
                    model(tokens)
                after = model.state_dict()
                assert not torch.equal(after["embed.weight"], before["embed.weight"])
                model.load_state_dict(after)
                model.train()
        return found

    assert losses(save=True) == losses(save=False)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_unreduced_gradients_survive(use_orig_params: bool) -> None:
    tokens, grads = torch.tensor([1, 2, 3, 4]), []
    for save in (False, True):
        model = shard(make_model(), use_orig_params=use_orig_params)
        with model.no_sync():
            model(tokens).square().sum().backward()
        if save:
            model.state_dict()
            with FSDP.summon_full_params(model):
                pass
        model(tokens.flip(0)).sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 0
    assert all(map(torch.equal, *grads)), "gradients that wait are not lost"


@pytest.mark.parametrize("world_size", sample([1, 2], 1))
@on_ranks("world_size")
def test_ten_saves_leave_no_memory_behind_and_hold_one_unit_at_a_time(world_size: int) -> None:
    plain = stack()
    plain[0].frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)  # another group
    plain.register_buffer("table", torch.randn(50, 2)[:3])  # it views a larger tensor
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    unit_nbytes = 64 * 64 * 4
    sharded = StateDictType.SHARDED_STATE_DICT
    for form, config, choice in (
        (FULL, FullStateDictConfig(rank0_only=True, offload_to_cpu=True), None),
        (FULL, None, None),
        (FULL, None, lambda name: name != "1.weight"),
        (sharded, None, None),
        (sharded, None, lambda name: name != "1.weight"),
        (StateDictType.LOCAL_STATE_DICT, None, None),
    ):
        with FSDP.state_dict_type(model, form, config):
            allocated = []
            for number in range(10):
                with NewBytes() as new:
                    state = model.state_dict(filter=choice)
                allocated += [allocated_nbytes()] if number in (0, 9) else []
                if form is FULL:
                    assert new.now == sum(value.nbytes for value in state.values())
                    assert new.peak <= new.now + unit_nbytes, "one group beside the result"
                del state
            assert allocated[0] == allocated[1]
            assert new.now == 0
        if config is not None and dist.get_rank() != 0:
            assert 0 < new.peak <= unit_nbytes, "a rank that keeps nothing holds one unit"
    for value in model.state_dict().values():
        assert value.untyped_storage().nbytes() == value.nbytes


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", sample([1, 3], 1))
@on_ranks("world_size")
def test_a_plain_models_dict_is_loaded_without_communication(world_size: int) -> None:
    other = make_model(1)
    other.blocks[0].note = "loaded"
    other.blocks[1].norm.running_mean += 3
    wanted = other.state_dict()
    for strategy, use_orig_params, policy in CONFIGS:
        model = shard(make_model(), strategy, use_orig_params, policy)
        before = num_sent(model)
        assert str(model.load_state_dict(wanted)) == "<All keys matched successfully>"
        assert num_sent(model) == before, "loading full values sends nothing"
        assert list(wanted) == list(other.state_dict()), "the caller's dict is left as it was"
        assert model.blocks[0].note == "loaded"
        assert_same(model.state_dict(), wanted)
        assert step(model) == pytest.approx(step(copy.deepcopy(other)), rel=1e-6)
        model.load_state_dict(wanted, assign=True)
        assert_same(model.state_dict(), wanted)
        if policy != "none":
            block = make_model(2).blocks[0].state_dict()
            model.blocks[0].load_state_dict(block)
            assert_same(model.blocks[0].state_dict(), block)
        half = {
            name: v.half() if isinstance(v, Tensor) and v.is_floating_point() else v
            for name, v in wanted.items()
        }
        model.load_state_dict(half)
        assert model.state_dict()["embed.weight"].dtype == torch.float32
        assert torch.equal(model.state_dict()["first.weight"], half["first.weight"].float())


@on_ranks(2)
def test_missing_unexpected_and_misshapen_entries_are_reported_as_by_torch() -> None:
    for strategy, use_orig_params, policy in CONFIGS:
        plain = make_model()
        model = shard(copy.deepcopy(plain), strategy, use_orig_params, policy)
        incomplete = make_model(1).state_dict()
        block = "linear.weight", "norm.running_mean", "_extra_state"
        for name in (*(f"blocks.1.{name}" for name in block), "frozen"):
            del incomplete[name]
        for name in ("blocks.0.linear.surplus", "surplus", "blocks.surplus.weight"):
            incomplete[name] = torch.zeros(1)
        expected = plain.load_state_dict(incomplete, strict=False)
        answer = model.load_state_dict(incomplete, strict=False)
        assert sorted(answer.missing_keys) == sorted(expected.missing_keys)
        assert sorted(answer.unexpected_keys) == sorted(expected.unexpected_keys)
        assert_same(model.state_dict(), plain.state_dict())
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(incomplete)
        for name in (*expected.missing_keys, *expected.unexpected_keys):
            assert f'"{name}"' in str(caught.value), str(caught.value)

        wrong = make_model(1).state_dict()
        wrong["blocks.1.linear.weight"] = torch.zeros(5, 6)
        wrong["blocks.1.norm.running_mean"] = torch.zeros(4)
        for strict in (True, False):
            with pytest.raises(RuntimeError) as caught:
                model.load_state_dict(wrong, strict=strict)
            for words in ("blocks.1.linear.weight", "[5, 6]", "[5, 5]", "blocks.1.norm.running_"):
                assert words in str(caught.value)
            assert "_fsdp_wrapped_module" not in str(caught.value)
        assert step(model) > 0, "a refused dict leaves a model that trains"


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_a_tied_parameter_loads_from_any_of_its_names(use_orig_params: bool) -> None:
    model = shard(make_model(), use_orig_params=use_orig_params)
    wanted = make_model(1).state_dict()
    for left_out in ("embed.weight", "head.weight"):
        one = {name: value for name, value in wanted.items() if name != left_out}
        assert model.load_state_dict(one, strict=False).unexpected_keys == []
        assert torch.equal(model.state_dict()[left_out], wanted[left_out])


@on_ranks(2)
def test_names_with_wrapper_prefixes_load() -> None:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(3, 2)), nn.Linear(2, 2)))
    wanted = {name: value + 1 for name, value in model.state_dict().items()}
    prefix = "_fsdp_wrapped_module."
    raw = {prefix + n.replace("0.", f"0.{prefix}"): value for n, value in wanted.items()}
    model.load_state_dict(raw)
    assert_same(model.state_dict(), wanted)


# --- loading what rank 0 alone has ----------------------------------------------------------------


def model_of(seed: int) -> Model:
    """Return a model whose buffers and extra state differ, too."""
    model = make_model(seed)
    model.blocks[1].note = f"seed {seed}"
    model.blocks[0].norm.running_mean.fill_(seed)
    return model


def rank0(model: nn.Module) -> Any:
    return FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))


def alone(state: Any) -> Any:
    """The state dict on rank 0, what says that there is none on the others."""
    return state if dist.get_rank() == 0 else ({}, None)[dist.get_rank() % 2]


@pytest.mark.parametrize(
    ("world_size", "hybrid"), sample([(1, False), (2, False), (3, False), (4, True)], 2, 3)
)
@on_ranks("world_size")
def test_loading_from_rank_0_equals_loading_on_every_rank(world_size: int, hybrid: bool) -> None:
    options: dict[str, Any] = {}
    if hybrid:
        options = {"device_mesh": init_device_mesh("cpu", (2, 2)), "strategy": "HYBRID_SHARD"}
    forms = [*itertools.product((False, True), (True, False))]
    for use_orig_params, strict in sample(forms, 0, 3):
        model = shard(model_of(1), use_orig_params=use_orig_params, **options)
        with rank0(model):
            answer = model.load_state_dict(alone(model_of(2).state_dict()), strict=strict)
        assert str(answer) == "<All keys matched successfully>"
        assert_holds(model, model_of(2))
        with rank0(model):  # what it gives, it takes
            saved = model_of(3).state_dict()
            shard(model_of(3)).load_state_dict(saved)
            model.load_state_dict(alone(saved), assign=True)
        assert_holds(model, model_of(3))
        with rank0(model):
            model.blocks[1].load_state_dict(alone(model_of(4).blocks[1].state_dict()))
        expected = model_of(3)
        expected.blocks[1] = model_of(4).blocks[1]
        assert_holds(model, expected)
        other = model_of(5).state_dict()
        some = {name: other[name].half() for name in ("blocks.1.linear.weight", "wide.weight")}
        with rank0(model):
            keys = model.load_state_dict(alone(some), strict=False)
        expected.load_state_dict(some, strict=False)
        assert_holds(model, expected)
        assert "embed.weight" in keys.missing_keys
    model = shard(model_of(1), "NO_SHARD")
    named = model_of(2).state_dict()
    with rank0(model):
        model.load_state_dict(alone({f"module.{name}": value for name, value in named.items()}))
        assert len(model.state_dict()) == (0 if dist.get_rank() else len(named))
    assert_holds(model, model_of(2))


@on_ranks(3)
def test_dicts_on_all_ranks_send_nothing_and_on_some_rank_0s_is_loaded() -> None:
    model = shard(model_of(1))
    state = model_of(2).state_dict()
    before = num_sent(model)
    kind = type(model._unit.groups[0].shard)
    with mock.patch.object(kind, "broadcast", autospec=True, side_effect=kind.broadcast) as sends:
        with rank0(model):
            model.load_state_dict(state)
        assert not sends.called and num_sent(model) == before
        assert_holds(model, model_of(2))
        with rank0(model):
            model.load_state_dict(model_of(3).state_dict() if dist.get_rank() != 1 else {})
        assert sends.called
    assert_holds(model, model_of(3))


@on_ranks(2)
def test_a_module_around_units_loads_from_rank_0_and_keeps_no_hook() -> None:
    def built(seed: int, unit: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(seed)
        inside = nn.ModuleDict({"below": unit(Block()), "own": nn.Linear(3, 2)})
        parts = {"first": unit(Block()), "norm": nn.BatchNorm1d(2), "inside": inside}
        return nn.ModuleDict({**parts, "last": unit(Block())})

    model = built(1, FSDP)
    with rank0(model):
        assert len(model._load_state_dict_pre_hooks) == 1
        given = built(2, lambda m: m).state_dict()
        model.load_state_dict(alone(given) or {})
        wrong = {**given, "last.linear.bias": torch.ones(9)}
        with pytest.raises(CheckpointError, match=r"size mismatch for last\.linear\.bias"):
            model.load_state_dict(alone(wrong) or {})
        short = {k: v for k, v in given.items() if k != "inside.own.bias"}
        with pytest.raises(CheckpointError, match=r"inside\.own\.bias"):
            model.load_state_dict(alone(short) or {})
    assert not model._load_state_dict_pre_hooks
    assert_holds(model, built(2, lambda m: m))
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
    with FSDP.state_dict_type(model, FULL):
        assert not model._load_state_dict_pre_hooks
    assert len(model._load_state_dict_pre_hooks) == 1
    part = model["inside"]
    with rank0(part):
        part.load_state_dict(alone(built(3, lambda m: m)["inside"].state_dict()) or {})
    FSDP.set_state_dict_type(model, FULL)
    assert not model._load_state_dict_pre_hooks
    assert_holds(part, built(3, lambda m: m)["inside"])


@on_ranks(2)
def test_an_error_on_rank_0_is_raised_on_every_rank_before_any_change() -> None:
    model = shard(model_of(1))
    good = model_of(2).state_dict()
    boxes = sharded_state(model)["blocks.0.linear.weight"]
    bad = {
        "Missing key.*blocks.1.gain": {k: v for k, v in good.items() if k != "blocks.1.gain"},
        "Unexpected key.*other": {**good, "other": torch.ones(1)},
        "size mismatch for embed.weight": {**good, "embed.weight": torch.ones(2, 2)},
        "size mismatch for blocks.0.grid": {**good, "blocks.0.grid": torch.ones(2, 2)},
        "cannot be loaded from one rank": {**good, "blocks.0.linear.weight": boxes},
    }
    with rank0(model):
        for words, state in bad.items():
            with pytest.raises(CheckpointError, match=words):
                model.load_state_dict(alone(state))
        with pytest.raises(CheckpointError, match="none on rank 0"):
            model.load_state_dict({} if dist.get_rank() == 0 else good)
        with pytest.raises(FsdpCompatError, match=r"rank0_only|another rank"):
            model.load_state_dict([good] if dist.get_rank() == 1 else good)
        with pytest.raises(CheckpointError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(TypeError, match="NoneType"):
            model.load_state_dict(None)  # type: ignore[arg-type]
    assert_holds(model, model_of(1))
    for nothing in ({}, None) if dist.get_rank() else ():  # rank0_only is not set
        with pytest.raises(FsdpCompatError, match="rank0_only=True"):
            model.load_state_dict(nothing)  # type: ignore[arg-type]
    assert_holds(model, model_of(1))


@on_ranks(2)
def test_other_ranks_never_hold_more_than_one_unit() -> None:
    torch.manual_seed(0)
    plain, inner = stack(7), stack(7)
    units, unit_nbytes = ModuleWrapPolicy({nn.Linear}), plain[0].weight.nbytes
    model = FSDP(inner, auto_wrap_policy=units, ignored_modules=[inner[6]])
    with rank0(model), NewBytes() as new:
        model.load_state_dict(alone(plain.state_dict()))
    # A thread of gloo may hold what was sent for a moment longer.
    assert new.peak <= (2 * unit_nbytes if dist.get_rank() else 4096)
    assert_holds(model, plain)
