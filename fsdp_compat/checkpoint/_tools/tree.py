"""From the nested values of a checkpoint file to its model, its optimizer and everything else.

Files agree on little more than that a state dict is a mapping. So the model is, in this order: what
stands under a key that people use for it ("model", "state_dict", ...), the tensors at the top, or
the mappings of tensors at the top. Optimizers are recognised by their form."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from .._blocks import FileFacts
from .archive import Archive, StoredTensor
from .optimizer_tree import OptimizerTree, is_optimizer, merged_optimizer
from .walk import map_leaves

_MODEL_KEY = re.compile(
    r"(model|module|net|network|weights|params|state_dict|model_states?|model_state_dict|"
    r"model_weights|app|pytorch_model_fsdp)_?\d*"
)
_STEP_KEYS = ("step", "global_step", "iteration", "iter_num")
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
_DDP = "module."
_MAX_LEVELS = 3  # below which no section is looked for
_MAX_DEPTH = 64
_MAX_CONTAINERS = 500_000
_MAX_VALUES = 50_000_000


def archive_of(
    path: Path,
    kind: str,
    tree: Any,
    *,
    world_size: int | None = None,
    step: int | None = None,
    checksums: dict[Path, FileFacts] | None = None,
    left_out: list[str] = [],  # noqa: B006 (never changed)
) -> Archive:
    """Return the archive of nested containers whose leaves are StoredTensors and plain values.

    Names lose the parts that FSDP, activation checkpointing and torch.compile add. Tensors of the
    model with the same pieces are tied. Several models keep the keys under which they stand as
    prefixes. Optimizer state is by name if the tree has names or if the groups have
    ``param_names``; otherwise it stays numbered ("0", "1", ...). What is neither model nor
    optimizer is in ``extra``, under the keys of the tree. step: taken from the tree if it is None
    and stands at the top. Raises CheckpointError for containers that contain themselves, or too
    many.
    """
    tree = bounded(tree, path)
    archive = Archive(
        path,
        kind,
        {},
        world_size=world_size,
        checksums=dict(checksums or {}),
        left_out=list(left_out),
    )
    if not isinstance(tree, dict):
        archive.extra = {"value": tree}
    else:
        archive.step = _step(tree) if step is None else step
        optimizers = _take_optimizers(tree)
        _set_model(archive, _take_models(tree))
        archive.extra = _without_empty(tree)
        _set_optimizer(archive, optimizers)
    archive.step = step if archive.step is None else archive.step
    archive.extra = _named(archive.extra, "")
    return archive


# -- sections


def _take_optimizers(tree: dict[Any, Any]) -> dict[str, OptimizerTree]:
    """Remove the optimizers of the highest level that has any, and return them by their path."""
    if is_optimizer(tree, is_known=False):
        optimizer = dict(tree)
        tree.clear()
        return {"optimizer": OptimizerTree(optimizer)}
    for level in _levels(tree):
        found = {}
        for prefix, node in level:
            for key, value in list(node.items()):
                is_known = "optim" in str(key).lower()
                if is_optimizer(value, is_known):
                    found[f"{prefix}{key}"] = OptimizerTree(node.pop(key))
                elif (
                    isinstance(value, (list, tuple))
                    and value
                    and all(is_optimizer(item, is_known) for item in value)
                ):
                    several = node.pop(key)
                    for number, item in enumerate(several):
                        found[f"{prefix}{key}.{number}"] = OptimizerTree(item)
        if found:
            return found
    return {}


def _take_models(tree: dict[Any, Any]) -> dict[str, dict[str, Any]]:
    """Remove the models, and return the flat entries of each by its key; "" for the top."""
    for depth, level in enumerate(_levels(tree)):
        found: dict[str, dict[str, Any]] = {}
        for prefix, node in level:
            for key, value in list(node.items()):
                if is_model_key(key) and _holds_model(value):
                    found[f"{prefix}{key}"] = _flat_tensors(node, key)
        if found:
            return found
        if depth == 0 and any(
            isinstance(value, StoredTensor) and value.shape and "." in str(key)
            for key, value in tree.items()
        ):
            break
    loose = {str(key): value for key, value in tree.items() if isinstance(value, StoredTensor)}
    if loose:
        for key in [key for key in tree if isinstance(tree[key], StoredTensor)]:
            del tree[key]
        return {"": loose}
    keys = [key for key, value in tree.items() if _looks_like_model(value)]
    return {str(key): _flat_tensors(tree, key) for key in keys}


def is_model_key(key: object) -> bool:
    """Return whether people save models under a key."""
    return _MODEL_KEY.fullmatch(str(key)) is not None


def _levels(tree: dict[Any, Any]) -> Iterator[list[tuple[str, dict[Any, Any]]]]:
    """Yield the mappings of each level, the top first, with their paths ("app.")."""
    level = [("", tree)]
    for _ in range(_MAX_LEVELS):
        yield level
        level = [
            (f"{prefix}{key}.", value)
            for prefix, node in level
            for key, value in node.items()
            if isinstance(value, dict)
        ]


def _holds_model(value: Any) -> bool:
    """Return whether what stands under a model's key is one, not a container of sections."""
    if not isinstance(value, dict) or is_optimizer(value, is_known=False):
        return False
    inside = (item for key, item in value.items() if is_model_key(key) or "optim" in str(key))
    tensors = any(isinstance(item, StoredTensor) for item in value.values())
    if not tensors and any(isinstance(item, dict) and _any_tensor(item) for item in inside):
        return False
    return tensors or _any_tensor(value)


def _looks_like_model(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(item, StoredTensor) for item in value.values())
        and any(item.shape for item in value.values())
    )


def _any_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_any_tensor(item) for item in value.values())
    return isinstance(value, StoredTensor)


def _flat_tensors(node: dict[Any, Any], key: Any) -> dict[str, StoredTensor]:
    """Remove the tensors from the mapping ``node[key]``, and return them by dotted names. Other
    values, such as extra state of modules, stay."""
    found: dict[str, StoredTensor] = {}

    def take(inside: dict[Any, Any], prefix: str) -> None:
        for name, value in list(inside.items()):
            if isinstance(value, StoredTensor):
                if f"{prefix}{name}" not in found:  # "a.b" and {"a": {"b": ...}}
                    found[f"{prefix}{name}"] = inside.pop(name)
            elif isinstance(value, dict) and _any_tensor(value):
                take(value, f"{prefix}{name}.")
                if not value:
                    del inside[name]

    take(node[key], "")
    if not node[key]:
        del node[key]
    return found


# -- names


def plain_name(name: str) -> str:
    """Return the name that a parameter has without FSDP, activation checkpointing and
    torch.compile."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return the plain name of each name. Names that would become equal stay as they are."""
    plain = {name: plain_name(name) for name in names}
    seen = Counter(plain.values())
    return {name: short if seen[short] == 1 else name for name, short in plain.items()}


def without_ddp(archive: Archive) -> None:
    """Remove "module." from the front of the names of each model whose names all begin with it, as
    often as they all do: DistributedDataParallel adds it, and Megatron-FSDP does so twice. Names
    do not say whether the model has an attribute ``module`` instead. The optimizer's names follow
    those of the model."""
    for prefix in archive.models:
        names = [*archive.tensors, *archive.aliases] or _optimizer_names(archive)
        names = [name for name in names if name.startswith(prefix)]
        first = prefix
        while names and all(name.startswith(first + _DDP) for name in names):
            first += _DDP
        if first != prefix:
            _replace_prefix(archive, first, prefix)


def _optimizer_names(archive: Archive) -> list[str]:
    groups = archive.param_groups or ()
    return [*archive.states, *(name for group in groups for name in group["params"])]


def _replace_prefix(archive: Archive, old: str, new: str) -> None:
    def renamed(name: str) -> str:
        return new + name.removeprefix(old) if name.startswith(old) else name

    archive.tensors = {
        renamed(name): dataclasses.replace(tensor, name=renamed(name))
        for name, tensor in archive.tensors.items()
    }
    archive.aliases = {renamed(name): renamed(first) for name, first in archive.aliases.items()}
    names = set(_optimizer_names(archive))
    if archive.is_by_number or any(renamed(name) in names - {name} for name in names):
        return
    archive.states = {
        renamed(name): {key: _named(value, f"{renamed(name)}/{key}") for key, value in own.items()}
        for name, own in archive.states.items()
    }
    for group in archive.param_groups or ():
        group["params"] = [renamed(name) for name in group["params"]]


# -- filling the archive


def _set_model(archive: Archive, models: dict[str, dict[str, Any]]) -> None:
    """Enter the model's tensors and aliases."""
    entries: dict[str, StoredTensor] = {}
    archive.models = [f"{key}." for key in models] if len(models) > 1 else [""]
    for prefix, tensors in zip(archive.models, models.values(), strict=False):
        plain = _plain_names(tensors)
        entries |= {f"{prefix}{plain[name]}": tensor for name, tensor in tensors.items()}
    by_place: dict[Any, str] = {}
    for name, tensor in entries.items():
        place = _place(tensor)
        first = by_place.setdefault(place, name) if place is not None else name
        if first != name:
            archive.aliases[name] = first
        else:
            archive.tensors[name] = dataclasses.replace(tensor, name=name)


def _place(tensor: StoredTensor) -> Any:
    """Return where the values of a tensor are, or None if it has none."""
    if not tensor.numel:
        return None
    pieces = tuple(
        (
            piece.box,
            (source.data_ptr(), source.stride())
            if isinstance(source := piece.source, torch.Tensor)
            else source,
        )
        for piece in tensor.pieces
    )
    return tensor.dtype, tensor.shape, pieces


def _set_optimizer(archive: Archive, optimizers: dict[str, OptimizerTree]) -> None:
    if not optimizers:
        return
    one = merged_optimizer(optimizers)
    if one is None:
        archive.left_out.append(
            f"the state of {len(optimizers)} optimizers, as their parameters are numbered; see "
            "the extra values"
        )
        for key, optimizer in optimizers.items():
            archive.extra[key] = optimizer.tree
        return
    names = [*one.states, *(name for group in one.param_groups for name in group["params"])]
    plain = {name: name for name in names} if one.is_by_number else _plain_names(names)
    archive.is_by_number = one.is_by_number
    archive.states = {
        plain[name]: {
            key if type(key) is int else str(key): _named(value, f"{plain[name]}/{key}")
            for key, value in states.items()
        }
        for name, states in one.states.items()
    }
    archive.param_groups = [
        {
            **{str(key): _named(value, f"param_groups/{key}") for key, value in group.items()},
            "params": [plain[name] for name in group["params"]],
        }
        for group in one.param_groups
    ]
    if one.rest:
        archive.extra[next(iter(optimizers))] = one.rest


def _step(tree: dict[Any, Any]) -> int | None:
    values = (tree.get(key) for key in _STEP_KEYS)
    return next((value for value in values if type(value) is int and value >= 0), None)


def _without_empty(tree: dict[Any, Any]) -> dict[str, Any]:
    return {
        str(key): value
        for key, value in tree.items()
        if not (isinstance(value, dict) and not value)
    }


def _named(value: Any, path: str) -> Any:
    """Return nested containers with the tensors in them named by their paths."""
    return map_leaves(
        value,
        lambda leaf, path: (
            dataclasses.replace(leaf, name=path) if isinstance(leaf, StoredTensor) else leaf
        ),
        path,
    )


# -- bounds


def bounded(tree: Any, path: Path) -> Any:
    """Return a copy of nested mappings, lists and tuples, in which no mapping is shared, as dicts,
    lists and tuples. Raises CheckpointError if they are nested too deeply (or in themselves), or
    are too many, as references in a small file can make them."""
    num_containers = num_values = 0

    def copied(value: Any, depth: int) -> Any:
        nonlocal num_containers, num_values
        if not isinstance(value, (Mapping, list, tuple)):
            return value
        num_containers += 1
        num_values += len(value)
        if depth > _MAX_DEPTH:
            raise _nested_too_much(path, f"more than {_MAX_DEPTH} levels")
        if num_containers > _MAX_CONTAINERS or num_values > _MAX_VALUES:
            raise _nested_too_much(path, "millions of containers or values")
        if isinstance(value, Mapping):
            if any(type(key) is not str and str(key) in value for key in value):
                raise _nested_too_much(path, "keys that are equal as texts, such as 0 and '0'")
            return {key: copied(item, depth + 1) for key, item in value.items()}
        if not any(isinstance(item, (Mapping, list, tuple)) for item in value):
            return list(value) if type(value) is list and len(value) < 1000 else value
        items = [copied(item, depth + 1) for item in value]
        return items if isinstance(value, list) else tuple(items)

    return copied(tree, 0)


def _nested_too_much(path: Path, got: str) -> CheckpointError:
    return CheckpointError.of(
        f"The values of {path.name} are nested in a way that cannot be followed.",
        expected=f"keys that differ, at most {_MAX_DEPTH} levels, and at most {_MAX_CONTAINERS} "
        "containers",
        got=got,
        where=str(path),
        fix="restore the file from an intact copy; nothing was loaded",
    )
