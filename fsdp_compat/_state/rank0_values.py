"""Loading a full state dict that only rank 0 has on all ranks.

Names and values that are not tensors are sent once, pickled. Unmanaged parameters and buffers are
broadcast straight into their memory. A unit's parameters are sent when the unit is loaded
(`Rank0Value`), so that only one unit is in memory at a time."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch

from .. import _torch_private
from .._comm.communicator import communicator
from .._comm.mesh import Mesh
from .._engine.preparation import broadcast_states
from ..errors import CheckpointError
from .names import clean_name
from .unit_loading import Rank0Value
from .values import is_sharded, is_tensor, materialised


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
