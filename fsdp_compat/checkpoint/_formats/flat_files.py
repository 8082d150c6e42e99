"""Flat parameters in per-rank files: those of FSDP1's local state dicts.

A flat parameter holds the parameters of one wrapper, of which each rank has a part. The files do
not describe them, so shapes come from elsewhere and must add up to its size. With
use_orig_params=True it has gaps, and entries that view its memory tell where the parameters lie.
Otherwise they follow one another in the order of the modules."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..._archive.archive import Archive, LazyPieces, Span, StoredPiece, StoredTensor, pieces_of_run
from ..._layout.box import Box
from ..._layout.spec import FlatLayout, Interval, ParamSpec, flat_layout
from ..._state.units import clean_name as plain_name
from ..._text import joined
from ...errors import CheckpointError
from .sharded_records import RankPart

OF_MODEL = "the model itself"  # kind of an archive of shapes without values
_IN_ORDER = (OF_MODEL, "torch.save")  # kinds of archives in the order of the modules
_FLAT = re.compile(r"_?flat_param(_\d+)?")  # with a number: a unit with several of them
_FLAT_TEXT = "shapes of flat parameters: local state dicts of FSDP1 do not hold them; pass --shapes"
_MAX_LEVELS = 4

_Node = dict[Any, Any]


class FlatParams:
    """The flat parameters in the values of all ranks. shapes: of whole tensors of the unwrapped
    model; without, they stay flat, which is noted in ``left_out``. Raises CheckpointError."""

    def __init__(self, shapes: Archive | None, where: Path) -> None:
        self._stays_flat, self._where = shapes is None, where
        shapes = shapes or Archive(where, OF_MODEL, {})
        self._shapes = {name: tensor.shape for name, tensor in shapes.tensors.items()}
        self._ties, self._is_ordered = shapes.aliases, shapes.kind in _IN_ORDER
        self.left_out: list[str] = []
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
            sizes = self._shapes.get(self._ties.get(name, name))
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
            for name, shape in self._shapes.items()
            if whole.get(name) != shape and name.startswith(prefix) and not name.startswith(inner)
        ]

    def _in_order(self, key: Any, names: list[str], numel: int) -> Sequence[ParamSpec]:
        """Return the parameters one after the other, if they fill a flat one."""
        shapes = [self._shapes[name] for name in names]
        numels = dict(zip(names, map(math.prod, shapes), strict=True))
        if sum(numels.values()) != numel:
            got = f"{numel} elements for {sum(numels.values())}: {_listed(numels)}"
            raise self._unclear(key, got)
        if not self._is_ordered and len(names) > 1:
            raise self._unclear(key, "shapes in a form that loses the order of the parameters")
        return flat_layout(names, shapes, ranks=1, align=1).params

    def _unclear(self, key: Any, got: str) -> CheckpointError:
        return CheckpointError.of(
            f"{key} cannot be split into its parameters.",
            expected="shapes of the model, whose sizes add up to it: local state dicts of FSDP1 "
            "do not hold them",
            got=got if self._shapes else "no shapes",
            where=str(self._where),
            fix="pass shapes (--shapes): a file of torch.save(model.state_dict(), path), of the "
            "same model before wrapping; its values do not matter",
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
    (piece,) = view.pieces
    source = piece.source
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

    def pieces(held: tuple[StoredPiece, ...] | LazyPieces) -> Iterator[StoredPiece]:
        box, itemsize = Box((param.start,), (param.numel,)), flat.dtype.itemsize
        for piece in dataclasses.replace(flat, pieces=held).pieces_in(box):
            first = piece.box.offsets[0] - param.start
            run = Interval(first, first + piece.box.numel)
            yield from pieces_of_run(param.shape, run, piece.source, itemsize, piece.holder)

    found = tuple(pieces(flat.pieces)), tuple(pieces(flat.copies))
    return StoredTensor("", flat.dtype, param.shape, *found)
