"""Flat parameters come apart into the parameters of the model, with shapes from elsewhere, if these
add up; otherwise an error says what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdp_compat.checkpoint.files import convert, diff, inspect, verify
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.tools.content import assert_model
from tests.support.checkpoints import STEP, make, reference

FORMS = ("fsdp1-local", "fsdp1-local-original")  # with use_orig_params=False and True


def shapes_in(source: str, folder: Path) -> str | Path:
    """Shapes of the model, or of a full checkpoint, which may not say what is a buffer, what is
    tied, or which order parameters have."""
    if source == "model":
        return "tests.support.checkpoints:unsharded"
    state = reference()["model"]
    if source != "ties":
        state = {name: values.clone() for name, values in state.items()}
    if source == "sorted":
        del state["words.head.weight"]
        save_file(state, folder / "full.safetensors")
        return folder / "full.safetensors"
    torch.save(state, folder / "full.pt")
    return folder / "full.pt"


@pytest.mark.parametrize("source", ["model", "ties", "no ties", "sorted"])
@pytest.mark.parametrize("form", FORMS)
def test_local_files_give_the_model_with_shapes_of_the_model_or_a_full_checkpoint(
    tmp_path: Path, form: str, source: str
) -> None:
    path, shapes = make(form, 3, tmp_path)["path"], shapes_in(source, tmp_path)
    if source == "sorted" and form == "fsdp1-local":  # nothing says where each parameter lies
        with pytest.raises(CheckpointError, match="order of the parameters"):
            inspect(path, shapes=shapes)
    else:
        facts = assert_model(path, reference()["model"], shapes=shapes).facts
        assert (facts.world_size, facts.step, facts.left_out) == (3, STEP, ())


@pytest.mark.parametrize("form", FORMS)
def test_without_shapes_each_parameter_stays_flat_and_only_a_conversion_needs_them(
    tmp_path: Path, form: str
) -> None:
    state, folder = reference()["model"], make(form, 3, tmp_path)["path"]
    found = inspect(folder)
    numels = {each.path.removeprefix("model/"): each.shape for each in found.tensors}
    if form == "fsdp1-local":
        assert numels["blocks.1._flat_param"] == (numel_of(state, "blocks.1."),)
    else:
        assert numels["blocks.1.up.weight"] == (state["blocks.1.up.weight"].numel(),)
    assert "--shapes" in " ".join(found.left_out)
    assert verify(folder).is_intact and diff(folder, folder).is_same
    with pytest.raises(CheckpointError, match="pass shapes"):
        convert(folder, tmp_path / "target")


def numel_of(state: dict[str, torch.Tensor], prefix: str) -> int:
    return sum(values.numel() for name, values in state.items() if name.startswith(prefix))


WRONG = "blocks.1.up.weight"  # of 55 elements


@pytest.mark.parametrize(
    ("form", "numel", "message"),
    [
        ("fsdp1-local", 60, rf"blocks\.1\._flat_param(.|\n)*{WRONG} 60"),
        ("fsdp1-local-original", 54, rf"blocks\.1\._flat_param(.|\n)*{WRONG} 55"),
        ("fsdp1-local-original", 56, rf"blocks\.1\._flat_param(.|\n)*{WRONG} 55"),
    ],
)
def test_shapes_that_do_not_add_up_are_refused(
    tmp_path: Path, form: str, numel: int, message: str
) -> None:
    wrong = reference()["model"] | {WRONG: torch.ones(numel, dtype=torch.bfloat16)}
    torch.save(wrong, tmp_path / "wrong.pt")
    with pytest.raises(CheckpointError, match=message):
        inspect(make(form, 3, tmp_path)["path"], shapes=tmp_path / "wrong.pt")
