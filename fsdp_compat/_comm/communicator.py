"""Communicators: everything that is sent along a mesh axis goes through one of them.

``communicator(axis, device)`` chooses the transport, one file each:

    single_rank.py   an axis of one rank: nothing is sent
    gloo.py          gloo on CPU: sends and receives over connections of its own, with a tag per
                     group and kind, so that ranks in different orders get an error instead of each
                     other's data; divergence/deadlock.py watches its waits
    two_stages.py    the same along an axis of several hosts with several ranks each: over hosts,
                     and within each host
    backend.py       every other backend: its own collectives; and process groups written in Python

Their base class, ``Transport``, is in transport.py."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from .. import _torch_private
from . import shared_memory
from .backend import BackendTransport, PythonGroupTransport, gather_in_group
from .gloo import GlooTransport
from .host_memory import is_in_pages
from .mesh import Axis, axis_of, is_in_python
from .single_rank import SingleRank
from .transport import Handle, Kind, Mapping, Traffic, Transport
from .two_stages import TwoStages, hosts_of

__all__ = [
    "Handle",
    "Kind",
    "Mapping",
    "Traffic",
    "Transport",
    "allocate_shard",
    "communicator",
    "gather_in_group",
    "max_in_group",
]

_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Transport]] = (
    weakref.WeakKeyDictionary()
)


def communicator(axis: Axis, device: torch.device) -> Transport:
    """Return the communicator for tensors of ``device`` along an axis: one per process group,
    shared by all units.

    Collective: every rank of the axis, at the first call (gloo connects then). Raises StateError if
    communication along the axis has failed before.
    """
    if axis.group is None:
        return SingleRank(axis, device)
    found = _communicators.setdefault(axis.group, {})
    if device.type not in found:
        found[device.type] = _transport(axis, axis.group, device)
    found[device.type].require_working()
    return found[device.type]


def _transport(axis: Axis, group: dist.ProcessGroup, device: torch.device) -> Transport:
    small = _torch_private.default_device_of_backend(group) if device.type == "meta" else device
    if is_in_python(group):
        return PythonGroupTransport(axis, device, small)
    if small.type == "cpu" and _torch_private.is_gloo(group, small):
        transport = GlooTransport(axis, device)
        hosts = hosts_of(transport)
        return transport if hosts is None else TwoStages(axis, transport, hosts)
    return BackendTransport(axis, device, small)


def allocate_shard(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros [numel] on the CPU for a shard, in memory like that of ``Transport.allocate``:
    shards are made before their ranks are connected."""
    return shared_memory.zeros(numel, dtype, min_nbytes=0 if is_in_pages(numel, dtype) else None)


def max_in_group(group: dist.ProcessGroup, value: torch.Tensor, what: str) -> torch.Tensor:
    """Return the elementwise maximum of ``value`` over all ranks, on the device of ``value``, which
    the group need not support. Collective. what: it is for, for errors."""
    axis = axis_of(group)
    if axis.ranks == 1:
        return value
    if is_in_python(group):
        supported = [value.device.type]  # it does not say
    else:
        supported = [
            pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")
        ]  # "cpu:gloo,cuda:nccl"
    found = value.clone() if value.device.type in supported else value.to(supported[0])
    return communicator(axis, found.device).max_of(found, what).to(value.device)
