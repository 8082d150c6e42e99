"""From the nested values of a checkpoint file to its model, its optimizer and everything else.

The model is, in this order: the value under a usual key ("model", "state_dict", ...), the tensors
at the top, or the mappings of tensors at the top. Optimizers are recognised by their form."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..._archive.archive import Archive, StoredTensor
from ..._state.units import clean_name as plain_name
from .optimizer_tree import OptimizerState, is_optimizer, named, optimizer_in
from .pickles import refused

_MODEL_KEY = re.compile(
    r"(model|module|net|network|weights|params|state_dict|model_states?|model_state_dict|"
    r"model_weights|app|pytorch_model_fsdp)_?\d*"
)
_LETTERS = re.compile(r"\D+")  # around the number of one of several models or optimizers
_STEP_KEYS = ("step", "global_step", "iteration", "iter_num")
_DDP = "module."
_MAX_LEVELS = 3  # below which no section is looked for
_MAX_CONTAINERS = 500_000

Tree = dict[Any, Any]


def divided(archive: Archive) -> Archive:
    """Divide ``as_saved`` into the sections of the archive, which is returned. Names lose what
    FSDP, activation checkpointing and compilation add. Tensors with the same pieces are tied.
    Several models keep their keys as prefixes, as does the optimizer of that number. Unnamed
    optimizer state stays numbered. The rest is ``extra``. Raises CheckpointError for too many
    containers."""
    tree = _unshared(archive.as_saved, archive.path)
    if not isinstance(tree, dict):
        archive.extra = {"value": tree}
    else:
        steps = (tree.get(key) for key in _STEP_KEYS)
        archive.step = next((step for step in steps if type(step) is int and step >= 0), None)
        optimizers = _take_optimizers(tree)
        _set_model(archive, _take_models(tree))
        rest = {str(key): value for key, value in tree.items()}
        is_extra = "_extra_state"  # may be empty
        archive.extra = {k: v for k, v in rest.items() if v != {} or k.endswith(is_extra)}
        _set_optimizers(archive, optimizers)
    archive.extra = named(archive.extra, "")
    return archive


# -- sections


def _take_optimizers(tree: Tree) -> dict[str, Tree]:
    """Remove the optimizers of the highest level that has any, and return them by their path."""
    if is_optimizer(tree, is_known=False):
        optimizer = dict(tree)
        tree.clear()
        return {"optimizer": optimizer}
    for level in _levels(tree):
        found: dict[str, Tree] = {}
        for path, node, key, value in level:
            parts = {path: value}
            if isinstance(value, (list, tuple)):
                parts = {f"{path}.{number}": part for number, part in enumerate(value)}
            is_known = "optim" in str(key).lower()
            if parts and all(is_optimizer(part, is_known) for part in parts.values()):
                found |= parts
                del node[key]
        if found:
            return found
    return {}


def _take_models(tree: Tree) -> dict[str, dict[str, StoredTensor]]:
    """Remove the models, and return the flat entries of each by its key; "" for the top."""
    for level in _levels(tree):
        found = {
            path: _flat_tensors(node, key)
            for path, node, key, value in level
            if _MODEL_KEY.fullmatch(str(key)) and _holds_model(value)
        }
        if found:
            return found
        weights = (key for _, node, key, value in level if node is tree and _has_shape(value))
        if any("." in str(key) for key in weights):
            break
    loose = [key for key, value in tree.items() if isinstance(value, StoredTensor)]
    if loose:
        return {"": {str(key): tree.pop(key) for key in loose}}
    dicts = {key: [*value.values()] for key, value in tree.items() if isinstance(value, dict)}
    return {
        str(key): _flat_tensors(tree, key)
        for key, items in dicts.items()
        if any(map(_has_shape, items)) and all(isinstance(item, StoredTensor) for item in items)
    }


def _levels(tree: Tree) -> Iterator[list[tuple[str, Tree, Any, Any]]]:
    """Yield the entries of each level, the top first: path ("app.model"), mapping, key, value."""
    level = [(str(key), tree, key, value) for key, value in tree.items()]
    for _ in range(_MAX_LEVELS):
        yield level
        level = [
            (f"{path}.{key}", value, key, item)
            for path, _, _, value in level
            if isinstance(value, dict)
            for key, item in value.items()
        ]


def _has_shape(value: Any) -> bool:
    return isinstance(value, StoredTensor) and bool(value.shape)


def _holds_model(value: Any) -> bool:
    """Return whether the value under a model's key is a model, not a container of sections."""
    if not isinstance(value, dict) or is_optimizer(value, is_known=False):
        return False
    if any(isinstance(item, StoredTensor) for item in value.values()):
        return True
    is_of_sections = any(
        _any_tensor(item)
        for key, item in value.items()
        if _MODEL_KEY.fullmatch(str(key)) or "optim" in str(key)
    )
    return not is_of_sections and _any_tensor(value)


def _any_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_any_tensor(item) for item in value.values())
    return isinstance(value, StoredTensor)


def _flat_tensors(node: Tree, key: Any) -> dict[str, StoredTensor]:
    """Remove the tensors from ``node[key]``, not other values, and return them by dotted name."""
    found: dict[str, StoredTensor] = {}

    def take(inside: Tree, prefix: str) -> None:
        for name, value in list(inside.items()):
            if isinstance(value, StoredTensor):
                if f"{prefix}{name}" not in found:  # "a.b" and {"a": {"b": ...}}
                    found[f"{prefix}{name}"] = inside.pop(name)
            elif not str(name).endswith("_extra_state") and _any_tensor(value):
                take(value, f"{prefix}{name}.")
                if not value:
                    del inside[name]

    take(node[key], "")
    if not node[key]:
        del node[key]
    return found


# -- names


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return the plain name of each name. Names that would become equal stay as they are."""
    plain = {name: plain_name(name) for name in names}
    seen = Counter(plain.values())
    return {name: short if seen[short] == 1 else name for name, short in plain.items()}


def without_ddp(archive: Archive) -> None:
    """Remove "module." as often as all names of a model begin with it: DistributedDataParallel adds
    it, Megatron-FSDP twice. The optimizer's names follow."""
    for prefix in archive.models:
        optimizer = OptimizerState(archive.states, archive.param_groups or [])
        names = [*archive.tensors, *archive.aliases] or optimizer.parameters
        names = [name for name in names if name.startswith(prefix)]
        old = prefix
        while names and all(name.startswith(old + _DDP) for name in names):
            old += _DDP
        new_names = {
            name: prefix + name.removeprefix(old) if name.startswith(old) else name
            for name in (*archive.tensors, *archive.aliases, *optimizer.parameters)
        }
        archive.tensors = {
            new_names[name]: dataclasses.replace(tensor, name=new_names[name])
            for name, tensor in archive.tensors.items()
        }
        archive.aliases = {new_names[n]: new_names[first] for n, first in archive.aliases.items()}
        renamed = optimizer.renamed(new_names.__getitem__)
        if len(renamed.parameters) == len(optimizer.parameters):
            archive.states = renamed.states
            archive.param_groups = archive.param_groups and renamed.param_groups


# -- filling the archive


def _set_model(archive: Archive, models: dict[str, dict[str, StoredTensor]]) -> None:
    """Enter the model's tensors and aliases."""
    archive.models = [f"{key}." for key in models] if len(models) > 1 else [""]
    by_place: dict[Any, str] = {}
    for prefix, tensors in zip(archive.models, models.values(), strict=False):
        for old, plain in _plain_names(tensors).items():
            name, tensor = prefix + plain, tensors[old]
            place = tensor.dtype, tensor.shape, tensor.pieces
            first = by_place.setdefault(place, name) if tensor.numel else name
            if first != name:
                archive.aliases[name] = first
            else:
                archive.tensors[name] = dataclasses.replace(tensor, name=name)


def _set_optimizers(archive: Archive, trees: dict[str, Tree]) -> None:
    """Enter the state of all optimizers under names, or of a single one under numbers."""
    found = {path: _with_prefix(archive, path, optimizer_in(tree)) for path, tree in trees.items()}
    names = [name for one in found.values() for name in one.parameters]
    is_by_number = any(one.is_by_number for one in found.values())
    if len(found) > 1 and (is_by_number or len({*names}) < len(names)):
        archive.left_out.append(
            f"the state of {len(trees)} optimizers, whose parameters are numbered, or the same: it "
            "is among the extra values"
        )
        archive.extra |= trees
        return
    archive.is_by_number = is_by_number
    for path, one in found.items():
        archive.states |= one.states
        archive.param_groups = [*(archive.param_groups or ()), *one.param_groups]
        if one.rest:
            archive.extra[path] = one.rest


def _with_prefix(archive: Archive, path: str, given: OptimizerState) -> OptimizerState:
    """Return the state of an optimizer under the names of its model, or else under plain names."""
    if given.is_by_number:
        return given.renamed(str)
    names = _plain_names(given.parameters)
    known = {name: name for name in archive.tensors} | archive.aliases
    by_model: dict[str, dict[str, str]] = {}  # the first name of each parameter's tensor, or ""
    for prefix in archive.models:  # which alone may have been in DistributedDataParallel, or not
        inner = {_inner(name, prefix): first for name, first in known.items()} | known
        by_model[prefix] = {
            old: inner.get(prefix + name) or inner.get(_inner(prefix + name, prefix), "")
            for old, name in names.items()
        }
    fitting = [prefix for prefix, found in by_model.items() if all(found.values())]
    fitting = [p for p in fitting if _LETTERS.sub("", p) == _LETTERS.sub("", path)] or fitting
    prefix = fitting[0] if len(fitting) == 1 else ""
    found = by_model.get(prefix) or {}
    return given.renamed(lambda name: found.get(name) or prefix + names[name])


def _inner(name: str, prefix: str) -> str:
    return re.sub(rf"^{re.escape(prefix)}({re.escape(_DDP)})+", prefix, name)


# -- bounds


def _unshared(tree: Any, path: Path) -> Any:
    """Return a copy of nested dicts, lists and tuples in which none is shared."""
    num = 0

    def copied(value: Any) -> Any:
        nonlocal num
        if not isinstance(value, (dict, list, tuple)):
            return value
        num += 1
        if num > _MAX_CONTAINERS:
            raise refused(path, f"more than {_MAX_CONTAINERS} containers, by references")
        if not isinstance(value, dict):
            return type(value)(map(copied, value))
        if len({str(key) for key in value}) < len(value):
            raise refused(path, "keys that are equal as strings, such as 0 and '0'")
        return {key: copied(item) for key, item in value.items()}

    return copied(tree)
