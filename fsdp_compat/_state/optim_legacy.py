"""The six older calls for optimizer state, which newer releases of torch remove one by one. They
run the same algorithm as the newer calls."""

from __future__ import annotations

import copy
import enum
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..api import as_ours
from ..errors import (
    AssertedUsageError,
    CheckpointError,
    TypeUsageError,
    UsageError,
    require_bools,
    require_group,
    require_model_and_optimizer,
    require_module,
    wrong_type,
)
from .optim_contents import not_a_state_dict, numbered_names, other_form, ownership_of
from .optim_export import ExportForm, Values, export_optim_state
from .optim_import import LoadOptions, import_optim_state
from .units import clean_name, names_before, units_of

_Input = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class OptimStateKeyType(enum.Enum):
    """How the state in an optimizer's dict is keyed: by parameter names, or by numbers."""

    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: _Input = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer's whole state by parameter names, on the CPU; with ``rank0_only``, {}
    on other ranks.

    Collective: one gather per flat parameter and state, like ``optim_state_dict`` in the full form.
    """
    where = _called("full_optim_state_dict", "optim_state_dict", model, optim, group)
    require_bools(where, rank0_only=rank0_only)
    groups = _groups_of(optim_input, optim, model, where)
    form = ExportForm(Values.WHOLE, to_cpu=True, rank0_only=rank0_only)
    return export_optim_state(model, optim, groups, None, form, group=group, where=where)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the optimizer's state by parameter names, in the sharded form, regardless of the form
    that is set.

    Collective: one small exchange; tensors are not sent.
    """
    where = _called("sharded_optim_state_dict", "optim_state_dict", model, optim, group)
    form, groups = ExportForm(Values.BOXES, to_cpu=True), optim.param_groups
    return export_optim_state(model, optim, groups, None, form, where=where, first_step=True)


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: _Input = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return the dict that the optimizer loads on this rank, from a full dict that every rank has.
    Collective: one small exchange."""
    where = _called("shard_full_optim_state_dict", "optim_state_dict_to_load", model, optim)
    return _to_load(full_optim_state_dict, model, optim_input, optim, where)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """Return the dict that the optimizer loads on this rank, from a sharded dict.

    Collective: one small exchange; values that are sharded differently than the model are gathered.
    """
    where = _called("flatten_sharded_optim_state_dict", "optim_state_dict_to_load", model, optim)
    require_model_and_optimizer(model, optim, where)
    return _to_load(sharded_optim_state_dict, model, None, optim, where)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: _Input = None,
    optim: Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """Return the dict that the optimizer loads on this rank, from a full dict that only rank 0
    needs to have.

    Collective: rank 0 sends one state of one unit at a time.
    """
    where = _called(
        "scatter_full_optim_state_dict", "optim_state_dict_to_load", model, optim, group
    )
    return _to_load(full_optim_state_dict, model, optim_input, optim, where, from_rank0=True)


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: _Input = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state dict keyed by parameter names, or by numbers, however it was
    keyed; values are not copied.

    model: wrapped or not. Numbers are those of the unwrapped model's optimizer: the parameters of a
    FlatParameter are numbered in the model's order. Sends nothing. Raises UsageError for keys of
    several kinds, and CheckpointError for a parameter that the model or the optimizer does not
    have. ``optim_state_dict_to_load`` accepts both kinds of keys.
    """
    where = _called("rekey_optim_state_dict", "optim_state_dict_to_load", model, optim)
    kind = as_ours(optim_state_key_type, OptimStateKeyType, "optim_state_key_type")
    if kind is None:
        raise wrong_type("optim_state_key_type", "an OptimStateKeyType", kind, where)
    if (found := other_form(optim_state_dict)) is not None:
        raise not_a_state_dict(CheckpointError, *found, where)
    groups = [dict(group) for group in optim_state_dict.get("param_groups", ())]
    used = [*optim_state_dict["state"], *(key for group in groups for key in group["params"])]
    kinds = {type(key) for key in used}
    if len(kinds) > 1 or not kinds <= {int, str}:
        raise UsageError.of(
            "The keys of the optimizer state dict are of several kinds.",
            expected="parameter names everywhere, or numbers everywhere",
            got=", ".join(sorted(kind.__name__ for kind in kinds)),
            where=where,
            fix="pass what full_optim_state_dict(...) or optimizer.state_dict() returned, "
            "unchanged",
        )
    if kinds == {str if kind is OptimStateKeyType.PARAM_NAME else int}:
        return dict(optim_state_dict)
    numbers = _numbers(model, _groups_of(optim_input, optim, model, where), where)
    keys: dict[Any, Any] = {key: numbers.get(clean_name(str(key))) for key in used}
    if kind is OptimStateKeyType.PARAM_NAME:
        names = {number: name for name, number in reversed(numbers.items())}
        keys = {key: names.get(key) for key in used}
    unknown = [key for key in used if keys[key] is None]
    if unknown:
        raise CheckpointError.of(
            "The optimizer state dict does not belong to the model and the optimizer.",
            expected="state of parameters that the optimizer holds and the model has under "
            "one name",
            got=f"the key {unknown[0]!r}",
            where=where,
            fix="pass the model and the optimizer that the dict comes from, or the ones "
            "that will load it",
        )
    result: dict[str, Any] = {
        "state": {keys[key]: value for key, value in optim_state_dict["state"].items()}
    }
    if "param_groups" in optim_state_dict:
        result["param_groups"] = [
            {
                **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
                "params": sorted(keys[key] for key in group["params"]),
            }
            for group in groups
        ]
    return result


def _numbers(model: nn.Module, groups: list[dict[str, Any]], where: str) -> dict[str, int]:
    """Return how an optimizer numbers a model's parameters, by their names before wrapping. A
    shared parameter has several; the one that it goes by comes first."""
    first = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    if units := units_of(model):
        by_group = numbered_names(ownership_of(groups, where, units, model), names_before(model))
    else:
        by_group = [[first.get(parameter, "") for parameter in g["params"]] for g in groups]
    listed = [name for of_group in by_group for name in of_group]
    numbers = {name: number for number, name in enumerate(listed) if name}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first[parameter] in numbers:
            numbers.setdefault(clean_name(name), numbers[first[parameter]])
    return numbers


def _groups_of(
    optim_input: Iterable[Any] | None, optim: Optimizer | None, model: nn.Module, where: str
) -> list[dict[str, Any]]:
    """Return parameter groups in the order in which an optimizer numbers its parameters.

    They are those of ``optim_input``, the argument that an optimizer is created from; without it,
    those of the optimizer; without either, one group with all the model's parameters.

    Raises UsageError for an input that is neither parameters nor parameter groups.
    """
    if optim_input is None:
        return optim.param_groups if optim is not None else [{"params": list(model.parameters())}]
    is_tensor, is_iterable = (isinstance(optim_input, kind) for kind in (torch.Tensor, Iterable))
    given: list[Any] = [optim_input] if is_tensor else list(optim_input if is_iterable else ())
    if given and all(isinstance(item, torch.Tensor) for item in given):
        return [{"params": given}]
    are_dicts = all(isinstance(item, dict) for item in given)
    if not given or not are_dicts or not all("params" in group for group in given):
        kind = AssertedUsageError if given else UsageError
        raise (kind if are_dicts and is_iterable else TypeUsageError).of(
            "optim_input is not what an optimizer is created from.",
            expected="parameters, or dicts with 'params'",
            got=f"a {type(optim_input).__name__} with {len(given)} item(s)",
            where=f"argument 'optim_input' of {where}",
            fix="leave it out and pass optim=, the optimizer",
        )
    listed = ([p] if isinstance(p, torch.Tensor) else list(p) for p in (g["params"] for g in given))
    return [{**group, "params": params} for group, params in zip(given, listed, strict=True)]


def _to_load(
    state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: Iterable[Any] | None,
    optim: Optimizer | None,
    where: str,
    from_rank0: bool = False,
) -> dict[str, Any]:
    groups = _groups_of(optim_input, optim, model, where)
    label = type(optim).__name__ if optim is not None else "the optimizer"
    wanted = LoadOptions(from_rank0, as_saved=True)
    return import_optim_state(model, groups, state_dict, wanted, label, where)


def _called(old: str, new: str, model: Any, optim: Any, group: Any = None) -> str:
    """Warn of a call, check its arguments (``optim`` may be None where the call allows it), and
    return what errors say of it."""
    warnings.warn(
        f"FullyShardedDataParallel.{old} is deprecated; use FullyShardedDataParallel.{new} "
        "instead.",
        DeprecationWarning,
        stacklevel=3,
    )
    where = f"{old}(...)"
    if optim is None and new == "optim_state_dict_to_load":
        require_module(model, where)
    else:
        require_model_and_optimizer(model, optim, where)
    require_group(group, where)
    return where
