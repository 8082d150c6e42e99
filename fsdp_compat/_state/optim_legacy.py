"""The parts of the older optimizer-state calls that the newer ones lack: ``optim_input`` instead of
the optimizer, and dicts with other keys."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import AssertedUsageError, CheckpointError, TypeUsageError, UsageError, explain
from .names import clean_name


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
