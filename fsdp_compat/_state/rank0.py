"""Values that only rank 0 of a mesh has, broadcast along its two axes."""

from __future__ import annotations

import collections
import dataclasses
import io
import typing
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from .. import _torch_private
from .._comm.communicator import communicator
from .._comm.host_memory import memory_of
from .._comm.mesh import Mesh
from .._engine.group import Group
from .._engine.preparation import broadcast_states
from .._engine.state_store import store_of
from ..errors import CheckpointError
from .reading_values import (
    is_sharded,
    is_tensor,
    materialised,
)
from .units import clean_name

_ALIGN_NBYTES = 16  # every tensor in a message starts at a multiple of it


@dataclasses.dataclass(frozen=True)
class Outline:
    """The shape and dtype of a tensor that only rank 0 has."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Rank0Broadcast:
    """Sends values of rank 0 to all ranks of a mesh. Rank 0 is first on both axes."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        """Collective over the mesh, once per process group. device: which the backend takes."""
        self.is_here, self.device = mesh.is_first, device
        self.num_ranks = mesh.ranks
        self._shard, self._replica = (
            communicator(mesh.shard, device),
            communicator(mesh.replica, device),
        )

    def gather(self, value: object) -> list[Any]:
        """Return every rank's small ``value``, rank 0's first. Collective."""
        return [
            its
            for row in self._replica.gather_objects(self._shard.gather_objects(value))
            for its in row
        ]

    def tell(self, value: object) -> Any:
        """Return rank 0's ``value``, which is small. Collective."""
        return self.gather(value if self.is_here else None)[0]

    def send(self, values: Sequence[torch.Tensor | Outline], what: str) -> list[torch.Tensor]:
        """Return rank 0's tensors, in one message; views of it, on the device. Collective.

        values: tensors on rank 0, their outlines on the others.
        """
        outlines = [
            Outline(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in values
        ]
        starts, end = [], 0
        for outline in outlines:
            starts.append(end)
            end += -(-outline.nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
        message = torch.zeros(end, dtype=torch.uint8, device=self.device)
        places = [
            message[s : s + o.nbytes].view(o.dtype).view(o.shape)
            for s, o in zip(starts, outlines, strict=True)
        ]
        for place, value in zip(places, values, strict=True):
            if self.is_here:
                place.copy_(typing.cast(torch.Tensor, value))
        self._broadcast(message, what)
        return places

    def send_object(self, value: object, what: str) -> Any:
        """Return rank 0's ``value``, of any size; tensors in it are on the CPU.
        Collective."""
        packed = packed_bytes(value) if self.is_here else None
        numel = self.tell(None if packed is None else packed.numel())
        message = (
            torch.empty(numel, dtype=torch.uint8, device=self.device)
            if packed is None
            else packed.to(self.device)
        )
        self._broadcast(message, what)
        return unpacked(message.cpu(), torch.device("cpu"))

    def _broadcast(self, message: torch.Tensor, what: str) -> None:
        """First to the first rank of every copy, then within each copy."""
        if self._shard.rank == 0:
            self._replica.broadcast([message], what)
        self._shard.broadcast([message], what)


def packed_bytes(value: object) -> torch.Tensor:
    """Return the pickled value, 1-D uint8 on the CPU."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpacked(packed: torch.Tensor, device: torch.device) -> Any:
    """Undo ``packed_bytes``. Only for bytes that ranks of the same program have sent."""
    return torch.load(
        io.BytesIO(memory_of(packed.contiguous())), map_location=device, weights_only=False
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What rank 0 tells the others."""

    error: str  # nothing may be loaded, and why; "" if all is well
    managed: list[str]  # keys, with the next two in the order of the dict
    lazy: list[str]  # managed ones with lazy values
    tensors: list[str]
    objects: dict[str, Any]  # values that travel with the plan
    keys: list[str]
    metadata: Any


def fill_from_rank0(
    given: Any,
    mesh: Mesh,
    device: torch.device,
    *,
    check: Callable[[Mapping[str, Any]], None],
    managed: Collection[str],
    others: Mapping[str, torch.Tensor | None],
    assign: bool,
    where: str,
) -> Any:
    """Return what every rank is to load; on ranks without a state dict, what rank 0's says.

    given: a state dict, which may be None or empty on ranks that have none; it is not changed. If
    all ranks have one, or none has, it is returned as it is. check: raises CheckpointError for a
    dict that cannot be loaded; called on rank 0. managed: the clean names of parameters of units.
    others: the model's other tensors by clean name, None for what is no tensor. On ranks without a
    dict these are overwritten here, unless ``assign``: then they are replaced later.

    Collective: all ranks of the mesh. Raises CheckpointError, on all of them and before anything
    changes, for a bad dict.
    """
    has, wrong = (
        isinstance(given, Mapping) and bool(given),
        not (given is None or isinstance(given, Mapping)),
    )
    flags = torch.tensor(
        [has, not has, mesh.is_first and not has, wrong], dtype=torch.uint8, device=device
    )
    communicators = [communicator(axis, device) for axis in (mesh.replica, mesh.shard)]
    for each in communicators:
        flags = each.any_of(flags, "a check of the state dicts to load")
    somebody_has, somebody_lacks, first_lacks, somebody_wrong = flags.tolist()
    if somebody_wrong and not wrong:
        raise _refused(
            "Another rank was not given a state dict.",
            "a dict, or None",
            "something else, on another rank",
            where,
        )
    if wrong or not somebody_has or not somebody_lacks:
        return given
    if first_lacks:
        raise _refused(
            "Rank 0 has no state dict.",
            "the state dict on rank 0, or on every rank, as rank0_only=True is set",
            f"{'a' if has else 'no'} state dict on this rank, none on rank 0",
            where,
        )
    plan, raised = None, None
    if mesh.is_first:
        try:
            check(given)
            given = _with_others_materialised(given, managed)
            plan = _plan_of(given, managed, {} if assign else others)
        except CheckpointError as error:
            plan, raised = _Plan(str(error), [], [], [], {}, [], None), error
    for each in communicators:
        plan = each.gather_objects(plan)[0]
    assert isinstance(plan, _Plan)
    if raised is not None:
        raise raised
    if plan.error:
        raise CheckpointError(plan.error)
    return _filled(given if mesh.is_first else None, plan, mesh, device, others)


def _with_others_materialised(
    given: Mapping[str, Any], managed: Collection[str]
) -> Mapping[str, Any]:
    """Load lazy values of unmanaged entries, so that all ranks learn of a failure."""
    found = collections.OrderedDict(
        (
            key,
            materialised(value, key)
            if is_tensor(value) and clean_name(key) not in managed
            else value,
        )
        for key, value in given.items()
    )
    if (metadata := getattr(given, "_metadata", None)) is not None:
        setattr(found, "_metadata", metadata)
    return found


def _plan_of(
    given: Mapping[str, Any], managed: Collection[str], others: Mapping[str, torch.Tensor | None]
) -> _Plan:
    plan = _Plan("", [], [], [], {}, list(given), getattr(given, "_metadata", None))
    for key, value in given.items():
        if isinstance(value, torch.Tensor) and is_sharded(value):
            raise _refused(
                "A sharded value cannot be loaded from one rank.",
                "whole tensors on rank 0, or every rank's own part of sharded ones on every rank",
                f"a {type(value).__name__} for {key!r}, and ranks without a state dict",
                "load_state_dict, with rank0_only=True",
            )
        if clean_name(key) in managed:
            plan.managed.append(key)
            plan.lazy.extend([] if isinstance(value, torch.Tensor) else [key])
        elif isinstance(value, torch.Tensor) and _takes_in_place(others.get(clean_name(key))):
            plan.tensors.append(key)
        else:
            plan.objects[key] = value.cpu() if isinstance(value, torch.Tensor) else value
    return plan


def _takes_in_place(target: torch.Tensor | None) -> bool:
    return target is not None and _torch_private.is_plain(target)


def _filled(
    given: Mapping[str, Any] | None,
    plan: _Plan,
    mesh: Mesh,
    device: torch.device,
    others: Mapping[str, torch.Tensor | None],
) -> MutableMapping[str, Any]:
    """given: rank 0's state dict; None on the others."""
    lazy = set(plan.lazy)
    found: dict[str, Any] = dict(plan.objects) if given is None else dict(given)
    found.update(
        {
            key: Rank0Value(None if given is None else given[key], key in lazy)
            for key in plan.managed
        }
    )
    for key in plan.tensors:
        target = others[clean_name(key)]
        assert target is not None
        value = target.detach()
        if given is not None:  # sent as the others keep it
            value = given[key].detach().to(value.device, value.dtype).reshape(value.shape)
        broadcast_states([value], mesh, device)
        if given is None:
            found[key] = value
    filled = collections.OrderedDict((key, found[key]) for key in plan.keys)
    if plan.metadata is not None:
        setattr(filled, "_metadata", plan.metadata)
    return filled


def _refused(what: str, expected: str, got: str, where: str) -> CheckpointError:
    return CheckpointError.of(
        what,
        expected=expected,
        got=got,
        where=where,
        fix="call load_state_dict(...) on all ranks, on rank 0 with the whole state dict, on "
        "the others with it or with {}",
    )


@dataclasses.dataclass(frozen=True)
class Rank0Value:
    """A parameter's value that only rank 0 has. It is broadcast when the parameter's unit is
    loaded."""

    value: Any  # a tensor, or a lazy value; None on the other ranks
    is_lazy: bool = False  # the same on all ranks; a lazy value may fail to load


def broadcast_values(group: Group, found: dict[int, Any]) -> dict[int, Any]:
    """Broadcast the values that only rank 0 has. Collective if there are any.

    Raises CheckpointError, on all ranks, if a lazy value there does not load.
    """
    sent: dict[int, torch.Tensor] = {}
    error: CheckpointError | None = None
    store = store_of(group)
    for index, value in found.items():
        if not isinstance(value, Rank0Value):
            continue
        shape, dtype = store.shape(index), store.dtype
        if value.value is None:
            sent[index] = torch.empty(shape, dtype=dtype, device=group.device)
        elif error is None:
            try:
                own = materialised(value.value, store.orig_params[index].name)
                sent[index] = own.detach().to(group.device, dtype).reshape(shape).contiguous()
            except CheckpointError as caught:
                error = caught
    communicators = (
        group.replica,
        group.shard,
    )  # from rank 0 to the first rank of every replica, and on to the rest
    if any(isinstance(value, Rank0Value) and value.is_lazy for value in found.values()):
        told = "" if error is None else str(error)
        for each in communicators:
            told = each.gather_objects(told)[0]
        if told:
            raise error or CheckpointError(told)
    if sent:
        for each in communicators:
            each.broadcast(list(sent.values()), f"the parameters of {group.name} that are loaded")
    return {**found, **sent}
