"""Parameters that are already sharded over a second mesh dimension: training, clipping and state
equal the unsharded model's."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import _state_dict_utils
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp_compat import (
    CheckpointError,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
    UsageError,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.models import DIM, Block
from tests.support.parity import Pair, backward, seeded, sgd, whole
from tests.support.ranks import on_ranks

LENGTH = 8

SHARD_GRAD_OP, NO_SHARD = ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
HYBRID = ShardingStrategy.HYBRID_SHARD


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def blocks_only(model: Net, tp: DeviceMesh) -> None:
    """DTensors beside plain parameters: the usual plan for the two layers of an MLP."""
    for block in model.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def whole_sequence(model: Net, tp: DeviceMesh) -> None:
    """All parameters are DTensors; gradients of norms are partial sums."""
    plan: dict[str, Any] = {
        "stem": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        plan[f"blocks.{number}.norm"] = SequenceParallel()
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, tp, plan)


Plan = Callable[[Net, DeviceMesh], None]


def network(dtype: torch.dtype = torch.float64) -> Net:
    return seeded(Net).to(dtype)


def assert_equal(got: Tensor, expected: Tensor, what: object) -> None:
    """Assert equality up to the last digits, because sums are taken in another order."""
    rtol, atol = (1e-10, 1e-13) if expected.dtype == torch.float64 else (1e-5, 1e-6)
    torch.testing.assert_close(
        got, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )


class TwoDimensional(Pair):
    """An unsharded model and a two-dimensional one, compared by their state dicts."""

    def __init__(
        self,
        plan: Plan,
        *,
        frozen: tuple[str, ...] = (),
        wrapped: bool = True,
        shape: tuple[int, ...] = (2, 2),
        dtype: torch.dtype = torch.float64,
        optimizer: Callable[..., torch.optim.Optimizer] = sgd,
        **options: Any,
    ) -> None:
        plain, model = network(dtype), network(dtype)
        names = ("dp", "tp") if len(shape) == 2 else ("replicas", "shards", "tp")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        plan(model, mesh["tp"])
        for net in (plain, model):
            for name, parameter in net.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        super().__init__(
            plain,
            FSDP(
                model,
                device_mesh=mesh[names[:-1]] if len(names) > 2 else mesh["dp"],
                auto_wrap_policy=ModuleWrapPolicy({Block}) if wrapped else None,
                **options,
            ),
            optimizer=lambda parameters: optimizer([p for p in parameters if p.requires_grad]),
            batch=lambda generator: torch.randn(
                3, LENGTH, DIM, generator=generator, dtype=torch.float64
            ).to(dtype),
            data_ranks=dist.get_world_size() // shape[-1],
            tolerance=1e-10 if dtype == torch.float64 else 1e-5,
        )
        self.tp = mesh["tp"]

    def compare_gradients(self) -> None:
        """Updates show them."""

    def compare_parameters(self) -> None:
        self.assert_state_equal()

    def assert_state_equal(self) -> None:
        for name, value in self.model.state_dict().items():
            assert type(value) is Tensor, f"{name!r} is a {type(value).__name__}"
        super().assert_state_equal()


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """A step in the dtype of the model."""
    return backward(model(x).pow(2).mean())


CASES: dict[Plan, list[dict[str, Any]]] = {
    blocks_only: [
        {"shape": (1, 4), "dtype": torch.float32},
        {"frozen": ("blocks.0.norm", "blocks.1", "head")},
    ],
    whole_sequence: [
        {"wrapped": False, "sharding_strategy": SHARD_GRAD_OP, "shape": (4, 1)},
        {"sharding_strategy": NO_SHARD, "optimizer": partial(torch.optim.AdamW, lr=0.01)},
        {"sharding_strategy": HYBRID, "shape": (2, 1, 2)},
        {"frozen": ("stem", "blocks.0.up")},
    ],
}


def _trains(pair: TwoDimensional) -> None:
    pair.step(mean_square)
    for context in (contextlib.nullcontext, pair.model.no_sync):
        with context():
            pair.backwards(mean_square)
        pair.backwards(mean_square)
        pair.update()


def _clips(pair: TwoDimensional) -> None:
    clip_by_torch = torch.nn.utils.clip_grad_norm_
    by_torch = partial(clip_by_torch, list(pair.model.parameters()))
    for norm_type, clip in itertools.product(
        (2.0, math.inf), (pair.model.clip_grad_norm_, by_torch)
    ):
        pair.backwards(mean_square)
        expected = clip_by_torch(pair.plain.parameters(), 1e-3, norm_type)
        assert expected > 1e-3
        assert_equal(whole(clip(1e-3, norm_type)), expected, f"norm {norm_type}")
        pair.update()


@torch.no_grad()
def _shows_whole_parameters(pair: TwoDimensional) -> None:
    with torch.enable_grad():
        pair.backwards(mean_square)
    expected = dict(pair.plain.named_parameters())
    for factor, writeback in ((0.5, True), (0.0, False)):
        with FSDP.summon_full_params(pair.model, writeback=writeback, with_grads=writeback):
            parameters = dict(pair.model.named_parameters())
            assert list(parameters) == list(expected)
            for name, parameter in parameters.items():
                assert parameter.shape == expected[name].shape
                assert_equal(whole(parameter), expected[name].detach(), name)
                if writeback and parameter.requires_grad:
                    assert_equal(whole(parameter.grad), expected[name].grad, f"gradient of {name}")
                if writeback:
                    expected[name].mul_(factor)
                parameter.mul_(factor)
        pair.compare_parameters()
    pair.update()


@pytest.mark.parametrize(
    ("plan", "use_orig_params"), [(blocks_only, True), (whole_sequence, False)]
)
@on_ranks(4)
def test_two_dimensions_train_clip_and_show_parameters_as_unsharded(
    plan: Plan, use_orig_params: bool
) -> None:
    for options in CASES[plan]:
        pair = TwoDimensional(plan, use_orig_params=use_orig_params, **options)
        parts = [_trains, _clips]
        if not {"shape", "sharding_strategy"} & options.keys():  # a rank's values are not whole
            parts.append(_shows_whole_parameters)
        for part in parts:
            with about((options, part.__name__)):
                part(pair)


@pytest.mark.parametrize("plan", [blocks_only, whole_sequence])
@on_ranks(4)
def test_full_states_load_into_a_model_that_is_wrapped_in_another_way(plan: Plan) -> None:
    options: dict[str, Any] = {"optimizer": partial(torch.optim.Adam, lr=0.01)}
    pair = TwoDimensional(plan, use_orig_params=True, **options)
    pair.step(mean_square)
    saved, state = pair.model.state_dict(), FSDP.optim_state_dict(pair.model, pair.optim)
    network().load_state_dict(saved)
    for number, (name, _) in enumerate(pair.plain.named_parameters()):
        for key, value in pair.plain_optim.state_dict()["state"][number].items():
            assert type(state["state"][name][key]) is Tensor
            assert_equal(state["state"][name][key], value, f"{key} of {name}")
    other = TwoDimensional(plan, use_orig_params=False, wrapped=False, **options)
    assert str(other.model.load_state_dict(saved)) == "<All keys matched successfully>"
    other.optim.load_state_dict(FSDP.optim_state_dict_to_load(other.model, other.optim, state))
    other.plain, other.plain_optim = pair.plain, pair.plain_optim
    other.step(mean_square)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(other.model, StateDictType.FULL_STATE_DICT, config):
        # Every first rank along the data-parallel dimension has it.
        assert bool(other.model.state_dict()) is (other.rank == 0)


def _two_dimensional(plan: Plan, seed: int, kind: str, use_orig_params: bool) -> FSDP:
    """kind: "mesh": values are DTensors; "boxes": a group; "flat": not tensor-parallel."""
    model = seeded(Net, seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if kind != "flat":
        plan(model, mesh["tp"])
    return FSDP(
        model,
        process_group=mesh["dp"].get_group() if kind == "boxes" else None,
        device_mesh=mesh["dp"] if kind == "mesh" else None,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
    )


def _sharded_state(model: FSDP) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.state_dict()


def _assert_holds(model: FSDP, seed: int, what: object) -> None:
    expected, found = seeded(Net, seed).state_dict(), model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items()), what


@on_ranks(4)
def test_sharded_state_dict_values_cover_the_full_parameters(tmp_path: Path) -> None:
    for kind in ("mesh", "boxes"):
        source = _two_dimensional(whole_sequence, 1, kind, False)
        state = _sharded_state(source)
        for name, value in source.state_dict().items():
            assert value.untyped_storage().nbytes() == value.nbytes, name
        for name, value in state.items():
            assert isinstance(value, DTensor if kind == "mesh" else ShardedTensor), name
            assert tuple(value.shape) == tuple(Net().state_dict()[name].shape), name
        for name, value in _state_dict_utils._gather_state_dict(state).items():
            assert torch.equal(value, source.state_dict()[name]), name
        dcp.save(state, checkpoint_id=tmp_path / kind)
        for target in ("mesh", "boxes", "flat"):
            if target != kind:
                model = _two_dimensional(whole_sequence, 2, target, True)
                read = _sharded_state(model)
                dcp.load(read, checkpoint_id=tmp_path / kind)
                model.load_state_dict(read)
                _assert_holds(model, 1, (kind, target, "through files"))
            model = _two_dimensional(whole_sequence, 2, target, False)
            if (kind, target) == ("boxes", "flat"):
                with pytest.raises(CheckpointError, match="shards of a tensor-parallel parameter"):
                    model.load_state_dict(state)
                continue
            model.load_state_dict(copy.deepcopy(state))
            _assert_holds(model, 1, (kind, target, "in memory"))
    flat = _sharded_state(_two_dimensional(whole_sequence, 3, "flat", False))
    model = _two_dimensional(whole_sequence, 2, "boxes", False)
    model.load_state_dict(flat)
    _assert_holds(model, 3, "from boxes without tensor parallelism")
    with (
        FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT),
        pytest.raises(
            UsageError,
            match=r"Tensor-parallel parameters have no local state dict[\s\S]*FULL_STATE_DICT",
        ),
    ):
        model.state_dict()
    if dist.get_rank() == 0:
        for kind in ("mesh", "boxes"):
            plain = Net().state_dict()
            dcp.load(plain, checkpoint_id=tmp_path / kind, no_dist=True)
            assert all(map(torch.equal, plain.values(), seeded(Net, 1).state_dict().values()))


def _with_momentum(
    kind: str, use_orig_params: bool, value: float
) -> tuple[FSDP, torch.optim.Optimizer]:
    """A model, and an optimizer whose state is (``value`` times) the parameters themselves."""
    model = _two_dimensional(blocks_only, 1, kind, use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"].mul_(value)
    return model, optimizer


@on_ranks(4)
def test_sharded_optimizer_state_values_cover_the_full_parameters(tmp_path: Path) -> None:
    expected = seeded(Net, 1).state_dict()
    for kind in ("mesh", "boxes"):
        model, optimizer = _with_momentum(kind, True, 1.0)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            saved = FSDP.optim_state_dict(model, optimizer)
        dcp.save(saved, checkpoint_id=tmp_path / kind)
        target = "boxes" if kind == "mesh" else "mesh"
        other, its_optimizer = _with_momentum(target, False, 0.0)
        with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
            read = FSDP.optim_state_dict(other, its_optimizer)
            dcp.load(read, checkpoint_id=tmp_path / kind)
            state = FSDP.optim_state_dict_to_load(other, its_optimizer, read)
            its_optimizer.load_state_dict(state)
        found = FSDP.optim_state_dict(other, its_optimizer)["state"]
        for name, value in expected.items():
            assert torch.equal(found[name]["momentum_buffer"], value), (kind, name)
