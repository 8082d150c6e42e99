"""Flat parameters in per-rank files: those of FSDP1's local state dicts.

A flat parameter is the parameters of one wrapper one after the other, and each rank has a part of
it. The files do not say which parameters these are: names and shapes come from elsewhere, and must
add up to the size of the flat parameter."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..._layout.box import Box
from ..._layout.spec import FlatLayout, Interval, ParamSpec, between, flat_layout
from ...errors import CheckpointError
from .._texts import joined
from .archive import Piece, Span, StoredTensor
from .merging import sample
from .reading import Files, read_box
from .shapes import Shapes
from .sharded_records import RankPart, in_shape
from .tree import plain_name

_FLAT = re.compile(r"_?flat_param(_\d+)?")  # with a number: a unit with several of them
_MAX_LEVELS = 4
_PADDING = 42  # torch fills gaps with this value
_ALIGN_NBYTES = 16
_ITEM_SIZES = (8, 4, 2, 1)  # of the dtypes that gaps may have been made for

_Node = dict[Any, Any]
_Names = dict[str, str]


class FlatParams:
    """The flat parameters in the values of all ranks. Raises CheckpointError and OSError."""

    def __init__(self, shapes: Shapes | None, where: Path, files: Files) -> None:
        self._shapes, self._where, self._files = shapes, where, files
        self._found: dict[tuple[tuple[str, ...], Any], _Flat] = {}  # by path of the node, and key

    def take_views(self, tree: Any) -> None:
        """Note the flat parameters of one rank, and remove the entries that view their memory: with
        use_orig_params=True each parameter has one, and a tied one has several."""
        for path, node in _dicts(tree):
            flat_keys = [key for key, value in node.items() if _is_flat(key, value)]
            for key in flat_keys:
                flat = self._found.setdefault((path, key), _Flat(node[key].inside))
                for name, value in [*node.items()]:
                    place = _place_in(node[key], value) if isinstance(value, StoredTensor) else None
                    if place is not None:
                        flat.views[plain_name(str(name))] = place
                        del node[name]

    def unflatten(self, tree: Any) -> None:
        """Put the parameters in the place of flat parameters, in the merged values."""
        nodes = dict(_dicts(tree))
        for (path, key), flat in self._found.items():
            others = [other for at, other in self._found if at == path and other != key]
            self._unflatten(nodes[path], key, flat, others)

    def _unflatten(self, node: _Node, key: Any, flat: _Flat, others: Sequence[Any]) -> None:
        values: StoredTensor = node.pop(key)
        layout: Sequence[ParamSpec]
        prefix, ties = _prefix(key), _Names(self._shapes.ties if self._shapes else {})
        if flat.inside is not None:
            layout = [
                dataclasses.replace(param, name=_under(prefix, plain_name(param.name)))
                for param in flat.inside.params
            ]
        else:
            names = self._names(node, prefix, [_prefix(other) for other in others])
            layout, by_value = self._layout(key, names, values)
            ties |= by_value
        params = {param.name: param for param in layout}
        params |= {name: params[first] for name, first in ties.items() if first in params}
        for name, place in flat.views.items():
            params[name] = next(p for p in layout if p.start <= place < p.place.stop)
        for name in [name for name in node if plain_name(str(name)) in params]:
            del node[name]
        for name, param in params.items():
            node[name] = _cut(values, param)

    def _names(self, node: _Node, prefix: str, others: Sequence[str]) -> list[str]:
        """Return the names of the parameters that a flat one holds: those of its wrapper without
        inner ones, unless they have an entry of their own."""
        entries = {} if self._shapes is None else self._shapes.entries
        inner = [other for other in others if other != prefix and _is_in(other, prefix)]
        whole = {
            plain_name(str(name)): value.shape
            for name, value in node.items()
            if isinstance(value, StoredTensor)
        }
        return [
            name
            for name, shape in entries.items()
            if shape.is_buffer is not True
            and whole.get(name) != shape.sizes
            and _is_in(name, prefix)
            and not any(_is_in(name, other) for other in inner)
        ]

    def _layout(
        self, key: Any, names: list[str], values: StoredTensor
    ) -> tuple[Sequence[ParamSpec], _Names]:
        """Return where the parameters lie in a flat one, and further names of some of them."""
        found, ties = self._fitting(names, values), _Names()
        if not found and (ties := self._ties_by_value(names, values.numel)):
            found = self._fitting([name for name in names if name not in ties], values)
        if len(found) != 1:
            raise self._unclear(key, names, values.numel, len(found))
        if self._shapes is not None and not self._shapes.is_ordered and len(names) > 1:
            raise self._error(
                f"The order of the parameters in {key} is not known.",
                "shapes in the order of the modules",
                f"those of a safetensors file, which sorts them: {', '.join(names[:4])}, ...",
            )
        return found[0], ties

    def _ties_by_value(self, names: list[str], numel: int) -> _Names:
        """Return matrices that have the values of an earlier one where the shapes come from, with
        the name of that one: torch's full state dicts do not say which parameters are tied.

        Vectors are often equal by chance, and so are matrices larger than what is too much."""
        if self._shapes is None or self._shapes.source is None:
            return {}
        stored = self._shapes.source.tensors
        most = sum(stored[name].numel + _ALIGN_NBYTES for name in names) - numel
        firsts: dict[Any, str] = {}
        ties = {}
        for name in names:
            tensor = stored[name]
            if len(tensor.shape) > 1 and 0 < tensor.numel <= most:
                content = (tensor.dtype, tensor.shape, sample(tensor, self._files))
                if (first := firsts.setdefault(content, name)) != name:
                    ties[name] = first
        return ties

    def _fitting(self, names: list[str], values: StoredTensor) -> list[tuple[ParamSpec, ...]]:
        """Return the layouts whose sizes add up, with padding in their gaps and nowhere else."""
        if self._shapes is None:
            return []
        shapes = [self._shapes.entries[name].sizes for name in names]
        num_ranks = len({piece.holder for piece in values.pieces})
        found: dict[tuple[ParamSpec, ...], None] = {}
        for align in (1, *(_ALIGN_NBYTES // size for size in _ITEM_SIZES)):
            params = flat_layout(names, shapes, ranks=1, align=align).params
            rest = values.numel - (params[-1].place.stop if params else 0)
            if (rest == 0 or (align > 1 and 0 < rest < num_ranks)) and self._is_padded(
                params, values
            ):
                found[params] = None
        return [*found]

    def _is_padded(self, params: Sequence[ParamSpec], values: StoredTensor) -> bool:
        gaps = between((param.place for param in params), values.numel)
        ends = [Interval(p.place.stop - 1, p.place.stop) for p in params if p.numel and gaps]
        return all(self._is_filled(values, gap) for gap in gaps) and not any(
            self._is_filled(values, end) for end in ends
        )

    def _is_filled(self, values: StoredTensor, part: Interval) -> bool:
        found = read_box(values, Box((part.start,), (part.numel,)), self._files)
        return bool((found == _PADDING).all())

    def _unclear(self, key: Any, names: list[str], numel: int, num: int) -> CheckpointError:
        if self._shapes is None:
            got = "no shapes: local state dicts of FSDP1 do not hold them"
        elif num:
            got = f"{num} ways to lay out its parameters in {numel} elements"
        else:
            sizes = [math.prod(self._shapes.entries[name].sizes) for name in names]
            parts = [f"{name} {size}" for name, size in zip(names, sizes, strict=True)]
            got = (
                f"{numel} elements, but its {len(parts)} parameters have {sum(sizes)}: "
                f"{joined(parts, 20, ', ')}"
            )
        return self._error(
            f"The parameters in {key} cannot be told apart.",
            "the shapes of the model that was wrapped, which add up",
            got,
        )

    def _error(self, what: str, expected: str, got: str) -> CheckpointError:
        return CheckpointError.of(
            what,
            expected=expected,
            got=got,
            where=str(self._where),
            fix="write the shapes with `fsdp-compat shapes my.module:make_model -o model.json`, "
            "and pass --shapes model.json; or a full checkpoint of torch.save of the same model",
        )


@dataclasses.dataclass
class _Flat:
    """A flat parameter."""

    inside: FlatLayout | None  # if its file says where its parameters lie
    views: dict[str, int] = dataclasses.field(default_factory=dict)
    # ^ where in it the entries begin that view its memory


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


def _place_in(flat: RankPart, view: StoredTensor) -> int | None:
    """Return the element of a flat parameter that a tensor begins with in memory, or None."""
    source = view.pieces[0].source
    for part in flat.pieces if view.numel else ():
        if isinstance(part.source, Span) and isinstance(source, Span):
            at = (source.start - part.source.start) // flat.dtype.itemsize
            if source.path == part.source.path and 0 <= at < part.box.numel:
                return part.box.offsets[0] + at
    return None


def _prefix(key: Any) -> str:
    return plain_name(str(key)).rpartition(".")[0]


def _is_in(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _under(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _cut(flat: StoredTensor, param: ParamSpec) -> StoredTensor:
    """Return a parameter of a flat one."""

    box = Box((param.start,), (param.numel,))

    def pieces(of: Sequence[Piece]) -> tuple[Piece, ...]:
        return tuple(
            piece
            for run in dataclasses.replace(flat, pieces=of).pieces_in(box)
            for piece in in_shape(run, run.box.offsets[0] - param.start, param.shape, flat.dtype)
        )

    return StoredTensor("", flat.dtype, param.shape, pieces(flat.pieces), pieces(flat.copies))
