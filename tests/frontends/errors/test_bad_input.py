"""Bad input and calls at the wrong moment raise the same clear error on every rank at once, and
change nothing: the next training step equals the unsharded one.

A case is one line of a table: the call, the words of the message, and the class."""

# ruff: noqa: F401  # the tables use what is imported

from __future__ import annotations

import builtins
import contextlib
import copy
import dataclasses
import functools
import os
import pickle
import re
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, inf, nan, nn, ones
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_compat
from fsdp_compat import (
    CPUOffload,
    FullOptimStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    errors,
    register_fsdp_forward_method,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.errors import FsdpCompatError, StateError, UsageError
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
from tests.support.cases import about
from tests.support.parity import both_forms
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import TEST_ALL

FACTS = ("expected:", "got:", "where:", "to do:")
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
HYBRID, NO_SHARD = ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD
INT, FP8, HALF = torch.int64, torch.float8_e4m3fn, torch.half

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
        self.frozen = nn.Parameter(ones(4), requires_grad=False)
        self.scale = nn.Parameter(ones(4))
        self.offset: Tensor
        self.register_buffer("offset", ones(4))
        self.inside: dict[str, Callable[[], object]] = {}

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


def shard(module: nn.Module | None = None, **arguments: Any) -> Any:
    arguments.setdefault("auto_wrap_policy", ModuleWrapPolicy({Layer}))
    return FSDP(net() if module is None else module, **arguments)


def batch(rank: int) -> Tensor:
    return torch.arange(8.0).view(2, 4) / 8 - rank


def loss_of(model: nn.Module, rank: int | None = None) -> Tensor:
    return model(batch(dist.get_rank() if rank is None else rank)).pow(2).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.0)


@functools.cache
def reference(num_steps: int) -> dict[str, Tensor]:
    """The state of an unsharded Net after some steps over the batches of 2 ranks."""
    model = net()
    optimizer = sgd(model)
    for _ in range(num_steps):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rank) for rank in range(2)]).mean().backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or sgd(model)
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def state_of(model: FSDP, kind: StateDictType = FULL) -> dict[str, Tensor]:
    with FSDP.state_dict_type(model, kind):
        return model.state_dict()


def difference(model: FSDP, num_steps: int) -> str:
    """Return the differences between a sharded Net and the unsharded one after some steps."""
    return difference_of(model, reference(num_steps))


def difference_of(model: FSDP, wanted: Mapping[str, Tensor]) -> str:
    found = state_of(model)
    if list(found) != list(wanted):
        return f"its state dict has {list(found)}"
    wrong = [name for name in found if not torch.allclose(found[name], wanted[name], atol=1e-6)]
    return f"{wrong} differ from the unsharded model" if wrong else ""


# -- what the calls of the tables use


def tied(inside: bool) -> nn.Module:
    """A module that shares a weight with one that is wrapped: inside it, or elsewhere."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    first = FSDP(first, use_orig_params=inside)  # type: ignore[assignment]
    return nn.Sequential(first, second) if inside else second


def of_meta(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules).to("meta")


def in_inference_mode(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.inference_mode():
        return make()


def enter(context: contextlib.AbstractContextManager[Any]) -> None:
    with context:
        pass


def summon(model: Any, **options: Any) -> None:
    enter(FSDP.summon_full_params(model, **options))


def summoned(model: Any, call: Callable[[], object], **options: Any) -> None:
    """Call inside summon_full_params."""
    with FSDP.summon_full_params(model, **options):
        call()


def backward_after_summon(model: FSDP) -> None:
    with FSDP.summon_full_params(model):
        loss = loss_of(model)
    loss.backward()


def hook_while_gradients_wait(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with model.no_sync():
        loss_of(model).backward()
    try:
        model.register_comm_hook(None, lambda state, grad, output: None)
    finally:
        optimizer.zero_grad()


def second_hook() -> None:
    """On a second model, because a hook cannot be removed."""
    other = shard()
    for _ in range(2):
        other.register_comm_hook(None, lambda state, grad, output: None)


def world() -> Any:
    return dist.group.WORLD


def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def destroyed() -> Any:
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    return group


def on_layer(answer: object) -> CustomPolicy:
    return CustomPolicy(lambda module: answer if isinstance(module, Layer) else False)


def returning(answer: object) -> Any:
    """A policy object that returns ``answer`` as its plan."""

    class Policy:
        def _run_policy(self, root_module: nn.Module, *args: Any) -> Any:
            return answer

    return Policy()


by_size = partial(partial, size_based_auto_wrap_policy, min_num_params=1)
by_layer = partial(partial, transformer_auto_wrap_policy)
by_function = partial(partial, lambda_auto_wrap_policy)


def mixed(module: nn.Module, **fields: Any) -> FSDP:
    return FSDP(module, mixed_precision=MixedPrecision(**fields))


sets = FSDP.set_state_dict_type


def config(name: str, **fields: Any) -> Any:
    return getattr(fsdp_compat, f"{name}StateDictConfig")(**fields)


def differing_forms(model: Any) -> None:
    FSDP.set_state_dict_type(model.layers[0], SHARDED)
    try:
        FSDP.get_state_dict_type(model)
    finally:
        FSDP.set_state_dict_type(model.layers[0], FULL)


def _changed(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """None: remove it. A function: of the value."""
    for name, change in changes.items():
        if change is None:
            del values[name]
        else:
            values[name] = change(values[name]) if callable(change) else change


def load(model: Any, changes: Any, kind: StateDictType = FULL, **options: Any) -> None:
    """Load a state dict whose values differ from the model's, with some changes."""
    with FSDP.state_dict_type(model, kind):
        own = model.state_dict()
        state = {name: value if kind is SHARDED else value + 1 for name, value in own.items()}
        if callable(changes):
            state = changes(state)
        else:
            _changed(state, changes)
        model.load_state_dict(state, **options)


def reshaped(value: Tensor) -> Any:
    """Return a sharded value of a model with other shapes."""
    return state_of(FSDP(nn.Linear(6, 3, bias=False)), SHARDED)["weight"]


optim_state, to_load = FSDP.optim_state_dict, FSDP.optim_state_dict_to_load


def optim_load(
    model: Any, optimizer: Any, change: Callable[[Any], Any], kind: StateDictType = FULL
) -> None:
    """Load the optimizer's state by names, after a change."""
    with FSDP.state_dict_type(model, kind):
        state = optim_state(model, optimizer)
        changed = change(state)
        to_load(model, optimizer, state if changed is None else changed)


def before_wrapping() -> tuple[FSDP, torch.optim.Optimizer]:
    """Return a model, and an optimizer that was made before it was wrapped."""
    module = net()
    optimizer = adam(module)
    return shard(module), optimizer


def group_of(state: Any) -> Any:
    return state["param_groups"][0]


def average(change: Any, name: Any = "layers.0.weight") -> Callable[[Any], None]:
    return lambda state: _changed(state["state"][name], {"exp_avg": change})


def numbered_load(model: Any, optimizer: Any, change: Callable[[Any], Any]) -> None:
    """Load the state of an unwrapped model's optimizer, by numbers, after a change."""
    plain = net()
    its = adam(plain)
    loss_of(plain, 0).backward()
    its.step()
    state = its.state_dict()
    change(state)
    to_load(model, optimizer, state)


# -- the tables


class Case(typing.NamedTuple):
    """A call that is refused."""

    call: str  # of ``m``, the module, ``o``, its optimizer, and ``s``, a scaler
    words: Sequence[str]  # that the message has
    kind: type[FsdpCompatError]
    torch: type[Exception]  # the built-in class that torch raises here
    module: str  # makes ``m``, "": what the group has


def cases(table: str) -> list[Case]:
    """A line is: [module ->] call | word; word [| class [torch's class]]; UsageError by default."""
    found = []
    for line in table.strip().splitlines():
        call, words, *kinds = (part.strip() for part in line.split(" | "))
        kind, *others = [*kinds[0].split(), ""] if kinds else ["UsageError", ""]
        cls = getattr(errors, kind)
        built_in = getattr(
            builtins, others[0] or {UsageError: "ValueError"}.get(cls, "RuntimeError")
        )
        module, _, rest = call.rpartition(" -> ")
        found.append(Case(rest, [w.strip() for w in words.split(";")], cls, built_in, module))
    return found


def _plain(use_orig_params: bool) -> dict[str, Any]:
    return {"m": net()}


def _wrapped(use_orig_params: bool) -> dict[str, Any]:
    model = shard(use_orig_params=use_orig_params)
    return {"m": model, "o": sgd(model)}


def _with_gradients(use_orig_params: bool) -> dict[str, Any]:
    names = _wrapped(use_orig_params)
    names["m"](batch(dist.get_rank())).sum().backward()
    return names


def _with_adam(use_orig_params: bool) -> dict[str, Any]:
    names = _with_gradients(use_orig_params)
    names["o"] = adam(names["m"])
    names["o"].step()
    names["o"].zero_grad()
    return names


def _scaled(use_orig_params: bool) -> dict[str, Any]:
    scaler = ShardedGradScaler("cpu")
    scaler.scale(ones(()))
    return {**_with_gradients(use_orig_params), "s": scaler}


MODULES = """
None -> FSDP(m) | Module; NoneType
nn.ReLU() -> FSDP(m) | no parameters; ReLU
shard() -> FSDP(m.layers[0]) | wrapped model; Net
shard().layers[0].module -> FSDP(m) | already wrapped; Layer
shard(auto_wrap_policy=None) -> FSDP(m.module.layers) | FullyShardedDataParallel
shard() -> FSDP(nn.Sequential(m.module.layers[0], nn.Linear(4, 4))) | wrapped model; Net
shard() -> FSDP(nn.Sequential(m, NoReset()), ignored_modules=[m]) | ignored_modules; Fully
tied(inside=False) -> FSDP(m) | 'weight'; another
tied(inside=True) -> FSDP(m) | '1.weight'; another
nn.MultiheadAttention(4, 2).out_proj -> FSDP(m) | MultiheadAttention
of_meta(nn.Linear(2, 2), NoReset()) -> FSDP(m) | NoReset; reset_parameters
net().to("meta") -> FSDP(m, param_init_fn=lambda module: None) | param_init_fn; meta
nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)) -> FSDP(m) | 1.weight; LazyLinear
nn.Sequential(torch.jit.script(nn.Linear(4, 4))) -> FSDP(m) | 0.weight; TorchScript
in_inference_mode(net) -> FSDP(m) | inference
"""

POLICIES = """
FSDP(m, auto_wrap_policy="Lager") | 'Lager'; nearest names, Layer
FSDP(m, auto_wrap_policy="Auto") | 'Auto'; pass "auto"
FSDP(m, auto_wrap_policy=Layer) | a CustomPolicy; wrapping a Net; ModuleWrapPolicy({Layer})
FSDP(m, auto_wrap_policy=(Layer, nn.Linear)) | ModuleWrapPolicy({Layer, Linear})
FSDP(m, auto_wrap_policy=ModuleWrapPolicy) | ModuleWrapPolicy(...)
FSDP(m, auto_wrap_policy=7) | 7; such as ModuleWrapPolicy(
FSDP(m, auto_wrap_policy=on_layer("yes")) | 'yes'; module 'layers.0', a Layer
FSDP(m, auto_wrap_policy=lambda module: True) | auto_wrap_policy; nonwrapped_numel
FSDP(m, auto_wrap_policy=lambda module, recurse, nonwrapped_numel: "yes") | 'yes'; True or False
FSDP(m, auto_wrap_policy=transformer_auto_wrap_policy) | transformer_layer_cls
FSDP(m, auto_wrap_policy=by_layer(transformer_layer_cls=Layer)) | transformer_layer_cls; {Layer}
FSDP(m, auto_wrap_policy=by_function(lambda_fn={Layer})) | lambda_fn; Layer
FSDP(m, auto_wrap_policy=by_size(min_num_params="1e3")) | min_num_params; '1e3'
FSDP(m, auto_wrap_policy=by_size(force_leaf_modules=Layer)) | force_leaf_modules; {Layer}
FSDP(m, auto_wrap_policy=by_size(exclude_wrap_modules={"L"})) | exclude_wrap_modules; 'L'
ModuleWrapPolicy(Layer) | ModuleWrapPolicy({Layer}) | UsageError TypeError
ModuleWrapPolicy({"Layer"}) | ModuleWrapPolicy; 'Layer'
CustomPolicy(3) | CustomPolicy; 3
FSDP(m, auto_wrap_policy=on_layer({"no_such": 1})) | 'no_such'
FSDP(m, auto_wrap_policy=on_layer({"module": 1})) | 'module'
FSDP(m, auto_wrap_policy=on_layer({"sharding_strategy": "none"})) | sharding_strategy; 'none'
FSDP(m, mesh(2), auto_wrap_policy=on_layer({"process_group": 3})) | process_group
FSDP(m, auto_wrap_policy=returning([Layer])) | _run_policy; list
FSDP(m, auto_wrap_policy=returning({m.layers[0]: True})) | _run_policy; True
FSDP(m, auto_wrap_policy=returning({nn.Linear(2, 2): {}})) | _run_policy; Linear
"""

ARGUMENTS = """
FSDP(m, device_mesh=mesh(2), process_group=world()) | process_group; device_mesh
FSDP(m, ignored_modules=[m.layers[0]], ignored_states=[m.scale]) | ignored_modules; ignored_states
FSDP(m, sharding_strategy=HYBRID, process_group=world()) | HYBRID_SHARD
FSDP(m, sharding_strategy=HYBRID, device_mesh=mesh(1, 1, 2)) | HYBRID_SHARD; 3 dim
FSDP(m, sharding_strategy=HYBRID, process_group=(world(), world())) | process_group; replica
FSDP(m, process_group=(world(), world())) | FULL_SHARD; tuple
FSDP(m, process_group=1) | process_group
FSDP(m, sharding_strategy=HYBRID, process_group=(world(),)) | process_group; tuple of 1
FSDP(m, sharding_strategy=HYBRID, process_group=(world(), None)) | process_group
FSDP(m, process_group=destroyed()) | process_group; destroyed
FSDP(m, device_mesh=world()) | device_mesh
FSDP(m, device_ids=[0]) | device_ids; use_orig_params; MIGRATING | UsageError TypeError
FSDP(m, sharding_strategy="FULL_SHARD") | sharding_strategy; pass ShardingStrategy.FULL_SHARD
FSDP(m, cpu_offload=True) | cpu_offload; pass CPUOffload(offload_params=True)
FSDP(m, cpu_offload=CPUOffload(offload_params="yes")) | offload_params; 'yes'
FSDP(m, backward_prefetch="BACKWARD_PRE") | backward_prefetch; 'BACKWARD_PRE'
FSDP(m, mixed_precision=torch.bfloat16) | mixed_precision; pass MixedPrecision(param_dtype=
mixed(m, param_dtype="half") | param_dtype; 'half'
mixed(m, param_dtype=FP8) | param_dtype; float8
mixed(m, reduce_dtype=FP8) | reduce_dtype; float8
mixed(m, buffer_dtype=torch.bool) | buffer_dtype; bool
mixed(m, keep_low_precision_grads="no") | keep_low_precision_grads; 'no'
mixed(m, cast_forward_inputs=b"1") | cast_forward_inputs; b'1'
mixed(m, cast_root_forward_inputs="") | cast_root_forward_inputs; ''
mixed(m, param_dtype=HALF, _module_classes_to_ignore=Layer) | _module_classes_to_ignore
mixed(m, param_dtype=HALF, _module_classes_to_ignore=[nn.ReLU()]) | _module_classes_to_ignore
FSDP(m, ignored_modules=1) | ignored_modules
FSDP(m, ignored_modules=m.layers) | ignored_modules
FSDP(m, ignored_states=m.frozen) | ignored_states
FSDP(m, ignored_modules=list(m.parameters())) | ignored_modules
FSDP(m, ignored_states=m.named_parameters()) | ignored_states; 'frozen'
FSDP(m, ignored_states=[m.offset]) | ignored_states; Tensor
FSDP(m, param_init_fn="reset_parameters") | param_init_fn; 'reset_parameters'
FSDP(m, device_id=True) | device_id; True
FSDP(m, device_id=1.5) | device_id; 1.5
FSDP(m, device_id="nonsense") | device_id; nonsense
FSDP(m, device_id=-1) | device_id=-1
FSDP(m, device_id="meta") | device_id; meta
FSDP(m, sync_module_states="False") | sync_module_states; 'False'
FSDP(m, forward_prefetch="1") | forward_prefetch; '1'
FSDP(m, limit_all_gathers=ones(2)) | limit_all_gathers; Tensor
FSDP(m, use_orig_params="no") | use_orig_params; 'no'
FSDP(m, allow_unused_units="0") | allow_unused_units; '0'
FSDP(m, keep_units_below=-1) | keep_units_below; -1
FSDP(m, keep_units_below=True) | keep_units_below; True
"""
if torch.accelerator.device_count() == 0:
    ARGUMENTS += """
FSDP(m, device_id=0) | device_id=0; no accelerator
FSDP(m, device_id="cuda") | device_id; cuda
""".lstrip()

TRAINING = """
enter(m.layers[0].no_sync()) | no_sync; layers.0 | StateError
m.layers[1].clip_grad_norm_(1.0) | clip_grad_norm_; layers.1 | StateError
summoned(m, lambda: m.clip_grad_norm_(1e-3), with_grads=True) | summon_full_params | StateError
m.clip_grad_norm_("1") | max_norm; '1'
m.clip_grad_norm_(nan) | max_norm; nan
m.clip_grad_norm_(-1.0) | max_norm; -1.0
m.clip_grad_norm_(True) | max_norm; True
m.clip_grad_norm_(ones(2)) | max_norm; Tensor
m.clip_grad_norm_(10**400) | max_norm
m.clip_grad_norm_(1.0, 0) | norm_type; 0
m.clip_grad_norm_(1.0, nan) | norm_type; nan
m.clip_grad_norm_(1.0, 10**400) | norm_type
nn.utils.clip_grad_norm_(m.parameters(), 1.0, "2") | norm_type; '2'
m.register_comm_hook(None, 3) | hook; 3
m.register_comm_hook(None, lambda state, grad: None) | hook; (state, grad, output)
shard(sharding_strategy=NO_SHARD) -> m.register_comm_hook(0, lambda s, g, o: 0) | (state, grad)
m.layers[0].register_comm_hook(None, print) | layers.0 | StateError AssertionError
second_hook() | registered already | StateError AssertionError
register_fsdp_forward_method(3, "encode") | register_fsdp_forward_method; int
register_fsdp_forward_method(m, Net.encode) | register_fsdp_forward_method
register_fsdp_forward_method(m, "no_such") | 'no_such'; Net
register_fsdp_forward_method(m, "forward") | 'forward'
register_fsdp_forward_method(m, "encode", synced="yes") | synced; 'yes'
summon(3) | summon_full_params; int
summon(m, recurse="no") | recurse; 'no'
summon(m, writeback="0") | writeback; '0'
summon(m, rank0_only="") | rank0_only; ''
summon(m, offload_to_cpu="cpu") | offload_to_cpu; 'cpu'
summon(m, with_grads="1") | with_grads; '1'
summon(m, rank0_only=True) | writeback=False | UsageError NotImplementedError
m.apply(3) | apply; 3
m.to("meta") | meta device; 'cpu' to 'meta' | StateError
m.to_empty(device="meta") | meta device; 'cpu' to 'meta' | StateError
nn.Sequential(m).to("meta") | meta device; 'cpu' to 'meta' | StateError
FSDP.fsdp_modules(3) | fsdp_modules; int
FSDP.fsdp_modules(m, "yes") | root_only; 'yes'
"""

STATE_DICTS = """
sets(m, "full") | state_dict_type; 'full'
sets(m, config("Full")) | state_dict_type; FullStateDictConfig
sets(m, SHARDED, config("Full")) | state_dict_config; ShardedStateDict | UsageError RuntimeError
sets(m, FULL, {"rank0_only": True}) | state_dict_config; StateDictConfig
sets(m, FULL, config("Full", rank0_only="yes")) | rank0_only; 'yes'
sets(m, SHARDED, config("Sharded", offload_to_cpu="cpu")) | offload_to_cpu; 'cpu'
sets(m, SHARDED, config("Sharded", _use_dtensor=True)) | _use_dtensor
sets(m, SHARDED, None, config("FullOptim")) | ShardedOptimStateDictConfig | UsageError RuntimeError
sets(m, FULL, None, config("Full")) | optim_state_dict_config
sets(m, FULL, None, config("FullOptim", offload_to_cpu="False")) | offload_to_cpu; 'False'
sets(3, FULL) | set_state_dict_type; int
FSDP.get_state_dict_type(3) | get_state_dict_type; int
FSDP.get_state_dict_type(net()) | Net; 0 units
differing_forms(m) | FULL_STATE_DICT; SHARDED_STATE_DICT | UsageError AssertionError
m.state_dict(prefixx="a.") | prefixx | UsageError TypeError
m.state_dict({}, "", False, 1) | state_dict
m.state_dict({}, destination={}) | destination
m.state_dict(destination=[]) | destination; list
m.state_dict(prefix=3) | prefix; 3
m.load_state_dict([]) | dict; list | UsageError TypeError
load(m, {}, strict="no") | strict; 'no'
load(m, {}, assign="no") | assign; 'no'
m.load_state_dict({3: ones(4)}) | 3 | CheckpointError
load(m, {"layers.1.bias": None}) | Missing key; "layers.1.bias" | CheckpointError
load(m, lambda s: {"model": s, "epoch": 3}) | Unexpected key; "epoch"; "model" | CheckpointError
load(m, {"layers.1.weight": Tensor.flatten}) | size mismatch; [16] | CheckpointError
load(m, {"scale": Tensor.tolist}, strict=False) | scale; list | CheckpointError
load(m, {"layers.0.weight": lambda v: v.to("meta")}) | layers.0.weight; meta | CheckpointError
load(m, {"layers.0.weight": Tensor.to_sparse}) | layers.0.weight; sparse | CheckpointError
load(m, {"layers.0.weight": lambda v: v + 1j}) | layers.0.weight; complex | CheckpointError
load(m, {"layers.0.weight": reshaped}, SHARDED) | size mismatch; [3, 6] | CheckpointError
load(m, {"layers.1.weight": None}, SHARDED) | Missing key; "layers.1.weight" | CheckpointError
m.layers[0].module.load_state_dict(net().layers[0].state_dict()) | layers.0 | StateError
m.layers[0].module.state_dict() | layers.0 | StateError
"""

OPTIMIZERS = """
optim_state(*before_wrapping()) | after wrapping; Adam
to_load(*before_wrapping(), optim_state(m, o)) | after wrapping; Adam
optim_state(m, adam(shard())) | Adam; not the model's
to_load(m, adam(shard()), optim_state(m, o)) | Adam; not the model's
optim_state(o, m) | optim_state_dict(model, optim; Adam
optim_state(net(), o) | Net; 0 units
optim_state(m, None) | optim_state_dict; NoneType
optim_state(m, o, []) | optim_state_dict; list
optim_state(m, o, {}) | 'state'; 'param_groups'
optim_state(m, o, {"state": {99: {"step": 1}}, "param_groups": [{"params": [99]}]}) | 99
optim_state(m, o, {**o.state_dict(), "state": {0: 3}}) | optim_state_dict; 3
optim_state(m, o, None, 3) | group; 3
o.load_state_dict(optim_state(m, o)) | optim_state_dict_to_load; size | CheckpointError ValueError
summoned(m, lambda: optim_state(m, o)) | summon_full_params | StateError
summoned(m, lambda: o.step()) | summon_full_params; step | StateError
to_load(optim_state(m, o), m, o) | optim_state_dict_to_load(model, optim, optim_state_dict)
to_load(m, optim_state(m, o), o) | order of the arguments
optim_load(m, o, lambda s: {}) | optimizer state dict; None or {}
to_load(m, o, m.state_dict()) | 'state'; 'param_groups'
to_load(x := net(), adam(x), optim_state(m, o)) | Net; FullyShardedDataParallel
optim_load(m, o, lambda s: {**s, "state": [1]}) | 'state'; list | CheckpointError
optim_load(m, o, lambda s: {**s, "param_groups": {}}) | 'param_groups'; dict | CheckpointError
optim_load(m, o, lambda s: {**s, "param_groups": [3]}) | 'param_groups'; int | CheckpointError
optim_load(m, o, lambda s: {**s, "param_groups": [{"lr": 3}]}) | 'params'; group 0 | CheckpointError
optim_load(m, o, lambda s: s["state"].update({"a.b": {"step": ones(2)}})) | 'a.b' | CheckpointError
optim_load(m, o, lambda s: s["state"].update({3: {}})) | 3; names | CheckpointError
optim_load(m, o, lambda s: s["state"].update({"scale": 3})) | 'scale'; int | CheckpointError
optim_load(m, o, average(ones(3, 4))) | 'layers.0.weight'; 'exp_avg'; (3, 4) | CheckpointError
optim_load(m, o, average(reshaped), SHARDED) | layers.0; 'exp_avg'; (3, 6) | CheckpointError
optim_load(m, o, average(lambda v: v.to("meta"))) | layers.0; 'exp_avg'; meta | CheckpointError
numbered_load(m, o, lambda s: group_of(s)["params"].pop()) | [5] param; [6] param | CheckpointError
numbered_load(m, o, lambda s: s["param_groups"].append({"params": []})) | [6, 0] | CheckpointError
numbered_load(m, o, lambda s: s["state"].update({99: {}})) | 99 | CheckpointError
to_load(m, o, optim_state(m, o), is_named_optimizer="no") | is_named_optimizer; 'no'
to_load(m, o, optim_state(m, o), load_directly="no") | load_directly; 'no'
to_load(m, o, optim_state(m, o), group=3) | group; 3
"""

SCALERS = """
ShardedGradScaler("nonsense") | device; 'nonsense'
ShardedGradScaler("cpu", init_scale="2") | init_scale; '2'
ShardedGradScaler("cpu", init_scale=0) | init_scale; 0
ShardedGradScaler("cpu", init_scale=inf) | init_scale; inf
ShardedGradScaler("cpu", backoff_factor=1.0) | backoff_factor; 1.0
ShardedGradScaler("cpu", growth_factor=1) | growth_factor; 1
ShardedGradScaler("cpu", growth_interval=0) | growth_interval; 0
ShardedGradScaler("cpu", growth_interval=1.5) | growth_interval; 1.5
ShardedGradScaler("cpu", enabled="no") | enabled; 'no'
ShardedGradScaler("cpu", process_group=3) | process_group; int
s.scale(1.0) | scale(outputs); float
s.scale({"loss": ones(())}) | scale(outputs); output['loss']
s.scale([ones(()), "x"]) | scale(outputs); str
s.scale(ones((), dtype=INT)) | scale(outputs); int64
ShardedGradScaler("cpu").unscale_(o) | unscale_; scale(loss) | StateError
ShardedGradScaler("cpu").step(o) | step; scale(loss) | StateError
ShardedGradScaler("cpu").update() | update; scale(loss) | StateError
s.unscale_(m) | unscale_; FullyShardedDataParallel
s.step(m) | step; FullyShardedDataParallel
s.update(0.0) | new_scale; 0.0
s.update("2") | new_scale; '2'
s.update(ones(1, requires_grad=True)) | new_scale
s.update(ones(2)) | new_scale; (2,)
s.update(torch.tensor(nan)) | new_scale
"""

MOMENTS = """
summoned(m, loss_of(m).backward) | summon_full_params; ackward | StateError
backward_after_summon(m) | summon_full_params | StateError
summoned(m.layers[1], loss_of(m).backward) | summon_full_params; layers.1 | StateError
summoned(m.layers[1], lambda: loss_of(m).backward()) | summon_full_params; layers.1 | StateError
hook_while_gradients_wait(m, o) | no_sync; hook | StateError
summoned(m, lambda: copy.deepcopy(m)) | deepcopy; summon_full_params | StateError
summoned(m, lambda: pickle.dumps(m)) | pickle; summon_full_params | StateError
"""


class Group(typing.NamedTuple):
    """Cases of one kind. given: makes what they name, in a form of the parameters."""

    given: Callable[[bool], dict[str, Any]]
    cases: list[Case]
    has_forms: bool = False

    def chosen(self, use_orig_params: bool) -> list[Case]:
        """Return the cases for a form: by default every second one."""
        return self.cases if TEST_ALL or not self.has_forms else self.cases[use_orig_params::2]


GROUPS = {
    "modules": Group(_plain, cases(MODULES)),
    "policies": Group(_plain, cases(POLICIES)),
    "arguments": Group(_plain, cases(ARGUMENTS)),
    "training": Group(_with_gradients, cases(TRAINING), has_forms=True),
    "state dicts": Group(_wrapped, cases(STATE_DICTS), has_forms=True),
    "optimizers": Group(_with_adam, cases(OPTIMIZERS), has_forms=True),
    "scalers": Group(_scaled, cases(SCALERS)),
    "moments": Group(_wrapped, cases(MOMENTS), has_forms=True),
}


# -- run on the ranks


@dataclasses.dataclass
class Outcome:
    """The outcome of one call on one rank."""

    kinds: tuple[str, ...] = ()  # names of the classes of the exception
    message: str = "nothing was raised"
    seconds: float = 0.0
    wrong: str = ""  # what has changed, or the problem with a step afterwards


def caught(call: Callable[[], object]) -> Outcome:
    outcome, started = Outcome(), time.monotonic()
    try:
        call()
    except Exception as error:
        outcome.kinds = tuple(cls.__name__ for cls in type(error).__mro__)
        outcome.message = re.sub("0x[0-9a-f]+|global rank [0-9]+", "...", str(error))
    outcome.seconds = time.monotonic() - started
    return outcome


def assert_four_facts(message: str) -> None:
    for fact, line in zip(FACTS, message.splitlines()[-4:], strict=True):
        assert line.startswith(f"  {fact}"), message


def snapshot(module: nn.Module) -> list[Any]:
    found: list[Any] = [(name, id(child)) for name, child in module.named_modules()]
    for tensors in (module.named_parameters, module.named_buffers):
        for name, t in tensors(remove_duplicate=False):
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


def evaluate(expression: str, names: dict[str, Any]) -> Any:
    return eval(expression, {**globals(), **names})


def _try_case(case: Case, names: dict[str, Any]) -> Outcome:
    if case.module:
        names["m"] = evaluate(case.module, names)
    module = names["m"] if isinstance(names["m"], nn.Module) else net()
    before = snapshot(module)
    outcome = caught(lambda: evaluate(case.call, names))
    try:
        after = snapshot(module)
        changes = [
            f"{old} became {new}" for old, new in zip(before, after, strict=False) if old != new
        ]
        if len(before) != len(after):
            changes.append(f"{len(before)} entries became {len(after)}")
        outcome.wrong = "\n".join(changes) + _trains(module)
    except Exception as error:
        outcome.wrong = f"{type(error).__name__}: {error}"
    dist.barrier()  # the ranks can still communicate, and no operation is pending
    return outcome


def _trains(module: nn.Module) -> str:
    """Return what is wrong with the training of a rejected module or of a model."""
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


def _try_all(name: str, use_orig_params: bool) -> list[Outcome]:
    group = GROUPS[name]
    return [_try_case(case, group.given(use_orig_params)) for case in group.chosen(use_orig_params)]


@pytest.mark.parametrize(
    ("name", "use_orig_params"),
    [
        (name, form)
        for name, group in GROUPS.items()
        for form in (False, True)[: 1 + group.has_forms]
    ],
)
def test_bad_input_raises_the_same_error_on_every_rank_and_changes_nothing(
    name: str, use_orig_params: bool
) -> None:
    by_rank = run_ranks(2, _try_all, name, use_orig_params)
    for case, *found in zip(GROUPS[name].chosen(use_orig_params), *by_rank, strict=True):
        with about(case):
            for outcome in found:
                wanted = (case.kind, case.torch, *case.kind.__bases__)
                assert {kind.__name__ for kind in wanted} <= set(outcome.kinds), outcome
                assert_four_facts(outcome.message)
                for word in case.words:
                    assert word in outcome.message, f"{word!r} is not in: {outcome.message}"
                assert "unit ''" not in outcome.message, "the root has no name that helps"
                assert outcome.message == found[0].message
                assert outcome.seconds < 5
                assert not outcome.wrong, f"{outcome.wrong}\n{outcome.message}"


# -- inside of forward and of backward

INSIDE = cases("""
m.state_dict() | state_dict | StateError
m.load_state_dict({name: value + 1 for name, value in reference(0).items()}) | load | StateError
m.clip_grad_norm_(1e-9) | clip_grad_norm_ | StateError ValueError
summon(m) | summon_full_params | StateError AssertionError
m.apply(lambda child: None) | apply | StateError ValueError
copy.deepcopy(m) | deepcopy | StateError
pickle.dumps(m) | pickle | StateError
optim_state(m, o) | optim_state_dict | StateError
optim_load(m, o, dict, SHARDED) | optim_state_dict | StateError
m.register_comm_hook(None, lambda s, g, out: None) | register_comm_hook | StateError
enter(m.no_sync()) | no_sync | StateError ValueError
o.step() | step | StateError
""")
# {place: (the module from where, in which pass, use_orig_params)}
PLACES: dict[str, tuple[Callable[[Any], Any], str, bool]] = {
    "forward of the root": (lambda m: m.module, "forward", False),
    "forward of a unit": (lambda m: m.layers[1].module, "forward", True),
    "backward of the root": (lambda m: m.module, "backward", True),
    "backward of a unit": (lambda m: m.layers[0].module, "backward", False),
}


def _try_inside(case: Case, place: str) -> list[Outcome]:
    """Return the outcome inside, where it was caught, and of the pass, where it was not."""
    find, when, use_orig_params = PLACES[place]
    names = _wrapped(use_orig_params)
    model, optimizer, inside = names["m"], names["o"], find(names["m"]).inside
    call = partial(evaluate, case.call, names)
    found: list[Outcome] = []
    inside[when] = lambda: found.append(caught(call))
    step_that_caught = caught(partial(step, model, optimizer))
    found[0].wrong = difference(model, 1) if not step_that_caught.kinds else str(step_that_caught)
    inside[when] = call
    found.append(caught(partial(step, model, optimizer)))
    inside.clear()
    step_after = caught(partial(step, model, optimizer))
    found[1].wrong = difference(model, 2) if not step_after.kinds else str(step_after)
    dist.barrier()
    return found


def _chosen_inside(place: str) -> list[Case]:
    """By default each call is in one forward and in one backward."""
    return INSIDE if TEST_ALL else INSIDE[list(PLACES).index(place) % 2 :: 2]


def _try_all_inside(place: str) -> list[list[Outcome]]:
    return [_try_inside(case, place) for case in _chosen_inside(place)]


@pytest.mark.parametrize("place", PLACES)
def test_call_during_forward_or_backward_raises_and_the_pass_completes(place: str) -> None:
    by_rank = run_ranks(2, _try_all_inside, place)
    for case, *found in zip(_chosen_inside(place), *by_rank, strict=True):
        for inside, raised in found:
            with about(case):
                for outcome in (inside, raised):
                    wanted = {"StateError", "RuntimeError", case.torch.__name__}
                    assert wanted <= set(outcome.kinds), outcome
                    assert not outcome.wrong, outcome
                assert_four_facts(inside.message)
                for word in (*case.words, place.split()[0]):
                    assert word in inside.message, inside.message
                assert inside.message == found[0][0].message


# -- groups and meshes without this rank, and none at all

OUTSIDE = (
    "FSDP(m, process_group=alone)",
    "FSDP(m, sharding_strategy=HYBRID, process_group=(alone, each if inside else pair))",
    "FSDP(m, device_mesh=DeviceMesh('cpu', [0]))",
    "ShardedGradScaler('cpu', process_group=alone)",
)


@on_ranks(2)
def test_rank_outside_the_group_gets_a_clear_error() -> None:
    """The rank inside wraps a module of its own."""
    names = {"alone": dist.new_group([0]), "pair": dist.new_group([0, 1])}
    names["each"], _ = dist.new_subgroups_by_enumeration([[0], [1]])
    names["inside"] = dist.get_rank() == 0
    for call in OUTSIDE:
        names["m"] = module = net()
        before = snapshot(module)
        outcome = caught(partial(evaluate, call, names))
        if names["inside"]:
            assert not outcome.kinds
        else:
            assert snapshot(module) == before, call
            assert "UsageError" in outcome.kinds
            assert re.search("is not (a member of|in) the process group", outcome.message)
            assert_four_facts(outcome.message)
        dist.barrier()
    ShardedGradScaler("cpu", process_group=names["alone"], enabled=False)  # needs no group


def test_missing_process_group_error_names_the_remedy() -> None:
    assert not dist.is_initialized()
    module = net()
    before = snapshot(module)
    for arguments in ({}, {"sharding_strategy": HYBRID}, {"sharding_strategy": NO_SHARD}):
        with pytest.raises(UsageError, match="init_process_group") as error:
            FSDP(module, **arguments)
        assert_four_facts(str(error.value))
        assert snapshot(module) == before


@on_ranks(2)
def test_hybrid_strategy_with_uneven_nodes_raises() -> None:
    for value, words in (
        ("3", "a multiple of 3 ranks"),
        *((value, "LOCAL_WORLD_SIZE") for value in ("two", "0", "-1")),
    ):
        os.environ["LOCAL_WORLD_SIZE"] = value
        with pytest.raises(UsageError, match=words) as error:
            FSDP(net(), sharding_strategy=HYBRID)
        assert_four_facts(str(error.value))
    dist.barrier()


AFTER_DESTRUCTION = (
    "shard()",
    "m(batch(0)).sum().backward()",
    "torch.no_grad()(m)(ones(2, 4))",
    "m.state_dict()",
    "m.load_state_dict(reference(0))",
    "m.clip_grad_norm_(1.0)",
    "summon(m)",
    "optim_state(m, o)",
    "copy.deepcopy(m)",
)


@pytest.mark.parametrize("used_before", [False, True])
@on_ranks(2, group_timeout=5)
def test_model_works_or_raises_after_its_process_group_is_destroyed(used_before: bool) -> None:
    model = shard()
    names = {"m": model, "o": adam(model)}
    if used_before:
        step(model, names["o"])
    dist.barrier()
    dist.destroy_process_group()
    for call in AFTER_DESTRUCTION:
        outcome = caught(partial(evaluate, call, names))
        assert outcome.kinds or call != "shard()", "another model was made without a group"
        if outcome.kinds:
            assert "FsdpCompatError" in outcome.kinds, f"{call}: {outcome}"
            assert_four_facts(outcome.message)
            assert "init_process_group" in outcome.message, f"{call}: {outcome}"


# -- allowed, although it looks odd


@both_forms
@on_ranks(2)
def test_a_model_wrapped_without_gradients_trains(use_orig_params: bool) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        module = net()
        with mode():
            model = shard(module, use_orig_params=use_orig_params)
        step(model)
        assert not difference(model, 1)


@both_forms
@on_ranks(2)
def test_values_loaded_while_gradients_wait_leave_them(use_orig_params: bool) -> None:
    moved = {name: value + 1 for name, value in reference(0).items()}
    plain = net()
    optimizer = sgd(plain)
    for _ in range(2):
        torch.stack([loss_of(plain, rank) for rank in range(2)]).mean().backward()
        plain.load_state_dict(moved)
    optimizer.step()
    for kind in (FULL, SHARDED):
        model = shard(use_orig_params=use_orig_params)
        optimizer = sgd(model)
        with FSDP.state_dict_type(model, kind):
            with model.no_sync():
                loss_of(model).backward()
            if kind is SHARDED:
                model.load_state_dict(model.state_dict())
            model.load_state_dict(moved)
        loss_of(model).backward()
        optimizer.step()
        assert not difference_of(model, plain.state_dict())


@both_forms
@on_ranks(2)
def test_freezing_inside_forward_persists_or_raises(use_orig_params: bool) -> None:
    def freeze(layer: nn.Module, args: object) -> None:
        handle.remove()
        layer.weight.requires_grad_(False)

    module = net()
    handle = module.layers[1].register_forward_pre_hook(freeze)
    model = shard(module, use_orig_params=use_orig_params)
    before = state_of(model)["layers.1.weight"]
    try:
        for _ in range(3):
            step(model)
    except StateError as error:
        assert_four_facts(str(error))
    else:
        assert torch.equal(before, state_of(model)["layers.1.weight"])


class Odd(Exception):
    """An exception class that only these tests raise."""


def raises(*args: Any, **kwargs: Any) -> Any:
    raise Odd


def inside_no_sync(model: FSDP) -> None:
    with model.no_sync():
        raises()


def wrap_with(wrapper: Any, module: nn.Module) -> None:
    try:
        with enable_wrap(wrapper_cls=wrapper):
            wrap(module)
    finally:
        assert wrap(module) is module, "outside of a block nothing is wrapped"


def with_hook(model: FSDP) -> None:
    model.register_comm_hook(None, raises)
    step(model)


# of the user's functions, in this order; ``w`` is the same wrapped model in all
RAISING = (
    "FSDP(m, auto_wrap_policy=raises)",
    "FSDP(m, auto_wrap_policy=CustomPolicy(raises))",
    "FSDP(m.to('meta'), param_init_fn=raises)",
    "FSDP(m, ignored_modules=(raises() for _ in range(1)))",
    "wrap_with(raises, m)",
    "with_hook(shard(m))",
    "w.apply(raises)",
    "summoned(w, raises)",
    "inside_no_sync(w)",
)


@on_ranks(2)
def test_exceptions_of_user_functions_propagate_unchanged() -> None:
    model = shard()
    for call in RAISING:
        with pytest.raises(Odd):
            evaluate(call, {"m": net(), "w": model})
        dist.barrier()
    step(model)
    assert not difference(model, 1)
