"""The two mesh axes of a unit: the ranks that split one copy of its parameters, and the copies."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_private
from ..errors import UsageError

MAX_NAMED = 8  # ranks listed in a message


def named(ranks: Sequence[int]) -> str:
    """Return ranks as messages list them: all if they are few, otherwise the first ones."""
    first = ", ".join(map(str, ranks[:MAX_NAMED]))
    return f"[{first}]" if len(ranks) <= MAX_NAMED else f"[{first}, ...: {len(ranks)} ranks]"


@dataclasses.dataclass(frozen=True)
class Axis:
    """One mesh axis: its process group, and this rank's position in it."""

    group: dist.ProcessGroup | None  # None for an axis of one rank
    rank: int
    members: tuple[int, ...]  # global ranks, in the order of the axis

    @property
    def ranks(self) -> int:
        return len(self.members)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """``shard`` ranks split one copy of the parameters, ``replica`` ranks hold the copies."""

    shard: Axis
    replica: Axis
    one_group: bool = False  # no shard group: the replicas are the ranks of the only group
    is_hybrid: bool = False  # a DeviceMesh with a replica dimension, even one of size 1

    @property
    def ranks(self) -> int:
        return self.shard.ranks * self.replica.ranks

    @property
    def is_first(self) -> bool:
        """True on rank 0 of the mesh, which need not be global rank 0."""
        return self.shard.rank == 0 and self.replica.rank == 0


def the_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``group``, or the default one; raises UsageError if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError.of(
            "torch.distributed is not initialised.",
            expected="a default process group before a module is wrapped",
            got="no default process group",
            where="this process",
            fix="first call torch.distributed.init_process_group('gloo'), or 'nccl' on CUDA",
        )
    found = dist.group.WORLD if group is None else group
    if found is not None and not _torch_private.is_registered(found):
        if is_in_python(found) and found.size() == dist.get_world_size():
            return found
        raise UsageError.of(
            "torch.distributed does not know the ranks of this process group.",
            expected="one made by torch.distributed.new_group, or one in Python over all ranks",
            got=f"a {type(found).__name__} that was destroyed, or made in another way",
            where=f"process_group=, global rank {dist.get_rank()}",
            fix="make a new group with new_group, or omit process_group",
        )
    if found is None or dist.get_rank(found) < 0:
        raise not_a_member()
    return found


def not_a_member() -> UsageError:
    """Return the error for a process outside the group that it was given."""
    return UsageError.of(
        "This process is not a member of the process group.",
        expected="a process group with this process",
        got=f"a group without global rank {dist.get_rank()}",
        where=f"process_group=, global rank {dist.get_rank()}",
        fix="wrap the module only on the ranks of the group, or pass another group",
    )


def is_in_python(group: dist.ProcessGroup) -> bool:
    """True for a process group written in Python, without a backend in C++."""
    return type(group) is not dist.ProcessGroup


def has_processes(group: dist.ProcessGroup) -> bool:
    """False for backends of torch whose ranks do not exist or are threads of one process."""
    return dist.get_backend(group) not in ("fake", "threaded")


def axis_of(group: dist.ProcessGroup) -> Axis:
    """Return the axis over a process group."""
    registered = _torch_private.is_registered(group)  # else it is over all ranks, see ``the_group``
    members = tuple(dist.get_process_group_ranks(group) if registered else range(group.size()))
    return Axis(group if len(members) > 1 else None, group.rank(), members)


def group_by_name(name: str, members: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group with a name and these members, or raise UsageError."""
    the_group(None)
    group = _torch_private.group_named(name)
    ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
    if group is None or ranks != members:
        raise UsageError.of(
            "A process group of a pickled module does not exist.",
            expected=f"a process group named {name!r} of the ranks {named(members)}",
            got="none of that name" if group is None else f"one of the ranks {named(ranks)}",
            where=f"unpickling a FullyShardedDataParallel, global rank {dist.get_rank()}",
            fix="unpickle with the same number of ranks, after making the same process groups; "
            "to change them, save state_dict() instead",
        )
    return group


def axis_by_name(name: str | None, members: tuple[int, ...], rank: int | None = None) -> Axis:
    """Return the axis over a named process group. rank: of the pickled shards on this axis; raises
    UsageError if it is not this rank's."""
    axis = _alone() if name is None else axis_of(group_by_name(name, members))
    if rank is not None and rank != axis.rank:
        raise UsageError.of(
            "A pickled module holds the shards of another rank.",
            expected=f"the shards of rank {axis.rank} of {axis.ranks}",
            got=f"those of rank {rank}",
            where=f"unpickling a FullyShardedDataParallel, global rank {dist.get_rank()}",
            fix="save the module on every rank, to a file per rank, and load this rank's file; "
            "for one file for all ranks, save state_dict() instead",
        )
    return axis


def _alone() -> Axis:
    return Axis(None, 0, (dist.get_rank(),))


def mesh_from_group(group: dist.ProcessGroup | None) -> Mesh:
    """Return the mesh in which all ranks of one group split one copy."""
    return Mesh(axis_of(the_group(group)), _alone())


def replicated(mesh: Mesh) -> Mesh:
    """Return the mesh of the same ranks, of which all on the shard axis hold a whole copy."""
    return mesh if mesh.shard.ranks == 1 else Mesh(_alone(), mesh.shard, one_group=True)


def mesh_from_groups(shard: dist.ProcessGroup, replica: dist.ProcessGroup) -> Mesh:
    """Return the mesh of a hybrid strategy."""
    mesh = Mesh(axis_of(the_group(shard)), axis_of(the_group(replica)))
    both = set(mesh.shard.members) & set(mesh.replica.members)
    if both != {dist.get_rank()}:
        raise UsageError.of(
            "The two process groups of a hybrid strategy overlap.",
            expected="a shard group and a replica group that share only this rank",
            got=f"global ranks {named(sorted(both))} in both",
            where=f"process_group=, global rank {dist.get_rank()}",
            fix="pass device_mesh=init_device_mesh(device_type, (replicas, shard_ranks))",
        )
    return mesh


def first_dimension(mesh: DeviceMesh) -> DeviceMesh:
    """Return the 1-D mesh of this rank along the first dimension of ``mesh``."""
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[0]]
    return DeviceMesh.from_group(mesh.get_group(0), mesh.device_type)


def mesh_from_device_mesh(mesh: DeviceMesh, *, strategy: str) -> Mesh:
    """Return the mesh of a hybrid strategy, as in torch: a 1-D mesh is one replica, a 2-D mesh is
    (replica, shard). strategy: its name."""
    if mesh.ndim == 1:
        return Mesh(axis_of(mesh.get_group()), _alone())
    if mesh.ndim == 2:
        return Mesh(axis_of(mesh.get_group(1)), axis_of(mesh.get_group(0)))
    raise UsageError.of(
        "The device mesh does not fit the sharding strategy.",
        expected="a 2-D mesh (replica, shard), or a 1-D one (shard)",
        got=f"a mesh of {mesh.ndim} dimension(s) for {strategy}",
        where="device_mesh=",
        fix="pass init_device_mesh(device_type, (num_nodes, ranks_per_node)), or two "
        "dimensions of a named mesh: mesh['replica', 'shard']",
    )


_Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]
# The groups of each default group, by ranks per node: (shard, replica).
_node_groups = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, _Groups]]()


def groups_node_by_node(ranks_per_node: int) -> _Groups:
    """Return (shard group, replica group): split within each node of ``ranks_per_node``, and
    replicate across nodes. Collective: every rank of the default group, at the first call."""
    default = the_group(None)
    world = dist.get_world_size(default)
    if world % ranks_per_node:
        raise UsageError.of(
            "The world size is not a multiple of the ranks per node.",
            expected=f"a multiple of {ranks_per_node} ranks",
            got=f"{world} ranks",
            where="a hybrid sharding strategy without device_mesh and process_group",
            fix="pass device_mesh=init_device_mesh(device_type, (replicas, shard_ranks))",
        )
    known = _node_groups.setdefault(default, {})
    if ranks_per_node not in known:
        starts = range(0, world, ranks_per_node)
        nodes = [[*range(start, start + ranks_per_node)] for start in starts]
        places = [[*range(place, world, ranks_per_node)] for place in range(ranks_per_node)]
        shard, _ = dist.new_subgroups_by_enumeration(nodes)
        replica, _ = dist.new_subgroups_by_enumeration(places)
        known[ranks_per_node] = shard, replica
    return known[ranks_per_node]
