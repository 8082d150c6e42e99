"""What a step of Muon sends: on DTensors of torch's FSDP2 and of fully_shard, and by
GatheredOptimizer. Counted on one simulated rank of 8 (a fake process group), per step:

    python tests/benchmarks/whole_parameters.py    (fsdp_compat installed, or PYTHONPATH=.)

    collectives  of the backend
    bytes        that the rank receives, for each element of the model"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
muon = partial(torch.optim.Muon, lr=0.01)


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


def step_of(shard: Callable[[nn.Module], Any], is_gathered: bool) -> Counted:
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(MATRICES)))
    for layer in (*model, model):
        shard(layer)
    model(torch.randn(4, SIZE)).sum().backward()
    optimizer = GatheredOptimizer(model, muon) if is_gathered else muon(model.parameters())
    with Counted() as counted:
        optimizer.step()
    return counted


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    theirs = partial(torch_fully_shard, mesh=init_device_mesh("cpu", (RANKS,)))
    print(f"{'':42}collectives  bytes per element of the model")
    for name, shard, is_gathered in (
        ("Muon, FSDP2", theirs, False),
        ("Muon, fully_shard", fully_shard, False),
        ("GatheredOptimizer", fully_shard, True),
    ):
        counted, numel = step_of(shard, is_gathered), MATRICES * SIZE * SIZE
        print(f"{name:42}{counted.collectives:11}  {counted.nbytes / numel:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
