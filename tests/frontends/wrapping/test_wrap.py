"""Which modules become units: the same as with torch for every policy, with two intended
differences."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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

from fsdp_compat import wrap as our_wrap
from fsdp_compat._front_ends.flat.construction import plan_wrapping
from fsdp_compat.api import MixedPrecision
from fsdp_compat.errors import StateError, UsageError
from tests.support.sampling import at_most

Names = dict[str, dict[str, Any]]  # name of a module -> the keyword arguments of its unit


class Unit(nn.Module):
    """A wrapper that only records its arguments."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.kwargs = kwargs


class Wrapped(Unit):
    """A wrapper that is a unit already."""


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.act = nn.ReLU()


def blocks() -> nn.Module:
    """Two blocks in a ModuleList below an embedding: the shape of most models."""
    model = nn.Module()
    model.embed = nn.Embedding(10, 4)
    model.layers = nn.ModuleList([Block(), Block()])
    model.head = nn.Sequential(nn.Linear(4, 10), nn.Dropout())
    return model


def wrapped_block() -> nn.Module:
    model = blocks()
    model.layers[0] = Wrapped(model.layers[0])
    return model


def wrapped_linear() -> nn.Module:
    small = nn.Sequential(Wrapped(nn.Linear(9, 9)), nn.Linear(1, 1))
    return nn.Sequential(small, nn.Linear(9, 9))


def shared() -> nn.Module:
    """A module of 12 elements in two places."""
    linear = nn.Linear(5, 2)
    return nn.Sequential(nn.Sequential(linear), nn.Sequential(linear, nn.Linear(2, 2)))


def bare() -> nn.Module:
    """Most modules have no parameters."""
    linear, empty = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Dropout())
    return nn.Sequential(nn.ReLU(), empty, linear)


def attention() -> nn.Module:
    """Of 288 elements in its attention, 72 are in the output projection."""
    return nn.TransformerEncoderLayer(8, 2, 16)


def plan_names(
    root: nn.Module, policy: Any, ignored: set[nn.Module] | None = None, **kwargs: Any
) -> Names:
    """Return the choice of `plan_wrapping` by name, in order. Parameters of ``ignored`` modules are
    ignored too; every `Wrapped` is a unit already."""
    names = {module: name for name, module in root.named_modules()}
    parts = with_parameters(ignored or set())
    plan = plan_wrapping(root, policy, *parts, kwargs, is_wrapped=lambda m: type(m) is Wrapped)
    return {names[module]: arguments for module, arguments in plan.items()}


def torch_names(
    root: nn.Module, policy: Any, ignored: set[str] | None = None, **kwargs: Any
) -> Names:
    """Return the modules that torch wraps, by name, children first."""
    root, policy = copy.deepcopy((root, policy))
    modules = dict(root.named_modules())
    names = {module: name for name, module in modules.items()}
    found: Names = {}

    class Recorder(Unit):
        def __init__(self, module: nn.Module, **kwargs: Any) -> None:
            super().__init__(module, **kwargs)
            kwargs.pop("auto_wrap_policy", None)
            found[names[module]] = kwargs

    ignored_modules, ignored_parameters = with_parameters({modules[name] for name in ignored or ()})
    kwargs = {"mixed_precision": None, "use_orig_params": True, **kwargs}
    _auto_wrap(root, policy, ignored_modules, ignored_parameters, kwargs, Recorder)
    return found


def with_parameters(ignored: set[nn.Module]) -> tuple[set[nn.Module], set[nn.Parameter]]:
    modules = {inner for module in ignored for inner in module.modules()}
    return modules, {
        parameter for module in modules for parameter in module.parameters(recurse=False)
    }


# The choice of each policy.


by_class, custom = our_wrap.ModuleWrapPolicy, our_wrap.CustomPolicy
always, by_size = our_wrap.always_wrap_policy, our_wrap.size_based_auto_wrap_policy
by_lambda = our_wrap.lambda_auto_wrap_policy


def from_size(numel: int, **options: Any) -> Any:
    return partial(by_size, min_num_params=numel, **options)


def layers_of(*classes: type[nn.Module]) -> Any:
    return partial(our_wrap.transformer_auto_wrap_policy, transformer_layer_cls=set(classes))


def is_a(*classes: type[nn.Module]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)


LAYERS, LINEARS = ["layers.0", "layers.1"], ["linear1", "linear2"]
EVERY = ["embed", "layers.0.first", "layers.0.norm", "layers.0", "layers.1.first"]
EVERY += ["layers.1.norm", "layers.1", "layers", "head.0", "head"]
OTHERS = {"force_leaf_modules": {nn.Sequential}, "exclude_wrap_modules": {Block}}


@pytest.mark.parametrize(
    ("make", "policy", "chosen"),
    [
        (blocks, by_class({Block}), LAYERS),
        (blocks, by_class([nn.Linear]), ["layers.0.first", "layers.1.first", "head.0"]),
        (blocks, by_class({nn.Conv2d}), []),
        (blocks, custom(is_a(nn.Embedding)), ["embed"]),
        (blocks, custom(lambda module: {}), []),
        (blocks, layers_of(Block), LAYERS),
        (blocks, partial(by_lambda, lambda_fn=is_a(nn.Sequential)), ["head"]),
        (blocks, always, EVERY),
        # embed has 40 elements, a block 28 of which its Linear has 20, the head 50
        (blocks, from_size(28), ["embed", *LAYERS, "head.0"]),
        (blocks, from_size(50), ["head.0"]),
        (blocks, by_size, []),
        (blocks, from_size(28, **OTHERS), ["embed", "layers"]),
        (shared, by_class({nn.Linear}), ["0.0", "1.1"]),
        (shared, from_size(7), ["0.0"]),
        (wrapped_block, by_class({Block, Wrapped}), ["layers.1"]),
        (wrapped_block, custom(is_a(Block, Wrapped)), ["layers.1"]),
        (wrapped_block, layers_of(Block, Wrapped), ["layers.1"]),
        (wrapped_linear, from_size(10), ["1"]),
        (bare, always, ["2.0", "2"]),
        (bare, custom(lambda module: True), ["2.0", "2"]),
        # the output projection is never a unit, and counted for its attention
        (attention, by_class({nn.Linear}), LINEARS),
        (attention, custom(is_a(nn.Linear)), LINEARS),
        (attention, layers_of(nn.Linear), LINEARS),
        (attention, torch_wrap.ModuleWrapPolicy({nn.Linear}), LINEARS),
        (attention, from_size(60, force_leaf_modules=set()), ["self_attn", *LINEARS]),
        (attention, from_size(217, force_leaf_modules=set()), ["self_attn"]),
    ],
)
def test_policies_choose_modules_children_first(
    make: Callable[[], nn.Module], policy: Any, chosen: list[str]
) -> None:
    root = make()
    before = list(root.named_modules())
    assert list(plan_names(root, policy)) == chosen
    assert list(root.named_modules()) == before, "planning changes nothing"


def test_ignored_modules_and_parameters_are_neither_chosen_nor_counted() -> None:
    root = blocks()
    first = root.layers[0]
    assert list(plan_names(root, by_class({Block}), {first})) == ["layers.1"]
    assert list(plan_names(root, from_size(28), {first.norm})) == ["embed", "layers.1", "head.0"]


def test_size_policy_defaults_are_attributes_of_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = our_wrap.size_based_auto_wrap_policy
    excluded, leaves = policy.EXCLUDE_WRAP_MODULES, policy.FORCE_LEAF_MODULES
    assert (excluded, leaves) == ({nn.ModuleList, nn.ModuleDict}, {nn.MultiheadAttention})
    monkeypatch.setattr(policy, "FORCE_LEAF_MODULES", {nn.ModuleList})
    assert list(plan_names(blocks(), from_size(28))) == ["embed", "head.0"]
    monkeypatch.setattr(policy, "EXCLUDE_WRAP_MODULES", {nn.Embedding})
    assert list(plan_names(blocks(), from_size(28))) == ["head.0"]


def test_custom_policy_overrides_arguments_per_module() -> None:
    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return {"forward_prefetch": True} if type(module) is Block else is_a(nn.Embedding)(module)

    root_kwargs = {"forward_prefetch": False, "device_id": 3}
    assert plan_names(blocks(), custom(choose), **root_kwargs) == {
        "embed": {"forward_prefetch": False, "device_id": 3},
        "layers.0": {"forward_prefetch": True, "device_id": 3},
        "layers.1": {"forward_prefetch": True, "device_id": 3},
    }
    assert root_kwargs == {"forward_prefetch": False, "device_id": 3}


@pytest.mark.parametrize("policy", [by_class({Block}), always])
def test_units_do_not_share_their_arguments(policy: Any) -> None:
    root_kwargs = {"device_id": 3}
    root = blocks()
    plan = plan_wrapping(root, policy, set(), set(), root_kwargs)
    plan[root.layers[0]]["device_id"] = 4
    assert plan[root.layers[1]] == root_kwargs == {"device_id": 3}


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
    return (
        {"device_id": 4} if type(module) is Block and Block in classes else type(module) in classes
    )


@dataclass
class Model:
    """A random tree of modules, and the names of modules to ignore."""

    root: nn.Module
    ignored: set[str]


@st.composite
def models(draw: st.DrawFn, shared: bool = True) -> Model:
    """Draw trees of containers and layers of a few sizes. Layers, and whole subtrees if ``shared``,
    can be registered twice."""
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

    root = nn.Sequential(*(part(3) for _ in range(draw(st.integers(1, 3)))))
    linears = [module for module in root.modules() if type(module) is nn.Linear]
    if len(linears) > 1 and draw(st.booleans()):
        linears[0].weight = linears[-1].weight
    names = [name for name, _ in root.named_modules() if name]
    return Model(root, draw(st.sets(st.sampled_from(names), max_size=2)) if names else set())


def is_policy_object(policy: Any) -> bool:
    return hasattr(policy, "_run_policy")


def without_bare(root: nn.Module, ignored: set[nn.Module], names: Names) -> Names:
    """Drop modules without unignored parameters: torch wraps them, without effect."""
    modules = dict(root.named_modules())
    _, parameters = with_parameters(ignored)
    return {
        name: args
        for name, args in names.items()
        if any(p not in parameters for p in modules[name].parameters())
    }


PRECISIONS = st.none() | st.sampled_from(
    [(), (nn.BatchNorm1d,), (nn.LayerNorm, nn.BatchNorm1d)]
).map(lambda classes: MixedPrecision(torch.bfloat16, _module_classes_to_ignore=classes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "library", [our_wrap, torch_wrap], ids=["our policies", "the policies of torch"]
)
@settings(max_examples=at_most(40, of_all=150))
@given(data=st.data(), precision=PRECISIONS)
def test_random_models_are_wrapped_as_by_torch(
    library: Any, data: st.DataObject, precision: Any
) -> None:
    policy = data.draw(policies(library))
    model = data.draw(models(shared=is_policy_object(policy)))
    if library is our_wrap and isinstance(policy, custom):
        reference: Any = torch_wrap.CustomPolicy(policy._lambda_fn)
    elif library is our_wrap and isinstance(policy, by_class):
        reference = torch_wrap.ModuleWrapPolicy(policy._module_classes)
    else:
        reference = policy
    ignored = {model.root.get_submodule(name) for name in model.ignored}
    kwargs = {"mixed_precision": precision, "use_orig_params": True, "device_id": 3}
    theirs = torch_names(model.root, reference, model.ignored, **kwargs)
    theirs = without_bare(model.root, ignored, theirs)
    ours = plan_names(model.root, policy, ignored, **kwargs)
    assert list(ours) == list(theirs)
    assert ours == theirs


# Shared, ignored and wrapped modules; intended differences from torch.


def test_an_ignored_module_named_by_a_policy_object_is_not_chosen() -> None:
    class Everything:
        def _run_policy(
            self, root: nn.Module, ignored: set[nn.Module], kwargs: dict[str, Any]
        ) -> dict[nn.Module, Any]:
            return {module: kwargs for module in root.modules()}

    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert list(plan_wrapping(root, Everything(), {root[0]}, set(), {})) == [root[1]]


def test_mixed_precision_makes_units_of_its_ignored_classes() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2)))
    precision = MixedPrecision(torch.bfloat16)
    for policy in (by_class({nn.Linear}), torch_wrap.ModuleWrapPolicy({nn.Linear})):
        chosen = plan_names(root, policy, mixed_precision=precision)
        assert chosen["0"] == {"mixed_precision": precision}
        assert chosen["1"] == chosen["2.0"] == {"mixed_precision": None}
    chosen = plan_names(root, our_wrap.size_based_auto_wrap_policy, mixed_precision=precision)
    assert chosen == {"1": {"mixed_precision": None}, "2.0": {"mixed_precision": None}}


# Replacing modules, and the functions that wrap with any wrapper.


def test_a_module_registered_twice_is_replaced_in_both_places() -> None:
    shared, other = Block(), Block()
    root = nn.Sequential(
        nn.Sequential(shared, shared), nn.ModuleDict({"again": shared, "other": other})
    )
    policy = our_wrap._module_wrap_policy
    policy = partial(policy, module_classes={Block, nn.Linear})
    wrapped, _ = our_wrap._recursive_wrap(root, policy, Unit, set(), set(), device_id=3)
    assert wrapped is root
    unit = root[1]["again"]
    assert isinstance(unit, Unit) and unit.module is shared and unit.kwargs == {"device_id": 3}
    assert root[0][0] is unit and root[0][1] is unit
    assert isinstance(shared.first, Unit) and root[1]["other"] is not unit


@pytest.mark.parametrize("only_wrap_children", [True, False])
def test_recursive_wrap_wraps_the_modules_that_torch_wraps(only_wrap_children: bool) -> None:
    for policy in (always, from_size(28), layers_of(Block, nn.ReLU)):
        results = []
        for recursive_wrap in (our_wrap._recursive_wrap, torch_wrap._recursive_wrap):
            root = blocks()
            ignored, parameters = with_parameters({root.layers[1]})
            wrapped, numel = recursive_wrap(
                root, policy, Unit, ignored, parameters, only_wrap_children, device_id=3
            )
            results.append((str(wrapped), numel))
            units = [module for module in wrapped.modules() if isinstance(module, Unit)]
            assert all(unit.kwargs == {"device_id": 3} for unit in units)
        assert results[0] == results[1]


def test_recursive_wrap_refuses_wrapped_modules() -> None:
    root = nn.Sequential(nn.Sequential(Unit(nn.Linear(2, 2))))
    with pytest.raises(UsageError, match=r"submodule '0\.0'"):
        our_wrap._recursive_wrap(root, always, Unit, set(), set())
    our_wrap._recursive_wrap(root, always, Unit, {root[0][0]}, set())


@pytest.mark.parametrize("policy", [by_class({Block}), custom(is_a(Block)), layers_of(Block)])
def test_activation_checkpointing_of_torch_accepts_our_policies(policy: Any) -> None:
    root = blocks()
    apply_activation_checkpointing(root, auto_wrap_policy=policy)
    modules = root.named_modules()
    assert [name for name, m in modules if isinstance(m, CheckpointWrapper)] == LAYERS


def test_custom_policy_called_as_a_function_refuses_a_dict() -> None:
    policy = custom(lambda module: {"device_id": 3})
    with pytest.raises(UsageError, match="expected: True or False\n"):
        policy(nn.Linear(2, 2), recurse=False, nonwrapped_numel=6)


def test_wrap_wraps_only_inside_the_block_and_its_arguments_take_precedence() -> None:
    layer = nn.Linear(2, 2)
    assert our_wrap.wrap(layer, device_id=1) is layer
    with our_wrap.enable_wrap(wrapper_cls=Unit, device_id=3, forward_prefetch=True):
        unit, other = our_wrap.wrap(layer, device_id=4), our_wrap.wrap(layer)
    assert isinstance(unit, Unit) and isinstance(other, Unit)
    assert unit.module is layer
    assert unit.kwargs == {"device_id": 4, "forward_prefetch": True}
    assert other.kwargs == {"device_id": 3, "forward_prefetch": True}
    assert our_wrap.wrap(layer) is layer


def test_a_nested_block_and_a_wrapper_that_is_not_callable_are_refused() -> None:
    nested = pytest.raises(StateError, match="cannot be nested")
    with our_wrap.enable_wrap(wrapper_cls=Unit):
        with nested as caught, our_wrap.enable_wrap(wrapper_cls=Wrapped):
            pass
        assert isinstance(caught.value, NotImplementedError)
        assert type(our_wrap.wrap(nn.Linear(2, 2))) is Unit, "the outer one continues"
    refused = pytest.raises(UsageError, match="wrapper_cls=FullyShardedDataParallel")
    with refused, our_wrap.enable_wrap(wrapper_cls=None):
        pass


def test_each_thread_has_its_own_block() -> None:
    def builds(wrapper: type[nn.Module]) -> type[nn.Module]:
        with our_wrap.enable_wrap(wrapper_cls=wrapper):
            both_inside.wait()
            return type(our_wrap.wrap(nn.Linear(2, 2)))

    both_inside = threading.Barrier(2, timeout=60.0)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(builds, (Unit, Wrapped))) == [Unit, Wrapped]
    with our_wrap.enable_wrap(wrapper_cls=Unit), ThreadPoolExecutor(1) as pool:
        built = pool.submit(our_wrap.wrap, nn.Linear(2, 2)).result()
    assert type(built) is nn.Linear, "outside of the block of its own thread"


def test_a_policy_function_can_be_called_by_position() -> None:
    policy = layers_of(Block)
    answers = [policy(Block(), True, 0), policy(Block(), False, 0), policy(nn.ReLU(), False, 0)]
    assert answers == [True, True, False]
