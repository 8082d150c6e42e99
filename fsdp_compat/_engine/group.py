"""Parameter groups: the parameters of a unit that are all-gathered and reduced in one buffer."""

from __future__ import annotations

import torch
from torch import nn

from .._comm.communicator import Communicator, Handle, communicator
from .._comm.mesh import Mesh
from ..errors import AssertedStateError, explain
from .device import offload_policy
from .dtypes import ComputeDtype, Precision
from .gradients import Gradients, is_large
from .reduce import CommHook, ReducePlan, predivisor
from .requires_grad import RequiresGrad
from .storage import GroupMemory
from .store import ParamStore

__all__ = ["Group"]


class Group:
    """Runtime state of one parameter group: its buffers, in-flight collectives and received
    gradients. It knows no layout."""

    def __init__(
        self,
        store: ParamStore,
        mesh: Mesh,
        precision: Precision,
        device: torch.device,
        offload: bool = False,
        reshard_after_forward: bool = True,
    ) -> None:
        """Collective over the mesh, once per process group (see ``communicator``).

        offload: the shard is on the CPU. reshard_after_forward: of the unit.
        """
        self.store, self.precision, self.device = store, precision, device
        self.offload = offload_policy(device, offload)
        # One per dtype computed in: see `use_dtype`.
        self.memories = [
            GroupMemory(store, mesh.shard.ranks, dtype, device, self.offload.is_offloaded)
            for dtype in dict.fromkeys((precision.gather, precision.evaluate or precision.gather))
        ]
        self.memory = self.memories[0]  # of the dtype computed in now
        self.shard: Communicator = communicator(mesh.shard, device)
        self.replica: Communicator = communicator(mesh.replica, device)
        self.tensor_parallel = [
            communicator(axis, device) for axis in store.tensor_parallel_axes if axis.ranks > 1
        ]
        self._tag = self.shard.new_tag()
        self._all_gather: Handle | None = None  # in flight
        plan = ReducePlan(
            self.shard,
            self.replica,
            self._tag,
            self.replica.new_tag(),
            self.offload,
            predivisor(mesh.ranks, precision.reduce),
            grad_dtype=precision.grad if precision.grad not in (None, store.dtype) else None,
            one_group=mesh.one_group,
        )
        # Gradients of large parameters are moved to the reduce buffer as they come. If backward
        # begins with all units unsharded, though, a buffer for gradients wider than the parameters
        # is not allocated before the first unit is resharded: post-backward moves them.
        streamed = reshard_after_forward or precision.reduce.itemsize <= precision.gather.itemsize
        large = {
            param
            for memory in self.memories
            for param in memory.unsharded_params
            if streamed and is_large(param)
        }
        self.gradients = Gradients(store, self.memories, plan, large, precision.reduce, device)
        self.requires_grad = RequiresGrad(store, self.memories, large)
        self.set_name("a unit")

    def set_name(self, name: str) -> None:
        """name: of its unit, for errors."""
        self.name = name
        self.gradients.what = f"the gradients of {name}"

    # -- parameters

    @property
    def unsharded_params(self) -> list[nn.Parameter]:
        """The unsharded parameters in the dtype computed in now."""
        return self.memory.unsharded_params

    def use_dtype(self, dtype: ComputeDtype) -> None:
        """Compute in this dtype from now on. Only while the group is sharded."""
        self.memory = self.memories[min(dtype, len(self.memories) - 1)]

    def unshard(self) -> None:
        """Collective. Start the all-gather."""
        memory = self.memory
        if memory.aliased:
            return
        memory.allocate()
        self._all_gather = self.shard.begin_gather(
            self.store.shard, memory.all_gather_output, memory.segments, self._tag
        )
        if self.offload.is_offloaded:
            self.offload.was_read()

    def wait_for_unshard(self) -> None:
        """Collective. Make the unsharded parameters readable."""
        if self._all_gather is not None:
            self._end_all_gather()
        if self.memory.has_copies:
            self.memory.fill_unsharded_params()

    def reshard(self) -> None:
        """Free the unsharded parameters. Collective if an all-gather is in flight."""
        if self._all_gather is None:
            # An exception may have come before the handle was stored here.
            self._all_gather = self.shard.unfinished_gather(self._tag)
        if self._all_gather is not None and not self.shard.has_failed:
            self._end_all_gather()  # memory that is being received into cannot be freed
        self._all_gather = None
        self.memory.free()

    def _end_all_gather(self) -> None:
        assert self._all_gather is not None
        self.shard.end_gather(self._all_gather, f"the parameters of {self.name}")
        self._all_gather = None  # only now: if the wait raises, memory is still received into

    def gather_full(self, own: torch.Tensor | None = None) -> torch.Tensor:
        """Return [ranks * S] from every rank's ``own`` [S], by default the shard, in new memory
        unless there is one rank. Collective.

        Leaves the buffers of forward and backward alone.
        """
        own = self.store.shard if own is None else own
        return self.shard.gather_now(self.offload.to_compute(own))

    def require_unsharded_params(self) -> None:
        """Raise AssertedStateError, and undo the change, if the user has given an unsharded
        parameter other memory."""
        for memory in self.memories:
            strayed = memory.strayed()
            if strayed:
                memory.bring_back(self.store, strayed)
                shape = tuple(memory.unsharded_params[strayed[0]].shape)
                raise AssertedStateError(
                    explain(
                        "An unsharded parameter was given other memory, which the next all-gather "
                        "would ignore.",
                        expected="changes by `.data =` between steps only, not from forward until "
                        "backward has ended",
                        got=f"other memory for parameter {strayed[0]} (shape {shape})",
                        where=self.name,
                        fix="change it between steps, in place inside summon_full_params; this "
                        "change was dropped",
                    )
                )

    # -- gradients

    @property
    def has_gradients(self) -> bool:
        """True if gradients were received and not reduced."""
        return bool(self.gradients.received)

    def has_all_gradients(self) -> bool:
        """True if the gradients of all trainable parameters have come."""
        received = self.gradients.received
        return all(
            not param.requires_grad or param.grad is not None or index in received
            for index, param in enumerate(self.unsharded_params)
        )

    @property
    def hook(self) -> CommHook | None:
        return self.gradients.hook

    def set_hook(self, hook: CommHook) -> None:
        """See Gradients.set_hook."""
        self.gradients.set_hook(hook)

    def discard(self) -> None:
        """After a backward that raised: wait for reductions in flight, drop partial gradients."""
        self.gradients.discard()

    @property
    def resident_nbytes(self) -> int:
        """Bytes held now, beyond shard, gradients and optimizer state."""
        return (
            sum(memory.resident_nbytes for memory in self.memories) + self.gradients.resident_nbytes
        )
