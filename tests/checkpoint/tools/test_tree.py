"""The sections of a checkpoint are found under the keys and in the forms that people use."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdp_compat.checkpoint.files import inspect
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.tools.content import Content, content_of
from tests.support.sampling import at_most


def tensor(*shape: int) -> Tensor:
    return torch.zeros(shape)


Parsed = Callable[[Any], Content]


@pytest.fixture
def parsed(tmp_path: Path) -> Parsed:
    """Return what a tree of values is read as."""

    def parsed(tree: Any) -> Content:
        torch.save(tree, tmp_path / "x.pt")
        return content_of(tmp_path / "x.pt")

    return parsed


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
def test_a_model_is_found_under_its_plain_names(tree: dict[str, Any], parsed: Parsed) -> None:
    content = parsed(tree)
    assert set(content.model) == set(MODEL)
    assert content.groups is None and content.states == {}


def test_wrappers_leave_names_and_names_of_the_model_stay(parsed: Parsed) -> None:
    wrapped = "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.weight"
    # Names of the model that only end as a wrapper's name does.
    own = ["my_orig_mod.weight", "x_fsdp_wrapped_module.w", "a._orig_mod_b.w"]
    tree = {name: tensor(2) for name in (wrapped, *own)}
    assert set(parsed(tree).model) == {"layers.0.weight", *own}
    # One parameter outside: "module" is the model's own.
    assert set(parsed({"module.w": tensor(2), "v": tensor(2)}).model) == {"module.w", "v"}
    # What would get one name keeps two.
    clash = {"_orig_mod.w": tensor(2), "w": tensor(3)}
    assert set(parsed(clash).model) == set(clash)
    # The optimizer has only some of the parameters: the model decides.
    tree = {
        "model": {"module.w": tensor(2), "v": tensor(2)},
        "optimizer": {"state": {"module.w": adam(2)}, "param_groups": [{"params": ["module.w"]}]},
    }
    assert set(parsed(tree).states) == {"module.w"}


def test_other_values_keep_their_place(parsed: Parsed, tmp_path: Path) -> None:
    content = parsed(
        {
            "model": {**MODEL, "a._extra_state": b"x"},
            "rng": [tensor(5), {"cuda": tensor(6)}],
            "empty": {},
            "global_step": 12,
        }
    )
    assert content.facts.step == 12
    assert content.extra["extra_model"] == {"a._extra_state": b"x"}
    paths = {each.path for each in content.facts.tensors if each.section == "extra"}
    assert paths == {"extra/rng/0", "extra/rng/1/cuda"}
    torch.save(tensor(3), tmp_path / "x.pt")
    (alone,) = inspect(tmp_path / "x.pt").tensors
    assert alone.path == "extra/value"
    content = parsed({"actor": {"w": tensor(2)}, "critic": {"w": tensor(3)}, "step": 4})
    shapes = {name: tuple(values.shape) for name, values in content.model.items()}
    assert shapes == {"actor.w": (2,), "critic.w": (3,)} and content.facts.step == 4


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
    ],
    ids=["name", "no groups", "app", "list", "module", "flattened", "numbers"],
)
def test_the_optimizer_is_by_name(tree: dict[str, Any], parsed: Parsed) -> None:
    content = parsed(tree)
    assert set(content.states) == {"a.weight", "a.bias"}
    for name, states in content.states.items():
        assert states["exp_avg"].shape == MODEL[name].shape
    assert content.groups is not None
    (group,) = content.groups
    assert sorted(group["params"]) == ["a.bias", "a.weight"]
    assert group.get("lr", 0.1) == 0.1
    assert content.extra == {}


def optimized(parsed: Parsed, *groups: dict[str, Any]) -> Content:
    """Parameters a and b, of 2 and 3 elements, and an optimizer that numbers them the other way."""
    optimizer = {"state": {0: adam(3), 1: adam(2)}, "param_groups": list(groups)}
    return parsed({"model": {"a": tensor(2), "b": tensor(3)}, "optimizer": optimizer})


NAMED = {"params": [0], "param_names": ["b"]}
UNNAMED = [
    [{"params": [0, 1]}],  # although shapes and order would fit one choice alone
    [{"params": [0, 1], "param_names": ["b", "b"]}],
    [NAMED],  # state 1 is in no group
    [NAMED, {"params": [1]}],
]


def test_numbers_become_names_if_the_groups_name_each(parsed: Parsed) -> None:
    for groups in UNNAMED:
        assert set(optimized(parsed, *groups).states) == {0, 1}
    content = optimized(parsed, NAMED, {"params": [1], "param_names": ["a"]})
    sizes = {name: len(states["exp_avg"]) for name, states in content.states.items()}
    assert sizes == {"b": 3, "a": 2}
    assert [group["params"] for group in content.groups or ()] == [["b"], ["a"]]


def test_flattened_settings_make_groups(parsed: Parsed) -> None:
    flat = {f"param_groups.{name}.lr": lr for name, lr in (("a", 1), ("b", 2), ("c.d", 1))}
    model = {name: tensor(2) for name in ("a", "b", "c.d")}
    content = parsed({"model": model, "optimizer": {"state.c.d.step": tensor(), **flat}})
    assert content.groups == [{"lr": 1, "params": ["a", "c.d"]}, {"lr": 2, "params": ["b"]}]
    assert set(content.states) == {"c.d"}


def test_two_optimizers_of_different_parameters_become_one(parsed: Parsed) -> None:
    one = {"state": {"a": adam(2)}, "param_groups": [{"params": ["a"]}]}
    two = {"state": {"b": adam(2)}, "param_groups": [{"params": ["b"]}]}
    model = {"a": tensor(2), "b": tensor(2)}
    content = parsed({"model": model, "optimizer_0": one, "optimizer_1": two})
    assert set(content.states) == {"a", "b"} and content.facts.left_out == ()
    content = parsed({"model": model, "optimizer_0": one, "optimizer_1": one})
    assert content.states == {} and set(content.extra) == {"optimizer_0", "optimizer_1"}
    assert len(content.facts.left_out) == 1


# -- bounds


def test_very_many_containers_and_doubtful_keys_are_refused(tmp_path: Path) -> None:
    many: Any = tensor(2)
    for _ in range(40):
        many = {"a": many, "b": many}
    for tree in (many, {"state": {0: {}, "0": {}}}):
        torch.save(tree, tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match="was refused"):
            inspect(tmp_path / "x.pt")


KEYS = st.sampled_from(
    ["model", "state_dict", "optimizer", "state", "param_groups", "params", "module.a", "a", "step"]
)
LEAVES = st.sampled_from(["2", "0-d", 1, None, "", "text"])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(KEYS, st.integers(0, 3)), inner, max_size=4),
    ),
    max_leaves=20,
)


def with_tensors(value: Any) -> tuple[Any, int]:
    """Put a tensor in place of each name of one, but in groups; return how many there are."""
    if value in ("2", "0-d"):
        return tensor(*([2] if value == "2" else [])), 1
    if not isinstance(value, (dict, list)):
        return value, 0
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    items = {key: (at, 0) if key == "param_groups" else with_tensors(at) for key, at in pairs}
    made = {key: item for key, (item, _) in items.items()}
    num = sum(num for _, num in items.values())
    return made if isinstance(value, dict) else [*made.values()], num


@given(TREES)
@settings(max_examples=at_most(60, of_all=300), deadline=None)
def test_no_tree_fails_and_no_tensor_is_lost(tree: Any) -> None:
    tree, num_tensors = with_tensors(tree)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(tree, Path(folder, "x.pt"))
        try:
            found = inspect(Path(folder, "x.pt"))
        except CheckpointError:  # for keys such as 0 and "0"
            return
    assert len(found.tensors) + len(found.aliases) == num_tensors
