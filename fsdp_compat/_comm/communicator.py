"""Communicators, through which everything is sent along a mesh axis.

Transports over gloo have a tag per group and kind, so that ranks in different orders get an error
instead of each other's data, and the board ends their waits. FSDP_COMPAT_SAME_HOST limits ranks of
one host: ``counters`` maps no shards, ``messages`` sends values."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_private
from .backend import BackendTransport, PythonGroupTransport
from .environment import same_host
from .gloo import GlooTransport, MessageTransport
from .gloo_connections import GlooConnections
from .mesh import Axis, axis_of, is_in_python
from .transport import SingleRank, Transport
from .two_stages import TwoStages, hosts_of

# by group and type of device
_communicators = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Transport]]()


def communicator(axis: Axis, device: torch.device) -> Transport:
    """Return the communicator for tensors of ``device`` along an axis: one per process group.
    Raises StateError if communication along the axis has failed before.

    Collective: every rank of the axis, at the first call (gloo connects then)."""
    if axis.group is None:
        return SingleRank(axis, device)
    found = _communicators.setdefault(axis.group, {})
    if device.type not in found:
        found[device.type] = _transport(axis, axis.group, device)
    found[device.type].require_working()
    return found[device.type]


def made(axis: Axis, device: torch.device) -> Transport | None:
    """Return the communicator along an axis if it was made."""
    return None if axis.group is None else _communicators.get(axis.group, {}).get(device.type)


def _transport(axis: Axis, group: dist.ProcessGroup, device: torch.device) -> Transport:
    small = _torch_private.default_device_of_backend(group) if device.type == "meta" else device
    if is_in_python(group):
        return PythonGroupTransport(axis, device, small)
    if small.type == "cpu" and _torch_private.is_gloo(group, small):
        whole = _over_gloo(axis, device)
        hosts = hosts_of(whole)
        return whole if hosts is None else TwoStages(axis, whole, hosts, _over_gloo)
    return BackendTransport(axis, device, small)


def _over_gloo(axis: Axis, device: torch.device, part: str = "") -> GlooTransport:
    """Collective. Connect the ranks of an axis, by one kind of transport. part: names them."""
    limit = same_host()
    assert axis.group is not None
    values = MessageTransport(axis, device, GlooConnections(axis, axis.group, part))
    if limit == "messages":
        values.gather_objects(None)  # in place of ``connect``, which other ranks may call
        return values
    from .same_host.transport import connect  # where values are sent, the folder is not needed

    return connect(axis, values, maps=limit == "mapped") or values


def allocate_shard(numel: int, dtype: torch.dtype) -> Tensor:
    """Return zeros [numel] for a shard in memory like a transport's, before one is connected."""
    if same_host() == "messages":
        return torch.zeros(numel, dtype=dtype, device="cpu")
    from .same_host import shared_memory

    return shared_memory.allocate(numel, dtype, zero=True)


def max_in_group(group: dist.ProcessGroup, value: Tensor, what: str) -> Tensor:
    """Return the elementwise maximum of ``value`` over all ranks, on its device, which the group
    need not support. Collective."""
    axis = axis_of(group)
    if axis.ranks == 1:
        return value
    types = [value.device.type]
    if not is_in_python(group):  # a group in Python does not list its devices
        pairs = dist.get_backend_config(group).split(",")  # "cpu:gloo,cuda:nccl"
        types = [pair.partition(":")[0] for pair in pairs]
    found = value.to(value.device if value.device.type in types else types[0], copy=True)
    return communicator(axis, found.device).max_of(found, what).to(value.device)
