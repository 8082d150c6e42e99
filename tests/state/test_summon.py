"""summon_full_params and apply: whole parameters between steps, and what is left when they are gone
again."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_compat
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy
from fsdp_compat._engine.gradients import LARGE
from fsdp_compat.errors import StateError, UsageError
from tests.support.odd_model import Config, assert_identical, make_model, shard
from tests.support.ranks import on_ranks
from tests.support.sampling import sample

CONFIGS: tuple[Config, ...] = (
    ("FULL_SHARD", False, "blocks"),
    ("FULL_SHARD", True, "always"),
    ("SHARD_GRAD_OP", True, "none"),
    ("NO_SHARD", False, "blocks"),
    ("NO_SHARD", True, "blocks"),
)


def wrapped(config: Config) -> FSDP:
    return shard(make_model(), config)


def losses_of(model: nn.Module) -> Tensor:
    tokens = torch.tensor([1, 2, 3, 4, 5, 6])
    return F.cross_entropy(model(tokens), tokens.roll(1))


def step(model: nn.Module) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss = losses_of(model)
    loss.backward()
    optimizer.step()
    return loss.item()


def slots(model: nn.Module) -> list[tuple[str, str, int, tuple[int, ...], int]]:
    """What every module holds now: (module, attribute, object, shape, address)."""
    return [
        (name, attribute, id(p), tuple(p.shape), p.data_ptr())
        for name, module in model.named_modules()
        for attribute, p in module._parameters.items()
        if p is not None
    ]


# --- what is shown --------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", sample([1, 2, 3], 2))
@on_ranks("world_size")
def test_parameters_are_whole_and_have_their_own_names_inside(world_size: int) -> None:
    plain = make_model()
    expected = dict(plain.named_parameters())
    for config in CONFIGS:
        model = wrapped(config)
        before = slots(model)
        assert {name for name, _ in model.named_parameters()}.isdisjoint(expected), (
            "outside they carry the prefix of the wrapper"
        )
        for writeback, offload_to_cpu in itertools.product((True, False), (True, False)):
            with FSDP.summon_full_params(model, writeback=writeback, offload_to_cpu=offload_to_cpu):
                shown = dict(model.named_parameters())
                assert_identical(shown, expected)
                assert all(type(parameter) is nn.Parameter for parameter in shown.values())
                assert {name: p.requires_grad for name, p in shown.items()} == {
                    n: p.requires_grad for n, p in expected.items()
                }
                assert list(dict(model.named_parameters(remove_duplicate=False))) == list(
                    dict(plain.named_parameters(remove_duplicate=False))
                )
                assert list(dict(model.named_buffers())) == list(dict(plain.named_buffers()))
                assert list(dict(model.named_parameters(prefix="a"))) == [
                    f"a.{name}" for name in expected
                ]
                assert model.module.head.weight is model.module.embed.weight
                assert all(parameter.grad is None for parameter in shown.values())
                assert_identical(
                    {k: v for k, v in model.state_dict().items() if k in expected},
                    {k: v for k, v in plain.state_dict().items() if k in expected},
                )
            assert slots(model) == before
        assert step(model) == pytest.approx(step(copy.deepcopy(plain)), rel=1e-6)


@on_ranks(2)
def test_recurse_controls_whether_inner_units_are_shown() -> None:
    expected = dict(make_model().named_parameters())
    for use_orig_params in (False, True):
        model = wrapped(("FULL_SHARD", use_orig_params, "blocks"))
        with FSDP.summon_full_params(model, recurse=False):
            assert torch.equal(model.module.embed.weight, expected["embed.weight"])
            up = model.module.blocks[0].module.up
            assert "weight" not in up._parameters or up.weight.dim() == 1
        with FSDP.summon_full_params(model.blocks[1], recurse=False):
            assert torch.equal(
                model.module.blocks[1].module.up.weight, expected["blocks.1.up.weight"]
            )
            names = [name for name, _ in make_model().blocks[1].named_parameters()]
            assert [name for name, _ in model.blocks[1].named_parameters()] == names
            assert (
                "weight" not in model.module.embed._parameters
                or model.module.embed.weight.dim() == 1
            )
        with FSDP.summon_full_params(model.module.blocks):  # a container, not an instance
            for number in (0, 1):
                assert torch.equal(
                    model.module.blocks[number].module.up.weight,
                    expected[f"blocks.{number}.up.weight"],
                )


@on_ranks(2)
def test_rank0_only_shows_other_ranks_their_parts_and_refuses_writeback() -> None:
    expected = dict(make_model().named_parameters())
    for config, offload_to_cpu in itertools.product(CONFIGS, (False, True)):
        model = wrapped(config)
        before = slots(model)
        with FSDP.summon_full_params(
            model, writeback=False, rank0_only=True, offload_to_cpu=offload_to_cpu
        ):
            if dist.get_rank() == 0:
                assert_identical(dict(model.named_parameters()), expected)
            else:
                assert slots(model) == before
        assert slots(model) == before
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
    for config, offload_to_cpu in itertools.product(CONFIGS, (False, True)):
        model = wrapped(config)
        original = make_model().state_dict()
        with torch.no_grad():
            with FSDP.summon_full_params(model, writeback=False, offload_to_cpu=offload_to_cpu):
                for parameter in model.parameters():
                    parameter.fill_(7.0)
            names = dict(make_model().named_parameters(remove_duplicate=False))
            sevens = {
                name: torch.full_like(original[name], 7.0) for name in names if _is_whole(model)
            }
            assert_identical(model.state_dict(), {**original, **sevens})
            other = make_model(1)
            with FSDP.summon_full_params(model, offload_to_cpu=offload_to_cpu):
                for name, parameter in model.named_parameters():
                    if name.endswith("weight"):
                        parameter.copy_(dict(other.named_parameters())[name])
                    else:
                        parameter.data = dict(other.named_parameters())[name].data.clone()
        changed = {
            **original,
            **{name: p.detach() for name, p in other.named_parameters(remove_duplicate=False)},
        }
        assert_identical(model.state_dict(), changed)
        plain = make_model()
        plain.load_state_dict(changed)
        assert step(model) == pytest.approx(step(plain), rel=1e-6)


def _kept_without_writeback(
    library: Any, strategy: str, use_orig_params: bool, **options: bool
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = library.FullyShardedDataParallel(
        nn.Linear(3, 2),
        sharding_strategy=library.ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    with (
        torch.no_grad(),
        library.FullyShardedDataParallel.summon_full_params(model, writeback=False, **options),
    ):
        for parameter in model.parameters() if dist.get_rank() == 0 or not options else ():
            parameter.fill_(7.0 + dist.get_rank())
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(1, "FULL_SHARD"), (2, "FULL_SHARD"), (2, "NO_SHARD")]
)
@on_ranks("world_size")
def test_without_writeback_changes_stay_as_in_torch_but_not_on_one_replica(
    world_size: int, strategy: str
) -> None:
    for use_orig_params in (False, True):
        theirs, ours = (
            _kept_without_writeback(library, strategy, use_orig_params)
            for library in (torch_fsdp, fsdp_compat)
        )
        assert ours == theirs
    kept = _kept_without_writeback(fsdp_compat, strategy, True, rank0_only=True)
    if dist.get_world_size() > 1:  # in torch the copies would differ from then on
        torch.manual_seed(0)
        assert kept == {
            name: value.tolist() for name, value in nn.Linear(3, 2).state_dict().items()
        }


@on_ranks(2)
def test_a_dict_can_be_loaded_inside() -> None:
    for config in CONFIGS:
        model, other = wrapped(config), make_model(1).state_dict()
        with FSDP.summon_full_params(model):
            model.load_state_dict(other)
            assert_identical(model.state_dict(), other)
        assert_identical(model.state_dict(), other)


@on_ranks(2)
def test_contexts_can_be_nested() -> None:
    for config in CONFIGS:
        model = wrapped(config)
        before = slots(model)
        with torch.no_grad(), FSDP.summon_full_params(model):
            outside = slots(model)
            with (
                FSDP.summon_full_params(model),
                FSDP.summon_full_params(model.module.blocks, writeback=False),
            ):
                assert slots(model) == outside
                for parameter in model.parameters():
                    parameter.fill_(2.0)
            assert slots(model) == outside, "what the outer context shows stays until its end"
            assert all((parameter == 2.0).all() for parameter in model.parameters())
        assert slots(model) == before
        assert all(
            (p == 2.0).all()
            for name, p in model.state_dict().items()
            if name in dict(make_model().named_parameters())
        )
        inner = FSDP.summon_full_params(model.module.blocks[0], writeback=False)
        with inner, FSDP.summon_full_params(model, writeback=False):
            assert sorted(n for n, _ in model.named_parameters()) == sorted(
                n for n, _ in make_model().named_parameters()
            )
        assert slots(model) == before


class _Stop(Exception):
    pass


def _raise(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm1d):
        raise _Stop


@on_ranks(2)
def test_an_exception_inside_changes_nothing() -> None:
    for config, writeback in itertools.product(CONFIGS, (False, True)):
        model = wrapped(config)
        before = slots(model)
        for with_grads in (False, True):
            outer = FSDP.summon_full_params(model, writeback=writeback, with_grads=with_grads)
            with pytest.raises(_Stop), outer, FSDP.summon_full_params(model, writeback=writeback):
                raise _Stop
            assert slots(model) == before
        with pytest.raises(_Stop):
            model.apply(_raise)
        assert slots(model) == before
        assert_identical(model.state_dict(), make_model().state_dict())
        assert step(model) == pytest.approx(step(make_model()), rel=1e-6)
    dist.barrier()


@pytest.mark.parametrize("world_size", sample([1, 2], 1))
@on_ranks("world_size")
def test_gradients_are_shown_whole_and_changes_of_them_are_kept(world_size: int) -> None:
    plain = make_model()
    losses_of(plain).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for config in CONFIGS:
        model = wrapped(config)
        with FSDP.summon_full_params(model, with_grads=True):
            assert all(parameter.grad is None for parameter in model.parameters())
        losses_of(model).backward()
        kept = [
            target.grad
            for group in model._runtime.groups
            for target, _ in group.store.sharded_params
        ]
        with FSDP.summon_full_params(model):
            assert all(parameter.grad is None for parameter in model.parameters())
        with FSDP.summon_full_params(model, with_grads=True):
            shown = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            assert list(shown) == list(expected)
            for name, grad in expected.items():
                torch.testing.assert_close(shown[name], grad, rtol=1e-5, atol=1e-6, msg=name)
                assert shown[name].shape == grad.shape
        targets = [
            target for group in model._runtime.groups for target, _ in group.store.sharded_params
        ]
        assert all(target.grad is grad for target, grad in zip(targets, kept, strict=True))
        with torch.no_grad(), FSDP.summon_full_params(model, with_grads=True, writeback=False):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        assert any(
            target.grad is not None and target.grad.any() for target in targets
        ) is not _is_whole(model)
        if _is_whole(model):  # back to what they were
            model.zero_grad()
            losses_of(model).backward()
        with torch.no_grad(), FSDP.summon_full_params(model, with_grads=True):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(2)
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    torch.testing.assert_close(
                        parameter.grad, 2 * expected[name], rtol=1e-5, atol=1e-6, msg=name
                    )


@on_ranks(2)
def test_parameter_objects_keep_their_identity() -> None:
    for config in CONFIGS:
        plain = make_model()
        originals = dict(plain.named_parameters())
        use_orig_params, model = config[1], shard(plain, config)
        registered = list(model.parameters())
        if use_orig_params:
            assert all(
                parameter is original
                for parameter, original in zip(registered, originals.values(), strict=True)
            )
        for _ in range(2):
            with FSDP.summon_full_params(model):
                if use_orig_params:
                    shown = list(model.parameters())
                    assert all(
                        parameter is original
                        for parameter, original in zip(shown, originals.values(), strict=True)
                    )
            losses_of(model).backward()
            model.zero_grad()
            assert all(
                one is other for one, other in zip(model.parameters(), registered, strict=True)
            )


# --- calls inside ---------------------------------------------------------------------------------


@on_ranks(2)
def test_a_generation_loop_inside_uses_whole_parameters_and_sends_nothing() -> None:
    plain = make_model().eval()
    for config in CONFIGS:
        model = wrapped(config).eval()
        tokens = expected = torch.tensor([1, 2])
        with torch.no_grad():
            for _ in range(3):  # a greedy generation, in which ranks may stop at different lengths
                expected = torch.cat([expected, plain(expected)[-1].argmax()[None]])
            with FSDP.summon_full_params(model, writeback=False):
                before = model._runtime.groups[0].shard.traffic.counts.total()
                for _ in range(3):
                    tokens = torch.cat([tokens, model(tokens)[-1].argmax()[None]])
                if dist.get_rank() == 1:
                    model(tokens)
                assert model._runtime.groups[0].shard.traffic.counts.total() == before, (
                    "nothing is gathered again"
                )
        assert torch.equal(tokens, expected)
        model.train()
        assert step(model) == pytest.approx(step(make_model()), rel=1e-6)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_gradients_arrive_after_a_first_forward_inside(use_orig_params: bool) -> None:
    """Large parameters have a hook each, which the first forward puts there."""
    plain = nn.Linear(LARGE // 256, 256)
    model = FSDP(copy.deepcopy(plain), use_orig_params=use_orig_params)
    x = torch.linspace(-1, 1, 2 * plain.in_features).view(2, -1)
    with FSDP.summon_full_params(model):
        model(x)
    for each in (model, plain):
        each(x).square().sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        grads = [param.grad for param in model.parameters()]
        for grad, param in zip(grads, plain.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad)


@on_ranks(2)
def test_with_the_root_alone_shown_forward_still_gathers_the_rest() -> None:
    plain = make_model().eval()
    for use_orig_params in (False, True):
        model = wrapped(("FULL_SHARD", use_orig_params, "blocks")).eval()
        tokens = torch.tensor([1, 2, 3])
        with torch.no_grad(), FSDP.summon_full_params(model, recurse=False, writeback=False):
            torch.testing.assert_close(model(tokens), plain(tokens))
        assert step(model.train()) == pytest.approx(step(make_model()), rel=1e-6)


class _Summons(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.around: list[FSDP] = []

    def forward(self, x: Tensor) -> Tensor:
        with FSDP.summon_full_params(self.around[0]):
            return self.linear(x)


@on_ranks(2)
def test_a_call_inside_of_forward_is_refused() -> None:
    for use_orig_params in (False, True):
        inner = _Summons()
        model = FSDP(inner, use_orig_params=use_orig_params)
        inner.around = [model]
        with pytest.raises(StateError) as caught:
            model(torch.ones(3))
        for fact in ("expected:", "got:", "where:", "to do:"):
            assert fact in str(caught.value)
    dist.barrier()


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.25)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


@pytest.mark.parametrize("world_size", sample([1, 2], 1))
@on_ranks("world_size")
def test_apply_sees_whole_parameters_and_keeps_changes(world_size: int) -> None:
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


@on_ranks(2)
def test_summoning_between_forward_and_backward_changes_nothing() -> None:
    for config in CONFIGS:
        model, plain = wrapped(config), make_model()
        loss = losses_of(model)
        with FSDP.summon_full_params(model, writeback=False):
            norms = [parameter.norm().item() for parameter in model.parameters()]
        assert norms == pytest.approx([parameter.norm().item() for parameter in plain.parameters()])
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert loss.item() == pytest.approx(step(plain), rel=1e-6)
        assert step(model) == pytest.approx(step(plain), rel=1e-5)
