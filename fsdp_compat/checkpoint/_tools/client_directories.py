"""Directories that training libraries write: Accelerate's ``save_state``, checkpoints of the
Transformers Trainer, sharded checkpoints of Lightning and Fabric, and Megatron-FSDP's."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .._texts import brief, found_in, parse_json, read_text, size, text_in
from .archive import Archive
from .dcp import damaged, is_dcp, read_dcp, tree_of
from .paths import member, require_inside
from .rank_files import read_rank_files
from .safetensors_files import read_safetensors
from .shapes import Shapes
from .torch_save import read_torch_file
from .tree import archive_of

_FSDP_PART = re.compile(
    r"(?P<what>pytorch_model_fsdp|optimizer)(?:_(?P<index>\d{1,4}))?(?:_rank(?P<rank>\d{1,6}))?"
    r"(?P<suffix>\.bin|\.pt|)"
)
_PLAIN_MODEL = re.compile(
    r"(?:model|pytorch_model|adapter_model)(?:_(?P<index>\d{1,4}))?"
    r"(?:\.safetensors|\.bin)(?P<is_index>\.index\.json)?"
)
_SIGNS = re.compile(r"random_states_\d+\.pkl|trainer_state\.json|rng_state(_\d+)?\.pth")
_VALUES = re.compile(
    r"(?P<key>scheduler|scaler|sampler|custom_checkpoint)(?P<index>_\d+)?\.(?:bin|pt|pkl)"
)
_OF_ONE_PROCESS = re.compile(
    r"random_states_\d+\.pkl|rng_state(_\d+)?\.pth|dl_state_dict(_\d+)?\.bin|training_args\.bin"
)
_TRAINER_STATE = "trainer_state.json"
_META = "meta.pt"  # of Lightning and Fabric
_COMMON = "common.pt"  # of Megatron


def read_client_directory(
    path: Path, shapes: Shapes | None = None, ignored: Collection[str] = ()
) -> Archive | None:
    """Return what a directory of one of these libraries holds; None if it is not one.

    - Accelerate: each model and optimizer as FULL (``pytorch_model_fsdp.bin``), SHARDED
      (``pytorch_model_fsdp_0/``), LOCAL or one file per rank (``..._rank0.bin``), and those of
      DistributedDataParallel (``model.safetensors``). With several models, names begin with
      "model." and "model_1.".
    - the Trainer's ``checkpoint-500``: the same; the step is that of ``trainer_state.json``
    - Lightning and Fabric: ``.metadata`` and ``meta.pt``
    - Megatron-FSDP: ``.metadata`` and ``common.pt``

    Schedulers, scalers and registered objects are in ``extra``; the state of single processes, such
    as random numbers, is named in ``left_out``. ignored: as for ``torch_save.load``. Raises
    CheckpointError and OSError.
    """
    if is_dcp(path):
        return _with_values_beside(path, ignored)
    names = sorted(os.listdir(path))
    parts = _fsdp_parts(path, names)
    plain = _plain_models(path, names)
    has_models = any(what == "model" for what, _ in parts)
    is_signed = any(_SIGNS.fullmatch(name) for name in names)
    if not (has_models or (plain and (parts or is_signed)) or (parts and is_signed)):
        return None
    kind = "Trainer" if _TRAINER_STATE in names else "Accelerate"
    left_out: list[str] = []
    models = {index: file for index, file in plain.items() if not has_models}
    left_out += [
        f"{file.name}: a further copy of the model" for file in plain.values() if has_models
    ]
    opened: dict[tuple[str, int], Archive] = {
        key: _opened(path, files, key[0], shapes, ignored) for key, files in parts.items()
    }
    for index, file in models.items():
        opened["model", index] = _opened_plain(path, file, ignored)
    archive = _combined(path, kind, opened)
    archive.left_out += left_out
    _add_values(archive, path, names, ignored)
    return archive


# -- Lightning, Fabric, Megatron-FSDP


def _with_values_beside(path: Path, ignored: Collection[str]) -> Archive | None:
    """Return a torch.distributed.checkpoint with a file of plain values, or None without it."""
    name = next((name for name in (_META, _COMMON) if (path / name).is_file()), None)
    if name is None:
        return None
    tree, world_size, left_out = tree_of(path)
    values = _torch_values(member(path, name), left_out, ignored)
    values = values if isinstance(values, dict) else {"values": values}
    kind = "Megatron-FSDP"
    if name == _META:
        kind = "Lightning" if "pytorch-lightning_version" in values else "Fabric"
    for key, value in values.items():
        tree.setdefault(key, value)
    return archive_of(path, kind, tree, world_size=world_size, left_out=left_out)


def _torch_values(path: Path, left_out: list[str], ignored: Collection[str]) -> Any:
    """Return the values of a torch.save file; if they are refused, {} with a note."""
    try:
        return read_torch_file(path, ignored=ignored)
    except CheckpointError as error:
        left_out.append(f"{path.name}: {found_in(error)}")
        return {}


# -- Accelerate and the Trainer


def _fsdp_parts(path: Path, names: Iterable[str]) -> dict[tuple[str, int], list[Path]]:
    """Return the files of each model and optimizer, by "model" or "optimizer" and its number:
    one file, one directory, or one file per rank."""
    forms: dict[tuple[str, int], dict[str, list[Path]]] = {}
    for name in names:
        match = _FSDP_PART.fullmatch(name)
        if match is None or (is_dcp(path / name) == bool(match["suffix"])):
            continue
        key = "optimizer" if match["what"] == "optimizer" else "model", int(match["index"] or 0)
        form = "per rank" if match["rank"] else name
        file = require_inside(path, path / name)
        forms.setdefault(key, {}).setdefault(form, []).append(file)
    for (what, _), several in forms.items():
        if len(several) > 1:
            raise CheckpointError.of(
                f"The directory holds the {what} in several forms.",
                expected="what one save has written",
                got=", ".join(file.name for files in several.values() for file in files)[:300],
                where=str(path),
                fix="move the files of other saves elsewhere",
            )
    return {key: next(iter(several.values())) for key, several in forms.items()}


def _plain_models(path: Path, names: Iterable[str]) -> dict[int, Path]:
    """Return the file, or the index, of each model that was saved whole."""
    found: dict[int, Path] = {}
    for name in sorted(names, key=lambda name: (name.startswith("pytorch"), name)):
        if match := _PLAIN_MODEL.fullmatch(name):
            found.setdefault(int(match["index"] or 0), require_inside(path, path / name))
    return found


def _opened(
    path: Path, files: list[Path], what: str, shapes: Shapes | None, ignored: Collection[str]
) -> Archive:
    if files[0].is_dir():
        return read_dcp(files[0])
    if len(files) > 1 or "_rank" in files[0].name:
        return read_rank_files(files, shapes, ignored=ignored)
    return archive_of(path, "torch.save", {what: read_torch_file(files[0], ignored=ignored)})


def _opened_plain(path: Path, file: Path, ignored: Collection[str]) -> Archive:
    if ".safetensors" in file.name:
        return read_safetensors(file)
    if file.suffix == ".json":
        return read_indexed_torch_files(file, ignored)
    return archive_of(path, "torch.save", {"model": read_torch_file(file, ignored=ignored)})


def read_indexed_torch_files(index: Path, ignored: Collection[str] = ()) -> Archive:
    """Return the model in the torch.save files that ``pytorch_model.bin.index.json`` lists. Raises
    CheckpointError and OSError."""
    directory = index.parent
    try:
        places = parse_json(read_text(index))["weight_map"]
        files = {text_in(name): text_in(file) for name, file in places.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise damaged(index, brief(error)) from error
    trees: dict[str, Any] = {}
    found = {}
    for name, file in files.items():
        if file not in trees:
            trees[file] = read_torch_file(member(directory, file), ignored=ignored)
        values = trees[file]
        if not isinstance(values, dict) or name not in values:
            raise damaged(directory / file, f"no tensor {name!r:.200}, which {index.name} lists")
        found[name] = values[name]
    return archive_of(index, "torch.save with an index", {"model": found})


def _combined(path: Path, kind: str, opened: dict[tuple[str, int], Archive]) -> Archive:
    """Return one archive for all models and their optimizers."""
    indices = sorted({index for _, index in opened})
    several = len({index for what, index in opened if what == "model"}) > 1
    archive = Archive(path, kind, {})
    for index in indices:
        model, optimizer = opened.get(("model", index)), opened.get(("optimizer", index))
        tree: dict[str, Any] = {}
        if model is not None:
            ties = {alias: model.tensors[name] for alias, name in model.aliases.items()}
            tree["model"] = {**model.tensors, **ties}
        if optimizer is not None:
            groups = optimizer.param_groups or []
            tree["optimizer"] = {"state": optimizer.states, "param_groups": groups}
        key = f"model_{index}" if index else "model"
        part = archive_of(path, kind, tree)
        archive.models.append(f"{key}." if several else "")
        _merge(archive, part, archive.models[-1], index)
        for what, source in (("model", model), ("optimizer", optimizer)):
            if source is not None:
                _take_facts(archive, source, f"{what}_{index}" if index else what)
    return archive


def _merge(archive: Archive, part: Archive, prefix: str, index: int) -> None:
    """Enter one model and its optimizer, under names with a prefix."""
    for name, tensor in part.tensors.items():
        archive.tensors[prefix + name] = dataclasses.replace(tensor, name=prefix + name)
    archive.aliases |= {prefix + alias: prefix + name for alias, name in part.aliases.items()}
    if part.param_groups is None:
        return
    if prefix and part.is_by_number:
        values = {"state": part.states, "param_groups": part.param_groups}
        archive.extra[f"optimizer_{index}"] = values
        archive.left_out.append(
            f"the state of optimizer {index}, as its parameters are numbered; see the extra values"
        )
        return
    if archive.param_groups is not None and archive.states.keys() & {
        prefix + name for name in part.states
    }:
        archive.left_out.append(f"the state of optimizer {index}, of the same parameters")
        return
    archive.is_by_number = part.is_by_number
    archive.states |= {prefix + name: states for name, states in part.states.items()}
    archive.param_groups = [
        *(archive.param_groups or ()),
        *(
            {**group, "params": [prefix + name for name in group["params"]]}
            for group in part.param_groups
        ),
    ]


def _take_facts(archive: Archive, source: Archive, key: str) -> None:
    if source.world_size is not None:
        archive.world_size = max(archive.world_size or 0, source.world_size)
    archive.left_out += [f"{key}: {text}" for text in source.left_out]
    archive.checksums |= source.checksums
    if source.extra:
        archive.extra[key] = source.extra


def _add_values(
    archive: Archive, path: Path, names: Iterable[str], ignored: Collection[str]
) -> None:
    """Enter the step and the plain values beside model and optimizer."""
    for name in names:
        if match := _VALUES.fullmatch(name):
            values = _torch_values(require_inside(path, path / name), archive.left_out, ignored)
            if values != {}:
                archive.extra[match["key"] + (match["index"] or "")] = values
        elif _OF_ONE_PROCESS.fullmatch(name):
            archive.left_out.append(f"{name}: state of one process")
        elif name == _TRAINER_STATE:
            archive.step = _trainer_step(require_inside(path, path / name))
            archive.left_out.append(f"{name}: the Trainer's log; its step was read")


def _trainer_step(path: Path) -> int | None:
    try:
        step = parse_json(read_text(path)).get("global_step")
        return None if step is None else size(step)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, brief(error)) from error
