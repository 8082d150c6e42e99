"""Flat parameters in per-rank files: those of FSDP1's local state dicts.

A flat parameter holds the parameters of one wrapper, of which each rank has a part. The files do
not describe them, so shapes come from elsewhere and must add up to its size. With
use_orig_params=True it has gaps, and entries that view its memory tell where the parameters lie.
Otherwise they follow one another in the order of the modules."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..._archive.archive import Archive, Span, StoredTensor
from ..._archive.reader import Files
from ..._archive.texts import brief
from ..._layout.box import Box
from ..._layout.spec import FlatLayout, ParamSpec, flat_layout
from ..._state.units import clean_name as plain_name
from ..._text import joined
from ...errors import CheckpointError, UsageError
from .rank_merge import sample
from .sharded_records import RankPart, in_shape

_FLAT = re.compile(r"_?flat_param(_\d+)?")  # with a number: a unit with several of them
_FLAT_TEXT = "shapes of flat parameters: local state dicts of FSDP1 do not hold them; pass --shapes"
_MAX_LEVELS = 4

_Node = dict[Any, Any]


# -- shapes


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The parameters of a model, by their names in the unwrapped model. May include buffers."""

    entries: dict[str, tuple[int, ...]]  # in the order of the modules, if is_ordered
    ties: dict[str, str] = dataclasses.field(default_factory=dict)
    # ^ second names of tied parameters: the first name of each
    is_ordered: bool = True
    # The checkpoint they come from, which may hold a tied parameter under each name.
    source: Archive | None = dataclasses.field(default=None, compare=False, repr=False)


def shapes_from_callable(place: str) -> Shapes:
    """Return the shapes of the model that a class or function without arguments returns, called on
    the meta device. place: "my.module:make_model", importable from the current directory. Raises
    UsageError."""
    module_name, colon, name = place.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        if not colon:
            raise ValueError("a path that does not exist, or no colon before the function")
        model: Any = importlib.import_module(module_name)
        for part in name.split("."):
            model = getattr(model, part)
        if not isinstance(model, nn.Module):
            with torch.device("meta"):
                model = model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"a {type(model).__name__}")
    except Exception as error:  # of the user's code, too
        raise UsageError.of(
            "The shapes of the model cannot be found.",
            expected='a checkpoint of whole tensors, or "my.module:make_model", a function without '
            "arguments that returns a module",
            got=brief(error),
            where=repr(place),
            fix="pass a function that can be imported from the current directory",
        ) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    entries: dict[str, tuple[int, ...]] = {}
    ties: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(param), name)
        if first != name:
            ties[name] = first
        else:
            entries[name] = tuple(param.shape)
    return Shapes(entries, ties)


# -- flat parameters


class FlatParams:
    """The flat parameters in the values of all ranks. Without shapes they stay flat, which is noted
    in ``left_out``. Raises CheckpointError and OSError."""

    def __init__(self, shapes: Shapes | None, where: Path, files: Files) -> None:
        self._shapes, self._where, self._files = shapes or Shapes({}), where, files
        self._stays_flat = shapes is None
        self.left_out: list[str] = []
        self._ties = dict(self._shapes.ties)
        self._found: dict[tuple[tuple[str, ...], Any], _Flat] = {}  # by path of the node, and key

    def take_views(self, tree: Any) -> None:
        """Note the flat parameters of one rank, and remove the entries that view their memory: with
        use_orig_params=True each parameter has one, and a tied one several."""
        for path, node in _dicts(tree):
            for key in [key for key, value in node.items() if _is_flat(key, value)]:
                flat = self._found.setdefault((path, key), _Flat(node[key].inside))
                for name, value in [*node.items()]:
                    place = _place_in(node[key], value)
                    if place is not None:
                        flat.views.setdefault(plain_name(str(name)), {})[place] = value.numel
                        del node[name]

    def unflatten(self, tree: Any) -> None:
        """Replace flat parameters by their parameters, in the merged values."""
        nodes = dict(_dicts(tree))
        for (path, key), flat in self._found.items():
            if self._stays_flat and flat.inside is None:
                self.left_out = [_FLAT_TEXT]
                if not flat.views:
                    continue
            others = [_prefix(other) for at, other in self._found if at == path and other != key]
            self._unflatten(nodes[path], key, flat, others)

    def _unflatten(self, node: _Node, key: Any, flat: _Flat, others: list[str]) -> None:
        values: StoredTensor = node.pop(key)
        layout: Sequence[ParamSpec]
        prefix = _prefix(key)
        if flat.inside is not None:
            layout = [
                dataclasses.replace(param, name=prefix + plain_name(param.name))
                for param in flat.inside.params
            ]
        elif flat.views:
            layout = self._viewed(key, flat)
        else:
            layout = self._in_order(key, self._names(node, prefix, others), values.numel)
        params = {param.name: param for param in layout}
        params |= {name: params[first] for name, first in self._ties.items() if first in params}
        for name, places in flat.views.items():
            params[name] = next(p for p in layout if p.start <= min(places) < p.in_full.stop)
        for name in [name for name in node if plain_name(str(name)) in params]:
            del node[name]
        for name, param in params.items():
            node[name] = _cut(values, param)

    def _viewed(self, key: Any, flat: _Flat) -> list[ParamSpec]:
        """Return the parameters whose views tell where they lie."""
        found: dict[int, ParamSpec] = {}
        for name in sorted(flat.views, key=lambda name: name in self._ties):
            start, numel = min(flat.views[name]), sum(flat.views[name].values())
            sizes = self._shapes.entries.get(self._ties.get(name, name))
            sizes = (numel,) if self._stays_flat else sizes
            if sizes is not None and math.prod(sizes) == numel:
                found.setdefault(start, ParamSpec(name, sizes, start))
        if found.keys() != {min(places) for places in flat.views.values()}:
            numels = {name: sum(places.values()) for name, places in flat.views.items()}
            raise self._unclear(key, f"parameters of other sizes: {_listed(numels)}")
        return [*found.values()]

    def _names(self, node: _Node, prefix: str, others: list[str]) -> list[str]:
        """Return the names of the parameters in a flat one, without those of inner wrappers."""
        inner = tuple(other for other in others if other != prefix and other.startswith(prefix))
        whole = {
            plain_name(str(name)): value.shape
            for name, value in node.items()
            if isinstance(value, StoredTensor)
        }
        return [
            name
            for name, shape in self._shapes.entries.items()
            if whole.get(name) != shape and name.startswith(prefix) and not name.startswith(inner)
        ]

    def _in_order(self, key: Any, names: list[str], numel: int) -> Sequence[ParamSpec]:
        """Return the parameters one after the other, if they fill a flat one."""
        numels = {name: math.prod(self._shapes.entries[name]) for name in names}
        rest = sum(numels.values()) - numel
        if rest > 0:
            self._ties |= (ties := self._ties_by_value(names, rest))
            names = [name for name in names if name not in ties]
            rest -= sum(numels[name] for name in ties)
        if rest:
            got = f"{numel} elements for {sum(numels.values())}: {_listed(numels)}"
            raise self._unclear(key, got)
        if not self._shapes.is_ordered and len(names) > 1:
            raise self._unclear(key, "sorted names: the order of the parameters is lost")
        shapes = [self._shapes.entries[name] for name in names]
        return flat_layout(names, shapes, ranks=1, align=1).params

    def _ties_by_value(self, names: list[str], most: int) -> dict[str, str]:
        """Return matrices of at most ``most`` elements that equal an earlier one, with its name:
        torch's full state dicts do not record ties, and vectors are often equal by chance."""
        stored = {} if self._shapes.source is None else self._shapes.source.tensors
        firsts: dict[Any, str] = {}
        ties = {}
        for name in filter(stored.__contains__, names):
            tensor = stored[name]
            if len(tensor.shape) > 1 and 0 < tensor.numel <= most:
                content = (tensor.dtype, tensor.shape, sample(tensor, self._files))
                if (first := firsts.setdefault(content, name)) != name:
                    ties[name] = first
        return ties

    def _unclear(self, key: Any, got: str) -> CheckpointError:
        return CheckpointError.of(
            f"{key} cannot be split into its parameters.",
            expected="shapes of the model, whose sizes add up to it: local state dicts of FSDP1 "
            "do not hold them",
            got=got if self._shapes.entries else "no shapes",
            where=str(self._where),
            fix="pass shapes (--shapes): my.module:make_model, a function that returns the model, "
            "or a full checkpoint of torch.save of the same model",
        )


@dataclasses.dataclass
class _Flat:
    """A flat parameter."""

    inside: FlatLayout | None  # if its file says where its parameters lie
    # By name: the first elements of the entries that view its memory, and their numels.
    views: dict[str, dict[int, int]] = dataclasses.field(default_factory=dict)


def _dicts(tree: Any, depth: int = 0) -> Iterator[tuple[tuple[str, ...], _Node]]:
    """Yield the mappings of the upper levels, with their paths."""
    if isinstance(tree, dict) and depth < _MAX_LEVELS:
        yield (), tree
        for key, value in tree.items():
            for path, node in _dicts(value, depth + 1):
                yield (str(key), *path), node


def _is_flat(key: object, value: Any) -> bool:
    is_name = _FLAT.fullmatch(str(key).rpartition(".")[2]) is not None
    return is_name and isinstance(value, RankPart) and len(value.shape) == 1


def _place_in(flat: RankPart, view: Any) -> int | None:
    """Return the element of a flat parameter that a tensor begins with in memory, or None."""
    if not isinstance(view, StoredTensor) or not view.numel:
        return None
    source = view.pieces[0].source
    for part in flat.pieces:
        if isinstance(part.source, Span) and isinstance(source, Span):
            at = (source.start - part.source.start) // flat.dtype.itemsize
            if source.path == part.source.path and 0 <= at < part.box.numel:
                return part.box.offsets[0] + at
    return None


def _listed(numels: dict[str, int]) -> str:
    return joined([f"{name} {numel}" for name, numel in numels.items()], 20, ", ")


def _prefix(key: Any) -> str:
    """Return what the names of a wrapper's parameters begin with: "blocks.1.", or ""."""
    return "".join(plain_name(str(key)).rpartition(".")[:2])


def _cut(flat: StoredTensor, param: ParamSpec) -> StoredTensor:
    """Return a parameter of a flat one."""
    box, found = Box((param.start,), (param.numel,)), []
    for held in (flat.pieces, flat.copies):
        runs = dataclasses.replace(flat, pieces=held).pieces_in(box)
        firsts = ((run, run.box.offsets[0] - param.start) for run in runs)
        boxes = (in_shape(run, first, param.shape, flat.dtype) for run, first in firsts)
        found.append(tuple(itertools.chain.from_iterable(boxes)))
    pieces, copies = found
    return StoredTensor("", flat.dtype, param.shape, pieces, copies)
