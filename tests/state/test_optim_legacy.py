"""The six older calls for optimizer state: torch's signatures and layouts, one deprecation each,
the values of the newer calls."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullOptimStateDictConfig as TorchFullOptimConfig
from torch.distributed.fsdp import FullStateDictConfig as TorchFullConfig
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import OptimStateKeyType as TorchKeyType
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import OptimStateKeyType, StateDictType
from fsdp_compat.errors import CheckpointError, UsageError
from tests.state.test_optim import (
    OPTIMIZERS,
    Block,
    assert_equal_states,
    assert_four_facts,
    assert_state,
    by_name,
    full_state,
    make_model,
    num_sent,
    shard,
    split_decay,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.sampling import sample

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


def once(call: Callable[[], Any]) -> Any:
    """Return what ``call`` does, which says once, to this file, that it is deprecated."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = call()
    (warning,) = [warning for warning in caught if "deprecated; use" in str(warning.message)]
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__
    old = str(warning.message).split()[0].rpartition(".")[2]
    assert str(warning.message).endswith(f"use FullyShardedDataParallel.{NEW[old]} instead.")
    return answer


def quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def pair(use_orig_params: bool, kind: str, groups: bool) -> tuple[Any, Any, Any, Any]:
    """(torch's model and optimizer, ours and ours), trained alike."""
    theirs = TorchFSDP(
        make_model(0, odd=False),
        auto_wrap_policy=TorchWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    ours = shard(make_model(0, odd=False), ("FULL_SHARD", use_orig_params, "blocks"))
    their_optimizer, optimizer = (
        OPTIMIZERS[kind](split_decay(m) if groups else m.parameters()) for m in (theirs, ours)
    )
    train(theirs, their_optimizer, range(2))
    train(ours, optimizer, range(2))
    return theirs, their_optimizer, ours, optimizer


def torchs_full(model: Any, optimizer: Any) -> Any:
    """By torch's newer call: with its offload to the CPU, which the older has, values are wrong on
    the CPU."""
    full = (
        TorchFullConfig(offload_to_cpu=False),
        TorchFullOptimConfig(offload_to_cpu=False, rank0_only=False),
    )
    with TorchFSDP.state_dict_type(model, TorchType.FULL_STATE_DICT, *full):
        return quietly(lambda: TorchFSDP.optim_state_dict(model, optimizer))


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


def _like_torch(use_orig_params: bool, directory: str) -> None:
    for kind, groups in (("Adam", False), ("SGD", False), ("Adagrad", False), ("AdamW", True)):
        if groups and not use_orig_params:
            continue
        theirs, their_optimizer, ours, optimizer = pair(use_orig_params, kind, groups)
        expected = torchs_full(theirs, their_optimizer)
        found = once(lambda m=ours, o=optimizer: FSDP.full_optim_state_dict(m, o, rank0_only=False))
        layout = quietly(
            lambda m=theirs, o=their_optimizer: TorchFSDP.full_optim_state_dict(
                m, o, rank0_only=False
            )
        )
        assert found.keys() == layout.keys() == {"state", "param_groups"}
        assert sizes(found) == sizes(layout)
        assert found["param_groups"] == layout["param_groups"]
        assert_state(found["state"], expected["state"], tolerance=1e-5)
        assert all(
            value.device.type == "cpu"
            for entry in found["state"].values()
            for value in entry.values()
        )

        alone = once(lambda m=ours, o=optimizer: FSDP.full_optim_state_dict(m, o))
        assert bool(alone) is (dist.get_rank() == 0)

        before = num_sent(ours)
        sharded = once(lambda m=ours, o=optimizer: FSDP.sharded_optim_state_dict(m, o))
        assert num_sent(ours) == before
        torchs = quietly(
            lambda m=theirs, o=their_optimizer: TorchFSDP.sharded_optim_state_dict(m, o)
        )
        assert sizes(sharded) == sizes(torchs)
        assert sharded["param_groups"] == torchs["param_groups"]

        wanted = FSDP.optim_state_dict_to_load(ours, optimizer, found)
        loadable = (
            once(
                lambda m=ours, o=optimizer, s=found: FSDP.shard_full_optim_state_dict(s, m, optim=o)
            ),
            once(
                lambda m=ours, o=optimizer, s=sharded: FSDP.flatten_sharded_optim_state_dict(
                    s, m, o
                )
            ),
            once(
                lambda m=ours, o=optimizer, s=alone: FSDP.scatter_full_optim_state_dict(
                    s or None, m, optim=o
                )
            ),
        )
        for one in loadable:
            assert_equal_states(one, wanted)
        given = copy.deepcopy(expected)
        torchs_loadable = quietly(
            lambda m=theirs, o=their_optimizer, s=given: TorchFSDP.shard_full_optim_state_dict(
                s, m, optim=o
            )
        )
        assert wanted["param_groups"] == torchs_loadable["param_groups"]
        assert (
            wanted["state"].keys() >= torchs_loadable["state"].keys()
        )  # torch leaves out empty parts
        for number, entry in torchs_loadable["state"].items():
            assert wanted["state"][number].keys() == entry.keys()
            for key, value in entry.items():
                assert wanted["state"][number][key].dim() == value.dim()

        path = f"{directory}/{kind}-{use_orig_params}"
        if dist.get_rank() == 0:
            torch.save(found, f"{path}-ours")
            torch.save(expected, f"{path}-torch")  # of flat parameters, all names share one step
        dist.barrier()
        from_ours, from_torch = (
            torch.load(f"{path}-{name}", weights_only=True) for name in ("ours", "torch")
        )
        their_optimizer.load_state_dict(
            quietly(
                lambda m=theirs, o=their_optimizer, s=from_ours: (
                    TorchFSDP.shard_full_optim_state_dict(s, m, optim=o)
                )
            )
        )
        optimizer.load_state_dict(
            once(
                lambda m=ours, o=optimizer, s=from_torch: FSDP.shard_full_optim_state_dict(
                    s, m, optim=o
                )
            )
        )
        steps = [
            entry["step"]
            for entry in optimizer.state.values()
            if isinstance(entry.get("step"), Tensor)
        ]
        assert len({step.data_ptr() for step in steps}) == len(steps)
        assert train(theirs, their_optimizer, range(2, 5)) == pytest.approx(
            train(ours, optimizer, range(2, 5)), rel=1e-4
        )


@pytest.mark.parametrize("use_orig_params", sample([False, True], 1))
def test_dicts_have_torchs_layout_and_load_both_ways_from_files(
    use_orig_params: bool, tmp_path: Path
) -> None:
    run_ranks(2, _like_torch, use_orig_params, str(tmp_path))


def _any_form_is_set() -> None:
    model = shard(make_model(), ("FULL_SHARD", False, "blocks"))
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    train(model, optimizer, range(1))
    full = full_state(model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert_state(
            once(lambda: FSDP.full_optim_state_dict(model, optimizer, rank0_only=False))["state"],
            full["state"],
        )
    sharded = once(lambda: FSDP.sharded_optim_state_dict(model, optimizer))
    assert isinstance(sharded["state"]["blocks.0.linear.weight"]["exp_avg"], ShardedTensor)


def test_the_form_that_is_set_does_not_matter() -> None:
    run_ranks(2, _any_form_is_set)


def _inputs() -> None:
    """Numbers count the input, whatever order it has."""
    model = shard(make_model(), ("FULL_SHARD", True, "blocks"))
    reverse = list(model.parameters())[::-1]
    for given in (reverse, split_decay(model)[::-1]):
        optimizer = OPTIMIZERS["AdamW"](given)
        train(model, optimizer, range(2))
        full = full_state(model, optimizer)
        groups = (
            [{**group, "params": list(group["params"])} for group in given]
            if isinstance(given[0], dict)
            else list(given)
        )
        found = once(
            lambda o=optimizer, g=groups: FSDP.full_optim_state_dict(model, o, g, rank0_only=False)
        )
        assert_state(found["state"], full["state"])
        assert found["param_groups"] == full["param_groups"]
        wanted = FSDP.optim_state_dict_to_load(model, optimizer, full)
        for one in (
            once(lambda s=full, g=groups: FSDP.shard_full_optim_state_dict(s, model, g)),
            once(
                lambda s=full, g=groups: FSDP.scatter_full_optim_state_dict(
                    s if dist.get_rank() == 0 else None, model, g
                )
            ),
        ):
            assert_state(one["state"], wanted["state"])
            assert [group["params"] for group in one["param_groups"]] == [
                group["params"] for group in wanted["param_groups"]
            ]
            optimizer.load_state_dict(one)
        assert_state(full_state(model, optimizer)["state"], full["state"])
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, range(1))
    full = full_state(model, optimizer)  # without input and optimizer: the model's parameters
    assert_equal_states(
        once(lambda: FSDP.shard_full_optim_state_dict(full, model)),
        FSDP.optim_state_dict_to_load(model, optimizer, full),
    )
    numbered = {
        "state": dict(enumerate(full["state"].values())),
        "param_groups": [{"params": list(range(len(full["state"])))}],
    }
    found = once(lambda: FSDP.shard_full_optim_state_dict(numbered, model))["state"].keys()
    assert (
        {number for number, p in enumerate(model.parameters()) if p.numel()}
        <= found
        <= set(range(len(full["state"])))
    )
    for wrong, kind in (
        (3, TypeError),
        ([], ValueError),
        ([1, 2], TypeError),
        ([{"lr": 1}], AssertionError),
    ):
        for call in (
            lambda w=wrong: FSDP.full_optim_state_dict(model, optimizer, w),
            lambda w=wrong: FSDP.shard_full_optim_state_dict(full, model, w),
        ):
            with pytest.raises(UsageError) as caught:
                quietly(call)
            assert isinstance(caught.value, kind)
            assert_four_facts(caught.value)


def test_numbers_follow_the_optimizer_input() -> None:
    run_ranks(2, _inputs)


# --- keys -----------------------------------------------------------------------------------------


def rekeyed(cls: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
    call = lambda: cls.rekey_optim_state_dict(args[0], kind, *args[1:], **kwargs)  # noqa: E731
    return once(call) if cls is FSDP else quietly(call)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("by", ["optim", "optim_input", "groups", "nothing"])
def test_rekeying_equals_torchs(kind: str, by: str) -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
    )  # without ties, which torch refuses
    given: Any = split_decay(model) if by == "groups" else list(model.parameters())
    optimizer = OPTIMIZERS[kind](given)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    how = {
        "optim": {"optim": optimizer},
        "optim_input": {"optim_input": given},
        "groups": {"optim_input": split_decay(model)},
    }
    numbered = optimizer.state_dict()
    named = rekeyed(FSDP, OptimStateKeyType.PARAM_NAME, numbered, model, **how.get(by, {}))
    torchs = rekeyed(TorchFSDP, TorchKeyType.PARAM_NAME, numbered, model, **how.get(by, {}))
    assert_state(named["state"], torchs["state"])
    assert named["param_groups"] == torchs["param_groups"]
    assert_state(named["state"], by_name(model, optimizer)["state"])
    back = rekeyed(FSDP, TorchKeyType.PARAM_ID, named, model, **how.get(by, {}))
    torchs = rekeyed(TorchFSDP, TorchKeyType.PARAM_ID, named, model, **how.get(by, {}))
    assert_state(back["state"], torchs["state"])
    assert back["param_groups"] == torchs["param_groups"] == numbered["param_groups"]
    assert_state(back["state"], numbered["state"])
    for same, key_type in (
        (named, OptimStateKeyType.PARAM_NAME),
        (numbered, OptimStateKeyType.PARAM_ID),
    ):
        unchanged = rekeyed(FSDP, key_type, same, model, **how.get(by, {}))
        assert_state(unchanged["state"], same["state"])
        assert unchanged["param_groups"] == same["param_groups"]


def test_a_dict_without_state_is_rekeyed() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = rekeyed(
        FSDP, OptimStateKeyType.PARAM_NAME, optimizer.state_dict(), model, optim=optimizer
    )
    assert named["state"] == {}
    assert [group["params"] for group in named["param_groups"]] == [["bias", "weight"]]


def test_keys_that_do_not_fit_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    groups = [{"params": ["weight", "bias"]}]
    cases: tuple[tuple[Any, type[Exception]], ...] = (
        ({"state": {"weight": {}, 1: {}}, "param_groups": groups}, CheckpointError),
        ({"state": {("weight",): {}}, "param_groups": []}, CheckpointError),
        ({"state": {"other": {}}, "param_groups": groups}, CheckpointError),
        ({"state": {}, "param_groups": [{"params": ["other"]}]}, CheckpointError),
        ({"param_groups": groups}, CheckpointError),
        ([1], CheckpointError),
    )
    for state, kind in cases:
        with pytest.raises(kind) as caught:
            rekeyed(FSDP, OptimStateKeyType.PARAM_ID, state, model, optim=optimizer)
        assert_four_facts(caught.value)
    for key_type in ("PARAM_ID", None):
        with pytest.raises(UsageError) as caught:
            quietly(
                lambda k=key_type: FSDP.rekey_optim_state_dict(
                    optimizer.state_dict(), k, model, optim=optimizer
                )
            )
        assert_four_facts(caught.value)


def _between_wrapped_and_plain() -> None:
    """Out of a wrapped model into one that is not, and back; names come without what nested
    wrappers add."""
    plain = make_model()
    reference = OPTIMIZERS["AdamW"](plain.parameters())
    train(plain, reference, range(2))
    for config in (("FULL_SHARD", False, "blocks"), ("FULL_SHARD", True, "always")):
        model = shard(make_model(), config)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        named = rekeyed(
            FSDP, OptimStateKeyType.PARAM_NAME, reference.state_dict(), plain, optim=reference
        )
        optimizer.load_state_dict(
            quietly(
                lambda m=model, o=optimizer, s=named: FSDP.shard_full_optim_state_dict(
                    s, m, optim=o
                )
            )
        )
        full = full_state(model, optimizer)
        assert_state(full["state"], by_name(plain, reference)["state"])
        other = OPTIMIZERS["AdamW"](plain.parameters())
        other.load_state_dict(rekeyed(FSDP, OptimStateKeyType.PARAM_ID, full, plain, optim=other))
        assert_state(by_name(plain, other)["state"], by_name(plain, reference)["state"])
    numbered = {**reference.state_dict(), "state": dict(enumerate(full["state"].values()))}
    wrapped = rekeyed(FSDP, OptimStateKeyType.PARAM_NAME, numbered, model, optim=optimizer)
    assert_state(wrapped["state"], full["state"])
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
    back = rekeyed(FSDP, OptimStateKeyType.PARAM_ID, raw, plain, optim=reference)
    assert_state(back["state"], reference.state_dict()["state"])
    assert_state(
        FSDP.optim_state_dict_to_load(model, optimizer, raw)["state"],
        dict(optimizer.state_dict()["state"]),
    )


def test_state_loads_between_wrapped_and_plain_models() -> None:
    run_ranks(2, _between_wrapped_and_plain)


def _arguments() -> None:
    model = shard(make_model(), ("FULL_SHARD", False, "blocks"))
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    calls: tuple[Callable[[], Any], ...] = (
        lambda: FSDP.full_optim_state_dict(optimizer, model),  # type: ignore[arg-type]
        lambda: FSDP.full_optim_state_dict(model, optimizer, rank0_only="yes"),  # type: ignore[arg-type]
        lambda: FSDP.sharded_optim_state_dict(model, optimizer, "group"),  # type: ignore[arg-type]
        lambda: FSDP.shard_full_optim_state_dict(model, {}),  # type: ignore[arg-type]
        lambda: FSDP.shard_full_optim_state_dict({}, model, optim=model),  # type: ignore[arg-type]
        lambda: FSDP.flatten_sharded_optim_state_dict({}, model, None),  # type: ignore[arg-type]
        lambda: FSDP.scatter_full_optim_state_dict(None, model, optim=optimizer),
        lambda: FSDP.scatter_full_optim_state_dict({}, nn.Linear(2, 2), optim=optimizer),
        lambda: FSDP.full_optim_state_dict(nn.Linear(2, 2), optimizer),
    )
    for call in calls:
        with pytest.raises(UsageError) as caught:
            quietly(call)
        assert_four_facts(caught.value)
    quietly(lambda: FSDP.full_optim_state_dict(model, optimizer))


def test_wrong_arguments_are_refused_on_every_rank() -> None:
    run_ranks(2, _arguments)


def _rekeyed_flat() -> None:
    """A model of FlatParameters: numbers are those of the model without wrapping, whatever order
    its units have."""
    plain = make_model()
    reference = OPTIMIZERS["AdamW"](plain.parameters())
    train(plain, reference, range(2))
    for policy in ("blocks", "always"):
        model = shard(make_model(), ("FULL_SHARD", False, policy))
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        train(model, optimizer, range(2))
        full = full_state(model, optimizer)
        for how in ({}, {"optim": optimizer}, {"optim_input": list(model.parameters())}):
            numbered = rekeyed(FSDP, OptimStateKeyType.PARAM_ID, full, model, **how)
            assert (
                numbered["param_groups"][0]["params"]
                == reference.state_dict()["param_groups"][0]["params"]
            )
            assert_state(numbered["state"], reference.state_dict()["state"], tolerance=1e-4)
            named = rekeyed(FSDP, OptimStateKeyType.PARAM_NAME, numbered, model, **how)
            assert_state(named["state"], full["state"])
            assert sorted(named["param_groups"][0]["params"]) == sorted(
                full["param_groups"][0]["params"]
            )
            other = OPTIMIZERS["AdamW"](model.parameters())
            other.load_state_dict(FSDP.optim_state_dict_to_load(model, other, named))
            assert_state(full_state(model, other)["state"], full["state"])
        part = {"state": {"other": full["state"]["gain"]}, "param_groups": []}
        with pytest.raises(CheckpointError) as caught:
            rekeyed(FSDP, OptimStateKeyType.PARAM_ID, part, model)
        assert_four_facts(caught.value)


def test_a_dict_is_rekeyed_for_a_model_of_flat_parameters() -> None:
    run_ranks(2, _rekeyed_flat)


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


def _beside_units() -> None:
    torchs = {"device_id": torch.device("cpu")}
    loads: dict[str, Callable[..., Any]] = {
        "shard": lambda cls, s, m, o: cls.shard_full_optim_state_dict(copy.deepcopy(s), m, optim=o),
        "input": lambda cls, s, m, o: cls.shard_full_optim_state_dict(
            copy.deepcopy(s), m, list(m.parameters())
        ),
        "scatter": lambda cls, s, m, o: cls.scatter_full_optim_state_dict(
            s if dist.get_rank() == 0 else None, m, optim=o
        ),
        "flatten": lambda cls, s, m, o: cls.flatten_sharded_optim_state_dict(s, m, o),
    }
    for kind in ("Adam", "SGD"):
        saved: dict[Any, Any] = {}
        for cls, options in ((FSDP, {}), (TorchFSDP, torchs)):
            model = Beside(cls, False, False, **options)
            optimizer = OPTIMIZERS[kind](model.parameters())
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            whole = quietly(
                lambda m=model, o=optimizer, c=cls: c.full_optim_state_dict(m, o, rank0_only=False)
            )
            parts = quietly(lambda m=model, o=optimizer, c=cls: c.sharded_optim_state_dict(m, o))
            saved[cls] = {"shard": whole, "input": whole, "scatter": whole, "flatten": parts}
        for name, load in loads.items():
            for inside in (False, True):
                found: list[Any] = []
                for cls, options in ((FSDP, {}), (TorchFSDP, torchs)):
                    if cls is TorchFSDP and name == "scatter":  # it fails on parameters of no unit
                        continue
                    model = Beside(cls, True, inside, **options)
                    optimizer = OPTIMIZERS[kind](model.parameters())
                    given = saved[cls][name]
                    call = functools.partial(
                        quietly, functools.partial(load, cls, given, model, optimizer)
                    )
                    if inside and kind == "Adam":
                        with pytest.raises(ValueError):  # a count, and none
                            call()
                        continue
                    loadable = call()
                    listed = loadable["param_groups"][0]["params"]
                    found.append((set(loadable["state"]), list(listed)))
                    if not inside:
                        number = next(
                            n for n, p in enumerate(model.parameters()) if p is model.extra
                        )
                        assert number not in listed
                        listed.insert(
                            number, number
                        )  # as programs do that keep its state themselves
                        optimizer.load_state_dict(loadable)
                assert all(one == found[0] for one in found)


def test_only_missing_state_of_managed_parameters_is_an_error() -> None:
    run_ranks(2, _beside_units)
