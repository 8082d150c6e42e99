"""What a load reads into: the state of an optimizer that has made no step, as its first step would
make it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.state.test_optim import (
    OPTIMIZERS,
    Block,
    Config,
    assert_state,
    full_state,
    make_model,
    shard,
    split_decay,
    train,
)
from tests.state.test_optim_named import Named
from tests.support.ranks import run_ranks
from tests.support.sampling import sample

SHARDED = StateDictType.SHARDED_STATE_DICT


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate's, whose attributes no copy can be made of."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.secret = dist.group.WORLD

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pytest.fail("it is asked for its state, not for a step")


def _saved(directory: str, kind: str, config: Config) -> tuple[dict[str, Any], list[float]]:
    model = shard(make_model(1), config)
    optimizer = OPTIMIZERS[kind](split_decay(model) if config[1] else model.parameters())
    train(model, optimizer, range(3))
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=directory)
    return full_state(model, optimizer), train(model, optimizer, range(3, 5))


def _resumed(
    directory: str, kind: str, config: Config, expected: dict[str, Any], losses: list[float]
) -> None:
    model = shard(make_model(2), config)
    optimizer = OPTIMIZERS[kind](split_decay(model) if config[1] else model.parameters())
    prepared = Wrapper(optimizer)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("no step is made"))
    before = [p.detach().clone() for p in model.parameters()]
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, prepared)}
        assert kind == "Adagrad" or not optimizer.state
        assert all(
            p.grad is None and torch.equal(p, b)
            for p, b in zip(model.parameters(), before, strict=True)
        )
        assert all(entry.get("step", 0) == 0 for entry in state["optim"]["state"].values())
        dcp.load(state, checkpoint_id=directory)
        model.load_state_dict(state["model"])
        prepared.load_state_dict(FSDP.optim_state_dict_to_load(model, prepared, state["optim"]))
    assert_state(full_state(model, optimizer)["state"], expected["state"])
    optimizer._optimizer_step_pre_hooks.clear()
    assert train(model, optimizer, range(3, 5)) == pytest.approx(losses, rel=1e-6)


FLAT: Config = ("FULL_SHARD", False, "blocks")
ORIGINAL: Config = ("FULL_SHARD", True, "always")


@pytest.mark.parametrize(
    ("kind", "writers", "saved", "readers", "target"),
    sample(
        [
            ("AdamW", 2, FLAT, 3, ("SHARD_GRAD_OP", False, "none")),
            ("Adam", 3, ORIGINAL, 2, ORIGINAL),
            ("SGD", 1, FLAT, 2, FLAT),
        ],
        0,
        1,
    ),
)
def test_a_sharded_checkpoint_is_resumed_by_an_optimizer_without_state(
    kind: str, writers: int, saved: Config, readers: int, target: Config, tmp_path: Path
) -> None:
    expected, losses = run_ranks(writers, _saved, str(tmp_path), kind, saved)[0]
    run_ranks(readers, _resumed, str(tmp_path), kind, target, expected, losses)


def _dtensors(directory: str) -> None:
    def build(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        model = FSDP(
            make_model(seed, odd=False),
            device_mesh=mesh,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
        )
        return model, OPTIMIZERS["Adam"](model.parameters())

    model, optimizer = build(1)
    train(model, optimizer, range(2))
    with FSDP.state_dict_type(model, SHARDED):
        dcp.save({"optim": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=directory)
    other_model, other = build(2)
    with FSDP.state_dict_type(other_model, SHARDED):
        state = {"optim": FSDP.optim_state_dict(other_model, other)}
        dcp.load(state, checkpoint_id=directory)
        other.load_state_dict(FSDP.optim_state_dict_to_load(other_model, other, state["optim"]))
    assert_state(full_state(other_model, other)["state"], full_state(model, optimizer)["state"])


def test_an_optimizer_without_state_resumes_from_dtensors(tmp_path: Path) -> None:
    run_ranks(2, _dtensors, str(tmp_path))


class KeepsMasters(torch.optim.SGD):
    """Keeps a copy of what it trains, and a number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if not self.state[p]:
                self.state[p].update(master=p.detach().clone(), rounds=3)
            self.state[p]["master"].sub_(p.grad, alpha=0.1)
            p.copy_(self.state[p]["master"])


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("no closure")


def _first_entries() -> None:
    model = shard(make_model(), ORIGINAL)
    with FSDP.state_dict_type(model, SHARDED):
        masters = FSDP.optim_state_dict(model, KeepsMasters(model.parameters(), weight_decay=0.5))[
            "state"
        ]
        by_names = FSDP.optim_state_dict(model, Named(model))["state"]
        with pytest.warns(UserWarning, match="no closure"):
            assert FSDP.optim_state_dict(model, NeedsClosure(model.parameters()))["state"] == {}
        parts = {name: value for name, value in model.state_dict().items() if name in masters}
    assert by_names.keys() == parts.keys() == dict(make_model().named_parameters()).keys()
    for name, entry in masters.items():
        assert entry["rounds"] == 3
        mine, kept = parts[name], entry["master"]
        if mine.dim() and mine.numel():
            assert [
                torch.equal(a.tensor, b.tensor)
                for a, b in zip(mine.local_shards(), kept.local_shards(), strict=True)
            ]
    assert full_state(model, OPTIMIZERS["Adam"](model.parameters()))["state"] == {}, "as with torch"


def test_template_entries_equal_those_of_a_first_step() -> None:
    run_ranks(2, _first_entries)


class OneUnitUsed(nn.Module):
    """Its first unit is so small that only the first rank has a part of it; the other one never
    runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(1, 2, bias=False)
        self.spare = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def _a_rank_without_state(directory: str) -> None:
    model = FSDP(
        OneUnitUsed(), use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.numel()])
    model(torch.ones(3, 1)).sum().backward()
    for p in model.parameters():
        p.grad = p.grad if p.numel() else None
    optimizer.step()
    having: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(having, bool(optimizer.state))
    assert having == [True, False, False]
    with FSDP.state_dict_type(model, SHARDED), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state = FSDP.optim_state_dict(model, optimizer)
    assert state["state"].keys() == {"used.weight"}
    assert all(entry["step"] == 1 for entry in state["state"].values())
    dcp.save(state, checkpoint_id=directory)


def test_a_rank_without_state_adds_none_to_the_others(tmp_path: Path) -> None:
    run_ranks(3, _a_rank_without_state, str(tmp_path))
