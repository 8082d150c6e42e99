"""Flat parameters come apart into the parameters of the model, with shapes from elsewhere, if these
add up; otherwise an error says what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_compat.checkpoint._tools.archive import Archive, of_memory
from fsdp_compat.checkpoint._tools.rank_files import read_rank_files
from fsdp_compat.checkpoint._tools.shapes import Shape, Shapes, shapes_of, shapes_of_archive
from fsdp_compat.checkpoint.files import convert, diff, inspect, verify
from fsdp_compat.errors import CheckpointError
from tests.support.checkpoints import STEP, Toy, assert_holds, make, reference, unsharded

FORMS = ("fsdp1-local", "fsdp1-local-original")  # with use_orig_params=False and True


def paths_of(form: str, folder: Path) -> list[Path]:
    return sorted(make(form, 3, folder)["path"].iterdir())


@pytest.mark.parametrize("source", ["model", "ties", "no ties", "sorted"])
@pytest.mark.parametrize("form", FORMS)
def test_local_files_give_the_model_with_shapes_of_the_model_or_a_full_checkpoint(
    tmp_path: Path, form: str, source: str
) -> None:
    """A full checkpoint may not say what is a buffer, what is tied, or which order parameters
    have."""
    state, paths = reference()["model"], paths_of(form, tmp_path)
    full = Archive(Path("full"), "safetensors" if source == "sorted" else "torch.save", {})
    for name, values in state.items():
        full.tensors[name] = of_memory(name, values)
    if source != "no ties":
        del full.tensors["words.head.weight"]
    if source == "ties":
        full.aliases["words.head.weight"] = "words.embed.weight"
    if source == "sorted":
        full.tensors = dict(sorted(full.tensors.items()))
    shapes = shapes_of(unsharded()) if source == "model" else shapes_of_archive(full)
    if source == "sorted" and form == "fsdp1-local":  # nothing says where each parameter lies
        with pytest.raises(CheckpointError, match="order of the parameters"):
            read_rank_files(paths, shapes)
    else:
        archive = read_rank_files(paths, shapes)
        assert_holds(archive, state)
        assert (archive.world_size, archive.step, archive.left_out) == (3, STEP, [])


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
        ("fsdp1-local", None, "pass shapes"),
        ("fsdp1-local-original", None, "pass shapes"),
        ("fsdp1-local", 60, rf"blocks\.1\._flat_param(.|\n)*{WRONG} 60"),
        ("fsdp1-local-original", 54, rf"blocks\.1\._flat_param(.|\n)*{WRONG} 55"),
        ("fsdp1-local-original", 56, rf"blocks\.1\._flat_param(.|\n)*{WRONG} 55"),
    ],
)
def test_shapes_that_are_missing_or_do_not_add_up_are_refused(
    tmp_path: Path, form: str, numel: int | None, message: str
) -> None:
    known = shapes_of(unsharded())
    shapes = Shapes({})
    if numel is not None:
        wrong = {**known.entries, WRONG: Shape((numel,), torch.bfloat16)}
        shapes = Shapes(wrong, known.ties)
    with pytest.raises(CheckpointError, match=message):
        read_rank_files(paths_of(form, tmp_path), shapes)


# -- shapes


def test_shapes_on_the_meta_device_are_those_of_the_model() -> None:
    with torch.device("meta"):
        shapes = shapes_of(Toy())
    assert shapes == shapes_of(unsharded())
    assert list(shapes.ties) == ["words.head.weight"]
