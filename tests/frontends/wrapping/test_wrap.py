"""Which modules become units: the same as with torch for every policy, with two intended
differences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp._wrap_utils import _auto_wrap

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, StateError, UsageError
from fsdp_compat import wrap as our_wrap
from tests.support.models import Block, Stack, encoder_layer
from tests.support.parity import units_of
from tests.support.ranks import on_ranks
from tests.support.sampling import at_most

Units = dict[str, dict[str, Any]]  # name of a module -> settings of its unit

by_class, custom = our_wrap.ModuleWrapPolicy, our_wrap.CustomPolicy
always, by_size = our_wrap.always_wrap_policy, our_wrap.size_based_auto_wrap_policy
TwoBlocks = partial(Stack, 2)


class Recorder(nn.Module):
    """A wrapper that only records its arguments."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.kwargs = kwargs


class OtherRecorder(Recorder):
    pass


# The choice of each policy.


def from_size(numel: int, **options: Any) -> Any:
    return partial(by_size, min_num_params=numel, **options)


def layers_of(*classes: type[nn.Module]) -> Any:
    return partial(our_wrap.transformer_auto_wrap_policy, transformer_layer_cls=set(classes))


def is_a(*classes: type[nn.Module]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)


def wrapped_block() -> nn.Module:
    model = TwoBlocks()
    model.blocks[0] = FSDP(model.blocks[0])
    return model


def wrapped_linear() -> nn.Module:
    small = nn.Sequential(FSDP(nn.Linear(9, 9)), nn.Linear(1, 1))
    return nn.Sequential(small, nn.Linear(9, 9))


BLOCKS, LINEARS = ["blocks.0", "blocks.1"], ["linear1", "linear2"]
CHOICES: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "wrapped, function": (wrapped_block, custom(is_a(Block, FSDP)), BLOCKS),
    "wrapped, layers": (wrapped_block, layers_of(Block, FSDP), BLOCKS),
    "wrapped, size": (wrapped_linear, from_size(10), ["0.0", "1"]),
    # the output projection is never a unit, and counted for its attention: 72 of 288
    "attention, classes": (encoder_layer, by_class({nn.Linear}), LINEARS),
    "attention, function": (encoder_layer, custom(is_a(nn.Linear)), LINEARS),
    "attention, layers": (encoder_layer, layers_of(nn.Linear), LINEARS),
    "attention, policy of torch": (
        encoder_layer,
        torch_wrap.ModuleWrapPolicy({nn.Linear}),
        LINEARS,
    ),
    "attention, size": (encoder_layer, from_size(217, force_leaf_modules=set()), ["self_attn"]),
    "attention, smaller": (
        encoder_layer,
        from_size(60, force_leaf_modules=set()),
        ["self_attn", *LINEARS],
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CHOICES)
@on_ranks(1)
def test_policies_choose_modules(case: str) -> None:
    make, policy, chosen = CHOICES[case]
    assert list(units_of(FSDP(make(), auto_wrap_policy=policy))) == ["", *chosen]


# The same as with torch.

CLASSES = (Block, nn.Sequential, nn.Linear, nn.LayerNorm, nn.ReLU)
CLASSES += (nn.ModuleList, nn.ModuleDict, nn.BatchNorm1d)


def policies(library: Any) -> st.SearchStrategy[Any]:
    """Every kind of policy, made of functions and classes in ``library``: our module or torch's."""
    classes = st.sets(st.sampled_from(CLASSES), min_size=1)
    optional = st.none() | classes

    def over(policy: Any, argument: str) -> st.SearchStrategy[Any]:
        return classes.map(lambda some: partial(policy, **{argument: some}))

    of_classes = classes.map(lambda some: partial(is_one_of, classes=some))
    functions = st.one_of(
        st.just(library.always_wrap_policy),
        over(library.transformer_auto_wrap_policy, "transformer_layer_cls"),
        over(library._module_wrap_policy, "module_classes"),
        over(library._wrap_module_cls_individually, "module_classes"),
        of_classes.map(lambda is_one: partial(library.lambda_auto_wrap_policy, lambda_fn=is_one)),
        st.builds(
            partial,
            st.just(library.size_based_auto_wrap_policy),
            min_num_params=st.integers(1, 60),
            force_leaf_modules=optional,
            exclude_wrap_modules=optional,
        ),
    )
    either = st.lists(functions, min_size=1, max_size=2).map(
        lambda some: partial(library._or_policy, policies=some)
    )
    customs = classes.map(lambda some: library.CustomPolicy(partial(answer_for, classes=some)))
    return functions | either | classes.map(library.ModuleWrapPolicy) | customs


def is_one_of(module: nn.Module, classes: set[type]) -> bool:
    return type(module) in classes


def answer_for(module: nn.Module, classes: set[type]) -> bool | dict[str, Any]:
    chosen = type(module) in classes
    return {"forward_prefetch": True} if chosen and type(module) is Block else chosen


@st.composite
def models(draw: st.DrawFn, shared: bool = True) -> tuple[nn.Module, set[str]]:
    """Draw trees of containers and layers of a few sizes, and the names of modules to ignore.
    Layers, and whole subtrees if ``shared``, can be registered twice."""
    made: list[nn.Module] = []

    def leaf() -> nn.Module:
        linears = [partial(nn.Linear, size, 2) for size in (1, 2, 5)]
        others = [nn.ReLU, partial(nn.LayerNorm, 3), partial(nn.BatchNorm1d, 4), partial(Block, 2)]
        make: Callable[[], nn.Module] = draw(st.sampled_from([*others, *linears]))
        return make()

    def part(depth: int) -> nn.Module:
        again = [module for module in made if shared or not list(module.children())]
        if again and draw(st.integers(0, 5)) == 0:
            return draw(st.sampled_from(again))
        if depth == 0 or draw(st.integers(0, 2)) == 0:
            module = leaf()
        else:
            parts = [part(depth - 1) for _ in range(draw(st.integers(0, 3)))]
            named = {f"part{index}": inner for index, inner in enumerate(parts)}
            module = draw(
                st.sampled_from([nn.Sequential(*parts), nn.ModuleList(parts), nn.ModuleDict(named)])
            )
        made.append(module)
        return module

    root = nn.Sequential(*(part(3) for _ in range(draw(st.integers(1, 3)))), nn.Linear(1, 2))
    linears = [module for module in root.modules() if type(module) is nn.Linear]
    if len(linears) > 1 and draw(st.booleans()):
        linears[0].weight = linears[-1].weight
    names = [name for name, _ in root.named_modules() if name]
    return root, draw(st.sets(st.sampled_from(names), max_size=2))


PRECISIONS = st.none() | st.sampled_from(
    [(), (nn.BatchNorm1d,), (nn.LayerNorm, nn.BatchNorm1d)]
).map(lambda classes: MixedPrecision(torch.bfloat16, _module_classes_to_ignore=classes))


DEFAULTS = {"mixed_precision": MixedPrecision(), "forward_prefetch": False}


def units_with_torch(
    root: nn.Module, policy: Any, ignored: set[str], precision: MixedPrecision | None
) -> Units:
    """Return the modules that torch wraps, without those that have only ignored parameters, which
    it wraps to no effect."""
    modules = dict(copy.deepcopy(root).named_modules())
    names = {module: name for name, module in modules.items()}
    ignored_modules = {inner for name in ignored for inner in modules[name].modules()}
    parameters = {p for module in ignored_modules for p in module.parameters()}
    options = {"mixed_precision": precision, "forward_prefetch": False, "use_orig_params": True}
    _auto_wrap(modules[""], policy, ignored_modules, parameters, options, Recorder)
    return {
        names[each.module]: {name: each.kwargs[name] or DEFAULTS[name] for name in DEFAULTS}
        for each in modules[""].modules()
        if isinstance(each, Recorder) and set(each.parameters()) - parameters
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["ours", "torch"])
@on_ranks(1)
@settings(max_examples=at_most(40, of_all=150), deadline=None)
@given(data=st.data(), precision=PRECISIONS)
def test_random_models_are_wrapped_as_by_torch(
    library: str, data: st.DataObject, precision: MixedPrecision | None
) -> None:
    policy: Any = data.draw(policies({"ours": our_wrap, "torch": torch_wrap}[library]))
    root, ignored = data.draw(models(shared=hasattr(policy, "_run_policy")))
    reference = policy
    if isinstance(policy, custom):
        reference = torch_wrap.CustomPolicy(policy._lambda_fn)
    elif isinstance(policy, by_class):
        reference = torch_wrap.ModuleWrapPolicy(policy._module_classes)
    expected = units_with_torch(root, reference, ignored, precision)
    modules = [root.get_submodule(name) for name in ignored]
    options: dict[str, Any] = {"mixed_precision": precision, "ignored_modules": modules}
    units = units_of(FSDP(root, auto_wrap_policy=policy, use_orig_params=True, **options))
    units.pop("")
    assert expected == {
        name: {setting: getattr(unit, setting) for setting in DEFAULTS}
        for name, unit in units.items()
    }


# Replacing modules, and the functions that wrap with any wrapper.


def by_fsdp(root: nn.Module, policy: Any) -> None:
    FSDP(root, auto_wrap_policy=policy)


def by_recursive_wrap(root: nn.Module, policy: Any) -> None:
    our_wrap._recursive_wrap(root, policy, FSDP, set(), set(), only_wrap_children=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wraps", [by_fsdp, by_recursive_wrap])
@on_ranks(1)
def test_a_module_registered_twice_is_replaced_in_both_places(
    wraps: Callable[[nn.Module, Any], None],
) -> None:
    shared, other = Block(), Block()
    places = nn.ModuleDict({"again": shared, "other": other})
    root = nn.Sequential(nn.Sequential(shared, shared), places)
    wraps(root, partial(our_wrap._module_wrap_policy, module_classes={Block, nn.Linear}))
    unit = places["again"]
    assert isinstance(unit, FSDP) and unit.module is shared and isinstance(shared.up, FSDP)
    assert root[0][0] is root[0][1] is unit
    assert isinstance(places["other"], FSDP) and places["other"].module is other


@pytest.mark.parametrize("policy", [by_class({Block}), custom(is_a(Block)), layers_of(Block)])
def test_activation_checkpointing_of_torch_accepts_our_policies(policy: Any) -> None:
    root = TwoBlocks()
    apply_activation_checkpointing(root, auto_wrap_policy=policy)
    modules = root.named_modules()
    assert [name for name, m in modules if isinstance(m, CheckpointWrapper)] == BLOCKS


def test_wrap_wraps_only_inside_the_block_and_its_arguments_take_precedence() -> None:
    layer = nn.Linear(2, 2)
    assert our_wrap.wrap(layer, device_id=1) is layer
    with our_wrap.enable_wrap(wrapper_cls=Recorder, device_id=3, forward_prefetch=True):
        unit, other = our_wrap.wrap(layer, device_id=4), our_wrap.wrap(layer)
    assert isinstance(unit, Recorder) and isinstance(other, Recorder)
    assert unit.module is layer
    assert unit.kwargs == {"device_id": 4, "forward_prefetch": True}
    assert other.kwargs == {"device_id": 3, "forward_prefetch": True}
    assert our_wrap.wrap(layer) is layer


def test_a_nested_block_and_a_wrapper_that_is_not_callable_are_refused() -> None:
    nested = pytest.raises(StateError, match="cannot be nested")
    with our_wrap.enable_wrap(wrapper_cls=Recorder):
        with nested as caught, our_wrap.enable_wrap(wrapper_cls=OtherRecorder):
            pass
        assert isinstance(caught.value, NotImplementedError)
        assert type(our_wrap.wrap(nn.Linear(2, 2))) is Recorder, "the outer one continues"
    refused = pytest.raises(UsageError, match="wrapper_cls=FullyShardedDataParallel")
    with refused, our_wrap.enable_wrap(wrapper_cls=None):
        pass
