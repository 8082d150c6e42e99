"""optim_state_dict and optim_state_dict_to_load: the unsharded optimizer's state by name, out of
any sharding, into any other."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig as TorchFullOptimConfig
from torch.distributed.fsdp import FullStateDictConfig as TorchFullConfig
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_compat import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._state.rank0 import Rank0Broadcast
from fsdp_compat._state.units import clean_name, units_of
from fsdp_compat.errors import CheckpointError, FsdpCompatError, UsageError
from fsdp_compat.wrap import ModuleWrapPolicy, always_wrap_policy
from tests.support.optimizer_state import create_optimizer_state
from tests.support.pairwise import each_value
from tests.support.ranks import run_ranks
from tests.support.sampling import sample

Config = tuple[str, bool, str]  # strategy, use_orig_params, policy
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adam": functools.partial(torch.optim.Adam, lr=0.02, amsgrad=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "SGD": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.02),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """A tie, and with ``odd`` a 0-d parameter and one without elements, which torch refuses."""

    def __init__(self, odd: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.Sequential(Block(), Block())
        self.gain = nn.Parameter(torch.ones(()) if odd else torch.ones(1))
        self.nothing = nn.Parameter(torch.zeros(0, 2) if odd else torch.zeros(1, 2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gain * self.head(self.blocks(self.embed(tokens))) + self.nothing.sum()


def make_model(seed: int = 0, odd: bool = True) -> Model:
    torch.manual_seed(seed)
    return Model(odd)


def shard(model: nn.Module, config: Config) -> FSDP:
    strategy, use_orig_params, policy = config
    policies: dict[str, Any] = {
        "none": None,
        "blocks": ModuleWrapPolicy({Block}),
        "always": always_wrap_policy,
    }
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        auto_wrap_policy=policies[policy],
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """On data that depend on the step alone; return the losses."""
    losses = []
    for step in steps:
        tokens = torch.randint(7, (8,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an unsharded model's optimizer, by names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "state": {names[p]: dict(optimizer.state[p]) for p in names if p in optimizer.state},
        "param_groups": [
            {**group, "params": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def assert_state(
    actual: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = 0.0
) -> None:
    assert set(actual) == set(expected)
    for name, entry in expected.items():
        assert set(actual[name]) == set(entry), name
        for key, value in entry.items():
            where = f"{key} of {name}"
            if not isinstance(value, Tensor):
                assert actual[name][key] == value, where
                continue
            found = actual[name][key]
            assert found.shape == value.shape, where
            assert found.dtype == value.dtype, where
            if tolerance:
                torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance, msg=where)
            else:
                assert torch.equal(found, value), where


def full_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> dict[str, Any]:
    config = FullOptimStateDictConfig(**options)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        return FSDP.optim_state_dict(model, optimizer)


def num_sent(model: FSDP) -> int:
    comms = {
        id(comm): comm for group in model._runtime.groups for comm in (group.shard, group.replica)
    }
    return sum(sum(comm.traffic.counts.values()) for comm in comms.values())


def split_decay(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.3},
        {
            "params": [p for name, p in named if not name.endswith("weight")],
            "weight_decay": 0.0,
            "lr": 0.005,
        },
    ]


def assert_four_facts(error: BaseException) -> None:
    for fact in ("expected:", "got:", "where:", "to do:"):
        assert fact in str(error), str(error)


FEW_CONFIGS: tuple[Config, ...] = (
    ("FULL_SHARD", False, "blocks"),
    ("FULL_SHARD", True, "always"),
    ("SHARD_GRAD_OP", True, "none"),
    ("NO_SHARD", False, "blocks"),
)


# --- the full form --------------------------------------------------------------------------------


def _equals_the_unsharded() -> None:
    """Every two of an optimizer and a configuration are combined, and of an optimizer and a number
    of ranks."""
    for number, (kind, make) in enumerate(OPTIMIZERS.items()):
        config = FEW_CONFIGS[(number + dist.get_world_size()) % 4]
        plain, model = make_model(), shard(make_model(), config)
        reference, optimizer = make(plain.parameters()), make(model.parameters())
        empty = full_state(model, optimizer)
        assert_state(
            empty["state"], by_name(plain, reference)["state"]
        )  # Adagrad has state before the first step
        assert train(model, optimizer, range(3)) == pytest.approx(
            train(plain, reference, range(3)), rel=1e-5
        )
        found, expected = full_state(model, optimizer), by_name(plain, reference)
        assert_state(found["state"], expected["state"], tolerance=1e-4)
        assert len(found["param_groups"]) == 1
        (group,), (wanted,) = found["param_groups"], expected["param_groups"]
        assert sorted(group["params"]) == sorted(wanted["params"])
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in wanted.items() if k != "params"
        }
        tensors = [
            value for entry in found["state"].values() for value in entry.values() if value.numel()
        ]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors), (
            f"{kind}: nothing is shared"
        )
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors), (
            f"{kind}: copies are compact"
        )
        own = {
            v.untyped_storage().data_ptr()
            for s in optimizer.state.values()
            for v in s.values()
            if isinstance(v, Tensor)
        }
        assert not own & {tensor.untyped_storage().data_ptr() for tensor in tensors}, (
            f"{kind}: copies are the caller's"
        )


@pytest.mark.parametrize("world_size", sample([1, 2, 3], 2))
def test_the_full_form_equals_the_unsharded_optimizers_state(world_size: int) -> None:
    run_ranks(world_size, _equals_the_unsharded)


def _groups_and_parts_without_state() -> None:
    def built() -> nn.Module:
        model = make_model()
        model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        model.spare = Block()  # never runs
        return model

    plain = built()
    reference = torch.optim.AdamW(split_decay(plain), lr=0.02)
    train(plain, reference, range(2))
    expected = by_name(plain, reference)
    assert not [name for name in expected["state"] if name.startswith(("spare", "frozen"))]
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model = shard(built(), (strategy, True, "blocks"))
        clean = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
        assert sorted(clean) == sorted(name for name, _ in plain.named_parameters())
        optimizer = torch.optim.AdamW(split_decay(model), lr=0.02)
        train(model, optimizer, range(2))
        found = full_state(model, optimizer)
        assert_state(found["state"], expected["state"], tolerance=1e-4)
        for group, wanted in zip(found["param_groups"], expected["param_groups"], strict=True):
            assert sorted(group.pop("params")) == sorted(n for n in wanted["params"])
            assert group == {k: v for k, v in wanted.items() if k != "params"}
        found = full_state(model, optimizer)
        other = torch.optim.AdamW(split_decay(model), lr=7.0)
        other.param_groups[0]["weight_decay"] = 5.0
        other.load_state_dict(FSDP.optim_state_dict_to_load(model, other, found))
        assert [group["weight_decay"] for group in other.param_groups] == [0.3, 0.0]
        assert [group["lr"] for group in other.param_groups] == [0.02, 0.005]
        assert_state(full_state(model, other)["state"], found["state"])


@pytest.mark.parametrize("world_size", [1, 3])
def test_parameter_groups_keep_their_settings_and_missing_state_stays_missing(
    world_size: int,
) -> None:
    run_ranks(world_size, _groups_and_parts_without_state)


def _counts() -> None:
    for config in FEW_CONFIGS:
        model = shard(make_model(), config)
        optimizer = OPTIMIZERS["Adam"](model.parameters())
        train(model, optimizer, range(1))
        before = num_sent(model)
        found = full_state(model, optimizer)
        num_groups = len([group for group in model._runtime.groups if group.shard.ranks > 1])
        assert num_sent(model) - before == 3 * num_groups  # exp_avg, exp_avg_sq, max_exp_avg_sq
        before = num_sent(model)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            sharded = FSDP.optim_state_dict(model, optimizer)
        for state in (found, sharded):
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
        assert num_sent(model) == before
        assert_state(full_state(model, optimizer)["state"], found["state"])


def test_a_full_dict_takes_one_collective_per_group_and_state_others_none() -> None:
    run_ranks(2, _counts)


def _rank0_only(world_size: int) -> None:
    for config in FEW_CONFIGS[:2]:
        model = shard(make_model(), config)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        train(model, optimizer, range(2))
        everywhere = full_state(model, optimizer)
        found = full_state(model, optimizer, rank0_only=True, offload_to_cpu=True)
        if dist.get_rank() == 0:
            assert_state(found["state"], everywhere["state"])
            assert found["param_groups"] == everywhere["param_groups"]
        else:
            assert found == {}


def test_rank0_only_returns_the_state_on_rank_0() -> None:
    run_ranks(3, _rank0_only, 3)


def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all messages with states, noted as the first rank sends them."""
    sizes: list[int] = []
    send = Rank0Broadcast.send

    def noted(self: Rank0Broadcast, values: Sequence[Any], what: str) -> list[Tensor]:
        found = send(self, values, what)
        sizes.append(sum(tensor.nbytes for tensor in found))
        return found

    monkeypatch.setattr(Rank0Broadcast, "send", noted)
    return sizes


def assert_equal_states(found: Any, expected: Any) -> None:
    """What optimizer.load_state_dict takes, bit for bit, without a storage that is larger than its
    tensor."""
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == list(expected["state"])
    assert_state(found["state"], expected["state"])
    tensors = [
        v
        for entry in found["state"].values()
        for v in entry.values()
        if isinstance(v, Tensor) and v.numel()
    ]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def built_with_spare() -> nn.Module:
    model = make_model()
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    model.spare = Block()  # never runs
    return model


def _from_rank_0(world_size: int) -> None:
    configs = (*FEW_CONFIGS, ("HYBRID_SHARD", True, "blocks")) if world_size == 4 else FEW_CONFIGS
    # Every two of a number of ranks, an optimizer and a configuration are combined.
    kinds = ("AdamW", "Adagrad")
    for number, (strategy, use_orig_params, policy) in enumerate(configs):
        kind = kinds[(number + world_size // 2) % 2]
        options = (
            {"device_mesh": dist.init_device_mesh("cpu", (2, 2))}
            if strategy == "HYBRID_SHARD"
            else {}
        )
        model = FSDP(
            built_with_spare() if use_orig_params else make_model(),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
            auto_wrap_policy=ModuleWrapPolicy({Block})
            if policy == "blocks"
            else always_wrap_policy,
            **options,
        )
        optimizer = OPTIMIZERS[kind](_params(model, use_orig_params))
        train(model, optimizer, range(2))
        full: Any = full_state(model, optimizer, rank0_only=False)
        expected = FSDP.optim_state_dict_to_load(model, optimizer, full)
        alone = full if dist.get_rank() == 0 else None
        before = copy.deepcopy(full["state"])
        config = FullOptimStateDictConfig(rank0_only=True)
        with (
            pytest.MonkeyPatch.context() as monkeypatch,
            FSDP.state_dict_type(
                model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True), config
            ),
        ):
            sizes = sent_bytes(monkeypatch)
            for given in (alone, alone or {}):
                sizes.clear()
                assert_equal_states(
                    FSDP.optim_state_dict_to_load(model, optimizer, given), expected
                )
                groups = model._runtime.groups
                largest = max(group.store.numel * group.shard.ranks * 4 for group in groups)
                num_states = {"AdamW": 2, "Adagrad": 1}[kind]
                having = [
                    g for g in groups if any(name in full["state"] for name in names_in(model, g))
                ]
                assert len(sizes) == num_states * len(having) * (world_size > 1), (
                    "one message per (flat parameter, state)"
                )
                assert not sizes or max(sizes) <= largest
            sizes.clear()
            assert_equal_states(FSDP.optim_state_dict_to_load(model, optimizer, full), expected)
            assert not sizes, "where every rank has the dict nothing is sent"
            numbered = FSDP.rekey_optim_state_dict(
                full, OptimStateKeyType.PARAM_ID, *unwrapped_with(kind, use_orig_params)
            )
            numbered = numbered if dist.get_rank() == 0 else None
            by_number = FSDP.optim_state_dict_to_load(model, optimizer, numbered)
            assert_state(by_number["state"], expected["state"])
        assert_equal_states(
            FSDP.scatter_full_optim_state_dict(alone, model, optim=optimizer), expected
        )
        assert_state(full["state"], before)


def unwrapped_with(
    kind: str, use_orig_params: bool
) -> tuple[nn.Module, None, torch.optim.Optimizer]:
    plain = built_with_spare() if use_orig_params else make_model()
    return plain, None, OPTIMIZERS[kind](_params(plain, use_orig_params))


def names_in(model: FSDP, group: Any) -> list[str]:
    prefixes = {id(g): named.prefix for named in units_of(model) for g in named.unit.groups}
    return [prefixes[id(group)] + clean_name(member.name) for member in group.store.orig_params]


@pytest.mark.parametrize("world_size", sample([1, 2, 4], 1))
def test_rank_0_broadcasts_its_dict_one_group_at_a_time(world_size: int) -> None:
    run_ranks(world_size, _from_rank_0, world_size)


def _disjoint_groups() -> None:
    """Two models over two halves of the world: each has a first rank of its own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[dist.get_rank() // 2]
    model = FSDP(
        make_model(dist.get_rank() // 2),
        process_group=half,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    train(model, optimizer, range(1 + dist.get_rank() // 2))
    expected = FSDP.optim_state_dict_to_load(model, optimizer, full_state(model, optimizer))
    for group in (None, half):
        alone = FSDP.full_optim_state_dict(model, optimizer, group=group)
        assert bool(alone) is (dist.get_rank() in (0, 2))
        assert_equal_states(
            FSDP.scatter_full_optim_state_dict(alone or None, model, optim=optimizer, group=group),
            expected,
        )


def test_disjoint_process_groups_load_from_their_own_rank_0() -> None:
    run_ranks(4, _disjoint_groups)


def _units_over_some_ranks() -> None:
    """A part of the model that each half of the world has for itself: rank 0 does not have the
    other half's state."""
    halves = [dist.new_group([0]), dist.new_group([1])]
    model = make_model()
    model.blocks[0] = FSDP(model.blocks[0], process_group=halves[dist.get_rank()])
    model = FSDP(model)
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    train(model, optimizer, range(1))
    full = full_state(model, optimizer)
    FSDP.optim_state_dict_to_load(model, optimizer, full)
    with pytest.raises(UsageError, match="over different ranks") as caught:
        FSDP.scatter_full_optim_state_dict(
            full if dist.get_rank() == 0 else None, model, optim=optimizer
        )
    assert_four_facts(caught.value)


def test_units_over_different_ranks_do_not_load_from_one_rank() -> None:
    run_ranks(2, _units_over_some_ranks)


def _an_unmanaged_parameter() -> None:
    """A container with a parameter beside the wrapped model, and scalar states."""
    model = shard(make_model(), FEW_CONFIGS[0])
    container = nn.ModuleDict({"model": model, "plain": nn.Linear(2, 2)})
    optimizer = OPTIMIZERS["Adam"](container.parameters())
    (model(torch.tensor([1, 2])).sum() + container["plain"](torch.ones(2)).sum()).backward()
    optimizer.step()
    full = full_state(container, optimizer)
    full["state"]["plain.weight"].update(note="text", pair=[torch.ones(2), 3])
    full["state"]["model.embed.weight"].update(count=3, note="text")
    expected = FSDP.optim_state_dict_to_load(container, optimizer, full)
    alone = full if dist.get_rank() == 0 else None
    found = FSDP.scatter_full_optim_state_dict(alone, container, optim=optimizer)
    pairs = [
        entry.pop("pair")
        for its in (found, expected)
        for entry in its["state"].values()
        if "pair" in entry
    ]
    assert torch.equal(pairs[0][0], torch.ones(2))
    assert pairs[0][1] == 3
    assert len(pairs) == 2
    assert_equal_states(found, expected)


def test_rank_0_broadcasts_state_of_unmanaged_parameters() -> None:
    run_ranks(2, _an_unmanaged_parameter)


def _not_on_every_rank() -> None:
    model = shard(make_model(), FEW_CONFIGS[0])
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, range(1))
    state: Any = full_state(model, optimizer)
    mine = dist.get_rank() == 0

    def load(given: Any, rank0_only: bool) -> Any:
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
            return FSDP.optim_state_dict_to_load(model, optimizer, given)

    renamed = {**state, "state": {f"other.{name}": value for name, value in state["state"].items()}}
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = FSDP.optim_state_dict(model, optimizer)
    cases: tuple[tuple[Any, bool, type[FsdpCompatError], str], ...] = (
        (state if mine else None, False, UsageError, "on every rank"),
        (state if mine else {}, False, UsageError, "on every rank"),
        (None if mine else state, True, UsageError, "on the first rank"),
        (None, True, UsageError, "on the first rank"),
        (renamed if mine else None, True, CheckpointError, "other."),
        (renamed if mine else state, False, CheckpointError, "other."),
        (sharded if mine else None, True, CheckpointError, "cannot send a sharded"),
        ([1] if mine else state, True, FsdpCompatError, "not an optimizer state dict"),
    )
    for given, rank0_only, kind, text in cases:
        with pytest.raises(kind, match=text) as caught:
            load(given, rank0_only)
        assert_four_facts(caught.value)
    assert_equal_states(
        load(state if mine else None, True), load(state, False)
    )  # nothing is left behind


def test_a_dict_missing_or_refused_on_one_rank_is_refused_on_all() -> None:
    run_ranks(2, _not_on_every_rank)


def _ways_to_call(directory: str) -> None:
    model = shard(make_model(), FEW_CONFIGS[0])
    container = nn.ModuleDict({"model": model, "plain": nn.Linear(2, 2)})
    optimizer = OPTIMIZERS["Adam"](container.parameters())
    loss = model(torch.tensor([1, 2])).sum() + container["plain"](torch.ones(2)).sum()
    loss.backward()
    optimizer.step()
    found = FSDP.optim_state_dict(container, optimizer)
    assert_state(
        FSDP.optim_state_dict(container, optimizer, optimizer.state_dict())["state"], found["state"]
    )
    assert {"model.blocks.0.linear.weight", "plain.weight"} <= found["state"].keys()
    assert found["state"]["plain.weight"]["exp_avg"].shape == (2, 2)
    other = OPTIMIZERS["Adam"](container.parameters())
    answer = FSDP.optim_state_dict_to_load(
        model=container, optim=other, optim_state_dict=found, load_directly=True
    )
    assert_state(FSDP.optim_state_dict(container, other)["state"], found["state"])
    third = OPTIMIZERS["Adam"](container.parameters())
    third.load_state_dict(answer)
    assert_state(FSDP.optim_state_dict(container, third)["state"], found["state"])
    lr_changed = copy.deepcopy(optimizer.state_dict())
    lr_changed["param_groups"][0]["lr"] = 0.5
    assert FSDP.optim_state_dict(container, optimizer, lr_changed)["param_groups"][0]["lr"] == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_containers_given_dicts_and_load_directly_work(tmp_path: Path) -> None:
    run_ranks(2, _ways_to_call, str(tmp_path))


def _optimizer_of_a_part() -> None:
    model = shard(make_model(), ("FULL_SHARD", True, "blocks"))
    everything = OPTIMIZERS["Adam"](model.parameters())
    train(model, everything, range(2))
    full = full_state(model, everything)
    part = OPTIMIZERS["Adam"](model.module.blocks[1].parameters())
    part.load_state_dict(FSDP.optim_state_dict_to_load(model, part, full))
    found = full_state(model, part)
    assert_state(
        found["state"],
        {name: entry for name, entry in full["state"].items() if name.startswith("blocks.1.")},
    )


def test_an_optimizer_of_some_parameters_loads_their_part_of_a_dict() -> None:
    run_ranks(2, _optimizer_of_a_part)


# --- to another sharding --------------------------------------------------------------------------


def _params(model: nn.Module, groups: bool) -> Any:
    return split_decay(model) if groups else model.parameters()


def _save(
    path: str, form: str, kind: str, config: Config, groups: bool
) -> tuple[dict[str, Any], list[float]]:
    model = shard(make_model(1), config)
    optimizer = OPTIMIZERS[kind](_params(model, groups))
    train(model, optimizer, range(2))
    if form == "full":
        full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        optim = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full, optim):
            state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        if dist.get_rank() == 0:
            torch.save(state, path)
    else:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=path)
    return full_state(model, optimizer), train(model, optimizer, range(2, 4))


def _load(
    path: str,
    form: str,
    kind: str,
    config: Config,
    groups: bool,
    expected: dict[str, Any],
    losses: list[float],
) -> None:
    model = shard(make_model(2), config)
    optimizer = OPTIMIZERS[kind](_params(model, groups))
    if form == "full":
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))
    else:
        create_optimizer_state(optimizer)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(
                FSDP.optim_state_dict_to_load(model, optimizer, state["optim"])
            )
    found = full_state(model, optimizer)
    assert_state(found["state"], expected["state"])
    settings = [
        {k: v for k, v in group.items() if k != "params"} for group in found["param_groups"]
    ]
    assert settings == [
        {k: v for k, v in group.items() if k != "params"} for group in expected["param_groups"]
    ]
    assert train(model, optimizer, range(2, 4)) == pytest.approx(losses, rel=1e-6)
    steps = [value["step"] for p, value in optimizer.state.items() if "step" in value and p.numel()]
    assert len({id(step) for step in steps}) == len(steps)
    assert all(step.item() == 4 for step in steps), "every parameter has a count of its own"


SPREAD: tuple[tuple[str, int, Config, tuple[tuple[int, Config], ...]], ...] = (
    ("Adam", 1, FEW_CONFIGS[1], ((2, FEW_CONFIGS[0]), (3, FEW_CONFIGS[2]))),
    ("AdamW", 4, FEW_CONFIGS[0], ((1, FEW_CONFIGS[2]), (3, FEW_CONFIGS[1]))),
    ("SGD", 3, FEW_CONFIGS[2], ((2, FEW_CONFIGS[2]), (1, FEW_CONFIGS[0]))),
    ("Adagrad", 2, FEW_CONFIGS[3], ((3, FEW_CONFIGS[0]),)),
)


@each_value
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize(
    ("kind", "writers", "saved", "targets"), SPREAD, ids=[kind for kind, *_ in SPREAD]
)
def test_a_resumed_run_has_the_same_state_and_goes_on_with_the_same_losses(
    form: str,
    kind: str,
    writers: int,
    saved: Config,
    targets: tuple[tuple[int, Config], ...],
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "checkpoint")
    expected, losses = run_ranks(writers, _save, path, form, kind, saved, False)[0]
    for readers, config in targets:
        run_ranks(readers, _load, path, form, kind, config, False, expected, losses)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_several_parameter_groups_are_resumed(form: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    expected, losses = run_ranks(
        3, _save, path, form, "AdamW", ("FULL_SHARD", True, "blocks"), True
    )[0]
    for readers, policy in ((2, "none"), (1, "always")):
        run_ranks(
            readers,
            _load,
            path,
            form,
            "AdamW",
            ("SHARD_GRAD_OP", True, policy),
            True,
            expected,
            losses,
        )


def _into_the_unsharded(path: str) -> None:
    plain = make_model()
    saved = torch.load(path, weights_only=True)
    plain.load_state_dict(saved["model"])
    optimizer = OPTIMIZERS["AdamW"](plain.parameters())
    numbers = {name: number for number, (name, _) in enumerate(plain.named_parameters())}
    state = {numbers[name]: value for name, value in saved["optim"]["state"].items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    assert_state(by_name(plain, optimizer)["state"], saved["optim"]["state"])


def test_the_full_form_fits_the_unsharded_optimizer(tmp_path: Path) -> None:
    path = str(tmp_path / "full.pt")
    run_ranks(2, _save, path, "full", "AdamW", FEW_CONFIGS[0], False)
    _into_the_unsharded(path)


# --- torch's FSDP1 --------------------------------------------------------------------------------


def _like_torch(kind: str, use_orig_params: bool, directory: str) -> None:
    theirs = TorchFSDP(
        make_model(0, odd=False),
        auto_wrap_policy=TorchWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    ours = shard(make_model(0, odd=False), ("FULL_SHARD", use_orig_params, "blocks"))
    their_optimizer, optimizer = (
        OPTIMIZERS[kind](theirs.parameters()),
        OPTIMIZERS[kind](ours.parameters()),
    )
    train(theirs, their_optimizer, range(2))
    train(ours, optimizer, range(2))
    full = (
        TorchFullConfig(offload_to_cpu=False),
        TorchFullOptimConfig(offload_to_cpu=False, rank0_only=False),
    )
    with TorchFSDP.state_dict_type(theirs, TorchType.FULL_STATE_DICT, *full):
        expected = TorchFSDP.optim_state_dict(theirs, their_optimizer)
    found = full_state(ours, optimizer)
    assert found.keys() == expected.keys()
    if not use_orig_params:  # otherwise torch sorts by name
        assert list(found["state"]) == list(expected["state"])
    assert_state(found["state"], expected["state"], tolerance=1e-5)
    assert found["param_groups"] == expected["param_groups"]

    doubled = {
        name: {key: value * 2 for key, value in entry.items()}
        for name, entry in expected["state"].items()
    }
    other = OPTIMIZERS[kind](ours.parameters())
    for state in (
        expected["state"],
        doubled,
    ):  # torch's own, in which names may share a step, and one of other values
        other.load_state_dict(
            FSDP.optim_state_dict_to_load(ours, other, {**expected, "state": state})
        )
        assert_state(full_state(ours, other)["state"], state)

    with TorchFSDP.state_dict_type(theirs, TorchType.FULL_STATE_DICT, *full):
        loadable = TorchFSDP.optim_state_dict_to_load(theirs, their_optimizer, found)
        their_optimizer.load_state_dict(loadable)
    assert train(theirs, their_optimizer, range(2, 4)) == pytest.approx(
        train(ours, optimizer, range(2, 4)), rel=1e-5
    )

    path = f"{directory}/{kind}-{use_orig_params}"
    with TorchFSDP.state_dict_type(theirs, TorchType.SHARDED_STATE_DICT):
        dcp.save({"optim": TorchFSDP.optim_state_dict(theirs, their_optimizer)}, checkpoint_id=path)
    create_optimizer_state(other)
    with FSDP.state_dict_type(ours, StateDictType.SHARDED_STATE_DICT):
        state = {"optim": FSDP.optim_state_dict(ours, other)}
        dcp.load(state, checkpoint_id=path)
        other.load_state_dict(FSDP.optim_state_dict_to_load(ours, other, state["optim"]))
    assert_state(
        full_state(ours, other)["state"], full_state(ours, optimizer)["state"], tolerance=1e-4
    )
    assert train(theirs, their_optimizer, range(4, 6)) == pytest.approx(
        train(ours, other, range(4, 6)), rel=1e-5
    )


@pytest.mark.parametrize("use_orig_params", sample([False, True], 0))
def test_optimizer_dicts_equal_torchs_and_load_both_ways(
    use_orig_params: bool, tmp_path: Path
) -> None:
    for kind in ("AdamW", "Adagrad") if use_orig_params else ("Adam", "SGD"):
        run_ranks(2, _like_torch, kind, use_orig_params, str(tmp_path))


def _dtensors(use_orig_params: bool, directory: str) -> None:
    """Of a model that was given a mesh: with 4 ranks a hybrid one."""
    hybrid = dist.get_world_size() == 4
    mesh = dist.init_device_mesh("cpu", (2, 2) if hybrid else (dist.get_world_size(),))
    strategy = "HYBRID_SHARD" if hybrid else "FULL_SHARD"
    options: dict[str, Any] = {"use_orig_params": use_orig_params, "device_mesh": mesh}
    theirs = TorchFSDP(
        make_model(0, odd=False),
        auto_wrap_policy=TorchWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        sharding_strategy=TorchStrategy[strategy],
        **options,
    )
    ours = FSDP(
        make_model(0, odd=False),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        **options,
    )
    their_optimizer, optimizer = (
        OPTIMIZERS["Adam"](theirs.parameters()),
        OPTIMIZERS["Adam"](ours.parameters()),
    )
    train(theirs, their_optimizer, range(2))
    train(ours, optimizer, range(2))
    with TorchFSDP.state_dict_type(theirs, TorchType.SHARDED_STATE_DICT):
        expected = TorchFSDP.optim_state_dict(theirs, their_optimizer)
    before = num_sent(ours)
    with FSDP.state_dict_type(ours, StateDictType.SHARDED_STATE_DICT):
        found = FSDP.optim_state_dict(ours, optimizer)
    assert num_sent(ours) - before == 3 * len(ours._runtime.groups)
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for name, entry in expected["state"].items():
        assert found["state"][name].keys() == entry.keys()
        for key, value in entry.items():
            one = found["state"][name][key]
            assert type(one) is type(value), f"{key} of {name}"
            if isinstance(value, DTensor):
                assert one.placements == value.placements
                assert one.device_mesh == value.device_mesh
                one, value = one.to_local(), value.to_local()
                assert one.untyped_storage().nbytes() == one.nbytes
            torch.testing.assert_close(one, value, rtol=1e-5, atol=1e-5)
    full = full_state(ours, optimizer)
    path = f"{directory}/{use_orig_params}"
    dcp.save({"optim": found}, checkpoint_id=path)
    other = OPTIMIZERS["Adam"](ours.parameters())
    create_optimizer_state(other)
    with FSDP.state_dict_type(ours, StateDictType.SHARDED_STATE_DICT):
        template = FSDP.optim_state_dict(ours, other)
        dcp.load({"optim": template}, checkpoint_id=path)
    for state in (template, found):
        other.load_state_dict(FSDP.optim_state_dict_to_load(ours, other, state))
        assert_state(full_state(ours, other)["state"], full["state"])
    with TorchFSDP.state_dict_type(theirs, TorchType.SHARDED_STATE_DICT):  # and torch reads ours
        their_optimizer.load_state_dict(
            TorchFSDP.optim_state_dict_to_load(theirs, their_optimizer, found)
        )
    assert train(theirs, their_optimizer, range(2, 4)) == pytest.approx(
        train(ours, optimizer, range(2, 4)), rel=1e-5
    )


@pytest.mark.parametrize(("world_size", "use_orig_params"), [(2, False), (4, True)])
def test_with_a_mesh_the_sharded_form_is_torchs_dtensors(
    world_size: int, use_orig_params: bool, tmp_path: Path
) -> None:
    run_ranks(world_size, _dtensors, use_orig_params, str(tmp_path))


def _torchs_shared_steps() -> None:
    """A dict in which, as in torch's of a flat parameter, all names share one step."""
    model = shard(make_model(), FEW_CONFIGS[1])
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, range(2))
    state = full_state(model, optimizer)
    step = torch.tensor(2.0)
    for entry in state["state"].values():
        entry["step"] = step
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    train(model, optimizer, range(2, 3))
    assert {value["step"].item() for p, value in optimizer.state.items() if p.numel()} == {3.0}
    assert step.item() == 2.0


def test_a_step_that_is_shared_in_the_dict_is_separate_once_loaded() -> None:
    run_ranks(2, _torchs_shared_steps)


# --- what cannot be loaded ------------------------------------------------------------------------


def _refusals() -> None:
    for config in FEW_CONFIGS[:2]:
        model = shard(make_model(), config)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        train(model, optimizer, range(1))
        good = full_state(model, optimizer)
        renamed = {
            **good,
            "state": {f"other.{name}": value for name, value in good["state"].items()},
        }
        with pytest.raises(CheckpointError) as caught:
            FSDP.optim_state_dict_to_load(model, optimizer, renamed)
        assert_four_facts(caught.value)
        assert "other." in str(caught.value)
        misshapen = copy.deepcopy(good)
        misshapen["state"]["blocks.0.linear.weight"]["exp_avg"] = torch.zeros(5, 4)
        with pytest.raises(CheckpointError) as caught:
            FSDP.optim_state_dict_to_load(model, optimizer, misshapen)
        assert_four_facts(caught.value)
        assert "blocks.0.linear.weight" in str(caught.value)
        for wrong in ({}, {"param_groups": []}, [1], "text"):
            with pytest.raises(UsageError) as caught_usage:
                FSDP.optim_state_dict_to_load(model, optimizer, wrong)  # type: ignore[arg-type]
            assert_four_facts(caught_usage.value)
        with pytest.raises(FsdpCompatError) as caught_order:
            FSDP.optim_state_dict_to_load(good, model, optimizer)  # type: ignore[arg-type]
        assert_four_facts(caught_order.value)
        with pytest.raises(FsdpCompatError) as caught_numbers:
            FSDP.optim_state_dict_to_load(model, optimizer, optimizer.state_dict())
        assert_four_facts(caught_numbers.value)
        assert_state(full_state(model, optimizer)["state"], good["state"])
        dist.barrier()


def test_a_dict_that_does_not_fit_is_refused_on_every_rank_and_nothing_changes() -> None:
    run_ranks(2, _refusals)
