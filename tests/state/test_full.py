"""FULL_STATE_DICT of the model: what the unsharded model would return, and what it would take."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_compat import FullStateDictConfig, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.full_model import Block, Config, make_model, shard
from tests.support.memory import NewBytes, allocated_nbytes
from tests.support.optimizer_state import num_sent
from tests.support.pairwise import pairs
from tests.support.ranks import on_ranks
from tests.support.sampling import sample

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def step(model: nn.Module, seed: int = 0) -> float:
    """One step of SGD on data that is the same on all ranks; return the loss."""
    tokens = torch.randint(7, (6,), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens), tokens.roll(1))
    loss.backward()
    optimizer.step()
    return loss.item()


def assert_same(
    actual: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = 0.0
) -> None:
    wrong = [pair for pair in itertools.zip_longest(actual, expected) if pair[0] != pair[1]]
    assert not wrong, (
        f"{len(wrong)} keys are not where they should be, the first (actual, expected): {wrong[0]}"
    )
    for name, value in expected.items():
        if not isinstance(value, Tensor):
            assert actual[name] == value, name
            continue
        assert type(actual[name]) is Tensor, name
        assert actual[name].dtype == value.dtype, name
        assert not actual[name].requires_grad, name
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=name)


ALL_CONFIGS = tuple(pairs(STRATEGIES, (False, True), ("none", "blocks", "always")))
FEW_CONFIGS = (
    ("FULL_SHARD", False, "blocks"),
    ("FULL_SHARD", True, "always"),
    ("SHARD_GRAD_OP", False, "none"),
)
FEW_CONFIGS += (("NO_SHARD", True, "blocks"), ("NO_SHARD", False, "always"))


# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "configs"), sample([(1, FEW_CONFIGS), (3, ALL_CONFIGS)], 1))
@on_ranks("world_size")
def test_keys_order_dtypes_and_values_equal_the_unsharded_models(
    world_size: int, configs: tuple[Config, ...]
) -> None:
    for strategy, use_orig_params, policy in configs:
        plain = make_model()
        model = shard(copy.deepcopy(plain), strategy, use_orig_params, policy)
        expected, found = plain.state_dict(), model.state_dict()
        assert_same(found, expected)
        assert {
            name: found._metadata.get(name) for name in expected._metadata
        } == expected._metadata
        assert "blocks.0.scratch" not in found
        assert found["head.weight"] is found["embed.weight"] or torch.equal(
            found["head.weight"], found["embed.weight"]
        )
        if policy != "none":  # then these are units, or hold nothing but units
            assert_same(model.blocks.state_dict(), plain.blocks.state_dict())
            assert_same(model.blocks[1].state_dict(), plain.blocks[1].state_dict())
            assert_same(
                model.module.blocks[1].state_dict(prefix="a.b."),
                plain.blocks[1].state_dict(prefix="a.b."),
            )
        assert step(model) == pytest.approx(step(plain), rel=1e-6)
        assert_same(model.state_dict(), plain.state_dict(), tolerance=1e-5)


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

    plain = built(lambda m: m, lambda m: m)
    expected = plain.state_dict()
    for wrap in (lambda m: m, checkpoint_wrapper):
        model = built(wrap, lambda m: FSDP(m, use_orig_params=use_orig_params))
        assert_same(model.state_dict(), expected)
        assert_same(model["below"].state_dict(), plain["below"].state_dict())
        around = FSDP(
            built(wrap, lambda m: FSDP(m, use_orig_params=use_orig_params)),
            use_orig_params=use_orig_params,
        )
        assert_same(around.state_dict(), expected)
        for target in (model, around):
            doubled = {name: v * 2 if isinstance(v, Tensor) else v for name, v in expected.items()}
            assert str(target.load_state_dict(doubled)) == "<All keys matched successfully>"
            assert_same(target.state_dict(), doubled)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_activation_checkpointing_after_wrapping(use_orig_params: bool) -> None:
    """Activation checkpointing comes between a wrapper and its module."""
    plain = make_model()
    model = shard(copy.deepcopy(plain), use_orig_params=use_orig_params)
    for each in FSDP.fsdp_modules(model):
        each._fsdp_wrapped_module = checkpoint_wrapper(each.module)
    assert_same(model.state_dict(), plain.state_dict())
    other = make_model(1)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = shard(other, use_orig_params=use_orig_params)
        with FSDP.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(sharded.state_dict())
    assert_same(model.state_dict(), make_model(1).state_dict())
    model.load_state_dict(state := plain.state_dict())
    assert_same(model.state_dict(), state)
    del state[missing := "blocks.0.linear.weight"]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
        model.load_state_dict(state)


@pytest.mark.parametrize("world_size", sample([1, 2], 1))
@on_ranks("world_size")
def test_values_are_compact_copies_and_only_rank_0_gets_them_if_asked(world_size: int) -> None:
    plain = make_model()
    expected = plain.state_dict()
    for strategy, use_orig_params in itertools.product(STRATEGIES, (False, True)):
        model = shard(copy.deepcopy(plain), strategy, use_orig_params)
        for offload_to_cpu, rank0_only in itertools.product((False, True), (False, True)):
            config = FullStateDictConfig(offload_to_cpu=offload_to_cpu, rank0_only=rank0_only)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
                found, inner = model.state_dict(), model.blocks[0].state_dict()
            if rank0_only and dist.get_rank() != 0:
                assert not found
                assert not inner
                assert_same(model.state_dict(), expected)
                continue
            assert_same(found, expected)
            shards = {
                target.untyped_storage().data_ptr()
                for g in model._runtime.groups
                for target, _ in g.store.sharded_params
            }
            buffers = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
            for name, value in found.items():
                if isinstance(value, Tensor) and value.numel():
                    storage = value.untyped_storage()
                    assert storage.data_ptr() not in shards, name
                    if storage.data_ptr() not in buffers:
                        assert storage.nbytes() == value.nbytes, name
            found["embed.weight"].fill_(7.0)  # a copy is the caller's
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
def test_ignored_modules_are_saved_and_unreduced_gradients_survive(
    use_orig_params: bool,
) -> None:
    plain = make_model()
    inner = copy.deepcopy(plain)
    model = FSDP(
        inner,
        ignored_modules=[inner.blocks[0].linear, inner.wide],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
    )
    assert_same(model.state_dict(), plain.state_dict())
    model.load_state_dict(make_model(1).state_dict())
    assert_same(model.state_dict(), make_model(1).state_dict())
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
        grads.append(
            [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        )
    assert len(grads[0]) == len(grads[1]) > 0
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True)), (
        "gradients that wait are not lost"
    )


class Stack(nn.Module):
    """Units of one size below a root with a buffer only, which views a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
        self.layers[0].frozen = nn.Parameter(
            torch.randn(64, 64), requires_grad=False
        )  # apart from the weight
        self.register_buffer("table", torch.randn(50, 2)[:3])


@pytest.mark.parametrize("world_size", sample([1, 2], 1))
@on_ranks("world_size")
def test_ten_saves_leave_no_memory_behind_and_hold_one_unit_at_a_time(
    world_size: int,
) -> None:
    plain = Stack()
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    unit_nbytes, is_first = plain.layers[0].weight.nbytes, dist.get_rank() == 0
    full, sharded, local = (
        StateDictType.FULL_STATE_DICT,
        StateDictType.SHARDED_STATE_DICT,
        StateDictType.LOCAL_STATE_DICT,
    )
    for form, config, choice in (
        (full, FullStateDictConfig(rank0_only=True, offload_to_cpu=True), None),
        (full, None, None),
        (full, None, lambda name: name != "layers.1.weight"),
        (sharded, None, None),
        (sharded, None, lambda name: name != "layers.1.weight"),
        (local, None, None),
    ):
        with FSDP.state_dict_type(model, form, config):
            allocated = []
            for number in range(10):
                with NewBytes() as new:
                    state = model.state_dict(filter=choice)
                allocated += [allocated_nbytes()] if number in (0, 9) else []
                if form is full:
                    assert new.now == sum(value.nbytes for value in state.values())
                    assert new.peak <= new.now + unit_nbytes, "one group beside the result"
                del state
            assert allocated[0] == allocated[1]
            assert new.now == 0
        if config is not None and not is_first:
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
    for strategy, use_orig_params, policy in FEW_CONFIGS:
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
            model.blocks[0].load_state_dict(make_model(2).blocks[0].state_dict())
            assert_same(model.blocks[0].state_dict(), make_model(2).blocks[0].state_dict())
        half = {
            name: v.half() if isinstance(v, Tensor) and v.is_floating_point() else v
            for name, v in wanted.items()
        }
        model.load_state_dict(half)
        assert model.state_dict()["embed.weight"].dtype == torch.float32
        assert torch.equal(model.state_dict()["first.weight"], half["first.weight"].float())


@on_ranks(2)
def test_missing_unexpected_and_misshapen_entries_are_reported_as_by_torch() -> None:
    for strategy, use_orig_params, policy in FEW_CONFIGS:
        plain = make_model()
        model = shard(copy.deepcopy(plain), strategy, use_orig_params, policy)
        incomplete = make_model(1).state_dict()
        for name in (
            "blocks.1.linear.weight",
            "blocks.0.norm.running_mean",
            "blocks.1._extra_state",
            "frozen",
        ):
            del incomplete[name]
        incomplete["blocks.0.linear.surplus"] = torch.zeros(1)
        incomplete["surplus"] = torch.zeros(1)
        incomplete["blocks.surplus.weight"] = torch.zeros(1)
        expected = plain.load_state_dict(incomplete, strict=False)
        answer = model.load_state_dict(incomplete, strict=False)
        assert sorted(answer.missing_keys) == sorted(expected.missing_keys)
        assert sorted(answer.unexpected_keys) == sorted(expected.unexpected_keys)
        assert_same(model.state_dict(), plain.state_dict())
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(incomplete)
        for name in (*expected.missing_keys, *expected.unexpected_keys):
            assert f'"{name}"' in str(caught.value), str(caught.value)
        assert "_fsdp_wrapped_module" not in str(caught.value)

        wrong = make_model(1).state_dict()
        wrong["blocks.1.linear.weight"] = torch.zeros(5, 6)
        wrong["blocks.1.norm.running_mean"] = torch.zeros(4)
        for strict in (True, False):
            with pytest.raises(RuntimeError) as caught:
                model.load_state_dict(wrong, strict=strict)
            assert "blocks.1.linear.weight" in str(caught.value)
            assert "blocks.1.norm.running_mean" in str(caught.value)
            assert "[5, 6]" in str(caught.value)
            assert "[5, 5]" in str(caught.value)
            assert "_fsdp_wrapped_module" not in str(caught.value), str(caught.value)
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
    raw = {
        f"_fsdp_wrapped_module.{name.replace('0.', '0._fsdp_wrapped_module.')}": value
        for name, value in wanted.items()
    }
    assert next(iter(raw)) == "_fsdp_wrapped_module.0._fsdp_wrapped_module.weight"
    model.load_state_dict(raw)
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
