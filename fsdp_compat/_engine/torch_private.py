"""Every private name of torch that the package uses, each with the reason why no public one will do."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ReduceScatterOptions

__all__ = [
    "as_plain_tensor",
    "children_of",
    "copy_together",
    "default_device_of_backend",
    "gloo_of_its_own",
    "group_timeout",
    "in_graph_task",
    "is_gloo",
    "on_end_of_backward",
    "parameters_of",
    "refresh_rnn_weights",
    "same_storage",
    "scale_together",
    "start_all_gather",
    "start_reduce_scatter",
    "storage_key",
    "tensor_without_storage",
]


def in_graph_task() -> bool:
    """True inside of backward. Nothing public tells a recomputation from a forward."""
    return torch._C._current_graph_task_id() != -1


def on_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running graph task has ended. The engine's queue has no public door."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def copy_together(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors in one call, casts included. A loop of ``copy_`` costs six times as much host time."""
    torch._foreach_copy_(targets, sources)


def scale_together(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply many tensors in place by one scalar tensor, in one call."""
    torch._foreach_mul_(tensors, factor)


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage object, which its data pointer is not while it is freed."""
    return tensor.untyped_storage()._cdata


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_key(one) == storage_key(other)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary in which a module keeps its own parameters; ``setattr`` costs ten times as much per swap."""
    return module._parameters


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module's children under all their names; ``named_children`` leaves out the second name of one."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def refresh_rnn_weights(module: nn.RNNBase) -> None:
    """Rebuild the list of weights that the RNN family keeps beside its parameters."""
    parameters = module._parameters
    module._flat_weights = [parameters.get(name) for name in module._flat_weights_names]


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    """The time limit a process group was made with; a point-to-point wait ignores it unless it is handed over."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return dist.default_pg_timeout if hasattr(dist, "default_pg_timeout") else datetime.timedelta(minutes=30)


_ASYNC_GATHER: Any = AllgatherOptions()
_ASYNC_GATHER.asyncOp = True
_ASYNC_SUM: Any = ReduceScatterOptions()
_ASYNC_SUM.asyncOp = True
_ASYNC_SUM.reduceOp = dist.ReduceOp.SUM


def start_all_gather(group: dist.ProcessGroup, full: torch.Tensor, own: torch.Tensor) -> dist.Work:
    """Start an all-gather of tensors. The public function's frames cost more host time than the call itself."""
    return group._allgather_base(_real(full), _real(own), _ASYNC_GATHER)


def start_reduce_scatter(group: dist.ProcessGroup, total: torch.Tensor, buffer: torch.Tensor) -> dist.Work:
    """Start a summing reduce-scatter of tensors; see ``start_all_gather``."""
    return group._reduce_scatter_base(_real(total), _real(buffer), _ASYNC_SUM)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Backends know no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if tensors of a device go through gloo in a group, which may have a backend for each kind of device."""
    try:
        return group._get_backend(device).name() == "gloo"
    except (RuntimeError, AttributeError):
        return False


def gloo_of_its_own(group: dist.ProcessGroup, rank: int, ranks: int, timeout: datetime.timedelta) -> Any:
    """Connect the ranks of a group a second time, so that a user's messages and ours never meet.

    ``new_group`` would do it for all ranks of the world only, or under a name that depends on how many groups each process has
    made; and what it makes lives until the world ends. Collective: the ranks of the group.
    """
    store = PrefixStore(f"fsdp_compat/{group.group_name}", dist.distributed_c10d._world.pg_map[group][1])
    return dist.ProcessGroupGloo(store, rank, ranks, timeout)


def default_device_of_backend(group: dist.ProcessGroup) -> torch.device:
    """The device whose tensors a process group takes, CPU where it takes several."""
    types = [device.type for device in group._device_types]
    return torch.device("cpu" if "cpu" in types or not types else types[0])


def tensor_without_storage(
    cls: type[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Make an instance of a tensor subclass that stands for more than this process holds. Subclasses are made in no other way."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, layout=torch.strided)


def as_plain_tensor(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a method of torch.Tensor on a subclass as if it were a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
