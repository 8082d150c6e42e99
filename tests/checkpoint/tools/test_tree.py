"""The sections of a checkpoint are found under the keys and in the forms that people use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compat.checkpoint._tools.archive import Archive, StoredTensor, of_memory
from fsdp_compat.checkpoint._tools.tree import archive_of, plain_name, without_ddp
from fsdp_compat.errors import CheckpointError

PATH = Path("somewhere")


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> StoredTensor:
    return of_memory("", torch.zeros(shape, dtype=dtype))


def parsed(tree: Any) -> Archive:
    archive = archive_of(PATH, "test", tree)
    without_ddp(archive)
    return archive


def adam(*shape: int) -> dict[str, Any]:
    return {"step": tensor(), "exp_avg": tensor(*shape), "exp_avg_sq": tensor(*shape)}


MODEL = {"a.weight": tensor(4, 3), "a.bias": tensor(4), "scale": tensor()}
BY_NAME: dict[str, Any] = {
    "state": {"a.weight": adam(4, 3), "a.bias": adam(4)},
    "param_groups": [{"lr": 0.1, "params": ["a.weight", "a.bias"]}],
}
FLATTENED = {
    f"state.{name}.{key}": value
    for name, state in BY_NAME["state"].items()
    for key, value in state.items()
} | {f"param_groups.{name}.lr": 0.1 for name in BY_NAME["state"]}
NUMBERED = {
    "state": {1: adam(4), 0: adam(4, 3)},
    "param_groups": [{"lr": 0.1, "params": [0, 1], "param_names": ["a.weight", "a.bias"]}],
}


def in_module(values: dict[str, Any]) -> dict[str, Any]:
    return {f"module.{name}": value for name, value in values.items()}


IN_MODULE = {
    "state": in_module(BY_NAME["state"]),
    "param_groups": [{"lr": 0.1, "params": ["module.a.weight", "module.a.bias"]}],
}


# -- the model


@pytest.mark.parametrize(
    "tree",
    [
        MODEL,
        {"model": MODEL, "epoch": 3},
        {"state_dict": MODEL, "epoch": 3, "loops": {"model": {"x": 1}}},
        {"app": {"model": MODEL}, "noise": tensor(2)},
        {"module": MODEL, "ema": {"a.weight": tensor(4, 3)}},
        {"model": {"a": {"weight": MODEL["a.weight"], "bias": MODEL["a.bias"]}, **MODEL}},
        {"whatever": MODEL, "train_state": {"step": tensor()}},
        {**MODEL, "train_state": {"step": tensor()}, "lr_scheduler": {"last_epoch": 3}},
        {"model": in_module(in_module(MODEL))},
        {f"module._orig_mod.{name}": value for name, value in MODEL.items()},
    ],
    ids=lambda tree: ",".join(tree)[:40],
)
def test_a_model_is_found_under_its_plain_names(tree: dict[str, Any]) -> None:
    archive = parsed(tree)
    assert set(archive.tensors) == set(MODEL)
    assert [found.name for found in archive.tensors.values()] == list(archive.tensors)
    assert archive.param_groups is None


def test_several_models_keep_their_keys() -> None:
    for first, second in (("model", "model_1"), ("actor", "critic")):
        found = parsed({first: {"w": tensor(2)}, second: {"w": tensor(3)}, "step": 4})
        assert {name: each.shape for name, each in found.tensors.items()} == {
            f"{first}.w": (2,),
            f"{second}.w": (3,),
        }
        assert found.step == 4


def test_wrappers_leave_names_and_names_of_the_model_stay() -> None:
    name = "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.weight"
    assert plain_name(name) == "layers.0.weight"
    # Names of the model that only end as a wrapper's name does.
    own = ["my_orig_mod.weight", "x_fsdp_wrapped_module.w", "a._orig_mod_b.w"]
    assert [plain_name(name) for name in own] == own
    # One parameter outside: "module" is the model's own.
    assert set(parsed({"module.w": tensor(2), "v": tensor(2)}).tensors) == {"module.w", "v"}
    # What would get one name keeps two.
    clash = {"_orig_mod.w": tensor(2), "w": tensor(3)}
    assert set(parsed(clash).tensors) == set(clash)
    # The optimizer has only some of the parameters: the model decides.
    tree = {
        "model": {"module.w": tensor(2), "v": tensor(2)},
        "optimizer": {"state": {"module.w": adam(2)}, "param_groups": [{"params": ["module.w"]}]},
    }
    assert set(parsed(tree).states) == {"module.w"}


def test_other_values_keep_their_place() -> None:
    tree = {
        "model": {**MODEL, "a._extra_state": b"x"},
        "rng": [tensor(5), {"cuda": tensor(6)}],
        "empty": {},
        "global_step": 12,
    }
    found = parsed(tree)
    assert found.step == 12
    assert found.extra["model"] == {"a._extra_state": b"x"}
    paths = {path for path, _ in found.all_tensors() if path.startswith("extra")}
    assert paths == {"extra/rng/0", "extra/rng/1/cuda"}
    assert parsed(tensor(3)).extra["value"].shape == (3,)


# -- the optimizer


@pytest.mark.parametrize(
    "tree",
    [
        {"model": MODEL, "optimizer": BY_NAME},
        {"model": MODEL, "optim": {"state": BY_NAME["state"]}},
        {"app": {"model": MODEL, "opt": BY_NAME}},
        {"state_dict": MODEL, "optimizer_states": [BY_NAME]},
        {"model": in_module(MODEL), "optimizer": IN_MODULE},
        {"model": MODEL, "optimizer": FLATTENED},
        {"model": MODEL, "optimizer": NUMBERED},
        BY_NAME,
    ],
    ids=["name", "no groups", "app", "list", "module", "flattened", "numbers", "alone"],
)
def test_the_optimizer_is_by_name(tree: dict[str, Any]) -> None:
    archive = parsed(tree)
    assert not archive.is_by_number
    assert set(archive.states) == {"a.weight", "a.bias"}
    for name, states in archive.states.items():
        assert states["exp_avg"].shape == MODEL[name].shape
        assert states["exp_avg"].name == f"{name}/exp_avg"
    assert archive.param_groups is not None
    (group,) = archive.param_groups
    assert sorted(group["params"]) == ["a.bias", "a.weight"]
    assert group.get("lr", 0.1) == 0.1
    assert archive.extra == {}


def test_numbers_become_names_only_if_the_groups_say_which() -> None:
    model = {"a": tensor(2), "b": tensor(3)}

    def opened(*groups: dict[str, Any]) -> Archive:
        optimizer = {"state": {0: adam(3), 1: adam(2)}, "param_groups": list(groups)}
        return parsed({"model": model, "optimizer": optimizer})

    found = opened({"params": [0], "param_names": ["b"]}, {"params": [1], "param_names": ["a"]})
    assert {name: states["exp_avg"].shape for name, states in found.states.items()} == {
        "b": (3,),
        "a": (2,),
    }
    assert [group["params"] for group in found.param_groups or ()] == [["b"], ["a"]]
    for groups in (
        [{"params": [0, 1]}],  # although shapes and order would fit one choice alone
        [{"params": [0, 1], "param_names": ["b"]}],
        [{"params": [0, 1], "param_names": ["b", "b"]}],
        [{"params": [0], "param_names": ["b"]}],  # state 1 is in no group
        [{"params": [0], "param_names": ["b"]}, {"params": [1]}],
    ):
        found = opened(*groups)
        assert found.is_by_number and set(found.states) == {"0", "1"}


def test_flattened_settings_make_groups_and_two_optimizers_become_one() -> None:
    flat = {f"param_groups.{name}.lr": lr for name, lr in (("a", 1), ("b", 2), ("c.d", 1))}
    found = parsed({"optimizer": {"state.c.d.step": tensor(), **flat}})
    assert found.param_groups == [{"lr": 1, "params": ["a", "c.d"]}, {"lr": 2, "params": ["b"]}]
    assert set(found.states) == {"c.d"}

    one = {"state": {"a": adam(2)}, "param_groups": [{"params": ["a"]}]}
    two = {"state": {"b": adam(2)}, "param_groups": [{"params": ["b"]}]}
    model = {"a": tensor(2), "b": tensor(2)}
    found = parsed({"model": model, "optimizer_0": one, "optimizer_1": two})
    assert set(found.states) == {"a", "b"}
    assert found.left_out == []
    found = parsed({"model": model, "optimizer_0": one, "optimizer_1": one})
    assert found.states == {}
    assert set(found.extra) == {"optimizer_0", "optimizer_1"}
    assert len(found.left_out) == 1


# -- bounds


def test_very_many_containers_and_doubtful_keys_are_refused() -> None:
    many: Any = tensor(2)
    for _ in range(40):
        many = {"a": many, "b": many}
    for tree in (many, {"state": {0: {}, "0": {}}}):
        with pytest.raises(CheckpointError, match="was refused"):
            parsed(tree)


keys = st.sampled_from(
    ["model", "state_dict", "optimizer", "state", "param_groups", "params", "module.a", "a", "step"]
)
leaves = st.one_of(
    st.just(tensor(2)), st.just(tensor()), st.integers(), st.none(), st.text(max_size=3)
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(keys, st.integers(0, 3)), inner, max_size=4),
    ),
    max_leaves=20,
)


def num_tensors(value: Any) -> int:
    if isinstance(value, StoredTensor):
        return 1
    if isinstance(value, (dict, list, tuple)):
        return sum(map(num_tensors, value.values() if isinstance(value, dict) else value))
    return 0


@given(trees)
def test_no_tree_fails_and_no_tensor_is_lost(tree: Any) -> None:
    try:
        archive = parsed(tree)
    except CheckpointError:  # for keys such as 0 and "0"
        return
    found = len(archive.tensors) + len(archive.aliases) + num_tensors(archive.extra)
    found += num_tensors(archive.states) + num_tensors(archive.param_groups)
    assert found == num_tensors(tree)
