"""Modules with a say in their state dict: they give and take what they do in the plain model."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import FullStateDictConfig, MixedPrecision, StateDictType, checkpoint, fully_shard
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.errors import StateError
from tests.support.odd_model import assert_same
from tests.support.optimizer_state import num_sent
from tests.support.ranks import on_ranks

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
Hook = Callable[[Any, dict[str, Any], str, Any], Any]


def drops(module: Any, state: dict[str, Any], prefix: str, local: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}last.")]:
        del state[key]


def renames(module: Any, state: dict[str, Any], prefix: str, local: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}first.")]:
        state[key.replace("first", "net")] = state.pop(key)


def casts(module: Any, state: dict[str, Any], prefix: str, local: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[key] = state[key].to(torch.bfloat16).float().half().cpu()


def replaces(module: Any, state: dict[str, Any], prefix: str, local: Any) -> Any:
    return type(state)((key.replace("first", "net"), value) for key, value in state.items())


def splits(module: Any, state: dict[str, Any], prefix: str, local: Any) -> None:
    if (weight := state.pop(f"{prefix}first.weight", None)) is not None:
        state[f"{prefix}q"], state[f"{prefix}k"] = weight.chunk(2)


def fuses(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}first.weight"] = torch.cat([state.pop(f"{prefix}q"), state.pop(f"{prefix}k")])


def takes_old_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}net.")]:
        state[key.replace(f"{prefix}net.", f"{prefix}first.")] = state.pop(key)


class OwnLinear(nn.Linear):
    """Saves the largest of each row as well."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}largest"] = self.weight.detach().abs().amax(1)


class Body(nn.Module):
    def __init__(self, hook: Hook | None = None, kind: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.first, self.last = kind(3, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        if hook is not None:
            self._register_state_dict_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.last(self.first(x)))
        return result


class Outer(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.more = body, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.more(self.body(x))
        return result


class Halves(Body):
    """Overrides state_dict, and gives a dict of its own where it is the model."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        for key in [key for key in found if key.endswith("last.weight")]:
            found[key] = found[key] / 2
        return found if kwargs.get("destination") is not None else dict(found)


class Measures(Body):
    """Its extra state and a buffer depend on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = nn.Parameter(torch.randn(5))
        self.register_buffer("sum", torch.zeros(()))
        self.register_state_dict_pre_hook(Measures.sum_up)

    def sum_up(self, *_: Any) -> None:
        self.sum = self.bound.detach().sum()

    def get_extra_state(self) -> float:
        return float(self.bound.detach().abs().max())

    def set_extra_state(self, state: Any) -> None:
        pass


MAKERS: dict[str, Callable[[], nn.Module]] = {
    **{hook.__name__: lambda hook=hook: Body(hook) for hook in (drops, renames, casts, splits)},
    "replaces": lambda: Body(replaces),
    "own": lambda: Body(kind=OwnLinear),
    "halves": Halves,
    "measures": Measures,
}


def made(make: Callable[[], nn.Module], is_model: bool, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make() if is_model else Outer(make())


def wrapped(model: nn.Module, units: str, use_orig_params: bool) -> FSDP:
    more: Any = {"mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16)}
    more["use_orig_params"] = use_orig_params
    for path in units.split():
        owner, _, name = path.rpartition(".")
        parent = model.get_submodule(owner)
        setattr(parent, name, FSDP(getattr(parent, name), **more))
    return FSDP(model, **more)


def assert_equal(found: dict[str, Any], expected: dict[str, Any], what: Any) -> None:
    assert_same(found, expected, str(what))


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_what_modules_make_of_their_state_is_what_state_dicts_hold(use_orig_params: bool) -> None:
    configs = [
        FullStateDictConfig(offload_to_cpu=to_cpu, rank0_only=alone)
        for to_cpu, alone in ((False, False), (True, True))
    ]
    for name, make in MAKERS.items():
        for is_model, units in ((False, ""), (False, "body"), (True, ""), (True, "last")):
            expected = made(make, is_model).state_dict()
            model = wrapped(made(make, is_model), units, use_orig_params)
            what = name, is_model, units
            for config in configs:
                with FSDP.state_dict_type(model, FULL, config):
                    found = model.state_dict()
                if config.rank0_only and dist.get_rank():
                    assert not found, what
                else:
                    assert_equal(found, expected, what)
            if name != "halves" or not units:  # a BoxedTensor can be moved and cast, no more
                with FSDP.state_dict_type(model, SHARDED):
                    assert_equal(model.state_dict(), expected, what)


@on_ranks(2)
def test_hooks_of_wrappers_and_of_parents_see_whole_values() -> None:
    for use_orig_params in (False, True):
        model = wrapped(made(Body, False), "body", use_orig_params)
        expected = made(lambda: Body(splits), False).state_dict()
        hooked = copy.deepcopy(model)
        hooked.body._register_state_dict_hook(splits)
        assert_equal(hooked.state_dict(), expected, use_orig_params)
        parent = nn.Sequential(model.body)
        parent.register_state_dict_post_hook(lambda m, state, p, _: splits(m, state, f"{p}0.", _))
        names = {f"0.{key[5:]}": value for key, value in expected.items() if key[:5] == "body."}
        assert_equal(parent.state_dict(), names, use_orig_params)


@on_ranks(2)
def test_modules_around_units_cannot_take_parts_for_parameters() -> None:
    def measures(module: Any, state: dict[str, Any], prefix: str, local: Any) -> None:
        state[f"{prefix}norm"] = module.last.weight.detach().norm()

    for use_orig_params in (False, True):
        model = wrapped(made(lambda: Body(measures), False), "body.last", use_orig_params)
        with pytest.raises(StateError, match=r"(?s)weight' was used while.*summon_full_params"):
            model.state_dict()
        with FSDP.summon_full_params(model):
            found = model.state_dict()
        expected = made(lambda: Body(measures), False).state_dict()
        assert_equal(found, expected, use_orig_params)


@on_ranks(2)
def test_only_units_whose_modules_have_a_say_are_gathered_for_sharded_state_dicts() -> None:
    model = wrapped(made(lambda: Body(renames), False), "body more", True)
    num_sent(model, clear=True)
    with FSDP.state_dict_type(model, SHARDED):
        model.state_dict()
    assert num_sent(model) == 1


@pytest.mark.parametrize("front_end", ["flat", "orig", "in place"])
@on_ranks(2)
def test_a_checkpoint_of_such_a_model_loads_into_it(front_end: str, tmp_path: Path) -> None:
    """Parameters are saved as they are, and what modules make of them is not saved beside them."""

    def sharded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
        model = made(make, False, seed)
        if front_end != "in place":
            return wrapped(model, "body", front_end == "orig")
        fully_shard(model.body)
        return fully_shard(model)

    def in_pairs() -> nn.Module:
        body = Body(splits)
        body.register_load_state_dict_pre_hook(fuses)
        return body

    some = {name: MAKERS[name] for name in ("renames", "own", "halves")}
    for name, make in {**some, "pairs": in_pairs}.items():
        model, other = sharded(make, 0), sharded(make, 1)
        checkpoint.save(tmp_path / name, model, step=1)
        checkpoint.load(tmp_path / name, other)
        expected = made(make, False).state_dict()
        if front_end != "in place" and name != "pairs":
            assert_equal(other.state_dict(), expected, name)
            other = sharded(make, 1)
            with FSDP.state_dict_type(model, LOCAL), FSDP.state_dict_type(other, LOCAL):
                other.load_state_dict(copy.deepcopy(model.state_dict()))
            assert_equal(other.state_dict(), expected, name)
        other = sharded(make, 1)
        checkpoint.save_safetensors(tmp_path / f"{name}-weights", model)
        checkpoint.load_safetensors(tmp_path / f"{name}-weights", other)
        assert_equal(other.state_dict(), expected, name)


class Migrates(Body):
    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, *rest: Any) -> None:
        if meta.get("version", 1) < 2:
            fuses(self, state, prefix)
        super()._load_from_state_dict(state, prefix, meta, *rest)


class Replaces(nn.Linear):
    """Takes its transposed weight, as another parameter."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.weight = nn.Parameter(state.pop(f"{prefix}turned").t().contiguous())
        self.bias = nn.Parameter(state[f"{prefix}bias"].clone())


class Overrides(Body):
    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        named = {key.replace("net.", "first."): value for key, value in state_dict.items()}
        return super().load_state_dict(named, strict)


def renaming() -> nn.Module:
    body = Body()
    body.register_load_state_dict_pre_hook(takes_old_names)
    return body


def forgiving() -> nn.Module:
    def forgive(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if "last." not in key]

    body = Body()
    body.register_load_state_dict_post_hook(forgive)
    return body


def weight_normed(old: bool) -> nn.Module:
    body, utils = Body(), nn.utils
    (utils.weight_norm if old else utils.parametrizations.weight_norm)(body.first)
    return body


# What made the file, and what loads it.
LOADERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "renames": (lambda: Body(renames), renaming),
    "migrates": (lambda: Body(splits), Migrates),
    "forgives": (lambda: Body(drops), forgiving),
    "weight norm": (lambda: weight_normed(old=True), lambda: weight_normed(old=False)),
    "replaces": (Body, lambda: Body(kind=Replaces)),
    "overrides": (lambda: Body(renames), Overrides),
}


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_modules_take_what_only_they_know_how_to_load(use_orig_params: bool) -> None:
    for name, (make_old, make) in LOADERS.items():
        is_model = name == "overrides"
        given = made(make_old, is_model, 1).state_dict()
        if name == "replaces":
            given["body.first.turned"] = given.pop("body.first.weight").t()
        for units, strict in (("", True), ("" if is_model else "body", False), ("last", True)):
            where = "" if is_model or units != "last" else "body."
            plain = made(make, is_model)
            keys = plain.load_state_dict(copy.deepcopy(given), strict=strict)
            for rank0_only in (False, True):
                model = wrapped(made(make, is_model), units and where + units, use_orig_params)
                config = FullStateDictConfig(rank0_only=rank0_only)
                passes = not rank0_only or dist.get_rank() == 0
                with FSDP.state_dict_type(model, FULL, config):
                    entries = copy.deepcopy(given) if passes else collections.OrderedDict()
                    found = model.load_state_dict(entries, strict=strict)
                what = name, units, strict, rank0_only
                assert (found.missing_keys, found.unexpected_keys) == tuple(keys), what
                assert_equal(model.state_dict(), plain.state_dict(), what)


@on_ranks(2)
def test_sharded_values_reach_modules_whole() -> None:
    source = wrapped(made(lambda: Body(renames), False, 1), "body more", True)
    model = wrapped(made(renaming, False), "body.last", False)
    with FSDP.state_dict_type(source, SHARDED):
        model.load_state_dict(source.state_dict())
    assert_equal(model.state_dict(), made(Body, False, 1).state_dict(), "")
