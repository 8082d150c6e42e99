"""The six older calls for optimizer state: torch's signatures and layouts, one deprecation each,
the values of the newer calls."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import OptimStateKeyType as TorchKeyType

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import OptimStateKeyType
from fsdp_compat.errors import CheckpointError, UsageError
from tests.support.odd_model import train
from tests.support.optimizer_state import (
    OPTIMIZERS,
    SHARDED,
    Block,
    assert_equal_states,
    assert_four_facts,
    assert_state,
    by_name,
    full_state,
    load_into_new,
    loadable,
    make_model,
    num_sent,
    params_of,
    shard,
    sharded,
    split_decay,
    torchs_full,
    torchs_pair,
    trained,
)
from tests.support.ranks import on_ranks
from tests.support.sampling import sample

NAME, NUMBER = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID
NEW = {
    "full_optim_state_dict": "optim_state_dict",
    "sharded_optim_state_dict": "optim_state_dict",
    "shard_full_optim_state_dict": "optim_state_dict_to_load",
    "flatten_sharded_optim_state_dict": "optim_state_dict_to_load",
    "scatter_full_optim_state_dict": "optim_state_dict_to_load",
    "rekey_optim_state_dict": "optim_state_dict_to_load",
}


def test_signatures_are_torchs() -> None:
    for name in NEW:
        ours, theirs = (
            inspect.signature(getattr(cls, name)).parameters.values() for cls in (FSDP, TorchFSDP)
        )
        assert [(p.name, p.kind, p.default) for p in ours] == [
            (p.name, p.kind, p.default) for p in theirs
        ], name


def called(cls: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an older call of ours or of torch's. Ours says once, to this file, that it is
    deprecated."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = getattr(cls, name)(*args, **kwargs)
    if cls is FSDP:
        (warning,) = [warning for warning in caught if "deprecated; use" in str(warning.message)]
        assert warning.category is DeprecationWarning
        assert warning.filename == __file__
        assert str(warning.message).endswith(f"use FullyShardedDataParallel.{NEW[name]} instead.")
    return answer


ours_called = functools.partial(called, FSDP)
torchs_called = functools.partial(called, TorchFSDP)


def refused(kind: type[Exception], name: str, *args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings(), pytest.raises(kind) as caught:
        warnings.simplefilter("ignore")
        getattr(FSDP, name)(*args, **kwargs)
    assert_four_facts(caught.value)


def sizes(state: dict[str, Any]) -> dict[str, Any]:
    """Types, shapes and dtypes of a sharded dict."""

    def described(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            return "sharded", tuple(value.metadata().size), value.dtype
        return type(value), tuple(value.shape), value.dtype

    return {
        name: {key: described(value) for key, value in entry.items()}
        for name, entry in state["state"].items()
    }


@pytest.mark.parametrize("use_orig_params", sample([False, True], 1))
@on_ranks(2)
def test_dicts_have_torchs_layout_and_load_both_ways_from_files(
    use_orig_params: bool, tmp_path: Path
) -> None:
    for kind, groups in (("Adam", False), ("SGD", False), ("Adagrad", False), ("AdamW", True)):
        if groups and not use_orig_params:
            continue
        (theirs, their_optimizer), (ours, optimizer) = torchs_pair(
            use_orig_params, kind, groups=groups
        )
        expected = torchs_full(theirs, their_optimizer)
        with FSDP.state_dict_type(ours, SHARDED):  # the form that is set does not matter
            found = ours_called("full_optim_state_dict", ours, optimizer, rank0_only=False)
        layout = torchs_called("full_optim_state_dict", theirs, their_optimizer, rank0_only=False)
        assert found.keys() == layout.keys() == {"state", "param_groups"}
        assert sizes(found) == sizes(layout)
        assert found["param_groups"] == layout["param_groups"]
        assert_state(found["state"], expected["state"], tolerance=1e-5)
        values = [value for entry in found["state"].values() for value in entry.values()]
        assert {value.device.type for value in values} == {"cpu"}

        alone = ours_called("full_optim_state_dict", ours, optimizer)
        assert bool(alone) is (dist.get_rank() == 0)

        before = num_sent(ours)
        boxes = ours_called("sharded_optim_state_dict", ours, optimizer)
        assert num_sent(ours) == before
        torchs = torchs_called("sharded_optim_state_dict", theirs, their_optimizer)
        assert sizes(boxes) == sizes(torchs)
        assert boxes["param_groups"] == torchs["param_groups"]

        wanted = loadable(ours, optimizer, found)
        for name, *given in (
            ("shard_full_optim_state_dict", found, ours, None, optimizer),
            ("flatten_sharded_optim_state_dict", boxes, ours, optimizer),
            ("scatter_full_optim_state_dict", alone or None, ours, None, optimizer),
        ):
            assert_equal_states(ours_called(name, *given), wanted)
        torchs = torchs_called(
            "shard_full_optim_state_dict", copy.deepcopy(expected), theirs, optim=their_optimizer
        )
        assert wanted["param_groups"] == torchs["param_groups"]
        assert wanted["state"].keys() >= torchs["state"].keys()  # torch leaves out empty parts
        for number, entry in torchs["state"].items():
            assert wanted["state"][number].keys() == entry.keys()
            for key, value in entry.items():
                assert wanted["state"][number][key].dim() == value.dim()

        path = f"{tmp_path}/{kind}-{use_orig_params}"
        if dist.get_rank() == 0:
            torch.save(found, f"{path}-ours")
            torch.save(expected, f"{path}-torch")  # of flat parameters, all names share one step
        dist.barrier()
        for cls, name, model, its in (
            (TorchFSDP, "ours", theirs, their_optimizer),
            (FSDP, "torch", ours, optimizer),
        ):
            state = torch.load(f"{path}-{name}", weights_only=True)
            its.load_state_dict(called(cls, "shard_full_optim_state_dict", state, model, optim=its))
        steps = [
            entry["step"]
            for entry in optimizer.state.values()
            if isinstance(entry.get("step"), Tensor)
        ]
        assert len({step.data_ptr() for step in steps}) == len(steps)
        losses = train(ours, optimizer, range(2, 5))
        assert train(theirs, their_optimizer, range(2, 5)) == pytest.approx(losses, rel=1e-4)


@on_ranks(2)
def test_numbers_follow_the_optimizer_input() -> None:
    """Numbers count the input, whatever order it has."""
    model = shard(make_model(), ("FULL_SHARD", True, "blocks"))
    for given in (list(model.parameters())[::-1], split_decay(model)[::-1]):
        optimizer = OPTIMIZERS["AdamW"](given)
        train(model, optimizer, range(2))
        full = full_state(model, optimizer)
        found = ours_called("full_optim_state_dict", model, optimizer, given, rank0_only=False)
        assert_state(found["state"], full["state"])
        assert found["param_groups"] == full["param_groups"]
        wanted = loadable(model, optimizer, full)
        for name in ("shard_full_optim_state_dict", "scatter_full_optim_state_dict"):
            mine = full if name.startswith("shard") or dist.get_rank() == 0 else None
            one = ours_called(name, mine, model, given)
            assert_state(one["state"], wanted["state"])
            assert [group["params"] for group in one["param_groups"]] == [
                group["params"] for group in wanted["param_groups"]
            ]
            optimizer.load_state_dict(one)
        assert_state(full_state(model, optimizer)["state"], full["state"])
    model, optimizer = trained(model, steps=1)
    full = full_state(model, optimizer)  # without input and optimizer: the model's parameters
    assert_equal_states(
        ours_called("shard_full_optim_state_dict", full, model), loadable(model, optimizer, full)
    )
    numbers = range(len(full["state"]))
    numbered = {
        "state": dict(enumerate(full["state"].values())),
        "param_groups": [{"params": list(numbers)}],
    }
    found = ours_called("shard_full_optim_state_dict", numbered, model)["state"].keys()
    present = {number for number, p in enumerate(model.parameters()) if p.numel()}
    assert present <= found <= {*numbers}
    for wrong, kind in (
        (3, TypeError),
        ([], ValueError),
        ([1, 2], TypeError),
        ([{"lr": 1}], AssertionError),
    ):
        for name, *args in (
            ("full_optim_state_dict", model, optimizer, wrong),
            ("shard_full_optim_state_dict", full, model, wrong),
        ):
            refused(kind, name, *args)
            refused(UsageError, name, *args)


# --- keys -----------------------------------------------------------------------------------------


def rekeyed(state: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
    return ours_called("rekey_optim_state_dict", state, kind, *args, **kwargs)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("by", ["optim", "optim_input", "groups", "nothing"])
def test_rekeying_equals_torchs(kind: str, by: str) -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
    )  # without ties, which torch refuses
    optimizer = OPTIMIZERS[kind](params_of(model, by == "groups"))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    how: dict[str, Any] = {
        "optim": {"optim": optimizer},
        "optim_input": {"optim_input": list(model.parameters())},
        "groups": {"optim_input": split_decay(model)},
    }.get(by, {})
    numbered, named = optimizer.state_dict(), by_name(model, optimizer)
    for state, key_type, expected in (
        (numbered, "PARAM_NAME", named),
        (named, "PARAM_ID", numbered),
        (named, "PARAM_NAME", named),
        (numbered, "PARAM_ID", numbered),
    ):
        found = rekeyed(state, OptimStateKeyType[key_type], model, **how)
        assert_state(found["state"], expected["state"])
        if state is not expected:
            args = (state, TorchKeyType[key_type], model)
            torchs = torchs_called("rekey_optim_state_dict", *args, **how)
            assert_state(found["state"], torchs["state"])
            expected = torchs
        assert found["param_groups"] == expected["param_groups"]


def test_a_dict_without_state_is_rekeyed_and_keys_that_do_not_fit_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = rekeyed(optimizer.state_dict(), NAME, model, optim=optimizer)
    assert named["state"] == {}
    assert [group["params"] for group in named["param_groups"]] == [["bias", "weight"]]
    groups = [{"params": ["weight", "bias"]}]
    for state in (
        {"state": {"weight": {}, 1: {}}, "param_groups": groups},
        {"state": {("weight",): {}}, "param_groups": []},
        {"state": {"other": {}}, "param_groups": groups},
        {"state": {}, "param_groups": [{"params": ["other"]}]},
        {"param_groups": groups},
        [1],
    ):
        refused(CheckpointError, "rekey_optim_state_dict", state, NUMBER, model, optim=optimizer)
    state = optimizer.state_dict()
    for kind in ("PARAM_ID", None):
        refused(UsageError, "rekey_optim_state_dict", state, kind, model, optim=optimizer)


@on_ranks(2)
def test_state_loads_between_wrapped_and_plain_models() -> None:
    """Out of a wrapped model into one that is not, and back; names come without what nested
    wrappers add."""
    plain, reference = trained(make_model())
    expected = by_name(plain, reference)["state"]
    for config in (("FULL_SHARD", False, "blocks"), ("FULL_SHARD", True, "always")):
        model, optimizer = sharded(config, steps=0)
        named = rekeyed(reference.state_dict(), NAME, plain, optim=reference)
        optimizer.load_state_dict(
            ours_called("shard_full_optim_state_dict", named, model, optim=optimizer)
        )
        full = full_state(model, optimizer)
        assert_state(full["state"], expected)
        other = OPTIMIZERS["AdamW"](plain.parameters())
        other.load_state_dict(rekeyed(full, NUMBER, plain, optim=other))
        assert_state(by_name(plain, other)["state"], expected)
    numbered = {**reference.state_dict(), "state": dict(enumerate(full["state"].values()))}
    assert_state(rekeyed(numbered, NAME, model, optim=optimizer)["state"], full["state"])
    prefixed = {
        name: f"_fsdp_wrapped_module.{name.replace('blocks.', 'blocks._fsdp_wrapped_module.')}"
        for name in full["state"]
    }
    groups = [
        {**group, "params": [prefixed[name] for name in group["params"]]}
        for group in full["param_groups"]
    ]
    raw = {
        "state": {prefixed[name]: entry for name, entry in full["state"].items()},
        "param_groups": groups,
    }
    back = rekeyed(raw, NUMBER, plain, optim=reference)
    assert_state(back["state"], reference.state_dict()["state"])
    found = loadable(model, optimizer, raw)
    assert_state(found["state"], dict(optimizer.state_dict()["state"]))


@on_ranks(2)
def test_wrong_arguments_are_refused_on_every_rank() -> None:
    model, optimizer = sharded(("FULL_SHARD", False, "blocks"), "Adam", steps=0)
    full = "full_optim_state_dict"
    shard_full, scatter = "shard_full_optim_state_dict", "scatter_full_optim_state_dict"
    calls: tuple[tuple[Any, ...], ...] = (
        (full, optimizer, model),
        (full, model, optimizer, None, "yes"),
        (full, nn.Linear(2, 2), optimizer),
        ("sharded_optim_state_dict", model, optimizer, "group"),
        (shard_full, model, {}),
        (shard_full, {}, model, None, model),
        ("flatten_sharded_optim_state_dict", {}, model, None),
        (scatter, None, model, None, optimizer),
        (scatter, {}, nn.Linear(2, 2), None, optimizer),
    )
    for call in calls:
        refused(UsageError, *call)
    ours_called(full, model, optimizer)


@on_ranks(2)
def test_a_dict_is_rekeyed_for_a_model_of_flat_parameters() -> None:
    """A model of FlatParameters: numbers are those of the model without wrapping, whatever order
    its units have."""
    expected = trained(make_model())[1].state_dict()
    for policy in ("blocks", "always"):
        model, optimizer = sharded(("FULL_SHARD", False, policy))
        full = full_state(model, optimizer)
        for how in ({}, {"optim": optimizer}, {"optim_input": list(model.parameters())}):
            numbered = rekeyed(full, NUMBER, model, **how)
            assert [g["params"] for g in numbered["param_groups"]] == [
                g["params"] for g in expected["param_groups"]
            ]
            assert_state(numbered["state"], expected["state"], tolerance=1e-4)
            named = rekeyed(numbered, NAME, model, **how)
            assert_state(named["state"], full["state"])
            assert sorted(named["param_groups"][0]["params"]) == sorted(full["state"])
            assert_state(load_into_new(model, "AdamW", named), full["state"])
        part = {"state": {"other": full["state"]["gain"]}, "param_groups": []}
        refused(CheckpointError, "rekey_optim_state_dict", part, NUMBER, model)


class Beside(nn.Module):
    """A unit, and parameters that are no unit's or, with ``inside``, one more in the unit."""

    def __init__(self, cls: Any, extra: bool, inside: bool, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = Block()
        self.first = nn.Linear(5, 5)
        if extra:
            (block.linear if inside else self).register_parameter(
                "extra", nn.Parameter(torch.ones(3))
            )
        self.block = cls(block, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x))


@on_ranks(2)
def test_only_missing_state_of_managed_parameters_is_an_error() -> None:
    first = dist.get_rank() == 0
    loads: dict[str, Callable[..., Any]] = {
        "shard": lambda cls, s, m, o: called(cls, "shard_full_optim_state_dict", s, m, optim=o),
        "input": lambda cls, s, m, o: called(
            cls, "shard_full_optim_state_dict", s, m, list(m.parameters())
        ),
        "scatter": lambda cls, s, m, o: called(
            cls, "scatter_full_optim_state_dict", s if first else None, m, optim=o
        ),
        "flatten": lambda cls, s, m, o: called(cls, "flatten_sharded_optim_state_dict", s, m, o),
    }
    classes: tuple[tuple[Any, Any], ...] = (
        (FSDP, {}),
        (TorchFSDP, {"device_id": torch.device("cpu")}),
    )
    for kind in ("Adam", "SGD"):
        saved: dict[Any, Any] = {}
        for cls, options in classes:
            model = Beside(cls, False, False, **options)
            optimizer = OPTIMIZERS[kind](model.parameters())
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            whole = called(cls, "full_optim_state_dict", model, optimizer, rank0_only=False)
            parts = called(cls, "sharded_optim_state_dict", model, optimizer)
            saved[cls] = {"shard": whole, "input": whole, "scatter": whole, "flatten": parts}
        for name, inside in itertools.product(loads, (False, True)):
            found: list[Any] = []
            for cls, options in classes:
                if cls is TorchFSDP and name == "scatter":  # it fails on parameters of no unit
                    continue
                model = Beside(cls, True, inside, **options)
                optimizer = OPTIMIZERS[kind](model.parameters())
                given = copy.deepcopy(saved[cls][name])
                if inside and kind == "Adam":
                    with pytest.raises(ValueError):  # a count, and none
                        loads[name](cls, given, model, optimizer)
                    continue
                its = loads[name](cls, given, model, optimizer)
                listed = its["param_groups"][0]["params"]
                found.append((set(its["state"]), list(listed)))
                if not inside:
                    number = next(n for n, p in enumerate(model.parameters()) if p is model.extra)
                    assert number not in listed
                    listed.insert(number, number)  # as programs do that keep its state themselves
                    optimizer.load_state_dict(its)
            assert all(one == found[0] for one in found)
