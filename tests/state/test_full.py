"""FULL_STATE_DICT of the model beyond values, which test_matrix.py compares: names of parts, when
it may be taken, what is sent and held, what is reported."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_compat import CheckpointError, FsdpCompatError, FullStateDictConfig, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.memory import NewBytes, allocated_nbytes
from tests.support.odd_model import (
    Config,
    OddBlock,
    OddModel,
    assert_holds,
    assert_identical,
    assert_same,
    make_model,
    shard,
    sharded_state,
    stack,
    train,
)
from tests.support.optimizer_state import FEW_CONFIGS, FULL, SHARDED, num_sent
from tests.support.ranks import on_ranks

FLAT = FEW_CONFIGS[0]
CONFIGS: tuple[Config, ...] = (*FEW_CONFIGS, ("SHARD_GRAD_OP", False, "none"))


def step(model: nn.Module) -> float:
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(1))[0]


def assert_plain(actual: Any, expected: Any) -> None:
    """The same keys in the same order, with plain tensors of the same values."""
    assert_identical(actual, expected)
    for name, value in actual.items():
        if isinstance(value, Tensor):
            assert type(value) is Tensor and not value.requires_grad, name


def built(wrap: Any, unit: Any) -> nn.Module:
    torch.manual_seed(0)
    parts = {
        "plain": nn.BatchNorm1d(2),
        "outside": wrap(unit(OddBlock())),
        "inside": unit(wrap(OddBlock())),
        "below": unit(nn.Sequential(wrap(OddBlock()), nn.Linear(4, 3))),
    }
    return nn.ModuleDict({**parts, "again": parts["outside"]})


@on_ranks(2)
def test_units_in_containers_twice_and_in_checkpoint_wrappers_leave_no_trace_in_names() -> None:
    def wrapped_afterwards(module: nn.Module) -> FSDP:
        around = usual(module)
        around._fsdp_wrapped_module = checkpoint_wrapper(module)
        return around

    def as_it_is(module: nn.Module) -> nn.Module:
        return module

    plain = built(as_it_is, as_it_is)
    expected = plain.state_dict()
    for use_orig_params, (wrap, unit) in itertools.product(
        (False, True), ((as_it_is, FSDP), (checkpoint_wrapper, FSDP), (as_it_is, None))
    ):
        usual = functools.partial(FSDP, use_orig_params=use_orig_params)
        unit = wrapped_afterwards if unit is None else usual
        model, around = built(wrap, unit), usual(built(wrap, unit))
        below = plain["below"].state_dict(prefix="a.b.")
        assert_plain(model["below"].state_dict(prefix="a.b."), below)
        for target in (model, around):
            found = target.state_dict()
            assert_plain(found, expected)
            assert expected._metadata.items() <= found._metadata.items()
            doubled = {name: v * 2 if isinstance(v, Tensor) else v for name, v in expected.items()}
            assert str(target.load_state_dict(doubled)) == "<All keys matched successfully>"
            assert_plain(target.state_dict(), doubled)
        wrapper = "_fsdp_wrapped_module."
        raw = {n.replace("below.", f"below.{wrapper}"): v for n, v in expected.items()}
        around.load_state_dict({wrapper + name: value for name, value in raw.items()})
        assert_plain(around.state_dict(), expected)


@on_ranks(2)
def test_saving_and_summoning_between_and_within_steps_change_nothing() -> None:
    tokens = torch.tensor([1, 2, 3, 4, 5])

    def losses(config: Config, save: bool) -> list[float]:
        model = shard(make_model(), config)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        found = []
        for number in range(3):
            optimizer.zero_grad()
            if number == 2:  # gradients that wait are not lost
                with model.no_sync():
                    model(tokens.flip(0)).square().sum().backward()
            loss = F.cross_entropy(model(tokens), tokens.roll(1))
            before = model.state_dict() if save else {}  # between forward and backward
            if save:
                with FSDP.summon_full_params(model, writeback=False):
                    shown = dict(model.named_parameters())
                    assert_same(shown, {name: before[name] for name in shown})
            loss.backward()
            if save:
                assert_plain(model.state_dict(), before)
            optimizer.step()
            found.append(loss.item())
            if save and number == 1:
                model.eval()
                model(tokens)  # a forward that no backward follows
                with torch.no_grad():
                    model(tokens)
                after = model.state_dict()
                assert not torch.equal(after["embed.weight"], before["embed.weight"])
                model.load_state_dict(before)
                model.load_state_dict(after)
                model.train()
        return [*found, *(p.detach().sum().item() for p in model.parameters())]

    for config in (*FEW_CONFIGS, ("NO_SHARD", True, "blocks")):
        assert losses(config, save=True) == losses(config, save=False)


@on_ranks(2)
def test_saves_leave_no_memory_behind_and_hold_one_unit_at_a_time() -> None:
    plain = stack()
    plain[0].frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)  # another group
    plain.register_buffer("table", torch.randn(50, 2)[:3])  # it views a larger tensor
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    unit_nbytes = 64 * 64 * 4
    alone = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    local = StateDictType.LOCAL_STATE_DICT
    forms = [(FULL, alone), (FULL, None), (SHARDED, None), (local, None)]
    for (form, config), choice in itertools.product(forms, (None, lambda name: name != "1.weight")):
        with FSDP.state_dict_type(model, form, config):
            allocated = []
            for _ in range(4):
                with NewBytes() as new:
                    state = model.state_dict(filter=choice)
                allocated.append(allocated_nbytes())
                if form is FULL:
                    assert new.now == sum(value.nbytes for value in state.values())
                    assert new.peak <= new.now + unit_nbytes, "one group beside the result"
                del state
            assert allocated[0] == allocated[-1]
            assert new.now == 0
        if config is not None and dist.get_rank() != 0:
            assert 0 < new.peak <= unit_nbytes, "a rank that keeps nothing holds one unit"
    table = model.state_dict()["table"]
    assert table.untyped_storage().nbytes() == table.nbytes


# --- loading --------------------------------------------------------------------------------------


@on_ranks(3)
def test_whole_values_load_without_communication_also_other_dtypes_parts_and_ties() -> None:
    wanted = model_of(1).state_dict()
    half = {
        name: v.half() if isinstance(v, Tensor) and v.is_floating_point() else v
        for name, v in wanted.items()
    }
    for config in CONFIGS:
        model = shard(make_model(), config)
        before = num_sent(model)
        assert str(model.load_state_dict(wanted)) == "<All keys matched successfully>"
        assert num_sent(model) == before, "loading full values sends nothing"
        assert list(wanted) == list(model_of(1).state_dict()), "the caller's dict is as it was"
        assert model.blocks[1].note == "seed 1"
        assert_plain(model.state_dict(), wanted)
        assert step(model) == pytest.approx(step(model_of(1)), rel=1e-6)
        model.load_state_dict(wanted, assign=True)
        assert_plain(model.state_dict(), wanted)
        if config[2] != "none":
            block = model_of(2).blocks[0].state_dict()
            model.blocks[0].load_state_dict(block)
            assert_plain(model.blocks[0].state_dict(), block)
        for left_out in ("embed.weight", "head.weight"):  # a tie has two names
            one = {name: value for name, value in half.items() if name != left_out}
            assert model.load_state_dict(one, strict=False).unexpected_keys == []
            found = model.state_dict()
            assert found["embed.weight"].dtype == torch.float32
            for name in ("embed.weight", "head.weight", "frozen.weight"):
                assert torch.equal(found[name], half[name].float())
            model.load_state_dict(make_model(2).state_dict())


@on_ranks(2)
def test_missing_unexpected_and_misshapen_entries_are_reported_as_by_torch() -> None:
    incomplete = make_model(1).state_dict()
    for name in ("up.weight", "norm.running_mean", "_extra_state"):
        del incomplete[f"blocks.1.{name}"]
    del incomplete["cube"]
    for name in ("blocks.0.up.surplus", "surplus", "blocks.surplus.weight"):
        incomplete[name] = torch.zeros(1)
    wrong = make_model(1).state_dict()
    wrong["blocks.1.up.weight"] = torch.zeros(5, 6)
    wrong["blocks.1.norm.running_mean"] = torch.zeros(4)
    for config in CONFIGS[1:4]:
        plain = make_model()
        model = shard(copy.deepcopy(plain), config)
        expected = plain.load_state_dict(incomplete, strict=False)
        answer = model.load_state_dict(incomplete, strict=False)
        assert sorted(answer.missing_keys) == sorted(expected.missing_keys)
        assert sorted(answer.unexpected_keys) == sorted(expected.unexpected_keys)
        assert_plain(model.state_dict(), plain.state_dict())
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(incomplete)
        for name in (*expected.missing_keys, *expected.unexpected_keys):
            assert f'"{name}"' in str(caught.value), str(caught.value)
        for strict in (True, False):
            with pytest.raises(RuntimeError) as caught:
                model.load_state_dict(wrong, strict=strict)
            for words in ("blocks.1.up.weight", "[5, 6]", "[7, 5]", "blocks.1.norm.running_"):
                assert words in str(caught.value)
            assert "_fsdp_wrapped_module" not in str(caught.value)
        assert step(model) > 0, "a refused dict leaves a model that trains"


# --- loading what rank 0 alone has ----------------------------------------------------------------


def model_of(seed: int) -> OddModel:
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
    ("world_size", "config"), [(3, FLAT), (4, ("HYBRID_SHARD", True, "blocks"))]
)
@on_ranks("world_size")
def test_rank_0_may_have_other_prefixes_and_dtypes_and_parts(
    world_size: int, config: Config
) -> None:
    model, expected = shard(model_of(1), config), model_of(3)
    named = {f"module.{name}": value for name, value in model_of(3).state_dict().items()}
    some = {
        "blocks.1.up.weight": expected.blocks[0].up.weight.half(),
        "wide.weight": torch.ones(3, 2),
    }
    with rank0(model):
        before = num_sent(model)
        model.load_state_dict(model_of(2).state_dict())
        assert num_sent(model) == before, "where every rank has the dict nothing is sent"
        # if some have it, rank 0's is loaded
        model.load_state_dict(named if dist.get_rank() != 1 else {})
        saved = model.state_dict()  # what it gives, it takes
        model.load_state_dict(alone(saved), assign=True)
        assert_holds(model, expected)
        model.blocks[1].load_state_dict(alone(model_of(4).blocks[1].state_dict()))
        keys = model.load_state_dict(alone(some), strict=False)
    expected.blocks[1] = model_of(4).blocks[1]
    expected.load_state_dict(some, strict=False)
    assert_holds(model, expected)
    assert "embed.weight" in keys.missing_keys


@on_ranks(2)
def test_a_module_around_units_loads_from_rank_0_and_keeps_no_hook() -> None:
    def built(seed: int, unit: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(seed)
        inside = nn.ModuleDict({"below": unit(OddBlock()), "own": nn.Linear(3, 2)})
        return nn.ModuleDict({"norm": nn.BatchNorm1d(2), "in": inside, "last": unit(OddBlock())})

    model = built(1, FSDP)
    with rank0(model):
        assert len(model._load_state_dict_pre_hooks) == 1
        given = built(2, lambda m: m).state_dict()
        model.load_state_dict(alone(given) or {})
        wrong = {**given, "last.down.bias": torch.ones(9)}
        with pytest.raises(CheckpointError, match=r"size mismatch for last\.down\.bias"):
            model.load_state_dict(alone(wrong) or {})
        short = {k: v for k, v in given.items() if k != "in.own.bias"}
        with pytest.raises(CheckpointError, match=r"in\.own\.bias"):
            model.load_state_dict(alone(short) or {})
    assert not model._load_state_dict_pre_hooks
    assert_holds(model, built(2, lambda m: m))
    for _ in range(2):
        FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
    with FSDP.state_dict_type(model, FULL):
        assert not model._load_state_dict_pre_hooks
    assert len(model._load_state_dict_pre_hooks) == 1
    part, wanted = model["in"], built(3, lambda m: m)["in"]
    with rank0(part):
        part.load_state_dict(alone(wanted.state_dict()) or {})
    FSDP.set_state_dict_type(model, FULL)
    assert not model._load_state_dict_pre_hooks
    assert_holds(part, wanted)


@on_ranks(2)
def test_an_error_on_rank_0_is_raised_on_every_rank_before_any_change() -> None:
    model = shard(model_of(1), FLAT)
    good = model_of(2).state_dict()
    boxes = sharded_state(model)["blocks.0.up.weight"]
    bad = {
        "Missing key.*blocks.1.down.bias": {
            k: v for k, v in good.items() if k != "blocks.1.down.bias"
        },
        "Unexpected key.*other": {**good, "other": torch.ones(1)},
        "size mismatch for embed.weight": {**good, "embed.weight": torch.ones(2, 2)},
        "size mismatch for blocks.0.grid": {**good, "blocks.0.grid": torch.ones(2, 2)},
        "cannot be loaded from one rank": {**good, "blocks.0.up.weight": boxes},
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
            model.load_state_dict(None)
    assert_holds(model, model_of(1))
    for nothing in ({}, None) if dist.get_rank() else ():  # rank0_only is not set
        with pytest.raises(FsdpCompatError, match="rank0_only=True"):
            model.load_state_dict(nothing)
    assert_holds(model, model_of(1))


@on_ranks(2)
def test_other_ranks_never_hold_more_than_one_unit() -> None:
    plain, inner = stack(7), stack(7)
    units, unit_nbytes = ModuleWrapPolicy({nn.Linear}), plain[0].weight.nbytes
    model = FSDP(inner, auto_wrap_policy=units, ignored_modules=[inner[6]])
    with rank0(model), NewBytes() as new:
        model.load_state_dict(alone(plain.state_dict()))
    # A thread of gloo may hold what was sent for a moment longer.
    assert new.peak <= (2 * unit_nbytes if dist.get_rank() else 4096)
    assert_holds(model, plain)


# --- values that are read from their file when somebody computes with them ------------------------

ORIGINAL: Config = ("SHARD_GRAD_OP", True, "always")
UNSHARDED: Config = ("NO_SHARD", True, "blocks")
ON_RANK0 = FullStateDictConfig(rank0_only=True)


class Lazy:
    """As Lightning has while a checkpoint is read: on the meta device, without methods."""

    loads = 0  # of all of them

    def __init__(self, load: Callable[[], Any], like: Tensor) -> None:
        self.load, self.is_meta = load, True
        self.shape, self.dtype, self.layout = like.shape, like.dtype, like.layout

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.loads += sum(isinstance(arg, Lazy) for arg in args)
        loaded = (arg.load() if isinstance(arg, Lazy) else arg for arg in args)
        return func(*loaded, **(kwargs or {}))


def lazily(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: Lazy(value.clone, value) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def wrapped_stack(seed: int) -> FSDP:
    torch.manual_seed(seed)
    return FSDP(stack(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


@on_ranks(2)
def test_one_unit_is_read_at_a_time_and_each_value_once() -> None:
    wanted = {name: value.clone() for name, value in wrapped_stack(1).state_dict().items()}
    unit_nbytes = wanted["0.weight"].nbytes
    for on_rank0 in (False, True):
        model = wrapped_stack(2)
        if on_rank0:
            FSDP.set_state_dict_type(model, FULL, ON_RANK0)
        reads = not on_rank0 or dist.get_rank() == 0
        Lazy.loads = 0
        with NewBytes() as new:
            model.load_state_dict(lazily(wanted) if reads else {})
        assert Lazy.loads == (len(wanted) if reads else 0), "each is read once"
        assert new.peak <= (3 if on_rank0 else 2) * unit_nbytes, "one unit at a time"
        FSDP.set_state_dict_type(model, FULL)
        assert_same(model.state_dict(), wanted)


@on_ranks(2)
def test_a_value_that_does_not_load_is_an_error_on_all_ranks() -> None:
    def torn() -> Tensor:
        raise OSError("the file ends here")

    good, mine = lazily(make_model(1).state_dict()), dist.get_rank() == 0
    unsharded, model = shard(make_model(2), UNSHARDED), shard(make_model(2), FLAT)
    FSDP.set_state_dict_type(model, FULL, ON_RANK0)
    for words, load in (
        ("OSError: the file ends here", torn),
        (r"a Tensor of shape \(2, 2\)", lambda: torch.ones(2, 2)),
        ("on meta", lambda: torch.empty(3, 1, 5, device="meta")),
        ("float64", lambda: torch.ones(3, 1, 5).double()),
    ):
        given = {**good, "cube": Lazy(load, torch.empty(3, 1, 5))}
        with pytest.raises(CheckpointError, match=f"(?s){words}.*'cube'"):
            unsharded.load_state_dict(given)
        with pytest.raises(CheckpointError, match=f"(?s){words}.*'cube'"):
            model.load_state_dict(given if mine else {})
        count = {**good, "count": Lazy(load, torch.empty(()))}
        with pytest.raises(CheckpointError, match="'count'"):
            model.load_state_dict(count if mine else None)
    model.load_state_dict(good if mine else None)
    FSDP.set_state_dict_type(model, FULL)
    assert_same(model.state_dict(), make_model(1).state_dict(), "the next load works")
