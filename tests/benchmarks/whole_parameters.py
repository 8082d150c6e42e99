"""What a step of Muon sends: on DTensors of torch's FSDP2 and of fully_shard, and by
GatheredOptimizer. Counted on one simulated rank of 8 (a fake process group), per step:

    python tests/benchmarks/whole_parameters.py    (fsdp_compat installed, or PYTHONPATH=.)

    collectives  of the backend
    bytes        that the rank receives, for each element of the model"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compat import fully_shard
from fsdp_compat.optim import GatheredOptimizer

RANKS, MATRICES, SIZE = 8, 8, 256


class Counted(TorchDispatchMode):
    """Counts collectives, and the bytes of their results that come from other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives, self.nbytes = 0, 0.0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if "c10d" in name and "_wrap_tensor" not in name and "wait" not in name:
            self.collectives += 1
            found = result if isinstance(result, torch.Tensor) else args[0]
            tensors = [found] if isinstance(found, torch.Tensor) else found
            self.nbytes += sum(each.nbytes for each in tensors) * (RANKS - 1) / RANKS
        return result


def step_of(
    shard: Callable[[nn.Module], Any], optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]
) -> Counted:
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(MATRICES)))
    for layer in model:
        shard(layer)
    shard(model)
    model(torch.randn(4, SIZE)).sum().backward()
    optimizer = optimizer_of(model)
    with Counted() as counted:
        optimizer.step()
    return counted


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.01)


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,))
    numel = MATRICES * SIZE * SIZE
    print(f"{'':42}collectives  bytes per element of the model")
    for name, shard, optimizer_of in (
        ("Muon, FSDP2", lambda m: torch_fully_shard(m, mesh=mesh), lambda m: muon(m.parameters())),
        ("Muon, fully_shard", fully_shard, lambda m: muon(m.parameters())),
        ("GatheredOptimizer", fully_shard, lambda m: GatheredOptimizer(m, muon)),
    ):
        counted = step_of(shard, optimizer_of)
        print(f"{name:42}{counted.collectives:11}  {counted.nbytes / numel:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
