"""summon_full_params and apply: whole parameters between steps, and what is left when they are gone
again."""

from __future__ import annotations

import copy
import itertools
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy
from fsdp_compat.errors import UsageError
from tests.support.odd_model import Config, assert_identical, assert_same, make_model, shard, train
from tests.support.optimizer_state import FEW_CONFIGS, num_sent
from tests.support.parity import groups_of
from tests.support.ranks import on_ranks
from tests.support.sampling import sample

CONFIGS: tuple[Config, ...] = (*FEW_CONFIGS, ("NO_SHARD", True, "blocks"))


def wrapped(config: Config) -> FSDP:
    return shard(make_model(), config, ignored_modules=[])


def losses_of(model: nn.Module) -> Tensor:
    tokens = torch.tensor([1, 2, 3, 4, 5, 6])
    return F.cross_entropy(model(tokens), tokens.roll(1))


def step(model: nn.Module) -> float:
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(1))[0]


def slots(model: nn.Module) -> list[tuple[str, str, int, tuple[int, ...], int]]:
    """What every module holds now: (module, attribute, object, shape, address)."""
    return [
        (name, attribute, id(p), tuple(p.shape), p.data_ptr())
        for name, module in model.named_modules()
        for attribute, p in module._parameters.items()
        if p is not None
    ]


def names_of(model: nn.Module, **options: Any) -> list[str]:
    return [name for name, _ in model.named_parameters(**options)]


# --- what is shown --------------------------------------------------------------------------------


@on_ranks(3)
def test_parameters_are_whole_and_have_their_own_names_inside() -> None:
    plain, every = make_model(), {"remove_duplicate": False}
    expected = dict(plain.named_parameters())
    for config in CONFIGS:
        inner = make_model()
        originals = list(inner.parameters())
        model = shard(inner, config, ignored_modules=[])
        before = slots(model)
        assert set(names_of(model)).isdisjoint(expected), "outside with the wrapper's prefix"
        for choice in (False, True):
            with FSDP.summon_full_params(model, writeback=choice, offload_to_cpu=choice):
                shown = dict(model.named_parameters())
                assert_identical(shown, expected)
                same = map(operator.is_, shown.values(), originals)
                assert not config[1] or all(same), "the user's own objects"
                for name, parameter in shown.items():
                    assert type(parameter) is nn.Parameter and parameter.grad is None
                    assert parameter.requires_grad is expected[name].requires_grad
                assert names_of(model, **every) == names_of(plain, **every)
                assert list(dict(model.named_buffers())) == list(dict(plain.named_buffers()))
                assert names_of(model, prefix="a") == [f"a.{name}" for name in expected]
                assert model.module.head.weight is model.module.embed.weight
                state = model.state_dict()
                assert_same({name: state[name] for name in expected}, expected)
            assert slots(model) == before
        assert step(model) == pytest.approx(step(copy.deepcopy(plain)), rel=1e-6)
        assert [identity for _, _, identity, *_ in slots(model)] == [each[2] for each in before]


@on_ranks(2)
def test_recurse_controls_which_units_are_shown_and_forward_gathers_the_rest() -> None:
    expected = dict(make_model().named_parameters())
    names = ("embed.weight", "blocks.0.up.weight", "blocks.1.up.weight")
    for use_orig_params in (False, True):
        model = wrapped(("FULL_SHARD", use_orig_params, "blocks"))
        modules = [model.module.embed, *(block.module.up for block in model.module.blocks)]
        for shown, recurse, wanted in (
            (model, False, [True, False, False]),
            (model.blocks[1], False, [False, False, True]),
            (model.module.blocks, True, [False, True, True]),  # a container, not an instance
        ):
            with FSDP.summon_full_params(shown, recurse=recurse):
                assert [shows_whole(module) for module in modules] == wanted
                for module, name in zip(modules, names, strict=True):
                    assert not shows_whole(module) or torch.equal(module.weight, expected[name])
        tokens = torch.tensor([1, 2, 3])
        partly = FSDP.summon_full_params(model.eval(), recurse=False, writeback=False)
        with torch.no_grad(), partly:
            torch.testing.assert_close(model(tokens), make_model().eval()(tokens))
        assert step(model.train()) == pytest.approx(step(make_model()), rel=1e-6)


def shows_whole(module: nn.Module) -> bool:
    return "weight" in module._parameters and module.weight.dim() == 2


@on_ranks(2)
def test_rank0_only_shows_other_ranks_their_parts_and_refuses_writeback() -> None:
    expected = dict(make_model().named_parameters())
    for config, offload_to_cpu in zip(CONFIGS, (False, True, False, True, False), strict=True):
        model = wrapped(config)
        before = slots(model)
        on_rank0 = {"writeback": False, "rank0_only": True, "offload_to_cpu": offload_to_cpu}
        with FSDP.summon_full_params(model, **on_rank0):
            if dist.get_rank() == 0:
                assert_identical(dict(model.named_parameters()), expected)
                for parameter in model.parameters():
                    parameter.data.fill_(7.0)
            else:
                assert slots(model) == before
        assert slots(model) == before
        assert_identical(model.state_dict(), make_model().state_dict())  # replicas do not differ
        with pytest.raises(UsageError, match="rank0_only=True with writeback=False"):
            FSDP.summon_full_params(model, writeback=True, rank0_only=True).__enter__()
        assert step(model) > 0


# --- changes --------------------------------------------------------------------------------------


def _is_whole(model: FSDP) -> bool:
    """Nothing is sharded: changes stay without writeback, too, as in torch."""
    return dist.get_world_size() == 1 or model.sharding_strategy is ShardingStrategy.NO_SHARD


@pytest.mark.parametrize("world_size", sample([1, 2], 1))
@on_ranks("world_size")
def test_changes_are_kept_with_writeback_and_dropped_without(world_size: int) -> None:
    other = dict(make_model(1).named_parameters(remove_duplicate=False))
    for config, offload_to_cpu in itertools.product(CONFIGS, (False, True)):
        model = wrapped(config)
        original = make_model().state_dict()
        with (
            torch.no_grad(),
            FSDP.summon_full_params(model, writeback=False, offload_to_cpu=offload_to_cpu),
        ):
            for parameter in model.parameters():
                parameter.fill_(7.0)
        sevens = {n: torch.full_like(original[n], 7.0) for n in other if _is_whole(model)}
        assert_identical(model.state_dict(), {**original, **sevens})
        with torch.no_grad(), FSDP.summon_full_params(model, offload_to_cpu=offload_to_cpu):
            for name, parameter in model.named_parameters():
                if name.endswith("weight"):
                    parameter.copy_(other[name])
                else:
                    parameter.data = other[name].data.clone()
        changed = {**original, **{name: p.detach() for name, p in other.items()}}
        assert_identical(model.state_dict(), changed)
        with FSDP.summon_full_params(model):
            model.load_state_dict(original)
            assert_identical(model.state_dict(), original)
        assert_identical(model.state_dict(), original)
        assert step(model) == pytest.approx(step(make_model()), rel=1e-6)


@on_ranks(2)
def test_contexts_can_be_nested() -> None:
    for config in CONFIGS:
        model = wrapped(config)
        blocks, before = model.module.blocks, slots(model)
        with torch.no_grad(), FSDP.summon_full_params(model):
            outside = slots(model)
            with FSDP.summon_full_params(model), FSDP.summon_full_params(blocks, writeback=False):
                assert slots(model) == outside
                for parameter in model.parameters():
                    parameter.fill_(2.0)
            assert slots(model) == outside, "what the outer context shows stays until its end"
        assert slots(model) == before
        state = model.state_dict()
        assert all((state[name] == 2.0).all() for name in names_of(make_model()))
        inner = FSDP.summon_full_params(blocks[0], writeback=False)
        with inner, FSDP.summon_full_params(model, writeback=False):
            assert sorted(names_of(model)) == sorted(names_of(make_model()))
        assert slots(model) == before


def _raise(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm1d):
        raise EOFError


@on_ranks(2)
def test_an_exception_inside_changes_nothing() -> None:
    for config, writeback in itertools.product(CONFIGS, (False, True)):
        model = wrapped(config)
        before = slots(model)
        outer = FSDP.summon_full_params(model, writeback=writeback, with_grads=writeback)
        with pytest.raises(EOFError), outer, FSDP.summon_full_params(model, writeback=writeback):
            raise EOFError
        assert slots(model) == before
        with pytest.raises(EOFError):
            model.apply(_raise)
        assert slots(model) == before
        assert_identical(model.state_dict(), make_model().state_dict())
        assert step(model) == pytest.approx(step(make_model()), rel=1e-6)


@pytest.mark.parametrize("world_size", sample([1, 2], 1))
@on_ranks("world_size")
def test_gradients_are_shown_whole_and_changes_of_them_are_kept(world_size: int) -> None:
    plain = make_model()
    losses_of(plain).backward()
    for config in CONFIGS:
        model = wrapped(config)
        assert_gradients_shown(model, make_model(), 1.0)  # there are none
        losses_of(model).backward()
        kept = [param.grad for param in sharded_params(model)]
        with FSDP.summon_full_params(model):
            assert all(parameter.grad is None for parameter in model.parameters())
        assert_gradients_shown(model, plain, 1.0)
        assert all(p.grad is g for p, g in zip(sharded_params(model), kept, strict=True))
        change_gradients(model, 0.0, writeback=False)
        found = [p.grad.any() for p in sharded_params(model) if p.grad is not None]
        assert any(found) is not _is_whole(model)
        if _is_whole(model):  # back to what they were
            model.zero_grad()
            losses_of(model).backward()
        change_gradients(model, 2.0, writeback=True)
        assert_gradients_shown(model, plain, 2.0)


def sharded_params(model: FSDP) -> list[nn.Parameter]:
    return [param for group, _ in groups_of(model) for param, _ in group.store.sharded_params]


@torch.no_grad()
def change_gradients(model: FSDP, factor: float, writeback: bool) -> None:
    with FSDP.summon_full_params(model, with_grads=True, writeback=writeback):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def assert_gradients_shown(model: FSDP, plain: nn.Module, factor: float) -> None:
    """Those of the unsharded model, times ``factor``."""
    wanted = {n: p.grad * factor for n, p in plain.named_parameters() if p.grad is not None}
    with FSDP.summon_full_params(model, with_grads=True):
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert list(found) == list(wanted)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


# --- calls inside ---------------------------------------------------------------------------------


@on_ranks(2)
def test_forwards_inside_use_whole_parameters_and_send_nothing() -> None:
    tokens = torch.tensor([1, 2])
    for config in CONFIGS:
        model = wrapped(config).eval()
        with torch.no_grad(), FSDP.summon_full_params(model, writeback=False):
            before = num_sent(model)
            for _ in range(1 + dist.get_rank()):  # ranks may stop at different lengths
                torch.testing.assert_close(model(tokens), make_model().eval()(tokens))
            assert num_sent(model) == before
        assert step(model.train()) == pytest.approx(step(make_model()), rel=1e-6)


@on_ranks(2)
def test_gradients_arrive_after_a_first_forward_inside() -> None:
    """Large parameters have a hook each, which the first forward puts there."""
    plain = nn.Linear(256, 256)
    x = torch.linspace(-1, 1, 2 * plain.in_features).view(2, -1)
    plain(x).square().sum().backward()
    for use_orig_params in (False, True):
        model = FSDP(copy.deepcopy(plain), use_orig_params=use_orig_params)
        with FSDP.summon_full_params(model):
            model(x)
        model(x).square().sum().backward()
        assert_gradients_shown(model, plain, 1.0)


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.25)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


@on_ranks(2)
def test_apply_sees_whole_parameters_and_keeps_changes() -> None:
    plain = make_model()
    plain.apply(_init)
    for config in CONFIGS:
        model = wrapped(config)
        seen: list[nn.Module] = []
        assert model.apply(_init) is model
        assert_identical(model.state_dict(), plain.state_dict())
        assert model.apply(seen.append) is model
        assert set(seen) == set(model.modules())
        assert step(model) == pytest.approx(step(copy.deepcopy(plain)), rel=1e-6)
        with FSDP.summon_full_params(model):
            model.apply(_fill)
        state = model.state_dict()
        assert all(state[name].eq(0.5).all() for name, _ in plain.named_parameters())
