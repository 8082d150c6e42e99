"""State dicts and checkpoints: DTensors without any context, both ways with torch's FSDP2 and with
the flat front end, on any number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType, checkpoint
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.fully_sharded import (
    TORCH,
    Odd,
    api,
    is_sharded,
    pair_of,
    shard_all,
    take_steps,
)
from tests.support.models import DIM, Block
from tests.support.parity import assert_same_values, square, vectors, whole
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import sample

FULL = StateDictOptions(full_state_dict=True)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    # One operation on all DTensors takes a fraction of the time.
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.1, fused=True)


def _trained(kind: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and an optimizer that have taken two steps, with the same batch on every rank.

    kind: "plain", "ours", "torch", "hybrid" (ours, on two replicas), "flat" or "original".
    """
    model: Any = Odd(seed, codes=True)
    if kind in ("flat", "original"):
        options = {"use_orig_params": kind == "original", "device_id": torch.device("cpu")}
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    elif kind == "hybrid":
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        shard_all(model, mesh=mesh)
    elif kind != "plain":
        shard_all(model, library={"ours": api, "torch": TORCH}[kind])
    optim = _adamw(model)
    take_steps(model, optim, 0, 1)
    return model, optim


def _whole_states(model: nn.Module, optim: torch.optim.Optimizer) -> tuple[dict, dict]:
    """Return the parameters and buffers, and the optimizer's state, by names. Collective."""
    state = {  # in the same order on all ranks
        f"{name}.{key}": whole(value)
        for name, p in model.named_parameters()
        for key, value in sorted(optim.state.get(p, {}).items())
    }
    return {name: whole(value) for name, value in model.state_dict().items()}, state


def _require(kind: str, model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
    """Compare with an unsharded model that has trained from ``seed``. Collective."""
    expected = _whole_states(*_trained("plain", seed))
    if kind in ("flat", "original"):
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            assert_same_values(model.state_dict(), expected[0], "state")
            held = FSDP.optim_state_dict(model, optim)["state"]
        found = {f"{name}.{key}": v for name, entry in held.items() for key, v in entry.items()}
    else:
        weights, found = _whole_states(model, optim)
        assert_same_values(weights, expected[0], "state")
    assert_same_values({name: found[name] for name in expected[1]}, expected[1], "state of")


# -- state dicts


def _require_same_training(model: Any, values: dict[str, Tensor]) -> None:
    """A step from these values changes them as it changes an unsharded model's. Collective."""
    plain = Odd(codes=True)
    plain.load_state_dict(values)
    take_steps(plain, _adamw(plain), 9)
    take_steps(model, _adamw(model), 9)
    found = {name: whole(value) for name, value in model.state_dict().items()}
    assert_same_values(found, plain.state_dict(), "state after a step")


@pytest.mark.parametrize(("assign", "ranks"), [(False, 2), (True, 3)])
@on_ranks("ranks")
def test_state_dicts_are_dtensors_and_load_plainly_and_by_assignment(
    assign: bool, ranks: int
) -> None:
    model, _ = _trained("ours", seed=1)
    loss = square(model, torch.ones(1, DIM))  # leaves the root unsharded
    assert not is_sharded(model.stem)
    state = model.state_dict()
    assert is_sharded(model.stem)
    assert list(state) == list(Odd(codes=True).state_dict())
    for name, value in state.items():
        assert isinstance(value, DTensor) is (name != "count"), name
        assert not value.requires_grad
    assert state["head.weight"].shape == (5, DIM)
    local = state["head.weight"].to_local()
    assert local.shape == torch.empty(5, DIM).chunk(dist.get_world_size())[dist.get_rank()].shape
    saved = copy.deepcopy(state)
    other, _ = _trained("ours", seed=2)
    before = dict(other.named_parameters())
    missing = other.load_state_dict({"few": saved["few"]}, strict=False, assign=assign)
    assert len(missing.missing_keys) == len(saved) - 1
    with pytest.raises(RuntimeError, match="nobody"):
        other.load_state_dict({**saved, "nobody": torch.ones(1)}, assign=assign)
    other.load_state_dict(saved, assign=assign)
    if assign:  # as with any module, every name gets a parameter of its own
        other.again.weight = other.head.weight
    same = [p is before[name] for name, p in other.named_parameters()]
    assert all(same) is not assign
    expected = {name: whole(value) for name, value in saved.items()}
    assert_same_values({n: whole(v) for n, v in other.state_dict().items()}, expected, "state")
    assert other.again.weight is other.head.weight
    del loss
    _require_same_training(other, expected)


@pytest.mark.parametrize("source", ["ours", "torch"])
@on_ranks(2)
def test_torchs_state_dict_functions_take_sharded_states(source: str) -> None:
    model, optim = _trained(source, seed=1)
    other, other_optim = _trained("ours", seed=2)
    set_state_dict(
        other,
        other_optim,
        model_state_dict=get_model_state_dict(model),
        optim_state_dict=get_optimizer_state_dict(model, optim),
    )
    _require("ours", other, other_optim, seed=1)


@on_ranks(2)
def test_torchs_state_dict_functions_broadcast_whole_states_from_the_first_rank() -> None:
    first = dist.get_rank() == 0
    plain, plain_optim = _trained("plain", seed=1)
    weights, states = get_state_dict(plain, plain_optim, options=FULL)
    model, optim = _trained("ours", seed=2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    sent = dict(weights), dict(states)  # torch puts DTensors in
    set_model_state_dict(model, sent[0] if first else {}, options=options)
    set_optimizer_state_dict(model, optim, sent[1] if first else {}, options=options)
    _require("ours", model, optim, seed=1)
    offload = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(model, options=offload)
    assert list(found) == (list(weights) if first else [])
    for name in found:
        assert torch.equal(found[name], weights[name]), name


# -- torch.distributed.checkpoint


def _states(kind: str, model: Any, optim: Any) -> dict[str, Any]:
    """With torch's functions; the flat front end has functions of its own for its optimizer."""
    if kind in ("flat", "original"):
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optim)}
    weights, states = get_state_dict(model, optim)
    return {"model": weights, "optim": states}


def _save(kind: str, path: str) -> None:
    kind, _, in_background = kind.partition(" ")
    model, optim = _trained(kind, seed=1)
    states = _states(kind, model, optim)
    if in_background:
        group = dist.new_group(backend="gloo")
        dcp.async_save(states, checkpoint_id=path, process_group=group).result()
    else:
        dcp.save(states, checkpoint_id=path)
    _require(kind, model, optim, seed=1)


def _load(kind: str, path: str) -> None:
    model, optim = _trained(kind, seed=2)
    states = _states(kind, model, optim)
    dcp.load(states, checkpoint_id=path)
    if kind in ("flat", "original"):
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(states["model"])
            optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, states["optim"]))
    else:
        set_state_dict(
            model, optim, model_state_dict=states["model"], optim_state_dict=states["optim"]
        )
    _require(kind, model, optim, seed=1)


@pytest.mark.parametrize(
    ("source", "save_ranks", "target", "load_ranks"),
    [
        ("ours", 2, "torch", 3),
        ("torch", 3, "ours", 2),
        ("hybrid", 4, "flat", 1),
        ("ours in the background", 2, "torch", 2),
        *sample([("flat", 2, "ours", 1), ("ours", 1, "original", 2)]),
    ],
)
def test_a_distributed_checkpoint_loads_into_every_front_end(
    source: str, save_ranks: int, target: str, load_ranks: int, tmp_path: Path
) -> None:
    run_ranks(save_ranks, _save, source, str(tmp_path))
    run_ranks(load_ranks, _load, target, str(tmp_path))


# -- fsdp_compat.checkpoint

only_ours = pytest.mark.skipif(api is TORCH, reason="knows nothing of torch's FSDP2")


def _save_native(kind: str, path: str) -> str:
    model, optim = _trained(kind, seed=1)
    saved = checkpoint.save(path, model, optim, extra={"epoch": 3}, step=7)
    _require(kind, model, optim, seed=1)
    return str(saved)


def _load_native(kind: str, path: str) -> None:
    model, optim = _trained(kind, seed=2)
    assert checkpoint.load(path, model, optim) == {"epoch": 3}
    _require(kind, model, optim, seed=1)


@only_ours
@pytest.mark.parametrize(
    ("source", "save_ranks", "target", "load_ranks"),
    [
        ("ours", 3, "flat", 2),
        ("original", 2, "ours", 1),
        ("ours", 2, "hybrid", 4),
    ],
)
def test_a_native_checkpoint_loads_into_both_front_ends(
    source: str, save_ranks: int, target: str, load_ranks: int, tmp_path: Path
) -> None:
    (path, *_) = run_ranks(save_ranks, _save_native, source, str(tmp_path))
    run_ranks(load_ranks, _load_native, target, path)


@only_ours
@on_ranks(2)
def test_safetensors_are_written_and_read(tmp_path: Path) -> None:
    path = str(tmp_path / "weights")
    model, _ = _trained("ours", seed=1)
    checkpoint.save_safetensors(path, model)
    for kind in ("ours", "flat"):
        other, _ = _trained(kind, seed=2)
        checkpoint.load_safetensors(path, other)
        streamed = dict(checkpoint.iter_full_state_dict(other))
        expected = _trained("plain", seed=1)[0].state_dict()
        assert_same_values({name: streamed[name] for name in expected}, expected, "state")
        assert len(streamed) == len(expected)


# -- before the first step


class Resettable(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)
        nn.init.constant_(self.bias, 0.25)


@pytest.mark.parametrize("reset", [False, True], ids=["loaded", "reset"])
@on_ranks(3)
def test_a_model_may_begin_on_the_meta_device(reset: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(Resettable(DIM, 7), nn.Tanh(), Resettable(7, DIM))

    def shard(_: nn.Module) -> Any:
        with torch.device("meta"):
            model = build()
        shard_all(model, (Resettable,))
        assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
        model.to_empty(device="cpu")
        if reset:
            for module in model:
                getattr(module, "reset_parameters", lambda: None)()
        else:
            set_model_state_dict(model, build().state_dict(), options=FULL)
        return model

    pair = pair_of(build, shard)
    pair.compare_parameters()
    pair.step()
    pair.step()


@on_ranks(2)
def test_the_dtype_may_change_before_the_first_step_and_later() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Block(), Block())

    for before_first in (True, False) if api is not TORCH else (True,):
        pair = pair_of(build, tolerance=1e-9, batch=lambda generator: vectors(generator).double())
        if not before_first:
            square(pair.model, torch.ones(1, DIM)).backward()
            pair.model.zero_grad()
        for model in (pair.plain, pair.model):
            model.to(torch.float64)
        assert all(p.dtype is torch.float64 for p in pair.model.parameters())
        assert all(isinstance(p, DTensor) for p in pair.model.parameters())
        pair.plain_optim, pair.optim = (
            torch.optim.SGD(m.parameters(), 0.1) for m in (pair.plain, pair.model)
        )
        pair.step()
        pair.step()
