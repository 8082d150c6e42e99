"""auto_wrap_policy="auto" and class names: which blocks they find, and what they warn of."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import UsageError
from fsdp_compat._front_ends.flat.blocks import policy_of, repeated_blocks, warn_of_large_unit
from fsdp_compat._state.units import clean_name
from tests.support.ranks import on_ranks


class Layer(nn.Module):
    """A transformer layer, in outline: it repeats heads, which are no units of their own."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for head in self.heads:
            x = head(x)
        return self.mlp(x)


class OtherLayer(Layer):
    pass


class Stage(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(dim) for _ in range(2))


def layers(*classes: type[nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(cls() for cls in classes)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(4, 4), layers(Layer, Layer)), {"Layer": 2}),
        (nn.Sequential(*layers(Layer, Layer, Layer)), {"Layer": 3}),
        (nn.ModuleDict({"a": Layer(), "b": Layer()}), {"Layer": 2}),
        (layers(Layer, OtherLayer, Layer, OtherLayer), {"Layer": 2, "OtherLayer": 2}),
        (nn.Sequential(layers(Layer, Layer), layers(Layer, Layer)), {"Layer": 4}),
        (nn.Sequential(Stage(4), Stage(16)), {"Layer": 4}),  # sizes that differ much: stages
        (nn.Sequential(Stage(4), Stage(4)), {"Stage": 2}),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {}),  # no submodules
        (Layer(), {}),
        (layers(Layer), {}),
    ],
)
def test_blocks_are_siblings_of_one_class_with_submodules(
    model: nn.Module, expected: dict[str, int]
) -> None:
    found = repeated_blocks(model)
    assert {cls.__name__: len(blocks) for cls, blocks in found.items()} == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", "ModuleWrapPolicy({Layer})"),
        (["auto"], "ModuleWrapPolicy({Layer})"),
        ("Layer", "ModuleWrapPolicy({Layer})"),
        ({"Layer", "ReLU"}, "ModuleWrapPolicy({Layer, ReLU})"),
    ],
)
def test_names_and_auto_become_a_policy_of_classes(given: object, expected: str) -> None:
    assert repr(policy_of(given, nn.Sequential(*layers(Layer, Layer)))) == expected


@pytest.mark.parametrize("given", [None, {Layer}, [], len])
def test_everything_else_is_left_to_the_checks_of_policies(given: object) -> None:
    assert policy_of(given, Layer()) is given


def test_name_that_no_module_has_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UsageError) as raised:
        policy_of("Layers", nn.Sequential(*layers(Layer, Layer)))
    for fact in ("'Layers'", "wrapping a Sequential", "nearest names, Layer", "repeats Layer"):
        assert fact in str(raised.value)


def test_one_unit_with_most_parameters_of_a_large_model_is_warned_of() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(3500) for _ in range(4)))  # 147 million parameters
    root = {model: list(model.parameters())}
    with pytest.warns(UserWarning, match=r'holds 100% of .* repeats Layer: pass .*="auto"'):
        warn_of_large_unit(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_large_unit({layer: list(layer.parameters()) for layer in model})
        warn_of_large_unit({model: list(model[0].parameters()), nn.Linear(1, 1): []})
        warn_of_large_unit({})


@on_ranks(2)
def test_auto_makes_a_unit_of_each_block() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*layers(Layer, Layer)))
    wrapped = FSDP(model, auto_wrap_policy="auto")
    wrapped(torch.ones(2, 4)).sum().backward()
    found = [clean_name(name) for name, child in wrapped.named_modules() if isinstance(child, FSDP)]
    assert found == ["", "1.0", "1.1"]
