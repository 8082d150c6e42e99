"""Wrong arguments and calls at the wrong moment: one clear error on every rank, at once; nothing
has changed, and the next step trains."""

# Wrong types are what this module is about.
# mypy: disable-error-code="arg-type, call-overload, list-item"

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_compat import CPUOffload, FsdpCompatError, MixedPrecision
from tests.support.errors import PROMPT_S
from tests.support.fully_sharded import Odd, api, pair_of, partial_shard, shard_all
from tests.support.models import DIM, Stack
from tests.support.parity import Pair, one_backward, whole_parameters
from tests.support.ranks import on_ranks

Case = tuple[str, type[Exception], Callable[..., object]]


def _problem_of(name: str, kind: type[Exception], call: Callable[[], object]) -> str:
    """What is wrong with the error that ``call`` should raise, or "". kind: what torch raises."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        ours = api.name == "ours" and name != "shape"  # which torch says in its own words
        facts = ("expected:", "got:", "where:", "to do:") if ours else ()
        if time.monotonic() - started > PROMPT_S:
            return f"{name}: late"
        if not isinstance(error, kind) or (ours and not isinstance(error, FsdpCompatError)):
            return f"{name}: {type(error).__name__}, expected a {kind.__name__}: {error}"
        missing = [fact for fact in facts if not re.search(rf"\n +{fact} +\S", str(error))]
        return f"{name}: the message has no {missing}: {error}" if missing else ""
    return f"{name}: nothing was raised"


def _problems(cases: Iterable[Case]) -> list[str]:
    return [problem for case in cases if (problem := _problem_of(*case))]


def _snapshot(model: nn.Module) -> list[Any]:
    """What must not change: classes, hooks, parameters as objects, their settings."""
    found: list[Any] = [len(model._state_dict_pre_hooks)]
    for module in model.modules():
        found.append((type(module), len(module._forward_hooks), len(module._forward_pre_hooks)))
    for name, p in model.named_parameters():
        found.append((name, id(p), type(p), p.requires_grad, p.grad is None))
    return found


def _bad_arguments() -> Iterator[Case]:
    """Every call is collective, with the same wrong argument on all ranks."""
    shard = api.fully_shard
    cube = init_device_mesh("cpu", (1, 1, dist.get_world_size()), mesh_dim_names=("a", "b", "c"))
    named = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    dims = api.DataParallelMeshDims
    yield "no modules", Exception, lambda m: shard([])
    yield "no module in a list", Exception, lambda m: shard([m.stem, "head"])
    yield "container", ValueError, lambda m: shard(m.blocks)
    yield "mesh of 3 dims", ValueError, lambda m: shard(m, mesh=cube)
    yield "no mesh", Exception, lambda m: shard(m, mesh="cpu")
    for wrong in (3, 0):
        yield f"{wrong} ranks", ValueError, lambda m, w=wrong: shard(m, reshard_after_forward=w)
    yield "no flag", Exception, lambda m: shard(m, reshard_after_forward="yes")
    infos = [api.FSDPMeshInfo(line, shard_mesh_dim=0) for _ in range(2)]
    placements: dict[str, Callable[[nn.Parameter], Any]] = {
        "large dim": lambda p: Shard(7),
        "negative dim": lambda p: Shard(-5),
        "no placement": lambda p: "rows",
        "2 infos": lambda p: api.ShardPlacementResult(None, infos[p.ndim - 1]),
    }
    for name, place in placements.items():
        yield name, Exception, lambda m, place=place: shard(m, shard_placement_fn=place)
    yield "dims of nothing", ValueError, lambda m: dims()
    yield "unnamed mesh", ValueError, lambda m: shard(m, mesh=line, dp_mesh_dims=dims("dp"))
    yield "unknown dim", ValueError, lambda m: shard(m, mesh=named, dp_mesh_dims=dims("tp"))
    yield "plain parameters", Exception, lambda m: shard(m, mesh=named, dp_mesh_dims=dims("dp"))
    both = {"dp_mesh_dims": dims("dp"), "reshard_after_forward": 2}
    yield "ranks and dims", NotImplementedError, lambda m: shard(m, mesh=named, **both)


def _more_bad_arguments() -> Iterator[Case]:
    """That torch takes, and that do something else than was meant, or fail much later."""
    shard = api.fully_shard
    yield "container in a list", FsdpCompatError, lambda m: shard([m.stem, m.blocks])
    yield "no function", TypeError, lambda m: shard(m, shard_placement_fn=Shard(0))
    yield "policy of FSDP1", TypeError, lambda m: shard(m, mp_policy=MixedPrecision())
    yield "argument of FSDP1", TypeError, lambda m: shard(m, use_orig_params=True)
    yield "offload of FSDP1", TypeError, lambda m: shard(m, offload_policy=CPUOffload(True))
    yield "ignored names", TypeError, lambda m: shard(m, ignored_params={"stem.weight"})
    yield "no dims", TypeError, lambda m: shard(m, dp_mesh_dims="dp")
    yield "lazy", FsdpCompatError, lambda m: shard(nn.LazyLinear(3))
    yield "scripted", FsdpCompatError, lambda m: shard(torch.jit.script(nn.Linear(2, 2)))


@on_ranks(2)
def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    model = Stack()
    before, cases = _snapshot(model), [*_bad_arguments()]
    cases += _more_bad_arguments() if api.name == "ours" else ()
    problems = []
    for name, kind, call in cases:
        given = model if api.name == "ours" else Stack()  # torch has changed some things by then
        problems += _problems([(name, kind, partial(call, given))])
    assert (problems, _snapshot(model)) == ([], before)
    shard_all(model)
    again: list[Any] = [model, [model.blocks[0]]]
    assert not _problems(("twice", Exception, partial(api.fully_shard, each)) for each in again)
    one_backward(model, torch.ones(2, DIM))
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_states_of_whole_parameters_are_refused_by_name_of_what_cuts_them() -> None:
    plain = nn.Linear(4, 4)
    model = api.fully_shard(copy.deepcopy(plain))
    optimizers = [torch.optim.Adam(each.parameters()) for each in (plain, model)]
    plain(torch.ones(1, 4)).sum().backward()
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    model(torch.ones(1, 4)).sum().backward()
    advice = "optim_state_dict_to_load" if api.name == "ours" else ""
    with pytest.raises(RuntimeError, match=advice):
        optimizers[1].step()


def _bad_calls(pair: Pair) -> Iterator[Case]:
    model: Any = pair.model
    block = model.blocks[0]
    yield "copied", AssertionError, lambda: copy.deepcopy(model)
    yield "reset of a block", RuntimeError, lambda: block.reset_iter_state()
    yield "no flag", ValueError, lambda: model.set_reshard_after_forward(2)
    wrong = [model.blocks[1], model.stem]
    for setter in (block.set_modules_to_forward_prefetch, block.set_modules_to_backward_prefetch):
        yield setter.__name__, ValueError, partial(setter, wrong)
    for num, kind in ((0, ValueError), (True, TypeError)):
        set_num = partial(model.set_reduce_scatter_max_input_buffers, num)
        yield f"{num} buffers", kind, set_num
    yield "method", ValueError, lambda: api.register_fsdp_forward_method(model, "generate")
    yield "shared", ValueError, lambda: api.share_comm_ctx([model, nn.Linear(2, 2)])
    state = model.state_dict()
    other = {**state, "stem.weight": torch.ones(3, 3)}
    yield "shape", RuntimeError, lambda: model.load_state_dict(other)


def _more_bad_calls(pair: Pair) -> Iterator[Case]:
    """That torch takes."""
    model: Any = pair.model
    block = model.blocks[0]
    for setter in (block.set_requires_gradient_sync, block.set_unshard_in_backward):
        yield setter.__name__, FsdpCompatError, partial(setter, "no")
    for factor in (float("nan"), True):
        set_factor = partial(model.set_gradient_divide_factor, factor)
        yield f"factor {factor}", FsdpCompatError, set_factor
    yield "hook", FsdpCompatError, lambda: model.set_all_reduce_hook("sum")
    yield "all-gather", FsdpCompatError, lambda: model.set_custom_all_gather(lambda: None)
    yield "no list", FsdpCompatError, lambda: block.set_modules_to_forward_prefetch(model)
    yield "event", FsdpCompatError, lambda: model.set_post_optim_event("now")
    yield "method", FsdpCompatError, lambda: api.register_fsdp_forward_method(model, 3)


@on_ranks(2)
def test_wrong_calls_are_refused_and_the_next_step_trains() -> None:
    pair = pair_of(Stack)
    for used in (False, True) if api.name == "ours" else (True,):
        if used:
            pair.step()
        before, values = _snapshot(pair.model), whole_parameters(pair.model)
        more = _more_bad_calls(pair) if api.name == "ours" else ()
        assert _problems((*_bad_calls(pair), *more)) == [], f"used: {used}"
        assert _snapshot(pair.model) == before
        now = whole_parameters(pair.model)
        assert all(torch.equal(now[name], value) for name, value in values.items())
        pair.step()


@on_ranks(2)
def test_modules_with_two_groups_train_and_take_no_settings_for_one_group() -> None:
    """Weights are sharded over both ranks, biases are replicated."""
    line = init_device_mesh("cpu", (2,))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    weights = api.FSDPMeshInfo(line, shard_mesh_dim=0)
    biases = api.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    place = {
        1: api.ShardPlacementResult(None, biases),
        2: api.ShardPlacementResult(Shard(1), weights),
    }
    pair = pair_of(Stack, partial_shard(mesh=line, shard_placement_fn=lambda p: place[p.ndim]))
    stem = pair.model.stem
    assert stem.weight.to_local().shape == (DIM, DIM // 2) and stem.bias.to_local().numel() == DIM
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
        call = partial(getattr(pair.model, name), lambda *_, **__: None)
        assert _problem_of(name, ValueError, call) == ""
    pair.step()
    pair.step()


@on_ranks(2)
def test_a_parameter_in_two_groups_is_refused() -> None:
    tied = partial(shard_all, Odd(), (nn.Linear,))
    assert _problem_of("tie", ValueError, lambda: tied()(torch.ones(1, DIM))) == ""


@pytest.mark.skipif(api.name == "torch", reason="torch trains nothing, silently")
@on_ranks(2)
def test_an_optimizer_of_unsharded_copies_is_refused() -> None:
    model = api.fully_shard(Stack(), reshard_after_forward=False)
    x = torch.ones(2, DIM)
    with torch.no_grad():
        model(x)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    one_backward(model, x)
    assert _problem_of("step", ValueError, optim.step) == ""
    model.reshard()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
