"""Bad input: the same clear error on every rank, at once, with the module and the process group as they were."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.errors import CheckpointError, FsdpCompatError, StateError, UsageError
from fsdp_compat.wrap import CustomPolicy, ModuleWrapPolicy
from tests.support.ranks import run_ranks

FACTS = ("expected:", "got:", "where:", "to do:")
BUILT_IN: dict[type[FsdpCompatError], type[Exception]] = {
    UsageError: ValueError,
    StateError: RuntimeError,
    CheckpointError: RuntimeError,
}
Make = Callable[[], tuple[nn.Module, Callable[[], object]]]  # a module that must not change, and the call that is refused


class Net(nn.Module):
    """Two linear layers, a frozen parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.frozen + self.offset


class Reads(nn.Module):
    """Calls something from inside of its forward."""

    def __init__(self, call: Callable[[FSDP], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.call = call
        self.around: list[FSDP] = []

    def forward(self, x: Tensor) -> Tensor:
        self.call(self.around[0])
        return self.linear(x)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def wrapping(**arguments: Any) -> Make:
    """The construction with these arguments is refused; functions are called on the ranks, for what cannot be made here."""

    def make() -> tuple[nn.Module, Callable[[], object]]:
        module = Net()
        given = {name: value(module) if isinstance(value, _OnRank) else value for name, value in arguments.items()}
        return module, lambda: FSDP(module, **given)

    return make


@dataclasses.dataclass(frozen=True)
class _OnRank:
    """An argument that is made on the rank, from the module."""

    make: Callable[[nn.Module], Any]

    def __call__(self, module: nn.Module) -> Any:
        return self.make(module)


def of_module(make: Callable[[], Any], **arguments: Any) -> Make:
    def made() -> tuple[nn.Module, Callable[[], object]]:
        module = make()
        return module, lambda: FSDP(module, **arguments)

    return made


def on_wrapped(call: Callable[[FSDP], object], **arguments: Any) -> Make:
    """A call on a wrapped Net is refused."""

    def made() -> tuple[nn.Module, Callable[[], object]]:
        model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **arguments)
        return model, lambda: call(model)

    return made


def in_forward(call: Callable[[FSDP], object]) -> Make:
    def made() -> tuple[nn.Module, Callable[[], object]]:
        inner = Reads(call)
        model = FSDP(inner)
        inner.around = [model]
        return model, lambda: model(torch.ones(2, 4))

    return made


def tied_into_a_second() -> tuple[nn.Module, Callable[[], object]]:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    FSDP(first)
    return second, lambda: FSDP(second)


def tied_into_an_outer() -> tuple[nn.Module, Callable[[], object]]:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    outer = nn.Sequential(FSDP(first, use_orig_params=True), second)
    return outer, lambda: FSDP(outer)


def optimizer_before_wrapping(load: bool) -> Make:
    def made() -> tuple[nn.Module, Callable[[], object]]:
        module = Net()
        optimizer = torch.optim.Adam(module.parameters())
        model = FSDP(module)
        if load:
            later = torch.optim.Adam(model.parameters())
            state = FSDP.optim_state_dict(model, later)
            return model, lambda: FSDP.optim_state_dict_to_load(model, optimizer, state)
        return model, lambda: FSDP.optim_state_dict(model, optimizer)

    return made


def optimizer_state_of_another_model() -> tuple[nn.Module, Callable[[], object]]:
    model = FSDP(Net())
    optimizer = torch.optim.Adam(model.parameters())
    state = {"state": {"elsewhere.weight": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["elsewhere.weight"]}]}
    return model, lambda: FSDP.optim_state_dict_to_load(model, optimizer, state)


def mesh(*shape: int) -> _OnRank:
    return _OnRank(lambda module: init_device_mesh("cpu", shape))


def on_linear(answer: object) -> CustomPolicy:
    return CustomPolicy(lambda module: answer if isinstance(module, nn.Linear) else False)  # type: ignore[arg-type, return-value]


HYBRID = ShardingStrategy.HYBRID_SHARD
WORLD = _OnRank(lambda module: dist.group.WORLD)
TWO_GROUPS = _OnRank(lambda module: (dist.group.WORLD, dist.group.WORLD))

# name: (how, what the message names, class)
CASES: dict[str, tuple[Make, tuple[str, ...], type[FsdpCompatError]]] = {
    "no parameters": (of_module(nn.ReLU), ("no parameters", "ReLU"), UsageError),
    "an instance": (of_module(lambda: FSDP(Net())), ("wrapped already",), UsageError),
    "what an instance holds": (of_module(lambda: FSDP(Net()).module), ("wrapped already", "Net"), UsageError),
    "a unit of a policy": (
        of_module(lambda: FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})).layers[0].module),
        ("wrapped already", "Linear"),
        UsageError,
    ),
    "a parameter of another instance": (tied_into_a_second, ("'weight'", "another"), UsageError),
    "a parameter of an inner instance": (tied_into_an_outer, ("'1.weight'", "another"), UsageError),
    "the output projection of an attention": (
        of_module(lambda: nn.MultiheadAttention(4, 2).out_proj),
        ("MultiheadAttention",),
        UsageError,
    ),
    "meta without reset_parameters": (
        of_module(lambda: nn.Sequential(nn.Linear(2, 2, device="meta"), NoReset().to("meta"))),
        ("NoReset", "reset_parameters"),
        UsageError,
    ),
    # policies
    "policy: a number": (wrapping(auto_wrap_policy=3), ("auto_wrap_policy", "3"), UsageError),
    "policy: a class of policies": (wrapping(auto_wrap_policy=ModuleWrapPolicy), ("ModuleWrapPolicy(...)",), UsageError),
    "policy: a set of classes": (wrapping(auto_wrap_policy={nn.Linear}), ("ModuleWrapPolicy({Linear})",), UsageError),
    "policy: unknown arguments": (wrapping(auto_wrap_policy=on_linear({"no_such": 1})), ("'no_such'",), UsageError),
    "policy: bad values": (
        wrapping(auto_wrap_policy=on_linear({"sharding_strategy": "none"})),
        ("sharding_strategy", "'none'"),
        UsageError,
    ),
    "policy: no answer": (wrapping(auto_wrap_policy=on_linear("yes")), ("'yes'", "layers.0"), UsageError),
    # what contradicts each other
    "mesh and group": (wrapping(device_mesh=mesh(2), process_group=WORLD), ("process_group", "device_mesh"), UsageError),
    "ignored twice": (
        wrapping(ignored_modules=_OnRank(lambda m: [m.layers[0]]), ignored_states=_OnRank(lambda m: [m.layers[1]])),
        ("ignored_modules", "ignored_states"),
        UsageError,
    ),
    "ignored: itself": (wrapping(ignored_modules=_OnRank(lambda m: [m])), ("ignored_modules", "Net"), UsageError),
    "hybrid, one group": (wrapping(sharding_strategy=HYBRID, process_group=WORLD), ("HYBRID_SHARD",), UsageError),
    "two groups, not hybrid": (wrapping(process_group=TWO_GROUPS), ("FULL_SHARD", "tuple"), UsageError),
    "2-D mesh, not hybrid": (wrapping(device_mesh=mesh(1, 2)), ("FULL_SHARD", "2 dim"), UsageError),
    # types
    "type: module": (lambda: (nn.Linear(2, 2), lambda: FSDP(nn.Linear)), ("Module",), UsageError),  # type: ignore[arg-type]
    "type: process_group": (wrapping(process_group=1), ("process_group",), UsageError),
    "type: sharding_strategy": (wrapping(sharding_strategy="FULL_SHARD"), ("sharding_strategy", "'FULL_SHARD'"), UsageError),
    "type: cpu_offload": (wrapping(cpu_offload=True), ("cpu_offload", "CPUOffload"), UsageError),
    "type: backward_prefetch": (wrapping(backward_prefetch=True), ("backward_prefetch",), UsageError),
    "type: mixed_precision": (wrapping(mixed_precision=torch.bfloat16), ("mixed_precision", "bfloat16"), UsageError),
    "type: ignored_modules": (wrapping(ignored_modules=[1]), ("ignored_modules",), UsageError),
    "type: ignored_modules, alone": (wrapping(ignored_modules=_OnRank(lambda m: m.layers)), ("ignored_modules",), UsageError),
    "type: ignored_modules, parameters": (
        wrapping(ignored_modules=_OnRank(lambda m: list(m.parameters()))),
        ("ignored_modules",),
        UsageError,
    ),
    "type: ignored_states": (wrapping(ignored_states=["frozen"]), ("ignored_states", "'frozen'"), UsageError),
    "type: param_init_fn": (wrapping(param_init_fn=1), ("param_init_fn",), UsageError),
    "type: device_id": (wrapping(device_id=1.5), ("device_id", "1.5"), UsageError),
    "type: device_id, bool": (wrapping(device_id=True), ("device_id", "True"), UsageError),
    "device_id: no device": (wrapping(device_id="nonsense"), ("device_id", "nonsense"), UsageError),
    "type: device_mesh": (wrapping(device_mesh=(2,)), ("device_mesh",), UsageError),
    "type: use_orig_params": (wrapping(use_orig_params="no"), ("use_orig_params", "'no'"), UsageError),
    "type: sync_module_states": (wrapping(sync_module_states=CPUOffload()), ("sync_module_states",), UsageError),
    # state dicts
    "LOCAL_STATE_DICT": (
        on_wrapped(lambda m: FSDP.set_state_dict_type(m, StateDictType.LOCAL_STATE_DICT)),
        ("LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
        UsageError,
    ),
    "form: a string": (on_wrapped(lambda m: FSDP.set_state_dict_type(m, "full")), ("state_dict_type",), UsageError),  # type: ignore[arg-type]
    "form: config of another": (
        on_wrapped(lambda m: FSDP.set_state_dict_type(m, StateDictType.SHARDED_STATE_DICT, FullStateDictConfig())),
        ("state_dict_config", "ShardedStateDictConfig"),
        UsageError,
    ),
    "form: config of another, in a context": (
        on_wrapped(lambda m: FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT, ShardedStateDictConfig()).__enter__()),
        ("state_dict_config", "FullStateDictConfig"),
        UsageError,
    ),
    "form: optimizer config of another": (
        on_wrapped(lambda m: FSDP.set_state_dict_type(m, StateDictType.SHARDED_STATE_DICT, None, FullOptimStateDictConfig())),
        ("optim_state_dict_config", "ShardedOptimStateDictConfig"),
        UsageError,
    ),
    "form: of a plain module": (
        lambda: ((plain := Net()), lambda: FSDP.get_state_dict_type(plain)),
        ("Net", "0 instances"),
        UsageError,
    ),
    "optimizer made before wrapping": (optimizer_before_wrapping(False), ("after wrapping", "Adam"), UsageError),
    "optimizer made before wrapping, to load": (optimizer_before_wrapping(True), ("after wrapping", "Adam"), UsageError),
    "optimizer state of another model": (optimizer_state_of_another_model, ("'elsewhere.weight'",), CheckpointError),
    # at the wrong moment, or on the wrong instance
    "no_sync of an inner one": (on_wrapped(lambda m: m.layers[0].no_sync().__enter__()), ("no_sync", "layers.0"), StateError),
    "clip_grad_norm_ of an inner one": (
        on_wrapped(lambda m: m.layers[1].clip_grad_norm_(1.0)),
        ("clip_grad_norm_", "layers.1"),
        StateError,
    ),
    "state_dict in forward": (in_forward(lambda m: m.state_dict()), ("state_dict", "forward"), StateError),
    "load_state_dict in forward": (in_forward(lambda m: m.load_state_dict({})), ("load_state_dict", "forward"), StateError),
    "clip_grad_norm_ in forward": (in_forward(lambda m: m.clip_grad_norm_(1.0)), ("clip_grad_norm_", "forward"), StateError),
    "summon: write back from rank 0": (
        on_wrapped(lambda m: FSDP.summon_full_params(m, rank0_only=True).__enter__()),
        ("writeback=False",),
        UsageError,
    ),
}
if torch.accelerator.device_count() == 0:
    CASES["device_id: no accelerator"] = wrapping(device_id=0), ("device_id=0", "no accelerator"), UsageError


@dataclasses.dataclass
class Outcome:
    """What one call did on one rank."""

    kinds: tuple[str, ...] = ()  # names of the classes of what was raised
    message: str = "nothing was raised"
    seconds: float = 0.0
    changed: str = ""
    wraps_later: str = ""


def snapshot(module: nn.Module) -> list[Any]:
    found: list[Any] = [(name, id(child)) for name, child in module.named_modules()]
    for tensors in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, t in tensors:
            found.append((name, id(t), tuple(t.shape), str(t.device), t.requires_grad, None if t.is_meta else t.tolist()))
    return found


def _try_all() -> dict[str, Outcome]:
    outcomes = {}
    for name, (make, _, _) in CASES.items():
        torch.manual_seed(0)
        module, call = make()
        before, outcome = snapshot(module), Outcome()
        started = time.monotonic()
        try:
            call()
        except Exception as error:
            outcome.kinds, outcome.message = tuple(cls.__name__ for cls in type(error).__mro__), str(error)
        outcome.seconds = time.monotonic() - started
        after = snapshot(module)
        outcome.changed = "\n".join(f"{old} became {new}" for old, new in zip(before, after, strict=False) if old != new)
        if len(before) != len(after):
            outcome.changed += f"{len(before)} entries became {len(after)}"
        if type(module) is Net and "weight" in module.layers[0]._parameters and not outcome.changed:
            outcome.wraps_later = _trains_and_wraps(module)
        dist.barrier()  # the ranks can still talk, and nobody waits for something that was begun
        outcomes[name] = outcome
    return outcomes


def _trains_and_wraps(module: nn.Module) -> str:
    x, y = torch.ones(2, 4), copy.deepcopy(module)(torch.ones(2, 4))
    module(x).sum().backward()
    if any((p.grad is not None) is not p.requires_grad for p in module.parameters()):
        return "the refused module does not train as before"
    module.zero_grad()
    model = FSDP(module)
    if not torch.equal(model(x), y):
        return "the refused module, wrapped properly, computes something else"
    model(x).sum().backward()
    return ""


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    return run_ranks(2, _try_all, group_timeout=15)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_alike_on_every_rank_with_four_facts_and_nothing_changed(
    name: str, outcomes: list[dict[str, Outcome]]
) -> None:
    _, named, kind = CASES[name]
    first = outcomes[0][name]
    for rank, outcome in enumerate(its[name] for its in outcomes):
        assert kind.__name__ in outcome.kinds[:2], f"rank {rank}: {outcome.kinds[:2]} {outcome.message}"
        assert BUILT_IN[kind].__name__ in outcome.kinds
        assert "FsdpCompatError" in outcome.kinds
        for fact in FACTS:
            assert f"  {fact}" in outcome.message, outcome.message
        for text in named:
            assert text in outcome.message, f"{text!r} is not in: {outcome.message}"
        assert "unit ''" not in outcome.message, f"the root has no name that helps: {outcome.message}"
        assert len(outcome.message.splitlines()) == 5, f"a line for what is wrong, and one for each fact: {outcome.message}"
        assert outcome.message == first.message
        assert outcome.seconds < 5
        assert not outcome.changed
        assert not outcome.wraps_later


def test_without_a_process_group_the_remedy_is_named() -> None:
    assert not dist.is_initialized()
    module = Net()
    before = snapshot(module)
    for arguments in (
        {},
        {"use_orig_params": True},
        {"sharding_strategy": HYBRID},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
    ):
        with pytest.raises(UsageError, match="init_process_group") as caught:
            FSDP(module, **arguments)  # type: ignore[arg-type]
        assert all(fact in str(caught.value) for fact in FACTS)
        assert snapshot(module) == before


def _outside_of_the_group() -> str:
    group = dist.new_group([0])
    module = Net()
    before = snapshot(module)
    message = ""
    if dist.get_rank() == 0:
        FSDP(module, process_group=group)
    else:
        with pytest.raises(UsageError) as caught:
            FSDP(module, process_group=group)
        message = str(caught.value)
        assert snapshot(module) == before
    dist.barrier()
    return message


def test_a_rank_outside_of_the_group_is_told_so() -> None:
    message = run_ranks(2, _outside_of_the_group)[1]
    assert "does not belong to the process group" in message
    assert all(fact in message for fact in FACTS)


def _uneven_nodes() -> None:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(UsageError, match="multiple of the 3 ranks of a node") as caught:
        FSDP(Net(), sharding_strategy=HYBRID)
    assert all(fact in str(caught.value) for fact in FACTS)
    dist.barrier()


def test_ranks_that_do_not_fill_their_nodes_are_refused() -> None:
    run_ranks(2, _uneven_nodes)
