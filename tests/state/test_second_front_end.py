"""Saving, loading and resharding work on any front end that registers its units: here one that cuts
parameters by rows, beside the flat one, through the same functions.

Every value is compared bit for bit with an unsharded model that trained on the same batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType, checkpoint
from fsdp_compat._state.forms import state_dict_type
from fsdp_compat._state.optim_calls import optim_state_dict, optim_state_dict_to_load
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.ranks import run_ranks
from tests.support.row_front_end import shard_rows
from tests.support.sampling import sample

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(WIDTH, 7),
            nn.BatchNorm1d(7),
            nn.Linear(7, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).tanh())


class Model(nn.Module):
    """Sizes that no number of ranks divides, a tie, a scalar, an empty parameter, and buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem, self.blocks = nn.Linear(5, WIDTH), nn.Sequential(Block(), Block())
        self.gain, self.nothing = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(0, 3))
        self.head = nn.Linear(WIDTH, 5)
        self.head_again = self.head
        self.register_buffer("count", torch.randint(99, (2,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)) * self.gain) + self.nothing.sum()


def sharded(front_end: str, model: nn.Module) -> nn.Module:
    if front_end == "rows":
        return shard_rows(model, [Block])
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=front_end == "original",
        device_id=torch.device("cpu"),
    )


def made(front_end: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model, and an optimizer of it that has state of two steps."""
    model = sharded(front_end, Model(seed))
    return model, stepped(model)


def stepped(model: nn.Module, as_on_ranks: int = 1) -> torch.optim.Optimizer:
    """Train two steps, with the same batch on every rank. as_on_ranks: round the gradients of an
    unsharded model as the mean over so many ranks rounds them."""
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for step in range(2):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        (model(batch) ** 2).sum().backward()
        for parameter in model.parameters() if as_on_ranks > 1 else ():
            assert parameter.grad is not None
            own = parameter.grad.clone()
            for _ in range(as_on_ranks - 1):
                parameter.grad += own
            parameter.grad /= as_on_ranks
        optim.step()
        optim.zero_grad()
    return optim


def reference(seed: int, ranks: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the state dict of an unsharded model that has trained like one on ``ranks`` ranks, and
    its optimizer's state by names."""
    model = Model(seed)
    optim = stepped(model, ranks)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return model.state_dict(), {names[p]: dict(entry) for p, entry in optim.state.items()}


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name


def full_states(
    model: nn.Module, optim: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the full state dict of a model and its optimizer's state by names. Collective."""
    with state_dict_type(model, FULL):
        return model.state_dict(), optim_state_dict(model, optim)["state"]


def require_reference(
    model: nn.Module, optim: torch.optim.Optimizer, seed: int, ranks: int | None = None
) -> None:
    """Compare a model and its optimizer with what ``reference`` trains. Collective."""
    weights, states = full_states(model, optim)
    wanted_weights, wanted_states = reference(seed, ranks or dist.get_world_size())
    assert_equal(weights, wanted_weights)
    assert states.keys() == wanted_states.keys()
    for name, entry in wanted_states.items():
        assert_equal(states[name], entry)


def load_full(model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
    """Load what an unsharded model and its optimizer have, as any rank may have it."""
    weights, states = reference(seed, dist.get_world_size())
    with state_dict_type(model, FULL):
        model.load_state_dict(weights)
        groups = [{**optim.param_groups[0], "params": list(states)}]
        loadable = optim_state_dict_to_load(model, optim, {"state": states, "param_groups": groups})
        optim.load_state_dict(loadable)


def full_round_trip(front_end: str) -> None:
    model, optim = made(front_end, seed=1)
    require_reference(model, optim, seed=1)
    load_full(model, optim, seed=2)
    require_reference(model, optim, seed=2)


def save_sharded(front_end: str, path: str) -> None:
    model, optim = made(front_end, seed=1)
    with state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optim": optim_state_dict(model, optim)}
    for kind in ("model", "optim"):
        assert not isinstance(state[kind], Tensor)
    dcp.save(state, checkpoint_id=path)


def load_sharded(front_end: str, path: str, ranks: int) -> None:
    model, optim = made(front_end, seed=2)
    with state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optim": optim_state_dict(model, optim)}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        optim.load_state_dict(optim_state_dict_to_load(model, optim, state["optim"]))
    require_reference(model, optim, seed=1, ranks=ranks)


def exchange_in_memory(source: str, target: str) -> None:
    """Load the sharded state dicts of one front end into the other, which cuts differently."""
    model, optim = made(source, seed=1)
    other, other_optim = made(target, seed=2)
    with state_dict_type(model, SHARDED):
        weights, states = model.state_dict(), optim_state_dict(model, optim)
    with state_dict_type(other, SHARDED):
        other.load_state_dict(weights)
        loadable = optim_state_dict_to_load(other, other_optim, states)
    other_optim.load_state_dict(loadable)
    require_reference(other, other_optim, seed=1)


def save_native(front_end: str, path: str) -> str:
    model, optim = made(front_end, seed=1)
    saved = checkpoint.save(path, model, optim, extra={"epoch": 3}, step=7)
    require_reference(model, optim, seed=1)
    return str(saved)


def load_native(front_end: str, path: str, ranks: int) -> None:
    model, optim = made(front_end, seed=2)
    assert checkpoint.load(path, model, optim) == {"epoch": 3}
    require_reference(model, optim, seed=1, ranks=ranks)


def local_round_trip() -> None:
    model, _ = made("rows", seed=1)
    with state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        saved = copy.deepcopy(model.state_dict())
        other, _ = made("rows", seed=2)
        with state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
            other.load_state_dict(saved)
    with state_dict_type(other, FULL):
        assert_equal(other.state_dict(), reference(1, 2)[0])


def streamed_weights() -> None:
    model, _ = made("rows", seed=1)
    streamed = dict(checkpoint.iter_full_state_dict(model))
    wanted = reference(1, 2)[0]
    assert streamed.keys() == wanted.keys()
    assert all(torch.equal(streamed[name], value) for name, value in wanted.items())


def safetensors_round_trip(path: str) -> None:
    model, _ = made("rows", seed=1)
    checkpoint.save_safetensors(path, model)
    other = sharded("flat", Model(2))
    checkpoint.load_safetensors(path, other)
    with state_dict_type(other, FULL):
        assert_equal(other.state_dict(), reference(1, 2)[0])


@pytest.mark.parametrize("ranks", sample([1, 2, 3], 2))
def test_full_states_equal_those_of_an_unsharded_model(ranks: int) -> None:
    run_ranks(ranks, full_round_trip, "rows")


@pytest.mark.parametrize(
    ("save_ranks", "load_ranks", "source", "target"),
    sample(
        [
            (2, 3, "rows", "rows"),
            (3, 1, "rows", "rows"),
            (1, 2, "rows", "flat"),
            (3, 2, "flat", "rows"),
        ],
        0,
        2,
        3,
    ),
)
def test_sharded_state_dicts_load_on_any_number_of_ranks(
    save_ranks: int, load_ranks: int, source: str, target: str, tmp_path: Path
) -> None:
    run_ranks(save_ranks, save_sharded, source, str(tmp_path))
    run_ranks(load_ranks, load_sharded, target, str(tmp_path), save_ranks)


@pytest.mark.parametrize(("source", "target"), [("rows", "original"), ("flat", "rows")])
def test_sharded_state_dicts_load_in_memory_across_front_ends(source: str, target: str) -> None:
    run_ranks(2, exchange_in_memory, source, target)


@pytest.mark.parametrize(
    ("save_ranks", "load_ranks", "source", "target"),
    sample(
        [
            (2, 3, "rows", "rows"),
            (3, 1, "rows", "rows"),
            (1, 2, "rows", "rows"),
            (2, 2, "rows", "flat"),
            (3, 2, "rows", "original"),
            (2, 3, "flat", "rows"),
        ],
        1,
        3,
        4,
        5,
    ),
)
def test_native_checkpoints_load_on_any_number_of_ranks_and_across_front_ends(
    save_ranks: int, load_ranks: int, source: str, target: str, tmp_path: Path
) -> None:
    saved = run_ranks(save_ranks, save_native, source, str(tmp_path))
    run_ranks(load_ranks, load_native, target, saved[0], save_ranks)


def test_local_state_dicts_load_on_the_same_number_of_ranks() -> None:
    run_ranks(2, local_round_trip)


def test_a_full_state_dict_is_streamed_unit_by_unit() -> None:
    run_ranks(2, streamed_weights)


def test_safetensors_written_by_rows_load_in_the_flat_front_end(tmp_path: Path) -> None:
    run_ranks(2, safetensors_round_trip, str(tmp_path / "weights"))
