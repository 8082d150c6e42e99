"""The configuration objects equal torch's, and torch's own are accepted in their place."""

from __future__ import annotations

import dataclasses
import enum
import sys
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import api as torch_api

from fsdp_compat import OptimStateKeyType, api
from fsdp_compat.errors import UsageError

ENUMS = [name for name in torch_api.__all__ if issubclass(getattr(torch_api, name), enum.Enum)]
DATACLASSES = [
    name for name in torch_api.__all__ if dataclasses.is_dataclass(getattr(torch_api, name))
]

# Fields, with defaults, that torch does not have; they come last.
OWN: dict[str, dict[str, Any]] = {"ShardedStateDictConfig": {"as_views": False}}


def default_of(cls: type) -> Any:
    """An instance with default fields. StateDictSettings has no defaults and gets full dicts."""
    if cls.__name__ != "StateDictSettings":
        return cls()
    home = sys.modules[cls.__module__]
    config, optim_config = home.FullStateDictConfig(), home.FullOptimStateDictConfig()
    return cls(home.StateDictType.FULL_STATE_DICT, config, optim_config)


def changed(value: Any) -> Any:
    """A copy of a dataclass in which no flag, dtype or tuple of classes has its default."""
    news: dict[Any, Any] = {type(None): torch.bfloat16, tuple: (torch.nn.LayerNorm,)}
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return type(value)(
        **{
            name: not old if isinstance(old, bool) else news.get(type(old), old)
            for name, old in fields.items()
        }
    )


def test_public_names_equal_those_of_torch() -> None:
    assert api.__all__ == sorted(torch_api.__all__)
    assert sorted([*ENUMS, *DATACLASSES]) == api.__all__


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_the_members_of_torch_and_translate_them(name: str) -> None:
    ours, theirs = getattr(api, name), getattr(torch_api, name)
    assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in theirs]
    assert [api.as_ours(member, ours, "argument") for member in theirs] == list(ours)


@pytest.mark.parametrize("name", DATACLASSES)
def test_dataclasses_have_the_fields_of_torch_and_translate_their_values(name: str) -> None:
    def fields(cls: Any) -> list[tuple[str, object]]:
        return [(field.name, field.default) for field in dataclasses.fields(cls)]

    ours, theirs = getattr(api, name), getattr(torch_api, name)
    assert fields(ours) == [*fields(theirs), *OWN.get(name, {}).items()]
    assert [base.__name__ for base in ours.__mro__] == [base.__name__ for base in theirs.__mro__]
    for make in (default_of, lambda cls: changed(default_of(cls))):
        expected = dataclasses.replace(make(ours), **OWN.get(name, {}))
        assert api.as_ours(make(theirs), ours, "argument") == expected


class UserPolicy(torch_api.MixedPrecision):
    """A subclass of a class of torch."""


@pytest.mark.parametrize(
    ("theirs", "expected", "ours"),
    [
        (
            torch_api.FullStateDictConfig(rank0_only=True),
            api.StateDictConfig,
            api.FullStateDictConfig(rank0_only=True),
        ),
        (
            UserPolicy(reduce_dtype=torch.float16),
            api.MixedPrecision,
            api.MixedPrecision(reduce_dtype=torch.float16),
        ),
        (torch_fsdp.OptimStateKeyType.PARAM_ID, OptimStateKeyType, OptimStateKeyType.PARAM_ID),
    ],
    ids=["the base is expected", "of a user's class", "of another module"],
)
def test_settings_of_torch_are_translated(theirs: Any, expected: type, ours: Any) -> None:
    got = api.as_ours(theirs, expected, "argument")
    assert type(got) is type(ours)
    assert got == ours


def of_torch(cls: type) -> type:
    cls.__module__ = "torch.distributed.fsdp.api"
    return cls


def test_additions_of_a_newer_torch_are_refused_if_used_and_ignored_otherwise() -> None:
    fields = [("offload_params", bool, False), ("compress", bool, False)]
    newer: Any = of_torch(dataclasses.make_dataclass("CPUOffload", fields))
    got = api.as_ours(newer(offload_params=True), api.CPUOffload, "cpu_offload")
    assert got == api.CPUOffload(True)
    with pytest.raises(UsageError, match=r"CPUOffload\(compress=True\)"):
        api.as_ours(newer(compress=True), api.CPUOffload, "cpu_offload")
    strategies: Any = of_torch(enum.Enum("ShardingStrategy", "EVEN"))
    with pytest.raises(UsageError, match=r"ShardingStrategy\.EVEN"):
        api.as_ours(strategies["EVEN"], api.ShardingStrategy, "sharding_strategy")


def test_fields_missing_in_an_older_torch_have_our_default() -> None:
    older: Any = of_torch(
        dataclasses.make_dataclass("MixedPrecision", [("param_dtype", object, None)])
    )
    precision = api.as_ours(older(torch.float16), api.MixedPrecision, "mixed_precision")
    assert precision == api.MixedPrecision(param_dtype=torch.float16)
