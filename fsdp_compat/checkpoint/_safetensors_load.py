"""Loading a model's weights from safetensors files: a file, the files of an index, or those of a
directory. Each rank reads the bytes of its own part straight to where they belong."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._state.units import units_of
from .._state.unmanaged import load_unmanaged
from ..errors import CheckpointError, UsageError
from ._blocks import ReadRequest, changed_meanwhile, merged, read_plain
from ._header import TensorInfo, read_header
from ._named_groups import NamedGroup, named_groups
from ._progress import progress_bar
from ._ranks import all_ranks_or_raise, checkpoint_error_from, ranks_of, require_rest
from ._report import LoadReport, deliver, nothing_fits, problems_in, require_report
from ._safetensors_parts import (
    INDEX,
    HeldPart,
    Rename,
    check_arguments,
    digest,
    managed_parts,
    renamed,
    require_same_plan,
    unmanaged_tensors,
)
from ._texts import brief, joined, parse_json, read_text, text_in

_ReadPlan = list[tuple[HeldPart, Path, TensorInfo]]  # the file and the tensor in it of each part


def load_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    report: LoadReport | None = None,
    progress: bool = False,
) -> None:
    """Load weights from safetensors files into the model; each rank reads the bytes of its own
    part, straight to where they belong.

    Collective: all ranks. The model may have been built on the meta device before it was wrapped.
    Besides its shard, a rank needs one buffer of 4 MiB. One name of a tied parameter is enough.

    Args:
        path: a file, an index (``model.safetensors.index.json``), or a directory with an index or
            with files.
        model: contains sharded modules, of either front end.
        rename: from a name in the files to the name in the model before wrapping, or to None to
            skip the tensor.
        dtype: round floating-point values to this dtype on their way to the dtype of the
            parameters.
        strict: require the names and shapes of the model, all of them. False: load what has the
            same name and shape in both, and leave everything else as it is; what was left is in
            ``report`` or, without one, in a warning.
        report: filled with what was left.
        progress: show bytes and rate on the first rank; requires tqdm.

    Raises:
        UsageError: an argument is invalid.
        CheckpointError: files are missing or incomplete, or their names and shapes are not the
            model's (not strict: none of them is); on all ranks, before anything has changed. If a
            file changes or cannot be read after that, the error says that a part may have been
            loaded.
    """
    call = "checkpoint.load_safetensors"
    units, ranks = ranks_of(model, call)
    with ranks.taking_part():
        problem: BaseException | None = None
        plan: _ReadPlan = []
        others: dict[str, torch.Tensor] = {}
        groups: list[NamedGroup] = []
        left = LoadReport()
        try:
            check_arguments(call, path, rename, dtype, progress)
            require_report(call, strict, report)
            require_rest(units, call)
            groups = named_groups(units_of(model))
            plan, others = _plan_reading(Path(path), model, groups, rename, call, left)
            _require_fit(Path(path), plan, left, strict)
        except Exception as error:
            problem = checkpoint_error_from(
                error, "The weights could not be read.", path, "nothing was loaded"
            )
        sources = [(held.names[0], file.name, info.name, info.start) for held, file, info in plan]
        require_same_plan(
            all_ranks_or_raise(ranks, problem, digest(sources, dtype), call), ranks, call
        )
        deliver(left, report, strict, call, path)
        requests: dict[Path, list[ReadRequest]] = {}
        for held, file, info in plan:
            requests.setdefault(file, []).extend(_requests(held, info, dtype))
        total = sum(
            row.nbytes for its in requests.values() for each in its for row in each.one_by_one()
        )
        try:
            with (
                progress_bar(progress and ranks.number == 0, "load weights", total) as tick,
                torch.no_grad(),
            ):
                for file, of_file in requests.items():
                    read_plain(file, merged(of_file), tick)
            load_unmanaged(model, others)
        except CheckpointError as error:
            problem = changed_meanwhile(error, path)
        except Exception as error:
            problem = checkpoint_error_from(
                error,
                "The weights could not be read.",
                path,
                "some weights were already loaded: load again",
            )
        all_ranks_or_raise(ranks, problem, None, call)


def _plan_reading(
    path: Path,
    model: nn.Module,
    groups: list[NamedGroup],
    rename: Rename | None,
    call: str,
    left: LoadReport,
) -> tuple[_ReadPlan, dict[str, torch.Tensor]]:
    """Return this rank's parts, each with its file and tensor, and a state dict of the unmanaged
    tensors, which the values are read into: those whose names and shapes are in the files and in
    the model. left: is filled with the others."""
    found: dict[str, tuple[Path, TensorInfo]] = {}
    for name, source in tensors_of(path).items():
        model_name = renamed(name, rename, call)
        if model_name is not None:
            if model_name in found:
                raise UsageError.of(
                    "Two tensors of the files get the same name in the model.",
                    expected="a different name for each",
                    got=f"{model_name!r} for {name!r} and for another tensor",
                    where=call,
                    fix="make rename return different names, or None for one of them",
                )
            found[model_name] = source
    others: dict[str, torch.Tensor] = {}
    plan: _ReadPlan = []
    known: set[str] = set()
    unmanaged = unmanaged_tensors(model, groups, False)
    for is_managed, held in (
        *((True, held) for held in managed_parts(groups)),
        *((False, held) for held in unmanaged),
    ):
        known.update(held.names)
        present = [name for name in held.names if name in found]
        if not present:
            left.missing.append(held.names[0])
            continue
        name = present[0]
        file, info = found[name]
        if info.shape != held.shape:
            left.mismatched[name] = (
                f"shape {list(info.shape)} in {file.name}, {list(held.shape)} in the model"
            )
        elif (info.dtype.is_floating_point, info.dtype.is_complex) != (
            held.dtype.is_floating_point,
            held.dtype.is_complex,
        ):
            left.mismatched[name] = f"{info.dtype} in {file.name}, {held.dtype} in the model"
        else:
            if not is_managed:
                # The state dict may hold a copy in another dtype than the module computes with.
                held = dataclasses.replace(held, values=torch.empty_like(held.values))
                others.update((name, held.values.view(held.shape)) for name in held.names)
            plan.append((held, file, info))
    left.unexpected += [name for name in found if name not in known]
    return plan, others


def _require_fit(path: Path, plan: _ReadPlan, left: LoadReport, strict: bool) -> None:
    """Raise CheckpointError unless the files hold exactly the model's names and shapes; not strict:
    unless they hold some of them."""
    if strict and (wrong := problems_in(left)):
        raise CheckpointError.of(
            "The weights do not fit the model.",
            expected="the names and shapes of its parameters and persistent buffers",
            got=joined(wrong, 20, "; "),
            where=str(path),
            fix="pass rename, a function from a name in the files to the name in the model, or "
            "to None to skip it; or pass strict=False to load what fits",
        )
    if problems_in(left) and not plan:
        raise nothing_fits(path, left)


def tensors_of(path: Path) -> dict[str, tuple[Path, TensorInfo]]:
    """Return the tensors of a file, of the files of an index, or of a directory, by name."""
    index = path / INDEX if path.is_dir() else path
    files: list[Path]
    file_names: Mapping[str, str] | None = None  # by tensor, of an index
    if path.is_dir() and not index.exists():
        files = sorted(path.glob("*.safetensors"))
    elif index.suffix == ".json":
        try:
            file_names = {
                text_in(name): _file_name(file)
                for name, file in parse_json(read_text(index))["weight_map"].items()
            }
            files = [index.parent / name for name in dict.fromkeys(file_names.values())]
        except FileNotFoundError:
            files = []
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError.of(
                "The index cannot be read.",
                expected="JSON with a 'weight_map' from tensor names to names of files beside "
                "the index",
                got=brief(error),
                where=str(index),
                fix="copy it again, or remove it and pass the directory to read all its files",
            ) from error
    else:
        files = [path]
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise CheckpointError.of(
            "No weights found.",
            expected="a safetensors file, an index, or a directory with either",
            got=f"no file {missing[0].name}" if missing else "none",
            where=str(path),
            fix="check the path; the files of an index must be in the same directory",
        )
    found: dict[str, tuple[Path, TensorInfo]] = {}
    for file in files:
        for name, info in read_header(file)[0].items():
            if file_names is not None and file_names.get(name) != file.name:
                continue
            if name in found:
                raise CheckpointError.of(
                    "Two files hold a tensor of the same name.",
                    expected="each tensor in one file of the directory",
                    got=f"{name!r} in {found[name][0].name} and in {file.name}",
                    where=str(path),
                    fix="pass one file, or remove the files that belong to other weights",
                )
            found[name] = file, info
    if file_names is not None:
        missing_names = [name for name in file_names if name not in found]
        if missing_names:
            first = missing_names[0]
            raise CheckpointError.of(
                "The index does not match the files.",
                expected=f"{first!r} in {file_names[first]}",
                got=f"{len(missing_names)} of {len(file_names)} tensors are not in the file "
                "that the index names",
                where=str(index),
                fix="copy the index and the files from the same source",
            )
    return found


def _file_name(name: Any) -> str:
    """Return ``name``, the name of a file beside an index. Raises TypeError or ValueError for
    anything else, such as a path that leads elsewhere."""
    if Path(text_in(name)).name != name:
        raise ValueError(f"{name!r} is not the name of a file")
    return str(name)


def _requests(held: HeldPart, info: TensorInfo, dtype: torch.dtype | None) -> Iterator[ReadRequest]:
    for rows in held.rows():
        yield ReadRequest.of_rows(info.start, rows, held.values, info.dtype, dtype)
