"""One parameter of a store that cuts every parameter by itself: its sharded form, and whether what
the user puts in its place fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # public

from .. import _torch_private
from .._comm.host_memory import of_its_own_size
from .._engine.store import Kind
from .._engine.tensor_parallel import TensorParallel
from .._layout.rows import Cut
from .._torch_private import dtensor as torch_dtensor
from ..errors import StateError
from .placement import RowPlacement


@dataclasses.dataclass
class RowParam:
    """One parameter of a store that cuts every parameter by itself."""

    cut: Cut
    kind: Kind  # its attributes are the sharded parameter's, too
    spec: Any  # of the sharded parameter and its gradient; None: plain tensors
    sharded: nn.Parameter

    @staticmethod
    def of(original: nn.Parameter, local: torch.Tensor, cut: Cut, placed: RowPlacement) -> RowParam:
        """local: this rank's rows. Return the parameter that replaces ``original``, whose
        attributes it gets."""
        value = local if placed.spec is None else torch_dtensor.dtensors([local], [placed.spec])[0]
        sharded = nn.Parameter(value, requires_grad=original.requires_grad)
        # What a tensor subclass needs itself is in every tensor of it.
        own = vars(original.detach())
        attributes = {name: value for name, value in vars(original).items() if name not in own}
        sharded.__dict__ = attributes = attributes | vars(sharded)
        kind = Kind(type(original), attributes, placed.parallel)
        return RowParam(cut, kind, placed.spec, sharded)

    def kind_on(self, mesh: Any) -> Kind:
        """Return the kind of a parameter of some rows, cut along the last dimension of ``mesh``, a
        2-D DeviceMesh."""
        from torch.distributed.tensor import Replicate, Shard

        shape = self.cut.shape
        placements = Replicate(), Shard(0) if shape else Replicate()
        return self.kind._replace(parallel=TensorParallel(mesh, placements, shape))

    def require_fit(self, parameter: Any, rank: int, name: str) -> None:
        """Raise StateError unless ``parameter`` can be the sharded parameter on ``rank``."""
        shape, spec, placements = self.cut.part_shape(rank), self.spec, None
        wanted, got = f"its part {shape}", "nothing"
        if spec is not None:
            wanted = f"a DTensor placed as {spec.placements}, with {wanted} on this rank"
        if parameter is not None:
            got = f"a {type(parameter).__name__} of shape {tuple(parameter.shape)}"
            if not _torch_private.is_plain(parameter):
                placements = tuple(parameter.placements)
                got += f", placed as {placements}"
            if placements == (None if spec is None else tuple(spec.placements)) and (
                tuple(_torch_private.local_part(parameter).shape) == shape
            ):
                return
        raise StateError.of(
            "A sharded parameter was replaced by one that does not fit.",
            expected=wanted,
            got=got,
            where=f"parameter {name!r}",
            fix="load into the sharded model without assign=True, or assign DTensors as "
            "state_dict() of the sharded model returns them",
        )


def require_one_kind(values: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise StateError unless all local tensors have one dtype and device. names: theirs."""
    kinds = {(value.dtype, value.device): index for index, value in enumerate(values)}
    if len(kinds) > 1:
        (_, first), (_, other) = list(kinds.items())[:2]
        raise StateError.of(
            "Some parameters of a unit changed their dtype or device, and others did not.",
            expected="the same change of all parameters that fully_shard manages together",
            got=", ".join(f"{dtype} on {device}" for dtype, device in kinds),
            where=f"parameters {names[first]!r} and {names[other]!r}",
            fix="convert single parameters before fully_shard",
        )


def with_own_storage(part: torch.Tensor) -> torch.Tensor:
    """part: contiguous. Return a tensor over the same memory, at the start of a storage of its
    size.

    A DTensor has the storage offset of its local tensor, and torch's asynchronous checkpoints take
    DTensors with an offset for plain tensors.
    """
    if part.is_meta or not part.numel():
        return torch.empty_like(part)
    if part.device.type == "cpu":
        return of_its_own_size(part)
    # It keeps the shard alive. Not by way of __dlpack_device__: torch's has no answer for a device
    # that is registered under a name of its own.
    flat: torch.Tensor = from_dlpack(to_dlpack(part.view(-1).view(torch.uint8)))
    return flat.view(part.dtype).view(part.shape)
