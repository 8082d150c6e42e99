"""fully_shard beside what is used with it: the flat front end, compilation, functional calls,
optimizers in backward, and meshes of more dimensions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.fully_sharded import (
    api,
    pair_of,
    partial_shard,
    shard_all,
    sharded_modules,
)
from tests.support.models import DIM, Block, Stack, chain
from tests.support.parity import assert_close, backward, one_backward, whole
from tests.support.ranks import on_ranks

BF16 = torch.bfloat16


# -- the flat front end


@on_ranks(2)
def test_both_front_ends_train_in_one_model_and_one_process() -> None:
    def shard(model: Any) -> Any:
        policy = ModuleWrapPolicy({Block})
        model[0] = FSDP(model[0], auto_wrap_policy=policy, use_orig_params=True)
        shard_all(model[2])
        api.fully_shard(model[1])
        return model

    two = partial(Stack, 2)
    pair = pair_of(partial(chain, two, partial(nn.Linear, 3, DIM), two), shard)
    other = pair_of(Stack)
    plain, model, clip = pair.plain, pair.model, torch.nn.utils.clip_grad_norm_
    for _ in range(2):
        pair.backwards()
        expected = [clip(plain[:1].parameters(), 0.5), clip(plain[1:].parameters(), 0.5)]
        assert_close(model[0].clip_grad_norm_(0.5), expected[0], "norm of the flat half")
        rows = [*model[1].parameters(), *model[2].parameters()]
        assert_close(whole(clip(rows, 0.5)), expected[1], "norm of the rest")
        for optim in (pair.plain_optim, pair.optim):
            optim.step()
            optim.zero_grad()
        other.step()
        pair.compare_outputs()


@on_ranks(2)
def test_an_optimizer_may_step_in_backward() -> None:
    adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-2)
    pair = pair_of(Stack, partial_shard(reshard_after_forward=False), adamw)
    optims = {p: adamw([p]) for p in pair.model.parameters()}

    def step(p: Tensor) -> None:
        optims[p].step()
        optims[p].zero_grad()

    for p in optims:
        p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        pair.backwards()
        assert all(p.grad is None for p in optims)
        pair.update()  # which finds no gradients in the sharded copy


# -- compilation and functional calls


@on_ranks(2)
def test_compiled_modules_train() -> None:
    def compiled_inside(model: Any) -> Any:
        for block in model.blocks:  # as torchtitan does: compiled blocks, then sharded
            block.compile(backend="aot_eager")
        return shard_all(model)

    def compiled_outside(model: Any) -> Any:
        shard_all(model).compile(backend="eager")
        return model

    for shard in (compiled_inside, compiled_outside):
        torch._dynamo.reset()
        pair = pair_of(partial(Stack, 1), shard)
        for _ in range(2):
            pair.step()
        pair.compare_outputs()
    torch._dynamo.reset()


@on_ranks(2)
def test_functional_call_works_with_own_parameters() -> None:
    pair = pair_of(Stack)
    stem = {f"stem.{name}": p for name, p in pair.model.stem.named_parameters()}
    x = pair.batches()[pair.rank]
    for given in ({}, stem) if api.name == "ours" else ({},):
        output = torch.func.functional_call(pair.model, given, (x,))
        assert_close(output, pair.plain(x), "output")
        pair.model.reshard()
    pair.step()


# -- meshes


class _Experts(nn.Module):
    """A router over experts, whose weights are one tensor each. mesh: if given, each of its ranks
    computes its experts for the whole batch, and the outputs are summed."""

    mesh: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.up = nn.Parameter(torch.randn(4, DIM, 6) / 3)
        self.down = nn.Parameter(torch.randn(4, 6, DIM) / 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        if self.mesh is None:
            return x + self._output(x, scores.softmax(-1), self.up, self.down)
        each = [DTensor.from_local(t, self.mesh, [Replicate()]) for t in (x, scores)]
        own, scores = (t.to_local(grad_placements=[Partial()]) for t in each)
        up, down = (p.to_local() for p in (self.up, self.down))  # type: ignore[operator]
        gates = scores.softmax(-1).split(len(up), -1)[self.mesh.get_local_rank()]
        out = DTensor.from_local(self._output(own, gates, up, down), self.mesh, [Partial()])
        return x + out.redistribute(placements=[Replicate()]).to_local()

    def _output(self, x: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.einsum("bd,edh->beh", x, up).relu()
        return (gates[..., None] * torch.einsum("beh,ehd->bed", hidden, down)).sum(1)


@on_ranks(4)
def test_expert_and_tensor_parallel_modules_train_in_one_model() -> None:
    """Experts over one mesh, tensor-parallel layers over another, the rest over data ranks."""
    shape, names = (2, 1, 2), ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    expert = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    data, experts = mesh[names[:-1]], api.FSDPMeshInfo(expert["efsdp"], shard_mesh_dim=0)

    def place(p: nn.Parameter) -> Any:  # two experts per rank are cut along the next dim
        return api.ShardPlacementResult(Shard(1), experts) if p.ndim == 3 else None

    def shard(model: Any) -> Any:
        for block in (model[1], model[3]):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        model[2].mesh = expert["ep"]
        for name in ("up", "down"):
            value = model[2].get_parameter(name).detach()
            cut = distribute_tensor(value, expert["ep"], [Shard(0)])
            setattr(model[2], name, nn.Parameter(cut))
        return shard_all(model, (Block, _Experts), mesh=data, shard_placement_fn=place)

    build = partial(chain, partial(nn.Linear, DIM, DIM), Block, _Experts, Block)
    pair = pair_of(build, shard, data_ranks=2)
    experts_up, up = pair.model[2].up, pair.model[1].up.weight
    assert experts_up.shape == (4, DIM, 6) and experts_up.to_local().shape == (2, DIM // 2, 6)
    assert up.device_mesh.ndim == len(shape) and up.shape == (2 * DIM, DIM)
    assert up.to_local().numel() == up.numel() // math.prod(shape[-2:])
    assert pair.model[2].router.weight.device_mesh.ndim == len(shape) - 1
    for _ in range(2):
        pair.step()


@pytest.mark.parametrize(
    ("ranks", "shape", "names", "dims"),
    [
        (2, (2,), ("dp",), {"replicate": "dp"}),
        (4, (2, 2), ("dp", "tp"), {"shard": "dp"}),
        (4, (2, 2), ("dpr", "dps"), {"shard": "dps", "replicate": "dpr"}),
        (4, (2, 2), ("dp", "cp"), {"shard": ("dp", "cp")}),
    ],
    ids=str,
)
@on_ranks("ranks")
def test_parameters_on_a_whole_mesh_are_sharded_over_its_data_parallel_dims(
    ranks: int, shape: tuple[int, ...], names: tuple[str, ...], dims: dict[str, Any]
) -> None:
    """Parameters are DTensors on all dimensions, replicated over those of data parallelism."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    over = api.DataParallelMeshDims(**dims)

    def shard(model: Any) -> Any:
        for name, module in model.named_modules():
            for key, p in list(module.named_parameters(recurse=False)):
                placements: list[Any] = [Replicate()] * mesh.ndim
                if "tp" in names and name.endswith("up"):
                    placements[names.index("tp")] = Shard(0)
                if "tp" in names and name.endswith("down") and key == "weight":
                    placements[names.index("tp")] = Shard(1)
                value = distribute_tensor(p.detach(), mesh, placements)
                setattr(module, key, nn.Parameter(value))
        return shard_all(model, mesh=mesh, dp_mesh_dims=over)

    over_names = (*over.shard_names, *over.replicate_names)
    data = math.prod(mesh[name].size() for name in over_names)
    places = [Shard(0) if name in over_names else Replicate() for name in names]

    def step(model: Any, x: Tensor) -> Tensor:
        if not isinstance(model, api.FSDPModule):
            return one_backward(model, x)
        out = model(DTensor.from_local(x, mesh, places)).redistribute(placements=places)
        return backward(out.to_local().pow(2).mean())

    pair = pair_of(partial(Stack, 2), shard, data_ranks=data)
    pair.step(step)
    assert len(sharded_modules(pair.model)) == 3
