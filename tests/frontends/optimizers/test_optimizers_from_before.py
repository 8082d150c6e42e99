"""Optimizers created before the model was wrapped keep working or raise a clear error; and states
saved by unwrapped models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, StateDictType
from fsdp_compat._state.units import clean_name
from fsdp_compat.errors import FsdpCompatError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.models import DIM, Block, Odd, Stack
from tests.support.pairwise import each_value
from tests.support.parity import assert_close, both_forms
from tests.support.ranks import run_ranks
from tests.support.sampling import sample

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
HYBRID = ShardingStrategy.HYBRID_SHARD


class Net(nn.Module):
    """A stack, parameters of all sizes, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.odd = Stack(2), Odd()
        self.stack.stem.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(self.odd(x))


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(seed: int) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed))


def wrapped(model: nn.Module, **options: Any) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW, amsgrad, foreach": partial(torch.optim.AdamW, lr=0.01, amsgrad=True, foreach=True),
    "Adam, fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "SGD, one by one": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    "Adagrad": partial(
        torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1
    ),  # has state before its first step
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def step(model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
    model(batch(seed)).pow(2).mean().backward()
    optim.step()
    optim.zero_grad()


def assert_same_state(model: FSDP, plain: nn.Module, what: object) -> None:
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert_close(state[name], value, f"{what}: {name}")


def assert_same_optimizer_state(
    model: FSDP, optim: Any, plain: nn.Module, plain_optim: Any, what: object
) -> None:
    """The full optimizer state by names, against the unsharded one by numbers. Collective."""
    names = {id(p): name for name, p in plain.named_parameters()}
    state, expected = FSDP.optim_state_dict(model, optim), plain_optim.state_dict()
    in_order = [names[id(p)] for group in plain_optim.param_groups for p in group["params"]]
    assert set(state["state"]) == {in_order[number] for number in expected["state"]}, what
    for number, entry in expected["state"].items():
        got = state["state"][in_order[number]]
        assert got.keys() == entry.keys(), f"{what}: {in_order[number]}"
        for key, value in entry.items():
            if isinstance(value, Tensor):
                assert_close(got[key], value, f"{what}: {key} of {in_order[number]}")
            else:
                assert got[key] == value, f"{what}: {key} of {in_order[number]}"
    settings = [
        [{k: v for k, v in g.items() if k != "params"} for g in d["param_groups"]]
        for d in (state, expected)
    ]
    assert settings[0] == settings[1], what


# -- with original parameters


def _goes_on(kinds: list[str], **options: Any) -> None:
    if options.get("sharding_strategy") is HYBRID:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    for kind in kinds:
        for num_before in (0, 2):
            with about((kind, num_before)):
                plain, inner = network(), network()
                plain_optim, optim = (OPTIMIZERS[kind](trainable(m)) for m in (plain, inner))
                for seed in range(num_before):
                    step(plain, plain_optim, seed)
                    step(inner, optim, seed)
                objects = dict(inner.named_parameters())
                model = wrapped(inner, use_orig_params=True, **options)
                assert [clean_name(n) for n, _ in model.named_parameters()] == list(objects)
                for name, parameter in model.named_parameters():
                    assert parameter is objects[clean_name(name)], f"{name} is another object now"
                if num_before:
                    assert_same_optimizer_state(
                        model, optim, plain, plain_optim, "directly after wrapping"
                    )
                for seed in (5, 6):
                    step(plain, plain_optim, seed)
                    step(model, optim, seed)
                    assert_same_state(model, plain, f"step {seed}")
                assert_same_optimizer_state(model, optim, plain, plain_optim, "after training")
                for parameter, state in optim.state.items():
                    for key, value in state.items():
                        if isinstance(value, Tensor) and value.dim():
                            assert value.shape == parameter.shape, f"{key} is not cut"
                            assert value.untyped_storage().nbytes() <= max(
                                16, 4 * parameter.numel()
                            ), f"{key} keeps the whole"


@pytest.mark.parametrize(
    "kinds", [list(OPTIMIZERS)[:4], list(OPTIMIZERS)[4:]], ids=["first", "others"]
)
def test_an_optimizer_from_before_goes_on_with_its_state_cut_to_this_ranks_part(
    kinds: list[str],
) -> None:
    run_ranks(2, _goes_on, kinds)


@pytest.mark.parametrize("num_ranks", sample([1, 3, 4], 1))
def test_an_optimizer_from_before_goes_on_with_any_number_of_ranks(num_ranks: int) -> None:
    run_ranks(num_ranks, _goes_on, ["Adam"])


@pytest.mark.parametrize(
    ("num_ranks", "strategy"), sample([(2, SHARD_GRAD_OP), (2, NO_SHARD), (4, HYBRID)], 1, 2)
)
def test_an_optimizer_from_before_goes_on_with_every_strategy(
    num_ranks: int, strategy: ShardingStrategy
) -> None:
    run_ranks(
        num_ranks,
        _goes_on,
        ["AdamW, amsgrad, foreach", "SGD, momentum"],
        sharding_strategy=strategy,
    )


def _goes_on_with_groups() -> None:
    plain, inner = network(), network()
    optims = []
    for module in (plain, inner):
        decay = [p for p in trainable(module) if p.dim() > 1]
        others = [p for p in trainable(module) if p.dim() <= 1]
        rest, late = others[:-2], others[-2:]
        optim = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.003}], lr=0.01
        )
        step(module, optim, 0)
        optims.append((optim, late))
    model = wrapped(inner, use_orig_params=True)
    for module, (optim, late) in ((plain, optims[0]), (model, optims[1])):
        step(module, optim, 1)
        optim.add_param_group({"params": late, "lr": 0.02, "weight_decay": 0.0})
        step(module, optim, 2)
        module.stack.stem.bias.requires_grad_(True)  # unfrozen, and given to the optimizer
        optim.add_param_group(
            {
                "params": [
                    dict((clean_name(n), p) for n, p in module.named_parameters())[
                        "stack.stem.bias"
                    ]
                ]
            }
        )
        step(module, optim, 3)
        step(module, optim, 4)
    assert_same_state(model, plain, "after training")
    assert_same_optimizer_state(model, optims[1][0], plain, optims[0][0], "after training")


def test_groups_of_parameters_stay_and_more_may_be_added() -> None:
    run_ranks(2, _goes_on_with_groups)


def _wraps_twice() -> None:
    """An inner module first, a step, then the whole: state is cut whenever parameters become
    parts."""
    plain, inner = network(), network()
    plain_optim, optim = (torch.optim.Adam(trainable(m), lr=0.01) for m in (plain, inner))
    step(plain, plain_optim, 0)
    step(inner, optim, 0)
    inner.stack = FSDP(inner.stack, use_orig_params=True)
    step(plain, plain_optim, 1)
    step(inner, optim, 1)
    model = FSDP(inner, use_orig_params=True)
    step(plain, plain_optim, 2)
    step(model, optim, 2)
    assert_same_state(model, plain, "after training")
    assert_same_optimizer_state(model, optim, plain, plain_optim, "after training")


def test_modules_may_be_wrapped_one_after_the_other() -> None:
    run_ranks(2, _wraps_twice)


def _saves_and_loads_from_before() -> None:
    plain, inner = network(), network()
    plain_optim, optim = (torch.optim.Adam(trainable(m), lr=0.01) for m in (plain, inner))
    saved = []
    for module, its in ((plain, plain_optim), (inner, optim)):
        step(module, its, 0)
        saved.append((copy.deepcopy(module.state_dict()), copy.deepcopy(its.state_dict())))
        step(module, its, 1)
    model = wrapped(inner, use_orig_params=True)
    scheduler, plain_scheduler = (
        torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optim, plain_optim)
    )
    step(model, optim, 2)
    step(plain, plain_optim, 2)
    scheduler.step()
    plain_scheduler.step()
    # state saved before wrapping is loaded through the conversion, as always
    model.load_state_dict(saved[1][0])
    optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, saved[1][1]))
    plain.load_state_dict(saved[0][0])
    plain_optim.load_state_dict(saved[0][1])
    step(model, optim, 3)
    step(plain, plain_optim, 3)
    assert_same_state(model, plain, "after loading")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = FSDP.optim_state_dict(model, optim)
        step(model, optim, 4)
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, state))


def test_states_from_before_are_loaded_after_wrapping() -> None:
    run_ranks(2, _saves_and_loads_from_before)


def _loads_directly() -> None:
    """Whole state put into an optimizer directly is cut at the next step, or refused; it is never
    used unchanged."""
    plain, inner = network(), network()
    plain_optim, optim = (torch.optim.Adam(trainable(m), lr=0.01) for m in (plain, inner))
    step(plain, plain_optim, 0)
    step(inner, optim, 0)
    saved = copy.deepcopy(optim.state_dict())
    model = wrapped(inner, use_orig_params=True)
    step(model, optim, 1)
    step(plain, plain_optim, 1)
    plain_optim.load_state_dict(copy.deepcopy(saved))
    optim.load_state_dict(saved)
    step(plain, plain_optim, 2)
    try:
        step(model, optim, 2)
    except (FsdpCompatError, RuntimeError):
        return
    assert_same_state(model, plain, "after loading")


def test_whole_state_loaded_without_conversion_is_not_used_unchanged() -> None:
    run_ranks(2, _loads_directly)


# -- values that users write into parameters


def _keeps_what_is_written() -> None:
    plain, inner = network(), network()
    plain_optim, optim = (torch.optim.SGD(trainable(m), 0.05, momentum=0.9) for m in (plain, inner))
    model = wrapped(inner, use_orig_params=True)
    step(plain, plain_optim, 0)
    step(model, optim, 0)
    part = dict((clean_name(n), p) for n, p in model.named_parameters())
    whole = dict(plain.named_parameters())

    def by_data(p: nn.Parameter) -> None:
        p.data = p.data * 0.5

    def by_data_in_place(p: nn.Parameter) -> None:
        p.data.mul_(0.5)

    def by_copy(p: nn.Parameter) -> None:
        with torch.no_grad():
            p.copy_(p * 0.5)

    def by_set(p: nn.Parameter) -> None:
        with torch.no_grad():
            p.set_(p.detach() * 0.5)

    for number, write in enumerate((by_data, by_data_in_place, by_copy, by_set)):
        with about(write.__name__):
            for name in whole:
                write(part[name])
                write(whole[name])
            assert_same_state(model, plain, "written values")
            assert_close(model(batch(9)), plain(batch(9)), "forward")
            step(plain, plain_optim, number)
            step(model, optim, number)
            assert_same_state(model, plain, "after a step")
    for name in whole:  # the last write before a load
        by_data(part[name])
    state = plain.state_dict()
    model.load_state_dict(state)
    assert_same_state(model, plain, "loaded values")
    step(plain, plain_optim, 8)
    step(model, optim, 8)
    assert_same_state(model, plain, "after a step")
    for name, parameter in model.named_parameters():
        assert parameter is part[clean_name(name)]


def test_values_written_into_parameters_by_users_are_kept() -> None:
    run_ranks(2, _keeps_what_is_written)


# -- without original parameters


def _cannot_go_on() -> None:
    for num_before in (0, 1):
        inner = network()
        optim = torch.optim.Adam(trainable(inner), lr=0.01)
        for seed in range(num_before):
            step(inner, optim, seed)
        model = wrapped(inner)
        before = model.state_dict()
        for _ in range(2):  # every time, not once
            model(batch(1)).pow(2).mean().backward()
            with pytest.raises(
                FsdpCompatError,
                match=r"FlatParameter now[\s\S]*use_orig_params=True",
            ):
                optim.step()
            with pytest.raises(FsdpCompatError, match="use_orig_params=True"):
                FSDP.optim_state_dict(model, optim)
            model.zero_grad()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        plain = network()
        plain.load_state_dict(before)
        plain_optim, fresh = (
            torch.optim.Adam(trainable(plain), lr=0.01),
            torch.optim.Adam(trainable(model), lr=0.01),
        )
        step(plain, plain_optim, 2)
        step(model, fresh, 2)
        assert_same_state(model, plain, "with an optimizer made after wrapping")
        other = nn.Linear(2, 2)  # not part of the model
        step_of_another = torch.optim.SGD(other.parameters(), 0.1)
        other(torch.ones(1, 2)).sum().backward()
        step_of_another.step()


def test_with_use_orig_params_false_the_first_step_says_what_to_do() -> None:
    run_ranks(2, _cannot_go_on)


# -- states of unwrapped models and of DDP


def _groups(module: nn.Module, kind: str) -> list[dict[str, Any]]:
    """Return groups of whole units, which FlatParameters can be in, or groups that only original
    parameters can form."""
    named = list(module.named_parameters())
    if kind == "one":
        return [{"params": [p for _, p in named]}]
    blocks = [p for name, p in named if "blocks" in name]
    return [
        {"params": blocks, "lr": 0.003},
        {"params": [p for name, p in named if "blocks" not in name]},
    ]


def _loads_by_number(kind: str, source: str, use_orig_params: bool) -> None:
    plain, saver = network(), network()
    saving: nn.Module = DDP(saver) if source == "ddp" else saver
    saver_optim = torch.optim.Adam(_groups(saving, kind), lr=0.01)
    for seed in range(2):
        step(saving, saver_optim, seed)
    state, optim_state = copy.deepcopy(saving.state_dict()), copy.deepcopy(saver_optim.state_dict())
    assert all(name.startswith("module.") == (source == "ddp") for name in state)
    assert all(isinstance(number, int) for number in optim_state["state"])
    plain.load_state_dict(saver.state_dict())
    plain_optim = torch.optim.Adam(_groups(plain, kind), lr=0.01)
    plain_optim.load_state_dict(copy.deepcopy(optim_state))
    model = wrapped(network(), use_orig_params=use_orig_params)
    optim = torch.optim.Adam(_groups(model, kind), lr=0.5)
    given = copy.deepcopy(optim_state)
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, given))
    assert [g["lr"] for g in optim.param_groups] == [g["lr"] for g in plain_optim.param_groups]
    assert str(given) == str(optim_state), "the dict given stays as it was"
    for seed in (4, 5):
        step(plain, plain_optim, seed)
        step(model, optim, seed)
        assert_same_state(model, plain, f"step {seed}")
    if source == "ddp":  # DDP's names, in the optimizer's state too
        names = [f"module.{name}" for group in _names(kind) for name in group]
        by_name = {
            "state": {names[number]: value for number, value in optim_state["state"].items()},
            "param_groups": [
                {**group, "params": [names[number] for number in group["params"]]}
                for group in optim_state["param_groups"]
            ],
        }
        model.load_state_dict(state)
        FSDP.optim_state_dict_to_load(model, optim, copy.deepcopy(by_name), load_directly=True)
        plain.load_state_dict(saver.state_dict())
        plain_optim.load_state_dict(copy.deepcopy(optim_state))
        step(plain, plain_optim, 7)
        step(model, optim, 7)
        assert_same_state(model, plain, "by names of DDP")


def _names(kind: str) -> list[list[str]]:
    plain = network()
    names = {id(p): name for name, p in plain.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in _groups(plain, kind)]


@each_value
@both_forms
@pytest.mark.parametrize("kind", ["one", "two"])
@pytest.mark.parametrize("source", ["unwrapped", "ddp"])
def test_states_by_numbers_load(kind: str, source: str, use_orig_params: bool) -> None:
    run_ranks(2, _loads_by_number, kind, source, use_orig_params)


def _loads_numbers_of_trainable_only(use_orig_params: bool) -> None:
    """Trainers leave frozen parameters out of the optimizer: the numbers count only the optimizer's
    parameters."""
    plain = network()
    plain_optim = torch.optim.Adam(trainable(plain), lr=0.01)
    step(plain, plain_optim, 0)
    model = wrapped(network(), use_orig_params=use_orig_params)
    optim = torch.optim.Adam(trainable(model), lr=0.01)
    model.load_state_dict(plain.state_dict())
    optim.load_state_dict(
        FSDP.optim_state_dict_to_load(model, optim, copy.deepcopy(plain_optim.state_dict()))
    )
    for seed in (4, 5):
        step(plain, plain_optim, seed)
        step(model, optim, seed)
        assert_same_state(model, plain, f"step {seed}")
    fewer = torch.optim.Adam(trainable(plain)[1:], lr=0.01)
    step(plain, fewer, 0)
    with pytest.raises(FsdpCompatError, match="does not fit the optimizer"):
        FSDP.optim_state_dict_to_load(model, optim, fewer.state_dict())


@both_forms
def test_numbered_state_counts_only_parameters_of_the_optimizer(use_orig_params: bool) -> None:
    run_ranks(2, _loads_numbers_of_trainable_only, use_orig_params)


def _loads_numbers_of_decay_groups() -> None:
    """With original parameters groups may cut through units, in any order."""
    plain = network()

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        names = {"stack.stem.weight", "stack.head.weight", "odd.weight"}
        named = [(clean_name(n), p) for n, p in module.named_parameters() if p.requires_grad]
        biases = [p for n, p in reversed(named) if n not in names]
        return [{"params": biases, "lr": 0.02}, {"params": [p for n, p in named if n in names]}]

    plain_optim = torch.optim.AdamW(groups(plain), lr=0.01)
    step(plain, plain_optim, 0)
    model = wrapped(network(), use_orig_params=True)
    optim = torch.optim.AdamW(groups(model), lr=0.3)
    model.load_state_dict(plain.state_dict())
    optim.load_state_dict(
        FSDP.optim_state_dict_to_load(model, optim, copy.deepcopy(plain_optim.state_dict()))
    )
    for seed in (4, 5):
        step(plain, plain_optim, seed)
        step(model, optim, seed)
        assert_same_state(model, plain, f"step {seed}")


def test_numbers_in_groups_that_cut_through_units_load() -> None:
    run_ranks(2, _loads_numbers_of_decay_groups)


def _loads_names_of_ddp(use_orig_params: bool) -> None:
    plain = network()
    state = {f"module.{name}": value + 1 for name, value in plain.state_dict().items()}
    model = wrapped(network(), use_orig_params=use_orig_params)
    before = list(state)
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert list(state) == before, "the dict given stays as it was"
    plain.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    assert_same_state(model, plain, "names of DDP")
    del state["module.odd.weight"]
    with pytest.raises(RuntimeError, match=r"odd\.weight"):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["odd.weight"]
    dist.barrier()


@both_forms
def test_a_state_dict_of_ddp_loads(use_orig_params: bool) -> None:
    run_ranks(2, _loads_names_of_ddp, use_orig_params)
