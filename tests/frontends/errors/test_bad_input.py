"""Bad input raises the same clear error on every rank at once, and changes nothing: the next
training step equals the unsharded one.

A case is a call and the words that the message of its error has, which are its name in pytest, too.
Its parameters say what it gets: ``m``, a module, sharded after PLAIN, ``o``, its Adam, which has
state, or ``s``, a scaler. test_moments.py has calls inside of a pass, and without a group."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, inf, nan, nn, ones
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_compat
from fsdp_compat import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import register_fsdp_forward_method as register
from fsdp_compat.errors import CheckpointError, StateError, UsageError
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from fsdp_compat.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
)
from tests.support.refusals import (
    FULL,
    SHARDED,
    Call,
    Case,
    Layer,
    Net,
    Outcome,
    adam,
    assert_four_facts,
    batch,
    by_rank,
    loss_of,
    net,
    no_sync,
    refusal,
    shard,
    state_of,
    summon,
)
from tests.support.sampling import TEST_ALL

HYBRID, NO_SHARD = ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD
REFUSED, STATE = (UsageError, ValueError), (StateError, RuntimeError)
CHECKPOINT = (CheckpointError, RuntimeError)
Table = Mapping[str, Call]


# -- what the cases call


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def beside(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, NoReset())


def fsdp(m: Any, **arguments: Any) -> FSDP:
    return FSDP(m, **arguments)


def mixed(m: nn.Module, **fields: Any) -> FSDP:
    return FSDP(m, mixed_precision=MixedPrecision(**fields))


def hybrid(m: nn.Module, group: Any = None, **arguments: Any) -> FSDP:
    return FSDP(m, group, HYBRID, **arguments)


def tied() -> nn.Module:
    """A module that shares a weight with a wrapped one inside it."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(FSDP(first, use_orig_params=True), second)


def hook_after(call: Callable[[Any], object]) -> None:
    """On a second model, because a hook cannot be removed."""
    other = shard()
    call(other)
    other.register_comm_hook(None, hook)


def hook(state: object, grad: Tensor, output: Tensor) -> None:
    pass


def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def destroyed() -> Any:
    group = dist.new_group([0, 1])
    dist.barrier(group)  # or one rank would destroy it while the other connects
    dist.destroy_process_group(group)
    return group


def world() -> Any:
    return dist.group.WORLD


def on_layer(answer: object) -> CustomPolicy:
    return CustomPolicy(lambda module: isinstance(module, Layer) and answer)


def returning(answer: object) -> Any:
    """A policy object that returns ``answer`` as its plan."""
    return type("Policy", (), {"_run_policy": lambda self, root_module, *args: answer})()


on_cpu = partial(ShardedGradScaler, "cpu")
sets, of_type = FSDP.set_state_dict_type, FSDP.get_state_dict_type
optim_state, to_load = FSDP.optim_state_dict, FSDP.optim_state_dict_to_load


def config(name: str, *values: Any, **fields: Any) -> Any:
    return getattr(fsdp_compat, f"{name}StateDictConfig")(*values, **fields)


def differing_forms(m: Any) -> None:
    sets(m.layers[0], SHARDED)
    try:
        of_type(m)
    finally:
        sets(m.layers[0], FULL)


def load(m: Any, change: Call, kind: StateDictType = FULL, **options: Any) -> None:
    """Load a state dict whose values differ from the model's, after a change."""
    with FSDP.state_dict_type(m, kind):
        state = {n: v if kind is SHARDED else v + 1 for n, v in m.state_dict().items()}
        m.load_state_dict(change(state), **options)


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {other: value for other, value in state.items() if other != name}


def reshaped() -> Any:
    """Return a sharded value of a model with other shapes."""
    return state_of(FSDP(nn.Linear(6, 3, bias=False)), SHARDED)["weight"]


def optim_load(m: Any, o: Any, change: Callable[[Any], Any]) -> None:
    """Load the optimizer's state by names, after a change."""
    state = optim_state(m, o)
    to_load(m, o, change(state) or state)


def numbered_load(m: Any, o: Any, change: Callable[[Any], Any]) -> None:
    """Load the state of an unwrapped model's optimizer, by numbers, after a change."""
    plain = net()
    optimizer = adam(plain)
    loss_of(plain, 0).backward()
    optimizer.step()
    state = optimizer.state_dict()
    change(state)
    to_load(m, o, state)


def before_wrapping() -> tuple[FSDP, torch.optim.Optimizer]:
    """Return a model, and an optimizer that was made before it was wrapped."""
    module = net()
    optimizer = adam(module)
    return shard(module), optimizer


# -- the cases


def cases(table: Table, kinds: tuple[type[Exception], ...] = REFUSED) -> list[Case]:
    return [Case(words, call, kinds) for words, call in table.items()]


def wrong(call: Call, names: str, *values: Any) -> list[Case]:
    """Cases of arguments with wrong values. The message has the name and the value."""
    return [
        Case(f"{name}; {type(v).__name__ if isinstance(v, Tensor) else repr(v)}", made, REFUSED)
        for name in names.split()
        for v in values
        for made in [partial(call, **{name: v})]
    ]


PLAIN = [
    Case(words, call, REFUSED, make)
    for words, call, make in (
        ("Module; NoneType", fsdp, lambda: None),
        ("no parameters; ReLU", fsdp, nn.ReLU),
        ("wrapped model; Net", lambda m: FSDP(m.layers[0]), shard),
        ("already wrapped; Layer", fsdp, lambda: shard().layers[0].module),
        ("ignored_modules; Fully", lambda m: FSDP(beside(m), ignored_modules=[m]), shard),
        ("'1.weight'; another", fsdp, tied),
        ("MultiheadAttention", fsdp, lambda: nn.MultiheadAttention(4, 2).out_proj),
        ("NoReset; reset_parameters", fsdp, lambda: beside(nn.Linear(2, 2)).to("meta")),
        ("param_init_fn; meta", partial(fsdp, param_init_fn=id), lambda: net().to("meta")),
        ("1.weight; LazyLinear", fsdp, lambda: nn.Sequential(Layer(), nn.LazyLinear(4))),
        ("0.weight; TorchScript", fsdp, lambda: nn.Sequential(torch.jit.script(Layer()))),
        ("inference", fsdp, torch.inference_mode()(net)),
    )
]

POLICIES: dict[str, Any] = {
    "'Lager'; nearest names, Layer": "Lager",
    "a CustomPolicy; wrapping a Net; ModuleWrapPolicy({Layer})": Layer,
    "'yes'; module 'layers.0', a Layer": on_layer("yes"),
    "auto_wrap_policy; nonwrapped_numel": lambda module: True,
    "lambda_fn; Layer": partial(lambda_auto_wrap_policy, lambda_fn={Layer}),
    "min_num_params; '1e3'": partial(size_based_auto_wrap_policy, min_num_params="1e3"),
    "'no_such'": on_layer({"no_such": 1}),
    "sharding_strategy; 'none'": on_layer({"sharding_strategy": "none"}),
    "_run_policy; list": returning([Layer]),
}
PLAIN += cases({words: partial(fsdp, auto_wrap_policy=each) for words, each in POLICIES.items()})
PLAIN += cases(
    {
        "ModuleWrapPolicy({Layer})": lambda: ModuleWrapPolicy(Layer),
        "device_ids; use_orig_params; MIGRATING": partial(fsdp, device_ids=[0]),
    },
    (UsageError, TypeError),
)
PLAIN += cases(
    {
        "HYBRID_SHARD": lambda m: hybrid(m, world()),
        "HYBRID_SHARD; 3 dim": lambda m: hybrid(m, device_mesh=mesh(1, 1, 2)),
        "process_group; device_mesh": lambda m: FSDP(m, world(), device_mesh=mesh(2)),
        "ModuleWrapPolicy; 'Layer'": lambda: ModuleWrapPolicy({"Layer"}),
        "_run_policy; True": lambda m: FSDP(m, auto_wrap_policy=returning({m.layers[0]: True})),
        "_module_classes_to_ignore; ReLU": partial(mixed, _module_classes_to_ignore=[nn.ReLU()]),
        "process_group; replica": lambda m: hybrid(m, (world(), world())),
        "process_group": lambda m: hybrid(m, (world(), None)),
        "process_group; destroyed": lambda m: FSDP(m, destroyed()),
        "offload_params; 'yes'": partial(fsdp, cpu_offload=CPUOffload("yes")),
        "mixed_precision; pass MixedPrecision(": partial(fsdp, mixed_precision=torch.half),
        "ignored_states": lambda m: FSDP(m, ignored_states=m.frozen),
        "ignored_states; 'frozen'": lambda m: FSDP(m, ignored_states=m.named_parameters()),
    }
)
PLAIN += wrong(fsdp, "process_group ignored_modules", 1) + wrong(fsdp, "keep_units_below", -1)
PLAIN += wrong(fsdp, "backward_prefetch param_init_fn sync_module_states", "False")
PLAIN += wrong(fsdp, "device_id", True, "nonsense", "meta")
PLAIN += wrong(mixed, "param_dtype", torch.float8_e4m3fn) + wrong(mixed, "cast_forward_inputs", "1")
if torch.accelerator.device_count() == 0:
    PLAIN += cases({"device_id=0; no accelerator": partial(fsdp, device_id=0)})

WRAPPED = cases(
    {
        "norm_type; '2'": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, "2"),
        "hook; (state, grad, output)": lambda m: m.register_comm_hook(None, lambda state, grad: 0),
        "(state, grad)": lambda: shard(sharding_strategy=NO_SHARD).register_comm_hook(0, hook),
        "register_fsdp_forward_method": lambda m: register(m, Net.extra_repr),
        "'no_such'; Net": lambda m: register(m, "no_such"),
        "state_dict_type; 'full'": lambda m: sets(m, "full"),
        "state_dict_config; StateDictConfig": lambda m: sets(m, FULL, {"rank0_only": True}),
        "rank0_only; 'yes'": lambda m: sets(m, FULL, config("Full", rank0_only="yes")),
        "_use_dtensor": lambda m: sets(m, SHARDED, config("Sharded", _use_dtensor=True)),
        "optim_state_dict_config": lambda m: sets(m, FULL, None, config("Full")),
        "0 units; Net": lambda: of_type(net()),
        "strict; 'no'": lambda m: load(m, dict, strict="no"),
        "after wrapping; Adam": lambda: optim_state(*before_wrapping()),
        "Adam; not the model's": lambda m: optim_state(m, adam(shard())),
        "'state'; 'param_groups'": lambda m, o: optim_state(m, o, {}),
        "order of the arguments": lambda m, o: to_load(m, optim_state(m, o), o),
        "optim_state_dict(model, optim; Adam": lambda m, o: optim_state(o, m),
        "optimizer state dict; None or {}": lambda m, o: to_load(m, o, {}),
        "'param_groups'; 'state'": lambda m, o: to_load(m, o, m.state_dict()),
        "scale(outputs); output['loss']": lambda s: s.scale({"loss": ones(())}),
        "scale(outputs); str": lambda s: s.scale([ones(()), "x"]),
        "unscale_; FullyShardedDataParallel": lambda s, m: s.unscale_(m),
        "new_scale; finite number > 0": lambda s: s.update(torch.tensor(nan)),
    }
)
WRAPPED += cases(
    {
        "no_sync; layers.0": lambda m: no_sync(m.layers[0]),
        "clip_grad_norm_; layers.1": lambda m: m.layers[1].clip_grad_norm_(1.0),
        "summon_full_params; clip": lambda m: summon(
            m, lambda: m.clip_grad_norm_(1), with_grads=True
        ),
        "'cpu' to 'meta'; meta device": lambda m: m.to_empty(device="meta"),
        "load; layers.0": lambda m: m.layers[0].module.load_state_dict(Layer().state_dict()),
        "optim_state_dict; summon_full_params": lambda m, o: summon(m, lambda: optim_state(m, o)),
        "summon_full_params; step": lambda m, o: summon(m, o.step),
        "unscale_; scale(loss)": lambda o: ShardedGradScaler("cpu").unscale_(o),
        "step; scale(loss)": lambda o: ShardedGradScaler("cpu").step(o),
        "update; scale(loss)": lambda: ShardedGradScaler("cpu").update(),
        "summon_full_params; ackward": lambda m: summon(m, loss_of(m).backward),
        "no_sync; hook": lambda: hook_after(lambda m: no_sync(m, loss_of(m).backward)),
        "deepcopy; summon_full_params": lambda m: summon(m, lambda: copy.deepcopy(m)),
        "pickle; summon_full_params": lambda m: summon(m, lambda: pickle.dumps(m)),
    },
    STATE,
)
WRAPPED += cases(
    {
        'Missing key; "layers.1.bias"': lambda m: load(m, without("layers.1.bias")),
        'Unexpected key; "epoch"; "model"': lambda m: load(m, lambda s: {"model": s, "epoch": 3}),
        "size mismatch; [16]": lambda m: load(m, lambda s: {**s, "layers.1.weight": ones(16)}),
        "size mismatch; [3, 6]": lambda m: load(
            m, lambda s: {**s, "layers.0.weight": reshaped()}, SHARDED
        ),
        "[5] param; [6] param": lambda m, o: numbered_load(
            m, o, lambda s: s["param_groups"][0]["params"].pop()
        ),
        "99": lambda m, o: numbered_load(m, o, lambda s: s["state"].update({99: {}})),
        "'layers.0.weight'; 'exp_avg'; (3, 4)": lambda m, o: optim_load(
            m, o, lambda s: s["state"]["layers.0.weight"].update(exp_avg=ones(3, 4))
        ),
        "'param_groups'; int": lambda m, o: optim_load(m, o, lambda s: {**s, "param_groups": [3]}),
    },
    CHECKPOINT,
)
OTHERS: dict[tuple[type[Exception], ...], Table] = {
    (CheckpointError, ValueError): {
        # into an optimizer of flat parameters
        "optim_state_dict_to_load; size": lambda m, o: adam(shard()).load_state_dict(
            optim_state(m, o)
        ),
    },
    (StateError, AssertionError): {
        "layers.0": lambda m: m.layers[0].register_comm_hook(None, print),
        "registered already": lambda: hook_after(lambda m: m.register_comm_hook(None, hook)),
    },
    (UsageError, RuntimeError): {
        "state_dict_config; ShardedStateDict": lambda m: sets(m, SHARDED, config("Full")),
    },
    (UsageError, TypeError): {
        "dict; list": lambda m: m.load_state_dict([]),
        "prefixx": lambda m: m.state_dict(prefixx="a."),
    },
    (UsageError, AssertionError): {"FULL_STATE_DICT; SHARDED_STATE_DICT": differing_forms},
    (UsageError, NotImplementedError): {"writeback=False": partial(summon, rank0_only=True)},
}
WRAPPED += [case for kinds, table in OTHERS.items() for case in cases(table, kinds)]
WRAPPED += wrong(lambda m, max_norm: m.clip_grad_norm_(max_norm), "max_norm", nan, ones(2))
WRAPPED += wrong(lambda m, norm_type: m.clip_grad_norm_(1.0, norm_type), "norm_type", 0)
WRAPPED += wrong(summon, "writeback rank0_only", "0") + wrong(ShardedGradScaler, "device", "none")
WRAPPED += wrong(on_cpu, "init_scale", inf) + wrong(on_cpu, "backoff_factor", 1.0)
WRAPPED += wrong(on_cpu, "growth_factor", 1) + wrong(on_cpu, "growth_interval", 1.5)


# -- run on the ranks


def given(form: str) -> dict[str, Any]:
    if form == "plain":
        return {"m": net()}
    model = shard(use_orig_params=form == "original")
    optimizer, scaler = adam(model), ShardedGradScaler("cpu")
    model(batch(dist.get_rank())).sum().backward()
    optimizer.step()
    scaler.scale(ones(()))
    return {"m": model, "o": optimizer, "s": scaler}


FORMS = {"plain": PLAIN, "flat": WRAPPED, "original": WRAPPED}
CHOSEN = [  # by default a case of a sharded module has one of both forms of parameters
    (form, number)
    for form, table in FORMS.items()
    for number in range(len(table))
    if TEST_ALL or form == "plain" or (form == "flat") is (number % 2 == 0)
]
AT_ONCE = 50  # in a round trip: workers of xdist that share one would both make it


def refusals(form: str, first: int) -> dict[int, Outcome]:
    numbers = [number for of, number in CHOSEN if of == form and number // AT_ONCE == first]
    return {number: refusal(FORMS[form][number], given(form)) for number in numbers}


@pytest.mark.parametrize(
    ("form", "number"),
    [pytest.param(*each, id=f"{each[0]}-{FORMS[each[0]][each[1]].words}") for each in CHOSEN],
)
def test_bad_input_raises_the_same_error_on_every_rank_and_changes_nothing(
    form: str, number: int
) -> None:
    case = FORMS[form][number]
    found = [outcomes[number] for outcomes in by_rank(refusals, form, number // AT_ONCE)]
    for outcome in found:
        assert {kind.__name__ for kind in case.kinds} <= set(outcome.kinds), outcome
        assert_four_facts(outcome.message)
        for word in case.words.split("; "):
            assert word in outcome.message
        assert "unit ''" not in outcome.message, "the root has no name that helps"
        assert outcome.message == found[0].message
        assert outcome.seconds < 5
        assert not outcome.wrong, f"{outcome.wrong}\n{outcome.message}"
