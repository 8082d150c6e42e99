"""What the older calls for optimizer state have of their own: an optimizer's input in its place, and dicts keyed anew."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .._checks import AssertedUsageError, TypeUsageError
from ..errors import CheckpointError, UsageError, explain
from .names import clean_name

__all__ = ["by_names", "by_numbers", "groups_of_input"]


def groups_of_input(
    optim_input: Iterable[Any] | None, optim: torch.optim.Optimizer | None, model: nn.Module, call: str
) -> list[dict[str, Any]]:
    """Return parameter groups in the order in which an optimizer numbers its parameters.

    Those of ``optim_input``, what an optimizer is made with; without it the optimizer's; without that, one group with all the
    model's parameters.

    Raises UsageError for an input that is neither parameters nor parameter groups.
    """
    if optim_input is None:
        return optim.param_groups if optim is not None else [{"params": list(model.parameters())}]
    try:
        given: list[Any] = [optim_input] if isinstance(optim_input, torch.Tensor) else list(optim_input)
    except TypeError:
        given = []
    if not given:
        raise (UsageError if isinstance(optim_input, Iterable) else TypeUsageError)(_wrong_input(optim_input, call))
    if all(isinstance(item, torch.Tensor) for item in given):
        return [{"params": given}]
    if not all(isinstance(item, dict) for item in given):
        raise TypeUsageError(_wrong_input(optim_input, call))
    if not all("params" in group for group in given):
        raise AssertedUsageError(_wrong_input(optim_input, call))
    return [{**g, "params": [g["params"]] if isinstance(g["params"], torch.Tensor) else list(g["params"])} for g in given]


def _wrong_input(optim_input: object, call: str) -> str:
    return explain(
        "optim_input is not what an optimizer is made with.",
        expected="parameters, or dicts with 'params'",
        got=f"a {type(optim_input).__name__}" + (f" of {len(optim_input)}" if isinstance(optim_input, (list, tuple, dict)) else ""),
        where=f"argument 'optim_input' of {call}",
        fix="leave it out and pass optim=, the optimizer",
    )


def by_names(state_dict: Mapping[str, Any], model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a dict keyed by numbers with the names of the model's parameters as keys; values are the same objects.

    Names are those before wrapping. Raises UsageError for a dict whose keys are of several kinds, or numbers of no parameter.
    """
    if _kinds(state_dict) == {str}:
        return dict(state_dict)
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    numbers = dict(enumerate(parameter for group in groups for parameter in group["params"]))
    return _rekeyed(state_dict, {number: names.get(parameter) for number, parameter in numbers.items()})


def by_numbers(state_dict: Mapping[str, Any], model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a dict keyed by names with the numbers that the optimizer gives the model's parameters as keys; see ``by_names``."""
    if _kinds(state_dict) == {int}:
        return dict(state_dict)
    named = {clean_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    numbers = {parameter: number for number, parameter in enumerate(p for group in groups for p in group["params"])}
    found = {name: numbers.get(parameter) for name, parameter in named.items()}
    return _rekeyed(state_dict, {name: found.get(clean_name(str(name))) for name in _keys(state_dict)})


def _keys(state_dict: Mapping[str, Any]) -> list[Any]:
    return [*state_dict["state"], *(key for group in state_dict["param_groups"] for key in group["params"])]


def _kinds(state_dict: Mapping[str, Any]) -> set[type]:
    """int, str, or nothing in an empty dict."""
    kinds = {type(key) for key in _keys(state_dict)}
    if len(kinds) > 1 or not kinds <= {int, str}:
        raise UsageError(
            explain(
                "The keys of the optimizer state dict are of several kinds.",
                expected="parameter names everywhere, or numbers everywhere",
                got=", ".join(sorted(kind.__name__ for kind in kinds)),
                where="rekey_optim_state_dict",
                fix="pass what full_optim_state_dict(...) or optimizer.state_dict() returned, unchanged",
            )
        )
    return kinds


def _rekeyed(state_dict: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    for key in _keys(state_dict):
        if keys.get(key) is None:
            raise CheckpointError(
                explain(
                    "The optimizer state dict does not belong to the model and the optimizer.",
                    expected="state of parameters that the optimizer holds and the model has under one name",
                    got=f"the key {key!r}",
                    where="rekey_optim_state_dict",
                    fix="pass the model without wrapping, or wrapped with use_orig_params=True, and its optimizer",
                )
            )
    groups = [
        {**{k: copy.deepcopy(v) for k, v in group.items() if k != "params"}, "params": sorted(keys[key] for key in group["params"])}
        for group in state_dict["param_groups"]
    ]
    return {"state": {keys[key]: value for key, value in state_dict["state"].items()}, "param_groups": groups}
