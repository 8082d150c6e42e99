"""Directories of training libraries: Accelerate, the Transformers Trainer, Lightning, Fabric,
Megatron-FSDP."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..._archive.archive import Archive
from ..._archive.blocks import damaged
from ..._archive.texts import brief, count_in, found_in, parse_json, read_text
from ...errors import CheckpointError
from .dcp import is_dcp, read_dcp
from .paths import member, require_inside
from .rank_files import read_rank_files, read_torch_save
from .safetensors_files import read_safetensors
from .torch_save import ReadOptions, read_torch_file
from .tree import divided

_INDEX = r"(?:_(?P<index>\d{1,4}))?"
_FSDP_PART = re.compile(
    rf"(?P<what>pytorch_model_fsdp|optimizer){_INDEX}(?P<rank>_rank\d{{1,6}})?"
    r"(?P<suffix>\.bin|\.pt|)"
)
_PLAIN_MODEL = re.compile(
    rf"(?:model|pytorch_model|adapter_model){_INDEX}(?:\.safetensors|\.bin)(?:\.index\.json)?"
)
_SIGNS = re.compile(r"random_states_\d+\.pkl|trainer_state\.json|rng_state(_\d+)?\.pth")
_VALUES = re.compile(r"((?:scheduler|scaler|sampler|custom_checkpoint)(?:_\d+)?)\.(?:bin|pt|pkl)")
_OF_ONE_PROCESS = re.compile(
    r"random_states_\d+\.pkl|rng_state(_\d+)?\.pth|dl_state_dict(_\d+)?\.bin|training_args\.bin"
)
_TRAINER_STATE = "trainer_state.json"
_BESIDE_DCP = {"meta.pt": "Fabric", "common.pt": "Megatron-FSDP"}  # or Lightning

# By section, such as "model_1": a file, a directory, or one per rank.
_Parts = dict[str, list[Path]]


def read_client_directory(path: Path, options: ReadOptions) -> Archive | None:
    """Return what a directory of one of these libraries holds; None if it is not one.

    - Accelerate, and the Trainer's ``checkpoint-500``: each model and optimizer as FULL
      (``pytorch_model_fsdp.bin``), SHARDED (``pytorch_model_fsdp_0/``), LOCAL or one file per rank
      (``..._rank0.bin``), and those of DistributedDataParallel (``model.safetensors``)
    - Lightning and Fabric: ``.metadata`` and ``meta.pt``; Megatron-FSDP: ``common.pt``

    Schedulers, scalers and registered objects are in ``extra``; the state of single processes, such
    as random numbers, is named in ``left_out``. Raises CheckpointError and OSError."""
    if is_dcp(path):
        return _with_values_beside(path, options)
    names = sorted(os.listdir(path))
    parts, plain = _fsdp_parts(path, names), _plain_models(path, names)
    has_models = any(key.startswith("model") for key in parts)
    is_signed = any(map(_SIGNS.fullmatch, names))
    if not (has_models or (plain and (parts or is_signed)) or (parts and is_signed)):
        return None
    kind = "Trainer" if _TRAINER_STATE in names else "Accelerate"
    archive = Archive(path, kind, {}, as_saved={})
    used = parts if has_models else {**plain, **parts}
    for key in sorted(used, key=lambda key: (len(key), key)):
        found = _read(used[key], options)
        tree = found.as_saved
        inside = tree.get(key.partition("_")[0]) if isinstance(tree, dict) else None
        archive.as_saved[key] = inside if isinstance(inside, dict) else tree
        archive.world_size = max(archive.world_size or 0, found.world_size or 0) or None
        archive.left_out += [f"{key}: {text}" for text in found.left_out]
    if has_models:
        copies = [file.name for files in plain.values() for file in files]
        archive.left_out += [f"{name}: a further copy of the model" for name in copies]
    divided(archive).as_saved = None  # the files are several
    _add_values(archive, path, names, options)
    return archive


# -- Lightning, Fabric, Megatron-FSDP


def _with_values_beside(path: Path, options: ReadOptions) -> Archive | None:
    """Return a torch.distributed.checkpoint with a file of plain values, or None without it."""
    name = next((name for name in _BESIDE_DCP if (path / name).is_file()), None)
    if name is None:
        return None
    archive = read_dcp(path)
    values = _torch_values(member(path, name), archive.left_out, options)
    values = values if isinstance(values, dict) else {"values": values}
    archive.kind = "Lightning" if "pytorch-lightning_version" in values else _BESIDE_DCP[name]
    archive.as_saved = {**values, **archive.as_saved}
    return divided(archive)


def _torch_values(path: Path, left_out: list[str], options: ReadOptions) -> Any:
    """Return the values of a torch.save file; if they are refused, {} with a note."""
    try:
        return read_torch_file(path, options.ignore_class)
    except CheckpointError as error:
        left_out.append(f"{path.name}: {found_in(error)}")
        return {}


# -- Accelerate and the Trainer


def _section(what: str, index: str | None) -> str:
    number = int(index or 0)
    return f"{what}_{number}" if number else what


def _fsdp_parts(path: Path, names: Iterable[str]) -> _Parts:
    """Return the files of each model and optimizer."""
    forms: dict[str, _Parts] = {}
    for name in names:
        match = _FSDP_PART.fullmatch(name)
        if match is None or (is_dcp(path / name) == bool(match["suffix"])):
            continue
        what = "optimizer" if match["what"] == "optimizer" else "model"
        of_section = forms.setdefault(_section(what, match["index"]), {})
        form = "per rank" if match["rank"] else name
        of_section.setdefault(form, []).append(require_inside(path, path / name))
    for key, several in forms.items():
        if len(several) > 1:
            raise CheckpointError.of(
                f"The directory holds the {key} in several forms.",
                expected="what one save has written",
                got=", ".join(file.name for files in several.values() for file in files)[:300],
                where=str(path),
                fix="move the files of other saves elsewhere",
            )
    return {key: files for key, several in forms.items() for files in several.values()}


def _plain_models(path: Path, names: Iterable[str]) -> _Parts:
    """Return the file, or the index, of each model that was saved whole."""
    found: _Parts = {}
    for name in sorted(names, key=lambda name: (name.startswith("pytorch"), name)):
        if match := _PLAIN_MODEL.fullmatch(name):
            file = require_inside(path, path / name)
            found.setdefault(_section("model", match["index"]), [file])
    return found


def _read(files: list[Path], options: ReadOptions) -> Archive:
    """Return one model or optimizer."""
    first = files[0]
    if first.is_dir():
        return read_dcp(first)
    if len(files) > 1 or "_rank" in first.name:
        return read_rank_files(files, options)
    if ".safetensors" in first.name:
        return read_safetensors(first)
    return read_torch_save(first, options)


def _add_values(archive: Archive, path: Path, names: Iterable[str], options: ReadOptions) -> None:
    """Enter the step and the plain values beside model and optimizer."""
    for name in names:
        if match := _VALUES.fullmatch(name):
            file = require_inside(path, path / name)
            values = _torch_values(file, archive.left_out, options)
            if values != {}:
                archive.extra[match[1]] = values
        elif _OF_ONE_PROCESS.fullmatch(name):
            archive.left_out.append(f"{name}: state of one process")
        elif name == _TRAINER_STATE:
            file = require_inside(path, path / name)
            archive.left_out.append(f"{name}: the Trainer's log; its step was read")
            try:
                step = parse_json(read_text(file)).get("global_step")
                archive.step = None if step is None else count_in(step)
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise damaged(file, "the Trainer's state, as JSON", brief(error)) from error
