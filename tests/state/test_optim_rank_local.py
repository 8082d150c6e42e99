"""Optimizer state that is neither a number nor of its parameter's shape: always saved, restored
bit-equal at an equal layout, and refused, before anything changes, at another."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import optim
from fsdp_compat.errors import CheckpointError, StateError
from tests.support.odd_model import (
    Config,
    assert_same,
    by_rank,
    make_model,
    shard,
    train,
)
from tests.support.optimizer_state import (
    OPTIMIZERS,
    NeedsClosure,
    TakesAsItIs,
    Trained,
    from_rank0,
    full_state,
    loadable,
    refuses,
    sharded_state,
    trained,
)
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import sample


class History:
    """What an optimizer may keep: an object that nobody else knows."""

    def __init__(self, mean: Tensor) -> None:
        self.means = [mean.expand(8).contiguous()[3]]  # of a storage that is larger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self.means == other.means


class Blocks(TakesAsItIs):
    """SGD that keeps gradients in 8 bits, with scales, and all sorts of other things."""

    def __init__(self, params: Any, own: Callable[[Tensor], dict[str, Any]] | None = None) -> None:
        super().__init__(params, lr=0.1)
        self.own = own or (lambda p: {})  # not in state_dict(): what else it keeps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(step=0, kind="8 bit", nothing=None, history=History(p.sum()))
                state["nested"] = {"seen": [p.sum().clone()], "rank": rank()}
                state.update(self.own(p))
            state["step"] += 1
            state["codes"] = (p.grad.abs() * 255).clamp(max=255).to(torch.uint8)
            blocks = torch.zeros(-(-p.numel() // 4) * 4)
            blocks[: p.numel()] = p.grad.reshape(-1).abs()
            state["scales"] = blocks.view(-1, 4).amax(1) if p.numel() else torch.zeros(0)
            state["history"].means.append(p.grad.sum())
            p.sub_(p.grad, alpha=0.1)


rank = dist.get_rank
RANK_LOCAL = ("scales", "history", "nested")
CONFIGS: tuple[Config, ...] = (
    ("FULL_SHARD", False, "blocks"),
    ("FULL_SHARD", True, "always"),
    ("NO_SHARD", True, "none"),
)


def in_config(config: Config, make: Any = Blocks, seed: int = 0, odd: bool = True) -> Trained:
    return trained(shard(make_model(seed, odd), config, ignored_modules=[]), make)


def states_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Of the parameters that this rank has a part of."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
    return [dict(optimizer.state[p]) for p in parameters if p in optimizer.state]


def assert_same_states(
    optimizer: torch.optim.Optimizer, expected: list[Any], what: str = ""
) -> None:
    assert_same(dict(enumerate(states_of(optimizer))), dict(enumerate(expected)), what)


def rank_keys(state: dict[str, Any]) -> set[tuple[str, str]]:
    return {(name, key) for name, entry in state["state"].items() for key in entry if "@" in key}


def clean(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = model.named_parameters()
    return [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in named if p.requires_grad]


def tensors_in(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from tensors_in(vars(leaf))


# --- what is what ---------------------------------------------------------------------------------


class Sub(torch.Tensor):
    """A subclass that is a tensor like any other."""


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_a_state_is_local_to_a_rank_by_type_and_shape() -> None:
    model = FSDP(nn.ParameterList([torch.zeros(9, 2), torch.zeros(2)]), use_orig_params=True)
    optimizer = TakesAsItIs(model.parameters(), lr=0.1)
    for p in model.parameters():
        zeros = torch.zeros_like(p)
        whole = {"int": 1, "bool": True, "text": "a", "none": None, "count": torch.tensor(3)}
        parts = {
            **{"zeros": zeros, "bytes": zeros.to(torch.uint8)},
            "named": zeros.as_subclass(Sub),
        }
        own = {
            **{"few": zeros[:1].clone(), "column": zeros.reshape(-1, 1), "list": []},
            **{"pair": (1, 2), "sparse": zeros.to_sparse(), "object": History(torch.ones(()))},
            # of one parameter it has the shape by chance
            "scales": torch.zeros(-(-p.numel() // 4)),
        }
        optimizer.state[p] = {**whole, **parts, **own}
    local = {key.partition("@")[0] for _, key in rank_keys(full_state(model, optimizer))}
    assert local == {"few", "column", "list", "pair", "sparse", "object", "scales"}


# --- saved and restored ---------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", sample([1, 3], 1))
@on_ranks("world_size")
def test_every_state_is_restored_bit_equal_at_an_equal_layout(
    world_size: int, tmp_path: Path
) -> None:
    for number, config in enumerate(CONFIGS):
        # Whole parameters: every rank has the same state, as with DistributedDataParallel, under
        # the optimizer's own keys.
        whole = config[1] and (config[0] == "NO_SHARD" or dist.get_world_size() == 1)
        same = functools.partial(
            Blocks, own=lambda p: {"nested": {"seen": [p.sum().clone()], "rank": 0}}
        )
        model, optimizer = in_config(config, same if whole else Blocks)
        expected = copy.deepcopy(states_of(optimizer))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            full, boxes = full_state(model, optimizer), sharded_state(model, optimizer)
        train(model, optimizer, range(2, 4))  # what was taken does not change
        own, everyones = zip(*by_rank((rank_keys(boxes), rank_keys(full))), strict=True)
        assert sum(map(len, own)) == len(set.union(*own)), "no two ranks share a key"
        assert bool(own[0]) is not whole
        if not whole:
            assert set.union(*own) == everyones[rank()]
        for entry in (*full["state"].values(), *boxes["state"].values()):
            for t in tensors_in([value for key, value in entry.items() if "@" in key]):
                assert t.untyped_storage().nbytes() == t.nbytes, "compact copies"
        dcp.save({"optim": boxes}, checkpoint_id=f"{tmp_path}/{number}")
        for form in ("full", "rank 0", "dcp"):
            other, state = Blocks(model.parameters()), copy.deepcopy(full)
            if form == "dcp":
                state = sharded_state(model, other)
                dcp.load({"optim": state}, checkpoint_id=f"{tmp_path}/{number}")
            load = from_rank0 if form == "rank 0" else loadable
            other.load_state_dict(load(model, other, state))
            assert_same_states(other, expected, f"{config} {form}")


@on_ranks(4)
def test_replicas_load_the_state_of_the_same_part() -> None:
    model = shard(make_model(), ("HYBRID_SHARD", False, "none"), ignored_modules=[])
    optimizer = trained(model, Blocks)[1]
    expected = copy.deepcopy(states_of(optimizer))
    full = full_state(model, optimizer, rank0_only=True)
    # the replicas' parts are equal, so their states are: those of the first copy stand for all
    for entry in expected:
        entry["nested"]["rank"] %= 2
    if rank() == 0:
        assert len(rank_keys(full)) == len(RANK_LOCAL) * 2 * 2  # dtypes, parts
    optimizer.load_state_dict(from_rank0(model, optimizer, full))
    assert_same_states(optimizer, expected)


@on_ranks(2)
def test_scalars_that_differ_and_objects_that_cannot_be_pickled_stay_on_their_ranks() -> None:
    own = functools.partial(
        Blocks, own=lambda p: {"norm": float(rank()), "same": 2.0, "lock": threading.Lock()}
    )
    model, optimizer = in_config(CONFIGS[1], own)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        full = full_state(model, optimizer)
    assert any("cannot be pickled" in str(warning.message) for warning in caught)
    assert {key for _, key in rank_keys(full) if key.startswith("lock")} == {f"lock@rank{rank()}"}
    parts = by_rank({name for name, p in clean(model) if p.numel()})
    assert parts[0] & parts[1] and parts[0] ^ parts[1]
    for name, entry in full["state"].items():
        assert entry["same"] == 2.0
        having = [r for r in range(2) if name in parts[r]]
        norms = {key: value for key, value in entry.items() if key.startswith("norm")}
        if len(having) == 2:
            assert norms.keys() == {"norm@rank0", "norm@rank1"}, name
        elif having:
            assert norms == {"norm": float(having[0])}, name
    other = Blocks(model.parameters())
    other.load_state_dict(loadable(model, other, full))
    assert {state["norm"] for state in states_of(other)} == {float(rank())}


# --- elsewhere ------------------------------------------------------------------------------------


def _saved(path: str, config: Config) -> None:
    state = full_state(*in_config(config), rank0_only=True, offload_to_cpu=True)
    if rank() == 0:
        torch.save(state, path)


def _refused_elsewhere(path: str, config: Config) -> None:
    model, optimizer = in_config(config, seed=3)
    before = copy.deepcopy(states_of(optimizer))
    state = torch.load(path, weights_only=False)
    for load in (loadable, from_rank0):
        with refuses(CheckpointError) as caught:
            load(model, optimizer, state)
        assert any(key in str(caught.value) for key in RANK_LOCAL)
        assert any(name in str(caught.value) for name, _ in make_model().named_parameters())
    assert_same_states(optimizer, before)
    for name, key in rank_keys(state):
        del state["state"][name][key]
    loadable(model, optimizer, state)  # the rest is resharded


def test_another_layout_refuses_and_names_rank_local_state(tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    run_ranks(2, _saved, path, CONFIGS[1])
    run_ranks(3, _refused_elsewhere, path, CONFIGS[1])
    run_ranks(2, _refused_elsewhere, path, ("FULL_SHARD", False, "none"))


# --- said beforehand ------------------------------------------------------------------------------


@on_ranks(2)
def test_a_check_works_before_training_and_changes_nothing() -> None:
    names = [name for name, _ in clean(make_model())]
    for config in CONFIGS[1:]:
        model = shard(make_model(), config, ignored_modules=[])
        for make in OPTIMIZERS.values():
            assert optim.check(model, make(model.parameters())) == []
        optimizer = Blocks(model.parameters())
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it puts a step of its own on the optimizer
        optimizer.register_step_pre_hook(lambda *_: pytest.fail("hooks see real steps only"))
        before, seed = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
        found = optim.check(model, optimizer)
        assert set(found) == {f"{name}.{key}" for name in names for key in RANK_LOCAL}
        assert not optimizer.state
        assert torch.equal(torch.get_rng_state(), seed)
        assert all(map(torch.equal, model.parameters(), before))
        assert all(p.grad is None for p in model.parameters())
        with refuses(StateError, "no closure"):
            optim.check(model, NeedsClosure(model.parameters()))
        optimizer = Blocks(model.parameters())
        train(model, optimizer, range(1))
        assert sorted(optim.check(model, optimizer)) == sorted(found)
