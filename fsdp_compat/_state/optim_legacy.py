"""The six older calls for optimizer state, which newer releases of torch remove one by one. They
run the same algorithm as the newer calls."""

from __future__ import annotations

import copy
import enum
import warnings
from collections.abc import Iterable, Mapping, Sequence
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
    explain,
    require_bools,
    require_group,
    require_model_and_optimizer,
    require_module,
    wrong_type,
)
from .optim_calls import export_optim_state, import_optim_state
from .optim_contents import numbered_names, other_form, ownership_of
from .optim_export import Values
from .units import clean_name, names_before, units_of


class OptimStateKeyType(enum.Enum):
    """How the state in an optimizer's dict is keyed: by parameter names, or by numbers."""

    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer's whole state by parameter names, on the CPU; with ``rank0_only``, {}
    on other ranks.

    Collective: one gather per flat parameter and state, like ``optim_state_dict`` in the full form.
    """
    where = "full_optim_state_dict(model, optim)"
    _deprecated("full_optim_state_dict", "optim_state_dict")
    require_model_and_optimizer(model, optim, where)
    require_group(group, where)
    require_bools(where, rank0_only=rank0_only)
    groups = groups_of_input(optim_input, optim, model, where)
    return export_optim_state(
        model,
        optim,
        groups,
        None,
        values=Values.WHOLE,
        to_cpu=True,
        rank0_only=rank0_only,
        group=group,
        where=where,
    )


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the optimizer's state by parameter names, in the sharded form, regardless of the form
    that is set.

    Collective: one small exchange; tensors are not sent.
    """
    where = "sharded_optim_state_dict(model, optim)"
    _deprecated("sharded_optim_state_dict", "optim_state_dict")
    require_model_and_optimizer(model, optim, where)
    require_group(group, where)
    return export_optim_state(
        model,
        optim,
        optim.param_groups,
        None,
        values=Values.BOXES,
        to_cpu=True,
        rank0_only=False,
        group=group,
        where=where,
        first_step=True,
    )


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return the dict that the optimizer loads on this rank, from a full dict that every rank has.
    Collective: one small exchange."""
    where = "shard_full_optim_state_dict(full_optim_state_dict, model)"
    _deprecated("shard_full_optim_state_dict", "optim_state_dict_to_load")
    return _given(full_optim_state_dict, model, optim_input, optim, rank0_only=False, where=where)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """Return the dict that the optimizer loads on this rank, from a sharded dict.

    Collective: one small exchange; values that are sharded differently than the model are gathered.
    """
    where = "flatten_sharded_optim_state_dict(sharded_optim_state_dict, model, optim)"
    _deprecated("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    require_model_and_optimizer(model, optim, where)
    return _given(sharded_optim_state_dict, model, None, optim, rank0_only=False, where=where)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    optim: Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """Return the dict that the optimizer loads on this rank, from a full dict that only rank 0
    needs to have.

    Collective: rank 0 sends one state of one unit at a time.
    """
    where = "scatter_full_optim_state_dict(full_optim_state_dict, model)"
    _deprecated("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    require_group(group, where)
    return _given(full_optim_state_dict, model, optim_input, optim, rank0_only=True, where=where)


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state dict keyed by parameter names, or by numbers, however it was
    keyed; values are not copied.

    model: wrapped or not. Numbers are those of the unwrapped model's optimizer: the parameters of a
    FlatParameter are numbered in the model's order. Sends nothing. Raises UsageError for keys of
    several kinds, and CheckpointError for a parameter that the model or the optimizer does not
    have. ``optim_state_dict_to_load`` accepts both kinds of keys.
    """
    where = "rekey_optim_state_dict(optim_state_dict, optim_state_key_type, model)"
    _deprecated("rekey_optim_state_dict", "optim_state_dict_to_load")
    kind = as_ours(optim_state_key_type, OptimStateKeyType, "optim_state_key_type")
    if kind is None:
        raise wrong_type(
            "optim_state_key_type", "an OptimStateKeyType", optim_state_key_type, where
        )
    _require_model(model, optim, where)
    if (found := other_form(optim_state_dict)) is not None:
        raise CheckpointError.of(
            "This is not an optimizer state dict.",
            expected=found[0],
            got=f"a {type(found[1]).__name__}",
            where=where,
            fix="pass what full_optim_state_dict(...) or optimizer.state_dict() returned",
        )
    groups = groups_of_input(optim_input, optim, model, where)
    units, names = units_of(model), None
    if units:
        names = numbered_names(ownership_of(groups, where, units, model), names_before(model))
    numbering = Numbering(model, groups, names)
    return (numbering.by_names if kind is OptimStateKeyType.PARAM_NAME else numbering.by_numbers)(
        optim_state_dict
    )


def _given(
    state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: Iterable[Any] | None,
    optim: Optimizer | None,
    *,
    rank0_only: bool,
    where: str,
) -> dict[str, Any]:
    _require_model(model, optim, where)
    groups = groups_of_input(optim_input, optim, model, where)
    label = type(optim).__name__ if optim is not None else "the optimizer"
    return import_optim_state(
        model, groups, state_dict, rank0_only=rank0_only, label=label, where=where, as_saved=True
    )


def _require_model(model: Any, optim: Any, where: str) -> None:
    """Raise UsageError unless ``model`` is a module and ``optim`` is None or an optimizer."""
    if optim is None:
        require_module(model, where)
    else:
        require_model_and_optimizer(model, optim, where)


def _deprecated(old: str, new: str) -> None:
    warnings.warn(
        f"FullyShardedDataParallel.{old} is deprecated; use FullyShardedDataParallel.{new} "
        "instead.",
        DeprecationWarning,
        stacklevel=3,
    )


def groups_of_input(
    optim_input: Iterable[Any] | None,
    optim: torch.optim.Optimizer | None,
    model: nn.Module,
    call: str,
) -> list[dict[str, Any]]:
    """Return parameter groups in the order in which an optimizer numbers its parameters.

    They are those of ``optim_input``, the argument that an optimizer is created from; without it,
    those of the optimizer; without either, one group with all the model's parameters.

    Raises UsageError for an input that is neither parameters nor parameter groups.
    """
    if optim_input is None:
        return optim.param_groups if optim is not None else [{"params": list(model.parameters())}]
    try:
        given: list[Any] = (
            [optim_input] if isinstance(optim_input, torch.Tensor) else list(optim_input)
        )
    except TypeError:
        given = []
    if not given:
        raise (UsageError if isinstance(optim_input, Iterable) else TypeUsageError)(
            _wrong_input(optim_input, call)
        )
    if all(isinstance(item, torch.Tensor) for item in given):
        return [{"params": given}]
    if not all(isinstance(item, dict) for item in given):
        raise TypeUsageError(_wrong_input(optim_input, call))
    if not all("params" in group for group in given):
        raise AssertedUsageError(_wrong_input(optim_input, call))
    return [
        {
            **g,
            "params": [g["params"]] if isinstance(g["params"], torch.Tensor) else list(g["params"]),
        }
        for g in given
    ]


def _wrong_input(optim_input: object, call: str) -> str:
    return explain(
        "optim_input is not what an optimizer is created from.",
        expected="parameters, or dicts with 'params'",
        got=f"a {type(optim_input).__name__}"
        + (f" of {len(optim_input)}" if isinstance(optim_input, (list, tuple, dict)) else ""),
        where=f"argument 'optim_input' of {call}",
        fix="leave it out and pass optim=, the optimizer",
    )


class Numbering:
    """How an optimizer numbers a model's parameters. Names are those before wrapping."""

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[Mapping[str, Any]],
        names: Sequence[Sequence[str]] | None,
    ) -> None:
        """names: by parameter group, for a model with units; None for any other model."""
        first = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
        if names is None:
            self.names = [first.get(parameter) for group in groups for parameter in group["params"]]
        else:
            self.names = [name for of_group in names for name in of_group]
        self.numbers = {name: number for number, name in enumerate(self.names) if name is not None}
        # A shared parameter has several names.
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if first[parameter] in self.numbers:
                self.numbers.setdefault(clean_name(name), self.numbers[first[parameter]])

    def by_names(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dict that is keyed by numbers with names as keys instead; values are the same
        objects. A dict that is keyed by names is returned unchanged.

        Raises UsageError for a dict whose keys are of several kinds, CheckpointError for a number
        that no parameter has.
        """
        return (
            dict(state_dict)
            if _kinds(state_dict) == {str}
            else _rekeyed(state_dict, dict(enumerate(self.names)))
        )

    def by_numbers(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The opposite of ``by_names``."""
        if _kinds(state_dict) == {int}:
            return dict(state_dict)
        return _rekeyed(
            state_dict,
            {name: self.numbers.get(clean_name(str(name))) for name in _keys(state_dict)},
        )


def _keys(state_dict: Mapping[str, Any]) -> list[Any]:
    return [
        *state_dict["state"],
        *(key for group in state_dict.get("param_groups", ()) for key in group["params"]),
    ]


def _kinds(state_dict: Mapping[str, Any]) -> set[type]:
    """Return the types of the keys: int or str, or none for an empty dict."""
    kinds = {type(key) for key in _keys(state_dict)}
    if len(kinds) > 1 or not kinds <= {int, str}:
        raise UsageError.of(
            "The keys of the optimizer state dict are of several kinds.",
            expected="parameter names everywhere, or numbers everywhere",
            got=", ".join(sorted(kind.__name__ for kind in kinds)),
            where="rekey_optim_state_dict",
            fix="pass what full_optim_state_dict(...) or optimizer.state_dict() returned, "
            "unchanged",
        )
    return kinds


def _rekeyed(state_dict: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    for key in _keys(state_dict):
        if keys.get(key) is None:
            raise CheckpointError.of(
                "The optimizer state dict does not belong to the model and the optimizer.",
                expected="state of parameters that the optimizer holds and the model has under "
                "one name",
                got=f"the key {key!r}",
                where="rekey_optim_state_dict",
                fix="pass the model and the optimizer that the dict comes from, or the ones "
                "that will load it",
            )
    result: dict[str, Any] = {
        "state": {keys[key]: value for key, value in state_dict["state"].items()}
    }
    if "param_groups" in state_dict:
        result["param_groups"] = [
            {
                **{k: copy.deepcopy(v) for k, v in g.items() if k != "params"},
                "params": sorted(keys[key] for key in g["params"]),
            }
            for g in state_dict["param_groups"]
        ]
    return result
