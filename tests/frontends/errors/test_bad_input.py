"""Bad input and calls at the wrong moment raise the same clear error on every rank at once, and
change nothing.

Each case names the call that raises. After each of them the ranks are in step, nothing has changed,
and a training step of the same model equals that of the unsharded one.
"""

# This module passes wrong types on purpose.
# mypy: disable-error-code="arg-type, call-overload, list-item, dict-item, return-value, call-arg"

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import os
import pickle
import re
import time
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compat import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
    register_fsdp_forward_method,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.errors import CheckpointError, FsdpCompatError, StateError, UsageError
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from fsdp_compat.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from tests.support.ranks import RankError, run_ranks
from tests.support.sampling import TEST_ALL, sample

FACTS = ("expected:", "got:", "where:", "to do:")
BUILT_IN: dict[type[FsdpCompatError], type[Exception]] = {
    UsageError: ValueError,
    StateError: RuntimeError,
    CheckpointError: RuntimeError,
    FsdpCompatError: Exception,  # either
}
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
HYBRID = ShardingStrategy.HYBRID_SHARD
STEP_SIZE = 0.1

# -- models


class Layer(nn.Linear):
    """A unit that can call a function inside its forward and its backward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.inside: dict[str, Callable[[], object]] = {}

    def forward(self, x: Tensor) -> Tensor:
        return _calling(self.inside, super().forward(x))


class Net(nn.Module):
    """Two layers, a frozen parameter and a buffer; can call a function inside, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(4))
        self.offset: Tensor
        self.register_buffer("offset", torch.ones(4))
        self.inside: dict[str, Callable[[], object]] = {}
        self.not_a_method = 3

    def forward(self, x: Tensor) -> Tensor:
        return _calling(self.inside, self.layers(x) * self.scale + self.frozen + self.offset)

    def encode(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _calling(inside: Mapping[str, Callable[[], object]], output: Tensor) -> Tensor:
    if "forward" in inside:
        inside["forward"]()
    if "backward" in inside and output.requires_grad:
        call = inside["backward"]
        output.register_hook(lambda grad: (call(), None)[1])
    return output


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def shard(module: nn.Module | None = None, **arguments: Any) -> FSDP:
    arguments.setdefault("auto_wrap_policy", ModuleWrapPolicy({Layer}))
    return FSDP(net() if module is None else module, **arguments)


def batch(rank: int) -> Tensor:
    return torch.arange(8.0).view(2, 4) / 8 - rank


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), STEP_SIZE)


@functools.cache
def reference(num_steps: int) -> dict[str, Tensor]:
    """The state of an unsharded Net after some steps over the batches of 2 ranks."""
    model = net()
    optimizer = sgd(model)
    for _ in range(num_steps):
        optimizer.zero_grad()
        torch.stack([model(batch(rank)).pow(2).mean() for rank in range(2)]).mean().backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or sgd(model)
    optimizer.zero_grad()
    model(batch(dist.get_rank())).pow(2).mean().backward()
    optimizer.step()


def state_of(model: FSDP) -> dict[str, Tensor]:
    with FSDP.state_dict_type(model, FULL):
        return model.state_dict()


def difference(model: FSDP, num_steps: int) -> str:
    """Return the differences between a sharded Net and the unsharded one after some steps."""
    found, wanted = state_of(model), reference(num_steps)
    if list(found) != list(wanted):
        return f"its state dict has {list(found)}"
    wrong = [name for name in found if not torch.allclose(found[name], wanted[name], atol=1e-6)]
    return (
        f"{wrong} differ from those of the unsharded model after {num_steps} step(s)"
        if wrong
        else ""
    )


# -- cases

Call = Callable[[], object]
Make = Callable[
    [], tuple[nn.Module, Call]
]  # a module that must not change, and the call that is refused
OnModel = Callable[..., object]  # of (model, optimizer)


class Case(typing.NamedTuple):
    make: Make
    named: tuple[str, ...]  # texts that the message contains
    kind: type[FsdpCompatError] = UsageError
    torch: type[Exception] | None = (
        None  # the built-in class that torch raises here, beside that of ``kind``
    )


@dataclasses.dataclass(frozen=True)
class _OnRank:
    """An argument that is created on the rank, from the module."""

    make: Callable[[Any], Any]

    def __call__(self, module: nn.Module) -> Any:
        return self.make(module)


def wrapping(**arguments: Any) -> Make:
    """Construction with these arguments raises."""

    def make() -> tuple[nn.Module, Call]:
        module = net()
        given = {
            name: value(module) if isinstance(value, _OnRank) else value
            for name, value in arguments.items()
        }
        return module, lambda: FSDP(module, **given)

    return make


def of_module(make: Callable[[], Any], **arguments: Any) -> Make:
    def made() -> tuple[nn.Module, Call]:
        module = make()
        kept = module if isinstance(module, nn.Module) else net()
        return kept, lambda: FSDP(module, **arguments)

    return made


def on_plain(call: Callable[[Net], object]) -> Make:
    def made() -> tuple[nn.Module, Call]:
        module = net()
        return module, lambda: call(module)

    return made


def on_wrapped(
    call: OnModel, with_grads: bool = False, adam: bool = False, **arguments: Any
) -> Make:
    """A call on a wrapped Net and its optimizer raises."""

    def made() -> tuple[nn.Module, Call]:
        model = shard(use_orig_params=_use_orig_params, **arguments)
        optimizer = torch.optim.Adam(model.parameters(), 0.0) if adam else sgd(model)
        if with_grads or adam:
            model(batch(dist.get_rank())).sum().backward()
        if adam:
            optimizer.step()
            optimizer.zero_grad()
        return model, lambda: call(model, optimizer)

    return made


_use_orig_params = False  # of the models that ``on_wrapped`` makes on this rank now


def mesh(*shape: int) -> _OnRank:
    return _OnRank(lambda module: init_device_mesh("cpu", shape))


def on_layer(answer: object) -> CustomPolicy:
    return CustomPolicy(lambda module: answer if isinstance(module, Layer) else False)


def returning(answer: object) -> Any:
    """A policy object that returns ``answer`` as its plan; a function makes it from the module."""

    class Policy:
        def _run_policy(self, root_module: nn.Module, *args: Any) -> Any:
            return answer(root_module) if callable(answer) else answer

    return Policy()


def mixed(**fields: Any) -> Make:
    return wrapping(mixed_precision=MixedPrecision(**fields))


def summon(model: Any, **options: Any) -> None:
    with FSDP.summon_full_params(model, **options):
        pass


def enter(context: contextlib.AbstractContextManager[Any]) -> None:
    with context:
        pass


WORLD = _OnRank(lambda module: dist.group.WORLD)
TWO_GROUPS = _OnRank(lambda module: (dist.group.WORLD, dist.group.WORLD))


def tied_into_a_second() -> tuple[nn.Module, Call]:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    FSDP(first)
    return second, lambda: FSDP(second)


def tied_into_an_outer() -> tuple[nn.Module, Call]:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    outer = nn.Sequential(FSDP(first, use_orig_params=True), second)
    return outer, lambda: FSDP(outer)


def part_of_a_unit() -> tuple[nn.Module, Call]:
    model = shard(auto_wrap_policy=None, use_orig_params=_use_orig_params)
    return model, lambda: FSDP(model.module.layers)


def container_of_units() -> tuple[nn.Module, Call]:
    model = shard(use_orig_params=_use_orig_params)
    return model, lambda: FSDP(model.module.layers)


def unit_of_a_model() -> tuple[nn.Module, Call]:
    model = shard(use_orig_params=_use_orig_params)
    return model, lambda: FSDP(model.layers[0])


def around_an_inner_unit() -> tuple[nn.Module, Call]:
    model: Any = shard(use_orig_params=_use_orig_params)
    return model, lambda: FSDP(nn.Sequential(model.module.layers[0], nn.Linear(4, 4)))


def around_an_ignored_unit() -> tuple[nn.Module, Call]:
    inner = shard(use_orig_params=_use_orig_params)
    return inner, lambda: FSDP(nn.Sequential(inner, nn.Linear(4, 4)), ignored_modules=[inner])


def around_an_ignored_state() -> tuple[nn.Module, Call]:
    inner = shard(use_orig_params=_use_orig_params)
    return inner, lambda: FSDP(nn.Sequential(inner, nn.Linear(4, 4)), ignored_states={inner})


def made_in_inference_mode() -> Any:
    with torch.inference_mode():
        return net()


def by_wrap(module: Any, **arguments: Any) -> None:
    with enable_wrap(wrapper_cls=FSDP, auto_wrap_policy=None):
        wrap(module, **arguments)


MODULES: dict[str, Case] = {
    "no module": Case(of_module(lambda: None), ("Module", "NoneType")),
    "a number": Case(of_module(lambda: 3), ("Module", "int")),
    "a class": Case(of_module(lambda: nn.Linear), ("Module",)),
    "a function": Case(of_module(lambda: net), ("Module",)),
    "a list of modules": Case(of_module(lambda: [net()]), ("Module", "list")),
    "a tensor": Case(of_module(lambda: torch.ones(2)), ("Module", "Tensor")),
    "no parameters": Case(of_module(nn.ReLU), ("no parameters", "ReLU")),
    "a unit of a model": Case(unit_of_a_model, ("wrapped model", "Net")),
    "the inner module of an instance": Case(
        of_module(lambda: shard().module), ("already wrapped", "Net")
    ),
    "a unit of a policy": Case(
        of_module(lambda: shard().layers[0].module), ("already wrapped", "Layer")
    ),
    "a part of a unit": Case(part_of_a_unit, ("FullyShardedDataParallel",)),
    "a container of units of a model": Case(container_of_units, ("wrapped model", "Net")),
    "a new module around a unit of a model": Case(around_an_inner_unit, ("wrapped model", "Net")),
    "a parameter of another instance": Case(tied_into_a_second, ("'weight'", "another")),
    "a parameter of an inner instance": Case(tied_into_an_outer, ("'1.weight'", "another")),
    "the output projection of an attention": Case(
        of_module(lambda: nn.MultiheadAttention(4, 2).out_proj), ("MultiheadAttention",)
    ),
    "meta without reset_parameters": Case(
        of_module(lambda: nn.Sequential(nn.Linear(2, 2, device="meta"), NoReset().to("meta"))),
        ("NoReset", "reset_parameters"),
    ),
    "meta with param_init_fn that does nothing": Case(
        of_module(lambda: net().to("meta"), param_init_fn=lambda module: None),
        ("param_init_fn", "meta"),
    ),
    "meta with param_init_fn that takes nothing": Case(
        of_module(lambda: net().to("meta"), param_init_fn=lambda: None), ("param_init_fn",)
    ),
    "lazy parameters": Case(
        of_module(lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))),
        ("1.weight", "LazyLinear"),
    ),
    "parameters made in inference mode": Case(of_module(made_in_inference_mode), ("inference",)),
    "wrap of a number": Case(on_plain(lambda m: by_wrap(3)), ("Module", "int")),
    "wrap with bad arguments": Case(
        on_plain(lambda m: by_wrap(m, use_orig_params="no")), ("use_orig_params", "'no'")
    ),
    "wrap of a unit of a model": Case(
        lambda: ((model := shard()), lambda: by_wrap(model.layers[0])), ("wrapped model",)
    ),
}

POLICIES: dict[str, Case] = {
    "a number": Case(wrapping(auto_wrap_policy=3), ("auto_wrap_policy", "3")),
    "a string": Case(wrapping(auto_wrap_policy="Layer"), ("auto_wrap_policy", "'Layer'")),
    "a class of policies": Case(
        wrapping(auto_wrap_policy=ModuleWrapPolicy), ("ModuleWrapPolicy(...)",)
    ),
    "a class of modules": Case(wrapping(auto_wrap_policy=Layer), ("ModuleWrapPolicy({Layer})",)),
    "a set of classes": Case(
        wrapping(auto_wrap_policy={nn.Linear}), ("ModuleWrapPolicy({Linear})",)
    ),
    "a function of something else": Case(
        wrapping(auto_wrap_policy=lambda module: True), ("auto_wrap_policy", "nonwrapped_numel")
    ),
    "a function that returns a string": Case(
        wrapping(auto_wrap_policy=lambda module, recurse, nonwrapped_numel: "yes"),
        ("'yes'", "True or False"),
    ),
    "transformer: no classes": Case(
        wrapping(auto_wrap_policy=transformer_auto_wrap_policy), ("transformer_layer_cls",)
    ),
    "transformer: a class": Case(
        wrapping(
            auto_wrap_policy=functools.partial(
                transformer_auto_wrap_policy, transformer_layer_cls=Layer
            )
        ),
        ("transformer_layer_cls", "{Layer}"),
    ),
    "transformer: names": Case(
        wrapping(
            auto_wrap_policy=functools.partial(
                transformer_auto_wrap_policy, transformer_layer_cls={"Layer"}
            )
        ),
        ("transformer_layer_cls", "'Layer'"),
    ),
    "lambda: no function": Case(wrapping(auto_wrap_policy=lambda_auto_wrap_policy), ("lambda_fn",)),
    "lambda: a class": Case(
        wrapping(auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn={Layer})),
        ("lambda_fn", "Layer"),
    ),
    "size: a string": Case(
        wrapping(
            auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params="1e3")
        ),
        ("min_num_params", "'1e3'"),
    ),
    "size: force_leaf_modules without classes": Case(
        wrapping(
            auto_wrap_policy=functools.partial(
                size_based_auto_wrap_policy, min_num_params=1, force_leaf_modules=Layer
            )
        ),
        ("force_leaf_modules", "{Layer}"),
    ),
    "size: exclude_wrap_modules without classes": Case(
        wrapping(
            auto_wrap_policy=functools.partial(
                size_based_auto_wrap_policy, min_num_params=1, exclude_wrap_modules={"Layer"}
            )
        ),
        ("exclude_wrap_modules", "'Layer'"),
    ),
    "classes: a class": Case(
        on_plain(lambda m: ModuleWrapPolicy(Layer)), ("ModuleWrapPolicy({Layer})",), torch=TypeError
    ),
    "classes: nothing": Case(
        on_plain(lambda m: ModuleWrapPolicy(None)), ("ModuleWrapPolicy", "None"), torch=TypeError
    ),
    "classes: names": Case(
        on_plain(lambda m: ModuleWrapPolicy({"Layer"})), ("ModuleWrapPolicy", "'Layer'")
    ),
    "classes: instances": Case(
        on_plain(lambda m: ModuleWrapPolicy([m.layers])), ("ModuleWrapPolicy", "Sequential")
    ),
    "custom: no function": Case(on_plain(lambda m: CustomPolicy(3)), ("CustomPolicy", "3")),
    "custom: no answer": Case(wrapping(auto_wrap_policy=on_layer("yes")), ("'yes'", "layers.0")),
    "custom: unknown arguments": Case(
        wrapping(auto_wrap_policy=on_layer({"no_such": 1})), ("'no_such'",)
    ),
    "custom: the module": Case(wrapping(auto_wrap_policy=on_layer({"module": 1})), ("'module'",)),
    "custom: keys that are not names": Case(wrapping(auto_wrap_policy=on_layer({3: 1})), ("3",)),
    "custom: bad values": Case(
        wrapping(auto_wrap_policy=on_layer({"sharding_strategy": "none"})),
        ("sharding_strategy", "'none'"),
    ),
    "custom: bad fields": Case(
        wrapping(
            auto_wrap_policy=on_layer({"mixed_precision": MixedPrecision(param_dtype="half")})
        ),
        ("param_dtype", "'half'"),
    ),
    "custom: a group and a mesh": Case(
        wrapping(auto_wrap_policy=on_layer({"process_group": 3}), device_mesh=mesh(2)),
        ("process_group", "device_mesh"),
    ),
    "object: no plan": Case(wrapping(auto_wrap_policy=returning(None)), ("_run_policy", "None")),
    "object: a list": Case(wrapping(auto_wrap_policy=returning([Layer])), ("_run_policy", "list")),
    "object: no arguments": Case(
        wrapping(auto_wrap_policy=returning(lambda m: {m.layers[0]: True})), ("_run_policy", "True")
    ),
    "object: a foreign module": Case(
        wrapping(auto_wrap_policy=returning(lambda m: {nn.Linear(2, 2): {}})),
        ("_run_policy", "Linear"),
    ),
    "object: names": Case(
        wrapping(auto_wrap_policy=returning(lambda m: {"layers.0": {}})),
        ("_run_policy", "'layers.0'"),
    ),
    "called with a class that is not one": Case(
        on_plain(lambda m: transformer_auto_wrap_policy(m, False, 3, 3)),
        ("transformer_layer_cls", "3"),
    ),
    "enable_wrap: no wrapper": Case(
        on_plain(lambda m: enter(enable_wrap(wrapper_cls=3))), ("wrapper_cls", "3")
    ),
}

ARGUMENTS: dict[str, Case] = {
    # contradictions
    "mesh and group": Case(
        wrapping(device_mesh=mesh(2), process_group=WORLD), ("process_group", "device_mesh")
    ),
    "ignored twice": Case(
        wrapping(
            ignored_modules=_OnRank(lambda m: [m.layers[0]]),
            ignored_states=_OnRank(lambda m: [m.layers[1]]),
        ),
        ("ignored_modules", "ignored_states"),
    ),
    "ignored: an instance": Case(
        around_an_ignored_unit, ("ignored_modules", "FullyShardedDataParallel"), torch=ValueError
    ),
    "ignored: an instance as a state": Case(
        around_an_ignored_state, ("ignored_states", "FullyShardedDataParallel")
    ),
    "hybrid, one group": Case(
        wrapping(sharding_strategy=HYBRID, process_group=WORLD), ("HYBRID_SHARD",)
    ),
    "hybrid, 3-D mesh": Case(
        wrapping(sharding_strategy=HYBRID, device_mesh=mesh(1, 1, 2)), ("HYBRID_SHARD", "3 dim")
    ),
    "hybrid, one group twice": Case(
        wrapping(sharding_strategy=HYBRID, process_group=TWO_GROUPS), ("process_group", "replica")
    ),
    "two groups, not hybrid": Case(wrapping(process_group=TWO_GROUPS), ("FULL_SHARD", "tuple")),
    # groups
    "process_group: a number": Case(wrapping(process_group=1), ("process_group",)),
    "process_group: ranks": Case(wrapping(process_group=[0, 1]), ("process_group", "[0, 1]")),
    "process_group: a list of two": Case(
        wrapping(sharding_strategy=HYBRID, process_group=_OnRank(lambda m: [dist.group.WORLD] * 2)),
        ("process_group", "tuple"),
    ),
    "process_group: none in a tuple": Case(
        wrapping(sharding_strategy=HYBRID, process_group=()), ("process_group", "tuple of 0")
    ),
    "process_group: one in a tuple": Case(
        wrapping(sharding_strategy=HYBRID, process_group=_OnRank(lambda m: (dist.group.WORLD,))),
        ("process_group", "tuple of 1"),
    ),
    "process_group: half a tuple": Case(
        wrapping(
            sharding_strategy=HYBRID, process_group=_OnRank(lambda m: (dist.group.WORLD, None))
        ),
        ("process_group",),
    ),
    "process_group: destroyed": Case(
        wrapping(process_group=_OnRank(lambda m: _destroyed_group())),
        ("process_group", "destroyed"),
    ),
    "device_mesh: a shape": Case(wrapping(device_mesh=(2,)), ("device_mesh",)),
    "device_mesh: a number": Case(wrapping(device_mesh=2), ("device_mesh", "2")),
    "device_mesh: a group": Case(wrapping(device_mesh=WORLD), ("device_mesh",)),
    # enums and configurations
    "sharding_strategy: a name": Case(
        wrapping(sharding_strategy="FULL_SHARD"), ("sharding_strategy", "'FULL_SHARD'")
    ),
    "sharding_strategy: a value": Case(wrapping(sharding_strategy=1), ("sharding_strategy", "1")),
    "sharding_strategy: another enum": Case(
        wrapping(sharding_strategy=FULL), ("sharding_strategy", "FULL_STATE_DICT")
    ),
    "cpu_offload: a bool": Case(wrapping(cpu_offload=True), ("cpu_offload", "CPUOffload")),
    "cpu_offload: the class": Case(wrapping(cpu_offload=CPUOffload), ("cpu_offload", "CPUOffload")),
    "cpu_offload: a field": Case(
        wrapping(cpu_offload=CPUOffload(offload_params="yes")), ("offload_params", "'yes'")
    ),
    "backward_prefetch: a bool": Case(wrapping(backward_prefetch=True), ("backward_prefetch",)),
    "backward_prefetch: a name": Case(
        wrapping(backward_prefetch="BACKWARD_PRE"), ("backward_prefetch", "'BACKWARD_PRE'")
    ),
    "mixed_precision: a dtype": Case(
        wrapping(mixed_precision=torch.bfloat16), ("mixed_precision", "bfloat16")
    ),
    "mixed_precision: the class": Case(
        wrapping(mixed_precision=MixedPrecision), ("mixed_precision", "MixedPrecision")
    ),
    "mixed_precision: a dict": Case(
        wrapping(mixed_precision={"param_dtype": torch.half}), ("mixed_precision",)
    ),
    "param_dtype: a name": Case(mixed(param_dtype="half"), ("param_dtype", "'half'")),
    "param_dtype: integers": Case(mixed(param_dtype=torch.int32), ("param_dtype", "int32")),
    "param_dtype: complex": Case(mixed(param_dtype=torch.complex64), ("param_dtype", "complex64")),
    "param_dtype: 8 bits": Case(mixed(param_dtype=torch.float8_e4m3fn), ("param_dtype", "float8")),
    "reduce_dtype: of Python": Case(mixed(reduce_dtype=float), ("reduce_dtype", "float")),
    "reduce_dtype: integers": Case(mixed(reduce_dtype=torch.int64), ("reduce_dtype", "int64")),
    "reduce_dtype: 8 bits": Case(
        mixed(reduce_dtype=torch.float8_e4m3fn), ("reduce_dtype", "float8")
    ),
    "buffer_dtype: a name": Case(mixed(buffer_dtype="half"), ("buffer_dtype", "'half'")),
    "buffer_dtype: a bool": Case(mixed(buffer_dtype=torch.bool), ("buffer_dtype", "bool")),
    "keep_low_precision_grads": Case(
        mixed(keep_low_precision_grads="no"), ("keep_low_precision_grads", "'no'")
    ),
    "cast_forward_inputs": Case(mixed(cast_forward_inputs=b"1"), ("cast_forward_inputs", "b'1'")),
    "cast_root_forward_inputs": Case(
        mixed(cast_root_forward_inputs=""), ("cast_root_forward_inputs", "''")
    ),
    "_module_classes_to_ignore: a class": Case(
        mixed(param_dtype=torch.half, _module_classes_to_ignore=nn.BatchNorm1d),
        ("_module_classes_to_ignore",),
    ),
    "_module_classes_to_ignore: instances": Case(
        mixed(param_dtype=torch.half, _module_classes_to_ignore=[nn.ReLU()]),
        ("_module_classes_to_ignore",),
    ),
    "_module_classes_to_ignore: names": Case(
        mixed(param_dtype=torch.half, _module_classes_to_ignore=["BatchNorm1d"]),
        ("_module_classes_to_ignore",),
    ),
    # ignored modules and parameters
    "ignored_modules: a number": Case(wrapping(ignored_modules=1), ("ignored_modules",)),
    "ignored_modules: numbers": Case(wrapping(ignored_modules=[1]), ("ignored_modules",)),
    "ignored_modules: names": Case(wrapping(ignored_modules="layers"), ("ignored_modules", "'l'")),
    "ignored_modules: classes": Case(
        wrapping(ignored_modules={Layer}), ("ignored_modules", "Layer")
    ),
    "ignored_modules: a module": Case(
        wrapping(ignored_modules=_OnRank(lambda m: m.layers)), ("ignored_modules",)
    ),
    "ignored_modules: parameters": Case(
        wrapping(ignored_modules=_OnRank(lambda m: list(m.parameters()))), ("ignored_modules",)
    ),
    "ignored_states: names": Case(
        wrapping(ignored_states=["frozen"]), ("ignored_states", "'frozen'")
    ),
    "ignored_states: a parameter": Case(
        wrapping(ignored_states=_OnRank(lambda m: m.frozen)), ("ignored_states",)
    ),
    "ignored_states: named parameters": Case(
        wrapping(ignored_states=_OnRank(lambda m: m.named_parameters())),
        ("ignored_states", "'frozen'"),
    ),
    "ignored_states: a tensor": Case(
        wrapping(ignored_states=_OnRank(lambda m: [m.offset])), ("ignored_states", "Tensor")
    ),
    # others
    "param_init_fn: a number": Case(wrapping(param_init_fn=1), ("param_init_fn",)),
    "param_init_fn: a name": Case(
        wrapping(param_init_fn="reset_parameters"), ("param_init_fn", "'reset_parameters'")
    ),
    "device_id: a float": Case(wrapping(device_id=1.5), ("device_id", "1.5")),
    "device_id: a bool": Case(wrapping(device_id=True), ("device_id", "True")),
    "device_id: a group": Case(wrapping(device_id=WORLD), ("device_id",)),
    "device_id: no device": Case(wrapping(device_id="nonsense"), ("device_id", "nonsense")),
    "device_id: negative": Case(wrapping(device_id=-1), ("device_id=-1",)),
    "device_id: meta": Case(wrapping(device_id="meta"), ("device_id", "meta")),
    "sync_module_states": Case(
        wrapping(sync_module_states="False"), ("sync_module_states", "'False'")
    ),
    "forward_prefetch": Case(wrapping(forward_prefetch="1"), ("forward_prefetch", "'1'")),
    "limit_all_gathers": Case(
        wrapping(limit_all_gathers=torch.ones(2)), ("limit_all_gathers", "Tensor")
    ),
    "use_orig_params": Case(wrapping(use_orig_params="no"), ("use_orig_params", "'no'")),
    "allow_unused_units": Case(wrapping(allow_unused_units="0"), ("allow_unused_units", "'0'")),
    "keep_units_below: negative": Case(wrapping(keep_units_below=-1), ("keep_units_below", "-1")),
    "keep_units_below: a switch": Case(
        wrapping(keep_units_below=True), ("keep_units_below", "True")
    ),
}
if torch.accelerator.device_count() == 0:
    ARGUMENTS["device_id: no accelerator"] = Case(
        wrapping(device_id=0), ("device_id=0", "no accelerator")
    )
    ARGUMENTS["device_id: no CUDA"] = Case(wrapping(device_id="cuda"), ("device_id", "cuda"))


def _destroyed_group() -> Any:
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    return group


def differing_forms(model: FSDP, optimizer: object) -> None:
    FSDP.set_state_dict_type(model.layers[0], SHARDED)
    try:
        FSDP.get_state_dict_type(model)
    finally:
        FSDP.set_state_dict_type(model.layers[0], FULL)


def clip_inside_summon(model: FSDP, optimizer: object) -> None:
    with FSDP.summon_full_params(model, with_grads=True):
        model.clip_grad_norm_(1e-3)


def optim_state_inside_summon(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with FSDP.summon_full_params(model):
        FSDP.optim_state_dict(model, optimizer)


def step_inside_summon(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with FSDP.summon_full_params(model):
        optimizer.step()


def second_hook(model: FSDP, optimizer: object) -> None:
    """Use a second model, because a hook cannot be removed."""
    other = shard()
    other.register_comm_hook(None, lambda state, grad, output: None)
    other.register_comm_hook(None, lambda state, grad, output: None)


def torchs_clip(**arguments: Any) -> Make:
    return on_wrapped(
        lambda m, o: torch.nn.utils.clip_grad_norm_(m.parameters(), **arguments), with_grads=True
    )


def clips(*arguments: Any) -> Make:
    return on_wrapped(lambda m, o: m.clip_grad_norm_(*arguments), with_grads=True)


def hooks(*arguments: Any, **of_model: Any) -> Make:
    return on_wrapped(lambda m, o: m.register_comm_hook(*arguments), **of_model)


def summons(**options: Any) -> Make:
    return on_wrapped(lambda m, o: summon(m, **options))


def registers(*arguments: Any, **options: Any) -> Make:
    return on_wrapped(lambda m, o: register_fsdp_forward_method(m, *arguments, **options))


TRAINING: dict[str, Case] = {
    "no_sync of an inner one": Case(
        on_wrapped(lambda m, o: enter(m.layers[0].no_sync())), ("no_sync", "layers.0"), StateError
    ),
    "clip of an inner one": Case(
        on_wrapped(lambda m, o: m.layers[1].clip_grad_norm_(1.0), with_grads=True),
        ("clip_grad_norm_", "layers.1"),
        StateError,
    ),
    "clip inside summon": Case(
        on_wrapped(clip_inside_summon, with_grads=True), ("summon_full_params",), StateError
    ),
    "max_norm: a string": Case(clips("1"), ("max_norm", "'1'")),
    "max_norm: nothing": Case(clips(None), ("max_norm", "None")),
    "max_norm: nan": Case(clips(float("nan")), ("max_norm", "nan")),
    "max_norm: negative": Case(clips(-1.0), ("max_norm", "-1.0")),
    "max_norm: a bool": Case(clips(True), ("max_norm", "True")),
    "max_norm: complex": Case(clips(1j), ("max_norm", "1j")),
    "max_norm: two numbers": Case(clips(torch.ones(2)), ("max_norm", "tensor")),
    "max_norm: a complex tensor": Case(clips(torch.tensor(1j)), ("max_norm", "tensor")),
    "max_norm: too large": Case(clips(10**400), ("max_norm",)),
    "norm_type: zero": Case(clips(1.0, 0), ("norm_type", "0")),
    "norm_type: negative": Case(clips(1.0, -2.0), ("norm_type", "-2.0")),
    "norm_type: nan": Case(clips(1.0, float("nan")), ("norm_type", "nan")),
    "norm_type: a string": Case(clips(1.0, "2"), ("norm_type", "'2'")),
    "norm_type: nothing": Case(clips(1.0, None), ("norm_type", "None")),
    "norm_type: a tensor": Case(clips(1.0, torch.ones(2)), ("norm_type", "tensor")),
    "torch's clip, norm_type: zero": Case(
        torchs_clip(max_norm=1.0, norm_type=0), ("norm_type", "0")
    ),
    "torch's clip, norm_type: a string": Case(
        torchs_clip(max_norm=1.0, norm_type="2"), ("norm_type", "'2'")
    ),
    "hook: a number": Case(hooks(None, 3), ("hook", "3")),
    "hook: nothing": Case(hooks(None, None), ("hook", "None")),
    "hook: instead of the state": Case(hooks(print, None), ("hook", "None")),
    "hook: of nothing": Case(hooks(None, lambda: None), ("hook", "(state, grad, output)")),
    "hook: of one that is not split": Case(
        hooks(None, lambda state, grad: None), ("hook", "(state, grad, output)")
    ),
    "hook: of one that is split": Case(
        hooks(None, lambda state, grad, output: None, sharding_strategy=ShardingStrategy.NO_SHARD),
        ("hook", "(state, grad)"),
    ),
    "hook: on an inner one": Case(
        on_wrapped(lambda m, o: m.layers[0].register_comm_hook(None, print)),
        ("layers.0",),
        StateError,
        AssertionError,
    ),
    "hook: a second one": Case(
        on_wrapped(second_hook), ("registered already",), StateError, AssertionError
    ),
    "method: of no module": Case(
        on_wrapped(lambda m, o: register_fsdp_forward_method(3, "encode")),
        ("register_fsdp_forward_method", "int"),
    ),
    "method: no name": Case(registers(Net.encode), ("register_fsdp_forward_method",)),
    "method: unknown": Case(registers("no_such"), ("'no_such'", "Net")),
    "method: an attribute": Case(registers("not_a_method"), ("'not_a_method'", "Net")),
    "method: forward": Case(registers("forward"), ("'forward'",)),
    "method: of every module": Case(registers("parameters"), ("'parameters'",)),
    "method: synced": Case(registers("encode", synced="yes"), ("synced", "'yes'")),
    "summon: of no module": Case(on_wrapped(lambda m, o: summon(3)), ("summon_full_params", "int")),
    "summon: of nothing": Case(
        on_wrapped(lambda m, o: summon(None)), ("summon_full_params", "NoneType")
    ),
    "summon: of parameters": Case(
        on_wrapped(lambda m, o: summon(m.parameters())), ("summon_full_params", "generator")
    ),
    "summon: recurse": Case(summons(recurse="no"), ("recurse", "'no'")),
    "summon: writeback": Case(summons(writeback="0"), ("writeback", "'0'")),
    "summon: rank0_only": Case(summons(rank0_only=""), ("rank0_only", "''")),
    "summon: offload_to_cpu": Case(summons(offload_to_cpu="cpu"), ("offload_to_cpu", "'cpu'")),
    "summon: with_grads": Case(summons(with_grads="1"), ("with_grads", "'1'")),
    "summon: write back from rank 0": Case(
        summons(rank0_only=True), ("writeback=False",), torch=NotImplementedError
    ),
    "summon: write gradients back from rank 0": Case(
        summons(rank0_only=True, with_grads=True), ("writeback=False",), torch=NotImplementedError
    ),
    "apply: a number": Case(on_wrapped(lambda m, o: m.apply(3)), ("apply", "3")),
    "apply: nothing": Case(on_wrapped(lambda m, o: m.apply(None)), ("apply", "None")),
    "fsdp_modules: a number": Case(
        on_wrapped(lambda m, o: FSDP.fsdp_modules(3)), ("fsdp_modules", "int")
    ),
    "fsdp_modules: a list": Case(
        on_wrapped(lambda m, o: FSDP.fsdp_modules([m])), ("fsdp_modules", "list")
    ),
    "fsdp_modules: root_only": Case(
        on_wrapped(lambda m, o: FSDP.fsdp_modules(m, "yes")), ("root_only", "'yes'")
    ),
}

# -- state dicts


def sets(*arguments: Any) -> Make:
    return on_wrapped(lambda m, o: FSDP.set_state_dict_type(m, *arguments))


def sets_around(*arguments: Any) -> Make:
    return on_wrapped(lambda m, o: enter(FSDP.state_dict_type(m, *arguments)))


def loads(
    change: Callable[[dict[str, Any]], Any], kind: StateDictType = FULL, **options: Any
) -> Make:
    """Load a state dict of the model that ``change`` has changed; its values differ too."""

    def call(model: FSDP, optimizer: object) -> object:
        with FSDP.state_dict_type(model, kind):
            state = model.state_dict()
            state = type(state)(
                (name, value if kind is SHARDED else value + 1) for name, value in state.items()
            )
            changed = change(state)
            return model.load_state_dict(state if changed is None else changed, **options)

    return on_wrapped(call)


def replaced(name: str, make: Callable[[Any], object]) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state[name] = make(state[name])

    return change


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for name in names:
            del state[name]

    return change


def in_another_shape(value: Tensor) -> Any:
    """Return a sharded value of a model with other shapes."""
    other = FSDP(nn.Linear(6, 3, bias=False))
    with FSDP.state_dict_type(other, SHARDED):
        return other.state_dict()["weight"]


STATE_DICTS: dict[str, Case] = {
    "form: local, with the config of another": Case(
        sets(StateDictType.LOCAL_STATE_DICT, FullStateDictConfig()),
        ("state_dict_config", "LocalStateDictConfig"),
        torch=RuntimeError,
    ),
    "form: a string": Case(sets("full"), ("state_dict_type", "'full'")),
    "form: nothing": Case(sets(None), ("state_dict_type", "None")),
    "form: another enum": Case(
        sets(ShardingStrategy.FULL_SHARD), ("state_dict_type", "FULL_SHARD")
    ),
    "form: a config": Case(sets(FullStateDictConfig()), ("state_dict_type", "FullStateDictConfig")),
    "form: config of another": Case(
        sets(SHARDED, FullStateDictConfig()),
        ("state_dict_config", "ShardedStateDictConfig"),
        torch=RuntimeError,
    ),
    "form: config of all": Case(
        sets(FULL, StateDictConfig()),
        ("state_dict_config", "FullStateDictConfig"),
        torch=RuntimeError,
    ),
    "form: config of the local one": Case(
        sets(FULL, LocalStateDictConfig()),
        ("state_dict_config", "FullStateDictConfig"),
        torch=RuntimeError,
    ),
    "form: config of optimizers": Case(
        sets(FULL, FullOptimStateDictConfig()), ("state_dict_config", "FullOptimStateDictConfig")
    ),
    "form: config as a dict": Case(
        sets(FULL, {"rank0_only": True}), ("state_dict_config", "rank0_only")
    ),
    "form: config as a class": Case(sets(FULL, FullStateDictConfig), ("state_dict_config",)),
    "form: config with a bad field": Case(
        sets(FULL, FullStateDictConfig(rank0_only="yes")), ("rank0_only", "'yes'")
    ),
    "form: config with another bad field": Case(
        sets(SHARDED, ShardedStateDictConfig(offload_to_cpu="cpu")),
        ("offload_to_cpu", "'cpu'"),
    ),
    "form: config that asks for DTensors": Case(
        sets(SHARDED, ShardedStateDictConfig(_use_dtensor=True)), ("_use_dtensor",)
    ),
    "form: optimizer config of another": Case(
        sets(SHARDED, None, FullOptimStateDictConfig()),
        ("optim_state_dict_config", "ShardedOptimStateDictConfig"),
        torch=RuntimeError,
    ),
    "form: optimizer config of all": Case(
        sets(FULL, None, OptimStateDictConfig()),
        ("optim_state_dict_config", "FullOptimStateDictConfig"),
        torch=RuntimeError,
    ),
    "form: configs of two forms": Case(
        sets(FULL, FullStateDictConfig(), ShardedOptimStateDictConfig()),
        ("optim_state_dict_config",),
        torch=RuntimeError,
    ),
    "form: optimizer config of models": Case(
        sets(FULL, None, FullStateDictConfig()), ("optim_state_dict_config",)
    ),
    "form: optimizer config with a bad field": Case(
        sets(FULL, None, FullOptimStateDictConfig(offload_to_cpu="False")),
        ("offload_to_cpu", "'False'"),
    ),
    "form: config of another, in a context": Case(
        sets_around(FULL, ShardedStateDictConfig()),
        ("state_dict_config", "FullStateDictConfig"),
        torch=RuntimeError,
    ),
    "form: a string, in a context": Case(sets_around("full"), ("state_dict_type", "'full'")),
    "form: of a number": Case(
        on_wrapped(lambda m, o: FSDP.set_state_dict_type(3, FULL)), ("set_state_dict_type", "int")
    ),
    "form: of a number, asked for": Case(
        on_wrapped(lambda m, o: FSDP.get_state_dict_type(3)), ("get_state_dict_type", "int")
    ),
    "form: of a number, in a context": Case(
        on_wrapped(lambda m, o: enter(FSDP.state_dict_type(3, FULL))),
        ("state_dict_type", "int"),
    ),
    "form: of a plain module": Case(
        on_plain(lambda m: FSDP.get_state_dict_type(m)), ("Net", "0 units")
    ),
    "form: differing": Case(
        on_wrapped(differing_forms),
        ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
        torch=AssertionError,
    ),
    "state_dict: unknown argument": Case(
        on_wrapped(lambda m, o: m.state_dict(prefixx="a.")), ("prefixx",), torch=TypeError
    ),
    "state_dict: too many": Case(
        on_wrapped(lambda m, o: m.state_dict({}, "", False, 1)), ("state_dict",)
    ),
    "state_dict: one twice": Case(
        on_wrapped(lambda m, o: m.state_dict({}, destination={})), ("destination",)
    ),
    "state_dict: destination": Case(
        on_wrapped(lambda m, o: m.state_dict(destination=[])), ("destination", "list")
    ),
    "state_dict: prefix": Case(on_wrapped(lambda m, o: m.state_dict(prefix=3)), ("prefix", "3")),
    "load: a list": Case(
        on_wrapped(lambda m, o: m.load_state_dict([])), ("dict", "list"), torch=TypeError
    ),
    "load: nothing": Case(
        on_wrapped(lambda m, o: m.load_state_dict(None)), ("dict", "NoneType"), torch=TypeError
    ),
    "load: a file name": Case(
        on_wrapped(lambda m, o: m.load_state_dict("model.pt")), ("dict", "str"), torch=TypeError
    ),
    "load: a model": Case(
        on_wrapped(lambda m, o: m.load_state_dict(m)),
        ("dict", "FullyShardedDataParallel"),
        torch=TypeError,
    ),
    "load: strict": Case(loads(lambda state: None, strict="no"), ("strict", "'no'")),
    "load: assign": Case(loads(lambda state: None, assign="no"), ("assign", "'no'")),
    "load: numbers as keys": Case(
        on_wrapped(lambda m, o: m.load_state_dict({3: torch.ones(4)})), ("3",), CheckpointError
    ),
    "load: an empty dict": Case(
        on_wrapped(lambda m, o: m.load_state_dict({})),
        ("Missing key", "layers.0.weight"),
        CheckpointError,
    ),
    "load: a key is missing": Case(
        loads(without("layers.1.bias")), ("Missing key", '"layers.1.bias"'), CheckpointError
    ),
    "load: the root's key is missing": Case(
        loads(without("scale")), ("Missing key", '"scale"'), CheckpointError
    ),
    "load: a buffer is missing": Case(
        loads(without("offset")), ("Missing key", '"offset"'), CheckpointError
    ),
    "load: a key too many": Case(
        loads(lambda state: {**state, "layers.2.bias": torch.ones(4)}),
        ("Unexpected key", '"layers.2.bias"'),
        CheckpointError,
    ),
    "load: of a whole training state": Case(
        loads(lambda state: {"model": state, "epoch": 3}),
        ("Unexpected key", '"epoch"', '"model"'),
        CheckpointError,
    ),
    "load: a shape": Case(
        loads(replaced("layers.1.weight", lambda value: torch.ones(3, 4))),
        ("size mismatch", "layers.1.weight", "[3, 4]"),
        CheckpointError,
    ),
    "load: a shape, not strict": Case(
        loads(replaced("layers.1.weight", lambda value: torch.ones(3, 4)), strict=False),
        ("size mismatch", "layers.1.weight", "[3, 4]"),
        CheckpointError,
    ),
    "load: a flat shape": Case(
        loads(replaced("layers.1.weight", lambda value: value.flatten())),
        ("size mismatch", "[16]"),
        CheckpointError,
    ),
    "load: the shape of a buffer": Case(
        loads(replaced("offset", lambda value: torch.ones(3))),
        ("size mismatch", "offset"),
        CheckpointError,
    ),
    "load: a number": Case(
        loads(replaced("layers.0.bias", lambda value: 3)), ("layers.0.bias", "int"), CheckpointError
    ),
    "load: a list of numbers": Case(
        loads(replaced("scale", lambda value: value.tolist()), strict=False),
        ("scale", "list"),
        CheckpointError,
    ),
    "load: an array": Case(
        loads(replaced("scale", lambda value: value.numpy())), ("scale", "ndarray"), CheckpointError
    ),
    "load: a value without data": Case(
        loads(replaced("layers.0.weight", lambda value: value.to("meta"))),
        ("layers.0.weight", "meta"),
        CheckpointError,
    ),
    "load: a sparse value": Case(
        loads(replaced("layers.0.weight", lambda value: value.to_sparse())),
        ("layers.0.weight", "sparse"),
        CheckpointError,
    ),
    "load: complex values": Case(
        loads(replaced("layers.0.weight", lambda value: value + 1j)),
        ("layers.0.weight", "complex"),
        CheckpointError,
    ),
    "load: a sharded value of another shape": Case(
        loads(replaced("layers.0.weight", in_another_shape), SHARDED),
        ("size mismatch", "[3, 6]"),
        CheckpointError,
    ),
    "load: sharded, a key is missing": Case(
        loads(without("layers.1.weight"), SHARDED),
        ("Missing key", '"layers.1.weight"'),
        CheckpointError,
    ),
    "load: a module inside": Case(
        on_wrapped(
            lambda m, o: m.module.layers[0].module.load_state_dict(net().layers[0].state_dict())
        ),
        ("layers.0",),
        StateError,
    ),
    "state_dict of a module inside": Case(
        on_wrapped(lambda m, o: m.module.layers[0].module.state_dict()), ("layers.0",), StateError
    ),
}

# -- state of optimizers


def optim(call: Callable[[FSDP, torch.optim.Optimizer], object]) -> Make:
    return on_wrapped(call, adam=True)


def optim_loads(change: Callable[[dict[str, Any]], Any], kind: StateDictType = FULL) -> Make:
    """Change the optimizer's state by names, and load it."""

    def call(model: FSDP, optimizer: torch.optim.Optimizer) -> object:
        with FSDP.state_dict_type(model, kind):
            state = FSDP.optim_state_dict(model, optimizer)
            changed = change(state)
            return FSDP.optim_state_dict_to_load(
                model, optimizer, state if changed is None else changed
            )

    return optim(call)


def numbered_loads(change: Callable[[dict[str, Any]], Any]) -> Make:
    """Change the state of an unwrapped model's optimizer, by numbers, and load it."""

    def call(model: FSDP, optimizer: torch.optim.Optimizer) -> object:
        plain = net()
        its = torch.optim.Adam(plain.parameters())
        plain(batch(0)).sum().backward()
        its.step()
        state = its.state_dict()
        change(state)
        return FSDP.optim_state_dict_to_load(model, optimizer, state)

    return optim(call)


def in_state(
    name: Any, key: str, make: Callable[[Any], object]
) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state["state"][name][key] = make(state["state"][name][key])

    return change


def with_state(**entries: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state["state"].update(entries)

    return change


def optimizer_before_wrapping(load: bool) -> Make:
    def made() -> tuple[nn.Module, Call]:
        module = net()
        optimizer = torch.optim.Adam(module.parameters())
        model = shard(module)
        if load:
            state = FSDP.optim_state_dict(model, torch.optim.Adam(model.parameters()))
            return model, lambda: FSDP.optim_state_dict_to_load(model, optimizer, state)
        return model, lambda: FSDP.optim_state_dict(model, optimizer)

    return made


def adam_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


OPTIMIZERS: dict[str, Case] = {
    "made before wrapping": Case(optimizer_before_wrapping(False), ("after wrapping", "Adam")),
    "made before wrapping, to load": Case(
        optimizer_before_wrapping(True), ("after wrapping", "Adam")
    ),
    "of another model": Case(
        optim(lambda m, o: FSDP.optim_state_dict(m, adam_of(shard()))), ("Adam", "not the model's")
    ),
    "of a plain model": Case(
        optim(lambda m, o: FSDP.optim_state_dict(m, adam_of(net()))), ("Adam", "not the model's")
    ),
    "of another model, to load": Case(
        optim(
            lambda m, o: FSDP.optim_state_dict_to_load(
                m, adam_of(shard()), FSDP.optim_state_dict(m, o)
            )
        ),
        ("Adam", "not the model's"),
    ),
    "swapped": Case(
        optim(lambda m, o: FSDP.optim_state_dict(o, m)), ("optim_state_dict(model, optim", "Adam")
    ),
    "no model": Case(
        optim(lambda m, o: FSDP.optim_state_dict(None, o)), ("optim_state_dict", "NoneType")
    ),
    "a plain model": Case(optim(lambda m, o: FSDP.optim_state_dict(net(), o)), ("Net", "0 units")),
    "no optimizer": Case(
        optim(lambda m, o: FSDP.optim_state_dict(m, None)), ("optim_state_dict", "NoneType")
    ),
    "parameters": Case(
        optim(lambda m, o: FSDP.optim_state_dict(m, m.parameters())),
        ("optim_state_dict", "generator"),
    ),
    "the optimizer's dict": Case(
        optim(lambda m, o: FSDP.optim_state_dict(m, o.state_dict())), ("optim_state_dict", "dict")
    ),
    "dict: a list": Case(
        optim(lambda m, o: FSDP.optim_state_dict(m, o, [])), ("optim_state_dict", "list")
    ),
    "dict: empty": Case(
        optim(lambda m, o: FSDP.optim_state_dict(m, o, {})), ("'state'", "'param_groups'")
    ),
    "dict: of another optimizer": Case(
        optim(
            lambda m, o: FSDP.optim_state_dict(
                m, o, {"state": {99: {"step": 1}}, "param_groups": [{"params": [99]}]}
            )
        ),
        ("99",),
    ),
    "dict: an invalid state": Case(
        optim(lambda m, o: FSDP.optim_state_dict(m, o, {**o.state_dict(), "state": {0: 3}})),
        ("optim_state_dict", "3"),
    ),
    "group: a number": Case(
        optim(lambda m, o: FSDP.optim_state_dict(m, o, None, 3)), ("group", "3")
    ),
    "inside summon": Case(optim(optim_state_inside_summon), ("summon_full_params",), StateError),
    "step inside summon": Case(
        on_wrapped(step_inside_summon, with_grads=True), ("summon_full_params", "step"), StateError
    ),
    "to load: nothing": Case(optim_loads(lambda state: []), ("'state'", "'param_groups'")),
    "to load: no dict": Case(
        optim(lambda m, o: FSDP.optim_state_dict_to_load(m, o, None)),
        ("optimizer state dict", "NoneType"),
    ),
    "to load: the older order": Case(
        optim(lambda m, o: FSDP.optim_state_dict_to_load(FSDP.optim_state_dict(m, o), m, o)),
        ("order of the arguments", "optim_state_dict_to_load(model, optim, optim_state_dict)"),
    ),
    "to load: dict before the optimizer": Case(
        optim(lambda m, o: FSDP.optim_state_dict_to_load(m, FSDP.optim_state_dict(m, o), o)),
        ("order of the arguments",),
    ),
    "to load: optimizer before the model": Case(
        optim(lambda m, o: FSDP.optim_state_dict_to_load(o, m, FSDP.optim_state_dict(m, o))),
        ("optim_state_dict_to_load(model, optim",),
    ),
    "to load: empty": Case(optim_loads(lambda state: {}), ("'state'", "'param_groups'")),
    "to load: the model's": Case(
        optim(lambda m, o: FSDP.optim_state_dict_to_load(m, o, m.state_dict())),
        ("'state'", "'param_groups'"),
    ),
    "to load: into a plain model": Case(
        optim(
            lambda m, o: FSDP.optim_state_dict_to_load(
                (plain := net()), adam_of(plain), FSDP.optim_state_dict(m, o)
            )
        ),
        ("Net", "FullyShardedDataParallel"),
    ),
    "to load: state of another type": Case(
        optim_loads(lambda state: {**state, "state": [1]}), ("'state'", "list"), CheckpointError
    ),
    "to load: groups of another type": Case(
        optim_loads(lambda state: {**state, "param_groups": {}}),
        ("'param_groups'", "dict"),
        CheckpointError,
    ),
    "to load: an invalid group": Case(
        optim_loads(lambda state: {**state, "param_groups": [3]}),
        ("'param_groups'", "int"),
        CheckpointError,
    ),
    "to load: a group without params": Case(
        optim_loads(lambda state: {**state, "param_groups": [{"lr": 3.0}]}),
        ("'params'", "group 0"),
        CheckpointError,
    ),
    "to load: of another model": Case(
        optim_loads(with_state(**{"elsewhere.weight": {"exp_avg": torch.ones(2)}})),
        ("'elsewhere.weight'",),
        CheckpointError,
    ),
    "to load: names and numbers": Case(
        optim_loads(lambda state: {**state, "state": {**state["state"], 3: {}}}),
        ("3", "names"),
        CheckpointError,
    ),
    "to load: state that is not a dict": Case(
        optim_loads(with_state(**{"layers.0.bias": 3})), ("'layers.0.bias'", "int"), CheckpointError
    ),
    "to load: a shape": Case(
        optim_loads(in_state("layers.0.weight", "exp_avg", lambda value: torch.ones(3, 4))),
        ("'layers.0.weight'", "'exp_avg'", "(3, 4)"),
        CheckpointError,
    ),
    "to load: a sharded value of another shape": Case(
        optim_loads(in_state("layers.0.weight", "exp_avg", in_another_shape), SHARDED),
        ("'layers.0.weight'", "'exp_avg'", "(3, 6)"),
        CheckpointError,
    ),
    "to load: a number instead of a tensor": Case(
        optim_loads(in_state("layers.0.weight", "exp_avg", lambda value: 3)),
        ("'layers.0.weight'", "'exp_avg'"),
        CheckpointError,
    ),
    "to load: a value without data": Case(
        optim_loads(in_state("layers.0.weight", "exp_avg", lambda value: value.to("meta"))),
        ("'layers.0.weight'", "'exp_avg'", "meta"),
        CheckpointError,
    ),
    "to load: by numbers, one too few": Case(
        numbered_loads(lambda state: state["param_groups"][0]["params"].pop()),
        ("5 parameters", "6 parameters"),
        CheckpointError,
    ),
    "to load: by numbers, two groups": Case(
        numbered_loads(lambda state: state["param_groups"].append({"params": []})),
        ("2 parameter group(s)",),
        CheckpointError,
    ),
    "to load: by numbers, one unknown": Case(
        numbered_loads(lambda state: state["state"].update({99: {}})), ("99",), CheckpointError
    ),
    "to load: by numbers, a shape": Case(
        numbered_loads(in_state(1, "exp_avg", lambda value: torch.ones(16))),
        ("'exp_avg'", "(16,)"),
        CheckpointError,
    ),
    "to load: is_named_optimizer": Case(
        optim(
            lambda m, o: FSDP.optim_state_dict_to_load(
                m, o, FSDP.optim_state_dict(m, o), is_named_optimizer="no"
            )
        ),
        ("is_named_optimizer", "'no'"),
    ),
    "to load: load_directly": Case(
        optim(
            lambda m, o: FSDP.optim_state_dict_to_load(
                m, o, FSDP.optim_state_dict(m, o), load_directly="no"
            )
        ),
        ("load_directly", "'no'"),
    ),
    "to load: group": Case(
        optim(
            lambda m, o: FSDP.optim_state_dict_to_load(m, o, FSDP.optim_state_dict(m, o), group=3)
        ),
        ("group", "3"),
    ),
}

# -- the scaler


def scaler(**arguments: Any) -> Make:
    return on_plain(lambda m: ShardedGradScaler("cpu", **arguments))


def scaled(
    call: Callable[[ShardedGradScaler, FSDP, torch.optim.Optimizer], object], first: bool = True
) -> Make:
    """A call of a scaler that has scaled something (``first``) is refused."""

    def of_model(model: FSDP, optimizer: torch.optim.Optimizer) -> object:
        scaler = ShardedGradScaler("cpu")
        if first:
            scaler.scale(torch.ones(()))
        return call(scaler, model, optimizer)

    return on_wrapped(of_model, with_grads=True)


SCALERS: dict[str, Case] = {
    "device: unknown": Case(
        on_plain(lambda m: ShardedGradScaler("nonsense")), ("device", "'nonsense'")
    ),
    "device: a number": Case(on_plain(lambda m: ShardedGradScaler(1.5)), ("device", "1.5")),
    "init_scale: a string": Case(scaler(init_scale="2"), ("init_scale", "'2'")),
    "init_scale: zero": Case(scaler(init_scale=0), ("init_scale", "0")),
    "init_scale: infinite": Case(scaler(init_scale=float("inf")), ("init_scale", "inf")),
    "init_scale: nan": Case(scaler(init_scale=float("nan")), ("init_scale", "nan")),
    "init_scale: nothing": Case(scaler(init_scale=None), ("init_scale", "None")),
    "init_scale: several": Case(scaler(init_scale=torch.ones(2)), ("init_scale", "tensor")),
    "backoff_factor: one": Case(scaler(backoff_factor=1.0), ("backoff_factor", "1.0")),
    "backoff_factor: a string": Case(scaler(backoff_factor="0.5"), ("backoff_factor", "'0.5'")),
    "growth_factor: one": Case(scaler(growth_factor=1), ("growth_factor", "1")),
    "growth_factor: a string": Case(scaler(growth_factor="2"), ("growth_factor", "'2'")),
    "growth_interval: zero": Case(scaler(growth_interval=0), ("growth_interval", "0")),
    "growth_interval: a fraction": Case(scaler(growth_interval=1.5), ("growth_interval", "1.5")),
    "growth_interval: a string": Case(scaler(growth_interval="10"), ("growth_interval", "'10'")),
    "enabled: a string": Case(scaler(enabled="no"), ("enabled", "'no'")),
    "process_group: a number": Case(scaler(process_group=3), ("process_group", "int")),
    "process_group: ranks": Case(scaler(process_group=[0, 1]), ("process_group", "list")),
    "scale: a number": Case(scaled(lambda s, m, o: s.scale(1.0)), ("scale(outputs)", "float")),
    "scale: nothing": Case(scaled(lambda s, m, o: s.scale(None)), ("scale(outputs)", "NoneType")),
    "scale: a dict": Case(
        scaled(lambda s, m, o: s.scale({"loss": torch.ones(())})),
        ("scale(outputs)", "output['loss']"),
    ),
    "scale: a list with a string": Case(
        scaled(lambda s, m, o: s.scale([torch.ones(()), "x"])), ("scale(outputs)", "str")
    ),
    "scale: integers": Case(
        scaled(lambda s, m, o: s.scale(torch.ones((), dtype=torch.int64))),
        ("scale(outputs)", "int64"),
    ),
    "unscale_: before": Case(
        scaled(lambda s, m, o: s.unscale_(o), first=False), ("unscale_", "scale(loss)"), StateError
    ),
    "step: before": Case(
        scaled(lambda s, m, o: s.step(o), first=False), ("step", "scale(loss)"), StateError
    ),
    "update: before": Case(
        scaled(lambda s, m, o: s.update(), first=False), ("update", "scale(loss)"), StateError
    ),
    "unscale_: of a model": Case(
        scaled(lambda s, m, o: s.unscale_(m)), ("unscale_", "FullyShardedDataParallel")
    ),
    "unscale_: of nothing": Case(
        scaled(lambda s, m, o: s.unscale_(None)), ("unscale_", "NoneType")
    ),
    "step: of a model": Case(
        scaled(lambda s, m, o: s.step(m)), ("step", "FullyShardedDataParallel")
    ),
    "step: of nothing": Case(scaled(lambda s, m, o: s.step(None)), ("step", "NoneType")),
    "update: a string": Case(scaled(lambda s, m, o: s.update("2")), ("new_scale", "'2'")),
    "update: zero": Case(scaled(lambda s, m, o: s.update(0.0)), ("new_scale", "0.0")),
    "update: several": Case(scaled(lambda s, m, o: s.update(torch.ones(2))), ("new_scale", "(2,)")),
    "update: a zero": Case(scaled(lambda s, m, o: s.update(torch.zeros(()))), ("new_scale",)),
    "update: a nan": Case(
        scaled(lambda s, m, o: s.update(torch.tensor(float("nan")))), ("new_scale",)
    ),
}

# -- at the wrong moment, in one call


def a_loss(model: nn.Module) -> Tensor:
    return model(batch(dist.get_rank())).pow(2).mean()


def backward_inside_summon(model: FSDP, optimizer: object) -> None:
    loss = a_loss(model)
    with FSDP.summon_full_params(model):
        loss.backward()


def both_inside_summon(model: FSDP, optimizer: object) -> None:
    with FSDP.summon_full_params(model):
        a_loss(model).backward()


def backward_after_summon(model: FSDP, optimizer: object) -> None:
    with FSDP.summon_full_params(model):
        loss = a_loss(model)
    loss.backward()


def backward_inside_summon_of_a_unit(model: FSDP, optimizer: object) -> None:
    loss = a_loss(model)
    with FSDP.summon_full_params(model.layers[1]):
        loss.backward()


def both_inside_summon_of_a_unit(model: FSDP, optimizer: object) -> None:
    with FSDP.summon_full_params(model.layers[1]):
        a_loss(model).backward()


def hook_while_gradients_wait(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with model.no_sync():
        a_loss(model).backward()
    try:
        model.register_comm_hook(None, lambda state, grad, output: None)
    finally:
        optimizer.zero_grad()


def inside_summon(call: Call) -> Callable[[FSDP, object], None]:
    def of_model(model: FSDP, optimizer: object) -> None:
        with FSDP.summon_full_params(model):
            call(model)

    return of_model


MOMENTS: dict[str, Case] = {
    "backward inside summon": Case(
        on_wrapped(backward_inside_summon), ("summon_full_params", "ackward"), StateError
    ),
    "forward and backward inside summon": Case(
        on_wrapped(both_inside_summon), ("summon_full_params",), StateError
    ),
    "backward after summon of a forward inside": Case(
        on_wrapped(backward_after_summon), ("summon_full_params",), StateError
    ),
    "backward inside summon of a unit": Case(
        on_wrapped(backward_inside_summon_of_a_unit), ("summon_full_params", "layers.1"), StateError
    ),
    "forward and backward inside summon of a unit": Case(
        on_wrapped(both_inside_summon_of_a_unit), ("summon_full_params", "layers.1"), StateError
    ),
    "hook while gradients wait": Case(
        on_wrapped(hook_while_gradients_wait), ("no_sync", "hook"), StateError
    ),
    "deepcopy inside summon": Case(
        on_wrapped(inside_summon(copy.deepcopy)), ("deepcopy", "summon_full_params"), StateError
    ),
    "pickle inside summon": Case(
        on_wrapped(inside_summon(pickle.dumps)), ("pickle", "summon_full_params"), StateError
    ),
}

# -- run on the ranks

GROUPS: dict[str, dict[str, Case]] = {
    "modules": MODULES,
    "policies": POLICIES,
    "arguments": ARGUMENTS,
    "training": TRAINING,
    "state dicts": STATE_DICTS,
    "optimizers": OPTIMIZERS,
    "scalers": SCALERS,
    "moments": MOMENTS,
}


# Where the form of the parameters makes a difference both are tried, by default each with every
# second case.
FORMS = {
    group: (False, True) if group in ("training", "state dicts", "optimizers") else (False,)
    for group in GROUPS
}


def forms_of(group: str, name: str) -> Sequence[bool]:
    forms = FORMS[group]
    return sample(forms, list(GROUPS[group]).index(name) % len(forms))


@dataclasses.dataclass
class Outcome:
    """The outcome of one call on one rank."""

    kinds: tuple[str, ...] = ()  # names of the classes of the exception
    message: str = "nothing was raised"
    seconds: float = 0.0
    changed: str = ""
    trains: str = ""  # the problem with a step afterwards


def snapshot(module: nn.Module) -> list[Any]:
    found: list[Any] = [(name, id(child)) for name, child in module.named_modules()]
    for tensors in (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        for name, t in tensors:
            grad = None if t.grad is None else t.grad.tolist()
            lazy = isinstance(t, nn.UninitializedParameter)
            values = None if t.is_meta or lazy else t.tolist()
            found.append(
                (name, id(t), lazy or tuple(t.shape), str(t.device), t.requires_grad, values, grad)
            )
    for child in module.modules():
        if isinstance(child, FSDP):
            found.append((FSDP.get_state_dict_type(child), child.check_is_root()))
    return found


def _try_case(case: Case, trains: bool) -> Outcome:
    """trains: take a step with the module afterwards."""
    module, call = case.make()
    before, outcome = snapshot(module), Outcome()
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        outcome.kinds = tuple(cls.__name__ for cls in type(error).__mro__)
        outcome.message = re.sub("0x[0-9a-f]+|global rank [0-9]+", "...", str(error))
    outcome.seconds = time.monotonic() - started
    try:
        after = snapshot(module)
        outcome.changed = "\n".join(
            f"{old} became {new}" for old, new in zip(before, after, strict=False) if old != new
        )
        if len(before) != len(after):
            outcome.changed += f"{len(before)} entries became {len(after)}"
        if trains:
            outcome.trains = _trains(module)
    except Exception as error:
        outcome.trains = f"{type(error).__name__}: {error}"
    dist.barrier()  # the ranks can still communicate, and no operation is pending
    return outcome


def _trains(module: nn.Module) -> str:
    """A rejected module still trains and can be wrapped; a wrapped model continues like the
    unsharded one."""
    if isinstance(module, Net) and not any(
        isinstance(child, FSDP) or child.__dict__.keys() & {"weight"} for child in module.modules()
    ):
        if any(p.is_meta or p.is_inference() for p in module.parameters()):
            return ""
        plain = copy.deepcopy(module)
        plain(batch(0)).sum().backward()
        if any((p.grad is not None) is not p.requires_grad for p in plain.parameters()):
            return "the refused module does not train as before"
        module = shard(module)
    if isinstance(module, FSDP) and isinstance(module.module, Net):
        step(module)
        return difference(module, 1)
    return ""


def _try_all(group: str, names: list[str], use_orig_params: bool) -> dict[str, Outcome]:
    """Every other case trains afterwards; where both forms are tried, the others in the other."""
    global _use_orig_params
    _use_orig_params = use_orig_params
    parities = {name: number % 2 for number, name in enumerate(GROUPS[group])}
    return {
        name: _try_case(
            GROUPS[group][name],
            (TEST_ALL and len(FORMS[group]) == 1) or parities[name] == use_orig_params,
        )
        for name in names
    }


@functools.cache
def outcomes(group: str, use_orig_params: bool) -> dict[str, list[Outcome] | str]:
    """Return {case: the outcome on each rank, or how it ended the processes}."""
    names = [name for name in GROUPS[group] if use_orig_params in forms_of(group, name)]
    try:
        return _by_case(run_ranks(2, _try_all, group, names, use_orig_params, group_timeout=15))
    except RankError:  # one case has ended the processes: find it
        found: dict[str, list[Outcome] | str] = {}
        for name in names:
            try:
                found |= _by_case(
                    run_ranks(
                        2, _try_all, group, [name], use_orig_params, timeout=30, group_timeout=10
                    )
                )
            except RankError as error:
                found[name] = str(error)
        return found


def _by_case(by_rank: list[dict[str, Outcome]]) -> dict[str, list[Outcome] | str]:
    return {name: [its[name] for its in by_rank] for name in by_rank[0]}


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, cases in GROUPS.items() for name in cases]
)
def test_bad_input_raises_the_same_error_on_every_rank_and_changes_nothing(
    group: str, name: str
) -> None:
    case = GROUPS[group][name]
    for use_orig_params in forms_of(group, name):
        found = outcomes(group, use_orig_params)[name]
        assert not isinstance(found, str), found
        for rank, outcome in enumerate(found):
            assert outcome.kinds[:1], f"rank {rank}, use_orig_params={use_orig_params}: {outcome}"
            assert case.kind.__name__ in outcome.kinds, (
                f"rank {rank}: {outcome.kinds[:1]} {outcome.message}"
            )
            for kind in (BUILT_IN[case.kind], FsdpCompatError, case.torch or BUILT_IN[case.kind]):
                assert kind.__name__ in outcome.kinds, f"{kind.__name__} is not in {outcome.kinds}"
            for fact, line in zip(FACTS, outcome.message.splitlines()[-4:], strict=True):
                assert line.startswith(f"  {fact}"), outcome.message
            for text in case.named:
                assert text in outcome.message, f"{text!r} is not in: {outcome.message}"
            assert "unit ''" not in outcome.message, (
                f"the root has no name that helps: {outcome.message}"
            )
            assert outcome.message == found[0].message
            assert outcome.seconds < 5
            assert not outcome.changed, f"{outcome.changed}\n{outcome.message}"
            assert not outcome.trains, f"{outcome.trains}\n{outcome.message}"


# -- inside of forward and of backward


def loads_a_state(model: FSDP, optimizer: object) -> None:
    model.load_state_dict({name: value + 1 for name, value in reference(0).items()})


def sharded_state(model: FSDP, optimizer: object) -> None:
    with FSDP.state_dict_type(model, SHARDED):
        model.state_dict()


def sharded_optim_state(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with FSDP.state_dict_type(model, SHARDED):
        FSDP.optim_state_dict(model, optimizer)


# {call: (how, what the message names, the built-in class that torch raises in forward)}
INSIDE: dict[
    str, tuple[Callable[[FSDP, torch.optim.Optimizer], object], tuple[str, ...], type[Exception]]
] = {
    "state_dict": (lambda m, o: m.state_dict(), ("state_dict",), RuntimeError),
    "state_dict of a unit": (lambda m, o: m.layers[0].state_dict(), ("state_dict",), RuntimeError),
    "state_dict, sharded": (sharded_state, ("state_dict",), RuntimeError),
    "load_state_dict": (loads_a_state, ("load_state_dict",), RuntimeError),
    "clip_grad_norm_": (lambda m, o: m.clip_grad_norm_(1e-9), ("clip_grad_norm_",), ValueError),
    "summon_full_params": (lambda m, o: summon(m), ("summon_full_params",), AssertionError),
    "summon_full_params of a unit": (
        lambda m, o: summon(m.layers[0]),
        ("summon_full_params",),
        AssertionError,
    ),
    "apply": (lambda m, o: m.apply(lambda child: None), ("apply",), ValueError),
    "deepcopy": (lambda m, o: copy.deepcopy(m), ("deepcopy",), RuntimeError),
    "pickle": (lambda m, o: pickle.dumps(m), ("pickle",), RuntimeError),
    "torch.save": (lambda m, o: torch.save(m, io.BytesIO()), ("pickle",), RuntimeError),
    "optim_state_dict": (
        lambda m, o: FSDP.optim_state_dict(m, o),
        ("optim_state_dict",),
        RuntimeError,
    ),
    "optim_state_dict, sharded": (sharded_optim_state, ("optim_state_dict",), RuntimeError),
    "register_comm_hook": (
        lambda m, o: m.register_comm_hook(None, lambda s, g, out: None),
        ("register_comm_hook",),
        RuntimeError,
    ),
    "no_sync": (lambda m, o: enter(m.no_sync()), ("no_sync",), ValueError),
    "a step of the optimizer": (lambda m, o: o.step(), ("step",), RuntimeError),
}
# {place: (the module from where, in which pass, use_orig_params)}
PLACES: dict[str, tuple[Callable[[FSDP], Any], str, bool]] = {
    "forward of the root": (lambda m: m.module, "forward", False),
    "forward of a unit": (lambda m: m.layers[1].module, "forward", True),
    "backward of the root": (lambda m: m.module, "backward", True),
    "backward of a unit": (lambda m: m.layers[0].module, "backward", False),
}


@dataclasses.dataclass
class Inside:
    """The outcome of a call inside forward or backward on one rank."""

    caught: tuple[
        str, ...
    ] = ()  # names of the classes of what the call raised inside, where it was caught
    raised: tuple[str, ...] = ()  # and of what came out of the pass, where it was not
    message: str = "nothing was raised"
    wrong: str = ""


def _classes(error: BaseException) -> tuple[str, ...]:
    return tuple(cls.__name__ for cls in type(error).__mro__)


def _try_inside(name: str, place: str) -> Inside:
    call = INSIDE[name][0]
    find, when, use_orig_params = PLACES[place]
    model = shard(use_orig_params=use_orig_params)
    optimizer = sgd(model)
    found = Inside()

    def catch() -> None:
        try:
            call(model, optimizer)
        except Exception as error:
            found.caught, found.message = _classes(error), str(error)

    inside = find(model).inside
    inside[when] = catch
    try:
        step(model, optimizer)
        found.wrong = difference(model, 1)
    except Exception as error:
        found.wrong = f"the step that caught it: {type(error).__name__}: {error}"
    inside[when] = lambda: call(model, optimizer)
    try:
        step(model, optimizer)
    except Exception as error:
        found.raised = _classes(error)
    inside.clear()
    try:
        step(model, optimizer)
        found.wrong = found.wrong or (difference(model, 2) if found.raised else "")
    except Exception as error:
        found.wrong = found.wrong or f"the step after: {type(error).__name__}: {error}"
    dist.barrier()
    return found


def _try_all_inside(place: str, names: list[str]) -> dict[str, Inside]:
    return {name: _try_inside(name, place) for name in names}


# By default each call in a forward and in a backward.
TRIED_INSIDE = [
    (name, place)
    for number, name in enumerate(INSIDE)
    for place in sample(list(PLACES), number % 2, number % 2 + 2)
]


@functools.cache
def inside_outcomes(place: str) -> dict[str, list[Inside] | str]:
    names = [name for name, its in TRIED_INSIDE if its == place]
    try:
        by_rank = run_ranks(2, _try_all_inside, place, names, group_timeout=15)
        return {name: [its[name] for its in by_rank] for name in names}
    except RankError:
        found: dict[str, list[Inside] | str] = {}
        for name in names:
            try:
                by_rank = run_ranks(2, _try_all_inside, place, [name], timeout=30, group_timeout=10)
                found[name] = [its[name] for its in by_rank]
            except RankError as error:
                found[name] = str(error)
        return found


@pytest.mark.parametrize(("name", "place"), TRIED_INSIDE)
def test_call_during_forward_or_backward_raises_and_the_pass_completes(
    name: str, place: str
) -> None:
    _, named, built_in = INSIDE[name]
    found = inside_outcomes(place)[name]
    assert not isinstance(found, str), found
    for inside in found:
        for classes in (inside.caught, inside.raised):
            assert {"StateError", "RuntimeError", built_in.__name__} <= set(classes), inside
        for fact, line in zip(FACTS, inside.message.splitlines()[-4:], strict=True):
            assert line.startswith(f"  {fact}"), inside.message
        for text in (*named, place.split()[0]):
            assert text in inside.message, inside.message
        assert inside.message == found[0].message
        assert not inside.wrong, f"{inside.wrong}\n{inside.message}"


# -- bad input on one rank only

# {what: (the good call, the bad one, whether the good one communicates)}
ON_ONE_RANK: dict[str, tuple[OnModel, OnModel, bool]] = {
    "clip_grad_norm_": (
        lambda m, o: m.clip_grad_norm_(1.0),
        lambda m, o: m.clip_grad_norm_("1"),
        True,
    ),
    "summon_full_params": (
        lambda m, o: summon(m, writeback=False, rank0_only=True),
        lambda m, o: summon(m, writeback=True, rank0_only=True),
        True,
    ),
    "optim_state_dict": (
        lambda m, o: FSDP.optim_state_dict(m, o),
        lambda m, o: FSDP.optim_state_dict(m, o, {}),
        True,
    ),
    "the form of state dicts": (
        lambda m, o: FSDP.set_state_dict_type(m, FULL),
        lambda m, o: FSDP.set_state_dict_type(m, "full"),
        False,
    ),
    "load_state_dict": (
        lambda m, o: m.load_state_dict(reference(0)),
        lambda m, o: m.load_state_dict([]),
        False,
    ),
    "register_comm_hook": (lambda m, o: None, lambda m, o: m.register_comm_hook(None, 3), False),
    "no_sync": (lambda m, o: enter(m.no_sync()), lambda m, o: enter(m.layers[0].no_sync()), False),
    "a construction": (
        lambda m, o: shard(process_group=m.process_group),
        lambda m, o: shard(process_group=m.process_group, use_orig_params="no"),
        False,  # the connections of the group exist
    ),
}
LIMIT_S = 1.5


@dataclasses.dataclass
class Lone:
    """What one rank observed of a call that was wrong only on rank 1."""

    kinds: tuple[str, ...]
    seconds: float
    wrong: str


def _lone_cases() -> dict[str, Lone]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_COMPAT_MEET_TIMEOUT", str(LIMIT_S / 2))
        return _run_lone_cases()


def _run_lone_cases() -> dict[str, Lone]:
    found = {}
    for name, (good, bad, _) in ON_ONE_RANK.items():
        group = dist.new_group([0, 1], timeout=timedelta(seconds=LIMIT_S))
        model = shard(process_group=group)
        optimizer = torch.optim.Adam(model.parameters(), 0.0)
        step(model, optimizer)
        kinds: tuple[str, ...] = ()
        dist.barrier()
        started = time.monotonic()
        try:
            (bad if dist.get_rank() == 1 else good)(model, optimizer)
        except Exception as error:
            kinds = _classes(error)
        seconds = time.monotonic() - started
        dist.barrier()
        step(model)  # nothing was sent: both can go on
        found[name] = Lone(kinds, seconds, difference(model, 1))
    return found


@pytest.fixture(scope="module")
def lone_outcomes() -> list[dict[str, Lone]]:
    return run_ranks(2, _lone_cases)


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_bad_input_on_one_rank_raises_there_and_does_not_hang_the_other(
    name: str, lone_outcomes: list[dict[str, Lone]]
) -> None:
    other, bad = (its[name] for its in lone_outcomes)
    assert "FsdpCompatError" in bad.kinds, bad
    assert bad.seconds < LIMIT_S / 2, "it was noticed before anything was sent"
    assert other.seconds < LIMIT_S + 3
    assert ("FsdpCompatError" in other.kinds) == ON_ONE_RANK[name][2], other
    assert not other.wrong and not bad.wrong


# -- groups and meshes without this rank, and none at all


def _outside() -> dict[str, str]:
    """{how: the message on the rank outside the group}; the rank inside wraps a module of its
    own."""
    alone, pair = dist.new_group([0]), dist.new_group([0, 1])
    each, _ = dist.new_subgroups_by_enumeration([[0], [1]])
    inside, messages = dist.get_rank() == 0, {}
    ways: dict[str, Callable[[nn.Module], object]] = {
        "process_group": lambda m: FSDP(m, process_group=alone),
        "a tuple of groups": lambda m: FSDP(
            m, sharding_strategy=HYBRID, process_group=(alone, each if inside else pair)
        ),
        "device_mesh": lambda m: FSDP(m, device_mesh=DeviceMesh("cpu", [0])),
        "a scaler": lambda m: ShardedGradScaler("cpu", process_group=alone),
        "a scaler's disabled": lambda m: ShardedGradScaler(
            "cpu", process_group=alone, enabled=False
        ),
    }
    for name, call in ways.items():
        module = net()
        before = snapshot(module)
        if inside:
            call(module)
        else:
            try:
                call(module)
            except UsageError as error:
                messages[name] = str(error)
            except Exception as error:
                messages[name] = f"{type(error).__name__}: {error}"
            assert snapshot(module) == before, name
        dist.barrier()
    return messages


def test_rank_outside_the_group_gets_a_clear_error() -> None:
    messages = run_ranks(2, _outside)[1]
    assert list(messages) == [
        "process_group",
        "a tuple of groups",
        "device_mesh",
        "a scaler",
    ]  # a disabled one does not need a group
    for message in messages.values():
        assert re.search("is not (a member of|in) the process group", message), message
        for fact, line in zip(FACTS, message.splitlines()[-4:], strict=True):
            assert line.startswith(f"  {fact}"), message


def test_missing_process_group_error_names_the_remedy() -> None:
    assert not dist.is_initialized()
    module = net()
    before = snapshot(module)
    for arguments in (
        {},
        {"use_orig_params": True},
        {"sharding_strategy": HYBRID},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"auto_wrap_policy": ModuleWrapPolicy({Layer})},
    ):
        with pytest.raises(UsageError, match="init_process_group") as caught:
            FSDP(module, **arguments)
        assert all(fact in str(caught.value) for fact in FACTS)
        assert snapshot(module) == before


def _uneven_nodes() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(UsageError, match="a multiple of 3 ranks") as caught:
        FSDP(net(), sharding_strategy=HYBRID)
    assert all(fact in str(caught.value) for fact in FACTS)
    for value in ("two", "0", "-1"):
        os.environ["LOCAL_WORLD_SIZE"] = value
        with pytest.raises(UsageError, match="LOCAL_WORLD_SIZE") as caught:
            FSDP(net(), sharding_strategy=HYBRID)
        assert all(fact in str(caught.value) for fact in FACTS)
    dist.barrier()


def test_hybrid_strategy_with_uneven_nodes_raises() -> None:
    run_ranks(2, _uneven_nodes)


AFTER_DESTRUCTION: dict[str, OnModel] = {
    "forward and backward": lambda m, o: m(batch(0)).sum().backward(),
    "evaluation": lambda m, o: torch.no_grad()(m)(torch.ones(2, 4)),
    "state_dict": lambda m, o: m.state_dict(),
    "load_state_dict": lambda m, o: m.load_state_dict(reference(0)),
    "clip_grad_norm_": lambda m, o: m.clip_grad_norm_(1.0),
    "summon_full_params": lambda m, o: summon(m),
    "optim_state_dict": lambda m, o: FSDP.optim_state_dict(m, o),
    "a copy": lambda m, o: copy.deepcopy(m),
    "another one": lambda m, o: shard(),
}


def _after_destruction(used_before: bool) -> dict[str, str]:
    model = shard()
    optimizer = torch.optim.Adam(model.parameters(), 0.0)
    if used_before:
        step(model, optimizer)
    dist.barrier()
    dist.destroy_process_group()
    found = {}
    for name, call in AFTER_DESTRUCTION.items():
        try:
            call(model, optimizer)
            found[name] = ""
        except FsdpCompatError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("used_before", [False, True])
def test_model_works_or_raises_after_its_process_group_is_destroyed(
    used_before: bool,
) -> None:
    for found in run_ranks(2, _after_destruction, used_before, timeout=20, group_timeout=5):
        assert list(found) == list(AFTER_DESTRUCTION)
        assert found["another one"]
        for name, message in found.items():
            for fact, line in zip(FACTS, message.splitlines()[-4:], strict=bool(message)):
                assert line.startswith(f"  {fact}"), message
            assert not message or "init_process_group" in message, f"{name}: {message}"


# -- allowed, although it looks odd


def _options() -> Iterable[dict[str, bool]]:
    names = ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
    for values in itertools.product((False, True), repeat=len(names)):
        yield dict(zip(names, values, strict=True))


def _summon_options() -> None:
    for use_orig_params in (False, True):
        model = shard(use_orig_params=use_orig_params)
        optimizer = sgd(model)
        a_loss(model).backward()
        for options in _options():
            before, refused = snapshot(model), options["writeback"] and options["rank0_only"]
            with pytest.raises(NotImplementedError) if refused else contextlib.nullcontext():
                summon(model, **options)
            assert snapshot(model) == before, options
        optimizer.step()
        assert not difference(model, 1)


def test_every_combination_of_summon_options_raises_or_changes_nothing() -> None:
    run_ranks(2, _summon_options)


def _forward_inside_summon() -> None:
    for use_orig_params in (False, True):
        model, plain = shard(use_orig_params=use_orig_params), net()
        x = batch(dist.get_rank())
        with FSDP.summon_full_params(model):
            assert torch.allclose(model(x), plain(x))
            with torch.no_grad():
                assert torch.allclose(model(x), plain(x))
        step(model)
        assert not difference(model, 1)


def test_forward_inside_summon_full_params_uses_the_full_parameters() -> None:
    run_ranks(2, _forward_inside_summon)


def _wraps_in(mode: str) -> None:
    for use_orig_params in (False, True):
        module = net()
        with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]():
            model = shard(module, use_orig_params=use_orig_params)
        step(model)
        assert not difference(model, 1)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_model_wrapped_under_no_grad_trains(mode: str) -> None:
    run_ranks(2, _wraps_in, mode)


def _loads_while_gradients_wait() -> None:
    moved = {name: value + 1 for name, value in reference(0).items()}
    plain = net()
    optimizer = sgd(plain)
    for _ in range(2):
        torch.stack([model_loss(plain, rank) for rank in range(2)]).mean().backward()
        plain.load_state_dict(moved)
    optimizer.step()
    for use_orig_params in (False, True):
        for kind in (FULL, SHARDED):
            model = shard(use_orig_params=use_orig_params)
            optimizer = sgd(model)
            with FSDP.state_dict_type(model, kind):
                with model.no_sync():
                    a_loss(model).backward()
                own = model.state_dict()
                model.load_state_dict(
                    moved if kind is FULL else own
                )  # a sharded one has the model's own values
                if kind is SHARDED:
                    model.load_state_dict(moved)
            a_loss(model).backward()
            optimizer.step()
            assert_equal(state_of(model), plain.state_dict())


def model_loss(model: nn.Module, rank: int) -> Tensor:
    return model(batch(rank)).pow(2).mean()


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-5), name


def test_state_dict_loads_while_no_sync_gradients_are_pending() -> None:
    run_ranks(2, _loads_while_gradients_wait)


def _loads_other_dtypes() -> None:
    for use_orig_params in (False, True):
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
            model, plain = shard(use_orig_params=use_orig_params), net()
            state = {name: (value * 3).to(dtype) for name, value in reference(0).items()}
            plain.load_state_dict(state)
            model.load_state_dict(state)
            found = state_of(model)
            assert_equal(found, plain.state_dict())
            assert {value.dtype for value in found.values()} == {torch.float32}


def test_load_converts_values_of_other_real_dtypes() -> None:
    run_ranks(2, _loads_other_dtypes)


def _loads_what_is_missing_or_too_much() -> None:
    for use_orig_params in (False, True):
        model, plain = shard(use_orig_params=use_orig_params), net()
        state = {name: value + 1 for name, value in reference(0).items() if name != "layers.0.bias"}
        state["elsewhere.weight"] = torch.ones(3)
        for module in (model, plain):
            found = module.load_state_dict(state, strict=False)
            assert found.missing_keys == ["layers.0.bias"]
            assert found.unexpected_keys == ["elsewhere.weight"]
        assert_equal(state_of(model), plain.state_dict())


def test_non_strict_load_reports_missing_and_unexpected_keys() -> None:
    run_ranks(2, _loads_what_is_missing_or_too_much)


class FreezesItself(Layer):
    """Freezes its weight in its first forward, once."""

    def forward(self, x: Tensor) -> Tensor:
        if "frozen" not in self.inside:
            self.inside["frozen"] = bool
            self.weight.requires_grad_(False)
        return super().forward(x)


def _freezes_in_forward() -> list[str]:
    results = []
    for use_orig_params in (False, True):
        module = net()
        module.layers[1] = FreezesItself()
        model = shard(module, use_orig_params=use_orig_params)
        before = state_of(model)["layers.1.weight"]
        try:
            for _ in range(3):
                step(model)
            results.append(
                "followed"
                if torch.equal(before, state_of(model)["layers.1.weight"])
                else "trained in spite of it"
            )
        except StateError as error:
            results.append(" ".join(fact for fact in FACTS if fact in str(error)))
        dist.barrier()
    return results


def test_freezing_inside_forward_persists_or_raises() -> None:
    for results in run_ranks(2, _freezes_in_forward):
        assert set(results) <= {"followed", " ".join(FACTS)}


class Odd(Exception):
    """An exception class that only these tests raise."""


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise Odd


def _errors_of_the_user() -> None:
    """Exceptions of user functions propagate unchanged."""
    ways: dict[str, Callable[[nn.Module], object]] = {
        "a policy": lambda m: FSDP(m, auto_wrap_policy=_raises),
        "a CustomPolicy": lambda m: FSDP(m, auto_wrap_policy=CustomPolicy(_raises)),
        "param_init_fn": lambda m: FSDP(m.to("meta"), param_init_fn=_raises),
        "ignored_modules": lambda m: FSDP(m, ignored_modules=(_raises() for _ in range(1))),
        "apply": lambda m: shard(m).apply(_raises),
        "inside summon": lambda m: inside_summon(_raises)(shard(m), None),
        "inside no_sync": lambda m: _inside_no_sync(shard(m)),
        "a wrapper": lambda m: wrap_with(_raises, m),
        "a hook": lambda m: _with_hook(shard(m)),
    }
    for name, call in ways.items():
        with pytest.raises(Odd):
            call(net())
        dist.barrier()
        assert name
    model = shard()
    with pytest.raises(Odd):
        model.apply(_raises)
    with pytest.raises(Odd):
        inside_summon(_raises)(model, None)
    with pytest.raises(Odd):
        _inside_no_sync(model)
    step(model)
    assert not difference(model, 1)


def _inside_no_sync(model: FSDP) -> None:
    with model.no_sync():
        _raises()


def wrap_with(wrapper: Any, module: nn.Module) -> None:
    try:
        with enable_wrap(wrapper_cls=wrapper):
            wrap(module)
    finally:
        assert wrap(module) is module, "outside of a block nothing is wrapped"


def _with_hook(model: FSDP) -> None:
    model.register_comm_hook(None, _raises)
    step(model)


def test_exceptions_of_user_functions_propagate_unchanged() -> None:
    run_ranks(2, _errors_of_the_user)
